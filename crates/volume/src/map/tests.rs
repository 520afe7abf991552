//! The object map against a byte-by-byte model, and its bounds on memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use super::{AREA_BYTES, GROUP_BYTES, Location, MapExtent, MapPiece, ObjectMap, PAGE_BYTES};

const PAGE: u64 = PAGE_BYTES as u64;
/// The models' window: 48 KiB on either side of a border between areas.
const WINDOW: u64 = AREA_BYTES - 48 * 1024;
const WINDOW_BYTES: u64 = 96 * 1024;

fn pieces(map: &ObjectMap, address: u64, length: u64) -> Vec<MapPiece> {
    let mut list = Vec::new();
    map.lookup(address, length, &mut |piece| list.push(piece));
    list
}

fn extent(address: u64, length: u64, sequence: u32, data_offset: u32) -> MapExtent {
    MapExtent { address, length, sequence, data_offset }
}

fn insert(map: &ObjectMap, extent: MapExtent) -> HashMap<u32, u64> {
    let mut replaced = HashMap::new();
    map.insert(
        extent.address,
        extent.length,
        extent.sequence,
        extent.data_offset,
        &mut |sequence, bytes| {
            *replaced.entry(sequence).or_default() += bytes;
        },
    );
    replaced
}

fn export(map: &ObjectMap) -> Vec<MapExtent> {
    map.groups().into_iter().flat_map(|group| map.export_group(group)).collect()
}

/// A checkpoint has it: what changed since takes no memory.
fn written(map: &ObjectMap) {
    for group in map.groups() {
        map.export_changes(group);
        map.mark_clean(group);
    }
}

/// A small generator, so that big maps are made quickly and reproducibly.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((u128::from(self.0 ^ self.0 >> 31) * u128::from(bound)) >> 64) as u64
    }
}

/// One location per byte of the window.
struct Model(Vec<Option<Location>>);

impl Model {
    fn slice(&mut self, start: u64, length: u64) -> &mut [Option<Location>] {
        &mut self.0[start as usize..(start + length) as usize]
    }

    fn put(&mut self, start: u64, length: u64, to: Option<Location>) -> HashMap<u32, u64> {
        let mut replaced = HashMap::new();
        for (byte, distance) in self.slice(start, length).iter_mut().zip(0..) {
            if let Some(old) = byte {
                *replaced.entry(old.sequence).or_default() += 1;
            }
            *byte = to.map(|to| to.advanced(distance));
        }
        replaced
    }

    fn move_if(&mut self, start: u64, length: u64, from: Location, to: Location) -> u64 {
        let mut moved = 0;
        for (byte, distance) in self.slice(start, length).iter_mut().zip(0..) {
            if *byte == Some(from.advanced(distance)) {
                *byte = Some(to.advanced(distance));
                moved += 1;
            }
        }
        moved
    }

    /// What a lookup must visit: the longest stretches that continue byte by byte.
    fn pieces(&self, start: u64, length: u64) -> Vec<MapPiece> {
        let mut list: Vec<MapPiece> = Vec::new();
        for at in start..start + length {
            let location = self.0[at as usize];
            match list.last_mut() {
                Some(last)
                    if last.location.map(|place| place.advanced(last.length as u32))
                        == location =>
                {
                    last.length += 1;
                }
                _ => list.push(MapPiece { address: WINDOW + at, length: 1, location }),
            }
        }
        list
    }
}

#[derive(Clone, Debug)]
enum Step {
    Insert { start: u64, length: u64, to: Location },
    Remove { start: u64, length: u64 },
    Move { start: u64, length: u64, sequence: u32, to: Location },
    Lookup { start: u64, length: u64 },
    MakeDense,
    Export,
}

/// Ranges of the window: any bytes, sectors, or pages.
fn range() -> impl Strategy<Value = (u64, u64)> {
    (prop_oneof![Just(1u64), Just(512), Just(PAGE)], 0..WINDOW_BYTES, 1..5 * PAGE).prop_map(
        |(unit, start, length)| {
            let start = start / unit * unit;
            (start, length.next_multiple_of(unit).min(WINDOW_BYTES - start))
        },
    )
}

/// Few segments. Most data offsets equal the address, so that adjacent ranges often continue one
/// another.
fn location(start: u64) -> impl Strategy<Value = Location> {
    (1u32..4, prop_oneof![3 => Just(start as u32), 1 => 0u32..4096])
        .prop_map(|(sequence, data_offset)| Location { sequence, data_offset })
}

fn step() -> impl Strategy<Value = Step> {
    let placed =
        || range().prop_flat_map(|(start, length)| (Just(start), Just(length), location(start)));
    prop_oneof![
        8 => placed().prop_map(|(start, length, to)| Step::Insert { start, length, to }),
        3 => range().prop_map(|(start, length)| Step::Remove { start, length }),
        3 => (placed(), 1u32..4)
            .prop_map(|((start, length, to), sequence)| Step::Move { start, length, sequence, to }),
        6 => range().prop_map(|(start, length)| Step::Lookup { start, length }),
        1 => Just(Step::MakeDense),
        1 => Just(Step::Export),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn object_map_agrees_with_a_model_of_every_byte(steps in prop::collection::vec(step(), 1..80)) {
        let map = ObjectMap::new(2 * AREA_BYTES);
        let mut model = Model(vec![None; WINDOW_BYTES as usize]);
        for step in steps {
            match step {
                Step::Insert { start, length, to } => {
                    let extent = extent(WINDOW + start, length, to.sequence, to.data_offset);
                    prop_assert_eq!(insert(&map, extent), model.put(start, length, Some(to)));
                }
                Step::Remove { start, length } => {
                    let mut replaced = HashMap::new();
                    map.remove(WINDOW + start, length, &mut |sequence, bytes| {
                        *replaced.entry(sequence).or_default() += bytes;
                    });
                    prop_assert_eq!(replaced, model.put(start, length, None));
                }
                Step::Move { start, length, sequence, to } => {
                    let from = Location { sequence, data_offset: start as u32 };
                    let moved = map.move_if(WINDOW + start, length, from, to).moved_bytes;
                    prop_assert_eq!(moved, model.move_if(start, length, from, to));
                }
                Step::Lookup { start, length } => {
                    prop_assert_eq!(
                        pieces(&map, WINDOW + start, length), model.pieces(start, length)
                    );
                }
                Step::MakeDense => map.each_area(|area| if !area.is_empty() { area.make_dense() }),
                Step::Export => {
                    let mapped = model.pieces(0, WINDOW_BYTES).into_iter();
                    let expected: Vec<_> = mapped
                        .filter_map(|piece| {
                            let Location { sequence, data_offset } = piece.location?;
                            Some(extent(piece.address, piece.length, sequence, data_offset))
                        })
                        .collect();
                    prop_assert_eq!(export(&map), expected);
                }
            }
            let mapped = model.0.iter().flatten().count() as u64;
            prop_assert_eq!(map.mapped_bytes(), mapped);
            prop_assert_eq!(map.extents() == 0, mapped == 0);
        }
        prop_assert_eq!(pieces(&map, WINDOW, WINDOW_BYTES), model.pieces(0, WINDOW_BYTES));
    }
}

#[test]
fn export_and_import_give_the_same_map() {
    let size = 3 * GROUP_BYTES;
    let map = ObjectMap::new(size);
    let mut random = Random(1);
    for sequence in 1..20_000 {
        let address = random.below(size - (1 << 20));
        let length = 1 + random.below(if sequence % 50 == 0 { 1 << 20 } else { 70_000 });
        insert(&map, extent(address, length, sequence, random.below(1 << 24) as u32));
    }
    insert(&map, extent(GROUP_BYTES - (1 << 30), 3 << 30, 77, 5));
    let exported = export(&map);
    let copy = ObjectMap::new(size);
    copy.import(&exported).unwrap();
    assert!(export(&copy) == exported);
    assert!(pieces(&copy, 0, size) == pieces(&map, 0, size));
    assert_eq!(copy.mapped_bytes(), map.mapped_bytes());
    assert!(copy.dirty_groups().is_empty());
    assert!(exported.contains(&extent(GROUP_BYTES, 2 << 30, 77, 5 + (1 << 30))));
}

#[test]
fn import_refuses_what_cannot_be_a_map_and_loads_none_of_it() {
    let map = ObjectMap::new(1 << 40);
    let good = extent(0, 4096, 1, 0);
    for (bad, why) in [
        (extent(4096, 0, 1, 0), "is empty"),
        (extent(4095, 1, 1, 0), "before the one in front"),
        (extent((1 << 40) - 1, 2, 1, 0), "past the end of the volume"),
        (extent(u64::MAX, 2, 1, 0), "past the end of the volume"),
        (extent(4096, 2, 1, u32::MAX), "past 4 GiB"),
    ] {
        let error = map.import(&[good, bad]).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(error.index, 1);
        assert_eq!(map.mapped_bytes(), 0);
    }
}

#[test]
fn shattered_area_turns_into_a_page_table_and_back() {
    let map = ObjectMap::new(1 << 40);
    let dense = || {
        let mut count = 0;
        map.each_area(|area| count += usize::from(area.is_dense()));
        count
    };
    let mut model: Vec<Option<Location>> = vec![None; 4096];
    let mut random = Random(7);
    for turn in 1..30_000 {
        let to = Location { sequence: turn, data_offset: random.below(1 << 20) as u32 * 4096 };
        let page = random.below(4096);
        model[page as usize] = Some(to);
        insert(&map, extent(AREA_BYTES + page * PAGE, PAGE, to.sequence, to.data_offset));
    }
    assert_eq!(dense(), 1);
    for (page, &location) in model.iter().enumerate() {
        let address = AREA_BYTES + page as u64 * PAGE;
        assert_eq!(pieces(&map, address, PAGE), [MapPiece { address, length: PAGE, location }]);
    }
    let shattered_bytes = map.memory_bytes();
    insert(&map, extent(AREA_BYTES, AREA_BYTES - 4 * PAGE, 1 << 20, 0));
    assert_eq!(dense(), 1);
    let exported = map.export_group(0);
    assert_eq!(dense(), 0);
    assert_eq!(exported.len(), 5);
    assert_eq!(map.export_group(0), exported);
    assert!(map.memory_bytes() + 30_000 < shattered_bytes);
    assert_eq!(map.extents(), 5);
}

#[test]
fn areas_shattered_below_a_page_stay_bounded() {
    let map = ObjectMap::new(1 << 34);
    let empty_bytes = ObjectMap::new(1 << 34).memory_bytes() + 40_000;
    let mut random = Random(3);
    for turn in 0..200_000 {
        let sector = random.below(AREA_BYTES / 512);
        insert(&map, extent(sector * 512, 512, turn, random.below(1 << 20) as u32 * 512));
    }
    written(&map);
    let per_sector = (map.memory_bytes() - empty_bytes) as f64 / (AREA_BYTES / 512) as f64;
    assert!(per_sector <= 19.0, "{per_sector} bytes per sector");
}

#[test]
fn fully_shattered_space_takes_eight_bytes_per_page() {
    let areas = 64;
    let map = ObjectMap::new(1 << 34);
    for page in 0..areas * 4096 {
        insert(
            &map,
            extent(page * PAGE, PAGE, page as u32 * 7 % 1000, (page * 31 % 999) as u32 * 4096),
        );
    }
    let group_bytes = 40_000;
    let per_page = (map.memory_bytes() - group_bytes) as f64 / (areas * 4096) as f64;
    assert!(per_page <= 8.05, "{per_page} bytes per page");
}

#[test]
fn a_million_scattered_extents_take_under_22_bytes_each() {
    let size = 100 << 30;
    let map = ObjectMap::new(size);
    let mut random = Random(9);
    for turn in 0..1_000_000u32 {
        let address = random.below(size / PAGE - 16) * PAGE;
        insert(&map, extent(address, PAGE * (1 + random.below(4)), turn, 0));
    }
    written(&map);
    let per_extent = map.memory_bytes() as f64 / map.extents() as f64;
    assert!(map.extents() > 900_000);
    assert!(per_extent < 22.0, "{per_extent} bytes per extent");
}

#[test]
fn empty_map_and_huge_ranges_cost_nothing() {
    let size = 2 << 40;
    let map = ObjectMap::new(size);
    assert!(map.memory_bytes() < 10_000);
    map.remove(0, size, &mut |_, _| unreachable!());
    assert_eq!(pieces(&map, 0, size), [MapPiece { address: 0, length: size, location: None }]);
    assert!(map.groups().is_empty());
    insert(&map, extent(size - 1, 1, 9, 0));
    let mut replaced = Vec::new();
    map.remove(0, size, &mut |sequence, bytes| replaced.push((sequence, bytes)));
    assert_eq!(replaced, [(9, 1)]);
    assert_eq!((map.extents(), map.mapped_bytes()), (0, 0));
}

#[test]
fn bytes_past_the_end_are_a_hole_and_replaced_at_once() {
    let map = ObjectMap::new(10_000);
    assert_eq!(insert(&map, extent(8_000, 4_000, 3, 100)), HashMap::from([(3, 2_000)]));
    assert_eq!(insert(&map, extent(50_000, 10, 4, 0)), HashMap::from([(4, 10)]));
    let location = Some(Location { sequence: 3, data_offset: 1_100 });
    assert_eq!(
        pieces(&map, 9_000, 3_000),
        [
            MapPiece { address: 9_000, length: 1_000, location },
            MapPiece { address: 10_000, length: 2_000, location: None }
        ]
    );
    assert_eq!(map.mapped_bytes(), 2_000);
}

#[test]
fn extent_of_four_gib_reaches_the_end_of_data_space() {
    let map = ObjectMap::new(1 << 40);
    insert(&map, extent(123, 1 << 32, 5, 0));
    let last = Some(Location { sequence: 5, data_offset: u32::MAX });
    let address = 122 + (1 << 32);
    assert_eq!(pieces(&map, address, 1), [MapPiece { address, length: 1, location: last }]);
    assert_eq!(pieces(&map, 0, 1 << 33).len(), 3);
    // A page at the very end of data space is a page like any other in a page table.
    let map = ObjectMap::new(1 << 40);
    insert(&map, extent(0, PAGE, 5, u32::MAX - 4095));
    map.each_area(|area| {
        if !area.is_empty() {
            area.make_dense()
        }
    });
    let location = Some(Location { sequence: 5, data_offset: u32::MAX - 4095 });
    assert_eq!(pieces(&map, 0, PAGE), [MapPiece { address: 0, length: PAGE, location }]);
}

#[test]
fn change_after_the_export_keeps_the_group_dirty() {
    let map = ObjectMap::new(1 << 40);
    insert(&map, extent(0, 4096, 1, 0));
    insert(&map, extent(GROUP_BYTES, 4096, 1, 4096));
    assert_eq!(map.dirty_groups(), [0, 1]);
    for group in [0, 1] {
        map.export_group(group);
    }
    insert(&map, extent(8192, 4096, 2, 0));
    map.mark_clean(0);
    map.mark_clean(1);
    assert_eq!(map.dirty_groups(), [0]);
    map.remove(GROUP_BYTES + 4096, 4096, &mut |_, _| {});
    let nowhere = Location { sequence: 9, data_offset: 0 };
    assert_eq!(map.move_if(GROUP_BYTES, 4096, nowhere, nowhere).moved_bytes, 0);
    assert_eq!(map.dirty_groups(), [0]);
    map.mark_all_dirty();
    assert_eq!(map.dirty_groups(), [0, 1]);
}

#[test]
fn readers_beside_a_writer_never_see_a_hole() {
    let size = 4 * AREA_BYTES;
    let map = ObjectMap::new(size);
    insert(&map, extent(0, size, 1, 0));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (map, done) = (&map, &done);
            scope.spawn(move || {
                let mut random = Random(reader);
                while !done.load(Ordering::Relaxed) {
                    let address = random.below(size - 100_000);
                    let mut at = address;
                    map.lookup(address, 100_000, &mut |piece| {
                        assert_eq!(piece.address, at);
                        assert!(piece.location.is_some());
                        at += piece.length;
                    });
                    assert_eq!(at, address + 100_000);
                }
            });
        }
        let mut random = Random(100);
        for turn in 0..60_000 {
            let address = random.below(size - PAGE * 8) / 512 * 512;
            insert(&map, extent(address, 512 * (1 + random.below(64)), turn, 0));
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(map.mapped_bytes(), size);
}
