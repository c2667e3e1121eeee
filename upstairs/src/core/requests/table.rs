//! The requests that are open: admitted, and not answered yet.
//!
//! Invariants:
//! - A key means one request for ever: a place is used again, a stamp is not. So a job that is settled after its request was
//!   answered finds nobody.
//! - Requests are gone through by place: the same events give the same order.

use super::GuestRequest;
use crate::core::jobs::ReqKey;

#[derive(Debug, Default)]
pub(super) struct Table {
    slab: Vec<Option<GuestRequest>>,
    free: Vec<usize>,
    stamps: u64,
    open: usize,
}

impl Table {
    pub(super) fn open(&self) -> usize {
        self.open
    }

    pub(super) fn insert(&mut self, mut request: GuestRequest) -> ReqKey {
        self.open += 1;
        self.stamps += 1;
        request.stamp = self.stamps;
        let stamp = self.stamps;
        let index = match self.free.pop() {
            Some(index) => {
                self.slab[index] = Some(request);
                index
            }
            None => {
                self.slab.push(Some(request));
                self.slab.len() - 1
            }
        };
        ReqKey { index, stamp }
    }

    pub(super) fn get_mut(&mut self, key: ReqKey) -> Option<&mut GuestRequest> {
        self.slab.get_mut(key.index)?.as_mut().filter(|request| request.stamp == key.stamp)
    }

    pub(super) fn remove(&mut self, key: ReqKey) -> Option<GuestRequest> {
        self.get_mut(key)?;
        let request = self.slab.get_mut(key.index)?.take()?;
        self.open -= 1;
        self.free.push(key.index);
        Some(request)
    }

    #[cfg(feature = "trace")]
    pub(super) fn get(&self, key: ReqKey) -> Option<&GuestRequest> {
        self.slab.get(key.index)?.as_ref().filter(|request| request.stamp == key.stamp)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &GuestRequest> {
        self.slab.iter().flatten()
    }

    pub(super) fn keys(&self) -> Vec<ReqKey> {
        let open = self.slab.iter().enumerate();
        open.filter_map(|(index, request)| Some(ReqKey { index, stamp: request.as_ref()?.stamp })).collect()
    }
}
