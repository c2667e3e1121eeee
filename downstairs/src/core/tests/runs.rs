//! Sessions, jobs, failures and disk endings in any order.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use newel_protocol::wire::{Op, Request, ZeroMode};
use newel_protocol::{BlockRange, ExtentId, JobId};
use proptest::prelude::*;

use super::harness::{ANN, BOB, Harness, facts, read, store, write};
use crate::core::CoreConfig;
use crate::core::api::{ConnId, DiskError, Event};

#[derive(Clone, Debug)]
enum Step {
    Job(Op),
    Cancel(u64),
    Contexts(u32),
    Reconnect { bob: bool, takeover: bool },
    Close,
    Finish(usize),
    Fail { pick: usize, full: bool },
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let place =
        || (0..9_u64, 0..6_u64, 1..4_u32).prop_map(|(extent, block, count)| (extent * 1024 + block, count));
    prop_oneof![
        30 => place().prop_map(|(start, count)| Step::Job(write(start, count))),
        15 => place().prop_map(|(start, count)| Step::Job(read(start, count))),
        5 => place().prop_map(|(start, count)| {
            Step::Job(Op::Zero { range: BlockRange::new(start, count), mode: ZeroMode::Punch })
        }),
        5 => place().prop_map(|(start, _)| Step::Job(store(&[start, start + 2]))),
        8 => Just(Step::Job(Op::Flush)),
        5 => (0..9_u32).prop_map(Step::Contexts),
        5 => any::<u64>().prop_map(Step::Cancel),
        2 => any::<(bool, bool)>().prop_map(|(bob, takeover)| Step::Reconnect { bob, takeover }),
        1 => Just(Step::Close),
        60 => any::<usize>().prop_map(Step::Finish),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(pick, full)| Step::Fail { pick, full }),
        2 => (0..9_u64).prop_map(Step::Wait),
    ]
}

/// Sessions, jobs and disk endings in any order: the harness checks what must hold all along, and in the end everything
/// asked for is answered.
fn check_run(steps: Vec<Step>) {
    let mut h = Harness::new(CoreConfig { disk_reads_max: 2, ..CoreConfig::default() }, facts());
    let (mut conn, mut generation, mut job) = (1, 3, 0);
    h.session(conn, ANN, generation);
    for step in steps {
        let in_force = h.core.session.as_ref().is_some_and(|session| session.conn == ConnId(conn));
        match step {
            Step::Job(op) if in_force => {
                job += 1;
                h.job(conn, job, op);
            }
            Step::Cancel(pick) if in_force => {
                let pick = JobId(pick % (job + 1));
                h.ask(conn, Request::Cancel { job: pick }, Bytes::new());
            }
            Step::Contexts(extent) if in_force => {
                h.ask(conn, Request::Contexts { query: 9, extent: ExtentId(extent) }, Bytes::new());
            }
            Step::Reconnect { bob, takeover } => {
                conn += 1;
                generation += u32::from(bob || takeover);
                h.hello(conn, if bob { BOB } else { ANN }, takeover);
                if !h.closed.contains(&ConnId(conn)) {
                    h.promote(conn, generation);
                }
            }
            Step::Close => {
                h.owed.remove(&ConnId(conn));
                h.handle(Event::Closed { conn: ConnId(conn) });
            }
            Step::Finish(pick) if !h.disk.is_empty() => {
                let index = pick % h.disk.len();
                h.finish(index, None);
            }
            Step::Fail { pick, full } if !h.disk.is_empty() => {
                let error = if full {
                    DiskError::NoSpace { operation: "pwrite" }
                } else {
                    DiskError::Io { operation: "pwrite", message: "EIO".to_owned() }
                };
                let index = pick % h.disk.len();
                h.finish(index, Some(error));
            }
            Step::Wait(seconds) => {
                h.now = h.now.after(Duration::from_secs(seconds));
                h.handle(Event::Tick);
            }
            Step::Job(_) | Step::Cancel(_) | Step::Contexts(_) | Step::Finish(_) | Step::Fail { .. } => {}
        }
    }
    h.finish_all();
    assert!(h.owed.values().all(BTreeSet::is_empty), "never answered: {:?}", h.owed);
    let status = h.core.status();
    assert_eq!((status.jobs_waiting, status.jobs_at_disk, status.bytes, status.flushes), (0, 0, 0, 0));
    h.handle(Event::Shutdown);
    h.finish_all();
    assert_eq!(h.stopped, 1);
}

proptest! {
    #[test]
    fn whatever_happens(steps in proptest::collection::vec(step(), 0..300)) {
        check_run(steps);
    }
}
