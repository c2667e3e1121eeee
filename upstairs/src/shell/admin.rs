//! What an operator may ask of a running volume, beside the status: `POST /replace` and `POST /scrub`, both with JSON.
//!
//! Invariants:
//! - Only where no other host can reach it, and only with `content-type: application/json`, which a web page elsewhere can't
//!   make a browser send.
//! - A region is looked at before anything changes: it introduces itself over a connection of its own, which disturbs nobody.
//!   Whether it may take a slot is decided by the core.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use newel_protocol::wire::{self, Decoder, Hello, Reply, Request, VERSION, Welcome};
use serde::Deserialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use super::config::check_replica;
use super::driver::Introduction;
use super::nbd::ListenAddr;
use crate::core::api::ReplicaId;
use crate::core::status::{ScrubStatus, Status};

/// What the reactor is asked for.
pub(super) enum Ask {
    Status(oneshot::Sender<Status>),
    Replace {
        replica: ReplicaId,
        address: String,
        welcome: Welcome,
        answer: oneshot::Sender<Result<(), String>>,
    },
    Scrub(oneshot::Sender<ScrubStatus>),
    /// JSON.
    Slow(oneshot::Sender<String>),
    /// JSON.
    InFlight(oneshot::Sender<String>),
    /// The text that Prometheus reads.
    Metrics(oneshot::Sender<String>),
}

/// What the handlers share.
#[derive(Clone)]
pub(super) struct Asker {
    pub(super) asks: mpsc::Sender<Ask>,
    pub(super) introduction: Introduction,
    /// False where other hosts can reach the status page.
    pub(super) admin: bool,
}

/// No answer, and why.
pub(super) type Refused = (StatusCode, String);

impl Asker {
    pub(super) async fn ask<T>(&self, ask: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Result<T, Refused> {
        let (sender, answer) = oneshot::channel();
        if self.asks.try_send(ask(sender)).is_err() {
            let text = "too many requests to the status page at once\n".to_owned();
            return Err((StatusCode::SERVICE_UNAVAILABLE, text));
        }
        answer.await.map_err(|_| (StatusCode::SERVICE_UNAVAILABLE, "too busy, or shutting down\n".to_owned()))
    }

    fn check_admin(&self) -> Result<(), Refused> {
        if self.admin {
            return Ok(());
        }
        let text = "other hosts can reach this status address, so nothing can be changed through it: serve the status on \
                    127.0.0.1 or on a unix socket\n";
        Err((StatusCode::FORBIDDEN, text.to_owned()))
    }
}

/// True if only this host reaches these addresses.
pub(super) fn is_local(addresses: &[ListenAddr]) -> bool {
    addresses.iter().all(|address| match address {
        ListenAddr::Unix(_) => true,
        ListenAddr::Tcp(socket) => socket.ip().to_canonical().is_loopback(),
    })
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReplaceRequest {
    replica: u8,
    address: String,
}

pub(super) async fn replace(
    State(asker): State<Asker>,
    Json(request): Json<ReplaceRequest>,
) -> Result<Response, Refused> {
    asker.check_admin()?;
    let bad = |text: String| (StatusCode::BAD_REQUEST, format!("{text}\n"));
    let ReplaceRequest { replica, address } = request;
    let replica = ReplicaId::ALL
        .into_iter()
        .find(|id| id.0 == replica)
        .ok_or_else(|| bad(format!("there is no replica {replica}: they are numbered from 0 to 2")))?;
    check_replica(&address).map_err(|error| bad(error.to_string()))?;
    let conflict = |text: String| (StatusCode::CONFLICT, format!("{text}\n"));
    let look = look_at(&address, &asker.introduction);
    let welcome = match tokio::time::timeout(asker.introduction.within, look).await {
        Ok(found) => found.map_err(|reason| conflict(format!("the replica at {address}: {reason}")))?,
        Err(_) => {
            let within = seconds(asker.introduction.within);
            return Err(conflict(format!("the replica at {address} gave no answer within {within} s")));
        }
    };
    let answer = asker.ask(|answer| Ask::Replace { replica, address, welcome, answer }).await?;
    answer.map_err(conflict)?;
    Ok((StatusCode::ACCEPTED, "the replacement has begun\n").into_response())
}

fn seconds(duration: Duration) -> f32 {
    duration.as_secs_f32()
}

/// How the region at this address introduces itself.
async fn look_at(address: &str, introduction: &Introduction) -> Result<Welcome, String> {
    let mut stream = TcpStream::connect(address).await.map_err(|error| format!("can't connect: {error}"))?;
    let hello = Hello {
        min_version: VERSION,
        max_version: VERSION,
        volume: introduction.volume,
        upstairs: introduction.upstairs,
        session: 0,
        takeover: false,
    };
    let frame = wire::encode(&Request::Hello(hello), Bytes::new()).map_err(|error| error.to_string())?;
    stream.write_all(&frame.head).await.map_err(|error| format!("can't write to it: {error}"))?;
    let (mut decoder, mut received) = (Decoder::default(), BytesMut::new());
    loop {
        match decoder.decode::<Reply>(&mut received).map_err(|error| error.to_string())? {
            Some((Reply::Welcome(welcome), _)) => return Ok(welcome),
            Some((Reply::Refused(refusal), _)) => return Err(refusal.to_string()),
            Some(_) => return Err("it answered a greeting with something else".to_owned()),
            None => {}
        }
        match stream.read_buf(&mut received).await {
            Ok(0) => {
                return Err("it closed the connection without a word; is it a newel-downstairs?".to_owned());
            }
            Ok(_) => {}
            Err(error) => return Err(format!("can't read from it: {error}")),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScrubRequest {}

/// Answers with the state of the pass that has begun, or of the one that was under way.
pub(super) async fn scrub(
    State(asker): State<Asker>,
    Json(ScrubRequest {}): Json<ScrubRequest>,
) -> Result<Json<ScrubStatus>, Refused> {
    asker.check_admin()?;
    Ok(Json(asker.ask(Ask::Scrub).await?))
}
