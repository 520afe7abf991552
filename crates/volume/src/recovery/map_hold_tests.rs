//! A map that is held is, at the open and later, the map that is loaded at once; and what the one
//! way refuses, the other does too. So also with parts that another writer made, or a faulty one.

use std::sync::Arc;

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, PartEntry};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::KeptBlock;
use sawmill_format::map_part::{
    HOLE_SEQUENCE, MapExtent, PartIdentity, delta_group, encode_part, part_crc, part_key,
};
use sawmill_store::{Blocking, Class, ObjectStore, StoreOptions};

use super::map_hold::LoadTime;
use crate::ErrorKind;
use crate::map::{GROUP_BYTES, MapPiece};
use crate::view::View;

const GIB: u64 = 1 << 30;
const SIZE_BYTES: u64 = 40 * GIB;
const VOLUME: VolumeId = VolumeId([7; 16]);
const NUMBER: u64 = 9;

fn extent(address: u64, length: u64, sequence: u64, data_offset: u32) -> MapExtent {
    MapExtent { address, length, sequence, data_offset }
}

/// A store with a checkpoint's parts.
struct Parts {
    store: Arc<dyn ObjectStore>,
    entries: Vec<PartEntry>,
}

impl Parts {
    fn new() -> Self {
        let store = sawmill_store::open("memory:", StoreOptions::default()).unwrap();
        Parts { store, entries: Vec::new() }
    }

    fn with(mut self, group: u64, number: u64, first: u64, extents: &[MapExtent]) -> Self {
        let put_id = PutId([number as u8; 16]);
        let identity = PartIdentity { volume_id: VOLUME, group, number, put_id };
        let body = encode_part(&identity, first, extents).unwrap();
        let (bytes, crc) = (body.len() as u32, part_crc(&body));
        let key = part_key(&identity);
        Blocking(&*self.store).put(&key, Bytes::from(body), Class::Upload).unwrap();
        let extents = extents.len() as u32;
        self.entries.push(PartEntry { group, number, put_id, bytes, extents, crc });
        self
    }

    fn group(self, group: u64, extents: &[MapExtent]) -> Self {
        self.with(group, 3, group * GROUP_BYTES, extents)
    }

    fn delta(self, extents: &[MapExtent]) -> Self {
        self.with(delta_group(NUMBER), NUMBER, 0, extents)
    }

    fn view(&self, load_time: LoadTime) -> crate::Result<View> {
        let root = Checkpoint {
            volume_id: VOLUME,
            put_id: PutId([2; 16]),
            number: NUMBER,
            epoch: 1,
            through_sequence: 80,
            next_sequence: 81,
            position: 0,
            wall_unix_ms: 0,
            attached_ms: 0,
            repeats: 0,
            size_bytes: SIZE_BYTES,
            clean: false,
            extent_total: 0,
            live_bytes: 0,
            segments: Vec::new(),
            parts: self.entries.clone(),
            kept: KeptBlock::default(),
        };
        load_time.view(&*self.store, &root)
    }

    /// Opens both ways. Returns the pieces of the map, if there is one, and whether it was held.
    fn compared(&self) -> (Result<Vec<MapPiece>, ErrorKind>, bool) {
        let pieces = |view: &View| {
            let mut list = Vec::new();
            view.map.lookup(0, SIZE_BYTES, &mut |piece| list.push(piece));
            list
        };
        let at_once = self.view(LoadTime::AtOnce);
        let later = self.view(LoadTime::WhenNeeded { from_bytes: 0 });
        match (at_once, later) {
            (Ok(at_once), Ok(later)) => {
                let is_held = !later.map.is_whole();
                // Each place in the order in which a client happens to ask.
                for address in (0..10).rev().map(|number| number * 4 * GIB) {
                    let (mut expected, mut found) = (None, None);
                    at_once.map.lookup(address, 4096, &mut |piece| expected = Some(piece));
                    later.map.lookup(address, 4096, &mut |piece| found = Some(piece));
                    assert_eq!(found, expected, "at {address}");
                }
                assert_eq!(pieces(&later), pieces(&at_once));
                assert!(later.map.broken().is_none());
                (Ok(pieces(&at_once)), is_held)
            }
            (Err(at_once), Err(later)) => {
                assert_eq!(later.to_string(), at_once.to_string());
                assert_eq!(later.kind(), at_once.kind());
                (Err(at_once.kind()), false)
            }
            (at_once, later) => {
                panic!("at once {:?}, later {:?}", at_once.map(drop).err(), later.map(drop).err())
            }
        }
    }
}

fn mapped(pieces: &[MapPiece]) -> usize {
    pieces.iter().filter(|piece| piece.location.is_some()).count()
}

#[test]
fn a_held_map_has_its_parts_and_deltas() {
    let parts = Parts::new()
        .group(0, &[extent(0, 4096, 70, 0), extent(4 * GIB, 8192, 71, 0)])
        .group(2, &[extent(36 * GIB, 4096, 72, 0)])
        .delta(&[
            extent(4 * GIB, 4096, HOLE_SEQUENCE, 0),
            // A large file was deleted.
            extent(8 * GIB, 5 * GIB, HOLE_SEQUENCE, 0),
            extent(20 * GIB, 4096, 73, 0),
        ]);
    let (pieces, is_held) = parts.compared();
    assert_eq!((mapped(&pieces.unwrap()), is_held), (4, true));
}

#[test]
fn groups_that_another_writer_cut_otherwise_keep_every_extent() {
    let wide = [extent(0, 4096, 70, 0), extent(20 * GIB, 4096, 71, 0)];
    let across = [extent(GROUP_BYTES - 4096, 8192, 70, 0)];
    for extents in [&wide[..], &across[..]] {
        // One group of 32 GiB, and the next.
        let parts = Parts::new().group(0, extents);
        let parts = parts.with(1, 3, 32 * GIB, &[extent(36 * GIB, 4096, 72, 0)]);
        let (pieces, is_held) = parts.compared();
        assert_eq!((mapped(&pieces.unwrap()), is_held), (extents.len() + 1, false));
    }
}

#[test]
fn a_root_that_counts_the_extents_of_a_part_wrong_hides_none() {
    for wrong in [0, 1, 1000] {
        let mut parts = Parts::new()
            .group(1, &[extent(20 * GIB, 4096, 70, 0), extent(24 * GIB, 4096, 70, 4096)]);
        parts.entries[0].extents = wrong;
        let (pieces, is_held) = parts.compared();
        assert_eq!((mapped(&pieces.unwrap()), is_held), (2, true), "{wrong}");
    }
}

#[test]
fn what_can_never_be_loaded_of_a_part_is_refused_at_the_open() {
    let strange = [
        (extent(SIZE_BYTES - 4096, 8192, 70, 0), ErrorKind::Corrupt),
        (extent(36 * GIB, 4096, 70, u32::MAX - 100), ErrorKind::Corrupt),
        // Another kind of error, which no older checkpoint mends.
        (extent(36 * GIB, 4096, 1 << 32, 0), ErrorKind::Invalid),
    ];
    for (extent, kind) in strange {
        let parts = Parts::new().group(2, &[extent]);
        assert_eq!(parts.compared(), (Err(kind), false), "{extent:?}");
    }
}

#[test]
fn what_can_never_be_loaded_of_a_delta_is_refused_at_the_open() {
    let whole = [extent(36 * GIB, 4096, 70, 0)];
    for strange in [
        extent(SIZE_BYTES - 4096, 8192, 71, 0),
        extent(SIZE_BYTES + GROUP_BYTES, 4096, 71, 0),
        extent(36 * GIB, 4096, 71, u32::MAX - 100),
    ] {
        let parts = Parts::new().group(2, &whole).delta(&[strange]);
        assert_eq!(parts.compared(), (Err(ErrorKind::Corrupt), false), "{strange:?}");
    }
}

#[test]
fn a_delta_with_an_extent_across_two_groups_counts_in_both() {
    let parts = Parts::new()
        .group(0, &[extent(0, 4096, 70, 0), extent(GROUP_BYTES - 4096, 4096, 70, 4096)])
        .group(1, &[extent(GROUP_BYTES, 4096, 70, 8192)])
        .delta(&[extent(GROUP_BYTES - 4096, 8192, 71, 0)]);
    let (pieces, is_held) = parts.compared();
    let pieces = pieces.unwrap();
    let newest = pieces.iter().find(|piece| piece.address == GROUP_BYTES - 4096).unwrap();
    assert_eq!((newest.length, newest.location.map(|at| at.sequence)), (8192, Some(71)));
    assert!(!is_held);
}
