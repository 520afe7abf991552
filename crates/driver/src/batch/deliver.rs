//! The driver's side: fetches commands and acknowledges them.
//!
//! Invariants: commands of a queue are fetched in order and acknowledged in any order. A driver may
//! fetch with several threads per queue. Not here: whether a driver is connected (`recover`).

use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::RwLockReadGuard;
use sawmill_device::{Error, ErrorKind, Operation, Result};
use sawmill_sys::ArenaPiece;

use super::chunk::ChunkEntry;
use super::{Batch, ChunkId, ClosedChunk, Item, Reads, Writes};
use crate::request_holder::State;

/// An item of a write queue.
pub enum Delivery {
    /// Writes.
    Chunk(Chunk),
    /// Everything delivered before on this queue must become durable. Acknowledge it with this
    /// number.
    Flush(u64),
    /// A range without bytes.
    Range(RangeCommand),
    /// Nothing more comes.
    End,
}

/// A discard or write-zeroes that the driver has: a range of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeCommand {
    /// The number for the acknowledgment.
    pub number: u64,
    /// `Discard` or `WriteZeroes`.
    pub operation: Operation,
    /// First byte.
    pub address: u64,
    /// Bytes; may be as many as the disk has.
    pub length: u64,
    /// The space must stay allocated.
    pub no_unmap: bool,
}

/// A write chunk that the driver has.
pub struct Chunk {
    /// The number for the acknowledgment.
    pub number: u64,
    chunk: Arc<ClosedChunk>,
}

impl Chunk {
    /// Its place in the queue's write memory.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.chunk.offset
    }

    /// The length in use: entries, room for more of them, and data.
    #[must_use]
    pub fn length(&self) -> usize {
        self.chunk.length
    }

    /// The last ordinal that was assigned when it was closed.
    #[must_use]
    pub fn horizon(&self) -> u64 {
        self.chunk.horizon
    }

    /// Its entries.
    #[must_use]
    pub fn entries(&self) -> &[ChunkEntry] {
        &self.chunk.entries
    }

    /// Its bytes: entries, then data.
    #[must_use]
    pub fn bytes(&self) -> impl Deref<Target = [u8]> + '_ {
        RwLockReadGuard::map(self.chunk.piece.read(), |piece: &ArenaPiece| &**piece)
    }
}

/// A read that the driver has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The number for the acknowledgment.
    pub number: u64,
    /// First byte on the disk.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// The place for its bytes in the queue's read memory.
    pub offset: usize,
}

impl Batch {
    /// The next item of a write queue, if there is one now.
    #[must_use]
    pub fn fetch_write_now(&self, queue: usize) -> Option<Delivery> {
        let mut writes = self.queues[queue].writes.lock();
        next_of(&mut writes)
    }

    /// The next item of a write queue. Blocks until there is one; `None` when the driver must stop
    /// (`RequestHolder::pause`).
    #[must_use]
    pub fn fetch_write(&self, queue: usize) -> Option<Delivery> {
        let age_max = self.options.chunk_age_max;
        let shared = &self.queues[queue];
        let mut writes = shared.writes.lock();
        loop {
            if self.state_cell.is_paused() {
                return None;
            }
            if let Some(delivery) = next_of(&mut writes) {
                return Some(delivery);
            }
            if self.state() != State::Running {
                return Some(Delivery::End);
            }
            let Some(open) = writes.open.as_ref().filter(|_| !age_max.is_zero()) else {
                shared.writes_wakeup.wait(&mut writes);
                continue;
            };
            let due = open.since + age_max;
            if due <= Instant::now() {
                self.close(queue, &mut writes);
            } else {
                shared.writes_wakeup.wait_until(&mut writes, due);
            }
        }
    }

    /// The driver has completed an item of a write queue: a chunk is applied, or a flush is done.
    ///
    /// # Errors
    /// `Invalid` for a number that was not delivered, or was already acknowledged.
    pub fn acknowledge_write(&self, queue: usize, number: u64, outcome: Result<()>) -> Result<()> {
        let item = {
            let mut writes = self.queues[queue].writes.lock();
            // The failure is noted under the same lock: a flush that is queued in between would
            // otherwise report a success that it does not have (P78).
            let item = writes.fetched.remove(&number);
            if let (Some((Item::Chunk(_), _)), Err(error)) = (&item, &outcome) {
                tracing::error!("the writes of a chunk are lost; the next flush fails: {error}");
                writes.note_failure(number, error);
            }
            item
        };
        match item {
            Some((Item::Flush(flush), _)) => self.flushed(&flush, outcome),
            Some((Item::Range(range), _)) => self.complete_range(&range, outcome),
            Some((Item::Chunk(closed), _)) => self.settle(queue, closed),
            None => {
                let text = format!("queue {queue} has no command with the number {number}");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        }
        Ok(())
    }

    /// The driver has this chunk: its memory is free, unless older writes of the same bytes are in
    /// flight.
    fn settle(&self, queue: usize, closed_chunk: Arc<ClosedChunk>) {
        let number = closed_chunk.number;
        // Before everything else, so that the next command carries a floor that lets the driver
        // forget what it remembers of this chunk.
        self.ordinals.lock().open.remove(&closed_chunk.ordinal);
        let (mut kept_count, mut older, mut released) = (0, Vec::new(), Vec::new());
        for entry in &closed_chunk.entries {
            let settled = self.areas.acknowledge(entry.address, entry.write_number);
            kept_count += usize::from(settled.is_kept);
            older.extend(settled.older);
            released.extend(settled.released);
        }
        if kept_count > 0 {
            // Another thread may have released some already: the count may be negative for a while.
            self.keep(ChunkId { queue, number }, Some(closed_chunk), kept_count as isize);
        } else {
            // Frees its memory before the stalled writes are tried.
            drop(closed_chunk);
        }
        for chunk in &released {
            self.keep(*chunk, None, -1);
        }
        self.close_all_of(&older);
        self.resume_stalled(queue);
        for chunk in released {
            self.resume_stalled(chunk.queue);
        }
        self.resume_waiting();
    }

    /// Counts how many writes of an acknowledged chunk are still needed; at zero the chunk is
    /// removed.
    fn keep(&self, chunk: ChunkId, closed_chunk: Option<Arc<ClosedChunk>>, by: isize) {
        let mut writes = self.queues[chunk.queue].writes.lock();
        let entry = writes.kept.entry(chunk.number).or_insert((None, 0));
        if closed_chunk.is_some() {
            entry.0 = closed_chunk;
        }
        entry.1 += by;
        if entry.1 == 0 {
            writes.kept.remove(&chunk.number);
        }
    }

    /// The next read of a queue, with room for its bytes. Blocks until there is one; `None` when
    /// the driver must leave.
    #[must_use]
    pub fn fetch_read(&self, queue: usize) -> Option<Read> {
        let shared = &self.queues[queue];
        let mut reads = shared.reads.lock();
        loop {
            if self.state_cell.is_paused() {
                return None;
            }
            if let Some(read) = self.next_read(&mut reads) {
                return Some(read);
            }
            if self.state() != State::Running && reads.ready.is_empty() && reads.again.is_empty() {
                return None;
            }
            shared.reads_wakeup.wait(&mut reads);
        }
    }

    /// The next read of a queue, if there is one, and room for it, now.
    #[must_use]
    pub fn fetch_read_now(&self, queue: usize) -> Option<Read> {
        self.next_read(&mut self.queues[queue].reads.lock())
    }

    pub(super) fn next_read(&self, reads: &mut Reads) -> Option<Read> {
        if reads.fetched.len() >= self.options.queue_depth as usize {
            return None;
        }
        let (number, request, piece) = match reads.again.pop_front() {
            Some((number, request)) => {
                let Some(piece) = reads.memory.lend(request.length as usize) else {
                    // Back to the front: later reads must not pass those that a former driver had
                    // (P73).
                    reads.again.push_front((number, request));
                    return None;
                };
                (number, request, piece)
            }
            None => {
                let length = reads.ready.front()?.length;
                let piece = reads.memory.lend(length as usize)?;
                reads.last_number += 1;
                (reads.last_number, reads.ready.pop_front()?, piece)
            }
        };
        let (address, length, offset) = (request.address, request.length, piece.offset());
        reads.fetched.insert(number, (request, piece, Instant::now()));
        Some(Read { number, address, length, offset })
    }

    /// Lets a driver in this process fill the bytes of a read.
    pub fn fill_read(&self, queue: usize, number: u64, fill: impl FnOnce(&mut [u8])) {
        let entry = self.queues[queue].reads.lock().fetched.remove(&number);
        let Some((request, mut piece, since)) = entry else { return };
        // Out of the list meanwhile, so that a driver that fills slowly holds no lock of the queue.
        fill(&mut piece);
        self.queues[queue].reads.lock().fetched.insert(number, (request, piece, since));
    }

    /// The driver has stored the bytes of a read, or failed.
    ///
    /// # Errors
    /// `Invalid` for a number that was not delivered, or was already acknowledged.
    pub fn acknowledge_read(&self, queue: usize, number: u64, outcome: Result<()>) -> Result<()> {
        let shared = &self.queues[queue];
        let Some((mut request, piece, _)) = shared.reads.lock().fetched.remove(&number) else {
            let text = format!("queue {queue} has no read with the number {number}");
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        match outcome {
            Ok(()) => {
                request.buffer().copy_from_slice(&piece);
                // Before the answer: its user may submit the next read at once, which needs a
                // place.
                drop(piece);
                request.done();
            }
            Err(error) => {
                drop(piece);
                request.fail(error);
            }
        }
        // There is room for another read.
        shared.reads_wakeup.notify_one();
        Ok(())
    }
}

pub(super) fn next_of(writes: &mut Writes) -> Option<Delivery> {
    let (number, item) = writes.ready.pop_front()?;
    // Listed before the driver can see it, because the answer may come at once.
    writes.fetched.insert(number, (item.clone(), Instant::now()));
    Some(match item {
        Item::Chunk(closed) => Delivery::Chunk(Chunk { number, chunk: closed }),
        Item::Flush(_) => Delivery::Flush(number),
        Item::Range(range) => Delivery::Range(RangeCommand {
            number,
            operation: range.operation,
            address: range.address,
            length: range.length,
            no_unmap: range.no_unmap,
        }),
    })
}
