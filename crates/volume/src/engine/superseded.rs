//! What a durable checkpoint has superseded, and what is still needed of the past. Not here:
//! deleting it (`cleanup`), and which parts and copies cuts start from (`past`).

use std::collections::HashSet;
use std::sync::Arc;

use sawmill_format::checkpoint::Checkpoint;
use sawmill_format::ids::PutId;
use sawmill_format::kept_block::{CutEntry, CutKind};

/// How many checkpoints after the end of the last cut still search for copies of checkpoints.
pub(super) const COPY_SEARCHES: u32 = 4;

/// The map parts that are still named.
#[derive(Default)]
pub(super) struct NamedParts {
    pub(super) named: HashSet<(u64, u64, PutId)>,
    /// For cuts of older attachments the parts are unknown: none up to this number is deleted.
    pub(super) unknown_through: u64,
}

impl NamedParts {
    /// The puts of the known parts.
    pub(super) fn puts(&self) -> impl Iterator<Item = PutId> {
        self.named.iter().map(|(_, _, put_id)| *put_id)
    }

    pub(super) fn holds(&self, group: u64, number: u64, put_id: PutId) -> bool {
        number <= self.unknown_through || self.named.contains(&(group, number, put_id))
    }
}

/// The copies of checkpoints that are still needed.
#[derive(Default)]
pub(super) struct Roots {
    pub(super) kept: HashSet<(u64, PutId)>,
    /// Whether there may be copies that are not needed.
    pub(super) may_have_unneeded: bool,
}

impl Roots {
    /// The copies that the newest two checkpoints keep.
    pub(super) fn of(newest: &Checkpoint, before: &Checkpoint, copies_left: &mut u32) -> Self {
        let name = |cut: &CutEntry| (cut.number, cut.put_id);
        let begun = |root: &Checkpoint| {
            root.kept
                .cuts
                .iter()
                .filter(|cut| cut.kind != CutKind::Pin)
                .map(name)
                .collect::<HashSet<_>>()
        };
        let mut kept = begun(newest);
        kept.extend(begun(before));
        // A few more times after the last of them is deleted, because the newest are never deleted
        // immediately.
        *copies_left = if kept.is_empty() { copies_left.saturating_sub(1) } else { COPY_SEARCHES };
        let may_have_unneeded = *copies_left > 0;
        Roots { kept, may_have_unneeded }
    }
}

/// Whether a key is that of a checkpoint's copy.
pub(super) fn is_copy(key: &str) -> bool {
    key.split_once('/').is_some_and(|(_, rest)| rest.starts_with("kept/"))
}

/// What a durable checkpoint has superseded, and what it still needs.
#[derive(Default)]
pub(super) struct SupersededObjects {
    /// The readable checkpoint before it, which stays too, or an older one that recovery passes
    /// through.
    pub(super) spared_from: u64,
    pub(super) number: u64,
    /// The parts that the newest two checkpoints and all cuts name.
    pub(super) named: Arc<NamedParts>,
    /// The copies of checkpoints that cuts need.
    pub(super) roots: Arc<Roots>,
    /// The puts of this attachment until then: puts of a later checkpoint are not garbage.
    pub(super) own_puts: Arc<HashSet<PutId>>,
    pub(super) doomed: Vec<u32>,
    /// Reads that may have looked up a doomed segment began in this period or before.
    pub(super) read_period: u64,
}
