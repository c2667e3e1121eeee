//! Opening a region: which copies count, what has to be verified, and the digests.
//!
//! Invariants:
//! - The newest valid header counts; with none the region is refused, saying why for both copies.
//! - Unless the region was closed cleanly, exactly the extents in the activity log are verified. A record without a
//!   valid copy may have held any extent, so then the whole region is.
//! - What verification found is durable before anything else changes, so that a second crash starts from it.
//! - The region is marked as in use, under this boot of the host, before it is handed out.
//!
//! Left to others: locking the file, threads, progress ([`super::file`]).

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use newel_protocol::wire::Membership;
use newel_protocol::{EXTENT_BLOCKS, ExtentId, Generation, Version};
use uuid::Uuid;

use super::cache::PairCache;
use super::context::{ExtentDigest, PAIR_BYTES, digest_of_pairs};
use super::error::RegionError;
use super::format::{FORMAT_VERSION, Header, LOG_SLOTS_PER_RECORD, LogRecord, Page, PageFault};
use super::layout::{Layout, PAGE_BYTES, header_offset};
use super::lock;
use super::mark::Mark;
use super::punch::Punches;
use super::region::{Copies, Copying, RegionCore, Twin};
use super::storage::Storage;
use super::verify::Verified;
use crate::core::api::{DiskError, LogEntry, RegionFacts};

/// Calls the function for every number below the count, in any order, maybe on several threads, and stops at an error.
pub type Runner<'a> = &'a dyn Fn(
    &'static str,
    u32,
    &(dyn Fn(u32) -> Result<(), RegionError> + Sync),
) -> Result<(), RegionError>;

/// The plain [`Runner`]: one after the other.
pub fn in_turn(
    _what: &'static str,
    count: u32,
    task: &(dyn Fn(u32) -> Result<(), RegionError> + Sync),
) -> Result<(), RegionError> {
    (0..count).try_for_each(task)
}

/// What opening found, for the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenReport {
    pub verified_extents: u32,
    pub blocks: Verified,
    /// A header copy that isn't valid.
    pub bad_header: Option<PageFault>,
    /// Activity-log records without a valid copy.
    pub lost_records: u32,
}

/// Extents whose contexts are read at once for their digests: 2 MiB.
const DIGEST_CHUNK_EXTENTS: u32 = 64;

/// Writes an empty log and the headers of a new region, durably and the headers last. The context table and the data
/// must be zeros, or hole, already.
pub fn format_on<S: Storage>(storage: &S, layout: Layout, region: Uuid, volume: Uuid) -> io::Result<Header> {
    for record in 0..layout.log_records() {
        for copy in [0, 1] {
            storage
                .write_durable(layout.log_record_offset(record, copy), &LogRecord::empty(record).encode())?;
        }
    }
    storage.sync()?;
    let header = Header {
        counter: 1,
        region,
        volume,
        layout,
        promised: Generation(0),
        promised_to: Uuid::nil(),
        last_active: Generation(0),
        membership: Membership::default(),
        flushed: Version::NEVER,
        boot_id: Uuid::nil(),
        clean: true,
        copy_epoch: 0,
        copying: false,
        lost_power: false,
    };
    for copy in [0, 1] {
        storage.write_durable(header_offset(copy), &header.encode())?;
    }
    Ok(header)
}

impl<S: Storage> RegionCore<S> {
    pub fn open_on(
        storage: S,
        name: &str,
        boot_id: Uuid,
        run: Runner<'_>,
    ) -> Result<(Self, RegionFacts, OpenReport), RegionError> {
        let (region, mut report) = Self::load(storage, name)?;
        let header = region.header();
        let lost_power = !header.clean && header.boot_id != boot_id;
        if !header.clean {
            region.verify_logged(lost_power, &mut report, run)?;
        }
        region.scan_digests(run)?;
        let in_use = |header: &mut Header| {
            header.boot_id = boot_id;
            header.clean = false;
            header.lost_power |= lost_power;
        };
        region.change_header(Copies::Both, in_use).map_err(|error| region.as_region_error(&error))?;
        let facts = region.facts();
        Ok((region, facts, report))
    }

    /// Reads header and log and changes nothing: digests are not known yet.
    pub(crate) fn load(storage: S, name: &str) -> Result<(Self, OpenReport), RegionError> {
        let mut report = OpenReport::default();
        let header = load_header(&storage, name, &mut report)?;
        let layout = header.value.layout;
        let log = load_log(&storage, &layout, &mut report);
        let copying = Copying::new(&header.value);
        let region = Self {
            storage,
            layout,
            name: name.to_owned(),
            mark: Mutex::new(Mark::new(header.value.flushed)),
            promised: AtomicU32::new(header.value.promised.0),
            header: Mutex::new(header),
            log: Mutex::new(log),
            digests: (0..layout.extents()).map(|_| ExtentDigest::default()).collect(),
            copying,
            pairs: PairCache::new(&layout),
            punches: Punches::default(),
            failed: OnceLock::new(),
            syncs: AtomicU64::new(0),
        };
        Ok((region, report))
    }

    fn verify_logged(
        &self,
        lost_power: bool,
        report: &mut OpenReport,
        run: Runner<'_>,
    ) -> Result<(), RegionError> {
        let extents: Vec<ExtentId> = if report.lost_records > 0 {
            (0..self.layout.extents()).map(ExtentId).collect()
        } else {
            self.logged_extents().into_iter().collect()
        };
        let total = Mutex::new(Verified::default());
        let count = u32::try_from(extents.len()).unwrap_or(u32::MAX);
        run("verifying", count, &|index| {
            let Some(&extent) = extents.get(index as usize) else { return Ok(()) };
            let found =
                self.verify_extent(extent, lost_power).map_err(|error| self.as_region_error(&error))?;
            let mut total = lock(&total);
            total.went_back += found.went_back;
            total.unverified += found.unverified;
            total.unreadable += found.unreadable;
            Ok(())
        })?;
        report.blocks = total.into_inner().unwrap_or_default();
        report.verified_extents = count;
        self.flush(None).map_err(|error| self.as_region_error(&error))?;
        // What is there now is durable, which no mark says. Nothing else changes contexts yet, so one more sync is enough.
        let settled = AtomicBool::new(false);
        run("settling", count, &|index| {
            let Some(&extent) = extents.get(index as usize) else { return Ok(()) };
            let changed = self.settle_extent(extent).map_err(|error| self.as_region_error(&error))?;
            settled.fetch_or(changed, Ordering::Relaxed);
            Ok(())
        })?;
        if settled.into_inner() {
            self.flush(None).map_err(|error| self.as_region_error(&error))?;
        }
        if report.lost_records > 0 {
            // Everything was verified and is durable: the lost records start anew.
            self.rewrite_log().map_err(|error| self.as_region_error(&error))?;
        }
        Ok(())
    }

    /// The extents that the log holds.
    pub(crate) fn logged_extents(&self) -> BTreeSet<ExtentId> {
        let log = lock(&self.log);
        log.iter().flat_map(|twin| twin.value.slots.iter().flatten().copied()).collect()
    }

    fn rewrite_log(&self) -> Result<(), DiskError> {
        for twin in lock(&self.log).iter() {
            let record = &twin.value;
            for copy in [0, 1] {
                let offset = self.layout.log_record_offset(record.index, copy);
                self.storage.write_durable(offset, &record.encode()).map_err(|error| {
                    self.fail(self.error("writing the activity log", &format_args!("byte {offset}"), &error))
                })?;
            }
        }
        Ok(())
    }

    pub(crate) fn scan_digests(&self, run: Runner<'_>) -> Result<(), RegionError> {
        let chunks = self.layout.extents().div_ceil(DIGEST_CHUNK_EXTENTS);
        run("reading contexts", chunks, &|chunk| {
            let first = ExtentId(chunk * DIGEST_CHUNK_EXTENTS).first_block();
            let blocks =
                u64::from(DIGEST_CHUNK_EXTENTS * EXTENT_BLOCKS).min(self.layout.blocks.saturating_sub(first));
            let offset = self.layout.context_offset(first);
            let bytes = blocks * PAIR_BYTES as u64;
            if self.storage.is_hole(offset, bytes) {
                return Ok(());
            }
            let mut pairs = vec![0; usize::try_from(bytes).unwrap_or(0)];
            self.storage
                .read_cached(offset, &mut pairs)
                .map_err(|error| RegionError::io("read the context table", &self.name, error))?;
            let per_extent = EXTENT_BLOCKS as usize * PAIR_BYTES;
            for (extent, pairs) in (chunk * DIGEST_CHUNK_EXTENTS..).zip(pairs.chunks(per_extent)) {
                if let Some(digest) = self.digests.get(extent as usize) {
                    digest.set(&digest_of_pairs(
                        ExtentId(extent).first_block(),
                        pairs,
                        self.newest_generation(),
                    ));
                }
            }
            Ok(())
        })
    }

    fn facts(&self) -> RegionFacts {
        let header = self.header();
        let log = lock(&self.log);
        let slots = log.iter().flat_map(|twin| twin.value.slots.iter());
        let entries = (0..).zip(slots).filter(|(_, extent)| extent.is_some());
        RegionFacts {
            region: header.region,
            volume: header.volume,
            blocks: self.layout.blocks,
            promised: header.promised,
            promised_to: header.promised_to,
            last_active: header.last_active,
            membership: header.membership,
            lost_power: header.lost_power,
            log_slots: self.layout.log_slots,
            log_slots_per_record: LOG_SLOTS_PER_RECORD,
            log_entries: entries.map(|(slot, &extent)| LogEntry { slot, extent }).collect(),
        }
    }

    pub(crate) fn as_region_error(&self, error: &DiskError) -> RegionError {
        RegionError::Io {
            operation: "open it",
            path: self.name.clone(),
            source: io::Error::other(error.clone()),
        }
    }
}

fn read_page<S: Storage>(storage: &S, offset: u64) -> Result<Page, PageFault> {
    let mut page = [0; PAGE_BYTES];
    match storage.read_cached(offset, &mut page) {
        Ok(()) => Ok(page),
        Err(error) => Err(PageFault::Unreadable { message: error.to_string() }),
    }
}

fn load_header<S: Storage>(
    storage: &S,
    name: &str,
    report: &mut OpenReport,
) -> Result<Twin<Header>, RegionError> {
    let size = storage.size_bytes().map_err(|error| RegionError::io("find its size", name, error))?;
    let read = |copy| read_page(storage, header_offset(copy)).and_then(|page| Header::decode(&page));
    let header = match (read(0), read(1)) {
        (Ok(a), Ok(b)) if b.counter > a.counter => Twin { value: b, newest: 1 },
        (Ok(a), Ok(_)) => Twin { value: a, newest: 0 },
        (Ok(value), Err(fault)) => {
            report.bad_header = Some(fault);
            Twin { value, newest: 0 }
        }
        (Err(fault), Ok(value)) => {
            report.bad_header = Some(fault);
            Twin { value, newest: 1 }
        }
        (Err(copy_a), Err(copy_b)) => return Err(no_header(name, size, copy_a, copy_b)),
    };
    let needed = header.value.layout.total_bytes();
    if size < needed {
        return Err(RegionError::Truncated {
            path: name.to_owned(),
            found: size,
            what: "its header",
            needed,
        });
    }
    Ok(header)
}

/// Both copies are unusable: says which of the causes it is.
fn no_header(name: &str, size: u64, copy_a: PageFault, copy_b: PageFault) -> RegionError {
    let path = name.to_owned();
    for fault in [&copy_a, &copy_b] {
        if let PageFault::Format { found } = fault {
            return RegionError::Newer { path, found: *found, known: FORMAT_VERSION };
        }
    }
    let foreign = |fault: &PageFault| matches!(fault, PageFault::Magic { .. } | PageFault::Unreadable { .. });
    let smallest = header_offset(1) + PAGE_BYTES as u64;
    if size < smallest {
        return RegionError::Truncated { path, found: size, what: "a region's header", needed: smallest };
    }
    let is_foreign = foreign(&copy_a) && foreign(&copy_b);
    let (copy_a, copy_b) = (Box::new(copy_a), Box::new(copy_b));
    if is_foreign {
        return RegionError::NotARegion { path, copy_a, copy_b };
    }
    RegionError::Damaged { path, copy_a, copy_b }
}

fn load_log<S: Storage>(storage: &S, layout: &Layout, report: &mut OpenReport) -> Vec<Twin<LogRecord>> {
    let read = |index, copy| {
        let page = read_page(storage, layout.log_record_offset(index, copy)).ok()?;
        LogRecord::decode(index, &page).ok()
    };
    let mut load = |index| match (read(index, 0), read(index, 1)) {
        (Some(a), Some(b)) if b.counter > a.counter => Twin { value: b, newest: 1 },
        (Some(value), _) => Twin { value, newest: 0 },
        (None, Some(value)) => Twin { value, newest: 1 },
        (None, None) => {
            report.lost_records += 1;
            Twin { value: LogRecord::empty(index), newest: 0 }
        }
    };
    (0..layout.log_records()).map(&mut load).collect()
}
