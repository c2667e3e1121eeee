//! Linux aio on one descriptor: `io_setup`, `io_submit`, `io_getevents`, `io_destroy`. The only file with `unsafe`.
//!
//! Invariants:
//! - The ring owns the buffers of every request from its submission to its completion, and nobody else can reach them
//!   meanwhile. They lie on the heap, so that moving their handles does not move them.
//! - At most `depth` requests are in flight, which is what the kernel's ring was set up for: it is never full.
//! - One thread submits; another waits, or polls when the eventfd says that something is there. Submitting may block in
//!   the kernel; completions are taken meanwhile.
//! - Every request comes back exactly once, from `submit` if the kernel refused it, else from `wait`.
//! - Dropping the ring waits for all that is in flight before any buffer is freed.
//!
//! Left to others: what is read and written ([`super::pool`]).
#![expect(clippy::disallowed_methods, reason = "stage times are measured here, where the kernel is called")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::buffer::AlignedBuf;
use super::lock;

/// A submission longer than this is worth a second look at the clock of each request: the device's queue was full.
const SLOW_SUBMIT: Duration = Duration::from_millis(1);

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_PWRITEV: u16 = 8;
const IOCB_FLAG_RESFD: u32 = 1;

/// `struct iocb` of the kernel, on a little-endian machine.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

/// `struct io_event` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct IoEvent {
    data: u64,
    iocb: u64,
    result: i64,
    result2: i64,
}

const _: () =
    assert!(size_of::<Iocb>() == 64 && size_of::<IoEvent>() == 32 && cfg!(target_endian = "little"));

#[derive(Debug)]
pub(super) enum Payload {
    Write(Bytes),
    WriteCopy(AlignedBuf),
    WriteMany(Vec<Bytes>),
    Read(AlignedBuf),
}

impl Payload {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Write(bytes) => bytes.len(),
            Self::WriteCopy(bytes) | Self::Read(bytes) => bytes.len(),
            Self::WriteMany(pieces) => pieces.iter().map(Bytes::len).sum(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Request<T> {
    pub offset: u64,
    pub payload: Payload,
    pub user: T,
}

#[derive(Debug)]
pub(super) struct Completion<T> {
    pub payload: Payload,
    pub user: T,
    pub result: io::Result<usize>,
    /// When the kernel had taken it.
    pub submitted: Instant,
}

#[derive(Debug)]
struct Entry<T> {
    payload: Payload,
    user: T,
    submitted: Instant,
}

#[derive(Debug)]
struct Slots<T> {
    entries: Vec<Option<Entry<T>>>,
    free: Vec<usize>,
    /// The submitting thread waits for room.
    waiting: bool,
}

#[derive(Debug)]
pub(super) struct Ring<T> {
    context: libc::c_ulong,
    file: OwnedFd,
    /// Raised by the kernel for each completion.
    eventfd: Option<OwnedFd>,
    depth: usize,
    slots: Mutex<Slots<T>>,
    room: Condvar,
}

/// What a submitting thread keeps between calls, so as not to allocate.
#[derive(Debug, Default)]
pub(super) struct Batch {
    iocbs: Vec<Iocb>,
    iovecs: Vec<libc::iovec>,
    pointers: Vec<*mut Iocb>,
    bytes: u64,
}

/// What one submission did.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Submitted {
    pub requests: usize,
    pub bytes: u64,
    pub took: Duration,
    pub ended: Option<Instant>,
    /// The thread slept in the kernel, which is not the same as being kept from a processor by others.
    pub slept: bool,
}

/// How often this thread gave up its processor of its own accord.
fn sleeps_of_this_thread() -> libc::c_long {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills a struct rusage, which lives throughout the call; all of its bytes being zero is a valid value
    // of it, should the call fail.
    unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init().ru_nvcsw
    }
}

/// What a waiting thread keeps between calls.
#[derive(Debug)]
pub(super) struct Events(Vec<IoEvent>);

impl<T> Ring<T> {
    pub(super) fn new(file: OwnedFd, depth: u32, eventfd: Option<OwnedFd>) -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one aio_context_t, an unsigned long, to a place that lives throughout the call and
        // holds zero, as it demands.
        let result =
            unsafe { libc::syscall(libc::SYS_io_setup, libc::c_long::from(depth), &raw mut context) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let depth = depth as usize;
        let slots =
            Slots { entries: (0..depth).map(|_| None).collect(), free: (0..depth).collect(), waiting: false };
        Ok(Self { context, file, eventfd, depth, slots: Mutex::new(slots), room: Condvar::new() })
    }

    pub(super) fn events(&self) -> Events {
        Events(vec![IoEvent::default(); self.depth])
    }

    /// True if nothing is in flight.
    pub(super) fn is_idle(&self) -> bool {
        lock(&self.slots).free.len() == self.depth
    }

    /// Submits from the front of `requests` what there is room for, at least one; waits for room if there is none. What
    /// the kernel refuses goes to `refused`.
    pub(super) fn submit(
        &self,
        requests: &mut VecDeque<Request<T>>,
        batch: &mut Batch,
        refused: &mut Vec<Completion<T>>,
    ) -> Submitted {
        if requests.is_empty() {
            return Submitted::default();
        }
        let began = self.stage(requests, batch);
        let sleeps = sleeps_of_this_thread();
        let mut done = 0;
        while done < batch.pointers.len() {
            match self.io_submit(batch, done) {
                Ok(taken) => done += taken,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error)
                    if error.raw_os_error() == Some(libc::EAGAIN)
                        && self.wait_for_one(batch.iocbs.len() - done) => {}
                Err(error) => {
                    // The error is that of the first one; the others may fare better.
                    let slot = batch.iocbs.get(done).map(|iocb| iocb.data);
                    if let Some(entry) = slot.and_then(|slot| take(&mut lock(&self.slots), slot)) {
                        let Entry { payload, user, submitted } = entry;
                        refused.push(Completion { payload, user, result: Err(error), submitted });
                    }
                    done += 1;
                }
            }
        }
        let ended = Instant::now();
        let took = ended.duration_since(began);
        if took > SLOW_SUBMIT {
            // Slots are filled by this thread only: what is still there is of this batch.
            let mut slots = lock(&self.slots);
            for slot in batch.iocbs.iter().filter_map(|iocb| usize::try_from(iocb.data).ok()) {
                if let Some(Some(entry)) = slots.entries.get_mut(slot) {
                    entry.submitted = ended;
                }
            }
        }
        Submitted {
            requests: batch.pointers.len(),
            bytes: batch.bytes,
            took,
            ended: Some(ended),
            slept: took > SLOW_SUBMIT && sleeps_of_this_thread() > sleeps,
        }
    }

    /// Moves requests into slots and describes them to the kernel.
    fn stage(&self, requests: &mut VecDeque<Request<T>>, batch: &mut Batch) -> Instant {
        batch.iocbs.clear();
        batch.iovecs.clear();
        batch.pointers.clear();
        batch.bytes = 0;
        let mut slots = lock(&self.slots);
        while slots.free.is_empty() {
            slots.waiting = true;
            slots = self.room.wait(slots).unwrap_or_else(PoisonError::into_inner);
        }
        let submitted = Instant::now();
        while let Some(&slot) = slots.free.last()
            && let Some(Request { offset, payload, user }) = requests.pop_front()
        {
            slots.free.pop();
            batch.bytes += payload.len() as u64;
            let (opcode, buffer, bytes) = describe(&payload, &mut batch.iovecs);
            batch.iocbs.push(Iocb {
                data: slot as u64,
                opcode,
                fd: self.file.as_raw_fd().cast_unsigned(),
                buffer,
                bytes,
                offset: offset.cast_signed(),
                flags: if self.eventfd.is_some() { IOCB_FLAG_RESFD } else { 0 },
                result_fd: self.eventfd.as_ref().map_or(0, |fd| fd.as_raw_fd().cast_unsigned()),
                ..Iocb::default()
            });
            if let Some(place) = slots.entries.get_mut(slot) {
                *place = Some(Entry { payload, user, submitted });
            }
        }
        drop(slots);
        // The vectors no longer move: now the pointers into them can be taken.
        for iocb in batch.iocbs.iter_mut().filter(|iocb| iocb.opcode == IOCB_CMD_PWRITEV) {
            let first = usize::try_from(iocb.buffer).unwrap_or(usize::MAX);
            iocb.buffer = batch.iovecs.get(first..).map_or(0, |vectors| vectors.as_ptr().addr() as u64);
        }
        batch.pointers.extend(batch.iocbs.iter_mut().map(std::ptr::from_mut));
        submitted
    }

    fn io_submit(&self, batch: &mut Batch, from: usize) -> io::Result<usize> {
        let Some(pointers) = batch.pointers.get_mut(from..) else { return Ok(0) };
        let count = pointers.len().cast_signed() as libc::c_long;
        // SAFETY: `pointers` holds `count` pointers to iocbs in `batch.iocbs`, which nothing has moved since they were
        // taken; the kernel copies iocbs and iovecs during the call. The buffers that they name belong to entries of
        // this ring, which gives them up only when the kernel reports the request's end (or refused it), and they are as
        // long as the iocb or iovec says: `describe` took both from the same slice.
        let result =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, count, pointers.as_mut_ptr()) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// The kernel has no room although we have: waits until something completes. False if nothing of ours can, because
    /// nothing but the `staged` ones is under way.
    fn wait_for_one(&self, staged: usize) -> bool {
        let mut slots = lock(&self.slots);
        let free = slots.free.len();
        if self.depth - free <= staged {
            return false;
        }
        while slots.free.len() == free {
            slots.waiting = true;
            slots = self.room.wait(slots).unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    /// Waits for at least one completion and takes all there are.
    pub(super) fn wait(&self, events: &mut Events, into: &mut Vec<Completion<T>>) -> io::Result<()> {
        self.take_events(1, events, into)
    }

    /// Takes the completions there are, without waiting.
    pub(super) fn poll(&self, events: &mut Events, into: &mut Vec<Completion<T>>) -> io::Result<()> {
        self.take_events(0, events, into)
    }

    /// Waits for `least` completions and takes all there are.
    fn take_events(
        &self,
        least: libc::c_long,
        events: &mut Events,
        into: &mut Vec<Completion<T>>,
    ) -> io::Result<()> {
        let room = events.0.len().cast_signed() as libc::c_long;
        let no_timeout = std::ptr::null_mut::<libc::timespec>();
        // SAFETY: the kernel writes at most `room` events to `events`, which has that many; no timeout is allowed to be
        // null.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                least,
                room,
                events.0.as_mut_ptr(),
                no_timeout,
            )
        };
        let Ok(count) = usize::try_from(result) else {
            let error = io::Error::last_os_error();
            return if error.raw_os_error() == Some(libc::EINTR) { Ok(()) } else { Err(error) };
        };
        let mut slots = lock(&self.slots);
        for event in events.0.iter().take(count) {
            if let Some(Entry { payload, user, submitted }) = take(&mut slots, event.data) {
                let result = usize::try_from(event.result).map_err(|_| {
                    io::Error::from_raw_os_error(i32::try_from(-event.result).unwrap_or(libc::EIO))
                });
                into.push(Completion { payload, user, result, submitted });
            }
        }
        let waiting = std::mem::take(&mut slots.waiting);
        drop(slots);
        if waiting {
            self.room.notify_one();
        }
        Ok(())
    }
}

/// Opcode, buffer and length of an iocb. Of a vector the buffer is the index of its first element for now.
fn describe(payload: &Payload, iovecs: &mut Vec<libc::iovec>) -> (u16, u64, u64) {
    let plain = |bytes: &[u8]| (bytes.as_ptr().addr() as u64, bytes.len() as u64);
    let (opcode, (buffer, bytes)) = match payload {
        Payload::Write(bytes) => (IOCB_CMD_PWRITE, plain(bytes)),
        Payload::WriteCopy(bytes) => (IOCB_CMD_PWRITE, plain(bytes)),
        Payload::Read(bytes) => (IOCB_CMD_PREAD, plain(bytes)),
        Payload::WriteMany(pieces) => {
            let first = iovecs.len() as u64;
            iovecs.extend(pieces.iter().map(|piece| libc::iovec {
                iov_base: piece.as_ptr().cast_mut().cast(),
                iov_len: piece.len(),
            }));
            (IOCB_CMD_PWRITEV, (first, pieces.len() as u64))
        }
    };
    (opcode, buffer, bytes)
}

fn take<T>(slots: &mut Slots<T>, slot: u64) -> Option<Entry<T>> {
    let slot = usize::try_from(slot).ok()?;
    let entry = slots.entries.get_mut(slot)?.take()?;
    slots.free.push(slot);
    Some(entry)
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // SAFETY: the context is ours and this is its last use. The call returns when every request has ended, so no
        // buffer is written or read afterwards; the entries are freed after it.
        let result = unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
        debug_assert_eq!(result, 0, "io_destroy: {}", io::Error::last_os_error());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_back_with_what_was_written() {
        let file = tempfile::tempfile().unwrap();
        let ring = Ring::new(file.try_clone().unwrap().into(), 4, None).unwrap();
        let (mut batch, mut refused) = (Batch::default(), Vec::new());
        let many = vec![Bytes::from_static(b"ab"), Bytes::from_static(b"cd")];
        let mut copy = AlignedBuf::zeroed(2);
        copy.copy_from_slice(b"ef");
        let payloads =
            [Payload::Write(Bytes::from_static(b"xy")), Payload::WriteMany(many), Payload::WriteCopy(copy)];
        let offsets = [0, 2, 6];
        let mut requests: VecDeque<_> = (0..)
            .zip(offsets.into_iter().zip(payloads))
            .map(|(user, (offset, payload))| Request { offset, payload, user })
            .collect();
        // A bad offset is refused and does not hold up the others.
        requests.insert(
            1,
            Request { offset: u64::MAX, payload: Payload::Write(Bytes::from_static(b"no")), user: 9 },
        );
        ring.submit(&mut requests, &mut batch, &mut refused);
        assert!(requests.is_empty());
        let (mut events, mut done) = (ring.events(), refused);
        while done.len() < 4 {
            ring.wait(&mut events, &mut done).unwrap();
        }
        done.sort_by_key(|completion| completion.user);
        let results: Vec<_> = done.iter().map(|done| done.result.as_ref().ok().copied()).collect();
        assert_eq!(results, [Some(2), Some(4), Some(2), None]);

        let request = Request { offset: 0, payload: Payload::Read(AlignedBuf::zeroed(16)), user: 5 };
        ring.submit(&mut VecDeque::from([request]), &mut batch, &mut Vec::new());
        done.clear();
        ring.wait(&mut events, &mut done).unwrap();
        let Some(Completion { payload: Payload::Read(bytes), result: Ok(8), user: 5, .. }) = done.pop()
        else {
            panic!("{done:?}")
        };
        assert_eq!(&bytes[..8], b"xyabcdef");
    }

    #[test]
    fn a_full_ring_waits_for_room() {
        let file = tempfile::tempfile().unwrap();
        let ring = Ring::new(file.into(), 2, None).unwrap();
        let count = 100;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut requests: VecDeque<_> = (0..count)
                    .map(|user| Request {
                        offset: user,
                        payload: Payload::Write(Bytes::from_static(b"z")),
                        user,
                    })
                    .collect();
                let (mut batch, mut refused) = (Batch::default(), Vec::new());
                while !requests.is_empty() {
                    ring.submit(&mut requests, &mut batch, &mut refused);
                }
                assert!(refused.is_empty());
            });
            let (mut events, mut done) = (ring.events(), Vec::new());
            while done.len() < usize::try_from(count).unwrap() {
                ring.wait(&mut events, &mut done).unwrap();
            }
            assert!(done.iter().all(|done| matches!(done.result, Ok(1))));
        });
    }
}
