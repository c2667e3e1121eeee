//! Writes, zeros and trims: whole blocks as they are, partial ones read, merged and written.
//!
//! Invariants:
//! - Between the read and the write of an unaligned edge no other change of that block is sent: the blocks are locked, and
//!   changes that overlap a lock wait their turn. Reads never wait for a lock.
//! - A lock lasts until all jobs of its change are sent (or it has failed), not until they are settled: replicas keep the order from
//!   there on.
//! - An edge is merged with what was read in the generation in force.
//!
//! Changes by one request that FUA covers are followed at once by a flush; the request is answered when both are
//! acknowledged, which costs one round trip instead of two.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use newel_protocol::wire::{Op, ReadMode, ZeroMode};
use newel_protocol::{BLOCK_BYTES, BlockRange, crc};

use super::{BLOCK, GuestRequest, Kind};
use crate::core::Core;
use crate::core::api::GuestId;
use crate::core::jobs::{AnswerBlocks, ReqKey, pieces};

/// Jobs without payload that one request may have under way: a 4 GiB trim must not fill the volume's bound by itself.
const PIECES_WINDOW: u32 = 64;

/// Blocks that are being read for the sake of a change, and changes that wait for that.
#[derive(Debug, Default)]
pub(super) struct Locks {
    /// Admitted, but behind a lock.
    pub(super) blocked: VecDeque<ReqKey>,
    held: Vec<Lock>,
}

#[derive(Debug)]
struct Lock {
    start: u64,
    end: u64,
    by: ReqKey,
}

/// A write, zero or trim under way.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) what: What,
    /// Data of the partial first and last block, once read.
    edges: [Edge; 2],
    /// Next whole block to send, and the end of whole blocks.
    next: u64,
    end: u64,
    stage: Stage,
}

#[derive(Clone, Debug)]
pub(super) enum What {
    Write(Bytes),
    Zero(ZeroMode),
}

#[derive(Debug, Default)]
enum Edge {
    #[default]
    None,
    Wanted(u64),
    Read(u64, Bytes),
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Blocked,
    ReadingEdges,
    Writing,
}

const HEAD: usize = 0;
const TAIL: usize = 1;

impl Locks {
    fn is_locked(&self, start: u64, end: u64) -> bool {
        self.held.iter().any(|lock| start < lock.end && lock.start < end)
    }

    /// When no request is left.
    pub(super) fn clear(&mut self) {
        self.held.clear();
        self.blocked.clear();
    }
}

impl Change {
    /// An edge was read.
    pub(super) fn has_read(&mut self, piece: u32, answer: AnswerBlocks) {
        if let Some(edge) = self.edges.get_mut(piece as usize)
            && let Edge::Wanted(block) = *edge
        {
            *edge = Edge::Read(block, one_block(answer));
        }
    }
}

impl Core {
    pub(super) fn start_change(&mut self, guest: GuestId, what: What, offset: u64, length: u64, fua: bool) {
        let tail = offset + length;
        let (first, last) = (offset / BLOCK, tail / BLOCK);
        let mut edges = [Edge::None, Edge::None];
        if length > 0 && !offset.is_multiple_of(BLOCK) {
            edges[HEAD] = Edge::Wanted(first);
        }
        if length > 0 && !tail.is_multiple_of(BLOCK) && (offset.is_multiple_of(BLOCK) || last != first) {
            edges[TAIL] = Edge::Wanted(last);
        }
        let next = offset.div_ceil(BLOCK);
        let change = Change { what, edges, next, end: last.max(next), stage: Stage::Blocked };
        let key = self.insert_request(guest, Kind::Change(change), offset, length, fua);
        if !self.try_change(key) {
            self.requests.locks.blocked.push_back(key);
        }
    }

    /// Starts a change unless a lock is in its way.
    fn try_change(&mut self, key: ReqKey) -> bool {
        let Some(request) = self.requests.table.get_mut(key) else { return true };
        let (start, end) = (request.offset / BLOCK, (request.offset + request.length).div_ceil(BLOCK));
        if self.requests.locks.is_locked(start, end) {
            return false;
        }
        let Some(GuestRequest { kind: Kind::Change(change), .. }) = self.requests.table.get_mut(key) else {
            return true;
        };
        let wanted: Vec<(usize, u64)> = change
            .edges
            .iter()
            .enumerate()
            .filter_map(|(i, edge)| if let Edge::Wanted(block) = edge { Some((i, *block)) } else { None })
            .collect();
        if wanted.is_empty() {
            change.stage = Stage::Writing;
            self.send_change(key);
            return true;
        }
        change.stage = Stage::ReadingEdges;
        self.requests.locks.held.push(Lock { start, end, by: key });
        for (index, block) in wanted {
            let op = Op::Read { range: BlockRange::single(block), mode: ReadMode::Data };
            self.send_piece(key, op, Bytes::new(), u32::try_from(index).unwrap_or(0));
        }
        true
    }

    /// Sends the jobs of a change whose edges are known, as far as the window allows.
    fn send_change(&mut self, key: ReqKey) {
        self.send_edges(key);
        loop {
            let Some(request) = self.requests.table.get_mut(key) else { return };
            let Kind::Change(change) = &mut request.kind else { return };
            let window = match change.what {
                What::Write(_) => u32::MAX,
                What::Zero(_) => PIECES_WINDOW,
            };
            if request.open >= window {
                return;
            }
            let Some(range) = pieces(change.next, change.end).next() else { break };
            change.next = range.end();
            let (op, payload) = match &change.what {
                What::Write(data) => {
                    let at = usize::try_from(range.start * BLOCK - request.offset).unwrap_or(usize::MAX);
                    let payload = data.slice(at..at + range.bytes());
                    (Op::Write { range, crcs: crc::block_crcs(&payload) }, payload)
                }
                What::Zero(mode) => (Op::Zero { range, mode: *mode }, Bytes::new()),
            };
            self.send_piece(key, op, payload, 0);
        }
        self.unlock(key);
        if self.requests.table.get_mut(key).is_some_and(|request| request.fua) {
            self.send_piece(key, Op::Flush, Bytes::new(), 0);
        }
        self.all_sent(key);
    }

    /// Merges the guest's bytes into the partial blocks and writes those.
    fn send_edges(&mut self, key: ReqKey) {
        for index in [HEAD, TAIL] {
            let Some(request) = self.requests.table.get_mut(key) else { return };
            let (offset, length) = (request.offset, request.length);
            let Kind::Change(change) = &mut request.kind else { return };
            let Edge::Read(block, old) = std::mem::take(&mut change.edges[index]) else { continue };
            let merged = merge_edge(&change.what, offset, length, block, &old);
            let op = Op::Write { range: BlockRange::single(block), crcs: crc::block_crcs(&merged) };
            self.send_piece(key, op, merged, 0);
        }
    }

    /// A new generation begins: edges that were read in the old one may have been lost since, so they are read again.
    pub(in crate::core) fn forget_edges(&mut self) {
        for key in self.requests.table.keys() {
            let Some(request) = self.requests.table.get_mut(key) else { continue };
            let Kind::Change(change) = &mut request.kind else { continue };
            if change.stage != Stage::ReadingEdges {
                continue;
            }
            for index in [HEAD, TAIL] {
                let Some(request) = self.requests.table.get_mut(key) else { continue };
                let Kind::Change(change) = &mut request.kind else { continue };
                let Edge::Read(block, _) = change.edges[index] else { continue };
                change.edges[index] = Edge::Wanted(block);
                let op = Op::Read { range: BlockRange::single(block), mode: ReadMode::Data };
                self.send_piece(key, op, Bytes::new(), u32::try_from(index).unwrap_or(0));
            }
        }
    }

    pub(super) fn unlock(&mut self, key: ReqKey) {
        let before = self.requests.locks.held.len();
        self.requests.locks.held.retain(|lock| lock.by != key);
        if self.requests.locks.held.len() == before {
            return;
        }
        for key in std::mem::take(&mut self.requests.locks.blocked) {
            if !self.try_change(key) {
                self.requests.locks.blocked.push_back(key);
            }
        }
    }

    pub(super) fn continue_change(&mut self, key: ReqKey) {
        let Some(request) = self.requests.table.get_mut(key) else { return };
        let Kind::Change(change) = &mut request.kind else { return };
        match change.stage {
            Stage::ReadingEdges if request.open > 0 => {}
            Stage::ReadingEdges if request.failed.is_some() => {
                request.all_sent = true;
                self.unlock(key);
            }
            Stage::ReadingEdges => {
                change.stage = Stage::Writing;
                self.send_change(key);
            }
            Stage::Writing if !request.all_sent => self.send_change(key),
            Stage::Writing | Stage::Blocked => {}
        }
    }
}

/// A partial block as it will be: `old` with the guest's bytes (or zeros) over it.
fn merge_edge(what: &What, offset: u64, length: u64, block: u64, old: &Bytes) -> Bytes {
    let block_start = block * BLOCK;
    let from = offset.max(block_start);
    let to = (offset + length).min(block_start + BLOCK);
    let at = |position: u64| usize::try_from(position - block_start).unwrap_or(BLOCK_BYTES);
    let mut merged = BytesMut::with_capacity(BLOCK_BYTES);
    merged.extend_from_slice(old);
    merged.resize(BLOCK_BYTES, 0);
    let target = &mut merged[at(from)..at(to)];
    match what {
        What::Write(data) => {
            let start = usize::try_from(from - offset).unwrap_or(usize::MAX);
            target.copy_from_slice(&data[start..start + target.len()]);
        }
        What::Zero(_) => target.fill(0),
    }
    merged.freeze()
}

/// The 4 KiB of a one-block answer; empty means zeros.
fn one_block(answer: AnswerBlocks) -> Bytes {
    answer.data.into_iter().next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_keeps_the_bytes_around_it() {
        let old = Bytes::from(vec![9_u8; BLOCK_BYTES]);
        let what = What::Write(Bytes::from_static(b"abc"));
        let merged = merge_edge(&what, 4095, 3, 0, &old);
        assert_eq!((merged[4094], merged[4095]), (9, b'a'));
        let merged = merge_edge(&what, 4095, 3, 1, &old);
        assert_eq!(&merged[..3], b"bc\x09");
        let merged = merge_edge(&What::Zero(ZeroMode::Contexts), 5000, 10, 1, &Bytes::new());
        assert!(merged.iter().all(|&byte| byte == 0) && merged.len() == BLOCK_BYTES);
    }
}
