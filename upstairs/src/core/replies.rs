//! From replica replies to acknowledgements: quorum, valid reads, holding.
//!
//! Invariants:
//! - A change counts for a quorum by replicas that are Active now, or were when they replied.
//! - Every block of an answer matched the checksum in its state.
//! - An answer waits until no version it shows is unacknowledged.

use bytes::Bytes;
use newel_protocol::wire::{JobError, Op, ReadMode, Reply, StageTimes};
use newel_protocol::{BlockKind, BlockRange, BlockState, JobId, crc};

use super::api::{GuestError, LinkId, LogLevel, ReplicaId};
use super::jobs::{AnswerBlocks, HeldAnswer, Owner, PartialAnswer, Purpose};
use super::resync::split_data;
use super::throttle::Sample;
use super::timeline::What;
use super::{Core, QUORUM};

impl Core {
    pub(super) fn on_reply(&mut self, id: ReplicaId, link: LinkId, reply: Reply, payload: Bytes) {
        let now = self.now;
        let replica = self.replica_mut(id);
        if replica.link_id != link || replica.is_down() {
            return;
        }
        replica.last_heard = now;
        match reply {
            Reply::Done { job, result, times, states } => {
                self.on_done(id, job, (result, times), states, payload);
            }
            Reply::Pong { nonce, health } => replica.pong(now, nonce, health),
            Reply::Welcome(welcome) => self.on_welcome(id, welcome),
            Reply::Refused(refusal) => self.on_refused(id, &refusal),
            Reply::Promoted { generation, last_active, .. } => self.on_promoted(id, generation, last_active),
            Reply::ActivatedStored { generation } => self.on_activated_stored(id, generation),
            Reply::Digests { query, first, digests } => {
                self.with_query(query, |resync| resync.on_digests(id, first, &digests));
            }
            Reply::Contexts { query, extent, states } => {
                self.with_query(query, |resync| resync.on_contexts(id, extent, states));
            }
            Reply::Leaving { reason } => self.leave(id, reason),
            Reply::Faults { faults } => self.on_faults(id, faults),
        }
    }

    fn on_faults(&mut self, id: ReplicaId, faults: String) {
        let on = !faults.is_empty();
        let text = if on {
            format!("replica {id} has faults put in on purpose: {faults}")
        } else {
            format!("replica {id} has no faults put in any more")
        };
        self.replica_mut(id).faults = on.then_some(faults);
        self.log(LogLevel::Warn, text);
    }

    fn on_done(
        &mut self,
        id: ReplicaId,
        job_id: JobId,
        (result, times): (Result<(), JobError>, StageTimes),
        states: Vec<BlockState>,
        payload: Bytes,
    ) {
        let now = self.now;
        let Some(job) = self.jobs.get_mut(job_id).filter(|job| job.owed.contains(id)) else {
            self.leave(id, format!("it answered job {job_id}, which it does not owe"));
            return;
        };
        job.owed.remove(id);
        let sent = job.sent[id.index()];
        let (cost, took) = (job.cost, now.since(sent));
        let (is_read, owner, slot) = (job.is_read(), job.owner, job.trace);
        let gave_data = job.readers.contains(id);
        let (done, data) = job.work_at(id);
        let cancelled = job.is_guest_read() && result == Err(JobError::Cancelled);
        if !cancelled {
            job.replied[id.index()] = Some(now);
        }
        let unasked = cancelled && !job.settled;
        let replica = &mut self.replicas[id.index()];
        replica.paid(cost);
        if gave_data {
            replica.reading = replica.reading.saturating_sub(cost);
            self.throttle.replied(now, sent, id, cost);
        }
        if unasked {
            self.leave(id, format!("it dropped job {job_id}, which was not cancelled"));
            return;
        }
        if cancelled {
            self.trace.cancelled(slot, now, id);
            self.retire(job_id);
            return;
        }
        let active = replica.is_active();
        self.trace.replied(slot, now, id, times, active);
        if result.is_err() {
            self.trace.mark(slot, now, What::Failed, id);
        }
        if active && !matches!(owner, Owner::Internal(_)) {
            replica.times.record(now, took);
            replica.work.record(done, data, took);
        }
        match (result, owner) {
            (Err(error), Owner::Internal(_)) if !is_read => {
                self.leave(id, error.to_string());
            }
            (Ok(()), Owner::Internal(purpose)) => self.internal_done(id, job_id, purpose, &states, &payload),
            (Err(_), Owner::Internal(purpose)) => self.internal_done(id, job_id, purpose, &[], &Bytes::new()),
            (Err(error), _) if !is_read => {
                self.leave(id, error.to_string());
            }
            (Ok(()), _) if !is_read => {
                if let Some(job) = self.jobs.get_mut(job_id) {
                    job.done.insert(id);
                    if active {
                        job.counted.insert(id);
                    }
                }
                self.settle_if_acknowledged(job_id);
            }
            (result, _) => {
                if gave_data && result.is_ok() {
                    self.witness.took(id, cost, took);
                }
                self.on_read_reply(id, job_id, result.is_ok(), states, payload);
                self.ask_another(job_id);
            }
        }
        self.record_leads(job_id);
        self.retire(job_id);
    }

    /// Once all Active replicas have answered a guest's job: who was how much earlier than the slowest.
    fn record_leads(&mut self, job_id: JobId) {
        let active = self.active();
        let Some(job) = self.jobs.get(job_id) else { return };
        if job.is_internal() || active.len() < QUORUM || !job.owed.and(active).is_empty() {
            return;
        }
        let (now, replied, sent) = (self.now, job.replied, job.sent);
        let whole = job.is_read()
            && job.readers == active
            && job.read.as_ref().is_none_or(|read| read.failed.is_empty());
        if active.iter().any(|id| replied[id.index()].is_none()) {
            return;
        }
        let slowest = active.iter().filter_map(|id| replied[id.index()]).max().unwrap_or_default();
        for id in active.iter() {
            if let Some(at) = replied[id.index()] {
                self.replica_mut(id).times.record_lead(now, slowest.since(at));
            }
        }
        if whole {
            let sample = |id: ReplicaId| {
                Some(Sample { replica: id, sent: sent[id.index()], replied: replied[id.index()]? })
            };
            self.throttle.sample(self.now, active.iter().filter_map(sample));
        }
    }

    /// Settles a change that a quorum has executed.
    pub(super) fn settle_if_acknowledged(&mut self, job_id: JobId) {
        let active = self.active();
        let Some(job) = self.jobs.get(job_id) else { return };
        if job.settled || job.is_read() || job.is_internal() {
            return;
        }
        let counts = ReplicaId::ALL
            .into_iter()
            .filter(|&id| job.counted.contains(id) || (job.done.contains(id) && active.contains(id)))
            .count();
        if counts >= self.config.min_replicas && self.is_serving() {
            self.settle(job_id, Ok(None));
        }
    }

    /// A guest job has its result. It stays in the table while replicas owe replies for it.
    pub(super) fn settle(&mut self, job_id: JobId, result: Result<Option<AnswerBlocks>, GuestError>) {
        let Some(job) = self.jobs.get_mut(job_id).filter(|job| !job.settled) else { return };
        job.settled = true;
        self.open_jobs -= 1;
        self.open_bytes -= job.cost;
        self.trace.settled(job.trace, self.now, result.is_err());
        let owner = job.owner;
        let was_write = job.is_write();
        let (is_read, owed) = (job.is_guest_read(), job.owed);
        if was_write && !self.held_reads.is_empty() {
            self.release_held(job_id);
        }
        let answered = result.is_ok();
        if let Owner::Guest { req, piece } = owner {
            self.piece_settled(req, piece, result);
        }
        if is_read {
            self.read_settled(job_id, answered, owed);
        }
        self.retire(job_id);
        self.admit_waiting();
    }

    fn on_read_reply(
        &mut self,
        id: ReplicaId,
        job_id: JobId,
        ok: bool,
        states: Vec<BlockState>,
        payload: Bytes,
    ) {
        let Some(job) = self.jobs.get(job_id) else { return };
        let Op::Read { range, mut mode } = job.op else { return };
        if mode == ReadMode::Data && !job.readers.contains(id) {
            mode = ReadMode::Contexts;
        }
        let is_witness = job.is_witness(id);
        let answered = job.settled || job.read.as_ref().is_none_or(|read| read.answer.is_some());
        if ok && states.len() != range.count as usize {
            self.leave(id, format!("it answered a read of {} blocks with {}", range.count, states.len()));
            return;
        }
        // A late answer is of no use to the guest, but a bad copy is found all the same.
        if ok && let Some(data) = check_whole(&states, &payload, mode) {
            if !answered && !is_witness {
                self.answer(job_id, AnswerBlocks { states, data });
            }
            return;
        }
        if ok {
            self.trace.mark(job.trace, self.now, What::BadCopy, id);
        }
        let partial = PartialAnswer { replica: id, ..sort_out(states, &payload, ok, range, mode) };
        self.note_bad_copy(id, range, &partial);
        if answered || is_witness {
            return;
        }
        let Some(read) = self.jobs.get_mut(job_id).and_then(|job| job.read.as_mut()) else { return };
        read.failed.insert(id);
        read.partial.retain(|other| other.replica != id);
        read.partial.push(partial);
        if let Some(answer) = combine(&read.partial, range) {
            self.answer(job_id, answer);
        } else {
            self.resend_reads();
            self.fail_read_if_hopeless(job_id);
        }
    }

    fn note_bad_copy(&mut self, id: ReplicaId, range: BlockRange, partial: &PartialAnswer) {
        let bad: Vec<u64> =
            range.blocks().zip(&partial.blocks).filter(|(_, d)| d.is_none()).map(|(b, _)| b).collect();
        let (first, count) = (bad.first().copied().unwrap_or(range.start), bad.len());
        self.log(
            LogLevel::Warn,
            format!("replica {id} has no good copy of block {first} ({count} of {range})"),
        );
        for block in bad {
            self.start_heal(id, block);
        }
    }

    /// EIO once every Active replica has failed the read.
    pub(super) fn fail_read_if_hopeless(&mut self, job_id: JobId) {
        let active = self.active();
        let Some(job) = self.jobs.get(job_id) else { return };
        let Some(read) = &job.read else { return };
        let hopeless = self.is_serving()
            && !job.settled
            && job.owed.is_empty()
            && read.answer.is_none()
            && !active.is_empty()
            && active.without(read.failed).is_empty();
        if hopeless {
            let blocks = if let Op::Read { range, .. } = &job.op { range.to_string() } else { String::new() };
            self.log(
                LogLevel::Error,
                format!("no replica has a good copy of all blocks {blocks}: answering EIO"),
            );
            self.settle(job_id, Err(GuestError::Io));
        }
    }

    /// A complete, checked answer: give it out, or hold it for the versions it shows.
    fn answer(&mut self, job_id: JobId, blocks: AnswerBlocks) {
        if let Some(job) = self.jobs.get(job_id) {
            self.trace.answered(job.trace);
        }
        let waits_for = self.unacknowledged_in(&blocks.states);
        if waits_for.is_empty() {
            self.settle(job_id, Ok(Some(blocks)));
            return;
        }
        if let Some(read) = self.jobs.get_mut(job_id).and_then(|job| job.read.as_mut()) {
            read.answer = Some(HeldAnswer { blocks, waits_for });
            read.partial.clear();
            self.held_reads.push(job_id);
        }
    }

    fn unacknowledged_in(&self, states: &[BlockState]) -> Vec<JobId> {
        let mut waits_for: Vec<JobId> = Vec::new();
        for state in states {
            let id = JobId(state.version.sequence);
            let current = state.version.generation == self.generation;
            if current && waits_for.last() != Some(&id) && self.jobs.is_unacknowledged(id) {
                waits_for.push(id);
            }
        }
        waits_for
    }

    fn release_held(&mut self, acknowledged: JobId) {
        let mut ready = Vec::new();
        let jobs = &mut self.jobs;
        self.held_reads.retain(|&id| {
            let Some(answer) = jobs.get_mut(id).and_then(|job| job.read.as_mut()?.answer.as_mut()) else {
                return false;
            };
            answer.waits_for.retain(|&waits| waits != acknowledged);
            if answer.waits_for.is_empty() {
                ready.push(id);
            }
            !answer.waits_for.is_empty()
        });
        for id in ready {
            let answer = self.jobs.get_mut(id).and_then(|job| job.read.as_mut()?.answer.take());
            if let Some(answer) = answer {
                self.settle(id, Ok(Some(answer.blocks)));
            }
        }
    }

    fn internal_done(
        &mut self,
        id: ReplicaId,
        job_id: JobId,
        purpose: Purpose,
        states: &[BlockState],
        payload: &Bytes,
    ) {
        if let Some(job) = self.jobs.get_mut(job_id) {
            job.settled = job.owed.is_empty();
        }
        match purpose {
            Purpose::ResyncRead { subject, epoch, extent, copy } => {
                self.with_resync(subject, epoch, |resync| resync.on_read(extent, copy, states, payload));
            }
            Purpose::ResyncStore { subject, epoch, extent } => {
                self.with_resync(subject, epoch, |resync| resync.on_stored(extent));
            }
            Purpose::ResyncFlush { subject, epoch } => self.on_resync_flushed(id, subject, epoch),
            Purpose::HealRead { target, block, tried } => {
                self.heal_with(target, block, tried, states, payload)
            }
            Purpose::HealStore { target, block } => self.heal_ended(target, block, true),
            Purpose::ScrubRead { look } => self.on_scrub_read(id, look, states),
        }
    }

    /// An internal job went with its replica's link.
    pub(super) fn internal_lost(&mut self, purpose: Purpose) {
        match purpose {
            Purpose::HealStore { target, block } => self.heal_ended(target, block, false),
            Purpose::HealRead { target, block, tried } => self.heal_from_next(target, block, tried),
            // What it belongs to is given up or begun again by its owner. A copy that can't be asked for is not a bad
            // copy: taking it for one would declare lost what is only away.
            Purpose::ResyncRead { .. }
            | Purpose::ResyncStore { .. }
            | Purpose::ResyncFlush { .. }
            | Purpose::ScrubRead { .. } => {}
        }
    }
}

/// The answer's data if every block is good: the payload as it is, one piece.
fn check_whole(states: &[BlockState], payload: &Bytes, mode: ReadMode) -> Option<Vec<Bytes>> {
    if mode == ReadMode::Contexts {
        return states.iter().all(BlockState::is_verified).then(Vec::new);
    }
    let mut at = 0;
    for state in states {
        match state.kind {
            BlockKind::Zero => {}
            BlockKind::Data => {
                let block = payload.get(at..at + newel_protocol::BLOCK_BYTES)?;
                if crc::crc(block) != state.crc {
                    return None;
                }
                at += newel_protocol::BLOCK_BYTES;
            }
            BlockKind::Unverified | BlockKind::Unreadable => return None,
        }
    }
    (at == payload.len()).then(|| if payload.is_empty() { Vec::new() } else { vec![payload.clone()] })
}

/// Sorts an answer with bad blocks into good and bad ones.
fn sort_out(
    states: Vec<BlockState>,
    payload: &Bytes,
    ok: bool,
    range: BlockRange,
    mode: ReadMode,
) -> PartialAnswer {
    let none = || PartialAnswer {
        replica: ReplicaId(0),
        states: Vec::new(),
        blocks: vec![None; range.count as usize],
    };
    if !ok {
        return none();
    }
    if mode == ReadMode::Contexts {
        let blocks = states.iter().map(|state| state.is_verified().then(Bytes::new)).collect();
        return PartialAnswer { replica: ReplicaId(0), states, blocks };
    }
    let Some(split) = split_data(&states, payload, false) else { return none() };
    let blocks = split
        .into_iter()
        .map(|(state, data)| match state.kind {
            BlockKind::Zero => Some(Bytes::new()),
            BlockKind::Data => (crc::crc(&data) == state.crc).then_some(data),
            BlockKind::Unverified | BlockKind::Unreadable => None,
        })
        .collect();
    PartialAnswer { replica: ReplicaId(0), states, blocks }
}

/// A whole answer out of the good blocks of several, if together they have all.
fn combine(partials: &[PartialAnswer], range: BlockRange) -> Option<AnswerBlocks> {
    let mut states = Vec::with_capacity(range.count as usize);
    let mut data = Vec::new();
    for index in 0..range.count as usize {
        let good = partials.iter().find(|partial| partial.blocks.get(index).is_some_and(Option::is_some))?;
        let block = good.blocks.get(index)?.clone()?;
        states.push(*good.states.get(index)?);
        if !block.is_empty() {
            data.push(block);
        }
    }
    Some(AnswerBlocks { states, data })
}
