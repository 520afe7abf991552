//! What is said on a keeper's socket: one packet each way, descriptors beside it.
//!
//! A packet is a magic word, a verb and, with some, a [`Handed`]: lengths as little-endian 32-bit numbers,
//! then bytes. Invariant: no length is believed before the packet is known to hold it. Not here: who says
//! what when.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::Handed;

const MAGIC: [u8; 4] = *b"SWK1";
/// More than any door's facts.
const PACKET_BYTES_MAX: usize = 16 << 10;
/// What one packet may carry of descriptors.
const DESCRIPTORS_MAX: usize = 4;

/// A packet.
#[derive(Debug)]
pub(super) enum Packet {
    /// Hold this, instead of what you held.
    Hold(Handed),
    /// Give me what you hold.
    Give,
    /// End.
    End,
    /// Leave this connection open until you end, so that I hear of it.
    Watch,
    /// Done.
    Done,
    /// Here it is.
    Here(Handed),
    /// There is nothing to hold any more.
    Nothing,
}

impl Packet {
    fn verb(&self) -> u8 {
        match self {
            Packet::Hold(_) => 1,
            Packet::Give => 2,
            Packet::End => 3,
            Packet::Done => 4,
            Packet::Here(_) => 5,
            Packet::Nothing => 6,
            Packet::Watch => 7,
        }
    }

    fn handed(&self) -> Option<&Handed> {
        match self {
            Packet::Hold(handed) | Packet::Here(handed) => Some(handed),
            Packet::Give | Packet::End | Packet::Watch | Packet::Done | Packet::Nothing => None,
        }
    }
}

fn push(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    to.extend_from_slice(bytes);
}

fn take<'a>(from: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, rest) = from.split_first_chunk::<4>()?;
    let (bytes, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    *from = rest;
    Some(bytes)
}

fn text(from: &mut &[u8]) -> Option<String> {
    String::from_utf8(take(from)?.to_vec()).ok()
}

/// The bytes of a packet; descriptors go beside them.
pub(super) fn encode(packet: &Packet) -> Vec<u8> {
    let mut to = MAGIC.to_vec();
    to.push(packet.verb());
    if let Some(handed) = packet.handed() {
        push(&mut to, handed.what.as_bytes());
        push(&mut to, &handed.bytes);
        for (name, value) in &handed.facts {
            push(&mut to, name.as_bytes());
            push(&mut to, value.as_bytes());
        }
    }
    to
}

/// Understands the bytes of a packet; `None` when they are none.
pub(super) fn decode(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Option<Packet> {
    let rest = bytes.strip_prefix(&MAGIC)?;
    let (verb, rest) = rest.split_first()?;
    let handed = || {
        let mut rest = rest;
        let (what, bytes) = (text(&mut rest)?, take(&mut rest)?.to_vec());
        let mut facts = std::collections::BTreeMap::new();
        while !rest.is_empty() {
            facts.insert(text(&mut rest)?, text(&mut rest)?);
        }
        Some(Handed { what, facts, bytes, descriptors })
    };
    Some(match verb {
        1 => Packet::Hold(handed()?),
        2 => Packet::Give,
        3 => Packet::End,
        4 => Packet::Done,
        5 => Packet::Here(handed()?),
        6 => Packet::Nothing,
        7 => Packet::Watch,
        _ => return None,
    })
}

/// Sends one packet.
pub(super) fn send(socket: impl AsFd, packet: &Packet) -> Result<(), Errno> {
    let bytes = encode(packet);
    let none = Vec::new();
    let descriptors = packet.handed().map_or(&none, |handed| &handed.descriptors);
    if bytes.len() > PACKET_BYTES_MAX || descriptors.len() > DESCRIPTORS_MAX {
        return Err(Errno::MSGSIZE);
    }
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(Errno::MSGSIZE);
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// Receives one packet. Errors: BADMSG when it cannot be understood, CONNRESET when there is none.
pub(super) fn receive(socket: impl AsFd) -> Result<Packet, Errno> {
    let mut bytes = vec![0; PACKET_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let flags = RecvFlags::CMSG_CLOEXEC;
        match recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::INTR) => (),
            other => break other?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            descriptors.extend(sent);
        }
    }
    if received.bytes == 0 {
        return Err(Errno::CONNRESET);
    }
    decode(&bytes[..received.bytes], descriptors).ok_or(Errno::BADMSG)
}
