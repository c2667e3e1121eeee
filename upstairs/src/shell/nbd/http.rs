//! The same kinds of listeners for the status page.
//!
//! Invariants:
//! - Connections are bounded in number and in time, so that idle readers of the status can use up neither the process's
//!   descriptors nor all the places.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

use super::accept::{ACCEPT_PAUSE, Socket};
use super::listen::{ListenAddr, Listeners};

/// One connection is a person or a scraper; this is plenty.
const CONNECTIONS_MAX: usize = 32;
/// How long one may stay open, answers included. Who wants to go on connects again.
const CONNECTION_LIMIT: Duration = Duration::from_secs(30);

impl Listeners {
    /// Serves `app` on all of them until the future is dropped.
    pub(in crate::shell) async fn serve_http(self, app: axum::Router) -> io::Result<()> {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        axum::serve(HttpListeners { listeners: self, places }, app).await
    }
}

struct HttpListeners {
    listeners: Listeners,
    places: Arc<Semaphore>,
}

impl axum::serve::Listener for HttpListeners {
    type Io = Bounded;
    type Addr = String;

    async fn accept(&mut self) -> (Bounded, String) {
        loop {
            // The semaphore is never closed.
            let Ok(place) = Arc::clone(&self.places).acquire_owned().await else { continue };
            match self.listeners.accept().await {
                Ok(socket) => {
                    let peer = socket.peer();
                    let deadline = Box::pin(tokio::time::sleep(CONNECTION_LIMIT));
                    return (Bounded { socket, deadline, _place: place }, peer);
                }
                Err(error) => {
                    tracing::warn!(%error, "no status connection could be accepted; trying again in a moment");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<String> {
        Ok(self.listeners.addrs().first().map_or_else(String::new, ListenAddr::to_string))
    }
}

/// A connection with an end.
struct Bounded {
    socket: Socket,
    deadline: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Bounded {
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.deadline.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Bounded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl AsyncWrite for Bounded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}
