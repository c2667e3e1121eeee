//! NBD requests at the edges: each is answered as the protocol says, and the connection lives on.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::process::Command as Program;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use newel_tests::command::{Running, sh};
use newel_tests::nbd::{Client, Command, EINVAL, ENOSPC, FLAG_FUA, FLAG_NO_HOLE};
use newel_tests::pattern::{byte_at, bytes_at};
use newel_tests::skip::{have, have_root};
use newel_tests::volume::{REPLICAS, Setup, Volume, as_pid};
use newel_tests::wait;
use rustix::process::{Signal, kill_process};

fn connect(volume: &Volume) -> Client {
    Client::connect(&volume.unix()).unwrap()
}

/// The connection still answers, and what must not change hasn't.
#[track_caller]
fn assert_lives(client: &mut Client) {
    assert_eq!(
        client.read(4096, 4096),
        bytes_at(4096, 4096, 9),
        "the connection is out of step, or data changed"
    );
}

#[test]
fn edges_are_answered_and_the_connection_lives() {
    use Command::{Flush, Read, Status, Trim, Unknown, Write, Zero};

    let mut volume = Volume::small();
    let mut client = connect(&volume);
    let size = client.size_bytes;
    assert_eq!(size, 256 << 20);
    client.write(0, &bytes_at(0, 1 << 20, 9));
    client.write(size - 4096, &bytes_at(size - 4096, 4096, 9));
    let mut check = |command: Command, flags: u16, offset: u64, length: u32, allowed: &[u32]| {
        let payload = if command == Write { vec![0; length as usize] } else { Vec::new() };
        let reply = client.ask(command, flags, offset, length, &payload).unwrap();
        assert!(
            allowed.contains(&reply.errno),
            "{command:?} flags {flags:#x} at {offset} for {length}: errno {}, not one of {allowed:?}",
            reply.errno
        );
        assert_lives(&mut client);
    };
    // Nothing asked for.
    for command in [Read, Write, Trim, Zero] {
        check(command, 0, 0, 0, &[0, EINVAL]);
        check(command, 0, size, 0, &[0, EINVAL, ENOSPC]);
    }
    check(Status, 0, 0, 0, &[EINVAL]);
    // Not negotiated on this connection.
    check(Status, 0, 0, 4096, &[EINVAL]);

    // Over the end, at it, around it, and past what 64 bits hold.
    for (offset, length) in [
        (size - 512, 513),
        (size, 1),
        (size, 512),
        (size + 4096, 4096),
        (1 << 62, 4096),
        (u64::MAX - 511, 512),
        (u64::MAX - 511, 1024),
        (u64::MAX, 1),
        (u64::MAX, u32::from(u16::MAX)),
    ] {
        check(Write, 0, offset, length, &[ENOSPC]);
        check(Zero, 0, offset, length, &[ENOSPC]);
        check(Read, 0, offset, length, &[EINVAL]);
        check(Trim, 0, offset, length, &[EINVAL]);
    }
    check(Zero, 0, 4096, u32::MAX, &[ENOSPC]);
    check(Trim, 0, 4096, u32::MAX, &[EINVAL]);
    check(Read, 0, size - 512, 512, &[0]);

    // Unknown commands, and unknown flags on known ones.
    for number in [5_u16 | 0x40, 77, 0x7fff, u16::MAX] {
        check(Unknown(number), 0, 0, 4096, &[EINVAL]);
    }
    for command in [Read, Write, Trim, Zero, Flush] {
        let length = if command == Flush { 0 } else { 4096 };
        check(command, 0x8000, 0, length, &[EINVAL]);
        check(command, 0x8000 | FLAG_FUA, 0, length, &[EINVAL]);
    }
    // FUA is valid everywhere.
    check(Read, FLAG_FUA, 4096, 4096, &[0]);
    check(Flush, FLAG_FUA, 0, 0, &[0]);
    check(Trim, FLAG_FUA, 1 << 20, 4096, &[0]);
    check(Zero, FLAG_FUA, 1 << 20, 4096, &[0]);
    check(Write, FLAG_FUA, 1 << 20, 4096, &[0]);

    // Nothing of all that had an effect where it was refused.
    assert_eq!(client.read(size - 4096, 4096), bytes_at(size - 4096, 4096, 9));
    assert_eq!(client.read(0, 1 << 20), bytes_at(0, 1 << 20, 9));
    drop(client);
    volume.stop_and_check();
}

#[test]
fn requests_over_32_mib_leave_the_stream_in_step() {
    let mut volume = Volume::small();
    let mut client = connect(&volume);
    client.write(0, &bytes_at(0, 1 << 20, 9));
    for length in [(32 << 20) + 4096, 33 << 20, 65 << 20] {
        client.ask(Command::Read, 0, 0, length, &[]).unwrap();
        assert_lives(&mut client);
        // Into the part behind: it may succeed.
        client.ask(Command::Write, 0, 64 << 20, length, &vec![7; length as usize]).unwrap();
        assert_lives(&mut client);
    }
    // The largest that is promised.
    let data = bytes_at(16 << 20, 32 << 20, 3);
    client.write(16 << 20, &data);
    assert!(client.read(16 << 20, 32 << 20) == data, "32 MiB come back changed");
    drop(client);
    volume.stop_and_check();
}

/// What may be at `at` after a trim of `range`: the pattern, or zero where a whole block lies inside.
fn allowed_after_trim(at: u64, found: u8, range: &std::ops::Range<u64>) -> bool {
    let block = at / 4096 * 4096;
    found == byte_at(at, 2) || (found == 0 && range.start <= block && block + 4096 <= range.end)
}

#[test]
fn trims_of_any_length_at_odd_offsets_leave_neighbours_alone() {
    let mut volume = Volume::start(Setup { size: "5G", ..Setup::default() });
    let mut client = connect(&volume);
    for (offset, length) in [
        (12_288 + 1537, 4096),
        (12_288, 4096),
        (12_288 + 1, 4095),
        (12_288 + 512, 100),
        (12_288 + 1537, 1 << 20),
        ((4 << 20) - 3, 1 << 20),
        (12_288 + 511, 3 << 30),
        (12_288 + 4095, u32::MAX - 511),
    ] {
        let range = offset..offset + u64::from(length);
        let windows = [range.start / 4096 * 4096 - 8192, range.end / 4096 * 4096 - 8192];
        for window in windows {
            client.write(window, &bytes_at(window, 20_480, 2));
        }
        let reply = client.ask(Command::Trim, 0, offset, length, &[]).unwrap();
        assert_eq!(reply.errno, 0, "trim of {length} at {offset}");
        for window in windows {
            let data = client.read(window, 20_480);
            let wrong = (window..).zip(&data).find(|&(at, &found)| !allowed_after_trim(at, found, &range));
            assert_eq!(wrong, None, "trim of {length} at {offset}");
        }
    }
    // Zeroing is exact, at the same kind of lengths.
    for (offset, length) in [(12_288 + 1537, 4096), (12_288 + 1, 1 << 20), (12_288 + 511, 3_u32 << 30)] {
        let range = offset..offset + u64::from(length);
        let windows = [range.start / 4096 * 4096 - 8192, range.end / 4096 * 4096 - 8192];
        for window in windows {
            client.write(window, &bytes_at(window, 20_480, 2));
        }
        let reply = client.ask(Command::Zero, 0, offset, length, &[]).unwrap();
        assert_eq!(reply.errno, 0, "zero of {length} at {offset}");
        for window in windows {
            let data = client.read(window, 20_480);
            let wrong = (window..)
                .zip(&data)
                .find(|&(at, &found)| found != if range.contains(&at) { 0 } else { byte_at(at, 2) });
            assert_eq!(wrong, None, "zero of {length} at {offset}");
        }
    }
    drop(client);
    volume.stop_and_check();
}

#[test]
fn zeroes_without_holes_are_no_hole() {
    if !have("zeroes_without_holes_are_no_hole", &["nbdinfo"]) {
        return;
    }
    let mut volume = Volume::small();
    let mut client = connect(&volume);
    client.write(0, &bytes_at(0, 1 << 20, 1));
    let zero = |client: &mut Client, flags: u16, offset: u64, length: u32| {
        let reply = client.ask(Command::Zero, flags, offset, length, &[]).unwrap();
        assert_eq!(reply.errno, 0);
        assert!(client.read(offset, length).iter().all(|&byte| byte == 0));
    };
    zero(&mut client, FLAG_NO_HOLE, 256 << 10, 128 << 10);
    zero(&mut client, FLAG_NO_HOLE | FLAG_FUA, 8 << 20, 64 << 10);
    let map = sh("nbdinfo", &["--map", &volume.uri()]).ok().stdout;
    let holes: Vec<(u64, u64)> = map
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|extent| extent[3..].concat().contains("hole"))
        .map(|extent| (extent[0].parse().unwrap(), extent[1].parse().unwrap()))
        .collect();
    for range in [(256 << 10, 384 << 10), (8 << 20, (8 << 20) + (64 << 10))] {
        let hit = holes.iter().find(|&&(start, length)| start < range.1 && range.0 < start + length);
        assert_eq!(hit, None, "a hole in {range:?}: {map}");
    }
    drop(client);
    volume.stop_and_check();
}

#[test]
fn small_writes_from_four_connections_change_exactly_their_bytes() {
    const BLOCKS: u64 = 64;
    let mut volume = Volume::small();
    let mut client = connect(&volume);
    let span = BLOCKS * 4096;
    client.write(0, &bytes_at(0, span, 1));
    let address = volume.unix();
    // Connection n writes every fourth piece of 512 bytes, so that all four meet in each block at once.
    std::thread::scope(|scope| {
        for connection in 0..4 {
            let address = &address;
            scope.spawn(move || {
                let mut client = Client::connect(address).unwrap();
                let mut cookies = 0;
                for piece in (connection..span / 512).step_by(4) {
                    // The last piece of each block is left alone but for the 3 bytes around the boundary.
                    if piece % 8 != 7 {
                        client
                            .send(Command::Write, 0, piece * 512, 512, &bytes_at(piece * 512, 512, 2))
                            .unwrap();
                        cookies += 1;
                    }
                }
                for _ in 0..cookies {
                    assert_eq!(client.receive().unwrap().errno, 0);
                }
            });
        }
    });
    client.write(4095, &bytes_at(4095, 3, 3));
    let found = client.read(0, u32::try_from(span).unwrap());
    let expected = |at: u64| match at {
        4095..4098 => byte_at(at, 3),
        _ if at / 512 % 8 == 7 => byte_at(at, 1),
        _ => byte_at(at, 2),
    };
    let wrong = (0..).zip(&found).find(|&(at, &byte)| byte != expected(at));
    assert_eq!(wrong, None);
    drop(client);
    volume.stop_and_check();
}

fn seconds_now() -> f64 {
    #[expect(clippy::disallowed_methods, reason = "compared with the clock of strace")]
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[test]
fn a_flush_is_answered_after_a_quorum_has_synced() {
    let test = "a_flush_is_answered_after_a_quorum_has_synced";
    if !have_root(test) || !have(test, &["strace"]) {
        return;
    }
    let mut volume = Volume::small();
    volume.await_all_active();
    let mut client = connect(&volume);
    let mut traces: Vec<Running> = (0..REPLICAS)
        .map(|replica| {
            let pid = volume.pid(&format!("downstairs-{replica}")).unwrap().to_string();
            let mut strace = Program::new("strace");
            strace.args([
                "-f",
                "-ttt",
                "-T",
                "-e",
                "trace=fdatasync,fsync,sync_file_range,io_submit",
                "-p",
                &pid,
            ]);
            Running::start(&mut strace)
        })
        .collect();
    for trace in &mut traces {
        wait::until("strace is attached", Duration::from_secs(20), || {
            trace.stderr().contains("attached").then_some(())
        });
    }
    client.write(0, &bytes_at(0, 4096, 1));
    // What counts is what was answered, on whatever connection.
    let mut other = connect(&volume);
    let asked = seconds_now();
    other.flush();
    let answered = seconds_now();
    let mut synced = 0;
    for mut trace in traces {
        kill_process(as_pid(trace.pid()), Signal::INT).unwrap();
        wait::until("strace ends", Duration::from_secs(20), || (!trace.running()).then_some(()));
        let log = trace.stderr();
        // `[pid 1] 1700000000.123 fdatasync(3) = 0 <0.0004>`, or its second half.
        let ended =
            log.lines().filter(|line| line.contains("fdatasync") || line.contains("fsync")).any(|line| {
                let time = line.split_whitespace().find_map(|word| {
                    word.parse::<f64>().ok().filter(|&seconds| seconds > 1e9 && word.contains('.'))
                });
                line.contains("= 0") && time.is_some_and(|time| (asked - 0.001..=answered).contains(&time))
            });
        synced += usize::from(ended);
    }
    assert!(synced >= 2, "{synced} replicas synced between the flush and its answer");
    drop((client, other));
    volume.stop_and_check();
}

#[test]
fn disconnect_finishes_what_is_in_flight() {
    let mut volume = Volume::small();
    let mut client = connect(&volume);
    let mut cookies: Vec<u64> = (0..100_u64)
        .map(|at| client.send(Command::Write, 0, at * 8192, 4096, &bytes_at(at * 8192, 4096, 1)).unwrap())
        .collect();
    client.send(Command::Disconnect, 0, 0, 0, &[]).unwrap();
    for _ in 0..100 {
        let reply = client.receive().unwrap();
        assert_eq!(reply.errno, 0);
        cookies.retain(|&cookie| cookie != reply.cookie);
    }
    assert!(cookies.is_empty(), "not answered: {cookies:?}");
    client.assert_closed();
    let mut client = connect(&volume);
    for at in 0..100_u64 {
        assert_eq!(client.read(at * 8192, 4096), bytes_at(at * 8192, 4096, 1));
    }
    drop(client);
    volume.stop_and_check();
}

#[test]
fn what_was_answered_is_seen_by_every_connection() {
    let mut volume = Volume::small();
    let mut writer = connect(&volume);
    let mut reader = connect(&volume);
    for round in 0..500_u64 {
        let offset = round % 7 * 4096;
        writer.write(offset, &bytes_at(offset, 4096, round));
        assert_eq!(reader.read(offset, 4096), bytes_at(offset, 4096, round), "round {round}");
    }
    drop((writer, reader));
    volume.stop_and_check();
}

/// What needs structured replies is driven by libnbd's shell. Its bindings belong to Debian's Python, whatever other
/// stands first in the path.
const STRUCTURED: &str = r#"
import errno
h.set_strict_mode(0)
h.add_meta_context("base:allocation")
h.connect_uri(uri)
assert h.get_structured_replies_negotiated()
assert h.can_meta_context("base:allocation")
size = h.get_size()
pattern = b"\x5a" * 65536
h.pwrite(pattern, 0)

def refused(what, *codes):
    try:
        what()
    except nbd.Error as e:
        assert e.errnum in codes, (e.errnum, codes)
    else:
        assert 0 in codes, "not refused"
    assert h.pread(65536, 0) == pattern

extents = lambda name, offset, list, err: 0
refused(lambda: h.block_status(0, 0, extents), errno.EINVAL)
refused(lambda: h.block_status(512, size, extents), errno.EINVAL)
refused(lambda: h.block_status(4096, 2**63 - 4096, extents), errno.EINVAL)
refused(lambda: h.pread(512, size), errno.EINVAL)
refused(lambda: h.pread(513, size - 512), errno.EINVAL)
refused(lambda: h.pread(0, 0), errno.EINVAL, 0)
refused(lambda: h.pread(4096, 0, flags=0x8000), errno.EINVAL)
refused(lambda: h.pread(33 << 20, 0), errno.EINVAL, errno.ERANGE, errno.ENOMEM, 0)
refused(lambda: h.zero(4096, size - 512), errno.ENOSPC)
refused(lambda: h.trim(4096, size - 512), errno.EINVAL)
assert h.pread(4096, 0, flags=nbd.CMD_FLAG_DF) == pattern[:4096]

# A hole, data and a hole again, read in one piece.
data = h.pread(1 << 20, 0)
assert bytes(data[:65536]) == pattern and not any(data[65536:])

seen = []
h.block_status(1 << 20, 0, lambda name, offset, list, err: seen.append((offset, list)))
offset, entries = seen[0]
assert offset == 0 and entries[0:2] == [65536, 0], seen
one = []
h.block_status(1 << 20, 4096, lambda name, offset, list, err: one.append(list), flags=nbd.CMD_FLAG_REQ_ONE)
assert len(one[0]) == 2 and one[0][0] <= 1 << 20, one
h.shutdown()
print("all held")
"#;

#[test]
fn edges_with_structured_replies() {
    if !have("edges_with_structured_replies", &["/usr/bin/python3", "/usr/lib/python3/dist-packages/nbd.py"])
    {
        return;
    }
    let mut volume = Volume::small();
    let script = format!("uri = {:?}\n{STRUCTURED}", volume.uri());
    let ran = sh("/usr/bin/python3", &["-m", "nbd", "-c", &script]).ok();
    assert!(ran.stdout.contains("all held"), "{ran}");
    volume.stop_and_check();
}
