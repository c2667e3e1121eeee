//! What the core is told at start, validated by the shell.

use std::time::Duration;

use uuid::Uuid;

#[derive(Clone, Debug)]
pub struct CoreConfig {
    pub volume: Uuid,
    /// This process, anew at each start.
    pub upstairs: Uuid,
    /// Push out another upstairs.
    pub takeover: bool,
    /// Expected size in blocks; `None` takes it from the replicas, which must agree.
    pub blocks: Option<u64>,
    pub limits: Limits,
    pub timing: Timing,
    pub throttle: ThrottleConfig,
    pub reads: Reads,
    pub trace: TraceConfig,
    pub heal: bool,
    /// Active replicas that must have executed a change before it is acknowledged: 2, or 1. With 1 an activation needs all
    /// three, and so does the first one after it was 1.
    pub min_replicas: usize,
}

/// Who is asked for the data of a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadPolicy {
    /// All Active replicas: the first valid reply answers.
    #[default]
    Fanout,
    /// One, the others for their contexts only; another one once it is late or its copy is bad.
    Witness,
}

#[derive(Clone, Debug, Default)]
pub struct Reads {
    pub policy: ReadPolicy,
    /// Tell the others that a read was answered, so that they drop it if it is still queued there.
    pub cancel: bool,
}

/// See the module `throttle`.
#[derive(Clone, Debug)]
pub struct ThrottleConfig {
    pub enabled: bool,
    /// Reads to the fastest replica are delayed once it answers so much earlier than the slowest.
    pub lead: Duration,
    /// No read is kept back for longer.
    pub max_delay: Duration,
}

impl Default for ThrottleConfig {
    fn default() -> Self {
        Self { enabled: true, lead: Duration::from_millis(10), max_delay: Duration::from_secs(1) }
    }
}

/// See the module `trace`.
#[derive(Clone, Debug)]
pub struct TraceConfig {
    /// A job that takes longer is slow.
    pub threshold: Duration,
}

impl Default for TraceConfig {
    fn default() -> Self {
        Self { threshold: Duration::from_secs(1) }
    }
}

/// Bounds on what is in flight. The guest waits at the volume's, a replica leaves at its own.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Unacknowledged jobs of the volume.
    pub volume_jobs: usize,
    /// Their payload and expected reply bytes. A request larger than this is admitted alone.
    pub volume_bytes: usize,
    /// Jobs that one replica may owe while the quorum progresses.
    pub replica_jobs: usize,
    pub replica_bytes: usize,
    /// Requests that wait for admission; the shell must not take more from guests.
    pub waiting: usize,
    /// From half of the volume's bound on, requests are admitted ever more slowly: near the bound as if emptying it took this
    /// long.
    pub slowing: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            volume_jobs: 2048,
            volume_bytes: 64 << 20,
            replica_jobs: 16_384,
            replica_bytes: 128 << 20,
            waiting: 4096,
            slowing: Duration::from_secs(1),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Timing {
    pub backoff_first: Duration,
    pub backoff_max: Duration,
    /// For connecting, and for the answer to Hello.
    pub handshake: Duration,
    /// For the answer to Promote: the replica finishes what its disk still does for the session before.
    pub promote: Duration,
    pub ping_every: Duration,
    /// No byte from a replica for this long, although a ping is out, while the quorum progresses.
    pub silence: Duration,
    /// The oldest job a replica owes may be this old while the quorum progresses.
    pub job_age: Duration,
    /// How long activation waits for the third once it has a quorum.
    pub third_wait: Duration,
    /// How long activation waits for a replica that did not lose power.
    pub power_wait: Duration,
    /// I/O fails after waiting this long for a quorum; `None` waits for ever.
    pub quorum_timeout: Option<Duration>,
    /// From the start of the process, and from the start of one pass over all blocks to that of the next; `None` leaves it to
    /// the operator.
    pub scrub_every: Option<Duration>,
}

/// A week: rot is found long before a second copy is likely to be lost, and one pass costs a fraction of that time.
const SCRUB_EVERY: Duration = Duration::from_secs(7 * 24 * 3600);

impl Default for Timing {
    fn default() -> Self {
        Self {
            backoff_first: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            handshake: Duration::from_secs(5),
            promote: Duration::from_secs(30),
            ping_every: Duration::from_secs(1),
            silence: Duration::from_secs(5),
            job_age: Duration::from_secs(10),
            third_wait: Duration::from_millis(500),
            power_wait: Duration::from_secs(30),
            quorum_timeout: None,
            scrub_every: Some(SCRUB_EVERY),
        }
    }
}
