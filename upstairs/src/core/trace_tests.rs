//! Each stage in turn, against replicas in memory: the record names it, and its replica.

#![cfg(feature = "trace")]

use bytes::Bytes;
use newel_protocol::JobId;
use newel_protocol::wire::{Reply, Request, StageTimes};

use super::Core;
use super::api::{Event, GuestId, GuestOp, ReplicaId, Time};
use super::slow::SlowIo;
use super::tests_world::{MS, World, config};
use super::timeline::{Record, What, Why};

fn write(block: u64) -> GuestOp {
    GuestOp::Write { offset: block * 4096, data: Bytes::from(vec![7; 4096]), fua: false }
}

fn read(block: u64) -> GuestOp {
    GuestOp::Read { offset: block * 4096, length: 4096 }
}

fn told(record: &Record) -> SlowIo {
    SlowIo::new(record, "db", 0)
}

impl World {
    fn pause(&mut self, replica: usize, paused: bool) {
        self.fakes[replica].paused = paused;
        self.settle();
    }

    /// The records that were given out since the last call.
    fn records(&mut self) -> Vec<SlowIo> {
        std::mem::take(&mut self.slow).iter().map(told).collect()
    }

    /// The last record of those that ended.
    #[track_caller]
    fn ended(&mut self) -> SlowIo {
        let records = self.records();
        let ended = records.iter().rfind(|record| record.ended);
        ended.unwrap_or_else(|| panic!("none has ended: {records:#?}")).clone()
    }
}

#[track_caller]
fn check(record: &SlowIo, stage: &str, replica: Option<u8>) {
    assert_eq!((record.verdict.stage.as_str(), record.verdict.replica), (stage, replica), "{record:#?}");
    assert!(record.verdict.share > 0.9, "{record:#?}");
}

#[test]
fn a_fast_job_is_no_news_and_is_among_the_slowest() {
    let mut world = World::serving();
    world.write(0, &[1; 4096]);
    world.read(0, 4096);
    world.run(5_000);
    assert!(world.records().is_empty());
    let slowest = world.core.slow_records(Time(world.now));
    assert_eq!(slowest.len(), 2);
    assert!(slowest.iter().all(|record| record.why == Why::Slowest && record.ended && record.id == 0));
    assert!(world.core.in_flight_records(Time(world.now)).is_empty());
    // Nothing is under way, so nothing is looked at.
    assert_eq!(world.core.trace_deadline(), None);
}

#[test]
fn what_waits_behind_a_full_volume_says_so() {
    let limits = super::config::Limits { volume_jobs: 8, ..config().limits };
    let mut world = World::with(super::config::CoreConfig { limits, ..config() });
    world.run(1_000);
    (0..3).for_each(|replica| world.fakes[replica].paused = true);
    for block in 0..9 {
        world.submit(write(block));
    }
    world.run(2_000);
    let early: Vec<SlowIo> = world.records();
    assert!(early.iter().any(|record| record.job.is_none() && !record.ended), "it is told of while it waits");
    (0..3).for_each(|replica| world.fakes[replica].paused = false);
    world.settle();
    let last = world.ended();
    check(&last, "admission", None);
    let waited = early.iter().find(|record| record.job.is_none()).unwrap();
    assert_eq!((last.id, last.offset), (waited.id, 8 * 4096), "one record, from waiting to its end");
}

#[test]
fn what_waits_for_a_lock_says_so() {
    let mut world = World::serving();
    world.write(0, &[1; 4096]);
    (0..3).for_each(|replica| world.fakes[replica].paused = true);
    // Part of a block: it is read first, and locked meanwhile.
    world.submit(GuestOp::Write { offset: 10, data: Bytes::from_static(b"abc"), fua: false });
    world.submit(write(0));
    world.run(2_000);
    assert!(world.core.in_flight_records(Time(world.now)).iter().any(|record| told(record).job.is_none()));
    (0..3).for_each(|replica| world.fakes[replica].paused = false);
    world.settle();
    let records = world.records();
    let waited = records.iter().filter(|record| record.verdict.stage == "preparation" && record.ended);
    assert_eq!(waited.count(), 2, "the write of the partial block, and what came behind: {records:#?}");
}

#[test]
fn a_replica_that_says_nothing_is_told_of_while_it_does_and_once_more_at_the_end() {
    let mut world = World::serving();
    world.pause(2, true);
    world.submit(write(0));
    world.run(900);
    assert!(world.records().is_empty());
    world.run(300);
    let early = world.records();
    assert_eq!(early.len(), 1);
    check(&early[0], "no_reply", Some(2));
    assert_eq!((early[0].why.as_str(), early[0].ended), ("in_flight", false));
    assert_eq!(world.core.slow_records(Time(world.now)).first().map(|record| record.id), Some(early[0].id));
    world.run(2_000);
    assert!(world.records().is_empty(), "once is enough");
    world.pause(2, false);
    let last = world.ended();
    assert_eq!((last.id, last.why.as_str()), (early[0].id, "replica"));
    check(&last, "network", Some(2));
    assert!(last.total_us < 1_000, "the guest did not wait");
    assert!(world.core.slow_records(Time(world.now)).iter().any(|record| record.id == last.id));
}

/// Lets one replica answer its one job with these times, after so many ms.
fn answer_with(world: &mut World, replica: usize, after_ms: u64, times: StageTimes) {
    world.run(after_ms);
    let fake = &mut world.fakes[replica];
    let place = fake.inbox.iter().position(|(request, _)| matches!(request, Request::Job { .. })).unwrap();
    let Some((Request::Job { job, .. }, _)) = fake.inbox.remove(place) else { panic!() };
    let id = ReplicaId(u8::try_from(replica).unwrap());
    let reply = Reply::Done { job, result: Ok(()), times, states: Vec::new() };
    let link = fake.link.unwrap();
    world.core.handle(Time(world.now), Event::Reply { replica: id, link, reply, payload: Bytes::new() });
    world.drain_actions();
}

#[test]
fn a_replica_s_own_stages_are_named() {
    let us = 1_900_000;
    for (times, stage) in [
        (StageTimes { queued_us: us, ..StageTimes::default() }, "queue"),
        (StageTimes { submit_us: us, ..StageTimes::default() }, "submit"),
        (StageTimes { device_us: us, ..StageTimes::default() }, "device"),
        (StageTimes::default(), "network"),
    ] {
        let mut world = World::serving();
        (1..3).for_each(|replica| world.fakes[replica].paused = true);
        world.submit(write(0));
        world.settle();
        answer_with(&mut world, 1, 2_000, times);
        world.pause(2, false);
        let last = world.ended();
        check(&last, stage, Some(1));
        assert_eq!(last.why, "guest");
        let stages = world.core.stages().unwrap();
        let status = world.core.status();
        let latency = &status.replicas[1].latency[0];
        let found = latency.stages.iter().find(|found| found.stage == stage).unwrap();
        assert!(found.sum_us > 1_800_000 && latency.operation == "write", "{latency:?}");
        assert_eq!(stages.guests(super::timeline::Operation::Write).whole.count(), 1);
    }
}

#[test]
fn a_replica_cut_off_shows_as_one_record_with_both_attempts() {
    let mut world = World::serving();
    world.fakes[0].up = false;
    world.kill(0);
    world.run(100);
    world.pause(1, true);
    world.submit(write(3));
    world.run(500);
    world.kill(1);
    world.run(2_500);
    world.fakes[1].paused = false;
    world.fakes[1].up = true;
    world.run(6_000);
    let records = world.records();
    let of_job: Vec<&SlowIo> = records.iter().filter(|record| record.offset == 3 * 4096).collect();
    assert!(of_job.iter().all(|record| record.id == of_job[0].id), "one record: {of_job:#?}");
    let last = of_job.iter().rfind(|record| record.ended).unwrap();
    check(last, "reconnect", Some(1));
    let lane = last.replicas.iter().find(|lane| lane.replica == 1).unwrap();
    assert!(lane.attempts >= 2 && lane.sent_us > 2_900_000, "{lane:?}");
    assert!(last.verdict.text.contains("; requeued by a reconnect at "), "{}", last.verdict.text);
    assert!(last.events.iter().any(|event| event.what == "left" && event.replica == Some(1)));
    assert!(last.events.iter().any(|event| event.what == "quorum_lost"));
}

#[test]
fn a_write_without_a_quorum_names_who_was_away() {
    let mut world = World::serving();
    (1..3).for_each(|replica| world.fakes[replica].up = false);
    (1..3).for_each(|replica| world.kill(replica));
    world.submit(write(0));
    world.run(4_000);
    world.fakes[1].up = true;
    world.run(6_000);
    let last = world.ended();
    check(&last, "away", Some(1));
    assert!(world.core.status().trace.quorums_lost == 1);
}

#[test]
fn a_new_generation_keeps_the_timeline() {
    let mut world = World::serving();
    (0..3).for_each(|replica| world.fakes[replica].paused = true);
    world.submit(write(5));
    (0..3).for_each(|replica| world.fakes[replica].up = false);
    (0..3).for_each(|replica| world.kill(replica));
    world.run(2_000);
    for fake in &mut world.fakes {
        (fake.up, fake.paused) = (true, false);
    }
    world.run(8_000);
    let records = world.records();
    let last = records.iter().rfind(|record| record.ended && record.offset == 5 * 4096).unwrap();
    assert_eq!(last.verdict.stage, "reconnect", "{last:#?}");
    assert!(last.events.iter().any(|event| event.what == "new_generation"), "{last:#?}");
    assert!(last.total_us > 1_900_000 && records.iter().all(|record| record.id == last.id));
}

#[test]
fn a_read_that_shows_an_unacknowledged_write_was_held() {
    let mut world = World::serving();
    (1..3).for_each(|replica| world.fakes[replica].paused = true);
    world.submit(write(0));
    world.settle();
    world.submit(read(0));
    world.settle();
    world.run(2_000);
    (1..3).for_each(|replica| world.fakes[replica].paused = false);
    // The write of the second replica frees it, before any other answers the read.
    world.settle();
    let records = world.records();
    let held = records.iter().rfind(|record| record.operation == "read" && record.ended).unwrap();
    check(held, "held", Some(0));
}

#[test]
fn a_bad_copy_and_who_gave_the_good_one_are_noted() {
    let mut world = World::serving();
    world.write(0, &[1; 4096]);
    world.fakes[0].blocks.get_mut(&0).unwrap().1 = Bytes::from(vec![9; 4096]);
    (1..3).for_each(|replica| world.fakes[replica].paused = true);
    world.submit(read(0));
    world.run(1_500);
    (1..3).for_each(|replica| world.fakes[replica].paused = false);
    world.settle();
    let last = world.ended();
    assert!(
        last.events.iter().any(|event| event.what == "bad_copy" && event.replica == Some(0)),
        "{last:#?}"
    );
    check(&last, "network", Some(1));
}

#[test]
fn records_are_rate_limited_and_what_is_dropped_is_counted() {
    let mut world = World::with(super::config::CoreConfig {
        limits: super::config::Limits { volume_jobs: 512, ..config().limits },
        ..config()
    });
    world.run(1_000);
    world.pause(2, true);
    (0..200).for_each(|block| {
        world.submit(write(block % 64));
    });
    world.settle();
    world.run(1_200);
    let told = world.records().len();
    assert!((50..70).contains(&told), "{told} at once");
    let status = world.core.status().trace;
    assert_eq!(status.slow, 200, "each counts");
    assert_eq!(status.records_dropped, 200 - told as u64);
    world.run(3_000);
    world.pause(2, false);
    let next = world.records();
    assert_eq!(next[0].dropped_before, 200 - told as u64, "told with the next");
    let kept = world.core.slow_records(Time(world.now));
    assert!(kept.iter().filter(|record| record.why == Why::Replica).count() >= 20, "{}", kept.len());
}

#[test]
fn the_time_before_the_core_counts() {
    let mut world = World::serving();
    world.run(3_000);
    let (guest, received) = (GuestId(77), Time(world.now - 2_500 * MS));
    world.core.handle(Time(world.now), Event::Guest { guest, op: write(1), received });
    world.settle();
    let last = world.ended();
    check(&last, "admission", None);
    assert_eq!(last.total_us / 1000, 2_500);
}

#[test]
fn a_cancelled_read_is_marked_and_counts_for_no_histogram() {
    let reads = super::config::Reads { cancel: true, ..super::config::Reads::default() };
    let mut world = World::with(super::config::CoreConfig { reads, ..config() });
    world.run(1_000);
    world.pause(2, true);
    world.submit(read(0));
    world.settle();
    world.run(1_500);
    let link = world.fakes[2].link.unwrap();
    let job = world.core.in_flight_records(Time(world.now))[0].timeline.job;
    assert_ne!(job, JobId(0));
    let result = Err(newel_protocol::wire::JobError::Cancelled);
    let reply = Reply::Done { job, result, times: StageTimes::default(), states: Vec::new() };
    world.fakes[2].inbox.clear();
    let replica = ReplicaId(2);
    world.core.handle(Time(world.now), Event::Reply { replica, link, reply, payload: Bytes::new() });
    world.drain_actions();
    let last = std::mem::take(&mut world.slow).pop().unwrap();
    assert!(last.timeline.marks().iter().any(|mark| mark.what == What::Cancelled));
    let stages = Core::stages(&world.core).unwrap();
    assert_eq!(stages.replica(replica, super::timeline::Operation::Read).whole.count(), 0);
}

#[test]
fn a_request_that_never_gets_a_job_ends_its_record() {
    let limits = super::config::Limits { volume_jobs: 1, ..config().limits };
    let mut world = World::with(super::config::CoreConfig { limits, ..config() });
    world.run(1_000);
    (0..3).for_each(|replica| world.fakes[replica].paused = true);
    world.submit(write(0));
    // Less than a block: nothing is left to trim.
    world.submit(GuestOp::Trim { offset: 4096 + 10, length: 100, fua: false });
    world.run(2_000);
    (0..3).for_each(|replica| world.fakes[replica].paused = false);
    world.settle();
    let records = world.records();
    let trim: Vec<_> = records.iter().filter(|record| record.operation == "zero").collect();
    assert_eq!(trim.iter().map(|record| record.ended).collect::<Vec<_>>(), [false, true], "{trim:#?}");
    check(trim[1], "admission", None);
    assert!(trim[1].id == trim[0].id && !trim[1].failed);
}
