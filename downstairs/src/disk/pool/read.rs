//! The read lane: one thread looks up contexts and submits; the reactor takes completions.
//!
//! Invariants:
//! - A read that needs no data is answered without touching the device.
//! - The reactor hands on whole buffers as they are. What has to be packed, checked or read again goes back to the lane's thread.
//! - A read that fails or comes short is tried block by block, so that only bad blocks are missing.
//! - The buffer that the device filled is handed on; it goes back to its pool when the last user drops it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use newel_protocol::BlockState;

use super::gate::Gate;
use super::queue::{Queue, Queued};
use super::{Sink, done};
use crate::core::api::{DiskDone, DiskError, DiskOp, DiskOutcome, OpId};
use crate::disk::engine::{Completion, Payload, Request};
use crate::disk::file::Region;
use crate::disk::lock;
use crate::disk::read::ReadPlan;

pub(super) struct Lane {
    region: Arc<Region>,
    queue: Arc<Queue>,
    sink: Arc<Sink>,
    gate: Gate<Job>,
    /// Of the reactor, kept for its allocation.
    polled: Mutex<Vec<Completion<Job>>>,
    /// What did not simply succeed, for the lane's thread.
    repairs: Mutex<Vec<Repair>>,
}

#[derive(Debug)]
pub(super) struct Job {
    op: OpId,
    plan: ReadPlan,
    arrived: Instant,
}

struct Repair {
    job: Job,
    /// The data, unless it has to be read again.
    data: Option<Bytes>,
    submitted: Instant,
}

impl Lane {
    pub(super) fn new(
        region: &Arc<Region>,
        queue: &Arc<Queue>,
        sink: &Arc<Sink>,
        gate: Gate<Job>,
    ) -> Arc<Self> {
        Arc::new(Self {
            region: Arc::clone(region),
            queue: Arc::clone(queue),
            sink: Arc::clone(sink),
            gate,
            polled: Mutex::default(),
            repairs: Mutex::default(),
        })
    }

    /// The lane's thread.
    pub(super) fn run(&self) {
        let (mut queued, mut refused) = (Vec::new(), Vec::new());
        let mut requests = VecDeque::new();
        while self.queue.take(&mut queued) {
            self.repair();
            let mut answers = Vec::new();
            for Queued { command, at } in queued.drain(..) {
                match self.plan(command.op, &command.kind, at) {
                    Ok(request) => requests.push_back(request),
                    Err(result) => {
                        let now = Instant::now();
                        answers.push(done(command.op, result, at, now, now));
                    }
                }
            }
            self.sink.push(answers);
            while !requests.is_empty() {
                if self.gate.submit(&mut requests, &mut refused) == 0 {
                    self.queue.wait_for_nudge();
                }
                self.sort(&mut refused, &mut Vec::new());
                self.repair();
            }
        }
        self.run_out();
    }

    /// The end: what is in flight is waited for here, since the reactor no longer looks.
    fn run_out(&self) {
        let (mut completions, mut answers) = (Vec::new(), Vec::new());
        while !self.gate.is_idle() && self.gate.wait(&mut completions).is_ok() {
            self.sort(&mut completions, &mut answers);
            self.repair();
        }
        self.repair();
        self.sink.push(answers);
    }

    /// A request, or the answer if none is needed.
    fn plan(&self, op: OpId, kind: &DiskOp, arrived: Instant) -> Result<Request<Job>, Outcome> {
        let DiskOp::Read { range, mode } = kind else {
            let message = "not an operation of this lane".to_owned();
            return Err(Err(DiskError::Io { operation: "a read", message }));
        };
        let plan = self.region.plan_read(*range, *mode).map_err(Err)?;
        let Some(fetch) = plan.fetch else {
            return Err(Ok(outcome(self.region.finish_read(plan, Bytes::new()))));
        };
        let payload = Payload::Read(self.region.storage().buffers.take(fetch.bytes()));
        let offset = self.region.layout().block_offset(fetch.start);
        Ok(Request { offset, payload, user: Job { op, plan, arrived } })
    }

    /// Takes what the kernel has completed. Called by the reactor: neither waits nor touches the disk.
    pub(super) fn poll(&self, into: &mut Vec<DiskDone>) {
        let mut completions = lock(&self.polled);
        match self.gate.poll(&mut completions) {
            Ok(waiting) => {
                if self.sort(&mut completions, into) || waiting {
                    self.queue.nudge();
                }
            }
            Err(error) => {
                // Nothing will complete any more; only a kernel that took our ring away says so.
                self.region
                    .fail(DiskError::Io { operation: "taking completions", message: error.to_string() });
                self.queue.nudge();
            }
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
                Some(data) if job.plan.is_plain() => {
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

    /// Does what is left to this thread.
    fn repair(&self) {
        let repairs = std::mem::take(&mut *lock(&self.repairs));
        let answers = repairs.into_iter().map(|Repair { job, data, submitted }| {
            let found = match data {
                Some(data) => self.region.finish_read(job.plan, data),
                None => self.region.read_block_by_block(job.plan),
            };
            done(job.op, Ok(outcome(found)), job.arrived, submitted, Instant::now())
        });
        self.sink.push(answers.collect());
    }
}

type Outcome = Result<DiskOutcome, DiskError>;

fn outcome((states, data): (Vec<BlockState>, Bytes)) -> DiskOutcome {
    DiskOutcome::Read { states, data }
}
