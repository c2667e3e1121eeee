//! The write lane: one thread plans, submits and writes contexts; the reactor takes completions.
//!
//! Invariants:
//! - Contexts are written once the kernel has taken the data, while the device works. The kernel carries out what it has
//!   taken even if this process dies, so a context never stands over data that will not come, short of an I/O error or a
//!   power cut; both leave the block unverified. `downstairs/README.md` has the argument. With an engine that does not promise that,
//!   contexts are written when the data has been.
//! - The answer follows both, the data and the contexts.
//! - What the reactor does here touches neither the disk nor the context table: it only counts. Whatever is not a plain
//!   success goes back to the lane's thread.
//! - Adjacent data that waits together goes out as one request of up to `merge_max` bytes. What waits for room in the device's queue
//!   is submitted in the order of its blocks, and before anything that came later.
//! - Contexts and answers of what was submitted never wait for what there was no room for.
//! - If a request fails that several operations share, each is tried alone: only those at fault fail.
//! - A short write is completed or fails; it never counts as done.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use newel_protocol::wire::ZeroMode;
use newel_protocol::{BlockRange, JobId};

use super::gate::Gate;
use super::probes::{Jobs, Operation};
use super::queue::{Queue, Queued};
use super::{Sink, done};
use crate::core::api::{DiskCommand, DiskDone, DiskError, DiskOp, DiskOutcome, OpId};
use crate::disk::change::Change;
use crate::disk::engine::{Completion, Payload, Request};
use crate::disk::file::Region;
use crate::disk::lock;
use crate::disk::storage::Storage;

pub(super) struct Lane {
    region: Arc<Region>,
    queue: Arc<Queue>,
    sink: Arc<Sink>,
    gate: Gate<Parts>,
    merge_max_bytes: usize,
    /// Of the reactor, kept for its allocation.
    polled: Mutex<Vec<Completion<Parts>>>,
    /// What did not simply succeed, for the lane's thread.
    repairs: Mutex<Vec<Repair>>,
}

struct Repair {
    job: Arc<Job>,
    what: Needs,
    submitted: Instant,
}

enum Needs {
    /// This piece of data, written again.
    Piece(usize),
    /// Its contexts, now that its data is written.
    Contexts,
    /// To be taken back.
    TakingBack,
}

/// What the lane's thread is about to submit.
#[derive(Default)]
struct Staged {
    ready: Vec<Ready>,
    requests: VecDeque<Request<Parts>>,
    /// Requests made since the lane began, and those of them that were submitted.
    made: u64,
    submitted: u64,
    /// Jobs with the number of the request that holds the last of their data, ascending.
    jobs: VecDeque<(u64, Arc<Job>)>,
}

/// An operation under way. It ends when all its pieces and its contexts have.
pub(super) struct Job {
    op: OpId,
    job: Option<JobId>,
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
pub(super) struct Part {
    job: Arc<Job>,
    piece: usize,
}

pub(super) enum Parts {
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
        gate: Gate<Parts>,
        merge_max_bytes: usize,
    ) -> Arc<Self> {
        Arc::new(Self {
            region: Arc::clone(region),
            queue: Arc::clone(queue),
            sink: Arc::clone(sink),
            gate,
            merge_max_bytes,
            polled: Mutex::default(),
            repairs: Mutex::default(),
        })
    }

    /// The lane's thread.
    pub(super) fn run(&self) {
        let (mut queued, mut refused) = (Vec::new(), Vec::new());
        let mut staged = Staged::default();
        while self.queue.take(&mut queued) {
            self.repair();
            for Queued { command, at } in queued.drain(..) {
                self.plan(command, at, &mut staged);
            }
            self.merge(&mut staged);
            loop {
                self.write_contexts(&mut staged);
                if staged.requests.is_empty() {
                    break;
                }
                let count = self.gate.submit(&mut staged.requests, &mut refused);
                staged.submitted += count as u64;
                if count == 0 {
                    self.queue.wait_for_nudge();
                }
                self.refused(&mut refused);
                self.repair();
            }
        }
        self.run_out();
    }

    /// The end: what is in flight is waited for here, since the reactor no longer looks.
    fn run_out(&self) {
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        while !self.gate.is_idle() && self.gate.wait(&mut completions).is_ok() {
            self.take(&mut completions, &mut done);
            self.repair();
        }
        self.repair();
        self.sink.push(done);
    }

    fn refused(&self, refused: &mut Vec<Completion<Parts>>) {
        for Completion { user, submitted, .. } in refused.drain(..) {
            let again = |Part { job, piece }| Repair { job, what: Needs::Piece(piece), submitted };
            lock(&self.repairs).extend(user.into_parts().map(again));
        }
    }

    fn plan(&self, command: DiskCommand, arrived: Instant, staged: &mut Staged) {
        let DiskCommand { op, job, kind } = command;
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
                return self.sink.push(vec![done(op, Err(error), arrived, now, now)]);
            }
        };
        let job = Arc::new(Job {
            op,
            job,
            left: AtomicUsize::new(change.pieces.len() + 1),
            change,
            data,
            arrived,
            contexts_written: AtomicBool::new(false),
            fate: Mutex::default(),
        });
        staged.ready.extend(job.change.pieces.iter().enumerate().map(|(piece, place)| Ready {
            range: place.range,
            data: slice(&job.data, &place.bytes),
            part: Part { job: Arc::clone(&job), piece },
        }));
        if job.change.pieces.is_empty() {
            // Everything made before is submitted by now, so its contexts are next.
            staged.jobs.push_back((staged.made, job));
        }
    }

    fn zeros(&self, bytes: usize) -> Bytes {
        let mut zeros = self.region.storage().buffers.take(bytes);
        zeros.fill(0);
        Bytes::from_owner(zeros)
    }

    /// Makes requests of what is ready: neighbours together.
    fn merge(&self, staged: &mut Staged) {
        if !staged.ready.is_sorted_by_key(|ready| ready.range.start) {
            staged.ready.sort_unstable_by_key(|ready| ready.range.start);
        }
        let mut ready = std::mem::take(&mut staged.ready);
        let mut run: Vec<Ready> = Vec::new();
        let mut bytes = 0;
        for next in ready.drain(..) {
            let adjacent = run.last().is_some_and(|last| last.range.end() == next.range.start);
            if !run.is_empty() && (!adjacent || bytes + next.data.len() > self.merge_max_bytes) {
                self.stage(&mut run, staged);
                bytes = 0;
            }
            bytes += next.data.len();
            run.push(next);
        }
        self.stage(&mut run, staged);
        staged.ready = ready;
    }

    fn stage(&self, run: &mut Vec<Ready>, staged: &mut Staged) {
        staged.made += u64::from(!run.is_empty());
        let last_of = |ready: &&Ready| ready.part.piece + 1 == ready.part.job.change.pieces.len();
        let jobs = run.iter().filter(last_of).map(|ready| (staged.made, Arc::clone(&ready.part.job)));
        staged.jobs.extend(jobs);
        staged.requests.extend(self.request(run));
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

    /// Contexts of the jobs that are submitted, while the device works on their data.
    fn write_contexts(&self, staged: &mut Staged) {
        let submitted = staged.jobs.partition_point(|&(last, _)| last <= staged.submitted);
        let jobs = staged.jobs.drain(..submitted).map(|(_, job)| job);
        if self.gate.survives_us() {
            self.write_contexts_of(&jobs.collect::<Vec<_>>());
        } else {
            // Those that have no data can't wait for it.
            self.write_contexts_of(&jobs.filter(|job| job.change.pieces.is_empty()).collect::<Vec<_>>());
        }
    }

    fn write_contexts_of(&self, jobs: &[Arc<Job>]) {
        if jobs.is_empty() {
            return;
        }
        let changes: Vec<&Change> = jobs.iter().map(|job| &job.change).collect();
        let written = self.region.finish(&changes);
        let mut ended = Vec::with_capacity(jobs.len());
        for job in jobs {
            match &written {
                Ok(()) => job.contexts_written.store(true, Ordering::Release),
                Err(error) => job.fail(error.clone()),
            }
            if job.one_ended() == 0 {
                ended.push(self.answer(job));
            }
        }
        self.sink.push(ended);
    }

    /// Takes what the kernel has completed. Called by the reactor: neither waits nor touches the disk.
    pub(super) fn poll(&self, into: &mut Vec<DiskDone>) {
        let mut completions = lock(&self.polled);
        match self.gate.poll(&mut completions) {
            Ok(waiting) => {
                if self.take(&mut completions, into) || waiting {
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

    /// Counts completions; true if there is something for the lane's thread to do.
    fn take(&self, completions: &mut Vec<Completion<Parts>>, into: &mut Vec<DiskDone>) -> bool {
        let mut repairs = Vec::new();
        for Completion { payload, user, result, submitted } in completions.drain(..) {
            let whole = payload.len();
            if matches!(result, Ok(written) if written == whole) {
                for Part { job, .. } in user.into_parts() {
                    lock(&job.fate).submitted.replace(submitted);
                    match self.piece_ended(&job) {
                        Some(None) => into.push(self.answer(&job)),
                        Some(Some(what)) => repairs.push(Repair { job, what, submitted }),
                        None => {}
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
            let again = |Part { job, piece }| Repair { job, what: Needs::Piece(piece), submitted };
            repairs.extend(user.into_parts().map(again));
        }
        let found = !repairs.is_empty();
        lock(&self.repairs).append(&mut repairs);
        found
    }

    /// A piece of its data has ended: what comes next. Nothing yet; the answer; or something that touches the disk.
    fn piece_ended(&self, job: &Job) -> Option<Option<Needs>> {
        let left = job.one_ended();
        let failed = || lock(&job.fate).error.is_some();
        match left {
            0 => Some(failed().then_some(Needs::TakingBack)),
            1 if !self.gate.survives_us() => Some(Some(Needs::Contexts)),
            _ => None,
        }
    }

    /// Does what is left to this thread.
    fn repair(&self) {
        let repairs = std::mem::take(&mut *lock(&self.repairs));
        if repairs.is_empty() {
            return;
        }
        let (mut ended, mut written) = (Vec::new(), Vec::new());
        for Repair { job, what, submitted } in repairs {
            lock(&job.fate).submitted.replace(submitted);
            let next = match what {
                Needs::Piece(piece) => {
                    self.write_again(&job, piece);
                    self.piece_ended(&job)
                }
                Needs::Contexts | Needs::TakingBack => Some(Some(what)),
            };
            match next {
                Some(Some(Needs::Contexts)) if lock(&job.fate).error.is_none() => written.push(job),
                Some(_) => ended.push(self.answer(&job)),
                None => {}
            }
        }
        self.sink.push(ended);
        self.write_contexts_of(&written);
    }

    fn write_again(&self, job: &Job, piece: usize) {
        let Some(place) = job.change.pieces.get(piece) else { return };
        let (range, data) = (place.range, slice(&job.data, &place.bytes));
        let offset = self.region.layout().block_offset(range.start);
        if let Err(error) = self.region.storage().write_direct(offset, &data) {
            job.fail(self.region.error("a write", &format_args!("blocks {range}"), &error));
        }
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
    /// One of the things that it waits for has ended; how many are left.
    fn one_ended(&self) -> usize {
        self.left.fetch_sub(1, Ordering::AcqRel).saturating_sub(1)
    }

    fn fail(&self, error: DiskError) {
        lock(&self.fate).error.get_or_insert(error);
    }
}

impl Jobs for Parts {
    const OPERATION: Operation = Operation::Write;

    fn each(&self, mut tell: impl FnMut(JobId, usize)) {
        let parts = match self {
            Self::One(part) => std::slice::from_ref(part),
            Self::Many(parts) => parts,
        };
        for Part { job, piece } in parts {
            if let (Some(number), Some(place)) = (job.job, job.change.pieces.get(*piece)) {
                tell(number, place.range.bytes());
            }
        }
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
