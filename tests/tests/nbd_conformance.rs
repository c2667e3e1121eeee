//! What the NBD protocol asks of a server, case by case: the handshake over raw sockets, and every command with every flag
//! and range through libnbd's shell, with simple and with structured replies. `upstairs/README.md` has the table of what is
//! covered where.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::time::Duration;

use newel_tests::cluster::{Cluster, Options, Role};
use newel_tests::command::sh;
use newel_tests::nbd::{Address, Client, Command, ESHUTDOWN, Stream};
use newel_tests::options::{
    ABORT, ACK, ERR_INVALID, ERR_POLICY, ERR_SHUTDOWN, ERR_TOO_BIG, ERR_UNKNOWN, ERR_UNSUP, EXPORT_NAME, GO,
    Handshake, INFO, LIST, LIST_META_CONTEXT, SET_META_CONTEXT, STARTTLS, STRUCTURED_REPLY, USUAL, named,
    queries,
};
use newel_tests::pattern::bytes_at;
use newel_tests::skip::have;
use newel_tests::volume::{Setup, Volume};
use newel_tests::wait;
use rustix::process::Signal;

/// One option, and the code that ends its answer.
type Said = (u32, Vec<u8>, u32);

/// Sends the options of a conversation one by one, and then all at once in one write: the answers are the same.
#[track_caller]
fn check(address: &Address, what: &str, talk: &[Said]) {
    let mut apart = Handshake::start(address, USUAL);
    for (at, (option, payload, code)) in talk.iter().enumerate() {
        assert_eq!(apart.ask(*option, payload), *code, "{what}: option {option}, the {at}th");
    }
    let mut together = Handshake::start(address, USUAL);
    for (option, payload, _) in talk {
        together.send(*option, payload);
    }
    for (at, (option, _, code)) in talk.iter().enumerate() {
        assert_eq!(together.answer(*option).unwrap().0, *code, "{what}, piped: option {option}, the {at}th");
    }
}

#[test]
fn options_are_answered_one_by_one() {
    let mut volume = Volume::small();
    let address = volume.unix();
    let long = |length| named(&vec![b'x'; length]);
    let context = |query: &str| queries(&[query]);
    check(
        &address,
        "names",
        &[
            (GO, long(3000), ERR_UNKNOWN),
            (GO, long(4096), ERR_UNKNOWN),
            (GO, long(4097), ERR_TOO_BIG),
            (INFO, long(5000), ERR_TOO_BIG),
            (INFO, long(70_000), ERR_TOO_BIG),
            (GO, named(b"newel\0"), ERR_UNKNOWN),
            (GO, named(&[0xff, 0xfe]), ERR_UNKNOWN),
            (GO, named(b"newel"), ACK),
        ],
    );
    check(
        &address,
        "an odd order",
        &[
            (INFO, named(b""), ACK),
            (LIST, vec![], ACK),
            (INFO, named(b"nobody"), ERR_UNKNOWN),
            (STRUCTURED_REPLY, vec![], ACK),
            (STRUCTURED_REPLY, vec![], ACK),
            (INFO, named(b""), ACK),
            (GO, named(b""), ACK),
        ],
    );
    check(
        &address,
        "unknown options",
        &[
            (4, vec![1], ERR_UNSUP),
            (11, vec![], ERR_UNSUP),
            (99, vec![9; 65_536], ERR_UNSUP),
            (u32::MAX, vec![9; 65_537], ERR_UNSUP),
            (STARTTLS, vec![], ERR_UNSUP),
            (LIST, vec![], ACK),
            (GO, named(b""), ACK),
        ],
    );
    check(
        &address,
        "options with data they don't take, and lengths that don't add up",
        &[
            (LIST, b"data".to_vec(), ERR_INVALID),
            (STRUCTURED_REPLY, vec![0], ERR_INVALID),
            (STARTTLS, vec![0], ERR_INVALID),
            (GO, vec![], ERR_INVALID),
            (GO, vec![0, 0, 0, 9, b'x', 0, 0], ERR_INVALID),
            (GO, vec![0xff; 6], ERR_INVALID),
            (INFO, [named(b""), vec![0]].concat(), ERR_INVALID),
            (INFO, vec![0, 0, 0, 0, 0, 2, 0, 1], ERR_INVALID),
            (GO, named(b""), ACK),
        ],
    );
    check(
        &address,
        "contexts",
        &[
            (SET_META_CONTEXT, context("base:allocation"), ERR_INVALID),
            (LIST_META_CONTEXT, context("base:"), ERR_INVALID),
            (STRUCTURED_REPLY, vec![], ACK),
            (LIST_META_CONTEXT, queries(&[]), ACK),
            (LIST_META_CONTEXT, context("nobody:knows"), ACK),
            (SET_META_CONTEXT, queries(&["x:y", "base:allocation"]), ACK),
            (SET_META_CONTEXT, vec![0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], ERR_INVALID),
            (SET_META_CONTEXT, vec![0; 5], ERR_INVALID),
            (GO, named(b""), ACK),
        ],
    );
    let mut lists = Handshake::start(&address, USUAL);
    lists.send(LIST, &[]);
    assert!(lists.answer(LIST).unwrap().1.starts_with(b"\0\0\0\x05newel"));
    // A connection that has ended in any of these ways has taken nothing along.
    Client::connect(&address).unwrap().write(0, b"served");
    volume.stop_and_check();
}

#[test]
fn handshakes_that_end_without_an_answer() {
    let mut volume = Volume::small();
    let address = volume.unix();
    let mut client = Client::connect(&address).unwrap();
    let size = client.size_bytes.to_be_bytes();
    // The oldest way: no answer but the export, and none at all to a wrong name.
    for (flags, zeroes) in [(0, 124), (1, 124), (3, 0)] {
        let mut oldest = Handshake::start(&address, flags);
        oldest.send(EXPORT_NAME, b"newel");
        // A disconnect right behind it, so that the end of the answer shows.
        oldest.send_raw(&[&0x2560_9513_u32.to_be_bytes()[..], &[0, 0, 0, 2], &[0; 20]].concat());
        let found = oldest.rest();
        assert_eq!((found.len(), &found[..8]), (8 + 2 + zeroes, &size[..]), "flags {flags}");
        assert!(found[10..].iter().all(|&byte| byte == 0));
    }
    for name in [&[b'x'; 3000][..], &[b'x'; 5000], b"nobody"] {
        let mut refused = Handshake::start(&address, USUAL);
        refused.send(EXPORT_NAME, name);
        assert_eq!(refused.rest(), b"", "a name of {}", name.len());
    }
    // Not this protocol, or not this client's.
    for (flags, first) in [
        (u32::MAX, &b""[..]),
        (4, b""),
        (USUAL, b"IHAVEOPX\0\0\0\x03\0\0\0\0"),
        (0, b"IHAVEOPT\0\0\0\x03\0\0\0\0"),
    ] {
        let mut strange = Handshake::start(&address, flags);
        strange.send_raw(first);
        assert_eq!(strange.rest(), b"", "flags {flags:#x}");
    }
    // Without an end.
    let mut endless = Handshake::start(&address, USUAL);
    let answered = (0..1000).take_while(|_| {
        endless.send(LIST, &[]);
        endless.answer(LIST).is_ok()
    });
    assert_eq!(answered.count(), 128);

    let mut goodbye = Handshake::start(&address, USUAL);
    goodbye.send(ABORT, &[]);
    assert_eq!(goodbye.answer(ABORT).unwrap().0, ACK);
    assert_eq!(goodbye.rest(), b"");
    for _ in 0..20 {
        let mut rude = Handshake::start(&address, USUAL);
        rude.send(LIST, &[]);
        rude.send(ABORT, &[]);
    }
    client.write(0, b"served");
    assert_eq!(client.read(0, 6), b"served");
    drop(client);
    volume.stop_and_check();
}

/// Every command with every kind of range and flag. The shell of libnbd sends what it is told once its strict mode is off.
const TABLE: &str = r#"
import errno
FUA, NO_HOLE, DF, REQ_ONE, FAST, PAYLOAD, UNKNOWN = 1, 2, 4, 8, 16, 32, 0x8000
EINVAL, ENOSPC = errno.EINVAL, errno.ENOSPC
DATA = b"\x5a" * 65536

def run(structured):
    h = nbd.NBD()
    h.set_strict_mode(0)
    h.set_request_structured_replies(structured)
    if structured:
        h.add_meta_context("base:allocation")
    h.connect_uri(uri)
    assert h.get_structured_replies_negotiated() == structured
    assert h.can_meta_context("base:allocation") == structured
    assert h.can_multi_conn() and h.can_flush() and h.can_fua() and h.can_trim() and h.can_zero() and h.can_cache()
    assert h.can_df() == structured and not h.can_fast_zero() and not h.is_read_only()
    assert (h.get_block_size(nbd.SIZE_MINIMUM), h.get_block_size(nbd.SIZE_PREFERRED), h.get_block_size(nbd.SIZE_MAXIMUM)) == (1, 4096, 32 << 20)
    size = h.get_size()
    h.pwrite(DATA, 0)
    h.pwrite(DATA, size - len(DATA))
    none = lambda *a: 0
    commands = {
        "read": lambda o, l, f: h.pread(l, o, f),
        "write": lambda o, l, f: h.pwrite(bytes([0x5a]) * l, o, f),
        "zero": lambda o, l, f: h.zero(l, o, f),
        "trim": lambda o, l, f: h.trim(l, o, f),
        "cache": lambda o, l, f: h.cache(l, o, f),
        "status": lambda o, l, f: h.block_status(l, o, none, f),
    }
    count = 0
    def check(command, offset, length, flags, expected):
        nonlocal count
        count += 1
        case = (command, offset, length, hex(flags), structured)
        try:
            commands[command](offset, length, flags)
            found = 0
        except nbd.Error as e:
            found = e.errnum
        assert found == expected, (case, errno.errorcode.get(found, found), errno.errorcode.get(expected, expected))
        # Still in step, and nothing changed that must not.
        assert h.pread(len(DATA), 0) == DATA, case

    for command in commands:
        outside = ENOSPC if command in ("write", "zero") else EINVAL
        # Without its context a status is refused before its range is looked at.
        inside = EINVAL if command == "status" and not structured else 0
        for offset in (0, 4096, size - 1, size, 2**63, 2**64 - 1):
            check(command, offset, 0, 0, EINVAL)
        middle = 1 << 20
        for offset, length in ((middle, 1), (middle, 512), (middle + 511, 4097), (middle, 1 << 20)):
            check(command, offset, length, 0, inside)
        check(command, size - 512, 512, 0, inside)
        check(command, size - 1, 1, 0, inside)
        for offset, length in ((size - 511, 512), (size - 1, 2), (size, 1), (size, 4096), (size + 4096, 4096),
                               (2**32, 4096), (2**63 - 512, 1024), (2**63, 512), (2**64 - 512, 512),
                               (2**64 - 512, 1024), (2**64 - 1, 1), (2**64 - 1, 65536)):
            check(command, offset, length, 0, outside)
        known = {"read": DF if structured else 0, "zero": NO_HOLE, "status": REQ_ONE}.get(command, 0) | FUA
        for flag in (FUA, NO_HOLE, DF, REQ_ONE, FAST, PAYLOAD, 0x40, UNKNOWN, known, known | UNKNOWN):
            check(command, middle, 4096, flag, EINVAL if flag & ~known else inside)
    for command in ("read", "write"):
        check(command, middle, 32 << 20, 0, 0)
        check(command, middle, (32 << 20) + 1, 0, EINVAL)
        check(command, middle, 48 << 20, 0, EINVAL)
    for command, outside in (("zero", ENOSPC), ("trim", EINVAL), ("cache", EINVAL)):
        check(command, middle, 128 << 20, 0, 0)
        check(command, middle, 2**32 - 512, 0, outside)

    for flags, expected in ((0, 0), (FUA, 0), (UNKNOWN, EINVAL), (NO_HOLE, EINVAL)):
        try:
            h.flush(flags)
            found = 0
        except nbd.Error as e:
            found = e.errnum
        assert found == expected, ("flush", flags, found)

    # A hole, data, a hole: in pieces, in one, and as a map.
    h.trim(1 << 20, 0)
    h.pwrite(DATA, 65536)
    expected = bytes(65536) + DATA + bytes(65536)
    assert h.pread(3 * 65536, 0) == expected
    if structured:
        chunks = []
        h.pread_structured(3 * 65536, 0, lambda data, offset, kind, err: chunks.append((offset, len(data), kind)))
        assert [kind for _, _, kind in chunks] == [nbd.READ_HOLE, nbd.READ_DATA, nbd.READ_HOLE], chunks
        chunks.clear()
        h.pread_structured(3 * 65536, 0, lambda data, offset, kind, err: chunks.append((offset, len(data), kind)), nbd.CMD_FLAG_DF)
        assert chunks == [(0, 3 * 65536, nbd.READ_DATA)], chunks
        seen = []
        h.block_status(3 * 65536, 0, lambda name, offset, entries, err: seen.extend(entries))
        assert seen == [65536, 3, 65536, 0, 65536, 3], seen
        seen.clear()
        h.block_status(3 * 65536, 65536 + 512, lambda name, offset, entries, err: seen.extend(entries), nbd.CMD_FLAG_REQ_ONE)
        assert seen == [65536 - 512, 0], seen
        h.zero(65536, 65536, nbd.CMD_FLAG_NO_HOLE)
        seen.clear()
        h.block_status(65536, 65536, lambda name, offset, entries, err: seen.extend(entries))
        assert seen == [65536, 0] and h.pread(65536, 65536) == bytes(65536), seen
    h.pwrite(DATA, 0, FUA)
    h.shutdown()
    print("structured" if structured else "simple", count, "cases held")

run(False)
run(True)
"#;

#[test]
fn every_command_with_every_flag_and_range() {
    let test = "every_command_with_every_flag_and_range";
    if !have(test, &["/usr/bin/python3", "/usr/lib/python3/dist-packages/nbd.py"]) {
        return;
    }
    let mut volume = Volume::small();
    let script = format!("uri = {:?}\n{TABLE}", volume.uri());
    let ran = sh("/usr/bin/python3", &["-m", "nbd", "-c", &script]).ok();
    assert!(ran.stdout.contains("simple") && ran.stdout.contains("structured"), "{ran}");
    volume.stop_and_check();
}

/// As far as it goes without a kernel that knows NBD: list, and agree upon the export that a device would get.
#[test]
fn nbd_client_agrees_upon_the_export() {
    let test = "nbd_client_agrees_upon_the_export";
    if !have(test, &["nbd-client"]) {
        return;
    }
    if std::path::Path::new("/sys/module/nbd").exists() {
        newel_tests::skip::skipped(test, "the kernel knows NBD, and would attach a device");
        return;
    }
    let mut volume = Volume::start(Setup { tcp: true, ..Setup::default() });
    let Address::Tcp(address) = volume.tcp() else { panic!("it serves TCP") };
    let (host, port) = (address.ip().to_string(), address.port().to_string());
    let listed = sh("nbd-client", &["-l", &host, &port]).ok();
    assert!(listed.stdout.lines().any(|line| line.starts_with("newel")), "{listed}");
    let socket = volume.socket();
    for way in [&[host.as_str(), &port][..], &["-u", socket.to_str().unwrap()]] {
        let ran = sh("nbd-client", &[way, &["-N", "newel", "-C", "2", "/dev/nbd0"]].concat());
        assert!(ran.stdout.contains("size = 256MB"), "{ran}");
        assert!(ran.stderr.contains("nbd module"), "{ran}");
    }
    volume.stop_and_check();
}

#[test]
fn bounds_of_the_configuration_hold() {
    let config = "[nbd]\nconnections = 2\nhandshakes = 3\nhandshake = \"500ms\"\nidle = \"2s\"\n";
    let mut cluster = Cluster::start(Options { config, ..Options::default() });
    let address = cluster.address();
    let (mut first, second) = (cluster.connect(), Client::connect(&address).unwrap());
    assert_eq!(Handshake::start(&address, USUAL).ask(GO, &named(b"")), ERR_POLICY);
    first.write(0, &bytes_at(0, 4096, 1));

    // Of handshakes the silent ones go first, the fourth is let in, and none lasts.
    let mut silent: Vec<Stream> = (0..3).map(|_| Stream::connect(&address).unwrap()).collect();
    let mut talking = Handshake::start(&address, USUAL);
    assert_eq!(talking.ask(LIST, &[]), ACK);
    assert_eq!(talking.rest(), b"");
    for stream in &mut silent {
        let mut greeting = Vec::new();
        std::io::Read::read_to_end(stream, &mut greeting).unwrap();
    }

    // Idleness ends a connection, work doesn't.
    let mut idle = second;
    let watch = wait::Watch::start();
    while watch.elapsed() < Duration::from_secs(4) {
        first.write(4096, &bytes_at(4096, 4096, 2));
    }
    idle.assert_closed();
    assert_eq!(first.read(4096, 4096), bytes_at(4096, 4096, 2), "it has worked all the time");
    first.assert_closed();
    let mut again = cluster.connect();
    assert_eq!(again.read(0, 4096), bytes_at(0, 4096, 1));
    drop((again, first));
    cluster.stop_and_check();
}

/// On the way down: what is in flight cannot be finished, as its quorum is gone, and still the end is bounded.
#[test]
fn a_stop_says_so_and_is_bounded() {
    let mut cluster = Cluster::small();
    let address = cluster.address();
    let mut client = Client::connect(&address).unwrap();
    client.write(0, &bytes_at(0, 4096, 1));
    let mut shaking = Handshake::start(&address, USUAL);
    assert_eq!(shaking.ask(LIST, &[]), ACK);
    for replica in [1, 2] {
        cluster.signal(Role::Replica(replica), Signal::STOP);
    }
    client.send(Command::Write, 0, 4096, 4096, &bytes_at(4096, 4096, 1)).unwrap();
    cluster.await_status("the write is in flight", |status| status.jobs_in_flight > 0);
    cluster.signal(Role::Upstairs, Signal::TERM);
    cluster.await_status("it stops", |status| status.state == "stopping");
    assert_eq!(shaking.ask(GO, &named(b"")), ERR_SHUTDOWN);
    assert_eq!(shaking.ask(INFO, &named(b"")), ERR_SHUTDOWN);
    assert_eq!(shaking.ask(ABORT, &[]), ACK);
    assert!(Client::connect(&address).is_err(), "nobody is let in any more");
    // Refused, or left without an answer; never acknowledged.
    client.send(Command::Write, 0, 8192, 4096, &bytes_at(8192, 4096, 1)).ok();
    while let Ok(reply) = client.receive() {
        assert_eq!(reply.errno, ESHUTDOWN);
    }
    let ran = cluster.ended(Role::Upstairs);
    assert!(ran.status.success(), "{ran}");
    for replica in [1, 2] {
        cluster.signal(Role::Replica(replica), Signal::CONT);
    }
    cluster.start_daemon(Role::Upstairs);
    cluster.await_all_active();
    assert_eq!(cluster.connect().read(0, 4096), bytes_at(0, 4096, 1));
    cluster.stop_and_check();
}
