//! Drives the core: feeds it events in batches, carries out its actions, and comes back when it asked to.
//!
//! Invariants:
//! - Everything runs on the reactor thread. The core is borrowed for one batch at a time; nothing that is called during a
//!   batch calls back into the driver.
//! - The clock is read once per batch.
//! - Decides nothing: an action is carried out as it is.
#![expect(clippy::disallowed_methods, reason = "the driver is where the core's clock is read")]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use newel_protocol::lag::Activity;
use newel_protocol::wire::{self, Reply, Welcome};
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::guest::{ConnKey, GuestSink, Volume};
use super::lag::Lag;
use super::link::{self, LinkSink, Outbox};
use super::metrics::Measured;
use super::scribe::Scribe;
use crate::core::Core;
use crate::core::api::{Action, Event, GuestId, GuestOp, GuestReply, LinkId, LogEvent, LogLevel, ReplicaId};
use crate::core::api::{StopReason, Time};
use crate::core::config::CoreConfig;
use crate::core::status::{DelayStatus, ScrubStatus, Status};

#[derive(Debug)]
pub(super) struct Driver {
    started: Instant,
    /// A replacement changes one at run time.
    addresses: RefCell<[String; ReplicaId::COUNT]>,
    /// An address that waits for the core's word, and that word.
    replacement: RefCell<Option<Replacement>>,
    introduction: Introduction,
    name: String,
    inner: RefCell<Inner>,
    /// Guest requests of the batch under way.
    requests: RefCell<Vec<(GuestId, GuestOp, Time)>>,
    /// Set while the volume is too full to take more.
    full: Cell<bool>,
    timer: Timer,
    lag: Lag,
    scribe: Scribe,
    /// Something that the main task waits for has changed: served, or stopped.
    pub(super) changed: Notify,
    stopped: RefCell<Option<StopReason>>,
    weak: Weak<Self>,
}

/// How this process introduces itself to replicas.
#[derive(Clone, Copy, Debug)]
pub(super) struct Introduction {
    pub(super) volume: Uuid,
    pub(super) upstairs: Uuid,
    /// How long a replica may take to answer.
    pub(super) within: Duration,
}

#[derive(Debug)]
struct Replacement {
    address: String,
    answer: Option<Result<(), String>>,
}

#[derive(Debug, Default)]
struct Timer {
    armed: Cell<Option<Time>>,
    earlier: Notify,
}

struct Inner {
    core: Core,
    links: [Option<OpenLink>; ReplicaId::COUNT],
    sinks: HashMap<u32, Rc<dyn GuestSink>>,
    next_key: u32,
    /// Connections with replies of this batch.
    woken: Vec<u32>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("connections", &self.sinks.len()).finish_non_exhaustive()
    }
}

struct OpenLink {
    outbox: Rc<Outbox>,
    cancel: CancellationToken,
}

impl Driver {
    pub(super) fn new(
        config: CoreConfig,
        name: String,
        addresses: [String; ReplicaId::COUNT],
        scribe: Scribe,
    ) -> Rc<Self> {
        Rc::new_cyclic(|weak| Self {
            started: Instant::now(),
            addresses: RefCell::new(addresses),
            replacement: RefCell::default(),
            introduction: Introduction {
                volume: config.volume,
                upstairs: config.upstairs,
                within: config.timing.handshake,
            },
            name,
            inner: RefCell::new(Inner {
                core: Core::new(config, Time(0)),
                links: [const { None }; ReplicaId::COUNT],
                sinks: HashMap::new(),
                next_key: 0,
                woken: Vec::new(),
            }),
            requests: RefCell::default(),
            full: Cell::new(false),
            timer: Timer::default(),
            lag: Lag::default(),
            scribe,
            changed: Notify::new(),
            stopped: RefCell::default(),
            weak: weak.clone(),
        })
    }

    fn now(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// One event by itself.
    pub(super) fn event(&self, event: Event) {
        let activity = match event {
            Event::Guest { .. } => Activity::Guests,
            Event::LinkUp { .. } | Event::LinkDown { .. } => Activity::Connections,
            Event::Reply { .. } => Activity::Messages,
            Event::Replace { .. } | Event::Scrub | Event::Shutdown { .. } => Activity::Operator,
            Event::Tick => Activity::Timer,
        };
        self.batch(activity, |core, now| core.handle(now, event));
    }

    /// Runs `feed` on the core, then carries out all that follows. `activity` says what the events come from.
    fn batch(&self, activity: Activity, feed: impl FnOnce(&mut Core, Time)) {
        let begun = self.now();
        self.lag.begins(begun);
        self.run_batch(begun, feed);
        self.lag.ran(activity, begun, self.now());
    }

    fn run_batch(&self, now: Time, feed: impl FnOnce(&mut Core, Time)) {
        let mut inner = self.inner.borrow_mut();
        let inner = &mut *inner;
        feed(&mut inner.core, now);
        while let Some(action) = inner.core.poll_action() {
            self.carry_out(inner, action);
        }
        let was_full = self.full.replace(!inner.core.has_room());
        if was_full && !self.full.get() {
            inner.sinks.values().for_each(|sink| sink.wake());
            inner.woken.clear();
        }
        for key in inner.woken.drain(..) {
            if let Some(sink) = inner.sinks.get(&key) {
                sink.wake();
            }
        }
        let deadline = inner.core.poll_deadline();
        if let Some(deadline) = deadline
            && self.timer.armed.get().is_none_or(|armed| deadline < armed)
        {
            self.timer.armed.set(Some(deadline));
            self.timer.earlier.notify_one();
        }
    }

    fn carry_out(&self, inner: &mut Inner, action: Action) {
        match action {
            Action::Send { replicas, request, payload } => match wire::encode(&request, payload) {
                Ok(frame) => {
                    for replica in replicas.iter() {
                        if let Some(link) = &inner.links[replica.index()] {
                            link.outbox.push(&frame);
                        }
                    }
                }
                Err(error) => tracing::error!(%error, "a message could not be encoded"),
            },
            Action::GuestReply { guest, reply } => Self::reply(inner, guest, reply),
            Action::Connect { replica, link } => self.connect(inner, replica, link),
            Action::Disconnect { replica, .. } => {
                if let Some(link) = inner.links[replica.index()].take() {
                    link.cancel.cancel();
                }
            }
            Action::Replace { replica, answer } => {
                if let Some(replacement) = self.replacement.borrow_mut().as_mut() {
                    if answer.is_ok() {
                        self.addresses.borrow_mut()[replica.index()].clone_from(&replacement.address);
                    }
                    replacement.answer = Some(answer);
                }
            }
            Action::Log(event) => self.log(&event),
            Action::Slow(record) => self.scribe.slow(record, unix_us()),
            Action::Stopped { reason } => {
                *self.stopped.borrow_mut() = Some(reason);
                self.changed.notify_one();
            }
        }
    }

    fn reply(inner: &mut Inner, guest: GuestId, reply: GuestReply) {
        let key = u32::try_from(guest.0 >> 32).unwrap_or(u32::MAX);
        let slot = u32::try_from(guest.0 & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        // A connection that is gone has no sink; its replies are dropped.
        if let Some(sink) = inner.sinks.get(&key) {
            sink.reply(slot, reply);
            if inner.woken.last() != Some(&key) && !inner.woken.contains(&key) {
                inner.woken.push(key);
            }
        }
    }

    fn connect(&self, inner: &mut Inner, replica: ReplicaId, link: LinkId) {
        let open = OpenLink { outbox: Rc::default(), cancel: CancellationToken::new() };
        let sink = Rc::new(ReplicaSink { driver: self.weak.clone(), replica, link });
        let address = self.addresses.borrow()[replica.index()].clone();
        link::spawn(address, open.outbox.clone(), sink, open.cancel.clone());
        if let Some(old) = inner.links[replica.index()].replace(open) {
            old.cancel.cancel();
        }
    }

    fn log(&self, event: &LogEvent) {
        match event.level {
            LogLevel::Info => tracing::info!(volume = %self.name, "{}", event.text),
            LogLevel::Warn => tracing::warn!(volume = %self.name, "{}", event.text),
            LogLevel::Error => tracing::error!(volume = %self.name, "{}", event.text),
        }
        // Coming into service is logged, too: the main task looks.
        self.changed.notify_one();
    }

    /// Comes back to the core whenever it asked to. Runs for the life of the driver.
    pub(super) async fn keep_time(&self) {
        loop {
            let armed = self.timer.armed.get();
            let due = async {
                match armed {
                    Some(time) => {
                        tokio::time::sleep_until((self.started + Duration::from_nanos(time.0)).into()).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {
                    self.timer.armed.set(None);
                    self.event(Event::Tick);
                }
                () = self.timer.earlier.notified() => {}
            }
        }
    }

    /// Measures how late the reactor is. Runs for the life of the driver.
    pub(super) async fn measure_lag(&self) {
        self.lag.run(self.started).await;
    }

    pub(super) fn status(&self) -> Status {
        let inner = self.inner.borrow();
        let mut status = inner.core.status();
        status.name.clone_from(&self.name);
        status.guest_connections = inner.sinks.len();
        for (replica, address) in status.replicas.iter_mut().zip(&*self.addresses.borrow()) {
            replica.address.clone_from(address);
        }
        let (lag, longest) = self.lag.figures(self.now());
        status.reactor = DelayStatus::new(lag, longest, 0);
        status.date(unix_us() / 1000);
        status
    }

    /// Answers with the slow jobs as JSON.
    pub(super) fn slow(&self, answer: oneshot::Sender<String>) {
        self.scribe.list(self.inner.borrow().core.slow_records(self.now()), unix_us(), answer);
    }

    /// Answers with the jobs under way as JSON.
    pub(super) fn in_flight(&self, answer: oneshot::Sender<String>) {
        self.scribe.list(self.inner.borrow().core.in_flight_records(self.now()), unix_us(), answer);
    }

    /// Answers with all metrics.
    pub(super) fn metrics(&self, answer: oneshot::Sender<String>) {
        let status = self.status();
        let stages = self.inner.borrow().core.stages().map(|stages| Box::new(stages.clone()));
        self.scribe.metrics(Measured { status, stages }, answer);
    }

    pub(super) fn introduction(&self) -> Introduction {
        self.introduction
    }

    /// Gives this slot to the region that introduced itself with `welcome` at `address`, if the core agrees.
    pub(super) fn replace(
        &self,
        replica: ReplicaId,
        address: String,
        welcome: Welcome,
    ) -> Result<(), String> {
        *self.replacement.borrow_mut() = Some(Replacement { address, answer: None });
        self.event(Event::Replace { replica, welcome });
        let answer = self.replacement.take().and_then(|replacement| replacement.answer);
        answer.unwrap_or_else(|| Err("this upstairs has stopped".to_owned()))
    }

    /// Begins a pass of the scrub unless one is under way, and tells about it.
    pub(super) fn scrub(&self) -> ScrubStatus {
        self.event(Event::Scrub);
        self.inner.borrow().core.status().scrub
    }

    /// The volume's size once it is served.
    pub(super) fn serving_bytes(&self) -> Option<u64> {
        self.inner.borrow().core.serving_bytes()
    }

    pub(super) fn stop_reason(&self) -> Option<StopReason> {
        self.stopped.borrow().clone()
    }
}

impl Volume for Driver {
    fn size_bytes(&self) -> u64 {
        self.serving_bytes().unwrap_or(0)
    }

    fn open(&self, sink: Rc<dyn GuestSink>) -> ConnKey {
        let mut inner = self.inner.borrow_mut();
        let mut key = inner.next_key;
        while inner.sinks.contains_key(&key) {
            key = key.wrapping_add(1);
        }
        inner.next_key = key.wrapping_add(1);
        inner.sinks.insert(key, sink);
        ConnKey(key)
    }

    fn close(&self, key: ConnKey) {
        self.inner.borrow_mut().sinks.remove(&key.0);
    }

    fn now(&self) -> Time {
        // Only the trace wants to know.
        if cfg!(feature = "trace") { Self::now(self) } else { Time(0) }
    }

    fn submit(&self, guest: GuestId, op: GuestOp, received: Time) {
        self.requests.borrow_mut().push((guest, op, received));
    }

    fn kick(&self) {
        let mut requests = self.requests.take();
        if requests.is_empty() {
            return;
        }
        self.batch(Activity::Guests, |core, now| {
            for (guest, op, received) in requests.drain(..) {
                core.handle(now, Event::Guest { guest, op, received });
            }
        });
        // Keep the allocation for the next batch.
        self.requests.replace(requests);
    }

    fn room(&self) -> bool {
        !self.full.get()
    }
}

/// The time of day in µs.
fn unix_us() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

struct ReplicaSink {
    driver: Weak<Driver>,
    replica: ReplicaId,
    link: LinkId,
}

impl LinkSink for ReplicaSink {
    fn up(&self) {
        if let Some(driver) = self.driver.upgrade() {
            driver.event(Event::LinkUp { replica: self.replica, link: self.link });
        }
    }

    fn replies(&self, batch: &mut Vec<(Reply, Bytes)>) {
        let (replica, link) = (self.replica, self.link);
        if let Some(driver) = self.driver.upgrade() {
            driver.batch(Activity::Messages, |core, now| {
                for (reply, payload) in batch.drain(..) {
                    core.handle(now, Event::Reply { replica, link, reply, payload });
                }
            });
        }
    }

    fn down(&self, reason: String) {
        if let Some(driver) = self.driver.upgrade() {
            driver.event(Event::LinkDown { replica: self.replica, link: self.link, reason });
        }
    }
}
