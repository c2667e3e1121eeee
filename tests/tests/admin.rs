//! What an operator does to a running volume: a replica is replaced, every block is verified.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use newel_tests::command::{PATIENCE, Ran, Running, program, run, temp_dir};
use newel_tests::damage::{PAGE_CONTEXTS, RegionFile};
use newel_tests::journal::{Journal, Writing};
use newel_tests::lock::Heavy;
use newel_tests::nbd::Client;
use newel_tests::volume::{Volume, as_pid, check_region};
use newel_tests::wait;
use rustix::process::{Signal, kill_process};

const BLOCKS: usize = 4096;

fn connect(volume: &Volume) -> Client {
    wait::until("the volume serves NBD", Duration::from_secs(60), || Client::connect(&volume.unix()).ok())
}

fn newel(arguments: &[&str], volume: &Volume) -> Ran {
    run(Command::new(program("newel")).args(arguments).arg("--dir").arg(volume.dir()))
}

fn replace(volume: &Volume, replica: usize, with: &str) -> Ran {
    newel(&["replace", "--replica", &replica.to_string(), "--with", with], volume)
}

/// A replica that `newel up` knows nothing of.
struct Outsider {
    process: Running,
    region: PathBuf,
    address: String,
}

impl Outsider {
    fn start(region: &Path, size: &str) -> Self {
        if !region.exists() {
            let mut create = Command::new(program("newel-downstairs"));
            create.arg("create").arg("--region").arg(region).args(["--size", size, "--prealloc", "sparse"]);
            run(&mut create).ok();
        }
        let mut command = Command::new(program("newel-downstairs"));
        command.arg("run").arg("--region").arg(region).args(["--listen", "127.0.0.1:0"]);
        let mut process = Running::start(&mut command);
        let address = wait::until("the new replica listens", Duration::from_secs(30), || {
            let log = process.stderr();
            let at = log.find("serves on ")? + "serves on ".len();
            let rest = log.get(at..)?;
            let length = rest.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ':'))?;
            Some(rest[..length].to_owned())
        });
        Self { process, region: region.to_owned(), address }
    }

    /// Stops it in order; tells its region's digest.
    fn stop_and_check(self) -> String {
        kill_process(as_pid(self.process.pid()), Signal::TERM).unwrap();
        self.process.wait(PATIENCE).ok();
        check_region(&self.region)
    }
}

#[test]
fn a_replica_is_replaced_under_load() {
    let _heavy = Heavy::take();
    let mut volume = Volume::small();
    volume.await_all_active();
    let writing = Writing::start(Journal::new(BLOCKS, 0x4e97), connect(&volume));
    wait::until("writes are acknowledged", Duration::from_secs(30), || {
        (writing.acknowledged() > 3000).then_some(())
    });
    let place = temp_dir();
    let fresh = Outsider::start(&place.path().join("fresh"), "256M");
    let old = volume.status().replicas[1].region.clone();
    let before = writing.acknowledged();
    let ran = replace(&volume, 1, &fresh.address).ok();
    assert!(ran.stdout.contains("volume.toml has the new address"), "{ran}");
    let status = volume.await_all_active();
    assert_eq!((status.replicas[1].address.as_str(), status.membership_epoch), (fresh.address.as_str(), 2));
    assert_ne!(status.replicas[1].region, old);
    wait::until("writes go on", Duration::from_secs(30), || {
        (writing.acknowledged() > before + 1000).then_some(())
    });
    let mut journal = writing.finish();
    journal.verify(&mut connect(&volume));

    // The next upstairs has the new address, too, and so has the next `newel up`, which leaves the old replica alone.
    volume.kill_and_await_restart("upstairs");
    assert_eq!(volume.await_all_active().replicas[1].address, fresh.address);
    volume.stop();
    volume.again();
    assert_eq!(volume.await_all_active().replicas[1].address, fresh.address);
    assert_eq!(volume.pid("downstairs-1"), None);
    journal.verify(&mut connect(&volume));
    volume.await_status("all replicas have executed everything", |status| {
        status.replicas.iter().all(|replica| replica.state == "active" && replica.queue_jobs == 0)
    });
    volume.stop();
    let digests = [check_region(&volume.region(0)), fresh.stop_and_check(), check_region(&volume.region(2))];
    assert!(digests.windows(2).all(|pair| pair[0] == pair[1]), "the replicas differ: {digests:?}");
}

#[test]
fn what_can_not_take_a_place_is_refused_with_a_reason() {
    let mut volume = Volume::small();
    let status = volume.await_all_active();
    let check = |with: &str, parts: &[&str]| {
        replace(&volume, 1, with).failed_saying(parts);
    };
    check(&status.replicas[0].address, &["one of the volume's own"]);
    check(&status.replicas[1].address, &["one of the volume's own"]);
    check("127.0.0.1:1", &["127.0.0.1:1", "can't connect"]);
    check("127.0.0.1", &["HOST:PORT"]);
    let place = temp_dir();
    let small = Outsider::start(&place.path().join("small"), "128M");
    check(&small.address, &["sizes differ", "134217728", "268435456"]);
    newel(&["replace", "--replica", "3", "--with", &small.address], &volume).failed_saying(&["--replica"]);
    let after = volume.await_all_active();
    assert_eq!((after.membership_epoch, after.replicas[1].reconnects), (1, 0), "nothing has changed");
    volume.stop_and_check();
}

#[test]
fn the_scrub_finds_and_heals_what_no_guest_reads() {
    let _heavy = Heavy::take();
    let mut volume = Volume::small();
    volume.await_all_active();
    let mut journal = Writing::start(Journal::new(BLOCKS, 0x5c4b), connect(&volume));
    wait::until("writes are acknowledged", Duration::from_secs(30), || {
        (journal.acknowledged() > 10_000).then_some(())
    });
    let mut written = journal.finish();
    let clean = newel(&["scrub", "--wait"], &volume).ok();
    assert!(clean.stdout.contains("64 extents verified: 0 bad copies"), "{clean}");

    // Under a load, which must not be taken for damage.
    journal = Writing::start(written, connect(&volume));
    let bad = 30_u64;
    for number in 0..bad {
        let region = RegionFile::open(&volume.region(usize::try_from(number % 3).unwrap()));
        // Outside of what is written meanwhile, else a write may have healed it first.
        region.flip_data(BLOCKS as u64 + number, 100 + number);
    }
    let ran = newel(&["scrub", "--wait"], &volume).ok();
    assert!(ran.stdout.contains(": 0 bad copies"), "blocks without data can't be damaged: {ran}");
    written = journal.finish();
    for number in 0..bad {
        let region = RegionFile::open(&volume.region(usize::try_from(number % 3).unwrap()));
        region.flip_data(number * 100, 100 + number);
    }
    // Contexts that the replica still has in memory, as they were.
    RegionFile::open(&volume.region(2)).damage_contexts(BLOCKS as u64 - 1);
    let bad = bad + PAGE_CONTEXTS;
    let ran = newel(&["scrub", "--wait"], &volume).ok();
    let said = format!("{bad} bad copies, {bad} of them healed, 0 blocks without a good copy");
    assert!(ran.stdout.contains(&said), "{ran}");
    written.verify(&mut connect(&volume));
    volume.stop_and_check();
}

#[test]
fn a_block_that_is_bad_everywhere_fails_the_scrub() {
    let mut volume = Volume::small();
    volume.await_all_active();
    let data = vec![7; 4096];
    connect(&volume).write(40_960, &data);
    volume.await_all_active();
    (0..3).for_each(|replica| RegionFile::open(&volume.region(replica)).flip_data(10, 9));
    newel(&["scrub", "--wait"], &volume).failed_saying(&["1 blocks have no good copy"]);
    connect(&volume).write(40_960, &data);
    newel(&["scrub", "--wait"], &volume).ok();
    volume.stop_and_check();
}
