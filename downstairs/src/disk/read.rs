//! Reads: contexts from the table, data from the device.
//!
//! Invariants:
//! - One state per block of the range; the data are those of the blocks that the mode asks for, in order, whole.
//! - Without a gap the buffer that the device filled is handed on as it is.
//! - A block the disk can't read is `Unreadable`; it never fails its neighbours.
//! - Verified data is not checked against its checksum here: the upstairs does, with the state beside it. Only in mode
//!   `Verify` it is, against the contexts as they lie on the disk; then a mismatch is `Unreadable` and no data is handed on.
//!   The checksum of an unverified block is taken from what is read now, so that state and data agree.
//!
//! Left to others: reading the data ([`super::pool`], [`super::execute`]).

use bytes::{Bytes, BytesMut};
use newel_protocol::crc::crc;
use newel_protocol::wire::ReadMode;
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, BlockState};

use super::buffer::AlignedBuf;
use super::context::{ContextKind, Pair};
use super::region::RegionCore;
use super::storage::Storage;
use crate::core::api::DiskError;

#[derive(Debug)]
pub struct ReadPlan {
    range: BlockRange,
    mode: ReadMode,
    states: Vec<BlockState>,
    /// The smallest range that holds every block whose data is asked for.
    pub fetch: Option<BlockRange>,
    wanted: u32,
}

impl ReadPlan {
    fn new(range: BlockRange, mode: ReadMode, states: Vec<BlockState>) -> Self {
        let mut plan = Self { range, mode, states, fetch: None, wanted: 0 };
        plan.settle();
        plan
    }

    fn wants(mode: ReadMode, state: &BlockState) -> bool {
        match mode {
            ReadMode::Data | ReadMode::Verify => state.kind == BlockKind::Data,
            ReadMode::Raw => matches!(state.kind, BlockKind::Data | BlockKind::Unverified),
            ReadMode::Contexts => false,
        }
    }

    /// True if the data is handed on as it is read, and nothing is computed from it.
    pub fn is_plain(&self) -> bool {
        self.mode == ReadMode::Data && self.fetch.is_some_and(|fetch| fetch.count == self.wanted)
    }

    fn settle(&mut self) {
        let mut wanted =
            self.range.blocks().zip(&self.states).filter(|(_, state)| Self::wants(self.mode, state));
        let Some((first, _)) = wanted.next() else {
            (self.fetch, self.wanted) = (None, 0);
            return;
        };
        let (last, more) = wanted.fold((first, 0), |(_, count), (block, _)| (block, count + 1));
        let count = u32::try_from(last - first + 1).unwrap_or(u32::MAX);
        (self.fetch, self.wanted) = (Some(BlockRange { start: first, count }), more + 1);
    }
}

impl<S: Storage> RegionCore<S> {
    pub fn plan_read(&self, range: BlockRange, mode: ReadMode) -> Result<ReadPlan, DiskError> {
        self.check_range(range)?;
        let pairs = match mode {
            ReadMode::Verify => self.read_table(range)?,
            ReadMode::Data | ReadMode::Contexts | ReadMode::Raw => self.read_pairs(range)?,
        };
        let states = match mode {
            // Raw reads fetch the data of unverified blocks anyhow.
            ReadMode::Raw => pairs.iter().map(Pair::state).collect(),
            ReadMode::Data | ReadMode::Contexts | ReadMode::Verify => {
                range.blocks().zip(&pairs).map(|(block, pair)| self.state_of(block, pair)).collect()
            }
        };
        Ok(ReadPlan::new(range, mode, states))
    }

    /// The plan, if it can be made without touching the disk or waiting for whoever does.
    pub fn plan_read_now(&self, range: BlockRange, mode: ReadMode) -> Option<ReadPlan> {
        self.check_range(range).ok()?;
        if !matches!(mode, ReadMode::Data | ReadMode::Contexts) {
            return None;
        }
        let pairs = self.pairs.read_now(range, self.newest_generation())?;
        // The checksum of an unverified block is that of what lies there.
        let known = pairs.iter().all(|pair| pair.latest.kind != ContextKind::Unverified);
        known.then(|| ReadPlan::new(range, mode, pairs.iter().map(Pair::state).collect()))
    }

    /// True if the data that is asked for has the checksums that the contexts name. `data` are the bytes of `plan.fetch`.
    pub fn matches(&self, plan: &ReadPlan, data: &[u8]) -> bool {
        let Some(fetch) = plan.fetch else { return true };
        plan.range.blocks().zip(&plan.states).all(|(block, state)| {
            state.kind != BlockKind::Data || block_of(data, fetch, block).map(crc) == Some(state.crc)
        })
    }

    /// `data` are the bytes of `plan.fetch`.
    pub fn finish_read(&self, mut plan: ReadPlan, data: Bytes) -> (Vec<BlockState>, Bytes) {
        let Some(fetch) = plan.fetch else { return (plan.states, Bytes::new()) };
        if plan.mode == ReadMode::Verify {
            for (block, state) in plan.range.blocks().zip(&mut plan.states) {
                if state.kind == BlockKind::Data && block_of(&data, fetch, block).map(crc) != Some(state.crc)
                {
                    state.kind = BlockKind::Unreadable;
                }
            }
            return (plan.states, Bytes::new());
        }
        if plan.mode == ReadMode::Raw {
            for (block, state) in plan.range.blocks().zip(&mut plan.states) {
                if state.kind == BlockKind::Unverified
                    && let Some(found) = block_of(&data, fetch, block)
                {
                    state.crc = crc(found);
                }
            }
        }
        if plan.wanted == fetch.count {
            return (plan.states, data);
        }
        let mut packed = BytesMut::with_capacity(plan.wanted as usize * BLOCK_BYTES);
        for (block, state) in plan.range.blocks().zip(&plan.states) {
            if ReadPlan::wants(plan.mode, state)
                && let Some(found) = block_of(&data, fetch, block)
            {
                packed.extend_from_slice(found);
            }
        }
        (plan.states, packed.freeze())
    }

    /// The device failed to read the range as a whole: finds out which blocks it is.
    pub fn read_block_by_block(&self, mut plan: ReadPlan) -> (Vec<BlockState>, Bytes) {
        let Some(fetch) = plan.fetch else { return (plan.states, Bytes::new()) };
        let mut data = AlignedBuf::zeroed(fetch.bytes());
        for (block, state) in plan.range.blocks().zip(&mut plan.states) {
            let at = block.checked_sub(fetch.start).and_then(|at| usize::try_from(at).ok());
            let place = at.and_then(|at| data.get_mut(at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES));
            if ReadPlan::wants(plan.mode, state)
                && let Some(place) = place
                && self.storage.read_direct(self.block_offset(block), place).is_err()
            {
                state.kind = BlockKind::Unreadable;
            }
        }
        plan.wanted = 0; // Forces what is left to be packed.
        self.finish_read(plan, Bytes::from_owner(data))
    }

    /// A block's state with the checksum of an unverified one, for which its data has to be read.
    pub(crate) fn state_of(&self, block: u64, pair: &Pair) -> BlockState {
        let mut state = pair.state();
        if pair.latest.kind == ContextKind::Unverified {
            let mut data = AlignedBuf::zeroed(BLOCK_BYTES);
            match self.storage.read_direct(self.block_offset(block), &mut data) {
                Ok(()) => state.crc = crc(&data),
                Err(_) => state.kind = BlockKind::Unreadable,
            }
        }
        state
    }
}

fn block_of(data: &[u8], fetch: BlockRange, block: u64) -> Option<&[u8]> {
    let at = usize::try_from(block.checked_sub(fetch.start)?).ok()?.checked_mul(BLOCK_BYTES)?;
    data.get(at..at.checked_add(BLOCK_BYTES)?)
}
