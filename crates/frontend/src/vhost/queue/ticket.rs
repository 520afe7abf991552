//! One request in flight: the exchange that a device fills, empties and completes.
//!
//! Invariants: the segments were checked against this very memory, which stays mapped as long as
//! the ticket lives. Completing a ticket answers exactly one request and never waits for the guest.
//! Not here: the content of the request, and how the guest is notified.

use std::sync::Arc;

use sawmill_device::{Exchange, Outcome};

use super::Queue;
use crate::vhost::protocol::{HEADER_BYTES, Status};
use crate::vhost::ring::Chain;

/// One request in flight.
pub(super) struct Ticket {
    pub(super) queue: Arc<Queue>,
    pub(super) head: u16,
    pub(super) chain: Chain,
    /// Bytes that a read returns; zero for everything else.
    pub(super) read_bytes: usize,
    /// What the request counts against the queue's limit.
    pub(super) charged_bytes: u64,
    /// The buffer for the data of a read, allocated when the device asks for it.
    pub(super) buffer: Vec<u8>,
    /// A payload could not be read; this never happens, by the first invariant.
    pub(super) is_damaged: bool,
}

impl Exchange for Ticket {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let payload = &self.chain.readable;
        let outcome =
            self.queue.ring().memory.gather(payload, HEADER_BYTES.saturating_add(offset), into);
        self.is_damaged |= outcome.is_err();
    }

    fn buffer(&mut self) -> &mut [u8] {
        if self.buffer.is_empty() && self.read_bytes > 0 {
            self.buffer = self.queue.spare_buffer(self.read_bytes);
        }
        &mut self.buffer
    }

    fn complete(mut self: Box<Self>, outcome: Outcome) {
        let data = std::mem::take(&mut self.buffer);
        let status = match &outcome {
            Ok(_) if !self.is_damaged && data.len() == self.read_bytes => Status::Ok,
            Ok(_) => {
                tracing::error!(
                    head = self.head,
                    "vhost-user: the device completed a request without all of its data"
                );
                Status::Failed
            }
            Err(error) => {
                tracing::debug!(head = self.head, %error, "vhost-user: a request failed");
                Status::from(error.kind())
            }
        };
        self.answer(status, &data);
        self.queue.keep_buffer(data);
    }
}

impl Ticket {
    /// Answers the request; if it succeeded, `data` goes where the guest wants to read it.
    pub(super) fn answer(&self, status: Status, data: &[u8]) {
        let data = if status == Status::Ok { data } else { &[] };
        self.queue.answer(self, status, data);
    }
}
