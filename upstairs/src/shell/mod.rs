//! The I/O shell: NBD front end, links to the replicas, status, and the driver of the core.
//!
//! It moves events in and actions out, on one reactor thread, and decides nothing about order, quorum, retry or throttling.

mod admin;
pub mod cli;
mod config;
mod driver;
pub mod guest;
mod lag;
mod link;
mod metrics;
pub mod nbd;
mod page;
mod run;
mod scribe;
mod status_page;
