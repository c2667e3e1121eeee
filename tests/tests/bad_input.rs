//! Wrong files, wrong settings, full disks and rude peers: a clear error, a non-zero exit, nothing lost.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;

use newel_tests::command::{Ran, Running, program, run, sh, temp_dir};
use newel_tests::lock::Heavy;
use newel_tests::nbd::{Address, Client, Stream};
use newel_tests::pattern::{Random, bytes_at};
use newel_tests::skip::{have, have_root};
use newel_tests::small_disk::SmallDisk;
use newel_tests::volume::{Setup, Volume};
use newel_tests::wait;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn tiny() -> Setup {
    Setup { size: "64M", ..Setup::default() }
}

fn downstairs(arguments: &[&str]) -> Ran {
    run(Command::new(program("newel-downstairs")).args(arguments))
}

fn upstairs(arguments: &[&str]) -> Ran {
    run(Command::new(program("newel-upstairs")).args(arguments))
}

/// A stopped volume with data, whose middle region is spoilt by `spoil`: `newel up` must fail and say `parts`. With the
/// region put back, everything is there.
fn check_spoilt_region(spoil: impl FnOnce(&Volume, &Path), parts: &[&str]) {
    let mut volume = Volume::start(tiny());
    let data = bytes_at(0, 1 << 20, 1);
    Client::connect(&volume.unix()).unwrap().write(0, &data);
    volume.await_all_active();
    volume.stop();
    let region = volume.region(1);
    let aside = volume.dir().join("aside");
    sh("cp", &["--sparse=always", region.to_str().unwrap(), aside.to_str().unwrap()]).ok();
    spoil(&volume, &region);

    run(&mut volume.command()).failed_saying(parts);
    let check = downstairs(&["check", "--region", region.to_str().unwrap()]);
    assert!(check.status.code().is_some(), "check must not die: {check}");

    std::fs::rename(&aside, &region).unwrap();
    volume.again();
    assert_eq!(Client::connect(&volume.unix()).unwrap().read(0, 1 << 20), data);
    volume.stop_and_check();
}

fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, at).unwrap();
}

#[test]
fn a_region_with_another_magic() {
    check_spoilt_region(|_, region| overwrite(region, 0, &[0xaa; 1 << 20]), &["region-1", "magic"]);
}

#[test]
fn an_empty_region() {
    check_spoilt_region(|_, region| std::fs::write(region, "").unwrap(), &["region-1"]);
}

#[test]
fn a_truncated_region() {
    let cut = |_: &Volume, region: &Path| {
        let length = std::fs::metadata(region).unwrap().len();
        std::fs::OpenOptions::new().write(true).open(region).unwrap().set_len(length / 2).unwrap();
    };
    check_spoilt_region(cut, &["region-1", "truncated"]);
}

#[test]
fn a_region_of_another_volume() {
    let other = |_: &Volume, region: &Path| {
        let mut other = Volume::start(tiny());
        other.stop();
        std::fs::copy(other.region(1), region).unwrap();
    };
    check_spoilt_region(other, &["belongs to volume"]);
}

#[test]
fn a_region_of_another_size() {
    let other = |volume: &Volume, region: &Path| {
        std::fs::remove_file(region).unwrap();
        let description = std::fs::read_to_string(volume.dir().join("volume.toml")).unwrap();
        let id = description.lines().find_map(|line| line.strip_prefix("volume_id = ")).unwrap();
        let region = region.to_str().unwrap();
        let size = (128 << 20).to_string();
        downstairs(&["create", "--region", region, "--size", &size, "--volume", id.trim_matches('"')]).ok();
    };
    check_spoilt_region(other, &["size"]);
}

/// A region in a directory of its own.
fn region_in(dir: &Path, size: &str) -> String {
    let region = dir.join("region").to_str().unwrap().to_owned();
    downstairs(&["create", "--region", &region, "--size", size, "--prealloc", "sparse"]).ok();
    region
}

#[test]
fn a_port_in_use() {
    let dir = temp_dir();
    let region = region_in(dir.path(), "16M");
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = held.local_addr().unwrap().to_string();
    downstairs(&["run", "--region", &region, "--listen", &address]).failed_saying(&[&address, "in use"]);

    let dir = temp_dir();
    let ran = run(Command::new(program("newel"))
        .args(["up", "--size", "64M", "--prealloc", "sparse", "--listen", &format!("tcp:{address}"), "--dir"])
        .arg(dir.path().join("v")));
    ran.failed_saying(&["upstairs", &address, "in use"]);
}

#[test]
fn a_socket_in_use() {
    let volume = Volume::start(tiny());
    let dir = temp_dir();
    let listen = format!("unix:{}", volume.socket().display());
    let ran = run(Command::new(program("newel"))
        .args(["up", "--size", "64M", "--prealloc", "sparse", "--listen", &listen, "--dir"])
        .arg(dir.path().join("v")));
    ran.failed_saying(&["upstairs", volume.socket().to_str().unwrap(), "in use"]);
    Client::connect(&volume.unix()).unwrap().write(0, b"the owner lives on");
}

#[test]
fn a_region_in_use() {
    let mut volume = Volume::start(tiny());
    let region = volume.region(0);
    let region = region.to_str().unwrap();
    let pid = volume.pid("downstairs-0").unwrap().to_string();
    downstairs(&["run", "--region", region, "--listen", "127.0.0.1:0"]).failed_saying(&[region, &pid]);
    downstairs(&["create", "--region", region, "--size", "64M", "--force"]).failed_saying(&[region]);
    volume.stop_and_check();
}

#[test]
fn an_unwritable_directory() {
    let dir = temp_dir();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    for bad in ["/proc/newel".to_owned(), file.join("sub").display().to_string()] {
        run(Command::new(program("newel")).args(["up", "--size", "64M", "--dir", &bad]))
            .failed_saying(&[&bad]);
        let region = format!("{bad}/region");
        downstairs(&["create", "--region", &region, "--size", "64M"]).failed_saying(&[&region]);
    }
}

#[test]
fn a_full_disk_at_creation() {
    if !have_root("a_full_disk_at_creation") {
        return;
    }
    let dir = temp_dir();
    let disk = SmallDisk::mount(&dir.path().join("disk"), 8);
    for prealloc in ["full", "fallocate"] {
        let volume = disk.path().join("v");
        let ran = run(Command::new(program("newel"))
            .args(["up", "--size", "64M", "--prealloc", prealloc, "--dir"])
            .arg(&volume));
        ran.failed_saying(&["region-0", "space"]);
        for name in ["region-0", "region-1", "region-2", "volume.toml"] {
            assert!(!volume.join(name).exists(), "{name} is left over");
        }
    }
    // The second or third region may be the one that doesn't fit.
    let volume = disk.path().join("w");
    let ran = run(Command::new(program("newel"))
        .args(["up", "--size", "3M", "--prealloc", "full", "--dir"])
        .arg(&volume));
    ran.failed_saying(&["region-", "space"]);
    assert!(!volume.join("region-0").exists());
}

#[test]
fn an_unknown_config_key() {
    let dir = temp_dir();
    let region = region_in(dir.path(), "16M");
    let config = dir.path().join("config.toml");
    std::fs::write(&config, "log = \"info\"\nregoin = \"/nowhere\"\n").unwrap();
    let config = config.to_str().unwrap();
    let parts = [config, "regoin"];
    downstairs(&["run", "--region", &region, "--listen", "127.0.0.1:0", "--config", config])
        .failed_saying(&parts);
    upstairs(&["run", "--config", config]).failed_saying(&parts);
    upstairs(&["run", "--config", "/nowhere/at.toml"]).failed_saying(&["/nowhere/at.toml"]);
}

#[test]
fn a_size_that_is_no_multiple_of_a_block() {
    let dir = temp_dir();
    let region = dir.path().join("region");
    let ran = downstairs(&["create", "--region", region.to_str().unwrap(), "--size", "1000001"]);
    assert!(matches!(ran.status.code(), Some(1 | 2)), "{ran}");
    assert!(ran.stderr.contains("1000001") && ran.stderr.contains("4"), "{ran}");
    assert!(!region.exists());
}

#[test]
fn creation_over_an_existing_region() {
    let dir = temp_dir();
    let region = region_in(dir.path(), "16M");
    let before = std::fs::read(&region).unwrap();
    downstairs(&["create", "--region", &region, "--size", "16M"]).failed_saying(&[&region, "--force"]);
    assert!(std::fs::read(&region).unwrap() == before, "the region was touched");
    // Nor over somebody's file.
    let file = dir.path().join("letter");
    std::fs::write(&file, "dear").unwrap();
    let path = file.to_str().unwrap();
    downstairs(&["create", "--region", path, "--size", "16M"]).failed_saying(&[path]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "dear");
    downstairs(&["create", "--region", &region, "--size", "32M", "--force"]).ok();
}

/// The address of a replica, from the status page.
fn replica_address(volume: &Volume, replica: usize) -> Address {
    Address::Tcp(volume.status().replicas[replica].address.parse::<SocketAddr>().unwrap())
}

/// Sends `bytes` and reads until the peer closes, which it must do by itself.
fn send_garbage(address: &Address, bytes: &[u8]) {
    let mut stream = Stream::connect(address).unwrap();
    // It may have had enough before everything is sent.
    stream.write_all(bytes).ok();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok();
}

#[test]
fn garbage_on_both_ports() {
    let mut volume = Volume::start(Setup { tcp: true, ..tiny() });
    volume.await_all_active();
    let targets = [volume.tcp(), volume.unix(), replica_address(&volume, 0), replica_address(&volume, 2)];
    let mut random = Random::new(0x6a5b);
    let noise: Vec<u8> = (0..65_536).map(|_| u8::try_from(random.below(256)).unwrap()).collect();
    let mut client = Client::connect(&volume.unix()).unwrap();
    let data = bytes_at(0, 65_536, 5);
    client.write(0, &data);
    for target in &targets {
        for garbage in [&noise[..], b"GET / HTTP/1.1\r\nHost: newel\r\n\r\n", &[0xff; 4096], &[0; 4096]] {
            send_garbage(target, garbage);
            assert_eq!(client.read(0, 65_536), data);
        }
    }
    // Nor does it disturb the session in force.
    let status = volume.await_all_active();
    assert!(status.replicas.iter().all(|replica| replica.reconnects <= 1), "{status:#?}");
    volume.stop_and_check();
}

/// Raises the limit of open files as far as it goes; false if that isn't enough for `wanted`.
fn may_open(wanted: u64) -> bool {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).ok();
    getrlimit(Resource::Nofile).current.is_none_or(|current| current >= wanted)
}

#[test]
fn a_thousand_silent_connections() {
    let test = "a_thousand_silent_connections";
    if !may_open(4096) {
        newel_tests::skip::skipped(test, "may not open 4096 files");
        return;
    }
    if !have(test, &["nbdinfo"]) {
        return;
    }
    let _heavy = Heavy::take();
    let mut volume = Volume::start(Setup { tcp: true, ..tiny() });
    volume.await_all_active();
    let mut client = Client::connect(&volume.unix()).unwrap();
    let data = bytes_at(0, 65_536, 6);
    client.write(0, &data);
    let silent =
        |address: &Address| -> Vec<Stream> { (0..1000).map(|_| Stream::connect(address).unwrap()).collect() };

    let at_nbd = silent(&volume.tcp());
    assert_eq!(client.read(0, 65_536), data);
    let mut newcomer = Client::connect(&volume.tcp()).unwrap();
    assert_eq!(newcomer.read(0, 65_536), data);
    sh("nbdinfo", &[&volume.uri()]).ok();
    drop(at_nbd);

    let at_replica = silent(&replica_address(&volume, 1));
    client.write(0, &data);
    // The upstairs has to find its way past them.
    volume.kill_and_await_restart("upstairs");
    volume.await_all_active();
    drop(at_replica);
    let mut client = wait::until("NBD is served", std::time::Duration::from_secs(30), || {
        Client::connect(&volume.unix()).ok()
    });
    assert_eq!(client.read(0, 65_536), data);
    volume.stop_and_check();
}

#[test]
fn a_replica_that_is_something_else() {
    // A program that takes connections and says nothing of ours.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = std::thread::spawn(move || {
        for stream in listener.incoming().take(3) {
            let mut stream = stream.unwrap();
            stream.write_all(b"220 mail.example ESMTP\r\n").ok();
        }
    });
    let dir = temp_dir();
    let listen = format!("unix:{}/nbd.sock", dir.path().display());
    let mut command = Command::new(program("newel-upstairs"));
    command.args(["run", "--volume", "x", "--listen", &listen]);
    for _ in 0..3 {
        command.args(["--replica", &address]);
    }
    // Whether it refuses three equal addresses or meets the stranger: it must say so, and not die of it.
    let mut running = Running::start(&mut command);
    wait::until("it complains", std::time::Duration::from_secs(20), || {
        let said = running.stderr() + &running.stdout();
        (said.contains(&address) && (!running.running() || said.to_lowercase().contains("warn")))
            .then_some(())
    });
    assert!(!running.stderr().contains("panicked"), "{}", running.stderr());
    drop(running);
    // Let the server see its remaining visitors.
    for _ in 0..3 {
        std::net::TcpStream::connect(&address).ok();
    }
    server.join().unwrap();
}
