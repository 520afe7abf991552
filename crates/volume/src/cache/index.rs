//! Which frame lies in which slot, with the checksums of its bytes: flat arrays, read without a
//! lock.
//!
//! Invariants:
//! - Only the holder of [`WriteTurn`] changes anything; there is one, behind the cache's mutex.
//! - A slot's generation is even while its facts are valid and odd while it is free or being
//!   filled. It grows with every change and never repeats. A reader trusts facts or bytes of a slot
//!   only if the generation is the same before and after it reads them ([`Index::is_still`]).
//! - A look-up concurrent with a change may miss an entry, but never finds one that does not exist.
//!
//! Not here: the bytes of the frames, and which slot is given up next.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};

use super::FrameKey;

/// Checksums per frame.
pub(super) const CRCS: usize = 16;

/// The generation of a slot restored from a saved index: such an entry may be stale, any other is
/// not.
const RESTORED: u32 = 2;

/// Permission to change the index.
pub(super) struct WriteTurn(());

/// What is known of a frame besides its key.
#[derive(Clone, Copy)]
pub(super) struct Facts {
    pub(super) data_bytes: u32,
    pub(super) crcs: [u32; CRCS],
}

/// A slot that held the wanted frame when it was looked up.
#[derive(Clone, Copy)]
pub(super) struct SlotHit {
    pub(super) slot: u32,
    pub(super) data_bytes: u32,
    generation: u32,
}

/// How a slot is filled: which use of it this is, and the clock of its admission.
struct SlotUse {
    generation: u32,
    admitted: u32,
}

impl SlotHit {
    /// Whether the entry comes from a saved index, so that its slot may have been reused since.
    pub(super) fn is_restored(self) -> bool {
        self.generation == RESTORED
    }
}

struct Slot {
    generation: AtomicU32,
    owner: AtomicU32,
    sequence: AtomicU32,
    frame: AtomicU32,
    epoch: AtomicU64,
    data_bytes: AtomicU32,
    /// The clock when the frame came in.
    admitted: AtomicU32,
    crcs: [AtomicU32; CRCS],
}

impl Slot {
    fn empty() -> Self {
        Slot {
            generation: AtomicU32::new(1),
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

/// The index. About 110 bytes per slot.
pub(super) struct Index {
    slots: Box<[Slot]>,
    /// Hit since it came in, or since eviction last looked.
    visited: Box<[AtomicBool]>,
    /// Open addressing, linear probing: the upper half of the key's hash, then slot + 1; 0 is
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
    /// An index of `slots` free slots. Hits within `visit_ticks` insertions after a frame came in
    /// do not make it visited: a scan in small steps touches each frame several times, but in one
    /// visit.
    pub(super) fn new(slots: u32, visit_ticks: u32) -> (Self, WriteTurn) {
        let slots = slots as usize;
        let index = Index {
            slots: (0..slots).map(|_| Slot::empty()).collect(),
            visited: (0..slots).map(|_| AtomicBool::new(false)).collect(),
            // Two thirds full at most, and never quite full, so that every search ends.
            table: (0..slots + slots / 2 + 1).map(|_| AtomicU64::new(0)).collect(),
            clock: AtomicU32::new(0),
            visit_ticks,
        };
        (index, WriteTurn(()))
    }

    /// Bytes of memory used.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.slots) + size_of_val(&*self.visited) + size_of_val(&*self.table)
    }

    /// The slot that holds `key`.
    pub(super) fn find(&self, key: &FrameKey) -> Option<SlotHit> {
        self.candidates(hash(key)).find_map(|slot| {
            let entry = &self.slots[slot as usize];
            let generation = entry.generation.load(Acquire);
            let valid = generation.is_multiple_of(2) && entry.key() == *key;
            valid.then(|| SlotHit { slot, generation, data_bytes: entry.data_bytes.load(Relaxed) })
        })
    }

    /// The slots whose key may have this hash.
    fn candidates(&self, hash: u64) -> impl Iterator<Item = u32> {
        let start = place(hash, self.table.len());
        (start..self.table.len())
            .chain(0..start)
            .map(|at| self.table[at].load(Acquire))
            .take_while(|entry| *entry != 0)
            .filter(move |entry| entry >> 32 == hash >> 32)
            .map(slot_of)
    }

    /// Checksum number `block` of the frame in a slot.
    pub(super) fn crc(&self, slot: u32, block: usize) -> u32 {
        self.slots[slot as usize].crcs[block].load(Relaxed)
    }

    /// Whether the slot is unchanged since it was found. Only then is what was read of it in
    /// between valid.
    pub(super) fn is_still(&self, hit: &SlotHit) -> bool {
        fence(Acquire);
        self.slots[hit.slot as usize].generation.load(Relaxed) == hit.generation
    }

    /// Notes a hit, for eviction.
    pub(super) fn visit(&self, slot: u32) {
        let visited = &self.visited[slot as usize];
        let admitted = self.slots[slot as usize].admitted.load(Relaxed);
        let ticks = self.clock.load(Relaxed).wrapping_sub(admitted);
        // Reads before it writes, so that a hot frame's flag stays shared between processors.
        if ticks >= self.visit_ticks && !visited.load(Relaxed) {
            visited.store(true, Relaxed);
        }
    }

    /// Whether the slot was hit since the last call.
    pub(super) fn take_visited(&self, slot: u32) -> bool {
        let visited = &self.visited[slot as usize];
        visited.load(Relaxed) && visited.swap(false, Relaxed)
    }

    /// Fills a free slot.
    pub(super) fn publish(&self, turn: &mut WriteTurn, slot: u32, key: &FrameKey, facts: &Facts) {
        let now = self.clock.load(Relaxed).wrapping_add(1);
        self.clock.store(now, Relaxed);
        let entry = &self.slots[slot as usize];
        // Past RESTORED also for a slot used for the first time.
        let generation = entry.generation.load(Relaxed).max(RESTORED + 1);
        let filled = SlotUse { generation: generation.wrapping_add(1), admitted: now };
        self.fill(turn, slot, key, facts, filled);
    }

    /// Fills a slot never used, from a saved index. Its hits count at once.
    pub(super) fn restore(&self, turn: &mut WriteTurn, slot: u32, key: &FrameKey, facts: &Facts) {
        let admitted = self.clock.load(Relaxed).wrapping_sub(self.visit_ticks);
        self.fill(turn, slot, key, facts, SlotUse { generation: RESTORED, admitted });
    }

    fn fill(&self, _: &mut WriteTurn, slot: u32, key: &FrameKey, facts: &Facts, slot_use: SlotUse) {
        let entry = &self.slots[slot as usize];
        entry.owner.store(key.owner.0, Relaxed);
        entry.sequence.store(key.sequence, Relaxed);
        entry.frame.store(key.frame, Relaxed);
        entry.epoch.store(key.epoch, Relaxed);
        entry.data_bytes.store(facts.data_bytes, Relaxed);
        entry.admitted.store(slot_use.admitted, Relaxed);
        for (cell, crc) in entry.crcs.iter().zip(facts.crcs) {
            cell.store(crc, Relaxed);
        }
        self.visited[slot as usize].store(false, Relaxed);
        entry.generation.store(slot_use.generation, Release);

        let hash = hash(key);
        let mut at = place(hash, self.table.len());
        while self.table[at].load(Relaxed) != 0 {
            at = self.after(at);
        }
        self.table[at].store(hash >> 32 << 32 | u64::from(slot + 1), Release);
    }

    /// Frees a filled slot and returns the data bytes it held. From here on, no reader trusts what
    /// it holds.
    pub(super) fn clear(&self, _: &mut WriteTurn, slot: u32) -> u32 {
        let entry = &self.slots[slot as usize];
        let generation = entry.generation.load(Relaxed).wrapping_add(1);
        entry.generation.store(generation, Relaxed);
        // The odd generation is seen before any later change of the facts.
        fence(Release);
        self.remove_from_table(hash(&entry.key()), slot);
        entry.data_bytes.load(Relaxed)
    }

    /// Removes an entry and moves later ones up, so that no search ends at a gap before its goal.
    fn remove_from_table(&self, hash: u64, slot: u32) {
        let wanted = hash >> 32 << 32 | u64::from(slot + 1);
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

    /// The filled slots whose key is `key` in any epoch.
    pub(super) fn any_epoch(&self, _: &WriteTurn, key: &FrameKey) -> Vec<u32> {
        let mut slots: Vec<u32> = self.candidates(hash(key)).collect();
        slots.retain(|slot| {
            FrameKey { epoch: key.epoch, ..self.slots[*slot as usize].key() } == *key
        });
        slots
    }

    /// The hash of the key in a filled slot.
    pub(super) fn hash_of(&self, slot: u32) -> u64 {
        hash(&self.slots[slot as usize].key())
    }

    /// Key and facts of a filled slot.
    pub(super) fn entry(&self, _: &WriteTurn, slot: u32) -> (FrameKey, Facts) {
        let entry = &self.slots[slot as usize];
        let crcs = std::array::from_fn(|block| entry.crcs[block].load(Relaxed));
        (entry.key(), Facts { data_bytes: entry.data_bytes.load(Relaxed), crcs })
    }
}

fn slot_of(entry: u64) -> u32 {
    entry as u32 - 1
}
