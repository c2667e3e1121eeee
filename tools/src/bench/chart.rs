//! Curves over time as SVG.
//!
//! Invariants:
//! - The size of a picture doesn't depend on how long the run was: points that fall together become the worst of them.
//! - No colour stands in it: lines and marks have classes, which the report's style knows for light and for dark.

use std::fmt::Write as _;

/// The picture's own units; it is scaled to the page.
const WIDTH: f64 = 1000.0;
pub(super) const LEFT: f64 = 64.0;
pub(super) const RIGHT: f64 = WIDTH - 12.0;
const TOP: f64 = 8.0;
const HEIGHT: f64 = 150.0;
const BOTTOM: f64 = TOP + HEIGHT;
const BELOW: f64 = 22.0;
/// More points than that can't be told apart.
const POINTS_MAX: usize = 600;
const TICKS: f64 = 4.0;
const TIME_TICKS: f64 = 10.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// From 0.
    Linear,
    Log,
}

#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) class: String,
    /// Seconds and value; `None` where nothing is known, which interrupts the line.
    pub(super) points: Vec<(f64, Option<f64>)>,
}

#[derive(Debug)]
pub(super) struct Panel {
    pub(super) title: &'static str,
    pub(super) scale: Scale,
    /// How a value is told to people.
    pub(super) show: fn(f64) -> String,
    pub(super) lines: Vec<Line>,
    /// A value to compare with, and what it is.
    pub(super) mark: Option<(f64, &'static str)>,
}

/// A stretch of time with a name, shaded in turns.
#[derive(Clone, Debug)]
pub(super) struct Band {
    pub(super) name: String,
    pub(super) from_s: f64,
    pub(super) to_s: f64,
}

/// Fewer points, if there are too many: of those that fall together the one with the largest value.
pub(super) fn thinned(points: &[(f64, Option<f64>)]) -> Vec<(f64, Option<f64>)> {
    let together = points.len().div_ceil(POINTS_MAX).max(1);
    let largest = |points: &[(f64, Option<f64>)]| {
        points.iter().copied().max_by(|a, b| a.1.partial_cmp(&b.1).unwrap_or(std::cmp::Ordering::Equal))
    };
    points.chunks(together).filter_map(largest).collect()
}

pub(super) fn svg(panel: &Panel, bands: &[Band], end_s: f64, names: bool) -> String {
    let values = || panel.lines.iter().flat_map(|line| &line.points).filter_map(|(_, value)| *value);
    let most = values().fold(panel.mark.map_or(0.0, |(value, _)| value), f64::max);
    let axis = match panel.scale {
        Scale::Linear => Axis::linear(most),
        Scale::Log => Axis::log(values().filter(|value| *value > 0.0).fold(f64::INFINITY, f64::min), most),
    };
    let end_s = end_s.max(0.1);
    let x = |s: f64| LEFT + (RIGHT - LEFT) * (s / end_s).clamp(0.0, 1.0);
    let mut out = format!(
        "<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"{}\">\n",
        BOTTOM + BELOW,
        escaped(panel.title)
    );
    for (at, band) in bands.iter().enumerate() {
        let (from, to) = (x(band.from_s), x(band.to_s));
        let width = (to - from).max(0.0);
        if at % 2 == 0 {
            put(
                &mut out,
                format_args!(
                    "<rect class=\"band\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{HEIGHT}\"/>"
                ),
            );
        }
        // A name that doesn't fit says less than none.
        if names && width > 7.0 * band.name.chars().count() as f64 {
            let (middle, y, name) = ((from + to) / 2.0, TOP + 13.0, escaped(&band.name));
            put(&mut out, format_args!("<text class=\"job\" x=\"{middle:.1}\" y=\"{y}\">{name}</text>"));
        }
    }
    for tick in axis.ticks() {
        let (y, text) = (axis.y(tick), escaped(&round(&(panel.show)(tick))));
        put(&mut out, format_args!("<path class=\"grid\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>"));
        put(
            &mut out,
            format_args!("<text class=\"tick y\" x=\"{}\" y=\"{:.1}\">{text}</text>", LEFT - 8.0, y + 4.0),
        );
    }
    let step = nice(end_s / TIME_TICKS);
    for tick in (0..).map(|n| f64::from(n) * step).take_while(|tick| *tick <= end_s) {
        let (x, y) = (x(tick), BOTTOM + 16.0);
        put(
            &mut out,
            format_args!("<text class=\"tick x\" x=\"{x:.1}\" y=\"{y}\">{} s</text>", trimmed(tick)),
        );
    }
    if let Some((value, name)) = panel.mark {
        let y = axis.y(value);
        put(&mut out, format_args!("<path class=\"mark\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>"));
        put(
            &mut out,
            format_args!(
                "<text class=\"mark\" x=\"{}\" y=\"{:.1}\">{}</text>",
                RIGHT - 4.0,
                y - 4.0,
                escaped(name)
            ),
        );
    }
    for line in &panel.lines {
        let path = path(&thinned(&line.points), &x, &axis);
        if !path.is_empty() {
            put(&mut out, format_args!("<path class=\"line {}\" d=\"{path}\"/>", line.class));
        }
    }
    out.push_str("<path class=\"cursor\" d=\"\"/>\n</svg>\n");
    out
}

fn path(points: &[(f64, Option<f64>)], x: &impl Fn(f64) -> f64, axis: &Axis) -> String {
    let mut path = String::new();
    for piece in points.split(|(_, value)| value.is_none()) {
        let known = piece.iter().filter_map(|(at, value)| Some((x(*at), axis.y((*value)?))));
        for (at, (x, y)) in known.enumerate() {
            // A point without neighbours would be nothing to be seen.
            path.push_str(&match (at, piece.len()) {
                (0, 1) => format!("M{:.1} {y:.1}h4", x - 2.0),
                (0, _) => format!("M{x:.1} {y:.1}"),
                _ => format!("L{x:.1} {y:.1}"),
            });
        }
    }
    path
}

#[derive(Debug)]
struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    step: f64,
}

impl Axis {
    fn linear(most: f64) -> Self {
        let most = if most > 0.0 { most } else { 1.0 };
        let step = nice(most / TICKS);
        Self { scale: Scale::Linear, low: 0.0, high: (most / step).ceil() * step, step }
    }

    /// Whole powers of ten.
    fn log(least: f64, most: f64) -> Self {
        let most = if most > 0.0 { most } else { 1.0 };
        let low = least.min(most).log10().floor();
        let high = most.log10().ceil().max(low + 1.0);
        Self { scale: Scale::Log, low, high, step: ((high - low) / TICKS).ceil() }
    }

    fn y(&self, value: f64) -> f64 {
        let value = match self.scale {
            Scale::Linear => value,
            Scale::Log if value > 0.0 => value.log10(),
            Scale::Log => self.low,
        };
        BOTTOM - HEIGHT * ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        let at = (0..).map(|n| self.low + f64::from(n) * self.step);
        let at = at.take_while(|at| *at <= self.high + self.step / 1e6);
        match self.scale {
            Scale::Linear => at.collect(),
            Scale::Log => at.map(|power| 10_f64.powf(power)).collect(),
        }
    }
}

/// The next of 1, 2, 5, 10, 20 and so on.
fn nice(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= value * (1.0 - 1e-9));
    digit.unwrap_or(10.0) * power
}

/// `10.0 ms` is `10 ms`.
fn round(text: &str) -> String {
    let (figure, unit) = text.split_once(' ').map_or((text, ""), |(figure, unit)| (figure, unit));
    let figure =
        if figure.contains('.') { figure.trim_end_matches('0').trim_end_matches('.') } else { figure };
    format!("{figure} {unit}").trim_end().to_owned()
}

fn trimmed(value: f64) -> String {
    round(&format!("{value:.2}"))
}

fn put(out: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing to a string can't fail.
    writeln!(out, "{what}").ok();
}

/// Text within HTML.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            _ => out.push(char),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_figures_above_the_data() {
        let check = |most: f64, ticks: &[f64]| {
            let axis = Axis::linear(most);
            let found = axis.ticks();
            assert_eq!(found.len(), ticks.len(), "{most}: {found:?}");
            assert!(found.iter().zip(ticks).all(|(a, b)| (a - b).abs() < 1e-9), "{most}: {found:?}");
            assert!(axis.y(most) >= TOP);
        };
        check(0.0, &[0.0, 0.5, 1.0]);
        check(7.0, &[0.0, 2.0, 4.0, 6.0, 8.0]);
        check(200.0, &[0.0, 50.0, 100.0, 150.0, 200.0]);
        let log = Axis::log(85.0, 1.2e6);
        assert_eq!(log.ticks().len(), 4);
        assert!(log.y(85.0) > log.y(1.2e6));
        assert!((log.y(0.0) - BOTTOM).abs() < 1e-9);
        assert!(Axis::log(f64::INFINITY, 0.0).y(1.0).is_finite());
    }

    #[test]
    fn peaks_survive_thinning() {
        let points: Vec<(f64, Option<f64>)> =
            (0..100_000).map(|at| (f64::from(at), Some(if at == 77_777 { 9.0 } else { 1.0 }))).collect();
        let thin = thinned(&points);
        assert!(thin.len() <= POINTS_MAX);
        assert!(thin.contains(&(77_777.0, Some(9.0))));
    }

    #[test]
    fn a_gap_interrupts_the_line() {
        let points = [(0.0, Some(1.0)), (1.0, None), (2.0, Some(1.0)), (3.0, Some(1.0))];
        let path = path(&points, &|s| s, &Axis::linear(1.0));
        assert_eq!(path, format!("M-2.0 {TOP:.1}h4M2.0 {TOP:.1}L3.0 {TOP:.1}"));
        assert_eq!(["10.0 ms", "0.50", "100 µs", "10"].map(round), ["10 ms", "0.5", "100 µs", "10"]);
    }
}
