//! The two languages Newel speaks, pure: the replica [`wire`] between an upstairs and its downstairs, and [`nbd`]
//! between a guest and the upstairs. Beside them what both daemons measure of themselves ([`lag`]), as the wire carries it.
//!
//! Invariants:
//! - Nothing here does I/O, reads a clock or depends on another crate of this workspace.
//! - No input from a peer causes a panic, and every length is bounded before anything is allocated for it.

pub mod crc;
pub mod lag;
pub mod nbd;
pub mod types;
pub mod wire;

pub use types::{
    BLOCK_BYTES, BlockKind, BlockRange, BlockState, EXTENT_BLOCKS, EXTENT_BYTES, ExtentId, Generation, JobId,
    MAX_JOB_BLOCKS, MAX_JOB_BYTES, Version,
};
