//! `newel bench`: a real run, its end by Ctrl-C, and what it refuses.

use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use newel_tests::command::{Ran, Running, program, run, temp_dir};
use newel_tests::lock::Heavy;
use newel_tests::skip::have;
use newel_tests::volume::{Volume, as_pid};
use rustix::process::{Signal, kill_process};

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(program("newel"));
    command.arg("bench").args(arguments);
    command
}

/// The run that a report carries.
#[track_caller]
fn run_of(report: &Path) -> serde_json::Value {
    let html = std::fs::read_to_string(report).expect("there is a report");
    let data = html.split_once("id=\"run\">").and_then(|(_, rest)| rest.split_once("</script>"));
    serde_json::from_str(data.expect("it carries the run").0).expect("the run is JSON")
}

#[test]
fn a_run_is_told_from_both_sides() {
    let _heavy = Heavy::take();
    if !have("a_run_is_told_from_both_sides", &["fio"]) {
        return;
    }
    let mut volume = Volume::small();
    volume.await_all_active();
    let report = volume.dir().join("report.html");
    let mut command = bench(&["mixed", "--runtime", "2", "--yes-overwrite", "--dir"]);
    let ran = run(command.arg(volume.dir()).arg("--report").arg(&report)).ok();
    for part in ["mixed  read", "mixed  write", "p99.9", "delay max", "report: "] {
        assert!(ran.stdout.contains(part), "{part:?} is not in {ran}");
    }
    let run = run_of(&report);
    let job = &run["jobs"][0];
    assert!(job["to_ms"].as_u64() > job["from_ms"].as_u64());
    for figures in job["figures"].as_array().unwrap() {
        // What the curves tell is what the job did, but for its last window.
        let of = |window: &&serde_json::Value| window["direction"] == figures["direction"];
        let windows = run["windows"].as_array().unwrap().iter().filter(of);
        let bytes: f64 = windows
            .map(|window| window["bytes_per_s"].as_f64().unwrap() * window["span_ms"].as_f64().unwrap() / 1e3)
            .sum();
        let total = figures["ios"].as_f64().unwrap() * 4096.0;
        assert!(bytes <= total * 1.001 && bytes > total * 0.5, "{bytes} of {total}");
        let times = ["p50_us", "p99_us", "max_us"].map(|name| figures[name].as_f64().unwrap());
        assert!(times[0] > 0.0 && times.is_sorted(), "{times:?}");
    }
    let samples = run["samples"].as_array().unwrap();
    assert!(samples.len() > 5, "{} samples", samples.len());
    let busy =
        |at: usize| samples.iter().any(|sample| sample["replicas"][at]["queue_jobs"].as_u64() > Some(0));
    assert!((0..3).all(busy), "a replica was never asked for anything");
    volume.stop_and_check();
}

#[test]
fn ctrl_c_ends_fio_and_keeps_what_there_is() {
    let _heavy = Heavy::take();
    if !have("ctrl_c_ends_fio_and_keeps_what_there_is", &["fio"]) {
        return;
    }
    let mut volume = Volume::small();
    let report = volume.dir().join("report.html");
    let mut command = bench(&["crucible", "--runtime", "600", "--yes-overwrite", "--dir"]);
    let running = Running::start(command.arg(volume.dir()).arg("--report").arg(&report));
    volume.await_status("fio writes", |status| status.jobs_in_flight > 0);
    kill_process(as_pid(running.pid()), Signal::INT).unwrap();
    let ran = running.wait(Duration::from_secs(60)).failed_saying(&["interrupted"]);
    assert!(ran.stdout.contains("write-1m  write"), "{ran}");
    let run = run_of(&report);
    assert_eq!(run["interrupted"], true);
    assert!(run["jobs"][0]["figures"][0]["ios"].as_u64() > Some(0), "{run:#}");
    volume.await_status("fio is gone", |status| status.guest_connections == 0);
    volume.stop_and_check();
}

#[test]
fn what_can_not_be_measured_is_refused_before_anything_is_written() {
    let _heavy = Heavy::take();
    if !have("what_can_not_be_measured_is_refused_before_anything_is_written", &["fio"]) {
        return;
    }
    let mut volume = Volume::small();
    let (dir, uri) = (volume.dir().display().to_string(), volume.uri());
    let check = |arguments: &[&str], parts: &[&str]| run(&mut bench(arguments)).failed_saying(parts);

    check(&["--dir", &dir], &["this overwrites", &dir, "nothing was done", "--yes-overwrite"]);
    let elsewhere = format!("{dir}/none.sock");
    let none = format!("nbd+unix:///?socket={elsewhere}");
    check(&["--yes-overwrite", "--uri", &none], &["nothing serves NBD at", "none.sock"]);
    let status = format!("unix:{elsewhere}");
    check(
        &["--yes-overwrite", "--uri", &uri, "--address", &status],
        &["cannot read the status", "none.sock"],
    );
    check(
        &["--yes-overwrite", "--dir", &dir, "--report", "/nowhere/x.html"],
        &["/nowhere/x.html", "--report"],
    );
    check(
        &["--yes-overwrite", "--dir", &dir, "/nowhere/x.fio"],
        &["/nowhere/x.fio", "crucible, redpanda, mixed"],
    );
    check(&["--yes-overwrite", "--dir", &dir, "--runtime", "0"], &["--runtime"]);
    check(&["--yes-overwrite", "--dir", &dir, "--window", "1ms"], &["between 50ms and 60s"]);
    // What only fio can know, it says itself.
    let jobs = volume.dir().join("sideways.fio");
    std::fs::write(&jobs, "[sideways]\nrw=sideways\nsize=4k\n").unwrap();
    check(&["--yes-overwrite", "--dir", &dir, &jobs.display().to_string()], &["fio failed", "sideways"]);

    let status = volume.status();
    assert_eq!((status.jobs_in_flight, status.guest_connections), (0, 0));
    volume.stop_and_check();
}

#[test]
fn an_address_that_speaks_no_nbd_is_told_apart() {
    if !have("an_address_that_speaks_no_nbd_is_told_apart", &["fio"]) {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri = format!("nbd://{}", listener.local_addr().unwrap());
    let check =
        |part: &str| run(&mut bench(&["--yes-overwrite", "--uri", &uri])).failed_saying(&[part, &uri]);
    // The kernel takes the connection, and nobody says anything.
    check("says nothing");
    let talk = std::thread::spawn(move || {
        for stream in listener.incoming().take(2) {
            stream.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        }
    });
    check("no NBD server");
    talk.join().unwrap();
}

#[test]
fn a_missing_or_poor_fio_is_named() {
    let dir = temp_dir();
    let with_path = |path: &Path| -> Ran {
        let newel = program("newel").display().to_string();
        let line =
            format!("PATH='{}' exec '{newel}' bench --yes-overwrite --uri nbd://127.0.0.1:1", path.display());
        run(Command::new("/bin/sh").args(["-c", &line]))
    };
    with_path(dir.path()).failed_saying(&["fio is not installed"]);
    let poor = dir.path().join("fio");
    std::fs::write(&poor, "#!/bin/sh\necho fio-0.1\n").unwrap();
    std::fs::set_permissions(&poor, PermissionsExt::from_mode(0o755)).unwrap();
    with_path(dir.path()).failed_saying(&["fio-0.1", "no NBD engine"]);
}
