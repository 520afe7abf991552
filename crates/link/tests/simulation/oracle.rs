//! What a reader may see: for each cell, the writes that may be the newest.
//!
//! A write may be seen from its submission on. When it is answered, writes that were answered before it was
//! submitted can be seen no more, by anybody who asks later. A power cut makes what was durable possible
//! again, and a flush must say so.
//!
//! Invariant: a value outside a cell's set is a lost write, or one that was done again. Not here: how reads
//! come.

use std::collections::{BTreeMap, BTreeSet};

/// Bytes of a cell: writes begin and end at them.
pub(crate) const CELL: u64 = 16;

struct Write {
    cells: std::ops::Range<u64>,
    answered: bool,
    /// Power cuts before it was submitted.
    cuts: u64,
}

/// The judge.
#[derive(Default)]
pub(crate) struct Oracle {
    /// Values that each cell may have; absent: zero alone.
    may: BTreeMap<u64, BTreeSet<u64>>,
    writes: BTreeMap<u64, Write>,
    /// For each write under way: the values of its cells that were settled before it came.
    before: BTreeMap<u64, BTreeSet<u64>>,
    reads: BTreeMap<u64, Read>,
    /// Values that a power cut may bring back.
    durable: BTreeMap<u64, BTreeSet<u64>>,
    flushes: BTreeMap<u64, Flush>,
    /// The newest flush that was answered well.
    newest_flush: u64,
    /// Writes that were answered and that no flush covers.
    unflushed: BTreeSet<u64>,
    /// Answered writes that a power cut may have taken: a flush must say so.
    taken: BTreeSet<u64>,
    cuts: u64,
}

/// A flush under way: what it may make durable, and the writes that it covers.
struct Flush {
    cuts: u64,
    may: BTreeMap<u64, BTreeSet<u64>>,
    covers: BTreeSet<u64>,
}

struct Read {
    cells: std::ops::Range<u64>,
    may: BTreeMap<u64, BTreeSet<u64>>,
}

fn cells(address: u64, length: u64) -> std::ops::Range<u64> {
    address / CELL..(address + length) / CELL
}

impl Oracle {
    fn of(&self, cell: u64) -> BTreeSet<u64> {
        self.may.get(&cell).cloned().unwrap_or_else(|| BTreeSet::from([0]))
    }

    pub(crate) fn write_submitted(&mut self, id: u64, address: u64, length: u64) {
        let cells = cells(address, length);
        let mut before = BTreeSet::new();
        for cell in cells.clone() {
            let mut may = self.of(cell);
            let settled = |value: &u64| self.writes.get(value).is_none_or(|write| write.answered);
            before.extend(may.iter().copied().filter(settled));
            may.insert(id);
            self.may.insert(cell, may);
        }
        for read in self.reads.values_mut() {
            for cell in cells.clone().filter(|cell| read.cells.contains(cell)) {
                read.may.entry(cell).or_insert_with(|| BTreeSet::from([0])).insert(id);
            }
        }
        for flush in self.flushes.values_mut() {
            // Written before the flush is carried out, perhaps.
            for cell in cells.clone() {
                flush.may.entry(cell).or_insert_with(|| BTreeSet::from([0])).insert(id);
            }
        }
        self.before.insert(id, before);
        self.writes.insert(id, Write { cells, answered: false, cuts: self.cuts });
    }

    /// With `durable` it needs no flush.
    pub(crate) fn write_answered(&mut self, id: u64, durable: bool) {
        let Some(write) = self.writes.get_mut(&id) else { return };
        write.answered = true;
        if write.cuts < self.cuts {
            // Its answer may have been on its way when the power failed: it is there, or it is not.
            return;
        }
        if !durable {
            self.unflushed.insert(id);
        }
        let cells = write.cells.clone();
        let before = self.before.remove(&id).unwrap_or_default();
        for cell in cells {
            if let Some(may) = self.may.get_mut(&cell) {
                may.retain(|value| *value == id || !before.contains(value));
                if durable {
                    self.durable.insert(cell, may.clone());
                }
            }
        }
    }

    pub(crate) fn read_submitted(&mut self, id: u64, address: u64, length: u64) {
        let cells = cells(address, length);
        let may = cells.clone().map(|cell| (cell, self.of(cell))).collect();
        self.reads.insert(id, Read { cells, may });
    }

    /// The bytes of a read, or what is wrong with them.
    pub(crate) fn read_answered(&mut self, id: u64, bytes: &[u8]) -> Result<(), String> {
        let read = self.reads.remove(&id).ok_or("a read was answered twice")?;
        for (cell, seen) in read.cells.clone().zip(bytes.chunks_exact(CELL as usize)) {
            let value = u64::from_le_bytes(seen[..8].try_into().expect("eight bytes"));
            let twin = u64::from_le_bytes(seen[8..16].try_into().expect("eight bytes"));
            let tied = twin == value.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ if value == 0 { 0 } else { cell };
            let may = &read.may[&cell];
            if !tied || !may.contains(&value) {
                return Err(format!("cell {cell}: read {value} ({twin:x}), and it may be {may:?}"));
            }
        }
        Ok(())
    }

    pub(crate) fn flush_submitted(&mut self, id: u64) {
        self.flushes
            .insert(id, Flush { cuts: self.cuts, may: self.may.clone(), covers: self.unflushed.clone() });
    }

    /// A flush was answered: what may be durable now, or what is wrong.
    pub(crate) fn flush_answered(&mut self, id: u64, well: bool) -> Result<(), String> {
        let flush = self.flushes.remove(&id).ok_or("a flush was answered twice")?;
        let whole = flush.cuts == self.cuts;
        if well && whole && !self.taken.is_empty() {
            return Err("a flush was answered well, and writes before it are lost".into());
        }
        match well {
            // Of a flush that the power cut met: carried out before it, and its answer was on its way.
            true => self.taken.retain(|write| !flush.covers.contains(write)),
            false => self.taken.clear(),
        }
        self.may_be_durable(&flush.may, well && whole && id > self.newest_flush);
        if well && whole {
            self.newest_flush = self.newest_flush.max(id);
        }
        if whole {
            // Durable, or told to be in doubt: no later flush speaks for them again.
            self.unflushed.retain(|write| !flush.covers.contains(write));
        }
        Ok(())
    }

    fn may_be_durable(&mut self, may: &BTreeMap<u64, BTreeSet<u64>>, nothing_else: bool) {
        for (cell, may) in may {
            let durable = self.durable.entry(*cell).or_insert_with(|| BTreeSet::from([0]));
            if nothing_else {
                durable.clear();
            }
            durable.extend(may);
        }
    }

    /// The power failed: every cell may be as it is, or as it was when flushed.
    pub(crate) fn power_cut(&mut self) {
        let under_way: Vec<_> = self.flushes.values().map(|flush| flush.may.clone()).collect();
        under_way.iter().for_each(|may| self.may_be_durable(may, false));
        let cells: Vec<u64> = self.may.keys().copied().collect();
        for cell in cells {
            let durable = self.durable.get(&cell).cloned().unwrap_or_else(|| BTreeSet::from([0]));
            let may = self.may.entry(cell).or_default();
            may.extend(&durable);
            let widened = may.clone();
            for read in self.reads.values_mut().filter(|read| read.cells.contains(&cell)) {
                read.may.entry(cell).or_default().extend(&widened);
            }
            for flush in self.flushes.values_mut() {
                flush.may.entry(cell).or_default().extend(&widened);
            }
            self.durable.insert(cell, widened);
        }
        self.cuts += 1;
        self.taken.append(&mut self.unflushed);
    }
}

/// The bytes of a write.
pub(crate) fn pattern(id: u64, address: u64, into: &mut [u8], offset: u64) {
    for (index, byte) in into.iter_mut().enumerate() {
        let at = address + offset + index as u64;
        let (cell, inside) = (at / CELL, (at % CELL) as usize);
        let twin = id.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ if id == 0 { 0 } else { cell };
        let word = if inside < 8 { id } else { twin };
        *byte = word.to_le_bytes()[inside % 8];
    }
}
