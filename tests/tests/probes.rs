//! The probes join what the daemons know of a job with what the kernel knows of its requests: `tools/trace/outliers.sh` names the job of
//! each request of a device, `tools/trace/jobs.sh` follows the same number through the upstairs, and the slow log has it, too.
//!
//! Whether a job's number stands beside the right request is decided by its place on the disk, which neither script looks at.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::process::Command;

use newel_tests::cluster::{Cluster, Role};
use newel_tests::command::{program, run, sh};
use newel_tests::lock::Heavy;
use newel_tests::nbd::{Client, Command as Nbd};
use newel_tests::skip::have;
use newel_tests::starved_disk::StarvedDisk;
use newel_tests::tracer::{can_trace, end, script, upper_device, watch};

const REPLICA: usize = 2;
const CONFIG: &str = "[trace]\nthreshold = \"100ms\"\n";
const BLOCK: u64 = 4096;
const SECTOR: u64 = 512;

/// A cluster with a replica on a disk of its own, if bpftrace can watch probes here; else the test is recorded as skipped.
fn traced(test: &str) -> Option<(StarvedDisk, Cluster)> {
    let probe = format!("usdt:{}:newel_upstairs:job-start", program("newel-upstairs").display());
    if !have(test, &["filefrag"]) || !can_trace(test, &probe) {
        return None;
    }
    let disk = StarvedDisk::make(test)?;
    let cluster = Cluster::on_a_disk(&disk, REPLICA, CONFIG);
    Some((disk, cluster))
}

/// Where the blocks of a replica's data lie on its device, by the file system's word.
struct Places {
    data: u64,
    /// Byte in the file, byte on the device, length.
    extents: Vec<(u64, u64, u64)>,
}

impl Places {
    #[track_caller]
    fn of(region: &Path) -> Self {
        let file = region.to_str().unwrap();
        let dump =
            run(Command::new(program("newel-downstairs")).args(["dump", "--region", file])).ok().stdout;
        let data = dump.split("data at byte ").nth(1).and_then(|rest| rest.lines().next()).unwrap();
        // `   0:        0..   2047:      34816..     36863:   2048:   last,eof`
        let listed = sh("filefrag", &["-v", "-b512", file]).ok().stdout;
        let extents = listed.lines().filter_map(|line| {
            let numbers: Vec<u64> = line
                .split(|character: char| !character.is_ascii_digit())
                .filter_map(|number| number.parse().ok())
                .collect();
            match numbers[..] {
                [_, first, _, place, _, length, ..] if line.contains("..") => {
                    Some((first * SECTOR, place * SECTOR, length * SECTOR))
                }
                _ => None,
            }
        });
        Self { data: data.trim().parse().unwrap(), extents: extents.collect() }
    }

    /// The sector of this byte of the volume.
    #[track_caller]
    fn sector(&self, offset: u64) -> u64 {
        let byte = self.data + offset;
        let inside = |&&(first, _, length): &&(u64, u64, u64)| (first..first + length).contains(&byte);
        let (first, place, _) = self.extents.iter().find(inside).expect("its space is allocated");
        (place + byte - first) / SECTOR
    }
}

/// The number behind this word.
fn number_after(line: &str, word: &str) -> Option<u64> {
    line.split(word).nth(1)?.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok()
}

/// Requests of the upper device that were told of with the job that they are of: job, sector, kind.
fn requests(said: &str) -> Vec<(u64, u64, String)> {
    let upper = upper_device(said);
    let of_upper = said.lines().filter(|line| line.contains(&format!(" {upper} ")));
    of_upper
        .filter_map(|line| {
            let kind = line.split(' ').nth(2)?.to_owned();
            Some((number_after(line, "for job ")?, number_after(line, "sector ")?, kind))
        })
        .collect()
}

#[track_caller]
fn exchange(client: &mut Client, command: Nbd, offsets: &[u64]) {
    let length = u32::try_from(BLOCK).unwrap();
    let data = vec![0x5a; if command == Nbd::Write { length as usize } else { 0 }];
    for &offset in offsets {
        client.send(command, 0, offset, length, &data).unwrap();
    }
    for _ in offsets {
        assert_eq!(client.receive().unwrap().errno, 0);
    }
}

#[test]
fn each_request_of_the_device_is_told_with_its_job() {
    let _heavy = Heavy::take();
    let Some((_disk, mut cluster)) = traced("each_request_of_the_device_is_told_with_its_job") else {
        return;
    };
    let mut client = cluster.connect();
    client.flush();
    let region = cluster.region(REPLICA);
    let places = Places::of(&region);

    let outliers = watch(script("outliers.sh").args(["-m", "0"]).arg(&region));
    let jobs = watch(script("jobs.sh").args(["-m", "0", &cluster.pid(Role::Upstairs).to_string()]));
    // In no order, far apart, and all of them sent before the first is awaited: no two are neighbours that would be merged.
    let mut written: Vec<u64> =
        (0..32).map(|number| number * 7 % 32 / 2 * (4 << 20) + number * 7 % 2 * 8 * BLOCK).collect();
    written.dedup();
    exchange(&mut client, Nbd::Write, &written);
    client.flush();
    exchange(&mut client, Nbd::Read, &written);
    // The guest has its data from whoever was first.
    cluster.await_status("the replica has answered, too", |status| status.replicas[REPLICA].queue_jobs == 0);
    let (requests, jobs) = (requests(&end(outliers)), end(jobs));

    let acknowledged = |operation: &str| -> HashMap<u64, u64> {
        let lines = jobs
            .lines()
            .filter(|line| line.contains(&format!(": {operation} of ")) && line.contains(" acknowledged "));
        lines
            .filter_map(|line| Some((number_after(line, " job ")?, number_after(line, " bytes at ")?)))
            .collect()
    };
    for (operation, letter) in [("write", 'W'), ("read", 'R')] {
        let of_jobs = acknowledged(operation);
        assert_eq!(
            of_jobs.values().collect::<HashSet<_>>(),
            written.iter().collect(),
            "the upstairs' probes: {jobs}"
        );
        let data: Vec<_> = requests
            .iter()
            .filter(|(job, _, kind)| {
                of_jobs.contains_key(job) && kind.starts_with(letter) && !kind.contains('M')
            })
            .collect();
        for (job, sector, _) in &data {
            assert_eq!(*sector, places.sector(of_jobs[job]), "job {job}, a {operation} at {}", of_jobs[job]);
        }
        let seen: HashSet<u64> = data.iter().map(|(job, ..)| *job).collect();
        println!("{operation}s: {} jobs, {} requests of {} of them", of_jobs.len(), data.len(), seen.len());
        assert_eq!(seen, of_jobs.keys().copied().collect(), "every {operation} has its request");
    }
    // What the flush wrote back is of the flush.
    let flushes = acknowledged("flush");
    assert_eq!(flushes.len(), 1, "{jobs}");
    assert!(requests.iter().any(|(job, ..)| flushes.contains_key(job)), "{requests:?}");
    let told =
        jobs.lines().filter(|line| line.contains(&format!("replica {REPLICA} answered after "))).count();
    assert_eq!(told, 2 * written.len() + 1, "each replica's answers: {jobs}");
    cluster.stop_and_check();
}

#[test]
fn the_slow_log_and_the_kernel_name_the_same_jobs() {
    let _heavy = Heavy::take();
    let Some((disk, mut cluster)) = traced("the_slow_log_and_the_kernel_name_the_same_jobs") else { return };
    let mut client = cluster.connect();
    let outliers = watch(script("outliers.sh").args(["-m", "50"]).arg(cluster.region(REPLICA)));
    let jobs = watch(script("jobs.sh").args(["-m", "50", &cluster.pid(Role::Upstairs).to_string()]));
    disk.starve(cluster.pid(Role::Replica(REPLICA)));
    let spread: Vec<u64> = (0..128).map(|number| ((number % 16) * 1024 + number / 16 * 2) * BLOCK).collect();
    exchange(&mut client, Nbd::Write, &spread);
    cluster.await_status("the replica has caught up", |status| status.replicas[REPLICA].queue_jobs == 0);
    disk.feed();
    let (said, jobs) = (end(outliers), end(jobs));

    let waited: HashSet<u64> = said
        .lines()
        .filter(|line| line.contains("waited for a TAG"))
        .filter_map(|line| number_after(line, "for job "))
        .collect();
    let slow = cluster.slow();
    let blamed: HashSet<u64> = slow
        .iter()
        .filter(|slow| {
            slow.verdict.replica.map(usize::from) == Some(REPLICA) && slow.verdict.stage == "submit"
        })
        .filter_map(|slow| slow.job)
        .collect();
    let logged: HashSet<u64> = jobs
        .lines()
        .filter(|line| line.contains("the slow log has it"))
        .filter_map(|line| number_after(line, " job "))
        .collect();
    println!(
        "{} jobs waited for a tag; of {} slow ones, {} blame the submission; {} came by the probe",
        waited.len(),
        slow.len(),
        blamed.len(),
        logged.len()
    );
    assert!(!blamed.is_empty(), "{slow:#?}");
    assert!(blamed.is_subset(&logged), "{blamed:?} in {logged:?}");
    assert!(waited.iter().any(|job| blamed.contains(job)), "{blamed:?} and {waited:?}");
    // Whichever waited for a tag for as long as the threshold is slow there, too, unless more were.
    let wrong: Vec<_> = slow
        .iter()
        .filter(|slow| slow.job.is_some_and(|job| waited.contains(&job)))
        .filter(|slow| slow.verdict.replica.map(usize::from) != Some(REPLICA))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    cluster.stop_and_check();
}

#[test]
fn what_is_no_upstairs_is_refused() {
    let refused = |arguments: &[&str], part: &str| {
        run(script("jobs.sh").args(arguments)).failed_saying(&[part]);
    };
    refused(&[], "name the process of one upstairs");
    refused(&["4194999"], "4194999 is not the id of a process");
    refused(&["/proc/1"], "is not the id of a process");
    refused(&["-m", "soon", "1"], "no number of milliseconds");
    if have("what_is_no_upstairs_is_refused (another program)", &["bpftrace"])
        && rustix::process::geteuid().is_root()
    {
        refused(&[&std::process::id().to_string()], "has no probes of a newel-upstairs");
    }
}
