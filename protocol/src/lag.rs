//! How long a daemon keeps things waiting: histograms of delays, and the meter of a reactor's stalls.
//!
//! The meter asks for a tick every 10 ms while events come, and is told when the tick got its turn: so late was the reactor for
//! whatever else became ready. A tick that came 300 ms late stands for all the ticks that ought to have come meanwhile: else
//! one long stall would count as little as one short turn. What ran is timed besides, so that the longest stall is exact.
//!
//! Invariants:
//! - The first event after a rest asks for a tick before it is handled, so that no stall escapes.
//! - A reactor without events asks for none: an idle daemon rests.
//! - Memory is fixed; a delay beyond what is kept counts as the longest kept.
//!
//! Left to others: the clock, the timer and the log (the shells).

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Between two ticks: a sample of moments, enough for percentiles. (On a small virtual machine a timer of 1 ms cost every write a
/// quarter more, as each wait of the reactor then has to arm a timer that is about to fire.)
const TICK_NS: u64 = 10_000_000;
/// After this long without an event the ticks end.
const REST_AFTER_NS: u64 = 40_000_000;
/// A stall that somebody should hear of: a ping or another replica's job waited as long.
const STALL_NS: u64 = 20_000_000;
/// At most one line about stalls in this time.
const QUIET_NS: u64 = 10_000_000_000;
/// The longest delay told apart from longer ones.
const LONGEST_US: u64 = 600_000_000;
/// Two decimal digits: 1% is far below the noise of any such measurement, and a histogram takes about 25 KiB.
const DIGITS: u8 = 2;

/// A distribution of delays, in short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delays {
    pub count: u64,
    pub p50_us: u32,
    pub p99_us: u32,
    pub p999_us: u32,
    pub max_us: u32,
}

impl Delays {
    /// Those of a histogram that counts in a unit that `to_us` makes µs of.
    pub fn of(histogram: &Histogram<u64>, to_us: impl Fn(u64) -> u64) -> Self {
        let us = |value: u64| u32::try_from(to_us(value)).unwrap_or(u32::MAX);
        Self {
            count: histogram.len(),
            p50_us: us(histogram.value_at_quantile(0.5)),
            p99_us: us(histogram.value_at_quantile(0.99)),
            p999_us: us(histogram.value_at_quantile(0.999)),
            max_us: us(histogram.max()),
        }
    }
}

/// One delay that stood out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stall {
    /// 0 if there never was one.
    pub took_us: u32,
    /// How long ago it ended.
    pub ago_ms: u64,
    pub during: Activity,
}

/// What a daemon tells of itself, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// How late the reactor was.
    pub lag: Delays,
    pub longest_stall: Stall,
    /// How long the kernel kept the threads of the disk pool in one submission.
    pub submits: Delays,
    pub longest_submit: Stall,
}

/// What ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activity {
    /// Nothing that reports itself: sockets, the status page, or other processes on this CPU.
    #[default]
    Elsewhere,
    /// Messages of an upstairs or of a replica.
    Messages,
    /// Connections that came up or ended.
    Connections,
    /// Requests of guests.
    Guests,
    /// Completions of the disk; or a submission to it.
    Disk,
    /// What was due by time.
    Timer,
    /// What an operator asked for.
    Operator,
}

impl std::fmt::Display for Activity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Elsewhere => "elsewhere",
            Self::Messages => "messages",
            Self::Connections => "connections",
            Self::Guests => "guests",
            Self::Disk => "disk",
            Self::Timer => "timers",
            Self::Operator => "an operator's request",
        })
    }
}

/// Delays in µs, since the start.
#[derive(Debug)]
struct DelayHistogram(Histogram<u64>);

impl Default for DelayHistogram {
    fn default() -> Self {
        Self::new()
    }
}

impl DelayHistogram {
    #[expect(clippy::expect_used, reason = "constants that the test below makes sure of")]
    fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST_US, DIGITS).expect("the bounds are sound"))
    }

    fn record_us(&mut self, delay_us: u64) {
        self.0.saturating_record(delay_us);
    }

    /// A delay of what should happen every `interval_us`: what was held up with it counts, too.
    fn record_of_ticks(&mut self, delay_us: u64, interval_us: u64) {
        let mut waited = delay_us.min(LONGEST_US);
        self.record_us(waited);
        while waited > interval_us {
            waited -= interval_us;
            self.record_us(waited);
        }
    }

    fn delays(&self) -> Delays {
        Delays::of(&self.0, |us| us)
    }
}

/// The longest of some delays, and when it was.
#[derive(Clone, Copy, Debug, Default)]
struct Longest {
    took_ns: u64,
    at_ns: u64,
    during: Activity,
}

impl Longest {
    fn record(&mut self, now_ns: u64, took_ns: u64, during: Activity) {
        if took_ns > self.took_ns {
            *self = Self { took_ns, at_ns: now_ns, during };
        }
    }

    fn stall(&self, now_ns: u64) -> Stall {
        Stall {
            took_us: u32::try_from(self.took_ns / 1_000).unwrap_or(u32::MAX),
            ago_ms: now_ns.saturating_sub(self.at_ns) / 1_000_000,
            during: self.during,
        }
    }
}

/// A stall to be told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Warning {
    pub took_ms: u64,
    pub during: Activity,
    /// Stalls since the last warning that none was given for.
    pub untold: u32,
}

/// See the module. Times are those of any one clock, in ns.
#[derive(Debug, Default)]
pub struct LagMeter {
    lags: DelayHistogram,
    longest: Longest,
    /// Of the tick that was asked for.
    due_ns: Option<u64>,
    last_event_ns: u64,
    /// The longest run since the last tick.
    run_ns: u64,
    run: Activity,
    warned_ns: Option<u64>,
    untold: u32,
}

impl LagMeter {
    /// Something begins to run. True if a tick is asked for that wasn't before.
    pub fn begins(&mut self, now_ns: u64) -> bool {
        self.last_event_ns = now_ns;
        let rested = self.due_ns.is_none();
        if rested {
            self.due_ns = Some(now_ns.saturating_add(TICK_NS));
        }
        rested
    }

    /// It has run.
    pub fn ran(&mut self, activity: Activity, begun_ns: u64, ended_ns: u64) {
        self.last_event_ns = ended_ns;
        let took_ns = ended_ns.saturating_sub(begun_ns);
        if took_ns > self.run_ns {
            (self.run_ns, self.run) = (took_ns, activity);
        }
    }

    /// When the next tick is due; `None` while the reactor rests.
    pub fn due_ns(&self) -> Option<u64> {
        self.due_ns
    }

    /// The tick got its turn. Gives what should be told.
    pub fn tick(&mut self, now_ns: u64) -> Option<Warning> {
        let late_ns = now_ns.saturating_sub(self.due_ns?);
        self.lags.record_of_ticks(late_ns / 1_000, TICK_NS / 1_000);
        // What took less than half of it is not to blame.
        let during = if self.run_ns >= late_ns / 2 { self.run } else { Activity::Elsewhere };
        // It may have begun before the tick was due.
        let stall_ns = late_ns.max(self.run_ns);
        self.longest.record(now_ns, stall_ns, during);
        (self.run_ns, self.run) = (0, Activity::Elsewhere);
        let rests = now_ns.saturating_sub(self.last_event_ns) > REST_AFTER_NS;
        self.due_ns = (!rests).then(|| now_ns.saturating_add(TICK_NS));
        self.warn(now_ns, stall_ns, during)
    }

    fn warn(&mut self, now_ns: u64, stall_ns: u64, during: Activity) -> Option<Warning> {
        if stall_ns < STALL_NS {
            return None;
        }
        if self.warned_ns.is_some_and(|at| now_ns.saturating_sub(at) < QUIET_NS) {
            self.untold = self.untold.saturating_add(1);
            return None;
        }
        self.warned_ns = Some(now_ns);
        let untold = std::mem::take(&mut self.untold);
        Some(Warning { took_ms: stall_ns / 1_000_000, during, untold })
    }

    pub fn lag(&self) -> Delays {
        self.lags.delays()
    }

    pub fn longest_stall(&self, now_ns: u64) -> Stall {
        self.longest.stall(now_ns)
    }
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { took_ms, during, untold } = self;
        write!(f, "the reactor stalled for {took_ms} ms ({during})")?;
        if *untold > 0 {
            write!(f, "; {untold} more stalls since the last such line")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// A reactor with an event every ms, of which the one at 10 ms runs for `stall_ms`.
    fn check(stall_ms: u64, activity: Activity) -> (LagMeter, Option<Warning>) {
        let mut meter = LagMeter::default();
        let (mut now, mut warning) = (0, None);
        while now < 10_000 * MS {
            let took = if now == 10 * MS { stall_ms * MS } else { 0 };
            meter.begins(now);
            meter.ran(activity, now, now + took);
            now += took.max(MS);
            if meter.due_ns().is_some_and(|due| due <= now) {
                warning = warning.or(meter.tick(now));
            }
        }
        (meter, warning)
    }

    #[test]
    fn a_stall_counts_by_its_length() {
        let (meter, warning) = check(300, Activity::Disk);
        let (lag, stall) = (meter.lag(), meter.longest_stall(10_000 * MS));
        assert!(lag.count.abs_diff(1_000) < 3, "one for each 10 ms: {lag:?}");
        assert!(lag.max_us.abs_diff(295_000) < 8_000 && lag.p50_us <= 1, "{lag:?}");
        assert!(lag.p99_us.abs_diff(200_000) < 20_000, "3% of the time: {lag:?}");
        assert_eq!((stall.took_us, stall.ago_ms), (300_000, 9_690));
        assert_eq!(stall.during, Activity::Disk);
        assert_eq!(warning, Some(Warning { took_ms: 300, during: Activity::Disk, untold: 0 }));
    }

    #[test]
    fn a_short_run_is_not_told() {
        let (meter, warning) = check(15, Activity::Guests);
        assert_eq!(warning, None);
        assert!(meter.lag().p99_us <= 1 && meter.longest_stall(0).took_us == 15_000, "{meter:?}");
    }

    #[test]
    fn one_who_ran_briefly_is_not_to_blame() {
        let mut meter = LagMeter::default();
        meter.begins(0);
        meter.ran(Activity::Timer, 0, 2 * MS);
        assert_eq!(meter.tick(100 * MS).map(|warning| warning.during), Some(Activity::Elsewhere));
    }

    #[test]
    fn warnings_are_rare_and_count_the_rest() {
        let mut meter = LagMeter::default();
        let mut told = Vec::new();
        for at in 0..220 {
            let now = at * 100 * MS;
            meter.begins(now);
            meter.ran(Activity::Messages, now, now + 50 * MS);
            told.extend(meter.tick(now + 50 * MS));
            while let Some(due) = meter.due_ns() {
                assert_eq!(meter.tick(due), None);
            }
        }
        assert_eq!(told.iter().map(|warning| warning.untold).collect::<Vec<_>>(), [0, 99, 99]);
        assert_eq!(
            told.last().map(ToString::to_string).as_deref(),
            Some("the reactor stalled for 50 ms (messages); 99 more stalls since the last such line")
        );
    }

    #[test]
    fn an_idle_reactor_is_left_alone_and_the_next_event_is_covered() {
        let mut meter = LagMeter::default();
        assert!(meter.begins(0));
        assert!(!meter.begins(10));
        let mut ticks = 0;
        while let Some(due) = meter.due_ns() {
            assert_eq!(meter.tick(due), None);
            ticks += 1;
        }
        assert!(ticks <= 6, "{ticks}");
        let later = 3_600_000 * MS;
        assert!(meter.begins(later));
        meter.ran(Activity::Messages, later, later + 40 * MS);
        assert_eq!(meter.tick(later + 40 * MS).map(|warning| warning.took_ms), Some(40));
    }

    #[test]
    fn what_is_too_long_to_keep_counts_as_the_longest() {
        let mut delays = DelayHistogram::new();
        delays.record_us(u64::MAX);
        delays.record_us(0);
        assert!(delays.delays().max_us >= 590_000_000 && delays.delays().count == 2);
    }
}
