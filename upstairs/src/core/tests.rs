//! The core against three replicas in memory that do what `protocol/README.md` asks of them, one job after the other.
//!
//! These tests show that each path works; the search for counter-examples is the simulator's, which runs real replicas.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use newel_protocol::lag::Health;
use newel_protocol::wire::{
    JobError, Membership, Op, ReadMode, Refusal, Reply, Request, StageTimes, StoredBlock, Welcome,
};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockState, ExtentId, Generation, JobId, Version, crc};
use proptest::prelude::*;
use uuid::Uuid;

use super::Core;
use super::api::{
    Action, Event, GuestError, GuestId, GuestOp, GuestReply, LinkId, ReplicaId, Segment, StopReason, Time,
};
use super::config::{CoreConfig, Limits, Reads, ThrottleConfig, Timing, TraceConfig};
use super::pace::RATE_FIRST;
use super::timeline::Record;

pub(super) const BLOCKS: u64 = 2500;
pub(super) const MS: u64 = 1_000_000;

#[derive(Debug)]
pub(super) struct Fake {
    pub(super) region: Uuid,
    pub(super) up: bool,
    /// Stopped like a process by SIGSTOP: takes bytes, does nothing.
    pub(super) paused: bool,
    pub(super) link: Option<LinkId>,
    pub(super) inbox: VecDeque<(Request, Bytes)>,
    pub(super) blocks: BTreeMap<u64, (BlockState, Bytes)>,
    pub(super) promised: Generation,
    pub(super) last_active: Generation,
    pub(super) membership: Membership,
    pub(super) stored_blocks: usize,
    in_use: bool,
}

impl Fake {
    pub(super) fn new(n: u128) -> Self {
        Self {
            region: Uuid::from_u128(n),
            up: true,
            paused: false,
            link: None,
            inbox: VecDeque::new(),
            blocks: BTreeMap::new(),
            promised: Generation(0),
            last_active: Generation(0),
            membership: Membership::default(),
            stored_blocks: 0,
            in_use: false,
        }
    }

    pub(super) fn state(&self, block: u64) -> BlockState {
        self.blocks.get(&block).map(|(state, _)| *state).unwrap_or_default()
    }

    pub(super) fn set(&mut self, block: u64, version: Version, data: Option<Bytes>) {
        let state = match &data {
            Some(data) => BlockState { version, crc: crc::crc(data), kind: BlockKind::Data },
            None => BlockState { version, crc: 0, kind: BlockKind::Zero },
        };
        self.blocks.insert(block, (state, data.unwrap_or_default()));
    }

    fn digest(&self, extent: ExtentId) -> u64 {
        let range = extent.first_block()..extent.first_block() + 1024;
        // Not linear, or the sum over a run of blocks with one version would vanish.
        let mix = |hash: u64, value: u64| {
            let x = (hash ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (x >> 29)
        };
        self.blocks.range(range).fold(0, |sum, (&block, (state, _))| {
            let fields = [block, state.version.generation.0.into(), state.version.sequence, state.crc.into()];
            sum ^ fields.into_iter().fold(1, mix)
        }) & !1
    }

    fn handle(&mut self, request: Request, payload: &Bytes) -> Option<(Reply, Bytes)> {
        let none = Bytes::new();
        Some(match request {
            Request::Hello(_) => {
                let welcome = Welcome {
                    version: 1,
                    region: self.region,
                    volume: Uuid::nil(),
                    blocks: BLOCKS,
                    promised: self.promised,
                    last_active: self.last_active,
                    membership: self.membership,
                    lost_power: false,
                };
                (Reply::Welcome(welcome), none)
            }
            Request::Promote { .. } if self.in_use => {
                (Reply::Refused(Refusal::InUse { by: Uuid::nil(), generation: self.promised }), none)
            }
            Request::Promote { generation } => {
                assert!(generation >= self.promised);
                self.promised = generation;
                (Reply::Promoted { generation, last_active: self.last_active, digest: 0 }, none)
            }
            Request::Activated { generation, membership } => {
                self.last_active = generation;
                self.membership = membership;
                (Reply::ActivatedStored { generation }, none)
            }
            Request::Ping { nonce } => (Reply::Pong { nonce, health: Health::default() }, none),
            Request::Digests { query, first, count } => {
                let digests = (first.0..first.0 + count).map(|e| self.digest(ExtentId(e))).collect();
                (Reply::Digests { query, first, digests }, none)
            }
            Request::Contexts { query, extent } => {
                let end = (extent.first_block() + 1024).min(BLOCKS);
                let states = (extent.first_block()..end).map(|b| self.state(b)).collect();
                (Reply::Contexts { query, extent, states }, none)
            }
            Request::Cancel { .. } => return None,
            Request::Job { job, op } => self.job(job, op, payload),
        })
    }

    fn job(&mut self, job: JobId, op: Op, payload: &Bytes) -> (Reply, Bytes) {
        let version = Version::new(self.promised, job.0);
        let mut states = Vec::new();
        let mut data = BytesMut::new();
        match op {
            Op::Read { range, mode } => {
                for block in range.blocks() {
                    let state = self.state(block);
                    states.push(state);
                    let raw = mode == ReadMode::Raw && state.kind == BlockKind::Unverified;
                    if mode == ReadMode::Verify {
                        let sound = !state.has_data() || crc::crc(&self.blocks[&block].1) == state.crc;
                        let kind = if sound { state.kind } else { BlockKind::Unreadable };
                        states.pop();
                        states.push(BlockState { kind, ..state });
                    } else if (mode != ReadMode::Contexts && state.has_data()) || raw {
                        data.extend_from_slice(&self.blocks[&block].1);
                    }
                }
            }
            Op::Write { range, crcs } => {
                assert_eq!(crc::first_mismatch(payload, &crcs), None);
                for (i, block) in range.blocks().enumerate() {
                    if version >= self.state(block).version {
                        self.set(block, version, Some(payload.slice(i * BLOCK_BYTES..(i + 1) * BLOCK_BYTES)));
                    }
                }
            }
            Op::Zero { range, .. } => {
                for block in range.blocks().filter(|&b| version >= self.state(b).version).collect::<Vec<_>>()
                {
                    self.set(block, version, None);
                }
            }
            Op::Flush => {}
            Op::Store { blocks, join } => self.store(&blocks, join, payload),
        }
        let done = Reply::Done { job, result: Ok(()), times: StageTimes::default(), states };
        (done, data.freeze())
    }

    fn store(&mut self, blocks: &[StoredBlock], join: Version, payload: &Bytes) {
        let mut at = 0;
        for StoredBlock { block, state } in blocks {
            let data = state.has_data().then(|| payload.slice(at..at + BLOCK_BYTES));
            at += if state.has_data() { BLOCK_BYTES } else { 0 };
            let own = self.state(*block);
            if !(own.is_verified() && own.version >= join.max(state.version)) {
                self.stored_blocks += 1;
                self.blocks.insert(*block, (*state, data.unwrap_or_default()));
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) core: Core,
    pub(super) now: u64,
    pub(super) fakes: [Fake; 3],
    events: VecDeque<Event>,
    pub(super) replies: BTreeMap<u64, GuestReply>,
    next_guest: u64,
    stopped: Option<StopReason>,
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

fn flat(reply: &GuestReply) -> Vec<u8> {
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

#[test]
fn serves_after_activation_and_keeps_what_is_written() {
    let mut world = World::serving();
    world.write(4096, &[7; 8192]);
    assert_eq!(world.read(0, 16_384), [vec![0; 4096], vec![7; 8192], vec![0; 4096]].concat());
    world.write(4095, b"abc");
    assert_eq!(world.read(4094, 5), [0, b'a', b'b', b'c', 7]);
    assert!(matches!(world.done(GuestOp::Flush), GuestReply::Done));
    assert!(world.fakes.iter().all(|fake| fake.last_active == Generation(1) && fake.membership.epoch == 1));
}

#[test]
fn a_fresh_volume_waits_for_all_three() {
    let mut world = World::new();
    world.fakes[2].up = false;
    world.run(5000);
    assert_eq!(world.core.status().state, "activating");
    world.fakes[2].up = true;
    world.run(6000);
    assert_eq!(world.core.status().state, "serving");
}

/// Replicas in their places, for another upstairs.
fn hand_over(from: World, min_replicas: usize) -> World {
    let mut config = from.core.config.clone();
    config.upstairs = Uuid::from_u128(config.upstairs.as_u128() + 1);
    config.min_replicas = min_replicas;
    let mut world = World::with(config);
    world.fakes = from.fakes;
    for fake in &mut world.fakes {
        fake.link = None;
        fake.inbox.clear();
    }
    world
}

#[test]
fn one_replica_alone_acknowledges_only_where_all_three_must_come_back() {
    let mut world = hand_over(World::new(), 1);
    world.run(6000);
    assert_eq!(world.core.status().state, "serving");
    world.kill(1);
    world.kill(2);
    world.write(0, &[7; 4096]);
    // The one that has it is away: nobody goes on without it, whatever this upstairs would do with.
    for min_replicas in [1, 2] {
        world = hand_over(world, min_replicas);
        (0..3).for_each(|replica| world.fakes[replica].up = replica != 0);
        world.run(6000);
        assert_eq!(world.core.status().state, "activating", "min_replicas = {min_replicas}");
    }
    world.fakes[0].up = true;
    world.run(6000);
    assert_eq!(world.read(0, 4096), [7; 4096]);
    world.assert_converged();
    // From here on two are enough.
    world = hand_over(world, 2);
    world.fakes[0].up = false;
    world.run(6000);
    assert_eq!(world.read(0, 4096), [7; 4096]);
}

#[test]
fn a_killed_replica_comes_back_by_copying_what_it_missed() {
    let mut world = World::serving();
    world.write(0, &[1; 40_960]);
    world.kill(1);
    for block in [3_u64, 5, 1500] {
        world.write(block * 4096, &[2; 4096]);
    }
    world.fakes[1].up = true;
    world.assert_converged();
    assert_eq!(world.fakes[1].stored_blocks, 3, "only the differing blocks are copied");
}

#[test]
fn a_stopped_replica_is_not_noticed_and_leaves() {
    let mut world = World::serving();
    world.fakes[0].paused = true;
    for i in 0..200_u64 {
        world.write(i % 50 * 4096, &[u8::try_from(i).unwrap(); 4096]);
        assert_eq!(world.read(i % 50 * 4096, 1), [u8::try_from(i).unwrap()]);
    }
    assert_ne!(world.states()[0], "active", "it is over its bound");
    world.fakes[0].paused = false;
    world.assert_converged();
}

#[test]
fn all_slow_together_means_nobody_is_dropped() {
    let mut world = World::serving();
    world.fakes.iter_mut().for_each(|fake| fake.paused = true);
    let guests: Vec<u64> = (0..100)
        .map(|i| {
            world.submit(GuestOp::Write { offset: i * 4096, data: Bytes::from(vec![1; 4096]), fua: false })
        })
        .collect();
    world.run(3000);
    assert_eq!(world.states(), ["active", "active", "active"]);
    assert!(world.core.status().jobs_in_flight <= 32 && world.replies.is_empty());
    world.fakes.iter_mut().for_each(|fake| fake.paused = false);
    world.settle();
    assert!(guests.iter().all(|guest| matches!(world.replies.get(guest), Some(GuestReply::Done))));
}

#[test]
fn writes_wait_for_a_quorum_and_reads_go_on() {
    let mut world = World::serving();
    world.write(0, &[1; 4096]);
    world.kill(0);
    world.kill(2);
    let write = world.submit(GuestOp::Write { offset: 0, data: Bytes::from(vec![2; 4096]), fua: true });
    world.run(1000);
    assert!(!world.replies.contains_key(&write));
    assert_eq!(world.read(4096, 4096), vec![0; 4096]);
    assert_eq!(world.core.status().state, "quorum_lost");
    let held = world.submit(GuestOp::Read { offset: 0, length: 4096 });
    world.run(1000);
    assert!(!world.replies.contains_key(&held), "it would show a write that isn't acknowledged");
    world.fakes[0].up = true;
    world.run(6000);
    assert!(matches!(world.replies.get(&write), Some(GuestReply::Done)));
    assert_eq!(flat(&world.replies[&held]), vec![2; 4096]);
}

#[test]
fn all_replicas_lost_and_back_is_only_a_pause() {
    let mut world = World::serving();
    world.write(0, &[1; 8192]);
    (0..3).for_each(|i| world.kill(i));
    let write = world.submit(GuestOp::Write { offset: 4096, data: Bytes::from(vec![2; 4096]), fua: true });
    let read = world.submit(GuestOp::Read { offset: 0, length: 4096 });
    world.run(2000);
    assert!(world.replies.is_empty());
    world.fakes.iter_mut().for_each(|fake| fake.up = true);
    world.assert_converged();
    assert!(matches!(world.replies.get(&write), Some(GuestReply::Done)));
    assert_eq!(flat(&world.replies[&read]), vec![1; 4096]);
    assert_eq!(world.core.status().generation, 2);
    assert_eq!(world.read(4096, 1), [2]);
}

#[test]
fn a_bad_copy_is_answered_from_elsewhere_and_healed() {
    let mut world = World::serving();
    world.write(0, &[1; 12_288]);
    for (fake, block) in [(0, 0), (1, 1), (2, 2)] {
        world.fakes[fake].blocks.get_mut(&block).unwrap().1 = Bytes::from(vec![9; 4096]);
    }
    assert_eq!(world.read(0, 12_288), vec![1; 12_288], "each replica has one bad block of three");
    world.assert_converged();
    assert!(world.fakes[0].blocks.values().all(|(_, data)| data[0] == 1));
}

#[test]
fn no_good_copy_is_an_error_for_that_request_only() {
    let mut world = World::serving();
    world.write(0, &[1; 8192]);
    for fake in &mut world.fakes {
        fake.blocks.get_mut(&0).unwrap().1 = Bytes::from(vec![9; 4096]);
    }
    assert!(matches!(
        world.done(GuestOp::Read { offset: 0, length: 4096 }),
        GuestReply::Failed(GuestError::Io)
    ));
    assert_eq!(world.read(4096, 4096), vec![1; 4096]);
    world.write(0, &[2; 4096]);
    assert_eq!(world.read(0, 4096), vec![2; 4096]);
}

#[test]
fn a_stale_replica_is_never_a_source() {
    let mut world = World::serving();
    world.kill(0);
    world.write(0, &[5; 4096]);
    // An unacknowledged write of long ago with a high sequence on the stale replica.
    world.fakes[0].set(0, Version::new(Generation(1), 999), Some(Bytes::from(vec![6; 4096])));
    let [a, b, c] = std::mem::replace(&mut world.fakes, [Fake::new(7), Fake::new(8), Fake::new(9)]);
    let mut second = World::new();
    second.fakes = [a, b, c];
    second.fakes.iter_mut().for_each(|fake| fake.up = true);
    second.fakes[1].last_active = Generation(3);
    second.fakes[2].last_active = Generation(3);
    second.run(3000);
    assert_eq!(second.read(0, 4096), vec![5; 4096]);
    second.assert_converged();
}

#[test]
fn an_unverified_block_is_adopted_only_above_every_verified_one() {
    for (bound, expected) in [(5, 1), (7, 9)] {
        let mut world = World::new();
        let members = Membership { epoch: 1, regions: [1, 2, 3].map(Uuid::from_u128), alone: false };
        for fake in &mut world.fakes {
            fake.membership = members;
            fake.set(0, Version::new(Generation(0), 6), Some(Bytes::from(vec![1; 4096])));
        }
        let odd = Bytes::from(vec![9; 4096]);
        let state = BlockState {
            version: Version::new(Generation(0), bound),
            crc: crc::crc(&odd),
            kind: BlockKind::Unverified,
        };
        world.fakes[1].blocks.insert(0, (state, odd));
        // With all three at hand and none short of power, what one alone claims was never acknowledged.
        world.fakes[2].up = false;
        world.run(3000);
        assert_eq!(world.read(0, 1), [expected]);
        world.fakes[2].up = true;
        world.assert_converged();
    }
}

#[test]
fn refusals_end_an_upstairs_that_never_served() {
    let mut world = World::new();
    world.fakes[1].in_use = true;
    world.run(1000);
    assert!(matches!(world.stopped, Some(StopReason::Refused { .. })), "{:?}", world.stopped);
}

#[test]
fn a_failed_write_makes_the_replica_leave() {
    let mut world = World::serving();
    let link = world.fakes[1].link.unwrap();
    world.fakes[1].paused = true;
    let write = world.submit(GuestOp::Write { offset: 0, data: Bytes::from(vec![1; 4096]), fua: false });
    let at =
        world.fakes[1].inbox.iter().position(|(request, _)| matches!(request, Request::Job { .. })).unwrap();
    let Some((Request::Job { job, .. }, _)) = world.fakes[1].inbox.remove(at) else { panic!("no job") };
    let result = Err(JobError::NoSpace);
    let reply = Reply::Done { job, result, times: StageTimes::default(), states: Vec::new() };
    world
        .core
        .handle(Time(world.now), Event::Reply { replica: ReplicaId(1), link, reply, payload: Bytes::new() });
    world.settle();
    assert!(matches!(world.replies.get(&write), Some(GuestReply::Done)));
    assert_eq!(world.states()[1], "left");
    world.fakes[1].paused = false;
    world.assert_converged();
}

#[test]
fn a_joiner_is_not_copied_to_beyond_what_was_granted() {
    let mut world = World::serving();
    world.kill(1);
    for block in 0..BLOCKS {
        world.write(block * BLOCK_BYTES as u64, &[7; BLOCK_BYTES]);
    }
    world.fakes[1].up = true;
    let until = world.now + 20_000 * MS;
    let step = |world: &mut World| {
        assert!(world.now < until, "nothing is copied");
        world.core.handle(Time(world.now), Event::Tick);
        world.settle();
        world.now += MS;
    };
    while world.fakes[1].stored_blocks == 0 {
        step(&mut world);
    }
    // A pause, after which more copies are granted than there is room for.
    world.fakes[1].paused = true;
    (0..30).for_each(|_| step(&mut world));
    world.fakes[1].paused = false;
    // Every answer comes at once now, so nothing but the rate holds copies back; what was sent before comes on top.
    let before = world.fakes[1].stored_blocks + 32 * 16;
    (0..10).for_each(|_| step(&mut world));
    let due = usize::try_from(RATE_FIRST / 100).unwrap() / BLOCK_BYTES;
    let copied = world.fakes[1].stored_blocks.saturating_sub(before);
    assert!((due / 2..due * 2).contains(&copied), "{copied} blocks in the time of {due}");
    world.assert_converged();
}

#[test]
fn shutdown_finishes_what_was_admitted() {
    let mut world = World::serving();
    let write = world.submit(GuestOp::Write { offset: 0, data: Bytes::from(vec![1; 4096]), fua: false });
    world.core.handle(Time(world.now), Event::Shutdown { within: Duration::from_secs(4) });
    let late = world.submit(GuestOp::Read { offset: 0, length: 1 });
    world.settle();
    assert!(matches!(world.replies.get(&write), Some(GuestReply::Done)));
    assert!(matches!(world.replies.get(&late), Some(GuestReply::Failed(GuestError::ShuttingDown))));
    assert_eq!(world.stopped, Some(StopReason::Finished));
}

#[derive(Clone, Debug)]
enum Move {
    Write { at: u32, length: u32, fua: bool },
    Zero { at: u32, length: u32 },
    Trim { at: u32, length: u32 },
    Read { at: u32, length: u32 },
    Flush,
    Step(usize, u8),
    Kill(usize),
    Start(usize),
    Pause(usize),
    Time(u16),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    // Few blocks, so that requests overlap; the volume's last extent is a partial one.
    let at = prop_oneof![0..40_000_u32, 1023 * 4096 - 3000..1025 * 4096_u32];
    let length = prop_oneof![1..600_u32, 1..20_000_u32, Just(4096_u32), Just(8192_u32)];
    let one = prop_oneof![
        6 => (at.clone(), length.clone(), any::<bool>()).prop_map(|(at, length, fua)| Move::Write { at, length, fua }),
        1 => (at.clone(), length.clone()).prop_map(|(at, length)| Move::Zero { at, length }),
        1 => (at.clone(), length.clone()).prop_map(|(at, length)| Move::Trim { at, length }),
        4 => (at, length).prop_map(|(at, length)| Move::Read { at, length }),
        1 => Just(Move::Flush),
        8 => (0..3_usize, any::<u8>()).prop_map(|(i, n)| Move::Step(i, n)),
        1 => (0..3_usize).prop_map(Move::Kill),
        3 => (0..3_usize).prop_map(Move::Start),
        1 => (0..3_usize).prop_map(Move::Pause),
        2 => (1..800_u16).prop_map(Move::Time),
    ];
    prop::collection::vec(one, 1..120)
}

/// What each byte may be: the values of writes that could have landed since the last one that surely did.
#[derive(Debug)]
struct Oracle {
    history: Vec<Vec<(u64, u8)>>,
    pending: BTreeMap<u64, (Move, u8)>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// One request at a time per byte range would hide races, so many are in flight; the oracle accepts for each byte
    /// any value that was written and not surely overwritten.
    #[test]
    fn nothing_acknowledged_is_lost(moves in moves()) {
        let mut world = World::serving();
        let mut oracle = Oracle { history: vec![vec![(0, 0)]; usize::try_from(BLOCKS).unwrap() * 4], pending: BTreeMap::new() };
        let mut value = 0_u8;
        for step in moves {
            value = value.wrapping_add(1).max(1);
            oracle.apply(&mut world, step, value);
        }
        for fake in &mut world.fakes {
            fake.up = true;
            fake.paused = false;
        }
        world.assert_converged();
        oracle.collect(&mut world);
        prop_assert!(oracle.pending.is_empty(), "unanswered: {:?}", oracle.pending);
        for index in 0..oracle.history.len() {
            let byte = world.read(index as u64 * 1024, 1)[0];
            oracle.check(index, byte);
        }
    }
}

impl Oracle {
    /// The sample bytes (one in 1024) that a request touches.
    fn samples(at: u32, length: u32) -> std::ops::Range<usize> {
        at.div_ceil(1024) as usize..(at + length).div_ceil(1024) as usize
    }

    /// A trim works on whole blocks only.
    fn inner(at: u32, length: u32) -> (u32, u32) {
        let (start, end) = (at.div_ceil(4096) * 4096, (at + length) / 4096 * 4096);
        if end > start { (start, end - start) } else { (start, 0) }
    }

    fn apply(&mut self, world: &mut World, step: Move, value: u8) {
        let op = match &step {
            Move::Write { at, length, fua } => GuestOp::Write {
                offset: u64::from(*at),
                data: vec![value; *length as usize].into(),
                fua: *fua,
            },
            Move::Zero { at, length } => GuestOp::Zero {
                offset: u64::from(*at),
                length: u64::from(*length),
                allocate: false,
                fua: false,
            },
            Move::Trim { at, length } => {
                GuestOp::Trim { offset: u64::from(*at), length: u64::from(*length), fua: false }
            }
            Move::Read { at, length } => GuestOp::Read { offset: u64::from(*at), length: *length },
            Move::Flush => GuestOp::Flush,
            Move::Step(index, count) => {
                (0..*count % 16).for_each(|_| {
                    world.step(*index);
                });
                self.collect(world);
                return;
            }
            Move::Kill(index) => return world.kill(*index),
            Move::Start(index) => {
                world.fakes[*index].up = true;
                world.fakes[*index].paused = false;
                return;
            }
            Move::Pause(index) => {
                world.fakes[*index].paused = true;
                return;
            }
            Move::Time(ms) => {
                world.run(u64::from(*ms));
                self.collect(world);
                return;
            }
        };
        // The oracle's rule: while a change of some bytes is open no other change of them is issued.
        let range = Self::touched(&step);
        let busy = self.pending.values().any(|(other, _)| {
            let other_range = Self::touched(other);
            range.start < other_range.end && other_range.start < range.end
        });
        if busy && !matches!(step, Move::Flush) {
            return;
        }
        let guest = world.submit(op);
        self.pending.insert(guest, (step, value));
        self.collect(world);
    }

    fn touched(step: &Move) -> std::ops::Range<usize> {
        match step {
            Move::Write { at, length, .. } | Move::Zero { at, length } | Move::Read { at, length } => {
                Self::samples(*at, *length)
            }
            Move::Trim { at, length } => {
                let (at, length) = Self::inner(*at, *length);
                Self::samples(at, length)
            }
            Move::Flush
            | Move::Step(..)
            | Move::Kill(_)
            | Move::Start(_)
            | Move::Pause(_)
            | Move::Time(_) => 0..0,
        }
    }

    fn collect(&mut self, world: &mut World) {
        let done: Vec<u64> =
            self.pending.keys().copied().filter(|guest| world.replies.contains_key(guest)).collect();
        for guest in done {
            let reply = world.replies.remove(&guest).unwrap();
            let (step, value) = self.pending.remove(&guest).unwrap();
            match step {
                Move::Read { at, .. } => {
                    let data = flat(&reply);
                    for index in Self::touched(&step) {
                        self.check(index, data[index * 1024 - at as usize]);
                    }
                }
                Move::Write { .. }
                | Move::Zero { .. }
                | Move::Trim { .. }
                | Move::Flush
                | Move::Step(..)
                | Move::Kill(_)
                | Move::Start(_)
                | Move::Pause(_)
                | Move::Time(_) => {
                    assert!(matches!(reply, GuestReply::Done), "{step:?}: {reply:?}");
                    let value = if matches!(step, Move::Write { .. }) { value } else { 0 };
                    for index in Self::touched(&step) {
                        self.history[index] = vec![(guest, value)];
                    }
                }
            }
        }
    }

    fn check(&self, index: usize, byte: u8) {
        assert!(
            self.history[index].iter().any(|&(_, value)| value == byte),
            "byte {} is {byte}, may be {:?}",
            index * 1024,
            self.history[index]
        );
    }
}
