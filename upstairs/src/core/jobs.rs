//! The job table: every job from its number to the last reply that is still owed for it.
//!
//! Invariants:
//! - Numbers are given once per process and rise; a write's number is its sequence.
//! - A job stays in the table until it is settled (acknowledged, answered or failed) *and* no connected replica owes a
//!   reply for it. So a change that is not in the table is acknowledged, and whoever joins is sent what is in the table.
//! - A job never crosses an extent boundary (see `BlockRange`).

use std::cell::Cell;
use std::collections::VecDeque;

use bytes::Bytes;
use newel_protocol::wire::Op;
use newel_protocol::{BlockRange, BlockState, ExtentId, JobId};

use super::api::{ReplicaId, ReplicaSet, Time};
use super::trace::Slot;

/// A guest request in the request table. Jobs may outlive their request, so a place that is used again has another stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ReqKey {
    pub(super) index: usize,
    pub(super) stamp: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// A piece of a guest's request.
    Guest { req: ReqKey, piece: u32 },
    /// The request was answered early (quorum timeout) or is gone; the job runs on for its own sake.
    Nobody,
    /// Sent to one replica only; gone with that replica's link.
    Internal(Purpose),
}

/// What an internal job is for. `subject` is the replica being brought up to date (`None` while reconciling), `epoch` the
/// resync it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    ResyncRead {
        subject: Option<ReplicaId>,
        epoch: u64,
        extent: ExtentId,
        copy: u32,
    },
    ResyncStore {
        subject: Option<ReplicaId>,
        epoch: u64,
        extent: ExtentId,
    },
    ResyncFlush {
        subject: Option<ReplicaId>,
        epoch: u64,
    },
    HealRead {
        target: ReplicaId,
        block: u64,
        tried: ReplicaSet,
    },
    HealStore {
        target: ReplicaId,
        block: u64,
    },
    /// A look of the scrub, at all Active replicas at once.
    ScrubRead {
        look: u64,
    },
}

/// What a read has collected so far.
#[derive(Debug, Default)]
pub(super) struct ReadState {
    /// Replies in which some block was bad, kept because another may have just those.
    pub(super) partial: Vec<PartialAnswer>,
    /// Replicas that gave no complete answer.
    pub(super) failed: ReplicaSet,
    /// A complete answer, held until every version it shows is acknowledged.
    pub(super) answer: Option<HeldAnswer>,
}

#[derive(Debug)]
pub(super) struct PartialAnswer {
    pub(super) replica: ReplicaId,
    pub(super) states: Vec<BlockState>,
    /// Good data by block of the range.
    pub(super) blocks: Vec<Option<Bytes>>,
}

#[derive(Debug)]
pub(super) struct HeldAnswer {
    pub(super) blocks: AnswerBlocks,
    /// Sequences of this generation that the answer shows and that were not acknowledged when it arrived.
    pub(super) waits_for: Vec<JobId>,
}

/// A read's data: as it came from one replica, or put together from several.
#[derive(Debug)]
pub(super) struct AnswerBlocks {
    pub(super) states: Vec<BlockState>,
    /// The data of the blocks of kind `Data`, in order, in one or many pieces of whole blocks.
    pub(super) data: Vec<Bytes>,
}

#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: JobId,
    pub(super) op: Op,
    pub(super) payload: Bytes,
    /// Bytes this job counts for in every bound.
    pub(super) cost: usize,
    pub(super) owner: Owner,
    /// Connected replicas that have it and have not replied.
    pub(super) owed: ReplicaSet,
    /// Replicas that executed it, in whatever role.
    pub(super) done: ReplicaSet,
    /// Replicas that executed it and were Active then.
    pub(super) counted: ReplicaSet,
    pub(super) settled: bool,
    /// When it was sent to each replica last.
    pub(super) sent: [Time; ReplicaId::COUNT],
    pub(super) replied: [Option<Time>; ReplicaId::COUNT],
    /// Replicas that a read's data was asked of; the others were asked for contexts.
    pub(super) readers: ReplicaSet,
    pub(super) read: Option<Box<ReadState>>,
    /// Its timeline, if it is a guest's.
    pub(super) trace: Slot,
}

impl Job {
    pub(super) fn is_read(&self) -> bool {
        matches!(self.op, Op::Read { .. })
    }

    /// True if this replica was asked for its contexts, while the data comes from others.
    pub(super) fn is_witness(&self, id: ReplicaId) -> bool {
        matches!(self.op, Op::Read { mode: newel_protocol::wire::ReadMode::Data, .. })
            && self.is_guest_read()
            && !self.readers.contains(id)
    }

    /// A guest's read, of which every reply counts for the throttle.
    pub(super) fn is_guest_read(&self) -> bool {
        self.is_read() && !self.is_internal()
    }

    pub(super) fn is_internal(&self) -> bool {
        matches!(self.owner, Owner::Internal(_))
    }

    /// A guest's write, zero, trim or flush: what every connected replica gets and a joiner is sent again.
    pub(super) fn is_guest_change(&self) -> bool {
        !self.is_read() && !self.is_internal()
    }

    /// What this replica's answer is counted as, and the data that goes there or comes from there.
    pub(super) fn work_at(&self, id: ReplicaId) -> (super::work::Done, u64) {
        use super::work::Done;
        let data = self.cost.saturating_sub(BASE_COST) as u64;
        match self.op {
            Op::Read { .. } => (Done::Read, if self.readers.contains(id) { data } else { 0 }),
            Op::Write { .. } | Op::Store { .. } => (Done::Write, data),
            Op::Zero { .. } | Op::Flush => (Done::Other, 0),
        }
    }

    /// A change of blocks whose version is its number.
    pub(super) fn is_write(&self) -> bool {
        matches!(self.op, Op::Write { .. } | Op::Zero { .. })
    }
}

/// What a job counts for beside its bytes.
const BASE_COST: usize = 256;

/// The bytes that a job counts for: what travels with it or with its answer.
pub(super) fn cost(op: &Op, payload: &Bytes) -> usize {
    BASE_COST
        + match op {
            Op::Read { range, mode } => match mode {
                newel_protocol::wire::ReadMode::Contexts | newel_protocol::wire::ReadMode::Verify => {
                    range.count as usize * 17
                }
                newel_protocol::wire::ReadMode::Data | newel_protocol::wire::ReadMode::Raw => range.bytes(),
            },
            Op::Write { .. } | Op::Zero { .. } | Op::Flush | Op::Store { .. } => payload.len(),
        }
}

/// Jobs by number. Numbers are dense, so this is a ring with holes.
#[derive(Debug)]
pub(super) struct JobTable {
    base: u64,
    ring: VecDeque<Option<Job>>,
    live: usize,
    /// No job with a lower number is owed by this replica. It rises as [`Self::owed_by`] looks, so that a replica far behind
    /// doesn't make looking for what the others owe slow.
    owed_from: [Cell<u64>; ReplicaId::COUNT],
}

impl JobTable {
    pub(super) fn new() -> Self {
        Self { base: 1, ring: VecDeque::new(), live: 0, owed_from: Default::default() }
    }

    /// The number that the next job will get.
    pub(super) fn next_id(&self) -> JobId {
        JobId(self.base + self.ring.len() as u64)
    }

    pub(super) fn insert(&mut self, job: Job) {
        debug_assert_eq!(job.id, self.next_id(), "jobs are inserted in the order of their numbers");
        self.ring.push_back(Some(job));
        self.live += 1;
    }

    pub(super) fn get(&self, id: JobId) -> Option<&Job> {
        self.ring.get(self.index(id)?)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: JobId) -> Option<&mut Job> {
        let index = self.index(id)?;
        self.ring.get_mut(index)?.as_mut()
    }

    pub(super) fn remove(&mut self, id: JobId) -> Option<Job> {
        let index = self.index(id)?;
        let job = self.ring.get_mut(index)?.take()?;
        self.live -= 1;
        while matches!(self.ring.front(), Some(None)) {
            self.ring.pop_front();
            self.base += 1;
        }
        Some(job)
    }

    /// A job that was sent to this replica, which owes a reply from now on.
    pub(super) fn owe(&mut self, id: JobId, replica: ReplicaId) {
        if let Some(job) = self.get_mut(id) {
            job.owed.insert(replica);
            let from = &self.owed_from[replica.index()];
            from.set(from.get().min(id.0));
        }
    }

    /// What this replica owes, the oldest first. Cheap for the first few.
    pub(super) fn owed_by(&self, replica: ReplicaId) -> impl Iterator<Item = &Job> {
        let from = &self.owed_from[replica.index()];
        let start = usize::try_from(from.get().saturating_sub(self.base)).unwrap_or(usize::MAX);
        let owed = move |job: &Option<Job>| job.as_ref().is_some_and(|job| job.owed.contains(replica));
        let rest = || self.ring.range(start.min(self.ring.len())..);
        let skipped = rest().position(owed).unwrap_or_else(|| rest().len());
        from.set(self.base + (start.min(self.ring.len()) + skipped) as u64);
        rest().skip(skipped).flatten().filter(move |job| job.owed.contains(replica))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Job> {
        self.ring.iter().flatten()
    }

    /// The first job from this number on that matches.
    #[cfg(feature = "trace")]
    pub(super) fn first_from(&self, id: JobId, mut matches: impl FnMut(&Job) -> bool) -> Option<&Job> {
        let start = usize::try_from(id.0.saturating_sub(self.base)).unwrap_or(usize::MAX);
        self.ring.range(start.min(self.ring.len())..).flatten().find(|job| matches(job))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Job> {
        self.ring.iter_mut().flatten()
    }

    /// The numbers of the jobs that match, in order.
    pub(super) fn ids(&self, mut matches: impl FnMut(&Job) -> bool) -> Vec<JobId> {
        self.iter().filter(|job| matches(job)).map(|job| job.id).collect()
    }

    /// True if this number belongs to a guest's change that is not acknowledged.
    pub(super) fn is_unacknowledged(&self, id: JobId) -> bool {
        self.get(id).is_some_and(|job| job.is_guest_change() && !job.settled)
    }

    /// True while a change or copy of this block is under way anywhere.
    pub(super) fn is_being_changed(&self, block: u64) -> bool {
        self.iter().any(|job| match &job.op {
            Op::Write { range, .. } | Op::Zero { range, .. } => range.contains(block),
            Op::Store { blocks, .. } => blocks.iter().any(|stored| stored.block == block),
            Op::Read { .. } | Op::Flush => false,
        })
    }

    fn index(&self, id: JobId) -> Option<usize> {
        usize::try_from(id.0.checked_sub(self.base)?).ok()
    }
}

/// Cuts `start..end` (in blocks) at extent boundaries.
pub(super) fn pieces(start: u64, end: u64) -> impl Iterator<Item = BlockRange> {
    let mut at = start;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let boundary =
            BlockRange::single(at).extent().first_block() + u64::from(newel_protocol::EXTENT_BLOCKS);
        let stop = boundary.min(end);
        let count = u32::try_from(stop - at).unwrap_or(newel_protocol::EXTENT_BLOCKS);
        let range = BlockRange::new(at, count);
        at = stop;
        Some(range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(id: JobId) -> Job {
        Job {
            id,
            op: Op::Flush,
            payload: Bytes::new(),
            cost: 1,
            owner: Owner::Nobody,
            owed: ReplicaSet::EMPTY,
            done: ReplicaSet::EMPTY,
            counted: ReplicaSet::EMPTY,
            settled: false,
            sent: [Time(0); 3],
            replied: [None; 3],
            readers: ReplicaSet::EMPTY,
            read: None,
            trace: Slot::NONE,
        }
    }

    #[test]
    fn the_ring_survives_removal_in_any_order() {
        let mut table = JobTable::new();
        for _ in 0..10 {
            table.insert(job(table.next_id()));
        }
        for id in [3, 1, 2, 10, 9] {
            assert!(table.remove(JobId(id)).is_some());
            assert!(table.remove(JobId(id)).is_none());
        }
        assert_eq!(table.ids(|_| true), [4, 5, 6, 7, 8].map(JobId));
        assert_eq!(table.next_id(), JobId(11));
        assert!(table.is_unacknowledged(JobId(4)) && !table.is_unacknowledged(JobId(3)));
        assert!(table.get(JobId(0)).is_none() && table.get(JobId(99)).is_none());
    }

    #[test]
    fn what_is_owed_is_found_as_by_looking_through_everything() {
        let mut table = JobTable::new();
        let mut random = 7_u64;
        for round in 0..4_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let replica = ReplicaId(u8::try_from((random >> 33) % 3).unwrap());
            let id = JobId(table.next_id().0.saturating_sub((random >> 40) % 64));
            match (random >> 60) % 5 {
                0 => table.insert(job(table.next_id())),
                1 | 2 => table.owe(id, replica),
                3 => {
                    if let Some(job) = table.get_mut(id) {
                        job.owed.remove(replica);
                    }
                }
                _ => drop(table.remove(id)),
            }
            for replica in ReplicaId::ALL {
                let found: Vec<_> = table.owed_by(replica).map(|job| job.id).collect();
                assert_eq!(found, table.ids(|job| job.owed.contains(replica)), "round {round}");
            }
        }
    }

    #[test]
    fn pieces_end_at_extents() {
        let check = |start, end, expected: &[(u64, u32)]| {
            let got: Vec<_> = pieces(start, end).map(|r| (r.start, r.count)).collect();
            assert_eq!(got, expected);
        };
        check(0, 1, &[(0, 1)]);
        check(1023, 1026, &[(1023, 1), (1024, 2)]);
        check(5, 2048, &[(5, 1019), (1024, 1024)]);
        check(7, 7, &[]);
    }
}
