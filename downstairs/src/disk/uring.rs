//! `io_uring` on one descriptor, submitted by a thread of the kernel (SQPOLL).
//!
//! Invariants:
//! - `engine.rs` has the contract. The ring owns the buffers of every request until the kernel reports its end.
//! - Nobody of ours waits for room in the device's queue: the kernel's thread does.
//!
//! Left to others: what is read and written ([`super::pool`]).
#![expect(clippy::disallowed_methods, reason = "stage times are measured here, where the kernel is called")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;
use std::time::Instant;

use io_uring::{IoUring, opcode, squeue, types};

use super::engine::{Completion, Engine, Payload, Request, Submitted};
use super::lock;
use super::slots::Slots;

/// The kernel's thread sleeps after this time without work, and costs a processor until then.
const IDLE_MS: u32 = 2;

pub(super) struct Ring<T>(Mutex<State<T>>);

struct State<T> {
    // First: it is dropped before the buffers that the kernel may still use, and only once nothing is in flight.
    ring: IoUring,
    file: OwnedFd,
    slots: Slots<T>,
    /// What vectors of requests in flight point to, by slot.
    vectors: Vec<Vec<libc::iovec>>,
    _eventfd: Option<OwnedFd>,
}

// SAFETY: the vectors point to buffers that the slots own; they travel with them, and only the kernel follows them.
unsafe impl<T: Send> Send for State<T> {}

impl<T> Ring<T> {
    pub(super) fn new(file: OwnedFd, depth: u32, eventfd: Option<OwnedFd>) -> io::Result<Self> {
        let ring = IoUring::builder().setup_sqpoll(IDLE_MS).build(depth)?;
        if let Some(eventfd) = &eventfd {
            ring.submitter().register_eventfd(eventfd.as_raw_fd())?;
        }
        let depth = depth as usize;
        let vectors = (0..depth).map(|_| Vec::new()).collect();
        Ok(Self(Mutex::new(State { ring, file, slots: Slots::new(depth), vectors, _eventfd: eventfd })))
    }
}

impl<T> State<T> {
    fn push(&mut self, request: Request<T>) -> Result<u64, Option<Completion<T>>> {
        let (offset, bytes) = (request.offset, request.payload.len() as u64);
        let fd = types::Fd(self.file.as_raw_fd());
        let vectors: Vec<_> = match &request.payload {
            Payload::WriteMany(pieces) => pieces
                .iter()
                .map(|piece| libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() })
                .collect(),
            Payload::Write(_) | Payload::WriteCopy(_) | Payload::Read(_) => Vec::new(),
        };
        let length = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        let write = |bytes: &[u8]| opcode::Write::new(fd, bytes.as_ptr(), length(bytes.len())).offset(offset);
        let entry = match &request.payload {
            Payload::Write(bytes) => write(bytes).build(),
            Payload::WriteCopy(bytes) => write(bytes).build(),
            Payload::WriteMany(_) => {
                opcode::Writev::new(fd, vectors.as_ptr(), length(vectors.len())).offset(offset).build()
            }
            Payload::Read(bytes) => {
                let place = bytes.as_ptr().cast_mut();
                opcode::Read::new(fd, place, length(bytes.len())).offset(offset).build()
            }
        };
        let Some(slot) = self.slots.put(request, Instant::now()) else { return Err(None) };
        if let Some(place) = usize::try_from(slot).ok().and_then(|slot| self.vectors.get_mut(slot)) {
            *place = vectors;
        }
        self.enqueue(entry.user_data(slot)).map_err(|source| self.slots.complete(slot, Err(source)))?;
        Ok(bytes)
    }

    fn enqueue(&mut self, entry: squeue::Entry) -> io::Result<()> {
        // SAFETY: the buffers that the entry names belong to its slot, as do the vectors, and both are given up only when the kernel
        // reports the request's end; they are as long as the entry says, taken from the same slices.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::other("the submission queue is full"))
    }

    fn take(&mut self, into: &mut Vec<Completion<T>>) {
        for event in self.ring.completion() {
            let result =
                usize::try_from(event.result()).map_err(|_| io::Error::from_raw_os_error(-event.result()));
            into.extend(self.slots.complete(event.user_data(), result));
        }
    }
}

impl<T: Send> Engine<T> for Ring<T> {
    fn submit(
        &self,
        requests: &mut VecDeque<Request<T>>,
        count: usize,
        refused: &mut Vec<Completion<T>>,
    ) -> Submitted {
        let began = Instant::now();
        let state = &mut *lock(&self.0);
        let mut submitted = Submitted::default();
        while submitted.requests < count && state.slots.has_room() && !state.ring.submission().is_full() {
            let Some(request) = requests.pop_front() else { break };
            match state.push(request) {
                Ok(bytes) => submitted.bytes += bytes,
                Err(completion) => refused.extend(completion),
            }
            submitted.requests += 1;
        }
        // A system call only if the kernel's thread has gone to sleep. Should waking it fail, it is tried again by whoever
        // submits or waits next.
        if let Err(error) = state.ring.submit() {
            tracing::warn!("cannot wake the kernel's thread of an io_uring: {error}");
        }
        let ended = Instant::now();
        Submitted { took: ended.duration_since(began), ended: Some(ended), ..submitted }
    }

    fn poll(&self, into: &mut Vec<Completion<T>>) -> io::Result<()> {
        lock(&self.0).take(into);
        Ok(())
    }

    fn wait(&self, into: &mut Vec<Completion<T>>) -> io::Result<()> {
        let state = &mut *lock(&self.0);
        if state.slots.in_flight() > 0 {
            match state.ring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                Ok(_) | Err(_) => state.take(into),
            }
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        lock(&self.0).slots.in_flight()
    }

    /// The kernel's thread may not have seen it yet, and cancels what waits as we die.
    fn survives_us(&self) -> bool {
        false
    }
}

impl<T> Drop for State<T> {
    fn drop(&mut self) {
        let mut scrap = Vec::new();
        while self.slots.in_flight() > 0 {
            if let Err(error) = self.ring.submit_and_wait(1)
                && error.kind() != io::ErrorKind::Interrupted
            {
                // Buffers that the kernel may still write to must not be freed.
                tracing::error!("an io_uring does not end: {error}");
                let slots = std::mem::replace(&mut self.slots, Slots::new(0));
                std::mem::forget((slots, std::mem::take(&mut self.vectors)));
                return;
            }
            self.take(&mut scrap);
            scrap.clear();
        }
    }
}
