//! Guests that come back: what an old connection still held must not land on top of what a new one has written.

use std::time::Duration;

use newel_protocol::nbd::consts::{answer, command, option};

use super::client::{Client, FULL, PLAIN};
use super::pki::Pki;
use super::{Server, check, check_with};
use crate::shell::nbd::NbdOptions;

#[derive(Clone, Copy, Debug)]
enum Way {
    Unix,
    Tcp,
    Tls,
}

async fn connect(server: &Server, pki: &Pki, way: Way) -> Client {
    match way {
        Way::Unix => server.connect(PLAIN).await,
        Way::Tcp => Client::tcp(server.tcp).await.go(PLAIN).await,
        Way::Tls => {
            let mut client = Client::tcp(server.tcp).await;
            client.flags(3).await;
            assert_eq!(client.ask(option::STARTTLS, b"").await, answer::ACK);
            client.encrypt(pki.client(None)).await.unwrap().options(PLAIN).await
        }
    }
}

fn one_at_a_time(options: &mut NbdOptions) {
    options.requests_max = 1;
}

/// A write that waits unread behind another one when its guest leaves; the guest comes back, sends it again and writes
/// something newer; then the old connection has room.
#[test]
fn an_old_write_never_lands_on_a_newer_one() {
    for way in [Way::Unix, Way::Tcp, Way::Tls] {
        let pki = Pki::new();
        check_with(
            |options| {
                one_at_a_time(options);
                options.tls = Some(pki.offered());
            },
            async |server| {
                let mut old = connect(&server, &pki, way).await;
                server.volume.hold.set(true);
                old.request(command::WRITE, 0, 0, 4, b"busy").await;
                old.request(command::WRITE, 0, 8192, 4, b"old!").await;
                server.until(|volume| volume.held() == 1).await;
                drop(old);

                let mut new = connect(&server, &pki, way).await;
                let again = new.request(command::WRITE, 0, 8192, 4, b"old!").await;
                server.until(|volume| volume.held() == 2).await;
                server.volume.release();
                assert_eq!(new.reply(0).await.cookie, again);
                server.volume.hold.set(false);
                new.write(8192, b"new!").await;
                server.until(|volume| volume.attached() == 1).await;
                assert_eq!(new.read(8192, 4).await, b"new!", "{way:?}");
                assert_eq!(new.read(0, 4).await, b"busy", "what was taken is finished");
                assert_eq!(
                    server.volume.executed.get(),
                    5,
                    "{way:?}: two writes taken, one newer, two reads"
                );
            },
        );
    }
}

/// The same with a connection that was there all the time: a kernel with several goes on over those that are left.
#[test]
fn nor_does_it_if_the_guest_goes_on_over_an_older_connection() {
    for way in [Way::Unix, Way::Tcp] {
        let pki = Pki::new();
        check_with(one_at_a_time, async |server| {
            let mut left = connect(&server, &pki, way).await;
            let mut lost = connect(&server, &pki, way).await;
            server.volume.hold.set(true);
            lost.request(command::WRITE, 0, 0, 4, b"busy").await;
            lost.request(command::WRITE, 0, 8192, 4, b"old!").await;
            server.until(|volume| volume.held() == 1).await;
            drop(lost);
            let again = left.request(command::WRITE, 0, 8192, 4, b"old!").await;
            server.until(|volume| volume.held() == 2).await;
            server.volume.hold.set(false);
            server.volume.release();
            assert_eq!(left.reply(0).await.cookie, again);
            left.write(8192, b"new!").await;
            server.until(|volume| volume.attached() == 1).await;
            assert_eq!(left.read(8192, 4).await, b"new!", "{way:?}");
            assert_eq!(server.volume.executed.get(), 4, "{way:?}: two writes taken, one newer, one read");
        });
    }
}

/// The same while the volume as a whole has no room.
#[test]
fn what_a_full_volume_kept_out_is_dropped_with_its_guest() {
    let pki = Pki::new();
    check(async |server| {
        let mut old = connect(&server, &pki, Way::Unix).await;
        server.volume.set_full(true);
        old.request(command::WRITE, 0, 0, 4, b"old!").await;
        drop(old);
        let mut new = connect(&server, &pki, Way::Unix).await;
        new.request(command::WRITE, 0, 0, 4, b"new!").await;
        server.volume.set_full(false);
        assert_eq!(new.reply(0).await.error, 0);
        server.until(|volume| volume.attached() == 1).await;
        assert_eq!(new.read(0, 4).await, b"new!");
        assert_eq!(server.volume.executed.get(), 2);
    });
}

/// Connections of one guest side by side are no reconnect: all that they send is executed.
#[test]
fn connections_that_stay_lose_nothing() {
    check_with(one_at_a_time, async |server| {
        let (mut first, mut second) = (server.connect(FULL).await, server.connect(FULL).await);
        server.volume.hold.set(true);
        for i in 0..4_u64 {
            first.request(command::WRITE, 0, i * 8192, 4, b"1111").await;
            second.request(command::WRITE, 0, i * 8192 + 4096, 4, b"2222").await;
        }
        server.until(|volume| volume.held() == 2).await;
        server.volume.hold.set(false);
        server.volume.release();
        for _ in 0..4 {
            assert_eq!((first.reply(0).await.error, second.reply(0).await.error), (0, 0));
        }
    });
}

/// A guest alone that closes right behind its last write: nobody can have written anything since.
#[test]
fn the_last_words_of_the_only_connection_are_heard() {
    check_with(one_at_a_time, async |server| {
        let mut client = server.connect(PLAIN).await;
        server.volume.hold.set(true);
        client.request(command::WRITE, 0, 0, 4, b"1111").await;
        client.request(command::WRITE, 0, 4096, 4, b"2222").await;
        client.request(command::DISC, 0, 0, 0, b"").await;
        client.hang_up().await;
        server.until(|volume| volume.held() == 1).await;
        server.volume.hold.set(false);
        server.volume.release();
        assert_eq!((client.reply(0).await.error, client.reply(0).await.error), (0, 0));
        assert_eq!(client.take_rest().await, b"");
    });
}

#[test]
fn an_idle_connection_is_closed_and_one_with_work_is_not() {
    check_with(
        |options| options.idle_limit = Some(Duration::from_millis(200)),
        async |server| {
            let (mut idle, mut working) = (server.connect(PLAIN).await, server.connect(PLAIN).await);
            server.volume.hold.set(true);
            let held = working.request(command::FLUSH, 0, 0, 0, b"").await;
            server.until(|volume| volume.held() == 1).await;
            assert_eq!(idle.take_rest().await, b"");
            // As long again: the other one's limit is over as well by then.
            let mut second = server.connect(PLAIN).await;
            assert_eq!(second.take_rest().await, b"");
            server.volume.release();
            assert_eq!(working.reply(0).await.cookie, held);
            assert_eq!(working.take_rest().await, b"", "idle from here on");
        },
    );
}
