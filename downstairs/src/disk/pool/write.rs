//! The write lane: one thread plans, submits and writes contexts; the reactor takes completions.
//!
//! Invariants:
//! - Contexts are written once the kernel has taken the data, while the device works. The kernel carries out what it has
//!   taken even if this process dies, so a context never stands over data that will not come, short of an I/O error or a
//!   power cut; both leave the block unverified. `downstairs/README.md` has the argument.
//! - The answer follows both, the data and the contexts.
//! - What the reactor does here touches neither the disk nor the context table: it only counts. Whatever is not a plain
//!   success goes back to the lane's thread.
//! - Adjacent data that waits together goes out as one request of up to 1 MiB.
//! - If a request fails that several operations share, each is tried alone: only those at fault fail.
//! - A short write is completed or fails; it never counts as done.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use newel_protocol::BlockRange;
use newel_protocol::wire::ZeroMode;

use super::queue::{Queue, Queued};
use super::{Sink, SubmitTimesByLane, done};
use crate::core::api::{DiskDone, DiskError, DiskOp, DiskOutcome, OpId};
use crate::disk::aio::{Batch, Completion, Events, Payload, Request, Ring};
use crate::disk::change::Change;
use crate::disk::error::RegionError;
use crate::disk::file::Region;
use crate::disk::lock;
use crate::disk::storage::Storage;

/// Larger requests are split by most devices; merging beyond this only costs memory.
const MAX_MERGED_BYTES: usize = 1 << 20;

pub(super) struct Lane {
    region: Arc<Region>,
    queue: Arc<Queue>,
    sink: Arc<Sink>,
    times: Arc<SubmitTimesByLane>,
    ring: Ring<Parts>,
    /// Of the reactor.
    polled: Mutex<(Events, Vec<Completion<Parts>>)>,
    /// Parts that did not simply succeed, for the lane's thread.
    repairs: Mutex<Vec<(Part, Instant)>>,
}

/// An operation under way. It ends when all its pieces and its contexts have.
struct Job {
    op: OpId,
    change: Change,
    data: Bytes,
    arrived: Instant,
    /// Pieces of data that have not ended, and one for the contexts.
    left: AtomicUsize,
    contexts_written: AtomicBool,
    fate: Mutex<Fate>,
}

#[derive(Default)]
struct Fate {
    /// When the kernel had taken its data, the last piece if there are several.
    submitted: Option<Instant>,
    error: Option<DiskError>,
}

/// One piece of a job's data.
struct Part {
    job: Arc<Job>,
    piece: usize,
}

enum Parts {
    One(Part),
    /// In the order of their blocks.
    Many(Vec<Part>),
}

/// Data on its way into a request.
struct Ready {
    range: BlockRange,
    data: Bytes,
    part: Part,
}

impl Lane {
    pub(super) fn new(
        region: &Arc<Region>,
        queue: &Arc<Queue>,
        sink: &Arc<Sink>,
        times: &Arc<SubmitTimesByLane>,
        depth: u32,
        eventfd: OwnedFd,
    ) -> Result<Arc<Self>, RegionError> {
        let storage = region.storage();
        let fail = |source| RegionError::Aio { path: storage.path().display().to_string(), depth, source };
        let ring =
            storage.direct_fd().and_then(|file| Ring::new(file, depth, Some(eventfd))).map_err(fail)?;
        let polled = Mutex::new((ring.events(), Vec::new()));
        Ok(Arc::new(Self {
            region: Arc::clone(region),
            queue: Arc::clone(queue),
            sink: Arc::clone(sink),
            times: Arc::clone(times),
            ring,
            polled,
            repairs: Mutex::default(),
        }))
    }

    /// The lane's thread.
    pub(super) fn run(&self) {
        let mut queued = Vec::new();
        let mut ready: Vec<Ready> = Vec::new();
        let mut requests = VecDeque::new();
        let (mut batch, mut refused) = (Batch::default(), Vec::new());
        let mut jobs = Vec::new();
        while self.queue.take(&mut queued) {
            self.repair();
            for Queued { command, at } in queued.drain(..) {
                jobs.extend(self.plan(command.op, command.kind, at, &mut ready));
            }
            self.merge(&mut ready, &mut requests);
            while !requests.is_empty() {
                let submitted = self.ring.submit(&mut requests, &mut batch, &mut refused);
                self.times.writes.record(submitted);
            }
            let now = Instant::now();
            let failed = refused.drain(..).flat_map(|Completion { user, .. }| user.into_parts());
            lock(&self.repairs).extend(failed.map(|part| (part, now)));
            self.write_contexts(&mut jobs);
            self.repair();
        }
        self.run_out();
    }

    /// The end: what is in flight is waited for here, since the reactor no longer looks.
    fn run_out(&self) {
        let (mut events, mut completions, mut done) = (self.ring.events(), Vec::new(), Vec::new());
        while !self.ring.is_idle() && self.ring.wait(&mut events, &mut completions).is_ok() {
            self.take(&mut completions, &mut done);
            self.repair();
        }
        self.repair();
        self.sink.push(done);
    }

    fn plan(&self, op: OpId, kind: DiskOp, arrived: Instant, ready: &mut Vec<Ready>) -> Option<Arc<Job>> {
        let (change, data) = match kind {
            DiskOp::Write { range, version, crcs, data } => {
                (self.region.plan_write(range, version, &crcs, data.len()), data)
            }
            DiskOp::Store { blocks, join, data } => (self.region.plan_store(&blocks, join, data.len()), data),
            DiskOp::Zero { range, version, mode } => {
                let change = self.region.plan_zero(range, version, mode);
                let needed = mode == ZeroMode::Allocate && change.is_ok();
                (change, if needed { self.zeros(range.bytes()) } else { Bytes::new() })
            }
            DiskOp::Read { .. }
            | DiskOp::Flush { .. }
            | DiskOp::ActivityLog { .. }
            | DiskOp::Header(_)
            | DiskOp::Digests { .. }
            | DiskOp::Contexts { .. }
            | DiskOp::Close => {
                let message = "not an operation of this lane".to_owned();
                (Err(DiskError::Io { operation: "a write", message }), Bytes::new())
            }
        };
        let change = match change {
            Ok(change) => change,
            Err(error) => {
                let now = Instant::now();
                self.sink.push(vec![done(op, Err(error), arrived, now, now)]);
                return None;
            }
        };
        let job = Arc::new(Job {
            op,
            left: AtomicUsize::new(change.pieces.len() + 1),
            change,
            data,
            arrived,
            contexts_written: AtomicBool::new(false),
            fate: Mutex::default(),
        });
        ready.extend(job.change.pieces.iter().enumerate().map(|(piece, place)| Ready {
            range: place.range,
            data: slice(&job.data, &place.bytes),
            part: Part { job: Arc::clone(&job), piece },
        }));
        Some(job)
    }

    fn zeros(&self, bytes: usize) -> Bytes {
        let mut zeros = self.region.storage().buffers.take(bytes);
        zeros.fill(0);
        Bytes::from_owner(zeros)
    }

    /// Makes requests of what is ready: neighbours together.
    fn merge(&self, ready: &mut Vec<Ready>, requests: &mut VecDeque<Request<Parts>>) {
        if !ready.is_sorted_by_key(|ready| ready.range.start) {
            ready.sort_unstable_by_key(|ready| ready.range.start);
        }
        let mut run: Vec<Ready> = Vec::new();
        let mut bytes = 0;
        for next in ready.drain(..) {
            let adjacent = run.last().is_some_and(|last| last.range.end() == next.range.start);
            if !run.is_empty() && (!adjacent || bytes + next.data.len() > MAX_MERGED_BYTES) {
                requests.extend(self.request(&mut run));
                bytes = 0;
            }
            bytes += next.data.len();
            run.push(next);
        }
        requests.extend(self.request(&mut run));
    }

    fn request(&self, run: &mut Vec<Ready>) -> Option<Request<Parts>> {
        let storage = self.region.storage();
        let first = run.first()?.range.start;
        let offset = self.region.layout().block_offset(first);
        if run.len() == 1 {
            let Ready { data, part, .. } = run.pop()?;
            let payload = if storage.is_aligned(&data) {
                Payload::Write(data)
            } else {
                Payload::WriteCopy(storage.aligned_copy(&data))
            };
            return Some(Request { offset, payload, user: Parts::One(part) });
        }
        let payload = if run.iter().all(|ready| storage.is_aligned(&ready.data)) {
            Payload::WriteMany(run.iter().map(|ready| ready.data.clone()).collect())
        } else {
            let mut copy = storage.buffers.take(run.iter().map(|ready| ready.data.len()).sum());
            let mut rest: &mut [u8] = &mut copy;
            for ready in run.iter() {
                let Some((place, left)) = rest.split_at_mut_checked(ready.data.len()) else { break };
                place.copy_from_slice(&ready.data);
                rest = left;
            }
            Payload::WriteCopy(copy)
        };
        Some(Request { offset, payload, user: Parts::Many(run.drain(..).map(|ready| ready.part).collect()) })
    }

    /// Contexts of the jobs just submitted, while the device works on their data.
    fn write_contexts(&self, jobs: &mut Vec<Arc<Job>>) {
        if jobs.is_empty() {
            return;
        }
        let changes: Vec<&Change> = jobs.iter().map(|job| &job.change).collect();
        let written = self.region.finish(&changes);
        let mut ended = Vec::with_capacity(jobs.len());
        for job in jobs.drain(..) {
            match &written {
                Ok(()) => job.contexts_written.store(true, Ordering::Release),
                Err(error) => job.fail(error.clone()),
            }
            if job.one_ended() {
                ended.push(self.answer(&job));
            }
        }
        self.sink.push(ended);
    }

    /// Takes what the kernel has completed. Called by the reactor: neither waits nor touches the disk.
    pub(super) fn poll(&self, into: &mut Vec<DiskDone>) {
        let mut polled = lock(&self.polled);
        let (events, completions) = &mut *polled;
        if let Err(error) = self.ring.poll(events, completions) {
            // Nothing will complete any more; only a kernel that took our ring away says so.
            self.region.fail(DiskError::Io { operation: "io_getevents", message: error.to_string() });
            return;
        }
        if self.take(completions, into) {
            self.queue.nudge();
        }
    }

    /// Counts completions; true if there is something to repair.
    fn take(&self, completions: &mut Vec<Completion<Parts>>, into: &mut Vec<DiskDone>) -> bool {
        let mut repair = Vec::new();
        for Completion { payload, user, result, submitted } in completions.drain(..) {
            let whole = payload.len();
            if matches!(result, Ok(written) if written == whole) {
                for part in user.into_parts() {
                    let job = part.job;
                    lock(&job.fate).submitted.replace(submitted);
                    if job.one_ended() {
                        if lock(&job.fate).error.is_some() {
                            // Its contexts have to be taken back, which is the disk's business.
                            job.left.store(1, Ordering::Release);
                            repair.push((Part { job, piece: usize::MAX }, submitted));
                        } else {
                            into.push(self.answer(&job));
                        }
                    }
                }
                continue;
            }
            let name = &self.region.name;
            match result {
                Ok(written) => {
                    tracing::warn!("{name}: {written} of {whole} bytes were written; trying again")
                }
                Err(error) => {
                    tracing::warn!("{name}: a write of {whole} bytes failed ({error}); trying again")
                }
            }
            repair.extend(user.into_parts().map(|part| (part, submitted)));
        }
        let found = !repair.is_empty();
        lock(&self.repairs).append(&mut repair);
        found
    }

    /// Tries parts that did not succeed by themselves, on this thread.
    fn repair(&self) {
        let parts = std::mem::take(&mut *lock(&self.repairs));
        let mut ended = Vec::new();
        for (Part { job, piece }, submitted) in parts {
            // A job that is only to be taken back has no such piece.
            if let Some(place) = job.change.pieces.get(piece) {
                let (range, data) = (place.range, slice(&job.data, &place.bytes));
                let offset = self.region.layout().block_offset(range.start);
                if let Err(error) = self.region.storage().write_direct(offset, &data) {
                    job.fail(self.region.error("a write", &format_args!("blocks {range}"), &error));
                }
            }
            lock(&job.fate).submitted.replace(submitted);
            if job.one_ended() {
                ended.push(self.answer(&job));
            }
        }
        self.sink.push(ended);
    }

    /// The answer of a job of which everything has ended. Only a failed one touches the disk.
    fn answer(&self, job: &Job) -> DiskDone {
        let now = Instant::now();
        let fate = std::mem::take(&mut *lock(&job.fate));
        let result = match fate.error {
            None => {
                self.region.end(&job.change);
                Ok(DiskOutcome::Done)
            }
            Some(error) => {
                let taken_back = if job.contexts_written.load(Ordering::Acquire) {
                    self.region.revert(&job.change)
                } else {
                    self.region.abort(&job.change)
                };
                taken_back.and(Err(error))
            }
        };
        done(job.op, result, job.arrived, fate.submitted.unwrap_or(now), now)
    }
}

impl Job {
    /// One of the things that it waits for has ended; true if it was the last.
    fn one_ended(&self) -> bool {
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    fn fail(&self, error: DiskError) {
        lock(&self.fate).error.get_or_insert(error);
    }
}

impl Parts {
    fn into_parts(self) -> impl Iterator<Item = Part> {
        let (one, many) = match self {
            Self::One(part) => (Some(part), Vec::new()),
            Self::Many(parts) => (None, parts),
        };
        one.into_iter().chain(many)
    }
}

/// A range that does not fit gives nothing, which no plan makes.
fn slice(data: &Bytes, range: &Range<usize>) -> Bytes {
    if range.end <= data.len() && range.start <= range.end { data.slice(range.clone()) } else { Bytes::new() }
}
