//! The throttle against a small model of queues: three replicas that serve reads at a rate, with latency and jitter, and a guest that
//! keeps a number of reads under way. Time is simulated; every run is exact.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use newel_protocol::JobId;

use super::api::{ReplicaId, ReplicaSet, Time};
use super::config::ThrottleConfig;
use super::throttle::{Sample, Throttle};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// How a replica serves reads.
#[derive(Clone, Debug)]
struct Server {
    /// What every read takes, and each of its bytes, of a server's time.
    op_ns: u64,
    ns_per_kib: u64,
    /// Reads served at a time.
    parallel: usize,
    /// On top, without taking anybody's time: from and to.
    late: (u64, u64),
    /// Takes any of the waiting reads instead of the oldest.
    unordered: bool,
    /// Serves nothing between these.
    stopped: (u64, u64),
}

impl Server {
    /// One read at a time, in order, at this rate.
    fn at(bytes_per_second: u64) -> Self {
        let ns_per_kib = SECOND * 1024 / bytes_per_second;
        Self { op_ns: 20 * US, ns_per_kib, parallel: 1, late: (0, 0), unordered: false, stopped: (0, 0) }
    }

    fn one_at_a_time(op_ns: u64) -> Self {
        Self { op_ns, ns_per_kib: 0, ..Self::at(SECOND) }
    }

    fn late(self, from: u64, to: u64) -> Self {
        Self { late: (from, to), ..self }
    }

    fn service(&self, bytes: usize) -> u64 {
        self.op_ns + self.ns_per_kib * bytes as u64 / 1024
    }

    /// Bytes per second that it can serve in reads of this size.
    fn rate(&self, bytes: usize) -> f64 {
        bytes as f64 * self.parallel as f64 * 1e9 / self.service(bytes) as f64
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
enum Ev {
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
struct Look {
    at: u64,
    /// Reads at each replica in time that it needs for them, in ms.
    queue_ms: [f64; 3],
    delay_ms: f64,
    gated: usize,
    answered_bytes: u64,
    /// Of the fastest over the slowest, from actual replies, smoothed over the last 64.
    lead_ms: f64,
}

struct Model {
    now: u64,
    order: u64,
    queue: BinaryHeap<Reverse<(u64, u64, Ev)>>,
    random: u64,
    next_tick: Option<u64>,
    throttle: Throttle,
    replicas: Vec<Replica>,
    reads: BTreeMap<JobId, Read>,
    next: u64,
    depth: usize,
    sizes: Vec<usize>,
    open: usize,
    answered_bytes: u64,
    leads: [f64; 3],
    /// When each read was answered and how long it took.
    answers: Vec<(u64, u64)>,
    looks: Vec<Look>,
    changes: Vec<(usize, Server)>,
    /// Reads before this one were sent over a connection that broke.
    epoch: [u64; 3],
    /// The bound of the volume: reads at one replica.
    bound: usize,
    over_bound: bool,
}

impl Model {
    fn new(servers: [Server; 3], depth: usize, sizes: &[usize]) -> Self {
        let config = ThrottleConfig::default();
        Self {
            now: 0,
            order: 0,
            queue: BinaryHeap::new(),
            random: 7,
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
            leads: [0.0; 3],
            answers: Vec::new(),
            looks: Vec::new(),
            changes: Vec::new(),
            epoch: [0; 3],
            bound: 16_384,
            over_bound: false,
        }
    }

    fn without_throttle(mut self) -> Self {
        self.throttle = Throttle::new(ThrottleConfig { enabled: false, ..ThrottleConfig::default() }, 0);
        self
    }

    fn change(&mut self, at: u64, replica: usize, server: Server) {
        self.changes.push((replica, server));
        self.at(at, Ev::Change(self.changes.len() - 1));
    }

    fn at(&mut self, time: u64, event: Ev) {
        self.order += 1;
        self.queue.push(Reverse((time, self.order, event)));
    }

    /// A number below `bound`, or 0.
    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.checked_rem(bound).unwrap_or(0)
    }

    fn active(&self) -> ReplicaSet {
        ReplicaId::ALL.into_iter().filter(|id| !self.replicas[id.index()].away).collect()
    }

    fn run(mut self, until: u64) -> Vec<Look> {
        self.run_to(until);
        self.looks
    }

    fn run_to(&mut self, until: u64) {
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
                let late = from + self.below(to - from);
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
        self.throttle.offer(Time(self.now), job, self.active());
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
            let (from, to) = replica.server.stopped;
            if replica.at_work >= replica.server.parallel || replica.waiting.is_empty() {
                return;
            }
            let (unordered, waiting) = (replica.server.unordered, replica.waiting.len());
            let pick = if unordered { usize::try_from(self.below(waiting as u64)).unwrap() } else { 0 };
            let replica = &mut self.replicas[index];
            let Some(job) = replica.waiting.remove(pick) else { return };
            replica.at_work += 1;
            let bytes = self.reads[&job].bytes;
            let start = if (from..to).contains(&now) { to } else { now };
            let served = start + self.replicas[index].server.service(bytes);
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
            let lead = (slowest - replied(id)) as f64 / 1e6;
            let smooth = &mut self.leads[id.index()];
            *smooth += (lead - *smooth) / 64.0;
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
            lead_ms: self.leads.into_iter().fold(0.0, f64::max),
        });
    }
}

fn bytes_per_second(looks: &[Look], from: u64, to: u64) -> f64 {
    let at = |time: u64| looks.iter().find(|look| look.at >= time).unwrap().answered_bytes;
    (at(to) - at(from)) as f64 * 1e9 / (to - from) as f64
}

fn between(looks: &[Look], from: u64, to: u64) -> impl Iterator<Item = &Look> {
    looks.iter().filter(move |look| (from..to).contains(&look.at))
}

fn held(look: &Look) -> bool {
    look.delay_ms > 0.0 || look.gated > 0
}

const SLOW: usize = 2;

/// A replica at half the rate: bounded queue, bounded lead, and the guest reads at its rate. Without the throttle the queue
/// reaches the hard bound.
#[track_caller]
fn check_half_rate(name: &str, fast: &Server, slow: &Server, depth: usize, size: usize) {
    let servers = || [fast.clone(), fast.clone(), slow.clone()];
    let looks = Model::new(servers(), depth, &[size]).run(60 * SECOND + MS);
    let settled = || between(&looks, SECOND, 60 * SECOND);
    let most = settled().map(|look| look.queue_ms[SLOW]).fold(0.0, f64::max);
    let (low, high) = settled()
        .fold((f64::MAX, 0.0_f64), |(low, high), look| (low.min(look.lead_ms), high.max(look.lead_ms)));
    let rate = bytes_per_second(&looks, SECOND, 60 * SECOND) / slow.rate(size);
    eprintln!("{name}: queue {most:.1} ms, lead {low:.1} to {high:.1} ms, rate {:.1}%", rate * 100.0);
    assert!(most < 30.0, "{name}: a queue of {most:.1} ms");
    assert!(low >= 10.0 && high < 25.0, "{name}: lead {low:.1} to {high:.1} ms");
    assert!(rate >= 0.97, "{name}: {:.1}% of the slow replica's rate", rate * 100.0);

    let mut control = Model::new(servers(), depth, &[size]).without_throttle();
    control.bound = 2_000;
    control.run_to(600 * SECOND);
    assert!(control.over_bound, "{name}: without a throttle the queue grows");
}

#[test]
fn a_replica_at_half_the_rate_sets_the_pace() {
    let (fast, slow) = (Server::at(2 << 30), Server::at(1 << 30));
    check_half_rate("4K", &Server::at(400 << 20), &Server::at(200 << 20), 32, 4 << 10);
    check_half_rate("4K, a tenth", &Server::at(200 << 20), &Server::at(20 << 20), 32, 4 << 10);
    check_half_rate("1M", &fast, &slow, 8, 1 << 20);
    check_half_rate("1M deep", &fast, &slow, 64, 1 << 20);
    check_half_rate("4M", &fast, &slow, 25, 4 << 20);
    check_half_rate(
        "5 ms each",
        &Server::one_at_a_time(2_500 * US),
        &Server::one_at_a_time(5 * MS),
        32,
        4 << 10,
    );
    check_half_rate(
        "5 ms each, 1M",
        &Server::one_at_a_time(2_500 * US),
        &Server::one_at_a_time(5 * MS),
        8,
        1 << 20,
    );
}

/// Equal replicas, however late and in whatever order they answer: nothing is held, and nothing is lost.
#[track_caller]
fn check_untouched(name: &str, servers: [Server; 3], depth: usize, sizes: &[usize]) {
    let with = Model::new(servers.clone(), depth, sizes).run(6 * SECOND + MS);
    let without = Model::new(servers, depth, sizes).without_throttle().run(6 * SECOND + MS);
    let rate = |looks: &[Look]| bytes_per_second(looks, SECOND, 6 * SECOND);
    let ratio = rate(&with) / rate(&without);
    let held = with.iter().filter(|look| held(look)).count() as f64 / with.len() as f64;
    eprintln!("{name}: {:.2}% of the rate, held for {:.2}% of the time", ratio * 100.0, held * 100.0);
    assert!(ratio >= 0.98, "{name}: {ratio}");
    assert!(held < 0.01, "{name}: held for {held} of the time");
}

#[test]
fn equal_replicas_are_not_throttled() {
    let three = |server: Server| [server.clone(), server.clone(), server];
    let fast = Server::at(1 << 30);
    for size in [4 << 10, 1 << 20, 4 << 20] {
        check_untouched("equal", three(fast.clone()), 25, &[size]);
    }
    check_untouched("mixed sizes", three(fast.clone()), 25, &[4 << 10, 1 << 20, 4 << 10, 64 << 10]);
    let parallel = Server { parallel: 64, ..Server::one_at_a_time(200 * US) };
    check_untouched("1 to 10 ms late", three(parallel.clone().late(MS, 10 * MS)), 32, &[4 << 10]);
    check_untouched("out of order", three(Server { unordered: true, ..fast.clone() }), 32, &[64 << 10]);
    let late = parallel.clone().late(5 * MS, 5 * MS);
    check_untouched("5 ms later", [parallel.clone(), parallel, late], 32, &[4 << 10]);
}

#[test]
fn out_of_order_replies_do_not_hide_a_backlog() {
    let slow = Server { unordered: true, ..Server::at(200 << 20) };
    let fast = Server::at(400 << 20);
    let looks = Model::new([fast.clone(), fast, slow.clone()], 32, &[16 << 10]).run(20 * SECOND + MS);
    let most = between(&looks, SECOND, 20 * SECOND).map(|look| look.queue_ms[SLOW]).fold(0.0, f64::max);
    let rate = bytes_per_second(&looks, SECOND, 20 * SECOND) / slow.rate(16 << 10);
    assert!(most < 30.0 && rate > 0.97, "queue {most:.1} ms, rate {rate:.3}");
}

#[test]
fn mixed_sizes_settle() {
    let (fast, slow) = (Server::at(2 << 30), Server::at(1 << 30));
    let sizes = [4 << 10, 4 << 20, 64 << 10, 1 << 20, 4 << 10];
    let looks = Model::new([fast.clone(), slow.clone(), fast], 32, &sizes).run(20 * SECOND + MS);
    let most = between(&looks, SECOND, 20 * SECOND).map(|look| look.queue_ms[1]).fold(0.0, f64::max);
    assert!(most < 30.0, "queue {most:.1} ms");
}

/// The slow replica is as fast as the others from one moment on: within 250 ms nothing is held any more.
#[test]
fn a_replica_that_recovers_is_not_waited_for() {
    for (depth, size) in [(32, 4 << 10), (8, 1 << 20), (64, 1 << 20), (25, 4 << 20)] {
        let (fast, slow) = (Server::at(2 << 30), Server::at(1 << 30));
        let mut model = Model::new([fast.clone(), fast.clone(), slow], depth, &[size]);
        model.change(5 * SECOND, SLOW, fast);
        let looks = model.run(10 * SECOND + MS);
        assert!(between(&looks, 4 * SECOND, 5 * SECOND).any(held), "it was throttled before");
        let late = between(&looks, 5 * SECOND + 250 * MS, 10 * SECOND).find(|look| held(look));
        assert!(late.is_none(), "{size} at depth {depth}: {late:?}");
    }
}

#[test]
fn a_replica_that_leaves_takes_every_delay_with_it_and_finds_none() {
    let (fast, slow) = (Server::at(2 << 30), Server::at(1 << 30));
    let mut model = Model::new([fast.clone(), fast.clone(), slow], 8, &[1 << 20]);
    model.at(5 * SECOND, Ev::Away(SLOW, true));
    model.change(6 * SECOND, SLOW, fast);
    model.at(7 * SECOND, Ev::Away(SLOW, false));
    let looks = model.run(10 * SECOND);
    assert!(between(&looks, 4 * SECOND, 5 * SECOND).any(held), "it was throttled before");
    let late = between(&looks, 5 * SECOND + MS, 10 * SECOND).find(|look| held(look));
    assert!(late.is_none(), "{late:?}");
}

#[test]
fn short_bursts_are_not_delayed() {
    // 30 reads that take the slow one 9 ms, and time to recover before the next.
    let (fast, slow) = (Server::one_at_a_time(100 * US), Server::one_at_a_time(300 * US));
    let mut model = Model::new([fast.clone(), fast, slow.clone()], 0, &[4 << 10]);
    (0..400).for_each(|burst| model.at(burst * 25 * MS, Ev::Burst(30)));
    let looks = model.run(10 * SECOND);
    assert!(!looks.iter().any(held), "a burst was delayed");
    // The control: without the pauses they are a backlog.
    let mut model =
        Model::new([Server::one_at_a_time(100 * US), Server::one_at_a_time(100 * US), slow], 0, &[4 << 10]);
    (0..4000).for_each(|burst| model.at(burst * 5 * MS, Ev::Burst(30)));
    assert!(model.run(10 * SECOND).iter().any(held), "a flood was not");
}

/// A replica that is merely later, by more than the limit: it is no backlog, so the guest pays the delay and nothing else.
#[test]
fn latency_is_not_taken_for_a_backlog() {
    let parallel = Server { parallel: 64, ..Server::one_at_a_time(200 * US) };
    for late_ms in [20, 60] {
        let depth = 32;
        let late = parallel.clone().late(late_ms * MS, late_ms * MS);
        let mut model = Model::new([parallel.clone(), parallel.clone(), parallel.clone()], depth, &[4 << 10]);
        model.change(2 * SECOND, SLOW, late);
        let looks = model.run(30 * SECOND + MS);
        let reads = bytes_per_second(&looks, 4 * SECOND, 30 * SECOND) / 4096.0;
        let unhurt = depth as f64 * 1000.0 / late_ms as f64;
        eprintln!("{late_ms} ms later: {reads:.0} reads/s, {unhurt:.0} at that latency");
        assert!(reads > unhurt * 0.95, "{late_ms} ms later: {reads:.0} reads/s, not {unhurt:.0}");
        assert!(between(&looks, 4 * SECOND, 30 * SECOND).any(|look| look.delay_ms > 0.0), "it is delayed");
        let high = between(&looks, 4 * SECOND, 30 * SECOND).map(|look| look.lead_ms).fold(0.0, f64::max);
        assert!(high < 25.0, "lead {high:.1} ms");
    }
}

/// A stopped replica holds up nobody, before, during and after, whether reads were throttled because of it or not.
#[test]
fn a_replica_that_stops_is_not_noticed() {
    let fast = Server::at(400 << 20);
    for slow in [Server::at(400 << 20), Server::at(200 << 20)] {
        let mut model = Model::new([fast.clone(), fast.clone(), slow.clone()], 4, &[64 << 10]);
        let stopped = Server { stopped: (5 * SECOND, 7 * SECOND), ..slow.clone() };
        model.change(5 * SECOND, SLOW, stopped);
        model.change(7 * SECOND, SLOW, slow.clone());
        model.run_to(12 * SECOND);
        let stop = model.answers.iter().filter(|(at, _)| (5 * SECOND..7 * SECOND).contains(at));
        let longest = stop.map(|&(_, took)| took).max().unwrap();
        assert!(longest < 150 * MS, "{} ms while one was stopped", longest / MS);
    }
}
