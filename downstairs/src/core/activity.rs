//! The activity log: the bounded set of extents that may hold changes not yet flushed.
//!
//! Invariants:
//! - A change goes to the disk only while its extent's entry is durable.
//! - An extent leaves only if none of its changes is unfinished and every finished one is covered by a flush that began
//!   after it finished.
//! - At most one batch is being written. What gathers meanwhile goes into the next one, in arrival order, so an extent
//!   waits for a bounded number of batches and flushes.
//! - Changes of an extent in the log never wait for those of others.
//! - No event costs more than one walk over the slots, and where no slot can be had they aren't walked again before a
//!   flush made a difference.
//!
//! Writing the entries and flushing is left to the caller: [`ActivityLog::next_batch`] and
//! [`ActivityLog::wants_flush`] say when.

use std::collections::{BTreeMap, VecDeque};

use newel_protocol::ExtentId;

use super::api::LogEntry;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Entering,
    In,
}

#[derive(Debug)]
struct Slot {
    state: State,
    extent: u32,
    /// Changes that were let through and are not finished.
    unfinished: u32,
    /// The number of the last flush that had begun when a change finished last. `None`: no change since it entered.
    dirty_after: Option<u64>,
    /// Changes that wait for the entry to become durable.
    waiters: Vec<u32>,
    older: u32,
    newer: u32,
}

#[derive(Debug)]
pub(super) struct ActivityLog {
    slots: Vec<Slot>,
    slots_per_record: u32,
    /// By extent: the slot that it is in or entering, or `NONE`.
    by_extent: Vec<u32>,
    /// Free slots by record, the next one to use last.
    free: Vec<Vec<u32>>,
    free_count: usize,
    /// The list of slots in use by age of last use.
    oldest: u32,
    newest: u32,
    /// Extents that wait for a slot, in arrival order, and the changes that wait with them.
    queue: VecDeque<ExtentId>,
    waiting: BTreeMap<ExtentId, Vec<u32>>,
    /// The slots of the batch that is being written.
    batch: Vec<u32>,
    /// Flushes are numbered from 1 and run one at a time.
    flush_begun: u64,
    flush_done: u64,
    /// No slot could be had; only a flush or a batch can change that.
    exhausted: bool,
    wants_flush: bool,
}

impl ActivityLog {
    /// `entries` is what the log holds on disk. Their extents count as changed: what was written there before may still
    /// be in the page cache only. Entries that make no sense are ignored, so that their slots are used anew.
    pub(super) fn new(slots: u32, slots_per_record: u32, extents: usize, entries: &[LogEntry]) -> Self {
        let slots_per_record = slots_per_record.max(1);
        let mut log = Self {
            slots: Vec::new(),
            slots_per_record,
            by_extent: vec![NONE; extents],
            free: vec![Vec::new(); slots.div_ceil(slots_per_record) as usize],
            free_count: 0,
            oldest: NONE,
            newest: NONE,
            queue: VecDeque::new(),
            waiting: BTreeMap::new(),
            batch: Vec::new(),
            flush_begun: 0,
            flush_done: 0,
            exhausted: false,
            wants_flush: false,
        };
        log.slots.resize_with(slots as usize, || Slot {
            state: State::Free,
            extent: NONE,
            unfinished: 0,
            dirty_after: None,
            waiters: Vec::new(),
            older: NONE,
            newer: NONE,
        });
        for &LogEntry { slot, extent } in entries {
            let Some(extent) = extent else { continue };
            let usable = log.by_extent.get(extent.0 as usize) == Some(&NONE)
                && log.slots.get(slot as usize).is_some_and(|slot| slot.state == State::Free);
            if usable {
                log.by_extent[extent.0 as usize] = slot;
                let entry = &mut log.slots[slot as usize];
                entry.state = State::In;
                entry.extent = extent.0;
                entry.dirty_after = Some(0);
                log.link_newest(slot);
            }
        }
        for slot in (0..slots).rev() {
            if log.slots[slot as usize].state == State::Free {
                log.free[(slot / slots_per_record) as usize].push(slot);
                log.free_count += 1;
            }
        }
        log
    }

    /// A change of `extent` wants to go to the disk. True: it may, now. False: `job` is handed out by
    /// [`ActivityLog::batch_durable`] later.
    pub(super) fn begin(&mut self, extent: ExtentId, job: u32) -> bool {
        let index = self.by_extent[extent.0 as usize];
        if index == NONE {
            self.waiting
                .entry(extent)
                .or_insert_with(|| {
                    self.queue.push_back(extent);
                    Vec::new()
                })
                .push(job);
            return false;
        }
        let slot = &mut self.slots[index as usize];
        if slot.state == State::Entering {
            slot.waiters.push(job);
            return false;
        }
        slot.unfinished += 1;
        if self.newest != index {
            self.unlink(index);
            self.link_newest(index);
        }
        true
    }

    /// A change that was let through has finished, well or not.
    pub(super) fn finish(&mut self, extent: ExtentId) {
        let index = self.by_extent[extent.0 as usize];
        let Some(slot) = self.slots.get_mut(index as usize) else {
            debug_assert!(false, "a change of extent {extent} finished outside the log");
            return;
        };
        slot.unfinished -= 1;
        slot.dirty_after = Some(self.flush_begun);
        if self.exhausted && slot.unfinished == 0 {
            self.wants_flush = true;
        }
    }

    /// No job waits any longer: their session is gone.
    pub(super) fn drop_waiters(&mut self) {
        self.queue.clear();
        self.waiting.clear();
        for &index in &self.batch {
            self.slots[index as usize].waiters.clear();
        }
        self.wants_flush = false;
        self.exhausted = false;
    }

    /// Entries to be written now, if there are any to write and no batch is under way.
    pub(super) fn next_batch(&mut self) -> Option<Vec<LogEntry>> {
        if self.queue.is_empty() || !self.batch.is_empty() || self.exhausted {
            return None;
        }
        let chosen = self.choose(self.queue.len().min(self.slots.len()));
        let mut entries = Vec::with_capacity(chosen.len());
        for index in chosen {
            let Some(extent) = self.queue.pop_front() else { break };
            let waiters = self.waiting.remove(&extent).unwrap_or_default();
            let old = self.slots[index as usize].extent;
            if old != NONE {
                self.by_extent[old as usize] = NONE;
                self.unlink(index);
            }
            let slot = &mut self.slots[index as usize];
            slot.state = State::Entering;
            slot.extent = extent.0;
            slot.dirty_after = None;
            slot.waiters = waiters;
            self.by_extent[extent.0 as usize] = index;
            self.batch.push(index);
            entries.push(LogEntry { slot: index, extent: Some(extent) });
        }
        (!entries.is_empty()).then_some(entries)
    }

    /// The batch under way is durable. Appends the changes that may go to the disk now.
    pub(super) fn batch_durable(&mut self, released: &mut Vec<u32>) {
        for index in std::mem::take(&mut self.batch) {
            let slot = &mut self.slots[index as usize];
            slot.state = State::In;
            slot.unfinished = u32::try_from(slot.waiters.len()).unwrap_or(u32::MAX);
            released.append(&mut slot.waiters);
            self.link_newest(index);
        }
        // An entry whose waiters were dropped can leave at once.
        self.exhausted = false;
    }

    /// True if extents wait that can only enter after a flush.
    pub(super) fn wants_flush(&self) -> bool {
        self.wants_flush
    }

    pub(super) fn flush_began(&mut self) {
        self.flush_begun += 1;
        self.wants_flush = false;
    }

    pub(super) fn flush_finished(&mut self) {
        self.flush_done = self.flush_begun;
        // The next batch finds out anew.
        self.exhausted = false;
        self.wants_flush = false;
    }

    pub(super) fn in_use(&self) -> usize {
        self.slots.len() - self.free_count
    }

    /// True while an extent is in the log durably.
    #[cfg(test)]
    pub(super) fn holds(&self, extent: ExtentId) -> bool {
        self.slots.get(self.by_extent[extent.0 as usize] as usize).is_some_and(|s| s.state == State::In)
    }

    /// Up to `needed` slots of one record: free ones if there are any, else the least recently used that may leave.
    fn choose(&mut self, needed: usize) -> Vec<u32> {
        if self.free_count > 0 {
            // The first among equals, so that records fill up in order.
            let best = (0..self.free.len()).rev().max_by_key(|&record| self.free[record].len().min(needed));
            let record = &mut self.free[best.unwrap_or(0)];
            let chosen: Vec<u32> = record.drain(record.len().saturating_sub(needed)..).rev().collect();
            self.free_count -= chosen.len();
            return chosen;
        }
        let mut by_record = vec![0_usize; self.free.len()];
        let mut candidates = Vec::new();
        let mut idle = false;
        let mut index = self.oldest;
        while index != NONE && candidates.len() < 2 * needed {
            let slot = &self.slots[index as usize];
            if slot.unfinished == 0 {
                idle = true;
                if slot.dirty_after.is_none_or(|begun| begun < self.flush_done) {
                    by_record[(index / self.slots_per_record) as usize] += 1;
                    candidates.push(index);
                }
            }
            index = slot.newer;
        }
        if candidates.is_empty() {
            self.exhausted = true;
            // While one runs already, its end is awaited first.
            self.wants_flush = idle && self.flush_begun == self.flush_done;
            return candidates;
        }
        let best =
            (0..by_record.len()).rev().max_by_key(|&record| by_record[record].min(needed)).unwrap_or(0);
        candidates.retain(|&index| (index / self.slots_per_record) as usize == best);
        candidates.truncate(needed);
        candidates
    }

    fn link_newest(&mut self, index: u32) {
        let before = std::mem::replace(&mut self.newest, index);
        let slot = &mut self.slots[index as usize];
        slot.older = before;
        slot.newer = NONE;
        match self.slots.get_mut(before as usize) {
            Some(before) => before.newer = index,
            None => self.oldest = index,
        }
    }

    fn unlink(&mut self, index: u32) {
        let Slot { older, newer, .. } = self.slots[index as usize];
        match self.slots.get_mut(older as usize) {
            Some(slot) => slot.newer = newer,
            None => self.oldest = newer,
        }
        match self.slots.get_mut(newer as usize) {
            Some(slot) => slot.older = older,
            None => self.newest = older,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    const EXTENTS: u32 = 24;

    #[derive(Clone, Debug)]
    enum Step {
        Begin(u32),
        Finish(usize),
        BatchDone,
        FlushBegin,
        FlushDone,
        DropWaiters,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0..EXTENTS).prop_map(Step::Begin),
            6 => any::<usize>().prop_map(Step::Finish),
            3 => Just(Step::BatchDone),
            1 => Just(Step::FlushBegin),
            2 => Just(Step::FlushDone),
            1 => Just(Step::DropWaiters),
        ]
    }

    /// Says, naively, what is on disk and what is not flushed, and checks every rule as things happen.
    struct Harness {
        log: ActivityLog,
        on_disk: Vec<Option<ExtentId>>,
        batch: Option<Vec<LogEntry>>,
        /// Changes at the disk, and those waiting.
        running: Vec<(u32, ExtentId)>,
        waiting: BTreeMap<u32, ExtentId>,
        /// Extents with finished changes that no flush covers, and those that the running flush is about to cover.
        unflushed: BTreeSet<ExtentId>,
        flushing: Option<BTreeSet<ExtentId>>,
        next_job: u32,
    }

    impl Harness {
        fn new(slots: u32, per_record: u32, entries: &[LogEntry]) -> Self {
            let mut on_disk = vec![None; slots as usize];
            entries.iter().for_each(|entry| on_disk[entry.slot as usize] = entry.extent);
            Self {
                log: ActivityLog::new(slots, per_record, EXTENTS as usize, entries),
                unflushed: on_disk.iter().copied().flatten().collect(),
                on_disk,
                batch: None,
                running: Vec::new(),
                waiting: BTreeMap::new(),
                flushing: None,
                next_job: 0,
            }
        }

        fn start(&mut self, job: u32, extent: ExtentId) {
            assert!(self.on_disk.contains(&Some(extent)), "a change of {extent} runs outside the log");
            self.running.push((job, extent));
        }

        fn apply(&mut self, step: &Step) {
            match *step {
                Step::Begin(extent) => {
                    let extent = ExtentId(extent);
                    let job = self.next_job;
                    self.next_job += 1;
                    let settled = self.on_disk.contains(&Some(extent))
                        && !self.batch.iter().flatten().any(|entry| {
                            entry.extent == Some(extent) || self.on_disk[entry.slot as usize] == Some(extent)
                        });
                    let went = self.log.begin(extent, job);
                    assert_eq!(went, settled, "an extent in the log never waits, another always does");
                    if went {
                        self.start(job, extent);
                    } else {
                        self.waiting.insert(job, extent);
                    }
                }
                Step::Finish(pick) if !self.running.is_empty() => {
                    let (_, extent) = self.running.swap_remove(pick % self.running.len());
                    self.unflushed.insert(extent);
                    self.log.finish(extent);
                }
                Step::BatchDone => {
                    let Some(batch) = self.batch.take() else { return };
                    for entry in batch {
                        self.on_disk[entry.slot as usize] = entry.extent;
                    }
                    let mut released = Vec::new();
                    self.log.batch_durable(&mut released);
                    for job in released {
                        let extent = self.waiting.remove(&job).unwrap();
                        self.start(job, extent);
                    }
                }
                Step::FlushBegin if self.flushing.is_none() => self.flush(),
                Step::FlushDone if self.flushing.is_some() => {
                    // What finished while it ran is in `unflushed` already.
                    self.flushing = None;
                    self.log.flush_finished();
                }
                Step::DropWaiters => {
                    self.waiting.clear();
                    self.log.drop_waiters();
                }
                Step::Finish(_) | Step::FlushBegin | Step::FlushDone => {}
            }
            if let Some(entries) = self.log.next_batch() {
                assert!(self.batch.is_none() && !entries.is_empty());
                let record = |slot| slot / self.log.slots_per_record;
                assert!(
                    entries.iter().all(|e| record(e.slot) == record(entries[0].slot)),
                    "one record a batch"
                );
                for entry in &entries {
                    // From here on the disk may hold either the old entry or the new one.
                    let Some(old) = self.on_disk[entry.slot as usize] else { continue };
                    let dirty = self.unflushed.contains(&old)
                        || self.flushing.as_ref().is_some_and(|set| set.contains(&old))
                        || self.running.iter().any(|&(_, extent)| extent == old);
                    assert!(!dirty, "extent {old} left with changes not flushed");
                }
                self.batch = Some(entries);
            }
            if self.log.wants_flush() && self.flushing.is_none() {
                self.flush();
            }
        }

        fn flush(&mut self) {
            self.flushing = Some(std::mem::take(&mut self.unflushed));
            self.log.flush_began();
        }

        fn settle(&mut self) {
            // Enough rounds for every waiting extent to have a batch and a flush of its own.
            for _ in 0..4 * EXTENTS {
                while !self.running.is_empty() {
                    self.apply(&Step::Finish(0));
                }
                self.apply(&Step::FlushDone);
                self.apply(&Step::BatchDone);
            }
            assert!(self.waiting.is_empty(), "starved: {:?}", self.waiting);
        }
    }

    proptest! {
        #[test]
        fn never_outside_the_log_and_never_starved(
            slots in 1..9_u32,
            per_record in 1..5_u32,
            old in proptest::collection::vec(proptest::option::of(0..EXTENTS), 0..3),
            steps in proptest::collection::vec(step(), 0..300),
        ) {
            let mut seen = BTreeSet::new();
            let entries: Vec<_> = (0..slots)
                .zip(old)
                .filter(|(_, extent)| extent.is_none_or(|extent| seen.insert(extent)))
                .map(|(slot, extent)| LogEntry { slot, extent: extent.map(ExtentId) })
                .collect();
            let mut harness = Harness::new(slots, per_record, &entries);
            steps.iter().for_each(|step| harness.apply(step));
            harness.settle();
        }
    }

    #[test]
    fn a_batch_takes_all_that_gathered_while_another_was_written() {
        let mut log = ActivityLog::new(8, 4, EXTENTS as usize, &[]);
        let mut released = Vec::new();
        assert!(!log.begin(ExtentId(9), 0));
        assert_eq!(log.next_batch().unwrap(), [LogEntry { slot: 0, extent: Some(ExtentId(9)) }]);
        for job in 1..4 {
            assert!(!log.begin(ExtentId(job), job));
        }
        assert!(!log.begin(ExtentId(9), 4));
        assert_eq!(log.next_batch(), None);
        log.batch_durable(&mut released);
        assert_eq!(released, [0, 4]);
        assert!(log.holds(ExtentId(9)) && !log.holds(ExtentId(1)));
        assert_eq!(log.next_batch().unwrap().iter().map(|e| e.slot).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(log.in_use(), 4);
    }

    #[test]
    fn the_least_recently_used_leaves_and_only_after_a_flush() {
        let mut log = ActivityLog::new(2, 2, EXTENTS as usize, &[]);
        let mut released = Vec::new();
        for extent in 0..2 {
            log.begin(ExtentId(extent), extent);
        }
        log.next_batch();
        log.batch_durable(&mut released);
        log.finish(ExtentId(0));
        log.finish(ExtentId(1));
        assert!(log.begin(ExtentId(0), 2));
        log.finish(ExtentId(0));
        log.begin(ExtentId(5), 3);
        assert_eq!(log.next_batch(), None);
        assert!(log.wants_flush());
        log.flush_began();
        assert!(!log.wants_flush());
        log.flush_finished();
        assert_eq!(log.next_batch().unwrap(), [LogEntry { slot: 1, extent: Some(ExtentId(5)) }]);
    }
}
