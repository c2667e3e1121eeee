//! Faults put in on purpose, for tests and demonstrations: between the end of a job and its answer.
//!
//! Invariants:
//! - Without faults nothing is held, and answers leave as they come.
//! - The same faults with the same seed and the same events do the same.
//! - What is held is bounded by what a session may have outstanding, and goes with its session.
//! - Only answers are late or wrong: what is on the disk is as sound as ever.
//!
//! Left to others: setting them (`shell/control.rs`), telling of them (`session.rs`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use newel_protocol::JobId;
use newel_protocol::wire::{JobError, Reply, StageTimes};
use thiserror::Error;

use super::Core;
use super::api::{ConnId, LogEvent, Time};

/// How often the log is reminded that faults are on.
const REMIND_EVERY: Duration = Duration::from_secs(60);
/// What a fault may be at most: longer ones are typing errors.
const TIME_MAX: Duration = Duration::from_secs(3600);
/// Cancelled reads that may be at the disk; more than may be there, as some are answered before their cancelling comes.
const CANCELLED_MAX: usize = 1024;
const PARTS_PER_MILLION: u64 = 1_000_000;

/// Which faults. `Display` and `FromStr` are each other's inverse.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Every read is answered so much later; others are not held up.
    pub read_delay: Duration,
    /// Every answer is later by something between these.
    pub jitter: (Duration, Duration),
    /// Bytes per second of reads and writes, one after the other; 0: as many as there are.
    pub bandwidth: u64,
    /// No answer for the first of these, once in the second.
    pub stall: Option<(Duration, Duration)>,
    /// So many of a million reads fail.
    pub errors_ppm: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "fault {given:?}: {what}; write e.g. read-delay=20ms,jitter=1..10ms,bandwidth=100M,stall=1s/30s,error=0.01, or off"
)]
pub struct FaultError {
    given: String,
    what: &'static str,
}

impl Faults {
    pub fn is_off(&self) -> bool {
        *self == Self::default()
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), &'static str> {
        match key {
            "read-delay" => self.read_delay = time(value)?,
            "jitter" => {
                let (low, high) = value.split_once("..").ok_or("a jitter is LOW..HIGH")?;
                let unit = high.trim_start_matches(|c: char| c.is_ascii_digit());
                let low = if low.ends_with('s') { time(low)? } else { time(&format!("{low}{unit}"))? };
                self.jitter = (low, time(high)?);
                if self.jitter.0 > self.jitter.1 {
                    return Err("the jitter's low end is above its high end");
                }
            }
            "bandwidth" => self.bandwidth = size(value)?,
            "stall" => {
                let (length, every) = value.split_once('/').ok_or("a stall is LENGTH/EVERY")?;
                let (length, every) = (time(length)?, time(every)?);
                if length >= every {
                    return Err("a stall is shorter than the time from one to the next");
                }
                self.stall = Some((length, every));
            }
            "error" => {
                let share: f64 = value.parse().map_err(|_| "an error rate is a number from 0 to 1")?;
                if !(0.0..=1.0).contains(&share) {
                    return Err("an error rate is a number from 0 to 1");
                }
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "from 0 to a million"
                )]
                let errors_ppm = (share * 1e6).round() as u32;
                self.errors_ppm = errors_ppm;
            }
            _ => return Err("there are read-delay, jitter, bandwidth, stall and error"),
        }
        Ok(())
    }
}

fn time(text: &str) -> Result<Duration, &'static str> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().map_err(|_| "a time is a whole number with us, ms or s")?;
    let time = match text.get(digits.len()..) {
        Some("us") => Duration::from_micros(number),
        Some("ms") => Duration::from_millis(number),
        Some("s") => Duration::from_secs(number),
        Some(_) | None => return Err("a time is a whole number with us, ms or s"),
    };
    if time > TIME_MAX { Err("no fault takes longer than an hour") } else { Ok(time) }
}

fn size(text: &str) -> Result<u64, &'static str> {
    const WHAT: &str = "a bandwidth is a number of bytes a second above 0, with K, M or G if you like";
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().map_err(|_| WHAT)?;
    let shift = match text.get(digits.len()..) {
        Some("") => 0,
        Some("K") => 10,
        Some("M") => 20,
        Some("G") => 30,
        Some(_) | None => return Err(WHAT),
    };
    number.checked_mul(1 << shift).filter(|&bytes| bytes > 0).ok_or(WHAT)
}

impl FromStr for Faults {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        let mut faults = Self::default();
        let text = text.trim();
        if text.is_empty() || text == "off" {
            return Ok(faults);
        }
        for part in text.split(',') {
            let wrong = |what| FaultError { given: part.to_owned(), what };
            let (key, value) = part.split_once('=').ok_or_else(|| wrong("it is no KEY=VALUE"))?;
            faults.set(key.trim(), value.trim()).map_err(wrong)?;
        }
        Ok(faults)
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |time: Duration| match time.as_micros() {
            us if us % 1_000_000 == 0 => format!("{}s", us / 1_000_000),
            us if us % 1_000 == 0 => format!("{}ms", us / 1_000),
            us => format!("{us}us"),
        };
        let mut parts = Vec::new();
        if !self.read_delay.is_zero() {
            parts.push(format!("read-delay={}", time(self.read_delay)));
        }
        if !self.jitter.1.is_zero() {
            parts.push(format!("jitter={}..{}", time(self.jitter.0), time(self.jitter.1)));
        }
        if self.bandwidth > 0 {
            parts.push(match self.bandwidth {
                bytes if bytes % (1 << 20) == 0 => format!("bandwidth={}M", bytes >> 20),
                bytes => format!("bandwidth={bytes}"),
            });
        }
        if let Some((length, every)) = self.stall {
            parts.push(format!("stall={}/{}", time(length), time(every)));
        }
        if self.errors_ppm > 0 {
            parts.push(format!("error={}", f64::from(self.errors_ppm) / 1e6));
        }
        if parts.is_empty() { f.write_str("off") } else { f.write_str(&parts.join(",")) }
    }
}

/// An answer on its way.
#[derive(Debug)]
struct Held {
    conn: ConnId,
    job: JobId,
    is_read: bool,
    bytes: usize,
    since: Time,
    reply: Reply,
    payload: Bytes,
}

/// The faults in force, and what they hold.
#[derive(Debug)]
pub(super) struct FaultStage {
    faults: Faults,
    since: Time,
    remind_at: Time,
    random: u64,
    /// Waiting for bandwidth, and when the first has had its share.
    line: VecDeque<Held>,
    line_due: Time,
    late: BTreeMap<(Time, u64), Held>,
    order: u64,
    bytes: usize,
    cancelled: BTreeSet<JobId>,
}

impl FaultStage {
    pub(super) fn new(faults: Faults, seed: u64) -> Self {
        Self {
            faults,
            since: Time::default(),
            remind_at: Time::default(),
            // Zero would stay zero.
            random: seed | 1,
            line: VecDeque::new(),
            line_due: Time::default(),
            late: BTreeMap::new(),
            order: 0,
            bytes: 0,
            cancelled: BTreeSet::new(),
        }
    }

    pub(super) fn held(&self) -> usize {
        self.line.len() + self.late.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What a session is to be told, if there is anything.
    pub(super) fn told(&self) -> Option<String> {
        (!self.faults.is_off()).then(|| self.faults.to_string())
    }

    fn is_idle(&self) -> bool {
        self.faults.is_off() && self.held() == 0
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.checked_rem(bound).unwrap_or(0)
    }

    /// A read that is still at the disk was cancelled: it is not held when it comes.
    fn cancel_later(&mut self, job: JobId) {
        self.cancelled.insert(job);
        if self.cancelled.len() > CANCELLED_MAX {
            self.cancelled.pop_first();
        }
    }

    fn hold(&mut self, now: Time, mut held: Held) {
        if held.is_read && self.below(PARTS_PER_MILLION) < u64::from(self.faults.errors_ppm) {
            let error = JobError::Disk { message: "an error put in on purpose".to_owned() };
            held.reply = Reply::Done {
                job: held.job,
                result: Err(error),
                times: StageTimes::default(),
                states: Vec::new(),
            };
            held.payload = Bytes::new();
        }
        self.bytes += held.payload.len();
        if self.faults.bandwidth == 0 {
            return self.delay(now, held);
        }
        if self.line.is_empty() {
            self.line_due = now.after(self.share(held.bytes));
        }
        self.line.push_back(held);
    }

    /// What these bytes take of the bandwidth.
    fn share(&self, bytes: usize) -> Duration {
        let ns = u128::from(bytes as u64) * 1_000_000_000 / u128::from(self.faults.bandwidth.max(1));
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    fn delay(&mut self, from: Time, held: Held) {
        let (low, high) = self.faults.jitter;
        let spread = u64::try_from((high - low).as_nanos()).unwrap_or(u64::MAX);
        let mut due = from.after(low).after(Duration::from_nanos(self.below(spread.saturating_add(1))));
        if held.is_read {
            due = due.after(self.faults.read_delay);
        }
        if let Some((length, every)) = self.faults.stall {
            let phase = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1);
            let into = due.0.saturating_sub(self.since.0) % phase(every);
            // The stall is the end of each period, so that one just set begins with sound answers.
            if into >= phase(every) - phase(length) {
                due = Time(due.0 + (phase(every) - into));
            }
        }
        self.order += 1;
        self.late.insert((due, self.order), held);
    }

    fn next(&mut self, now: Time) -> Option<Held> {
        while self.line_due <= now || self.faults.bandwidth == 0 {
            let Some(held) = self.line.pop_front() else { break };
            let due = self.line_due;
            if let Some(next) = self.line.front() {
                self.line_due = due.after(self.share(next.bytes));
            }
            self.delay(due, held);
        }
        let due = self.late.first_key_value().map(|(&(due, _), _)| due)?;
        if due > now && !self.faults.is_off() {
            return None;
        }
        let (_, held) = self.late.pop_first()?;
        self.bytes -= held.payload.len();
        Some(held)
    }

    fn deadline(&self) -> Option<Time> {
        let line = self.line.front().map(|_| self.line_due);
        let late = self.late.first_key_value().map(|(&(due, _), _)| due);
        let remind = (!self.faults.is_off()).then_some(self.remind_at);
        line.into_iter().chain(late).chain(remind).min()
    }

    /// Takes back a read that is not answered yet, unless it is the one whose bytes are under way.
    fn cancel(&mut self, job: JobId) -> bool {
        let matches = |held: &Held| held.job == job && held.is_read;
        let key = self.late.iter().find(|(_, held)| matches(held)).map(|(&key, _)| key);
        let found = key.and_then(|key| self.late.remove(&key)).or_else(|| {
            let at = self.line.iter().skip(1).position(matches)?;
            self.line.remove(at + 1)
        });
        if let Some(held) = &found {
            self.bytes -= held.payload.len();
        }
        found.is_some()
    }

    pub(super) fn drop_held(&mut self) {
        self.line.clear();
        self.late.clear();
        self.bytes = 0;
        self.cancelled.clear();
    }
}

impl Core {
    /// Other faults from now on, or none.
    pub(super) fn set_faults(&mut self, faults: Faults) {
        self.fault.since = self.now;
        self.fault.remind_at = self.now.after(REMIND_EVERY);
        self.log(LogEvent::Faults { faults: faults.to_string() });
        let told = if faults.is_off() { String::new() } else { faults.to_string() };
        self.fault.faults = faults;
        if let Some(conn) = self.session.as_ref().map(|session| session.conn) {
            self.send(conn, Reply::Faults { faults: told });
        }
    }

    /// Answers a job, when the faults allow it. `bytes` are those that it moved.
    pub(super) fn answer_job(
        &mut self,
        conn: ConnId,
        is_read: bool,
        bytes: usize,
        reply: Reply,
        payload: Bytes,
    ) {
        let Reply::Done { job, .. } = reply else { return self.send_with(conn, reply, payload) };
        if self.fault.is_idle() {
            return self.send_with(conn, reply, payload);
        }
        if self.fault.cancelled.remove(&job) {
            return self.send(conn, cancelled(job));
        }
        self.fault.hold(self.now, Held { conn, job, is_read, bytes, since: self.now, reply, payload });
    }

    pub(super) fn advance_faults(&mut self) {
        if self.fault.is_idle() {
            return;
        }
        while let Some(Held { conn, since, mut reply, payload, .. }) = self.fault.next(self.now) {
            // A fault stands for a slow device, and that is what is told of it.
            if let Reply::Done { times, .. } = &mut reply {
                times.device_us = times.device_us.saturating_add(self.now.micros_since(since));
            }
            self.send_with(conn, reply, payload);
        }
        if !self.fault.faults.is_off() && self.now >= self.fault.remind_at {
            self.fault.remind_at = self.now.after(REMIND_EVERY);
            self.log(LogEvent::Faults { faults: self.fault.faults.to_string() });
        }
    }

    pub(super) fn fault_deadline(&self) -> Option<Time> {
        self.fault.deadline()
    }

    /// A read that isn't queued any more is cancelled: if a fault holds its answer, that is its end.
    pub(super) fn cancel_held(&mut self, conn: ConnId, job: JobId) {
        if self.fault.is_idle() {
            return;
        }
        if self.fault.cancel(job) {
            self.send(conn, cancelled(job));
        } else {
            self.fault.cancel_later(job);
        }
    }
}

fn cancelled(job: JobId) -> Reply {
    let result = Err(JobError::Cancelled);
    Reply::Done { job, result, times: StageTimes::default(), states: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn faults_are_written_as_they_are_read() {
        let all = "read-delay=20ms,jitter=1ms..10ms,bandwidth=100M,stall=1s/30s,error=0.01";
        for text in [all, "off", "read-delay=500us", "bandwidth=819200"] {
            assert_eq!(text.parse::<Faults>().unwrap().to_string(), text);
        }
        assert_eq!("jitter=1..10ms".parse::<Faults>().unwrap().to_string(), "jitter=1ms..10ms");
        assert!("".parse::<Faults>().unwrap().is_off());
        for (text, says) in [
            ("delay=1ms", "there are read-delay"),
            ("read-delay=1", "whole number with us, ms or s"),
            ("jitter=10..1ms", "low end"),
            ("stall=2s/1s", "shorter"),
            ("error=2", "from 0 to 1"),
            ("bandwidth=0", "above 0"),
            ("read-delay", "KEY=VALUE"),
            ("read-delay=99999999999999999999s", "whole number"),
            ("read-delay=7200s", "hour"),
        ] {
            let error = text.parse::<Faults>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    fn held(job: u64, is_read: bool, bytes: usize) -> Held {
        let reply =
            Reply::Done { job: JobId(job), result: Ok(()), times: StageTimes::default(), states: Vec::new() };
        Held {
            conn: ConnId(1),
            job: JobId(job),
            is_read,
            bytes,
            since: Time(0),
            reply,
            payload: Bytes::new(),
        }
    }

    /// When each of the answers leaves, in ms, and whether it is an error. All ended at once.
    fn check(faults: &str, answers: &[(bool, usize)]) -> Vec<(u64, bool)> {
        let mut stage = FaultStage::new(faults.parse().unwrap(), 9);
        let mut left = vec![(u64::MAX, false); answers.len()];
        for (job, &(is_read, bytes)) in (0..).zip(answers) {
            stage.hold(Time(0), held(job, is_read, bytes));
        }
        while stage.held() > 0 {
            let now = stage.deadline().unwrap();
            stage.remind_at = Time(u64::MAX);
            while let Some(Held { job, reply, .. }) = stage.next(now) {
                let failed = matches!(reply, Reply::Done { result: Err(_), .. });
                left[usize::try_from(job.0).unwrap()] = (now.0 / MS, failed);
            }
        }
        left
    }

    #[test]
    fn each_fault_does_what_it_says() {
        let (read, write) = ((true, 1 << 20), (false, 1 << 20));
        assert_eq!(check("read-delay=20ms", &[read, write, read]), [(20, false), (0, false), (20, false)]);
        let served = check("bandwidth=100M", &[read, write, read]);
        assert_eq!(served, [(10, false), (20, false), (30, false)]);
        let late = check("jitter=1..10ms", &[write; 200]);
        assert!(late.iter().all(|(ms, _)| (1..=10).contains(ms)));
        assert!(late.iter().any(|(ms, _)| *ms < 3) && late.iter().any(|(ms, _)| *ms >= 9));
        assert_eq!(check("stall=2s/3s,read-delay=1500ms", &[read]), [(3000, false)]);
        let failed = check("error=0.25", &[read; 1000]).iter().filter(|(_, failed)| *failed).count();
        assert!((200..300).contains(&failed), "{failed} of 1000 failed");
        assert!(check("error=1", &[write; 9]).iter().all(|(_, failed)| !failed), "only reads fail");
    }

    #[test]
    fn a_cancelled_read_gives_its_bandwidth_back() {
        let mut stage = FaultStage::new("bandwidth=100M".parse().unwrap(), 1);
        (1..=3).for_each(|job| stage.hold(Time(0), held(job, true, 1 << 20)));
        assert!(stage.cancel(JobId(2)) && !stage.cancel(JobId(2)) && !stage.cancel(JobId(1)));
        assert_eq!(stage.next(Time(10 * MS)).unwrap().job, JobId(1));
        assert_eq!(stage.next(Time(20 * MS)).unwrap().job, JobId(3));
        assert_eq!(stage.held(), 0);
    }

    #[test]
    fn turned_off_lets_everything_go() {
        let mut stage = FaultStage::new("read-delay=20ms,bandwidth=1M".parse().unwrap(), 1);
        (1..=3).for_each(|job| stage.hold(Time(0), held(job, true, 1 << 20)));
        stage.faults = Faults::default();
        assert_eq!((1..=4).filter_map(|_| stage.next(Time(1))).count(), 3);
        assert!(stage.is_idle());
    }
}
