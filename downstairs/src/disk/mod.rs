//! The region on disk: its format, the rules that keep it honest across crashes, and the pool that does its I/O.
//!
//! Invariants:
//! - Data is written at its home place once, before its contexts; contexts before the answer.
//! - What was flushed survives a power cut; what was answered survives the death of this process.
//! - A block is never reported as verified under a version whose data it does not hold.
//!
//! `downstairs/README.md` has the byte tables and the argument. The format and the rules run over [`Storage`] and need
//! no daemon; files, devices, threads and the command line exist only with the `daemon` feature.
//!
//! Left to others: order, fencing and which extents the activity log holds ([`crate::core`]).

use std::sync::{Mutex, MutexGuard, PoisonError};

mod buffer;
mod cache;
mod change;
mod context;
mod error;
mod execute;
mod format;
mod layout;
mod mark;
mod open;
mod punch;
mod read;
mod region;
mod storage;
mod verify;

#[cfg(feature = "daemon")]
mod aio;
#[cfg(feature = "daemon")]
mod audit;
#[cfg(feature = "daemon")]
pub mod cli;
#[cfg(feature = "daemon")]
mod create;
#[cfg(feature = "daemon")]
mod device;
#[cfg(feature = "daemon")]
mod engine;
#[cfg(feature = "daemon")]
mod file;
#[cfg(feature = "test-faults")]
mod inline;
#[cfg(feature = "daemon")]
mod owner;
#[cfg(feature = "daemon")]
mod pool;
#[cfg(feature = "daemon")]
mod psync;
#[cfg(feature = "daemon")]
mod slots;
#[cfg(feature = "uring")]
mod uring;
#[cfg(feature = "daemon")]
pub mod yardstick;

#[cfg(test)]
#[cfg(feature = "daemon")]
mod engine_tests;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
#[cfg(feature = "daemon")]
mod device_tests;
#[cfg(test)]
#[cfg(feature = "daemon")]
mod file_tests;
#[cfg(test)]
mod mem;

pub use buffer::{AlignedBuf, BufferPool};
pub use change::{Change, Piece};
pub use context::{Context, ContextKind, Pair, fold_digests};
pub use error::RegionError;
pub use format::{FORMAT_VERSION, Header, LOG_SLOTS_PER_RECORD, LogRecord, Page, PageFault};
pub use layout::{DEFAULT_LOG_SLOTS, Layout, LayoutError, MAX_LOG_SLOTS};
pub use open::{OpenReport, Runner, format_on, in_turn};
pub use read::ReadPlan;
pub use region::RegionCore;
pub use storage::Storage;

#[cfg(feature = "daemon")]
pub use create::{CreateOptions, Prealloc, create_region};
#[cfg(feature = "daemon")]
pub use engine::EngineKind;
#[cfg(feature = "daemon")]
pub use file::{FileStorage, OpenOptions, Region};
#[cfg(feature = "test-faults")]
pub use inline::InlinePool;
#[cfg(feature = "daemon")]
pub use pool::{
    CacheMode, LongestSubmit, Pool, PoolOptions, SubmitSnapshot, SubmitTimes, SubmitTimesByLane, Wake,
};

/// A thread that panicked holding one of our locks left the value whole: every critical section here replaces values
/// and none leaves one half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
