//! Whole messages over the socket, with their descriptors.
//!
//! Invariants: a message is received completely or the connection is broken. No more bytes and
//! descriptors are taken than the limits allow. Not here: their meaning.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::Violation;
use super::limits::MESSAGE_TIME_MAX;
use super::message::{DESCRIPTORS_MAX, HEADER_BYTES, Header};

/// Why a connection ended.
#[derive(Debug)]
pub(super) enum End {
    /// The frontend closed it.
    Closed,
    /// It broke in the middle of a message.
    Broken(Errno),
    /// The frontend broke the protocol.
    Violation(Violation),
}

impl From<Violation> for End {
    fn from(violation: Violation) -> Self {
        End::Violation(violation)
    }
}

/// One received message.
pub(super) struct WireMessage {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Limits the time for one message to arrive or to be sent.
pub(super) fn set_times(socket: &OwnedFd) -> rustix::io::Result<()> {
    set_socket_timeout(socket, Timeout::Recv, Some(MESSAGE_TIME_MAX))?;
    set_socket_timeout(socket, Timeout::Send, Some(MESSAGE_TIME_MAX))
}

/// The next message; call this when there is one.
pub(super) fn receive(socket: &OwnedFd) -> Result<WireMessage, End> {
    let mut head = [0; HEADER_BYTES];
    let mut descriptors = Vec::new();
    receive_all(socket, &mut head, &mut descriptors, true)?;
    let header = Header::parse(&head)?;
    let mut payload = vec![0; header.payload_bytes];
    receive_all(socket, &mut payload, &mut descriptors, false)?;
    Ok(WireMessage { header, payload, descriptors })
}

fn receive_all(
    socket: &OwnedFd,
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    may_end: bool,
) -> Result<(), End> {
    let mut done = 0;
    while done < bytes.len() {
        let received = match sawmill_sys::descriptors::receive(socket, &mut bytes[done..]) {
            Ok(received) => received,
            // A frontend that exits with unread replies resets the connection: an end like any
            // other.
            Err(Errno::CONNRESET) => return Err(End::Closed),
            Err(error) => return Err(End::Broken(error)),
        };
        descriptors.extend(received.descriptors);
        // A frontend must not use up this process's limit of open files.
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(Violation::new(format!(
                "a message with {} descriptors",
                descriptors.len()
            ))
            .into());
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
pub(super) fn send(
    socket: &OwnedFd,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(), End> {
    let mut done = 0;
    while done < bytes.len() {
        // It travels with the first byte.
        let descriptors = if done == 0 { descriptor.as_slice() } else { &[] };
        done += sawmill_sys::descriptors::send(socket, &bytes[done..], descriptors)
            .map_err(End::Broken)?;
    }
    Ok(())
}
