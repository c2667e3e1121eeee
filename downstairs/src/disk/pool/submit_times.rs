//! How long the kernel held the threads that submit.
//!
//! Invariants:
//! - One record a system call, of a few nanoseconds, by the lane's own thread. Looking never holds it up for longer than a copy
//!   of the histogram takes.
//! - The longest one is kept exactly, with when it ended and what it held.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::disk::engine::Submitted;
use crate::disk::lock;

/// Two digits tell a stall from none, and keep a histogram at some 40 KiB.
const DIGITS: u8 = 2;
/// Longer times count as this one.
const MOST_NS: u64 = 3_600_000_000_000;

/// For the lanes that hand requests to the kernel in batches.
#[derive(Debug, Default)]
pub struct SubmitTimesByLane {
    pub writes: SubmitTimes,
    pub reads: SubmitTimes,
}

/// Of one lane. A submission is one system call with all the requests that it took.
#[derive(Debug)]
pub struct SubmitTimes(Mutex<SubmitSnapshot>);

/// What was recorded until now.
#[derive(Clone, Debug)]
pub struct SubmitSnapshot {
    /// In nanoseconds.
    pub histogram: Histogram<u64>,
    /// Submissions during which the thread slept in the kernel: the device's queue was full, or the file system waited.
    pub slept: u64,
    /// How many requests may be in flight at once, as learnt from the device; 0 before the first one.
    pub limit: usize,
    pub longest: Option<LongestSubmit>,
}

#[derive(Clone, Copy, Debug)]
pub struct LongestSubmit {
    pub took: Duration,
    /// When it was over.
    pub ended: Instant,
    pub requests: usize,
    pub bytes: u64,
}

impl Default for SubmitTimes {
    fn default() -> Self {
        let histogram =
            Histogram::new_with_bounds(1, MOST_NS, DIGITS).expect("these bounds are those of a histogram");
        Self(Mutex::new(SubmitSnapshot { histogram, slept: 0, limit: 0, longest: None }))
    }
}

impl SubmitTimes {
    pub(in crate::disk) fn record(&self, submit: Submitted, limit: usize) {
        let Submitted { requests, bytes, took, slept, ended: Some(ended) } = submit else { return };
        let ns = u64::try_from(took.as_nanos()).unwrap_or(MOST_NS).clamp(1, MOST_NS);
        let mut held = lock(&self.0);
        held.histogram.saturating_record(ns);
        held.limit = limit;
        held.slept += u64::from(slept);
        if held.longest.is_none_or(|longest| took > longest.took) {
            held.longest = Some(LongestSubmit { took, ended, requests, bytes });
        }
    }

    pub fn snapshot(&self) -> SubmitSnapshot {
        lock(&self.0).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a time is what is recorded")]
    fn the_longest_is_kept_exactly() {
        let times = SubmitTimes::default();
        assert!(times.snapshot().longest.is_none());
        let ended = Instant::now();
        for (micros, requests, slept) in [(3, 1, false), (99_123, 7, true), (4, 2, false), (0, 1, false)] {
            let took = Duration::from_micros(micros);
            times.record(Submitted { requests, bytes: 4096, took, ended: Some(ended), slept }, 128);
        }
        let found = times.snapshot();
        let longest = found.longest.unwrap();
        assert_eq!((longest.took, longest.requests), (Duration::from_micros(99_123), 7));
        assert_eq!((found.histogram.len(), found.slept), (4, 1));
        assert!(found.histogram.max() >= 99_000_000 && found.histogram.value_at_quantile(0.5) < 4_100);
    }
}
