//! The core's state as the status page, `newel status` and tests see it. Serialised as JSON, so the names are public.

use newel_protocol::lag::{Delays, Health, Stall};
use serde::{Deserialize, Serialize};

use super::work::WorkStatus;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub volume: String,
    pub name: String,
    pub size_bytes: u64,
    pub generation: u32,
    /// `activating`, `serving`, `quorum_lost`, `stopping`.
    pub state: String,
    pub jobs_in_flight: usize,
    pub bytes_in_flight: usize,
    pub guest_connections: usize,
    pub guest_requests: usize,
    /// Age of the oldest request that was admitted and isn't answered.
    pub oldest_request_us: u64,
    /// What guests asked for and got, from admission to the answer.
    #[serde(default)]
    pub work: WorkStatus,
    pub replicas: Vec<ReplicaStatus>,
    /// How often the members of the volume were set: 1, and one more for each replacement.
    pub membership_epoch: u32,
    pub scrub: ScrubStatus,
    /// How late the reactor of the upstairs itself was.
    pub reactor: DelayStatus,
    pub reads: ReadsStatus,
    /// What is known of slow jobs.
    #[serde(default)]
    pub trace: TraceStatus,
    /// How long guests' jobs took since the start, from the guest's socket to the answer; operations that there were none of are
    /// left out.
    #[serde(default)]
    pub latency: Vec<LatencyStatus>,
}

/// See the README.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStatus {
    /// False if tracing is compiled out.
    pub enabled: bool,
    pub threshold_us: u64,
    /// Jobs over the threshold since the start, those under way included.
    pub slow: u64,
    /// Records that were left out of the log, as there were too many.
    pub records_dropped: u64,
    /// Jobs that there was no room to trace.
    pub untraced: u64,
    pub quorums_lost: u64,
}

/// Jobs of one operation since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyStatus {
    /// `read`, `write`, `zero` (zeros and trims) or `flush`.
    pub operation: String,
    #[serde(flatten)]
    pub delays: Delays,
    /// Not known for one replica.
    pub bytes: Option<u64>,
    pub stages: Vec<StageStatus>,
}

/// The mean over some time is what `sum_us` grew by, divided by what `count` grew by.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageStatus {
    /// `admission`, `preparation`, `throttle`; at a replica `network`, `queue`, `submit`, `device`.
    pub stage: String,
    pub count: u64,
    pub sum_us: u64,
}

/// Delays since the start of a process, and the one that stood out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DelayStatus {
    #[serde(flatten)]
    pub delays: Delays,
    /// `None` if there was nothing to measure yet.
    pub longest: Option<StallStatus>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StallStatus {
    pub took_us: u32,
    /// How long ago it ended.
    pub ago_ms: u64,
    /// When that was by the clock of the upstairs' host.
    pub at_unix_ms: u64,
    /// What ran.
    pub during: String,
}

/// What a replica measured of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HealthStatus {
    /// How late its reactor was.
    pub reactor: DelayStatus,
    /// How long the kernel kept its disk threads in one submission.
    pub submits: DelayStatus,
}

impl DelayStatus {
    /// `age_ms`: how old the figures are.
    pub fn new(delays: Delays, longest: Stall, age_ms: u64) -> Self {
        let longest = (longest.took_us > 0).then(|| StallStatus {
            took_us: longest.took_us,
            ago_ms: longest.ago_ms.saturating_add(age_ms),
            at_unix_ms: 0,
            during: longest.during.to_string(),
        });
        Self { delays, longest }
    }

    fn date(&mut self, now_unix_ms: u64) {
        if let Some(longest) = &mut self.longest {
            longest.at_unix_ms = now_unix_ms.saturating_sub(longest.ago_ms);
        }
    }
}

impl Status {
    /// Says when everything was that is told by its age; the core has no clock.
    pub fn date(&mut self, now_unix_ms: u64) {
        self.reactor.date(now_unix_ms);
        for health in self.replicas.iter_mut().filter_map(|replica| replica.health.as_mut()) {
            health.reactor.date(now_unix_ms);
            health.submits.date(now_unix_ms);
        }
    }
}

impl HealthStatus {
    pub fn new(health: &Health, age_ms: u64) -> Self {
        Self {
            reactor: DelayStatus::new(health.lag, health.longest_stall, age_ms),
            submits: DelayStatus::new(health.submits, health.longest_submit, age_ms),
        }
    }
}

/// How reads are sent, see the README.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReadsStatus {
    /// `fanout` or `witness`.
    pub policy: String,
    pub cancel: bool,
    pub throttle_enabled: bool,
    /// True while reads to the fastest replicas are delayed.
    pub throttled: bool,
    /// Why, if they are.
    pub cause: Option<String>,
    /// How often that began.
    pub times_throttled: u64,
    /// Reads that were sent to no replica yet, and how long the oldest has waited.
    pub waiting: usize,
    pub waiting_us: u64,
}

/// The pass under way, or the last one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScrubStatus {
    pub running: bool,
    /// Passes begun since the start of the process.
    pub pass: u64,
    pub extents_done: u64,
    pub extents_total: u64,
    /// Copies that were unreadable, or not what the other replicas hold.
    pub blocks_bad: u64,
    /// Those of them that were replaced by a good copy.
    pub blocks_healed: u64,
    /// Blocks of which no active replica has a good copy: they read as errors until they are written.
    pub blocks_without_good_copy: u64,
    pub started_s_ago: Option<u64>,
    pub finished_s_ago: Option<u64>,
    /// Until the next one begins by itself.
    pub next_in_s: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplicaStatus {
    pub id: u8,
    pub address: String,
    pub region: String,
    /// `active`, `catching_up`, `connecting`, `left`.
    pub state: String,
    /// False if the region at this address is none of the volume's, for example because it was replaced; not known before it
    /// has introduced itself.
    pub member: Option<bool>,
    /// Why it isn't active, if it isn't.
    pub reason: Option<String>,
    pub queue_jobs: usize,
    pub queue_bytes: usize,
    pub last_reply_us: Option<u64>,
    pub mean_reply_us: Option<u64>,
    /// How much earlier than the slowest it answers, smoothed.
    pub lead_us: Option<u64>,
    /// How much later than the slowest it gets reads, and how long they have waited before.
    pub read_delay_us: u64,
    /// How much earlier than the slowest it answers reads, from when each was sent there: what the throttle goes by.
    pub read_lead_us: Option<u64>,
    /// Faults put in on purpose, while there are any.
    pub faults: Option<String>,
    pub catch_up: Option<CatchUpStatus>,
    /// What the last one copied, once the replica was active again.
    pub last_catch_up: Option<CatchUpStatus>,
    pub reconnects: u64,
    pub healed_blocks: u64,
    /// Guests' reads that it was not sent as it owed too much; others answered them.
    #[serde(default)]
    pub reads_left_out: u64,
    /// What it did for guests while it was active, from sending a job to its answer.
    #[serde(default)]
    pub work: WorkStatus,
    /// How long it took to answer the last ping.
    pub ping_us: Option<u64>,
    /// What it said of itself with the last ping.
    pub health: Option<HealthStatus>,
    /// How long guests' jobs took there since the start, from sending to the answer.
    #[serde(default)]
    pub latency: Vec<LatencyStatus>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CatchUpStatus {
    pub extents_total: u64,
    pub extents_done: u64,
    pub blocks_copied: u64,
    pub eta_s: Option<u64>,
}
