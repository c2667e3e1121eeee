//! `newel up`: one whole volume on this machine, as real processes on loopback, until Ctrl-C.
//!
//! Invariants:
//! - One `newel up` a directory (`owner`), three regions or none (`regions`), the same volume at each start (`volume`).
//! - A daemon that ends is started again after [`fleet::RESTART_AFTER`], and the terminal says so, unless `--no-restart`.
//! - At the end the upstairs stops first, so that everything acknowledged is at the replicas before they stop.

mod child;
mod fleet;
pub(crate) mod layout;
mod owner;
mod programs;
mod regions;
pub(crate) mod volume;

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use uuid::Uuid;

use self::fleet::Fleet;
use self::layout::{Layout, REPLICAS};
use self::owner::DirLock;
use self::programs::Programs;
use self::volume::{Volume, free_port, free_ports};
use crate::address::Address;
use crate::say;
use crate::signals::Stop;
use crate::size::{human, parse_volume_size};

const DEFAULT_SIZE_BYTES: u64 = 4 << 30;
const DEFAULT_NAME: &str = "newel";

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Where regions, logs and sockets are kept [default: $XDG_STATE_HOME/newel or ~/.local/state/newel]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Size of a new volume: 64M, 4G, 1T (powers of 1024) [default: 4G]
    #[arg(long, value_parser = parse_volume_size)]
    size: Option<u64>,
    /// Name of a new volume, which is also its NBD export name [default: newel]
    #[arg(long, value_name = "NAME")]
    volume: Option<String>,
    /// Where NBD is served: unix:PATH or tcp:ADDR, may be given several times; port 0 takes a free one
    /// [default: unix:DIR/nbd.sock]
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<Address>,
    /// How the space of new regions is taken: written full of zeros, reserved, or not at all
    #[arg(long, value_parser = ["full", "fallocate", "sparse"])]
    prealloc: Option<String>,
    /// Leave a daemon that ended dead
    #[arg(long)]
    no_restart: bool,
    /// A TOML file with further settings for the upstairs (limits, timing)
    #[arg(long, value_name = "FILE")]
    upstairs_config: Option<PathBuf>,
    /// A TOML file with further settings for each downstairs (cache, engine, merge_max, fault)
    #[arg(long, value_name = "FILE")]
    downstairs_config: Option<PathBuf>,
    /// What the daemons log into DIR/*.log
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log: String,
}

pub(crate) async fn run(args: UpArgs) -> Result<()> {
    let mut stop = Stop::new()?;
    let programs = Programs::find()?;
    let dir = match &args.dir {
        Some(dir) => dir.clone(),
        None => layout::default_dir()?,
    };
    let layout = Layout::new(&dir)?;
    std::fs::create_dir_all(layout.dir())
        .with_context(|| format!("cannot make the directory {}", layout.dir().display()))?;
    let _lock = DirLock::take(&layout)?;
    owner::check_no_leftovers(&layout)?;
    let volume = prepare(&args, &layout, &programs, &mut stop).await?;
    let mut fleet = Fleet::new(&layout, &volume, &programs, &settings(&args)?)?;
    let result = match fleet.start(&mut stop).await {
        Ok(fleet::Started::Serving(status)) => {
            say(&introduction(&layout, &volume, status.generation, &fleet));
            fleet.supervise(&mut stop, !args.no_restart).await
        }
        Ok(fleet::Started::StopRequested) => Ok(()),
        Err(error) => Err(error),
    };
    let stopped = fleet.stop(&mut stop).await;
    result.and(stopped)
}

/// The volume of this directory with its ports and addresses of this run, and its regions, made if they are missing.
async fn prepare(args: &UpArgs, layout: &Layout, programs: &Programs, stop: &mut Stop) -> Result<Volume> {
    let known = Volume::load(layout)?;
    let here = |replica| known.as_ref().is_none_or(|known| !known.is_elsewhere(replica));
    let regions_present = regions::present(layout, here)?;
    if let Some(known) = &known {
        known.check_same(layout, args.volume.as_deref(), args.size)?;
    } else if regions_present {
        anyhow::bail!(
            "{} is missing while the regions are there: put it back, as it names the volume they belong to",
            layout.volume_file().display()
        );
    }
    let mut volume = Volume {
        name: args.volume.clone().unwrap_or_else(|| DEFAULT_NAME.to_owned()),
        volume_id: Uuid::new_v4(),
        size_bytes: args.size.unwrap_or(DEFAULT_SIZE_BYTES),
        ports: free_ports(known.as_ref().map(|known| known.ports))?,
        listen: listen(&args.listen, layout)?,
        status: Address::unix(&layout.status_socket())?,
        replaced: Vec::new(),
    };
    if let Some(known) = known {
        volume = Volume {
            name: known.name,
            volume_id: known.volume_id,
            size_bytes: known.size_bytes,
            replaced: known.replaced,
            ..volume
        };
    }
    // Before the regions: they carry the id that only this file tells.
    volume.store(layout)?;
    if !regions_present {
        eprintln!(
            "newel: making three regions of {} in {}",
            human(volume.size_bytes),
            layout.dir().display()
        );
        let made =
            regions::create(layout, &volume, args.prealloc.as_deref(), &programs.downstairs, stop).await;
        if made.is_err() {
            // Without regions it describes nothing, and would tie the next attempt to this one's size.
            std::fs::remove_file(layout.volume_file()).ok();
        }
        made?;
    }
    Ok(volume)
}

fn listen(wanted: &[Address], layout: &Layout) -> Result<Vec<Address>> {
    if wanted.is_empty() {
        return Ok(vec![Address::unix(&layout.nbd_socket())?]);
    }
    wanted
        .iter()
        .map(|address| match address {
            Address::Tcp(address) if address.port() == 0 => {
                let (_held, port) = free_port()?;
                Ok(Address::Tcp((address.ip(), port).into()))
            }
            Address::Tcp(_) | Address::Unix(_) => Ok(address.clone()),
        })
        .collect()
}

/// What the daemons are given besides the volume.
#[derive(Clone, Debug)]
struct Settings {
    log: String,
    upstairs_config: Option<PathBuf>,
    downstairs_config: Option<PathBuf>,
}

fn settings(args: &UpArgs) -> Result<Settings> {
    let absolute = |path: &PathBuf| {
        std::path::absolute(path).with_context(|| format!("no such file: {}", path.display()))
    };
    Ok(Settings {
        log: args.log.clone(),
        upstairs_config: args.upstairs_config.as_ref().map(absolute).transpose()?,
        downstairs_config: args.downstairs_config.as_ref().map(absolute).transpose()?,
    })
}

fn introduction(layout: &Layout, volume: &Volume, generation: u32, fleet: &Fleet) -> String {
    let mut lines = vec![
        format!(
            "volume {:?}: {} in three replicas, generation {generation}, kept in {}",
            volume.name,
            human(volume.size_bytes),
            layout.dir().display()
        ),
        String::new(),
    ];
    for (role, pid) in fleet.pids() {
        lines.push(format!("  {role:<13} pid {pid:<8} {}", what_it_has(&role, layout, volume)));
    }
    let own = std::env::current_exe().map_or_else(|_| "newel".to_owned(), |path| path.display().to_string());
    for address in &volume.listen {
        let uri = address.nbd_uri();
        lines.extend([
            String::new(),
            format!("NBD: {uri}"),
            format!("  nbdinfo '{uri}'"),
            format!(
                "  fio --name=try --ioengine=nbd --uri='{uri}' --rw=randwrite --bs=4k --iodepth=16 \
                 --size={} --time_based --runtime=10",
                volume.size_bytes.min(1 << 30)
            ),
            format!("  sudo {own} attach '{}' /dev/nbd0 --address '{address}'", volume.name),
        ]);
    }
    lines.extend([
        String::new(),
        format!("status: {own} status --dir '{}'   ({})", layout.dir().display(), volume.status),
        "Ctrl-C stops everything.".to_owned(),
    ]);
    lines.join("\n")
}

fn what_it_has(role: &str, layout: &Layout, volume: &Volume) -> String {
    (0..REPLICAS)
        .zip(volume.ports)
        .find(|(replica, _)| role == fleet::downstairs_role(*replica))
        .map_or_else(String::new, |(replica, port)| {
            format!("127.0.0.1:{port}  {}", layout.region(replica).display())
        })
}
