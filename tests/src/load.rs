//! A steady load that keeps time of every answer, to see what a guest sees while a replica is stopped.

#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::nbd::{Address, Client, Command};
use crate::pattern::{Random, bytes_at};

const BLOCK_BYTES: u32 = 4096;

/// One answer: when it came, and how long it took.
#[derive(Clone, Copy, Debug)]
struct Answer {
    at: Instant,
    took: Duration,
}

/// One connection that writes or reads random 4 KiB blocks at a fixed depth. It panics at the first error.
#[derive(Debug)]
pub struct Load {
    thread: JoinHandle<Vec<Answer>>,
    enough: Arc<AtomicBool>,
}

/// What happened between two moments.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    pub answers: usize,
    pub longest_gap: Duration,
    pub slowest: Duration,
    /// 99 of 100 answers took no longer.
    pub p99: Duration,
    /// 999 of 1000 answers took no longer.
    pub p999: Duration,
}

#[derive(Debug)]
pub struct Record(Vec<Answer>);

impl Load {
    pub fn start(address: &Address, command: Command, depth: usize, blocks: u64) -> Self {
        let mut client = Client::connect(address).expect("the server serves");
        let enough = Arc::new(AtomicBool::new(false));
        let done = Arc::clone(&enough);
        let thread = std::thread::spawn(move || run(&mut client, command, depth, blocks, &done));
        Self { thread, enough }
    }

    pub fn running(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Ends it once everything in flight is answered.
    #[track_caller]
    pub fn finish(self) -> Record {
        self.enough.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(answers) => Record(answers),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

fn run(client: &mut Client, command: Command, depth: usize, blocks: u64, done: &AtomicBool) -> Vec<Answer> {
    let payload = if command == Command::Write { bytes_at(0, u64::from(BLOCK_BYTES), 7) } else { Vec::new() };
    let mut random = Random::new(0x10ad);
    let mut in_flight = BTreeMap::new();
    let mut answers = Vec::new();
    loop {
        while in_flight.len() < depth && !done.load(Ordering::Relaxed) {
            let offset = random.below(blocks) * u64::from(BLOCK_BYTES);
            let sent = Instant::now();
            let cookie =
                client.send(command, 0, offset, BLOCK_BYTES, &payload).expect("the connection holds");
            in_flight.insert(cookie, sent);
        }
        if in_flight.is_empty() {
            return answers;
        }
        let reply = client.receive().expect("the connection holds");
        assert_eq!(reply.errno, 0, "{command:?}");
        let at = Instant::now();
        let sent = in_flight.remove(&reply.cookie).expect("only what was asked is answered");
        answers.push(Answer { at, took: at - sent });
    }
}

impl Record {
    /// Answers after `from` and until `to`; the gap from the last one before is part of it.
    pub fn between(&self, from: Instant, to: Instant) -> Figures {
        let mut figures = Figures::default();
        let mut last = from;
        let mut times = Vec::new();
        for answer in self.0.iter().filter(|answer| answer.at > from) {
            if answer.at > to {
                break;
            }
            figures.answers += 1;
            times.push(answer.took);
            figures.longest_gap = figures.longest_gap.max(answer.at - last);
            figures.slowest = figures.slowest.max(answer.took);
            last = answer.at;
        }
        figures.longest_gap = figures.longest_gap.max(to - last);
        times.sort_unstable();
        figures.p99 = times.get(times.len() * 99 / 100).copied().unwrap_or_default();
        figures.p999 = times.get(times.len() * 999 / 1000).copied().unwrap_or_default();
        figures
    }
}
