//! Processes, network, faults and time: carries the cores' actions out and brings events in.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use bytes::Bytes;
use newel_downstairs::core as down;
use newel_downstairs::core::api::{DiskOp, OpId};
use newel_downstairs::disk::{Change, RegionCore};
use newel_protocol::Generation;
use newel_protocol::wire::{Op, Reply, Request as WireRequest};
use newel_upstairs::core as up;
use newel_upstairs::core::api::{LinkId, ReplicaId};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use uuid::Uuid;

use super::checker::{self, Violation};
use super::disk::Disk;
use super::guest::{self, Request};
use super::history::{History, Nanos};
use super::plan::{MS, Plan};
use super::planted::Plants;

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub virtual_time: Nanos,
    pub requests: u64,
    pub events: u64,
    pub violation: Option<Violation>,
    pub log: Vec<String>,
    /// The history of the sector at fault.
    pub sector: Vec<String>,
}

/// Runs one seed to its end.
pub fn run(plan: Plan) -> Outcome {
    let mut world = World::new(plan);
    let failure = world.play().err();
    let violation = failure
        .map(|text| Violation { sector: usize::MAX, at: world.now, text })
        .or_else(|| checker::check(&world.history).err());
    Outcome {
        virtual_time: world.now,
        requests: world.next_request,
        events: world.events,
        sector: violation
            .as_ref()
            .map(|violation| world.history.describe(violation.sector))
            .unwrap_or_default(),
        violation,
        log: world.log,
    }
}

#[derive(Debug)]
pub(super) enum Ev {
    UpTick {
        up: usize,
    },
    DownTick {
        down: usize,
        incarnation: u64,
    },
    LinkUp {
        conn: usize,
    },
    LinkRefused {
        up: usize,
        replica: usize,
        link: LinkId,
    },
    ToDown {
        conn: usize,
        request: WireRequest,
        payload: Bytes,
    },
    ToUp {
        conn: usize,
        reply: Reply,
        payload: Bytes,
    },
    ClosedAtUp {
        conn: usize,
    },
    ClosedAtDown {
        conn: usize,
    },
    DiskStep {
        down: usize,
        incarnation: u64,
        op: OpId,
    },
    StartDown {
        down: usize,
    },
    ResumeDown {
        down: usize,
    },
    ResumeUp {
        up: usize,
    },
    StartUp {
        takeover: bool,
    },
    Think {
        connection: usize,
    },
    /// Clients without a server try again, as kernels do.
    Reconnect,
    Fault,
    Heal {
        conn: usize,
    },
    DiskFree {
        down: usize,
    },
    /// Planted: what should have been durable long ago.
    Late {
        down: usize,
        incarnation: u64,
        what: Late,
    },
}

#[derive(Debug)]
pub(super) enum Late {
    Log(DiskOp),
    Activated { conn: usize, request: WireRequest },
}

pub(super) struct Down {
    pub(super) disk: Disk,
    pub(super) boot: u128,
    pub(super) incarnation: u64,
    pub(super) process: Option<DownProcess>,
    pub(super) paused: bool,
    pub(super) deferred: Vec<Ev>,
    pub(super) stuck_until: Nanos,
    pub(super) next_tick: Option<Nanos>,
    pub(super) damaged: bool,
}

pub(super) struct DownProcess {
    pub(super) core: down::Core,
    pub(super) region: RegionCore<Disk>,
    pub(super) operations: BTreeMap<OpId, Operation>,
}

pub(super) struct Operation {
    pub(super) op: DiskOp,
    pub(super) stage: Stage,
}

pub(super) enum Stage {
    Queued,
    /// Contexts are read, data is on its way.
    Planned(Change),
    /// So are the new ones; the kernel has the data.
    ContextsWritten(Change),
    /// Data is on the disk.
    Written(Change),
}

pub(super) struct Up {
    pub(super) core: up::Core,
    pub(super) alive: bool,
    pub(super) paused: bool,
    pub(super) deferred: Vec<Ev>,
    /// The replica at the address that it has for each slot.
    pub(super) addresses: [usize; 3],
    pub(super) links: [Option<usize>; 3],
    pub(super) next_tick: Option<Nanos>,
    pub(super) served: bool,
    /// Was told to stop: it refuses what comes, so that clients wait for the next one.
    pub(super) stopping: bool,
    pub(super) generation: Option<Generation>,
}

impl Up {
    pub(super) fn serves(&self) -> bool {
        self.alive && self.served && !self.paused && !self.stopping
    }
}

pub(super) struct Conn {
    /// The generation promoted over it.
    pub(super) generation: Generation,
    /// Planted: fenced, but goes on all the same.
    pub(super) zombie: bool,
    pub(super) up: usize,
    pub(super) slot: usize,
    pub(super) down: usize,
    pub(super) incarnation: u64,
    pub(super) link: LinkId,
    pub(super) open_up: bool,
    pub(super) open_down: bool,
    /// Nothing is delivered before this; order is kept.
    pub(super) earliest: [Nanos; 2],
    /// What a partition swallows comes after it, as TCP would send it again.
    pub(super) partitioned: Option<[Vec<Ev>; 2]>,
}

pub(super) struct World {
    pub(super) plan: Plan,
    pub(super) rng: ChaCha8Rng,
    pub(super) now: Nanos,
    pub(super) order: u64,
    pub(super) queue: BinaryHeap<Reverse<(Nanos, u64)>>,
    pub(super) pending: BTreeMap<u64, Ev>,
    /// Those that the volume began with, and every one that was to replace another.
    pub(super) downs: Vec<Down>,
    /// The replica of each slot by the operator's configuration, and by the one before.
    pub(super) slots: [usize; 3],
    pub(super) old_slots: [usize; 3],
    pub(super) ups: Vec<Up>,
    pub(super) conns: Vec<Conn>,
    pub(super) history: History,
    /// Requests without an answer, by connection: (request, upstairs that has it).
    pub(super) guests: Vec<Vec<(Request, Option<usize>)>>,
    pub(super) next_request: u64,
    pub(super) faults_until: Nanos,
    pub(super) quiet: bool,
    pub(super) events: u64,
    pub(super) log: Vec<String>,
    pub(super) plants: Plants,
}

pub(super) const VOLUME: Uuid = Uuid::from_u128(77);

impl World {
    pub(super) fn new(plan: Plan) -> Self {
        Self {
            rng: ChaCha8Rng::seed_from_u64(plan.seed),
            now: 0,
            order: 0,
            queue: BinaryHeap::new(),
            pending: BTreeMap::new(),
            downs: (0..3).map(|index| Down::fresh(index, plan.blocks)).collect(),
            slots: [0, 1, 2],
            old_slots: [0, 1, 2],
            ups: Vec::new(),
            conns: Vec::new(),
            history: History::new(guest::sectors()),
            guests: vec![Vec::new(); plan.connections],
            next_request: 1,
            faults_until: plan.faults_for,
            quiet: false,
            events: 0,
            log: Vec::new(),
            plants: Plants::default(),
            plan,
        }
    }

    pub(super) fn note(&mut self, text: impl FnOnce() -> String) {
        // A run logs some thousand lines; only failing ones are printed.
        let text = text();
        self.log.push(format!("{:>12.6} {text}", self.now as f64 / 1e9));
    }

    pub(super) fn at(&mut self, time: Nanos, event: Ev) {
        self.order += 1;
        self.queue.push(Reverse((time.max(self.now), self.order)));
        self.pending.insert(self.order, event);
    }

    pub(super) fn after(&mut self, delay: Nanos, event: Ev) {
        self.at(self.now + delay, event);
    }

    pub(super) fn between(&mut self, (low, high): (Nanos, Nanos)) -> Nanos {
        self.rng.random_range(low..=high.max(low))
    }

    /// Phase one: faults. Phase two: none, and everything must become equal in time.
    pub(super) fn play(&mut self) -> Result<(), String> {
        for down in 0..3 {
            self.start_down(down);
        }
        self.start_up(false);
        for connection in 0..self.plan.connections {
            for _ in 0..self.plan.depth {
                let think = self.plan.think;
                let delay = self.rng.random_range(0..think);
                self.after(delay, Ev::Think { connection });
            }
        }
        let first = self.fault_delay();
        self.after(first, Ev::Fault);
        self.after(30 * MS, Ev::Reconnect);
        self.run_until(self.faults_until)?;
        self.end_faults();
        self.converge()?;
        self.read_everything()?;
        self.converge()?;
        self.scrub_everything()?;
        self.compare_replicas()
    }

    pub(super) fn run_until(&mut self, until: Nanos) -> Result<(), String> {
        while let Some(&Reverse((time, order))) = self.queue.peek() {
            if time > until {
                break;
            }
            self.queue.pop();
            self.now = time;
            self.events += 1;
            if let Some(event) = self.pending.remove(&order) {
                self.handle(event)?;
            }
        }
        self.now = until;
        Ok(())
    }

    pub(super) fn handle(&mut self, event: Ev) -> Result<(), String> {
        if let Some(event) = self.deferred(event) {
            match event {
                Ev::UpTick { up } => {
                    self.ups[up].next_tick = None;
                    self.feed_up(up, up::api::Event::Tick)?;
                }
                Ev::DownTick { down, incarnation } => {
                    self.downs[down].next_tick = None;
                    self.feed_down(down, incarnation, down::api::Event::Tick);
                }
                Ev::LinkUp { conn } => self.link_up(conn)?,
                Ev::LinkRefused { up, replica, link } => {
                    let reason = "connection refused".to_owned();
                    self.feed_up(up, up::api::Event::LinkDown { replica: id(replica), link, reason })?;
                }
                Ev::ToDown { conn, request, payload } => self.reach_down(conn, request, payload),
                Ev::ToUp { conn, reply, payload } => self.reach_up(conn, reply, payload)?,
                Ev::ClosedAtUp { conn } => self.closed_at_up(conn)?,
                Ev::ClosedAtDown { conn } => self.closed_at_down(conn),
                Ev::DiskStep { down, incarnation, op } => self.disk_step(down, incarnation, op),
                Ev::StartDown { down } => self.start_down(down),
                Ev::ResumeDown { down } => self.resume_down(down),
                Ev::ResumeUp { up } => self.resume_up(up),
                Ev::StartUp { takeover } => self.start_up(takeover),
                Ev::Think { connection } => self.think(connection)?,
                Ev::Reconnect => {
                    if let Some(up) = self.serving_up() {
                        self.attach_guests(up)?;
                    }
                    self.after(30 * MS, Ev::Reconnect);
                }
                Ev::Fault => self.next_fault()?,
                Ev::Heal { conn } => self.heal(conn),
                Ev::DiskFree { down } => self.downs[down].disk.set_full(false),
                Ev::Late { down, incarnation, what } => self.late(down, incarnation, what),
            }
        }
        Ok(())
    }

    /// A stopped process does nothing; what comes for it waits.
    pub(super) fn deferred(&mut self, event: Ev) -> Option<Ev> {
        let down = match &event {
            Ev::DownTick { down, .. } | Ev::DiskStep { down, .. } => Some(*down),
            Ev::ToDown { conn, .. } | Ev::ClosedAtDown { conn } => Some(self.conns[*conn].down),
            _ => None,
        };
        let up = match &event {
            Ev::UpTick { up } | Ev::LinkRefused { up, .. } => Some(*up),
            Ev::ToUp { conn, .. } | Ev::ClosedAtUp { conn } | Ev::LinkUp { conn } => {
                Some(self.conns[*conn].up)
            }
            _ => None,
        };
        if let Some(down) = down.filter(|&down| self.downs[down].paused) {
            self.downs[down].deferred.push(event);
            return None;
        }
        if let Some(up) = up.filter(|&up| self.ups[up].paused) {
            self.ups[up].deferred.push(event);
            return None;
        }
        Some(event)
    }
}

pub(super) fn id(index: usize) -> ReplicaId {
    ReplicaId::ALL[index]
}

pub(super) fn brief_op(op: &Op) -> String {
    match op {
        Op::Write { range, .. } => format!("write {range}"),
        Op::Store { blocks, join } => {
            let blocks: Vec<_> = blocks.iter().map(|b| format!("{}={}", b.block, b.state.version)).collect();
            format!("store {} (join {join})", blocks.join(" "))
        }
        other => format!("{other:?}"),
    }
}

pub(super) fn brief(reply: &up::api::GuestReply) -> String {
    match reply {
        up::api::GuestReply::Data(segments) => {
            let words: Vec<String> = segments
                .iter()
                .map(|segment| match segment {
                    up::api::Segment::Data(data) => {
                        let words =
                            data.chunks_exact(512).map(|s| u32::from_le_bytes([s[0], s[1], s[2], s[3]]));
                        format!("{:?}", words.collect::<Vec<_>>())
                    }
                    up::api::Segment::Zeros(length) => format!("zeros {length}"),
                })
                .collect();
            words.join(" ")
        }
        other => format!("{other:?}"),
    }
}
