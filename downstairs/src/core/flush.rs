//! When a flush may run, and which flushes share one.
//!
//! Invariants:
//! - A flush is ready once every change that arrived before it is finished; it waits for none that arrived after it.
//! - One flush runs at a time. Those that become ready meanwhile are served together by the next one.
//!
//! How: the flushes cut the stream of changes into eras. A change counts for the era in which it arrived, so its end costs
//! one decrement however many flushes and changes are outstanding, and a flush is ready when its era and all before it
//! are empty.

use std::collections::VecDeque;

use newel_protocol::JobId;

use super::api::Time;

/// A flush that somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FlushJob {
    pub(super) job: JobId,
    pub(super) arrived: Time,
}

#[derive(Debug, Default)]
struct Era {
    unfinished: usize,
    /// The flush at its end; only the last era has none.
    flush: Option<FlushJob>,
}

#[derive(Debug)]
pub(super) struct Flusher {
    /// Never empty; the last one is open.
    eras: VecDeque<Era>,
    /// The number of the first era in `eras`.
    base: u64,
    ready: Vec<FlushJob>,
    running: Option<Vec<FlushJob>>,
}

impl Flusher {
    pub(super) fn new() -> Self {
        Self { eras: VecDeque::from([Era::default()]), base: 0, ready: Vec::new(), running: None }
    }

    /// The era of a change that arrives now.
    pub(super) fn change_arrived(&mut self) -> u64 {
        let number = self.base + self.eras.len() as u64 - 1;
        if let Some(era) = self.eras.back_mut() {
            era.unfinished += 1;
        }
        number
    }

    pub(super) fn change_finished(&mut self, era: u64) {
        let index = usize::try_from(era.wrapping_sub(self.base)).unwrap_or(usize::MAX);
        let Some(era) = self.eras.get_mut(index) else {
            debug_assert!(false, "a change of a bygone era finished");
            return;
        };
        era.unfinished -= 1;
        if index == 0 {
            self.close_empty_eras();
        }
    }

    pub(super) fn flush_arrived(&mut self, flush: FlushJob) {
        if let Some(era) = self.eras.back_mut() {
            era.flush = Some(flush);
        }
        self.eras.push_back(Era::default());
        self.close_empty_eras();
    }

    /// Starts a flush if one may start and somebody wants it: a ready one, or the caller (`wanted`). Says which number
    /// it makes durable, or none.
    pub(super) fn start(&mut self, wanted: bool) -> Option<Option<JobId>> {
        if self.running.is_some() || (self.ready.is_empty() && !wanted) {
            return None;
        }
        let served = std::mem::take(&mut self.ready);
        let highest = served.iter().map(|flush| flush.job).max();
        self.running = Some(served);
        Some(highest)
    }

    /// The running flush ended; those that it served.
    pub(super) fn finished(&mut self) -> Vec<FlushJob> {
        self.running.take().unwrap_or_default()
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Forgets whoever waits, and the changes that they wait for. One that runs stays so until it is finished.
    pub(super) fn drop_session(&mut self) {
        self.base += self.eras.len() as u64;
        self.eras.clear();
        self.eras.push_back(Era::default());
        self.ready.clear();
        if let Some(served) = &mut self.running {
            served.clear();
        }
    }

    /// Flushes not yet answered.
    pub(super) fn outstanding(&self) -> usize {
        self.eras.len() - 1 + self.ready.len() + self.running.as_ref().map_or(0, Vec::len)
    }

    fn close_empty_eras(&mut self) {
        while let Some(Era { unfinished: 0, flush: Some(flush) }) = self.eras.front() {
            self.ready.push(*flush);
            self.eras.pop_front();
            self.base += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Change,
        Flush,
        Finish(usize),
        FlushDone,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => Just(Step::Change),
            2 => Just(Step::Flush),
            4 => any::<usize>().prop_map(Step::Finish),
            2 => Just(Step::FlushDone),
        ]
    }

    /// The oracle keeps everything in arrival order.
    fn check(steps: Vec<Step>) {
        let mut flusher = Flusher::new();
        let mut changes: Vec<(u64, u64)> = Vec::new();
        let mut flushes: Vec<u64> = Vec::new();
        let mut running: Option<Vec<u64>> = None;
        for (now, step) in (0_u64..).zip(steps) {
            match step {
                Step::Change => changes.push((now, flusher.change_arrived())),
                Step::Flush => {
                    flushes.push(now);
                    flusher.flush_arrived(FlushJob { job: JobId(now), arrived: Time(now) });
                }
                Step::Finish(pick) if !changes.is_empty() => {
                    let (_, era) = changes.remove(pick % changes.len());
                    flusher.change_finished(era);
                }
                Step::FlushDone => {
                    let served: Vec<_> = flusher.finished().iter().map(|flush| flush.job.0).collect();
                    assert_eq!(served, running.take().unwrap_or_default());
                }
                Step::Finish(_) => {}
            }
            let oldest = changes.iter().map(|&(arrived, _)| arrived).min().unwrap_or(u64::MAX);
            let expected = flushes.iter().copied().filter(|&flush| flush < oldest).max();
            let started = flusher.start(false);
            if running.is_some() || expected.is_none() {
                assert_eq!(started, None);
            } else {
                assert_eq!(started, Some(expected.map(JobId)));
                running = Some(flushes.extract_if(.., |&mut flush| flush < oldest).collect());
            }
            assert_eq!(flusher.outstanding(), flushes.len() + running.as_ref().map_or(0, Vec::len));
        }
    }

    proptest! {
        #[test]
        fn waits_for_all_before_and_none_after(steps in proptest::collection::vec(step(), 0..200)) {
            check(steps);
        }
    }

    #[test]
    fn one_wanted_inside_runs_without_a_number() {
        let mut flusher = Flusher::new();
        flusher.change_arrived();
        assert_eq!(flusher.start(true), Some(None));
        assert_eq!(flusher.start(true), None);
        assert!(flusher.finished().is_empty());
    }
}
