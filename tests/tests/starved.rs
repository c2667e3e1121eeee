//! A device whose queue is full, or whose file system is frozen: whoever submits a write to it sleeps in the kernel. Everything
//! that is not that write goes on.
//!
//! The check is seen to fail, too: on a healthy device, where nothing is held up, and with a replica that submits on its reactor
//! (`newel-downstairs-inline`, built with the feature `test-faults`).

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]
#![expect(clippy::print_stdout, reason = "what was measured is part of the result")]
#![expect(clippy::disallowed_methods, reason = "tests on real processes live in real time")]

use std::process::Command;
use std::time::{Duration, Instant};

use newel_protocol::lag::Health;
use newel_tests::cluster::{Cluster, Options, Place, Role, own_address};
use newel_tests::command::{Running, bin_dir, program, run};
use newel_tests::load::{Figures, Load};
use newel_tests::lock::{Heavy, come_first};
use newel_tests::nbd;
use newel_tests::skip::skipped;
use newel_tests::starved_disk::StarvedDisk;
use newel_tests::volume::{REPLICAS, as_pid};
use newel_tests::wait;
use newel_tests::wire::{Peer, ping_always, wake_always, write_always};
use rustix::process::{Signal, kill_process};
use uuid::Uuid;

const VOLUME: Uuid = Uuid::from_u128(0x57a0);
const REGION: &str = "64M";
const BLOCKS: u64 = 16_384;
/// Far more than the tags that are left.
const DEPTH: usize = 32;
const PATIENCE: Duration = Duration::from_secs(30);

/// A submission that slept this long has met the full queue.
const STALL_US: u32 = 80_000;
const LAG_P999_MAX: Duration = Duration::from_millis(10);
const PING_MAX: Duration = Duration::from_millis(20);
/// Both are on top of what the machine did to a thread that only slept in the same run, so many times.
const MACHINE: u32 = 2;
/// A machine that others use, too, may be late by itself: one of so many runs must be clean. A reactor that waits for its disk
/// never has one.
const RUNS: usize = 4;
/// The guest's tail depends on the whole machine: with a replica away there is no third one to hide what any of the others is kept
/// from by other processes.
const GUEST_RUNS: usize = 6;

const NO_STALL: &str = "no submission stalled";
const REACTOR_WAITED: &str = "the reactor waited";
const PING_WAITED: &str = "a ping waited";

/// One may meet the thread while it writes contexts, and then that waits and no submission does.
const FREEZES: usize = 5;

const OURS: &str = "newel-downstairs";
const INLINE: &str = "newel-downstairs-inline";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// 4 tags and 200 writes a second, for 3 s.
    Starved,
    /// A frozen file system, for 0.3 s, some times.
    Frozen,
}

/// What one run showed.
#[derive(Debug)]
struct Seen {
    health: Health,
    slowest_ping: Duration,
    pings: usize,
    writes: u64,
    /// Of a thread that only slept: how late it was at the 99.9th percentile, and at most.
    bystander_p999: Duration,
    bystander_max: Duration,
}

/// One replica by itself, from its start to its end, under a load of writes, with a fault in the midst.
#[track_caller]
fn watch(name: &str, disk: &StarvedDisk, fault: Fault) -> Seen {
    let region = disk.path().join("region");
    std::fs::remove_file(&region).ok();
    let mut create = Command::new(program(OURS));
    create.args(["create", "--prealloc", "full", "--size", REGION, "--volume", &VOLUME.to_string()]);
    run(create.arg("--region").arg(&region)).ok();
    let address = own_address();
    let mut replica = Command::new(program(name));
    let mut replica = Running::start(replica.args(["run", "--listen", &address, "--region"]).arg(&region));
    let mut writer = wait::until("the replica answers", PATIENCE, || {
        assert!(replica.running(), "it ended: {}", replica.stderr());
        Peer::greet(&address, VOLUME).ok()
    });
    writer.promote(1).unwrap();
    let bystander = wake_always();
    let pings = ping_always(Peer::greet(&address, VOLUME).unwrap());
    let writes = write_always(writer, DEPTH, BLOCKS);
    wait::pass(Duration::from_millis(500));
    match fault {
        Fault::None => wait::pass(Duration::from_secs(2)),
        Fault::Starved => {
            disk.starve(replica.pid());
            wait::pass(Duration::from_secs(3));
            disk.feed();
        }
        Fault::Frozen => {
            for _ in 0..FREEZES {
                let frozen = disk.freeze();
                wait::pass(Duration::from_millis(300));
                drop(frozen);
                wait::pass(Duration::from_millis(100));
            }
        }
    }
    let writes = writes.finish();
    let pings = pings.finish();
    // Newer than what the last of those was told.
    wait::pass(Duration::from_millis(150));
    let health = Peer::greet(&address, VOLUME).unwrap().ping(1).unwrap();
    kill_process(as_pid(replica.pid()), Signal::TERM).unwrap();
    replica.wait(PATIENCE).ok();
    let mut late = bystander.finish();
    late.sort_unstable();
    Seen {
        health,
        slowest_ping: pings.iter().max().copied().unwrap_or_default(),
        pings: pings.len(),
        writes,
        bystander_p999: late[late.len() * 999 / 1000],
        bystander_max: late.last().copied().unwrap(),
    }
}

/// What a run lacks of: a submission stalled, and the reactor did not.
fn faults_of(seen: &Seen) -> Vec<String> {
    let Seen { health, slowest_ping, pings, writes, bystander_p999, bystander_max } = seen;
    let mut faults = Vec::new();
    if health.submits.max_us < STALL_US {
        faults.push(format!("{NO_STALL}: the longest took {} µs", health.submits.max_us));
    }
    let late = Duration::from_micros(health.lag.p999_us.into());
    if late >= LAG_P999_MAX + MACHINE * *bystander_p999 {
        faults.push(format!(
            "{REACTOR_WAITED}: late by {late:?} at the 99.9th percentile, a bystander by {bystander_p999:?}"
        ));
    }
    if *slowest_ping > PING_MAX + MACHINE * *bystander_max {
        faults.push(format!(
            "{PING_WAITED}: the slowest took {slowest_ping:?}, a bystander was late by {bystander_max:?}"
        ));
    }
    if *pings < 100 || *writes < 100 {
        faults.push(format!("only {pings} pings and {writes} writes"));
    }
    faults
}

/// True if this is among the faults.
fn has(faults: &[String], fault: &str) -> bool {
    faults.iter().any(|found| found.starts_with(fault))
}

/// Both halves of the proof, and the controls.
#[track_caller]
fn prove(test: &str, fault: Fault) {
    if !bin_dir().join(INLINE).is_file() {
        let build = format!(
            "cargo build --release --workspace --features newel-downstairs/test-faults --bin {INLINE}"
        );
        return skipped(test, &format!("the control is missing: {build}, or tools/test.sh"));
    }
    let _heavy = Heavy::take();
    let Some(disk) = StarvedDisk::make(test) else { return };
    come_first();
    let healthy = watch(OURS, &disk, Fault::None);
    println!("healthy: {healthy:?}");
    let faults = faults_of(&healthy);
    assert!(has(&faults, NO_STALL), "it stalls without a fault: {healthy:?}");

    let mut runs = Vec::new();
    while runs.len() < RUNS && runs.last().is_none_or(|faults: &Vec<String>| !faults.is_empty()) {
        let seen = watch(OURS, &disk, fault);
        println!("{fault:?}: {seen:?}");
        runs.push(faults_of(&seen));
    }
    assert!(runs.last().is_some_and(Vec::is_empty), "no run was clean: {runs:#?}");

    let inline = watch(INLINE, &disk, fault);
    println!("{fault:?}, submitted on the reactor: {inline:?}");
    let faults = faults_of(&inline);
    assert!(has(&faults, REACTOR_WAITED) && has(&faults, PING_WAITED), "the control passes: {faults:?}");
}

#[test]
fn a_full_device_queue_holds_up_its_writes_and_nothing_else() {
    prove("a_full_device_queue_holds_up_its_writes_and_nothing_else", Fault::Starved);
}

#[test]
fn a_frozen_file_system_holds_up_its_writes_and_nothing_else() {
    prove("a_frozen_file_system_holds_up_its_writes_and_nothing_else", Fault::Frozen);
}

/// A guest's 4K writes for some seconds.
fn guest(cluster: &Cluster) -> Figures {
    let from = Instant::now();
    let load = Load::start(&cluster.address(), nbd::Command::Write, 8, BLOCKS);
    wait::pass(Duration::from_secs(4));
    let to = Instant::now();
    load.finish().between(from, to)
}

fn has_huge_pages(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let told = status.lines().find_map(|line| line.strip_prefix("THP_enabled:"));
    told.expect("since Linux 5.0").trim() != "0"
}

#[test]
fn a_guest_does_not_notice_one_starved_replica() {
    let test = "a_guest_does_not_notice_one_starved_replica";
    let _heavy = Heavy::take();
    let Some(disk) = StarvedDisk::make(test) else { return };
    come_first();
    let mut replicas: [Place; REPLICAS] = Default::default();
    replicas[2].region = Some(disk.path().join("region"));
    let mut cluster = Cluster::start(Options { size: REGION, replicas, ..Options::default() });
    for role in [Role::Upstairs, Role::Replica(0)] {
        assert!(!has_huge_pages(cluster.pid(role)), "{role:?}: each holds its reactor up for milliseconds");
    }
    // Every extent is written once, so that all runs find the same.
    guest(&cluster);

    let mut ratios = Vec::new();
    for _ in 0..GUEST_RUNS {
        cluster.await_all_active();
        let healthy = guest(&cluster);
        disk.starve(cluster.pid(Role::Replica(2)));
        let starved = guest(&cluster);
        if let Some(status) = cluster.try_status() {
            println!("the starved replica: {:?}", status.replicas[2]);
        }
        disk.feed();
        println!("healthy {healthy:?}, starved {starved:?}");
        ratios.push(starved.p999.as_secs_f64() / healthy.p999.as_secs_f64());
        if ratios.last().is_some_and(|&ratio| ratio <= 2.0) {
            break;
        }
    }
    assert!(
        ratios.last().is_some_and(|&ratio| ratio <= 2.0),
        "p99.9 of starved and healthy runs: {ratios:.1?}"
    );
    // The replica itself tells that it was starved, and that its reactor was not.
    let status = cluster.await_all_active();
    let health = cluster.await_status("the replica has told", |status| status.replicas[2].health.is_some());
    let health = health.replicas[2].health.clone().unwrap();
    println!("{status:?} {health:?}");
    assert!(health.submits.delays.max_us >= STALL_US, "{health:?}");
    cluster.stop_and_check();
}
