//! Processes, network, faults and time: carries the cores' actions out and brings events in.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use bytes::Bytes;
use newel_downstairs::core as down;
use newel_downstairs::core::api::{ConnId, DiskCommand, DiskDone, DiskOp, DiskOutcome, OpId};
use newel_downstairs::disk::{Change, RegionCore, in_turn};
use newel_protocol::wire::{Op, ReadMode, Refusal, Reply, Request as WireRequest, StageTimes, ZeroMode};
use newel_protocol::{BLOCK_BYTES, BlockRange, Generation, JobId, Version};
use newel_upstairs::core as up;
use newel_upstairs::core::api::{GuestId, LinkId, ReplicaId, StopReason};
use newel_upstairs::core::config::CoreConfig;
use newel_upstairs::core::mistakes::Mistakes;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use uuid::Uuid;

use super::checker::{self, Violation};
use super::disk::{self, Disk};
use super::guest::{self, Answered, Request};
use super::history::{History, Nanos, Note};
use super::plan::{Bug, Fault, MS, Plan};

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
enum Ev {
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
enum Late {
    Log(DiskOp),
    Activated { conn: usize, request: WireRequest },
}

struct Down {
    disk: Disk,
    boot: u128,
    incarnation: u64,
    process: Option<DownProcess>,
    paused: bool,
    deferred: Vec<Ev>,
    stuck_until: Nanos,
    next_tick: Option<Nanos>,
    damaged: bool,
}

struct DownProcess {
    core: down::Core,
    region: RegionCore<Disk>,
    operations: BTreeMap<OpId, Operation>,
}

struct Operation {
    op: DiskOp,
    stage: Stage,
}

enum Stage {
    Queued,
    /// Contexts are read, data is on its way.
    Planned(Change),
    /// Data is on the disk.
    Written(Change),
}

struct Up {
    core: up::Core,
    alive: bool,
    paused: bool,
    deferred: Vec<Ev>,
    links: [Option<usize>; 3],
    next_tick: Option<Nanos>,
    served: bool,
    generation: Option<Generation>,
}

struct Conn {
    /// The generation promoted over it.
    generation: Generation,
    /// Planted: fenced, but goes on all the same.
    zombie: bool,
    up: usize,
    down: usize,
    incarnation: u64,
    link: LinkId,
    open_up: bool,
    open_down: bool,
    /// Nothing is delivered before this; order is kept.
    earliest: [Nanos; 2],
    /// What a partition swallows comes after it, as TCP would send it again.
    partitioned: Option<[Vec<Ev>; 2]>,
}

struct World {
    plan: Plan,
    rng: ChaCha8Rng,
    now: Nanos,
    order: u64,
    queue: BinaryHeap<Reverse<(Nanos, u64)>>,
    pending: BTreeMap<u64, Ev>,
    downs: [Down; 3],
    ups: Vec<Up>,
    conns: Vec<Conn>,
    history: History,
    /// Requests without an answer, by connection: (request, upstairs that has it).
    guests: Vec<Vec<(Request, Option<usize>)>>,
    next_request: u64,
    faults_until: Nanos,
    quiet: bool,
    events: u64,
    log: Vec<String>,
}

const VOLUME: Uuid = Uuid::from_u128(77);

impl World {
    fn new(plan: Plan) -> Self {
        let disks = [1_u128, 2, 3].map(|n| Down {
            disk: Disk::format(plan.blocks, Uuid::from_u128(n)),
            boot: n << 64,
            incarnation: 0,
            process: None,
            paused: false,
            deferred: Vec::new(),
            stuck_until: 0,
            next_tick: None,
            damaged: false,
        });
        Self {
            rng: ChaCha8Rng::seed_from_u64(plan.seed),
            now: 0,
            order: 0,
            queue: BinaryHeap::new(),
            pending: BTreeMap::new(),
            downs: disks,
            ups: Vec::new(),
            conns: Vec::new(),
            history: History::new(guest::sectors()),
            guests: vec![Vec::new(); plan.connections],
            next_request: 1,
            faults_until: plan.faults_for,
            quiet: false,
            events: 0,
            log: Vec::new(),
            plan,
        }
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        // A run logs some thousand lines; only failing ones are printed.
        let text = text();
        self.log.push(format!("{:>12.6} {text}", self.now as f64 / 1e9));
    }

    fn at(&mut self, time: Nanos, event: Ev) {
        self.order += 1;
        self.queue.push(Reverse((time.max(self.now), self.order)));
        self.pending.insert(self.order, event);
    }

    fn after(&mut self, delay: Nanos, event: Ev) {
        self.at(self.now + delay, event);
    }

    fn between(&mut self, (low, high): (Nanos, Nanos)) -> Nanos {
        self.rng.random_range(low..=high.max(low))
    }

    /// Phase one: faults. Phase two: none, and everything must become equal in time.
    fn play(&mut self) -> Result<(), String> {
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
        let deadline = self.now + self.plan.converge_within;
        loop {
            let step = self.now + 20 * MS;
            self.run_until(step)?;
            if self.is_quiet() {
                break;
            }
            if self.now >= deadline {
                return Err(format!(
                    "not converged {} s after the last fault: {}",
                    self.plan.converge_within / 1_000 / MS,
                    self.state()
                ));
            }
        }
        self.read_everything()?;
        self.compare_replicas()
    }

    fn run_until(&mut self, until: Nanos) -> Result<(), String> {
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

    fn handle(&mut self, event: Ev) -> Result<(), String> {
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
                Ev::ToDown { conn, request, payload } => self.to_down(conn, request, payload),
                Ev::ToUp { conn, reply, payload } => self.to_up(conn, reply, payload)?,
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
    fn deferred(&mut self, event: Ev) -> Option<Ev> {
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

    // Downstairs.

    fn start_down(&mut self, index: usize) {
        let down = &mut self.downs[index];
        if down.process.is_some() {
            return;
        }
        down.disk.attach();
        if self.plan.bug == Some(Bug::FlushSkipsContexts) {
            let layout = disk::layout(self.plan.blocks);
            down.disk.plant_skip_sync(layout.contexts_offset, layout.data_offset);
        }
        down.incarnation += 1;
        let boot = Uuid::from_u128(down.boot);
        match RegionCore::open_on(down.disk.clone(), "region", boot, &in_turn) {
            Ok((region, mut facts, _)) => {
                // A small log: what it held beyond that was verified and flushed just now.
                if disk::shrink_log(&mut facts.log_entries, self.plan.log_slots) {
                    facts.log_slots = self.plan.log_slots;
                    facts.log_slots_per_record = 2;
                }
                let lost_power = facts.lost_power;
                let core = down::Core::new(down::CoreConfig::default(), facts);
                down.process = Some(DownProcess { core, region, operations: BTreeMap::new() });
                self.note(|| {
                    format!("replica {index} starts{}", if lost_power { ", it had lost power" } else { "" })
                });
            }
            Err(error) => {
                self.note(|| format!("replica {index} does not start: {error}"));
                self.after(50 * MS, Ev::StartDown { down: index });
            }
        }
    }

    fn feed_down(&mut self, index: usize, incarnation: u64, event: down::api::Event) {
        let down = &mut self.downs[index];
        if down.incarnation != incarnation {
            return;
        }
        let Some(process) = &mut down.process else { return };
        process.core.handle(down::api::Time(self.now), event);
        self.pump_down(index);
    }

    fn pump_down(&mut self, index: usize) {
        let incarnation = self.downs[index].incarnation;
        while let Some(action) = self.downs[index].process.as_mut().and_then(|p| p.core.poll_action()) {
            match action {
                down::api::Action::Send { conn, reply, payload } => {
                    let conn = usize::try_from(conn.0).unwrap_or(usize::MAX);
                    let Some(reply) = self.plant_in_reply(conn, reply) else { continue };
                    self.deliver(conn, 1, Ev::ToUp { conn, reply, payload });
                }
                down::api::Action::Close { conn, .. } => {
                    let conn = usize::try_from(conn.0).unwrap_or(usize::MAX);
                    self.conns[conn].open_down = false;
                    if !self.conns[conn].zombie {
                        self.deliver(conn, 1, Ev::ClosedAtUp { conn });
                    }
                }
                down::api::Action::Disk(command) => {
                    if self.plan.bug == Some(Bug::LogAfterData)
                        && matches!(command.kind, DiskOp::ActivityLog { .. })
                    {
                        self.plant_late_log(index, incarnation, command);
                        continue;
                    }
                    let operation = Operation { op: command.kind, stage: Stage::Queued };
                    if let Some(process) = &mut self.downs[index].process {
                        process.operations.insert(command.op, operation);
                    }
                    self.schedule_disk(index, incarnation, command.op);
                }
                down::api::Action::Log(event) => {
                    self.note(|| format!("replica {index}: {event:?}"));
                }
                down::api::Action::Stopped => {}
            }
        }
        let deadline = self.downs[index].process.as_ref().and_then(|p| p.core.poll_deadline()).map(|t| t.0);
        if let Some(deadline) = deadline
            && self.downs[index].next_tick.is_none_or(|tick| deadline < tick)
        {
            self.downs[index].next_tick = Some(deadline);
            self.at(deadline, Ev::DownTick { down: index, incarnation });
        }
    }

    fn schedule_disk(&mut self, index: usize, incarnation: u64, op: OpId) {
        let range = self.plan.disk;
        let mut delay = self.between(range);
        if let Some((slow, factor)) = self.plan.slow
            && slow == index
            && !self.quiet
        {
            delay *= factor;
        }
        let time = (self.now + delay).max(self.downs[index].stuck_until);
        self.at(time, Ev::DiskStep { down: index, incarnation, op });
    }

    /// One step of a disk operation: plan, data, contexts; everything else is one step.
    fn disk_step(&mut self, index: usize, incarnation: u64, op: OpId) {
        let down = &mut self.downs[index];
        let Some(process) = down.process.as_mut().filter(|_| down.incarnation == incarnation) else { return };
        let Some(operation) = process.operations.remove(&op) else { return };
        let step = process.step(operation);
        if down.disk.is_dead() {
            self.note(|| format!("replica {index} dies in mid-operation"));
            self.kill_down(index);
            let delay = self.rng.random_range(MS..200 * MS);
            self.after(delay, Ev::StartDown { down: index });
            return;
        }
        match step {
            Ok(operation) => {
                if let Some(process) = &mut self.downs[index].process {
                    process.operations.insert(op, operation);
                }
                self.schedule_disk(index, incarnation, op);
            }
            Err(result) => {
                let done = DiskDone { op, result, times: StageTimes::default() };
                self.feed_down(index, incarnation, down::api::Event::DiskDone(done));
            }
        }
    }

    fn kill_down(&mut self, index: usize) {
        let Some(process) = self.downs[index].process.take() else { return };
        // What was handed to the kernel may still be carried out.
        for operation in process.operations.into_values() {
            if let Stage::Planned(change) = &operation.stage
                && self.rng.random_bool(0.5)
            {
                let data = operation.data();
                drop(process.region.write_pieces_now(change, &data));
            }
        }
        self.downs[index].incarnation += 1;
        self.downs[index].next_tick = None;
        self.downs[index]
            .deferred
            .retain(|event| !matches!(event, Ev::DownTick { .. } | Ev::DiskStep { .. }));
        for conn in 0..self.conns.len() {
            if self.conns[conn].down == index && self.conns[conn].open_down {
                self.conns[conn].open_down = false;
                self.deliver(conn, 1, Ev::ClosedAtUp { conn });
            }
        }
        if std::mem::take(&mut self.downs[index].paused) {
            self.downs[index].deferred.clear();
        }
    }

    fn resume_down(&mut self, index: usize) {
        self.downs[index].paused = false;
        for event in std::mem::take(&mut self.downs[index].deferred) {
            self.at(self.now, event);
        }
    }

    // Upstairs.

    fn start_up(&mut self, takeover: bool) {
        let alive = self.ups.iter().filter(|up| up.alive && !up.paused).count();
        if alive > 1 || (alive > 0 && !takeover) {
            return;
        }
        let number = self.ups.len();
        let config = CoreConfig {
            volume: VOLUME,
            upstairs: Uuid::from_u128(1000 + number as u128),
            takeover,
            blocks: None,
            limits: self.plan.limits.clone(),
            timing: self.plan.timing.clone(),
            heal: true,
            mistakes: Mistakes {
                ack_at_one: self.plan.bug == Some(Bug::AckAtOne),
                reads_not_held: self.plan.bug == Some(Bug::ReadsNotHeld),
            },
        };
        self.ups.push(Up {
            core: up::Core::new(config, up::api::Time(self.now)),
            alive: true,
            paused: false,
            deferred: Vec::new(),
            links: [None; 3],
            next_tick: None,
            served: false,
            generation: None,
        });
        self.note(|| format!("upstairs {number} starts{}", if takeover { " and takes over" } else { "" }));
        self.after(0, Ev::UpTick { up: number });
    }

    fn feed_up(&mut self, up: usize, event: up::api::Event) -> Result<(), String> {
        if self.ups[up].alive {
            self.ups[up].core.handle(up::api::Time(self.now), event);
            self.pump_up(up)?;
            if self.ups[up].core.poll_deadline().is_some_and(|deadline| deadline.0 <= self.now) {
                return Err(format!("upstairs {up} asks to be called at once, for ever"));
            }
        }
        Ok(())
    }

    fn pump_up(&mut self, index: usize) -> Result<(), String> {
        while let Some(action) = self.ups[index].core.poll_action() {
            match action {
                up::api::Action::Connect { replica, link } => self.connect(index, replica, link),
                up::api::Action::Disconnect { replica, .. } => {
                    if let Some(conn) = self.ups[index].links[replica.index()].take() {
                        self.conns[conn].open_up = false;
                        self.deliver(conn, 0, Ev::ClosedAtDown { conn });
                    }
                }
                up::api::Action::Send { replicas, request, payload } => {
                    for replica in replicas.iter() {
                        if let Some(conn) = self.ups[index].links[replica.index()] {
                            let event =
                                Ev::ToDown { conn, request: request.clone(), payload: payload.clone() };
                            self.deliver(conn, 0, event);
                        }
                    }
                }
                up::api::Action::GuestReply { guest, reply } => self.guest_reply(index, guest, &reply)?,
                up::api::Action::Log(event) => self.note(|| format!("upstairs {index}: {}", event.text)),
                up::api::Action::Stopped { reason } => self.up_stopped(index, &reason),
            }
        }
        if !self.ups[index].alive {
            return Ok(());
        }
        let generation = self.ups[index].core.serving_generation();
        if let Some(number) = generation
            && self.ups[index].generation != generation
        {
            self.ups[index].generation = generation;
            let first = !std::mem::replace(&mut self.ups[index].served, true);
            self.history.notes.push(Note::Served { at: self.now, generation: number.0, upstairs: index });
            if first {
                self.attach_guests(index)?;
            }
        }
        let deadline = self.ups[index].core.poll_deadline().map(|time| time.0);
        if let Some(deadline) = deadline
            && self.ups[index].next_tick.is_none_or(|tick| deadline < tick)
        {
            self.ups[index].next_tick = Some(deadline);
            self.at(deadline, Ev::UpTick { up: index });
        }
        Ok(())
    }

    fn up_stopped(&mut self, index: usize, reason: &StopReason) {
        self.note(|| format!("upstairs {index} stops: {reason:?}"));
        self.kill_up(index);
        let delay = self.rng.random_range(MS..100 * MS);
        self.after(delay, Ev::StartUp { takeover: false });
    }

    fn kill_up(&mut self, index: usize) {
        self.ups[index].alive = false;
        self.ups[index].paused = false;
        self.ups[index].deferred.clear();
        for replica in 0..3 {
            if let Some(conn) = self.ups[index].links[replica].take() {
                self.conns[conn].open_up = false;
                self.deliver(conn, 0, Ev::ClosedAtDown { conn });
            }
        }
        self.detach_guests(index);
    }

    fn resume_up(&mut self, index: usize) {
        if self.ups[index].alive {
            self.ups[index].paused = false;
            for event in std::mem::take(&mut self.ups[index].deferred) {
                self.at(self.now, event);
            }
        }
    }

    // Network.

    fn connect(&mut self, up: usize, replica: ReplicaId, link: LinkId) {
        let down = replica.index();
        let delay = self.between(self.plan.network);
        if self.downs[down].process.is_none() {
            self.after(delay, Ev::LinkRefused { up, replica: down, link });
            return;
        }
        let conn = self.conns.len();
        let incarnation = self.downs[down].incarnation;
        self.conns.push(Conn {
            generation: Generation(0),
            zombie: false,
            up,
            down,
            incarnation,
            link,
            open_up: true,
            open_down: true,
            earliest: [0; 2],
            partitioned: None,
        });
        self.ups[up].links[down] = Some(conn);
        self.after(delay, Ev::LinkUp { conn });
    }

    fn link_up(&mut self, conn: usize) -> Result<(), String> {
        let Conn { up, down, incarnation, link, open_up, open_down, .. } = self.conns[conn];
        if !open_up {
            return Ok(());
        }
        if !open_down || self.downs[down].incarnation != incarnation {
            self.deliver(conn, 1, Ev::ClosedAtUp { conn });
            return Ok(());
        }
        // A stopped process has connections that it hasn't accepted: the kernel does that part.
        let connected = down::api::Event::Connected { conn: ConnId(conn as u64) };
        if self.downs[down].paused {
            // It learns of the connection with the first message.
            self.conns[conn].earliest[0] = self.now;
        }
        self.feed_down(down, incarnation, connected);
        self.feed_up(up, up::api::Event::LinkUp { replica: id(down), link })
    }

    /// Sends over a connection: in order, some time later.
    fn deliver(&mut self, conn: usize, direction: usize, event: Ev) {
        let delay = self.between(self.plan.network);
        let time = (self.now + delay).max(self.conns[conn].earliest[direction]);
        if let Some(held) = &mut self.conns[conn].partitioned {
            held[direction].push(event);
            return;
        }
        self.conns[conn].earliest[direction] = time;
        self.at(time, event);
    }

    fn heal(&mut self, conn: usize) {
        if let Some(held) = self.conns[conn].partitioned.take() {
            for (direction, events) in held.into_iter().enumerate() {
                for event in events {
                    self.deliver(conn, direction, event);
                }
            }
        }
    }

    fn to_down(&mut self, conn: usize, request: WireRequest, payload: Bytes) {
        if let WireRequest::Job { job, op } = &request {
            let down = self.conns[conn].down;
            self.note(|| format!("to replica {down}: job {job} {}", brief_op(op)));
        }
        let Some(request) = self.plant_in_request(conn, request, &payload) else { return };
        let Conn { down, incarnation, open_down, .. } = self.conns[conn];
        if open_down {
            let event = down::api::Event::Message { conn: ConnId(conn as u64), request, payload };
            self.feed_down(down, incarnation, event);
        }
    }

    fn to_up(&mut self, conn: usize, reply: Reply, payload: Bytes) -> Result<(), String> {
        let Conn { up, down, link, open_up, .. } = self.conns[conn];
        if open_up {
            self.feed_up(up, up::api::Event::Reply { replica: id(down), link, reply, payload })?;
        }
        Ok(())
    }

    fn closed_at_up(&mut self, conn: usize) -> Result<(), String> {
        let Conn { up, down, link, open_up, .. } = self.conns[conn];
        if open_up {
            self.conns[conn].open_up = false;
            if self.ups[up].links[down] == Some(conn) {
                self.ups[up].links[down] = None;
            }
            let reason = "connection closed".to_owned();
            self.feed_up(up, up::api::Event::LinkDown { replica: id(down), link, reason })?;
        }
        Ok(())
    }

    fn closed_at_down(&mut self, conn: usize) {
        let Conn { down, incarnation, open_down, .. } = self.conns[conn];
        if open_down {
            self.conns[conn].open_down = false;
            self.feed_down(down, incarnation, down::api::Event::Closed { conn: ConnId(conn as u64) });
        }
    }

    // Guests.

    fn serving_up(&self) -> Option<usize> {
        (0..self.ups.len())
            .rev()
            .find(|&up| self.ups[up].alive && self.ups[up].served && !self.ups[up].paused)
    }

    fn think(&mut self, connection: usize) -> Result<(), String> {
        if self.quiet {
            return Ok(());
        }
        let request = Request::random(self.next_request, self.now, &mut self.rng);
        self.next_request += 1;
        self.issue(connection, request)
    }

    fn issue(&mut self, connection: usize, request: Request) -> Result<(), String> {
        request.note_start(&mut self.history);
        let up = self.serving_up();
        self.guests[connection].push((request.clone(), up));
        if let Some(up) = up {
            self.submit(up, &request)?;
        }
        Ok(())
    }

    fn submit(&mut self, up: usize, request: &Request) -> Result<(), String> {
        self.note(|| format!("guest to upstairs {up}: {request:?}"));
        self.feed_up(up, up::api::Event::Guest { guest: GuestId(request.number), op: request.op() })
    }

    fn guest_reply(&mut self, up: usize, guest: GuestId, reply: &up::api::GuestReply) -> Result<(), String> {
        for connection in 0..self.guests.len() {
            let found =
                self.guests[connection].iter().position(|(r, by)| r.number == guest.0 && *by == Some(up));
            let Some(index) = found else { continue };
            let request = self.guests[connection][index].0.clone();
            let answered = request.note_end(reply, self.now, self.plan.has_damage(), &mut self.history)?;
            self.note(|| format!("answer to guest: {} {}", guest.0, brief(reply)));
            match answered {
                Answered::Done => {
                    self.guests[connection].remove(index);
                    let think = self.plan.think;
                    let delay = self.rng.random_range(0..think);
                    self.after(delay, Ev::Think { connection });
                }
                Answered::Again => self.guests[connection][index].1 = None,
            }
            return Ok(());
        }
        Ok(())
    }

    /// The upstairs is gone: most clients wait and send again, some are gone too.
    fn detach_guests(&mut self, up: usize) {
        for connection in 0..self.guests.len() {
            let dies = self.rng.random_bool(0.2) && !self.quiet;
            let requests = std::mem::take(&mut self.guests[connection]);
            for (request, by) in requests {
                if by == Some(up) && dies {
                    self.note(|| format!("guest request {} is given up", request.number));
                    request.note_given_up(self.now, up, &mut self.history);
                    let delay = self.plan.think;
                    self.after(delay, Ev::Think { connection });
                } else {
                    let by = by.filter(|&by| by != up);
                    self.guests[connection].push((request, by));
                }
            }
        }
    }

    /// A new upstairs serves: what waits for an answer is sent (again).
    fn attach_guests(&mut self, up: usize) -> Result<(), String> {
        let mut todo = Vec::new();
        for requests in &mut self.guests {
            for (request, by) in requests.iter_mut().filter(|(_, by)| by.is_none()) {
                *by = Some(up);
                todo.push(request.clone());
            }
        }
        for request in todo {
            self.submit(up, &request)?;
        }
        Ok(())
    }

    // Faults.

    fn fault_delay(&mut self) -> Nanos {
        let mean = self.plan.fault_every;
        self.rng.random_range(mean / 4..mean * 2)
    }

    fn next_fault(&mut self) -> Result<(), String> {
        if self.quiet {
            return Ok(());
        }
        let total: u32 = self.plan.weights.iter().map(|(_, weight)| weight).sum();
        let mut chosen = self.rng.random_range(0..total);
        let mut fault = Fault::KillReplica;
        for &(candidate, weight) in &self.plan.weights {
            if chosen < weight {
                fault = candidate;
                break;
            }
            chosen -= weight;
        }
        self.note(|| format!("FAULT {fault:?}"));
        self.inject(fault)?;
        let delay = self.fault_delay();
        self.after(delay, Ev::Fault);
        Ok(())
    }

    fn inject(&mut self, fault: Fault) -> Result<(), String> {
        let down = self.rng.random_range(0..3_usize);
        let short = self.rng.random_range(MS..150 * MS);
        let long = self.rng.random_range(10 * MS..1_000 * MS);
        let pause = if self.rng.random_bool(0.7) { short } else { long };
        let takeover = self.rng.random_bool(0.5);
        match fault {
            Fault::KillReplica => self.restart_down(down, pause),
            Fault::KillAll => {
                for down in 0..3 {
                    let delay = self.rng.random_range(0..100 * MS);
                    self.restart_down(down, delay);
                }
            }
            Fault::PauseReplica => {
                if self.downs[down].process.is_some() && !self.downs[down].paused {
                    self.downs[down].paused = true;
                    self.after(long, Ev::ResumeDown { down });
                }
            }
            Fault::PowerCut => self.power_cut(down, pause),
            Fault::PowerCutAll => {
                for down in 0..3 {
                    let delay = self.rng.random_range(0..100 * MS);
                    self.power_cut(down, delay);
                }
            }
            Fault::DieMidway => {
                let calls = self.rng.random_range(0..40);
                self.downs[down].disk.die_after(calls);
            }
            Fault::CutLink => {
                if let Some(conn) = self.random_conn() {
                    self.conns[conn].open_down = false;
                    let incarnation = self.conns[conn].incarnation;
                    let event = down::api::Event::Closed { conn: ConnId(conn as u64) };
                    let down = self.conns[conn].down;
                    if !self.downs[down].paused {
                        self.feed_down(down, incarnation, event);
                    }
                    self.after(0, Ev::ClosedAtUp { conn });
                }
            }
            Fault::StallLink => {
                if let Some(conn) = self.random_conn() {
                    let until = self.now + long;
                    let direction = self.rng.random_range(0..2);
                    let earliest = &mut self.conns[conn].earliest[direction];
                    *earliest = (*earliest).max(until);
                }
            }
            Fault::Partition => {
                if let Some(conn) = self.random_conn()
                    && self.conns[conn].partitioned.is_none()
                {
                    self.conns[conn].partitioned = Some([Vec::new(), Vec::new()]);
                    self.after(long, Ev::Heal { conn });
                }
            }
            Fault::KillUpstairs => {
                let alive: Vec<usize> = (0..self.ups.len()).filter(|&up| self.ups[up].alive).collect();
                if !alive.is_empty() {
                    let up = alive[self.rng.random_range(0..alive.len())];
                    self.note(|| format!("upstairs {up} is killed"));
                    self.kill_up(up);
                    self.after(short, Ev::StartUp { takeover: false });
                }
            }
            Fault::PauseUpstairs => {
                if let Some(up) = self.serving_up() {
                    self.ups[up].paused = true;
                    self.after(long * 2, Ev::ResumeUp { up });
                    self.after(short, Ev::StartUp { takeover });
                }
            }
            Fault::Takeover => self.start_up(true),
            Fault::StopUpstairs => {
                if let Some(up) = self.serving_up() {
                    let within = Duration::from_millis(200);
                    self.feed_up(up, up::api::Event::Shutdown { within })?;
                }
            }
            Fault::DiskStuck => self.downs[down].stuck_until = self.now + long,
            Fault::SyncFails => self.downs[down].disk.fail_next_sync(),
            Fault::DiskFull => {
                self.downs[down].disk.set_full(true);
                self.after(long, Ev::DiskFree { down });
            }
            Fault::BitFlip | Fault::ReadError => self.damage(fault),
        }
        Ok(())
    }

    fn restart_down(&mut self, down: usize, delay: Nanos) {
        if self.downs[down].process.is_some() {
            self.note(|| format!("replica {down} is killed"));
            self.kill_down(down);
            self.after(delay, Ev::StartDown { down });
        }
    }

    fn power_cut(&mut self, down: usize, delay: Nanos) {
        if self.downs[down].process.is_some() {
            self.note(|| format!("replica {down} loses power"));
            self.kill_down(down);
            self.downs[down].boot += 1;
            self.downs[down].disk.power_cut(&mut self.rng);
            self.history.notes.push(Note::PowerCut { at: self.now, replica: down });
            self.after(delay, Ev::StartDown { down });
        }
    }

    /// Only one replica is ever damaged in a run: with two there may be no good copy.
    fn damage(&mut self, fault: Fault) {
        let down =
            (0..3).find(|&down| self.downs[down].damaged).unwrap_or_else(|| self.rng.random_range(0..3));
        let blocks: Vec<u64> = guest::blocks().collect();
        let block = blocks[self.rng.random_range(0..blocks.len())];
        let offset = disk::layout(self.plan.blocks).block_offset(block);
        self.downs[down].damaged = true;
        if fault == Fault::BitFlip {
            self.downs[down].disk.flip_bit(offset, &mut self.rng);
        } else {
            self.downs[down].disk.make_unreadable(offset);
        }
        self.note(|| format!("replica {down}: block {block} is damaged"));
    }

    fn random_conn(&mut self) -> Option<usize> {
        let up = self.serving_up()?;
        let links: Vec<usize> = self.ups[up].links.iter().flatten().copied().collect();
        (!links.is_empty()).then(|| links[self.rng.random_range(0..links.len())])
    }

    // The end.

    fn end_faults(&mut self) {
        self.note(|| "no more faults".into());
        self.quiet = true;
        for conn in 0..self.conns.len() {
            self.heal(conn);
        }
        for down in 0..3 {
            self.downs[down].disk.calm();
            self.downs[down].stuck_until = 0;
            if self.downs[down].paused {
                self.resume_down(down);
            }
            // Out of service for good means until a restart.
            let failed = self.downs[down]
                .process
                .as_ref()
                .is_some_and(|process| matches!(process.core.status().state, down::State::Failed { .. }));
            if failed {
                self.kill_down(down);
            }
            self.start_down(down);
        }
        for up in 0..self.ups.len() {
            self.resume_up(up);
        }
        self.after(200 * MS, Ev::StartUp { takeover: false });
    }

    /// Everything answered and all three replicas Active.
    fn is_quiet(&mut self) -> bool {
        for down in 0..3 {
            let failed = self.downs[down]
                .process
                .as_ref()
                .is_some_and(|process| matches!(process.core.status().state, down::State::Failed { .. }));
            if failed {
                self.restart_down(down, 10 * MS);
            }
        }
        if self.guests.iter().any(|requests| !requests.is_empty()) {
            return false;
        }
        self.serving_up().is_some_and(|up| {
            let status = self.ups[up].core.status();
            status.replicas.iter().all(|replica| replica.state == "active") && status.jobs_in_flight == 0
        })
    }

    fn state(&self) -> String {
        let up = self.serving_up().map(|up| format!("{:?}", self.ups[up].core.status()));
        let waiting: Vec<u64> = self.guests.iter().flatten().map(|(request, _)| request.number).collect();
        format!("requests {waiting:?}, {}", up.unwrap_or_else(|| "no upstairs serves".into()))
    }

    /// Reads every hot block, twice: the first time heals what is damaged.
    fn read_everything(&mut self) -> Result<(), String> {
        for _ in 0..2 {
            for block in guest::blocks() {
                let request = Request::read_block(self.next_request, block, self.now);
                self.next_request += 1;
                self.issue(0, request)?;
                let deadline = self.now + 10_000 * MS;
                while !self.is_quiet() {
                    self.run_until(self.now + MS)?;
                    if self.now > deadline {
                        return Err(format!("the last reads are not answered: {}", self.state()));
                    }
                }
            }
            self.run_until(self.now + 200 * MS)?;
        }
        Ok(())
    }

    /// All replicas hold the same data under the same versions.
    fn compare_replicas(&mut self) -> Result<(), String> {
        let layout = disk::layout(self.plan.blocks);
        for block in guest::blocks() {
            let range = BlockRange::single(block);
            let mut copies = Vec::new();
            for down in &self.downs {
                let Some(process) = &down.process else { return Err("a replica is not running".into()) };
                let read = process.region.execute(&DiskOp::Read { range, mode: ReadMode::Data });
                let Ok(DiskOutcome::Read { states, .. }) = read else {
                    return Err(format!("block {block}: {read:?}"));
                };
                let has_data = states.first().is_some_and(newel_protocol::BlockState::has_data);
                let data =
                    if has_data { down.disk.peek(layout.block_offset(block)) } else { vec![0; BLOCK_BYTES] };
                copies.push((states, data));
            }
            if copies.iter().any(|copy| *copy != copies[0]) {
                let states: Vec<_> = copies.iter().map(|(states, data)| (states, &data[..4])).collect();
                return Err(format!("block {block} differs at the end: {states:?}"));
            }
        }
        Ok(())
    }
}

/// Planted mistakes. They are made here, between the parts of the product, wherever that is possible.
impl World {
    fn plant_in_reply(&mut self, conn: usize, reply: Reply) -> Option<Reply> {
        match (self.plan.bug, reply) {
            (Some(Bug::IgnoreLastActive), Reply::Promoted { generation, digest, .. }) => {
                Some(Reply::Promoted { generation, last_active: Generation(1), digest })
            }
            (Some(Bug::IgnoreLastActive), Reply::Welcome(mut welcome)) => {
                welcome.last_active = Generation(1);
                Some(Reply::Welcome(welcome))
            }
            (Some(Bug::StaleSessionNotFenced), Reply::Refused(Refusal::Fenced { .. })) => {
                self.conns[conn].zombie = true;
                None
            }
            (_, reply) => Some(reply),
        }
    }

    fn plant_in_request(
        &mut self,
        conn: usize,
        request: WireRequest,
        payload: &Bytes,
    ) -> Option<WireRequest> {
        if let WireRequest::Promote { generation } = request {
            self.conns[conn].generation = generation;
        }
        let served = self.ups[self.conns[conn].up].served;
        match (self.plan.bug, request) {
            (Some(Bug::CopyOver), WireRequest::Job { job, op: Op::Store { blocks, .. } }) => {
                Some(WireRequest::Job { job, op: Op::Store { blocks, join: Version::MAX } })
            }
            (Some(Bug::JoinerCountsEarly), request @ WireRequest::Activated { .. }) if served => {
                self.plant_late_activated(conn, request);
                None
            }
            (Some(Bug::ServedEarly), request @ WireRequest::Activated { .. }) if !served => {
                self.plant_late_activated(conn, request);
                None
            }
            (Some(Bug::StaleSessionNotFenced), WireRequest::Job { job, op }) if self.conns[conn].zombie => {
                self.zombie_job(conn, job, &op, payload);
                None
            }
            (_, request) => Some(request),
        }
    }

    /// Says that it is stored, and stores it some time later, if the replica lives that long.
    fn plant_late_activated(&mut self, conn: usize, request: WireRequest) {
        let Conn { down, incarnation, open_down, .. } = self.conns[conn];
        if let WireRequest::Activated { generation, .. } = request
            && open_down
        {
            self.deliver(
                conn,
                1,
                Ev::ToUp { conn, reply: Reply::ActivatedStored { generation }, payload: Bytes::new() },
            );
            self.after(200 * MS, Ev::Late { down, incarnation, what: Late::Activated { conn, request } });
        }
    }

    fn plant_late_log(&mut self, index: usize, incarnation: u64, command: DiskCommand) {
        self.after(100 * MS, Ev::Late { down: index, incarnation, what: Late::Log(command.kind) });
        let done = DiskDone { op: command.op, result: Ok(DiskOutcome::Done), times: StageTimes::default() };
        self.feed_down(index, incarnation, down::api::Event::DiskDone(done));
    }

    fn late(&mut self, index: usize, incarnation: u64, what: Late) {
        if self.downs[index].incarnation != incarnation {
            return;
        }
        match what {
            Late::Log(op) => {
                if let Some(process) = &self.downs[index].process {
                    drop(process.region.execute(&op));
                }
            }
            Late::Activated { conn, request } => {
                if self.conns[conn].open_down {
                    let (conn, payload) = (ConnId(conn as u64), Bytes::new());
                    self.feed_down(index, incarnation, down::api::Event::Message { conn, request, payload });
                }
            }
        }
    }

    /// A job of a session that should be over is carried out under its old generation.
    fn zombie_job(&mut self, conn: usize, job: JobId, op: &Op, payload: &Bytes) {
        let Conn { down, incarnation, generation, .. } = self.conns[conn];
        let Some(process) =
            self.downs[down].process.as_ref().filter(|_| self.downs[down].incarnation == incarnation)
        else {
            return;
        };
        let version = Version::new(generation, job.0);
        let op = match op.clone() {
            Op::Read { range, mode } => DiskOp::Read { range, mode },
            Op::Write { range, crcs } => DiskOp::Write { range, version, crcs, data: payload.clone() },
            Op::Zero { range, mode } => DiskOp::Zero { range, version, mode },
            Op::Flush => DiskOp::Flush { mark: None },
            Op::Store { blocks, join } => DiskOp::Store { blocks, join, data: payload.clone() },
        };
        let (states, payload) = match process.region.execute(&op) {
            Ok(DiskOutcome::Read { states, data }) => (states, data),
            Ok(_) | Err(_) => (Vec::new(), Bytes::new()),
        };
        let reply = Reply::Done { job, result: Ok(()), times: StageTimes::default(), states };
        self.deliver(conn, 1, Ev::ToUp { conn, reply, payload });
    }
}

impl Operation {
    fn data(&self) -> Bytes {
        match &self.op {
            DiskOp::Write { data, .. } | DiskOp::Store { data, .. } => data.clone(),
            DiskOp::Zero { range, mode: ZeroMode::Allocate, .. } => vec![0; range.bytes()].into(),
            _ => Bytes::new(),
        }
    }
}

impl DownProcess {
    /// The next step of an operation, or its result.
    fn step(&mut self, operation: Operation) -> Result<Operation, Result<DiskOutcome, down::api::DiskError>> {
        let region = &self.region;
        let data = operation.data();
        let Operation { op, stage } = operation;
        match stage {
            Stage::Queued => {
                let planned = match &op {
                    DiskOp::Write { range, version, crcs, data } => {
                        region.plan_write(*range, *version, crcs, data.len())
                    }
                    DiskOp::Zero { range, version, mode } => region.plan_zero(*range, *version, *mode),
                    DiskOp::Store { blocks, join, data } => region.plan_store(blocks, *join, data.len()),
                    _ => return Err(region.execute(&op)),
                };
                match planned {
                    Ok(change) => Ok(Operation { op, stage: Stage::Planned(change) }),
                    Err(error) => Err(Err(error)),
                }
            }
            Stage::Planned(change) => match region.write_pieces_now(&change, &data) {
                Ok(()) => Ok(Operation { op, stage: Stage::Written(change) }),
                Err(error) => Err(region.abort(&change).and(Err(error))),
            },
            Stage::Written(change) => Err(region.finish(&[&change]).map(|()| DiskOutcome::Done)),
        }
    }
}

fn id(index: usize) -> ReplicaId {
    ReplicaId::ALL[index]
}

fn brief_op(op: &Op) -> String {
    match op {
        Op::Write { range, .. } => format!("write {range}"),
        Op::Store { blocks, join } => {
            let blocks: Vec<_> = blocks.iter().map(|b| format!("{}={}", b.block, b.state.version)).collect();
            format!("store {} (join {join})", blocks.join(" "))
        }
        other => format!("{other:?}"),
    }
}

fn brief(reply: &up::api::GuestReply) -> String {
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
