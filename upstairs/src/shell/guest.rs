//! Where the NBD front end and the driver of the core meet.
//!
//! Everything here lives on the one reactor thread, hence `Rc` and no locks.

use std::rc::Rc;

use crate::core::api::{GuestId, GuestOp, GuestReply, Time};

/// One NBD connection as the driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnKey(pub u32);

impl ConnKey {
    /// The name of this connection's request in `slot`.
    pub fn guest(self, slot: u32) -> GuestId {
        GuestId(u64::from(self.0) << 32 | u64::from(slot))
    }
}

/// Takes the replies of one connection. Called on the reactor, never while the connection calls into [`Volume`] for
/// another connection; a reply may arrive inside [`Volume::kick`] itself.
pub trait GuestSink {
    /// Queue the reply to the request in `slot`. Must not block and must not call back into the volume.
    fn reply(&self, slot: u32, reply: GuestReply);
    /// Replies were queued: let the writer task go. Called once for a batch.
    fn wake(&self);
}

/// What the NBD front end needs of the volume. The driver implements it; the tests of the front end use memory.
pub trait Volume {
    fn size_bytes(&self) -> u64;
    fn open(&self, sink: Rc<dyn GuestSink>) -> ConnKey;
    /// The connection is gone. Its unfinished requests run on, their replies are dropped.
    fn close(&self, key: ConnKey);
    /// The clock by which `received` is meant.
    fn now(&self) -> Time;
    /// Queue a request for the core. `received`: when it was read off the socket.
    fn submit(&self, guest: GuestId, op: GuestOp, received: Time);
    /// Hand everything queued to the core and carry out its actions. Called once for a batch of requests.
    fn kick(&self);
    /// False while the volume as a whole holds as much as it may: connections stop reading until `room` returns true,
    /// and are woken by [`GuestSink::wake`].
    fn room(&self) -> bool;
}
