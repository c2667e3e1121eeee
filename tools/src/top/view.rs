//! Draws what [`super::app`] knows, whatever the size of the terminal.

use std::time::Duration;

use newel_upstairs::core::status::{DelayStatus, ReplicaStatus, Status};
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Clear, Dataset, GraphType, Paragraph, Row, Table};

use super::app::{App, Rate};
use super::stages::Means;
use crate::size::human;
use crate::units::{decimals, time};

/// By replica; told apart on dark and on light terminals.
const COLORS: [Color; 3] = [Color::Blue, Color::Yellow, Color::Green];
const STAGE_COLORS: [Color; 4] = [Color::Blue, Color::Yellow, Color::Magenta, Color::Green];
const SMALLEST: (u16, u16) = (48, 10);
/// Where there is no room for all, curves go first.
const CURVES_FROM_ROWS: u16 = 22;
const BAR_CELLS: usize = 36;
const KEYS: [(&str, &str); 7] = [
    ("q", "quit"),
    ("↑ ↓", "choose a replica"),
    ("g", "next curve: latency, queue, bandwidth, IOPS, delay"),
    ("space", "hold the picture"),
    ("+ -", "look more often, less often"),
    ("?", "this help"),
    ("Esc", "close the help, or quit"),
];

pub(super) fn draw(frame: &mut Frame<'_>, app: &App) {
    let area = frame.area();
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        let (width, height) = SMALLEST;
        frame.render_widget(Paragraph::new(format!("at least {width}x{height}, please; q quits")), area);
        return;
    }
    let Some(look) = app.look() else { return };
    let status = &look.status;
    let notes = notes(app, status);
    let curves = if area.height >= CURVES_FROM_ROWS { Constraint::Min(8) } else { Constraint::Length(0) };
    let rows = [
        Constraint::Length(3),
        Constraint::Length(u16::try_from(notes.len()).unwrap_or(0).min(4)),
        Constraint::Length(u16::try_from(status.replicas.len()).unwrap_or(3) + 2),
        Constraint::Length(detail_rows(app)),
        curves,
        Constraint::Fill(0),
        Constraint::Length(1),
    ];
    let [head, told, replicas, detail, chart, _, keys] = Layout::vertical(rows).areas(area);
    frame.render_widget(Paragraph::new(head_lines(app, status, &look.clock)), head);
    frame.render_widget(Paragraph::new(notes), told);
    draw_replicas(frame, app, replicas);
    draw_detail(frame, app, detail);
    if chart.height >= 6 {
        draw_curves(frame, app, chart);
    }
    draw_keys(frame, app, keys);
    if app.help {
        draw_help(frame, area);
    }
}

fn head_lines<'a>(app: &'a App, status: &'a Status, clock: &'a str) -> Vec<Line<'a>> {
    let state = match status.state.as_str() {
        "serving" => Style::new().fg(Color::Green),
        _ => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
    };
    let cancel = if status.reads.cancel { ", cancelled" } else { "" };
    let first = Line::from(vec![
        Span::styled(status.name.as_str(), Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(format!("  {}  ", human(status.size_bytes))),
        Span::styled(status.state.replace('_', " "), state),
        Span::raw(format!(
            "  generation {}  reads {}{cancel}  every {}  {clock} UTC",
            status.generation,
            status.reads.policy,
            time(app.every().as_secs_f64() * 1e6)
        )),
    ]);
    let guests = &app.rates.guests;
    let second = Line::from(format!(
        "guests  {} IOPS  read {}  write {}  p50 {}  p99 {}  max {}",
        count(guests.iops),
        rate(guests.read_bytes),
        rate(guests.write_bytes),
        latency(guests.p50_us),
        latency(guests.p99_us),
        latency(guests.max_us)
    ));
    let third = Line::from(format!(
        "in flight  {} jobs, {}, {} requests of {} connections  reactor {}",
        status.jobs_in_flight,
        human(status.bytes_in_flight as u64),
        status.guest_requests,
        status.guest_connections,
        late(&status.reactor)
    ));
    vec![first, second, third]
}

/// What a person should not miss.
fn notes<'a>(app: &App, status: &Status) -> Vec<Line<'a>> {
    let warning = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
    let mut notes = Vec::new();
    if let Some((for_long, why)) = app.lost() {
        notes.push(Line::styled(format!("NO ANSWER for {} s: {why}", for_long.as_secs()), warning));
    }
    if app.paused {
        notes.push(Line::styled("held: space goes on", Style::new().add_modifier(Modifier::REVERSED)));
    }
    if status.reads.throttled {
        let cause = status.reads.cause.as_deref().unwrap_or("a replica is slow");
        let waiting = status.reads.waiting;
        notes.push(Line::styled(
            format!(
                "throttled: {cause}; {waiting} reads wait, the oldest for {}",
                time(status.reads.waiting_us as f64)
            ),
            Style::new().fg(Color::Yellow),
        ));
    }
    for replica in &status.replicas {
        if let Some(faults) = &replica.faults {
            notes.push(Line::styled(
                format!("replica {}: FAULTS PUT IN ON PURPOSE: {faults}", replica.id),
                warning,
            ));
        }
        if replica.member == Some(false) {
            notes.push(Line::styled(
                format!("replica {}: its region is none of this volume's", replica.id),
                warning,
            ));
        }
        if let Some(reason) = &replica.reason {
            notes.push(Line::styled(
                format!("replica {}: {reason}", replica.id),
                Style::new().fg(Color::Yellow),
            ));
        }
    }
    notes
}

fn draw_replicas(frame: &mut Frame<'_>, app: &App, area: Rect) {
    // What matters most stands first: a narrow terminal shows fewer columns.
    let head = ["", "state", "IOPS", "MiB/s", "p50", "p99", "max", "queue", "bytes", "lead", "delay"];
    let widths = [9, 11, 8, 8, 9, 9, 9, 6, 10, 9, 9];
    let shown = widths
        .iter()
        .scan(0, |used, width| {
            *used += width + 1;
            Some(*used)
        })
        .take_while(|used| *used <= area.width + 1)
        .count();
    let rows = app.replicas().iter().enumerate().map(|(at, replica)| {
        let none = Rate::default();
        let rate = app.rates.replicas.get(at).unwrap_or(&none);
        let mut style = Style::new().fg(state_color(replica));
        if at == app.selected {
            style = style.add_modifier(Modifier::REVERSED);
        }
        let cells = cells(replica, rate);
        Row::new(cells.into_iter().take(shown).enumerate().map(right)).style(style)
    });
    let head = Row::new(head.map(str::to_owned).into_iter().take(shown).enumerate().map(right))
        .style(Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED));
    let table = Table::new(rows, widths.into_iter().take(shown).map(Constraint::Length))
        .header(head)
        .column_spacing(1);
    frame.render_widget(table, area);
}

fn right<'a>((at, cell): (usize, String)) -> Line<'a> {
    let alignment = if at < 2 { Alignment::Left } else { Alignment::Right };
    Line::from(cell).alignment(alignment)
}

fn state_color(replica: &ReplicaStatus) -> Color {
    match replica.state.as_str() {
        "active" => Color::Reset,
        "catching_up" => Color::Yellow,
        _ => Color::Red,
    }
}

fn cells(replica: &ReplicaStatus, rate: &Rate) -> Vec<String> {
    let lead = replica.read_lead_us.or(replica.lead_us);
    let state = match &replica.catch_up {
        Some(progress) if progress.extents_total > 0 => {
            format!("copying {}%", progress.extents_done.saturating_mul(100) / progress.extents_total)
        }
        Some(_) | None => replica.state.replace('_', " "),
    };
    vec![
        format!("replica {}", replica.id),
        state,
        count(rate.iops),
        decimals(rate.bytes() / 1_048_576.0),
        latency(rate.p50_us),
        latency(rate.p99_us),
        latency(rate.max_us),
        replica.queue_jobs.to_string(),
        human(replica.queue_bytes as u64),
        latency(lead),
        time(replica.read_delay_us as f64),
    ]
}

fn detail_rows(app: &App) -> u16 {
    let stages = app.rates.replica_stages.get(app.selected).map_or(0, Vec::len);
    u16::try_from(app.rates.guest_stages.len() + stages).unwrap_or(0).min(8) + 4
}

/// The chosen replica: what it says of itself, and where the time of its jobs went.
fn draw_detail(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some(replica) = app.replicas().get(app.selected) else { return };
    let mut lines = vec![Line::from(format!(
        "{}  region {}  reconnects {}  healed blocks {}",
        replica.address, replica.region, replica.reconnects, replica.healed_blocks
    ))];
    if let Some(health) = &replica.health {
        lines.push(Line::from(format!(
            "reactor {}  submissions {}  ping {}",
            late(&health.reactor),
            late(&health.submits),
            latency(replica.ping_us)
        )));
    }
    let none = Vec::new();
    let at_replica = app.rates.replica_stages.get(app.selected).unwrap_or(&none);
    let means = app.rates.guest_stages.iter().map(|means| ("before", means));
    let means: Vec<_> = means.chain(at_replica.iter().map(|means| ("there", means))).collect();
    let most = means.iter().map(|(_, means)| means.whole_us()).fold(0.0, f64::max);
    lines.extend(means.iter().map(|(place, means)| stage_line(place, means, most)));
    let block = Block::bordered().title(format!(" replica {} ", replica.id));
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// One bar: its length is the mean time, beside the longest one's.
fn stage_line<'a>(place: &str, means: &Means, most_us: f64) -> Line<'a> {
    let mut spans = vec![Span::raw(format!("{:<6} {place:<6} ", means.operation))];
    let mut drawn = 0;
    let mut until = 0.0;
    for ((_, us), color) in means.stages.iter().zip(STAGE_COLORS.into_iter().cycle()) {
        until += us;
        let end = cells_of(until / most_us.max(1e-9));
        spans.push(Span::styled("█".repeat(end.saturating_sub(drawn)), Style::new().fg(color)));
        drawn = end.max(drawn);
    }
    spans.push(Span::raw(format!(
        "{} {:>8}",
        " ".repeat(BAR_CELLS.saturating_sub(drawn)),
        time(means.whole_us())
    )));
    for ((stage, us), color) in means.stages.iter().zip(STAGE_COLORS.into_iter().cycle()) {
        spans.push(Span::styled(format!("  {stage} {}", time(*us)), Style::new().fg(color)));
    }
    Line::from(spans)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a short bar")]
fn cells_of(part: f64) -> usize {
    (part.clamp(0.0, 1.0) * BAR_CELLS as f64).round() as usize
}

fn draw_curves(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let curve = app.curve;
    let from = app.history.front().map_or(Duration::ZERO, |point| point.at);
    let to = app.history.back().map_or(Duration::ZERO, |point| point.at);
    let series = |at: usize| -> Vec<(f64, f64)> {
        let of = |point: &super::app::Point| {
            let value = curve.of(point.replicas.get(at)?)?;
            Some((point.at.saturating_sub(from).as_secs_f64(), value))
        };
        app.history.iter().filter_map(of).collect()
    };
    let all: Vec<Vec<(f64, f64)>> = (0..app.replicas().len()).map(series).collect();
    let most = all.iter().flatten().map(|(_, value)| *value).fold(0.0, f64::max);
    let most = if most > 0.0 { most * 1.05 } else { 1.0 };
    let datasets = all.iter().enumerate().map(|(at, points)| {
        Dataset::default()
            .name(format!("replica {at}"))
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(COLORS[at % COLORS.len()]))
            .data(points)
    });
    let span = to.saturating_sub(from).as_secs_f64().max(1.0);
    let x = Axis::default().bounds([0.0, span]).labels([format!("-{span:.0} s"), "now".to_owned()]);
    let y =
        Axis::default().bounds([0.0, most]).labels(["0".to_owned(), decimals(most / 2.0), decimals(most)]);
    let block = Block::bordered().title(format!(" {} (g: next) ", curve.title()));
    frame.render_widget(Chart::new(datasets.collect()).x_axis(x).y_axis(y).block(block), area);
}

fn draw_keys(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let line = format!("q quit  ↑↓ replica  g curve  space hold  +- pace  ? help    {}", app.address);
    frame.render_widget(Paragraph::new(line).style(Style::new().add_modifier(Modifier::DIM)), area);
}

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let mut lines: Vec<Line<'_>> =
        KEYS.iter().map(|(key, what)| Line::from(format!("{key:>6}  {what}"))).collect();
    lines.extend(
        [
            "",
            "IOPS, MiB/s and latencies are those of the time since the last look;",
            "latencies are known to 6%. queue and bytes: what a replica owes now.",
            "lead: how much earlier than the slowest it answers; delay: what the",
            "throttle puts on reads to it. Bars: where the mean time of a job went.",
        ]
        .map(Line::from),
    );
    let height = u16::try_from(lines.len()).unwrap_or(0) + 2;
    let [middle] =
        Layout::vertical([Constraint::Length(height)]).flex(ratatui::layout::Flex::Center).areas(area);
    let [middle] =
        Layout::horizontal([Constraint::Length(74)]).flex(ratatui::layout::Flex::Center).areas(middle);
    frame.render_widget(Clear, middle);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" keys and columns ")), middle);
}

fn count(value: f64) -> String {
    if value < 9_999.5 { format!("{value:.0}") } else { format!("{}k", decimals(value / 1e3)) }
}

fn rate(bytes: f64) -> String {
    format!("{} MiB/s", decimals(bytes / 1_048_576.0))
}

fn latency(us: Option<u64>) -> String {
    us.map_or_else(|| "-".to_owned(), |us| time(us as f64))
}

fn late(status: &DelayStatus) -> String {
    let Some(longest) = &status.longest else { return "-".to_owned() };
    format!("p99.9 {} max {}", time(status.delays.p999_us.into()), time(longest.took_us.into()))
}
