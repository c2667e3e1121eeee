//! The timer of the stall meter, which tells how late the reactor was.
//!
//! Invariants:
//! - It ticks only while there are events: an idle volume rests.
//! - A stall of 20 ms is told in the log, at most once in 10 s.
//!
//! Left to others: what counts as a stall ([`newel_protocol::lag`]), what ran (`driver.rs`).

use std::cell::RefCell;
use std::time::{Duration, Instant};

use newel_protocol::lag::{Activity, Delays, LagMeter, Stall};
use tokio::sync::Notify;

use crate::core::api::Time;

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
    pub(super) async fn run(&self, started: Instant) {
        loop {
            let due = self.meter.borrow().due_ns();
            let Some(due) = due else {
                self.asked.notified().await;
                continue;
            };
            tokio::time::sleep_until((started + Duration::from_nanos(due)).into()).await;
            let now_ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let warning = self.meter.borrow_mut().tick(now_ns);
            if let Some(warning) = warning {
                tracing::warn!("{warning}: guests and replicas waited");
            }
        }
    }
}
