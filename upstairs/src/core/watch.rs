//! What the throttle knows of one replica's reads: how long they take, and whether that is a backlog or latency.
//!
//! Invariants:
//! - An estimate without new samples expires.
//! - One slow read moves no estimate by much.
//!
//! Whether reads wait *at* a replica (a backlog) or merely take long there (latency, which no gate can mend) can't be seen while many
//! are under way. So now and then, while the gate would close, the replica is left with one read at a time: what those take is latency.

use std::time::Duration;

use super::api::Time;
use super::meter::{Meter, WINDOW};

/// What a read counts for beside its bytes: the work that every read is.
const READ_COST: u64 = 8 << 10;
/// Smoothing of reply times: over this time, and over at least so many samples up and down.
const SMOOTH: Duration = Duration::from_millis(20);
const WEIGHT_UP_MAX: f64 = 1.0 / 8.0;
const WEIGHT_DOWN_MAX: f64 = 1.0 / 4.0;
/// A sample counts for at most so much more than the mean: one slow read is no slow replica.
const SPIKE: Duration = Duration::from_millis(40);
/// An estimate without samples is forgotten after this long, or twice its reply time.
const EXPIRY: Duration = Duration::from_millis(250);
/// What was found out about a replica's latency is found out anew after this long.
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// How long a probe has an effect on reply times.
const AFTER_PROBE: Duration = Duration::from_millis(100);
/// Answers that a probe takes.
const PROBE_SAMPLES: u32 = 2;
/// A rate so much lower than at the last probe calls for another one.
const SLOWER: f64 = 0.7;
/// The backlog that latency excuses: this much more than what the latency needs, so that a rate can grow.
const SLACK: f64 = 1.25;

/// One replica's reads.
#[derive(Debug, Default)]
pub(super) struct Watch {
    pub(super) meter: Meter,
    /// Smoothed time from sending to reply, in seconds.
    reply: Option<f64>,
    sampled: Time,
    latency: Option<Latency>,
    probe: Option<Probe>,
}

/// What a read takes at a replica without a backlog.
#[derive(Debug)]
struct Latency {
    took: Duration,
    found: Time,
    /// Cost per second, before that was looked for.
    rate: f64,
}

#[derive(Debug, Default)]
struct Probe {
    /// Cost per second, when it began.
    rate: f64,
    /// Since when it has only what the probe needs.
    drained: Option<Time>,
    samples: u32,
    best: Duration,
}

impl Watch {
    pub(super) fn record(&mut self, now: Time, took: Duration) {
        let took = took.as_secs_f64();
        let old = self.reply.unwrap_or(0.0);
        let sample = took.min(old + SPIKE.as_secs_f64());
        let most = if sample > old { WEIGHT_UP_MAX } else { WEIGHT_DOWN_MAX };
        let since = now.since(self.sampled).as_secs_f64();
        let weight = (since / (since + SMOOTH.as_secs_f64())).min(most);
        self.reply = Some(old + (sample - old) * weight);
        self.sampled = now;
    }

    pub(super) fn reply_time(&self) -> Option<Duration> {
        self.reply.map(Duration::from_secs_f64)
    }

    /// The smoothed reply time in seconds, unless it is too old to say anything.
    pub(super) fn fresh(&self, now: Time) -> Option<f64> {
        let reply = self.reply?;
        let expiry = EXPIRY.max(Duration::from_secs_f64(reply * 2.0));
        (now.since(self.sampled) < expiry).then_some(reply)
    }

    /// The same, but no less than what its reads have waited by now: the slowest answers late, and before that it is known to be late.
    pub(super) fn expected(&self, now: Time) -> Option<f64> {
        let waited = self.meter.overdue(now).unwrap_or_default().as_secs_f64();
        Some(self.fresh(now)?.max(waited))
    }

    /// A read came back, whatever the result.
    pub(super) fn replied(&mut self, now: Time, sent: Time, bytes: usize) {
        self.meter.done(now, sent, cost(bytes));
        let Some(probe) = &mut self.probe else { return };
        if probe.drained.is_some_and(|drained| sent >= drained) {
            let took = now.since(sent);
            probe.best = if probe.samples == 0 { took } else { probe.best.min(took) };
            probe.samples += 1;
            if probe.samples >= PROBE_SAMPLES {
                self.latency = Some(Latency { took: probe.best, found: now, rate: probe.rate });
                self.probe = None;
            }
        }
    }

    pub(super) fn end_probe(&mut self) {
        self.probe = None;
    }

    /// True unless with this read it has more than enough to read, and more than its latency needs.
    pub(super) fn admits(&mut self, now: Time, enough: Duration, bytes: usize) -> bool {
        if let Some(probe) = &mut self.probe {
            let none = self.meter.jobs() == 0;
            if none && probe.drained.is_none() {
                probe.drained = Some(now);
            }
            return none;
        }
        // One at work and one to follow it, whatever they take.
        let Some(rate) = self.rate(now).filter(|_| self.meter.jobs() > 1) else { return true };
        let waits = self.meter.wait_at(rate, 0).zip(self.meter.wait_at(rate, cost(bytes)));
        let Some((wait, with_this)) = waits else { return true };
        if with_this <= enough {
            return true;
        }
        match &self.latency {
            Some(latency) if latency.holds(now, enough, &self.meter) => {
                with_this <= latency.took + enough || wait <= latency.took.mul_f64(SLACK)
            }
            Some(_) | None => {
                self.probe = Some(Probe { rate, ..Probe::default() });
                false
            }
        }
    }

    /// Cost per second: after a probe, which let it do little, no less than before.
    fn rate(&self, now: Time) -> Option<f64> {
        let recent = self.latency.as_ref().filter(|latency| now.since(latency.found) < WINDOW + latency.took);
        let before = recent.map(|latency| latency.rate);
        self.meter.rate().into_iter().chain(before).reduce(f64::max)
    }

    pub(super) fn was_probed(&self, now: Time) -> bool {
        let lately = |latency: &Latency| now.since(latency.found) < AFTER_PROBE;
        self.probe.is_some() || self.latency.as_ref().is_some_and(lately)
    }

    pub(super) fn forget(&mut self) {
        self.reply = None;
        self.latency = None;
        self.probe = None;
        self.meter.forget();
    }
}

impl Latency {
    /// True unless it may be another one by now.
    fn holds(&self, now: Time, enough: Duration, meter: &Meter) -> bool {
        if self.took > enough {
            // It excuses a longer queue, so it is looked at again.
            return now.since(self.found) < PROBE_EVERY;
        }
        // A gate that is too narrow for the latency lowers the rate.
        now.since(self.found) < PROBE_EVERY || meter.rate().is_none_or(|rate| rate > self.rate * SLOWER)
    }
}

pub(super) fn cost(bytes: usize) -> u64 {
    bytes as u64 + READ_COST
}
