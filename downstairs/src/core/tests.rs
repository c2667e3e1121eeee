//! The whole core, case by case.

mod harness;
mod runs;

use std::time::Duration;

use bytes::Bytes;
use newel_protocol::lag::Health;
use newel_protocol::wire::Hello;
use newel_protocol::wire::{JobError, Membership, Op, Refusal, Reply, Request, StageTimes, ZeroMode};
use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, ExtentId, Generation, JobId, Version};
use uuid::Uuid;

use self::harness::{ANN, BLOCKS, BOB, Harness, VOLUME, data, facts, read, store, write};
use super::api::{ConnId, DiskError, DiskOp, Event, HeaderChange, OpId, RegionFacts};
use super::{CoreConfig, State};

fn harness() -> Harness {
    Harness::new(CoreConfig::default(), facts())
}

#[test]
fn a_session_from_hello_to_an_answered_write() {
    let mut h = harness();
    h.hello(1, BOB, false);
    let Some(Reply::Welcome(welcome)) = h.last(1) else { panic!("{:?}", h.last(1)) };
    assert_eq!((welcome.blocks, welcome.promised), (BLOCKS, Generation(3)));
    h.promote(1, 4);
    assert_eq!(h.kinds(), "header");
    h.finish(0, None);
    assert_eq!(h.kinds(), "digests");
    h.finish(0, None);
    let Some(Reply::Promoted { generation, last_active, digest }) = h.last(1) else { panic!() };
    assert_eq!((generation, last_active), (&Generation(4), &Generation(2)));
    assert_eq!(*digest, super::promotion::summarise(0, ExtentId(0), &[7; 9]));
    h.job(1, 1, write(10, 2));
    let DiskOp::Write { version, .. } = &h.disk[0].kind else { panic!("{}", h.kinds()) };
    assert_eq!(*version, Version::new(Generation(4), 1));
    h.finish(0, None);
    let Some(Reply::Done { job: JobId(1), result: Ok(()), times, .. }) = h.last(1) else { panic!() };
    assert_eq!((times.submit_us, times.device_us), (3, 70));
}

#[test]
fn an_unclaimed_region_is_claimed_and_another_volume_refused() {
    let mut h = Harness::new(CoreConfig::default(), RegionFacts { volume: Uuid::nil(), ..facts() });
    h.hello(1, BOB, false);
    h.promote(1, 4);
    assert!(matches!(h.disk[0].kind, DiskOp::Header(HeaderChange::Claim { volume: VOLUME })));
    h.finish_all();
    assert!(matches!(h.last(1), Some(Reply::Promoted { .. })));
    let mut h = Harness::new(CoreConfig::default(), RegionFacts { volume: ANN, ..facts() });
    h.hello(1, BOB, false);
    assert!(matches!(h.last(1), Some(Reply::Refused(Refusal::OtherVolume { .. }))));
    assert_eq!(h.closed, [ConnId(1)]);
}

#[test]
fn generations_fence() {
    let refused = |upstairs, generation| {
        let mut h = harness();
        h.hello(1, upstairs, false);
        h.promote(1, generation);
        h.finish_all();
        matches!(h.last(1), Some(Reply::Refused(Refusal::StaleGeneration { .. })))
    };
    assert!(refused(ANN, 2) && refused(BOB, 2) && refused(BOB, 3));
    assert!(!refused(ANN, 3) && !refused(BOB, 4));
}

#[test]
fn a_second_upstairs_needs_a_takeover_or_a_silent_holder() {
    let check = |takeover: bool, silence: u64, welcome: bool| {
        let mut h = harness();
        h.session(1, ANN, 4);
        h.job(1, 1, write(0, 1));
        h.job(1, 2, write(0, 1));
        h.now.0 += silence * 1_000_000_000;
        h.hello(2, BOB, takeover);
        h.promote(2, 5);
        if !welcome {
            assert!(matches!(h.last(2), Some(Reply::Refused(Refusal::InUse { by: ANN, .. }))));
            return;
        }
        let fenced = Refusal::Fenced { by: BOB, generation: Generation(5) };
        assert_eq!(h.last(1), Some(&Reply::Refused(fenced)));
        assert_eq!(h.closed, [ConnId(1)]);
        // The write at the disk is awaited, the one behind it dropped.
        assert_eq!(h.kinds(), "write");
        h.finish(0, None);
        assert_eq!(h.kinds(), "header");
        h.finish_all();
        assert!(matches!(h.last(2), Some(Reply::Promoted { .. })));
    };
    check(false, 0, false);
    check(true, 0, true);
    check(false, 4, false);
    check(false, 6, true);
}

#[test]
fn the_newer_connection_of_an_upstairs_replaces_the_older() {
    let mut h = harness();
    h.session(2, ANN, 4);
    h.session(3, ANN, 4);
    assert!(matches!(h.last(2), Some(Reply::Leaving { .. })));
    h.hello(1, ANN, false);
    h.promote(1, 4);
    assert!(matches!(h.last(1), Some(Reply::Refused(Refusal::StaleGeneration { .. }))));
    assert!(!h.closed.contains(&ConnId(3)));
}

#[test]
fn a_flush_waits_for_what_came_before_it_and_others_share_the_next() {
    let mut h = harness();
    h.session(1, ANN, 4);
    h.job(1, 1, write(0, 1));
    h.job(1, 2, Op::Flush);
    h.job(1, 3, write(1, 1));
    assert_eq!(h.kinds(), "write write");
    h.finish(0, None);
    assert_eq!(h.kinds(), "write flush");
    assert!(matches!(h.disk[1].kind, DiskOp::Flush { mark: Some(mark) } if mark.sequence == 2));
    h.finish(0, None);
    h.job(1, 4, Op::Flush);
    h.job(1, 5, Op::Flush);
    assert_eq!(h.kinds(), "flush");
    h.finish(0, None);
    assert!(matches!(h.disk[0].kind, DiskOp::Flush { mark: Some(mark) } if mark.sequence == 5));
    h.finish(0, None);
    assert!(h.owed[&ConnId(1)].is_empty());
}

#[test]
fn contexts_are_ordered_among_the_changes_of_their_extent() {
    let mut h = harness();
    h.session(1, ANN, 4);
    h.job(1, 1, write(0, 1));
    h.ask(1, Request::Contexts { query: 9, extent: ExtentId(0) }, Bytes::new());
    h.job(1, 2, write(0, 1));
    h.job(1, 3, read(0, 1));
    assert_eq!(h.kinds(), "write");
    h.finish(0, None);
    assert_eq!(h.kinds(), "contexts");
    h.finish(0, None);
    assert!(
        matches!(h.last(1), Some(Reply::Contexts { query: 9, extent: ExtentId(0), states }) if states.len() == 1024)
    );
    assert_eq!(h.kinds(), "write");
    h.finish(0, None);
    assert_eq!(h.kinds(), "read");
    h.ask(1, Request::Contexts { query: 9, extent: ExtentId(8) }, Bytes::new());
    h.ask(1, Request::Digests { query: 8, first: ExtentId(2), count: 7 }, Bytes::new());
    h.finish_all();
    assert!(
        matches!(h.last(1), Some(Reply::Digests { query: 8, first: ExtentId(2), digests }) if digests.len() == 7)
    );
}

#[test]
fn a_queued_read_can_be_cancelled() {
    let mut h = Harness::new(CoreConfig { disk_reads_max: 2, ..CoreConfig::default() }, facts());
    h.session(1, ANN, 4);
    for job in 1..6 {
        h.job(1, job, read(job, 1));
    }
    assert_eq!(h.kinds(), "read read");
    for job in [1, 4] {
        h.ask(1, Request::Cancel { job: JobId(job) }, Bytes::new());
    }
    let cancelled = Reply::Done {
        job: JobId(4),
        result: Err(JobError::Cancelled),
        times: StageTimes { queued_us: 3, ..StageTimes::default() },
        states: Vec::new(),
    };
    assert_eq!(h.last(1), Some(&cancelled));
    h.finish(0, None);
    assert!(matches!(h.disk[1].kind, DiskOp::Read { range, .. } if range.start == 3));
    h.finish_all();
    assert!(h.owed[&ConnId(1)].is_empty());
}

#[test]
fn breaches_are_refused_and_wrong_jobs_answered() {
    let check = |what: &str, ask: &dyn Fn(&mut Harness)| {
        let mut h = harness();
        h.session(1, ANN, 4);
        ask(&mut h);
        match h.last(1) {
            Some(Reply::Refused(Refusal::Violation { what: told })) => {
                assert!(told.contains(what), "{told:?} does not say {what:?}");
                assert_eq!(h.closed, [ConnId(1)]);
            }
            Some(Reply::Done { result: Err(error), .. }) => {
                assert!(error.to_string().contains(what), "{error} does not say {what:?}");
                assert!(h.closed.is_empty());
            }
            other => panic!("{what}: {other:?}"),
        }
        assert_eq!(h.kinds(), "");
    };
    let zero = |start, count| Op::Zero { range: BlockRange { start, count }, mode: ZeroMode::Contexts };
    check("empty", &|h| h.job(1, 1, zero(0, 0)));
    check("crosses", &|h| h.job(1, 1, zero(1023, 2)));
    check("outside the region", &|h| h.job(1, 1, zero(BLOCKS, 1)));
    check("outside the region", &|h| h.job(1, 1, read(BLOCKS - 1, 2)));
    check("outside the region", &|h| h.job(1, 1, store(&[BLOCKS - 1, BLOCKS])));
    check("do not fit", &|h| {
        let op = Op::Write { range: BlockRange::new(0, 2), crcs: vec![0] };
        h.ask(1, Request::Job { job: JobId(1), op }, data(2));
    });
    check("do not fit", &|h| h.ask(1, Request::Job { job: JobId(1), op: write(0, 2) }, data(1)));
    check("wrong checksum", &|h| {
        let op = Op::Write { range: BlockRange::new(0, 1), crcs: vec![0] };
        h.ask(1, Request::Job { job: JobId(1), op }, data(1));
    });
    check("ascending", &|h| h.job(1, 1, store(&[4, 3])));
    check("ascending", &|h| h.job(1, 1, store(&[4, 4])));
    check("crosses", &|h| h.job(1, 1, store(&[1023, 1024])));
    check("beyond one extent", &|h| h.job(1, 1, store(&[0, u64::MAX])));
    check("above", &|h| h.job(1, 1 << 48, Op::Flush));
    check("a version that no job has", &|h| {
        let Op::Store { mut blocks, join } = store(&[1]) else { return };
        blocks[0].state.version.sequence = 1 << 48;
        h.job(1, 1, Op::Store { blocks, join });
    });
    check("without blocks", &|h| h.job(1, 1, store(&[])));
    check("neither data nor zeros", &|h| {
        let Op::Store { mut blocks, join } = store(&[1]) else { return };
        blocks[0].state.kind = BlockKind::Unverified;
        h.job(1, 1, Op::Store { blocks, join });
    });
    check("payload", &|h| h.ask(1, Request::Job { job: JobId(1), op: Op::Flush }, data(1)));
    check("payload", &|h| h.ask(1, Request::Ping { nonce: 1 }, data(1)));
    check("second Hello", &|h| {
        let hello = Hello {
            min_version: 1,
            max_version: 1,
            volume: VOLUME,
            upstairs: ANN,
            session: 1,
            takeover: false,
        };
        h.ask(1, Request::Hello(hello), Bytes::new());
    });
    check("second Promote", &|h| h.promote(1, 9));
    check("Activated(9)", &|h| {
        let activated = Request::Activated { generation: Generation(9), membership: Membership::default() };
        h.ask(1, activated, Bytes::new());
    });
    check("contexts of extent 9", &|h| {
        h.ask(1, Request::Contexts { query: 9, extent: ExtentId(9) }, Bytes::new())
    });
    for (first, count) in [(0, 0), (0, 10), (u32::MAX, 2), (9, 1)] {
        let request = Request::Digests { query: 8, first: ExtentId(first), count };
        check("digests", &|h| h.ask(1, request.clone(), Bytes::new()));
    }
}

#[test]
fn requests_before_their_time_are_refused() {
    let early = [
        Request::Promote { generation: Generation(9) },
        Request::Ping { nonce: 1 },
        Request::Cancel { job: JobId(1) },
        Request::Job { job: JobId(1), op: Op::Flush },
    ];
    for (greeted, request) in early.into_iter().zip([false, false, true, true]).map(|(r, g)| (g, r)) {
        let mut h = harness();
        if greeted {
            h.hello(1, ANN, false);
        } else {
            h.handle(Event::Connected { conn: ConnId(1) });
        }
        h.handle(Event::Message { conn: ConnId(1), request, payload: Bytes::new() });
        assert!(matches!(h.last(1), Some(Reply::Refused(Refusal::Violation { .. }))), "{:?}", h.last(1));
    }
}

#[test]
fn more_than_the_bounds_is_a_breach() {
    let config = CoreConfig { jobs_max: 3, bytes_max: 4 * BLOCK_BYTES, ..CoreConfig::default() };
    let mut h = Harness::new(config.clone(), facts());
    h.session(1, ANN, 4);
    h.job(1, 1, write(0, 1));
    h.job(1, 2, Op::Flush);
    h.job(1, 3, read(4, 1));
    assert!(h.closed.is_empty());
    h.job(1, 4, read(5, 1));
    assert_eq!(h.closed, [ConnId(1)]);
    let mut h = Harness::new(config, facts());
    h.session(1, ANN, 4);
    h.job(1, 1, write(0, 2));
    h.job(1, 2, read(8, 2));
    assert!(h.closed.is_empty());
    h.job(1, 3, read(16, 1));
    assert_eq!(h.closed, [ConnId(1)]);
}

#[test]
fn what_a_disk_error_means() {
    let io = || DiskError::Io { operation: "pwrite", message: "EIO".to_owned() };
    let full = || DiskError::NoSpace { operation: "pwrite" };
    // A bad read is answered, and that is all.
    let mut h = harness();
    h.session(1, ANN, 4);
    h.job(1, 1, read(0, 1));
    h.finish(0, Some(io()));
    assert!(matches!(h.last(1), Some(Reply::Done { result: Err(JobError::Disk { .. }), .. })));
    assert!(h.closed.is_empty());
    // A full disk ends the session, not the replica.
    h.job(1, 2, write(0, 1));
    h.finish(0, Some(full()));
    assert_eq!(h.closed, [ConnId(1)]);
    assert!(matches!(&h.sent[h.sent.len() - 2].1, Reply::Done { result: Err(JobError::NoSpace), .. }));
    h.session(2, ANN, 4);
    // Anything else ends the replica.
    h.job(2, 3, write(0, 1));
    h.job(2, 4, write(0, 1));
    h.finish(0, Some(io()));
    assert!(matches!(h.last(2), Some(Reply::Leaving { .. })));
    assert_eq!((h.failures, h.kinds().as_str()), (1, ""));
    h.hello(3, ANN, false);
    assert!(matches!(h.last(3), Some(Reply::Refused(Refusal::Failed { .. }))));
    assert!(matches!(h.core.status().state, State::Failed { .. }));
    h.handle(Event::Shutdown);
    assert_eq!((h.stopped, h.kinds().as_str()), (1, ""));
}

#[test]
fn a_failed_flush_is_never_tried_again() {
    let mut h = harness();
    h.session(1, ANN, 4);
    h.job(1, 1, Op::Flush);
    h.finish(0, Some(DiskError::NoSpace { operation: "fdatasync" }));
    assert_eq!((h.failures, h.kinds().as_str()), (1, ""));
}

#[test]
fn the_end_waits_for_the_disk_and_closes_the_region() {
    let mut h = harness();
    h.session(1, ANN, 4);
    h.hello(2, BOB, false);
    h.job(1, 1, write(0, 1));
    h.job(1, 2, write(0, 1));
    h.handle(Event::Shutdown);
    assert!(
        matches!(h.last(1), Some(Reply::Leaving { .. })) && matches!(h.last(2), Some(Reply::Leaving { .. }))
    );
    h.hello(3, BOB, false);
    assert!(matches!(h.last(3), Some(Reply::Refused(Refusal::ShuttingDown))));
    assert_eq!(h.kinds(), "write");
    h.finish(0, None);
    assert_eq!((h.kinds().as_str(), h.stopped), ("close", 0));
    h.finish(0, None);
    assert_eq!((h.stopped, h.core.status().state), (1, State::Stopped));
}

#[test]
fn silent_connections_hold_nothing() {
    let mut h = Harness::new(CoreConfig { connections_max: 3, ..CoreConfig::default() }, facts());
    h.session(1, ANN, 4);
    h.hello(2, ANN, false);
    h.handle(Event::Connected { conn: ConnId(3) });
    for conn in 4..100 {
        h.handle(Event::Connected { conn: ConnId(conn) });
        assert_eq!(h.closed.last(), Some(&ConnId(conn - 1)), "those that never spoke go first");
    }
    assert_eq!(h.core.status().connections, 3);
    h.now = h.core.poll_deadline().unwrap();
    h.handle(Event::Tick);
    h.now = h.now.after(Duration::from_secs(10));
    h.handle(Event::Tick);
    assert_eq!(h.core.status().connections, 1);
    assert_eq!(h.core.poll_deadline(), None);
}

#[test]
fn activated_is_answered_once_stored() {
    let mut h = harness();
    h.session(1, ANN, 4);
    let membership = Membership { epoch: 7, ..Membership::default() };
    h.ask(1, Request::Activated { generation: Generation(4), membership }, Bytes::new());
    assert_eq!(h.kinds(), "header");
    h.ask(1, Request::Ping { nonce: 5 }, Bytes::new());
    assert_eq!(h.last(1), Some(&Reply::Pong { nonce: 5, health: Health::default() }));
    h.finish(0, None);
    assert_eq!(h.last(1), Some(&Reply::ActivatedStored { generation: Generation(4) }));
    assert_eq!(h.core.status().last_active, Generation(4));
}

#[test]
fn whoever_was_greeted_before_the_membership_changed_has_to_come_again() {
    let mut h = harness();
    h.session(1, ANN, 4);
    h.hello(2, BOB, true);
    let membership = Membership { epoch: 7, ..Membership::default() };
    h.ask(1, Request::Activated { generation: Generation(4), membership }, Bytes::new());
    h.promote(2, 5);
    h.finish_all();
    assert!(matches!(h.last(1), Some(Reply::Refused(Refusal::Fenced { .. }))), "{:?}", h.last(1));
    assert!(matches!(h.last(2), Some(Reply::Leaving { .. })), "{:?}", h.last(2));
    h.hello(3, BOB, true);
    let Some(Reply::Welcome(welcome)) = h.last(3) else { panic!("{:?}", h.last(3)) };
    assert_eq!(welcome.membership, membership);
    h.promote(3, 5);
    h.finish_all();
    assert!(matches!(h.last(3), Some(Reply::Promoted { .. })));
}

#[test]
fn an_unknown_connection_is_ignored() {
    let mut h = harness();
    h.ask(77, Request::Ping { nonce: 1 }, Bytes::new());
    h.handle(Event::Closed { conn: ConnId(77) });
    assert!(h.sent.is_empty() && h.closed.is_empty());
    assert_eq!(h.core.next_op, 0);
    assert_eq!(h.core.op_id(5), OpId(1 << 32 | 5));
}
