//! Collision areas: which of two writes is newer, and which writes a driver does not have yet
//! (BUSE thesis, section 4.3).
//!
//! Invariants: in an area, a write that was submitted after another had completed has the higher
//! write number. Numbers are never reused during the life of a device, whatever happens to its
//! driver. A write is listed from before it completes until the driver has acknowledged it and
//! every older write that it overlaps, because until then its bytes may be needed to correct a
//! repeated delivery. A lock here covers one area, and no other lock is taken under it.
//!
//! Not here: the bytes of a write (`chunk`), which requests wait for which (`read`).

use parking_lot::{Mutex, MutexGuard};

/// The areas share these shards. There are many, so that writers on different cores rarely contend,
/// and each holds little; adjacent areas use different ones.
const SHARDS: usize = 4096;

/// A chunk: its queue, and its number in that queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ChunkId {
    pub(super) queue: usize,
    pub(super) number: u64,
}

/// A write, or its part in one area, that the driver may not have.
#[derive(Clone, Copy, Debug)]
pub(super) struct WriteEntry {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) write_number: u64,
    pub(super) chunk: ChunkId,
    /// The place of its bytes in the chunk.
    pub(super) data_at: usize,
    pub(super) is_acknowledged: bool,
}

impl WriteEntry {
    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end
    }
}

/// Aligned to cache lines of its own.
#[repr(align(64))]
#[derive(Default)]
struct Shard(Mutex<AreaWrites>);

/// The writes of some areas.
#[derive(Default)]
struct AreaWrites {
    /// The last number that was assigned.
    last: u64,
    entries: Vec<WriteEntry>,
}

/// The consequences of an acknowledgment for chunks.
#[derive(Default)]
pub(super) struct AckEffect {
    /// The write stays listed, because older writes that it overlaps are in flight.
    pub(super) is_kept: bool,
    /// Those older writes: the sooner they are acknowledged, the sooner memory is free.
    pub(super) older: Vec<ChunkId>,
    /// One entry for each write of these chunks that was acknowledged earlier and is no longer
    /// listed now.
    pub(super) released: Vec<ChunkId>,
}

/// The write numbers of all areas, and the writes that a driver may not have yet.
pub(super) struct Areas {
    area_bytes: u64,
    shards: Box<[Shard]>,
}

impl Areas {
    pub(super) fn new(area_bytes: u64) -> Self {
        Areas { area_bytes, shards: (0..SHARDS).map(|_| Shard::default()).collect() }
    }

    /// The shard of the area that contains this byte.
    fn shard(&self, start: u64) -> MutexGuard<'_, AreaWrites> {
        self.shards[(start / self.area_bytes % SHARDS as u64) as usize].0.lock()
    }

    /// Splits `[start, end)` at the borders of areas.
    pub(super) fn parts(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> + use<> {
        let area_bytes = self.area_bytes;
        let mut at = start;
        std::iter::from_fn(move || {
            (at < end).then(|| {
                let stop = end.min((at / area_bytes + 1).saturating_mul(area_bytes));
                (std::mem::replace(&mut at, stop), stop)
            })
        })
    }

    /// The number of parts of a range.
    pub(super) fn count(&self, start: u64, end: u64) -> usize {
        // By the last byte: a range that ends at a border does not touch the next area.
        ((end - 1) / self.area_bytes - start / self.area_bytes + 1) as usize
    }

    /// Lists a write that lies in one area, and assigns its number.
    pub(super) fn list(&self, start: u64, end: u64, chunk: ChunkId, data_at: usize) -> u64 {
        // Numbered and listed under one lock: otherwise a newer write could be acknowledged before
        // this one counts as older, and a repeated delivery would bring the old bytes back.
        let mut writes = self.shard(start);
        writes.last += 1;
        let write_number = writes.last;
        writes.entries.push(WriteEntry {
            start,
            end,
            write_number,
            chunk,
            data_at,
            is_acknowledged: false,
        });
        write_number
    }

    /// The chunks with writes in `[start, end)` that the driver has not acknowledged.
    pub(super) fn on_the_way(&self, start: u64, end: u64) -> Vec<ChunkId> {
        let mut chunks = Vec::new();
        for (start, end) in self.parts(start, end) {
            let writes = self.shard(start);
            let listed = writes.entries.iter();
            let pending_writes =
                listed.filter(|write| !write.is_acknowledged && write.overlaps(start, end));
            chunks.extend(pending_writes.map(|write| write.chunk));
        }
        chunks.sort_unstable();
        chunks.dedup();
        chunks
    }

    /// The driver has this write.
    pub(super) fn acknowledge(&self, start: u64, write_number: u64) -> AckEffect {
        let mut writes = self.shard(start);
        let listed = &mut writes.entries;
        let mut settled = AckEffect::default();
        let Some(at) = listed.iter().position(|write| write.write_number == write_number) else {
            return settled;
        };
        listed[at].is_acknowledged = true;
        settled.older = older(listed, at).map(|write| write.chunk).collect();
        settled.is_kept = !settled.older.is_empty();
        if !settled.is_kept {
            listed.swap_remove(at);
            // Writes that waited only for this one are free too. (What waited for one of those also
            // waited for this.)
            while let Some(free) = (0..listed.len())
                .find(|at| listed[*at].is_acknowledged && older(listed, *at).next().is_none())
            {
                settled.released.push(listed.swap_remove(free).chunk);
            }
        }
        settled
    }

    /// After a driver is gone: returns each acknowledged write with the older ones that it overlaps
    /// and that will be delivered again, in the order in which the bytes must be copied.
    /// Afterward, only unacknowledged writes are listed. Nothing else may use the areas during the
    /// call.
    pub(super) fn mend(&self) -> Vec<(WriteEntry, WriteEntry)> {
        let mut copies = Vec::new();
        for shard in &self.shards {
            let listed = &mut shard.0.lock().entries;
            // Of several newer writes, the newest is copied last and wins.
            listed.sort_unstable_by_key(|write| write.write_number);
            for at in 0..listed.len() {
                if listed[at].is_acknowledged {
                    copies.extend(older(listed, at).map(|older| (listed[at], *older)));
                }
            }
            // The next driver gets the mended older writes, so the newer bytes are needed no more.
            listed.retain(|write| !write.is_acknowledged);
        }
        copies
    }
}

/// The writes older than `listed[at]` that it overlaps and that the driver does not have.
fn older(entries: &[WriteEntry], at: usize) -> impl Iterator<Item = &WriteEntry> {
    let newer = entries[at];
    entries.iter().filter(move |write| {
        !write.is_acknowledged
            && write.write_number < newer.write_number
            && write.overlaps(newer.start, newer.end)
    })
}
