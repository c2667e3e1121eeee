//! The nouns that both sides share.
//!
//! Invariants:
//! - A [`BlockRange`] is never empty and never crosses an extent boundary: every job belongs to exactly one extent, so
//!   ordering, the activity log and digests all work extent by extent.
//! - [`Version`] orders first by generation, then by sequence.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The unit of checksum and version.
pub const BLOCK_BYTES: usize = 4096;
/// Blocks in an extent, the unit of the activity log and of digests: 4 MiB.
pub const EXTENT_BLOCKS: u32 = 1024;
pub const EXTENT_BYTES: usize = EXTENT_BLOCKS as usize * BLOCK_BYTES;
/// A job stays within one extent, so this is also the largest one.
pub const MAX_JOB_BLOCKS: u32 = EXTENT_BLOCKS;
pub const MAX_JOB_BYTES: usize = EXTENT_BYTES;

/// How often the volume was activated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Generation(pub u32);

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The number of a job within its generation; a write's number is its sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobId(pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A 4 MiB piece of the volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExtentId(pub u32);

impl ExtentId {
    pub fn first_block(self) -> u64 {
        u64::from(self.0) * u64::from(EXTENT_BLOCKS)
    }
}

impl fmt::Display for ExtentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Which write a block holds. `Version::NEVER` is a block that was never written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version {
    pub generation: Generation,
    pub sequence: u64,
}

impl Version {
    pub const NEVER: Self = Self { generation: Generation(0), sequence: 0 };
    pub const MAX: Self = Self { generation: Generation(u32::MAX), sequence: u64::MAX };

    pub fn new(generation: Generation, sequence: u64) -> Self {
        Self { generation, sequence }
    }

    /// The smallest version above this one.
    pub fn next(self) -> Self {
        match self.sequence.checked_add(1) {
            Some(sequence) => Self { sequence, ..self },
            None => Self { generation: Generation(self.generation.0.saturating_add(1)), sequence: 0 },
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.generation.0, self.sequence)
    }
}

/// What a replica can say of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
#[repr(u8)]
pub enum BlockKind {
    /// Has data; `crc` is its checksum, `version` its version.
    Data = 0,
    /// Reads as zeros and holds no data; `version` is that of the zeroing (or `NEVER`).
    #[default]
    Zero = 1,
    /// The data match no context; `version` is the bound (what lies there is at least that new) and `crc` the
    /// checksum of what was found.
    Unverified = 2,
    /// The disk could not read it; `version` is what its context says, or `NEVER` if that is damaged, too.
    Unreadable = 3,
}

impl From<BlockKind> for u8 {
    fn from(kind: BlockKind) -> Self {
        kind as Self
    }
}

impl TryFrom<u8> for BlockKind {
    type Error = String;

    fn try_from(value: u8) -> Result<Self, String> {
        match value {
            0 => Ok(Self::Data),
            1 => Ok(Self::Zero),
            2 => Ok(Self::Unverified),
            3 => Ok(Self::Unreadable),
            other => Err(format!("unknown block kind {other}")),
        }
    }
}

/// A block's state as it travels in replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockState {
    pub version: Version,
    pub crc: u32,
    pub kind: BlockKind,
}

impl BlockState {
    /// True if a reply carries 4 KiB of payload for this block when data was asked for.
    pub fn has_data(&self) -> bool {
        self.kind == BlockKind::Data
    }

    /// True if this copy may be a source: its data match a context, or it is zeros.
    pub fn is_verified(&self) -> bool {
        matches!(self.kind, BlockKind::Data | BlockKind::Zero)
    }
}

/// Consecutive blocks of one extent. See the module's invariants; a range that came over the wire must pass
/// [`BlockRange::is_valid`] before use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockRange {
    pub start: u64,
    pub count: u32,
}

impl BlockRange {
    pub fn new(start: u64, count: u32) -> Self {
        let range = Self { start, count };
        debug_assert!(range.is_valid(u64::MAX), "a range is non-empty and within one extent: {range:?}");
        range
    }

    pub fn single(block: u64) -> Self {
        Self { start: block, count: 1 }
    }

    /// Non-empty, inside a volume of `volume_blocks`, and within one extent.
    pub fn is_valid(self, volume_blocks: u64) -> bool {
        let extent = u64::from(EXTENT_BLOCKS);
        self.count > 0
            && self
                .start
                .checked_add(u64::from(self.count))
                .is_some_and(|end| end <= volume_blocks && (end - 1) / extent == self.start / extent)
            && self.start / extent <= u64::from(u32::MAX)
    }

    /// One past the last block.
    pub fn end(self) -> u64 {
        self.start + u64::from(self.count)
    }

    pub fn extent(self) -> ExtentId {
        ExtentId(u32::try_from(self.start / u64::from(EXTENT_BLOCKS)).unwrap_or(u32::MAX))
    }

    pub fn bytes(self) -> usize {
        self.count as usize * BLOCK_BYTES
    }

    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    pub fn contains(self, block: u64) -> bool {
        (self.start..self.end()).contains(&block)
    }

    pub fn blocks(self) -> std::ops::Range<u64> {
        self.start..self.end()
    }
}

impl fmt::Display for BlockRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.start, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_stay_within_an_extent() {
        let check = |start, count, valid| {
            assert_eq!(BlockRange { start, count }.is_valid(4096), valid, "{start}+{count}")
        };
        check(0, 1, true);
        check(0, 1024, true);
        check(1023, 1, true);
        check(1023, 2, false);
        check(1024, 1024, true);
        check(0, 0, false);
        check(4095, 1, true);
        check(4096, 1, false);
        check(u64::MAX, 2, false);
    }

    #[test]
    fn versions_order_by_generation_then_sequence() {
        let v = |g, s| Version::new(Generation(g), s);
        assert!(v(1, 9) < v(2, 0) && v(2, 0) < v(2, 1) && Version::NEVER < v(0, 1));
        assert_eq!(v(1, 9).next(), v(1, 10));
        assert_eq!(v(1, u64::MAX).next(), v(2, 0));
    }
}
