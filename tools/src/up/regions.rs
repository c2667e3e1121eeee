//! Makes the three regions of a new volume.
//!
//! Invariants:
//! - All three or none: what this run made is removed if it can't make the rest, and a half-made set that was found is
//!   never completed by guess, as an empty region in place of a lost one is not a copy of it.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};

use super::layout::Layout;
use super::volume::Volume;
use crate::signals::Stop;

/// True if the regions exist already, of those replicas that run here.
pub(super) fn present(layout: &Layout, here: impl Fn(usize) -> bool) -> Result<bool> {
    let (mut there, mut missing) = (Vec::new(), Vec::new());
    for (_, region) in layout.regions().into_iter().enumerate().filter(|(replica, _)| here(*replica)) {
        let exists = region.try_exists().with_context(|| format!("cannot look for {}", region.display()))?;
        if exists { there.push(region) } else { missing.push(region) }
    }
    if !there.is_empty() && !missing.is_empty() {
        let names = |paths: &[PathBuf]| {
            paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" and ")
        };
        bail!(
            "the volume in {} is incomplete: {} missing while {} there; put back what is missing, or remove the rest to \
             start with an empty volume",
            layout.dir().display(),
            if missing.len() == 1 {
                format!("{} is", names(&missing))
            } else {
                format!("{} are", names(&missing))
            },
            if there.len() == 1 { format!("{} is", names(&there)) } else { format!("{} are", names(&there)) },
        );
    }
    Ok(missing.is_empty())
}

pub(super) async fn create(
    layout: &Layout,
    volume: &Volume,
    prealloc: Option<&str>,
    program: &std::path::Path,
    stop: &mut Stop,
) -> Result<()> {
    let mut made = Vec::new();
    for region in layout.regions() {
        let result = create_one(&region, volume, prealloc, program, stop).await;
        made.push(region);
        if let Err(error) = result {
            for path in made {
                // Not there is as good as removed; anything else shows at the next start.
                std::fs::remove_file(path).ok();
            }
            return Err(error);
        }
    }
    Ok(())
}

async fn create_one(
    region: &std::path::Path,
    volume: &Volume,
    prealloc: Option<&str>,
    program: &std::path::Path,
    stop: &mut Stop,
) -> Result<()> {
    let mut command = tokio::process::Command::new(program);
    command.arg("create").arg("--region").arg(region);
    command.arg("--size").arg(volume.size_bytes.to_string());
    command.arg("--volume").arg(volume.volume_id.to_string());
    if let Some(prealloc) = prealloc {
        command.arg("--prealloc").arg(prealloc);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .process_group(0);
    let output = tokio::select! {
        output = command.output() => output.with_context(|| format!("cannot run {}", program.display()))?,
        () = stop.requested() => bail!("stopped while {} was being made; nothing is left of it", region.display()),
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("cannot make {}: {}", region.display(), said.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_made_set_names_what_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        assert!(!present(&layout, |_| true).unwrap());
        std::fs::write(layout.region(1), "").unwrap();
        let error = present(&layout, |_| true).unwrap_err().to_string();
        assert!(error.contains("region-0 and ") && error.contains("region-2 are missing"), "{error}");
        std::fs::write(layout.region(0), "").unwrap();
        std::fs::write(layout.region(2), "").unwrap();
        assert!(present(&layout, |_| true).unwrap());
        std::fs::remove_file(layout.region(1)).unwrap();
        assert!(present(&layout, |replica| replica != 1).unwrap(), "a replaced one may be gone");
    }
}
