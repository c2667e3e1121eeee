//! What every engine promises, of each of them.

use std::collections::VecDeque;
use std::fs::File;

use bytes::Bytes;

use super::buffer::AlignedBuf;
use super::engine::{Completion, Engine, EngineKind, Payload, Request, start};

fn engines() -> Vec<EngineKind> {
    <EngineKind as clap::ValueEnum>::value_variants().to_vec()
}

fn on(kind: EngineKind, file: File, depth: u32) -> Box<dyn Engine<u64>> {
    start(kind, file, depth, None).unwrap()
}

#[test]
fn requests_come_back_with_what_was_written() {
    for kind in engines() {
        let engine = on(kind, tempfile::tempfile().unwrap(), 4);
        let mut refused = Vec::new();
        let many = vec![Bytes::from_static(b"ab"), Bytes::from_static(b"cd")];
        let mut copy = AlignedBuf::zeroed(2);
        copy.copy_from_slice(b"ef");
        let payloads =
            [Payload::Write(Bytes::from_static(b"xy")), Payload::WriteMany(many), Payload::WriteCopy(copy)];
        let offsets = [0, 2, 6];
        let mut requests: VecDeque<_> = (0..)
            .zip(offsets.into_iter().zip(payloads))
            .map(|(user, (offset, payload))| Request { offset, payload, user })
            .collect();
        // A bad offset is refused and does not hold up the others.
        let bad =
            Request { offset: u64::MAX - 1, payload: Payload::Write(Bytes::from_static(b"no")), user: 9 };
        requests.insert(1, bad);
        engine.submit(&mut requests, 10, &mut refused);
        assert!(requests.is_empty());
        let mut done = refused;
        while done.len() < 4 {
            engine.wait(&mut done).unwrap();
        }
        done.sort_by_key(|completion| completion.user);
        let results: Vec<_> = done.iter().map(|done| done.result.as_ref().ok().copied()).collect();
        assert_eq!(results, [Some(2), Some(4), Some(2), None], "{kind:?}");

        let request = Request { offset: 0, payload: Payload::Read(AlignedBuf::zeroed(16)), user: 5 };
        engine.submit(&mut VecDeque::from([request]), 1, &mut Vec::new());
        done.clear();
        engine.wait(&mut done).unwrap();
        let Some(Completion { payload: Payload::Read(bytes), result: Ok(8), user: 5, .. }) = done.pop()
        else {
            panic!("{kind:?}: {done:?}")
        };
        assert_eq!(&bytes[..8], b"xyabcdef");
        assert_eq!(engine.in_flight(), 0);
    }
}

#[test]
fn what_has_no_room_stays() {
    for kind in engines() {
        let engine = on(kind, tempfile::tempfile().unwrap(), 2);
        let request =
            |user| Request { offset: user, payload: Payload::Write(Bytes::from_static(b"z")), user };
        let mut requests: VecDeque<_> = (0..500).map(request).collect();
        let (mut refused, mut done) = (Vec::new(), Vec::new());
        while done.len() < 500 {
            let before = requests.len();
            let taken = engine.submit(&mut requests, 3, &mut refused).requests;
            assert!(taken <= 2 && before - requests.len() == taken, "{kind:?}");
            assert!(engine.in_flight() <= 2, "{kind:?}");
            engine.wait(&mut done).unwrap();
        }
        assert!(refused.is_empty() && done.iter().all(|done| matches!(done.result, Ok(1))), "{kind:?}");
        let mut users: Vec<_> = done.iter().map(|done| done.user).collect();
        users.sort_unstable();
        assert!(users.into_iter().eq(0..500), "{kind:?}: each once");
    }
}

#[test]
fn the_eventfd_tells_of_completions() {
    for kind in engines() {
        let raised = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        let told = Some(raised.try_clone().unwrap());
        let engine: Box<dyn Engine<u64>> = start(kind, tempfile::tempfile().unwrap(), 8, told).unwrap();
        let mut done = Vec::new();
        for round in 0..50 {
            let request =
                Request { offset: 0, payload: Payload::Write(Bytes::from_static(b"q")), user: round };
            engine.submit(&mut VecDeque::from([request]), 1, &mut Vec::new());
            while done.is_empty() {
                // Blocks until it is raised.
                rustix::io::read(&raised, &mut [0; 8]).unwrap();
                engine.poll(&mut done).unwrap();
            }
            assert!(done.drain(..).eq_by_user(&[round]), "{kind:?}");
        }
    }
}

trait ByUser {
    fn eq_by_user(self, users: &[u64]) -> bool;
}

impl<I: Iterator<Item = Completion<u64>>> ByUser for I {
    fn eq_by_user(self, users: &[u64]) -> bool {
        self.map(|done| done.user).eq(users.iter().copied())
    }
}
