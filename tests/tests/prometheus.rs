//! The dashboard and the alert rules in a real Prometheus that scrapes a real volume: every query of the dashboard gives figures, every
//! rule can be evaluated, and alerts go off with their texts.
//!
//! What finds fault with the dashboard and the rules is given faulty ones in the same run, and must find them.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]
#![expect(clippy::print_stdout, reason = "what was found is part of the result")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use newel_tests::cluster::{Cluster, Options, Role};
use newel_tests::damage::RegionFile;
use newel_tests::grafana::{Chosen, Dashboard, Query, interpolate, legend, rate_interval};
use newel_tests::load::Load;
use newel_tests::lock::Heavy;
use newel_tests::nbd::Command;
use newel_tests::prometheus::{Alert, EVERY, Labels, Programs, Prometheus, Rule};
use newel_tests::wait;
use rustix::process::Signal;

const PATIENCE: Duration = Duration::from_secs(60);
/// No pattern matches itself: a name that was taken for one is not found.
const NAME: &str = "db.1+a";
/// What becomes slow, and goes away; another one with it costs the quorum.
const SLOW: usize = 2;
const OTHER: usize = 1;
/// Far above what busy machines do to the others, which this is compared with.
const FAULT: &str = "read-delay=1s";
/// Whoever is away is tried again every second, and given a second.
const CONFIG: &str = "[trace]\nthreshold = \"200ms\"\n[timing]\nping_every = \"300ms\"\nsilence = \"2s\"\n\
                      handshake = \"1s\"\nbackoff_max = \"1s\"\n";
const BLOCK_BYTES: u64 = 4096;
/// Loads stay in these; what is damaged lies behind.
const BLOCKS: u64 = 16_384;
const DAMAGED: u64 = 20_000;
/// Between two points of a panel a screen wide that shows an hour.
const POINTS: Duration = Duration::from_secs(5);

const DASHBOARD: &str = include_str!("../../tools/grafana/newel.json");
const ALERTS: &str = include_str!("../../tools/grafana/alerts.yml");

/// Rules that are wrong in a way that is only seen once they are evaluated.
const WRONG_RULES: &str = r#"
groups:
  - name: wrong
    rules:
      - alert: WrongMatch
        expr: newel_volume_state > on (volume) newel_replica_state
      - alert: WrongLabel
        expr: newel_volume_size_bytes > 0
        annotations: { summary: "Volume {{ $labels.volum }}" }
      - alert: WrongFunction
        expr: newel_volume_size_bytes > 0
        annotations: { summary: "{{ $value | first }}" }
"#;

fn grafana() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/grafana")
}

/// The names behind `- alert:` in a file of rules.
fn names(rules: &str) -> Vec<&str> {
    rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect()
}

// --- what finds fault ---------------------------------------------------------------------------------

/// A query gives figures, and each of its series has a legend of its own.
fn check_query(prometheus: &Prometheus, query: &Query, chosen: &Chosen) -> Result<(), String> {
    let expression = interpolate(&query.expression, chosen)?;
    let of = |what: String| format!("{}: {what}: {expression}", query.panel);
    let samples = prometheus.query(&expression).map_err(of)?;
    if !samples.iter().any(|sample| sample.value.is_finite()) {
        return Err(of(format!("no figure in {} samples", samples.len())));
    }
    let legends: Result<Vec<String>, String> =
        samples.iter().map(|sample| legend(&query.legend, &sample.labels)).collect();
    let mut legends = legends.map_err(of)?;
    legends.sort();
    match legends.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(of(format!("two series are called {:?}", pair[0]))),
        None => Ok(()),
    }
}

/// Prometheus can evaluate a rule.
fn check_rule(rule: &Rule) -> Result<(), String> {
    match rule.health == "ok" && rule.last_error.is_empty() {
        true => Ok(()),
        false => Err(format!("{}: {}: {}", rule.name, rule.health, rule.last_error)),
    }
}

/// The texts of an alert are those of its rule, with every label that they name.
fn check_alert(alert: &Alert, rule: &Rule) -> Result<(), String> {
    let of = |what: String| format!("{what}: {alert:?}");
    for (name, template) in &rule.annotations {
        let text = alert.annotations.get(name).ok_or_else(|| of(format!("no {name}")))?;
        if text.is_empty() || ["{{", "<error", "<no value>", "%!"].iter().any(|sign| text.contains(sign)) {
            return Err(of(format!("{name} is not rendered")));
        }
        for rest in template.split("$labels.").skip(1) {
            let label = rest.split(|char: char| !char.is_ascii_alphanumeric() && char != '_').next();
            let value = label.and_then(|label| alert.labels.get(label));
            if !value.is_some_and(|value| !value.is_empty() && text.contains(value)) {
                return Err(of(format!("{name} names a label that it doesn't have")));
            }
        }
    }
    Ok(())
}

// --- the tests ----------------------------------------------------------------------------------------

#[test]
fn every_alert_goes_off_when_it_should() {
    let Some(programs) = Programs::find("every_alert_goes_off_when_it_should") else { return };
    programs.promtool(["check", "rules"], &grafana().join("alerts.yml")).ok();
    let cases = grafana().join("alerts_test.yml");
    programs.promtool(["test", "rules"], &cases).ok();
    let text = std::fs::read_to_string(&cases).unwrap();
    let all = names(ALERTS);
    assert!(all.len() > 10, "{all:?}");
    for name in all {
        // Once where all is well, once before its time, and once when it goes off.
        let cases = text.matches(&format!("alertname: {name}\n")).count();
        assert!(cases > 0 && text.contains(&format!("alertname: {name} }}")), "no case of {name}");
    }

    // What would find a mistake does: in an expression, and in what is expected.
    let dir = newel_tests::command::temp_dir();
    let write = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let broken = write("broken.yml", ALERTS.replacen("== 0", "== ", 1));
    programs.promtool(["check", "rules"], &broken).failed_saying(&["could not parse expression"]);
    write("alerts.yml", ALERTS.replace("sum without (state) (", "("));
    let wrong = programs.promtool(["test", "rules"], &write("alerts_test.yml", text));
    assert!(!wrong.status.success() && wrong.stderr.contains("alertname: NewelReplicaAway"), "{wrong}");
}

#[test]
fn dashboard_and_alerts_work_in_a_real_prometheus() {
    let Some(programs) = Programs::find("dashboard_and_alerts_work_in_a_real_prometheus") else { return };
    let _heavy = Heavy::take();
    let options = Options { name: NAME, config: CONFIG, status_on_tcp: true, ..Options::default() };
    let mut cluster = Cluster::start(options);
    let mut client = cluster.connect();
    client.write(DAMAGED * BLOCK_BYTES, &[0xda; 4096]);
    client.flush();
    cluster.fault(SLOW, FAULT);
    let loads =
        [Command::Read, Command::Write].map(|command| Load::start(&cluster.address(), command, 4, BLOCKS));
    cluster.await_status("reads are throttled", |status| status.reads.throttled);

    let wrong = cluster.dir().join("wrong.yml");
    std::fs::write(&wrong, WRONG_RULES).unwrap();
    let alerts = grafana().join("alerts.yml");
    let prometheus = Prometheus::start(&programs, &cluster.status_address(), &[&alerts, &wrong]);
    let scraped = wait::until("it has scraped", PATIENCE, || prometheus.scrape_error());
    assert_eq!(scraped, "", "Prometheus can't read the metrics");

    check_dashboard(&prometheus);
    let seen = Seen { prometheus: &prometheus, rules: evaluated(&prometheus) };

    // What one slow replica causes.
    let slow = SLOW.to_string();
    let of_volume = [("volume", NAME)];
    let of_slow = [("volume", NAME), ("replica", &*slow)];
    seen.await_alert("NewelFaultsOnPurpose", &of_slow);
    seen.await_alert("NewelReplicaSlow", &of_slow);
    seen.await_alert("NewelSlowJobs", &of_volume);

    // A copy that rots, and is healed by a read.
    RegionFile::open(&cluster.region(0)).flip_data(DAMAGED, 7);
    wait::until("the damaged copy is healed", PATIENCE, || {
        assert_eq!(client.read(DAMAGED * BLOCK_BYTES, 4096), [0xda; 4096]);
        cluster.try_status().filter(|status| status.replicas[0].healed_blocks > 0)
    });
    let bad = seen.await_alert("NewelBadCopies", &[("volume", NAME), ("replica", "0")]);
    let summary = &bad.annotations["summary"];
    assert!(summary.contains("that were replaced: 1 in a day"), "{summary}");

    // One replica stops, then another one.
    seen.await_none("NewelReplicaAway");
    cluster.signal(Role::Replica(SLOW), Signal::STOP);
    let away = seen.await_alert("NewelReplicaAway", &of_slow);
    assert_eq!(away.state, "pending");
    assert_eq!(away.annotations["summary"], format!("Replica {slow} of {NAME} is away"));
    // It is now tried, now left alone, twice at least since the alert: for Prometheus it is away all the time.
    let changes = format!("changes(newel_replica_state{{replica=\"{slow}\",state=\"left\"}}[1m]) >= 4");
    wait::until(&changes, PATIENCE, || (!prometheus.query(&changes).unwrap().is_empty()).then_some(()));
    let still = seen.await_alert("NewelReplicaAway", &of_slow);
    assert_eq!(still.active_since, away.active_since, "the alert began anew");
    seen.await_none("NewelNotServing");
    cluster.signal(Role::Replica(OTHER), Signal::STOP);
    seen.await_alert("NewelNotServing", &of_volume);

    for replica in [OTHER, SLOW] {
        cluster.signal(Role::Replica(replica), Signal::CONT);
    }
    cluster.await_all_active();
    seen.await_none("NewelNotServing");
    seen.await_none("NewelReplicaAway");
    for load in loads {
        load.finish();
    }
    drop(client);
    cluster.fault(SLOW, "off");
    cluster.stop_and_check();
    let gone = seen.await_alert("NewelUpstairsGone", &[]);
    assert!(gone.annotations["summary"].contains(&gone.labels["instance"]), "{gone:?}");
    // Through all of this.
    for rule in prometheus.rules().iter().filter(|rule| rule.file.ends_with("alerts.yml")) {
        assert_eq!(check_rule(rule), Ok(()));
    }
}

/// Everything that the dashboard asks for is there, and what is wrong is found.
#[track_caller]
fn check_dashboard(prometheus: &Prometheus) {
    let dashboard = Dashboard::parse(DASHBOARD);
    let mut chosen = Chosen::from([("__rate_interval".into(), rate_interval(POINTS, EVERY))]);
    for variable in dashboard.variables() {
        let (selector, label) = variable.label_values().unwrap_or_else(|| panic!("{variable:?}"));
        let selector = interpolate(selector, &chosen).unwrap();
        let values = wait::until(&format!("{variable:?} has a value"), PATIENCE, || {
            Some(prometheus.label_values(&selector, label).unwrap()).filter(|values| !values.is_empty())
        });
        let expected: &[&str] = match &*variable.name {
            "volume" => &[NAME],
            "operation" => &["flush", "read", "write"],
            other => panic!("a variable {other} that nothing is expected of"),
        };
        assert_eq!(values, expected, "{variable:?}");
        chosen.insert(variable.name.clone(), variable.choose(&values));
    }

    let queries = dashboard.queries();
    assert_eq!(queries.len(), DASHBOARD.matches("\"expr\":").count());
    assert!(queries.len() > 20, "{queries:?}");
    let mut last = Vec::new();
    let found = wait::try_until(PATIENCE, || {
        last = queries.iter().filter_map(|query| check_query(prometheus, query, &chosen).err()).collect();
        last.is_empty().then_some(())
    });
    assert!(found.is_some(), "{} of {} queries fail:\n{}", last.len(), queries.len(), last.join("\n"));

    let wrong = |expression: &str, legend: &str| {
        let query = Query { panel: "wrong".into(), expression: expression.into(), legend: legend.into() };
        check_query(prometheus, &query, &chosen).unwrap_err()
    };
    for (expression, legend, error) in [
        ("newel_no_such_metric{volume=\"$volume\"}", "", "no figure in 0 samples"),
        ("rate(newel_job_bytes_total{volume=\"$volume\"})", "", "bad_data"),
        ("rate(newel_job_bytes_total{volume=\"$volume\"}[$__interval])", "", "no variable $__interval"),
        ("newel_volume_state{volume=\"$volume\"}", "{{replica}}", "no label replica"),
        ("newel_replica_queue_jobs{volume=\"$volume\"}", "{{volume}}", "two series are called"),
        // A name is no pattern.
        ("newel_volume_state{volume=~\"$volume\"}", "{{state}}", "no figure in 0 samples"),
        ("newel_volume_size_bytes / 0 - newel_volume_size_bytes / 0", "", "no figure in 1 samples"),
    ] {
        let said = wrong(expression, legend);
        assert!(said.contains(error), "{said}");
    }
}

/// The rules, once each was looked at: those of ours work, and the wrong ones are found.
#[track_caller]
fn evaluated(prometheus: &Prometheus) -> Vec<Rule> {
    let rules = wait::until("every rule is evaluated", PATIENCE, || {
        let rules = prometheus.rules();
        rules.iter().all(|rule| rule.health != "unknown").then_some(rules)
    });
    let (ours, wrong): (Vec<Rule>, Vec<Rule>) =
        rules.into_iter().partition(|rule| rule.file.ends_with("alerts.yml"));
    assert_eq!(ours.iter().map(|rule| &*rule.name).collect::<Vec<_>>(), names(ALERTS));
    for rule in &ours {
        assert_eq!(check_rule(rule), Ok(()));
    }
    assert_eq!(wrong.iter().map(|rule| &*rule.name).collect::<Vec<_>>(), names(WRONG_RULES));
    let said = check_rule(&wrong[0]).unwrap_err();
    assert!(said.contains("many-to-many"), "{said}");
    for rule in &wrong[1..] {
        assert_eq!(check_rule(rule), Ok(()), "it is its text that is wrong");
        let alerts = wait::until(&rule.name, PATIENCE, || {
            Some(named(prometheus, &rule.name)).filter(|all| !all.is_empty())
        });
        let said = check_alert(&alerts[0], rule).unwrap_err();
        assert!(said.contains("rendered") || said.contains("a label that it doesn't have"), "{said}");
    }
    ours
}

fn named(prometheus: &Prometheus, name: &str) -> Vec<Alert> {
    prometheus.alerts().into_iter().filter(|alert| alert.name() == name).collect()
}

/// A Prometheus whose alerts are looked at.
struct Seen<'a> {
    prometheus: &'a Prometheus,
    rules: Vec<Rule>,
}

impl Seen<'_> {
    #[track_caller]
    fn await_none(&self, name: &str) {
        wait::until(&format!("no {name}"), PATIENCE, || {
            named(self.prometheus, name).is_empty().then_some(())
        });
    }

    /// The one alert of this name, pending or firing, with these labels and all its texts.
    #[track_caller]
    fn await_alert(&self, name: &str, labels: &[(&str, &str)]) -> Alert {
        let rule = self.rules.iter().find(|rule| rule.name == name).expect("there is such a rule");
        let has = |theirs: &Labels| {
            labels.iter().all(|(label, value)| theirs.get(*label).is_some_and(|found| found == value))
        };
        let mut all = Vec::new();
        let mut of_these = Vec::new();
        let found = wait::try_until(PATIENCE, || {
            all = named(self.prometheus, name);
            of_these = all.clone();
            of_these.retain(|alert| has(&alert.labels));
            (!of_these.is_empty()).then_some(())
        });
        assert!(found.is_some(), "no {name} with {labels:?}, but {all:?}");
        let [alert] = of_these.try_into().unwrap_or_else(|several| panic!("{several:?}"));
        assert!(alert.state == "pending" || alert.state == "firing", "{alert:?}");
        assert_eq!(check_alert(&alert, rule), Ok(()));
        println!("{}: {}", alert.state, alert.annotations["summary"]);
        alert
    }
}
