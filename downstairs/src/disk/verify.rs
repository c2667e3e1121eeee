//! After a crash: which context a block's data matches, and what is said of it if none.
//!
//! Invariants:
//! - Data that matches the latest context has that version. Data that matches the flushed one has gone back to it,
//!   unless the latest was flushed too: then it is as bad as any other.
//! - A block that matches neither becomes unverified. Its bound is the latest version if that can't have been lost (the
//!   host did not lose power, or it was flushed), else the flushed one: what lies there is at least that new.
//! - A block that was zeros when it was flushed goes back to zeros if the host lost power: zeros need no data, and what
//!   lies in the data area may be older than they are.
//! - Running it again changes nothing.
//!
//! Left to others: which extents are verified ([`super::open`]: those in the activity log).

use newel_protocol::crc::crc;
use newel_protocol::{BLOCK_BYTES, BlockRange, ExtentId};

use super::buffer::AlignedBuf;
use super::context::{Context, ContextKind, PAIR_BYTES, Pair};
use super::region::RegionCore;
use super::storage::Storage;
use crate::core::api::DiskError;

/// What verification changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Blocks that went back to what was flushed.
    pub went_back: u64,
    /// Blocks that match neither context.
    pub unverified: u64,
    /// Blocks that the disk could not read; their contexts stay.
    pub unreadable: u64,
}

/// Data is read in pieces of this size.
const CHUNK_BLOCKS: u32 = 256;

impl<S: Storage> RegionCore<S> {
    pub(crate) fn verify_extent(&self, extent: ExtentId, lost_power: bool) -> Result<Verified, DiskError> {
        let mut verified = Verified::default();
        let Some(range) = self.layout.extent_blocks(extent) else { return Ok(verified) };
        let offset = self.layout.context_offset(range.start);
        if self.storage.is_hole(offset, u64::from(range.count) * PAIR_BYTES as u64) {
            return Ok(verified);
        }
        let pairs = self.read_pairs(range)?;
        let mark = self.flushed_mark();
        let mut updates = Vec::new();
        let mut start = range.start;
        for pairs in pairs.chunks(CHUNK_BLOCKS as usize) {
            let chunk = BlockRange::new(start, u32::try_from(pairs.len()).unwrap_or(CHUNK_BLOCKS));
            start = chunk.end();
            if pairs.iter().all(|pair| pair.latest.is_zeros()) {
                continue;
            }
            for (block, pair, found) in
                chunk.blocks().zip(pairs).zip(self.crcs_of(chunk)).map(|((b, p), f)| (b, p, f))
            {
                let Some(found) = found else {
                    verified.unreadable += u64::from(!pair.latest.is_zeros());
                    continue;
                };
                let after = settle(pair, found, self.is_flushed(&pair.latest, mark), lost_power);
                if after != *pair {
                    verified.went_back += u64::from(after.latest.is_verified());
                    updates.push((block, *pair, after));
                }
                verified.unverified += u64::from(!after.latest.is_verified());
            }
        }
        self.write_pairs(&mut updates)?;
        Ok(verified)
    }

    /// Everything of this extent is durable: contexts that no mark covers say so themselves. True if any had to.
    pub(crate) fn settle_extent(&self, extent: ExtentId) -> Result<bool, DiskError> {
        let Some(range) = self.layout.extent_blocks(extent) else { return Ok(false) };
        let mark = self.flushed_mark();
        let mut updates = Vec::new();
        for (block, pair) in range.blocks().zip(self.read_pairs(range)?) {
            if pair.latest.kind != ContextKind::Damaged && !self.is_flushed(&pair.latest, mark) {
                let flushed = Context { copied: None, ..pair.latest };
                if flushed != pair.flushed {
                    updates.push((block, pair, Pair { flushed, ..pair }));
                }
            }
        }
        self.write_pairs(&mut updates)?;
        Ok(!updates.is_empty())
    }

    /// The checksum of each block, `None` where the disk can't read it.
    pub(crate) fn crcs_of(&self, range: BlockRange) -> Vec<Option<u32>> {
        let mut data = AlignedBuf::zeroed(range.bytes());
        if self.storage.read_direct(self.block_offset(range.start), &mut data).is_ok() {
            return data.chunks_exact(BLOCK_BYTES).map(|block| Some(crc(block))).collect();
        }
        let mut read_one = |block| {
            let data = data.get_mut(..BLOCK_BYTES)?;
            self.storage.read_direct(self.block_offset(block), data).ok()?;
            Some(crc(data))
        };
        range.blocks().map(&mut read_one).collect()
    }
}

/// What the contexts of a block in the activity log become, given the checksum of its data.
fn settle(pair: &Pair, found: u32, was_flushed: bool, lost_power: bool) -> Pair {
    let Pair { flushed, latest } = *pair;
    let matches = |context: &Context| context.has_data() && context.crc == found;
    if latest.is_zeros() || matches(&latest) {
        return *pair;
    }
    let latest_is_safe = was_flushed || !lost_power;
    if latest.kind == ContextKind::Damaged || (latest_is_safe && !latest.has_data()) {
        // Nothing more can be learnt: the version can't be believed, or it says what it said before.
        return *pair;
    }
    if !was_flushed && matches(&flushed) {
        return Pair { flushed, latest: flushed };
    }
    if !latest_is_safe && flushed.is_zeros() {
        return Pair { flushed, latest: flushed };
    }
    let bound = if latest_is_safe { latest.version } else { flushed.version };
    let copied = if latest_is_safe { latest.copied } else { None };
    let unverified = Context { copied, ..Context::unverified(bound) };
    // Without a power cut the bound may be above what a later one leaves: then the flushed context still counts.
    let flushed = if lost_power { unverified } else { flushed };
    Pair { flushed, latest: unverified }
}

#[cfg(test)]
mod tests {
    use newel_protocol::{Generation, Version};

    use super::*;

    fn v(sequence: u64) -> Version {
        Version::new(Generation(1), sequence)
    }

    fn data(sequence: u64) -> Context {
        Context::data(v(sequence), u32::try_from(sequence).unwrap())
    }

    #[test]
    fn blocks_settle() {
        // Data of version n has checksum n; the mark is 10.
        let check = |flushed: Context,
                     latest: Context,
                     found: u32,
                     lost_power: bool,
                     expected: (ContextKind, u64)| {
            let was_flushed = |latest: &Context| latest.copied.is_none() && latest.version <= v(10);
            let after = settle(&Pair { flushed, latest }, found, was_flushed(&latest), lost_power);
            assert_eq!(
                (after.latest.kind, after.latest.version.sequence),
                expected,
                "{flushed:?} {latest:?} {found}"
            );
            assert_eq!(
                settle(&after, found, was_flushed(&after.latest), lost_power),
                after,
                "settles at once"
            );
        };
        let (is_data, unverified, zero) = (ContextKind::Data, ContextKind::Unverified, ContextKind::Zero);
        for lost_power in [false, true] {
            check(data(5), data(12), 12, lost_power, (is_data, 12));
            check(data(5), data(12), 5, lost_power, (is_data, 5));
            // Flushed, and yet not there: corruption, bounded by what was flushed.
            check(data(5), data(9), 77, lost_power, (unverified, 9));
            check(data(5), data(9), 5, lost_power, (unverified, 9));
            check(data(5), Context::zero(v(12)), 77, lost_power, (zero, 12));
            check(Context::zero(v(5)), data(9), 77, lost_power, (unverified, 9));
        }
        // Unflushed: torn or a version between. What survived a mere crash is at least the latest.
        check(data(5), data(12), 11, true, (unverified, 5));
        check(data(5), data(12), 13, false, (unverified, 12));
        // What lies below zeros may be older than they are.
        check(Context::zero(v(5)), data(12), 3, true, (zero, 5));
        check(Context::NEVER, data(12), 3, true, (ContextKind::Never, 0));
        check(Context::zero(v(5)), data(12), 3, false, (unverified, 12));
        // A copied block that was not flushed: the mark does not count.
        check(data(3), Context { copied: Some(1), ..data(9) }, 77, true, (unverified, 3));
        // A bound from before the power cut.
        check(data(5), Context::unverified(v(12)), 77, true, (unverified, 5));
        check(data(5), Context::unverified(v(12)), 5, true, (is_data, 5));
        check(Context::zero(v(5)), Context::unverified(v(12)), 5, true, (zero, 5));
        check(data(5), Context::unverified(v(12)), 5, false, (unverified, 12));
        check(Context::unverified(v(5)), data(12), 77, true, (unverified, 5));
    }
}
