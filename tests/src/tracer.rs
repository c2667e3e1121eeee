//! The scripts of `tools/trace/`, and whether bpftrace can do here what they need.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::command::{Running, run};
use crate::skip::{have, skipped};
use crate::volume::as_pid;
use crate::wait;

/// For bpftrace to attach, and to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// True if bpftrace attaches to this probe; else the test is recorded as skipped.
pub fn can_trace(test: &str, probe: &str) -> bool {
    if !have(test, &["bpftrace"]) {
        return false;
    }
    let tried =
        run(Command::new("bpftrace").args(["-e", &format!("{probe} {{ exit(); }} BEGIN {{ exit(); }}")]));
    if !tried.status.success() {
        let why = tried.stderr.lines().last().unwrap_or_default().to_owned();
        skipped(test, &format!("bpftrace can't watch {probe} here: {why}"));
    }
    tried.status.success()
}

pub fn script(name: &str) -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/trace").join(name))
}

/// Starts one, until it watches.
#[track_caller]
pub fn watch(command: &mut Command) -> Running {
    let mut tracer = Running::start(command);
    wait::until("the script watches", PATIENCE, || {
        assert!(tracer.running(), "{}{}", tracer.stdout(), tracer.stderr());
        tracer.stdout().contains("watching for").then_some(())
    });
    tracer
}

/// Ends it; all that it said.
#[track_caller]
pub fn end(tracer: Running) -> String {
    kill_process(as_pid(tracer.pid()), Signal::INT).expect("the script runs");
    tracer.wait(PATIENCE).ok().stdout
}

/// The numbers, such as `7:1`, of the device that the file lies on: the first that the script names.
#[track_caller]
pub fn upper_device(said: &str) -> &str {
    said.split(['(', ')']).nth(1).expect("it names its devices")
}
