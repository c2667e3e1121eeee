//! A replica that submits its writes on the reactor, for tests of what measures stalls: `newel-downstairs-inline run --region
//! PATH --listen IP:PORT`. Never installed, and not built without the feature `test-faults`.

use std::process::ExitCode;

use anyhow::Context as _;
use newel_downstairs::shell::{self, Config, Settings};

fn main() -> ExitCode {
    let Err(error) = run() else { return ExitCode::SUCCESS };
    tracing::error!("{error:#}");
    ExitCode::FAILURE
}

fn run() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_target(false).with_writer(std::io::stderr).with_ansi(false).init();
    let arguments: Vec<String> = std::env::args().collect();
    let value = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag);
        at.and_then(|at| arguments.get(at + 1)).with_context(|| format!("{flag} is missing"))
    };
    let settings = Settings {
        region: Some(value("--region")?.into()),
        listen: Some(value("--listen")?.clone()),
        ..Settings::default()
    };
    Ok(shell::run_inline(&Config::new(settings, None)?)?)
}
