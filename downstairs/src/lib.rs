//! The downstairs: keeps one replica of a volume in a region on local disk.
//!
//! [`core`] is pure and holds every decision; [`disk`] knows the region's format and carries out the core's disk
//! operations; `shell` does the network I/O and exists only with the `daemon` feature.

pub mod core;
pub mod disk;
#[cfg(feature = "daemon")]
pub mod shell;
