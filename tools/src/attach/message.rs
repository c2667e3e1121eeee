//! What is said to the kernel about its NBD devices: the commands of the generic netlink family `nbd` and their attributes, as in
//! `linux/nbd-netlink.h`.
//!
//! Invariants:
//! - Only encodes and decodes. A message from the kernel that makes no sense is an error, never a panic.

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLA_F_NESTED, NlasIterator, ParseableParametrized, parse_u32,
};
use netlink_packet_generic::{GenlFamily, GenlHeader};

pub(super) const FAMILY: &str = "nbd";
pub(super) const EVENTS: &str = "nbd_mc_group";

const VERSION: u8 = 1;
const COMMAND_CONNECT: u8 = 1;
const COMMAND_DISCONNECT: u8 = 2;
const COMMAND_RECONFIGURE: u8 = 3;
const COMMAND_LINK_DEAD: u8 = 4;

const ATTRIBUTE_INDEX: u16 = 1;
const ATTRIBUTE_SIZE_BYTES: u16 = 2;
const ATTRIBUTE_BLOCK_SIZE_BYTES: u16 = 3;
const ATTRIBUTE_TIMEOUT: u16 = 4;
const ATTRIBUTE_SERVER_FLAGS: u16 = 5;
const ATTRIBUTE_CLIENT_FLAGS: u16 = 6;
const ATTRIBUTE_SOCKETS: u16 = 7;
const ATTRIBUTE_DEAD_CONNECTION_TIMEOUT: u16 = 8;
const ATTRIBUTE_BACKEND_IDENTIFIER: u16 = 10;
const SOCKET_ITEM: u16 = 1;
const SOCKET_FD: u16 = 1;

/// What a device is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Connect {
    pub index: u32,
    pub size_bytes: u64,
    pub block_bytes: u64,
    /// Without an answer for so long the kernel gives up a connection. `None`: it never does.
    pub timeout_s: Option<u64>,
    /// Without any connection for so long the device fails its requests.
    pub dead_connection_timeout_s: u64,
    pub server_flags: u64,
    /// Who attached it: only the same may give it new connections.
    pub backend: String,
    pub sockets: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Connect(Connect),
    /// Gives connections in place of dead ones. Without any it only asks whether the device is attached by this backend.
    Reconfigure {
        index: u32,
        backend: String,
        sockets: Vec<u32>,
    },
    Disconnect {
        index: u32,
    },
}

impl Request {
    fn attributes(&self) -> Vec<DefaultNla> {
        match self {
            Self::Connect(connect) => {
                let mut attributes = vec![
                    number32(ATTRIBUTE_INDEX, connect.index),
                    number64(ATTRIBUTE_SIZE_BYTES, connect.size_bytes),
                    number64(ATTRIBUTE_BLOCK_SIZE_BYTES, connect.block_bytes),
                    number64(ATTRIBUTE_DEAD_CONNECTION_TIMEOUT, connect.dead_connection_timeout_s),
                    number64(ATTRIBUTE_SERVER_FLAGS, connect.server_flags),
                    // Neither is the device destroyed when it is detached, nor detached when it is closed.
                    number64(ATTRIBUTE_CLIENT_FLAGS, 0),
                    text(ATTRIBUTE_BACKEND_IDENTIFIER, &connect.backend),
                    sockets(&connect.sockets),
                ];
                attributes.extend(connect.timeout_s.map(|timeout| number64(ATTRIBUTE_TIMEOUT, timeout)));
                attributes
            }
            Self::Reconfigure { index, backend, sockets: fds } => {
                let mut attributes =
                    vec![number32(ATTRIBUTE_INDEX, *index), text(ATTRIBUTE_BACKEND_IDENTIFIER, backend)];
                if !fds.is_empty() {
                    attributes.push(sockets(fds));
                }
                attributes
            }
            Self::Disconnect { index } => vec![number32(ATTRIBUTE_INDEX, *index)],
        }
    }
}

impl GenlFamily for Request {
    fn family_name() -> &'static str {
        FAMILY
    }

    fn command(&self) -> u8 {
        match self {
            Self::Connect(_) => COMMAND_CONNECT,
            Self::Reconfigure { .. } => COMMAND_RECONFIGURE,
            Self::Disconnect { .. } => COMMAND_DISCONNECT,
        }
    }

    fn version(&self) -> u8 {
        VERSION
    }
}

impl Emitable for Request {
    fn buffer_len(&self) -> usize {
        self.attributes().as_slice().buffer_len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        self.attributes().as_slice().emit(buffer);
    }
}

/// What the kernel says, unasked or in answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// A device has lost a connection.
    LinkDead { index: u32 },
    /// Nothing that matters here.
    Other,
}

impl ParseableParametrized<[u8], GenlHeader> for Notice {
    fn parse_with_param(attributes: &[u8], header: GenlHeader) -> Result<Self, DecodeError> {
        if header.cmd != COMMAND_LINK_DEAD {
            return Ok(Self::Other);
        }
        for attribute in NlasIterator::new(attributes) {
            let attribute = attribute?;
            if attribute.kind() == ATTRIBUTE_INDEX {
                return Ok(Self::LinkDead { index: parse_u32(attribute.value())? });
            }
        }
        Err(DecodeError::from("a dead link without its device"))
    }
}

fn number32(kind: u16, value: u32) -> DefaultNla {
    DefaultNla::new(kind, value.to_ne_bytes().to_vec())
}

fn number64(kind: u16, value: u64) -> DefaultNla {
    DefaultNla::new(kind, value.to_ne_bytes().to_vec())
}

fn text(kind: u16, value: &str) -> DefaultNla {
    let mut bytes = value.as_bytes().to_vec();
    bytes.push(0);
    DefaultNla::new(kind, bytes)
}

fn nested(kind: u16, inner: &[DefaultNla]) -> DefaultNla {
    let mut bytes = vec![0; inner.buffer_len()];
    inner.emit(&mut bytes);
    DefaultNla::new(kind | NLA_F_NESTED, bytes)
}

fn sockets(fds: &[u32]) -> DefaultNla {
    let items: Vec<_> = fds.iter().map(|&fd| nested(SOCKET_ITEM, &[number32(SOCKET_FD, fd)])).collect();
    nested(ATTRIBUTE_SOCKETS, &items)
}

#[cfg(all(test, target_endian = "little"))]
mod tests {
    use super::*;

    fn bytes(request: &Request) -> Vec<u8> {
        let mut bytes = vec![0; request.buffer_len()];
        request.emit(&mut bytes);
        bytes
    }

    #[test]
    fn a_reconfiguration_nests_its_sockets() {
        let request = Request::Reconfigure { index: 3, backend: "a".to_owned(), sockets: vec![7, 9] };
        assert_eq!(request.command(), 3);
        let expected: Vec<u8> = [
            &[8, 0, 1, 0, 3, 0, 0, 0][..],             // index
            &[6, 0, 10, 0, b'a', 0, 0, 0],             // backend, padded
            &[28, 0, 7, 0x80],                         // sockets
            &[12, 0, 1, 0x80, 8, 0, 1, 0, 7, 0, 0, 0], // item, descriptor
            &[12, 0, 1, 0x80, 8, 0, 1, 0, 9, 0, 0, 0],
        ]
        .concat();
        assert_eq!(bytes(&request), expected);
    }

    #[test]
    fn a_question_has_no_sockets() {
        let request = Request::Reconfigure { index: 0, backend: String::new(), sockets: Vec::new() };
        assert_eq!(bytes(&request), [8, 0, 1, 0, 0, 0, 0, 0, 5, 0, 10, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_timeout_is_told_only_if_there_is_one() {
        let connect = Connect {
            index: 0,
            size_bytes: 1 << 30,
            block_bytes: 4096,
            timeout_s: None,
            dead_connection_timeout_s: 60,
            server_flags: 1,
            backend: "b".to_owned(),
            sockets: vec![5],
        };
        let without = bytes(&Request::Connect(connect.clone()));
        let with = bytes(&Request::Connect(Connect { timeout_s: Some(30), ..connect }));
        assert_eq!(with.len(), without.len() + 12);
        assert!(with.ends_with(&[12, 0, 4, 0, 30, 0, 0, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn notices_are_told_apart_and_nonsense_is_an_error() {
        let parse =
            |command, bytes: &[u8]| Notice::parse_with_param(bytes, GenlHeader { cmd: command, version: 1 });
        assert_eq!(parse(4, &[8, 0, 1, 0, 2, 0, 0, 0]).unwrap(), Notice::LinkDead { index: 2 });
        assert_eq!(parse(1, &[8, 0, 1, 0, 2, 0, 0, 0]).unwrap(), Notice::Other);
        parse(4, &[]).unwrap_err();
        parse(4, &[255, 0, 1, 0]).unwrap_err();
        parse(4, &[6, 0, 1, 0, 2, 0]).unwrap_err();
    }
}
