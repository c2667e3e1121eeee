//! The life of a job: checked, ordered, entered in the activity log, at the disk, answered.
//!
//! Invariants:
//! - A job that is accepted is answered exactly once, unless its session ends.
//! - A job whose payload does not fit its checksums never reaches the disk.
//! - No more jobs and bytes are accepted than configured; a session that sends more is ended.
//! - A job at the disk stays in the order until the disk is done with it, whoever it belonged to.
//!
//! The common path (nothing in conflict, extent in the log) goes from message to disk command without a search and
//! without copying the payload.

use std::collections::BTreeMap;

use bytes::Bytes;
use newel_protocol::wire::{JobError, Op, ReadMode, Reply, Request, StageTimes, StoredBlock};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, EXTENT_BLOCKS, ExtentId, JobId, Version};

use super::Core;
use super::api::{Action, DiskCommand, DiskDone, DiskError, DiskOp, DiskOutcome, OpId, Time};
use super::flush::FlushJob;

/// The largest number of a job that the region can keep as a version: 48 bits, which at 100,000 jobs a second one
/// generation uses up in 89 years. A larger one comes from a peer that makes no sense.
pub(super) const MAX_SEQUENCE: u64 = (1 << 48) - 1;

/// What a job is to those who wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read(JobId),
    /// A write, zero or store; `era` is its place among the flushes.
    Change {
        job: JobId,
        era: u64,
    },
    Contexts {
        query: u64,
        extent: ExtentId,
    },
    Digests {
        query: u64,
        first: ExtentId,
    },
}

#[derive(Debug)]
struct Job {
    kind: Kind,
    extent: ExtentId,
    /// What to ask of the disk; taken when it is asked.
    op: Option<DiskOp>,
    at_disk: Option<OpId>,
    /// False once its session has ended.
    wanted: bool,
    arrived: Time,
    sent: Time,
    /// Its place among all jobs ever accepted.
    seq: u64,
    bytes: usize,
}

/// All unfinished jobs but flushes, in slots that are used again.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    slots: Vec<Option<Job>>,
    free: Vec<u32>,
    count: usize,
    at_disk: usize,
    reads_at_disk: usize,
    bytes: usize,
    next_seq: u64,
    /// Reads that may go to the disk once there is room, by arrival.
    ready_reads: BTreeMap<u64, u32>,
    /// Reads not at the disk, by number: those that can be cancelled.
    cancellable: BTreeMap<JobId, u32>,
}

impl Jobs {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn at_disk(&self) -> usize {
        self.at_disk
    }

    pub(super) fn waiting(&self) -> usize {
        self.count - self.at_disk
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn insert(&mut self, mut job: Job) -> u32 {
        job.seq = self.next_seq;
        self.next_seq += 1;
        self.count += 1;
        self.bytes += job.bytes;
        match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(job);
                slot
            }
            None => {
                self.slots.push(Some(job));
                u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
            }
        }
    }

    fn get(&self, slot: u32) -> Option<&Job> {
        self.slots.get(slot as usize)?.as_ref()
    }

    fn get_mut(&mut self, slot: u32) -> Option<&mut Job> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    fn remove(&mut self, slot: u32) -> Option<Job> {
        let job = self.slots.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        self.count -= 1;
        self.bytes -= job.bytes;
        if job.at_disk.is_some() {
            self.at_disk -= 1;
            self.reads_at_disk -= usize::from(matches!(job.kind, Kind::Read(_)));
        }
        Some(job)
    }
}

/// Why a job is not taken up.
enum Reject {
    Violation(String),
    Job(JobError),
}

/// A checked job.
struct Checked {
    range: BlockRange,
    op: DiskOp,
    change: bool,
    bytes: usize,
}

impl Core {
    /// What the session waits for.
    fn outstanding(&self) -> usize {
        self.jobs.count + self.flusher.outstanding() + self.fault.held()
    }

    /// A job of the session in force.
    pub(super) fn job(&mut self, job: JobId, op: Op, payload: Bytes) {
        let Some(conn) = self.session.as_ref().map(|session| session.conn) else { return };
        if self.outstanding() >= self.config.jobs_max {
            let what = format!("more than {} jobs outstanding", self.config.jobs_max);
            return self.violation(conn, what);
        }
        if job.0 > MAX_SEQUENCE {
            return self.violation(conn, format!("job number {job} is above {MAX_SEQUENCE}"));
        }
        if matches!(op, Op::Flush) && payload.is_empty() {
            return self.flusher.flush_arrived(FlushJob { job, arrived: self.now });
        }
        let checked = match self.check_job(job, op, payload) {
            Ok(checked) => checked,
            Err(Reject::Violation(what)) => return self.violation(conn, what),
            Err(Reject::Job(error)) => {
                let (result, times) = (Err(error), StageTimes::default());
                return self.send(conn, Reply::Done { job, result, times, states: Vec::new() });
            }
        };
        let kind = if checked.change {
            Kind::Change { job, era: self.flusher.change_arrived() }
        } else {
            Kind::Read(job)
        };
        self.accept(kind, checked);
    }

    pub(super) fn query_contexts(&mut self, query: u64, extent: ExtentId) {
        let Some(conn) = self.session.as_ref().map(|session| session.conn) else { return };
        if extent.0 >= self.extents {
            let what = format!("contexts of extent {extent} of a region of {} extents", self.extents);
            return self.violation(conn, what);
        }
        // The last extent may be cut short by the end of the region.
        let left = self.facts.blocks - extent.first_block();
        let count = u32::try_from(left).unwrap_or(u32::MAX).min(EXTENT_BLOCKS);
        let range = BlockRange::new(extent.first_block(), count);
        self.query(Kind::Contexts { query, extent }, range, DiskOp::Contexts { extent });
    }

    pub(super) fn query_digests(&mut self, query: u64, first: ExtentId, count: u32) {
        let Some(conn) = self.session.as_ref().map(|session| session.conn) else { return };
        let inside = first.0.checked_add(count).is_some_and(|end| end <= self.extents);
        if count == 0 || count > Request::MAX_DIGESTS || !inside {
            let what = format!("digests of {count} extents from {first} of {} extents", self.extents);
            return self.violation(conn, what);
        }
        // Only its first block is named, since it takes no part in the order.
        let range = BlockRange::single(first.first_block());
        self.query(Kind::Digests { query, first }, range, DiskOp::Digests { first, count });
    }

    fn query(&mut self, kind: Kind, range: BlockRange, op: DiskOp) {
        let Some(conn) = self.session.as_ref().map(|session| session.conn) else { return };
        if self.outstanding() >= self.config.jobs_max {
            let what = format!("more than {} jobs outstanding", self.config.jobs_max);
            return self.violation(conn, what);
        }
        self.accept(kind, Checked { range, op, change: false, bytes: 0 });
    }

    fn accept(&mut self, kind: Kind, checked: Checked) {
        let Checked { range, op, change, bytes } = checked;
        let slot = self.jobs.insert(Job {
            kind,
            extent: range.extent(),
            op: Some(op),
            at_disk: None,
            wanted: true,
            arrived: self.now,
            sent: self.now,
            seq: 0,
            bytes,
        });
        if matches!(kind, Kind::Digests { .. }) || self.order.add(slot, range, change) {
            self.start(slot);
        } else if let Kind::Read(job) = kind {
            self.jobs.cancellable.insert(job, slot);
        }
    }

    /// Everything about a job that can be wrong. Costs a pass over the payload for its checksums.
    fn check_job(&self, job: JobId, op: Op, payload: Bytes) -> Result<Checked, Reject> {
        let version = Version::new(self.generation(), job.0);
        let checked = match op {
            Op::Write { range, crcs } => {
                self.check_range(range, || {
                    crcs.len() == range.count as usize && payload.len() == range.bytes()
                })?;
                check_crcs(&payload, range.blocks().zip(crcs.iter().copied()))?;
                let bytes = payload.len();
                Checked {
                    range,
                    op: DiskOp::Write { range, version, crcs, data: payload },
                    change: true,
                    bytes,
                }
            }
            Op::Read { range, mode } => {
                self.check_range(range, || payload.is_empty())?;
                let bytes = if mode == ReadMode::Contexts { 0 } else { range.bytes() };
                Checked { range, op: DiskOp::Read { range, mode }, change: false, bytes }
            }
            Op::Zero { range, mode } => {
                self.check_range(range, || payload.is_empty())?;
                Checked { range, op: DiskOp::Zero { range, version, mode }, change: true, bytes: 0 }
            }
            Op::Store { blocks, join } => self.check_store(blocks, join, payload)?,
            Op::Flush => return Err(Reject::Violation("a payload where none belongs".to_owned())),
        };
        if self.jobs.bytes + self.fault.bytes() + checked.bytes > self.config.bytes_max {
            return Err(Reject::Violation(format!("more than {} bytes outstanding", self.config.bytes_max)));
        }
        Ok(checked)
    }

    fn check_range(&self, range: BlockRange, payload_fits: impl FnOnce() -> bool) -> Result<(), Reject> {
        if !range.is_valid(u64::MAX) {
            let what = format!("range {range} is empty or crosses an extent");
            return Err(Reject::Violation(what));
        }
        if !payload_fits() {
            return Err(Reject::Violation(format!("payload or checksums do not fit range {range}")));
        }
        if !range.is_valid(self.facts.blocks) {
            return Err(Reject::Job(JobError::OutOfRange { range, blocks: self.facts.blocks }));
        }
        Ok(())
    }

    fn check_store(&self, blocks: Vec<StoredBlock>, join: Version, data: Bytes) -> Result<Checked, Reject> {
        let violation = |what: &str| Err(Reject::Violation(what.to_owned()));
        let (Some(first), Some(last)) = (blocks.first(), blocks.last()) else {
            return violation("a Store without blocks");
        };
        if !blocks.is_sorted_by(|a, b| a.block < b.block) {
            return violation("the blocks of a Store are not in ascending order");
        }
        if blocks.iter().any(|stored| stored.state.kind == BlockKind::Unverified) {
            return violation("a Store of blocks that are neither data nor zeros");
        }
        if blocks.iter().any(|stored| stored.state.version.sequence > MAX_SEQUENCE) {
            return violation("a Store of a version that no job has");
        }
        let span = last.block - first.block;
        let Ok(count) = u32::try_from(span.saturating_add(1)) else {
            return violation("a Store beyond one extent");
        };
        let range = BlockRange { start: first.block, count };
        let with_data = || blocks.iter().filter(|stored| stored.state.has_data());
        self.check_range(range, || data.len() == with_data().count() * BLOCK_BYTES)?;
        check_crcs(&data, with_data().map(|stored| (stored.block, stored.state.crc)))?;
        let bytes = data.len();
        Ok(Checked { range, op: DiskOp::Store { blocks, join, data }, change: true, bytes })
    }

    /// A job that nothing in the order holds up any more.
    fn start(&mut self, slot: u32) {
        let Some(job) = self.jobs.get(slot) else { return };
        match job.kind {
            Kind::Change { .. } => {
                if self.activity.begin(job.extent, slot) {
                    self.send_to_disk(slot);
                }
            }
            Kind::Read(id) => {
                if self.jobs.reads_at_disk < self.config.disk_reads_max {
                    self.send_to_disk(slot);
                } else {
                    self.jobs.ready_reads.insert(job.seq, slot);
                    self.jobs.cancellable.insert(id, slot);
                }
            }
            Kind::Contexts { .. } | Kind::Digests { .. } => self.send_to_disk(slot),
        }
    }

    pub(super) fn send_to_disk(&mut self, slot: u32) {
        let op = self.op_id(slot);
        let now = self.now;
        let Some(job) = self.jobs.get_mut(slot) else { return };
        let Some(kind) = job.op.take() else { return };
        job.at_disk = Some(op);
        job.sent = now;
        let read = if let Kind::Read(id) = job.kind { Some(id) } else { None };
        let job = if let Kind::Change { job, .. } = job.kind { Some(job) } else { read };
        self.jobs.at_disk += 1;
        if let Some(id) = read {
            self.jobs.reads_at_disk += 1;
            self.jobs.forget_cancellable(id, slot);
        }
        self.actions.push_back(Action::Disk(DiskCommand { op, job, kind }));
    }

    /// Drops a read that isn't at the disk; anything else goes on.
    pub(super) fn cancel(&mut self, id: JobId) {
        let Some(conn) = self.session.as_ref().map(|session| session.conn) else { return };
        let Some(slot) = self.jobs.cancellable.remove(&id) else { return self.cancel_held(conn, id) };
        let Some(job) = self.jobs.remove(slot) else { return };
        self.jobs.ready_reads.remove(&job.seq);
        let times = StageTimes { queued_us: self.now.micros_since(job.arrived), ..StageTimes::default() };
        self.send(conn, Reply::Done { job: id, result: Err(JobError::Cancelled), times, states: Vec::new() });
        self.out_of_order(slot);
    }

    pub(super) fn job_done(&mut self, slot: u32, done: DiskDone) {
        if self.jobs.get(slot).is_none_or(|job| job.at_disk != Some(done.op)) {
            debug_assert!(false, "an operation ended that was never begun: {:?}", done.op);
            return;
        }
        let Some(job) = self.jobs.remove(slot) else { return };
        if let Kind::Change { era, .. } = job.kind {
            self.activity.finish(job.extent);
            if job.wanted {
                self.flusher.change_finished(era);
            }
        }
        self.answer(&job, done);
        if !matches!(job.kind, Kind::Digests { .. }) {
            self.out_of_order(slot);
        }
        while self.jobs.reads_at_disk < self.config.disk_reads_max
            && let Some((_, slot)) = self.jobs.ready_reads.pop_first()
        {
            self.send_to_disk(slot);
        }
    }

    /// The job in `slot` no longer stands in the way of others.
    fn out_of_order(&mut self, slot: u32) {
        let mut released = std::mem::take(&mut self.released);
        self.order.remove(slot, &mut released);
        for next in released.drain(..) {
            self.start(next);
        }
        self.released = released;
    }

    fn answer(&mut self, job: &Job, done: DiskDone) {
        let times = StageTimes { queued_us: job.sent.micros_since(job.arrived), ..done.times };
        let outcome = match done.result {
            Ok(outcome) => outcome,
            Err(error) => return self.answer_error(job, times, &error),
        };
        let Some(conn) = self.session.as_ref().filter(|_| job.wanted).map(|session| session.conn) else {
            return;
        };
        match (job.kind, outcome) {
            (Kind::Read(id), DiskOutcome::Read { states, data }) => {
                self.answer_job(
                    conn,
                    true,
                    job.bytes,
                    Reply::Done { job: id, result: Ok(()), times, states },
                    data,
                );
            }
            (Kind::Change { job: id, .. }, DiskOutcome::Done) => {
                let reply = Reply::Done { job: id, result: Ok(()), times, states: Vec::new() };
                self.answer_job(conn, false, job.bytes, reply, Bytes::new());
            }
            (Kind::Contexts { query, extent }, DiskOutcome::Contexts(states)) => {
                self.send(conn, Reply::Contexts { query, extent, states });
            }
            (Kind::Digests { query, first }, DiskOutcome::Digests(digests)) => {
                self.send(conn, Reply::Digests { query, first, digests });
            }
            (kind, _) => self.fail(format!("the disk answered {kind:?} with something else")),
        }
    }

    fn answer_error(&mut self, job: &Job, times: StageTimes, error: &DiskError) {
        let conn = self.session.as_ref().filter(|_| job.wanted).map(|session| session.conn);
        let reply = |job, error| Reply::Done { job, result: Err(error), times, states: Vec::new() };
        match (job.kind, error) {
            (Kind::Read(id), _) => {
                if let Some(conn) = conn {
                    let reply = reply(id, JobError::Disk { message: error.to_string() });
                    self.answer_job(conn, true, 0, reply, Bytes::new());
                }
            }
            (Kind::Change { job: id, .. }, DiskError::NoSpace { .. }) => {
                if let Some(conn) = conn {
                    self.send(conn, reply(id, JobError::NoSpace));
                    self.leave(conn, &error.to_string());
                }
            }
            (Kind::Change { .. } | Kind::Contexts { .. } | Kind::Digests { .. }, _) => {
                self.fail(error.to_string())
            }
        }
    }

    /// Drops all jobs that aren't at the disk; those that are end silently.
    pub(super) fn drop_jobs(&mut self) {
        self.jobs.ready_reads.clear();
        self.jobs.cancellable.clear();
        for slot in 0..u32::try_from(self.jobs.slots.len()).unwrap_or(u32::MAX) {
            let Some(job) = self.jobs.get_mut(slot) else { continue };
            job.wanted = false;
            if job.at_disk.is_none() {
                self.jobs.remove(slot);
                self.order.discard(slot);
            }
        }
    }
}

impl Jobs {
    fn forget_cancellable(&mut self, id: JobId, slot: u32) {
        if !self.cancellable.is_empty() && self.cancellable.get(&id) == Some(&slot) {
            self.cancellable.remove(&id);
        }
    }
}

/// Every block of `data` against its checksum.
fn check_crcs(data: &[u8], expected: impl Iterator<Item = (u64, u32)>) -> Result<(), Reject> {
    for (data, (block, crc)) in data.chunks_exact(BLOCK_BYTES).zip(expected) {
        if newel_protocol::crc::crc(data) != crc {
            return Err(Reject::Job(JobError::Checksum { block }));
        }
    }
    Ok(())
}
