//! One guest's connection: handshake, then a reader and a writer that share a [`Session`].
//!
//! Invariants:
//! - Reader and writer are one task, the reader first: what a batch of requests is answered at once goes out in the same
//!   poll, without a wake-up.
//! - A batch is all the complete requests of one read; the volume is kicked once for it.
//! - Payloads are split off the read buffer. One that doesn't fit gets a buffer of its own size up front, and the reads
//!   for it stop where the next request's header ends, so that payloads aren't copied together piece by piece.
//! - No request is read while the session or the volume has no room.
//! - A connection ends when nothing is in flight and everything is sent, at its linger limit, or when it has been idle for
//!   too long.
//! - **What a guest that has hung up had sent, and nobody has taken yet, is dropped if there was another connection beside
//!   this one.** A guest sends again over another connection, old or new, whatever was not answered, and newer writes behind
//!   it: the old ones must not land on top of those. (What was taken before is older in the volume's order, too.)
//! - At the end what the client still sends is read for a moment: closing a socket with unread data would take back
//!   replies that the client hasn't seen yet.

use std::cell::Cell;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use newel_protocol::nbd::{
    Admission, Agreed, Command, Ending, Errno, Export, Handshake, HandshakeError, OPTION_PAYLOAD_BYTES_MAX,
    Offer, PAYLOAD_BYTES_MAX, REQUEST_HEADER_BYTES, RequestError, RequestParser, Step, Tls, consts::command,
    validate,
};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::accept::GuestRead;
use super::outqueue::SLICES_MAX;
use super::session::{Session, Taken};
use crate::core::api::Time;
use crate::shell::guest::{ConnKey, Volume};

/// One read's buffer: two batches of 32 writes of 4 KiB.
const READ_BYTES: usize = 256 * 1024;
/// With less space left than this a fresh buffer is taken, or reads would be cut small.
const READ_BYTES_MIN: usize = 64 * 1024;
/// While shaking hands a client has no use for more at a time.
const HANDSHAKE_READ_BYTES: usize = 4096;
/// How long and how much is still read from a client that was told goodbye.
const FAREWELL: Duration = Duration::from_secs(1);
const FAREWELL_BYTES_MAX: usize = 16 << 20;
/// An idle connection is looked at so often within its limit.
const IDLE_LOOKS: u32 = 4;

/// Why a connection ended otherwise than agreed.
#[derive(Debug, Error)]
pub(super) enum ConnectionError {
    #[error("{0}")]
    Handshake(#[from] HandshakeError),
    #[error("{0}")]
    Request(#[from] RequestError),
    #[error("no agreement within {limit:?} of connecting; the connection was closed")]
    HandshakeTime { limit: Duration },
    #[error("TLS could not be agreed upon: {0}")]
    Tls(io::Error),
    #[error("the guest closed the connection in the middle of a message")]
    Cut,
    #[error(
        "{requests} requests were still unfinished {limit:?} after the guest had closed; their replies are dropped"
    )]
    Linger { requests: usize, limit: Duration },
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
}

impl ConnectionError {
    /// A guest that vanishes is everyday life; one that breaks the rules is worth a line in the log.
    pub(super) fn is_violation(&self) -> bool {
        match self {
            Self::Handshake(HandshakeError::ShuttingDown) | Self::Cut => false,
            // Of TLS: what came is none, or not what was sent.
            Self::Io(error) | Self::Tls(error) => error.kind() == io::ErrorKind::InvalidData,
            Self::Handshake(_) | Self::Request(_) | Self::HandshakeTime { .. } | Self::Linger { .. } => true,
        }
    }
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Closed {
    /// By ABORT in the handshake.
    Aborted,
    /// By DISC.
    Disconnected,
    /// By closing between two messages.
    Eof,
    /// By us, on the way down.
    ShutDown,
    /// By us, after a long silence.
    Idle,
    /// By the guest, which may go on over another connection; so many bytes were dropped.
    Superseded { bytes: usize },
}

/// What the server says at a given moment of a handshake: whether it has room, and the volume's size.
pub(super) type Now<'a> = &'a dyn Fn() -> (Admission, u64);

/// A handshake and what was read for it; it goes on behind STARTTLS.
pub(super) struct Negotiation {
    handshake: Handshake,
    tls: Tls,
    input: BytesMut,
    out: BytesMut,
}

/// What a handshake has come to.
pub(super) enum Shaken<T> {
    /// Requests may come. The buffer holds what was sent behind the last option.
    Admitted(T, BytesMut),
    /// TLS is to be spoken, and then the handshake goes on. Nothing has been read beyond this point.
    StartTls,
    /// The client said goodbye or left.
    Ended,
}

impl Negotiation {
    pub(super) fn new(tls: Tls) -> Self {
        let mut out = BytesMut::new();
        Self { handshake: Handshake::new(&mut out), tls, input: BytesMut::new(), out }
    }

    /// Shakes hands. `spoke` is called when the client says anything; `admit` once, before another connection can be served,
    /// with what was agreed.
    pub(super) async fn run<R, W, T>(
        &mut self,
        (read, write): (&mut R, &mut W),
        export: &Export,
        now: Now<'_>,
        spoke: impl Fn(),
        admit: impl FnOnce(Agreed) -> T,
    ) -> Result<Shaken<T>, ConnectionError>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let Self { handshake, tls, input, out } = self;
        loop {
            write.write_all_buf(out).await?;
            write.flush().await?;
            debug_assert!(input.len() <= OPTION_PAYLOAD_BYTES_MAX + REQUEST_HEADER_BYTES);
            input.reserve(HANDSHAKE_READ_BYTES);
            if read.read_buf(&mut (&mut *input).limit(HANDSHAKE_READ_BYTES)).await? == 0 {
                return if input.is_empty() { Ok(Shaken::Ended) } else { Err(ConnectionError::Cut) };
            }
            spoke();
            let (admission, size_bytes) = now();
            let offer = Offer { export, size_bytes, admission, tls: *tls };
            let shaken = match handshake.advance(input, out, &offer) {
                Step::More => continue,
                Step::Go(agreed) => Ok(Shaken::Admitted(admit(agreed), std::mem::take(input))),
                Step::StartTls => Ok(Shaken::StartTls),
                Step::Close(Ending::Aborted) => Ok(Shaken::Ended),
                Step::Close(Ending::Refused(error)) => Err(error.into()),
            };
            write.write_all_buf(out).await?;
            write.flush().await?;
            return shaken;
        }
    }
}

/// Serves requests until the guest leaves, breaks the rules, or the session is drained.
pub(super) async fn transmit<R, W>(
    (read, write): (&mut R, &mut W),
    buffered: BytesMut,
    session: &Session,
    (volume, key): (&dyn Volume, ConnKey),
    (linger, idle): (Duration, Option<Duration>),
) -> Result<Closed, ConnectionError>
where
    R: GuestRead,
    W: AsyncWrite + Unpin,
{
    let reader_done = Cell::new(false);
    let mut reader = pin!(Reader::new(buffered, session, volume, key).run(read));
    let mut writer = pin!(write_replies(write, session, &reader_done));
    let mut idleness = pin!(idleness(session, idle));
    let mut ended = None;
    let mut deadline = pin!(None);
    loop {
        tokio::select! {
            biased;
            end = &mut reader, if ended.is_none() => {
                if let Err(ConnectionError::Io(error)) = end {
                    return Err(error.into());
                }
                reader_done.set(true);
                deadline.set(Some(tokio::time::sleep(linger)));
                ended = Some(end);
            }
            result = &mut writer => {
                result?;
                return ended.unwrap_or(Ok(Closed::ShutDown));
            }
            () = &mut idleness, if ended.is_none() => return Ok(Closed::Idle),
            Some(()) = until(deadline.as_mut()), if ended.is_some() => {
                return Err(ConnectionError::Linger { requests: session.in_flight(), limit: linger });
            }
        }
    }
}

async fn until(deadline: Pin<&mut Option<tokio::time::Sleep>>) -> Option<()> {
    deadline.as_pin_mut()?.await;
    Some(())
}

/// Ends once nothing has been in flight, come or gone for `limit`, or up to a quarter of it later. It takes no clock to a
/// request to know.
async fn idleness(session: &Session, limit: Option<Duration>) {
    let Some(limit) = limit else { return std::future::pending().await };
    let (mut seen, mut quiet) = (session.stirs(), 0);
    while quiet < IDLE_LOOKS {
        tokio::time::sleep(limit / IDLE_LOOKS).await;
        let idle = session.stirs() == seen && session.in_flight() == 0;
        quiet = if idle { quiet + 1 } else { 0 };
        seen = session.stirs();
    }
}

/// Lets the client see everything that was sent before the socket goes.
pub(super) async fn farewell<R, W>((read, write): (&mut R, &mut W))
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let drain = async {
        write.shutdown().await?;
        let (mut left, mut sink) = (FAREWELL_BYTES_MAX, BytesMut::with_capacity(HANDSHAKE_READ_BYTES));
        while left > 0 {
            sink.clear();
            match read.read_buf(&mut (&mut sink).limit(HANDSHAKE_READ_BYTES)).await? {
                0 => break,
                length => left = left.saturating_sub(length),
            }
        }
        io::Result::Ok(())
    };
    if let Ok(Err(error)) = tokio::time::timeout(FAREWELL, drain).await {
        // The client is gone already, which is what was wanted.
        tracing::trace!(%error, "farewell");
    }
}

async fn write_replies<W>(write: &mut W, session: &Session, reader_done: &Cell<bool>) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    poll_fn(|context| {
        session.register(context);
        loop {
            let written = session.with_out(|out| {
                if out.is_empty() {
                    return None;
                }
                let mut slices = [IoSlice::new(&[]); SLICES_MAX];
                let used = out.gather(&mut slices);
                let written = Pin::new(&mut *write).poll_write_vectored(context, &slices[..used]);
                if let Poll::Ready(Ok(length)) = written {
                    out.advance(length);
                }
                Some(written)
            });
            // What an encrypted stream has taken and not sent yet is unsent.
            if written.is_none() && Pin::new(&mut *write).poll_flush(context)?.is_pending() {
                return Poll::Pending;
            }
            match written {
                None if session.is_finished() && (reader_done.get() || session.is_draining()) => {
                    return Poll::Ready(Ok(()));
                }
                None | Some(Poll::Pending) => return Poll::Pending,
                Some(Poll::Ready(Ok(0))) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Some(Poll::Ready(Ok(_))) => {
                    session.stir();
                    session.made_room();
                }
                Some(Poll::Ready(Err(error))) => return Poll::Ready(Err(error)),
            }
        }
    })
    .await
}

/// What one pass over the buffered bytes came to.
enum Batch {
    /// Everything complete was taken.
    NeedBytes,
    NeedRoom,
    Disconnect,
}

struct Reader<'a> {
    parser: RequestParser,
    buffer: ReadBuffer,
    session: &'a Session,
    volume: &'a dyn Volume,
    key: ConnKey,
    /// When the socket was read last: whatever lies in the buffer has been here since then, at least.
    received: Time,
}

impl<'a> Reader<'a> {
    fn new(buffered: BytesMut, session: &'a Session, volume: &'a dyn Volume, key: ConnKey) -> Self {
        Self {
            parser: RequestParser::new(PAYLOAD_BYTES_MAX),
            buffer: ReadBuffer::new(buffered),
            session,
            volume,
            key,
            received: volume.now(),
        }
    }

    async fn run<R: GuestRead>(mut self, read: &mut R) -> Result<Closed, ConnectionError> {
        loop {
            if !self.buffer.bytes.is_empty() && self.session.is_accompanied() && read.has_left() {
                return Ok(self.last_words()?);
            }
            match self.take_batch()? {
                Batch::Disconnect => return Ok(Closed::Disconnected),
                Batch::NeedRoom => self.room().await,
                Batch::NeedBytes => {
                    if self.buffer.fill(read, self.parser.wanted()).await? == 0 {
                        let between = self.parser.is_idle() && self.buffer.bytes.is_empty();
                        return if between { Ok(Closed::Eof) } else { Err(ConnectionError::Cut) };
                    }
                    self.session.stir();
                    self.received = self.volume.now();
                }
            }
        }
    }

    /// What a guest still had to say that has hung up and may go on elsewhere: goodbye, or what must not be done any more.
    fn last_words(&mut self) -> Result<Closed, RequestError> {
        let bytes = self.buffer.bytes.len();
        Ok(match self.parser.next(&mut self.buffer.bytes)? {
            Some(request) if request.head.kind == command::DISC => Closed::Disconnected,
            Some(_) | None => Closed::Superseded { bytes },
        })
    }

    /// Takes all complete requests and kicks the volume once, also before an error ends the connection.
    fn take_batch(&mut self) -> Result<Batch, RequestError> {
        let mut submitted = false;
        let result = loop {
            if !self.has_room() {
                break Ok(Batch::NeedRoom);
            }
            let request = match self.parser.next(&mut self.buffer.bytes) {
                Ok(Some(request)) => request,
                Ok(None) => break Ok(Batch::NeedBytes),
                Err(error) => break Err(error),
            };
            let (cookie, read) = (request.head.cookie, request.head.kind == command::READ);
            let command = match validate(request, self.session.terms()) {
                Ok(Command::Disconnect) => break Ok(Batch::Disconnect),
                Ok(_) if self.session.is_draining() => Err(Errno::Shutdown),
                result => result,
            };
            match command {
                Err(error) => self.session.refuse(cookie, read, error),
                Ok(command) => {
                    if let Taken::Submit(slot, op) = self.session.take(cookie, command) {
                        self.volume.submit(self.key.guest(slot), op, self.received);
                        submitted = true;
                    }
                }
            }
        };
        if submitted {
            self.volume.kick();
        }
        result
    }

    fn has_room(&self) -> bool {
        self.session.has_room() && self.volume.room()
    }

    async fn room(&self) {
        poll_fn(|context| {
            self.session.register(context);
            let room = self.has_room();
            self.session.set_paused(!room);
            if room { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

/// The bytes read and not yet taken.
struct ReadBuffer {
    bytes: BytesMut,
    /// Of the allocation behind `bytes`.
    allocated: usize,
}

impl ReadBuffer {
    fn new(bytes: BytesMut) -> Self {
        Self { allocated: bytes.capacity(), bytes }
    }

    /// Reads once. `wanted` is what the buffer must hold in the end, see [`RequestParser::wanted`].
    async fn fill<R: AsyncRead + Unpin>(&mut self, read: &mut R, wanted: usize) -> io::Result<usize> {
        let limit = self.make_space(wanted);
        read.read_buf(&mut (&mut self.bytes).limit(limit)).await
    }

    /// Makes space for a read; how much may be read.
    fn make_space(&mut self, wanted: usize) -> usize {
        let missing = wanted.saturating_sub(self.bytes.len());
        let in_payload = wanted > REQUEST_HEADER_BYTES;
        let needed = if in_payload { missing } else { READ_BYTES_MIN };
        // A buffer that was made for one large payload isn't kept while the guest is idle.
        let oversized = !in_payload && self.allocated > READ_BYTES;
        let space = self.bytes.capacity() - self.bytes.len();
        if oversized || (space < needed && !self.bytes.try_reclaim(needed)) {
            self.allocated = READ_BYTES.max(self.bytes.len() + missing + REQUEST_HEADER_BYTES);
            let mut fresh = BytesMut::with_capacity(self.allocated);
            fresh.extend_from_slice(&self.bytes);
            self.bytes = fresh;
        }
        let space = self.bytes.capacity() - self.bytes.len();
        if missing >= READ_BYTES_MIN { space.min(missing + REQUEST_HEADER_BYTES) } else { space }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_payload_lies_in_a_buffer_of_its_own_and_is_not_kept() {
        let mut buffer = ReadBuffer::new(BytesMut::new());
        assert_eq!(buffer.make_space(REQUEST_HEADER_BYTES), READ_BYTES);
        // A header and the first bytes of a payload of 1 MiB have come.
        buffer.bytes.extend_from_slice(&[1; 1000]);
        assert_eq!(buffer.make_space(1 << 20), (1 << 20) - 1000 + REQUEST_HEADER_BYTES);
        assert_eq!((buffer.bytes.len(), buffer.bytes[999]), (1000, 1));
        // Its tail fits: nothing is moved.
        buffer.bytes.resize((1 << 20) - 10, 2);
        let place = buffer.bytes.as_ptr();
        assert_eq!(buffer.make_space(1 << 20), 10 + REQUEST_HEADER_BYTES);
        assert_eq!(buffer.bytes.as_ptr(), place);
        // It is taken, and the next read is an ordinary one.
        buffer.bytes.clear();
        assert_eq!(buffer.make_space(REQUEST_HEADER_BYTES), READ_BYTES);
        assert_eq!(buffer.allocated, READ_BYTES);
    }

    #[test]
    fn a_buffer_serves_many_small_requests() {
        let mut buffer = ReadBuffer::new(BytesMut::new());
        buffer.make_space(REQUEST_HEADER_BYTES);
        let place = buffer.bytes.as_ptr();
        let mut held = Vec::new();
        for _ in 0..40 {
            buffer.bytes.extend_from_slice(&[0; 4124]);
            held.push(buffer.bytes.split_to(4124).freeze());
            buffer.make_space(REQUEST_HEADER_BYTES);
        }
        assert_eq!(held[39].as_ptr(), place.wrapping_add(39 * 4124), "all payloads lie in one buffer");
    }
}
