use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use bytes::Bytes;
use newel_protocol::crc::block_crcs;
use newel_protocol::wire::{ReadMode, StoredBlock, ZeroMode};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, BlockState, ExtentId, Generation, Version};
use uuid::Uuid;

use super::*;
use crate::core::api::{HeaderChange, LogEntry};
use crate::disk::context::fold_digests;
use crate::disk::create::{CreateOptions, Prealloc, create_region};
use crate::disk::file::OpenOptions;

/// A directory of the build, which is on a disk where /tmp may not be.
fn beside_us() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

struct Rig {
    _directory: tempfile::TempDir,
    path: PathBuf,
    region: Arc<Region>,
    pool: Option<Pool>,
    next: u64,
}

impl Rig {
    fn new(depth: u32, engine: EngineKind, cache: CacheMode) -> Self {
        let directory = tempfile::Builder::new().prefix("newel-pool").tempdir_in(beside_us()).unwrap();
        let path = directory.path().join("region");
        let options = CreateOptions {
            path: path.clone(),
            size: Some(16 << 20),
            volume: Uuid::nil(),
            prealloc: Prealloc::Fallocate,
            force: false,
        };
        create_region(&options, &|_, _, _| {}).unwrap();
        Self::on(
            directory,
            path,
            PoolOptions { depth, max_queued: 1000, engine: Some(engine), cache, ..PoolOptions::default() },
        )
    }

    /// Over a region that exists.
    fn on(directory: tempfile::TempDir, path: PathBuf, options: PoolOptions) -> Self {
        let (region, _) = Region::open(&path, &OpenOptions::default()).unwrap();
        region.apply(&HeaderChange::Promise { generation: Generation(1), upstairs: Uuid::nil() }).unwrap();
        // These tests look all the time, and need no waking.
        let wake = Arc::new(|| {});
        let pool = Some(Pool::start(Arc::clone(&region), options, wake).unwrap());
        Self { _directory: directory, path, region, pool, next: 0 }
    }

    fn run(&mut self, kinds: Vec<DiskOp>) -> Vec<DiskDone> {
        let first = self.next;
        let count = kinds.len();
        let mut commands: Vec<_> =
            (first..).map(OpId).zip(kinds).map(|(op, kind)| DiskCommand { op, job: None, kind }).collect();
        self.next += count as u64;
        let pool = self.pool.as_ref().unwrap();
        pool.submit(&mut commands);
        assert!(commands.is_empty());
        let mut done = Vec::new();
        while done.len() < count {
            pool.completed(&mut done);
            std::thread::yield_now();
        }
        done.sort_by_key(|done| done.op);
        assert!(done.iter().map(|done| done.op.0).eq(first..self.next), "each once");
        done
    }

    fn one(&mut self, kind: DiskOp) -> DiskOutcome {
        self.run(vec![kind]).pop().unwrap().result.unwrap()
    }

    fn read(&mut self, start: u64, count: u32) -> (Vec<BlockState>, Bytes) {
        let op = DiskOp::Read { range: BlockRange::new(start, count), mode: ReadMode::Data };
        let DiskOutcome::Read { states, data } = self.one(op) else { panic!() };
        (states, data)
    }
}

/// The same over every engine, and through the page cache.
fn over_all(depth: u32, test: impl Fn(Rig)) {
    for &engine in <EngineKind as clap::ValueEnum>::value_variants() {
        test(Rig::new(depth, engine, CacheMode::None));
    }
    test(Rig::new(depth, EngineKind::Aio, CacheMode::Page));
}

fn v(sequence: u64) -> Version {
    Version::new(Generation(1), sequence)
}

fn content(block: u64, sequence: u64) -> Vec<u8> {
    (block * 31 + sequence).to_le_bytes().repeat(BLOCK_BYTES / 8)
}

fn write(start: u64, count: u32, sequence: u64) -> DiskOp {
    let range = BlockRange::new(start, count);
    let data: Vec<u8> = range.blocks().flat_map(|block| content(block, sequence)).collect();
    let crcs = block_crcs(&data);
    // One byte off, so that it has to be copied where the device cares.
    let mut shifted = vec![0];
    shifted.extend_from_slice(&data);
    DiskOp::Write { range, version: v(sequence), crcs, data: Bytes::from(shifted).slice(1..) }
}

#[test]
fn many_writes_are_merged_and_all_are_there() {
    over_all(4, merged);
}

fn merged(mut rig: Rig) {
    // Neighbours, out of order, more than there is depth for.
    let order = (0..600_u64).map(|number| number * 7 % 600);
    let writes = order.map(|block| write(block, 1, block + 1)).collect();
    assert!(rig.run(writes).iter().all(|done| done.result.is_ok()));
    let (states, data) = rig.read(0, 600);
    for (block, state) in (0..).zip(&states) {
        assert_eq!((state.kind, state.version), (BlockKind::Data, v(block + 1)));
        let at = usize::try_from(block).unwrap() * BLOCK_BYTES;
        assert_eq!(data[at..at + BLOCK_BYTES], content(block, block + 1));
    }
    assert_eq!(states.iter().map(|state| state.crc).collect::<Vec<_>>(), block_crcs(&data));
}

#[test]
fn gaps_zeros_and_copies() {
    over_all(16, pieces);
}

fn pieces(mut rig: Rig) {
    rig.one(write(0, 8, 10));
    rig.one(DiskOp::Zero { range: BlockRange::new(2, 2), version: v(11), mode: ZeroMode::Punch });
    rig.one(DiskOp::Zero { range: BlockRange::new(6, 1), version: v(12), mode: ZeroMode::Allocate });
    // Blocks 2 and 3 are newer: the write falls into two pieces, as does the copy.
    rig.one(write(1, 4, 10));
    let copies = [1, 3, 5].map(|block| {
        let data = content(block, 99);
        StoredBlock {
            block,
            state: BlockState { version: v(5), crc: block_crcs(&data)[0], kind: BlockKind::Data },
        }
    });
    let data = [1, 3, 5].map(|block| content(block, 99)).concat();
    rig.one(DiskOp::Store { blocks: copies.to_vec(), join: v(11), data: data.into() });
    rig.one(DiskOp::Flush { mark: Some(v(13)) });
    let (states, data) = rig.read(0, 8);
    let sequences: Vec<_> = states.iter().map(|state| state.version.sequence).collect();
    assert_eq!(sequences, [10, 5, 11, 11, 10, 5, 12, 10]);
    assert_eq!(states[2].kind, BlockKind::Zero);
    assert_eq!(data.len(), 6 * BLOCK_BYTES);
    let expected = [content(0, 10), content(1, 99), content(4, 10), content(5, 99), vec![0; BLOCK_BYTES]];
    assert!(data.starts_with(&expected.concat()));
}

#[test]
fn everything_else_and_the_end() {
    over_all(8, the_end);
}

fn the_end(mut rig: Rig) {
    let entries = vec![LogEntry { slot: 700, extent: Some(ExtentId(1)) }];
    rig.one(DiskOp::ActivityLog { entries });
    rig.one(DiskOp::Header(HeaderChange::Promise {
        generation: Generation(4),
        upstairs: Uuid::from_u128(8),
    }));
    rig.one(write(1024, 1024, 3));
    let flushes = [Some(v(4)), None, Some(v(6)), Some(v(5))].map(|mark| DiskOp::Flush { mark });
    assert!(rig.run(flushes.into()).iter().all(|done| done.result.is_ok()));
    assert_eq!(rig.region.flushed_mark(), v(6));
    let DiskOutcome::Contexts(states) = rig.one(DiskOp::Contexts { extent: ExtentId(1) }) else { panic!() };
    assert!(states.len() == 1024 && states.iter().all(|state| state.version == v(3)));
    let DiskOutcome::Digests(digests) = rig.one(DiskOp::Digests { first: ExtentId(0), count: 9 }) else {
        panic!()
    };
    assert!(digests.len() == 4 && digests[1] != 0 && digests[0] == 0);
    assert!(rig.run(vec![write(4095, 1, 7), write(4096, 1, 7)])[1].result.is_err());

    // What was handed in is finished before the threads end.
    let pool = rig.pool.take().unwrap();
    let mut commands = (0..100)
        .map(|number| DiskCommand { op: OpId(number), job: None, kind: write(number * 9, 1, 50) })
        .collect();
    pool.submit(&mut commands);
    drop(pool);
    assert!((0..100).all(|number| {
        rig.region.plan_read(BlockRange::single(number * 9), ReadMode::Data).unwrap().fetch.is_some()
    }));
    let digest = fold_digests(rig.region.digests(ExtentId(0), 4).into_iter());
    drop(rig.region);
    let (region, facts) = Region::open(&rig.path, &OpenOptions::default()).unwrap();
    assert!(!facts.lost_power && facts.promised == Generation(4));
    assert_eq!(facts.log_entries, [LogEntry { slot: 700, extent: Some(ExtentId(1)) }]);
    assert_eq!(fold_digests(region.digests(ExtentId(0), 4).into_iter()), digest);
}

/// Writes of many guests go on while flushes wait, and flushes that wait together share a sync.
#[test]
fn flushes_are_shared_and_hold_nothing_back() {
    over_all(8, shared_flushes);
}

fn shared_flushes(mut rig: Rig) {
    let before = rig.region.syncs();
    // All are there before the lane's thread can have taken the first, or so many that most share one all the same.
    let mut ops: Vec<_> = (0..300).map(|mark| DiskOp::Flush { mark: Some(v(mark + 1)) }).collect();
    ops.extend((0..50).map(|number| write(number, 1, 400)));
    assert!(rig.run(ops).iter().all(|done| done.result.is_ok()));
    let syncs = rig.region.syncs() - before;
    assert!((1..=30).contains(&syncs), "{syncs} syncs for 300 flushes");
    assert_eq!(rig.region.flushed_mark(), v(300));
}

#[test]
fn too_much_is_refused_at_once() {
    over_all(1, refused_at_once);
}

fn refused_at_once(mut rig: Rig) {
    let done = rig.run((0..3000_u64).map(|number| write(number, 1, 1)).collect());
    let refused = done.iter().filter(|done| done.result.is_err()).count();
    assert_eq!(refused, 2000);
    assert!(
        done[2999]
            .result
            .as_ref()
            .is_err_and(|error| error.to_string().contains("as many operations as it may"))
    );
}

struct Detach(PathBuf);

impl Drop for Detach {
    fn drop(&mut self) {
        Command::new("losetup").arg("-d").arg(&self.0).status().ok();
    }
}

/// The device's content changes below the cache of the device.
#[test]
fn what_the_cache_has_wrong_is_read_from_the_medium() {
    let directory = tempfile::Builder::new().prefix("newel-pool").tempdir_in(beside_us()).unwrap();
    let image = directory.path().join("image");
    let below = File::options().read(true).write(true).create_new(true).open(&image).unwrap();
    below.set_len(24 << 20).unwrap();
    let found = Command::new("losetup").args(["-f", "--show", "--direct-io=on"]).arg(&image).output();
    let path = match found {
        Ok(output) if output.status.success() => {
            PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
        }
        other => return println!("SKIPPED: no loop device: {other:?}"),
    };
    let _detach = Detach(path.clone());
    let options = CreateOptions {
        path: path.clone(),
        size: Some(8 << 20),
        volume: Uuid::nil(),
        prealloc: Prealloc::Full,
        force: true,
    };
    create_region(&options, &|_, _, _| {}).unwrap();
    let options = PoolOptions { cache: CacheMode::Page, ..PoolOptions::default() };
    let mut rig = Rig::on(directory, path.clone(), options);
    // Larger than what the reactor reads by itself, and smaller.
    for (start, count) in [(0, 64), (100, 2)] {
        rig.one(write(start, count, 1));
        rig.one(DiskOp::Flush { mark: None });
        let good = rig.read(start, count).1;
        assert_eq!(good[..BLOCK_BYTES], content(start, 1));
        let offset = rig.region.layout().block_offset(start);
        let change = |bytes: &[u8]| {
            below.write_all_at(bytes, offset).unwrap();
            below.sync_all().unwrap();
        };
        let through_the_cache = || {
            let mut found = vec![0; good.len()];
            File::open(&path).unwrap().read_exact_at(&mut found, offset).unwrap();
            found
        };
        assert_eq!(through_the_cache(), good);
        // The medium rots, and the cache does not know: it still has what the context asks for.
        change(&vec![7; good.len()]);
        assert_eq!(rig.read(start, count).1, good);
        // Now the cache has the rot, and the medium is good again.
        rig.region.storage().cached_data().unwrap().forget(offset, good.len() as u64);
        assert_eq!(through_the_cache(), vec![7; good.len()]);
        change(&good);
        assert_eq!(through_the_cache(), vec![7; good.len()], "the cache is stale");
        assert_eq!(rig.read(start, count).1, good);
        assert_eq!(through_the_cache(), good, "the stale pages are gone");
        // If the medium is bad, it is the medium's data that is handed on.
        change(&vec![9; good.len()]);
        rig.region.storage().cached_data().unwrap().forget(offset, good.len() as u64);
        assert_eq!(rig.read(start, count).1, vec![9; good.len()]);
    }
}
