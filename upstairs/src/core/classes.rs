//! Classes of latencies: each power of two is cut into eight, so that a value is known to 6% by the middle of its class.

const BITS: u32 = 3;
const PER_OCTAVE: u32 = 1 << BITS;

/// Of values with so many bits.
pub(super) const fn count(bits: u32) -> usize {
    ((bits - BITS + 1) * PER_OCTAVE) as usize
}

pub(super) fn class_of(value: u64) -> usize {
    // Up to the first power of two that is cut, every value is a class.
    let shift = value.max(1).ilog2().max(BITS) - BITS;
    let class = u64::from(shift * PER_OCTAVE) + (value >> shift);
    usize::try_from(class).unwrap_or(usize::MAX)
}

/// The first value of a class, and how many values it has.
pub(super) fn values_of(class: usize) -> (u64, u64) {
    let (class, per_octave) = (class as u64, u64::from(PER_OCTAVE));
    let shift = (class / per_octave).saturating_sub(1);
    ((class - shift * per_octave) << shift, 1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_class() {
        let values =
            (0..5_000).chain((13..64).flat_map(|octave| [1 << octave, (1_u64 << octave) / 2 * 3 + 7]));
        let mut last = 0;
        for value in values.chain([u64::MAX]) {
            let class = class_of(value);
            let (first, width) = values_of(class);
            assert!(class >= last && first <= value && value - first < width, "{value}: {class}");
            last = class;
        }
        assert_eq!(last, count(64) - 1);
        assert_eq!([15, 16, 31, 32].map(class_of), [15, 16, 23, 24]);
    }
}
