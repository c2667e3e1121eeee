//! Guests: several connections with some requests each, that behave like a kernel's NBD client. They reconnect and send again
//! what was not answered; a client that dies instead takes its requests with it.
//!
//! Requests overlap on few blocks on purpose, at borders of blocks and extents.

use bytes::Bytes;
use newel_protocol::BLOCK_BYTES;
use newel_upstairs::core::api::{GuestError, GuestOp, GuestReply, Segment};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use super::history::{Access, Action, History, Nanos};

pub const SECTOR: u64 = 512;
const PER_BLOCK: u64 = BLOCK_BYTES as u64 / SECTOR;
/// First and last+1 block of each hot area: two across extents' borders, one at the volume's end.
const AREAS: [(u64, u64); 3] = [(0, 4), (1021, 1027), (2046, 2050)];

/// The sectors that guests use, numbered through.
pub fn sectors() -> usize {
    AREAS.iter().map(|&(from, to)| usize::try_from((to - from) * PER_BLOCK).unwrap_or(0)).sum()
}

pub fn blocks() -> impl Iterator<Item = u64> {
    AREAS.into_iter().flat_map(|(from, to)| from..to)
}

/// The number of the sector at this offset.
fn index_of(offset: u64) -> usize {
    let mut before = 0;
    for (from, to) in AREAS {
        let (start, end) = (from * BLOCK_BYTES as u64, to * BLOCK_BYTES as u64);
        if (start..end).contains(&offset) {
            return before + usize::try_from((offset - start) / SECTOR).unwrap_or(0);
        }
        before += usize::try_from((to - from) * PER_BLOCK).unwrap_or(0);
    }
    unreachable!("guests stay in their areas")
}

/// The block of a sector, for messages.
pub fn block_of(sector: usize) -> u64 {
    let mut left = sector as u64;
    for (from, to) in AREAS {
        let count = (to - from) * PER_BLOCK;
        if left < count {
            return from + left / PER_BLOCK;
        }
        left -= count;
    }
    unreachable!("no such sector")
}

#[derive(Clone, Debug)]
pub enum Kind {
    Read,
    Write { value: u32, fua: bool },
    Zero { fua: bool, allocate: bool },
    Trim,
    Flush,
}

#[derive(Clone, Debug)]
pub struct Request {
    pub number: u64,
    pub kind: Kind,
    pub offset: u64,
    pub length: u64,
    pub start: Nanos,
}

impl Request {
    pub fn random(number: u64, start: Nanos, rng: &mut ChaCha8Rng) -> Self {
        let (from, to) = AREAS[rng.random_range(0..AREAS.len())];
        let sectors = (to - from) * PER_BLOCK;
        let aligned = rng.random_bool(0.5);
        let (at, length) = if aligned {
            let block = rng.random_range(0..to - from);
            let count = rng.random_range(1..=(to - from - block).min(3));
            (block * PER_BLOCK, count * PER_BLOCK)
        } else {
            let at = rng.random_range(0..sectors);
            (at, rng.random_range(1..=(sectors - at).min(20)))
        };
        let value = u32::try_from(number).unwrap_or(u32::MAX);
        let kind = match rng.random_range(0..20) {
            0..9 => Kind::Write { value, fua: rng.random_bool(0.1) },
            9..15 => Kind::Read,
            15 => Kind::Zero { fua: rng.random_bool(0.1), allocate: rng.random_bool(0.3) },
            16 => Kind::Trim,
            _ => Kind::Flush,
        };
        Self { number, kind, offset: from * BLOCK_BYTES as u64 + at * SECTOR, length: length * SECTOR, start }
    }

    /// Reads all of one block.
    pub fn read_block(number: u64, block: u64, start: Nanos) -> Self {
        let offset = block * BLOCK_BYTES as u64;
        Self { number, kind: Kind::Read, offset, length: BLOCK_BYTES as u64, start }
    }

    pub fn op(&self) -> GuestOp {
        let (offset, length) = (self.offset, self.length);
        match &self.kind {
            Kind::Read => GuestOp::Read { offset, length: u32::try_from(length).unwrap_or(0) },
            Kind::Write { value, fua } => {
                let words = usize::try_from(length / 4).unwrap_or(0);
                let data: Vec<u8> = value.to_le_bytes().repeat(words);
                GuestOp::Write { offset, data: Bytes::from(data), fua: *fua }
            }
            Kind::Zero { fua, allocate } => GuestOp::Zero { offset, length, allocate: *allocate, fua: *fua },
            Kind::Trim => GuestOp::Trim { offset, length, fua: false },
            Kind::Flush => GuestOp::Flush,
        }
    }

    /// The sectors that it changes or reads.
    fn touched(&self) -> std::ops::Range<u64> {
        let (start, end) = (self.offset, self.offset + self.length);
        match self.kind {
            Kind::Trim => {
                let block = BLOCK_BYTES as u64;
                let (start, end) = (start.div_ceil(block) * block, end / block * block);
                start..end.max(start)
            }
            Kind::Flush => 0..0,
            Kind::Read | Kind::Write { .. } | Kind::Zero { .. } => start..end,
        }
    }

    /// Notes in the history that a change has begun (it may take effect from now on).
    pub fn note_start(&self, up: usize, history: &mut History) {
        let (value, fua) = match self.kind {
            Kind::Write { value, fua } => (value, fua),
            Kind::Zero { fua, .. } => (0, fua),
            Kind::Trim => (0, false),
            Kind::Read | Kind::Flush => return,
        };
        for offset in self.touched().step_by(usize::try_from(SECTOR).unwrap_or(512)) {
            history.accesses[index_of(offset)].push(Access {
                action: Action::Write(value),
                start: self.start,
                end: None,
                given_up: None,
                guest_op: self.number,
                by: up,
                fua,
            });
        }
    }

    /// Notes the answer. `Err` is a violation that needs no history to see.
    pub fn note_end(
        &self,
        reply: &GuestReply,
        up: usize,
        now: Nanos,
        damage: bool,
        history: &mut History,
    ) -> Result<Answered, String> {
        match (reply, &self.kind) {
            (GuestReply::Failed(GuestError::ShuttingDown | GuestError::QuorumLost), _) => {
                return Ok(Answered::Again);
            }
            (GuestReply::Failed(GuestError::Io), Kind::Read) if damage => {}
            // A read-modify-write that could not read.
            (GuestReply::Failed(GuestError::Io), Kind::Write { .. } | Kind::Zero { .. }) if damage => {}
            (GuestReply::Failed(error), _) => {
                return Err(format!("request {} failed: {error:?}", self.number));
            }
            (GuestReply::Data(segments), Kind::Read) => self.note_read(segments, up, now, history)?,
            (GuestReply::Done, Kind::Flush) => history.flushes.push((self.start, now)),
            (GuestReply::Done, Kind::Write { .. } | Kind::Zero { .. } | Kind::Trim) => {
                self.note_done(now, history)
            }
            (reply, kind) => {
                return Err(format!("request {} ({kind:?}) was answered {reply:?}", self.number));
            }
        }
        Ok(Answered::Done)
    }

    /// This attempt will not be answered: its upstairs is gone, or has said that it won't.
    pub fn note_given_up(&self, now: Nanos, up: usize, history: &mut History) {
        for offset in self.touched().step_by(512) {
            let attempts = history.accesses[index_of(offset)].iter_mut().rev();
            if let Some(last) = attempts.into_iter().find(|a| a.guest_op == self.number && a.end.is_none()) {
                last.given_up = Some((now, up));
            }
        }
    }

    fn note_done(&self, now: Nanos, history: &mut History) {
        for offset in self.touched().step_by(usize::try_from(SECTOR).unwrap_or(512)) {
            let accesses = &mut history.accesses[index_of(offset)];
            if let Some(access) = accesses.iter_mut().rev().find(|access| access.guest_op == self.number) {
                access.end = Some(now);
            }
        }
    }

    fn note_read(
        &self,
        segments: &[Segment],
        up: usize,
        now: Nanos,
        history: &mut History,
    ) -> Result<(), String> {
        let mut bytes = Vec::new();
        for segment in segments {
            match segment {
                Segment::Data(data) => bytes.extend_from_slice(data),
                Segment::Zeros(length) => bytes.resize(bytes.len() + *length as usize, 0),
            }
        }
        if bytes.len() as u64 != self.length {
            return Err(format!(
                "read {} of {} bytes was answered with {}",
                self.number,
                self.length,
                bytes.len()
            ));
        }
        for (sector, offset) in bytes.chunks_exact(512).zip(self.touched().step_by(512)) {
            let word = u32::from_le_bytes([sector[0], sector[1], sector[2], sector[3]]);
            if sector.chunks_exact(4).any(|other| other != word.to_le_bytes()) {
                return Err(format!("read {} shows a torn sector at {offset}", self.number));
            }
            history.accesses[index_of(offset)].push(Access {
                action: Action::Read(word),
                start: self.start,
                end: Some(now),
                given_up: None,
                guest_op: self.number,
                by: up,
                fua: false,
            });
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    Done,
    /// Not carried out, or not known to be: send it again.
    Again,
}
