//! Between guests and the upstairs that serves.

use newel_upstairs::core as up;
use newel_upstairs::core::api::GuestId;
use rand::RngExt as _;

use super::guest::{Answered, Request};
use super::world::{Ev, World, brief};

impl World {
    pub(super) fn serving_up(&self) -> Option<usize> {
        (0..self.ups.len()).rev().find(|&up| self.ups[up].serves())
    }

    pub(super) fn think(&mut self, connection: usize) -> Result<(), String> {
        if self.quiet {
            return Ok(());
        }
        let request = Request::random(self.next_request, self.now, &mut self.rng);
        self.next_request += 1;
        self.issue(connection, request)
    }

    pub(super) fn issue(&mut self, connection: usize, request: Request) -> Result<(), String> {
        let up = self.serving_up();
        self.guests[connection].push((request.clone(), up));
        if let Some(up) = up {
            self.submit(up, &request)?;
        }
        Ok(())
    }

    pub(super) fn submit(&mut self, up: usize, request: &Request) -> Result<(), String> {
        // Every attempt is an operation of its own: one that was not answered may have taken effect.
        request.note_start(up, &mut self.history);
        self.note(|| format!("guest to upstairs {up}: {request:?}"));
        let (guest, received) = (GuestId(request.number), up::api::Time(self.now));
        self.feed_up(up, up::api::Event::Guest { guest, op: request.op(), received })
    }

    pub(super) fn guest_reply(
        &mut self,
        up: usize,
        guest: GuestId,
        reply: &up::api::GuestReply,
    ) -> Result<(), String> {
        for connection in 0..self.guests.len() {
            let found =
                self.guests[connection].iter().position(|(r, by)| r.number == guest.0 && *by == Some(up));
            let Some(index) = found else { continue };
            let request = self.guests[connection][index].0.clone();
            let answered =
                request.note_end(reply, up, self.now, self.plan.has_damage(), &mut self.history)?;
            self.note(|| format!("answer to guest: {} {}", guest.0, brief(reply)));
            match answered {
                Answered::Done => {
                    self.guests[connection].remove(index);
                    let think = self.plan.think;
                    let delay = self.rng.random_range(0..think);
                    self.after(delay, Ev::Think { connection });
                }
                Answered::Again => {
                    request.note_given_up(self.now, up, &mut self.history);
                    self.guests[connection][index].1 = None;
                }
            }
            return Ok(());
        }
        Ok(())
    }

    /// The upstairs is gone: most clients wait and send again, some are gone too.
    pub(super) fn detach_guests(&mut self, up: usize) {
        for connection in 0..self.guests.len() {
            let dies = self.rng.random_bool(self.plan.guest_dies) && !self.quiet;
            let requests = std::mem::take(&mut self.guests[connection]);
            for (request, by) in requests {
                if by == Some(up) {
                    request.note_given_up(self.now, up, &mut self.history);
                }
                if by == Some(up) && dies {
                    self.note(|| format!("guest request {} is given up", request.number));
                    let delay = self.plan.think;
                    self.after(delay, Ev::Think { connection });
                } else {
                    let by = by.filter(|&by| by != up);
                    self.guests[connection].push((request, by));
                }
            }
        }
    }

    /// A new upstairs serves: what waits for an answer is sent (again).
    pub(super) fn attach_guests(&mut self, up: usize) -> Result<(), String> {
        let mut todo = Vec::new();
        for requests in &mut self.guests {
            for (request, by) in requests.iter_mut().filter(|(_, by)| by.is_none()) {
                *by = Some(up);
                request.start = self.now;
                todo.push(request.clone());
            }
        }
        for request in todo {
            self.submit(up, &request)?;
        }
        Ok(())
    }
}
