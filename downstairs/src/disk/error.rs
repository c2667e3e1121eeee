//! Why a region can't be created, opened or checked.
//!
//! Every error names the path, what was found there, and what an operator can do.

use std::io;

use thiserror::Error;
use uuid::Uuid;

use super::format::PageFault;
use super::layout::LayoutError;
use crate::core::api::DiskError;

#[derive(Debug, Error)]
pub enum RegionError {
    #[error("{path}: cannot {operation}: {source}")]
    Io { operation: &'static str, path: String, source: io::Error },
    #[error("{path}: no such region; create one with `newel-downstairs create --region {path} --size …`")]
    Missing { path: String },
    #[error("{path}: cannot {operation}: permission denied; run as a user who may write there")]
    Permission { operation: &'static str, path: String },
    #[error("{path}: no space left on device: the region needs {needed} bytes; nothing was left behind")]
    NoSpace { path: String, needed: u64 },
    #[error(
        "{path}: the region needs {needed} bytes, and no file may be so large here; use XFS or a block device"
    )]
    FileTooLarge { path: String, needed: u64 },
    #[error("{path}: not a Newel region (header copy A: {copy_a}; copy B: {copy_b})")]
    NotARegion { path: String, copy_a: Box<PageFault>, copy_b: Box<PageFault> },
    #[error("{path}: both headers are damaged (copy A: {copy_a}; copy B: {copy_b}); replace this replica")]
    Damaged { path: String, copy_a: Box<PageFault>, copy_b: Box<PageFault> },
    #[error(
        "{path}: written by a newer Newel (format {found}, this program knows {known}); upgrade this host"
    )]
    Newer { path: String, found: u32, known: u32 },
    #[error("{path}: truncated: {found} bytes, but {what} needs {needed}; replace this replica")]
    Truncated { path: String, found: u64, what: &'static str, needed: u64 },
    #[error("{path}: in use by process {pid}; stop it first", pid = Pid(.pid))]
    Locked { path: String, pid: Option<u32> },
    #[error(
        "{path}: {what} is read-only; make it writable (blockdev --setrw, or mount -o remount,rw) or use another one"
    )]
    ReadOnly { path: String, what: String },
    #[error(
        "{path}: on a device with sectors of {found} bytes; a region is written in blocks of {largest}: use a device with \
         sectors of at most that"
    )]
    SectorSize { path: String, found: usize, largest: usize },
    #[error("{path}: in use by the system: mounted, or part of another volume; free it first")]
    Busy { path: String },
    #[error("{path}: already holds region {region} of {bytes} bytes; use --force to destroy it")]
    HoldsRegion { path: String, region: Uuid, bytes: u64 },
    #[error("{path}: already exists ({what}); use --force to destroy it")]
    Exists { path: String, what: String },
    #[error("{path}: {what}: a region is a regular file or a block device")]
    WrongKind { path: String, what: &'static str },
    #[error("--size {size}: must be a multiple of {multiple} bytes; the next larger one is {next}")]
    Size { size: u64, multiple: usize, next: u64 },
    #[error("{path}: a device of {found} bytes, but a region of {size} bytes needs {needed}")]
    DeviceTooSmall { path: String, found: u64, size: u64, needed: u64 },
    #[error("{path}: {source}")]
    Layout { path: String, source: LayoutError },
    #[cfg(feature = "daemon")]
    #[error(
        "{path}: engine {engine:?} cannot be set up for {depth} requests: {source}; raise fs.aio-max-nr if it is aio, or choose \
         another --engine"
    )]
    Engine { path: String, engine: super::engine::EngineKind, depth: u32, source: io::Error },
    #[error("cannot start thread {name}: {source}")]
    Thread { name: &'static str, source: io::Error },
    #[error("cannot read {path}: {source}")]
    BootId { path: &'static str, source: io::Error },
    #[error("cannot read {path}: {found:?} is no boot id")]
    BadBootId { path: &'static str, found: String },
}

impl RegionError {
    /// Sorts the usual causes out of an I/O error.
    pub(crate) fn io(operation: &'static str, path: &str, source: io::Error) -> Self {
        let path = path.to_owned();
        if source.kind() == io::ErrorKind::NotFound {
            return Self::Missing { path };
        }
        if source.kind() == io::ErrorKind::ReadOnlyFilesystem {
            return Self::ReadOnly { path, what: "its file system".to_owned() };
        }
        if source.kind() == io::ErrorKind::PermissionDenied {
            return Self::Permission { operation, path };
        }
        Self::Io { operation, path, source }
    }
}

/// A process that may be unknown.
struct Pid<'a>(&'a Option<u32>);

impl std::fmt::Display for Pid<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(pid) => write!(f, "{pid}"),
            None => f.write_str("(unknown)"),
        }
    }
}

/// What the core is told of a failed disk operation.
pub(crate) fn disk_error(
    operation: &'static str,
    place: &dyn std::fmt::Display,
    error: &io::Error,
) -> DiskError {
    if error.kind() == io::ErrorKind::StorageFull || error.kind() == io::ErrorKind::QuotaExceeded {
        DiskError::NoSpace { operation }
    } else {
        DiskError::Io { operation, message: format!("{place}: {error}") }
    }
}
