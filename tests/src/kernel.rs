//! A client that behaves like a kernel with a file system on top: what was not answered when a connection ended is sent
//! again, unchanged, over the next one.
//!
//! Invariants:
//! - One write of a block is in flight at most, and its next one is sent only after the answer to it. So once everything is
//!   answered each block must hold exactly what was written last: an older write that lands late is seen.
//! - So little is in flight per connection that it fits into a socket: sending never waits, however full the server is.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crate::journal::{BLOCK_BYTES, joined, number_of, stamped};
use crate::nbd::{Address, Client, Command, ESHUTDOWN};
use crate::pattern::Random;
use crate::volume::RECOVERY_MAX;
use crate::wait;

/// Writes in flight of one connection: with what the kernel adds to each they stay below 208 KiB, a socket's usual buffer.
const DEPTH: usize = 16;

#[derive(Debug)]
pub struct Kernel {
    address: Address,
    links: Vec<Link>,
    /// The number of the last write of each block.
    blocks: Vec<u64>,
    /// Blocks whose last write isn't answered.
    in_flight: BTreeMap<usize, u64>,
    next_number: u64,
    random: Random,
    reconnects: u64,
}

#[derive(Debug)]
struct Link {
    client: Client,
    /// Blocks by the cookie of their write.
    owed: BTreeMap<u64, usize>,
}

impl Kernel {
    #[track_caller]
    pub fn attach(address: Address, connections: usize, blocks: usize, seed: u64) -> Self {
        assert!(blocks > 2 * connections * DEPTH, "there must be blocks to choose from");
        let mut kernel = Self {
            address,
            links: Vec::new(),
            blocks: vec![0; blocks],
            in_flight: BTreeMap::new(),
            next_number: 1,
            random: Random::new(seed),
            reconnects: 0,
        };
        kernel.connect(connections);
        kernel
    }

    #[track_caller]
    fn connect(&mut self, connections: usize) {
        self.links = wait::until("the volume serves NBD", RECOVERY_MAX, || {
            let links = (0..connections).map(|_| Client::connect(&self.address));
            let clients: io::Result<Vec<Client>> = links.collect();
            Some(clients.ok()?.into_iter().map(|client| Link { client, owed: BTreeMap::new() }).collect())
        });
    }

    /// As after a timeout, or a broken connection: all connections are closed, new ones opened, and whatever is in flight is
    /// sent again.
    #[track_caller]
    pub fn reconnect(&mut self, address: Address) {
        self.address = address;
        loop {
            let connections = self.links.len();
            self.links.clear();
            self.connect(connections);
            self.reconnects += 1;
            if self.send_again().is_ok() {
                return;
            }
        }
    }

    /// As when one of several connections breaks: what it owed is sent again over the others, and a new one takes its place.
    pub fn lose(&mut self, link: usize) -> io::Result<()> {
        let lost = self.links.remove(link);
        let owed = lost.owed;
        drop(lost.client);
        for (at, &block) in owed.values().enumerate() {
            let link = at % self.links.len();
            self.links[link].send(block, self.blocks[block])?;
        }
        let client = Client::connect(&self.address)?;
        self.links.push(Link { client, owed: BTreeMap::new() });
        self.reconnects += 1;
        Ok(())
    }

    fn send_again(&mut self) -> io::Result<()> {
        for (at, (&block, &number)) in self.in_flight.iter().enumerate() {
            let link = at % self.links.len();
            self.links[link].send(block, number)?;
        }
        Ok(())
    }

    /// Sends as many writes as may be in flight, and waits for none.
    pub fn post(&mut self) -> io::Result<()> {
        for at in 0..self.links.len() {
            while self.links[at].owed.len() < DEPTH {
                let block = usize::try_from(self.random.below(self.blocks.len() as u64)).expect("it fits");
                if self.in_flight.contains_key(&block) {
                    continue;
                }
                let number = self.next_number;
                self.next_number += 1;
                self.blocks[block] = number;
                self.in_flight.insert(block, number);
                self.links[at].send(block, number)?;
            }
        }
        Ok(())
    }

    /// One answer from each connection that owes any; how many writes were acknowledged.
    fn receive(&mut self) -> io::Result<u64> {
        let mut acknowledged = 0;
        for link in self.links.iter_mut().filter(|link| !link.owed.is_empty()) {
            let reply = link.client.receive()?;
            let block = link.owed.remove(&reply.cookie).expect("only what was asked is answered");
            // Not done. The connection is about to end, and everything is sent again over the next one.
            if reply.errno == ESHUTDOWN {
                return Err(io::ErrorKind::NotConnected.into());
            }
            assert_eq!(reply.errno, 0, "write of block {block}: a file system would be read-only now");
            self.in_flight.remove(&block);
            acknowledged += 1;
        }
        Ok(acknowledged)
    }

    /// Writes until `enough`, and until everything is answered; reconnects whenever a connection breaks.
    #[track_caller]
    pub fn write(&mut self, acknowledged: &AtomicU64, enough: &AtomicBool) {
        loop {
            let done = enough.load(Ordering::Relaxed);
            if done && self.in_flight.is_empty() {
                return;
            }
            let sent = if done { Ok(()) } else { self.post() };
            match sent.and_then(|()| self.receive()) {
                Ok(count) => acknowledged.fetch_add(count, Ordering::Relaxed),
                Err(_) => {
                    self.reconnect(self.address.clone());
                    continue;
                }
            };
        }
    }

    /// Every block holds its last write, and nothing else.
    #[track_caller]
    pub fn verify(&self) {
        assert!(self.in_flight.is_empty(), "at rest");
        let mut client = Client::connect(&self.address).expect("the volume serves NBD");
        for (block, &number) in self.blocks.iter().enumerate() {
            let data = client.read(block as u64 * u64::from(BLOCK_BYTES), BLOCK_BYTES);
            let found = number_of(block as u64, &data);
            assert_eq!(found, number, "block {block}: an older write landed on a newer one, or one is lost");
        }
    }

    pub fn reconnects(&self) -> u64 {
        self.reconnects
    }
}

impl Link {
    fn send(&mut self, block: usize, number: u64) -> io::Result<()> {
        let data = stamped(block as u64, number);
        let offset = block as u64 * u64::from(BLOCK_BYTES);
        let cookie = self.client.send(Command::Write, 0, offset, BLOCK_BYTES, &data)?;
        self.owed.insert(cookie, block);
        Ok(())
    }
}

/// A kernel that writes on a thread of its own.
#[derive(Debug)]
pub struct Mounted {
    thread: JoinHandle<Kernel>,
    acknowledged: Arc<AtomicU64>,
    enough: Arc<AtomicBool>,
}

impl Mounted {
    pub fn start(mut kernel: Kernel) -> Self {
        let (acknowledged, enough) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, done) = (Arc::clone(&acknowledged), Arc::clone(&enough));
        let thread = std::thread::spawn(move || {
            kernel.write(&counted, &done);
            kernel
        });
        Self { thread, acknowledged, enough }
    }

    /// Waits until `count` more writes are acknowledged.
    #[track_caller]
    pub fn await_writes(&self, count: u64) {
        let before = self.acknowledged.load(Ordering::Relaxed);
        wait::until("writes are acknowledged", RECOVERY_MAX, || {
            assert!(!self.thread.is_finished(), "the guest has seen an error");
            (self.acknowledged.load(Ordering::Relaxed) >= before + count).then_some(())
        });
    }

    /// Everything in flight is answered, and nothing more is written.
    #[track_caller]
    pub fn settle(self) -> Kernel {
        self.enough.store(true, Ordering::Relaxed);
        joined(self.thread)
    }
}
