//! One request in flight: the exchange a device fills, empties and completes.
//!
//! Invariants: the segments were checked against this very memory, which stays mapped as long as the ticket
//! lives; completing a ticket answers exactly one request and never waits for the guest. Not here: what the
//! request asked for, and how the guest hears of it.

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
    /// Bytes that a read brings; zero for everything else.
    pub(super) read_bytes: usize,
    /// What the request counts against the queue's limit.
    pub(super) charged_bytes: u64,
    /// The place of a read's data, made when the device asks for it.
    pub(super) buffer: Vec<u8>,
    /// A payload could not be had: never so, by the first invariant.
    pub(super) damaged: bool,
}

impl Exchange for Ticket {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let payload = &self.chain.readable;
        let copied = self.queue.ring().memory.gather(payload, HEADER_BYTES.saturating_add(offset), into);
        self.damaged |= copied.is_err();
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
            Ok(_) if !self.damaged && data.len() == self.read_bytes => Status::Ok,
            Ok(_) => {
                tracing::error!(
                    head = self.head,
                    "vhost-user: the device completed a request without all of its data"
                );
                Status::Failed
            }
            Err(error) => {
                tracing::debug!(head = self.head, %error, "vhost-user: a request failed");
                Status::Failed
            }
        };
        self.answer(status, &data);
        self.queue.keep_buffer(data);
    }
}

impl Ticket {
    /// Tells the guest how it went; `data` goes where it wants to read it, if all is well.
    pub(super) fn answer(&self, status: Status, data: &[u8]) {
        let data = if status == Status::Ok { data } else { &[] };
        self.queue.answer(self, status, data);
    }
}
