//! Where everything lies in a region, computed from its number of blocks and of activity-log slots alone.
//!
//! Invariants:
//! - Every offset is built from the one before it; the header repeats them, and a region whose header disagrees with
//!   this computation is refused.
//! - The two copies of a header or of a log record never share a page.
//! - The context table and the data start page aligned, so that both can be read and written with direct I/O.
//!
//! Left to others: what the structures hold ([`super::format`], [`super::context`]).

use newel_protocol::{BLOCK_BYTES, BlockRange, EXTENT_BLOCKS, ExtentId};
use thiserror::Error;

use super::context::PAIR_BYTES;
use super::format::LOG_SLOTS_PER_RECORD;

/// The unit in which metadata is written durably.
pub(crate) const PAGE_BYTES: usize = 4096;

pub(crate) const HEADER_A_OFFSET: u64 = 0;
/// Far from copy A, so that one damaged track, stripe or partition table does not take both.
pub(crate) const HEADER_B_OFFSET: u64 = HEADER_A_OFFSET + 64 * 1024;
pub(crate) const LOG_OFFSET: u64 = HEADER_B_OFFSET + 64 * 1024;
/// Keeps the table clear of the log's last page, whatever the device's physical sector is.
const CONTEXTS_ALIGN_BYTES: u64 = 64 * 1024;
/// The usual alignment of partitions and RAID stripes.
const DATA_ALIGN_BYTES: u64 = 1024 * 1024;

pub const DEFAULT_LOG_SLOTS: u32 = 1024;
/// 16,384 slots stand for 64 GiB of extents to verify after a crash: more would make a restart slow.
pub const MAX_LOG_SLOTS: u32 = 32 * LOG_SLOTS_PER_RECORD;
/// Extents are numbered by a `u32`, whose last value marks an empty slot of the log.
pub(crate) const MAX_BLOCKS: u64 = (u32::MAX as u64 - 1) * EXTENT_BLOCKS as u64;

const _: () = assert!(HEADER_B_OFFSET >= HEADER_A_OFFSET + PAGE_BYTES as u64);
const _: () = assert!(LOG_OFFSET >= HEADER_B_OFFSET + PAGE_BYTES as u64);
const _: () = assert!(LOG_OFFSET.is_multiple_of(PAGE_BYTES as u64));
const _: () = assert!(DATA_ALIGN_BYTES.is_multiple_of(BLOCK_BYTES as u64));
const _: () = assert!(CONTEXTS_ALIGN_BYTES.is_multiple_of(PAGE_BYTES as u64));

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    #[error("a region needs between 1 and {MAX_BLOCKS} blocks of {BLOCK_BYTES} bytes, not {blocks}")]
    Blocks { blocks: u64 },
    #[error(
        "the activity log needs a multiple of {LOG_SLOTS_PER_RECORD} slots, at most {MAX_LOG_SLOTS}, not {slots}"
    )]
    Slots { slots: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub blocks: u64,
    pub log_slots: u32,
    pub contexts_offset: u64,
    pub data_offset: u64,
}

impl Layout {
    pub fn new(blocks: u64, log_slots: u32) -> Result<Self, LayoutError> {
        if blocks == 0 || blocks > MAX_BLOCKS {
            return Err(LayoutError::Blocks { blocks });
        }
        if log_slots == 0 || log_slots > MAX_LOG_SLOTS || !log_slots.is_multiple_of(LOG_SLOTS_PER_RECORD) {
            return Err(LayoutError::Slots { slots: log_slots });
        }
        let records = u64::from(log_slots / LOG_SLOTS_PER_RECORD);
        let log_end = LOG_OFFSET + 2 * records * PAGE_BYTES as u64;
        let contexts_offset = log_end.next_multiple_of(CONTEXTS_ALIGN_BYTES);
        let contexts_end = contexts_offset + blocks * PAIR_BYTES as u64;
        Ok(Self {
            blocks,
            log_slots,
            contexts_offset,
            data_offset: contexts_end.next_multiple_of(DATA_ALIGN_BYTES),
        })
    }

    /// The largest layout that fits into a device of `bytes`.
    pub fn largest(bytes: u64, log_slots: u32) -> Result<Self, LayoutError> {
        let smallest = Self::new(1, log_slots)?;
        let per_block = (BLOCK_BYTES + PAIR_BYTES) as u64;
        let mut blocks = (bytes.saturating_sub(smallest.contexts_offset) / per_block).min(MAX_BLOCKS);
        // Rounding up to the start of the data costs less than one alignment.
        while blocks > 0 {
            let layout = Self::new(blocks, log_slots)?;
            if layout.total_bytes() <= bytes {
                return Ok(layout);
            }
            blocks = blocks.saturating_sub((layout.total_bytes() - bytes).div_ceil(BLOCK_BYTES as u64));
        }
        Err(LayoutError::Blocks { blocks: 0 })
    }

    pub fn total_bytes(&self) -> u64 {
        self.data_offset + self.blocks * BLOCK_BYTES as u64
    }

    pub fn contexts_bytes(&self) -> u64 {
        self.blocks * PAIR_BYTES as u64
    }

    pub fn log_records(&self) -> u32 {
        self.log_slots / LOG_SLOTS_PER_RECORD
    }

    /// Copies lie in two areas, so that neighbours in one area are different records.
    pub fn log_record_offset(&self, record: u32, copy: usize) -> u64 {
        let area = u64::from(self.log_records()) * PAGE_BYTES as u64 * (copy as u64 & 1);
        LOG_OFFSET + area + u64::from(record) * PAGE_BYTES as u64
    }

    pub fn context_offset(&self, block: u64) -> u64 {
        self.contexts_offset + block * PAIR_BYTES as u64
    }

    pub fn block_offset(&self, block: u64) -> u64 {
        self.data_offset + block * BLOCK_BYTES as u64
    }

    pub fn extents(&self) -> u32 {
        u32::try_from(self.blocks.div_ceil(u64::from(EXTENT_BLOCKS))).unwrap_or(u32::MAX)
    }

    /// The blocks of an extent; the last one may be short. `None` past the end.
    pub fn extent_blocks(&self, extent: ExtentId) -> Option<BlockRange> {
        let start = extent.first_block();
        let left = self.blocks.checked_sub(start).filter(|&left| left > 0)?;
        let count = u32::try_from(left.min(u64::from(EXTENT_BLOCKS))).unwrap_or(EXTENT_BLOCKS);
        Some(BlockRange::new(start, count))
    }
}

pub(crate) fn header_offset(copy: usize) -> u64 {
    if copy & 1 == 0 { HEADER_A_OFFSET } else { HEADER_B_OFFSET }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_4_gib_region_is_where_the_readme_says() {
        let layout = Layout::new(1 << 20, DEFAULT_LOG_SLOTS).unwrap();
        assert_eq!(layout.log_record_offset(0, 0), 131_072);
        assert_eq!(layout.log_record_offset(1, 1), 131_072 + 3 * 4096);
        assert_eq!(layout.contexts_offset, 196_608);
        assert_eq!(layout.data_offset, 33 << 20);
        assert_eq!(layout.total_bytes(), (4096 + 33) << 20);
        assert_eq!(layout.extents(), 1024);
    }

    #[test]
    fn bounds_are_errors() {
        assert_eq!(Layout::new(0, 1024), Err(LayoutError::Blocks { blocks: 0 }));
        assert_eq!(Layout::new(MAX_BLOCKS + 1, 1024), Err(LayoutError::Blocks { blocks: MAX_BLOCKS + 1 }));
        assert_eq!(Layout::new(1, 100), Err(LayoutError::Slots { slots: 100 }));
        assert!(Layout::new(MAX_BLOCKS, MAX_LOG_SLOTS).is_ok());
        assert_eq!(
            Layout::new(1025, 512).unwrap().extent_blocks(ExtentId(1)),
            Some(BlockRange::new(1024, 1))
        );
        assert_eq!(Layout::new(1024, 512).unwrap().extent_blocks(ExtentId(1)), None);
    }

    proptest::proptest! {
        #[test]
        fn the_largest_layout_fits_and_no_larger_one_does(bytes in 2_u64 << 20..1 << 42) {
            let layout = Layout::largest(bytes, DEFAULT_LOG_SLOTS).unwrap();
            proptest::prop_assert!(layout.total_bytes() <= bytes);
            let slack = bytes - layout.total_bytes();
            // One alignment, and what the context table of those blocks would have cost.
            proptest::prop_assert!(slack <= DATA_ALIGN_BYTES + BLOCK_BYTES as u64, "{} bytes unused", slack);
        }
    }
}
