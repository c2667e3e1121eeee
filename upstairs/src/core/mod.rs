//! The replication core: every decision of the upstairs, as one state machine over events and time.
//!
//! `handle` takes an event, `poll_action` gives out what is to be done, `poll_deadline` says when to come back. There is no
//! clock, no I/O, no randomness and no hashing order in here: the same events give the same actions.
//!
//! Invariants (each is checked where it could break, and by the simulator):
//! - A write is acknowledged only once `min_replicas` replicas executed it that were Active then or became so since.
//! - A read's answer leaves only when every version it shows is acknowledged.
//! - Guests are served only once a quorum has stored `Activated` of this generation.
//! - Every connected replica in a role gets every guest change in the order of its number.
//!
//! Files: [`jobs`] the table, [`requests`] from guest requests to jobs and back, [`kept`] what of them is settled, [`replies`] from replica replies to
//! acknowledgements, [`links`] connections and leaving, [`activation`] a new generation, [`resync`] making replicas equal, [`decide`] which copy is right,
//! [`reads`] which replica gets a read when, [`throttle`] and [`meter`] so that none is left behind, [`witness`] reads that cost one disk,
//! [`trace`] which job took how long where, as [`timeline`]s, [`way`]s and [`stages`], [`slow`] in words, [`slowest`] those that are kept,
//! [`catchup`] a joiner's way to Active, [`pace`] how fast, [`replace`] a new region in a slot, [`heal`] bad blocks, [`scrub`] finding them.

pub mod api;
pub mod config;
pub mod slow;
#[cfg_attr(not(feature = "trace"), allow(dead_code, reason = "only tracing counts"))]
pub mod stages;
pub mod status;
#[cfg_attr(not(feature = "trace"), allow(dead_code, reason = "only tracing takes stamps"))]
pub mod timeline;
#[cfg_attr(not(feature = "trace"), allow(dead_code, reason = "only tracing takes stamps"))]
pub mod way;

mod activation;
mod catchup;
mod classes;
mod decide;
mod heal;
mod jobs;
mod kept;
mod links;
mod meter;
mod pace;
#[cfg(feature = "trace")]
mod probes;
mod reads;
mod replace;
mod replica;
mod replies;
mod requests;
mod resync;
mod scrub;
#[cfg(feature = "trace")]
mod slowest;
mod snapshot;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_admin;
#[cfg(test)]
mod tests_fake;
#[cfg(test)]
mod tests_random;
#[cfg(test)]
mod tests_reads;
#[cfg(test)]
mod tests_world;
mod throttle;
#[cfg(test)]
mod throttle_model;
#[cfg(test)]
mod throttle_tests;
#[cfg(feature = "trace")]
mod trace;
#[cfg(not(feature = "trace"))]
#[path = "trace_off.rs"]
mod trace;
#[cfg(test)]
mod trace_tests;
mod waiting;
mod watch;
mod witness;
pub mod work;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use newel_protocol::wire::{Membership, Op, ReadMode, Request};
use newel_protocol::{Generation, JobId};

use activation::Activation;
use api::{Action, Event, LogEvent, LogLevel, ReplicaId, ReplicaSet, StopReason, Time};
use config::CoreConfig;
use jobs::{Job, JobTable, Owner, ReadState};
use pace::Pace;
use reads::Urgency;
use replace::Replacing;
use replica::Replica;
use requests::Requests;
use scrub::Scrub;
use throttle::Throttle;
use trace::{Slot, Tracer};
use witness::Witness;

/// Replicas that must agree on memberships, and on everything else unless `min_replicas` says otherwise: 2 of 3.
pub const QUORUM: usize = 2;

/// Reads that a replica may have at its disk, where they can't be cancelled, and as many on their way.
const UNCANCELLABLE: usize = 256;

#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    now: Time,
    actions: VecDeque<Action>,
    replicas: [Replica; ReplicaId::COUNT],
    jobs: JobTable,
    requests: Requests,
    /// Reads whose answer waits for a write to be acknowledged.
    held_reads: Vec<JobId>,
    throttle: Throttle,
    witness: Witness,
    told: reads::Told,
    trace: Tracer,
    phase: Phase,
    generation: Generation,
    /// The highest generation that any replica is known to have promised to anybody.
    highest_promised: Generation,
    /// Generations that a quorum has promised to this process: nobody else was active under one of these.
    own_generations: BTreeSet<Generation>,
    membership: Membership,
    /// True once two members are known to have stored it.
    membership_held: bool,
    /// Replicas that the activation under way needs.
    needed: usize,
    replacing: Option<Replacing>,
    scrub: Scrub,
    pace: Pace,
    /// Zero until the first replicas were met.
    blocks: u64,
    /// Unsettled guest jobs and their bytes: what the volume's bound counts.
    open_jobs: usize,
    open_bytes: usize,
    /// What guests asked for, from admission to the answer.
    work: work::WorkStatus,
    /// Nothing is admitted before.
    admit_at: Time,
    heals_in_flight: usize,
    next_query: u64,
    /// Since when fewer than a quorum are Active, while serving.
    quorum_lost_since: Option<Time>,
    was_served: bool,
    stopping: Option<Stopping>,
    stopped: bool,
}

#[derive(Debug)]
enum Phase {
    Activating(Activation),
    Serving,
}

#[derive(Debug)]
struct Stopping {
    until: Time,
    flush: Option<JobId>,
}

impl Core {
    pub fn new(config: CoreConfig, now: Time) -> Self {
        Self {
            replicas: ReplicaId::ALL.map(|id| Replica::new(id, now)),
            actions: VecDeque::new(),
            jobs: JobTable::new(),
            requests: Requests::default(),
            held_reads: Vec::new(),
            throttle: Throttle::new(
                config.throttle.clone(),
                if config.reads.cancel { UNCANCELLABLE } else { 0 },
            ),
            witness: Witness::default(),
            told: reads::Told::default(),
            trace: Tracer::new(&config.trace, &config.limits, now),
            phase: Phase::Activating(Activation::gathering()),
            generation: Generation(0),
            highest_promised: Generation(0),
            own_generations: BTreeSet::new(),
            membership: Membership::default(),
            membership_held: false,
            needed: QUORUM,
            replacing: None,
            pace: Pace::default(),
            scrub: Scrub::new(now, config.timing.scrub_every),
            blocks: 0,
            open_jobs: 0,
            open_bytes: 0,
            work: work::WorkStatus::default(),
            admit_at: Time(0),
            heals_in_flight: 0,
            next_query: 1,
            quorum_lost_since: None,
            was_served: false,
            stopping: None,
            stopped: false,
            config,
            now,
        }
    }

    pub fn handle(&mut self, now: Time, event: Event) {
        if self.stopped {
            return;
        }
        self.now = self.now.max(now);
        match event {
            Event::Guest { guest, op, received } => self.on_guest(guest, op, received),
            Event::LinkUp { replica, link } => self.on_link_up(replica, link),
            Event::LinkDown { replica, link, reason } => self.on_link_down(replica, link, reason),
            Event::Reply { replica, link, reply, payload } => self.on_reply(replica, link, reply, payload),
            Event::Replace { replica, welcome } => self.on_replace(replica, &welcome),
            Event::Scrub => self.start_scrub(),
            Event::Shutdown { within } => self.on_shutdown(within),
            Event::Tick => {}
        }
        self.on_time();
        self.check_invariants();
    }

    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    pub fn poll_deadline(&self) -> Option<Time> {
        if self.stopped {
            return None;
        }
        let stopping = self.stopping.is_some();
        let links = self.replicas.iter().filter(|r| !(stopping && r.is_down()));
        let links = links.filter_map(|r| r.deadline(&self.config.timing));
        let age = self.replicas.iter().filter_map(|r| self.age_deadline(r.id));
        let phase = match &self.phase {
            Phase::Activating(activation) => activation.deadline(),
            Phase::Serving => None,
        };
        let quorum = self.quorum_deadline();
        let stop = self.stopping.as_ref().map(|s| s.until);
        let reads = self.throttle.deadline(self.now).into_iter().chain(self.witness.deadline());
        links
            .chain(age)
            .chain(phase)
            .chain(quorum)
            .chain(stop)
            .chain(self.scrub_deadline())
            .chain(self.pace_deadline())
            .chain(reads)
            .chain(self.admission_deadline())
            .chain(self.trace_deadline())
            .min()
    }

    /// The volume's size once it is known: from the first activation on.
    pub fn serving_bytes(&self) -> Option<u64> {
        self.was_served.then(|| self.blocks * newel_protocol::BLOCK_BYTES as u64)
    }

    /// The generation in service, if one is.
    pub fn serving_generation(&self) -> Option<Generation> {
        self.is_serving().then_some(self.generation)
    }

    /// True while more guest requests may be handed in.
    pub fn has_room(&self) -> bool {
        self.requests.waiting() < self.config.limits.waiting
    }

    /// What sends guests' jobs goes first: a replica that leaves over it may make due what follows.
    fn on_time(&mut self) {
        for replica in ReplicaId::ALL {
            self.check_link_time(replica);
        }
        self.check_late_reads();
        self.admit_waiting();
        self.send_paced();
        self.check_activation();
        self.check_replace();
        self.check_quorum_timeout();
        self.check_stopping();
        self.check_scrub();
        self.check_pace();
        self.tell_throttle();
        self.sweep_slow();
    }

    fn on_shutdown(&mut self, within: Duration) {
        if self.stopping.is_none() {
            self.stopping = Some(Stopping { until: self.now.after(within), flush: None });
            self.refuse_waiting();
        }
    }

    /// Stops once everything admitted is answered and a last flush is done, or when the time is up.
    fn check_stopping(&mut self) {
        let Some(stopping) = &self.stopping else { return };
        let flush = stopping.flush;
        let late = self.now >= stopping.until;
        // Not only a quorum: whoever is left behind now has to catch up after the next start.
        let idle = self.replicas.iter().all(|replica| replica.queue_jobs == 0);
        let flushed = flush.is_some_and(|id| !self.jobs.is_unacknowledged(id)) && idle;
        let serving = matches!(self.phase, Phase::Serving) && self.active().len() >= self.config.min_replicas;
        if late || flushed || !serving {
            if !late && self.requests.open() > 0 && serving {
                return;
            }
            self.stop(StopReason::Finished);
        } else if flush.is_none() && self.requests.open() == 0 {
            let id = self.send_guest_job(Op::Flush, Bytes::new(), Owner::Nobody, Urgency::AtOnce);
            if let Some(stopping) = &mut self.stopping {
                stopping.flush = Some(id);
            }
        }
    }

    fn stop(&mut self, reason: StopReason) {
        self.stopped = true;
        self.fail_all_requests(api::GuestError::ShuttingDown);
        self.actions.push_back(Action::Stopped { reason });
    }

    fn replica(&self, id: ReplicaId) -> &Replica {
        &self.replicas[id.index()]
    }

    fn replica_mut(&mut self, id: ReplicaId) -> &mut Replica {
        &mut self.replicas[id.index()]
    }

    fn set_of(&self, matches: impl Fn(&Replica) -> bool) -> ReplicaSet {
        self.replicas.iter().filter(|r| matches(r)).map(|replica| replica.id).collect()
    }

    fn active(&self) -> ReplicaSet {
        self.set_of(Replica::is_active)
    }

    fn is_serving(&self) -> bool {
        matches!(self.phase, Phase::Serving)
    }

    fn send(&mut self, replicas: ReplicaSet, request: Request, payload: Bytes) {
        self.actions.push_back(Action::Send { replicas, request, payload });
    }

    fn log(&mut self, level: LogLevel, text: impl Into<String>) {
        self.actions.push_back(Action::Log(LogEvent { level, text: text.into() }));
    }

    /// Numbers a guest's job and sends it to all it concerns: a read to the Active, a change to all in a role.
    fn send_guest_job(&mut self, op: Op, payload: Bytes, owner: Owner, urgency: Urgency) -> JobId {
        let data_read = matches!(op, Op::Read { mode: ReadMode::Data, .. });
        let is_read = matches!(op, Op::Read { .. });
        let id = self.insert_job(op, payload, owner);
        if let Some(job) = self.jobs.get(id) {
            self.open_jobs += 1;
            self.open_bytes += job.cost;
        }
        self.begin_trace(id);
        if data_read {
            self.send_read(id, urgency);
        } else {
            let targets = if is_read { self.active() } else { self.set_of(Replica::takes_jobs) };
            self.send_job(id, targets);
        }
        id
    }

    /// Numbers a job of the core's own and sends it to these replicas only.
    fn send_internal_job(
        &mut self,
        op: Op,
        payload: Bytes,
        purpose: jobs::Purpose,
        targets: ReplicaSet,
    ) -> JobId {
        let id = self.insert_job(op, payload, Owner::Internal(purpose));
        self.send_job(id, targets);
        id
    }

    fn insert_job(&mut self, op: Op, payload: Bytes, owner: Owner) -> JobId {
        let id = self.jobs.next_id();
        let read = matches!(op, Op::Read { .. }).then(Box::<ReadState>::default);
        self.jobs.insert(Job {
            id,
            cost: jobs::cost(&op, &payload),
            op,
            payload,
            owner,
            owed: ReplicaSet::EMPTY,
            done: ReplicaSet::EMPTY,
            counted: ReplicaSet::EMPTY,
            settled: false,
            sent: [Time(0); ReplicaId::COUNT],
            replied: [None; ReplicaId::COUNT],
            readers: ReplicaSet::EMPTY,
            read,
            trace: Slot::NONE,
        });
        id
    }

    /// Sends a job that is in the table to these replicas, which now owe a reply.
    fn send_job(&mut self, id: JobId, targets: ReplicaSet) {
        let Some(job) = self.jobs.get(id) else { return };
        self.send_job_as(id, targets, job.op.clone());
    }

    /// The same, but a read's witnesses are asked for less.
    fn send_job_as(&mut self, id: JobId, targets: ReplicaSet, op: Op) {
        let now = self.now;
        let Some(job) = self.jobs.get_mut(id) else { return };
        let targets = targets.without(job.owed);
        if targets.is_empty() {
            return;
        }
        let cost = job.cost;
        let asks_data = matches!(op, Op::Read { mode: ReadMode::Data, .. }) && job.is_guest_read();
        for replica in targets.iter() {
            job.sent[replica.index()] = now;
            self.trace.sent(job.trace, now, replica, !self.replicas[replica.index()].is_active());
            if asks_data {
                job.readers.insert(replica);
                self.replicas[replica.index()].reading += cost;
                self.throttle.sent(now, replica, cost);
            }
        }
        let request = Request::Job { job: id, op };
        let payload = job.payload.clone();
        for replica in targets.iter() {
            self.jobs.owe(id, replica);
            self.replicas[replica.index()].owes(cost);
        }
        self.send(targets, request, payload);
        for replica in targets.iter() {
            self.check_bound(replica);
        }
    }

    /// Cheap in release, thorough in debug builds and the simulator.
    fn check_invariants(&self) {
        debug_assert!(
            self.replicas.iter().all(|replica| {
                let owed = || self.jobs.iter().filter(|job| job.owed.contains(replica.id));
                replica.queue_jobs == owed().count()
                    && replica.queue_bytes == owed().map(|job| job.cost).sum::<usize>()
            }),
            "a replica's queue is what it owes"
        );
        debug_assert_eq!(
            self.open_jobs,
            self.jobs.iter().filter(|job| !job.is_internal() && !job.settled).count(),
            "the volume's bound counts unsettled guest jobs"
        );
        debug_assert!(
            self.jobs.iter().all(|job| !(job.settled && job.owed.is_empty())),
            "a settled job that nobody owes has left the table"
        );
        debug_assert!(
            self.poll_deadline().is_none_or(|deadline| deadline > self.now),
            "whatever was due is done, or the shell would turn in circles"
        );
        debug_assert!(!self.is_serving() || self.was_served, "serving follows an activation");
        debug_assert!(self.trace_is_sound(), "every guest's job in the table has a timeline, and no other");
    }
}
