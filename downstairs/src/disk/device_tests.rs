//! Regions on block devices, and on file systems that can do less or more than usual.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use newel_protocol::crc::block_crcs;
use newel_protocol::wire::ReadMode;
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, Generation, Version};
use rustix::fs::OFlags;
use uuid::Uuid;

use super::create::Prealloc;
use super::engine::EngineKind;
use super::file_tests::{exercise, make, open};
use super::layout::HEADER_B_OFFSET;
use super::pool::{Pool, PoolOptions, engine_for};
use crate::core::api::{DiskCommand, DiskError, DiskOp, DiskOutcome, HeaderChange, OpId};

/// A loop device over a file beside the build, which goes away with it.
struct Loop {
    device: PathBuf,
    _directory: tempfile::TempDir,
}

impl Loop {
    /// `None` where there are no loop devices, which the test says.
    fn over(bytes: u64, options: &[&str]) -> Option<Self> {
        let beside_us = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let directory = tempfile::Builder::new().prefix("newel-loop").tempdir_in(beside_us).unwrap();
        let image = directory.path().join("image");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        let found = Command::new("losetup").args(["-f", "--show"]).args(options).arg(&image).output();
        match found {
            Ok(output) if output.status.success() => {
                let device = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
                Some(Self { device, _directory: directory })
            }
            other => {
                println!("SKIPPED: no loop device with {options:?}: {other:?}");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // Whoever gets this device next would find it so.
        Command::new("blockdev").arg("--setrw").arg(&self.device).status().ok();
        Command::new("losetup").arg("-d").arg(&self.device).status().ok();
    }
}

/// Writes and reads some blocks through the pool, as the daemon does.
fn through_the_pool(path: &Path, options: PoolOptions, starts: &[u64]) {
    let region = open(path).unwrap();
    region.apply(&HeaderChange::Promise { generation: Generation(2), upstairs: Uuid::nil() }).unwrap();
    let pool = Pool::start(Arc::clone(&region), options, Arc::new(|| {})).unwrap();
    let run = |kind| {
        pool.submit(&mut vec![DiskCommand { op: OpId(1), job: None, kind }]);
        let mut done = Vec::new();
        while done.is_empty() {
            pool.completed(&mut done);
            std::thread::yield_now();
        }
        done.pop().unwrap().result.unwrap()
    };
    for (&start, fill) in starts.iter().zip(1..) {
        let (range, data) = (BlockRange::new(start, 3), vec![fill; 3 * BLOCK_BYTES]);
        let version = Version::new(Generation(2), u64::from(fill));
        run(DiskOp::Write { range, version, crcs: block_crcs(&data), data: data.clone().into() });
        run(DiskOp::Flush { mark: Some(version) });
        let DiskOutcome::Read { data: found, .. } = run(DiskOp::Read { range, mode: ReadMode::Data }) else {
            panic!()
        };
        assert_eq!(found, data);
    }
    run(DiskOp::Close);
}

#[test]
fn a_device_from_end_to_end() {
    let Some(Loop { device, _directory }) = &Loop::over(24 << 20, &[]) else { return };
    let error = make(device, Some(24 << 20), Prealloc::Fallocate, false).unwrap_err();
    assert!(error.contains("a device of 25165824 bytes, but a region of 25165824 bytes needs"), "{error}");
    let header = make(device, None, Prealloc::Fallocate, false).unwrap();
    assert!(header.layout.total_bytes() <= 24 << 20 && header.layout.blocks > 5000);
    let error = make(device, None, Prealloc::Fallocate, false).unwrap_err();
    assert!(error.contains(&format!("already holds region {}", header.region)), "{error}");
    make(device, Some(8 << 20), Prealloc::Full, true).unwrap();
    exercise(device);
    let file = File::options().write(true).open(device).unwrap();
    file.write_all_at(&[0; 4096], 0).unwrap();
    file.write_all_at(&[0; 4096], HEADER_B_OFFSET).unwrap();
    drop(file);
    let error = make(device, None, Prealloc::Fallocate, false).unwrap_err();
    assert!(error.contains("not empty at byte 0"), "{error}");
}

#[test]
fn a_device_with_sectors_of_4_kib() {
    let Some(Loop { device, _directory }) = &Loop::over(24 << 20, &["-b", "4096", "--direct-io=on"]) else {
        return;
    };
    make(device, Some(8 << 20), Prealloc::Full, false).unwrap();
    exercise(device);
    make(device, Some(8 << 20), Prealloc::Fallocate, true).unwrap();
    for &engine in <EngineKind as clap::ValueEnum>::value_variants() {
        through_the_pool(device, PoolOptions { engine: Some(engine), ..PoolOptions::default() }, &[0, 700]);
    }
}

#[test]
fn a_device_with_larger_sectors_is_refused() {
    let Some(Loop { device, _directory }) = &Loop::over(24 << 20, &["-b", "8192"]) else { return };
    let error = make(device, Some(8 << 20), Prealloc::Fallocate, false).unwrap_err();
    assert!(error.contains("sectors of 8192 bytes"), "{error}");
}

#[test]
fn a_device_that_is_read_only_says_so() {
    let Some(Loop { device, _directory }) = &Loop::over(24 << 20, &[]) else { return };
    make(device, Some(8 << 20), Prealloc::Fallocate, false).unwrap();
    assert!(Command::new("blockdev").arg("--setro").arg(device).status().unwrap().success());
    for error in [open(device).unwrap_err(), make(device, None, Prealloc::Fallocate, true).unwrap_err()] {
        assert!(error.contains(&format!("{}: device loop", device.display())), "{error}");
        assert!(error.contains("is read-only; make it writable"), "{error}");
    }
    assert!(Command::new("blockdev").arg("--setrw").arg(device).status().unwrap().success());
    open(device).unwrap();
}

#[test]
fn a_device_in_use_says_so() {
    let Some(Loop { device, _directory }) = &Loop::over(24 << 20, &[]) else { return };
    make(device, Some(8 << 20), Prealloc::Fallocate, false).unwrap();
    let region = open(device).unwrap();
    let error = open(device).unwrap_err();
    assert!(error.contains(&format!("in use by process {}", std::process::id())), "{error}");
    drop(region);
    // As a mount or a volume manager has it: without our lock.
    let excl = OFlags::EXCL.bits().cast_signed();
    let holder = File::options().read(true).custom_flags(excl).open(device).unwrap();
    for error in [open(device).unwrap_err(), make(device, None, Prealloc::Fallocate, true).unwrap_err()] {
        assert!(error.contains("in use by the system: mounted, or part of another volume"), "{error}");
    }
    drop(holder);
    open(device).unwrap();
}

/// Larger than ext4 takes, and its table larger than the memory or disk of most who run this.
#[test]
fn a_sparse_region_of_20_tib() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        println!("SKIPPED: no /dev/shm");
        return;
    };
    let path = directory.path().join("region");
    let header = make(&path, Some(20 << 40), Prealloc::Sparse, false).unwrap();
    assert_eq!(header.layout.blocks * BLOCK_BYTES as u64, 20 << 40);
    let last = header.layout.blocks - 3;
    through_the_pool(&path, PoolOptions::default(), &[0, 17 << 28, last]);
    let taken = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&path).unwrap()) * 512;
    assert!(taken < 4 << 20, "{taken} bytes are taken");
}

/// A file system of its own in memory.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(kind: &str, options: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", kind, "-o", options, "none"]).arg(directory.path());
        match mount.output() {
            Ok(output) if output.status.success() => Some(Self(directory)),
            other => {
                println!("SKIPPED: no {kind} can be mounted: {other:?}");
                None
            }
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        Command::new("umount").arg(self.0.path()).status().ok();
    }
}

#[test]
fn a_file_system_without_direct_io_gets_threads() {
    let Some(mounted) = Mounted::new("ramfs", "defaults") else { return };
    let path = mounted.0.path().join("region");
    make(&path, Some(8 << 20), Prealloc::Sparse, false).unwrap();
    let region = open(&path).unwrap();
    assert_eq!(engine_for(&region, None), EngineKind::Psync);
    assert_eq!(engine_for(&region, Some(EngineKind::Aio)), EngineKind::Aio);
    drop(region);
    for engine in [None, Some(EngineKind::Aio)] {
        through_the_pool(&path, PoolOptions { engine, ..PoolOptions::default() }, &[0, 100]);
    }
}

/// Merged writes come short or fail; each operation is judged by itself, and the region lives on.
#[test]
fn a_disk_that_runs_full_fails_only_what_did_not_fit() {
    let block_of = |number: u64| vec![u8::try_from(number % 251).unwrap() + 1; BLOCK_BYTES];
    for &engine in <EngineKind as clap::ValueEnum>::value_variants() {
        let Some(mounted) = Mounted::new("tmpfs", "size=6m") else { return };
        let path = mounted.0.path().join("region");
        make(&path, Some(8 << 20), Prealloc::Sparse, false).unwrap();
        let region = open(&path).unwrap();
        region.apply(&HeaderChange::Promise { generation: Generation(1), upstairs: Uuid::nil() }).unwrap();
        let options = PoolOptions { engine: Some(engine), ..PoolOptions::default() };
        let pool = Pool::start(Arc::clone(&region), options, Arc::new(|| {})).unwrap();
        let mut done = Vec::new();
        let mut commands: Vec<_> = (0..2048)
            .map(|number| {
                let (range, data) = (BlockRange::single(number), block_of(number));
                let version = Version::new(Generation(1), 1);
                let crcs = block_crcs(&data);
                let kind = DiskOp::Write { range, version, crcs, data: data.into() };
                DiskCommand { op: OpId(number), job: None, kind }
            })
            .collect();
        pool.submit(&mut commands);
        while done.len() < 2048 {
            pool.completed(&mut done);
            std::thread::yield_now();
        }
        assert_eq!(region.failure(), None, "{engine:?}");
        let failed = done.iter().filter(|done| done.result.is_err()).count();
        assert!((500..1500).contains(&failed), "{engine:?}: {failed} of 2048 failed");
        let no_space = DiskError::NoSpace { operation: "a write" };
        for done in done {
            let range = BlockRange::single(done.op.0);
            let read = region.execute(&DiskOp::Read { range, mode: ReadMode::Data });
            let Ok(DiskOutcome::Read { states, data }) = read else { panic!("{read:?}") };
            match done.result {
                Ok(_) => assert_eq!(data, block_of(done.op.0), "{engine:?}, {range}"),
                Err(error) => {
                    assert_eq!(error, no_space);
                    assert_eq!(
                        states.first().map(|state| state.kind),
                        Some(BlockKind::Zero),
                        "{engine:?}, {range}"
                    );
                }
            }
        }
    }
}
