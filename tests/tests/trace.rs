//! A delay put into each stage in turn, on real processes: the record of the slow I/O names that stage, and the replica.
//!
//! No figure is absolute: a delay is many times the threshold, and what is asked is which stage has most of it.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]
#![expect(clippy::print_stdout, reason = "what was found is part of the result")]

use std::process::Command as Program;
use std::time::Duration;

use newel_tests::cluster::{Cluster, Options, Role};
use newel_tests::command::{program, run};
use newel_tests::load::Load;
use newel_tests::lock::Heavy;
use newel_tests::metrics::Metrics;
use newel_tests::nbd::{Client, Command};
use newel_tests::network::{End, Network};
use newel_tests::starved_disk::StarvedDisk;
use newel_tests::wait;
use newel_upstairs::core::slow::SlowIo;
use rustix::process::Signal;

const PATIENCE: Duration = Duration::from_secs(60);
const BLOCK: u64 = 4096;
const BLOCKS: u64 = 16_384;
/// The replica that a delay is put into.
const CULPRIT: usize = 2;
/// Far below every delay here, far above what a busy machine does to one request.
const LOW_THRESHOLD: &str = "[trace]\nthreshold = \"100ms\"\n";
const THRESHOLD: &str = "[trace]\nthreshold = \"200ms\"\n";

fn cluster(config: &'static str) -> Cluster {
    Cluster::start(Options { config, ..Options::default() })
}

/// Sends writes of one block each, without waiting.
#[track_caller]
fn send_writes(client: &mut Client, blocks: impl IntoIterator<Item = u64>) -> usize {
    let data = vec![0x6e; usize::try_from(BLOCK).unwrap()];
    let mut count = 0;
    for block in blocks {
        client.send(Command::Write, 0, block * BLOCK, u32::try_from(BLOCK).unwrap(), &data).unwrap();
        count += 1;
    }
    count
}

#[track_caller]
fn receive(client: &mut Client, count: usize) {
    for _ in 0..count {
        assert_eq!(client.receive().unwrap().errno, 0);
    }
}

/// The slow I/Os of which all is known, once there is one of this kind.
#[track_caller]
fn await_slow(cluster: &Cluster, what: &str, is_it: impl Fn(&SlowIo) -> bool) -> SlowIo {
    let mut last = Vec::new();
    let found = wait::try_until(PATIENCE, || {
        last = cluster.slow();
        last.iter().find(|slow| is_it(slow)).cloned()
    });
    let found = found.unwrap_or_else(|| {
        let seen: Vec<_> = last.iter().map(|slow| (&slow.why, slow.ended, &slow.verdict.text)).collect();
        panic!("{what}: none in {seen:#?}")
    });
    println!("{what}: {}", found.verdict.text);
    found
}

/// Ended, and this stage (of this replica) has most of it.
fn blames(slow: &SlowIo, stage: &str, replica: Option<usize>) -> bool {
    let by = slow.verdict.replica.map(usize::from);
    slow.ended && slow.verdict.stage == stage && by == replica && slow.verdict.share > 0.5
}

#[test]
fn requests_behind_a_full_volume_and_a_stopped_replica_are_told_apart() {
    let _heavy = Heavy::take();
    let mut cluster = cluster("[trace]\nthreshold = \"200ms\"\n[limits]\nvolume_jobs = 4\n");
    let mut client = cluster.connect();
    client.write(0, &[1; 4096]);
    // With one replica away the culprit's answers are needed.
    cluster.kill(Role::Replica(0));
    cluster.await_away(0);
    cluster.signal(Role::Replica(CULPRIT), Signal::STOP);
    let count = send_writes(&mut client, 0..12);
    wait::pass(Duration::from_millis(1500));
    let waiting = cluster.in_flight();
    assert_eq!(waiting.iter().filter(|slow| slow.job.is_some()).count(), 4, "as many as the volume takes");
    assert_eq!(waiting.iter().filter(|slow| slow.job.is_none()).count(), 8, "the others wait");
    assert!(waiting.iter().all(|slow| !slow.ended));
    cluster.signal(Role::Replica(CULPRIT), Signal::CONT);
    receive(&mut client, count);
    let behind = await_slow(&cluster, "behind a full volume", |slow| blames(slow, "admission", None));
    assert!(behind.admitted_us.unwrap() > 1_000_000, "{behind:#?}");
    let stopped = await_slow(&cluster, "at a stopped replica", |slow| blames(slow, "network", Some(CULPRIT)));
    assert_eq!(stopped.why, "guest");
    cluster.start_daemon(Role::Replica(0));
    cluster.await_all_active();
    cluster.stop_and_check();
}

#[test]
fn reads_that_the_throttle_keeps_back_say_so() {
    let _heavy = Heavy::take();
    let mut cluster = cluster(THRESHOLD);
    cluster.fault(CULPRIT, "bandwidth=1M");
    let load = Load::start(&cluster.address(), Command::Read, 256, BLOCKS);
    await_slow(&cluster, "kept back", |slow| slow.operation == "read" && blames(slow, "throttle", None));
    load.finish();
    cluster.fault(CULPRIT, "off");
    cluster.stop_and_check();
}

#[test]
fn a_slow_device_is_named_and_the_guest_did_not_wait_for_it() {
    let _heavy = Heavy::take();
    let mut cluster = cluster(THRESHOLD);
    let mut client = cluster.connect();
    client.write(0, &[1; 4096]);
    cluster.fault(CULPRIT, "read-delay=1500ms");
    client.read(0, 4096);
    let early = wait::until("it is told of while it is under way", PATIENCE, || {
        cluster.slow().into_iter().find(|slow| !slow.ended)
    });
    assert_eq!((early.verdict.stage.as_str(), early.verdict.replica), ("no_reply", Some(2)), "{early:#?}");
    let slow = await_slow(&cluster, "a slow device", |slow| blames(slow, "device", Some(CULPRIT)));
    assert_eq!((slow.id, slow.why.as_str()), (early.id, "replica"), "one record");
    assert!(slow.total_us < 1_000_000 && slow.verdict.took_us > 1_000_000, "{slow:#?}");
    // As an operator reads it.
    let address = format!("unix:{}", cluster.status_socket().display());
    let shown = run(Program::new(program("newel")).args(["slow", "--address", &address])).ok().stdout;
    assert!(shown.contains("replica 2, device, ") && shown.contains("replica 2 device"), "{shown}");
    let shown = run(Program::new(program("newel")).args(["inflight", "--address", &address])).ok().stdout;
    assert_eq!(shown.trim(), "nothing is under way");
    cluster.fault(CULPRIT, "off");
    cluster.stop_and_check();
}

#[test]
fn queue_submit_and_device_of_one_disk_are_told_apart() {
    let test = "queue_submit_and_device_of_one_disk_are_told_apart";
    let _heavy = Heavy::take();
    let Some(disk) = StarvedDisk::make(test) else { return };
    let mut cluster = Cluster::on_a_disk(&disk, CULPRIT, LOW_THRESHOLD);
    let mut client = cluster.connect();
    // Distinct blocks, far apart, so that none is merged with another.
    let spread = |number: u64| (number % 16) * 1024 + number / 16 * 2;

    disk.slow_down(cluster.pid(Role::Replica(CULPRIT)));
    let count = send_writes(&mut client, (0..96).map(spread));
    receive(&mut client, count);
    let device = await_slow(&cluster, "a throttled device", |slow| blames(slow, "device", Some(CULPRIT)));
    assert_eq!(device.operation, "write");
    disk.feed();
    cluster.await_status("the replica has caught up", |status| status.replicas[CULPRIT].queue_jobs == 0);

    disk.starve(cluster.pid(Role::Replica(CULPRIT)));
    let count = send_writes(&mut client, (0..256).map(spread));
    receive(&mut client, count);
    await_slow(&cluster, "a starved device", |slow| blames(slow, "submit", Some(CULPRIT)));
    cluster.await_status("the replica has caught up", |status| status.replicas[CULPRIT].queue_jobs == 0);
    // One after the other, as they overlap; so many that they are slower than those before.
    let count = send_writes(&mut client, std::iter::repeat_n(7, 512));
    receive(&mut client, count);
    await_slow(&cluster, "overlapping writes", |slow| blames(slow, "queue", Some(CULPRIT)));
    disk.feed();
    cluster.stop_and_check();
}

#[test]
fn a_replica_cut_off_for_three_seconds_is_one_record_with_both_attempts() {
    let test = "a_replica_cut_off_for_three_seconds_is_one_record_with_both_attempts";
    let _heavy = Heavy::take();
    let Some(network) = Network::new(test) else { return };
    let config = "[trace]\nthreshold = \"200ms\"\n[timing]\nping_every = \"300ms\"\nsilence = \"2s\"\n";
    let upstairs = Some(network.upstairs());
    let mut cluster =
        Cluster::start(Options { replicas: network.places(), upstairs, config, ..Options::default() });
    let mut client = cluster.connect();
    client.write(0, &[1; 4096]);

    // Shorter than it takes to be missed: a slow network, and the guest did not wait.
    network.cut(CULPRIT, End::Replica);
    client.write(BLOCK, &[2; 4096]);
    wait::pass(Duration::from_millis(400));
    network.heal(CULPRIT, End::Replica);
    let late = await_slow(&cluster, "a network away for a moment", |slow| {
        slow.offset == BLOCK && blames(slow, "network", Some(CULPRIT))
    });
    assert_eq!(late.why, "replica");
    cluster.await_all_active();

    cluster.kill(Role::Replica(0));
    cluster.await_away(0);
    network.cut(CULPRIT, End::Replica);
    let count = send_writes(&mut client, [9]);
    wait::pass(Duration::from_secs(3));
    network.heal(CULPRIT, End::Replica);
    receive(&mut client, count);
    let slow = await_slow(&cluster, "cut off for 3 s", |slow| {
        slow.offset == 9 * BLOCK && blames(slow, "reconnect", Some(CULPRIT))
    });
    let of_it: Vec<SlowIo> = cluster.slow().into_iter().filter(|slow| slow.offset == 9 * BLOCK).collect();
    assert_eq!(of_it.len(), 1, "one record: {of_it:#?}");
    let lane = slow.replicas.iter().find(|lane| usize::from(lane.replica) == CULPRIT).unwrap();
    assert!(lane.attempts >= 2 && lane.sent_us > 2_500_000 && lane.replied_us.is_some(), "{lane:?}");
    assert!(slow.verdict.text.contains("requeued by a reconnect at"), "{}", slow.verdict.text);
    for what in ["left", "sent_again", "quorum_lost"] {
        assert!(slow.events.iter().any(|event| event.what == what), "no {what} in {slow:#?}");
    }
    cluster.start_daemon(Role::Replica(0));
    cluster.await_all_active();
    cluster.stop_and_check();
}

#[test]
fn the_log_has_each_slow_job_and_the_metrics_count_all() {
    let _heavy = Heavy::take();
    let mut cluster = Cluster::make(Options::default());
    let log = cluster.dir().join("slow.jsonl");
    let config = format!("[trace]\nthreshold = \"200ms\"\nslow_log = {:?}\n", log.display().to_string());
    std::fs::write(cluster.dir().join("upstairs.toml"), config).unwrap();
    cluster.start_all();
    cluster.await_all_active();
    let mut client = cluster.connect();
    let count = send_writes(&mut client, 0..100);
    receive(&mut client, count);
    cluster.signal(Role::Replica(CULPRIT), Signal::STOP);
    let count = send_writes(&mut client, 200..205);
    receive(&mut client, count);
    wait::pass(Duration::from_millis(1000));
    cluster.signal(Role::Replica(CULPRIT), Signal::CONT);
    let address = format!("unix:{}", cluster.status_socket().display());
    let ended = |text: &str| {
        let all: Vec<SlowIo> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        all.iter().filter(|slow| slow.ended && slow.why == "replica").count()
    };
    wait::until("all five are in the log", PATIENCE, || {
        let text = std::fs::read_to_string(&log).unwrap();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        (ended(whole) == 5).then_some(())
    });
    let journal = cluster.log(Role::Upstairs);
    assert!(journal.contains("slow I/O: {\"id\":"), "{journal}");
    let shown = run(Program::new(program("newel")).args(["slow", "--log"]).arg(&log)).ok().stdout;
    assert_eq!(shown.matches("replica 2, network,").count(), 5, "{shown}");

    let status = cluster.await_status("it is over", |status| status.jobs_in_flight == 0);
    assert_eq!(status.trace.slow, 5, "{:?}", status.trace);
    let metrics = Metrics::parse(&cluster.get("/metrics").unwrap());
    let write = [("operation", "write")];
    assert_eq!(metrics.value("newel_job_duration_seconds_count", &write), Some(105.0));
    assert_eq!(metrics.value("newel_job_bytes_total", &write), Some(105.0 * 4096.0));
    assert_eq!(metrics.value("newel_slow_jobs_total", &[]), Some(5.0));
    for replica in ["0", "1", "2"] {
        let at = [("operation", "write"), ("replica", replica)];
        assert_eq!(metrics.value("newel_replica_job_duration_seconds_count", &at), Some(105.0));
        let network = [("operation", "write"), ("replica", replica), ("stage", "network")];
        let sum = metrics.value("newel_replica_stage_duration_seconds_sum", &network).unwrap();
        assert_eq!(
            sum > 4.0,
            replica == "2",
            "replica {replica} was stopped for a second, for 5 writes: {sum}"
        );
        let state = [("replica", replica), ("state", "active")];
        assert_eq!(metrics.value("newel_replica_state", &state), Some(1.0));
    }
    let health = run(Program::new(program("newel")).args(["status", "--address", &address])).ok();
    assert!(health.stdout.contains("serving"), "{health}");
    cluster.stop_and_check();
}
