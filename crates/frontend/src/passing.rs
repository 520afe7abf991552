//! Messages with open files, from one process to another over a Unix stream socket.
//!
//! The layout of a message is in `docs/format/hand_over.md`. The kernel takes 253 descriptors at a
//! time, so they travel in groups.
//!
//! Invariants: nothing after a message is taken from the socket. What a peer declares is allocated
//! only as it arrives. A descriptor that belongs to no message is closed. Not here: the meaning of
//! the bytes ([`pack`](crate::pack) is for pieces of doors).

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::descriptors::{self, DESCRIPTORS_MAX as GROUP_MAX};

/// The start of each message.
const MAGIC: [u8; 4] = *b"SWM1";
const HEAD_BYTES: usize = 16;
/// The step by which memory grows while a message of a declared length arrives.
const STEP_BYTES: usize = 1 << 20;

/// Sends one message. Waits as long as the stream's write timeout allows, for each call to the
/// kernel.
///
/// Errors: `Closed` if the peer is gone, `Unavailable` if it accepts nothing in time or the system
/// refuses. After an error, nothing more can be sent on the stream.
pub fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    let count = u32::try_from(descriptors.len())
        .map_err(|_| Error::new(ErrorKind::Invalid, "message: more than 4 billion descriptors"))?;
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&MAGIC);
    head[4..8].copy_from_slice(&count.to_le_bytes());
    head[8..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    // The kernel passes a limited number of descriptors with one call. Each further group needs a
    // byte to travel with.
    let mut groups = descriptors.chunks(GROUP_MAX);
    send_all(stream, &head, groups.next().unwrap_or_default())?;
    for group in groups {
        send_all(stream, &[0], group)?;
    }
    send_all(stream, bytes, &[])
}

/// Sends all bytes; the descriptors travel with the first of them.
fn send_all(
    stream: &UnixStream,
    mut bytes: &[u8],
    mut descriptors: &[BorrowedFd<'_>],
) -> Result<()> {
    while !bytes.is_empty() {
        let length =
            descriptors::send(stream, bytes, descriptors).map_err(|error| failed("sent", error))?;
        bytes = &bytes[length..];
        // Only with the first part: if they were given again, the peer would get each of them
        // twice.
        descriptors = &[];
    }
    Ok(())
}

/// Receives one message of at most `bytes_max` bytes and `descriptors_max` descriptors, which are
/// closed when this process executes another program. Waits like [`send`], by the stream's read
/// timeout.
///
/// Errors: `Closed` if the peer is gone; `Unavailable` if nothing arrives in time, the system
/// refuses, or this process has no room for the descriptors; `Invalid` for anything that is not a
/// message or exceeds a limit. After an error, nothing more can be received from the stream.
pub fn receive(
    stream: &UnixStream,
    bytes_max: usize,
    descriptors_max: usize,
) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut receiver = Receiver { stream, descriptors: Vec::new(), descriptors_max };
    let mut head = [0; HEAD_BYTES];
    receiver.fill(&mut head, "before a message")?;
    let [m0, m1, m2, m3, d0, d1, d2, d3, length @ ..] = head;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(invalid(format!("it starts with {:02x?} instead of {MAGIC:02x?}", &head[..4])));
    }
    let declared = u32::from_le_bytes([d0, d1, d2, d3]) as usize;
    let length = u64::from_le_bytes(length);
    if declared > descriptors_max {
        return Err(invalid(format!(
            "it has {declared} descriptors; {descriptors_max} is the limit"
        )));
    }
    let length = usize::try_from(length).ok().filter(|length| *length <= bytes_max);
    let length = length
        .ok_or_else(|| invalid(format!("it is longer than the limit of {bytes_max} bytes")))?;
    for _ in 1..declared.div_ceil(GROUP_MAX) {
        receiver.fill(&mut [0], "inside a message")?;
    }
    let mut bytes = Vec::new();
    while bytes.len() < length {
        let start = bytes.len();
        // In steps, because the length is only declared: a peer that sends no more costs one step
        // of memory.
        bytes.resize(length.min(start + STEP_BYTES), 0);
        receiver.fill(&mut bytes[start..], "inside a message")?;
    }
    if receiver.descriptors.len() != declared {
        let received_count = receiver.descriptors.len();
        return Err(invalid(format!(
            "it declares {declared} descriptors but has {received_count}"
        )));
    }
    Ok((bytes, receiver.descriptors))
}

struct Receiver<'a> {
    stream: &'a UnixStream,
    descriptors: Vec<OwnedFd>,
    descriptors_max: usize,
}

impl Receiver<'_> {
    /// Receives exactly `into`, and the descriptors that arrive with it.
    fn fill(&mut self, into: &mut [u8], place: &str) -> Result<()> {
        let mut filled = 0;
        while filled < into.len() {
            let received = descriptors::receive(self.stream, &mut into[filled..])
                .map_err(|error| failed("received", error))?;
            self.descriptors.extend(received.descriptors);
            // The kernel has dropped descriptors that do not fit into this process. They cannot be
            // asked for again.
            if received.descriptors_lost {
                let text = "message: cannot receive a descriptor: too many files are open; raise \
                            the limit (ulimit -n)";
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
            if self.descriptors.len() > self.descriptors_max {
                let text =
                    format!("it has more descriptors than the limit of {}", self.descriptors_max);
                return Err(invalid(text));
            }
            if received.bytes == 0 {
                let text = format!("message: the peer closed the connection {place}");
                return Err(Error::new(ErrorKind::Closed, text));
            }
            filled += received.bytes;
        }
        Ok(())
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::Invalid, format!("the other process sent an invalid message: {text}"))
}

fn failed(what: &str, error: Errno) -> Error {
    let (kind, text) = match error {
        Errno::AGAIN => (ErrorKind::Unavailable, "the peer did not respond in time".into()),
        Errno::PIPE | Errno::CONNRESET => {
            (ErrorKind::Closed, "the peer closed the connection".into())
        }
        Errno::TOOMANYREFS => (
            ErrorKind::Unavailable,
            "too many descriptors are in flight; raise the limit of open files (ulimit -n)".into(),
        ),
        error => (ErrorKind::Unavailable, error.to_string()),
    };
    Error::new(kind, format!("message: it could not be {what}: {text}")).with_source(error)
}
