//! Message bodies: bincode 1.3.3 with fixed-width little-endian integers, a size limit and trailing bytes rejected.
//!
//! This file alone knows which serialiser is used, so that it can be replaced. The golden bytes in `frame.rs` fix what it
//! must produce.

use bincode::Options;
use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;

use super::frame::MAX_BODY_BYTES;

#[derive(Debug, Error)]
#[error("malformed message body: {0}")]
pub struct BodyError(#[from] bincode::Error);

fn options() -> impl Options {
    bincode::DefaultOptions::new()
        .with_fixint_encoding()
        .with_limit(MAX_BODY_BYTES as u64)
        .reject_trailing_bytes()
}

pub(super) fn encode_into<T: Serialize>(message: &T, out: &mut Vec<u8>) -> Result<(), BodyError> {
    Ok(options().serialize_into(out, message)?)
}

pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, BodyError> {
    Ok(options().deserialize(bytes)?)
}
