//! `newel slow` and `newel inflight`: slow I/O as a person reads it. One line says who was at fault, a bar shows where the time went.

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use clap::Args;
use newel_upstairs::core::slow::{SlowEvent, SlowIo, SlowReplica, SlowStep, us_in_words};

use crate::size::human;
use crate::target::Target;
use crate::{http, say};

/// The whole width of a bar.
const BAR_WIDTH: usize = 40;

#[derive(Debug, Args)]
pub(crate) struct SlowArgs {
    #[command(flatten)]
    target: Target,
    /// Read a slow-I/O log (`slow_log` in `[trace]` of the upstairs' config) instead of asking the upstairs
    #[arg(long, value_name = "PATH", conflicts_with_all = ["dir", "volume", "address"])]
    log: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Only so many, the slowest first
    #[arg(long, short = 'n', value_name = "N", default_value_t = 20)]
    number: usize,
}

#[derive(Debug, Args)]
pub(crate) struct InFlightArgs {
    #[command(flatten)]
    target: Target,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

async fn get(target: &Target, path: &str) -> Result<Vec<u8>> {
    Ok(http::get(&target.address()?, path).await?.to_vec())
}

pub(crate) async fn slow(args: SlowArgs) -> Result<()> {
    let mut all = match &args.log {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("can't read the slow-I/O log {}", path.display()))?;
            from_log(&text).with_context(|| format!("{} is no slow-I/O log", path.display()))?
        }
        None => parse(&get(&args.target, "/slow").await?)?,
    };
    // Those that a guest waited for come first, as the daemon has it: what is no news to a guest is second.
    all.sort_by_key(|slow| (slow.why == "replica", std::cmp::Reverse(slow.verdict.of_us)));
    all.truncate(args.number);
    if args.json {
        say(&serde_json::to_string(&all)?);
    } else if all.is_empty() {
        say("nothing was slow, and nothing is");
    } else {
        all.iter().for_each(|slow| say(&shown(slow)));
    }
    Ok(())
}

pub(crate) async fn in_flight(args: InFlightArgs) -> Result<()> {
    let body = get(&args.target, "/inflight").await?;
    if args.json {
        say(String::from_utf8_lossy(&body).trim_end());
        return Ok(());
    }
    let all = parse(&body)?;
    if all.is_empty() {
        say("nothing is under way");
    }
    for slow in &all {
        say(&format!("{:>9}  {}: {}", us_in_words(slow.verdict.of_us), what(slow), slow.verdict.text));
    }
    Ok(())
}

fn parse(body: &[u8]) -> Result<Vec<SlowIo>> {
    serde_json::from_slice(body).context("the answer is not a list of slow I/O of this version of Newel")
}

/// A record that was told of while it was under way counts as it ended. The last line may be cut short.
fn from_log(text: &str) -> Result<Vec<SlowIo>> {
    let mut all: Vec<SlowIo> = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    for (index, line) in lines.iter().enumerate() {
        let slow: SlowIo = match serde_json::from_str(line) {
            Ok(slow) => slow,
            Err(_) if index + 1 == lines.len() && !text.ends_with('\n') => break,
            Err(error) => return Err(error).with_context(|| format!("line {}", index + 1)),
        };
        // Numbers begin anew with each start of the upstairs; the moment tells those apart.
        let same = |other: &&mut SlowIo| {
            other.id == slow.id && other.received_unix_us.abs_diff(slow.received_unix_us) < 1_000_000
        };
        match all.iter_mut().rfind(same) {
            Some(other) => *other = slow,
            None => all.push(slow),
        }
    }
    Ok(all)
}

/// Such as `write of 4.0 KiB at 12.0 MiB, job 4711`.
fn what(slow: &SlowIo) -> String {
    let job = slow.job.map_or_else(|| "no job yet".to_owned(), |job| format!("job {job}"));
    if slow.operation == "flush" {
        return format!("flush, {job}");
    }
    format!("{} of {} at byte {}, {job}", slow.operation, human(slow.length), slow.offset)
}

fn shown(slow: &SlowIo) -> String {
    let when = UNIX_EPOCH.checked_add(Duration::from_micros(slow.received_unix_us)).unwrap_or(UNIX_EPOCH);
    let when = humantime::format_rfc3339_millis(when).to_string().replace('T', " ").replace('Z', " UTC");
    let state = match (slow.why.as_str(), slow.ended, slow.failed) {
        (_, false, _) => "still under way",
        (_, true, true) => "answered with an error",
        ("replica", true, false) => "the guest did not wait for it",
        (_, true, false) => "answered",
    };
    let mut lines = vec![
        format!("{}  {}", us_in_words(slow.verdict.of_us), slow.verdict.text),
        format!("  {when}: {}; {state}", what(slow)),
    ];
    lines.extend(slow.steps.iter().map(|step| bar(step, slow.verdict.of_us)));
    lines.extend(slow.replicas.iter().map(|replica| lane(replica, slow)));
    lines.extend(slow.events.iter().map(event));
    if slow.dropped_before > 0 {
        lines.push(format!("  {} records were left out before this one", slow.dropped_before));
    }
    lines.push(String::new());
    lines.join("\n")
}

/// One step, to scale.
fn bar(step: &SlowStep, of_us: u64) -> String {
    let by = step.replica.map_or_else(String::new, |id| format!("replica {id} "));
    let name = format!("{by}{}", step.stage.replace('_', " "));
    let share = step.took_us as f64 / of_us.max(1) as f64;
    let filled = (0..BAR_WIDTH).filter(|&cell| (cell as f64 + 0.5) / BAR_WIDTH as f64 <= share).count();
    // Whatever took any time is seen.
    let filled = filled.max(1);
    let (full, empty) = ("█".repeat(filled), "·".repeat(BAR_WIDTH.saturating_sub(filled)));
    format!("  {name:<22} {full}{empty} {:>9}  {:>5.1}%", us_in_words(step.took_us), share * 100.0)
}

fn lane(replica: &SlowReplica, slow: &SlowIo) -> String {
    let end = match (replica.replied_us, replica.left_us) {
        (Some(replied), _) => format!(
            "answered at {} (network {}, queue {}, submit {}, device {})",
            us_in_words(replied),
            us_in_words(replica.network_us),
            us_in_words(replica.queue_us),
            us_in_words(replica.submit_us),
            us_in_words(replica.device_us)
        ),
        (None, Some(left)) => format!("left at {}", us_in_words(left)),
        (None, None) if slow.ended => "never answered".to_owned(),
        (None, None) => "no answer yet".to_owned(),
    };
    let sent = match replica.attempts {
        0 | 1 => format!("sent at {}", us_in_words(replica.sent_us)),
        more => format!(
            "sent {more} times, at {} first, at {} last",
            us_in_words(replica.first_sent_us),
            us_in_words(replica.sent_us)
        ),
    };
    let decided = if replica.decided { "; its answer was needed" } else { "" };
    format!("    replica {}: {sent}, {end}{decided}", replica.replica)
}

fn event(event: &SlowEvent) -> String {
    let by = event.replica.map_or_else(String::new, |id| format!(" (replica {id})"));
    format!("    at {}: {}{by}", us_in_words(event.at_us), event.what.replace('_', " "))
}

#[cfg(test)]
mod tests {
    use newel_upstairs::core::slow::SlowVerdict;

    use super::*;

    fn sample(id: u32, ended: bool) -> SlowIo {
        let step = |stage: &str, took_us| SlowStep { stage: stage.into(), replica: Some(2), took_us };
        SlowIo {
            id,
            ended,
            why: "guest".into(),
            received_unix_us: 1_790_000_000_123_000,
            job: Some(4711),
            operation: "write".into(),
            offset: 8192,
            length: 4096,
            total_us: 10_000_000,
            replicas: vec![SlowReplica {
                replica: 2,
                attempts: 2,
                first_sent_us: 5,
                sent_us: 3_100_000,
                replied_us: Some(9_999_000),
                device_us: 6_000_000,
                decided: true,
                ..SlowReplica::default()
            }],
            events: vec![SlowEvent { at_us: 3_100_000, what: "sent_again".into(), replica: Some(2) }],
            steps: vec![step("no_reply", 1), step("device", 9_980_000)],
            verdict: SlowVerdict {
                stage: "device".into(),
                of_us: 10_000_000,
                text: "replica 2, device, 9.98 s of 10.0 s; requeued by a reconnect at 3.10 s".into(),
                ..SlowVerdict::default()
            },
            dropped_before: 3,
            ..SlowIo::default()
        }
    }

    #[test]
    fn one_slow_write_as_a_person_reads_it() {
        let text = shown(&sample(1, true));
        for part in [
            "10.0 s  replica 2, device, 9.98 s of 10.0 s; requeued by a reconnect at 3.10 s",
            "2026-09-21 14:13:20.123 UTC: write of 4.0 KiB at byte 8192, job 4711; answered",
            &format!("replica 2 device       {} ", "█".repeat(BAR_WIDTH)),
            &format!("replica 2 no reply     █{} ", "·".repeat(BAR_WIDTH - 1)),
            "  99.8%",
            "replica 2: sent 2 times, at 5 µs first, at 3.10 s last, answered at 10.0 s (network 0 µs,",
            "device 6.00 s); its answer was needed",
            "at 3.10 s: sent again (replica 2)",
            "3 records were left out before this one",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
    }

    #[test]
    fn a_log_is_read_back() {
        let line = |slow: &SlowIo| serde_json::to_string(slow).unwrap();
        let later = SlowIo { received_unix_us: 1_790_000_500_000_000, ..sample(1, true) };
        let text = [line(&sample(1, false)), line(&sample(2, true)), line(&sample(1, true)), line(&later)]
            .join("\n");
        let all = from_log(&format!("{text}\n")).unwrap();
        let found: Vec<_> = all.iter().map(|slow| (slow.id, slow.ended)).collect();
        assert_eq!(
            found,
            [(1, true), (2, true), (1, true)],
            "told of twice is one, after a restart another one"
        );
        // A line that is being written.
        assert_eq!(from_log(&format!("{text}\n{{\"id\":")).unwrap().len(), 3);
        let error = format!("{:#}", from_log("nonsense\n").unwrap_err());
        assert!(error.starts_with("line 1"), "{error}");
    }
}
