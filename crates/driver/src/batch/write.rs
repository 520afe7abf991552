//! Writes into chunks.
//!
//! Invariants: a write is in a chunk and listed in `areas` before it completes, and completes
//! without a lock held. The writes of a queue that wait for memory start in order, and no later one
//! overtakes them.
//!
//! Not here: fetching chunks (`deliver`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use parking_lot::RwLock;
use sawmill_device::{Error, Request};

use super::chunk::{ChunkEntry, ENTRY_BYTES};
use super::{Batch, ChunkId, ClosedChunk, Item, Open, Writes};
use crate::request_holder::State;

impl Batch {
    pub(super) fn write(&self, queue: usize, request: Request) {
        if self.has_waiting.load(Ordering::SeqCst) {
            self.wait_for_turn(queue, request);
        } else if let Some(request) = self.take_write(queue, request) {
            self.complete_write(request);
        }
    }

    /// Accepts a write that nothing blocks; returns it if it must be completed.
    pub(super) fn take_write(&self, queue: usize, mut request: Request) -> Option<Request> {
        let mut writes = self.queues[queue].writes.lock();
        // After those that wait for memory, so that none is overtaken forever.
        if !writes.stalled.is_empty() || !self.place(queue, &mut writes, &mut request) {
            writes.stalled.push_back(request);
            return None;
        }
        Some(request)
    }

    /// Its bytes are in a chunk. Called without a lock: the user may submit the next request
    /// immediately.
    pub(super) fn complete_write(&self, request: Request) {
        if request.flags.fua {
            self.flush(Some(request));
        } else {
            request.done();
        }
    }

    /// Puts a write into the queue's open chunk, or into a new one. Returns false if there is no
    /// memory.
    fn place(&self, queue: usize, writes: &mut Writes, request: &mut Request) -> bool {
        let (start, end) = (request.address, request.address + request.length);
        let length = request.length as usize;
        let slots = self.areas.count(start, end);
        let metadata_bytes = self.options.metadata_bytes() as usize;
        let chunk_bytes = self.options.write_chunk_size as usize;
        let fits = |open: &Open| {
            open.data_end + length <= chunk_bytes
                && (open.entries.len() + slots) * ENTRY_BYTES <= metadata_bytes
        };
        if writes.open.as_ref().is_some_and(|open| !fits(open)) {
            self.close(queue, writes);
        }
        if writes.open.is_none() {
            let Some(piece) = self.queues[queue].write_memory.lend(chunk_bytes) else {
                return false;
            };
            writes.last_number += 1;
            let number = writes.last_number;
            let ordinal = self.ordinals.lock().next();
            let (entries, data_end, since) = (Vec::new(), metadata_bytes, Instant::now());
            writes.open = Some(Open { number, ordinal, piece, entries, data_end, since });
            // A thread that waits for work must now watch the age of this chunk.
            self.queues[queue].writes_wakeup.notify_one();
        }
        let Some(open) = &mut writes.open else { return false };
        // The only copy of the payload on its way to the driver: the chunk lies in memory that both
        // processes have.
        request.fill(0, &mut open.piece[open.data_end..open.data_end + length]);
        let chunk = ChunkId { queue, number: open.number };
        for (start, end) in self.areas.parts(start, end) {
            let write_number = self.areas.list(start, end, chunk, open.data_end);
            let entry = ChunkEntry { address: start, length: end - start, write_number };
            let at = open.entries.len() * ENTRY_BYTES;
            open.piece[at..at + ENTRY_BYTES].copy_from_slice(&entry.encode());
            open.entries.push(entry);
            open.data_end += (end - start) as usize;
        }
        let is_full =
            open.data_end == chunk_bytes || open.entries.len() * ENTRY_BYTES == metadata_bytes;
        // The device started to end while this waited: no later write would close the chunk.
        if is_full || self.state() == State::Ending {
            self.close(queue, writes);
        }
        true
    }

    /// Closes the open chunk, if there is one, so that it can be fetched.
    pub(super) fn close(&self, queue: usize, writes: &mut Writes) {
        let Some(open) = writes.open.take() else { return };
        let Open { number, ordinal, piece, entries, data_end: length, .. } = open;
        // A chunk that is opened after this has newer writes only. Those up to the horizon may hold
        // older ones.
        let (offset, horizon) = (piece.offset(), self.ordinals.lock().last);
        let closed = ClosedChunk {
            number,
            ordinal,
            horizon,
            length,
            entries,
            offset,
            piece: RwLock::new(piece),
        };
        writes.ready.push_back((number, Item::Chunk(Arc::new(closed))));
        self.queues[queue].writes_wakeup.notify_one();
    }

    /// Closes those of these chunks that are open: a request waits for them.
    pub(super) fn close_all_of(&self, chunks: &[ChunkId]) {
        for chunk in chunks {
            let mut writes = self.queues[chunk.queue].writes.lock();
            // The chunk may have been closed since it was found, and another one may be open.
            if writes.open.as_ref().is_some_and(|open| open.number == chunk.number) {
                self.close(chunk.queue, &mut writes);
            }
        }
    }

    /// Memory was freed: resumes the writes that wait for it, in order.
    pub(super) fn resume_stalled(&self, queue: usize) {
        let mut placed = Vec::new();
        {
            let mut writes = self.queues[queue].writes.lock();
            while let Some(mut request) = writes.stalled.pop_front() {
                // The first that does not fit ends this, also if a shorter one behind it would fit.
                if !self.place(queue, &mut writes, &mut request) {
                    writes.stalled.push_front(request);
                    break;
                }
                placed.push(request);
            }
        }
        for request in placed {
            self.complete_write(request);
        }
    }

    /// No memory will be freed any more.
    pub(super) fn fail_stalled(&self, error: &Error) {
        for queue in &self.queues {
            let stalled = std::mem::take(&mut queue.writes.lock().stalled);
            for request in stalled {
                request.fail(error.clone());
            }
        }
    }
}
