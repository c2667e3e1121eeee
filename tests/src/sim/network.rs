//! Connections: in order, some time later; cut, stalled or partitioned.

use bytes::Bytes;
use newel_downstairs::core as down;
use newel_downstairs::core::api::ConnId;
use newel_protocol::Generation;
use newel_protocol::wire::{Reply, Request as WireRequest};
use newel_upstairs::core as up;
use newel_upstairs::core::api::{LinkId, ReplicaId};

use super::world::{Conn, Ev, World, brief_op, id};

impl World {
    pub(super) fn connect(&mut self, up: usize, replica: ReplicaId, link: LinkId) {
        let slot = replica.index();
        let down = self.ups[up].addresses[slot];
        let delay = self.between(self.plan.network);
        if self.downs[down].process.is_none() {
            self.after(delay, Ev::LinkRefused { up, replica: slot, link });
            return;
        }
        let conn = self.conns.len();
        let incarnation = self.downs[down].incarnation;
        self.conns.push(Conn {
            generation: Generation(0),
            zombie: false,
            up,
            slot,
            down,
            incarnation,
            link,
            open_up: true,
            open_down: true,
            earliest: [0; 2],
            partitioned: None,
        });
        self.ups[up].links[slot] = Some(conn);
        self.after(delay, Ev::LinkUp { conn });
    }

    pub(super) fn link_up(&mut self, conn: usize) -> Result<(), String> {
        let Conn { up, slot, down, incarnation, link, open_up, open_down, .. } = self.conns[conn];
        if !open_up {
            return Ok(());
        }
        if !open_down || self.downs[down].incarnation != incarnation {
            self.deliver(conn, 1, Ev::ClosedAtUp { conn });
            return Ok(());
        }
        // A stopped process has connections that it hasn't accepted: the kernel does that part.
        let connected = down::api::Event::Connected { conn: ConnId(conn as u64) };
        if self.downs[down].paused {
            // It learns of the connection with the first message.
            self.conns[conn].earliest[0] = self.now;
        }
        self.feed_down(down, incarnation, connected);
        self.feed_up(up, up::api::Event::LinkUp { replica: id(slot), link })
    }

    /// Sends over a connection: in order, some time later.
    pub(super) fn deliver(&mut self, conn: usize, direction: usize, event: Ev) {
        let delay = self.between(self.plan.network);
        let time = (self.now + delay).max(self.conns[conn].earliest[direction]);
        if let Some(held) = &mut self.conns[conn].partitioned {
            held[direction].push(event);
            return;
        }
        self.conns[conn].earliest[direction] = time;
        self.at(time, event);
    }

    pub(super) fn heal(&mut self, conn: usize) {
        if let Some(held) = self.conns[conn].partitioned.take() {
            for (direction, events) in held.into_iter().enumerate() {
                for event in events {
                    self.deliver(conn, direction, event);
                }
            }
        }
    }

    pub(super) fn reach_down(&mut self, conn: usize, request: WireRequest, payload: Bytes) {
        if let WireRequest::Job { job, op } = &request {
            let down = self.conns[conn].down;
            self.note(|| format!("to replica {down}: job {job} {}", brief_op(op)));
        }
        let Some(request) = self.plant_in_request(conn, request, &payload) else { return };
        let Conn { down, incarnation, open_down, .. } = self.conns[conn];
        if open_down {
            let event = down::api::Event::Message { conn: ConnId(conn as u64), request, payload };
            self.feed_down(down, incarnation, event);
        }
    }

    pub(super) fn reach_up(&mut self, conn: usize, reply: Reply, payload: Bytes) -> Result<(), String> {
        let Conn { up, slot, link, open_up, .. } = self.conns[conn];
        let Some(reply) = self.plant_on_arrival(conn, reply)? else { return Ok(()) };
        if open_up {
            self.feed_up(up, up::api::Event::Reply { replica: id(slot), link, reply, payload })?;
        }
        Ok(())
    }

    pub(super) fn closed_at_up(&mut self, conn: usize) -> Result<(), String> {
        let Conn { up, slot, link, open_up, .. } = self.conns[conn];
        if open_up {
            self.conns[conn].open_up = false;
            if self.ups[up].links[slot] == Some(conn) {
                self.ups[up].links[slot] = None;
            }
            let reason = "connection closed".to_owned();
            self.feed_up(up, up::api::Event::LinkDown { replica: id(slot), link, reason })?;
        }
        Ok(())
    }

    pub(super) fn closed_at_down(&mut self, conn: usize) {
        let Conn { down, incarnation, open_down, .. } = self.conns[conn];
        if open_down {
            self.conns[conn].open_down = false;
            self.feed_down(down, incarnation, down::api::Event::Closed { conn: ConnId(conn as u64) });
        }
    }
}
