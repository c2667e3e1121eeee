//! What the disk does without us: the same requests from one bare loop, to measure the pool against.
//!
//! Invariants:
//! - The data of the region is overwritten without contexts: only for a region made to be measured.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::aio::Ring;
use super::buffer::AlignedBuf;
use super::engine::{Engine, Payload, Request};
use super::file::Region;
use super::storage::Storage;

/// Writes or reads `bytes` at the blocks that `next` names, `depth` at a time, and returns how many there were.
#[expect(clippy::disallowed_methods, reason = "it measures time")]
pub fn bare_loop(
    region: &Region,
    bytes: usize,
    depth: u32,
    write: bool,
    time: Duration,
    mut next: impl FnMut() -> u64,
) -> io::Result<u64> {
    let ring = Ring::new(region.storage().direct_file()?.into(), depth, None)?;
    let data = Bytes::from_owner(AlignedBuf::zeroed(bytes));
    let mut refused = Vec::new();
    let (mut done, mut in_flight, mut count) = (Vec::new(), 0, 0);
    let mut requests = VecDeque::new();
    let end = Instant::now() + time;
    loop {
        let running = Instant::now() < end;
        while running && in_flight < depth {
            let payload = if write {
                Payload::Write(data.clone())
            } else {
                Payload::Read(region.storage().buffers.take(bytes))
            };
            requests.push_back(Request { offset: region.layout().block_offset(next()), payload, user: () });
            in_flight += 1;
        }
        if in_flight == 0 {
            return region.storage().sync().map(|()| count);
        }
        ring.submit(&mut requests, usize::MAX, &mut refused);
        ring.wait(&mut done)?;
        for completion in done.drain(..).chain(refused.drain(..)) {
            completion.result?;
            in_flight -= 1;
            count += 1;
        }
    }
}
