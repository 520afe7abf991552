//! Stored segments whose data can still be read from the journal; the oldest are given up first. So
//! recently written data is read from the local disk without a second copy.
//!
//! Invariant: a segment is given up before the journal's trim passes its first record.
//!
//! Not here: the trim (`journal::writer`), and reading what a piece names (`read`, `gc::gather`).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::RwLock;

use crate::limits;
use crate::record::Record;

/// A run of a segment's data and the record that holds it.
pub(crate) struct ResidentPiece {
    pub(crate) data_offset: u32,
    pub(crate) length: u32,
    pub(crate) record_offset: u32,
    pub(crate) record: Arc<Record>,
}

struct ResidentSegment {
    sequence: u32,
    end: u64,
    pieces: usize,
}

#[derive(Default)]
struct ResidentSegments {
    by_sequence: HashMap<u32, Arc<[ResidentPiece]>>,
    /// Bounded by `limits::RECORDS_RESIDENT_MAX`.
    oldest_first: VecDeque<ResidentSegment>,
    pieces: usize,
}

/// The stored segments whose records are still in the journal.
#[derive(Default)]
pub(crate) struct Residents {
    inner: RwLock<ResidentSegments>,
}

impl Residents {
    /// Adds a segment that covers journal positions up to `end`.
    pub(crate) fn add(&self, sequence: u32, end: u64, pieces: Vec<ResidentPiece>) {
        let mut inner = self.inner.write();
        inner.pieces += pieces.len();
        inner.oldest_first.push_back(ResidentSegment { sequence, end, pieces: pieces.len() });
        inner.by_sequence.insert(sequence, pieces.into());
        while inner.pieces > limits::RECORDS_RESIDENT_MAX {
            if inner.give_up_oldest().is_none() {
                break;
            }
        }
    }

    /// Gives up the oldest segments until everything before `wanted` is free or the next would pass
    /// `bound`; returns how far the trim may move. If none is left, the trim may move to `bound`.
    pub(crate) fn give_up(&self, wanted: u64, bound: u64) -> u64 {
        let mut inner = self.inner.write();
        let mut reached = 0;
        while reached < wanted {
            match inner.oldest_first.front() {
                Some(entry) if entry.end <= bound => {
                    reached = entry.end;
                    inner.give_up_oldest();
                }
                _ => break,
            }
        }
        if inner.oldest_first.is_empty() { bound } else { reached }
    }

    /// A segment is read from the store from now on.
    pub(crate) fn forget(&self, sequence: u32) {
        self.inner.write().by_sequence.remove(&sequence);
    }

    /// Where the data of a segment is, by data offset; `None` once it was given up.
    pub(crate) fn pieces(&self, sequence: u32) -> Option<Arc<[ResidentPiece]>> {
        self.inner.read().by_sequence.get(&sequence).cloned()
    }

    /// The record that holds byte `data_offset` of a segment, the offset in its payload, and how
    /// many bytes follow.
    pub(crate) fn find(&self, sequence: u32, data_offset: u32) -> Option<(Arc<Record>, u64, u64)> {
        let pieces = self.inner.read().by_sequence.get(&sequence)?.clone();
        let index =
            pieces.partition_point(|piece| piece.data_offset <= data_offset).checked_sub(1)?;
        let piece = &pieces[index];
        let into = data_offset - piece.data_offset;
        if into >= piece.length {
            return None;
        }
        Some((
            piece.record.clone(),
            u64::from(piece.record_offset + into),
            u64::from(piece.length - into),
        ))
    }
}

impl ResidentSegments {
    fn give_up_oldest(&mut self) -> Option<u64> {
        let entry = self.oldest_first.pop_front()?;
        self.by_sequence.remove(&entry.sequence);
        self.pieces -= entry.pieces;
        Some(entry.end)
    }
}
