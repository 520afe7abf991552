//! All segments of the store that the map may name: where their frames are and how much of them is
//! live.
//!
//! Invariants: the totals are those of the entries, changed under one lock. Of an open volume only
//! the engine changes the table. A segment leaves it only after it was deleted; an ancestor's,
//! which this volume never deletes, when nothing here needs it any more.
//!
//! Not here: what is live (`map`, `recovery::apply`), what cuts need (`cuts::book`), and which
//! segments are collected (`gc::policy`), and how the entries are kept (`entries`).

use parking_lot::RwLock;
use sawmill_format::checkpoint::SegmentEntry;
use sawmill_format::kept_block::DeadEntry;

pub(crate) use super::entries::SegmentInfo;
use super::entries::{Entries, SharedLists};
use crate::gc::policy::Candidate;

/// A busy volume deletes only when at least this many segments' worth is dead.
const DEAD_SEGMENTS_MIN: u64 = 4;

/// Sums over the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SegmentTotals {
    pub(crate) segments: u64,
    pub(crate) data_bytes: u64,
    pub(crate) live_bytes: u64,
    pub(crate) object_bytes: u64,
    /// Of these, what is in segments without any live data: they only wait to be deleted.
    pub(crate) dead_object_bytes: u64,
    /// The part of `dead_object_bytes` that needs no other checkpoint to be deleted.
    pub(crate) settled_object_bytes: u64,
    /// Live data in the volume's own segments: it does not collect those of an ancestor.
    pub(crate) own_live_bytes: u64,
    /// Data in the volume's own segments that hold any live data.
    pub(crate) own_used_bytes: u64,
}

impl SegmentTotals {
    /// Dead bytes that another checkpoint or two would release.
    pub(crate) fn unsettled_bytes(&self) -> u64 {
        self.dead_object_bytes - self.settled_object_bytes
    }

    /// Whether enough is dead that deleting it pays for a checkpoint of `checkpoint_bytes`.
    pub(crate) fn is_worth_a_checkpoint(&self, segment_bytes: u32, checkpoint_bytes: u64) -> bool {
        let least = DEAD_SEGMENTS_MIN * u64::from(segment_bytes);
        let unsettled_bytes = self.unsettled_bytes();
        unsettled_bytes > 0
            && unsettled_bytes >= least.max(self.object_bytes / 16).max(2 * checkpoint_bytes)
    }

    /// The same for an idle volume. Small amounts stay: a checkpoint may cost more.
    pub(crate) fn is_worth_a_checkpoint_in_peace(&self) -> bool {
        let unsettled_bytes = self.unsettled_bytes();
        unsettled_bytes > 0 && unsettled_bytes >= self.object_bytes / 64
    }

    /// Counts a segment in; `own`: whether it is the volume's own.
    fn add(&mut self, info: &SegmentInfo, own: bool) {
        self.segments += 1;
        self.data_bytes += info.data_bytes;
        self.live_bytes += info.live_bytes;
        self.object_bytes += info.object_bytes;
        match info.live_bytes {
            0 => self.dead_object_bytes += info.object_bytes,
            live_bytes if own => {
                self.own_live_bytes += live_bytes;
                self.own_used_bytes += info.data_bytes;
            }
            _ => {}
        }
        if info.is_settled {
            self.settled_object_bytes += info.object_bytes;
        }
    }

    /// Counts a segment out again.
    fn remove(&mut self, info: &SegmentInfo, own: bool) {
        self.segments -= 1;
        self.data_bytes -= info.data_bytes;
        self.live_bytes -= info.live_bytes;
        self.object_bytes -= info.object_bytes;
        match info.live_bytes {
            0 => self.dead_object_bytes -= info.object_bytes,
            live_bytes if own => {
                self.own_live_bytes -= live_bytes;
                self.own_used_bytes -= info.data_bytes;
            }
            _ => {}
        }
        if info.is_settled {
            self.settled_object_bytes -= info.object_bytes;
        }
    }
}

#[derive(Default)]
struct CountedSegments {
    entries: Entries,
    totals: SegmentTotals,
}

/// Size, epoch and live bytes of each segment that the map may name, with their totals.
#[derive(Default)]
pub(crate) struct SegmentTable {
    inner: RwLock<CountedSegments>,
    /// The last sequence that belongs to an ancestor; 0: there is none.
    ancestral_through: u32,
}

impl SegmentTable {
    /// An empty table of a volume whose sequences up to `ancestral_through` belong to its
    /// ancestors.
    pub(crate) fn behind(ancestral_through: u32) -> Self {
        SegmentTable { ancestral_through, ..SegmentTable::default() }
    }

    /// The same with these segments, in order of their sequences.
    pub(crate) fn loaded(ancestral_through: u32, segments: Vec<(u32, SegmentInfo)>) -> Self {
        let mut totals = SegmentTotals::default();
        segments.iter().for_each(|(sequence, info)| {
            totals.add(info, *sequence > ancestral_through);
        });
        let inner = CountedSegments { entries: Entries::loaded(segments), totals };
        SegmentTable { inner: RwLock::new(inner), ancestral_through }
    }

    /// An empty table of the same volume.
    pub(crate) fn emptied(&self) -> Self {
        Self::behind(self.ancestral_through)
    }

    /// The newest segment; 0: there is none.
    pub(crate) fn newest(&self) -> u64 {
        self.inner.read().entries.newest().map_or(0, u64::from)
    }

    /// Whether a segment is there and its own.
    pub(crate) fn is_own(&self, sequence: u32) -> bool {
        sequence > self.ancestral_through && self.inner.read().entries.get(sequence).is_some()
    }

    /// Adds a segment; all of its data counts as live until [`lose`](Self::lose) subtracts some.
    pub(crate) fn add(&self, sequence: u32, info: SegmentInfo) {
        let mut inner = self.inner.write();
        inner.totals.add(&info, sequence > self.ancestral_through);
        inner.entries.set(sequence, info);
    }

    /// Takes less memory if another volume of the process has an equal table.
    pub(crate) fn share(&self, lists: &SharedLists) {
        self.inner.write().entries.share(lists);
    }

    /// `bytes` of a segment's data are no longer mapped.
    pub(crate) fn lose(&self, losses: &[(u32, u64)]) {
        let CountedSegments { entries, totals } = &mut *self.inner.write();
        for (sequence, bytes) in losses {
            if let Some(mut info) = entries.get(*sequence) {
                let own = *sequence > self.ancestral_through;
                totals.remove(&info, own);
                info.live_bytes -= (*bytes).min(info.live_bytes);
                totals.add(&info, own);
                entries.set(*sequence, info);
            }
        }
    }

    pub(crate) fn remove(&self, sequence: u32) {
        let mut inner = self.inner.write();
        if let Some(info) = inner.entries.get(sequence) {
            inner.entries.remove(sequence);
            inner.totals.remove(&info, sequence > self.ancestral_through);
        }
    }

    pub(crate) fn get(&self, sequence: u32) -> Option<SegmentInfo> {
        self.inner.read().entries.get(sequence)
    }

    pub(crate) fn totals(&self) -> SegmentTotals {
        self.inner.read().totals
    }

    /// Marks segments without live bytes as dead since checkpoint `number`, and returns the entries
    /// of all segments for it. The second list holds the segments that an earlier checkpoint found
    /// dead and for which `needs(sequence, checkpoint)` is false.
    pub(crate) fn freeze(
        &self,
        number: u64,
        needs: &dyn Fn(u32, u64) -> bool,
    ) -> (Vec<SegmentEntry>, Vec<u32>) {
        let CountedSegments { entries, totals } = &mut *self.inner.write();
        let mut deletable = Vec::new();
        let mut changed = Vec::new();
        let mut frozen = Vec::with_capacity(totals.segments as usize);
        for (sequence, mut info) in entries.iter() {
            if info.live_bytes == 0 && info.dead_since == 0 {
                info.dead_since = number;
                changed.push((sequence, info));
            } else if info.live_bytes == 0 {
                if !needs(sequence, info.dead_since) {
                    deletable.push(sequence);
                }
                if !info.is_settled {
                    info.is_settled = true;
                    totals.settled_object_bytes += info.object_bytes;
                    changed.push((sequence, info));
                }
            }
            frozen.push(SegmentEntry {
                sequence: u64::from(sequence),
                epoch: info.epoch,
                data_bytes: info.data_bytes,
                live_bytes: info.live_bytes,
                wall_unix_ms: info.wall_unix_ms,
                header_bytes: info.header_bytes,
                object_bytes: info.object_bytes,
                dead: info.dead_since != 0 && info.dead_since < number,
            });
        }
        changed.into_iter().for_each(|(sequence, info)| entries.set(sequence, info));
        entries.fold_if_worthwhile();
        (frozen, deletable)
    }

    /// The segments of its own with live data, for collection.
    pub(crate) fn candidates(&self) -> Vec<Candidate> {
        let inner = self.inner.read();
        let own = inner.entries.iter().filter(|(sequence, _)| *sequence > self.ancestral_through);
        let used = own.filter(|(_, info)| info.live_bytes > 0);
        used.map(|(sequence, info)| Candidate {
            sequence,
            live_bytes: info.live_bytes,
            data_bytes: info.data_bytes,
            wall_unix_ms: info.wall_unix_ms,
        })
        .collect()
    }

    /// The checkpoint that first found each dead segment dead.
    pub(crate) fn dead(&self) -> Vec<DeadEntry> {
        let inner = self.inner.read();
        let dead =
            inner.entries.iter().filter(|(_, info)| info.live_bytes == 0 && info.dead_since > 0);
        dead.map(|(sequence, info)| DeadEntry {
            sequence: u64::from(sequence),
            since: info.dead_since,
        })
        .collect()
    }

    /// Every segment, for checks.
    pub(crate) fn snapshot(&self) -> Vec<(u32, SegmentInfo)> {
        self.inner.read().entries.iter().collect()
    }
}
