//! Block contexts: what is known of one block, and how it lies in the context table.
//!
//! Invariants:
//! - A context is 16 bytes: generation u32, sequence u64 (whose top 16 bits are flags), check u32, little endian.
//!   A block has two, the last *flushed* and the *latest*: 32 bytes that never straddle a sector.
//! - `check` is the checksum of the data XOR a mix of block number, generation, sequence and flags. So a context that
//!   was damaged, or written for another block, does not match its data; a context without data (zeros, unverified)
//!   has a known checksum and validates itself.
//! - All zero bytes mean: never written. Such a block reads as zeros and adds nothing to the digest of its extent.
//!
//! Left to others: when a context changes ([`super::change`]), and which one is believed after a crash
//! ([`super::verify`]).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use newel_protocol::crc::ZERO_BLOCK_CRC;
use newel_protocol::{BlockKind, BlockState, Generation, Version};

const CONTEXT_BYTES: usize = 16;
/// Both contexts of a block: flushed, then latest.
pub(crate) const PAIR_BYTES: usize = 2 * CONTEXT_BYTES;

/// The block reads as zeros and has no data.
const ZERO_FLAG: u64 = 1 << 63;
/// The data match no context; the version is the bound.
const UNVERIFIED_FLAG: u64 = 1 << 62;
/// The version came by a copy (`Store`), so a flushed mark above it does not prove that it was flushed; the copy
/// epoch does.
const COPIED_FLAG: u64 = 1 << 61;
const EPOCH_SHIFT: u32 = 48;
/// The part of the copy epoch that a context holds. One epoch passes with each flush during a catch-up; that a context
/// is taken for one of 8192 epochs later makes it look unflushed, which only costs a heal.
pub(crate) const EPOCH_MASK: u16 = (1 << (61 - EPOCH_SHIFT)) - 1;
/// Sequences stay below this; at 100,000 jobs a second one generation lasts 89 years.
pub(crate) const MAX_SEQUENCE: u64 = (1 << EPOCH_SHIFT) - 1;

/// Keeps block 0 from hashing to 0. Any odd number with many ones and zeros would do, here and below.
const PLACE_SEED: u64 = 0x9e37_79b9_7f4a_7c15;
/// Spreads generations over all bits, away from the low ones where sequences differ.
const GENERATION_FACTOR: u64 = 0xd6e8_feb8_6659_fd93;

const _: () = assert!(super::layout::PAGE_BYTES.is_multiple_of(PAIR_BYTES));

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContextKind {
    #[default]
    Never,
    Data,
    Zero,
    Unverified,
    /// A flag was set, but the check does not fit: the bytes are not what was written, nothing in them is believed.
    Damaged,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    pub kind: ContextKind,
    /// `NEVER` unless the kind is `Data`, `Zero` or `Unverified`.
    pub version: Version,
    /// The checksum of the data; 0 unless the kind is `Data`.
    pub crc: u32,
    /// The copy epoch in which it was copied from another replica; `None` if it was written.
    pub copied: Option<u16>,
}

impl Context {
    pub const NEVER: Self = Self { kind: ContextKind::Never, version: Version::NEVER, crc: 0, copied: None };

    pub fn data(version: Version, crc: u32) -> Self {
        Self { kind: ContextKind::Data, version, crc, copied: None }
    }

    /// Zeros under `version`. Zeros that were never written are no different from a block that was never written.
    pub fn zero(version: Version) -> Self {
        if version == Version::NEVER {
            return Self::NEVER;
        }
        Self { kind: ContextKind::Zero, version, crc: 0, copied: None }
    }

    pub fn unverified(bound: Version) -> Self {
        Self { kind: ContextKind::Unverified, version: bound, crc: 0, copied: None }
    }

    /// Reads as zeros, whatever lies in the data area.
    pub fn is_zeros(&self) -> bool {
        matches!(self.kind, ContextKind::Never | ContextKind::Zero)
    }

    pub fn has_data(&self) -> bool {
        self.kind == ContextKind::Data
    }

    /// May be a source and may refuse older writes.
    pub fn is_verified(&self) -> bool {
        self.has_data() || self.is_zeros()
    }

    /// What a reply says of it. The checksum of an unverified block's data isn't known here and is left 0.
    pub fn state(&self) -> BlockState {
        match self.kind {
            ContextKind::Data => BlockState { version: self.version, crc: self.crc, kind: BlockKind::Data },
            ContextKind::Never | ContextKind::Zero => {
                BlockState { version: self.version, crc: 0, kind: BlockKind::Zero }
            }
            ContextKind::Unverified => {
                BlockState { version: self.version, crc: 0, kind: BlockKind::Unverified }
            }
            // Nothing is known of it, its version least of all.
            ContextKind::Damaged => {
                BlockState { version: Version::NEVER, crc: 0, kind: BlockKind::Unreadable }
            }
        }
    }

    fn encode(&self, block: u64, into: &mut [u8]) {
        let flags = match self.kind {
            ContextKind::Never => {
                into.fill(0);
                return;
            }
            ContextKind::Data => 0,
            ContextKind::Zero => ZERO_FLAG,
            // Something is known to be wrong here and nothing of the damaged bytes is worth keeping.
            ContextKind::Unverified | ContextKind::Damaged => UNVERIFIED_FLAG,
        };
        let crc = if self.has_data() { self.crc } else { ZERO_BLOCK_CRC };
        let copied =
            self.copied.map_or(0, |epoch| COPIED_FLAG | u64::from(epoch & EPOCH_MASK) << EPOCH_SHIFT);
        let sequence = (self.version.sequence & MAX_SEQUENCE) | flags | copied;
        let check = crc ^ mix(block, self.version.generation.0, sequence);
        if let Some((generation, rest)) = into.split_first_chunk_mut::<4>()
            && let Some((sequence_bytes, rest)) = rest.split_first_chunk_mut::<8>()
            && let Some((check_bytes, _)) = rest.split_first_chunk_mut::<4>()
        {
            *generation = self.version.generation.0.to_le_bytes();
            *sequence_bytes = sequence.to_le_bytes();
            *check_bytes = check.to_le_bytes();
        }
    }

    /// `newest` is the highest generation that can have written here: one above it is rot, and no version to believe.
    fn decode(block: u64, raw: u128, newest: Generation) -> Self {
        if raw == 0 {
            return Self::NEVER;
        }
        let bytes = raw.to_le_bytes();
        let [g0, g1, g2, g3, s0, s1, s2, s3, s4, s5, s6, s7, c0, c1, c2, c3] = bytes;
        let generation = u32::from_le_bytes([g0, g1, g2, g3]);
        let sequence = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let crc = u32::from_le_bytes([c0, c1, c2, c3]) ^ mix(block, generation, sequence);
        let version = Version::new(Generation(generation), sequence & MAX_SEQUENCE);
        let epoch = u16::from_le_bytes([s6, s7]) & EPOCH_MASK;
        let copied = (sequence & COPIED_FLAG != 0).then_some(epoch);
        if version.generation > newest {
            return Self { kind: ContextKind::Damaged, ..Self::NEVER };
        }
        let kind = match (sequence & ZERO_FLAG != 0, sequence & UNVERIFIED_FLAG != 0) {
            (false, false) => return Self { kind: ContextKind::Data, version, crc, copied },
            (true, false) if crc == ZERO_BLOCK_CRC => ContextKind::Zero,
            (false, true) if crc == ZERO_BLOCK_CRC => ContextKind::Unverified,
            (true | false, true) | (true, false) => {
                return Self { kind: ContextKind::Damaged, ..Self::NEVER };
            }
        };
        Self { kind, version, crc: 0, copied }
    }
}

/// Both contexts of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pair {
    pub flushed: Context,
    pub latest: Context,
}

impl Pair {
    pub fn decode(block: u64, bytes: &[u8; PAIR_BYTES], newest: Generation) -> Self {
        let (flushed, latest) = raw_halves(bytes);
        let context = |raw| Context::decode(block, raw, newest);
        Self { flushed: context(flushed), latest: context(latest) }
    }

    /// `into` holds [`PAIR_BYTES`].
    pub fn encode(&self, block: u64, into: &mut [u8; PAIR_BYTES]) {
        let (flushed, latest) = into.split_at_mut(CONTEXT_BYTES);
        self.flushed.encode(block, flushed);
        self.latest.encode(block, latest);
    }

    pub fn state(&self) -> BlockState {
        self.latest.state()
    }
}

fn raw_halves(bytes: &[u8; PAIR_BYTES]) -> (u128, u128) {
    let half = |from: usize| {
        bytes
            .get(from..)
            .and_then(|rest| rest.first_chunk::<CONTEXT_BYTES>())
            .map_or(0, |half| u128::from_le_bytes(*half))
    };
    (half(0), half(CONTEXT_BYTES))
}

/// The pairs of consecutive blocks from `first`, out of their bytes in the table.
pub(crate) fn decode_pairs(
    first: u64,
    bytes: &[u8],
    newest: Generation,
) -> impl Iterator<Item = (u64, Pair)> {
    let (pairs, _) = bytes.as_chunks::<PAIR_BYTES>();
    (first..).zip(pairs).map(move |(block, bytes)| (block, Pair::decode(block, bytes, newest)))
}

/// The digest of consecutive blocks from `first`, out of their bytes in the table.
pub(crate) fn digest_of_pairs(first: u64, bytes: &[u8], newest: Generation) -> ExtentDigest {
    let (pairs, _) = bytes.as_chunks::<PAIR_BYTES>();
    let mut digest = ExtentDigest::default();
    for (block, bytes) in (first..).zip(pairs) {
        // Most blocks of a young volume were never written; that they are is seen without decoding.
        let (_, latest) = raw_halves(bytes);
        if latest != 0 {
            let context = Context::decode(block, latest, newest);
            *digest.hash.get_mut() ^= block_digest(block, &context);
            *digest.unverified.get_mut() += u32::from(!context.is_verified());
        }
    }
    digest
}

/// The digest of one extent, kept up to date: the XOR over its blocks, and how many of them are unverified.
#[derive(Debug, Default)]
pub(crate) struct ExtentDigest {
    hash: AtomicU64,
    unverified: AtomicU32,
}

impl ExtentDigest {
    pub(crate) fn replace(&self, block: u64, old: &Context, new: &Context) {
        self.hash.fetch_xor(block_digest(block, old) ^ block_digest(block, new), Ordering::Relaxed);
        match (old.is_verified(), new.is_verified()) {
            (true, false) => self.unverified.fetch_add(1, Ordering::Relaxed),
            (false, true) => self.unverified.fetch_sub(1, Ordering::Relaxed),
            (true, true) | (false, false) => 0,
        };
    }

    pub(crate) fn set(&self, other: &Self) {
        self.hash.store(other.hash.load(Ordering::Relaxed), Ordering::Relaxed);
        self.unverified.store(other.unverified.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// As it is told to others: the lowest bit says that there are unverified blocks. Replicas that were all damaged alike
    /// would otherwise look equal, and nobody would mend them.
    pub(crate) fn value(&self) -> u64 {
        let unverified = self.unverified.load(Ordering::Relaxed) > 0;
        self.hash.load(Ordering::Relaxed) & !1 | u64::from(unverified)
    }
}

/// What one block adds to the digest of its extent: a hash of block, kind, version and checksum; 0 if it was never
/// written. How a version came here does not count, so replicas that hold the same agree.
pub(crate) fn block_digest(block: u64, context: &Context) -> u64 {
    let kind: u64 = match context.kind {
        ContextKind::Never => return 0,
        ContextKind::Data => 1,
        ContextKind::Zero => 2,
        ContextKind::Unverified => 3,
        ContextKind::Damaged => 4,
    };
    let hash = fmix64(block ^ PLACE_SEED);
    let hash = fmix64(hash ^ (u64::from(context.version.generation.0) << 32 | u64::from(context.crc)));
    fmix64(hash ^ context.version.sequence ^ (kind << 61))
}

/// A digest over the digests of all extents, in order.
pub fn fold_digests(digests: impl Iterator<Item = u64>) -> u64 {
    (1_u64..).zip(digests).fold(0, |folded, (number, digest)| folded ^ fmix64(digest ^ fmix64(number)))
}

/// A 64-bit finaliser (two rounds of xor-shift and multiply): every input bit changes about half of the output bits.
fn fmix64(mut hash: u64) -> u64 {
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

/// The upper half of a hash over block number, generation and sequence with its flags.
fn mix(block: u64, generation: u32, sequence: u64) -> u32 {
    let place = fmix64(block ^ PLACE_SEED) ^ u64::from(generation).wrapping_mul(GENERATION_FACTOR);
    let [.., h4, h5, h6, h7] = fmix64(place ^ sequence).to_le_bytes();
    u32::from_le_bytes([h4, h5, h6, h7])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ANY: Generation = Generation(u32::MAX);

    fn v(generation: u32, sequence: u64) -> Version {
        Version::new(Generation(generation), sequence)
    }

    fn check(block: u64, pair: Pair) {
        let mut bytes = [0xaa; PAIR_BYTES];
        pair.encode(block, &mut bytes);
        assert_eq!(Pair::decode(block, &bytes, ANY), pair);
        assert_eq!(*digest_of_pairs(block, &bytes, ANY).hash.get_mut(), block_digest(block, &pair.latest));
    }

    #[test]
    fn round_trips() {
        check(0, Pair::default());
        check(7, Pair { flushed: Context::zero(v(1, 2)), latest: Context::data(v(1, 3), 0xdead_beef) });
        check(
            7,
            Pair { flushed: Context::unverified(v(9, 0)), latest: Context::zero(v(u32::MAX, MAX_SEQUENCE)) },
        );
        check(7, Pair { flushed: Context::unverified(Version::NEVER), latest: Context::NEVER });
        let copied = Context { copied: Some(0), ..Context::data(v(3, 3), 1) };
        check(u64::MAX / 2, Pair { flushed: copied, latest: Context { copied: Some(EPOCH_MASK), ..copied } });
    }

    #[test]
    fn golden_bytes() {
        let mut bytes = [0; PAIR_BYTES];
        Pair { flushed: Context::zero(v(2, 5)), latest: Context::data(v(2, 6), 0x1122_3344) }
            .encode(3, &mut bytes);
        assert_eq!(bytes[..4], [2, 0, 0, 0]);
        assert_eq!(bytes[4..12], [5, 0, 0, 0, 0, 0, 0, 0x80]);
        assert_eq!(bytes[20..28], [6, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[12..16], [27, 203, 214, 17]);
        assert_eq!(bytes[28..], [86, 27, 42, 52]);
        assert_eq!(block_digest(3, &Context::data(v(2, 6), 0x1122_3344)), 0x779257d720c4e42c);
        assert_eq!(block_digest(3, &Context::zero(v(2, 6))), 0xb4089b93bfb0f6f);
    }

    #[test]
    fn zeros_that_were_never_written_are_never() {
        assert_eq!(Context::zero(Version::NEVER), Context::NEVER);
        assert_eq!(block_digest(9, &Context::NEVER), 0);
    }

    #[test]
    fn how_a_version_came_does_not_change_the_digest() {
        let written = Context::data(v(1, 1), 5);
        assert_eq!(block_digest(1, &written), block_digest(1, &Context { copied: Some(4), ..written }));
    }

    proptest! {
        /// One flipped bit is always seen: the data no longer match, or the context no longer validates itself.
        #[test]
        fn a_flipped_bit_is_seen(block: u64, generation: u32, sequence in 1..MAX_SEQUENCE, crc: u32,
                                 kind in 0..3, bit in 0_usize..128) {
            let latest = match kind {
                0 => Context::data(v(generation, sequence), crc),
                1 => Context::zero(v(generation, sequence)),
                _ => Context::unverified(v(generation, sequence)),
            };
            let mut bytes = [0; PAIR_BYTES];
            Pair { flushed: Context::NEVER, latest }.encode(block, &mut bytes);
            bytes[CONTEXT_BYTES + bit / 8] ^= 1 << (bit % 8);
            let found = Pair::decode(block, &bytes, ANY).latest;
            match found.kind {
                ContextKind::Data => prop_assert!(!latest.has_data() || found.crc != crc),
                ContextKind::Damaged => {}
                ContextKind::Never | ContextKind::Zero | ContextKind::Unverified => {
                    prop_assert!(false, "believed: {found:?}");
                }
            }
            if !latest.has_data() && found.has_data() {
                // Zeros that now claim to be data: the checksum asked for isn't that of the zeros that may lie there.
                prop_assert_ne!(found.crc, ZERO_BLOCK_CRC);
            }
        }
    }
}
