//! Helpers of the tests that run real processes: a volume of its own for each test, an NBD client that can also misbehave,
//! and the programs that guests use.
//!
//! Invariants:
//! - Each test has its own directory under `target/tmp`, its own ports and sockets, and leaves no process behind.
//! - Nothing sleeps for a fixed time and hopes: [`wait::until`] asks for a condition until a deadline.
//! - A test that can't run says `SKIPPED:` loudly and is counted (see [`skip`]).

#![expect(clippy::print_stderr, reason = "tests talk to whoever runs them")]

pub mod browser;
pub mod cluster;
pub mod command;
pub mod damage;
pub mod fio;
pub mod grafana;
pub mod http;
pub mod journal;
pub mod kernel;
pub mod load;
pub mod lock;
pub mod metrics;
pub mod nbd;
pub mod network;
pub mod options;
pub mod pattern;
pub mod prometheus;
pub mod seed;
pub mod sim;
pub mod skip;
pub mod small_disk;
pub mod starved_disk;
pub mod tracer;
pub mod vm;
pub mod volume;
pub mod wait;
pub mod wire;
