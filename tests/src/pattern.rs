//! Bytes that tell where they belong, and a small random number generator that a seed replays.

/// The byte at `offset` of the volume, never 0, so that it differs from a hole.
pub fn byte_at(offset: u64, salt: u64) -> u8 {
    let mixed = (offset ^ salt.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let [.., high] = mixed.to_le_bytes();
    high | 1
}

/// The bytes of a range of the volume.
pub fn bytes_at(offset: u64, length: u64, salt: u64) -> Vec<u8> {
    (offset..offset + length).map(|at| byte_at(at, salt)).collect()
}

/// Xorshift: good enough to choose offsets.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % bound
    }
}
