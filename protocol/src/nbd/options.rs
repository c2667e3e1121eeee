//! The payloads of handshake options, taken apart.
//!
//! Invariants:
//! - A payload is accepted only if its inner lengths account for every byte of it.
//! - Names and queries over [`NAME_BYTES_MAX`] are told apart from malformed payloads, because the answers differ.

/// The longest name the protocol allows.
pub const NAME_BYTES_MAX: usize = 4096;
/// The longest option payload that is looked at: the longest name, and more queries or information requests than any
/// client sends. Longer ones are consumed unseen.
pub const OPTION_PAYLOAD_BYTES_MAX: usize = 16 * 1024;

/// Why a payload isn't acceptable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    Malformed,
    NameTooLong,
}

/// `INFO` and `GO`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InfoRequest<'a> {
    pub(super) name: &'a [u8],
    pub(super) wanted: Vec<u16>,
}

/// `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ContextRequest<'a> {
    pub(super) name: &'a [u8],
    pub(super) queries: Vec<&'a [u8]>,
}

pub(super) fn info_request(payload: &[u8]) -> Result<InfoRequest<'_>, Unfit> {
    let mut fields = Fields(payload);
    let name = fields.name()?;
    let count = usize::from(fields.u16()?);
    // The count is believed only once the bytes are there.
    if fields.0.len() != count * 2 {
        return Err(Unfit::Malformed);
    }
    let wanted = fields.0.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]])).collect();
    Ok(InfoRequest { name, wanted })
}

pub(super) fn context_request(payload: &[u8]) -> Result<ContextRequest<'_>, Unfit> {
    let mut fields = Fields(payload);
    let name = fields.name()?;
    let count = fields.u32()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        // Every query takes four bytes at least, so a false count ends here, soon.
        queries.push(fields.name()?);
    }
    if fields.0.is_empty() { Ok(ContextRequest { name, queries }) } else { Err(Unfit::Malformed) }
}

/// A cursor over a payload.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Unfit> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Unfit::Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u16(&mut self) -> Result<u16, Unfit> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(Unfit::Malformed)?;
        self.0 = rest;
        Ok(u16::from_be_bytes(*bytes))
    }

    fn u32(&mut self) -> Result<u32, Unfit> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(Unfit::Malformed)?;
        self.0 = rest;
        Ok(u32::from_be_bytes(*bytes))
    }

    fn name(&mut self) -> Result<&'a [u8], Unfit> {
        let length = self.u32()? as usize;
        let name = self.take(length)?;
        if name.len() > NAME_BYTES_MAX { Err(Unfit::NameTooLong) } else { Ok(name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(name: &[u8]) -> Vec<u8> {
        let mut out = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
        out.extend_from_slice(name);
        out
    }

    #[test]
    fn info_requests() {
        let check = |payload: &[u8], expected: Result<(&[u8], &[u16]), Unfit>| {
            let found = info_request(payload);
            let found = found.as_ref().map(|request| (request.name, request.wanted.as_slice()));
            assert_eq!(found.map_err(|&unfit| unfit), expected, "{payload:?}");
        };
        check(b"\0\0\0\x02ab\0\x01\0\x03", Ok((b"ab", &[3])));
        check(b"\0\0\0\0\0\0", Ok((b"", &[])));
        check(b"", Err(Unfit::Malformed));
        check(b"\0\0\0\x03ab\0\0", Err(Unfit::Malformed));
        check(b"\xff\xff\xff\xffab\0\0", Err(Unfit::Malformed));
        check(b"\0\0\0\0\0\x02\0\x01", Err(Unfit::Malformed));
        check(b"\0\0\0\0\0\0\0", Err(Unfit::Malformed));
        let long = [counted(&[b'x'; 5000]), vec![0, 0]].concat();
        check(&long, Err(Unfit::NameTooLong));
        let longest = [counted(&[b'x'; NAME_BYTES_MAX]), vec![0, 0]].concat();
        check(&longest, Ok((&[b'x'; NAME_BYTES_MAX], &[])));
    }

    #[test]
    fn context_requests() {
        let check = |payload: &[u8], expected: Result<&[&[u8]], Unfit>| {
            let found = context_request(payload);
            assert_eq!(found.as_ref().map(|r| r.queries.as_slice()).map_err(|&unfit| unfit), expected);
        };
        let with = |count: u32, rest: &[u8]| [&[0, 0, 0, 0], &count.to_be_bytes()[..], rest].concat();
        check(&with(0, b""), Ok(&[]));
        check(&with(1, &counted(b"base:")), Ok(&[b"base:"]));
        check(&with(2, &[counted(b"a"), counted(b"")].concat()), Ok(&[b"a", b""]));
        check(&with(2, &counted(b"a")), Err(Unfit::Malformed));
        check(&with(u32::MAX, &counted(b"a")), Err(Unfit::Malformed));
        check(&with(1, &[counted(b"a"), vec![0]].concat()), Err(Unfit::Malformed));
        check(&with(1, &counted(&[b'q'; 4097])), Err(Unfit::NameTooLong));
    }
}
