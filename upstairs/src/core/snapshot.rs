//! The core's state for people and tests, see [`Status`].

use std::time::Duration;

use newel_protocol::BLOCK_BYTES;

use super::api::ReplicaId;
use super::config::ReadPolicy;
use super::replica::{CatchUpStage, Link, Replica, Role, to_us};
use super::resync::Progress;
use super::stages::{AT_REPLICA, BEFORE, Stages, Times};
use super::status::{
    CatchUpStatus, DelayStatus, HealthStatus, LatencyStatus, ReadsStatus, ReplicaStatus, StageStatus, Status,
};
use super::timeline::Operation;
use super::way::Stage;
use super::{Core, Phase};

impl Core {
    /// Everything but names, addresses, dates and the shell's own delays, which the shell knows.
    pub fn status(&self) -> Status {
        Status {
            volume: self.config.volume.to_string(),
            name: String::new(),
            size_bytes: self.blocks * BLOCK_BYTES as u64,
            generation: self.generation.0,
            state: self.state_name().into(),
            jobs_in_flight: self.open_jobs,
            bytes_in_flight: self.open_bytes,
            guest_connections: 0,
            guest_requests: self.requests.open(),
            work: self.work.clone(),
            oldest_request_us: self.oldest_request().map_or(0, |admitted| to_us(self.now.since(admitted))),
            replicas: ReplicaId::ALL.iter().map(|&id| self.replica_status(self.replica(id))).collect(),
            membership_epoch: self.membership.epoch,
            scrub: self.scrub.status(self.now),
            reactor: DelayStatus::default(),
            reads: self.reads_status(),
            trace: self.trace.status(),
            latency: self.stages().map(|stages| latency_of_guests(&stages)).unwrap_or_default(),
        }
    }

    fn reads_status(&self) -> ReadsStatus {
        let policy = match self.config.reads.policy {
            ReadPolicy::Fanout => "fanout",
            ReadPolicy::Witness => "witness",
        };
        ReadsStatus {
            policy: policy.into(),
            cancel: self.config.reads.cancel,
            throttle_enabled: self.config.throttle.enabled,
            throttled: self.throttle.is_on(),
            cause: self.told.cause.clone(),
            times_throttled: self.told.times,
            waiting: self.throttle.gated(),
            waiting_us: to_us(self.throttle.gated_for(self.now)),
        }
    }

    fn state_name(&self) -> &'static str {
        match &self.phase {
            _ if self.stopping.is_some() || self.stopped => "stopping",
            Phase::Serving if self.quorum_lost_since.is_none() => "serving",
            Phase::Activating(_) if !self.was_served => "activating",
            Phase::Serving | Phase::Activating(_) => "quorum_lost",
        }
    }

    fn replica_status(&self, replica: &Replica) -> ReplicaStatus {
        ReplicaStatus {
            id: replica.id.0,
            address: String::new(),
            region: replica.region.map(|region| region.to_string()).unwrap_or_default(),
            state: replica.state_name().into(),
            member: self.membership_of(replica.id),
            reason: replica.reason.clone(),
            queue_jobs: replica.queue_jobs,
            queue_bytes: replica.queue_bytes,
            last_reply_us: replica.times.last_us,
            mean_reply_us: replica.times.mean_us(),
            lead_us: replica.times.lead_us(),
            read_delay_us: to_us(self.throttle.held_for(self.now, replica.id)),
            read_lead_us: self.throttle.lead(self.now, replica.id).map(to_us),
            faults: replica.faults.clone(),
            catch_up: self.catch_up_status(replica),
            last_catch_up: replica.last_catch_up.map(|copied| catch_up_of(copied, None)),
            reconnects: replica.reconnects,
            healed_blocks: replica.healed_blocks,
            reads_left_out: replica.reads_left_out,
            work: replica.work.clone(),
            ping_us: replica.ping_us,
            health: replica.health.map(|(at, health)| {
                let age = u64::try_from(self.now.since(at).as_millis()).unwrap_or(u64::MAX);
                HealthStatus::new(&health, age)
            }),
            latency: self.stages().map(|stages| latency_at(&stages, replica.id)).unwrap_or_default(),
        }
    }

    fn catch_up_status(&self, replica: &Replica) -> Option<CatchUpStatus> {
        let Link::Up(Role::CatchingUp(catch_up)) = &replica.link else { return None };
        let CatchUpStage::Copying(resync) = &catch_up.stage else { return Some(CatchUpStatus::default()) };
        let progress = resync.progress;
        let waiting = resync.extents_waiting();
        let elapsed = self.now.since(catch_up.started);
        Some(catch_up_of(progress, eta_s(elapsed, progress.extents_done, waiting)))
    }
}

/// Seconds that are left, rounded up, if what is left goes as fast as what is done.
fn eta_s(elapsed: Duration, done: u64, left: u64) -> Option<u64> {
    let elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
    Some(elapsed_ms.saturating_mul(left).checked_div(done)?.div_ceil(1000))
}

fn latency_of_guests(stages: &Stages) -> Vec<LatencyStatus> {
    let of = |operation: Operation| {
        let guests = stages.guests(operation);
        let stages = BEFORE.iter().zip(&guests.before);
        latency(operation, &guests.whole, Some(guests.bytes), stages)
    };
    Operation::ALL.into_iter().filter_map(of).collect()
}

fn latency_at(stages: &Stages, id: ReplicaId) -> Vec<LatencyStatus> {
    let at = |operation: Operation| {
        let replica = stages.replica(id, operation);
        latency(operation, &replica.whole, None, AT_REPLICA.iter().zip(&replica.stages))
    };
    Operation::ALL.into_iter().filter_map(at).collect()
}

fn latency<'a>(
    operation: Operation,
    whole: &Times,
    bytes: Option<u64>,
    stages: impl Iterator<Item = (&'a Stage, &'a Times)>,
) -> Option<LatencyStatus> {
    let stage = |(stage, times): (&Stage, &Times)| StageStatus {
        stage: stage.name().into(),
        count: times.count(),
        sum_us: times.sum_ns() / 1000,
    };
    let operation = operation.name().to_owned();
    (whole.count() > 0).then(|| LatencyStatus {
        operation,
        delays: whole.delays(),
        bytes,
        stages: stages.map(stage).collect(),
    })
}

fn catch_up_of(progress: Progress, eta_s: Option<u64>) -> CatchUpStatus {
    CatchUpStatus {
        extents_total: progress.extents_differing,
        extents_done: progress.extents_done,
        blocks_copied: progress.blocks_copied,
        eta_s,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_told_in_the_first_second_too() {
        let check = |ms, done, left, expected| {
            assert_eq!(
                eta_s(Duration::from_millis(ms), done, left),
                expected,
                "{ms} ms, {done} done, {left} left"
            );
        };
        check(112, 3, 93, Some(4));
        check(9_500, 95, 1, Some(1));
        check(10_000, 10, 90, Some(90));
        check(500, 7, 0, Some(0));
        check(500, 0, 96, None);
    }
}
