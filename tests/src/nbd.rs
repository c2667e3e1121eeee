//! A small NBD client over a raw socket: handshake, requests and simple replies, and nothing that would keep a test from
//! sending what no decent client sends.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// A server that says nothing for this long has hung.
const SILENCE_MAX: Duration = Duration::from_secs(60);

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;

pub const EIO: u32 = 5;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const ESHUTDOWN: u32 = 108;

pub const FLAG_FUA: u16 = 1;
pub const FLAG_NO_HOLE: u16 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Zero,
    Status,
    Unknown(u16),
}

impl Command {
    fn number(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::Zero => 6,
            Self::Status => 7,
            Self::Unknown(number) => number,
        }
    }
}

#[derive(Clone, Debug)]
pub enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// A connected byte stream of either kind.
#[derive(Debug)]
pub enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    pub fn connect(address: &Address) -> io::Result<Self> {
        let stream = match address {
            Address::Unix(path) => Self::Unix(UnixStream::connect(path)?),
            Address::Tcp(address) => Self::Tcp(TcpStream::connect(address)?),
        };
        match &stream {
            Self::Unix(unix) => unix.set_read_timeout(Some(SILENCE_MAX))?,
            Self::Tcp(tcp) => {
                tcp.set_read_timeout(Some(SILENCE_MAX))?;
                tcp.set_nodelay(true)?;
            }
        }
        Ok(stream)
    }

    /// How long the other side may say nothing.
    pub fn set_silence(&self, silence: Duration) -> io::Result<()> {
        match self {
            Self::Unix(unix) => unix.set_read_timeout(Some(silence)),
            Self::Tcp(tcp) => tcp.set_read_timeout(Some(silence)),
        }
    }

    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(unix) => Self::Unix(unix.try_clone()?),
            Self::Tcp(tcp) => Self::Tcp(tcp.try_clone()?),
        })
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(unix) => unix.read(buffer),
            Self::Tcp(tcp) => tcp.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(unix) => unix.write(buffer),
            Self::Tcp(tcp) => tcp.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The answer to one request.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    /// 0 is success.
    pub errno: u32,
    pub data: Vec<u8>,
}

/// One connection in the transmission phase, with simple replies.
#[derive(Debug)]
pub struct Client {
    stream: Stream,
    pub size_bytes: u64,
    pub flags: u16,
    next_cookie: u64,
    /// Cookie and length of the reads whose data are still to come.
    reads: VecDeque<(u64, u32)>,
}

impl Client {
    pub fn connect(address: &Address) -> io::Result<Self> {
        let mut stream = Stream::connect(address)?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        if greeting[..16] != *b"NBDMAGICIHAVEOPT" {
            return Err(malformed("greeting"));
        }
        // Fixed newstyle, no zeroes.
        stream.write_all(&3_u32.to_be_bytes())?;
        let mut option = Vec::new();
        option.extend(OPTION_MAGIC.to_be_bytes());
        option.extend(OPT_GO.to_be_bytes());
        // The default export, no information asked for.
        option.extend(6_u32.to_be_bytes());
        option.extend([0; 6]);
        stream.write_all(&option)?;
        let (mut size_bytes, mut flags) = (0, 0);
        loop {
            let mut head = [0; 20];
            stream.read_exact(&mut head)?;
            if be64(&head[0..8]) != OPTION_REPLY_MAGIC {
                return Err(malformed("option reply"));
            }
            let mut body = vec![0; be32(&head[16..20]) as usize];
            stream.read_exact(&mut body)?;
            match be32(&head[12..16]) {
                REP_ACK => break,
                REP_INFO if body.len() == 12 && be16(&body[0..2]) == INFO_EXPORT => {
                    size_bytes = be64(&body[2..10]);
                    flags = be16(&body[10..12]);
                }
                REP_INFO => {}
                other => return Err(io::Error::other(format!("GO was answered with {other:#x}"))),
            }
        }
        Ok(Self { stream, size_bytes, flags, next_cookie: 1, reads: VecDeque::new() })
    }

    /// Sends one request and tells its cookie. `payload` is whatever shall follow the header.
    pub fn send(
        &mut self,
        command: Command,
        flags: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> io::Result<u64> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut request = Vec::with_capacity(28 + payload.len());
        request.extend(REQUEST_MAGIC.to_be_bytes());
        request.extend(flags.to_be_bytes());
        request.extend(command.number().to_be_bytes());
        request.extend(cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(length.to_be_bytes());
        request.extend(payload);
        if command == Command::Read {
            self.reads.push_back((cookie, length));
        }
        self.stream.write_all(&request)?;
        Ok(cookie)
    }

    /// The next reply, whichever request it answers.
    pub fn receive(&mut self) -> io::Result<Reply> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        if be32(&head[0..4]) != SIMPLE_REPLY_MAGIC {
            return Err(malformed("reply"));
        }
        let errno = be32(&head[4..8]);
        let cookie = be64(&head[8..16]);
        let read = self.reads.iter().position(|&(read, _)| read == cookie);
        let length = read.and_then(|at| self.reads.remove(at)).map_or(0, |(_, length)| length);
        let mut data = vec![0; if errno == 0 { length as usize } else { 0 }];
        self.stream.read_exact(&mut data)?;
        Ok(Reply { cookie, errno, data })
    }

    /// One request and its answer, with nothing else in flight.
    pub fn ask(
        &mut self,
        command: Command,
        flags: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> io::Result<Reply> {
        let cookie = self.send(command, flags, offset, length, payload)?;
        let reply = self.receive()?;
        if reply.cookie != cookie {
            return Err(io::Error::other(format!("asked {cookie}, answered {}", reply.cookie)));
        }
        Ok(reply)
    }

    #[track_caller]
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let length = u32::try_from(data.len()).expect("one request");
        let reply = self.ask(Command::Write, 0, offset, length, data).expect("the server answers");
        assert_eq!(reply.errno, 0, "write of {length} bytes at {offset}");
    }

    #[track_caller]
    pub fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        let reply = self.ask(Command::Read, 0, offset, length, &[]).expect("the server answers");
        assert_eq!(reply.errno, 0, "read of {length} bytes at {offset}");
        reply.data
    }

    #[track_caller]
    pub fn flush(&mut self) {
        let reply = self.ask(Command::Flush, 0, 0, 0, &[]).expect("the server answers");
        assert_eq!(reply.errno, 0, "flush");
    }

    /// Nothing more may come: the server closes.
    #[track_caller]
    pub fn assert_closed(&mut self) {
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(0) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            other => panic!("the connection should be closed, but gave {other:?}"),
        }
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("malformed {what}"))
}

fn be16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |value, &byte| value << 8 | u16::from(byte))
}

fn be32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

fn be64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
}
