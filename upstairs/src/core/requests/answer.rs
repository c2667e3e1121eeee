//! What guests are told of reads and of block states: the blocks of replicas, cut to what was asked for.
//!
//! Invariants:
//! - Data is never copied: segments are slices of what replicas sent.
//! - An answer covers exactly what was asked for. If something is missing it is an error, never made up for by zeros.

use bytes::Bytes;
use newel_protocol::{BLOCK_BYTES, BlockKind};

use super::BLOCK;
use crate::core::api::{GuestError, GuestReply, Segment, StatusExtent};
use crate::core::jobs::AnswerBlocks;

/// The whole read as segments, cut to what was asked for.
pub(super) fn read_reply(parts: Vec<Option<AnswerBlocks>>, offset: u64, length: u64) -> GuestReply {
    let mut segments = Segments {
        out: Vec::with_capacity(1),
        skip: usize::try_from(offset % BLOCK).unwrap_or(0),
        left: usize::try_from(length).unwrap_or(usize::MAX),
    };
    for part in parts {
        let Some(AnswerBlocks { states, data }) = part else { return GuestReply::Failed(GuestError::Io) };
        let mut data = data.into_iter();
        let mut current = Bytes::new();
        let mut index = 0;
        while index < states.len() {
            let kind = states[index].kind;
            let mut run = states[index..].iter().take_while(|state| state.kind == kind).count();
            if kind == BlockKind::Data {
                if current.is_empty() {
                    current = data.next().unwrap_or_default();
                }
                run = run.min(current.len() / BLOCK_BYTES);
                if run == 0 {
                    return GuestReply::Failed(GuestError::Io);
                }
                segments.push_data(current.split_to(run * BLOCK_BYTES));
            } else {
                segments.push_zeros(run * BLOCK_BYTES);
            }
            index += run;
        }
    }
    GuestReply::Data(segments.out)
}

/// Collects segments while cutting the front and the back to what was asked for.
struct Segments {
    out: Vec<Segment>,
    skip: usize,
    left: usize,
}

impl Segments {
    fn take(&mut self, length: usize) -> std::ops::Range<usize> {
        let from = self.skip.min(length);
        self.skip -= from;
        let take = (length - from).min(self.left);
        self.left -= take;
        from..from + take
    }

    fn push_data(&mut self, data: Bytes) {
        let range = self.take(data.len());
        if !range.is_empty() {
            self.out.push(Segment::Data(data.slice(range)));
        }
    }

    fn push_zeros(&mut self, length: usize) {
        let length = u32::try_from(self.take(length).len()).unwrap_or(u32::MAX);
        match self.out.last_mut() {
            Some(Segment::Zeros(zeros)) => *zeros += length,
            Some(Segment::Data(_)) | None if length > 0 => self.out.push(Segment::Zeros(length)),
            Some(Segment::Data(_)) | None => {}
        }
    }
}

pub(super) fn status_reply(part: Option<AnswerBlocks>, offset: u64, length: u64) -> GuestReply {
    let Some(answer) = part else { return GuestReply::Failed(GuestError::Io) };
    let mut extents: Vec<StatusExtent> = Vec::new();
    let mut skip = offset % BLOCK;
    let mut left = length;
    for state in &answer.states {
        let take = (BLOCK - skip).min(left);
        skip = 0;
        left -= take;
        if take == 0 {
            break;
        }
        let hole = state.kind == BlockKind::Zero;
        match extents.last_mut() {
            Some(last) if last.hole == hole => last.length += take,
            Some(_) | None => extents.push(StatusExtent { length: take, hole }),
        }
    }
    GuestReply::Status(extents)
}

#[cfg(test)]
mod tests {
    use newel_protocol::{BlockState, Version};

    use super::*;

    fn answer(kinds: &[BlockKind]) -> AnswerBlocks {
        let states = kinds.iter().map(|&kind| BlockState { version: Version::NEVER, crc: 0, kind }).collect();
        let blocks = kinds.iter().filter(|&&kind| kind == BlockKind::Data).count();
        let data: Vec<u8> =
            (0..blocks * BLOCK_BYTES).map(|i| u8::try_from(i / BLOCK_BYTES + 1).unwrap()).collect();
        AnswerBlocks { states, data: vec![data.into()] }
    }

    fn flat(reply: &GuestReply) -> Vec<u8> {
        let GuestReply::Data(segments) = reply else { panic!("{reply:?}") };
        segments
            .iter()
            .flat_map(|segment| match segment {
                Segment::Data(data) => data.to_vec(),
                Segment::Zeros(length) => vec![0; *length as usize],
            })
            .collect()
    }

    #[test]
    fn reads_are_cut_to_what_was_asked_for() {
        use BlockKind::{Data, Zero};
        let whole: Vec<u8> = [1_u8, 0, 0, 2, 3].iter().flat_map(|&byte| vec![byte; BLOCK_BYTES]).collect();
        for offset in [0, 1, 512, 4095, 4096, 9000] {
            for length in [1, 511, 4096, 8192, 11_000] {
                let parts = vec![Some(answer(&[Data, Zero, Zero, Data, Data]))];
                let first = offset / BLOCK_BYTES;
                let parts_from_first = parts.into_iter().map(|p| {
                    p.map(|mut p| {
                        let dropped = p.states.drain(..first).filter(|s| s.kind == Data).count();
                        p.data[0] = p.data[0].slice(dropped * BLOCK_BYTES..);
                        p
                    })
                });
                let reply = read_reply(parts_from_first.collect(), offset as u64, length as u64);
                assert_eq!(flat(&reply), whole[offset..offset + length], "{offset}+{length}");
            }
        }
    }

    #[test]
    fn status_is_cut_and_merged() {
        use BlockKind::{Data, Zero};
        let reply = status_reply(Some(answer(&[Data, Data, Zero, Data])), 100, 3 * BLOCK);
        let GuestReply::Status(extents) = reply else { panic!() };
        let lengths: Vec<_> = extents.iter().map(|e| (e.length, e.hole)).collect();
        assert_eq!(lengths, [(2 * BLOCK - 100, false), (BLOCK, true), (100, false)]);
    }
}
