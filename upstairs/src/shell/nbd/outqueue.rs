//! The bytes that one connection owes its guest, in order, ready for a vectored write.
//!
//! Invariants:
//! - Small heads are gathered in one buffer, so that replies without data cost one slice together, not one each.
//! - Data are never copied; zeros are never allocated.
//! - `bytes` is the sum of all pieces, and the pieces of heads add up to what is unsent in `heads`.
//!
//! The bound on what waits here is the session's: it takes no request while too much does.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, Bytes};

/// Slices of one vectored write. 64 heads and 64 pieces of data: a deep queue's worth, at 2 KiB of stack.
pub(super) const SLICES_MAX: usize = 128;
/// What zeros are sent from.
static ZEROES: [u8; 64 * 1024] = [0; 64 * 1024];
/// Sent heads are dropped from the buffer only beyond this, so that the move is rare.
const SENT_HEADS_BYTES_MAX: usize = 64 * 1024;

#[derive(Debug, Default)]
pub(super) struct OutQueue {
    heads: Vec<u8>,
    /// How much of `heads` is sent.
    heads_sent: usize,
    pieces: VecDeque<Piece>,
    bytes: usize,
    /// Where in the stream each unsent reply ends, and how far the stream is sent: counts unsent replies.
    ends: VecDeque<u64>,
    sent: u64,
}

#[derive(Debug)]
enum Piece {
    /// So many bytes of `heads`, behind those of earlier pieces.
    Heads(usize),
    Data(Bytes),
    Zeroes(usize),
}

impl OutQueue {
    pub(super) fn head(&mut self, put: impl FnOnce(&mut Vec<u8>)) {
        let before = self.heads.len();
        put(&mut self.heads);
        let added = self.heads.len() - before;
        self.bytes += added;
        if let Some(Piece::Heads(length)) = self.pieces.back_mut() {
            *length += added;
        } else {
            self.pieces.push_back(Piece::Heads(added));
        }
    }

    pub(super) fn data(&mut self, data: Bytes) {
        if !data.is_empty() {
            self.bytes += data.len();
            self.pieces.push_back(Piece::Data(data));
        }
    }

    pub(super) fn zeroes(&mut self, length: usize) {
        if length > 0 {
            self.bytes += length;
            self.pieces.push_back(Piece::Zeroes(length));
        }
    }

    /// What was put since the last call is one reply.
    pub(super) fn end_reply(&mut self) {
        self.ends.push_back(self.sent + self.bytes as u64);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Replies that aren't sent whole.
    pub(super) fn replies(&self) -> usize {
        self.ends.len()
    }

    /// Points `slices` at the front of the queue; how many are in use.
    pub(super) fn gather<'a>(&'a self, slices: &mut [IoSlice<'a>; SLICES_MAX]) -> usize {
        let mut used = 0;
        let mut heads = self.heads_sent;
        let mut free = slices.iter_mut();
        'pieces: for piece in &self.pieces {
            match piece {
                Piece::Heads(length) => {
                    let Some(slice) = free.next() else { break };
                    *slice = IoSlice::new(&self.heads[heads..heads + length]);
                    heads += length;
                    used += 1;
                }
                Piece::Data(data) => {
                    let Some(slice) = free.next() else { break };
                    *slice = IoSlice::new(data);
                    used += 1;
                }
                Piece::Zeroes(length) => {
                    let mut left = *length;
                    while left > 0 {
                        let Some(slice) = free.next() else { break 'pieces };
                        let part = left.min(ZEROES.len());
                        *slice = IoSlice::new(&ZEROES[..part]);
                        left -= part;
                        used += 1;
                    }
                }
            }
        }
        used
    }

    /// The first `sent` bytes are on their way.
    pub(super) fn advance(&mut self, sent: usize) {
        let mut left = sent.min(self.bytes);
        self.bytes -= left;
        self.sent += left as u64;
        while let Some(&end) = self.ends.front()
            && end <= self.sent
        {
            self.ends.pop_front();
        }
        while left > 0 {
            let Some(piece) = self.pieces.front_mut() else { break };
            let (length, part) = match piece {
                Piece::Heads(length) => {
                    let part = left.min(*length);
                    self.heads_sent += part;
                    (length, part)
                }
                Piece::Zeroes(length) => {
                    let part = left.min(*length);
                    (length, part)
                }
                Piece::Data(data) => {
                    let part = left.min(data.len());
                    data.advance(part);
                    left -= part;
                    if data.is_empty() {
                        self.pieces.pop_front();
                    }
                    continue;
                }
            };
            *length -= part;
            left -= part;
            if *length == 0 {
                self.pieces.pop_front();
            }
        }
        self.drop_sent_heads();
    }

    fn drop_sent_heads(&mut self) {
        if self.pieces.is_empty() {
            debug_assert_eq!((self.bytes, self.heads_sent), (0, self.heads.len()));
            self.heads.clear();
            self.heads.shrink_to(SENT_HEADS_BYTES_MAX);
            self.heads_sent = 0;
        } else if self.heads_sent > SENT_HEADS_BYTES_MAX && self.heads_sent > self.heads.len() / 2 {
            self.heads.drain(..self.heads_sent);
            self.heads_sent = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Put {
        Head(Vec<u8>),
        Data(Vec<u8>),
        Zeroes(usize),
        End,
        Send(usize),
    }

    fn any_put() -> impl Strategy<Value = Put> {
        let bytes = || proptest::collection::vec(any::<u8>(), 1..60);
        prop_oneof![
            3 => bytes().prop_map(Put::Head),
            2 => bytes().prop_map(Put::Data),
            1 => (0..200_000_usize).prop_map(Put::Zeroes),
            2 => Just(Put::End),
            2 => (0..150_000_usize).prop_map(Put::Send),
        ]
    }

    /// Takes up to `limit` bytes as a socket would.
    fn send(queue: &mut OutQueue, limit: usize, sent: &mut Vec<u8>) {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let used = queue.gather(&mut slices);
        let gathered: Vec<u8> = slices[..used].iter().flat_map(|slice| slice.iter().copied()).collect();
        let taken = gathered.len().min(limit);
        sent.extend(&gathered[..taken]);
        queue.advance(taken);
    }

    proptest! {
        #[test]
        fn bytes_leave_in_order(puts in proptest::collection::vec(any_put(), 0..80)) {
            let (mut queue, mut expected, mut sent, mut ends) =
                (OutQueue::default(), Vec::new(), Vec::new(), Vec::new());
            for put in puts {
                match put {
                    Put::Head(bytes) => { expected.extend(&bytes); queue.head(|out| out.extend(&bytes)) }
                    Put::Data(bytes) => { expected.extend(&bytes); queue.data(bytes.into()) }
                    Put::Zeroes(length) => { expected.resize(expected.len() + length, 0); queue.zeroes(length) }
                    Put::End => { ends.push(expected.len()); queue.end_reply() }
                    Put::Send(limit) => send(&mut queue, limit, &mut sent),
                }
                prop_assert_eq!(queue.bytes(), expected.len() - sent.len());
                let open = ends.iter().filter(|&&end| end > sent.len()).count();
                prop_assert!(queue.replies() >= open);
            }
            while !queue.is_empty() {
                send(&mut queue, usize::MAX, &mut sent);
            }
            prop_assert!(sent == expected, "the stream differs");
            prop_assert_eq!(queue.bytes(), 0);
        }
    }
}
