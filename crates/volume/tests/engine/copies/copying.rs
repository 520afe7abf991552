//! The copier stopped anywhere, and a source that goes on and deletes.

use sawmill_device::ErrorKind;
use sawmill_store::{Fault, StoreErrorKind};
use sawmill_volume::replicate::{Copier, VolumeAt};
use sawmill_volume::{CreateOptions, Fencing, check};

use super::world::{Pair, copy, copy_with, has_name, machine_at, open_to_read, options, watching};
use crate::faulty::{copy_store, keys, memory, until};
use crate::rig::MIB;

#[test]
fn a_replica_holds_what_its_source_has_stored() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 7);
    let round = pair.copy().unwrap();
    assert_eq!(pair.cut_in(&pair.second), 7);
    assert!(round.objects > 7 && round.bytes > 7 << 18, "{round:?}");
    // By its age the source may have stored a checkpoint meanwhile: that is copied, once.
    until("only the root is put again, to be sure", || pair.copy().unwrap().objects == 1);
    pair.write(&volume, 9);
    pair.copy().unwrap();
    assert_eq!(pair.cut_in(&pair.second), 16);
    volume.close().unwrap();
    pair.copy().unwrap();
    let record = sawmill_volume::find(&*pair.second, "disk").unwrap();
    let report = check::check(&*pair.second, &record, &mut |_, _| ()).unwrap();
    assert_eq!(report.damage, vec![]);
}

#[test]
fn a_copier_that_dies_at_any_call_leaves_a_cut() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 6);
    let empty = memory();
    pair.copy().unwrap();
    let at_six = copy_store(&*pair.second);
    // So far ahead that the source has deleted what would come next.
    pair.write(&volume, 22);
    volume.close().unwrap();
    for (start, least) in [(&empty, 0), (&at_six, 6)] {
        let mut cuts = Vec::new();
        for death in 0.. {
            let second = copy_store(&**start);
            let faulty = watching(&second);
            faulty.script(Box::new(move |call| match call.number >= death {
                true => Fault::Fail(StoreErrorKind::Unavailable),
                false => Fault::None,
            }));
            let outcome = copy(&*pair.primary.plain, &*faulty);
            if has_name(&*second) {
                cuts.push(pair.cut_in(&second));
            }
            let is_done = outcome.is_ok();
            if death % 7 == 0 {
                copy(&*pair.primary.plain, &*second).unwrap();
                assert_eq!(pair.cut_in(&second), 28, "taken up again after call {death}");
            }
            if is_done {
                break;
            }
        }
        assert!(cuts.is_sorted() && cuts.first().is_some_and(|first| *first >= least), "{cuts:?}");
        assert_eq!(cuts.last(), Some(&28));
    }
}

#[test]
fn a_source_that_deletes_while_it_is_copied_makes_the_copier_begin_again() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 6);
    let (source, second) = (pair.primary.plain.clone(), pair.second.clone());
    let mut left = 12;
    copy_with(&*source, &*second, &options(), &mut |_| {
        if left > 0 {
            left -= 1;
            pair.write(&volume, 5);
        }
    })
    .unwrap();
    until("the source deletes", || volume.status().counters.segments_deleted > 0);
    assert_eq!(pair.cut_in(&second), pair.writes.len());
    volume.close().unwrap();
}

#[test]
fn what_newer_checkpoints_do_not_need_goes_at_the_replica_too() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    for _ in 0..8 {
        pair.write(&volume, 6);
        pair.copy().unwrap();
    }
    volume.close().unwrap();
    pair.copy().unwrap();
    let segments = keys(&*pair.second, "/seg/").len();
    assert!(segments < 30, "{segments} segments of 48 are there for five tiles");
    assert!(keys(&*pair.second, "/checkpoint/").len() <= 2);
    assert_eq!(pair.cut_in(&pair.second), 48);
}

#[test]
fn snapshots_come_along_and_stay() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 6);
    volume.create_snapshot("six").unwrap();
    volume.close().unwrap();
    // Another attachment, and so a fence, lies between the snapshot's checkpoint and the newest.
    let volume = pair.primary.open();
    for _ in 0..4 {
        pair.write(&volume, 8);
        pair.copy().unwrap();
    }
    let cut = Some(sawmill_volume::Cut::Snapshot("six".into()));
    let mut rig = machine_at(&pair.second);
    (rig.options.read_only, rig.options.cut) = (true, cut);
    assert_eq!(pair.cut_of(&rig.open()), 6);
    volume.delete_snapshot("six").unwrap();
    for _ in 0..4 {
        pair.write(&volume, 8);
        pair.copy().unwrap();
    }
    assert_eq!(rig.refused().0, ErrorKind::NotFound);
    assert_eq!(pair.cut_in(&pair.second), pair.writes.len());
    volume.close().unwrap();
}

#[test]
fn damage_at_the_source_is_not_copied() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 3);
    let key = keys(&*pair.primary.plain, "/seg/").pop().unwrap();
    pair.primary.tamper(&key, |bytes| {
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
    });
    let error = pair.copy().unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains(&key), "{error}");
    assert!(!keys(&*pair.second, "/seg/").contains(&key));
    drop(volume);
}

#[test]
fn a_replica_is_for_reading_alone() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 3);
    volume.close().unwrap();
    pair.copy().unwrap();
    let (kind, text) = machine_at(&pair.second).refused();
    assert!(kind == ErrorKind::Refused && text.contains("sawmill promote"), "{text}");
    let error =
        sawmill_volume::clone(&*pair.second, "disk", None, "copy", Fencing::Waived).unwrap_err();
    assert!(error.to_string().contains("replica"), "{error}");
    open_to_read(pair.second.clone()).unwrap();
}

#[test]
fn a_destination_that_is_something_else_is_refused() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 3);
    let source = pair.primary.plain.clone();
    let refused = |destination: &dyn sawmill_store::ObjectStore, name: &str| {
        let world = sawmill_volume::RealWorld::default();
        let begun = Copier::begin(
            &world,
            VolumeAt::new(&*source, "disk"),
            VolumeAt::new(destination, name),
            &options(),
        );
        let error = begun.err().unwrap();
        (error.kind(), error.to_string())
    };
    let (kind, text) = refused(&*source, "disk");
    assert!(kind == ErrorKind::Refused && text.contains("--fail-back"), "{text}");
    let other = memory();
    sawmill_volume::create(&*other, "disk", &CreateOptions::new(MIB)).unwrap();
    assert_eq!(refused(&*other, "disk").0, ErrorKind::Exists);
    pair.copy().unwrap();
    let (kind, text) = refused(&*pair.second, "disk2");
    assert!(kind == ErrorKind::Refused && text.contains("\"disk\""), "{text}");
    let third = memory();
    let error = copy(&*pair.second, &*third).unwrap_err();
    assert!(error.to_string().contains("replica itself"), "{error}");
    volume.close().unwrap();
}

#[test]
fn a_deleted_replica_can_be_made_again() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 8);
    pair.copy().unwrap();
    sawmill_volume::delete(&*pair.second, "disk").unwrap();
    let mut left = keys(&*pair.second, "");
    left.retain(|key| !key.contains("/word/") && !key.starts_with("names/"));
    assert_eq!(left, Vec::<String>::new(), "but what was said of the volume and its name");
    pair.write(&volume, 2);
    pair.copy().unwrap();
    assert_eq!(pair.cut_in(&pair.second), 10);
    volume.close().unwrap();
}
