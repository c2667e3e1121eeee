//! Replacements: fresh disks that take a slot, the regions that lost theirs, and configurations that are out of date.
//!
//! A replaced region lives on at its old address, and some upstairs start with a configuration from before the last
//! replacement. So activations meet regions of old memberships, as they may in a data centre.

use newel_downstairs::disk::Header;
use newel_protocol::wire::Welcome;
use newel_upstairs::core as up;
use newel_upstairs::core::api::ReplicaId;
use rand::RngExt as _;
use uuid::Uuid;

use super::disk::Disk;
use super::plan::MS;
use super::world::{Down, World, id};

/// Regions of one run at most; each takes a few MiB.
const REGIONS_MAX: usize = 8;
/// One that heals, one that finds nothing, and some that were cut short.
const PASSES_MAX: usize = 6;

impl Down {
    pub(super) fn fresh(index: usize, blocks: u64) -> Self {
        let number = index as u128 + 1;
        Self {
            disk: Disk::format(blocks, Uuid::from_u128(number)),
            boot: number << 64,
            incarnation: 0,
            process: None,
            paused: false,
            deferred: Vec::new(),
            stuck_until: 0,
            next_tick: None,
            damaged: false,
        }
    }

    fn header(&self) -> Option<Header> {
        Some(self.process.as_ref()?.region.header())
    }
}

impl World {
    /// An operator gives a slot to a fresh region.
    pub(super) fn replace(&mut self) -> Result<(), String> {
        let slot = self.rng.random_range(0..3_usize);
        let Some(up) = self.serving_up().filter(|_| self.downs.len() < REGIONS_MAX) else { return Ok(()) };
        let index = self.downs.len();
        self.downs.push(Down::fresh(index, self.plan.blocks));
        self.start_down(index);
        let Some(header) = self.downs[index].header() else { return Ok(()) };
        let welcome = Welcome {
            version: 1,
            region: header.region,
            volume: header.volume,
            blocks: header.layout.blocks,
            promised: header.promised,
            last_active: header.last_active,
            membership: header.membership,
            lost_power: false,
        };
        self.feed_up(up, up::api::Event::Replace { replica: id(slot), welcome })
    }

    /// The core's answer to that.
    pub(super) fn replace_answered(&mut self, up: usize, slot: ReplicaId, answer: Result<(), String>) {
        let fresh = self.downs.len() - 1;
        match answer {
            Ok(()) => {
                self.ups[up].addresses[slot.index()] = fresh;
                self.old_slots = self.slots;
                // Some operators forget to change the configuration.
                if self.rng.random_bool(0.8) {
                    self.slots[slot.index()] = fresh;
                }
                self.note(|| format!("slot {slot} is given to replica {fresh}"));
            }
            Err(reason) => {
                self.note(|| format!("replacement refused: {reason}"));
                self.kill_down(fresh);
                self.downs.pop();
            }
        }
    }

    /// The addresses that the next upstairs starts with.
    pub(super) fn configured(&mut self) -> [usize; 3] {
        if self.quiet {
            self.slots = self.in_force();
        } else if self.slots != self.old_slots && self.rng.random_bool(0.3) {
            return self.old_slots;
        }
        self.slots
    }

    /// What an operator who looks at all regions finds to be the volume's members.
    pub(super) fn in_force(&self) -> [usize; 3] {
        let headers = self.downs.iter().filter_map(Down::header);
        let newest = headers.max_by_key(|header| (header.last_active, header.membership.epoch));
        let Some(membership) = newest.map(|header| header.membership).filter(|m| m.epoch > 0) else {
            return self.slots;
        };
        let place = |region: Uuid| usize::try_from(region.as_u128()).unwrap_or(0).saturating_sub(1);
        membership.regions.map(place)
    }

    /// Starts an upstairs with the right configuration if the one that runs has a wrong one.
    pub(super) fn correct_configuration(&mut self) {
        self.slots = self.in_force();
        let alive = (0..self.ups.len()).rev().find(|&up| self.ups[up].alive);
        if let Some(up) = alive.filter(|&up| self.ups[up].addresses != self.slots) {
            self.note(|| format!("upstairs {up} is stopped: its configuration is out of date"));
            self.kill_up(up);
        }
        self.start_up(false);
    }

    /// Whole passes, until one finds nothing to heal. One may end with an upstairs that another takes over from.
    /// A write that only the damaged replica had executed, while a second one was away, is known to have existed and gone with
    /// the damage: two faults, for which a block may read as an error. That is rare.
    fn lost_blocks_max(&self) -> u64 {
        u64::from(self.plan.has_damage())
    }

    pub(super) fn scrub_everything(&mut self) -> Result<(), String> {
        let mut found = String::new();
        for _ in 0..PASSES_MAX {
            self.converge()?;
            let Some(up) = self.serving_up() else { continue };
            self.feed_up(up, up::api::Event::Scrub)?;
            let deadline = self.now + 30_000 * MS;
            while self.ups[up].serves() && self.ups[up].core.status().scrub.running {
                self.run_until(self.now + MS)?;
                if self.now > deadline {
                    return Err(format!("the scrub does not end: {}", self.state()));
                }
            }
            let scrub = self.ups[up].core.status().scrub;
            if scrub.blocks_without_good_copy > self.lost_blocks_max() {
                return Err(format!("after the last fault the scrub finds {scrub:?}"));
            }
            if self.ups[up].serves() && scrub.blocks_bad == 3 * scrub.blocks_without_good_copy {
                return Ok(());
            }
            found = format!("{scrub:?}");
        }
        Err(format!("the scrub finds something again and again: {found}"))
    }
}
