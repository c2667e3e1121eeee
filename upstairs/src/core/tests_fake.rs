//! A replica in memory: it does what `protocol/README.md` asks of one, one job after the other, and loses nothing.
//!
//! Invariants:
//! - It answers every request at once and in order; only `Cancel` has no answer.
//! - A change never lands on a newer version; a copy is taken or dropped as rule R8 has it.

use std::collections::{BTreeMap, VecDeque};

use bytes::{Bytes, BytesMut};
use newel_protocol::lag::Health;
use newel_protocol::wire::{
    Membership, Op, ReadMode, Refusal, Reply, Request, StageTimes, StoredBlock, Welcome,
};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockState, ExtentId, Generation, JobId, Version, crc};
use uuid::Uuid;

use super::api::LinkId;

pub(super) const BLOCKS: u64 = 2500;

#[derive(Debug)]
pub(super) struct Fake {
    pub(super) region: Uuid,
    pub(super) up: bool,
    /// Stopped like a process by SIGSTOP: takes bytes, does nothing.
    pub(super) paused: bool,
    pub(super) link: Option<LinkId>,
    pub(super) inbox: VecDeque<(Request, Bytes)>,
    pub(super) blocks: BTreeMap<u64, (BlockState, Bytes)>,
    pub(super) promised: Generation,
    pub(super) last_active: Generation,
    pub(super) membership: Membership,
    pub(super) stored_blocks: usize,
    pub(super) in_use: bool,
}

impl Fake {
    pub(super) fn new(n: u128) -> Self {
        Self {
            region: Uuid::from_u128(n),
            up: true,
            paused: false,
            link: None,
            inbox: VecDeque::new(),
            blocks: BTreeMap::new(),
            promised: Generation(0),
            last_active: Generation(0),
            membership: Membership::default(),
            stored_blocks: 0,
            in_use: false,
        }
    }

    pub(super) fn state(&self, block: u64) -> BlockState {
        self.blocks.get(&block).map(|(state, _)| *state).unwrap_or_default()
    }

    pub(super) fn set(&mut self, block: u64, version: Version, data: Option<Bytes>) {
        let state = match &data {
            Some(data) => BlockState { version, crc: crc::crc(data), kind: BlockKind::Data },
            None => BlockState { version, crc: 0, kind: BlockKind::Zero },
        };
        self.blocks.insert(block, (state, data.unwrap_or_default()));
    }

    fn digest(&self, extent: ExtentId) -> u64 {
        let range = extent.first_block()..extent.first_block() + 1024;
        // Not linear, or the sum over a run of blocks with one version would vanish.
        let mix = |hash: u64, value: u64| {
            let x = (hash ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (x >> 29)
        };
        self.blocks.range(range).fold(0, |sum, (&block, (state, _))| {
            let fields = [block, state.version.generation.0.into(), state.version.sequence, state.crc.into()];
            sum ^ fields.into_iter().fold(1, mix)
        }) & !1
    }

    pub(super) fn handle(&mut self, request: Request, payload: &Bytes) -> Option<(Reply, Bytes)> {
        let none = Bytes::new();
        Some(match request {
            Request::Hello(_) => {
                let welcome = Welcome {
                    version: 1,
                    region: self.region,
                    volume: Uuid::nil(),
                    blocks: BLOCKS,
                    promised: self.promised,
                    last_active: self.last_active,
                    membership: self.membership,
                    lost_power: false,
                };
                (Reply::Welcome(welcome), none)
            }
            Request::Promote { .. } if self.in_use => {
                (Reply::Refused(Refusal::InUse { by: Uuid::nil(), generation: self.promised }), none)
            }
            Request::Promote { generation } => {
                assert!(generation >= self.promised);
                self.promised = generation;
                (Reply::Promoted { generation, last_active: self.last_active, digest: 0 }, none)
            }
            Request::Activated { generation, membership } => {
                self.last_active = generation;
                self.membership = membership;
                (Reply::ActivatedStored { generation }, none)
            }
            Request::Ping { nonce } => (Reply::Pong { nonce, health: Health::default() }, none),
            Request::Digests { query, first, count } => {
                let digests = (first.0..first.0 + count).map(|e| self.digest(ExtentId(e))).collect();
                (Reply::Digests { query, first, digests }, none)
            }
            Request::Contexts { query, extent } => {
                let end = (extent.first_block() + 1024).min(BLOCKS);
                let states = (extent.first_block()..end).map(|b| self.state(b)).collect();
                (Reply::Contexts { query, extent, states }, none)
            }
            Request::Cancel { .. } => return None,
            Request::Job { job, op } => self.job(job, op, payload),
        })
    }

    fn job(&mut self, job: JobId, op: Op, payload: &Bytes) -> (Reply, Bytes) {
        let version = Version::new(self.promised, job.0);
        let mut states = Vec::new();
        let mut data = BytesMut::new();
        match op {
            Op::Read { range, mode } => {
                for block in range.blocks() {
                    let state = self.state(block);
                    states.push(state);
                    let raw = mode == ReadMode::Raw && state.kind == BlockKind::Unverified;
                    if mode == ReadMode::Verify {
                        let sound = !state.has_data() || crc::crc(&self.blocks[&block].1) == state.crc;
                        let kind = if sound { state.kind } else { BlockKind::Unreadable };
                        states.pop();
                        states.push(BlockState { kind, ..state });
                    } else if (mode != ReadMode::Contexts && state.has_data()) || raw {
                        data.extend_from_slice(&self.blocks[&block].1);
                    }
                }
            }
            Op::Write { range, crcs } => {
                assert_eq!(crc::first_mismatch(payload, &crcs), None);
                for (i, block) in range.blocks().enumerate() {
                    if version >= self.state(block).version {
                        self.set(block, version, Some(payload.slice(i * BLOCK_BYTES..(i + 1) * BLOCK_BYTES)));
                    }
                }
            }
            Op::Zero { range, .. } => {
                for block in range.blocks().filter(|&b| version >= self.state(b).version).collect::<Vec<_>>()
                {
                    self.set(block, version, None);
                }
            }
            Op::Flush => {}
            Op::Store { blocks, join } => self.store(&blocks, join, payload),
        }
        let done = Reply::Done { job, result: Ok(()), times: StageTimes::default(), states };
        (done, data.freeze())
    }

    fn store(&mut self, blocks: &[StoredBlock], join: Version, payload: &Bytes) {
        let mut at = 0;
        for StoredBlock { block, state } in blocks {
            let data = state.has_data().then(|| payload.slice(at..at + BLOCK_BYTES));
            at += if state.has_data() { BLOCK_BYTES } else { 0 };
            let own = self.state(*block);
            if !(own.is_verified() && own.version >= join.max(state.version)) {
                self.stored_blocks += 1;
                self.blocks.insert(*block, (*state, data.unwrap_or_default()));
            }
        }
    }
}
