//! Where guests attach: unix sockets and TCP ports.
//!
//! Invariants:
//! - A socket file is replaced only if nobody listens on it, and removed at the end only if it is still ours.
//! - Without leave to no TCP port is opened that another host can reach.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fd::AsFd;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use thiserror::Error;
use tokio::net::{TcpListener, UnixListener};

/// Connections that wait to be accepted. The default of 128 overflows when a host restarts all its guests.
const BACKLOG: i32 = 1024;

/// `unix:/run/newel/vol.sock` or `tcp:127.0.0.1:10809`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenAddr {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{text:?} is not an address to listen on: write unix:/path/to/socket or tcp:127.0.0.1:10809")]
pub struct ListenAddrError {
    pub text: String,
}

#[derive(Debug, Error)]
pub enum BindError {
    #[error("can't listen on {addr}: it is in use by a running process; stop that or choose another address")]
    InUse { addr: ListenAddr },
    #[error("can't listen on {addr}: there is something that is not a socket, and it won't be overwritten")]
    NotASocket { addr: ListenAddr },
    #[error(
        "won't listen on {addr}: other hosts can reach it, and without TLS everybody there could read and write the \
         volume; listen on 127.0.0.1 or on a unix socket, serve guests over TLS only (tls mode \"required\"), or set \
         allow_plaintext if that network is trusted"
    )]
    Plaintext { addr: ListenAddr },
    #[error(
        "won't show the status on {addr}: other hosts can reach it, and everybody there could read it; choose 127.0.0.1 or a \
         unix socket, or set allow_plaintext if that network is trusted"
    )]
    OpenStatus { addr: ListenAddr },
    #[error("can't listen on {addr}: {source}")]
    Io { addr: ListenAddr, source: io::Error },
    #[error("there is no address to listen on: give at least one")]
    None,
}

impl BindError {
    fn from_io(addr: &ListenAddr, source: io::Error) -> Self {
        let addr = addr.clone();
        if source.kind() == io::ErrorKind::AddrInUse {
            Self::InUse { addr }
        } else {
            Self::Io { addr, source }
        }
    }
}

impl FromStr for ListenAddr {
    type Err = ListenAddrError;

    fn from_str(text: &str) -> Result<Self, ListenAddrError> {
        let addr = match text.split_once(':') {
            Some(("unix", path)) if path.starts_with('/') => Some(Self::Unix(path.into())),
            Some(("tcp", rest)) => match rest.strip_prefix("localhost:") {
                Some(port) => port.parse().ok().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
                None => rest.parse().ok(),
            }
            .map(Self::Tcp),
            _ => None,
        };
        addr.ok_or_else(|| ListenAddrError { text: text.to_owned() })
    }
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(addr) => write!(f, "tcp:{addr}"),
        }
    }
}

/// Bound and listening. Guests may connect from here on; they are answered once these are served.
#[derive(Debug)]
pub struct Listeners {
    pub(super) bound: Vec<Listener>,
    /// Whose turn it is to accept, so that a busy one doesn't keep the others waiting.
    pub(super) next: usize,
}

#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener, SocketAddr),
    /// The file goes after the listener.
    Unix(UnixListener, SocketFile),
}

impl Listeners {
    /// Binds all of them, or none. `open`: also where other hosts can connect, as they are trusted or nothing is said in the
    /// clear. Within a runtime only.
    pub fn bind(addrs: &[ListenAddr], open: bool) -> Result<Self, BindError> {
        if addrs.is_empty() {
            return Err(BindError::None);
        }
        let bound = addrs.iter().map(|addr| match addr {
            ListenAddr::Unix(path) => bind_unix(addr, path),
            ListenAddr::Tcp(socket) if open || is_loopback(socket.ip()) => bind_tcp(addr, *socket),
            ListenAddr::Tcp(_) => Err(BindError::Plaintext { addr: addr.clone() }),
        });
        Ok(Self { bound: bound.collect::<Result<_, _>>()?, next: 0 })
    }

    /// As bound: port 0 has become a real one.
    pub fn addrs(&self) -> Vec<ListenAddr> {
        self.bound
            .iter()
            .map(|listener| match listener {
                Listener::Tcp(_, addr) => ListenAddr::Tcp(*addr),
                Listener::Unix(_, file) => ListenAddr::Unix(file.path.clone()),
            })
            .collect()
    }
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

fn bind_tcp(addr: &ListenAddr, socket: SocketAddr) -> Result<Listener, BindError> {
    let failed = |source| BindError::from_io(addr, source);
    let listener = std::net::TcpListener::bind(socket).map_err(failed)?;
    ready(&listener).and_then(|()| listener.set_nonblocking(true)).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok(Listener::Tcp(TcpListener::from_std(listener).map_err(failed)?, bound))
}

fn bind_unix(addr: &ListenAddr, path: &Path) -> Result<Listener, BindError> {
    let failed = |source| BindError::from_io(addr, source);
    let listener = match std::os::unix::net::UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            remove_stale(addr, path)?;
            std::os::unix::net::UnixListener::bind(path).map_err(failed)?
        }
        result => result.map_err(failed)?,
    };
    let file = SocketFile::at(path).map_err(failed)?;
    ready(&listener).and_then(|()| listener.set_nonblocking(true)).map_err(failed)?;
    Ok(Listener::Unix(UnixListener::from_std(listener).map_err(failed)?, file))
}

fn ready(listener: &impl AsFd) -> io::Result<()> {
    Ok(rustix::net::listen(listener, BACKLOG)?)
}

/// Removes a socket file that a dead process left behind.
///
/// Between the look and the removal another process may take the path over. So the file is moved aside first and looked
/// at again: if it came alive it is moved back, and nobody lost anything but a moment.
fn remove_stale(addr: &ListenAddr, path: &Path) -> Result<(), BindError> {
    let io = |source: io::Error| BindError::Io { addr: addr.clone(), source };
    if !std::fs::symlink_metadata(path).map_err(io)?.file_type().is_socket() {
        return Err(BindError::NotASocket { addr: addr.clone() });
    }
    if is_alive(path).map_err(io)? {
        return Err(BindError::InUse { addr: addr.clone() });
    }
    let aside = path.with_file_name(format!(".{}", std::process::id()));
    std::fs::rename(path, &aside).map_err(io)?;
    if is_alive(&aside).unwrap_or(true) {
        std::fs::rename(&aside, path).map_err(io)?;
        return Err(BindError::InUse { addr: addr.clone() });
    }
    tracing::info!(%addr, "replaced a socket file that a dead process left behind");
    std::fs::remove_file(&aside).map_err(io)
}

/// Whether a process listens on this socket file. Doesn't block: a full backlog is a sign of life.
fn is_alive(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(rustix::io::Errno::AGAIN) => Ok(true),
        Err(rustix::io::Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A socket file that is removed with the listener, unless somebody else has taken its path.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn at(path: &Path) -> io::Result<Self> {
        let meta = std::fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), device: meta.dev(), inode: meta.ino() })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|meta| (meta.dev(), meta.ino()) == (self.device, self.inode));
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the socket file could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_and_print() {
        let check = |text: &str, printed: Option<&str>| {
            let found = text.parse::<ListenAddr>().ok().map(|addr| addr.to_string());
            assert_eq!(found.as_deref(), printed, "{text}");
        };
        check("unix:/run/a b.sock", Some("unix:/run/a b.sock"));
        check("tcp:127.0.0.1:10809", Some("tcp:127.0.0.1:10809"));
        check("tcp:[::1]:1", Some("tcp:[::1]:1"));
        check("tcp:localhost:7", Some("tcp:127.0.0.1:7"));
        for wrong in
            ["", "unix:", "unix:relative", "tcp:", "tcp:10809", "tcp:host:1", "tcp:1.2.3.4:70000", "/x"]
        {
            check(wrong, None);
        }
    }

    fn in_runtime(test: impl FnOnce()) {
        tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(async { test() });
    }

    #[test]
    fn a_port_in_use_names_the_address() {
        in_runtime(|| {
            let listeners = Listeners::bind(&["tcp:127.0.0.1:0".parse().unwrap()], false).unwrap();
            let error = Listeners::bind(&listeners.addrs(), false).unwrap_err();
            assert!(matches!(error, BindError::InUse { .. }));
            assert!(error.to_string().contains(&listeners.addrs()[0].to_string()), "{error}");
        });
    }

    #[test]
    fn a_port_open_to_the_network_needs_leave() {
        in_runtime(|| {
            for open in ["tcp:0.0.0.0:0", "tcp:[::]:0"] {
                let addrs = [open.parse().unwrap()];
                assert!(matches!(Listeners::bind(&addrs, false), Err(BindError::Plaintext { .. })));
            }
            Listeners::bind(&["tcp:0.0.0.0:0".parse().unwrap()], true).unwrap();
            Listeners::bind(&["tcp:127.0.0.9:0".parse().unwrap()], false).unwrap();
        });
    }

    #[test]
    fn socket_files_come_and_go() {
        in_runtime(|| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("vol.sock");
            let addrs = [ListenAddr::Unix(path.clone())];

            let alive = Listeners::bind(&addrs, false).unwrap();
            assert!(matches!(Listeners::bind(&addrs, false), Err(BindError::InUse { .. })));
            assert!(path.exists(), "a live socket stays");
            drop(alive);
            assert!(!path.exists(), "removed at the end");

            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            assert!(path.exists(), "left behind by a process that died");
            let taken = Listeners::bind(&addrs, false).unwrap();
            std::fs::remove_file(&path).unwrap();
            let next = Listeners::bind(&addrs, false).unwrap();
            drop(taken);
            assert!(path.exists(), "the next owner's file is not ours to remove");
            drop(next);

            std::fs::write(&path, "precious").unwrap();
            assert!(matches!(Listeners::bind(&addrs, false), Err(BindError::NotASocket { .. })));
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        });
    }
}
