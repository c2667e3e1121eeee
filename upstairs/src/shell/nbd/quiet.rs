//! A unix stream that wakes the reactor for what it waits for, and for nothing else.
//!
//! A unix socket reports that it is writable every time its peer reads, not only after it was full. On a stream that is
//! registered for both directions, as usual, every reply is thus followed by a wake-up for nothing; a TCP socket has no
//! such habit. Here reading is registered all the time, and writing only while the socket is full.
//!
//! Invariants:
//! - The descriptors are duplicates of one socket: epoll tells registrations apart by descriptor.
//! - A write is waited for only after the socket has said that it is full.

use std::io::{self, IoSlice, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::AsyncWrite;
use tokio::net::unix::pipe::{Receiver, Sender};

/// The reading half. The reactor's reader of pipes does with any descriptor that can be read.
pub(super) type QuietReader = Receiver;

#[derive(Debug)]
pub(super) struct QuietWriter {
    socket: UnixStream,
    /// The way to wait, present while the socket is full: the reactor's writer of pipes, likewise.
    full: Option<Sender>,
}

/// Parts a stream into its halves.
pub(super) fn split(stream: tokio::net::UnixStream) -> io::Result<(QuietReader, QuietWriter)> {
    let socket = stream.into_std()?;
    let reader = Receiver::from_owned_fd_unchecked(socket.try_clone()?.into())?;
    Ok((reader, QuietWriter { socket, full: None }))
}

impl AsyncWrite for QuietWriter {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        loop {
            if let Some(full) = &mut this.full {
                let result = ready!(Pin::new(full).poll_write_vectored(context, slices));
                this.full = None;
                return Poll::Ready(result);
            }
            match this.socket.write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    this.full = Some(Sender::from_owned_fd_unchecked(this.socket.try_clone()?.into())?);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.socket.shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn more_than_the_socket_holds_goes_through_in_both_directions() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let (near, far) = tokio::net::UnixStream::pair().unwrap();
            let (mut read, mut write) = split(near).unwrap();
            let (mut far_read, mut far_write) = far.into_split();
            let data: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 253).to_be_bytes()[3]).collect();
            let (mut found, mut returned) = (Vec::new(), Vec::new());
            let there = async {
                write.write_all(&data).await.unwrap();
                write.shutdown().await.unwrap();
            };
            let echo = async {
                far_read.read_to_end(&mut found).await.unwrap();
                far_write.write_all(&found).await.unwrap();
                far_write.shutdown().await.unwrap();
            };
            let back = async { read.read_to_end(&mut returned).await.unwrap() };
            tokio::join!(there, echo, back);
            assert!(returned == data);
        });
    }
}
