//! The pool: standing threads that carry out disk operations, so that the reactor never waits for a disk.
//!
//! Invariants:
//! - Handing operations in and taking results out never blocks on the disk; each costs one lock a lane and a wake-up only
//!   if a thread sleeps.
//! - Writes, reads, flushes and metadata have lanes of their own: a write that waits in the kernel for room in the
//!   device's queue holds up other writes only.
//! - Every operation handed in is answered exactly once, also when the pool stops.
//! - What is queued is bounded; beyond that an operation is answered with an error at once.
//!
//! Left to others: the order of operations (the core) and what each of them means (`RegionCore`).
#![expect(clippy::disallowed_methods, reason = "stage times are measured where the work is done")]

mod gate;
mod limit;
mod meta;
mod probes;
mod queue;
mod read;
mod submit_times;
mod write;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use newel_protocol::wire::StageTimes;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use self::gate::Gate;
use self::probes::Jobs;
use self::queue::{Queue, Queued};
pub use self::submit_times::{LongestSubmit, SubmitSnapshot, SubmitTimes, SubmitTimesByLane};
use super::device::DeviceQueue;
use super::engine::{Engine, EngineKind, start as start_engine};
use super::error::RegionError;
use super::file::Region;
use super::lock;
use crate::core::api::{DiskCommand, DiskDone, DiskError, DiskOp, DiskOutcome, OpId};

/// Called when results are waiting and none were before.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Where reads may come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// The device: reads and writes go past the page cache
    #[default]
    None,
    /// The page cache where it has the data, and what is read goes into it; writes go to the device all the same
    Page,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Requests in flight at the kernel, for reads and for writes each. Deeper than any single disk's queue.
    pub depth: u32,
    /// Operations waiting in one lane. The core bounds what its peers may ask for far below this.
    pub max_queued: usize,
    /// `None`: aio, or psync where there is no direct I/O.
    pub engine: Option<EngineKind>,
    /// Adjacent writes that wait together are merged up to this size.
    pub merge_max_bytes: usize,
    pub cache: CacheMode,
}

/// Larger requests are split by most devices; merging beyond this only costs memory.
const DEFAULT_MERGE_MAX_BYTES: usize = 1 << 20;

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            depth: 128,
            max_queued: 65_536,
            engine: None,
            merge_max_bytes: DEFAULT_MERGE_MAX_BYTES,
            cache: CacheMode::None,
        }
    }
}

/// Depths that make sense: one request at least, and no more than a system allows for all rings by default (65,536).
const MAX_DEPTH: u32 = 4096;

pub struct Pool {
    writes: Arc<Queue>,
    reads: Arc<Queue>,
    flushes: Arc<Queue>,
    metadata: Arc<Queue>,
    submit_times: Arc<SubmitTimesByLane>,
    sink: Arc<Sink>,
    /// Whose completions the reactor takes itself, when `completions` says that there are some.
    write_lane: Option<Arc<write::Lane>>,
    read_lane: Option<Arc<read::Lane>>,
    completions: OwnedFd,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl Pool {
    pub fn start(region: Arc<Region>, options: PoolOptions, wake: Wake) -> Result<Self, RegionError> {
        let queue = || Arc::new(Queue::new(options.max_queued));
        let eventfd = || -> io::Result<OwnedFd> {
            Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
        };
        let fail = |source| RegionError::Thread { name: "an eventfd", source };
        let completions = eventfd().map_err(fail)?;
        let mut pool = Self {
            writes: queue(),
            reads: queue(),
            flushes: queue(),
            metadata: queue(),
            submit_times: Arc::default(),
            sink: Arc::new(Sink { done: Mutex::new(Vec::new()), wake }),
            write_lane: None,
            read_lane: None,
            completions,
            threads: Vec::with_capacity(4),
        };
        let parts = Parts {
            kind: engine_for(&region, options.engine),
            depth: options.depth.clamp(1, MAX_DEPTH),
            device: region.storage().device_queue().clone(),
            completions: pool.completions.try_clone().map_err(fail)?,
            times: Arc::clone(&pool.submit_times),
            region: &region,
        };
        // Whatever was started before an error stops as the pool is dropped. The lanes whose completions the reactor takes come first.
        let gate = parts.gate(|times| &times.writes)?;
        let lane = write::Lane::new(&region, &pool.writes, &pool.sink, gate, options.merge_max_bytes);
        pool.write_lane = Some(Arc::clone(&lane));
        pool.spawn("newel-w", move || lane.run())?;
        let gate = parts.gate(|times| &times.reads)?;
        let cached = (options.cache == CacheMode::Page).then(|| parts.cached()).transpose()?;
        let lane = read::Lane::new(&region, &pool.reads, &pool.sink, gate, cached);
        pool.read_lane = Some(Arc::clone(&lane));
        pool.spawn("newel-r", move || lane.run())?;
        let (queue, sink, of) = (Arc::clone(&pool.flushes), Arc::clone(&pool.sink), Arc::clone(&region));
        pool.spawn("newel-f", move || meta::run_flushes(&of, &queue, &sink))?;
        let (queue, sink) = (Arc::clone(&pool.metadata), Arc::clone(&pool.sink));
        pool.spawn("newel-m", move || meta::run_metadata(&region, &queue, &sink))?;
        Ok(pool)
    }

    fn spawn(&mut self, name: &'static str, work: impl FnOnce() + Send + 'static) -> Result<(), RegionError> {
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(work)
            .map_err(|source| RegionError::Thread { name, source })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Takes all commands. Never blocks on the disk.
    pub fn submit(&self, commands: &mut Vec<DiskCommand>) {
        if commands.is_empty() {
            return;
        }
        let at = Instant::now();
        self.answer_at_hand(commands, at);
        let lanes = [&self.writes, &self.reads, &self.flushes, &self.metadata];
        // Mostly all belong to one lane, and then one lock is taken.
        let mut refused = Vec::new();
        for (number, queue) in lanes.into_iter().enumerate() {
            if commands.iter().any(|command| lane_of(&command.kind) == number) {
                let mine = commands.extract_if(.., |command| lane_of(&command.kind) == number);
                queue.push(mine.map(|command| Queued { command, at }), &mut refused);
            }
        }
        if !refused.is_empty() {
            let done = refused.drain(..).map(|Queued { command, .. }| refusal(command.op)).collect();
            self.sink.push(done);
        }
    }

    /// Reads that need no other thread.
    fn answer_at_hand(&self, commands: &mut Vec<DiskCommand>, at: Instant) {
        let Some(lane) = &self.read_lane else { return };
        let mut answers = Vec::new();
        commands.retain(|command| match lane.try_now(command, at) {
            Some(done) => {
                answers.push(done);
                false
            }
            None => true,
        });
        self.sink.push(answers);
    }

    /// Moves all results there are behind what `into` holds. Never blocks.
    pub fn completed(&self, into: &mut Vec<DiskDone>) {
        if let Some(lane) = &self.write_lane {
            lane.poll(into);
        }
        if let Some(lane) = &self.read_lane {
            lane.poll(into);
        }
        into.append(&mut lock(&self.sink.done));
    }

    /// An eventfd that the kernel raises when it has completed data: like the wake, it says that there are results. It
    /// saves the wake-up of a thread between the device and the reactor.
    pub fn completion_fd(&self) -> BorrowedFd<'_> {
        self.completions.as_fd()
    }

    /// How long submitting took, from now on.
    pub fn submit_times(&self) -> Arc<SubmitTimesByLane> {
        Arc::clone(&self.submit_times)
    }

    /// Finishes what was handed in and ends the threads; results not yet taken can't be any more.
    pub fn stop(self) {
        drop(self);
    }
}

impl Pool {
    /// Threads that submit may wait for room, which nobody but us makes.
    fn take_last_completions(&self) {
        /// How long its end may go unnoticed; a completion is noticed at once.
        const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        let running = || self.threads.iter().take(2).any(|thread| !thread.is_finished());
        let mut scrap = Vec::new();
        while running() {
            self.completed(&mut scrap);
            scrap.clear();
            let mut raised = [PollFd::new(&self.completions, PollFlags::IN)];
            if rustix::event::poll(&mut raised, Some(&LOOK_EVERY)).is_ok() {
                // Lowered, so that the next look waits. It does not block, and may have nothing to read.
                rustix::io::read(&self.completions, &mut [0; 8]).ok();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for queue in [&self.writes, &self.reads, &self.flushes, &self.metadata] {
            queue.stop();
        }
        self.take_last_completions();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the disk pool had died");
            }
        }
    }
}

/// What the engines of a pool are made of.
struct Parts<'a> {
    region: &'a Region,
    kind: EngineKind,
    depth: u32,
    device: DeviceQueue,
    completions: OwnedFd,
    times: Arc<SubmitTimesByLane>,
}

impl Parts<'_> {
    fn gate<T: Jobs + Send + 'static>(
        &self,
        of_lane: fn(&SubmitTimesByLane) -> &SubmitTimes,
    ) -> Result<Gate<T>, RegionError> {
        let file = self.region.storage().direct_file();
        Ok(Gate::new(self.engine(self.kind, file)?, self.depth as usize, &self.device, &self.times, of_lane))
    }

    /// Reads through the page cache wait for the disk in the call: they are of threads.
    fn cached(&self) -> Result<read::Cached, RegionError> {
        let data = self.region.storage().cached_data();
        let data = data.map_err(|source| self.error(EngineKind::Psync, source))?;
        let engine = self.engine(EngineKind::Psync, data.file())?;
        let unknown = DeviceQueue::default();
        let gate = Gate::new(engine, self.depth as usize, &unknown, &self.times, |times| &times.reads);
        Ok(read::Cached { data, gate })
    }

    fn engine<T: Send + 'static>(
        &self,
        kind: EngineKind,
        file: io::Result<File>,
    ) -> Result<Box<dyn Engine<T>>, RegionError> {
        let start = |file| start_engine(kind, file, self.depth, Some(self.completions.try_clone()?));
        file.and_then(start).map_err(|source| self.error(kind, source))
    }

    fn error(&self, engine: EngineKind, source: io::Error) -> RegionError {
        let path = self.region.storage().path().display().to_string();
        RegionError::Engine { path, engine, depth: self.depth, source }
    }
}

pub(super) fn engine_for(region: &Region, wanted: Option<EngineKind>) -> EngineKind {
    let storage = region.storage();
    wanted.unwrap_or_else(|| {
        if storage.is_direct() {
            return EngineKind::Aio;
        }
        let path = storage.path().display();
        tracing::warn!("{path}: without direct I/O aio would block: engine psync is used, which costs more");
        EngineKind::Psync
    })
}

fn lane_of(op: &DiskOp) -> usize {
    match op {
        DiskOp::Write { .. } | DiskOp::Zero { .. } | DiskOp::Store { .. } => 0,
        DiskOp::Read { .. } => 1,
        DiskOp::Flush { .. } | DiskOp::Close => 2,
        DiskOp::ActivityLog { .. } | DiskOp::Header(_) | DiskOp::Digests { .. } | DiskOp::Contexts { .. } => {
            3
        }
    }
}

fn refusal(op: OpId) -> DiskDone {
    let message = "the lane holds as many operations as it may".to_owned();
    let error = DiskError::Io { operation: "queueing for the disk", message };
    DiskDone { op, result: Err(error), times: StageTimes::default() }
}

/// Where results wait for the reactor.
struct Sink {
    done: Mutex<Vec<DiskDone>>,
    wake: Wake,
}

impl Sink {
    /// The reactor takes all there is, so only the first of a batch has to wake it.
    fn push(&self, mut batch: Vec<DiskDone>) {
        if batch.is_empty() {
            return;
        }
        let mut done = lock(&self.done);
        let was_empty = done.is_empty();
        if was_empty && done.capacity() < batch.len() {
            *done = batch;
        } else {
            done.append(&mut batch);
        }
        drop(done);
        if was_empty {
            (self.wake)();
        }
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

/// How an operation ended, with the time it waited for the kernel to take it and the time it took from there.
fn done(
    op: OpId,
    result: Result<DiskOutcome, DiskError>,
    arrived: Instant,
    submitted: Instant,
    now: Instant,
) -> DiskDone {
    let times = StageTimes {
        queued_us: 0,
        submit_us: micros(submitted.saturating_duration_since(arrived)),
        device_us: micros(now.saturating_duration_since(submitted)),
    };
    DiskDone { op, result, times }
}
