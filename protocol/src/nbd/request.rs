//! Requests of the transmission phase: cut out of the byte stream, and checked.
//!
//! Invariants:
//! - A request is yielded once it is complete, and exactly the bytes that belong to it are consumed, whether it is
//!   acceptable or not.
//! - A write whose payload is over the limit is yielded without it: the payload is thrown away as it arrives, so at most
//!   one header and one payload within the limit wait in the buffer.
//! - [`validate`] is pure: the same request and terms give the same answer. What it lets through is inside the volume,
//!   not empty, and has known flags only.
//! - Only a wrong magic number ends the connection: nothing behind it can be told apart.
//!
//! Rounding trims to blocks is left to the volume.

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;

use super::consts::{Errno, PAYLOAD_BYTES_MAX, REQUEST_MAGIC, command, flag};

pub const REQUEST_HEADER_BYTES: usize = 28;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    #[error(
        "the guest sent {found:#010x} where a request starts with {REQUEST_MAGIC:#010x}: it has lost count of its own bytes"
    )]
    Magic { found: u32 },
}

/// A request's fixed part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub flags: u16,
    pub kind: u16,
    /// Chosen by the client; the reply carries it.
    pub cookie: u64,
    pub offset: u64,
    pub length: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub head: Head,
    /// Empty for everything but a write; `None` if it was over the limit and thrown away.
    pub payload: Option<Bytes>,
}

/// Cuts requests out of a stream.
#[derive(Debug)]
pub struct RequestParser {
    payload_bytes_max: u32,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Header,
    Payload { head: Head },
    Skip { head: Head, left: usize },
}

impl RequestParser {
    pub fn new(payload_bytes_max: u32) -> Self {
        Self { payload_bytes_max, state: State::Header }
    }

    /// The next request, or `None` if more bytes are needed. Payloads are split off `input` without a copy.
    pub fn next(&mut self, input: &mut BytesMut) -> Result<Option<Request>, RequestError> {
        if matches!(self.state, State::Header) {
            let Some(bytes) = input.first_chunk() else { return Ok(None) };
            let head = Head::decode(bytes)?;
            input.advance(REQUEST_HEADER_BYTES);
            if head.kind != command::WRITE {
                return Ok(Some(Request { head, payload: Some(Bytes::new()) }));
            }
            self.state = if head.length > self.payload_bytes_max {
                State::Skip { head, left: head.length as usize }
            } else {
                State::Payload { head }
            };
        }
        Ok(self.payload(input))
    }

    /// How many bytes `input` must hold before the request that has begun is complete; a header's if none has.
    pub fn wanted(&self) -> usize {
        match self.state {
            State::Header => REQUEST_HEADER_BYTES,
            State::Payload { head } => head.length as usize,
            // What arrives is thrown away, so any byte is progress.
            State::Skip { .. } => 1,
        }
    }

    /// True between requests, where a client may close.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Header)
    }

    fn payload(&mut self, input: &mut BytesMut) -> Option<Request> {
        let request = match &mut self.state {
            State::Header => return None,
            State::Payload { head } => {
                let length = head.length as usize;
                if input.len() < length {
                    return None;
                }
                Request { head: *head, payload: Some(input.split_to(length).freeze()) }
            }
            State::Skip { head, left } => {
                let skipped = input.len().min(*left);
                input.advance(skipped);
                *left -= skipped;
                if *left > 0 {
                    return None;
                }
                Request { head: *head, payload: None }
            }
        };
        self.state = State::Header;
        Some(request)
    }
}

impl Head {
    fn decode(bytes: &[u8; REQUEST_HEADER_BYTES]) -> Result<Self, RequestError> {
        let mut bytes = &bytes[..];
        let found = bytes.get_u32();
        if found != REQUEST_MAGIC {
            return Err(RequestError::Magic { found });
        }
        Ok(Self {
            flags: bytes.get_u16(),
            kind: bytes.get_u16(),
            cookie: bytes.get_u64(),
            offset: bytes.get_u64(),
            length: bytes.get_u32(),
        })
    }
}

/// What the handshake settled, and the size of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub size_bytes: u64,
    pub structured: bool,
    pub base_allocation: bool,
}

/// A request that has passed every check of the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// `single`: answer in one chunk.
    Read {
        offset: u64,
        length: u32,
        single: bool,
    },
    Write {
        offset: u64,
        data: Bytes,
        fua: bool,
    },
    /// `allocate`: the range must not become a hole.
    Zero {
        offset: u64,
        length: u32,
        allocate: bool,
        fua: bool,
    },
    Trim {
        offset: u64,
        length: u32,
        fua: bool,
    },
    Cache,
    Flush,
    /// `single`: answer with one extent.
    BlockStatus {
        offset: u64,
        length: u32,
        single: bool,
    },
    Disconnect,
}

/// Whether `request` may go on to the volume, and as what.
pub fn validate(request: Request, terms: Terms) -> Result<Command, Errno> {
    let Request { head, payload } = request;
    let Head { flags, kind, offset, length, .. } = head;
    let fua = flags & flag::FUA != 0;
    // A disconnect can't be refused: there is no reply to it.
    if kind == command::DISC {
        return Ok(Command::Disconnect);
    }
    if flags & !known_flags(kind, terms).ok_or(Errno::Invalid)? != 0 {
        return Err(Errno::Invalid);
    }
    // Offset and length of a flush are reserved and not looked at, as other servers do.
    if kind == command::FLUSH {
        return Ok(Command::Flush);
    }
    let writes = matches!(kind, command::WRITE | command::WRITE_ZEROES);
    check_range(offset, length, terms.size_bytes, if writes { Errno::NoSpace } else { Errno::Invalid })?;
    match kind {
        command::READ if length <= PAYLOAD_BYTES_MAX => {
            Ok(Command::Read { offset, length, single: flags & flag::DF != 0 })
        }
        command::WRITE => Ok(Command::Write { offset, data: payload.ok_or(Errno::Invalid)?, fua }),
        command::WRITE_ZEROES => {
            Ok(Command::Zero { offset, length, allocate: flags & flag::NO_HOLE != 0, fua })
        }
        command::TRIM => Ok(Command::Trim { offset, length, fua }),
        command::CACHE => Ok(Command::Cache),
        command::BLOCK_STATUS if terms.base_allocation => {
            Ok(Command::BlockStatus { offset, length, single: flags & flag::REQ_ONE != 0 })
        }
        _ => Err(Errno::Invalid),
    }
}

/// The flags that a command may carry; `None` for a command that doesn't exist. FUA is valid on every one.
fn known_flags(kind: u16, terms: Terms) -> Option<u16> {
    Some(match kind {
        // Only chunked replies can be asked not to be chunked.
        command::READ if terms.structured => flag::FUA | flag::DF,
        command::READ | command::WRITE | command::FLUSH | command::TRIM | command::CACHE => flag::FUA,
        command::WRITE_ZEROES => flag::FUA | flag::NO_HOLE,
        command::BLOCK_STATUS => flag::FUA | flag::REQ_ONE,
        _ => return None,
    })
}

fn check_range(offset: u64, length: u32, size_bytes: u64, outside: Errno) -> Result<(), Errno> {
    if length == 0 {
        return Err(Errno::Invalid);
    }
    match offset.checked_add(u64::from(length)) {
        Some(end) if end <= size_bytes => Ok(()),
        _ => Err(outside),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIZE: u64 = 1 << 20;
    const TERMS: Terms = Terms { size_bytes: SIZE, structured: true, base_allocation: true };

    fn encode(head: Head, payload: &[u8]) -> Vec<u8> {
        let mut out = REQUEST_MAGIC.to_be_bytes().to_vec();
        out.extend(head.flags.to_be_bytes());
        out.extend(head.kind.to_be_bytes());
        out.extend(head.cookie.to_be_bytes());
        out.extend(head.offset.to_be_bytes());
        out.extend(head.length.to_be_bytes());
        out.extend(payload);
        out
    }

    fn request(kind: u16, flags: u16, offset: u64, length: u32) -> Request {
        let payload = (kind == command::WRITE && length <= PAYLOAD_BYTES_MAX)
            .then(|| Bytes::from(vec![0; length as usize]))
            .or((kind != command::WRITE).then(Bytes::new));
        Request { head: Head { flags, kind, cookie: 7, offset, length }, payload }
    }

    #[test]
    fn ranges_are_checked_without_wrapping() {
        let check = |kind, offset, length, expected: Result<(), Errno>| {
            let found = validate(request(kind, 0, offset, length), TERMS).map(|_| ());
            assert_eq!(found, expected, "command {kind} at {offset}+{length}");
        };
        for kind in [
            command::READ,
            command::WRITE,
            command::TRIM,
            command::WRITE_ZEROES,
            command::CACHE,
            command::BLOCK_STATUS,
        ] {
            let outside = match kind {
                command::WRITE | command::WRITE_ZEROES => Errno::NoSpace,
                _ => Errno::Invalid,
            };
            check(kind, 0, 0, Err(Errno::Invalid));
            check(kind, 0, 1, Ok(()));
            check(kind, SIZE - 512, 512, Ok(()));
            check(kind, SIZE - 512, 513, Err(outside));
            check(kind, SIZE, 1, Err(outside));
            check(kind, u64::MAX, 1, Err(outside));
            check(kind, u64::MAX - 511, 512, Err(outside));
            check(kind, SIZE, 0, Err(Errno::Invalid));
        }
        check(command::FLUSH, u64::MAX, 9, Ok(()));
    }

    #[test]
    fn flags_are_checked_by_command() {
        let check = |kind, flags, terms, ok| {
            assert_eq!(validate(request(kind, flags, 0, 512), terms).is_ok(), ok, "{kind} {flags:#x}");
        };
        for kind in 0..8 {
            check(kind, flag::FUA, TERMS, true);
            // A disconnect is a disconnect.
            check(kind, 0x8000, TERMS, kind == command::DISC);
            check(kind, 1 << 4, TERMS, kind == command::DISC);
        }
        check(77, 0, TERMS, false);
        check(u16::MAX, 0, TERMS, false);
        check(command::READ, flag::DF, TERMS, true);
        check(command::READ, flag::DF, Terms { structured: false, ..TERMS }, false);
        check(command::WRITE, flag::DF, TERMS, false);
        check(command::WRITE_ZEROES, flag::NO_HOLE, TERMS, true);
        check(command::TRIM, flag::NO_HOLE, TERMS, false);
        check(command::BLOCK_STATUS, flag::REQ_ONE, TERMS, true);
        check(command::BLOCK_STATUS, 0, Terms { base_allocation: false, ..TERMS }, false);
    }

    #[test]
    fn what_passes_carries_what_was_asked() {
        let check = |request: Request, expected| assert_eq!(validate(request, TERMS), Ok(expected));
        check(request(command::READ, flag::DF, 3, 5), Command::Read { offset: 3, length: 5, single: true });
        check(
            request(command::WRITE, flag::FUA, 3, 2),
            Command::Write { offset: 3, data: Bytes::from_static(&[0, 0]), fua: true },
        );
        check(
            request(command::WRITE_ZEROES, flag::NO_HOLE, 1, 2),
            Command::Zero { offset: 1, length: 2, allocate: true, fua: false },
        );
        check(request(command::TRIM, flag::FUA, 1, 2), Command::Trim { offset: 1, length: 2, fua: true });
        check(
            request(command::BLOCK_STATUS, flag::REQ_ONE, 1, 2),
            Command::BlockStatus { offset: 1, length: 2, single: true },
        );
    }

    #[test]
    fn a_large_volume_takes_ranges_of_4_gib_but_payloads_of_32_mib() {
        let terms = Terms { size_bytes: u64::MAX, ..TERMS };
        let check = |kind, length, ok| {
            assert_eq!(validate(request(kind, 0, 1 << 40, length), terms).is_ok(), ok, "{kind} {length}");
        };
        for kind in [command::TRIM, command::WRITE_ZEROES, command::BLOCK_STATUS, command::CACHE] {
            check(kind, u32::MAX, true);
        }
        for kind in [command::READ, command::WRITE] {
            check(kind, PAYLOAD_BYTES_MAX, true);
            check(kind, PAYLOAD_BYTES_MAX + 1, false);
        }
    }

    const LIMIT: u32 = 100;

    /// Feeds `stream` in pieces of the given lengths; what comes out, and the longest the buffer has been after a feed.
    fn feed(stream: &[u8], cuts: &[usize]) -> (Vec<Request>, Option<RequestError>, usize) {
        let mut parser = RequestParser::new(LIMIT);
        let (mut input, mut rest, mut found, mut longest) = (BytesMut::new(), stream, Vec::new(), 0);
        let mut cuts = cuts.iter().copied().chain(std::iter::repeat(usize::MAX));
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at(cuts.next().unwrap().clamp(1, rest.len()));
            rest = behind;
            input.extend_from_slice(piece);
            loop {
                match parser.next(&mut input) {
                    Ok(Some(request)) => found.push(request),
                    Ok(None) => break,
                    Err(error) => return (found, Some(error), longest),
                }
            }
            assert!(input.len() < parser.wanted());
            longest = longest.max(input.len());
        }
        (found, None, longest)
    }

    fn any_request() -> impl Strategy<Value = (Head, Vec<u8>)> {
        let kind = prop_oneof![3 => Just(command::WRITE), 2 => 0..9_u16, 1 => any::<u16>()];
        (any::<u16>(), kind, any::<u64>(), any::<u64>(), 0..LIMIT * 3).prop_map(
            |(flags, kind, cookie, offset, length)| {
                let payload = if kind == command::WRITE {
                    vec![cookie.to_be_bytes()[7]; length as usize]
                } else {
                    vec![]
                };
                (Head { flags, kind, cookie, offset, length }, payload)
            },
        )
    }

    proptest! {
        #[test]
        fn requests_come_out_as_they_went_in_wherever_the_stream_is_cut(
            requests in proptest::collection::vec(any_request(), 0..12),
            cuts in proptest::collection::vec(1..200_usize, 0..64),
        ) {
            let stream: Vec<u8> = requests.iter().flat_map(|(head, payload)| encode(*head, payload)).collect();
            let (found, error, longest) = feed(&stream, &cuts);
            prop_assert_eq!(error, None);
            prop_assert!(longest < LIMIT as usize + REQUEST_HEADER_BYTES);
            prop_assert_eq!(found.len(), requests.len());
            for (found, (head, payload)) in found.iter().zip(&requests) {
                prop_assert_eq!(found.head, *head);
                let kept = payload.len() <= LIMIT as usize;
                prop_assert_eq!(found.payload.as_deref(), kept.then_some(&payload[..]));
            }
        }

        #[test]
        fn soup_neither_panics_nor_piles_up(
            soup in proptest::collection::vec(any::<u8>(), 0..2000),
            magic in any::<bool>(),
            cuts in proptest::collection::vec(1..200_usize, 0..64),
            size_bytes in any::<u64>(),
        ) {
            let mut stream = if magic { REQUEST_MAGIC.to_be_bytes().to_vec() } else { vec![] };
            stream.extend(soup);
            let (found, error, longest) = feed(&stream, &cuts);
            prop_assert!(longest < LIMIT as usize + REQUEST_HEADER_BYTES);
            prop_assert_eq!((&found, error), { let (f, e, _) = feed(&stream, &[]); (&f.clone(), e) });
            for request in found {
                let (offset, length) = (request.head.offset, request.head.length);
                let command = validate(request, Terms { size_bytes, ..TERMS });
                if let Ok(Command::Read { .. } | Command::Write { .. } | Command::Zero { .. }) = command {
                    prop_assert!(length > 0 && u128::from(offset) + u128::from(length) <= u128::from(size_bytes));
                }
            }
        }
    }
}
