//! The upstairs: serves one volume over NBD and replicates it to three downstairs.
//!
//! [`core`] is pure and holds every decision; `shell` does the I/O and exists only with the `daemon` feature.

pub mod core;
#[cfg(feature = "daemon")]
pub mod shell;
