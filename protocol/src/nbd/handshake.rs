//! The server's side of the fixed newstyle handshake.
//!
//! Invariants:
//! - Each option is answered by itself, after its whole payload is consumed; a payload too long to look at is thrown away
//!   as it arrives.
//! - A client gets [`OPTIONS_MAX`] options and [`HANDSHAKE_BYTES_MAX`] bytes, so it can't keep a server busy shaking
//!   hands, and what it is answered is bounded too.
//! - All that was negotiated lives in one value, [`Agreed`]. Going over to TLS replaces it by the default: a promise made
//!   in the clear may have been made by somebody in between.
//! - Bytes behind STARTTLS end the connection, for the same reason.
//!
//! Time limits and the number of connections are left to the front end, which tells [`Admission`] with every step.

use bytes::{Buf, BufMut, BytesMut};
use thiserror::Error;

use super::consts::{
    BLOCK_BYTES_MIN, BLOCK_BYTES_PREFERRED, CONTEXT_ALLOCATION, CONTEXT_ALLOCATION_ID, GREETING_MAGIC,
    OPTION_MAGIC, OPTION_REPLY_MAGIC, PAYLOAD_BYTES_MAX, answer, greeting, info, option, transmission,
};
use super::options::{NAME_BYTES_MAX, OPTION_PAYLOAD_BYTES_MAX, Unfit, context_request, info_request};

/// No client needs more than a dozen.
pub const OPTIONS_MAX: u32 = 128;
/// All options together. Room for the odd client that sends a huge unknown option, within the handshake's time limit.
pub const HANDSHAKE_BYTES_MAX: u64 = 64 << 20;

const OPTION_HEADER_BYTES: usize = 16;
/// Padding of the oldest way to end a handshake.
const EXPORT_NAME_ZEROES: usize = 124;

/// What is exported, and under which name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    pub name: String,
    /// For people; shown by `nbdinfo`.
    pub description: String,
    /// The empty name means this export too.
    pub is_default: bool,
}

/// Whether a client that has come so far may go on to transmission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Open,
    /// As many connections as allowed are in transmission.
    Full,
    ShuttingDown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    Off,
    Offered,
    /// Nothing but STARTTLS and ABORT is answered in the clear.
    Required,
}

/// What the server has to offer at this moment.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    pub export: &'a Export,
    pub size_bytes: u64,
    pub admission: Admission,
    pub tls: Tls,
}

/// What was settled for the transmission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    pub structured: bool,
    pub base_allocation: bool,
}

/// What to do once the bytes in `out` are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Feed more bytes.
    More,
    /// What is left of the input belongs to the transmission.
    Go(Agreed),
    /// Speak TLS from here on, then feed what comes out of it.
    StartTls,
    Close(Ending),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The client said goodbye.
    Aborted,
    Refused(HandshakeError),
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HandshakeError {
    #[error("the client's handshake flags {found:#x} have bits that this server doesn't know")]
    Flags { found: u32 },
    #[error("the client sent {found:#018x} where an option starts with {OPTION_MAGIC:#018x}")]
    Magic { found: u64 },
    #[error("option {option} from a client that doesn't speak fixed newstyle")]
    NotFixed { option: u32 },
    #[error("more than {OPTIONS_MAX} options in one handshake")]
    TooManyOptions,
    #[error("more than {HANDSHAKE_BYTES_MAX} bytes in one handshake")]
    TooManyBytes,
    #[error("there is no export named {name:?}; the one export is {known:?}")]
    UnknownExport { name: String, known: String },
    #[error("an export name of {length} bytes, over the limit of {NAME_BYTES_MAX}")]
    NameTooLong { length: usize },
    #[error("too many connections; raise the limit or close some")]
    Full,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the client asked for an export in the clear, but TLS is required")]
    TlsRequired,
    #[error("{length} bytes in the clear behind STARTTLS: someone in between may have put them there")]
    BytesBeforeTls { length: usize },
}

/// One handshake. Ends with the first step that isn't [`Step::More`] (or, with TLS, goes on behind `StartTls`).
#[derive(Debug)]
pub struct Handshake {
    state: State,
    agreed: Agreed,
    tls_on: bool,
    fixed: bool,
    no_zeroes: bool,
    options_seen: u32,
    bytes_seen: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Flags,
    Header,
    Body { option: u32, length: usize },
    Skip { option: u32, left: usize, code: u32 },
}

/// How one option ends.
enum Verdict {
    Answered,
    Error(u32, &'static str),
    End(Step),
}

impl Handshake {
    /// Starts with the greeting.
    pub fn new(out: &mut BytesMut) -> Self {
        out.put_u64(GREETING_MAGIC);
        out.put_u64(OPTION_MAGIC);
        out.put_u16(greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES);
        Self {
            state: State::Flags,
            agreed: Agreed::default(),
            tls_on: false,
            fixed: false,
            no_zeroes: false,
            options_seen: 0,
            bytes_seen: 0,
        }
    }

    /// Takes from `input` what it can and appends answers to `out`, which are to be sent before the step is taken.
    pub fn advance(&mut self, input: &mut BytesMut, out: &mut BytesMut, offer: &Offer<'_>) -> Step {
        loop {
            let step = match self.state {
                State::Flags if input.len() < 4 => return Step::More,
                State::Flags => self.flags(input.get_u32()),
                State::Header if input.len() < OPTION_HEADER_BYTES => return Step::More,
                State::Header => self.header(input, offer),
                State::Body { length, .. } if input.len() < length => return Step::More,
                State::Body { option, length } => {
                    let payload = input.split_to(length);
                    self.state = State::Header;
                    self.option(option, &payload, out, offer)
                }
                State::Skip { option, left, code } => {
                    let skipped = left.min(input.len());
                    input.advance(skipped);
                    let left = left - skipped;
                    self.state = State::Skip { option, left, code };
                    if left > 0 {
                        return Step::More;
                    }
                    self.state = State::Header;
                    put_answer(out, option, code, skip_text(code).as_bytes());
                    None
                }
            };
            match step {
                None => {}
                Some(Step::StartTls) if !input.is_empty() => {
                    let error = HandshakeError::BytesBeforeTls { length: input.len() };
                    return Step::Close(Ending::Refused(error));
                }
                Some(step) => return step,
            }
        }
    }

    fn flags(&mut self, found: u32) -> Option<Step> {
        let known = u32::from(greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES);
        if found & !known != 0 {
            return refuse(HandshakeError::Flags { found });
        }
        self.fixed = found & u32::from(greeting::FIXED_NEWSTYLE) != 0;
        self.no_zeroes = found & u32::from(greeting::NO_ZEROES) != 0;
        self.state = State::Header;
        None
    }

    fn header(&mut self, input: &mut BytesMut, offer: &Offer<'_>) -> Option<Step> {
        let found = input.get_u64();
        if found != OPTION_MAGIC {
            return refuse(HandshakeError::Magic { found });
        }
        let option = input.get_u32();
        let length = input.get_u32() as usize;
        self.options_seen += 1;
        self.bytes_seen += (OPTION_HEADER_BYTES + length) as u64;
        if self.options_seen > OPTIONS_MAX {
            return refuse(HandshakeError::TooManyOptions);
        }
        if self.bytes_seen > HANDSHAKE_BYTES_MAX {
            return refuse(HandshakeError::TooManyBytes);
        }
        if option == option::EXPORT_NAME {
            // There is no way to say no but to close, so there is no need to consume the name first.
            if length > NAME_BYTES_MAX {
                return refuse(HandshakeError::NameTooLong { length });
            }
        } else if !self.fixed {
            return refuse(HandshakeError::NotFixed { option });
        }
        self.state = match self.skip_code(option, length, offer) {
            Some(code) => State::Skip { option, left: length, code },
            None => State::Body { option, length },
        };
        None
    }

    /// The answer to an option that is refused without a look at its payload.
    fn skip_code(&self, option: u32, length: usize, offer: &Offer<'_>) -> Option<u32> {
        let known = (option::EXPORT_NAME..=option::LIST).contains(&option)
            || (option::STARTTLS..=option::SET_META_CONTEXT).contains(&option);
        let ends = matches!(option, option::EXPORT_NAME | option::ABORT);
        if known && !ends && offer.admission == Admission::ShuttingDown {
            Some(answer::ERR_SHUTDOWN)
        } else if !ends && option != option::STARTTLS && self.needs_tls(offer) {
            Some(answer::ERR_TLS_REQD)
        } else if !known {
            Some(answer::ERR_UNSUP)
        } else if length > OPTION_PAYLOAD_BYTES_MAX {
            Some(answer::ERR_TOO_BIG)
        } else {
            None
        }
    }

    fn needs_tls(&self, offer: &Offer<'_>) -> bool {
        offer.tls == Tls::Required && !self.tls_on
    }

    fn option(&mut self, option: u32, payload: &[u8], out: &mut BytesMut, offer: &Offer<'_>) -> Option<Step> {
        let verdict = match option {
            option::EXPORT_NAME => self.export_name(payload, out, offer),
            option::ABORT => {
                put_answer(out, option, answer::ACK, &[]);
                Verdict::End(Step::Close(Ending::Aborted))
            }
            option::LIST => list(payload, out, offer.export),
            option::STARTTLS => self.starttls(payload, out, offer),
            option::INFO | option::GO => self.info(option, payload, out, offer),
            option::STRUCTURED_REPLY => self.structured_reply(payload, out),
            option::LIST_META_CONTEXT => self.list_contexts(payload, out, offer.export),
            option::SET_META_CONTEXT => self.set_contexts(payload, out, offer.export),
            _ => Verdict::Error(answer::ERR_UNSUP, skip_text(answer::ERR_UNSUP)),
        };
        match verdict {
            Verdict::Answered => None,
            Verdict::Error(code, text) => {
                put_answer(out, option, code, text.as_bytes());
                None
            }
            Verdict::End(step) => Some(step),
        }
    }

    /// The oldest way into transmission. Its only error is to close.
    fn export_name(&self, name: &[u8], out: &mut BytesMut, offer: &Offer<'_>) -> Verdict {
        let error = match offer.admission {
            _ if self.needs_tls(offer) => HandshakeError::TlsRequired,
            Admission::ShuttingDown => HandshakeError::ShuttingDown,
            Admission::Full => HandshakeError::Full,
            Admission::Open if !offer.export.answers_to(name) => HandshakeError::UnknownExport {
                name: String::from_utf8_lossy(name).into_owned(),
                known: offer.export.name.clone(),
            },
            Admission::Open => {
                out.put_u64(offer.size_bytes);
                out.put_u16(self.transmission_flags());
                if !self.no_zeroes {
                    out.put_bytes(0, EXPORT_NAME_ZEROES);
                }
                return Verdict::End(Step::Go(self.agreed));
            }
        };
        Verdict::End(Step::Close(Ending::Refused(error)))
    }

    fn starttls(&mut self, payload: &[u8], out: &mut BytesMut, offer: &Offer<'_>) -> Verdict {
        if !payload.is_empty() {
            return NO_DATA;
        }
        match offer.tls {
            Tls::Off => Verdict::Error(answer::ERR_UNSUP, "this server has no TLS"),
            Tls::Offered | Tls::Required if self.tls_on => {
                Verdict::Error(answer::ERR_INVALID, "TLS is on already")
            }
            Tls::Offered | Tls::Required => {
                put_answer(out, option::STARTTLS, answer::ACK, &[]);
                self.agreed = Agreed::default();
                self.tls_on = true;
                Verdict::End(Step::StartTls)
            }
        }
    }

    fn info(&self, option: u32, payload: &[u8], out: &mut BytesMut, offer: &Offer<'_>) -> Verdict {
        let request = match info_request(payload) {
            Ok(request) => request,
            Err(unfit) => return unfit.into(),
        };
        if !offer.export.answers_to(request.name) {
            return UNKNOWN_EXPORT;
        }
        if option == option::GO && offer.admission == Admission::Full {
            return Verdict::Error(answer::ERR_POLICY, "too many connections are open on this export");
        }
        self.put_infos(option, &request.wanted, out, offer);
        put_answer(out, option, answer::ACK, &[]);
        if option == option::GO { Verdict::End(Step::Go(self.agreed)) } else { Verdict::Answered }
    }

    fn put_infos(&self, option: u32, wanted: &[u16], out: &mut BytesMut, offer: &Offer<'_>) {
        put_answer_head(out, option, answer::INFO, 12);
        out.put_u16(info::EXPORT);
        out.put_u64(offer.size_bytes);
        out.put_u16(self.transmission_flags());
        for (kind, text) in [(info::NAME, &offer.export.name), (info::DESCRIPTION, &offer.export.description)]
        {
            if wanted.contains(&kind) {
                put_answer_head(out, option, answer::INFO, 2 + text.len());
                out.put_u16(kind);
                out.put_slice(text.as_bytes());
            }
        }
        if wanted.contains(&info::BLOCK_SIZE) {
            put_answer_head(out, option, answer::INFO, 14);
            out.put_u16(info::BLOCK_SIZE);
            out.put_u32(BLOCK_BYTES_MIN);
            out.put_u32(BLOCK_BYTES_PREFERRED);
            out.put_u32(PAYLOAD_BYTES_MAX);
        }
    }

    fn transmission_flags(&self) -> u16 {
        use transmission::{
            CAN_MULTI_CONN, HAS_FLAGS, SEND_CACHE, SEND_DF, SEND_FLUSH, SEND_FUA, SEND_TRIM,
            SEND_WRITE_ZEROES,
        };
        let always =
            HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES | SEND_CACHE | CAN_MULTI_CONN;
        if self.agreed.structured { always | SEND_DF } else { always }
    }

    fn structured_reply(&mut self, payload: &[u8], out: &mut BytesMut) -> Verdict {
        if !payload.is_empty() {
            return NO_DATA;
        }
        self.agreed.structured = true;
        put_answer(out, option::STRUCTURED_REPLY, answer::ACK, &[]);
        Verdict::Answered
    }

    fn list_contexts(&self, payload: &[u8], out: &mut BytesMut, export: &Export) -> Verdict {
        const OPTION: u32 = option::LIST_META_CONTEXT;
        let queries = match self.context_queries(payload, export) {
            Ok(queries) => queries,
            Err(verdict) => return verdict,
        };
        if queries.is_empty() || queries.iter().any(|&query| query == b"base:" || query == CONTEXT_ALLOCATION)
        {
            // The number has a meaning only once a context is set.
            put_context(out, OPTION, 0);
        }
        put_answer(out, OPTION, answer::ACK, &[]);
        Verdict::Answered
    }

    fn set_contexts(&mut self, payload: &[u8], out: &mut BytesMut, export: &Export) -> Verdict {
        const OPTION: u32 = option::SET_META_CONTEXT;
        // The last request counts, also if it fails.
        self.agreed.base_allocation = false;
        let queries = match self.context_queries(payload, export) {
            Ok(queries) => queries,
            Err(verdict) => return verdict,
        };
        if queries.contains(&CONTEXT_ALLOCATION) {
            self.agreed.base_allocation = true;
            put_context(out, OPTION, CONTEXT_ALLOCATION_ID);
        }
        put_answer(out, OPTION, answer::ACK, &[]);
        Verdict::Answered
    }

    fn context_queries<'a>(&self, payload: &'a [u8], export: &Export) -> Result<Vec<&'a [u8]>, Verdict> {
        let request = context_request(payload)?;
        if !self.agreed.structured {
            return Err(Verdict::Error(answer::ERR_INVALID, "negotiate structured replies first"));
        }
        if !export.answers_to(request.name) {
            return Err(UNKNOWN_EXPORT);
        }
        Ok(request.queries)
    }
}

const NO_DATA: Verdict = Verdict::Error(answer::ERR_INVALID, "this option takes no data");
const UNKNOWN_EXPORT: Verdict = Verdict::Error(answer::ERR_UNKNOWN, "there is no export of this name");

impl From<Unfit> for Verdict {
    fn from(unfit: Unfit) -> Self {
        match unfit {
            Unfit::Malformed => {
                Self::Error(answer::ERR_INVALID, "the lengths inside this option don't add up")
            }
            Unfit::NameTooLong => {
                Self::Error(answer::ERR_TOO_BIG, "a name or query is longer than 4096 bytes")
            }
        }
    }
}

impl Export {
    fn answers_to(&self, name: &[u8]) -> bool {
        name == self.name.as_bytes() || (self.is_default && name.is_empty())
    }
}

fn list(payload: &[u8], out: &mut BytesMut, export: &Export) -> Verdict {
    if !payload.is_empty() {
        return NO_DATA;
    }
    put_answer_head(out, option::LIST, answer::SERVER, 4 + export.name.len() + export.description.len());
    out.put_u32(u32::try_from(export.name.len()).unwrap_or(0));
    out.put_slice(export.name.as_bytes());
    out.put_slice(export.description.as_bytes());
    put_answer(out, option::LIST, answer::ACK, &[]);
    Verdict::Answered
}

fn skip_text(code: u32) -> &'static str {
    match code {
        answer::ERR_SHUTDOWN => "the server is shutting down",
        answer::ERR_TLS_REQD => "this server talks over TLS only; send STARTTLS first",
        answer::ERR_TOO_BIG => "the option's data is too long",
        _ => "this server doesn't know the option",
    }
}

fn refuse(error: HandshakeError) -> Option<Step> {
    Some(Step::Close(Ending::Refused(error)))
}

fn put_context(out: &mut BytesMut, option: u32, id: u32) {
    put_answer_head(out, option, answer::META_CONTEXT, 4 + CONTEXT_ALLOCATION.len());
    out.put_u32(id);
    out.put_slice(CONTEXT_ALLOCATION);
}

fn put_answer(out: &mut BytesMut, option: u32, code: u32, data: &[u8]) {
    put_answer_head(out, option, code, data.len());
    out.put_slice(data);
}

fn put_answer_head(out: &mut BytesMut, option: u32, code: u32, length: usize) {
    out.put_u64(OPTION_REPLY_MAGIC);
    out.put_u32(option);
    out.put_u32(code);
    out.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
