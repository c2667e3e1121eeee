//! Replies of the transmission phase: their heads. Data never passes through here, so that it goes out uncopied.
//!
//! Invariants:
//! - Every function appends exactly one head (or one whole chunk without data) to `out`.
//! - A structured reply's last chunk, and no other, carries the DONE flag: `done` says so, error chunks always do.

use bytes::BufMut;

use super::consts::{CHUNK_MAGIC, CONTEXT_ALLOCATION_ID, Errno, SIMPLE_REPLY_MAGIC, STATE_HOLE_ZERO, chunk};

/// The longest message of an error chunk; longer ones are cut.
const MESSAGE_BYTES_MAX: usize = 512;

/// A simple reply; the data of a successful read follow it.
pub fn put_simple(out: &mut impl BufMut, cookie: u64, error: Option<Errno>) {
    out.put_u32(SIMPLE_REPLY_MAGIC);
    out.put_u32(error.map_or(0, Errno::code));
    out.put_u64(cookie);
}

/// The head of a chunk with data, which follow it: `length` bytes from `offset` of the volume.
pub fn put_data_chunk_head(out: &mut impl BufMut, cookie: u64, offset: u64, length: u32, done: bool) {
    put_chunk(out, cookie, chunk::OFFSET_DATA, length.saturating_add(8), done);
    out.put_u64(offset);
}

/// A chunk that says: `length` zeros from `offset`.
pub fn put_hole_chunk(out: &mut impl BufMut, cookie: u64, offset: u64, length: u32, done: bool) {
    put_chunk(out, cookie, chunk::OFFSET_HOLE, 12, done);
    out.put_u64(offset);
    out.put_u32(length);
}

/// One extent of a block-status reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusDescriptor {
    pub length: u32,
    pub hole: bool,
}

/// A whole block-status reply for `base:allocation`.
pub fn put_status_chunk(out: &mut impl BufMut, cookie: u64, extents: &[StatusDescriptor]) {
    let length = u32::try_from(4 + 8 * extents.len()).unwrap_or(u32::MAX);
    put_chunk(out, cookie, chunk::BLOCK_STATUS, length, true);
    out.put_u32(CONTEXT_ALLOCATION_ID);
    for extent in extents {
        out.put_u32(extent.length);
        out.put_u32(if extent.hole { STATE_HOLE_ZERO } else { 0 });
    }
}

/// The end of a structured reply that failed, with a sentence for whoever debugs the client.
pub fn put_error_chunk(out: &mut impl BufMut, cookie: u64, error: Errno, message: &str) {
    let message = &message.as_bytes()[..message.floor_char_boundary(MESSAGE_BYTES_MAX)];
    let length = u16::try_from(message.len()).unwrap_or(0);
    put_chunk(out, cookie, chunk::ERROR, 6 + u32::from(length), true);
    out.put_u32(error.code());
    out.put_u16(length);
    out.put_slice(message);
}

fn put_chunk(out: &mut impl BufMut, cookie: u64, kind: u16, length: u32, done: bool) {
    out.put_u32(CHUNK_MAGIC);
    out.put_u16(if done { chunk::DONE } else { 0 });
    out.put_u16(kind);
    out.put_u64(cookie);
    out.put_u32(length);
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOKIE: u64 = 0x0102_0304_0506_0708;

    #[test]
    fn golden_bytes() {
        let check = |put: &dyn Fn(&mut Vec<u8>), expected: &[&[u8]]| {
            let mut out = Vec::new();
            put(&mut out);
            assert_eq!(out, expected.concat());
        };
        let cookie = &COOKIE.to_be_bytes()[..];
        check(&|out| put_simple(out, COOKIE, None), &[b"\x67\x44\x66\x98\0\0\0\0", cookie]);
        check(&|out| put_simple(out, COOKIE, Some(Errno::NoSpace)), &[b"\x67\x44\x66\x98\0\0\0\x1c", cookie]);
        check(
            &|out| put_data_chunk_head(out, COOKIE, 0x1000, 0x200, true),
            &[b"\x66\x8e\x33\xef\0\x01\0\x01", cookie, b"\0\0\x02\x08\0\0\0\0\0\0\x10\0"],
        );
        check(
            &|out| put_hole_chunk(out, COOKIE, 0x1000, 0x200, false),
            &[b"\x66\x8e\x33\xef\0\0\0\x02", cookie, b"\0\0\0\x0c\0\0\0\0\0\0\x10\0\0\0\x02\0"],
        );
        check(
            &|out| {
                let extents = [
                    StatusDescriptor { length: 0x1000, hole: false },
                    StatusDescriptor { length: 0x2000, hole: true },
                ];
                put_status_chunk(out, COOKIE, &extents);
            },
            &[
                b"\x66\x8e\x33\xef\0\x01\0\x05",
                cookie,
                b"\0\0\0\x14\0\0\0\x01\0\0\x10\0\0\0\0\0\0\0\x20\0\0\0\0\x03",
            ],
        );
        check(
            &|out| put_error_chunk(out, COOKIE, Errno::Io, "no"),
            &[b"\x66\x8e\x33\xef\0\x01\x80\x01", cookie, b"\0\0\0\x08\0\0\0\x05\0\x02no"],
        );
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let mut out = Vec::new();
        put_error_chunk(&mut out, COOKIE, Errno::Io, &"ä".repeat(400));
        assert_eq!(out.len(), 20 + 6 + MESSAGE_BYTES_MAX);
        let mut out = Vec::new();
        put_error_chunk(&mut out, COOKIE, Errno::Io, &format!("a{}", "ä".repeat(400)));
        assert_eq!(out.len(), 20 + 6 + MESSAGE_BYTES_MAX - 1);
    }
}
