//! Reads that cost one disk: the data from one replica, from the others only the contexts.
//!
//! Invariants:
//! - The data is asked of the Active replica that has the least to read.
//! - Once a read takes longer than 95 of 100 of that size at that replica, or its copy is bad, another one is asked.
//! - A replica is never asked twice while it owes an answer to the same read.
//!
//! The answer does not wait for the contexts: a copy whose checksum fits is as good as under fan-out. They show bad copies of the
//! others, and that a replica is there to be asked.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use newel_protocol::JobId;
use newel_protocol::wire::{Op, ReadMode};

use super::Core;
use super::api::{ReplicaId, ReplicaSet, Time};
use super::timeline::What;

/// Reads are told apart by the number of bits of their size.
const CLASSES: usize = 32;
/// How much the estimate moves when a read took longer. Shorter ones move it back by as much as leaves 5 of 100 above it.
const STEP_UP: f64 = 1.1;
const STEP_DOWN: f64 = 0.995;
/// Before anything is known.
const FIRST: Duration = Duration::from_millis(20);
/// Below this, asking again costs more than waiting; above, nobody waits.
const LATE_MIN: Duration = Duration::from_micros(500);
const LATE_MAX: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) struct Witness {
    /// When a read becomes late.
    late: BTreeSet<(Time, JobId)>,
    due: BTreeMap<JobId, Time>,
    times: [Percentile; ReplicaId::COUNT],
}

/// What 95 of 100 reads take no longer than, in seconds, by class.
#[derive(Debug)]
struct Percentile([f64; CLASSES]);

impl Default for Percentile {
    fn default() -> Self {
        Self([FIRST.as_secs_f64(); CLASSES])
    }
}

fn class(bytes: usize) -> usize {
    (usize::BITS - bytes.leading_zeros()) as usize % CLASSES
}

impl Percentile {
    fn record(&mut self, bytes: usize, took: Duration) {
        let estimate = &mut self.0[class(bytes)];
        *estimate *= if took.as_secs_f64() > *estimate { STEP_UP } else { STEP_DOWN };
        *estimate = estimate.clamp(LATE_MIN.as_secs_f64(), LATE_MAX.as_secs_f64());
    }

    fn of(&self, bytes: usize) -> Duration {
        Duration::from_secs_f64(self.0[class(bytes)])
    }
}

impl Witness {
    pub(super) fn deadline(&self) -> Option<Time> {
        self.late.first().map(|&(due, _)| due)
    }

    pub(super) fn took(&mut self, id: ReplicaId, bytes: usize, took: Duration) {
        self.times[id.index()].record(bytes, took);
    }

    /// Should this replica be late with its answer, another one is asked.
    pub(super) fn watch(&mut self, now: Time, job: JobId, reader: ReplicaId, bytes: usize) {
        self.settled(job);
        let due = now.after(self.times[reader.index()].of(bytes));
        self.late.insert((due, job));
        self.due.insert(job, due);
    }

    pub(super) fn settled(&mut self, job: JobId) {
        if let Some(due) = self.due.remove(&job) {
            self.late.remove(&(due, job));
        }
    }

    fn next_late(&mut self, now: Time) -> Option<JobId> {
        let &(due, job) = self.late.first().filter(|(due, _)| *due <= now)?;
        self.late.remove(&(due, job));
        self.due.remove(&job);
        Some(job)
    }

    pub(super) fn forget_all(&mut self) {
        self.late.clear();
        self.due.clear();
    }
}

/// Of whom a read may be asked, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whom {
    /// Whoever was asked is only late.
    WithRoom,
    /// Nobody else is about to answer.
    Any,
}

impl Core {
    pub(super) fn send_witnessed(&mut self, id: JobId, active: ReplicaSet) {
        let Some(reader) = self.least_reading(id, active) else { return };
        self.send_data_read(id, reader);
        let Some(Op::Read { range, .. }) = self.jobs.get(id).map(|job| job.op.clone()) else { return };
        let witnesses = self.active().without(ReplicaSet::only(reader));
        self.send_job_as(id, witnesses, Op::Read { range, mode: ReadMode::Contexts });
    }

    fn send_data_read(&mut self, id: JobId, reader: ReplicaId) {
        let Some(cost) = self.jobs.get(id).map(|job| job.cost) else { return };
        self.witness.watch(self.now, id, reader, cost);
        self.send_job(id, ReplicaSet::only(reader));
    }

    /// The one with the least to read; those that have as much take turns.
    fn least_reading(&self, id: JobId, among: ReplicaSet) -> Option<ReplicaId> {
        let turn = |replica: ReplicaId| (u64::from(replica.0) + id.0) % ReplicaId::COUNT as u64;
        among.iter().min_by_key(|&replica| (self.replica(replica).reading, turn(replica)))
    }

    /// Reads that take longer than they should are asked of another replica, too.
    pub(super) fn check_late_reads(&mut self) {
        while let Some(id) = self.witness.next_late(self.now) {
            if self.ask_elsewhere(id, Whom::WithRoom).is_none()
                && let Some((reader, cost)) = self
                    .jobs
                    .get(id)
                    .filter(|job| !job.settled)
                    .and_then(|job| Some((job.readers.iter().next()?, job.cost)))
            {
                // Nobody is free to be asked: look again later.
                self.witness.watch(self.now, id, reader, cost);
            }
        }
    }

    /// After an answer that was not the data: asks for it where it can be had, if nobody is about to give it.
    pub(super) fn ask_another(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(id) else { return };
        let pending = !job.owed.and(job.readers).is_empty();
        if job.is_guest_read() && !job.settled && !pending {
            self.ask_elsewhere(id, Whom::Any);
        }
    }

    fn ask_elsewhere(&mut self, id: JobId, whom: Whom) -> Option<()> {
        let active = self.active();
        let job = self.jobs.get(id).filter(|job| !job.settled)?;
        let read = job.read.as_ref().filter(|read| read.answer.is_none())?;
        let mut free = active.without(job.owed).without(read.failed).without(job.readers);
        let (slot, cost) = (job.trace, job.cost);
        if whom == Whom::WithRoom {
            free = free.iter().filter(|&replica| self.can_read_more(replica, cost)).collect();
        }
        let reader = self.least_reading(id, free)?;
        self.trace.mark(slot, self.now, What::AskedToo, reader);
        self.send_data_read(id, reader);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_twenty_is_late() {
        let mut percentile = Percentile::default();
        let mut random = 1_u64;
        let (mut late, mut count) = (0, 0);
        for round in 0..20_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let took = Duration::from_micros(1000 + random % 9000);
            if round > 2_000 {
                count += 1;
                late += u32::from(took > percentile.of(4096));
            }
            percentile.record(4096, took);
        }
        let share = f64::from(late) / f64::from(count);
        assert!((0.03..0.08).contains(&share), "{share} are late");
        assert_eq!(percentile.of(1 << 20), FIRST, "other sizes are told apart");
    }
}
