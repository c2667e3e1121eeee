//! How much a lane hands to the kernel at once, learnt from how the kernel takes it.
//!
//! Invariants:
//! - Never above `most`, and never below what the kernel says that the queue holds: where it is full of less from here, others filled it, and
//!   whoever gave way to them would fall ever further behind them. Where the kernel says nothing, never below an eighth of `most`.
//! - A submission that slept lowers the limit at once, by a quarter at least. It rises again by one at a time, and only while it is what
//!   holds requests back: quickly up to where the kernel last slept; from there the more seldom the more often that was tried in vain,
//!   until it went well for as long.
//! - After a submission that slept the next ones are small: what is submitted first is not to wait for the rest.
//!
//! How: the queue of a device is shared with others and is not always what the kernel says it is. A thread that sleeps in `io_submit`
//! with `n` requests in flight is the one sign that `n` are too many here and now.
//!
//! Left to others: counting what is in flight ([`super::gate`]).

/// Submissions at the limit without sleep before it rises by one.
const STEP_AFTER: u32 = 8;
/// The same where the kernel slept before; doubled each time that it does so again.
const PROBE_AFTER: u32 = 256;
const MAX_PROBE_AFTER: u32 = 8192;
/// More at once would delay the contexts and answers of the first ones.
const MAX_BATCH: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    limit: usize,
    least: usize,
    most: usize,
    batch: usize,
    /// The lowest limit at which the kernel lately slept.
    slept_at: Option<usize>,
    /// Submissions at the limit since it last changed.
    clean: u32,
    probe_after: u32,
}

impl Limit {
    pub(super) fn new(guess: Option<usize>, most: usize) -> Self {
        let most = most.max(1);
        let limit = guess.unwrap_or(most).clamp(1, most);
        let least = if guess.is_some() { limit } else { (most / 8).max(1) };
        Self { limit, least, most, batch: MAX_BATCH, slept_at: None, clean: 0, probe_after: PROBE_AFTER }
    }

    pub(super) fn value(&self) -> usize {
        self.limit
    }

    /// How much may be added now to what is in flight.
    pub(super) fn room(&self, in_flight: usize) -> usize {
        self.limit.saturating_sub(in_flight).min(self.batch)
    }

    /// `more` were added to `in_flight`.
    pub(super) fn learn(&mut self, in_flight: usize, more: usize, slept: bool) {
        let reached = in_flight + more;
        if slept {
            self.batch = (self.batch / 2).max(1);
            // With one alone in flight the queue was full of what others do.
            if reached > 1 {
                self.lower(reached.min(self.limit));
            }
            return;
        }
        self.batch = (self.batch * 2).min(MAX_BATCH);
        if reached >= self.limit && self.limit < self.most {
            self.clean += 1;
            let probes = self.slept_at.is_some_and(|slept_at| self.limit + 1 >= slept_at);
            if self.clean >= if probes { self.probe_after } else { STEP_AFTER } {
                self.rise();
            }
        }
    }

    fn lower(&mut self, reached: usize) {
        if self.slept_at.is_some_and(|slept_at| reached >= slept_at) {
            self.probe_after = (self.probe_after * 2).min(MAX_PROBE_AFTER);
        }
        self.slept_at = Some(reached.min(self.slept_at.unwrap_or(usize::MAX)));
        self.limit = (reached - (reached / 4).max(1)).max(self.least);
        self.clean = 0;
    }

    fn rise(&mut self) {
        if self.slept_at.is_some_and(|slept_at| self.limit >= slept_at) {
            // As long as it took to come here nothing slept: the queue is deeper than it was.
            self.slept_at = None;
            self.probe_after = PROBE_AFTER;
        }
        self.limit += 1;
        self.clean = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A device that holds `depth`, kept full by a guest: how many submissions of how many slept.
    fn run(limit: &mut Limit, depth: usize, submissions: usize) -> (usize, usize) {
        let (mut in_flight, mut slept_times) = (0_usize, 0);
        for _ in 0..submissions {
            let room = limit.room(in_flight);
            if room > 0 {
                // The kernel takes all of it, but sleeps until only `depth` are left.
                let slept = in_flight + room > depth;
                limit.learn(in_flight, room, slept);
                slept_times += usize::from(slept);
                in_flight = (in_flight + room).min(depth);
            }
            in_flight = in_flight.saturating_sub(1);
        }
        (slept_times, submissions)
    }

    #[test]
    fn it_finds_the_depth_and_then_seldom_sleeps() {
        let check = |guess: Option<usize>, depth: usize, at_first: usize| {
            let mut limit = Limit::new(guess, 128);
            let (slept, _) = run(&mut limit, depth, 20_000);
            assert!(slept <= at_first, "{depth}: slept {slept} times to learn it");
            let (slept, of) = run(&mut limit, depth, 50_000);
            assert!(slept * 500 <= of, "{depth}: slept {slept} times of {of} once it was known");
            let found = limit.value();
            assert!(found <= depth + 1 && found * 4 >= depth * 3, "{depth}: {found}");
        };
        check(Some(4), 4, 20);
        check(None, 17, 60);
        check(None, 63, 60);
        check(Some(32), 63, 60);
    }

    #[test]
    fn others_on_the_same_device_do_not_press_it_down() {
        let check = |guess, least| {
            let mut limit = Limit::new(guess, 128);
            for _ in 0..10_000 {
                // Whatever it adds, the queue is full of what others have added.
                limit.learn(2, limit.room(2), true);
            }
            assert_eq!(limit.value(), least);
        };
        check(Some(256), 128);
        check(Some(63), 63);
        check(None, 16);
    }

    #[test]
    fn a_device_that_never_holds_up_is_used_to_the_full() {
        let mut limit = Limit::new(Some(256), 128);
        assert_eq!((run(&mut limit, 1000, 1000).0, limit.value()), (0, 128));
        let mut limit = Limit::new(Some(2), 128);
        run(&mut limit, 1000, 2000);
        assert_eq!(limit.value(), 128);
    }

    #[test]
    fn it_recovers_when_the_device_does() {
        let mut limit = Limit::new(None, 64);
        run(&mut limit, 8, 1000);
        assert!(limit.value() <= 10);
        run(&mut limit, 1000, 400_000);
        assert_eq!(limit.value(), 64);
    }

    #[test]
    fn what_follows_a_sleep_is_small() {
        let mut limit = Limit::new(None, 128);
        assert_eq!(limit.room(0), MAX_BATCH);
        for _ in 0..6 {
            limit.learn(0, limit.room(0), true);
        }
        assert_eq!(limit.room(0), 1);
    }

    proptest! {
        #[test]
        fn it_stays_within_its_bounds(
            guess in proptest::option::of(0_usize..1000),
            most in 0_usize..200,
            steps in proptest::collection::vec((0_usize..300, 0_usize..100, any::<bool>()), 0..300),
        ) {
            let mut limit = Limit::new(guess, most);
            for (in_flight, more, slept) in steps {
                limit.learn(in_flight, more, slept);
                prop_assert!((1..=most.max(1)).contains(&limit.value()));
                prop_assert!(in_flight > 0 || limit.room(in_flight) > 0, "something always goes on");
                prop_assert!(in_flight + limit.room(in_flight) <= limit.value().max(in_flight));
            }
        }
    }
}
