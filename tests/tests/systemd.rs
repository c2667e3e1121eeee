//! The systemd units are sound by systemd's own check.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::path::{Path, PathBuf};

use newel_tests::command::{bin_dir, program, sh, temp_dir};
use newel_tests::skip::have;

fn units() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/systemd")
}

/// Copies of the units that name the programs built here instead of the installed ones.
fn copies(into: &Path) -> Vec<String> {
    let own = bin_dir();
    let mut paths = Vec::new();
    std::fs::copy(units().join("newel-replicas.target"), into.join("newel-replicas.target")).unwrap();
    for name in ["newel-downstairs@.service", "newel-upstairs@.service", "newel-attach@.service"] {
        let unit = std::fs::read_to_string(units().join(name)).unwrap();
        assert!(unit.contains("ExecStart=/usr/bin/newel"), "{name} starts the installed program");
        let path = into.join(name);
        std::fs::write(&path, unit.replace("/usr/bin/", &format!("{}/", own.display()))).unwrap();
        paths.push(path.to_str().unwrap().to_owned());
    }
    paths
}

#[test]
fn systemd_has_nothing_to_say_against_the_units() {
    if !have("systemd_has_nothing_to_say_against_the_units", &["systemd-analyze"]) {
        return;
    }
    program("newel-upstairs");
    program("newel-downstairs");
    program("newel");
    let dir = temp_dir();
    let paths = copies(dir.path());
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let ran = sh("systemd-analyze", &[&["verify", "--man=no"], &paths[..]].concat()).ok();
    // Of other units of this machine it may complain.
    let about_ours: Vec<&str> = ran.stderr.lines().filter(|line| line.contains("newel")).collect();
    assert!(about_ours.is_empty(), "{about_ours:#?}");
}
