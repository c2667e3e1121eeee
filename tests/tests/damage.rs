//! Rot and full disks under one replica: never served, never in the guest's way, and healed.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::collections::BTreeSet;
use std::time::Duration;

use newel_tests::cluster::{Cluster, Options, Place, Role};
use newel_tests::command::{program, run, temp_dir};
use newel_tests::damage::{PAGE_CONTEXTS, RegionFile};
use newel_tests::journal::{Journal, Writing};
use newel_tests::lock::Heavy;
use newel_tests::nbd::Client;
use newel_tests::pattern::Random;
use newel_tests::seed::seed;
use newel_tests::skip::have_root;
use newel_tests::small_disk::SmallDisk;
use newel_tests::volume::REPLICAS;
use newel_tests::wait;

const BLOCKS: usize = 2048;
/// Blocks damaged in one replica at a time.
const BAD: usize = 20;
const PATIENCE: Duration = Duration::from_secs(30);

/// Damages `BAD` blocks each of two replicas, no block twice; tells in which replicas.
fn flip_blocks(cluster: &Cluster, random: &mut Random) -> [usize; 2] {
    let first = usize::try_from(random.below(3)).unwrap();
    let replicas = [first, (first + 1 + usize::try_from(random.below(2)).unwrap()) % 3];
    let mut blocks = BTreeSet::new();
    while blocks.len() < 2 * BAD {
        blocks.insert(random.below(BLOCKS as u64));
    }
    for (number, block) in blocks.into_iter().enumerate() {
        RegionFile::open(&cluster.region(replicas[number % 2])).flip_data(block, random.below(4096));
    }
    replicas
}

/// Reads everything until what was damaged is healed. A read of a bad copy would fail in the journal.
fn read_until_healed(cluster: &Cluster, journal: &mut Journal, client: &mut Client, before: [u64; REPLICAS]) {
    wait::until("what is damaged is healed", PATIENCE, || {
        journal.verify(client);
        let healed = healed(cluster);
        let gained: Vec<u64> = healed.iter().zip(before).map(|(now, before)| now - before).collect();
        (gained.iter().filter(|&&count| count >= BAD as u64).count() >= 2).then_some(())
    });
}

fn healed(cluster: &Cluster) -> [u64; REPLICAS] {
    let status = cluster.await_all_active();
    std::array::from_fn(|replica| status.replicas[replica].healed_blocks)
}

// Crucible: one bad block keeps a region from opening. Longhorn, Mayastor: no checksum of what is read.
#[test]
fn flipped_bytes_are_never_served_and_heal_by_reads() {
    let _heavy = Heavy::take();
    let seed = seed("flipped_bytes_are_never_served_and_heal_by_reads");
    let mut random = Random::new(seed);
    let mut cluster = Cluster::small();
    let mut journal = Journal::new(BLOCKS, seed);
    let mut client = cluster.connect();
    journal.write_all(&mut client);
    client.flush();
    // All have executed everything, so that no late write covers the damage.
    cluster.await_status("nothing is owed", |status| {
        status.replicas.iter().all(|replica| replica.state == "active" && replica.queue_jobs == 0)
    });
    for round in 0..4 {
        let before = if round % 2 == 0 {
            let before = healed(&cluster);
            flip_blocks(&cluster, &mut random);
            before
        } else {
            // At rest; what was served before says nothing of the new processes.
            drop(client);
            cluster.stop();
            flip_blocks(&cluster, &mut random);
            cluster.start_all();
            client = cluster.connect();
            [0; REPLICAS]
        };
        read_until_healed(&cluster, &mut journal, &mut client, before);
    }
    drop(client);
    cluster.stop_and_check();
}

/// Damages the metadata of each replica in one place; only one loses contexts.
fn damage_metadata(cluster: &Cluster, random: &mut Random) {
    let with_contexts = usize::try_from(random.below(3)).unwrap();
    for replica in 0..REPLICAS {
        let region = RegionFile::open(&cluster.region(replica));
        if replica == with_contexts {
            let pages = BLOCKS as u64 / PAGE_CONTEXTS;
            region.damage_contexts(random.below(pages) * PAGE_CONTEXTS);
        } else {
            region.damage_header(usize::try_from(random.below(2)).unwrap());
        }
    }
}

/// `check` has nothing to say about the header any more.
fn assert_headers_whole(cluster: &Cluster) {
    for replica in 0..REPLICAS {
        let mut command = std::process::Command::new(program("newel-downstairs"));
        let ran = run(command.args(["check", "--region"]).arg(cluster.region(replica))).ok();
        assert!(!ran.stdout.contains("not valid"), "{ran}");
    }
}

// Crucible: one bad block keeps a region from opening.
#[test]
fn a_damaged_header_copy_or_context_page_heals() {
    let _heavy = Heavy::take();
    let seed = seed("a_damaged_header_copy_or_context_page_heals");
    let mut random = Random::new(seed);
    let mut cluster = Cluster::small();
    let mut journal = Journal::new(BLOCKS, seed);
    journal.write_all(&mut cluster.connect());
    for round in 0..4 {
        let writing = Writing::start(journal, cluster.connect());
        wait::until("writes are acknowledged", PATIENCE, || (writing.acknowledged() > 500).then_some(()));
        if round % 2 == 0 {
            journal = writing.finish();
            cluster.stop();
        } else {
            for role in Role::ALL {
                cluster.kill(role);
            }
            journal = writing.broken();
        }
        damage_metadata(&cluster, &mut random);
        cluster.start_all();
        let mut client = cluster.connect();
        journal.verify(&mut client);
        cluster.await_all_active();
        journal.verify(&mut client);
    }
    cluster.stop_and_check();
    assert_headers_whole(&cluster);
}

// Crucible: ENOSPC retried for ever.
#[test]
fn a_full_disk_takes_one_replica_out_until_there_is_room() {
    let test = "a_full_disk_takes_one_replica_out_until_there_is_room";
    if !have_root(test) {
        return;
    }
    let _heavy = Heavy::take();
    let seed = seed(test);
    let dir = temp_dir();
    let disk = SmallDisk::mount(&dir.path().join("disk"), 24);
    let mut replicas: [Place; REPLICAS] = Default::default();
    replicas[2].region = Some(disk.path().join("region"));
    let mut cluster = Cluster::start(Options { replicas, ..Options::default() });

    let writing = Writing::start(Journal::new(16_384, seed), cluster.connect());
    let status = cluster.await_status("the replica on the full disk has left", |status| {
        let reason = status.replicas[2].reason.as_deref();
        status.replicas[2].state != "active" && reason.is_some_and(|reason| reason.contains("space"))
    });
    assert_eq!(status.state, "serving");
    let (before, attempts) = (writing.acknowledged(), status.replicas[2].reconnects);
    wait::pass(Duration::from_secs(4));
    let status = cluster.try_status().unwrap();
    let attempts = status.replicas[2].reconnects - attempts;
    println!(
        "{attempts} attempts in 4 s on a full disk; the guest wrote {} blocks",
        writing.acknowledged() - before
    );
    assert!(writing.acknowledged() > before + 1000, "the guest was held up");
    assert!(attempts <= 10, "{attempts} attempts in 4 s: no back-off");
    assert!(status.replicas.iter().take(2).all(|replica| replica.state == "active"), "{status:#?}");

    disk.resize(512);
    cluster.await_all_active();
    let mut journal = writing.finish();
    journal.verify(&mut cluster.connect());
    cluster.stop_and_check();
    drop(cluster);
}
