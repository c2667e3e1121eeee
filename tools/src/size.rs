//! Sizes as people write them: `4G` is 4 GiB, as with `truncate` and `qemu-img`.
//!
//! Invariants:
//! - A volume's size is a positive multiple of a block.

use anyhow::{Result, bail};
use newel_protocol::BLOCK_BYTES;

/// Parses `4096`, `64M`, `4G`, `4GiB` (powers of 1024) or `4GB` (powers of 1000).
pub(crate) fn parse_volume_size(text: &str) -> Result<u64> {
    let Some(bytes) = parse_bytes(text) else {
        bail!("{text:?} is not a size: write for example 64M, 4G or 4GiB");
    };
    if bytes == 0 || bytes % BLOCK_BYTES as u64 != 0 {
        bail!("{text:?} is {bytes} bytes, and a volume is a positive multiple of {BLOCK_BYTES} bytes");
    }
    Ok(bytes)
}

fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_uppercase();
    let (letter, base) = match unit.as_str() {
        "" | "B" => return number.parse().ok(),
        _ if unit.ends_with("IB") => (unit.strip_suffix("IB")?, 1024_u64),
        _ if unit.ends_with('B') => (unit.strip_suffix('B')?, 1000),
        _ => (unit.as_str(), 1024),
    };
    let power = match letter {
        "K" => 1,
        "M" => 2,
        "G" => 3,
        "T" => 4,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(base.pow(power))
}

/// `4 GiB`, `1.5 MiB`, `512 B`.
pub(crate) fn human(bytes: u64) -> String {
    if bytes < 1024 { format!("{bytes} B") } else { bytesize::ByteSize::b(bytes).display().iec().to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse() {
        let check =
            |text: &str, bytes: Option<u64>| assert_eq!(parse_volume_size(text).ok(), bytes, "{text}");
        check("4096", Some(4096));
        check("4G", Some(4 << 30));
        check("4GiB", Some(4 << 30));
        check("64m", Some(64 << 20));
        check("1024GB", Some(1024 * 1_000_000_000));
        check("4GB", None);
        check("4097", None);
        check("0", None);
        check("", None);
        check("G", None);
        check("4 X", None);
        check("99999999999T", None);
    }
}
