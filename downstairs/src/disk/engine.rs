//! What moves data between memory and the region: three engines behind one trait.
//!
//! Invariants of an engine:
//! - It owns the buffers of every request from its submission to its completion, and nobody else can reach them meanwhile. They lie
//!   on the heap, so that moving their handles does not move them.
//! - At most as many requests are in flight as it was started with. What has no room stays with the caller.
//! - Every request comes back exactly once: from `submit` if it was refused, else from `poll` or `wait`.
//! - One thread submits, and it may be blocked in the kernel. Another takes completions meanwhile, without waiting; the eventfd
//!   tells it when there are some.
//! - Dropping an engine waits for all that is in flight before any buffer is freed.
//!
//! Left to others: what is read and written, how much at once, and what a completion means ([`super::pool`]).

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::aio::Ring;
use super::buffer::AlignedBuf;
use super::psync::Threads;

#[derive(Debug)]
pub(super) enum Payload {
    Write(Bytes),
    WriteCopy(AlignedBuf),
    WriteMany(Vec<Bytes>),
    Read(AlignedBuf),
}

impl Payload {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Write(bytes) => bytes.len(),
            Self::WriteCopy(bytes) | Self::Read(bytes) => bytes.len(),
            Self::WriteMany(pieces) => pieces.iter().map(Bytes::len).sum(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Request<T> {
    pub offset: u64,
    pub payload: Payload,
    pub user: T,
}

#[derive(Debug)]
pub(super) struct Completion<T> {
    pub payload: Payload,
    pub user: T,
    pub result: io::Result<usize>,
    /// When the engine had taken it.
    pub submitted: Instant,
}

/// What one submission did.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Submitted {
    pub requests: usize,
    pub bytes: u64,
    pub took: Duration,
    pub ended: Option<Instant>,
    /// The thread slept in the kernel, which is not the same as being kept from a processor by others.
    pub slept: bool,
}

pub(super) trait Engine<T>: Send + Sync {
    /// Takes up to `count` requests from the front. What has no room stays; what is refused goes to `refused`.
    fn submit(
        &self,
        requests: &mut VecDeque<Request<T>>,
        count: usize,
        refused: &mut Vec<Completion<T>>,
    ) -> Submitted;

    /// Takes the completions there are.
    fn poll(&self, into: &mut Vec<Completion<T>>) -> io::Result<()>;

    /// Waits for a completion, if anything is in flight, and takes all there are.
    fn wait(&self, into: &mut Vec<Completion<T>>) -> io::Result<()>;

    /// Requests submitted whose completion has not been taken.
    fn in_flight(&self) -> usize;

    /// True if what was submitted is carried out even if this process dies at once.
    fn survives_us(&self) -> bool;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// Linux aio: `io_submit` in batches, by one thread for reads and one for writes
    Aio,
    /// Plain reads and writes by a crowd of threads; for file systems without direct I/O
    Psync,
    /// `io_uring` with a kernel thread that submits, and spins while it has work
    #[cfg(feature = "uring")]
    Uring,
}

pub(super) fn start<T: Send + 'static>(
    kind: EngineKind,
    file: File,
    depth: u32,
    eventfd: Option<OwnedFd>,
) -> io::Result<Box<dyn Engine<T>>> {
    match kind {
        EngineKind::Aio => Ok(Box::new(Ring::new(file.into(), depth, eventfd)?)),
        EngineKind::Psync => Ok(Box::new(Threads::start(file, depth, eventfd)?)),
        #[cfg(feature = "uring")]
        EngineKind::Uring => Ok(Box::new(super::uring::Ring::new(file.into(), depth, eventfd)?)),
    }
}
