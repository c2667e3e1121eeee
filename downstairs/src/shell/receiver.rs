//! Cuts a connection's bytes into frames.
//!
//! Invariants:
//! - The buffer grows only to the size of a frame whose header was checked, and shrinks again after it.
//! - A large payload ends up page-aligned without being copied (except for what was read with its header), so that the
//!   disk can take it as it is.

use bytes::buf::Limit;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use newel_protocol::wire::{Decoder, FrameError, HEADER_BYTES, Request};

/// What one read may bring: 15 writes of 4 KiB.
const CHUNK_BYTES: usize = 64 << 10;
/// Below this much room the next read gets a new chunk.
const LEAST_ROOM_BYTES: usize = 16 << 10;
/// Payloads from here on are aligned. Below, copying them again costs less than a buffer of their own.
const LARGE_BYTES: usize = 64 << 10;
const PAGE_BYTES: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Receiver {
    decoder: Decoder,
    buffer: BytesMut,
    /// The chunk to go on with after a large frame, which has a buffer of its own.
    chunk: Option<BytesMut>,
}

impl Receiver {
    /// Where the next read goes.
    pub(super) fn room(&mut self) -> Limit<&mut BytesMut> {
        let limit = if self.chunk.is_some() {
            // Not past the large frame, so that the next one starts in the chunk.
            self.decoder.wanted().saturating_sub(self.buffer.len()).max(1)
        } else {
            let missing = self.decoder.wanted().saturating_sub(self.buffer.len());
            if self.buffer.capacity() - self.buffer.len() < missing.max(LEAST_ROOM_BYTES) {
                self.buffer.reserve(missing.max(CHUNK_BYTES));
            }
            self.buffer.capacity() - self.buffer.len()
        };
        (&mut self.buffer).limit(limit)
    }

    /// The next whole request, if it has arrived.
    pub(super) fn next(&mut self) -> Result<Option<(Request, Bytes)>, FrameError> {
        let next = self.decoder.decode(&mut self.buffer)?;
        if next.is_some() {
            if self.buffer.is_empty()
                && let Some(chunk) = self.chunk.take()
            {
                self.buffer = chunk;
            }
        } else if self.chunk.is_none() {
            self.align();
        }
        Ok(next)
    }

    /// If a large frame has begun, moves it to a buffer of its own in which its payload will be aligned.
    fn align(&mut self) {
        let total = self.decoder.wanted();
        // The header was checked before the decoder wanted more than it.
        let Some(body) = (total > HEADER_BYTES).then(|| self.buffer.get(4..8)).flatten() else { return };
        let body = body.try_into().map_or(0, u32::from_le_bytes) as usize;
        let payload_at = HEADER_BYTES + body;
        if total.saturating_sub(payload_at) < LARGE_BYTES {
            return;
        }
        let mut aligned = BytesMut::with_capacity(total + PAGE_BYTES);
        let address = aligned.as_ptr().addr() + payload_at;
        let pad = address.next_multiple_of(PAGE_BYTES) - address;
        aligned.resize(pad, 0);
        aligned.advance(pad);
        aligned.extend_from_slice(&self.buffer);
        self.buffer.clear();
        self.chunk = Some(std::mem::replace(&mut self.buffer, aligned));
    }
}

#[cfg(test)]
mod tests {
    use newel_protocol::wire::{Op, encode};
    use newel_protocol::{BLOCK_BYTES, BlockRange, JobId};
    use proptest::prelude::*;

    use super::*;

    fn write(job: u64, blocks: u32) -> (Request, Bytes) {
        let op = Op::Write { range: BlockRange::new(0, blocks), crcs: vec![7; blocks as usize] };
        let byte = u8::try_from(job % 251).unwrap();
        (Request::Job { job: JobId(job), op }, vec![byte; blocks as usize * BLOCK_BYTES].into())
    }

    /// Sends frames in pieces of the given sizes and expects them whole on the other side.
    fn check(blocks: &[u32], pieces: &[usize]) {
        let requests: Vec<_> = (0..).zip(blocks).map(|(job, &blocks)| write(job, blocks)).collect();
        let mut stream = BytesMut::new();
        for (request, payload) in &requests {
            let frame = encode(request, payload.clone()).unwrap();
            stream.extend_from_slice(&frame.head);
            stream.extend_from_slice(&frame.payload);
        }
        let mut receiver = Receiver::default();
        let mut got = Vec::new();
        let mut pieces = pieces.iter().copied().cycle();
        while !stream.is_empty() {
            let mut room = receiver.room();
            let size = pieces.next().unwrap_or(1).clamp(1, stream.len().min(room.remaining_mut()));
            room.put_slice(&stream.split_to(size));
            while let Some((request, payload)) = receiver.next().unwrap() {
                if payload.len() > LARGE_BYTES && size < HEADER_BYTES + payload.len() {
                    assert_eq!(payload.as_ptr().addr() % PAGE_BYTES, 0, "{} bytes", payload.len());
                }
                got.push((request, payload));
            }
            assert!(receiver.buffer.capacity() <= 5 << 20, "the buffer stays bounded");
        }
        assert_eq!(got, requests);
    }

    #[test]
    fn frames_of_all_sizes_arrive() {
        check(&[1, 256, 1, 1024, 3, 1024, 1024], &[usize::MAX]);
        check(&[1, 256, 1], &[1, 7, 4096]);
        check(&[1; 100], &[20_000]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn however_they_are_cut(
            blocks in proptest::collection::vec(prop_oneof![1..4_u32, 1..300_u32], 1..12),
            pieces in proptest::collection::vec(1..200_000_usize, 1..8),
        ) {
            check(&blocks, &pieces);
        }
    }

    #[test]
    fn garbage_is_refused() {
        let mut receiver = Receiver::default();
        receiver.room().put_slice(b"GET / HTTP/1.1\r\nHost: newel\r\n\r\n");
        assert!(matches!(receiver.next(), Err(FrameError::Magic { .. })));
    }
}
