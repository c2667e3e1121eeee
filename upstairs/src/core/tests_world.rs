//! The core among three replicas in memory, and what the tests do to it: requests, kills, the passing of time.
//!
//! Invariants:
//! - Time passes only where a test says so; `settle` goes on until nobody has anything left to say.
//! - No request is answered twice.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use uuid::Uuid;

use super::Core;
use super::api::{Action, Event, GuestId, GuestOp, GuestReply, ReplicaId, Segment, StopReason, Time};
use super::config::{CoreConfig, Limits, Reads, ThrottleConfig, Timing, TraceConfig};
use super::tests_fake::{BLOCKS, Fake};
use super::timeline::Record;

pub(super) const MS: u64 = 1_000_000;

#[derive(Debug)]
pub(super) struct World {
    pub(super) core: Core,
    pub(super) now: u64,
    pub(super) fakes: [Fake; 3],
    events: VecDeque<Event>,
    pub(super) replies: BTreeMap<u64, GuestReply>,
    next_guest: u64,
    pub(super) stopped: Option<StopReason>,
    pub(super) replaced: Option<Result<(), String>>,
    pub(super) slow: Vec<Record>,
}

pub(super) fn config() -> CoreConfig {
    CoreConfig {
        min_replicas: 2,
        volume: Uuid::from_u128(99),
        upstairs: Uuid::from_u128(100),
        takeover: false,
        blocks: None,
        limits: Limits {
            volume_jobs: 32,
            volume_bytes: 4 << 20,
            replica_jobs: 64,
            replica_bytes: 16 << 20,
            waiting: 9,
            slowing: Duration::ZERO,
        },
        timing: Timing::default(),
        throttle: ThrottleConfig::default(),
        reads: Reads::default(),
        trace: TraceConfig::default(),
        heal: true,
    }
}

impl World {
    pub(super) fn new() -> Self {
        Self::with(config())
    }

    pub(super) fn with(config: CoreConfig) -> Self {
        Self {
            core: Core::new(config, Time(0)),
            now: 0,
            fakes: [Fake::new(1), Fake::new(2), Fake::new(3)],
            events: VecDeque::new(),
            replies: BTreeMap::new(),
            next_guest: 1,
            stopped: None,
            replaced: None,
            slow: Vec::new(),
        }
    }

    pub(super) fn serving() -> Self {
        let mut world = Self::new();
        world.run(1000);
        assert_eq!(world.core.status().state, "serving");
        world
    }

    pub(super) fn drain_actions(&mut self) {
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Connect { replica, link } => {
                    let fake = &mut self.fakes[replica.index()];
                    fake.inbox.clear();
                    fake.link = fake.up.then_some(link);
                    self.events.push_back(match fake.up {
                        true => Event::LinkUp { replica, link },
                        false => Event::LinkDown { replica, link, reason: "refused".into() },
                    });
                }
                Action::Disconnect { replica, link } => {
                    let fake = &mut self.fakes[replica.index()];
                    if fake.link == Some(link) {
                        fake.link = None;
                        fake.inbox.clear();
                    }
                }
                Action::Send { replicas, request, payload } => {
                    for replica in replicas.iter() {
                        let fake = &mut self.fakes[replica.index()];
                        if fake.link.is_some() {
                            fake.inbox.push_back((request.clone(), payload.clone()));
                        }
                    }
                }
                Action::GuestReply { guest, reply } => {
                    assert!(self.replies.insert(guest.0, reply).is_none(), "answered twice");
                }
                Action::Replace { answer, .. } => self.replaced = Some(answer),
                Action::Log(_) => {}
                Action::Slow(record) => self.slow.push(*record),
                Action::Stopped { reason } => self.stopped = Some(reason),
            }
        }
    }

    /// One message of this replica, if it has one and is able to.
    pub(super) fn step(&mut self, index: usize) -> bool {
        let fake = &mut self.fakes[index];
        let Some(link) = fake.link.filter(|_| fake.up && !fake.paused) else { return false };
        let Some((request, payload)) = fake.inbox.pop_front() else { return false };
        if let Some((reply, payload)) = fake.handle(request, &payload) {
            let replica = ReplicaId(u8::try_from(index).unwrap());
            self.core.handle(Time(self.now), Event::Reply { replica, link, reply, payload });
            self.drain_actions();
        }
        true
    }

    /// Connections come and go; no replica says anything.
    pub(super) fn settle_events(&mut self) {
        while let Some(event) = self.events.pop_front() {
            self.core.handle(Time(self.now), event);
            self.drain_actions();
        }
    }

    pub(super) fn settle(&mut self) {
        loop {
            self.drain_actions();
            let mut busy = false;
            while let Some(event) = self.events.pop_front() {
                self.core.handle(Time(self.now), event);
                self.drain_actions();
                busy = true;
            }
            for index in 0..3 {
                busy |= self.step(index);
            }
            if !busy {
                return;
            }
        }
    }

    pub(super) fn run(&mut self, ms: u64) {
        for _ in 0..ms.div_ceil(20) {
            self.core.handle(Time(self.now), Event::Tick);
            self.settle();
            self.now += 20 * MS;
        }
    }

    pub(super) fn submit(&mut self, op: GuestOp) -> u64 {
        let guest = self.next_guest;
        self.next_guest += 1;
        let received = Time(self.now);
        self.core.handle(Time(self.now), Event::Guest { guest: GuestId(guest), op, received });
        self.drain_actions();
        guest
    }

    pub(super) fn done(&mut self, op: GuestOp) -> GuestReply {
        let guest = self.submit(op);
        self.settle();
        self.replies.remove(&guest).expect("an answer")
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        let op = GuestOp::Write { offset, data: Bytes::copy_from_slice(data), fua: false };
        assert!(matches!(self.done(op), GuestReply::Done));
    }

    pub(super) fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        let reply = self.done(GuestOp::Read { offset, length });
        flat(&reply)
    }

    pub(super) fn kill(&mut self, index: usize) {
        self.fakes[index].up = false;
        self.fakes[index].inbox.clear();
        if let Some(link) = self.fakes[index].link.take() {
            let replica = ReplicaId(u8::try_from(index).unwrap());
            self.core.handle(Time(self.now), Event::LinkDown { replica, link, reason: "killed".into() });
            self.drain_actions();
        }
    }

    pub(super) fn states(&self) -> Vec<String> {
        self.core.status().replicas.into_iter().map(|r| r.state).collect()
    }

    pub(super) fn assert_converged(&mut self) {
        self.run(20_000);
        assert_eq!(self.states(), ["active", "active", "active"]);
        for block in 0..BLOCKS {
            let states = self.fakes.each_ref().map(|fake| fake.blocks.get(&block));
            assert!(
                states[0] == states[1] && states[0] == states[2],
                "block {block} differs: {:?}",
                states.map(|found| found.map(|(state, data)| (*state, data.first().copied())))
            );
        }
    }
}

/// The data of an answer in one piece.
pub(super) fn flat(reply: &GuestReply) -> Vec<u8> {
    let GuestReply::Data(segments) = reply else { panic!("not data: {reply:?}") };
    let mut out = Vec::new();
    for segment in segments {
        match segment {
            Segment::Data(data) => out.extend_from_slice(data),
            Segment::Zeros(length) => out.resize(out.len() + *length as usize, 0),
        }
    }
    out
}
