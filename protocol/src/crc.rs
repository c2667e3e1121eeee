//! Block checksums: crc32c of each 4 KiB block.

use crate::types::BLOCK_BYTES;

/// The checksum of a block of zeros.
pub const ZERO_BLOCK_CRC: u32 = 0x98f9_4189;

pub fn crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// The checksum of every block of `data`, whose length is a multiple of a block.
pub fn block_crcs(data: &[u8]) -> Vec<u32> {
    debug_assert_eq!(data.len() % BLOCK_BYTES, 0);
    data.chunks_exact(BLOCK_BYTES).map(crc).collect()
}

/// The index of the first block of `data` whose checksum isn't the one expected. A length that doesn't fit the number
/// of checksums is a mismatch at the first block that is missing.
pub fn first_mismatch(data: &[u8], expected: &[u32]) -> Option<usize> {
    if data.len() != expected.len() * BLOCK_BYTES {
        return Some(expected.len().min(data.len() / BLOCK_BYTES));
    }
    data.chunks_exact(BLOCK_BYTES).zip(expected).position(|(block, &expected)| crc(block) != expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_block_constant() {
        assert_eq!(crc(&[0; BLOCK_BYTES]), ZERO_BLOCK_CRC);
    }

    #[test]
    fn a_mismatch_is_found_at_its_block() {
        let mut data = vec![7_u8; 3 * BLOCK_BYTES];
        let crcs = block_crcs(&data);
        assert_eq!(first_mismatch(&data, &crcs), None);
        data[2 * BLOCK_BYTES] ^= 1;
        assert_eq!(first_mismatch(&data, &crcs), Some(2));
        assert_eq!(first_mismatch(&data[..BLOCK_BYTES], &crcs), Some(1));
    }
}
