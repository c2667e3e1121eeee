//! One replica as the upstairs sees it: its link, its role, what it owes, and how fast it answers.
//!
//! Invariants:
//! - Only `Role::Active` counts for a quorum and gets reads.
//! - `queue_jobs` and `queue_bytes` are those of the jobs that have this replica in `owed`; a link that goes takes both to
//!   zero.
//! - An event that carries another link than the current one is stale and changes nothing.

use std::time::Duration;

use newel_protocol::lag::Health;
use newel_protocol::wire::Welcome;
use uuid::Uuid;

use super::api::{LinkId, ReplicaId, Time};
use super::config::Timing;
use super::resync::{Progress, Resync};
use super::work::WorkStatus;

#[derive(Debug)]
pub(super) enum Link {
    /// No connection; the next attempt starts at `retry_at`.
    Down {
        retry_at: Time,
    },
    Connecting {
        since: Time,
    },
    /// Hello is out.
    Greeting {
        since: Time,
    },
    /// Known, but in no role: activation or a join takes it from here.
    Greeted,
    /// Promote is out.
    Promoting {
        since: Time,
    },
    Up(Role),
}

#[derive(Debug)]
pub(super) enum Role {
    /// Takes part in an activation that isn't finished.
    Activating,
    CatchingUp(Box<CatchUp>),
    Active,
}

/// A joiner on its way to Active.
#[derive(Debug)]
pub(super) struct CatchUp {
    pub(super) stage: CatchUpStage,
    pub(super) started: Time,
    /// What was copied, once that is over.
    pub(super) copied: Progress,
}

#[derive(Debug)]
pub(super) enum CatchUpStage {
    /// No Active replica to copy from yet.
    NoSource,
    Copying(Box<Resync>),
    /// Everything is copied; its flush is out.
    Flushing,
    /// `Activated` is out: counts as soon as it is stored.
    Storing,
}

#[derive(Debug)]
pub(super) struct Replica {
    pub(super) id: ReplicaId,
    pub(super) link_id: LinkId,
    pub(super) link: Link,
    pub(super) welcome: Option<Welcome>,
    /// How it introduced itself last, for the status.
    pub(super) region: Option<Uuid>,
    pub(super) queue_jobs: usize,
    pub(super) queue_bytes: usize,
    /// That of the reads whose data it was asked for.
    pub(super) reading: usize,
    pub(super) last_heard: Time,
    ping: Ping,
    backoff: Duration,
    /// Since when it is Active, to tell a link that held from one that flaps.
    pub(super) active_since: Option<Time>,
    /// Why it isn't Active.
    pub(super) reason: Option<String>,
    pub(super) sessions: u64,
    pub(super) reconnects: u64,
    pub(super) healed_blocks: u64,
    /// Reads that it was not sent as it owed too much, and when an operator was told.
    pub(super) reads_left_out: u64,
    pub(super) told_left_out: Option<Time>,
    /// What it says of faults put in on purpose.
    pub(super) faults: Option<String>,
    /// What its last way to Active took, for the status.
    pub(super) last_catch_up: Option<Progress>,
    pub(super) times: ReplyTimes,
    /// What it did for guests since the start.
    pub(super) work: WorkStatus,
    /// What it said of itself last, and when.
    pub(super) health: Option<(Time, Health)>,
    /// How long the last ping took.
    pub(super) ping_us: Option<u64>,
}

#[derive(Debug, Default)]
struct Ping {
    nonce: u64,
    waiting: bool,
    sent: Time,
}

/// How long after becoming Active a link counts as sound again, so that its back-off starts anew.
const SOUND_AFTER: Duration = Duration::from_secs(30);

impl Replica {
    pub(super) fn new(id: ReplicaId, now: Time) -> Self {
        Self {
            id,
            link_id: LinkId(0),
            link: Link::Down { retry_at: now },
            welcome: None,
            region: None,
            queue_jobs: 0,
            queue_bytes: 0,
            reading: 0,
            last_heard: now,
            ping: Ping::default(),
            backoff: Duration::ZERO,
            active_since: None,
            reason: None,
            sessions: 0,
            reconnects: 0,
            healed_blocks: 0,
            reads_left_out: 0,
            told_left_out: None,
            faults: None,
            last_catch_up: None,
            times: ReplyTimes::default(),
            work: WorkStatus::default(),
            health: None,
            ping_us: None,
        }
    }

    pub(super) fn is_active(&self) -> bool {
        matches!(self.link, Link::Up(Role::Active))
    }

    /// Gets jobs: Active or catching up.
    pub(super) fn takes_jobs(&self) -> bool {
        matches!(self.link, Link::Up(Role::Active | Role::CatchingUp(_)))
    }

    pub(super) fn is_down(&self) -> bool {
        matches!(self.link, Link::Down { .. })
    }

    pub(super) fn catch_up_ref(&self) -> Option<&CatchUp> {
        let Link::Up(Role::CatchingUp(catch_up)) = &self.link else { return None };
        Some(catch_up)
    }

    pub(super) fn catch_up(&mut self) -> Option<&mut CatchUp> {
        let Link::Up(Role::CatchingUp(catch_up)) = &mut self.link else { return None };
        Some(catch_up)
    }

    pub(super) fn state_name(&self) -> &'static str {
        match &self.link {
            Link::Up(Role::Active) => "active",
            Link::Up(Role::CatchingUp(_)) => "catching_up",
            Link::Down { .. } if self.reason.is_some() => "left",
            Link::Down { .. }
            | Link::Connecting { .. }
            | Link::Greeting { .. }
            | Link::Greeted
            | Link::Promoting { .. }
            | Link::Up(Role::Activating) => "connecting",
        }
    }

    pub(super) fn owes(&mut self, cost: usize) {
        self.queue_jobs += 1;
        self.queue_bytes += cost;
    }

    pub(super) fn paid(&mut self, cost: usize) {
        self.queue_jobs = self.queue_jobs.saturating_sub(1);
        self.queue_bytes = self.queue_bytes.saturating_sub(cost);
    }

    /// The link is gone: everything of it is forgotten and the next attempt is due after the back-off.
    pub(super) fn go_down(&mut self, now: Time, reason: String, timing: &Timing, minimum: Duration) {
        let was_sound = self.active_since.is_some_and(|since| now.since(since) >= SOUND_AFTER);
        if was_sound {
            self.backoff = Duration::ZERO;
        }
        // The first attempt after a break comes soon: most breaks are restarts.
        self.backoff = if self.backoff.is_zero() {
            timing.backoff_first
        } else {
            (self.backoff * 2).min(timing.backoff_max)
        };
        self.link = Link::Down { retry_at: now.after(self.backoff.max(minimum)) };
        self.welcome = None;
        self.faults = None;
        self.queue_jobs = 0;
        self.queue_bytes = 0;
        self.reading = 0;
        self.active_since = None;
        self.reason = Some(reason);
        self.times.clear();
        (self.health, self.ping_us) = (None, None);
    }

    pub(super) fn become_active(&mut self, now: Time) {
        self.link = Link::Up(Role::Active);
        self.active_since = Some(now);
        self.reason = None;
        self.times.clear();
    }

    /// A nonce if a ping is due.
    pub(super) fn ping_due(&mut self, now: Time, every: Duration) -> Option<u64> {
        let pinged = matches!(self.link, Link::Up(_) | Link::Greeted);
        if self.ping.waiting || now.since(self.ping.sent) < every || !pinged {
            return None;
        }
        self.ping = Ping { nonce: self.ping.nonce + 1, waiting: true, sent: now };
        Some(self.ping.nonce)
    }

    pub(super) fn pong(&mut self, now: Time, nonce: u64, health: Health) {
        if nonce == self.ping.nonce && self.ping.waiting {
            self.ping.waiting = false;
            self.ping_us = Some(u64::try_from(now.since(self.ping.sent).as_micros()).unwrap_or(u64::MAX));
        }
        self.health = Some((now, health));
    }

    pub(super) fn start_pings(&mut self, now: Time) {
        self.ping = Ping { nonce: self.ping.nonce, waiting: false, sent: now };
        self.last_heard = now;
    }

    /// How long it has been silent although a ping is out.
    pub(super) fn silent_for(&self, now: Time) -> Duration {
        if self.ping.waiting { now.since(self.last_heard.max(self.ping.sent)) } else { Duration::ZERO }
    }

    /// When something about this link's time is due next.
    pub(super) fn deadline(&self, timing: &Timing) -> Option<Time> {
        match &self.link {
            Link::Down { retry_at } => Some(*retry_at),
            Link::Connecting { since } | Link::Greeting { since } => Some(since.after(timing.handshake)),
            Link::Promoting { since } => Some(since.after(timing.promote)),
            Link::Greeted | Link::Up(_) if self.ping.waiting => {
                Some(self.last_heard.max(self.ping.sent).after(timing.silence))
            }
            Link::Greeted | Link::Up(_) => Some(self.ping.sent.after(timing.ping_every)),
        }
    }
}

/// Reply times of one replica over guest jobs, smoothed for whoever looks on.
#[derive(Debug, Default)]
pub(super) struct ReplyTimes {
    pub(super) last_us: Option<u64>,
    mean: Smoothed,
    lead: Smoothed,
}

/// A mean over the last tenth of a second, at least over a few samples, and at most over a few dozen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Smoothed {
    value: Option<f64>,
    at: Time,
}

impl Smoothed {
    const OVER: Duration = Duration::from_millis(100);
    const WEIGHT_MIN: f64 = 1.0 / 64.0;
    const WEIGHT_MAX: f64 = 1.0 / 4.0;

    pub(super) fn record(&mut self, now: Time, sample: Duration) {
        let sample = sample.as_secs_f64();
        let since = now.since(self.at).as_secs_f64();
        let weight = (since / (since + Self::OVER.as_secs_f64())).clamp(Self::WEIGHT_MIN, Self::WEIGHT_MAX);
        self.value = Some(self.value.map_or(sample, |old| old + (sample - old) * weight));
        self.at = now;
    }

    pub(super) fn get(&self) -> Option<Duration> {
        self.value.map(Duration::from_secs_f64)
    }
}

impl ReplyTimes {
    pub(super) fn record(&mut self, now: Time, took: Duration) {
        self.last_us = Some(to_us(took));
        self.mean.record(now, took);
    }

    /// How much earlier than the slowest this replica answered a job that all Active ones answered.
    pub(super) fn record_lead(&mut self, now: Time, lead: Duration) {
        self.lead.record(now, lead);
    }

    pub(super) fn mean_us(&self) -> Option<u64> {
        self.mean.get().map(to_us)
    }

    pub(super) fn lead_us(&self) -> Option<u64> {
        self.lead.get().map(to_us)
    }

    fn clear(&mut self) {
        *self = Self::default();
    }

    /// A replica joined or left: leads over the old set say nothing about the new one.
    pub(super) fn clear_lead(&mut self) {
        self.lead = Smoothed::default();
    }
}

pub(super) fn to_us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_off_grows_and_starts_anew_after_a_sound_link() {
        let timing = Timing::default();
        let mut replica = Replica::new(ReplicaId(0), Time(0));
        let mut now = Time(0);
        let mut delays = Vec::new();
        for _ in 0..8 {
            replica.go_down(now, "test".into(), &timing, Duration::ZERO);
            let Link::Down { retry_at } = replica.link else { unreachable!() };
            delays.push(retry_at.since(now).as_millis());
            now = retry_at;
        }
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        replica.become_active(now);
        now = now.after(SOUND_AFTER);
        replica.go_down(now, "test".into(), &timing, Duration::ZERO);
        assert!(
            matches!(replica.link, Link::Down { retry_at } if retry_at.since(now) == timing.backoff_first)
        );
    }

    #[test]
    fn silence_counts_only_while_a_ping_is_out() {
        let second = Duration::from_secs(1);
        let mut replica = Replica::new(ReplicaId(0), Time(0));
        replica.become_active(Time(0));
        replica.start_pings(Time(0));
        assert_eq!(replica.ping_due(Time(0).after(second / 2), second), None);
        let sent = Time(0).after(second);
        let nonce = replica.ping_due(sent, second).unwrap();
        assert_eq!(replica.silent_for(sent.after(3 * second)), 3 * second);
        replica.pong(sent.after(second / 2), nonce, Health::default());
        assert_eq!(replica.ping_us, Some(500_000));
        assert_eq!(replica.silent_for(sent.after(9 * second)), Duration::ZERO);
    }
}
