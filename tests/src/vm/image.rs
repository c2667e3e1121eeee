//! The guest's system: built once by `tests/vm/build-guest.sh`, kept outside the tree, and copied for each machine.
//!
//! Invariants:
//! - What is kept goes by a checksum of everything it was built from, so a change builds it anew.
//! - A build that was cut short is not taken for one: the directory gets its name at the end.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use crate::command::{Running, cache_dir};
use crate::skip::skipped;

/// Debian's mirrors may be slow.
const BUILD_WITHIN: Duration = Duration::from_secs(1200);

/// In `tests/vm`. Everything else there is put into a guest that runs.
const BUILT_FROM: [&str; 3] = ["agent", "agent.service", "build-guest.sh"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// Debian 12, kernel 6.1.
    Bookworm,
    /// Debian 13, kernel 6.12.
    Trixie,
}

impl Suite {
    fn name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
        }
    }
}

#[derive(Debug)]
pub struct Image {
    dir: PathBuf,
}

impl Image {
    /// The guest of this suite, built if it isn't kept yet. `None`, and the test recorded as skipped, if that can't be done here.
    pub fn of(test: &str, suite: Suite) -> Option<Self> {
        let sources = sources();
        let parent = cache().join(format!("{}-{:08x}", suite.name(), checksum(&sources)));
        let dir = parent.join("image");
        fs::create_dir_all(&parent).unwrap_or_else(|error| panic!("{}: {error}", parent.display()));
        let lock = File::create(parent.join("lock")).expect("the cache is writable");
        flock(&lock, FlockOperation::LockExclusive).expect("files can be locked");
        if dir.is_dir() {
            return Some(Self { dir });
        }
        if !crate::skip::have(test, &["mmdebstrap", "mkfs.ext4"]) || !crate::skip::have_root(test) {
            return None;
        }
        eprintln!("building the guest {} (some minutes, once)", parent.display());
        let building = parent.join("building");
        fs::remove_dir_all(&building).ok();
        let mut command = Command::new(sources.join("build-guest.sh"));
        let built = Running::start(command.arg(suite.name()).arg(&building)).wait(BUILD_WITHIN);
        if !built.status.success() {
            fs::remove_dir_all(&building).ok();
            // Without Debian's packages there is no guest.
            assert!(no_packages(&built.stderr), "{built}");
            skipped(test, &format!("no guest can be built: {}", last_line(&built.stderr)));
            return None;
        }
        fs::rename(&building, &dir).expect("a directory of the cache can be renamed");
        Some(Self { dir })
    }

    pub(super) fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    pub(super) fn initrd(&self) -> PathBuf {
        self.dir.join("initrd")
    }

    pub(super) fn disk(&self) -> PathBuf {
        self.dir.join("disk.img")
    }
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("vm")
}

fn cache() -> PathBuf {
    cache_dir("NEWEL_VM_CACHE", "newel-vm")
}

fn checksum(sources: &Path) -> u32 {
    let read = |name: &&str| fs::read(sources.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let bytes: Vec<u8> = BUILT_FROM.iter().flat_map(read).collect();
    newel_protocol::crc::crc(&bytes)
}

fn no_packages(said: &str) -> bool {
    ["Could not resolve", "Unable to connect", "Failed to fetch", "Temporary failure"]
        .iter()
        .any(|sign| said.contains(sign))
}

fn last_line(text: &str) -> &str {
    text.trim_end().lines().last().unwrap_or("it said nothing")
}
