//! What the disk is asked for beside jobs (activity log, flushes, header, digests, the end), and what a failure means.
//!
//! Invariants:
//! - One header change, one batch of the activity log and one flush at a time.
//! - What the core believes of the header is what is durable there.
//! - A failed change, flush, header or log write takes the replica out of service until the process ends: nothing is
//!   retried as if it were clean. A full disk only ends the session.
//! - [`Action::Stopped`] comes once, after everything at the disk has ended and, if nothing failed, the region was closed.

use std::collections::VecDeque;

use bytes::Bytes;
use newel_protocol::wire::{Membership, Reply, StageTimes};
use newel_protocol::{ExtentId, Generation, JobId, Version};

use super::Core;
use super::api::{
    Action, ConnId, DiskCommand, DiskDone, DiskError, DiskOp, DiskOutcome, HeaderChange, LogEvent, OpId, Time,
};

/// In the low half of an operation's number: not a job.
const NOT_A_JOB: u32 = u32::MAX;
/// `Activated` requests that may wait for the header; an upstairs sends one per activation or change of members.
const MAX_HEADER_QUEUE: usize = 16;

/// What an operation that is no job is for.
#[derive(Debug)]
pub(super) enum Task {
    Log,
    Flush { sent: Time },
    Header { conn: ConnId, change: HeaderChange },
    PromotionDigests { conn: ConnId, first: ExtentId },
    Close,
}

/// The operations at the disk that are no jobs: a handful at most.
#[derive(Debug, Default)]
pub(super) struct Internal {
    tasks: Vec<(OpId, Task)>,
    headers: VecDeque<(ConnId, HeaderChange)>,
}

impl Internal {
    pub(super) fn header_busy(&self) -> bool {
        !self.headers.is_empty() || self.tasks.iter().any(|(_, task)| matches!(task, Task::Header { .. }))
    }
}

impl Core {
    /// A fresh operation number for a job's slot.
    pub(super) fn op_id(&mut self, slot: u32) -> OpId {
        self.next_op = self.next_op.wrapping_add(1);
        OpId(u64::from(self.next_op) << 32 | u64::from(slot))
    }

    pub(super) fn start_task(&mut self, task: Task, kind: DiskOp) {
        self.start_task_for(None, task, kind);
    }

    fn start_task_for(&mut self, job: Option<JobId>, task: Task, kind: DiskOp) {
        let op = self.op_id(NOT_A_JOB);
        self.internal.tasks.push((op, task));
        self.actions.push_back(Action::Disk(DiskCommand { op, job, kind }));
    }

    pub(super) fn disk_done(&mut self, done: DiskDone) {
        let slot = u32::try_from(done.op.0 & u64::from(u32::MAX)).unwrap_or(NOT_A_JOB);
        if slot != NOT_A_JOB {
            return self.job_done(slot, done);
        }
        let Some(index) = self.internal.tasks.iter().position(|&(op, _)| op == done.op) else {
            debug_assert!(false, "an operation ended that was never begun: {:?}", done.op);
            return;
        };
        let (_, task) = self.internal.tasks.swap_remove(index);
        match done.result {
            Ok(outcome) => self.task_done(task, outcome, done.times),
            Err(error) => self.task_failed(&task, &error),
        }
    }

    fn task_done(&mut self, task: Task, outcome: DiskOutcome, times: StageTimes) {
        match task {
            Task::Log => {
                let mut released = std::mem::take(&mut self.released);
                self.activity.batch_durable(&mut released);
                for slot in released.drain(..) {
                    self.send_to_disk(slot);
                }
                self.released = released;
            }
            Task::Flush { sent } => self.flush_done(sent, times),
            Task::Header { conn, change } => self.header_done(conn, change),
            Task::PromotionDigests { conn, first } => match outcome {
                DiskOutcome::Digests(digests) => self.digested(conn, first, &digests),
                DiskOutcome::Done | DiskOutcome::Read { .. } | DiskOutcome::Contexts(_) => {
                    self.fail("the disk answered a query for digests with something else".to_owned());
                }
            },
            Task::Close => self.stop(),
        }
    }

    fn task_failed(&mut self, task: &Task, error: &DiskError) {
        self.fail(error.to_string());
        match task {
            Task::Flush { .. } => {
                self.flusher.finished();
            }
            Task::Close => self.stop(),
            Task::Log | Task::Header { .. } | Task::PromotionDigests { .. } => {}
        }
    }

    pub(super) fn advance_log(&mut self) {
        if let Some(entries) = self.activity.next_batch() {
            self.start_task(Task::Log, DiskOp::ActivityLog { entries });
        }
    }

    pub(super) fn advance_flush(&mut self) {
        let Some(highest) = self.flusher.start(self.activity.wants_flush()) else { return };
        let mark = highest.map(|job| Version::new(self.generation(), job.0));
        self.activity.flush_began();
        self.start_task_for(highest, Task::Flush { sent: self.now }, DiskOp::Flush { mark });
    }

    fn flush_done(&mut self, sent: Time, mut times: StageTimes) {
        self.activity.flush_finished();
        let served = self.flusher.finished();
        let Some(conn) = self.session.as_ref().map(|session| session.conn) else { return };
        for flush in served {
            times.queued_us = sent.micros_since(flush.arrived);
            let reply = Reply::Done { job: flush.job, result: Ok(()), times, states: Vec::new() };
            self.answer_job(conn, false, 0, reply, Bytes::new());
        }
    }

    /// The session in force says that this replica holds everything acknowledged.
    pub(super) fn activated(&mut self, generation: Generation, membership: Membership) {
        let Some(session) = &self.session else { return };
        let conn = session.conn;
        if generation != session.generation {
            let what = format!("Activated({generation}) in a session of generation {}", session.generation);
            return self.violation(conn, what);
        }
        if self.internal.headers.len() >= MAX_HEADER_QUEUE {
            return self.violation(conn, format!("more than {MAX_HEADER_QUEUE} Activated outstanding"));
        }
        self.internal.headers.push_back((conn, HeaderChange::Activated { generation, membership }));
    }

    pub(super) fn start_header(&mut self, conn: ConnId, change: HeaderChange) {
        let op = DiskOp::Header(change.clone());
        self.start_task(Task::Header { conn, change }, op);
    }

    pub(super) fn advance_headers(&mut self) {
        let busy = self.internal.tasks.iter().any(|(_, task)| matches!(task, Task::Header { .. }));
        if !busy && let Some((conn, change)) = self.internal.headers.pop_front() {
            self.start_header(conn, change);
        }
    }

    fn header_done(&mut self, conn: ConnId, change: HeaderChange) {
        match change {
            HeaderChange::Promise { generation, upstairs } => {
                self.facts.promised = generation;
                self.facts.promised_to = upstairs;
            }
            HeaderChange::Claim { volume } => self.facts.volume = volume,
            HeaderChange::Activated { generation, membership } => {
                self.facts.last_active = generation;
                self.facts.membership = membership;
                // Whatever the power cut took has been reconciled.
                self.facts.lost_power = false;
                if self.session.as_ref().is_some_and(|session| session.conn == conn) {
                    self.send(conn, Reply::ActivatedStored { generation });
                }
            }
        }
    }

    /// Drops what an ended session still wanted; what is at the disk is awaited by whoever comes next.
    pub(super) fn drop_session_jobs(&mut self) {
        self.drop_jobs();
        self.fault.drop_held();
        self.activity.drop_waiters();
        self.flusher.drop_session();
        self.internal.headers.clear();
    }

    /// Out of service until the process ends.
    pub(super) fn fail(&mut self, reason: String) {
        if self.failed.is_some() {
            return;
        }
        self.log(LogEvent::Failed { reason: reason.clone() });
        self.leave_all(&format!("the replica is out of service until it is restarted: {reason}"));
        self.failed = Some(reason);
    }

    pub(super) fn advance_shutdown(&mut self) {
        if self.jobs.at_disk() > 0 || !self.internal.tasks.is_empty() {
            return;
        }
        if self.failed.is_some() {
            self.stop();
        } else {
            self.start_task(Task::Close, DiskOp::Close);
        }
    }

    fn stop(&mut self) {
        if !std::mem::replace(&mut self.stopped, true) {
            self.actions.push_back(Action::Stopped);
        }
    }
}
