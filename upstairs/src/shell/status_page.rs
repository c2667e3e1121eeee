//! The status over HTTP: `GET /status` answers with [`Status`] as JSON, `GET /slow` and `GET /inflight` with lists of
//! [`crate::core::slow::SlowIo`], `GET /metrics` with what Prometheus reads. `POST` is for operators, see [`super::admin`].
//!
//! Invariants:
//! - A slow or silent reader holds up nothing: the reactor answers each question in one go.
//! - A TCP address that other hosts can reach is refused like any other plaintext listener.

use std::rc::Rc;

use axum::extract::{DefaultBodyLimit, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use tokio::sync::mpsc;

use super::admin::{self, Ask, Asker, Refused};
use super::driver::Driver;
use super::metrics;
use super::nbd::{BindError, ListenAddr, Listeners};
use super::page;
use crate::core::status::Status;

/// Questions that may wait for the reactor at once.
const WAITING_MAX: usize = 64;
/// What an operator may send: a number and an address.
const BODY_BYTES_MAX: usize = 4096;
const JSON: &str = "application/json";

pub(super) fn bind(address: &ListenAddr, allow_plaintext: bool) -> Result<Listeners, BindError> {
    Listeners::bind(std::slice::from_ref(address), allow_plaintext).map_err(|error| {
        if let BindError::Plaintext { addr } = error { BindError::OpenStatus { addr } } else { error }
    })
}

/// Answers until the process ends.
pub(super) async fn serve(listeners: Listeners, driver: Rc<Driver>) -> std::io::Result<()> {
    let (asks, mut asked) = mpsc::channel(WAITING_MAX);
    let admin = admin::is_local(&listeners.addrs());
    let app = Router::new()
        .route("/", get(page::page))
        .route("/status", get(status))
        .route("/slow", get(slow))
        .route("/inflight", get(in_flight))
        .route("/metrics", get(all_metrics))
        .route("/replace", post(admin::replace))
        .route("/scrub", post(admin::scrub))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(Asker { asks, introduction: driver.introduction(), admin });
    let answering = async {
        while let Some(ask) = asked.recv().await {
            // Whoever asked may have hung up by now.
            match ask {
                Ask::Status(answer) => drop(answer.send(driver.status())),
                Ask::Replace { replica, address, welcome, answer } => {
                    drop(answer.send(driver.replace(replica, address, welcome)));
                }
                Ask::Scrub(answer) => drop(answer.send(driver.scrub())),
                Ask::Slow(answer) => driver.slow(answer),
                Ask::InFlight(answer) => driver.in_flight(answer),
                Ask::Metrics(answer) => driver.metrics(answer),
            }
        }
    };
    tokio::select! {
        served = listeners.serve_http(app) => served,
        () = answering => Ok(()),
    }
}

async fn slow(State(asker): State<Asker>) -> Result<impl IntoResponse, Refused> {
    Ok(([(CONTENT_TYPE, JSON)], asker.ask(Ask::Slow).await?))
}

async fn in_flight(State(asker): State<Asker>) -> Result<impl IntoResponse, Refused> {
    Ok(([(CONTENT_TYPE, JSON)], asker.ask(Ask::InFlight).await?))
}

async fn all_metrics(State(asker): State<Asker>) -> Result<impl IntoResponse, Refused> {
    Ok(([(CONTENT_TYPE, metrics::CONTENT_TYPE)], asker.ask(Ask::Metrics).await?))
}

async fn status(State(asker): State<Asker>) -> Result<Json<Status>, Refused> {
    Ok(Json(asker.ask(Ask::Status).await?))
}
