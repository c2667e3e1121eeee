//! The replication core.

pub mod api;
pub mod config;
pub mod status;
