//! Probes (USDT, provider `newel_downstairs`): where jobs go to the kernel and come back, with the upstairs' number of each. What a
//! tracer sees of block devices between `submit-start` and `submit-done` on the same thread belongs to these jobs, in this order.
//!
//! Invariants:
//! - Unwatched, each is the comparison of a word in memory with zero; nothing is allocated for them.
//! - Operations without a job (the catch-up's queries, the activity log) are not told.
//! - Each stands in one place in the program (`inline(never)`): of a copy that the linker dropped the name would be left, at no address.
//! - Names, numbers and units stand in `tools/README.md` and stay as they are.
#![expect(clippy::cast_possible_truncation, reason = "what the probes' macros become is not ours")]

use super::micros;
use crate::disk::engine::{Completion, Request, Submitted};
use std::time::Duration;

use newel_protocol::JobId;

#[usdt::provider(provider = "newel_downstairs")]
mod newel {
    /// `request_bytes` is 0 for a job that shares the request of the one before it.
    fn submit__start(job: u64, operation: u8, offset: u64, bytes: u64, request_bytes: u64) {}
    fn submit__done(job: u64, operation: u8, us: u32, slept: u8) {}
    /// `result`: the bytes of its request, or -1.
    fn disk__done(job: u64, operation: u8, result: i64) {}
}

/// What a lane's requests are made of.
pub(super) trait Jobs {
    const OPERATION: Operation;

    /// Each job that has a part in the request, with the bytes of that part, in the order of their blocks.
    fn each(&self, tell: impl FnMut(JobId, usize));
}

#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum Operation {
    Read = 0,
    Write = 1,
    Flush = 2,
}

/// Jobs that are being submitted, each with the place of its request in the batch.
#[derive(Debug, Default)]
pub(super) struct Batch {
    jobs: Vec<(usize, JobId)>,
}

impl Batch {
    pub(super) fn starts<'a, T: Jobs + 'a>(&mut self, requests: impl Iterator<Item = &'a Request<T>>) {
        self.jobs.clear();
        for (place, request) in requests.enumerate() {
            let (mut offset, mut request_bytes) = (request.offset, request.payload.len() as u64);
            request.user.each(|job, bytes| {
                let bytes = bytes as u64;
                submit_starts(job, T::OPERATION, offset, bytes, request_bytes);
                offset += bytes;
                request_bytes = 0;
                self.jobs.push((place, job));
            });
        }
    }

    pub(super) fn done<T: Jobs>(&mut self, submitted: Submitted) {
        for (_, job) in self.jobs.drain(..).take_while(|&(place, _)| place < submitted.requests) {
            submit_done(job, T::OPERATION, micros(submitted.took), submitted.slept);
        }
    }
}

pub(super) fn completed<'a, T: Jobs + 'a>(completions: impl Iterator<Item = &'a Completion<T>>) {
    for completion in completions {
        let result = completion.result.as_ref().map_or(-1, |&bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
        completion.user.each(|job, _| disk_done(job, T::OPERATION, result));
    }
}

pub(super) fn flush_starts(job: JobId) {
    submit_starts(job, Operation::Flush, 0, 0, 0);
}

pub(super) fn flush_ended(job: JobId, took: Duration, succeeded: bool) {
    submit_done(job, Operation::Flush, micros(took), true);
    disk_done(job, Operation::Flush, if succeeded { 0 } else { -1 });
}

#[inline(never)]
fn submit_starts(job: JobId, operation: Operation, offset: u64, bytes: u64, request_bytes: u64) {
    newel::submit__start!(|| (job.0, operation as u8, offset, bytes, request_bytes));
}

#[inline(never)]
fn submit_done(job: JobId, operation: Operation, us: u32, slept: bool) {
    newel::submit__done!(|| (job.0, operation as u8, us, u8::from(slept)));
}

#[inline(never)]
fn disk_done(job: JobId, operation: Operation, result: i64) {
    newel::disk__done!(|| (job.0, operation as u8, result));
}
