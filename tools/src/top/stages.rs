//! Where the time of a job goes, if the upstairs tells: sums per stage that only grow. An upstairs that doesn't trace tells nothing.

use serde::Deserialize;

/// What a status may say of stages, beside all the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Stages {
    #[serde(default)]
    pub(super) latency: Vec<OfOperation>,
    #[serde(default)]
    pub(super) replicas: Vec<AtReplica>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct AtReplica {
    #[serde(default)]
    pub(super) latency: Vec<OfOperation>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct OfOperation {
    pub(super) operation: String,
    #[serde(default)]
    pub(super) stages: Vec<Stage>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Stage {
    pub(super) stage: String,
    pub(super) count: u64,
    pub(super) sum_us: u64,
}

/// The mean time that jobs of one operation spent in each stage.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Means {
    pub(super) operation: String,
    /// Stage and µs.
    pub(super) stages: Vec<(String, f64)>,
}

impl Means {
    pub(super) fn whole_us(&self) -> f64 {
        self.stages.iter().map(|(_, us)| us).sum()
    }
}

/// Between two looks; operations of which none ended are left out.
pub(super) fn means(before: &[OfOperation], now: &[OfOperation]) -> Vec<Means> {
    let of = |now: &OfOperation| {
        let before = before.iter().find(|before| before.operation == now.operation);
        let stage = |stage: &Stage| {
            let before =
                before.and_then(|before| before.stages.iter().find(|before| before.stage == stage.stage));
            let (count, sum_us) = before.map_or((0, 0), |before| (before.count, before.sum_us));
            // Counters that are smaller than before began anew.
            let ended = stage.count.checked_sub(count).zip(stage.sum_us.checked_sub(sum_us));
            let (count, sum_us) = ended.unwrap_or((stage.count, stage.sum_us));
            (count > 0).then(|| (stage.stage.clone(), sum_us as f64 / count as f64))
        };
        let stages: Vec<(String, f64)> = now.stages.iter().filter_map(stage).collect();
        (!stages.is_empty()).then(|| Means { operation: now.operation.clone(), stages })
    };
    now.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_those_of_what_ended_between() {
        let look = |count: u64, sum_us: u64| {
            let stage = |name: &str| Stage { stage: name.into(), count, sum_us };
            vec![OfOperation { operation: "read".into(), stages: vec![stage("network"), stage("device")] }]
        };
        let found = means(&look(10, 1000), &look(14, 1200));
        assert_eq!(found[0].stages, [("network".to_owned(), 50.0), ("device".to_owned(), 50.0)]);
        assert!((found[0].whole_us() - 100.0).abs() < 1e-9);
        assert!(means(&look(10, 1000), &look(10, 1000)).is_empty(), "nothing ended");
        assert_eq!(means(&look(10, 1000), &look(2, 90))[0].stages[0].1, 45.0, "counters began anew");
        assert_eq!(means(&[], &look(2, 90))[0].stages[0].1, 45.0);
    }
}
