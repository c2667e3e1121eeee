//! What a run measured: the guest's side by fio, and the volume's side by the upstairs' status. The report carries it as JSON,
//! so the names are public. Times are in ms from the begin of the run.

use newel_upstairs::core::status::Status;
use serde::{Deserialize, Serialize};

use super::sample::Samples;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Run {
    /// The job file.
    pub(super) jobs_of: String,
    pub(super) target: String,
    pub(super) volume: Option<Facts>,
    pub(super) newel_version: String,
    pub(super) fio_version: String,
    pub(super) host: String,
    pub(super) begun_unix_ms: u64,
    pub(super) interrupted: bool,
    pub(super) jobs: Vec<Job>,
    /// The guest's side over time.
    pub(super) windows: Vec<Window>,
    /// The volume's side over time.
    pub(super) samples: Vec<Sample>,
    /// How often the status did not answer.
    pub(super) samples_missed: u64,
    pub(super) happenings: Vec<Happening>,
}

/// The volume when the run began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Facts {
    pub(super) name: String,
    pub(super) id: String,
    pub(super) size_bytes: u64,
    pub(super) generation: u32,
    pub(super) read_policy: String,
    pub(super) cancel_reads: bool,
    pub(super) throttle: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Direction {
    Read,
    Write,
    Trim,
}

impl Direction {
    pub(super) const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Trim];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Trim => "trim",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) from_ms: u64,
    pub(super) to_ms: u64,
    pub(super) figures: Vec<Figures>,
    /// Why it ended before its time.
    pub(super) error: Option<String>,
}

/// A job in one direction. Latencies are from handing a request to the engine to its end; `None` if fio tells nothing of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Figures {
    pub(super) direction: Direction,
    pub(super) ios: u64,
    pub(super) iops: f64,
    pub(super) bytes_per_s: f64,
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    pub(super) p999_us: Option<f64>,
    pub(super) max_us: Option<f64>,
}

/// What ended between `at_ms` and `at_ms + span_ms`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Window {
    pub(super) at_ms: u64,
    pub(super) span_ms: u64,
    pub(super) direction: Direction,
    pub(super) bytes_per_s: f64,
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    pub(super) max_us: Option<f64>,
}

/// The volume at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Sample {
    pub(super) at_ms: u64,
    pub(super) jobs_in_flight: u64,
    pub(super) bytes_in_flight: u64,
    pub(super) throttled: bool,
    pub(super) replicas: Vec<ReplicaSample>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ReplicaSample {
    pub(super) active: bool,
    pub(super) queue_jobs: u64,
    pub(super) queue_bytes: u64,
    pub(super) lead_us: u64,
    pub(super) delay_us: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Happening {
    pub(super) at_ms: u64,
    pub(super) what: String,
}

impl Facts {
    pub(super) fn of(status: &Status) -> Self {
        Self {
            name: status.name.clone(),
            id: status.volume.clone(),
            size_bytes: status.size_bytes,
            generation: status.generation,
            read_policy: status.reads.policy.clone(),
            cancel_reads: status.reads.cancel,
            throttle: status.reads.throttle_enabled,
        }
    }
}

impl Sample {
    pub(super) fn of(at_ms: u64, status: &Status) -> Self {
        let replicas = status.replicas.iter().map(|replica| ReplicaSample {
            active: replica.state == "active",
            queue_jobs: replica.queue_jobs as u64,
            queue_bytes: replica.queue_bytes as u64,
            lead_us: replica.read_lead_us.or(replica.lead_us).unwrap_or_default(),
            delay_us: replica.read_delay_us,
        });
        Self {
            at_ms,
            jobs_in_flight: status.jobs_in_flight as u64,
            bytes_in_flight: status.bytes_in_flight as u64,
            throttled: status.reads.throttled,
            replicas: replicas.collect(),
        }
    }

    /// The worse of both, at the time of this one.
    pub(super) fn worsen(&mut self, other: &Self) {
        self.jobs_in_flight = self.jobs_in_flight.max(other.jobs_in_flight);
        self.bytes_in_flight = self.bytes_in_flight.max(other.bytes_in_flight);
        self.throttled |= other.throttled;
        for (replica, other) in self.replicas.iter_mut().zip(&other.replicas) {
            replica.active &= other.active;
            replica.queue_jobs = replica.queue_jobs.max(other.queue_jobs);
            replica.queue_bytes = replica.queue_bytes.max(other.queue_bytes);
            replica.lead_us = replica.lead_us.max(other.lead_us);
            replica.delay_us = replica.delay_us.max(other.delay_us);
        }
    }
}

impl Run {
    pub(super) fn new(jobs_of: &str, target: &str, volume: Option<Facts>, begun_unix_ms: u64) -> Self {
        Self {
            jobs_of: jobs_of.to_owned(),
            target: target.to_owned(),
            volume,
            newel_version: env!("CARGO_PKG_VERSION").to_owned(),
            host: host(),
            begun_unix_ms,
            ..Self::default()
        }
    }

    pub(super) fn take_samples(&mut self, samples: Samples) {
        self.samples = samples.samples;
        self.samples_missed = samples.missed;
        self.happenings = samples.happenings;
    }

    pub(super) fn replicas(&self) -> usize {
        self.samples.iter().map(|sample| sample.replicas.len()).max().unwrap_or_default()
    }

    /// The samples taken while this job ran.
    pub(super) fn samples_of(&self, job: &Job) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(|sample| (job.from_ms..=job.to_ms).contains(&sample.at_ms))
    }

    pub(super) fn end_ms(&self) -> u64 {
        let jobs = self.jobs.iter().map(|job| job.to_ms);
        let windows = self.windows.iter().map(|window| window.at_ms + window.span_ms);
        let samples = self.samples.iter().map(|sample| sample.at_ms);
        jobs.chain(windows).chain(samples).max().unwrap_or_default()
    }
}

/// The machine that the figures depend on.
fn host() -> String {
    let uname = rustix::system::uname();
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (system, release) = (uname.sysname().to_string_lossy(), uname.release().to_string_lossy());
    format!("{system} {release}, {cpus} CPUs")
}
