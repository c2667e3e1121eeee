//! Replacement and scrub against the replicas in memory of `tests_world`.

use bytes::Bytes;
use newel_protocol::wire::{Membership, Request, Welcome};
use newel_protocol::{BlockKind, Generation, Version};
use uuid::Uuid;

use super::api::{Event, GuestError, GuestOp, GuestReply, ReplicaId, Time};
use super::config::Timing;
use super::status::ScrubStatus;
use super::tests_fake::{BLOCKS, Fake};
use super::tests_world::World;

fn welcome(fake: &Fake) -> Welcome {
    Welcome {
        version: 1,
        region: fake.region,
        volume: Uuid::nil(),
        blocks: BLOCKS,
        promised: fake.promised,
        last_active: fake.last_active,
        membership: fake.membership,
        lost_power: false,
    }
}

impl World {
    /// Asks for the replacement of a slot, and puts the new replica at its address if that is accepted.
    fn replace(&mut self, slot: usize, fresh: Fake) -> Result<Fake, String> {
        self.replace_with(slot, welcome(&fresh), fresh)
    }

    fn replace_with(&mut self, slot: usize, welcome: Welcome, fresh: Fake) -> Result<Fake, String> {
        let replica = ReplicaId(u8::try_from(slot).unwrap());
        self.core.handle(Time(self.now), Event::Replace { replica, welcome });
        // The old one is at the address until the core has let go of it; `Connect` comes behind the answer.
        let old_link = self.fakes[slot].link;
        let old = std::mem::replace(&mut self.fakes[slot], fresh);
        self.drain_actions();
        match self.replaced.take().expect("it is answered at once") {
            Ok(()) => Ok(old),
            Err(reason) => {
                let fresh = std::mem::replace(&mut self.fakes[slot], old);
                assert!(fresh.link.is_none() && self.fakes[slot].link == old_link, "nothing has changed");
                Err(reason)
            }
        }
    }

    fn scrub(&mut self) -> ScrubStatus {
        self.core.handle(Time(self.now), Event::Scrub);
        self.run(4000);
        let status = self.core.status().scrub;
        assert!(!status.running && status.extents_done == status.extents_total, "{status:?}");
        status
    }
}

fn activated(fake: &Fake) -> usize {
    fake.inbox.iter().filter(|(request, _)| matches!(request, Request::Activated { .. })).count()
}

#[test]
fn a_new_region_takes_a_slot_and_catches_up() {
    for alive in [true, false] {
        let mut world = World::serving();
        world.write(0, &[1; 40_960]);
        if !alive {
            world.kill(1);
            world.run(500);
        }
        let old = world.replace(1, Fake::new(9)).unwrap();
        world.write(4096, &[2; 4096]);
        world.assert_converged();
        let status = world.core.status();
        assert_eq!(status.membership_epoch, 2);
        assert_eq!(status.replicas[1].region, Uuid::from_u128(9).to_string());
        let regions = [1, 9, 3].map(Uuid::from_u128);
        assert!(
            world.fakes.iter().all(|fake| fake.membership == Membership { epoch: 2, regions, alone: false })
        );
        assert_eq!(
            old.state(1).version.sequence,
            world.fakes[0].state(0).version.sequence,
            "not written any more"
        );
    }
}

#[test]
fn what_can_not_take_a_slot_is_refused_and_changes_nothing() {
    let mut world = World::serving();
    world.write(0, &[1; 4096]);
    let check = |world: &mut World, change: fn(&mut Welcome), part: &str| {
        let mut welcome = welcome(&Fake::new(9));
        change(&mut welcome);
        let error = world.replace_with(1, welcome, Fake::new(9)).unwrap_err();
        assert!(error.contains(part), "{part}: {error}");
        assert_eq!(world.states(), ["active", "active", "active"]);
    };
    check(&mut world, |w| w.region = Uuid::from_u128(3), "one of the volume's own");
    check(&mut world, |w| w.region = Uuid::from_u128(2), "one of the volume's own");
    check(&mut world, |w| w.last_active = Generation(4), "not empty: it was active in generation 4");
    check(&mut world, |w| w.membership.epoch = 1, "not empty");
    check(&mut world, |w| w.blocks -= 1, "sizes differ");
    world.kill(0);
    let error = world.replace(1, Fake::new(9)).unwrap_err();
    assert!(error.contains("replica 0 is not (it is left)"), "{error}");
    world.fakes[0].up = true;
    world.assert_converged();
    assert_eq!(world.core.status().membership_epoch, 1);
}

#[test]
fn the_new_region_waits_until_both_others_have_stored_it() {
    let mut world = World::serving();
    world.write(0, &[1; 4096]);
    world.replace(2, Fake::new(9)).unwrap();
    world.fakes[1].paused = true;
    world.run(1000);
    assert_eq!((world.fakes[0].membership.epoch, activated(&world.fakes[1])), (2, 1));
    assert_eq!(world.fakes[2].promised, Generation(0), "no Promote yet");
    let error = world.replace(2, Fake::new(10)).unwrap_err();
    assert!(error.contains("already being replaced"), "{error}");
    world.fakes[1].paused = false;
    world.assert_converged();
    assert_eq!(world.fakes[2].membership.epoch, 2);
}

#[test]
fn nothing_is_stored_before_the_others_have_all_that_the_old_one_helped_to_acknowledge() {
    let mut world = World::serving();
    world.fakes[1].paused = true;
    // Acknowledged by 0 and 2.
    world.submit(GuestOp::Write { offset: 0, data: Bytes::from(vec![1; 4096]), fua: false });
    world.settle();
    assert_eq!(world.replies.len(), 1);
    world.replace(2, Fake::new(9)).unwrap();
    world.run(1000);
    assert!(world.fakes[0].membership.epoch == 1 && activated(&world.fakes[1]) == 0);
    world.fakes[1].paused = false;
    world.assert_converged();
    assert_eq!(world.core.status().membership_epoch, 2);
}

#[test]
fn a_mistaken_address_can_be_taken_back_while_nothing_is_stored() {
    let mut world = World::serving();
    world.write(0, &[1; 4096]);
    let mut dead = Fake::new(9);
    dead.up = false;
    let old = world.replace(0, dead).unwrap();
    world.run(1000);
    assert_eq!(world.core.status().membership_epoch, 1);
    world.write(0, &[2; 4096]);
    let back = welcome(&old);
    world.replace_with(0, back, old).unwrap();
    world.assert_converged();
    assert_eq!(world.core.status().membership_epoch, 1);
    assert_eq!(world.fakes[0].region, Uuid::from_u128(1));
}

/// The next upstairs, over these replicas.
fn next(fakes: [Fake; 3]) -> World {
    let mut world = World::new();
    world.fakes = fakes;
    for fake in &mut world.fakes {
        fake.link = None;
        fake.inbox.clear();
        fake.paused = false;
        fake.up = true;
    }
    world
}

/// A replacement of slot 2 that only region 1 has heard of: the three members, and the new region.
fn half_made() -> (World, Fake) {
    let mut world = World::serving();
    world.write(0, &[1; 4096]);
    let old = world.replace(2, Fake::new(9)).unwrap();
    world.fakes[1].paused = true;
    world.run(1000);
    assert_eq!([0, 1].map(|i| world.fakes[i].membership.epoch), [2, 1]);
    (world, old)
}

fn take(world: &mut World) -> [Fake; 3] {
    std::mem::replace(&mut world.fakes, [Fake::new(20), Fake::new(21), Fake::new(22)])
}

#[test]
fn an_activation_that_meets_both_epochs_finishes_the_replacement() {
    let (mut world, old) = half_made();
    let [a, b, fresh] = take(&mut world);
    // With the old address: the replaced region does not count and is told apart.
    let mut stale = next([a, b, old]);
    stale.run(3000);
    let status = stale.core.status();
    assert_eq!((status.state.as_str(), status.membership_epoch), ("serving", 2));
    assert_eq!(status.replicas[2].member, Some(false));
    let reason = status.replicas[2].reason.clone().unwrap();
    assert!(reason.contains("not a member") && reason.contains("replaced"), "{reason}");
    stale.write(0, &[3; 4096]);
    // With the new one.
    let [a, b, _] = take(&mut stale);
    let mut world = next([a, b, fresh]);
    world.assert_converged();
    assert_eq!(world.read(0, 1), [3]);
    assert_eq!(world.fakes[2].membership.epoch, 2);
}

#[test]
fn a_blank_region_makes_no_quorum_with_the_only_holder() {
    let (mut world, _) = half_made();
    let [a, b, fresh] = take(&mut world);
    let mut world = next([a, b, fresh]);
    world.fakes[1].up = false;
    world.run(5000);
    let status = world.core.status();
    assert_eq!(status.state, "activating");
    assert!(status.replicas[2].reason.as_ref().unwrap().contains("waits for them"), "{status:?}");
    world.fakes[1].up = true;
    world.run(6000);
    world.assert_converged();
    assert_eq!(world.core.status().membership_epoch, 2);
}

#[test]
fn a_half_made_replacement_is_dead_once_the_others_went_on_without_it() {
    let (mut world, old) = half_made();
    let [a, b, fresh] = take(&mut world);
    let mut without = next([a, b, old]);
    without.fakes[0].up = false;
    without.run(3000);
    assert_eq!(
        (without.core.status().state.as_str(), without.core.status().membership_epoch),
        ("serving", 1)
    );
    without.write(0, &[4; 4096]);
    // Region 1 comes back with the higher epoch of the older generation.
    without.fakes[0].up = true;
    without.assert_converged();
    let [a, b, old] = take(&mut without);
    assert!([&a, &b, &old].iter().all(|fake| fake.membership.epoch == 1));
    let mut last = next([a, b, fresh]);
    last.run(3000);
    assert_eq!(last.read(0, 1), [4]);
    assert_eq!(last.core.status().replicas[2].member, Some(false));
}

#[test]
fn of_two_replacements_with_one_epoch_the_later_generation_is_right() {
    let (mut world, old) = half_made();
    let [a, b, _] = take(&mut world);
    let mut without = next([Fake::new(30), b, old]);
    // Only the regions 2 and 3 are there; they replace region 1, which is thought dead.
    without.fakes[0].up = false;
    without.run(3000);
    without.replace(0, Fake::new(12)).unwrap();
    without.assert_converged();
    without.write(0, &[5; 4096]);
    let [_, b, old] = take(&mut without);
    assert_eq!((a.membership.epoch, b.membership.epoch), (2, 2));
    // Region 1 was only away. It must not make a quorum with region 2 for its own membership.
    let mut last = next([a, b, old]);
    last.fakes[2].up = false;
    last.run(5000);
    assert_eq!(last.core.status().state, "activating");
    assert_eq!(last.core.status().replicas[0].member, Some(false));
}

#[test]
fn the_scrub_finds_and_heals_what_no_guest_reads() {
    let mut world = World::serving();
    world.write(0, &[1; 12_288]);
    world.write(2000 * 4096, &[2; 4096]);
    // Rot in data, and a context that rotted to a version above all others.
    world.fakes[0].blocks.get_mut(&1).unwrap().1 = Bytes::from(vec![9; 4096]);
    world.fakes[2].blocks.get_mut(&2000).unwrap().0.version = Version::new(Generation(77), 5);
    world.fakes[2].blocks.get_mut(&2000).unwrap().0.crc ^= 1;
    world.fakes[1].blocks.get_mut(&2).unwrap().0.kind = BlockKind::Unverified;
    let status = world.scrub();
    assert_eq!((status.blocks_bad, status.blocks_healed, status.blocks_without_good_copy), (3, 3, 0));
    assert_eq!((status.pass, status.extents_total), (1, 3));
    world.assert_converged();
    assert_eq!(world.read(4096, 4096), vec![1; 4096]);
    assert_eq!(world.scrub().blocks_bad, 0);
}

#[test]
fn the_scrub_brings_a_lost_write_back() {
    let mut world = World::serving();
    world.write(0, &[1; 4096]);
    let before = world.fakes[1].blocks.clone();
    world.write(0, &[2; 4096]);
    world.fakes[1].blocks = before;
    let status = world.scrub();
    assert_eq!((status.blocks_bad, status.blocks_healed), (1, 1));
    world.assert_converged();
}

#[test]
fn the_scrub_tells_of_blocks_without_a_good_copy() {
    let mut world = World::serving();
    world.write(0, &[1; 8192]);
    for fake in &mut world.fakes {
        fake.blocks.get_mut(&1).unwrap().1 = Bytes::from(vec![9; 4096]);
    }
    let status = world.scrub();
    assert_eq!((status.blocks_healed, status.blocks_without_good_copy), (0, 1));
    let read = world.done(GuestOp::Read { offset: 4096, length: 4096 });
    assert!(matches!(read, GuestReply::Failed(GuestError::Io)));
    world.write(4096, &[2; 4096]);
    assert_eq!(world.scrub().blocks_bad, 0);
}

#[test]
fn writes_under_way_are_no_damage_and_a_lost_replica_holds_nothing_up() {
    let mut world = World::serving();
    world.core.handle(Time(world.now), Event::Scrub);
    for i in 0..60_u8 {
        world.submit(GuestOp::Write {
            offset: u64::from(i % 20) * 4096,
            data: Bytes::from(vec![i; 4096]),
            fua: false,
        });
        for index in 0..3 {
            (0..usize::from(i) % (index + 2)).for_each(|_| {
                world.step(index);
            });
        }
        world.now += 1_000_000;
        world.core.handle(Time(world.now), Event::Tick);
        if i == 40 {
            world.kill(2);
        }
    }
    world.fakes[2].up = true;
    world.assert_converged();
    let status = world.core.status().scrub;
    assert!(!status.running && status.blocks_bad == 0, "{status:?}");
}

#[test]
fn a_scrub_begins_by_itself() {
    let mut world = World::new();
    let every = Timing::default().scrub_every.unwrap();
    world.run(1000);
    assert_eq!(world.core.status().scrub.pass, 0);
    for pass in 1..=2 {
        world.now += u64::try_from(every.as_nanos()).unwrap();
        world.assert_converged();
        let status = world.core.status().scrub;
        assert_eq!((status.pass, status.running), (pass, false), "{status:?}");
    }
}
