//! The read lane: one thread looks up contexts and submits; the reactor takes completions.
//!
//! Invariants:
//! - A read that needs no data is answered without touching the device; by the reactor, if its contexts are at hand.
//! - The reactor hands on whole buffers as they are. What has to be packed, checked or read again goes back to the lane's thread.
//! - A read that fails or comes short is tried block by block, so that only bad blocks are missing.
//! - The buffer that the device filled is handed on; it goes back to its pool when the last user drops it.
//! - Through the page cache (`--cache page`) goes only data that has a checksum, and it counts only if it matches that: otherwise it is
//!   read again with direct I/O, and whatever that finds is the answer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use newel_protocol::wire::ReadMode;
use newel_protocol::{BlockState, JobId};

use super::gate::Gate;
use super::probes::{Jobs, Operation};
use super::queue::{Queue, Queued};
use super::{Sink, done};
use crate::core::api::{DiskCommand, DiskDone, DiskError, DiskOp, DiskOutcome, OpId};
use crate::disk::engine::{Completion, Payload, Request};
use crate::disk::file::{CachedData, Region};
use crate::disk::lock;
use crate::disk::read::ReadPlan;

/// Larger reads from the cache are copied and checked on other threads than the reactor's: this takes some 20 µs.
const MAX_CACHED_BYTES: usize = 128 << 10;

pub(super) struct Lane {
    region: Arc<Region>,
    queue: Arc<Queue>,
    sink: Arc<Sink>,
    direct: Gate<Job>,
    cached: Option<Cached>,
    /// Of the reactor, kept for its allocation.
    polled: Mutex<Vec<Completion<Job>>>,
    /// What did not simply succeed, for the lane's thread.
    repairs: Mutex<Vec<Repair>>,
}

/// The way through the page cache.
pub(super) struct Cached {
    pub data: CachedData,
    pub gate: Gate<Job>,
}

#[derive(Debug)]
pub(super) struct Job {
    op: OpId,
    job: Option<JobId>,
    plan: ReadPlan,
    arrived: Instant,
    from_cache: bool,
}

impl Jobs for Job {
    const OPERATION: Operation = Operation::Read;

    fn each(&self, mut tell: impl FnMut(JobId, usize)) {
        if let (Some(job), Some(fetch)) = (self.job, self.plan.fetch) {
            tell(job, fetch.bytes());
        }
    }
}

struct Repair {
    job: Job,
    /// The data, unless it has to be read again.
    data: Option<Bytes>,
    submitted: Instant,
}

/// What the lane's thread is about to submit.
#[derive(Default)]
struct Staged {
    direct: VecDeque<Request<Job>>,
    cached: VecDeque<Request<Job>>,
}

impl Staged {
    fn is_empty(&self) -> bool {
        self.direct.is_empty() && self.cached.is_empty()
    }
}

impl Lane {
    pub(super) fn new(
        region: &Arc<Region>,
        queue: &Arc<Queue>,
        sink: &Arc<Sink>,
        direct: Gate<Job>,
        cached: Option<Cached>,
    ) -> Arc<Self> {
        Arc::new(Self {
            region: Arc::clone(region),
            queue: Arc::clone(queue),
            sink: Arc::clone(sink),
            direct,
            cached,
            polled: Mutex::default(),
            repairs: Mutex::default(),
        })
    }

    /// Called by the reactor: the answer, if it is at hand. Never waits.
    pub(super) fn try_now(&self, command: &DiskCommand, arrived: Instant) -> Option<DiskDone> {
        let DiskOp::Read { range, mode } = command.kind else { return None };
        // Without the cache only contexts are at hand; to look for more would be work done twice.
        if range.bytes() > MAX_CACHED_BYTES || (self.cached.is_none() && mode != ReadMode::Contexts) {
            return None;
        }
        let plan = self.region.plan_read_now(range, mode)?;
        let data = match (plan.fetch, &self.cached) {
            (None, _) => Bytes::new(),
            (Some(_), None) => return None,
            (Some(fetch), Some(cached)) => {
                let mut buffer = self.region.storage().buffers.take(fetch.bytes());
                let offset = self.region.layout().block_offset(fetch.start);
                if !cached.data.read_now(offset, &mut buffer) || !self.region.matches(&plan, &buffer) {
                    return None;
                }
                Bytes::from_owner(buffer)
            }
        };
        let found = self.region.finish_read(plan, data);
        Some(done(command.op, Ok(outcome(found)), arrived, arrived, arrived))
    }

    /// The lane's thread.
    pub(super) fn run(&self) {
        let mut queued = Vec::new();
        let mut staged = Staged::default();
        while self.queue.take(&mut queued) {
            self.repair(&mut staged);
            let mut answers = Vec::new();
            for Queued { command, at } in queued.drain(..) {
                if let Err(result) = self.plan(&command, at, &mut staged) {
                    let now = Instant::now();
                    answers.push(done(command.op, result, at, now, now));
                }
            }
            self.sink.push(answers);
            while !staged.is_empty() {
                if self.submit(&mut staged) == 0 {
                    self.queue.wait_for_nudge();
                }
                self.repair(&mut staged);
            }
        }
        self.run_out(&mut staged);
    }

    fn submit(&self, staged: &mut Staged) -> usize {
        let mut refused = Vec::new();
        let mut count = 0;
        if !staged.direct.is_empty() {
            count += self.direct.submit(&mut staged.direct, &mut refused);
        }
        if let (Some(cached), false) = (&self.cached, staged.cached.is_empty()) {
            count += cached.gate.submit(&mut staged.cached, &mut refused);
        }
        // None of these is whole, so none is answered here.
        self.sort(&mut refused, &mut Vec::new());
        count
    }

    /// The end: what is in flight is waited for here, since the reactor no longer looks.
    fn run_out(&self, staged: &mut Staged) {
        let (mut completions, mut answers) = (Vec::new(), Vec::new());
        let gates =
            || [self.cached.as_ref().map(|cached| &cached.gate), Some(&self.direct)].into_iter().flatten();
        loop {
            self.repair(staged);
            self.submit(staged);
            let Some(busy) = gates().find(|gate| !gate.is_idle()) else { break };
            if busy.wait(&mut completions).is_err() {
                break;
            }
            self.sort(&mut completions, &mut answers);
        }
        self.repair(staged);
        self.sink.push(answers);
    }

    /// Stages a request, or gives the answer if none is needed.
    fn plan(&self, command: &DiskCommand, arrived: Instant, staged: &mut Staged) -> Result<(), Outcome> {
        let DiskOp::Read { range, mode } = &command.kind else {
            let message = "not an operation of this lane".to_owned();
            return Err(Err(DiskError::Io { operation: "a read", message }));
        };
        let plan = self.region.plan_read(*range, *mode).map_err(Err)?;
        if plan.fetch.is_none() {
            return Err(Ok(outcome(self.region.finish_read(plan, Bytes::new()))));
        }
        // What is to be verified is on the medium, and what has no checksum can't be told from what is stale.
        let from_cache = self.cached.is_some() && *mode == ReadMode::Data;
        self.stage(Job { op: command.op, job: command.job, plan, arrived, from_cache }, staged);
        Ok(())
    }

    fn stage(&self, job: Job, staged: &mut Staged) {
        let Some(fetch) = job.plan.fetch else { return };
        let payload = Payload::Read(self.region.storage().buffers.take(fetch.bytes()));
        let offset = self.region.layout().block_offset(fetch.start);
        let to = if job.from_cache { &mut staged.cached } else { &mut staged.direct };
        to.push_back(Request { offset, payload, user: job });
    }

    /// Takes what the kernel has completed. Called by the reactor: neither waits nor touches the disk.
    pub(super) fn poll(&self, into: &mut Vec<DiskDone>) {
        let mut completions = lock(&self.polled);
        let direct = self.direct.poll(&mut completions);
        let cached = self.cached.as_ref().map_or(Ok(false), |cached| cached.gate.poll(&mut completions));
        let mut nudge = self.sort(&mut completions, into);
        for result in [direct, cached] {
            nudge |= result.unwrap_or_else(|error| {
                // Nothing will complete any more; only a kernel that took our ring away says so.
                let message = error.to_string();
                self.region.fail(DiskError::Io { operation: "taking completions", message });
                true
            });
        }
        if nudge {
            self.queue.nudge();
        }
    }

    /// Answers what is simple; true if something is left to the lane's thread.
    fn sort(&self, completions: &mut Vec<Completion<Job>>, into: &mut Vec<DiskDone>) -> bool {
        if completions.is_empty() {
            return false;
        }
        let now = Instant::now();
        let mut repairs = Vec::new();
        for Completion { payload, user: job, result, submitted } in completions.drain(..) {
            let data = match (result, payload) {
                (Ok(read), Payload::Read(buffer)) if read == buffer.len() => Some(Bytes::from_owner(buffer)),
                _ => None,
            };
            match data {
                Some(data) if job.plan.is_plain() && self.is_sound(&job, &data) => {
                    let found = self.region.finish_read(job.plan, data);
                    into.push(done(job.op, Ok(outcome(found)), job.arrived, submitted, now));
                }
                data => repairs.push(Repair { job, data, submitted }),
            }
        }
        let found = !repairs.is_empty();
        lock(&self.repairs).append(&mut repairs);
        found
    }

    /// From the medium, or from the cache and checked. What takes long to check is left to the lane's thread.
    fn is_sound(&self, job: &Job, data: &[u8]) -> bool {
        !job.from_cache || (data.len() <= MAX_CACHED_BYTES && self.region.matches(&job.plan, data))
    }

    /// Does what is left to this thread.
    fn repair(&self, staged: &mut Staged) {
        let repairs = std::mem::take(&mut *lock(&self.repairs));
        let mut answers = Vec::with_capacity(repairs.len());
        for Repair { mut job, data, submitted } in repairs {
            if job.from_cache && !data.as_ref().is_some_and(|data| self.region.matches(&job.plan, data)) {
                self.forget(&job.plan);
                job.from_cache = false;
                self.stage(job, staged);
                continue;
            }
            let found = match data {
                Some(data) => self.region.finish_read(job.plan, data),
                None => self.region.read_block_by_block(job.plan),
            };
            answers.push(done(job.op, Ok(outcome(found)), job.arrived, submitted, Instant::now()));
        }
        self.sink.push(answers);
    }

    fn forget(&self, plan: &ReadPlan) {
        if let (Some(cached), Some(fetch)) = (&self.cached, plan.fetch) {
            cached.data.forget(self.region.layout().block_offset(fetch.start), fetch.bytes() as u64);
        }
    }
}

type Outcome = Result<DiskOutcome, DiskError>;

fn outcome((states, data): (Vec<BlockState>, Bytes)) -> DiskOutcome {
    DiskOutcome::Read { states, data }
}
