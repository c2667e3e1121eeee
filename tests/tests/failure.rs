//! What a guest sees, and what it finds afterwards, when replicas or the upstairs die, stop or lie.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]
#![expect(clippy::disallowed_methods, reason = "tests on real processes live in real time")]

use std::fs::OpenOptions;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use newel_tests::command::{PATIENCE, Running, program, run, sh, temp_dir};
use newel_tests::fio;
use newel_tests::journal::{Journal, Writing};
use newel_tests::load::{Figures, Load};
use newel_tests::lock::Heavy;
use newel_tests::nbd::{Address, Client, Command, EIO};
use newel_tests::pattern::{Random, bytes_at};
use newel_tests::skip::have;
use newel_tests::volume::{Setup, Volume, as_pid};
use newel_tests::wait;
use rustix::process::{Signal, kill_process};

#[test]
fn a_replica_killed_under_load_is_not_seen() {
    if !have("a_replica_killed_under_load_is_not_seen", &["fio"]) {
        return;
    }
    let _heavy = Heavy::take();
    let mut volume = Volume::small();
    volume.await_all_active();
    // Slow enough to be under way when the replica is back.
    let mut load = Running::start(&mut fio::verifying(&volume.uri(), "40m", &["--rate=4m,4m"]));
    volume.await_status("the load runs", |status| status.guest_requests > 0);
    volume.kill_and_await_restart("downstairs-1");
    volume.await_all_active();
    assert!(load.running(), "the load was over before the replica was back: {}", load.stdout());
    volume.kill_and_await_restart("downstairs-2");
    volume.await_all_active();
    fio::assert_clean(load.wait(PATIENCE));
    volume.stop_and_check();
}

/// Writes until some are acknowledged; they go on when this returns.
fn start_writing(volume: &Volume, journal: Journal) -> Writing {
    let writing = Writing::start(journal, connect(volume));
    wait::until("writes are acknowledged", Duration::from_secs(30), || {
        (writing.acknowledged() > 3000).then_some(())
    });
    writing
}

#[test]
fn the_upstairs_killed_under_load_loses_no_acknowledged_write() {
    let _heavy = Heavy::take();
    let mut volume = Volume::small();
    let mut journal = Journal::new(4096, 0x5eed);
    for _ in 0..3 {
        volume.await_all_active();
        let writing = start_writing(&volume, journal);
        volume.kill_and_await_restart("upstairs");
        journal = writing.broken();
        let mut client = connect(&volume);
        journal.verify(&mut client);
        // What was read stays, whichever replica answers.
        journal.verify(&mut client);
    }
    volume.stop_and_check();
}

#[test]
fn everything_killed_at_once_loses_no_acknowledged_write() {
    let _heavy = Heavy::take();
    let mut volume = Volume::small();
    volume.await_all_active();
    let writing = start_writing(&volume, Journal::new(4096, 0xdead));
    let roles = ["downstairs-0", "downstairs-1", "downstairs-2", "upstairs"];
    let old = roles.map(|role| volume.signal(role, Signal::KILL));
    let mut journal = writing.broken();
    for (role, old) in roles.into_iter().zip(old) {
        wait::until(&format!("{role} is started again"), Duration::from_secs(30), || {
            volume.pid(role).filter(|&pid| pid != old)
        });
    }
    journal.verify(&mut connect(&volume));
    volume.stop_and_check();
}

#[test]
fn flapping_replicas_are_not_seen_and_lose_nothing() {
    let _heavy = Heavy::take();
    let mut volume = Volume::small();
    volume.await_all_active();
    let mut random = Random::new(0xf1a9);
    let mut writing = Some(start_writing(&volume, Journal::new(4096, 0xf1a9)));
    for round in 0..12 {
        let role = format!("downstairs-{}", random.below(3));
        if random.below(3) == 0 {
            volume.kill_and_await_restart(&role);
        } else {
            let pid = volume.signal(&role, Signal::STOP);
            let before = writing.as_ref().unwrap().acknowledged();
            wait::until("writes go on with one replica stopped", Duration::from_secs(10), || {
                (writing.as_ref().unwrap().acknowledged() > before + 500).then_some(())
            });
            kill_process(as_pid(pid), Signal::CONT).unwrap();
        }
        // Only one at a time is away, else the quorum is lost and writes wait.
        volume.await_all_active();
        if round % 4 == 3 {
            let mut journal = writing.take().unwrap().finish();
            journal.verify(&mut connect(&volume));
            writing = Some(start_writing(&volume, journal));
        }
    }
    writing.take().unwrap().finish().verify(&mut connect(&volume));
    volume.stop_and_check();
}

/// Connects as soon as the volume serves.
fn connect(volume: &Volume) -> Client {
    wait::until("the volume serves NBD", Duration::from_secs(60), || Client::connect(&volume.unix()).ok())
}

/// Lets the time of a measurement pass while the load runs.
fn measure(loads: &[&Load], time: Duration) -> (Instant, Instant) {
    let from = Instant::now();
    wait::until("the measurement", time + Duration::from_secs(5), || {
        assert!(loads.iter().all(|load| load.running()), "the load ended early");
        (from.elapsed() >= time).then_some(())
    });
    (from, Instant::now())
}

// Ceph: one stuck OSD blocks I/O. Vitastor: one stopped OSD freezes VMs. QEMU quorum: SIGSTOP of one child freezes the guest.
#[test]
fn a_stopped_replica_does_not_slow_the_guest() {
    let _heavy = Heavy::take();
    let mut volume = Volume::small();
    volume.await_all_active();
    let address = volume.unix();
    let writes = Load::start(&address, Command::Write, 16, 16_384);
    let reads = Load::start(&address, Command::Read, 16, 16_384);
    let control = measure(&[&writes, &reads], Duration::from_secs(4));
    let pid = volume.signal("downstairs-1", Signal::STOP);
    let stopped = measure(&[&writes, &reads], Duration::from_secs(5));
    kill_process(as_pid(pid), Signal::CONT).unwrap();
    volume.await_all_active();
    let after = measure(&[&writes, &reads], Duration::from_secs(1));
    for (what, record) in [("writes", writes.finish()), ("reads", reads.finish())] {
        let [control, stopped, after] = [control, stopped, after].map(|(from, to)| record.between(from, to));
        let shown = |figures: Figures| {
            format!(
                "{} answers, longest gap {:.1?}, slowest {:.1?}",
                figures.answers, figures.longest_gap, figures.slowest
            )
        };
        println!("{what}, control: {}", shown(control));
        println!("{what}, one replica stopped: {}", shown(stopped));
        println!("{what}, after: {}", shown(after));
        let bound = |control: Duration| Duration::from_secs(1).max(control * 10);
        assert!(stopped.longest_gap < bound(control.longest_gap), "{what}: the guest saw a gap");
        assert!(stopped.slowest < bound(control.slowest), "{what}: the guest saw a slow answer");
        assert!(stopped.answers > 0, "{what}: nothing was answered");
    }
    volume.stop_and_check();
}

#[test]
fn with_the_quorum_lost_io_waits_and_resumes() {
    let _heavy = Heavy::take();
    let mut volume = Volume::small();
    volume.await_all_active();
    let mut client = connect(&volume);
    client.write(0, &bytes_at(0, 8192, 1));
    let pids = ["downstairs-0", "downstairs-2"].map(|role| volume.signal(role, Signal::STOP));
    // Reads go on with one; the write has to wait, and neither fails.
    let cookie = client.send(Command::Write, 0, 4096, 4096, &bytes_at(4096, 4096, 2)).unwrap();
    let mut reader = connect(&volume);
    assert_eq!(reader.read(0, 4096), bytes_at(0, 4096, 1));
    for pid in pids {
        kill_process(as_pid(pid), Signal::CONT).unwrap();
    }
    let reply = client.receive().unwrap();
    assert_eq!((reply.cookie, reply.errno), (cookie, 0));
    assert_eq!(reader.read(4096, 4096), bytes_at(4096, 4096, 2));
    volume.stop_and_check();
}

/// A volume whose upstairs reads `config`, and whose daemons stay dead once they end.
fn with_config(config: &str) -> Volume {
    let file = temp_dir();
    let path = file.path().join("upstairs.toml");
    std::fs::write(&path, config).unwrap();
    let mut setup = Setup::default();
    setup.arguments.extend(["--no-restart".into(), "--upstairs-config".into(), path.display().to_string()]);
    Volume::start(setup)
}

#[test]
fn a_quorum_timeout_fails_writes_and_nothing_else() {
    let mut volume = with_config("[timing]\nquorum_timeout = \"500ms\"\n");
    volume.await_all_active();
    let mut client = connect(&volume);
    let data = bytes_at(0, 4096, 1);
    client.write(0, &data);
    volume.signal("downstairs-0", Signal::KILL);
    volume.signal("downstairs-1", Signal::KILL);
    volume.await_status("the quorum is lost", |status| status.state == "quorum_lost");
    let reply = client.ask(Command::Write, 0, 8192, 4096, &data).unwrap();
    assert_eq!(reply.errno, EIO);
    assert_eq!(client.read(0, 4096), data);
    drop(client);
    volume.stop();
}

#[test]
fn a_second_upstairs_is_refused_unless_it_takes_over() {
    let mut setup = Setup::default();
    setup.arguments.push("--no-restart".into());
    let mut volume = Volume::start(setup);
    volume.await_all_active();
    let data = bytes_at(0, 65_536, 1);
    let mut client = connect(&volume);
    client.write(0, &data);

    let arguments = volume.upstairs_arguments("2");
    let second = || {
        let mut command = std::process::Command::new(program("newel-upstairs"));
        command.args(&arguments);
        command
    };
    run(&mut second()).failed_saying(&["--takeover"]);
    client.write(4096, &data[4096..8192]);
    assert_eq!(client.read(0, 65_536), data);

    let mut winner = Running::start(second().arg("--takeover"));
    wait::until("the first upstairs stops", Duration::from_secs(30), || {
        volume.said().contains("upstairs (pid").then_some(())
    });
    let log = std::fs::read_to_string(volume.dir().join("upstairs.log")).unwrap();
    assert!(log.contains("taken"), "the loser says why it stops: {log}");
    // Nothing that the loser still takes may be acknowledged.
    let late = client.ask(Command::Write, 0, 0, 4096, &vec![0xee; 4096]);
    assert!(late.is_err() || late.is_ok_and(|reply| reply.errno != 0), "the loser acknowledged a write");
    let socket = Address::Unix(volume.dir().join("nbd2"));
    let mut client = wait::until("the winner serves", Duration::from_secs(30), || {
        assert!(winner.running(), "the winner ended: {}", winner.stderr());
        Client::connect(&socket).ok()
    });
    assert_eq!(client.read(0, 65_536), data);
    client.write(0, &data);
    drop(client);
    kill_process(as_pid(winner.pid()), Signal::TERM).unwrap();
    winner.wait(PATIENCE).ok();
    volume.stop();
}

/// Damages the 4 KiB at which `data` lies in a region file. Data lie there as the guest wrote them.
fn damage(region: &Path, data: &[u8]) {
    let file = OpenOptions::new().read(true).write(true).open(region).unwrap();
    let mut reader = &file;
    let mut block = vec![0; data.len()];
    let mut at = 0;
    let mut damaged = 0;
    while reader.read_exact(&mut block).is_ok() {
        if block == data {
            file.write_all_at(&[!data[100]], at + 100).unwrap();
            damaged += 1;
        }
        at += data.len() as u64;
    }
    assert_eq!(damaged, 1, "{} holds the block {damaged} times", region.display());
    file.sync_all().unwrap();
}

#[test]
fn one_damaged_copy_is_never_returned_and_heals() {
    let mut volume = Volume::small();
    let data = bytes_at(40_960, 4096, 3);
    connect(&volume).write(40_960, &data);
    volume.await_all_active();
    volume.stop();
    damage(&volume.region(1), &data);
    volume.again();
    volume.await_all_active();
    let mut client = connect(&volume);
    // With every replica asked, the damaged copy is met again and again until it is healed.
    for _ in 0..100 {
        assert_eq!(client.read(40_960, 4096), data);
    }
    volume.await_status("the copy is healed", |status| {
        client.read(40_960, 4096);
        status.replicas.iter().any(|replica| replica.healed_blocks > 0)
    });
    volume.stop_and_check();
}

#[test]
fn a_block_damaged_everywhere_is_an_error_for_that_request_alone() {
    let mut volume = Volume::small();
    let (bad, good) = (bytes_at(8 << 20, 4096, 4), bytes_at(9 << 20, 4096, 4));
    let mut client = connect(&volume);
    client.write(8 << 20, &bad);
    client.write(9 << 20, &good);
    drop(client);
    volume.await_all_active();
    volume.stop();
    for replica in 0..3 {
        damage(&volume.region(replica), &bad);
    }
    volume.again();
    volume.await_all_active();
    let mut client = connect(&volume);
    for _ in 0..3 {
        let reply = client.ask(Command::Read, 0, 8 << 20, 4096, &[]).unwrap();
        assert_eq!(reply.errno, EIO);
        assert_eq!(client.read(9 << 20, 4096), good);
    }
    if have("a_block_damaged_everywhere (nbdcopy)", &["nbdcopy"]) {
        let ran = sh("nbdcopy", &[&volume.uri(), "null:"]);
        assert!(!ran.status.success(), "nbdcopy must see the error: {ran}");
    }
    // A write gives the block a good copy again.
    client.write(8 << 20, &good);
    assert_eq!(client.read(8 << 20, 4096), good);
    assert_eq!(volume.status().state, "serving");
    volume.stop_and_check();
}
