//! A map whose groups are loaded when they are first needed is, for whoever asks, the map that was
//! loaded at once.

use std::collections::HashMap;
use std::time::Duration;

use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::map_part::{PartIdentity, encode_part};
use sawmill_testkit::Dice;

use super::freeze::freeze_map;
use super::held::{HeldChange, HeldGroup, HeldPart};
use super::{GROUP_BYTES, Location, MapExtent, MapPiece, ObjectMap, PAGE_BYTES};
use crate::ErrorKind;
use crate::limits::AttachmentBounds;

const PAGE: u64 = PAGE_BYTES as u64;
const GROUPS: u64 = 4;
/// Only these pages on either side of a border between two groups are used.
const PAGES: u64 = 24;

fn identity(group: u64) -> PartIdentity {
    PartIdentity { volume_id: VolumeId([7; 16]), group, number: 3, put_id: PutId([1; 16]) }
}

fn held_part(group: u64, extents: &[MapExtent]) -> HeldPart {
    let extents: Vec<_> = extents.iter().copied().map(Into::into).collect();
    let bytes = encode_part(&identity(group), group * GROUP_BYTES, &extents).unwrap().into();
    HeldPart { identity: identity(group), bytes, extents: extents.len() as u32 }
}

/// The same content, held.
fn held(map: &ObjectMap) -> ObjectMap {
    let held = ObjectMap::new(map.size_bytes());
    for group in map.groups() {
        let part = Some(held_part(group, &map.export_group(group)));
        assert!(held.hold(group, HeldGroup { part, deltas: Vec::new() }));
    }
    held
}

/// A place of up to twelve pages, often across a border.
fn range(dice: &mut Dice) -> (u64, u64) {
    let border = (1 + dice.below(GROUPS - 1)) * GROUP_BYTES;
    let address = border - PAGES * PAGE + dice.below(2 * PAGES) * PAGE + dice.below(2) * 512;
    (address, 512 * (1 + dice.below(96)))
}

fn pieces(map: &ObjectMap, address: u64, length: u64) -> Vec<MapPiece> {
    let mut list = Vec::new();
    map.lookup(address, length, &mut |piece| list.push(piece));
    list
}

/// A map, and the bytes that it made lose each segment.
struct Counted {
    map: ObjectMap,
    lost: HashMap<u32, u64>,
}

impl Counted {
    fn act(&mut self, kind: u64, (address, length): (u64, u64), sequence: u32, from: Location) {
        let Counted { map, lost } = self;
        let mut lose = |sequence, bytes: u64| *lost.entry(sequence).or_default() += bytes;
        match kind {
            0..6 => map.insert(address, length, sequence, 4096, &mut lose),
            6..8 => map.remove(address, length, &mut lose),
            _ => {
                let to = Location { sequence, data_offset: 8192 };
                let moved = map.move_if(address, length, from, to);
                lose(from.sequence, moved.moved_bytes);
                lose(sequence, length - moved.moved_bytes - moved.held_bytes);
            }
        }
    }

    fn take_losses(&mut self) {
        for (sequence, bytes) in self.map.take_losses() {
            *self.lost.entry(sequence).or_default() += bytes;
        }
        self.lost.retain(|_, bytes| *bytes > 0);
    }
}

#[test]
fn a_held_map_is_the_map_whatever_changes_and_whenever_it_is_loaded() {
    for seed in 1..300 {
        let mut dice = Dice::new(seed);
        let base = ObjectMap::new(GROUPS * GROUP_BYTES);
        for sequence in 1..60 {
            let (address, length) = range(&mut dice);
            base.insert(address, length, sequence, 0, &mut |_, _| {});
        }
        let mut late = Counted { map: held(&base), lost: HashMap::new() };
        base.groups().iter().for_each(|group| {
            base.export_group(*group);
            base.mark_clean(*group);
        });
        let mut whole = Counted { map: base, lost: HashMap::new() };
        assert_eq!(late.map.extents(), whole.map.extents(), "seed {seed}");
        for sequence in 60..90 {
            let (kind, place) = (dice.below(10), range(&mut dice));
            let from = match pieces(&whole.map, place.0, 1)[0].location {
                Some(location) => location,
                None => Location { sequence: 1, data_offset: 0 },
            };
            whole.act(kind, place, sequence, from);
            late.act(kind, place, sequence, from);
            match dice.below(12) {
                0 => late.map.load_next(),
                1 => {
                    let (address, length) = range(&mut dice);
                    let expected = pieces(&whole.map, address, length);
                    assert_eq!(pieces(&late.map, address, length), expected, "seed {seed}");
                }
                _ => {}
            }
        }
        late.map.load_all();
        assert!(late.map.is_whole() && late.map.broken().is_none(), "seed {seed}");
        late.take_losses();
        whole.take_losses();
        assert_eq!(late.lost, whole.lost, "seed {seed}");
        assert_eq!(late.map.dirty_groups(), whole.map.dirty_groups(), "seed {seed}");
        assert_eq!(late.map.mapped_bytes(), whole.map.mapped_bytes(), "seed {seed}");
        for group in 0..GROUPS {
            let expected = whole.map.export_group(group);
            assert_eq!(late.map.export_group(group), expected, "seed {seed}, group {group}");
        }
    }
}

#[test]
fn what_waits_for_a_held_group_counts_as_memory_until_it_is_loaded() {
    let map = held_page();
    let before = map.memory_bytes();
    for page in 0..1000 {
        map.insert(GROUP_BYTES + 2 * page * PAGE, PAGE, 2, 0, &mut |_, _| {});
    }
    let waiting_bytes = map.memory_bytes() - before;
    let least = 1000 * size_of::<HeldChange>() as u64;
    assert!((least..=2 * least).contains(&waiting_bytes), "{waiting_bytes} bytes");
    assert_eq!(map.held_groups(), 1);
    map.load_all();
    assert_eq!(map.held_groups(), 0);
    let group = map.group(1).unwrap();
    assert_eq!(group.hold.waiting_bytes(), 0);
}

#[test]
fn what_a_delta_says_counts_over_the_part_and_under_what_came_since() {
    let extent = |page: u64, sequence| MapExtent {
        address: GROUP_BYTES + page * PAGE,
        length: PAGE,
        sequence,
        data_offset: 0,
    };
    let map = ObjectMap::new(GROUPS * GROUP_BYTES);
    let part = Some(held_part(1, &[extent(0, 1), extent(2, 1), extent(4, 1)]));
    // The second one makes a hole.
    let deltas = vec![(4, vec![extent(2, 2), extent(6, 2)]), (5, vec![extent(4, 0)])];
    assert!(map.hold(1, HeldGroup { part, deltas }));
    let mut lost = Vec::new();
    map.insert(GROUP_BYTES + 6 * PAGE, PAGE, 9, 0, &mut |sequence, bytes| {
        lost.push((sequence, bytes));
    });
    assert_eq!((lost, map.is_loaded(GROUP_BYTES, 1)), (vec![], false));
    let found: Vec<_> = map.export_group(1).iter().map(|one| (one.address, one.sequence)).collect();
    let at = |page: u64| GROUP_BYTES + page * PAGE;
    assert_eq!(found, [(at(0), 1), (at(2), 2), (at(6), 9)]);
    assert_eq!(map.take_losses(), [(2, PAGE)]);
    assert_eq!(map.delta_since().into_iter().collect::<Vec<_>>(), [(1, 4)]);
    assert_eq!(map.dirty_groups(), [1]);
}

#[test]
fn readers_and_the_engine_beside_a_load_see_all_of_a_group_or_wait() {
    for seed in 1..40 {
        let mut dice = Dice::new(seed);
        let base = ObjectMap::new(GROUPS * GROUP_BYTES);
        for page in 0..2000 {
            base.insert(GROUP_BYTES + 2 * page * PAGE, PAGE, 1, 0, &mut |_, _| {});
        }
        let map = held(&base);
        let newer = dice.below(2000) * 2 * PAGE + GROUP_BYTES;
        std::thread::scope(|threads| {
            threads.spawn(|| map.load_next());
            threads.spawn(|| {
                map.insert(newer, PAGE, 2, 0, &mut |_, _| {});
                let found = pieces(&map, newer, PAGE);
                assert_eq!(found[0].location.map(|at| at.sequence), Some(2), "seed {seed}");
            });
            threads.spawn(|| {
                let found = pieces(&map, GROUP_BYTES, 4000 * PAGE);
                let mapped = found.iter().filter(|piece| piece.location.is_some()).count();
                assert_eq!(mapped, 2000, "seed {seed}");
            });
        });
        assert!(map.is_whole());
    }
}

#[test]
fn a_group_that_cannot_be_loaded_gives_an_error_and_never_zeroes() {
    // Its checksum is right, but no volume of this size can have it.
    let past = MapExtent { address: GROUP_BYTES, length: PAGE, sequence: 1, data_offset: 0 };
    let strange = MapExtent { address: 2 * GROUP_BYTES, ..past };
    for (size_bytes, extent) in [(GROUP_BYTES + 512, past), (4 * GROUP_BYTES, strange)] {
        let map = ObjectMap::new(size_bytes);
        map.hold(1, HeldGroup { part: Some(held_part(1, &[extent])), deltas: Vec::new() });
        let error = map.load(GROUP_BYTES, 512).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("/map/"), "{error}");
        for piece in pieces(&map, GROUP_BYTES, 512) {
            assert_eq!(piece.location.map(|place| place.sequence), Some(u32::MAX));
        }
        // No checkpoint may have that.
        let identity = sawmill_format::checkpoint::CheckpointIdentity {
            volume_id: VolumeId([7; 16]),
            number: 4,
        };
        let frozen = freeze_map(&map, &[], identity, PutId([2; 16]), &AttachmentBounds::default());
        assert_eq!(frozen.map(drop).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

/// A held group of one page, the first of the second group.
fn held_page() -> ObjectMap {
    let map = ObjectMap::new(GROUPS * GROUP_BYTES);
    let extent = MapExtent { address: GROUP_BYTES, length: PAGE, sequence: 1, data_offset: 0 };
    let part = Some(held_part(1, &[extent]));
    assert!(map.hold(1, HeldGroup { part, deltas: Vec::new() }));
    map
}

#[test]
fn a_group_whose_loader_died_stops_the_volume_and_is_not_held_forever() {
    let map = held_page();
    // No volume has such a change: whoever makes it panics.
    let past = GROUPS * GROUP_BYTES;
    let location = Location { sequence: 2, data_offset: 0 };
    assert!(map.queue_if_held(1, HeldChange::Insert { start: past, end: past + PAGE, location }));
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| map.load_next()));
    assert!(died.is_err() && !map.is_whole() && map.broken().is_none());
    map.load_next();
    assert!(map.is_whole());
    assert_eq!(map.broken().unwrap().kind(), ErrorKind::Internal);
    assert_eq!(map.load(GROUP_BYTES, PAGE).unwrap_err().kind(), ErrorKind::Internal);
}

#[test]
fn a_change_does_not_wait_for_those_before_it_to_be_made() {
    let map = ObjectMap::new(GROUPS * GROUP_BYTES);
    assert!(map.hold(1, HeldGroup::default()));
    map.insert(GROUP_BYTES, PAGE, 1, 0, &mut |_, _| {});
    map.insert(GROUP_BYTES, PAGE, 2, 0, &mut |_, _| {});
    let group = map.group(1).unwrap();
    // Nobody can make these before this is dropped.
    let area = group.areas[0].0.read();
    let far = GROUP_BYTES + PAGE;
    std::thread::scope(|threads| {
        threads.spawn(|| map.load_next());
        let (told, inserted) = std::sync::mpsc::channel();
        let map = &map;
        threads.spawn(move || {
            while group.hold.changes.try_lock().is_some_and(|changes| !changes.is_empty()) {
                std::thread::yield_now();
            }
            map.insert(far, PAGE, 3, 0, &mut |_, _| {});
            let _ = told.send(());
        });
        let outcome = inserted.recv_timeout(Duration::from_secs(20));
        drop(area);
        assert_eq!(outcome, Ok(()), "it waited");
    });
    let found: Vec<_> = map.export_group(1).iter().map(|one| (one.address, one.sequence)).collect();
    assert_eq!(found, [(GROUP_BYTES, 2), (far, 3)]);
    assert_eq!(map.take_losses(), [(1, PAGE)]);
}
