//! Keeps a device attached: attaches it, or takes over one that is attached already, and gives it new connections whenever it has
//! lost some, for as long as it takes.
//!
//! Invariants:
//! - What the kernel needs is not guessed: as many connections as the device has are offered, and the kernel takes those it has a
//!   dead one for. So a loss that was not heard of (this process was not there) costs nothing but an offer, which is made at each start.
//! - The kernel's events are listened to before the first look, so that no loss falls in between.
//! - Once attached, nothing but an order or a detachment by somebody else ends this; a server that has become another one is told
//!   of and waited out.

use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Result, bail};

use super::device::Holder;
use super::handshake::{self, Export, Failure};
use super::kernel::{Events, Kernel, Refused, numbers};
use super::message::Connect;
use super::{LOOK_EVERY, Plan, disconnect, explain};
use crate::signals::Stop;
use crate::{say, tell};

/// Between two attempts to reach the upstairs: the first, and at most.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// Between two looks whether the device is still ours.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// How long the start of a host, which waits for the unit, is held up by a volume that is away.
const START_WAITS: Duration = Duration::from_secs(90);
/// For udev to make the device's node.
const THERE_WITHIN: Duration = Duration::from_secs(10);
/// The smallest time the kernel's timers tell apart.
const RESEND_MIN: Duration = Duration::from_secs(1);

/// How an attempt to give the device new connections ended.
enum Mended {
    Done,
    /// Not now: why.
    NotYet(anyhow::Error),
    /// Somebody has detached it.
    Gone,
}

pub(super) async fn keep(
    plan: &Plan,
    kernel: &mut Kernel,
    stop: &mut Stop,
    patience: Option<Duration>,
) -> Result<()> {
    let mut events = kernel.events()?;
    let mut loss = None;
    match plan.device.holder() {
        Holder::Nobody => {
            let attached = tokio::select! {
                biased;
                () = stop.requested() => None,
                attached = attach(plan, kernel, patience) => Some(attached),
            };
            match attached {
                Some(result) => result?,
                // It may have got so far.
                None if plan.device.holder() == Holder::Backend(plan.backend.clone()) => {
                    return leave(plan, kernel).await;
                }
                None => return Ok(()),
            }
            say(&format!("{} is volume {} at {}", plan.device, plan.export, plan.address));
        }
        Holder::Backend(backend) if backend == plan.backend => {
            say(&format!("{} is attached already, and kept from now on", plan.device));
            // Whatever was lost meanwhile.
            loss = Some(Loss::unheard());
        }
        Holder::Backend(other) => bail!("{} is in use: attached by {other}", plan.device),
        Holder::Unnamed => bail!("{} is in use: attached by another NBD client", plan.device),
    }
    tell(&[sd_notify::NotifyState::Ready, sd_notify::NotifyState::Status("attached")]);
    loop {
        match &mut loss {
            None => tokio::select! {
                biased;
                () = stop.requested() => break,
                heard = events.link_dead(plan.device.index) => {
                    heard?;
                    loss = Some(Loss::heard(plan));
                }
                () = tokio::time::sleep(CHECK_EVERY) => {
                    if !kernel.is_attached(plan.device.index, &plan.backend).await? {
                        return gone(plan);
                    }
                }
            },
            Some(lost) => {
                let mended = tokio::select! {
                    biased;
                    () = stop.requested() => break,
                    mended = mend(plan, kernel, &mut events) => mended?,
                };
                match mended {
                    Mended::Done => {
                        lost.made_good(plan);
                        loss = None;
                    }
                    Mended::Gone => return gone(plan),
                    Mended::NotYet(why) => {
                        let pause = lost.failed(plan, &why);
                        tokio::select! {
                            biased;
                            () = stop.requested() => break,
                            () = tokio::time::sleep(pause) => {}
                        }
                    }
                }
            }
        }
    }
    leave(plan, kernel).await
}

/// Connections that were lost, until they are replaced.
struct Loss {
    /// False at a start, when there may be none.
    known: bool,
    told: bool,
    retry: Duration,
    since: tokio::time::Instant,
}

impl Loss {
    fn new(known: bool) -> Self {
        Self { known, told: false, retry: RETRY_FIRST, since: tokio::time::Instant::now() }
    }

    fn unheard() -> Self {
        Self::new(false)
    }

    fn heard(plan: &Plan) -> Self {
        say(&format!("{} has lost a connection to {}", plan.device, plan.address));
        tell(&[sd_notify::NotifyState::Status("reconnecting")]);
        Self::new(true)
    }

    /// How long to wait before the next attempt.
    fn failed(&mut self, plan: &Plan, why: &anyhow::Error) -> Duration {
        if !self.told {
            say(&format!("{} waits: {why:#}", plan.device));
            tell(&[sd_notify::NotifyState::Status("waiting for the upstairs")]);
            (self.told, self.known) = (true, true);
        }
        let pause = self.retry;
        self.retry = (self.retry * 2).min(RETRY_MAX);
        pause
    }

    fn made_good(&self, plan: &Plan) {
        if self.known {
            let time = self.since.elapsed();
            say(&format!("{} is connected again after {:.1} s", plan.device, time.as_secs_f64()));
        }
        tell(&[sd_notify::NotifyState::Status("attached")]);
    }
}

/// Tells systemd that the unit has started if what it waits for takes long: other mounts, and people who log in, wait for that.
async fn let_start_go_on<T>(plan: &Plan, waited_for: impl Future<Output = T>) -> T {
    tokio::pin!(waited_for);
    tokio::select! {
        biased;
        done = &mut waited_for => return done,
        () = tokio::time::sleep(START_WAITS) => {}
    }
    say(&format!("{} still waits for {}; the start of this host no longer does", plan.device, plan.address));
    tell(&[sd_notify::NotifyState::Ready, sd_notify::NotifyState::Status("waiting for the upstairs")]);
    waited_for.await
}

/// Waits for the upstairs and hands its connections to the kernel as a new device.
async fn attach(plan: &Plan, kernel: &mut Kernel, patience: Option<Duration>) -> Result<()> {
    let waited_for = let_start_go_on(plan, wait_for_upstairs(plan));
    let (connections, export) = match patience {
        None => waited_for.await?,
        Some(patience) => match tokio::time::timeout(patience, waited_for).await {
            Ok(result) => result?,
            Err(_) => bail!("no NBD connection to {} within {patience:?}", plan.address),
        },
    };
    check(plan, export)?;
    let connect = Connect {
        index: plan.device.index,
        size_bytes: export.size_bytes,
        block_bytes: plan.block_bytes,
        timeout_s: plan.kernel_timeout_s(),
        dead_connection_timeout_s: plan.dead_connection_timeout.as_secs(),
        server_flags: u64::from(export.flags),
        backend: plan.backend.clone(),
        sockets: numbers(&connections)?,
    };
    kernel.connect(connect).await.map_err(|refused| explain(refused, &plan.device))?;
    if plan.kernel_timeout_s().is_none() {
        plan.device.set_look_again_after(plan.resend.max(RESEND_MIN))?;
    }
    let there = async {
        while !plan.device.is_there(export.size_bytes) {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    if tokio::time::timeout(THERE_WITHIN, there).await.is_err() {
        bail!("the kernel has attached {}, but it does not show up in /dev", plan.device);
    }
    Ok(())
}

async fn wait_for_upstairs(plan: &Plan) -> Result<(Vec<OwnedFd>, Export)> {
    let mut waiting = Loss::new(true);
    loop {
        match connections(plan).await {
            Ok(connected) => return Ok(connected),
            Err(Failure::ForGood(error)) => return Err(error),
            Err(Failure::ForNow(error)) => {
                let pause = waiting.failed(plan, &error);
                tokio::time::sleep(pause).await;
            }
        }
    }
}

/// As many connections as the device has.
async fn connections(plan: &Plan) -> Result<(Vec<OwnedFd>, Export), Failure> {
    let (first, export) = handshake::connection(&plan.address, &plan.export).await?;
    let mut connections = vec![first];
    for _ in 1..plan.connections {
        let (connection, other) = handshake::connection(&plan.address, &plan.export).await?;
        if other != export {
            return Err(Failure::ForNow(anyhow::anyhow!("the server changes while we connect")));
        }
        connections.push(connection);
    }
    Ok((connections, export))
}

fn check(plan: &Plan, export: Export) -> Result<()> {
    let (size, block) = (export.size_bytes, plan.block_bytes);
    if size == 0 || size % block != 0 {
        bail!("the volume has {size} bytes, which is not a multiple of the device's sector of {block}");
    }
    if plan.connections > 1 && !export.takes_several_connections() {
        bail!("the server does not allow several connections: attach with --connections 1");
    }
    Ok(())
}

async fn mend(plan: &Plan, kernel: &mut Kernel, events: &mut Events) -> Result<Mended> {
    // What is heard from here on may be about connections that are handed over now.
    events.forget()?;
    let (connections, export) = match connections(plan).await {
        Ok(connected) => connected,
        Err(failure) => {
            // Without an upstairs the device may still be detached.
            if !kernel.is_attached(plan.device.index, &plan.backend).await? {
                return Ok(Mended::Gone);
            }
            return Ok(Mended::NotYet(failure.into_error()));
        }
    };
    if plan.device.size_bytes() != Some(export.size_bytes) {
        let is = export.size_bytes;
        return Ok(Mended::NotYet(anyhow::anyhow!(
            "the volume at {} has {is} bytes now, and is not the one that was attached",
            plan.address
        )));
    }
    match kernel.offer(plan.device.index, &plan.backend, &connections).await {
        Ok(()) => Ok(Mended::Done),
        Err(Refused::Kernel(_)) if !kernel.is_attached(plan.device.index, &plan.backend).await? => {
            Ok(Mended::Gone)
        }
        Err(refused) => Ok(Mended::NotYet(explain(refused, &plan.device))),
    }
}

fn gone(plan: &Plan) -> Result<()> {
    say(&format!("{} was detached", plan.device));
    Ok(())
}

/// The end of this process: of the device as well, unless somebody uses it.
async fn leave(plan: &Plan, kernel: &mut Kernel) -> Result<()> {
    tell(&[sd_notify::NotifyState::Stopping]);
    match plan.device.reserve() {
        Ok(reserved) => {
            disconnect(kernel, &plan.device, Some(reserved)).await?;
            say(&format!("{} is detached", plan.device));
        }
        Err(error) => {
            say(&format!(
                "{} stays attached, but lost connections are not replaced from now on: {error:#}",
                plan.device
            ));
        }
    }
    Ok(())
}
