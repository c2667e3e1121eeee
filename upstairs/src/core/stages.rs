//! How long jobs take, by operation, stage and replica, since the start: histograms of fixed memory.
//!
//! Invariants:
//! - Memory is set at the start: nothing is allocated for a job, however long it takes.
//! - Only guests' jobs count. A read that was cancelled counts for nothing.
//!
//! Unlike those in `protocol/src/lag.rs` these count in units of 256 ns, as stamps come.

use hdrhistogram::Histogram;
use newel_protocol::lag::Delays;

use super::api::ReplicaId;
use super::timeline::{Lane, Operation, Ticks, Timeline};
use super::way::Stage;

/// Two decimal digits: 1% is far below the noise of such a measurement, and a histogram takes about 26 KiB.
const DIGITS: u8 = 2;

/// One distribution of times.
#[derive(Clone, Debug)]
pub struct Times {
    histogram: Histogram<u64>,
    sum: u64,
}

impl Times {
    #[expect(clippy::expect_used, reason = "constant bounds that the histogram takes, as the tests show")]
    fn new() -> Self {
        let histogram =
            Histogram::new_with_bounds(1, u64::from(u32::MAX), DIGITS).expect("these bounds are valid");
        Self { histogram, sum: 0 }
    }

    fn record(&mut self, took: Ticks) {
        self.histogram.saturating_record(u64::from(took.0));
        self.sum = self.sum.saturating_add(u64::from(took.0));
    }

    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    pub fn sum_ns(&self) -> u64 {
        self.sum.saturating_mul(Ticks(1).nanos())
    }

    pub fn delays(&self) -> Delays {
        // Four units are 1.024 µs.
        let us = |value: u64| u32::try_from(value.saturating_mul(32) / 125).unwrap_or(u32::MAX);
        let histogram = &self.histogram;
        Delays {
            count: histogram.len(),
            p50_us: us(histogram.value_at_quantile(0.5)),
            p99_us: us(histogram.value_at_quantile(0.99)),
            p999_us: us(histogram.value_at_quantile(0.999)),
            max_us: us(histogram.max()),
        }
    }

    /// How many took no longer than the first of these bounds (in ns, ascending), between it and the second, and so on; what is
    /// above the last is left out.
    pub fn within(&self, bounds_ns: &[u64]) -> Vec<u64> {
        let mut counts = vec![0; bounds_ns.len()];
        let mut at = 0;
        for value in self.histogram.iter_recorded() {
            let ns = value.value_iterated_to().saturating_mul(Ticks(1).nanos());
            while bounds_ns.get(at).is_some_and(|&bound| bound < ns) {
                at += 1;
            }
            let Some(count) = counts.get_mut(at) else { break };
            *count += value.count_at_value();
        }
        counts
    }
}

/// Stages before a job is sent, and stages at a replica.
pub const BEFORE: [Stage; 3] = [Stage::Admission, Stage::Preparation, Stage::Throttle];
pub const AT_REPLICA: [Stage; 4] = [Stage::Network, Stage::Queue, Stage::Submit, Stage::Device];

/// Jobs of one operation as guests see them.
#[derive(Clone, Debug)]
pub struct OfGuests {
    /// From the guest's socket to the answer.
    pub whole: Times,
    pub before: [Times; BEFORE.len()],
    pub bytes: u64,
}

/// Jobs of one operation at one replica.
#[derive(Clone, Debug)]
pub struct AtReplica {
    /// From sending to the answer.
    pub whole: Times,
    pub stages: [Times; AT_REPLICA.len()],
}

#[derive(Clone, Debug)]
pub struct Stages {
    guests: [OfGuests; Operation::ALL.len()],
    replicas: [[AtReplica; Operation::ALL.len()]; ReplicaId::COUNT],
}

impl Default for Stages {
    fn default() -> Self {
        let times = |_| Times::new();
        let guests = |_| OfGuests { whole: Times::new(), before: [0, 1, 2].map(times), bytes: 0 };
        let replica = |_| AtReplica { whole: Times::new(), stages: [0, 1, 2, 3].map(times) };
        Self {
            guests: Operation::ALL.map(guests),
            replicas: ReplicaId::ALL.map(|_| Operation::ALL.map(replica)),
        }
    }
}

impl Stages {
    pub fn guests(&self, operation: Operation) -> &OfGuests {
        &self.guests[operation.index()]
    }

    pub fn replica(&self, id: ReplicaId, operation: Operation) -> &AtReplica {
        &self.replicas[id.index()][operation.index()]
    }

    /// A job was acknowledged or answered.
    pub(super) fn settled(&mut self, timeline: &Timeline) {
        let (Some(settled), Some(admitted)) = (timeline.settled.get(), timeline.admitted.get()) else {
            return;
        };
        let numbered = timeline.numbered.get().unwrap_or(admitted);
        let of = &mut self.guests[timeline.operation.index()];
        of.whole.record(settled);
        of.bytes = of.bytes.saturating_add(timeline.length);
        of.before[0].record(admitted);
        of.before[1].record(numbered.since(admitted));
        if let Some(first) = timeline.first_sent() {
            of.before[2].record(first.since(numbered));
        }
    }

    /// A replica answered.
    pub(super) fn replied(&mut self, id: ReplicaId, operation: Operation, lane: &Lane) {
        let (Some(sent), Some(replied)) = (lane.sent.get(), lane.replied.get()) else { return };
        let at = &mut self.replicas[id.index()][operation.index()];
        at.whole.record(replied.since(sent));
        for (times, took) in at.stages.iter_mut().zip([lane.network(), lane.queue, lane.submit, lane.device])
        {
            times.record(took);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_counted_between_bounds() {
        let mut times = Times::new();
        for ms in [0, 1, 1, 30, 400, 100_000] {
            times.record(Ticks::of(Duration::from_millis(ms)));
        }
        times.record(Ticks::MAX);
        let bounds = [2_000_000, 50_000_000, 1_000_000_000];
        assert_eq!(times.within(&bounds), [3, 1, 1]);
        assert_eq!(times.count(), 7);
        let delays = times.delays();
        assert!((29_000..31_000).contains(&delays.p50_us), "{delays:?}");
        assert!(delays.max_us > 1_000_000_000 && times.sum_ns() > 1_100_000_000_000);
        assert_eq!(Times::new().within(&bounds), [0, 0, 0]);
    }
}
