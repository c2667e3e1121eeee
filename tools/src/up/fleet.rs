//! The four daemons together: start, watch, stop.
//!
//! Invariants:
//! - The upstairs starts once all replicas listen and stops before any of them.
//! - `pids.json` names exactly the daemons that run.
//! - Stopping takes at most [`UPSTAIRS_STOP`] + [`DOWNSTAIRS_STOP`] and a moment, under 5 s, whatever a daemon does.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use newel_upstairs::core::status::Status;
use rustix::process::Signal;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::child::{Child, how_it_ended};
use super::layout::{Layout, REPLICAS};
use super::programs::Programs;
use super::volume::Volume;
use super::{Settings, owner};
use crate::signals::{self, Stop};
use crate::{http, say};

/// As systemd does for the units in `tools/systemd`.
pub(super) const RESTART_AFTER: Duration = Duration::from_secs(1);
const UPSTAIRS_STOP: Duration = Duration::from_millis(2800);
const DOWNSTAIRS_STOP: Duration = Duration::from_millis(1800);
/// After a crash a replica reads up to 4 GiB of extents again before it listens.
const START_MAX: Duration = Duration::from_secs(120);
/// How often a daemon is asked whether it serves yet.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// The upstairs is the last: started last, stopped first.
const UPSTAIRS: usize = REPLICAS;
const CHILDREN: usize = REPLICAS + 1;

#[derive(Debug)]
pub(super) struct Fleet {
    layout: Layout,
    volume: Volume,
    settings: Settings,
    children: [Child; CHILDREN],
    child_ended: tokio::signal::unix::Signal,
}

#[derive(Debug)]
pub(super) enum Started {
    Serving(Box<Status>),
    StopRequested,
}

pub(super) fn downstairs_role(replica: usize) -> String {
    format!("downstairs-{replica}")
}

impl Fleet {
    pub(super) fn new(
        layout: &Layout,
        volume: &Volume,
        programs: &Programs,
        settings: &Settings,
    ) -> Result<Self> {
        let children = std::array::from_fn(|index| {
            let (role, program, arguments) = if index == UPSTAIRS {
                ("upstairs".to_owned(), &programs.upstairs, upstairs_arguments(layout, volume, settings))
            } else {
                let arguments = downstairs_arguments(layout, volume, settings, index);
                (downstairs_role(index), &programs.downstairs, arguments)
            };
            let log = layout.log(&role);
            Child::new(role, program.clone(), arguments, log)
        });
        let child_ended = signals::child_ended()?;
        Ok(Self {
            layout: layout.clone(),
            volume: volume.clone(),
            settings: settings.clone(),
            children,
            child_ended,
        })
    }

    /// Role and pid of everything that runs, `newel up` itself included.
    pub(super) fn pids(&self) -> BTreeMap<String, u32> {
        let daemons = self.children.iter().filter_map(|child| Some((child.role.clone(), child.pid()?)));
        daemons.chain([("up".to_owned(), std::process::id())]).collect()
    }

    /// Starts all four, and returns once the volume serves.
    pub(super) async fn start(&mut self, stop: &mut Stop) -> Result<Started> {
        tokio::select! {
            () = stop.requested() => Ok(Started::StopRequested),
            status = self.start_all() => Ok(Started::Serving(Box::new(status?))),
        }
    }

    async fn start_all(&mut self) -> Result<Status> {
        let here: Vec<usize> = (0..REPLICAS).filter(|&replica| !self.volume.is_elsewhere(replica)).collect();
        for &replica in &here {
            self.start_child(replica)?;
        }
        let deadline = Instant::now() + START_MAX;
        for replica in here {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.volume.ports[replica]));
            while TcpStream::connect(address).await.is_err() {
                self.wait_a_moment(replica, deadline).await?;
            }
        }
        self.start_child(UPSTAIRS)?;
        loop {
            if let Ok(body) = http::get(&self.volume.status, "/status").await {
                let status: Status = serde_json::from_slice(&body).context("the upstairs gave no status")?;
                if status.state == "serving" {
                    return Ok(status);
                }
            }
            self.wait_a_moment(UPSTAIRS, deadline).await?;
        }
    }

    fn start_child(&mut self, index: usize) -> Result<u32> {
        if index == UPSTAIRS {
            self.look_for_replacements();
        }
        let pid = self.children[index].start()?;
        owner::write_pids(&self.layout, &self.pids())?;
        Ok(pid)
    }

    /// `newel replace` writes the new address of a replica into the volume's description while this runs.
    fn look_for_replacements(&mut self) {
        match Volume::load(&self.layout) {
            Ok(Some(Volume { replaced, .. })) => {
                self.volume.replaced = replaced;
                self.children[UPSTAIRS].set_arguments(upstairs_arguments(
                    &self.layout,
                    &self.volume,
                    &self.settings,
                ));
            }
            // Without it what was known is still right, or as right as it can be.
            Ok(None) => {}
            Err(error) => say(&format!("{error:#}; the upstairs is started with the addresses known before")),
        }
    }

    /// Fails if any daemon ended, or if `awaited` takes too long.
    async fn wait_a_moment(&mut self, awaited: usize, deadline: Instant) -> Result<()> {
        for child in &mut self.children {
            if let Some((pid, status)) = child.reap() {
                bail!("{} (pid {pid}) {} at start; {}", child.role, how_it_ended(status), child.log_tail());
            }
        }
        if Instant::now() > deadline {
            let child = &self.children[awaited];
            bail!(
                "{} does not serve within {} s of its start; {}",
                child.role,
                START_MAX.as_secs(),
                child.log_tail()
            );
        }
        // A daemon that ends is heard of at once.
        timeout(ASK_EVERY, self.child_ended.recv()).await.ok();
        Ok(())
    }

    /// Until a stop is requested.
    pub(super) async fn supervise(&mut self, stop: &mut Stop, restart: bool) -> Result<()> {
        let mut restart_at: [Option<Instant>; CHILDREN] = [None; CHILDREN];
        loop {
            let mut ended = false;
            for (child, at) in self.children.iter_mut().zip(&mut restart_at) {
                let Some((pid, status)) = child.reap() else { continue };
                *at = restart.then(|| Instant::now() + RESTART_AFTER);
                let next = if restart {
                    format!("it is started again in {} s", RESTART_AFTER.as_secs())
                } else {
                    "it stays dead (--no-restart)".to_owned()
                };
                say(&format!("{} (pid {pid}) {}; {next}", child.role, how_it_ended(status)));
                ended = true;
            }
            if ended {
                owner::write_pids(&self.layout, &self.pids())?;
            }
            let next = restart_at.iter().enumerate().filter_map(|(index, at)| Some(((*at)?, index))).min();
            tokio::select! {
                () = stop.requested() => return Ok(()),
                _ = self.child_ended.recv() => {}
                () = wait_until(next.map(|(at, _)| at)) => {
                    let Some((_, index)) = next else { continue };
                    restart_at[index] = None;
                    let pid = self.start_child(index)?;
                    say(&format!("{} is started again as pid {pid}", self.children[index].role));
                }
            }
        }
    }

    /// Ends everything, in order. A second request to stop ends it at once.
    pub(super) async fn stop(&mut self, stop: &mut Stop) -> Result<()> {
        let mut killed = self.stop_some(UPSTAIRS..CHILDREN, UPSTAIRS_STOP, stop).await;
        killed.extend(self.stop_some(0..REPLICAS, DOWNSTAIRS_STOP, stop).await);
        // Not there is as good as removed; a stale one names processes that are gone.
        std::fs::remove_file(self.layout.pids_file()).ok();
        if !killed.is_empty() {
            bail!("{} did not stop in time and had to be killed", killed.join(", "));
        }
        Ok(())
    }

    async fn stop_some(
        &mut self,
        which: std::ops::Range<usize>,
        within: Duration,
        stop: &mut Stop,
    ) -> Vec<String> {
        let Some(children) = self.children.get_mut(which) else { return Vec::new() };
        for child in children.iter() {
            child.signal(Signal::TERM);
            // A stopped process takes no other signal before this one.
            child.signal(Signal::CONT);
        }
        let deadline = Instant::now() + within;
        let mut killed = Vec::new();
        loop {
            for child in children.iter_mut() {
                child.reap();
            }
            if children.iter().all(|child| child.pid().is_none()) {
                return killed;
            }
            let give_up = tokio::select! {
                _ = self.child_ended.recv() => false,
                () = sleep_until(deadline), if killed.is_empty() => true,
                () = stop.requested(), if killed.is_empty() => true,
                // SIGKILL needs no patience, but its notice may have been merged with one seen before.
                () = sleep(ASK_EVERY), if !killed.is_empty() => false,
            };
            if give_up {
                for child in children.iter().filter(|child| child.pid().is_some()) {
                    child.signal(Signal::KILL);
                    killed.push(child.role.clone());
                }
            }
        }
    }
}

async fn wait_until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn downstairs_arguments(
    layout: &Layout,
    volume: &Volume,
    settings: &Settings,
    replica: usize,
) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec![
        "run".into(),
        "--region".into(),
        layout.region(replica).into(),
        "--listen".into(),
        format!("127.0.0.1:{}", volume.ports[replica]).into(),
        "--log".into(),
        settings.log.clone().into(),
    ];
    if let Some(cpu) = cpu_of(replica) {
        arguments.extend(["--cpu".into(), cpu.to_string().into()]);
    }
    if let Some(config) = &settings.downstairs_config {
        arguments.extend(["--config".into(), config.into()]);
    }
    arguments
}

/// The CPU that a replica keeps to on a small host, where four daemons share few CPUs: waking a thread on another CPU costs
/// more there than the work it wakes up for. A larger host has CPUs enough for every thread.
fn cpu_of(replica: usize) -> Option<usize> {
    const SMALL: std::ops::RangeInclusive<usize> = 2..=4;
    let allowed = rustix::thread::sched_getaffinity(None).ok()?;
    let cpus: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect();
    SMALL.contains(&cpus.len()).then(|| cpus.get(replica % cpus.len()).copied()).flatten()
}

fn upstairs_arguments(layout: &Layout, volume: &Volume, settings: &Settings) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["run".into()];
    let mut option = |name: &str, value: String| arguments.extend([name.into(), value.into()]);
    option("--volume", volume.name.clone());
    option("--volume-id", volume.volume_id.to_string());
    for replica in 0..REPLICAS {
        option("--replica", volume.address(replica));
    }
    for address in &volume.listen {
        option("--listen", address.to_string());
    }
    option("--status", volume.status.to_string());
    option("--log", settings.log.clone());
    arguments.extend(match &settings.upstairs_config {
        Some(config) => ["--config".into(), config.clone().into()],
        None => ["--slow-log".into(), layout.slow_log().into()],
    });
    arguments
}
