//! What is to be loaded into groups of the object map when they are first needed, and the changes
//! that wait for that.
//!
//! Invariants: a group is held until everything that is to be in it is there. While it is held, its
//! changes wait in the order in which they came. What is in a held part was fetched and verified:
//! loading it asks nobody.
//!
//! Not here: loading (`load`), what a changed byte is in a loaded group (`object`), and fetching
//! the parts (`recovery::map_hold`).

use std::collections::{HashMap, VecDeque};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_format::map_part::PartIdentity;

use super::{Location, MapExtent};
use crate::Error;

/// What is to be loaded into a group.
#[derive(Default)]
pub(crate) struct HeldGroup {
    pub(crate) part: Option<HeldPart>,
    /// What deltas say of the group: each with the delta's number, the oldest first.
    pub(crate) deltas: Vec<(u64, Vec<MapExtent>)>,
}

/// A verified part.
pub(crate) struct HeldPart {
    pub(crate) identity: PartIdentity,
    pub(crate) bytes: Bytes,
    pub(crate) extents: u32,
}

impl HeldGroup {
    /// About how many there will be.
    pub(super) fn extents(&self) -> u64 {
        self.part.as_ref().map_or(0, |part| u64::from(part.extents))
    }

    pub(super) fn bytes(&self) -> u64 {
        let part_bytes = self.part.as_ref().map_or(0, |part| part.bytes.len());
        let deltas = self.deltas.iter().map(|(_, extents)| size_of_val(&extents[..]));
        (part_bytes + deltas.sum::<usize>()) as u64
    }
}

/// A change of bytes of one group.
#[derive(Clone, Copy)]
pub(super) enum HeldChange {
    Insert { start: u64, end: u64, location: Location },
    Remove { start: u64, end: u64 },
    Move { start: u64, end: u64, from: Location, to: Location },
}

impl HeldChange {
    /// Whether `next` removes only what this one has removed.
    fn has_removed(&self, next: &HeldChange) -> bool {
        match (self, next) {
            (
                HeldChange::Remove { start, end },
                HeldChange::Remove { start: next_start, end: next_end },
            ) => start <= next_start && next_end <= end,
            _ => false,
        }
    }
}

/// One group, held or not.
#[derive(Default)]
pub(super) struct Hold {
    is_held: AtomicBool,
    /// Locked while the group is loaded. `None` in a held group: its loader panicked.
    pub(super) content: Mutex<Option<HeldGroup>>,
    /// Bounded by the log since the checkpoint that the map was read from: no newer one begins
    /// before these are made.
    pub(super) changes: Mutex<Vec<HeldChange>>,
}

impl Hold {
    pub(super) fn is_held(&self) -> bool {
        self.is_held.load(Ordering::Acquire)
    }

    pub(super) fn begin(&self, content: HeldGroup) {
        *self.content.lock() = Some(content);
        self.is_held.store(true, Ordering::Release);
    }

    /// Whether changes wait, or may wait: somebody is loading the group, or died of that.
    pub(super) fn may_have_changes(&self) -> bool {
        self.is_held()
            && match self.content.try_lock() {
                Some(content) => content.is_none() || !self.changes.lock().is_empty(),
                None => true,
            }
    }

    /// Memory of the changes that wait.
    pub(super) fn waiting_bytes(&self) -> usize {
        self.changes.lock().capacity() * size_of::<HeldChange>()
    }

    /// The caller holds the lock of `changes`, and none waits there.
    pub(super) fn end(&self) {
        self.is_held.store(false, Ordering::Release);
    }

    /// Lets a change wait, if the group is held: returns whether it is.
    pub(super) fn queue_if_held(&self, change: HeldChange) -> bool {
        if !self.is_held() {
            return false;
        }
        let mut changes = self.changes.lock();
        // It may have been loaded before the lock was free.
        let is_held = self.is_held();
        if is_held && !changes.last().is_some_and(|last| last.has_removed(&change)) {
            changes.push(change);
        }
        is_held
    }
}

/// The held groups of a map.
#[derive(Default)]
pub(super) struct HeldGroups {
    pub(super) count: AtomicUsize,
    pub(super) extents: AtomicU64,
    pub(super) bytes: AtomicU64,
    /// Groups in the order in which the engine loads them; some may have been loaded meanwhile.
    /// Bounded by the groups of the volume.
    pub(super) order: Mutex<VecDeque<u64>>,
    /// What changes replaced that had waited, by segment. Bounded by the volume's segments.
    pub(super) losses: Mutex<HashMap<u32, u64>>,
    /// Why a group cannot be loaded.
    pub(super) broken: OnceLock<Error>,
}
