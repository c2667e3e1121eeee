//! What a dm-log-writes device recorded, and what a loss of power at any moment may have left of it.
//!
//! Invariants:
//! - What a flush covered is all there after it; of what was written since the last flush, each write, or only some sectors of it, may
//!   be there or not. What was written with FUA is there from where it stands.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::pattern::Random;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
/// Of a log that a test makes.
const ENTRIES_MAX: u64 = 1 << 20;
const SECTOR_BYTES: usize = 512;

#[derive(Debug)]
pub struct WriteLog {
    file: File,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    flush: bool,
    fua: bool,
    discard: bool,
    /// Of the device, where it writes.
    offset: u64,
    bytes: usize,
    /// Of the log, where the data are.
    data_at: u64,
    mark: Option<String>,
}

/// How much of what was not flushed a loss of power takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    Nothing,
    /// Each write is there or not.
    Writes,
    /// Each sector of each write is there or not.
    Sectors,
}

impl WriteLog {
    /// Reads the log device of a target that was removed in order.
    pub fn read(path: &Path) -> Self {
        let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut head = [0; 28];
        file.read_exact_at(&mut head, 0).expect("the log has a head");
        let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
        assert_eq!((number(0), number(8)), (MAGIC, 1), "no log of dm-log-writes");
        let count = number(16);
        let sector = u64::from(u32::from_le_bytes(head[24..28].try_into().expect("4 bytes")));
        assert!(count <= ENTRIES_MAX && sector >= 512, "{count} entries, sectors of {sector} bytes");
        let mut log = Self { file, entries: Vec::new() };
        let mut at = sector;
        for _ in 0..count {
            let entry = log.entry(at, sector);
            at += sector;
            if !entry.discard {
                at += entry.bytes as u64;
            }
            log.entries.push(entry);
        }
        log
    }

    fn entry(&self, at: u64, sector: u64) -> Entry {
        let mut head = [0; 32];
        self.file.read_exact_at(&mut head, at).expect("an entry is whole");
        let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
        let (flags, data_bytes) = (number(16), number(24));
        let mark = (flags & MARK != 0).then(|| {
            let mut text = vec![0; usize::try_from(data_bytes.min(sector - 32)).expect("below a sector")];
            self.file.read_exact_at(&mut text, at + 32).expect("a mark is whole");
            String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned()
        });
        Entry {
            flush: flags & FLUSH != 0,
            fua: flags & FUA != 0,
            discard: flags & DISCARD != 0,
            offset: number(0) * sector,
            bytes: usize::try_from(number(8) * sector).expect("a write fits in memory"),
            data_at: at + sector,
            mark,
        }
    }

    /// How many writes, flushes and marks it has.
    pub fn length(&self) -> usize {
        self.entries.len()
    }

    /// Where the marks of this kind stand. (The target sets one of its own at its end.)
    pub fn marks(&self, prefix: &str) -> Vec<usize> {
        let marked = |entry: &Entry| entry.mark.as_ref().is_some_and(|mark| mark.starts_with(prefix));
        (0..self.entries.len()).filter(|&index| marked(&self.entries[index])).collect()
    }

    /// The device after a loss of power right behind entry `last`.
    pub fn image(&self, bytes: usize, last: usize, loss: Loss, seed: u64) -> Vec<u8> {
        let flushed = self.entries[..=last].iter().rposition(|entry| entry.flush).unwrap_or(0);
        self.image_with(bytes, (flushed, last), loss, seed)
    }

    /// The same of a device that takes flushes and keeps nothing for them: since entry `from` all is uncertain.
    pub fn image_of_a_liar(
        &self,
        bytes: usize,
        (from, last): (usize, usize),
        loss: Loss,
        seed: u64,
    ) -> Vec<u8> {
        self.image_with(bytes, (from, last), loss, seed)
    }

    fn image_with(&self, bytes: usize, (flushed, last): (usize, usize), loss: Loss, seed: u64) -> Vec<u8> {
        let mut image = vec![0; bytes];
        let mut random = Random::new(seed);
        for (index, entry) in self.entries[..=last].iter().enumerate() {
            let certain = index < flushed || entry.fua || loss == Loss::Nothing;
            if entry.mark.is_some() || entry.bytes == 0 || entry.discard {
                // Space that was given back may hold anything: here it keeps what it held.
                continue;
            }
            if !certain && loss == Loss::Writes && random.below(2) == 0 {
                continue;
            }
            let mut data = vec![0; entry.bytes];
            self.file.read_exact_at(&mut data, entry.data_at).expect("a write is whole");
            let start = usize::try_from(entry.offset).expect("a small device");
            for (place, sector) in data.chunks(SECTOR_BYTES).enumerate() {
                if certain || loss == Loss::Writes || random.below(2) == 1 {
                    let at = start + place * SECTOR_BYTES;
                    image[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        image
    }
}
