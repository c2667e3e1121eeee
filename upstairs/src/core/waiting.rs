//! The reads that the throttle keeps back: at the gate, from all replicas, or for their delay, from those with a lead.
//!
//! Invariants:
//! - Reads leave the gate in the order of their numbers.
//! - A read is given out once for each replica, unless it is taken out before.
//!
//! Left to others: for how long (`throttle`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use newel_protocol::JobId;

use super::api::{ReplicaId, ReplicaSet, Time};

/// When each replica gets a read, as far as it doesn't have it.
pub(super) type Due = [Option<Time>; ReplicaId::COUNT];

#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Reads that were sent to nobody yet, by number.
    gated: VecDeque<Gated>,
    /// Reads that some replicas get later, and when.
    delayed: BTreeSet<(Time, JobId, ReplicaId)>,
    due: BTreeMap<JobId, Due>,
    ready: VecDeque<(JobId, ReplicaSet)>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Gated {
    pub(super) job: JobId,
    pub(super) since: Time,
    pub(super) bytes: usize,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.gated.is_empty() && self.delayed.is_empty() && self.ready.is_empty()
    }

    pub(super) fn offer(&mut self, now: Time, job: JobId, bytes: usize) {
        self.gated.push_back(Gated { job, since: now, bytes });
    }

    /// What waits for nothing any more.
    pub(super) fn poll(&mut self, now: Time) -> Option<(JobId, ReplicaSet)> {
        if let Some(ready) = self.ready.pop_front() {
            return Some(ready);
        }
        let &(_, job, replica) = self.delayed.first().filter(|&&(due, ..)| due <= now)?;
        self.delayed.pop_first();
        if let Some(due) = self.due.get_mut(&job) {
            due[replica.index()] = None;
            if due.iter().all(Option::is_none) {
                self.due.remove(&job);
            }
        }
        Some((job, ReplicaSet::only(replica)))
    }

    /// The oldest read at the gate.
    pub(super) fn at_gate(&self) -> Option<Gated> {
        self.gated.front().copied()
    }

    pub(super) fn pass_gate(&mut self) {
        self.gated.pop_front();
    }

    /// This read has passed the gate; those replicas get it later for which there is a time.
    pub(super) fn delay(&mut self, job: JobId, due: Due) {
        for (replica, due) in ReplicaId::ALL.into_iter().zip(due) {
            self.delayed.extend(due.map(|due| (due, job, replica)));
        }
        if due.iter().any(Option::is_some) {
            self.due.insert(job, due);
        }
    }

    /// When the next delay is over.
    pub(super) fn next_due(&self) -> Option<Time> {
        self.delayed.first().map(|&(due, ..)| due)
    }

    pub(super) fn is_gated(&self, job: JobId) -> bool {
        self.gated.binary_search_by_key(&job, |gated| gated.job).is_ok()
    }

    /// Forgets what this read waits for, and tells which replicas have not got it while others have.
    pub(super) fn take(&mut self, job: JobId) -> ReplicaSet {
        let mut waited = ReplicaSet::EMPTY;
        if let Ok(index) = self.gated.binary_search_by_key(&job, |gated| gated.job) {
            self.gated.remove(index);
        }
        for (replica, due) in ReplicaId::ALL.into_iter().zip(self.due.remove(&job).unwrap_or_default()) {
            if let Some(due) = due {
                self.delayed.remove(&(due, job, replica));
                waited.insert(replica);
            }
        }
        waited
    }

    /// Everything is to be sent, at once; the sender leaves out whoever is gone.
    pub(super) fn release(&mut self) {
        let all: ReplicaSet = ReplicaId::ALL.into_iter().collect();
        for (job, due) in std::mem::take(&mut self.due) {
            self.ready.push_back((job, all.iter().filter(|id| due[id.index()].is_some()).collect()));
        }
        self.delayed.clear();
        self.ready.extend(self.gated.drain(..).map(|gated| (gated.job, all)));
    }

    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Since when the oldest read waits at the gate.
    pub(super) fn gated_for(&self, now: Time) -> Duration {
        self.gated.front().map_or(Duration::ZERO, |gated| now.since(gated.since))
    }

    pub(super) fn gated(&self) -> usize {
        self.gated.len()
    }
}
