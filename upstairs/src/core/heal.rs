//! Healing: a replica whose copy of a block is bad, or older than what the others hold, gets a good one from another.
//!
//! Invariants:
//! - A block is healed only with data that matched its checksum, under its own version.
//! - Nothing newer is overwritten. While a change of the block is under way the copy gives way to whatever the replica holds
//!   above the copy's version. If none is, then every change was executed everywhere before the copy was read, and later
//!   ones come behind it: it replaces whatever lies there, also under a context whose version rotted.
//! - At most [`HEALS_MAX`] at once; what exceeds it is found again by the next read. The scrub waits for its turn.

use bytes::Bytes;
use newel_protocol::wire::{Op, ReadMode, StoredBlock};
use newel_protocol::{BlockKind, BlockRange, BlockState, Version, crc};

use super::Core;
use super::api::{LogLevel, ReplicaId, ReplicaSet};
use super::jobs::Purpose;

const HEALS_MAX: usize = 64;

impl Core {
    /// Of a copy that a read found bad: from any other Active replica.
    pub(super) fn start_heal(&mut self, target: ReplicaId, block: u64) {
        let sources = self.active().without(ReplicaSet::only(target));
        self.try_heal(target, block, sources);
    }

    /// Heals from one of these sources, if there is room; false if there is none.
    pub(super) fn try_heal(&mut self, target: ReplicaId, block: u64, sources: ReplicaSet) -> bool {
        if !self.config.heal || self.heals_in_flight >= HEALS_MAX || !self.replica(target).is_active() {
            return false;
        }
        self.heals_in_flight += 1;
        let tried = self.active().without(sources);
        self.heal_from_next(target, block, tried);
        true
    }

    /// True while a further heal would be refused.
    pub(super) fn heals_are_full(&self) -> bool {
        self.heals_in_flight >= HEALS_MAX
    }

    /// Asks the next Active replica that wasn't asked yet.
    pub(super) fn heal_from_next(&mut self, target: ReplicaId, block: u64, tried: ReplicaSet) {
        let source = self.active().without(tried).iter().find(|&source| source != target);
        match source.filter(|_| self.replica(target).is_active()) {
            Some(source) => {
                let mut tried = tried;
                tried.insert(source);
                let op = Op::Read { range: BlockRange::single(block), mode: ReadMode::Data };
                let purpose = Purpose::HealRead { target, block, tried };
                self.send_internal_job(op, Bytes::new(), purpose, ReplicaSet::only(source));
            }
            None => {
                self.log(LogLevel::Warn, format!("replica {target}: block {block} can't be healed now"));
                self.heal_ended(target, block, false);
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
            self.heal_ended(target, block, false);
            return;
        }
        let join = if self.jobs.is_being_changed(block) { state.version.next() } else { Version::MAX };
        let op = Op::Store { blocks: vec![StoredBlock { block, state }], join };
        let purpose = Purpose::HealStore { target, block };
        self.send_internal_job(op, data.clone(), purpose, ReplicaSet::only(target));
    }

    pub(super) fn heal_ended(&mut self, target: ReplicaId, block: u64, healed: bool) {
        self.heals_in_flight = self.heals_in_flight.saturating_sub(1);
        if healed {
            self.replica_mut(target).healed_blocks += 1;
            self.log(LogLevel::Info, format!("replica {target}: block {block} healed"));
        }
        self.scrub_heal_ended(target, block, healed);
    }
}
