//! The report of a run: one HTML file with everything in it, which asks nothing of a network.

use newel_protocol::BLOCK_BYTES;
use serde_json::json;

use super::chart::{self, Band, Line, Panel, Scale, escaped, svg};
use super::model::{Direction, ReplicaSample, Run, Window};
use super::table::{self, Table};
use crate::size::human;
use crate::units::{MIB, decimals, time};

const STYLE: &str = include_str!("report.css");
const SCRIPT: &str = include_str!("report.js");
/// A sample that comes so much later than the one before has a gap before it.
const GAP_MS: u64 = 1000;
/// The throttle's default limit, to compare leads with.
const LEAD_LIMIT_US: f64 = 10_000.0;

/// A figure of a window.
type OfWindow = fn(&Window) -> Option<f64>;

pub(super) fn html(run: &Run) -> String {
    let title = format!("newel bench: {} on {}", run.jobs_of, run.target);
    let bands: Vec<Band> = run
        .jobs
        .iter()
        .map(|job| Band { name: job.name.clone(), from_s: seconds(job.from_ms), to_s: seconds(job.to_ms) })
        .collect();
    let end_s = seconds(run.end_ms());
    let panels = panels(run);
    let mut body = head(run);
    body.push_str("<h2>What the guest got</h2>\n");
    body.push_str(&table_html(&table::guest(run)));
    for panel in &panels {
        body.push_str(&panel_html(panel, &bands, end_s));
    }
    let replicas = table::replicas(run);
    if !replicas.rows.is_empty() {
        body.push_str("<h2>What each replica owed, and by how much it was ahead</h2>\n");
        body.push_str(&table_html(&replicas));
    }
    body.push_str(&happenings(run));
    let data = script_json(&serde_json::to_string(run).unwrap_or_default());
    let curves = script_json(&curves(&panels, end_s).to_string());
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}</main>\n\
         <script type=\"application/json\" id=\"run\">{data}</script>\n<script type=\"application/json\" id=\"curves\">{curves}</script>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n",
        title = escaped(&title)
    )
}

fn head(run: &Run) -> String {
    let begun = std::time::UNIX_EPOCH + std::time::Duration::from_millis(run.begun_unix_ms);
    let begun = humantime::format_rfc3339_seconds(begun).to_string().replace('T', " ").replace('Z', " UTC");
    let mut facts = vec![("begun", begun), ("took", format!("{:.0} s", seconds(run.end_ms())))];
    if let Some(volume) = &run.volume {
        let blocks = volume.size_bytes / BLOCK_BYTES as u64;
        facts.push((
            "volume",
            format!(
                "{}, {} ({blocks} blocks), generation {}",
                volume.name,
                human(volume.size_bytes),
                volume.generation
            ),
        ));
        let cancel = if volume.cancel_reads { ", cancelled once answered" } else { "" };
        let throttle = if volume.throttle { "on" } else { "off" };
        facts.push(("reads", format!("{}{cancel}; throttle {throttle}", volume.read_policy)));
    }
    facts.push(("host", format!("{}; newel {}, {}", run.host, run.newel_version, run.fio_version)));
    let mut out = String::from("<dl>\n");
    for (name, value) in facts {
        out.push_str(&format!("<div><dt>{name}</dt><dd>{}</dd></div>\n", escaped(&value)));
    }
    out.push_str("</dl>\n");
    if run.interrupted {
        out.push_str("<p class=\"warning\">Interrupted: the figures are those of the time until then.</p>\n");
    }
    if run.samples_missed > 0 {
        out.push_str(&format!(
            "<p class=\"warning\">The status did not answer {} times.</p>\n",
            run.samples_missed
        ));
    }
    out
}

fn panels(run: &Run) -> Vec<Panel> {
    let mut panels = vec![bandwidth(run)];
    panels.extend(Direction::ALL.into_iter().filter_map(|direction| latencies(run, direction)));
    if run.samples.is_empty() {
        return panels;
    }
    let replicas = |title, show, mark, value: fn(&ReplicaSample) -> f64| {
        let line = |at| replica_line(run, at, value);
        Panel { title, scale: Scale::Linear, show, lines: (0..run.replicas()).map(line).collect(), mark }
    };
    panels.push(replicas(
        "Pending jobs at each replica",
        |jobs| format!("{jobs:.0}"),
        None,
        |of| of.queue_jobs as f64,
    ));
    panels.push(replicas("Pending bytes at each replica", mib, None, |of| of.queue_bytes as f64 / MIB));
    let limit = run.volume.as_ref().is_some_and(|volume| volume.throttle);
    let limit = limit.then_some((LEAD_LIMIT_US, "throttled above this (default)"));
    panels.push(replicas("Lead over the slowest replica", time, limit, |of| of.lead_us as f64));
    panels.push(replicas("Delay put on reads to each replica", time, None, |of| of.delay_us as f64));
    panels
}

fn mib(value: f64) -> String {
    format!("{} MiB", decimals(value))
}

fn bandwidth(run: &Run) -> Panel {
    let line = |direction: Direction| {
        let points = window_points(run, direction, |window| Some(window.bytes_per_s / MIB));
        (!points.is_empty()).then(|| Line {
            name: direction.name().to_owned(),
            class: direction.name().to_owned(),
            points,
        })
    };
    let lines = Direction::ALL.into_iter().filter_map(line).collect();
    Panel {
        title: "Bandwidth",
        scale: Scale::Linear,
        show: |value| format!("{} MiB/s", decimals(value)),
        lines,
        mark: None,
    }
}

fn latencies(run: &Run, direction: Direction) -> Option<Panel> {
    let title = match direction {
        Direction::Read => "Latency of reads",
        Direction::Write => "Latency of writes",
        Direction::Trim => "Latency of trims",
    };
    let of: [(&str, OfWindow); 3] =
        [("p50", |window| window.p50_us), ("p99", |window| window.p99_us), ("max", |window| window.max_us)];
    let line = |(name, value): (&str, OfWindow)| Line {
        name: name.to_owned(),
        class: name.to_owned(),
        points: window_points(run, direction, value),
    };
    let lines: Vec<Line> = of.into_iter().map(line).collect();
    let any = lines.iter().any(|line| line.points.iter().any(|(_, value)| value.is_some()));
    any.then_some(Panel { title, scale: Scale::Log, show: time, lines, mark: None })
}

/// One point in the middle of each window, and a gap where there is none.
fn window_points(run: &Run, direction: Direction, value: OfWindow) -> Vec<(f64, Option<f64>)> {
    let mut points = Vec::new();
    let mut end = None;
    for window in run.windows.iter().filter(|window| window.direction == direction) {
        if end.is_some_and(|end| end != window.at_ms) {
            points.push((seconds(window.at_ms), None));
        }
        points.push((seconds(window.at_ms + window.span_ms / 2), value(window)));
        end = Some(window.at_ms + window.span_ms);
    }
    points
}

fn replica_line(run: &Run, at: usize, value: fn(&ReplicaSample) -> f64) -> Line {
    let mut points = Vec::new();
    let mut last = None;
    for sample in &run.samples {
        if last.is_some_and(|last| sample.at_ms.saturating_sub(last) > GAP_MS) {
            points.push((seconds(sample.at_ms), None));
        }
        points.push((seconds(sample.at_ms), sample.replicas.get(at).map(value)));
        last = Some(sample.at_ms);
    }
    Line { name: format!("replica {at}"), class: format!("r{at}"), points }
}

fn panel_html(panel: &Panel, bands: &[Band], end_s: f64) -> String {
    let mut legend = String::new();
    for line in &panel.lines {
        let (class, name) = (&line.class, escaped(&line.name));
        legend.push_str(&format!("<span class=\"key {class}\"><i></i>{name}<b></b></span>"));
    }
    let picture = svg(panel, bands, end_s, true);
    format!(
        "<figure>\n<figcaption><strong>{}</strong>{legend}</figcaption>\n{picture}</figure>\n",
        escaped(panel.title)
    )
}

fn table_html(table: &Table) -> String {
    let mut out = String::from("<div class=\"scroll\"><table>\n<thead><tr>");
    for (at, cell) in table.head.iter().enumerate() {
        out.push_str(&format!("<th{}>{}</th>", side(table, at), escaped(cell)));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    let mut before = None;
    for row in &table.rows {
        // What belongs to one job stands together under its name.
        let same = before == row.first();
        out.push_str(if same { "<tr>" } else { "<tr class=\"first\">" });
        for (at, cell) in row.iter().enumerate() {
            let cell = if same && at == 0 { "" } else { cell };
            out.push_str(&format!("<td{}>{}</td>", side(table, at), escaped(cell)));
        }
        out.push_str("</tr>\n");
        before = row.first();
    }
    out.push_str("</tbody>\n</table></div>\n");
    out
}

fn side(table: &Table, column: usize) -> &'static str {
    if column < table.left { " class=\"text\"" } else { "" }
}

fn happenings(run: &Run) -> String {
    if run.happenings.is_empty() {
        return String::new();
    }
    let mut out = String::from("<h2>What happened</h2>\n<ol class=\"happenings\">\n");
    for told in &run.happenings {
        out.push_str(&format!("<li><b>{:.1} s</b> {}</li>\n", seconds(told.at_ms), escaped(&told.what)));
    }
    out.push_str("</ol>\n");
    out
}

/// What the script needs to tell the values at a moment.
fn curves(panels: &[Panel], end_s: f64) -> serde_json::Value {
    let panels: Vec<serde_json::Value> = panels
        .iter()
        .map(|panel| {
            let lines = panel.lines.iter().map(|line| {
                let told = |(at, value): (f64, Option<f64>)| {
                    json!([(at * 1e3).round() / 1e3, value.map(panel.show)])
                };
                json!(chart::thinned(&line.points).into_iter().map(told).collect::<Vec<_>>())
            });
            json!(lines.collect::<Vec<_>>())
        })
        .collect();
    json!({ "end": end_s, "left": chart::LEFT, "right": chart::RIGHT, "panels": panels })
}

/// JSON that can't end the element it stands in.
fn script_json(text: &str) -> String {
    text.replace('<', "\\u003c")
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1e3
}
