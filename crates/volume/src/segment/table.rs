//! All segments of the store that the map may name: where their frames are and how much of them is live.
//!
//! Invariants: changed by the keeper alone; a segment leaves the table only after it was deleted.

use std::collections::BTreeMap;

use parking_lot::RwLock;
use sawmill_format::checkpoint::SegmentEntry;
use sawmill_format::kept::DeadEntry;

/// What is known of one stored segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentInfo {
    pub(crate) epoch: u64,
    pub(crate) header_bytes: u32,
    pub(crate) data_bytes: u64,
    pub(crate) live_bytes: u64,
    pub(crate) object_bytes: u64,
    pub(crate) wall_unix_ms: u64,
    /// The checkpoint that first found the segment dead; zero while it is live or not yet found.
    pub(crate) dead_since: u64,
}

/// Sums over the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) segments: u64,
    pub(crate) data_bytes: u64,
    pub(crate) live_bytes: u64,
    pub(crate) object_bytes: u64,
}

#[derive(Default)]
struct Inner {
    by_sequence: BTreeMap<u32, SegmentInfo>,
    totals: Totals,
}

/// See the head of this file.
#[derive(Default)]
pub(crate) struct SegmentTable {
    inner: RwLock<Inner>,
}

impl SegmentTable {
    /// Adds a segment; all of its data counts as live until [`lose`](Self::lose) is told otherwise.
    pub(crate) fn add(&self, sequence: u32, info: SegmentInfo) {
        let mut inner = self.inner.write();
        inner.totals.segments += 1;
        inner.totals.data_bytes += info.data_bytes;
        inner.totals.live_bytes += info.live_bytes;
        inner.totals.object_bytes += info.object_bytes;
        inner.by_sequence.insert(sequence, info);
    }

    /// `bytes` of a segment's data are no longer mapped.
    pub(crate) fn lose(&self, losses: &[(u32, u64)]) {
        let mut inner = self.inner.write();
        for (sequence, bytes) in losses {
            if let Some(info) = inner.by_sequence.get_mut(sequence) {
                let lost = (*bytes).min(info.live_bytes);
                info.live_bytes -= lost;
                inner.totals.live_bytes -= lost;
            }
        }
    }

    pub(crate) fn remove(&self, sequence: u32) {
        let mut inner = self.inner.write();
        if let Some(info) = inner.by_sequence.remove(&sequence) {
            inner.totals.segments -= 1;
            inner.totals.data_bytes -= info.data_bytes;
            inner.totals.live_bytes -= info.live_bytes;
            inner.totals.object_bytes -= info.object_bytes;
        }
    }

    pub(crate) fn get(&self, sequence: u32) -> Option<SegmentInfo> {
        self.inner.read().by_sequence.get(&sequence).copied()
    }

    pub(crate) fn totals(&self) -> Totals {
        self.inner.read().totals
    }

    /// Marks segments without live bytes as dead since checkpoint `number`, and returns the entries of all
    /// segments for it; the second list holds those that an earlier checkpoint had already found dead and
    /// that nobody `needs`, asked with the sequence and the checkpoint that found it dead.
    pub(crate) fn freeze(
        &self,
        number: u64,
        needs: &dyn Fn(u32, u64) -> bool,
    ) -> (Vec<SegmentEntry>, Vec<u32>) {
        let mut inner = self.inner.write();
        let mut deletable = Vec::new();
        let mut entries = Vec::with_capacity(inner.by_sequence.len());
        for (sequence, info) in &mut inner.by_sequence {
            if info.live_bytes == 0 {
                if info.dead_since == 0 {
                    info.dead_since = number;
                } else if !needs(*sequence, info.dead_since) {
                    deletable.push(*sequence);
                }
            }
            entries.push(SegmentEntry {
                sequence: u64::from(*sequence),
                epoch: info.epoch,
                data_bytes: info.data_bytes,
                live_bytes: info.live_bytes,
                wall_unix_ms: info.wall_unix_ms,
                header_bytes: info.header_bytes,
                object_bytes: info.object_bytes,
                dead: info.dead_since != 0 && info.dead_since < number,
            });
        }
        (entries, deletable)
    }

    /// Since which checkpoint each dead segment is dead.
    pub(crate) fn dead(&self) -> Vec<DeadEntry> {
        let inner = self.inner.read();
        let dead = inner.by_sequence.iter().filter(|(_, info)| info.live_bytes == 0 && info.dead_since > 0);
        dead.map(|(sequence, info)| DeadEntry { sequence: u64::from(*sequence), since: info.dead_since })
            .collect()
    }

    /// Every segment, for checks.
    pub(crate) fn snapshot(&self) -> Vec<(u32, SegmentInfo)> {
        self.inner.read().by_sequence.iter().map(|(sequence, info)| (*sequence, *info)).collect()
    }
}
