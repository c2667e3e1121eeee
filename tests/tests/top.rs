//! `newel top` on a real terminal: what it shows, and that it gives the terminal back.

use std::process::Command;
use std::time::Duration;

use newel_tests::command::{Running, program, run};
use newel_tests::skip::have;
use newel_tests::volume::{Volume, as_pid};
use newel_tests::wait;
use rustix::process::{Signal, kill_process};

const PATIENCE: Duration = Duration::from_secs(30);
/// To the screen that programs draw on, and back.
const ENTERS: &str = "\x1b[?1049h";
const LEAVES: &str = "\x1b[?1049l";

/// The child of `script`, which is the program on the terminal.
fn child_of(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

#[test]
fn a_terminal_is_given_back_whatever_ends_it() {
    if !have("a_terminal_is_given_back_whatever_ends_it", &["script"]) {
        return;
    }
    let mut volume = Volume::small();
    volume.await_all_active();
    // A terminal of no size, as it has one without a person, shows nothing. And this test may run under nohup.
    let newel = program("newel");
    let top = format!(
        "stty rows 40 cols 120; exec env --default-signal=HUP {} top --every 100ms --dir {}",
        newel.display(),
        volume.dir().display()
    );
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut terminal = Running::start(
            Command::new("script").args(["-q", "-e", "-c", &top, "/dev/null"]).env("TERM", "xterm-256color"),
        );
        let shown = wait::until("the replicas are shown", PATIENCE, || {
            assert!(terminal.running(), "it ended: {}", terminal.stdout());
            let shown = terminal.stdout();
            shown.contains("replica 2").then_some(shown)
        });
        assert!(shown.contains(ENTERS) && !shown.contains(LEAVES), "{shown:?}");
        let pid = wait::until("newel runs", PATIENCE, || child_of(terminal.pid()));
        kill_process(as_pid(pid), signal).expect("newel top runs");
        let ran = terminal.wait(PATIENCE);
        assert!(ran.stdout.contains(LEAVES), "{signal:?}: {:?}", ran.stdout);
        assert!(!ran.stdout.to_lowercase().contains("panicked"), "{:?}", ran.stdout);
    }
    volume.stop_and_check();
}

#[test]
fn what_is_no_terminal_is_refused() {
    let mut volume = Volume::small();
    run(Command::new(program("newel")).args(["top", "--dir"]).arg(volume.dir()))
        .failed_saying(&["needs a terminal", "newel status"]);
    run(Command::new(program("newel")).args(["top", "--every", "1ms"]))
        .failed_saying(&["every 100ms to 60s"]);
    let gone = format!("unix:{}/none.sock", volume.dir().display());
    run(Command::new(program("newel")).args(["top", "--address", &gone])).failed_saying(&["terminal"]);
    volume.stop();
}
