//! One request in flight: the exchange that a device fills, empties and completes.
//!
//! Invariant: completing a ticket sends exactly one answer, with one system call, and never blocks.
//! Not here: seeks (`seek`), which query the device several times.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustix::io::Errno;
use sawmill_device::{Error, ErrorKind, Exchange, Outcome, Reply};

use super::answer::{head, written};
use super::channel::KernelChannel;

/// The bytes of a request.
pub(super) enum Body {
    /// Neither payload nor data.
    Empty,
    /// The payload of a write: `length` bytes from `start` on.
    Write { bytes: Vec<u8>, start: usize, length: usize },
    /// The buffer for the data of a read.
    Read { bytes: Vec<u8> },
}

impl Body {
    /// What it counts against the limit of bytes in flight.
    fn charged_bytes(&self) -> u64 {
        match self {
            Body::Empty => 0,
            // A long payload keeps its whole buffer.
            Body::Write { bytes, .. } | Body::Read { bytes } => bytes.len() as u64,
        }
    }
}

/// One request in flight.
pub(super) struct Ticket {
    channel: Arc<KernelChannel>,
    unique: u64,
    charged_bytes: u64,
    body: Body,
}

impl Ticket {
    pub(super) fn new(channel: &Arc<KernelChannel>, unique: u64, body: Body) -> Box<Self> {
        let charged_bytes = body.charged_bytes();
        channel.begin(charged_bytes);
        Box::new(Ticket { channel: channel.clone(), unique, charged_bytes, body })
    }
}

/// The errno for this error, whose text goes to the log: the kernel accepts no text.
pub(super) fn errno_of(channel: &KernelChannel, error: &Error) -> i32 {
    let number = channel.counters.errors.fetch_add(1, Relaxed) + 1;
    // A device that fails fails often: log it less and less.
    if number.is_power_of_two() {
        tracing::warn!(%error, number, "fuse: a request failed");
    }
    errno(error.kind())
}

/// The errno that a user of the file gets for a request that failed in this way, as a positive
/// number.
#[must_use]
pub fn errno(kind: ErrorKind) -> i32 {
    match kind {
        // Users of a file know EROFS. The default, EPERM, is what NBD prescribes, and here would
        // look like missing rights.
        ErrorKind::ReadOnly => Errno::ROFS.raw_os_error(),
        kind => kind.errno(),
    }
}

impl Exchange for Ticket {
    #[inline]
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        if let Body::Write { bytes, start, length } = &self.body {
            let payload = &bytes[*start..*start + *length];
            into.copy_from_slice(&payload[offset as usize..][..into.len()]);
        }
    }

    #[inline]
    fn buffer(&mut self) -> &mut [u8] {
        match &mut self.body {
            Body::Read { bytes } => bytes,
            Body::Empty | Body::Write { .. } => &mut [],
        }
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let Ticket { channel, unique, charged_bytes, body } = *self;
        match (outcome, &body) {
            (Ok(Reply::Done), Body::Read { bytes }) => {
                channel.counters.bytes_out.fetch_add(bytes.len() as u64, Relaxed);
                channel.send(&[&head(unique, 0, bytes.len()), bytes]);
            }
            (Ok(Reply::Done), Body::Write { length, .. }) => {
                channel.send(&[&written(unique, *length as u32)])
            }
            (Ok(Reply::Done), Body::Empty) => channel.send_status(unique, 0),
            (Ok(Reply::Allocation(_)), _) => {
                let text = "the device answered with the wrong kind of reply";
                channel.send_status(
                    unique,
                    errno_of(&channel, &Error::new(ErrorKind::Internal, text)),
                );
            }
            (Err(error), _) => channel.send_status(unique, errno_of(&channel, &error)),
        }
        // A read has a buffer of its own length, which fits few later requests.
        if let Body::Write { bytes, .. } = body {
            channel.keep(bytes);
        }
        channel.end(charged_bytes);
    }
}
