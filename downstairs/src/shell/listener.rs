//! Binds and accepts.
//!
//! Invariants:
//! - Sockets are bounded: the core bounds those it knows (and pushes out silent ones), [`MAX_TASKS`] those that are
//!   still saying good-bye.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tracing::{debug, warn};

use super::connection;
use super::outbox::Outbox;
use super::reactor::Reactor;

/// Connections that the kernel holds until they are accepted.
pub(super) const BACKLOG: u32 = 1024;
/// Connections with a task. Twice what the core lets live, so that as many may still be saying good-bye; beyond, one
/// that the core has given up is cut off.
const MAX_TASKS: usize = 128;
/// After a failed accept, most likely for want of file descriptors: how long until others may have been closed.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

pub(super) fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

pub(super) async fn accept(reactor: Rc<Reactor>, listener: TcpListener) {
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = tasks.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => start(&reactor, &mut tasks, stream, peer),
                Err(error) => {
                    warn!("cannot accept a connection: {error}");
                    tokio::time::sleep(ACCEPT_BACKOFF).await;
                }
            }
        }
    }
}

/// Within a host there is no path to be gentle with, and a congestion control that paces (bbr) wakes a timer for every reply.
fn without_pacing(stream: &TcpStream, peer: SocketAddr) {
    if peer.ip().is_loopback()
        && let Err(error) = rustix::net::sockopt::set_tcp_congestion(stream, "cubic")
    {
        debug!("{peer}: the congestion control stays as it is: {error}");
    }
}

fn start(reactor: &Rc<Reactor>, tasks: &mut JoinSet<()>, stream: TcpStream, peer: SocketAddr) {
    debug!("{peer}: connected");
    if let Err(error) = stream.set_nodelay(true) {
        return debug!("{peer}: gone at once: {error}");
    }
    without_pacing(&stream, peer);
    let (input, output) = stream.into_split();
    let outbox = Rc::new(Outbox::new(output, peer));
    let conn = reactor.connected(&outbox);
    // The core has closed another one for this one by now, so there is room for it unless many linger.
    let linger = tasks.len() < MAX_TASKS;
    tasks.spawn_local(connection::run(Rc::clone(reactor), conn, input, outbox, linger));
}
