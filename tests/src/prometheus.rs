//! A real Prometheus that scrapes one upstairs, and what it answers.
//!
//! Invariants:
//! - It listens on a loopback address of its own, keeps its data below `target/tmp`, and ends with the test, also with one that fails.
//! - It is Debian's program, from the path or as `tools/test.sh` unpacked it: no service of the system is touched.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::cluster::own_address;
use crate::command::{Ran, Running, cache_dir, path, run, temp_dir};
use crate::http::{self, encoded};
use crate::nbd::Address;
use crate::skip::skipped;
use crate::wait;

/// From its start to its first answer, on a busy machine.
const START_MAX: Duration = Duration::from_secs(60);
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Of its log, in a test that fails.
const TAIL_LINES: usize = 30;
/// How often it scrapes, and looks at its rules.
pub const EVERY: Duration = Duration::from_secs(1);

/// The two programs.
#[derive(Debug)]
pub struct Programs {
    prometheus: PathBuf,
    promtool: PathBuf,
}

impl Programs {
    /// `None`, and the test recorded as skipped, if they are not here.
    pub fn find(test: &str) -> Option<Self> {
        let found = Option::zip(find("prometheus"), find("promtool"));
        if found.is_none() {
            let why = format!(
                "prometheus is neither in the path nor in {} (tools/test.sh unpacks it there)",
                unpacked().display()
            );
            skipped(test, &why);
        }
        found.map(|(prometheus, promtool)| Self { prometheus, promtool })
    }

    /// `promtool WORD WORD FILE`.
    #[track_caller]
    pub fn promtool(&self, words: [&str; 2], file: &Path) -> Ran {
        run(Command::new(&self.promtool).args(words).arg(file))
    }
}

fn find(name: &str) -> Option<PathBuf> {
    let path = path();
    let dirs = path.split(':').map(PathBuf::from).chain([unpacked().join("usr/bin")]);
    dirs.map(|dir| dir.join(name)).find(|program| program.is_file())
}

/// Where `tools/test.sh` unpacks Debian's package.
fn unpacked() -> PathBuf {
    cache_dir("NEWEL_PROMETHEUS_CACHE", "newel-prometheus")
}

#[derive(Debug)]
pub struct Prometheus {
    // First, so that it has ended when its directory goes.
    running: Running,
    _dir: tempfile::TempDir,
    address: Address,
}

pub type Labels = BTreeMap<String, String>;

#[derive(Clone, Debug)]
pub struct Sample {
    pub labels: Labels,
    pub value: f64,
}

/// A rule of an alert.
#[derive(Clone, Debug)]
pub struct Rule {
    pub file: PathBuf,
    pub name: String,
    /// `ok`, `err`, or `unknown` before it was looked at for the first time.
    pub health: String,
    pub last_error: String,
    /// Templates.
    pub annotations: Labels,
}

/// An alert that is pending or firing.
#[derive(Clone, Debug)]
pub struct Alert {
    pub state: String,
    pub active_since: String,
    pub labels: Labels,
    /// As they are sent.
    pub annotations: Labels,
}

impl Alert {
    pub fn name(&self) -> &str {
        self.labels.get("alertname").map_or("", String::as_str)
    }
}

impl Prometheus {
    /// Scrapes `target` as the job `newel`, with these files of rules.
    #[track_caller]
    pub fn start(programs: &Programs, target: &Address, rules: &[&Path]) -> Self {
        let Address::Tcp(target) = target else { panic!("it scrapes over TCP only") };
        let dir = temp_dir();
        // JSON is YAML.
        let config = serde_json::json!({
            "global": { "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s" },
            "rule_files": rules,
            "scrape_configs": [{
                "job_name": "newel",
                "static_configs": [{ "targets": [target.to_string()] }],
            }],
        });
        let file = dir.path().join("prometheus.yml");
        std::fs::write(&file, config.to_string()).expect("target/tmp is writable");
        let address = own_address();
        let mut command = Command::new(&programs.prometheus);
        command.arg(format!("--config.file={}", file.display()));
        command.arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()));
        command.arg(format!("--web.listen-address={address}"));
        let running = Running::start(&mut command);
        let address = Address::Tcp(address.parse().expect("it is an address with a port"));
        let mut prometheus = Self { running, _dir: dir, address };
        wait::until("Prometheus is ready", START_MAX, || {
            assert!(prometheus.running.running(), "Prometheus ended");
            let answer = http::get(&prometheus.address, "/-/ready", SILENCE_MAX).ok()?;
            (answer.status == 200).then_some(())
        });
        prometheus
    }

    /// The data of an answer, or the error that it told.
    #[track_caller]
    fn ask(&self, path: &str) -> Result<Value, String> {
        let answer = http::get(&self.address, path, SILENCE_MAX).expect("Prometheus answers");
        let json: Value =
            serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{path}: {error}: {answer:?}"));
        match json["status"].as_str() {
            Some("success") => Ok(json["data"].clone()),
            _ => Err(format!("{}: {}", string(&json["errorType"]), string(&json["error"]))),
        }
    }

    /// What an expression gives now.
    ///
    /// # Errors
    /// What Prometheus says of it.
    #[track_caller]
    pub fn query(&self, expression: &str) -> Result<Vec<Sample>, String> {
        let data = self.ask(&format!("/api/v1/query?query={}", encoded(expression)))?;
        if data["resultType"] != "vector" {
            return Err(format!("a {} and no vector", data["resultType"]));
        }
        let sample = |json: &Value| Sample {
            labels: labels(&json["metric"]),
            value: json["value"][1].as_str().and_then(|text| text.parse().ok()).expect("a number"),
        };
        Ok(list(&data["result"]).iter().map(sample).collect())
    }

    /// The values that a label has in the series of a selector.
    ///
    /// # Errors
    /// What Prometheus says of it.
    #[track_caller]
    pub fn label_values(&self, selector: &str, label: &str) -> Result<Vec<String>, String> {
        let data = self.ask(&format!("/api/v1/label/{label}/values?match[]={}", encoded(selector)))?;
        Ok(list(&data).iter().map(string).collect())
    }

    #[track_caller]
    pub fn rules(&self) -> Vec<Rule> {
        let data = self.ask("/api/v1/rules").expect("Prometheus knows its rules");
        let of = |group: &Value| {
            let rule = |json: &Value| Rule {
                file: string(&group["file"]).into(),
                name: string(&json["name"]),
                health: string(&json["health"]),
                last_error: json["lastError"].as_str().unwrap_or_default().to_owned(),
                annotations: labels(&json["annotations"]),
            };
            list(&group["rules"]).iter().map(rule).collect::<Vec<_>>()
        };
        list(&data["groups"]).iter().flat_map(of).collect()
    }

    #[track_caller]
    pub fn alerts(&self) -> Vec<Alert> {
        let data = self.ask("/api/v1/alerts").expect("Prometheus knows its alerts");
        let alert = |json: &Value| Alert {
            state: string(&json["state"]),
            active_since: string(&json["activeAt"]),
            labels: labels(&json["labels"]),
            annotations: labels(&json["annotations"]),
        };
        list(&data["alerts"]).iter().map(alert).collect()
    }

    /// Why it can't read what it scrapes, empty if it can; `None` before the first scrape.
    #[track_caller]
    pub fn scrape_error(&self) -> Option<String> {
        let data = self.ask("/api/v1/targets").expect("Prometheus knows its targets");
        let target = list(&data["activeTargets"]).first()?;
        (target["health"] != "unknown").then(|| string(&target["lastError"]))
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.running.stderr();
            let lines: Vec<&str> = log.lines().collect();
            let tail = &lines[lines.len().saturating_sub(TAIL_LINES)..];
            eprintln!("--- the end of the log of Prometheus ---\n{}", tail.join("\n"));
        }
    }
}

#[track_caller]
fn string(json: &Value) -> String {
    json.as_str().unwrap_or_else(|| panic!("no text: {json}")).to_owned()
}

#[track_caller]
fn list(json: &Value) -> &[Value] {
    json.as_array().unwrap_or_else(|| panic!("no list: {json}"))
}

#[track_caller]
fn labels(json: &Value) -> Labels {
    let map = json.as_object().unwrap_or_else(|| panic!("no map: {json}"));
    map.iter().map(|(name, value)| (name.clone(), string(value))).collect()
}
