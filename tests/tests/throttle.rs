//! One replica slower than the others, on real processes: what its queue comes to, and what the guest pays.
//!
//! Every figure is compared with a control of the same run, and with much room: machines that run tests are busy. The exact
//! conditions are simulated, beside the throttle.

#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::process::Command as Program;
use std::time::{Duration, Instant};

use newel_tests::cluster::{Cluster, Options, Role};
use newel_tests::command::{program, run};
use newel_tests::load::{Figures, Load};
use newel_tests::lock::Heavy;
use newel_tests::nbd::Command;
use newel_tests::wait;
use newel_upstairs::core::status::Status;
use rustix::process::Signal;

const SLOW: usize = 2;
const BLOCKS: u64 = 16_384;
const DEPTH: usize = 32;
/// Far below what this serves anywhere, so that the slow replica's rate is that of its fault: 1280 reads of 4 KiB a second.
const BANDWIDTH: u64 = 5 << 20;
const LOOK_EVERY: Duration = Duration::from_millis(20);

fn cluster(config: &'static str) -> Cluster {
    Cluster::start(Options { config, ..Options::default() })
}

/// What was seen of the slow replica while guests read for some time.
#[derive(Debug)]
struct Seen {
    figures: Figures,
    /// The most that was seen. Without a bound of its own a queue grows until the replica leaves, and then anew.
    most_jobs: usize,
    /// At the end: the median of the last looks.
    jobs: usize,
    throttled: bool,
    seconds: f64,
}

/// Reads for `time`, and looks at the status meanwhile. What comes before it has settled is left out of the figures.
fn read_for(cluster: &Cluster, time: Duration, settle: Duration) -> Seen {
    let load = Load::start(&cluster.address(), Command::Read, DEPTH, BLOCKS);
    wait::pass(settle);
    let from = Instant::now();
    let mut looks = Vec::new();
    let mut throttled = false;
    while Instant::now() < from + time {
        if let Some(status) = cluster.try_status() {
            throttled |= status.reads.throttled;
            looks.push(status.replicas[SLOW].queue_jobs);
        }
        wait::pass(LOOK_EVERY);
    }
    let to = Instant::now();
    let figures = load.finish().between(from, to);
    let most_jobs = looks.iter().copied().max().unwrap_or_default();
    let mut last = looks.split_off(looks.len() / 2);
    last.sort_unstable();
    Seen { figures, most_jobs, jobs: last[last.len() / 2], throttled, seconds: (to - from).as_secs_f64() }
}

impl Seen {
    fn rate(&self) -> f64 {
        self.figures.answers as f64 / self.seconds
    }
}

fn is_quiet(status: &Status) -> bool {
    let held = status.replicas.iter().any(|replica| replica.read_delay_us > 0);
    !held && !status.reads.throttled && status.reads.waiting == 0
}

#[test]
fn a_slow_replica_keeps_a_short_queue_and_sets_the_pace() {
    let _heavy = Heavy::take();
    // It is to settle within a second; machines that run tests are given three.
    let (seconds, settle) = (Duration::from_secs(4), Duration::from_secs(3));
    let faults = format!("bandwidth={BANDWIDTH}");
    // The control: without the throttle the queue grows as long as the guest reads.
    let control = cluster("[throttle]\nenabled = false\n");
    control.fault(SLOW, &faults);
    let without = read_for(&control, seconds, settle);
    drop(control);

    let cluster = cluster("");
    cluster.fault(SLOW, &faults);
    let rate = BANDWIDTH as f64 / 4096.0;
    let with = read_for(&cluster, seconds, settle);
    eprintln!("without {without:?}\nwith {with:?}");
    let queue_ms = with.jobs as f64 / rate * 1e3;
    let control_ms = without.most_jobs as f64 / rate * 1e3;
    assert!(with.throttled && !without.throttled);
    assert!(queue_ms < 60.0, "a queue of {queue_ms:.0} ms");
    assert!(control_ms > 500.0, "without the throttle only {control_ms:.0} ms: this control shows nothing");
    assert!(with.rate() > rate * 0.8, "{:.0} reads/s beside a replica of {rate:.0}", with.rate());
    assert!(with.rate() < rate * 1.25, "{:.0} reads/s can't come from a replica of {rate:.0}", with.rate());

    // It recovers under load: the guest is let go.
    let load = Load::start(&cluster.address(), Command::Read, DEPTH, BLOCKS);
    let slow = cluster.await_status("reads are throttled again", |status| status.reads.throttled);
    assert!(slow.reads.cause.is_some_and(|cause| cause.contains("before replica 2")));
    assert!(slow.replicas.iter().any(|replica| replica.id != 2 && replica.read_lead_us > Some(5_000)));
    cluster.fault(SLOW, "off");
    cluster.await_status("nothing is held any more", is_quiet);
    let from = Instant::now();
    wait::pass(Duration::from_secs(1));
    let after = load.finish().between(from, Instant::now());
    assert!(after.answers as f64 > rate * 1.5, "{} reads in the second after the recovery", after.answers);
}

#[test]
fn cancelled_reads_bound_the_queue_of_a_later_replica() {
    let _heavy = Heavy::take();
    let (seconds, settle) = (Duration::from_secs(3), Duration::from_millis(500));
    let control = cluster("[throttle]\nenabled = false\n");
    control.fault(SLOW, "read-delay=200ms");
    let fanned = read_for(&control, seconds, settle);
    drop(control);

    let cluster = cluster("cancel_reads = true\n");
    let equal = read_for(&cluster, seconds, settle);
    cluster.fault(SLOW, "read-delay=200ms");
    let later = read_for(&cluster, seconds, settle);
    eprintln!("fanned out {fanned:?}\nequal {equal:?}\nlater {later:?}");
    assert!(later.jobs <= 3 * DEPTH, "{} reads at the later replica", later.jobs);
    assert!(
        fanned.most_jobs > 6 * DEPTH,
        "only {} without cancelling: this control shows nothing",
        fanned.most_jobs
    );
    assert!(later.rate() > equal.rate() * 0.6, "{:.0} reads/s, not {:.0}", later.rate(), equal.rate());
    assert!(!later.throttled, "cancelling bounds the queue, so nothing is throttled");
}

#[test]
fn a_witnessed_read_does_not_wait_for_a_stopped_replica() {
    let _heavy = Heavy::take();
    let mut cluster = cluster("read_policy = \"witness\"\n");
    let load = Load::start(&cluster.address(), Command::Read, DEPTH, BLOCKS);
    wait::pass(Duration::from_secs(2));
    let control = Instant::now();
    wait::pass(Duration::from_secs(2));
    let stopped = Instant::now();
    cluster.signal(Role::Replica(SLOW), Signal::STOP);
    wait::pass(Duration::from_secs(3));
    let resumed = Instant::now();
    cluster.signal(Role::Replica(SLOW), Signal::CONT);
    cluster.await_all_active();
    let record = load.finish();
    let (before, during) = (record.between(control, stopped), record.between(stopped, resumed));
    eprintln!("before {before:?}\nduring {during:?}");
    let most = Duration::from_millis(300) + before.longest_gap * 2;
    assert!(during.longest_gap < most && during.slowest < most, "{during:?}");
    assert!(during.answers > before.answers / 3, "{} answers after {}", during.answers, before.answers);
}

#[test]
fn faults_are_seen_and_taken_out() {
    let _heavy = Heavy::take();
    let mut cluster = cluster("");
    assert_eq!(cluster.fault(0, "").trim(), "off");
    assert_eq!(cluster.fault(0, "error=1,jitter=1..2ms").trim(), "jitter=1ms..2ms,error=1");
    let status =
        cluster.await_status("the fault is in the status", |status| status.replicas[0].faults.is_some());
    assert_eq!(status.replicas[0].faults.as_deref(), Some("jitter=1ms..2ms,error=1"));
    // All reads of one replica fail: the guest has its answers from the others, and nobody leaves.
    let seen = read_for(&cluster, Duration::from_secs(1), Duration::ZERO);
    assert!(seen.figures.answers > 0);
    cluster.await_active(0);
    assert_eq!(cluster.fault(0, "off").trim(), "off");
    cluster.await_status("the fault is gone", |status| status.replicas[0].faults.is_none());
    let bad = run(Program::new(program("newel"))
        .args(["fault", "slow=1", "--control"])
        .arg(format!("{}.control", cluster.region(0).display())));
    assert!(!bad.status.success() && bad.stderr.contains("there are read-delay"), "{bad}");
    let log = cluster.log(Role::Replica(0));
    assert!(log.contains("FAULTS ARE PUT IN ON PURPOSE: jitter=1ms..2ms,error=1"), "{log}");
    // A new process begins without.
    cluster.fault(0, "read-delay=1ms");
    cluster.terminate(Role::Replica(0));
    cluster.start_daemon(Role::Replica(0));
    assert!(cluster.await_active(0).replicas[0].faults.is_none());
    cluster.stop_and_check();
}
