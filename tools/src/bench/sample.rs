//! Looks at the upstairs' status ten times a second while the jobs run.
//!
//! Invariants:
//! - Bounded: a run of many hours is kept in fewer, wider samples that hold the worst of what they stand for.
//! - A status that doesn't answer leaves a gap and is counted; it ends nothing.

#![expect(clippy::disallowed_methods, reason = "it measures over real time")]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use newel_upstairs::core::status::{ReplicaStatus, Status};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};

use super::model::{Happening, Sample};
use crate::address::Address;
use crate::http;

const EVERY: Duration = Duration::from_millis(100);
/// Two hours of samples; then every two of them become one.
const SAMPLES_MAX: usize = 72_000;
/// Beyond this the volume does nothing but change.
const HAPPENINGS_MAX: usize = 200;

#[derive(Debug, Default)]
pub(super) struct Samples {
    pub(super) samples: Vec<Sample>,
    pub(super) missed: u64,
    pub(super) happenings: Vec<Happening>,
    /// How many looks one sample stands for, and how many the next one holds already.
    stride: u32,
    held: u32,
    last: Option<Status>,
}

#[derive(Debug)]
pub(super) struct Sampler {
    task: JoinHandle<Samples>,
    stop: oneshot::Sender<()>,
}

impl Sampler {
    pub(super) fn start(address: Address, begun_unix_ms: u64) -> Self {
        let (stop, mut stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let mut samples = Samples::default();
            let mut ticks = interval(EVERY);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
            loop {
                tokio::select! {
                    biased;
                    _ = &mut stopped => return samples,
                    _ = ticks.tick() => {}
                }
                let asked = tokio::select! {
                    biased;
                    _ = &mut stopped => return samples,
                    asked = ask(&address) => asked,
                };
                let at_ms = unix_ms().saturating_sub(begun_unix_ms);
                samples.take(at_ms, asked.ok());
            }
        });
        Self { task, stop }
    }

    pub(super) async fn finish(self) -> Samples {
        // It has ended by itself only if it panicked.
        self.stop.send(()).ok();
        self.task.await.unwrap_or_default()
    }
}

impl Samples {
    fn take(&mut self, at_ms: u64, status: Option<Status>) {
        let Some(status) = status else {
            if self.missed == 0 || self.last.is_some() {
                self.tell(at_ms, "the status does not answer".to_owned());
            }
            self.missed += 1;
            self.last = None;
            return;
        };
        for what in changes(self.last.as_ref(), &status) {
            self.tell(at_ms, what);
        }
        let sample = Sample::of(at_ms, &status);
        self.last = Some(status);
        match self.samples.last_mut() {
            Some(last) if self.held < self.stride => {
                last.worsen(&sample);
                self.held += 1;
            }
            Some(_) | None => {
                self.samples.push(sample);
                self.held = 1;
            }
        }
        if self.samples.len() >= SAMPLES_MAX {
            self.thin();
        }
    }

    fn thin(&mut self) {
        self.samples = self.samples.chunks(2).filter_map(worst).collect();
        self.stride = self.stride.max(1) * 2;
        self.held = self.stride;
    }

    fn tell(&mut self, at_ms: u64, what: String) {
        if self.happenings.len() < HAPPENINGS_MAX {
            self.happenings.push(Happening { at_ms, what });
        } else if self.happenings.len() == HAPPENINGS_MAX {
            self.happenings.push(Happening { at_ms, what: "and more, not told of here".to_owned() });
        }
    }
}

fn worst(samples: &[Sample]) -> Option<Sample> {
    let (first, rest) = samples.split_first()?;
    let mut worst = first.clone();
    rest.iter().for_each(|other| worst.worsen(other));
    Some(worst)
}

/// What a person would want to be told of.
fn changes(old: Option<&Status>, new: &Status) -> Vec<String> {
    let mut told = Vec::new();
    let Some(old) = old else {
        // At the begin only what is not as it should be.
        for replica in new.replicas.iter().filter(|replica| replica.state != "active") {
            told.push(in_state(replica));
        }
        return told;
    };
    if old.state != new.state {
        told.push(format!("the volume is {}", new.state.replace('_', " ")));
    }
    for (old, new) in old.replicas.iter().zip(&new.replicas) {
        if old.state != new.state {
            let why = new.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
            told.push(format!("{}{why}", in_state(new)));
        }
        if old.faults != new.faults {
            let faults = new.faults.as_deref().unwrap_or("off");
            told.push(format!("replica {}: faults put in on purpose: {faults}", new.id));
        }
    }
    match (old.reads.throttled, new.reads.throttled) {
        (false, true) => {
            told.push(format!(
                "reads are throttled: {}",
                new.reads.cause.as_deref().unwrap_or("a replica is slow")
            ));
        }
        (true, false) => told.push("reads are throttled no more".to_owned()),
        (true, true) | (false, false) => {}
    }
    told
}

fn in_state(replica: &ReplicaStatus) -> String {
    match replica.state.as_str() {
        "left" => format!("replica {} has left", replica.id),
        state => format!("replica {} is {}", replica.id, state.replace('_', " ")),
    }
}

pub(super) async fn ask(address: &Address) -> Result<Status> {
    let body = http::get(address, "/status").await?;
    serde_json::from_slice(&body)
        .with_context(|| format!("the answer of {address} is not a status of this version of Newel"))
}

pub(super) fn now() -> SystemTime {
    SystemTime::now()
}

pub(super) fn unix_ms() -> u64 {
    let since = now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(queue_jobs: usize) -> Status {
        let replica =
            |id| ReplicaStatus { id, state: "active".into(), queue_jobs, ..ReplicaStatus::default() };
        Status { state: "serving".into(), replicas: (0..3).map(replica).collect(), ..Status::default() }
    }

    #[test]
    fn a_long_run_keeps_its_peaks_in_bounded_memory() {
        let mut samples = Samples::default();
        let peak = 70_000;
        for at in 0..(SAMPLES_MAX * 4) {
            let jobs = if at == peak || at == SAMPLES_MAX * 3 + 1 { 999 } else { 1 };
            samples.take(at as u64 * 100, Some(status(jobs)));
            assert!(samples.samples.len() <= SAMPLES_MAX);
        }
        let peaks: Vec<u64> = samples
            .samples
            .iter()
            .filter(|sample| sample.replicas[0].queue_jobs == 999)
            .map(|sample| sample.at_ms)
            .collect();
        assert_eq!(peaks.len(), 2, "{peaks:?}");
        assert!(peaks[0].abs_diff(peak as u64 * 100) <= 400, "{peaks:?}");
        assert!(samples.samples.windows(2).all(|pair| pair[0].at_ms < pair[1].at_ms));
    }

    #[test]
    fn changes_are_told_once() {
        let mut samples = Samples::default();
        samples.take(0, Some(status(0)));
        let mut left = status(0);
        left.replicas[2].state = "left".into();
        left.replicas[2].reason = Some("its connection broke".into());
        left.reads.throttled = true;
        samples.take(100, Some(left.clone()));
        samples.take(200, Some(left));
        samples.take(300, None);
        samples.take(400, None);
        samples.take(500, Some(status(0)));
        let told: Vec<(u64, &str)> =
            samples.happenings.iter().map(|told| (told.at_ms, told.what.as_str())).collect();
        let expected = [
            (100, "replica 2 has left: its connection broke"),
            (100, "reads are throttled: a replica is slow"),
            (300, "the status does not answer"),
        ];
        assert_eq!(told, expected);
        assert_eq!((samples.missed, samples.samples.len()), (2, 4));
    }
}
