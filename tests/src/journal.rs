//! Writes that are remembered: which were sent, which were acknowledged, and whether what is read later agrees.
//!
//! Invariants:
//! - At most one write of a block is in flight, so that a block must hold one of the numbers from the last acknowledged to
//!   the last sent.
//! - What was read once counts as acknowledged: it must not be taken back.
//! - A write that is refused because the server stops counts as one without an answer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crate::nbd::{Client, Command, ESHUTDOWN};
use crate::pattern::Random;

pub const BLOCK_BYTES: u32 = 4096;
/// Requests in flight.
const DEPTH: usize = 32;

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    sent: u64,
    acknowledged: u64,
}

#[derive(Debug)]
pub struct Journal {
    blocks: Vec<Block>,
    next_number: u64,
    random: Random,
}

impl Journal {
    pub fn new(blocks: usize, seed: u64) -> Self {
        Self { blocks: vec![Block::default(); blocks], next_number: 1, random: Random::new(seed) }
    }

    /// Writes random blocks until the connection breaks, or until `enough` and everything in flight is answered; tells
    /// which: true if it broke. Counts acknowledgements in `progress`.
    pub fn write(&mut self, client: &mut Client, progress: &AtomicU64, enough: &AtomicBool) -> bool {
        let mut in_flight: BTreeMap<u64, (usize, u64)> = BTreeMap::new();
        let mut stopping = false;
        loop {
            while in_flight.len() < DEPTH && !stopping && !enough.load(Ordering::Relaxed) {
                let at = usize::try_from(self.random.below(self.blocks.len() as u64)).expect("it fits");
                if in_flight.values().any(|&(block, _)| block == at) {
                    continue;
                }
                match self.send(client, at) {
                    Ok((cookie, number)) => in_flight.insert(cookie, (at, number)),
                    Err(_) => return true,
                };
            }
            if in_flight.is_empty() {
                return stopping;
            }
            let Ok(reply) = client.receive() else { return true };
            let (at, number) = in_flight.remove(&reply.cookie).expect("only what was asked is answered");
            if reply.errno == ESHUTDOWN {
                stopping = true;
                continue;
            }
            assert_eq!(reply.errno, 0, "write of block {at}");
            self.blocks[at].acknowledged = number;
            progress.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn send(&mut self, client: &mut Client, at: usize) -> std::io::Result<(u64, u64)> {
        let number = self.next_number;
        self.next_number += 1;
        // Before it is sent: a write that fails to be sent may have arrived in part or whole.
        self.blocks[at].sent = number;
        let data = stamped(at as u64, number);
        let offset = at as u64 * u64::from(BLOCK_BYTES);
        let cookie = client.send(Command::Write, 0, offset, BLOCK_BYTES, &data)?;
        Ok((cookie, number))
    }

    /// Writes `count` random blocks, one at a time; each must be acknowledged.
    #[track_caller]
    pub fn write_some(&mut self, client: &mut Client, count: usize) {
        for _ in 0..count {
            let at = usize::try_from(self.random.below(self.blocks.len() as u64)).expect("it fits");
            self.write_block(client, at);
        }
    }

    /// Writes every block once, so that each has data.
    #[track_caller]
    pub fn write_all(&mut self, client: &mut Client) {
        for at in 0..self.blocks.len() {
            self.write_block(client, at);
        }
    }

    #[track_caller]
    fn write_block(&mut self, client: &mut Client, at: usize) {
        let (cookie, number) = self.send(client, at).expect("the connection holds");
        let reply = client.receive().expect("the server answers");
        assert_eq!((reply.cookie, reply.errno), (cookie, 0), "write of block {at}");
        self.blocks[at].acknowledged = number;
    }

    /// Reads everything back.
    #[track_caller]
    pub fn verify(&mut self, client: &mut Client) {
        for (at, block) in self.blocks.iter_mut().enumerate() {
            let data = client.read(at as u64 * u64::from(BLOCK_BYTES), BLOCK_BYTES);
            let number = number_of(at as u64, &data);
            assert!(
                (block.acknowledged..=block.sent).contains(&number),
                "block {at} holds write {number}; the last acknowledged is {}, the last sent {}",
                block.acknowledged,
                block.sent
            );
            block.acknowledged = number;
            block.sent = number;
        }
    }
}

/// A journal that is written by a thread of its own.
#[derive(Debug)]
pub struct Writing {
    thread: JoinHandle<(Journal, bool)>,
    progress: Arc<AtomicU64>,
    enough: Arc<AtomicBool>,
}

impl Writing {
    pub fn start(mut journal: Journal, mut client: Client) -> Self {
        let progress = Arc::new(AtomicU64::new(0));
        let enough = Arc::new(AtomicBool::new(false));
        let (counted, done) = (Arc::clone(&progress), Arc::clone(&enough));
        let thread = std::thread::spawn(move || {
            let broke = journal.write(&mut client, &counted, &done);
            (journal, broke)
        });
        Self { thread, progress, enough }
    }

    /// Writes acknowledged so far.
    pub fn acknowledged(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Waits for the connection to break.
    #[track_caller]
    pub fn broken(self) -> Journal {
        let (journal, broke) = joined(self.thread);
        assert!(broke, "the connection held");
        journal
    }

    /// Ends it; the connection must have held.
    #[track_caller]
    pub fn finish(self) -> Journal {
        self.enough.store(true, Ordering::Relaxed);
        let (journal, broke) = joined(self.thread);
        assert!(!broke, "the connection broke");
        journal
    }
}

#[track_caller]
pub(crate) fn joined<T>(thread: JoinHandle<T>) -> T {
    match thread.join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

pub(crate) fn stamped(block: u64, number: u64) -> Vec<u8> {
    let mut stamp = block.to_le_bytes().to_vec();
    stamp.extend(number.to_le_bytes());
    stamp.repeat(BLOCK_BYTES as usize / stamp.len())
}

/// The number of the write that a block holds; 0 if it was never written.
#[track_caller]
pub(crate) fn number_of(block: u64, data: &[u8]) -> u64 {
    if data.iter().all(|&byte| byte == 0) {
        return 0;
    }
    let number = u64::from_le_bytes(data[8..16].try_into().expect("8 bytes"));
    assert!(data == stamped(block, number), "block {block} is torn or another's");
    number
}
