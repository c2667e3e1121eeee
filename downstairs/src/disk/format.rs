//! The header and the records of the activity log, as pages.
//!
//! Invariants:
//! - A page is believed only if its magic, its checksum over all 4096 bytes and, for a log record, its number fit.
//! - Of two believed copies the one with the higher write counter is in force.
//! - Every field has one constant offset, built from the field before it; the rest of a page is zero.
//!
//! Left to others: where the pages lie ([`super::layout`]) and in which order they are written ([`super::region`]).

use newel_protocol::wire::Membership;
use newel_protocol::{ExtentId, Generation, Version};
use thiserror::Error;
use uuid::Uuid;

use super::layout::{Layout, LayoutError, PAGE_BYTES};

pub type Page = [u8; PAGE_BYTES];

const MAGIC: [u8; 8] = *b"NEWELRGN";
const LOG_MAGIC: [u8; 8] = *b"NEWELLOG";
pub const FORMAT_VERSION: u32 = 1;

const MAGIC_AT: usize = 0;
const FORMAT_AT: usize = MAGIC_AT + 8;
const CRC_AT: usize = FORMAT_AT + 4;
const COUNTER_AT: usize = CRC_AT + 4;
const REGION_AT: usize = COUNTER_AT + 8;
const VOLUME_AT: usize = REGION_AT + 16;
const BLOCKS_AT: usize = VOLUME_AT + 16;
const LOG_OFFSET_AT: usize = BLOCKS_AT + 8;
const LOG_SLOTS_AT: usize = LOG_OFFSET_AT + 8;
const CLEAN_AT: usize = LOG_SLOTS_AT + 4;
const CONTEXTS_OFFSET_AT: usize = CLEAN_AT + 4;
const DATA_OFFSET_AT: usize = CONTEXTS_OFFSET_AT + 8;
const PROMISED_AT: usize = DATA_OFFSET_AT + 8;
const LAST_ACTIVE_AT: usize = PROMISED_AT + 4;
const PROMISED_TO_AT: usize = LAST_ACTIVE_AT + 4;
const FLUSHED_GENERATION_AT: usize = PROMISED_TO_AT + 16;
const EPOCH_AT: usize = FLUSHED_GENERATION_AT + 4;
const FLUSHED_SEQUENCE_AT: usize = EPOCH_AT + 4;
const MEMBERS_AT: usize = FLUSHED_SEQUENCE_AT + 8;
const BOOT_ID_AT: usize = MEMBERS_AT + 3 * 16;
const COPY_EPOCH_AT: usize = BOOT_ID_AT + 16;
const COPYING_AT: usize = COPY_EPOCH_AT + 4;
const LOST_POWER_AT: usize = COPYING_AT + 4;
const ALONE_AT: usize = LOST_POWER_AT + 4;
const HEADER_END: usize = ALONE_AT + 4;
const _: () = assert!(HEADER_END == 216 && HEADER_END <= PAGE_BYTES);

/// Entries of one group cost one durable write.
pub const LOG_SLOTS_PER_RECORD: u32 = 512;
/// In a slot: no extent.
const EMPTY_SLOT: u32 = u32::MAX;

const LOG_INDEX_AT: usize = MAGIC_AT + 8;
const LOG_CRC_AT: usize = LOG_INDEX_AT + 4;
const LOG_COUNTER_AT: usize = LOG_CRC_AT + 4;
const LOG_SLOTS_START_AT: usize = LOG_COUNTER_AT + 8;
const LOG_END: usize = LOG_SLOTS_START_AT + LOG_SLOTS_PER_RECORD as usize * 4;
const _: () = assert!(LOG_CRC_AT == CRC_AT && LOG_END <= PAGE_BYTES);

/// Why a page isn't believed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PageFault {
    #[error("magic {found:02x?} instead of {expected:02x?}")]
    Magic { expected: [u8; 8], found: [u8; 8] },
    #[error("checksum {found:#010x} instead of {expected:#010x}")]
    Checksum { expected: u32, found: u32 },
    #[error("format version {found}, this program knows {FORMAT_VERSION}")]
    Format { found: u32 },
    #[error("record number {found} in the place of record {expected}")]
    Record { expected: u32, found: u32 },
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("{what} at byte {found}, but {blocks} blocks put it at {expected}")]
    Offset { what: &'static str, expected: u64, found: u64, blocks: u64 },
    #[error("cannot be read: {message}")]
    Unreadable { message: String },
}

/// Everything of a region that is neither a block nor the activity log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// How often the header was written: decides which copy is in force.
    pub counter: u64,
    pub region: Uuid,
    /// Nil if the region belongs to no volume yet.
    pub volume: Uuid,
    pub layout: Layout,
    pub promised: Generation,
    pub promised_to: Uuid,
    pub last_active: Generation,
    pub membership: Membership,
    /// Every write at or below this that this region received as a write is durable.
    pub flushed: Version,
    /// The boot of the host under which the region was opened last.
    pub boot_id: Uuid,
    /// Closed by the process that opened it last, with everything durable and the log empty.
    pub clean: bool,
    /// Counts the times that copying began.
    pub copy_epoch: u32,
    /// Blocks copied in this epoch may not be durable yet.
    pub copying: bool,
    /// The host went down while this region was in use, and no activation has come to terms with that yet. It outlives
    /// restarts, which would otherwise hide it.
    pub lost_power: bool,
}

impl Header {
    pub fn encode(&self) -> Page {
        let mut page = [0; PAGE_BYTES];
        put(&mut page, MAGIC_AT, &MAGIC);
        put(&mut page, FORMAT_AT, &FORMAT_VERSION.to_le_bytes());
        put(&mut page, COUNTER_AT, &self.counter.to_le_bytes());
        put(&mut page, REGION_AT, self.region.as_bytes());
        put(&mut page, VOLUME_AT, self.volume.as_bytes());
        put(&mut page, BLOCKS_AT, &self.layout.blocks.to_le_bytes());
        put(&mut page, LOG_OFFSET_AT, &super::layout::LOG_OFFSET.to_le_bytes());
        put(&mut page, LOG_SLOTS_AT, &self.layout.log_slots.to_le_bytes());
        put(&mut page, CLEAN_AT, &u32::from(self.clean).to_le_bytes());
        put(&mut page, CONTEXTS_OFFSET_AT, &self.layout.contexts_offset.to_le_bytes());
        put(&mut page, DATA_OFFSET_AT, &self.layout.data_offset.to_le_bytes());
        put(&mut page, PROMISED_AT, &self.promised.0.to_le_bytes());
        put(&mut page, LAST_ACTIVE_AT, &self.last_active.0.to_le_bytes());
        put(&mut page, PROMISED_TO_AT, self.promised_to.as_bytes());
        put(&mut page, FLUSHED_GENERATION_AT, &self.flushed.generation.0.to_le_bytes());
        put(&mut page, EPOCH_AT, &self.membership.epoch.to_le_bytes());
        put(&mut page, FLUSHED_SEQUENCE_AT, &self.flushed.sequence.to_le_bytes());
        for (index, member) in self.membership.regions.iter().enumerate() {
            put(&mut page, MEMBERS_AT + 16 * index, member.as_bytes());
        }
        put(&mut page, BOOT_ID_AT, self.boot_id.as_bytes());
        put(&mut page, COPY_EPOCH_AT, &self.copy_epoch.to_le_bytes());
        put(&mut page, COPYING_AT, &u32::from(self.copying).to_le_bytes());
        put(&mut page, LOST_POWER_AT, &u32::from(self.lost_power).to_le_bytes());
        put(&mut page, ALONE_AT, &u32::from(self.membership.alone).to_le_bytes());
        seal(&mut page);
        page
    }

    pub fn decode(page: &Page) -> Result<Self, PageFault> {
        open_page(page, MAGIC)?;
        let format = get_u32(page, FORMAT_AT);
        if format != FORMAT_VERSION {
            return Err(PageFault::Format { found: format });
        }
        let blocks = get_u64(page, BLOCKS_AT);
        let layout = Layout::new(blocks, get_u32(page, LOG_SLOTS_AT))?;
        let places = [
            ("the activity log", super::layout::LOG_OFFSET, LOG_OFFSET_AT),
            ("the context table", layout.contexts_offset, CONTEXTS_OFFSET_AT),
            ("the data", layout.data_offset, DATA_OFFSET_AT),
        ];
        for (what, expected, at) in places {
            let found = get_u64(page, at);
            if found != expected {
                return Err(PageFault::Offset { what, expected, found, blocks });
            }
        }
        Ok(Self {
            counter: get_u64(page, COUNTER_AT),
            region: get_uuid(page, REGION_AT),
            volume: get_uuid(page, VOLUME_AT),
            layout,
            promised: Generation(get_u32(page, PROMISED_AT)),
            promised_to: get_uuid(page, PROMISED_TO_AT),
            last_active: Generation(get_u32(page, LAST_ACTIVE_AT)),
            membership: Membership {
                epoch: get_u32(page, EPOCH_AT),
                regions: [
                    get_uuid(page, MEMBERS_AT),
                    get_uuid(page, MEMBERS_AT + 16),
                    get_uuid(page, MEMBERS_AT + 32),
                ],
                alone: get_u32(page, ALONE_AT) == 1,
            },
            flushed: Version::new(
                Generation(get_u32(page, FLUSHED_GENERATION_AT)),
                get_u64(page, FLUSHED_SEQUENCE_AT),
            ),
            boot_id: get_uuid(page, BOOT_ID_AT),
            clean: get_u32(page, CLEAN_AT) == 1,
            copy_epoch: get_u32(page, COPY_EPOCH_AT),
            copying: get_u32(page, COPYING_AT) == 1,
            lost_power: get_u32(page, LOST_POWER_AT) == 1,
        })
    }
}

/// One group of slots of the activity log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecord {
    pub index: u32,
    pub counter: u64,
    /// Always [`LOG_SLOTS_PER_RECORD`] long.
    pub slots: Vec<Option<ExtentId>>,
}

impl LogRecord {
    pub fn empty(index: u32) -> Self {
        Self { index, counter: 0, slots: vec![None; LOG_SLOTS_PER_RECORD as usize] }
    }

    pub fn encode(&self) -> Page {
        let mut page = [0; PAGE_BYTES];
        put(&mut page, MAGIC_AT, &LOG_MAGIC);
        put(&mut page, LOG_INDEX_AT, &self.index.to_le_bytes());
        put(&mut page, LOG_COUNTER_AT, &self.counter.to_le_bytes());
        for (position, slot) in self.slots.iter().take(LOG_SLOTS_PER_RECORD as usize).enumerate() {
            let raw = slot.map_or(EMPTY_SLOT, |extent| extent.0);
            put(&mut page, LOG_SLOTS_START_AT + 4 * position, &raw.to_le_bytes());
        }
        seal(&mut page);
        page
    }

    pub fn decode(index: u32, page: &Page) -> Result<Self, PageFault> {
        open_page(page, LOG_MAGIC)?;
        let found = get_u32(page, LOG_INDEX_AT);
        if found != index {
            return Err(PageFault::Record { expected: index, found });
        }
        let slots = (0..LOG_SLOTS_PER_RECORD as usize)
            .map(|position| get_u32(page, LOG_SLOTS_START_AT + 4 * position))
            .map(|raw| (raw != EMPTY_SLOT).then_some(ExtentId(raw)))
            .collect();
        Ok(Self { index, counter: get_u64(page, LOG_COUNTER_AT), slots })
    }
}

/// The checksum covers the whole page with its own field zero, so both kinds of page keep it at the same place.
fn seal(page: &mut Page) {
    put(page, CRC_AT, &[0; 4]);
    let crc = crc32c::crc32c(page);
    put(page, CRC_AT, &crc.to_le_bytes());
}

fn open_page(page: &Page, magic: [u8; 8]) -> Result<(), PageFault> {
    let found = page.first_chunk::<8>().copied().unwrap_or_default();
    if found != magic {
        return Err(PageFault::Magic { expected: magic, found });
    }
    let found = get_u32(page, CRC_AT);
    let mut sealed = *page;
    seal(&mut sealed);
    let expected = get_u32(&sealed, CRC_AT);
    if found != expected {
        return Err(PageFault::Checksum { expected, found });
    }
    Ok(())
}

fn put(page: &mut Page, at: usize, bytes: &[u8]) {
    if let Some(place) = page.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

fn get<const N: usize>(page: &Page, at: usize) -> [u8; N] {
    page.get(at..).and_then(|rest| rest.first_chunk::<N>()).copied().unwrap_or([0; N])
}

fn get_u32(page: &Page, at: usize) -> u32 {
    u32::from_le_bytes(get(page, at))
}

fn get_u64(page: &Page, at: usize) -> u64 {
    u64::from_le_bytes(get(page, at))
}

fn get_uuid(page: &Page, at: usize) -> Uuid {
    Uuid::from_bytes(get(page, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn sample() -> Header {
        Header {
            counter: 3,
            region: Uuid::from_u128(1),
            volume: Uuid::from_u128(2),
            layout: Layout::new(2048, 512).unwrap(),
            promised: Generation(7),
            promised_to: Uuid::from_u128(3),
            last_active: Generation(6),
            membership: Membership { epoch: 9, regions: [1, 2, 3].map(Uuid::from_u128), alone: true },
            flushed: Version::new(Generation(6), 1234),
            boot_id: Uuid::from_u128(4),
            clean: true,
            copy_epoch: 0x0102,
            copying: true,
            lost_power: true,
        }
    }

    #[test]
    fn a_header_comes_back() {
        assert_eq!(Header::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn golden_header() {
        let page = sample().encode();
        assert_eq!(&page[..12], b"NEWELRGN\x01\0\0\0");
        assert_eq!(page[16..24], 3_u64.to_le_bytes());
        assert_eq!(page[56..64], 2048_u64.to_le_bytes());
        assert_eq!(page[72..80], [0, 2, 0, 0, 1, 0, 0, 0]);
        assert_eq!(page[96..104], [7, 0, 0, 0, 6, 0, 0, 0]);
        assert_eq!(page[120..136], [6, 0, 0, 0, 9, 0, 0, 0, 0xd2, 4, 0, 0, 0, 0, 0, 0]);
        assert_eq!(page[199], 4);
        assert_eq!(page[200..208], [2, 1, 0, 0, 1, 0, 0, 0]);
        assert_eq!(page[208..212], [1, 0, 0, 0]);
        assert!(page[216..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn every_damaged_byte_is_seen() {
        let good = sample().encode();
        for at in 0..PAGE_BYTES {
            let mut page = good;
            page[at] ^= 0x10;
            assert!(Header::decode(&page).is_err(), "byte {at}");
        }
    }

    #[test]
    fn faults_say_what_is_wrong() {
        let check = |change: &dyn Fn(&mut Page), text: &str| {
            let mut page = sample().encode();
            change(&mut page);
            seal(&mut page);
            let fault = Header::decode(&page).expect_err(text).to_string();
            assert!(fault.contains(text), "{fault}");
        };
        check(&|page| page[0] = b'X', "magic");
        check(&|page| page[FORMAT_AT] = 2, "format version 2");
        check(&|page| page[DATA_OFFSET_AT] = 1, "the data at byte");
        check(&|page| page[BLOCKS_AT..BLOCKS_AT + 8].fill(0xff), "a region needs between");
        check(&|page| page[LOG_SLOTS_AT] = 3, "multiple of 512");
    }

    #[test]
    fn a_log_record_comes_back_only_in_its_place() {
        let mut record = LogRecord::empty(1);
        record.counter = 5;
        record.slots[0] = Some(ExtentId(0));
        record.slots[511] = Some(ExtentId(77));
        let page = record.encode();
        assert_eq!(LogRecord::decode(1, &page), Ok(record));
        assert_eq!(LogRecord::decode(0, &page), Err(PageFault::Record { expected: 0, found: 1 }));
        let mut torn = page;
        torn[512..1024].fill(0);
        assert!(matches!(LogRecord::decode(1, &torn), Err(PageFault::Checksum { .. })));
    }
}
