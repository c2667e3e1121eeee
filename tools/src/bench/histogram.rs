//! fio's latency histograms: those of a whole job in its report, and those of each window in its logs.
//!
//! A bin of the logs is a number; up to 128 it is the latency in ns, above it each power of two is cut into 64 bins.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};

use super::model::Direction;

const BINS_PER_OCTAVE_BITS: u32 = 6;
const BINS_PER_OCTAVE: u32 = 1 << BINS_PER_OCTAVE_BITS;
/// fio has 29 octaves; more would not fit u64 nanoseconds by far.
const BINS_MAX: u32 = 40 * BINS_PER_OCTAVE;

/// How many took how long, in ns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Histogram {
    counts: BTreeMap<u64, u64>,
}

impl Histogram {
    pub(super) fn add(&mut self, ns: u64, count: u64) {
        if count > 0 {
            *self.counts.entry(ns).or_default() += count;
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        for (&ns, &count) in &other.counts {
            self.add(ns, count);
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    pub(super) fn max_us(&self) -> Option<f64> {
        self.counts.last_key_value().map(|(&ns, _)| ns as f64 / 1e3)
    }

    /// The latency that `per_mille` of 1000 don't exceed.
    pub(super) fn quantile_us(&self, per_mille: u64) -> Option<f64> {
        let wanted = self.count().saturating_mul(per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        let found = self.counts.iter().find(|&(_, &count)| {
            seen += count;
            seen >= wanted
        });
        found.map(|(&ns, _)| ns as f64 / 1e3)
    }
}

/// One line of a histogram log: what ended in a window of one direction and block size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogLine {
    /// The end of the window.
    pub(super) unix_ms: u64,
    pub(super) direction: Direction,
    pub(super) block_bytes: u64,
    pub(super) latencies: Histogram,
}

pub(super) fn parse_log(text: &str) -> Result<Vec<LogLine>> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.enumerate().map(|(at, line)| parse_line(line).with_context(|| format!("line {}", at + 1))).collect()
}

fn parse_line(line: &str) -> Result<LogLine> {
    let mut fields = line.split(',').map(str::trim).filter(|field| !field.is_empty());
    let mut number = |what: &str| -> Result<Option<u64>> {
        let parse = |field: &str| field.parse().with_context(|| format!("{what}: {field:?} is no number"));
        fields.next().map(parse).transpose()
    };
    let unix_ms = number("time")?.context("it is empty")?;
    let direction = match number("direction")? {
        Some(0) => Direction::Read,
        Some(1) => Direction::Write,
        Some(2) => Direction::Trim,
        other => bail!("{other:?} is no direction"),
    };
    let block_bytes = number("block size")?.context("it has no block size")?;
    let mut latencies = Histogram::default();
    for bin in 0.. {
        let Some(count) = number("count")? else { break };
        latencies.add(bin_ns(bin).context("it has too many bins")?, count);
    }
    Ok(LogLine { unix_ms, direction, block_bytes, latencies })
}

/// The middle of a bin.
fn bin_ns(bin: u32) -> Option<u64> {
    if bin < 2 * BINS_PER_OCTAVE {
        return Some(bin.into());
    }
    if bin >= BINS_MAX {
        return None;
    }
    let width_bits = (bin >> BINS_PER_OCTAVE_BITS) - 1;
    let base = 1_u64 << (width_bits + BINS_PER_OCTAVE_BITS);
    let below = u64::from(bin % BINS_PER_OCTAVE) << width_bits;
    Some(base + below + (1 << width_bits) / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_those_of_fio() {
        // From a report whose bins stand beside a log's.
        for (bin, ns) in [(0, 0), (127, 127), (128, 129), (191, 255), (192, 258), (255, 510), (772, 140_288)]
        {
            assert_eq!(bin_ns(bin), Some(ns), "bin {bin}");
        }
        let all: Vec<u64> = (0..BINS_MAX).filter_map(bin_ns).collect();
        assert!(all.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(bin_ns(BINS_MAX), None);
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_list() {
        let mut histogram = Histogram::default();
        let mut naive = Vec::new();
        for (ns, count) in [(5_000, 90_u16), (7_000, 9), (900_000, 1)] {
            histogram.add(ns, count.into());
            naive.extend(std::iter::repeat_n(ns as f64 / 1e3, count.into()));
        }
        for (per_mille, at) in [(500, 49), (900, 89), (901, 90), (990, 98), (999, 99)] {
            assert_eq!(histogram.quantile_us(per_mille), Some(naive[at]), "{per_mille}");
        }
        assert_eq!(histogram.max_us(), Some(900.0));
        assert_eq!(Histogram::default().quantile_us(500), None);
    }

    #[test]
    fn lines_are_read_and_nonsense_is_named() {
        let lines = parse_log("1000, 1, 4096, 0, 2, 0, 1\n\n1250, 0, 512, 0, 0, 0, 0,\n").unwrap();
        assert_eq!(lines.len(), 2);
        assert_eq!(
            (lines[0].unix_ms, lines[0].direction, lines[0].block_bytes),
            (1000, Direction::Write, 4096)
        );
        assert_eq!(lines[0].latencies.counts, BTreeMap::from([(1, 2), (3, 1)]));
        assert_eq!(lines[1].latencies.count(), 0);
        for text in ["x, 1, 2", "1, 7, 4096, 1", "1, 1, 4096, -1", "1, 1"] {
            assert!(format!("{:#}", parse_log(text).unwrap_err()).contains("line 1"), "{text}");
        }
    }
}
