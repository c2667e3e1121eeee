//! Addresses of the NBD server and of the status page: `unix:/path` or `tcp:127.0.0.1:10809`.
//!
//! Invariants:
//! - A unix path is absolute and fits the kernel's `sun_path`, so that the daemon, which runs elsewhere, can bind it.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

/// `sun_path` has 108 bytes, the last of which is the terminating zero.
const UNIX_PATH_BYTES_MAX: usize = 107;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl Address {
    pub(crate) fn unix(path: &Path) -> Result<Self> {
        let absolute =
            std::path::absolute(path).with_context(|| format!("no such path: {}", path.display()))?;
        let bytes = absolute.as_os_str().len();
        if bytes > UNIX_PATH_BYTES_MAX {
            bail!(
                "socket path {} has {bytes} bytes, a unix socket allows {UNIX_PATH_BYTES_MAX}: choose a shorter one",
                absolute.display()
            );
        }
        Ok(Self::Unix(absolute))
    }

    /// The URI by which NBD clients reach this address.
    pub(crate) fn nbd_uri(&self) -> String {
        match self {
            Self::Unix(path) => format!("nbd+unix:///?socket={}", percent_encoded(path)),
            Self::Tcp(address) => format!("nbd://{address}"),
        }
    }
}

impl FromStr for Address {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                bail!("{text:?} names no path: write unix:/path/to/socket");
            }
            return Self::unix(Path::new(path));
        }
        if let Some(address) = text.strip_prefix("tcp:") {
            let parsed = address.parse().with_context(|| {
                format!("{address:?} is not an address and port: write for example tcp:127.0.0.1:10809")
            })?;
            return Ok(Self::Tcp(parsed));
        }
        bail!("{text:?} is not an address: write unix:/path/to/socket or tcp:127.0.0.1:10809")
    }
}

impl TryFrom<String> for Address {
    type Error = anyhow::Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Address> for String {
    fn from(address: Address) -> Self {
        address.to_string()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

fn percent_encoded(path: &Path) -> String {
    let mut out = String::new();
    for &byte in path.as_os_str().as_encoded_bytes() {
        if byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_and_make_uris() {
        let check = |text: &str, uri: &str| {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(address.nbd_uri(), uri);
        };
        check("unix:/run/a.sock", "nbd+unix:///?socket=/run/a.sock");
        check("unix:/run/a b%.sock", "nbd+unix:///?socket=/run/a%20b%25.sock");
        check("tcp:127.0.0.1:10809", "nbd://127.0.0.1:10809");
        check("tcp:[::1]:10809", "nbd://[::1]:10809");
    }

    #[test]
    fn wrong_addresses_are_named() {
        let check = |text: &str, part: &str| {
            let error = format!("{:#}", text.parse::<Address>().unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        };
        check("127.0.0.1:10809", "write unix:");
        check("unix:", "names no path");
        check("tcp:localhost", "address and port");
        check(&format!("unix:/{}", "x".repeat(120)), "121 bytes");
    }
}
