//! What a reader of one device may see: for each tile, the writes that may be the newest.
//!
//! A write may be seen from its submission on. Once it is answered, later reads do not see writes
//! that were answered before it was submitted. A user that is cut off writes no more: its writes in
//! flight have taken effect by then, or never do. A power cut makes the durable values possible
//! again, and a flush must report that to the writers.
//!
//! Invariant: a value outside a tile's set is a lost write, or one that was repeated. Not here: how
//! reads are made.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Bytes of a tile: writes begin and end at them.
pub(crate) const TILE: u64 = 16;

type Values = BTreeMap<u64, BTreeSet<u64>>;

struct Write {
    user: u64,
    /// Zeroes were written, and no pattern.
    zeroes: bool,
    ranges: Vec<Range<u64>>,
    /// It has no further effect: it was answered, or its user was cut off.
    settled: bool,
    /// Power cuts before it was submitted.
    cuts: u64,
}

/// The judge of a device.
pub(crate) struct Oracle {
    /// The first of its tiles, counted over all devices, so that tiles of different devices differ.
    first: u64,
    /// Values that each tile may have; absent: only zero.
    may: Values,
    writes: BTreeMap<u64, Write>,
    /// For each write in flight: the values of its tiles that were settled before its submission.
    before: BTreeMap<u64, BTreeSet<u64>>,
    reads: BTreeMap<u64, Read>,
    /// Values that a power cut may bring back.
    durable: Values,
    flushes: BTreeMap<u64, Flush>,
    /// The newest flush that succeeded.
    newest_flush: u64,
    /// Each user's answered writes that none of its flushes covers.
    unflushed: BTreeMap<u64, BTreeSet<u64>>,
    /// Each user's answered writes that a power cut may have undone: a flush must report that.
    undone: BTreeMap<u64, BTreeSet<u64>>,
    cuts: u64,
}

/// A flush in flight: what it may make durable, and the writes that it covers.
struct Flush {
    user: u64,
    cuts: u64,
    may: Values,
    covers: BTreeSet<u64>,
}

struct Read {
    tiles: Range<u64>,
    may: Values,
}

fn tiles(address: u64, length: u64) -> Range<u64> {
    address / TILE..(address + length) / TILE
}

impl Oracle {
    /// The judge of a device of zeroes, whose first byte is byte `base` over all devices.
    pub(crate) fn new(base: u64) -> Self {
        Oracle {
            first: base / TILE,
            may: Values::new(),
            writes: BTreeMap::new(),
            before: BTreeMap::new(),
            reads: BTreeMap::new(),
            durable: Values::new(),
            flushes: BTreeMap::new(),
            newest_flush: 0,
            unflushed: BTreeMap::new(),
            undone: BTreeMap::new(),
            cuts: 0,
        }
    }

    fn of(&self, tile: u64) -> BTreeSet<u64> {
        self.may.get(&tile).cloned().unwrap_or_else(|| BTreeSet::from([0]))
    }

    /// A change of these ranges (address, length) was submitted.
    pub(crate) fn write_submitted(
        &mut self,
        id: u64,
        user: u64,
        zeroes: bool,
        ranges: &[(u64, u64)],
    ) {
        let ranges: Vec<_> =
            ranges.iter().map(|(address, length)| tiles(*address, *length)).collect();
        let mut before = BTreeSet::new();
        for tile in ranges.iter().cloned().flatten() {
            let mut may = self.of(tile);
            let settled = |value: &u64| self.writes.get(value).is_none_or(|write| write.settled);
            before.extend(may.iter().copied().filter(settled));
            may.insert(id);
            self.may.insert(tile, may);
        }
        for read in self.reads.values_mut() {
            for tile in ranges.iter().cloned().flatten().filter(|tile| read.tiles.contains(tile)) {
                read.may.entry(tile).or_insert_with(|| BTreeSet::from([0])).insert(id);
            }
        }
        for flush in self.flushes.values_mut() {
            // It may take effect before the flush is executed.
            for tile in ranges.iter().cloned().flatten() {
                flush.may.entry(tile).or_insert_with(|| BTreeSet::from([0])).insert(id);
            }
        }
        self.before.insert(id, before);
        self.writes.insert(id, Write { user, zeroes, ranges, settled: false, cuts: self.cuts });
    }

    /// With `durable` it needs no flush.
    pub(crate) fn write_answered(&mut self, id: u64, durable: bool) {
        let Some(write) = self.writes.get_mut(&id) else { return };
        write.settled = true;
        if write.cuts < self.cuts {
            // Its answer may have been in flight when the power failed: it has taken effect or not.
            return;
        }
        if !durable {
            self.unflushed.entry(write.user).or_default().insert(id);
        }
        let before = self.before.remove(&id).unwrap_or_default();
        for tile in write.ranges.iter().cloned().flatten() {
            if let Some(may) = self.may.get_mut(&tile) {
                may.retain(|value| *value == id || !before.contains(value));
                if durable {
                    self.durable.insert(tile, may.clone());
                }
            }
        }
    }

    /// A user was cut off: its writes that have not taken effect by now never will.
    pub(crate) fn cut_off(&mut self, user: u64) {
        self.writes
            .values_mut()
            .filter(|write| write.user == user)
            .for_each(|write| write.settled = true);
    }

    pub(crate) fn read_submitted(&mut self, id: u64, address: u64, length: u64) {
        let tiles = tiles(address, length);
        let may = tiles.clone().map(|tile| (tile, self.of(tile))).collect();
        self.reads.insert(id, Read { tiles, may });
    }

    /// A request of a user that was cut off failed.
    pub(crate) fn failed(&mut self, id: u64) {
        self.reads.remove(&id);
        self.flushes.remove(&id);
    }

    /// Checks the bytes of a read. Returns what is wrong with them.
    pub(crate) fn read_answered(&mut self, id: u64, bytes: &[u8]) -> Result<(), String> {
        let read = self.reads.remove(&id).ok_or("a read was answered twice")?;
        let value_of =
            |id: &u64| if self.writes.get(id).is_some_and(|write| write.zeroes) { 0 } else { *id };
        for (tile, bytes_of_tile) in read.tiles.clone().zip(bytes.chunks_exact(TILE as usize)) {
            let value = u64::from_le_bytes(bytes_of_tile[..8].try_into().expect("eight bytes"));
            let twin = u64::from_le_bytes(bytes_of_tile[8..16].try_into().expect("eight bytes"));
            let tied = twin == twin_of(value, self.first + tile);
            let may = &read.may[&tile];
            if !tied || !may.iter().any(|id| value_of(id) == value) {
                return Err(format!("tile {tile}: read {value} ({twin:x}), and it may be {may:?}"));
            }
        }
        Ok(())
    }

    pub(crate) fn flush_submitted(&mut self, id: u64, user: u64) {
        let covers = self.unflushed.get(&user).cloned().unwrap_or_default();
        self.flushes.insert(id, Flush { user, cuts: self.cuts, may: self.may.clone(), covers });
    }

    /// A flush was answered: updates what may be durable now, or returns what is wrong.
    pub(crate) fn flush_answered(&mut self, id: u64, well: bool) -> Result<(), String> {
        let flush = self.flushes.remove(&id).ok_or("a flush was answered twice")?;
        let whole = flush.cuts == self.cuts;
        let undone = self.undone.entry(flush.user).or_default();
        if well && whole && !undone.is_empty() {
            return Err("a flush succeeded, and writes before it are lost".into());
        }
        match well {
            // A flush in flight at the power cut: it was executed before, and its answer was on its
            // way.
            true => undone.retain(|write| !flush.covers.contains(write)),
            false => undone.clear(),
        }
        self.note_durable(&flush.may, well && whole && id > self.newest_flush);
        if well && whole {
            self.newest_flush = self.newest_flush.max(id);
        }
        if whole && let Some(unflushed) = self.unflushed.get_mut(&flush.user) {
            // They are durable, or were reported as doubtful: no later flush covers them again.
            unflushed.retain(|write| !flush.covers.contains(write));
        }
        Ok(())
    }

    fn note_durable(&mut self, may: &Values, nothing_else: bool) {
        for (tile, may) in may {
            let durable = self.durable.entry(*tile).or_insert_with(|| BTreeSet::from([0]));
            if nothing_else {
                durable.clear();
            }
            durable.extend(may);
        }
    }

    /// The power failed: every tile may be as it is, or as it was when flushed.
    pub(crate) fn power_cut(&mut self) {
        let under_way: Vec<_> = self.flushes.values().map(|flush| flush.may.clone()).collect();
        under_way.iter().for_each(|may| self.note_durable(may, false));
        let tiles: Vec<u64> = self.may.keys().copied().collect();
        for tile in tiles {
            let durable = self.durable.get(&tile).cloned().unwrap_or_else(|| BTreeSet::from([0]));
            let may = self.may.entry(tile).or_default();
            may.extend(&durable);
            let widened = may.clone();
            for read in self.reads.values_mut().filter(|read| read.tiles.contains(&tile)) {
                read.may.entry(tile).or_default().extend(&widened);
            }
            for flush in self.flushes.values_mut() {
                flush.may.entry(tile).or_default().extend(&widened);
            }
            self.durable.insert(tile, widened);
        }
        self.cuts += 1;
        for (user, unflushed) in &mut self.unflushed {
            self.undone.entry(*user).or_default().append(unflushed);
        }
    }
}

/// The second half of a tile, which ties its value to the tile.
fn twin_of(value: u64, tile: u64) -> u64 {
    value.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ if value == 0 { 0 } else { tile }
}

/// Makes the bytes of a write, from byte `at` over all devices on.
pub(crate) fn pattern(id: u64, at: u64, into: &mut [u8]) {
    for (index, byte) in into.iter_mut().enumerate() {
        let at = at + index as u64;
        let (tile, inside) = (at / TILE, (at % TILE) as usize);
        let value = if inside < 8 { id } else { twin_of(id, tile) };
        *byte = value.to_le_bytes()[inside % 8];
    }
}
