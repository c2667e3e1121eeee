//! Who holds a region: one process at a time, by an exclusive `flock` on the file or device.
//!
//! Invariants:
//! - The lock is taken before anything of a region is read or written, and falls with the process that holds it.
//! - A refusal names the holder, if the system tells.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::device::DeviceQueue;
use super::error::RegionError;

pub(super) fn lock_exclusively(file: &File, path: &str) -> Result<(), RegionError> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => Err(RegionError::Locked { path: path.to_owned(), pid: holder(file) }),
        Err(error) => Err(RegionError::io("lock it", path, error.into())),
    }
}

/// A block device that another one holds can't even be opened, and one that is read-only looks like one of others.
pub(super) fn open_error(on: &Path, name: &str, error: io::Error) -> RegionError {
    if let Ok(found) = fs::metadata(on)
        && found.file_type().is_block_device()
        && let DeviceQueue { name: device, read_only: true, .. } = DeviceQueue::below(&found)
    {
        let what = format!("device {}", device.unwrap_or_default());
        return RegionError::ReadOnly { path: name.to_owned(), what };
    }
    if error.raw_os_error() != Some(Errno::BUSY.raw_os_error()) {
        return RegionError::io("open it", name, error);
    }
    let path = name.to_owned();
    match File::open(on).ok().and_then(|file| holder(&file)) {
        Some(pid) => RegionError::Locked { path, pid: Some(pid) },
        None => RegionError::Busy { path },
    }
}

/// The process that holds the lock on this file, as `/proc/locks` has it.
fn holder(file: &File) -> Option<u32> {
    let inode = file.metadata().ok()?.ino();
    let locks = fs::read_to_string("/proc/locks").ok()?;
    find_holder(&locks, inode)
}

/// A line reads `1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF`: process, then device and inode.
fn find_holder(locks: &str, inode: u64) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        if words.next()? != "FLOCK" {
            return None;
        }
        let pid = words.nth(2)?.parse().ok()?;
        let found: u64 = words.next()?.rsplit(':').next()?.parse().ok()?;
        (found == inode).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_found() {
        let locks = "1: POSIX  ADVISORY  WRITE 77 08:01:5678 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 9 08:01:99 0 EOF\n";
        let check = |inode, pid| assert_eq!(find_holder(locks, inode), pid);
        check(5678, Some(1234));
        check(5, None);
    }
}
