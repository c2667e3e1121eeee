//! Activation, service, leaving and coming back, against the replicas in memory of `tests_world`.
//!
//! These tests show that each path works; the search for counter-examples is the simulator's, which runs real replicas.

use std::time::Duration;

use bytes::Bytes;
use newel_protocol::wire::{JobError, Membership, Reply, Request, StageTimes};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockState, Generation, Version, crc};
use uuid::Uuid;

use super::api::{Event, GuestError, GuestOp, GuestReply, ReplicaId, StopReason, Time};
use super::pace::RATE_FIRST;
use super::tests_fake::{BLOCKS, Fake};
use super::tests_world::{MS, World, flat};

#[test]
fn serves_after_activation_and_keeps_what_is_written() {
    let mut world = World::serving();
    world.write(4096, &[7; 8192]);
    assert_eq!(world.read(0, 16_384), [vec![0; 4096], vec![7; 8192], vec![0; 4096]].concat());
    world.write(4095, b"abc");
    assert_eq!(world.read(4094, 5), [0, b'a', b'b', b'c', 7]);
    assert!(matches!(world.done(GuestOp::Flush), GuestReply::Done));
    assert!(world.fakes.iter().all(|fake| fake.last_active == Generation(1) && fake.membership.epoch == 1));
}

#[test]
fn a_fresh_volume_waits_for_all_three() {
    let mut world = World::new();
    world.fakes[2].up = false;
    world.run(5000);
    assert_eq!(world.core.status().state, "activating");
    world.fakes[2].up = true;
    world.run(6000);
    assert_eq!(world.core.status().state, "serving");
}

/// Replicas in their places, for another upstairs.
fn hand_over(from: World, min_replicas: usize) -> World {
    let mut config = from.core.config.clone();
    config.upstairs = Uuid::from_u128(config.upstairs.as_u128() + 1);
    config.min_replicas = min_replicas;
    let mut world = World::with(config);
    world.fakes = from.fakes;
    for fake in &mut world.fakes {
        fake.link = None;
        fake.inbox.clear();
    }
    world
}

#[test]
fn one_replica_alone_acknowledges_only_where_all_three_must_come_back() {
    let mut world = hand_over(World::new(), 1);
    world.run(6000);
    assert_eq!(world.core.status().state, "serving");
    world.kill(1);
    world.kill(2);
    world.write(0, &[7; 4096]);
    // The one that has it is away: nobody goes on without it, whatever this upstairs would do with.
    for min_replicas in [1, 2] {
        world = hand_over(world, min_replicas);
        (0..3).for_each(|replica| world.fakes[replica].up = replica != 0);
        world.run(6000);
        assert_eq!(world.core.status().state, "activating", "min_replicas = {min_replicas}");
    }
    world.fakes[0].up = true;
    world.run(6000);
    assert_eq!(world.read(0, 4096), [7; 4096]);
    world.assert_converged();
    // From here on two are enough.
    world = hand_over(world, 2);
    world.fakes[0].up = false;
    world.run(6000);
    assert_eq!(world.read(0, 4096), [7; 4096]);
}

#[test]
fn a_killed_replica_comes_back_by_copying_what_it_missed() {
    let mut world = World::serving();
    world.write(0, &[1; 40_960]);
    world.kill(1);
    for block in [3_u64, 5, 1500] {
        world.write(block * 4096, &[2; 4096]);
    }
    world.fakes[1].up = true;
    world.assert_converged();
    assert_eq!(world.fakes[1].stored_blocks, 3, "only the differing blocks are copied");
}

#[test]
fn a_stopped_replica_is_not_noticed_and_leaves() {
    let mut world = World::serving();
    world.fakes[0].paused = true;
    for i in 0..200_u64 {
        world.write(i % 50 * 4096, &[u8::try_from(i).unwrap(); 4096]);
        assert_eq!(world.read(i % 50 * 4096, 1), [u8::try_from(i).unwrap()]);
    }
    assert_ne!(world.states()[0], "active", "it is over its bound");
    world.fakes[0].paused = false;
    world.assert_converged();
}

#[test]
fn all_slow_together_means_nobody_is_dropped() {
    let mut world = World::serving();
    world.fakes.iter_mut().for_each(|fake| fake.paused = true);
    let guests: Vec<u64> = (0..100)
        .map(|i| {
            world.submit(GuestOp::Write { offset: i * 4096, data: Bytes::from(vec![1; 4096]), fua: false })
        })
        .collect();
    world.run(3000);
    assert_eq!(world.states(), ["active", "active", "active"]);
    assert!(world.core.status().jobs_in_flight <= 32 && world.replies.is_empty());
    world.fakes.iter_mut().for_each(|fake| fake.paused = false);
    world.settle();
    assert!(guests.iter().all(|guest| matches!(world.replies.get(guest), Some(GuestReply::Done))));
}

#[test]
fn writes_wait_for_a_quorum_and_reads_go_on() {
    let mut world = World::serving();
    world.write(0, &[1; 4096]);
    world.kill(0);
    world.kill(2);
    let write = world.submit(GuestOp::Write { offset: 0, data: Bytes::from(vec![2; 4096]), fua: true });
    world.run(1000);
    assert!(!world.replies.contains_key(&write));
    assert_eq!(world.read(4096, 4096), vec![0; 4096]);
    assert_eq!(world.core.status().state, "quorum_lost");
    let held = world.submit(GuestOp::Read { offset: 0, length: 4096 });
    world.run(1000);
    assert!(!world.replies.contains_key(&held), "it would show a write that isn't acknowledged");
    world.fakes[0].up = true;
    world.run(6000);
    assert!(matches!(world.replies.get(&write), Some(GuestReply::Done)));
    assert_eq!(flat(&world.replies[&held]), vec![2; 4096]);
}

#[test]
fn all_replicas_lost_and_back_is_only_a_pause() {
    let mut world = World::serving();
    world.write(0, &[1; 8192]);
    (0..3).for_each(|i| world.kill(i));
    let write = world.submit(GuestOp::Write { offset: 4096, data: Bytes::from(vec![2; 4096]), fua: true });
    let read = world.submit(GuestOp::Read { offset: 0, length: 4096 });
    world.run(2000);
    assert!(world.replies.is_empty());
    world.fakes.iter_mut().for_each(|fake| fake.up = true);
    world.assert_converged();
    assert!(matches!(world.replies.get(&write), Some(GuestReply::Done)));
    assert_eq!(flat(&world.replies[&read]), vec![1; 4096]);
    assert_eq!(world.core.status().generation, 2);
    assert_eq!(world.read(4096, 1), [2]);
}

#[test]
fn a_bad_copy_is_answered_from_elsewhere_and_healed() {
    let mut world = World::serving();
    world.write(0, &[1; 12_288]);
    for (fake, block) in [(0, 0), (1, 1), (2, 2)] {
        world.fakes[fake].blocks.get_mut(&block).unwrap().1 = Bytes::from(vec![9; 4096]);
    }
    assert_eq!(world.read(0, 12_288), vec![1; 12_288], "each replica has one bad block of three");
    world.assert_converged();
    assert!(world.fakes[0].blocks.values().all(|(_, data)| data[0] == 1));
}

#[test]
fn no_good_copy_is_an_error_for_that_request_only() {
    let mut world = World::serving();
    world.write(0, &[1; 8192]);
    for fake in &mut world.fakes {
        fake.blocks.get_mut(&0).unwrap().1 = Bytes::from(vec![9; 4096]);
    }
    assert!(matches!(
        world.done(GuestOp::Read { offset: 0, length: 4096 }),
        GuestReply::Failed(GuestError::Io)
    ));
    assert_eq!(world.read(4096, 4096), vec![1; 4096]);
    world.write(0, &[2; 4096]);
    assert_eq!(world.read(0, 4096), vec![2; 4096]);
}

#[test]
fn a_stale_replica_is_never_a_source() {
    let mut world = World::serving();
    world.kill(0);
    world.write(0, &[5; 4096]);
    // An unacknowledged write of long ago with a high sequence on the stale replica.
    world.fakes[0].set(0, Version::new(Generation(1), 999), Some(Bytes::from(vec![6; 4096])));
    let [a, b, c] = std::mem::replace(&mut world.fakes, [Fake::new(7), Fake::new(8), Fake::new(9)]);
    let mut second = World::new();
    second.fakes = [a, b, c];
    second.fakes.iter_mut().for_each(|fake| fake.up = true);
    second.fakes[1].last_active = Generation(3);
    second.fakes[2].last_active = Generation(3);
    second.run(3000);
    assert_eq!(second.read(0, 4096), vec![5; 4096]);
    second.assert_converged();
}

#[test]
fn an_unverified_block_is_adopted_only_above_every_verified_one() {
    for (bound, expected) in [(5, 1), (7, 9)] {
        let mut world = World::new();
        let members = Membership { epoch: 1, regions: [1, 2, 3].map(Uuid::from_u128), alone: false };
        for fake in &mut world.fakes {
            fake.membership = members;
            fake.set(0, Version::new(Generation(0), 6), Some(Bytes::from(vec![1; 4096])));
        }
        let odd = Bytes::from(vec![9; 4096]);
        let state = BlockState {
            version: Version::new(Generation(0), bound),
            crc: crc::crc(&odd),
            kind: BlockKind::Unverified,
        };
        world.fakes[1].blocks.insert(0, (state, odd));
        // With all three at hand and none short of power, what one alone claims was never acknowledged.
        world.fakes[2].up = false;
        world.run(3000);
        assert_eq!(world.read(0, 1), [expected]);
        world.fakes[2].up = true;
        world.assert_converged();
    }
}

#[test]
fn refusals_end_an_upstairs_that_never_served() {
    let mut world = World::new();
    world.fakes[1].in_use = true;
    world.run(1000);
    assert!(matches!(world.stopped, Some(StopReason::Refused { .. })), "{:?}", world.stopped);
}

#[test]
fn a_failed_write_makes_the_replica_leave() {
    let mut world = World::serving();
    let link = world.fakes[1].link.unwrap();
    world.fakes[1].paused = true;
    let write = world.submit(GuestOp::Write { offset: 0, data: Bytes::from(vec![1; 4096]), fua: false });
    let at =
        world.fakes[1].inbox.iter().position(|(request, _)| matches!(request, Request::Job { .. })).unwrap();
    let Some((Request::Job { job, .. }, _)) = world.fakes[1].inbox.remove(at) else { panic!("no job") };
    let result = Err(JobError::NoSpace);
    let reply = Reply::Done { job, result, times: StageTimes::default(), states: Vec::new() };
    world
        .core
        .handle(Time(world.now), Event::Reply { replica: ReplicaId(1), link, reply, payload: Bytes::new() });
    world.settle();
    assert!(matches!(world.replies.get(&write), Some(GuestReply::Done)));
    assert_eq!(world.states()[1], "left");
    world.fakes[1].paused = false;
    world.assert_converged();
}

#[test]
fn a_joiner_is_not_copied_to_beyond_what_was_granted() {
    let mut world = World::serving();
    world.kill(1);
    for block in 0..BLOCKS {
        world.write(block * BLOCK_BYTES as u64, &[7; BLOCK_BYTES]);
    }
    world.fakes[1].up = true;
    let until = world.now + 20_000 * MS;
    let step = |world: &mut World| {
        assert!(world.now < until, "nothing is copied");
        world.core.handle(Time(world.now), Event::Tick);
        world.settle();
        world.now += MS;
    };
    while world.fakes[1].stored_blocks == 0 {
        step(&mut world);
    }
    // A pause, after which more copies are granted than there is room for.
    world.fakes[1].paused = true;
    (0..30).for_each(|_| step(&mut world));
    world.fakes[1].paused = false;
    // Every answer comes at once now, so nothing but the rate holds copies back; what was sent before comes on top.
    let before = world.fakes[1].stored_blocks + 32 * 16;
    (0..10).for_each(|_| step(&mut world));
    let due = usize::try_from(RATE_FIRST / 100).unwrap() / BLOCK_BYTES;
    let copied = world.fakes[1].stored_blocks.saturating_sub(before);
    assert!((due / 2..due * 2).contains(&copied), "{copied} blocks in the time of {due}");
    world.assert_converged();
}

#[test]
fn shutdown_finishes_what_was_admitted() {
    let mut world = World::serving();
    let write = world.submit(GuestOp::Write { offset: 0, data: Bytes::from(vec![1; 4096]), fua: false });
    world.core.handle(Time(world.now), Event::Shutdown { within: Duration::from_secs(4) });
    let late = world.submit(GuestOp::Read { offset: 0, length: 1 });
    world.settle();
    assert!(matches!(world.replies.get(&write), Some(GuestReply::Done)));
    assert!(matches!(world.replies.get(&late), Some(GuestReply::Failed(GuestError::ShuttingDown))));
    assert_eq!(world.stopped, Some(StopReason::Finished));
}
