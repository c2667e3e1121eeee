//! NBD, the guest's side: a server's state machines for the fixed newstyle handshake and for transmission.
//!
//! Invariants:
//! - Pure: bytes in, bytes and decisions out. No I/O, no clock, no task.
//! - Bytes of a client never cause a panic, and never make more than a fixed number of them wait in the input buffer:
//!   [`OPTION_PAYLOAD_BYTES_MAX`] and a header while shaking hands, one payload and a header after it.
//! - Where one message ends and the next begins never depends on whether the message was acceptable: what is refused is
//!   consumed first.
//!
//! It leaves sockets, timeouts and the order of replies to the front end, and everything about data to the volume.
//! `protocol/README.md` lists what is answered to what.

pub mod consts;
mod handshake;
mod options;
mod reply;
mod request;

pub use consts::{Errno, PAYLOAD_BYTES_MAX};
pub use handshake::{
    Admission, Agreed, Ending, Export, HANDSHAKE_BYTES_MAX, Handshake, HandshakeError, OPTIONS_MAX, Offer,
    Step, Tls,
};
pub use options::{NAME_BYTES_MAX, OPTION_PAYLOAD_BYTES_MAX};
pub use reply::{
    StatusDescriptor, put_data_chunk_head, put_error_chunk, put_hole_chunk, put_simple, put_status_chunk,
};
pub use request::{
    Command, Head, REQUEST_HEADER_BYTES, Request, RequestError, RequestParser, Terms, validate,
};
