//! The shell on real sockets over a disk in memory.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use newel_protocol::crc::block_crcs;
use newel_protocol::lag::{Activity, Delays, Stall};
use newel_protocol::wire::{
    Decoder, Hello, Membership, Op, ReadMode, Refusal, Reply, Request, VERSION, encode,
};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, BlockState, Generation, JobId, Version};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::LocalSet;
use uuid::Uuid;

use super::reactor::{Disk, DiskSignal, Reactor};
use super::{listener, until_stopped};
use crate::core::api::{DiskCommand, DiskDone, DiskOp, DiskOutcome, RegionFacts};
use crate::core::{Core, CoreConfig, State};

const BLOCKS: u64 = 4096;
const VOLUME: Uuid = Uuid::from_u128(7);

/// Blocks in memory. Completes at once, through the same signal as the pool.
struct Memory {
    blocks: RefCell<Vec<Option<Bytes>>>,
    done: Mutex<VecDeque<DiskDone>>,
    signal: Arc<DiskSignal>,
}

impl Memory {
    fn execute(&self, op: DiskOp) -> DiskOutcome {
        let mut blocks = self.blocks.borrow_mut();
        match op {
            DiskOp::Write { range, data, .. } => {
                for (block, data) in range.blocks().zip(data.chunks(BLOCK_BYTES)) {
                    blocks[usize::try_from(block).unwrap()] = Some(Bytes::copy_from_slice(data));
                }
                DiskOutcome::Done
            }
            DiskOp::Read { range, .. } => {
                let found = &blocks[usize::try_from(range.start).unwrap()..][..range.count as usize];
                let kind = |b: &Option<Bytes>| if b.is_some() { BlockKind::Data } else { BlockKind::Zero };
                let state = |b| BlockState { version: Version::NEVER, crc: 0, kind: kind(b) };
                let states = found.iter().map(state).collect();
                DiskOutcome::Read { states, data: found.iter().flatten().flatten().copied().collect() }
            }
            DiskOp::Digests { count, .. } => DiskOutcome::Digests(vec![0; count as usize]),
            DiskOp::Contexts { .. } => DiskOutcome::Contexts(Vec::new()),
            DiskOp::Zero { .. }
            | DiskOp::Store { .. }
            | DiskOp::Flush { .. }
            | DiskOp::ActivityLog { .. }
            | DiskOp::Header(_)
            | DiskOp::Close => DiskOutcome::Done,
        }
    }
}

impl Disk for Memory {
    fn submit(&self, commands: &mut Vec<DiskCommand>) {
        let mut done = self.done.lock().unwrap();
        for DiskCommand { op, kind, .. } in commands.drain(..) {
            done.push_back(DiskDone { op, result: Ok(self.execute(kind)), times: Default::default() });
        }
        drop(done);
        self.signal.raise();
    }

    fn completed(&self, into: &mut Vec<DiskDone>) {
        into.extend(self.done.lock().unwrap().drain(..));
    }

    fn completion_fd(&self) -> Option<std::os::fd::OwnedFd> {
        None
    }

    fn submits(&self) -> (Delays, Stall) {
        Default::default()
    }

    fn stop(self: Box<Self>) {}
}

struct Client {
    stream: TcpStream,
    buffer: BytesMut,
    decoder: Decoder,
}

impl Client {
    async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        Self { stream, buffer: BytesMut::new(), decoder: Decoder::default() }
    }

    async fn send(&mut self, request: Request, payload: Bytes) {
        let frame = encode(&request, payload).unwrap();
        self.stream.write_all(&frame.head).await.unwrap();
        self.stream.write_all(&frame.payload).await.unwrap();
    }

    /// `None` at the end of the stream.
    async fn reply(&mut self) -> Option<(Reply, Bytes)> {
        loop {
            if let Some(reply) = self.decoder.decode(&mut self.buffer).unwrap() {
                return Some(reply);
            }
            if self.stream.read_buf(&mut self.buffer).await.unwrap_or(0) == 0 {
                return None;
            }
        }
    }

    async fn promoted(address: SocketAddr, upstairs: u128, generation: u32) -> Self {
        let mut client = Self::connect(address).await;
        let hello = Hello {
            min_version: VERSION,
            max_version: VERSION,
            volume: VOLUME,
            upstairs: Uuid::from_u128(upstairs),
            session: 1,
            takeover: false,
        };
        client.send(Request::Hello(hello), Bytes::new()).await;
        assert!(matches!(client.reply().await, Some((Reply::Welcome(_), _))));
        client.send(Request::Promote { generation: Generation(generation) }, Bytes::new()).await;
        assert!(matches!(client.reply().await, Some((Reply::Promoted { .. }, _))));
        client
    }
}

/// Runs the shell and `test` beside it, for at most a minute.
fn check<F: Future<Output = ()>>(test: impl FnOnce(SocketAddr, Rc<Reactor>) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        let facts = RegionFacts {
            region: Uuid::from_u128(1),
            volume: VOLUME,
            blocks: BLOCKS,
            promised: Generation(0),
            promised_to: Uuid::nil(),
            last_active: Generation(0),
            membership: Membership::default(),
            lost_power: false,
            log_slots: 8,
            log_slots_per_record: 8,
            log_entries: Vec::new(),
        };
        let signal = Arc::new(DiskSignal::default());
        let disk = Memory {
            blocks: RefCell::new(vec![None; usize::try_from(BLOCKS).unwrap()]),
            done: Mutex::default(),
            signal: Arc::clone(&signal),
        };
        let reactor = Reactor::new(Core::new(CoreConfig::default(), facts), Box::new(disk), signal);
        let socket = listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(listener::BACKLOG).unwrap();
        let address = listener.local_addr().unwrap();
        let tasks = [
            tokio::task::spawn_local(listener::accept(Rc::clone(&reactor), listener)),
            tokio::task::spawn_local(Rc::clone(&reactor).run_disk()),
            tokio::task::spawn_local(Rc::clone(&reactor).run_timer()),
            tokio::task::spawn_local(Rc::clone(&reactor).run_meter()),
        ];
        let test = test(address, reactor);
        tokio::time::timeout(Duration::from_secs(60), test).await.expect("the test hangs");
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    });
}

#[test]
fn what_is_written_is_read_in_all_sizes() {
    check(|address, _| async move {
        let mut client = Client::promoted(address, 5, 1).await;
        for (job, blocks) in (1..).zip([1_u32, 3, 16, 257, 1024]) {
            let range = BlockRange::new(1024, blocks);
            let data: Bytes =
                (0..range.bytes()).map(|i| u8::try_from((i / 7 + blocks as usize) % 251).unwrap()).collect();
            let write = Op::Write { range, crcs: block_crcs(&data) };
            client.send(Request::Job { job: JobId(2 * job), op: write }, data.clone()).await;
            let read = Op::Read { range, mode: ReadMode::Data };
            client.send(Request::Job { job: JobId(2 * job + 1), op: read }, Bytes::new()).await;
            let Some((Reply::Done { result: Ok(()), .. }, _)) = client.reply().await else { panic!("write") };
            let Some((Reply::Done { result: Ok(()), .. }, got)) = client.reply().await else {
                panic!("read")
            };
            assert_eq!(got, data);
        }
    });
}

#[test]
fn a_reader_that_does_not_read_is_not_read_from_and_gets_all_in_the_end() {
    check(|address, _| async move {
        let mut client = Client::promoted(address, 5, 1).await;
        let data = Bytes::from(vec![9; 1024 * BLOCK_BYTES]);
        let write = Op::Write { range: BlockRange::new(0, 1024), crcs: block_crcs(&data) };
        client.send(Request::Job { job: JobId(1), op: write }, data.clone()).await;
        let mut jobs = 1;
        // 160 MiB of answers: more than the sockets and the outbox hold, less than the session may ask for.
        while jobs < 40 {
            jobs += 1;
            let read = Op::Read { range: BlockRange::new(0, 1024), mode: ReadMode::Data };
            client.send(Request::Job { job: JobId(jobs), op: read }, Bytes::new()).await;
        }
        for _ in 0..jobs {
            assert!(matches!(client.reply().await, Some((Reply::Done { result: Ok(()), .. }, _))));
        }
    });
}

#[test]
fn garbage_closes_only_its_own_connection() {
    check(|address, _| async move {
        let mut good = Client::promoted(address, 5, 1).await;
        let mut bad = Client::connect(address).await;
        bad.stream.write_all(b"GET / HTTP/1.1\r\nHost: newel\r\n\r\n").await.unwrap();
        assert!(bad.reply().await.is_none());
        good.send(Request::Ping { nonce: 3 }, Bytes::new()).await;
        assert!(matches!(good.reply().await, Some((Reply::Pong { nonce: 3, .. }, _))));
    });
}

#[test]
fn a_refusal_reaches_a_peer_that_is_still_sending() {
    check(|address, _| async move {
        let mut client = Client::promoted(address, 5, 1).await;
        let op = Op::Write { range: BlockRange::new(0, 2), crcs: vec![] };
        for job in 1..9 {
            let data = Bytes::from(vec![0; 2 * BLOCK_BYTES]);
            client.send(Request::Job { job: JobId(job), op: op.clone() }, data).await;
        }
        assert!(matches!(client.reply().await, Some((Reply::Refused(Refusal::Violation { .. }), _))));
        assert!(client.reply().await.is_none());
    });
}

#[test]
fn a_thousand_silent_connections_do_not_keep_an_upstairs_out() {
    check(|address, reactor| async move {
        let mut good = Client::promoted(address, 5, 1).await;
        let mut silent = Vec::new();
        for _ in 0..300 {
            silent.push(Client::connect(address).await);
        }
        drop(silent.drain(..10));
        let mut other = Client::promoted(address, 5, 2).await;
        other.send(Request::Ping { nonce: 1 }, Bytes::new()).await;
        assert!(matches!(other.reply().await, Some((Reply::Pong { nonce: 1, .. }, _))));
        assert!(matches!(good.reply().await, Some((Reply::Leaving { .. }, _))));
        assert!(matches!(reactor.finish(), State::Serving));
    });
}

#[test]
fn a_pong_tells_how_long_the_reactor_stalled_and_what_ran() {
    check(|address, reactor| async move {
        let mut client = Client::promoted(address, 5, 1).await;
        let batch = reactor.batch(Activity::Disk);
        std::thread::sleep(Duration::from_millis(120));
        batch.finish();
        // The tick that was held up and the first of these come at the same time.
        let health = loop {
            client.send(Request::Ping { nonce: 1 }, Bytes::new()).await;
            let Some((Reply::Pong { health, .. }, _)) = client.reply().await else { panic!("no pong") };
            if health.lag.max_us >= 100_000 {
                break health;
            }
        };
        let stall = health.longest_stall;
        assert!(stall.took_us >= 110_000 && stall.during == Activity::Disk, "{health:?}");
        assert!(health.lag.count >= 11, "{health:?}");
    });
}

#[test]
fn the_end_is_told_and_reached() {
    check(|address, reactor| async move {
        use tokio::signal::unix::{SignalKind, signal};
        let mut client = Client::promoted(address, 5, 1).await;
        let terminate = signal(SignalKind::user_defined1()).unwrap();
        let interrupt = signal(SignalKind::user_defined2()).unwrap();
        let stopping = async {
            reactor.event(crate::core::api::Event::Shutdown);
            until_stopped(&reactor, terminate, interrupt).await;
        };
        let ((), told) = tokio::join!(stopping, client.reply());
        assert!(matches!(told, Some((Reply::Leaving { .. }, _))));
        assert_eq!(reactor.finish(), State::Stopped);
    });
}
