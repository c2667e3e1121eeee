//! The lead throttle: keeps reads from running away from a slow replica.
//!
//! One reply answers a read, so fast replicas would keep winning while the queue of a slow one grows without bound. How much
//! earlier a replica answers than the slowest is its *lead*. Once the fastest one's lead exceeds the limit two things happen:
//! - reads to every replica with such a lead are sent later (the *delay*), so that the lead comes down to just above the limit;
//! - a read is not sent to anybody while a slow replica has more to read than it can in about the time of the limit (the
//!   *gate*). That costs nothing: the replica always has something to read, so the guest reads at its rate.
//!
//! Invariants:
//! - Only reads that were offered wait here; whatever else is sent passes them.
//! - A read waits at most `max_delay` at the gate, and at most `max_delay` for its delay.
//! - The slowest replica is never delayed. A replica that gives no sign of life holds up nobody.
//! - A replica that joins or leaves clears every estimate, and whatever waits is sent.
//!
//! The lead is the difference of smoothed reply times over reads that all Active replicas answered, each counted from when
//! it was sent there: so jitter and replies out of order cancel out, and a delay does not hide the lead that it is for. An estimate without
//! new samples expires.
//!
//! Whether reads wait *at* a replica (a backlog) or merely take long there (latency, which no gate can mend) can't be seen while many
//! are under way. So now and then, while the gate would close, the replica is left with one or two reads: what those take is latency.
//!
//! Left to others: sending (`replies`, `requests`), and a replica that falls behind for good (`links`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use newel_protocol::JobId;

use super::api::{ReplicaId, ReplicaSet, Time};
use super::config::ThrottleConfig;
use super::meter::Meter;

/// What a read counts for beside its bytes: the work that every read is.
const READ_COST: u64 = 8 << 10;
/// The lead that is aimed at, over the limit: far enough above it not to flicker.
const AIM: f64 = 1.25;
/// Throttling begins once the lead has been above the limit for so long, or is twice that: on a busy host equal replicas, too,
/// take turns in being late.
const BEGIN_AFTER: Duration = Duration::from_millis(25);
/// Throttling ends once the lead is below this part of the limit.
const END: f64 = 0.8;
/// And has been for so long.
const END_AFTER: Duration = Duration::from_millis(50);
/// The lead that is aimed at, as a part of the limit, to end throttling.
const CLOSING_AIM: f64 = 0.5;
/// A fastest replica that has had something to read for so long without a pause isn't faster any more.
const BUSY: Duration = Duration::from_millis(50);
/// How long closing the gap may take.
const CLOSING_MAX: Duration = Duration::from_millis(100);
/// Smoothing of reply times: over this time, and over at least so many samples up and down.
const SMOOTH: Duration = Duration::from_millis(20);
const WEIGHT_UP_MAX: f64 = 1.0 / 8.0;
const WEIGHT_DOWN_MAX: f64 = 1.0 / 4.0;
/// A sample counts for at most so much more than the mean: one slow read is no slow replica.
const SPIKE: Duration = Duration::from_millis(40);
/// An estimate without samples is forgotten after this long, or twice its reply time.
const EXPIRY: Duration = Duration::from_millis(250);
/// How long a replica that has reads may say nothing, at least, before it is taken for stopped.
const SILENCE: Duration = Duration::from_millis(100);
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

#[derive(Debug)]
pub(super) struct Throttle {
    config: ThrottleConfig,
    /// Fewer reads than these at a replica are no backlog.
    backlog_jobs_min: usize,
    active: ReplicaSet,
    watched: [Watch; ReplicaId::COUNT],
    on: bool,
    /// Since when, or since it was last found that the slowest is slow.
    since: Time,
    /// Since when it is tried to end it: the slowest is as fast as the fastest; what is left of the lead would stay for ever.
    closing: Option<Time>,
    /// Since when the lead is low enough to end it.
    low_since: Option<Time>,
    /// Since when it is above the limit.
    high_since: Option<Time>,
    /// Reads that were sent to nobody yet, by number.
    gated: VecDeque<Gated>,
    /// Reads that some replicas get later, and when.
    delayed: BTreeSet<(Time, JobId, ReplicaId)>,
    waits: BTreeMap<JobId, [Option<Time>; ReplicaId::COUNT]>,
    ready: VecDeque<(JobId, ReplicaSet)>,
    change: Option<Change>,
}

#[derive(Clone, Copy, Debug)]
struct Gated {
    job: JobId,
    since: Time,
}

/// What an operator should hear of.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Change {
    Began { fastest: ReplicaId, slowest: ReplicaId, lead: Duration },
    Ended,
}

/// One replica's reads.
#[derive(Debug, Default)]
struct Watch {
    meter: Meter,
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
    /// Cost per second, then.
    rate: f64,
}

#[derive(Debug, Default)]
struct Probe {
    /// Since when it has only what the probe needs.
    drained: Option<Time>,
    samples: u32,
    best: Duration,
}

/// When a read was sent to a replica and when the reply came.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) replica: ReplicaId,
    pub(super) sent: Time,
    pub(super) replied: Time,
}

impl Throttle {
    pub(super) fn new(config: ThrottleConfig, backlog_jobs_min: usize) -> Self {
        Self {
            config,
            backlog_jobs_min,
            active: ReplicaSet::EMPTY,
            watched: Default::default(),
            on: false,
            since: Time::default(),
            closing: None,
            low_since: None,
            high_since: None,
            gated: VecDeque::new(),
            delayed: BTreeSet::new(),
            waits: BTreeMap::new(),
            ready: VecDeque::new(),
            change: None,
        }
    }

    /// True if reads need not be offered: they would all be sent at once.
    pub(super) fn is_idle(&self) -> bool {
        !self.on && self.gated.is_empty() && self.delayed.is_empty() && self.ready.is_empty()
    }

    /// A read for these replicas. `poll` says when it is sent to which.
    pub(super) fn offer(&mut self, now: Time, job: JobId, active: ReplicaSet) {
        self.active = active;
        self.gated.push_back(Gated { job, since: now });
    }

    /// What is to be sent now. Each must be sent, or said to be `gone`, before the next is asked for.
    pub(super) fn poll(&mut self, now: Time) -> Option<(JobId, ReplicaSet)> {
        if let Some(ready) = self.ready.pop_front() {
            return Some(ready);
        }
        if let Some(&(due, job, replica)) = self.delayed.first()
            && due <= now
        {
            self.delayed.pop_first();
            if let Some(waits) = self.waits.get_mut(&job) {
                waits[replica.index()] = None;
                if waits.iter().all(Option::is_none) {
                    self.waits.remove(&job);
                }
            }
            return Some((job, ReplicaSet::only(replica)));
        }
        let next = *self.gated.front()?;
        if now.since(next.since) < self.config.max_delay && !self.admits(now) {
            return None;
        }
        if let Some(released) = self.ready.pop_front() {
            return Some(released);
        }
        self.gated.pop_front();
        Some((next.job, self.delay_some(now, next.job)))
    }

    /// Notes when the replicas with a lead get this read, and tells those that get it now.
    fn delay_some(&mut self, now: Time, job: JobId) -> ReplicaSet {
        let mut at_once = self.active;
        let mut waits = [None; ReplicaId::COUNT];
        for replica in self.active.iter() {
            let delay = self.delay(now, replica);
            if !delay.is_zero() {
                let due = now.after(delay);
                at_once.remove(replica);
                waits[replica.index()] = Some(due);
                self.delayed.insert((due, job, replica));
            }
        }
        if at_once != self.active {
            self.waits.insert(job, waits);
        }
        at_once
    }

    /// When `poll` may have something without any event before.
    pub(super) fn deadline(&self, now: Time) -> Option<Time> {
        let due = self.delayed.first().map(|&(due, ..)| due);
        let gate = self.gated.front().map(|next| {
            let silent = self.watched.iter().filter_map(|watch| watch.meter.silent_at(SILENCE));
            let silence = silent.filter(|&silent| silent > now).min();
            let patience = next.since.after(self.config.max_delay);
            silence.map_or(patience, |silence| silence.min(patience))
        });
        due.into_iter().chain(gate).min()
    }

    /// True while the gate keeps this read back.
    pub(super) fn is_gated(&self, job: JobId) -> bool {
        self.gated.binary_search_by_key(&job, |gated| gated.job).is_ok()
    }

    /// Forgets what this read waits for, and tells which replicas have not got it while others have.
    pub(super) fn take(&mut self, job: JobId) -> ReplicaSet {
        let mut waited = ReplicaSet::EMPTY;
        if let Ok(index) = self.gated.binary_search_by_key(&job, |gated| gated.job) {
            self.gated.remove(index);
        }
        for (replica, due) in ReplicaId::ALL.into_iter().zip(self.waits.remove(&job).unwrap_or_default()) {
            if let Some(due) = due {
                self.delayed.remove(&(due, job, replica));
                waited.insert(replica);
            }
        }
        waited
    }

    /// A read went to this replica.
    pub(super) fn sent(&mut self, now: Time, replica: ReplicaId, bytes: usize) {
        self.watched[replica.index()].meter.sent(now, cost(bytes));
    }

    /// A read came back, whatever the result.
    pub(super) fn replied(&mut self, now: Time, sent: Time, replica: ReplicaId, bytes: usize) {
        let watch = &mut self.watched[replica.index()];
        watch.meter.done(now, cost(bytes));
        let Some(probe) = &mut watch.probe else { return };
        if probe.drained.is_some_and(|drained| sent >= drained) {
            let took = now.since(sent);
            probe.best = if probe.samples == 0 { took } else { probe.best.min(took) };
            probe.samples += 1;
            if probe.samples >= PROBE_SAMPLES {
                let rate = watch.meter.rate().unwrap_or_default();
                watch.latency = Some(Latency { took: probe.best, found: now, rate });
                watch.probe = None;
            }
        }
    }

    /// A read that all Active replicas have answered.
    pub(super) fn sample(&mut self, now: Time, samples: impl IntoIterator<Item = Sample>) {
        if !self.config.enabled {
            return;
        }
        for Sample { replica, sent, replied } in samples {
            self.active.insert(replica);
            self.watched[replica.index()].record(now, replied.since(sent));
        }
        self.judge(now);
    }

    /// Begins or ends throttling.
    fn judge(&mut self, now: Time) {
        let Some((fastest, slowest)) = self.extremes(now) else { return self.end() };
        let lead = self.lead(now, fastest).unwrap_or_default();
        let limit = self.config.lead;
        if self.on {
            // A probe lets the slowest answer fast for a while.
            let probed = self.watched.iter().any(|watch| watch.was_probed(now));
            if probed || lead >= limit.mul_f64(END) {
                self.low_since = None;
            }
            if lead < limit.mul_f64(END) {
                let since = *self.low_since.get_or_insert(now);
                if now.since(since) >= END_AFTER {
                    self.end();
                }
            } else {
                self.try_to_close(now, fastest);
            }
            return;
        }
        if lead <= limit {
            self.high_since = None;
            return;
        }
        let high = now.since(*self.high_since.get_or_insert(now));
        if lead <= limit * 2 && high < BEGIN_AFTER {
            return;
        }
        let meter = &self.watched[slowest.index()].meter;
        // One that is catching up by itself, as after a pause, needs no help.
        if meter.jobs() >= self.backlog_jobs_min && meter.falls_behind() {
            self.on = true;
            self.since = now;
            self.change = Some(Change::Began { fastest, slowest, lead });
        }
    }

    /// Where the slowest has become as fast as the fastest, a lead would stay as it is, and reads would be held for nothing. Then both
    /// have something to read all the time, and delaying the fastest a little more closes the gap. If it doesn't, the slowest is slow.
    fn try_to_close(&mut self, now: Time, fastest: ReplicaId) {
        match self.closing {
            Some(since) if now.since(since) < CLOSING_MAX => {}
            Some(_) => {
                self.closing = None;
                self.since = now;
            }
            None => {
                let watch = &self.watched[fastest.index()];
                let busy = watch.meter.busy_for(now).min(now.since(self.since));
                if busy > BUSY + watch.reply_time().unwrap_or_default() {
                    self.closing = Some(now);
                }
            }
        }
    }

    fn end(&mut self) {
        self.closing = None;
        self.low_since = None;
        self.high_since = None;
        if std::mem::take(&mut self.on) {
            self.change = Some(Change::Ended);
            self.release();
        }
    }

    /// A replica joined or left.
    pub(super) fn clear(&mut self, gone: Option<ReplicaId>) {
        if let Some(gone) = gone {
            self.watched[gone.index()] = Watch::default();
            self.active.remove(gone);
        }
        for watch in &mut self.watched {
            watch.forget();
        }
        self.end();
        self.release();
        self.active = ReplicaSet::EMPTY;
    }

    /// Everything that waits is to be sent; the sender leaves out whoever is gone.
    fn release(&mut self) {
        let all: ReplicaSet = ReplicaId::ALL.into_iter().collect();
        for (job, waits) in std::mem::take(&mut self.waits) {
            self.ready.push_back((job, all.iter().filter(|id| waits[id.index()].is_some()).collect()));
        }
        self.delayed.clear();
        self.ready.extend(self.gated.drain(..).map(|gated| (gated.job, all)));
        for watch in &mut self.watched {
            watch.probe = None;
        }
    }

    /// All jobs get new numbers and are sent again by somebody else.
    pub(super) fn forget_all(&mut self) {
        self.clear(None);
        self.ready.clear();
    }

    /// True unless some slow replica has enough to read.
    fn admits(&mut self, now: Time) -> bool {
        if self.on && self.extremes(now).is_none() {
            self.end();
        }
        let Some((fastest, _)) = self.extremes(now).filter(|_| self.on) else { return true };
        let fast = self.watched[fastest.index()].reply_time().unwrap_or_default();
        let enough = self.config.lead.mul_f64(AIM);
        for replica in self.active.iter() {
            let watch = &mut self.watched[replica.index()];
            if watch.reply_time().is_none_or(|reply| reply < fast + self.config.lead.mul_f64(END)) {
                continue;
            }
            if watch.meter.silent_at(SILENCE).is_some_and(|silent| now >= silent) {
                // Stopped: it says nothing about reads, and leaves by its age or its silence.
                watch.forget();
                self.end();
                return true;
            }
            if !watch.admits(now, enough) {
                return false;
            }
        }
        true
    }

    /// The fastest and the slowest of the Active replicas, while both are known.
    fn extremes(&self, now: Time) -> Option<(ReplicaId, ReplicaId)> {
        let known = || self.active.iter().filter_map(|id| Some((self.watched[id.index()].fresh(now)?, id)));
        let fastest = known().min_by(|a, b| a.0.total_cmp(&b.0))?.1;
        let slowest = known().max_by(|a, b| a.0.total_cmp(&b.0))?.1;
        (fastest != slowest).then_some((fastest, slowest))
    }

    /// By how much this replica answers reads before the slowest, from when each was sent.
    pub(super) fn lead(&self, now: Time, replica: ReplicaId) -> Option<Duration> {
        let (_, slowest) = self.extremes(now)?;
        let own = self.watched[replica.index()].fresh(now)?;
        let lead = self.watched[slowest.index()].fresh(now)? - own;
        Some(Duration::from_secs_f64(lead.max(0.0)))
    }

    /// How much later than the others this replica gets reads.
    pub(super) fn delay(&self, now: Time, replica: ReplicaId) -> Duration {
        if !self.on {
            return Duration::ZERO;
        }
        let lead = self.lead(now, replica).unwrap_or_default();
        let aim = if self.closing.is_some() { CLOSING_AIM } else { AIM };
        lead.saturating_sub(self.config.lead.mul_f64(aim)).min(self.config.max_delay)
    }

    /// How long reads to this replica are kept back altogether; the slowest gets what it can take.
    pub(super) fn held_for(&self, now: Time, replica: ReplicaId) -> Duration {
        match self.extremes(now) {
            Some((_, slowest)) if self.on && replica != slowest && self.active.contains(replica) => {
                self.delay(now, replica) + self.gated_for(now)
            }
            Some(_) | None => Duration::ZERO,
        }
    }

    /// Since when the oldest read waits at the gate.
    pub(super) fn gated_for(&self, now: Time) -> Duration {
        self.gated.front().map_or(Duration::ZERO, |gated| now.since(gated.since))
    }

    pub(super) fn gated(&self) -> usize {
        self.gated.len()
    }

    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// What an operator has not heard yet.
    pub(super) fn take_change(&mut self) -> Option<Change> {
        self.change.take()
    }
}

impl Watch {
    fn record(&mut self, now: Time, took: Duration) {
        let took = took.as_secs_f64();
        let old = self.reply.unwrap_or(0.0);
        let sample = took.min(old + SPIKE.as_secs_f64());
        let most = if sample > old { WEIGHT_UP_MAX } else { WEIGHT_DOWN_MAX };
        let since = now.since(self.sampled).as_secs_f64();
        let weight = (since / (since + SMOOTH.as_secs_f64())).min(most);
        self.reply = Some(old + (sample - old) * weight);
        self.sampled = now;
    }

    fn reply_time(&self) -> Option<Duration> {
        self.reply.map(Duration::from_secs_f64)
    }

    /// The smoothed reply time in seconds, unless it is too old to say anything.
    fn fresh(&self, now: Time) -> Option<f64> {
        let reply = self.reply?;
        let expiry = EXPIRY.max(Duration::from_secs_f64(reply * 2.0));
        (now.since(self.sampled) < expiry).then_some(reply)
    }

    /// True unless it has enough to read, and more than its latency needs.
    fn admits(&mut self, now: Time, enough: Duration) -> bool {
        if let Some(probe) = &mut self.probe {
            let few = self.meter.jobs() <= 1;
            if few && probe.drained.is_none() {
                probe.drained = Some(now);
            }
            return few;
        }
        // One at work and one to follow it, whatever they take.
        let Some(wait) = self.meter.wait().filter(|_| self.meter.jobs() > 1) else { return true };
        if wait <= enough {
            return true;
        }
        match &self.latency {
            Some(latency) if latency.holds(now, enough, &self.meter) => {
                wait <= (latency.took + enough).max(latency.took.mul_f64(SLACK))
            }
            Some(_) | None => {
                self.probe = Some(Probe::default());
                false
            }
        }
    }

    fn was_probed(&self, now: Time) -> bool {
        let lately = |latency: &Latency| now.since(latency.found) < AFTER_PROBE;
        self.probe.is_some() || self.latency.as_ref().is_some_and(lately)
    }

    fn forget(&mut self) {
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

fn cost(bytes: usize) -> u64 {
    bytes as u64 + READ_COST
}
