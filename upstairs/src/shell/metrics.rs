//! `GET /metrics`: everything that can be plotted, in the text format of OpenMetrics, which Prometheus reads.
//!
//! Names follow Prometheus' conventions: base units, the unit at the end, `_total` for what only grows. `README.md` lists them.

use std::borrow::Cow;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::core::api::ReplicaId;
use crate::core::stages::{AT_REPLICA, BEFORE, Stages, Times};
use crate::core::status::{ReplicaStatus, Status};
use crate::core::timeline::Operation;

pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Bounds of the histograms' buckets, in ns: from a fast read to what makes a guest give up.
const BOUNDS_NS: [u64; 18] = {
    const US: u64 = 1_000;
    const MS: u64 = 1_000_000;
    [
        50 * US,
        100 * US,
        250 * US,
        500 * US,
        MS,
        2_500 * US,
        5 * MS,
        10 * MS,
        25 * MS,
        50 * MS,
        100 * MS,
        250 * MS,
        500 * MS,
        1_000 * MS,
        2_500 * MS,
        5_000 * MS,
        10_000 * MS,
        30_000 * MS,
    ]
};

const VOLUME_STATES: [&str; 4] = ["activating", "serving", "quorum_lost", "stopping"];
const REPLICA_STATES: [&str; 4] = ["active", "catching_up", "connecting", "left"];

/// What is told, as it was at one moment.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) status: Status,
    /// `None` if tracing is compiled out.
    pub(super) stages: Option<Box<Stages>>,
}

pub(super) fn text(measured: Measured) -> String {
    let volume = (Cow::Borrowed("volume"), Cow::Owned(measured.status.name.clone()));
    let mut registry = Registry::with_prefix_and_labels("newel", [volume].into_iter());
    registry.register_collector(Box::new(measured));
    let mut out = String::new();
    // Writing to a string can't fail.
    text::encode(&mut out, &registry).ok();
    out
}

type Labels = Vec<(&'static str, String)>;

/// Writes one family after the other.
struct Families<'a>(DescriptorEncoder<'a>);

impl Families<'_> {
    fn gauge(
        &mut self,
        (name, unit, help): (&str, Option<Unit>, &str),
        samples: impl IntoIterator<Item = (Labels, f64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        for (labels, value) in samples {
            match labels.is_empty() {
                true => family.encode_gauge(&value)?,
                false => family.encode_family(&labels)?.encode_gauge(&value)?,
            }
        }
        Ok(())
    }

    fn counter(
        &mut self,
        (name, unit, help): (&str, Option<Unit>, &str),
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        for (labels, value) in samples {
            match labels.is_empty() {
                true => family.encode_counter::<NoLabelSet, _, u64>(&value, None)?,
                false => {
                    family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
                }
            }
        }
        Ok(())
    }

    /// Only what there was any of.
    fn histogram<'t>(
        &mut self,
        (name, help): (&str, &str),
        samples: impl IntoIterator<Item = (Labels, &'t Times)>,
    ) -> fmt::Result {
        let unit = Unit::Seconds;
        let mut family = self.0.encode_descriptor(name, help, Some(&unit), MetricType::Histogram)?;
        for (labels, times) in samples.into_iter().filter(|(_, times)| times.count() > 0) {
            let counts = times.within(&BOUNDS_NS);
            let above = times.count().saturating_sub(counts.iter().sum());
            let bounds = BOUNDS_NS.iter().map(|&bound| in_seconds(bound)).chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(counts.into_iter().chain([above])).collect();
            let sum = in_seconds(times.sum_ns());
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                sum,
                times.count(),
                &buckets,
                None,
            )?;
        }
        Ok(())
    }
}

fn in_seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn us(us: u64) -> f64 {
    us as f64 / 1e6
}

fn alone<T>(value: T) -> [(Labels, T); 1] {
    [(Labels::new(), value)]
}

/// One for the state that holds, zero for the others.
fn states(state: &str, all: [&'static str; 4]) -> impl Iterator<Item = (&'static str, f64)> {
    all.map(|other| (other, if other == state { 1.0 } else { 0.0 })).into_iter()
}

impl Collector for Measured {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families = Families(encoder);
        volume(&mut families, &self.status)?;
        reads(&mut families, &self.status)?;
        replicas(&mut families, &self.status.replicas)?;
        match &self.stages {
            Some(stages) => times(&mut families, stages),
            None => Ok(()),
        }
    }
}

fn volume(out: &mut Families<'_>, status: &Status) -> fmt::Result {
    let state = |(state, value)| (vec![("state", String::from(state))], value);
    out.gauge(
        ("volume_state", None, "1 for the state that the volume is in"),
        states(&status.state, VOLUME_STATES).map(state),
    )?;
    out.gauge(("volume_size", Some(Unit::Bytes), "Size of the volume"), alone(status.size_bytes as f64))?;
    out.gauge(("generation", None, "Generation in service"), alone(f64::from(status.generation)))?;
    out.gauge(
        ("membership_epoch", None, "How often the members of the volume were set"),
        alone(f64::from(status.membership_epoch)),
    )?;
    out.gauge(
        ("in_flight_jobs", None, "Jobs that are not acknowledged"),
        alone(status.jobs_in_flight as f64),
    )?;
    out.gauge(
        ("in_flight", Some(Unit::Bytes), "Bytes of the jobs that are not acknowledged"),
        alone(status.bytes_in_flight as f64),
    )?;
    out.gauge(
        ("guest_connections", None, "Guests that are attached"),
        alone(status.guest_connections as f64),
    )?;
    out.gauge(
        ("guest_requests", None, "Guest requests that are not answered"),
        alone(status.guest_requests as f64),
    )?;
    out.gauge(
        ("oldest_request_age", Some(Unit::Seconds), "Age of the oldest request that is not answered"),
        alone(us(status.oldest_request_us)),
    )?;
    out.counter(
        ("quorum_lost", None, "How often fewer replicas than needed were active"),
        alone(status.trace.quorums_lost),
    )?;
    out.counter(("slow_jobs", None, "Jobs over the threshold of the trace"), alone(status.trace.slow))?;
    out.counter(
        ("slow_records_dropped", None, "Records of slow jobs that were left out of the log"),
        alone(status.trace.records_dropped),
    )?;
    let lag = &status.reactor.delays;
    let quantile = |(quantile, late): (&str, u32)| (vec![("quantile", quantile.to_owned())], us(late.into()));
    out.gauge(
        (
            "reactor_lag",
            Some(Unit::Seconds),
            "How late the upstairs was for what had become ready, since its start",
        ),
        [("0.5", lag.p50_us), ("0.99", lag.p99_us), ("0.999", lag.p999_us), ("1", lag.max_us)].map(quantile),
    )?;
    let scrub = &status.scrub;
    out.gauge(
        ("scrub_running", None, "1 while all blocks are verified"),
        alone(if scrub.running { 1.0 } else { 0.0 }),
    )?;
    out.gauge(
        ("scrub_bad_blocks", None, "Bad copies that the pass under way, or the last one, has found"),
        alone(scrub.blocks_bad as f64),
    )?;
    out.gauge(
        ("scrub_lost_blocks", None, "Blocks of which that pass has found no good copy"),
        alone(scrub.blocks_without_good_copy as f64),
    )
}

fn reads(out: &mut Families<'_>, status: &Status) -> fmt::Result {
    let reads = &status.reads;
    out.gauge(
        ("throttled", None, "1 while reads are delayed for a slow replica"),
        alone(if reads.throttled { 1.0 } else { 0.0 }),
    )?;
    out.counter(
        ("throttle_began", None, "How often reads began to be delayed for a slow replica"),
        alone(reads.times_throttled),
    )?;
    out.gauge(("reads_waiting", None, "Reads that were sent to no replica yet"), alone(reads.waiting as f64))
}

fn replicas(out: &mut Families<'_>, replicas: &[ReplicaStatus]) -> fmt::Result {
    let label = |replica: &ReplicaStatus| ("replica", replica.id.to_string());
    let state = |replica: &ReplicaStatus| {
        let named = label(replica);
        states(&replica.state, REPLICA_STATES)
            .map(move |(state, value)| (vec![named.clone(), ("state", String::from(state))], value))
            .collect::<Vec<_>>()
    };
    out.gauge(
        ("replica_state", None, "1 for the state that the replica is in"),
        replicas.iter().flat_map(state),
    )?;
    let gauge = |value: fn(&ReplicaStatus) -> Option<f64>| {
        replicas.iter().filter_map(move |replica| Some((vec![label(replica)], value(replica)?)))
    };
    out.gauge(
        ("replica_queue_jobs", None, "Jobs that the replica owes"),
        gauge(|replica| Some(replica.queue_jobs as f64)),
    )?;
    out.gauge(
        ("replica_queue", Some(Unit::Bytes), "Bytes of the jobs that the replica owes"),
        gauge(|replica| Some(replica.queue_bytes as f64)),
    )?;
    out.gauge(
        (
            "replica_lead",
            Some(Unit::Seconds),
            "How much earlier than the slowest the replica answers, smoothed",
        ),
        gauge(|replica| replica.lead_us.map(us)),
    )?;
    out.gauge(
        ("replica_read_lead", Some(Unit::Seconds), "The same for reads only: what the throttle goes by"),
        gauge(|replica| replica.read_lead_us.map(us)),
    )?;
    out.gauge(
        ("replica_read_delay", Some(Unit::Seconds), "How long reads to the replica are kept back"),
        gauge(|replica| Some(us(replica.read_delay_us))),
    )?;
    out.gauge(
        ("replica_ping", Some(Unit::Seconds), "How long the last ping took"),
        gauge(|replica| replica.ping_us.map(us)),
    )?;
    out.gauge(
        ("replica_catch_up_extents_left", None, "Extents that are still to be copied to the replica"),
        gauge(|replica| {
            let left = |total: u64, done: u64| total.saturating_sub(done) as f64;
            Some(replica.catch_up.as_ref().map_or(0.0, |copy| left(copy.extents_total, copy.extents_done)))
        }),
    )?;
    out.gauge(
        ("replica_faulty", None, "1 while faults are put in on purpose"),
        gauge(|replica| Some(if replica.faults.is_some() { 1.0 } else { 0.0 })),
    )?;
    out.gauge(
        ("replica_reactor_lag_max", Some(Unit::Seconds), "How late the replica was at most, since its start"),
        gauge(|replica| replica.health.as_ref().map(|health| us(health.reactor.delays.max_us.into()))),
    )?;
    out.gauge(
        (
            "replica_submit_max",
            Some(Unit::Seconds),
            "The longest that the kernel kept a disk thread of the replica",
        ),
        gauge(|replica| replica.health.as_ref().map(|health| us(health.submits.delays.max_us.into()))),
    )?;
    let counter = |value: fn(&ReplicaStatus) -> u64| {
        replicas.iter().map(move |replica| (vec![label(replica)], value(replica)))
    };
    out.counter(
        ("replica_reconnects", None, "Connections to the replica after the first"),
        counter(|replica| replica.reconnects),
    )?;
    out.counter(
        ("replica_healed_blocks", None, "Bad copies at the replica that were replaced by good ones"),
        counter(|replica| replica.healed_blocks),
    )?;
    out.counter(
        ("replica_reads_left_out", None, "Reads that the replica was not sent as it owed too much"),
        counter(|replica| replica.reads_left_out),
    )
}

fn times(out: &mut Families<'_>, stages: &Stages) -> fmt::Result {
    let named = |operation: Operation| ("operation", operation.name().to_owned());
    let guests = || Operation::ALL.into_iter().map(|operation| (operation, stages.guests(operation)));
    out.histogram(
        ("job_duration", "From the guest's socket to the answer"),
        guests().map(|(operation, of)| (vec![named(operation)], &of.whole)),
    )?;
    out.histogram(
        ("job_stage_duration", "What a job waited before it was sent"),
        guests().flat_map(|(operation, of)| {
            BEFORE.iter().zip(&of.before).map(move |(stage, times)| {
                (vec![named(operation), ("stage", stage.name().to_owned())], times)
            })
        }),
    )?;
    out.counter(
        ("job", Some(Unit::Bytes), "Bytes of the jobs that were answered"),
        guests().map(|(operation, of)| (vec![named(operation)], of.bytes)),
    )?;
    let at_replicas = || {
        ReplicaId::ALL.into_iter().flat_map(|id| {
            let at = move |operation: Operation| (id, operation, stages.replica(id, operation));
            Operation::ALL.into_iter().map(at)
        })
    };
    let replica = |id: ReplicaId| ("replica", id.to_string());
    out.histogram(
        ("replica_job_duration", "From sending a job to the replica to its answer"),
        at_replicas().map(|(id, operation, at)| (vec![replica(id), named(operation)], &at.whole)),
    )?;
    out.histogram(
        ("replica_stage_duration", "Where a job was at the replica, or on its way there and back"),
        at_replicas().flat_map(|(id, operation, at)| {
            AT_REPLICA.iter().zip(&at.stages).map(move |(stage, times)| {
                (vec![replica(id), named(operation), ("stage", stage.name().to_owned())], times)
            })
        }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether Prometheus would take it is seen in `tests/tests/trace.rs`, on real samples.
    #[test]
    fn every_state_is_there_and_no_family_twice() {
        let replica = |id| ReplicaStatus { id, state: "left".into(), ..ReplicaStatus::default() };
        let status = Status {
            name: "db".into(),
            state: "quorum_lost".into(),
            oldest_request_us: 1_500_000,
            replicas: vec![replica(0), replica(2)],
            ..Status::default()
        };
        let text = text(Measured { status, stages: Some(Box::default()) });
        let mut families: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let all = families.len();
        families.sort_unstable();
        families.dedup();
        assert!(families.len() == all && all > 30, "{text}");
        for line in [
            "newel_volume_state{volume=\"db\",state=\"quorum_lost\"} 1.0",
            "newel_volume_state{volume=\"db\",state=\"serving\"} 0.0",
            "newel_replica_state{volume=\"db\",replica=\"2\",state=\"left\"} 1.0",
            "newel_oldest_request_age_seconds{volume=\"db\"} 1.5",
            "newel_slow_jobs_total{volume=\"db\"} 0",
            "newel_replica_reconnects_total{volume=\"db\",replica=\"0\"} 0",
        ] {
            assert!(text.lines().any(|other| other == line), "{line:?} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
