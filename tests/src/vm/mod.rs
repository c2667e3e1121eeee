//! A Debian guest under QEMU, with a kernel, systemd and block devices of its own, for what no process on this host can show.
//!
//! Invariants:
//! - The processor is emulated (TCG), so that it runs wherever QEMU does; nothing in it has a deadline below a minute.
//! - The guest has no network but its own loopback. It is asked through a virtual serial port.
//! - A machine leaves no process and no file behind, unless its test failed; then its console and journal are told.

mod image;
mod machine;
pub mod package;
mod pulse;
mod write_log;

use std::path::Path;

use crate::skip::{have, skipped};

pub use image::{Image, Suite};
pub use machine::{Disk, Machine, Said};
pub use pulse::anew_if_frozen;
pub use write_log::{Loss, WriteLog};

/// A guest of this suite that is switched off, with the package on a disk. `None`, and the test recorded as skipped, if that can't be
/// had here.
pub fn guest(test: &str, suite: Suite, disks: impl FnOnce(&Path) -> Vec<Disk>) -> Option<Machine> {
    if std::env::var_os("NEWEL_VM").is_some_and(|wanted| wanted == "0") {
        skipped(test, "NEWEL_VM=0 leaves out what takes a virtual machine many minutes");
        return None;
    }
    if !have(test, &["qemu-system-x86_64", "dpkg-deb", "dpkg-shlibdeps"]) {
        return None;
    }
    let image = Image::of(test, suite)?;
    Some(Machine::new(image, |dir| {
        let mut all = disks(dir);
        all.push(package::disk(dir));
        all
    }))
}

/// Programs of a test in `tests/vm`, for the guest's `/usr/local/bin`.
pub const JOURNAL: (&str, &str) = ("journal", include_str!("../../vm/journal"));
pub const BLOCKS: (&str, &str) = ("blocks", include_str!("../../vm/blocks"));
