//! What a connection still has to send.
//!
//! Invariants:
//! - Frames leave whole and in order. Everything queued goes in one vectored write where the socket takes it.
//! - Only what the socket does not take at once waits for the connection's task; the common answer costs one system
//!   call and no wake-up.
//! - What is queued is bounded: above [`ROOM_BYTES`] the connection is not read from, so that only answers to what was
//!   accepted already (bounded by the core) can join.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice};
use std::net::SocketAddr;

use bytes::{Buf, Bytes};
use newel_protocol::wire::Frame;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::Notify;

/// Two of the largest reads: enough to keep a fast network busy.
const ROOM_BYTES: usize = 8 << 20;
/// Pieces in one vectored write. The kernel takes 1024; this many are 32 answers to reads, and fit the stack.
const SLICES: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// Nothing more is accepted; the connection closes once all is sent.
    Closing,
    /// The socket is of no use any more.
    Broken,
}

#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) peer: SocketAddr,
    socket: OwnedWriteHalf,
    queue: RefCell<VecDeque<Bytes>>,
    bytes: Cell<usize>,
    state: Cell<State>,
    /// The socket was full; the connection's task waits for it.
    blocked: Cell<bool>,
    /// Already among those to be flushed at the end of the batch.
    touched: Cell<bool>,
    /// Something changed that the connection's task should look at.
    changed: Notify,
}

impl Outbox {
    pub(super) fn new(socket: OwnedWriteHalf, peer: SocketAddr) -> Self {
        Self {
            peer,
            socket,
            queue: RefCell::default(),
            bytes: Cell::new(0),
            state: Cell::new(State::Open),
            blocked: Cell::new(false),
            touched: Cell::new(false),
            changed: Notify::new(),
        }
    }

    /// True the first time since [`Outbox::flush`].
    pub(super) fn touch(&self) -> bool {
        !self.touched.replace(true)
    }

    pub(super) fn push(&self, frame: Frame) {
        if self.state.get() != State::Open {
            return;
        }
        self.bytes.set(self.bytes.get() + frame.len());
        let mut queue = self.queue.borrow_mut();
        queue.push_back(frame.head);
        if !frame.payload.is_empty() {
            queue.push_back(frame.payload);
        }
    }

    /// Close once everything queued is sent.
    pub(super) fn close(&self) {
        if self.state.get() == State::Open {
            self.state.set(State::Closing);
            self.changed.notify_one();
        }
    }

    /// Give the connection up.
    pub(super) fn give_up(&self) {
        self.state.set(State::Broken);
        self.queue.borrow_mut().clear();
        self.bytes.set(0);
        self.changed.notify_one();
    }

    /// Sends what the socket takes, at the end of a batch.
    pub(super) fn flush(&self) {
        self.touched.set(false);
        if !self.blocked.get() {
            self.write();
        }
    }

    /// Waits until the socket takes more, and sends it.
    pub(super) async fn unblock(&self) {
        match self.socket.writable().await {
            Ok(()) => self.write(),
            Err(_) => self.give_up(),
        }
    }

    /// Waits until the task has something to look at.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.blocked.get()
    }

    pub(super) fn has_room(&self) -> bool {
        self.bytes.get() < ROOM_BYTES
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.get() == 0
    }

    pub(super) fn is_open(&self) -> bool {
        self.state.get() == State::Open
    }

    pub(super) fn is_closing(&self) -> bool {
        self.state.get() == State::Closing
    }

    fn write(&self) {
        loop {
            let mut queue = self.queue.borrow_mut();
            if queue.is_empty() {
                return self.blocked.set(false);
            }
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = queue.len().min(SLICES);
            for (slice, piece) in slices.iter_mut().zip(queue.iter()) {
                *slice = IoSlice::new(piece);
            }
            match self.socket.try_write_vectored(&slices[..count]) {
                Ok(0) => break,
                Ok(sent) => {
                    self.bytes.set(self.bytes.get() - sent);
                    advance(&mut queue, sent);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if !self.blocked.replace(true) {
                        self.changed.notify_one();
                    }
                    return;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.give_up();
    }
}

/// Takes `sent` bytes off the front.
fn advance(queue: &mut VecDeque<Bytes>, mut sent: usize) {
    while let Some(front) = queue.front_mut() {
        if sent < front.len() {
            return front.advance(sent);
        }
        sent -= front.len();
        queue.pop_front();
    }
}
