//! Upstairs: processes, their actions, and coming into service.

use newel_upstairs::core as up;
use newel_upstairs::core::api::{ReplicaId, StopReason};
use newel_upstairs::core::config::{CoreConfig, TraceConfig};
use newel_upstairs::core::slow::SlowIo;
use newel_upstairs::core::timeline::{Record, Ticks};
use rand::RngExt as _;
use uuid::Uuid;

use super::history::Note;
use super::plan::MS;
use super::world::{Ev, Up, VOLUME, World};

impl World {
    pub(super) fn start_up(&mut self, takeover: bool) {
        let alive = self.ups.iter().filter(|up| up.alive && !up.paused).count();
        if alive > 1 || (alive > 0 && !takeover) {
            return;
        }
        let number = self.ups.len();
        let addresses = self.configured();
        let config = CoreConfig {
            volume: VOLUME,
            upstairs: Uuid::from_u128(1000 + number as u128),
            takeover,
            blocks: None,
            limits: self.plan.limits.clone(),
            timing: self.plan.timing.clone(),
            throttle: self.plan.throttle.clone(),
            reads: self.plan.reads.clone(),
            trace: TraceConfig::default(),
            heal: true,
            min_replicas: self.plan.min_replicas,
        };
        self.ups.push(Up {
            core: up::Core::new(config, up::api::Time(self.now)),
            alive: true,
            paused: false,
            deferred: Vec::new(),
            addresses,
            links: [None; 3],
            next_tick: None,
            served: false,
            stopping: false,
            generation: None,
        });
        self.note(|| format!("upstairs {number} starts{}", if takeover { " and takes over" } else { "" }));
        self.after(0, Ev::UpTick { up: number });
    }

    pub(super) fn feed_up(&mut self, up: usize, event: up::api::Event) -> Result<(), String> {
        if self.ups[up].alive {
            self.ups[up].core.handle(up::api::Time(self.now), event);
            self.pump_up(up)?;
            if self.ups[up].core.poll_deadline().is_some_and(|deadline| deadline.0 <= self.now) {
                return Err(format!("upstairs {up} asks to be called at once, for ever"));
            }
        }
        Ok(())
    }

    pub(super) fn pump_up(&mut self, index: usize) -> Result<(), String> {
        while let Some(action) = self.ups[index].core.poll_action() {
            match action {
                up::api::Action::Connect { replica, link } => self.connect(index, replica, link),
                up::api::Action::Disconnect { replica, .. } => {
                    if let Some(conn) = self.ups[index].links[replica.index()].take() {
                        self.conns[conn].open_up = false;
                        self.deliver(conn, 0, Ev::ClosedAtDown { conn });
                    }
                }
                up::api::Action::Send { replicas, request, payload } => {
                    self.plants.note_sent(index, replicas, &request);
                    for replica in replicas.iter() {
                        if let Some(conn) = self.ups[index].links[replica.index()] {
                            let event =
                                Ev::ToDown { conn, request: request.clone(), payload: payload.clone() };
                            self.deliver(conn, 0, event);
                        }
                    }
                }
                up::api::Action::GuestReply { guest, reply } => self.guest_reply(index, guest, &reply)?,
                up::api::Action::Replace { replica, answer } => self.replace_answered(index, replica, answer),
                up::api::Action::Slow(record) => self.check_slow(index, &record)?,
                up::api::Action::Log(event) => self.note(|| format!("upstairs {index}: {}", event.text)),
                up::api::Action::Stopped { reason } => self.up_stopped(index, &reason),
            }
        }
        if !self.ups[index].alive {
            return Ok(());
        }
        let generation = self.ups[index].core.serving_generation();
        if let Some(number) = generation
            && self.ups[index].generation != generation
        {
            self.ups[index].generation = generation;
            let first = !std::mem::replace(&mut self.ups[index].served, true);
            self.history.notes.push(Note::Served { at: self.now, generation: number.0, upstairs: index });
            if first {
                self.attach_guests(index)?;
            }
        }
        let deadline = self.ups[index].core.poll_deadline().map(|time| time.0);
        if let Some(deadline) = deadline
            && self.ups[index].next_tick.is_none_or(|tick| deadline < tick)
        {
            self.ups[index].next_tick = Some(deadline);
            self.at(deadline, Ev::UpTick { up: index });
        }
        Ok(())
    }

    /// What is told of a slow job must make sense, whatever happened to the job.
    fn check_slow(&mut self, index: usize, record: &Record) -> Result<(), String> {
        let (timeline, now) = (&record.timeline, record.now);
        let threshold = Ticks::of(TraceConfig::default().threshold);
        if timeline.ticks(now) < threshold {
            return Err(format!("upstairs {index} takes a young job for slow: {record:?}"));
        }
        let ways = ReplicaId::ALL.map(|id| {
            (timeline.lanes_way(now, id).whole(), timeline.lanes[id.index()].took(timeline.ticks(now)))
        });
        let guests = (timeline.guests_way(now).whole(), timeline.total(now));
        if ways.into_iter().chain([guests]).any(|(steps, whole)| steps > whole) || guests.0 != guests.1 {
            return Err(format!("upstairs {index}: the steps of a slow job do not add up: {record:?}"));
        }
        self.note(|| format!("upstairs {index}: slow: {}", SlowIo::new(record, "sim", 0).verdict.text));
        Ok(())
    }

    pub(super) fn up_stopped(&mut self, index: usize, reason: &StopReason) {
        self.note(|| format!("upstairs {index} stops: {reason:?}"));
        self.kill_up(index);
        let delay = self.rng.random_range(MS..100 * MS);
        self.after(delay, Ev::StartUp { takeover: false });
    }

    pub(super) fn kill_up(&mut self, index: usize) {
        self.ups[index].alive = false;
        self.ups[index].paused = false;
        self.ups[index].deferred.clear();
        for replica in 0..3 {
            if let Some(conn) = self.ups[index].links[replica].take() {
                self.conns[conn].open_up = false;
                self.deliver(conn, 0, Ev::ClosedAtDown { conn });
            }
        }
        self.detach_guests(index);
    }

    pub(super) fn resume_up(&mut self, index: usize) {
        if self.ups[index].alive {
            self.ups[index].paused = false;
            for event in std::mem::take(&mut self.ups[index].deferred) {
                self.at(self.now, event);
            }
        }
    }
}
