//! The real binary: exit codes, messages, signals, and a write that outlives the process.
#![cfg(feature = "daemon")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use newel_protocol::crc::block_crcs;
use newel_protocol::wire::{Decoder, Hello, Op, ReadMode, Refusal, Reply, Request, VERSION, encode};
use newel_protocol::{BLOCK_BYTES, BlockRange, Generation, JobId};
use uuid::Uuid;

/// Longer than anything here takes, so that a hang is a failure.
const PATIENCE: Duration = Duration::from_secs(60);

fn newel() -> Command {
    Command::new(env!("CARGO_BIN_EXE_newel-downstairs"))
}

/// A directory on the file system of the build, where O_DIRECT works.
fn workplace() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn create(dir: &Path) -> PathBuf {
    let region = dir.join("region.img");
    let output = newel().args(["create", "--size", "16M", "--region"]).arg(&region).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    region
}

struct Replica {
    child: Child,
    address: String,
    log: BufReader<ChildStderr>,
}

impl Replica {
    fn start(region: &Path) -> Self {
        let mut child = newel()
            .args(["run", "--listen", "127.0.0.1:0", "--region"])
            .arg(region)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("serves on ") {
            line.clear();
            assert_ne!(log.read_line(&mut line).unwrap(), 0, "it ended: {:?}", child.wait());
        }
        assert!(line.contains(&format!("newel-downstairs: region {} serves on", region.display())), "{line}");
        let address = line.rsplit(' ').next().unwrap().trim().to_owned();
        Self { child, address, log }
    }

    /// Ends it with a signal; its exit code and the rest of its log.
    fn end(mut self, signal: &str) -> (Option<i32>, String) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap().code(), rest)
    }
}

struct Client {
    stream: TcpStream,
    buffer: BytesMut,
    decoder: Decoder,
}

impl Client {
    fn hello(replica: &Replica, upstairs: u128) -> Self {
        let stream = TcpStream::connect(&replica.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut client = Self { stream, buffer: BytesMut::new(), decoder: Decoder::default() };
        let hello = Hello {
            min_version: VERSION,
            max_version: VERSION,
            volume: Uuid::from_u128(7),
            upstairs: Uuid::from_u128(upstairs),
            session: 1,
            takeover: false,
        };
        client.send(&Request::Hello(hello), Bytes::new());
        assert!(matches!(client.reply(), (Reply::Welcome(_), _)));
        client
    }

    fn promoted(replica: &Replica, upstairs: u128, generation: u32) -> Self {
        let mut client = Self::hello(replica, upstairs);
        client.send(&Request::Promote { generation: Generation(generation) }, Bytes::new());
        assert!(matches!(client.reply(), (Reply::Promoted { .. }, _)));
        client
    }

    fn send(&mut self, request: &Request, payload: Bytes) {
        let frame = encode(request, payload).unwrap();
        self.stream.write_all(&frame.head).unwrap();
        self.stream.write_all(&frame.payload).unwrap();
    }

    fn reply(&mut self) -> (Reply, Bytes) {
        loop {
            if let Some(reply) = self.decoder.decode(&mut self.buffer).unwrap() {
                return reply;
            }
            let mut bytes = [0; 65_536];
            let count = self.stream.read(&mut bytes).unwrap();
            assert_ne!(count, 0, "the replica closed the connection");
            self.buffer.extend_from_slice(&bytes[..count]);
        }
    }

    fn job(&mut self, job: u64, op: Op, payload: Bytes) -> Bytes {
        self.send(&Request::Job { job: JobId(job), op }, payload);
        match self.reply() {
            (Reply::Done { job: answered, result: Ok(()), .. }, data) if answered == JobId(job) => data,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_was_written_is_there_after_a_restart_and_after_a_crash() {
    let dir = workplace();
    let region = create(dir.path());
    let range = BlockRange::new(1024, 300);
    let data: Bytes = (0..range.bytes()).map(|i| u8::try_from((i / 5) % 253).unwrap()).collect();
    for (signal, code) in [("-TERM", Some(0)), ("-KILL", None), ("-INT", Some(0))] {
        let replica = Replica::start(&region);
        let generation = match signal {
            "-TERM" => 1,
            "-KILL" => 2,
            _ => 3,
        };
        let mut client = Client::promoted(&replica, generation.into(), generation);
        if generation > 1 {
            let read = Op::Read { range, mode: ReadMode::Data };
            assert_eq!(client.job(1, read, Bytes::new()), data, "before {signal}");
        }
        let write = Op::Write { range, crcs: block_crcs(&data) };
        client.job(2, write, data.clone());
        client.job(3, Op::Flush, Bytes::new());
        assert_eq!(replica.end(signal).0, code);
    }
    let check = newel().args(["check", "--region"]).arg(&region).output().unwrap();
    assert!(check.status.success(), "{check:?}");
}

#[test]
fn a_second_upstairs_is_refused_and_garbage_disturbs_nobody() {
    let dir = workplace();
    let replica = Replica::start(&create(dir.path()));
    let mut first = Client::promoted(&replica, 1, 1);
    let mut second = Client::hello(&replica, 2);
    second.send(&Request::Promote { generation: Generation(2) }, Bytes::new());
    assert!(matches!(second.reply(), (Reply::Refused(Refusal::InUse { .. }), _)));
    let mut stranger = TcpStream::connect(&replica.address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: newel\r\n\r\n").unwrap();
    let mut nothing = Vec::new();
    stranger.read_to_end(&mut nothing).unwrap();
    let range = BlockRange::single(0);
    let zeros = Bytes::from(vec![0; BLOCK_BYTES]);
    first.job(1, Op::Write { range, crcs: block_crcs(&zeros) }, zeros);
    let (code, log) = replica.end("-TERM");
    assert_eq!(code, Some(0));
    let lines = log.lines().filter(|line| line.contains("not the replica wire")).count();
    assert_eq!(lines, 1, "{log}");
}

#[test]
fn what_cannot_be_run_says_why() {
    let dir = workplace();
    let region = create(dir.path());
    let check = |args: &[&str], code: i32, says: &str| {
        let output = newel().arg("run").args(args).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {told}");
        assert!(told.contains(says), "{args:?}: {told}");
        assert!(!told.contains("panicked") && !told.contains("backtrace"), "{told}");
    };
    let region = region.to_str().unwrap();
    check(&[], 2, "--region is missing");
    check(&["--region", region], 2, "--listen is missing");
    check(&["--region", region, "--listen", "0.0.0.0:0"], 2, "--allow-plaintext");
    check(&["--region", region, "--listen", "nowhere"], 2, "\"nowhere\"");
    check(&["--region", region, "--listen", "127.0.0.1:0", "--log", "loud"], 2, "--log \"loud\"");
    check(&["--config", "/nonexistent.toml"], 2, "/nonexistent.toml");
    check(&["--region", "/nonexistent.img", "--listen", "127.0.0.1:0"], 1, "/nonexistent.img");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    check(&["--region", region, "--listen", &address], 1, &format!("cannot listen on {address}"));
}

#[test]
fn a_terminal_sees_how_far_creation_is() {
    let dir = workplace();
    let region = dir.path().join("region.img");
    let args = ["create", "--size", "64M", "--prealloc", "full", "--region"];
    let plain = newel().args(args).arg(&region).output().unwrap();
    assert!(plain.status.success() && plain.stderr.is_empty(), "{plain:?}");
    assert!(String::from_utf8_lossy(&plain.stdout).contains("of 67108864 bytes"));
    let command =
        format!("{} {} {} --force", env!("CARGO_BIN_EXE_newel-downstairs"), args.join(" "), region.display());
    // `script` gives it a terminal of a width.
    let on_terminal = Command::new("script")
        .args(["-qec", &format!("stty cols 100; {command}"), "/dev/null"])
        .stdin(Stdio::null())
        .output();
    let output = match on_terminal {
        Ok(output) => output,
        Err(error) => return println!("SKIPPED: no `script`: {error}"),
    };
    let seen = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(seen.contains("data") && seen.contains("/64.00 MiB"), "{seen:?}");
}
