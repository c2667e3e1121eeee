//! A small model of queues around the throttle: three replicas that serve reads at a rate, with latency and jitter, and a guest that
//! keeps a number of reads under way. Time is simulated; every run is exact.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use newel_protocol::JobId;

use super::api::{ReplicaId, ReplicaSet, Time};
use super::config::ThrottleConfig;
use super::replica::Smoothed;
use super::throttle::{Sample, Throttle};

pub(super) const US: u64 = 1_000;
pub(super) const MS: u64 = 1_000_000;
pub(super) const SECOND: u64 = 1_000_000_000;

/// How a replica serves reads.
#[derive(Clone, Debug)]
pub(super) struct Server {
    /// What every read takes, and each of its bytes, of a server's time.
    pub(super) op_ns: u64,
    pub(super) ns_per_kib: u64,
    /// Reads served at a time.
    pub(super) parallel: usize,
    /// On top, without taking anybody's time: from and to.
    pub(super) late: (u64, u64),
    /// Takes any of the waiting reads instead of the oldest.
    pub(super) unordered: bool,
    /// Serves nothing between these, in order.
    pub(super) stopped: Vec<(u64, u64)>,
}

impl Server {
    /// One read at a time, in order, at this rate.
    pub(super) fn at(bytes_per_second: u64) -> Self {
        let ns_per_kib = SECOND * 1024 / bytes_per_second;
        Self { op_ns: 20 * US, ns_per_kib, parallel: 1, late: (0, 0), unordered: false, stopped: Vec::new() }
    }

    pub(super) fn one_at_a_time(op_ns: u64) -> Self {
        Self { op_ns, ns_per_kib: 0, ..Self::at(SECOND) }
    }

    pub(super) fn late(self, from: u64, to: u64) -> Self {
        Self { late: (from, to), ..self }
    }

    /// Held up by its host, for 5 to 50 ms each time and a twentieth of the time; the same seed does so at the same times.
    pub(super) fn on_a_busy_host(mut self, seed: u64, until: u64) -> Self {
        let mut random = Random(seed);
        let mut now = 0;
        while now < until {
            let from = now + random.below(1100 * MS);
            now = from + 5 * MS + random.below(45 * MS);
            self.stopped.push((from, now));
        }
        self
    }

    /// When it is done with this much work that it begins now.
    fn end(&self, now: u64, mut work: u64) -> u64 {
        let mut at = now;
        for &(from, to) in &self.stopped {
            if at + work <= from {
                break;
            }
            if at < to {
                work -= from.saturating_sub(at);
                at = to;
            }
        }
        at + work
    }

    fn service(&self, bytes: usize) -> u64 {
        self.op_ns + self.ns_per_kib * bytes as u64 / 1024
    }

    /// Bytes per second that it can serve in reads of this size.
    pub(super) fn rate(&self, bytes: usize) -> f64 {
        bytes as f64 * self.parallel as f64 * 1e9 / self.service(bytes) as f64
    }
}

#[derive(Debug)]
struct Random(u64);

impl Random {
    /// A number below `bound`, or 0.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.checked_rem(bound).unwrap_or(0)
    }
}

#[derive(Debug)]
struct Replica {
    server: Server,
    waiting: VecDeque<JobId>,
    at_work: usize,
    away: bool,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Ev {
    Served(usize, JobId),
    Reply(usize, JobId),
    Tick,
    /// The guest begins this many reads beside those it keeps under way.
    Burst(usize),
    Look,
    Change(usize),
    Away(usize, bool),
}

#[derive(Debug)]
struct Read {
    bytes: usize,
    begun: u64,
    sent: [Option<u64>; 3],
    replied: [Option<u64>; 3],
    answered: Option<u64>,
    keeps_depth: bool,
}

/// What is seen once a millisecond.
#[derive(Clone, Debug)]
pub(super) struct Look {
    pub(super) at: u64,
    /// Reads at each replica in time that it needs for them, in ms.
    pub(super) queue_ms: [f64; 3],
    pub(super) delay_ms: f64,
    pub(super) gated: usize,
    pub(super) answered_bytes: u64,
    /// Of the fastest over the slowest, from actual replies, smoothed over the last 64.
    pub(super) lead_ms: f64,
}

pub(super) struct Model {
    now: u64,
    order: u64,
    queue: BinaryHeap<Reverse<(u64, u64, Ev)>>,
    random: Random,
    next_tick: Option<u64>,
    throttle: Throttle,
    replicas: Vec<Replica>,
    reads: BTreeMap<JobId, Read>,
    next: u64,
    depth: usize,
    sizes: Vec<usize>,
    open: usize,
    answered_bytes: u64,
    leads: [Smoothed; 3],
    /// When each read was answered and how long it took.
    pub(super) answers: Vec<(u64, u64)>,
    looks: Vec<Look>,
    changes: Vec<(usize, Server)>,
    /// Reads before this one were sent over a connection that broke.
    epoch: [u64; 3],
    /// The bound of the volume: reads at one replica.
    pub(super) bound: usize,
    pub(super) over_bound: bool,
}

impl Model {
    pub(super) fn new(servers: [Server; 3], depth: usize, sizes: &[usize]) -> Self {
        let config = ThrottleConfig::default();
        Self {
            now: 0,
            order: 0,
            queue: BinaryHeap::new(),
            random: Random(7),
            next_tick: None,
            throttle: Throttle::new(config, 0),
            replicas: servers
                .map(|server| Replica { server, waiting: VecDeque::new(), at_work: 0, away: false })
                .into(),
            reads: BTreeMap::new(),
            next: 1,
            depth,
            sizes: sizes.into(),
            open: 0,
            answered_bytes: 0,
            leads: Default::default(),
            answers: Vec::new(),
            looks: Vec::new(),
            changes: Vec::new(),
            epoch: [0; 3],
            bound: 16_384,
            over_bound: false,
        }
    }

    pub(super) fn without_throttle(mut self) -> Self {
        self.throttle = Throttle::new(ThrottleConfig { enabled: false, ..ThrottleConfig::default() }, 0);
        self
    }

    pub(super) fn change(&mut self, at: u64, replica: usize, server: Server) {
        self.changes.push((replica, server));
        self.at(at, Ev::Change(self.changes.len() - 1));
    }

    pub(super) fn at(&mut self, time: u64, event: Ev) {
        self.order += 1;
        self.queue.push(Reverse((time, self.order, event)));
    }

    fn active(&self) -> ReplicaSet {
        ReplicaId::ALL.into_iter().filter(|id| !self.replicas[id.index()].away).collect()
    }

    pub(super) fn run(mut self, until: u64) -> Vec<Look> {
        self.run_to(until);
        self.looks
    }

    pub(super) fn run_to(&mut self, until: u64) {
        self.fill();
        self.at(self.now, Ev::Look);
        while let Some(Reverse((time, _, event))) = self.queue.pop() {
            if time > until || self.over_bound {
                break;
            }
            self.now = time;
            self.event(event);
            self.pump();
        }
    }

    fn event(&mut self, event: Ev) {
        match event {
            Ev::Served(replica, job) => {
                self.replicas[replica].at_work -= 1;
                let (from, to) = self.replicas[replica].server.late;
                let late = from + self.random.below(to - from);
                self.at(self.now + late, Ev::Reply(replica, job));
                self.work(replica);
            }
            Ev::Reply(replica, job) if job.0 >= self.epoch[replica] => self.reply(replica, job),
            Ev::Reply(..) => {}
            Ev::Away(replica, away) => self.set_away(replica, away),
            Ev::Tick => {}
            Ev::Burst(count) => (0..count).for_each(|_| self.begin(false)),
            Ev::Look => {
                self.look();
                self.at(self.now + MS, Ev::Look);
            }
            Ev::Change(index) => {
                let (replica, server) = self.changes[index].clone();
                self.replicas[replica].server = server;
                self.work(replica);
            }
        }
    }

    /// The connection of a replica breaks, or it is back and has everything.
    fn set_away(&mut self, index: usize, away: bool) {
        self.replicas[index].away = away;
        self.throttle.clear(away.then_some(ReplicaId::ALL[index]));
        if away {
            self.replicas[index].waiting.clear();
            self.epoch[index] = self.next;
        }
        let active = self.active();
        let done: Vec<JobId> = self
            .reads
            .iter()
            .filter(|(_, read)| {
                read.answered.is_some() && active.iter().all(|id| read.replied[id.index()].is_some())
            })
            .map(|(&job, _)| job)
            .collect();
        self.reads.retain(|job, _| !done.contains(job));
    }

    fn fill(&mut self) {
        while self.open < self.depth {
            self.open += 1;
            self.begin(true);
        }
    }

    fn begin(&mut self, keeps_depth: bool) {
        let bytes = self.sizes[usize::try_from(self.next).unwrap() % self.sizes.len()];
        let job = JobId(self.next);
        self.next += 1;
        let read =
            Read { bytes, begun: self.now, sent: [None; 3], replied: [None; 3], answered: None, keeps_depth };
        self.reads.insert(job, read);
        self.throttle.offer(Time(self.now), job, bytes, self.active());
    }

    fn pump(&mut self) {
        let mut polls = 0;
        while let Some((job, replicas)) = self.throttle.poll(Time(self.now)) {
            polls += 1;
            assert!(polls < 1_000_000, "it gives out the same for ever");
            for replica in replicas.and(self.active()).iter() {
                self.send(replica, job);
            }
        }
        if let Some(deadline) = self.throttle.deadline(Time(self.now)) {
            assert!(deadline.0 > self.now, "what is due was given out");
            if self.next_tick.is_none_or(|tick| tick <= self.now || deadline.0 < tick) {
                self.next_tick = Some(deadline.0);
                self.at(deadline.0, Ev::Tick);
            }
        }
    }

    fn send(&mut self, id: ReplicaId, job: JobId) {
        let now = self.now;
        let Some(read) = self.reads.get_mut(&job) else { return };
        assert!(read.sent[id.index()].replace(now).is_none(), "{job} was sent twice to {id}");
        self.throttle.sent(Time(now), id, read.bytes);
        let replica = &mut self.replicas[id.index()];
        replica.waiting.push_back(job);
        self.over_bound |= replica.waiting.len() > self.bound;
        self.work(id.index());
    }

    fn work(&mut self, index: usize) {
        let now = self.now;
        loop {
            let replica = &mut self.replicas[index];
            if replica.at_work >= replica.server.parallel || replica.waiting.is_empty() {
                return;
            }
            let (unordered, waiting) = (replica.server.unordered, replica.waiting.len());
            let pick =
                if unordered { usize::try_from(self.random.below(waiting as u64)).unwrap() } else { 0 };
            let replica = &mut self.replicas[index];
            let Some(job) = replica.waiting.remove(pick) else { return };
            replica.at_work += 1;
            let bytes = self.reads[&job].bytes;
            let server = &self.replicas[index].server;
            let served = server.end(now, server.service(bytes));
            self.at(served, Ev::Served(index, job));
        }
    }

    fn reply(&mut self, index: usize, job: JobId) {
        let now = self.now;
        let id = ReplicaId::ALL[index];
        let read = self.reads.get_mut(&job).expect("every read that was sent is known");
        read.replied[index] = Some(now);
        let (bytes, sent) = (read.bytes, Time(read.sent[index].expect("it was sent")));
        self.throttle.replied(Time(now), sent, id, bytes);
        let first = read.answered.is_none();
        let keeps_depth = read.keeps_depth;
        if first {
            read.answered = Some(now);
            self.answers.push((now, now - read.begun));
            self.answered_bytes += bytes as u64;
            let late = self.throttle.take(job);
            for replica in late.and(self.active()).iter() {
                self.send(replica, job);
            }
        }
        let active = self.active();
        let read = &self.reads[&job];
        if active.iter().all(|id| read.replied[id.index()].is_some()) {
            self.all_answered(job, active);
        }
        if first && keeps_depth {
            self.open -= 1;
            self.fill();
        }
    }

    fn all_answered(&mut self, job: JobId, active: ReplicaSet) {
        let read = self.reads.remove(&job).expect("it is known");
        let replied = |id: ReplicaId| read.replied[id.index()].unwrap();
        let slowest = active.iter().map(replied).max().unwrap();
        for id in active.iter() {
            let lead = Duration::from_nanos(slowest - replied(id));
            self.leads[id.index()].record(Time(self.now), lead);
        }
        let samples = active.iter().map(|id| Sample {
            replica: id,
            sent: Time(read.sent[id.index()].unwrap()),
            replied: Time(replied(id)),
        });
        self.throttle.sample(Time(self.now), samples.collect::<Vec<_>>());
    }

    fn look(&mut self) {
        let mut cost = [0.0; 3];
        for read in self.reads.values() {
            for (index, cost) in cost.iter_mut().enumerate() {
                if read.sent[index].is_some() && read.replied[index].is_none() {
                    let server = &self.replicas[index].server;
                    *cost += server.service(read.bytes) as f64 / server.parallel as f64 / 1e6;
                }
            }
        }
        let delay = ReplicaId::ALL.map(|id| self.throttle.delay(Time(self.now), id).as_secs_f64() * 1e3);
        self.looks.push(Look {
            at: self.now,
            queue_ms: cost,
            delay_ms: delay.into_iter().fold(0.0, f64::max),
            gated: self.throttle.gated(),
            answered_bytes: self.answered_bytes,
            lead_ms: self.leads.iter().filter_map(Smoothed::get).max().unwrap_or_default().as_secs_f64()
                * 1e3,
        });
    }
}
