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
//! it was sent there: so jitter and replies out of order cancel out, and a delay does not hide the lead that it is for. A slow replica's
//! replies tell of its backlog only when they come. So throttling also begins once a replica, while it answers, has far more to read than
//! the others, and while it lasts a reply time is at least what reads have waited by now.
//!
//! Left to others: what is known of each replica (`watch`), the reads that are kept back (`waiting`), sending (`replies`, `requests`), and
//! a replica that falls behind for good (`links`).

use std::time::Duration;

use newel_protocol::JobId;

use super::api::{ReplicaId, ReplicaSet, Time};
use super::config::ThrottleConfig;
use super::waiting::{Due, Waiting};
use super::watch::{Watch, cost};

/// The lead that is aimed at, over the limit: far enough above it not to flicker.
const AIM: f64 = 1.25;
/// Throttling begins once the lead has been above the limit for so long: on a busy host equal replicas, too, take turns in being late.
const BEGIN_AFTER: Duration = Duration::from_millis(100);
/// It also begins once a replica has reads for so many times the limit more than another one: far more than what piles up
/// while an equal one is held up by its host for 50 ms.
const FAR: u32 = 10;
/// While nothing is kept back, leads and backlogs are looked at once in this time, however many reads there are.
const JUDGE_EVERY: Duration = Duration::from_millis(1);
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
/// How long a replica that has reads may say nothing, at least, before it is taken for stopped.
const SILENCE: Duration = Duration::from_millis(100);

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
    judged: Time,
    /// When backlogs were looked at.
    looked: Time,
    waiting: Waiting,
    change: Option<Change>,
}

/// What an operator should hear of.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Change {
    /// The lead was `seen` in replies, or is that which the backlog of the slowest comes to.
    Began {
        fastest: ReplicaId,
        slowest: ReplicaId,
        lead: Duration,
        seen: bool,
    },
    Ended,
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
            judged: Time::default(),
            looked: Time::default(),
            waiting: Waiting::default(),
            change: None,
        }
    }

    /// True if reads need not be offered: they would all be sent at once.
    pub(super) fn is_idle(&self) -> bool {
        !self.on && self.waiting.is_empty()
    }

    /// A read for these replicas. `poll` says when it is sent to which.
    pub(super) fn offer(&mut self, now: Time, job: JobId, bytes: usize, active: ReplicaSet) {
        self.active = active;
        self.waiting.offer(now, job, bytes);
    }

    /// What is to be sent now. Each must be sent, or said to be `gone`, before the next is asked for.
    pub(super) fn poll(&mut self, now: Time) -> Option<(JobId, ReplicaSet)> {
        if let Some(ready) = self.waiting.poll(now) {
            return Some(ready);
        }
        let next = self.waiting.at_gate()?;
        if now.since(next.since) < self.config.max_delay && !self.admits(now, next.bytes) {
            return None;
        }
        if let Some(released) = self.waiting.poll(now) {
            return Some(released);
        }
        self.waiting.pass_gate();
        Some((next.job, self.delay_some(now, next.job)))
    }

    /// Notes when the replicas with a lead get this read, and tells those that get it now.
    fn delay_some(&mut self, now: Time, job: JobId) -> ReplicaSet {
        let mut at_once = self.active;
        let mut due = Due::default();
        for replica in self.active.iter() {
            let delay = self.delay(now, replica);
            if !delay.is_zero() {
                at_once.remove(replica);
                due[replica.index()] = Some(now.after(delay));
            }
        }
        self.waiting.delay(job, due);
        at_once
    }

    /// When `poll` may have something without any event before.
    pub(super) fn deadline(&self, now: Time) -> Option<Time> {
        let gate = self.waiting.at_gate().map(|next| {
            let silent = self.watched.iter().filter_map(|watch| watch.meter.silent_at(SILENCE));
            let silence = silent.filter(|&silent| silent > now).min();
            let patience = next.since.after(self.config.max_delay);
            silence.map_or(patience, |silence| silence.min(patience))
        });
        self.waiting.next_due().into_iter().chain(gate).min()
    }

    /// True while the gate keeps this read back.
    pub(super) fn is_gated(&self, job: JobId) -> bool {
        self.waiting.is_gated(job)
    }

    /// Forgets what this read waits for, and tells which replicas have not got it while others have.
    pub(super) fn take(&mut self, job: JobId) -> ReplicaSet {
        self.waiting.take(job)
    }

    /// A read went to this replica.
    pub(super) fn sent(&mut self, now: Time, replica: ReplicaId, bytes: usize) {
        self.watched[replica.index()].meter.sent(now, cost(bytes));
    }

    /// A read came back, whatever the result.
    pub(super) fn replied(&mut self, now: Time, sent: Time, replica: ReplicaId, bytes: usize) {
        self.watched[replica.index()].replied(now, sent, bytes);
        if self.config.enabled && !self.on && now.since(self.looked) >= JUDGE_EVERY {
            self.looked = now;
            self.active.iter().for_each(|replica| self.look_for_backlog(now, replica));
        }
    }

    /// A backlog far above the limit needs no lead to be seen: that would come with the replies to the reads that are in it.
    fn look_for_backlog(&mut self, now: Time, replica: ReplicaId) {
        let meter = &self.watched[replica.index()].meter;
        let Some(wait) = meter.wait().filter(|_| meter.jobs() >= self.backlog_jobs_min) else { return };
        let others = self.active.iter().filter_map(|id| self.watched[id.index()].meter.wait()).min();
        let lead = wait.saturating_sub(others.unwrap_or_default());
        if lead <= self.config.lead * FAR || !meter.grows(now) {
            return;
        }
        if let Some((fastest, slowest)) = self.extremes(now).filter(|&(_, slowest)| slowest == replica) {
            self.begin(now, Change::Began { fastest, slowest, lead, seen: false });
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
        if self.on || now.since(self.judged) >= JUDGE_EVERY {
            self.judged = now;
            self.judge(now);
        }
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
        if now.since(*self.high_since.get_or_insert(now)) < BEGIN_AFTER {
            return;
        }
        let meter = &self.watched[slowest.index()].meter;
        // One that is catching up by itself, as after a pause, needs no help.
        if meter.jobs() >= self.backlog_jobs_min && meter.grows(now) {
            self.begin(now, Change::Began { fastest, slowest, lead, seen: true });
        }
    }

    fn begin(&mut self, now: Time, change: Change) {
        self.on = true;
        self.since = now;
        self.change = Some(change);
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

    fn release(&mut self) {
        self.waiting.release();
        self.watched.iter_mut().for_each(Watch::end_probe);
    }

    /// All jobs get new numbers and are sent again by somebody else.
    pub(super) fn forget_all(&mut self) {
        self.clear(None);
        self.waiting.forget();
    }

    /// True unless some slow replica has enough to read.
    fn admits(&mut self, now: Time, bytes: usize) -> bool {
        if self.on && self.extremes(now).is_none() {
            self.end();
        }
        let Some((fastest, _)) = self.extremes(now).filter(|_| self.on) else { return true };
        let lead_min = self.config.lead.mul_f64(END).as_secs_f64();
        let slow = self.estimate(now, fastest).unwrap_or_default() + lead_min;
        let enough = self.config.lead.mul_f64(AIM);
        for replica in self.active.iter() {
            if self.estimate(now, replica).is_none_or(|reply| reply < slow) {
                continue;
            }
            let watch = &mut self.watched[replica.index()];
            if watch.meter.silent_at(SILENCE).is_some_and(|silent| now >= silent) {
                // Stopped: it says nothing about reads, and leaves by its age or its silence.
                watch.forget();
                self.end();
                return true;
            }
            if !watch.admits(now, enough, bytes) {
                return false;
            }
        }
        true
    }

    /// What a read takes at this replica, in seconds.
    fn estimate(&self, now: Time, replica: ReplicaId) -> Option<f64> {
        let watch = &self.watched[replica.index()];
        if self.on { watch.expected(now) } else { watch.fresh(now) }
    }

    /// The fastest and the slowest of the Active replicas, while both are known.
    fn extremes(&self, now: Time) -> Option<(ReplicaId, ReplicaId)> {
        let known = || self.active.iter().filter_map(|id| Some((self.estimate(now, id)?, id)));
        let fastest = known().min_by(|a, b| a.0.total_cmp(&b.0))?.1;
        let slowest = known().max_by(|a, b| a.0.total_cmp(&b.0))?.1;
        (fastest != slowest).then_some((fastest, slowest))
    }

    /// By how much this replica answers reads before the slowest, from when each was sent.
    pub(super) fn lead(&self, now: Time, replica: ReplicaId) -> Option<Duration> {
        let (_, slowest) = self.extremes(now)?;
        let lead = self.estimate(now, slowest)? - self.estimate(now, replica)?;
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
        self.waiting.gated_for(now)
    }

    pub(super) fn gated(&self) -> usize {
        self.waiting.gated()
    }

    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// What an operator has not heard yet.
    pub(super) fn take_change(&mut self) -> Option<Change> {
        self.change.take()
    }
}
