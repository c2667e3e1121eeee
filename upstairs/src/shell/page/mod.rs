//! The status page for people: `GET /` answers with one document that holds everything it needs and asks this same address for
//! `status` and `slow` again and again.
//!
//! Invariants:
//! - Nothing is loaded from elsewhere, and the browser is told so, whatever a name or a reason in the status may hold.

use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, X_CONTENT_TYPE_OPTIONS};
use axum::response::{Html, IntoResponse};

const PAGE: &str = concat!(
    "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
    "<meta name=\"viewport\" content=\"width=device-width\">\n<title>Newel</title>\n<link rel=\"icon\" href=\"data:,\">\n<style>\n",
    include_str!("page.css"),
    "</style>\n</head>\n<body>\n<main>\n",
    include_str!("page.html"),
    "</main>\n<script>\n",
    include_str!("page.js"),
    "</script>\n</body>\n</html>\n",
);
/// What stands in the document itself, and this address; no other page may frame it.
const POLICY: &str = include_str!("policy.txt").trim_ascii();

pub(super) async fn page() -> impl IntoResponse {
    let headers =
        [(CONTENT_SECURITY_POLICY, POLICY), (CACHE_CONTROL, "no-store"), (X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (headers, Html(PAGE))
}
