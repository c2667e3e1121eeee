//! A new generation: from the first replica met to the first guest request served.
//!
//! Stages: *gather* a quorum and wait briefly for the third → *promote* them to the highest promised generation + 1 →
//! *reconcile* those with the highest last active generation → *flush* them → *store* `Activated` on each → serve as soon
//! as a quorum of Active replicas has stored it. The stale ones catch up like any joiner.
//!
//! Invariants:
//! - Only members of the newest membership met count. A volume that never had one takes it from all three replicas. While
//!   the newest one is held by one region alone, regions that never held any don't count (see [`super::replace`]).
//! - A replica with a lower last active generation is never a source.
//! - Losing a participant begins the stage of comparing anew without it; losing the quorum begins everything anew under a
//!   higher generation.
//! - Jobs that were unacknowledged when the last Active replica was lost get new numbers above everything that the new
//!   generation has flushed, so that a flushed mark never covers them wrongly.

use newel_protocol::Generation;
use newel_protocol::wire::Membership;

use super::api::{LogLevel, ReplicaId, ReplicaSet, Time};
use super::jobs::{Job, Owner, Purpose, ReadState};
use super::replica::{Link, Role};
use super::resync::{Resync, Rule};
use super::timeline::What;
use super::{Core, Phase, QUORUM};

#[derive(Debug)]
pub(super) struct Activation {
    stage: Stage,
    /// When gathering stops waiting for more.
    deadline: Option<Time>,
    waits_for_power: bool,
}

#[derive(Debug)]
enum Stage {
    Gathering,
    /// `Promote` is out to these.
    Promoting {
        asked: ReplicaSet,
    },
    Reconciling {
        resync: Box<Resync>,
    },
    Flushing {
        waiting: ReplicaSet,
        epoch: u64,
    },
    Storing {
        waiting: ReplicaSet,
    },
    /// Too few hold everything yet: joiners make up the quorum.
    WaitingForQuorum,
}

impl Activation {
    pub(super) fn gathering() -> Self {
        Self { stage: Stage::Gathering, deadline: None, waits_for_power: false }
    }

    pub(super) fn deadline(&self) -> Option<Time> {
        self.deadline
    }

    pub(super) fn accepts_joiners(&self) -> bool {
        matches!(self.stage, Stage::WaitingForQuorum)
    }

    pub(super) fn resync_mut(&mut self) -> Option<&mut Resync> {
        match &mut self.stage {
            Stage::Reconciling { resync } => Some(resync),
            Stage::Gathering
            | Stage::Promoting { .. }
            | Stage::Flushing { .. }
            | Stage::Storing { .. }
            | Stage::WaitingForQuorum => None,
        }
    }
}

impl Core {
    fn stage_ref(&self) -> Option<&Stage> {
        match &self.phase {
            Phase::Activating(activation) => Some(&activation.stage),
            Phase::Serving => None,
        }
    }

    fn stage_mut(&mut self) -> Option<&mut Stage> {
        match &mut self.phase {
            Phase::Activating(activation) => Some(&mut activation.stage),
            Phase::Serving => None,
        }
    }

    /// Moves the activation on as far as it goes. Called after every event.
    pub(super) fn check_activation(&mut self) {
        match self.stage_mut() {
            Some(Stage::Gathering) => self.check_gathered(),
            Some(Stage::Promoting { asked }) if asked.is_empty() => self.start_reconcile(),
            Some(_) | None => {}
        }
    }

    fn check_gathered(&mut self) {
        let greeted = self.set_of(|replica| matches!(replica.link, Link::Greeted));
        let membership = self.newest_membership(greeted);
        let members = membership.map_or(ReplicaSet::EMPTY, |m| self.countable(m, greeted));
        let needed = membership.map_or(QUORUM, |membership| self.needed_under(membership, greeted, members));
        let Some(membership) = membership.filter(|_| members.len() >= needed) else {
            // The wait begins when a quorum is there, and begins anew if it goes.
            self.set_stage(Stage::Gathering);
            return;
        };
        if members.len() < ReplicaId::COUNT && !self.waited_enough(members) {
            return;
        }
        self.needed = needed;
        self.set_membership(Membership { alone: self.config.min_replicas < QUORUM, ..membership });
        self.start_promote(members);
    }

    /// Whoever has executed what was acknowledged must be among them: as many as leave fewer out than acknowledge.
    fn needed_under(&self, membership: Membership, greeted: ReplicaSet, counted: ReplicaSet) -> usize {
        if !membership.alone && self.config.min_replicas >= QUORUM {
            return QUORUM;
        }
        // A new region that can't count yet has executed nothing, and waits for just this activation.
        let waits = |id: &ReplicaId| self.is_member(membership, *id) && !counted.contains(*id);
        ReplicaId::COUNT - greeted.iter().filter(waits).count()
    }

    /// All that an activation needs must know it before changes are acknowledged under its terms.
    fn needed_to_serve(&self) -> usize {
        if self.config.min_replicas < QUORUM { self.needed } else { QUORUM }
    }

    /// True once the wait for a third is over: short as a rule, long if all at hand may have lost writes with their power.
    fn waited_enough(&mut self, members: ReplicaSet) -> bool {
        let now = self.now;
        let welcome = |id: ReplicaId| self.replica(id).welcome.as_ref();
        let top = members.iter().filter_map(|id| welcome(id).map(|w| w.last_active)).max();
        let all_lost_power = members
            .iter()
            .filter_map(welcome)
            .filter(|welcome| Some(welcome.last_active) == top)
            .all(|welcome| welcome.lost_power);
        let timing = &self.config.timing;
        let wait = if all_lost_power { timing.power_wait } else { timing.third_wait };
        let Phase::Activating(activation) = &mut self.phase else { return false };
        if activation.deadline.is_none() || activation.waits_for_power != all_lost_power {
            activation.deadline = Some(now.after(wait));
            activation.waits_for_power = all_lost_power;
        }
        let over = activation.deadline.is_some_and(|deadline| now >= deadline);
        if over && all_lost_power {
            self.log(
                LogLevel::Warn,
                "every up-to-date replica at hand has lost power with writes unflushed; going on without the third: \
                 writes that were never flushed may be gone",
            );
        }
        over
    }

    fn start_promote(&mut self, members: ReplicaSet) {
        for id in members.iter() {
            if let Some(welcome) = &self.replica(id).welcome {
                let (blocks, promised) = (welcome.blocks, welcome.promised);
                self.blocks = blocks;
                self.raise_generation(promised);
            }
        }
        let highest = self.generation.max(self.highest_promised);
        self.generation = Generation(highest.0.saturating_add(1));
        self.set_stage(Stage::Promoting { asked: members });
        for id in members.iter() {
            self.promote(id);
        }
        self.log(LogLevel::Info, format!("activating generation {}", self.generation));
    }

    fn set_stage(&mut self, stage: Stage) {
        self.phase = Phase::Activating(Activation { stage, deadline: None, waits_for_power: false });
    }

    /// True if a replica that has just been promoted belongs to this activation.
    pub(super) fn activation_takes(&mut self, id: ReplicaId) -> bool {
        match self.stage_mut() {
            Some(Stage::Promoting { asked }) if asked.contains(id) => {
                asked.remove(id);
                true
            }
            Some(_) | None => false,
        }
    }

    fn participants(&self) -> ReplicaSet {
        self.set_of(|replica| matches!(replica.link, Link::Up(Role::Activating)))
    }

    /// The participants with the highest last active generation: they alone can be sources.
    fn up_to_date(&self) -> ReplicaSet {
        let last_active = |id: ReplicaId| self.replica(id).welcome.as_ref().map(|w| w.last_active);
        let participants = self.participants();
        let top = participants.iter().filter_map(last_active).max();
        participants.iter().filter(|&id| last_active(id) == top).collect()
    }

    fn start_reconcile(&mut self) {
        let members = self.up_to_date();
        if self.participants().len() < self.needed {
            self.restart_activation("the quorum was lost while activating");
            return;
        }
        self.own_generations.insert(self.generation);
        let kept_power = |id| self.replica(id).welcome.as_ref().is_some_and(|welcome| !welcome.lost_power);
        let complete =
            self.needed == QUORUM && members.len() == ReplicaId::COUNT && members.iter().all(kept_power);
        let rule = Rule::Reconcile { generation: self.generation, complete };
        let held = self.requests.kept().into_iter();
        let held = held.flat_map(|kept| kept.blocks().map(move |block| (block, kept.version))).collect();
        let resync =
            Resync::new(rule, members, ReplicaSet::EMPTY, self.blocks, self.next_query).holding(held);
        self.set_stage(Stage::Reconciling { resync: Box::new(resync) });
        self.pump_resync(None);
    }

    /// Reconciled: those to flush.
    pub(super) fn activation_flushing(&mut self, epoch: u64) -> ReplicaSet {
        self.store_kept(epoch);
        let waiting = self.up_to_date();
        self.set_stage(Stage::Flushing { waiting, epoch });
        waiting
    }

    /// Stores again what unanswered requests have had acknowledged, unless something newer is there: a power cut may have
    /// taken it since.
    fn store_kept(&mut self, epoch: u64) {
        let Some(Stage::Reconciling { resync }) = self.stage_ref() else { return };
        let wanted = |block| !resync.is_outdated(block);
        let stores: Vec<_> = self.requests.kept().iter().filter_map(|kept| kept.as_store(wanted)).collect();
        let members = self.up_to_date();
        for (extent, op, payload) in stores {
            let purpose = Purpose::ResyncStore { subject: None, epoch, extent };
            self.send_internal_job(op, payload, purpose, members);
        }
    }

    pub(super) fn activation_flushed(&mut self, id: ReplicaId, flushed: u64) {
        let Some(Stage::Flushing { waiting, epoch }) = self.stage_mut() else { return };
        if *epoch != flushed {
            return;
        }
        waiting.remove(id);
        if waiting.is_empty() {
            let waiting = self.up_to_date();
            self.set_stage(Stage::Storing { waiting });
            self.send_activated(waiting);
        }
    }

    pub(super) fn activation_stored(&mut self, id: ReplicaId) {
        let Some(Stage::Storing { waiting }) = self.stage_mut() else { return };
        waiting.remove(id);
        if waiting.is_empty() {
            self.finish_activation();
        }
    }

    /// All up-to-date participants have stored the generation: they are Active, the stale ones join them.
    fn finish_activation(&mut self) {
        let up_to_date = self.up_to_date();
        let stale = self.participants().without(up_to_date);
        let now = self.now;
        self.set_stage(Stage::WaitingForQuorum);
        for id in up_to_date.iter() {
            self.replica_mut(id).become_active(now);
        }
        // Before anything new: what waited since the last generation comes first.
        self.send_open_jobs();
        self.count_anew();
        for id in stale.iter() {
            self.start_catch_up(id);
        }
        for id in ReplicaId::ALL {
            self.join_if_greeted(id);
        }
    }

    pub(super) fn serve_if_quorum(&mut self) {
        let ready = matches!(self.stage_mut(), Some(Stage::WaitingForQuorum))
            && self.active().len() >= self.needed_to_serve();
        if !ready {
            return;
        }
        self.phase = Phase::Serving;
        let first = !std::mem::replace(&mut self.was_served, true);
        let generation = self.generation;
        let what = if first { "serving" } else { "serving again" };
        self.log(
            LogLevel::Info,
            format!("{what} generation {generation} with {} active replicas", self.active().len()),
        );
    }

    /// A participant left.
    pub(super) fn activation_lost(&mut self, id: ReplicaId) {
        let enough = self.participants().len() >= self.needed;
        let none_active = self.active().is_empty();
        match self.stage_mut() {
            Some(Stage::Promoting { asked }) => {
                asked.remove(id);
            }
            Some(Stage::Reconciling { .. } | Stage::Flushing { .. } | Stage::Storing { .. }) if enough => {
                self.start_reconcile();
            }
            Some(Stage::Reconciling { .. } | Stage::Flushing { .. } | Stage::Storing { .. }) => {
                self.restart_activation("the quorum was lost while activating");
            }
            Some(Stage::WaitingForQuorum) if none_active => {
                self.restart_activation("the quorum was lost while activating");
            }
            Some(Stage::Gathering | Stage::WaitingForQuorum) | None => {}
        }
    }

    /// From the beginning: every link is closed, so that no message of this attempt can be taken for one of the next.
    pub(super) fn restart_activation(&mut self, reason: &str) {
        self.set_stage(Stage::Gathering);
        let connected = self.set_of(|replica| !replica.is_down());
        for id in connected.iter() {
            self.leave(id, format!("activation begins anew: {reason}"));
        }
    }

    /// A served volume needs a new generation: what is unacknowledged is sent anew in it.
    pub(super) fn reactivate(&mut self, reason: &str) {
        self.log(LogLevel::Error, format!("{reason}: I/O waits until a new generation is active"));
        if self.quorum_lost_since.is_none() {
            self.quorum_lost_since = Some(self.now);
            self.trace.mark_open(self.now, What::QuorumLost);
        }
        self.restart_activation(reason);
        self.renumber_open_jobs();
        self.forget_edges();
    }

    /// Gives unsettled guest jobs new numbers, in their order. Nothing of them is owed or done any more.
    fn renumber_open_jobs(&mut self) {
        self.held_reads.clear();
        self.throttle.forget_all();
        self.witness.forget_all();
        let ids = self.jobs.ids(|job| !job.settled && !job.is_internal());
        debug_assert!(self.jobs.iter().all(|job| job.owed.is_empty()), "no link, nothing owed");
        for old in ids {
            let Some(job) = self.jobs.remove(old) else { continue };
            let read = job.is_read().then(Box::<ReadState>::default);
            let id = self.jobs.next_id();
            let unsent = Job {
                id,
                owed: ReplicaSet::EMPTY,
                done: ReplicaSet::EMPTY,
                counted: ReplicaSet::EMPTY,
                replied: [None; ReplicaId::COUNT],
                readers: ReplicaSet::EMPTY,
                read,
                ..job
            };
            debug_assert!(!matches!(unsent.owner, Owner::Internal(_)));
            self.trace.renumbered(unsent.trace, self.now, id);
            self.jobs.insert(unsent);
        }
    }

    fn send_open_jobs(&mut self) {
        for id in self.jobs.ids(|job| !job.settled && job.is_guest_change()) {
            self.send_job(id, self.active());
        }
    }
}
