//! What of the past is kept, and which segments that needs.
//!
//! Invariants: names are unique; a cut's checkpoint was durable when the cut was entered; `needs`
//! returns true for every segment that some cut can reach.
//!
//! Why `needs` is right: let `K` be the number of a cut's checkpoint. A segment that checkpoint `K`
//! still maps was live at `K`, so the first checkpoint that finds it dead has a higher number. The
//! same holds for a segment behind `K`'s last one: it was not in `K`. Segments after the cut's own
//! last one are not needed, unless a retained checkpoint must roll forward to a later moment.
//!
//! Not here: how orders get into the log (`engine::orders`), reading pins (`engine::pins`), and the
//! deletes (`engine::cleanup`).

use std::sync::Arc;

use sawmill_format::checkpoint::Checkpoint;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{CutEntry, CutKind, LineageEntry, Order, Pin};

use crate::limits;

/// Wall clocks that differ by more from the time attached have jumped.
const JUMP_MS: u64 = 60_000;

/// A pin that was met.
pub(crate) struct NumberedPin {
    pub(crate) pin_number: u64,
    pub(crate) pin: Pin,
}

/// Where in the log an order stands, and the checkpoint that was the newest there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogPosition {
    pub(crate) number: u64,
    pub(crate) put_id: PutId,
    /// The last segment the checkpoint includes.
    pub(crate) root_sequence: u64,
    pub(crate) root_wall_unix_ms: u64,
    pub(crate) root_attached_ms: u64,
    pub(crate) root_position: u64,
    pub(crate) sequence: u64,
    pub(crate) position: u64,
    pub(crate) wall_unix_ms: u64,
}

impl LogPosition {
    /// A place in the log behind `root`.
    pub(crate) fn behind(
        root: &Checkpoint,
        sequence: u64,
        position: u64,
        wall_unix_ms: u64,
    ) -> Self {
        LogPosition {
            number: root.number,
            put_id: root.put_id,
            root_sequence: root.through_sequence,
            root_wall_unix_ms: root.wall_unix_ms,
            root_attached_ms: root.attached_ms,
            root_position: root.position,
            sequence,
            position,
            wall_unix_ms,
        }
    }
}

/// The snapshots, moments and pins of a volume, and its retention.
#[derive(Clone, Debug, Default)]
pub(crate) struct CutBook {
    pub(crate) retention_s: u64,
    /// The first pin number that did not exist when it was last asked for; 0 means 1.
    pub(crate) pins_next: u64,
    pub(crate) cuts: Vec<CutEntry>,
    /// The newest retained checkpoint. While there is none, the next checkpoint is retained.
    last: Option<CheckpointFacts>,
    /// The segment of the newest rollback.
    rolled_back: u64,
}

/// The fields of a retained checkpoint that a roll-forward from it cannot change.
#[derive(Clone, Debug)]
struct CheckpointFacts {
    through_sequence: u64,
    size_bytes: u64,
    lineage: Vec<LineageEntry>,
    attached_ms: u64,
    wall_unix_ms: u64,
}

impl CheckpointFacts {
    fn of(root: &Checkpoint) -> Self {
        CheckpointFacts {
            through_sequence: root.through_sequence,
            size_bytes: root.size_bytes,
            lineage: root.kept.lineage.clone(),
            attached_ms: root.attached_ms,
            wall_unix_ms: root.wall_unix_ms,
        }
    }

    /// Whether rolling forward from this one also reaches the moments behind `root`.
    fn stands_for(&self, root: &Checkpoint, rolled_back: u64, step_ms: u64) -> bool {
        let attached_ms = root.attached_ms.saturating_sub(self.attached_ms);
        let wall_ms = root.wall_unix_ms.checked_sub(self.wall_unix_ms);
        attached_ms < step_ms
            && rolled_back <= self.through_sequence
            && self.size_bytes == root.size_bytes
            && self.lineage == root.kept.lineage
            && wall_ms.is_some_and(|ms| ms.abs_diff(attached_ms) <= JUMP_MS)
    }
}

impl CutBook {
    /// The cuts that a checkpoint lists, with the checkpoint itself when moments are retained.
    pub(crate) fn of(root: &Checkpoint) -> Self {
        let kept = &root.kept;
        let mut book = CutBook {
            retention_s: kept.retention_s,
            pins_next: kept.pins_next,
            cuts: kept.cuts.clone(),
            last: None,
            rolled_back: 0,
        };
        book.retain_root(root);
        book
    }

    /// Adds a durable checkpoint as a retained moment, when any are kept, unless the newest
    /// retained one is so near that rolling forward from it reaches every moment behind this one.
    /// So a window has at most [`limits::RETAINED_PER_WINDOW_MAX`] of them, and one for each
    /// attachment, rollback, new size, flattening and jump of the wall clock.
    pub(crate) fn retain_root(&mut self, root: &Checkpoint) {
        if self.retention_s == 0 {
            return;
        }
        let step_ms = self.retention_s.saturating_mul(1000) / limits::RETAINED_PER_WINDOW_MAX;
        let stands_for = |last: &CheckpointFacts| last.stands_for(root, self.rolled_back, step_ms);
        if self.last.as_ref().is_some_and(stands_for) {
            return;
        }
        self.add_retained(&LogPosition::behind(
            root,
            root.through_sequence,
            root.position,
            root.wall_unix_ms,
        ));
        self.last = Some(CheckpointFacts::of(root));
    }

    /// Makes the cuts of checkpoint `original` begin from `repeated`, which has the same state.
    pub(crate) fn begin_from(&mut self, original: &Checkpoint, repeated: &Checkpoint) {
        let begun = |cut: &&mut CutEntry| {
            cut.kind != CutKind::Pin
                && (cut.number, cut.put_id) == (original.number, original.put_id)
        };
        for cut in self.cuts.iter_mut().filter(begun) {
            (cut.number, cut.put_id) = (repeated.number, repeated.put_id);
        }
        self.cuts.sort_unstable();
    }

    fn add_retained(&mut self, place: &LogPosition) {
        if self.retained().any(|cut| cut.number == place.number && cut.put_id == place.put_id) {
            return;
        }
        self.add(CutEntry {
            kind: CutKind::Retained,
            number: place.number,
            through_sequence: place.root_sequence,
            name: String::new(),
            put_id: place.put_id,
            position: place.root_position,
            wall_unix_ms: place.root_wall_unix_ms,
            pin: 0,
            attached_s: attached_s(place.root_attached_ms),
        });
    }

    /// Records a clone's pin that was found.
    pub(crate) fn note(&mut self, seen: &NumberedPin) {
        if seen.pin_number < self.pins_next {
            return;
        }
        self.pins_next = self.pins_next.max(seen.pin_number + 1);
        self.add(CutEntry {
            kind: CutKind::Pin,
            number: seen.pin.number,
            through_sequence: seen.pin.through_sequence,
            name: String::new(),
            put_id: seen.pin.put_id,
            position: 0,
            wall_unix_ms: 0,
            pin: seen.pin_number,
            attached_s: 0,
        });
    }

    pub(crate) fn add(&mut self, cut: CutEntry) {
        let at = self.cuts.partition_point(|other| *other < cut);
        self.cuts.insert(at, cut);
    }

    /// The snapshot of that name.
    pub(crate) fn snapshot(&self, name: &str) -> Option<&CutEntry> {
        self.cuts.iter().find(|cut| cut.kind == CutKind::Snapshot && cut.name == name)
    }

    /// Checkpoints from which rolling forward reaches any later moment, oldest first.
    pub(crate) fn retained(&self) -> impl Iterator<Item = &CutEntry> {
        self.cuts.iter().filter(|cut| cut.kind == CutKind::Retained)
    }

    /// Whether a cut other than a clone's pin begins from that checkpoint and reaches
    /// `through_sequence`.
    pub(crate) fn begins(&self, number: u64, put_id: PutId, through_sequence: u64) -> bool {
        self.cuts.iter().any(|cut| {
            let reaches = match cut.kind {
                CutKind::Retained => true,
                CutKind::Snapshot => cut.through_sequence >= through_sequence,
                CutKind::Pin => false,
            };
            reaches && (cut.number, cut.put_id) == (number, put_id)
        })
    }

    /// Carries out an order. A rollback changes only the map, but the moments behind it cannot be
    /// reached from an older checkpoint.
    pub(crate) fn apply(&mut self, order: &Order, place: &LogPosition) {
        match order {
            Order::CreateSnapshot(name) => {
                if self.snapshot(name).is_none() {
                    self.add(CutEntry {
                        kind: CutKind::Snapshot,
                        number: place.number,
                        through_sequence: place.sequence,
                        name: name.clone(),
                        put_id: place.put_id,
                        position: place.position,
                        wall_unix_ms: place.wall_unix_ms,
                        pin: 0,
                        attached_s: 0,
                    });
                }
            }
            Order::DeleteSnapshot(name) => {
                self.cuts.retain(|cut| cut.kind != CutKind::Snapshot || cut.name != *name);
            }
            Order::SetRetention(retention_s) => {
                self.retention_s = *retention_s;
                self.last = None;
                if *retention_s > 0 && self.retained().next().is_none() {
                    self.add_retained(place);
                }
            }
            Order::RollBack { .. } => self.rolled_back = place.sequence,
        }
    }

    /// Drops the retained checkpoints that have left the retention window. The newest one at or
    /// before the start of the window stays, and so do those after it. Age is the time that the
    /// volume was attached since then, so no wall clock can make a moment old.
    pub(crate) fn prune(&mut self, attached_ms: u64) {
        let retention_ms = self.retention_s.saturating_mul(1000);
        let has_left =
            |cut: &&CutEntry| cut_attached_ms(cut).saturating_add(retention_ms) <= attached_ms;
        let base = self.retained().filter(has_left).map(|cut| cut.number).max();
        let bound = match (self.retention_s, base) {
            (0, _) => u64::MAX,
            (_, Some(number)) => number,
            (_, None) => 0,
        };
        self.cuts.retain(|cut| cut.kind != CutKind::Retained || cut.number >= bound);
    }

    /// The attached time at which the next retained checkpoint can be dropped; `None` when none
    /// ever can.
    pub(crate) fn prunes_at_attached_ms(&self) -> Option<u64> {
        // The oldest is needed for as long as the next one is inside the window.
        let next = self.retained().map(cut_attached_ms).nth(1)?;
        Some(next.saturating_add(self.retention_s.saturating_mul(1000)))
    }
}

/// The attached time as a cut records it: in seconds, rounded up.
fn attached_s(attached_ms: u64) -> u32 {
    u32::try_from(attached_ms.div_ceil(1000)).unwrap_or(u32::MAX)
}

fn cut_attached_ms(cut: &CutEntry) -> u64 {
    u64::from(cut.attached_s) * 1000
}

/// Whether a cut can reach a segment that checkpoint `dead_since` was the first to find dead.
fn reaches(cut: &CutEntry, sequence: u64, dead_since: u64) -> bool {
    dead_since > cut.number && (cut.kind == CutKind::Retained || sequence <= cut.through_sequence)
}

/// Whether some cut can reach a segment that checkpoint `dead_since` was the first to find dead.
pub(crate) fn needs(cuts: &[CutEntry], sequence: u64, dead_since: u64) -> bool {
    cuts.iter().any(|cut| reaches(cut, sequence, dead_since))
}

/// Which volume owns each segment of a volume's map: its ancestors' have the lower sequences.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lineage(Arc<[LineageEntry]>);

impl Lineage {
    pub(crate) fn new(entries: &[LineageEntry]) -> Self {
        Lineage(entries.into())
    }

    /// The ancestor that owns a segment; `None` when it is the volume's own.
    pub(crate) fn ancestor(&self, sequence: u64) -> Option<(usize, VolumeId)> {
        let index = self.0.partition_point(|entry| entry.through_sequence < sequence);
        self.0.get(index).map(|entry| (index, entry.volume_id))
    }

    /// Whether the volume has to keep a segment for one of its cuts. A clone has pins of its own on
    /// the volume's ancestors, so its pin here does not count for their segments.
    pub(crate) fn needs(&self, cuts: &[CutEntry], sequence: u64, dead_since: u64) -> bool {
        let inherited = self.ancestor(sequence).is_some();
        let counts = |cut: &&CutEntry| !(inherited && cut.kind == CutKind::Pin);
        cuts.iter().filter(counts).any(|cut| reaches(cut, sequence, dead_since))
    }

    /// The volume that owns a segment.
    pub(crate) fn owner(&self, own: VolumeId, sequence: u64) -> VolumeId {
        self.ancestor(sequence).map_or(own, |(_, volume_id)| volume_id)
    }

    pub(crate) fn entries(&self) -> &[LineageEntry] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(kind: CutKind, number: u64, through_sequence: u64, attached_s: u32) -> CutEntry {
        let name = if kind == CutKind::Snapshot { format!("s{number}") } else { String::new() };
        let put_id = PutId([number as u8; 16]);
        // The wall clock stood still, or was wrong: it does not matter.
        let wall_unix_ms = 0;
        CutEntry {
            kind,
            number,
            through_sequence,
            name,
            put_id,
            position: 0,
            wall_unix_ms,
            pin: 0,
            attached_s,
        }
    }

    #[test]
    fn a_snapshot_needs_what_died_after_its_checkpoint_up_to_its_end() {
        let book = CutBook { cuts: vec![cut(CutKind::Snapshot, 5, 100, 0)], ..CutBook::default() };
        assert!(needs(&book.cuts, 100, 6));
        assert!(!needs(&book.cuts, 101, 6), "it came later");
        assert!(!needs(&book.cuts, 50, 5), "it was dead already");
    }

    #[test]
    fn the_window_keeps_one_checkpoint_before_its_start() {
        let cuts = [(1, 1), (2, 2), (3, 3), (4, 4)];
        let cuts: Vec<_> = cuts
            .iter()
            .map(|(number, attached_s)| cut(CutKind::Retained, *number, 0, *attached_s))
            .collect();
        let mut book = CutBook { retention_s: 2, cuts, ..CutBook::default() };
        book.prune(4500);
        assert_eq!(book.retained().map(|cut| cut.number).collect::<Vec<_>>(), [2, 3, 4]);
        assert!(needs(&book.cuts, u64::MAX, 3) && !needs(&book.cuts, 1, 2));
        assert_eq!(book.prunes_at_attached_ms(), Some(5000));
        book.prune(5000);
        assert_eq!(book.retained().map(|cut| cut.number).collect::<Vec<_>>(), [3, 4]);
        book.retention_s = 0;
        book.prune(4500);
        assert_eq!((book.retained().count(), book.prunes_at_attached_ms()), (0, None));
    }

    fn root(number: u64, attached_ms: u64) -> Checkpoint {
        Checkpoint {
            volume_id: VolumeId([1; 16]),
            put_id: PutId([number as u8; 16]),
            number,
            epoch: 1,
            through_sequence: 10 * number,
            next_sequence: 10 * number + 1,
            position: 0,
            wall_unix_ms: 1_000_000 + attached_ms,
            attached_ms,
            repeats: 0,
            size_bytes: 1 << 30,
            clean: false,
            extent_total: 0,
            live_bytes: 0,
            segments: Vec::new(),
            parts: Vec::new(),
            kept: sawmill_format::kept_block::KeptBlock::default(),
        }
    }

    #[test]
    fn a_window_of_many_checkpoints_retains_a_bounded_number_of_them() {
        let mut book = CutBook { retention_s: 1000, ..CutBook::default() };
        for number in 1..100_000 {
            let root = root(number, 100 * number);
            book.retain_root(&root);
            book.prune(root.attached_ms);
            assert!(
                book.retained().count() as u64 <= limits::RETAINED_PER_WINDOW_MAX + 2,
                "{number}"
            );
        }
        let ages = book.retained().map(cut_attached_ms).collect::<Vec<_>>();
        assert!(
            ages[0] + 1_000_000 <= 99_999 * 100 && ages[1] + 1_000_000 > 99_999 * 100,
            "the whole window"
        );
    }

    #[test]
    fn no_way_to_a_moment_leads_through_a_rollback_a_new_size_or_a_jump_of_the_clock() {
        let mut book = CutBook { retention_s: 1_000_000, ..CutBook::default() };
        let mut is_retained = |root: &Checkpoint, rolled_back: u64| {
            book.rolled_back = rolled_back;
            book.retain_root(root);
            book.retained().any(|cut| cut.number == root.number)
        };
        assert!(is_retained(&root(1, 0), 0) && !is_retained(&root(2, 1), 0));
        assert!(
            is_retained(&root(3, 2), 25) && !is_retained(&root(4, 3), 25),
            "a rollback at segment 25"
        );
        let larger = Checkpoint { size_bytes: 2 << 30, ..root(5, 4) };
        assert!(is_retained(&larger, 25));
        let later = Checkpoint { wall_unix_ms: 2_000_000, size_bytes: 2 << 30, ..root(6, 5) };
        let earlier = Checkpoint { wall_unix_ms: 1_000_000, size_bytes: 2 << 30, ..root(7, 6) };
        assert!(is_retained(&later, 25) && is_retained(&earlier, 25));
    }

    #[test]
    fn a_sequence_belongs_to_the_first_ancestor_that_reaches_it() {
        let entry = |through_sequence, id| LineageEntry {
            through_sequence,
            volume_id: VolumeId([id; 16]),
            pin: 1,
            cut_number: 1,
            cut_through: through_sequence,
        };
        let lineage = Lineage::new(&[entry(10, 1), entry(20, 2)]);
        let owner = |sequence| lineage.owner(VolumeId([3; 16]), sequence).0[0];
        assert_eq!([1, 10, 11, 20, 21].map(owner), [1, 1, 2, 2, 3]);
    }
}
