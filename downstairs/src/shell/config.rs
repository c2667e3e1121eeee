//! What `run` is told, validated: from flags, and from a file with the same keys.
//!
//! Invariants:
//! - A [`Config`] that exists can be used; whoever is at fault for one that doesn't is named with flag or key and value.
//! - A flag wins over the file.

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use newel_protocol::BLOCK_BYTES;
use rustix::thread::CpuSet;
use serde::Deserialize;
use thiserror::Error;
use tracing::level_filters::LevelFilter;

use crate::core::{FaultError, Faults};
use crate::disk::cli::parse_size;
use crate::disk::{CacheMode, EngineKind, PoolOptions};

/// What a replica is run with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub region: PathBuf,
    pub listen: SocketAddr,
    /// All threads stay on this one.
    pub cpu: Option<usize>,
    pub log: String,
    pub pool: PoolOptions,
    /// Put in on purpose.
    pub faults: Faults,
    /// The socket through which faults are put in; `None`: there is none.
    pub control: Option<PathBuf>,
}

/// The same keys, each given or not: by flags, or by the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    pub region: Option<PathBuf>,
    pub listen: Option<String>,
    #[serde(alias = "allow-plaintext")]
    pub allow_plaintext: Option<bool>,
    pub cpu: Option<usize>,
    pub log: Option<String>,
    pub engine: Option<EngineKind>,
    pub cache: Option<CacheMode>,
    #[serde(alias = "merge-max")]
    pub merge_max: Option<String>,
    pub fault: Option<String>,
    pub control: Option<PathBuf>,
}

#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("cannot read --config {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} line {line}, key `{key}`: {message}", path.display())]
    Syntax { path: PathBuf, line: usize, key: String, message: String },
    #[error("--region is missing: name the region file or block device to serve")]
    NoRegion,
    #[error("--listen is missing: name the address to serve on, such as 127.0.0.1:3810")]
    NoListen,
    #[error("--fault")]
    Fault { source: FaultError },
    #[error("--cpu {cpu} is more than any host has: give a number below {}", CpuSet::MAX_CPU)]
    Cpu { cpu: usize },
    #[error("--listen {value:?} is not IP:PORT, such as 127.0.0.1:3810 or [::1]:3810")]
    Listen { value: String },
    #[error(
        "--log {value:?} is neither error, warn, info, debug, trace or off, nor directives such as info,target=debug"
    )]
    Log { value: String },
    #[error("--merge-max {value:?} is no size from 4K to 4M in multiples of 4K, such as 256K")]
    MergeMax { value: String },
    #[error(
        "--listen {address} is not a loopback address, and the wire is neither encrypted nor authenticated: whoever \
         reaches that port can read and overwrite the volume. Listen on 127.0.0.1 behind a tunnel, or pass \
         --allow-plaintext if every host on that network may be trusted"
    )]
    Plaintext { address: SocketAddr },
}

impl Config {
    /// From the flags and, if one is named, the file.
    pub fn new(flags: Settings, file: Option<&Path>) -> Result<Self, ConfigError> {
        let file = file.map_or_else(|| Ok(Settings::default()), Settings::read)?;
        let region = flags.region.or(file.region).ok_or(ConfigError::NoRegion)?;
        let listen = flags.listen.or(file.listen).ok_or(ConfigError::NoListen)?;
        let Ok(address) = listen.parse::<SocketAddr>() else {
            return Err(ConfigError::Listen { value: listen });
        };
        let allowed = flags.allow_plaintext.or(file.allow_plaintext).unwrap_or(false);
        if !address.ip().is_loopback() && !allowed {
            return Err(ConfigError::Plaintext { address });
        }
        let log = flags.log.or(file.log).unwrap_or_else(|| "info".to_owned());
        if !log.split(',').all(is_directive) {
            return Err(ConfigError::Log { value: log });
        }
        let cpu = flags.cpu.or(file.cpu);
        if let Some(cpu) = cpu.filter(|&cpu| cpu >= CpuSet::MAX_CPU) {
            return Err(ConfigError::Cpu { cpu });
        }
        let pool = PoolOptions {
            engine: flags.engine.or(file.engine),
            cache: flags.cache.or(file.cache).unwrap_or_default(),
            ..merge_max(flags.merge_max.or(file.merge_max))?
        };
        let faults = flags.fault.or(file.fault).unwrap_or_default();
        let faults = faults.parse().map_err(|source| ConfigError::Fault { source })?;
        let control = flags.control.or(file.control).or_else(|| beside(&region));
        Ok(Self { region, listen: address, cpu, log, pool, faults, control })
    }
}

/// A merged write is one request of whole blocks, of which every one in flight takes memory.
fn merge_max(value: Option<String>) -> Result<PoolOptions, ConfigError> {
    let Some(value) = value else { return Ok(PoolOptions::default()) };
    let bytes = parse_size(&value).ok().and_then(|bytes| usize::try_from(bytes).ok());
    match bytes.filter(|bytes| bytes.is_multiple_of(BLOCK_BYTES) && MERGE_MAX.contains(bytes)) {
        Some(merge_max_bytes) => Ok(PoolOptions { merge_max_bytes, ..PoolOptions::default() }),
        None => Err(ConfigError::MergeMax { value }),
    }
}

/// From one block, which merges nothing, to the largest job.
const MERGE_MAX: RangeInclusive<usize> = BLOCK_BYTES..=4 << 20;

/// The control socket of a region file lies beside it; a block device has no such place.
fn beside(region: &Path) -> Option<PathBuf> {
    let mut name = region.file_name()?.to_owned();
    name.push(".control");
    (!region.starts_with("/dev")).then(|| region.with_file_name(name))
}

/// A level, or a target and a level. (The logger itself would take any word for a target, so a misspelt level for all.)
fn is_directive(text: &str) -> bool {
    text.rsplit('=').next().is_some_and(|level| level.parse::<LevelFilter>().is_ok() && !level.is_empty())
}

impl Settings {
    fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        toml::from_str(&text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            let before = text.get(..start).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            let line_text = text.lines().nth(line - 1).unwrap_or_default();
            let key = line_text.split('=').next().unwrap_or_default().trim().to_owned();
            let message = error.message().to_owned();
            ConfigError::Syntax { path: path.to_owned(), line, key, message }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(listen: &str) -> Settings {
        Settings { region: Some("r.img".into()), listen: Some(listen.to_owned()), ..Settings::default() }
    }

    #[test]
    fn flags_are_checked() {
        let check = |listen: &str, allow: bool, says: &str| {
            let settings = Settings { allow_plaintext: allow.then_some(true), ..flags(listen) };
            match Config::new(settings, None) {
                Ok(config) => assert_eq!(config.listen.to_string(), says),
                Err(error) => assert!(error.to_string().contains(says), "{error}"),
            }
        };
        check("127.0.0.1:0", false, "127.0.0.1:0");
        check("[::1]:7", false, "[::1]:7");
        check("0.0.0.0:7", false, "--allow-plaintext");
        check("0.0.0.0:7", true, "0.0.0.0:7");
        assert_eq!(beside(Path::new("a/r.img")), Some("a/r.img.control".into()));
        assert_eq!(beside(Path::new("/dev/sdb")), None);
        let settings = Settings { fault: Some("slow".to_owned()), ..flags("127.0.0.1:1") };
        assert!(matches!(Config::new(settings, None), Err(ConfigError::Fault { .. })));
        check("localhost", false, "--listen \"localhost\" is not IP:PORT");
        assert!(matches!(Config::new(Settings::default(), None), Err(ConfigError::NoRegion)));
        for (log, fine) in
            [("info", true), ("warn,a::b=trace", true), ("verbose", false), ("a=", false), ("", false)]
        {
            let settings = Settings { log: Some(log.to_owned()), ..flags("127.0.0.1:1") };
            assert_eq!(Config::new(settings, None).is_ok(), fine, "{log}");
        }
    }

    #[test]
    fn the_disk_options_are_checked() {
        let check = |value: &str, bytes: Option<usize>| {
            let settings = Settings { merge_max: Some(value.to_owned()), ..flags("127.0.0.1:1") };
            match (Config::new(settings, None), bytes) {
                (Ok(config), Some(bytes)) => assert_eq!(config.pool.merge_max_bytes, bytes),
                (Err(error), None) => {
                    assert!(error.to_string().contains(&format!("--merge-max {value:?}")), "{error}");
                }
                other => panic!("{value}: {other:?}"),
            }
        };
        check("256K", Some(256 << 10));
        check("4096", Some(4096));
        check("4M", Some(4 << 20));
        check("8M", None);
        check("0", None);
        check("5000", None);
        check("much", None);
        let pool = Config::new(flags("127.0.0.1:1"), None).unwrap().pool;
        assert_eq!(pool, PoolOptions::default());
    }

    #[test]
    fn the_file_gives_way_to_flags_and_its_errors_say_where() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("newel.toml");
        let check = |text: &str, says: &str| {
            std::fs::write(&path, text).unwrap();
            match Config::new(Settings { log: Some("warn".to_owned()), ..Settings::default() }, Some(&path)) {
                Ok(config) => assert_eq!(format!("{} {}", config.listen, config.log), says),
                Err(error) => assert!(error.to_string().contains(says), "{error}"),
            }
        };
        check(
            "region = 'r'\nlisten = '10.0.0.1:7'\nallow_plaintext = true\nlog = 'debug'",
            "10.0.0.1:7 warn",
        );
        check("region = 'r'\nlisten = 7\n", "newel.toml line 2, key `listen`: invalid type");
        check("region = 'r'\n\nlistne = '1'\n", "newel.toml line 3, key `listne`: unknown field");
        check("engine = 'floppy'\n", "newel.toml line 1, key `engine`: unknown variant `floppy`");
        check("region = ", "newel.toml line 1, key `region`");
    }
}
