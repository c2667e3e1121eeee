//! A settled change of a request that isn't answered yet.
//!
//! The guest has no answer for it, and so no reason to send it again; but a read may have shown it. Should all replicas lose
//! it with their power, it is stored once more, as a copy under its own version.

use bytes::{Bytes, BytesMut};
use newel_protocol::wire::{Op, StoredBlock};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, BlockState, ExtentId, Version};

#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) version: Version,
    pub(super) op: Op,
    pub(super) payload: Bytes,
}

impl Kept {
    fn range(&self) -> Option<BlockRange> {
        match self.op {
            Op::Write { range, .. } | Op::Zero { range, .. } => Some(range),
            Op::Read { .. } | Op::Flush | Op::Store { .. } => None,
        }
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = u64> + use<> {
        self.range().into_iter().flat_map(|range| range.blocks())
    }

    /// The job that stores those of its blocks that are wanted.
    pub(super) fn as_store(&self, wanted: impl Fn(u64) -> bool) -> Option<(ExtentId, Op, Bytes)> {
        let range = self.range()?;
        let mut payload = BytesMut::new();
        let mut blocks = Vec::new();
        for (index, block) in range.blocks().enumerate().filter(|&(_, block)| wanted(block)) {
            let state = |kind, crc| BlockState { version: self.version, crc, kind };
            let state = match &self.op {
                Op::Write { crcs, .. } => {
                    payload
                        .extend_from_slice(self.payload.get(index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES)?);
                    state(BlockKind::Data, *crcs.get(index)?)
                }
                Op::Zero { .. } | Op::Read { .. } | Op::Flush | Op::Store { .. } => state(BlockKind::Zero, 0),
            };
            blocks.push(StoredBlock { block, state });
        }
        let op = Op::Store { blocks, join: self.version };
        (!payload.is_empty() || matches!(self.op, Op::Zero { .. }))
            .then(|| (range.extent(), op, payload.freeze()))
    }
}
