//! Discards and write-zeroes: ranges without bytes, which are not part of a chunk.
//!
//! Not here: the order of requests (`read`).

use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_device::{Operation, Reply, Request, Result};

use super::{Batch, Item, ResendQueue};

/// A discard or write-zeroes in flight.
pub(super) struct Range {
    pub(super) operation: Operation,
    pub(super) address: u64,
    pub(super) length: u64,
    pub(super) no_unmap: bool,
    request: Mutex<Option<Request>>,
}

impl Batch {
    /// Puts a range into a write queue. Others of the same bytes wait until it is acknowledged.
    pub(super) fn hand_range(
        &self,
        resend_queue: &mut ResendQueue,
        queue: usize,
        request: Request,
    ) {
        let (address, length) = (request.address, request.length);
        // Under the lock of the waiting requests, which the caller holds: no other change of these
        // bytes gets past it from here on.
        resend_queue.ranges.push((address, address + length));
        let range = Range {
            operation: request.operation,
            address,
            length,
            no_unmap: request.flags.no_unmap,
            request: Mutex::new(Some(request)),
        };
        let shared = &self.queues[queue];
        let mut writes = shared.writes.lock();
        writes.last_number += 1;
        let number = writes.last_number;
        writes.ready.push_back((number, Item::Range(Arc::new(range))));
        shared.writes_wakeup.notify_one();
    }

    /// Answers a range that the driver has completed, and lets requests that waited for it go on.
    pub(super) fn complete_range(&self, range: &Range, outcome: Result<()>) {
        {
            let mut waiting = self.queue.lock();
            let ended = (range.address, range.address + range.length);
            // Before the answer: the user may submit the next request for these bytes at once, and
            // it must not wait for a range that is done.
            if let Some(at) = waiting.ranges.iter().position(|range| *range == ended) {
                waiting.ranges.swap_remove(at);
            }
        }
        match range.request.lock().take() {
            // The driver has it, and it is durable when the flush completes.
            Some(request) if request.flags.fua && outcome.is_ok() => self.flush(Some(request)),
            Some(request) => request.complete(outcome.map(|()| Reply::Done)),
            None => {}
        }
        self.resume_waiting();
    }
}
