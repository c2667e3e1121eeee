//! A core with a disk of fakes: carries out operations when told to, checks the rules that hold for what is at the disk,
//! and counts answers.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use newel_protocol::crc::block_crcs;
use newel_protocol::lag::Health;
use newel_protocol::wire::{
    Hello, Membership, Op, ReadMode, Reply, Request, StageTimes, StoredBlock, VERSION,
};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, BlockState, ExtentId, Generation, JobId, Version};
use uuid::Uuid;

use crate::core::api::{
    Action, ConnId, DiskCommand, DiskDone, DiskError, DiskOp, DiskOutcome, Event, HeaderChange, LogEntry,
    LogEvent, RegionFacts, Time,
};
use crate::core::{Core, CoreConfig};

pub(super) const BLOCKS: u64 = 8 * 1024 + 100;
pub(super) const VOLUME: Uuid = Uuid::from_u128(0x70);
pub(super) const ANN: Uuid = Uuid::from_u128(0xa);
pub(super) const BOB: Uuid = Uuid::from_u128(0xb);

pub(super) fn facts() -> RegionFacts {
    RegionFacts {
        region: Uuid::from_u128(1),
        volume: VOLUME,
        blocks: BLOCKS,
        promised: Generation(3),
        promised_to: ANN,
        last_active: Generation(2),
        membership: Membership::default(),
        lost_power: false,
        log_slots: 4,
        log_slots_per_record: 2,
        log_entries: vec![LogEntry { slot: 0, extent: Some(ExtentId(0)) }],
    }
}

/// Runs a core and keeps a naive picture of everything that it does.
pub(super) struct Harness {
    pub(super) core: Core,
    pub(super) now: Time,
    /// At the disk, in order of arrival there.
    pub(super) disk: Vec<DiskCommand>,
    pub(super) log_on_disk: BTreeMap<u32, ExtentId>,
    pub(super) sent: Vec<(ConnId, Reply, Bytes)>,
    pub(super) closed: Vec<ConnId>,
    pub(super) failures: usize,
    pub(super) stopped: usize,
    pub(super) promised: (Generation, Uuid),
    /// Jobs of each connection that are owed an answer.
    pub(super) owed: BTreeMap<ConnId, BTreeSet<u64>>,
}

impl Harness {
    pub(super) fn new(config: CoreConfig, facts: RegionFacts) -> Self {
        Self {
            log_on_disk: facts.log_entries.iter().filter_map(|e| Some((e.slot, e.extent?))).collect(),
            promised: (facts.promised, facts.promised_to),
            core: Core::new(config, facts),
            now: Time(0),
            disk: Vec::new(),
            sent: Vec::new(),
            closed: Vec::new(),
            failures: 0,
            stopped: 0,
            owed: BTreeMap::new(),
        }
    }

    pub(super) fn handle(&mut self, event: Event) {
        self.now.0 += 1_000;
        self.core.handle(self.now, event);
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Send { conn, reply, payload } => {
                    assert!(!self.closed.contains(&conn), "sent after closing: {reply:?}");
                    if let Reply::Done { job, .. } = &reply {
                        let owed = self.owed.get_mut(&conn).is_some_and(|owed| owed.remove(&job.0));
                        assert!(owed, "job {job} answered twice, or never asked");
                    }
                    if let Reply::Promoted { generation, .. } = &reply {
                        assert_eq!(self.promised.0, *generation, "promoted before the promise was durable");
                        assert!(self.disk.iter().all(|c| !is_job(&c.kind)), "promoted beside older jobs");
                    }
                    self.sent.push((conn, reply, payload));
                }
                Action::Pong { conn, nonce } => {
                    assert!(!self.closed.contains(&conn), "a pong after closing");
                    self.sent.push((conn, Reply::Pong { nonce, health: Health::default() }, Bytes::new()));
                }
                Action::Close { conn, .. } => {
                    self.owed.remove(&conn);
                    self.closed.push(conn);
                }
                Action::Disk(command) => self.submit(command),
                Action::Log(LogEvent::Failed { .. }) => self.failures += 1,
                Action::Log(_) => {}
                Action::Stopped => self.stopped += 1,
            }
        }
    }

    pub(super) fn submit(&mut self, command: DiskCommand) {
        assert_eq!(self.failures, 0, "the disk is used after a failure: {command:?}");
        for other in &self.disk {
            let kind = std::mem::discriminant(&other.kind) == std::mem::discriminant(&command.kind);
            let single =
                matches!(other.kind, DiskOp::Flush { .. } | DiskOp::ActivityLog { .. } | DiskOp::Header(_));
            assert!(!(kind && single), "two at a time: {command:?}");
            if let (Some((a, change_a)), Some((b, change_b))) = (reach(&other.kind), reach(&command.kind)) {
                assert!(!(a.overlaps(b) && (change_a || change_b)), "conflict: {other:?} {command:?}");
            }
        }
        if let Some((range, true)) = reach(&command.kind) {
            let extent = range.extent();
            assert!(
                self.log_on_disk.values().any(|&logged| logged == extent),
                "a change of {extent} outside the log"
            );
        }
        if let DiskOp::ActivityLog { entries } = &command.kind {
            for entry in entries {
                let leaving = self.log_on_disk.get(&entry.slot);
                let busy = self
                    .disk
                    .iter()
                    .filter_map(|c| reach(&c.kind))
                    .any(|(range, change)| change && Some(&range.extent()) == leaving);
                assert!(!busy, "an extent leaves the log beside its own changes");
            }
        }
        self.disk.push(command);
    }

    /// The disk ends its operation at `index`.
    pub(super) fn finish(&mut self, index: usize, error: Option<DiskError>) {
        let DiskCommand { op, kind, .. } = self.disk.remove(index);
        let result = match error {
            Some(error) => Err(error),
            None => Ok(self.carry_out(kind)),
        };
        let times = StageTimes { queued_us: 0, submit_us: 3, device_us: 70 };
        self.handle(Event::DiskDone(DiskDone { op, result, times }));
    }

    pub(super) fn carry_out(&mut self, kind: DiskOp) -> DiskOutcome {
        match kind {
            DiskOp::Read { range, .. } => DiskOutcome::Read {
                states: vec![BlockState::default(); range.count as usize],
                data: Bytes::new(),
            },
            DiskOp::ActivityLog { entries } => {
                self.log_on_disk.extend(entries.iter().filter_map(|e| Some((e.slot, e.extent?))));
                DiskOutcome::Done
            }
            DiskOp::Header(HeaderChange::Promise { generation, upstairs }) => {
                assert!(generation > self.promised.0, "a promise goes back");
                self.promised = (generation, upstairs);
                DiskOutcome::Done
            }
            DiskOp::Digests { count, .. } => DiskOutcome::Digests(vec![7; count as usize]),
            DiskOp::Contexts { extent } => DiskOutcome::Contexts(vec![
                BlockState::default();
                (BLOCKS - extent.first_block()).min(1024)
                    as usize
            ]),
            DiskOp::Write { .. }
            | DiskOp::Zero { .. }
            | DiskOp::Store { .. }
            | DiskOp::Flush { .. }
            | DiskOp::Header(_)
            | DiskOp::Close => DiskOutcome::Done,
        }
    }

    pub(super) fn finish_all(&mut self) {
        while !self.disk.is_empty() {
            self.finish(0, None);
        }
    }

    pub(super) fn ask(&mut self, conn: u64, request: Request, payload: Bytes) {
        let conn = ConnId(conn);
        if let Request::Job { job, .. } = &request {
            self.owed.entry(conn).or_default().insert(job.0);
        }
        self.handle(Event::Message { conn, request, payload });
    }

    pub(super) fn hello(&mut self, conn: u64, upstairs: Uuid, takeover: bool) {
        self.handle(Event::Connected { conn: ConnId(conn) });
        let hello = Hello {
            min_version: VERSION,
            max_version: VERSION,
            volume: VOLUME,
            upstairs,
            session: conn,
            takeover,
        };
        self.ask(conn, Request::Hello(hello), Bytes::new());
    }

    pub(super) fn promote(&mut self, conn: u64, generation: u32) {
        self.ask(conn, Request::Promote { generation: Generation(generation) }, Bytes::new());
    }

    /// A session in force, with nothing left at the disk.
    pub(super) fn session(&mut self, conn: u64, upstairs: Uuid, generation: u32) {
        self.hello(conn, upstairs, false);
        self.promote(conn, generation);
        self.finish_all();
        assert!(matches!(self.last(conn), Some(Reply::Promoted { .. })), "{:?}", self.last(conn));
    }

    pub(super) fn last(&self, conn: u64) -> Option<&Reply> {
        self.sent.iter().rev().find(|(to, ..)| to.0 == conn).map(|(_, reply, _)| reply)
    }

    pub(super) fn job(&mut self, conn: u64, job: u64, op: Op) {
        let payload = match &op {
            Op::Write { range, .. } => data(range.count),
            Op::Store { blocks, .. } => data(u32::try_from(blocks.len()).unwrap()),
            Op::Read { .. } | Op::Zero { .. } | Op::Flush => Bytes::new(),
        };
        self.ask(conn, Request::Job { job: JobId(job), op }, payload);
    }

    pub(super) fn kinds(&self) -> String {
        let name = |command: &DiskCommand| match command.kind {
            DiskOp::Read { .. } => "read",
            DiskOp::Write { .. } => "write",
            DiskOp::Zero { .. } => "zero",
            DiskOp::Store { .. } => "store",
            DiskOp::Flush { .. } => "flush",
            DiskOp::ActivityLog { .. } => "log",
            DiskOp::Header(_) => "header",
            DiskOp::Digests { .. } => "digests",
            DiskOp::Contexts { .. } => "contexts",
            DiskOp::Close => "close",
        };
        self.disk.iter().map(name).collect::<Vec<_>>().join(" ")
    }
}

pub(super) fn is_job(kind: &DiskOp) -> bool {
    matches!(kind, DiskOp::Contexts { .. } | DiskOp::Flush { mark: Some(_) }) || reach(kind).is_some()
}

/// The blocks that an operation touches, and whether it changes them.
pub(super) fn reach(kind: &DiskOp) -> Option<(BlockRange, bool)> {
    match kind {
        DiskOp::Read { range, .. } => Some((*range, false)),
        DiskOp::Write { range, .. } | DiskOp::Zero { range, .. } => Some((*range, true)),
        DiskOp::Store { blocks, .. } => {
            let (first, last) = (blocks.first()?.block, blocks.last()?.block);
            Some((BlockRange::new(first, u32::try_from(last - first + 1).unwrap()), true))
        }
        DiskOp::Contexts { extent } => Some((BlockRange::new(extent.first_block(), 1024), false)),
        DiskOp::Flush { .. }
        | DiskOp::ActivityLog { .. }
        | DiskOp::Header(_)
        | DiskOp::Digests { .. }
        | DiskOp::Close => None,
    }
}

pub(super) fn data(blocks: u32) -> Bytes {
    Bytes::from(vec![5; blocks as usize * BLOCK_BYTES])
}

pub(super) fn write(start: u64, count: u32) -> Op {
    Op::Write { range: BlockRange::new(start, count), crcs: block_crcs(&data(count)) }
}

pub(super) fn read(start: u64, count: u32) -> Op {
    Op::Read { range: BlockRange::new(start, count), mode: ReadMode::Data }
}

pub(super) fn store(blocks: &[u64]) -> Op {
    let crc = block_crcs(&data(1))[0];
    let state = BlockState { version: Version::new(Generation(1), 9), crc, kind: BlockKind::Data };
    let blocks = blocks.iter().map(|&block| StoredBlock { block, state }).collect();
    Op::Store { blocks, join: Version::MAX }
}
