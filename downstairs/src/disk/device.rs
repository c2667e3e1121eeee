//! What the kernel says of the queue of the device under a region.
//!
//! Invariants:
//! - A first guess, never relied on: file systems on several devices, networks or memory have no such queue, and devices that share
//!   their queue have less of it.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{major, minor};

const DEVICES: &str = "/sys/dev/block";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceQueue {
    /// Such as `vda` or `nvme0n1p1`.
    pub name: Option<String>,
    /// Requests that it holds before whoever submits has to wait.
    pub requests: Option<usize>,
    /// A larger request takes the place of several.
    pub largest_bytes: Option<usize>,
    /// It takes whole sectors only.
    pub sector_bytes: Option<usize>,
    /// Nobody can write to it, whatever their rights.
    pub read_only: bool,
}

impl DeviceQueue {
    pub(super) fn under(file: &File) -> Self {
        file.metadata().map_or_else(|_| Self::default(), |found| Self::below(&found))
    }

    /// Of the device itself, or that of the file system.
    pub(super) fn below(found: &Metadata) -> Self {
        let device = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
        Self::of(Path::new(DEVICES), major(device), minor(device))
    }

    fn of(devices: &Path, major: u32, minor: u32) -> Self {
        let Ok(home) = devices.join(format!("{major}:{minor}")).canonicalize() else {
            return Self::default();
        };
        let name = home.file_name().map(|name| name.to_string_lossy().into_owned());
        // A partition has the queue of its disk.
        let queue = [Some(home.as_path()), home.parent()].into_iter().flatten();
        let queue = queue.map(|place| place.join("queue")).find(|queue| queue.is_dir());
        let number = |what: &str| -> Option<usize> {
            let text = std::fs::read_to_string(queue.as_deref()?.join(what)).ok()?;
            text.trim().parse().ok().filter(|&number| number > 0)
        };
        let read_only = std::fs::read_to_string(home.join("ro")).is_ok_and(|text| text.trim() == "1");
        let largest_bytes = number("max_sectors_kb").and_then(|kib| kib.checked_mul(1024));
        let sector_bytes = number("logical_block_size");
        Self { name, requests: number("nr_requests"), largest_bytes, sector_bytes, read_only }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn disks_partitions_and_neither() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("devices/pci/block/vda");
        fs::create_dir_all(disk.join("queue")).unwrap();
        fs::create_dir_all(disk.join("vda1")).unwrap();
        fs::write(disk.join("queue/nr_requests"), "63\n").unwrap();
        fs::write(disk.join("queue/max_sectors_kb"), "256\n").unwrap();
        fs::write(disk.join("queue/logical_block_size"), "4096\n").unwrap();
        fs::write(disk.join("ro"), "0\n").unwrap();
        fs::write(disk.join("vda1/ro"), "1\n").unwrap();
        symlink(&disk, sys.path().join("254:0")).unwrap();
        symlink(disk.join("vda1"), sys.path().join("254:1")).unwrap();
        let bare = sys.path().join("devices/virtual/odd");
        fs::create_dir_all(&bare).unwrap();
        symlink(bare, sys.path().join("7:0")).unwrap();
        let check = |(major, minor), name: Option<&str>, known: bool, read_only| {
            let expected = DeviceQueue {
                name: name.map(str::to_owned),
                requests: known.then_some(63),
                largest_bytes: known.then_some(256 << 10),
                sector_bytes: known.then_some(4096),
                read_only,
            };
            assert_eq!(DeviceQueue::of(sys.path(), major, minor), expected);
        };
        check((254, 0), Some("vda"), true, false);
        check((254, 1), Some("vda1"), true, true);
        check((7, 0), Some("odd"), false, false);
        check((0, 38), None, false, false);
    }
}
