//! A slow job as people and programs see it: the JSON of the slow-I/O log, `GET /slow` and `GET /inflight`, and the verdict in words.
//!
//! Times are in µs, and count from when the request was read off the guest's socket. Made from a [`Record`] by whoever shows it, never
//! where jobs are handled.

use serde::{Deserialize, Serialize};

use super::api::ReplicaId;
use super::timeline::{Lane, Mark, Record, Stamp, Ticks, Timeline, What, Why};
use super::way::{Stage, Step, Verdict, Way};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlowIo {
    /// Counts records since the start of the upstairs; 0 if it was never over the threshold. A job that was told of while it was
    /// under way is told of again under the same number once it has ended.
    pub id: u32,
    /// `guest`: the guest waited for longer than the threshold. `replica`: only a replica took longer. `in_flight`: it is still under
    /// way. `slowest`: it is below the threshold.
    pub why: String,
    pub ended: bool,
    pub volume: String,
    /// When the request was read off the guest's socket.
    pub received_unix_us: u64,
    /// `None`: the request waits, and has no job yet.
    pub job: Option<u64>,
    /// Counts guest requests; jobs of one request have the same.
    pub request: u64,
    /// `read`, `write`, `zero` or `flush`.
    pub operation: String,
    pub offset: u64,
    pub length: u64,
    /// What the guest waited, so far.
    pub total_us: u64,
    /// True if it was answered with an error.
    pub failed: bool,
    pub admitted_us: Option<u64>,
    pub numbered_us: Option<u64>,
    /// Acknowledged or answered.
    pub settled_us: Option<u64>,
    pub replicas: Vec<SlowReplica>,
    pub events: Vec<SlowEvent>,
    /// Events that there was no place for, before the last one.
    pub events_lost: u16,
    /// What `verdict` is about, step by step.
    pub steps: Vec<SlowStep>,
    pub verdict: SlowVerdict,
    /// Records that were left out before this one, as there were too many.
    pub dropped_before: u64,
}

/// What a replica to which the job was sent did with it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlowReplica {
    pub replica: u8,
    pub attempts: u8,
    pub first_sent_us: u64,
    /// Of the last attempt, as all that follows.
    pub sent_us: u64,
    pub replied_us: Option<u64>,
    /// It left while it owed the answer.
    pub left_us: Option<u64>,
    pub network_us: u64,
    pub queue_us: u64,
    pub submit_us: u64,
    pub device_us: u64,
    /// Its answer was the one that was needed last.
    pub decided: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlowEvent {
    pub at_us: u64,
    /// `left`, `sent_again`, `sent_to_joiner`, `bad_copy`, `failed`, `asked_too`, `cancelled`, `quorum_lost`, `quorum_regained`,
    /// `new_generation`.
    pub what: String,
    pub replica: Option<u8>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlowStep {
    /// `admission`, `preparation`, `throttle`, `retry`, `reconnect`, `away`, `network`, `queue`, `submit`, `device`, `no_reply`, `held`,
    /// `catch_up`: see the README.
    pub stage: String,
    pub replica: Option<u8>,
    pub took_us: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlowVerdict {
    pub stage: String,
    pub replica: Option<u8>,
    pub took_us: u64,
    pub of_us: u64,
    /// Of the whole: 0 to 1.
    pub share: f64,
    /// Such as `replica 2, device, 9.98 s of 10.0 s; requeued by a reconnect at 3.1 s`.
    pub text: String,
}

impl SlowIo {
    /// `now_unix_us`: the time of day at the moment of the record.
    pub fn new(record: &Record, volume: &str, now_unix_us: u64) -> Self {
        let Record { id, why, ended, now, dropped, timeline } = *record;
        let way = match why {
            Why::Replica => timeline.lanes_way(now, timeline.slowest_lane(now).0),
            // Settled, but a replica still has it: that one is what is under way.
            Why::InFlight if timeline.settled.is_set() => timeline.lanes_way(now, owing(&timeline)),
            Why::InFlight | Why::Guest | Why::Slowest => timeline.guests_way(now),
        };
        let age = u64::try_from(now.since(timeline.base).as_micros()).unwrap_or(u64::MAX);
        let us = |stamp: Stamp| stamp.get().map(Ticks::micros);
        Self {
            id,
            why: why.name().to_owned(),
            ended,
            volume: volume.to_owned(),
            received_unix_us: now_unix_us.saturating_sub(age),
            job: (timeline.job.0 > 0).then_some(timeline.job.0),
            request: timeline.request,
            operation: timeline.operation.name().to_owned(),
            offset: timeline.offset,
            length: timeline.length,
            total_us: timeline.settled.get().map_or(age, Ticks::micros),
            failed: timeline.failed,
            admitted_us: us(timeline.admitted),
            numbered_us: us(timeline.numbered),
            settled_us: us(timeline.settled),
            replicas: ReplicaId::ALL.into_iter().filter_map(|id| replica(&timeline, id)).collect(),
            events: timeline.marks().iter().map(event).collect(),
            events_lost: timeline.marks_lost,
            steps: way.steps().iter().map(step).collect(),
            verdict: way.verdict().map(|found| verdict(&timeline, found, &way)).unwrap_or_default(),
            dropped_before: dropped,
        }
    }
}

/// The replica that has owed the answer for longest.
fn owing(timeline: &Timeline) -> ReplicaId {
    let sent = |id: &ReplicaId| timeline.lanes[id.index()].first_sent.get();
    let owes = ReplicaId::ALL.into_iter().filter(|id| timeline.lanes[id.index()].owes());
    owes.min_by_key(sent).unwrap_or(ReplicaId(0))
}

fn replica(timeline: &Timeline, id: ReplicaId) -> Option<SlowReplica> {
    let lane: &Lane = &timeline.lanes[id.index()];
    Some(SlowReplica {
        replica: id.0,
        attempts: lane.attempts,
        first_sent_us: lane.first_sent.get()?.micros(),
        sent_us: lane.sent.get()?.micros(),
        replied_us: lane.replied.get().map(Ticks::micros),
        left_us: lane.lost.get().map(Ticks::micros),
        network_us: lane.network().micros(),
        queue_us: lane.queue.micros(),
        submit_us: lane.submit.micros(),
        device_us: lane.device.micros(),
        decided: timeline.decider == Some(id),
    })
}

fn event(mark: &Mark) -> SlowEvent {
    SlowEvent {
        at_us: mark.at.micros(),
        what: mark.what.name().to_owned(),
        replica: mark.replica.map(|id| id.0),
    }
}

fn step(step: &Step) -> SlowStep {
    SlowStep {
        stage: step.stage.name().to_owned(),
        replica: step.replica.map(|id| id.0),
        took_us: step.took.micros(),
    }
}

fn verdict(timeline: &Timeline, found: Verdict, way: &Way) -> SlowVerdict {
    let Verdict { stage, replica, took, of } = found;
    let by = replica.map_or_else(String::new, |id| format!("replica {id}, "));
    let mut text = format!("{by}{}, {} of {}", in_words(stage), seconds(took), seconds(of));
    let concerns = |mark: &&Mark| {
        let on_way = way.steps().iter().any(|step| step.replica.is_some() && step.replica == mark.replica);
        mark.replica.is_none() || on_way
    };
    let (mut requeued, mut left) = (false, None);
    for mark in timeline.marks().iter().filter(concerns) {
        let at = seconds(mark.at);
        let id = mark.replica.unwrap_or(ReplicaId(0));
        match mark.what {
            What::SentAgain => {
                requeued = true;
                text += &format!("; requeued by a reconnect at {at}");
            }
            What::Left => left = Some((id, at)),
            What::BadCopy => text += &format!("; replica {id} had a bad copy at {at}"),
            What::Failed => text += &format!("; replica {id} failed it at {at}"),
            What::QuorumLost => text += &format!("; quorum lost at {at}"),
            What::NewGeneration => text += &format!("; sent anew in a new generation at {at}"),
            What::AskedToo | What::Cancelled | What::SentToJoiner | What::QuorumRegained => {}
        }
    }
    if let Some((id, at)) = left.filter(|_| !requeued) {
        text += &format!("; replica {id} left at {at}");
    }
    let share = if of.0 == 0 { 0.0 } else { f64::from(took.0) / f64::from(of.0) };
    SlowVerdict {
        stage: stage.name().to_owned(),
        replica: replica.map(|id| id.0),
        took_us: took.micros(),
        of_us: of.micros(),
        share,
        text,
    }
}

fn in_words(stage: Stage) -> &'static str {
    match stage {
        Stage::Admission => "waiting for admission",
        Stage::Preparation => "waiting for its turn",
        Stage::Throttle => "kept back by the throttle",
        Stage::Retry => "asked first, without a good answer",
        Stage::Reconnect => "reconnecting",
        Stage::Away => "not enough replicas there",
        Stage::Network => "network",
        Stage::Queue => "queue",
        Stage::Submit => "submit",
        Stage::Device => "device",
        Stage::NoReply => "no answer",
        Stage::Held => "held until what it shows is acknowledged",
        Stage::CatchUp => "catching up",
    }
}

/// Three digits: 9.98 s, 12.3 ms, 456 µs.
fn seconds(ticks: Ticks) -> String {
    us_in_words(ticks.micros())
}

/// A time with three digits, such as 9.98 s, 12.3 ms or 456 µs.
pub fn us_in_words(us: u64) -> String {
    let (value, unit) = match us {
        0..1_000 => return format!("{us} µs"),
        // What rounds up to 1000 ms is a second.
        1_000..999_500 => (us as f64 / 1e3, "ms"),
        _ => (us as f64 / 1e6, "s"),
    };
    let digits = match value {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use newel_protocol::wire::StageTimes;

    use super::*;
    use crate::core::api::Time;
    use crate::core::timeline::Operation;

    const MS: u64 = 1_000_000;

    fn at(ms: u64) -> Time {
        Time(5_000 * MS + ms * MS)
    }

    #[test]
    fn times_have_three_digits() {
        let check = |us, text: &str| assert_eq!(us_in_words(us), text);
        check(0, "0 µs");
        check(456, "456 µs");
        check(1_234, "1.23 ms");
        check(12_345, "12.3 ms");
        check(999_499, "999 ms");
        check(999_700, "1.00 s");
        check(9_980_000, "9.98 s");
        check(9_999_000, "10.0 s");
        check(123_456_000, "123 s");
    }

    #[test]
    fn one_slow_write_names_its_culprit() {
        let mut write = Timeline { base: at(0), operation: Operation::Write, ..Timeline::default() };
        (write.admitted, write.numbered) = (Stamp::at(Ticks(0)), Stamp::at(Ticks(0)));
        write.sent(at(0), ReplicaId(0));
        write.sent(at(0), ReplicaId(2));
        let ok = StageTimes { queued_us: 0, submit_us: 3, device_us: 80 };
        write.replied(at(1), ReplicaId(0), ok, true);
        write.lost(at(10), ReplicaId(2));
        write.sent(at(20), ReplicaId(2));
        let slow = StageTimes { queued_us: 10, submit_us: 3, device_us: 9_978_000 };
        write.replied(at(10_000), ReplicaId(2), slow, true);
        write.settle(at(10_000), false);
        let record =
            Record { id: 4, why: Why::Guest, ended: true, now: at(12_000), dropped: 7, timeline: write };
        let slow = SlowIo::new(&record, "db", 1_790_000_000_000_000);
        assert_eq!(
            slow.verdict.text,
            "replica 2, device, 9.98 s of 10.0 s; requeued by a reconnect at 20.0 ms"
        );
        assert_eq!((slow.total_us, slow.received_unix_us), (10_000_000, 1_789_999_988_000_000));
        assert_eq!((slow.verdict.replica, slow.verdict.stage.as_str()), (Some(2), "device"));
        assert!(slow.verdict.share > 0.99 && slow.dropped_before == 7);
        assert_eq!(slow.replicas.iter().map(|replica| replica.attempts).collect::<Vec<_>>(), [1, 2]);
        let steps: u64 = slow.steps.iter().map(|step| step.took_us).sum();
        assert!(slow.total_us - steps < 10, "{slow:?}");
    }
}
