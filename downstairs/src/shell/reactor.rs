//! Drives the core: one batch of events in, all its actions out.
//!
//! Invariants:
//! - A batch reads the clock once at its start and carries out every action before it ends: the disk first, then the
//!   sockets.
//! - The disk pool wakes the reactor at most once between two rounds of fetching what it completed.
//! - How long batches take is measured, always: a reactor that stalls says so.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use newel_protocol::wire;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tracing::{error, info, warn};

use super::Clock;
use super::outbox::Outbox;
use crate::core::api::{Action, ConnId, DiskCommand, DiskDone, Event, LogEvent, Time};
use crate::core::{Core, State};
use crate::disk::Pool;

/// A batch this long is a stall: answers to pings and the pace of all sessions hang on it.
const STALL_NS: u64 = 50_000_000;
/// At most one line about stalls in this time.
const STALL_QUIET_NS: u64 = 10_000_000_000;

/// What the reactor needs of the disk; in tests it is memory.
pub(super) trait Disk {
    /// Takes all of `commands`; never blocks.
    fn submit(&self, commands: &mut Vec<DiskCommand>);
    fn completed(&self, into: &mut Vec<DiskDone>);
    /// Readable when something is completed, beside the signal; `None` if the signal tells all.
    fn completion_fd(&self) -> Option<OwnedFd>;
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

    fn stop(self: Box<Self>) {
        Self::stop(*self);
    }
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
    longest_ns: u64,
    stall_told: Option<Time>,
}

/// Events of one instant. Ends with [`Batch::finish`].
pub(super) struct Batch<'a> {
    reactor: &'a Reactor,
    inner: RefMut<'a, Inner>,
    now: Time,
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
            longest_ns: 0,
            stall_told: None,
        };
        Rc::new(Self {
            inner: RefCell::new(inner),
            clock: Clock::start(),
            signal,
            deadline_moved: Notify::new(),
            stopped: Notify::new(),
            next_conn: Cell::new(1),
        })
    }

    pub(super) fn batch(&self) -> Batch<'_> {
        Batch { now: self.clock.now(), inner: self.inner.borrow_mut(), reactor: self }
    }

    /// A batch of one.
    pub(super) fn event(&self, event: Event) {
        let mut batch = self.batch();
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
            let mut batch = self.batch();
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

    pub(super) async fn stopped(&self) {
        self.stopped.notified().await;
    }

    /// Ends the pool's threads and says in which state the core was left.
    pub(super) fn finish(&self) -> State {
        let mut inner = self.inner.borrow_mut();
        if let Some(disk) = inner.disk.take() {
            disk.stop();
        }
        info!("longest time that the reactor was busy at a stretch: {} µs", inner.longest_ns / 1_000);
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
                Action::Send { conn, reply, payload } => match wire::encode(&reply, payload) {
                    Ok(frame) => inner.with_outbox(conn, |outbox| outbox.push(frame)),
                    Err(error) => {
                        error!("a reply could not be encoded: {error}");
                        inner.with_outbox(conn, Outbox::give_up);
                    }
                },
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
        inner.measure(self.now, self.reactor.clock.now());
    }
}

impl Inner {
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
            LogEvent::Failed { reason } => error!("out of service until restarted: {reason}"),
        }
    }

    fn measure(&mut self, begun: Time, ended: Time) {
        let took_ns = ended.0.saturating_sub(begun.0);
        self.longest_ns = self.longest_ns.max(took_ns);
        let told_lately = self.stall_told.is_some_and(|told| ended.0 < told.0 + STALL_QUIET_NS);
        if took_ns >= STALL_NS && !told_lately {
            self.stall_told = Some(ended);
            warn!("the reactor was busy for {} ms at a stretch", took_ns / 1_000_000);
        }
    }
}
