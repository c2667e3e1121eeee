//! What is shown: the last look, what happened since the one before, and some history. No terminal and no clock here.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::Result;
use newel_upstairs::core::status::{ReplicaStatus, Status};
use newel_upstairs::core::work::WorkStatus;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::stages::{Means, Stages, means};

const HISTORY_MAX: usize = 240;
const EVERY: [u64; 6] = [100, 200, 500, 1000, 2000, 5000];

/// A status, and when it came.
#[derive(Clone, Debug, Default)]
pub(super) struct Look {
    pub(super) status: Status,
    pub(super) stages: Stages,
    pub(super) clock: String,
}

impl Look {
    pub(super) fn parse(body: &[u8], clock: String) -> Result<Self> {
        Ok(Self { status: serde_json::from_slice(body)?, stages: serde_json::from_slice(body)?, clock })
    }
}

/// What was done per second between two looks, and how long it took.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rate {
    pub(super) iops: f64,
    pub(super) read_bytes: f64,
    pub(super) write_bytes: f64,
    pub(super) p50_us: Option<u64>,
    pub(super) p99_us: Option<u64>,
    pub(super) max_us: Option<u64>,
}

impl Rate {
    fn of(before: &WorkStatus, now: &WorkStatus, seconds: f64) -> Self {
        let done = now.since(before);
        let rate = |count: u64| count as f64 / seconds;
        Self {
            iops: rate(done.count()),
            read_bytes: rate(done.read_bytes),
            write_bytes: rate(done.write_bytes),
            p50_us: done.latencies.quantile_us(500),
            p99_us: done.latencies.quantile_us(990),
            max_us: done.latencies.max_us(),
        }
    }

    pub(super) fn bytes(&self) -> f64 {
        self.read_bytes + self.write_bytes
    }
}

/// Between the last two looks.
#[derive(Clone, Debug, Default)]
pub(super) struct Rates {
    pub(super) guests: Rate,
    pub(super) replicas: Vec<Rate>,
    pub(super) guest_stages: Vec<Means>,
    pub(super) replica_stages: Vec<Vec<Means>>,
}

/// What the curves are made of.
#[derive(Clone, Debug)]
pub(super) struct Point {
    pub(super) at: Duration,
    pub(super) replicas: Vec<ReplicaPoint>,
}

#[derive(Clone, Debug)]
pub(super) struct ReplicaPoint {
    pub(super) p99_us: Option<u64>,
    pub(super) iops: f64,
    pub(super) bytes: f64,
    pub(super) queue_jobs: usize,
    pub(super) delay_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Curve {
    Latency,
    Queue,
    Bandwidth,
    Iops,
    Delay,
}

impl Curve {
    pub(super) const ALL: [Self; 5] = [Self::Latency, Self::Queue, Self::Bandwidth, Self::Iops, Self::Delay];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Latency => "p99 latency, ms",
            Self::Queue => "queue, jobs",
            Self::Bandwidth => "bandwidth, MiB/s",
            Self::Iops => "IOPS",
            Self::Delay => "delay put on reads, ms",
        }
    }

    pub(super) fn of(self, point: &ReplicaPoint) -> Option<f64> {
        match self {
            Self::Latency => point.p99_us.map(|us| us as f64 / 1e3),
            Self::Queue => Some(point.queue_jobs as f64),
            Self::Bandwidth => Some(point.bytes / 1_048_576.0),
            Self::Iops => Some(point.iops),
            Self::Delay => Some(point.delay_us as f64 / 1e3),
        }
    }
}

/// What follows from a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    On,
    /// Looks come in another rhythm.
    Faster,
    Quit,
}

#[derive(Debug)]
pub(super) struct App {
    pub(super) address: String,
    every: Duration,
    now: Duration,
    last: Option<(Duration, Look)>,
    pub(super) rates: Rates,
    pub(super) history: VecDeque<Point>,
    pub(super) selected: usize,
    pub(super) curve: Curve,
    pub(super) paused: bool,
    pub(super) help: bool,
    /// When something answered last, and why nothing does since.
    answered: Duration,
    lost: Option<String>,
}

impl App {
    pub(super) fn new(address: String, every: Duration) -> Self {
        Self {
            address,
            every,
            now: Duration::ZERO,
            last: None,
            rates: Rates::default(),
            history: VecDeque::new(),
            selected: 0,
            curve: Curve::Latency,
            paused: false,
            help: false,
            answered: Duration::ZERO,
            lost: None,
        }
    }

    pub(super) fn every(&self) -> Duration {
        self.every
    }

    pub(super) fn passed(&mut self, now: Duration) {
        self.now = now;
    }

    pub(super) fn look(&self) -> Option<&Look> {
        self.last.as_ref().map(|(_, look)| look)
    }

    pub(super) fn replicas(&self) -> &[ReplicaStatus] {
        self.look().map_or(&[], |look| &look.status.replicas)
    }

    /// For how long nothing has answered, and why.
    pub(super) fn lost(&self) -> Option<(Duration, &str)> {
        self.lost.as_ref().map(|why| (self.now.saturating_sub(self.answered), why.as_str()))
    }

    pub(super) fn seen(&mut self, at: Duration, look: Look) {
        self.lost = None;
        self.answered = at;
        if self.paused {
            return;
        }
        if let Some((before_at, before)) = &self.last {
            self.rates = rates(before, &look, at.saturating_sub(*before_at));
            self.remember(at, &look.status);
        }
        self.last = Some((at, look));
    }

    pub(super) fn unanswered(&mut self, why: String) {
        self.lost = Some(why);
    }

    fn remember(&mut self, at: Duration, status: &Status) {
        let point = |(replica, rate): (&ReplicaStatus, &Rate)| ReplicaPoint {
            p99_us: rate.p99_us,
            iops: rate.iops,
            bytes: rate.bytes(),
            queue_jobs: replica.queue_jobs,
            delay_us: replica.read_delay_us,
        };
        let replicas = status.replicas.iter().zip(&self.rates.replicas).map(point).collect();
        self.history.push_back(Point { at, replicas });
        if self.history.len() > HISTORY_MAX {
            self.history.pop_front();
        }
    }

    pub(super) fn key(&mut self, key: KeyEvent) -> Flow {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let code = key.code;
        if code == KeyCode::Char('q') || (control && code == KeyCode::Char('c')) {
            return Flow::Quit;
        }
        if code == KeyCode::Esc {
            if !self.help {
                return Flow::Quit;
            }
            self.help = false;
        } else if matches!(code, KeyCode::Char('?' | 'h')) {
            self.help = !self.help;
        } else if code == KeyCode::Char(' ') {
            self.paused = !self.paused;
        } else if matches!(code, KeyCode::Down | KeyCode::Char('j')) {
            self.select(1);
        } else if matches!(code, KeyCode::Up | KeyCode::Char('k')) {
            self.select(-1);
        } else if code == KeyCode::Char('g') {
            let at = Curve::ALL.iter().position(|curve| *curve == self.curve).unwrap_or_default();
            self.curve = Curve::ALL[(at + 1) % Curve::ALL.len()];
        } else if matches!(code, KeyCode::Char('+' | '-' | '=')) {
            return self.pace(code == KeyCode::Char('-'));
        }
        Flow::On
    }

    fn select(&mut self, by: isize) {
        let last = self.replicas().len().saturating_sub(1);
        self.selected = self.selected.saturating_add_signed(by).min(last);
    }

    fn pace(&mut self, slower: bool) -> Flow {
        let steps = EVERY.map(Duration::from_millis);
        let next = if slower {
            steps.into_iter().find(|step| *step > self.every)
        } else {
            steps.into_iter().rev().find(|step| *step < self.every)
        };
        let Some(next) = next else { return Flow::On };
        self.every = next;
        Flow::Faster
    }
}

fn rates(before: &Look, now: &Look, time: Duration) -> Rates {
    let seconds = time.as_secs_f64().max(1e-3);
    let replicas = before.status.replicas.iter().zip(&now.status.replicas);
    let stages = before.stages.replicas.iter().zip(&now.stages.replicas);
    Rates {
        guests: Rate::of(&before.status.work, &now.status.work, seconds),
        replicas: replicas.map(|(before, now)| Rate::of(&before.work, &now.work, seconds)).collect(),
        guest_stages: means(&before.stages.latency, &now.stages.latency),
        replica_stages: stages.map(|(before, now)| means(&before.latency, &now.latency)).collect(),
    }
}
