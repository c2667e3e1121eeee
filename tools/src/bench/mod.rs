//! `newel bench`: runs fio jobs against a volume, watches the upstairs meanwhile, and tells both in one table and one HTML file.
//!
//! Invariants:
//! - Nothing is written to a volume without `--yes-overwrite`, and whatever can be refused is refused before fio starts.
//! - However it ends (Ctrl-C, an error of a job, a lost status), what was measured until then is printed and written.
//! - fio never outlives it.

mod chart;
mod fio;
mod histogram;
mod jobfile;
mod model;
mod report;
mod sample;
mod table;
mod target;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::address::Address;
use crate::say;
use crate::size::{human, parse_volume_size};
use fio::Fio;
use jobfile::{JobFile, Settings};
use model::{Facts, Run};
use sample::{Sampler, Samples};
use target::Target;

/// What the built-in jobs use of a volume.
const BUILT_IN_BYTES: u64 = 1 << 30;

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// crucible (4K, 1M and 4M writes and reads), redpanda (128K appends, each synced), mixed (4K, 64 deep), or a fio job file.
    /// Its engine and target are always the volume's
    #[arg(value_name = "JOBS", default_value = "crucible")]
    jobs: String,
    /// The directory of a `newel up` [default: that of `newel up`]
    #[arg(long, conflicts_with_all = ["volume", "address"])]
    dir: Option<PathBuf>,
    /// A volume run by systemd: /run/newel/NAME.sock and NAME.status.sock
    #[arg(long, value_name = "NAME", conflicts_with = "address")]
    volume: Option<String>,
    /// The NBD server, such as nbd+unix:///?socket=PATH [default: that of the volume]. Without a volume beside it, only the guest's
    /// side is measured
    #[arg(long)]
    uri: Option<String>,
    /// The status address that belongs to --uri: unix:PATH or tcp:ADDR
    #[arg(long, requires = "uri")]
    address: Option<Address>,
    /// How long each job runs [default: what the job file says]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    runtime: Option<u32>,
    /// How much of the volume is used, from its beginning [default: what the job file says]
    #[arg(long, value_parser = parse_volume_size)]
    size: Option<u64>,
    /// What one point of the latency curves covers. fio keeps 16 KiB for each until it ends: choose more for runs of hours
    #[arg(long, default_value = "250ms", value_parser = parse_window)]
    window: Duration,
    /// Where the report goes [default: newel-bench-JOBS-DATE.html here]
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Yes, what the volume holds may be overwritten
    #[arg(long)]
    yes_overwrite: bool,
}

fn parse_window(text: &str) -> Result<Duration> {
    let window = humantime::parse_duration(text).with_context(|| format!("{text:?} is no duration"))?;
    if window < Duration::from_millis(50) || window > Duration::from_secs(60) {
        bail!("{text}: a window is between 50ms and 60s");
    }
    Ok(window)
}

pub(crate) async fn run(args: BenchArgs) -> Result<()> {
    let target = Target::find(&args)?;
    if !args.yes_overwrite {
        let used =
            args.size.map_or_else(|| "the beginning".to_owned(), |size| format!("the first {}", human(size)));
        bail!(
            "this overwrites {used} of {}, whatever it holds. Nothing was done. Add --yes-overwrite if that is meant",
            target.name
        );
    }
    let fio = Fio::find().await?;
    let facts = match &target.status {
        Some(status) => Some(Facts::of(&sample::ask(status).await?)),
        None => None,
    };
    target.check().await?;
    let settings = Settings {
        runtime_s: args.runtime,
        size_bytes: args.size.or_else(|| built_in_size(&args.jobs, facts.as_ref())),
        window: args.window,
    };
    let jobs = JobFile::load(&args.jobs, &settings)?;
    let report = Reserved::new(args.report.unwrap_or_else(|| default_report(&jobs.name)))?;
    if target.status.is_none() {
        say("no volume is named beside the URI: only the guest's side is measured");
    }
    say(&format!(
        "running {} of {} on {}; Ctrl-C ends it and keeps what there is",
        jobs.sections.join(", "),
        jobs.name,
        target.name
    ));

    let begun_unix_ms = sample::unix_ms();
    let sampler = target.status.clone().map(|status| Sampler::start(status, begun_unix_ms));
    let ended = fio.run(&jobs, &target.uri).await;
    let samples = match sampler {
        Some(sampler) => sampler.finish().await,
        None => Samples::default(),
    };
    let ended = ended?;
    let mut run = Run::new(&jobs.name, &target.name, facts, begun_unix_ms);
    run.interrupted = ended.interrupted;
    run.take_samples(samples);
    let read = fio::read(&ended, &jobs, args.window, &mut run);
    if run.jobs.is_empty() && (run.samples.is_empty() || !run.interrupted) {
        // Nothing to tell of but this.
        return read;
    }
    say(table::all(&run).trim_end());
    say("");
    report.write(&report::html(&run))?;
    read?;
    if run.interrupted {
        bail!("interrupted: the figures are those of the time until then");
    }
    match run.jobs.iter().find_map(|job| job.error.as_ref().map(|error| (&job.name, error))) {
        Some((name, error)) => bail!("job {name} ended early: {error}"),
        None => Ok(()),
    }
}

/// The built-in jobs fit themselves into a smaller volume; what others say is theirs.
fn built_in_size(jobs: &str, facts: Option<&Facts>) -> Option<u64> {
    let size = facts.map(|facts| facts.size_bytes).filter(|&size| size < BUILT_IN_BYTES)?;
    jobfile::is_built_in(jobs).then_some(size)
}

fn default_report(jobs: &str) -> PathBuf {
    let date = humantime::format_rfc3339_seconds(sample::now()).to_string();
    PathBuf::from(format!("newel-bench-{jobs}-{}.html", date.replace(':', "")))
}

/// A report that will be written. Its place is tried out first, as a run may take hours.
#[derive(Debug)]
struct Reserved {
    path: PathBuf,
    file: tempfile::NamedTempFile,
}

impl Reserved {
    fn new(path: PathBuf) -> Result<Self> {
        let refused =
            || format!("the report can't be written to {}: name another place with --report", path.display());
        if path.is_dir() {
            bail!("{} is a directory: name a file with --report", path.display());
        }
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = tempfile::Builder::new()
            .prefix(".newel-bench-")
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .tempfile_in(parent)
            .with_context(refused)?;
        Ok(Self { path, file })
    }

    fn write(self, html: &str) -> Result<()> {
        let Self { path, file } = self;
        std::fs::write(file.path(), html).with_context(|| format!("cannot write {}", path.display()))?;
        file.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
        say(&format!("report: {}", path.display()));
        Ok(())
    }
}
