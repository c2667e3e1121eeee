//! Waiting for a condition.

#![expect(clippy::disallowed_methods, reason = "tests on real processes live in real time")]

use std::time::{Duration, Instant};

/// Between two looks at a condition.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Asks `condition` until it gives a value; panics with `what` after `within`.
#[track_caller]
pub fn until<T>(what: &str, within: Duration, condition: impl FnMut() -> Option<T>) -> T {
    match try_until(within, condition) {
        Some(value) => value,
        None => panic!("{what}: not within {within:?}"),
    }
}

/// Asks `condition` until it gives a value, at most for `within`.
pub fn try_until<T>(within: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + within;
    loop {
        if let Some(value) = condition() {
            return Some(value);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Lets time pass: the length of a fault or of a measurement, never a hope that something is done by then.
pub fn pass(time: Duration) {
    try_until(time, || None::<()>);
}

/// A clock for figures.
#[derive(Clone, Copy, Debug)]
pub struct Watch(Instant);

impl Watch {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}
