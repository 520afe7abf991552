//! One request in flight: its bytes, and its outcome.
//!
//! Invariants: a tag is answered only when its ticket is gone, so no byte moves for a tag after
//! that. A write whose bytes cannot be read is never logged. Not here: the queue's thread, which
//! notifies the kernel.

use std::sync::Arc;

use rustix::io::Errno;
use sawmill_device::{Exchange, Outcome, Reply};

use super::channel::{Body, CopyMode, QueueChannel};
use super::protocol::errno;

/// One request in flight.
pub(super) struct Ticket {
    pub(super) channel: Arc<QueueChannel>,
    pub(super) tag: u16,
    pub(super) body: Body,
    /// The buffer for the data of a read. If the kernel copies, every tag has one, and it contains
    /// the payload of a write.
    pub(super) buffer: Vec<u8>,
}

const EIO: i32 = Errno::IO.raw_os_error();

/// Gives the bytes of a read to the kernel. Returns the result of the request.
fn copied(channel: &QueueChannel, tag: u16, bytes: &[u8]) -> i32 {
    let Err(error) = channel.char_device.write_data(channel.queue, tag, bytes) else {
        return bytes.len() as i32;
    };
    let queue = channel.queue;
    tracing::warn!(%error, queue, tag, "ublk: the kernel did not accept a read's data");
    -EIO
}

impl Exchange for Ticket {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        if self.channel.copy_mode == CopyMode::Kernel {
            let start = offset as usize;
            into.copy_from_slice(&self.buffer[start..start + into.len()]);
            return;
        }
        let device = &self.channel.char_device;
        if let Err(error) = device.read_payload(self.channel.queue, self.tag, offset, into) {
            // The kernel keeps a write's bytes until it is answered, which does not happen while
            // this ticket lives. If they are gone anyway, the device would log bytes that no user
            // wrote. A dead server loses nothing: the next one gets the write again.
            let (queue, tag) = (self.channel.queue, self.tag);
            tracing::error!(%error, queue, tag, offset, "ublk: cannot read a write's data; ending \
                the process");
            std::process::abort();
        }
    }

    fn buffer(&mut self) -> &mut [u8] {
        match self.body {
            Body::Read(length) => &mut self.buffer[..length as usize],
            Body::Empty | Body::Write(_) => &mut [],
        }
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let Ticket { channel, tag, body, buffer } = *self;
        let result = match (outcome, body) {
            (Ok(Reply::Done), Body::Empty) => 0,
            (Ok(Reply::Done), Body::Write(length)) => length as i32,
            (Ok(Reply::Done), Body::Read(length)) if channel.copy_mode == CopyMode::Kernel => {
                length as i32
            }
            // The bytes go before the answer, which ends the request: the kernel takes no data for
            // it afterward.
            (Ok(Reply::Done), Body::Read(length)) => {
                copied(&channel, tag, &buffer[..length as usize])
            }
            (Ok(Reply::Allocation(_)), _) => -EIO,
            (Err(error), _) => {
                // At this level only: the kernel logs a failed request itself.
                tracing::debug!(%error, queue = channel.queue, tag, "ublk: a request failed");
                -errno(error.kind())
            }
        };
        channel.answer(tag, result, body, buffer);
    }
}
