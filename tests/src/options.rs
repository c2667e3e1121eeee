//! The handshake of NBD over a raw socket, option by option, well-formed or not.

use std::io::{self, Read as _, Write as _};

use crate::nbd::{Address, Stream};

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

pub const EXPORT_NAME: u32 = 1;
pub const ABORT: u32 = 2;
pub const LIST: u32 = 3;
pub const STARTTLS: u32 = 5;
pub const INFO: u32 = 6;
pub const GO: u32 = 7;
pub const STRUCTURED_REPLY: u32 = 8;
pub const LIST_META_CONTEXT: u32 = 9;
pub const SET_META_CONTEXT: u32 = 10;

pub const ACK: u32 = 1;
pub const ERR_UNSUP: u32 = 0x8000_0001;
pub const ERR_POLICY: u32 = 0x8000_0002;
pub const ERR_INVALID: u32 = 0x8000_0003;
pub const ERR_TLS_REQD: u32 = 0x8000_0005;
pub const ERR_UNKNOWN: u32 = 0x8000_0006;
pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
pub const ERR_TOO_BIG: u32 = 0x8000_0009;

/// The usual flags of a client: fixed newstyle, no zeroes.
pub const USUAL: u32 = 3;

#[derive(Debug)]
pub struct Handshake {
    stream: Stream,
}

impl Handshake {
    /// Connects, reads the greeting and sends the client's flags.
    #[track_caller]
    pub fn start(address: &Address, flags: u32) -> Self {
        let mut stream = Stream::connect(address).expect("the server accepts");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("the server greets");
        assert_eq!(greeting, *b"NBDMAGICIHAVEOPT\0\x03");
        stream.write_all(&flags.to_be_bytes()).expect("the server listens");
        Self { stream }
    }

    /// Sends an option; the server may have had enough of it before its end.
    pub fn send(&mut self, option: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).expect("options are short");
        let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
        message.extend(option.to_be_bytes());
        message.extend(length.to_be_bytes());
        message.extend(payload);
        self.send_raw(&message);
    }

    pub fn send_raw(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).ok();
    }

    /// The answers to `option` up to the one that ends them: that one's code, and the data of all.
    pub fn answer(&mut self, option: u32) -> io::Result<(u32, Vec<u8>)> {
        let mut all = Vec::new();
        loop {
            let mut head = [0; 20];
            self.stream.read_exact(&mut head)?;
            let field =
                |at: usize| head[at..at + 4].iter().fold(0, |value, &byte| value << 8 | u32::from(byte));
            if head[..8] != OPTION_REPLY_MAGIC.to_be_bytes() || field(8) != option {
                return Err(io::Error::other(format!("{head:x?} is no answer to option {option}")));
            }
            let mut data = vec![0; field(16) as usize];
            self.stream.read_exact(&mut data)?;
            all.extend(data);
            if field(12) == ACK || field(12) & 1 << 31 != 0 {
                return Ok((field(12), all));
            }
        }
    }

    #[track_caller]
    pub fn ask(&mut self, option: u32, payload: &[u8]) -> u32 {
        self.send(option, payload);
        self.answer(option).unwrap_or_else(|error| panic!("option {option}: {error}")).0
    }

    #[track_caller]
    pub fn take(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap_or_else(|error| panic!("{length} bytes: {error}"));
        bytes
    }

    /// What comes up to the end of the connection, which the server must end.
    #[track_caller]
    pub fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => rest,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => rest,
            Err(error) => panic!("the server should close: {error}"),
        }
    }
}

/// The payload of INFO and GO: a name, and no information asked for.
pub fn named(name: &[u8]) -> Vec<u8> {
    let length = u32::try_from(name.len()).expect("names are short");
    [&length.to_be_bytes()[..], name, &[0, 0]].concat()
}

/// The payload of the options about contexts: the default export, and queries.
pub fn queries(queries: &[&str]) -> Vec<u8> {
    let count = |number: usize| u32::try_from(number).expect("queries are few and short").to_be_bytes();
    let mut payload = [[0; 4], count(queries.len())].concat();
    for query in queries {
        payload.extend(count(query.len()));
        payload.extend(query.as_bytes());
    }
    payload
}
