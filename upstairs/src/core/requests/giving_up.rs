//! Requests that are answered with an error before their jobs are settled: a quorum was away for too long, or the upstairs ends.
//!
//! Invariants:
//! - Jobs that were sent run on for nobody: a change may still take effect, and holds its place in the order.
//! - While a quorum is lost only what has waited for it as long as it may is given up.

use crate::core::Core;
use crate::core::api::{GuestError, GuestReply, Time};
use crate::core::jobs::{Owner, ReqKey};

impl Core {
    /// Answers everything with this error; jobs that were sent run on for nobody.
    pub(in crate::core) fn fail_all_requests(&mut self, error: GuestError) {
        for job in self.jobs.iter_mut() {
            if matches!(job.owner, Owner::Guest { .. }) {
                job.owner = Owner::Nobody;
            }
        }
        for key in self.requests.table.keys() {
            if let Some(request) = self.requests.table.remove(key) {
                self.end_jobless(&request);
                self.reply_guest(request.guest, GuestReply::Failed(error));
            }
        }
        self.requests.locks.clear();
        while self.refuse_first(error) {}
    }

    /// When some request has waited for a lost quorum as long as it may.
    pub(in crate::core) fn quorum_deadline(&self) -> Option<Time> {
        let timeout = self.config.timing.quorum_timeout?;
        let lost = self.quorum_lost_since?;
        let admitted = self.requests.table.iter().map(|request| request.admitted);
        let waiting = self.requests.queue.waiting.iter().map(|waiting| waiting.since);
        admitted.chain(waiting).min().map(|since| since.max(lost).after(timeout))
    }

    /// Fails what has waited too long; younger requests, and reads that can be answered, go on.
    pub(in crate::core) fn check_quorum_timeout(&mut self) {
        if self.quorum_deadline().is_none_or(|deadline| self.now < deadline) {
            return;
        }
        let (Some(timeout), Some(lost)) = (self.config.timing.quorum_timeout, self.quorum_lost_since) else {
            return;
        };
        let now = self.now;
        let late = |since: Time| since.max(lost).after(timeout) <= now;
        for key in self.requests.table.keys() {
            if self.requests.table.get_mut(key).is_some_and(|request| late(request.admitted)) {
                self.fail_request(key, GuestError::QuorumLost);
            }
        }
        while self.requests.queue.waiting.front().is_some_and(|waiting| late(waiting.since)) {
            self.refuse_first(GuestError::QuorumLost);
        }
    }

    /// Answers one request with an error. Its changes run on for nobody: they may still take effect.
    fn fail_request(&mut self, key: ReqKey, error: GuestError) {
        let Some(request) = self.requests.table.remove(key) else { return };
        self.end_jobless(&request);
        self.reply_guest(request.guest, GuestReply::Failed(error));
        for id in self.jobs.ids(|job| matches!(job.owner, Owner::Guest { req, .. } if req == key)) {
            if let Some(job) = self.jobs.get_mut(id) {
                job.owner = Owner::Nobody;
                if job.is_read() {
                    self.settle(id, Err(error));
                }
            }
        }
        self.unlock(key);
    }

    pub(in crate::core) fn oldest_request(&self) -> Option<Time> {
        self.requests.table.iter().map(|request| request.admitted).min()
    }
}
