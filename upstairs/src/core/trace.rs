//! Takes the stamps of guests' jobs, and says which jobs were slow.
//!
//! Invariants:
//! - Nothing is allocated for a job: its timeline lies in a slab that is made at the start. A job for which there is no place goes
//!   untraced, and is counted.
//! - No clock is read: a stamp is the `now` of the batch of events.
//! - A job is looked at by the sweep once: when it is over the threshold it gets a record, and another one, under the same number,
//!   when it ends.
//! - Records are given out as they are, so many a second; how many were not is told with the next.
//! - Nothing here has any effect on what happens to a job.
//!
//! What is slow: a job that a guest waited for longer than the threshold, one that a replica took longer for though the guest did not
//! wait, and one that is under way for longer.

use std::cell::{Ref, RefCell};
use std::time::Duration;

use newel_protocol::JobId;
use newel_protocol::wire::{Op, StageTimes};

use super::Core;
use super::api::{Action, ReplicaId, Time};
use super::config::{Limits, TraceConfig};
use super::jobs::{Job, Owner};
use super::probes;
use super::slowest::Slowest;
use super::stages::Stages;
use super::status::TraceStatus;
use super::timeline::{Lane, Operation, Record, Stamp, Ticks, Timeline, What, Why};

/// Between two looks at what is under way.
const SWEEP_EVERY: Duration = Duration::from_millis(100);
/// Records given out at once, and one more in each of these times.
const RECORDS_MAX: u32 = 50;
const RECORD_EVERY: Duration = Duration::from_millis(100);
/// Jobs under way that are listed.
const LISTED_MAX: usize = 200;
/// Of those, jobs over the threshold that are listed with the slowest.
const LISTED_SLOW_MAX: usize = 20;

/// A job's place in the slab, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(u32);

impl Slot {
    pub(super) const NONE: Self = Self(u32::MAX);
}

#[derive(Debug)]
pub(super) struct Tracer {
    threshold: Duration,
    slab: Vec<Option<Timeline>>,
    free: Vec<u32>,
    stages: RefCell<Stages>,
    /// By what the guest waited, and by what a replica took that the guest did not wait for.
    slowest: Slowest,
    slowest_replica: Slowest,
    /// Every job with a lower number has a record, or has ended.
    cursor: JobId,
    swept: Time,
    budget: Budget,
    last_id: u32,
    slow: u64,
    untraced: u64,
    quorums_lost: u64,
}

/// How many more records may be given out.
#[derive(Debug)]
struct Budget {
    left: u32,
    since: Time,
    dropped: u64,
    dropped_in_all: u64,
}

impl Budget {
    fn take(&mut self, now: Time) -> bool {
        let every = u64::try_from(RECORD_EVERY.as_nanos()).unwrap_or(u64::MAX);
        let more = now.0.saturating_sub(self.since.0) / every;
        self.since = Time(self.since.0 + more * every);
        self.left = u32::try_from(more).unwrap_or(u32::MAX).saturating_add(self.left).min(RECORDS_MAX);
        if self.left == 0 {
            self.dropped += 1;
            self.dropped_in_all += 1;
            return false;
        }
        self.left -= 1;
        true
    }
}

/// Where a job comes from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    pub(super) request: u64,
    pub(super) received: Time,
    pub(super) admitted: Time,
    /// The record of the request, if it has one already.
    pub(super) record: u32,
}

impl Tracer {
    pub(super) fn new(config: &TraceConfig, limits: &Limits, now: Time) -> Self {
        // What a replica far behind may owe, and what the volume may have open.
        let places = limits.replica_jobs.saturating_add(limits.volume_jobs);
        Self {
            threshold: config.threshold,
            slab: Vec::with_capacity(places),
            free: Vec::with_capacity(places),
            stages: RefCell::default(),
            slowest: Slowest::new(),
            slowest_replica: Slowest::new(),
            cursor: JobId(0),
            swept: now,
            budget: Budget { left: RECORDS_MAX, since: now, dropped: 0, dropped_in_all: 0 },
            last_id: 0,
            slow: 0,
            untraced: 0,
            quorums_lost: 0,
        }
    }

    fn begin(&mut self, timeline: Timeline) -> Slot {
        if let Some(slot) = self.free.pop() {
            self.slab[slot as usize] = Some(timeline);
            return Slot(slot);
        }
        if self.slab.len() == self.slab.capacity() {
            self.untraced += 1;
            return Slot::NONE;
        }
        self.slab.push(Some(timeline));
        u32::try_from(self.slab.len() - 1).map_or(Slot::NONE, Slot)
    }

    fn get(&self, slot: Slot) -> Option<&Timeline> {
        self.slab.get(slot.0 as usize)?.as_ref()
    }

    fn get_mut(&mut self, slot: Slot) -> Option<&mut Timeline> {
        self.slab.get_mut(slot.0 as usize)?.as_mut()
    }

    /// `joins`: the replica is catching up.
    pub(super) fn sent(&mut self, slot: Slot, now: Time, replica: ReplicaId, joins: bool) {
        let Some(timeline) = self.get_mut(slot) else { return };
        timeline.sent(now, replica);
        probes::sent(timeline.job, replica);
        if joins {
            timeline.mark(now, What::SentToJoiner, Some(replica));
        }
    }

    /// `counts`: the replica is Active.
    pub(super) fn replied(
        &mut self,
        slot: Slot,
        now: Time,
        replica: ReplicaId,
        times: StageTimes,
        counts: bool,
    ) {
        let Some(timeline) = self.slab.get_mut(slot.0 as usize).and_then(Option::as_mut) else { return };
        timeline.replied(now, replica, times, counts);
        probes::replied(timeline.job, replica, times);
        let lane = &timeline.lanes[replica.index()];
        self.stages.get_mut().replied(replica, timeline.operation, lane);
    }

    pub(super) fn cancelled(&mut self, slot: Slot, now: Time, replica: ReplicaId) {
        let Some(timeline) = self.get_mut(slot) else { return };
        timeline.replied(now, replica, StageTimes::default(), false);
        timeline.mark(now, What::Cancelled, Some(replica));
    }

    /// The replica left while it owed the answer.
    pub(super) fn lost(&mut self, slot: Slot, now: Time, replica: ReplicaId) {
        if let Some(timeline) = self.get_mut(slot) {
            timeline.lost(now, replica);
        }
    }

    pub(super) fn mark(&mut self, slot: Slot, now: Time, what: What, replica: ReplicaId) {
        if let Some(timeline) = self.get_mut(slot) {
            timeline.mark(now, what, Some(replica));
        }
    }

    /// Something happened to all that isn't settled.
    pub(super) fn mark_open(&mut self, now: Time, what: What) {
        self.quorums_lost += u64::from(what == What::QuorumLost);
        let open = self.slab.iter_mut().flatten().filter(|timeline| !timeline.settled.is_set());
        open.for_each(|timeline| timeline.mark(now, what, None));
    }

    pub(super) fn renumbered(&mut self, slot: Slot, now: Time, job: JobId) {
        if let Some(timeline) = self.get_mut(slot) {
            probes::renumbered(job, std::mem::replace(&mut timeline.job, job));
            timeline.mark(now, What::NewGeneration, None);
        }
    }

    /// A read has its answer, with what came last.
    pub(super) fn answered(&mut self, slot: Slot) {
        if let Some(timeline) = self.get_mut(slot) {
            timeline.decide();
        }
    }

    pub(super) fn settled(&mut self, slot: Slot, now: Time, failed: bool) {
        let Some(timeline) = self.slab.get_mut(slot.0 as usize).and_then(Option::as_mut) else { return };
        timeline.settle(now, failed);
        probes::acknowledged(timeline, now, failed);
        self.stages.get_mut().settled(timeline);
    }

    /// The job has left the table: what is to be told of it. Its timeline is copied only if somebody will see it.
    fn ended(&mut self, slot: Slot, now: Time) -> Option<Record> {
        let place = self.slab.get_mut(slot.0 as usize)?;
        let timeline = place.as_ref()?;
        let threshold = Ticks::of(self.threshold);
        let total = timeline.total(now);
        let (_, lane) = timeline.slowest_lane(now);
        let why = match (total >= threshold, lane >= threshold) {
            (true, _) => Why::Guest,
            (false, true) => Why::Replica,
            (false, false) => Why::Slowest,
        };
        let told = why != Why::Slowest || timeline.record != 0;
        let wanted = told || self.slowest.takes(now, total);
        let timeline = if wanted { Some(*timeline) } else { None };
        *place = None;
        self.free.push(slot.0);
        let timeline = timeline?;
        let record = if told {
            self.numbered(now, why, true, timeline)
        } else {
            self.record(now, why, true, timeline)
        };
        if why == Why::Replica && self.slowest_replica.takes(now, lane) {
            self.slowest_replica.keep(now, lane, record);
        }
        if self.slowest.takes(now, total) {
            self.slowest.keep(now, total, record);
        }
        told.then_some(record)
    }

    fn record(&self, now: Time, why: Why, ended: bool, timeline: Timeline) -> Record {
        Record { id: timeline.record, why, ended, now, dropped: 0, timeline }
    }

    /// A record with a number, for the log.
    fn numbered(&mut self, now: Time, why: Why, ended: bool, mut timeline: Timeline) -> Record {
        if timeline.record == 0 {
            self.slow += 1;
            self.last_id = self.last_id.wrapping_add(1).max(1);
            timeline.record = self.last_id;
        }
        self.record(now, why, ended, timeline)
    }

    fn is_watched(&self, slot: Slot) -> bool {
        self.get(slot).is_some_and(|timeline| timeline.record == 0)
    }

    /// True if the sweep should tell of this job. If not, it is too early for all that are younger, too.
    fn is_overdue(&self, timeline: &Timeline, now: Time) -> bool {
        let (threshold, now) = (Ticks::of(self.threshold), timeline.ticks(now));
        let late = |lane: &Lane| lane.owes() && lane.took(now) >= threshold;
        now >= threshold && (!timeline.settled.is_set() || timeline.lanes.iter().any(late))
    }

    pub(super) fn status(&self) -> TraceStatus {
        let us = u64::try_from(self.threshold.as_micros()).unwrap_or(u64::MAX);
        TraceStatus {
            enabled: true,
            threshold_us: us,
            slow: self.slow,
            records_dropped: self.budget.dropped_in_all,
            untraced: self.untraced,
            quorums_lost: self.quorums_lost,
        }
    }
}

/// Operation, offset and length of a job.
fn about(op: &Op) -> (Operation, u64, u64) {
    let block = newel_protocol::BLOCK_BYTES as u64;
    match op {
        Op::Read { range, .. } => (Operation::Read, range.start * block, range.bytes() as u64),
        Op::Write { range, .. } => (Operation::Write, range.start * block, range.bytes() as u64),
        Op::Zero { range, .. } => (Operation::Zero, range.start * block, range.bytes() as u64),
        Op::Flush | Op::Store { .. } => (Operation::Flush, 0, 0),
    }
}

impl Core {
    /// Begins the timeline of a guest's job that is in the table.
    pub(super) fn begin_trace(&mut self, id: JobId) {
        let now = self.now;
        let Some(job) = self.jobs.get_mut(id) else { return };
        let origin = match job.owner {
            Owner::Guest { req, .. } => self.requests.origin(req),
            Owner::Nobody | Owner::Internal(_) => None,
        };
        let origin = origin.unwrap_or(Origin { request: 0, received: now, admitted: now, record: 0 });
        let (operation, offset, length) = about(&job.op);
        let base = origin.received.min(now);
        let timeline = Timeline {
            job: id,
            request: origin.request,
            operation,
            offset,
            length,
            base,
            admitted: Stamp::at(Ticks::between(base, origin.admitted)),
            numbered: Stamp::at(Ticks::between(base, now)),
            record: origin.record,
            ..Timeline::default()
        };
        probes::started(&timeline);
        job.trace = self.trace.begin(timeline);
    }

    /// The job has left the table.
    pub(super) fn end_trace(&mut self, slot: Slot) {
        if let Some(record) = self.trace.ended(slot, self.now) {
            self.give_out(record);
        }
    }

    fn give_out(&mut self, record: Record) {
        let budget = &mut self.trace.budget;
        let dropped = budget.dropped;
        probes::slow(&record);
        if budget.take(self.now) {
            budget.dropped = 0;
            self.actions.push_back(Action::Slow(Box::new(Record { dropped, ..record })));
        }
    }

    /// The oldest job that the sweep has not told of.
    fn watched(&self) -> Option<&Job> {
        self.jobs.first_from(self.trace.cursor, |job| self.trace.is_watched(job.trace))
    }

    /// When something under way comes over the threshold, if nothing happens before.
    pub(super) fn trace_deadline(&self) -> Option<Time> {
        let job = self.watched().and_then(|job| self.trace.get(job.trace)).map(|timeline| timeline.base);
        let oldest = job.into_iter().chain(self.requests.unreported()).min()?;
        Some(oldest.after(self.trace.threshold).max(self.trace.swept.after(SWEEP_EVERY)))
    }

    /// Tells of what has come over the threshold.
    pub(super) fn sweep_slow(&mut self) {
        let now = self.now;
        if now < self.trace.swept.after(SWEEP_EVERY) {
            return;
        }
        self.trace.swept = now;
        self.trace.cursor = self.watched().map_or_else(|| self.jobs.next_id(), |job| job.id);
        while let Some(job) = self.watched() {
            let (id, slot) = (job.id, job.trace);
            let overdue = self.trace.get(slot).filter(|timeline| self.trace.is_overdue(timeline, now));
            let Some(&timeline) = overdue else { break };
            let record = self.trace.numbered(now, Why::InFlight, false, timeline);
            if let Some(timeline) = self.trace.get_mut(slot) {
                timeline.record = record.timeline.record;
            }
            self.trace.cursor = JobId(id.0 + 1);
            self.give_out(record);
        }
        while let Some(timeline) = self.requests.next_unreported(now, self.trace.threshold) {
            let record = self.trace.numbered(now, Why::InFlight, false, timeline);
            self.requests.set_reported(record.timeline.record);
            self.give_out(record);
        }
    }

    /// A request that has a record, and no job, was answered.
    pub(super) fn end_unstarted(&mut self, mut timeline: Timeline, failed: bool) {
        timeline.settle(self.now, failed);
        let record = self.trace.record(self.now, Why::Guest, true, timeline);
        self.give_out(record);
    }

    /// What is to be read of slow jobs: the slowest of the last hour that guests waited for, then those that only a replica was slow with,
    /// and before both what is over the threshold and under way, the oldest first.
    pub fn slow_records(&self, now: Time) -> Vec<Record> {
        let mut records: Vec<Record> = self
            .in_flight_records(now)
            .into_iter()
            .filter(|record| record.timeline.record != 0)
            .take(LISTED_SLOW_MAX)
            .collect();
        records.extend(self.trace.slowest.list(now));
        for record in self.trace.slowest_replica.list(now) {
            if !records.iter().any(|other| other.timeline.job == record.timeline.job) {
                records.push(record);
            }
        }
        records
    }

    /// What is under way, the oldest first: jobs that are not settled or that some replica owes, and requests without a job yet. At most
    /// [`LISTED_MAX`].
    pub fn in_flight_records(&self, now: Time) -> Vec<Record> {
        let record = |timeline| self.trace.record(now, Why::InFlight, false, timeline);
        let jobs = self.jobs.iter().filter_map(|job| self.trace.get(job.trace).copied()).take(LISTED_MAX);
        let waiting = self.requests.without_job(LISTED_MAX);
        let mut timelines: Vec<Timeline> = jobs.chain(waiting).collect();
        timelines.sort_by_key(|timeline| timeline.base);
        timelines.truncate(LISTED_MAX);
        timelines.into_iter().map(record).collect()
    }

    /// How long jobs took since the start.
    pub fn stages(&self) -> Option<Ref<'_, Stages>> {
        // Whoever still looks at them has seen all there was.
        if let Ok(mut stages) = self.trace.stages.try_borrow_mut() {
            stages.count();
        }
        Some(self.trace.stages.borrow())
    }

    /// Cheap, and true if timelines are kept for exactly the guests' jobs in the table.
    pub(super) fn trace_is_sound(&self) -> bool {
        let live = self.trace.slab.len() - self.trace.free.len();
        let traced = |job: &&Job| job.trace != Slot::NONE;
        live == self.jobs.iter().filter(traced).count()
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use allocation_counter::measure;

    use super::*;
    use crate::core::tests_world::config;

    const JOBS: u64 = 10_000;

    /// A write from its begin to its end. The even ones are a little slower each time, so that each is one of the slowest; the odd
    /// ones are as fast as the first, so that nobody is told of them.
    fn trace_one(tracer: &mut Tracer, number: u64) {
        let slower = if number.is_multiple_of(2) { number / 100 } else { 0 };
        let base = Time(number * 1_000_000);
        let at = |us: u64| Time(base.0 + us * 1_000);
        let timeline =
            Timeline { job: JobId(number), base, operation: Operation::Write, ..Timeline::default() };
        let slot = tracer.begin(timeline);
        for replica in ReplicaId::ALL {
            tracer.sent(slot, at(1), replica, false);
        }
        for replica in ReplicaId::ALL {
            let times = StageTimes { queued_us: 1, submit_us: 2, device_us: 100 };
            tracer.replied(slot, at(150 + slower), replica, times, true);
            if replica.index() == 1 {
                tracer.answered(slot);
                tracer.settled(slot, at(150 + slower), false);
            }
        }
        assert_eq!(tracer.ended(slot, at(200 + slower)), None, "it is below the threshold");
    }

    #[test]
    fn a_job_allocates_nothing() {
        let config = config();
        let mut tracer = Tracer::new(&config.trace, &config.limits, Time(0));
        (0..JOBS).for_each(|number| trace_one(&mut tracer, number));
        let steady = measure(|| (JOBS..2 * JOBS).for_each(|number| trace_one(&mut tracer, number)));
        assert_eq!(steady.count_total, 0, "{steady:?}");
        assert_eq!(
            (tracer.status().untraced, tracer.slab.len()),
            (0, 1),
            "each was traced, in the same place"
        );
        let kept = tracer.slowest.list(Time(2 * JOBS * 1_000_000));
        let number = |record: &Record| record.timeline.job.0;
        assert!(kept.iter().all(|record| number(record).is_multiple_of(2)), "{kept:?}");
        assert!(
            kept.iter().any(|record| number(record) >= 2 * JOBS - 100),
            "the last step is among them: {kept:?}"
        );
        // The counter counts.
        let control = measure(|| (0..JOBS).for_each(|_| drop(black_box(Box::new(Timeline::default())))));
        assert_eq!(control.count_total, JOBS);
    }
}
