//! How not to do it: a pool whose writes are handed to the kernel on the caller's thread, which is the reactor's. Built for tests
//! only (feature `test-faults`): what measures stalls has to notice this one.
//!
//! Invariants:
//! - Writes go to the kernel by the same call as in [`super::pool`], but before [`InlinePool::submit`] returns. Everything else is
//!   the pool's.
//! - Contexts follow the data, on the same thread.
//!
//! Left to others: everything that a real replica needs beside (`pool`); nobody should keep data behind this.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use newel_protocol::wire::StageTimes;

use super::aio::Ring;
use super::change::Change;
use super::engine::{Completion, Engine, EngineKind, Payload, Request};
use super::error::RegionError;
use super::file::Region;
use super::pool::{Pool, PoolOptions, SubmitTimesByLane, Wake};
use crate::core::api::{DiskCommand, DiskDone, DiskError, DiskOp, DiskOutcome, OpId};

/// Far more than a session has in flight at once: the one thread must never wait for room that only itself makes.
const DEPTH: u32 = 4096;

pub struct InlinePool {
    pool: Pool,
    region: Arc<Region>,
    ring: Ring<Write>,
    wake: Wake,
    /// Answers that were not fetched yet.
    answers: Vec<DiskDone>,
}

#[derive(Debug)]
struct Write {
    op: OpId,
    change: Change,
}

impl std::fmt::Debug for InlinePool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InlinePool").field("pool", &self.pool).finish_non_exhaustive()
    }
}

impl InlinePool {
    pub fn start(region: Arc<Region>, wake: Wake) -> Result<Self, RegionError> {
        let pool = Pool::start(Arc::clone(&region), PoolOptions::default(), Arc::clone(&wake))?;
        let path = region.storage().path().display().to_string();
        let raised = pool.completion_fd().try_clone_to_owned();
        let ring = raised
            .and_then(|raised| Ring::new(region.storage().direct_file()?.into(), DEPTH, Some(raised)))
            .map_err(|source| RegionError::Engine { path, engine: EngineKind::Aio, depth: DEPTH, source })?;
        Ok(Self { pool, region, ring, wake, answers: Vec::new() })
    }

    /// Takes all commands, and blocks as long as the kernel likes.
    pub fn submit(&mut self, commands: &mut Vec<DiskCommand>) {
        let mut requests = VecDeque::new();
        for DiskCommand { op, kind, .. } in
            commands.extract_if(.., |command| matches!(command.kind, DiskOp::Write { .. }))
        {
            match self.plan(op, kind) {
                Ok(request) => requests.extend(request),
                Err(error) => self.answers.push(done(op, Err(error))),
            }
        }
        let mut refused = Vec::new();
        while !requests.is_empty() {
            let submitted = self.ring.submit(&mut requests, usize::MAX, &mut refused);
            self.pool.submit_times().writes.record(submitted, DEPTH as usize);
        }
        self.take(&mut refused);
        if !self.answers.is_empty() {
            (self.wake)();
        }
        self.pool.submit(commands);
    }

    /// The one request of a write, whose blocks are all older than it: tests write nothing else.
    fn plan(&self, op: OpId, kind: DiskOp) -> Result<Option<Request<Write>>, DiskError> {
        let DiskOp::Write { range, version, crcs, data } = kind else { return Ok(None) };
        let change = self.region.plan_write(range, version, &crcs, data.len())?;
        let offset = self.region.layout().block_offset(range.start);
        let payload = Payload::WriteCopy(self.region.storage().aligned_copy(&data));
        Ok(Some(Request { offset, payload, user: Write { op, change } }))
    }

    pub fn completed(&mut self, into: &mut Vec<DiskDone>) {
        let mut completions = Vec::new();
        if let Err(error) = self.ring.poll(&mut completions) {
            self.region.fail(DiskError::Io { operation: "io_getevents", message: error.to_string() });
        }
        self.take(&mut completions);
        into.append(&mut self.answers);
        self.pool.completed(into);
    }

    fn take(&mut self, completions: &mut Vec<Completion<Write>>) {
        for Completion { payload, user: Write { op, change }, result, .. } in completions.drain(..) {
            let written = match result {
                Ok(written) if written == payload.len() => self.region.finish(&[&change]),
                short => Err(DiskError::Io { operation: "a write", message: format!("{short:?}") }),
            };
            self.region.end(&change);
            self.answers.push(done(op, written.map(|()| DiskOutcome::Done)));
        }
    }

    pub fn completion_fd(&self) -> BorrowedFd<'_> {
        self.pool.completion_fd()
    }

    pub fn submit_times(&self) -> Arc<SubmitTimesByLane> {
        self.pool.submit_times()
    }
}

fn done(op: OpId, result: Result<DiskOutcome, DiskError>) -> DiskDone {
    DiskDone { op, result, times: StageTimes::default() }
}
