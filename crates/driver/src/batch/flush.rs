//! Flush: one item on every queue behind all chunks there; the request ends when all are acknowledged
//! (thesis section 4.2.1).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use sawmill_device::{Error, Reply, Request};

use super::{Batch, Item};

/// A flush on its way through all queues.
pub(super) struct Flush {
    left: AtomicUsize,
    request: Mutex<Option<Request>>,
    error: Mutex<Option<Error>>,
}

impl Batch {
    /// Flushes for a request, or for nobody (a driver that is to leave all behind it).
    pub(super) fn flush(&self, request: Option<Request>) {
        if self.options.weak_flush {
            for (number, queue) in self.queues.iter().enumerate() {
                self.close(number, &mut queue.writes.lock());
            }
            if let Some(request) = request {
                request.done();
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
            writes.last_number += 1;
            let number = writes.last_number;
            writes.ready.push_back((number, Item::Flush(Arc::clone(&flush))));
            queue.writes_bell.notify_one();
        }
    }

    /// One queue's driver has acknowledged a flush, or refused.
    pub(super) fn flushed(&self, flush: &Flush, outcome: Result<(), Error>) {
        if let Err(error) = outcome {
            *flush.error.lock() = Some(error);
        }
        if flush.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let Some(request) = flush.request.lock().take() else { return };
        // A chunk that failed was completed long ago: this is where its user hears of it, once.
        let failure = self.failure.lock().take();
        let error = flush.error.lock().take();
        request.complete(error.or(failure).map_or(Ok(Reply::Done), Err));
    }
}
