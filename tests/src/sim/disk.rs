//! A simulated disk for one region.
//!
//! Invariants:
//! - A page keeps its durable content and everything written since; reads show the newest.
//! - A power cut leaves, sector by sector, any of these. So order between pages, and even within one, is nobody's friend.
//! - After a failed sync the pages written before it count as clean though they are not: a later sync does not save them.
//! - When the operation countdown runs out in mid-call, nothing more happens: the process has died at that step.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use newel_downstairs::core::api::LogEntry;
use newel_downstairs::disk::{FORMAT_VERSION, Layout, Storage, format_on};
use newel_protocol::BLOCK_BYTES;
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use uuid::Uuid;

const SECTOR: usize = 512;
type Page = Box<[u8; BLOCK_BYTES]>;

#[derive(Debug, Default)]
struct PageState {
    /// What a power cut can't take. `None` is zeros.
    durable: Option<Page>,
    /// Written since, oldest first.
    pending: Vec<Page>,
    /// Written before a sync that failed: no later sync saves it.
    stuck: bool,
}

impl PageState {
    fn newest(&self) -> Option<&Page> {
        self.pending.last().or(self.durable.as_ref())
    }

    fn settle(&mut self) {
        if let Some(last) = self.pending.pop() {
            self.durable = Some(last);
            self.pending.clear();
        }
    }
}

#[derive(Debug, Default)]
struct State {
    size: u64,
    pages: BTreeMap<u64, PageState>,
    unreadable: BTreeSet<u64>,
    /// Calls left until the process dies.
    countdown: Option<u32>,
    dead: bool,
    fail_next_sync: bool,
    full: bool,
    /// What is planted, for the self-test of the checker.
    skip_context_sync: Option<(u64, u64)>,
}

/// The medium; survives the processes that use it.
#[derive(Clone, Debug)]
pub struct Disk(Arc<Mutex<State>>);

impl Disk {
    /// A disk with a fresh region on it.
    pub fn format(blocks: u64, region: Uuid) -> Self {
        let layout = layout(blocks);
        let disk = Self(Arc::new(Mutex::new(State { size: layout.total_bytes(), ..State::default() })));
        if let Err(error) = format_on(&disk, layout, region, Uuid::nil()) {
            unreachable!("a new disk takes everything: {error}");
        }
        disk
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process takes the disk over from the one before.
    pub fn attach(&self) {
        let mut state = self.state();
        state.dead = false;
        state.countdown = None;
        state.fail_next_sync = false;
    }

    /// No more faults.
    pub fn calm(&self) {
        let mut state = self.state();
        state.countdown = None;
        state.fail_next_sync = false;
        state.full = false;
    }

    /// The process dies at the `calls`-th call from now.
    pub fn die_after(&self, calls: u32) {
        self.state().countdown = Some(calls);
    }

    /// True once the countdown has run out.
    pub fn is_dead(&self) -> bool {
        self.state().dead
    }

    pub fn fail_next_sync(&self) {
        self.state().fail_next_sync = true;
    }

    pub fn set_full(&self, full: bool) {
        self.state().full = full;
    }

    /// The contexts between these offsets are forgotten by every sync: a planted bug.
    pub fn plant_skip_sync(&self, from: u64, to: u64) {
        self.state().skip_context_sync = Some((from, to));
    }

    pub fn power_cut(&self, rng: &mut ChaCha8Rng) {
        // Mostly a few pages lag; sometimes nothing was written back at all.
        let keep = [0.0, 0.5, 0.9][rng.random_range(0..3)];
        let torn = rng.random_bool(0.3);
        for page in self.state().pages.values_mut() {
            if page.pending.is_empty() {
                page.stuck = false;
                continue;
            }
            let mut content = page.durable.clone().unwrap_or_else(|| Box::new([0; BLOCK_BYTES]));
            let states = page.pending.len();
            let choose = |rng: &mut ChaCha8Rng| {
                if rng.random_bool(keep) { states } else { rng.random_range(0..=states) }
            };
            let whole = choose(rng);
            for sector in 0..BLOCK_BYTES / SECTOR {
                let chosen = if torn { choose(rng) } else { whole };
                if let Some(source) = chosen.checked_sub(1).and_then(|index| page.pending.get(index)) {
                    let at = sector * SECTOR..(sector + 1) * SECTOR;
                    content[at.clone()].copy_from_slice(&source[at]);
                }
            }
            *page = PageState { durable: Some(content), pending: Vec::new(), stuck: false };
        }
    }

    /// Flips one bit of a page, if it was ever written.
    pub fn flip_bit(&self, offset: u64, rng: &mut ChaCha8Rng) -> bool {
        let mut state = self.state();
        let Some(page) = state.pages.get_mut(&(offset / BLOCK_BYTES as u64)) else { return false };
        page.settle();
        let Some(content) = &mut page.durable else { return false };
        let bit = rng.random_range(0..BLOCK_BYTES * 8);
        content[bit / 8] ^= 1 << (bit % 8);
        true
    }

    /// Reads of this page fail until it is written again.
    pub fn make_unreadable(&self, offset: u64) {
        self.state().unreadable.insert(offset / BLOCK_BYTES as u64);
    }

    /// The newest content of a page, for comparing replicas.
    pub fn peek(&self, offset: u64) -> Vec<u8> {
        let state = self.state();
        let page = state.pages.get(&(offset / BLOCK_BYTES as u64)).and_then(PageState::newest);
        page.map_or_else(|| vec![0; BLOCK_BYTES], |page| page.to_vec())
    }
}

pub fn layout(blocks: u64) -> Layout {
    let slots = newel_downstairs::disk::LOG_SLOTS_PER_RECORD;
    Layout::new(blocks, slots).unwrap_or_else(|error| unreachable!("format {FORMAT_VERSION}: {error}"))
}

/// What the slots beyond `kept` held is dropped: a small log that has to evict.
pub fn shrink_log(entries: &mut Vec<LogEntry>, kept: u32) -> bool {
    let before = entries.len();
    entries.retain(|entry| entry.slot < kept);
    before == entries.len()
}

impl State {
    fn step(&mut self) -> io::Result<()> {
        if let Some(left) = &mut self.countdown {
            match left.checked_sub(1) {
                Some(less) => *left = less,
                None => self.dead = true,
            }
        }
        if self.dead { Err(io::Error::other("the process has died")) } else { Ok(()) }
    }

    fn read(&mut self, offset: u64, into: &mut [u8], direct: bool) -> io::Result<()> {
        self.step()?;
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let number = at / BLOCK_BYTES as u64;
            let within = usize::try_from(at % BLOCK_BYTES as u64).unwrap_or(0);
            let take = rest.len().min(BLOCK_BYTES - within);
            let (part, after) = rest.split_at_mut(take);
            if direct && self.unreadable.contains(&number) {
                return Err(io::Error::from_raw_os_error(5));
            }
            match self.pages.get(&number).and_then(PageState::newest) {
                Some(page) => part.copy_from_slice(&page[within..within + take]),
                None => part.fill(0),
            }
            rest = after;
            at += take as u64;
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8], durable: bool) -> io::Result<()> {
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            // Each page is a step of its own: a death in between leaves the first pages written.
            self.step()?;
            let number = at / BLOCK_BYTES as u64;
            let within = usize::try_from(at % BLOCK_BYTES as u64).unwrap_or(0);
            let take = rest.len().min(BLOCK_BYTES - within);
            let state = self.pages.entry(number).or_default();
            let mut page = state.newest().cloned().unwrap_or_else(|| Box::new([0; BLOCK_BYTES]));
            page[within..within + take].copy_from_slice(&rest[..take]);
            state.pending.push(page);
            state.stuck = false;
            if durable {
                state.settle();
            }
            self.unreadable.remove(&number);
            rest = &rest[take..];
            at += take as u64;
        }
        Ok(())
    }
}

impl Storage for Disk {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.state().size)
    }

    fn read_cached(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.state().read(offset, into, false)
    }

    fn write_cached(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.state().write(offset, bytes, false)
    }

    fn write_durable(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.state().write(offset, bytes, true)
    }

    fn read_direct(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.state().read(offset, into, true)
    }

    fn write_direct(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        if state.full {
            return Err(io::Error::from_raw_os_error(28));
        }
        state.write(offset, bytes, false)
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state();
        state.step()?;
        let failed = std::mem::take(&mut state.fail_next_sync);
        let skipped = state.skip_context_sync;
        for (number, page) in &mut state.pages {
            let offset = number * BLOCK_BYTES as u64;
            if failed {
                page.stuck |= !page.pending.is_empty();
            } else if !page.stuck && skipped.is_none_or(|(from, to)| !(from..to).contains(&offset)) {
                page.settle();
            }
        }
        if failed { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    }

    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let mut state = self.state();
        state.step()?;
        let first = offset / BLOCK_BYTES as u64;
        for number in first..first + bytes / BLOCK_BYTES as u64 {
            if let Some(page) = state.pages.get_mut(&number) {
                page.pending.push(Box::new([0; BLOCK_BYTES]));
            }
        }
        Ok(())
    }

    fn is_hole(&self, _offset: u64, _bytes: u64) -> bool {
        false
    }
}
