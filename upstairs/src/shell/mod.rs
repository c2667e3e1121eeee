//! The I/O shell: NBD front end, links to the replicas, status, and the driver of the core.

pub mod guest;
