//! The lanes of flushes and of metadata: one operation after the other, on the lane's own thread.
//!
//! Invariants:
//! - Flushes that wait together share one `fdatasync`: each was handed in after the writes that it covers were done. The
//!   highest mark among them is made durable.
//! - The rest of the metadata never waits behind a `fdatasync`.

use std::time::Instant;

use super::queue::{Queue, Queued};
use super::{Sink, done, probes};
use crate::core::api::{DiskOp, DiskOutcome};
use crate::disk::file::Region;

#[expect(clippy::disallowed_methods, reason = "stage times are measured where the work is done")]
pub(super) fn run_metadata(region: &Region, queue: &Queue, sink: &Sink) {
    let mut queued = Vec::new();
    while queue.take(&mut queued) {
        for Queued { command, at } in queued.drain(..) {
            let began = Instant::now();
            let result = region.execute(&command.kind);
            sink.push(vec![done(command.op, result, at, began, Instant::now())]);
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "stage times are measured where the work is done")]
pub(super) fn run_flushes(region: &Region, queue: &Queue, sink: &Sink) {
    let mut queued = Vec::new();
    while queue.take(&mut queued) {
        let mark_of = |kind: &DiskOp| if let DiskOp::Flush { mark } = kind { *mark } else { None };
        let mark = queued.iter().filter_map(|queued| mark_of(&queued.command.kind)).max();
        let closes = queued.iter().any(|queued| matches!(queued.command.kind, DiskOp::Close));
        let jobs = || queued.iter().filter_map(|queued| queued.command.job);
        jobs().for_each(probes::flush_starts);
        let began = Instant::now();
        let mut result = region.flush(mark);
        if closes && result.is_ok() {
            result = region.close();
        }
        let now = Instant::now();
        jobs().for_each(|job| probes::flush_ended(job, now - began, result.is_ok()));
        let answers = queued.drain(..).map(|Queued { command, at }| {
            let result = result.clone().map(|()| DiskOutcome::Done);
            done(command.op, result, at, began, now)
        });
        sink.push(answers.collect());
        region.punch_flushed();
    }
}
