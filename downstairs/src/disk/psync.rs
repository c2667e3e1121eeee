//! Plain reads and writes by a crowd of threads.
//!
//! Invariants:
//! - `engine.rs` has the contract. As many requests are at the disk as there are threads; the others wait in order.
//! - A short read or write is reported as such; whoever asked decides.
#![expect(clippy::disallowed_methods, reason = "stage times are measured here, where the kernel is called")]

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::engine::{Completion, Engine, Payload, Request, Submitted};
use super::lock;

/// More make no disk faster, and each has a stack.
const MAX_THREADS: u32 = 16;

pub(super) struct Threads<T> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<T> {
    file: File,
    depth: usize,
    eventfd: Option<OwnedFd>,
    state: Mutex<State<T>>,
    /// A thread sleeps until there is something to do.
    work: Condvar,
    /// Somebody waits for a completion.
    done: Condvar,
}

struct State<T> {
    queued: VecDeque<(Request<T>, Instant)>,
    done: Vec<Completion<T>>,
    /// Queued, at the disk, or done.
    in_flight: usize,
    sleeping: usize,
    stopping: bool,
}

impl<T: Send + 'static> Threads<T> {
    pub(super) fn start(file: File, depth: u32, eventfd: Option<OwnedFd>) -> io::Result<Self> {
        let state =
            State { queued: VecDeque::new(), done: Vec::new(), in_flight: 0, sleeping: 0, stopping: false };
        let (work, done) = (Condvar::new(), Condvar::new());
        let shared = Shared { file, depth: depth as usize, eventfd, state: Mutex::new(state), work, done };
        // What was started before an error stops as this is dropped.
        let mut engine = Self { shared: Arc::new(shared), threads: Vec::new() };
        for _ in 0..depth.clamp(1, MAX_THREADS) {
            let shared = Arc::clone(&engine.shared);
            let thread = std::thread::Builder::new().name("newel-io".into()).spawn(move || shared.run())?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }
}

impl<T> Shared<T> {
    fn run(&self) {
        while let Some((mut request, submitted)) = self.next() {
            let result = carry_out(&self.file, request.offset, &mut request.payload);
            let Request { payload, user, .. } = request;
            let mut state = lock(&self.state);
            // Whoever takes completions takes them all: only the first one has to be told.
            let tell = state.done.is_empty();
            state.done.push(Completion { payload, user, result, submitted });
            drop(state);
            if tell {
                self.done.notify_all();
                if let Some(eventfd) = &self.eventfd {
                    // It can only be full, and then it is raised.
                    rustix::io::write(eventfd, &1_u64.to_ne_bytes()).ok();
                }
            }
        }
    }

    fn next(&self) -> Option<(Request<T>, Instant)> {
        let mut state = lock(&self.state);
        loop {
            if let Some(next) = state.queued.pop_front() {
                return Some(next);
            }
            if state.stopping {
                return None;
            }
            state.sleeping += 1;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.sleeping -= 1;
        }
    }
}

fn carry_out(file: &File, offset: u64, payload: &mut Payload) -> io::Result<usize> {
    loop {
        let result = match payload {
            Payload::Write(bytes) => file.write_at(bytes, offset),
            Payload::WriteCopy(bytes) => file.write_at(bytes, offset),
            Payload::WriteMany(pieces) => {
                let pieces: Vec<_> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
                rustix::io::pwritev(file, &pieces, offset).map_err(Errno::into)
            }
            Payload::Read(buffer) => file.read_at(buffer, offset),
        };
        match result {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

impl<T: Send> Engine<T> for Threads<T> {
    fn submit(
        &self,
        requests: &mut VecDeque<Request<T>>,
        count: usize,
        _refused: &mut Vec<Completion<T>>,
    ) -> Submitted {
        let began = Instant::now();
        let mut state = lock(&self.shared.state);
        let count = count.min(self.shared.depth - state.in_flight).min(requests.len());
        let mut bytes = 0;
        for request in requests.drain(..count) {
            bytes += request.payload.len() as u64;
            state.queued.push_back((request, began));
        }
        state.in_flight += count;
        let wake = state.sleeping.min(count);
        drop(state);
        for _ in 0..wake {
            self.shared.work.notify_one();
        }
        let ended = Instant::now();
        let took = ended.duration_since(began);
        Submitted { requests: count, bytes, took, ended: Some(ended), slept: false }
    }

    fn poll(&self, into: &mut Vec<Completion<T>>) -> io::Result<()> {
        let mut state = lock(&self.shared.state);
        state.in_flight -= state.done.len();
        into.append(&mut state.done);
        Ok(())
    }

    fn wait(&self, into: &mut Vec<Completion<T>>) -> io::Result<()> {
        /// Another thread may take what this one waits for; then the count is looked at again.
        const LOOK_EVERY: Duration = Duration::from_millis(5);
        let mut state = lock(&self.shared.state);
        while state.done.is_empty() && state.in_flight > 0 {
            let waited = self.shared.done.wait_timeout(state, LOOK_EVERY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        self.poll(into)
    }

    fn in_flight(&self) -> usize {
        lock(&self.shared.state).in_flight
    }

    /// A request may still wait for its thread.
    fn survives_us(&self) -> bool {
        false
    }
}

impl<T> Drop for Threads<T> {
    fn drop(&mut self) {
        lock(&self.shared.state).stopping = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that reads and writes had died");
            }
        }
    }
}
