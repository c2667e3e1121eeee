//! fio itself: whether it can do this, running it, and reading what it leaves.
//!
//! Invariants:
//! - It runs in a process group of its own: Ctrl-C comes to us alone, and fio is told to end its jobs and write its report.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::process::{Child, Command};

use super::histogram::{Histogram, LogLine, parse_log};
use super::jobfile::{JobFile, log_name};
use super::model::{Direction, Figures, Job, Run, Window};
use crate::signals::Stop;

/// For the requests that are out when fio is told to end.
const END_MAX: Duration = Duration::from_secs(15);
/// As much of fio's complaints as helps.
const SAID_LINES: usize = 8;
const REPORT: &str = "report.json";
const JOBS: &str = "jobs.fio";

#[derive(Debug)]
pub(super) struct Fio {
    version: String,
}

/// What is left of it.
#[derive(Debug)]
pub(super) struct Ended {
    dir: tempfile::TempDir,
    version: String,
    success: bool,
    said: String,
    pub(super) interrupted: bool,
}

impl Fio {
    pub(super) async fn find() -> Result<Self> {
        let version = told(&["--version"]).await?;
        let engines = told(&["--enghelp"]).await?;
        if !engines.lines().any(|line| line.trim() == "nbd") {
            bail!(
                "this fio ({}) has no NBD engine (see `fio --enghelp`): Debian's package has it",
                version.trim()
            );
        }
        Ok(Self { version: version.trim().to_owned() })
    }

    /// Runs the jobs to their end, or to the user's.
    pub(super) async fn run(&self, jobs: &JobFile, uri: &str) -> Result<Ended> {
        let dir = tempfile::Builder::new()
            .prefix("newel-bench-")
            .tempdir()
            .context("no directory for fio's logs")?;
        std::fs::write(dir.path().join(JOBS), &jobs.text)?;
        let said = std::fs::File::create(dir.path().join("said"))?;
        let mut stop = Stop::new()?;
        let mut child = Command::new("fio")
            .args(["--output-format=json+", &format!("--output={REPORT}"), JOBS])
            .current_dir(dir.path())
            .env("URI", uri)
            .stdin(Stdio::null())
            .stdout(said.try_clone()?)
            .stderr(said)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start fio")?;
        let (status, interrupted) = tokio::select! {
            status = child.wait() => (status?, false),
            () = stop.requested() => (end(&mut child, &mut stop).await?, true),
        };
        let said = std::fs::read_to_string(dir.path().join("said")).unwrap_or_default();
        Ok(Ended { dir, version: self.version.clone(), success: status.success(), said, interrupted })
    }
}

async fn told(arguments: &[&str]) -> Result<String> {
    let output = Command::new("fio").args(arguments).stdin(Stdio::null()).kill_on_drop(true).output().await;
    match output {
        Ok(output) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("fio is not installed: on Debian `apt-get install fio`")
        }
        Err(error) => Err(error).context("cannot run fio"),
    }
}

/// Tells fio to end its jobs; it writes its report then. One that can't is killed, and so it is if the user asks again.
async fn end(child: &mut Child, stop: &mut Stop) -> Result<std::process::ExitStatus> {
    if let Some(pid) = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
        // It may have ended by itself at the same moment.
        kill_process(pid, Signal::INT).ok();
    }
    tokio::select! {
        status = child.wait() => return Ok(status?),
        () = stop.requested() => {}
        () = tokio::time::sleep(END_MAX) => {}
    }
    child.kill().await.context("cannot end fio")?;
    Ok(child.wait().await?)
}

#[derive(Debug, Deserialize)]
struct Report {
    jobs: Vec<ReportedJob>,
}

#[derive(Debug, Deserialize)]
struct ReportedJob {
    jobname: String,
    groupid: u64,
    #[serde(default)]
    error: i32,
    /// In ms.
    #[serde(default)]
    job_runtime: u64,
    read: Reported,
    write: Reported,
    trim: Reported,
}

#[derive(Debug, Deserialize)]
struct Reported {
    total_ios: u64,
    iops: f64,
    bw_bytes: f64,
    #[serde(default)]
    clat_ns: Latencies,
}

#[derive(Debug, Default, Deserialize)]
struct Latencies {
    #[serde(default)]
    max: f64,
    /// ns, and how many.
    #[serde(default)]
    bins: BTreeMap<u64, u64>,
}

impl ReportedJob {
    fn direction(&self, direction: Direction) -> &Reported {
        match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
            Direction::Trim => &self.trim,
        }
    }
}

/// Takes what fio left into the run. Without a report of fio's there is still what the samples say.
pub(super) fn read(ended: &Ended, jobs: &JobFile, window: Duration, run: &mut Run) -> Result<()> {
    run.fio_version.clone_from(&ended.version);
    let dir = ended.dir.path();
    let text = std::fs::read_to_string(dir.join(REPORT)).unwrap_or_default();
    // What it said to the terminal comes first.
    let json = if text.starts_with('{') { Some(0) } else { text.find("\n{") };
    let said: Vec<&str> = ended.said.lines().chain(text.lines()).filter(|line| !line.is_empty()).collect();
    let said = said.iter().take(SAID_LINES).copied().collect::<Vec<_>>().join("\n  ");
    let Some(at) = json else {
        let how = if ended.interrupted {
            "fio was ended before it had a report"
        } else {
            "fio failed without a report"
        };
        bail!("{how}; it said:\n  {said}");
    };
    let report: Report = serde_json::from_str(text.get(at..).unwrap_or_default())
        .with_context(|| format!("the report of {} is not understood", ended.version))?;
    let threads: Vec<Vec<LogLine>> =
        (0..report.jobs.len()).map(|thread| log_of(dir, thread)).collect::<Result<_>>()?;
    run.windows = windows(&threads, run.begun_unix_ms, window);
    run.jobs = totals(&report.jobs, &threads, run.begun_unix_ms, window);
    if !ended.success && !ended.interrupted && run.jobs.iter().all(|job| job.error.is_none()) {
        bail!("fio failed with {}; it said:\n  {said}", jobs.name);
    }
    Ok(())
}

/// A thread that did nothing has no log.
fn log_of(dir: &Path, thread: usize) -> Result<Vec<LogLine>> {
    let name = log_name(thread);
    match std::fs::read_to_string(dir.join(&name)) {
        Ok(text) => parse_log(&text).with_context(|| format!("fio's {name}")),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("fio's {name}")),
    }
}

/// One entry per job, however many threads it had.
fn totals(
    reported: &[ReportedJob],
    threads: &[Vec<LogLine>],
    begun_unix_ms: u64,
    window: Duration,
) -> Vec<Job> {
    let span = millis(window);
    let mut jobs: Vec<Job> = Vec::new();
    let mut sums: Vec<[Histogram; 3]> = Vec::new();
    let mut last = None;
    for (thread, log) in reported.iter().zip(threads) {
        let from = log.first().map(|line| line.unix_ms.saturating_sub(span).saturating_sub(begun_unix_ms));
        if last != Some((thread.groupid, &thread.jobname)) {
            let at = from.unwrap_or_else(|| jobs.last().map_or(0, |job| job.to_ms));
            jobs.push(Job { name: thread.jobname.clone(), from_ms: at, to_ms: at, ..Job::default() });
            sums.push(Default::default());
        }
        last = Some((thread.groupid, &thread.jobname));
        let (Some(job), Some(sums)) = (jobs.last_mut(), sums.last_mut()) else { continue };
        job.from_ms = job.from_ms.min(from.unwrap_or(job.from_ms));
        job.to_ms = job.to_ms.max(from.unwrap_or(job.from_ms) + thread.job_runtime);
        if thread.error != 0 && job.error.is_none() {
            job.error = Some(std::io::Error::from_raw_os_error(thread.error).to_string());
        }
        for (direction, sum) in Direction::ALL.into_iter().zip(sums) {
            add(job, sum, direction, thread.direction(direction));
        }
    }
    jobs
}

fn add(job: &mut Job, sum: &mut Histogram, direction: Direction, reported: &Reported) {
    if reported.total_ios == 0 {
        return;
    }
    for (&ns, &count) in &reported.clat_ns.bins {
        sum.add(ns, count);
    }
    let (mut ios, mut iops, mut bytes_per_s) = (reported.total_ios, reported.iops, reported.bw_bytes);
    let mut max_us = (reported.clat_ns.max > 0.0).then_some(reported.clat_ns.max / 1e3);
    if let Some(at) = job.figures.iter().position(|figures| figures.direction == direction) {
        let others = job.figures.remove(at);
        (ios, iops, bytes_per_s) = (ios + others.ios, iops + others.iops, bytes_per_s + others.bytes_per_s);
        max_us = max_us.into_iter().chain(others.max_us).reduce(f64::max);
    }
    // A bin's middle may lie above the largest of all, which is known exactly.
    let exact = max_us.unwrap_or(f64::INFINITY);
    let quantile = |per_mille| sum.quantile_us(per_mille).map(|us| us.min(exact));
    let [p50_us, p99_us, p999_us] = [500, 990, 999].map(quantile);
    job.figures.push(Figures { direction, ios, iops, bytes_per_s, p50_us, p99_us, p999_us, max_us });
}

/// The logs of all threads on one grid of windows.
fn windows(threads: &[Vec<LogLine>], begun_unix_ms: u64, window: Duration) -> Vec<Window> {
    let span = millis(window);
    let mut cells: BTreeMap<(u64, Direction), (f64, Histogram)> = BTreeMap::new();
    for log in threads {
        let mut before: BTreeMap<Direction, u64> = BTreeMap::new();
        for line in log {
            let to = line.unix_ms.saturating_sub(begun_unix_ms);
            let from = before.insert(line.direction, to).unwrap_or_else(|| to.saturating_sub(span)).min(to);
            let bytes = line.block_bytes.saturating_mul(line.latencies.count()) as f64;
            // An entry comes a little late, or much if nothing ended for a while: what it counts is spread over its time.
            for (cell, part) in spread(from, to, span) {
                cells.entry((cell, line.direction)).or_default().0 += bytes * part;
            }
            cells.entry((to.saturating_sub(1) / span, line.direction)).or_default().1.merge(&line.latencies);
        }
    }
    let window = |((cell, direction), (bytes, latencies)): ((u64, Direction), (f64, Histogram))| Window {
        at_ms: cell * span,
        span_ms: span,
        direction,
        bytes_per_s: bytes * 1e3 / span as f64,
        p50_us: latencies.quantile_us(500),
        p99_us: latencies.quantile_us(990),
        max_us: latencies.max_us(),
    };
    cells.into_iter().map(window).collect()
}

/// Which cells of the grid a time covers, and with what part of it.
fn spread(from: u64, to: u64, span: u64) -> impl Iterator<Item = (u64, f64)> {
    let whole = (to - from).max(1);
    let last = to.saturating_sub(1).max(from) / span;
    (from / span..=last).map(move |cell| {
        let overlap = to.max(from + 1).min((cell + 1) * span) - from.max(cell * span);
        (cell, overlap as f64 / whole as f64)
    })
}

fn millis(window: Duration) -> u64 {
    u64::try_from(window.as_millis()).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_spread_over_the_grid() {
        let check = |from, to, expected: &[(u64, f64)]| {
            let parts: Vec<(u64, f64)> = spread(from, to, 100).collect();
            assert_eq!(parts, expected, "{from}..{to}");
            assert!((parts.iter().map(|(_, part)| part).sum::<f64>() - 1.0).abs() < 1e-9);
        };
        check(0, 100, &[(0, 1.0)]);
        check(50, 150, &[(0, 0.5), (1, 0.5)]);
        check(90, 390, &[(0, 10.0 / 300.0), (1, 100.0 / 300.0), (2, 100.0 / 300.0), (3, 90.0 / 300.0)]);
        check(120, 120, &[(1, 1.0)]);
        check(0, 0, &[(0, 1.0)]);
        check(200, 200, &[(2, 1.0)]);
    }

    #[test]
    fn threads_of_a_job_are_one_and_jobs_follow_each_other() {
        let thread = |group: u64, name: &str, error: i32| {
            let none = r#"{"total_ios": 0, "iops": 0, "bw_bytes": 0, "clat_ns": {"max": 0}}"#;
            let write = r#"{"total_ios": 4, "iops": 2.0, "bw_bytes": 8192, "clat_ns": {"max": 9000, "bins": {"1000": 3, "9000": 1}}}"#;
            format!(
                r#"{{"jobname": "{name}", "groupid": {group}, "error": {error}, "job_runtime": 2000, "read": {none}, "write": {write}, "trim": {none}}}"#
            )
        };
        let text =
            format!(r#"{{"jobs": [{}, {}, {}]}}"#, thread(0, "a", 0), thread(0, "a", 5), thread(1, "b", 0));
        let report: Report = serde_json::from_str(&text).unwrap();
        let log =
            |at: u64| parse_log(&format!("{at}, 1, 4096, 0, 1\n{}, 1, 4096, 0, 1\n", at + 250)).unwrap();
        let threads = [log(1350), log(1360), log(3400)];
        let jobs = totals(&report.jobs, &threads, 1000, Duration::from_millis(250));
        let times: Vec<(&str, u64, u64)> =
            jobs.iter().map(|job| (job.name.as_str(), job.from_ms, job.to_ms)).collect();
        assert_eq!(times, [("a", 100, 2110), ("b", 2150, 4150)]);
        assert!(jobs[0].error.as_ref().is_some_and(|error| error.contains("Input/output")), "{jobs:?}");
        let [figures] = &jobs[0].figures[..] else { panic!("{jobs:?}") };
        assert_eq!(
            (figures.ios, figures.iops, figures.p50_us, figures.max_us),
            (8, 4.0, Some(1.0), Some(9.0))
        );

        let windows = windows(&threads, 1000, Duration::from_millis(250));
        let bytes: f64 = windows.iter().map(|window| window.bytes_per_s / 4.0).sum();
        assert!((bytes - 6.0 * 4096.0).abs() < 1e-6, "{windows:#?}");
    }
}
