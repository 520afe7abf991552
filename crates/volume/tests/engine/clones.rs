//! Clones share what they have in common, and no clone, and not the base, loses data when others
//! change or are deleted.

use std::sync::Arc;

use crate::faulty::{Machine, SEGMENT, keys, root_put, stored, tile_version, until, write_tile};
use crate::rig::{MIB, Rig};
use sawmill_device::ErrorKind;
use sawmill_store::{CallKind, Fault};
use sawmill_volume::{
    Cut, Fencing, Volume, check, clone, clone_each, delete, find, release_ancestors,
};

fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.options.checkpoint_bytes = MIB;
    machine
}

/// A machine for another volume of the same store.
fn machine_for(machine: &Machine, name: &str) -> Machine {
    let mut other = Machine::over(machine.plain.clone());
    other.rig.name = name.into();
    other.options.checkpoint_bytes = MIB;
    other
}

fn churn(volume: &Volume, tiles: std::ops::Range<u64>, version: u64) {
    let target_count = volume.status().counters.checkpoints + 4;
    until("checkpoints", || {
        for tile in tiles.clone() {
            write_tile(volume, tile, version);
        }
        stored(volume);
        volume.status().counters.checkpoints >= target_count
    });
}

fn versions(volume: &Volume) -> [u64; 4] {
    [0, 1, 2, 3].map(|tile| tile_version(volume, tile, 9))
}

/// A base with version 1 everywhere, and a snapshot of that.
fn base(machine: &Machine) -> Arc<Volume> {
    let volume = machine.open();
    for tile in 0..4 {
        write_tile(&volume, tile, 1);
    }
    volume.create_snapshot("one").unwrap();
    volume
}

fn sound(rig: &Rig) {
    let record = find(&*rig.store, &rig.name).unwrap();
    assert_eq!(
        check::check(&*rig.store, &record, &mut |_, _| ()).unwrap().damage,
        vec![],
        "{}",
        rig.name
    );
}

fn one() -> Option<Cut> {
    Some(Cut::Snapshot("one".into()))
}

#[test]
fn a_clone_and_its_base_go_their_own_ways() {
    let machine = machine();
    let volume = base(&machine);
    let before = keys(&*machine.plain, "/seg/").len();
    clone(&*machine.plain, "disk", one().as_ref(), "copy", Fencing::Demanded).unwrap();
    assert_eq!(keys(&*machine.plain, "/seg/").len(), before, "no data is copied");
    volume.delete_snapshot("one").unwrap();
    churn(&volume, 0..4, 2);
    let other = machine_for(&machine, "copy");
    let copy = other.open();
    assert_eq!(versions(&copy), [1; 4]);
    churn(&copy, 1..2, 3);
    churn(&volume, 0..4, 4);
    assert_eq!((versions(&copy), versions(&volume)), ([1, 3, 1, 1], [4; 4]));
    copy.close().unwrap();
    volume.close().unwrap();
    sound(&other);
    machine.assert_sound("the base");
    assert_eq!(versions(&other.open()), [1, 3, 1, 1]);
}

#[test]
fn the_present_of_a_served_volume_can_be_cloned() {
    let machine = machine();
    let volume = base(&machine);
    write_tile(&volume, 2, 5);
    stored(&volume);
    clone(&*machine.plain, "disk", None, "copy", Fencing::Demanded).unwrap();
    churn(&volume, 0..4, 6);
    let copy = machine_for(&machine, "copy").open();
    assert_eq!(versions(&copy), [1, 1, 5, 1]);
}

#[test]
fn a_clone_of_a_clone_outlives_both() {
    let machine = machine();
    let volume = base(&machine);
    volume.close().unwrap();
    clone(&*machine.plain, "disk", one().as_ref(), "child", Fencing::Demanded).unwrap();
    let second = machine_for(&machine, "child");
    let child = second.open();
    write_tile(&child, 1, 2);
    child.create_snapshot("one").unwrap();
    churn(&child, 1..3, 3);
    clone(&*machine.plain, "child", one().as_ref(), "grandchild", Fencing::Demanded).unwrap();
    child.delete_snapshot("one").unwrap();
    churn(&child, 0..4, 4);
    child.close().unwrap();
    let third = machine_for(&machine, "grandchild");
    let grandchild = third.open();
    assert_eq!(versions(&grandchild), [1, 2, 1, 1]);
    let deleted = delete(&*machine.plain, "disk").unwrap();
    assert_eq!(deleted.pinned_by, ["child", "grandchild"]);
    assert_eq!(delete(&*machine.plain, "child").unwrap().pinned_by, ["grandchild"]);
    churn(&grandchild, 3..4, 5);
    assert_eq!(versions(&grandchild), [1, 2, 1, 5]);
    grandchild.close().unwrap();
    sound(&third);
    assert_eq!(versions(&third.open()), [1, 2, 1, 5]);
    delete(&*machine.plain, "grandchild").unwrap();
    // The last fence of each volume is never deleted.
    let left = data_left(&machine);
    assert!(left.len() == 3 && left.iter().all(|key| key.contains("/seg/")), "{left:?}");
}

/// All keys except status pins and name records, which are never deleted.
fn data_left(machine: &Machine) -> Vec<String> {
    let mut left = keys(&*machine.plain, "");
    left.retain(|key| !key.contains("/word/") && !key.starts_with("names/"));
    left
}

#[test]
fn a_family_can_be_deleted_in_any_order() {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for order in orders {
        let machine = machine();
        base(&machine).close().unwrap();
        clone(&*machine.plain, "disk", None, "child", Fencing::Demanded).unwrap();
        clone(&*machine.plain, "child", None, "grandchild", Fencing::Demanded).unwrap();
        let mut names = vec!["disk", "child", "grandchild"];
        for index in order {
            let name = ["disk", "child", "grandchild"][index];
            delete(&*machine.plain, name).unwrap();
            names.retain(|other| *other != name);
            for left in &names {
                let volume = machine_for(&machine, left).open();
                assert_eq!(versions(&volume), [1; 4], "{left} after {name} of {order:?}");
                volume.close().unwrap();
            }
        }
        let left = data_left(&machine);
        assert!(
            left.iter().all(|key| key.contains("/seg/")) && left.len() <= 3,
            "{order:?}: {left:?}"
        );
    }
}

#[test]
fn clones_of_one_base_share_its_frames_in_the_cache() {
    let machine = machine();
    base(&machine).close().unwrap();
    let cache = sawmill_volume::open_cache(&machine.folder.path().join("cache"), 16 * MIB).unwrap();
    for number in 0..4 {
        let name = format!("copy{number}");
        clone(&*machine.plain, "disk", None, &name, Fencing::Demanded).unwrap();
        let mut other = machine_for(&machine, &name);
        other.options.cache = Some(cache.clone());
        let copy = other.open();
        assert_eq!(versions(&copy), [1; 4]);
        copy.close().unwrap();
    }
    assert!(cache.stats().bytes <= 4 * SEGMENT as u64, "{:?}", cache.stats());
}

#[test]
fn a_flattened_clone_needs_no_ancestor_and_can_be_cloned() {
    let machine = machine();
    base(&machine).close().unwrap();
    clone(&*machine.plain, "disk", None, "copy", Fencing::Demanded).unwrap();
    let other = machine_for(&machine, "copy");
    let copy = other.open();
    write_tile(&copy, 2, 3);
    assert_eq!(copy.flatten(&mut |_, _| ()).unwrap(), 3 * SEGMENT as u64);
    copy.close().unwrap();
    // Each close writes a checkpoint; two must know that nothing is inherited any more.
    until("no checkpoint lists what is the base's", || {
        other.open().close().unwrap();
        release_ancestors(&*machine.plain, "copy").unwrap()
    });
    assert_eq!(delete(&*machine.plain, "disk").unwrap().pinned_by, Vec::<String>::new());
    assert_eq!(versions(&other.open()), [1, 1, 3, 1]);
    sound(&other);
    clone(&*machine.plain, "copy", None, "again", Fencing::Demanded).unwrap();
    assert_eq!(versions(&machine_for(&machine, "again").open()), [1, 1, 3, 1]);
    other.open().close().unwrap();
    assert!(release_ancestors(&*machine.plain, "copy").unwrap(), "it is idempotent");
}

#[test]
fn a_clone_that_has_been_cloned_can_be_flattened() {
    let machine = machine();
    base(&machine).close().unwrap();
    clone(&*machine.plain, "disk", None, "copy", Fencing::Demanded).unwrap();
    clone(&*machine.plain, "copy", None, "again", Fencing::Demanded).unwrap();
    let other = machine_for(&machine, "copy");
    let copy = other.open();
    copy.flatten(&mut |_, _| ()).unwrap();
    copy.close().unwrap();
    until("no checkpoint lists what is the base's", || {
        other.open().close().unwrap();
        release_ancestors(&*machine.plain, "copy").unwrap()
    });
    // What the other clone needs of the base it holds by itself.
    assert_eq!(delete(&*machine.plain, "disk").unwrap().pinned_by, ["again"]);
    assert_eq!(versions(&machine_for(&machine, "again").open()), [1; 4]);
}

#[test]
fn a_snapshot_that_no_checkpoint_has_yet_can_be_cloned() {
    let machine = machine();
    let volume = base(&machine);
    let _heals = machine.healing();
    // A checkpoint that was frozen before the snapshot becomes the newest after it.
    machine.fault(Fault::Delay, |call| root_put(call).is_some());
    until("a checkpoint on its way", || {
        write_tile(&volume, 0, 5);
        stored(&volume);
        !machine.faults.held().is_empty()
    });
    volume.create_snapshot("young").unwrap();
    let written = volume.status().counters.checkpoints;
    machine.faults.release_all();
    until("it is the newest", || volume.status().counters.checkpoints > written);
    // The next one, which has the snapshot, does not come.
    clone(&*machine.plain, "disk", Some(&Cut::Snapshot("young".into())), "copy", Fencing::Demanded)
        .unwrap();
    assert_eq!(versions(&machine_for(&machine, "copy").open()), [5, 1, 1, 1]);
    machine.heal();
}

#[test]
fn a_clone_of_a_cut_that_went_is_refused() {
    let machine = machine();
    let volume = base(&machine);
    // The snapshot ends, and what it needs goes, between the look at the cut and the pin.
    let (plain, held) = (machine.plain.clone(), Machine::over(machine.plain.clone()));
    held.fault(Fault::Delay, |call| call.kind == CallKind::Put && call.key().contains("/pin/"));
    let store = held.faults.clone();
    let asks =
        std::thread::spawn(move || clone(&*store, "disk", one().as_ref(), "copy", Fencing::Waived));
    until("the pin", || !held.faults.held().is_empty());
    volume.delete_snapshot("one").unwrap();
    churn(&volume, 0..4, 2);
    held.faults.release_all();
    held.heal();
    let error = asks.join().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(find(&*plain, "copy").is_err());
    // Its pin was given back.
    churn(&volume, 0..4, 3);
    assert_eq!(keys(&*plain, "/released/").len(), 1);
}

#[test]
fn a_creation_that_dies_leaves_the_base_whole_and_no_name() {
    for part in ["/pin/", "/map/", "/checkpoint/", "names/"] {
        let machine = machine();
        let volume = base(&machine);
        let other = Machine::over(machine.plain.clone());
        other.fault(Fault::Fail(sawmill_store::StoreErrorKind::Denied), move |call| {
            call.kind == CallKind::Put && call.key().contains(part)
        });
        assert!(
            clone(&*other.faults, "disk", one().as_ref(), "copy", Fencing::Waived).is_err(),
            "{part}"
        );
        assert_eq!(find(&*machine.plain, "copy").unwrap_err().kind(), ErrorKind::NotFound);
        churn(&volume, 0..4, 2);
        clone(&*machine.plain, "disk", one().as_ref(), "copy", Fencing::Demanded).unwrap();
        assert_eq!(versions(&machine_for(&machine, "copy").open()), [1; 4], "{part}");
        volume.close().unwrap();
        machine.assert_sound(part);
    }
}

/// A late root of a fenced writer takes the number that its successor's was to have. A clone begins
/// there, and what the successor overwrites meanwhile is dead since its own root, which has a later
/// number.
#[test]
fn a_clone_that_begins_from_a_late_root_keeps_what_its_base_overwrites() {
    let machine = Machine::new();
    let volume = machine.open();
    for tile in 0..4 {
        write_tile(&volume, tile, 1);
    }
    stored(&volume);
    machine.fault(Fault::Late, |call| root_put(call).is_some());
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| volume.close());
        until("the root is on its way", || {
            machine.faults.held().iter().any(|call| root_put(call).is_some())
        });
        volume.close_now();
        assert!(closing.join().unwrap().is_err());
    });
    drop(volume);
    machine.heal();
    let volume = machine.open();
    volume.create_snapshot("one").unwrap();
    assert!(machine.faults.release(|call| root_put(call).is_some()) > 0);
    clone(&*machine.plain, "disk", one().as_ref(), "copy", Fencing::Waived).unwrap();
    for tile in 0..4 {
        write_tile(&volume, tile, 2);
    }
    stored(&volume);
    // The base needs it no more: two checkpoints follow, and what they find dead may go.
    volume.delete_snapshot("one").unwrap();
    until("deletes", || volume.status().counters.checkpoints >= 2);
    volume.close().unwrap();
    let copy = machine_for(&machine, "copy");
    sound(&copy);
    assert_eq!(versions(&copy.open()), [1; 4]);
}

#[test]
fn many_clones_of_one_call_stand_alone_and_share_one_table_of_segments() {
    let machine = machine();
    let volume = base(&machine);
    let names: Vec<String> = (0..40).map(|number| format!("copy-{number}")).collect();
    let mut made = Vec::new();
    let fencing = Fencing::Demanded;
    let mut keep = |record: sawmill_format::volume_record::VolumeRecord| made.push(record.name);
    clone_each(&*machine.plain, "disk", one().as_ref(), &names, fencing, &mut keep).unwrap();
    assert_eq!(made, names);
    // One of them is written, and the base goes: the others keep what they have.
    let shared = machine_for(&machine, "copy-0").rig.options.segment_lists;
    let open = |name: &str| {
        let mut machine = machine_for(&machine, name);
        machine.rig.options.segment_lists = shared.clone();
        let opened = machine.open();
        (machine, opened)
    };
    let opened: Vec<_> = names.iter().map(|name| open(name)).collect();
    assert_eq!(shared.count(), 1, "one table for all");
    churn(&opened[0].1, 0..2, 2);
    volume.close().unwrap();
    delete(&*machine.plain, "disk").unwrap();
    assert_eq!(versions(&opened[0].1), [2, 2, 1, 1]);
    for (machine, volume) in &opened[1..] {
        assert_eq!(versions(volume), [1; 4], "{}", machine.name);
        volume.close().unwrap();
        sound(machine);
    }
}

#[test]
fn clones_before_one_that_fails_stay_and_those_behind_it_leave_nothing() {
    let machine = machine();
    let _volume = base(&machine);
    let names: Vec<String> = (0..30).map(|number| format!("copy-{number}")).collect();
    let other = Machine::over(machine.plain.clone());
    other.fault(Fault::Fail(sawmill_store::StoreErrorKind::Denied), move |call| {
        call.kind == CallKind::Put && call.key().contains("names/copy-20/")
    });
    let mut made = 0;
    let (base, fencing) = (one(), Fencing::Waived);
    clone_each(&*other.faults, "disk", base.as_ref(), &names, fencing, &mut |_| made += 1)
        .unwrap_err();
    assert_eq!(made, 20);
    for (number, name) in names.iter().enumerate() {
        assert_eq!(find(&*machine.plain, name).is_ok(), number < 20, "{name}");
    }
    // The pin of the one that failed stays, because its name may still land.
    let pins = keys(&*machine.plain, "/pin/").len();
    assert_eq!(pins - keys(&*machine.plain, "/released/").len(), 21);
    assert_eq!(versions(&machine_for(&machine, "copy-19").open()), [1; 4]);
    let twice = ["new".to_owned(), "new".to_owned()];
    let error =
        clone_each(&*machine.plain, "disk", None, &twice, fencing, &mut |_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}
