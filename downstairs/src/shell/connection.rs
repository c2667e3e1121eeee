//! One connection: reads, hands whole batches of frames to the core, waits for a full socket, and says good-bye.
//!
//! Invariants:
//! - A connection whose answers are not taken is not read from.
//! - Bytes that are no frame end the connection with one line in the log.
//! - What the core said last (a refusal, say) reaches a peer that reads within [`GOOD_BYE`].

use std::rc::Rc;
use std::time::Duration;

use newel_protocol::lag::Activity;
use tokio::io::AsyncReadExt;
use tokio::net::tcp::OwnedReadHalf;
use tracing::{debug, warn};

use super::outbox::Outbox;
use super::reactor::Reactor;
use super::receiver::Receiver;
use crate::core::api::{ConnId, Event};

/// How long a peer may take to read what was said last and to close its side.
const GOOD_BYE: Duration = Duration::from_secs(2);

/// Why a connection isn't read from any more.
enum End {
    /// The core wants it closed.
    Told,
    /// The peer is gone, or makes no sense.
    Gone,
}

pub(super) async fn run(
    reactor: Rc<Reactor>,
    conn: ConnId,
    mut input: OwnedReadHalf,
    outbox: Rc<Outbox>,
    linger: bool,
) {
    match converse(&reactor, conn, &mut input, &outbox).await {
        End::Gone => reactor.closed(conn),
        End::Told if linger => {
            // Closing while the peer's bytes lie unread would reset the connection, and destroy our last words.
            let _late = tokio::time::timeout(GOOD_BYE, say_good_bye(&mut input, outbox)).await;
        }
        End::Told => {}
    }
}

async fn converse(reactor: &Reactor, conn: ConnId, input: &mut OwnedReadHalf, outbox: &Outbox) -> End {
    let mut receiver = Receiver::default();
    loop {
        if outbox.is_closing() {
            return End::Told;
        }
        if !outbox.is_open() {
            debug!("{}: the connection broke", outbox.peer);
            return End::Gone;
        }
        tokio::select! {
            biased;
            () = outbox.changed() => {}
            () = outbox.unblock(), if outbox.is_blocked() => {}
            read = read(input, &mut receiver), if outbox.has_room() => match read {
                Ok(0) => {
                    debug!("{}: closed by the peer", outbox.peer);
                    return End::Gone;
                }
                Ok(_) => {
                    if !deliver(reactor, conn, outbox, &mut receiver) {
                        return End::Gone;
                    }
                }
                Err(error) => {
                    debug!("{}: {error}", outbox.peer);
                    return End::Gone;
                }
            },
        }
    }
}

async fn read(input: &mut OwnedReadHalf, receiver: &mut Receiver) -> std::io::Result<usize> {
    input.read_buf(&mut receiver.room()).await
}

/// Hands everything that has arrived whole to the core; false if it is no frame.
fn deliver(reactor: &Reactor, conn: ConnId, outbox: &Outbox, receiver: &mut Receiver) -> bool {
    let mut batch = None;
    let sound = loop {
        match receiver.next() {
            Ok(Some((request, payload))) => {
                let batch = batch.get_or_insert_with(|| reactor.batch(Activity::Messages));
                batch.event(Event::Message { conn, request, payload });
            }
            Ok(None) => break true,
            Err(error) => {
                warn!("{}: closing the connection: {error}", outbox.peer);
                break false;
            }
        }
    };
    if let Some(batch) = batch {
        batch.finish();
    }
    sound
}

async fn say_good_bye(input: &mut OwnedReadHalf, outbox: Rc<Outbox>) {
    while outbox.is_closing() && !outbox.is_empty() {
        outbox.unblock().await;
    }
    // The last one to let go of the outbox closes our side.
    drop(outbox);
    let mut unread = [0; 4096];
    while matches!(input.read(&mut unread).await, Ok(1..)) {}
}
