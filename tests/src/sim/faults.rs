//! What goes wrong, and when.

use std::time::Duration;

use newel_downstairs::core as down;
use newel_downstairs::core::api::ConnId;
use newel_upstairs::core as up;
use rand::RngExt as _;

use super::disk;
use super::guest;
use super::history::{Nanos, Note};
use super::plan::{Fault, MS};
use super::world::{Ev, World};

impl World {
    pub(super) fn fault_delay(&mut self) -> Nanos {
        let mean = self.plan.fault_every;
        self.rng.random_range(mean / 4..mean * 2)
    }

    pub(super) fn next_fault(&mut self) -> Result<(), String> {
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

    pub(super) fn inject(&mut self, fault: Fault) -> Result<(), String> {
        let down = self.slots[self.rng.random_range(0..3_usize)];
        let short = self.rng.random_range(MS..150 * MS);
        let long = self.rng.random_range(10 * MS..1_000 * MS);
        let pause = if self.rng.random_bool(0.7) { short } else { long };
        let takeover = self.rng.random_bool(0.5);
        match fault {
            Fault::KillReplica => self.restart_down(down, pause),
            Fault::KillAll => {
                for down in self.slots {
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
                for down in self.slots {
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
                    self.ups[up].stopping = true;
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
            Fault::Replace => self.replace()?,
            Fault::Scrub => {
                if let Some(up) = self.serving_up() {
                    self.feed_up(up, up::api::Event::Scrub)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn restart_down(&mut self, down: usize, delay: Nanos) {
        if self.downs[down].process.is_some() {
            self.note(|| format!("replica {down} is killed"));
            self.kill_down(down);
            self.after(delay, Ev::StartDown { down });
        }
    }

    pub(super) fn power_cut(&mut self, down: usize, delay: Nanos) {
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
    pub(super) fn damage(&mut self, fault: Fault) {
        let down = (0..self.downs.len())
            .find(|&down| self.downs[down].damaged)
            .unwrap_or_else(|| self.slots[self.rng.random_range(0..3_usize)]);
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

    pub(super) fn random_conn(&mut self) -> Option<usize> {
        let up = self.serving_up()?;
        let links: Vec<usize> = self.ups[up].links.iter().flatten().copied().collect();
        (!links.is_empty()).then(|| links[self.rng.random_range(0..links.len())])
    }
}
