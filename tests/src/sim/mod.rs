//! The simulator: the production cores and the production region code over a simulated disk, network, guests and time.
//!
//! Invariants:
//! - One seed replays one run exactly: one random generator, one queue of events, no clock, no threads.
//! - Nothing of the product is imitated: [`world`] only carries the cores' actions out and brings events in.
//! - The disk is worse than real ones: after a power cut each 512-byte sector shows any of its states since the last sync.
//!
//! `world` the queue of events, with `replicas`, `upstairs`, `network`, `clients`, `faults`, `replace`, `ending`; `disk` the
//! medium;
//! `guest` clients that behave like a kernel; `history` and `checker` what a guest may see; `plan` what a seed stands for;
//! `planted` mistakes that the checker must find.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "the simulator looks at a few of many events, and lets the rest pass"
)]

pub mod checker;
mod clients;
pub mod disk;
mod ending;
mod faults;
pub mod guest;
pub mod history;
mod network;
pub mod plan;
mod planted;
mod replace;
mod replicas;
mod upstairs;
pub mod world;

pub use plan::Plan;
pub use world::{Outcome, run};
