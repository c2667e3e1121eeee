//! The front end over real sockets, with a volume in memory.
//!
//! Every test goes through [`check`], which also sees to it that a server ends cleanly: nothing attached, no socket file.

mod client;
mod limits;
mod pki;
mod reconnect;
mod tls;
mod tls_tools;
mod tools;
mod volume;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use newel_protocol::nbd::Errno;
use newel_protocol::nbd::consts::{answer, chunk, command, flag, option};
use tokio_util::sync::CancellationToken;

use self::client::{Ask, Client, FULL, PLAIN, named};
use self::volume::Memory;
use super::{ListenAddr, Listeners, NbdOptions, serve};
use crate::core::api::GuestError;

/// No test waits longer for anything.
const PATIENCE: Duration = Duration::from_secs(60);
const SIZE: u64 = 8 << 30;

/// A server under test.
#[derive(Clone)]
struct Server {
    path: PathBuf,
    tcp: SocketAddr,
    volume: Rc<Memory>,
    shutdown: CancellationToken,
}

impl Server {
    async fn connect(&self, ask: Ask) -> Client {
        Client::unix(&self.path).await.go(ask).await
    }

    /// Lets the server run until `condition` holds.
    async fn until(&self, condition: impl Fn(&Memory) -> bool) {
        while !condition(&self.volume) {
            tokio::task::yield_now().await;
        }
    }
}

/// Runs `test` against a server with these options on a volume of `SIZE` bytes.
fn check_with(tune: impl FnOnce(&mut NbdOptions), test: impl AsyncFnOnce(Server)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd.sock");
    let addrs = [ListenAddr::Unix(path.clone()), "tcp:127.0.0.1:0".parse().unwrap()];
    let mut options = NbdOptions::new("vol");
    tune(&mut options);
    let all = tokio::task::LocalSet::new();
    all.block_on(&runtime, async {
        let listeners = Listeners::bind(&addrs, false).unwrap();
        let ListenAddr::Tcp(tcp) = listeners.addrs()[1] else { panic!("the second is TCP") };
        let (volume, shutdown) = (Memory::new(SIZE), CancellationToken::new());
        let served = tokio::task::spawn_local(serve(listeners, volume.clone(), options, shutdown.clone()));
        let server = Server { path: path.clone(), tcp, volume: volume.clone(), shutdown: shutdown.clone() };
        tokio::time::timeout(PATIENCE, test(server)).await.expect("the test takes too long");
        shutdown.cancel();
        volume.release();
        let served = tokio::time::timeout(PATIENCE, served).await.expect("the server doesn't end");
        served.unwrap();
        assert_eq!(volume.attached(), 0, "connections still attached");
    });
    assert!(!path.exists(), "the socket file is left");
}

fn check(test: impl AsyncFnOnce(Server)) {
    check_with(|_| {}, test);
}

#[test]
fn long_names_are_refused_and_the_server_lives() {
    check(async |server| {
        for length in [3000, 5000] {
            let mut client = Client::unix(&server.path).await;
            client.flags(3).await;
            let code = client.ask(option::GO, &named(&vec![b'x'; length])).await;
            assert_eq!(code, if length == 3000 { answer::ERR_UNKNOWN } else { answer::ERR_TOO_BIG });
            assert_eq!(client.ask(option::GO, &named(b"vol")).await, answer::ACK);

            let mut client = Client::unix(&server.path).await;
            client.flags(3).await;
            client.option(option::EXPORT_NAME, &vec![b'x'; length]).await;
            assert_eq!(client.take_rest().await, b"");
        }
        server.connect(PLAIN).await.write(0, b"alive").await;
    });
}

#[test]
fn options_in_odd_order() {
    check(async |server| {
        let mut client = Client::tcp(server.tcp).await;
        client.flags(3).await;
        assert_eq!(client.ask(option::INFO, &named(b"")).await, answer::ACK);
        assert_eq!(client.ask(option::LIST, b"").await, answer::ACK);
        assert_eq!(client.ask(option::LIST, b"data").await, answer::ERR_INVALID);
        assert_eq!(client.ask(option::INFO, &named(b"nobody")).await, answer::ERR_UNKNOWN);
        assert_eq!(client.ask(99, &[9; 65_536]).await, answer::ERR_UNSUP);
        assert_eq!(client.ask(option::LIST, b"").await, answer::ACK);
        assert_eq!(client.ask(option::STARTTLS, b"").await, answer::ERR_UNSUP);
        assert_eq!(client.ask(option::GO, &named(b"vol")).await, answer::ACK);
        client.write(5, b"there").await;
        assert_eq!(client.read(4, 7).await, b"\0there\0");
    });
}

#[test]
fn export_name_with_requests_right_behind_it() {
    check(async |server| {
        let mut client = Client::unix(&server.path).await;
        client.flags(1).await;
        client.option(option::EXPORT_NAME, b"vol").await;
        client.request(command::FLUSH, 0, 0, 0, b"").await;
        let head = client.take(8 + 2 + 124).await;
        assert_eq!((&head[..8], &head[10..]), (&SIZE.to_be_bytes()[..], &[0; 124][..]));
        assert_eq!(client.reply(0).await.error, 0);
    });
}

#[test]
fn abort_then_close_without_reading() {
    check(async |server| {
        let mut client = Client::tcp(server.tcp).await;
        client.flags(3).await;
        client.option(option::ABORT, b"").await;
        drop(client);
        let mut client = Client::unix(&server.path).await;
        client.flags(3).await;
        assert_eq!(client.ask(option::ABORT, b"").await, answer::ACK);
        assert_eq!(client.take_rest().await, b"");
    });
}

const EINVAL: u32 = Errno::Invalid as u32;
const ENOSPC: u32 = Errno::NoSpace as u32;

#[test]
fn requests_at_the_edges() {
    check(async |server| {
        let mut client = server.connect(FULL).await;
        let kinds = [
            command::READ,
            command::WRITE,
            command::TRIM,
            command::WRITE_ZEROES,
            command::BLOCK_STATUS,
            command::CACHE,
        ];
        for kind in kinds {
            let outside =
                if matches!(kind, command::WRITE | command::WRITE_ZEROES) { ENOSPC } else { EINVAL };
            let data = if kind == command::WRITE { &[0; 512][..] } else { b"" };
            assert_eq!(client.call(kind, 0, 0, 0, b"").await, EINVAL, "{kind}: empty");
            assert_eq!(client.call(kind, 0, SIZE - 512, 512, data).await, 0, "{kind}: the last bytes");
            for offset in [SIZE - 511, SIZE, u64::MAX - 511, u64::MAX - 100] {
                assert_eq!(client.call(kind, 0, offset, 512, data).await, outside, "{kind} at {offset}");
            }
        }
        assert_eq!(server.volume.held(), 0);
    });
}

#[test]
fn unknown_commands_and_flags_keep_the_connection() {
    check(async |server| {
        let mut client = server.connect(FULL).await;
        client.write(0, b"before").await;
        assert_eq!(client.call(77, 0, 0, 512, b"").await, EINVAL);
        assert_eq!(client.call(command::READ, 0x8000, 0, 512, b"").await, EINVAL);
        assert_eq!(client.call(command::WRITE, 0x8000, 0, 512, &[1; 512]).await, EINVAL);
        assert_eq!(client.call(command::WRITE_ZEROES, 1 << 4, 0, 512, b"").await, EINVAL, "FAST_ZERO");
        assert_eq!(client.read(0, 6).await, b"before");
        for kind in [command::READ, command::FLUSH, command::TRIM, command::CACHE, command::BLOCK_STATUS] {
            assert_eq!(client.call(kind, flag::FUA, 0, 512, b"").await, 0, "FUA on {kind}");
        }
        let mut plain = server.connect(PLAIN).await;
        assert_eq!(plain.call(command::READ, flag::DF, 0, 512, b"").await, EINVAL);
        assert_eq!(plain.call(command::BLOCK_STATUS, 0, 0, 512, b"").await, EINVAL);
    });
}

#[test]
fn trims_of_all_lengths_leave_their_neighbours() {
    check(async |server| {
        let mut client = server.connect(FULL).await;
        for (offset, length) in [
            (8192 + 512_u64, 4096_u32),
            (1 << 20, 1 << 20),
            (1 << 30, 3 << 30),
            ((1 << 30) + 512, u32::MAX - 511),
        ] {
            let (start, end) = (offset, offset + u64::from(length));
            client.write(start - 512, &[1; 1024]).await;
            client.write(end - 512, &[2; 1024]).await;
            assert_eq!(client.call(command::TRIM, 0, start, length, b"").await, 0);
            assert_eq!(client.read(start - 512, 512).await, [1; 512], "before {offset}+{length}");
            assert_eq!(client.read(end, 512).await, [2; 512], "behind {offset}+{length}");
        }
    });
}

#[test]
fn zeroes_without_holes_are_reported_as_data() {
    check(async |server| {
        let mut client = server.connect(FULL).await;
        client.write(0, &[7; 3 * 4096]).await;
        assert_eq!(client.call(command::WRITE_ZEROES, flag::NO_HOLE, 4096, 8192, b"").await, 0);
        assert_eq!(client.read(4096, 8192).await, [0; 8192]);
        assert_eq!(client.status(0, 0, 16384).await, [(12288, 0), (4096, 3)]);
        assert_eq!(client.call(command::WRITE_ZEROES, 0, 4096, 8192, b"").await, 0);
        assert_eq!(client.status(0, 0, 16384).await, [(4096, 0), (12288, 3)]);
        assert_eq!(client.status(flag::REQ_ONE, 4096, 16384).await, [(16384, 3)]);
        assert_eq!(client.status(flag::REQ_ONE, 100, 16384).await, [(3996, 0)]);
    });
}

#[test]
fn structured_reads_show_holes_and_df_does_not() {
    check(async |server| {
        let mut client = server.connect(FULL).await;
        client.write(4096, &[7; 4096]).await;
        let expected = [&[0; 4096][..], &[7; 4096], &[0; 4096]].concat();
        for (flags, chunks) in [
            (0, &[chunk::OFFSET_HOLE, chunk::OFFSET_DATA, chunk::OFFSET_HOLE][..]),
            (flag::DF, &[chunk::OFFSET_DATA]),
        ] {
            client.request(command::READ, flags, 0, 12288, b"").await;
            let reply = client.reply(0).await;
            assert_eq!((&reply.chunks[..], &reply.data), (chunks, &expected));
        }
        assert_eq!(server.connect(PLAIN).await.read(0, 12288).await, expected);
    });
}

#[test]
fn payloads_over_the_limit_keep_step() {
    const LENGTH: u32 = 33 << 20;
    check(async |server| {
        for ask in [PLAIN, FULL] {
            let mut client = server.connect(ask).await;
            assert_eq!(client.call(command::READ, 0, 0, LENGTH, b"").await, EINVAL);
            assert_eq!(client.call(command::WRITE, 0, 0, LENGTH, &vec![3; LENGTH as usize]).await, EINVAL);
            assert_eq!(client.read(0, 8).await, [0; 8]);
            let full: Vec<u8> = (0..32_u32 << 20).map(|i| (i % 251).to_be_bytes()[3]).collect();
            client.write(1 << 20, &full).await;
            assert!(client.read(1 << 20, 32 << 20).await == full);
            assert_eq!(client.call(command::WRITE_ZEROES, 0, 0, 64 << 20, b"").await, 0);
        }
    });
}

#[test]
fn small_writes_change_exactly_their_bytes() {
    check(async |server| {
        let mut first = server.connect(PLAIN).await;
        first.write(0, &[9; 8192]).await;
        first.write(4095, b"abc").await;
        assert_eq!(first.read(4094, 5).await, b"\x09abc\x09");
        let mut clients = vec![first];
        for _ in 0..3 {
            clients.push(server.connect(FULL).await);
        }
        for sector in 0..8_u8 {
            let client = &mut clients[usize::from(sector % 4)];
            let data = [sector; 512];
            client.request(command::WRITE, 0, 8192 + 512 * u64::from(sector), 512, &data).await;
        }
        for sector in 0..8 {
            assert_eq!(clients[sector % 4].reply(0).await.error, 0);
        }
        let expected: Vec<u8> = (0..8_u8).flat_map(|sector| [sector; 512]).collect();
        assert_eq!(clients[1].read(8192, 4096).await, expected);
    });
}

#[test]
fn disconnect_with_requests_in_flight_finishes_them() {
    check(async |server| {
        let mut client = server.connect(PLAIN).await;
        server.volume.hold.set(true);
        for i in 0..100_u64 {
            client.request(command::WRITE, 0, i * 4096, 4096, &[1; 4096]).await;
        }
        client.request(command::DISC, 0, 0, 0, b"").await;
        // Behind a disconnect nothing is heard.
        client.request(command::FLUSH, 0, 0, 0, b"").await;
        server.until(|volume| volume.held() == 100).await;
        server.volume.release();
        let mut cookies = Vec::new();
        for _ in 0..100 {
            let reply = client.reply(0).await;
            assert_eq!(reply.error, 0);
            cookies.push(reply.cookie);
        }
        cookies.sort_unstable();
        assert!(cookies.into_iter().eq(1..=100));
        assert_eq!(client.take_rest().await, b"");
    });
}

#[test]
fn errors_reach_the_guest_and_the_connection_lives() {
    check(async |server| {
        for ask in [PLAIN, FULL] {
            let mut client = server.connect(ask).await;
            // What a guest without structured replies hears of ShuttingDown: see the test of the way down.
            let errors = [(GuestError::Io, 5), (GuestError::QuorumLost, 5), (GuestError::ShuttingDown, 108)];
            for (error, code) in errors.into_iter().take(if ask.structured { 3 } else { 2 }) {
                server.volume.fail.set(Some(error));
                for kind in [command::READ, command::WRITE, command::FLUSH, command::TRIM] {
                    let data = if kind == command::WRITE { &[0; 512][..] } else { b"" };
                    client.request(kind, 0, 0, 512, data).await;
                    let reply = client.reply(512).await;
                    assert_eq!(reply.error, code);
                    assert_eq!(reply.chunks.is_empty(), !(ask.structured && kind == command::READ));
                }
            }
            server.volume.fail.set(None);
            assert_eq!(client.read(0, 4).await, [0; 4]);
        }
    });
}

#[test]
fn a_guest_that_loses_count_is_dropped_after_its_replies() {
    check(async |server| {
        let mut client = server.connect(PLAIN).await;
        server.volume.hold.set(true);
        client.request(command::FLUSH, 0, 0, 0, b"").await;
        client.send(&[0xee; 28]).await;
        server.until(|volume| volume.held() == 1).await;
        server.volume.release();
        assert_eq!(client.reply(0).await.error, 0);
        assert_eq!(client.take_rest().await, b"");
    });
}
