//! Accepting connections from any mix of listeners.
//!
//! Invariants:
//! - Listeners take turns.
//! - A client that gave up while it waited is no error.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::AsFd;
use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl, set_tcp_nodelay,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::tcp::ReadHalf;
use tokio::net::{TcpStream, UnixStream};

use super::listen::{Listener, Listeners};
use super::quiet::QuietReader;

/// How long no connection is accepted after the host had no descriptor or memory for one. Trying at once would only spin.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A TCP peer that says nothing is asked whether it lives after so long, so often, before it counts as gone: 2 minutes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_COUNT: u32 = 6;

#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listeners {
    pub(super) async fn accept(&mut self) -> io::Result<Socket> {
        poll_fn(|context| {
            for _ in 0..self.bound.len() {
                self.next = (self.next + 1) % self.bound.len();
                let Some(listener) = self.bound.get(self.next) else { break };
                if let Poll::Ready(result) = listener.poll(context) {
                    return Poll::Ready(result);
                }
            }
            Poll::Pending
        })
        .await
    }
}

impl Listener {
    fn poll(&self, context: &mut Context<'_>) -> Poll<io::Result<Socket>> {
        loop {
            let accepted = match self {
                Self::Tcp(listener, _) => listener.poll_accept(context).map_ok(|(stream, _)| {
                    prepare(&stream);
                    Socket::Tcp(stream)
                }),
                Self::Unix(listener, _) => {
                    listener.poll_accept(context).map_ok(|(stream, _)| Socket::Unix(stream))
                }
            };
            let gave_up = matches!(&accepted, Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::ConnectionAborted);
            if !gave_up {
                return accepted;
            }
        }
    }
}

/// Small replies go out at once, and a peer that vanished without a word is noticed.
fn prepare(stream: &TcpStream) {
    let result = set_tcp_nodelay(stream, true)
        .and_then(|()| set_socket_keepalive(stream, true))
        .and_then(|()| set_tcp_keepidle(stream, KEEPALIVE_IDLE))
        .and_then(|()| set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL))
        .and_then(|()| set_tcp_keepcnt(stream, KEEPALIVE_COUNT));
    if let Err(error) = result {
        tracing::debug!(%error, "a TCP option could not be set");
    }
}

impl Socket {
    /// Who it is, for the log.
    pub(super) fn peer(&self) -> String {
        match self {
            Self::Tcp(stream) => match stream.peer_addr() {
                Ok(addr) => format!("tcp:{addr}"),
                Err(error) => format!("tcp ({error})"),
            },
            Self::Unix(stream) => match stream.peer_cred() {
                Ok(who) => format!("unix (uid {}, pid {})", who.uid(), who.pid().unwrap_or(0)),
                Err(error) => format!("unix ({error})"),
            },
        }
    }
}

/// The stream of what a guest says.
pub(super) trait GuestRead: AsyncRead + Unpin {
    /// Whether the guest has hung up, however much of what it sent is still unread.
    fn has_left(&self) -> bool;
}

impl GuestRead for ReadHalf<'_> {
    fn has_left(&self) -> bool {
        hung_up(self.as_ref())
    }
}

impl GuestRead for QuietReader {
    fn has_left(&self) -> bool {
        hung_up(self)
    }
}

impl<R: GuestRead> GuestRead for &mut R {
    fn has_left(&self) -> bool {
        (**self).has_left()
    }
}

fn hung_up(socket: &impl AsFd) -> bool {
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut sockets = [PollFd::new(socket, PollFlags::RDHUP)];
    // A poll that fails tells nothing; what is wrong shows at the next read.
    rustix::event::poll(&mut sockets, Some(&Timespec::default())).is_ok()
        && sockets[0].revents().intersects(gone)
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
