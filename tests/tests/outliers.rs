//! `tools/trace/outliers.sh` points at the stage of a block device that keeps a request waiting: the tag wait where tags are few, the
//! device where there are enough of them and it is slow. The load is the same in both, so each is the other's control.

use std::process::Command;
use std::time::Duration;

use newel_tests::command::{Running, run};
use newel_tests::lock::Heavy;
use newel_tests::skip::have;
use newel_tests::starved_disk::StarvedDisk;
use newel_tests::tracer::{self, script};
use newel_tests::volume::as_pid;
use newel_tests::wait;
use rustix::process::{Signal, kill_process};

const PATIENCE: Duration = Duration::from_secs(60);
/// Above what the fast device takes, far below the 100 ms of the throttled one.
const SLOW_MS: &str = "30";
/// Under a fault.
const TIME: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    Starved,
    Slow,
}

/// How often each stage was blamed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Blamed {
    tag: usize,
    device: usize,
    other: usize,
}

/// Sixteen threads that write one block after the other, and what the script says of the device that carries the file system.
#[track_caller]
fn watch(disk: &StarvedDisk, fault: Fault) -> Blamed {
    let file = disk.path().join("load");
    std::fs::write(&file, vec![1; 32 << 20]).expect("the disk has room");
    let tracer = tracer::watch(script("outliers.sh").args(["-m", SLOW_MS]).arg(&file));
    let mut load = Command::new("fio");
    load.args(["--name=load", "--rw=randwrite", "--bs=128k", "--size=32m", "--direct=1", "--ioengine=psync"]);
    load.args(["--numjobs=16", "--thread", "--time_based", "--runtime=600"]);
    let load = Running::start(load.arg(format!("--filename={}", file.display())));
    match fault {
        Fault::None => {}
        Fault::Starved => disk.starve(load.pid()),
        Fault::Slow => disk.slow_down(load.pid()),
    }
    wait::pass(TIME);
    disk.feed();
    kill_process(as_pid(load.pid()), Signal::INT).expect("fio runs");
    load.wait(PATIENCE);
    let said = tracer::end(tracer);
    let upper = tracer::upper_device(&said);
    let mut blamed = Blamed::default();
    for line in said.lines().filter(|line| line.contains(&format!(" {upper} W"))) {
        if line.ends_with("the device's queue was full") && line.contains("a TAG") {
            blamed.tag += 1;
        } else if line.ends_with("the DEVICE was slow") {
            blamed.device += 1;
        } else {
            blamed.other += 1;
        }
    }
    blamed
}

#[test]
fn a_full_queue_is_blamed_on_the_tags_and_a_slow_device_on_the_device() {
    let test = "a_full_queue_is_blamed_on_the_tags_and_a_slow_device_on_the_device";
    let _heavy = Heavy::take();
    if !have(test, &["fio"]) || !tracer::can_trace(test, "tracepoint:block:block_getrq") {
        return;
    }
    let Some(disk) = StarvedDisk::make(test) else { return };
    let starved = watch(&disk, Fault::Starved);
    let slow = watch(&disk, Fault::Slow);
    let healthy = watch(&disk, Fault::None);
    eprintln!("starved {starved:?}, slow {slow:?}, healthy {healthy:?}");
    assert!(starved.tag > 10 && starved.tag > 2 * starved.device, "{starved:?}");
    assert!(slow.device > 10 && slow.device > 10 * slow.tag, "{slow:?}");
    // A busy machine has slow requests of its own, though few.
    assert!(healthy.tag + healthy.device < starved.tag / 2 + 5, "{healthy:?} beside {starved:?}");
}

#[test]
fn what_can_not_be_watched_is_refused() {
    let refused = |arguments: &[&str], part: &str| {
        run(script("outliers.sh").args(arguments)).failed_saying(&[part]);
    };
    refused(&[], "name one file or block device");
    refused(&["/nowhere/region"], "/nowhere/region does not exist");
    refused(&["-m", "soon", "/"], "no number of milliseconds");
    refused(&["/proc/self/status"], "no block device is below");
}
