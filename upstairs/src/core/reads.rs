//! When a guest's read is sent to which replica: at once to all, as the throttle says, or to one and its witnesses.
//!
//! Invariants:
//! - A read that the throttle keeps back is sent in the end, or settled before.
//! - What answers nobody any more is cancelled only after it was settled.
//! - A replica that owes three quarters of its bound gets no more reads while others answer them: it stays, and what is left of the
//!   bound is for changes, which it has to have. Nobody waits for it; nor is a read lost if it is the last one that can answer.

use bytes::Bytes;
use newel_protocol::JobId;
use newel_protocol::wire::Request;

use super::Core;
use super::api::{LogLevel, ReplicaId, ReplicaSet, Time};
use super::config::ReadPolicy;
use super::throttle::Change;

/// Throttling that comes and goes is told of once in this time; replicas that are left out, too.
const QUIET: std::time::Duration = std::time::Duration::from_secs(10);
/// Of a replica's bound, so much is for reads that others answer, too.
const READS_PART: usize = 3;
const READS_OF: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    AtOnce,
    /// When the throttle allows it.
    Throttled,
}

/// What the log was told of throttling.
#[derive(Debug, Default)]
pub(super) struct Told {
    began: Option<Time>,
    last: Option<Time>,
    pub(super) times: u64,
    /// The latest reason, for the status.
    pub(super) cause: Option<String>,
}

impl Core {
    pub(super) fn send_read(&mut self, id: JobId, urgency: Urgency) {
        let active = self.active();
        match self.config.reads.policy {
            ReadPolicy::Witness if active.len() > 1 => self.send_witnessed(id, active),
            ReadPolicy::Fanout if urgency == Urgency::Throttled && !self.throttle.is_idle() => {
                let Some(bytes) = self.jobs.get(id).map(|job| job.cost) else { return };
                self.throttle.offer(self.now, id, bytes, active);
                self.send_paced();
            }
            ReadPolicy::Fanout | ReadPolicy::Witness => self.fan_out(id, active),
        }
    }

    /// Sends a read to those of them that have room for it; to all, if none has and nobody else was asked.
    fn fan_out(&mut self, id: JobId, targets: ReplicaSet) {
        let Some(job) = self.jobs.get(id) else { return };
        let (cost, asked) = (job.cost, job.owed.and(job.readers));
        let roomy: ReplicaSet = targets.iter().filter(|&replica| self.can_read_more(replica, cost)).collect();
        let left_out = targets.without(roomy);
        if left_out.is_empty() || (roomy.is_empty() && asked.is_empty()) {
            return self.send_job(id, targets);
        }
        self.send_job(id, roomy);
        for replica in left_out.iter() {
            self.leave_out(replica);
        }
        // Should those that have it stop, it is asked of the others, too.
        if let Some(asked) = roomy.iter().chain(asked.iter()).next() {
            self.witness.watch(self.now, id, asked, cost);
        }
    }

    /// True if the replica owes little enough to be sent a read of this cost that others answer, too.
    pub(super) fn can_read_more(&self, replica: ReplicaId, cost: usize) -> bool {
        let limits = &self.config.limits;
        let replica = self.replica(replica);
        replica.queue_jobs < READS_PART * (limits.replica_jobs / READS_OF)
            && replica.queue_bytes.saturating_add(cost) <= READS_PART * (limits.replica_bytes / READS_OF)
    }

    fn leave_out(&mut self, id: ReplicaId) {
        let now = self.now;
        let replica = self.replica_mut(id);
        replica.reads_left_out += 1;
        if replica.told_left_out.is_none_or(|told| now.since(told) >= QUIET) {
            replica.told_left_out = Some(now);
            let (jobs, bytes) = (replica.queue_jobs, replica.queue_bytes);
            let text =
                format!("replica {id} gets no more reads for now: it owes {jobs} jobs ({bytes} bytes)");
            self.log(LogLevel::Info, text);
        }
    }

    /// Sends what the throttle gives out.
    pub(super) fn send_paced(&mut self) {
        if self.throttle.is_idle() {
            return;
        }
        while let Some((id, replicas)) = self.throttle.poll(self.now) {
            let active = self.active();
            let Some(job) = self.jobs.get(id) else { continue };
            let mut targets = replicas.and(active);
            for replica in active.iter().filter(|replica| job.replied[replica.index()].is_some()) {
                targets.remove(replica);
            }
            if let Some(read) = &job.read {
                targets = targets.without(read.failed);
            }
            if !job.settled {
                self.fan_out(id, targets);
            }
        }
    }

    /// A read has its answer, or none is to come. `owed` are those that have not answered.
    pub(super) fn read_settled(&mut self, id: JobId, answered: bool, owed: ReplicaSet) {
        self.witness.settled(id);
        let waited = self.throttle.take(id);
        if self.config.reads.cancel {
            if !owed.is_empty() {
                self.send(owed, Request::Cancel { job: id }, Bytes::new());
            }
        } else if answered {
            // The slowest was first: how long the others take says how much their delay is too long.
            let Some(cost) = self.jobs.get(id).map(|job| job.cost) else { return };
            let targets = waited.and(self.active());
            self.send_job(id, targets.iter().filter(|&replica| self.can_read_more(replica, cost)).collect());
        }
    }

    /// Tells the operator when throttling begins and ends, and why.
    pub(super) fn tell_throttle(&mut self) {
        let Some(change) = self.throttle.take_change() else { return };
        let now = self.now;
        match change {
            Change::Began { fastest, slowest, lead, seen } => {
                let answers = if seen { "answers" } else { "is about to answer" };
                let slow = self.replica(slowest);
                let cause = format!(
                    "replica {fastest} {answers} reads {} ms before replica {slowest}, which owes {} jobs ({} bytes)",
                    lead.as_millis(),
                    slow.queue_jobs,
                    slow.queue_bytes
                );
                self.told.times += 1;
                self.told.cause = Some(cause.clone());
                if self.told.last.is_none_or(|last| now.since(last) >= QUIET) {
                    self.told.last = Some(now);
                    self.told.began = Some(now);
                    self.log(LogLevel::Info, format!("reads are throttled: {cause}"));
                }
            }
            Change::Ended => {
                self.told.cause = None;
                if let Some(began) = self.told.began.take() {
                    let ms = now.since(began).as_millis();
                    self.log(LogLevel::Info, format!("reads are not throttled any more, after {ms} ms"));
                }
            }
        }
    }
}
