//! Connections to the replicas: bytes in, events out, and frames the other way.
//!
//! Invariants:
//! - One reader and one writer task per link, both on the reactor thread; a link that ends tells so exactly once.
//! - What waits to be written is bounded by the core, which lets a replica owe only so much before it leaves.
//! - Whatever is wrong with a frame ends its link with a reason, and nothing else.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::rc::Rc;

use bytes::{Buf, Bytes, BytesMut};
use newel_protocol::wire::{Decoder, Frame, Reply};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// What one read may bring; many replies fit.
const READ_BYTES: usize = 256 * 1024;
/// Slices given to one vectored write; the kernel takes at most 1024.
const SLICES_MAX: usize = 256;

/// Frames that wait to be written to one replica.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    queue: RefCell<VecDeque<Bytes>>,
    ready: Notify,
    waiting: Cell<bool>,
}

impl Outbox {
    pub(super) fn push(&self, frame: &Frame) {
        let mut queue = self.queue.borrow_mut();
        queue.push_back(frame.head.clone());
        if !frame.payload.is_empty() {
            queue.push_back(frame.payload.clone());
        }
        drop(queue);
        // One wake-up for a whole batch: the writer runs once the batch is done.
        if self.waiting.replace(false) {
            self.ready.notify_one();
        }
    }

    async fn filled(&self) {
        while self.queue.borrow().is_empty() {
            self.waiting.set(true);
            self.ready.notified().await;
        }
    }

    /// Writes as much as the socket takes.
    fn write_some(&self, stream: &WriteHalf<'_>) -> io::Result<()> {
        let mut queue = self.queue.borrow_mut();
        while !queue.is_empty() {
            let slices: Vec<IoSlice<'_>> =
                queue.iter().take(SLICES_MAX).map(|bytes| IoSlice::new(bytes)).collect();
            let mut written = stream.try_write_vectored(&slices)?;
            while written > 0 {
                let Some(front) = queue.front_mut() else { break };
                let taken = written.min(front.len());
                front.advance(taken);
                written -= taken;
                if front.is_empty() {
                    queue.pop_front();
                }
            }
        }
        Ok(())
    }
}

/// Takes what a link brings. `batch` holds every reply of one read.
pub(super) trait LinkSink {
    fn up(&self);
    fn replies(&self, batch: &mut Vec<(Reply, Bytes)>);
    fn down(&self, reason: String);
}

/// Connects and serves the link until it ends or is cancelled.
pub(super) fn spawn(address: String, outbox: Rc<Outbox>, sink: Rc<dyn LinkSink>, cancel: CancellationToken) {
    tokio::task::spawn_local(async move {
        let ended = tokio::select! {
            biased;
            () = cancel.cancelled() => return,
            ended = run(&address, &outbox, &*sink) => ended,
        };
        let reason = match ended {
            Ok(()) => "the replica closed the connection".to_owned(),
            Err(error) => error,
        };
        sink.down(format!("{address}: {reason}"));
    });
}

async fn run(address: &str, outbox: &Outbox, sink: &dyn LinkSink) -> Result<(), String> {
    let mut stream = TcpStream::connect(address).await.map_err(|error| format!("can't connect: {error}"))?;
    stream.set_nodelay(true).map_err(|error| format!("can't set TCP_NODELAY: {error}"))?;
    without_pacing(&stream);
    sink.up();
    let (reader, writer) = stream.split();
    tokio::select! {
        read = read_loop(reader, sink) => read,
        written = write_loop(&writer, outbox) => written.map_err(|error| format!("write failed: {error}")),
    }
}

/// Within a host there is no path to be gentle with, and a congestion control that paces (bbr) wakes a timer for every reply.
fn without_pacing(stream: &TcpStream) {
    if stream.peer_addr().is_ok_and(|peer| peer.ip().is_loopback())
        && let Err(error) = rustix::net::sockopt::set_tcp_congestion(stream, "cubic")
    {
        tracing::debug!(%error, "the congestion control stays as it is");
    }
}

async fn read_loop(mut stream: ReadHalf<'_>, sink: &dyn LinkSink) -> Result<(), String> {
    let mut buffer = BytesMut::with_capacity(READ_BYTES);
    let mut decoder = Decoder::default();
    let mut batch = Vec::new();
    loop {
        let missing = decoder.wanted().saturating_sub(buffer.len());
        if buffer.capacity() - buffer.len() < missing.max(READ_BYTES / 8) {
            buffer.reserve(missing.max(READ_BYTES));
        }
        // Not `try_read`: after a short read this one knows that the socket is empty and asks no second time.
        match stream.read_buf(&mut buffer).await {
            Ok(0) if buffer.is_empty() => return Ok(()),
            Ok(0) => return Err("the replica closed the connection in mid-frame".into()),
            Ok(_) => {}
            Err(error) => return Err(format!("read failed: {error}")),
        }
        let mut bad = None;
        loop {
            match decoder.decode::<Reply>(&mut buffer) {
                Ok(Some(reply)) => batch.push(reply),
                Ok(None) => break,
                Err(error) => {
                    bad = Some(error.to_string());
                    break;
                }
            }
        }
        if !batch.is_empty() {
            sink.replies(&mut batch);
            batch.clear();
        }
        if let Some(reason) = bad {
            return Err(reason);
        }
    }
}

async fn write_loop(stream: &WriteHalf<'_>, outbox: &Outbox) -> io::Result<()> {
    loop {
        outbox.filled().await;
        match outbox.write_some(stream) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
            Err(error) => return Err(error),
        }
    }
}
