//! A driver connects, leaves or dies, and the device ends (BUSE thesis, sections 4.4.3 to 4.4.5).
//!
//! | from | event | to |
//! |---|---|---|
//! | waiting | a driver connects ([`Batch::start`]) | running |
//! | running | it died or was disconnected ([`Batch::recover`]) | waiting |
//! | waiting, running | [`Batch::begin_end`]: the driver finishes what there is | ending |
//! | ending | the last item is acknowledged | ended |
//! | any | [`Batch::end_now`]: no driver will connect, everything that waits fails | ended |
//!
//! Invariants: the writes of all queues are locked while chunks are mended. What a former driver
//! had comes before everything else of its queue, in the order of its numbers. Completed writes are
//! dropped only by [`Batch::end_now`], never by [`Batch::fail_waiting`].
//!
//! Not here: how long to wait for a driver (`host`).

use std::collections::{BTreeMap, VecDeque};

use sawmill_device::{Error, ErrorKind, Result};

use super::areas::WriteEntry;
use super::{Batch, Item, Writes};

impl Batch {
    /// A driver is connected: delivers what waits.
    ///
    /// # Errors
    /// `InUse` if there is a driver already, `Closed` if the device has ended.
    pub fn start(&self) -> Result<()> {
        self.state_cell.start()?;
        self.notify();
        Ok(())
    }

    /// The driver is gone and does not touch the shared memory any more. Everything that it has not
    /// acknowledged is to be delivered again, with the newest acknowledged bytes (invariant 4 of
    /// `batch`).
    pub fn recover(&self) {
        self.state_cell.pause();
        self.notify();
        // All queues at once: the newer bytes may be in a chunk of another queue than the older
        // write.
        let mut all: Vec<_> = self.queues.iter().map(|queue| queue.writes.lock()).collect();
        for (newer, older) in self.areas.mend() {
            let bytes = overlap_bytes(&all[newer.chunk.queue], &newer, &older);
            mend(&mut all[older.chunk.queue], &newer, &older, &bytes);
        }
        for writes in &mut all {
            writes.kept.clear();
            let fetched = std::mem::take(&mut writes.fetched);
            writes.again_number =
                writes.again_number.max(fetched.keys().last().copied().unwrap_or_default());
            for (number, (item, _)) in fetched.into_iter().rev() {
                writes.ready.push_front((number, item));
            }
        }
        drop(all);
        for queue in &self.queues {
            let mut reads = queue.reads.lock();
            let fetched = std::mem::take(&mut reads.fetched);
            reads.again_number = reads.last_number;
            for (number, (request, _, _)) in fetched.into_iter().rev() {
                reads.again.push_front((number, request));
            }
            // A former driver may still see the old memory, and write to it. If there is no new
            // memory, the old one is used: a driver that is gone has no reason to write.
            if let Ok(memory) = super::read_memory(&self.options) {
                reads.memory = memory;
            }
        }
        // Chunks that were kept are free.
        for queue in 0..self.queues.len() {
            self.resume_stalled(queue);
        }
    }

    /// Ends the device cleanly: nothing new is accepted, everything accepted goes to the driver,
    /// and each queue ends after its last item.
    pub fn begin_end(&self) {
        let closed = Error::new(ErrorKind::Closed, "the device is being removed");
        // First: a write that comes behind the closing of the chunks below would otherwise stay in
        // an open one forever.
        self.state_cell.end();
        self.fail_stalled(&closed);
        for (number, queue) in self.queues.iter().enumerate() {
            self.close(number, &mut queue.writes.lock());
        }
        self.notify();
    }

    /// Whether everything accepted was acknowledged.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.queues.iter().all(|queue| {
            let writes = queue.writes.lock();
            let has_writes =
                writes.open.is_some() || !writes.ready.is_empty() || !writes.fetched.is_empty();
            drop(writes);
            let reads = queue.reads.lock();
            !has_writes
                && reads.ready.is_empty()
                && reads.again.is_empty()
                && reads.fetched.is_empty()
        })
    }

    /// Ends the device: everything that waits fails, and data that only shared memory holds is
    /// dropped.
    pub fn end_now(&self, error: &Error) {
        // First, so that no request is accepted behind those that fail here.
        self.state_cell.set_ended();
        self.fail_waiting(error);
        for queue in &self.queues {
            let mut writes = queue.writes.lock();
            writes.ready.clear();
            writes.fetched.clear();
        }
        self.notify();
    }

    /// Fails every request that waits. Completed writes stay, because a driver may connect for
    /// them.
    pub fn fail_waiting(&self, error: &Error) {
        self.fail_stalled(error);
        self.fail_waiting_reads(error);
        for queue in &self.queues {
            let mut writes = queue.writes.lock();
            let ready = std::mem::take(&mut writes.ready);
            let (chunks, others): (_, VecDeque<_>) =
                ready.into_iter().partition(|(_, item)| matches!(item, Item::Chunk(_)));
            // Chunks stay. Their writes were answered long ago, and only a driver can still save
            // them.
            writes.ready = chunks;
            let fetched = std::mem::take(&mut writes.fetched);
            let (chunks, remaining): (_, BTreeMap<_, _>) =
                fetched.into_iter().partition(|(_, (item, _))| matches!(item, Item::Chunk(_)));
            writes.fetched = chunks;
            drop(writes);
            // The answers below may submit new requests on this thread, which need this lock.
            let others = others.into_iter().map(|(_, item)| item);
            for item in others.chain(remaining.into_values().map(|(item, _)| item)) {
                match item {
                    Item::Flush(flush) => self.flushed(&flush, Err(error.clone())),
                    Item::Range(range) => self.complete_range(&range, Err(error.clone())),
                    Item::Chunk(_) => {}
                }
            }
            for (_, (request, _, _)) in std::mem::take(&mut queue.reads.lock().fetched) {
                request.fail(error.clone());
            }
        }
    }

    /// Wakes all threads that wait for work.
    pub(super) fn notify(&self) {
        for queue in &self.queues {
            // Under the lock, so that no thread is between checking and waiting.
            let writes = queue.writes.lock();
            queue.writes_wakeup.notify_all();
            drop(writes);
            let reads = queue.reads.lock();
            queue.reads_wakeup.notify_all();
            drop(reads);
        }
    }
}

/// The bytes of the newer write that the older one also covers.
fn overlap_bytes(writes: &Writes, newer: &WriteEntry, older: &WriteEntry) -> Vec<u8> {
    let Some((Some(closed), _)) = writes.kept.get(&newer.chunk.number) else { return Vec::new() };
    let (start, end) = (newer.start.max(older.start), newer.end.min(older.end));
    let at = newer.data_at + (start - newer.start) as usize;
    closed.piece.read()[at..at + (end - start) as usize].to_vec()
}

fn mend(writes: &mut Writes, newer: &WriteEntry, older: &WriteEntry, bytes: &[u8]) {
    let at = older.data_at + (newer.start.max(older.start) - older.start) as usize;
    let number = older.chunk.number;
    if let Some(open) = writes.open.as_mut().filter(|open| open.number == number) {
        open.piece[at..at + bytes.len()].copy_from_slice(bytes);
        return;
    }
    let ready = writes.ready.iter().find(|(ready, _)| *ready == number).map(|(_, item)| item);
    if let Some(Item::Chunk(closed)) =
        ready.or_else(|| writes.fetched.get(&number).map(|(item, _)| item))
    {
        closed.piece.write()[at..at + bytes.len()].copy_from_slice(bytes);
    }
}
