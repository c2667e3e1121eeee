//! What stands between a lane and its engine: how much may be in flight, and what came of submitting it.
//!
//! Invariants:
//! - No more is in flight than the limit says, so that the kernel seldom has to hold the lane's thread; but one request always may be,
//!   however large.
//! - A thread that found no room is nudged by the next completion.
//! - Once the engine is broken everything comes back as refused.
//!
//! Left to others: requests and what becomes of them (the lanes).

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::limit::Limit;
use super::probes::{self, Jobs};
use super::submit_times::{SubmitTimes, SubmitTimesByLane};
use crate::disk::device::DeviceQueue;
use crate::disk::engine::{Completion, Engine, Request};
use crate::disk::lock;

pub(super) struct Gate<T> {
    engine: Box<dyn Engine<T>>,
    /// Of the lane's thread.
    submitting: Mutex<Submitting>,
    /// In flight, in places of the device's queue.
    places: AtomicUsize,
    place_bytes: usize,
    /// The lane's thread waits for room.
    waiting: AtomicBool,
    broken: AtomicBool,
    times: Arc<SubmitTimesByLane>,
    of_lane: fn(&SubmitTimesByLane) -> &SubmitTimes,
}

struct Submitting {
    limit: Limit,
    batch: probes::Batch,
}

impl<T: Jobs> Gate<T> {
    pub(super) fn new(
        engine: Box<dyn Engine<T>>,
        depth: usize,
        device: &DeviceQueue,
        times: &Arc<SubmitTimesByLane>,
        of_lane: fn(&SubmitTimesByLane) -> &SubmitTimes,
    ) -> Self {
        Self {
            engine,
            submitting: Mutex::new(Submitting {
                limit: Limit::new(device.requests, depth),
                batch: probes::Batch::default(),
            }),
            places: AtomicUsize::new(0),
            place_bytes: device.largest_bytes.unwrap_or(usize::MAX).max(1),
            waiting: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            times: Arc::clone(times),
            of_lane,
        }
    }

    pub(super) fn survives_us(&self) -> bool {
        self.engine.survives_us()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.engine.in_flight() == 0 || self.broken.load(Ordering::Acquire)
    }

    /// Submits from the front what there is room for and says how many went. None at all means that the thread has to wait until it
    /// is nudged.
    pub(super) fn submit(
        &self,
        requests: &mut VecDeque<Request<T>>,
        refused: &mut Vec<Completion<T>>,
    ) -> usize {
        if self.broken.load(Ordering::Acquire) {
            return refuse_all(requests, refused);
        }
        let submitted = self.try_submit(requests, refused);
        if submitted > 0 {
            return submitted;
        }
        // Whoever makes room from here on sees this; who did so before is seen by the second look.
        self.waiting.store(true, Ordering::SeqCst);
        let submitted = self.try_submit(requests, refused);
        if submitted > 0 {
            self.waiting.store(false, Ordering::SeqCst);
        }
        submitted
    }

    fn try_submit(&self, requests: &mut VecDeque<Request<T>>, refused: &mut Vec<Completion<T>>) -> usize {
        let in_flight = self.places.load(Ordering::SeqCst);
        let mut submitting = lock(&self.submitting);
        let Submitting { limit, batch } = &mut *submitting;
        let room = limit.room(in_flight);
        let (mut count, mut places) = (0, 0);
        for request in requests.iter() {
            let more = self.places_of(request.payload.len());
            if places + more > room && (in_flight > 0 || count > 0) {
                break;
            }
            places += more;
            count += 1;
        }
        if count == 0 {
            return 0;
        }
        self.places.fetch_add(places, Ordering::SeqCst);
        let already_refused = refused.len();
        batch.starts(requests.iter().take(count));
        let submitted = self.engine.submit(requests, count, refused);
        batch.done::<T>(submitted);
        // What came back does not take a place.
        let left = requests.iter().take(count - submitted.requests).map(|request| request.payload.len());
        let back = refused.iter().skip(already_refused).map(|refused| refused.payload.len());
        let back: usize = left.chain(back).map(|bytes| self.places_of(bytes)).sum();
        self.places.fetch_sub(back, Ordering::SeqCst);
        limit.learn(in_flight, places.saturating_sub(back), submitted.slept);
        (self.of_lane)(&self.times).record(submitted, limit.value());
        submitted.requests
    }

    fn places_of(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.place_bytes).max(1)
    }

    /// Takes the completions there are. True if the lane's thread waits for the room that they make.
    pub(super) fn poll(&self, into: &mut Vec<Completion<T>>) -> io::Result<bool> {
        self.take(into, |into| self.engine.poll(into))
    }

    /// Waits for a completion, if anything is in flight.
    pub(super) fn wait(&self, into: &mut Vec<Completion<T>>) -> io::Result<bool> {
        self.take(into, |into| self.engine.wait(into))
    }

    fn take(
        &self,
        into: &mut Vec<Completion<T>>,
        take: impl FnOnce(&mut Vec<Completion<T>>) -> io::Result<()>,
    ) -> io::Result<bool> {
        if self.places.load(Ordering::SeqCst) == 0 {
            return Ok(false);
        }
        let before = into.len();
        if let Err(error) = take(into) {
            self.broken.store(true, Ordering::Release);
            return Err(error);
        }
        probes::completed(into.iter().skip(before));
        let made = into.iter().skip(before).map(|done| self.places_of(done.payload.len())).sum();
        self.places.fetch_sub(made, Ordering::SeqCst);
        Ok(made > 0 && self.waiting.swap(false, Ordering::SeqCst))
    }
}

#[expect(clippy::disallowed_methods, reason = "stage times are measured where the work is done")]
fn refuse_all<T>(requests: &mut VecDeque<Request<T>>, refused: &mut Vec<Completion<T>>) -> usize {
    let submitted = Instant::now();
    let count = requests.len();
    refused.extend(requests.drain(..).map(|Request { payload, user, .. }| {
        let result = Err(io::Error::other("the engine is broken"));
        Completion { payload, user, result, submitted }
    }));
    count
}
