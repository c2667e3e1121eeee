//! The core's state as the status page, `newel status` and tests see it. Serialised as JSON, so the names are public.

use serde::{Deserialize, Serialize};

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
    pub replicas: Vec<ReplicaStatus>,
    /// How often the members of the volume were set: 1, and one more for each replacement.
    pub membership_epoch: u32,
    pub scrub: ScrubStatus,
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
    pub read_delay_us: u64,
    pub catch_up: Option<CatchUpStatus>,
    /// What the last one copied, once the replica was active again.
    pub last_catch_up: Option<CatchUpStatus>,
    pub reconnects: u64,
    pub healed_blocks: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CatchUpStatus {
    pub extents_total: u64,
    pub extents_done: u64,
    pub blocks_copied: u64,
    pub eta_s: Option<u64>,
}
