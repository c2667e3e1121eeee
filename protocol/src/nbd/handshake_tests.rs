//! The handshake, driven with bytes.

use proptest::prelude::*;

use super::*;

const SIZE: u64 = 0x1234_5000;

fn export() -> Export {
    Export { name: "vol".into(), description: "a volume".into(), is_default: true }
}

fn offer(export: &Export) -> Offer<'_> {
    Offer { export, size_bytes: SIZE, admission: Admission::Open, tls: Tls::Off }
}

fn opt(option: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = OPTION_MAGIC.to_be_bytes().to_vec();
    out.extend(option.to_be_bytes());
    out.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    out.extend(payload);
    out
}

fn counted(name: &[u8]) -> Vec<u8> {
    [&u32::try_from(name.len()).unwrap().to_be_bytes()[..], name].concat()
}

fn info(option: u32, name: &[u8], wanted: &[u16]) -> Vec<u8> {
    let mut payload = counted(name);
    payload.extend(u16::try_from(wanted.len()).unwrap().to_be_bytes());
    payload.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    opt(option, &payload)
}

fn contexts(option: u32, name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
    let mut payload = counted(name);
    payload.extend(u32::try_from(queries.len()).unwrap().to_be_bytes());
    payload.extend(queries.iter().flat_map(|query| counted(query)));
    opt(option, &payload)
}

/// Option, code, data.
type Answer = (u32, u32, Vec<u8>);

/// The answers in `out`, and what is left behind them.
fn answers(mut out: &[u8]) -> (Vec<Answer>, Vec<u8>) {
    let mut found = Vec::new();
    while out.len() >= 20 && out.starts_with(&OPTION_REPLY_MAGIC.to_be_bytes()) {
        out.advance(8);
        let (option, code, length) = (out.get_u32(), out.get_u32(), out.get_u32() as usize);
        found.push((option, code, out[..length].to_vec()));
        out.advance(length);
    }
    (found, out.to_vec())
}

/// Feeds flags and `options` in pieces; the bytes sent behind the greeting, the last step, and what input is left.
fn run(flags: u32, options: &[u8], cuts: &[usize], offer: &Offer<'_>) -> (Vec<u8>, Step, Vec<u8>) {
    let stream = [&flags.to_be_bytes()[..], options].concat();
    let (mut input, mut out, mut rest) = (BytesMut::new(), BytesMut::new(), &stream[..]);
    let mut handshake = Handshake::new(&mut out);
    assert_eq!(&out[..], b"NBDMAGICIHAVEOPT\0\x03");
    out.clear();
    let mut cuts = cuts.iter().copied().chain(std::iter::repeat(usize::MAX));
    while !rest.is_empty() {
        let (piece, behind) = rest.split_at(cuts.next().unwrap().clamp(1, rest.len()));
        rest = behind;
        input.extend_from_slice(piece);
        let step = handshake.advance(&mut input, &mut out, offer);
        if step != Step::More {
            input.extend_from_slice(rest);
            return (out.to_vec(), step, input.to_vec());
        }
        assert!(input.len() < OPTION_PAYLOAD_BYTES_MAX + OPTION_HEADER_BYTES, "bytes pile up");
    }
    (out.to_vec(), Step::More, input.to_vec())
}

/// Runs `options` one after the other; the codes of all answers, and the last step.
fn check(options: &[Vec<u8>], expected: &[(u32, u32)], step: Step) {
    let export = export();
    let (out, found_step, _) = run(3, &options.concat(), &[], &offer(&export));
    let (found, rest) = answers(&out);
    let found: Vec<_> = found.into_iter().map(|(option, code, _)| (option, code)).collect();
    assert_eq!(found, expected);
    assert_eq!(found_step, step);
    assert_eq!(rest, [] as [u8; 0]);
}

const PLAIN: Agreed = Agreed { structured: false, base_allocation: false };
const FULL: Agreed = Agreed { structured: true, base_allocation: true };

#[test]
fn go_tells_what_was_asked() {
    let export = export();
    let options = info(option::GO, b"", &[3, 1, 2, 99]);
    let (out, step, left) = run(3, &[&options[..], b"rest"].concat(), &[], &offer(&export));
    let (found, _) = answers(&out);
    let size = SIZE.to_be_bytes();
    let go = |code, data: &[&[u8]]| (option::GO, code, data.concat());
    assert_eq!(
        found,
        [
            go(answer::INFO, &[&[0, 0], &size, &[0b101, 0b0110_1101]]),
            go(answer::INFO, &[&[0, 1], b"vol"]),
            go(answer::INFO, &[&[0, 2], b"a volume"]),
            go(answer::INFO, &[&[0, 3], &[0, 0, 0, 1], &[0, 0, 0x10, 0], &[2, 0, 0, 0]]),
            go(answer::ACK, &[]),
        ]
    );
    assert_eq!((step, &left[..]), (Step::Go(PLAIN), &b"rest"[..]));
}

#[test]
fn df_is_offered_with_structured_replies_only() {
    let export = export();
    let options = [opt(option::STRUCTURED_REPLY, b""), info(option::GO, b"vol", &[])].concat();
    let (out, step, _) = run(3, &options, &[], &offer(&export));
    assert_eq!(answers(&out).0[1].2[10..], [0b101, 0b1110_1101]);
    assert_eq!(step, Step::Go(Agreed { structured: true, ..PLAIN }));
}

#[test]
fn export_name_answers_to_the_byte() {
    let export = export();
    for (flags, zeroes) in [(1, 124), (3, 0), (0, 124)] {
        let (out, step, _) = run(flags, &opt(option::EXPORT_NAME, b"vol"), &[], &offer(&export));
        assert_eq!(out.len(), 8 + 2 + zeroes);
        assert_eq!(out[..8], SIZE.to_be_bytes());
        assert_eq!(step, Step::Go(PLAIN));
    }
    for (name, full) in [(&b"other"[..], false), (&[b'x'; 3000], false), (&[b'x'; 5000], false), (b"", true)]
    {
        let admission = if full { Admission::Full } else { Admission::Open };
        let offer = Offer { admission, ..offer(&export) };
        let (out, step, _) = run(3, &opt(option::EXPORT_NAME, name), &[], &offer);
        assert!(out.is_empty() && matches!(step, Step::Close(Ending::Refused(_))), "{step:?}");
    }
}

#[test]
fn names_may_be_long_but_not_too_long() {
    let go = |length| info(option::GO, &vec![b'x'; length], &[]);
    check(
        &[go(3000), go(4096), go(4097), go(5000), go(70_000)],
        &[
            (option::GO, answer::ERR_UNKNOWN),
            (option::GO, answer::ERR_UNKNOWN),
            (option::GO, answer::ERR_TOO_BIG),
            (option::GO, answer::ERR_TOO_BIG),
            (option::GO, answer::ERR_TOO_BIG),
        ],
        Step::More,
    );
}

#[test]
fn odd_orders_and_unknown_options_keep_step() {
    check(
        &[
            info(option::INFO, b"", &[]),
            opt(option::LIST, b""),
            info(option::INFO, b"nobody", &[]),
            opt(99, &[7; 65_536]),
            opt(4, b"x"),
            opt(11, b""),
            opt(option::LIST, b"data"),
            opt(option::STRUCTURED_REPLY, b"data"),
            opt(option::STARTTLS, b""),
            opt(option::GO, b"\0\0\0\x09short\0\0"),
            info(option::GO, b"", &[]),
        ],
        &[
            (option::INFO, answer::INFO),
            (option::INFO, answer::ACK),
            (option::LIST, answer::SERVER),
            (option::LIST, answer::ACK),
            (option::INFO, answer::ERR_UNKNOWN),
            (99, answer::ERR_UNSUP),
            (4, answer::ERR_UNSUP),
            (11, answer::ERR_UNSUP),
            (option::LIST, answer::ERR_INVALID),
            (option::STRUCTURED_REPLY, answer::ERR_INVALID),
            (option::STARTTLS, answer::ERR_UNSUP),
            (option::GO, answer::ERR_INVALID),
            (option::GO, answer::INFO),
            (option::GO, answer::ACK),
        ],
        Step::Go(PLAIN),
    );
}

#[test]
fn contexts_need_structured_replies_and_the_last_request_counts() {
    const SET: u32 = option::SET_META_CONTEXT;
    const LIST: u32 = option::LIST_META_CONTEXT;
    let alloc: &[&[u8]] = &[CONTEXT_ALLOCATION];
    let structured = opt(option::STRUCTURED_REPLY, b"");
    let ack = (option::STRUCTURED_REPLY, answer::ACK);
    let go = info(option::GO, b"vol", &[]);
    let (info, end) = ((option::GO, answer::INFO), (option::GO, answer::ACK));
    check(&[contexts(SET, b"", alloc)], &[(SET, answer::ERR_INVALID)], Step::More);
    check(
        &[structured.clone(), contexts(SET, b"", &[b"x:y", CONTEXT_ALLOCATION]), go.clone()],
        &[ack, (SET, answer::META_CONTEXT), (SET, answer::ACK), info, end],
        Step::Go(FULL),
    );
    for last in [contexts(SET, b"", &[]), contexts(SET, b"", &[b"base:"]), contexts(SET, b"no", alloc)] {
        let (out, step, _) = run(
            3,
            &[&structured[..], &contexts(SET, b"", alloc), &last, &go].concat(),
            &[],
            &offer(&export()),
        );
        assert_eq!(step, Step::Go(Agreed { base_allocation: false, ..FULL }), "{:?}", answers(&out));
    }
    for (queries, listed) in
        [(&[][..], true), (&[&b"base:"[..]][..], true), (alloc, true), (&[&b"qemu:"[..]][..], false)]
    {
        let (out, ..) =
            run(3, &[&structured[..], &contexts(LIST, b"", queries)].concat(), &[], &offer(&export()));
        assert_eq!(answers(&out).0.len(), 2 + usize::from(listed), "{queries:?}");
    }
}

#[test]
fn tls_forgets_everything() {
    let export = export();
    for tls in [Tls::Offered, Tls::Required] {
        let offer = Offer { tls, ..offer(&export) };
        let (mut input, mut out) = (BytesMut::new(), BytesMut::new());
        let mut handshake = Handshake::new(&mut out);
        input.extend_from_slice(&3_u32.to_be_bytes());
        input.extend_from_slice(&opt(option::STRUCTURED_REPLY, b""));
        input.extend_from_slice(&opt(option::STARTTLS, b""));
        out.clear();
        assert_eq!(handshake.advance(&mut input, &mut out, &offer), Step::StartTls);
        let first = if tls == Tls::Required { answer::ERR_TLS_REQD } else { answer::ACK };
        let found: Vec<_> = answers(&out).0.iter().map(|&(_, code, _)| code).collect();
        assert_eq!(found, [first, answer::ACK]);
        input.extend_from_slice(&opt(option::STARTTLS, b""));
        input.extend_from_slice(&info(option::GO, b"", &[]));
        assert_eq!(handshake.advance(&mut input, &mut out, &offer), Step::Go(PLAIN));
    }
}

#[test]
fn bytes_behind_starttls_are_not_believed() {
    let export = export();
    let offer = Offer { tls: Tls::Offered, ..offer(&export) };
    let stream = [opt(option::STARTTLS, b""), info(option::GO, b"", &[])].concat();
    let (_, step, _) = run(3, &stream, &[], &offer);
    assert!(matches!(step, Step::Close(Ending::Refused(HandshakeError::BytesBeforeTls { .. }))), "{step:?}");
}

#[test]
fn clients_out_of_bounds_are_dropped() {
    let export = export();
    let check = |flags: u32, options: &[u8], expected: HandshakeError| {
        let (_, step, _) = run(flags, options, &[], &offer(&export));
        assert_eq!(step, Step::Close(Ending::Refused(expected)));
    };
    check(7, b"", HandshakeError::Flags { found: 7 });
    check(3, &[0; 16], HandshakeError::Magic { found: 0 });
    check(0, &opt(option::LIST, b""), HandshakeError::NotFixed { option: option::LIST });
    check(3, &opt(option::LIST, b"").repeat(129), HandshakeError::TooManyOptions);
    let mut huge = opt(99, b"");
    huge[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    check(3, &huge, HandshakeError::TooManyBytes);
}

#[test]
fn a_server_going_down_says_so() {
    let export = export();
    let offer = Offer { admission: Admission::ShuttingDown, ..offer(&export) };
    let options = [info(option::GO, b"", &[]), opt(option::LIST, b""), opt(option::ABORT, b"")].concat();
    let (out, step, _) = run(3, &options, &[], &offer);
    let codes: Vec<_> = answers(&out).0.iter().map(|&(_, code, _)| code).collect();
    assert_eq!(codes, [answer::ERR_SHUTDOWN, answer::ERR_SHUTDOWN, answer::ACK]);
    assert_eq!(step, Step::Close(Ending::Aborted));
}

fn any_option() -> impl Strategy<Value = Vec<u8>> {
    let name = prop_oneof![Just(b"".to_vec()), Just(b"vol".to_vec()), Just(b"nobody".to_vec())];
    let query = prop_oneof![Just(&b"base:"[..]), Just(CONTEXT_ALLOCATION), Just(&b"x"[..])];
    let queries = proptest::collection::vec(query, 0..3);
    prop_oneof![
        (0..14_u32, proptest::collection::vec(any::<u8>(), 0..40)).prop_map(|(o, payload)| opt(o, &payload)),
        (12..99_u32, 0..40_000_usize).prop_map(|(o, length)| opt(o, &vec![0x49; length])),
        (6..8_u32, name.clone(), proptest::collection::vec(0..5_u16, 0..4))
            .prop_map(|(o, name, wanted)| info(o, &name, &wanted)),
        (9..11_u32, name, queries).prop_map(|(o, name, queries)| contexts(o, &name, &queries)),
        Just(opt(option::STRUCTURED_REPLY, b"")),
    ]
}

proptest! {
    #[test]
    fn cuts_change_nothing(
        flags in prop_oneof![4 => Just(3_u32), 1 => 0..4_u32],
        options in proptest::collection::vec(any_option(), 0..8),
        cuts in proptest::collection::vec(1..3000_usize, 0..40),
    ) {
        let (export, stream) = (export(), options.concat());
        let whole = run(flags, &stream, &[], &offer(&export));
        prop_assert_eq!(run(flags, &stream, &cuts, &offer(&export)), whole);
    }

    #[test]
    fn soup_neither_panics_nor_piles_up(
        soup in proptest::collection::vec(any::<u8>(), 0..3000),
        magic in any::<bool>(),
        cuts in proptest::collection::vec(1..500_usize, 0..20),
    ) {
        let export = export();
        let head = if magic { OPTION_MAGIC.to_be_bytes().to_vec() } else { vec![] };
        let stream = [head, soup].concat();
        let whole = run(3, &stream, &[], &offer(&export));
        prop_assert_eq!(run(3, &stream, &cuts, &offer(&export)), whole);
    }
}
