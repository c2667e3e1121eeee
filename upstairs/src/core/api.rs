//! The core's contract with its shell: events in, actions out.
//!
//! The shell moves these and decides nothing about order, quorum, retry or throttling. All of them are closed enums.

use std::time::Duration;

use bytes::Bytes;
use newel_protocol::wire::{Reply, Request, Welcome};

use super::timeline::Record;

/// Time since an arbitrary start, in nanoseconds. The shell reads a clock once per batch of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    pub fn after(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)))
    }

    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A slot of the volume: 0, 1 or 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId(pub u8);

impl ReplicaId {
    pub const COUNT: usize = 3;
    pub const ALL: [Self; Self::COUNT] = [Self(0), Self(1), Self(2)];

    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl std::fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A set of replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaSet(u8);

impl ReplicaSet {
    pub const EMPTY: Self = Self(0);

    pub fn only(replica: ReplicaId) -> Self {
        Self(1 << replica.0)
    }

    pub fn insert(&mut self, replica: ReplicaId) {
        self.0 |= 1 << replica.0;
    }

    pub fn remove(&mut self, replica: ReplicaId) {
        self.0 &= !(1 << replica.0);
    }

    pub fn contains(self, replica: ReplicaId) -> bool {
        self.0 & (1 << replica.0) != 0
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub fn iter(self) -> impl Iterator<Item = ReplicaId> {
        ReplicaId::ALL.into_iter().filter(move |&replica| self.contains(replica))
    }
}

impl FromIterator<ReplicaId> for ReplicaSet {
    fn from_iter<I: IntoIterator<Item = ReplicaId>>(replicas: I) -> Self {
        let mut set = Self::EMPTY;
        replicas.into_iter().for_each(|replica| set.insert(replica));
        set
    }
}

/// One connection attempt to a replica; anything that arrives under an older one is ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// One guest request, named by the shell. A name may be used again once its reply was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestId(pub u64);

#[derive(Debug)]
pub enum Event {
    /// A request that has passed NBD's own checks: inside the volume, not empty, known flags.
    Guest {
        guest: GuestId,
        op: GuestOp,
        /// When it was read off the guest's socket.
        received: Time,
    },
    /// The TCP connection of this link is up.
    LinkUp {
        replica: ReplicaId,
        link: LinkId,
    },
    /// The link is gone, or never came up.
    LinkDown {
        replica: ReplicaId,
        link: LinkId,
        reason: String,
    },
    Reply {
        replica: ReplicaId,
        link: LinkId,
        reply: Reply,
        payload: Bytes,
    },
    /// An operator gives this slot to another region, which introduced itself with `welcome` when the shell looked at it. It
    /// is answered by [`Action::Replace`] at once.
    Replace {
        replica: ReplicaId,
        welcome: Welcome,
    },
    /// An operator wants every block verified. Nothing happens if a pass is under way.
    Scrub,
    /// Refuse new requests, finish what was admitted (at most until `within`), flush, then [`Action::Stopped`].
    Shutdown {
        within: Duration,
    },
    /// A deadline from `poll_deadline` has passed.
    Tick,
}

#[derive(Debug)]
pub enum GuestOp {
    Read {
        offset: u64,
        length: u32,
    },
    Write {
        offset: u64,
        data: Bytes,
        fua: bool,
    },
    /// `allocate`: NBD's NO_HOLE.
    Zero {
        offset: u64,
        length: u64,
        allocate: bool,
        fua: bool,
    },
    Trim {
        offset: u64,
        length: u64,
        fua: bool,
    },
    Flush,
    /// The allocation of as much of the range as the core likes to tell at once, at least its first block.
    BlockStatus {
        offset: u64,
        length: u64,
    },
}

#[derive(Debug)]
pub enum Action {
    /// Open a TCP connection to this replica and answer with `LinkUp` or `LinkDown`. An older link is gone already.
    Connect {
        replica: ReplicaId,
        link: LinkId,
    },
    /// Close this link. No `LinkDown` is owed for it.
    Disconnect {
        replica: ReplicaId,
        link: LinkId,
    },
    /// Send to the current link of each; encoded once for all.
    Send {
        replicas: ReplicaSet,
        request: Request,
        payload: Bytes,
    },
    GuestReply {
        guest: GuestId,
        reply: GuestReply,
    },
    /// The answer to [`Event::Replace`]. If it is `Ok`, every `Connect` of this replica from now on means the new address.
    Replace {
        replica: ReplicaId,
        answer: Result<(), String>,
    },
    Log(LogEvent),
    /// A job was slow, or is: for the slow-I/O log.
    Slow(Box<Record>),
    /// Everything admitted is finished (after `Shutdown`), or this upstairs has no business on (fenced).
    Stopped {
        reason: StopReason,
    },
}

#[derive(Debug)]
pub enum GuestReply {
    /// Write, zero, trim or flush done.
    Done,
    Data(Vec<Segment>),
    Status(Vec<StatusExtent>),
    Failed(GuestError),
}

/// A piece of a read's answer, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    Data(Bytes),
    Zeros(u32),
}

/// A piece of a block-status answer, in order from the offset asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    pub length: u64,
    /// No data: reads as zeros and takes no space.
    pub hole: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestError {
    /// EIO: no replica has a good copy.
    Io,
    /// ESHUTDOWN.
    ShuttingDown,
    /// EIO after `quorum_timeout`.
    QuorumLost,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    Finished,
    /// Another upstairs has the volume.
    Fenced {
        by: String,
    },
    /// A replica refuses for a reason that no retry can mend (another volume, unequal sizes, in use).
    Refused {
        replica: ReplicaId,
        reason: String,
    },
}

/// What an operator should read. `Display` is the sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEvent {
    pub level: LogLevel,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    Info,
    Warn,
    Error,
}
