//! A copier that lags: what it has put is a cut all the same, and "done" means what was stored when
//! it began.

use sawmill_device::ErrorKind;
use sawmill_store::{Blocking, Class, Fault, StoreErrorKind};
use sawmill_volume::replicate::{Copier, VolumeAt};
use sawmill_volume::{Cut, RealWorld};

use super::world::{
    Pair, copy, copy_with, damage, has_name, machine_at, open_to_read, options, watching,
};
use crate::faulty::{copy_store, holds, keys, memory, stored, tile_bytes, until};
use crate::rig::MIB;

#[test]
fn what_a_newer_checkpoint_made_possible_waits_for_it() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 3);
    pair.copy().unwrap();
    let at_three = copy_store(&*pair.second);
    // A write beyond the size that the replica's checkpoint knows.
    volume.resize(128 * MIB).unwrap();
    let beyond = 100 * MIB;
    sawmill_device::BlockDeviceExt::write_at(&*volume, beyond, &tile_bytes(1, 1)).unwrap();
    stored(&volume);
    for death in 0.. {
        let second = copy_store(&*at_three);
        let faulty = watching(&second);
        faulty.script(Box::new(move |call| match call.number >= death {
            true => Fault::Fail(StoreErrorKind::Unavailable),
            false => Fault::None,
        }));
        let outcome = copy(&*pair.primary.plain, &*faulty);
        let reader =
            open_to_read(second.clone()).unwrap_or_else(|error| panic!("call {death}: {error}"));
        if outcome.is_ok() {
            holds(&reader, beyond, &tile_bytes(1, 1));
            break;
        }
    }
    volume.close().unwrap();
}

#[test]
fn a_segment_beyond_what_the_replica_knows_is_not_shown_before() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 3);
    pair.copy().unwrap();
    volume.resize(128 * MIB).unwrap();
    sawmill_device::BlockDeviceExt::write_at(&*volume, 100 * MIB, &tile_bytes(1, 1)).unwrap();
    stored(&volume);
    // As an older copier left it: the log of the source without its checkpoints.
    let source = pair.primary.plain.clone();
    for key in keys(&*source, "/seg/") {
        let bytes =
            sawmill_store::Blocking(&*source).get(&key, None, sawmill_store::Class::Read).unwrap();
        sawmill_store::Blocking(&*pair.second)
            .put(&key, bytes, sawmill_store::Class::Upload)
            .unwrap();
    }
    assert_eq!(pair.cut_in(&pair.second), 3);
    pair.copy().unwrap();
    holds(&open_to_read(pair.second.clone()).unwrap(), 100 * MIB, &tile_bytes(1, 1));
    volume.close().unwrap();
}

#[test]
fn a_round_ends_although_its_source_never_rests() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 3);
    let (source, second) = (pair.primary.plain.clone(), pair.second.clone());
    let mut calls = 0;
    copy_with(&*source, &*second, &options(), &mut |_| {
        calls += 1;
        assert!(calls < 100, "the round does not end");
        pair.write(&volume, 1);
        if calls > 8 {
            assert!(
                has_name(&*second),
                "it can be read although the log behind its checkpoint goes on"
            );
        }
    })
    .unwrap();
    assert!(pair.cut_in(&second) >= 3);
    volume.close().unwrap();
}

#[test]
fn done_means_all_that_was_stored_when_it_began() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 6);
    let (source, second) = (pair.primary.plain.clone(), memory());
    let world = RealWorld::default();
    let mut copier = Copier::begin(
        &world,
        VolumeAt::new(&*source, "disk"),
        VolumeAt::new(&*second, "disk"),
        &options(),
    )
    .unwrap();
    let mut is_done = false;
    let mut writes_before = 0;
    copier
        .round(&mut |bytes| {
            // While the root is copied, the source writes and deletes far beyond it.
            let roots = keys(&*source, "/checkpoint/");
            // The source lives: it may delete a root between the list and the read.
            let read = |key: &String| Blocking(&*source).get(key, None, Class::Read);
            let is_root =
                roots.iter().any(|key| read(key).is_ok_and(|root| root.len() as u64 == bytes));
            if is_root && !is_done {
                is_done = true;
                let (deleted, next) =
                    (volume.status().counters.segments_deleted, pair.writes.len());
                writes_before = next;
                pair.write(&volume, 30);
                until("the source deletes", || {
                    volume.status().counters.segments_deleted > deleted + 8
                });
            }
        })
        .unwrap();
    assert!(is_done);
    let cut = pair.cut_in(&second);
    assert!(cut >= writes_before + 6, "the round says done at {cut} of {}", pair.writes.len());
    volume.close().unwrap();
}

#[test]
fn a_checkpoint_that_cannot_be_read_at_the_source_fails_with_unavailable() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 3);
    pair.copy().unwrap();
    pair.write(&volume, 5);
    volume.create_snapshot("behind").unwrap();
    volume.close().unwrap();
    let volume = pair.primary.open();
    pair.write(&volume, 1);
    let source = copy_store(&*pair.primary.plain);
    damage(&source, &keys(&*source, "/checkpoint/").pop().unwrap());
    let second = copy_store(&*pair.second);
    let error = copy(&*source, &*second).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    pair.cut_in(&second);
    volume.close().unwrap();
}

#[test]
fn a_hole_in_the_past_of_a_replica_is_damage() {
    let mut pair = Pair::new();
    pair.primary.options.checkpoint_bytes = 64 * MIB;
    let volume = pair.primary.open();
    volume.set_retention(3600).unwrap();
    pair.write(&volume, 2);
    volume.close().unwrap();
    let volume = pair.primary.open();
    let before = keys(&*pair.primary.plain, "/seg/");
    // Each tile is written once: nothing dies, so no checkpoint comes between.
    for _ in 0..3 {
        pair.write(&volume, 1);
    }
    let position = volume.status().positions.stored;
    volume.close().unwrap();
    pair.copy().unwrap();
    let mut rig = machine_at(&pair.second);
    (rig.options.read_only, rig.options.cut) = (true, Some(Cut::Position(position - 1)));
    rig.open();
    let mut new = keys(&*pair.second, "/seg/");
    new.retain(|key| !before.contains(key));
    let hole = new.swap_remove(new.len() - 2);
    sawmill_store::Blocking(&*pair.second)
        .delete(vec![hole], sawmill_store::Class::Upload)
        .unwrap();
    assert_eq!(rig.refused().0, ErrorKind::NotFound);
}
