//! One daemon: how it is started, how its end is told, and its log.
//!
//! Invariants:
//! - A daemon runs in a process group of its own, so that Ctrl-C reaches only `newel up`, which stops all in order.
//! - A log that has grown large is put aside at the next start: at most two of about that size are kept.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};

const LOG_BYTES_MAX: u64 = 8 << 20;
/// What is shown of a log when a daemon fails to start: enough for the error and what led to it.
const TAIL_BYTES: u64 = 4096;
const TAIL_LINES: usize = 12;

#[derive(Debug)]
pub(super) struct Child {
    /// `upstairs`, `downstairs-0`, …: the names in `pids.json` and of the logs.
    pub(super) role: String,
    program: PathBuf,
    arguments: Vec<OsString>,
    log: PathBuf,
    process: Option<std::process::Child>,
}

impl Child {
    pub(super) fn new(role: String, program: PathBuf, arguments: Vec<OsString>, log: PathBuf) -> Self {
        Self { role, program, arguments, log, process: None }
    }

    /// For its next start.
    pub(super) fn set_arguments(&mut self, arguments: Vec<OsString>) {
        self.arguments = arguments;
    }

    pub(super) fn start(&mut self) -> Result<u32> {
        put_aside_if_large(&self.log)?;
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("cannot open {}", self.log.display()))?;
        let also = log.try_clone().with_context(|| format!("cannot open {} twice", self.log.display()))?;
        let process = Command::new(&self.program)
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(also)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        let pid = process.id();
        self.process = Some(process);
        Ok(pid)
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(std::process::Child::id)
    }

    /// Its pid and end if it ended since last asked.
    pub(super) fn reap(&mut self) -> Option<(u32, ExitStatus)> {
        let process = self.process.as_mut()?;
        let status = process.try_wait().ok()??;
        let pid = process.id();
        self.process = None;
        Some((pid, status))
    }

    pub(super) fn signal(&self, signal: Signal) {
        // A process that has ended but isn't reaped yet takes signals without harm, so its pid can't be another's.
        if let Some(pid) = self.pid().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw) {
            kill_process(pid, signal).ok();
        }
    }

    /// The last lines of its log, for a message.
    pub(super) fn log_tail(&self) -> String {
        match tail(&self.log) {
            Ok(text) if text.is_empty() => format!("{} is empty", self.log.display()),
            Ok(text) => format!("the end of {}:\n{text}", self.log.display()),
            Err(error) => format!("{} cannot be read: {error}", self.log.display()),
        }
    }
}

/// `was killed by signal 9`, `ended with exit code 1`.
pub(super) fn how_it_ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(code)) => format!("ended with exit code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

fn put_aside_if_large(log: &Path) -> Result<()> {
    if std::fs::metadata(log).is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX) {
        std::fs::rename(log, log.with_extension("log.1"))
            .with_context(|| format!("cannot put {} aside", log.display()))?;
    }
    Ok(())
}

fn tail(path: &Path) -> std::io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let start = file.metadata()?.len().saturating_sub(TAIL_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(TAIL_LINES);
    Ok(lines
        .get(from..)
        .unwrap_or_default()
        .iter()
        .map(|line| format!("  {line}"))
        .collect::<Vec<_>>()
        .join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_the_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.log");
        let lines: String = (0..1000).map(|n| format!("line {n}\n")).collect();
        std::fs::write(&path, lines).unwrap();
        let tail = tail(&path).unwrap();
        assert_eq!(tail.lines().count(), TAIL_LINES);
        assert!(tail.ends_with("  line 999"), "{tail}");
    }

    #[test]
    fn a_large_log_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.log");
        std::fs::write(&path, "small").unwrap();
        put_aside_if_large(&path).unwrap();
        assert!(path.exists());
        OpenOptions::new().write(true).open(&path).unwrap().set_len(LOG_BYTES_MAX + 1).unwrap();
        put_aside_if_large(&path).unwrap();
        assert!(!path.exists() && dir.path().join("x.log.1").exists());
    }

    #[test]
    fn ends_are_told_in_words() {
        let check = |raw: i32, words: &str| assert_eq!(how_it_ended(ExitStatus::from_raw(raw)), words);
        check(9, "was killed by signal 9");
        check(1 << 8, "ended with exit code 1");
    }
}
