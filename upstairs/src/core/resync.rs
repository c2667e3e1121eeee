//! Making replicas equal: digests, then the contexts of differing extents, then only the differing blocks.
//!
//! One engine with two rules: *reconcile* before a generation is served (all up-to-date replicas, nobody writes), and
//! *catch-up* of one joiner from an Active source while guests write. It sends nothing itself: it gives out [`Step`]s and
//! takes answers, so that jobs, links and roles stay with the core.
//!
//! Invariants:
//! - A block is stored only after its data matched the checksum of the context it is stored under.
//! - What is in flight is bounded: [`OPEN_EXTENTS`] extents, and a window of reads and stores.
//!
//! The lowest bit of a digest says that its extent holds unverified blocks, so that equal damage on all replicas is seen.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::{Bytes, BytesMut};
use newel_protocol::wire::{ReadMode, Request, StoredBlock};
use newel_protocol::{
    BLOCK_BYTES, BlockKind, BlockRange, BlockState, EXTENT_BLOCKS, ExtentId, Generation, Version, crc,
};

use super::api::{ReplicaId, ReplicaSet};
use super::decide::{Decision, Reconcile, catch_up, reconcile};

/// Extents whose contexts are held at once: 1024 states of 24 bytes from each of three replicas, so 2 MiB. Scattered blocks lie in as
/// many extents, of which each waits for an entry in the joiner's activity log.
const OPEN_EXTENTS: usize = 32;
/// What comparing the contexts of an extent costs, in blocks copied.
const EXTENT_COST: i64 = 1;
/// Blocks in one copy of a reconcile: 256 KiB.
const COPY_BLOCKS: usize = 64;
/// Copies of a reconcile in flight; no guest waits behind them.
const RECONCILE_WINDOW: usize = 32;
/// Blocks in one copy of a catch-up: 64 KiB, as guests' jobs wait behind it.
const CATCH_UP_BLOCKS: usize = 16;
/// Copies of a catch-up in flight. What the guest notices is their rate, which is paced; scattered blocks need many.
const CATCH_UP_WINDOW: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// `complete`: all three take part and none has lost power.
    Reconcile {
        generation: Generation,
        complete: bool,
    },
    CatchUp {
        joiner: ReplicaId,
        source: ReplicaId,
        join: Version,
    },
}

/// Something to send. Every step is answered by the `on_` function of its name, once for each replica asked.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Digests { query: u64, replica: ReplicaId, first: ExtentId, count: u32 },
    Contexts { query: u64, replica: ReplicaId, extent: ExtentId },
    Read { replica: ReplicaId, extent: ExtentId, copy: u32, range: BlockRange, mode: ReadMode },
    Store { replicas: ReplicaSet, extent: ExtentId, blocks: Vec<StoredBlock>, join: Version, data: Bytes },
}

#[derive(Debug)]
pub(super) struct Resync {
    /// Tells its jobs from those of a resync that was given up. Also its first query's number.
    pub(super) epoch: u64,
    next_query: u64,
    rule: Rule,
    members: ReplicaSet,
    /// Other Active replicas that a catch-up may turn to for a block that is bad at its source.
    alternates: ReplicaSet,
    blocks: u64,
    digests: [Vec<u64>; ReplicaId::COUNT],
    digests_asked: [bool; ReplicaId::COUNT],
    compared: bool,
    queue: VecDeque<ExtentId>,
    open: BTreeMap<ExtentId, OpenExtent>,
    steps: VecDeque<Step>,
    /// Reads and stores without an answer.
    in_flight: usize,
    failed: Option<String>,
    pub(super) progress: Progress,
    /// Blocks that a catch-up may copy now; those beyond were taken all the same, for whole copies. Nothing between grants: what an
    /// answer then made room for would be charged to nobody.
    granted: i64,
    /// Versions of blocks that unanswered requests still hold.
    held: BTreeMap<u64, Version>,
    /// Blocks of which the replicas know a version that is at least as new.
    outdated: BTreeSet<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    pub(super) extents_differing: u64,
    pub(super) extents_done: u64,
    pub(super) blocks_copied: u64,
}

#[derive(Debug, Default)]
struct OpenExtent {
    states: [Option<Vec<BlockState>>; ReplicaId::COUNT],
    planned: bool,
    waiting: VecDeque<Copy>,
    reading: BTreeMap<u32, Copy>,
    next_copy: u32,
    stores_in_flight: usize,
}

/// Consecutive blocks with one source and the same targets.
#[derive(Clone, Debug)]
struct Copy {
    source: ReplicaId,
    targets: ReplicaSet,
    blocks: Vec<StoredBlock>,
    /// The source's data match no context and are taken all the same.
    adopt: bool,
}

impl Copy {
    fn range(&self) -> BlockRange {
        let start = self.blocks.first().map_or(0, |b| b.block);
        BlockRange::new(start, u32::try_from(self.blocks.len()).unwrap_or(EXTENT_BLOCKS).max(1))
    }

    fn needs_data(&self) -> bool {
        self.adopt || self.blocks.iter().any(|b| b.state.kind == BlockKind::Data)
    }
}

impl Resync {
    pub(super) fn new(
        rule: Rule,
        members: ReplicaSet,
        alternates: ReplicaSet,
        blocks: u64,
        query: u64,
    ) -> Self {
        Self {
            epoch: query,
            next_query: query,
            rule,
            members,
            alternates,
            blocks,
            digests: [const { Vec::new() }; ReplicaId::COUNT],
            digests_asked: [false; ReplicaId::COUNT],
            compared: false,
            queue: VecDeque::new(),
            open: BTreeMap::new(),
            steps: VecDeque::new(),
            in_flight: 0,
            failed: None,
            progress: Progress::default(),
            granted: 0,
            held: BTreeMap::new(),
            outdated: BTreeSet::new(),
        }
    }

    /// These versions of blocks are at hand without any replica.
    pub(super) fn holding(self, held: BTreeMap<u64, Version>) -> Self {
        Self { held, ..self }
    }

    /// True if what is held of this block must not be stored.
    pub(super) fn is_outdated(&self, block: u64) -> bool {
        self.outdated.contains(&block)
    }

    /// A catch-up may copy so many blocks until what is left is taken back.
    pub(super) fn grant(&mut self, blocks: u64) {
        self.granted = i64::try_from(blocks).unwrap_or(i64::MAX);
    }

    /// Takes back what is left of the grant; negative if a copy took more.
    pub(super) fn take_left(&mut self) -> i64 {
        std::mem::take(&mut self.granted)
    }

    /// True if only a grant is missing.
    pub(super) fn waits_for_grant(&self) -> bool {
        let copies =
            self.in_flight < self.window() && self.open.values().any(|open| !open.waiting.is_empty());
        let extents = self.compared && self.open.len() < OPEN_EXTENTS && !self.queue.is_empty();
        !self.is_granted() && (copies || extents)
    }

    /// Only a catch-up has guests to be careful of.
    fn is_granted(&self) -> bool {
        self.granted > 0 || matches!(self.rule, Rule::Reconcile { .. })
    }

    fn window(&self) -> usize {
        match self.rule {
            Rule::Reconcile { .. } => RECONCILE_WINDOW,
            Rule::CatchUp { .. } => CATCH_UP_WINDOW,
        }
    }

    /// True if this resync asked that query.
    pub(super) fn asked(&self, query: u64) -> bool {
        (self.epoch..self.next_query).contains(&query)
    }

    /// The number after its last query.
    pub(super) fn next_query(&self) -> u64 {
        self.next_query
    }

    pub(super) fn is_done(&self) -> bool {
        self.compared && self.queue.is_empty() && self.open.is_empty() && self.steps.is_empty()
    }

    pub(super) fn failure(&self) -> Option<&str> {
        self.failed.as_deref()
    }

    pub(super) fn source(&self) -> Option<ReplicaId> {
        match self.rule {
            Rule::CatchUp { source, .. } => Some(source),
            Rule::Reconcile { .. } => None,
        }
    }

    pub(super) fn extents_waiting(&self) -> u64 {
        (self.queue.len() + self.open.len()) as u64
    }

    /// True if an answer of this replica is awaited.
    pub(super) fn reads_from(&self, replica: ReplicaId) -> bool {
        self.open.values().any(|open| open.reading.values().any(|copy| copy.source == replica))
    }

    /// A catch-up's help for bad blocks has left.
    pub(super) fn drop_alternate(&mut self, replica: ReplicaId) {
        self.alternates.remove(replica);
    }

    pub(super) fn next_step(&mut self) -> Option<Step> {
        if self.steps.is_empty() && self.failed.is_none() {
            self.advance();
        }
        self.steps.pop_front()
    }

    fn advance(&mut self) {
        if !self.compared {
            self.ask_digests();
            return;
        }
        self.start_copies();
        while self.open.len() < OPEN_EXTENTS && self.is_granted() {
            let Some(extent) = self.queue.pop_front() else { break };
            self.granted -= EXTENT_COST;
            self.open.insert(extent, OpenExtent::default());
            for replica in self.members.iter() {
                self.steps.push_back(Step::Contexts { query: self.next_query, replica, extent });
                self.next_query += 1;
            }
        }
    }

    fn extents(&self) -> u32 {
        u32::try_from(self.blocks.div_ceil(u64::from(EXTENT_BLOCKS))).unwrap_or(u32::MAX)
    }

    fn blocks_in(&self, extent: ExtentId) -> usize {
        let rest = self.blocks.saturating_sub(extent.first_block());
        usize::try_from(rest.min(u64::from(EXTENT_BLOCKS))).unwrap_or(EXTENT_BLOCKS as usize)
    }

    fn ask_digests(&mut self) {
        let total = self.extents();
        for replica in self.members.iter() {
            let have = u32::try_from(self.digests[replica.index()].len()).unwrap_or(u32::MAX);
            if have < total && !self.digests_asked[replica.index()] {
                self.digests_asked[replica.index()] = true;
                let count = (total - have).min(Request::MAX_DIGESTS);
                let (query, first) = (self.next_query, ExtentId(have));
                self.next_query += 1;
                self.steps.push_back(Step::Digests { query, replica, first, count });
            }
        }
    }

    pub(super) fn on_digests(&mut self, replica: ReplicaId, first: ExtentId, digests: &[u64]) {
        if self.compared || !self.members.contains(replica) {
            return;
        }
        let total = self.extents() as usize;
        let have = &mut self.digests[replica.index()];
        if first.0 as usize != have.len() || digests.is_empty() || have.len() + digests.len() > total {
            self.fail(format!("replica {replica} answered for digests that it was not asked for"));
            return;
        }
        have.extend_from_slice(digests);
        self.digests_asked[replica.index()] = false;
        if self.members.iter().all(|r| self.digests[r.index()].len() == total) {
            self.compare_digests();
        }
    }

    fn compare_digests(&mut self) {
        let digests = std::mem::replace(&mut self.digests, [const { Vec::new() }; ReplicaId::COUNT]);
        for extent in 0..self.extents() {
            let mut values =
                self.members.iter().map(|r| digests[r.index()].get(extent as usize).copied().unwrap_or(0));
            let first = values.next().unwrap_or(0);
            let unverified = first & 1 == 1;
            if unverified || values.any(|value| value != first) {
                self.queue.push_back(ExtentId(extent));
            }
        }
        self.progress.extents_differing = self.queue.len() as u64;
        self.compared = true;
    }

    pub(super) fn on_contexts(&mut self, replica: ReplicaId, extent: ExtentId, states: Vec<BlockState>) {
        let expected = self.blocks_in(extent);
        let members = self.members;
        let Some(open) = self.open.get_mut(&extent) else { return };
        if states.len() != expected {
            let got = states.len();
            self.fail(format!(
                "replica {replica} sent {got} contexts for extent {extent} of {expected} blocks"
            ));
            return;
        }
        open.states[replica.index()] = Some(states);
        if !open.planned && members.iter().all(|r| open.states[r.index()].is_some()) {
            open.planned = true;
            let all: Vec<usize> = (0..expected).collect();
            self.plan(extent, &all);
        }
    }

    /// Decides for the given blocks of an extent and queues the copies.
    fn plan(&mut self, extent: ExtentId, indices: &[usize]) {
        let Some(open) = self.open.get(&extent) else { return };
        let mut copies: VecDeque<Copy> = VecDeque::new();
        let most = match self.rule {
            Rule::Reconcile { .. } => COPY_BLOCKS,
            Rule::CatchUp { .. } => CATCH_UP_BLOCKS,
        };
        for &index in indices {
            let block = extent.first_block() + index as u64;
            let decision = match self.rule {
                Rule::Reconcile { generation, complete } => {
                    let held = self.held.get(&block).copied();
                    let rule = Reconcile { generation, complete, held };
                    let decision = reconcile(&open.states, self.members, index, &rule);
                    if decision == Decision::Held {
                        self.outdated.remove(&block);
                    } else if held.is_some() {
                        self.outdated.insert(block);
                    }
                    decision
                }
                Rule::CatchUp { joiner, source, join } => catch_up(&open.states, joiner, source, join, index),
            };
            match decision {
                Decision::Equal | Decision::Held => {}
                Decision::Copy { source, targets, state, adopt } => {
                    push_block(&mut copies, most, source, targets, adopt, StoredBlock { block, state });
                }
                Decision::NoSource { wanted } => {
                    let targets = self.members.without(self.source_set());
                    let (source, kind) = match self.alternates.iter().next() {
                        Some(source) => (source, BlockKind::Data),
                        None => (ReplicaId(0), BlockKind::Unreadable),
                    };
                    let state = BlockState { kind, ..wanted };
                    push_block(&mut copies, most, source, targets, false, StoredBlock { block, state });
                }
            }
        }
        if let Some(open) = self.open.get_mut(&extent) {
            open.waiting.extend(copies);
        }
        self.start_copies();
        self.close_if_done(extent);
    }

    fn source_set(&self) -> ReplicaSet {
        self.source().map_or(ReplicaSet::EMPTY, ReplicaSet::only)
    }

    fn start_copies(&mut self) {
        let window = self.window();
        let extents: Vec<ExtentId> = self
            .open
            .iter()
            .filter(|(_, open)| !open.waiting.is_empty())
            .map(|(&extent, _)| extent)
            .collect();
        for extent in extents {
            while self.in_flight < window && self.is_granted() {
                let Some(open) = self.open.get_mut(&extent) else { break };
                let Some(copy) = open.waiting.pop_front() else { break };
                self.granted -= i64::try_from(copy.blocks.len()).unwrap_or(0);
                if copy.needs_data() {
                    self.in_flight += 1;
                    let number = open.next_copy;
                    open.next_copy += 1;
                    let mode = if copy.adopt { ReadMode::Raw } else { ReadMode::Data };
                    let (replica, range) = (copy.source, copy.range());
                    open.reading.insert(number, copy);
                    self.steps.push_back(Step::Read { replica, extent, copy: number, range, mode });
                } else {
                    self.store(extent, copy.targets, copy.blocks, Bytes::new());
                }
            }
        }
    }

    fn join(&self) -> Version {
        match self.rule {
            Rule::Reconcile { .. } => Version::MAX,
            Rule::CatchUp { join, .. } => join,
        }
    }

    fn store(&mut self, extent: ExtentId, targets: ReplicaSet, blocks: Vec<StoredBlock>, data: Bytes) {
        let join = self.join();
        if blocks.is_empty() {
            return;
        }
        if let Some(open) = self.open.get_mut(&extent) {
            open.stores_in_flight += targets.len();
            self.in_flight += targets.len();
            self.progress.blocks_copied += blocks.len() as u64;
            self.steps.push_back(Step::Store { replicas: targets, extent, blocks, join, data });
        }
    }

    /// The answer to a `Read` step: the states of its blocks, and the data of those that have some.
    pub(super) fn on_read(&mut self, extent: ExtentId, number: u32, states: &[BlockState], data: &Bytes) {
        let Some(open) = self.open.get_mut(&extent) else { return };
        let Some(copy) = open.reading.remove(&number) else { return };
        self.in_flight = self.in_flight.saturating_sub(1);
        let found = split_data(states, data, copy.adopt);
        let mut blocks = Vec::with_capacity(copy.blocks.len());
        let mut payload = BytesMut::new();
        let mut bad = Vec::new();
        for (index, planned) in copy.blocks.iter().enumerate() {
            let answer = found.as_ref().and_then(|found| found.get(index));
            match self.accept(planned, answer, copy.adopt) {
                Accept::Store(state, block_data) => {
                    payload.extend_from_slice(&block_data);
                    blocks.push(StoredBlock { block: planned.block, state });
                }
                Accept::Bad => bad.push(planned.block),
            }
        }
        self.store(extent, copy.targets, blocks, payload.freeze());
        self.replan(extent, copy.source, &bad);
        self.start_copies();
        self.close_if_done(extent);
    }

    fn accept(&self, planned: &StoredBlock, answer: Option<&(BlockState, Bytes)>, adopt: bool) -> Accept {
        let Some((state, data)) = answer else { return Accept::Bad };
        let good_data = !data.is_empty() && crc::crc(data) == state.crc;
        match self.rule {
            Rule::Reconcile { .. } if adopt => {
                // Whatever lies there is what all get: only a block that can't be read at all is no use.
                if data.is_empty() {
                    return Accept::Bad;
                }
                let state = BlockState { crc: crc::crc(data), kind: BlockKind::Data, ..planned.state };
                Accept::Store(state, data.clone())
            }
            Rule::Reconcile { .. } => match state.kind {
                BlockKind::Data if good_data && *state == planned.state => {
                    Accept::Store(*state, data.clone())
                }
                BlockKind::Zero if *state == planned.state => Accept::Store(*state, Bytes::new()),
                BlockKind::Data | BlockKind::Zero | BlockKind::Unverified | BlockKind::Unreadable => {
                    Accept::Bad
                }
            },
            Rule::CatchUp { .. } => match state.kind {
                BlockKind::Zero => Accept::Store(*state, Bytes::new()),
                BlockKind::Data if good_data => Accept::Store(*state, data.clone()),
                BlockKind::Data | BlockKind::Unverified | BlockKind::Unreadable => Accept::Bad,
            },
        }
    }

    /// Blocks that turned out bad at their source are decided again without it.
    fn replan(&mut self, extent: ExtentId, source: ReplicaId, bad: &[u64]) {
        if bad.is_empty() {
            return;
        }
        self.alternates.remove(source);
        if let Some(open) = self.open.get_mut(&extent) {
            let first = extent.first_block();
            let mut indices = Vec::with_capacity(bad.len());
            for &block in bad {
                let index = usize::try_from(block.saturating_sub(first)).unwrap_or(usize::MAX);
                if let Some(state) =
                    open.states[source.index()].as_mut().and_then(|states| states.get_mut(index))
                {
                    state.kind = BlockKind::Unreadable;
                }
                indices.push(index);
            }
            self.plan(extent, &indices);
        }
    }

    pub(super) fn on_stored(&mut self, extent: ExtentId) {
        let Some(open) = self.open.get_mut(&extent) else { return };
        open.stores_in_flight = open.stores_in_flight.saturating_sub(1);
        self.in_flight = self.in_flight.saturating_sub(1);
        self.start_copies();
        self.close_if_done(extent);
    }

    fn close_if_done(&mut self, extent: ExtentId) {
        let done = self.open.get(&extent).is_some_and(|open| {
            open.planned && open.waiting.is_empty() && open.reading.is_empty() && open.stores_in_flight == 0
        });
        if done {
            self.open.remove(&extent);
            self.progress.extents_done += 1;
        }
    }

    fn fail(&mut self, reason: String) {
        self.failed.get_or_insert(reason);
    }
}

enum Accept {
    Store(BlockState, Bytes),
    Bad,
}

/// Adds a block to the last copy if it continues it, else begins a new one.
fn push_block(
    copies: &mut VecDeque<Copy>,
    most: usize,
    source: ReplicaId,
    targets: ReplicaSet,
    adopt: bool,
    block: StoredBlock,
) {
    if let Some(last) = copies.back_mut() {
        let continues = last.blocks.last().is_some_and(|b| b.block + 1 == block.block);
        let unreadable = |b: &StoredBlock| b.state.kind == BlockKind::Unreadable;
        let same_kind = last.blocks.last().is_some_and(|b| unreadable(b) == unreadable(&block));
        let alike = last.source == source && last.targets == targets && last.adopt == adopt && same_kind;
        if continues && alike && last.blocks.len() < most {
            last.blocks.push(block);
            return;
        }
    }
    copies.push_back(Copy { source, targets, blocks: vec![block], adopt });
}

/// Each block's state with its own data (empty if it has none), or `None` if lengths don't fit.
pub(super) fn split_data(states: &[BlockState], data: &Bytes, raw: bool) -> Option<Vec<(BlockState, Bytes)>> {
    let mut at = 0;
    let mut out = Vec::with_capacity(states.len());
    for state in states {
        let has_data = state.has_data() || (raw && state.kind == BlockKind::Unverified);
        let piece = if has_data {
            let end = at + BLOCK_BYTES;
            if end > data.len() {
                return None;
            }
            let piece = data.slice(at..end);
            at = end;
            piece
        } else {
            Bytes::new()
        };
        out.push((*state, piece));
    }
    (at == data.len()).then_some(out)
}
