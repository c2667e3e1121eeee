//! The status page as a browser shows it.

use std::time::Duration;

use newel_tests::browser::{Instead, Site, get};
use newel_tests::cluster::{Cluster, Role};
use newel_tests::load::Load;
use newel_tests::lock::Heavy;
use newel_tests::nbd::Command;
use newel_tests::skip::have;

const BLOCKS: u64 = 4096;
const LIFE: Duration = Duration::from_secs(20);

/// Two records as `GET /slow` gives them.
const SLOW: &str = r#"[
  {"id": 1, "ended": true, "received_unix_us": 1796000000000000, "operation": "write", "offset": 8192, "length": 4096,
   "total_us": 1200000, "failed": false, "verdict": {"text": "replica 1, network, 1.19 s of 1.20 s"},
   "steps": [{"stage": "network", "replica": 1, "took_us": 1190000}, {"stage": "device", "replica": 1, "took_us": 10000}]},
  {"id": 2, "ended": false, "received_unix_us": 1796000001000000, "operation": "read", "offset": 0, "length": 65536,
   "total_us": 10000000, "failed": false, "verdict": {"text": "<b>replica 2</b>, device, 9.98 s of 10.0 s"},
   "steps": [{"stage": "throttle", "replica": null, "took_us": 20000}, {"stage": "device", "replica": 2, "took_us": 9980000}]},
  "nonsense"]"#;

/// What stands between the two, the first time.
#[track_caller]
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let rest = text.split_once(from).unwrap_or_else(|| panic!("no {from:?} in\n{text}")).1;
    rest.split_once(to).unwrap_or_else(|| panic!("no {to:?} in\n{rest}")).0
}

/// The text of what stands between tags.
fn text_of(html: &str) -> String {
    html.split('<')
        .filter_map(|part| part.split_once('>'))
        .map(|(_, text)| text)
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn replicas_figures_and_curves_are_shown_and_follow_what_happens() {
    let test = "replicas_figures_and_curves_are_shown_and_follow_what_happens";
    if !have(test, &["chromium"]) {
        return;
    }
    let _heavy = Heavy::take();
    let mut cluster = Cluster::small();
    let site = Site::open(&cluster.status_socket(), &[]);
    let load = Load::start(&cluster.address(), Command::Read, 8, BLOCKS);
    let dom = site.dom_after(LIFE);
    assert!(between(&dom, "id=\"state\"", "</span>").ends_with("serving"), "{dom}");
    assert!(between(&dom, "id=\"lost\"", ">").contains("hidden"), "{dom}");
    let rows = between(&dom, "id=\"replicas\"", "</tbody>");
    assert_eq!(rows.matches(">active").count(), 3, "{rows}");
    let figures: Vec<&str> = dom.split("<figure>").skip(1).collect();
    assert_eq!(figures.len(), 6);
    let lines = |figure: &str| figure.matches("class=\"line ").count();
    // Guests' latencies and bandwidth, then a curve for each replica.
    assert_eq!(figures.iter().map(|figure| lines(figure)).collect::<Vec<_>>(), [3, 2, 3, 3, 3, 3], "{dom}");
    let guests = text_of(between(&dom, "id=\"guests\"", "</p>"));
    let p50 = between(&guests, "p50", "p99").trim().to_owned();
    assert!(p50.ends_with("µs") || p50.ends_with("ms"), "{guests}");

    cluster.kill(Role::Replica(2));
    cluster.await_status("the dead replica is missed", |status| status.replicas[2].reason.is_some());
    let dom = site.dom_after(LIFE);
    let rows = between(&dom, "id=\"replicas\"", "</tbody>");
    assert_eq!(rows.matches(">active").count(), 2, "{rows}");
    assert!(text_of(between(&dom, "id=\"notes\"", "</ul>")).contains("Replica 2: "), "{dom}");
    load.finish();

    // An answer that makes no sense is none.
    let dom = Site::open(&cluster.status_socket(), &[("/status", "nonsense")]).dom_after(LIFE);
    assert!(!between(&dom, "id=\"lost\"", ">").contains("hidden"), "{dom}");
    assert!(text_of(between(&dom, "id=\"lost\"", "</p>")).contains("No answer for"), "{dom}");
}

#[test]
fn slow_ios_are_shown_with_their_bars_and_nothing_becomes_markup() {
    let test = "slow_ios_are_shown_with_their_bars_and_nothing_becomes_markup";
    if !have(test, &["chromium"]) {
        return;
    }
    let _heavy = Heavy::take();
    let cluster = Cluster::small();
    const INSTEAD: Instead = &[("/slow", SLOW)];
    let dom = Site::open(&cluster.status_socket(), INSTEAD).dom_after(LIFE);
    let slow = between(&dom, "id=\"slow\"", "</ol>");
    let items: Vec<&str> = slow.split("<li>").skip(1).collect();
    assert_eq!(items.len(), 2, "{slow}");
    // The slowest first; its name is text.
    assert!(items[0].contains("&lt;b&gt;replica 2&lt;/b&gt;, device, 9.98 s of 10.0 s"), "{slow}");
    assert!(items[0].contains("10.0 s for a read of 64.0 KiB at 0, still under way"), "{slow}");
    assert!(items[0].contains("class=\"s-device\"") && items[0].contains("width: 99.8%"), "{slow}");
    assert!(items[1].contains("replica 1, network: 1.19 s"), "{slow}");

    // Without such a list the page lives all the same.
    let dom = Site::open(&cluster.status_socket(), &[("/slow", "{}")]).dom_after(LIFE);
    assert!(!between(&dom, "id=\"no-slow\"", ">").contains("hidden"), "{dom}");
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let cluster = Cluster::small();
    let answer = get(&cluster.status_socket(), "/").expect("the upstairs answers");
    let answer = String::from_utf8(answer).expect("the page is UTF-8");
    let (head, page) = answer.split_once("\r\n\r\n").expect("there is a body");
    assert!(head.to_lowercase().contains("content-security-policy: default-src 'none'"), "{head}");
    for outside in ["https:", "src=", "@import", "url(", "<link rel=\"stylesheet\""] {
        assert!(!page.contains(outside), "{outside}");
    }
    // The one address is the name of SVG's elements.
    assert_eq!(page.matches("http:").count(), page.matches("http://www.w3.org/2000/svg").count());
}

#[test]
fn dashboard_and_alerts_ask_for_metrics_that_there_are() {
    let cluster = Cluster::small();
    let answer = get(&cluster.status_socket(), "/metrics").expect("the upstairs answers");
    let answer = String::from_utf8(answer).expect("metrics are UTF-8");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let known: Vec<&str> =
        answer.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert!(known.len() > 20, "{answer}");
    for text in
        [include_str!("../../tools/grafana/newel.json"), include_str!("../../tools/grafana/alerts.yml")]
    {
        let words = text.split(|char: char| !char.is_ascii_alphanumeric() && char != '_');
        let mut asked: Vec<&str> = words.filter(|word| word.starts_with("newel_")).collect();
        asked.sort_unstable();
        asked.dedup();
        assert!(asked.len() > 5, "{asked:?}");
        for name in asked {
            let family =
                ["_total", "_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            assert!(known.contains(&family.unwrap_or(name)), "{name} is not served; there are {known:?}");
        }
    }
}
