//! Bounds: on connections, on requests, on time; and the way down.

use std::time::{Duration, Instant};

use newel_protocol::nbd::consts::{answer, command, option};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use super::client::{Client, FULL, PLAIN, named};
use super::{check, check_with};

#[test]
fn a_thousand_silent_connections_keep_nobody_out() {
    // Client and server share this process, and its descriptors.
    let mut files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    files.current = files.maximum;
    rustix::process::setrlimit(rustix::process::Resource::Nofile, files).unwrap();
    check_with(
        |options| options.handshake_limit = Duration::from_secs(2),
        async |server| {
            let mut served = server.connect(PLAIN).await;
            let mut silent = Vec::new();
            for _ in 0..1000 {
                silent.push(TcpStream::connect(server.tcp).await.unwrap());
            }
            served.write(0, b"old").await;
            let mut newcomer = Client::tcp(server.tcp).await.go(FULL).await;
            assert_eq!(newcomer.read(0, 3).await, b"old");
            assert_eq!(server.volume.opened.get(), 2, "silence opens nothing");
            for mut stream in silent {
                // The greeting, and then the end.
                let mut found = Vec::new();
                stream.read_to_end(&mut found).await.unwrap();
                assert!(found.is_empty() || found.len() == 18);
            }
            newcomer.write(0, b"new").await;
        },
    );
}

#[test]
fn one_connection_too_many_is_told_so() {
    check_with(
        |options| options.connections_max = 2,
        async |server| {
            let (mut first, second) = (server.connect(PLAIN).await, server.connect(PLAIN).await);
            let mut third = Client::unix(&server.path).await;
            third.flags(3).await;
            assert_eq!(third.ask(option::GO, &named(b"")).await, answer::ERR_POLICY);
            first.write(0, b"x").await;
            drop(second);
            server.until(|volume| volume.attached() == 1).await;
            assert_eq!(third.ask(option::GO, &named(b"")).await, answer::ACK);
            assert_eq!(third.read(0, 1).await, b"x");
        },
    );
}

#[test]
fn a_slow_handshake_is_cut() {
    check_with(
        |options| options.handshake_limit = Duration::from_millis(100),
        async |server| {
            let mut client = Client::unix(&server.path).await;
            client.flags(3).await;
            assert_eq!(client.ask(option::LIST, b"").await, answer::ACK);
            assert_eq!(client.take_rest().await, b"");
        },
    );
}

#[test]
fn requests_in_flight_are_bounded_and_all_are_answered() {
    check_with(
        |options| options.requests_max = 8,
        async |server| {
            let mut client = server.connect(PLAIN).await;
            server.volume.hold.set(true);
            for i in 0..30 {
                client.request(command::WRITE, 0, i * 512, 512, &[1; 512]).await;
            }
            let mut answered = 0;
            while answered < 30 {
                server.until(|volume| volume.held() == 8.min(30 - answered)).await;
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
                let held = server.volume.held();
                assert_eq!(held, 8.min(30 - answered), "no more than 8 are taken");
                server.volume.release();
                for _ in 0..held {
                    assert_eq!(client.reply(0).await.error, 0);
                }
                answered += held;
            }
        },
    );
}

#[test]
fn bytes_in_flight_are_bounded() {
    check_with(
        |options| options.bytes_max = 10_000,
        async |server| {
            let mut client = server.connect(PLAIN).await;
            client.write(0, &[5; 100_000]).await;
            server.volume.hold.set(true);
            for _ in 0..5 {
                client.request(command::READ, 0, 0, 4096, b"").await;
            }
            server.until(|volume| volume.held() == 3).await;
            server.volume.hold.set(false);
            server.volume.release();
            for _ in 0..5 {
                assert_eq!(client.reply(4096).await.data, [5; 4096]);
            }
        },
    );
}

#[test]
fn a_full_volume_holds_requests_back() {
    check(async |server| {
        let mut client = server.connect(PLAIN).await;
        server.volume.set_full(true);
        client.request(command::FLUSH, 0, 0, 0, b"").await;
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        assert_eq!(server.volume.kicks.get(), 0);
        server.volume.set_full(false);
        assert_eq!(client.reply(0).await.error, 0);
    });
}

#[test]
fn a_batch_is_kicked_once() {
    check(async |server| {
        let mut client = server.connect(PLAIN).await;
        // While it is full nothing is read, so all of these are there at once when it isn't any more.
        server.volume.set_full(true);
        for i in 0..32 {
            client.request(command::WRITE, 0, i * 4096, 4096, &[1; 4096]).await;
        }
        server.volume.set_full(false);
        for _ in 0..32 {
            assert_eq!(client.reply(0).await.error, 0);
        }
        assert!(server.volume.kicks.get() <= 3, "{} kicks for 32 requests", server.volume.kicks.get());
    });
}

#[test]
fn on_the_way_down_requests_in_flight_finish_and_new_ones_are_refused() {
    check(async |server| {
        let mut client = server.connect(FULL).await;
        let mut shaking = Client::unix(&server.path).await;
        shaking.flags(3).await;
        assert_eq!(shaking.ask(option::LIST, b"").await, answer::ACK);
        let mut idle = server.connect(PLAIN).await;
        let mut kernel = server.connect(PLAIN).await;
        server.volume.hold.set(true);
        let taken = kernel.request(command::WRITE, 0, 0, 512, &[0; 512]).await;
        let held = client.request(command::READ, 0, 0, 512, b"").await;
        server.until(|volume| volume.held() == 2).await;
        server.shutdown.cancel();
        assert_eq!(idle.take_rest().await, b"", "nothing keeps an idle connection");
        assert_eq!(shaking.ask(option::GO, &named(b"")).await, answer::ERR_SHUTDOWN);
        for kind in [command::READ, command::WRITE, command::FLUSH] {
            let data = if kind == command::WRITE { &[0; 512][..] } else { b"" };
            assert_eq!(client.call(kind, 0, 0, 512, data).await, 108);
            kernel.request(kind, 0, 0, 512, data).await;
        }
        server.volume.release();
        // A kernel would take ESHUTDOWN for an error of the disk; what gets no answer it sends again.
        let reply = kernel.reply(0).await;
        assert_eq!((reply.cookie, reply.error), (taken, 0));
        assert_eq!(kernel.take_rest().await, b"");
        assert_eq!(client.reply(0).await.cookie, held);
        assert_eq!(client.take_rest().await, b"");
        assert!(tokio::net::UnixStream::connect(&server.path).await.is_err());
    });
}

#[test]
fn a_guest_that_left_does_not_hold_the_server_up() {
    check_with(
        |options| options.linger_limit = Duration::from_millis(50),
        async |server| {
            server.volume.hold.set(true);
            let mut client = server.connect(PLAIN).await;
            client.request(command::FLUSH, 0, 0, 0, b"").await;
            server.until(|volume| volume.held() == 1).await;
            drop(client);
            server.until(|volume| volume.attached() == 0).await;
            // Its reply goes nowhere.
            server.volume.release();
        },
    );
}

#[test]
fn a_server_waits_for_its_guests_no_longer_than_it_was_told() {
    #[expect(clippy::disallowed_methods, reason = "a test that measures time reads a clock")]
    let started = Instant::now();
    check_with(
        |options| options.shutdown_limit = Duration::from_millis(100),
        async |server| {
            server.volume.hold.set(true);
            let mut client = server.connect(PLAIN).await;
            client.request(command::FLUSH, 0, 0, 0, b"").await;
            server.until(|volume| volume.held() == 1).await;
            server.shutdown.cancel();
            assert_eq!(client.take_rest().await, b"");
        },
    );
    assert!(started.elapsed() < Duration::from_secs(20));
}
