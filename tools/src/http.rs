//! One request over a unix socket or TCP, to the status page.
//!
//! Invariants:
//! - Bounded in time and in the size of the answer.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
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
/// Before an answer the daemon may have to look at another host, within a time of its own.
const POST_TIMEOUT: Duration = Duration::from_secs(25);

/// The body of `path` at `address`.
pub(crate) async fn get(address: &Address, path: &str) -> Result<Bytes> {
    let request = Request::get(path).header("host", "newel").body(Full::default())?;
    answer(address, request, TIMEOUT)
        .await
        .with_context(|| format!("cannot read the status at {address}: is the volume running?"))
}

/// The answer to this JSON. What the daemon says if it refuses is the error.
pub(crate) async fn post(address: &Address, path: &str, json: String) -> Result<Bytes> {
    let request = Request::post(path).header("host", "newel").header("content-type", "application/json");
    answer(address, request.body(Full::from(json))?, POST_TIMEOUT).await
}

async fn answer(address: &Address, request: Request<Full<Bytes>>, within: Duration) -> Result<Bytes> {
    let unreachable = || format!("nothing answers at {address}: is the volume running?");
    let answer = async {
        match address {
            Address::Unix(socket) => {
                exchange(UnixStream::connect(socket).await.with_context(unreachable)?, request).await
            }
            Address::Tcp(socket) => {
                exchange(TcpStream::connect(socket).await.with_context(unreachable)?, request).await
            }
        }
    };
    match tokio::time::timeout(within, answer).await {
        Ok(result) => result,
        Err(_) => bail!("no answer within {} s", within.as_secs()),
    }
}

async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    request: Request<Full<Bytes>>,
) -> Result<Bytes> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let answer = async move {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), BODY_BYTES_MAX)
            .collect()
            .await
            .map_err(|error| anyhow::anyhow!("the answer broke off: {error}"))?
            .to_bytes();
        if !status.is_success() {
            let said = String::from_utf8_lossy(&body);
            let said = if said.trim().is_empty() { status.to_string() } else { said.trim().to_owned() };
            bail!("the upstairs refuses: {said}");
        }
        Ok(body)
    };
    // The connection ends by itself once `answer` has dropped the sender; what it then has to say adds nothing.
    let (answer, _closed) = tokio::join!(answer, connection);
    answer
}
