//! A file system of limited size, gone with the test.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{path, sh};

#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// A tmpfs on a new directory.
    #[track_caller]
    pub fn mount(at: &Path, mib: u32) -> Self {
        std::fs::create_dir(at).unwrap_or_else(|error| panic!("{}: {error}", at.display()));
        let size = format!("size={mib}m");
        sh("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", &at.display().to_string()]).ok();
        Self(at.to_owned())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes room.
    #[track_caller]
    pub fn resize(&self, mib: u32) {
        let options = format!("remount,size={mib}m");
        sh("mount", &["-o", &options, &self.0.display().to_string()]).ok();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: on failure a daemon may still have it open for a moment.
        Command::new("umount").arg("-l").arg(&self.0).env("PATH", path()).status().ok();
    }
}
