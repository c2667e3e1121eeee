//! `newel fault`: makes a replica on this host answer late or wrong on purpose, or tells how it does.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use crate::say;
use crate::up::layout::{self, Layout, REPLICAS};

const ANSWER_BYTES_MAX: u64 = 4096;
const TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(crate) struct FaultArgs {
    /// What to put in: read-delay=20ms,jitter=1..10ms,bandwidth=100M,stall=1s/30s,error=0.01, any of them, or off. It takes the
    /// place of what was there [default: only tell]
    #[arg(value_name = "FAULTS")]
    faults: Option<String>,
    /// The directory of a `newel up` [default: that of `newel up`]
    #[arg(long, conflicts_with = "control")]
    dir: Option<PathBuf>,
    /// Which replica of that directory [default: all]
    #[arg(long, value_name = "N", conflicts_with = "control", value_parser = clap::value_parser!(u8).range(0..3))]
    replica: Option<u8>,
    /// The control socket of a downstairs: REGION.control unless it was told otherwise
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

pub(crate) async fn run(args: FaultArgs) -> Result<()> {
    let line = format!("fault {}\n", args.faults.as_deref().unwrap_or_default());
    if let Some(control) = args.control {
        say(&ask(&control, &line).await?);
        return Ok(());
    }
    let dir = match args.dir {
        Some(dir) => dir,
        None => layout::default_dir()?,
    };
    let layout = Layout::new(&dir)?;
    if args.faults.is_some() && args.replica.is_none() {
        bail!("say which replica with --replica N: 0, 1 or 2");
    }
    for replica in
        (0..REPLICAS).filter(|&replica| args.replica.is_none_or(|only| usize::from(only) == replica))
    {
        let answer = ask(&layout.control(replica), &line).await;
        match answer {
            Ok(faults) => say(&format!("replica {replica}: {faults}")),
            // One that is down keeps nobody from hearing of the others.
            Err(error) if args.replica.is_none() => say(&format!("replica {replica}: {error:#}")),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends one line and tells the faults that are in force then.
async fn ask(control: &PathBuf, line: &str) -> Result<String> {
    let exchange = async {
        let mut stream = UnixStream::connect(control).await?;
        stream.write_all(line.as_bytes()).await?;
        let mut answer = String::new();
        stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let answer = tokio::time::timeout(TIMEOUT, exchange).await.context("the downstairs does not answer")?;
    let answer = answer
        .with_context(|| format!("nothing answers at {}: is that downstairs running?", control.display()))?;
    match answer.trim().split_once(' ') {
        Some(("ok", faults)) => Ok(faults.to_owned()),
        Some(("error", why)) => bail!("{why}"),
        Some(_) | None => bail!("the downstairs gave an answer that makes no sense: {:?}", answer.trim()),
    }
}
