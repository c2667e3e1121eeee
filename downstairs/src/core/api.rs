//! The core's contract with its shell: events in, actions out, and the disk operations between them.
//!
//! The shell moves these and decides nothing. All of them are closed enums.

use bytes::Bytes;
use newel_protocol::wire::{Membership, ReadMode, Reply, Request, StageTimes, StoredBlock, ZeroMode};
use newel_protocol::{BlockRange, BlockState, ExtentId, Generation, JobId, Version};
use thiserror::Error;
use uuid::Uuid;

use super::fault::Faults;

/// Time since an arbitrary start, in nanoseconds. The shell reads a clock once per batch of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    pub fn micros_since(self, earlier: Self) -> u32 {
        u32::try_from(self.0.saturating_sub(earlier.0) / 1_000).unwrap_or(u32::MAX)
    }

    pub fn after(self, delay: std::time::Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// One accepted connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// One disk operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

#[derive(Debug)]
pub enum Event {
    Connected {
        conn: ConnId,
    },
    Message {
        conn: ConnId,
        request: Request,
        payload: Bytes,
    },
    Closed {
        conn: ConnId,
    },
    DiskDone(DiskDone),
    /// An operator wants these faults from now on.
    Faults(Faults),
    /// Stop accepting, finish what runs, sync, and then report [`Action::Stopped`].
    Shutdown,
    /// A deadline from `poll_deadline` has passed.
    Tick,
}

#[derive(Debug)]
pub enum Action {
    Send {
        conn: ConnId,
        reply: Reply,
        payload: Bytes,
    },
    /// Send a `Pong` with what the shell has measured of this process.
    Pong {
        conn: ConnId,
        nonce: u64,
    },
    /// Close once everything sent so far is written.
    Close {
        conn: ConnId,
        reason: String,
    },
    Disk(DiskCommand),
    /// Something an operator should read.
    Log(LogEvent),
    Stopped,
}

#[derive(Debug)]
pub struct DiskCommand {
    pub op: OpId,
    /// The upstairs' job that it is for; of several, the last. For those that follow what happens to it.
    pub job: Option<JobId>,
    pub kind: DiskOp,
}

#[derive(Debug)]
pub struct DiskDone {
    pub op: OpId,
    pub result: Result<DiskOutcome, DiskError>,
    pub times: StageTimes,
}

/// What the disk is asked to do. The core guarantees that no two operations in flight conflict (writes to one block, or
/// a read beside a write of one block), and that the extent of every change is durably in the activity log beforehand.
#[derive(Debug)]
pub enum DiskOp {
    Read {
        range: BlockRange,
        mode: ReadMode,
    },
    /// Data, then contexts. A block that is newer than `version`, verified or by its bound, keeps what it has.
    Write {
        range: BlockRange,
        version: Version,
        crcs: Vec<u32>,
        data: Bytes,
    },
    Zero {
        range: BlockRange,
        version: Version,
        mode: ZeroMode,
    },
    /// See `Op::Store`.
    Store {
        blocks: Vec<StoredBlock>,
        join: Version,
        data: Bytes,
    },
    /// One fdatasync over data and contexts; then, if `mark` is given and above the one in force, the header with it,
    /// durably.
    Flush {
        mark: Option<Version>,
    },
    /// Put these activity-log entries in force, durably.
    ActivityLog {
        entries: Vec<LogEntry>,
    },
    /// Change the header in both copies, durably.
    Header(HeaderChange),
    Digests {
        first: ExtentId,
        count: u32,
    },
    Contexts {
        extent: ExtentId,
    },
    /// Flush, empty the activity log, and mark the region as closed cleanly.
    Close,
}

/// What one slot of the activity log holds from now on. `None` empties it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    pub slot: u32,
    pub extent: Option<ExtentId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderChange {
    /// This generation is promised to this upstairs process.
    Promise {
        generation: Generation,
        upstairs: Uuid,
    },
    Activated {
        generation: Generation,
        membership: Membership,
    },
    /// The region belongs to this volume from now on.
    Claim {
        volume: Uuid,
    },
}

#[derive(Debug)]
pub enum DiskOutcome {
    Done,
    Read { states: Vec<BlockState>, data: Bytes },
    Digests(Vec<u64>),
    Contexts(Vec<BlockState>),
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DiskError {
    #[error("{operation} failed: {message}")]
    Io { operation: &'static str, message: String },
    #[error("no space left on device while {operation}")]
    NoSpace { operation: &'static str },
}

/// What the core knows of the region when it starts, read from its header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionFacts {
    pub region: Uuid,
    pub volume: Uuid,
    pub blocks: u64,
    pub promised: Generation,
    pub promised_to: Uuid,
    pub last_active: Generation,
    pub membership: Membership,
    pub lost_power: bool,
    /// Slots of the activity log, and what they hold after the region was opened (its extents verified already).
    pub log_slots: u32,
    /// How many slots share one 4 KiB record: entries of one group cost one write.
    pub log_slots_per_record: u32,
    pub log_entries: Vec<LogEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogEvent {
    SessionStarted {
        conn: ConnId,
        upstairs: Uuid,
        generation: Generation,
    },
    SessionEnded {
        conn: ConnId,
        reason: String,
    },
    Refused {
        conn: ConnId,
        reason: String,
    },
    Failed {
        reason: String,
    },
    /// Faults were put in on purpose, or taken out ("off"), or still are there.
    Faults {
        faults: String,
    },
}
