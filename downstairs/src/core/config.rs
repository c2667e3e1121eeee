//! What the core is told at start, and what it tells of itself.

use std::time::Duration;

use newel_protocol::Generation;
use uuid::Uuid;

/// Bounds and times of a replica. The defaults suit a machine with a few GiB of memory.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// A session from which nothing was heard for this long no longer keeps another upstairs out. Five of an upstairs'
    /// pings.
    pub session_silence: Duration,
    /// A connection that is not promoted is closed after this much silence.
    pub unpromoted_silence: Duration,
    /// Connections at a time. One more pushes out the oldest that has not been promoted.
    pub connections_max: usize,
    /// Unfinished jobs of the session; an upstairs that sends more breaks the protocol. Twice what it may owe.
    pub jobs_max: usize,
    /// Their payload and expected data, in bytes. Twice what an upstairs may have outstanding.
    pub bytes_max: usize,
    /// Reads at the disk at a time. More would only queue there, where they can't be cancelled.
    pub disk_reads_max: usize,
}

impl Default for CoreConfig {
    fn default() -> Self {
        Self {
            session_silence: Duration::from_secs(5),
            unpromoted_silence: Duration::from_secs(10),
            connections_max: 64,
            jobs_max: 32_768,
            bytes_max: 256 << 20,
            disk_reads_max: 128,
        }
    }
}

/// The core's state as logs and tests see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub state: State,
    pub connections: usize,
    pub session: Option<SessionStatus>,
    pub promised: Generation,
    pub last_active: Generation,
    pub jobs_waiting: usize,
    pub jobs_at_disk: usize,
    pub bytes: usize,
    pub flushes: usize,
    pub log_slots_in_use: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    pub upstairs: Uuid,
    pub generation: Generation,
    /// False while its promotion is under way.
    pub in_force: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    Serving,
    /// A disk failure took it out of service.
    Failed {
        reason: String,
    },
    Stopping,
    Stopped,
}
