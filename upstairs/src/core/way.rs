//! The way of a job, step by step: what a guest waited for, what a replica took, and which step took longest.
//!
//! Invariants:
//! - The steps follow one another without a gap, so their times add up to the whole.
//! - A guest waits for the replica whose answer was the one still needed; what the others did later is no part of its way.
//!
//! Made only for those who look, from a [`Timeline`].

use super::api::{ReplicaId, Time};
use super::timeline::{Mark, Ticks, Timeline, What};

/// Where time goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// From the guest's socket to admission: behind a full volume, or no quorum is in service.
    Admission,
    /// Until its turn: locked blocks, partial blocks that are read first, pieces of the same request before it.
    Preparation,
    /// Kept back by the lead throttle.
    Throttle,
    /// Another replica was asked first: it left, had a bad copy, or was late.
    Retry,
    /// The replica's connection broke while it had the job; until it was sent again.
    Reconnect,
    /// The replica that was needed was not there.
    Away,
    /// From sending to the answer, without what the replica says it took.
    Network,
    /// At the replica, before it went to the disk: overlapping jobs, the activity log, and the bound of reads at the disk.
    Queue,
    /// From the replica's queue until the kernel had taken it.
    Submit,
    Device,
    /// Sent, and no answer.
    NoReply,
    /// A read's answer shows a write that isn't acknowledged.
    Held,
    /// Executed by a replica that counts only once it has caught up.
    CatchUp,
}

impl Stage {
    pub fn name(self) -> &'static str {
        match self {
            Self::Admission => "admission",
            Self::Preparation => "preparation",
            Self::Throttle => "throttle",
            Self::Retry => "retry",
            Self::Reconnect => "reconnect",
            Self::Away => "away",
            Self::Network => "network",
            Self::Queue => "queue",
            Self::Submit => "submit",
            Self::Device => "device",
            Self::NoReply => "no_reply",
            Self::Held => "held",
            Self::CatchUp => "catch_up",
        }
    }
}

/// One step of a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub stage: Stage,
    pub replica: Option<ReplicaId>,
    pub took: Ticks,
}

/// The steps of a way, one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Way(Vec<Step>);

/// Which step took longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub stage: Stage,
    pub replica: Option<ReplicaId>,
    pub took: Ticks,
    /// Of so much.
    pub of: Ticks,
}

impl Timeline {
    /// What the guest waited for, step by step.
    pub fn guests_way(&self, now: Time) -> Way {
        let end = self.total(now);
        let mut way = Way::default();
        let Some(admitted) = self.admitted.get() else { return way.to(end, Stage::Admission, None) };
        way = way.to(admitted, Stage::Admission, None);
        let Some(numbered) = self.numbered.get() else { return way.to(end, Stage::Preparation, None) };
        way = way.to(numbered, Stage::Preparation, None);
        let unsent = if self.is_read() { Stage::Throttle } else { Stage::Away };
        let Some(first) = self.first_sent() else { return way.to(end, unsent, None) };
        way = way.to(first, unsent, None);
        let Some(id) = self.settled.get().and(self.decider).or_else(|| self.holds_up()) else {
            return way.to(end, Stage::NoReply, None);
        };
        let lane_from = self.lanes[id.index()].first_sent.get().unwrap_or(first).max(first);
        way = match (self.is_read(), self.asked_before(lane_from)) {
            (false, _) => way.to(lane_from, Stage::Away, Some(id)),
            (true, Some(other)) => way.to(lane_from, Stage::Retry, Some(other)),
            (true, None) => way.to(lane_from, Stage::Throttle, None),
        };
        way = self.along_lane(way, id, end);
        let waits = if self.is_read() { Stage::Held } else { Stage::CatchUp };
        let by = if self.is_read() { id } else { self.uncounted().unwrap_or(id) };
        way.to(end, waits, Some(by))
    }

    /// What one replica did with it, until it answered or left.
    pub fn lanes_way(&self, now: Time, id: ReplicaId) -> Way {
        let lane = &self.lanes[id.index()];
        let Some(first) = lane.first_sent.get() else { return Way::default() };
        let way = Way(vec![Step { stage: Stage::Admission, replica: None, took: first }]);
        let end = Ticks(first.0.saturating_add(lane.took(self.ticks(now)).0));
        let mut way = self.along_lane(way, id, end);
        way.0.remove(0);
        way
    }

    /// From the first sending there to the answer, or until `end`.
    fn along_lane(&self, mut way: Way, id: ReplicaId, end: Ticks) -> Way {
        let lane = &self.lanes[id.index()];
        let by = Some(id);
        let (Some(sent), until) = (lane.sent.get(), |stamp: Ticks| stamp.min(end)) else { return way };
        way = way.to(until(sent), Stage::Reconnect, by);
        if let Some(lost) = lane.lost.get() {
            return way.to(until(lost), Stage::NoReply, by).to(end, Stage::Reconnect, by);
        }
        let Some(replied) = lane.replied.get() else { return way.to(end, Stage::NoReply, by) };
        let replied = until(replied);
        // The network comes first, so that the clocks of two hosts, which don't agree to the µs, give no more than there is.
        let mut at = sent.0.saturating_add(lane.network().0);
        way = way.to(Ticks(at).min(replied), Stage::Network, by);
        for (took, stage) in
            [(lane.queue, Stage::Queue), (lane.submit, Stage::Submit), (lane.device, Stage::Device)]
        {
            at = at.saturating_add(took.0);
            way = way.to(Ticks(at).min(replied), stage, by);
        }
        way.to(replied, Stage::Network, by)
    }

    /// Which replica an unsettled job waits for: of those that owe the one that has had it longest, else the last that left.
    fn holds_up(&self) -> Option<ReplicaId> {
        let lane = |id: &ReplicaId| &self.lanes[id.index()];
        let owes = ReplicaId::ALL.into_iter().filter(|id| lane(id).owes());
        let left = ReplicaId::ALL.into_iter().filter(|id| lane(id).lost.is_set());
        owes.min_by_key(|id| lane(id).first_sent.get())
            .or_else(|| left.max_by_key(|id| lane(id).lost.get()))
            .or_else(|| self.last_to_reply())
    }

    /// The replica whose leaving, bad copy or lateness made another one be asked at this moment.
    fn asked_before(&self, asked: Ticks) -> Option<ReplicaId> {
        let reasons = |mark: &&Mark| match mark.what {
            What::Left | What::BadCopy | What::Failed => mark.at <= asked,
            What::AskedToo
            | What::SentAgain
            | What::SentToJoiner
            | What::Cancelled
            | What::QuorumLost
            | What::QuorumRegained
            | What::NewGeneration => false,
        };
        let late = || {
            let asked_too = self.marks().iter().any(|mark| mark.what == What::AskedToo && mark.at == asked);
            let had = |id: &ReplicaId| {
                let lane = &self.lanes[id.index()];
                lane.first_sent.get().is_some_and(|sent| sent < asked)
                    && lane.replied.get().is_none_or(|replied| replied > asked)
            };
            ReplicaId::ALL.into_iter().find(|id| asked_too && had(id))
        };
        self.marks().iter().filter(reasons).find_map(|mark| mark.replica).or_else(late)
    }

    /// A replica that has executed it and did not count then.
    fn uncounted(&self) -> Option<ReplicaId> {
        ReplicaId::ALL.into_iter().find(|id| {
            let lane = &self.lanes[id.index()];
            lane.replied.is_set() && !lane.counted
        })
    }
}

impl Way {
    /// Goes on to this moment. What lies behind already is no step.
    fn to(mut self, moment: Ticks, stage: Stage, replica: Option<ReplicaId>) -> Self {
        let took = moment.since(self.whole());
        if took > Ticks(0) {
            match self.0.last_mut() {
                Some(last) if last.stage == stage && last.replica == replica => last.took.0 += took.0,
                Some(_) | None => self.0.push(Step { stage, replica, took }),
            }
        }
        self
    }

    pub fn steps(&self) -> &[Step] {
        &self.0
    }

    pub fn whole(&self) -> Ticks {
        Ticks(self.0.iter().map(|step| step.took.0).fold(0, u32::saturating_add))
    }

    /// The stage and replica that took the most of it.
    pub fn verdict(&self) -> Option<Verdict> {
        let sum = |step: &Step| {
            let same =
                self.0.iter().filter(|other| (other.stage, other.replica) == (step.stage, step.replica));
            Ticks(same.map(|other| other.took.0).fold(0, u32::saturating_add))
        };
        let longest = self.0.iter().max_by_key(|step| sum(step))?;
        Some(Verdict { stage: longest.stage, replica: longest.replica, took: sum(longest), of: self.whole() })
    }
}

#[cfg(test)]
mod tests {
    use newel_protocol::wire::StageTimes;

    use super::*;
    use crate::core::timeline::{Operation, Stamp};

    const MS: u64 = 1_000_000;
    const R: [ReplicaId; 3] = ReplicaId::ALL;

    fn at(ms: u64) -> Time {
        Time(7_000 * MS + ms * MS)
    }

    fn job(operation: Operation) -> Timeline {
        let mut timeline = Timeline { base: at(0), operation, ..Timeline::default() };
        timeline.admitted = Stamp::at(Ticks(0));
        timeline.numbered = Stamp::at(Ticks(0));
        timeline
    }

    fn times(queued_ms: u32, submit_ms: u32, device_ms: u32) -> StageTimes {
        let us = |ms: u32| ms * 1000;
        StageTimes { queued_us: us(queued_ms), submit_us: us(submit_ms), device_us: us(device_ms) }
    }

    /// The steps of what the guest waited for, in ms.
    #[track_caller]
    fn check(timeline: &Timeline, now: u64, expected: &[(Stage, Option<u8>, u64)]) {
        let way = timeline.guests_way(at(now));
        let ms = |ticks: Ticks| (ticks.nanos() + MS / 2) / MS;
        // What is left of a ms is the grain of the stamps.
        let seen = way.steps().iter().filter(|step| ms(step.took) > 0);
        let steps: Vec<_> =
            seen.map(|step| (step.stage, step.replica.map(|id| id.0), ms(step.took))).collect();
        assert_eq!(steps, expected);
        assert_eq!(way.whole(), timeline.total(at(now)), "the steps add up");
    }

    #[test]
    fn a_write_is_as_slow_as_the_second_of_three() {
        let mut write = job(Operation::Write);
        R.iter().for_each(|&id| write.sent(at(2), id));
        write.replied(at(5), R[0], times(0, 0, 2), true);
        write.replied(at(900), R[1], times(10, 100, 780), true);
        write.settle(at(900), false);
        check(
            &write,
            2000,
            &[
                (Stage::Away, None, 2),
                (Stage::Network, Some(1), 8),
                (Stage::Queue, Some(1), 10),
                (Stage::Submit, Some(1), 100),
                (Stage::Device, Some(1), 780),
            ],
        );
        let verdict = write.guests_way(at(2000)).verdict().unwrap();
        assert_eq!((verdict.stage, verdict.replica), (Stage::Device, Some(R[1])));
        // The third is slower still, and the guest has no part in that.
        let (slowest, took) = write.slowest_lane(at(2000));
        assert_eq!((slowest, took.micros() / 1000), (R[2], 1998));
        assert_eq!(write.lanes_way(at(2000), R[2]).verdict().unwrap().stage, Stage::NoReply);
    }

    #[test]
    fn what_comes_before_a_replica_is_told_apart() {
        let mut read = job(Operation::Read);
        read.admitted = Stamp::at(read.ticks(at(30)));
        check(&Timeline { admitted: Stamp::NEVER, ..read }, 20, &[(Stage::Admission, None, 20)]);
        read.numbered = Stamp::at(read.ticks(at(50)));
        check(
            &read,
            60,
            &[(Stage::Admission, None, 30), (Stage::Preparation, None, 20), (Stage::Throttle, None, 10)],
        );
        read.sent(at(70), R[0]);
        // The fastest one gets it later, as the throttle wants it, and answers first all the same.
        read.sent(at(90), R[1]);
        read.replied(at(91), R[1], times(0, 0, 1), true);
        read.settle(at(95), false);
        check(
            &read,
            99,
            &[
                (Stage::Admission, None, 30),
                (Stage::Preparation, None, 20),
                (Stage::Throttle, None, 40),
                (Stage::Device, Some(1), 1),
                (Stage::Held, Some(1), 4),
            ],
        );
    }

    #[test]
    fn a_replica_cut_off_shows_both_attempts() {
        let mut write = job(Operation::Write);
        write.sent(at(0), R[0]);
        write.sent(at(0), R[2]);
        write.replied(at(1), R[0], times(0, 0, 1), true);
        check(&write, 800, &[(Stage::NoReply, Some(2), 800)]);
        write.lost(at(1000), R[2]);
        check(&write, 2000, &[(Stage::NoReply, Some(2), 1000), (Stage::Reconnect, Some(2), 1000)]);
        write.sent(at(3100), R[2]);
        write.replied(at(3110), R[2], times(0, 0, 5), false);
        write.settle(at(3200), false);
        check(
            &write,
            9000,
            &[
                (Stage::Reconnect, Some(2), 3100),
                (Stage::Network, Some(2), 5),
                (Stage::Device, Some(2), 5),
                (Stage::CatchUp, Some(2), 90),
            ],
        );
        let marks: Vec<_> = write.marks().iter().map(|mark| mark.what).collect();
        assert_eq!((marks, write.lanes[2].attempts), (vec![What::Left, What::SentAgain], 2));
    }

    #[test]
    fn a_read_asked_elsewhere_blames_the_first() {
        let mut read = job(Operation::Read);
        read.sent(at(0), R[0]);
        read.lost(at(500), R[0]);
        read.sent(at(500), R[1]);
        read.replied(at(510), R[1], times(0, 0, 10), true);
        read.settle(at(510), false);
        check(&read, 999, &[(Stage::Retry, Some(0), 500), (Stage::Device, Some(1), 10)]);

        let mut late = job(Operation::Read);
        late.sent(at(0), R[0]);
        late.mark(at(50), What::AskedToo, Some(R[1]));
        late.sent(at(50), R[1]);
        late.replied(at(60), R[1], times(0, 0, 10), true);
        late.settle(at(60), false);
        check(&late, 999, &[(Stage::Retry, Some(0), 50), (Stage::Device, Some(1), 10)]);
    }

    #[test]
    fn a_replica_that_was_not_there_is_named() {
        let mut write = job(Operation::Write);
        write.sent(at(0), R[0]);
        write.replied(at(1), R[0], times(0, 0, 1), true);
        write.mark(at(0), What::QuorumLost, None);
        write.sent(at(8000), R[1]);
        write.replied(at(8010), R[1], times(0, 0, 10), true);
        write.settle(at(8010), false);
        check(&write, 9999, &[(Stage::Away, Some(1), 8000), (Stage::Device, Some(1), 10)]);
    }
}
