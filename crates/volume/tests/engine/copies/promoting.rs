//! Promotion: exactly one wins, late comers hurt nobody, both histories go on apart, and one goes
//! back.

use std::sync::Arc;

use sawmill_device::ErrorKind;
use sawmill_store::{CallKind, Fault, ObjectStore, StoreErrorKind};
use sawmill_volume::replicate::{Copier, CopyOptions, VolumeAt, drill, promote};
use sawmill_volume::{RealWorld, check};

use super::world::{Pair, SLOTS, copy, copy_with, machine_at, open_to_read, options, watching};
use crate::faulty::{copy_store, keys, stored, tile_version, write_tile};

fn promoted(store: &Arc<dyn ObjectStore>) -> sawmill_volume::Result<u64> {
    promote(&RealWorld::default(), &**store, "disk").map(|promotion| promotion.position)
}

/// A pair with a replica that is one write behind, and the primary still open.
fn pair_with_replica() -> (Pair, Arc<sawmill_volume::Volume>) {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 9);
    pair.copy().unwrap();
    pair.write(&volume, 1);
    (pair, volume)
}

/// Writes to a promoted store, closes, opens again, and compares. Versions from 200 on are its own.
fn goes_on(pair: &Pair, store: &Arc<dyn ObjectStore>) {
    let rig = machine_at(store);
    let volume = rig.open();
    let cut = pair.cut_of(&volume);
    for version in 206..212 {
        write_tile(&volume, 0, version);
    }
    volume.close().unwrap();
    let volume = open_to_read(store.clone()).unwrap();
    assert_eq!(own_version(&volume), 211);
    let others: Vec<u64> = (1..SLOTS).map(|tile| tile_version(&volume, tile, 100)).collect();
    let last = |tile: u64| {
        let writes = pair.writes[..cut].iter().rposition(|one| *one == tile);
        writes.map_or(0, |at| at as u64 + 1)
    };
    assert_eq!(others, (1..SLOTS).map(last).collect::<Vec<_>>());
    let record = sawmill_volume::find(&**store, "disk").unwrap();
    assert_eq!(check::check(&**store, &record, &mut |_, _| ()).unwrap().damage, vec![]);
}

fn own_version(volume: &sawmill_volume::Volume) -> u64 {
    tile_version(volume, 0, 255)
}

#[test]
fn a_promoted_replica_goes_on_beside_its_primary_and_neither_reads_the_others_bytes() {
    let (mut pair, volume) = pair_with_replica();
    promoted(&pair.second).unwrap();
    pair.write(&volume, 8);
    goes_on(&pair, &pair.second);
    pair.write(&volume, 8);
    assert_eq!(pair.cut_of(&volume), 26);
    let error = pair.copy().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    volume.close().unwrap();
    let volume = pair.primary.open();
    assert_eq!(pair.cut_of(&volume), 26);
    volume.close().unwrap();
}

#[test]
fn a_promotion_that_dies_at_any_call_can_be_finished() {
    let (pair, volume) = pair_with_replica();
    volume.close().unwrap();
    for death in 0.. {
        let second = copy_store(&*pair.second);
        let faulty = watching(&second);
        faulty.script(Box::new(move |call| match call.number >= death {
            true => Fault::Fail(StoreErrorKind::Unavailable),
            false => Fault::None,
        }));
        let store: Arc<dyn ObjectStore> = faulty;
        let outcome = promoted(&store);
        assert_eq!(pair.cut_in(&second), 9, "it can be read after a death at call {death}");
        let again = promoted(&second);
        match &outcome {
            Ok(_) => assert_eq!(again.unwrap_err().kind(), ErrorKind::Refused),
            // The last call may have been the one before which it died.
            Err(_) => {
                // It may have died after all that matters.
                let is_done = |error: &sawmill_volume::Error| error.kind() == ErrorKind::Refused;
                assert!(again.as_ref().err().is_none_or(is_done), "{again:?}");
            }
        }
        goes_on(&pair, &second);
        if outcome.is_ok() {
            break;
        }
    }
}

#[test]
fn of_two_promotions_one_wins() {
    let (pair, volume) = pair_with_replica();
    // The second sleeps between its read and its put.
    let slow = watching(&pair.second);
    let second = pair.second.clone();
    slow.script(Box::new(|call| {
        match call.kind == CallKind::Put && call.key().contains("/role/") {
            true => Fault::Late,
            false => Fault::None,
        }
    }));
    let store: Arc<dyn ObjectStore> = slow.clone();
    assert_eq!(promoted(&store).unwrap_err().kind(), ErrorKind::Unavailable);
    promoted(&second).unwrap();
    slow.release_all();
    goes_on(&pair, &pair.second);
    assert_eq!(promoted(&pair.second).unwrap_err().kind(), ErrorKind::Refused);
    volume.close().unwrap();
}

#[test]
fn what_a_copier_put_late_is_no_part_of_a_promoted_history() {
    let (mut pair, volume) = pair_with_replica();
    pair.write(&volume, 22);
    volume.close().unwrap();
    for late in 0.. {
        let second = copy_store(&*pair.second);
        let slow = watching(&second);
        let mut puts = 0;
        slow.script(Box::new(move |call| {
            puts += u64::from(call.kind == CallKind::Put);
            match call.kind == CallKind::Put && puts > late {
                true => Fault::Late,
                false => Fault::None,
            }
        }));
        let outcome = copy(&*pair.primary.plain, &*slow);
        let cut = pair.cut_in(&second);
        promoted(&second).unwrap();
        slow.release_all();
        assert_eq!(pair.cut_in(&second), cut, "put {late}");
        goes_on(&pair, &second);
        if outcome.is_ok() {
            break;
        }
    }
}

#[test]
fn a_copier_that_finds_its_replica_promoted_changes_nothing_more() {
    let (mut pair, volume) = pair_with_replica();
    pair.write(&volume, 12);
    let (source, second) = (pair.primary.plain.clone(), pair.second.clone());
    let mut count = 0;
    let mut left_by = Vec::new();
    let outcome = copy_with(&*source, &*second, &options(), &mut |_| {
        count += 1;
        if count == 4 {
            promoted(&second).unwrap();
            left_by = keys(&*second, "");
        }
    });
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Fenced);
    assert_eq!(keys(&*pair.second, ""), left_by);
    goes_on(&pair, &pair.second);
    volume.close().unwrap();
}

#[test]
fn a_drill_verifies_and_changes_nothing() {
    let (pair, volume) = pair_with_replica();
    let before = keys(&*pair.second, "");
    let found = drill(&RealWorld::default(), &*pair.second, "disk", &mut |_, _| ()).unwrap();
    assert_eq!(found.check.damage, vec![]);
    assert!(found.promotion.position > 0 && found.check.segments > 0);
    assert_eq!(keys(&*pair.second, ""), before);
    let error =
        drill(&RealWorld::default(), &*pair.primary.plain, "disk", &mut |_, _| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    volume.close().unwrap();
}

#[test]
fn an_old_primary_becomes_a_replica_of_what_was_promoted() {
    let (mut pair, volume) = pair_with_replica();
    promoted(&pair.second).unwrap();
    // Nobody told the old primary; it goes on for a while.
    pair.write(&volume, 3);
    goes_on(&pair, &pair.second);
    let (old, new) = (pair.primary.plain.clone(), pair.second.clone());
    assert_eq!(copy(&*new, &*old).unwrap_err().kind(), ErrorKind::Refused);
    let back = CopyOptions { fail_back: true, ..options() };
    let wrong = copy_with(&*old, &*new, &back, &mut |_| ()).unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Refused, "{wrong}");
    let round = copy_with(&*new, &*old, &back, &mut |_| ()).unwrap();
    let all: u64 = keys(&*new, "/seg/").len() as u64;
    assert!(round.objects < all + 6, "only the delta: {round:?} of {all} segments");
    // Its writer learns of it.
    write_tile(&volume, 1, 99);
    assert!(volume.wait(sawmill_volume::Safety::Stored, None).is_err());
    drop(volume);
    assert_eq!(machine_at(&old).refused().0, ErrorKind::Refused);
    // And back again: the second goes on, the first follows, and is promoted in its turn.
    let rig = machine_at(&new);
    let volume = rig.open();
    write_tile(&volume, 0, 250);
    stored(&volume);
    volume.close().unwrap();
    copy(&*new, &*old).unwrap();
    promoted(&old).unwrap();
    let volume = machine_at(&old).open();
    assert_eq!(own_version(&volume), 250);
    volume.close().unwrap();
}

#[test]
fn a_fail_back_that_dies_at_any_call_can_be_taken_up() {
    let (mut pair, volume) = pair_with_replica();
    promoted(&pair.second).unwrap();
    pair.write(&volume, 3);
    drop(volume);
    goes_on(&pair, &pair.second);
    let back = CopyOptions { fail_back: true, ..options() };
    for death in 0.. {
        let old = copy_store(&*pair.primary.plain);
        let faulty = watching(&old);
        faulty.script(Box::new(move |call| match call.number >= death {
            true => Fault::Fail(StoreErrorKind::Unavailable),
            false => Fault::None,
        }));
        let world = RealWorld::default();
        let begun = Copier::begin(
            &world,
            VolumeAt::new(&*pair.second, "disk"),
            VolumeAt::new(&*faulty, "disk"),
            &back,
        );
        let outcome = begun.and_then(|mut copier| copier.round(&mut |_| ()));
        open_to_read(old.clone()).unwrap();
        copy_with(&*pair.second, &*old, &back, &mut |_| ()).unwrap();
        promoted(&old).unwrap();
        let volume = machine_at(&old).open();
        assert_eq!(own_version(&volume), 211, "call {death}");
        volume.close().unwrap();
        if outcome.is_ok() {
            break;
        }
    }
}
