//! Crashes at every step: a random history of operations is cut, by a kill or by a power cut that loses and tears what
//! was not synced, and what the region says after it was opened again is held against the history.

use bytes::Bytes;
use newel_protocol::crc::{block_crcs, crc};
use newel_protocol::wire::{ReadMode, StoredBlock, ZeroMode};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, BlockState, ExtentId, Generation, Version};
use uuid::Uuid;

use super::context::fold_digests;
use super::layout::{Layout, header_offset};
use super::mem::MemStorage;
use super::open::{format_on, in_turn};
use super::region::RegionCore;
use crate::core::api::{DiskOp, DiskOutcome, HeaderChange, LogEntry};

const BLOCKS: u64 = 1030;
/// Few, so that they are written over and over; across the border of an extent.
const USED: BlockRange = BlockRange { start: 1018, count: 6 };

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

fn fresh() -> MemStorage {
    let layout = Layout::new(BLOCKS, 512).unwrap();
    let storage = MemStorage::new(usize::try_from(layout.total_bytes()).unwrap());
    format_on(&storage, layout, Uuid::from_u128(1), Uuid::nil()).unwrap();
    let (region, _) = RegionCore::load(storage, "mem").unwrap();
    // Above all that the tests write under.
    region
        .apply(&HeaderChange::Promise { generation: Generation(1_000_000), upstairs: Uuid::nil() })
        .unwrap();
    region.storage
}

/// Every sector names the version and the block that it belongs to.
fn content(block: u64, version: Version) -> Vec<u8> {
    let mut sector = [0; 512];
    sector[..4].copy_from_slice(&version.generation.0.to_le_bytes());
    sector[4..12].copy_from_slice(&version.sequence.to_le_bytes());
    sector[12..20].copy_from_slice(&block.to_le_bytes());
    sector[20..].fill(0x5a);
    sector.repeat(BLOCK_BYTES / 512)
}

#[derive(Clone, Debug, Default)]
struct Model {
    /// Per used block, every version that was begun; true if zeros.
    history: Vec<Vec<(Version, bool)>>,
    /// The newest version answered.
    done: Vec<Version>,
    /// The newest version flushed.
    floor: Vec<Version>,
}

struct Run {
    random: Random,
    region: RegionCore<MemStorage>,
    model: Model,
    boot: u128,
    generation: u32,
    sequence: u64,
    /// Both extents are in the log.
    logged: bool,
}

impl Run {
    fn new(seed: u64) -> Self {
        let (region, facts, _) = RegionCore::open_on(fresh(), "mem", Uuid::from_u128(1), &in_turn).unwrap();
        assert!(!facts.lost_power);
        let used = USED.count as usize;
        let model = Model {
            history: vec![vec![(Version::NEVER, true)]; used],
            done: vec![Version::NEVER; used],
            floor: vec![Version::NEVER; used],
        };
        let random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        Self { random, region, model, boot: 1, generation: 1, sequence: 0, logged: false }
    }

    /// Before a change; false if the medium was cut.
    fn enter_log(&mut self) -> bool {
        if !self.logged {
            let entries = [0, 1].map(|slot| LogEntry { slot: slot + 3, extent: Some(ExtentId(slot)) });
            self.logged = self.region.execute(&DiskOp::ActivityLog { entries: entries.to_vec() }).is_ok();
            assert!(self.logged || self.region.storage.is_cut());
        }
        self.logged
    }

    fn some_range(&mut self) -> BlockRange {
        loop {
            let start = USED.start + self.random.below(USED.count.into());
            let count = u32::try_from(1 + self.random.below(3)).unwrap();
            let range = BlockRange { start, count };
            if range.is_valid(BLOCKS) && range.end() <= USED.end() {
                return range;
            }
        }
    }

    fn step(&mut self) {
        self.sequence += 2;
        let version = Version::new(Generation(self.generation), self.sequence);
        let range = self.some_range();
        match self.random.below(14) {
            0..=5 => {
                let data: Vec<u8> = range.blocks().flat_map(|block| content(block, version)).collect();
                let crcs = block_crcs(&data);
                self.change(
                    range,
                    version,
                    false,
                    &DiskOp::Write { range, version, crcs, data: data.into() },
                );
            }
            6 | 7 => {
                let mode =
                    [ZeroMode::Contexts, ZeroMode::Punch][usize::try_from(self.random.below(2)).unwrap()];
                self.change(range, version, true, &DiskOp::Zero { range, version, mode });
            }
            8 => self.copy(range.start, version),
            9 => {
                let op = DiskOp::Header(HeaderChange::Claim { volume: Uuid::from_u128(9) });
                if self.region.execute(&op).is_err() {
                    assert!(self.region.storage.is_cut());
                }
            }
            10 => {
                if self.region.execute(&DiskOp::Flush { mark: None }).is_err() {
                    assert!(self.region.storage.is_cut());
                }
            }
            11 => {
                self.flush(version);
            }
            12 => self.write_across_a_flush(range, version),
            _ => self.leave_the_log(),
        }
    }

    fn flush(&mut self, mark: Version) -> bool {
        let flushed = self.region.execute(&DiskOp::Flush { mark: Some(mark) }).is_ok();
        if flushed {
            self.model.floor.clone_from(&self.model.done);
        }
        flushed
    }

    /// A write that was begun before a flush which does not cover it; its data go to the disk behind the flush.
    fn write_across_a_flush(&mut self, range: BlockRange, mark: Version) {
        if !self.enter_log() {
            return;
        }
        self.sequence += 2;
        let version = Version::new(Generation(self.generation), self.sequence);
        let data: Vec<u8> = range.blocks().flat_map(|block| content(block, version)).collect();
        let used = range.blocks().map(|block| usize::try_from(block - USED.start).unwrap());
        used.clone().for_each(|index| self.model.history[index].push((version, false)));
        let Ok(change) = self.region.plan_write(range, version, &block_crcs(&data), data.len()) else {
            return assert!(self.region.storage.is_cut());
        };
        if self.flush(mark) && self.region.change_now(&change, &data).is_ok() {
            used.for_each(|index| self.model.done[index] = version);
        }
    }

    /// Both extents leave the log behind a flush that was nobody's.
    fn leave_the_log(&mut self) {
        let entries = [3, 4].map(|slot| LogEntry { slot, extent: None }).to_vec();
        self.logged &= self.region.execute(&DiskOp::Flush { mark: None }).is_err()
            || self.region.execute(&DiskOp::ActivityLog { entries }).is_err();
    }

    /// A copy of a version that was missed: an odd number from before, likely below the flushed mark.
    fn copy(&mut self, block: u64, version: Version) {
        let index = usize::try_from(block - USED.start).unwrap();
        let missed = version.sequence.saturating_sub(1 + 2 * self.random.below(20));
        let missed = Version::new(version.generation, missed);
        let newest = self.model.history[index].iter().map(|&(version, _)| version).max().unwrap();
        let version = if missed > newest { missed } else { version };
        let data = content(block, version);
        let state = BlockState { version, crc: crc(&data), kind: BlockKind::Data };
        let blocks = vec![StoredBlock { block, state }];
        let op = DiskOp::Store { blocks, join: Version::MAX, data: data.into() };
        self.change(BlockRange::single(block), version, false, &op);
    }

    fn change(&mut self, range: BlockRange, version: Version, zeros: bool, op: &DiskOp) {
        if !self.enter_log() {
            return;
        }
        let used = range.blocks().map(|block| usize::try_from(block - USED.start).unwrap());
        used.clone().for_each(|index| self.model.history[index].push((version, zeros)));
        if self.region.execute(op).is_ok() {
            used.for_each(|index| self.model.done[index] = version);
        } else {
            assert!(self.region.storage.is_cut());
        }
    }

    /// Opens what is left after a crash and checks every block.
    fn crash(&mut self, power: bool) {
        let storage = if power {
            self.boot += 1;
            self.region.storage.power_cut(|| self.random.next())
        } else {
            self.region.storage.killed()
        };
        let boot = Uuid::from_u128(self.boot);
        let (region, facts, _) = RegionCore::open_on(storage, "mem", boot, &in_turn).unwrap();
        // Told until an activation has come to terms with it; whether one that was cut short did is left open.
        assert!(facts.lost_power || !power);
        self.region = region;
        self.logged = false;
        self.generation += 1;
        for block in USED.blocks() {
            self.check_block(block, power);
        }
        let scanned = self.region.digests(ExtentId(0), 2);
        self.region.scan_digests(&in_turn).unwrap();
        assert_eq!(self.region.digests(ExtentId(0), 2), scanned, "digests were kept up to date");
    }

    fn check_block(&mut self, block: u64, power: bool) {
        let index = usize::try_from(block - USED.start).unwrap();
        let (state, data) = self.read(block);
        let floor = if power { self.model.floor[index] } else { self.model.done[index] };
        let history = &self.model.history[index];
        let context = format!("block {block} {state:?} floor {floor} power {power} history {history:?}");
        assert!(state.version >= floor, "{context}");
        match state.kind {
            BlockKind::Data => {
                assert!(history.contains(&(state.version, false)), "{context}");
                assert!(data == content(block, state.version), "{context}");
                assert_eq!(state.crc, crc(&data), "{context}");
            }
            BlockKind::Zero => {
                assert!(history.contains(&(state.version, true)), "{context}");
                assert!(data.is_empty());
            }
            BlockKind::Unverified => {
                assert_eq!(state.crc, crc(&data), "{context}");
                for sector in data.chunks(512) {
                    let fits = |&&(version, zeros): &&(Version, bool)| {
                        if zeros {
                            sector.iter().all(|&byte| byte == 0)
                        } else {
                            *sector == content(block, version)[..512]
                        }
                    };
                    let newest = history.iter().filter(fits).map(|&(version, _)| version).max();
                    assert!(
                        newest.is_some_and(|newest| newest >= state.version),
                        "sector {newest:?}; {context}"
                    );
                }
            }
            BlockKind::Unreadable => panic!("{context}"),
        }
        // What is known now is what it is: later checks build on it.
        self.model.done[index] = state.version;
        if state.kind == BlockKind::Unverified {
            self.heal(block, index);
        }
    }

    fn heal(&mut self, block: u64, index: usize) {
        let version = Version::new(Generation(self.generation), 0);
        let data = content(block, version);
        let state = BlockState { version, crc: crc(&data), kind: BlockKind::Data };
        let blocks = vec![StoredBlock { block, state }];
        self.model.history[index].push((version, false));
        self.enter_log();
        let join = Version::MAX;
        self.region.execute(&DiskOp::Store { blocks, join, data: data.into() }).unwrap();
        self.model.done[index] = version;
        assert_eq!(self.read(block).0, state);
    }

    fn read(&self, block: u64) -> (BlockState, Bytes) {
        let op = DiskOp::Read { range: BlockRange::single(block), mode: ReadMode::Raw };
        let DiskOutcome::Read { states, data } = self.region.execute(&op).unwrap() else { panic!() };
        (states[0], data)
    }
}

#[test]
fn what_was_flushed_survives_and_nothing_is_verified_wrongly() {
    for seed in 0..500 {
        let mut run = Run::new(seed);
        for _ in 0..3 {
            let power = run.random.below(3) > 0;
            let cut = 1 + run.random.below(60);
            run.region.storage.cut_after(cut);
            while !run.region.storage.is_cut() {
                run.step();
            }
            run.crash(power);
        }
    }
}

fn write(
    region: &RegionCore<MemStorage>,
    block: u64,
    sequence: u64,
) -> Result<(), crate::core::api::DiskError> {
    let version = Version::new(Generation(1), sequence);
    let data = content(block, version);
    let crcs = block_crcs(&data);
    let range = BlockRange::single(block);
    region.execute(&DiskOp::Write { range, version, crcs, data: data.into() }).map(drop)
}

fn read(region: &RegionCore<MemStorage>, range: BlockRange, mode: ReadMode) -> (Vec<BlockState>, Bytes) {
    let DiskOutcome::Read { states, data } = region.execute(&DiskOp::Read { range, mode }).unwrap() else {
        panic!()
    };
    (states, data)
}

fn open(storage: MemStorage, boot: u128) -> (RegionCore<MemStorage>, super::open::OpenReport) {
    let (region, _, report) = RegionCore::open_on(storage, "mem", Uuid::from_u128(boot), &in_turn).unwrap();
    (region, report)
}

#[test]
fn what_was_flushed_after_it_left_the_log_survives_the_next_write_to_it() {
    let log = |region: &RegionCore<MemStorage>, extent| {
        region.execute(&DiskOp::ActivityLog { entries: vec![LogEntry { slot: 0, extent }] }).unwrap();
    };
    let flush = |region: &RegionCore<MemStorage>, mark: Option<u64>| {
        let mark = mark.map(|sequence| Version::new(Generation(1), sequence));
        region.execute(&DiskOp::Flush { mark }).unwrap();
    };
    let mut torn = 0;
    for seed in 1..200 {
        let mut random = Random(seed * 0x9e37_79b9);
        let (region, _) = open(fresh(), 1);
        log(&region, Some(ExtentId(0)));
        write(&region, 5, 1).unwrap();
        flush(&region, Some(2));
        write(&region, 5, 3).unwrap();
        flush(&region, None);
        log(&region, None);
        flush(&region, Some(4));
        let (region, _) = open(region.storage.power_cut(|| random.next()), 2);
        log(&region, Some(ExtentId(0)));
        write(&region, 5, 5).unwrap();
        let (region, _) = open(region.storage.power_cut(|| random.next()), 3);
        let state = read(&region, BlockRange::single(5), ReadMode::Raw).0[0];
        assert!(state.version.sequence >= 3, "{state:?}");
        torn += usize::from(state.kind == BlockKind::Unverified);
    }
    assert!(torn > 0, "nothing was torn");
}

#[test]
fn a_failed_sync_is_final() {
    let (region, _) = open(fresh(), 1);
    write(&region, 5, 1).unwrap();
    region.storage.fail_sync();
    assert!(region.execute(&DiskOp::Flush { mark: None }).is_err());
    assert!(write(&region, 5, 2).is_err(), "nothing changes any more");
    assert!(region.execute(&DiskOp::Close).is_err());
    assert_eq!(read(&region, BlockRange::single(5), ReadMode::Data).0[0].version.sequence, 1, "reads go on");
}

#[test]
fn a_block_that_cannot_be_read_fails_alone() {
    let (region, _) = open(fresh(), 1);
    (0..4).for_each(|block| write(&region, block, block + 1).unwrap());
    let at = region.layout.block_offset(1);
    region.storage.set_bad(Some(at..at + 512));
    let (states, data) = read(&region, BlockRange::new(0, 6), ReadMode::Data);
    let kinds: Vec<_> = states.iter().map(|state| state.kind).collect();
    use BlockKind::{Data, Unreadable, Zero};
    assert_eq!(kinds, [Data, Unreadable, Data, Data, Zero, Zero]);
    assert_eq!(data.len(), 3 * BLOCK_BYTES);
    assert_eq!(data[BLOCK_BYTES..2 * BLOCK_BYTES], content(2, Version::new(Generation(1), 3)));
}

#[test]
fn verifying_finds_what_rots_in_data_and_contexts_and_hands_no_data_on() {
    let (region, _) = open(fresh(), 1);
    (0..5).for_each(|block| write(&region, block, block + 1).unwrap());
    region.storage.corrupt(region.layout.block_offset(1) + 77);
    // The cache still knows this context as it was.
    region.storage.corrupt(region.layout.context_offset(3) + 28);
    let at = region.layout.block_offset(4);
    region.storage.set_bad(Some(at..at + 512));
    let (states, data) = read(&region, BlockRange::new(0, 6), ReadMode::Verify);
    let kinds: Vec<_> = states.iter().map(|state| state.kind).collect();
    use BlockKind::{Data, Unreadable, Zero};
    assert_eq!(kinds, [Data, Unreadable, Data, Unreadable, Unreadable, Zero]);
    assert!(data.is_empty());
    assert_eq!(states[1].version.sequence, 2, "the version is what the context says");
}

#[test]
fn a_failed_write_leaves_the_block_unverified_until_it_is_written_again() {
    let (region, _) = open(fresh(), 1);
    write(&region, 1, 1).unwrap();
    let at = region.layout.block_offset(0);
    region.storage.set_bad(Some(at..at + 2 * BLOCK_BYTES as u64));
    assert!(write(&region, 1, 2).is_err());
    assert!(write(&region, 0, 3).is_err());
    region.storage.set_bad(None);
    let (states, data) = read(&region, BlockRange::new(0, 2), ReadMode::Data);
    assert_eq!(states[0], BlockState::default(), "it reads as zeros, as before");
    assert_eq!((states[1].kind, states[1].version.sequence), (BlockKind::Unverified, 1));
    assert!(data.is_empty());
    let (region, _) = open(region.storage.killed(), 1);
    assert_eq!(read(&region, BlockRange::single(1), ReadMode::Contexts).0, states[1..], "it is found again");
    write(&region, 1, 4).unwrap();
    assert_eq!(read(&region, BlockRange::single(1), ReadMode::Data).0[0].kind, BlockKind::Data);
}

#[test]
fn one_header_copy_and_one_log_copy_are_enough() {
    let (region, _) = open(fresh(), 1);
    region
        .execute(&DiskOp::ActivityLog { entries: vec![LogEntry { slot: 9, extent: Some(ExtentId(1)) }] })
        .unwrap();
    region.execute(&DiskOp::Header(HeaderChange::Claim { volume: Uuid::from_u128(5) })).unwrap();
    for copy in [0, 1] {
        let storage = region.storage.killed();
        storage.corrupt(header_offset(copy) + 30);
        let (again, report) = open(storage, 1);
        assert!(report.bad_header.is_some());
        assert_eq!(again.header().volume, Uuid::from_u128(5));
        assert_eq!(again.logged_extents().len(), 1);
    }
    let storage = region.storage.killed();
    (0..2).for_each(|copy| storage.corrupt(header_offset(copy)));
    let error = RegionCore::open_on(storage, "mem", Uuid::nil(), &in_turn).unwrap_err().to_string();
    assert!(error.starts_with("mem: not a Newel region (header copy A: magic"), "{error}");
}

#[test]
fn without_a_log_record_the_whole_region_is_verified() {
    let (region, _) = open(fresh(), 1);
    write(&region, 7, 1).unwrap();
    write(&region, 1025, 2).unwrap();
    let storage = region.storage.killed();
    storage.corrupt(region.layout.block_offset(7));
    (0..2).for_each(|copy| storage.corrupt(region.layout.log_record_offset(0, copy) + 100));
    let (region, report) = open(storage, 1);
    assert_eq!((report.lost_records, report.verified_extents, report.blocks.unverified), (1, 2, 1));
    assert_eq!(read(&region, BlockRange::single(7), ReadMode::Contexts).0[0].kind, BlockKind::Unverified);
    assert_eq!(open(region.storage.killed(), 1).1.lost_records, 0);
}

#[test]
fn a_clean_region_verifies_nothing_and_keeps_its_digests() {
    let (region, _) = open(fresh(), 1);
    region
        .execute(&DiskOp::ActivityLog { entries: vec![LogEntry { slot: 0, extent: Some(ExtentId(0)) }] })
        .unwrap();
    write(&region, 7, 1).unwrap();
    let digests = region.digests(ExtentId(0), 5);
    assert!(digests.len() == 2 && digests[0] != 0 && digests[1] == 0);
    assert_ne!(fold_digests(digests.iter().copied()), fold_digests(digests.iter().rev().copied()));
    region.execute(&DiskOp::Close).unwrap();
    assert!(write(&region, 7, 2).is_err());
    let (region, report) = open(region.storage.power_cut(|| 0), 2);
    assert_eq!(report.verified_extents, 0);
    assert_eq!(region.digests(ExtentId(0), 2), digests);
    assert!(region.logged_extents().is_empty());
}

#[test]
fn newer_blocks_keep_what_they_have() {
    let (region, _) = open(fresh(), 1);
    write(&region, 0, 5).unwrap();
    write(&region, 0, 4).unwrap();
    let (states, data) = read(&region, BlockRange::single(0), ReadMode::Data);
    assert_eq!((states[0].version.sequence, data.len()), (5, BLOCK_BYTES));
    let store = |sequence, join| {
        let version = Version::new(Generation(1), sequence);
        let state = BlockState { version, crc: 0, kind: BlockKind::Zero };
        let join = Version::new(Generation(1), join);
        let op = DiskOp::Store { blocks: vec![StoredBlock { block: 0, state }], join, data: Bytes::new() };
        region.execute(&op).unwrap();
        read(&region, BlockRange::single(0), ReadMode::Data).0[0].version.sequence
    };
    assert_eq!(store(3, 5), 5, "at the join point it stays");
    assert_eq!(store(3, 6), 3, "below it the copy counts, whatever its version");
}

#[test]
fn an_unverified_block_takes_no_write_below_its_bound() {
    let (region, _) = open(fresh(), 1);
    write(&region, 0, 3).unwrap();
    let at = region.layout.block_offset(0);
    region.storage.set_bad(Some(at..at + 512));
    assert!(write(&region, 0, 3).is_err(), "sent again to a replica that can't write");
    region.storage.set_bad(None);
    let zero = |sequence| {
        let version = Version::new(Generation(1), sequence);
        let op = DiskOp::Zero { range: BlockRange::single(0), version, mode: ZeroMode::Contexts };
        region.execute(&op).unwrap();
        let state = read(&region, BlockRange::single(0), ReadMode::Contexts).0[0];
        (state.kind, state.version.sequence)
    };
    assert_eq!(zero(2), (BlockKind::Unverified, 3));
    write(&region, 0, 3).unwrap();
    assert_eq!(zero(2), (BlockKind::Data, 3));
    assert_eq!(zero(4), (BlockKind::Zero, 4));
}

#[test]
fn senseless_operations_are_errors() {
    let (region, _) = open(fresh(), 1);
    let version = Version::new(Generation(1), 1);
    let check = |op: DiskOp| assert!(region.execute(&op).is_err(), "{op:?}");
    let range = BlockRange { start: BLOCKS - 1, count: 2 };
    check(DiskOp::Zero { range, version, mode: ZeroMode::Punch });
    check(DiskOp::Read { range: BlockRange { start: u64::MAX, count: 1 }, mode: ReadMode::Data });
    check(DiskOp::Write { range: BlockRange::single(0), version, crcs: vec![], data: Bytes::new() });
    check(DiskOp::Contexts { extent: ExtentId(2) });
    check(DiskOp::ActivityLog { entries: vec![LogEntry { slot: 512, extent: None }] });
    check(DiskOp::Store { blocks: vec![], join: version, data: Bytes::new() });
    let state = BlockState { version, crc: 0, kind: BlockKind::Zero };
    let blocks = [5, 3].map(|block| StoredBlock { block, state }).to_vec();
    check(DiskOp::Store { blocks, join: version, data: Bytes::new() });
    let blocks = [5, 1025].map(|block| StoredBlock { block, state }).to_vec();
    check(DiskOp::Store { blocks, join: version, data: Bytes::new() });
    assert!(region.failure().is_none(), "and change nothing");
}
