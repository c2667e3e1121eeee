//! A volume of its own for a test: a real `newel up` with its four daemons.
//!
//! Invariants:
//! - Its directory, ports and sockets are its own. Dropping it stops every process and removes the directory.
//! - A failing test shows the daemons' logs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use newel_upstairs::core::status::Status;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::command::{Ran, Running, program, run, temp_dir};
use crate::nbd::Address;
use crate::wait;

/// From the start of `newel up` to the first answer, on a busy machine.
const START_MAX: Duration = Duration::from_secs(60);
/// From a replica's return to `active`, with little to catch up.
pub const RECOVERY_MAX: Duration = Duration::from_secs(60);
/// All daemons must end within this time.
const STOP_MAX: Duration = Duration::from_secs(5);

pub const REPLICAS: usize = 3;
/// Their roles in `pids.json`.
pub const DAEMONS: [&str; 4] = ["upstairs", "downstairs-0", "downstairs-1", "downstairs-2"];

/// How the volume is made and run.
#[derive(Clone, Debug)]
pub struct Setup {
    pub size: &'static str,
    /// Beside the unix socket in its directory.
    pub tcp: bool,
    pub arguments: Vec<String>,
}

impl Default for Setup {
    fn default() -> Self {
        Self { size: "256M", tcp: false, arguments: vec!["--prealloc".into(), "sparse".into()] }
    }
}

#[derive(Debug)]
pub struct Volume {
    dir: tempfile::TempDir,
    setup: Setup,
    up: Option<Running>,
}

impl Volume {
    /// A new volume that serves.
    #[track_caller]
    pub fn start(setup: Setup) -> Self {
        let mut volume = Self { dir: temp_dir(), setup, up: None };
        volume.again();
        volume
    }

    #[track_caller]
    pub fn small() -> Self {
        Self::start(Setup::default())
    }

    /// Runs `newel up` on the directory, anew or again, until the volume serves.
    #[track_caller]
    pub fn again(&mut self) {
        assert!(self.up.is_none(), "it runs already");
        let mut up = Running::start(&mut self.command());
        wait::until("newel up serves", START_MAX, || {
            if !up.running() {
                let (out, err) = (up.stdout(), up.stderr());
                panic!("newel up ended:\n{out}\n{err}");
            }
            up.stdout().contains("Ctrl-C stops everything").then_some(())
        });
        self.up = Some(up);
    }

    /// The command line of `newel up` for this directory.
    pub fn command(&self) -> Command {
        let mut command = Command::new(program("newel"));
        command.arg("up").arg("--dir").arg(self.dir()).args(&self.setup.arguments);
        command.args(["--size", self.setup.size]);
        command.arg("--listen").arg(format!("unix:{}", self.socket().display()));
        if self.setup.tcp {
            command.args(["--listen", "tcp:127.0.0.1:0"]);
        }
        command
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn region(&self, replica: usize) -> PathBuf {
        self.dir().join(format!("region-{replica}"))
    }

    pub fn socket(&self) -> PathBuf {
        self.dir().join("nbd.sock")
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    pub fn unix(&self) -> Address {
        Address::Unix(self.socket())
    }

    /// The TCP address of the NBD server, if the setup asked for one.
    #[track_caller]
    pub fn tcp(&mut self) -> Address {
        let said = self.said();
        let address = said.lines().find_map(|line| line.strip_prefix("NBD: nbd://")).expect("it serves TCP");
        Address::Tcp(address.parse().expect("it is an address"))
    }

    /// The arguments by which a further upstairs would serve this volume, on sockets with `suffix`.
    #[track_caller]
    pub fn upstairs_arguments(&self, suffix: &str) -> Vec<String> {
        let id = self.status().volume;
        let mut arguments: Vec<String> =
            ["run", "--volume", "newel", "--volume-id", &id].map(String::from).into();
        for replica in self.status().replicas {
            arguments.extend(["--replica".into(), replica.address]);
        }
        let socket = |name: &str| format!("unix:{}/{name}{suffix}", self.dir().display());
        arguments.extend(["--listen".into(), socket("nbd"), "--status".into(), socket("status")]);
        arguments
    }

    /// What `newel up` printed so far.
    #[track_caller]
    pub fn said(&mut self) -> String {
        self.up.as_mut().expect("it runs").stdout()
    }

    /// The pid of `up`, `upstairs` or `downstairs-N`; `None` while that one doesn't run.
    pub fn pid(&self, role: &str) -> Option<u32> {
        let text = std::fs::read_to_string(self.dir().join("pids.json")).ok()?;
        let pids: serde_json::Value = serde_json::from_str(&text).ok()?;
        pids.get(role)?.as_u64().and_then(|pid| u32::try_from(pid).ok())
    }

    /// Sends a signal to a daemon, and tells its pid.
    #[track_caller]
    pub fn signal(&self, role: &str, signal: Signal) -> u32 {
        let pid = wait::until(&format!("{role} runs"), START_MAX, || self.pid(role));
        kill_process(as_pid(pid), signal).unwrap_or_else(|error| panic!("{role} (pid {pid}): {error}"));
        pid
    }

    /// `kill -9`, and the return of the daemon under another pid.
    #[track_caller]
    pub fn kill_and_await_restart(&self, role: &str) {
        let old = self.signal(role, Signal::KILL);
        wait::until(&format!("{role} is started again"), START_MAX, || {
            self.pid(role).filter(|&pid| pid != old)
        });
    }

    /// `newel status --json`, as the operator sees it.
    pub fn try_status(&self) -> Option<Status> {
        let ran = run(Command::new(program("newel")).args(["status", "--json", "--dir"]).arg(self.dir()));
        ran.status.success().then(|| serde_json::from_str(&ran.stdout).expect("it prints JSON"))
    }

    #[track_caller]
    pub fn status(&self) -> Status {
        wait::until("the status page answers", START_MAX, || self.try_status())
    }

    #[track_caller]
    pub fn await_status(&self, what: &str, mut holds: impl FnMut(&Status) -> bool) -> Status {
        let mut last = None;
        let found = wait::try_until(RECOVERY_MAX, || {
            last = self.try_status();
            last.clone().filter(|status| holds(status))
        });
        found.unwrap_or_else(|| panic!("{what}: not within {RECOVERY_MAX:?}; the last status was {last:#?}"))
    }

    /// Until all three replicas hold everything.
    #[track_caller]
    pub fn await_all_active(&self) -> Status {
        self.await_status("all replicas are active", |status| {
            status.state == "serving"
                && status.replicas.len() == REPLICAS
                && status.replicas.iter().all(|replica| replica.state == "active")
        })
    }

    /// SIGTERM; everything must have ended within 5 s.
    #[track_caller]
    pub fn stop(&mut self) -> Ran {
        let up = self.up.take().expect("it runs");
        let pids: Vec<u32> = DAEMONS.iter().filter_map(|role| self.pid(role)).collect();
        kill_process(as_pid(up.pid()), Signal::TERM).expect("newel up runs");
        let ran = up.wait(STOP_MAX + Duration::from_secs(1)).ok();
        for pid in pids {
            assert!(test_kill_process(as_pid(pid)).is_err(), "pid {pid} outlived newel up");
        }
        ran
    }

    /// `kill -9` of `newel up` itself: its daemons live on.
    #[track_caller]
    pub fn kill_up(&mut self) {
        let up = self.up.take().expect("it runs");
        kill_process(as_pid(up.pid()), Signal::KILL).expect("newel up runs");
        up.wait(STOP_MAX);
    }

    /// Stops the volume, checks every region offline, and compares their digests.
    #[track_caller]
    pub fn stop_and_check(&mut self) {
        // What a quorum has acknowledged, the third may still owe, and is then given at the next start.
        self.await_status("all replicas have executed everything", |status| {
            status.state == "serving"
                && status.replicas.iter().all(|replica| replica.state == "active" && replica.queue_jobs == 0)
        });
        self.stop();
        let digests: Vec<String> = (0..REPLICAS).map(|replica| check_region(&self.region(replica))).collect();
        assert!(digests.windows(2).all(|pair| pair[0] == pair[1]), "the replicas differ: {digests:?}");
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if let Some(up) = &mut self.up {
            if std::thread::panicking() {
                eprintln!("newel up said:\n{}", up.stdout());
                show_logs(self.dir.path());
            }
            // Told to stop before its daemons are gone, so that it starts none again.
            kill_process(as_pid(up.pid()), Signal::TERM).ok();
        }
        for pid in DAEMONS.iter().filter_map(|role| self.pid(role)).filter(|&pid| self.is_ours(pid)) {
            kill_process(as_pid(pid), Signal::KILL).ok();
        }
        if let Some(mut up) = self.up.take() {
            // What is left of it is killed with `up`.
            wait::try_until(STOP_MAX, || (!up.running()).then_some(()));
        }
    }
}

fn show_logs(dir: &Path) {
    for role in DAEMONS {
        let log = std::fs::read_to_string(dir.join(format!("{role}.log"))).unwrap_or_default();
        let from = log.lines().count().saturating_sub(30);
        let lines: Vec<&str> = log.lines().skip(from).collect();
        eprintln!("--- the end of {role}.log ---\n{}", lines.join("\n"));
    }
}

impl Volume {
    /// A `pids.json` that a killed `newel up` left may name pids that are somebody else's by now.
    fn is_ours(&self, pid: u32) -> bool {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.contains(&self.dir().display().to_string())
    }
}

pub fn as_pid(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).expect("pids are small")).expect("pids are not zero")
}

/// `newel-downstairs check`: the region must be sound; tells its digest.
#[track_caller]
pub fn check_region(region: &Path) -> String {
    let ran = run(Command::new(program("newel-downstairs")).args(["check", "--region"]).arg(region)).ok();
    let digest = ran.stdout.lines().find_map(|line| line.trim().strip_prefix("digest:"));
    digest.unwrap_or_else(|| panic!("no digest in {ran}")).trim().to_owned()
}
