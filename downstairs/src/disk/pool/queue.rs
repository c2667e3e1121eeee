//! A lane's queue.
//!
//! Invariants:
//! - Bounded; the lane's thread takes everything at once and is woken only if it sleeps.
//! - After `stop` what is queued is still handed out, then the end.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::core::api::DiskCommand;
use crate::disk::lock;

pub(super) struct Queued {
    pub command: DiskCommand,
    /// When it came.
    pub at: Instant,
}

pub(super) struct Queue {
    state: Mutex<State>,
    ready: Condvar,
    limit: usize,
}

#[derive(Default)]
struct State {
    queued: Vec<Queued>,
    sleeping: bool,
    stopping: bool,
    /// The thread has something else to look at.
    nudged: bool,
}

impl Queue {
    pub(super) fn new(limit: usize) -> Self {
        Self { state: Mutex::default(), ready: Condvar::new(), limit }
    }

    /// What has no room goes to `refused`.
    pub(super) fn push(&self, commands: impl Iterator<Item = Queued>, refused: &mut Vec<Queued>) {
        let mut state = lock(&self.state);
        for command in commands {
            if state.queued.len() < self.limit && !state.stopping {
                state.queued.push(command);
            } else {
                refused.push(command);
            }
        }
        let wake = std::mem::take(&mut state.sleeping);
        drop(state);
        if wake {
            self.ready.notify_one();
        }
    }

    /// Wakes the thread although nothing is queued: [`Self::take`] then gives out nothing, and [`Self::wait_for_nudge`] returns.
    pub(super) fn nudge(&self) {
        let mut state = lock(&self.state);
        state.nudged = true;
        state.sleeping = false;
        drop(state);
        self.ready.notify_one();
    }

    /// Waits for commands and takes them all; `into` must be empty. False at the end.
    pub(super) fn take(&self, into: &mut Vec<Queued>) -> bool {
        let mut state = lock(&self.state);
        while state.queued.is_empty() && !std::mem::take(&mut state.nudged) {
            if state.stopping {
                return false;
            }
            state.sleeping = true;
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::swap(&mut state.queued, into);
        true
    }

    /// Waits for a nudge, whatever is queued; one that came before counts.
    pub(super) fn wait_for_nudge(&self) {
        let mut state = lock(&self.state);
        while !std::mem::take(&mut state.nudged) {
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn stop(&self) {
        let mut state = lock(&self.state);
        state.stopping = true;
        state.sleeping = false;
        drop(state);
        self.ready.notify_one();
    }
}
