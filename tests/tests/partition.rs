//! Cut cables between an upstairs and its replicas, each in a network namespace of its own.

#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::time::{Duration, Instant};

use newel_tests::cluster::{Cluster, Options, Role};
use newel_tests::journal::{Journal, Writing};
use newel_tests::load::{Figures, Load};
use newel_tests::lock::Heavy;
use newel_tests::nbd::Command;
use newel_tests::network::{End, Network};
use newel_tests::pattern::Random;
use newel_tests::seed::seed;
use newel_tests::wait::{self, Watch};

const BLOCKS: usize = 2048;
const PATIENCE: Duration = Duration::from_secs(60);

fn cluster_in(network: &Network) -> Cluster {
    let upstairs = Some(network.upstairs());
    Cluster::start(Options { replicas: network.places(), upstairs, ..Options::default() })
}

fn any_end(random: &mut Random) -> End {
    if random.below(2) == 0 { End::Upstairs } else { End::Replica }
}

#[track_caller]
fn start_writing(cluster: &Cluster, journal: Journal, count: u64) -> Writing {
    let writing = Writing::start(journal, cluster.connect());
    wait::until("writes are acknowledged", PATIENCE, || (writing.acknowledged() >= count).then_some(()));
    writing
}

fn shown(figures: Figures) -> String {
    let Figures { answers, longest_gap, slowest, .. } = figures;
    format!("{answers} answers, longest gap {longest_gap:.1?}, slowest {slowest:.1?}")
}

// Ceph, Vitastor, QEMU quorum: one replica that says nothing holds up the guest.
#[test]
fn one_replica_cut_off_is_not_seen_by_the_guest() {
    let test = "one_replica_cut_off_is_not_seen_by_the_guest";
    let _heavy = Heavy::take();
    let Some(network) = Network::new(test) else { return };
    let mut random = Random::new(seed(test));
    let mut cluster = cluster_in(&network);
    let loads =
        [Command::Write, Command::Read].map(|what| (what, Load::start(&cluster.address(), what, 8, 16_384)));
    let start = Instant::now();
    wait::pass(Duration::from_secs(2));
    let mut cuts = Vec::new();
    // Shorter than it takes to be missed, and longer.
    for seconds in [2, 7] {
        let (replica, end) = (usize::try_from(random.below(3)).unwrap(), any_end(&mut random));
        let from = Instant::now();
        network.cut(replica, end);
        wait::pass(Duration::from_secs(seconds));
        cuts.push((from, Instant::now(), replica, end));
        network.heal(replica, end);
        cluster.await_all_active();
    }
    for (what, load) in loads {
        let record = load.finish();
        let control = record.between(start, cuts[0].0);
        println!("{what:?}, control: {}", shown(control));
        for &(from, to, replica, end) in &cuts {
            let cut = record.between(from, to);
            println!("{what:?}, replica {replica} cut off at its {end:?} end: {}", shown(cut));
            let bound = Duration::from_secs(1).max(control.longest_gap * 10);
            assert!(cut.longest_gap < bound, "{what:?}: the guest saw a gap of {:?}", cut.longest_gap);
        }
    }
    cluster.stop_and_check();
}

// Longhorn: a volume goes read-only after "R/W Timeout 8s". Ceph: I/O blocked long after the cause is gone.
#[test]
fn with_two_replicas_cut_off_writes_wait_and_reads_go_on() {
    let test = "with_two_replicas_cut_off_writes_wait_and_reads_go_on";
    let _heavy = Heavy::take();
    let Some(network) = Network::new(test) else { return };
    let seed = seed(test);
    let mut random = Random::new(seed);
    let mut cluster = cluster_in(&network);
    let mut reader = cluster.connect();
    reader.write(100 << 20, &[0x5a; 4096]);
    let writing = start_writing(&cluster, Journal::new(BLOCKS, seed), 500);
    let left = usize::try_from(random.below(3)).unwrap();
    let cut = [(left + 1) % 3, (left + 2) % 3].map(|replica| (replica, any_end(&mut random)));
    for (replica, end) in cut {
        network.cut(replica, end);
    }
    // What was on its way is acknowledged, then nothing more.
    let mut last = (writing.acknowledged(), Watch::start());
    wait::until("writes wait", PATIENCE, || {
        if writing.acknowledged() != last.0 {
            last = (writing.acknowledged(), Watch::start());
        }
        (last.1.elapsed() > Duration::from_millis(500)).then_some(())
    });
    let mut slowest = Duration::ZERO;
    let watch = Watch::start();
    while watch.elapsed() < Duration::from_secs(9) {
        let read = Watch::start();
        assert_eq!(reader.read(100 << 20, 4096), [0x5a; 4096]);
        slowest = slowest.max(read.elapsed());
        wait::pass(Duration::from_millis(50));
    }
    assert_eq!(writing.acknowledged(), last.0, "a write was acknowledged without a quorum");
    assert!(slowest < Duration::from_secs(1), "a read took {slowest:?}");

    let healed = Watch::start();
    for (replica, end) in cut {
        network.heal(replica, end);
    }
    wait::until("writes resume by themselves", PATIENCE, || {
        (writing.acknowledged() > last.0 + 500).then_some(())
    });
    println!("slowest read {slowest:.1?}; writes were back {:.1?} after the cables", healed.elapsed());
    cluster.await_all_active();
    writing.finish().verify(&mut reader);
    drop(reader);
    cluster.stop_and_check();
}

// Longhorn: the wrong replica is kept after a partition.
#[test]
fn what_a_cut_off_replica_missed_is_never_unwritten() {
    let test = "what_a_cut_off_replica_missed_is_never_unwritten";
    let _heavy = Heavy::take();
    let Some(network) = Network::new(test) else { return };
    let seed = seed(test);
    let mut random = Random::new(seed);
    let mut cluster = cluster_in(&network);
    let mut journal = Journal::new(BLOCKS, seed);
    for _ in 0..2 {
        let old = usize::try_from(random.below(3)).unwrap();
        let (near, far) = ((old + 1) % 3, (old + 2) % 3);
        let writing = start_writing(&cluster, journal, 500);
        network.cut(old, End::Replica);
        let before = writing.acknowledged();
        wait::until("writes go on without it", PATIENCE, || {
            (writing.acknowledged() > before + 1000).then_some(())
        });
        cluster.await_away(old);
        cluster.kill(Role::Upstairs);
        journal = writing.broken();

        // The one that missed it all is the only one to be reached: it must not be taken for the volume.
        network.cut(near, End::Replica);
        network.cut(far, End::Replica);
        network.heal(old, End::Replica);
        cluster.start_daemon(Role::Upstairs);
        let watch = Watch::start();
        wait::until("it reaches the old one", PATIENCE, || cluster.try_status());
        while watch.elapsed() < Duration::from_secs(2) {
            let status = cluster.try_status().expect("it answers");
            assert_eq!(status.state, "activating", "a stale replica alone was served");
            wait::pass(Duration::from_millis(100));
        }
        // With one more everything is there, and the third comes by itself.
        network.heal(near, End::Replica);
        let mut client = cluster.connect();
        journal.verify(&mut client);
        network.heal(far, End::Replica);
        cluster.await_all_active();
        journal.verify(&mut client);
    }
    cluster.stop_and_check();
}

#[test]
fn a_session_that_a_cut_off_replica_still_holds_for_alive_disturbs_nobody() {
    let test = "a_session_that_a_cut_off_replica_still_holds_for_alive_disturbs_nobody";
    let _heavy = Heavy::take();
    let Some(network) = Network::new(test) else { return };
    let seed = seed(test);
    let mut cluster = cluster_in(&network);
    let writing = start_writing(&cluster, Journal::new(BLOCKS, seed), 500);
    // The end of the first upstairs is not seen by a replica that can't be reached at that moment.
    network.cut(1, End::Replica);
    cluster.kill(Role::Upstairs);
    let mut journal = writing.broken();
    cluster.start_daemon(Role::Upstairs);
    let mut client = cluster.connect();
    network.heal(1, End::Replica);
    cluster.await_all_active();
    journal.verify(&mut client);
    drop(client);
    cluster.stop_and_check();
}
