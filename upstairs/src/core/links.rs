//! Connections to replicas: handshake, pings, leaving and coming back.
//!
//! Invariants:
//! - A replica leaves with everything of its link: what it owed is owed by nobody, its internal jobs are gone, reads that
//!   only it could answer are asked elsewhere.
//! - A replica that falls behind leaves only while a quorum of Active others progresses; all slow together leave nobody.
//! - A refusal that no retry can mend stops an upstairs that never served, and keeps the replica out of one that serves.

use std::time::Duration;

use newel_protocol::wire::{Hello, Membership, Refusal, Request, VERSION, Welcome};
use newel_protocol::{Generation, JobId, Version};

use super::Core;
use super::api::{Action, LinkId, LogLevel, ReplicaId, ReplicaSet, StopReason, Time};
use super::jobs::Owner;
use super::kept::Kept;
use super::replica::{Link, Role};
use super::timeline::What;

/// How long a replica that said it can't serve is left alone: until somebody did something about it.
const REFUSED_RETRY: Duration = Duration::from_secs(5);

impl Core {
    pub(super) fn on_link_up(&mut self, id: ReplicaId, link: LinkId) {
        let now = self.now;
        let hello = Hello {
            min_version: VERSION,
            max_version: VERSION,
            volume: self.config.volume,
            upstairs: self.config.upstairs,
            session: self.replica(id).sessions,
            takeover: self.config.takeover && !self.was_served,
        };
        let replica = self.replica_mut(id);
        if replica.link_id != link || !matches!(replica.link, Link::Connecting { .. }) {
            return;
        }
        replica.link = Link::Greeting { since: now };
        replica.last_heard = now;
        self.send(ReplicaSet::only(id), Request::Hello(hello), bytes::Bytes::new());
    }

    pub(super) fn on_link_down(&mut self, id: ReplicaId, link: LinkId, reason: String) {
        let replica = self.replica(id);
        if replica.link_id == link && !replica.is_down() {
            self.left(id, reason, Duration::ZERO);
        }
    }

    pub(super) fn on_welcome(&mut self, id: ReplicaId, welcome: Welcome) {
        let now = self.now;
        if !matches!(self.replica(id).link, Link::Greeting { .. }) {
            self.leave(id, "it introduced itself twice");
            return;
        }
        if let Some(reason) = self.unfit(id, &welcome) {
            self.refused_for_good(id, reason);
            return;
        }
        // Whoever was active since may have acknowledged newer writes than ours: ours must never be sent again.
        if self.was_served && !self.own_generations.contains(&welcome.last_active) {
            let by =
                format!("an upstairs that activated generation {}, says replica {id}", welcome.last_active);
            if welcome.last_active > self.generation_served() {
                self.stop(StopReason::Fenced { by });
                return;
            }
        }
        let replica = self.replica_mut(id);
        replica.region = Some(welcome.region);
        replica.welcome = Some(welcome);
        replica.link = Link::Greeted;
        replica.start_pings(now);
        self.join_if_greeted(id);
    }

    /// Why this region can't be a replica of this volume, if it can't.
    fn unfit(&self, id: ReplicaId, welcome: &Welcome) -> Option<String> {
        if welcome.blocks == 0 {
            return Some("its region has no blocks".into());
        }
        let known = if self.blocks > 0 { Some(self.blocks) } else { self.config.blocks };
        let others =
            self.replicas.iter().filter(|r| r.id != id).filter_map(|r| Some((r.id, r.welcome.as_ref()?)));
        for (other, theirs) in others.clone() {
            if theirs.region == welcome.region {
                return Some(format!("it serves region {}, as replica {other} does", welcome.region));
            }
        }
        let block = newel_protocol::BLOCK_BYTES as u64;
        let expected = known
            .map(|blocks| (blocks, "the volume has".to_string()))
            .or_else(|| others.map(|(other, theirs)| (theirs.blocks, format!("replica {other} has"))).next());
        match expected {
            Some((blocks, whose)) if blocks != welcome.blocks => Some(format!(
                "sizes differ: its region has {} bytes, {whose} {}",
                welcome.blocks * block,
                blocks * block
            )),
            Some(_) | None => None,
        }
    }

    pub(super) fn on_refused(&mut self, id: ReplicaId, refusal: &Refusal) {
        let text = refusal.to_string();
        match refusal {
            Refusal::Fenced { by, generation } => {
                let by = format!("upstairs {by} (generation {generation}), says replica {id}");
                self.stop(StopReason::Fenced { by });
            }
            // Another upstairs tried and did not come into service (else the welcome would have told): go above it.
            Refusal::StaleGeneration { promised, .. } => {
                self.raise_generation(*promised);
                self.left(id, text, Duration::ZERO);
                if self.is_serving() {
                    self.reactivate("a replica has promised a higher generation");
                }
            }
            Refusal::InUse { by, generation } if self.was_served => {
                let by = format!("upstairs {by} (generation {generation}), says replica {id}");
                self.stop(StopReason::Fenced { by });
            }
            Refusal::InUse { .. } | Refusal::OtherVolume { .. } | Refusal::Version { .. } => {
                self.refused_for_good(id, text);
            }
            Refusal::Failed { .. } => self.left(id, text, REFUSED_RETRY),
            Refusal::TooManyConnections { .. } | Refusal::Violation { .. } | Refusal::ShuttingDown => {
                self.left(id, text, Duration::ZERO);
            }
        }
    }

    fn refused_for_good(&mut self, id: ReplicaId, reason: String) {
        if self.was_served {
            self.left(id, reason, REFUSED_RETRY);
        } else {
            self.stop(StopReason::Refused { replica: id, reason });
        }
    }

    /// Close the link and take the replica out of everything.
    pub(super) fn leave(&mut self, id: ReplicaId, reason: impl Into<String>) {
        self.left(id, reason.into(), Duration::ZERO);
    }

    pub(super) fn left(&mut self, id: ReplicaId, reason: String, minimum_wait: Duration) {
        if self.replica(id).is_down() {
            return;
        }
        let was_active = self.replica(id).is_active();
        let first_time = self.replica(id).reason.as_ref() != Some(&reason);
        let (now, link) = (self.now, self.replica(id).link_id);
        let timing = self.config.timing.clone();
        self.replica_mut(id).go_down(now, reason.clone(), &timing, minimum_wait);
        self.actions.push_back(Action::Disconnect { replica: id, link });
        if was_active || first_time {
            let level = if was_active { LogLevel::Warn } else { LogLevel::Info };
            let role = if was_active { " (it was active)" } else { "" };
            self.log(level, format!("replica {id} left{role}: {reason}"));
        }
        self.clear_leads(Some(id));
        self.catch_up_lost(id);
        self.forget_jobs_of(id);
        self.scrub_lost(id);
        self.activation_lost(id);
        self.begin_copying();
        self.resend_reads();
        self.note_quorum();
        if self.is_serving() && self.active().is_empty() {
            self.reactivate("no replica is active");
        }
    }

    /// Nobody waits for this replica's replies any more.
    fn forget_jobs_of(&mut self, id: ReplicaId) {
        let concerned = self.jobs.ids(|job| job.owed.contains(id) || job.read.is_some());
        for job_id in concerned {
            let Some(job) = self.jobs.get_mut(job_id) else { continue };
            let owed = job.owed.contains(id);
            job.owed.remove(id);
            if owed {
                self.trace.lost(job.trace, self.now, id);
            }
            if let Some(read) = &mut job.read {
                // It may come back healed.
                read.failed.remove(id);
            }
            if owed && let Owner::Internal(purpose) = job.owner {
                let gone = job.owed.is_empty();
                job.settled |= gone;
                self.internal_lost(purpose);
            }
            self.retire(job_id);
        }
    }

    /// Reads that no connected replica will answer are asked of all Active ones that did not fail them.
    pub(super) fn resend_reads(&mut self) {
        if !self.is_serving() {
            return;
        }
        let active = self.active();
        let throttle = &self.throttle;
        let orphans = self.jobs.ids(|job| {
            job.is_guest_read() && !job.settled && job.owed.is_empty() && !throttle.is_gated(job.id)
        });
        for id in orphans {
            let Some(read) = self.jobs.get(id).and_then(|job| job.read.as_ref()) else { continue };
            if read.answer.is_none() {
                let targets = active.without(read.failed);
                if targets.is_empty() {
                    self.fail_read_if_hopeless(id);
                } else {
                    self.throttle.take(id);
                    self.send_job(id, targets);
                }
            }
        }
    }

    /// A replica joined, or this one left.
    pub(super) fn clear_leads(&mut self, gone: Option<ReplicaId>) {
        for replica in &mut self.replicas {
            replica.times.clear_lead();
        }
        self.throttle.clear(gone);
    }

    pub(super) fn note_quorum(&mut self) {
        let lost = self.is_serving() && self.active().len() < self.config.min_replicas;
        match (lost, self.quorum_lost_since) {
            (true, None) => {
                self.quorum_lost_since = Some(self.now);
                self.trace.mark_open(self.now, What::QuorumLost);
                self.log(LogLevel::Error, "quorum lost: writes wait until enough replicas are active again");
            }
            (false, Some(since)) if self.is_serving() => {
                let waited = self.now.since(since).as_millis();
                self.quorum_lost_since = None;
                self.trace.mark_open(self.now, What::QuorumRegained);
                self.log(LogLevel::Info, format!("quorum regained after {waited} ms"));
            }
            (true | false, _) => {}
        }
    }

    /// What is due on this link: the next attempt, a ping, or giving up on it.
    pub(super) fn check_link_time(&mut self, id: ReplicaId) {
        let now = self.now;
        let timing = &self.config.timing;
        let (ping_every, silence) = (timing.ping_every, timing.silence);
        let (handshake, promote) = (timing.handshake, timing.promote);
        let replica = &mut self.replicas[id.index()];
        match &replica.link {
            Link::Down { retry_at } if now >= *retry_at && self.stopping.is_none() => {
                replica.link_id = LinkId(replica.link_id.0 + 1);
                replica.sessions += 1;
                replica.reconnects += u64::from(replica.sessions > 1);
                replica.link = Link::Connecting { since: now };
                let link = replica.link_id;
                self.actions.push_back(Action::Connect { replica: id, link });
            }
            Link::Connecting { since } | Link::Greeting { since } if now.since(*since) >= handshake => {
                self.leave(id, format!("no answer within {} s", handshake.as_secs_f32()));
            }
            Link::Promoting { since } if now.since(*since) >= promote => {
                self.leave(id, format!("not ready within {} s", promote.as_secs_f32()));
            }
            Link::Greeted | Link::Up(_) if replica.silent_for(now) >= silence => {
                self.leave(id, format!("silent for {} s", silence.as_secs_f32()));
            }
            Link::Greeted | Link::Up(_) => {
                if let Some(nonce) = replica.ping_due(now, ping_every) {
                    self.send(ReplicaSet::only(id), Request::Ping { nonce }, bytes::Bytes::new());
                }
                if self.age_deadline(id).is_some_and(|deadline| now >= deadline) {
                    let age = self.config.timing.job_age.as_secs_f32();
                    self.leave(
                        id,
                        format!("fell behind: a job is unanswered for {age} s while the others go on"),
                    );
                }
            }
            Link::Down { .. } | Link::Connecting { .. } | Link::Greeting { .. } | Link::Promoting { .. } => {}
        }
    }

    /// When the oldest job that this replica owes is too old; only while the others could do without it.
    pub(super) fn age_deadline(&self, id: ReplicaId) -> Option<Time> {
        if self.replica(id).queue_jobs == 0 || !self.can_do_without(id) {
            return None;
        }
        let oldest = self.jobs.owed_by(id).find(|job| job.settled)?;
        Some(oldest.sent[id.index()].after(self.config.timing.job_age))
    }

    /// True if a quorum of other replicas is Active.
    fn can_do_without(&self, id: ReplicaId) -> bool {
        let mut others = self.active();
        others.remove(id);
        self.is_serving() && others.len() >= self.config.min_replicas
    }

    /// A replica over its bound leaves if the others are a quorum and owe less than half of it themselves.
    pub(super) fn check_bound(&mut self, id: ReplicaId) {
        let limits = &self.config.limits;
        let (jobs, bytes) = (limits.replica_jobs, limits.replica_bytes);
        let replica = self.replica(id);
        let over = replica.queue_jobs > jobs || replica.queue_bytes > bytes;
        if !over || !self.can_do_without(id) {
            return;
        }
        let mut others = self.active();
        others.remove(id);
        let ahead = others.iter().all(|other| {
            let other = self.replica(other);
            other.queue_jobs * 2 <= jobs && other.queue_bytes * 2 <= bytes
        });
        if ahead {
            let (jobs, bytes) = (replica.queue_jobs, replica.queue_bytes);
            self.leave(
                id,
                format!("fell behind: it owes {jobs} jobs ({bytes} bytes) while the others go on"),
            );
        }
    }

    /// True if this region is one of the volume's.
    pub(super) fn is_member(&self, membership: Membership, id: ReplicaId) -> bool {
        let region = self.replica(id).welcome.as_ref().map(|welcome| welcome.region);
        region.is_some_and(|region| membership.regions.contains(&region))
    }

    /// The first generation that was served from here.
    fn generation_served(&self) -> Generation {
        self.own_generations.first().copied().unwrap_or_default()
    }

    pub(super) fn raise_generation(&mut self, promised: Generation) {
        self.highest_promised = self.highest_promised.max(promised);
    }

    /// Puts a greeted replica on its way to Active, if there is something to join.
    pub(super) fn join_if_greeted(&mut self, id: ReplicaId) {
        let joinable = match &self.phase {
            super::Phase::Serving => true,
            super::Phase::Activating(activation) => activation.accepts_joiners(),
        };
        if !joinable || !matches!(self.replica(id).link, Link::Greeted) {
            return;
        }
        if !self.is_member(self.membership, id) {
            if !self.is_taking_over(id) {
                let reason = self.not_a_member(self.membership, id);
                self.left(id, reason, REFUSED_RETRY);
            }
            return;
        }
        if self.may_join(id) {
            self.promote(id);
        }
    }

    pub(super) fn promote(&mut self, id: ReplicaId) {
        let generation = self.generation;
        self.replica_mut(id).link = Link::Promoting { since: self.now };
        self.send(ReplicaSet::only(id), Request::Promote { generation }, bytes::Bytes::new());
    }

    pub(super) fn on_promoted(&mut self, id: ReplicaId, generation: Generation, last_active: Generation) {
        if !matches!(self.replica(id).link, Link::Promoting { .. }) || generation != self.generation {
            self.leave(id, format!("it took generation {generation} in force, which nobody asked for"));
            return;
        }
        let now = self.now;
        let replica = self.replica_mut(id);
        replica.start_pings(now);
        if let Some(welcome) = &mut replica.welcome {
            welcome.last_active = last_active;
        }
        if self.activation_takes(id) {
            self.replica_mut(id).link = Link::Up(Role::Activating);
            self.check_activation();
        } else {
            self.start_catch_up(id);
        }
    }

    /// Removes a job that is settled and owed by nobody.
    pub(super) fn retire(&mut self, id: JobId) {
        if self.jobs.get(id).is_none_or(|job| !job.settled || !job.owed.is_empty()) {
            return;
        }
        let Some(job) = self.jobs.remove(id) else { return };
        self.end_trace(job.trace);
        if let Owner::Guest { req, .. } = job.owner
            && job.is_write()
        {
            let version = Version::new(self.generation, id.0);
            self.requests.keep(req, Kept { version, op: job.op, payload: job.payload });
        }
    }
}
