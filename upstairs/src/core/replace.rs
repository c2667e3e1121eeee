//! Replacement: at run time a new, empty region takes a slot of the volume.
//!
//! The way: the slot's old replica leaves and the new region introduces itself → the two others have executed everything that was acknowledged with its help →
//! the new membership (epoch + 1) is sent to both → both have stored it → the new region is promoted, catches up like any
//! joiner, and stores the membership itself when it becomes Active.
//!
//! Invariants:
//! - A region that never held any membership (a *blank* one) gets no `Promote` before two members hold the membership in
//!   force durably. So whatever a quorum with it acknowledges, no two regions of the old membership can activate past it:
//!   one of them holds the new membership, which outranks theirs and does not have the replaced region.
//! - From the first `Activated` that carries the new membership on there is no way back: the slot is the new region's. Only an
//!   activation in which nobody shows the new membership goes on with the old one, and then nothing was built on the new.
//! - Memberships are ranked by the generation they were stored under, then by their epoch. A half-made replacement that a
//!   later generation knew nothing of is dead, whatever its epoch; and two with one epoch are told apart.
//! - What is in force is taken from what the regions say. The address that a configuration has for a slot counts for nothing.

use newel_protocol::wire::{Membership, Welcome};
use newel_protocol::{BLOCK_BYTES, Generation, JobId};
use uuid::Uuid;

use super::api::{Action, LogLevel, ReplicaId, ReplicaSet};
use super::replica::Link;
use super::{Core, QUORUM};

/// A replacement that isn't stored by both others yet.
#[derive(Debug)]
pub(super) struct Replacing {
    slot: ReplicaId,
    region: Uuid,
    /// Changes below this number may have been acknowledged with the old replica's help.
    after: JobId,
}

impl Core {
    pub(super) fn on_replace(&mut self, slot: ReplicaId, welcome: &Welcome) {
        let answer = match self.why_not_replace(slot, welcome) {
            Some(reason) => Err(reason),
            None => Ok(()),
        };
        let accepted = answer.is_ok();
        self.actions.push_back(Action::Replace { replica: slot, answer });
        if !accepted {
            return;
        }
        let region = welcome.region;
        let after = self.jobs.next_id();
        let back = self.membership.regions.contains(&region);
        self.replacing = (!back).then_some(Replacing { slot, region, after });
        let what = if back { "the place goes back to" } else { "it is being replaced by" };
        let reason = format!("{what} region {region}");
        self.log(LogLevel::Info, format!("replica {slot}: {reason}"));
        self.leave(slot, reason.clone());
        let now = self.now;
        let replica = self.replica_mut(slot);
        // No back-off: what failed before was another address.
        replica.link = Link::Down { retry_at: now };
        replica.reason = Some(reason);
    }

    fn why_not_replace(&self, slot: ReplicaId, welcome: &Welcome) -> Option<String> {
        if self.stopping.is_some() || !self.is_serving() {
            return Some("the volume is not being served".into());
        }
        let region = welcome.region;
        if let Some(replacing) = &self.replacing {
            let Replacing { slot: other, region: theirs, .. } = replacing;
            if *other != slot || self.is_sent(replacing) {
                return Some(format!("replica {other} is already being replaced, by region {theirs}"));
            }
        }
        let active = self.active();
        if let Some(other) = others_of(slot).without(active).iter().next() {
            let state = self.replica(other).state_name();
            return Some(format!(
                "both other replicas must be active, and replica {other} is not (it is {state}): wait until it is, or \
                 the only good copies could be lost"
            ));
        }
        if self.membership.regions.contains(&region) {
            // It may have its place back while nobody has heard that it lost it.
            let elsewhere = |id: ReplicaId| self.replica(id).region == Some(region);
            if self.replacing.is_some() && !others_of(slot).iter().any(elsewhere) {
                return None;
            }
            return Some(format!("region {region} is one of the volume's own already"));
        }
        if welcome.last_active > Generation(0) || welcome.membership.epoch > 0 {
            return Some(format!(
                "region {region} is not empty: it was active in generation {}; make a new one with `newel-downstairs \
                 create`",
                welcome.last_active
            ));
        }
        if welcome.blocks != self.blocks {
            let block = BLOCK_BYTES as u64;
            return Some(format!(
                "sizes differ: region {region} has {} bytes, the volume {}",
                welcome.blocks * block,
                self.blocks * block
            ));
        }
        None
    }

    /// Called after every event: takes a replacement on as far as it goes. What was interrupted by a new generation and left no
    /// trace is begun again here.
    pub(super) fn check_replace(&mut self) {
        let Some(replacing) = &self.replacing else { return };
        let (slot, region, after) = (replacing.slot, replacing.region, replacing.after);
        if !self.is_serving() || self.stopping.is_some() {
            return;
        }
        if self.is_sent(replacing) {
            if self.membership_held {
                self.replacing = None;
            }
            return;
        }
        if !matches!(self.replica(slot).link, Link::Greeted) || !self.is_taking_over(slot) {
            return;
        }
        let others = others_of(slot);
        let mut before = self.jobs.iter().take_while(|job| job.id < after);
        let owed = before.any(|job| !job.is_read() && !job.owed.and(others).is_empty());
        drop(before);
        if owed || !others.without(self.active()).is_empty() {
            return;
        }
        let kept: Vec<Uuid> = others.iter().filter_map(|id| self.replica(id).region).collect();
        let mut regions = self.membership.regions;
        let Some(place) = regions.iter().position(|region| !kept.contains(region)) else { return };
        let old = std::mem::replace(&mut regions[place], region);
        let epoch = self.membership.epoch.saturating_add(1);
        self.set_membership(Membership { epoch, regions, ..self.membership });
        self.log(
            LogLevel::Info,
            format!("region {region} takes the place of region {old} once both others have stored that (epoch {epoch})"),
        );
        self.send_activated(others);
    }

    /// The membership in force from now on.
    pub(super) fn set_membership(&mut self, membership: Membership) {
        if self.membership != membership {
            self.membership = membership;
            self.membership_held = false;
            self.note_holders();
        }
    }

    /// This replica has stored the membership in force.
    pub(super) fn note_stored(&mut self, id: ReplicaId) {
        let membership = self.membership;
        if let Some(welcome) = &mut self.replica_mut(id).welcome {
            welcome.membership = membership;
        }
        self.note_holders();
    }

    fn note_holders(&mut self) {
        let membership = self.membership;
        let holds = |welcome: &Welcome| welcome.membership == membership;
        let holders = self.set_of(|replica| replica.welcome.as_ref().is_some_and(holds));
        if !self.membership_held && holders.len() >= QUORUM {
            self.membership_held = true;
            for id in ReplicaId::ALL {
                self.join_if_greeted(id);
            }
        }
    }

    /// False while a blank region must wait for others to hold the membership that it belongs to.
    pub(super) fn may_join(&self, id: ReplicaId) -> bool {
        // The first membership has no predecessor under which anybody could go on.
        self.membership_held || self.membership.epoch <= 1 || !self.is_blank(id)
    }

    fn is_blank(&self, id: ReplicaId) -> bool {
        self.replica(id).welcome.as_ref().is_none_or(|welcome| welcome.membership.epoch == 0)
    }

    /// True once the membership with the new region has been sent: then there is no way back.
    fn is_sent(&self, replacing: &Replacing) -> bool {
        self.membership.regions.contains(&replacing.region)
    }

    /// True if this region waits for its place in the membership.
    pub(super) fn is_taking_over(&self, id: ReplicaId) -> bool {
        self.replacing.as_ref().is_some_and(|r| r.slot == id && self.replica(id).region == Some(r.region))
    }

    /// The membership that the greeted replicas agree on: the one of the highest rank, or the first one of a volume that
    /// never had any.
    pub(super) fn newest_membership(&self, greeted: ReplicaSet) -> Option<Membership> {
        let welcomes = greeted.iter().filter_map(|id| self.replica(id).welcome.as_ref());
        let newest = welcomes.max_by_key(|welcome| (welcome.last_active, welcome.membership.epoch))?;
        if newest.membership.epoch > 0 {
            return Some(newest.membership);
        }
        if greeted.len() < ReplicaId::COUNT {
            return None;
        }
        let mut regions = [Uuid::nil(); ReplicaId::COUNT];
        for id in greeted.iter() {
            regions[id.index()] = self.replica(id).welcome.as_ref()?.region;
        }
        Some(Membership { epoch: 1, regions, alone: false })
    }

    /// Those of the greeted that an activation under this membership may count, the others told why they can't.
    pub(super) fn countable(&mut self, membership: Membership, greeted: ReplicaSet) -> ReplicaSet {
        let members = self.set_of(|r| greeted.contains(r.id) && self.is_member(membership, r.id));
        let holders = self.set_of(|r| {
            members.contains(r.id) && r.welcome.as_ref().is_some_and(|w| w.membership == membership)
        });
        let known = self.membership_held && self.membership == membership;
        let held = membership.epoch <= 1 || known || holders.len() >= QUORUM;
        let counted = self.set_of(|r| members.contains(r.id) && (held || !self.is_blank(r.id)));
        for id in greeted.without(counted).iter() {
            let reason = if members.contains(id) {
                "its place in the volume is not stored by both other members yet: it waits for them".into()
            } else {
                self.not_a_member(membership, id)
            };
            if self.replica(id).reason.as_ref() != Some(&reason) {
                self.log(LogLevel::Warn, format!("replica {id}: {reason}"));
                self.replica_mut(id).reason = Some(reason);
            }
        }
        counted
    }

    pub(super) fn not_a_member(&self, membership: Membership, id: ReplicaId) -> String {
        let region = self.replica(id).region.unwrap_or_default();
        let was_active = self.replica(id).welcome.as_ref().is_some_and(|w| w.last_active > Generation(0));
        let what = if was_active {
            "is not a member of this volume any more, it was replaced"
        } else {
            "is not a member of this volume"
        };
        format!(
            "region {region} {what} (membership epoch {}); its address has to be corrected",
            membership.epoch
        )
    }

    /// For the status: whether the region met at this address is one of the volume's.
    pub(super) fn membership_of(&self, id: ReplicaId) -> Option<bool> {
        let membership = if self.membership.epoch > 0 {
            self.membership
        } else {
            self.newest_membership(self.set_of(|replica| matches!(replica.link, Link::Greeted)))?
        };
        self.replica(id).region.map(|region| membership.regions.contains(&region))
    }
}

fn others_of(slot: ReplicaId) -> ReplicaSet {
    ReplicaId::ALL.into_iter().filter(|&id| id != slot).collect()
}
