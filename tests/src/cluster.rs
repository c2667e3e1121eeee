//! A volume whose daemons the test starts and ends by itself, one by one: three downstairs and an upstairs that nobody
//! starts again unasked, so that a restart takes no longer than the daemon does. (See [`crate::volume`] for `newel up`.)
//!
//! Invariants:
//! - Its directory and addresses are its own: each replica listens on a loopback address made of this process's id, so that
//!   no port is ever lost to another process while a replica is away.
//! - Dropping it ends every daemon. A failing test shows the ends of all their logs, those of ended ones included.
//! - No daemon panics: each one's log is looked through at its end.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use newel_upstairs::core::slow::SlowIo;
use newel_upstairs::core::status::Status;
use rustix::process::{Signal, kill_process};
use uuid::Uuid;

use crate::command::{Ran, Running, path, program, run, temp_dir};
use crate::http;
use crate::nbd::{Address, Client};
use crate::starved_disk::StarvedDisk;
use crate::volume::{RECOVERY_MAX, REPLICAS, as_pid, check_region};
use crate::wait;

/// An orderly end, or the first answer, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// The status page answers at once, or its daemon is stopped.
const STATUS_MAX: Duration = Duration::from_secs(2);
/// Lines of a log that a failing test shows.
const TAIL_LINES: usize = 30;
const PORT: u16 = 7100;

/// Any of the four daemons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Replica(usize),
    Upstairs,
}

impl Role {
    pub const ALL: [Self; 4] = [Self::Replica(0), Self::Replica(1), Self::Replica(2), Self::Upstairs];

    fn name(self) -> String {
        match self {
            Self::Replica(replica) => format!("downstairs-{replica}"),
            Self::Upstairs => "upstairs".into(),
        }
    }

    fn index(self) -> usize {
        match self {
            Self::Replica(replica) => replica,
            Self::Upstairs => REPLICAS,
        }
    }
}

/// Where a replica lives, if not in the cluster's directory and on loopback.
#[derive(Clone, Debug, Default)]
pub struct Place {
    pub region: Option<PathBuf>,
    /// A network namespace, and the address in it.
    pub network: Option<(String, String)>,
}

#[derive(Clone, Debug)]
pub struct Options {
    /// The volume's, and its NBD export's.
    pub name: &'static str,
    pub size: &'static str,
    /// A configuration file of the upstairs.
    pub config: &'static str,
    pub replicas: [Place; REPLICAS],
    /// The network namespace of the upstairs.
    pub upstairs: Option<String>,
    /// The status on TCP, and not on a unix socket.
    pub status_on_tcp: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "newel",
            size: "256M",
            config: "",
            replicas: Default::default(),
            upstairs: None,
            status_on_tcp: false,
        }
    }
}

#[derive(Debug)]
pub struct Cluster {
    dir: tempfile::TempDir,
    volume_id: Uuid,
    options: Options,
    /// Of the sockets of the upstairs in force.
    suffix: String,
    addresses: [String; REPLICAS],
    status_on_tcp: Option<SocketAddr>,
    daemons: [Option<Running>; REPLICAS + 1],
}

impl Cluster {
    /// A new volume, served and with all replicas active.
    #[track_caller]
    pub fn start(options: Options) -> Self {
        let mut cluster = Self::make(options);
        cluster.start_all();
        cluster.await_all_active();
        cluster
    }

    #[track_caller]
    pub fn small() -> Self {
        Self::start(Options::default())
    }

    /// 64 MiB of which the region of one replica lies on a disk that can be starved, with all that it needs of space and of the activity
    /// log.
    #[track_caller]
    pub fn on_a_disk(disk: &StarvedDisk, replica: usize, config: &'static str) -> Self {
        const EXTENTS: u64 = 16;
        const EXTENT_BYTES: u64 = 4 << 20;
        let mut replicas: [Place; REPLICAS] = Default::default();
        replicas[replica].region = Some(disk.path().join("region"));
        let cluster = Self::start(Options { size: "64M", config, replicas, ..Options::default() });
        let mut client = cluster.connect();
        for extent in 0..EXTENTS {
            for block in 0..64 {
                client.write(extent * EXTENT_BYTES + block * 4096, &[2; 4096]);
            }
        }
        cluster
    }

    /// The regions of a new volume; nothing runs.
    #[track_caller]
    pub fn make(options: Options) -> Self {
        let dir = temp_dir();
        std::fs::write(dir.path().join("upstairs.toml"), options.config).expect("target/tmp is writable");
        let addresses = std::array::from_fn(|replica| match &options.replicas[replica].network {
            Some((_, address)) => format!("{address}:{PORT}"),
            None => own_address(),
        });
        let status_on_tcp =
            options.status_on_tcp.then(|| own_address().parse().expect("it is an address with a port"));
        let cluster = Self {
            dir,
            volume_id: Uuid::new_v4(),
            options,
            suffix: String::new(),
            addresses,
            status_on_tcp,
            daemons: Default::default(),
        };
        for replica in 0..REPLICAS {
            let mut command = Command::new(program("newel-downstairs"));
            command.args(["create", "--prealloc", "sparse", "--size", cluster.options.size]);
            command.args(["--volume", &cluster.volume_id.to_string(), "--region"]);
            run(command.arg(cluster.region(replica))).ok();
        }
        cluster
    }

    pub fn start_all(&mut self) {
        for role in Role::ALL {
            self.start_daemon(role);
        }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn region(&self, replica: usize) -> PathBuf {
        let given = self.options.replicas[replica].region.clone();
        given.unwrap_or_else(|| self.dir().join(format!("region-{replica}")))
    }

    pub fn address(&self) -> Address {
        Address::Unix(self.socket("nbd", &self.suffix))
    }

    fn socket(&self, name: &str, suffix: &str) -> PathBuf {
        self.dir().join(format!("{name}{suffix}.sock"))
    }

    /// A guest's connection, as soon as the volume serves.
    #[track_caller]
    pub fn connect(&self) -> Client {
        wait::until("the volume serves NBD", RECOVERY_MAX, || Client::connect(&self.address()).ok())
    }

    // --- daemons ----------------------------------------------------------------------------------

    #[track_caller]
    pub fn start_daemon(&mut self, role: Role) {
        let running = match role {
            Role::Replica(replica) => Running::start(&mut self.replica_command(replica)),
            Role::Upstairs => Running::start(&mut self.upstairs_command(&self.suffix)),
        };
        let before = self.daemons[role.index()].replace(running);
        assert!(before.is_none(), "{} runs already", role.name());
    }

    fn replica_command(&self, replica: usize) -> Command {
        let network = self.options.replicas[replica].network.as_ref().map(|(name, _)| name.as_str());
        let mut command = in_network(network, "newel-downstairs");
        command.arg("run").arg("--region").arg(self.region(replica));
        command.args(["--listen", &self.addresses[replica]]);
        if network.is_some() {
            command.arg("--allow-plaintext");
        }
        command
    }

    /// An upstairs of this volume, on sockets with a suffix.
    pub fn upstairs_command(&self, suffix: &str) -> Command {
        let mut command = in_network(self.options.upstairs.as_deref(), "newel-upstairs");
        command.args(["run", "--volume", self.options.name, "--volume-id", &self.volume_id.to_string()]);
        for address in &self.addresses {
            command.args(["--replica", address]);
        }
        let socket = |name: &str| format!("unix:{}", self.socket(name, suffix).display());
        let status = self.status_on_tcp.map_or_else(|| socket("status"), |address| format!("tcp:{address}"));
        command.args(["--listen", &socket("nbd"), "--status", &status]);
        command.arg("--config").arg(self.dir().join("upstairs.toml"));
        if self.options.upstairs.is_some() {
            command.arg("--allow-plaintext");
        }
        command
    }

    /// Makes an upstairs that was started with [`Self::upstairs_command`] and this suffix the volume's own; the one before
    /// has ended.
    #[track_caller]
    pub fn adopt(&mut self, upstairs: Running, suffix: &str) {
        assert!(self.daemons[Role::Upstairs.index()].replace(upstairs).is_none(), "the first still runs");
        self.suffix = suffix.to_owned();
    }

    #[track_caller]
    fn running(&mut self, role: Role) -> &mut Running {
        let name = role.name();
        self.daemons[role.index()].as_mut().unwrap_or_else(|| panic!("{name} does not run"))
    }

    #[track_caller]
    pub fn pid(&mut self, role: Role) -> u32 {
        self.running(role).pid()
    }

    #[track_caller]
    pub fn signal(&mut self, role: Role, signal: Signal) {
        let running = self.running(role);
        if !running.running() {
            panic!("{} has ended by itself: {}", role.name(), running.stderr());
        }
        kill_process(as_pid(running.pid()), signal).expect("it runs");
    }

    /// `kill -9`, and the process is gone.
    #[track_caller]
    pub fn kill(&mut self, role: Role) {
        self.signal(role, Signal::KILL);
        self.ended(role);
    }

    /// SIGTERM; the daemon must end in order.
    #[track_caller]
    pub fn terminate(&mut self, role: Role) {
        self.signal(role, Signal::TERM);
        let ran = self.ended(role);
        // A signal that comes before anything is open and said ends any process.
        let unborn = ran.status.signal() == Some(Signal::TERM.as_raw()) && ran.stderr.is_empty();
        assert!(ran.status.success() || unborn, "SIGTERM of {}: {ran}", role.name());
    }

    /// Waits for a daemon's end, and keeps its log.
    #[track_caller]
    pub fn ended(&mut self, role: Role) -> Ran {
        let running = self.daemons[role.index()].take().unwrap_or_else(|| panic!("{} runs", role.name()));
        let ran = running.wait(PATIENCE);
        self.keep_log(role, &ran.stderr);
        assert!(!ran.stderr.contains("panicked"), "{} panicked: {ran}", role.name());
        ran
    }

    fn keep_log(&self, role: Role, text: &str) {
        let path = self.log_path(role);
        let file = OpenOptions::new().create(true).append(true).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    fn log_path(&self, role: Role) -> PathBuf {
        self.dir().join(format!("{}.log", role.name()))
    }

    /// Everything a role's daemons have logged, those that ended first.
    pub fn log(&mut self, role: Role) -> String {
        let mut text = std::fs::read_to_string(self.log_path(role)).unwrap_or_default();
        if let Some(running) = &mut self.daemons[role.index()] {
            text += &running.stderr();
        }
        text
    }

    /// `newel fault` on a replica, as an operator would; its answer.
    #[track_caller]
    pub fn fault(&self, replica: usize, faults: &str) -> String {
        let control = format!("{}.control", self.region(replica).display());
        run(Command::new(program("newel")).args(["fault", faults, "--control", &control])).ok().stdout
    }

    // --- state ------------------------------------------------------------------------------------

    pub fn status_socket(&self) -> PathBuf {
        self.socket("status", &self.suffix)
    }

    /// Where the status, and what Prometheus reads, is served.
    pub fn status_address(&self) -> Address {
        self.status_on_tcp.map_or_else(|| Address::Unix(self.status_socket()), Address::Tcp)
    }

    /// The status page, unless the upstairs is away or stopped.
    pub fn try_status(&self) -> Option<Status> {
        let body = self.get("/status")?;
        Some(serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}")))
    }

    /// The slow I/Os that the upstairs knows of.
    #[track_caller]
    pub fn slow(&self) -> Vec<SlowIo> {
        self.list("/slow")
    }

    /// What is under way.
    #[track_caller]
    pub fn in_flight(&self) -> Vec<SlowIo> {
        self.list("/inflight")
    }

    #[track_caller]
    fn list(&self, path: &str) -> Vec<SlowIo> {
        let body = wait::until("the upstairs answers", PATIENCE, || self.get(path));
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
    }

    /// Whatever lies at this path of the status address, unless the upstairs is away or stopped.
    pub fn get(&self, path: &str) -> Option<String> {
        let answer = http::get(&self.status_address(), path, STATUS_MAX).ok()?;
        assert_eq!(answer.status, 200, "{}", answer.body);
        Some(answer.body)
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
            status.state == "serving" && status.replicas.iter().all(|replica| replica.state == "active")
        })
    }

    #[track_caller]
    pub fn await_active(&self, replica: usize) -> Status {
        self.await_status(&format!("replica {replica} is active"), |status| {
            status.state == "serving" && status.replicas[replica].state == "active"
        })
    }

    #[track_caller]
    pub fn await_away(&self, replica: usize) -> Status {
        self.await_status(&format!("replica {replica} has left"), |status| {
            status.replicas[replica].state != "active"
        })
    }

    /// Ends all daemons in order, once no replica owes anything.
    #[track_caller]
    pub fn stop(&mut self) {
        self.await_status("all replicas have executed everything", |status| {
            status.state == "serving"
                && status.replicas.iter().all(|replica| replica.state == "active" && replica.queue_jobs == 0)
        });
        for role in [Role::Upstairs, Role::Replica(0), Role::Replica(1), Role::Replica(2)] {
            self.terminate(role);
        }
    }

    /// Checks every stopped region offline, and compares their digests.
    #[track_caller]
    pub fn check(&self) {
        let digests: Vec<String> = (0..REPLICAS).map(|replica| check_region(&self.region(replica))).collect();
        assert!(digests.windows(2).all(|pair| pair[0] == pair[1]), "the replicas differ: {digests:?}");
    }

    #[track_caller]
    pub fn stop_and_check(&mut self) {
        self.stop();
        self.check();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for role in Role::ALL {
                let log = self.log(role);
                let from = log.lines().count().saturating_sub(TAIL_LINES);
                let lines: Vec<&str> = log.lines().skip(from).collect();
                eprintln!("--- the end of the log of {} ---\n{}", role.name(), lines.join("\n"));
            }
        }
        // Each is killed as it goes; the upstairs first, so that it has nothing to say about the rest.
        for daemon in self.daemons.iter_mut().rev() {
            drop(daemon.take());
        }
    }
}

/// The program itself, so that its pid is that of the child: both `ip netns exec` and the shell would be in between.
fn in_network(network: Option<&str>, name: &str) -> Command {
    match network {
        None => Command::new(program(name)),
        Some(network) => {
            // `ip netns exec` replaces itself by the program.
            let mut command = Command::new("ip");
            command.env("PATH", path()).args(["netns", "exec", network]).arg(program(name));
            command
        }
    }
}

/// 127.x.y.z of this process and call. All of 127/8 is loopback.
pub fn own_address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    // From 1 to 254: the test makes far fewer, and the last byte must be neither 0 nor 255.
    let last = NEXT.fetch_add(1, Ordering::Relaxed) % 254 + 1;
    format!("127.{}.{low}.{last}:{PORT}", high.max(1))
}
