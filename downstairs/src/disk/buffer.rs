//! Page-aligned buffers, as direct I/O wants them, and a pool that keeps them.
//!
//! Invariants:
//! - A buffer's bytes start at a multiple of 4096 in memory and never move while it lives, even if it is moved itself.
//! - The pool keeps at most `limit_bytes`; what comes back beyond that is freed.
//! - A buffer from the pool holds whatever its last user left: it is for data about to be overwritten.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::lock;

/// The strictest alignment any device or file system asks for, and the unit of the page cache.
const ALIGN_BYTES: usize = 4096;
/// Classes are powers of two from 4 KiB to 4 MiB, the largest job.
const CLASSES: usize = 11;
const SMALLEST_CLASS_BYTES: usize = 4096;

pub struct AlignedBuf {
    /// One alignment longer than needed, so that an aligned start lies within it.
    raw: Vec<u8>,
    start: usize,
    len: usize,
    home: Option<Arc<BufferPool>>,
}

impl AlignedBuf {
    /// A zeroed buffer of its own.
    pub fn zeroed(len: usize) -> Self {
        Self::from_raw(vec![0; len + ALIGN_BYTES], len, None)
    }

    fn from_raw(raw: Vec<u8>, len: usize, home: Option<Arc<BufferPool>>) -> Self {
        let start = raw.as_ptr().addr().next_multiple_of(ALIGN_BYTES) - raw.as_ptr().addr();
        debug_assert!(start + len <= raw.len());
        Self { raw, start, len, home }
    }

    /// Forgets the bytes past `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.raw.get(self.start..self.start + self.len).unwrap_or_default()
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.raw.get_mut(self.start..self.start + self.len).unwrap_or_default()
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            home.put_back(std::mem::take(&mut self.raw));
        }
    }
}

#[derive(Debug)]
pub struct BufferPool {
    classes: [Mutex<Vec<Vec<u8>>>; CLASSES],
    kept_bytes: AtomicUsize,
    limit_bytes: usize,
}

impl BufferPool {
    pub fn new(limit_bytes: usize) -> Arc<Self> {
        Arc::new(Self { classes: Default::default(), kept_bytes: AtomicUsize::new(0), limit_bytes })
    }

    pub fn take(self: &Arc<Self>, len: usize) -> AlignedBuf {
        let Some((class, bytes)) = class_of(len) else { return AlignedBuf::zeroed(len) };
        let kept = self.classes.get(class).and_then(|kept| lock(kept).pop());
        let raw = match kept {
            Some(raw) => {
                self.kept_bytes.fetch_sub(raw.len(), Ordering::Relaxed);
                raw
            }
            None => vec![0; bytes + ALIGN_BYTES],
        };
        AlignedBuf::from_raw(raw, len, Some(Arc::clone(self)))
    }

    fn put_back(&self, raw: Vec<u8>) {
        let kept = self.kept_bytes.fetch_add(raw.len(), Ordering::Relaxed) + raw.len();
        let class =
            class_of(raw.len().saturating_sub(ALIGN_BYTES)).and_then(|(class, _)| self.classes.get(class));
        match class {
            Some(class) if kept <= self.limit_bytes => lock(class).push(raw),
            Some(_) | None => {
                self.kept_bytes.fetch_sub(raw.len(), Ordering::Relaxed);
            }
        }
    }
}

/// The class for `len` bytes and its size; `None` if it is larger than all.
fn class_of(len: usize) -> Option<(usize, usize)> {
    let bytes = len.max(SMALLEST_CLASS_BYTES).checked_next_power_of_two()?;
    let class = (bytes / SMALLEST_CLASS_BYTES).trailing_zeros() as usize;
    (class < CLASSES).then_some((class, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_come_back() {
        let pool = BufferPool::new(1 << 20);
        let check = |len: usize| {
            let mut buffer = pool.take(len);
            assert_eq!(buffer.as_ptr().addr() % ALIGN_BYTES, 0);
            assert_eq!(buffer.len(), len);
            buffer.fill(7);
            let bytes = bytes::Bytes::from_owner(buffer);
            assert!(bytes.iter().all(|&byte| byte == 7));
        };
        for len in [1, 4096, 4097, 65536, 4 << 20, 5 << 20] {
            check(len);
            check(len);
        }
        assert!(pool.kept_bytes.load(Ordering::Relaxed) <= 1 << 20);
        assert!(pool.kept_bytes.load(Ordering::Relaxed) >= 65536);
    }
}
