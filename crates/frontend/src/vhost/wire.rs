//! Whole messages over the socket, with the descriptors that come along.
//!
//! Invariants: a message is received whole or the connection is broken; at most so many bytes and descriptors
//! are taken as the limits say. Not here: what they mean.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::Violation;
use super::message::{DESCRIPTORS_MAX, HEADER_BYTES, Header};
use super::options::MESSAGE_TIME_MAX;

/// Why a connection ended.
#[derive(Debug)]
pub(super) enum End {
    /// The frontend closed it.
    Closed,
    /// It broke in the middle of something.
    Broken(Errno),
    /// The frontend broke the protocol.
    Violation(Violation),
}

impl From<Violation> for End {
    fn from(violation: Violation) -> Self {
        End::Violation(violation)
    }
}

/// One message as it came.
pub(super) struct Received {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Bounds how long one message may take to come or to go.
pub(super) fn set_times(socket: &OwnedFd) -> rustix::io::Result<()> {
    set_socket_timeout(socket, Timeout::Recv, Some(MESSAGE_TIME_MAX))?;
    set_socket_timeout(socket, Timeout::Send, Some(MESSAGE_TIME_MAX))
}

/// The next message; to be called when there is one.
pub(super) fn receive(socket: &OwnedFd) -> Result<Received, End> {
    let mut head = [0; HEADER_BYTES];
    let mut descriptors = Vec::new();
    receive_all(socket, &mut head, &mut descriptors, true)?;
    let header = Header::parse(&head)?;
    let mut payload = vec![0; header.payload_bytes];
    receive_all(socket, &mut payload, &mut descriptors, false)?;
    Ok(Received { header, payload, descriptors })
}

fn receive_all(
    socket: &OwnedFd,
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    may_end: bool,
) -> Result<(), End> {
    let mut done = 0;
    while done < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes[done..])];
        let received = match recvmsg(socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => received,
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => return Err(End::Closed),
            Err(error) => return Err(End::Broken(error)),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                descriptors.extend(came);
            }
        }
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(Violation(format!("a message with {} descriptors", descriptors.len())).into());
        }
        match received.bytes {
            0 if done == 0 && may_end => return Err(End::Closed),
            0 => return Err(End::Broken(Errno::PIPE)),
            length => done += length,
        }
    }
    Ok(())
}

/// Sends a whole message, with a descriptor if there is one.
pub(super) fn send(socket: &OwnedFd, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<(), End> {
    let mut done = 0;
    while done < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let given: Vec<BorrowedFd<'_>> = descriptor.into_iter().filter(|_| done == 0).collect();
        if !given.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&given));
        }
        match sendmsg(socket, &[IoSlice::new(&bytes[done..])], &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(length) => done += length,
            Err(Errno::INTR) => (),
            Err(error) => return Err(End::Broken(error)),
        }
    }
    Ok(())
}
