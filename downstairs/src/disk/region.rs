//! A region that is open: header, activity log, flushed mark and digests, over any [`Storage`].
//!
//! Invariants:
//! - The header and log in memory are what the newest valid copies on disk say. A copy is written over the older one,
//!   durably, and takes effect in memory only afterwards.
//! - A failed sync, or a failed write of metadata, is final: the region refuses everything that changes it from then
//!   on, so nothing is ever called durable that may not be.
//! - The flushed mark rises only after a sync that covered everything below it. The header holds it before anything relies on
//!   that ([`super::mark`]).
//! - The digest of an extent is that of the latest contexts of its blocks.
//!
//! Left to others: how blocks change ([`super::change`]), reads ([`super::read`]), what opening does
//! ([`super::open`]), and that changes to one block never run at once (the core).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use newel_protocol::{BLOCK_BYTES, BlockRange, BlockState, ExtentId, Generation, Version};

use super::cache::PairCache;
use super::context::{Context, EPOCH_MASK, ExtentDigest, PAIR_BYTES, Pair, decode_pairs};
use super::error::disk_error;
use super::format::{Header, LOG_SLOTS_PER_RECORD, LogRecord, Page};
use super::layout::{Layout, header_offset};
use super::lock;
use super::mark::Mark;
use super::punch::Punches;
use super::storage::Storage;
use crate::core::api::{DiskError, HeaderChange, LogEntry};

/// A page of which two copies are kept, written in turns.
#[derive(Debug)]
pub(crate) struct Twin<T> {
    pub(crate) value: T,
    /// The copy that holds `value`.
    pub(crate) newest: usize,
}

#[derive(Debug)]
pub struct RegionCore<S> {
    pub(crate) storage: S,
    pub(crate) layout: Layout,
    /// The path, for messages.
    pub(crate) name: String,
    pub(crate) header: Mutex<Twin<Header>>,
    pub(crate) log: Mutex<Vec<Twin<LogRecord>>>,
    /// Apart from the header, so that a write never waits for a header being written.
    pub(crate) mark: Mutex<Mark>,
    /// The header's, likewise.
    pub(crate) promised: AtomicU32,
    pub(crate) pairs: PairCache,
    pub(crate) digests: Vec<ExtentDigest>,
    pub(crate) copying: Copying,
    pub(crate) punches: Punches,
    pub(crate) failed: OnceLock<DiskError>,
    /// Syncs of the whole medium since it was opened.
    pub(crate) syncs: AtomicU64,
}

/// Copies (`Store`) carry old versions, of which the flushed mark says nothing. So the header says durably, before the
/// first of them, that an epoch of copying is on; the first flush with no copy under way ends it.
#[derive(Debug)]
pub(crate) struct Copying {
    /// The epoch that is on, as contexts hold it; [`NOT_COPYING`] if none is.
    epoch: AtomicU32,
    planned: AtomicU64,
    ended: AtomicU64,
}

const NOT_COPYING: u32 = u32::MAX;

impl Copying {
    pub(crate) fn new(header: &Header) -> Self {
        let epoch = if header.copying { header.copy_epoch & u32::from(EPOCH_MASK) } else { NOT_COPYING };
        Self { epoch: AtomicU32::new(epoch), planned: AtomicU64::new(0), ended: AtomicU64::new(0) }
    }

    /// A planned copy was finished or given up.
    pub(crate) fn end_one(&self) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// Which copies of the header a change goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// For the flushed mark: should this copy be lost, an older mark is a cautious one.
    Older,
    /// For promises and membership: losing one would let an old upstairs in.
    Both,
}

impl<S: Storage> RegionCore<S> {
    pub fn layout(&self) -> Layout {
        self.layout
    }

    pub fn header(&self) -> Header {
        lock(&self.header).value.clone()
    }

    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// A power cut can't take what is at or below it.
    pub fn flushed_mark(&self) -> Version {
        lock(&self.mark).synced
    }

    /// No context can be of a later generation: a promise is durable before its first write.
    pub(crate) fn newest_generation(&self) -> Generation {
        Generation(self.promised.load(Ordering::Acquire))
    }

    pub fn digests(&self, first: ExtentId, count: u32) -> Vec<u64> {
        let from = first.0 as usize;
        let digests = self.digests.get(from..).unwrap_or_default();
        digests.iter().take(count as usize).map(ExtentDigest::value).collect()
    }

    /// How often everything was synced, which many flushes may share.
    pub fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::Relaxed)
    }

    /// The error that put this region out of service, if one did.
    pub fn failure(&self) -> Option<DiskError> {
        self.failed.get().cloned()
    }

    pub(crate) fn check_alive(&self) -> Result<(), DiskError> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Puts the region out of service; the first reason stays.
    pub(crate) fn fail(&self, error: DiskError) -> DiskError {
        self.failed.get_or_init(|| error).clone()
    }

    pub(crate) fn error(
        &self,
        operation: &'static str,
        place: &dyn std::fmt::Display,
        error: &std::io::Error,
    ) -> DiskError {
        disk_error(operation, &format_args!("{}, {place}", self.name), error)
    }

    /// Refuses what the core should have refused already: nothing of a peer's may reach past the region.
    pub(crate) fn check_range(&self, range: BlockRange) -> Result<(), DiskError> {
        if range.is_valid(self.layout.blocks) {
            return Ok(());
        }
        let message = format!(
            "{}: blocks {range} are outside its {} blocks or cross an extent",
            self.name, self.layout.blocks
        );
        Err(DiskError::Io { operation: "an access", message })
    }

    pub(crate) fn read_pairs(&self, range: BlockRange) -> Result<Vec<Pair>, DiskError> {
        self.pairs
            .read(&self.storage, &self.layout, range, self.newest_generation())
            .map_err(|error| self.error("reading contexts", &format_args!("blocks {range}"), &error))
    }

    /// Contexts as they lie in the table, past the cache: what rots below the cache is to be found, too.
    pub(crate) fn read_table(&self, range: BlockRange) -> Result<Vec<Pair>, DiskError> {
        let mut bytes = vec![0; range.count as usize * PAIR_BYTES];
        self.storage
            .read_cached(self.layout.context_offset(range.start), &mut bytes)
            .map_err(|error| self.error("reading contexts", &format_args!("blocks {range}"), &error))?;
        Ok(decode_pairs(range.start, &bytes, self.newest_generation()).map(|(_, pair)| pair).collect())
    }

    /// True if a power cut cannot take what this context says, for all that is known now.
    pub(crate) fn is_flushed(&self, context: &Context, mark: Version) -> bool {
        match context.copied {
            None => context.version <= mark,
            Some(epoch) => u32::from(epoch) != self.copying.epoch.load(Ordering::SeqCst),
        }
    }

    /// A copy is about to change blocks: the epoch that its contexts are to carry, durably in the header.
    pub(crate) fn begin_copy(&self) -> Result<u16, DiskError> {
        self.copying.planned.fetch_add(1, Ordering::SeqCst);
        let mut epoch = self.copying.epoch.load(Ordering::SeqCst);
        if epoch == NOT_COPYING {
            self.change_header(Copies::Older, |header| {
                if !header.copying {
                    header.copy_epoch = header.copy_epoch.wrapping_add(1);
                    header.copying = true;
                }
                epoch = header.copy_epoch & u32::from(EPOCH_MASK);
            })?;
            self.copying.epoch.store(epoch, Ordering::SeqCst);
        }
        Ok(u16::try_from(epoch).unwrap_or(EPOCH_MASK))
    }

    /// Makes everything written so far durable; the mark says so from then on, in the header if that has to be.
    pub fn flush(&self, mark: Option<Version>) -> Result<(), DiskError> {
        self.check_alive()?;
        let planned = self.copying.planned.load(Ordering::SeqCst);
        let all_ended = self.copying.ended.load(Ordering::SeqCst) == planned;
        self.punches.ripen();
        self.syncs.fetch_add(1, Ordering::Relaxed);
        self.storage.sync().map_err(|error| self.fail(self.error("fdatasync", &"all blocks", &error)))?;
        let owed = mark.is_some_and(|mark| lock(&self.mark).rise(mark));
        let copying = self.copying.epoch.load(Ordering::SeqCst) != NOT_COPYING;
        let ends = copying && all_ended;
        if !(owed || ends) {
            return Ok(());
        }
        self.change_header(Copies::Older, |header| {
            // A copy counts itself first and reads the epoch then; here it is the other way round. So either the copy
            // finds no epoch and waits for the header to begin one, or it is seen here and the epoch stays.
            let epoch = self.copying.epoch.swap(NOT_COPYING, Ordering::SeqCst);
            if all_ended && self.copying.planned.load(Ordering::SeqCst) == planned {
                header.copying = false;
            } else {
                self.copying.epoch.store(epoch, Ordering::SeqCst);
            }
        })
    }

    /// Puts the mark into the header, unless it is there.
    pub(crate) fn store_mark(&self) -> Result<(), DiskError> {
        if lock(&self.mark).is_stored() {
            return Ok(());
        }
        self.change_header(Copies::Older, |_| ())
    }

    /// Gives back the space of blocks whose zeros became durable with the last flush.
    pub fn punch_flushed(&self) {
        if self.failed.get().is_none() {
            self.punches.run(&self.storage, &self.layout);
        }
    }

    pub fn apply(&self, change: &HeaderChange) -> Result<(), DiskError> {
        self.check_alive()?;
        self.change_header(Copies::Both, |header| match change {
            HeaderChange::Promise { generation, upstairs } => {
                header.promised = *generation;
                header.promised_to = *upstairs;
            }
            HeaderChange::Activated { generation, membership } => {
                header.last_active = *generation;
                header.membership = *membership;
                header.lost_power = false;
            }
            HeaderChange::Claim { volume } => header.volume = *volume,
        })?;
        if let HeaderChange::Promise { generation, .. } = change {
            self.promised.store(generation.0, Ordering::Release);
        }
        Ok(())
    }

    /// The header is locked throughout: two changes must not take each other's copy. Whatever it is for, it carries the mark.
    pub(crate) fn change_header(
        &self,
        copies: Copies,
        change: impl FnOnce(&mut Header),
    ) -> Result<(), DiskError> {
        let mut twin = lock(&self.header);
        let mut header = twin.value.clone();
        change(&mut header);
        header.counter += 1;
        header.flushed = header.flushed.max(self.flushed_mark());
        let page = header.encode();
        let older = 1 - (twin.newest & 1);
        self.write_page("writing the header", header_offset(older), &page)?;
        lock(&self.mark).stored(header.flushed);
        twin.value = header;
        twin.newest = older;
        if copies == Copies::Both {
            self.write_page("writing the header", header_offset(1 - older), &page)?;
        }
        Ok(())
    }

    /// Puts entries of the activity log in force, durably; one write for each group of slots that changes.
    pub fn enter(&self, entries: &[LogEntry]) -> Result<(), DiskError> {
        self.check_alive()?;
        if !self.evicts(entries) {
            return self.write_entries(entries);
        }
        // Outside the log nothing is looked at after a crash.
        lock(&self.mark).evicts(true);
        self.store_mark()?;
        self.write_entries(entries)?;
        lock(&self.mark).evicts(false);
        Ok(())
    }

    fn write_entries(&self, entries: &[LogEntry]) -> Result<(), DiskError> {
        let mut log = lock(&self.log);
        for (index, twin) in (0_u32..).zip(log.iter_mut()) {
            let first = index * LOG_SLOTS_PER_RECORD;
            let group = first..first + LOG_SLOTS_PER_RECORD;
            let mut record = twin.value.clone();
            for entry in entries.iter().filter(|entry| group.contains(&entry.slot)) {
                if let Some(slot) = record.slots.get_mut((entry.slot - first) as usize) {
                    *slot = entry.extent;
                }
            }
            if record != twin.value {
                self.write_record(twin, record)?;
            }
        }
        let slots = self.layout.log_slots;
        match entries.iter().find(|entry| entry.slot >= slots) {
            None => Ok(()),
            Some(entry) => {
                let message = format!("{}: slot {} of an activity log of {slots}", self.name, entry.slot);
                Err(DiskError::Io { operation: "writing the activity log", message })
            }
        }
    }

    /// True if an extent leaves the log with these entries.
    fn evicts(&self, entries: &[LogEntry]) -> bool {
        let log = lock(&self.log);
        entries.iter().any(|entry| {
            let record = log.get((entry.slot / LOG_SLOTS_PER_RECORD) as usize);
            let slot =
                record.and_then(|twin| twin.value.slots.get((entry.slot % LOG_SLOTS_PER_RECORD) as usize));
            slot.is_some_and(|held| held.is_some() && *held != entry.extent)
        })
    }

    fn write_record(&self, twin: &mut Twin<LogRecord>, mut record: LogRecord) -> Result<(), DiskError> {
        record.counter += 1;
        let older = 1 - (twin.newest & 1);
        let offset = self.layout.log_record_offset(record.index, older);
        self.write_page("writing the activity log", offset, &record.encode())?;
        *twin = Twin { value: record, newest: older };
        Ok(())
    }

    fn write_page(&self, operation: &'static str, offset: u64, page: &Page) -> Result<(), DiskError> {
        self.storage
            .write_durable(offset, page)
            .map_err(|error| self.fail(self.error(operation, &format_args!("byte {offset}"), &error)))
    }

    /// Makes everything durable, empties the log and marks the region as closed cleanly; nothing changes it afterwards.
    pub fn close(&self) -> Result<(), DiskError> {
        self.flush(None)?;
        self.store_mark()?;
        self.empty_log()?;
        self.change_header(Copies::Both, |header| header.clean = true)?;
        let message = format!("{}: it is closed", self.name);
        self.fail(DiskError::Io { operation: "an access", message });
        Ok(())
    }

    pub(crate) fn empty_log(&self) -> Result<(), DiskError> {
        let mut log = lock(&self.log);
        for twin in log.iter_mut().filter(|twin| twin.value.slots.iter().any(Option::is_some)) {
            let record = LogRecord { counter: twin.value.counter, ..LogRecord::empty(twin.value.index) };
            self.write_record(twin, record)?;
        }
        Ok(())
    }

    /// The states of every block of an extent.
    pub fn extent_states(&self, extent: ExtentId) -> Result<Vec<BlockState>, DiskError> {
        let Some(range) = self.layout.extent_blocks(extent) else {
            let message = format!("{}: extent {extent} of {}", self.name, self.layout.extents());
            return Err(DiskError::Io { operation: "reading contexts", message });
        };
        let pairs = self.read_pairs(range)?;
        Ok(range.blocks().zip(&pairs).map(|(block, pair)| self.state_of(block, pair)).collect())
    }

    pub(crate) fn block_offset(&self, block: u64) -> u64 {
        self.layout.block_offset(block)
    }

    pub(crate) fn update_digest(&self, block: u64, old: &Context, new: &Context) {
        let extent = BlockRange::single(block).extent();
        if let Some(digest) = self.digests.get(extent.0 as usize) {
            digest.replace(block, old, new);
        }
    }
}

const _: () =
    assert!(BLOCK_BYTES == super::layout::PAGE_BYTES, "blocks are read and written with direct I/O");
