//! One GET over a unix socket or TCP.
//!
//! Invariants:
//! - Bounded in the silence of the other side and in the size of the answer.
//! - HTTP/1.0: the body comes in one piece and ends with the connection.

use std::io::{self, Read as _, Write as _};
use std::time::Duration;

use crate::nbd::{Address, Stream};

/// Far above all that is asked for.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: String,
}

/// Whatever lies at `path`, with its query.
///
/// # Errors
/// If nobody answers, is silent for too long, or doesn't speak HTTP.
pub fn get(address: &Address, path: &str, silence: Duration) -> io::Result<Answer> {
    let mut stream = Stream::connect(address)?;
    stream.set_silence(silence)?;
    // In one piece: whoever has read the head may close.
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: newel\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, format!("no answer over HTTP: {answer:?}"));
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(malformed)?;
    let status = head.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1));
    let status = status.and_then(|code| code.parse().ok()).ok_or_else(malformed)?;
    Ok(Answer { status, body: body.to_owned() })
}

/// `text` as a value of a query.
pub fn encoded(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte.is_ascii_alphanumeric() {
            true => out.push(byte.into()),
            false => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}
