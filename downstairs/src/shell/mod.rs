//! The I/O shell: moves events from sockets, signals, clock and disk pool to the core, and its actions back.
//!
//! Invariants:
//! - One thread runs everything here; it never waits for a disk.
//! - What is read from a socket in one go is one batch: the clock is read once, the disk pool is called once, and the
//!   answers of a connection leave in one system call.
//! - Nothing is decided here about order, sessions or failures.
//! - Every queue has a bound: reading from a connection stops while its answers are not taken (`outbox.rs`).
//!
//! `control.rs` lets an operator put in faults, `listener.rs` accepts, `connection.rs` runs one connection, `receiver.rs`
//! cuts its bytes into frames, `outbox.rs` holds its answers, `reactor.rs` drives the core, `lag.rs` measures how late the
//! reactor is.
#![expect(clippy::disallowed_methods, reason = "the shell reads the clock")]

mod config;
mod connection;
mod control;
mod lag;
mod listener;
mod outbox;
mod reactor;
mod receiver;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

pub use config::{Config, ConfigError, Settings};
use rustix::thread::CpuSet;
use thiserror::Error;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::LocalSet;
use tracing::{info, warn};

use self::reactor::{Disk, DiskSignal, Reactor};
use crate::core::api::{Event, Time};
use crate::core::{Core, CoreConfig, State};
use crate::disk::{OpenOptions, Pool, PoolOptions, Region, RegionError, Wake};

#[derive(Debug, Error)]
pub enum RunError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("cannot listen on {address}; is another process using the port?")]
    Bind { address: SocketAddr, source: io::Error },
    #[error("cannot keep to CPU {cpu}; `nproc` tells how many there are, counted from 0")]
    Cpu { cpu: usize, source: io::Error },
    #[error("cannot start the reactor")]
    Reactor { source: io::Error },
    /// It was told to stop and did, but had been out of service.
    #[error("the replica was out of service: {reason}")]
    Failed { reason: String },
}

/// Makes what carries out disk operations on a region.
type StartDisk = fn(Arc<Region>, PoolOptions, Wake) -> Result<Box<dyn Disk>, RegionError>;

/// Serves the region until a signal ends it.
pub fn run(config: &Config) -> Result<(), RunError> {
    run_on(config, |region, options, wake| Ok(Box::new(Pool::start(region, options, wake)?)))
}

/// As [`run`], but writes are submitted on the reactor.
#[cfg(feature = "test-faults")]
pub fn run_inline(config: &Config) -> Result<(), RunError> {
    use crate::disk::InlinePool;
    run_on(config, |region, _, wake| Ok(Box::new(std::cell::RefCell::new(InlinePool::start(region, wake)?))))
}

fn run_on(config: &Config, start_disk: StartDisk) -> Result<(), RunError> {
    // The kernel clears a huge page before it hands it out: milliseconds for the reactor when its queues grow.
    if let Err(error) = nix::sys::prctl::set_thp_disable(true) {
        warn!(%error, "huge pages stay allowed: expect pauses of some ms when memory grows");
    }
    if let Some(cpu) = config.cpu {
        // Before there is any other thread: they all inherit it.
        let mut only = CpuSet::new();
        only.set(cpu);
        rustix::thread::sched_setaffinity(None, &only)
            .map_err(|error| RunError::Cpu { cpu, source: error.into() })?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| RunError::Reactor { source })?;
    LocalSet::new().block_on(&runtime, serve(config, start_disk))
}

async fn serve(config: &Config, start_disk: StartDisk) -> Result<(), RunError> {
    let bind_error = |source| RunError::Bind { address: config.listen, source };
    // A taken port is found out before the region is touched, but nobody is let in before it is open.
    let socket = listener::bind(config.listen).map_err(bind_error)?;
    let (region, facts) = Region::open(&config.region, &OpenOptions::default())?;
    let signal = Arc::new(DiskSignal::default());
    let wake = Arc::clone(&signal);
    let disk = start_disk(region, config.pool.clone(), Arc::new(move || wake.raise()))?;
    let core = Core::new(CoreConfig::default(), facts);
    let reactor = Reactor::new(core, disk, signal);
    let listener = socket.listen(listener::BACKLOG).map_err(bind_error)?;
    let address = listener.local_addr().map_err(bind_error)?;
    let terminate = signal_stream(SignalKind::terminate())?;
    let interrupt = signal_stream(SignalKind::interrupt())?;
    info!("newel-downstairs: region {} serves on {address}", config.region.display());
    tell_systemd(sd_notify::NotifyState::Ready);

    let accept = tokio::task::spawn_local(listener::accept(Rc::clone(&reactor), listener));
    let completions = tokio::task::spawn_local(Rc::clone(&reactor).run_disk());
    let timer = tokio::task::spawn_local(Rc::clone(&reactor).run_timer());
    let meter = tokio::task::spawn_local(Rc::clone(&reactor).run_meter());
    if !config.faults.is_off() {
        reactor.event(Event::Faults(config.faults.clone()));
    }
    let control = config.control.as_deref().and_then(control::bind);
    let control = control.map(|socket| {
        tokio::task::spawn_local(control::serve(Rc::clone(&reactor), socket, config.faults.clone()))
    });
    until_stopped(&reactor, terminate, interrupt).await;
    for task in [accept, completions, timer, meter].into_iter().chain(control) {
        task.abort();
    }
    let state = reactor.finish();
    info!("stopped");
    match state {
        State::Failed { reason } => Err(RunError::Failed { reason }),
        State::Serving | State::Stopping | State::Stopped => Ok(()),
    }
}

/// Waits for the end that a first signal asks for; a second one doesn't wait.
async fn until_stopped(reactor: &Reactor, mut terminate: Signal, mut interrupt: Signal) {
    let mut signals = 0;
    loop {
        tokio::select! {
            () = reactor.stopped() => return,
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        signals += 1;
        if signals > 1 {
            warn!("a second signal: leaving without waiting for the disk");
            std::process::exit(1);
        }
        info!("stopping: waiting for the disk, then closing the region; a second signal leaves at once");
        tell_systemd(sd_notify::NotifyState::Stopping);
        reactor.event(Event::Shutdown);
    }
}

fn signal_stream(kind: SignalKind) -> Result<Signal, RunError> {
    signal(kind).map_err(|source| RunError::Reactor { source })
}

/// Does nothing outside a systemd service.
fn tell_systemd(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        warn!("cannot notify systemd: {error}");
    }
}

/// The core's clock.
#[derive(Clone, Copy, Debug)]
struct Clock {
    start: Instant,
}

impl Clock {
    fn start() -> Self {
        Self { start: Instant::now() }
    }

    fn now(self) -> Time {
        Time(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn instant(self, time: Time) -> tokio::time::Instant {
        (self.start + std::time::Duration::from_nanos(time.0)).into()
    }
}
