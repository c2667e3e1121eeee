//! Replicas: processes over a disk that outlives them, and the steps of their disk operations.

use std::collections::BTreeMap;

use bytes::Bytes;
use newel_downstairs::core as down;
use newel_downstairs::core::api::{DiskDone, DiskOp, DiskOutcome, OpId};
use newel_downstairs::disk::{RegionCore, in_turn};
use newel_protocol::lag::Health;
use newel_protocol::wire::{Reply, StageTimes, ZeroMode};
use rand::RngExt as _;
use uuid::Uuid;

use super::disk;
use super::plan::{Bug, MS};
use super::world::{DownProcess, Ev, Operation, Stage, World};

impl World {
    pub(super) fn start_down(&mut self, index: usize) {
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

    pub(super) fn feed_down(&mut self, index: usize, incarnation: u64, event: down::api::Event) {
        let down = &mut self.downs[index];
        if down.incarnation != incarnation {
            return;
        }
        let Some(process) = &mut down.process else { return };
        process.core.handle(down::api::Time(self.now), event);
        self.pump_down(index);
    }

    pub(super) fn pump_down(&mut self, index: usize) {
        let incarnation = self.downs[index].incarnation;
        while let Some(action) = self.downs[index].process.as_mut().and_then(|p| p.core.poll_action()) {
            match action {
                down::api::Action::Send { conn, reply, payload } => {
                    let conn = usize::try_from(conn.0).unwrap_or(usize::MAX);
                    let Some(reply) = self.plant_in_reply(conn, reply) else { continue };
                    self.deliver(conn, 1, Ev::ToUp { conn, reply, payload });
                }
                down::api::Action::Pong { conn, nonce } => {
                    let conn = usize::try_from(conn.0).unwrap_or(usize::MAX);
                    let reply = Reply::Pong { nonce, health: Health::default() };
                    self.deliver(conn, 1, Ev::ToUp { conn, reply, payload: Bytes::new() });
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

    pub(super) fn schedule_disk(&mut self, index: usize, incarnation: u64, op: OpId) {
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
    pub(super) fn disk_step(&mut self, index: usize, incarnation: u64, op: OpId) {
        let down = &mut self.downs[index];
        let Some(process) = down.process.as_mut().filter(|_| down.incarnation == incarnation) else { return };
        let Some(operation) = process.operations.remove(&op) else { return };
        let contexts_first = self.rng.random_bool(0.7);
        let step = process.step(operation, contexts_first);
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

    pub(super) fn kill_down(&mut self, index: usize) {
        let Some(process) = self.downs[index].process.take() else { return };
        // What was handed to the kernel is carried out, whether the process lives or not; of what was only planned nobody
        // knows whether it got that far.
        self.downs[index].disk.attach();
        for operation in process.operations.into_values() {
            let (change, handed_over) = match &operation.stage {
                Stage::Planned(change) => (change, self.rng.random_bool(0.5)),
                Stage::ContextsWritten(change) => (change, true),
                Stage::Queued | Stage::Written(_) => continue,
            };
            if handed_over {
                drop(process.region.write_pieces_now(change, &operation.data()));
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

    pub(super) fn resume_down(&mut self, index: usize) {
        self.downs[index].paused = false;
        for event in std::mem::take(&mut self.downs[index].deferred) {
            self.at(self.now, event);
        }
    }
}

impl Operation {
    pub(super) fn data(&self) -> Bytes {
        match &self.op {
            DiskOp::Write { data, .. } | DiskOp::Store { data, .. } => data.clone(),
            DiskOp::Zero { range, mode: ZeroMode::Allocate, .. } => vec![0; range.bytes()].into(),
            _ => Bytes::new(),
        }
    }
}

impl DownProcess {
    /// The next step of an operation, or its result.
    pub(super) fn step(
        &mut self,
        operation: Operation,
        contexts_first: bool,
    ) -> Result<Operation, Result<DiskOutcome, down::api::DiskError>> {
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
            // The kernel has the data; contexts are written while the device works, and either may be first.
            Stage::Planned(change) if contexts_first => match region.finish(&[&change]) {
                Ok(()) => Ok(Operation { op, stage: Stage::ContextsWritten(change) }),
                Err(error) => Err(Err(error)),
            },
            Stage::ContextsWritten(change) => match region.write_pieces_now(&change, &data) {
                Ok(()) => {
                    region.end(&change);
                    Err(Ok(DiskOutcome::Done))
                }
                Err(error) => Err(region.revert(&change).and(Err(error))),
            },
            Stage::Planned(change) => match region.write_pieces_now(&change, &data) {
                Ok(()) => Ok(Operation { op, stage: Stage::Written(change) }),
                Err(error) => Err(region.abort(&change).and(Err(error))),
            },
            Stage::Written(change) => {
                let written = region.finish(&[&change]);
                region.end(&change);
                Err(written.map(|()| DiskOutcome::Done))
            }
        }
    }
}
