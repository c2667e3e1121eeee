//! What the reader and the writer of one connection share: its requests in flight, and the replies they have become.
//!
//! Invariants:
//! - A request in flight holds a slot; its reply frees it. A reply to a free slot is dropped and logged: it is a defect
//!   of the volume, and must not reach the guest as somebody else's answer.
//! - Every reply that is queued is whole: a read answers exactly the bytes that were asked for, or fails.
//! - A guest without structured replies never hears ESHUTDOWN: see [`Session::hides`].
//! - Nothing here waits or calls into the volume, so replies may come at any time, also inside `Volume::kick`.
//! - No request is taken while more than `requests_max` of them, or `bytes_max` of their bytes, are in flight or wait to
//!   be sent. One request alone may exceed the bytes.

use std::cell::{Cell, RefCell};
use std::task::{Context, Waker};

use bytes::Bytes;
use newel_protocol::nbd::{
    Agreed, Command, Errno, StatusDescriptor, Terms, put_data_chunk_head, put_error_chunk, put_hole_chunk,
    put_simple, put_status_chunk,
};

use super::outqueue::OutQueue;
use crate::core::api::{GuestError, GuestOp, GuestReply, Segment, StatusExtent};
use crate::shell::guest::GuestSink;

/// Extents of one block-status reply: 64 KiB of it. The guest asks again from where the reply ends.
const STATUS_EXTENTS_MAX: usize = 8192;

#[derive(Debug)]
pub(super) struct Session {
    terms: Terms,
    requests_max: usize,
    bytes_max: usize,
    state: RefCell<State>,
    /// The connection's task. One waker serves reader and writer: they are one task.
    waker: RefCell<Option<Waker>>,
    draining: Cell<bool>,
    /// There is or was another connection beside this one: it may be the same guest's.
    accompanied: Cell<bool>,
    /// Counts whatever came or went.
    stirs: Cell<u64>,
    /// The reader waits for room.
    paused: Cell<bool>,
}

#[derive(Debug, Default)]
struct State {
    slots: Vec<Option<Pending>>,
    free: Vec<u32>,
    bytes_in_flight: usize,
    out: OutQueue,
}

/// What a reply needs to know of its request.
#[derive(Clone, Copy, Debug)]
struct Pending {
    cookie: u64,
    kind: Kind,
    /// Payload that came, or data that will go.
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read { offset: u64, length: u32, single: bool },
    Status { length: u32, single: bool },
    Plain,
}

/// What becomes of a validated command.
#[derive(Debug)]
pub(super) enum Taken {
    /// For the volume, under this slot.
    Submit(u32, GuestOp),
    /// Answered already.
    Answered,
    Disconnect,
}

impl Session {
    pub(super) fn new(agreed: Agreed, size_bytes: u64, requests_max: usize, bytes_max: usize) -> Self {
        let Agreed { structured, base_allocation } = agreed;
        Self {
            terms: Terms { size_bytes, structured, base_allocation },
            requests_max,
            bytes_max,
            state: RefCell::default(),
            waker: RefCell::default(),
            draining: Cell::new(false),
            accompanied: Cell::new(false),
            stirs: Cell::new(0),
            paused: Cell::new(false),
        }
    }

    pub(super) fn terms(&self) -> Terms {
        self.terms
    }

    /// True if another request may be taken.
    pub(super) fn has_room(&self) -> bool {
        let state = self.state.borrow();
        state.in_flight() + state.out.replies() < self.requests_max
            && state.bytes_in_flight + state.out.bytes() < self.bytes_max
    }

    /// Takes in what [`newel_protocol::nbd::validate`] let through, and answers at once what needs no volume.
    pub(super) fn take(&self, cookie: u64, command: Command) -> Taken {
        let (kind, bytes, op) = match command {
            Command::Read { offset, length, single } => {
                (Kind::Read { offset, length, single }, length as usize, GuestOp::Read { offset, length })
            }
            Command::Write { offset, data, fua } => {
                (Kind::Plain, data.len(), GuestOp::Write { offset, data, fua })
            }
            Command::Zero { offset, length, allocate, fua } => {
                (Kind::Plain, 0, GuestOp::Zero { offset, length: u64::from(length), allocate, fua })
            }
            Command::Trim { offset, length, fua } => {
                (Kind::Plain, 0, GuestOp::Trim { offset, length: u64::from(length), fua })
            }
            Command::Flush => (Kind::Plain, 0, GuestOp::Flush),
            Command::BlockStatus { offset, length, single } => (
                Kind::Status { length, single },
                0,
                GuestOp::BlockStatus { offset, length: u64::from(length) },
            ),
            // A hint. There is no cache to fill that would make the read cheaper.
            Command::Cache => {
                self.state.borrow_mut().simple(cookie, None);
                return Taken::Answered;
            }
            Command::Disconnect => return Taken::Disconnect,
        };
        match self.state.borrow_mut().occupy(Pending { cookie, kind, bytes }) {
            Some(slot) => Taken::Submit(slot, op),
            None => {
                self.refuse(cookie, matches!(kind, Kind::Read { .. }), Errno::Io);
                Taken::Answered
            }
        }
    }

    /// Answers a request that doesn't reach the volume. `read`: it is a read, which the rules treat apart.
    pub(super) fn refuse(&self, cookie: u64, read: bool, error: Errno) {
        let text = match error {
            Errno::Invalid => "the request is malformed, or outside the export",
            Errno::NoSpace => "the request reaches past the end of the export",
            Errno::Shutdown => "the server is shutting down",
            Errno::Io => "the server can't take the request",
        };
        if self.hides(error) {
            return;
        }
        let structured = read && self.terms.structured;
        self.state.borrow_mut().fail(cookie, structured, error, text);
    }

    /// Kernels, which ask for no structured replies, take any error for one of the disk: a file system turns read-only. What is left
    /// unanswered when the connection ends they send again over the next one, to the same volume. So to them the way down is only
    /// a lost connection.
    fn hides(&self, error: Errno) -> bool {
        error == Errno::Shutdown && !self.terms.structured
    }

    /// From here on the connection ends as soon as nothing is in flight.
    pub(super) fn drain(&self) {
        self.draining.set(true);
        self.wake();
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// Another connection is there, too.
    pub(super) fn accompany(&self) {
        self.accompanied.set(true);
    }

    pub(super) fn is_accompanied(&self) -> bool {
        self.accompanied.get()
    }

    /// Bytes came or went.
    pub(super) fn stir(&self) {
        self.stirs.set(self.stirs.get().wrapping_add(1));
    }

    /// Changes whenever bytes come or go.
    pub(super) fn stirs(&self) -> u64 {
        self.stirs.get()
    }

    pub(super) fn is_finished(&self) -> bool {
        let state = self.state.borrow();
        state.in_flight() == 0 && state.out.is_empty()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.state.borrow().in_flight()
    }

    pub(super) fn with_out<T>(&self, use_it: impl FnOnce(&mut OutQueue) -> T) -> T {
        use_it(&mut self.state.borrow_mut().out)
    }

    pub(super) fn set_paused(&self, paused: bool) {
        self.paused.set(paused);
    }

    /// Something was sent: the reader may go on, if it waits for that.
    pub(super) fn made_room(&self) {
        if self.paused.get() {
            self.wake();
        }
    }

    /// The task to be woken by [`GuestSink::wake`].
    pub(super) fn register(&self, context: &Context<'_>) {
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
    }
}

impl GuestSink for Session {
    fn reply(&self, slot: u32, reply: GuestReply) {
        let mut state = self.state.borrow_mut();
        match state.vacate(slot) {
            Some(_) if matches!(&reply, GuestReply::Failed(error) if self.hides(describe(*error).0)) => {}
            Some(pending) => state.answer(pending, reply, self.terms.structured),
            None => tracing::error!(slot, "a reply to a request that isn't in flight was dropped"),
        }
    }

    fn wake(&self) {
        if let Some(waker) = &*self.waker.borrow() {
            waker.wake_by_ref();
        }
    }
}

impl State {
    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// `None` only if there are 2³² requests in flight, which the limit keeps from happening.
    fn occupy(&mut self, pending: Pending) -> Option<u32> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = u32::try_from(self.slots.len()).ok()?;
                self.slots.push(None);
                slot
            }
        };
        self.bytes_in_flight += pending.bytes;
        *self.slots.get_mut(slot as usize)? = Some(pending);
        Some(slot)
    }

    fn vacate(&mut self, slot: u32) -> Option<Pending> {
        let pending = self.slots.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        self.bytes_in_flight -= pending.bytes;
        Some(pending)
    }

    fn answer(&mut self, pending: Pending, reply: GuestReply, structured: bool) {
        let Pending { cookie, kind, .. } = pending;
        match (kind, reply) {
            (kind, GuestReply::Failed(error)) => {
                let structured = structured && !matches!(kind, Kind::Plain);
                let (errno, text) = describe(error);
                self.fail(cookie, structured, errno, text);
            }
            (Kind::Plain, GuestReply::Done) => self.simple(cookie, None),
            (Kind::Read { offset, length, single }, GuestReply::Data(segments))
                if total(&segments) == u64::from(length) =>
            {
                if structured {
                    self.read_structured(cookie, offset, length, single, segments);
                } else {
                    self.read_simple(cookie, segments);
                }
            }
            (Kind::Status { length, single }, GuestReply::Status(extents))
                if extents.iter().any(|extent| extent.length > 0) =>
            {
                let extents = cut_status(&extents, length, single);
                self.out.head(|out| put_status_chunk(out, cookie, &extents));
                self.out.end_reply();
            }
            (kind, reply) => {
                tracing::error!(
                    ?kind,
                    ?reply,
                    "the volume's reply doesn't fit the request; the guest gets EIO"
                );
                let structured = structured && !matches!(kind, Kind::Plain);
                self.fail(cookie, structured, Errno::Io, "internal error");
            }
        }
    }

    fn simple(&mut self, cookie: u64, error: Option<Errno>) {
        self.out.head(|out| put_simple(out, cookie, error));
        self.out.end_reply();
    }

    fn fail(&mut self, cookie: u64, structured: bool, error: Errno, text: &str) {
        if structured {
            self.out.head(|out| put_error_chunk(out, cookie, error, text));
            self.out.end_reply();
        } else {
            self.simple(cookie, Some(error));
        }
    }

    fn read_simple(&mut self, cookie: u64, segments: Vec<Segment>) {
        self.out.head(|out| put_simple(out, cookie, None));
        self.pieces(segments);
        self.out.end_reply();
    }

    /// One chunk for each run of data or zeros, or one for all of it.
    fn read_structured(
        &mut self,
        cookie: u64,
        mut offset: u64,
        length: u32,
        single: bool,
        mut segments: Vec<Segment>,
    ) {
        segments.retain(|segment| segment_length(segment) > 0);
        let mixed = segments.iter().any(|segment| is_data(segment) != is_data(&segments[0]));
        if single && mixed {
            self.out.head(|out| put_data_chunk_head(out, cookie, offset, length, true));
            self.pieces(segments);
            return self.out.end_reply();
        }
        let mut left = u64::from(length);
        let mut segments = segments.into_iter();
        while let Some(first) = segments.as_slice().first() {
            let data = is_data(first);
            let (mut count, mut run) = (0, 0);
            for segment in segments.as_slice().iter().take_while(|segment| is_data(segment) == data) {
                count += 1;
                run += segment_length(segment);
            }
            left = left.saturating_sub(run);
            let done = left == 0;
            let length = u32::try_from(run).unwrap_or(u32::MAX);
            let run_of = segments.by_ref().take(count);
            if data {
                self.out.head(|out| put_data_chunk_head(out, cookie, offset, length, done));
                self.pieces(run_of);
            } else {
                run_of.for_each(drop);
                self.out.head(|out| put_hole_chunk(out, cookie, offset, length, done));
            }
            offset += run;
        }
        self.out.end_reply();
    }

    fn pieces(&mut self, segments: impl IntoIterator<Item = Segment>) {
        for segment in segments {
            match segment {
                Segment::Data(data) => self.out.data(data),
                Segment::Zeros(length) => self.out.zeroes(length as usize),
            }
        }
    }
}

fn describe(error: GuestError) -> (Errno, &'static str) {
    match error {
        GuestError::Io => (Errno::Io, "no replica has a good copy"),
        GuestError::ShuttingDown => (Errno::Shutdown, "the server is shutting down"),
        GuestError::QuorumLost => (Errno::Io, "too few replicas for longer than quorum_timeout"),
    }
}

fn is_data(segment: &Segment) -> bool {
    matches!(segment, Segment::Data(_))
}

fn segment_length(segment: &Segment) -> u64 {
    match segment {
        Segment::Data(data) => Bytes::len(data) as u64,
        Segment::Zeros(length) => u64::from(*length),
    }
}

fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(segment_length).sum()
}

/// Neighbours of a kind merged, nothing beyond `length`, and only the first if `single`.
fn cut_status(extents: &[StatusExtent], length: u32, single: bool) -> Vec<StatusDescriptor> {
    let mut out: Vec<StatusDescriptor> = Vec::new();
    let mut left = u64::from(length);
    for &StatusExtent { length, hole } in extents.iter().filter(|extent| extent.length > 0) {
        let part = u32::try_from(length.min(left)).unwrap_or(u32::MAX);
        if part == 0 {
            break;
        }
        let full = out.len() == if single { 1 } else { STATUS_EXTENTS_MAX };
        match out.last_mut() {
            Some(last) if last.hole == hole => last.length += part,
            _ if full => break,
            _ => out.push(StatusDescriptor { length: part, hole }),
        }
        left -= u64::from(part);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_merged_and_cut() {
        let check = |extents: &[(u64, bool)], length, single, expected: &[(u32, bool)]| {
            let extents: Vec<_> =
                extents.iter().map(|&(length, hole)| StatusExtent { length, hole }).collect();
            let found: Vec<_> =
                cut_status(&extents, length, single).iter().map(|found| (found.length, found.hole)).collect();
            assert_eq!(found, expected);
        };
        check(&[(4, true), (4, true), (4, false)], 100, false, &[(8, true), (4, false)]);
        check(&[(4, true), (4, true), (4, false)], 100, true, &[(8, true)]);
        check(&[(4, true), (4, false)], 6, false, &[(4, true), (2, false)]);
        check(&[(4, true), (4, false)], 4, false, &[(4, true)]);
        check(&[(1 << 40, true)], u32::MAX, false, &[(u32::MAX, true)]);
        check(&[(0, false), (4, true)], 4, true, &[(4, true)]);
    }

    /// Replies to a read of 10 bytes at 100; what goes out, with the data behind their heads.
    fn read(structured: bool, single: bool, segments: Vec<Segment>) -> Vec<u8> {
        let session = Session::new(Agreed { structured, base_allocation: false }, 1 << 20, 8, 1 << 20);
        let Taken::Submit(slot, _) = session.take(9, Command::Read { offset: 100, length: 10, single })
        else {
            panic!("a read is for the volume");
        };
        session.reply(slot, GuestReply::Data(segments));
        assert_eq!(session.in_flight(), 0);
        session.with_out(|out| {
            let mut slices = [std::io::IoSlice::new(&[]); super::super::outqueue::SLICES_MAX];
            let used = out.gather(&mut slices);
            slices[..used].iter().flat_map(|slice| slice.to_vec()).collect()
        })
    }

    type Put<'a> = &'a dyn Fn(&mut Vec<u8>);

    fn put(heads: &[Put<'_>]) -> Vec<u8> {
        let mut out = Vec::new();
        heads.iter().for_each(|put| put(&mut out));
        out
    }

    #[test]
    fn reads_go_out_in_as_few_chunks_as_they_can() {
        let data = |bytes: &'static [u8]| Segment::Data(Bytes::from_static(bytes));
        let mixed = || vec![data(b"ab"), data(b"cd"), Segment::Zeros(1), Segment::Zeros(2), data(b"xyz")];
        assert_eq!(
            read(true, false, mixed()),
            put(&[
                &|out| put_data_chunk_head(out, 9, 100, 4, false),
                &|out| out.extend(b"abcd"),
                &|out| put_hole_chunk(out, 9, 104, 3, false),
                &|out| put_data_chunk_head(out, 9, 107, 3, true),
                &|out| out.extend(b"xyz"),
            ])
        );
        assert_eq!(
            read(true, true, mixed()),
            put(&[&|out| put_data_chunk_head(out, 9, 100, 10, true), &|out| out.extend(b"abcd\0\0\0xyz")])
        );
        let zeros = || vec![Segment::Zeros(4), Segment::Zeros(6)];
        assert_eq!(read(true, true, zeros()), put(&[&|out| put_hole_chunk(out, 9, 100, 10, true)]));
        assert_eq!(
            read(false, false, mixed()),
            put(&[&|out| put_simple(out, 9, None), &|out| out.extend(b"abcd\0\0\0xyz")])
        );
        // A volume that miscounts must not put the stream out of step.
        assert_eq!(
            read(false, false, vec![Segment::Zeros(9)]),
            put(&[&|out| put_simple(out, 9, Some(Errno::Io))])
        );
        let failed = read(true, false, vec![Segment::Zeros(11)]);
        assert_eq!(failed, put(&[&|out| put_error_chunk(out, 9, Errno::Io, "internal error")]));
    }

    #[test]
    fn room_ends_with_requests_and_with_bytes_and_comes_back() {
        let session = Session::new(Agreed::default(), 1 << 20, 2, 100);
        let flush = || {
            let Taken::Submit(slot, _) = session.take(1, Command::Flush) else { panic!("for the volume") };
            slot
        };
        let (first, _) = (flush(), flush());
        assert!(!session.has_room());
        session.reply(first, GuestReply::Done);
        assert!(!session.has_room(), "an unsent reply counts");
        session.with_out(|out| out.advance(16));
        assert!(session.has_room());
        session.take(1, Command::Write { offset: 0, data: Bytes::from_static(&[0; 100]), fua: false });
        assert!(!session.has_room());
        session.reply(7, GuestReply::Done);
        assert_eq!(session.in_flight(), 2, "a reply to nobody changes nothing");
    }
}
