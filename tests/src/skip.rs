//! Tests that can't run here: said loudly and counted by `tools/test.sh`, never passed over in silence.

use std::path::Path;
use std::process::Command;

/// Records that `test` doesn't run, and why.
pub fn skipped(test: &str, why: &str) {
    eprintln!("SKIPPED: {test}: {why}");
}

/// True if every program is there; else the test is recorded as skipped. A name with a slash is a path.
#[must_use]
pub fn have(test: &str, programs: &[&str]) -> bool {
    let missing: Vec<&str> = programs.iter().copied().filter(|program| !installed(program)).collect();
    if !missing.is_empty() {
        skipped(
            test,
            &format!("{} is not here (tools/test.sh installs what the tests need)", missing.join(", ")),
        );
    }
    missing.is_empty()
}

/// True if this process may do what only root may; else the test is recorded as skipped.
#[must_use]
pub fn have_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped(test, "needs root");
    }
    root
}

fn installed(program: &str) -> bool {
    if program.contains('/') {
        return Path::new(program).exists();
    }
    Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .env("PATH", crate::command::path())
        .output()
        .is_ok_and(|output| output.status.success())
}
