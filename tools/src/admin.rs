//! `newel replace` and `newel scrub`: what an operator asks of a running volume.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use newel_upstairs::core::status::{ScrubStatus, Status};

use crate::address::Address;
use crate::target::status_address;
use crate::up::layout::{self, Layout};
use crate::up::volume::{Replaced, Volume};
use crate::{http, say};

/// How often a scrub is asked how far it is.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// Which volume.
#[derive(Debug, Args)]
struct Target {
    /// A volume run by systemd: asks /run/newel/VOLUME.status.sock
    #[arg(value_name = "VOLUME", conflicts_with_all = ["dir", "address"])]
    volume: Option<String>,
    /// The directory of a `newel up` [default: that of `newel up`]
    #[arg(long, conflicts_with = "address")]
    dir: Option<PathBuf>,
    /// The status address itself: unix:PATH or tcp:ADDR
    #[arg(long)]
    address: Option<Address>,
}

impl Target {
    fn address(&self) -> Result<Address> {
        status_address(self.address.as_ref(), self.volume.as_deref(), self.dir.as_deref())
    }

    /// The directory, if it is that of a `newel up`.
    fn layout(&self) -> Result<Option<Layout>> {
        match (&self.dir, &self.volume, &self.address) {
            (Some(dir), ..) => Layout::new(dir).map(Some),
            (None, None, None) => Layout::new(&layout::default_dir()?).map(Some),
            (None, ..) => Ok(None),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ReplaceArgs {
    #[command(flatten)]
    target: Target,
    /// The slot that the new replica takes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..3))]
    replica: u8,
    /// Where a downstairs serves the new, empty region
    #[arg(long, value_name = "HOST:PORT")]
    with: String,
}

pub(crate) async fn replace(args: ReplaceArgs) -> Result<()> {
    let address = args.target.address()?;
    let body = serde_json::json!({ "replica": args.replica, "address": args.with }).to_string();
    http::post(&address, "/replace", body).await.context("nothing is replaced")?;
    let (replica, with) = (args.replica, &args.with);
    say(&format!(
        "replica {replica} is given to the region at {with}, which catches up now; `newel status` shows how far it is"
    ));
    match args.target.layout()? {
        Some(layout) => {
            remember(&layout, replica, with)?;
            say(&format!(
                "{} has the new address: the next start uses it, and starts the old replica no more",
                layout.volume_file().display()
            ));
        }
        None => say(&format!(
            "change entry {replica} of `replicas` (counted from 0) in the upstairs' config file to {with:?} now: it is read \
             at the next start, and with the old address that replica would stay away"
        )),
    }
    say("the old region is no member any more and is not written again");
    Ok(())
}

fn remember(layout: &Layout, replica: u8, with: &str) -> Result<()> {
    let mut volume = Volume::load(layout)?
        .with_context(|| format!("{} is gone: the next start needs it", layout.volume_file().display()))?;
    let replica = usize::from(replica);
    volume.replaced.retain(|replaced| replaced.replica != replica);
    volume.replaced.push(Replaced { replica, address: with.to_owned() });
    volume.store(layout)
}

#[derive(Debug, Args)]
pub(crate) struct ScrubArgs {
    #[command(flatten)]
    target: Target,
    /// Wait for the end, and fail if anything bad is left
    #[arg(long)]
    wait: bool,
}

pub(crate) async fn scrub(args: ScrubArgs) -> Result<()> {
    let address = args.target.address()?;
    let answer = http::post(&address, "/scrub", "{}".to_owned()).await?;
    let begun: ScrubStatus = serde_json::from_slice(&answer)
        .with_context(|| format!("the answer of {address} is not one of this version of Newel"))?;
    if !args.wait {
        say(&format!("scrub {} is under way; `newel status` shows how far it is", begun.pass));
        return Ok(());
    }
    loop {
        let body = http::get(&address, "/status").await?;
        let scrub = serde_json::from_slice::<Status>(&body).context("the upstairs gave no status")?.scrub;
        if scrub.pass < begun.pass {
            bail!("the upstairs was started again, which ended the scrub: begin another one");
        }
        if scrub.pass > begun.pass || !scrub.running {
            return told(&scrub);
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}

fn told(scrub: &ScrubStatus) -> Result<()> {
    let ScrubStatus { blocks_bad: bad, blocks_healed: healed, blocks_without_good_copy: lost, .. } = scrub;
    say(&format!(
        "{} extents verified: {bad} bad copies, {healed} of them healed, {lost} blocks without a good copy",
        scrub.extents_done
    ));
    if *lost > 0 {
        bail!("{lost} blocks have no good copy: they read as errors until they are written again");
    }
    if healed < bad {
        bail!("{} bad copies could not be healed: see the log of the upstairs", bad - healed);
    }
    Ok(())
}
