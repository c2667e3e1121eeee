//! Scrub: in the background every Active replica verifies its blocks, what they say is compared, and bad copies are healed.
//!
//! One extent after the other. First its contexts are looked at, which costs little and shows what holds data at all; then
//! that is verified in looks of [`LOOK_BLOCKS`], by all Active replicas at once: each reads its data, checks it, and answers
//! with states only.
//!
//! Invariants:
//! - One look at a time, so at most one read of 256 KiB is in flight at a replica; looks take a bounded share of the time, and
//!   less while guests are served. It never stands still for good, however busy the guests are.
//! - A look has the same place among the jobs at every replica, so it sees the same writes executed everywhere. Still a
//!   difference counts only while no change of that block is under way, and, if all copies are sound, only the second time.
//! - The highest version with a sound copy is right: an Active replica holds everything acknowledged. The version of a bad
//!   copy says nothing, as it may be what rotted.
//! - A pass goes on where it was after replicas left or a new generation was activated.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use newel_protocol::wire::{Op, ReadMode};
use newel_protocol::{BlockKind, BlockRange, BlockState, EXTENT_BLOCKS, ExtentId};

use super::api::{LogLevel, ReplicaId, ReplicaSet, Time};
use super::jobs::Purpose;
use super::status::ScrubStatus;
use super::{Core, QUORUM};

/// 256 KiB: a guest's read that comes behind it waits a fraction of a millisecond on any SSD.
const LOOK_BLOCKS: u32 = 64;
/// Pause after a look, in multiples of the time it took. Idle: half of what the slowest disk can do, so that a disk that
/// others share is never taken whole. With guest jobs under way: a fifth.
const PAUSE_IDLE: u32 = 1;
const PAUSE_BUSY: u32 = 4;
const PAUSE_MIN: Duration = Duration::from_micros(100);
/// A replica that is slow for a moment must not stop the scrub for minutes.
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// While guests wait for admission, or the volume is half full, a look is put off again and again, but only so often: then
/// the scrub takes one look in a quarter of a second.
const PUT_OFF: Duration = Duration::from_millis(10);
const PUT_OFF_MAX: u32 = 25;
/// Before a block is looked at again: the jobs that were in flight are done by then, as a rule.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// A block that is changed during each of so many looks is left to the next pass.
const LOOKS_MAX: u32 = 10;

type States = [Option<Vec<BlockState>>; ReplicaId::COUNT];
/// What each of the replicas asked said of one block.
type Copies = Vec<(ReplicaId, BlockState)>;

#[derive(Debug, Default)]
pub(super) struct Scrub {
    pass: Option<Pass>,
    /// Passes begun.
    passes: u64,
    /// Tells the answers to a look from those to one that was given up.
    look: u64,
    counts: Counts,
    extents_total: u64,
    started: Option<Time>,
    finished: Option<Time>,
    next: Option<Time>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    extents_done: u64,
    bad: u64,
    healed: u64,
    lost: u64,
}

#[derive(Debug)]
struct Pass {
    extent: u32,
    extents: u32,
    /// Ranges of the extent that are still to be verified; `None` before its contexts were looked at.
    ranges: Option<VecDeque<BlockRange>>,
    look: Option<Look>,
    /// When the next look may begin.
    due: Time,
    put_off: u32,
    /// Blocks of the range at the front whose sound copies differed, and how.
    suspects: BTreeMap<u64, Copies>,
    looks: u32,
    heals: VecDeque<(ReplicaId, u64, ReplicaSet)>,
    healing: BTreeSet<(ReplicaId, u64)>,
}

/// A read that is out to all Active replicas.
#[derive(Debug)]
struct Look {
    asked: ReplicaSet,
    range: BlockRange,
    mode: ReadMode,
    states: States,
    since: Time,
}

impl Scrub {
    pub(super) fn new(now: Time, every: Option<Duration>) -> Self {
        Self { next: every.map(|every| now.after(every)), ..Self::default() }
    }

    pub(super) fn status(&self, now: Time) -> ScrubStatus {
        let ago = |time: Option<Time>| time.map(|time| now.since(time).as_secs());
        ScrubStatus {
            running: self.pass.is_some(),
            pass: self.passes,
            extents_done: self.counts.extents_done,
            extents_total: self.extents_total,
            blocks_bad: self.counts.bad,
            blocks_healed: self.counts.healed,
            blocks_without_good_copy: self.counts.lost,
            started_s_ago: ago(self.started),
            finished_s_ago: ago(self.finished),
            next_in_s: self.next.map(|next| next.since(now).as_secs()),
        }
    }
}

impl Core {
    /// Begins a pass, unless one is under way.
    pub(super) fn start_scrub(&mut self) {
        if self.scrub.pass.is_some() || self.stopping.is_some() {
            return;
        }
        self.scrub.passes += 1;
        self.scrub.counts = Counts::default();
        self.scrub.started = Some(self.now);
        self.scrub.finished = None;
        // How many there are is known once the volume is served.
        self.scrub.extents_total = 0;
        self.scrub.pass = Some(Pass {
            extent: 0,
            extents: 0,
            ranges: None,
            look: None,
            due: self.now,
            put_off: 0,
            suspects: BTreeMap::new(),
            looks: 0,
            heals: VecDeque::new(),
            healing: BTreeSet::new(),
        });
        self.log(LogLevel::Info, "scrub: verifying every block of every replica");
    }

    /// When the scrub wants to be called next, if nothing else happens.
    pub(super) fn scrub_deadline(&self) -> Option<Time> {
        let look = self.scrub.pass.as_ref().filter(|pass| pass.is_free() && self.may_scrub());
        look.map(|pass| pass.due).into_iter().chain(self.scrub.next).min()
    }

    /// Called after every event: begins what is due.
    pub(super) fn check_scrub(&mut self) {
        if let (Some(next), Some(every)) = (self.scrub.next, self.config.timing.scrub_every)
            && self.now >= next
        {
            self.scrub.next = Some(self.now.after(every));
            self.start_scrub();
        }
        if self.scrub.pass.is_none() || !self.may_scrub() {
            return;
        }
        let guests_wait = self.requests.waiting() > 0 || self.open_jobs * 2 > self.config.limits.volume_jobs;
        let (now, blocks) = (self.now, self.blocks);
        let Some(pass) = self.scrub.pass.as_mut().filter(|pass| pass.is_free() && now >= pass.due) else {
            return;
        };
        pass.extents = u32::try_from(blocks.div_ceil(u64::from(EXTENT_BLOCKS))).unwrap_or(u32::MAX);
        self.scrub.extents_total = u64::from(pass.extents);
        if pass.extent >= pass.extents {
            self.finish_scrub();
        } else if guests_wait && pass.put_off < PUT_OFF_MAX {
            pass.put_off += 1;
            pass.due = now.after(PUT_OFF);
        } else {
            pass.put_off = 0;
            self.start_look();
        }
    }

    /// A scrub is for quiet times: with a quorum, and not beside a catch-up.
    fn may_scrub(&self) -> bool {
        let catching_up = self.replicas.iter().any(|replica| replica.takes_jobs() && !replica.is_active());
        self.is_serving() && self.active().len() >= QUORUM && !catching_up && self.stopping.is_none()
    }

    fn start_look(&mut self) {
        let (asked, since) = (self.active(), self.now);
        let extent = self.scrub.pass.as_ref().map_or(ExtentId(0), |pass| ExtentId(pass.extent));
        let whole = extent_blocks(extent, self.blocks);
        let Some(pass) = &mut self.scrub.pass else { return };
        let (range, mode) = match &pass.ranges {
            None => (whole, ReadMode::Contexts),
            Some(ranges) => match ranges.front() {
                Some(&range) => (range, ReadMode::Verify),
                None => return,
            },
        };
        pass.look = Some(Look { asked, range, mode, states: [const { None }; ReplicaId::COUNT], since });
        self.scrub.look += 1;
        let purpose = Purpose::ScrubRead { look: self.scrub.look };
        self.send_internal_job(Op::Read { range, mode }, Bytes::new(), purpose, asked);
    }

    /// One replica's answer; without states if it could not read at all.
    pub(super) fn on_scrub_read(&mut self, id: ReplicaId, look: u64, states: &[BlockState]) {
        if look != self.scrub.look {
            return;
        }
        let Some(look) = self.scrub.pass.as_mut().and_then(|pass| pass.look.as_mut()) else { return };
        let count = look.range.count as usize;
        let unreadable = || vec![BlockState { kind: BlockKind::Unreadable, ..BlockState::default() }; count];
        look.states[id.index()] = Some(if states.len() == count { states.to_vec() } else { unreadable() });
        if look.asked.iter().all(|id| look.states[id.index()].is_some()) {
            self.finish_look();
        }
    }

    fn finish_look(&mut self) {
        let (now, busy) = (self.now, self.open_jobs > 0);
        let Some(pass) = &mut self.scrub.pass else { return };
        let Some(look) = pass.look.take() else { return };
        let factor = if busy { PAUSE_BUSY } else { PAUSE_IDLE };
        pass.due = now.after((now.since(look.since) * factor).clamp(PAUSE_MIN, PAUSE_MAX));
        if look.mode == ReadMode::Contexts {
            pass.ranges = Some(ranges_to_verify(&look));
        } else {
            self.judge_look(&look);
        }
        self.start_scrub_heals();
        self.end_extent_if_done();
    }

    /// Decides about every block of a look, and whether its range has to be looked at again.
    fn judge_look(&mut self, look: &Look) {
        let mut again: Option<BlockRange> = None;
        for (index, block) in look.range.blocks().enumerate() {
            let copies = look.copies(index);
            let verdict = judge(&copies);
            if matches!(verdict, Verdict::Equal) {
                continue;
            }
            let changing = self.jobs.is_being_changed(block);
            if changing || !self.act_on(block, &copies, &verdict) {
                let count = u32::try_from(block + 1 - again.map_or(block, |range| range.start)).unwrap_or(1);
                again = Some(BlockRange::new(again.map_or(block, |range| range.start), count));
            }
        }
        let now = self.now;
        let Some(pass) = &mut self.scrub.pass else { return };
        let Some(ranges) = &mut pass.ranges else { return };
        ranges.pop_front();
        pass.looks += 1;
        match again.filter(|_| pass.looks < LOOKS_MAX) {
            Some(range) => {
                ranges.push_front(range);
                pass.due = pass.due.max(now.after(LOOK_AGAIN));
            }
            None => {
                pass.looks = 0;
                pass.suspects.clear();
            }
        }
    }

    /// False if the block has to be seen once more before anything is done about it.
    fn act_on(&mut self, block: u64, copies: &Copies, verdict: &Verdict) -> bool {
        let Some(pass) = &mut self.scrub.pass else { return true };
        let Verdict::Unequal { good, others } = verdict else {
            self.scrub.counts.lost += 1;
            self.scrub.counts.bad += copies.len() as u64;
            self.log(LogLevel::Error, format!("scrub: no active replica has a good copy of block {block}"));
            return true;
        };
        let sound = copies.iter().all(|(_, state)| state.is_verified());
        if sound && pass.suspects.get(&block) != Some(copies) {
            pass.suspects.insert(block, copies.clone());
            return false;
        }
        for id in others.iter() {
            self.scrub.counts.bad += 1;
            pass.heals.push_back((id, block, *good));
        }
        let names: Vec<String> = others.iter().map(|id| id.to_string()).collect();
        let what = if sound { "an older copy" } else { "a bad copy" };
        self.log(
            LogLevel::Warn,
            format!("scrub: replica {} has {what} of block {block}", names.join(" and ")),
        );
        true
    }

    fn start_scrub_heals(&mut self) {
        while !self.heals_are_full()
            && let Some((target, block, sources)) =
                self.scrub.pass.as_mut().and_then(|pass| pass.heals.pop_front())
        {
            if let Some(pass) = &mut self.scrub.pass {
                pass.healing.insert((target, block));
            }
            if !self.try_heal(target, block, sources)
                && let Some(pass) = &mut self.scrub.pass
            {
                pass.healing.remove(&(target, block));
            }
        }
    }

    pub(super) fn scrub_heal_ended(&mut self, target: ReplicaId, block: u64, healed: bool) {
        let Some(pass) = &mut self.scrub.pass else { return };
        if pass.healing.remove(&(target, block)) {
            self.scrub.counts.healed += u64::from(healed);
        }
        self.start_scrub_heals();
        self.end_extent_if_done();
    }

    fn end_extent_if_done(&mut self) {
        let Some(pass) = &mut self.scrub.pass else { return };
        if pass.is_free() && pass.ranges.as_ref().is_some_and(VecDeque::is_empty) {
            pass.ranges = None;
            pass.extent += 1;
            self.scrub.counts.extents_done += 1;
        }
    }

    fn finish_scrub(&mut self) {
        let Some(_) = self.scrub.pass.take() else { return };
        self.scrub.finished = Some(self.now);
        let took = self.scrub.started.map_or(Duration::ZERO, |started| self.now.since(started));
        let Counts { bad, healed, lost, .. } = self.scrub.counts;
        let level = if lost > 0 || healed < bad { LogLevel::Error } else { LogLevel::Info };
        self.log(
            level,
            format!(
                "scrub finished after {} s: {bad} bad copies, {healed} healed, {lost} blocks without a good copy",
                took.as_secs()
            ),
        );
    }

    /// A replica left: the look that it owes an answer to is begun again without it.
    pub(super) fn scrub_lost(&mut self, id: ReplicaId) {
        let again = self.now.after(LOOK_AGAIN);
        let Some(pass) = &mut self.scrub.pass else { return };
        if pass.look.take_if(|look| look.asked.contains(id)).is_some() {
            self.scrub.look += 1;
            pass.due = pass.due.max(again);
        }
    }
}

impl Pass {
    /// Nothing that the next look has to wait for.
    fn is_free(&self) -> bool {
        self.look.is_none() && self.heals.is_empty() && self.healing.is_empty()
    }
}

impl Look {
    fn copies(&self, index: usize) -> Copies {
        let state = |id: ReplicaId| self.states[id.index()].as_ref()?.get(index).copied();
        self.asked.iter().filter_map(|id| Some((id, state(id)?))).collect()
    }
}

fn extent_blocks(extent: ExtentId, blocks: u64) -> BlockRange {
    let left = blocks.saturating_sub(extent.first_block());
    BlockRange::new(extent.first_block(), u32::try_from(left).unwrap_or(u32::MAX).clamp(1, EXTENT_BLOCKS))
}

/// Out of the contexts of an extent: where there is data, or where the replicas differ.
fn ranges_to_verify(look: &Look) -> VecDeque<BlockRange> {
    let of_interest = |index: usize| {
        let copies = look.copies(index);
        let zeros = copies.iter().all(|(_, state)| state.kind == BlockKind::Zero);
        !(zeros && matches!(judge(&copies), Verdict::Equal))
    };
    let mut ranges = VecDeque::new();
    for first in (0..look.range.count).step_by(LOOK_BLOCKS as usize) {
        let count = LOOK_BLOCKS.min(look.range.count - first);
        if (first..first + count).any(|index| of_interest(index as usize)) {
            ranges.push_back(BlockRange::new(look.range.start + u64::from(first), count));
        }
    }
    ranges
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Equal,
    /// The good copies, and the replicas that have another one or a bad one.
    Unequal {
        good: ReplicaSet,
        others: ReplicaSet,
    },
    NoGoodCopy,
}

/// Which copies of one block are right, if nothing is in flight on it.
fn judge(copies: &Copies) -> Verdict {
    if let Some(((_, first), rest)) = copies.split_first()
        && first.is_verified()
        && rest.iter().all(|(_, state)| state == first)
    {
        return Verdict::Equal;
    }
    let sound = || copies.iter().map(|(_, state)| *state).filter(BlockState::is_verified);
    let Some(top) = sound().map(|state| state.version).max() else { return Verdict::NoGoodCopy };
    let votes = |state: BlockState| copies.iter().filter(|(_, other)| *other == state).count();
    // One version with two contents is a defect of ours, if it ever happens: then the majority is right.
    let mut best: Option<(BlockState, usize)> = None;
    for state in sound().filter(|state| state.version == top) {
        let count = votes(state);
        match best {
            Some((other, most)) if count == most && other != state => return Verdict::NoGoodCopy,
            Some((_, most)) if count <= most => {}
            Some(_) | None => best = Some((state, count)),
        }
    }
    let (mut good, mut others) = (ReplicaSet::EMPTY, ReplicaSet::EMPTY);
    for (id, state) in copies {
        if best.is_some_and(|(best, _)| best == *state) {
            good.insert(*id);
        } else {
            others.insert(*id);
        }
    }
    Verdict::Unequal { good, others }
}

#[cfg(test)]
mod tests {
    use newel_protocol::{Generation, Version};

    use super::*;

    #[test]
    fn the_highest_sound_version_is_right() {
        use BlockKind::{Data, Unreadable, Unverified, Zero};
        let state =
            |(kind, sequence, crc)| BlockState { version: Version::new(Generation(1), sequence), crc, kind };
        let check = |copies: &[(BlockKind, u64, u32)], good: &[u8], others: &[u8]| {
            let copies: Copies =
                ReplicaId::ALL.into_iter().zip(copies.iter().map(|&copy| state(copy))).collect();
            let set = |ids: &[u8]| ids.iter().map(|&id| ReplicaId(id)).collect::<ReplicaSet>();
            let expected = match (good, others) {
                ([], []) => Verdict::Equal,
                ([], _) => Verdict::NoGoodCopy,
                _ => Verdict::Unequal { good: set(good), others: set(others) },
            };
            assert_eq!(judge(&copies), expected, "{copies:?}");
        };
        check(&[(Data, 5, 1), (Data, 5, 1), (Data, 5, 1)], &[], &[]);
        check(&[(Zero, 0, 0), (Zero, 0, 0)], &[], &[]);
        check(&[(Data, 5, 1), (Unreadable, 5, 1), (Data, 5, 1)], &[0, 2], &[1]);
        check(&[(Data, 5, 1), (Unreadable, 9, 7), (Data, 5, 1)], &[0, 2], &[1]);
        check(&[(Data, 5, 1), (Unverified, 5, 7), (Data, 4, 2)], &[0], &[1, 2]);
        check(&[(Zero, 6, 0), (Data, 5, 1), (Data, 5, 1)], &[0], &[1, 2]);
        check(&[(Unreadable, 5, 1), (Unreadable, 5, 1), (Unverified, 4, 1)], &[], &[0]);
        check(&[(Data, 5, 1), (Data, 5, 2), (Data, 5, 1)], &[0, 2], &[1]);
        check(&[(Data, 5, 1), (Data, 5, 2)], &[], &[0]);
        check(&[(Data, 5, 1), (Data, 5, 2), (Data, 5, 3)], &[], &[0]);
    }
}
