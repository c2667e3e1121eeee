//! Who uses a directory: the lock of the `newel up` that runs on it, its `pids.json`, and daemons that outlived an earlier
//! one.
//!
//! Invariants:
//! - At most one `newel up` works on a directory; the lock falls with the process, however it ends.
//! - Daemons left over by a killed `newel up` are named and never touched: they may serve a guest.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::layout::{Layout, write_whole};

/// Held as long as `newel up` runs.
#[derive(Debug)]
pub(super) struct DirLock {
    _file: File,
}

impl DirLock {
    pub(super) fn take(layout: &Layout) -> Result<Self> {
        let path = layout.lock_file();
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut owner = String::new();
                file.read_to_string(&mut owner).with_context(|| format!("cannot read {}", path.display()))?;
                bail!(
                    "another `newel up` (pid {}) runs on {}: stop it first, or choose another --dir",
                    owner.trim(),
                    layout.dir().display()
                );
            }
            Err(error) => return Err(error).with_context(|| format!("cannot lock {}", path.display())),
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { _file: file })
    }
}

/// `{"up": 100, "upstairs": 104, "downstairs-0": 101, …}`: the processes that live now.
pub(super) fn write_pids(layout: &Layout, pids: &BTreeMap<String, u32>) -> Result<()> {
    let text = serde_json::to_string_pretty(pids).context("cannot describe the processes")?;
    write_whole(&layout.pids_file(), &format!("{text}\n"))
}

/// Refuses to go on while daemons of an earlier `newel up` use this directory.
pub(super) fn check_no_leftovers(layout: &Layout) -> Result<()> {
    let left = daemons_using(layout.dir())?;
    if left.is_empty() {
        return Ok(());
    }
    let named: Vec<String> = left.iter().map(|(pid, program)| format!("{program} (pid {pid})")).collect();
    let pids: Vec<String> = left.iter().map(|(pid, _)| pid.to_string()).collect();
    bail!(
        "an earlier `newel up` was killed, and its daemons still hold the regions in {}: {}; stop them with `kill {}`, \
         then run this again",
        layout.dir().display(),
        named.join(", "),
        pids.join(" ")
    )
}

/// Pid and program of every Newel daemon with an argument inside `dir`. The upstairs comes first, as it must be stopped
/// first.
fn daemons_using(dir: &Path) -> Result<Vec<(u32, String)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("cannot list /proc")? {
        let Ok(entry) = entry else { continue };
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process that ended meanwhile has nothing to read, and is not of interest either.
        let Ok(command_line) = std::fs::read(entry.path().join("cmdline")) else { continue };
        if let Some(program) = daemon_in(&command_line, dir) {
            found.push((pid, program));
        }
    }
    found.sort_by_key(|(pid, program)| (program != "newel-upstairs", *pid));
    Ok(found)
}

fn daemon_in(command_line: &[u8], dir: &Path) -> Option<String> {
    let mut arguments = command_line.split(|&byte| byte == 0).map(String::from_utf8_lossy);
    let program = arguments.next()?;
    let program = Path::new(program.as_ref()).file_name()?.to_str()?.to_owned();
    let inside =
        |argument: &str| Path::new(argument.strip_prefix("unix:").unwrap_or(argument)).starts_with(dir);
    (matches!(program.as_str(), "newel-upstairs" | "newel-downstairs")
        && arguments.any(|argument| inside(&argument)))
    .then_some(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_told_by_their_command_line() {
        let check = |arguments: &[&str], expected: Option<&str>| {
            let line = arguments.join("\0");
            assert_eq!(daemon_in(line.as_bytes(), Path::new("/state/a")).as_deref(), expected, "{line:?}");
        };
        check(
            &["/usr/bin/newel-downstairs", "run", "--region", "/state/a/region-0"],
            Some("newel-downstairs"),
        );
        check(&["newel-upstairs", "run", "--status", "unix:/state/a/status.sock"], Some("newel-upstairs"));
        check(&["newel-downstairs", "run", "--region", "/state/ab/region-0"], None);
        check(&["vi", "/state/a/region-0"], None);
        check(&[""], None);
    }

    #[test]
    fn the_second_owner_is_told_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        let first = DirLock::take(&layout).unwrap();
        let error = DirLock::take(&layout).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(first);
        DirLock::take(&layout).unwrap();
    }
}
