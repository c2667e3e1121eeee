//! Regions in real files and on a loop device: creating, opening, checking, and every way it is refused.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use newel_protocol::crc::block_crcs;
use newel_protocol::wire::{Membership, ReadMode, ZeroMode};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, ExtentId, Generation, Version};
use uuid::Uuid;

use super::audit::{Audit, audit};
use super::cli::{CheckArgs, CreateArgs, DumpArgs, check, create, dump};
use super::create::{CreateOptions, Prealloc, create_region};
use super::file::{Access, FileStorage, OpenOptions, Region};
use super::format::Header;
use super::layout::HEADER_B_OFFSET;
use super::region::RegionCore;
use super::storage::Storage;
use crate::core::api::{DiskOp, DiskOutcome, HeaderChange, LogEntry};

struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let beside_us = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        Self { directory: tempfile::Builder::new().prefix("newel-disk").tempdir_in(beside_us).unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("region")
    }

    fn make(&self, prealloc: Prealloc) -> Header {
        make(&self.path(), Some(8 << 20), prealloc, false).unwrap()
    }
}

pub(super) fn make(
    path: &Path,
    size: Option<u64>,
    prealloc: Prealloc,
    force: bool,
) -> Result<Header, String> {
    let options = CreateOptions { path: path.to_owned(), size, volume: Uuid::nil(), prealloc, force };
    create_region(&options, &|_, _, _| {}).map_err(|error| error.to_string())
}

pub(super) fn open(path: &Path) -> Result<std::sync::Arc<Region>, String> {
    Region::open(path, &OpenOptions::default()).map(|(region, _)| region).map_err(|error| error.to_string())
}

fn write(region: &Region, start: u64, count: u32, sequence: u64) {
    let range = BlockRange::new(start, count);
    let data: Vec<u8> = range.blocks().flat_map(|block| [(block % 251) as u8; BLOCK_BYTES]).collect();
    let crcs = block_crcs(&data);
    let version = Version::new(Generation(1), sequence);
    region.execute(&DiskOp::Write { range, version, crcs, data: data.into() }).unwrap();
}

fn audit_of(path: &Path) -> Audit {
    let storage = FileStorage::open(path, Access::Read).unwrap();
    let (region, _) = RegionCore::load(storage, "audited").unwrap();
    audit(&region, "audited", 2, &|_, _| {}).unwrap()
}

/// One life of a region: written, closed, opened again, corrupted, found out.
pub(super) fn exercise(path: &Path) {
    let region = open(path).unwrap();
    region.apply(&HeaderChange::Promise { generation: Generation(1), upstairs: Uuid::nil() }).unwrap();
    region
        .execute(&DiskOp::ActivityLog { entries: vec![LogEntry { slot: 5, extent: Some(ExtentId(0)) }] })
        .unwrap();
    write(&region, 0, 700, 1);
    let range = BlockRange::new(10, 5);
    let version = Version::new(Generation(1), 2);
    region.execute(&DiskOp::Zero { range, version, mode: ZeroMode::Punch }).unwrap();
    region.execute(&DiskOp::Flush { mark: Some(Version::new(Generation(1), 3)) }).unwrap();
    let digest = region.digests(ExtentId(0), 1);
    // The process dies here.
    drop(region);
    let found = audit_of(path);
    assert_eq!((found.data, found.zero, found.bad, found.unsettled), (695, 5, 0, 0));
    let region = open(path).unwrap();
    assert_eq!(region.digests(ExtentId(0), 1), digest);
    region.execute(&DiskOp::Close).unwrap();
    let at = region.layout().block_offset(20);
    drop(region);
    assert_eq!(audit_of(path), found);

    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(b"rot", at + 17).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let found = audit_of(path);
    assert_eq!((found.bad, found.listed[0].0), (1, 20));
    let error = check(&CheckArgs { region: path.to_owned(), threads: 1 }).unwrap_err().to_string();
    assert!(error.contains("1 bad blocks"), "{error}");
    // Outside the log nobody looks until it is read; then the checksum tells.
    let region = open(path).unwrap();
    let op = DiskOp::Read { range: BlockRange::single(20), mode: ReadMode::Data };
    let DiskOutcome::Read { states, data } = region.execute(&op).unwrap() else { panic!() };
    assert_eq!(states[0].kind, BlockKind::Data);
    assert_ne!(states[0].crc, block_crcs(&data)[0]);
}

#[test]
fn a_file_in_every_way_of_allocation() {
    for prealloc in [Prealloc::Full, Prealloc::Fallocate, Prealloc::Sparse] {
        let place = Place::new();
        let header = place.make(prealloc);
        assert!(header.clean && header.region != Uuid::nil());
        let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(place.path()).unwrap());
        assert_eq!(blocks * 512 >= 8 << 20, prealloc != Prealloc::Sparse);
        exercise(&place.path());
    }
}

#[test]
fn a_file_without_direct_io() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        println!("SKIPPED: no /dev/shm");
        return;
    };
    let path = directory.path().join("region");
    make(&path, Some(8 << 20), Prealloc::Sparse, false).unwrap();
    exercise(&path);
}

#[test]
fn what_can_not_be_opened_says_why() {
    let place = Place::new();
    let path = place.path();
    let refused = |text: &str| {
        let error = open(&path).unwrap_err();
        assert!(error.contains(text), "{error}");
        assert!(error.contains("region: "), "it names the path: {error}");
        let args = CheckArgs { region: path.clone(), threads: 1 };
        assert_eq!(check(&args).unwrap_err().to_string(), error);
    };
    refused("no such region; create one with");
    fs::create_dir(&path).unwrap();
    refused("a directory: a region is a regular file or a block device");
    fs::remove_dir(&path).unwrap();
    fs::write(&path, b"x").unwrap();
    refused("truncated: 1 bytes, but a region's header needs 69632");
    fs::write(&path, vec![7; 1 << 20]).unwrap();
    refused("not a Newel region (header copy A: magic [07, 07");
    fs::remove_file(&path).unwrap();

    let total = place.make(Prealloc::Sparse).layout.total_bytes();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    file.set_len(total - 1).unwrap();
    refused(&format!("truncated: {} bytes, but its header needs {total}", total - 1));
    file.set_len(total).unwrap();
    for offset in [0, HEADER_B_OFFSET] {
        file.write_all_at(b"!", offset + 1000).unwrap();
    }
    refused("both headers are damaged (copy A: checksum");
}

#[test]
fn a_region_in_use_names_its_process() {
    let place = Place::new();
    let path = place.path();
    place.make(Prealloc::Sparse);
    let region = open(&path).unwrap();
    let mine = format!("in use by process {}", std::process::id());
    let is_mine = |error: String| assert!(error.contains(&mine), "{error}");
    is_mine(open(&path).unwrap_err());
    is_mine(check(&CheckArgs { region: path.clone(), threads: 0 }).unwrap_err().to_string());
    is_mine(make(&path, Some(8 << 20), Prealloc::Sparse, true).unwrap_err());
    dump(&DumpArgs { region: path.clone(), extents: true, block: None }).unwrap();
    drop(region);
    open(&path).unwrap();
}

#[test]
fn what_can_not_be_created_says_why() {
    let place = Place::new();
    let path = place.path();
    let refused = |path: &Path, size, force, text: &str| {
        let error = make(path, size, Prealloc::Sparse, force).unwrap_err();
        assert!(error.contains(text), "{error}");
    };
    refused(
        &path,
        Some(5000),
        false,
        "--size 5000: must be a multiple of 4096 bytes; the next larger one is 8192",
    );
    refused(&path, Some(0), false, "--size 0");
    refused(&path, Some(u64::MAX / 4096 * 4096), false, "a region needs between 1 and");
    refused(&path.join("below"), Some(8192), false, "does not exist");
    refused(place.directory.path(), Some(8192), true, "a directory");
    assert!(!path.exists());

    let region = place.make(Prealloc::Sparse).region;
    refused(
        &path,
        Some(8192),
        false,
        &format!("already holds region {region} of 8388608 bytes; use --force"),
    );
    fs::write(&path, b"precious").unwrap();
    refused(&path, Some(8192), false, "already exists (a file of 8 bytes); use --force");
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    make(&path, Some(8192), Prealloc::Sparse, true).unwrap();
    open(&path).unwrap();
    let args =
        CreateArgs { region: path.clone(), size: None, volume: None, prealloc: Prealloc::Full, force: true };
    assert!(create(&args).unwrap_err().to_string().contains("--size is needed"));
}

#[test]
fn a_full_disk_leaves_nothing_behind() {
    let place = Place::new();
    let path = place.path();
    // More than any disk here has, and less than a file may have.
    let error = make(&path, Some(1 << 42), Prealloc::Fallocate, false).unwrap_err();
    assert!(error.contains("no space left on device: the region needs"), "{error}");
    assert!(!path.exists());
}

#[test]
fn a_foreign_boot_means_lost_power() {
    let place = Place::new();
    place.make(Prealloc::Sparse);
    let opened = |boot: u128| {
        let options = OpenOptions { boot_id: Some(Uuid::from_u128(boot)), verify_threads: 3 };
        let (region, facts) = Region::open(&place.path(), &options).unwrap();
        (region, facts.lost_power)
    };
    assert!(!opened(1).1, "a new region is clean");
    assert!(!opened(1).1, "killed, but on the same boot");
    assert!(opened(2).1);
    let (region, lost) = opened(2);
    assert!(lost, "a restart does not hide it");
    let activated = HeaderChange::Activated { generation: Generation(1), membership: Membership::default() };
    region.execute(&DiskOp::Header(activated)).unwrap();
    drop(region);
    let (region, lost) = opened(2);
    assert!(!lost, "an activation has come to terms with it");
    region.execute(&DiskOp::Close).unwrap();
    drop(region);
    assert!(!opened(3).1);
    assert!(region_is_hole_free(&place));
}

/// The table is allocated even in a sparse file, so that contexts can be written on a full disk.
fn region_is_hole_free(place: &Place) -> bool {
    let storage = FileStorage::open(&place.path(), Access::Read).unwrap();
    let layout = RegionCore::load(storage, "x").unwrap().0.layout();
    let storage = FileStorage::open(&place.path(), Access::Read).unwrap();
    !storage.is_hole(layout.contexts_offset, layout.contexts_bytes())
}
