//! One replica's reads: what is under way there, and at which rate it answers.
//!
//! Invariants:
//! - The rate counts only time in which there was something to read.
//! - A pause much longer than the usual time between answers begins the measurement anew.

use std::collections::VecDeque;
use std::time::Duration;

use super::api::Time;

/// The rate is taken over so many marks, each at least so far from the one before.
const MARKS: u32 = 20;
const MARK_EVERY: Duration = Duration::from_millis(10);
/// What was done longer ago has no effect on the rate.
pub(super) const WINDOW: Duration = MARK_EVERY.saturating_mul(MARKS);
/// A pause is one that lasts so many times the usual, and at least so long.
const PAUSE: f64 = 8.0;
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// Weight of a new sample in the usual time between answers.
const SMOOTHING: f64 = 1.0 / 8.0;
/// A look back for growth goes back no further than this.
const RECENT: Duration = Duration::from_millis(30);

#[derive(Debug, Default)]
pub(super) struct Meter {
    jobs: usize,
    cost: u64,
    /// Since when it has something to read.
    busy_since: Option<Time>,
    /// The last moment at which it had nothing.
    idle_at: Time,
    sums: Mark,
    last_done: Time,
    /// When the youngest read that it has answered was sent.
    answered_to: Time,
    /// Seconds between answers.
    spacing: f64,
    marks: VecDeque<Mark>,
}

/// Sums since the start, at some moment.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    at: Time,
    sent: u64,
    done: u64,
    busy: Duration,
}

impl Meter {
    pub(super) fn jobs(&self) -> usize {
        self.jobs
    }

    pub(super) fn sent(&mut self, now: Time, cost: u64) {
        self.jobs += 1;
        self.cost += cost;
        self.sums.sent += cost;
        if self.busy_since.is_none() {
            self.busy_since = Some(now);
            self.idle_at = now;
        }
    }

    pub(super) fn done(&mut self, now: Time, sent: Time, cost: u64) {
        self.jobs = self.jobs.saturating_sub(1);
        self.cost = self.cost.saturating_sub(cost);
        self.answered_to = self.answered_to.max(sent);
        let Some(since) = self.busy_since else { return };
        let idle_until = since.max(self.last_done);
        let gap = now.since(idle_until).as_secs_f64();
        if gap > (self.spacing * PAUSE).max(PAUSE_MIN.as_secs_f64()) {
            self.marks.clear();
        }
        self.spacing = if self.spacing > 0.0 { self.spacing + (gap - self.spacing) * SMOOTHING } else { gap };
        self.sums.done += cost;
        self.sums.busy += now.since(since);
        self.sums.at = now;
        self.last_done = now;
        self.busy_since = (self.jobs > 0).then_some(now);
        if self.marks.back().is_none_or(|mark| now.since(mark.at) >= MARK_EVERY) {
            self.marks.push_back(self.sums);
            if self.marks.len() > MARKS as usize {
                self.marks.pop_front();
            }
        }
    }

    /// How long it has had something to read without a pause.
    pub(super) fn busy_for(&self, now: Time) -> Duration {
        if self.jobs > 0 { now.since(self.idle_at) } else { Duration::ZERO }
    }

    /// Cost per second of busy time, once that has been seen for long enough.
    pub(super) fn rate(&self) -> Option<f64> {
        let from = self.marks.front().filter(|mark| self.sums.at.since(mark.at) >= MARK_EVERY)?;
        let busy = (self.sums.busy - from.busy).as_secs_f64();
        let done = self.sums.done - from.done;
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        (busy > 0.0 && done > 0).then(|| done as f64 / busy)
    }

    /// How long what it has will take it.
    pub(super) fn wait(&self) -> Option<Duration> {
        self.wait_at(self.rate()?, 0)
    }

    /// The same at some other rate, and with so much more.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub(super) fn wait_at(&self, rate: f64, more: u64) -> Option<Duration> {
        Duration::try_from_secs_f64((self.cost + more) as f64 / rate).ok()
    }

    /// True if it has at least as much to read as a while ago, and has answered meanwhile. After a pause that can't be said at once.
    pub(super) fn grows(&self, now: Time) -> bool {
        let spacing = Duration::try_from_secs_f64(self.spacing * 2.0).unwrap_or_default();
        let recent = |mark: &&Mark| now.since(mark.at) <= RECENT.max(spacing);
        let before = self.marks.iter().rev().find(|mark| now.since(mark.at) >= MARK_EVERY).filter(recent);
        before.is_some_and(|mark| self.sums.sent - self.sums.done >= mark.sent - mark.done)
    }

    /// How long its reads have waited at least: since the moment for which it has answered nothing that was sent later. Replies out of
    /// order don't make it longer.
    pub(super) fn overdue(&self, now: Time) -> Option<Duration> {
        (self.jobs > 0).then(|| now.since(self.answered_to.max(self.idle_at)))
    }

    /// When a replica that has something to read counts as stopped.
    pub(super) fn silent_at(&self, least: Duration) -> Option<Time> {
        let since = self.busy_since?.max(self.last_done);
        let usual = Duration::try_from_secs_f64(self.spacing * PAUSE).unwrap_or_default();
        Some(since.after(least.max(usual)))
    }

    /// The rate of another time says nothing any more; what is under way is.
    pub(super) fn forget(&mut self) {
        self.marks.clear();
        self.spacing = 0.0;
    }
}
