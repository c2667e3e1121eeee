//! A device `/dev/nbdN`: what the kernel tells of it, and whether somebody has it.

use std::fmt;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::fs::OFlags;
use rustix::io::Errno;

const SECTOR_BYTES: u64 = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub index: u32,
}

/// Who has a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    Nobody,
    /// Attached with this backend identifier.
    Backend(String),
    /// Attached by a client that gave none, as nbd-client does.
    Unnamed,
}

impl Device {
    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/nbd{}", self.index))
    }

    fn fact(&self, name: &str) -> Option<String> {
        let path = format!("/sys/block/nbd{}/{name}", self.index);
        std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
    }

    pub(super) fn holder(&self) -> Holder {
        match (self.fact("pid"), self.fact("backend")) {
            (None, _) => Holder::Nobody,
            (Some(_), Some(backend)) => Holder::Backend(backend),
            (Some(_), None) => Holder::Unnamed,
        }
    }

    pub(super) fn size_bytes(&self) -> Option<u64> {
        self.fact("size")?.parse::<u64>().ok()?.checked_mul(SECTOR_BYTES)
    }

    /// True once programs can open it and see its size.
    pub(super) fn is_there(&self, size_bytes: u64) -> bool {
        self.size_bytes() == Some(size_bytes)
            && std::fs::metadata(self.path()).is_ok_and(|metadata| metadata.file_type().is_block_device())
    }

    /// How long a request stays unanswered before the kernel looks whether its connection was replaced.
    pub(super) fn set_look_again_after(&self, time: Duration) -> Result<()> {
        let path = format!("/sys/block/nbd{}/queue/io_timeout", self.index);
        std::fs::write(&path, time.as_millis().to_string()).with_context(|| format!("cannot set {path}"))
    }

    /// Makes sure that nobody has mounted it or otherwise has it for himself, and keeps it so while the result lives.
    pub(super) fn reserve(&self) -> Result<std::fs::File> {
        let flags = i32::try_from(OFlags::EXCL.bits())?;
        let path = self.path();
        OpenOptions::new().read(true).custom_flags(flags).open(&path).map_err(|error| {
            if Errno::from_io_error(&error) == Some(Errno::BUSY) {
                anyhow!("{self} is in use: unmount it first (`lsblk {self}` and `swapon` tell where)")
            } else {
                anyhow!(error).context(format!("cannot open {self}"))
            }
        })
    }
}

impl FromStr for Device {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let index = text.strip_prefix("/dev/").unwrap_or(text).strip_prefix("nbd");
        let Some(index) = index.and_then(|digits| digits.parse().ok()) else {
            bail!("{text:?} is not an NBD device: write for example /dev/nbd0");
        };
        Ok(Self { index })
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/dev/nbd{}", self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_told_by_their_number() {
        let number = |text: &str| text.parse::<Device>().ok().map(|device| device.index);
        assert_eq!(number("/dev/nbd0"), Some(0));
        assert_eq!(number("nbd15"), Some(15));
        for wrong in ["/dev/sda", "/dev/nbd", "/dev/nbd0p1", "/dev/nbd-1", "nbd99999999999", "/dev//nbd0"] {
            assert_eq!(number(wrong), None, "{wrong}");
        }
    }
}
