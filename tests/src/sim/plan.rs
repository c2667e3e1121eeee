//! What a seed stands for: sizes, delays and how often which fault happens.

use std::time::Duration;

use newel_upstairs::core::config::{Limits, ReadPolicy, Reads, ThrottleConfig, Timing};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::history::Nanos;

pub const MS: Nanos = 1_000_000;

/// A mistake put in on purpose; the checker must find each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bug {
    /// A write is acknowledged once one replica has it.
    AckAtOne,
    /// Last active generations are ignored at activation.
    IgnoreLastActive,
    /// Catch-up overwrites newer blocks.
    CopyOver,
    /// A flush does not cover the contexts.
    FlushSkipsContexts,
    /// The activity log is written after the data.
    LogAfterData,
    /// An older session goes on after a newer one was promoted.
    StaleSessionNotFenced,
    /// Answers to reads aren't held.
    ReadsNotHeld,
    /// A joiner counts before its `Activated` is durable.
    JoinerCountsEarly,
    /// Guests are served before a quorum is activated.
    ServedEarly,
    /// A new region counts although only one of the others has stored its membership.
    ReplacedEarly,
}

impl Bug {
    pub const ALL: [Self; 10] = [
        Self::AckAtOne,
        Self::IgnoreLastActive,
        Self::CopyOver,
        Self::FlushSkipsContexts,
        Self::LogAfterData,
        Self::StaleSessionNotFenced,
        Self::ReadsNotHeld,
        Self::JoinerCountsEarly,
        Self::ServedEarly,
        Self::ReplacedEarly,
    ];

    /// The faults among which it shows most often, if not among all.
    fn weights(self) -> Option<&'static [(Fault, u32)]> {
        match self {
            Self::AckAtOne | Self::CopyOver | Self::FlushSkipsContexts | Self::StaleSessionNotFenced => None,
            // A replica that alone has a write, and is away until the upstairs after the next.
            Self::IgnoreLastActive => {
                Some(&[(Fault::StallLink, 6), (Fault::KillUpstairs, 6), (Fault::DieMidway, 6)])
            }
            Self::LogAfterData => {
                Some(&[(Fault::PowerCut, 6), (Fault::PowerCutAll, 6), (Fault::KillReplica, 1)])
            }
            // Values that were shown and are nowhere else yet.
            Self::ReadsNotHeld => Some(&[
                (Fault::PauseReplica, 6),
                (Fault::DieMidway, 3),
                (Fault::StallLink, 6),
                (Fault::Partition, 6),
                (Fault::KillUpstairs, 6),
                (Fault::PauseUpstairs, 1),
                (Fault::DiskStuck, 3),
            ]),
            // Replicas that come and go while others die.
            Self::JoinerCountsEarly | Self::ServedEarly => Some(&[
                (Fault::KillReplica, 6),
                (Fault::DieMidway, 4),
                (Fault::KillAll, 2),
                (Fault::KillUpstairs, 3),
                (Fault::Partition, 2),
            ]),
            // A replacement, the loss of all who know of it, and a configuration from before.
            Self::ReplacedEarly => Some(&[
                (Fault::Replace, 3),
                (Fault::KillAll, 1),
                (Fault::KillReplica, 3),
                (Fault::KillUpstairs, 3),
            ]),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub bug: Option<Bug>,
    pub blocks: u64,
    /// Slots of the activity log that the core may use: few, so that extents are evicted.
    pub log_slots: u32,
    pub connections: usize,
    pub depth: usize,
    /// Mean time between a guest's answer and its next request.
    pub think: Nanos,
    /// How likely a guest is gone together with the upstairs, and sends nothing again.
    pub guest_dies: f64,
    pub network: (Nanos, Nanos),
    pub disk: (Nanos, Nanos),
    /// A replica whose disk is slower by this factor.
    pub slow: Option<(usize, u64)>,
    /// Mean time between faults.
    pub fault_every: Nanos,
    /// How long faults go on.
    pub faults_for: Nanos,
    /// How long everything may take to become equal afterwards.
    pub converge_within: Nanos,
    /// Weights of the faults, by [`Fault`].
    pub weights: Vec<(Fault, u32)>,
    /// Replicas that must have executed what is acknowledged.
    pub min_replicas: usize,
    pub limits: Limits,
    pub timing: Timing,
    pub throttle: ThrottleConfig,
    pub reads: Reads,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    KillReplica,
    PauseReplica,
    PowerCut,
    PowerCutAll,
    /// A replica dies in the middle of a disk operation.
    DieMidway,
    CutLink,
    /// A link delivers nothing for a while.
    StallLink,
    /// No replies, no requests, no notice.
    Partition,
    KillUpstairs,
    PauseUpstairs,
    Takeover,
    StopUpstairs,
    DiskStuck,
    SyncFails,
    DiskFull,
    BitFlip,
    ReadError,
    KillAll,
    /// A fresh disk takes a slot.
    Replace,
    Scrub,
}

impl Plan {
    pub fn new(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x6e65_7765_6c00);
        let power = seed % 2 == 1;
        let damage = seed % 5 == 4;
        let mut weights = vec![
            (Fault::KillReplica, 6),
            (Fault::PauseReplica, 4),
            (Fault::DieMidway, 4),
            (Fault::CutLink, 4),
            (Fault::StallLink, 3),
            (Fault::Partition, 2),
            (Fault::KillUpstairs, 4),
            (Fault::PauseUpstairs, 1),
            (Fault::Takeover, 2),
            (Fault::StopUpstairs, 1),
            (Fault::DiskStuck, 2),
            (Fault::SyncFails, 1),
            (Fault::DiskFull, 1),
            (Fault::KillAll, 1),
        ];
        if power {
            weights.extend([(Fault::PowerCut, 8), (Fault::PowerCutAll, 2)]);
        }
        if damage {
            weights.extend([(Fault::BitFlip, 4), (Fault::ReadError, 2)]);
        }
        // Each seed leaves some out, so that the others come together more often.
        for (_, weight) in &mut weights {
            if rng.random_bool(0.4) {
                *weight = 0;
            }
        }
        if damage {
            // A block that is damaged and then found unverified after a crash looks like a write that was cut short. With no
            // newer copy at hand its data is adopted: two faults at once, for which nothing better is promised.
            let crashes = |fault: Fault| {
                matches!(fault, Fault::KillReplica | Fault::KillAll | Fault::DieMidway | Fault::SyncFails)
                    || matches!(fault, Fault::PowerCut | Fault::PowerCutAll | Fault::DiskFull)
            };
            weights.retain(|&(fault, _)| !crashes(fault));
        }
        weights.push((Fault::CutLink, 1));
        // Half of the seeds; the others keep the schedules that they had before anything could be replaced.
        if (seed / 10).is_multiple_of(2) {
            weights.push((Fault::Scrub, 3));
            // From the moment that the old replica is let go there are two copies. One that rots then, while the other is still
            // behind, is a second fault.
            if !damage {
                weights.push((Fault::Replace, 4));
            }
        }
        // A copy that is the only one must not rot or fail.
        let alone = !damage && (seed / 7) % 8 == 7;
        if alone {
            weights.retain(|&(fault, _)| fault != Fault::SyncFails);
        }
        let disk_low = rng.random_range(5_000..100_000);
        Self {
            seed,
            bug: None,
            blocks: 2500,
            log_slots: rng.random_range(1..=3),
            connections: rng.random_range(1..=3),
            depth: rng.random_range(1..=3),
            think: rng.random_range(10_000..2 * MS),
            guest_dies: 0.2,
            network: (5_000, rng.random_range(20_000..2 * MS)),
            disk: (disk_low, disk_low * rng.random_range(2..20)),
            slow: rng.random_bool(0.3).then(|| (rng.random_range(0..3), rng.random_range(5..200))),
            fault_every: rng.random_range(20 * MS..600 * MS),
            faults_for: rng.random_range(500 * MS..5_000 * MS),
            converge_within: 60_000 * MS,
            weights,
            min_replicas: if alone { 1 } else { 2 },
            limits: Limits {
                volume_jobs: rng.random_range(2..40),
                volume_bytes: 1 << 20,
                replica_jobs: rng.random_range(40..200),
                replica_bytes: 2 << 20,
                waiting: 64,
                slowing: Duration::from_millis(if seed % 9 == 8 { 20 } else { 0 }),
            },
            timing: Timing {
                backoff_first: Duration::from_millis(5),
                backoff_max: Duration::from_millis(100),
                handshake: Duration::from_millis(300),
                promote: Duration::from_millis(1500),
                ping_every: Duration::from_millis(50),
                silence: Duration::from_millis(300),
                job_age: Duration::from_millis(500),
                third_wait: Duration::from_millis(30),
                power_wait: Duration::from_millis(400),
                quorum_timeout: None,
                scrub_every: None,
            },
            // From the seed's own digits, so that each keeps the schedule it had; a lead this short is exceeded often.
            throttle: ThrottleConfig {
                enabled: seed % 7 != 6,
                lead: if seed % 7 < 3 { Duration::from_micros(200) } else { Duration::from_millis(10) },
                max_delay: Duration::from_millis(50),
            },
            reads: Reads {
                policy: if seed % 8 >= 6 { ReadPolicy::Witness } else { ReadPolicy::Fanout },
                cancel: seed % 8 == 5 || seed % 8 == 7,
            },
        }
    }

    pub fn with_bug(seed: u64, bug: Bug) -> Self {
        let mut plan = Self { bug: Some(bug), min_replicas: 2, ..Self::new(seed) };
        // The checker is tested on reads that go to all at once: those show most.
        plan.throttle = ThrottleConfig { enabled: false, ..ThrottleConfig::default() };
        plan.reads = Reads::default();
        plan.limits.slowing = Duration::ZERO;
        if let Some(weights) = bug.weights() {
            plan.weights = weights.to_vec();
            plan.fault_every = plan.fault_every.min(200 * MS);
        }
        if matches!(bug, Bug::ReadsNotHeld | Bug::IgnoreLastActive) {
            // Rare moments: much has to happen in little time, and what was not answered must not be sent again.
            (plan.connections, plan.depth, plan.think) = (3, 3, 20_000);
            plan.faults_for = 5000 * MS;
            let rare = if bug == Bug::ReadsNotHeld { (0.5, 500_000, 60 * MS) } else { (0.95, MS, 40 * MS) };
            (plan.guest_dies, plan.network.1, plan.fault_every) = rare;
        }
        plan
    }

    pub fn has_damage(&self) -> bool {
        self.weights
            .iter()
            .any(|&(fault, weight)| matches!(fault, Fault::BitFlip | Fault::ReadError) && weight > 0)
    }
}
