//! The `newel` command: runs a whole volume on this machine, and shows how a volume fares.
//!
//! Invariants:
//! - An error is one sentence on stderr. The exit code is 0 for success, 1 for a failure, 2 for wrong usage.
//! - What is meant for programs goes to stdout, what happened goes to stderr; nothing but this crate prints.

#![expect(clippy::print_stderr, reason = "this is the command that talks to the operator")]

mod address;
mod admin;
mod attach;
mod bench;
mod fault;
mod http;
mod signals;
mod size;
mod slow;
mod status;
mod target;
mod top;
mod units;
mod up;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;

#[derive(Debug, Parser)]
#[command(name = "newel", version, about = "Runs and inspects replicated Newel volumes")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run one volume on this machine: three replicas and the NBD server, until Ctrl-C
    Up(up::UpArgs),
    /// Show a volume's state, its replicas, their queues, delays and catch-up
    Status(status::StatusArgs),
    /// Show the slowest I/O of the last hour, and which replica and stage was at fault
    Slow(slow::SlowArgs),
    /// Show what is under way, the oldest first, and what it waits for
    Inflight(slow::InFlightArgs),
    /// Give the place of a replica to a new, empty region while the volume runs
    Replace(admin::ReplaceArgs),
    /// Make a replica answer late or wrong on purpose, for tests and demonstrations
    Fault(fault::FaultArgs),
    /// Verify every block of every replica in the background, and heal what is bad
    Scrub(admin::ScrubArgs),
    /// Measure a volume with fio and show what its replicas did meanwhile; overwrites what it holds
    Bench(bench::BenchArgs),
    /// Watch a volume and its replicas live in this terminal
    Top(top::TopArgs),
    /// Make a volume a block device of this machine, and keep it connected; in the foreground (root)
    Attach(attach::AttachArgs),
    /// Take a device away that `newel attach` made (root)
    Detach(attach::DetachArgs),
    /// Write manual pages and shell completions into a directory, for packages
    #[command(hide = true)]
    Documents { dir: PathBuf },
}

fn documents(dir: &Path) -> Result<()> {
    let write = || {
        clap_mangen::generate_to(Args::command(), dir)?;
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            clap_complete::generate_to(shell, &mut Args::command(), "newel", dir)?;
        }
        std::io::Result::Ok(())
    };
    write().with_context(|| format!("cannot write into {}", dir.display()))
}

/// Prints a line. A reader that has gone away (`newel up | head`) must not bring the volume down.
fn say(line: &str) {
    writeln!(std::io::stdout(), "{line}").ok();
}

/// Tells systemd, if it runs this.
fn tell(states: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        eprintln!("newel: cannot tell systemd: {error}");
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("newel: cannot start the event loop: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(async {
        match args.command {
            Command::Up(args) => up::run(args).await,
            Command::Status(args) => status::run(args).await,
            Command::Slow(args) => slow::slow(args).await,
            Command::Inflight(args) => slow::in_flight(args).await,
            Command::Replace(args) => admin::replace(args).await,
            Command::Fault(args) => fault::run(args).await,
            Command::Scrub(args) => admin::scrub(args).await,
            Command::Bench(args) => bench::run(args).await,
            Command::Top(args) => top::run(args).await,
            Command::Attach(args) => attach::attach(args).await,
            Command::Detach(args) => attach::detach(args).await,
            Command::Documents { dir } => documents(&dir),
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("newel: {error:#}");
            ExitCode::FAILURE
        }
    }
}
