//! One job from the guest's socket to its answer, as stamps.
//!
//! Invariants:
//! - A stamp is relative to when the request was read off the guest's socket, in units of 256 ns, 32 bits wide: 18 minutes. What
//!   takes longer shows as 18 minutes.
//! - A timeline has a fixed size and owns nothing: it is copied, never allocated.
//!
//! A replica says with its answer how long the job was queued, submitted and at the device there. What is left between sending
//! and the answer is the network, and the event loops at both ends.
//!
//! Left to others: when a stamp is taken (`trace`), what they come to (`way`), and how that is told (`slow`).

use std::time::Duration;

use newel_protocol::JobId;
use newel_protocol::wire::StageTimes;

use super::api::{ReplicaId, Time};

/// Bits of nanoseconds that a unit leaves out: 256 ns.
const UNIT_BITS: u32 = 8;
/// Events kept for one job. The last place goes to whatever came last.
const MARKS_MAX: usize = 10;

/// A length of time in units of 256 ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticks(pub u32);

impl Ticks {
    /// The longest; one more would stand for "never".
    pub const MAX: Self = Self(u32::MAX - 1);

    pub fn between(from: Time, to: Time) -> Self {
        let units = to.0.saturating_sub(from.0) >> UNIT_BITS;
        Self(u32::try_from(units).unwrap_or(u32::MAX)).min(Self::MAX)
    }

    pub fn of(duration: Duration) -> Self {
        Self::between(Time(0), Time(0).after(duration))
    }

    pub fn of_micros(micros: u32) -> Self {
        Self::between(Time(0), Time(u64::from(micros) * 1000))
    }

    pub fn nanos(self) -> u64 {
        u64::from(self.0) << UNIT_BITS
    }

    pub fn micros(self) -> u64 {
        self.nanos() / 1000
    }

    pub fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

/// A moment of a job, or never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u32);

impl Stamp {
    pub const NEVER: Self = Self(u32::MAX);

    pub fn at(ticks: Ticks) -> Self {
        Self(ticks.min(Ticks::MAX).0)
    }

    pub fn get(self) -> Option<Ticks> {
        (self.0 != u32::MAX).then_some(Ticks(self.0))
    }

    pub fn is_set(self) -> bool {
        self.0 != u32::MAX
    }
}

impl Default for Stamp {
    fn default() -> Self {
        Self::NEVER
    }
}

/// What a job does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Operation {
    #[default]
    Read,
    Write,
    /// Zeros or a trim.
    Zero,
    Flush,
}

impl Operation {
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Zero, Self::Flush];

    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Zero => "zero",
            Self::Flush => "flush",
        }
    }

    pub(super) fn index(self) -> usize {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Zero => 2,
            Self::Flush => 3,
        }
    }
}

/// What happened to a job on its way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum What {
    /// The replica left while it owed an answer.
    #[default]
    Left,
    /// Sent to the same replica once more, over a new connection.
    SentAgain,
    /// Sent to a replica that is catching up.
    SentToJoiner,
    /// The replica had no good copy of some block.
    BadCopy,
    /// The replica could not do it.
    Failed,
    /// The data was asked of this replica, too, as another one was late.
    AskedToo,
    /// An answered read was cancelled there.
    Cancelled,
    QuorumLost,
    QuorumRegained,
    /// It got a new number, as a new generation is activated.
    NewGeneration,
}

impl What {
    pub fn name(self) -> &'static str {
        match self {
            Self::Left => "left",
            Self::SentAgain => "sent_again",
            Self::SentToJoiner => "sent_to_joiner",
            Self::BadCopy => "bad_copy",
            Self::Failed => "failed",
            Self::AskedToo => "asked_too",
            Self::Cancelled => "cancelled",
            Self::QuorumLost => "quorum_lost",
            Self::QuorumRegained => "quorum_regained",
            Self::NewGeneration => "new_generation",
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    pub at: Ticks,
    pub what: What,
    pub replica: Option<ReplicaId>,
}

/// A job at one replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lane {
    pub first_sent: Stamp,
    /// The last attempt.
    pub sent: Stamp,
    pub replied: Stamp,
    /// The replica left while it owed the answer, the last time.
    pub lost: Stamp,
    pub attempts: u8,
    /// It was Active when it answered.
    pub counted: bool,
    /// What the replica said of the last attempt.
    pub queue: Ticks,
    pub submit: Ticks,
    pub device: Ticks,
}

impl Lane {
    pub fn owes(&self) -> bool {
        self.sent.is_set() && !self.replied.is_set() && !self.lost.is_set()
    }

    /// From the first sending to the answer, to its leaving for good, or until now.
    pub fn took(&self, now: Ticks) -> Ticks {
        let end = self.replied.get().or(self.lost.get()).unwrap_or(now);
        self.first_sent.get().map_or(Ticks(0), |first| end.since(first))
    }

    /// Between sending and the answer, without what the replica says it took.
    pub fn network(&self) -> Ticks {
        let (Some(sent), Some(replied)) = (self.sent.get(), self.replied.get()) else { return Ticks(0) };
        let remote = self.queue.0.saturating_add(self.submit.0).saturating_add(self.device.0);
        replied.since(sent).since(Ticks(remote))
    }
}

/// The stamps of one job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// `JobId(0)`: the request waits for admission, and has no job yet.
    pub job: JobId,
    /// Counts guest requests: jobs of one request have the same.
    pub request: u64,
    pub operation: Operation,
    /// In bytes.
    pub offset: u64,
    pub length: u64,
    /// When the request was read off the socket: every stamp counts from here.
    pub base: Time,
    pub admitted: Stamp,
    /// It got its number.
    pub numbered: Stamp,
    pub lanes: [Lane; ReplicaId::COUNT],
    /// Whose answer settled it.
    pub decider: Option<ReplicaId>,
    /// Acknowledged, answered or failed.
    pub settled: Stamp,
    pub failed: bool,
    pub(crate) marks: [Mark; MARKS_MAX],
    pub(crate) marked: u8,
    pub marks_lost: u16,
    /// The number of its record, once there is one.
    pub record: u32,
}

/// Why there is a record of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The guest waited for longer than the threshold.
    Guest,
    /// A replica took longer than that, and the guest did not wait for it.
    Replica,
    /// It has been under way for longer than that.
    InFlight,
    /// One of the slowest of the last hour, below the threshold.
    Slowest,
}

impl Why {
    pub fn name(self) -> &'static str {
        match self {
            Self::Guest => "guest",
            Self::Replica => "replica",
            Self::InFlight => "in_flight",
            Self::Slowest => "slowest",
        }
    }
}

/// A timeline that somebody should see, as it was at a moment. Plain, so that making one costs next to nothing; see `slow`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// 0: only looked at. A job that is under way for too long keeps its number when it ends.
    pub id: u32,
    pub why: Why,
    /// False if the job was still under way.
    pub ended: bool,
    pub now: Time,
    /// Records that were not given out before this one, as there were too many.
    pub dropped: u64,
    pub timeline: Timeline,
}

impl Timeline {
    pub fn ticks(&self, now: Time) -> Ticks {
        Ticks::between(self.base, now)
    }

    pub fn marks(&self) -> &[Mark] {
        self.marks.get(..usize::from(self.marked)).unwrap_or_default()
    }

    pub fn mark(&mut self, now: Time, what: What, replica: Option<ReplicaId>) {
        let mark = Mark { at: self.ticks(now), what, replica };
        let place = usize::from(self.marked).min(MARKS_MAX - 1);
        if usize::from(self.marked) == MARKS_MAX {
            self.marks_lost = self.marks_lost.saturating_add(1);
        } else {
            self.marked += 1;
        }
        self.marks[place] = mark;
    }

    pub fn sent(&mut self, now: Time, replica: ReplicaId) {
        let at = Stamp::at(self.ticks(now));
        let lane = &mut self.lanes[replica.index()];
        let again = lane.first_sent.is_set();
        if !again {
            lane.first_sent = at;
        }
        lane.sent = at;
        (lane.replied, lane.lost) = (Stamp::NEVER, Stamp::NEVER);
        lane.attempts = lane.attempts.saturating_add(1);
        if again {
            self.mark(now, What::SentAgain, Some(replica));
        }
    }

    pub fn replied(&mut self, now: Time, replica: ReplicaId, times: StageTimes, counted: bool) {
        let at = Stamp::at(self.ticks(now));
        let lane = &mut self.lanes[replica.index()];
        lane.replied = at;
        lane.counted = counted;
        lane.queue = Ticks::of_micros(times.queued_us);
        lane.submit = Ticks::of_micros(times.submit_us);
        lane.device = Ticks::of_micros(times.device_us);
    }

    pub fn lost(&mut self, now: Time, replica: ReplicaId) {
        self.lanes[replica.index()].lost = Stamp::at(self.ticks(now));
        self.mark(now, What::Left, Some(replica));
    }

    /// Who settles it, unless that is known: whoever answered last.
    pub fn settle(&mut self, now: Time, failed: bool) {
        self.settled = Stamp::at(self.ticks(now));
        self.failed = failed;
        if self.decider.is_none() {
            self.decider = self.last_to_reply();
        }
    }

    /// Whoever answered last gave what was missing.
    pub fn decide(&mut self) {
        self.decider = self.last_to_reply();
    }

    pub(super) fn last_to_reply(&self) -> Option<ReplicaId> {
        let replied = |id: &ReplicaId| self.lanes[id.index()].replied.get();
        ReplicaId::ALL.into_iter().filter(|id| replied(id).is_some()).max_by_key(replied)
    }

    pub fn is_read(&self) -> bool {
        self.operation == Operation::Read
    }

    /// When it was sent to anybody.
    pub fn first_sent(&self) -> Option<Ticks> {
        self.lanes.iter().filter_map(|lane| lane.first_sent.get()).min()
    }

    /// What the guest waited, so far.
    pub fn total(&self, now: Time) -> Ticks {
        self.settled.get().unwrap_or_else(|| self.ticks(now))
    }

    /// The replica that took longest, and how long.
    pub fn slowest_lane(&self, now: Time) -> (ReplicaId, Ticks) {
        let now = self.ticks(now);
        let took = ReplicaId::ALL.map(|id| (id, self.lanes[id.index()].took(now)));
        took.into_iter().max_by_key(|&(_, took)| took).unwrap_or((ReplicaId(0), Ticks(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_stamp_is_32_bits_of_256_ns() {
        assert_eq!(Ticks::between(Time(0), Time(1_000)).0, 3);
        assert_eq!(Ticks::of_micros(1_000_000).micros(), 1_000_000);
        let long = Ticks::between(Time(0), Time(3_600 * 1_000 * MS));
        assert_eq!(long, Ticks::MAX, "an hour is the longest there is");
        assert!(Stamp::at(long).is_set() && long.micros() > 18 * 60 * 1_000_000);
        assert!(size_of::<Timeline>() <= 384, "{} bytes", size_of::<Timeline>());
    }

    #[test]
    fn marks_are_bounded_and_keep_the_last() {
        let mut write = Timeline::default();
        for ms in 0..100 {
            write.mark(Time(ms * MS), What::Left, Some(ReplicaId(0)));
        }
        write.mark(Time(100 * MS), What::QuorumLost, None);
        assert_eq!((write.marks().len(), write.marks_lost), (MARKS_MAX, 91));
        assert_eq!(write.marks()[MARKS_MAX - 1].what, What::QuorumLost);
    }
}
