//! Groups of the object map that are loaded when they are first needed: whoever looks into one
//! loads it, and the engine has the others loaded one after the other.
//!
//! Invariants:
//! 1. A group's part is loaded first, then its deltas, the oldest first, then the changes that
//!    waited, in order. So nothing older ever covers what is newer.
//! 2. A group is held until all that was done: nobody sees less than all of it.
//! 3. What the waiting changes replace is in the losses before the map counts as whole.
//! 4. A group that cannot be loaded names a segment that no volume has, everywhere: reads of it
//!    fail, and never give zeroes. The volume stops then.
//!
//! Not here: what is held (`held`), fetching and verifying it (`recovery::map_hold`), and when the
//! engine loads (`engine`).

use std::collections::HashMap;
use std::sync::atomic::Ordering;

#[cfg(test)]
use parking_lot::MutexGuard;
use sawmill_format::map_part::{HOLE_SEQUENCE, part_key};

use super::held::{HeldChange, HeldGroup};
use super::object::{Group, ObjectMap};
use super::part::extents_in;
use super::{AREA_BYTES, GROUP_BYTES, Location, MapExtent, spans};
use crate::{Error, ErrorKind, Result};

/// No segment has this sequence (`limits::SEQUENCE_MAX`).
pub(crate) const UNREADABLE_SEQUENCE: u32 = u32::MAX;
const UNREADABLE: Location = Location { sequence: UNREADABLE_SEQUENCE, data_offset: 0 };

impl ObjectMap {
    /// Leaves `content` to be loaded into a group in which nothing is yet. False if the volume ends
    /// before that group.
    pub(crate) fn hold(&self, number: u64, content: HeldGroup) -> bool {
        let Some(entry) = self.groups.entry(number) else { return false };
        let held = &self.held;
        held.extents.fetch_add(content.extents(), Ordering::Relaxed);
        held.bytes.fetch_add(content.bytes(), Ordering::Relaxed);
        held.order.lock().push_back(number);
        held.count.fetch_add(1, Ordering::AcqRel);
        let group = entry.get_or_init(Group::new);
        // A checkpoint names the deltas that held groups need, too.
        let since = content.deltas.first().map_or(0, |(number, _)| *number);
        group.delta_since.store(since, Ordering::Relaxed);
        group.hold.begin(content);
        true
    }

    /// Whether no group is held.
    pub(crate) fn is_whole(&self) -> bool {
        self.held.count.load(Ordering::Acquire) == 0
    }

    /// How many groups are held.
    pub(crate) fn held_groups(&self) -> u64 {
        self.held.count.load(Ordering::Acquire) as u64
    }

    /// Whether no group of the range is held: then a lookup takes no longer than usual.
    pub(crate) fn is_loaded(&self, address: u64, length: u64) -> bool {
        let is_loaded = |number| self.group(number).is_none_or(|group| !group.hold.is_held());
        let mut numbers = spans(address, self.clamped_end(address, length), GROUP_BYTES);
        self.is_whole() || numbers.all(|(number, ..)| is_loaded(number))
    }

    /// Loads the groups of the range. An error if any of the map cannot be loaded.
    pub(crate) fn load(&self, address: u64, length: u64) -> Result<()> {
        self.load_held(address, self.clamped_end(address, length));
        self.broken().map_or(Ok(()), Err)
    }

    /// Whether a delta may say this of a group: `overlay` then fails for nothing.
    pub(crate) fn can_overlay(&self, number: u64, extents: &[MapExtent]) -> bool {
        let is_hole = |extent: &MapExtent| u64::from(extent.sequence) == HOLE_SEQUENCE;
        // One by one, as they are loaded. A hole may be as long as its group.
        let fits = |extent: &MapExtent| is_hole(extent) || self.check_import(&[*extent]).is_ok();
        is_of_group(number, extents) && extents.iter().all(fits)
    }

    /// Loads one more group.
    pub(crate) fn load_next(&self) {
        loop {
            let Some(&number) = self.held.order.lock().front() else { return };
            let group = self.group(number).filter(|group| group.hold.is_held());
            if let Some(group) = group {
                self.load_group(number, group);
            }
            // Afterwards: the next call finds out if whoever loads it dies.
            let mut order = self.held.order.lock();
            if order.front() == Some(&number) {
                order.pop_front();
            }
            if group.is_some() {
                return;
            }
        }
    }

    /// Whether changes wait for their groups, or may wait.
    pub(crate) fn may_have_changes_waiting(&self) -> bool {
        !self.is_whole() && self.next_changed().is_some()
    }

    /// Loads one more group for which changes wait.
    pub(crate) fn load_next_changed(&self) {
        if let Some((number, group)) = self.next_changed() {
            self.load_group(number, group);
        }
    }

    fn next_changed(&self) -> Option<(u64, &Group)> {
        self.present().find(|(_, group)| group.hold.may_have_changes())
    }

    /// Whoever loads the group waits while this is held.
    #[cfg(test)]
    pub(crate) fn delay_load(&self, number: u64) -> MutexGuard<'_, Option<HeldGroup>> {
        self.group(number).expect("it is held").hold.content.lock()
    }

    /// Loads all groups.
    pub(crate) fn load_all(&self) {
        while !self.is_whole() {
            self.load_held(0, self.size_bytes());
        }
    }

    /// Why some of the map cannot be loaded, if so.
    pub(crate) fn broken(&self) -> Option<Error> {
        self.held.broken.get().cloned()
    }

    /// What was replaced, by segment, when groups were loaded, and was not taken yet.
    pub(crate) fn take_losses(&self) -> Vec<(u32, u64)> {
        std::mem::take(&mut *self.held.losses.lock()).into_iter().collect()
    }

    /// Lets a change of a group wait, if that is held: returns whether it is.
    pub(super) fn queue_if_held(&self, number: u64, change: HeldChange) -> bool {
        !self.is_whole() && self.group(number).is_some_and(|group| group.hold.queue_if_held(change))
    }

    /// Loads what is held of `address..end`.
    pub(super) fn load_held(&self, address: u64, end: u64) {
        if self.is_whole() {
            return;
        }
        for (number, ..) in spans(address, end, GROUP_BYTES) {
            if let Some(group) = self.group(number).filter(|group| group.hold.is_held()) {
                self.load_group(number, group);
            }
        }
    }

    fn load_group(&self, number: u64, group: &Group) {
        let mut content = group.hold.content.lock();
        if !group.hold.is_held() {
            // Another thread was first.
            return;
        }
        let held = &self.held;
        let taken = content.take();
        let size = taken.as_ref().map(|content| (content.extents(), content.bytes()));
        let filled = match taken {
            Some(content) => self.fill(number, content),
            None => {
                let text =
                    format!("the thread that loaded map group {number} panicked: report this");
                Err(Error::new(ErrorKind::Internal, text))
            }
        };
        if let Err(error) = filled {
            // The first one tells.
            let _ = held.broken.set(error);
            self.fill_with_unreadable(number);
        }
        self.make_changes(group);
        let (extents, bytes) = size.unwrap_or_default();
        held.extents.fetch_sub(extents, Ordering::Relaxed);
        held.bytes.fetch_sub(bytes, Ordering::Relaxed);
        held.count.fetch_sub(1, Ordering::AcqRel);
    }

    /// Makes the changes that waited, until none is left, and ends the hold. More may come to wait
    /// meanwhile: whoever makes them does not wait.
    fn make_changes(&self, group: &Group) {
        loop {
            let mut waiting = group.hold.changes.lock();
            if waiting.is_empty() {
                return group.hold.end();
            }
            let changes = std::mem::take(&mut *waiting);
            drop(waiting);
            let mut losses: HashMap<u32, u64> = HashMap::new();
            let mut replaced = |sequence, bytes| *losses.entry(sequence).or_default() += bytes;
            changes.into_iter().for_each(|change| self.make(change, &mut replaced));
            let mut all = self.held.losses.lock();
            losses
                .into_iter()
                .for_each(|(sequence, bytes)| *all.entry(sequence).or_default() += bytes);
        }
    }

    /// Loads what was held, except the changes.
    fn fill(&self, number: u64, content: HeldGroup) -> Result<()> {
        let HeldGroup { part, deltas } = content;
        if let Some(part) = part {
            let extents = extents_in(&part.bytes, &part.identity, "run `sawmill check`")?;
            let impossible = |what: String| {
                let text = format!("{}: {what}; run `sawmill check`", part_key(&part.identity));
                Error::new(ErrorKind::Corrupt, text)
            };
            if !is_of_group(number, &extents) {
                return Err(impossible("it names bytes of another group".into()));
            }
            drop(part.bytes);
            self.import(&extents)
                .map_err(|error| impossible(error.to_string()).with_source(error))?;
        }
        for (delta, extents) in deltas {
            self.overlay(delta, &extents).map_err(|error| {
                let what = format!("delta {delta} of map group {number}: run `sawmill check`");
                Error::caused(ErrorKind::Corrupt, what, error)
            })?;
        }
        Ok(())
    }

    /// Area by area: an extent must not pass 4 GiB of its segment's data space.
    fn fill_with_unreadable(&self, number: u64) {
        let first = number * GROUP_BYTES;
        let end = self.clamped_end(first, GROUP_BYTES);
        for (_, start, stop) in spans(first, end, AREA_BYTES) {
            self.insert_now(start, stop, UNREADABLE, &mut |_, _| {});
        }
    }

    /// Makes a change that waited. `replaced` is told which bytes of segments are no longer mapped.
    fn make(&self, change: HeldChange, replaced: &mut dyn FnMut(u32, u64)) {
        match change {
            HeldChange::Insert { start, end, location } => {
                self.insert_now(start, end, location, replaced);
            }
            HeldChange::Remove { start, end } => self.remove_now(start, end, replaced),
            HeldChange::Move { start, end, from, to } => {
                let moved_bytes = self.move_now(start, end, from, to);
                replaced(from.sequence, moved_bytes);
                replaced(to.sequence, end - start - moved_bytes);
            }
        }
    }
}

/// Whether sorted extents lie in this group.
fn is_of_group(number: u64, extents: &[MapExtent]) -> bool {
    let last_byte =
        |extent: &MapExtent| extent.address.saturating_add(extent.length.saturating_sub(1));
    extents.first().is_none_or(|first| first.address / GROUP_BYTES == number)
        && extents.last().is_none_or(|last| last_byte(last) / GROUP_BYTES == number)
}
