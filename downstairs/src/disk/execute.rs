//! Carries out one disk operation at once, on the calling thread.
//!
//! Invariants:
//! - The same plans and the same order as in the pool: data, contexts, answer.
//!
//! Left to others: queues, batches and stage times ([`super::pool`], which uses this for all but data).

use bytes::Bytes;
use newel_protocol::BLOCK_BYTES;
use newel_protocol::wire::ZeroMode;

use super::buffer::AlignedBuf;
use super::change::Change;
use super::read::ReadPlan;
use super::region::RegionCore;
use super::storage::Storage;
use crate::core::api::{DiskError, DiskOp, DiskOutcome};

impl<S: Storage> RegionCore<S> {
    pub fn execute(&self, op: &DiskOp) -> Result<DiskOutcome, DiskError> {
        match op {
            DiskOp::Read { range, mode } => {
                let plan = self.plan_read(*range, *mode)?;
                let (states, data) = self.fetch_now(plan);
                Ok(DiskOutcome::Read { states, data })
            }
            DiskOp::Write { range, version, crcs, data } => {
                let change = self.plan_write(*range, *version, crcs, data.len())?;
                self.change_now(&change, data)
            }
            DiskOp::Zero { range, version, mode } => {
                let change = self.plan_zero(*range, *version, *mode)?;
                let zeros = if *mode == ZeroMode::Allocate { vec![0; range.bytes()] } else { Vec::new() };
                self.change_now(&change, &zeros)
            }
            DiskOp::Store { blocks, join, data } => {
                let change = self.plan_store(blocks, *join, data.len())?;
                self.change_now(&change, data)
            }
            DiskOp::Flush { mark } => {
                self.flush(*mark)?;
                self.punch_flushed();
                Ok(DiskOutcome::Done)
            }
            DiskOp::ActivityLog { entries } => self.enter(entries).map(|()| DiskOutcome::Done),
            DiskOp::Header(change) => self.apply(change).map(|()| DiskOutcome::Done),
            DiskOp::Digests { first, count } => Ok(DiskOutcome::Digests(self.digests(*first, *count))),
            DiskOp::Contexts { extent } => self.extent_states(*extent).map(DiskOutcome::Contexts),
            DiskOp::Close => self.close().map(|()| DiskOutcome::Done),
        }
    }

    pub(super) fn change_now(&self, change: &Change, data: &[u8]) -> Result<DiskOutcome, DiskError> {
        match self.write_pieces_now(change, data) {
            Ok(()) => {
                self.finish(&[change])?;
                self.end(change);
                Ok(DiskOutcome::Done)
            }
            Err(error) => {
                self.abort(change)?;
                Err(error)
            }
        }
    }

    /// Writes the data of a plan, piece by piece.
    pub fn write_pieces_now(&self, change: &Change, data: &[u8]) -> Result<(), DiskError> {
        for piece in &change.pieces {
            let bytes = data.get(piece.bytes.clone()).unwrap_or_default();
            debug_assert_eq!(bytes.len(), piece.range.count as usize * BLOCK_BYTES);
            self.storage
                .write_direct(self.block_offset(piece.range.start), bytes)
                .map_err(|error| self.error("a write", &format_args!("blocks {}", piece.range), &error))?;
        }
        Ok(())
    }

    fn fetch_now(&self, plan: ReadPlan) -> (Vec<newel_protocol::BlockState>, Bytes) {
        let Some(fetch) = plan.fetch else { return self.finish_read(plan, Bytes::new()) };
        let mut data = AlignedBuf::zeroed(fetch.bytes());
        match self.storage.read_direct(self.block_offset(fetch.start), &mut data) {
            Ok(()) => self.finish_read(plan, Bytes::from_owner(data)),
            Err(_) => self.read_block_by_block(plan),
        }
    }
}
