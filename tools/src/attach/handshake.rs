//! An NBD client up to the point where the kernel takes over.
//!
//! Invariants:
//! - Not one byte of the transmission is read: the socket that comes out is at the end of the handshake.
//! - A server that is silent, or says too much, is an error within [`WITHIN`].
//! - A [`Failure`] tells whether trying again can help.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use newel_protocol::nbd::consts::{
    GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, answer, greeting, info, option, transmission,
};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};

use crate::address::Address;

/// For the whole handshake.
const WITHIN: Duration = Duration::from_secs(10);
/// Of one answer; those asked for have a few bytes, error texts a line.
const ANSWER_BYTES_MAX: u32 = 64 << 10;
const ANSWERS_MAX: usize = 64;
/// Of a TCP peer that has vanished without a word, as nothing else would tell the kernel.
const PEER_SILENCE_MAX: Duration = Duration::from_secs(30);

/// What the server tells of its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Export {
    pub size_bytes: u64,
    pub flags: u16,
}

impl Export {
    pub(super) fn takes_several_connections(self) -> bool {
        self.flags & transmission::CAN_MULTI_CONN != 0
    }
}

#[derive(Debug)]
pub(super) enum Failure {
    /// Nobody is there, or not yet: may pass.
    ForNow(anyhow::Error),
    /// Trying again gives the same.
    ForGood(anyhow::Error),
}

impl Failure {
    pub(super) fn into_error(self) -> anyhow::Error {
        match self {
            Self::ForNow(error) | Self::ForGood(error) => error,
        }
    }
}

/// A connection on which the export's transmission begins with the next byte.
pub(super) async fn connection(address: &Address, name: &str) -> Result<(OwnedFd, Export), Failure> {
    let shake = async {
        match address {
            Address::Unix(path) => {
                let mut stream = UnixStream::connect(path).await.map_err(for_now)?;
                let export = shake_hands(&mut stream, name).await?;
                Ok((OwnedFd::from(stream.into_std().map_err(for_now)?), export))
            }
            Address::Tcp(peer) => {
                let mut stream = TcpStream::connect(peer).await.map_err(for_now)?;
                stream.set_nodelay(true).map_err(for_now)?;
                watch_peer(&stream).map_err(Failure::ForNow)?;
                let export = shake_hands(&mut stream, name).await?;
                Ok((OwnedFd::from(stream.into_std().map_err(for_now)?), export))
            }
        }
    };
    let result = tokio::time::timeout(WITHIN, shake).await.unwrap_or_else(|_| {
        Err(Failure::ForNow(anyhow!("the server says nothing for {} s", WITHIN.as_secs())))
    });
    let (socket, export) = result.map_err(|failure| match failure {
        Failure::ForNow(error) => Failure::ForNow(error.context(format!("no NBD connection to {address}"))),
        Failure::ForGood(error) => Failure::ForGood(error.context(format!("no NBD connection to {address}"))),
    })?;
    // The kernel waits by itself.
    rustix::io::ioctl_fionbio(socket.as_fd(), false)
        .context("a socket can't be made to wait")
        .map_err(Failure::ForNow)?;
    Ok((socket, export))
}

fn for_now(error: std::io::Error) -> Failure {
    Failure::ForNow(error.into())
}

fn watch_peer(stream: &TcpStream) -> Result<()> {
    let seconds = PEER_SILENCE_MAX / 3;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, seconds)?;
    sockopt::set_tcp_keepintvl(stream, seconds)?;
    sockopt::set_tcp_keepcnt(stream, 2)?;
    let millis = u32::try_from(PEER_SILENCE_MAX.as_millis())?;
    sockopt::set_tcp_user_timeout(stream, millis)?;
    Ok(())
}

async fn shake_hands<S>(stream: &mut S, name: &str) -> Result<Export, Failure>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    if stream.read_u64().await.map_err(for_now)? != GREETING_MAGIC
        || stream.read_u64().await.map_err(for_now)? != OPTION_MAGIC
    {
        return Err(Failure::ForGood(anyhow!("this is no NBD server of today")));
    }
    let flags = stream.read_u16().await.map_err(for_now)?;
    if flags & greeting::FIXED_NEWSTYLE == 0 {
        return Err(Failure::ForGood(anyhow!("the server does not speak the fixed newstyle handshake")));
    }
    let client = flags & (greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES);
    let length = u32::try_from(name.len()).map_err(|error| Failure::ForGood(error.into()))?;
    let mut out = Vec::new();
    out.extend(u32::from(client).to_be_bytes());
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(option::GO.to_be_bytes());
    out.extend((4 + length + 2).to_be_bytes());
    out.extend(length.to_be_bytes());
    out.extend(name.as_bytes());
    // No further information is asked for.
    out.extend(0_u16.to_be_bytes());
    stream.write_all(&out).await.map_err(for_now)?;
    let mut export = None;
    for _ in 0..ANSWERS_MAX {
        let (kind, payload) = option_answer(stream).await?;
        match kind {
            answer::INFO => export = told(&payload).map_err(Failure::ForGood)?.or(export),
            answer::ACK => {
                return export
                    .context("the server did not tell the size of its export")
                    .map_err(Failure::ForGood);
            }
            refusal => return Err(refused(refusal, &payload, name)),
        }
    }
    Err(Failure::ForGood(anyhow!("the server does not come to an end")))
}

async fn option_answer<S: AsyncRead + Unpin>(stream: &mut S) -> Result<(u32, Vec<u8>), Failure> {
    let magic = stream.read_u64().await.map_err(for_now)?;
    let about = stream.read_u32().await.map_err(for_now)?;
    let kind = stream.read_u32().await.map_err(for_now)?;
    let length = stream.read_u32().await.map_err(for_now)?;
    if magic != OPTION_REPLY_MAGIC || about != option::GO || length > ANSWER_BYTES_MAX {
        return Err(Failure::ForGood(anyhow!("the server's answer is malformed")));
    }
    let mut payload = vec![0; usize::try_from(length).map_err(|error| Failure::ForGood(error.into()))?];
    stream.read_exact(&mut payload).await.map_err(for_now)?;
    Ok((kind, payload))
}

/// The export, if this piece of information is about it.
fn told(payload: &[u8]) -> Result<Option<Export>> {
    let Some((kind, rest)) = payload.split_first_chunk() else {
        bail!("the server's information is cut short");
    };
    if u16::from_be_bytes(*kind) != info::EXPORT {
        return Ok(None);
    }
    let Some((size, rest)) = rest.split_first_chunk() else {
        bail!("the server's information is cut short");
    };
    let Some((flags, _)) = rest.split_first_chunk() else {
        bail!("the server's information is cut short");
    };
    Ok(Some(Export { size_bytes: u64::from_be_bytes(*size), flags: u16::from_be_bytes(*flags) }))
}

fn refused(kind: u32, payload: &[u8], name: &str) -> Failure {
    let text = String::from_utf8_lossy(payload);
    let text = text.trim();
    match kind {
        answer::ERR_POLICY => Failure::ForNow(anyhow!("the server refuses for now: {text}")),
        answer::ERR_SHUTDOWN => Failure::ForNow(anyhow!("the server is shutting down")),
        answer::ERR_UNKNOWN => {
            Failure::ForGood(anyhow!("the server has no export {name:?}: --export names another"))
        }
        answer::ERR_TLS_REQD => Failure::ForGood(anyhow!(
            "the server wants TLS, which the kernel's NBD does not speak: attach through a unix socket"
        )),
        other => Failure::ForGood(anyhow!("the server refuses ({:#x}): {text}", other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a client makes of a server that says this.
    async fn check(server: &[u8]) -> Result<Export, Failure> {
        let (mut near, mut far) = tokio::io::duplex(1 << 16);
        far.write_all(server).await.unwrap();
        let result = shake_hands(&mut near, "db").await;
        if result.is_ok() {
            drop(far);
            let mut rest = Vec::new();
            near.read_to_end(&mut rest).await.unwrap();
            assert_eq!(rest, b"transmission");
        }
        result
    }

    fn hello() -> Vec<u8> {
        [&GREETING_MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &3_u16.to_be_bytes()].concat()
    }

    fn reply(kind: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap();
        [
            &OPTION_REPLY_MAGIC.to_be_bytes()[..],
            &option::GO.to_be_bytes(),
            &kind.to_be_bytes(),
            &length.to_be_bytes(),
            payload,
        ]
        .concat()
    }

    fn size_info() -> Vec<u8> {
        let payload = [&0_u16.to_be_bytes()[..], &(1_u64 << 30).to_be_bytes(), &0x10d_u16.to_be_bytes()];
        reply(answer::INFO, &payload.concat())
    }

    #[tokio::test]
    async fn an_export_is_told_and_nothing_behind_it_is_read() {
        let other = reply(answer::INFO, &[0, 3, 0, 0]);
        let server =
            [hello(), other, size_info(), reply(answer::ACK, &[]), b"transmission".to_vec()].concat();
        let export = check(&server).await.unwrap();
        assert_eq!(export, Export { size_bytes: 1 << 30, flags: 0x10d });
        assert!(export.takes_several_connections());
    }

    #[tokio::test]
    async fn what_passes_is_told_from_what_does_not() {
        let good = |failure: Failure, part: &str| match failure {
            Failure::ForGood(error) => assert!(error.to_string().contains(part), "{error}"),
            Failure::ForNow(error) => panic!("{error} for now only"),
        };
        let now = |failure: Failure, part: &str| match failure {
            Failure::ForNow(error) => assert!(error.to_string().contains(part), "{error}"),
            Failure::ForGood(error) => panic!("{error} for good"),
        };
        let after_hello = |rest: Vec<u8>| [hello(), rest].concat();
        good(check(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap_err(), "no NBD server");
        good(check(&after_hello(reply(answer::ERR_UNKNOWN, b""))).await.unwrap_err(), "no export \"db\"");
        good(check(&after_hello(reply(answer::ERR_TLS_REQD, b""))).await.unwrap_err(), "TLS");
        good(check(&after_hello(reply(answer::ACK, b""))).await.unwrap_err(), "size");
        good(check(&after_hello(reply(answer::INFO, b"\0"))).await.unwrap_err(), "cut short");
        good(check(&after_hello(vec![0; 20])).await.unwrap_err(), "malformed");
        now(check(&after_hello(reply(answer::ERR_SHUTDOWN, b""))).await.unwrap_err(), "shutting down");
        now(check(&after_hello(reply(answer::ERR_POLICY, b"full"))).await.unwrap_err(), "full");
    }

    #[tokio::test]
    async fn a_server_that_never_ends_is_left() {
        let server = [hello(), size_info().repeat(ANSWERS_MAX + 1)].concat();
        check(&server).await.unwrap_err();
    }
}
