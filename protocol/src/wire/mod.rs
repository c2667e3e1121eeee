//! The replica wire: what an upstairs and a downstairs say to each other over one TCP connection.
//!
//! A frame is a fixed header ([`frame`]), a bincode body ([`body`], the only user of bincode) and a raw payload that never
//! passes through serde. [`message`] lists what can be said. `protocol/README.md` is the contract in words.

mod body;
mod frame;
mod message;
#[cfg(test)]
mod tests;

pub use body::BodyError;
pub use frame::{
    Decoder, Frame, FrameError, HEADER_BYTES, Head, MAX_BODY_BYTES, MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES,
    Message, encode,
};
pub use message::{
    Hello, JobError, Membership, Op, ReadMode, Refusal, Reply, Request, StageTimes, StoredBlock, VERSION,
    Welcome, ZeroMode,
};
