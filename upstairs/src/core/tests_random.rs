//! Random requests, kills, pauses and times against the replicas in memory of `tests_world`: nothing acknowledged is lost.
//!
//! Invariants:
//! - While a change of some bytes is open, no other request for them is issued: so an answer tells exactly what they may be.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::api::{GuestOp, GuestReply};
use super::tests_fake::BLOCKS;
use super::tests_world::{World, flat};

#[derive(Clone, Debug)]
enum Move {
    Write { at: u32, length: u32, fua: bool },
    Zero { at: u32, length: u32 },
    Trim { at: u32, length: u32 },
    Read { at: u32, length: u32 },
    Flush,
    Step(usize, u8),
    Kill(usize),
    Start(usize),
    Pause(usize),
    Time(u16),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    // Few blocks, so that requests overlap; the volume's last extent is a partial one.
    let at = prop_oneof![0..40_000_u32, 1023 * 4096 - 3000..1025 * 4096_u32];
    let length = prop_oneof![1..600_u32, 1..20_000_u32, Just(4096_u32), Just(8192_u32)];
    let one = prop_oneof![
        6 => (at.clone(), length.clone(), any::<bool>()).prop_map(|(at, length, fua)| Move::Write { at, length, fua }),
        1 => (at.clone(), length.clone()).prop_map(|(at, length)| Move::Zero { at, length }),
        1 => (at.clone(), length.clone()).prop_map(|(at, length)| Move::Trim { at, length }),
        4 => (at, length).prop_map(|(at, length)| Move::Read { at, length }),
        1 => Just(Move::Flush),
        8 => (0..3_usize, any::<u8>()).prop_map(|(i, n)| Move::Step(i, n)),
        1 => (0..3_usize).prop_map(Move::Kill),
        3 => (0..3_usize).prop_map(Move::Start),
        1 => (0..3_usize).prop_map(Move::Pause),
        2 => (1..800_u16).prop_map(Move::Time),
    ];
    prop::collection::vec(one, 1..120)
}

/// What each byte may be: the values of writes that could have landed since the last one that surely did.
#[derive(Debug)]
struct Oracle {
    history: Vec<Vec<(u64, u8)>>,
    pending: BTreeMap<u64, (Move, u8)>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// One request at a time per byte range would hide races, so many are in flight; the oracle accepts for each byte
    /// any value that was written and not surely overwritten.
    #[test]
    fn nothing_acknowledged_is_lost(moves in moves()) {
        let mut world = World::serving();
        let mut oracle = Oracle { history: vec![vec![(0, 0)]; usize::try_from(BLOCKS).unwrap() * 4], pending: BTreeMap::new() };
        let mut value = 0_u8;
        for step in moves {
            value = value.wrapping_add(1).max(1);
            oracle.apply(&mut world, step, value);
        }
        for fake in &mut world.fakes {
            fake.up = true;
            fake.paused = false;
        }
        world.assert_converged();
        oracle.collect(&mut world);
        prop_assert!(oracle.pending.is_empty(), "unanswered: {:?}", oracle.pending);
        for index in 0..oracle.history.len() {
            let byte = world.read(index as u64 * 1024, 1)[0];
            oracle.check(index, byte);
        }
    }
}

impl Oracle {
    /// The sample bytes (one in 1024) that a request touches.
    fn samples(at: u32, length: u32) -> std::ops::Range<usize> {
        at.div_ceil(1024) as usize..(at + length).div_ceil(1024) as usize
    }

    /// A trim works on whole blocks only.
    fn inner(at: u32, length: u32) -> (u32, u32) {
        let (start, end) = (at.div_ceil(4096) * 4096, (at + length) / 4096 * 4096);
        if end > start { (start, end - start) } else { (start, 0) }
    }

    fn apply(&mut self, world: &mut World, step: Move, value: u8) {
        let op = match &step {
            Move::Write { at, length, fua } => GuestOp::Write {
                offset: u64::from(*at),
                data: vec![value; *length as usize].into(),
                fua: *fua,
            },
            Move::Zero { at, length } => GuestOp::Zero {
                offset: u64::from(*at),
                length: u64::from(*length),
                allocate: false,
                fua: false,
            },
            Move::Trim { at, length } => {
                GuestOp::Trim { offset: u64::from(*at), length: u64::from(*length), fua: false }
            }
            Move::Read { at, length } => GuestOp::Read { offset: u64::from(*at), length: *length },
            Move::Flush => GuestOp::Flush,
            Move::Step(index, count) => {
                (0..*count % 16).for_each(|_| {
                    world.step(*index);
                });
                self.collect(world);
                return;
            }
            Move::Kill(index) => return world.kill(*index),
            Move::Start(index) => {
                world.fakes[*index].up = true;
                world.fakes[*index].paused = false;
                return;
            }
            Move::Pause(index) => {
                world.fakes[*index].paused = true;
                return;
            }
            Move::Time(ms) => {
                world.run(u64::from(*ms));
                self.collect(world);
                return;
            }
        };
        // The oracle's rule: while a change of some bytes is open no other change of them is issued.
        let range = Self::touched(&step);
        let busy = self.pending.values().any(|(other, _)| {
            let other_range = Self::touched(other);
            range.start < other_range.end && other_range.start < range.end
        });
        if busy && !matches!(step, Move::Flush) {
            return;
        }
        let guest = world.submit(op);
        self.pending.insert(guest, (step, value));
        self.collect(world);
    }

    fn touched(step: &Move) -> std::ops::Range<usize> {
        match step {
            Move::Write { at, length, .. } | Move::Zero { at, length } | Move::Read { at, length } => {
                Self::samples(*at, *length)
            }
            Move::Trim { at, length } => {
                let (at, length) = Self::inner(*at, *length);
                Self::samples(at, length)
            }
            Move::Flush
            | Move::Step(..)
            | Move::Kill(_)
            | Move::Start(_)
            | Move::Pause(_)
            | Move::Time(_) => 0..0,
        }
    }

    fn collect(&mut self, world: &mut World) {
        let done: Vec<u64> =
            self.pending.keys().copied().filter(|guest| world.replies.contains_key(guest)).collect();
        for guest in done {
            let reply = world.replies.remove(&guest).unwrap();
            let (step, value) = self.pending.remove(&guest).unwrap();
            match step {
                Move::Read { at, .. } => {
                    let data = flat(&reply);
                    for index in Self::touched(&step) {
                        self.check(index, data[index * 1024 - at as usize]);
                    }
                }
                Move::Write { .. }
                | Move::Zero { .. }
                | Move::Trim { .. }
                | Move::Flush
                | Move::Step(..)
                | Move::Kill(_)
                | Move::Start(_)
                | Move::Pause(_)
                | Move::Time(_) => {
                    assert!(matches!(reply, GuestReply::Done), "{step:?}: {reply:?}");
                    let value = if matches!(step, Move::Write { .. }) { value } else { 0 };
                    for index in Self::touched(&step) {
                        self.history[index] = vec![(guest, value)];
                    }
                }
            }
        }
    }

    fn check(&self, index: usize, byte: u8) {
        assert!(
            self.history[index].iter().any(|&(_, value)| value == byte),
            "byte {} is {byte}, may be {:?}",
            index * 1024,
            self.history[index]
        );
    }
}
