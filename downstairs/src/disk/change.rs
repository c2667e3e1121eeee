//! How blocks change: plan, write the data, finish.
//!
//! Invariants:
//! - A plan decides per block: a verified block that is newer than what comes keeps what it has.
//! - Contexts are written only after the data of all their blocks was written.
//! - latest := the new context; flushed := the old latest if a power cut can't take that, else flushed stays. An old
//!   latest that is unverified always becomes flushed: it matches no data, but carries the bound.
//! - Before a flushed version is replaced the header's mark covers it ([`super::mark`]).
//! - If the data could not be written, a block that had data becomes unverified, bound by the version it had: its
//!   content is that or newer, or a mixture. A block that read as zeros still does.
//!
//! Left to others: writing the data ([`super::pool`], [`super::execute`]).

use std::ops::Range;

use newel_protocol::crc::ZERO_BLOCK_CRC;
use newel_protocol::wire::{StoredBlock, ZeroMode};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, EXTENT_BLOCKS, Version};

use super::context::{Context, ContextKind, MAX_SEQUENCE, PAIR_BYTES, Pair};
use super::lock;
use super::region::RegionCore;
use super::storage::Storage;
use crate::core::api::DiskError;

/// Data to be written at its home place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub range: BlockRange,
    /// Its bytes within the operation's payload.
    pub bytes: Range<usize>,
}

/// A change of some blocks of one extent, between plan and end.
#[derive(Debug)]
pub struct Change {
    first: u64,
    /// What every block from `first` has now, and what it gets; `None` keeps what it has.
    blocks: Vec<(Pair, Option<Context>)>,
    pub pieces: Vec<Piece>,
    copied: Option<u16>,
    punch: bool,
}

impl Change {
    /// True if nothing changes.
    pub fn is_empty(&self) -> bool {
        self.blocks.iter().all(|(_, new)| new.is_none())
    }

    fn changed(&self) -> impl Iterator<Item = (u64, &Pair, Context)> {
        (self.first..).zip(&self.blocks).filter_map(|(block, (old, new))| new.map(|new| (block, old, new)))
    }

    /// Consecutive data blocks, as few pieces as there are gaps.
    fn add_data(&mut self, block: u64, at: usize) {
        let bytes = at..at + BLOCK_BYTES;
        match self.pieces.last_mut() {
            Some(last) if last.range.end() == block && last.bytes.end == at => {
                last.range.count += 1;
                last.bytes.end = bytes.end;
            }
            Some(_) | None => self.pieces.push(Piece { range: BlockRange::single(block), bytes }),
        }
    }
}

impl<S: Storage> RegionCore<S> {
    pub fn plan_write(
        &self,
        range: BlockRange,
        version: Version,
        crcs: &[u32],
        data_bytes: usize,
    ) -> Result<Change, DiskError> {
        self.check_change(range, version)?;
        if crcs.len() != range.count as usize || data_bytes != range.bytes() {
            return Err(self.shape_error(range, crcs.len(), data_bytes));
        }
        self.punches.cancel(range);
        let pairs = self.read_pairs(range)?;
        let mut change = self.change(range.start, pairs.len());
        for ((block, pair), &crc) in range.blocks().zip(pairs).zip(crcs) {
            let new = accepts(&pair, version).then(|| Context::data(version, crc));
            change.blocks.push((pair, new));
            if new.is_some() {
                // The offset fits: data_bytes was checked against the range.
                change.add_data(block, BLOCK_BYTES * usize::try_from(block - range.start).unwrap_or(0));
            }
        }
        self.keep_mark(&change)?;
        Ok(change)
    }

    /// Zeros. With `Allocate` the pieces ask for zeros as data, of the range's length.
    pub fn plan_zero(
        &self,
        range: BlockRange,
        version: Version,
        mode: ZeroMode,
    ) -> Result<Change, DiskError> {
        self.check_change(range, version)?;
        if mode == ZeroMode::Allocate {
            return self.plan_write(
                range,
                version,
                &vec![ZERO_BLOCK_CRC; range.count as usize],
                range.bytes(),
            );
        }
        self.punches.cancel(range);
        let pairs = self.read_pairs(range)?;
        let mut change = self.change(range.start, pairs.len());
        change.punch = mode == ZeroMode::Punch;
        change.blocks.extend(pairs.into_iter().map(|pair| {
            let new = accepts(&pair, version).then(|| Context::zero(version));
            (pair, new)
        }));
        self.keep_mark(&change)?;
        Ok(change)
    }

    /// Copies of blocks under their own versions; a block that is verified and at or above both `join` and the version
    /// that comes stays.
    pub fn plan_store(
        &self,
        blocks: &[StoredBlock],
        join: Version,
        data_bytes: usize,
    ) -> Result<Change, DiskError> {
        let span = self.check_store(blocks, data_bytes)?;
        let pairs = self.read_pairs(span)?;
        let mut change = self.change(span.start, pairs.len());
        let epoch = self.begin_copy()?;
        change.copied = Some(epoch);
        change.blocks.extend(pairs.into_iter().map(|pair| (pair, None)));
        let mut at = 0;
        for stored in blocks {
            self.punches.cancel(BlockRange::single(stored.block));
            let is_data = stored.state.kind == BlockKind::Data;
            let index = usize::try_from(stored.block - span.start).unwrap_or(usize::MAX);
            if let Some((pair, new)) = change.blocks.get_mut(index)
                && !(pair.latest.is_verified() && pair.latest.version >= join.max(stored.state.version))
            {
                let mut context = match stored.state.kind {
                    BlockKind::Zero => Context::zero(stored.state.version),
                    // Unreadable: nobody has the data any more. The context alone sees to it that what lies here, which
                    // is older, is never taken for it.
                    BlockKind::Data | BlockKind::Unverified | BlockKind::Unreadable => {
                        Context::data(stored.state.version, stored.state.crc)
                    }
                };
                context.copied = (context != Context::NEVER).then_some(epoch);
                *new = Some(context);
                if is_data {
                    change.add_data(stored.block, at);
                }
            }
            at += if is_data { BLOCK_BYTES } else { 0 };
        }
        self.keep_mark(&change)?;
        Ok(change)
    }

    /// Flushed data are about to be replaced: should what comes tear, the mark is what tells that they were there.
    fn keep_mark(&self, change: &Change) -> Result<(), DiskError> {
        let replaced = change.changed().map(|(_, old, _)| &old.latest);
        let replaced = replaced.filter(|old| old.kind == ContextKind::Data && old.copied.is_none());
        let needed = lock(&self.mark).replace(replaced.map(|old| old.version));
        if needed { self.store_mark() } else { Ok(()) }
    }

    /// Writes the contexts of these changes, in as few calls as there are gaps between blocks. Their data was written, or was
    /// handed to the kernel, which carries it out even if this process dies. Each of them needs [`Self::end`] or
    /// [`Self::revert`] once its data has ended.
    pub fn finish(&self, changes: &[&Change]) -> Result<(), DiskError> {
        self.check_alive()?;
        let mark = self.flushed_mark();
        let mut updates = Vec::with_capacity(changes.iter().map(|change| change.blocks.len()).sum());
        for (block, old, new) in changes.iter().flat_map(|change| change.changed()) {
            updates.push((block, *old, Pair { flushed: self.next_flushed(old, mark), latest: new }));
        }
        self.write_pairs(&mut updates)?;
        for change in changes.iter().filter(|change| change.punch) {
            for range in change_runs(change) {
                self.punches.add(range);
            }
        }
        Ok(())
    }

    /// The data and the contexts of this change are written.
    pub fn end(&self, change: &Change) {
        // Only now: a sync that began before does not cover it.
        if change.copied.is_some() {
            self.copying.end_one();
        }
    }

    /// The data of this change could not be written, or only in part; its contexts were not written.
    pub fn abort(&self, change: &Change) -> Result<(), DiskError> {
        self.give_up(change, false)
    }

    /// The data of this change could not be written, or only in part; its contexts were.
    pub fn revert(&self, change: &Change) -> Result<(), DiskError> {
        self.give_up(change, true)
    }

    fn give_up(&self, change: &Change, finished: bool) -> Result<(), DiskError> {
        self.check_alive()?;
        let mark = self.flushed_mark();
        let mut updates = Vec::new();
        for (block, old, new) in change.changed() {
            let is_now =
                if finished { Pair { flushed: self.next_flushed(old, mark), latest: new } } else { *old };
            let after = if new.has_data() && old.latest.has_data() {
                let latest = Context { copied: old.latest.copied, ..Context::unverified(old.latest.version) };
                let flushed = if self.is_flushed(&old.latest, mark) { latest } else { old.flushed };
                Pair { flushed, latest }
            } else {
                *old
            };
            if after != is_now {
                updates.push((block, is_now, after));
            }
        }
        self.write_pairs(&mut updates)?;
        self.end(change);
        Ok(())
    }

    fn next_flushed(&self, old: &Pair, mark: Version) -> Context {
        let flushed = match old.latest.kind {
            ContextKind::Unverified => true,
            ContextKind::Damaged => false,
            ContextKind::Never | ContextKind::Data | ContextKind::Zero => self.is_flushed(&old.latest, mark),
        };
        // What is flushed is flushed, however it came.
        if flushed { Context { copied: None, ..old.latest } } else { old.flushed }
    }

    /// Writes contexts through the cache and keeps the digests. Each entry: block, old, new.
    pub(crate) fn write_pairs(&self, updates: &mut [(u64, Pair, Pair)]) -> Result<(), DiskError> {
        updates.sort_unstable_by_key(|&(block, ..)| block);
        let mut bytes = vec![0; updates.len() * PAIR_BYTES];
        for ((block, _, new), place) in updates.iter().zip(bytes.as_chunks_mut().0) {
            new.encode(*block, place);
        }
        let mut rest: &[u8] = &bytes;
        let mut writes = Vec::with_capacity(updates.len());
        let mut firsts = Vec::with_capacity(updates.len());
        for run in updates.chunk_by(|(a, ..), (b, ..)| a + 1 == *b) {
            let Some(&(first, ..)) = run.first() else { continue };
            let Some((these, others)) = rest.split_at_checked(run.len() * PAIR_BYTES) else { break };
            writes.push((self.layout.context_offset(first), these));
            firsts.push(first);
            rest = others;
        }
        // A context that could not be written leaves data under a context that isn't theirs: that is final.
        self.storage.write_cached_many(&writes).map_err(|error| {
            let first = firsts.first().copied().unwrap_or_default();
            self.fail(self.error("writing contexts", &format_args!("block {first} and others"), &error))
        })?;
        for (first, (_, bytes)) in firsts.iter().zip(&writes) {
            self.pairs.wrote(*first, bytes);
        }
        for (block, old, new) in updates.iter() {
            self.update_digest(*block, &old.latest, &new.latest);
        }
        Ok(())
    }

    fn change(&self, first: u64, blocks: usize) -> Change {
        Change { first, blocks: Vec::with_capacity(blocks), pieces: Vec::new(), copied: None, punch: false }
    }

    fn check_change(&self, range: BlockRange, version: Version) -> Result<(), DiskError> {
        self.check_alive()?;
        self.check_range(range)?;
        if version.sequence > MAX_SEQUENCE {
            let message =
                format!("{}: version {version} is above the largest sequence {MAX_SEQUENCE}", self.name);
            return Err(DiskError::Io { operation: "a write", message });
        }
        Ok(())
    }

    /// The blocks from the first to the last one stored, if they make sense together.
    fn check_store(&self, blocks: &[StoredBlock], data_bytes: usize) -> Result<BlockRange, DiskError> {
        let ascending = blocks.is_sorted_by(|a, b| a.block < b.block);
        let first = blocks.first().map_or(0, |stored| stored.block);
        let last = blocks.last().map_or(0, |stored| stored.block);
        let data = blocks.iter().filter(|stored| stored.state.kind == BlockKind::Data).count();
        let kinds = blocks.iter().all(|stored| stored.state.kind != BlockKind::Unverified);
        let count =
            last.checked_sub(first).filter(|&gap| gap < u64::from(EXTENT_BLOCKS)).map_or(0, |gap| gap + 1);
        let span = BlockRange { start: first, count: u32::try_from(count).unwrap_or(0) };
        if blocks.is_empty() || !ascending || !kinds || data * BLOCK_BYTES != data_bytes {
            return Err(self.shape_error(span, data, data_bytes));
        }
        for stored in blocks {
            self.check_change(span, stored.state.version)?;
        }
        Ok(span)
    }

    fn shape_error(&self, range: BlockRange, blocks: usize, bytes: usize) -> DiskError {
        let message =
            format!("{}: blocks {range} came as {blocks} blocks with {bytes} bytes of data", self.name);
        DiskError::Io { operation: "a write", message }
    }
}

/// A block that is newer keeps what it has; the same version may come twice. An unverified block is at least as new as its
/// bound: an older write that is sent again, and then fails to be followed by the newer one, must not pass for it.
fn accepts(pair: &Pair, version: Version) -> bool {
    pair.latest.version <= version
}

/// The blocks that a change gives a new context, as ranges.
fn change_runs(change: &Change) -> Vec<BlockRange> {
    let mut runs: Vec<BlockRange> = Vec::new();
    for (block, ..) in change.changed() {
        match runs.last_mut() {
            Some(last) if last.end() == block => last.count += 1,
            Some(_) | None => runs.push(BlockRange::single(block)),
        }
    }
    runs
}
