//! Linux aio on one descriptor: `io_setup`, `io_submit`, `io_getevents`, `io_destroy`. With `uring.rs` the only file with
//! `unsafe`.
//!
//! Invariants:
//! - The ring owns the buffers of every request until the kernel reports its end (`engine.rs` has the contract).
//! - At most `depth` requests are in flight, which is what the kernel's ring was set up for: it is never full.
//! - Completions are read where the kernel puts them, without a system call, by one thread at a time.
//!
//! Left to others: what is read and written ([`super::pool`]).
#![expect(clippy::disallowed_methods, reason = "stage times are measured here, where the kernel is called")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::engine::{Completion, Engine, Payload, Request, Submitted};
use super::lock;
use super::slots::{Entry, Slots};

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

/// The head of `struct aio_ring`, which the kernel maps for us at the address that is the context's name; the events follow.
#[repr(C)]
struct RingHead {
    id: u32,
    events: u32,
    head: u32,
    tail: u32,
    magic: u32,
    compatible: u32,
    incompatible: u32,
    header_bytes: u32,
}

const RING_MAGIC: u32 = 0xa10a_10a1;

/// One `io_setup`.
#[derive(Debug)]
struct Context {
    name: libc::c_ulong,
    /// The kernel's ring looks as we know it.
    is_mapped: bool,
}

impl Context {
    fn new(depth: u32) -> io::Result<Self> {
        let mut name: libc::c_ulong = 0;
        // SAFETY: the kernel writes one aio_context_t, an unsigned long, to a place that lives throughout the call and
        // holds zero, as it demands.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, libc::c_long::from(depth), &raw mut name) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let ring = name as *const RingHead;
        // SAFETY: `io_setup` mapped its ring at this address, readable, until `io_destroy`; these fields never change. Should
        // another kernel not do so, its name for the context is an address all the same, or the magic is not there.
        let (magic, incompatible) = unsafe { ((*ring).magic, (*ring).incompatible) };
        Ok(Self { name, is_mapped: magic == RING_MAGIC && incompatible == 0 })
    }

    /// Every pointer must be to an iocb whose buffers live, and are nobody else's, until its event was taken.
    unsafe fn submit(&self, pointers: &mut [*mut Iocb]) -> io::Result<usize> {
        let count = pointers.len().cast_signed() as libc::c_long;
        // SAFETY: `pointers` holds `count` pointers to iocbs; that these and their buffers are sound is the caller's promise.
        let result = unsafe { libc::syscall(libc::SYS_io_submit, self.name, count, pointers.as_mut_ptr()) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// Waits for `least` events and takes as many as fit; how many these are.
    fn wait(&self, least: usize, events: &mut [IoEvent]) -> io::Result<usize> {
        let room = events.len().cast_signed() as libc::c_long;
        let least = least.cast_signed() as libc::c_long;
        let no_timeout = std::ptr::null_mut::<libc::timespec>();
        // SAFETY: the kernel writes at most `room` events to `events`, which has that many; no timeout is allowed to be
        // null.
        let result = unsafe {
            libc::syscall(libc::SYS_io_getevents, self.name, least, room, events.as_mut_ptr(), no_timeout)
        };
        match usize::try_from(result) {
            Ok(count) => Ok(count),
            Err(_) => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::EINTR) => Ok(0),
                error => Err(error),
            },
        }
    }

    /// Takes the events there are, as many as fit, without a system call. Only one thread at a time may do so, or wait.
    fn peek(&self, events: &mut [IoEvent]) -> io::Result<usize> {
        if !self.is_mapped {
            return self.wait(0, events);
        }
        let ring = self.name as *mut RingHead;
        // SAFETY: the ring is mapped, readable and writable, until this context is dropped, and its magic was found. `tail` is
        // written by the kernel alone and after the events before it; `head` by whoever takes events, which is us alone. Both are
        // below `events`, and that many events follow the header.
        unsafe {
            let tail = AtomicU32::from_ptr(&raw mut (*ring).tail).load(Ordering::Acquire);
            let head = AtomicU32::from_ptr(&raw mut (*ring).head);
            let size = (*ring).events;
            let mut at = head.load(Ordering::Relaxed);
            if at == tail || size == 0 || tail >= size {
                return Ok(0);
            }
            let first = ring.byte_add((*ring).header_bytes as usize).cast::<IoEvent>();
            let mut count = 0;
            for place in events {
                if at == tail {
                    break;
                }
                at %= size;
                *place = first.add(at as usize).read();
                at = (at + 1) % size;
                count += 1;
            }
            head.store(at, Ordering::Release);
            Ok(count)
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is ours and this is its last use. The call returns when every request has ended, so no
        // buffer is written or read afterwards; whoever owns them frees them after it.
        let result = unsafe { libc::syscall(libc::SYS_io_destroy, self.name) };
        debug_assert_eq!(result, 0, "io_destroy: {}", io::Error::last_os_error());
    }
}

/// The engine. `T` comes back with each request.
#[derive(Debug)]
pub(super) struct Ring<T> {
    // First: it is dropped before the buffers that the kernel may still use.
    context: Context,
    file: OwnedFd,
    /// Raised at each completion.
    eventfd: Option<OwnedFd>,
    slots: Mutex<Slots<T>>,
    /// Of the thread that submits.
    batch: Mutex<Batch>,
    /// Of whoever takes completions.
    events: Mutex<Vec<IoEvent>>,
}

#[derive(Debug, Default)]
struct Batch {
    iocbs: Vec<Iocb>,
    iovecs: Vec<libc::iovec>,
    pointers: Vec<*mut Iocb>,
    bytes: u64,
}

// SAFETY: the pointers lead from a batch into itself and to buffers that the slots own, and are used only between being made
// and the end of the call that made them.
unsafe impl Send for Batch {}

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

impl<T> Ring<T> {
    pub(super) fn new(file: OwnedFd, depth: u32, eventfd: Option<OwnedFd>) -> io::Result<Self> {
        let context = Context::new(depth)?;
        let depth = depth as usize;
        let events = Mutex::new(vec![IoEvent::default(); depth]);
        let slots = Mutex::new(Slots::new(depth));
        Ok(Self { context, file, eventfd, slots, batch: Mutex::default(), events })
    }

    /// Moves requests into slots and describes them to the kernel.
    fn stage(&self, requests: &mut VecDeque<Request<T>>, count: usize, batch: &mut Batch) -> Instant {
        batch.iocbs.clear();
        batch.iovecs.clear();
        batch.pointers.clear();
        batch.bytes = 0;
        let mut slots = lock(&self.slots);
        let submitted = Instant::now();
        while batch.iocbs.len() < count
            && slots.has_room()
            && let Some(request) = requests.pop_front()
        {
            batch.bytes += request.payload.len() as u64;
            let (opcode, buffer, bytes) = describe(&request.payload, &mut batch.iovecs);
            let offset = request.offset.cast_signed();
            let Some(data) = slots.put(request, submitted) else { break };
            batch.iocbs.push(Iocb {
                data,
                opcode,
                fd: self.file.as_raw_fd().cast_unsigned(),
                buffer,
                bytes,
                offset,
                flags: if self.eventfd.is_some() { IOCB_FLAG_RESFD } else { 0 },
                result_fd: self.eventfd.as_ref().map_or(0, |fd| fd.as_raw_fd().cast_unsigned()),
                ..Iocb::default()
            });
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

    /// How many of the staged requests the kernel took, or refused.
    fn hand_over(&self, batch: &mut Batch, refused: &mut Vec<Completion<T>>) -> usize {
        let mut done = 0;
        while let Some(pointers) = batch.pointers.get_mut(done..).filter(|left| !left.is_empty()) {
            // SAFETY: the pointers are to iocbs in `batch.iocbs`, which nothing has moved since they were taken; the kernel copies
            // iocbs and iovecs during the call. The buffers that they name belong to entries of this ring, which gives them up only
            // when the kernel reports the request's end (or refused it), and they are as long as the iocb or iovec says:
            // `describe` took both from the same slice.
            match unsafe { self.context.submit(pointers) } {
                Ok(taken) => done += taken,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel is out of room although we are not. If anything is in flight, its end makes some.
                Err(error)
                    if error.raw_os_error() == Some(libc::EAGAIN)
                        && lock(&self.slots).in_flight() > batch.iocbs.len() - done =>
                {
                    break;
                }
                Err(error) => {
                    // The error is that of the first one; the others may fare better.
                    let slot = batch.iocbs.get(done).map(|iocb| iocb.data);
                    refused.extend(slot.and_then(|slot| lock(&self.slots).complete(slot, Err(error))));
                    done += 1;
                }
            }
        }
        done
    }

    /// Takes back what the kernel had no room for.
    fn unstage(&self, batch: &Batch, done: usize, requests: &mut VecDeque<Request<T>>) {
        let mut slots = lock(&self.slots);
        for iocb in batch.iocbs.iter().skip(done).rev() {
            if let Some(Entry { payload, user, .. }) = slots.take(iocb.data) {
                requests.push_front(Request { offset: iocb.offset.cast_unsigned(), payload, user });
            }
        }
    }

    fn complete(&self, events: &[IoEvent], into: &mut Vec<Completion<T>>) {
        if events.is_empty() {
            return;
        }
        let mut slots = lock(&self.slots);
        into.extend(events.iter().filter_map(|event| slots.complete(event.data, result_of(event))));
    }
}

impl<T: Send> Engine<T> for Ring<T> {
    fn submit(
        &self,
        requests: &mut VecDeque<Request<T>>,
        count: usize,
        refused: &mut Vec<Completion<T>>,
    ) -> Submitted {
        if requests.is_empty() {
            return Submitted::default();
        }
        let mut batch = lock(&self.batch);
        let began = self.stage(requests, count, &mut batch);
        let sleeps = sleeps_of_this_thread();
        let done = self.hand_over(&mut batch, refused);
        self.unstage(&batch, done, requests);
        let ended = Instant::now();
        let took = ended.duration_since(began);
        if took > SLOW_SUBMIT {
            // Slots are filled by this thread only: what is still there is of this batch.
            let mut slots = lock(&self.slots);
            for iocb in batch.iocbs.iter().take(done) {
                slots.submitted_at(iocb.data, ended);
            }
        }
        let slept = took > SLOW_SUBMIT && sleeps_of_this_thread() > sleeps;
        Submitted { requests: done, bytes: batch.bytes, took, ended: Some(ended), slept }
    }

    fn poll(&self, into: &mut Vec<Completion<T>>) -> io::Result<()> {
        let mut events = lock(&self.events);
        let count = self.context.peek(&mut events)?;
        self.complete(events.get(..count).unwrap_or_default(), into);
        Ok(())
    }

    fn wait(&self, into: &mut Vec<Completion<T>>) -> io::Result<()> {
        let mut events = lock(&self.events);
        // Looked at under the lock: nobody else takes the last one now.
        if lock(&self.slots).in_flight() > 0 {
            let count = self.context.wait(1, &mut events)?;
            self.complete(events.get(..count).unwrap_or_default(), into);
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        lock(&self.slots).in_flight()
    }

    /// The kernel has copied the request and hands it to the device within `io_submit`.
    fn survives_us(&self) -> bool {
        true
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

fn result_of(event: &IoEvent) -> io::Result<usize> {
    usize::try_from(event.result)
        .map_err(|_| io::Error::from_raw_os_error(i32::try_from(-event.result).unwrap_or(libc::EIO)))
}

/// Many small writes through the page cache in one system call, done when it returns: without direct I/O the kernel carries
/// them out within `io_submit`.
#[derive(Debug)]
pub(super) struct CachedWrites {
    context: Context,
    iocbs: Vec<Iocb>,
    events: Vec<IoEvent>,
}

impl CachedWrites {
    pub(super) fn new(at_once: u32) -> io::Result<Self> {
        let context = Context::new(at_once)?;
        Ok(Self { context, iocbs: Vec::new(), events: vec![IoEvent::default(); at_once as usize] })
    }

    /// Offsets and bytes. The first error that occurred is the result.
    pub(super) fn write(&mut self, file: BorrowedFd<'_>, writes: &[(u64, &[u8])]) -> io::Result<()> {
        for writes in writes.chunks(self.events.len().max(1)) {
            self.iocbs.clear();
            self.iocbs.extend(writes.iter().map(|(offset, bytes)| Iocb {
                data: bytes.len() as u64,
                opcode: IOCB_CMD_PWRITE,
                fd: file.as_raw_fd().cast_unsigned(),
                buffer: bytes.as_ptr().addr() as u64,
                bytes: bytes.len() as u64,
                offset: offset.cast_signed(),
                ..Iocb::default()
            }));
            self.write_chunk()?;
        }
        Ok(())
    }

    fn write_chunk(&mut self) -> io::Result<()> {
        let mut pointers: Vec<*mut Iocb> = self.iocbs.iter_mut().map(std::ptr::from_mut).collect();
        let (mut taken, mut ended) = (0, 0);
        let mut result = Ok(());
        while ended < pointers.len() {
            if let Some(left) = pointers.get_mut(taken..).filter(|left| !left.is_empty()) {
                // SAFETY: the iocbs lie in `self.iocbs`, which nothing moves here, and their buffers are borrowed by the caller for
                // longer than this loop, which ends only when all that was taken has ended.
                match unsafe { self.context.submit(left) } {
                    Ok(more) => taken += more,
                    Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                    Err(error) => {
                        result = result.and(Err(error));
                        // What is not submitted has ended.
                        pointers.truncate(taken);
                        continue;
                    }
                }
            }
            // An error here leaves nothing in flight: whatever was taken had ended within `io_submit`.
            let mut count = self.context.peek(&mut self.events)?;
            if count == 0 {
                count = self.context.wait(1, &mut self.events)?;
            }
            ended += count;
            for event in self.events.iter().take(count) {
                let whole = event.data;
                result = result.and(match result_of(event) {
                    Ok(written) if written as u64 == whole => Ok(()),
                    Ok(_) => Err(io::ErrorKind::WriteZero.into()),
                    Err(error) => Err(error),
                });
            }
        }
        result
    }
}
