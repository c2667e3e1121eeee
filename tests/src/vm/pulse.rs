//! Tells a guest that is busy, or waits for something, from one that stands still because its emulation lost a timer.
//!
//! Invariants:
//! - Whatever a guest that lives does shows: its agent beats every few seconds, and its console tells of a shutdown that waits.
//! - One that stands still uses no processor. So a slow host, or a guest at its work, is never taken for one.
//! - Only standing still is tried again, a few times and loudly. What failed in a guest that lives has failed.

#![expect(clippy::disallowed_methods, reason = "tests on real processes live in real time")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Without any sign of life.
const STILL: Duration = Duration::from_secs(60);
/// Of one processor: the emulation itself, with a guest that ticks, takes more.
const IDLE_SHARE: f64 = 0.02;
const TRIES: usize = 3;

#[derive(Debug)]
pub(super) struct Pulse {
    pid: u32,
    /// They grow while the guest lives.
    signs: Vec<PathBuf>,
    last: Seen,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    bytes: u64,
    cpu: Duration,
    at: Instant,
}

impl Pulse {
    pub(super) fn of(pid: u32, signs: Vec<PathBuf>) -> Self {
        let last = Seen { bytes: 0, cpu: Duration::ZERO, at: Instant::now() };
        let mut pulse = Self { pid, signs, last };
        pulse.last = pulse.look();
        pulse
    }

    fn look(&self) -> Seen {
        let length = |sign: &PathBuf| std::fs::metadata(sign).map_or(0, |found| found.len());
        Seen { bytes: self.signs.iter().map(length).sum(), cpu: cpu_of(self.pid), at: Instant::now() }
    }

    /// True if there has been no sign of life for a while in which the emulation did nothing either.
    pub(super) fn stands_still(&mut self) -> bool {
        let now = self.look();
        if now.bytes != self.last.bytes {
            self.last = now;
        }
        let silent = now.at.duration_since(self.last.at);
        let worked = now.cpu.saturating_sub(self.last.cpu);
        silent >= STILL && worked.as_secs_f64() < IDLE_SHARE * silent.as_secs_f64()
    }
}

/// Processor time of a process, all its threads; none if it is gone.
fn cpu_of(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name, which may hold anything: state, then eleven more, then user and system time.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks: u64 =
        fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// What a test ends with if its guest stood still.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frozen;

impl Frozen {
    pub(super) fn unwind() -> ! {
        resume_unwind(Box::new(Self))
    }
}

/// Runs a test on machines of its own; once more from the start if the machine stood still.
pub fn anew_if_frozen(test: &str, run: impl Fn()) {
    for left in (0..TRIES).rev() {
        let Err(ended) = catch_unwind(AssertUnwindSafe(&run)) else { return };
        if left == 0 || !ended.is::<Frozen>() {
            assert!(!ended.is::<Frozen>(), "{test}: the emulated machine stood still {TRIES} times");
            resume_unwind(ended);
        }
        eprintln!(
            "{test}: the emulated machine stood still: no sign of life, no work. It starts anew, {left} times at most"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_standing_still_is_tried_again() {
        let runs = std::cell::Cell::new(0);
        anew_if_frozen("a test", || {
            runs.set(runs.get() + 1);
            if runs.get() < TRIES {
                Frozen::unwind();
            }
        });
        assert_eq!(runs.get(), TRIES);
        let failed = catch_unwind(AssertUnwindSafe(|| {
            anew_if_frozen("a test", || {
                runs.set(runs.get() + 1);
                resume_unwind(Box::new("it failed"));
            });
        }));
        assert!(failed.is_err());
        assert_eq!(runs.get(), TRIES + 1, "what failed is not tried again");
        let frozen = catch_unwind(AssertUnwindSafe(|| anew_if_frozen("a test", || Frozen::unwind())));
        assert!(frozen.is_err_and(|ended| !ended.is::<Frozen>()), "it ends at last, and says why");
    }

    #[test]
    fn work_is_seen() {
        let before = cpu_of(std::process::id());
        let mut sum = 0_u64;
        while cpu_of(std::process::id()) < before + Duration::from_millis(50) {
            sum = std::hint::black_box(sum + 1);
        }
        assert_eq!(cpu_of(u32::MAX), Duration::ZERO);
    }
}
