//! The stored part of a volume as one attachment sees it: which segments there are, and where each
//! address is in them.
//!
//! Invariant: only the engine changes a view; everything else only reads it.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::cuts::{CutBook, Lineage};
use crate::map::ObjectMap;
use crate::segment::table::{SegmentInfo, SegmentTable};

/// The stored part of a volume: which segments there are and where each address is in them.
pub(crate) struct View {
    pub(crate) map: ObjectMap,
    pub(crate) segments: SegmentTable,
    /// The kept part of the past.
    pub(crate) cuts: Mutex<CutBook>,
    /// The volumes whose segments the map names.
    pub(crate) lineage: Lineage,
}

impl View {
    /// Resizes the disk: data beyond a smaller end is gone.
    pub(crate) fn resize(&self, size_bytes: u64) {
        let size_before = self.map.size_bytes();
        if size_bytes < size_before {
            // What is loaded later must fit the size.
            self.map.load_all();
        }
        let mut losses: HashMap<u32, u64> = HashMap::new();
        if size_before > size_bytes {
            self.map.remove(size_bytes, size_before - size_bytes, &mut |sequence, bytes| {
                *losses.entry(sequence).or_default() += bytes;
            });
        }
        self.segments.lose(&losses.into_iter().collect::<Vec<_>>());
        self.map.set_size(size_bytes);
    }

    /// Bytes that the map names; until it is whole, at least that many.
    pub(crate) fn live_bytes(&self) -> u64 {
        match self.map.is_whole() {
            true => self.map.mapped_bytes(),
            false => self.segments.totals().live_bytes,
        }
    }

    /// Subtracts from the live data of segments what changes replaced that waited for their groups.
    pub(crate) fn subtract_losses(&self) {
        self.segments.lose(&self.map.take_losses());
    }

    /// Returns this volume with the map of a cut: what that map names is live again, all else is
    /// dead. The size does not change: data of the cut beyond the current end is gone, and space
    /// added since the cut is empty.
    pub(crate) fn rolled_back_to(&self, then: View) -> View {
        then.resize(self.map.size_bytes());
        // Also groups that were empty at the cut: the next checkpoint must not keep their current
        // data.
        then.map.mark_dirty(&self.map.groups());
        then.map.mark_all_dirty();
        let segments = self.segments.emptied();
        for (sequence, info) in self.segments.snapshot() {
            let live_bytes = then.segments.get(sequence).map_or(0, |info| info.live_bytes);
            let dead_since =
                if live_bytes == 0 && info.live_bytes == 0 { info.dead_since } else { 0 };
            let is_settled = info.is_settled && dead_since != 0;
            segments.add(sequence, SegmentInfo { live_bytes, dead_since, is_settled, ..info });
        }
        let cuts = Mutex::new(self.cuts.lock().clone());
        View { map: then.map, segments, cuts, lineage: self.lineage.clone() }
    }
}
