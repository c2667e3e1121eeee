//! The replica wire from a test: one replica alone, under a load of writes, and pinged without a pause.
//!
//! Invariants:
//! - A wrong answer or a broken connection ends the test.

#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use newel_protocol::crc::block_crcs;
use newel_protocol::lag::Health;
use newel_protocol::wire::{Decoder, Hello, Op, ReadMode, Reply, Request, VERSION, encode};
use newel_protocol::{BlockRange, BlockState, Generation, JobId};
use uuid::Uuid;

use crate::pattern::{Random, bytes_at};

/// Longer than any answer takes, so that a hang is a failure.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two pings: enough of them to meet every stall, and little work.
const PING_EVERY: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub struct Peer {
    stream: TcpStream,
    buffer: BytesMut,
    decoder: Decoder,
}

impl Peer {
    /// A connection that has introduced itself.
    pub fn greet(address: &str, volume: Uuid) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut peer = Self { stream, buffer: BytesMut::new(), decoder: Decoder::default() };
        let (min_version, max_version) = (VERSION, VERSION);
        let upstairs = Uuid::from_u128(0x57a1);
        let hello = Hello { min_version, max_version, volume, upstairs, session: 1, takeover: false };
        peer.send(&Request::Hello(hello), Bytes::new())?;
        let reply = peer.receive()?;
        if matches!(reply, Reply::Welcome(_)) { Ok(peer) } else { Err(unexpected(&reply)) }
    }

    /// Takes the region into use.
    pub fn promote(&mut self, generation: u32) -> io::Result<()> {
        self.send(&Request::Promote { generation: Generation(generation) }, Bytes::new())?;
        let reply = self.receive()?;
        if matches!(reply, Reply::Promoted { .. }) { Ok(()) } else { Err(unexpected(&reply)) }
    }

    pub fn ping(&mut self, nonce: u64) -> io::Result<Health> {
        self.send(&Request::Ping { nonce }, Bytes::new())?;
        let reply = self.receive()?;
        let Reply::Pong { nonce: back, health } = reply else { return Err(unexpected(&reply)) };
        if back == nonce { Ok(health) } else { Err(io::Error::other("a pong of another ping")) }
    }

    pub fn send(&mut self, request: &Request, payload: Bytes) -> io::Result<()> {
        let frame = encode(request, payload).map_err(io::Error::other)?;
        self.stream.write_all(&frame.head)?;
        self.stream.write_all(&frame.payload)
    }

    pub fn receive(&mut self) -> io::Result<Reply> {
        self.receive_all().map(|(reply, _)| reply)
    }

    /// The states of a range and the data of those blocks that have any, verified or not.
    pub fn read_raw(&mut self, job: u64, range: BlockRange) -> io::Result<(Vec<BlockState>, Bytes)> {
        let op = Op::Read { range, mode: ReadMode::Raw };
        self.send(&Request::Job { job: JobId(job), op }, Bytes::new())?;
        match self.receive_all()? {
            (Reply::Done { job: done, result: Ok(()), states, .. }, data) if done.0 == job => {
                Ok((states, data))
            }
            (reply, _) => Err(unexpected(&reply)),
        }
    }

    fn receive_all(&mut self) -> io::Result<(Reply, Bytes)> {
        loop {
            let next = self.decoder.decode(&mut self.buffer).map_err(io::Error::other)?;
            if let Some(received) = next {
                return Ok(received);
            }
            let mut bytes = [0; 65_536];
            let count = self.stream.read(&mut bytes)?;
            if count == 0 {
                return Err(io::Error::other("the replica closed the connection"));
            }
            self.buffer.extend_from_slice(bytes.get(..count).unwrap_or_default());
        }
    }
}

fn unexpected(reply: &Reply) -> io::Error {
    io::Error::other(format!("not what was asked for: {reply:?}"))
}

/// Something that goes on beside the test.
#[derive(Debug)]
pub struct Beside<T> {
    thread: JoinHandle<io::Result<T>>,
    enough: Arc<AtomicBool>,
}

impl<T: Send + 'static> Beside<T> {
    fn start(work: impl FnOnce(&AtomicBool) -> io::Result<T> + Send + 'static) -> Self {
        let enough = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&enough);
        Self { thread: std::thread::spawn(move || work(&end)), enough }
    }

    #[track_caller]
    pub fn finish(self) -> T {
        self.enough.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(result) => result.expect("the replica answers as it should"),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// How long every ping took.
pub fn ping_always(mut peer: Peer) -> Beside<Vec<Duration>> {
    Beside::start(move |enough| {
        let mut took = Vec::new();
        for nonce in 0.. {
            if enough.load(Ordering::Relaxed) {
                break;
            }
            let sent = Instant::now();
            peer.ping(nonce)?;
            took.push(sent.elapsed());
            std::thread::sleep(PING_EVERY);
        }
        Ok(took)
    })
}

/// How late a thread that does nothing else woke up every time: what the machine itself does to whoever waits.
pub fn wake_always() -> Beside<Vec<Duration>> {
    Beside::start(move |enough| {
        let mut late = Vec::new();
        while !enough.load(Ordering::Relaxed) {
            let slept = Instant::now();
            std::thread::sleep(PING_EVERY);
            late.push(slept.elapsed().saturating_sub(PING_EVERY));
        }
        Ok(late)
    })
}

/// Writes random blocks below `blocks` at this depth; how many were written.
pub fn write_always(mut peer: Peer, depth: usize, blocks: u64) -> Beside<u64> {
    Beside::start(move |enough| {
        let data = Bytes::from(bytes_at(0, 4096, 1));
        let crcs = block_crcs(&data);
        let mut random = Random::new(0x57a2);
        let (mut next, mut open) = (1, BTreeSet::new());
        loop {
            while open.len() < depth && !enough.load(Ordering::Relaxed) {
                let range = BlockRange::new(random.below(blocks), 1);
                let op = Op::Write { range, crcs: crcs.clone() };
                peer.send(&Request::Job { job: JobId(next), op }, data.clone())?;
                open.insert(next);
                next += 1;
            }
            if open.is_empty() {
                return Ok(next - 1);
            }
            let reply = peer.receive()?;
            let written = matches!(&reply, Reply::Done { job, result: Ok(()), .. } if open.remove(&job.0));
            if !written {
                return Err(unexpected(&reply));
            }
        }
    })
}
