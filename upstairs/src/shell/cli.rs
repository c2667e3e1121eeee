//! The command line of `newel-upstairs`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use tracing_subscriber::EnvFilter;

use super::config::{Config, RunArgs};
use super::run;

/// Serves one Newel volume over NBD and replicates it to three downstairs
#[derive(Debug, Parser)]
#[command(name = "newel-upstairs", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a volume
    Run(Box<RunArgs>),
    /// Write manual pages and shell completions into a directory, for packages
    #[command(hide = true)]
    Documents { dir: PathBuf },
}

/// Runs the command line; an error is one sentence on standard error.
pub fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run(args) => start(*args),
        Command::Documents { dir } => documents(&dir),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

fn documents(dir: &Path) -> Result<()> {
    let write = || {
        clap_mangen::generate_to(Cli::command(), dir)?;
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            clap_complete::generate_to(shell, &mut Cli::command(), "newel-upstairs", dir)?;
        }
        std::io::Result::Ok(())
    };
    write().with_context(|| format!("cannot write into {}", dir.display()))
}

fn start(args: RunArgs) -> Result<()> {
    let config = Config::load(args)?;
    let filter = EnvFilter::try_new(&config.log)
        .with_context(|| format!("--log {:?} is not a log filter", config.log))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
    run::run(config)
}

#[expect(clippy::print_stderr, reason = "the one place where the daemon tells why it ended")]
fn complain(error: &anyhow::Error) {
    eprintln!("newel-upstairs: {error:#}");
}
