//! The journal's thread, as steps: take complete records, write them in large spans, sync once for
//! all flushes that wait, keep the marks and the trim.
//!
//! Invariants: complete records are handed on in order, each once, even after the disk has failed.
//! A failed sync of records is noted in the staging memory before it is reported. A new trim is
//! visible to readers, then durable, and only then is its space used again. Zeroes are written only
//! where the first lap has not come yet.
//!
//! Not here: the thread itself (`threads`), and what happens to the records afterwards (`engine`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sawmill_sys::{AlignedBytes, BLOCK_BYTES, Consumer, Span};

use super::superblock::SuperblockFile;
use super::{FlushWaiter, Journal, disk_failed};
use crate::record::Record;
use crate::world::World;
use crate::{Result, limits};

/// What a step did and what is to happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Something was done; step again at once.
    Busy,
    /// A flush waits for a writer that is still filling its slot: step again very soon.
    Waiting,
    /// Nothing to do until the next notification.
    Idle,
    /// Nothing to do, but the marks on the disk are behind: settle them if no notification comes
    /// for a while.
    Unsettled,
}

/// The state of the journal's thread.
pub(crate) struct JournalWriter {
    journal: Arc<Journal>,
    consumer: Consumer,
    superblock: SuperblockFile,
    world: Arc<dyn World>,
    /// Complete records that are not on the disk yet.
    span: Option<Span>,
    /// Written to the disk, not yet synced.
    written: u64,
    /// The ring's blocks below this position have been written, if only with zeroes.
    zeroed_end: u64,
    /// Steps in which a flush that could have been served waited for a later one.
    rounds_shared: u32,
    /// Writes, discards and zeroes taken since a flush was last asked for.
    records_since_flush: u32,
    /// After how many records the next flush is expected; 0: none is.
    records_expected: u32,
    /// Synced through here because a flush was expected.
    synced_early: Option<u64>,
}

/// Which of the whole blocks are written now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WantedBlocks {
    All,
    /// Only if they make up a span.
    OfSpans,
}

/// What the superblock says of the log.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LogState {
    InUse,
    /// Everything is stored, and nothing more will be written.
    Clean,
}

/// How long flushes are gathered for one sync, in steps.
const ROUNDS_SHARED_MAX: u32 = 4;

/// A client that flushed alone after at most this many records is expected to do so again: its next
/// writes go to the disk at once, and are synced when they are as many as the last time, while the
/// client receives their completion and sends its flush. Databases write their logs like that.
const EARLY_RECORDS_MAX: u32 = 2;

impl JournalWriter {
    pub(crate) fn new(
        journal: Arc<Journal>,
        consumer: Consumer,
        superblock: SuperblockFile,
        world: Arc<dyn World>,
    ) -> Self {
        let written = journal.ring.written();
        JournalWriter {
            journal,
            consumer,
            superblock,
            world,
            span: None,
            written,
            zeroed_end: written,
            rounds_shared: 0,
            records_since_flush: 0,
            records_expected: 0,
            synced_early: None,
        }
    }

    /// One step. Complete records are handed to `take` in order; `give_up` gives up stored
    /// records so that the trim can move to at most the given position, and returns how far it may.
    pub(crate) fn step(
        &mut self,
        take: &mut dyn FnMut(Vec<Arc<Record>>),
        give_up: &mut dyn FnMut(u64) -> u64,
    ) -> Result<Step> {
        let mut records = self.take_complete();
        let flush_through = self.flush_through();
        if !records.is_empty() {
            self.judge_early_sync();
        }
        if self.records_since_flush > EARLY_RECORDS_MAX {
            self.journal.expects_flush.store(false, Ordering::Relaxed);
        }
        let early = !records.is_empty() && self.journal.expects_flush.load(Ordering::Relaxed);
        let is_all_wanted = flush_through.is_some() || early;
        if is_all_wanted && self.journal.pad() {
            records.extend(self.take_complete());
        }
        let mut wrote =
            self.write(if is_all_wanted { WantedBlocks::All } else { WantedBlocks::OfSpans });
        if flush_through.is_some() {
            wrote = wrote.and_then(|wrote| Ok(self.sync_for_waiters()? || wrote));
        } else if early {
            wrote = wrote.and_then(|wrote| Ok(self.sync_early()? || wrote));
        }
        // After the flush is answered, and even if the disk has failed: accepted records must be
        // stored.
        if !records.is_empty() {
            take(records);
        }
        let wrote = wrote?;
        let trimmed = self.trim(give_up)?;
        if wrote || trimmed {
            return Ok(Step::Busy);
        }
        if flush_through.is_some() {
            return Ok(Step::Waiting);
        }
        let settled = self.superblock.current().logged >= self.journal.logged();
        Ok(if settled { Step::Idle } else { Step::Unsettled })
    }

    /// What is left to do when the journal disk has failed: hand over what was accepted, which
    /// stays in memory because nothing is written any more, so that it can still be stored.
    pub(crate) fn rescue(&mut self, take: &mut dyn FnMut(Vec<Arc<Record>>)) {
        let records = self.take_complete();
        if !records.is_empty() {
            take(records);
        }
    }

    /// Moves the marks to the disk when nothing else does.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.write_superblock(0, LogState::InUse)
    }

    /// Writes the final superblock: everything is stored (`clean`) or not.
    pub(crate) fn close(&mut self, clean: bool) -> Result<()> {
        let trim = if clean {
            self.journal.segments_end.load(Ordering::Acquire)
        } else {
            self.journal.trim()
        };
        self.write_superblock(trim, if clean { LogState::Clean } else { LogState::InUse })
    }

    /// Ends without everything stored. If everything accepted is logged, the superblock records
    /// that the memory is not needed any more, so that its loss does no harm.
    pub(crate) fn leave(&mut self) -> Result<()> {
        let journal = self.journal.clone();
        journal.ring.close();
        let logged = journal.logged();
        if logged < journal.ring.next() {
            return Ok(());
        }
        self.superblock.write(|block| {
            block.logged = block.logged.max(logged);
            block.memory = None;
        })
    }

    /// Pops the complete records at the front of the order and adds them to the span.
    fn take_complete(&mut self) -> Vec<Arc<Record>> {
        let mut records = Vec::new();
        let mut order = self.journal.order.lock();
        while order.front().is_some_and(|record| record.is_complete()) {
            let Some(record) = order.pop_front() else { break };
            let Some(slot) = record.filled().and_then(|filled| filled.slot) else { break };
            if record.length > 0 {
                self.records_since_flush = self.records_since_flush.saturating_add(1);
            }
            match &mut self.span {
                Some(span) => span.extend(&slot),
                None => self.span = Some(Span::of(&slot)),
            }
            records.push(record);
        }
        records
    }

    /// Syncs what is written if as many records have come as when the last flush was asked for: the
    /// next one then finds it done. A sync that nobody asks for does no harm but takes time.
    fn sync_early(&mut self) -> Result<bool> {
        let due = self.records_expected > 0 && self.records_since_flush == self.records_expected;
        if !due || self.span.is_some() || self.written <= self.journal.logged() {
            return Ok(false);
        }
        self.sync()?;
        self.synced_early = Some(self.written);
        Ok(true)
    }

    /// More records have come after an early sync: was it asked for? If not, no flush is expected
    /// any more.
    fn judge_early_sync(&mut self) {
        let Some(through) = self.synced_early.take() else { return };
        if self.journal.flush_asked_through.load(Ordering::Relaxed) >= through {
            self.records_since_flush =
                self.records_since_flush.saturating_sub(self.records_expected);
        } else {
            self.records_expected = 0;
            self.journal.expects_flush.store(false, Ordering::Relaxed);
        }
    }

    /// The farthest position a flush waits for.
    fn flush_through(&self) -> Option<u64> {
        if self.journal.waiting.load(Ordering::SeqCst) == 0 {
            return None;
        }
        self.journal.waiters.lock().iter().map(|waiter| waiter.through).max()
    }

    /// Writes the whole blocks at the front of the span, four spans' length at most, if `blocks`
    /// wants them. Returns whether it wrote any.
    fn write(&mut self, blocks: WantedBlocks) -> Result<bool> {
        let Some(span) = &mut self.span else { return Ok(false) };
        let end = span.end() / BLOCK_BYTES * BLOCK_BYTES;
        let start = span.start();
        if end <= start || (blocks == WantedBlocks::OfSpans && end - start < limits::SPAN_BYTES) {
            return Ok(false);
        }
        // One span at a time, so that its memory can be used again while the next is written.
        let end = end.min(start + 4 * limits::SPAN_BYTES);
        let part = span.split_to(end);
        if span.start() == span.end() {
            self.span = None;
        }
        let bytes = self.consumer.bytes(&part);
        let started = self.world.now();
        let mut done = 0;
        for (offset, length) in self.journal.parts(start, end - start) {
            if length > 0 {
                let piece = &bytes[done..done + length as usize];
                self.journal.disk.write_at(offset, piece).map_err(|e| disk_failed("write", e))?;
                done += length as usize;
            }
        }
        self.consumer.declare_written(part);
        self.written = end;
        self.journal.written_bytes.fetch_add(end - start, Ordering::Relaxed);
        if end - start >= limits::SPAN_BYTES {
            self.note_disk_rate(end - start, self.world.now().saturating_sub(started));
        }
        Ok(true)
    }

    /// What the disk takes now, beside whoever else uses it: a mean in which the last writes
    /// count most.
    fn note_disk_rate(&self, bytes: u64, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        let rate = bytes.saturating_mul(1_000_000) / micros;
        let mean = match self.journal.disk_bytes_per_s.load(Ordering::Relaxed) {
            0 => rate,
            mean => mean - mean / 8 + rate / 8,
        };
        self.journal.disk_bytes_per_s.store(mean, Ordering::Relaxed);
    }

    /// Syncs when the end that some waiter waits for is on the disk, and answers all waiters
    /// whose end is logged.
    fn sync_for_waiters(&mut self) -> Result<bool> {
        let written = self.written;
        let (reached, beyond) = {
            let waiters = self.journal.waiters.lock();
            let reached = |waiter: &FlushWaiter| waiter.through <= written;
            (waiters.iter().any(reached), waiters.iter().any(|waiter| !reached(waiter)))
        };
        // Other blocks are written first and share the sync, but only if another flush waits for
        // them, and not for long: a stream of writes must not keep a flush waiting.
        let more = self
            .span
            .as_ref()
            .is_some_and(|span| span.end() / BLOCK_BYTES * BLOCK_BYTES > span.start());
        if !reached || (more && beyond && self.rounds_shared < ROUNDS_SHARED_MAX) {
            self.rounds_shared += u32::from(reached);
            return Ok(false);
        }
        self.rounds_shared = 0;
        if self.written > self.journal.logged() {
            self.sync()?;
        }
        let logged = self.journal.logged();
        let mut answered = Vec::new();
        {
            let mut waiters = self.journal.waiters.lock();
            let mut waiting = Vec::new();
            for waiter in waiters.drain(..) {
                if waiter.through <= logged { answered.push(waiter) } else { waiting.push(waiter) }
            }
            *waiters = waiting;
            self.journal.waiting.store(waiters.len(), Ordering::SeqCst);
        }
        let alone = answered.len() == 1 && self.records_since_flush <= EARLY_RECORDS_MAX;
        self.journal.expects_flush.store(alone, Ordering::Relaxed);
        self.records_expected = if alone { self.records_since_flush } else { 0 };
        (self.records_since_flush, self.synced_early) = (0, None);
        for waiter in answered {
            (waiter.callback)(Ok(()));
        }
        Ok(true)
    }

    /// Syncs the disk. A failure is recorded in the memory that outlives the process: the next open
    /// of the journal must not take what it reads for durable.
    fn sync(&mut self) -> Result<()> {
        self.write_zeroes_ahead();
        if let Err(error) = self.journal.disk.sync() {
            self.consumer.declare_sync_failed(self.journal.logged());
            return Err(disk_failed("sync", error));
        }
        self.synced();
        Ok(())
    }

    /// In the first lap, writes zeroes ahead of the records, so that a sync seldom follows the
    /// first write of a block: that costs a commit of the file system's journal. Nothing depends
    /// on them: if they cannot be written, a record there fails, or takes longer to sync.
    fn write_zeroes_ahead(&mut self) {
        let lap_end = self.journal.first_lap_end;
        let next_flushes_bytes = limits::ZEROED_AHEAD_BYTES / 4;
        if self.zeroed_end >= lap_end || self.zeroed_end > self.written + next_flushes_bytes {
            return;
        }
        let start = self.written.max(self.zeroed_end).next_multiple_of(BLOCK_BYTES);
        let end = (start + limits::ZEROED_AHEAD_BYTES).min(lap_end);
        self.zeroed_end = start.max(end);
        if start >= end {
            return;
        }
        let zeroes = AlignedBytes::zeroed((end - start) as usize);
        for (offset, length) in self.journal.parts(start, end - start) {
            let written = self.journal.disk.write_at(offset, &zeroes[..length as usize]);
            if let Err(error) = written {
                tracing::warn!("the journal cannot be prepared for what comes next: {error}");
                self.zeroed_end = lap_end;
                return;
            }
        }
    }

    fn synced(&mut self) {
        self.journal.syncs.fetch_add(1, Ordering::Relaxed);
        self.consumer.declare_synced(self.written);
        self.journal.logged.store(self.written, Ordering::Release);
    }

    /// Makes room when the ring is nearly full or a writer waits, and keeps the marks from falling
    /// far behind.
    fn trim(&mut self, give_up: &mut dyn FnMut(u64) -> u64) -> Result<bool> {
        let journal = self.journal.clone();
        let trim = journal.trim();
        let stored = journal.segments_end.load(Ordering::Acquire);
        let next = journal.ring.next();
        let capacity = journal.capacity_bytes;
        let is_room_wanted = journal.is_room_wanted.swap(false, Ordering::AcqRel);
        let crowded = next - trim > capacity - capacity / 4;
        if stored > trim && (crowded || is_room_wanted) {
            // Free an eighth of the ring at a time, as far as segments allow: each time costs a
            // sync.
            let trim_through =
                (next + capacity * 3 / 8).saturating_sub(capacity).max(trim + capacity / 8);
            let reached = give_up(trim_through.clamp(trim + 1, stored));
            if reached > trim {
                // Readers must see the new trim before a byte below it can change.
                journal.trim.store(reached, Ordering::Release);
                self.write_superblock(reached, LogState::InUse)?;
                journal.ring.set_position_max(reached + capacity - limits::PAD_RESERVE_BYTES);
                return Ok(true);
            }
        }
        if journal.logged() >= self.superblock.current().logged + limits::MARK_BYTES {
            self.settle()?;
        }
        Ok(false)
    }

    /// Nothing before `trim` is needed any more; the trim on the disk may be higher already.
    fn write_superblock(&mut self, trim: u64, state: LogState) -> Result<()> {
        let journal = &self.journal;
        let logged = journal.logged();
        let position = journal.segments_end.load(Ordering::Acquire);
        let sequence = journal.stored_sequence.load(Ordering::Acquire);
        let written = self.superblock.write(|block| {
            block.trim = block.trim.max(trim);
            block.logged = block.logged.max(logged);
            block.stored_sequence = block.stored_sequence.max(sequence);
            block.stored_position = block.stored_position.max(position);
            block.clean = state == LogState::Clean;
            if block.clean {
                // Everything is stored: nothing is only in memory.
                block.memory = None;
            }
        });
        if let Err(error) = written {
            self.consumer.declare_sync_failed(self.journal.logged());
            return Err(error);
        }
        // That sync covered everything written before it.
        if self.written > logged {
            self.synced();
        }
        Ok(())
    }
}
