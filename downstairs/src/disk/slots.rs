//! Requests in flight at the kernel, by the number that it hands back.
//!
//! Invariants:
//! - An entry stays where it is put until it is taken by its number; a number is given out again only then.

use std::io;
use std::time::Instant;

use super::engine::{Completion, Payload, Request};

#[derive(Debug)]
pub(super) struct Entry<T> {
    pub payload: Payload,
    pub user: T,
    pub submitted: Instant,
}

#[derive(Debug)]
pub(super) struct Slots<T> {
    entries: Vec<Option<Entry<T>>>,
    free: Vec<usize>,
}

impl<T> Slots<T> {
    pub(super) fn new(depth: usize) -> Self {
        Self { entries: (0..depth).map(|_| None).collect(), free: (0..depth).rev().collect() }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// The number of its slot; there must be room.
    pub(super) fn put(&mut self, request: Request<T>, submitted: Instant) -> Option<u64> {
        let slot = self.free.pop()?;
        let Request { payload, user, .. } = request;
        if let Some(place) = self.entries.get_mut(slot) {
            *place = Some(Entry { payload, user, submitted });
        }
        Some(slot as u64)
    }

    /// A number that is not in use gives nothing.
    pub(super) fn take(&mut self, slot: u64) -> Option<Entry<T>> {
        let slot = usize::try_from(slot).ok()?;
        let entry = self.entries.get_mut(slot)?.take()?;
        self.free.push(slot);
        Some(entry)
    }

    /// The request of this number has ended.
    pub(super) fn complete(&mut self, slot: u64, result: io::Result<usize>) -> Option<Completion<T>> {
        let Entry { payload, user, submitted } = self.take(slot)?;
        Some(Completion { payload, user, result, submitted })
    }

    /// The kernel took its time: this is when it was through.
    pub(super) fn submitted_at(&mut self, slot: u64, ended: Instant) {
        let slot = usize::try_from(slot).unwrap_or(usize::MAX);
        if let Some(Some(entry)) = self.entries.get_mut(slot) {
            entry.submitted = ended;
        }
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }
}
