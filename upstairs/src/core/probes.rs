//! Probes (USDT, provider `newel_upstairs`): places where a tracer such as bpftrace may look on, with the number of the job, which
//! the replicas' own probes have, too. Unwatched, each is the comparison of a word in memory with zero.
//!
//! Invariants:
//! - A probe tells of what has happened; nothing that it is given is made for it alone.
//! - Each stands in one place in the program (`inline(never)`): of a copy that the linker dropped the name would be left, at no address.
//! - Names, numbers and units stand in `tools/README.md` and stay as they are.
#![expect(clippy::cast_possible_truncation, reason = "what the probes' macros become is not ours")]

use newel_protocol::JobId;
use newel_protocol::wire::StageTimes;

use super::api::{ReplicaId, Time};
use super::replica::to_us;
use super::timeline::{Operation, Record, Timeline, Why};

#[usdt::provider(provider = "newel_upstairs")]
mod newel {
    fn job__start(job: u64, request: u64, operation: u8, offset: u64, bytes: u64) {}
    fn job__ack(job: u64, failed: u8, us: u64) {}
    fn job__slow(job: u64, why: u8, us: u64) {}
    fn job__renumbered(job: u64, before: u64) {}
    fn replica__sent(job: u64, replica: u8) {}
    fn replica__reply(job: u64, replica: u8, queued_us: u32, submit_us: u32, device_us: u32) {}
}

fn number_of(replica: ReplicaId) -> u8 {
    u8::try_from(replica.index()).unwrap_or(u8::MAX)
}

#[inline(never)]
pub(super) fn started(timeline: &Timeline) {
    newel::job__start!(|| {
        let operation: u8 = match timeline.operation {
            Operation::Read => 0,
            Operation::Write => 1,
            Operation::Zero => 2,
            Operation::Flush => 3,
        };
        (timeline.job.0, timeline.request, operation, timeline.offset, timeline.length)
    });
}

#[inline(never)]
pub(super) fn acknowledged(timeline: &Timeline, now: Time, failed: bool) {
    newel::job__ack!(|| (timeline.job.0, u8::from(failed), to_us(now.since(timeline.base))));
}

#[inline(never)]
pub(super) fn slow(record: &Record) {
    newel::job__slow!(|| {
        let why: u8 = match record.why {
            Why::Guest => 0,
            Why::Replica => 1,
            Why::InFlight => 2,
            Why::Slowest => 3,
        };
        (record.timeline.job.0, why, to_us(record.now.since(record.timeline.base)))
    });
}

#[inline(never)]
pub(super) fn renumbered(job: JobId, before: JobId) {
    newel::job__renumbered!(|| (job.0, before.0));
}

#[inline(never)]
pub(super) fn sent(job: JobId, replica: ReplicaId) {
    newel::replica__sent!(|| (job.0, number_of(replica)));
}

#[inline(never)]
pub(super) fn replied(job: JobId, replica: ReplicaId, times: StageTimes) {
    newel::replica__reply!(|| (job.0, number_of(replica), times.queued_us, times.submit_us, times.device_us));
}
