//! Space to give back, once that is safe.
//!
//! Invariants:
//! - A range is punched only after a sync that began when its zero contexts were already written: before that a power
//!   cut may bring back contexts that ask for the data.
//! - A block that is written again leaves the list before its data is submitted, and waits for a punch in progress. So
//!   no punch ever meets data that a context asks for.
//! - The list is bounded; what does not fit is not given back. It is forgotten at a restart.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use newel_protocol::{BLOCK_BYTES, BlockRange};

use super::layout::Layout;
use super::lock;
use super::storage::Storage;

/// About 200 KiB of memory; a guest trimming more pieces than this between two flushes gets some space back later, by
/// its next trim of them.
const MAX_RANGES: usize = 8192;

#[derive(Debug, Default)]
pub(crate) struct Punches {
    lists: Mutex<Lists>,
    /// How many ranges there are in all: what a write looks at first.
    count: AtomicUsize,
    unsupported: AtomicBool,
}

#[derive(Debug, Default)]
struct Lists {
    /// Zeroed since the last sync began.
    fresh: VecDeque<BlockRange>,
    /// Zeroed before it.
    ripe: VecDeque<BlockRange>,
}

impl Punches {
    /// Notes a range whose zero contexts have been written.
    pub(crate) fn add(&self, range: BlockRange) {
        if self.unsupported.load(Ordering::Relaxed) {
            return;
        }
        let mut lists = lock(&self.lists);
        if lists.fresh.len() + lists.ripe.len() < MAX_RANGES {
            lists.fresh.push_back(range);
            self.publish(&lists);
        }
    }

    /// A sync begins: it will cover what was added before.
    pub(crate) fn ripen(&self) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let Lists { fresh, ripe } = &mut *lock(&self.lists);
        ripe.append(fresh);
    }

    /// These blocks are about to be written.
    pub(crate) fn cancel(&self, range: BlockRange) {
        // Nothing can be added for these blocks meanwhile: the core runs one change to a block at a time.
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut lists = lock(&self.lists);
        for list in [0, 1] {
            let list = if list == 0 { &mut lists.fresh } else { &mut lists.ripe };
            if list.iter().any(|held| held.overlaps(range)) {
                *list = list.iter().flat_map(|&held| without(held, range)).collect();
            }
        }
        self.publish(&lists);
    }

    /// The sync is done: gives back what was ripe, one range at a time so that a write waits for one at most.
    pub(crate) fn run<S: Storage>(&self, storage: &S, layout: &Layout) {
        while self.count.load(Ordering::SeqCst) > 0 {
            let mut lists = lock(&self.lists);
            let Some(range) = lists.ripe.pop_front() else { return };
            let bytes = u64::from(range.count) * BLOCK_BYTES as u64;
            // Whatever happens to it, the contexts say zeros; without support there is no point in asking again.
            if storage.punch(layout.block_offset(range.start), bytes).is_err() {
                self.unsupported.store(true, Ordering::Relaxed);
                *lists = Lists::default();
            }
            self.publish(&lists);
        }
    }

    fn publish(&self, lists: &Lists) {
        self.count.store(lists.fresh.len() + lists.ripe.len(), Ordering::SeqCst);
    }
}

/// What is left of `held` outside `range`; pieces of an extent's range stay within the extent.
fn without(held: BlockRange, range: BlockRange) -> impl Iterator<Item = BlockRange> {
    let piece = |start: u64, end: u64| {
        let count = u32::try_from(end.saturating_sub(start)).unwrap_or(0);
        (count > 0).then(|| BlockRange::new(start, count))
    };
    let before = piece(held.start, held.end().min(range.start));
    let after = piece(held.start.max(range.end()), held.end());
    before.into_iter().chain(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_block_is_never_punched() {
        let check = |held: (u64, u32), cut: (u64, u32), left: &[(u64, u32)]| {
            let found: Vec<_> =
                without(BlockRange::new(held.0, held.1), BlockRange::new(cut.0, cut.1)).collect();
            let left: Vec<_> = left.iter().map(|&(start, count)| BlockRange::new(start, count)).collect();
            assert_eq!(found, left);
        };
        check((10, 10), (12, 3), &[(10, 2), (15, 5)]);
        check((10, 10), (10, 3), &[(13, 7)]);
        check((10, 10), (5, 8), &[(13, 7)]);
        check((10, 10), (18, 9), &[(10, 8)]);
        check((10, 10), (0, 100), &[]);
        check((10, 10), (30, 1), &[(10, 10)]);
    }

    #[test]
    fn ranges_wait_for_a_sync_and_stay_bounded() {
        let punches = Punches::default();
        let memory = crate::disk::mem::MemStorage::new(8 << 20);
        let layout = Layout::new(1024, 512).unwrap();
        punches.add(BlockRange::new(0, 4));
        punches.run(&memory, &layout);
        assert_eq!(punches.count.load(Ordering::SeqCst), 1);
        punches.ripen();
        punches.run(&memory, &layout);
        assert_eq!(punches.count.load(Ordering::SeqCst), 0);
        for block in 0..2 * MAX_RANGES as u64 {
            punches.add(BlockRange::single(block));
        }
        assert_eq!(punches.count.load(Ordering::SeqCst), MAX_RANGES);
        punches.cancel(BlockRange::new(0, 1024));
        assert_eq!(punches.count.load(Ordering::SeqCst), MAX_RANGES - 1024);
    }
}
