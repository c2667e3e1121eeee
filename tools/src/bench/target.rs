//! What is measured: an NBD server, and the status of the volume that it serves.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpStream, UnixStream};

use super::BenchArgs;
use crate::address::Address;
use crate::target::{nbd_address, status_address};
use crate::up::layout::{self, Layout};
use crate::up::volume::Volume;

/// What every NBD server says first.
const GREETING: &[u8; 8] = b"NBDMAGIC";
const GREETING_MAX: Duration = Duration::from_secs(5);
const NBD_PORT: u16 = 10_809;

#[derive(Debug)]
pub(super) struct Target {
    pub(super) uri: String,
    pub(super) status: Option<Address>,
    /// As people call it.
    pub(super) name: String,
}

impl Target {
    pub(super) fn find(args: &BenchArgs) -> Result<Self> {
        let status = if args.uri.is_some() && args.dir.is_none() && args.volume.is_none() {
            args.address.clone()
        } else {
            Some(status_address(None, args.volume.as_deref(), args.dir.as_deref())?)
        };
        let (uri, name) = match (&args.uri, &args.volume) {
            (Some(uri), _) => (uri.clone(), uri.clone()),
            (None, Some(name)) => (nbd_address(name)?.nbd_uri(), format!("volume {name}")),
            (None, None) => {
                let dir = args.dir.clone().map_or_else(layout::default_dir, Ok)?;
                let volume = Volume::load(&Layout::new(&dir)?)?
                    .with_context(|| format!("no volume in {}", dir.display()))?;
                (listening(&volume)?, format!("the volume in {}", dir.display()))
            }
        };
        if uri.chars().any(char::is_control) {
            bail!("{uri:?} is no URI");
        }
        Ok(Self { uri, status, name })
    }

    /// Something that speaks NBD answers there. What is no plain URI is left to fio.
    pub(super) async fn check(&self) -> Result<()> {
        let uri = &self.uri;
        let mut greeting = [0; GREETING.len()];
        let greeted = async {
            match endpoint(uri) {
                Some(Endpoint::Unix(path)) => {
                    UnixStream::connect(path).await?.read_exact(&mut greeting).await?;
                }
                Some(Endpoint::Tcp(host)) => {
                    TcpStream::connect(host).await?.read_exact(&mut greeting).await?;
                }
                None => greeting = *GREETING,
            }
            std::io::Result::Ok(())
        };
        match tokio::time::timeout(GREETING_MAX, greeted).await {
            Ok(answer) => {
                answer.with_context(|| format!("nothing serves NBD at {uri}: is the volume running?"))?
            }
            Err(_) => bail!(
                "what listens at {uri} says nothing within {} s: is it an NBD server?",
                GREETING_MAX.as_secs()
            ),
        }
        if greeting != *GREETING {
            bail!("what answers at {uri} is no NBD server");
        }
        Ok(())
    }
}

/// Where clients of a `newel up` go; a port that was chosen at the start is known to that process alone.
fn listening(volume: &Volume) -> Result<String> {
    let known = |address: &&Address| match address {
        Address::Unix(_) => true,
        Address::Tcp(socket) => socket.port() != 0,
    };
    let address = volume.listen.iter().find(known);
    address
        .map(Address::nbd_uri)
        .context("the volume listens only at ports chosen at its start: name one with --uri")
}

#[derive(Debug, PartialEq, Eq)]
enum Endpoint {
    Unix(PathBuf),
    Tcp(String),
}

/// Where a plain URI points to.
fn endpoint(uri: &str) -> Option<Endpoint> {
    let (scheme, rest) = uri.split_once("://")?;
    match scheme {
        "nbd+unix" => {
            let query = rest.split_once('?')?.1;
            let socket = query.split('&').find_map(|pair| pair.strip_prefix("socket="))?;
            Some(Endpoint::Unix(decoded(socket)?))
        }
        "nbd" => {
            let host = rest.split(['/', '?']).next().filter(|host| !host.is_empty())?;
            let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
            Some(Endpoint::Tcp(if has_port { host.to_owned() } else { format!("{host}:{NBD_PORT}") }))
        }
        _ => None,
    }
}

/// Undoes percent encoding.
fn decoded(text: &str) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStringExt as _;
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first == b'%' {
            let digits = std::str::from_utf8(tail.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = tail.get(2..)?;
        } else {
            bytes.push(first);
        }
    }
    Some(std::ffi::OsString::from_vec(bytes).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_uris_are_understood() {
        let unix = |path: &str| Some(Endpoint::Unix(path.into()));
        let tcp = |host: &str| Some(Endpoint::Tcp(host.into()));
        let check = |uri: &str, expected: Option<Endpoint>| assert_eq!(endpoint(uri), expected, "{uri}");
        check("nbd+unix:///?socket=/run/a%20b.sock", unix("/run/a b.sock"));
        check("nbd+unix:///export?x=1&socket=/a", unix("/a"));
        check("nbd://host/export", tcp("host:10809"));
        check("nbd://[::1]:99", tcp("[::1]:99"));
        check("nbds://host", None);
        check("nbd+unix:///?socket=%zz", None);
        check("nbd+unix:///?socket=%2", None);
        check("nothing", None);
    }
}
