//! `newel attach` and `newel detach`: a volume as a block device of this machine, by the kernel's own NBD client.
//!
//! Invariants:
//! - The handshake is ours, everything after it is the kernel's: this process is in no request's way, and its death is not noticed.
//! - A device is attached under a name of its own (`backend`), so that a later `newel attach` of the same volume takes it over as it
//!   is, and no other client's device is touched.
//! - A device in use is never detached, unless `--force` says so.

mod device;
mod handshake;
mod keeper;
mod kernel;
mod message;

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use rustix::io::Errno;

use self::device::{Device, Holder};
use self::kernel::{Kernel, Refused};
use crate::address::Address;
use crate::say;
use crate::signals::Stop;
use crate::target::nbd_address;

/// Between two looks at something that takes a moment.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// For a device to go once it is detached: udev may still be reading it.
const GONE_WITHIN: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// The volume: its NBD export, served at /run/newel/VOLUME.sock unless --address says otherwise
    volume: String,
    /// The device that it becomes: /dev/nbd0, …
    device: Device,
    /// Where the upstairs serves NBD: unix:PATH or tcp:ADDR
    #[arg(long)]
    address: Option<Address>,
    /// The NBD export [default: VOLUME]
    #[arg(long, value_name = "NAME")]
    export: Option<String>,
    /// Connections that the kernel spreads its requests over
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    connections: u8,
    /// The device's sector: 512, 1024, 2048 or 4096
    #[arg(long, value_name = "BYTES", default_value_t = 4096, value_parser = parse_block_size)]
    block_size: u64,
    /// How long the device waits without any connection before it fails requests
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = parse_seconds)]
    dead_conn_timeout: Duration,
    /// How long a request stays unanswered before the kernel sends it again, if its connection was lost and replaced; with several
    /// connections the kernel then also gives up the one it is on [default: 5s; with several connections 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    resend: Option<Duration>,
    /// How long to wait for the upstairs [default: as long as it takes]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    wait: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct DetachArgs {
    /// The device: /dev/nbd0, …
    device: Device,
    /// Detach it though it is in use, or another client's: what is not written yet is lost
    #[arg(long)]
    force: bool,
}

/// What is to be attached, and how.
#[derive(Clone, Debug)]
struct Plan {
    device: Device,
    address: Address,
    export: String,
    backend: String,
    connections: u8,
    block_bytes: u64,
    dead_connection_timeout: Duration,
    resend: Duration,
}

impl Plan {
    fn new(args: &AttachArgs) -> Result<Self> {
        let address = match &args.address {
            Some(address) => address.clone(),
            None => {
                if args.volume.contains('/') {
                    bail!("{:?} is no name of a volume: --address says where one is served", args.volume);
                }
                nbd_address(&args.volume)?
            }
        };
        let several = args.connections > 1;
        Ok(Self {
            device: args.device.clone(),
            export: args.export.clone().unwrap_or_else(|| args.volume.clone()),
            backend: format!("newel:{}", args.volume),
            address,
            connections: args.connections,
            block_bytes: args.block_size,
            dead_connection_timeout: args.dead_conn_timeout,
            resend: args.resend.unwrap_or(Duration::from_secs(if several { 30 } else { 5 })),
        })
    }

    /// The kernel's own limit on a request: only with several connections, as with one it would give up a connection that is
    /// merely slow.
    fn kernel_timeout_s(&self) -> Option<u64> {
        (self.connections > 1).then_some(self.resend.as_secs())
    }
}

pub(crate) async fn attach(args: AttachArgs) -> Result<()> {
    let plan = Plan::new(&args)?;
    need_root()?;
    let mut stop = Stop::new()?;
    let mut kernel = Kernel::open().await?;
    keeper::keep(&plan, &mut kernel, &mut stop, args.wait).await
}

pub(crate) async fn detach(args: DetachArgs) -> Result<()> {
    need_root()?;
    let device = args.device;
    let mut kernel = Kernel::open().await?;
    match device.holder() {
        Holder::Nobody => bail!("{device} is not attached"),
        Holder::Backend(backend) if is_ours(&backend) => {}
        Holder::Backend(_) | Holder::Unnamed if args.force => {}
        Holder::Backend(_) | Holder::Unnamed => {
            bail!(
                "{device} was not attached by `newel attach`: `nbd-client -d {device}` or --force detaches it"
            )
        }
    }
    let reserved = if args.force { None } else { Some(device.reserve()?) };
    disconnect(&mut kernel, &device, reserved).await?;
    say(&format!("{device} is detached"));
    Ok(())
}

fn is_ours(backend: &str) -> bool {
    backend.starts_with("newel:")
}

/// Takes the device from the kernel and waits until it is gone.
async fn disconnect(kernel: &mut Kernel, device: &Device, reserved: Option<std::fs::File>) -> Result<()> {
    kernel.disconnect(device.index).await.map_err(|refused| explain(refused, device))?;
    drop(reserved);
    let gone = async {
        while device.holder() != Holder::Nobody {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    tokio::time::timeout(GONE_WITHIN, gone).await.with_context(|| {
        format!("{device} gives errors now, and is free once those who have it open close it")
    })
}

fn need_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("block devices are attached and detached by root only");
    }
    Ok(())
}

/// What the kernel's error numbers mean here.
fn explain(refused: Refused, device: &Device) -> anyhow::Error {
    let meaning = match refused {
        Refused::Unheard(error) => return error,
        Refused::Kernel(Errno::BUSY) => "it is in use by another client, or by who still has it open",
        Refused::Kernel(Errno::PERM | Errno::ACCESS) => "this needs the right to administer (CAP_SYS_ADMIN)",
        Refused::Kernel(Errno::NOENT | Errno::NODEV) => "there is no such device",
        Refused::Kernel(error) => {
            return anyhow!("the kernel refuses {device}: {error} (`dmesg` may say more)");
        }
    };
    anyhow!("the kernel refuses {device}: {meaning}")
}

fn parse_block_size(text: &str) -> Result<u64> {
    match text.parse() {
        Ok(bytes @ (512 | 1024 | 2048 | 4096)) => Ok(bytes),
        _ => bail!("a sector has 512, 1024, 2048 or 4096 bytes"),
    }
}

/// The kernel counts in whole seconds.
fn parse_seconds(text: &str) -> Result<Duration> {
    const SECONDS_MAX: u64 = 365 * 24 * 3600;
    let time = humantime::parse_duration(text)?;
    if time.subsec_nanos() != 0 || !(1..=SECONDS_MAX).contains(&time.as_secs()) {
        bail!("write whole seconds, up to a year: 5s, 10m, 7d");
    }
    Ok(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_and_times_are_checked() {
        assert_eq!(parse_block_size("512").unwrap(), 512);
        for wrong in ["0", "513", "8192", "4k", ""] {
            parse_block_size(wrong).unwrap_err();
        }
        assert_eq!(parse_seconds("7d").unwrap(), Duration::from_secs(7 * 24 * 3600));
        for wrong in ["0s", "500ms", "1s 1ms", "2y", "5", ""] {
            parse_seconds(wrong).unwrap_err();
        }
    }
}
