//! What stands on the screen, on a terminal in memory.

use std::time::Duration;

use newel_upstairs::core::status::{ReplicaStatus, Status};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::app::{App, Flow, Look};
use super::view;

/// A status as it comes over HTTP, after `looks` seconds of 100 reads of 4 KiB at each replica, replica 2 later than the others.
fn look(looks: u64) -> Look {
    let replica = |id: u8| ReplicaStatus {
        id,
        state: "active".into(),
        address: format!("127.0.0.1:2100{id}"),
        queue_jobs: 3 * usize::from(id),
        read_delay_us: if id == 0 { 12_000 } else { 0 },
        ..ReplicaStatus::default()
    };
    let status = Status {
        name: "db".into(),
        state: "serving".into(),
        size_bytes: 4 << 30,
        generation: 9,
        replicas: (0..3).map(replica).collect(),
        ..Status::default()
    };
    let mut json = serde_json::to_value(&status).unwrap();
    let work = |class: usize| {
        let mut latencies = vec![0; class + 1];
        latencies[class] = 100 * looks;
        serde_json::json!({ "reads": 100 * looks, "read_bytes": 409_600 * looks, "writes": 0, "write_bytes": 0, "others": 0,
                            "latencies": latencies })
    };
    json["work"] = work(64);
    let stage = |name: &str, us: u64| serde_json::json!({ "stage": name, "count": 100 * looks, "sum_us": us * 100 * looks });
    for (id, replica) in json["replicas"].as_array_mut().unwrap().iter_mut().enumerate() {
        replica["work"] = work(if id == 2 { 100 } else { 60 });
        replica["latency"] = serde_json::json!([{
            "operation": "read", "count": 100 * looks, "p50_us": 1000, "p99_us": 1000, "p999_us": 1000, "max_us": 1000, "bytes": null,
            "stages": [stage("network", 200), stage("device", 800)]
        }]);
    }
    Look::parse(json.to_string().as_bytes(), "12:00:00".into()).unwrap()
}

fn app() -> App {
    let mut app = App::new("unix:/run/db.status.sock".into(), Duration::from_secs(1));
    for second in 0..4 {
        app.seen(Duration::from_secs(second), look(second));
    }
    app.passed(Duration::from_secs(3));
    app
}

fn screen(app: &App, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, app)).unwrap();
    let buffer = terminal.backend().buffer();
    let cells: Vec<&str> = buffer.content().iter().map(ratatui::buffer::Cell::symbol).collect();
    cells.chunks(usize::from(width)).map(|line| format!("{}\n", line.concat().trim_end())).collect()
}

fn press(app: &mut App, code: KeyCode) -> Flow {
    app.key(KeyEvent::new(code, KeyModifiers::NONE))
}

#[track_caller]
fn assert_shows(screen: &str, parts: &[&str]) {
    for part in parts {
        assert!(screen.contains(part), "{part:?} is not on\n{screen}");
    }
}

#[test]
fn rates_and_latencies_of_the_last_second_stand_beside_each_replica() {
    let screen = screen(&app(), 120, 40);
    assert_shows(
        &screen,
        &["db  4.0 GiB  serving  generation 9", "guests  100 IOPS  read 0.39 MiB/s", "12:00:00 UTC"],
    );
    let row = |id: u8| screen.lines().find(|line| line.starts_with(&format!("replica {id}"))).unwrap();
    let cells = |id: u8| row(id).split_whitespace().collect::<Vec<_>>().join(" ");
    // Class 60 is 8 × 6 + 12: from 12 × 2^6 µs on. Class 100 is 8 × 11 + 12.
    assert_eq!(cells(0), "replica 0 active 100 0.39 800 µs 800 µs 800 µs 0 0 B - 12.0 ms", "{screen}");
    assert_eq!(cells(2), "replica 2 active 100 0.39 25.6 ms 25.6 ms 25.6 ms 6 0 B - 0", "{screen}");
    assert_shows(
        &screen,
        &["read   there", "1.00 ms", "network 200 µs", "device 800 µs", "p99 latency, ms", "q quit"],
    );
}

#[test]
fn keys_do_what_the_help_says() {
    let mut app = app();
    assert_eq!(press(&mut app, KeyCode::Char('?')), Flow::On);
    assert_shows(&screen(&app, 120, 40), &["keys and columns", "look more often", "what the"]);
    assert_eq!(press(&mut app, KeyCode::Esc), Flow::On, "closes the help first");
    press(&mut app, KeyCode::Down);
    press(&mut app, KeyCode::Down);
    press(&mut app, KeyCode::Down);
    assert_shows(&screen(&app, 120, 40), &["127.0.0.1:21002", " replica 2 "]);
    press(&mut app, KeyCode::Char('g'));
    assert_shows(&screen(&app, 120, 40), &["queue, jobs"]);
    assert_eq!(press(&mut app, KeyCode::Char('+')), Flow::Faster);
    assert_eq!(app.every(), Duration::from_millis(500));
    assert_eq!(press(&mut app, KeyCode::Char('q')), Flow::Quit);
    assert_eq!(press(&mut app, KeyCode::Esc), Flow::Quit);
    assert_eq!(app.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Flow::Quit);
}

#[test]
fn a_volume_that_does_not_answer_keeps_its_last_figures_on_screen() {
    let mut app = app();
    app.unanswered("nothing answers".into());
    app.unanswered("still nothing answers".into());
    app.passed(Duration::from_secs(9));
    assert_shows(
        &screen(&app, 120, 40),
        &["NO ANSWER for 6 s: still nothing answers", "replica 2", "25.6 ms"],
    );
    // An upstairs that was started again counts from zero: that is no rate below zero.
    app.seen(Duration::from_secs(10), look(1));
    let screen = screen(&app, 120, 40);
    assert!(!screen.contains("NO ANSWER"), "{screen}");
    assert_shows(&screen, &["guests  14 IOPS"]);
}

#[test]
fn what_is_held_does_not_move() {
    let mut app = app();
    press(&mut app, KeyCode::Char(' '));
    let before = screen(&app, 120, 40);
    assert_shows(&before, &["held: space goes on"]);
    app.seen(Duration::from_secs(4), look(40));
    assert_eq!(screen(&app, 120, 40), before);
}

#[test]
fn every_size_can_be_drawn() {
    let mut app = app();
    for help in [false, true] {
        app.help = help;
        for width in [1, 10, 47, 48, 60, 80, 200] {
            for height in [1, 5, 9, 10, 15, 22, 24, 60] {
                let screen = screen(&app, width, height);
                if width >= 80 && height >= 24 && !help {
                    assert_shows(&screen, &["replica 2", "p99", "q quit"]);
                }
            }
        }
    }
    assert_shows(&screen(&app, 40, 8), &["at least 48x10"]);
}

#[test]
fn history_is_bounded_and_an_empty_status_is_drawn() {
    let mut app = app();
    for second in 4..2000 {
        app.seen(Duration::from_secs(second), look(second));
    }
    assert_eq!(app.history.len(), 240);
    let mut empty = App::new("x".into(), Duration::from_secs(1));
    screen(&empty, 100, 30);
    empty.seen(Duration::ZERO, Look::default());
    press(&mut empty, KeyCode::Down);
    screen(&empty, 100, 30);
}
