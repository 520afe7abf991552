//! Which frame lies in which cell, with the checksums of its bytes: flat arrays, read without a
//! lock.
//!
//! Invariants:
//! - Only the holder of [`WriteTurn`] changes anything; there is one, behind the cache's mutex.
//! - A cell's change count is even while its facts are valid and odd while it is free or being
//!   filled. It grows with every change and never repeats. A reader trusts facts or bytes of a cell
//!   only if the change count is the same before and after it reads them ([`Index::is_still`]).
//! - A look-up concurrent with a change may miss an entry, but never finds one that does not exist.
//!
//! Not here: the bytes of the frames, and which cell is given up next.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};

use super::FrameKey;

/// Checksums per frame.
pub(super) const CRCS: usize = 16;

/// The change count of a cell restored from a saved index: such an entry may be stale, any other is
/// not.
const RESTORED: u32 = 2;

/// Permission to change the index.
pub(super) struct WriteTurn(());

/// What is known of a frame besides its key.
#[derive(Clone, Copy)]
pub(super) struct FrameFacts {
    pub(super) data_bytes: u32,
    pub(super) crcs: [u32; CRCS],
}

/// A cell that held the wanted frame when it was looked up.
#[derive(Clone, Copy)]
pub(super) struct CellHit {
    pub(super) cell: u32,
    pub(super) data_bytes: u32,
    change_count: u32,
}

/// How a cell is filled: which use of it this is, and the clock of its admission.
struct CellUse {
    change_count: u32,
    admitted: u32,
}

impl CellHit {
    /// Whether the entry comes from a saved index, so that its cell may have been reused since.
    pub(super) fn is_restored(self) -> bool {
        self.change_count == RESTORED
    }
}

struct Cell {
    change_count: AtomicU32,
    owner: AtomicU32,
    sequence: AtomicU32,
    frame: AtomicU32,
    epoch: AtomicU64,
    data_bytes: AtomicU32,
    /// The clock when the frame came in.
    admitted: AtomicU32,
    crcs: [AtomicU32; CRCS],
}

impl Cell {
    fn empty() -> Self {
        Cell {
            change_count: AtomicU32::new(1),
            owner: AtomicU32::new(0),
            sequence: AtomicU32::new(0),
            frame: AtomicU32::new(0),
            epoch: AtomicU64::new(0),
            data_bytes: AtomicU32::new(0),
            admitted: AtomicU32::new(0),
            crcs: [const { AtomicU32::new(0) }; CRCS],
        }
    }

    fn key(&self) -> FrameKey {
        FrameKey {
            owner: super::OwnerId(self.owner.load(Relaxed)),
            sequence: self.sequence.load(Relaxed),
            epoch: self.epoch.load(Relaxed),
            frame: self.frame.load(Relaxed),
        }
    }
}

/// The index. About 110 bytes per cell.
pub(super) struct Index {
    cells: Box<[Cell]>,
    /// Hit since it came in, or since eviction last looked.
    visited: Box<[AtomicBool]>,
    /// Open addressing, linear probing: the upper half of the key's hash, then cell + 1; 0 is
    /// empty.
    table: Box<[AtomicU64]>,
    /// Counts frames that came in.
    clock: AtomicU32,
    /// Hits sooner than this many clock ticks after a frame came in belong to the same visit.
    visit_ticks: u32,
}

/// The hash of a key without its epoch, so that all epochs of a segment are found together.
pub(super) fn hash(key: &FrameKey) -> u64 {
    let segment = u64::from(key.owner.0) << 32 | u64::from(key.sequence);
    let mixed = (segment.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(key.frame))
        .wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 29)
}

/// Spreads the upper half of a hash over `len` places.
pub(super) fn place(hash: u64, len: usize) -> usize {
    (((hash >> 32) * len as u64) >> 32) as usize
}

impl Index {
    /// An index of `cells` free cells. Hits within `visit_ticks` insertions after a frame came in
    /// do not make it visited: a scan in small steps touches each frame several times, but in one
    /// visit.
    pub(super) fn new(cells: u32, visit_ticks: u32) -> (Self, WriteTurn) {
        let cells = cells as usize;
        let index = Index {
            cells: (0..cells).map(|_| Cell::empty()).collect(),
            visited: (0..cells).map(|_| AtomicBool::new(false)).collect(),
            // Two thirds full at most, and never quite full, so that every search ends.
            table: (0..cells + cells / 2 + 1).map(|_| AtomicU64::new(0)).collect(),
            clock: AtomicU32::new(0),
            visit_ticks,
        };
        (index, WriteTurn(()))
    }

    /// Bytes of memory used.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.cells) + size_of_val(&*self.visited) + size_of_val(&*self.table)
    }

    /// The cell that holds `key`.
    pub(super) fn find(&self, key: &FrameKey) -> Option<CellHit> {
        self.candidates(hash(key)).find_map(|cell| {
            let entry = &self.cells[cell as usize];
            let change_count = entry.change_count.load(Acquire);
            let valid = change_count.is_multiple_of(2) && entry.key() == *key;
            valid.then(|| CellHit {
                cell,
                change_count,
                data_bytes: entry.data_bytes.load(Relaxed),
            })
        })
    }

    /// The cells whose key may have this hash.
    fn candidates(&self, hash: u64) -> impl Iterator<Item = u32> {
        let start = place(hash, self.table.len());
        (start..self.table.len())
            .chain(0..start)
            .map(|at| self.table[at].load(Acquire))
            .take_while(|entry| *entry != 0)
            .filter(move |entry| entry >> 32 == hash >> 32)
            .map(cell_of)
    }

    /// Checksum number `block` of the frame in a cell.
    pub(super) fn crc(&self, cell: u32, block: usize) -> u32 {
        self.cells[cell as usize].crcs[block].load(Relaxed)
    }

    /// Whether the cell is unchanged since it was found. Only then is what was read of it in
    /// between valid.
    pub(super) fn is_still(&self, hit: &CellHit) -> bool {
        fence(Acquire);
        self.cells[hit.cell as usize].change_count.load(Relaxed) == hit.change_count
    }

    /// Notes a hit, for eviction.
    pub(super) fn visit(&self, cell: u32) {
        let visited = &self.visited[cell as usize];
        let admitted = self.cells[cell as usize].admitted.load(Relaxed);
        let ticks = self.clock.load(Relaxed).wrapping_sub(admitted);
        // Reads before it writes, so that a hot frame's flag stays shared between processors.
        if ticks >= self.visit_ticks && !visited.load(Relaxed) {
            visited.store(true, Relaxed);
        }
    }

    /// Whether the cell was hit since the last call.
    pub(super) fn take_visited(&self, cell: u32) -> bool {
        let visited = &self.visited[cell as usize];
        visited.load(Relaxed) && visited.swap(false, Relaxed)
    }

    /// As `take_visited`, and leaves it so.
    pub(super) fn is_visited(&self, cell: u32) -> bool {
        self.visited[cell as usize].load(Relaxed)
    }

    /// Fills a free cell.
    pub(super) fn publish(
        &self,
        turn: &mut WriteTurn,
        cell: u32,
        key: &FrameKey,
        facts: &FrameFacts,
    ) {
        let now = self.clock.load(Relaxed).wrapping_add(1);
        self.clock.store(now, Relaxed);
        let entry = &self.cells[cell as usize];
        // Past RESTORED also for a cell used for the first time.
        let change_count = entry.change_count.load(Relaxed).max(RESTORED + 1);
        let filled = CellUse { change_count: change_count.wrapping_add(1), admitted: now };
        self.fill(turn, cell, key, facts, filled);
    }

    /// Fills a cell never used, from a saved index. Its hits count at once.
    pub(super) fn restore(
        &self,
        turn: &mut WriteTurn,
        cell: u32,
        key: &FrameKey,
        facts: &FrameFacts,
    ) {
        let admitted = self.clock.load(Relaxed).wrapping_sub(self.visit_ticks);
        self.fill(turn, cell, key, facts, CellUse { change_count: RESTORED, admitted });
    }

    fn fill(
        &self,
        _: &mut WriteTurn,
        cell: u32,
        key: &FrameKey,
        facts: &FrameFacts,
        cell_use: CellUse,
    ) {
        let entry = &self.cells[cell as usize];
        entry.owner.store(key.owner.0, Relaxed);
        entry.sequence.store(key.sequence, Relaxed);
        entry.frame.store(key.frame, Relaxed);
        entry.epoch.store(key.epoch, Relaxed);
        entry.data_bytes.store(facts.data_bytes, Relaxed);
        entry.admitted.store(cell_use.admitted, Relaxed);
        for (kept, crc) in entry.crcs.iter().zip(facts.crcs) {
            kept.store(crc, Relaxed);
        }
        self.visited[cell as usize].store(false, Relaxed);
        entry.change_count.store(cell_use.change_count, Release);

        let hash = hash(key);
        let mut at = place(hash, self.table.len());
        while self.table[at].load(Relaxed) != 0 {
            at = self.after(at);
        }
        self.table[at].store(hash >> 32 << 32 | u64::from(cell + 1), Release);
    }

    /// Frees a filled cell and returns the data bytes it held. From here on, no reader trusts what
    /// it holds.
    pub(super) fn clear(&self, _: &mut WriteTurn, cell: u32) -> u32 {
        let entry = &self.cells[cell as usize];
        let change_count = entry.change_count.load(Relaxed).wrapping_add(1);
        entry.change_count.store(change_count, Relaxed);
        // The odd change count is seen before any later change of the facts.
        fence(Release);
        self.remove_from_table(hash(&entry.key()), cell);
        entry.data_bytes.load(Relaxed)
    }

    /// Removes an entry and moves later ones up, so that no search ends at a gap before its goal.
    fn remove_from_table(&self, hash: u64, cell: u32) {
        let wanted = hash >> 32 << 32 | u64::from(cell + 1);
        let len = self.table.len();
        let mut gap = place(hash, len);
        while self.table[gap].load(Relaxed) != wanted {
            if self.table[gap].load(Relaxed) == 0 {
                return;
            }
            gap = self.after(gap);
        }
        let mut at = gap;
        loop {
            at = self.after(at);
            let entry = self.table[at].load(Relaxed);
            if entry == 0 {
                break;
            }
            let distance = |from: usize| (at + len - from) % len;
            if distance(place(entry, len)) >= distance(gap) {
                self.table[gap].store(entry, Release);
                gap = at;
            }
        }
        self.table[gap].store(0, Release);
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.table.len() { 0 } else { at + 1 }
    }

    /// The filled cells whose key is `key` in any epoch.
    pub(super) fn any_epoch(&self, _: &WriteTurn, key: &FrameKey) -> Vec<u32> {
        let mut cells: Vec<u32> = self.candidates(hash(key)).collect();
        cells.retain(|cell| {
            FrameKey { epoch: key.epoch, ..self.cells[*cell as usize].key() } == *key
        });
        cells
    }

    /// The hash of the key in a filled cell.
    pub(super) fn hash_of(&self, cell: u32) -> u64 {
        hash(&self.cells[cell as usize].key())
    }

    /// Key and facts of a filled cell.
    pub(super) fn entry(&self, _: &WriteTurn, cell: u32) -> (FrameKey, FrameFacts) {
        let entry = &self.cells[cell as usize];
        let crcs = std::array::from_fn(|block| entry.crcs[block].load(Relaxed));
        (entry.key(), FrameFacts { data_bytes: entry.data_bytes.load(Relaxed), crcs })
    }
}

fn cell_of(entry: u64) -> u32 {
    entry as u32 - 1
}
