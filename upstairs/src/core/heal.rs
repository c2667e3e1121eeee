//! Healing: a replica whose copy of a block is bad gets a good one from another.
//!
//! Invariants:
//! - A block is healed only with data that matched its checksum, under its own version, and only if the replica holds
//!   nothing newer by then (the join point is the next version).
//! - At most [`HEALS_MAX`] at once; what exceeds it is found again by the next read.

use bytes::Bytes;
use newel_protocol::wire::{Op, ReadMode, StoredBlock};
use newel_protocol::{BlockKind, BlockRange, BlockState, crc};

use super::Core;
use super::api::{LogLevel, ReplicaId, ReplicaSet};
use super::jobs::Purpose;

const HEALS_MAX: usize = 64;

impl Core {
    pub(super) fn start_heal(&mut self, target: ReplicaId, block: u64) {
        if self.config.heal && self.heals_in_flight < HEALS_MAX && self.replica(target).is_active() {
            self.heals_in_flight += 1;
            self.heal_from_next(target, block, ReplicaSet::only(target));
        }
    }

    /// Asks the next Active replica that wasn't asked yet.
    pub(super) fn heal_from_next(&mut self, target: ReplicaId, block: u64, tried: ReplicaSet) {
        let source = self.active().without(tried).iter().next();
        match source.filter(|_| self.replica(target).is_active()) {
            Some(source) => {
                let mut tried = tried;
                tried.insert(source);
                let op = Op::Read { range: BlockRange::single(block), mode: ReadMode::Data };
                let purpose = Purpose::HealRead { target, block, tried };
                self.send_internal_job(op, Bytes::new(), purpose, ReplicaSet::only(source));
            }
            None => {
                self.heals_in_flight = self.heals_in_flight.saturating_sub(1);
                self.log(LogLevel::Warn, format!("replica {target}: block {block} can't be healed now"));
            }
        }
    }

    pub(super) fn heal_with(
        &mut self,
        target: ReplicaId,
        block: u64,
        tried: ReplicaSet,
        states: &[BlockState],
        data: &Bytes,
    ) {
        let good = states.first().copied().filter(|state| match state.kind {
            BlockKind::Zero => true,
            BlockKind::Data => crc::first_mismatch(data, &[state.crc]).is_none(),
            BlockKind::Unverified | BlockKind::Unreadable => false,
        });
        let Some(state) = good else {
            self.heal_from_next(target, block, tried);
            return;
        };
        if !self.replica(target).is_active() {
            self.heals_in_flight = self.heals_in_flight.saturating_sub(1);
            return;
        }
        let op = Op::Store { blocks: vec![StoredBlock { block, state }], join: state.version.next() };
        self.send_internal_job(op, data.clone(), Purpose::HealStore { block }, ReplicaSet::only(target));
    }
}
