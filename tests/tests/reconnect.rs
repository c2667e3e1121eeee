//! A guest like a kernel through restarts of the upstairs and broken connections: each is a pause, nothing acknowledged is
//! lost, and no old write lands on a newer one.

use std::time::Duration;

use newel_tests::cluster::{Cluster, Options, Role};
use newel_tests::command::Running;
use newel_tests::kernel::{Kernel, Mounted};
use newel_tests::lock::Heavy;
use newel_tests::nbd::{Address, Client};
use newel_tests::pattern::Random;
use newel_tests::seed::seed;
use newel_tests::wait;
use rustix::process::Signal;

const QUICK: &str = "[timing]\nbackoff_max = \"200ms\"\n";
/// So little that most of what a guest has in flight stays unread in its connections.
const NARROW: &str = "[timing]\nbackoff_max = \"200ms\"\n[limits]\nvolume_jobs = 8\nwaiting = 8\n";
const BLOCKS: usize = 512;

fn start(config: &'static str) -> Cluster {
    Cluster::start(Options { config, ..Options::default() })
}

#[test]
fn restarts_of_the_upstairs_are_pauses() {
    let _heavy = Heavy::take();
    let seed = seed("restarts_of_the_upstairs_are_pauses");
    let mut random = Random::new(seed);
    let mut cluster = start(QUICK);
    let mut kernel = Kernel::attach(cluster.address(), 4, BLOCKS, seed);
    for round in 0..8 {
        let mounted = Mounted::start(kernel);
        mounted.await_writes(300);
        match random.below(4) {
            0 => cluster.terminate(Role::Upstairs),
            1 => {
                // It stalls first, with requests in its sockets and in its memory.
                cluster.signal(Role::Upstairs, Signal::STOP);
                wait::pass(Duration::from_millis(random.below(100)));
                cluster.kill(Role::Upstairs);
            }
            _ => cluster.kill(Role::Upstairs),
        }
        // A replica that is away at the restart has to be brought up to date by the new one.
        let replica = Role::Replica(usize::try_from(random.below(3)).expect("it fits"));
        let also = random.below(3) == 0;
        if also {
            cluster.kill(replica);
        }
        wait::pass(Duration::from_millis(random.below(200)));
        cluster.start_daemon(Role::Upstairs);
        mounted.await_writes(300);
        if also {
            cluster.start_daemon(replica);
        }
        kernel = mounted.settle();
        kernel.verify();
        assert!(kernel.reconnects() > round, "it was not seen at all");
        cluster.await_all_active();
    }
    drop(kernel);
    cluster.stop_and_check();
}

/// A guest that gives connections up while most of what it sent lies unread in them, sends it all again over others, and
/// overwrites it as soon as it is answered.
#[test]
fn what_an_old_connection_still_held_never_lands_on_newer_writes() {
    let _heavy = Heavy::take();
    let seed = seed("what_an_old_connection_still_held_never_lands_on_newer_writes");
    let mut cluster = start(NARROW);
    let mut kernel = Kernel::attach(cluster.address(), 6, BLOCKS, seed);
    for round in 0..8 {
        // Without a quorum nothing is answered.
        for replica in [1, 2] {
            cluster.signal(Role::Replica(replica), Signal::STOP);
        }
        kernel.post().expect("the upstairs is there");
        cluster.await_status("the volume is full", |status| status.jobs_in_flight >= 8);
        // All of its connections, or the first or the last of them.
        match round % 4 {
            1 => kernel.lose(0).expect("the upstairs is there"),
            3 => kernel.lose(5).expect("the upstairs is there"),
            _ => kernel.reconnect(cluster.address()),
        }
        for replica in [1, 2] {
            cluster.signal(Role::Replica(replica), Signal::CONT);
        }
        let mounted = Mounted::start(kernel);
        mounted.await_writes(2000);
        kernel = mounted.settle();
        kernel.verify();
    }
    drop(kernel);
    let log = cluster.log(Role::Upstairs);
    assert!(log.contains("Superseded"), "nothing was left unread, so nothing was tested:\n{log}");
    cluster.await_all_active();
    cluster.stop_and_check();
}

/// An upstairs that sleeps with writes in hand while another takes over, is written to, and then wakes up.
#[test]
fn what_an_upstairs_that_slept_had_in_hand_never_lands_on_newer_writes() {
    let _heavy = Heavy::take();
    let seed = seed("what_an_upstairs_that_slept_had_in_hand_never_lands_on_newer_writes");
    let mut cluster = start(QUICK);
    let mut kernel = Kernel::attach(cluster.address(), 4, BLOCKS, seed);
    for round in 0..3 {
        let mounted = Mounted::start(kernel);
        mounted.await_writes(300);
        kernel = mounted.settle();
        cluster.signal(Role::Upstairs, Signal::STOP);
        kernel.post().expect("the sockets take it");
        let suffix = format!("-{round}");
        let mut second = Running::start(cluster.upstairs_command(&suffix).arg("--takeover"));
        let address = Address::Unix(cluster.dir().join(format!("nbd{suffix}.sock")));
        wait::until("the second serves", Duration::from_secs(30), || {
            assert!(second.running(), "the second ended: {}", second.stderr());
            Client::connect(&address).ok()
        });
        kernel.reconnect(address);
        let mounted = Mounted::start(kernel);
        mounted.await_writes(500);
        cluster.signal(Role::Upstairs, Signal::CONT);
        cluster.ended(Role::Upstairs).failed_saying(&["taken over by"]);
        mounted.await_writes(100);
        kernel = mounted.settle();
        kernel.verify();
        cluster.adopt(second, &suffix);
        cluster.await_all_active();
    }
    drop(kernel);
    cluster.stop_and_check();
}
