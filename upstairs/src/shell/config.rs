//! From flags and file to one validated configuration. Every error names the flag or key and its value.

mod nbd;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde::Deserialize;
use uuid::Uuid;

use self::nbd::{NbdArgs, NbdTable};
use super::nbd::{ListenAddr, NbdOptions};
use super::scribe::SlowLog;
use crate::core::QUORUM;
use crate::core::api::ReplicaId;
use crate::core::config::{CoreConfig, Limits, ReadPolicy, Reads, ThrottleConfig, Timing, TraceConfig};

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct RunArgs {
    /// Read this file first (TOML, the same keys as the flags with `_` for `-`); flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The volume's name, which is also the NBD export's
    #[arg(long, value_name = "NAME")]
    volume: Option<String>,
    /// The volume's identity, which its regions carry [default: derived from the name]
    #[arg(long, value_name = "UUID")]
    volume_id: Option<Uuid>,
    /// Address of a downstairs; give it three times
    #[arg(long = "replica", value_name = "HOST:PORT")]
    replicas: Vec<String>,
    /// Where guests attach: unix:/PATH or tcp:ADDR:PORT; repeat it for several
    #[arg(long, value_name = "ADDR")]
    listen: Vec<ListenAddr>,
    /// Where the status is served over HTTP: unix:/PATH or tcp:ADDR:PORT
    #[arg(long, value_name = "ADDR")]
    status: Option<ListenAddr>,
    /// Push out another upstairs that serves this volume
    #[arg(long)]
    takeover: bool,
    /// Replicas that must have executed a change before it is acknowledged: 2, or 1, which then needs all three at each start
    #[arg(long, value_name = "N")]
    min_replicas: Option<usize>,
    /// Allow listening and connecting in plain text where other hosts can listen in
    #[arg(long)]
    allow_plaintext: bool,
    #[command(flatten)]
    nbd: NbdArgs,
    /// Who is asked for the data of a read: all replicas, or one and the others for their contexts [default: fanout]
    #[arg(long, value_enum, value_name = "POLICY")]
    read_policy: Option<Policy>,
    /// Tell the other replicas once a read is answered, so that they drop it if it is still queued there [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    cancel_reads: Option<bool>,
    /// Whether reads are delayed once a replica answers them long before the slowest [default: true]
    #[arg(long = "throttle", value_name = "BOOL", action = clap::ArgAction::Set)]
    throttle_enabled: Option<bool>,
    /// How much earlier the fastest replica may answer reads than the slowest [default: 10ms]
    #[arg(long, value_name = "TIME")]
    throttle_lead: Option<String>,
    /// The longest time for which the throttle keeps a read back [default: 1s]
    #[arg(long, value_name = "TIME")]
    throttle_max_delay: Option<String>,
    /// A job that takes longer is slow, and told of with all its stages [default: 1s]
    #[arg(long, value_name = "TIME")]
    trace_threshold: Option<String>,
    /// A file for slow jobs, one JSON object a line, beside the log
    #[arg(long, value_name = "PATH")]
    slow_log: Option<PathBuf>,
    /// What to log, e.g. info, debug, newel_upstairs=debug
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    volume: Option<String>,
    volume_id: Option<Uuid>,
    replicas: Option<Vec<String>>,
    listen: Option<Vec<String>>,
    status: Option<String>,
    takeover: Option<bool>,
    min_replicas: Option<usize>,
    allow_plaintext: Option<bool>,
    log: Option<String>,
    #[serde(default)]
    nbd: NbdTable,
    #[serde(default)]
    limits: LimitsTable,
    #[serde(default)]
    timing: TimingTable,
    #[serde(default)]
    throttle: ThrottleTable,
    #[serde(default)]
    trace: TraceTable,
    read_policy: Option<Policy>,
    cancel_reads: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsTable {
    volume_jobs: Option<usize>,
    volume_bytes: Option<usize>,
    replica_jobs: Option<usize>,
    replica_bytes: Option<usize>,
    waiting: Option<usize>,
}

#[derive(Clone, Copy, Debug, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Policy {
    Fanout,
    Witness,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ThrottleTable {
    enabled: Option<bool>,
    lead: Option<String>,
    max_delay: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceTable {
    threshold: Option<String>,
    slow_log: Option<PathBuf>,
    slow_log_bytes: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimingTable {
    backoff_first: Option<String>,
    backoff_max: Option<String>,
    handshake: Option<String>,
    promote: Option<String>,
    ping_every: Option<String>,
    silence: Option<String>,
    job_age: Option<String>,
    third_wait: Option<String>,
    power_wait: Option<String>,
    quorum_timeout: Option<String>,
    scrub_every: Option<String>,
}

#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) name: String,
    pub(crate) replicas: [String; ReplicaId::COUNT],
    pub(crate) listen: Vec<ListenAddr>,
    pub(crate) status: Option<ListenAddr>,
    pub(crate) allow_plaintext: bool,
    pub(crate) log: String,
    pub(crate) nbd: NbdOptions,
    pub(super) slow_log: Option<SlowLog>,
    pub(crate) core: CoreConfig,
}

/// The name space of identities that are derived from volume names.
const NAMES: Uuid = Uuid::from_u128(0x6e65_7765_6c00_4e41_8d45_5350_4143_4531);

/// The longest name that an NBD export can have.
const NAME_BYTES_MAX: usize = 4096;

impl Config {
    pub(crate) fn load(args: RunArgs) -> Result<Self> {
        let file = match &args.config {
            Some(path) => read_file(path)?,
            None => File::default(),
        };
        let Some(name) = args.volume.or(file.volume) else {
            bail!("--volume is missing: give the volume's name")
        };
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            bail!("--volume {name:?}: a name has 1 to {NAME_BYTES_MAX} bytes");
        }
        let replicas =
            if args.replicas.is_empty() { file.replicas.unwrap_or_default() } else { args.replicas };
        let allow_plaintext = args.allow_plaintext || file.allow_plaintext.unwrap_or(false);
        let volume =
            args.volume_id.or(file.volume_id).unwrap_or_else(|| Uuid::new_v5(&NAMES, name.as_bytes()));
        if volume.is_nil() {
            bail!("--volume-id {volume}: the nil UUID stands for no volume");
        }
        let throttle = ThrottleTable {
            enabled: args.throttle_enabled.or(file.throttle.enabled),
            lead: args.throttle_lead.or(file.throttle.lead),
            max_delay: args.throttle_max_delay.or(file.throttle.max_delay),
        };
        let trace = TraceTable {
            threshold: args.trace_threshold.or(file.trace.threshold),
            slow_log: args.slow_log.or(file.trace.slow_log),
            slow_log_bytes: file.trace.slow_log_bytes,
        };
        Ok(Self {
            replicas: three(replicas)?,
            slow_log: trace.slow_log()?,
            listen: listen(args.listen, file.listen)?,
            status: match (args.status, file.status) {
                (Some(addr), _) => Some(addr),
                (None, Some(text)) => Some(text.parse().context("status")?),
                (None, None) => None,
            },
            allow_plaintext,
            nbd: nbd::options(&name, args.nbd, file.nbd)?,
            log: args.log.or(file.log).unwrap_or_else(|| "info".into()),
            core: CoreConfig {
                volume,
                upstairs: Uuid::new_v4(),
                takeover: args.takeover || file.takeover.unwrap_or(false),
                blocks: None,
                limits: file.limits.check()?,
                timing: file.timing.check()?,
                throttle: throttle.check()?,
                reads: Reads {
                    policy: match args.read_policy.or(file.read_policy) {
                        Some(Policy::Witness) => ReadPolicy::Witness,
                        Some(Policy::Fanout) | None => ReadPolicy::Fanout,
                    },
                    cancel: args.cancel_reads.or(file.cancel_reads).unwrap_or(false),
                },
                trace: trace.check()?,
                heal: true,
                min_replicas: min_replicas(args.min_replicas.or(file.min_replicas))?,
            },
            name,
        })
    }
}

fn read_file(path: &Path) -> Result<File> {
    let text =
        fs::read_to_string(path).with_context(|| format!("can't read config file {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("config file {}", path.display()))
}

/// Refuses what can't be a replica's address.
pub(crate) fn check_replica(address: &str) -> Result<()> {
    let port =
        address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
    if !matches!(port, Some(Ok(port)) if port > 0) {
        bail!("{address:?} is no address of a replica: write HOST:PORT");
    }
    Ok(())
}

fn min_replicas(given: Option<usize>) -> Result<usize> {
    match given.unwrap_or(QUORUM) {
        number @ 1..=QUORUM => Ok(number),
        number => bail!(
            "min_replicas = {number}: it is 2 (one of three replicas may be lost), or 1 (a guest goes on with one replica, and \
             every start needs all three)"
        ),
    }
}

fn three(replicas: Vec<String>) -> Result<[String; ReplicaId::COUNT]> {
    for (index, replica) in replicas.iter().enumerate() {
        check_replica(replica).context("--replica")?;
        if replicas[..index].contains(replica) {
            bail!("--replica {replica:?} is given twice: a volume has three different replicas");
        }
    }
    let count = replicas.len();
    replicas
        .try_into()
        .ok()
        .with_context(|| format!("--replica was given {count} times: a volume has three replicas"))
}

fn listen(args: Vec<ListenAddr>, file: Option<Vec<String>>) -> Result<Vec<ListenAddr>> {
    if !args.is_empty() {
        return Ok(args);
    }
    let texts = file.unwrap_or_default();
    if texts.is_empty() {
        bail!(
            "--listen is missing: say where guests attach, e.g. unix:/run/newel/NAME.sock or tcp:127.0.0.1:10809"
        );
    }
    texts.iter().map(|text| text.parse().context("listen")).collect()
}

impl LimitsTable {
    fn check(&self) -> Result<Limits> {
        let defaults = Limits::default();
        let limits = Limits {
            volume_jobs: self.volume_jobs.unwrap_or(defaults.volume_jobs),
            volume_bytes: self.volume_bytes.unwrap_or(defaults.volume_bytes),
            replica_jobs: self.replica_jobs.unwrap_or(defaults.replica_jobs),
            replica_bytes: self.replica_bytes.unwrap_or(defaults.replica_bytes),
            waiting: self.waiting.unwrap_or(defaults.waiting),
            slowing: defaults.slowing,
        };
        // A replica holds up to 32768 jobs and 256 MiB of a session; what the volume has open must fit in, with room.
        let bounds = [
            ("volume_jobs", limits.volume_jobs, 1, 8192),
            ("volume_bytes", limits.volume_bytes, 1 << 20, 128 << 20),
            ("replica_jobs", limits.replica_jobs, limits.volume_jobs, 24_576),
            ("replica_bytes", limits.replica_bytes, limits.volume_bytes, 192 << 20),
            ("waiting", limits.waiting, 1, 65_536),
        ];
        for (key, value, low, high) in bounds {
            if !(low..=high).contains(&value) {
                bail!("limits.{key} = {value}: it must lie between {low} and {high}");
            }
        }
        Ok(limits)
    }
}

impl ThrottleTable {
    fn check(&self) -> Result<ThrottleConfig> {
        let d = ThrottleConfig::default();
        let within = |key: &str, text: Option<&str>, default: Duration, high: Duration| {
            text.map_or(Ok(default), |text| {
                duration_within(&format!("throttle.{key}"), text, Duration::from_millis(1), high)
            })
        };
        Ok(ThrottleConfig {
            enabled: self.enabled.unwrap_or(d.enabled),
            lead: within("lead", self.lead.as_deref(), d.lead, LEAD_MAX)?,
            max_delay: within("max_delay", self.max_delay.as_deref(), d.max_delay, MAX_DELAY_MAX)?,
        })
    }
}

impl TraceTable {
    fn check(&self) -> Result<TraceConfig> {
        let default = TraceConfig::default().threshold;
        let threshold = self.threshold.as_deref().map_or(Ok(default), |text| {
            duration_within("trace.threshold", text, Duration::from_millis(1), THRESHOLD_MAX)
        })?;
        Ok(TraceConfig { threshold })
    }

    fn slow_log(&self) -> Result<Option<SlowLog>> {
        let bytes_max = self.slow_log_bytes.unwrap_or(SLOW_LOG_BYTES);
        if !SLOW_LOG_RANGE.contains(&bytes_max) {
            let (low, high) = (SLOW_LOG_RANGE.start(), SLOW_LOG_RANGE.end());
            bail!("trace.slow_log_bytes = {bytes_max}: it must lie between {low} and {high}");
        }
        Ok(self.slow_log.clone().map(|path| SlowLog { path, bytes_max }))
    }
}

impl TimingTable {
    fn check(&self) -> Result<Timing> {
        let d = Timing::default();
        let timing = Timing {
            backoff_first: duration("backoff_first", self.backoff_first.as_deref(), d.backoff_first)?,
            backoff_max: duration("backoff_max", self.backoff_max.as_deref(), d.backoff_max)?,
            handshake: duration("handshake", self.handshake.as_deref(), d.handshake)?,
            promote: duration("promote", self.promote.as_deref(), d.promote)?,
            ping_every: duration("ping_every", self.ping_every.as_deref(), d.ping_every)?,
            silence: duration("silence", self.silence.as_deref(), d.silence)?,
            job_age: duration("job_age", self.job_age.as_deref(), d.job_age)?,
            third_wait: duration("third_wait", self.third_wait.as_deref(), d.third_wait)?,
            power_wait: duration("power_wait", self.power_wait.as_deref(), d.power_wait)?,
            quorum_timeout: match self.quorum_timeout.as_deref() {
                None | Some("never") => None,
                Some(text) => Some(duration("quorum_timeout", Some(text), Duration::ZERO)?),
            },
            scrub_every: match self.scrub_every.as_deref() {
                None => d.scrub_every,
                Some("never") => None,
                Some(text) => Some(duration_within("timing.scrub_every", text, SCRUB_MIN, SCRUB_MAX)?),
            },
        };
        if timing.silence < timing.ping_every {
            bail!(
                "timing.silence is shorter than timing.ping_every: a healthy replica would be taken for silent"
            );
        }
        Ok(timing)
    }
}

/// The longest time that any of these makes sense for.
const DURATION_MAX: Duration = Duration::from_secs(24 * 3600);
/// A replica that is later than this is not slow, but about to leave.
const LEAD_MAX: Duration = Duration::from_secs(1);
const MAX_DELAY_MAX: Duration = Duration::from_secs(10);
/// Stamps reach to 18 minutes.
const THRESHOLD_MAX: Duration = Duration::from_secs(600);
/// A line has about 2 KiB.
const SLOW_LOG_BYTES: u64 = 16 << 20;
const SLOW_LOG_RANGE: std::ops::RangeInclusive<u64> = 64 << 10..=1 << 40;
/// A scrub that begins anew every few seconds is a mistake, and one in more than a year is none at all.
const SCRUB_MIN: Duration = Duration::from_secs(60);
const SCRUB_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

fn duration(key: &str, text: Option<&str>, default: Duration) -> Result<Duration> {
    let key = format!("timing.{key}");
    text.map_or(Ok(default), |text| duration_within(&key, text, Duration::from_millis(1), DURATION_MAX))
}

fn duration_within(key: &str, text: &str, low: Duration, high: Duration) -> Result<Duration> {
    let value =
        humantime::parse_duration(text).with_context(|| format!("{key} = {text:?}: write e.g. \"500ms\""))?;
    if value < low || value > high {
        let (low, high) = (humantime::format_duration(low), humantime::format_duration(high));
        bail!("{key} = {text:?}: it must lie between {low} and {high}");
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn check(text: &str) -> Result<Config> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        Config::load(RunArgs { config: Some(file.path().into()), ..RunArgs::default() })
    }

    const GOOD: &str =
        "volume = \"v\"\nreplicas = [\"a:1\", \"b:1\", \"c:1\"]\nlisten = [\"tcp:127.0.0.1:1\"]\n";

    #[test]
    fn a_file_and_its_errors() {
        let config = check(GOOD).unwrap();
        assert_eq!(config.replicas[2], "c:1");
        assert_eq!(config.core.volume, check(GOOD).unwrap().core.volume, "an identity follows from the name");
        assert_ne!(config.core.upstairs, check(GOOD).unwrap().core.upstairs);
        let fails = |extra: &str, needle: &str| {
            let error = format!("{:#}", check(&format!("{GOOD}{extra}")).unwrap_err());
            assert!(error.contains(needle), "{error}");
        };
        fails("replica = 1\n", "unknown field `replica`");
        fails("[limits]\nvolume_jobs = 0\n", "limits.volume_jobs = 0");
        fails("[timing]\nsilence = \"soon\"\n", "timing.silence = \"soon\"");
        fails("[timing]\nsilence = \"10ms\"\n", "shorter than timing.ping_every");
        fails("[throttle]\nlead = \"0s\"\n", "throttle.lead = \"0s\"");
        fails("[throttle]\nlag = \"1s\"\n", "unknown field `lag`");
        fails("[trace]\nthreshold = \"1h\"\n", "trace.threshold = \"1h\"");
        fails("[trace]\nslow_log_bytes = 1\n", "trace.slow_log_bytes = 1");
    }

    #[test]
    fn replicas_are_three_and_different() {
        let fails = |replicas: &[&str], needle: &str| {
            let error = three(replicas.iter().map(|r| (*r).to_owned()).collect()).unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(needle), "{error}");
        };
        fails(&["a:1", "b:1"], "given 2 times");
        fails(&["a:1", "b:1", "a:1"], "twice");
        fails(&["a:1", "b:1", "c"], "HOST:PORT");
        fails(&["a:1", "b:1", "c:0"], "HOST:PORT");
    }
}
