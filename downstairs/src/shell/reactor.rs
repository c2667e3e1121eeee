//! Drives the core: one batch of events in, all its actions out.
//!
//! Invariants:
//! - A batch reads the clock once at its start and carries out every action before it ends: the disk first, then the
//!   sockets.
//! - The disk pool wakes the reactor at most once between two rounds of fetching what it completed.
//! - How long batches take is measured, always, and told to the stall meter (`lag.rs`).

use std::cell::{Cell, RefCell, RefMut};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use newel_protocol::lag::{Activity, Delays, Health, Stall};
use newel_protocol::wire::{self, Reply};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tracing::{error, info, warn};

use super::Clock;
use super::lag::{self, Lag};
use super::outbox::Outbox;
use crate::core::api::{Action, ConnId, DiskCommand, DiskDone, Event, LogEvent, Time};
use crate::core::{Core, State};
use crate::disk::Pool;

/// So long what is told of this process is not gathered anew: whoever pings without a pause costs little.
const HEALTH_FRESH_NS: u64 = 100_000_000;

/// What the reactor needs of the disk; in tests it is memory.
pub(super) trait Disk {
    /// Takes all of `commands`; never blocks.
    fn submit(&self, commands: &mut Vec<DiskCommand>);
    fn completed(&self, into: &mut Vec<DiskDone>);
    /// Readable when something is completed, beside the signal; `None` if the signal tells all.
    fn completion_fd(&self) -> Option<OwnedFd>;
    /// How long the kernel kept the threads that submit, since the start, and the longest such time.
    fn submits(&self) -> (Delays, Stall);
    fn stop(self: Box<Self>);
}

impl Disk for Pool {
    fn submit(&self, commands: &mut Vec<DiskCommand>) {
        Self::submit(self, commands);
    }

    fn completed(&self, into: &mut Vec<DiskDone>) {
        Self::completed(self, into);
    }

    fn completion_fd(&self) -> Option<OwnedFd> {
        Self::completion_fd(self).try_clone_to_owned().ok()
    }

    fn submits(&self) -> (Delays, Stall) {
        lag::submits_of(&self.submit_times())
    }

    fn stop(self: Box<Self>) {
        Self::stop(*self);
    }
}

#[cfg(feature = "test-faults")]
impl Disk for RefCell<crate::disk::InlinePool> {
    fn submit(&self, commands: &mut Vec<DiskCommand>) {
        self.borrow_mut().submit(commands);
    }

    fn completed(&self, into: &mut Vec<DiskDone>) {
        self.borrow_mut().completed(into);
    }

    fn completion_fd(&self) -> Option<OwnedFd> {
        self.borrow().completion_fd().try_clone_to_owned().ok()
    }

    fn submits(&self) -> (Delays, Stall) {
        lag::submits_of(&self.borrow().submit_times())
    }

    fn stop(self: Box<Self>) {}
}

/// Through this the pool's threads tell the reactor that something is completed.
#[derive(Debug, Default)]
pub(super) struct DiskSignal {
    raised: AtomicBool,
    notify: Notify,
}

impl DiskSignal {
    pub(super) fn raise(&self) {
        // Waking the reactor is a system call; one is enough until it looks.
        if !self.raised.swap(true, Ordering::AcqRel) {
            self.notify.notify_one();
        }
    }

    async fn wait(&self) {
        self.notify.notified().await;
        // Lowered before looking: whatever completes from here on raises it again.
        self.raised.swap(false, Ordering::AcqRel);
    }
}

#[expect(
    deprecated,
    reason = "its successor is for descriptors that may be closed behind it, which an OwnedFd cannot"
)]
fn watch(fd: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE).ok()
}

/// Waits until the eventfd is raised again. It is never read: each completion is an edge of its own, and what came before the
/// edge is seen by the look that follows it.
async fn next_edge(raised: Option<&AsyncFd<OwnedFd>>) {
    match raised {
        Some(raised) => {
            if let Ok(mut ready) = raised.readable().await {
                ready.clear_ready();
            }
        }
        None => std::future::pending().await,
    }
}

pub(super) struct Reactor {
    inner: RefCell<Inner>,
    clock: Clock,
    lag: Lag,
    /// What was told last, and when.
    health: Cell<Option<(Time, Health)>>,
    signal: std::sync::Arc<DiskSignal>,
    /// The core's deadline moved forward.
    deadline_moved: Notify,
    stopped: Notify,
    next_conn: Cell<u64>,
}

struct Inner {
    core: Core,
    /// Gone once stopped.
    disk: Option<Box<dyn Disk>>,
    outboxes: BTreeMap<ConnId, Rc<Outbox>>,
    /// Kept for their allocations.
    commands: Vec<DiskCommand>,
    completed: Vec<DiskDone>,
    touched: Vec<Rc<Outbox>>,
    deadline: Option<Time>,
}

/// Events of one instant. Ends with [`Batch::finish`].
pub(super) struct Batch<'a> {
    reactor: &'a Reactor,
    inner: RefMut<'a, Inner>,
    now: Time,
    activity: Activity,
}

impl Reactor {
    pub(super) fn new(core: Core, disk: Box<dyn Disk>, signal: std::sync::Arc<DiskSignal>) -> Rc<Self> {
        let inner = Inner {
            core,
            disk: Some(disk),
            outboxes: BTreeMap::new(),
            commands: Vec::new(),
            completed: Vec::new(),
            touched: Vec::new(),
            deadline: None,
        };
        Rc::new(Self {
            inner: RefCell::new(inner),
            clock: Clock::start(),
            lag: Lag::default(),
            health: Cell::new(None),
            signal,
            deadline_moved: Notify::new(),
            stopped: Notify::new(),
            next_conn: Cell::new(1),
        })
    }

    /// `activity` says what the events come from.
    pub(super) fn batch(&self, activity: Activity) -> Batch<'_> {
        let now = self.clock.now();
        self.lag.begins(now);
        Batch { now, inner: self.inner.borrow_mut(), reactor: self, activity }
    }

    /// A batch of one.
    pub(super) fn event(&self, event: Event) {
        let mut batch = self.batch(match event {
            Event::Connected { .. } | Event::Closed { .. } => Activity::Connections,
            Event::Message { .. } => Activity::Messages,
            Event::DiskDone(_) => Activity::Disk,
            Event::Faults(_) | Event::Shutdown => Activity::Operator,
            Event::Tick => Activity::Timer,
        });
        batch.event(event);
        batch.finish();
    }

    pub(super) fn connected(&self, outbox: &Rc<Outbox>) -> ConnId {
        let conn = ConnId(self.next_conn.get());
        self.next_conn.set(conn.0 + 1);
        self.inner.borrow_mut().outboxes.insert(conn, Rc::clone(outbox));
        self.event(Event::Connected { conn });
        conn
    }

    /// The connection ended by the peer's doing, or the network's.
    pub(super) fn closed(&self, conn: ConnId) {
        self.event(Event::Closed { conn });
        self.inner.borrow_mut().outboxes.remove(&conn);
    }

    /// Hands the pool's completions to the core, for ever.
    pub(super) async fn run_disk(self: Rc<Self>) {
        let raised = self.inner.borrow().disk.as_ref().and_then(|disk| disk.completion_fd());
        let raised = raised.and_then(watch);
        loop {
            tokio::select! {
                () = self.signal.wait() => {}
                () = next_edge(raised.as_ref()) => {}
            }
            let mut batch = self.batch(Activity::Disk);
            let mut completed = std::mem::take(&mut batch.inner.completed);
            if let Some(disk) = &batch.inner.disk {
                disk.completed(&mut completed);
            }
            for done in completed.drain(..) {
                batch.event(Event::DiskDone(done));
            }
            batch.inner.completed = completed;
            batch.finish();
        }
    }

    /// Ticks whenever the core wants it, for ever.
    pub(super) async fn run_timer(self: Rc<Self>) {
        loop {
            let deadline = self.inner.borrow().deadline;
            let Some(deadline) = deadline else {
                self.deadline_moved.notified().await;
                continue;
            };
            tokio::select! {
                () = tokio::time::sleep_until(self.clock.instant(deadline)) => self.event(Event::Tick),
                () = self.deadline_moved.notified() => {}
            }
        }
    }

    /// Measures how late the reactor is, for ever.
    pub(super) async fn run_meter(self: Rc<Self>) {
        self.lag.run(self.clock).await;
    }

    /// What a peer is told of this process.
    fn health(&self, now: Time, disk: Option<&dyn Disk>) -> Health {
        if let Some((at, health)) = self.health.get()
            && now.0.saturating_sub(at.0) < HEALTH_FRESH_NS
        {
            return health;
        }
        let (lag, longest_stall) = self.lag.figures(now);
        let (submits, longest_submit) = disk.map(Disk::submits).unwrap_or_default();
        let health = Health { lag, longest_stall, submits, longest_submit };
        self.health.set(Some((now, health)));
        health
    }

    pub(super) async fn stopped(&self) {
        self.stopped.notified().await;
    }

    /// Ends the pool's threads and says in which state the core was left.
    pub(super) fn finish(&self) -> State {
        let mut inner = self.inner.borrow_mut();
        if let Some(disk) = inner.disk.take() {
            disk.stop();
        }
        let (lag, longest) = self.lag.figures(self.clock.now());
        info!(
            "the reactor was late by {} µs at the 99.9th percentile, at most by {} µs ({})",
            lag.p999_us, longest.took_us, longest.during
        );
        inner.core.status().state
    }
}

impl Batch<'_> {
    pub(super) fn event(&mut self, event: Event) {
        self.inner.core.handle(self.now, event);
    }

    /// Carries out what the core wants.
    pub(super) fn finish(mut self) {
        let inner = &mut *self.inner;
        while let Some(action) = inner.core.poll_action() {
            match action {
                Action::Send { conn, reply, payload } => inner.send(conn, &reply, payload),
                Action::Pong { conn, nonce } => {
                    let health = self.reactor.health(self.now, inner.disk.as_deref());
                    inner.send(conn, &Reply::Pong { nonce, health }, Bytes::new());
                }
                Action::Close { conn, .. } => {
                    inner.with_outbox(conn, Outbox::close);
                    inner.outboxes.remove(&conn);
                }
                Action::Disk(command) => inner.commands.push(command),
                Action::Log(event) => inner.log(event),
                Action::Stopped => self.reactor.stopped.notify_one(),
            }
        }
        if !inner.commands.is_empty()
            && let Some(disk) = &inner.disk
        {
            disk.submit(&mut inner.commands);
        }
        for outbox in inner.touched.drain(..) {
            outbox.flush();
        }
        let deadline = inner.core.poll_deadline();
        if deadline != inner.deadline {
            // One that moved back is found out when the old one passes.
            if deadline.is_some_and(|new| inner.deadline.is_none_or(|old| new < old)) {
                self.reactor.deadline_moved.notify_one();
            }
            inner.deadline = deadline;
        }
        self.reactor.lag.ran(self.activity, self.now, self.reactor.clock.now());
    }
}

impl Inner {
    fn send(&mut self, conn: ConnId, reply: &Reply, payload: Bytes) {
        match wire::encode(reply, payload) {
            Ok(frame) => self.with_outbox(conn, |outbox| outbox.push(frame)),
            Err(error) => {
                error!("a reply could not be encoded: {error}");
                self.with_outbox(conn, Outbox::give_up);
            }
        }
    }

    fn with_outbox(&mut self, conn: ConnId, act: impl FnOnce(&Outbox)) {
        let Some(outbox) = self.outboxes.get(&conn) else { return };
        act(outbox);
        if outbox.touch() {
            self.touched.push(Rc::clone(outbox));
        }
    }

    fn log(&self, event: LogEvent) {
        let peer =
            |conn| self.outboxes.get(&conn).map_or_else(|| "a peer".to_owned(), |o| o.peer.to_string());
        match event {
            LogEvent::SessionStarted { conn, upstairs, generation } => {
                info!("{}: upstairs {upstairs} is in force with generation {generation}", peer(conn));
            }
            LogEvent::SessionEnded { conn, reason } => info!("{}: session ended: {reason}", peer(conn)),
            LogEvent::Refused { conn, reason } => warn!("{}: refused: {reason}", peer(conn)),
            LogEvent::Faults { faults } if faults == "off" => warn!("no faults are put in any more"),
            LogEvent::Faults { faults } => {
                warn!("FAULTS ARE PUT IN ON PURPOSE: {faults}; `newel fault … off` takes them out");
            }
            LogEvent::Failed { reason } => error!("out of service until restarted: {reason}"),
        }
    }
}
