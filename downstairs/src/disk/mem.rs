//! A medium in memory for tests: a live image, a durable one, and what lies between them.

use std::io;
use std::sync::Mutex;

use super::lock;
use super::storage::Storage;

/// What a power cut may tear.
const SECTOR_BYTES: usize = 512;

#[derive(Debug)]
pub(crate) struct MemStorage {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    live: Vec<u8>,
    durable: Vec<u8>,
    /// Writes since the last sync, in order.
    pending: Vec<(usize, Vec<u8>)>,
    /// Operations until the cut; `None` never.
    steps_left: Option<u64>,
    /// Direct reads and writes of these bytes fail.
    bad: Option<std::ops::Range<u64>>,
    fail_sync: bool,
}

impl MemStorage {
    pub(crate) fn new(bytes: usize) -> Self {
        Self::from_image(vec![0; bytes])
    }

    fn from_image(image: Vec<u8>) -> Self {
        let state = State { live: image.clone(), durable: image, ..State::default() };
        Self { state: Mutex::new(state) }
    }

    pub(crate) fn cut_after(&self, steps: u64) {
        lock(&self.state).steps_left = Some(steps);
    }

    pub(crate) fn is_cut(&self) -> bool {
        lock(&self.state).steps_left == Some(0)
    }

    pub(crate) fn set_bad(&self, bad: Option<std::ops::Range<u64>>) {
        lock(&self.state).bad = bad;
    }

    pub(crate) fn fail_sync(&self) {
        lock(&self.state).fail_sync = true;
    }

    pub(crate) fn corrupt(&self, at: u64) {
        let at = usize::try_from(at).unwrap();
        let state = &mut *lock(&self.state);
        state.live[at] ^= 0x40;
        state.durable[at] ^= 0x40;
    }

    /// The process died: everything it wrote is there.
    pub(crate) fn killed(&self) -> Self {
        Self::from_image(lock(&self.state).live.clone())
    }

    /// Power was cut: of every sector any of the writes since the last sync may be the last that got there.
    pub(crate) fn power_cut(&self, mut random: impl FnMut() -> u64) -> Self {
        let state = lock(&self.state);
        let mut image = state.durable.clone();
        // Sometimes nothing, sometimes everything, mostly a mixture.
        let odds = [0, 1, 2, 3, 4][usize::try_from(random() % 5).unwrap()];
        for (offset, bytes) in &state.pending {
            let whole = random() % 4 < odds;
            let tears = random().is_multiple_of(4);
            for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                let lands = if tears { random() % 4 < odds } else { whole };
                if lands {
                    let at = offset + index * SECTOR_BYTES;
                    image[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        Self::from_image(image)
    }

    fn write(&self, offset: u64, bytes: &[u8], durable: bool) -> io::Result<()> {
        let state = &mut *lock(&self.state);
        let at = usize::try_from(offset).unwrap();
        if state.steps_left == Some(0) {
            return Err(io::Error::other("power is off"));
        }
        state.live[at..at + bytes.len()].copy_from_slice(bytes);
        state.pending.push((at, bytes.to_vec()));
        step(state)?;
        if durable {
            state.durable[at..at + bytes.len()].copy_from_slice(bytes);
            // What was pending for these pages is overtaken; other writes are untouched.
            state.pending.retain(|(start, old)| *start + old.len() <= at || at + bytes.len() <= *start);
        }
        Ok(())
    }
}

/// The operation that meets the cut has reached the medium, or part of it has, but was not seen to end.
fn step(state: &mut State) -> io::Result<()> {
    if let Some(left) = &mut state.steps_left {
        *left = left.saturating_sub(1);
        if *left == 0 {
            return Err(io::Error::other("power was cut"));
        }
    }
    Ok(())
}

impl Storage for MemStorage {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(lock(&self.state).live.len() as u64)
    }

    fn read_cached(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let at = usize::try_from(offset).unwrap();
        let state = lock(&self.state);
        let Some(bytes) = state.live.get(at..at + into.len()) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        into.copy_from_slice(bytes);
        Ok(())
    }

    fn write_cached(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write(offset, bytes, false)
    }

    fn write_durable(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write(offset, bytes, true)
    }

    fn read_direct(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let end = offset + into.len() as u64;
        if lock(&self.state).bad.as_ref().is_some_and(|bad| bad.start < end && offset < bad.end) {
            return Err(io::Error::other("medium error"));
        }
        self.read_cached(offset, into)
    }

    fn write_direct(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset + bytes.len() as u64;
        if lock(&self.state).bad.as_ref().is_some_and(|bad| bad.start < end && offset < bad.end) {
            return Err(io::Error::other("medium error"));
        }
        self.write(offset, bytes, false)
    }

    fn sync(&self) -> io::Result<()> {
        let state = &mut *lock(&self.state);
        if state.fail_sync || state.steps_left == Some(0) {
            return Err(io::Error::other("sync failed"));
        }
        step(state)?;
        state.durable.clone_from(&state.live);
        state.pending.clear();
        Ok(())
    }

    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.write(offset, &vec![0; usize::try_from(bytes).unwrap()], false)
    }

    fn is_hole(&self, _offset: u64, _bytes: u64) -> bool {
        false
    }
}
