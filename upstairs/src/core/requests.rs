//! Guest requests: admission, cutting into jobs, unaligned edges, and putting answers together.
//!
//! Invariants:
//! - A request is answered exactly once.
//! - Between the read and the write of an unaligned edge no other change of that block is sent: the blocks are locked, and
//!   changes that overlap a lock wait their turn. Reads never wait for a lock.
//! - A request that needs several jobs is answered as a whole. Until then the jobs that are settled already are kept: should
//!   every replica lose power meanwhile, they are lost like any unflushed write, but the answer is still to come and must
//!   be true. So the next activation stores them again, under their old versions, wherever nothing newer lies.
//! - What is sent is bounded by the volume's limits; what waits is bounded by the shell, which asks `has_room`.
//!
//! Changes by one request that FUA covers are followed at once by a flush; the request is answered when both are
//! acknowledged, which costs one round trip instead of two.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use newel_protocol::wire::{Op, ReadMode, ZeroMode};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, crc};

use super::Core;
use super::api::{Action, GuestError, GuestId, GuestOp, GuestReply, Segment, StatusExtent, Time};
use super::jobs::{AnswerBlocks, Owner, ReqKey, pieces};
use super::kept::Kept;
use super::reads::Urgency;
use super::work::Done;

#[cfg(feature = "trace")]
#[path = "requests_trace.rs"]
mod tracing;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Jobs without payload that one request may have under way: a 4 GiB trim must not fill the volume's bound by itself.
const PIECES_WINDOW: u32 = 64;

#[derive(Debug, Default)]
pub(super) struct Requests {
    slab: Vec<Option<GuestRequest>>,
    stamps: u64,
    free: Vec<usize>,
    open: usize,
    /// Not admitted yet: the volume is at its bound, or not served yet.
    queue: VecDeque<Waiting>,
    /// So many of them, from the front, have a record.
    reported: usize,
    arriving: Arriving,
    /// Admitted, but behind a lock.
    blocked: VecDeque<ReqKey>,
    locks: Vec<Lock>,
}

#[derive(Debug)]
struct Waiting {
    guest: GuestId,
    op: GuestOp,
    since: Time,
    received: Time,
    /// The number of its record, if it has waited for too long.
    record: u32,
}

/// The request that is being admitted.
#[derive(Clone, Copy, Debug, Default)]
struct Arriving {
    received: Time,
    record: u32,
}

#[derive(Debug)]
struct Lock {
    start: u64,
    end: u64,
    by: ReqKey,
}

#[derive(Debug)]
#[cfg_attr(not(feature = "trace"), allow(dead_code, reason = "only tracing asks for some of it"))]
struct GuestRequest {
    guest: GuestId,
    received: Time,
    admitted: Time,
    /// The record that its first job goes on with.
    record: u32,
    kind: Kind,
    offset: u64,
    length: u64,
    fua: bool,
    /// Jobs not settled yet.
    open: u32,
    /// All jobs that the request needs have been sent.
    all_sent: bool,
    failed: Option<GuestError>,
    stamp: u64,
    kept: Vec<Kept>,
}

#[derive(Debug)]
enum Kind {
    Read { parts: Vec<Option<AnswerBlocks>> },
    Status { part: Option<AnswerBlocks> },
    Change(Change),
    Flush,
}

/// A write, zero or trim under way.
#[derive(Debug)]
struct Change {
    what: What,
    /// Data of the partial first and last block, once read.
    edges: [Edge; 2],
    /// Next whole block to send, and the end of whole blocks.
    next: u64,
    end: u64,
    stage: Stage,
}

#[derive(Clone, Debug)]
enum What {
    Write(Bytes),
    Zero(ZeroMode),
}

#[derive(Debug, Default)]
enum Edge {
    #[default]
    None,
    Wanted(u64),
    Read(u64, Bytes),
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Blocked,
    ReadingEdges,
    Writing,
}

const HEAD: usize = 0;
const TAIL: usize = 1;

impl Requests {
    pub(super) fn waiting(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn open(&self) -> usize {
        self.open + self.queue.len()
    }

    fn insert(&mut self, mut request: GuestRequest) -> ReqKey {
        self.open += 1;
        self.stamps += 1;
        request.stamp = self.stamps;
        let stamp = self.stamps;
        let index = match self.free.pop() {
            Some(index) => {
                self.slab[index] = Some(request);
                index
            }
            None => {
                self.slab.push(Some(request));
                self.slab.len() - 1
            }
        };
        ReqKey { index, stamp }
    }

    fn get_mut(&mut self, key: ReqKey) -> Option<&mut GuestRequest> {
        self.slab.get_mut(key.index)?.as_mut().filter(|request| request.stamp == key.stamp)
    }

    fn remove(&mut self, key: ReqKey) -> Option<GuestRequest> {
        self.get_mut(key)?;
        let request = self.slab.get_mut(key.index)?.take()?;
        self.open -= 1;
        self.free.push(key.index);
        Some(request)
    }

    /// Keeps a settled change if its request is still to be answered.
    pub(super) fn keep(&mut self, key: ReqKey, kept: Kept) {
        if let Some(request) = self.get_mut(key) {
            request.kept.push(kept);
        }
    }

    /// What unanswered requests have kept, in the order of its versions.
    pub(super) fn kept(&self) -> Vec<Kept> {
        let mut kept: Vec<Kept> =
            self.slab.iter().flatten().flat_map(|request| request.kept.iter().cloned()).collect();
        kept.sort_by_key(|kept| kept.version);
        kept
    }

    fn take_waiting(&mut self) -> Option<Waiting> {
        self.reported = self.reported.saturating_sub(1);
        self.queue.pop_front()
    }

    fn is_locked(&self, start: u64, end: u64) -> bool {
        self.locks.iter().any(|lock| start < lock.end && lock.start < end)
    }

    fn keys(&self) -> Vec<ReqKey> {
        let open = self.slab.iter().enumerate();
        open.filter_map(|(index, request)| Some(ReqKey { index, stamp: request.as_ref()?.stamp })).collect()
    }
}

impl Core {
    /// `received`: when it was read off the guest's socket.
    pub(super) fn on_guest(&mut self, guest: GuestId, op: GuestOp, received: Time) {
        let waiting = Waiting { guest, op, since: self.now, received: received.min(self.now), record: 0 };
        if self.stopping.is_some() {
            self.reply_guest(guest, GuestReply::Failed(GuestError::ShuttingDown));
        } else if self.requests.queue.is_empty() && self.may_admit(&waiting.op) {
            self.start(waiting);
        } else {
            self.requests.queue.push_back(waiting);
        }
    }

    fn may_admit(&self, op: &GuestOp) -> bool {
        let limits = &self.config.limits;
        let bytes = match op {
            GuestOp::Read { length, .. } => *length as usize,
            GuestOp::Write { data, .. } => data.len(),
            GuestOp::Zero { .. } | GuestOp::Trim { .. } | GuestOp::Flush | GuestOp::BlockStatus { .. } => 0,
        };
        self.is_serving()
            && (self.open_jobs == 0 || self.now >= self.admit_at)
            && (self.open_jobs == 0
                || (self.open_jobs < limits.volume_jobs && self.open_bytes + bytes <= limits.volume_bytes))
    }

    /// Admits what fits. Called whenever something was settled or the volume came into service.
    pub(super) fn admit_waiting(&mut self) {
        while let Some(next) = self.requests.queue.front() {
            if !self.may_admit(&next.op) {
                break;
            }
            if let Some(waiting) = self.requests.take_waiting() {
                self.start(waiting);
            }
        }
    }

    pub(super) fn refuse_waiting(&mut self) {
        while self.refuse_first(GuestError::ShuttingDown) {}
    }

    /// Answers the first request that waits, if there is one.
    fn refuse_first(&mut self, error: GuestError) -> bool {
        let Some(waiting) = self.requests.take_waiting() else { return false };
        self.end_waiting(&waiting);
        self.reply_guest(waiting.guest, GuestReply::Failed(error));
        true
    }

    #[cfg(not(feature = "trace"))]
    fn end_waiting(&mut self, _: &Waiting) {}

    #[cfg(not(feature = "trace"))]
    fn end_jobless(&mut self, _: &GuestRequest) {}

    /// When the next request may be admitted, if it waits for that.
    pub(super) fn admission_deadline(&self) -> Option<Time> {
        let waits = !self.requests.queue.is_empty() && self.open_jobs > 0 && self.is_serving();
        (waits && self.admit_at > self.now).then_some(self.admit_at)
    }

    /// Slows the guest down before the bound would stop it: the fuller the volume, the longer until the next request.
    fn slow_down(&mut self, jobs: usize, bytes: usize) {
        let limits = &self.config.limits;
        let share = |part: usize, bound: usize| part as f64 / bound.max(1) as f64;
        let fill = share(self.open_jobs, limits.volume_jobs).max(share(self.open_bytes, limits.volume_bytes));
        let over = ((fill - 0.5) * 2.0).clamp(0.0, 1.0);
        let share = share(jobs, limits.volume_jobs).max(share(bytes, limits.volume_bytes)).clamp(0.0, 1.0);
        self.admit_at = self.now.after(limits.slowing.mul_f64(share * over * over));
    }

    fn start(&mut self, waiting: Waiting) {
        let (jobs, bytes) = (self.open_jobs, self.open_bytes);
        let Waiting { guest, op, received, record, .. } = waiting;
        self.requests.arriving = Arriving { received, record };
        self.send_request(guest, op);
        self.slow_down(self.open_jobs.saturating_sub(jobs), self.open_bytes.saturating_sub(bytes));
    }

    fn send_request(&mut self, guest: GuestId, op: GuestOp) {
        match op {
            GuestOp::Read { offset, length } => self.start_read(guest, offset, u64::from(length)),
            GuestOp::BlockStatus { offset, length } => self.start_status(guest, offset, length),
            GuestOp::Flush => {
                let key = self.insert_request(guest, Kind::Flush, 0, 0, false);
                self.send_piece(key, Op::Flush, Bytes::new(), 0);
                self.all_sent(key);
            }
            GuestOp::Write { offset, data, fua } => {
                let length = data.len() as u64;
                self.start_change(guest, What::Write(data), offset, length, fua);
            }
            GuestOp::Zero { offset, length, allocate, fua } => {
                let mode = if allocate { ZeroMode::Allocate } else { ZeroMode::Contexts };
                self.start_change(guest, What::Zero(mode), offset, length, fua);
            }
            GuestOp::Trim { offset, length, fua } => {
                // Rounded inwards: a block that the guest trims only in part keeps all its data.
                let start = offset.div_ceil(BLOCK) * BLOCK;
                let end = (offset + length) / BLOCK * BLOCK;
                let (start, length) = if end > start { (start, end - start) } else { (start, 0) };
                self.start_change(guest, What::Zero(ZeroMode::Punch), start, length, fua);
            }
        }
    }

    fn insert_request(&mut self, guest: GuestId, kind: Kind, offset: u64, length: u64, fua: bool) -> ReqKey {
        let admitted = self.now;
        let Arriving { received, record } = self.requests.arriving;
        let request = GuestRequest {
            guest,
            received,
            admitted,
            record,
            kind,
            offset,
            length,
            fua,
            open: 0,
            all_sent: false,
            failed: None,
            stamp: 0,
            kept: Vec::new(),
        };
        self.requests.insert(request)
    }

    fn send_piece(&mut self, key: ReqKey, op: Op, payload: Bytes, piece: u32) {
        let mut urgency = Urgency::AtOnce;
        if let Some(request) = self.requests.get_mut(key) {
            request.open += 1;
            // An edge is read for the sake of a write.
            if matches!(request.kind, Kind::Read { .. }) {
                urgency = Urgency::Throttled;
            }
        }
        self.send_guest_job(op, payload, Owner::Guest { req: key, piece }, urgency);
    }

    fn start_read(&mut self, guest: GuestId, offset: u64, length: u64) {
        let (first, end) = (offset / BLOCK, (offset + length).div_ceil(BLOCK));
        let key = self.insert_request(guest, Kind::Read { parts: Vec::new() }, offset, length, false);
        for (piece, range) in (0_u32..).zip(pieces(first, end)) {
            if let Some(GuestRequest { kind: Kind::Read { parts }, .. }) = self.requests.get_mut(key) {
                parts.push(None);
            }
            self.send_piece(key, Op::Read { range, mode: ReadMode::Data }, Bytes::new(), piece);
        }
        self.all_sent(key);
    }

    /// Tells of the first extent only: a client that wants more asks again from there.
    fn start_status(&mut self, guest: GuestId, offset: u64, length: u64) {
        let (first, end) = (offset / BLOCK, (offset + length).div_ceil(BLOCK));
        let key = self.insert_request(guest, Kind::Status { part: None }, offset, length, false);
        if let Some(range) = pieces(first, end).next() {
            self.send_piece(key, Op::Read { range, mode: ReadMode::Contexts }, Bytes::new(), 0);
        }
        self.all_sent(key);
    }

    fn start_change(&mut self, guest: GuestId, what: What, offset: u64, length: u64, fua: bool) {
        let tail = offset + length;
        let (first, last) = (offset / BLOCK, tail / BLOCK);
        let mut edges = [Edge::None, Edge::None];
        if length > 0 && !offset.is_multiple_of(BLOCK) {
            edges[HEAD] = Edge::Wanted(first);
        }
        if length > 0 && !tail.is_multiple_of(BLOCK) && (offset.is_multiple_of(BLOCK) || last != first) {
            edges[TAIL] = Edge::Wanted(last);
        }
        let next = offset.div_ceil(BLOCK);
        let change = Change { what, edges, next, end: last.max(next), stage: Stage::Blocked };
        let key = self.insert_request(guest, Kind::Change(change), offset, length, fua);
        if !self.try_change(key) {
            self.requests.blocked.push_back(key);
        }
    }

    /// Starts a change unless a lock is in its way.
    fn try_change(&mut self, key: ReqKey) -> bool {
        let Some(request) = self.requests.get_mut(key) else { return true };
        let (start, end) = (request.offset / BLOCK, (request.offset + request.length).div_ceil(BLOCK));
        if self.requests.is_locked(start, end) {
            return false;
        }
        let Some(GuestRequest { kind: Kind::Change(change), .. }) = self.requests.get_mut(key) else {
            return true;
        };
        let wanted: Vec<(usize, u64)> = change
            .edges
            .iter()
            .enumerate()
            .filter_map(|(i, edge)| if let Edge::Wanted(block) = edge { Some((i, *block)) } else { None })
            .collect();
        if wanted.is_empty() {
            change.stage = Stage::Writing;
            self.send_change(key);
            return true;
        }
        change.stage = Stage::ReadingEdges;
        self.requests.locks.push(Lock { start, end, by: key });
        for (index, block) in wanted {
            let op = Op::Read { range: BlockRange::single(block), mode: ReadMode::Data };
            self.send_piece(key, op, Bytes::new(), u32::try_from(index).unwrap_or(0));
        }
        true
    }

    /// Sends the jobs of a change whose edges are known, as far as the window allows.
    fn send_change(&mut self, key: ReqKey) {
        self.send_edges(key);
        loop {
            let Some(request) = self.requests.get_mut(key) else { return };
            let Kind::Change(change) = &mut request.kind else { return };
            let window = match change.what {
                What::Write(_) => u32::MAX,
                What::Zero(_) => PIECES_WINDOW,
            };
            if request.open >= window {
                return;
            }
            let Some(range) = pieces(change.next, change.end).next() else { break };
            change.next = range.end();
            let (op, payload) = match &change.what {
                What::Write(data) => {
                    let at = usize::try_from(range.start * BLOCK - request.offset).unwrap_or(usize::MAX);
                    let payload = data.slice(at..at + range.bytes());
                    (Op::Write { range, crcs: crc::block_crcs(&payload) }, payload)
                }
                What::Zero(mode) => (Op::Zero { range, mode: *mode }, Bytes::new()),
            };
            self.send_piece(key, op, payload, 0);
        }
        self.unlock(key);
        if self.requests.get_mut(key).is_some_and(|request| request.fua) {
            self.send_piece(key, Op::Flush, Bytes::new(), 0);
        }
        self.all_sent(key);
    }

    /// Merges the guest's bytes into the partial blocks and writes those.
    fn send_edges(&mut self, key: ReqKey) {
        for index in [HEAD, TAIL] {
            let Some(request) = self.requests.get_mut(key) else { return };
            let (offset, length) = (request.offset, request.length);
            let Kind::Change(change) = &mut request.kind else { return };
            let Edge::Read(block, old) = std::mem::take(&mut change.edges[index]) else { continue };
            let merged = merge_edge(&change.what, offset, length, block, &old);
            let op = Op::Write { range: BlockRange::single(block), crcs: crc::block_crcs(&merged) };
            self.send_piece(key, op, merged, 0);
        }
    }

    /// A new generation begins: edges that were read in the old one may have been lost since, so they are read again.
    pub(super) fn forget_edges(&mut self) {
        for key in self.requests.keys() {
            let Some(request) = self.requests.get_mut(key) else { continue };
            let Kind::Change(change) = &mut request.kind else { continue };
            if change.stage != Stage::ReadingEdges {
                continue;
            }
            for index in [HEAD, TAIL] {
                let Some(request) = self.requests.get_mut(key) else { continue };
                let Kind::Change(change) = &mut request.kind else { continue };
                let Edge::Read(block, _) = change.edges[index] else { continue };
                change.edges[index] = Edge::Wanted(block);
                let op = Op::Read { range: BlockRange::single(block), mode: ReadMode::Data };
                self.send_piece(key, op, Bytes::new(), u32::try_from(index).unwrap_or(0));
            }
        }
    }

    fn unlock(&mut self, key: ReqKey) {
        let before = self.requests.locks.len();
        self.requests.locks.retain(|lock| lock.by != key);
        if self.requests.locks.len() == before {
            return;
        }
        for key in std::mem::take(&mut self.requests.blocked) {
            if !self.try_change(key) {
                self.requests.blocked.push_back(key);
            }
        }
    }

    fn all_sent(&mut self, key: ReqKey) {
        if let Some(request) = self.requests.get_mut(key) {
            request.all_sent = true;
        }
        self.finish_if_done(key);
    }

    /// A job of this request was acknowledged, answered, or can't be.
    pub(super) fn piece_settled(
        &mut self,
        key: ReqKey,
        piece: u32,
        result: Result<Option<AnswerBlocks>, GuestError>,
    ) {
        let Some(request) = self.requests.get_mut(key) else { return };
        request.open = request.open.saturating_sub(1);
        match (result, &mut request.kind) {
            (Err(error), _) => request.failed = Some(error),
            (Ok(Some(answer)), Kind::Read { parts }) => {
                if let Some(part) = parts.get_mut(piece as usize) {
                    *part = Some(answer);
                }
            }
            (Ok(Some(answer)), Kind::Status { part }) => *part = Some(answer),
            (Ok(Some(answer)), Kind::Change(change)) => {
                if let Some(edge @ Edge::Wanted(_)) = change.edges.get_mut(piece as usize)
                    && let Edge::Wanted(block) = *edge
                {
                    *edge = Edge::Read(block, one_block(answer));
                }
            }
            (Ok(Some(_)), Kind::Flush) | (Ok(None), _) => {}
        }
        self.continue_change(key);
        self.finish_if_done(key);
    }

    fn continue_change(&mut self, key: ReqKey) {
        let Some(request) = self.requests.get_mut(key) else { return };
        let Kind::Change(change) = &mut request.kind else { return };
        match change.stage {
            Stage::ReadingEdges if request.open > 0 => {}
            Stage::ReadingEdges if request.failed.is_some() => {
                request.all_sent = true;
                self.unlock(key);
            }
            Stage::ReadingEdges => {
                change.stage = Stage::Writing;
                self.send_change(key);
            }
            Stage::Writing if !request.all_sent => self.send_change(key),
            Stage::Writing | Stage::Blocked => {}
        }
    }

    fn finish_if_done(&mut self, key: ReqKey) {
        let Some(request) = self.requests.get_mut(key) else { return };
        if request.open > 0 || !request.all_sent {
            return;
        }
        let Some(request) = self.requests.remove(key) else { return };
        self.end_jobless(&request);
        self.pace.note(self.now, self.now.since(request.admitted));
        self.count(&request);
        let reply = match request.failed {
            Some(error) => GuestReply::Failed(error),
            None => match request.kind {
                Kind::Read { parts } => read_reply(parts, request.offset, request.length),
                Kind::Status { part } => status_reply(part, request.offset, request.length),
                Kind::Change(_) | Kind::Flush => GuestReply::Done,
            },
        };
        self.reply_guest(request.guest, reply);
    }

    fn count(&mut self, request: &GuestRequest) {
        if request.failed.is_some() {
            return;
        }
        let done = match &request.kind {
            Kind::Read { .. } => Done::Read,
            Kind::Change(Change { what: What::Write(_), .. }) => Done::Write,
            Kind::Change(_) | Kind::Flush => Done::Other,
            // Asks for no data, and is answered from contexts.
            Kind::Status { .. } => return,
        };
        self.work.record(done, request.length, self.now.since(request.admitted));
    }

    fn reply_guest(&mut self, guest: GuestId, reply: GuestReply) {
        self.actions.push_back(Action::GuestReply { guest, reply });
    }

    /// Answers everything with this error; jobs that were sent run on for nobody.
    pub(super) fn fail_all_requests(&mut self, error: GuestError) {
        for job in self.jobs.iter_mut() {
            if matches!(job.owner, Owner::Guest { .. }) {
                job.owner = Owner::Nobody;
            }
        }
        for key in self.requests.keys() {
            if let Some(request) = self.requests.remove(key) {
                self.end_jobless(&request);
                self.reply_guest(request.guest, GuestReply::Failed(error));
            }
        }
        self.requests.locks.clear();
        self.requests.blocked.clear();
        while self.refuse_first(error) {}
    }

    /// When some request has waited for a lost quorum as long as it may.
    pub(super) fn quorum_deadline(&self) -> Option<Time> {
        let timeout = self.config.timing.quorum_timeout?;
        let lost = self.quorum_lost_since?;
        let admitted = self.requests.slab.iter().flatten().map(|request| request.admitted);
        let waiting = self.requests.queue.iter().map(|waiting| waiting.since);
        admitted.chain(waiting).min().map(|since| since.max(lost).after(timeout))
    }

    /// Fails what has waited too long; younger requests, and reads that can be answered, go on.
    pub(super) fn check_quorum_timeout(&mut self) {
        if self.quorum_deadline().is_none_or(|deadline| self.now < deadline) {
            return;
        }
        let (Some(timeout), Some(lost)) = (self.config.timing.quorum_timeout, self.quorum_lost_since) else {
            return;
        };
        let now = self.now;
        let late = |since: Time| since.max(lost).after(timeout) <= now;
        for key in self.requests.keys() {
            if self.requests.get_mut(key).is_some_and(|request| late(request.admitted)) {
                self.fail_request(key, GuestError::QuorumLost);
            }
        }
        while self.requests.queue.front().is_some_and(|waiting| late(waiting.since)) {
            self.refuse_first(GuestError::QuorumLost);
        }
    }

    /// Answers one request with an error. Its changes run on for nobody: they may still take effect.
    fn fail_request(&mut self, key: ReqKey, error: GuestError) {
        let Some(request) = self.requests.remove(key) else { return };
        self.end_jobless(&request);
        self.reply_guest(request.guest, GuestReply::Failed(error));
        for id in self.jobs.ids(|job| matches!(job.owner, Owner::Guest { req, .. } if req == key)) {
            if let Some(job) = self.jobs.get_mut(id) {
                job.owner = Owner::Nobody;
                if job.is_read() {
                    self.settle(id, Err(error));
                }
            }
        }
        self.unlock(key);
    }

    pub(super) fn oldest_request(&self) -> Option<Time> {
        self.requests.slab.iter().flatten().map(|request| request.admitted).min()
    }
}

/// A partial block as it will be: `old` with the guest's bytes (or zeros) over it.
fn merge_edge(what: &What, offset: u64, length: u64, block: u64, old: &Bytes) -> Bytes {
    let block_start = block * BLOCK;
    let from = offset.max(block_start);
    let to = (offset + length).min(block_start + BLOCK);
    let at = |position: u64| usize::try_from(position - block_start).unwrap_or(BLOCK_BYTES);
    let mut merged = BytesMut::with_capacity(BLOCK_BYTES);
    merged.extend_from_slice(old);
    merged.resize(BLOCK_BYTES, 0);
    let target = &mut merged[at(from)..at(to)];
    match what {
        What::Write(data) => {
            let start = usize::try_from(from - offset).unwrap_or(usize::MAX);
            target.copy_from_slice(&data[start..start + target.len()]);
        }
        What::Zero(_) => target.fill(0),
    }
    merged.freeze()
}

/// The 4 KiB of a one-block answer; empty means zeros.
fn one_block(answer: AnswerBlocks) -> Bytes {
    answer.data.into_iter().next().unwrap_or_default()
}

/// The whole read as segments, cut to what was asked for.
fn read_reply(parts: Vec<Option<AnswerBlocks>>, offset: u64, length: u64) -> GuestReply {
    let mut segments = Segments {
        out: Vec::with_capacity(1),
        skip: usize::try_from(offset % BLOCK).unwrap_or(0),
        left: usize::try_from(length).unwrap_or(usize::MAX),
    };
    for part in parts {
        let Some(AnswerBlocks { states, data }) = part else { return GuestReply::Failed(GuestError::Io) };
        let mut data = data.into_iter();
        let mut current = Bytes::new();
        let mut index = 0;
        while index < states.len() {
            let kind = states[index].kind;
            let mut run = states[index..].iter().take_while(|state| state.kind == kind).count();
            if kind == BlockKind::Data {
                if current.is_empty() {
                    current = data.next().unwrap_or_default();
                }
                run = run.min(current.len() / BLOCK_BYTES);
                if run == 0 {
                    return GuestReply::Failed(GuestError::Io);
                }
                segments.push_data(current.split_to(run * BLOCK_BYTES));
            } else {
                segments.push_zeros(run * BLOCK_BYTES);
            }
            index += run;
        }
    }
    GuestReply::Data(segments.out)
}

/// Collects segments while cutting the front and the back to what was asked for.
struct Segments {
    out: Vec<Segment>,
    skip: usize,
    left: usize,
}

impl Segments {
    fn take(&mut self, length: usize) -> std::ops::Range<usize> {
        let from = self.skip.min(length);
        self.skip -= from;
        let take = (length - from).min(self.left);
        self.left -= take;
        from..from + take
    }

    fn push_data(&mut self, data: Bytes) {
        let range = self.take(data.len());
        if !range.is_empty() {
            self.out.push(Segment::Data(data.slice(range)));
        }
    }

    fn push_zeros(&mut self, length: usize) {
        let length = u32::try_from(self.take(length).len()).unwrap_or(u32::MAX);
        match self.out.last_mut() {
            Some(Segment::Zeros(zeros)) => *zeros += length,
            Some(Segment::Data(_)) | None if length > 0 => self.out.push(Segment::Zeros(length)),
            Some(Segment::Data(_)) | None => {}
        }
    }
}

fn status_reply(part: Option<AnswerBlocks>, offset: u64, length: u64) -> GuestReply {
    let Some(answer) = part else { return GuestReply::Failed(GuestError::Io) };
    let mut extents: Vec<StatusExtent> = Vec::new();
    let mut skip = offset % BLOCK;
    let mut left = length;
    for state in &answer.states {
        let take = (BLOCK - skip).min(left);
        skip = 0;
        left -= take;
        if take == 0 {
            break;
        }
        let hole = state.kind == BlockKind::Zero;
        match extents.last_mut() {
            Some(last) if last.hole == hole => last.length += take,
            Some(_) | None => extents.push(StatusExtent { length: take, hole }),
        }
    }
    GuestReply::Status(extents)
}

#[cfg(test)]
mod tests {
    use newel_protocol::{BlockState, Version};

    use super::*;

    fn answer(kinds: &[BlockKind]) -> AnswerBlocks {
        let states = kinds.iter().map(|&kind| BlockState { version: Version::NEVER, crc: 0, kind }).collect();
        let blocks = kinds.iter().filter(|&&kind| kind == BlockKind::Data).count();
        let data: Vec<u8> =
            (0..blocks * BLOCK_BYTES).map(|i| u8::try_from(i / BLOCK_BYTES + 1).unwrap()).collect();
        AnswerBlocks { states, data: vec![data.into()] }
    }

    fn flat(reply: &GuestReply) -> Vec<u8> {
        let GuestReply::Data(segments) = reply else { panic!("{reply:?}") };
        segments
            .iter()
            .flat_map(|segment| match segment {
                Segment::Data(data) => data.to_vec(),
                Segment::Zeros(length) => vec![0; *length as usize],
            })
            .collect()
    }

    #[test]
    fn reads_are_cut_to_what_was_asked_for() {
        use BlockKind::{Data, Zero};
        let whole: Vec<u8> = [1_u8, 0, 0, 2, 3].iter().flat_map(|&byte| vec![byte; BLOCK_BYTES]).collect();
        for offset in [0, 1, 512, 4095, 4096, 9000] {
            for length in [1, 511, 4096, 8192, 11_000] {
                let parts = vec![Some(answer(&[Data, Zero, Zero, Data, Data]))];
                let first = offset / BLOCK_BYTES;
                let parts_from_first = parts.into_iter().map(|p| {
                    p.map(|mut p| {
                        let dropped = p.states.drain(..first).filter(|s| s.kind == Data).count();
                        p.data[0] = p.data[0].slice(dropped * BLOCK_BYTES..);
                        p
                    })
                });
                let reply = read_reply(parts_from_first.collect(), offset as u64, length as u64);
                assert_eq!(flat(&reply), whole[offset..offset + length], "{offset}+{length}");
            }
        }
    }

    #[test]
    fn status_is_cut_and_merged() {
        use BlockKind::{Data, Zero};
        let reply = status_reply(Some(answer(&[Data, Data, Zero, Data])), 100, 3 * BLOCK);
        let GuestReply::Status(extents) = reply else { panic!() };
        let lengths: Vec<_> = extents.iter().map(|e| (e.length, e.hole)).collect();
        assert_eq!(lengths, [(2 * BLOCK - 100, false), (BLOCK, true), (100, false)]);
    }

    #[test]
    fn an_edge_keeps_the_bytes_around_it() {
        let old = Bytes::from(vec![9_u8; BLOCK_BYTES]);
        let what = What::Write(Bytes::from_static(b"abc"));
        let merged = merge_edge(&what, 4095, 3, 0, &old);
        assert_eq!((merged[4094], merged[4095]), (9, b'a'));
        let merged = merge_edge(&what, 4095, 3, 1, &old);
        assert_eq!(&merged[..3], b"bc\x09");
        let merged = merge_edge(&What::Zero(ZeroMode::Contexts), 5000, 10, 1, &Bytes::new());
        assert!(merged.iter().all(|&byte| byte == 0) && merged.len() == BLOCK_BYTES);
    }
}
