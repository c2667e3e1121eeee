//! The report of a recorded run.

use super::model::Run;
use super::{report, table};

/// A short run of two jobs on a volume whose replica 2 could read 20 MiB/s for three seconds, as its own report carries it.
const RECORDED: &str = include_str!("recorded.json");

fn recorded() -> Run {
    serde_json::from_str(RECORDED).unwrap()
}

/// The part between `from` and the next `to`.
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let rest = text.split_once(from).unwrap_or_else(|| panic!("no {from:?}")).1;
    rest.split_once(to).unwrap_or_else(|| panic!("no {to:?}")).0
}

/// Every element that is opened is closed, in order.
fn assert_nested(html: &str) {
    const VOID: [&str; 2] = ["meta", "!DOCTYPE"];
    let mut open = Vec::new();
    let mut rest = html;
    while let Some((_, tail)) = rest.split_once('<') {
        let (tag, after) = tail.split_once('>').expect("a tag ends");
        rest = after;
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "</{name}>");
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
            if name == "script" || name == "style" {
                // What stands in it is no HTML.
                rest = &rest[rest.find(&format!("</{name}")).expect("it ends")..];
            }
        }
    }
    assert_eq!(open, [] as [&str; 0]);
}

#[test]
fn the_report_has_the_curves_of_what_was_recorded() {
    let run = recorded();
    let html = report::html(&run);
    assert_nested(&html);
    let figures: Vec<&str> = html.split("<figure>").skip(1).collect();
    let titles: Vec<&str> = figures.iter().map(|figure| between(figure, "<strong>", "</strong>")).collect();
    let expected = [
        "Bandwidth",
        "Latency of reads",
        "Latency of writes",
        "Pending jobs at each replica",
        "Pending bytes at each replica",
        "Lead over the slowest replica",
        "Delay put on reads to each replica",
    ];
    assert_eq!(titles, expected);
    let lines = |figure: &str| figure.matches("class=\"line ").count();
    assert_eq!(figures.iter().map(|figure| lines(figure)).collect::<Vec<_>>(), [2, 3, 3, 3, 3, 3, 3]);
    for figure in &figures {
        for job in &run.jobs {
            assert!(
                figure.contains(&format!(">{}</text>", job.name)),
                "{} is not named in {figure}",
                job.name
            );
        }
        assert!(!figure.contains("NaN") && !figure.contains("inf"), "{figure}");
    }
    // The run can be had from the report again.
    let data = between(&html, "id=\"run\">", "</script>");
    assert_eq!(serde_json::from_str::<Run>(data).unwrap(), run);
}

#[test]
fn the_report_asks_nothing_of_a_network() {
    let html = report::html(&recorded());
    for outside in ["http:", "https:", "src=", "href=", "url(", "@import"] {
        assert!(!html.contains(outside), "{outside}");
    }
}

#[test]
fn what_others_wrote_can_not_become_markup() {
    let mut run = recorded();
    let name = "</script><b>&\"";
    run.jobs[0].name = name.into();
    run.target = name.into();
    run.happenings[0].what = name.into();
    let html = report::html(&run);
    assert_nested(&html);
    assert!(!html.contains("<b>&"), "a name became markup");
    assert_eq!(serde_json::from_str::<Run>(between(&html, "id=\"run\">", "</script>")).unwrap(), run);
}

#[test]
fn the_table_tells_the_largest_and_the_mean_of_each_replica() {
    let run = recorded();
    let text = table::all(&run);
    let job = &run.jobs[0];
    let queues: Vec<u64> = run.samples_of(job).map(|sample| sample.replicas[2].queue_jobs).collect();
    let most = queues.iter().max().unwrap();
    let mean = queues.iter().sum::<u64>() as f64 / queues.len() as f64;
    let row = text
        .lines()
        .filter(|line| line.starts_with(&job.name))
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|cells| cells[1] == "2")
        .unwrap_or_else(|| panic!("no replica 2 in {text}"));
    assert_eq!(&row[2..4], [most.to_string(), format!("{mean:.0}")]);
    for part in ["IOPS", "MiB/s", "p99.9", "delay max", "faults put in on purpose: bandwidth=20M"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

#[test]
fn a_run_without_a_status_or_without_anything_still_makes_a_report() {
    let alone = Run { samples: Vec::new(), volume: None, happenings: Vec::new(), ..recorded() };
    let html = report::html(&alone);
    assert_nested(&html);
    assert_eq!(html.matches("<figure>").count(), 3);
    assert_nested(&report::html(&Run::default()));
    assert_eq!(table::all(&Run::default()).lines().filter(|line| !line.is_empty()).count(), 1);
}
