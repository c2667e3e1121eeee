//! The flushed mark: up to which version everything is durable, and whether the header says so.
//!
//! A flush needs one barrier for data and contexts. The mark would be a second one, but after a crash it is needed only for a
//! block on which a later write was under way: there it bounds what was flushed. (A block without a later write has the data of its
//! latest context.) So it is written when it has to be, not with every flush.
//!
//! Invariants:
//! - Before a flushed version with data is replaced, the mark in the header is at or above that version.
//! - A flush is answered after the mark is in the header, if a version that it covers may have been replaced already, or may be outside
//!   the activity log.
//! - Before an extent leaves the log, and before the log is emptied, the header holds the mark.
//! - After a crash the contexts of the extents in the log say of themselves what is durable ([`super::verify`]).

use newel_protocol::Version;

#[derive(Debug)]
pub(crate) struct Mark {
    /// Everything up to it was covered by a sync.
    pub(crate) synced: Version,
    /// The header's.
    stored: Version,
    /// The highest version that was replaced before a sync covered it.
    replaced: Version,
    /// Extents are leaving the log.
    evicting: bool,
    /// Extents left the log since the mark rose.
    evicted: bool,
}

impl Mark {
    pub(crate) fn new(stored: Version) -> Self {
        Self { synced: stored, stored, replaced: Version::NEVER, evicting: false, evicted: false }
    }

    pub(crate) fn is_stored(&self) -> bool {
        self.synced <= self.stored
    }

    /// A header with this mark is durable.
    pub(crate) fn stored(&mut self, mark: Version) {
        self.stored = self.stored.max(mark);
    }

    /// Extents are about to leave the log (`true`), or have left it.
    pub(crate) fn evicts(&mut self, begins: bool) {
        self.evicting = begins;
        self.evicted |= !begins;
    }

    /// A sync covered everything up to `mark`. True if the header has to say so before that is told.
    pub(crate) fn rise(&mut self, mark: Version) -> bool {
        self.synced = self.synced.max(mark);
        let evicted = std::mem::take(&mut self.evicted) || self.evicting;
        !self.is_stored() && (evicted || self.replaced > self.stored)
    }

    /// These versions are about to be replaced. True if the mark has to be in the header before.
    pub(crate) fn replace(&mut self, versions: impl Iterator<Item = Version>) -> bool {
        let mut needed = false;
        for version in versions.filter(|&version| version > self.stored) {
            if version <= self.synced {
                needed = true;
            } else {
                self.replaced = self.replaced.max(version);
            }
        }
        needed
    }
}

#[cfg(test)]
mod tests {
    use newel_protocol::Generation;

    use super::*;

    fn v(sequence: u64) -> Version {
        Version::new(Generation(1), sequence)
    }

    #[test]
    fn it_is_stored_when_a_later_write_may_hide_what_was_flushed() {
        let mut mark = Mark::new(v(10));
        assert!(!mark.rise(v(20)), "nothing was replaced");
        assert!(!mark.replace([v(3), v(10)].into_iter()), "the header covers those");
        assert!(mark.replace([v(3), v(15)].into_iter()), "flushed, and the header does not say so");
        mark.stored(v(20));
        assert!(mark.is_stored() && !mark.replace([v(15)].into_iter()));

        assert!(!mark.replace([v(25)].into_iter()), "not flushed yet");
        assert!(mark.rise(v(30)), "now it is, under data that may be torn");
        mark.stored(v(30));
        assert!(!mark.rise(v(40)));

        mark.evicts(true);
        for sequence in [50, 60] {
            assert!(mark.rise(v(sequence)), "the log may soon not tell of what this covers");
            mark.stored(v(sequence));
        }
        mark.evicts(false);
        assert!(mark.rise(v(70)), "nor does it then");
        mark.stored(v(70));
        assert!(!mark.rise(v(80)));
    }

    #[test]
    fn what_was_replaced_before_it_was_flushed_is_remembered() {
        let mut mark = Mark::new(v(10));
        mark.replace([v(35)].into_iter());
        assert!(mark.rise(v(30)), "a little too careful: 35 is not covered yet");
        mark.stored(v(30));
        assert!(mark.rise(v(40)));
    }
}
