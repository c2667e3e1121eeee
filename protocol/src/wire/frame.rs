//! Frames: the header, its bounds and checksums, and an incremental decoder.
//!
//! ```text
//! offset  size  field (little endian)
//!      0     2  magic 0x574e ("NW")
//!      2     2  kind: 1 request (upstairs to replica), 2 reply
//!      4     4  body length, at most MAX_BODY_BYTES
//!      8     4  payload length, at most MAX_PAYLOAD_BYTES
//!     12     4  crc32c of the body
//!     16     4  crc32c of bytes 0..16
//!     20        body, then payload
//! ```
//!
//! Invariants:
//! - Lengths are believed only after the header's checksum matched and both are within bounds.
//! - The payload has no checksum of its own: every block of it has one in the body.

use bytes::{Buf, Bytes, BytesMut};
use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;

use super::body::{self, BodyError};
use super::message::{Reply, Request};
use crate::types::MAX_JOB_BYTES;

pub const HEADER_BYTES: usize = 20;
/// The largest body is a `Store` of one whole extent: 1024 blocks of 25 bytes, and some.
pub const MAX_BODY_BYTES: usize = 64 * 1024;
/// A job stays within one extent.
pub const MAX_PAYLOAD_BYTES: usize = MAX_JOB_BYTES;
pub const MAX_FRAME_BYTES: usize = HEADER_BYTES + MAX_BODY_BYTES + MAX_PAYLOAD_BYTES;

const MAGIC: u16 = 0x574e;

#[derive(Debug, Error)]
pub enum FrameError {
    #[error("not the replica wire: the frame starts with {found:#06x} instead of {MAGIC:#06x}")]
    Magic { found: u16 },
    #[error("frame of kind {found} where kind {expected} belongs")]
    Kind { expected: u16, found: u16 },
    #[error("frame header checksum is {found:#010x}, its bytes give {expected:#010x}")]
    HeaderCrc { expected: u32, found: u32 },
    #[error("frame body checksum is {found:#010x}, its bytes give {expected:#010x}")]
    BodyCrc { expected: u32, found: u32 },
    #[error("frame body of {length} bytes, over the limit of {MAX_BODY_BYTES}")]
    BodyTooLong { length: u32 },
    #[error("frame payload of {length} bytes, over the limit of {MAX_PAYLOAD_BYTES}")]
    PayloadTooLong { length: u32 },
    #[error(transparent)]
    Body(#[from] BodyError),
}

/// What can travel in a frame's body.
pub trait Message: Serialize + DeserializeOwned {
    const KIND: u16;
}

impl Message for Request {
    const KIND: u16 = 1;
}

impl Message for Reply {
    const KIND: u16 = 2;
}

/// An encoded frame: header and body in one piece, the payload untouched beside it, so that one payload serves several
/// connections without a copy.
#[derive(Clone, Debug)]
pub struct Frame {
    pub head: Bytes,
    pub payload: Bytes,
}

impl Frame {
    pub fn len(&self) -> usize {
        self.head.len() + self.payload.len()
    }

    pub fn is_empty(&self) -> bool {
        self.head.is_empty()
    }
}

/// Encodes `message` with `payload` beside it. Fails only if a bound is exceeded, which is a defect of the caller.
pub fn encode<M: Message>(message: &M, payload: Bytes) -> Result<Frame, FrameError> {
    let mut out = Vec::with_capacity(256);
    out.resize(HEADER_BYTES, 0);
    body::encode_into(message, &mut out)?;
    let body_length = u32::try_from(out.len() - HEADER_BYTES).unwrap_or(u32::MAX);
    let payload_length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let head = Head { body_length, payload_length, body_crc: crc32c::crc32c(&out[HEADER_BYTES..]) };
    head.check_bounds()?;
    out[..HEADER_BYTES].copy_from_slice(&head.encode(M::KIND));
    Ok(Frame { head: out.into(), payload })
}

/// A frame's header, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub body_length: u32,
    pub payload_length: u32,
    body_crc: u32,
}

impl Head {
    fn encode(self, kind: u16) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        out[2..4].copy_from_slice(&kind.to_le_bytes());
        out[4..8].copy_from_slice(&self.body_length.to_le_bytes());
        out[8..12].copy_from_slice(&self.payload_length.to_le_bytes());
        out[12..16].copy_from_slice(&self.body_crc.to_le_bytes());
        let crc = crc32c::crc32c(&out[..16]);
        out[16..20].copy_from_slice(&crc.to_le_bytes());
        out
    }

    fn decode(mut bytes: &[u8], expected_kind: u16) -> Result<Self, FrameError> {
        let expected = crc32c::crc32c(&bytes[..16]);
        let magic = bytes.get_u16_le();
        if magic != MAGIC {
            return Err(FrameError::Magic { found: magic });
        }
        let kind = bytes.get_u16_le();
        let head = Self {
            body_length: bytes.get_u32_le(),
            payload_length: bytes.get_u32_le(),
            body_crc: bytes.get_u32_le(),
        };
        let found = bytes.get_u32_le();
        if found != expected {
            return Err(FrameError::HeaderCrc { expected, found });
        }
        if kind != expected_kind {
            return Err(FrameError::Kind { expected: expected_kind, found: kind });
        }
        head.check_bounds()?;
        Ok(head)
    }

    fn check_bounds(self) -> Result<(), FrameError> {
        if self.body_length as usize > MAX_BODY_BYTES {
            return Err(FrameError::BodyTooLong { length: self.body_length });
        }
        if self.payload_length as usize > MAX_PAYLOAD_BYTES {
            return Err(FrameError::PayloadTooLong { length: self.payload_length });
        }
        Ok(())
    }

    fn total(self) -> usize {
        HEADER_BYTES + self.body_length as usize + self.payload_length as usize
    }
}

/// Takes frames off the front of a receive buffer. One per connection and direction.
#[derive(Debug, Default)]
pub struct Decoder {
    head: Option<Head>,
}

impl Decoder {
    /// The next whole frame at the front of `buffer`, or `None` if more bytes are needed; then [`Decoder::wanted`]
    /// says how many the buffer must hold. After an error the connection must be closed.
    pub fn decode<M: Message>(&mut self, buffer: &mut BytesMut) -> Result<Option<(M, Bytes)>, FrameError> {
        let head = match self.head {
            Some(head) => head,
            None if buffer.len() < HEADER_BYTES => return Ok(None),
            None => *self.head.insert(Head::decode(&buffer[..HEADER_BYTES], M::KIND)?),
        };
        if buffer.len() < head.total() {
            return Ok(None);
        }
        self.head = None;
        let body_end = HEADER_BYTES + head.body_length as usize;
        let body = &buffer[HEADER_BYTES..body_end];
        let expected = crc32c::crc32c(body);
        if expected != head.body_crc {
            return Err(FrameError::BodyCrc { expected, found: head.body_crc });
        }
        let message = body::decode(body)?;
        buffer.advance(body_end);
        let payload = buffer.split_to(head.payload_length as usize).freeze();
        Ok(Some((message, payload)))
    }

    /// The number of bytes that the buffer must hold before [`Decoder::decode`] can go on.
    pub fn wanted(&self) -> usize {
        self.head.map_or(HEADER_BYTES, Head::total)
    }
}
