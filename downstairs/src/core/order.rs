//! Which jobs may be at the disk together: overlapping ones run in arrival order, all others as they come.
//!
//! Invariants:
//! - Two jobs conflict if their ranges overlap and at least one of them is a change. A job may start once no earlier
//!   unfinished job conflicts with it, and not before.
//! - A job that conflicts with nothing starts at once. To find that out costs O(blocks of the job), however many other
//!   jobs its extent has: an extent with few jobs is scanned, one with many keeps a count per block. The end of a job
//!   looks only at those that wait in its neighbourhood.
//! - An extent costs memory only while it has unfinished jobs, and its table of counts only while it has many.
//!
//! What a job is, whether its extent is in the activity log and what is sent to the disk is left to `jobs.rs`; flushes,
//! which conflict with no block but wait for every earlier change, to `flush.rs`.

use newel_protocol::{BlockRange, EXTENT_BLOCKS};

/// Jobs that an extent may have before it gets a table. Scanning this many entries is as quick as looking into a cold
/// table, and it bounds the tables to one for every 16 jobs outstanding.
const TABLE_AT_JOBS: usize = 16;
/// Waiting jobs are kept by groups of this many blocks. A job of a whole extent is in 64 of them.
const GROUP_BLOCKS: usize = 16;
const GROUPS: usize = BLOCKS / GROUP_BLOCKS;
/// Tables kept for reuse: 6 KiB each.
const SPARE_TABLES: usize = 64;
/// The most jobs the counters can hold.
pub(super) const MAX_JOBS: usize = u16::MAX as usize;

const NONE: u32 = u32::MAX;
const BLOCKS: usize = EXTENT_BLOCKS as usize;

/// The order of all unfinished jobs, which the caller names by small numbers (the indices of its job table).
#[derive(Debug)]
pub(super) struct Order {
    /// By extent: its queue, or `NONE`.
    extents: Vec<u32>,
    queues: Vec<Queue>,
    free_queues: Vec<u32>,
    spare_tables: Vec<Box<Table>>,
    /// By job.
    nodes: Vec<Node>,
    next_seq: u64,
    scratch: Vec<(u64, u32)>,
}

/// The unfinished jobs of one extent, in no order.
#[derive(Debug, Default)]
struct Queue {
    extent: usize,
    entries: Vec<Entry>,
    waiting: usize,
    table: Option<Box<Table>>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    seq: u64,
    job: u32,
    /// Blocks within the extent; `end` is one past the last.
    start: u16,
    end: u16,
    change: bool,
    waiting: bool,
}

impl Entry {
    /// Blocks on which the two are in conflict.
    fn conflict(&self, other: &Self) -> u32 {
        let common = self.end.min(other.end).saturating_sub(self.start.max(other.start));
        if self.change || other.change { u32::from(common) } else { 0 }
    }

    fn groups(&self) -> std::ops::RangeInclusive<usize> {
        usize::from(self.start) / GROUP_BLOCKS..=usize::from(self.end - 1) / GROUP_BLOCKS
    }

    /// The part of it that lies in `group`.
    fn within(&self, group: usize) -> Self {
        let clip = |block: u16| usize::from(block).clamp(group * GROUP_BLOCKS, (group + 1) * GROUP_BLOCKS);
        let clip = |block| u16::try_from(clip(block)).unwrap_or(block);
        Self { start: clip(self.start), end: clip(self.end), ..*self }
    }

    fn blocks(&self) -> std::ops::Range<usize> {
        usize::from(self.start)..usize::from(self.end)
    }
}

/// How many unfinished jobs touch each block of an extent, and who waits there.
#[derive(Debug)]
struct Table {
    changes: [u16; BLOCKS],
    reads: [u16; BLOCKS],
    /// Waiting jobs by the group of blocks that they touch; one that touches several is in each of them.
    waiting: [Vec<Entry>; GROUPS],
}

impl Table {
    fn new() -> Box<Self> {
        let waiting = std::array::from_fn(|_| Vec::new());
        Box::new(Self { changes: [0; BLOCKS], reads: [0; BLOCKS], waiting })
    }

    fn add(&mut self, entry: &Entry) {
        let counts = if entry.change { &mut self.changes } else { &mut self.reads };
        counts[entry.blocks()].iter_mut().for_each(|count| *count += 1);
        if entry.waiting {
            entry.groups().for_each(|group| self.waiting[group].push(*entry));
        }
    }

    fn remove(&mut self, entry: &Entry) {
        let counts = if entry.change { &mut self.changes } else { &mut self.reads };
        counts[entry.blocks()].iter_mut().for_each(|count| *count -= 1);
        if entry.waiting {
            self.stop_waiting(entry);
        }
    }

    fn stop_waiting(&mut self, entry: &Entry) {
        for group in entry.groups() {
            let waiting = &mut self.waiting[group];
            if let Some(position) = waiting.iter().position(|other| other.job == entry.job) {
                waiting.swap_remove(position);
            }
        }
    }

    /// See [`Node::blockers`].
    fn blockers(&self, entry: &Entry) -> u32 {
        let sum = |counts: &[u16; BLOCKS]| counts[entry.blocks()].iter().map(|&count| u32::from(count)).sum();
        let changes: u32 = sum(&self.changes);
        if entry.change { changes + sum(&self.reads) } else { changes }
    }
}

#[derive(Clone, Copy, Debug)]
struct Node {
    queue: u32,
    position: u32,
    /// Earlier unfinished jobs in conflict with this one, each counted once for every block that both touch.
    blockers: u32,
}

const NO_NODE: Node = Node { queue: NONE, position: 0, blockers: 0 };

impl Order {
    pub(super) fn new(extents: usize) -> Self {
        Self {
            extents: vec![NONE; extents],
            queues: Vec::new(),
            free_queues: Vec::new(),
            spare_tables: Vec::new(),
            nodes: Vec::new(),
            next_seq: 0,
            scratch: Vec::new(),
        }
    }

    /// Takes up `job` behind all others; true if it may start now. `range` is inside the region.
    pub(super) fn add(&mut self, job: u32, range: BlockRange, change: bool) -> bool {
        let queue_index = self.queue_of(range.extent().0 as usize);
        let queue = &mut self.queues[queue_index as usize];
        let start = u16::try_from(range.start % u64::from(EXTENT_BLOCKS)).unwrap_or(u16::MAX);
        let count = u16::try_from(range.count).unwrap_or(u16::MAX);
        let mut entry = Entry { seq: self.next_seq, job, start, end: start + count, change, waiting: false };
        self.next_seq += 1;
        let blockers = match &queue.table {
            Some(table) => table.blockers(&entry),
            None => queue.entries.iter().map(|earlier| earlier.conflict(&entry)).sum(),
        };
        entry.waiting = blockers > 0;
        queue.waiting += usize::from(entry.waiting);
        let position = queue.entries.len();
        queue.entries.push(entry);
        match &mut queue.table {
            Some(table) => table.add(&entry),
            None if queue.entries.len() > TABLE_AT_JOBS => {
                let mut table = self.spare_tables.pop().unwrap_or_else(Table::new);
                queue.entries.iter().for_each(|entry| table.add(entry));
                queue.table = Some(table);
            }
            None => {}
        }
        if self.nodes.len() <= job as usize {
            self.nodes.resize(job as usize + 1, NO_NODE);
        }
        self.nodes[job as usize] = Node { queue: queue_index, position: index_u32(position), blockers };
        blockers == 0
    }

    /// `job` is finished, or dropped while it waited. Appends the jobs that may start now, in arrival order.
    pub(super) fn remove(&mut self, job: u32, released: &mut Vec<u32>) {
        let Some((queue_index, entry)) = self.take(job) else { return };
        let Self { queues, nodes, scratch, .. } = self;
        let queue = &mut queues[queue_index as usize];
        // An earlier one may conflict too, if this job was dropped while it waited; it never waited for this.
        let mut unblock = |later: &Entry, blocks: u32| {
            if blocks > 0 && later.seq > entry.seq {
                let node = &mut nodes[later.job as usize];
                node.blockers -= blocks;
                if node.blockers == 0 {
                    scratch.push((later.seq, later.job));
                }
            }
        };
        match &queue.table {
            _ if queue.waiting == 0 => {}
            Some(table) => {
                for group in entry.groups() {
                    let part = entry.within(group);
                    table.waiting[group].iter().for_each(|later| unblock(later, later.conflict(&part)));
                }
            }
            None => {
                let waiting = queue.entries.iter().filter(|later| later.waiting);
                waiting.for_each(|later| unblock(later, later.conflict(&entry)));
            }
        }
        for (_, job) in self.scratch.iter() {
            let queue = &mut self.queues[queue_index as usize];
            let position = self.nodes[*job as usize].position as usize;
            let released = &mut queue.entries[position];
            if let Some(table) = &mut queue.table {
                table.stop_waiting(released);
            }
            released.waiting = false;
            queue.waiting -= 1;
        }
        self.scratch.sort_unstable();
        released.extend(self.scratch.drain(..).map(|(_, job)| job));
        self.retire_if_empty(queue_index);
    }

    /// Drops `job` without looking for those that waited for it. Only right where every waiting job is dropped in the
    /// same breath.
    pub(super) fn discard(&mut self, job: u32) {
        if let Some((queue_index, _)) = self.take(job) {
            self.retire_if_empty(queue_index);
        }
    }

    fn queue_of(&mut self, extent: usize) -> u32 {
        let known = self.extents[extent];
        if known != NONE {
            return known;
        }
        let index = self.free_queues.pop().unwrap_or_else(|| {
            self.queues.push(Queue::default());
            index_u32(self.queues.len() - 1)
        });
        self.queues[index as usize].extent = extent;
        self.extents[extent] = index;
        index
    }

    /// Takes a job's entry out of its queue.
    fn take(&mut self, job: u32) -> Option<(u32, Entry)> {
        let node = std::mem::replace(self.nodes.get_mut(job as usize)?, NO_NODE);
        if node.queue == NONE {
            return None;
        }
        let queue = &mut self.queues[node.queue as usize];
        let entry = queue.entries.swap_remove(node.position as usize);
        if let Some(moved) = queue.entries.get(node.position as usize) {
            self.nodes[moved.job as usize].position = node.position;
        }
        queue.waiting -= usize::from(entry.waiting);
        if let Some(table) = &mut queue.table {
            table.remove(&entry);
        }
        Some((node.queue, entry))
    }

    fn retire_if_empty(&mut self, queue_index: u32) {
        let queue = &mut self.queues[queue_index as usize];
        if !queue.entries.is_empty() {
            return;
        }
        // Its counts are all zero again, so it can be used as it is. What was long once must not stay so for ever.
        if let Some(mut table) = queue.table.take()
            && self.spare_tables.len() < SPARE_TABLES
        {
            table.waiting.iter_mut().for_each(|waiting| waiting.shrink_to(TABLE_AT_JOBS));
            self.spare_tables.push(table);
        }
        queue.entries.shrink_to(4 * TABLE_AT_JOBS);
        self.extents[queue.extent] = NONE;
        self.free_queues.push(queue_index);
    }
}

fn index_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(NONE)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    struct Job {
        name: u32,
        range: BlockRange,
        change: bool,
        started: bool,
    }

    /// All unfinished jobs in arrival order; what may start is found by looking at every pair.
    #[derive(Default)]
    struct Oracle {
        jobs: Vec<Job>,
    }

    impl Oracle {
        fn startable(&self, index: usize) -> bool {
            let job = &self.jobs[index];
            self.jobs[..index]
                .iter()
                .all(|earlier| !earlier.range.overlaps(job.range) || !(earlier.change || job.change))
        }

        /// Starts whatever may start and says which, in arrival order.
        fn start(&mut self) -> Vec<u32> {
            let ready: Vec<_> =
                (0..self.jobs.len()).filter(|&i| !self.jobs[i].started && self.startable(i)).collect();
            ready.into_iter().map(|i| (self.jobs[i].started = true, self.jobs[i].name).1).collect()
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Arrive { extent: u64, start: u64, count: u32, change: bool },
        Finish(usize),
        Cancel(usize),
        DropWaiting,
    }

    fn step(blocks: u64) -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0..3_u64, 0..blocks, 1..5_u32, any::<bool>())
                .prop_map(|(extent, start, count, change)| Step::Arrive { extent, start, count, change }),
            1 => (0..2_u64, any::<bool>())
                .prop_map(|(extent, change)| Step::Arrive { extent, start: 0, count: 1024, change }),
            5 => any::<usize>().prop_map(Step::Finish),
            1 => any::<usize>().prop_map(Step::Cancel),
            1 => Just(Step::DropWaiting),
        ]
    }

    fn check(steps: Vec<Step>) {
        let mut order = Order::new(3);
        let mut oracle = Oracle::default();
        let mut free: Vec<u32> = (0..500).rev().collect();
        for step in steps {
            let mut released = Vec::new();
            match step {
                Step::Arrive { extent, start, count, change } => {
                    let Some(name) = free.pop() else { continue };
                    let range = BlockRange::new(extent * 1024 + start.min(1024 - u64::from(count)), count);
                    oracle.jobs.push(Job { name, range, change, started: false });
                    if order.add(name, range, change) {
                        released.push(name);
                    }
                }
                Step::Finish(pick) => {
                    let started: Vec<_> =
                        (0..oracle.jobs.len()).filter(|&i| oracle.jobs[i].started).collect();
                    let Some(&index) = started.get(pick % started.len().max(1)) else { continue };
                    let job = oracle.jobs.remove(index);
                    order.remove(job.name, &mut released);
                    free.push(job.name);
                }
                Step::Cancel(pick) => {
                    let waiting: Vec<_> =
                        (0..oracle.jobs.len()).filter(|&i| !oracle.jobs[i].started).collect();
                    let Some(&index) = waiting.get(pick % waiting.len().max(1)) else { continue };
                    let job = oracle.jobs.remove(index);
                    order.remove(job.name, &mut released);
                    free.push(job.name);
                }
                Step::DropWaiting => {
                    for job in oracle.jobs.extract_if(.., |job| !job.started) {
                        order.discard(job.name);
                        free.push(job.name);
                    }
                }
            }
            assert_eq!(released, oracle.start());
        }
        // Nothing is left behind: when all are finished, no queue and no table is in use.
        while let Some(job) = oracle.jobs.iter().position(|job| job.started) {
            let mut released = Vec::new();
            order.remove(oracle.jobs.remove(job).name, &mut released);
            assert_eq!(released, oracle.start());
        }
        assert!(oracle.jobs.is_empty());
        assert!(order.extents.iter().all(|&queue| queue == NONE));
        assert!(order.queues.iter().all(|queue| queue.table.is_none() && queue.waiting == 0));
        assert!(order.spare_tables.iter().all(|table| {
            let unused = |counts: &[u16; BLOCKS]| counts.iter().all(|&n| n == 0);
            unused(&table.changes) && unused(&table.reads) && table.waiting.iter().all(Vec::is_empty)
        }));
    }

    proptest! {
        #[test]
        fn same_as_looking_at_every_pair(steps in proptest::collection::vec(step(1024), 0..400)) {
            check(steps);
        }

        #[test]
        fn the_same_where_much_overlaps(steps in proptest::collection::vec(step(12), 0..400)) {
            check(steps);
        }
    }

    #[test]
    fn thousands_of_disjoint_writes_in_one_extent_start_at_once() {
        let mut order = Order::new(1);
        let mut released = Vec::new();
        for job in 0..1024 {
            assert!(order.add(job, BlockRange::single(u64::from(job)), true));
        }
        for job in 0..1024 {
            assert!(!order.add(1024 + job, BlockRange::single(u64::from(job)), true));
        }
        for job in (0..1024).rev() {
            order.remove(job, &mut released);
        }
        assert_eq!(released, (1024..2048).rev().collect::<Vec<_>>());
    }
}
