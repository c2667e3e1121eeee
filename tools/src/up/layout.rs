//! Where `newel up` keeps what belongs to a volume.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

pub(crate) const REPLICAS: usize = 3;

/// The files of one directory.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    dir: PathBuf,
}

impl Layout {
    pub(crate) fn new(dir: &Path) -> Result<Self> {
        let dir =
            std::path::absolute(dir).with_context(|| format!("no such directory: {}", dir.display()))?;
        Ok(Self { dir })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn region(&self, replica: usize) -> PathBuf {
        self.dir.join(format!("region-{replica}"))
    }

    /// Where the downstairs of a replica takes faults.
    pub(crate) fn control(&self, replica: usize) -> PathBuf {
        self.dir.join(format!("region-{replica}.control"))
    }

    pub(crate) fn regions(&self) -> [PathBuf; REPLICAS] {
        std::array::from_fn(|replica| self.region(replica))
    }

    pub(crate) fn log(&self, role: &str) -> PathBuf {
        self.dir.join(format!("{role}.log"))
    }

    /// Where the upstairs tells of slow I/O.
    pub(crate) fn slow_log(&self) -> PathBuf {
        self.dir.join("slow.jsonl")
    }

    pub(crate) fn volume_file(&self) -> PathBuf {
        self.dir.join("volume.toml")
    }

    pub(crate) fn pids_file(&self) -> PathBuf {
        self.dir.join("pids.json")
    }

    pub(crate) fn lock_file(&self) -> PathBuf {
        self.dir.join("lock")
    }

    pub(crate) fn nbd_socket(&self) -> PathBuf {
        self.dir.join("nbd.sock")
    }

    pub(crate) fn status_socket(&self) -> PathBuf {
        self.dir.join("status.sock")
    }
}

/// `$XDG_STATE_HOME/newel`, or `~/.local/state/newel`.
pub(crate) fn default_dir() -> Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("XDG_STATE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".local/state")))
        .map(|state| state.join("newel"))
        .context("neither XDG_STATE_HOME nor HOME is set: say where with --dir")
}

/// Replaces `path` in one step, so that a reader sees the old content or the new, never a half.
pub(crate) fn write_whole(path: &Path, content: &str) -> Result<()> {
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, content)
        .and_then(|()| std::fs::rename(&fresh, path))
        .with_context(|| format!("cannot write {}", path.display()))
}
