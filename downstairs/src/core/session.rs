//! Who may speak: connections, greetings, fencing and leave-taking.
//!
//! Invariants:
//! - A greeting changes nothing for the session in force; only a promotion that is let in ends it.
//! - A session of another upstairs that is alive is ended only by a takeover, and never by a lower generation.
//! - Whoever breaks the protocol is told why and closed; nobody else notices.
//! - What arrives on a connection that the core has closed is ignored.
//!
//! What follows once a promotion is let in is left to `promotion.rs`.

use bytes::Bytes;
use newel_protocol::Generation;
use newel_protocol::wire::{Hello, Membership, Refusal, Reply, Request, VERSION, Welcome};
use uuid::Uuid;

use super::Core;
use super::api::{Action, ConnId, LogEvent, RegionFacts, Time};
use super::promotion::Promotion;

/// An open connection.
#[derive(Debug)]
pub(super) struct Conn {
    id: ConnId,
    /// When something was heard last, or when it was accepted.
    heard: Time,
    hello: Option<Hello>,
    /// What its greeting was answered with.
    told: Membership,
}

/// The session in force.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) conn: ConnId,
    pub(super) upstairs: Uuid,
    /// `Hello::session`.
    pub(super) number: u64,
    pub(super) generation: Generation,
    pub(super) heard: Time,
}

/// Whoever holds the replica or is about to.
struct Holder {
    conn: ConnId,
    upstairs: Uuid,
    number: u64,
    generation: Generation,
    heard: Time,
}

impl Core {
    pub(super) fn connected(&mut self, conn: ConnId) {
        if self.conns.len() >= self.config.connections_max {
            let limit = u32::try_from(self.config.connections_max).unwrap_or(u32::MAX);
            // Those that never said anything go first; accepted ones stand in order of age.
            let victim = self
                .conns
                .iter()
                .filter(|conn| !self.holds(conn.id))
                .min_by_key(|conn| conn.hello.is_some())
                .map_or(conn, |oldest| oldest.id);
            self.refuse(victim, Refusal::TooManyConnections { limit });
            if victim == conn {
                return;
            }
        }
        self.conns.push(Conn { id: conn, heard: self.now, hello: None, told: Membership::default() });
    }

    pub(super) fn closed(&mut self, conn: ConnId) {
        self.forget(conn, "the connection was closed");
    }

    pub(super) fn message(&mut self, conn: ConnId, request: Request, payload: Bytes) {
        if let Some(session) = &mut self.session
            && session.conn == conn
        {
            session.heard = self.now;
            return self.session_message(conn, request, payload);
        }
        let Some(known) = self.conns.iter_mut().find(|known| known.id == conn) else { return };
        known.heard = self.now;
        let greeted = known.hello.is_some();
        let promoting = self.promotion.as_ref().is_some_and(|promotion| promotion.conn == conn);
        match request {
            _ if !payload.is_empty() => self.violation(conn, "a payload where none belongs"),
            Request::Hello(hello) if !greeted => self.hello(conn, hello),
            Request::Hello(_) => self.violation(conn, "a second Hello"),
            Request::Ping { nonce } if greeted => self.actions.push_back(Action::Pong { conn, nonce }),
            Request::Promote { generation } if greeted && !promoting => self.promote(conn, generation),
            Request::Promote { .. } if promoting => self.violation(conn, "a second Promote"),
            Request::Promote { .. } | Request::Ping { .. } => self.violation(conn, "a request before Hello"),
            Request::Activated { .. }
            | Request::Job { .. }
            | Request::Cancel { .. }
            | Request::Digests { .. }
            | Request::Contexts { .. } => self.violation(conn, "a request before Promoted"),
        }
    }

    /// A message of the session in force.
    fn session_message(&mut self, conn: ConnId, request: Request, payload: Bytes) {
        match request {
            Request::Job { job, op } => self.job(job, op, payload),
            _ if !payload.is_empty() => self.violation(conn, "a payload where none belongs"),
            Request::Cancel { job } => self.cancel(job),
            Request::Ping { nonce } => self.actions.push_back(Action::Pong { conn, nonce }),
            Request::Activated { generation, membership } => self.activated(generation, membership),
            Request::Digests { query, first, count } => self.query_digests(query, first, count),
            Request::Contexts { query, extent } => self.query_contexts(query, extent),
            Request::Hello(_) => self.violation(conn, "a second Hello"),
            Request::Promote { .. } => self.violation(conn, "a second Promote"),
        }
    }

    fn hello(&mut self, conn: ConnId, hello: Hello) {
        if let Some(reason) = &self.failed {
            let refusal = Refusal::Failed { reason: reason.clone() };
            return self.refuse(conn, refusal);
        }
        if self.stopping {
            return self.refuse(conn, Refusal::ShuttingDown);
        }
        if !(hello.min_version..=hello.max_version).contains(&VERSION) {
            let refusal = Refusal::Version { theirs: hello.max_version, min: VERSION, max: VERSION };
            return self.refuse(conn, refusal);
        }
        if hello.volume.is_nil() || hello.upstairs.is_nil() {
            return self.violation(conn, "a Hello with a nil volume or upstairs");
        }
        if let Some(refusal) = self.other_volume(hello.volume) {
            return self.refuse(conn, refusal);
        }
        if let Some(known) = self.conns.iter_mut().find(|known| known.id == conn) {
            known.hello = Some(hello);
            known.told = self.facts.membership;
        }
        let facts = &self.facts;
        let welcome = Welcome {
            version: VERSION,
            region: facts.region,
            volume: facts.volume,
            blocks: facts.blocks,
            promised: facts.promised,
            last_active: facts.last_active,
            membership: facts.membership,
            lost_power: facts.lost_power,
        };
        self.send(conn, Reply::Welcome(welcome));
    }

    fn promote(&mut self, conn: ConnId, generation: Generation) {
        let Some(known) = self.conns.iter().find(|known| known.id == conn) else { return };
        let told = known.told;
        let Some(hello) = known.hello.clone() else { return };
        if let Some(refusal) = self.why_not(&hello, generation) {
            return self.refuse(conn, refusal);
        }
        if let Some(holder) = self.holder() {
            if holder.upstairs == hello.upstairs {
                // Not "fenced": that would tell an upstairs to stop for the sake of itself.
                self.leave(holder.conn, "a newer connection of the same upstairs replaces this one");
            } else {
                self.refuse(holder.conn, Refusal::Fenced { by: hello.upstairs, generation });
            }
        }
        self.promotion = Some(Promotion::new(conn, &hello, told, generation, self.now));
    }

    /// Why this upstairs may not be promoted, if it may not.
    fn why_not(&self, hello: &Hello, generation: Generation) -> Option<Refusal> {
        if let Some(refusal) = self.other_volume(hello.volume) {
            return Some(refusal);
        }
        let holder = self.holder();
        // A promotion under way may be durable already.
        let (promised, to) = match &holder {
            Some(holder) if holder.generation >= self.facts.promised => (holder.generation, holder.upstairs),
            _ => (self.facts.promised, self.facts.promised_to),
        };
        let stale = Refusal::StaleGeneration { offered: generation, promised };
        if generation < promised || (generation == promised && hello.upstairs != to) {
            return Some(stale);
        }
        let holder = holder?;
        if holder.upstairs == hello.upstairs {
            // The older of two connections of one upstairs was merely late.
            return (hello.session < holder.number).then_some(stale);
        }
        let alive = self.now < holder.heard.after(self.config.session_silence);
        (alive && !hello.takeover)
            .then_some(Refusal::InUse { by: holder.upstairs, generation: holder.generation })
    }

    pub(super) fn other_volume(&self, volume: Uuid) -> Option<Refusal> {
        let RegionFacts { region, volume: ours, .. } = self.facts;
        (!ours.is_nil() && ours != volume).then_some(Refusal::OtherVolume { region, volume: ours })
    }

    fn holder(&self) -> Option<Holder> {
        let session = self.session.as_ref().map(|s| Holder {
            conn: s.conn,
            upstairs: s.upstairs,
            number: s.number,
            generation: s.generation,
            heard: s.heard,
        });
        session.or_else(|| {
            let promotion = self.promotion.as_ref()?;
            let heard = self.conns.iter().find(|conn| conn.id == promotion.conn).map(|conn| conn.heard);
            Some(Holder {
                conn: promotion.conn,
                upstairs: promotion.upstairs,
                number: promotion.number,
                generation: promotion.generation,
                heard: heard.unwrap_or_default(),
            })
        })
    }

    fn holds(&self, conn: ConnId) -> bool {
        self.session.as_ref().is_some_and(|session| session.conn == conn)
            || self.promotion.as_ref().is_some_and(|promotion| promotion.conn == conn)
    }

    /// When the next connection without promotion has been silent for too long.
    pub(super) fn silence_deadline(&self) -> Option<Time> {
        let unpromoted = self.conns.iter().filter(|conn| !self.holds(conn.id));
        unpromoted.map(|conn| conn.heard.after(self.config.unpromoted_silence)).min()
    }

    pub(super) fn drop_silent(&mut self) {
        let silence = self.config.unpromoted_silence;
        while let Some(conn) = self
            .conns
            .iter()
            .find(|conn| self.now >= conn.heard.after(silence) && !self.holds(conn.id))
            .map(|conn| conn.id)
        {
            let reason = format!("nothing was heard for {} s and it was never promoted", silence.as_secs());
            self.leave(conn, &reason);
        }
    }

    pub(super) fn shut_down(&mut self) {
        if std::mem::replace(&mut self.stopping, true) {
            return;
        }
        self.leave_all("the replica is shutting down");
    }

    pub(super) fn leave_all(&mut self, reason: &str) {
        while let Some(conn) = self.conns.first().map(|conn| conn.id) {
            self.leave(conn, reason);
        }
    }

    pub(super) fn violation(&mut self, conn: ConnId, what: impl Into<String>) {
        self.refuse(conn, Refusal::Violation { what: what.into() });
    }

    /// Refuses a connection, for which this is the end.
    pub(super) fn refuse(&mut self, conn: ConnId, refusal: Refusal) {
        let reason = refusal.to_string();
        self.send(conn, Reply::Refused(refusal));
        self.log(LogEvent::Refused { conn, reason: reason.clone() });
        self.close(conn, reason);
    }

    /// Gives up a connection by our own doing.
    pub(super) fn leave(&mut self, conn: ConnId, reason: &str) {
        self.send(conn, Reply::Leaving { reason: reason.to_owned() });
        self.close(conn, reason.to_owned());
    }

    fn close(&mut self, conn: ConnId, reason: String) {
        self.forget(conn, &reason);
        self.actions.push_back(Action::Close { conn, reason });
    }

    /// Ends whatever this connection had.
    fn forget(&mut self, conn: ConnId, reason: &str) {
        self.conns.retain(|known| known.id != conn);
        if self.promotion.as_ref().is_some_and(|promotion| promotion.conn == conn) {
            self.promotion = None;
        }
        if self.session.as_ref().is_some_and(|session| session.conn == conn) {
            self.session = None;
            self.drop_session_jobs();
            self.log(LogEvent::SessionEnded { conn, reason: reason.to_owned() });
        }
    }

    pub(super) fn send(&mut self, conn: ConnId, reply: Reply) {
        self.send_with(conn, reply, Bytes::new());
    }

    pub(super) fn send_with(&mut self, conn: ConnId, reply: Reply, payload: Bytes) {
        self.actions.push_back(Action::Send { conn, reply, payload });
    }

    pub(super) fn log(&mut self, event: LogEvent) {
        self.actions.push_back(Action::Log(event));
    }
}
