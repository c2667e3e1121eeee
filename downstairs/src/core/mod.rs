//! The replica core.

pub mod api;
