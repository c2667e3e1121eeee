//! What an upstairs and a replica can say to each other.
//!
//! Order on one connection: `Hello` → `Welcome` → `Promote` → `Promoted`, then jobs and queries; `Activated` and `Ping` at
//! any time after `Promoted`. A replica that can't go on says `Refused` or `Leaving` and closes the connection.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use uuid::Uuid;

use crate::lag::Health;
use crate::types::{BlockRange, BlockState, ExtentId, Generation, JobId, Version};

/// The only version of the wire that is spoken. (In version 1 a `Pong` had no `health`.)
pub const VERSION: u16 = 2;

/// From an upstairs to a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    Hello(Hello),
    /// Take this session in force; everything of an older one is finished or dropped first, and the generation is
    /// durable before `Promoted` is sent.
    Promote {
        generation: Generation,
    },
    /// The replica holds everything acknowledged: store this as its last active generation, durably.
    Activated {
        generation: Generation,
        membership: Membership,
    },
    Job {
        job: JobId,
        op: Op,
    },
    /// The job's answer is no longer needed: if it is a read and still queued it may be dropped. It is answered in any case
    /// (with `JobError::Cancelled` if it was dropped).
    Cancel {
        job: JobId,
    },
    /// Answered at once, whatever the disk does.
    Ping {
        nonce: u64,
    },
    /// Digests of `count` extents from `first`; at most `MAX_DIGESTS`. `query` comes back in the answer.
    Digests {
        query: u64,
        first: ExtentId,
        count: u32,
    },
    /// The states of every block of an extent. `query` comes back in the answer.
    Contexts {
        query: u64,
        extent: ExtentId,
    },
}

impl Request {
    /// The most digests that one request may ask for.
    pub const MAX_DIGESTS: u32 = 4096;
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub min_version: u16,
    pub max_version: u16,
    /// The volume this upstairs serves. A region that belongs to another refuses; one that belongs to none is claimed.
    pub volume: Uuid,
    /// This upstairs process, anew at each start.
    pub upstairs: Uuid,
    /// Counts the connections of this upstairs to this replica.
    pub session: u64,
    /// Push out another upstairs whose session is alive.
    pub takeover: bool,
}

/// The regions that belong to a volume, by slot. Epoch 0 means: never set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    pub epoch: u32,
    pub regions: [Uuid; 3],
    /// Changes may have been acknowledged that one replica alone has executed: an activation needs all three.
    pub alone: bool,
}

/// What a replica is asked to do in its job order. All data are whole blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    Read {
        range: BlockRange,
        mode: ReadMode,
    },
    /// Payload: the data of the range. The version is (generation in force, job). One checksum a block. A block that is
    /// newer, verified or by its bound, keeps what it has.
    Write {
        range: BlockRange,
        crcs: Vec<u32>,
    },
    /// Like a write, without payload.
    Zero {
        range: BlockRange,
        mode: ZeroMode,
    },
    /// Make durable every write before it; the number of the job becomes the region's flushed mark.
    Flush,
    /// Copies of blocks under their own versions (catch-up, reconcile, heal), within one extent and in ascending order. A
    /// block is dropped if the replica's own is verified and at or above both `join` and the version that comes. Payload: the data of the blocks whose
    /// kind is `Data`, in order.
    Store {
        blocks: Vec<StoredBlock>,
        join: Version,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReadMode {
    /// States, and the data of every block whose kind is `Data`.
    Data,
    /// States only.
    Contexts,
    /// States, and the data of every block whose kind is `Data` or `Unverified`: only for reconciling.
    Raw,
    /// States only, but the replica reads the data and checks it: a block whose data do not match its context, as it lies on
    /// the disk, is `Unreadable`.
    Verify,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ZeroMode {
    /// Contexts say zeros; no data is written, allocated space stays.
    Contexts,
    /// Zeros are written as data, so that the space is allocated.
    Allocate,
    /// Contexts say zeros and the space is given back.
    Punch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredBlock {
    pub block: u64,
    /// `kind` is `Data`, `Zero`, or `Unreadable`: no replica has the data of this version any more, so whatever the replica
    /// has is older and must not be served. Then only the context is stored, and the checksum never matches.
    pub state: BlockState,
}

/// From a replica to its upstairs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    Welcome(Welcome),
    /// This session isn't taken. The connection closes behind it.
    Refused(Refusal),
    Promoted {
        generation: Generation,
        last_active: Generation,
        digest: u64,
    },
    ActivatedStored {
        generation: Generation,
    },
    /// A job's end. For a read that succeeded `states` has an entry per block and the payload follows `Op::Read`.
    Done {
        job: JobId,
        result: Result<(), JobError>,
        times: StageTimes,
        states: Vec<BlockState>,
    },
    Pong {
        nonce: u64,
        /// What the replica measured of itself.
        health: Health,
    },
    /// The lowest bit of a digest says that its extent holds unverified blocks.
    Digests {
        query: u64,
        first: ExtentId,
        digests: Vec<u64>,
    },
    Contexts {
        query: u64,
        extent: ExtentId,
        states: Vec<BlockState>,
    },
    /// The replica gives up this session by itself. The connection closes behind it.
    Leaving {
        reason: String,
    },
    /// Faults that were put in on purpose, for tests: after `Promoted` if there are any, and whenever they change. Empty: none any
    /// more.
    Faults {
        faults: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    pub version: u16,
    pub region: Uuid,
    /// Nil if the region belongs to no volume yet.
    pub volume: Uuid,
    pub blocks: u64,
    /// The highest generation promised so far.
    pub promised: Generation,
    pub last_active: Generation,
    pub membership: Membership,
    /// The region wasn't closed cleanly and the host has booted since: unflushed writes may be gone.
    pub lost_power: bool,
}

/// Where a job spent its time at the replica, in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTimes {
    pub queued_us: u32,
    pub submit_us: u32,
    pub device_us: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum Refusal {
    #[error("it speaks wire version {theirs}, we speak {min} to {max}")]
    Version { theirs: u16, min: u16, max: u16 },
    #[error("region {region} belongs to volume {volume}")]
    OtherVolume { region: Uuid, volume: Uuid },
    #[error("generation {offered} is too low: generation {promised} is in force")]
    StaleGeneration { offered: Generation, promised: Generation },
    #[error("upstairs {by} serves this volume (generation {generation}); use --takeover to push it out")]
    InUse { by: Uuid, generation: Generation },
    #[error("upstairs {by} has taken this volume over with generation {generation}")]
    Fenced { by: Uuid, generation: Generation },
    #[error("the replica is out of service until it is restarted: {reason}")]
    Failed { reason: String },
    #[error("too many connections (limit {limit})")]
    TooManyConnections { limit: u32 },
    #[error("protocol violation: {what}")]
    Violation { what: String },
    #[error("the replica is shutting down")]
    ShuttingDown,
}

#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum JobError {
    #[error("disk error: {message}")]
    Disk { message: String },
    #[error("no space left on the replica's disk")]
    NoSpace,
    /// Data changed between the upstairs' checksum and the replica's.
    #[error("block {block} arrived with a wrong checksum")]
    Checksum { block: u64 },
    #[error("range {range} is outside the region of {blocks} blocks or crosses an extent")]
    OutOfRange { range: BlockRange, blocks: u64 },
    #[error("cancelled while still queued")]
    Cancelled,
}
