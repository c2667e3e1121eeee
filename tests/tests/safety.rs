//! Whatever happens to the processes of a volume, nothing acknowledged is lost and the replicas end up equal.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::time::Duration;

use newel_tests::cluster::{Cluster, Options, Role};
use newel_tests::command::{Running, program, run};
use newel_tests::journal::{Journal, Writing};
use newel_tests::load::Load;
use newel_tests::lock::Heavy;
use newel_tests::nbd::{Address, Client, Command};
use newel_tests::pattern::{Random, bytes_at};
use newel_tests::seed::seed;
use newel_tests::volume::REPLICAS;
use newel_tests::wait::{self, Watch};
use newel_upstairs::core::status::Status;
use rustix::process::Signal;

/// Each test breaks links far more often than once in half a minute, so that back-off would grow to its maximum.
const QUICK: &str = "[timing]\nbackoff_max = \"200ms\"\n";
const BLOCKS: usize = 2048;

fn quick() -> Cluster {
    Cluster::start(Options { config: QUICK, ..Options::default() })
}

/// Writes until `count` are acknowledged; they go on when this returns.
#[track_caller]
fn start_writing(cluster: &Cluster, journal: Journal, count: u64) -> Writing {
    let writing = Writing::start(journal, cluster.connect());
    wait::until("writes are acknowledged", Duration::from_secs(60), || {
        (writing.acknowledged() >= count).then_some(())
    });
    writing
}

fn milliseconds(random: &mut Random, low: u64, high: u64) -> Duration {
    Duration::from_millis(low + random.below(high - low))
}

/// One fault of one process under load. Gives the journal back if the guest's connection broke.
fn strike(cluster: &mut Cluster, random: &mut Random, writing: &mut Option<Writing>) -> Option<Journal> {
    let role = Role::ALL[usize::try_from(random.below(4)).unwrap()];
    match random.below(3) {
        0 => {
            cluster.signal(role, Signal::STOP);
            wait::pass(milliseconds(random, 20, 400));
            cluster.signal(role, Signal::CONT);
            return None;
        }
        1 => cluster.kill(role),
        _ => cluster.terminate(role),
    }
    let broken = (role == Role::Upstairs).then(|| writing.take().unwrap().broken());
    wait::pass(milliseconds(random, 0, 200));
    cluster.start_daemon(role);
    broken
}

// Mayastor: degrades under load. DRBD: both UpToDate, and the data differ.
#[test]
fn processes_killed_stopped_and_terminated_in_any_order_lose_nothing() {
    let _heavy = Heavy::take();
    let seed = seed("processes_killed_stopped_and_terminated_in_any_order_lose_nothing");
    let mut random = Random::new(seed);
    let mut cluster = quick();
    let mut writing = Some(start_writing(&cluster, Journal::new(BLOCKS, seed), 500));
    for round in 0..60 {
        let broken = strike(&mut cluster, &mut random, &mut writing);
        // In half of the rounds the next fault meets a volume that hasn't got over this one.
        if random.below(2) == 0 {
            cluster.await_all_active();
        }
        let ended = match broken {
            Some(journal) => Some(journal),
            None if round % 8 == 7 => writing.take().map(Writing::finish),
            None => None,
        };
        if let Some(mut journal) = ended {
            journal.verify(&mut cluster.connect());
            writing = Some(start_writing(&cluster, journal, 200));
        }
    }
    cluster.await_all_active();
    writing.take().unwrap().finish().verify(&mut cluster.connect());
    cluster.stop_and_check();
}

// Longhorn: the wrong replica kept after all were away.
#[test]
fn three_replicas_killed_one_after_another_and_restarted_oldest_first_lose_nothing() {
    let _heavy = Heavy::take();
    let seed = seed("three_replicas_killed_one_after_another_and_restarted_oldest_first_lose_nothing");
    let mut random = Random::new(seed);
    let mut cluster = quick();
    let mut journal = Journal::new(BLOCKS, seed);
    for round in 0..6 {
        let upstairs_dies = round % 2 == 1;
        let writing = start_writing(&cluster, journal, 500);
        let first = random.below(3);
        let second = (first + 1 + random.below(2)) % 3;
        let order = [first, second, 3 - first - second].map(|at| Role::Replica(usize::try_from(at).unwrap()));
        for role in order {
            cluster.kill(role);
            wait::pass(Duration::from_millis(100));
        }
        if upstairs_dies {
            cluster.kill(Role::Upstairs);
            cluster.start_daemon(Role::Upstairs);
        }
        for role in order {
            cluster.start_daemon(role);
            // Long enough for the oldest to be asked alone.
            wait::pass(Duration::from_millis(300));
        }
        journal = if upstairs_dies { writing.broken() } else { writing.finish() };
        journal.verify(&mut cluster.connect());
        cluster.await_all_active();
    }
    cluster.stop_and_check();
}

// DRBD: both UpToDate, data differs, as what a replica lacks was forgotten when it came back.
#[test]
fn replicas_away_in_turn_a_hundred_times_stay_equal() {
    let _heavy = Heavy::take();
    let seed = seed("replicas_away_in_turn_a_hundred_times_stay_equal");
    let mut random = Random::new(seed);
    let mut cluster = quick();
    let mut journal = Journal::new(BLOCKS, seed);
    let mut client = cluster.connect();
    let watch = Watch::start();
    let mut longest = Duration::ZERO;
    for round in 0..100 {
        let begun = watch.elapsed();
        let role = Role::Replica(round % REPLICAS);
        if random.below(2) == 0 {
            cluster.kill(role)
        } else {
            cluster.terminate(role)
        }
        // These wait for the one before, if that isn't active yet.
        journal.write_some(&mut client, 8);
        cluster.start_daemon(role);
        if random.below(2) == 0 {
            cluster.await_active(round % REPLICAS);
        }
        if round % 25 == 24 {
            journal.verify(&mut client);
        }
        longest = longest.max(watch.elapsed() - begun);
    }
    let all = watch.elapsed();
    println!("100 rounds took {all:.1?}, the longest {longest:.1?}");
    assert!(all < Duration::from_secs(100), "a round takes {:?}", all / 100);
    cluster.await_all_active();
    journal.verify(&mut client);
    cluster.stop_and_check();
}

/// All blocks of the journal as they are.
#[track_caller]
fn content(client: &mut Client) -> Vec<Vec<u8>> {
    (0..BLOCKS as u64).map(|block| client.read(block * 4096, 4096)).collect()
}

#[test]
fn an_upstairs_that_slept_through_a_takeover_ends_and_writes_nothing() {
    let _heavy = Heavy::take();
    let seed = seed("an_upstairs_that_slept_through_a_takeover_ends_and_writes_nothing");
    let mut cluster = quick();
    let mut journal = Journal::new(BLOCKS, seed);
    for round in 0..3 {
        let writing = start_writing(&cluster, journal, 1000);
        cluster.signal(Role::Upstairs, Signal::STOP);
        let suffix = format!("-{round}");
        let mut second = Running::start(cluster.upstairs_command(&suffix).arg("--takeover"));
        let address = Address::Unix(cluster.dir().join(format!("nbd{suffix}.sock")));
        let mut client = wait::until("the second serves", Duration::from_secs(30), || {
            assert!(second.running(), "the second ended: {}", second.stderr());
            Client::connect(&address).ok()
        });
        let before = content(&mut client);
        let data = bytes_at(64 << 20, 65_536, round);
        client.write(64 << 20, &data);

        cluster.signal(Role::Upstairs, Signal::CONT);
        let first = cluster.ended(Role::Upstairs);
        first.failed_saying(&["taken over by", "nothing more is written"]);
        // What the first had acknowledged the second has; nothing of the rest has come since.
        journal = writing.broken();
        journal.verify(&mut client);
        assert!(content(&mut client) == before, "a late write of the first upstairs was executed");
        assert_eq!(client.read(64 << 20, 65_536), data);
        cluster.adopt(second, &suffix);
        cluster.await_all_active();
    }
    cluster.stop_and_check();
}

// Longhorn: a volume that does not come back by itself after its engine was restarted.
#[test]
fn a_replica_that_slept_through_a_change_of_upstairs_joins_the_new_one() {
    let _heavy = Heavy::take();
    let seed = seed("a_replica_that_slept_through_a_change_of_upstairs_joins_the_new_one");
    let mut random = Random::new(seed);
    let mut cluster = quick();
    let mut journal = Journal::new(BLOCKS, seed);
    for _ in 0..6 {
        let writing = start_writing(&cluster, journal, 300);
        let sleeper = Role::Replica(usize::try_from(random.below(3)).unwrap());
        cluster.signal(sleeper, Signal::STOP);
        cluster.kill(Role::Upstairs);
        journal = writing.broken();
        cluster.start_daemon(Role::Upstairs);
        if random.below(2) == 0 {
            cluster.connect();
        } else {
            wait::pass(milliseconds(&mut random, 0, 300));
        }
        // It hears of the end of the old session and of the new one at the same moment.
        cluster.signal(sleeper, Signal::CONT);
        cluster.await_all_active();
        journal.verify(&mut cluster.connect());
    }
    cluster.stop_and_check();
}

fn reconnects(status: &Status) -> u64 {
    status.replicas.iter().map(|replica| replica.reconnects).sum()
}

#[test]
fn a_second_upstairs_is_refused_and_told_by_whom() {
    let mut cluster = Cluster::small();
    let mut client = cluster.connect();
    let data = bytes_at(0, 65_536, 1);
    client.write(0, &data);
    let before = cluster.try_status().unwrap();
    for _ in 0..3 {
        let ran = run(&mut cluster.upstairs_command("-2"));
        ran.failed_saying(&["upstairs ", "serves this volume", "--takeover"]);
        client.write(65_536, &data);
        assert_eq!(client.read(0, 65_536), data);
    }
    let after = cluster.try_status().unwrap();
    assert_eq!(after.generation, before.generation);
    assert_eq!(reconnects(&after), reconnects(&before), "the first was disturbed");
    cluster.stop_and_check();
}

/// The flushed mark in the header of a region that may be in use.
#[track_caller]
fn flushed_mark(cluster: &Cluster, replica: usize) -> String {
    let mut command = std::process::Command::new(program("newel-downstairs"));
    let ran = run(command.args(["dump", "--region"]).arg(cluster.region(replica))).ok();
    let mark = ran.stdout.lines().find_map(|line| line.strip_prefix("flushed mark: "));
    mark.unwrap_or_else(|| panic!("no mark in {ran}")).to_owned()
}

// Longhorn: a flush is never forwarded to the replicas.
#[test]
fn a_flush_is_durable_on_a_quorum_before_it_is_answered() {
    let mut cluster = Cluster::small();
    let mut client = cluster.connect();
    for round in 0..5 {
        let before: Vec<String> = (0..REPLICAS).map(|replica| flushed_mark(&cluster, replica)).collect();
        // Twice, as then the mark has to be in the header before the flush is answered.
        for salt in 1..=2 {
            client.write(round * 4096, &bytes_at(round * 4096, 4096, salt));
        }
        client.flush();
        let moved =
            (0..REPLICAS).filter(|&replica| flushed_mark(&cluster, replica) != before[replica]).count();
        assert!(moved >= 2, "the flush reached {moved} replicas");
    }
    cluster.stop_and_check();
}

/// Processor time of a process so far, in clock ticks of 10 ms.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let number = |at: usize| fields.split_whitespace().nth(at).unwrap().parse::<u64>().unwrap();
    // User and system time are fields 14 and 15, and what follows the name begins with the third.
    number(11) + number(12)
}

// Mayastor: degrades under load; a whole core burnt when idle.
#[test]
fn a_saturated_volume_keeps_its_replicas_and_an_idle_one_rests() {
    let _heavy = Heavy::take();
    let mut cluster = Cluster::small();
    let before = reconnects(&cluster.await_all_active());
    let loads = [(Command::Write, 256), (Command::Write, 64), (Command::Read, 256)];
    let loads = loads.map(|(command, depth)| Load::start(&cluster.address(), command, depth, 65_536));
    wait::pass(Duration::from_secs(5));
    for load in loads {
        load.finish();
    }
    let status = cluster.await_all_active();
    assert_eq!(reconnects(&status), before, "a replica left: {status:#?}");

    // What a flush or a punch still has to do is done by then.
    wait::pass(Duration::from_secs(1));
    let pids = Role::ALL.map(|role| cluster.pid(role));
    let before = pids.map(ticks);
    wait::pass(Duration::from_secs(3));
    let used: Vec<u64> = pids.into_iter().zip(before).map(|(pid, before)| ticks(pid) - before).collect();
    println!("ticks of 10 ms used by the idle daemons in 3 s: {used:?}");
    assert!(used.iter().all(|&ticks| ticks < 30), "a tenth of a core: {used:?}");
    cluster.stop_and_check();
}

// Crucible: an unauthenticated repair port beside the one for the upstairs.
#[test]
fn a_replica_listens_on_one_port_alone() {
    let mut cluster = Cluster::small();
    for replica in 0..REPLICAS {
        let pid = cluster.pid(Role::Replica(replica));
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let open: Vec<String> = descriptors
            .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
            .map(|target| target.to_string_lossy().into_owned())
            .collect();
        let table = ["tcp", "tcp6"].map(|kind| std::fs::read_to_string(format!("/proc/{pid}/net/{kind}")));
        let table = table.map(Result::unwrap_or_default).concat();
        // The fourth field of a listening socket is 0A, the tenth its inode.
        let listening =
            table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).filter(|fields| {
                fields.get(3) == Some(&"0A")
                    && fields.get(9).is_some_and(|inode| open.contains(&format!("socket:[{inode}]")))
            });
        assert_eq!(listening.count(), 1, "replica {replica}");
    }
    cluster.stop_and_check();
}

// Vitastor: a file system over NBD corrupted; see also the file systems in e2e.rs.
#[test]
fn a_stop_under_load_acknowledges_nothing_that_is_lost() {
    let _heavy = Heavy::take();
    let seed = seed("a_stop_under_load_acknowledges_nothing_that_is_lost");
    let mut cluster = quick();
    let mut journal = Journal::new(BLOCKS, seed);
    for _ in 0..4 {
        let writing = start_writing(&cluster, journal, 500);
        cluster.terminate(Role::Upstairs);
        journal = writing.broken();
        for replica in 0..REPLICAS {
            cluster.terminate(Role::Replica(replica));
        }
        cluster.start_all();
        journal.verify(&mut cluster.connect());
    }
    cluster.await_all_active();
    cluster.stop_and_check();
}
