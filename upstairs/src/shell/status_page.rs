//! The status over HTTP: `GET /status` answers with [`Status`] as JSON.
//!
//! Invariants:
//! - Read only. A slow or silent reader holds up nothing: the status is taken by the reactor in one go.
//! - A TCP address that other hosts can reach is refused like any other plaintext listener.

use std::rc::Rc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use tokio::sync::{mpsc, oneshot};

use super::driver::Driver;
use super::nbd::{BindError, ListenAddr, Listeners};
use crate::core::status::Status;

/// Status requests that may wait for the reactor at once.
const WAITING_MAX: usize = 64;

type Questions = mpsc::Sender<oneshot::Sender<Status>>;

pub(super) fn bind(address: &ListenAddr, allow_plaintext: bool) -> Result<Listeners, BindError> {
    Listeners::bind(std::slice::from_ref(address), allow_plaintext)
}

/// Answers until the process ends.
pub(super) async fn serve(listeners: Listeners, driver: Rc<Driver>) -> std::io::Result<()> {
    let (questions, mut asked) = mpsc::channel::<oneshot::Sender<Status>>(WAITING_MAX);
    let app = Router::new().route("/status", get(status)).with_state(questions);
    let answering = async {
        while let Some(question) = asked.recv().await {
            // Whoever asked may have hung up by now.
            drop(question.send(driver.status()));
        }
    };
    tokio::select! {
        served = listeners.serve_http(app) => served,
        () = answering => Ok(()),
    }
}

async fn status(State(questions): State<Questions>) -> Response {
    let (question, answer) = oneshot::channel();
    if questions.try_send(question).is_err() {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many status requests at once\n").into_response();
    }
    match answer.await {
        Ok(status) => Json(status).into_response(),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n").into_response(),
    }
}
