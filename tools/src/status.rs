//! `newel status`: a volume's state as a table, or as the JSON that the daemon gives.

use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use clap::Args;
use newel_upstairs::core::status::{
    CatchUpStatus, DelayStatus, HealthStatus, ReplicaStatus, ScrubStatus, Status,
};

use crate::size::human;
use crate::target::Target;
use crate::{http, say};

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Print the daemon's JSON as it is
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: Target,
}

pub(crate) async fn run(args: StatusArgs) -> Result<()> {
    let address = args.target.address()?;
    let body = http::get(&address, "/status").await?;
    if args.json {
        say(String::from_utf8_lossy(&body).trim_end());
        return Ok(());
    }
    let status: Status = serde_json::from_slice(&body)
        .with_context(|| format!("the answer of {address} is not a status of this version of Newel"))?;
    say(table(&status).trim_end());
    Ok(())
}

/// Latencies and delays: µs below 10 ms, else ms.
fn micros(value: u64) -> String {
    if value < 10_000 { format!("{value} µs") } else { format!("{} ms", value / 1000) }
}

fn table(status: &Status) -> String {
    let mut rows = vec![
        [
            "replica",
            "state",
            "address",
            "jobs",
            "bytes",
            "last reply",
            "mean",
            "lead",
            "read delay",
            "healed",
        ]
        .map(str::to_owned),
    ];
    rows.extend(status.replicas.iter().map(row));
    let mut widths = [0; 10];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    let mut line = |text: String| {
        out.push_str(text.trim_end());
        out.push('\n');
    };
    line(format!("volume     {} ({})", status.name, status.volume));
    line(format!("size       {}", human(status.size_bytes)));
    line(format!("state      {}, generation {}", status.state, status.generation));
    line(format!(
        "in flight  {} jobs, {}, for {} guest requests",
        status.jobs_in_flight,
        human(status.bytes_in_flight as u64),
        status.guest_requests
    ));
    line(format!("reactor    {}", delays(&status.reactor, "late")));
    if status.reads.throttled {
        let cause = status.reads.cause.as_deref().unwrap_or("a replica is slow");
        let waiting = status.reads.waiting;
        line(format!(
            "throttled  {cause}; {waiting} reads wait, the oldest for {}",
            micros(status.reads.waiting_us)
        ));
    }
    if status.scrub.pass > 0 {
        line(format!("scrub      {}", scrub(&status.scrub)));
    }
    line(String::new());
    for (index, row) in rows.iter().enumerate() {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        line(cells.join("  "));
        let Some(replica) = index.checked_sub(1).and_then(|at| status.replicas.get(at)) else { continue };
        if replica.member == Some(false) {
            line(format!("         region {} is none of this volume's", replica.region));
        }
        if let Some(faults) = &replica.faults {
            line(format!("         FAULTS PUT IN ON PURPOSE: {faults}"));
        }
        if let Some(reason) = &replica.reason {
            line(format!("         {reason}"));
        }
        if let Some(health) = &replica.health {
            line(format!("         {}", health_of(health, replica.ping_us)));
        }
        if let Some(progress) = &replica.catch_up {
            line(format!("         {}", catch_up(progress)));
        }
    }
    out
}

fn row(replica: &ReplicaStatus) -> [String; 10] {
    let time = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), micros);
    [
        replica.id.to_string(),
        replica.state.replace('_', " "),
        replica.address.clone(),
        replica.queue_jobs.to_string(),
        human(replica.queue_bytes as u64),
        time(replica.last_reply_us),
        time(replica.mean_reply_us),
        time(replica.read_lead_us.or(replica.lead_us)),
        micros(replica.read_delay_us),
        replica.healed_blocks.to_string(),
    ]
}

/// What a replica measured of itself.
fn health_of(health: &HealthStatus, ping_us: Option<u64>) -> String {
    let ping = ping_us.map_or_else(String::new, |took| format!("; ping {}", micros(took)));
    let submits = delays(&health.submits, "held");
    format!("reactor {}; submissions {submits}{ping}", delays(&health.reactor, "late"))
}

/// Such as `late 300 µs (p99.9), at most 99 ms (disk, 2026-11-30 12:00:00 UTC)`.
fn delays(status: &DelayStatus, word: &str) -> String {
    let Some(longest) = &status.longest else { return format!("{word}: nothing yet") };
    let when = UNIX_EPOCH.checked_add(Duration::from_millis(longest.at_unix_ms)).unwrap_or(UNIX_EPOCH);
    let when = humantime::format_rfc3339_seconds(when).to_string().replace('T', " ").replace('Z', " UTC");
    let (p999, most) = (micros(status.delays.p999_us.into()), micros(longest.took_us.into()));
    format!("{word} {p999} (p99.9), at most {most} ({}, {when})", longest.during)
}

fn scrub(scrub: &ScrubStatus) -> String {
    let state = match (scrub.running, scrub.finished_s_ago) {
        (true, _) => format!("{} of {} extents", scrub.extents_done, scrub.extents_total),
        (false, Some(ago)) => format!("finished {ago} s ago"),
        (false, None) => "not finished".to_owned(),
    };
    format!(
        "{state}; {} bad copies, {} healed, {} blocks without a good copy",
        scrub.blocks_bad, scrub.blocks_healed, scrub.blocks_without_good_copy
    )
}

fn catch_up(progress: &CatchUpStatus) -> String {
    let percent = progress.extents_done.saturating_mul(100).checked_div(progress.extents_total).unwrap_or(0);
    let left = progress.eta_s.map_or_else(String::new, |seconds| format!(", about {seconds} s left"));
    format!(
        "catching up: {} of {} extents ({percent}%), {} blocks copied{left}",
        progress.extents_done, progress.extents_total, progress.blocks_copied
    )
}

#[cfg(test)]
mod tests {
    use newel_protocol::lag::Delays;
    use newel_upstairs::core::status::StallStatus;

    use super::*;

    #[test]
    fn the_table_names_everything_that_matters() {
        let replica = |id: u8, state: &str| ReplicaStatus {
            id,
            state: state.into(),
            address: format!("127.0.0.1:2100{id}"),
            queue_jobs: 3,
            queue_bytes: 12 << 10,
            last_reply_us: Some(85),
            read_delay_us: 12_500,
            faults: Some("read-delay=20ms".into()),
            ..ReplicaStatus::default()
        };
        let longest =
            StallStatus { took_us: 99_000, ago_ms: 5, at_unix_ms: 1_790_000_000_000, during: "disk".into() };
        let delays = Delays { count: 9, p999_us: 1_200, ..Delays::default() };
        let late = DelayStatus { delays, longest: Some(longest) };
        let mut active = replica(0, "active");
        active.health = Some(HealthStatus { reactor: late.clone(), submits: late.clone() });
        active.ping_us = Some(250);
        let mut lagging = replica(1, "catching_up");
        lagging.reason = Some("its connection broke".into());
        lagging.catch_up =
            Some(CatchUpStatus { extents_total: 200, extents_done: 50, blocks_copied: 7, eta_s: Some(3) });
        let status = Status {
            name: "db".into(),
            volume: "uuid".into(),
            size_bytes: 4 << 30,
            generation: 9,
            state: "serving".into(),
            reads: newel_upstairs::core::status::ReadsStatus {
                throttled: true,
                cause: Some("replica 0 is ahead".into()),
                waiting: 4,
                waiting_us: 900,
                ..Default::default()
            },
            replicas: vec![active, lagging],
            reactor: DelayStatus::default(),
            scrub: ScrubStatus {
                running: true,
                pass: 1,
                extents_done: 7,
                extents_total: 1024,
                ..ScrubStatus::default()
            },
            ..Status::default()
        };
        let table = table(&status);
        for part in [
            "db (uuid)",
            "4.0 GiB",
            "serving, generation 9",
            "127.0.0.1:21001",
            "85 µs",
            "12 ms",
            "12.0 KiB",
            "7 of 1024 extents; 0 bad copies",
            "FAULTS PUT IN ON PURPOSE: read-delay=20ms",
            "replica 0 is ahead; 4 reads wait, the oldest for 900 µs",
            "its connection broke",
            "reactor    late: nothing yet",
            "reactor late 1200 µs (p99.9), at most 99 ms (disk, 2026-09-21 14:13:20 UTC); submissions held 1200 µs",
            "; ping 250 µs",
            "50 of 200 extents (25%), 7 blocks copied, about 3 s left",
        ] {
            assert!(table.contains(part), "{part:?} is missing in\n{table}");
        }
    }
}
