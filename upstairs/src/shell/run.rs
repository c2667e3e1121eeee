//! The life of the daemon: bind, activate, serve, stop.
//!
//! Signals: the first SIGTERM or SIGINT stops in order (no new requests, what was admitted is finished and flushed), a
//! second one ends the process at once.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use super::config::Config;
use super::driver::Driver;
use super::nbd::{self, Listeners, TlsOffer};
use super::scribe::Scribe;
use super::status_page;
use crate::core::api::{Event, StopReason};

/// What an orderly stop may take; what is not finished by then is not acknowledged either.
const STOP_WITHIN: Duration = Duration::from_secs(3);
/// For the last replies to reach the guests after that.
const GOODBYE: Duration = Duration::from_millis(500);

pub(crate) fn run(config: Config) -> Result<()> {
    forbid_huge_pages();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("can't start the reactor")?;
    LocalSet::new().block_on(&runtime, serve(config))
}

async fn serve(config: Config) -> Result<()> {
    allow_descriptors();
    let private = config.nbd.tls.as_ref().is_some_and(|tls| tls.required);
    let listeners = Listeners::bind(&config.listen, config.allow_plaintext || private)?;
    let addresses = listeners.addrs();
    let status =
        config.status.as_ref().map(|addr| status_page::bind(addr, config.allow_plaintext)).transpose()?;
    if config.slow_log.is_some() && !cfg!(feature = "trace") {
        tracing::warn!(
            "no slow I/O will be told of: this newel-upstairs was built without the feature `trace`"
        );
    }
    let scribe = Scribe::start(config.name.clone(), config.slow_log.clone())?;
    let driver = Driver::new(config.core.clone(), config.name.clone(), config.replicas.clone(), scribe);
    if let Some(status) = status {
        let driver = driver.clone();
        tokio::task::spawn_local(async move {
            if let Err(error) = status_page::serve(status, driver).await {
                tracing::error!(%error, "the status page ended");
            }
        });
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let timer = driver.clone();
    tokio::task::spawn_local(async move { timer.keep_time().await });
    let meter = driver.clone();
    tokio::task::spawn_local(async move { meter.measure_lag().await });
    driver.event(Event::Tick);

    let shutdown = CancellationToken::new();
    let mut front = Front::Waiting(listeners);
    loop {
        if let Some(reason) = driver.stop_reason() {
            return finish(reason, front, &shutdown).await;
        }
        if driver.serving_bytes().is_some() {
            front = front.start(&driver, &config, &shutdown);
            let listen: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            notify(&[sd_notify::NotifyState::Ready, sd_notify::NotifyState::Status("serving")]);
            let tls = TlsOffer::describe(config.nbd.tls.as_ref());
            tracing::info!(volume = %config.name, listen = %listen.join(" "), %tls, "guests can attach");
            break;
        }
        tokio::select! {
            () = driver.changed.notified() => {}
            _ = terminate.recv() => driver.event(Event::Shutdown { within: STOP_WITHIN }),
            _ = interrupt.recv() => driver.event(Event::Shutdown { within: STOP_WITHIN }),
        }
    }
    let mut stopping = false;
    loop {
        if let Some(reason) = driver.stop_reason() {
            return finish(reason, front, &shutdown).await;
        }
        tokio::select! {
            () = driver.changed.notified() => continue,
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if std::mem::replace(&mut stopping, true) {
            bail!("stopped by a second signal, before everything was finished");
        }
        notify(&[sd_notify::NotifyState::Stopping]);
        tracing::info!("stopping: finishing what was admitted");
        shutdown.cancel();
        driver.event(Event::Shutdown { within: STOP_WITHIN });
    }
}

/// As many descriptors as the process may have: a guest's connection takes up to three, and the usual 1024 would be fewer
/// than the connections that are allowed.
fn allow_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// A replica far behind makes the buffers grow. The kernel clears a huge page before it hands it out, which holds the reactor up for
/// milliseconds each time.
fn forbid_huge_pages() {
    if let Err(error) = nix::sys::prctl::set_thp_disable(true) {
        tracing::warn!(%error, "huge pages stay allowed: expect pauses of some ms when memory grows");
    }
}

/// The NBD front end before and after it is opened.
enum Front {
    Waiting(Listeners),
    Serving(tokio::task::JoinHandle<()>),
}

impl Front {
    fn start(self, driver: &Rc<Driver>, config: &Config, shutdown: &CancellationToken) -> Self {
        match self {
            Self::Waiting(listeners) => {
                let (volume, options, shutdown) = (driver.clone(), config.nbd.clone(), shutdown.clone());
                Self::Serving(tokio::task::spawn_local(nbd::serve(listeners, volume, options, shutdown)))
            }
            Self::Serving(_) => self,
        }
    }
}

async fn finish(reason: StopReason, front: Front, shutdown: &CancellationToken) -> Result<()> {
    shutdown.cancel();
    if let Front::Serving(task) = front
        && tokio::time::timeout(GOODBYE, task).await.is_err()
    {
        tracing::warn!("some guests did not take their last replies in time");
    }
    match reason {
        StopReason::Finished => {
            tracing::info!("stopped");
            Ok(())
        }
        StopReason::Fenced { by } => {
            bail!("the volume was taken over by {by}; nothing more is written from here")
        }
        StopReason::Refused { replica, reason } => {
            bail!("replica {replica} can't serve this volume: {reason}")
        }
    }
}

fn notify(states: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "can't tell systemd about our state");
    }
}
