//! Reads that are throttled, cancelled or witnessed, against the replicas in memory of `tests_world`.

use std::time::Duration;

use bytes::Bytes;
use newel_protocol::wire::{JobError, Op, ReadMode, Reply, Request, StageTimes};

use super::api::{Event, GuestOp, GuestReply, ReplicaId, Time};
use super::config::{ReadPolicy, Reads};
use super::tests_fake::{BLOCKS, Fake};
use super::tests_world::{MS, World, config};

const READ: GuestOp = GuestOp::Read { offset: 0, length: 4096 };

fn serving(reads: Reads) -> World {
    let mut config = config();
    config.limits.volume_jobs = 1000;
    config.limits.replica_jobs = 2000;
    let mut world = World::with(super::config::CoreConfig { reads, ..config });
    world.run(1000);
    assert_eq!(world.core.status().state, "serving");
    world
}

fn tick(world: &mut World, ms: u64) {
    world.now += ms * MS;
    world.core.handle(Time(world.now), Event::Tick);
    world.drain_actions();
}

/// Two replicas that answer at once and one that answers a read a millisecond, until the throttle sets in.
fn throttled() -> World {
    let mut world = serving(Reads::default());
    for _ in 0..2000 {
        for _ in 0..3 {
            world.submit(READ);
        }
        for index in [0, 1] {
            while world.step(index) {}
        }
        world.step(2);
        tick(&mut world, 1);
        if world.core.status().reads.waiting > 0 {
            return world;
        }
    }
    panic!("reads are not throttled: {:?}", world.core.status());
}

#[test]
fn a_write_passes_reads_that_are_kept_back() {
    let mut world = throttled();
    let status = world.core.status().reads;
    assert!(status.throttled && status.cause.is_some_and(|cause| cause.contains("before replica 2")));
    let waiting = world.submit(READ);
    for data in [&[5_u8; 4096][..], b"part"] {
        let write =
            world.submit(GuestOp::Write { offset: 8192, data: Bytes::copy_from_slice(data), fua: true });
        for index in [0, 1] {
            while world.step(index) {}
        }
        assert!(matches!(world.replies.get(&write), Some(GuestReply::Done)), "two of three have it");
    }
    assert!(!world.replies.contains_key(&waiting), "the read still waits");
    assert!(world.core.status().reads.waiting > 0);
    for _ in 0..200 {
        world.settle();
        tick(&mut world, 10);
    }
    assert!(world.replies.contains_key(&waiting), "it is answered in the end");
    assert_eq!(world.core.status().jobs_in_flight, 0);
}

#[test]
fn a_replica_that_leaves_lets_all_reads_go() {
    let mut world = throttled();
    let waiting = world.submit(READ);
    world.kill(2);
    for index in [0, 1] {
        while world.step(index) {}
    }
    assert!(world.replies.contains_key(&waiting));
    let status = world.core.status();
    assert_eq!((status.reads.throttled, status.reads.waiting, status.jobs_in_flight), (false, 0, 0));
    assert!(status.replicas.iter().all(|replica| replica.read_delay_us == 0));
    world.fakes[2].up = true;
    world.assert_converged();
}

#[test]
fn an_answered_read_is_cancelled_elsewhere() {
    let mut world = serving(Reads { cancel: true, ..Reads::default() });
    world.fakes[2].paused = true;
    world.read(0, 4096);
    let cancelled: Vec<_> = world.fakes[2]
        .inbox
        .iter()
        .filter_map(|(request, _)| if let Request::Cancel { job } = request { Some(*job) } else { None })
        .collect();
    assert_eq!(cancelled.len(), 1);
    world.fakes[2].inbox.clear();
    let link = world.fakes[2].link.unwrap();
    let result = Err(JobError::Cancelled);
    let reply = Reply::Done { job: cancelled[0], result, times: StageTimes::default(), states: Vec::new() };
    let event = |reply| Event::Reply { replica: ReplicaId(2), link, reply, payload: Bytes::new() };
    world.core.handle(Time(world.now), event(reply.clone()));
    world.drain_actions();
    assert_eq!(world.states(), ["active"; 3]);
    let status = world.core.status();
    assert!(status.replicas.iter().all(|replica| replica.queue_jobs == 0 && replica.healed_blocks == 0));
    // Dropping what nobody cancelled is a breach.
    world.fakes[0].paused = true;
    world.fakes[1].paused = true;
    world.submit(READ);
    let Some((Request::Job { job, .. }, _)) = world.fakes[2].inbox.pop_front() else { panic!() };
    let result = Err(JobError::Cancelled);
    let reply = Reply::Done { job, result, times: StageTimes::default(), states: Vec::new() };
    world.core.handle(Time(world.now), event(reply));
    assert_eq!(world.states()[2], "left");
}

fn witness() -> Reads {
    Reads { policy: ReadPolicy::Witness, cancel: false }
}

/// What each replica was asked for by the last read.
fn asked(world: &World) -> Vec<Vec<ReadMode>> {
    let modes = |fake: &Fake| {
        let mode = |request: &Request| {
            if let Request::Job { op: Op::Read { mode, .. }, .. } = request { Some(*mode) } else { None }
        };
        fake.inbox.iter().filter_map(|(request, _)| mode(request)).collect()
    };
    world.fakes.iter().map(modes).collect()
}

#[test]
fn one_replica_gives_the_data_and_the_others_bear_witness() {
    let mut world = serving(witness());
    world.write(0, &[7; 4096]);
    let mut readers = [0; 3];
    for _ in 0..30 {
        let guest = world.submit(READ);
        let asked = asked(&world);
        let reader = asked.iter().position(|modes| *modes == [ReadMode::Data]).expect("one gives the data");
        let others = asked.iter().filter(|modes| **modes == [ReadMode::Contexts]).count();
        assert_eq!(others, 2, "{asked:?}");
        readers[reader] += 1;
        world.step(reader);
        assert!(matches!(world.replies.get(&guest), Some(GuestReply::Data(_))), "it waits for nobody else");
        world.settle();
    }
    assert_eq!(readers, [10; 3], "they take turns");
}

#[test]
fn a_late_or_bad_copy_is_asked_of_another() {
    let mut world = serving(witness());
    world.write(0, &[7; 4096]);
    let guest = world.submit(READ);
    let reader = asked(&world).iter().position(|modes| *modes == [ReadMode::Data]).unwrap();
    world.fakes[reader].paused = true;
    world.settle();
    assert!(!world.replies.contains_key(&guest));
    tick(&mut world, 25);
    world.settle();
    assert!(matches!(world.replies.get(&guest), Some(GuestReply::Data(_))), "late: another one was asked");
    // While it is stopped nobody waits for it.
    for _ in 0..20 {
        let guest = world.submit(READ);
        world.settle();
        assert!(world.replies.contains_key(&guest));
    }
    world.fakes[reader].paused = false;
    world.settle();
    for bad in 0..3 {
        let (state, _) = world.fakes[bad].blocks[&0].clone();
        world.fakes[bad].blocks.insert(0, (state, Bytes::from(vec![9; 4096])));
        for _ in 0..3 {
            assert_eq!(world.read(0, 4096), [7; 4096]);
        }
        assert_eq!(world.fakes[bad].blocks[&0].1, vec![7; 4096], "healed");
    }
    world.assert_converged();
}

#[test]
fn a_reader_that_dies_is_replaced_before_and_after_the_witnesses_spoke() {
    for witnesses_first in [true, false] {
        let mut world = serving(witness());
        world.write(0, &[7; 4096]);
        let guest = world.submit(READ);
        let reader = asked(&world).iter().position(|modes| *modes == [ReadMode::Data]).unwrap();
        world.fakes[reader].paused = true;
        if witnesses_first {
            world.settle();
        }
        world.kill(reader);
        world.settle();
        assert!(matches!(world.replies.get(&guest), Some(GuestReply::Data(_))), "{witnesses_first}");
        assert_eq!(world.core.status().jobs_in_flight, 0);
    }
}

/// An hour of writes without a flush while one replica is stopped: what is kept stays within the bounds.
#[test]
fn an_hour_of_writes_without_a_flush_is_bounded() {
    let mut world = serving(Reads::default());
    let limits = config().limits;
    world.fakes[2].paused = true;
    let data = Bytes::from(vec![3_u8; 256 << 10]);
    let mut most = 0;
    for write in 0..3600 * 2_u64 {
        let offset = write % (BLOCKS / 64) * (256 << 10);
        let guest = world.submit(GuestOp::Write { offset, data: data.clone(), fua: false });
        for index in [0, 1] {
            while world.step(index) {}
        }
        assert!(matches!(world.replies.remove(&guest), Some(GuestReply::Done)), "two go on");
        most = most.max(world.core.jobs.iter().map(|job| job.payload.len()).sum());
        // A process that is stopped takes what its socket has room for; the rest is the link's, and goes with it.
        world.settle_events();
        tick(&mut world, 500);
    }
    assert!(most > 5 * data.len(), "it was behind: {most}");
    assert!(most <= limits.volume_bytes + limits.replica_bytes, "{most} bytes are kept");
    world.fakes[2].paused = false;
    world.assert_converged();
}

/// Near the volume's bound requests are admitted ever more slowly, and below half of it at once.
#[test]
fn the_guest_is_slowed_smoothly_near_the_bound() {
    let mut config = config();
    config.limits.volume_jobs = 100;
    config.limits.replica_jobs = 1000;
    config.limits.waiting = 1000;
    config.limits.slowing = Duration::from_secs(1);
    let mut world = World::with(config);
    world.run(1000);
    (0..3).for_each(|index| world.fakes[index].paused = true);
    for _ in 0..200 {
        world.submit(READ);
    }
    assert_eq!(world.core.status().jobs_in_flight, 51, "half of the bound at once, and the first beyond it");
    let mut admitted = Vec::new();
    for _ in 0..4 {
        let before = world.core.status().jobs_in_flight;
        (0..50).for_each(|_| tick(&mut world, 1));
        admitted.push(world.core.status().jobs_in_flight - before);
    }
    assert!(admitted.is_sorted_by(|a, b| a > b) && admitted[3] > 0, "{admitted:?}: slower and slower");
    (0..2000).for_each(|_| tick(&mut world, 1));
    assert_eq!(world.core.status().jobs_in_flight, 100, "the bound holds");
    (0..3).for_each(|index| world.fakes[index].paused = false);
    for _ in 0..3000 {
        world.settle();
        tick(&mut world, 1);
    }
    assert_eq!(world.core.status().guest_requests, 0, "all are answered");
}

/// What is larger than the bound is admitted alone.
#[test]
fn a_request_beyond_the_bound_fits() {
    let mut world = World::serving();
    let length = u32::try_from(BLOCKS * 4096).unwrap();
    world.write(0, &vec![8; 9 << 20]);
    assert!(matches!(
        world.done(GuestOp::Trim { offset: 0, length: length.into(), fua: false }),
        GuestReply::Done
    ));
    assert_eq!(world.read(0, length), vec![0; length as usize]);
}

#[test]
fn what_was_done_is_counted_once_for_guests_and_at_every_replica() {
    let mut world = World::serving();
    let before = world.core.status();
    world.write(0, &[7; 8192]);
    world.read(0, 4096);
    world.read(100, 100);
    assert!(matches!(world.done(GuestOp::Flush), GuestReply::Done));
    let after = world.core.status();
    let guests = after.work.since(&before.work);
    assert_eq!((guests.reads, guests.read_bytes), (2, 4196));
    assert_eq!((guests.writes, guests.write_bytes, guests.others), (1, 8192, 1));
    for (replica, before) in after.replicas.iter().zip(&before.replicas) {
        let work = replica.work.since(&before.work);
        assert_eq!((work.reads, work.read_bytes), (2, 8192), "whole blocks travel");
        assert_eq!((work.writes, work.write_bytes, work.others), (1, 8192, 1));
        assert_eq!(work.latencies.quantile_us(1000).is_some(), work.count() > 0);
    }
}

/// A bound of 100 jobs, no throttle, and a replica that answers nothing.
fn unthrottled_beside_a_stopped_one() -> World {
    let mut config = config();
    config.limits.replica_jobs = 100;
    config.throttle.enabled = false;
    let mut world = World::with(config);
    world.run(1000);
    world.fakes[2].paused = true;
    world
}

/// Reads alone drive no replica out, whatever it owes; changes still do.
#[test]
fn a_replica_with_too_much_to_read_is_left_out_and_stays() {
    let mut world = unthrottled_beside_a_stopped_one();
    for _ in 0..500 {
        world.read(0, 4096);
    }
    let of_2 = |world: &World| {
        let status = world.core.status();
        let replica = &status.replicas[2];
        (replica.state.clone(), replica.queue_jobs, replica.reads_left_out)
    };
    assert_eq!(of_2(&world), ("active".to_owned(), 75, 425));
    assert_eq!(world.core.status().jobs_in_flight, 0, "the guest waited for nothing");
    // What is left of the bound is for changes.
    for block in 0..25 {
        world.write(block * 4096, &[1; 4096]);
    }
    assert_eq!(of_2(&world).0, "active");
    world.fakes[2].paused = false;
    world.settle();
    assert_eq!(of_2(&world).1, 0);
    world.read(0, 4096);
    assert_eq!(of_2(&world), ("active".to_owned(), 0, 425), "it gets reads again");
    world.fakes[2].paused = true;
    for block in 0..101 {
        world.write(block % 50 * 4096, &[2; 4096]);
    }
    assert_ne!(of_2(&world).0, "active", "it is over its bound");
    world.fakes[2].paused = false;
    world.assert_converged();
}

/// The one that was left out answers if those that were asked can't.
#[test]
fn a_read_is_asked_of_the_one_that_was_left_out() {
    for stopped in [true, false] {
        let mut world = unthrottled_beside_a_stopped_one();
        for _ in 0..75 {
            world.read(0, 4096);
        }
        for index in [0, 1] {
            world.fakes[index].paused = true;
        }
        let guest = world.submit(READ);
        world.settle_events();
        assert_eq!(world.core.status().replicas[2].queue_jobs, 75, "it is left out");
        world.fakes[2].paused = false;
        if stopped {
            for _ in 0..10 {
                world.settle();
                tick(&mut world, 20);
            }
        } else {
            (0..2).for_each(|index| world.kill(index));
            world.settle();
        }
        assert!(matches!(world.replies.get(&guest), Some(GuestReply::Data(_))), "stopped: {stopped}");
        for index in [0, 1] {
            world.fakes[index].paused = false;
            world.fakes[index].up = true;
        }
        world.assert_converged();
    }
}
