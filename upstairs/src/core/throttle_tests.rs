//! What the throttle promises, on the model of queues. Time is simulated; every run is exact.

use super::throttle_model::{Ev, Look, MS, Model, SECOND, Server, US};

fn bytes_per_second(looks: &[Look], from: u64, to: u64) -> f64 {
    let at = |time: u64| looks.iter().find(|look| look.at >= time).unwrap().answered_bytes;
    (at(to) - at(from)) as f64 * 1e9 / (to - from) as f64
}

fn between(looks: &[Look], from: u64, to: u64) -> impl Iterator<Item = &Look> {
    looks.iter().filter(move |look| (from..to).contains(&look.at))
}

fn held(look: &Look) -> bool {
    look.delay_ms > 0.0 || look.gated > 0
}

const SLOW: usize = 2;

/// A replica at half the rate: bounded queue, bounded lead, and the guest reads at its rate. Without the throttle the queue
/// reaches the hard bound.
#[track_caller]
fn check_half_rate(name: &str, fast: &Server, slow: &Server, depth: usize, size: usize) {
    let servers = || [fast.clone(), fast.clone(), slow.clone()];
    let looks = Model::new(servers(), depth, &[size]).run(60 * SECOND + MS);
    let settled = || between(&looks, SECOND, 60 * SECOND);
    let most = settled().map(|look| look.queue_ms[SLOW]).fold(0.0, f64::max);
    let (low, high) = settled()
        .fold((f64::MAX, 0.0_f64), |(low, high), look| (low.min(look.lead_ms), high.max(look.lead_ms)));
    let rate = bytes_per_second(&looks, SECOND, 60 * SECOND) / slow.rate(size);
    eprintln!("{name}: queue {most:.1} ms, lead {low:.1} to {high:.1} ms, rate {:.1}%", rate * 100.0);
    assert!(most < 30.0, "{name}: a queue of {most:.1} ms");
    assert!(low >= 10.0 && high < 25.0, "{name}: lead {low:.1} to {high:.1} ms");
    assert!(rate >= 0.97, "{name}: {:.1}% of the slow replica's rate", rate * 100.0);

    let mut control = Model::new(servers(), depth, &[size]).without_throttle();
    control.bound = 2_000;
    control.run_to(600 * SECOND);
    assert!(control.over_bound, "{name}: without a throttle the queue grows");
}

#[test]
fn a_replica_at_half_the_rate_sets_the_pace() {
    let (fast, slow) = (Server::at(2 << 30), Server::at(1 << 30));
    check_half_rate("4K", &Server::at(400 << 20), &Server::at(200 << 20), 32, 4 << 10);
    check_half_rate("4K, a tenth", &Server::at(200 << 20), &Server::at(20 << 20), 32, 4 << 10);
    check_half_rate("1M", &fast, &slow, 8, 1 << 20);
    check_half_rate("1M deep", &fast, &slow, 64, 1 << 20);
    check_half_rate("4M", &fast, &slow, 25, 4 << 20);
    check_half_rate("4M, 10 ms each", &Server::at(800 << 20), &Server::at(400 << 20), 25, 4 << 20);
    check_half_rate(
        "5 ms each",
        &Server::one_at_a_time(2_500 * US),
        &Server::one_at_a_time(5 * MS),
        32,
        4 << 10,
    );
    check_half_rate(
        "5 ms each, 1M",
        &Server::one_at_a_time(2_500 * US),
        &Server::one_at_a_time(5 * MS),
        8,
        1 << 20,
    );
}

/// Equal replicas, however late and in whatever order they answer: nothing is held, and nothing is lost.
#[track_caller]
fn check_untouched(name: &str, servers: [Server; 3], depth: usize, sizes: &[usize]) {
    let with = Model::new(servers.clone(), depth, sizes).run(6 * SECOND + MS);
    let without = Model::new(servers, depth, sizes).without_throttle().run(6 * SECOND + MS);
    let rate = |looks: &[Look]| bytes_per_second(looks, SECOND, 6 * SECOND);
    let ratio = rate(&with) / rate(&without);
    let held = with.iter().filter(|look| held(look)).count() as f64 / with.len() as f64;
    eprintln!("{name}: {:.2}% of the rate, held for {:.2}% of the time", ratio * 100.0, held * 100.0);
    assert!(ratio >= 0.98, "{name}: {ratio}");
    assert!(held < 0.01, "{name}: held for {held} of the time");
}

#[test]
fn equal_replicas_are_not_throttled() {
    let three = |server: Server| [server.clone(), server.clone(), server];
    let fast = Server::at(1 << 30);
    for size in [4 << 10, 1 << 20, 4 << 20] {
        check_untouched("equal", three(fast.clone()), 25, &[size]);
    }
    check_untouched("mixed sizes", three(fast.clone()), 25, &[4 << 10, 1 << 20, 4 << 10, 64 << 10]);
    let parallel = Server { parallel: 64, ..Server::one_at_a_time(200 * US) };
    check_untouched("1 to 10 ms late", three(parallel.clone().late(MS, 10 * MS)), 32, &[4 << 10]);
    check_untouched("out of order", three(Server { unordered: true, ..fast.clone() }), 32, &[64 << 10]);
    let late = parallel.clone().late(5 * MS, 5 * MS);
    check_untouched("5 ms later", [parallel.clone(), parallel, late], 32, &[4 << 10]);
}

/// Equal replicas that their hosts hold up for 5 to 50 ms at a time, a twentieth of the time: each alone, two together, or all.
#[test]
fn replicas_on_busy_hosts_are_not_throttled() {
    let parallel = |reads| Server { parallel: reads, ..Server::one_at_a_time(200 * US) };
    let large = Server { parallel: 16, ..Server::one_at_a_time(4 * MS) };
    for (name, server, depth, size) in [
        ("twice what is asked", parallel(64), 32, 4 << 10),
        ("a quarter more", parallel(40), 32, 4 << 10),
        ("4M", large, 8, 4 << 20),
    ] {
        for seeds in [[1, 2, 3], [1, 1, 3], [1, 1, 1]] {
            let servers = seeds.map(|seed| server.clone().on_a_busy_host(seed * 0x9e37_79b9, 7 * SECOND));
            check_untouched(&format!("{name}, hosts {seeds:?}"), servers, depth, &[size]);
        }
    }
}

/// Replicas far slower than the fastest one: the fast one reads much before they have answered much.
#[test]
fn a_far_slower_replica_is_noticed_by_its_backlog() {
    for (name, fast, slow, depth, size) in [
        ("4K, a fifth", 200, 20, 32, 4 << 10),
        ("4K, a 17th", 400, 8, 32, 4 << 10),
        ("64K, a 38th", 1000, 20, 32, 64 << 10),
        ("1M, a tenth", 2000, 200, 8, 1 << 20),
    ] {
        let (fast, slow) = (Server::at(fast << 20), Server::at(slow << 20));
        for servers in [[&fast, &fast, &slow], [&fast, &slow, &slow]] {
            let looks = Model::new(servers.map(Server::clone), depth, &[size]).run(10 * SECOND + MS);
            let most = between(&looks, SECOND, 10 * SECOND).map(|look| look.queue_ms[SLOW]);
            let most = most.fold(0.0, f64::max);
            let first = between(&looks, 0, SECOND).map(|look| look.queue_ms[SLOW]).fold(0.0, f64::max);
            let rate = bytes_per_second(&looks, SECOND, 10 * SECOND) / slow.rate(size);
            eprintln!("{name}: queue {first:.1} ms at first, then {most:.1} ms; rate {:.1}%", rate * 100.0);
            assert!(most < 30.0, "{name}: a queue of {most:.1} ms after 1 s");
            assert!(rate >= 0.97, "{name}: {:.1}% of the slow replica's rate", rate * 100.0);
        }
    }
}

#[test]
fn out_of_order_replies_do_not_hide_a_backlog() {
    let slow = Server { unordered: true, ..Server::at(200 << 20) };
    let fast = Server::at(400 << 20);
    let looks = Model::new([fast.clone(), fast, slow.clone()], 32, &[16 << 10]).run(20 * SECOND + MS);
    let most = between(&looks, SECOND, 20 * SECOND).map(|look| look.queue_ms[SLOW]).fold(0.0, f64::max);
    let rate = bytes_per_second(&looks, SECOND, 20 * SECOND) / slow.rate(16 << 10);
    assert!(most < 30.0 && rate > 0.97, "queue {most:.1} ms, rate {rate:.3}");
}

#[test]
fn mixed_sizes_settle() {
    let (fast, slow) = (Server::at(2 << 30), Server::at(1 << 30));
    let sizes = [4 << 10, 4 << 20, 64 << 10, 1 << 20, 4 << 10];
    let looks = Model::new([fast.clone(), slow.clone(), fast], 32, &sizes).run(20 * SECOND + MS);
    let most = between(&looks, SECOND, 20 * SECOND).map(|look| look.queue_ms[1]).fold(0.0, f64::max);
    assert!(most < 30.0, "queue {most:.1} ms");
}

/// The slow replica is as fast as the others from one moment on: within 250 ms nothing is held any more.
#[test]
fn a_replica_that_recovers_is_not_waited_for() {
    // Wherever that meets the throttle's own probes, which come every few seconds.
    let moments = (0..12).map(|number| 5 * SECOND + number * 25 * MS);
    let small = moments.map(|moment| (moment, 32, 4 << 10));
    let large = [(8, 1 << 20), (64, 1 << 20), (25, 4 << 20)].map(|(depth, size)| (5 * SECOND, depth, size));
    for (moment, depth, size) in small.chain(large) {
        let (fast, slow) = (Server::at(2 << 30), Server::at(1 << 30));
        let mut model = Model::new([fast.clone(), fast.clone(), slow], depth, &[size]);
        model.change(moment, SLOW, fast);
        let looks = model.run(6 * SECOND + MS);
        assert!(between(&looks, 4 * SECOND, moment).any(held), "it was throttled before");
        let late = between(&looks, moment + 250 * MS, 6 * SECOND).find(|look| held(look));
        assert!(late.is_none(), "{size} at depth {depth} from {moment} on: {late:?}");
    }
}

#[test]
fn a_replica_that_leaves_takes_every_delay_with_it_and_finds_none() {
    let (fast, slow) = (Server::at(2 << 30), Server::at(1 << 30));
    let mut model = Model::new([fast.clone(), fast.clone(), slow], 8, &[1 << 20]);
    model.at(5 * SECOND, Ev::Away(SLOW, true));
    model.change(6 * SECOND, SLOW, fast);
    model.at(7 * SECOND, Ev::Away(SLOW, false));
    let looks = model.run(10 * SECOND);
    assert!(between(&looks, 4 * SECOND, 5 * SECOND).any(held), "it was throttled before");
    let late = between(&looks, 5 * SECOND + MS, 10 * SECOND).find(|look| held(look));
    assert!(late.is_none(), "{late:?}");
}

#[test]
fn short_bursts_are_not_delayed() {
    // 30 reads that take the slow one 9 ms, and time to recover before the next.
    let (fast, slow) = (Server::one_at_a_time(100 * US), Server::one_at_a_time(300 * US));
    let mut model = Model::new([fast.clone(), fast.clone(), slow.clone()], 0, &[4 << 10]);
    (0..400).for_each(|burst| model.at(burst * 25 * MS, Ev::Burst(30)));
    let looks = model.run(10 * SECOND);
    assert!(!looks.iter().any(held), "a burst was delayed");
    // Longer than the lead, but far apart: a pause is no lead that lasts.
    let mut model = Model::new([fast.clone(), fast.clone(), slow.clone()], 0, &[4 << 10]);
    (0..40).for_each(|burst| model.at(burst * 230 * MS, Ev::Burst(200)));
    assert!(!model.run(10 * SECOND).iter().any(held), "a burst after a pause was delayed");
    // The control: without the pauses they are a backlog.
    let mut model =
        Model::new([Server::one_at_a_time(100 * US), Server::one_at_a_time(100 * US), slow], 0, &[4 << 10]);
    (0..4000).for_each(|burst| model.at(burst * 5 * MS, Ev::Burst(30)));
    assert!(model.run(10 * SECOND).iter().any(held), "a flood was not");
}

/// A replica that is merely later, by more than the limit: it is no backlog, so the guest pays the delay and nothing else.
#[test]
fn latency_is_not_taken_for_a_backlog() {
    let parallel = Server { parallel: 64, ..Server::one_at_a_time(200 * US) };
    for late_ms in [20, 60] {
        let depth = 32;
        let late = parallel.clone().late(late_ms * MS, late_ms * MS);
        let mut model = Model::new([parallel.clone(), parallel.clone(), parallel.clone()], depth, &[4 << 10]);
        model.change(2 * SECOND, SLOW, late);
        let looks = model.run(30 * SECOND + MS);
        let reads = bytes_per_second(&looks, 4 * SECOND, 30 * SECOND) / 4096.0;
        let unhurt = depth as f64 * 1000.0 / late_ms as f64;
        eprintln!("{late_ms} ms later: {reads:.0} reads/s, {unhurt:.0} at that latency");
        assert!(reads > unhurt * 0.95, "{late_ms} ms later: {reads:.0} reads/s, not {unhurt:.0}");
        assert!(between(&looks, 4 * SECOND, 30 * SECOND).any(|look| look.delay_ms > 0.0), "it is delayed");
        let high = between(&looks, 4 * SECOND, 30 * SECOND).map(|look| look.lead_ms).fold(0.0, f64::max);
        assert!(high < 25.0, "lead {high:.1} ms");
    }
}

/// A stopped replica holds up nobody, before, during and after, whether reads were throttled because of it or not.
#[test]
fn a_replica_that_stops_is_not_noticed() {
    let fast = Server::at(400 << 20);
    for slow in [Server::at(400 << 20), Server::at(200 << 20)] {
        let mut model = Model::new([fast.clone(), fast.clone(), slow.clone()], 4, &[64 << 10]);
        let stopped = Server { stopped: vec![(5 * SECOND, 7 * SECOND)], ..slow.clone() };
        model.change(5 * SECOND, SLOW, stopped);
        model.change(7 * SECOND, SLOW, slow.clone());
        model.run_to(12 * SECOND);
        let stop = model.answers.iter().filter(|(at, _)| (5 * SECOND..7 * SECOND).contains(at));
        let longest = stop.map(|&(_, took)| took).max().unwrap();
        assert!(longest < 150 * MS, "{} ms while one was stopped", longest / MS);
    }
}
