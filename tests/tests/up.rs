//! `newel up` and `newel status`: start, stop, restart, refusals.

use std::process::Command;
use std::time::Duration;

use newel_tests::command::{program, run, temp_dir};
use newel_tests::nbd::Client;
use newel_tests::pattern::bytes_at;
use newel_tests::volume::{DAEMONS, Setup, Volume, as_pid};
use newel_tests::wait;
use rustix::process::{Signal, kill_process, test_kill_process};

#[test]
fn run_again_it_finds_the_same_data() {
    let mut volume = Volume::small();
    let first = volume.await_all_active();
    let data = bytes_at(0, 100_000, 1);
    Client::connect(&volume.unix()).unwrap().write(12_345, &data);
    volume.stop();
    assert!(!volume.dir().join("pids.json").exists());

    volume.again();
    let second = volume.await_all_active();
    assert_eq!(first.volume, second.volume);
    assert!(second.generation > first.generation, "{} then {}", first.generation, second.generation);
    assert_eq!(Client::connect(&volume.unix()).unwrap().read(12_345, 100_000), data);
    volume.stop_and_check();
}

#[test]
fn what_it_prints_is_what_one_needs() {
    let mut volume = Volume::start(Setup { tcp: true, ..Setup::default() });
    let said = volume.said();
    for part in [
        "NBD: nbd+unix:///?socket=",
        "NBD: nbd://127.0.0.1:",
        "nbdinfo",
        "fio --name",
        "attach 'newel' /dev/nbd0 --address 'unix:/",
        "status:",
    ] {
        assert!(said.contains(part), "{part:?} is missing in\n{said}");
    }
    let table = run(Command::new(program("newel")).args(["status", "--dir"]).arg(volume.dir())).ok().stdout;
    for part in ["256", "serving, generation 1", "active", "127.0.0.1:"] {
        assert!(table.contains(part), "{part:?} is missing in\n{table}");
    }
    // The region stands in the command line of its replica.
    for replica in 0..3 {
        let pid = volume.pid(&format!("downstairs-{replica}")).unwrap();
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        assert!(line.contains(volume.region(replica).to_str().unwrap()), "{line:?}");
    }
    let mut client = Client::connect(&volume.tcp()).unwrap();
    client.write(0, b"over tcp");
    drop(client);
    volume.stop_and_check();
}

#[test]
fn the_second_on_a_directory_is_refused() {
    let mut volume = Volume::small();
    let pid = volume.pid("up").unwrap();
    run(&mut volume.command()).failed_saying(&["another `newel up`", &format!("pid {pid}")]);
    Client::connect(&volume.unix()).unwrap().write(0, b"the first lives on");
    volume.stop_and_check();
}

#[test]
fn a_daemon_that_dies_is_started_again() {
    let mut volume = Volume::small();
    volume.await_all_active();
    for role in ["downstairs-1", "upstairs"] {
        let old = volume.pid(role).unwrap();
        volume.kill_and_await_restart(role);
        let new = volume.pid(role).unwrap();
        let said = volume.said();
        assert!(said.contains(&format!("{role} (pid {old}) was killed by signal 9")), "{said}");
        wait::until("the terminal tells of the new one", Duration::from_secs(5), || {
            volume.said().contains(&format!("{role} is started again as pid {new}")).then_some(())
        });
        volume.await_all_active();
    }
    volume.stop_and_check();
}

#[test]
fn no_restart_leaves_it_dead() {
    let mut setup = Setup::default();
    setup.arguments.push("--no-restart".into());
    let mut volume = Volume::start(setup);
    volume.await_all_active();
    volume.signal("downstairs-2", Signal::KILL);
    let status = volume.await_status("the dead replica is missed", |status| {
        status.replicas.iter().any(|replica| replica.state != "active")
    });
    assert_eq!(status.state, "serving");
    wait::until("the terminal says so", Duration::from_secs(5), || {
        volume.said().contains("stays dead").then_some(())
    });
    assert_eq!(volume.pid("downstairs-2"), None);
    let mut client = Client::connect(&volume.unix()).unwrap();
    client.write(0, b"two are enough");
    client.flush();
    assert_eq!(client.read(0, 14), b"two are enough");
    drop(client);
    volume.stop();

    // All three again: the one that was away catches up.
    volume.again();
    assert_eq!(Client::connect(&volume.unix()).unwrap().read(0, 14), b"two are enough");
    volume.stop_and_check();
}

#[test]
fn daemons_that_outlive_a_killed_up_are_named() {
    let mut volume = Volume::small();
    Client::connect(&volume.unix()).unwrap().write(0, b"kept");
    let daemons: Vec<u32> = DAEMONS.iter().map(|role| volume.pid(role).unwrap()).collect();
    volume.kill_up();
    let named: Vec<String> = daemons.iter().map(u32::to_string).collect();
    let mut parts: Vec<&str> = named.iter().map(String::as_str).collect();
    parts.push("still hold the regions");
    run(&mut volume.command()).failed_saying(&parts);
    for &pid in &daemons {
        kill_process(as_pid(pid), Signal::TERM).unwrap();
    }
    wait::until("the daemons end", Duration::from_secs(10), || {
        daemons.iter().all(|&pid| test_kill_process(as_pid(pid)).is_err()).then_some(())
    });
    volume.again();
    assert_eq!(Client::connect(&volume.unix()).unwrap().read(0, 4), b"kept");
    volume.stop_and_check();
}

#[test]
fn a_half_made_set_is_refused() {
    let mut volume = Volume::small();
    volume.stop();
    let aside = volume.dir().join("aside");
    std::fs::rename(volume.region(1), &aside).unwrap();
    run(&mut volume.command()).failed_saying(&["incomplete", "region-1 is missing"]);
    assert!(!volume.region(1).exists());
    std::fs::rename(&aside, volume.region(1)).unwrap();
    volume.again();
    volume.stop_and_check();
}

#[test]
fn another_size_is_refused() {
    let mut volume = Volume::small();
    volume.stop();
    let mut command = Command::new(program("newel"));
    command.args(["up", "--size", "512M", "--dir"]).arg(volume.dir());
    run(&mut command).failed_saying(&["has 256.0 MiB, not 512.0 MiB"]);
    volume.again();
    volume.stop_and_check();
}

#[test]
fn status_without_a_volume_says_so() {
    let dir = temp_dir();
    run(Command::new(program("newel")).args(["status", "--dir"]).arg(dir.path()))
        .failed_saying(&["no volume in"]);
    let address = format!("unix:{}/none.sock", dir.path().display());
    run(Command::new(program("newel")).args(["status", "--address", &address]))
        .failed_saying(&["cannot read the status", "is the volume running"]);
}

#[test]
fn wrong_usage_exits_with_2() {
    for arguments in [
        &["up", "--size", "4097"][..],
        &["up", "--size", "many"],
        &["up", "--listen", "127.0.0.1:10809"],
        &["up", "--prealloc", "maybe"],
        &["sideways"],
        &["status", "--dir", "a", "--volume", "b"],
    ] {
        let ran = run(Command::new(program("newel")).args(arguments));
        assert_eq!(ran.status.code(), Some(2), "{ran}");
        assert!(ran.stderr.contains("error:") || ran.stderr.contains("Usage"), "{ran}");
    }
}
