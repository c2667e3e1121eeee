//! Pages of the context table that were used lately, so that looking up a context costs no system call.
//!
//! Invariants:
//! - Write-through: the table on disk is written first, then the page here, if it is here.
//! - A page is filled and changed under its lock. The core runs no two operations on one block at once, so a context is
//!   never looked up while it changes; its neighbours in the page may be.
//! - Bounded: each page of the table has one place, which it shares with others if the table is large.

use std::io;
use std::sync::Mutex;

use newel_protocol::{BlockRange, Generation};

use super::context::{PAIR_BYTES, Pair, decode_pairs};
use super::layout::{Layout, PAGE_BYTES};
use super::lock;
use super::storage::Storage;

/// 64 MiB, which holds the contexts of 8 GiB.
const MAX_PAGES: u64 = 16_384;
const PAIRS_PER_PAGE: u64 = (PAGE_BYTES / PAIR_BYTES) as u64;

#[derive(Debug)]
pub(crate) struct PairCache {
    places: Vec<Mutex<Place>>,
}

#[derive(Debug, Default)]
struct Place {
    /// Empty until it is first used.
    bytes: Vec<u8>,
    page: Option<u64>,
}

impl PairCache {
    pub(crate) fn new(layout: &Layout) -> Self {
        let pages = layout.blocks.div_ceil(PAIRS_PER_PAGE).min(MAX_PAGES);
        Self { places: (0..pages).map(|_| Mutex::default()).collect() }
    }

    fn place(&self, page: u64) -> Option<&Mutex<Place>> {
        self.places.get(usize::try_from(page % (self.places.len() as u64).max(1)).ok()?)
    }

    pub(crate) fn read<S: Storage>(
        &self,
        storage: &S,
        layout: &Layout,
        range: BlockRange,
        newest: Generation,
    ) -> io::Result<Vec<Pair>> {
        let mut pairs = Vec::with_capacity(range.count as usize);
        for page in range.start / PAIRS_PER_PAGE..=(range.end() - 1) / PAIRS_PER_PAGE {
            let Some(place) = self.place(page) else { return Err(io::ErrorKind::InvalidInput.into()) };
            let place = &mut *lock(place);
            if place.page != Some(page) {
                place.page = None;
                place.bytes.resize(PAGE_BYTES, 0);
                storage.read_cached(layout.context_offset(page * PAIRS_PER_PAGE), &mut place.bytes)?;
                place.page = Some(page);
            }
            take_pairs(place, page, range, newest, &mut pairs);
        }
        Ok(pairs)
    }

    /// The same without waiting for anything: `None` if a page is not here, or somebody is at it.
    pub(crate) fn read_now(&self, range: BlockRange, newest: Generation) -> Option<Vec<Pair>> {
        let mut pairs = Vec::with_capacity(range.count as usize);
        for page in range.start / PAIRS_PER_PAGE..=(range.end() - 1) / PAIRS_PER_PAGE {
            let place = self.place(page)?.try_lock().ok()?;
            if place.page != Some(page) {
                return None;
            }
            take_pairs(&place, page, range, newest, &mut pairs);
        }
        Some(pairs)
    }

    /// These consecutive contexts were written.
    pub(crate) fn wrote(&self, first: u64, bytes: &[u8]) {
        let mut block = first;
        let mut rest = bytes;
        while !rest.is_empty() {
            let page = block / PAIRS_PER_PAGE;
            let room = PAGE_BYTES - within(block);
            let (now, later) = rest.split_at(room.min(rest.len()));
            if let Some(place) = self.place(page) {
                let mut place = lock(place);
                if place.page == Some(page)
                    && let Some(target) = place.bytes.get_mut(within(block)..within(block) + now.len())
                {
                    target.copy_from_slice(now);
                }
            }
            block = (page + 1) * PAIRS_PER_PAGE;
            rest = later;
        }
    }
}

/// Those of the range that lie in this page.
fn take_pairs(place: &Place, page: u64, range: BlockRange, newest: Generation, into: &mut Vec<Pair>) {
    let first = range.start.max(page * PAIRS_PER_PAGE);
    let end = range.end().min((page + 1) * PAIRS_PER_PAGE);
    let bytes = place.bytes.get(within(first)..).unwrap_or_default();
    let wanted = usize::try_from(end - first).unwrap_or(0);
    into.extend(decode_pairs(first, bytes, newest).take(wanted).map(|(_, pair)| pair));
}

/// Where in its page a block's pair lies.
fn within(block: u64) -> usize {
    usize::try_from(block % PAIRS_PER_PAGE).unwrap_or(0) * PAIR_BYTES
}

const _: () = assert!(PAGE_BYTES.is_multiple_of(PAIR_BYTES));

#[cfg(test)]
mod tests {
    use newel_protocol::Version;

    use super::*;
    use crate::disk::context::Context;
    use crate::disk::mem::MemStorage;

    #[test]
    fn it_says_what_the_table_says() {
        let layout = Layout::new(1000, 512).unwrap();
        let storage = MemStorage::new(usize::try_from(layout.total_bytes()).unwrap());
        let mut cache = PairCache::new(&layout);
        // Two places for eight pages.
        cache.places.truncate(2);
        for number in 0_u32..400 {
            let (first, count) = (u64::from(number) * 37 % 900, number % 90 + 1);
            let latest = Context::data(Version::new(Generation(1), 1 + u64::from(number)), number);
            let mut bytes = vec![0; count as usize * PAIR_BYTES];
            for (block, pair) in (first..).zip(bytes.as_chunks_mut().0) {
                Pair { flushed: Context::NEVER, latest }.encode(block, pair);
            }
            storage.write_cached(layout.context_offset(first), &bytes).unwrap();
            cache.wrote(first, &bytes);
            let mut table = vec![0; 1000 * PAIR_BYTES];
            storage.read_cached(layout.contexts_offset, &mut table).unwrap();
            let start = u64::from(number) * 11 % 700;
            let found =
                cache.read(&storage, &layout, BlockRange { start, count: 300 }, Generation(1)).unwrap();
            let skip = usize::try_from(start).unwrap();
            let expected: Vec<_> =
                decode_pairs(0, &table, Generation(1)).skip(skip).take(300).map(|(_, pair)| pair).collect();
            assert_eq!(found, expected, "{number}");
            let last = BlockRange { start: start + 299, count: 1 };
            assert_eq!(cache.read_now(last, Generation(1)).as_deref(), expected.get(299..));
            // Two places: a range of more pages than that is never here as a whole.
            assert_eq!(cache.read_now(BlockRange { start, count: 400 }, Generation(1)), None);
        }
    }
}
