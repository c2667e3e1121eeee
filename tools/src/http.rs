//! One GET over a unix socket or TCP, for the status page.
//!
//! Invariants:
//! - Bounded in time and in the size of the answer.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::Request;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::address::Address;

/// A status page of three replicas has about 2 KiB.
const BODY_BYTES_MAX: usize = 1 << 20;
/// The page is made without waiting for anything, so a daemon that takes longer is stuck.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The body of `path` at `address`.
pub(crate) async fn get(address: &Address, path: &str) -> Result<Bytes> {
    let answer = async {
        match address {
            Address::Unix(socket) => exchange(UnixStream::connect(socket).await?, path).await,
            Address::Tcp(socket) => exchange(TcpStream::connect(socket).await?, path).await,
        }
    };
    match tokio::time::timeout(TIMEOUT, answer).await {
        Ok(result) => result,
        Err(_) => bail!("no answer within {} s", TIMEOUT.as_secs()),
    }
    .with_context(|| format!("cannot read the status at {address}: is the volume running?"))
}

async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(stream: S, path: &str) -> Result<Bytes> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get(path).header("host", "newel").body(Empty::<Bytes>::new())?;
    let answer = async move {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), BODY_BYTES_MAX)
            .collect()
            .await
            .map_err(|error| anyhow::anyhow!("the answer broke off: {error}"))?
            .to_bytes();
        if !status.is_success() {
            bail!("the daemon answered {status}");
        }
        Ok(body)
    };
    // The connection ends by itself once `answer` has dropped the sender; what it then has to say adds nothing.
    let (answer, _closed) = tokio::join!(answer, connection);
    answer
}
