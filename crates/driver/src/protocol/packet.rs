//! The socket: whole packets, with open files.
//!
//! Invariants: a packet arrives whole or not at all; open files of a refused packet are closed.
//!
//! Not here: the bytes of a packet (`control`, `command`), the system calls that pass files
//! (`sawmill_sys::descriptors`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown,
    socket_with, socketpair,
};
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::descriptors;

/// The longest packet.
pub const PACKET_BYTES_MAX: usize = 65_536;
/// The most open files of one packet.
const DESCRIPTORS_MAX: usize = 4;

/// One end of a packet socket. Sending and receiving block; any number of threads may do either.
pub struct PacketSocket(OwnedFd);

/// A received packet.
pub struct Packet<'a> {
    /// Its bytes.
    pub bytes: &'a [u8],
    /// Open files that arrived with it.
    pub descriptors: Vec<OwnedFd>,
}

impl PacketSocket {
    /// Connects to the listener at `path`.
    ///
    /// # Errors
    /// `NotFound` if nothing listens there, `Denied`, `Unavailable`.
    pub fn connect(path: &Path) -> Result<Self> {
        Self::connect_within(path, None)
    }

    /// As [`connect`](Self::connect). To connect, and then to send or receive a packet, takes no
    /// longer than `patience` each.
    ///
    /// # Errors
    /// As `connect`; `TimedOut`.
    pub fn connect_within(path: &Path, patience: Option<Duration>) -> Result<Self> {
        let failed = |error: Errno| {
            let kind = match error {
                // A host that was killed leaves its socket file, and a connection to that is
                // refused.
                Errno::NOENT | Errno::CONNREFUSED => ErrorKind::NotFound,
                // A time limit of a socket ends like this.
                Errno::AGAIN => ErrorKind::TimedOut,
                _ => ErrorKind::of_io(&error.into()),
            };
            Error::caused(kind, format!("cannot connect to the host at {}", path.display()), error)
        };
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let flags = SocketFlags::CLOEXEC;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed)?;
        for direction in [Timeout::Send, Timeout::Recv] {
            set_socket_timeout(&socket, direction, patience).map_err(failed)?;
        }
        connect(&socket, &address).map_err(failed)?;
        Ok(PacketSocket(socket))
    }

    /// The two ends of a new connection.
    ///
    /// # Errors
    /// `Unavailable` if this process is out of descriptors.
    pub fn pair() -> Result<(Self, Self)> {
        let (one, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|error| {
                    Error::caused(
                        ErrorKind::Unavailable,
                        "cannot create a socket for a driver",
                        error,
                    )
                })?;
        Ok((PacketSocket(one), PacketSocket(other)))
    }

    /// Sends one packet. Blocks until there is room.
    ///
    /// # Errors
    /// `Closed` if the peer is gone.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        match descriptors::send(&self.0, bytes, descriptors) {
            Ok(_) => Ok(()),
            Err(error @ Errno::INVAL) => {
                let text = "too many open files for one packet";
                Err(Error::new(ErrorKind::Internal, text).with_source(error))
            }
            Err(error) => Err(gone(error)),
        }
    }

    /// The next packet, in this buffer of [`PACKET_BYTES_MAX`] bytes. Blocks until there is one;
    /// `None` if the peer has closed its end.
    ///
    /// # Errors
    /// `Closed` if the connection broke; `Invalid` for a packet that is too long.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> Result<Option<Packet<'a>>> {
        let received = loop {
            match descriptors::receive(&self.0, buffer) {
                // The peer left without reading everything: reported once, before what it had sent.
                Err(Errno::CONNRESET) => {}
                other => break other.map_err(gone)?,
            }
        };
        // A packet without all of its bytes or files would be taken for another one.
        let too_many = received.descriptors_lost || received.descriptors.len() > DESCRIPTORS_MAX;
        if received.is_cut || too_many {
            return Err(Error::new(ErrorKind::Invalid, "a packet that is too long"));
        }
        // A packet socket reports the end as a packet without bytes, which is not a packet here.
        Ok((received.bytes > 0).then_some(Packet {
            bytes: &buffer[..received.bytes],
            descriptors: received.descriptors,
        }))
    }

    /// Whether the peer is gone, even if its last packets were not read yet.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        // A hangup is reported without being asked for; packets that wait are of no interest here.
        let mut fds = [PollFd::new(&self.0, PollFlags::empty())];
        let no_wait = Timespec::default();
        matches!(poll(&mut fds, Some(&no_wait)), Ok(1..))
            && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Closes both directions: threads that wait here or at the peer notice.
    pub fn close_both_ways(&self) {
        // A connection that is already broken needs none.
        let _ = shutdown(&self.0, Shutdown::Both);
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for PacketSocket {
    fn from(socket: OwnedFd) -> Self {
        PacketSocket(socket)
    }
}

impl From<PacketSocket> for OwnedFd {
    fn from(socket: PacketSocket) -> Self {
        socket.0
    }
}

fn gone(error: Errno) -> Error {
    if error == Errno::AGAIN {
        let text = "the other side does not answer in time";
        return Error::caused(ErrorKind::TimedOut, text, error);
    }
    Error::caused(ErrorKind::Closed, "the other side is gone", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_keep_their_borders_and_their_files() {
        let (one, other) = PacketSocket::pair().unwrap();
        one.send(b"first", &[]).unwrap();
        one.send(b"second", &[one.as_fd(), other.as_fd()]).unwrap();
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        let first = other.receive(&mut buffer).unwrap().unwrap();
        assert_eq!((first.bytes, first.descriptors.len()), (&b"first"[..], 0));
        let second = other.receive(&mut buffer).unwrap().unwrap();
        assert_eq!((second.bytes, second.descriptors.len()), (&b"second"[..], 2));
        drop(one);
        // The file that traveled keeps the connection.
        drop(second);
        assert!(other.receive(&mut buffer).unwrap().is_none(), "the end is reported");
        assert_eq!(other.send(b"x", &[]).unwrap_err().kind(), ErrorKind::Closed);
    }

    #[test]
    fn a_packet_longer_than_the_buffer_is_refused() {
        let (one, other) = PacketSocket::pair().unwrap();
        one.send(&[1; 200], &[]).unwrap();
        let error = other.receive(&mut [0; 100]).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}
