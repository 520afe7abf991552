//! The journal map: the addresses whose newest bytes are in the journal and not yet in the object
//! map.
//!
//! At each byte it keeps the entry with the greatest position, in whatever order the entries come.
//! Entries are cut at areas of 1 MiB and kept in 64 shards by area. Long ones (discards and zeroes,
//! up to terabytes) go to a second layer of the same structure with areas of 16 GiB and one lock,
//! so that their cost depends on their count and not on their length. An insert looks at one layer
//! only; a lookup takes the greater position of both.
//!
//! Invariants:
//! 1. A change of an area is made under one lock: readers see it whole or not at all.
//! 2. A lookup holds the lock of the narrow area while it looks at the wide layer. So it never
//!    misses an entry that moves from one layer to the other. Writers hold one lock at a time.
//! 3. `entries` and `wide_entries` are never below the real counts, and both are exact when no
//!    write is in progress.
//!
//! Not here: the records, what a position means, waiting.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

use super::spans;
use crate::limits::{
    JOURNAL_AREA_BYTES as AREA_BYTES, JOURNAL_NARROW_BYTES_MAX,
    JOURNAL_WIDE_AREA_BYTES as WIDE_AREA_BYTES,
};

const SHARDS: usize = 64;

/// A stretch of a lookup in the journal map.
#[derive(Debug)]
pub struct JournalPiece<'a, V> {
    /// First byte in the volume.
    pub address: u64,
    /// Bytes, never 0.
    pub length: u64,
    /// Position and value of the newest entry here; `None` when the journal map has none.
    pub entry: Option<(u64, &'a V)>,
}

/// Part of an entry, inside one area.
#[derive(Clone)]
struct AreaEntry<V> {
    start: u64,
    end: u64,
    position: u64,
    value: V,
}

impl<V: Clone> AreaEntry<V> {
    fn part(&self, start: u64, end: u64) -> AreaEntry<V> {
        AreaEntry { start, end, position: self.position, value: self.value.clone() }
    }
}

/// What a change displaced. Dropped after the lock is released: values may be costly to drop.
struct DisplacedValues<V> {
    _one: Option<V>,
    _many: Vec<AreaEntry<V>>,
}

impl<V> DisplacedValues<V> {
    const NOTHING: DisplacedValues<V> = DisplacedValues { _one: None, _many: Vec::new() };

    fn one(value: V) -> DisplacedValues<V> {
        DisplacedValues { _one: Some(value), _many: Vec::new() }
    }
}

/// The entries of one area: sorted, never overlapping, never empty.
struct AreaEntries<V> {
    entries: Vec<AreaEntry<V>>,
}

impl<V> Default for AreaEntries<V> {
    fn default() -> AreaEntries<V> {
        AreaEntries { entries: Vec::new() }
    }
}

impl<V: Clone> AreaEntries<V> {
    fn first_ending_after(&self, at: u64) -> usize {
        self.entries.partition_point(|entry| entry.end <= at)
    }

    /// The entries from the first that ends after `at`.
    fn from(&self, at: u64) -> &[AreaEntry<V>] {
        &self.entries[self.first_ending_after(at)..]
    }

    /// Indices of the entries that overlap `start..end`.
    fn overlap(&self, start: u64, end: u64) -> (usize, usize) {
        let first = self.first_ending_after(start);
        let count = self.entries[first..].iter().take_while(|entry| entry.start < end).count();
        (first, first + count)
    }

    /// Puts the entry at every byte of `start..end` where nothing newer is.
    fn place(&mut self, start: u64, end: u64, position: u64, value: V) -> DisplacedValues<V> {
        let (first, last) = self.overlap(start, end);
        if first == last {
            if self.entries.is_empty() {
                // Scattered writes leave most areas with one entry.
                self.entries.reserve_exact(1);
            }
            self.entries.insert(first, AreaEntry { start, end, position, value });
            return DisplacedValues::NOTHING;
        }
        let entry = &mut self.entries[first];
        if entry.start == start && entry.end == end {
            if entry.position >= position {
                return DisplacedValues::one(value);
            }
            entry.position = position;
            return DisplacedValues::one(std::mem::replace(&mut entry.value, value));
        }
        let new = AreaEntry { start, end, position, value };
        let mut fresh = Vec::with_capacity(last - first + 2);
        // The start of the part of the entry that nothing newer has cut off yet.
        let mut at = start;
        let mut rest = None;
        for old in &self.entries[first..last] {
            if old.position >= position {
                if at < old.start {
                    fresh.push(new.part(at, old.start));
                }
                fresh.push(old.clone());
                at = old.end;
                continue;
            }
            if old.start < start {
                fresh.push(old.part(old.start, start));
            }
            if old.end > end {
                rest = Some(old.part(end, old.end));
            }
        }
        if at < end {
            fresh.push(new.part(at, end));
        }
        fresh.extend(rest);
        DisplacedValues {
            _one: Some(new.value),
            _many: self.entries.splice(first..last, fresh).collect(),
        }
    }

    /// Takes the entry with this position out of `start..end`.
    fn take(&mut self, start: u64, end: u64, position: u64) -> DisplacedValues<V> {
        let (first, last) = self.overlap(start, end);
        let overlapping = &self.entries[first..last];
        if overlapping.iter().all(|entry| entry.position != position) {
            return DisplacedValues::NOTHING;
        }
        if let [entry] = overlapping
            && start <= entry.start
            && entry.end <= end
        {
            return DisplacedValues::one(self.entries.remove(first).value);
        }
        let mut fresh = Vec::with_capacity(overlapping.len() + 1);
        for old in overlapping {
            if old.position != position {
                fresh.push(old.clone());
                continue;
            }
            if old.start < start {
                fresh.push(old.part(old.start, start));
            }
            if old.end > end {
                fresh.push(old.part(end, old.end));
            }
        }
        DisplacedValues { _one: None, _many: self.entries.splice(first..last, fresh).collect() }
    }
}

/// Mixes an area's number by one multiplication. No attacker gains from choosing areas that slow
/// down lookups of its own volume.
#[derive(Default)]
struct AreaHasher(u64);

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for AreaHasher {
    fn finish(&self) -> u64 {
        // The shard took the top bits of the product: here they come from its middle.
        self.0.rotate_left(32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(GOLDEN);
    }
}

/// The areas under one lock, by their numbers.
type Areas<V> = RwLock<HashMap<u64, AreaEntries<V>, BuildHasherDefault<AreaHasher>>>;

// In cache lines of its own, so that shards do not slow one another down.
#[repr(align(128))]
struct Shard<V>(Areas<V>);

/// Address -> newest journal entry. `V` is cheap to clone, such as an `Arc`.
pub struct JournalMap<V> {
    shards: Box<[Shard<V>]>,
    wide: Areas<V>,
    wide_entries: AtomicUsize,
    entries: AtomicUsize,
}

impl<V: Clone> Default for JournalMap<V> {
    fn default() -> JournalMap<V> {
        JournalMap::new()
    }
}

impl<V: Clone> JournalMap<V> {
    /// An empty map.
    pub fn new() -> JournalMap<V> {
        JournalMap {
            shards: (0..SHARDS).map(|_| Shard(Areas::default())).collect(),
            wide: Areas::default(),
            wide_entries: AtomicUsize::new(0),
            entries: AtomicUsize::new(0),
        }
    }

    /// Puts the entry at every byte of the range where no entry has an equal or greater position.
    pub fn insert(&self, address: u64, length: u64, position: u64, value: V) {
        let end = address.saturating_add(length);
        let span_bytes =
            if length > JOURNAL_NARROW_BYTES_MAX { WIDE_AREA_BYTES } else { AREA_BYTES };
        for (area, start, stop) in spans(address, end, span_bytes) {
            if stop == end {
                self.change(span_bytes, area, |of_area| {
                    of_area.place(start, stop, position, value)
                });
                return;
            }
            self.change(span_bytes, area, |of_area| {
                of_area.place(start, stop, position, value.clone())
            });
        }
    }

    /// Removes the entry with this position from the parts of the range that still have it. The
    /// range is the one it was inserted with, or a part of it.
    ///
    /// Of entries that overlap, the older must be removed first, as happens when the log is stored
    /// in order: otherwise an older entry under a newer one in the other layer would become visible
    /// again.
    pub fn remove(&self, address: u64, length: u64, position: u64) {
        let end = address.saturating_add(length);
        if length <= JOURNAL_NARROW_BYTES_MAX {
            for (area, start, stop) in spans(address, end, AREA_BYTES) {
                self.change(AREA_BYTES, area, |of_area| of_area.take(start, stop, position));
            }
        }
        if self.wide_entries.load(Ordering::Acquire) > 0 {
            for (area, start, stop) in spans(address, end, WIDE_AREA_BYTES) {
                self.change(WIDE_AREA_BYTES, area, |of_area| of_area.take(start, stop, position));
            }
        }
    }

    /// Visits the whole range in address order. Neighboring holes come as one; an entry comes as
    /// one piece per area at least.
    pub fn lookup(&self, address: u64, length: u64, visit: &mut dyn FnMut(JournalPiece<'_, V>)) {
        let end = address.saturating_add(length);
        let mut pieces = JournalPieces { at: address, visit };
        if self.is_empty() {
            return pieces.skip_to(end);
        }
        for (area, start, stop) in spans(address, end, AREA_BYTES) {
            let areas = self.shard(area).read();
            let narrow = areas.get(&area).map_or(&[][..], |of_area| of_area.from(start));
            if self.wide_entries.load(Ordering::Acquire) == 0 {
                for entry in narrow.iter().take_while(|entry| entry.start < stop) {
                    pieces.visit_entry(entry.start.max(start), entry.end.min(stop), entry);
                }
            } else {
                let areas = self.wide.read();
                let wide = areas
                    .get(&(start / WIDE_AREA_BYTES))
                    .map_or(&[][..], |of_area| of_area.from(start));
                pieces.newer_of(narrow, wide, start, stop);
            }
        }
        pieces.skip_to(end);
    }

    /// Whether the map has no entry at all.
    pub fn is_empty(&self) -> bool {
        self.entries.load(Ordering::Acquire) == 0
    }

    /// Parts of entries held: entries count once per area, and once more for each hole that newer
    /// ones cut.
    pub fn entries(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    fn shard(&self, area: u64) -> &Areas<V> {
        &self.shards[(area.wrapping_mul(GOLDEN) >> (u64::BITS - SHARDS.ilog2())) as usize].0
    }

    /// Runs `act` on the entries of an area under its lock, keeps the counts, drops what it
    /// displaced afterwards.
    fn change(
        &self,
        span_bytes: u64,
        area: u64,
        act: impl FnOnce(&mut AreaEntries<V>) -> DisplacedValues<V>,
    ) {
        let is_wide = span_bytes == WIDE_AREA_BYTES;
        let mut areas = if is_wide { self.wide.write() } else { self.shard(area).write() };
        let of_area = areas.entry(area).or_default();
        let before = of_area.entries.len();
        let displaced = act(of_area);
        let after = of_area.entries.len();
        if after == 0 {
            areas.remove(&area);
        } else if of_area.entries.capacity() > 4 * after + 4 {
            of_area.entries.shrink_to(2 * after);
        }
        // Before the lock is released, so that no reader sees an entry that is not counted.
        if before != after {
            let more = after.wrapping_sub(before);
            self.entries.fetch_add(more, Ordering::AcqRel);
            if is_wide {
                self.wide_entries.fetch_add(more, Ordering::AcqRel);
            }
        }
        drop(areas);
        drop(displaced);
    }
}

/// Fills the holes between the entries of a lookup.
struct JournalPieces<'a, V> {
    /// Everything before this has been visited.
    at: u64,
    visit: &'a mut dyn FnMut(JournalPiece<'_, V>),
}

impl<V> JournalPieces<'_, V> {
    fn skip_to(&mut self, end: u64) {
        if self.at < end {
            (self.visit)(JournalPiece { address: self.at, length: end - self.at, entry: None });
            self.at = end;
        }
    }

    fn visit_entry(&mut self, start: u64, end: u64, newest: &AreaEntry<V>) {
        self.skip_to(start);
        let entry = Some((newest.position, &newest.value));
        (self.visit)(JournalPiece { address: start, length: end - start, entry });
        self.at = end;
    }

    /// Both lists begin with the first entry that ends after `start`; each byte gets the newer of
    /// the two.
    fn newer_of(
        &mut self,
        mut narrow: &[AreaEntry<V>],
        mut wide: &[AreaEntry<V>],
        start: u64,
        stop: u64,
    ) {
        let mut at = start;
        while at < stop {
            // Where each list would be taken up; of two at the same byte the newer wins.
            let taken_up = |entries: &[AreaEntry<V>]| {
                entries
                    .first()
                    .map(|entry| (entry.start.max(at), Reverse(entry.position)))
                    .filter(|key| key.0 < stop)
            };
            let (winners, others) = match (taken_up(narrow), taken_up(wide)) {
                (None, None) => return,
                (Some(a), Some(b)) if b < a => (wide, narrow),
                (None, Some(_)) => (wide, narrow),
                _ => (narrow, wide),
            };
            let winner = &winners[0];
            let from = winner.start.max(at);
            // It wins until it ends or something newer begins.
            let end = winner.end.min(stop);
            let newer = others
                .iter()
                .take_while(|entry| entry.start < end)
                .find(|entry| entry.position > winner.position);
            let until = newer.map_or(end, |entry| entry.start);
            self.visit_entry(from, until, winner);
            at = until;
            narrow = &narrow[narrow.iter().take_while(|entry| entry.end <= at).count()..];
            wide = &wide[wide.iter().take_while(|entry| entry.end <= at).count()..];
        }
    }
}
