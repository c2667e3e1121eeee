//! The signals that commands in the foreground live by: Ctrl-C, SIGTERM and SIGHUP to stop, SIGCHLD for a daemon that ended.
//!
//! Invariants:
//! - Under `nohup`, which has SIGHUP ignored, the end of the terminal is no reason to stop.

use anyhow::{Context as _, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

#[derive(Debug)]
pub(crate) struct Stop {
    interrupt: Signal,
    terminate: Signal,
    hangup: Option<Signal>,
}

impl Stop {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
            hangup: if hangup_ignored() { None } else { Some(take(SignalKind::hangup())?) },
        })
    }

    /// Somebody wants an end.
    pub(crate) async fn requested(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            () = received(self.hangup.as_mut()) => {}
        }
    }
}

/// Comes whenever a daemon ended; taken before the first one is started, so that none is missed.
pub(crate) fn child_ended() -> Result<Signal> {
    take(SignalKind::child())
}

async fn received(signal: Option<&mut Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

fn hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_signals(&status).is_some_and(|mask| mask & 1 << (SignalKind::hangup().as_raw_value() - 1) != 0)
}

/// The mask of ignored signals in a `/proc/PID/status`.
fn ignored_signals(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

fn take(kind: SignalKind) -> Result<Signal> {
    signal(kind).with_context(|| format!("cannot receive signal {}", kind.as_raw_value()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_is_read() {
        assert_eq!(ignored_signals("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t2\n"), Some(0x1001));
        assert_eq!(ignored_signals("Name:\tx\n"), None);
    }
}
