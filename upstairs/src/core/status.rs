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
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplicaStatus {
    pub id: u8,
    pub address: String,
    pub region: String,
    /// `active`, `catching_up`, `connecting`, `left`.
    pub state: String,
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
