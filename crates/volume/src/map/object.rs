//! The object map: byte address -> place in a stored segment.
//!
//! Groups (16 GiB) are made when first written and stay; areas (16 MiB) lie inside them, each with
//! its own lock, so readers never wait for one another and wait for the writer only while it
//! changes the one area they read. A group keeps a bit per non-empty area, so that holes of any
//! size are skipped at 64 areas a step.
//!
//! Invariants:
//! 1. A bit of `occupied` is changed only under the write lock of its area, and is set while the
//!    area maps anything.
//! 2. `changes` of a group grows after the change it counts. So an export that did not see a change
//!    never marks the group clean.
//! 3. Nothing looks into a group that is held, or changes it: whoever looks into it loads it first,
//!    and changes wait (`load`).
//!
//! Not here: what the forms of an area look like, which groups are dirty (`dirty`), checkpoints,
//! live bytes of segments (callers count what `insert` and `remove` report as replaced).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use super::area::Area;
use super::changes::Changes;
use super::held::{HeldChange, HeldGroups, Hold};
use super::pieces::MapPieces;
use super::runs::{MapRun, ReplacedBytes};
use super::{
    AREA_BYTES, DATA_SPACE_BYTES, GROUP_BYTES, Location, MapExtent, MapLoadError, MapPiece,
    MoveOutcome, spans,
};

const AREAS: usize = (GROUP_BYTES / AREA_BYTES) as usize;

/// An area under its lock. Two fill a cache line, and none lies across two lines: a lookup of a
/// cold area would wait for both, one after the other.
#[derive(Default)]
#[repr(align(32))]
pub(super) struct AreaSlot(pub(super) RwLock<Area>);

const _: () = assert!(size_of::<AreaSlot>() == 32);

pub(super) struct Group {
    pub(super) areas: [AreaSlot; AREAS],
    occupied: [AtomicU64; AREAS / 64],
    pub(super) changes: AtomicU64,
    pub(super) changes_exported: AtomicU64,
    pub(super) changes_clean: AtomicU64,
    /// Holds all changes that `changes_clean` does not count, at least.
    pub(super) changed: Mutex<Changes>,
    /// See `freeze`.
    pub(super) delta_since: AtomicU64,
    pub(super) hold: Hold,
}

impl Group {
    pub(super) fn new() -> Box<Group> {
        Box::new(Group {
            areas: std::array::from_fn(|_| AreaSlot::default()),
            occupied: Default::default(),
            changes: AtomicU64::new(0),
            changes_exported: AtomicU64::new(0),
            changes_clean: AtomicU64::new(0),
            changed: Mutex::default(),
            delta_since: AtomicU64::new(0),
            hold: Hold::default(),
        })
    }

    pub(super) fn is_dirty(&self) -> bool {
        self.changes.load(Ordering::Acquire) != self.changes_clean.load(Ordering::Acquire)
    }

    /// After the change: see the second invariant. `start..end` are addresses of the volume.
    fn note_change(&self, start: u64, end: u64) {
        let from = start % GROUP_BYTES;
        self.changed.lock().add(from, from + (end - start));
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn note_whole(&self) {
        self.changed.lock().add_all();
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// The first non-empty area at or after `index`.
    fn next_occupied(&self, index: usize) -> Option<usize> {
        let mut word = index / 64;
        let mut bits = self.occupied.get(word)?.load(Ordering::Acquire) & (!0 << (index % 64));
        while bits == 0 {
            word += 1;
            bits = self.occupied.get(word)?.load(Ordering::Acquire);
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    /// Under the write lock of the area.
    fn note_occupied(&self, index: usize, is_occupied: bool) {
        let (word, bit) = (&self.occupied[index / 64], 1 << (index % 64));
        if (word.load(Ordering::Relaxed) & bit != 0) != is_occupied {
            word.fetch_xor(bit, Ordering::AcqRel);
        }
    }
}

/// The groups of a volume, by number. When the volume grows past the last one, more are chained
/// behind it, so that no reader waits or sees a group move.
pub(super) struct Groups {
    first: u64,
    table: Box<[OnceLock<Box<Group>>]>,
    more: OnceLock<Box<Groups>>,
}

impl Groups {
    fn new(first: u64, size_bytes: u64) -> Groups {
        let count = size_bytes.div_ceil(GROUP_BYTES).saturating_sub(first) as usize;
        let table = std::iter::repeat_with(OnceLock::new).take(count).collect();
        Groups { first, table, more: OnceLock::new() }
    }

    pub(super) fn entry(&self, number: u64) -> Option<&OnceLock<Box<Group>>> {
        let mut groups = self;
        loop {
            let index = usize::try_from(number - groups.first).ok()?;
            match groups.table.get(index) {
                Some(entry) => return Some(entry),
                None => groups = groups.more.get()?,
            }
        }
    }

    fn chain(&self) -> impl Iterator<Item = &Groups> {
        std::iter::successors(Some(self), |groups| groups.more.get().map(|more| &**more))
    }

    /// Makes room for a volume of `size_bytes`. Only the map's one writer calls this.
    fn reach(&self, size_bytes: u64) {
        let mut last = self;
        while let Some(more) = last.more.get() {
            last = more;
        }
        let end = last.first + last.table.len() as u64;
        if size_bytes.div_ceil(GROUP_BYTES) > end {
            let added = last.more.set(Box::new(Groups::new(end, size_bytes)));
            debug_assert!(added.is_ok(), "there is one writer");
        }
    }
}

/// Byte address -> place in a stored segment. Shared by any number of readers and writers; made for
/// one writer.
pub struct ObjectMap {
    pub(super) groups: Groups,
    size_bytes: AtomicU64,
    extents: AtomicU64,
    pub(super) mapped_bytes: AtomicU64,
    heap_bytes: AtomicU64,
    pub(super) held: HeldGroups,
}

impl ObjectMap {
    /// An empty map of a volume of `size_bytes`.
    pub fn new(size_bytes: u64) -> ObjectMap {
        ObjectMap {
            groups: Groups::new(0, size_bytes),
            size_bytes: AtomicU64::new(size_bytes),
            extents: AtomicU64::new(0),
            mapped_bytes: AtomicU64::new(0),
            heap_bytes: AtomicU64::new(0),
            held: HeldGroups::default(),
        }
    }

    /// Size of the volume.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Sets the volume's size. Before it shrinks, the caller loads the whole map and removes what
    /// lies beyond the new end.
    pub fn set_size(&self, size_bytes: u64) {
        self.groups.reach(size_bytes);
        // No part may name what lies past the end, not even one that a delta corrects.
        if size_bytes < self.size_bytes() {
            let is_cut = |number: u64| (number + 1) * GROUP_BYTES > size_bytes;
            let cut = self.present().filter(|(number, _)| is_cut(*number));
            cut.for_each(|(_, group)| group.note_whole());
        }
        self.size_bytes.store(size_bytes, Ordering::Release);
    }

    /// Maps `length` bytes at `address` to `data_offset` and following of segment `sequence`.
    /// `replaced` is told how many bytes of which segments are no longer mapped; bytes past the
    /// volume's end count as replaced at once.
    ///
    /// # Panics
    /// If the extent reaches past 4 GiB of data space.
    pub fn insert(
        &self,
        address: u64,
        length: u64,
        sequence: u32,
        data_offset: u32,
        replaced: &mut dyn FnMut(u32, u64),
    ) {
        assert!(
            u64::from(data_offset) + length <= DATA_SPACE_BYTES,
            "a segment ends at 4 GiB of data space"
        );
        let end = self.clamped_end(address, length);
        let kept_bytes = end.saturating_sub(address);
        if kept_bytes < length {
            replaced(sequence, length - kept_bytes);
        }
        for (number, start, end) in spans(address, end, GROUP_BYTES) {
            let location =
                Location { sequence, data_offset: data_offset + (start - address) as u32 };
            if !self.queue_if_held(number, HeldChange::Insert { start, end, location }) {
                self.insert_now(start, end, location, replaced);
            }
        }
    }

    /// As [`insert`](Self::insert), for bytes of the volume, without asking whether their group is
    /// held.
    pub(super) fn insert_now(
        &self,
        address: u64,
        end: u64,
        location: Location,
        replaced: &mut dyn FnMut(u32, u64),
    ) {
        for (area, start, stop) in spans(address, end, AREA_BYTES) {
            let location = location.advanced((start - address) as u32);
            let (group, index) = self.group_of(area);
            let (from, to) = within(area, start, stop);
            let bytes = self.reshape(group, index, &mut |area| {
                let mut replaced = ReplacedBytes::new(replaced);
                area.replace(from, to, Some(location), &mut replaced);
                replaced.finish()
            });
            group.note_change(start, stop);
            self.mapped_bytes.fetch_add((stop - start).wrapping_sub(bytes), Ordering::Relaxed);
        }
    }

    /// Maps `length` bytes at `address` to nothing. `replaced` as in [`insert`](Self::insert).
    pub fn remove(&self, address: u64, length: u64, replaced: &mut dyn FnMut(u32, u64)) {
        let end = self.clamped_end(address, length);
        if self.is_whole() {
            return self.remove_now(address, end, replaced);
        }
        for (number, start, end) in spans(address, end, GROUP_BYTES) {
            if !self.queue_if_held(number, HeldChange::Remove { start, end }) {
                self.remove_now(start, end, replaced);
            }
        }
    }

    pub(super) fn remove_now(&self, address: u64, end: u64, replaced: &mut dyn FnMut(u32, u64)) {
        self.each_occupied(address, end, |group, index, base, from, to| {
            let bytes = self.reshape(group, index, &mut |area| {
                let mut replaced = ReplacedBytes::new(replaced);
                area.replace(from, to, None, &mut replaced);
                replaced.finish()
            });
            if bytes > 0 {
                group.note_change(base + u64::from(from), base + u64::from(to));
            }
            self.mapped_bytes.fetch_sub(bytes, Ordering::Relaxed);
        });
    }

    /// Moves those bytes of the range that still lie where `from` says (the first at `from`, the
    /// others behind it) to the same distance from `to`; leaves all others alone.
    ///
    /// # Panics
    /// If either place reaches past 4 GiB of data space.
    pub fn move_if(&self, address: u64, length: u64, from: Location, to: Location) -> MoveOutcome {
        let reach = u64::from(from.data_offset.max(to.data_offset)) + length;
        assert!(reach <= DATA_SPACE_BYTES, "a segment ends at 4 GiB of data space");
        let mut outcome = MoveOutcome::default();
        for (number, start, end) in spans(address, self.clamped_end(address, length), GROUP_BYTES) {
            let distance = (start - address) as u32;
            let (from, to) = (from.advanced(distance), to.advanced(distance));
            match self.queue_if_held(number, HeldChange::Move { start, end, from, to }) {
                true => outcome.held_bytes += end - start,
                false => outcome.moved_bytes += self.move_now(start, end, from, to),
            }
        }
        outcome
    }

    /// Returns how many bytes moved.
    pub(super) fn move_now(&self, address: u64, end: u64, from: Location, to: Location) -> u64 {
        let mut moved_bytes = 0;
        self.each_occupied(address, end, |group, index, base, start, stop| {
            let moved = |run: MapRun| {
                let distance = (base + u64::from(run.start) - address) as u32;
                let is_there = run.location == from.advanced(distance);
                is_there.then(|| MapRun { location: to.advanced(distance), ..run })
            };
            let bytes = self.reshape(group, index, &mut |area| {
                let mut matching = Vec::new();
                area.lookup(start, stop, &mut |run| matching.extend(moved(run)));
                let mut ignored = |_, _| {};
                let mut replaced = ReplacedBytes::new(&mut ignored);
                for run in matching {
                    area.replace(run.start, run.end(), Some(run.location), &mut replaced);
                }
                replaced.finish()
            });
            if bytes > 0 {
                group.note_change(base + u64::from(start), base + u64::from(stop));
            }
            moved_bytes += bytes;
        });
        moved_bytes
    }

    /// Visits the whole range in address order, holes included, joined where pieces continue one
    /// another. Bytes past the volume's end are a hole.
    pub fn lookup(&self, address: u64, length: u64, visit: &mut dyn FnMut(MapPiece)) {
        let (end, mapped_end) = (address.saturating_add(length), self.clamped_end(address, length));
        self.load_held(address, mapped_end);
        let mut pieces = MapPieces::from(address, visit);
        self.each_occupied(address, mapped_end, |group, index, base, from, to| {
            group.areas[index].0.read().lookup(from, to, &mut |run| pieces.mapped(base, run));
        });
        pieces.finish(end);
    }

    /// Entries kept, and those of held groups. A dense area counts each page, so an export may have
    /// fewer.
    pub fn extents(&self) -> u64 {
        self.extents.load(Ordering::Relaxed) + self.held.extents.load(Ordering::Relaxed)
    }

    /// Bytes of the volume that lie in a stored segment.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Relaxed)
    }

    /// Memory held, as requested from the allocator.
    pub fn memory_bytes(&self) -> u64 {
        let changes_bytes =
            |group: &Group| group.changed.lock().heap_bytes() + group.hold.waiting_bytes();
        let group_bytes = |group: &Group| size_of::<Group>() + changes_bytes(group);
        let groups: usize = self.present().map(|(_, group)| group_bytes(group)).sum();
        let table: usize = self.groups.chain().map(|groups| size_of_val(&*groups.table)).sum();
        let loaded_bytes = (groups + table) as u64 + self.heap_bytes.load(Ordering::Relaxed);
        loaded_bytes + self.held.bytes.load(Ordering::Relaxed)
    }

    /// Groups that hold or held anything, in order.
    pub fn groups(&self) -> Vec<u64> {
        self.present().map(|(number, _)| number).collect()
    }

    /// Everything the group maps, sorted by address, joined where extents continue one another.
    /// Areas that lost most of their entries give memory back on the way. Concurrent changes may or
    /// may not be included: a caller that needs one consistent cut pauses the writer.
    pub fn export_group(&self, number: u64) -> Vec<MapExtent> {
        let mut list = Vec::new();
        let Some(group) = self.group(number) else { return list };
        self.load_held(number * GROUP_BYTES, self.clamped_end(number * GROUP_BYTES, GROUP_BYTES));
        group.changes_exported.store(group.changes.load(Ordering::Acquire), Ordering::Release);
        let first = number * GROUP_BYTES;
        let mut collect = |piece: MapPiece| {
            if let Some(Location { sequence, data_offset }) = piece.location {
                list.push(MapExtent {
                    address: piece.address,
                    length: piece.length,
                    sequence,
                    data_offset,
                });
            }
        };
        let mut pieces = MapPieces::from(first, &mut collect);
        let mut next = 0;
        while let Some(index) = group.next_occupied(next) {
            next = index + 1;
            let base = first + index as u64 * AREA_BYTES;
            let area = group.areas[index].0.read();
            let (mut runs, mut last) = (0, None::<MapRun>);
            area.lookup(0, AREA_BYTES as u32, &mut |run| {
                runs += usize::from(!last.is_some_and(|last| last.continues_in(&run)));
                last = Some(run);
                pieces.mapped(base, run);
            });
            let settle = area.should_turn_sparse(runs);
            drop(area);
            if settle {
                self.reshape(group, index, &mut |area| {
                    let sorted = area.sorted();
                    if area.should_turn_sparse(sorted.len()) {
                        *area = Area::from_sorted(&sorted);
                    }
                    0
                });
            }
        }
        pieces.finish(first);
        list
    }

    /// Loads what an export returned, sorted by address, on top of what is mapped. Groups that were
    /// clean stay clean: the extents come from a durable checkpoint. All is checked before anything
    /// is loaded. Not for held groups: those are loaded by `load`, with this.
    pub fn import(&self, extents: &[MapExtent]) -> Result<(), MapLoadError> {
        self.check_import(extents)?;
        let mut runs: Vec<MapRun> = Vec::new();
        let mut current = 0;
        for extent in extents {
            for (area, start, stop) in
                spans(extent.address, extent.address + extent.length, AREA_BYTES)
            {
                if area != current {
                    self.load_area(current, &runs);
                    runs.clear();
                    current = area;
                }
                let location =
                    Location { sequence: extent.sequence, data_offset: extent.data_offset };
                let (from, to) = within(area, start, stop);
                let run = MapRun::new(from, to, location.advanced((start - extent.address) as u32));
                match runs.last_mut() {
                    Some(last) if last.continues_in(&run) => last.length += run.length,
                    _ => runs.push(run),
                }
            }
        }
        self.load_area(current, &runs);
        Ok(())
    }

    pub(super) fn check_import(&self, extents: &[MapExtent]) -> Result<(), MapLoadError> {
        let mut previous_end = 0;
        for (index, extent) in extents.iter().enumerate() {
            let &MapExtent { address, length, data_offset, .. } = extent;
            let end = address.saturating_add(length);
            let why = if length == 0 {
                "is empty"
            } else if address < previous_end {
                "begins before the one in front of it ends"
            } else if end > self.size_bytes() {
                "ends past the end of the volume"
            } else if length > DATA_SPACE_BYTES - u64::from(data_offset) {
                "ends past 4 GiB of its segment's data space"
            } else {
                previous_end = end;
                continue;
            };
            return Err(MapLoadError { index, address, length, why });
        }
        Ok(())
    }

    /// `runs` keeps the invariants of an area's list.
    fn load_area(&self, area: u64, runs: &[MapRun]) {
        if runs.is_empty() {
            return;
        }
        let (group, index) = self.group_of(area);
        let bytes = self.reshape(group, index, &mut |area| {
            let mut ignored = |_, _| {};
            let mut replaced = ReplacedBytes::new(&mut ignored);
            if area.is_empty() {
                *area = Area::from_sorted(runs);
            } else {
                for run in runs {
                    area.replace(run.start, run.end(), Some(run.location), &mut replaced);
                }
            }
            replaced.finish()
        });
        let loaded: u64 = runs.iter().map(|run| u64::from(run.length)).sum();
        self.mapped_bytes.fetch_add(loaded.wrapping_sub(bytes), Ordering::Relaxed);
    }

    /// Runs `act` on an area and keeps the counters, not whether the group is dirty. Returns what
    /// `act` returns.
    pub(super) fn reshape(
        &self,
        group: &Group,
        index: usize,
        act: &mut dyn FnMut(&mut Area) -> u64,
    ) -> u64 {
        let mut area = group.areas[index].0.write();
        let (len, heap_bytes) = (area.len() as u64, area.heap_bytes() as u64);
        let result = act(&mut area);
        let (len_now, heap_bytes_now) = (area.len() as u64, area.heap_bytes() as u64);
        if len_now != len {
            self.extents.fetch_add(len_now.wrapping_sub(len), Ordering::Relaxed);
            group.note_occupied(index, len_now > 0);
        }
        if heap_bytes_now != heap_bytes {
            self.heap_bytes.fetch_add(heap_bytes_now.wrapping_sub(heap_bytes), Ordering::Relaxed);
        }
        result
    }

    /// Calls `act(group, index of the area, first byte of the area, from, to)` for each non-empty
    /// area of the range.
    pub(super) fn each_occupied(
        &self,
        address: u64,
        end: u64,
        mut act: impl FnMut(&Group, usize, u64, u32, u32),
    ) {
        for (number, start, stop) in spans(address, end, GROUP_BYTES) {
            let Some(group) = self.group(number) else { continue };
            let first = number * GROUP_BYTES;
            let mut next = ((start - first) / AREA_BYTES) as usize;
            while let Some(index) = group.next_occupied(next) {
                let base = first + index as u64 * AREA_BYTES;
                if base >= stop {
                    break;
                }
                let (from, to) = (start.max(base) - base, stop.min(base + AREA_BYTES) - base);
                act(group, index, base, from as u32, to as u32);
                next = index + 1;
            }
        }
    }

    pub(super) fn group(&self, number: u64) -> Option<&Group> {
        Some(self.groups.entry(number)?.get()?)
    }

    pub(super) fn present(&self) -> impl Iterator<Item = (u64, &Group)> {
        let entries =
            self.groups.chain().flat_map(|groups| groups.table.iter().zip(groups.first..));
        entries.filter_map(|(entry, number)| Some((number, &**entry.get()?)))
    }

    /// The group of an area of the volume, made if need be, and the area's index in it.
    fn group_of(&self, area: u64) -> (&Group, usize) {
        let (number, index) = (area as usize / AREAS, area as usize % AREAS);
        let entry = self
            .groups
            .entry(number as u64)
            .expect("addresses are clamped to the size of the volume");
        (entry.get_or_init(Group::new), index)
    }

    pub(super) fn clamped_end(&self, address: u64, length: u64) -> u64 {
        address.saturating_add(length).min(self.size_bytes())
    }

    #[cfg(test)]
    pub(super) fn each_area(&self, mut act: impl FnMut(&mut Area)) {
        for (_, group) in self.present() {
            for index in 0..AREAS {
                self.reshape(group, index, &mut |area| {
                    act(area);
                    0
                });
            }
        }
    }
}

/// `start..end` of the volume as bytes of the area that holds it.
fn within(area: u64, start: u64, end: u64) -> (u32, u32) {
    ((start - area * AREA_BYTES) as u32, (end - area * AREA_BYTES) as u32)
}
