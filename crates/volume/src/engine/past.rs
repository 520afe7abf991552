//! The past in a checkpoint, and what its deletes spare: copies of the checkpoints that cuts start
//! from, their parts, and the segments that cuts can reach.
//!
//! Invariants: a checkpoint names only cuts whose checkpoints have a durable copy, or are among the
//! newest two and get one with the next. What one of the newest two checkpoints keeps is not
//! deleted, so that either of them is readable with all its cuts.
//!
//! Not here: which cuts there are and what each needs (`cuts::book`), and the deletes (`cleanup`).

use std::collections::HashSet;

use sawmill_format::checkpoint::{Checkpoint, SegmentEntry, kept_key};
use sawmill_format::ids::PutId;
use sawmill_format::kept_block::{CutEntry, CutKind, KeptBlock};

use super::checkpoint::{Checkpoints, Freeze};
use super::context::Context;
use super::log_tail::LogTail;
use super::outgoing::OutgoingObject;
use super::root::PackedRoot;
use super::superseded::NamedParts;
use crate::recovery::end::RollbackRecord;
use crate::store_calls::cannot_encode;
use crate::view::View;

/// What a rollback needs of the past.
fn cut_of(rollback: RollbackRecord) -> CutEntry {
    CutEntry {
        kind: CutKind::Snapshot,
        number: rollback.cut_number,
        through_sequence: rollback.cut_through,
        name: String::new(),
        put_id: PutId([0; 16]),
        position: 0,
        wall_unix_ms: rollback.wall_unix_ms,
        pin: 0,
        attached_s: 0,
    }
}

impl Checkpoints {
    /// Adds copies of the checkpoints that cuts start from, where there are none yet. Returns their
    /// numbers.
    pub(super) fn copy_roots(
        &mut self,
        view: &View,
        freeze: &Freeze,
        objects: &mut Vec<OutgoingObject>,
    ) -> crate::Result<Vec<u64>> {
        if freeze.prunes {
            view.cuts.lock().prune(freeze.attached_ms);
        }
        let book = view.cuts.lock();
        let begins = |root: &PackedRoot| {
            book.cuts.iter().any(|cut| {
                cut.kind != CutKind::Pin && (cut.number, cut.put_id) == (root.number, root.put_id)
            })
        };
        self.uncopied.retain(begins);
        let mut copies = Vec::new();
        for root in self.uncopied.iter().chain([&self.newest_root]).filter(|root| begins(root)) {
            objects.push(OutgoingObject::new(
                kept_key(root.volume_id, root.number, root.put_id),
                root.whole().encode().map_err(cannot_encode)?,
            ));
            copies.push(root.number);
        }
        Ok(copies)
    }

    /// The rollback in the log between the newest durable checkpoint and the next one. If the next
    /// one is lost, recovery from this one needs the cut of the rollback, whichever cuts are kept
    /// by then.
    pub(super) fn crossed(&self) -> Option<RollbackRecord> {
        self.rolled_back.filter(|rollback| rollback.sequence > self.newest_root.through_sequence)
    }

    /// The moment of a checkpoint that is frozen now. No segment outside of it is older, so
    /// recovery to a later moment can start from it. Nothing comes between a rollback and its
    /// checkpoint: the state after the rollback has not changed since, and recovery to a later
    /// moment never passes the rollback itself.
    pub(super) fn frozen_unix_ms(&self, context: &Context, log: &LogTail) -> u64 {
        let rollback = self.crossed().filter(|rollback| rollback.sequence <= log.stored_sequence());
        if let Some(rollback) = rollback {
            return rollback.wall_unix_ms.max(self.newest_root.wall_unix_ms);
        }
        let under_way = log.uploads.iter().map(|upload| upload.contents().0.wall_unix_ms);
        under_way.fold(context.attachment.world.unix_ms(), u64::min)
    }

    /// What checkpoint `number` records about the past and the segments, and which segments may be
    /// deleted after it.
    pub(super) fn freeze_past(
        &self,
        view: &View,
        number: u64,
    ) -> (KeptBlock, Vec<SegmentEntry>, Vec<u32>) {
        let book = view.cuts.lock().clone();
        let mut before = self.newest_root.kept.cuts.clone();
        before.extend(self.crossed().map(cut_of));
        let needed = |sequence: u32, dead_since: u64| {
            let needs = |cuts| view.lineage.needs(cuts, u64::from(sequence), dead_since);
            needs(&book.cuts) || needs(&before)
        };
        let (mut segments, deletable) = view.segments.freeze(number, &needed);
        // Data of an ancestor is not ours to delete; it is enough to record that it is not needed.
        segments.retain(|segment| {
            let inherited = view.lineage.ancestor(segment.sequence).is_some();
            !(inherited && deletable.binary_search(&(segment.sequence as u32)).is_ok())
        });
        let dead = if book.cuts.is_empty() { Vec::new() } else { view.segments.dead() };
        let kept = KeptBlock {
            retention_s: book.retention_s,
            pins_next: book.pins_next,
            cuts: book.cuts,
            lineage: view.lineage.entries().to_vec(),
            dead,
        };
        (kept, segments, deletable)
    }

    /// The parts that the newest two checkpoints and all cuts name, if `root` is the newest.
    pub(super) fn named_parts(&mut self, view: &View, root: &Checkpoint) -> NamedParts {
        let book = view.cuts.lock();
        let begun: HashSet<u64> = book
            .cuts
            .iter()
            .chain(&root.kept.cuts)
            .chain(&self.newest_root.kept.cuts)
            .filter(|cut| cut.kind != CutKind::Pin)
            .map(|cut| cut.number)
            .chain(self.crossed().map(|rollback| rollback.cut_number))
            .collect();
        self.cut_parts.retain(|number, _| begun.contains(number));
        if begun.contains(&self.newest_root.number) {
            self.cut_parts.insert(self.newest_root.number, self.newest_root.parts.clone());
        }
        let unknown = begun
            .iter()
            .filter(|number| **number != root.number && !self.cut_parts.contains_key(number));
        let unknown_through = unknown.copied().max().unwrap_or(0);
        let parts = root
            .parts
            .iter()
            .chain(&self.newest_root.parts)
            .chain(self.cut_parts.values().flatten());
        let named = parts.map(|part| (part.group, part.number, part.put_id)).collect();
        NamedParts { named, unknown_through }
    }

    /// `root` is durable, and with it the copies of those in `copies`.
    pub(super) fn take_over(&mut self, view: &View, root: Checkpoint, copies: &[u64]) {
        let old = std::mem::replace(&mut self.newest_root, PackedRoot::of(root));
        self.uncopied.retain(|root| !copies.contains(&root.number));
        let mut book = view.cuts.lock();
        let begins = |cut: &CutEntry| (cut.number, cut.put_id) == (old.number, old.put_id);
        if !copies.contains(&old.number) && book.cuts.iter().any(begins) {
            self.uncopied.push(old);
        }
        book.retain_root(&self.newest_root);
    }
}
