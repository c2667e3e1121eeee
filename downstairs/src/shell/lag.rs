//! The timer of the stall meter, which tells how late the reactor was.
//!
//! Invariants:
//! - It ticks only while there are events: an idle replica rests.
//! - A stall of 20 ms is told in the log, at most once in 10 s.
//!
//! Left to others: what counts as a stall ([`newel_protocol::lag`]), what ran (`reactor.rs`).

use std::cell::RefCell;
use std::time::Duration;

use newel_protocol::lag::{Activity, Delays, LagMeter, Stall};
use tokio::sync::Notify;
use tracing::warn;

use super::Clock;
use crate::core::api::Time;
use crate::disk::{SubmitSnapshot, SubmitTimesByLane};

#[derive(Debug, Default)]
pub(super) struct Lag {
    meter: RefCell<LagMeter>,
    /// A tick is asked for after a rest.
    asked: Notify,
}

impl Lag {
    pub(super) fn begins(&self, now: Time) {
        if self.meter.borrow_mut().begins(now.0) {
            self.asked.notify_one();
        }
    }

    pub(super) fn ran(&self, activity: Activity, begun: Time, ended: Time) {
        self.meter.borrow_mut().ran(activity, begun.0, ended.0);
    }

    /// How late the reactor was since the start, and the longest stall.
    pub(super) fn figures(&self, now: Time) -> (Delays, Stall) {
        let meter = self.meter.borrow();
        (meter.lag(), meter.longest_stall(now.0))
    }

    /// Ticks, for ever.
    pub(super) async fn run(&self, clock: Clock) {
        loop {
            let due = self.meter.borrow().due_ns();
            let Some(due) = due else {
                self.asked.notified().await;
                continue;
            };
            tokio::time::sleep_until(clock.instant(Time(due))).await;
            let warning = self.meter.borrow_mut().tick(clock.now().0);
            if let Some(warning) = warning {
                warn!("{warning}: answers of all sessions waited");
            }
        }
    }
}

/// How long submissions of all lanes took, and the longest.
pub(super) fn submits_of(times: &SubmitTimesByLane) -> (Delays, Stall) {
    let (SubmitSnapshot { mut histogram, longest, .. }, reads) =
        (times.writes.snapshot(), times.reads.snapshot());
    if histogram.add(&reads.histogram).is_err() {
        warn!("the histograms of the lanes differ in shape: only writes are told");
    }
    let delays = Delays::of(&histogram, |ns| ns / 1_000);
    let longest = longest.into_iter().chain(reads.longest).max_by_key(|longest| longest.took);
    let stall = longest.map(|longest| Stall {
        took_us: micros(longest.took),
        ago_ms: u64::try_from(longest.ended.elapsed().as_millis()).unwrap_or(u64::MAX),
        during: Activity::Disk,
    });
    (delays, stall.unwrap_or_default())
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}
