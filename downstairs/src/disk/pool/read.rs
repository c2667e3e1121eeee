//! The read lane: one thread looks up contexts and submits, one takes completions.
//!
//! Invariants:
//! - A read that needs no data is answered without touching the device.
//! - A read that fails or comes short is tried block by block, so that only bad blocks are missing.
//! - The buffer that the device filled is handed on; it goes back to its pool when the last user drops it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use newel_protocol::BlockState;

use super::queue::{Queue, Queued};
use super::{Sink, SubmitTimesByLane, done};
use crate::core::api::{DiskDone, DiskError, DiskOp, DiskOutcome, OpId};
use crate::disk::aio::{Batch, Completion, Payload, Request, Ring};
use crate::disk::error::RegionError;
use crate::disk::file::Region;
use crate::disk::read::ReadPlan;

pub(super) struct Lane {
    region: Arc<Region>,
    queue: Arc<Queue>,
    sink: Arc<Sink>,
    times: Arc<SubmitTimesByLane>,
    ring: Ring<Option<Job>>,
}

struct Job {
    op: OpId,
    plan: ReadPlan,
    arrived: Instant,
}

impl Lane {
    pub(super) fn new(
        region: &Arc<Region>,
        queue: &Arc<Queue>,
        sink: &Arc<Sink>,
        times: &Arc<SubmitTimesByLane>,
        depth: u32,
    ) -> Result<Arc<Self>, RegionError> {
        let storage = region.storage();
        let fail = |source| RegionError::Aio { path: storage.path().display().to_string(), depth, source };
        let ring = storage.direct_fd().and_then(|file| Ring::new(file, depth, None)).map_err(fail)?;
        Ok(Arc::new(Self {
            region: Arc::clone(region),
            queue: Arc::clone(queue),
            sink: Arc::clone(sink),
            times: Arc::clone(times),
            ring,
        }))
    }

    /// The submitting thread.
    pub(super) fn run(&self) {
        let mut queued = Vec::new();
        let mut requests = VecDeque::new();
        let (mut batch, mut refused) = (Batch::default(), Vec::new());
        while self.queue.take(&mut queued) {
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
                let submitted = self.ring.submit(&mut requests, &mut batch, &mut refused);
                self.times.reads.record(submitted);
            }
            self.complete(&mut refused);
        }
        let payload = Payload::Read(self.region.storage().buffers.take(4096));
        requests.push_back(Request { offset: 0, payload, user: None });
        self.ring.submit(&mut requests, &mut batch, &mut refused);
    }

    /// A request, or the answer if none is needed.
    fn plan(&self, op: OpId, kind: &DiskOp, arrived: Instant) -> Result<Request<Option<Job>>, Outcome> {
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
        Ok(Request { offset, payload, user: Some(Job { op, plan, arrived }) })
    }

    /// The thread that takes completions.
    pub(super) fn reap(&self) {
        let mut events = self.ring.events();
        let mut completions = Vec::new();
        loop {
            if let Err(error) = self.ring.wait(&mut events, &mut completions) {
                // Nothing will complete any more; only a kernel that took our ring away says so.
                self.region.fail(DiskError::Io { operation: "io_getevents", message: error.to_string() });
                return;
            }
            if self.complete(&mut completions) {
                break;
            }
        }
        while !self.ring.is_idle() && self.ring.wait(&mut events, &mut completions).is_ok() {
            self.complete(&mut completions);
        }
    }

    /// Answers; true if the last message was among the completions.
    fn complete(&self, completions: &mut Vec<Completion<Option<Job>>>) -> bool {
        if completions.is_empty() {
            return false;
        }
        let now = Instant::now();
        let mut last = false;
        let mut answers: Vec<DiskDone> = Vec::with_capacity(completions.len());
        for Completion { payload, user, result, submitted } in completions.drain(..) {
            let Some(Job { op, plan, arrived }) = user else {
                last = true;
                continue;
            };
            let found = match (result, payload) {
                (Ok(read), Payload::Read(buffer)) if read == buffer.len() => {
                    self.region.finish_read(plan, Bytes::from_owner(buffer))
                }
                _ => self.region.read_block_by_block(plan),
            };
            answers.push(done(op, Ok(outcome(found)), arrived, submitted, now));
        }
        self.sink.push(answers);
        last
    }
}

type Outcome = Result<DiskOutcome, DiskError>;

fn outcome((states, data): (Vec<BlockState>, Bytes)) -> DiskOutcome {
    DiskOutcome::Read { states, data }
}
