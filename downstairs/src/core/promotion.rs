//! How a session comes in force.
//!
//! Invariants:
//! - `Promoted` is sent only once no job of an older session is at the disk and the promise is durable.
//! - A generation is never promised to two.
//! - The membership is still the one that the connection was greeted with. So an upstairs that has promoted a quorum knows
//!   the newest one: what an older session stored since would have been lost on it.
//! - The digest in `Promoted` describes the region as no older session can change it any more.
//!
//! The steps aren't remembered but found anew from what is the case, so that a promotion which replaces another one in
//! the middle goes on from wherever that one was.

use newel_protocol::wire::{Hello, Membership, Refusal, Reply, Request};
use newel_protocol::{ExtentId, Generation};
use uuid::Uuid;

use super::Core;
use super::api::{ConnId, DiskOp, HeaderChange, LogEvent, Time};
use super::disk::Task;
use super::session::Session;

/// A promotion that was let in and is under way.
#[derive(Debug)]
pub(super) struct Promotion {
    pub(super) conn: ConnId,
    pub(super) upstairs: Uuid,
    /// `Hello::session`.
    pub(super) number: u64,
    volume: Uuid,
    /// The membership that it was greeted with.
    told: Membership,
    pub(super) generation: Generation,
    started: Time,
    /// Over the digests of the extents below `digested`.
    digest: u64,
    digested: u32,
    digesting: bool,
}

impl Promotion {
    pub(super) fn new(
        conn: ConnId,
        hello: &Hello,
        told: Membership,
        generation: Generation,
        started: Time,
    ) -> Self {
        Self {
            conn,
            upstairs: hello.upstairs,
            number: hello.session,
            volume: hello.volume,
            told,
            generation,
            started,
            digest: 0,
            digested: 0,
            digesting: false,
        }
    }
}

impl Core {
    /// Takes the next step of the promotion under way, if nothing has to be awaited first.
    pub(super) fn advance_promotion(&mut self) {
        let Some(promotion) = &mut self.promotion else { return };
        if self.jobs.at_disk() > 0 || self.flusher.is_running() || self.internal.header_busy() {
            return;
        }
        let Promotion { conn, upstairs, volume, told, generation, digested, .. } = *promotion;
        // No older session can change it any more.
        if self.facts.membership != told {
            return self.leave(conn, "the volume's membership has changed since this connection was greeted");
        }
        // Another upstairs may have claimed the region since this one was greeted.
        if let Some(refusal) = self.other_volume(volume) {
            return self.refuse(conn, refusal);
        }
        // What an earlier promotion had under way is durable by now, and what was promised stays promised.
        let promised = self.facts.promised;
        if promised > generation || (promised == generation && self.facts.promised_to != upstairs) {
            return self.refuse(conn, Refusal::StaleGeneration { offered: generation, promised });
        }
        if self.facts.volume.is_nil() {
            return self.start_header(conn, HeaderChange::Claim { volume });
        }
        if promised != generation {
            return self.start_header(conn, HeaderChange::Promise { generation, upstairs });
        }
        if digested < self.extents {
            return self.digest_next();
        }
        self.enforce();
    }

    /// Asks for the next digests, unless they are on their way.
    fn digest_next(&mut self) {
        let Some(promotion) = &mut self.promotion else { return };
        if std::mem::replace(&mut promotion.digesting, true) {
            return;
        }
        let first = ExtentId(promotion.digested);
        let count = (self.extents - promotion.digested).min(Request::MAX_DIGESTS);
        let task = Task::PromotionDigests { conn: promotion.conn, first };
        self.start_task(task, DiskOp::Digests { first, count });
    }

    pub(super) fn digested(&mut self, conn: ConnId, first: ExtentId, digests: &[u64]) {
        let Some(promotion) = &mut self.promotion else { return };
        if promotion.conn != conn || promotion.digested != first.0 || !promotion.digesting {
            return;
        }
        if digests.is_empty() {
            return self.fail(format!("the region told no digests from extent {first} on"));
        }
        promotion.digesting = false;
        promotion.digest = summarise(promotion.digest, first, digests);
        promotion.digested += u32::try_from(digests.len()).unwrap_or(u32::MAX);
    }

    fn enforce(&mut self) {
        let Some(promotion) = self.promotion.take() else { return };
        let Promotion { conn, upstairs, number, generation, digest, started, .. } = promotion;
        let last_active = self.facts.last_active;
        self.send(conn, Reply::Promoted { generation, last_active, digest });
        self.log(LogEvent::SessionStarted { conn, upstairs, generation });
        let heard = self.now.max(started);
        self.session = Some(Session { conn, upstairs, number, generation, heard });
        if let Some(faults) = self.fault.told() {
            self.send(conn, Reply::Faults { faults });
        }
    }
}

/// Folds the digests of consecutive extents into one number that depends on where each of them stands. Regions with equal
/// contexts have equal summaries; an untouched extent has digest 0 and adds nothing.
pub(super) fn summarise(so_far: u64, first: ExtentId, digests: &[u64]) -> u64 {
    (u64::from(first.0)..)
        .zip(digests)
        .filter(|&(_, &digest)| digest != 0)
        .fold(so_far, |sum, (extent, &digest)| sum ^ mix(digest ^ mix(extent + 1)))
}

/// The finaliser of splitmix64: every bit of the input flips each bit of the output with even odds.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_depends_on_values_and_places_but_not_on_chunks() {
        let check = |a: &[u64], b: &[u64], equal| {
            assert_eq!(summarise(0, ExtentId(0), a) == summarise(0, ExtentId(0), b), equal, "{a:?} {b:?}");
        };
        check(&[1, 2], &[1, 2], true);
        check(&[1, 2], &[2, 1], false);
        check(&[5, 5], &[7, 7], false);
        check(&[0, 0], &[], true);
        check(&[9], &[0, 9], false);
        let whole = summarise(0, ExtentId(0), &[3, 4, 5]);
        assert_eq!(whole, summarise(summarise(0, ExtentId(0), &[3]), ExtentId(1), &[4, 5]));
    }
}
