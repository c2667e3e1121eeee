//! A replica's return: it costs what it missed, holds the guest up little, and survives interruption.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use newel_tests::cluster::{Cluster, Options, Role};
use newel_tests::journal::{Journal, Writing};
use newel_tests::load::Load;
use newel_tests::lock::Heavy;
use newel_tests::nbd::{Client, Command};
use newel_tests::pattern::{Random, bytes_at};
use newel_tests::seed::seed;
use newel_tests::wait::{self, Watch};

const MIB: u64 = 1 << 20;
const BLOCK_BYTES: u64 = 4096;
/// Writes in flight while filling.
const DEPTH: u64 = 4;
const JOINER: usize = 2;

/// Writes `count` MiB from `first` on, in pieces of 1 MiB.
fn fill(client: &mut Client, first: u64, count: u64, salt: u64) {
    let mut data = bytes_at(0, MIB, salt);
    let (mut sent, mut answered) = (0, 0);
    while answered < count {
        while sent < count && sent - answered < DEPTH {
            let at = first + sent;
            for block in data.chunks_mut(4096) {
                block[..8].copy_from_slice(&at.to_le_bytes());
            }
            client.send(Command::Write, 0, at * MIB, 1 << 20, &data).unwrap();
            sent += 1;
        }
        assert_eq!(client.receive().unwrap().errno, 0);
        answered += 1;
    }
}

/// Each of these MiB is as it was filled.
fn verify_fill(client: &mut Client, first: u64, count: u64, salt: u64) {
    let mut data = bytes_at(0, MIB, salt);
    for at in first..first + count {
        for block in data.chunks_mut(4096) {
            block[..8].copy_from_slice(&at.to_le_bytes());
        }
        assert!(client.read(at * MIB, 1 << 20) == data, "MiB {at} differs");
    }
}

/// The guest's p99 with all three in service, and while one is caught up with some hundred MiB; tells the figures.
fn check_latency(cluster: &mut Cluster) -> String {
    let load = Load::start(&cluster.address(), Command::Write, 4, 16_384);
    wait::pass(Duration::from_secs(1));
    let control = Instant::now();
    wait::pass(Duration::from_secs(3));
    let killed = Instant::now();
    cluster.kill(Role::Replica(JOINER));
    cluster.await_away(JOINER);
    fill(&mut cluster.connect(), 64, 320, 1);
    wait::pass(Duration::from_secs(2));
    cluster.start_daemon(Role::Replica(JOINER));
    let begun = cluster.await_status("it catches up", |status| {
        status.replicas[JOINER].catch_up.as_ref().is_some_and(|progress| progress.blocks_copied > 0)
    });
    let from = Instant::now();
    let status = cluster.await_active(JOINER);
    let to = Instant::now();
    let record = load.finish();
    let (control, during) = (record.between(control, killed), record.between(from, to));
    let copied = status.replicas[JOINER].last_catch_up.as_ref().unwrap().blocks_copied;
    let figures = format!(
        "p99 of 4K writes at depth 4: {:.2?} before, {:.2?} ({:.2}x) while {copied} blocks were copied in {:.1?} ({} and {} answers)",
        control.p99,
        during.p99,
        during.p99.as_secs_f64() / control.p99.as_secs_f64(),
        to - from,
        control.answers,
        during.answers
    );
    assert!(copied >= 320 * 256, "{begun:#?}");
    assert!(during.answers > 0, "the guest was held up for {:?}", to - from);
    assert!(
        during.p99 < (control.p99 * 10).max(Duration::from_millis(20)),
        "catch-up slows the guest: {figures}"
    );
    figures
}

/// Kills the joiner, or whichever replica it may copy from, whenever it has copied a bit; tells how often.
fn interrupt(cluster: &mut Cluster, random: &mut Random) -> u32 {
    for interruptions in 0..12 {
        let enough = 200 + random.below(2000);
        let status = cluster.await_status("it catches up", |status| {
            let joiner = &status.replicas[JOINER];
            let copied = joiner.catch_up.as_ref().map_or(0, |progress| progress.blocks_copied);
            joiner.state == "active" || copied > enough
        });
        if status.replicas[JOINER].state == "active" {
            return interruptions;
        }
        let victim = match random.below(4) {
            0 => Role::Replica(0),
            1 => Role::Replica(1),
            _ => Role::Replica(JOINER),
        };
        cluster.kill(victim);
        wait::pass(Duration::from_millis(random.below(100)));
        cluster.start_daemon(victim);
    }
    12
}

// DRBD: stuck SyncTarget. Mayastor, Crucible: everything is copied again. Longhorn: a rebuild starts from nothing.
#[test]
fn catch_up_interrupted_again_and_again_ends_clean() {
    let _heavy = Heavy::take();
    let seed = seed("catch_up_interrupted_again_and_again_ends_clean");
    let mut random = Random::new(seed);
    let config = "[timing]\nbackoff_max = \"200ms\"\n";
    let mut cluster = Cluster::start(Options { size: "1G", config, ..Options::default() });
    println!("{}", check_latency(&mut cluster));

    cluster.connect().ask(Command::Zero, 0, 0, 64 << 20, &[]).unwrap();
    cluster.kill(Role::Replica(JOINER));
    fill(&mut cluster.connect(), 384, 400, 2);
    cluster.start_daemon(Role::Replica(JOINER));
    let writing = Writing::start(Journal::new(2048, seed), cluster.connect());
    let interruptions = interrupt(&mut cluster, &mut random);
    println!("catch-up was interrupted {interruptions} times");
    assert!(interruptions >= 3, "there was too little to copy");
    cluster.await_all_active();
    let mut client = cluster.connect();
    writing.finish().verify(&mut client);
    verify_fill(&mut client, 64, 320, 1);
    verify_fill(&mut client, 384, 400, 2);
    cluster.stop_and_check();
}

/// Kills the joiner, lets `meanwhile` happen, and tells how long its way from the start of its process to Active takes.
fn return_after(cluster: &mut Cluster, meanwhile: impl FnOnce(&mut Cluster)) -> Duration {
    cluster.kill(Role::Replica(JOINER));
    cluster.await_away(JOINER);
    meanwhile(cluster);
    let watch = Watch::start();
    cluster.start_daemon(Role::Replica(JOINER));
    cluster.await_active(JOINER);
    watch.elapsed()
}

// Crucible: a fixed 10 s before a reconnect, and whole extents copied. Mayastor: a full rebuild.
#[test]
fn a_return_costs_what_was_missed_and_not_the_volume() {
    let _heavy = Heavy::take();
    let seed = seed("a_return_costs_what_was_missed_and_not_the_volume");
    let mut random = Random::new(seed);
    let mut cluster = Cluster::start(Options { size: "64G", ..Options::default() });
    let blocks = (64 << 30) / BLOCK_BYTES;
    let mut client = cluster.connect();
    client.write(0, &bytes_at(0, BLOCK_BYTES, 1));

    let control = return_after(&mut cluster, |_| ());
    let mut scattered = BTreeSet::new();
    while scattered.len() < 1000 {
        scattered.insert(random.below(blocks));
    }
    let took = return_after(&mut cluster, |_| {
        for &block in &scattered {
            client.write(block * BLOCK_BYTES, &bytes_at(block * BLOCK_BYTES, BLOCK_BYTES, 2));
        }
    });
    let status = cluster.try_status().unwrap();
    let copied = status.replicas[JOINER].last_catch_up.as_ref().unwrap().blocks_copied;
    println!(
        "64 GiB, 1000 scattered blocks missed: {copied} copied, active {took:.2?} after its start (control: {control:.2?})"
    );
    assert!((1000..=1050).contains(&copied), "{copied} blocks were copied");
    assert!(took < control + Duration::from_secs(5), "{took:?}, without anything to copy {control:?}");

    let load = Load::start(&cluster.address(), Command::Write, 16, blocks);
    wait::pass(Duration::from_secs(3));
    let took = return_after(&mut cluster, |_| ());
    println!("64 GiB under random 4K writes: active {took:.2?} after its restart");
    assert!(took < Duration::from_secs(30), "{took:?}");
    load.finish();
    for &block in scattered.iter().take(100) {
        let data = client.read(block * BLOCK_BYTES, 4096);
        let (missed, loaded) = (bytes_at(block * BLOCK_BYTES, BLOCK_BYTES, 2), bytes_at(0, BLOCK_BYTES, 7));
        assert!(data == missed || data == loaded, "block {block} is lost");
    }
    cluster.stop_and_check();
}
