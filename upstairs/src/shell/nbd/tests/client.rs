//! A client that says exactly what a test wants it to say.

use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::{Buf, BufMut};
use newel_protocol::nbd::consts::{
    CHUNK_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, answer, chunk, command,
    option,
};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

pub(super) struct Client {
    stream: Box<dyn Stream>,
    next_cookie: u64,
}

/// A whole reply, simple or structured.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) cookie: u64,
    pub(super) error: u32,
    pub(super) data: Vec<u8>,
    /// Kinds of chunks; empty if the reply was a simple one.
    pub(super) chunks: Vec<u16>,
    /// Length and flags of block-status extents.
    pub(super) extents: Vec<(u32, u32)>,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Ask {
    pub(super) structured: bool,
    pub(super) contexts: bool,
}

pub(super) const PLAIN: Ask = Ask { structured: false, contexts: false };
pub(super) const FULL: Ask = Ask { structured: true, contexts: true };

impl Client {
    /// Connects and reads the greeting.
    pub(super) async fn unix(path: &Path) -> Self {
        Self::greet(Box::new(UnixStream::connect(path).await.unwrap())).await
    }

    pub(super) async fn tcp(addr: std::net::SocketAddr) -> Self {
        Self::greet(Box::new(TcpStream::connect(addr).await.unwrap())).await
    }

    async fn greet(stream: Box<dyn Stream>) -> Self {
        let mut client = Self { stream, next_cookie: 1 };
        assert_eq!(client.take(18).await, b"NBDMAGICIHAVEOPT\0\x03");
        client
    }

    pub(super) async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
        self.stream.flush().await.unwrap();
    }

    pub(super) async fn take(&mut self, length: usize) -> Vec<u8> {
        let mut out = vec![0; length];
        self.stream.read_exact(&mut out).await.unwrap();
        out
    }

    /// Sends as much as the server takes.
    pub(super) async fn try_send(&mut self, bytes: &[u8]) {
        if self.stream.write_all(bytes).await.is_ok() {
            self.stream.flush().await.ok();
        }
    }

    /// Reads up to the end of the connection, of whatever kind that is.
    pub(super) async fn until_closed(&mut self) {
        let mut sink = [0; 4096];
        while self.stream.read(&mut sink).await.is_ok_and(|length| length > 0) {}
    }

    /// Everything up to the end of the connection.
    pub(super) async fn take_rest(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        match self.stream.read_to_end(&mut out).await {
            Ok(_) => out,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => out,
            Err(error) => panic!("{error}"),
        }
    }

    /// Speaks TLS from here on, as a client of `localhost`.
    pub(super) async fn encrypt(self, config: Arc<ClientConfig>) -> io::Result<Self> {
        let host = ServerName::try_from("localhost").unwrap();
        let stream = TlsConnector::from(config).connect(host, self.stream).await?;
        Ok(Self { stream: Box::new(stream), ..self })
    }

    /// No more is sent.
    pub(super) async fn hang_up(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    pub(super) async fn flags(&mut self, flags: u32) {
        self.send(&flags.to_be_bytes()).await;
    }

    pub(super) async fn option(&mut self, option: u32, payload: &[u8]) {
        let mut out = Vec::with_capacity(16);
        out.put_u64(OPTION_MAGIC);
        out.put_u32(option);
        out.put_u32(u32::try_from(payload.len()).unwrap());
        self.send(&out).await;
        self.send(payload).await;
    }

    /// One answer to an option: its code.
    pub(super) async fn answer(&mut self, option: u32) -> u32 {
        let head = self.take(20).await;
        let mut head = &head[..];
        assert_eq!((head.get_u64(), head.get_u32()), (OPTION_REPLY_MAGIC, option));
        let (code, length) = (head.get_u32(), head.get_u32());
        self.take(length as usize).await;
        code
    }

    /// Sends an option and takes its answers up to the one that ends them: its code.
    pub(super) async fn ask(&mut self, option: u32, payload: &[u8]) -> u32 {
        self.option(option, payload).await;
        loop {
            let code = self.answer(option).await;
            if code == answer::ACK || code & 1 << 31 != 0 {
                return code;
            }
        }
    }

    pub(super) async fn go(mut self, ask: Ask) -> Self {
        self.flags(3).await;
        self.options(ask).await
    }

    /// The options up to the transmission.
    pub(super) async fn options(mut self, ask: Ask) -> Self {
        if ask.structured {
            assert_eq!(self.ask(option::STRUCTURED_REPLY, b"").await, answer::ACK);
        }
        if ask.contexts {
            let payload = b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation";
            assert_eq!(self.ask(option::SET_META_CONTEXT, payload).await, answer::ACK);
        }
        assert_eq!(self.ask(option::GO, &named(b"")).await, answer::ACK);
        self
    }

    /// Sends a request: its cookie.
    pub(super) async fn request(
        &mut self,
        kind: u16,
        flags: u16,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut out = Vec::with_capacity(28 + data.len());
        out.put_u32(REQUEST_MAGIC);
        out.put_u16(flags);
        out.put_u16(kind);
        out.put_u64(cookie);
        out.put_u64(offset);
        out.put_u32(length);
        out.put_slice(data);
        self.send(&out).await;
        cookie
    }

    /// The next reply. `length` is what a successful simple one carries.
    pub(super) async fn reply(&mut self, length: usize) -> Reply {
        let head = self.take(16).await;
        let mut head = &head[..];
        match head.get_u32() {
            SIMPLE_REPLY_MAGIC => {
                let (error, cookie) = (head.get_u32(), head.get_u64());
                let data = if error == 0 { self.take(length).await } else { vec![] };
                Reply { cookie, error, data, ..Reply::default() }
            }
            CHUNK_MAGIC => {
                let (flags, kind, cookie) = (head.get_u16(), head.get_u16(), head.get_u64());
                let mut reply = Reply { cookie, ..Reply::default() };
                let (mut flags, mut kind) = (flags, kind);
                loop {
                    self.chunk(kind, &mut reply).await;
                    if flags & chunk::DONE != 0 {
                        return reply;
                    }
                    let head = self.take(16).await;
                    let mut head = &head[..];
                    assert_eq!(head.get_u32(), CHUNK_MAGIC);
                    (flags, kind) = (head.get_u16(), head.get_u16());
                    assert_eq!(head.get_u64(), cookie);
                }
            }
            other => panic!("{other:#x} is no reply"),
        }
    }

    async fn chunk(&mut self, kind: u16, reply: &mut Reply) {
        reply.chunks.push(kind);
        let length = self.take(4).await.as_slice().get_u32() as usize;
        let body = self.take(length).await;
        let mut body = &body[..];
        match kind {
            chunk::OFFSET_DATA => reply.data.extend_from_slice(&body[8..]),
            chunk::OFFSET_HOLE => {
                body.advance(8);
                reply.data.resize(reply.data.len() + body.get_u32() as usize, 0);
            }
            chunk::BLOCK_STATUS => {
                assert_eq!(body.get_u32(), 1, "the context's number");
                while body.has_remaining() {
                    reply.extents.push((body.get_u32(), body.get_u32()));
                }
            }
            chunk::ERROR => reply.error = body.get_u32(),
            other => panic!("chunk of kind {other}"),
        }
    }

    /// One request and its reply; the error.
    pub(super) async fn call(&mut self, kind: u16, flags: u16, offset: u64, length: u32, data: &[u8]) -> u32 {
        let cookie = self.request(kind, flags, offset, length, data).await;
        let reply = self.reply(if kind == command::READ { length as usize } else { 0 }).await;
        assert_eq!(reply.cookie, cookie);
        reply.error
    }

    pub(super) async fn write(&mut self, offset: u64, data: &[u8]) {
        let length = u32::try_from(data.len()).unwrap();
        assert_eq!(self.call(command::WRITE, 0, offset, length, data).await, 0);
    }

    pub(super) async fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        self.request(command::READ, 0, offset, length, b"").await;
        let reply = self.reply(length as usize).await;
        assert_eq!((reply.error, reply.data.len()), (0, length as usize));
        reply.data
    }

    pub(super) async fn status(&mut self, flags: u16, offset: u64, length: u32) -> Vec<(u32, u32)> {
        self.request(command::BLOCK_STATUS, flags, offset, length, b"").await;
        self.reply(0).await.extents
    }
}

/// The payload of `GO` or `INFO` for an export.
pub(super) fn named(name: &[u8]) -> Vec<u8> {
    let length = u32::try_from(name.len()).unwrap();
    [&length.to_be_bytes()[..], name, &[0, 0]].concat()
}
