//! TLS: what is said before it, who gets through it, and that nothing in the clear gets past it.

use std::time::Duration;

use newel_protocol::nbd::Errno;
use newel_protocol::nbd::consts::{OPTION_MAGIC, REQUEST_MAGIC, answer, command, option};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::client::{Ask, Client, FULL, PLAIN, named};
use super::pki::Pki;
use super::{Server, check_with};
use crate::shell::nbd::{TlsFiles, TlsOffer};

const EINVAL: u32 = Errno::Invalid as u32;

/// A client that has agreed upon TLS, and not begun it.
async fn agreed(server: &Server) -> Client {
    let mut client = Client::tcp(server.tcp).await;
    client.flags(3).await;
    assert_eq!(client.ask(option::STARTTLS, b"").await, answer::ACK);
    client
}

/// A client in transmission, over TLS.
async fn secure(server: &Server, pki: &Pki, ask: Ask) -> Client {
    let client = agreed(server).await.encrypt(pki.client(None)).await.unwrap();
    client.options(ask).await
}

fn option_bytes(option: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap();
    [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes(), payload].concat()
}

#[test]
fn where_tls_is_required_nothing_else_is_answered_in_the_clear() {
    let pki = Pki::new();
    check_with(
        |options| options.tls = Some(pki.required()),
        async |server| {
            let mut client = Client::tcp(server.tcp).await;
            client.flags(3).await;
            for asked in [option::LIST, option::STRUCTURED_REPLY] {
                assert_eq!(client.ask(asked, b"").await, answer::ERR_TLS_REQD);
            }
            for asked in [option::INFO, option::GO] {
                assert_eq!(client.ask(asked, &named(b"vol")).await, answer::ERR_TLS_REQD);
                assert_eq!(client.ask(asked, &named(b"nobody")).await, answer::ERR_TLS_REQD);
            }
            for asked in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
                assert_eq!(client.ask(asked, &[0; 8]).await, answer::ERR_TLS_REQD);
            }
            assert_eq!(client.ask(99, &[9; 65_536]).await, answer::ERR_TLS_REQD);
            assert_eq!(client.ask(option::STARTTLS, b"data").await, answer::ERR_INVALID);
            assert_eq!(client.ask(option::ABORT, b"").await, answer::ACK);
            assert_eq!(client.take_rest().await, b"");

            let mut client = Client::tcp(server.tcp).await;
            client.flags(3).await;
            client.option(option::EXPORT_NAME, b"vol").await;
            assert_eq!(client.take_rest().await, b"");
            assert_eq!(server.volume.opened.get(), 0);

            // A unix socket is guarded by its file.
            server.connect(PLAIN).await.write(0, b"local").await;
            let mut remote = secure(&server, &pki, FULL).await;
            assert_eq!(remote.read(0, 5).await, b"local");
        },
    );
}

#[test]
fn what_was_agreed_in_the_clear_is_forgotten() {
    let pki = Pki::new();
    check_with(
        |options| options.tls = Some(pki.offered()),
        async |server| {
            let mut client = Client::tcp(server.tcp).await;
            client.flags(3).await;
            assert_eq!(client.ask(option::STRUCTURED_REPLY, b"").await, answer::ACK);
            let contexts = b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation";
            assert_eq!(client.ask(option::SET_META_CONTEXT, contexts).await, answer::ACK);
            assert_eq!(client.ask(option::STARTTLS, b"").await, answer::ACK);
            let mut client = client.encrypt(pki.client(None)).await.unwrap();
            assert_eq!(client.ask(option::STARTTLS, b"").await, answer::ERR_INVALID, "it is on already");
            assert_eq!(client.ask(option::SET_META_CONTEXT, contexts).await, answer::ERR_INVALID);
            assert_eq!(client.ask(option::GO, &named(b"vol")).await, answer::ACK);
            client.request(command::READ, 0, 0, 512, b"").await;
            let reply = client.reply(512).await;
            assert_eq!((reply.error, reply.chunks.len()), (0, 0), "a simple reply");
            assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, 512, b"").await, EINVAL);

            // Offered is not required, and EXPORT_NAME is as good a way over TLS as any.
            Client::tcp(server.tcp).await.go(FULL).await.write(0, b"x").await;
            let mut oldest = agreed(&server).await.encrypt(pki.client(None)).await.unwrap();
            oldest.option(option::EXPORT_NAME, b"vol").await;
            oldest.take(10).await;
            assert_eq!(oldest.read(0, 1).await, b"x");
        },
    );
}

// CVE-2021-3716 and its like: whoever sits in between must not get a word in before the guest's own.
#[test]
fn what_is_sent_in_the_clear_behind_starttls_is_never_executed() {
    let pki = Pki::new();
    let write = {
        let mut out = REQUEST_MAGIC.to_be_bytes().to_vec();
        out.extend([0, 0, 0, 1]);
        out.extend([0; 16]);
        out.extend([0, 0, 0, 4]);
        out.extend(b"evil");
        out
    };
    let injected = [option_bytes(option::GO, &named(b"vol")), write].concat();
    check_with(
        |options| options.tls = Some(pki.offered()),
        async |server| {
            // In one piece with STARTTLS, and then, as an attacker would have it, an honest TLS handshake.
            let mut client = Client::tcp(server.tcp).await;
            client.flags(3).await;
            client.send(&[option_bytes(option::STARTTLS, b""), injected.clone()].concat()).await;
            assert_eq!(client.answer(option::STARTTLS).await, answer::ACK);
            assert!(client.encrypt(pki.client(None)).await.is_err());

            // After the answer to it.
            let mut client = agreed(&server).await;
            client.send(&injected).await;
            assert!(client.encrypt(pki.client(None)).await.is_err());

            // Within the handshake: cut into the middle of an honest one's first message.
            let mut client = agreed(&server).await;
            client.send(&[0x16, 3, 1, 2, 0]).await;
            client.send(&injected).await;
            assert!(client.encrypt(pki.client(None)).await.is_err());

            assert_eq!((server.volume.opened.get(), server.volume.executed.get()), (0, 0));
            assert_eq!(secure(&server, &pki, PLAIN).await.read(0, 4).await, [0; 4]);
        },
    );
}

#[test]
fn garbage_for_a_greeting_of_tls_is_answered_with_an_alert() {
    let pki = Pki::new();
    check_with(
        |options| options.tls = Some(pki.required()),
        async |server| {
            for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 4096], &[0xff; 70_000]] {
                let mut client = agreed(&server).await;
                // The server may be gone before it has read all of it.
                client.try_send(garbage).await;
                let rest = client.take_rest().await;
                assert!(rest.is_empty() || rest[0] == 0x15, "an alert, or a reset: {rest:?}");
            }
            // An alert for whom it is of use: one that reads it.
            let mut client = agreed(&server).await;
            client.send(&[0x16, 3, 1, 0, 6, 1, 0, 0, 2, 3, 3]).await;
            let rest = client.take_rest().await;
            assert!(rest.starts_with(&[0x15, 3]), "an alert: {rest:?}");
            secure(&server, &pki, PLAIN).await.write(0, b"lives").await;
        },
    );
}

#[test]
fn a_handshake_that_stalls_in_tls_is_cut() {
    let pki = Pki::new();
    check_with(
        |options| {
            options.tls = Some(pki.required());
            options.handshake_limit = Duration::from_millis(300);
        },
        async |server| {
            // Before a word of TLS, in the middle of its first message, and behind its last.
            let mut silent = agreed(&server).await;
            let mut halting = agreed(&server).await;
            halting.send(&[0x16, 3, 1, 2, 0, 1]).await;
            let mut idle = agreed(&server).await.encrypt(pki.client(None)).await.unwrap();
            assert_eq!(idle.ask(option::LIST, b"").await, answer::ACK);
            for client in [&mut silent, &mut halting] {
                assert_eq!(client.take_rest().await, b"");
            }
            idle.until_closed().await;
            assert_eq!(server.volume.opened.get(), 0);
        },
    );
}

#[test]
fn handshakes_that_stall_in_tls_keep_nobody_out() {
    let pki = Pki::new();
    check_with(
        |options| {
            options.tls = Some(pki.required());
            options.handshakes_max = 4;
        },
        async |server| {
            let mut stalled = Vec::new();
            for _ in 0..20 {
                stalled.push(agreed(&server).await);
            }
            secure(&server, &pki, PLAIN).await.write(0, b"in").await;
            for client in &mut stalled[..16] {
                client.until_closed().await;
            }
        },
    );
}

#[test]
fn closing_in_the_middle_of_tls_is_no_trouble() {
    let pki = Pki::new();
    check_with(
        |options| options.tls = Some(pki.required()),
        async |server| {
            drop(agreed(&server).await);
            let mut client = agreed(&server).await;
            client.send(&[0x16, 3, 1, 2, 0, 1]).await;
            drop(client);
            drop(agreed(&server).await.encrypt(pki.client(None)).await.unwrap());
            // In transmission, without a word of goodbye, in the middle of a write.
            let mut client = secure(&server, &pki, PLAIN).await;
            client.write(0, b"whole").await;
            client.send(&REQUEST_MAGIC.to_be_bytes()).await;
            drop(client);
            server.until(|volume| volume.attached() == 0).await;
            assert_eq!(secure(&server, &pki, PLAIN).await.read(0, 5).await, b"whole");
        },
    );
}

#[test]
fn only_clients_of_the_ca_get_in() {
    let (pki, foreign) = (Pki::new(), Pki::new());
    let offer = TlsOffer::load(&pki.files(true), true).unwrap();
    check_with(
        |options| options.tls = Some(offer),
        async |server| {
            for stranger in [None, Some(&foreign)] {
                let client = agreed(&server).await.encrypt(pki.client(stranger)).await;
                // With TLS 1.3 a client hears of it only with its first answer.
                if let Ok(mut client) = client {
                    client.try_send(&option_bytes(option::GO, &named(b"vol"))).await;
                    client.until_closed().await;
                }
            }
            assert_eq!(server.volume.opened.get(), 0);
            let client = agreed(&server).await.encrypt(pki.client(Some(&pki))).await.unwrap();
            client.options(FULL).await.write(0, b"friend").await;
        },
    );
    check_with(
        |options| options.tls = Some(pki.offered()),
        async |server| {
            assert!(agreed(&server).await.encrypt(foreign.client(None)).await.is_err(), "an unknown server");
        },
    );
}

#[test]
fn the_bounds_hold_over_tls_and_all_is_answered() {
    const COUNT: usize = 64;
    const LENGTH: u32 = 1 << 20;
    let pki = Pki::new();
    check_with(
        |options| {
            options.tls = Some(pki.required());
            options.bytes_max = 4 << 20;
        },
        async |server| {
            let mut client = secure(&server, &pki, PLAIN).await;
            let pattern: Vec<u8> = (0..LENGTH).map(|i| (i % 251).to_be_bytes()[3]).collect();
            client.write(0, &pattern).await;
            let before = server.volume.executed.get();
            for _ in 0..COUNT {
                client.request(command::READ, 0, 0, LENGTH, b"").await;
            }
            // Nobody takes the answers, so the rest is not even read: what is taken is bounded by the connection's queue, by
            // TLS, and by what the sockets hold.
            let mut taken = usize::MAX;
            while taken != server.volume.executed.get() - before || taken < 4 {
                taken = server.volume.executed.get() - before;
                for _ in 0..200 {
                    tokio::task::yield_now().await;
                }
            }
            assert!(taken < COUNT / 2, "{taken} reads of 1 MiB taken of {COUNT}");
            for _ in 0..COUNT {
                assert!(client.reply(LENGTH as usize).await.data == pattern);
            }
            // 32 MiB in one request, there and back.
            let large: Vec<u8> = pattern.iter().copied().cycle().take(32 << 20).collect();
            client.write(3, &large).await;
            assert!(client.read(3, 32 << 20).await == large);
            assert_eq!(client.call(command::WRITE, 0, 0, 33 << 20, &vec![0; 33 << 20]).await, EINVAL);
            assert_eq!(client.read(3, 4).await, large[..4]);
        },
    );
}

#[test]
fn goodbyes_over_tls_are_whole() {
    let pki = Pki::new();
    check_with(
        |options| options.tls = Some(pki.required()),
        async |server| {
            for goodbye in [true, false] {
                let mut client = secure(&server, &pki, PLAIN).await;
                server.volume.hold.set(true);
                for i in 0..10 {
                    client.request(command::WRITE, 0, i * 4096, 4096, &[1; 4096]).await;
                }
                if goodbye {
                    client.request(command::DISC, 0, 0, 0, b"").await;
                } else {
                    client.hang_up().await;
                }
                server.until(|volume| volume.held() == 10).await;
                server.volume.hold.set(false);
                server.volume.release();
                for _ in 0..10 {
                    assert_eq!(client.reply(0).await.error, 0);
                }
                // A close without TLS's own would be an error here: it might be somebody else's doing.
                assert_eq!(client.take_rest().await, b"");
            }
        },
    );
}

#[test]
fn on_the_way_down_tls_changes_nothing() {
    let pki = Pki::new();
    check_with(
        |options| options.tls = Some(pki.required()),
        async |server| {
            let mut client = secure(&server, &pki, FULL).await;
            let mut shaking = agreed(&server).await.encrypt(pki.client(None)).await.unwrap();
            assert_eq!(shaking.ask(option::LIST, b"").await, answer::ACK);
            let mut stalled = agreed(&server).await;
            server.volume.hold.set(true);
            let held = client.request(command::READ, 0, 0, 512, b"").await;
            server.until(|volume| volume.held() == 1).await;
            server.shutdown.cancel();
            assert_eq!(shaking.ask(option::GO, &named(b"vol")).await, answer::ERR_SHUTDOWN);
            assert_eq!(client.call(command::FLUSH, 0, 0, 0, b"").await, 108);
            server.volume.release();
            assert_eq!(client.reply(0).await.cookie, held);
            assert_eq!(client.take_rest().await, b"");
            // It is not waited for until its own limit.
            stalled.until_closed().await;
        },
    );
}

#[test]
fn bad_files_are_named() {
    let (pki, other) = (Pki::new(), Pki::new());
    let fails = |files: TlsFiles, parts: &[&str]| {
        let error = TlsOffer::load(&files, true).map(|_| ()).unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{part:?} is missing in {error:?}");
        }
    };
    let good = || pki.files(true);
    let text = |name: &str, content: &str| {
        let path = pki.file(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    fails(
        TlsFiles { certificate: "/none/c.pem".into(), ..good() },
        &["can't read", "/none/c.pem", "No such file"],
    );
    fails(TlsFiles { key: "/none/k.pem".into(), ..good() }, &["can't read the TLS key file /none/k.pem"]);
    fails(TlsFiles { client_ca: Some("/none/a.pem".into()), ..good() }, &["client CA", "/none/a.pem"]);
    fails(
        TlsFiles { certificate: text("empty.pem", ""), ..good() },
        &["empty.pem", "no items found", "in PEM"],
    );
    fails(TlsFiles { key: pki.file("server-cert.pem"), ..good() }, &["TLS key file", "server-cert.pem"]);
    fails(
        TlsFiles { certificate: pki.file("server-key.pem"), ..good() },
        &["certificate file", "server-key.pem"],
    );
    fails(
        TlsFiles { key: other.file("server-key.pem"), ..good() },
        &["server-key.pem doesn't belong to the certificate"],
    );
    let torn = "-----BEGIN CERTIFICATE-----\nMIIB\n";
    fails(TlsFiles { certificate: text("torn.pem", torn), ..good() }, &["torn.pem", "missing section end"]);
    let wrong = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
    fails(TlsFiles { certificate: text("wrong.pem", wrong), ..good() }, &["wrong.pem", "can't be used"]);
    fails(TlsFiles { client_ca: Some(text("ca.pem", wrong)), ..good() }, &["ca.pem", "can't be used"]);
}

#[test]
fn a_connection_that_is_only_accepted_says_nothing_of_tls() {
    let pki = Pki::new();
    check_with(
        |options| options.tls = Some(pki.required()),
        async |server| {
            // Straight into TLS, as if it were another protocol: no NBD client does, and it is refused as NBD.
            let mut stream = TcpStream::connect(server.tcp).await.unwrap();
            stream.write_all(&[0x16, 3, 1, 0, 200]).await.unwrap();
            let mut found = Vec::new();
            stream.read_to_end(&mut found).await.unwrap();
            assert_eq!(found.len(), 18, "the greeting, and the end");
        },
    );
}
