//! How fast a joiner is copied to, so that guests hardly notice.
//!
//! What a copy costs the guest depends on disks, links and processors that nobody here knows. So it is measured: how long
//! guests' requests take while nothing is copied, and while something is. Copying gets faster while the slow ones of the
//! latter (the slowest fiftieth) stay within one and a half times those of the former, and slower when they don't.
//! Short rests in between keep the measure of what is usual up to date.
//!
//! Invariants:
//! - The rate stays within [`RATE_MIN`] and [`RATE_MAX`]: a joiner arrives, whatever guests do.
//! - With no guest to be protected it rises at once.
//! - What is granted at once is bounded by [`BURST`], so that a rest is not made up for.

use std::time::Duration;

use newel_protocol::BLOCK_BYTES;

use super::api::Time;
use super::classes;

/// Bytes a second.
const RATE_MIN: u64 = 24 << 20;
const RATE_MAX: u64 = 4 << 30;
pub(super) const RATE_FIRST: u64 = 96 << 20;
/// Worth of time at the rate in force.
const BURST: Duration = Duration::from_millis(4);
/// Requests are looked at together over this time.
const INTERVAL: Duration = Duration::from_millis(50);
/// Copying goes on for so long, then rests for one interval.
const ACTIVE: Duration = Duration::from_secs(1);
/// What was under way when a rest began is over by then.
const SETTLING: Duration = Duration::from_millis(10);
/// Fewer requests in an interval say nothing, and few guests that wait need no protection from each other.
const SAMPLES_MIN: u32 = 10;
/// Differences below that (a wake-up) are no slowness.
const SLACK: u64 = 20_000;

#[derive(Debug)]
pub(super) struct Pace {
    rate: u64,
    /// Bytes that may be copied now; below 0 if a copy took more.
    credit: i64,
    refilled: Time,
    interval: Interval,
    /// Nanoseconds that slow requests take while nothing is copied.
    usual: Option<u64>,
    /// While copying: when the next rest begins, or the one in force ends.
    turn: Time,
    mode: Mode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Nobody is copied to.
    Off,
    Copying,
    Resting,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            rate: RATE_FIRST,
            credit: 0,
            refilled: Time(0),
            interval: Interval::default(),
            usual: None,
            turn: Time(0),
            mode: Mode::Off,
        }
    }
}

impl Pace {
    /// A guest's request was answered.
    pub(super) fn note(&mut self, now: Time, took: Duration) {
        self.roll(now);
        if now < self.interval.began {
            return;
        }
        self.interval.note(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Copying begins, goes on, or has ended.
    pub(super) fn set_copying(&mut self, now: Time, copying: bool) {
        match (copying, self.mode) {
            (true, Mode::Off) => {
                self.roll(now);
                self.interval.restart(now);
                self.mode = Mode::Copying;
                self.rate = RATE_FIRST;
                self.turn = now.after(ACTIVE);
                (self.credit, self.refilled) = (0, now);
            }
            (false, Mode::Copying | Mode::Resting) => {
                self.mode = Mode::Off;
                self.interval.restart(now);
            }
            (true, Mode::Copying | Mode::Resting) | (false, Mode::Off) => {}
        }
    }

    /// Blocks that may be copied now.
    pub(super) fn grant(&mut self, now: Time) -> u64 {
        self.roll(now);
        self.take_turns(now);
        if self.mode == Mode::Resting {
            return 0;
        }
        let per_ns =
            |time: Duration| u128::from(self.rate) * time.as_nanos() / Duration::from_secs(1).as_nanos();
        let burst = i64::try_from(per_ns(BURST)).unwrap_or(i64::MAX).max(BLOCK_BYTES as i64);
        let earned = i64::try_from(per_ns(now.since(self.refilled))).unwrap_or(i64::MAX);
        self.credit = self.credit.saturating_add(earned).min(burst);
        self.refilled = now;
        u64::try_from(self.credit).unwrap_or(0) / BLOCK_BYTES as u64
    }

    /// Of the blocks granted so many are left; below 0 if more were taken, which has to be made up for.
    pub(super) fn spend(&mut self, granted: u64, left: i64) {
        let taken = i64::try_from(granted).unwrap_or(i64::MAX).saturating_sub(left);
        self.credit = self.credit.saturating_sub(taken.saturating_mul(BLOCK_BYTES as i64));
    }

    /// When a block will be granted, if none is now.
    pub(super) fn next_grant(&self) -> Time {
        if self.mode == Mode::Resting {
            return self.turn;
        }
        let missing = u64::try_from((BLOCK_BYTES as i64).saturating_sub(self.credit)).unwrap_or(0);
        let wait = u128::from(missing) * 1_000_000_000 / u128::from(self.rate.max(1));
        // One more, as both divisions round down.
        self.refilled
            .after(Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX).saturating_add(1000)))
    }

    fn take_turns(&mut self, now: Time) {
        if now < self.turn {
            return;
        }
        match self.mode {
            Mode::Off => {}
            Mode::Copying => {
                self.mode = Mode::Resting;
                self.turn = now.after(SETTLING + INTERVAL);
                self.interval.restart(now.after(SETTLING));
            }
            Mode::Resting => {
                self.look();
                self.mode = Mode::Copying;
                self.turn = now.after(ACTIVE);
                self.interval.restart(now);
                (self.credit, self.refilled) = (0, now);
            }
        }
    }

    fn roll(&mut self, now: Time) {
        if now.since(self.interval.began) >= INTERVAL {
            self.look();
            self.interval.restart(now);
        }
    }

    /// Draws the conclusion of an interval.
    fn look(&mut self) {
        let slow = self.interval.slow();
        match (self.mode, slow, self.usual) {
            (Mode::Off | Mode::Resting, Some(slow), None) => self.usual = Some(slow),
            (Mode::Off | Mode::Resting, Some(slow), Some(usual)) => {
                self.usual = Some(if slow < usual {
                    usual - (usual - slow) / 4
                } else {
                    // Others on the machine cause it too, now and then: one such interval must not excuse what copies do.
                    usual + (slow.min(usual.saturating_mul(2)) - usual) / 8
                });
            }
            (Mode::Off | Mode::Resting, None, _) => {}
            (Mode::Copying, Some(slow), Some(usual)) if slow > usual + usual / 2 + SLACK => {
                self.rate = (self.rate / 4 * 3).max(RATE_MIN);
            }
            (Mode::Copying, Some(_), Some(_)) => self.rate = (self.rate + self.rate / 8).min(RATE_MAX),
            // A guest that came meanwhile: what is usual shows in the next rest.
            (Mode::Copying, Some(_), None) => {}
            (Mode::Copying, None, _) => self.rate = self.rate.saturating_mul(2).min(RATE_MAX),
        }
    }
}

const BUCKETS: usize = classes::count(64);

/// How long the requests of one interval took, in ns by class.
#[derive(Debug)]
struct Interval {
    began: Time,
    count: u32,
    buckets: Box<[u32; BUCKETS]>,
}

impl Default for Interval {
    fn default() -> Self {
        Self { began: Time(0), count: 0, buckets: Box::new([0; BUCKETS]) }
    }
}

impl Interval {
    fn restart(&mut self, now: Time) {
        if self.count > 0 {
            self.buckets.fill(0);
        }
        (self.count, self.began) = (0, now);
    }

    fn note(&mut self, nanos: u64) {
        if let Some(bucket) = self.buckets.get_mut(classes::class_of(nanos)) {
            *bucket += 1;
            self.count += 1;
        }
    }

    /// What the slowest fiftieth took at least.
    fn slow(&self) -> Option<u64> {
        if self.count < SAMPLES_MIN {
            return None;
        }
        let mut left = self.count / 50;
        for (index, &count) in self.buckets.iter().enumerate().rev() {
            if count > left {
                return Some(classes::values_of(index).0);
            }
            left -= count;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// A guest with a request every 100 µs, whose slow ones take `slow(rate)` ns while copies run; tells the bytes copied
    /// in the last of `seconds`.
    fn run(pace: &mut Pace, seconds: u64, slow: impl Fn(u64) -> u64) -> u64 {
        let start = 1000 * MS;
        let mut copied = 0;
        for step in 0..10 * 1000 {
            pace.note(Time(step * MS / 10), Duration::from_nanos(if step % 20 == 0 { 2 * MS } else { MS }));
        }
        let mut number = 0_u64;
        pace.set_copying(Time(start), true);
        for now in (start..start + seconds * 1000 * MS).step_by(100_000) {
            let now = Time(now);
            let blocks = pace.grant(now);
            pace.spend(blocks, 0);
            if now.0 >= start + (seconds - 1) * 1000 * MS {
                copied += blocks * BLOCK_BYTES as u64;
            }
            number += 1;
            let resting = pace.mode == Mode::Resting;
            let took = match (number % 20, resting) {
                (0, true) => 2 * MS,
                (0, false) => slow(pace.rate),
                (_, _) => MS,
            };
            pace.note(now, Duration::from_nanos(took));
        }
        copied
    }

    #[test]
    fn it_settles_where_the_guest_hardly_notices() {
        // One millisecond more for every 200 MiB/s: half again of two at 200.
        let copied = run(&mut Pace::default(), 6, |rate| 2 * MS + rate * MS / (200 << 20));
        assert!((120 << 20..260 << 20).contains(&copied), "{} MiB in a second", copied >> 20);
    }

    #[test]
    fn a_joiner_arrives_however_slow_the_guest_gets() {
        let copied = run(&mut Pace::default(), 6, |_| 1000 * MS);
        assert!((RATE_MIN / 4 * 3..=RATE_MIN + (4 << 20)).contains(&copied), "{} MiB", copied >> 20);
    }

    #[test]
    fn without_a_guest_it_goes_as_fast_as_it_can() {
        let mut pace = Pace::default();
        pace.set_copying(Time(0), true);
        let mut copied = 0;
        for now in (0..2000 * MS).step_by(100_000) {
            let blocks = pace.grant(Time(now));
            pace.spend(blocks, 0);
            copied += blocks;
        }
        assert!(copied * BLOCK_BYTES as u64 > 2 << 30, "{copied} blocks");
    }

    #[test]
    fn a_grant_comes_when_it_was_said() {
        let mut pace = Pace::default();
        pace.set_copying(Time(0), true);
        let mut now = Time(0);
        for _ in 0..1000 {
            let blocks = pace.grant(now);
            pace.spend(blocks, -16);
            assert_eq!(pace.grant(now), 0);
            let next = pace.next_grant();
            assert!(next > now);
            now = next;
            assert!(pace.grant(now) > 0 || pace.mode == Mode::Resting);
        }
    }

    #[test]
    fn slow_ones_are_found() {
        let mut interval = Interval::default();
        assert_eq!(interval.slow(), None);
        for number in 0..1000_u64 {
            interval.note(if number % 25 == 0 { 5 * MS } else { number });
        }
        let slow = interval.slow().unwrap();
        assert!((5 * MS / 8 * 7..=5 * MS).contains(&slow), "{slow}");
    }
}
