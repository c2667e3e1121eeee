//! The command line of `newel-upstairs`.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use super::config::{Config, RunArgs};
use super::run;

/// Serves one Newel volume over NBD and replicates it to three downstairs
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a volume
    Run(Box<RunArgs>),
}

/// Runs the command line; an error is one sentence on standard error.
pub fn main() -> ExitCode {
    let Command::Run(args) = Cli::parse().command;
    match start(*args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
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
