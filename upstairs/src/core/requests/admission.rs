//! Which request is admitted when.
//!
//! Invariants:
//! - Requests are admitted in the order in which they came, only while the volume is served, and within its bound. What is larger than
//!   the bound is admitted alone.
//! - What is sent is bounded by the volume's limits; what waits is bounded by the shell, which asks `has_room`.
//! - A guest is slowed down near the bound, never failed for it.

use std::collections::VecDeque;

use crate::core::Core;
use crate::core::api::{GuestError, GuestId, GuestOp, GuestReply, Time};

/// Not admitted yet: the volume is at its bound, or not served yet.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) waiting: VecDeque<Waiting>,
    /// So many of them, from the front, have a record.
    pub(super) reported: usize,
    pub(super) arriving: Arriving,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) guest: GuestId,
    pub(super) op: GuestOp,
    pub(super) since: Time,
    pub(super) received: Time,
    /// The number of its record, if it has waited for too long.
    pub(super) record: u32,
}

/// The request that is being admitted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arriving {
    pub(super) received: Time,
    pub(super) record: u32,
}

impl Queue {
    fn take(&mut self) -> Option<Waiting> {
        self.reported = self.reported.saturating_sub(1);
        self.waiting.pop_front()
    }
}

impl Core {
    /// `received`: when it was read off the guest's socket.
    pub(in crate::core) fn on_guest(&mut self, guest: GuestId, op: GuestOp, received: Time) {
        let waiting = Waiting { guest, op, since: self.now, received: received.min(self.now), record: 0 };
        if self.stopping.is_some() {
            self.reply_guest(guest, GuestReply::Failed(GuestError::ShuttingDown));
        } else if self.requests.queue.waiting.is_empty() && self.may_admit(&waiting.op) {
            self.start(waiting);
        } else {
            self.requests.queue.waiting.push_back(waiting);
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
    pub(in crate::core) fn admit_waiting(&mut self) {
        while let Some(next) = self.requests.queue.waiting.front() {
            if !self.may_admit(&next.op) {
                break;
            }
            if let Some(waiting) = self.requests.queue.take() {
                self.start(waiting);
            }
        }
    }

    pub(in crate::core) fn refuse_waiting(&mut self) {
        while self.refuse_first(GuestError::ShuttingDown) {}
    }

    /// Answers the first request that waits, if there is one.
    pub(super) fn refuse_first(&mut self, error: GuestError) -> bool {
        let Some(waiting) = self.requests.queue.take() else { return false };
        self.end_waiting(&waiting);
        self.reply_guest(waiting.guest, GuestReply::Failed(error));
        true
    }

    /// When the next request may be admitted, if it waits for that.
    pub(in crate::core) fn admission_deadline(&self) -> Option<Time> {
        let waits = !self.requests.queue.waiting.is_empty() && self.open_jobs > 0 && self.is_serving();
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
        self.requests.queue.arriving = Arriving { received, record };
        self.send_request(guest, op);
        self.slow_down(self.open_jobs.saturating_sub(jobs), self.open_bytes.saturating_sub(bytes));
    }
}
