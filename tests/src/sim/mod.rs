//! The simulator: the production cores and the production region code over a simulated disk, network, guests and time.
//!
//! Invariants:
//! - One seed replays one run exactly: one random generator, one queue of events, no clock, no threads.
//! - Nothing of the product is imitated: [`world`] only carries the cores' actions out and brings events in.
//! - The disk is worse than real ones: after a power cut each 512-byte sector shows any of its states since the last sync.
//!
//! `disk` the medium, `world` processes, network and faults, `guest` clients that behave like a kernel, `checker` what a guest
//! may see, `plan` what a seed stands for, `bugs` the planted ones that the checker must find.

pub mod checker;
pub mod disk;
pub mod guest;
pub mod history;
pub mod plan;
pub mod world;

pub use plan::Plan;
pub use world::{Outcome, run};
