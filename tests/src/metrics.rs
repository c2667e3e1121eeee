//! Reads the text that Prometheus reads, and refuses what Prometheus would refuse.

use std::collections::BTreeMap;

/// Samples by name and labels.
#[derive(Debug, Default)]
pub struct Metrics {
    samples: Vec<(String, BTreeMap<String, String>, f64)>,
}

impl Metrics {
    /// Panics with the line that is wrong. Every sample must belong to the family declared before it, no family may come
    /// twice, and histograms must be cumulative and end with all.
    #[track_caller]
    pub fn parse(text: &str) -> Self {
        assert!(text.ends_with("# EOF\n"), "it has no end: {text}");
        let mut metrics = Self::default();
        let mut families: BTreeMap<String, String> = BTreeMap::new();
        let mut family = (String::new(), String::new());
        for line in text.lines().filter(|line| *line != "# EOF") {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap_or_else(|| panic!("{line}"));
                assert!(families.insert(name.into(), kind.into()).is_none(), "twice: {line}");
                family = (name.into(), kind.into());
            } else if let Some(rest) = line.strip_prefix("# UNIT ") {
                let (name, unit) = rest.split_once(' ').unwrap_or_else(|| panic!("{line}"));
                assert!(name.ends_with(&format!("_{unit}")), "the unit belongs at the end of a name: {line}");
            } else if !line.starts_with("# HELP ") {
                let (name, labels, value) = sample(line);
                let suffixes: &[&str] = match family.1.as_str() {
                    "counter" => &["_total"],
                    "gauge" => &[""],
                    "histogram" => &["_sum", "_count", "_bucket"],
                    other => panic!("{other} before {line}"),
                };
                let belongs = suffixes.iter().any(|suffix| name == format!("{}{suffix}", family.0));
                assert!(belongs, "{line} after {family:?}");
                assert!(metrics.value_of(&name, &labels).is_none(), "twice: {line}");
                metrics.samples.push((name, labels, value));
            }
        }
        metrics.check_histograms();
        metrics
    }

    #[track_caller]
    fn check_histograms(&self) {
        let counts = self
            .samples
            .iter()
            .filter(|(name, labels, _)| name.ends_with("_count") && !labels.contains_key("le"));
        for (name, labels, count) in counts {
            let bucket = name.replace("_count", "_bucket");
            let of = |other: &BTreeMap<String, String>| {
                let mut rest = other.clone();
                rest.remove("le").is_some() && rest == *labels
            };
            let buckets: Vec<_> =
                self.samples.iter().filter(|(other, labels, _)| *other == bucket && of(labels)).collect();
            let rises = buckets.windows(2).all(|pair| pair[0].2 <= pair[1].2);
            let last = buckets.last().unwrap_or_else(|| panic!("{name} {labels:?} has no buckets"));
            assert!(rises && last.1["le"] == "+Inf" && last.2 == *count, "{buckets:?}, {count} in all");
        }
    }

    fn value_of(&self, name: &str, labels: &BTreeMap<String, String>) -> Option<f64> {
        let found =
            |(other, theirs, _): &&(String, BTreeMap<String, String>, f64)| other == name && theirs == labels;
        self.samples.iter().find(found).map(|(.., value)| *value)
    }

    /// The one sample of this name with (at least) these labels.
    #[track_caller]
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let has = |theirs: &BTreeMap<String, String>| {
            labels.iter().all(|(key, value)| theirs.get(*key).map(String::as_str) == Some(*value))
        };
        let mut found = self.samples.iter().filter(|(other, theirs, _)| other == name && has(theirs));
        let value = found.next().map(|(.., value)| *value);
        assert!(found.next().is_none(), "{name} {labels:?} is not one");
        value
    }
}

/// `name{label="value",…} number`.
#[track_caller]
fn sample(line: &str) -> (String, BTreeMap<String, String>, f64) {
    let wrong = || -> ! { panic!("no sample: {line}") };
    let Some((head, value)) = line.rsplit_once(' ') else { wrong() };
    let Ok(value) = value.parse() else { wrong() };
    let (name, labels) = match head.split_once('{') {
        None => (head, ""),
        Some((name, labels)) => (name, labels.strip_suffix('}').unwrap_or_else(|| wrong())),
    };
    let sound = |text: &str| {
        !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit())
    };
    if !sound(name) {
        wrong();
    }
    let mut all = BTreeMap::new();
    for label in labels.split(',').filter(|label| !label.is_empty()) {
        let Some((key, value)) = label.split_once('=') else { wrong() };
        let value =
            value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or_else(|| wrong());
        if !sound(key) || all.insert(key.to_owned(), value.to_owned()).is_some() {
            wrong();
        }
    }
    (name.to_owned(), all, value)
}
