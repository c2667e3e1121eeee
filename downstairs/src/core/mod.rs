//! The replica core: every decision of a downstairs, without I/O, clock or threads.
//!
//! Invariants, checked after every event:
//! - Jobs exist only while a session is in force, except those of an ended session that are at the disk already.
//! - A promotion under way and a session in force exclude each other: the old session ends where the new one is let in.
//! - No two operations at the disk conflict, and the extent of each change there is durably in the activity log.
//! - After a failed change, flush or metadata write nothing more is sent to the disk in this process's life.
//! - Everything is bounded: connections, jobs and bytes by [`CoreConfig`], the log by its slots.
//!
//! One idea a file: `session.rs` who may speak, `promotion.rs` how a session comes in force, `jobs.rs` the life of a
//! job, `fault.rs` answers that are late or wrong on purpose, `order.rs` which jobs may run together, `activity.rs` the activity log, `flush.rs` flushes, `disk.rs` everything
//! else that the disk is asked for, and what its failures mean.

mod activity;
pub mod api;
mod config;
mod disk;
mod fault;
mod flush;
mod jobs;
mod order;
mod promotion;
mod session;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

pub use config::{CoreConfig, SessionStatus, State, Status};
use newel_protocol::{EXTENT_BLOCKS, Generation};

use self::activity::ActivityLog;
use self::api::{Action, Event, RegionFacts, Time};
use self::disk::Internal;
use self::fault::FaultStage;
pub use self::fault::{FaultError, Faults};
use self::flush::Flusher;
use self::jobs::Jobs;
use self::order::Order;
use self::promotion::Promotion;
use self::session::{Conn, Session};

/// One replica. See the module for what it guarantees.
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    facts: RegionFacts,
    extents: u32,
    now: Time,
    actions: VecDeque<Action>,
    conns: Vec<Conn>,
    session: Option<Session>,
    promotion: Option<Promotion>,
    jobs: Jobs,
    order: Order,
    activity: ActivityLog,
    flusher: Flusher,
    internal: Internal,
    fault: FaultStage,
    /// Distinguishes operations that use the same job slot one after the other.
    next_op: u32,
    failed: Option<String>,
    stopping: bool,
    stopped: bool,
    /// Kept for its allocation.
    released: Vec<u32>,
}

impl Core {
    pub fn new(mut config: CoreConfig, facts: RegionFacts) -> Self {
        config.jobs_max = config.jobs_max.clamp(1, order::MAX_JOBS);
        config.disk_reads_max = config.disk_reads_max.max(1);
        config.connections_max = config.connections_max.max(2);
        let seed = facts.region.as_u64_pair().1;
        let extents = u32::try_from(facts.blocks.div_ceil(u64::from(EXTENT_BLOCKS))).unwrap_or(u32::MAX);
        let activity = ActivityLog::new(
            facts.log_slots,
            facts.log_slots_per_record,
            extents as usize,
            &facts.log_entries,
        );
        let mut core = Self {
            config,
            extents,
            now: Time::default(),
            actions: VecDeque::new(),
            conns: Vec::new(),
            session: None,
            promotion: None,
            jobs: Jobs::default(),
            order: Order::new(extents as usize),
            activity,
            flusher: Flusher::new(),
            internal: Internal::default(),
            fault: FaultStage::new(Faults::default(), seed),
            next_op: 0,
            failed: None,
            stopping: false,
            stopped: false,
            released: Vec::new(),
            facts,
        };
        if core.facts.log_slots == 0 {
            core.fail(format!("region {} has an activity log without slots", core.facts.region));
        }
        core
    }

    pub fn handle(&mut self, now: Time, event: Event) {
        self.now = now;
        match event {
            Event::Connected { conn } => self.connected(conn),
            Event::Message { conn, request, payload } => self.message(conn, request, payload),
            Event::Closed { conn } => self.closed(conn),
            Event::DiskDone(done) => self.disk_done(done),
            Event::Shutdown => self.shut_down(),
            Event::Faults(faults) => self.set_faults(faults),
            Event::Tick => self.drop_silent(),
        }
        self.advance();
        self.advance_faults();
        self.check_invariants();
    }

    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When the next [`Event::Tick`] is due.
    pub fn poll_deadline(&self) -> Option<Time> {
        self.silence_deadline().into_iter().chain(self.fault_deadline()).min()
    }

    pub fn status(&self) -> Status {
        let state = match &self.failed {
            Some(reason) => State::Failed { reason: reason.clone() },
            None if self.stopped => State::Stopped,
            None if self.stopping => State::Stopping,
            None => State::Serving,
        };
        let status = |upstairs, generation, in_force| SessionStatus { upstairs, generation, in_force };
        let promotion = self.promotion.as_ref().map(|p| status(p.upstairs, p.generation, false));
        Status {
            state,
            connections: self.conns.len(),
            session: self.session.as_ref().map(|s| status(s.upstairs, s.generation, true)).or(promotion),
            promised: self.facts.promised,
            last_active: self.facts.last_active,
            jobs_waiting: self.jobs.waiting(),
            jobs_at_disk: self.jobs.at_disk(),
            bytes: self.jobs.bytes(),
            flushes: self.flusher.outstanding(),
            log_slots_in_use: self.activity.in_use(),
        }
    }

    /// Starts whatever may start now.
    fn advance(&mut self) {
        if self.failed.is_none() {
            self.advance_log();
            self.advance_flush();
            self.advance_headers();
            self.advance_promotion();
        }
        if self.stopping && !self.stopped {
            self.advance_shutdown();
        }
    }

    /// The generation of the session in force.
    fn generation(&self) -> Generation {
        self.session.as_ref().map_or(Generation(0), |session| session.generation)
    }

    fn check_invariants(&self) {
        assert!(self.session.is_some() || self.jobs.waiting() == 0, "a job waits without a session");
        assert!(self.session.is_none() || self.promotion.is_none(), "two sessions in force");
        assert!(self.jobs.bytes() <= self.config.bytes_max, "more bytes accepted than allowed");
        assert!(self.jobs.len() <= self.config.jobs_max, "more jobs accepted than allowed");
        assert!(self.failed.is_none() || self.session.is_none(), "a failed replica serves");
    }
}
