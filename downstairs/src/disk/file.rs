//! A region in a file or on a block device, and opening it.
//!
//! Invariants:
//! - Data goes through a descriptor with `O_DIRECT`, metadata through the page cache by another one of the same file.
//!   Where direct I/O isn't supported (tmpfs) data goes through the cache as well: `fdatasync` still makes it durable.
//! - The header and the log are written with `RWF_DSYNC`, past the cache.
//! - The region is locked for as long as it is open.
//!
//! Left to others: what is written where ([`super::region`]), data of many operations at once ([`super::pool`]).

use std::fs::{File, OpenOptions as FileOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use newel_protocol::BLOCK_BYTES;
use rustix::fs::{
    Advice, AtFlags, FallocateFlags, OFlags, SeekFrom, StatxFlags, fadvise, fallocate, fdatasync,
};
use rustix::io::{Errno, ReadWriteFlags, preadv2, pwritev2};
use tracing::{info, warn};
use uuid::Uuid;

use super::aio::CachedWrites;
use super::buffer::{AlignedBuf, BufferPool};
use super::device::DeviceQueue;
use super::error::RegionError;
use super::lock;
use super::open::{OpenReport, in_turn};
use super::owner::{lock_exclusively, open_error};
use super::region::RegionCore;
use super::storage::Storage;
use crate::core::api::RegionFacts;

const BOOT_ID_PATH: &str = "/proc/sys/kernel/random/boot_id";
/// Memory alignment of direct I/O where the kernel doesn't say (before 6.1): the usual sector.
const USUAL_ALIGN_BYTES: usize = 512;
/// Buffers kept for reads and unaligned writes: about 16 of the largest jobs, or thousands of small ones.
const BUFFERS_KEPT_BYTES: usize = 64 << 20;
/// More readers than this do not make a disk faster.
const MAX_VERIFY_THREADS: usize = 8;
/// As many as the write lane has at once, most of the time.
const CONTEXTS_AT_ONCE: u32 = 64;
/// Opening says how far it is whenever this share of the work is done.
const PROGRESS_STEPS: u32 = 10;

/// A region on local disk.
pub type Region = RegionCore<FileStorage>;

#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// This boot of the host, if it is not to be asked: an image of another host's disk lost power with it.
    pub boot_id: Option<Uuid>,
    /// Threads that verify after a crash; 0 means as many as there are processors, at most 8.
    pub verify_threads: usize,
}

impl Region {
    /// Locks and opens a region, and verifies it if it was not closed cleanly.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<(Arc<Self>, RegionFacts), RegionError> {
        let storage = FileStorage::open(path, Access::Write)?;
        let name = path.display().to_string();
        let boot_id = options.boot_id.map_or_else(this_boot, Ok)?;
        let threads = verify_threads(options.verify_threads);
        let (region, facts, report) = Self::open_on(storage, &name, boot_id, &|what, count, task| {
            on_threads(&name, threads, what, count, task)
        })?;
        log_report(&name, &facts, &report);
        Ok((Arc::new(region), facts))
    }
}

fn log_report(path: &str, facts: &RegionFacts, report: &OpenReport) {
    if let Some(fault) = &report.bad_header {
        warn!("{path}: one header copy is damaged ({fault}); the other one is in force");
    }
    if report.lost_records > 0 {
        warn!(
            "{path}: {} activity-log records were damaged: the whole region was verified",
            report.lost_records
        );
    }
    let blocks = &report.blocks;
    info!(
        "{path}: region {} of {} blocks is open; {} extents verified, {} blocks went back to what was flushed, {} are \
         unverified, {} cannot be read{}",
        facts.region,
        facts.blocks,
        report.verified_extents,
        blocks.went_back,
        blocks.unverified,
        blocks.unreadable,
        if facts.lost_power { "; the host has booted since it was in use" } else { "" },
    );
}

pub(super) fn verify_threads(wanted: usize) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if wanted == 0 { processors.min(MAX_VERIFY_THREADS) } else { wanted.min(MAX_VERIFY_THREADS) }
}

/// A `Runner` on several threads.
pub(super) fn on_threads(
    name: &str,
    threads: usize,
    what: &'static str,
    count: u32,
    task: &(dyn Fn(u32) -> Result<(), RegionError> + Sync),
) -> Result<(), RegionError> {
    if threads < 2 || count < 2 {
        return in_turn(what, count, task);
    }
    let next = AtomicU32::new(0);
    let step = (count / PROGRESS_STEPS).max(64);
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return Ok(());
            }
            if number > 0 && number.is_multiple_of(step) {
                info!("{name}: {what}, {number} of {count}");
            }
            if let Err(error) = task(number) {
                next.store(count, Ordering::Relaxed);
                return Err(error);
            }
        }
    };
    std::thread::scope(|scope| {
        let start = |_| std::thread::Builder::new().name("newel-verify".into()).spawn_scoped(scope, work);
        // A thread that can't be started is not needed: this one works too.
        let helpers: Vec<_> = (1..threads).filter_map(|number| start(number).ok()).collect();
        let mut result = work();
        for helper in helpers {
            let theirs = helper
                .join()
                .unwrap_or_else(|_| Err(RegionError::io(what, name, io::Error::other("a thread died"))));
            result = result.and(theirs);
        }
        result
    })
}

fn this_boot() -> Result<Uuid, RegionError> {
    let found = std::fs::read_to_string(BOOT_ID_PATH)
        .map_err(|source| RegionError::BootId { path: BOOT_ID_PATH, source })?;
    Uuid::try_parse(found.trim()).map_err(|_| RegionError::BadBootId { path: BOOT_ID_PATH, found })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
    /// Read, and go on with a warning if another process holds it.
    Peek,
}

#[derive(Debug)]
pub struct FileStorage {
    cached: File,
    direct: File,
    path: PathBuf,
    align_bytes: usize,
    is_direct: bool,
    /// Many contexts at once; `None` if the system allows no more rings.
    contexts: Option<Mutex<CachedWrites>>,
    device: DeviceQueue,
    pub(super) is_device: bool,
    pub(super) buffers: Arc<BufferPool>,
}

impl FileStorage {
    pub(super) fn open(path: &Path, access: Access) -> Result<Self, RegionError> {
        let name = path.display().to_string();
        let fail = |error| RegionError::io("open it", &name, error);
        let kind = std::fs::metadata(path).map_err(fail)?.file_type();
        let is_device = kind.is_block_device();
        if !is_device && !kind.is_file() {
            let what = if kind.is_dir() { "a directory" } else { "a special file" };
            return Err(RegionError::WrongKind { path: name, what });
        }
        let write = access == Access::Write;
        let mut options = FileOptions::new();
        options.read(true).write(write);
        if is_device && write {
            // Refuses a device that is mounted or belongs to another volume manager.
            options.custom_flags(OFlags::EXCL.bits().cast_signed());
        }
        let cached = options.open(path).map_err(|error| open_error(path, &name, error))?;
        match lock_exclusively(&cached, &name) {
            Err(error @ RegionError::Locked { .. }) if access == Access::Peek => {
                warn!("{error}; what follows may be changing");
            }
            other => other?,
        }
        Self::on(cached, path, is_device, write)
    }

    /// Over a file that is open and locked.
    pub(super) fn on(cached: File, path: &Path, is_device: bool, write: bool) -> Result<Self, RegionError> {
        let name = path.display().to_string();
        let device = DeviceQueue::under(&cached);
        if let Some(found) = device.sector_bytes.filter(|&bytes| bytes > BLOCK_BYTES) {
            return Err(RegionError::SectorSize { path: name, found, largest: BLOCK_BYTES });
        }
        // An administrator may open it for writing all the same, and fails later.
        if is_device && write && device.read_only {
            let what = format!("device {}", device.name.unwrap_or_default());
            return Err(RegionError::ReadOnly { path: name, what });
        }
        // The table is read and written in small pieces all over: large pages in the cache would only cost.
        if let Err(error) = fadvise(&cached, 0, None, Advice::Random) {
            warn!("{name}: no advice on the page cache is taken: {error}");
        }
        let again = format!("/proc/self/fd/{}", cached.as_raw_fd());
        let mut options = FileOptions::new();
        options.read(true).write(write).custom_flags(OFlags::DIRECT.bits().cast_signed());
        let (direct, is_direct) = match options.open(again) {
            Ok(direct) => (direct, true),
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                warn!("{name}: no direct I/O here: data goes through the page cache, and is slower");
                (cached.try_clone().map_err(|error| RegionError::io("open it", &name, error))?, false)
            }
            Err(error) => return Err(RegionError::io("open it for direct I/O", &name, error)),
        };
        let align_bytes = if is_direct { memory_alignment(&direct) } else { 1 };
        let buffers = BufferPool::new(BUFFERS_KEPT_BYTES);
        let contexts = if write { contexts_ring(&name) } else { None };
        let path = path.to_owned();
        Ok(Self { cached, direct, path, align_bytes, is_direct, contexts, device, is_device, buffers })
    }

    pub(super) fn cached(&self) -> &File {
        &self.cached
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// True if the device can take these bytes from where they are.
    pub(super) fn is_aligned(&self, bytes: &[u8]) -> bool {
        bytes.as_ptr().addr().is_multiple_of(self.align_bytes)
    }
}

fn contexts_ring(name: &str) -> Option<Mutex<CachedWrites>> {
    match CachedWrites::new(CONTEXTS_AT_ONCE) {
        Ok(writes) => Some(Mutex::new(writes)),
        Err(error) => {
            warn!("{name}: contexts are written one by one: {error}; raise fs.aio-max-nr");
            None
        }
    }
}

fn memory_alignment(file: &File) -> usize {
    rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .and_then(|found| usize::try_from(found.stx_dio_mem_align).ok())
        .filter(|align| align.is_power_of_two() && *align <= 4096)
        .unwrap_or(USUAL_ALIGN_BYTES)
}

impl Storage for FileStorage {
    fn size_bytes(&self) -> io::Result<u64> {
        if self.is_device {
            return Ok(rustix::fs::seek(&self.cached, SeekFrom::End(0))?);
        }
        Ok(self.cached.metadata()?.len())
    }

    fn read_cached(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.cached.read_exact_at(into, offset)
    }

    fn write_cached(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.cached.write_all_at(bytes, offset)
    }

    fn write_cached_many(&self, writes: &[(u64, &[u8])]) -> io::Result<()> {
        if let (Some(contexts), true) = (&self.contexts, writes.len() > 1)
            && lock(contexts).write(self.cached.as_fd(), writes).is_ok()
        {
            return Ok(());
        }
        // One alone, or whatever went wrong: again, to see what is wrong with which.
        writes.iter().try_for_each(|&(offset, bytes)| self.write_cached(offset, bytes))
    }

    fn write_durable(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut page = self.buffers.take(bytes.len());
        page.copy_from_slice(bytes);
        match write_dsync(&self.direct, offset, &page) {
            // File systems older than the flag.
            Err(Errno::OPNOTSUPP) => {
                self.direct.write_all_at(&page, offset)?;
                self.sync()
            }
            other => Ok(other?),
        }
    }

    fn read_direct(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if self.is_aligned(into) {
            return self.direct.read_exact_at(into, offset);
        }
        let mut aligned = self.buffers.take(into.len());
        self.direct.read_exact_at(&mut aligned, offset)?;
        into.copy_from_slice(&aligned);
        Ok(())
    }

    fn write_direct(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if self.is_aligned(bytes) {
            return self.direct.write_all_at(bytes, offset);
        }
        self.direct.write_all_at(&self.aligned_copy(bytes), offset)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(fdatasync(&self.cached)?)
    }

    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        Ok(fallocate(&self.cached, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, bytes)?)
    }

    fn is_hole(&self, offset: u64, bytes: u64) -> bool {
        if self.is_device {
            return false;
        }
        // Positions of the descriptor mean nothing here: all other calls name an offset.
        match rustix::fs::seek(&self.cached, SeekFrom::Data(offset)) {
            Ok(data) => data >= offset.saturating_add(bytes),
            Err(error) => error == Errno::NXIO,
        }
    }
}

impl FileStorage {
    pub(super) fn aligned_copy(&self, bytes: &[u8]) -> AlignedBuf {
        let mut aligned = self.buffers.take(bytes.len());
        aligned.copy_from_slice(bytes);
        aligned
    }

    pub(super) fn direct_file(&self) -> io::Result<File> {
        self.direct.try_clone()
    }

    /// For data through the page cache, with the kernel's readahead.
    pub(super) fn cached_data(&self) -> io::Result<CachedData> {
        let again = format!("/proc/self/fd/{}", self.cached.as_raw_fd());
        Ok(CachedData(FileOptions::new().read(true).open(again)?))
    }

    /// False if data goes through the page cache because the file system knows nothing else.
    pub(super) fn is_direct(&self) -> bool {
        self.is_direct
    }

    pub(super) fn device_queue(&self) -> &DeviceQueue {
        &self.device
    }
}

/// The data of a region as the page cache has it. What was written with direct I/O is dropped from the cache by the kernel, but not
/// in every case before a reader comes; so what is read here counts only if it matches its checksum.
#[derive(Debug)]
pub(super) struct CachedData(File);

impl CachedData {
    pub(super) fn file(&self) -> io::Result<File> {
        self.0.try_clone()
    }

    /// True if all of it was in the cache. Never waits.
    pub(super) fn read_now(&self, offset: u64, into: &mut [u8]) -> bool {
        let whole = into.len();
        let found = preadv2(&self.0, &mut [io::IoSliceMut::new(into)], offset, ReadWriteFlags::NOWAIT);
        found == Ok(whole)
    }

    /// The cache is wrong about these bytes: it is to ask the medium again.
    pub(super) fn forget(&self, offset: u64, bytes: u64) {
        if let Err(error) = fadvise(&self.0, offset, std::num::NonZero::new(bytes), Advice::DontNeed) {
            warn!("the page cache keeps {bytes} bytes at {offset} although they are stale: {error}");
        }
    }
}

fn write_dsync(file: &File, mut offset: u64, mut bytes: &[u8]) -> Result<(), Errno> {
    let fd: BorrowedFd<'_> = file.as_fd();
    while !bytes.is_empty() {
        let written = match pwritev2(fd, &[io::IoSlice::new(bytes)], offset, ReadWriteFlags::DSYNC) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => written,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error),
        };
        bytes = bytes.get(written..).unwrap_or_default();
        offset += written as u64;
    }
    Ok(())
}
