//! Guest requests: cut into jobs, and answered once these are settled.
//!
//! Invariants:
//! - A request is answered exactly once.
//! - A request that needs several jobs is answered as a whole. Until then the jobs that are settled already are kept: should
//!   every replica lose power meanwhile, they are lost like any unflushed write, but the answer is still to come and must
//!   be true. So the next activation stores them again, under their old versions, wherever nothing newer lies.
//!
//! Files: [`admission`] when a request's turn comes, [`table`] those that are open, [`change`] writes, zeros and trims with their
//! unaligned edges, [`answer`] what is read as guests asked for it, [`giving_up`] answers before the time, [`trace`] what tracing asks for.

mod admission;
mod answer;
mod change;
mod giving_up;
mod table;
#[cfg(feature = "trace")]
mod trace;

use bytes::Bytes;
use newel_protocol::BLOCK_BYTES;
use newel_protocol::wire::{Op, ReadMode, ZeroMode};

use super::Core;
use super::api::{Action, GuestError, GuestId, GuestOp, GuestReply, Time};
use super::jobs::{AnswerBlocks, Owner, ReqKey, pieces};
use super::kept::Kept;
use super::reads::Urgency;
use super::work::Done;
#[cfg(not(feature = "trace"))]
use admission::Waiting;
use admission::{Arriving, Queue};
use change::{Change, Locks, What};
use table::Table;

const BLOCK: u64 = BLOCK_BYTES as u64;

#[derive(Debug, Default)]
pub(super) struct Requests {
    table: Table,
    queue: Queue,
    locks: Locks,
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

impl Requests {
    pub(super) fn waiting(&self) -> usize {
        self.queue.waiting.len()
    }

    pub(super) fn open(&self) -> usize {
        self.table.open() + self.waiting()
    }

    /// Keeps a settled change if its request is still to be answered.
    pub(super) fn keep(&mut self, key: ReqKey, kept: Kept) {
        if let Some(request) = self.table.get_mut(key) {
            request.kept.push(kept);
        }
    }

    /// What unanswered requests have kept, in the order of its versions.
    pub(super) fn kept(&self) -> Vec<Kept> {
        let mut kept: Vec<Kept> =
            self.table.iter().flat_map(|request| request.kept.iter().cloned()).collect();
        kept.sort_by_key(|kept| kept.version);
        kept
    }
}

impl Core {
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
        let Arriving { received, record } = self.requests.queue.arriving;
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
        self.requests.table.insert(request)
    }

    fn send_piece(&mut self, key: ReqKey, op: Op, payload: Bytes, piece: u32) {
        let mut urgency = Urgency::AtOnce;
        if let Some(request) = self.requests.table.get_mut(key) {
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
            if let Some(GuestRequest { kind: Kind::Read { parts }, .. }) = self.requests.table.get_mut(key) {
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

    fn all_sent(&mut self, key: ReqKey) {
        if let Some(request) = self.requests.table.get_mut(key) {
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
        let Some(request) = self.requests.table.get_mut(key) else { return };
        request.open = request.open.saturating_sub(1);
        match (result, &mut request.kind) {
            (Err(error), _) => request.failed = Some(error),
            (Ok(Some(answer)), Kind::Read { parts }) => {
                if let Some(part) = parts.get_mut(piece as usize) {
                    *part = Some(answer);
                }
            }
            (Ok(Some(answer)), Kind::Status { part }) => *part = Some(answer),
            (Ok(Some(answer)), Kind::Change(change)) => change.has_read(piece, answer),
            (Ok(Some(_)), Kind::Flush) | (Ok(None), _) => {}
        }
        self.continue_change(key);
        self.finish_if_done(key);
    }

    fn finish_if_done(&mut self, key: ReqKey) {
        let Some(request) = self.requests.table.get_mut(key) else { return };
        if request.open > 0 || !request.all_sent {
            return;
        }
        let Some(request) = self.requests.table.remove(key) else { return };
        self.end_jobless(&request);
        self.pace.note(self.now, self.now.since(request.admitted));
        self.count(&request);
        let reply = match request.failed {
            Some(error) => GuestReply::Failed(error),
            None => match request.kind {
                Kind::Read { parts } => answer::read_reply(parts, request.offset, request.length),
                Kind::Status { part } => answer::status_reply(part, request.offset, request.length),
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

    #[cfg(not(feature = "trace"))]
    fn end_waiting(&mut self, _: &Waiting) {}

    #[cfg(not(feature = "trace"))]
    fn end_jobless(&mut self, _: &GuestRequest) {}
}
