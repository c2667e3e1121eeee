//! After the last fault: everything must be answered, and all replicas must become equal.

use newel_downstairs::core as down;
use newel_downstairs::core::api::{DiskOp, DiskOutcome};
use newel_protocol::crc::crc;
use newel_protocol::wire::ReadMode;
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, BlockState};

use super::disk;
use super::guest::{self, Request};
use super::plan::MS;
use super::world::{Ev, World};

impl World {
    pub(super) fn end_faults(&mut self) {
        self.note(|| "no more faults".into());
        self.quiet = true;
        for conn in 0..self.conns.len() {
            self.heal(conn);
        }
        for down in 0..self.downs.len() {
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

    /// Goes on until everything is answered and all three replicas are Active.
    pub(super) fn converge(&mut self) -> Result<(), String> {
        let deadline = self.now + self.plan.converge_within;
        // A replacement under way is given time to finish by itself; then somebody looks after the configuration.
        let patience = self.now + 5_000 * MS;
        while !self.is_quiet() {
            if self.now >= patience {
                self.correct_configuration();
            }
            if self.now >= deadline {
                let seconds = self.plan.converge_within / 1_000 / MS;
                return Err(format!("not converged {seconds} s after the last fault: {}", self.state()));
            }
            self.run_until(self.now + 20 * MS)?;
        }
        Ok(())
    }

    /// Everything answered and all three replicas Active.
    pub(super) fn is_quiet(&mut self) -> bool {
        for down in 0..self.downs.len() {
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
            status.replicas.iter().all(|replica| replica.state == "active" && replica.queue_jobs == 0)
                && status.jobs_in_flight == 0
        })
    }

    pub(super) fn state(&self) -> String {
        let up = self.serving_up().map(|up| format!("{:?}", self.ups[up].core.status()));
        let waiting: Vec<u64> = self.guests.iter().flatten().map(|(request, _)| request.number).collect();
        format!("requests {waiting:?}, {}", up.unwrap_or_else(|| "no upstairs serves".into()))
    }

    /// Reads every hot block, twice: the first time heals what is damaged.
    pub(super) fn read_everything(&mut self) -> Result<(), String> {
        for _ in 0..2 {
            for block in guest::blocks() {
                let request = Request::read_block(self.next_request, block, self.now);
                self.next_request += 1;
                self.issue(0, request)?;
                let deadline = self.now + 10_000 * MS;
                // Another upstairs may still have taken over, with a configuration from before the last replacement.
                let patience = self.now + 3_000 * MS;
                while !self.is_quiet() {
                    if self.now >= patience {
                        self.correct_configuration();
                    }
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
    pub(super) fn compare_replicas(&mut self) -> Result<(), String> {
        let layout = disk::layout(self.plan.blocks);
        for block in guest::blocks() {
            let range = BlockRange::single(block);
            let mut copies = Vec::new();
            for down in self.in_force().map(|member| &self.downs[member]) {
                let Some(process) = &down.process else { return Err("a replica is not running".into()) };
                let read = process.region.execute(&DiskOp::Read { range, mode: ReadMode::Data });
                let Ok(DiskOutcome::Read { mut states, .. }) = read else {
                    return Err(format!("block {block}: {read:?}"));
                };
                let found = down.disk.peek(layout.block_offset(block));
                let is_good = |state: &BlockState| state.has_data() && crc(&found) == state.crc;
                let mut data = vec![0; BLOCK_BYTES];
                if states.first().is_some_and(is_good) {
                    data = found;
                } else {
                    // What a context without its data lies over does not count, nor that a disk can't even read it: it reads as an
                    // error everywhere.
                    let bad = states.iter_mut().filter(|state| state.kind == BlockKind::Data);
                    bad.for_each(|state| state.kind = BlockKind::Unreadable);
                }
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
