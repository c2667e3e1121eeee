//! Which copy of a block is right: the two rules of making replicas equal, each as a function of the states at hand.
//!
//! Invariants:
//! - Reconcile: the highest verified version wins unless an unverified copy has a higher bound; then that copy's data is
//!   adopted under (generation, 0) on all alike.
//! - What the upstairs itself still holds counts as one more verified copy.
//! - Catch-up: a copy is dropped only if the joiner's own block is verified, of the generation in force, and at least as new.
//!   What it holds of an older generation may be an orphan that nobody acknowledged, however high its version.
//! - A version that is known to have existed and has no good copy left anywhere is not replaced by an older one: its context
//!   is stored without data, so that the block reads as an error until it is written again. What one of three replicas that
//!   have all kept their power claims alone, and can't show, is not known to have existed: no quorum had executed it, unless
//!   the context of another one is lost.

use newel_protocol::{BlockKind, BlockState, Generation, Version};

use super::api::{ReplicaId, ReplicaSet};

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Equal,
    /// The upstairs has what is right, and stores it on all of them.
    Held,
    Copy {
        source: ReplicaId,
        targets: ReplicaSet,
        state: BlockState,
        adopt: bool,
    },
    /// The source has no good copy.
    NoSource {
        wanted: BlockState,
    },
}

pub(super) type States = [Option<Vec<BlockState>>; ReplicaId::COUNT];

fn state_of(states: &States, replica: ReplicaId, index: usize) -> BlockState {
    // A state that is missing decides nothing: it is never a source.
    states[replica.index()]
        .as_ref()
        .and_then(|states| states.get(index))
        .copied()
        .unwrap_or(BlockState { kind: BlockKind::Unreadable, ..BlockState::default() })
}

/// How the winner of one block is found before a generation is served.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reconcile {
    pub(super) generation: Generation,
    /// All three take part and none has lost power.
    pub(super) complete: bool,
    /// The version of the block that an unanswered request still holds.
    pub(super) held: Option<Version>,
}

/// What was acknowledged two of three replicas have executed. So what one alone claims, and can't show, was not, or it is the
/// work of a context that has rotted; unless it is another's context that is lost.
fn is_supported(states: &States, members: ReplicaSet, replica: ReplicaId, index: usize) -> bool {
    let claim = state_of(states, replica, index).version;
    members.without(ReplicaSet::only(replica)).iter().any(|other| {
        let other = state_of(states, other, index);
        let unknown = other.kind == BlockKind::Unreadable && other.version == Version::NEVER;
        unknown || other.version >= claim
    })
}

/// The winner of one block among up-to-date replicas, and who lacks it.
pub(super) fn reconcile(states: &States, members: ReplicaSet, index: usize, rule: &Reconcile) -> Decision {
    let Reconcile { generation, complete, held } = *rule;
    let mut best: Option<(ReplicaId, BlockState)> = None;
    let mut bound: Option<(ReplicaId, BlockState)> = None;
    let mut lost: Option<(ReplicaId, BlockState)> = None;
    for replica in members.iter() {
        let state = state_of(states, replica, index);
        if complete && !state.is_verified() && !is_supported(states, members, replica, index) {
            continue;
        }
        let place = match state.kind {
            BlockKind::Data | BlockKind::Zero => &mut best,
            BlockKind::Unverified => &mut bound,
            BlockKind::Unreadable => &mut lost,
        };
        if place.is_none_or(|(_, other)| state.version > other.version) {
            *place = Some((replica, state));
        }
    }
    let version = |place: Option<(ReplicaId, BlockState)>| place.map(|(_, state)| state.version);
    if held.is_some() && held >= version(best).max(version(bound)).max(version(lost)) {
        return Decision::Held;
    }
    if let Some((source, state)) = lost
        && version(lost) > version(best).max(version(bound))
    {
        let same = |r| {
            let own = state_of(states, r, index);
            own.version == state.version && own.crc == state.crc
        };
        let targets: ReplicaSet = members.iter().filter(|&r| !same(r)).collect();
        if targets.is_empty() {
            return Decision::Equal;
        }
        return Decision::Copy { source, targets, state, adopt: false };
    }
    let adopt = match (best, bound) {
        (Some((_, best)), Some((_, bound))) => best.version < bound.version,
        (None, Some(_)) => true,
        (_, None) => false,
    };
    if adopt {
        let Some((source, state)) = bound else { return Decision::Equal };
        let version = Version::new(generation, 0);
        let state = BlockState { version, crc: state.crc, kind: BlockKind::Data };
        return Decision::Copy { source, targets: members, state, adopt: true };
    }
    let Some((source, winner)) = best else { return Decision::Equal };
    let targets: ReplicaSet = members.iter().filter(|&r| state_of(states, r, index) != winner).collect();
    if targets.is_empty() {
        return Decision::Equal;
    }
    Decision::Copy { source, targets, state: winner, adopt: false }
}

pub(super) fn catch_up(
    states: &States,
    joiner: ReplicaId,
    source: ReplicaId,
    join: Version,
    index: usize,
) -> Decision {
    let theirs = state_of(states, source, index);
    let own = state_of(states, joiner, index);
    let own_is_new = own.is_verified() && own.version >= join.max(theirs.version);
    // Should the source have lost its data, the same version is what it lost: the last good copy, maybe.
    let is_lost_one = !theirs.is_verified() && own.version == theirs.version;
    if own.is_verified() && (own_is_new || own == theirs || is_lost_one) {
        return Decision::Equal;
    }
    if !theirs.is_verified() {
        return Decision::NoSource { wanted: theirs };
    }
    Decision::Copy { source, targets: ReplicaSet::only(joiner), state: theirs, adopt: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GENERATION: Generation = Generation(9);

    fn state(kind: BlockKind, number: u64) -> BlockState {
        let crc = u32::try_from(number).unwrap_or(0);
        BlockState { version: Version::new(Generation(1), number), crc, kind }
    }

    fn data(number: u64) -> BlockState {
        state(BlockKind::Data, number)
    }

    /// Its data match nothing; they are at least that new.
    fn torn(number: u64) -> BlockState {
        state(BlockKind::Unverified, number)
    }

    /// Its data can't be read, or don't match.
    fn lost(number: u64) -> BlockState {
        state(BlockKind::Unreadable, number)
    }

    /// Nothing is known, not even a version.
    fn unknown() -> BlockState {
        BlockState { kind: BlockKind::Unreadable, crc: 0, version: Version::NEVER }
    }

    /// What is decided of three replicas in these states: the source, and if its data are adopted.
    fn among(complete: bool, states: [BlockState; 3]) -> Option<(u8, bool)> {
        let states: States = states.map(|state| Some(vec![state]));
        let members = ReplicaId::ALL.into_iter().collect();
        match reconcile(&states, members, 0, &Reconcile { generation: GENERATION, complete, held: None }) {
            Decision::Equal => None,
            Decision::Copy { source, adopt, .. } => Some((source.0, adopt)),
            Decision::Held | Decision::NoSource { .. } => {
                panic!("nothing is held, and there is no one source")
            }
        }
    }

    #[test]
    fn what_an_unanswered_request_holds_is_a_copy_like_others() {
        let members = ReplicaSet::only(ReplicaId(0));
        let decide = |state, held| {
            let states: States = [Some(vec![state]), None, None];
            let held = Some(data(held).version);
            reconcile(&states, members, 0, &Reconcile { generation: GENERATION, complete: false, held })
        };
        for state in [data(5), torn(5), lost(5), torn(6), lost(6), unknown()] {
            assert_eq!(decide(state, 6), Decision::Held, "{state:?}");
        }
        assert_eq!(decide(data(7), 6), Decision::Equal);
        assert_eq!(decide(lost(7), 6), Decision::Equal);
        assert!(matches!(decide(torn(7), 6), Decision::Copy { adopt: true, .. }));
    }

    #[test]
    fn the_highest_verified_version_wins() {
        assert_eq!(among(true, [data(4), data(6), data(5)]), Some((1, false)));
        assert_eq!(among(true, [data(6), data(6), data(6)]), None);
        assert_eq!(among(true, [data(6), torn(6), data(5)]), Some((0, false)));
    }

    #[test]
    fn a_claim_that_two_could_have_executed_counts() {
        // Two at hand, or power lost: the third may have been the other one of the quorum.
        assert_eq!(among(false, [data(4), torn(6), data(5)]), Some((1, true)));
        assert_eq!(among(false, [data(4), lost(6), data(5)]), Some((1, false)));
        // All at hand: nobody else has executed that.
        assert_eq!(among(true, [data(4), torn(6), data(5)]), Some((2, false)));
        assert_eq!(among(true, [data(4), lost(6), data(5)]), Some((2, false)));
        assert_eq!(among(true, [data(4), torn(6), torn(6)]), Some((1, true)));
        // Executed twice, then torn by something newer here, and overtaken there.
        assert_eq!(among(true, [torn(7), torn(6), data(4)]), Some((1, true)));
    }

    #[test]
    fn a_joiner_keeps_what_its_source_has_lost() {
        let (joiner, source, join) = (ReplicaId(0), ReplicaId(1), Version::new(Generation(2), 0));
        let decide = |own, theirs| {
            let states: States = [Some(vec![own]), Some(vec![theirs]), None];
            catch_up(&states, joiner, source, join, 0)
        };
        for theirs in [lost(6), torn(6)] {
            assert_eq!(decide(data(6), theirs), Decision::Equal);
            // Older, or of a generation that was decided against.
            for own in [data(5), data(7), torn(6), lost(6)] {
                assert_eq!(decide(own, theirs), Decision::NoSource { wanted: theirs }, "{own:?}");
            }
        }
        assert_eq!(decide(data(6), data(6)), Decision::Equal);
        assert!(matches!(decide(data(7), data(6)), Decision::Copy { .. }));
    }

    /// Version 6 was acknowledged, held by two of three. One context is noise, and another copy was being overwritten when all
    /// three died.
    #[test]
    fn a_rotted_context_neither_wins_nor_takes_what_was_acknowledged() {
        let noise = torn(1 << 40);
        // It was on the first two; noise is told apart, or taken for a version.
        assert_eq!(among(true, [unknown(), torn(6), data(5)]), Some((1, true)));
        assert_eq!(among(true, [noise, torn(6), data(5)]), Some((1, true)));
        // It was on the last two, of which one shows it.
        assert_eq!(among(true, [unknown(), torn(6), data(6)]), Some((2, false)));
        assert_eq!(among(true, [noise, torn(6), data(6)]), Some((2, false)));
        assert_eq!(among(true, [lost(1 << 40), torn(6), data(6)]), Some((2, false)));
        // Two at hand: what is known to be unknown gives way.
        assert_eq!(among(false, [unknown(), data(6), data(6)]), Some((1, false)));
    }
}
