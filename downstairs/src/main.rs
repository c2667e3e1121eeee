//! The `newel-downstairs` command.

mod cli;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use newel_downstairs::disk;
use newel_downstairs::shell::{self, Config};
use tracing_subscriber::EnvFilter;

use self::cli::{Cli, Command, RunArgs};

/// Payload buffers of up to 4 MiB come and go with every job. The system's allocator maps and unmaps each of them; this
/// one keeps them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// It was asked wrongly, which is not the same as failing.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run(args) => return run(&args),
        Command::Create(args) => log_to_stderr("warn").and_then(|()| disk::cli::create(&args)),
        Command::Check(args) => log_to_stderr("warn").and_then(|()| disk::cli::check(&args)),
        Command::Dump(args) => log_to_stderr("warn").and_then(|()| disk::cli::dump(&args)),
        Command::Documents { dir } => cli::documents(&dir),
    };
    exit_code(outcome, 1)
}

fn run(args: &RunArgs) -> ExitCode {
    let config = Config::new(args.settings(), args.config.as_deref())
        .map_err(anyhow::Error::from)
        .and_then(|config| log_to_stderr(&config.log).map(|()| config));
    match config {
        Ok(config) => exit_code(shell::run(&config).map_err(anyhow::Error::from), 1),
        Err(error) => exit_code(Err(error), USAGE),
    }
}

fn log_to_stderr(level: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(level).with_context(|| {
        format!("--log {level:?} is neither error, warn, info, debug, trace nor a directive")
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
    Ok(())
}

/// An error is one sentence with its causes.
fn exit_code(outcome: anyhow::Result<()>, failure: u8) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where even this cannot be written there is nobody left to tell.
            let _unheard = writeln!(std::io::stderr(), "newel-downstairs: {error:#}");
            ExitCode::from(failure)
        }
    }
}
