//! Which volume a command is about, and where its upstairs serves the status.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;

use crate::address::Address;
use crate::up::layout::{self, Layout};
use crate::up::volume::Volume;

/// Where the systemd unit lets an upstairs keep its sockets.
const RUN_DIRECTORY: &str = "/run/newel";

/// Options by which a volume is named.
#[derive(Debug, Args)]
pub(crate) struct Target {
    /// The directory of a `newel up` [default: that of `newel up`]
    #[arg(long, conflicts_with_all = ["volume", "address"])]
    dir: Option<PathBuf>,
    /// A volume run by systemd: asks /run/newel/NAME.status.sock
    #[arg(long, value_name = "NAME", conflicts_with = "address")]
    volume: Option<String>,
    /// The status address itself: unix:PATH or tcp:ADDR
    #[arg(long)]
    address: Option<Address>,
}

impl Target {
    pub(crate) fn address(&self) -> Result<Address> {
        status_address(self.address.as_ref(), self.volume.as_deref(), self.dir.as_deref())
    }
}

/// Where the status of a volume is served, by whatever it was named.
pub(crate) fn status_address(
    address: Option<&Address>,
    volume: Option<&str>,
    dir: Option<&Path>,
) -> Result<Address> {
    if let Some(address) = address {
        return Ok(address.clone());
    }
    if let Some(name) = volume {
        return socket(&format!("{name}.status"));
    }
    let dir = match dir {
        Some(dir) => dir.to_owned(),
        None => layout::default_dir()?,
    };
    let layout = Layout::new(&dir)?;
    Ok(Volume::load(&layout)?
        .with_context(|| {
            format!("no volume in {}: `newel up` makes one, --dir and --volume name another", dir.display())
        })?
        .status)
}

/// Where a volume run by systemd serves NBD.
pub(crate) fn nbd_address(volume: &str) -> Result<Address> {
    socket(volume)
}

fn socket(name: &str) -> Result<Address> {
    Address::unix(&Path::new(RUN_DIRECTORY).join(format!("{name}.sock")))
}
