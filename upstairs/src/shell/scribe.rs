//! A thread that writes what takes time to write: lines of the slow-I/O log, and the text of `/slow`, `/inflight` and `/metrics`.
//!
//! Invariants:
//! - The reactor hands over plain values and never waits: what there is no room for is left out, and counted with the next line.
//! - The log is bounded: at its limit it becomes `PATH.1`, in place of the one before, and a new one begins.
//! - A log that can't be written keeps nobody from anything; the journal has every line all the same.
//!
//! Left to others: which records there are (`core/trace.rs`), and how they are told (`core/slow.rs`).

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::sync::oneshot;

use super::metrics::{self, Measured};
use crate::core::slow::SlowIo;
use crate::core::timeline::Record;

/// Errands that may wait.
const WAITING_MAX: usize = 256;
/// At the end of the process, for the last lines.
const GOODBYE: Duration = Duration::from_secs(1);

/// Where slow I/O is told of, beside the journal.
#[derive(Clone, Debug)]
pub(super) struct SlowLog {
    pub(super) path: PathBuf,
    pub(super) bytes_max: u64,
}

#[derive(Debug)]
enum Errand {
    Slow { record: Box<Record>, unix_us: u64, missed: u64 },
    List { records: Vec<Record>, unix_us: u64, answer: oneshot::Sender<String> },
    Metrics { measured: Box<Measured>, answer: oneshot::Sender<String> },
}

#[derive(Debug)]
pub(super) struct Scribe {
    errands: Option<SyncSender<Errand>>,
    ended: Receiver<()>,
    /// Records that found no room since the last one that did.
    missed: std::cell::Cell<u64>,
}

impl Scribe {
    pub(super) fn start(volume: String, log: Option<SlowLog>) -> Result<Self> {
        let mut file = log.map(LogFile::open).transpose()?;
        let (errands, todo) = sync_channel(WAITING_MAX);
        let (end, ended) = sync_channel::<()>(0);
        let work = move || {
            for errand in todo {
                run(errand, &volume, file.as_mut());
            }
            // Whoever waits for the end sees this go.
            drop(end);
        };
        std::thread::Builder::new()
            .name("newel-scribe".into())
            .spawn(work)
            .context("can't start a thread")?;
        Ok(Self { errands: Some(errands), ended, missed: std::cell::Cell::new(0) })
    }

    fn send(&self, errand: Errand) -> bool {
        self.errands.as_ref().is_some_and(|errands| errands.try_send(errand).is_ok())
    }

    pub(super) fn slow(&self, record: Box<Record>, unix_us: u64) {
        let missed = self.missed.get();
        let lost = record.dropped + 1;
        let sent = self.send(Errand::Slow { record, unix_us, missed });
        self.missed.set(if sent { 0 } else { missed + lost });
    }

    /// If there is no room the answer is dropped.
    pub(super) fn list(&self, records: Vec<Record>, unix_us: u64, answer: oneshot::Sender<String>) {
        self.send(Errand::List { records, unix_us, answer });
    }

    pub(super) fn metrics(&self, measured: Measured, answer: oneshot::Sender<String>) {
        self.send(Errand::Metrics { measured: Box::new(measured), answer });
    }
}

impl Drop for Scribe {
    fn drop(&mut self) {
        self.errands.take();
        // Either way it is over: the last lines are written, or whoever should take them doesn't.
        self.ended.recv_timeout(GOODBYE).ok();
    }
}

fn run(errand: Errand, volume: &str, file: Option<&mut LogFile>) {
    match errand {
        Errand::Slow { mut record, unix_us, missed } => {
            record.dropped += missed;
            let slow = SlowIo::new(&record, volume, unix_us);
            let line = json(&slow);
            if let Some(file) = file {
                file.write(&line);
            }
            // The object comes last, so that it can be cut out of the line.
            tracing::warn!("slow I/O: {line}");
        }
        // Whoever asked may have hung up by now.
        Errand::List { records, unix_us, answer } => {
            let list: Vec<SlowIo> =
                records.iter().map(|record| SlowIo::new(record, volume, unix_us)).collect();
            answer.send(json(&list)).ok();
        }
        Errand::Metrics { measured, answer } => {
            answer.send(metrics::text(*measured)).ok();
        }
    }
}

fn json(value: &impl serde::Serialize) -> String {
    // These have no maps with strange keys, which is all that could fail.
    serde_json::to_string(value).unwrap_or_default()
}

#[derive(Debug)]
struct LogFile {
    log: SlowLog,
    file: File,
    bytes: u64,
    /// The last attempt failed, and that was said.
    broken: bool,
}

fn open(path: &Path) -> io::Result<(File, u64)> {
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

impl LogFile {
    fn open(log: SlowLog) -> Result<Self> {
        let (file, bytes) =
            open(&log.path).with_context(|| format!("trace.slow_log: can't write {}", log.path.display()))?;
        Ok(Self { log, file, bytes, broken: false })
    }

    fn write(&mut self, line: &str) {
        match self.append(line) {
            Ok(()) => self.broken = false,
            Err(error) if !self.broken => {
                self.broken = true;
                tracing::error!(path = %self.log.path.display(), %error, "the slow-I/O log can't be written; the journal goes on");
            }
            Err(_) => {}
        }
    }

    fn append(&mut self, line: &str) -> io::Result<()> {
        if self.bytes > 0 && self.bytes + line.len() as u64 + 1 > self.log.bytes_max {
            let mut old = self.log.path.clone().into_os_string();
            old.push(".1");
            std::fs::rename(&self.log.path, old)?;
            (self.file, self.bytes) = open(&self.log.path)?;
        }
        self.file.write_all(format!("{line}\n").as_bytes())?;
        self.bytes += line.len() as u64 + 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::api::Time;
    use crate::core::timeline::{Timeline, Why};

    fn record(id: u32) -> Box<Record> {
        let timeline = Timeline { record: id, ..Timeline::default() };
        Box::new(Record { id, why: Why::Guest, ended: true, now: Time(5_000_000_000), dropped: 0, timeline })
    }

    #[test]
    fn the_log_is_whole_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slow.jsonl");
        let log = SlowLog { path: path.clone(), bytes_max: 4000 };
        let scribe = Scribe::start("db".into(), Some(log)).unwrap();
        for id in 1..=40 {
            scribe.slow(record(id), 7_000_000_000);
        }
        drop(scribe);
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        let (new, old) = (read(&path), read(&dir.path().join("slow.jsonl.1")));
        assert!(new.len() <= 4000 && old.len() <= 4000, "{} and {}", new.len(), old.len());
        let lines: Vec<SlowIo> =
            old.lines().chain(new.lines()).map(|line| serde_json::from_str(line).unwrap()).collect();
        let ids: Vec<u32> = lines.iter().map(|line| line.id).collect();
        let first = *ids.first().unwrap();
        assert_eq!(ids, (first..=40).collect::<Vec<_>>(), "the last ones, none missing");
        assert!(lines.iter().all(|line| line.volume == "db" && line.total_us == 5_000_000));
    }

    #[test]
    fn a_log_that_cannot_be_written_is_named() {
        let log = SlowLog { path: "/proc/none/slow".into(), bytes_max: 1 };
        let error = format!("{:#}", Scribe::start("db".into(), Some(log)).unwrap_err());
        assert!(error.contains("trace.slow_log: can't write /proc/none/slow"), "{error}");
    }

    #[test]
    fn what_finds_no_room_is_counted() {
        let (errands, todo) = sync_channel(1);
        let (_end, ended) = sync_channel(0);
        let scribe = Scribe { errands: Some(errands), ended, missed: std::cell::Cell::new(0) };
        (1..=4).for_each(|id| scribe.slow(record(id), 0));
        assert!(matches!(todo.recv(), Ok(Errand::Slow { missed: 0, .. })));
        scribe.slow(record(5), 0);
        assert!(matches!(todo.recv(), Ok(Errand::Slow { missed: 3, .. })));
    }
}
