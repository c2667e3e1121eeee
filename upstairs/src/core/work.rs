//! What was done since the start, and how long it took: counters that only grow, so that whoever looks twice knows what happened
//! between.
//!
//! Invariants:
//! - Recording costs a few additions (about 3 ns). Memory is fixed once the longest latency was seen, and bounded.
//! - It is counted whether jobs are traced or not, so `newel top` and the page have rates and percentiles either way.
//!
//! Not to be had from [`stages`](super::stages), nor those from here: here a guest's *request* counts, from its admission on, and a
//! replica's reply only while that is Active; there it is *jobs*, by operation, from the socket on, and what joiners answer too.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::classes;

/// What took longer than 2^36 µs (19 hours) counts as that long.
const CLASSES_MAX: usize = classes::count(36);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    Read,
    Write,
    /// Zeros, trims and flushes.
    Other,
}

/// Work of the guests, or of one replica for them, since the start of the upstairs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkStatus {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    /// Zeros, trims and flushes.
    pub others: u64,
    pub latencies: Latencies,
}

/// How many took how long, by class. Class 0 to 15 are that many µs; from there on each power of two has 8 classes: class
/// `8 × e + m`, with m from 8 to 15, begins at m × 2^e µs. Classes after the last one that isn't empty are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Latencies(Vec<u64>);

impl WorkStatus {
    pub(super) fn record(&mut self, done: Done, bytes: u64, took: Duration) {
        match done {
            Done::Read => {
                self.reads += 1;
                self.read_bytes += bytes;
            }
            Done::Write => {
                self.writes += 1;
                self.write_bytes += bytes;
            }
            Done::Other => self.others += 1,
        }
        self.latencies.record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
    }

    /// Everything that was done.
    pub fn count(&self) -> u64 {
        self.reads + self.writes + self.others
    }

    /// What was done after `before`. If the counters began anew meanwhile, all of it.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let pairs = [
            (self.reads, before.reads),
            (self.read_bytes, before.read_bytes),
            (self.writes, before.writes),
            (self.write_bytes, before.write_bytes),
            (self.others, before.others),
        ];
        if pairs.iter().any(|(now, before)| now < before) {
            return self.clone();
        }
        let [reads, read_bytes, writes, write_bytes, others] = pairs.map(|(now, before)| now - before);
        let latencies = self.latencies.since(&before.latencies);
        Self { reads, read_bytes, writes, write_bytes, others, latencies }
    }
}

impl Latencies {
    fn record(&mut self, us: u64) {
        let class = class_of(us);
        if self.0.len() <= class {
            self.0.resize(class + 1, 0);
        }
        if let Some(count) = self.0.get_mut(class) {
            *count += 1;
        }
    }

    fn since(&self, before: &Self) -> Self {
        let before = before.0.iter().copied().chain(std::iter::repeat(0));
        Self(self.0.iter().zip(before).map(|(now, before)| now.saturating_sub(before)).collect())
    }

    /// The latency that so many of 1000 don't exceed, in µs; `None` if there were none.
    pub fn quantile_us(&self, per_mille: u64) -> Option<u64> {
        let all: u64 = self.0.iter().sum();
        let wanted = all.saturating_mul(per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        let found = self.0.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        found.map(middle_us)
    }

    pub fn max_us(&self) -> Option<u64> {
        self.0.iter().rposition(|count| *count > 0).map(middle_us)
    }
}

fn class_of(us: u64) -> usize {
    classes::class_of(us).min(CLASSES_MAX - 1)
}

/// A status that was read may have any number of classes.
fn middle_us(class: usize) -> u64 {
    let (first, width) = classes::values_of(class.min(CLASSES_MAX - 1));
    first + width / 2
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_latency_is_known_to_6_percent() {
        let mut last = 0;
        for us in (0..5_000).chain((13..36).flat_map(|octave| [1 << octave, (1 << octave) * 3 / 2 + 7])) {
            let class = class_of(us);
            assert!(class >= last, "{us}");
            last = class;
            let middle = middle_us(class);
            assert!(middle.abs_diff(us) * 16 <= us, "{us} µs is told as {middle}");
        }
        assert_eq!(class_of(u64::MAX), CLASSES_MAX - 1);
        assert_eq!((class_of(15), class_of(16), class_of(31), class_of(32)), (15, 16, 23, 24));
    }

    #[test]
    fn counters_that_began_anew_are_taken_whole() {
        let mut before = WorkStatus::default();
        before.record(Done::Read, 4096, Duration::from_millis(1));
        before.record(Done::Read, 4096, Duration::from_millis(1));
        let mut after = WorkStatus::default();
        after.record(Done::Write, 512, Duration::from_millis(2));
        assert_eq!(after.since(&before), after);
        let mut later = before.clone();
        later.record(Done::Other, 0, Duration::from_secs(9));
        let between = later.since(&before);
        assert_eq!((between.reads, between.others, between.count()), (0, 1, 1));
        let took = between.latencies.quantile_us(500).unwrap();
        assert!(took.abs_diff(9_000_000) < 600_000);
        assert_eq!(between.latencies.max_us(), Some(took));
        assert_eq!(later.since(&later).latencies.quantile_us(500), None);
    }

    proptest! {
        #[test]
        fn quantiles_are_those_of_the_sorted_list(mut us in prop::collection::vec(0_u64..100_000_000, 1..200), per_mille in 1_u64..=1000) {
            let mut work = WorkStatus::default();
            for &us in &us {
                work.record(Done::Read, 0, Duration::from_micros(us));
            }
            us.sort_unstable();
            let rank = (us.len() as u64 * per_mille).div_ceil(1000);
            let exact = us[usize::try_from(rank).unwrap() - 1];
            let told = work.latencies.quantile_us(per_mille).unwrap();
            prop_assert!(told.abs_diff(exact) * 16 <= exact, "{exact} µs is told as {told}");
        }
    }
}
