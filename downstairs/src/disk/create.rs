//! Creating a region.
//!
//! Invariants:
//! - Nothing that exists is destroyed without `force`, and nothing that a running process holds at all.
//! - The headers are written last: a creation that was interrupted leaves nothing that looks like a region.
//! - A file that could not be created as a whole is removed.
//! - The context table is allocated, so that a context can be written whenever its data could be.
//!
//! Left to others: progress on a terminal and arguments ([`super::cli`]).

use std::fs::{self, File, OpenOptions as FileOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use newel_protocol::BLOCK_BYTES;
use rustix::fs::{FallocateFlags, OFlags, fallocate, fstatvfs};
use rustix::io::Errno;
use tracing::warn;
use uuid::Uuid;

use super::buffer::AlignedBuf;
use super::error::RegionError;
use super::file::FileStorage;
use super::format::Header;
use super::layout::{DEFAULT_LOG_SLOTS, LOG_OFFSET, Layout, PAGE_BYTES, header_offset};
use super::open::format_on;
use super::owner::{lock_exclusively, open_error};
use super::region::RegionCore;
use super::storage::Storage;

/// One write when filling data.
const FILL_BYTES: u64 = 1 << 20;
/// Tables up to this size (a region of 128 GiB) are filled as well: writing into space that is allocated but was never
/// written costs a journal entry each time. Larger ones would take minutes.
const MAX_FILLED_TABLE_BYTES: u64 = 1 << 30;
/// A table this small is filled even in a sparse file whose file system can't allocate.
const SMALL_TABLE_BYTES: u64 = 64 << 20;
/// On a device, what is looked at for signs of other owners: file systems and partition tables lie at its start, and
/// second copies at its end.
const SIGNS_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Prealloc {
    /// Write zeros over everything: the first writes are as fast as all later ones.
    Full,
    /// Allocate the space without writing it.
    #[default]
    Fallocate,
    /// Take space as it is written; the disk may run full later.
    Sparse,
}

#[derive(Clone, Debug)]
pub struct CreateOptions {
    pub path: PathBuf,
    /// In bytes; `None` on a device means all of it.
    pub size: Option<u64>,
    /// Nil if the region shall belong to the first volume that comes.
    pub volume: Uuid,
    pub prealloc: Prealloc,
    pub force: bool,
}

/// Creates a region and returns its header. `progress` gets what is done and the bytes so far and in all.
pub fn create_region(
    options: &CreateOptions,
    progress: &dyn Fn(&'static str, u64, u64),
) -> Result<Header, RegionError> {
    check_size(options.size)?;
    let path = options.path.as_path();
    let name = path.display().to_string();
    match fs::metadata(path) {
        Ok(found) if found.file_type().is_block_device() => on_device(options, &name, progress),
        Ok(found) if found.is_file() => {
            make_way(options, &name, found.len())?;
            in_file(options, &name, progress)
        }
        Ok(found) => {
            let what = if found.is_dir() { "a directory" } else { "a special file" };
            Err(RegionError::WrongKind { path: name, what })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => in_file(options, &name, progress),
        Err(error) => Err(RegionError::io("look at it", &name, error)),
    }
}

fn check_size(size: Option<u64>) -> Result<(), RegionError> {
    match size {
        Some(size) if size == 0 || !size.is_multiple_of(BLOCK_BYTES as u64) => {
            let next = size.max(1).checked_next_multiple_of(BLOCK_BYTES as u64).unwrap_or(size);
            Err(RegionError::Size { size, multiple: BLOCK_BYTES, next })
        }
        Some(_) | None => Ok(()),
    }
}

fn layout_of(size: u64, name: &str) -> Result<Layout, RegionError> {
    let blocks = size / BLOCK_BYTES as u64;
    Layout::new(blocks, DEFAULT_LOG_SLOTS)
        .map_err(|source| RegionError::Layout { path: name.to_owned(), source })
}

/// Removes the file in the way, if that is wanted and nobody uses it.
fn make_way(options: &CreateOptions, name: &str, bytes: u64) -> Result<(), RegionError> {
    let old = File::open(&options.path).map_err(|error| RegionError::io("open it", name, error))?;
    lock_exclusively(&old, name)?;
    if !options.force {
        return Err(in_the_way(old, false, options, name, bytes));
    }
    fs::remove_file(&options.path).map_err(|error| RegionError::io("remove the old file", name, error))
}

/// What is there already.
fn in_the_way(old: File, is_device: bool, options: &CreateOptions, name: &str, bytes: u64) -> RegionError {
    let found = FileStorage::on(old, &options.path, is_device, false)
        .and_then(|storage| RegionCore::load(storage, name));
    match found {
        Ok((region, _)) => {
            let header = region.header();
            let bytes = header.layout.blocks * BLOCK_BYTES as u64;
            RegionError::HoldsRegion { path: name.to_owned(), region: header.region, bytes }
        }
        Err(_) => RegionError::Exists { path: name.to_owned(), what: format!("a file of {bytes} bytes") },
    }
}

/// Removes the file again unless all went well.
struct Unfinished<'a>(Option<&'a Path>);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0
            && let Err(error) = fs::remove_file(path)
        {
            warn!("{}: the unfinished file could not be removed: {error}", path.display());
        }
    }
}

fn in_file(
    options: &CreateOptions,
    name: &str,
    progress: &dyn Fn(&'static str, u64, u64),
) -> Result<Header, RegionError> {
    let Some(size) = options.size else {
        return Err(RegionError::Size { size: 0, multiple: BLOCK_BYTES, next: BLOCK_BYTES as u64 });
    };
    let layout = layout_of(size, name)?;
    let file = FileOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&options.path)
        .map_err(|error| create_error(&options.path, name, error))?;
    let mut unfinished = Unfinished(Some(&options.path));
    lock_exclusively(&file, name)?;
    let total = layout.total_bytes();
    let fail = |operation| move |error: io::Error| space_error(operation, name, total, error);
    file.set_len(total).map_err(fail("set its size"))?;
    let storage = FileStorage::on(file, &options.path, false, true)?;
    allocate(&storage, &layout, options.prealloc).map_err(fail("allocate its space"))?;
    let header = fill_and_seal(&storage, layout, options, progress).map_err(fail("write it"))?;
    sync_directory(&options.path).map_err(fail("make its name durable"))?;
    unfinished.0 = None;
    Ok(header)
}

fn on_device(
    options: &CreateOptions,
    name: &str,
    progress: &dyn Fn(&'static str, u64, u64),
) -> Result<Header, RegionError> {
    let file = FileOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::EXCL.bits().cast_signed())
        .open(&options.path)
        .map_err(|error| open_error(&options.path, name, error))?;
    lock_exclusively(&file, name)?;
    let storage = FileStorage::on(file, &options.path, true, true)?;
    let fail = |operation| move |error: io::Error| RegionError::io(operation, name, error);
    let found = storage.size_bytes().map_err(fail("find its size"))?;
    let layout = match options.size {
        Some(size) => layout_of(size, name)?,
        None => Layout::largest(found, DEFAULT_LOG_SLOTS)
            .map_err(|source| RegionError::Layout { path: name.to_owned(), source })?,
    };
    let needed = layout.total_bytes();
    if needed > found {
        let size = layout.blocks * BLOCK_BYTES as u64;
        return Err(RegionError::DeviceTooSmall { path: name.to_owned(), found, size, needed });
    }
    if !options.force {
        refuse_used(&storage, found, options, name)?;
    }
    // Whatever was a header here must not be one while the rest is written.
    for copy in [0, 1] {
        storage.write_durable(header_offset(copy), &[0; PAGE_BYTES]).map_err(fail("write it"))?;
    }
    fill_and_seal(&storage, layout, options, progress).map_err(fail("write it"))
}

fn refuse_used(
    storage: &FileStorage,
    size: u64,
    options: &CreateOptions,
    name: &str,
) -> Result<(), RegionError> {
    let mut bytes = AlignedBuf::zeroed(usize::try_from(SIGNS_BYTES.min(size)).unwrap_or(PAGE_BYTES));
    for offset in [0, size.saturating_sub(bytes.len() as u64)] {
        storage
            .read_cached(offset, &mut bytes)
            .map_err(|error| RegionError::io("look at it", name, error))?;
        if bytes.iter().any(|&byte| byte != 0) {
            let old = File::open(&options.path).map_err(|error| RegionError::io("open it", name, error))?;
            let mut error = in_the_way(old, true, options, name, size);
            if let RegionError::Exists { what, .. } = &mut error {
                *what = format!("a device of {size} bytes, not empty at byte {offset} and after");
            }
            return Err(error);
        }
    }
    Ok(())
}

fn allocate(storage: &FileStorage, layout: &Layout, prealloc: Prealloc) -> io::Result<()> {
    let (bytes, required) = match prealloc {
        Prealloc::Full | Prealloc::Fallocate => (layout.total_bytes(), true),
        Prealloc::Sparse => (layout.data_offset, false),
    };
    if !required && !has_room(storage, bytes) {
        let path = storage.path().display();
        warn!(
            "{path}: the context table takes {bytes} bytes, which are not there: contexts may meet a full disk"
        );
        return Ok(());
    }
    // Found out by allocating, it would leave nothing for the others on this disk meanwhile.
    if required && bytes > free_bytes(storage) {
        return Err(Errno::NOSPC.into());
    }
    match fallocate(storage.cached(), FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP) if prealloc == Prealloc::Full => Ok(()),
        Err(Errno::OPNOTSUPP) if !required => {
            if layout.contexts_bytes() > SMALL_TABLE_BYTES {
                warn!(
                    "{}: this file system can't allocate: contexts may meet a full disk",
                    storage.path().display()
                );
            }
            Ok(())
        }
        Err(Errno::OPNOTSUPP) => {
            Err(io::Error::other("this file system can't allocate space; use --prealloc full or sparse"))
        }
        Err(error) => Err(error.into()),
    }
}

/// A table that would take all that is left is not worth it: allocating it in part would leave nothing for anybody.
fn has_room(storage: &FileStorage, bytes: u64) -> bool {
    bytes <= free_bytes(storage) / 2
}

fn free_bytes(storage: &FileStorage) -> u64 {
    fstatvfs(storage.cached()).map_or(u64::MAX, |found| found.f_bavail.saturating_mul(found.f_frsize))
}

/// Table and data, then log and headers.
fn fill_and_seal(
    storage: &FileStorage,
    layout: Layout,
    options: &CreateOptions,
    progress: &dyn Fn(&'static str, u64, u64),
) -> io::Result<Header> {
    fill_table(storage, &layout, options.prealloc, progress)?;
    if options.prealloc == Prealloc::Full {
        fill_data(storage, &layout, progress)?;
    }
    format_on(storage, layout, Uuid::new_v4(), options.volume)
}

/// In writes of a page: the cache keeps the table in pieces as large as they were first written, and a context written
/// into a large piece costs more.
fn fill_table(
    storage: &FileStorage,
    layout: &Layout,
    prealloc: Prealloc,
    progress: &dyn Fn(&'static str, u64, u64),
) -> io::Result<()> {
    let bytes = layout.data_offset - layout.contexts_offset;
    debug_assert!(layout.contexts_offset > LOG_OFFSET);
    let fills = match prealloc {
        Prealloc::Full => true,
        Prealloc::Fallocate => bytes <= MAX_FILLED_TABLE_BYTES,
        Prealloc::Sparse => bytes <= SMALL_TABLE_BYTES,
    };
    if storage.is_device && !fills {
        // What lies on a device is anything; the kernel zeroes faster than writes do.
        return Ok(fallocate(
            storage.cached(),
            FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
            layout.contexts_offset,
            bytes,
        )?);
    }
    let pages = if fills { bytes / PAGE_BYTES as u64 } else { 0 };
    for page in 0..pages {
        storage.cached().write_all_at(&[0; PAGE_BYTES], layout.contexts_offset + page * PAGE_BYTES as u64)?;
        if page.is_multiple_of(1024) {
            progress("context table", page * PAGE_BYTES as u64, bytes);
        }
    }
    Ok(())
}

fn fill_data(
    storage: &FileStorage,
    layout: &Layout,
    progress: &dyn Fn(&'static str, u64, u64),
) -> io::Result<()> {
    let zeros = AlignedBuf::zeroed(usize::try_from(FILL_BYTES).unwrap_or(PAGE_BYTES));
    let total = layout.total_bytes() - layout.data_offset;
    let mut done = 0;
    while done < total {
        let bytes = zeros.get(..usize::try_from(total - done).unwrap_or(usize::MAX)).unwrap_or(&zeros);
        storage.write_direct(layout.data_offset + done, bytes)?;
        done += bytes.len() as u64;
        progress("data", done, total);
    }
    Ok(())
}

fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}

fn create_error(path: &Path, name: &str, error: io::Error) -> RegionError {
    if error.kind() == io::ErrorKind::NotFound {
        let parent = path.parent().unwrap_or(path).display().to_string();
        let source = io::Error::other(format!("directory {parent} does not exist"));
        return RegionError::Io { operation: "create it", path: name.to_owned(), source };
    }
    RegionError::io("create it", name, error)
}

fn space_error(operation: &'static str, name: &str, needed: u64, error: io::Error) -> RegionError {
    if error.kind() == io::ErrorKind::FileTooLarge {
        return RegionError::FileTooLarge { path: name.to_owned(), needed };
    }
    let no_space = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
    if no_space.contains(&error.kind()) {
        return RegionError::NoSpace { path: name.to_owned(), needed };
    }
    RegionError::io(operation, name, error)
}
