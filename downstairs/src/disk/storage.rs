//! What a region asks of the medium under it.
//!
//! Invariants of an implementation:
//! - A read sees every earlier write of this process, whichever call made it.
//! - What `write_durable` wrote survives a power cut once it returned, and so does everything written before `sync`
//!   began, once `sync` returned. Anything else may survive or not, in any order, torn at 512 bytes.
//! - After a failed `sync` nothing is known of what was written since the last one that succeeded.
//!
//! Left to others: the file and the block device ([`super::file`]), queued and batched data I/O ([`super::pool`]).

use std::io;

pub trait Storage: Send + Sync {
    /// How large the medium is.
    fn size_bytes(&self) -> io::Result<u64>;

    /// Metadata, through the system's cache.
    fn read_cached(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Metadata, through the system's cache: it survives the death of the process at once, a power cut only after `sync`.
    fn write_cached(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Several of these, in any order; after an error each of them may have been written or not.
    fn write_cached_many(&self, writes: &[(u64, &[u8])]) -> io::Result<()> {
        writes.iter().try_for_each(|&(offset, bytes)| self.write_cached(offset, bytes))
    }

    /// Whole pages; durable on return.
    fn write_durable(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Whole pages from the medium itself.
    fn read_direct(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Whole pages to the medium itself; durable after `sync`.
    fn write_direct(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    fn sync(&self) -> io::Result<()>;

    /// Give the space back; what was there reads as zeros or as before. Only an optimisation.
    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()>;

    /// True if these bytes are known to be zeros without reading them.
    fn is_hole(&self, offset: u64, bytes: u64) -> bool;
}
