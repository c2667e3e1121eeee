//! The write lane: one thread plans and submits, one takes completions and writes contexts.
//!
//! Invariants:
//! - Contexts are written only after all data of their operation was, and the answer follows them.
//! - Adjacent data that waits together goes out as one request of up to 1 MiB.
//! - If a request fails that several operations share, each is tried alone: only those at fault fail.
//! - A short write is completed or fails; it never counts as done.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use newel_protocol::BlockRange;
use newel_protocol::wire::ZeroMode;

use super::queue::{Queue, Queued};
use super::{Sink, done};
use crate::core::api::{DiskDone, DiskError, DiskOp, DiskOutcome, OpId};
use crate::disk::aio::{Batch, Completion, Payload, Request, Ring};
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
    ring: Ring<Parts>,
}

/// An operation whose data is under way.
struct Job {
    op: OpId,
    change: Change,
    data: Bytes,
    arrived: Instant,
    /// When the kernel had taken its data, the last piece if there are several.
    submitted: Option<Instant>,
    error: Option<DiskError>,
}

/// What a request is part of.
enum Part {
    /// All the data of an operation.
    Whole(Box<Job>),
    /// One of several pieces of an operation; the last to end takes the operation out.
    Piece(Arc<Shared>, usize),
}

struct Shared {
    job: Mutex<Option<Box<Job>>>,
    left: AtomicUsize,
}

/// Boxed, as a job moves from thread to thread and from list to list.
type Jobs = Vec<Box<Job>>;

enum Parts {
    One(Part),
    /// In the order of their blocks.
    Many(Vec<Part>),
    /// Nothing: it tells the reaper that no more will come.
    Last,
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
        depth: u32,
    ) -> Result<Arc<Self>, RegionError> {
        let storage = region.storage();
        let fail = |source| RegionError::Aio { path: storage.path().display().to_string(), depth, source };
        let ring = storage.direct_fd().and_then(|file| Ring::new(file, depth)).map_err(fail)?;
        Ok(Arc::new(Self {
            region: Arc::clone(region),
            queue: Arc::clone(queue),
            sink: Arc::clone(sink),
            ring,
        }))
    }

    /// The submitting thread.
    pub(super) fn run(&self) {
        let mut queued = Vec::new();
        let mut ready: Vec<Ready> = Vec::new();
        let mut requests = VecDeque::new();
        let (mut batch, mut refused) = (Batch::default(), Vec::new());
        while self.queue.take(&mut queued) {
            let mut without_data = Vec::new();
            for Queued { command, at } in queued.drain(..) {
                self.plan(command.op, command.kind, at, &mut ready, &mut without_data);
            }
            self.settle(without_data);
            self.merge(&mut ready, &mut requests);
            while !requests.is_empty() {
                self.ring.submit(&mut requests, &mut batch, &mut refused);
            }
            self.complete(&mut refused);
        }
        // The reaper waits in the kernel: a read of nothing but this message wakes it.
        let payload = Payload::Read(self.region.storage().buffers.take(4096));
        requests.push_back(Request { offset: 0, payload, user: Parts::Last });
        self.ring.submit(&mut requests, &mut batch, &mut refused);
    }

    fn plan(&self, op: OpId, kind: DiskOp, arrived: Instant, ready: &mut Vec<Ready>, no_data: &mut Jobs) {
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
                return;
            }
        };
        let mut job = Box::new(Job { op, change, data, arrived, submitted: None, error: None });
        match job.change.pieces.as_slice() {
            [] => no_data.push(job),
            [piece] => {
                let (range, data) = (piece.range, slice(&job.data, &piece.bytes));
                ready.push(Ready { range, data, part: Part::Whole(job) });
            }
            _ => {
                let pieces = job.change.pieces.clone();
                let data = std::mem::take(&mut job.data);
                let shared =
                    Arc::new(Shared { job: Mutex::new(Some(job)), left: AtomicUsize::new(pieces.len()) });
                for (index, piece) in pieces.iter().enumerate() {
                    let data = slice(&data, &piece.bytes);
                    ready.push(Ready {
                        range: piece.range,
                        data,
                        part: Part::Piece(Arc::clone(&shared), index),
                    });
                }
                if let Some(job) = lock(&shared.job).as_mut() {
                    job.data = data;
                }
            }
        }
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
        // Writes submitted before the last message may end after it.
        while !self.ring.is_idle() && self.ring.wait(&mut events, &mut completions).is_ok() {
            self.complete(&mut completions);
        }
    }

    /// Finishes operations whose data has all been written. True if the last message was among them.
    fn complete(&self, completions: &mut Vec<Completion<Parts>>) -> bool {
        let mut last = false;
        let mut jobs = Vec::with_capacity(completions.len());
        for completion in completions.drain(..) {
            let whole = completion.payload.len();
            let parts = match completion.user {
                Parts::Last => {
                    last = true;
                    continue;
                }
                Parts::One(part) => [part].into_iter().chain(Vec::new()),
                Parts::Many(mut parts) => {
                    let rest = parts.split_off(1.min(parts.len()));
                    let Some(first) = parts.pop() else { continue };
                    [first].into_iter().chain(rest)
                }
            };
            let at = completion.submitted;
            match completion.result {
                Ok(written) if written == whole => jobs.extend(parts.filter_map(|part| part.end(None, at))),
                Ok(written) => {
                    tracing::warn!(
                        "{}: {written} of {whole} bytes were written; trying again",
                        self.region.name
                    );
                    jobs.extend(parts.filter_map(|part| self.again(part, at)));
                }
                Err(error) => {
                    tracing::warn!(
                        "{}: a write of {whole} bytes failed ({error}); trying again",
                        self.region.name
                    );
                    jobs.extend(parts.filter_map(|part| self.again(part, at)));
                }
            }
        }
        self.settle(jobs);
        last
    }

    /// Contexts and answers of operations whose data is written, or could not be.
    fn settle(&self, jobs: Jobs) {
        if jobs.is_empty() {
            return;
        }
        let mut changes = Vec::with_capacity(jobs.len());
        changes.extend(jobs.iter().filter(|job| job.error.is_none()).map(|job| &job.change));
        let finished = if changes.is_empty() { Ok(()) } else { self.region.finish(&changes) };
        let now = Instant::now();
        let answer = |job: Box<Job>| -> DiskDone {
            let result = match job.error {
                None => finished.clone(),
                Some(error) => self.region.abort(&job.change).and(Err(error)),
            };
            done(job.op, result.map(|()| DiskOutcome::Done), job.arrived, job.submitted.unwrap_or(now), now)
        };
        self.sink.push(jobs.into_iter().map(answer).collect());
    }

    /// Writes a part by itself, on this thread.
    fn again(&self, part: Part, at: Instant) -> Option<Box<Job>> {
        let (range, data) = part.data()?;
        let offset = self.region.layout().block_offset(range.start);
        let result = self.region.storage().write_direct(offset, &data);
        let error =
            result.err().map(|error| self.region.error("a write", &format_args!("blocks {range}"), &error));
        part.end(error, at)
    }
}

impl Part {
    fn data(&self) -> Option<(BlockRange, Bytes)> {
        let of = |job: &Job, index: usize| {
            let piece = job.change.pieces.get(index)?;
            Some((piece.range, slice(&job.data, &piece.bytes)))
        };
        match self {
            Self::Whole(job) => of(job, 0),
            Self::Piece(shared, index) => lock(&shared.job).as_ref().and_then(|job| of(job, *index)),
        }
    }

    /// This part has ended; its operation, if it was the last.
    fn end(self, error: Option<DiskError>, submitted: Instant) -> Option<Box<Job>> {
        match self {
            Self::Whole(mut job) => {
                job.submitted = Some(submitted);
                job.error = error;
                Some(job)
            }
            Self::Piece(shared, _) => {
                let mut job = lock(&shared.job);
                if let Some(job) = job.as_mut() {
                    job.submitted = job.submitted.max(Some(submitted));
                    job.error = job.error.take().or(error);
                }
                if shared.left.fetch_sub(1, Ordering::SeqCst) == 1 { job.take() } else { None }
            }
        }
    }
}

/// A range that does not fit gives nothing, which no plan makes.
fn slice(data: &Bytes, range: &Range<usize>) -> Bytes {
    if range.end <= data.len() && range.start <= range.end { data.slice(range.clone()) } else { Bytes::new() }
}
