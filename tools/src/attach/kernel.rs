//! The kernel's NBD driver, over generic netlink.
//!
//! Invariants:
//! - One request at a time, and every one is answered or an error within [`ANSWER_WITHIN`].
//! - The sockets stay the caller's: the kernel takes references of its own.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use netlink_packet_core::{
    Emitable, NLM_F_ACK, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable,
};
use netlink_packet_generic::ctrl::nlas::{GenlCtrlAttrs, McastGrpAttrs};
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlFamily, GenlMessage};
use netlink_sys::protocols::NETLINK_GENERIC;
use netlink_sys::{AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket};
use rustix::io::Errno;

use super::message::{Connect, EVENTS, FAMILY, Notice, Request};

/// The kernel answers while it takes the request.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Why the kernel refused.
#[derive(Debug)]
pub(super) enum Refused {
    /// With this error number.
    Kernel(Errno),
    /// It could not be asked.
    Unheard(anyhow::Error),
}

pub(super) struct Kernel {
    socket: TokioSocket,
    family: u16,
    events_group: u32,
    sequence: u32,
}

impl Kernel {
    pub(super) async fn open() -> Result<Self> {
        let mut kernel = Self { socket: socket()?, family: 0, events_group: 0, sequence: 0 };
        kernel.resolve().await?;
        Ok(kernel)
    }

    /// What happens to devices, from now on.
    pub(super) fn events(&self) -> Result<Events> {
        let mut socket = socket()?;
        socket
            .socket_mut()
            .add_membership(self.events_group)
            .context("cannot listen to the kernel's NBD events")?;
        Ok(Events { socket })
    }

    pub(super) async fn connect(&mut self, connect: Connect) -> Result<(), Refused> {
        self.ask(Request::Connect(connect)).await
    }

    /// Offers connections in place of dead ones. The kernel takes as many as it needs and leaves the rest alone.
    pub(super) async fn offer(
        &mut self,
        index: u32,
        backend: &str,
        connections: &[OwnedFd],
    ) -> Result<(), Refused> {
        let sockets = numbers(connections).map_err(Refused::Unheard)?;
        self.ask(Request::Reconfigure { index, backend: backend.to_owned(), sockets }).await
    }

    /// True if the device is attached, and by this backend.
    pub(super) async fn is_attached(&mut self, index: u32, backend: &str) -> Result<bool> {
        let question = Request::Reconfigure { index, backend: backend.to_owned(), sockets: Vec::new() };
        match self.ask(question).await {
            Ok(()) => Ok(true),
            Err(Refused::Kernel(Errno::INVAL | Errno::NODEV)) => Ok(false),
            Err(Refused::Kernel(error)) => bail!("the kernel does not tell of its device {index}: {error}"),
            Err(Refused::Unheard(error)) => Err(error),
        }
    }

    pub(super) async fn disconnect(&mut self, index: u32) -> Result<(), Refused> {
        self.ask(Request::Disconnect { index }).await
    }

    async fn ask(&mut self, request: Request) -> Result<(), Refused> {
        let message = GenlMessage::new(
            netlink_packet_generic::GenlHeader { cmd: request.command(), version: request.version() },
            request,
            self.family,
        );
        self.exchange::<_, Notice>(message, |_| {}).await
    }

    /// The numbers that the kernel has given to the family and to its events.
    async fn resolve(&mut self) -> Result<()> {
        let question = GenlMessage::from_payload(GenlCtrl {
            cmd: GenlCtrlCmd::GetFamily,
            nlas: vec![GenlCtrlAttrs::FamilyName(FAMILY.to_owned())],
        });
        let (mut family, mut group) = (None, None);
        let result = self
            .exchange::<_, GenlCtrl>(question, |answer| {
                for attribute in answer.nlas {
                    if let GenlCtrlAttrs::FamilyId(id) = attribute {
                        family = Some(id);
                    } else if let GenlCtrlAttrs::McastGroups(groups) = attribute {
                        group = group.or_else(|| groups.iter().find_map(|group| events_group(group)));
                    }
                }
            })
            .await;
        match result {
            Ok(()) => {}
            Err(Refused::Kernel(Errno::NOENT)) => {
                bail!("this kernel has no NBD devices: run `modprobe nbd`")
            }
            Err(Refused::Kernel(error)) => bail!("the kernel does not tell of NBD: {error}"),
            Err(Refused::Unheard(error)) => return Err(error),
        }
        self.family = family.context("the kernel's answer names no NBD family")?;
        self.events_group = group.context("this kernel's NBD has no events: it is older than 4.14")?;
        Ok(())
    }

    /// Sends `message`; gives what is answered to `take`, until the kernel has acknowledged or refused it.
    async fn exchange<Q, A>(
        &mut self,
        message: GenlMessage<Q>,
        mut take: impl FnMut(A),
    ) -> Result<(), Refused>
    where
        Q: GenlFamily + Emitable + std::fmt::Debug,
        GenlMessage<Q>: NetlinkSerializable,
        GenlMessage<A>: NetlinkDeserializable,
        A: std::fmt::Debug,
    {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_ACK;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        let unheard =
            |error: io::Error| Refused::Unheard(anyhow!(error).context("cannot talk to the kernel's NBD"));
        self.socket.send(&bytes).await.map_err(unheard)?;
        loop {
            let received = tokio::time::timeout(ANSWER_WITHIN, self.socket.recv_from_full()).await;
            let Ok(received) = received else {
                return Err(Refused::Unheard(anyhow!(
                    "the kernel's NBD did not answer within {} s",
                    ANSWER_WITHIN.as_secs()
                )));
            };
            for answer in
                messages::<GenlMessage<A>>(&received.map_err(unheard)?.0).map_err(Refused::Unheard)?
            {
                if answer.header.sequence_number != self.sequence {
                    continue;
                }
                if let NetlinkPayload::Error(error) = answer.payload {
                    return match error.code {
                        None => Ok(()),
                        Some(code) => {
                            Err(Refused::Kernel(Errno::from_raw_os_error(code.get().wrapping_neg())))
                        }
                    };
                } else if let NetlinkPayload::InnerMessage(inner) = answer.payload {
                    take(inner.payload);
                }
            }
        }
    }
}

/// What happens to the kernel's NBD devices.
pub(super) struct Events {
    socket: TokioSocket,
}

impl Events {
    /// Drops what has come so far.
    pub(super) fn forget(&mut self) -> Result<()> {
        loop {
            match self.socket.socket_ref().recv_from_full() {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOBUFS) => {}
                Err(error) => return Err(error).context("cannot hear the kernel's NBD events"),
            }
        }
    }

    /// Waits until the device has lost a connection, or may have: what came too fast to be told counts as well.
    pub(super) async fn link_dead(&mut self, device: u32) -> Result<()> {
        loop {
            let received = match self.socket.recv_from_full().await {
                Ok((received, _)) => received,
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOBUFS) => return Ok(()),
                Err(error) => return Err(error).context("cannot hear the kernel's NBD events"),
            };
            for message in messages::<GenlMessage<Notice>>(&received)? {
                if let NetlinkPayload::InnerMessage(inner) = message.payload
                    && inner.payload == (Notice::LinkDead { index: device })
                {
                    return Ok(());
                }
            }
        }
    }
}

fn socket() -> Result<TokioSocket> {
    let open = || {
        let mut socket = TokioSocket::new(NETLINK_GENERIC)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        socket.socket_ref().connect(&SocketAddr::new(0, 0))?;
        io::Result::Ok(socket)
    };
    open().context("cannot open a netlink socket")
}

/// The descriptors, as the kernel wants to be told of them.
pub(super) fn numbers(connections: &[OwnedFd]) -> Result<Vec<u32>> {
    connections.iter().map(|fd| u32::try_from(fd.as_raw_fd()).context("a descriptor below 0")).collect()
}

fn events_group(attributes: &[McastGrpAttrs]) -> Option<u32> {
    let (mut ours, mut number) = (false, None);
    for attribute in attributes {
        match attribute {
            McastGrpAttrs::Name(name) => ours = name == EVENTS,
            McastGrpAttrs::Id(id) => number = Some(*id),
        }
    }
    number.filter(|_| ours)
}

/// All messages of one datagram.
fn messages<M: NetlinkDeserializable>(mut datagram: &[u8]) -> Result<Vec<NetlinkMessage<M>>> {
    let mut messages = Vec::new();
    while !datagram.is_empty() {
        let message = NetlinkMessage::<M>::deserialize(datagram)
            .context("the kernel's NBD says what this version does not understand")?;
        let length = usize::try_from(message.header.length).unwrap_or(usize::MAX).next_multiple_of(4);
        messages.push(message);
        datagram = datagram.get(length..).unwrap_or_default();
    }
    Ok(messages)
}
