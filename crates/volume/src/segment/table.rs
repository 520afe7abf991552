//! All segments of the store that the map may name: where their frames are and how much of them is live.
//!
//! Invariants: changed by the keeper alone; a segment leaves the table only after it was deleted.

use std::collections::BTreeMap;

use parking_lot::RwLock;
use sawmill_format::checkpoint::SegmentEntry;

use crate::gc::policy::Candidate;

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
    /// It is dead, and a second checkpoint says so: it only waits to be deleted.
    pub(crate) is_settled: bool,
}

/// Sums over the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) segments: u64,
    pub(crate) data_bytes: u64,
    pub(crate) live_bytes: u64,
    pub(crate) object_bytes: u64,
    /// Of these, what is in segments without any live data: they only wait to be deleted.
    pub(crate) dead_data_bytes: u64,
    /// See `dead_data_bytes`.
    pub(crate) dead_object_bytes: u64,
    /// Of `dead_object_bytes`, what another checkpoint would change nothing about.
    pub(crate) settled_object_bytes: u64,
}

impl Totals {
    /// Data in segments that hold any live data.
    pub(crate) fn used_data_bytes(&self) -> u64 {
        self.data_bytes - self.dead_data_bytes
    }

    fn add(&mut self, info: &SegmentInfo) {
        self.segments += 1;
        self.data_bytes += info.data_bytes;
        self.live_bytes += info.live_bytes;
        self.object_bytes += info.object_bytes;
        if info.live_bytes == 0 {
            self.died(info);
        }
    }

    fn died(&mut self, info: &SegmentInfo) {
        self.dead_data_bytes += info.data_bytes;
        self.dead_object_bytes += info.object_bytes;
    }

    fn remove(&mut self, info: &SegmentInfo) {
        self.segments -= 1;
        self.data_bytes -= info.data_bytes;
        self.live_bytes -= info.live_bytes;
        self.object_bytes -= info.object_bytes;
        if info.live_bytes == 0 {
            self.dead_data_bytes -= info.data_bytes;
            self.dead_object_bytes -= info.object_bytes;
        }
        if info.is_settled {
            self.settled_object_bytes -= info.object_bytes;
        }
    }
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
        inner.totals.add(&info);
        inner.by_sequence.insert(sequence, info);
    }

    /// `bytes` of a segment's data are no longer mapped.
    pub(crate) fn lose(&self, losses: &[(u32, u64)]) {
        let Inner { by_sequence, totals } = &mut *self.inner.write();
        for (sequence, bytes) in losses {
            if let Some(info) = by_sequence.get_mut(sequence) {
                let lost = (*bytes).min(info.live_bytes);
                info.live_bytes -= lost;
                totals.live_bytes -= lost;
                if lost > 0 && info.live_bytes == 0 {
                    totals.died(info);
                }
            }
        }
    }

    pub(crate) fn remove(&self, sequence: u32) {
        let mut inner = self.inner.write();
        if let Some(info) = inner.by_sequence.remove(&sequence) {
            inner.totals.remove(&info);
        }
    }

    pub(crate) fn get(&self, sequence: u32) -> Option<SegmentInfo> {
        self.inner.read().by_sequence.get(&sequence).copied()
    }

    pub(crate) fn totals(&self) -> Totals {
        self.inner.read().totals
    }

    /// Marks segments without live bytes as dead since checkpoint `number`, and returns the entries of all
    /// segments for it; the second list holds those that an earlier checkpoint had already found dead.
    pub(crate) fn freeze(&self, number: u64) -> (Vec<SegmentEntry>, Vec<u32>) {
        let Inner { by_sequence, totals } = &mut *self.inner.write();
        let mut deletable = Vec::new();
        let mut entries = Vec::with_capacity(by_sequence.len());
        for (sequence, info) in by_sequence {
            if info.live_bytes == 0 {
                if info.dead_since == 0 {
                    info.dead_since = number;
                } else {
                    deletable.push(*sequence);
                    if !info.is_settled {
                        info.is_settled = true;
                        totals.settled_object_bytes += info.object_bytes;
                    }
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

    /// The segments with live data, for collection.
    pub(crate) fn candidates(&self) -> Vec<Candidate> {
        let inner = self.inner.read();
        let used = inner.by_sequence.iter().filter(|(_, info)| info.live_bytes > 0);
        used.map(|(sequence, info)| Candidate {
            sequence: *sequence,
            live_bytes: info.live_bytes,
            data_bytes: info.data_bytes,
            wall_unix_ms: info.wall_unix_ms,
        })
        .collect()
    }

    /// Every segment, for checks.
    pub(crate) fn snapshot(&self) -> Vec<(u32, SegmentInfo)> {
        self.inner.read().by_sequence.iter().map(|(sequence, info)| (*sequence, *info)).collect()
    }
}
