//! How long jobs take, by operation, stage and replica, since the start: histograms of fixed memory.
//!
//! Invariants:
//! - Memory is set at the start: nothing is allocated for a job, however long it takes.
//! - Only guests' jobs count, at every replica that answers them, joiners too. A read that was cancelled counts for nothing.
//! - Samples are taken down one after the other and counted by the batch: each would touch some twenty lines of memory all over
//!   the histograms, which by then the caches have long given to somebody else.
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
        Delays::of(&self.histogram, |ticks| ticks.saturating_mul(32) / 125)
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
    /// Not counted yet. At most [`SAMPLES_MAX`].
    samples: Vec<Sample>,
}

/// 8 KiB of them.
const SAMPLES_MAX: usize = 256;

/// What is taken down of a job.
#[derive(Clone, Copy, Debug)]
struct Sample {
    operation: Operation,
    /// Where, or `None` for the whole job.
    replica: Option<ReplicaId>,
    bytes: u32,
    whole: Ticks,
    /// Those of [`BEFORE`] or [`AT_REPLICA`].
    parts: [Ticks; 4],
}

impl Default for Stages {
    fn default() -> Self {
        let times = |_| Times::new();
        let guests = |_| OfGuests { whole: Times::new(), before: [0, 1, 2].map(times), bytes: 0 };
        let replica = |_| AtReplica { whole: Times::new(), stages: [0, 1, 2, 3].map(times) };
        Self {
            guests: Operation::ALL.map(guests),
            replicas: ReplicaId::ALL.map(|_| Operation::ALL.map(replica)),
            samples: Vec::with_capacity(SAMPLES_MAX),
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
        let (Some(whole), Some(admitted)) = (timeline.settled.get(), timeline.admitted.get()) else {
            return;
        };
        let numbered = timeline.numbered.get().unwrap_or(admitted);
        let first = timeline.first_sent().unwrap_or(numbered);
        self.take(Sample {
            operation: timeline.operation,
            replica: None,
            bytes: u32::try_from(timeline.length).unwrap_or(u32::MAX),
            whole,
            parts: [admitted, numbered.since(admitted), first.since(numbered), Ticks(0)],
        });
    }

    /// A replica answered.
    pub(super) fn replied(&mut self, id: ReplicaId, operation: Operation, lane: &Lane) {
        let (Some(sent), Some(replied)) = (lane.sent.get(), lane.replied.get()) else { return };
        self.take(Sample {
            operation,
            replica: Some(id),
            bytes: 0,
            whole: replied.since(sent),
            parts: [lane.network(), lane.queue, lane.submit, lane.device],
        });
    }

    fn take(&mut self, sample: Sample) {
        if self.samples.len() == SAMPLES_MAX {
            self.count();
        }
        self.samples.push(sample);
    }

    /// Counts what was taken down.
    pub(super) fn count(&mut self) {
        for Sample { operation, replica, bytes, whole, parts } in self.samples.drain(..) {
            match replica {
                None => {
                    let of = &mut self.guests[operation.index()];
                    of.whole.record(whole);
                    of.bytes = of.bytes.saturating_add(bytes.into());
                    of.before.iter_mut().zip(parts).for_each(|(times, took)| times.record(took));
                }
                Some(id) => {
                    let at = &mut self.replicas[id.index()][operation.index()];
                    at.whole.record(whole);
                    at.stages.iter_mut().zip(parts).for_each(|(times, took)| times.record(took));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use newel_protocol::wire::StageTimes;

    use super::*;
    use crate::core::api::Time;
    use crate::core::timeline::Stamp;

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

    #[test]
    fn every_sample_is_counted_once() {
        let mut stages = Stages::default();
        let mut timeline = Timeline { length: 4096, operation: Operation::Write, ..Timeline::default() };
        let at = |ms: u64| Time(ms * 1_000_000);
        (timeline.admitted, timeline.numbered) = (Stamp::at(Ticks(0)), Stamp::at(Ticks(0)));
        timeline.sent(at(2), ReplicaId(1));
        timeline.replied(
            at(10),
            ReplicaId(1),
            StageTimes { device_us: 5_000, ..StageTimes::default() },
            true,
        );
        timeline.settle(at(11), false);
        for _ in 0..3 * SAMPLES_MAX {
            stages.settled(&timeline);
            stages.replied(ReplicaId(1), Operation::Write, &timeline.lanes[1]);
        }
        assert!(stages.samples.len() <= SAMPLES_MAX && stages.samples.capacity() == SAMPLES_MAX);
        stages.count();
        let count = 3 * SAMPLES_MAX as u64;
        let of = stages.guests(Operation::Write);
        assert_eq!((of.whole.count(), of.bytes, of.before[2].count()), (count, count * 4096, count));
        let at = stages.replica(ReplicaId(1), Operation::Write);
        let mean_us = |times: &Times| times.sum_ns() / 1000 / count;
        assert_eq!((mean_us(&of.whole), mean_us(&of.before[2]), mean_us(&at.whole)), (10_999, 1_999, 8_000));
        assert_eq!((mean_us(&at.stages[0]), mean_us(&at.stages[3])), (3_000, 4_999));
        assert_eq!(stages.replica(ReplicaId(0), Operation::Write).whole.count(), 0);
    }
}
