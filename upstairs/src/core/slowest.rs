//! The slowest jobs of about the last hour, in fixed memory.
//!
//! The hour is cut into [`PARTS`] parts, and the slowest of each are kept: so after an hour the slowest of the last 55 to 60 minutes
//! are known exactly, whatever came between.

use std::time::Duration;

use super::api::Time;
use super::timeline::{Record, Ticks};

pub(super) const KEPT: usize = 20;
const PARTS: usize = 12;
const PART: Duration = Duration::from_secs(5 * 60);

#[derive(Debug)]
pub(super) struct Slowest {
    parts: [Part; PARTS],
}

#[derive(Debug)]
struct Part {
    /// Which part of time it is: counted from the start.
    number: u64,
    records: Vec<(Ticks, Record)>,
    /// Nothing faster gets in.
    floor: Ticks,
}

fn part_of(now: Time) -> u64 {
    now.0 / u64::try_from(PART.as_nanos()).unwrap_or(u64::MAX)
}

impl Slowest {
    pub(super) fn new() -> Self {
        let part = |_| Part { number: 0, records: Vec::with_capacity(KEPT), floor: Ticks(0) };
        Self { parts: std::array::from_fn(part) }
    }

    /// True if a job that ends now after so long is to be kept. Cheap: almost all are not.
    pub(super) fn takes(&mut self, now: Time, took: Ticks) -> bool {
        let number = part_of(now);
        let part = self.part(number);
        if part.number != number {
            (part.number, part.floor) = (number, Ticks(0));
            part.records.clear();
        }
        took > part.floor || part.records.len() < KEPT
    }

    fn part(&mut self, number: u64) -> &mut Part {
        let place = usize::try_from(number % PARTS as u64).unwrap_or(0);
        &mut self.parts[place]
    }

    pub(super) fn keep(&mut self, now: Time, took: Ticks, record: Record) {
        let part = self.part(part_of(now));
        if part.records.len() < KEPT {
            part.records.push((took, record));
        } else if let Some(least) = part.records.iter_mut().min_by_key(|(took, _)| *took) {
            *least = (took, record);
        }
        if part.records.len() == KEPT {
            part.floor = part.records.iter().map(|(took, _)| *took).min().unwrap_or_default();
        }
    }

    /// The slowest first.
    pub(super) fn list(&self, now: Time) -> Vec<Record> {
        let current = part_of(now);
        let young = |part: &&Part| current.saturating_sub(part.number) < PARTS as u64;
        let mut all: Vec<(Ticks, Record)> =
            self.parts.iter().filter(young).flat_map(|part| part.records.iter().copied()).collect();
        all.sort_by_key(|&(took, _)| std::cmp::Reverse(took));
        all.truncate(KEPT);
        all.into_iter().map(|(_, record)| record).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::timeline::{Timeline, Why};

    const MINUTE: u64 = 60_000_000_000;

    fn record(request: u64) -> Record {
        let timeline = Timeline { request, ..Timeline::default() };
        Record { id: 0, why: Why::Slowest, ended: true, now: Time(0), dropped: 0, timeline }
    }

    #[test]
    fn the_slowest_of_an_hour_as_by_looking_at_all() {
        let mut slowest = Slowest::new();
        let (mut random, mut all) = (1_u64, Vec::new());
        for step in 0..20_000_u64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let now = Time(step * MINUTE / 100);
            let took = Ticks(u32::try_from(random % 1_000_000_000).unwrap());
            if slowest.takes(now, took) {
                slowest.keep(now, took, record(step));
            }
            all.push((now, took, step));
        }
        let now = Time(20_000 * MINUTE / 100 - 1);
        let found: Vec<u64> = slowest.list(now).iter().map(|record| record.timeline.request).collect();
        all.retain(|&(at, ..)| now.since(at) < Duration::from_secs(55 * 60));
        all.sort_by_key(|&(_, took, _)| std::cmp::Reverse(took));
        let mut at = found.iter();
        // Each of the slowest of 55 minutes is there, in order; what is between them is older, and slower than the next.
        for (.., step) in all.iter().take(10) {
            assert!(at.any(|found| found == step), "{step} is not in {found:?}");
        }
        assert_eq!(found.len(), KEPT);
        assert!(slowest.list(Time(now.0 + 61 * MINUTE)).is_empty(), "an hour later all are forgotten");
    }
}
