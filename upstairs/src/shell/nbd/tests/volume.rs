//! A volume in memory, with the handles that tests turn.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use bytes::Bytes;

use crate::core::api::{GuestError, GuestId, GuestOp, GuestReply, Segment, StatusExtent, Time};
use crate::shell::guest::{ConnKey, GuestSink, Volume};

const BLOCK: u64 = 4096;

#[derive(Default)]
pub(super) struct Memory {
    size: u64,
    /// Blocks with data; the others read as zeros.
    blocks: RefCell<BTreeMap<u64, Vec<u8>>>,
    sinks: RefCell<BTreeMap<u32, Rc<dyn GuestSink>>>,
    queue: RefCell<VecDeque<(GuestId, GuestOp)>>,
    next_key: Cell<u32>,
    pub(super) kicks: Cell<usize>,
    pub(super) opened: Cell<usize>,
    pub(super) executed: Cell<usize>,
    /// Requests are kept until `release`.
    pub(super) hold: Cell<bool>,
    pub(super) full: Cell<bool>,
    pub(super) fail: Cell<Option<GuestError>>,
}

impl Memory {
    pub(super) fn new(size: u64) -> Rc<Self> {
        Rc::new(Self { size, ..Self::default() })
    }

    pub(super) fn held(&self) -> usize {
        self.queue.borrow().len()
    }

    pub(super) fn attached(&self) -> usize {
        self.sinks.borrow().len()
    }

    /// Answers everything, the youngest first: nobody may rely on an order. A request counts as executed in the order it
    /// came.
    pub(super) fn release(&self) {
        let requests: Vec<_> = self.queue.borrow_mut().drain(..).collect();
        let replies: Vec<_> = requests.into_iter().map(|(guest, op)| (guest, self.execute(op))).collect();
        let mut woken = BTreeSet::new();
        for (guest, reply) in replies.into_iter().rev() {
            let (key, slot) =
                (u32::try_from(guest.0 >> 32).unwrap(), u32::try_from(guest.0 & 0xffff_ffff).unwrap());
            if let Some(sink) = self.sinks.borrow().get(&key) {
                sink.reply(slot, reply);
                woken.insert(key);
            }
        }
        woken.into_iter().for_each(|key| self.sinks.borrow()[&key].wake());
    }

    pub(super) fn set_full(&self, full: bool) {
        self.full.set(full);
        self.sinks.borrow().values().for_each(|sink| sink.wake());
    }

    fn execute(&self, op: GuestOp) -> GuestReply {
        self.executed.set(self.executed.get() + 1);
        if let Some(error) = self.fail.get() {
            return GuestReply::Failed(error);
        }
        match op {
            GuestOp::Read { offset, length } => {
                return GuestReply::Data(self.read(offset, u64::from(length)));
            }
            GuestOp::Write { offset, data, .. } => self.write(offset, &data),
            GuestOp::Zero { offset, length, allocate, .. } => self.zero(offset, length, allocate),
            GuestOp::Trim { offset, length, .. } => {
                let (first, end) = (offset.div_ceil(BLOCK), (offset + length) / BLOCK);
                if first < end {
                    self.blocks.borrow_mut().retain(|block, _| !(first..end).contains(block));
                }
            }
            GuestOp::Flush => {}
            GuestOp::BlockStatus { offset, length } => {
                return GuestReply::Status(self.status(offset, length));
            }
        }
        GuestReply::Done
    }

    /// Every block the range touches: its number, and the part inside.
    fn parts(offset: u64, length: u64) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
        let end = offset + length;
        (offset / BLOCK..end.div_ceil(BLOCK)).map(move |block| {
            let start = offset.max(block * BLOCK) - block * BLOCK;
            let stop = end.min((block + 1) * BLOCK) - block * BLOCK;
            (block, usize::try_from(start).unwrap()..usize::try_from(stop).unwrap())
        })
    }

    fn read(&self, offset: u64, length: u64) -> Vec<Segment> {
        let blocks = self.blocks.borrow();
        Self::parts(offset, length)
            .map(|(block, part)| match blocks.get(&block) {
                Some(data) => Segment::Data(Bytes::copy_from_slice(&data[part])),
                None => Segment::Zeros(u32::try_from(part.len()).unwrap()),
            })
            .collect()
    }

    fn write(&self, offset: u64, mut data: &[u8]) {
        let mut blocks = self.blocks.borrow_mut();
        for (block, part) in Self::parts(offset, data.len() as u64) {
            let (here, rest) = data.split_at(part.len());
            data = rest;
            blocks.entry(block).or_insert_with(|| vec![0; 4096])[part].copy_from_slice(here);
        }
    }

    fn zero(&self, offset: u64, length: u64, allocate: bool) {
        let mut blocks = self.blocks.borrow_mut();
        for (block, part) in Self::parts(offset, length) {
            if part.len() == 4096 && !allocate {
                blocks.remove(&block);
            } else if allocate || blocks.contains_key(&block) {
                blocks.entry(block).or_insert_with(|| vec![0; 4096])[part].fill(0);
            }
        }
    }

    fn status(&self, offset: u64, length: u64) -> Vec<StatusExtent> {
        let blocks = self.blocks.borrow();
        Self::parts(offset, length.min(64 << 20))
            .map(|(block, part)| StatusExtent {
                length: part.len() as u64,
                hole: !blocks.contains_key(&block),
            })
            .collect()
    }
}

impl Volume for Memory {
    fn size_bytes(&self) -> u64 {
        self.size
    }

    fn open(&self, sink: Rc<dyn GuestSink>) -> ConnKey {
        self.opened.set(self.opened.get() + 1);
        let key = self.next_key.replace(self.next_key.get() + 1);
        self.sinks.borrow_mut().insert(key, sink);
        ConnKey(key)
    }

    fn close(&self, key: ConnKey) {
        assert!(self.sinks.borrow_mut().remove(&key.0).is_some(), "closed once");
    }

    fn now(&self) -> Time {
        Time(0)
    }

    fn submit(&self, guest: GuestId, op: GuestOp, _: Time) {
        self.queue.borrow_mut().push_back((guest, op));
    }

    fn kick(&self) {
        self.kicks.set(self.kicks.get() + 1);
        if !self.hold.get() {
            self.release();
        }
    }

    fn room(&self) -> bool {
        !self.full.get()
    }
}
