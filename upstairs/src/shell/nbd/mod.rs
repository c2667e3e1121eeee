//! The NBD front end: guests connect here, and their requests go to the volume.
//!
//! Files: `listen` and `accept` where guests attach (and `http` where the status page does), `connection` one guest's reader and writer, `session` its requests in flight,
//! `outqueue` the bytes it is owed, `quiet` a unix stream without needless wake-ups, `tls` encrypted ones. The protocol itself is `newel_protocol::nbd`.
//!
//! Invariants:
//! - Everything runs on the one reactor thread.
//! - A connection costs the volume nothing before its handshake is over, and a handshake has a time limit. Beyond
//!   `handshakes_max` the oldest that has said nothing is dropped, or else the oldest: silence can't keep others out.
//! - Connections in transmission are bounded; one more is refused while it shakes hands, with a reason.
//! - On the way down no connection is accepted, new requests are answered ESHUTDOWN, those in flight finish.
//!
//! It decides nothing about data: order, quorum, retry and throttling are the core's.

mod accept;
mod connection;
mod http;
mod listen;
mod outqueue;
mod quiet;
mod session;
#[cfg(test)]
mod tests;
mod tls;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use newel_protocol::nbd::{Admission, Agreed, Export, Tls};
use tokio::io::AsyncWrite;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use self::accept::{ACCEPT_PAUSE, GuestRead, Socket};
use self::connection::{Closed, ConnectionError, Negotiation, Shaken, farewell, transmit};
pub use self::listen::{BindError, ListenAddr, ListenAddrError, Listeners};
use self::session::Session;
pub use self::tls::{TlsError, TlsFiles, TlsOffer};
use super::guest::{ConnKey, Volume};

/// How long, on the way down, a client that shakes hands or is told goodbye may hold things up.
const HANDSHAKE_GRACE: Duration = Duration::from_secs(2);

/// What is served, and within which bounds.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    pub export: Export,
    /// Requests of one connection in flight, or answered and not yet sent.
    pub requests_max: usize,
    /// Their bytes. A request larger than this is taken alone.
    pub bytes_max: usize,
    /// Connections in transmission.
    pub connections_max: usize,
    /// Connections that still shake hands.
    pub handshakes_max: usize,
    /// From accepting a connection to its transmission, TLS included.
    pub handshake_limit: Duration,
    /// How long a connection may have nothing in flight and say nothing. A kernel does for hours.
    pub idle_limit: Option<Duration>,
    /// How long requests of a guest that has closed may still finish.
    pub linger_limit: Duration,
    /// How long all connections together may take to finish on the way down.
    pub shutdown_limit: Duration,
    pub tls: Option<TlsOffer>,
}

impl NbdOptions {
    /// The defaults for a volume of this name, which the empty name means too.
    pub fn new(name: &str) -> Self {
        Self {
            export: Export {
                name: name.to_owned(),
                description: format!("Newel volume {name}"),
                is_default: true,
            },
            requests_max: 1024,
            bytes_max: 64 << 20,
            connections_max: 256,
            handshakes_max: 128,
            handshake_limit: Duration::from_secs(10),
            idle_limit: None,
            linger_limit: Duration::from_secs(30),
            shutdown_limit: Duration::from_secs(30),
            tls: None,
        }
    }
}

/// Serves `volume` until `shutdown`, then until every connection has finished or `shutdown_limit` is over. Belongs on a
/// `LocalSet`.
pub async fn serve(
    mut listeners: Listeners,
    volume: Rc<dyn Volume>,
    options: NbdOptions,
    shutdown: CancellationToken,
) {
    let server = Rc::new(Server {
        volume,
        options,
        handshakes: RefCell::default(),
        sessions: RefCell::default(),
        shutting_down: Cell::new(false),
    });
    // Dropping this set ends every connection, so none outlives the caller's interest.
    let mut tasks = JoinSet::new();
    let mut next_id = 0;
    loop {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
            accepted = listeners.accept() => match accepted {
                Ok(socket) => {
                    server.start(&mut tasks, next_id, socket);
                    next_id += 1;
                }
                Err(error) => {
                    tracing::warn!(%error, "no connection could be accepted; trying again in a moment");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listeners);
    server.drain();
    if tokio::time::timeout(server.options.shutdown_limit, server.finish(&mut tasks)).await.is_err() {
        let connections = server.sessions.borrow().len();
        tracing::warn!(connections, limit = ?server.options.shutdown_limit, "connections had to be cut");
    }
}

/// What all connections share.
struct Server {
    volume: Rc<dyn Volume>,
    options: NbdOptions,
    /// By connection, so the oldest comes first.
    handshakes: RefCell<BTreeMap<u64, Shaking>>,
    sessions: RefCell<BTreeMap<u64, Rc<Session>>>,
    shutting_down: Cell<bool>,
}

/// A connection that shakes hands.
struct Shaking {
    spoke: bool,
    task: AbortHandle,
}

impl Server {
    fn start(self: &Rc<Self>, tasks: &mut JoinSet<()>, id: u64, socket: Socket) {
        self.evict();
        let task = tasks.spawn_local(Rc::clone(self).connection(id, socket));
        self.handshakes.borrow_mut().insert(id, Shaking { spoke: false, task });
    }

    /// Makes room for one more handshake.
    fn evict(&self) {
        let mut handshakes = self.handshakes.borrow_mut();
        while handshakes.len() >= self.options.handshakes_max.max(1) {
            let silent = handshakes.iter().find(|(_, shaking)| !shaking.spoke);
            let Some(oldest) = silent.or_else(|| handshakes.iter().next()).map(|(&id, _)| id) else { break };
            if let Some(shaking) = handshakes.remove(&oldest) {
                tracing::debug!(connection = oldest, "dropped: too many connections that shake hands");
                shaking.task.abort();
            }
        }
    }

    fn drain(&self) {
        self.shutting_down.set(true);
        for session in self.sessions.borrow().values() {
            session.drain();
        }
        // They have nothing in flight, and nothing to wait for.
        for shaking in self.handshakes.borrow().values().filter(|shaking| !shaking.spoke) {
            shaking.task.abort();
        }
    }

    /// Waits for the connections in transmission, and for the others as long as they are bound to end soon.
    async fn finish(&self, tasks: &mut JoinSet<()>) {
        while !tasks.is_empty() {
            let limit = if self.sessions.borrow().is_empty() { HANDSHAKE_GRACE } else { Duration::MAX };
            if tokio::time::timeout(limit, tasks.join_next()).await.is_err() {
                break;
            }
        }
    }

    fn now(&self) -> (Admission, u64) {
        let admission = if self.shutting_down.get() {
            Admission::ShuttingDown
        } else if self.sessions.borrow().len() >= self.options.connections_max {
            Admission::Full
        } else {
            Admission::Open
        };
        (admission, self.volume.size_bytes())
    }

    async fn connection(self: Rc<Self>, id: u64, socket: Socket) {
        let ticket = Ticket { server: Rc::clone(&self), id };
        let peer = socket.peer();
        let tls = TlsOffer::on(self.options.tls.as_ref(), &socket);
        tracing::debug!(connection = id, %peer, "guest connected");
        let result = match socket {
            Socket::Tcp(mut stream) => {
                let (mut read, mut write) = stream.split();
                self.converse((&mut read, &mut write), tls, ticket).await
            }
            Socket::Unix(stream) => match quiet::split(stream) {
                Ok((mut read, mut write)) => self.converse((&mut read, &mut write), tls, ticket).await,
                Err(error) => Err(error.into()),
            },
        };
        match result {
            Ok(closed @ (Closed::Idle | Closed::Superseded { .. })) => {
                tracing::info!(connection = id, %peer, ?closed, "a guest's connection was given up");
            }
            Ok(closed) => tracing::debug!(connection = id, %peer, ?closed, "guest left"),
            Err(error) if error.is_violation() => tracing::warn!(connection = id, %peer, "{error}"),
            Err(error) => tracing::debug!(connection = id, %peer, "{error}"),
        }
    }

    async fn converse<R, W>(
        self: &Rc<Self>,
        (read, write): (&mut R, &mut W),
        tls: Tls,
        ticket: Ticket,
    ) -> Result<Closed, ConnectionError>
    where
        R: GuestRead,
        W: AsyncWrite + Unpin,
    {
        let deadline = Instant::now() + self.options.handshake_limit;
        let mut negotiation = Negotiation::new(tls);
        let shaken = self.shake((&mut *read, &mut *write), &mut negotiation, deadline, ticket.id).await;
        match (shaken, &self.options.tls) {
            // Apart, so that connections in the clear don't carry its size.
            (Ok(Shaken::StartTls), Some(offer)) => {
                Box::pin(self.encrypt((read, write), offer, negotiation, deadline, ticket)).await
            }
            (shaken, _) => self.attend((read, write), shaken, ticket).await,
        }
    }

    /// Speaks TLS, and shakes hands to the end over it.
    async fn encrypt<R, W>(
        self: &Rc<Self>,
        (read, write): (&mut R, &mut W),
        offer: &TlsOffer,
        mut negotiation: Negotiation,
        deadline: Instant,
        ticket: Ticket,
    ) -> Result<Closed, ConnectionError>
    where
        R: GuestRead,
        W: AsyncWrite + Unpin,
    {
        let stream = match timeout_at(deadline, offer.accept(&mut *read, &mut *write)).await {
            Err(_) => return Err(self.too_late()),
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                drop(ticket);
                // It is told why, in an alert.
                farewell((read, write)).await;
                return Err(ConnectionError::Tls(error));
            }
        };
        let (mut read, mut write) = stream.split();
        let shaken = self.shake((&mut read, &mut write), &mut negotiation, deadline, ticket.id).await;
        self.attend((&mut read, &mut write), shaken, ticket).await
    }

    async fn shake<R, W>(
        self: &Rc<Self>,
        stream: (&mut R, &mut W),
        negotiation: &mut Negotiation,
        deadline: Instant,
        id: u64,
    ) -> Result<Shaken<Attached>, ConnectionError>
    where
        R: GuestRead,
        W: AsyncWrite + Unpin,
    {
        let now = || self.now();
        let (spoke, admit) = (|| self.spoke(id), |agreed| Attached::new(self, id, agreed));
        let run = negotiation.run(stream, &self.options.export, &now, spoke, admit);
        timeout_at(deadline, run).await.unwrap_or_else(|_| Err(self.too_late()))
    }

    fn too_late(&self) -> ConnectionError {
        ConnectionError::HandshakeTime { limit: self.options.handshake_limit }
    }

    /// Serves a guest that has shaken hands, and sees it off, whatever the handshake has come to.
    async fn attend<R, W>(
        &self,
        (read, write): (&mut R, &mut W),
        shaken: Result<Shaken<Attached>, ConnectionError>,
        ticket: Ticket,
    ) -> Result<Closed, ConnectionError>
    where
        R: GuestRead,
        W: AsyncWrite + Unpin,
    {
        drop(ticket);
        let result = match shaken {
            Ok(Shaken::Admitted(attached, buffered)) => {
                self.transmit((&mut *read, &mut *write), buffered, &attached).await
            }
            // TLS that isn't offered is not agreed upon; there would be nothing to go on with.
            Ok(Shaken::Ended | Shaken::StartTls) => Ok(Closed::Aborted),
            Err(error) => Err(error),
        };
        if !matches!(result, Err(ConnectionError::Io(_) | ConnectionError::HandshakeTime { .. })) {
            farewell((read, write)).await;
        }
        result
    }

    async fn transmit<R, W>(
        &self,
        stream: (&mut R, &mut W),
        buffered: BytesMut,
        attached: &Attached,
    ) -> Result<Closed, ConnectionError>
    where
        R: GuestRead,
        W: AsyncWrite + Unpin,
    {
        let guest = (&*self.volume, attached.key);
        let limits = (self.options.linger_limit, self.options.idle_limit);
        transmit(stream, buffered, &attached.session, guest, limits).await
    }

    fn spoke(&self, id: u64) {
        if let Some(shaking) = self.handshakes.borrow_mut().get_mut(&id) {
            shaking.spoke = true;
        }
    }
}

/// A connection's place among the handshakes; given back by dropping it.
struct Ticket {
    server: Rc<Server>,
    id: u64,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.server.handshakes.borrow_mut().remove(&self.id);
    }
}

/// A connection's place at the volume; given back by dropping it.
struct Attached {
    server: Rc<Server>,
    id: u64,
    key: ConnKey,
    session: Rc<Session>,
}

impl Attached {
    fn new(server: &Rc<Server>, id: u64, agreed: Agreed) -> Self {
        let NbdOptions { requests_max, bytes_max, .. } = server.options;
        let session = Rc::new(Session::new(agreed, server.volume.size_bytes(), requests_max, bytes_max));
        let key = server.volume.open(Rc::clone(&session) as _);
        let mut sessions = server.sessions.borrow_mut();
        if !sessions.is_empty() {
            sessions.values().chain([&session]).for_each(|session| session.accompany());
        }
        sessions.insert(id, Rc::clone(&session));
        drop(sessions);
        Self { server: Rc::clone(server), id, key, session }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.server.sessions.borrow_mut().remove(&self.id);
        self.server.volume.close(self.key);
    }
}
