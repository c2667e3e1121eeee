//! Figures as people read them.

pub(crate) const MIB: f64 = 1_048_576.0;

/// Three digits that count.
pub(crate) fn decimals(value: f64) -> String {
    if value >= 99.95 || value == 0.0 {
        format!("{value:.0}")
    } else if value >= 9.995 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

/// A time in µs, in the unit that people would choose.
pub(crate) fn time(us: f64) -> String {
    if us == 0.0 {
        "0".to_owned()
    } else if us < 999.5 {
        format!("{us:.0} µs")
    } else if us < 999_500.0 {
        format!("{} ms", decimals(us / 1e3))
    } else {
        format!("{} s", decimals(us / 1e6))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_read_well() {
        for (us, text) in [
            (0.0, "0"),
            (85.4, "85 µs"),
            (999.6, "1.00 ms"),
            (12_345.0, "12.3 ms"),
            (123_456.0, "123 ms"),
            (9_980_000.0, "9.98 s"),
        ] {
            assert_eq!(time(us), text);
        }
        assert_eq!(["0", "0.50", "99.9", "100"], [0.0, 0.5, 99.94, 99.96].map(decimals));
    }
}
