//! What rot does to a region file, by the layout in `downstairs/README.md`.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const PAGE_BYTES: u64 = 4096;
const HEADER_BYTES: usize = 4096;
const HEADERS: [u64; 2] = [0, 65_536];
const CONTEXTS_OFFSET_AT: usize = 80;
const DATA_OFFSET_AT: usize = 88;
/// Contexts in a page of the table.
pub const PAGE_CONTEXTS: u64 = 128;

/// A region file to be damaged, in use or not.
#[derive(Debug)]
pub struct RegionFile {
    file: File,
    contexts: u64,
    data: u64,
}

impl RegionFile {
    #[track_caller]
    pub fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut header = [0; HEADER_BYTES];
        file.read_exact_at(&mut header, HEADERS[0]).expect("a region has a header");
        assert_eq!(&header[..8], b"NEWELRGN", "{}", path.display());
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
        Self { contexts: number(CONTEXTS_OFFSET_AT), data: number(DATA_OFFSET_AT), file }
    }

    /// Turns over the bits of one byte of a block's data.
    #[track_caller]
    pub fn flip_data(&self, block: u64, at: u64) {
        self.flip(self.data + block * PAGE_BYTES + at);
    }

    /// Spoils one copy of the header.
    #[track_caller]
    pub fn damage_header(&self, copy: usize) {
        self.flip(HEADERS[copy] + 100);
    }

    /// Fills a page of the context table, that of the given block, with noise.
    #[track_caller]
    pub fn damage_contexts(&self, block: u64) {
        let page = self.contexts + block / PAGE_CONTEXTS * PAGE_BYTES;
        let noise: Vec<u8> = (0..PAGE_BYTES).map(|at| (at * 7 + at / 32 + 1).to_le_bytes()[0] | 1).collect();
        self.write(page, &noise);
    }

    fn flip(&self, at: u64) {
        let mut byte = [0];
        self.file.read_exact_at(&mut byte, at).expect("the region has that byte");
        self.write(at, &[!byte[0]]);
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).expect("the region is writable");
        self.file.sync_data().expect("the disk is sound");
    }
}
