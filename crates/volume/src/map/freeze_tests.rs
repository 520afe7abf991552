//! Checkpoints with deltas give back the map that they were made of, and cost what changed.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use sawmill_format::checkpoint::{Checkpoint, CheckpointIdentity, PartEntry};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::KeptBlock;
use sawmill_format::map_part::{PartIdentity, part_key};
use sawmill_store::{Blocking, Class, ObjectStore, StoreOptions};

use super::freeze::{FrozenMap, freeze_map};
use super::{GROUP_BYTES, Location, MapPiece, ObjectMap, PAGE_BYTES};
use crate::limits::{AttachmentBounds, MAP_DELTAS_MAX};
use crate::recovery::map_hold::LoadTime;

const PAGE: u64 = PAGE_BYTES as u64;
const VOLUME: VolumeId = VolumeId([7; 16]);
/// Extents of each group at first.
const FILLED: u64 = 300;

/// A store with the newest checkpoint of a map.
struct Kept {
    store: Arc<dyn ObjectStore>,
    number: u64,
    size_bytes: u64,
    parts: Vec<PartEntry>,
}

impl Kept {
    fn new() -> Kept {
        let store = sawmill_store::open("memory:", StoreOptions::default()).unwrap();
        Kept { store, number: 0, size_bytes: 0, parts: Vec::new() }
    }

    fn key(part: &PartEntry) -> String {
        let PartEntry { group, number, put_id, .. } = *part;
        part_key(&PartIdentity { volume_id: VOLUME, group, number, put_id })
    }

    /// Writes a checkpoint, and deletes what it supersedes. Returns the bytes put.
    fn checkpoint(&mut self, map: &ObjectMap, map_part_bytes_max: u64) -> u64 {
        self.number += 1;
        self.size_bytes = map.size_bytes();
        let frozen = self.freeze(map, map_part_bytes_max);
        let mut put_bytes = 0;
        for part in frozen.objects {
            put_bytes += part.bytes.len() as u64;
            let body = Bytes::from(part.bytes);
            Blocking(&*self.store).put(&part.key, body, Class::Upload).unwrap();
        }
        let named: HashSet<String> = frozen.parts.iter().map(Kept::key).collect();
        let gone = self.parts.iter().map(Kept::key).filter(|key| !named.contains(key)).collect();
        Blocking(&*self.store).delete(gone, Class::Background).unwrap();
        self.parts = frozen.parts;
        put_bytes
    }

    fn freeze(&self, map: &ObjectMap, map_part_bytes_max: u64) -> FrozenMap {
        let identity = CheckpointIdentity { volume_id: VOLUME, number: self.number };
        let bounds = AttachmentBounds {
            map_delta_from_bytes: 0,
            map_part_bytes_max,
            ..AttachmentBounds::default()
        };
        let put_id = PutId(u128::from(self.number).to_be_bytes());
        let frozen = freeze_map(map, &self.parts, identity, put_id, &bounds).unwrap();
        assert!(map.dirty_groups().is_empty());
        frozen
    }

    fn load(&self) -> ObjectMap {
        self.try_load(LoadTime::AtOnce).unwrap()
    }

    fn hold(&self) -> ObjectMap {
        self.try_load(LoadTime::WhenNeeded { from_bytes: 0 }).unwrap()
    }

    fn try_load(&self, load_time: LoadTime) -> crate::Result<ObjectMap> {
        let root = Checkpoint {
            volume_id: VOLUME,
            put_id: PutId([1; 16]),
            number: self.number,
            epoch: 1,
            through_sequence: 1,
            next_sequence: 2,
            position: 0,
            wall_unix_ms: 0,
            attached_ms: 0,
            repeats: 0,
            size_bytes: self.size_bytes,
            clean: false,
            extent_total: 0,
            live_bytes: 0,
            segments: Vec::new(),
            parts: self.parts.clone(),
            kept: KeptBlock::default(),
        };
        let identity = CheckpointIdentity { volume_id: VOLUME, number: self.number };
        let read = Checkpoint::decode(&root.encode().unwrap(), &identity).unwrap();
        Ok(load_time.view(&*self.store, &read)?.map)
    }

    fn deltas(&self) -> impl Iterator<Item = &PartEntry> {
        self.parts.iter().filter(|part| part.is_delta())
    }
}

fn pieces(map: &ObjectMap) -> Vec<MapPiece> {
    let mut list = Vec::new();
    map.lookup(0, 32 * GROUP_BYTES, &mut |piece| list.push(piece));
    list
}

fn insert(map: &ObjectMap, address: u64, length: u64, sequence: u32) {
    map.insert(address, length, sequence, 0, &mut |_, _| {});
}

fn resize(map: &ObjectMap, size_bytes: u64) {
    let before = map.size_bytes();
    if size_bytes < before {
        map.load_all();
    }
    map.remove(size_bytes, before.saturating_sub(size_bytes), &mut |_, _| {});
    map.set_size(size_bytes);
}

fn filled(groups: u64, extents: u64) -> ObjectMap {
    let map = ObjectMap::new(groups * GROUP_BYTES);
    for group in 0..groups {
        for number in 0..extents {
            insert(&map, group * GROUP_BYTES + number * 3 * PAGE, 2 * PAGE, 1 + number as u32);
        }
    }
    map
}

/// What, where (a group and a byte in it), how much.
type Change = (u8, u64, u64, u64);

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let byte = prop_oneof![
        4 => (0..FILLED * 3).prop_map(|page| page * PAGE),
        1 => 0..FILLED * 3 * PAGE,
        1 => GROUP_BYTES - 4 * PAGE..GROUP_BYTES,
    ];
    let length = prop_oneof![4 => Just(PAGE), 2 => 1..5 * PAGE, 1 => Just(GROUP_BYTES)];
    prop::collection::vec((0u8..12, 0u64..3, byte, length), 0..6)
}

fn change(map: &ObjectMap, (kind, group, byte, length): Change, sequence: u32) {
    let address = group * GROUP_BYTES + byte;
    let short = length.min(8 * PAGE);
    match kind {
        0 => resize(
            map,
            [GROUP_BYTES / 2, GROUP_BYTES + 40 * PAGE + 512, 3 * GROUP_BYTES][group as usize],
        ),
        1 => map.mark_dirty(&[group]),
        2..4 => map.remove(address, length, &mut |_, _| {}),
        4..6 => {
            let mut found = Vec::new();
            map.lookup(address, short, &mut |piece| found.push(piece));
            for MapPiece { address, length, location } in found {
                let Some(from) = location else { continue };
                let length = length.min(8 * PAGE);
                map.move_if(address, length, from, Location { sequence, data_offset: 0 });
            }
        }
        _ => insert(map, address, short, sequence),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_checkpoint_gives_back_the_map_whatever_is_in_deltas(
        rounds in prop::collection::vec((changes(), any::<bool>()), 1..24),
        part_bytes_max in prop_oneof![3 => Just(1u64 << 32), 1 => Just(5_000u64)],
    ) {
        let (mut map, mut kept, mut sequence) = (filled(3, FILLED), Kept::new(), 1000);
        kept.checkpoint(&map, part_bytes_max);
        for (changes, opens_again) in rounds {
            for one in changes {
                sequence += 1;
                change(&map, one, sequence);
            }
            kept.checkpoint(&map, part_bytes_max);
            let loaded = kept.load();
            prop_assert_eq!(pieces(&loaded), pieces(&map));
            prop_assert_eq!(loaded.mapped_bytes(), map.mapped_bytes());
            prop_assert_eq!(loaded.delta_since(), map.delta_since());
            if opens_again {
                map = loaded;
            }
        }
    }

    #[test]
    fn a_checkpoint_is_the_same_whether_its_map_is_held_or_loaded(
        rounds in prop::collection::vec(changes(), 1..24),
    ) {
        let (mut kept, mut sequence) = (Kept::new(), 1000);
        kept.checkpoint(&filled(3, FILLED), 1 << 32);
        for changes in rounds {
            let (held, loaded) = (kept.hold(), kept.load());
            for one in changes {
                sequence += 1;
                change(&held, one, sequence);
                change(&loaded, one, sequence);
            }
            // Their checksums are among them.
            kept.number += 1;
            let named = kept.freeze(&held, 1 << 32).parts;
            kept.number -= 1;
            kept.checkpoint(&loaded, 1 << 32);
            prop_assert_eq!(&named, &kept.parts);
            prop_assert_eq!(held.delta_since(), loaded.delta_since());
            prop_assert_eq!(pieces(&held), pieces(&loaded));
        }
    }
}

#[test]
fn a_checkpoint_loads_no_held_group_that_did_not_change() {
    let (map, mut kept) = (filled(3, FILLED), Kept::new());
    kept.checkpoint(&map, 1 << 32);
    let held = kept.hold();
    insert(&held, GROUP_BYTES, PAGE, 1000);
    kept.checkpoint(&held, 1 << 32);
    let is_loaded = |group: u64| held.is_loaded(group * GROUP_BYTES, 1);
    assert_eq!([0, 1, 2].map(is_loaded), [false, true, false]);
    insert(&map, GROUP_BYTES, PAGE, 1000);
    assert_eq!(pieces(&kept.load()), pieces(&map));
}

#[test]
fn a_checkpoint_puts_bytes_in_proportion_to_what_changed() {
    let (rounds, changes) = (400, 20);
    let (map, mut kept) = (filled(4, 10_000), Kept::new());
    let map_bytes = kept.checkpoint(&map, 1 << 32);
    let mut put_bytes = 0;
    for round in 0..rounds {
        for number in 0..changes {
            let extent = (round * 37 + number * 1999) % 40_000;
            let address = extent % 4 * GROUP_BYTES + extent / 4 * 3 * PAGE;
            insert(&map, address, PAGE, 20_000 + round as u32);
        }
        let bytes = kept.checkpoint(&map, 1 << 32);
        if round == 0 {
            assert!(bytes < changes * 32 + 100, "{bytes} bytes for {changes} changes");
        }
        put_bytes += bytes;
        let (deltas, delta_bytes) = kept
            .deltas()
            .fold((0, 0), |(count, bytes), part| (count + 1, bytes + u64::from(part.bytes)));
        assert!(deltas <= MAP_DELTAS_MAX + MAP_DELTAS_MAX / 2, "{deltas} deltas");
        assert!(delta_bytes < map_bytes / 4, "{delta_bytes} of {map_bytes} bytes are in deltas");
    }
    assert!(put_bytes < rounds * map_bytes / 20, "{put_bytes} bytes in {rounds} checkpoints");
    assert_eq!(pieces(&kept.load()), pieces(&map));
}

#[test]
fn a_small_map_is_written_as_older_versions_can_read_it() {
    let (map, mut kept) = (filled(2, 1000), Kept::new());
    kept.checkpoint(&map, 1 << 32);
    insert(&map, 0, PAGE, 5000);
    let identity = CheckpointIdentity { volume_id: VOLUME, number: 2 };
    let bounds = AttachmentBounds::default();
    let frozen = freeze_map(&map, &kept.parts, identity, PutId([2; 16]), &bounds).unwrap();
    assert!(frozen.parts.iter().all(|part| !part.is_delta()));
    assert_eq!(frozen.objects.len(), 1);
}

#[test]
fn a_map_of_many_parts_is_loaded_whole_or_not_at_all() {
    // Long enough for more threads than one.
    let (map, mut kept) = (filled(20, 30_000), Kept::new());
    kept.checkpoint(&map, 1 << 32);
    let bytes: u64 = kept.parts[..16].iter().map(|part| u64::from(part.bytes)).sum();
    assert!(bytes > 1 << 20, "{bytes}");
    let loaded = kept.load();
    assert_eq!(pieces(&loaded), pieces(&map));
    assert_eq!(loaded.extents(), map.extents());
    assert!(loaded.dirty_groups().is_empty());
    for index in [3, 18] {
        let key = Kept::key(&kept.parts[index]);
        let whole = Blocking(&*kept.store).get(&key, None, Class::Read).unwrap();
        let mut damaged = whole.to_vec();
        damaged[100] ^= 1;
        for bytes in [damaged, whole.to_vec()] {
            Blocking(&*kept.store).delete(vec![key.clone()], Class::Background).unwrap();
            let is_whole = bytes == whole;
            Blocking(&*kept.store).put(&key, Bytes::from(bytes), Class::Upload).unwrap();
            match kept.try_load(LoadTime::AtOnce) {
                Ok(_) => assert!(is_whole, "{key}"),
                Err(error) => assert!(!is_whole && error.to_string().contains(&key), "{error}"),
            }
        }
    }
}
