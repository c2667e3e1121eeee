//! Planted mistakes. They are made here, between the parts of the product, wherever that is possible.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use newel_downstairs::core as down;
use newel_downstairs::core::api::{ConnId, DiskCommand, DiskDone, DiskOp, DiskOutcome};
use newel_protocol::wire::{Membership, Op, Refusal, Reply, Request as WireRequest, StageTimes};
use newel_protocol::{Generation, JobId, Version};
use newel_upstairs::core as up;
use newel_upstairs::core::api::ReplicaSet;

use super::plan::{Bug, MS};
use super::world::{Conn, Ev, Late, World, id};

/// What the planted mistakes have to remember.
#[derive(Debug, Default)]
pub(super) struct Plants {
    /// Jobs that went to several replicas at once, so guests' own: by upstairs and number, true if a change.
    shared: BTreeMap<(usize, JobId), bool>,
    /// Replies that were forged: the real ones are dropped.
    forged: BTreeSet<(usize, JobId)>,
}

impl Plants {
    pub(super) fn note_sent(&mut self, up: usize, replicas: ReplicaSet, request: &WireRequest) {
        if let WireRequest::Job { job, op } = request
            && replicas.len() > 1
        {
            self.shared.insert((up, *job), !matches!(op, Op::Read { .. }));
        }
    }
}

impl World {
    /// Acknowledging at one: the first replica to execute a change answers for all. Reads not held: answers show versions of
    /// long ago, which are never waited for.
    pub(super) fn plant_on_arrival(&mut self, conn: usize, reply: Reply) -> Result<Option<Reply>, String> {
        let Reply::Done { job, result: Ok(()), times, states } = reply else { return Ok(Some(reply)) };
        let up = self.conns[conn].up;
        let shared = self.plants.shared.get(&(up, job)).copied();
        let mut states = states;
        match (self.plan.bug, shared) {
            (Some(Bug::AckAtOne), Some(true)) => {
                if self.plants.forged.remove(&(conn, job)) {
                    return Ok(None);
                }
                let others: Vec<usize> = self.ups[up]
                    .links
                    .iter()
                    .flatten()
                    .copied()
                    .filter(|&c| c != conn && self.conns[c].open_up)
                    .collect();
                for other in others {
                    if self.plants.forged.insert((other, job)) {
                        let Conn { slot, link, .. } = self.conns[other];
                        let reply = Reply::Done { job, result: Ok(()), times, states: Vec::new() };
                        let event =
                            up::api::Event::Reply { replica: id(slot), link, reply, payload: Bytes::new() };
                        self.feed_up(up, event)?;
                    }
                }
            }
            (Some(Bug::ReadsNotHeld), Some(false)) => {
                states.iter_mut().for_each(|state| state.version.generation = Generation(0));
            }
            (_, _) => {}
        }
        Ok(Some(Reply::Done { job, result: Ok(()), times, states }))
    }

    pub(super) fn plant_in_reply(&mut self, conn: usize, reply: Reply) -> Option<Reply> {
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

    pub(super) fn plant_in_request(
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
            (Some(Bug::ReplacedEarly), WireRequest::Activated { generation, membership })
                if membership.epoch > 1 && self.is_second_other(conn, &membership) =>
            {
                let reply = Reply::ActivatedStored { generation };
                self.deliver(conn, 1, Ev::ToUp { conn, reply, payload: Bytes::new() });
                None
            }
            (Some(Bug::StaleSessionNotFenced), WireRequest::Job { job, op }) if self.conns[conn].zombie => {
                self.zombie_job(conn, job, &op, payload);
                None
            }
            (_, request) => Some(request),
        }
    }

    /// True for the last of the replicas that were members before this membership.
    fn is_second_other(&self, conn: usize, membership: &Membership) -> bool {
        let header = |down: usize| Some(self.downs[down].process.as_ref()?.region.header());
        let down = self.conns[conn].down;
        let old =
            |down: usize| header(down).is_some_and(|h| (1..membership.epoch).contains(&h.membership.epoch));
        let later =
            self.ups[self.conns[conn].up].addresses.into_iter().any(|other| other > down && old(other));
        old(down) && !later
    }

    /// Says that it is stored, and stores it some time later, if the replica lives that long.
    pub(super) fn plant_late_activated(&mut self, conn: usize, request: WireRequest) {
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

    pub(super) fn plant_late_log(&mut self, index: usize, incarnation: u64, command: DiskCommand) {
        self.after(100 * MS, Ev::Late { down: index, incarnation, what: Late::Log(command.kind) });
        let done = DiskDone { op: command.op, result: Ok(DiskOutcome::Done), times: StageTimes::default() };
        self.feed_down(index, incarnation, down::api::Event::DiskDone(done));
    }

    pub(super) fn late(&mut self, index: usize, incarnation: u64, what: Late) {
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
    pub(super) fn zombie_job(&mut self, conn: usize, job: JobId, op: &Op, payload: &Bytes) {
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
