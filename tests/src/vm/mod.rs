//! A Debian guest under QEMU, with a kernel, systemd and block devices of its own, for what no process on this host can show.
//!
//! Invariants:
//! - The processor is emulated (TCG), so that it runs wherever QEMU does; nothing in it has a deadline below a minute.
//! - The guest has no network but its own loopback. It is asked through a virtual serial port.
//! - A machine leaves no process and no file behind, unless its test failed; then its console and journal are told.

mod image;
mod machine;

pub use image::{Image, Suite};
pub use machine::{Disk, Machine, Said};
