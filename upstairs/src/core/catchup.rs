//! A joiner's way to Active, and what reconcile and catch-up share: carrying out the steps of a [`Resync`].
//!
//! The way: every change in the job table is sent again → digests, contexts and blocks are copied from an Active source →
//! flush → `Activated` is stored → Active. Whatever is not in the table has left it, so the source has it; whatever is in the
//! table arrives by itself.
//!
//! Invariants:
//! - A joiner counts for nothing before it has stored `Activated` of the generation in force.
//! - One catch-up copies at a time, so that the guest pays for one and answers can't be confused.
//! - Every digest or context query carries a number; an answer to a query of a resync that was given up is ignored.

use bytes::Bytes;
use newel_protocol::wire::{Op, Request};
use newel_protocol::{Generation, Version};

use super::api::{LogLevel, ReplicaId, ReplicaSet, Time};
use super::jobs::Purpose;
use super::replica::{CatchUp, CatchUpStage, Link, Role};
use super::resync::{Progress, Resync, Rule, Step};
use super::{Core, Phase};

impl Core {
    pub(super) fn start_catch_up(&mut self, id: ReplicaId) {
        let catch_up =
            CatchUp { stage: CatchUpStage::NoSource, started: self.now, copied: Progress::default() };
        self.replica_mut(id).link = Link::Up(Role::CatchingUp(Box::new(catch_up)));
        let changes = self.jobs.ids(|job| job.is_guest_change());
        self.log(LogLevel::Info, format!("replica {id} is catching up"));
        for job in changes {
            self.send_job(job, ReplicaSet::only(id));
        }
        self.begin_copying();
    }

    /// Gives the next waiting joiner a source, unless another is copying.
    pub(super) fn begin_copying(&mut self) {
        let copying = self
            .replicas
            .iter_mut()
            .any(|r| r.catch_up().is_some_and(|catch_up| matches!(catch_up.stage, CatchUpStage::Copying(_))));
        let waiting = ReplicaId::ALL.into_iter().find(|&id| {
            self.replica_mut(id).catch_up().is_some_and(|c| matches!(c.stage, CatchUpStage::NoSource))
        });
        let source = self.active().iter().min_by_key(|&id| (self.replica(id).queue_jobs, id));
        let (false, Some(joiner), Some(source)) = (copying, waiting, source) else { return };
        let mut members = ReplicaSet::only(joiner);
        members.insert(source);
        let alternates = self.active().without(ReplicaSet::only(source));
        let join = Version::new(self.generation, 0);
        let rule = Rule::CatchUp { joiner, source, join };
        let resync = Resync::new(rule, members, alternates, self.blocks, self.next_query);
        if let Some(catch_up) = self.replica_mut(joiner).catch_up() {
            catch_up.stage = CatchUpStage::Copying(Box::new(resync));
        }
        self.pump_resync(Some(joiner));
    }

    /// The resync of a joiner, or of the activation.
    fn resync_mut(&mut self, subject: Option<ReplicaId>) -> Option<&mut Resync> {
        match subject {
            Some(id) => match &mut self.replica_mut(id).catch_up()?.stage {
                CatchUpStage::Copying(resync) => Some(resync),
                CatchUpStage::NoSource | CatchUpStage::Flushing | CatchUpStage::Storing => None,
            },
            None => match &mut self.phase {
                Phase::Activating(activation) => activation.resync_mut(),
                Phase::Serving => None,
            },
        }
    }

    /// An answer to a query: it belongs to whichever resync asked it.
    pub(super) fn with_query(&mut self, query: u64, apply: impl FnOnce(&mut Resync)) {
        let subjects = [None, Some(ReplicaId(0)), Some(ReplicaId(1)), Some(ReplicaId(2))];
        for subject in subjects {
            if let Some(resync) = self.resync_mut(subject).filter(|resync| resync.asked(query)) {
                apply(resync);
                self.pump_resync(subject);
                return;
            }
        }
    }

    /// The answer to a job of the resync with this epoch.
    pub(super) fn with_resync(
        &mut self,
        subject: Option<ReplicaId>,
        epoch: u64,
        apply: impl FnOnce(&mut Resync),
    ) {
        if let Some(resync) = self.resync_mut(subject).filter(|resync| resync.epoch == epoch) {
            apply(resync);
            self.pump_resync(subject);
        }
    }

    pub(super) fn pump_resync(&mut self, subject: Option<ReplicaId>) {
        match subject {
            Some(_) => self.send_paced_steps(subject),
            None => self.send_steps(subject),
        }
        let Some(resync) = self.resync_mut(subject) else { return };
        let (failure, done) = (resync.failure().map(str::to_owned), resync.is_done());
        let (epoch, next_query) = (resync.epoch, resync.next_query());
        self.next_query = next_query;
        match (subject, failure) {
            (Some(joiner), Some(reason)) => self.leave(joiner, format!("catch-up failed: {reason}")),
            (None, Some(reason)) => self.restart_activation(&reason),
            (_, None) if done => self.flush_resynced(subject, epoch),
            (_, None) => {}
        }
    }

    /// The joiner that is copied to.
    fn copying(&self) -> Option<(ReplicaId, &Resync)> {
        self.replicas.iter().find_map(|replica| match &replica.catch_up_ref()?.stage {
            CatchUpStage::Copying(resync) => Some((replica.id, &**resync)),
            CatchUpStage::NoSource | CatchUpStage::Flushing | CatchUpStage::Storing => None,
        })
    }

    /// When a joiner may be copied to again, if it waits for that.
    pub(super) fn pace_deadline(&self) -> Option<Time> {
        let (_, resync) = self.copying()?;
        resync.waits_for_grant().then(|| self.pace.next_grant())
    }

    /// Called after every event: goes on with what had to wait for its time.
    pub(super) fn check_pace(&mut self) {
        match self.copying().map(|(id, resync)| (id, resync.waits_for_grant())) {
            Some((joiner, true)) if self.now >= self.pace.next_grant() => self.pump_resync(Some(joiner)),
            Some(_) => {}
            None => self.pace.set_copying(self.now, false),
        }
    }

    fn send_paced_steps(&mut self, joiner: Option<ReplicaId>) {
        self.pace.set_copying(self.now, true);
        let granted = self.pace.grant(self.now);
        if let Some(resync) = self.resync_mut(joiner) {
            resync.grant(granted);
        }
        self.send_steps(joiner);
        let left = self.resync_mut(joiner).map_or(0, Resync::take_left);
        self.pace.spend(granted, left);
    }

    fn send_steps(&mut self, subject: Option<ReplicaId>) {
        while let Some(step) = self.resync_mut(subject).and_then(Resync::next_step) {
            self.send_step(subject, step);
        }
    }

    fn send_step(&mut self, subject: Option<ReplicaId>, step: Step) {
        let epoch = self.resync_mut(subject).map_or(0, |resync| resync.epoch);
        match step {
            Step::Digests { query, replica, first, count } => {
                let request = Request::Digests { query, first, count };
                self.send(ReplicaSet::only(replica), request, Bytes::new());
            }
            Step::Contexts { query, replica, extent } => {
                self.send(ReplicaSet::only(replica), Request::Contexts { query, extent }, Bytes::new());
            }
            Step::Read { replica, extent, copy, range, mode } => {
                let purpose = Purpose::ResyncRead { subject, epoch, extent, copy };
                self.send_internal_job(
                    Op::Read { range, mode },
                    Bytes::new(),
                    purpose,
                    ReplicaSet::only(replica),
                );
            }
            Step::Store { replicas, extent, blocks, join, data } => {
                let purpose = Purpose::ResyncStore { subject, epoch, extent };
                self.send_internal_job(Op::Store { blocks, join }, data, purpose, replicas);
            }
        }
    }

    /// Everything is copied: make it durable.
    fn flush_resynced(&mut self, subject: Option<ReplicaId>, epoch: u64) {
        let targets = match subject {
            Some(joiner) => {
                if let Some(catch_up) = self.replica_mut(joiner).catch_up() {
                    if let CatchUpStage::Copying(resync) = &catch_up.stage {
                        catch_up.copied = resync.progress;
                    }
                    catch_up.stage = CatchUpStage::Flushing;
                }
                ReplicaSet::only(joiner)
            }
            None => self.activation_flushing(epoch),
        };
        self.send_internal_job(Op::Flush, Bytes::new(), Purpose::ResyncFlush { subject, epoch }, targets);
        self.begin_copying();
    }

    pub(super) fn on_resync_flushed(&mut self, id: ReplicaId, subject: Option<ReplicaId>, epoch: u64) {
        if subject.is_none() {
            self.activation_flushed(id, epoch);
            return;
        }
        if let Some(catch_up) = self.replica_mut(id).catch_up()
            && matches!(catch_up.stage, CatchUpStage::Flushing)
        {
            catch_up.stage = CatchUpStage::Storing;
            self.send_activated(ReplicaSet::only(id));
        }
    }

    pub(super) fn send_activated(&mut self, replicas: ReplicaSet) {
        let (generation, membership) = (self.generation, self.membership);
        self.send(replicas, Request::Activated { generation, membership }, Bytes::new());
    }

    pub(super) fn on_activated_stored(&mut self, id: ReplicaId, generation: Generation) {
        if generation != self.generation {
            self.leave(id, format!("it stored generation {generation} as active, which is not in force"));
            return;
        }
        self.note_stored(id);
        let now = self.now;
        let joined = match self.replica_mut(id).catch_up() {
            Some(CatchUp { stage: CatchUpStage::Storing, started, copied }) => {
                Some((now.since(*started), *copied))
            }
            Some(_) | None => None,
        };
        match joined {
            Some((took, copied)) => {
                self.replica_mut(id).last_catch_up = Some(copied);
                self.log(
                    LogLevel::Info,
                    format!(
                        "replica {id} is active again after {} ms; {} blocks were copied",
                        took.as_millis(),
                        copied.blocks_copied
                    ),
                );
                self.activate_replica(id);
            }
            None => self.activation_stored(id),
        }
    }

    /// From now on this replica counts: for what it executed before, too.
    fn activate_replica(&mut self, id: ReplicaId) {
        let now = self.now;
        self.replica_mut(id).become_active(now);
        self.count_anew();
    }

    /// The set of Active replicas has grown.
    pub(super) fn count_anew(&mut self) {
        self.clear_leads(None);
        self.serve_if_quorum();
        for job in self.jobs.ids(|job| !job.settled && job.is_guest_change()) {
            self.settle_if_acknowledged(job);
        }
        self.resend_reads();
        self.note_quorum();
        self.admit_waiting();
        self.begin_copying();
    }

    /// A replica left: a joiner that copied from it begins anew with another source.
    pub(super) fn catch_up_lost(&mut self, id: ReplicaId) {
        for joiner in ReplicaId::ALL {
            let Some(catch_up) = self.replica_mut(joiner).catch_up() else { continue };
            if let CatchUpStage::Copying(resync) = &mut catch_up.stage {
                if resync.source() == Some(id) || resync.reads_from(id) {
                    catch_up.stage = CatchUpStage::NoSource;
                } else {
                    resync.drop_alternate(id);
                }
            }
        }
    }
}
