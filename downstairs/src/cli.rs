//! The command line: what can be asked, and which exit code answers.
//!
//! Exit codes: 0 done, 1 failed, 2 asked wrongly.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use newel_downstairs::disk::cli::{CheckArgs, CreateArgs, DumpArgs};
use newel_downstairs::disk::{CacheMode, EngineKind};
use newel_downstairs::shell::Settings;

/// Keeps one replica of a Newel volume in a region on local disk.
///
/// A region is one file or one block device. Create it once, then run the replica that serves it; an upstairs connects to
/// three of them.
#[derive(Debug, Parser)]
#[command(name = "newel-downstairs", version, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a region to an upstairs until SIGTERM or SIGINT
    ///
    /// The first signal finishes what is at the disk and closes the region; a second one leaves at once with exit code 1.
    Run(RunArgs),
    /// Create a region in a new file or on a block device
    Create(CreateArgs),
    /// Verify a region that nobody serves, block by block
    Check(CheckArgs),
    /// Show a region's header, activity log and contexts
    Dump(DumpArgs),
    /// Write manual pages and shell completions into a directory, for packages
    #[command(hide = true)]
    Documents { dir: PathBuf },
}

pub(crate) fn documents(dir: &Path) -> anyhow::Result<()> {
    let write = || {
        clap_mangen::generate_to(Cli::command(), dir)?;
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            clap_complete::generate_to(shell, &mut Cli::command(), "newel-downstairs", dir)?;
        }
        std::io::Result::Ok(())
    };
    write().with_context(|| format!("cannot write into {}", dir.display()))
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Region file or block device to serve
    #[arg(long, value_name = "PATH")]
    region: Option<PathBuf>,
    /// Address to serve on; port 0 takes a free one, which the log tells
    #[arg(long, value_name = "IP:PORT")]
    listen: Option<String>,
    /// TOML file with the keys region, listen, allow_plaintext, cpu, log, engine, cache, merge_max, fault and
    /// control; flags win
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Serve on an address that is not loopback, although the wire is neither encrypted nor authenticated
    #[arg(long)]
    allow_plaintext: bool,
    /// Keep all threads on this CPU; spares wake-ups across CPUs where several daemons share a small host
    #[arg(long, value_name = "NUMBER")]
    cpu: Option<usize>,
    /// Answer late or wrong on purpose, for tests: read-delay=20ms,jitter=1..10ms,bandwidth=100M,stall=1s/30s,error=0.01
    #[arg(long, value_name = "FAULTS")]
    fault: Option<String>,
    /// Socket through which `newel fault` changes that at run time [default: REGION.control; none for a block device]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// What to log: error, warn, info, debug, trace, or directives such as info,newel_downstairs=debug [default: info]
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    /// What reads and writes [default: aio, or psync where there is no direct I/O]
    #[arg(long, value_enum)]
    engine: Option<EngineKind>,
    /// Where reads may come from [default: none]
    #[arg(long, value_enum)]
    cache: Option<CacheMode>,
    /// Adjacent writes that wait together become one of up to this size; 256K is enough for EBS [default: 1M]
    #[arg(long, value_name = "SIZE")]
    merge_max: Option<String>,
}

impl RunArgs {
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            region: self.region.clone(),
            listen: self.listen.clone(),
            // The flag can only allow; forbidding is what its absence does, unless the file allows.
            allow_plaintext: self.allow_plaintext.then_some(true),
            cpu: self.cpu,
            log: self.log.clone(),
            engine: self.engine,
            cache: self.cache,
            merge_max: self.merge_max.clone(),
            fault: self.fault.clone(),
            control: self.control.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_become_settings() {
        let cli = Cli::parse_from([
            "newel-downstairs",
            "run",
            "--region",
            "r",
            "--listen",
            "1",
            "--allow-plaintext",
            "--engine=psync",
            "--cache=page",
            "--merge-max=256K",
        ]);
        let Command::Run(args) = cli.command else { panic!("{:?}", cli.command) };
        let expected = Settings {
            region: Some("r".into()),
            listen: Some("1".to_owned()),
            allow_plaintext: Some(true),
            cpu: None,
            log: None,
            engine: Some(EngineKind::Psync),
            cache: Some(CacheMode::Page),
            merge_max: Some("256K".to_owned()),
            fault: None,
            control: None,
        };
        assert_eq!(args.settings(), expected);
    }
}
