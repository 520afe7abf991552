//! Flush: one item on every queue after all chunks there. The request completes when all items are
//! acknowledged (BUSE thesis, section 4.2.1); with `weak_flush` there are no items, and it
//! completes when the chunks are closed.
//!
//! Not here: when a chunk is closed otherwise (`write`), how the driver gets the items (`deliver`).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use sawmill_device::{Error, Reply, Request};

use super::{Batch, Item, Writes};

/// A flush in flight on all queues.
pub(super) struct Flush {
    left: AtomicUsize,
    request: Mutex<Option<Request>>,
    error: Mutex<Option<Error>>,
}

impl Batch {
    /// Flushes for a request, or without one (before a driver leaves).
    pub(super) fn flush(&self, request: Option<Request>) {
        if self.options.weak_flush {
            // A weak flush only orders: writes of later chunks get higher numbers. Failures of
            // earlier chunks are still reported.
            let mut failed = None;
            for (number, queue) in self.queues.iter().enumerate() {
                let mut writes = queue.writes.lock();
                self.close(number, &mut writes);
                failed = writes.failed.take().or(failed);
            }
            if let Some(request) = request {
                request.complete(failed.map_or(Ok(Reply::Done), Err));
            }
            return;
        }
        let flush = Arc::new(Flush {
            left: AtomicUsize::new(self.queues.len()),
            request: Mutex::new(request),
            error: Mutex::default(),
        });
        for (at, queue) in self.queues.iter().enumerate() {
            let mut writes = queue.writes.lock();
            self.close(at, &mut writes);
            // Taken, so that one failure is reported by one flush (P78).
            if let Some(error) = writes.failed.take() {
                *flush.error.lock() = Some(error);
            }
            writes.last_number += 1;
            let number = writes.last_number;
            writes.ready.push_back((number, Item::Flush(Arc::clone(&flush))));
            queue.writes_wakeup.notify_one();
        }
    }

    /// The driver has acknowledged a flush on one queue, or failed it.
    pub(super) fn flushed(&self, flush: &Flush, outcome: Result<(), Error>) {
        if let Err(error) = outcome {
            *flush.error.lock() = Some(error);
        }
        if flush.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let Some(request) = flush.request.lock().take() else { return };
        // The writes of a failed chunk were completed long ago: their users learn of it here.
        let error = flush.error.lock().take();
        request.complete(error.map_or(Ok(Reply::Done), Err));
    }
}

impl Writes {
    /// A chunk failed: every flush that waits behind it fails; if none waits, the next flush fails,
    /// once.
    pub(super) fn note_failure(&mut self, chunk: u64, error: &Error) {
        let ready = self.ready.iter().filter(|(number, _)| *number > chunk).map(|(_, item)| item);
        let fetched = self.fetched.range(chunk..).map(|(_, (item, _))| item);
        let mut is_reported = false;
        for item in ready.chain(fetched) {
            if let Item::Flush(flush) = item {
                *flush.error.lock() = Some(error.clone());
                is_reported = true;
            }
        }
        if !is_reported {
            self.failed = Some(error.clone());
        }
    }
}
