//! What the trace wants to know of requests: where a job comes from, and those that have no job yet.
//!
//! Invariants:
//! - Those that have a record are the first in the queue: each is looked at once.

use std::time::Duration;

use super::admission::Waiting;
use super::change::{Change, What};
use super::{GuestRequest, Kind, Requests};
use crate::core::Core;
use crate::core::api::{GuestOp, Time};
use crate::core::jobs::ReqKey;
use crate::core::timeline::{Operation, Stamp, Ticks, Timeline};
use crate::core::trace::Origin;

impl Requests {
    /// Where the next job of this request comes from.
    pub(in crate::core) fn origin(&mut self, key: ReqKey) -> Option<Origin> {
        let request = self.table.get_mut(key)?;
        let record = std::mem::take(&mut request.record);
        let GuestRequest { stamp, received, admitted, .. } = *request;
        Some(Origin { request: stamp, received, admitted, record })
    }

    /// When the oldest request that waits and has no record was received.
    pub(in crate::core) fn unreported(&self) -> Option<Time> {
        self.queue.waiting.get(self.queue.reported).map(|waiting| waiting.received)
    }

    /// That request, if it has waited for so long.
    pub(in crate::core) fn next_unreported(&self, now: Time, threshold: Duration) -> Option<Timeline> {
        let waiting = self.queue.waiting.get(self.queue.reported)?;
        (now.since(waiting.received) >= threshold).then(|| waiting.timeline())
    }

    pub(in crate::core) fn set_reported(&mut self, record: u32) {
        if let Some(waiting) = self.queue.waiting.get_mut(self.queue.reported) {
            waiting.record = record;
            self.queue.reported += 1;
        }
    }

    /// Requests that have no job: they wait for admission, or for a lock. At most so many.
    pub(in crate::core) fn without_job(&self, most: usize) -> impl Iterator<Item = Timeline> {
        let blocked =
            self.locks.blocked.iter().filter_map(|&key| self.table.get(key).map(GuestRequest::timeline));
        blocked.take(most).chain(self.queue.waiting.iter().take(most).map(Waiting::timeline))
    }
}

impl Waiting {
    fn timeline(&self) -> Timeline {
        let (operation, offset, length) = match &self.op {
            GuestOp::Read { offset, length } => (Operation::Read, *offset, u64::from(*length)),
            GuestOp::BlockStatus { offset, length } => (Operation::Read, *offset, *length),
            GuestOp::Write { offset, data, .. } => (Operation::Write, *offset, data.len() as u64),
            GuestOp::Zero { offset, length, .. } | GuestOp::Trim { offset, length, .. } => {
                (Operation::Zero, *offset, *length)
            }
            GuestOp::Flush => (Operation::Flush, 0, 0),
        };
        let (base, record) = (self.received, self.record);
        Timeline { operation, offset, length, base, record, ..Timeline::default() }
    }
}

impl GuestRequest {
    /// While it has no job.
    fn timeline(&self) -> Timeline {
        let operation = match &self.kind {
            Kind::Read { .. } | Kind::Status { .. } => Operation::Read,
            Kind::Change(Change { what: What::Write(_), .. }) => Operation::Write,
            Kind::Change(_) => Operation::Zero,
            Kind::Flush => Operation::Flush,
        };
        Timeline {
            request: self.stamp,
            operation,
            offset: self.offset,
            length: self.length,
            base: self.received,
            admitted: Stamp::at(Ticks::between(self.received, self.admitted)),
            record: self.record,
            ..Timeline::default()
        }
    }
}

impl Core {
    /// A request that waited for admission is answered with an error.
    pub(super) fn end_waiting(&mut self, waiting: &Waiting) {
        if waiting.record != 0 {
            self.end_unstarted(waiting.timeline(), true);
        }
    }

    /// A request is answered. If it has a record and no job took that over, that is its end.
    pub(super) fn end_jobless(&mut self, request: &GuestRequest) {
        if request.record != 0 {
            self.end_unstarted(request.timeline(), request.failed.is_some());
        }
    }
}
