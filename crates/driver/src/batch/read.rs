//! Reads, and the order of requests: a read follows the writes that it must see (read-after-write,
//! BUSE thesis, section 4.3.1).
//!
//! Invariants: `has_waiting` is set before a request looks for writes in its way, so it misses no
//! acknowledgment. Of two overlapping requests that wait, one of them a discard or write-zeroes,
//! the older one goes first.
//!
//! Not here: how the driver answers reads (`deliver`).

use std::sync::atomic::Ordering;

use sawmill_device::{Error, Operation, Request};

use super::areas::ChunkId;
use super::{Batch, ResendQueue};

/// Whether a request may proceed.
enum Turn {
    Now,
    /// Later; these chunks, if any, must be acknowledged first.
    Later(Vec<ChunkId>),
}

impl Batch {
    pub(super) fn read(&self, queue: usize, request: Request) {
        let end = request.address + request.length;
        // While requests wait, each one takes its turn under the lock. Otherwise a read could pass
        // a discard of its bytes that came before it.
        let may_wait = self.has_waiting.load(Ordering::SeqCst);
        if !may_wait && self.areas.on_the_way(request.address, end).is_empty() {
            return self.hand_read(queue, request);
        }
        self.wait_for_turn(queue, request);
    }

    /// Lets a request proceed when no other blocks it, now or later.
    pub(super) fn wait_for_turn(&self, queue: usize, request: Request) {
        let mut written = None;
        // A write in an open chunk would reach the driver only when the chunk is full or old. Its
        // chunk is closed below, so that this request does not wait for that.
        let in_the_way = {
            let mut waiting = self.queue.lock();
            // From now on, every acknowledgment checks the waiting requests.
            self.has_waiting.store(true, Ordering::SeqCst);
            match self.turn_of(&waiting, waiting.requests.len(), &request) {
                Turn::Now => {
                    written = self.go(&mut waiting, queue, request);
                    Vec::new()
                }
                Turn::Later(in_the_way) => {
                    waiting.requests.push_back((queue, request));
                    in_the_way
                }
            }
        };
        self.close_all_of(&in_the_way);
        self.note_waiting();
        if let Some(request) = written {
            self.complete_write(request);
        }
    }

    /// Something was acknowledged: lets requests proceed that waited for it.
    pub(super) fn resume_waiting(&self) {
        if !self.has_waiting.load(Ordering::SeqCst) {
            return;
        }
        let (mut in_the_way, mut written, mut at) = (Vec::new(), Vec::new(), 0);
        let mut waiting = self.queue.lock();
        while let Some((_, request)) = waiting.requests.get(at) {
            if let Turn::Later(chunks) = self.turn_of(&waiting, at, request) {
                in_the_way.extend(chunks);
                at += 1;
                continue;
            }
            let Some((queue, request)) = waiting.requests.remove(at) else { break };
            written.extend(self.go(&mut waiting, queue, request));
        }
        drop(waiting);
        self.close_all_of(&in_the_way);
        self.note_waiting();
        // Without a lock, because the answer to a write may submit the next request on this thread.
        for request in written {
            self.complete_write(request);
        }
    }

    /// Whether `request` may proceed, with `before` requests waiting before it.
    fn turn_of(&self, queue: &ResendQueue, before: usize, request: &Request) -> Turn {
        let (start, end) = (request.address, request.address + request.length);
        let is_range = is_range(request);
        let meets = |(from, to): &(u64, u64)| *from < end && start < *to;
        let is_behind = queue.requests.iter().take(before).any(|(_, other)| {
            (is_range || self::is_range(other))
                && meets(&(other.address, other.address + other.length))
        });
        // A write need not wait: its write number orders it after those in flight.
        let chunks = match request.operation {
            Operation::Write => Vec::new(),
            _ => self.areas.on_the_way(start, end),
        };
        if is_behind || queue.ranges.iter().any(meets) || !chunks.is_empty() {
            Turn::Later(chunks)
        } else {
            Turn::Now
        }
    }

    /// Sends a request to its queue; returns a write that must be completed.
    fn go(
        &self,
        resend_queue: &mut ResendQueue,
        queue: usize,
        request: Request,
    ) -> Option<Request> {
        match request.operation {
            Operation::Read => self.hand_read(queue, request),
            Operation::Write => return self.take_write(queue, request),
            _ => self.hand_range(resend_queue, queue, request),
        }
        None
    }

    /// Records whether requests must still check the waiting ones.
    fn note_waiting(&self) {
        let waiting = self.queue.lock();
        let has_waiting = !waiting.requests.is_empty() || !waiting.ranges.is_empty();
        self.has_waiting.store(has_waiting, Ordering::SeqCst);
    }

    fn hand_read(&self, queue: usize, request: Request) {
        let queue = &self.queues[queue];
        queue.reads.lock().ready.push_back(request);
        queue.reads_wakeup.notify_one();
    }

    /// Fails everything that waits, and the reads that no driver has.
    pub(super) fn fail_waiting_reads(&self, error: &Error) {
        let waiting = std::mem::take(&mut *self.queue.lock());
        let mut failed: Vec<Request> =
            waiting.requests.into_iter().map(|(_, request)| request).collect();
        for queue in &self.queues {
            let mut reads = queue.reads.lock();
            failed.extend(std::mem::take(&mut reads.ready));
            failed.extend(std::mem::take(&mut reads.again).into_iter().map(|(_, request)| request));
        }
        for request in failed {
            request.fail(error.clone());
        }
    }
}

fn is_range(request: &Request) -> bool {
    matches!(request.operation, Operation::Discard | Operation::WriteZeroes)
}
