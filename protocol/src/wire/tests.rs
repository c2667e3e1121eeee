//! The wire as bytes: what each message looks like, that it comes back whole, and that damage is noticed.

use bytes::{BufMut, Bytes, BytesMut};
use proptest::collection::vec;
use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::lag::{Activity, Delays, Health, Stall};
use crate::types::{
    BLOCK_BYTES, BlockKind, BlockRange, BlockState, EXTENT_BLOCKS, ExtentId, Generation, JobId,
    MAX_JOB_BYTES, Version,
};

fn bytes_of<M: Message>(message: &M, payload: Bytes) -> BytesMut {
    let frame = encode(message, payload).unwrap();
    let mut all = BytesMut::from(&frame.head[..]);
    all.put(frame.payload);
    all
}

/// `hex` is the body, in pieces for the eye.
fn check<M: Message + PartialEq + std::fmt::Debug>(message: &M, hex: &str) {
    let frame = encode(message, Bytes::new()).unwrap();
    let (head, body) = frame.head.split_at(HEADER_BYTES);
    let found: String = body.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(found, hex.replace([' ', '\n'], ""), "{message:?}");
    assert_eq!(head[..2], *b"NW");
    assert_eq!(head[2..4], M::KIND.to_le_bytes());
    assert_eq!(head[4..8], u32::try_from(body.len()).unwrap().to_le_bytes());
    assert_eq!(head[8..12], [0; 4]);
    assert_eq!(head[12..16], crate::crc::crc(body).to_le_bytes());
    assert_eq!(head[16..20], crate::crc::crc(&head[..16]).to_le_bytes());
    let mut received = BytesMut::from(&frame.head[..]);
    let (back, payload) = Decoder::default().decode::<M>(&mut received).unwrap().unwrap();
    assert_eq!(&back, message);
    assert!(payload.is_empty() && received.is_empty());
}

const REGION: Uuid = Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
const VOLUME: Uuid = Uuid::from_u128(0x1112_1314_1516_1718_191a_1b1c_1d1e_1f20);

fn state() -> BlockState {
    BlockState { version: Version::new(Generation(3), 0x55), crc: 0xdead_beef, kind: BlockKind::Unverified }
}

#[test]
fn a_whole_frame() {
    let frame = encode(&Request::Ping { nonce: 0x0807_0605_0403_0201 }, Bytes::from_static(b"xyz")).unwrap();
    let found: String = frame.head.iter().map(|byte| format!("{byte:02x}")).collect();
    let header = "4e57 0100 0c000000 03000000 a69c7715 c19f7f4c".replace(' ', "");
    assert_eq!(found, header + "05000000" + "0102030405060708");
    assert_eq!((frame.len(), &frame.payload[..]), (35, &b"xyz"[..]));
}

#[test]
fn golden_requests() {
    let hello = Hello {
        min_version: 1,
        max_version: 2,
        volume: VOLUME,
        upstairs: REGION,
        session: 7,
        takeover: true,
    };
    let uuid = |uuid: Uuid| format!("1000000000000000 {}", uuid.simple());
    let (region, volume) = (uuid(REGION), uuid(VOLUME));
    check(&Request::Hello(hello), &format!("00000000 0100 0200 {volume} {region} 0700000000000000 01"));
    check(&Request::Promote { generation: Generation(9) }, "01000000 09000000");
    let membership = Membership { epoch: 4, regions: [REGION, VOLUME, Uuid::nil()], alone: true };
    let nil = uuid(Uuid::nil());
    check(
        &Request::Activated { generation: Generation(9), membership },
        &format!("02000000 09000000 04000000 {region} {volume} {nil} 01"),
    );
    let job = |op| Request::Job { job: JobId(0x11), op };
    let range = BlockRange::new(0x22, 2);
    let (kind, place) = ("03000000 1100000000000000", "2200000000000000 02000000");
    check(&job(Op::Read { range, mode: ReadMode::Data }), &format!("{kind} 00000000 {place} 00000000"));
    check(&job(Op::Read { range, mode: ReadMode::Contexts }), &format!("{kind} 00000000 {place} 01000000"));
    check(&job(Op::Read { range, mode: ReadMode::Raw }), &format!("{kind} 00000000 {place} 02000000"));
    check(&job(Op::Read { range, mode: ReadMode::Verify }), &format!("{kind} 00000000 {place} 03000000"));
    check(
        &job(Op::Write { range, crcs: vec![0xaabb_ccdd, 1] }),
        &format!("{kind} 01000000 {place} 0200000000000000 ddccbbaa 01000000"),
    );
    check(&job(Op::Zero { range, mode: ZeroMode::Contexts }), &format!("{kind} 02000000 {place} 00000000"));
    check(&job(Op::Zero { range, mode: ZeroMode::Allocate }), &format!("{kind} 02000000 {place} 01000000"));
    check(&job(Op::Zero { range, mode: ZeroMode::Punch }), &format!("{kind} 02000000 {place} 02000000"));
    check(&job(Op::Flush), &format!("{kind} 03000000"));
    let blocks = vec![StoredBlock { block: 5, state: BlockState { kind: BlockKind::Data, ..state() } }];
    check(
        &job(Op::Store { blocks, join: Version::new(Generation(6), 8) }),
        &format!(
            "{kind} 04000000 0100000000000000 0500000000000000 03000000 5500000000000000 efbeadde 00
             06000000 0800000000000000"
        ),
    );
    check(&Request::Cancel { job: JobId(0x11) }, "04000000 1100000000000000");
    check(&Request::Ping { nonce: 0x33 }, "05000000 3300000000000000");
    check(
        &Request::Digests { query: 0x44, first: ExtentId(2), count: 3 },
        "06000000 4400000000000000 02000000 03000000",
    );
    check(&Request::Contexts { query: 0x44, extent: ExtentId(2) }, "07000000 4400000000000000 02000000");
}

#[test]
fn golden_replies() {
    let welcome = Welcome {
        version: 1,
        region: REGION,
        volume: VOLUME,
        blocks: 0x1_0000,
        promised: Generation(5),
        last_active: Generation(4),
        membership: Membership { epoch: 4, regions: [REGION, VOLUME, Uuid::nil()], alone: true },
        lost_power: true,
    };
    let uuid = |uuid: Uuid| format!("1000000000000000 {}", uuid.simple());
    let (region, volume, nil) = (uuid(REGION), uuid(VOLUME), uuid(Uuid::nil()));
    check(
        &Reply::Welcome(welcome),
        &format!(
            "00000000 0100 {region} {volume} 0000010000000000 05000000 04000000
             04000000 {region} {volume} {nil} 01 01"
        ),
    );
    check(
        &Reply::Promoted { generation: Generation(5), last_active: Generation(4), digest: 0x99 },
        "02000000 05000000 04000000 9900000000000000",
    );
    check(&Reply::ActivatedStored { generation: Generation(5) }, "03000000 05000000");
    let times = StageTimes { queued_us: 1, submit_us: 2, device_us: 3 };
    let done = |result, states| Reply::Done { job: JobId(0x11), result, times, states };
    let (kind, stages) = ("04000000 1100000000000000", "01000000 02000000 03000000");
    check(&done(Ok(()), vec![]), &format!("{kind} 00000000 {stages} 0000000000000000"));
    check(
        &done(Ok(()), vec![state()]),
        &format!("{kind} 00000000 {stages} 0100000000000000 03000000 5500000000000000 efbeadde 02"),
    );
    let failed = |error, hex: &str| {
        check(&done(Err(error), vec![]), &format!("{kind} 01000000 {hex} {stages} 0000000000000000"));
    };
    failed(JobError::Disk { message: "EIO".to_owned() }, "00000000 0300000000000000 45494f");
    failed(JobError::NoSpace, "01000000");
    failed(JobError::Checksum { block: 6 }, "02000000 0600000000000000");
    let range = BlockRange::new(0x22, 2);
    failed(JobError::OutOfRange { range, blocks: 7 }, "03000000 2200000000000000 02000000 0700000000000000");
    failed(JobError::Cancelled, "04000000");
    let lag = Delays { count: 5, p50_us: 1, p99_us: 2, p999_us: 3, max_us: 4 };
    let longest_stall = Stall { took_us: 4, ago_ms: 6, during: Activity::Disk };
    let health = Health { lag, longest_stall, submits: Delays::default(), longest_submit: Stall::default() };
    let (delays, none) = ("0500000000000000 01000000 02000000 03000000 04000000", "00".repeat(24 + 16));
    check(
        &Reply::Pong { nonce: 0x33, health },
        &format!("05000000 3300000000000000 {delays} 04000000 0600000000000000 04000000 {none}"),
    );
    check(
        &Reply::Digests { query: 0x44, first: ExtentId(2), digests: vec![0x77] },
        "06000000 4400000000000000 02000000 0100000000000000 7700000000000000",
    );
    check(
        &Reply::Contexts { query: 0x44, extent: ExtentId(2), states: vec![state()] },
        "07000000 4400000000000000 02000000 0100000000000000 03000000 5500000000000000 efbeadde 02",
    );
    check(&Reply::Leaving { reason: "x".to_owned() }, "08000000 0100000000000000 78");
    check(&Reply::Faults { faults: "x".to_owned() }, "09000000 0100000000000000 78");
}

#[test]
fn golden_refusals() {
    let refused = |refusal, hex: &str| check(&Reply::Refused(refusal), &format!("01000000 {hex}"));
    let region = format!("1000000000000000 {}", REGION.simple());
    let volume = format!("1000000000000000 {}", VOLUME.simple());
    refused(Refusal::Version { theirs: 9, min: 1, max: 2 }, "00000000 0900 0100 0200");
    refused(Refusal::OtherVolume { region: REGION, volume: VOLUME }, &format!("01000000 {region} {volume}"));
    refused(
        Refusal::StaleGeneration { offered: Generation(1), promised: Generation(2) },
        "02000000 01000000 02000000",
    );
    refused(Refusal::InUse { by: REGION, generation: Generation(2) }, &format!("03000000 {region} 02000000"));
    refused(
        Refusal::Fenced { by: REGION, generation: Generation(2) },
        &format!("04000000 {region} 02000000"),
    );
    refused(Refusal::Failed { reason: "x".to_owned() }, "05000000 0100000000000000 78");
    refused(Refusal::TooManyConnections { limit: 64 }, "06000000 40000000");
    refused(Refusal::Violation { what: "x".to_owned() }, "07000000 0100000000000000 78");
    refused(Refusal::ShuttingDown, "08000000");
}

#[test]
fn the_largest_messages_fit() {
    let states = vec![state(); EXTENT_BLOCKS as usize];
    let digests = vec![u64::MAX; Request::MAX_DIGESTS as usize];
    let stored = StoredBlock { block: u64::MAX, state: BlockState { kind: BlockKind::Data, ..state() } };
    let blocks = vec![stored; EXTENT_BLOCKS as usize];
    let full = Bytes::from(vec![0; MAX_JOB_BYTES]);
    let store = Request::Job { job: JobId(1), op: Op::Store { blocks, join: Version::MAX } };
    let mut frames = vec![bytes_of(&store, full.clone()).len()];
    let range = BlockRange::new(0, EXTENT_BLOCKS);
    let write = Op::Write { range, crcs: vec![1; EXTENT_BLOCKS as usize] };
    frames.push(bytes_of(&Request::Job { job: JobId(1), op: write }, full.clone()).len());
    let times = StageTimes::default();
    let read = Reply::Done { job: JobId(1), result: Ok(()), times, states: states.clone() };
    frames.push(bytes_of(&read, full).len());
    let contexts = Reply::Contexts { query: 1, extent: ExtentId(1), states };
    frames.push(bytes_of(&contexts, Bytes::new()).len());
    frames.push(bytes_of(&Reply::Digests { query: 1, first: ExtentId(0), digests }, Bytes::new()).len());
    assert!(frames.iter().all(|&length| length <= MAX_FRAME_BYTES), "{frames:?}");
}

#[test]
fn what_is_too_long_is_neither_sent_nor_received() {
    let digests = vec![0; MAX_BODY_BYTES / 8];
    let reply = Reply::Digests { query: 1, first: ExtentId(0), digests };
    assert!(encode(&reply, Bytes::new()).is_err());
    let payload = Bytes::from(vec![0; MAX_PAYLOAD_BYTES + 1]);
    let error = encode(&Request::Ping { nonce: 1 }, payload).unwrap_err();
    assert!(matches!(error, FrameError::PayloadTooLong { .. }));
    let body = u32::try_from(MAX_BODY_BYTES + 1).unwrap();
    let payload = u32::try_from(MAX_PAYLOAD_BYTES + 1).unwrap();
    assert!(matches!(refused(&header(*b"NW", 1, body, 0)), FrameError::BodyTooLong { .. }));
    assert!(matches!(refused(&header(*b"NW", 1, 0, payload)), FrameError::PayloadTooLong { .. }));
    assert!(matches!(refused(&header(*b"NW", 1, u32::MAX, u32::MAX)), FrameError::BodyTooLong { .. }));
}

#[test]
fn what_is_something_else_is_named() {
    assert!(matches!(refused(&header(*b"WN", 1, 4, 0)), FrameError::Magic { found: 0x4e57 }));
    assert!(matches!(refused(&header(*b"NW", 2, 4, 0)), FrameError::Kind { expected: 1, found: 2 }));
    let body_of = |body: &[u8]| {
        let mut bytes = header(*b"NW", 1, u32::try_from(body.len()).unwrap(), 0);
        bytes[12..16].copy_from_slice(&crate::crc::crc(body).to_le_bytes());
        let crc = crate::crc::crc(&bytes[..16]).to_le_bytes();
        bytes[16..20].copy_from_slice(&crc);
        bytes.extend_from_slice(body);
        bytes
    };
    let ping = [5, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    assert!(Decoder::default().decode::<Request>(&mut body_of(&ping)).is_ok());
    let mut cases = vec![ping[..11].to_vec(), [&ping[..], &[0]].concat(), vec![99, 0, 0, 0], vec![]];
    // A vector that claims more than the body holds allocates nothing for it.
    cases.push([&[6_u8, 0, 0, 0][..], &[0xff; 8]].concat());
    for case in cases {
        assert!(matches!(refused(&body_of(&case)), FrameError::Body(_)), "{case:?}");
    }
}

fn header(magic: [u8; 2], kind: u16, body: u32, payload: u32) -> BytesMut {
    let mut bytes = BytesMut::from(&magic[..]);
    bytes.put_u16_le(kind);
    bytes.put_u32_le(body);
    bytes.put_u32_le(payload);
    bytes.put_u32_le(0);
    let crc = crate::crc::crc(&bytes);
    bytes.put_u32_le(crc);
    bytes
}

fn refused(bytes: &BytesMut) -> FrameError {
    Decoder::default().decode::<Request>(&mut bytes.clone()).unwrap_err()
}

fn range() -> impl Strategy<Value = BlockRange> {
    (any::<u64>(), any::<u32>()).prop_map(|(start, count)| BlockRange { start, count })
}

fn version() -> impl Strategy<Value = Version> {
    (any::<u32>(), any::<u64>())
        .prop_map(|(generation, sequence)| Version::new(Generation(generation), sequence))
}

fn block_state() -> impl Strategy<Value = BlockState> {
    (version(), any::<u32>(), 0..4_u8).prop_map(|(version, crc, kind)| BlockState {
        version,
        crc,
        kind: BlockKind::try_from(kind).unwrap(),
    })
}

fn op() -> impl Strategy<Value = Op> {
    const MODES: [ReadMode; 4] = [ReadMode::Data, ReadMode::Contexts, ReadMode::Raw, ReadMode::Verify];
    const ZEROS: [ZeroMode; 3] = [ZeroMode::Contexts, ZeroMode::Allocate, ZeroMode::Punch];
    let stored = (any::<u64>(), block_state()).prop_map(|(block, state)| StoredBlock { block, state });
    prop_oneof![
        (range(), prop::sample::select(&MODES[..])).prop_map(|(range, mode)| Op::Read { range, mode }),
        (range(), vec(any::<u32>(), 0..1024)).prop_map(|(range, crcs)| Op::Write { range, crcs }),
        (range(), prop::sample::select(&ZEROS[..])).prop_map(|(range, mode)| Op::Zero { range, mode }),
        Just(Op::Flush),
        (vec(stored, 0..1024), version()).prop_map(|(blocks, join)| Op::Store { blocks, join }),
    ]
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        8 => (any::<u64>(), op()).prop_map(|(job, op)| Request::Job { job: JobId(job), op }),
        1 => any::<u64>().prop_map(|job| Request::Cancel { job: JobId(job) }),
        1 => any::<u64>().prop_map(|nonce| Request::Ping { nonce }),
        1 => any::<(u64, u32, u32)>().prop_map(|(query, first, count)| {
            Request::Digests { query, first: ExtentId(first), count }
        }),
        1 => any::<(u16, u16, u128, u64, bool)>().prop_map(|(min_version, max_version, id, session, takeover)| {
            let (volume, upstairs) = (Uuid::from_u128(id), Uuid::from_u128(!id));
            Request::Hello(Hello { min_version, max_version, volume, upstairs, session, takeover })
        }),
    ]
}

fn reply() -> impl Strategy<Value = Reply> {
    let times = any::<(u32, u32, u32)>().prop_map(|(queued_us, submit_us, device_us)| StageTimes {
        queued_us,
        submit_us,
        device_us,
    });
    let error = prop_oneof![
        Just(Ok(())),
        ".{0,40}".prop_map(|message| Err(JobError::Disk { message })),
        any::<u64>().prop_map(|block| Err(JobError::Checksum { block })),
        (range(), any::<u64>()).prop_map(|(range, blocks)| Err(JobError::OutOfRange { range, blocks })),
    ];
    prop_oneof![
        (any::<u64>(), error, times, vec(block_state(), 0..1024)).prop_map(|(job, result, times, states)| {
            Reply::Done { job: JobId(job), result, times, states }
        }),
        (any::<u64>(), any::<u32>(), vec(any::<u64>(), 0..4096)).prop_map(|(query, first, digests)| {
            Reply::Digests { query, first: ExtentId(first), digests }
        }),
        ".{0,200}".prop_map(|reason| Reply::Leaving { reason }),
        ".{0,200}".prop_map(|faults| Reply::Faults { faults }),
        ".{0,200}".prop_map(|what| Reply::Refused(Refusal::Violation { what })),
    ]
}

/// Sends `messages` in pieces of `piece` bytes.
fn check_stream<M: Message + PartialEq + std::fmt::Debug>(messages: &[(M, Bytes)], piece: usize) {
    let stream: Vec<u8> =
        messages.iter().flat_map(|(message, payload)| bytes_of(message, payload.clone())).collect();
    let (mut decoder, mut received, mut got) = (Decoder::default(), BytesMut::new(), 0);
    for piece in stream.chunks(piece) {
        received.extend_from_slice(piece);
        while let Some((message, payload)) = decoder.decode::<M>(&mut received).unwrap() {
            assert_eq!((&message, &payload), (&messages[got].0, &messages[got].1));
            got += 1;
        }
        assert!(received.len() < decoder.wanted() && decoder.wanted() <= MAX_FRAME_BYTES);
    }
    assert_eq!((got, received.len()), (messages.len(), 0));
}

fn payload() -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..3 * BLOCK_BYTES).prop_map(Bytes::from)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn requests_come_back(messages in vec((request(), payload()), 1..4), piece in 1..5000_usize) {
        check_stream(&messages, piece);
    }

    #[test]
    fn replies_come_back(messages in vec((reply(), payload()), 1..4), piece in 1..5000_usize) {
        check_stream(&messages, piece);
    }

    #[test]
    fn damage_to_header_or_body_is_noticed(
        message in request(),
        payload in payload(),
        place in any::<prop::sample::Index>(),
        flip in 1..=255_u8,
    ) {
        let mut bytes = bytes_of(&message, payload.clone());
        let guarded = bytes.len() - payload.len();
        bytes[place.index(guarded)] ^= flip;
        prop_assert!(Decoder::default().decode::<Request>(&mut bytes).is_err());
    }

    #[test]
    fn noise_never_panics(mut noise in vec(any::<u8>(), 0..400), valid_header in any::<bool>()) {
        if valid_header && noise.len() >= HEADER_BYTES {
            // Checksums that fit, so that the noise gets as far as the body.
            let body = noise.len() - HEADER_BYTES;
            noise[HEADER_BYTES..].iter_mut().take(4).skip(1).for_each(|byte| *byte = 0);
            let mut head = header(*b"NW", 1, u32::try_from(body).unwrap(), 0);
            head[12..16].copy_from_slice(&crate::crc::crc(&noise[HEADER_BYTES..]).to_le_bytes());
            let header_crc = crate::crc::crc(&head[..16]).to_le_bytes();
            head[16..20].copy_from_slice(&header_crc);
            noise[..HEADER_BYTES].copy_from_slice(&head);
        }
        let mut bytes = BytesMut::from(&noise[..]);
        let mut decoder = Decoder::default();
        while let Ok(Some(_)) = decoder.decode::<Request>(&mut bytes) {}
    }
}
