//! Verifies a whole region that nobody uses: every block against its contexts.
//!
//! Invariants:
//! - Nothing is changed.
//! - A block is bad if it can't be read, if its data match neither context, if its context is damaged, or if it was found
//!   unverified before. A block that matches its flushed context only is unsettled, which is no fault in an extent of the
//!   activity log of a region that wasn't closed: opening it settles that.
//! - The list of bad blocks is bounded; their number is exact.
//!
//! Left to others: output ([`super::cli`]).

use std::collections::BTreeSet;
use std::sync::Mutex;

use newel_protocol::{BlockRange, ExtentId};

use super::context::{ContextKind, Pair, fold_digests};
use super::error::RegionError;
use super::file::{Region, on_threads, verify_threads};
use super::lock;

/// Enough to see a pattern; a whole dead disk fits in no list.
const MAX_LISTED: usize = 1000;
/// Data is read in pieces of 1 MiB.
const CHUNK_BLOCKS: usize = 256;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Audit {
    pub data: u64,
    pub zero: u64,
    pub never: u64,
    pub unsettled: u64,
    pub bad: u64,
    /// The first of them, in order.
    pub listed: Vec<(u64, String)>,
    pub digest: u64,
}

/// `progress` gets the extents done and in all.
pub(super) fn audit(
    region: &Region,
    name: &str,
    threads: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Audit, RegionError> {
    let threads = verify_threads(threads);
    region.scan_digests(&|what, count, task| on_threads(name, threads, what, count, task))?;
    let unsettled = if region.header().clean { BTreeSet::new() } else { region.logged_extents() };
    let extents = region.layout().extents();
    let total = Mutex::new((Audit::default(), 0_u64));
    on_threads(name, threads, "checking", extents, &|extent| {
        let extent = ExtentId(extent);
        let found = audit_extent(region, extent, unsettled.contains(&extent))?;
        let (total, done) = &mut *lock(&total);
        total.data += found.data;
        total.zero += found.zero;
        total.never += found.never;
        total.unsettled += found.unsettled;
        total.bad += found.bad;
        total.listed.extend(found.listed);
        if total.listed.len() > 2 * MAX_LISTED {
            total.listed.sort_unstable();
            total.listed.truncate(MAX_LISTED);
        }
        *done += 1;
        progress(*done, u64::from(extents));
        Ok(())
    })?;
    let (mut audit, _) = total.into_inner().unwrap_or_default();
    audit.listed.sort_unstable();
    audit.listed.truncate(MAX_LISTED);
    audit.digest = fold_digests(region.digests(ExtentId(0), extents).into_iter());
    Ok(audit)
}

fn audit_extent(region: &Region, extent: ExtentId, in_log: bool) -> Result<Audit, RegionError> {
    let mut audit = Audit::default();
    let Some(range) = region.layout().extent_blocks(extent) else { return Ok(audit) };
    let pairs = region.read_pairs(range).map_err(|error| region.as_region_error(&error))?;
    let mut start = range.start;
    for pairs in pairs.chunks(CHUNK_BLOCKS) {
        let chunk = BlockRange::new(start, u32::try_from(pairs.len()).unwrap_or(1));
        start = chunk.end();
        let crcs = if pairs.iter().all(|pair| pair.latest.is_zeros()) {
            vec![None; pairs.len()]
        } else {
            region.crcs_of(chunk)
        };
        for ((block, pair), found) in chunk.blocks().zip(pairs).zip(crcs) {
            match verdict(pair, found, in_log) {
                Verdict::Data => audit.data += 1,
                Verdict::Zero => audit.zero += 1,
                Verdict::Never => audit.never += 1,
                Verdict::Unsettled => audit.unsettled += 1,
                Verdict::Bad(what) => {
                    audit.bad += 1;
                    if audit.listed.len() < MAX_LISTED {
                        audit.listed.push((block, what));
                    }
                }
            }
        }
    }
    Ok(audit)
}

enum Verdict {
    Data,
    Zero,
    Never,
    Unsettled,
    Bad(String),
}

fn verdict(pair: &Pair, found: Option<u32>, in_log: bool) -> Verdict {
    let Pair { flushed, latest } = pair;
    match (latest.kind, found) {
        (ContextKind::Never, _) => Verdict::Never,
        (ContextKind::Zero, _) => Verdict::Zero,
        (ContextKind::Damaged, _) => Verdict::Bad("its context is damaged".into()),
        (ContextKind::Unverified, _) => {
            Verdict::Bad(format!("unverified, at least version {}", latest.version))
        }
        (ContextKind::Data, None) => Verdict::Bad(format!("cannot be read, version {}", latest.version)),
        (ContextKind::Data, Some(found)) if found == latest.crc => Verdict::Data,
        (ContextKind::Data, Some(found)) if in_log && flushed.has_data() && flushed.crc == found => {
            Verdict::Unsettled
        }
        (ContextKind::Data, Some(found)) => Verdict::Bad(format!(
            "checksum {found:#010x} instead of {:#010x} of version {}",
            latest.crc, latest.version
        )),
    }
}
