//! A volume gets another name: one volume at any moment, whatever call of it dies, and nothing is
//! lost.

use crate::faulty::{Machine, stored, tile_version, write_tile};
use sawmill_device::BlockDeviceExt;
use sawmill_store::{CallKind, Fault, StoreErrorKind};
use sawmill_volume::{CreateOptions, ErrorKind, Volume};

fn names(machine: &Machine) -> Vec<String> {
    let listed = sawmill_volume::list(&*machine.plain).unwrap();
    listed.into_iter().map(|listed| listed.name).collect()
}

fn rename(machine: &Machine, old: &str, new: &str) -> sawmill_volume::Result<()> {
    sawmill_volume::rename(&*machine.store, old, new).map(drop)
}

#[test]
fn a_renamed_volume_is_the_same_under_its_new_name_alone() {
    let mut machine = Machine::new();
    let id = machine.volume_id();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    rename(&machine, "disk", "other").unwrap();
    // Whoever has it open goes on.
    write_tile(&volume, 1, 2);
    stored(&volume);
    volume.resize(128 << 20).unwrap();
    volume.close().unwrap();
    assert_eq!(names(&machine), ["other"]);
    assert_eq!(machine.try_open().err().unwrap().kind(), ErrorKind::NotFound);
    machine.rig.name = "other".into();
    assert_eq!(machine.volume_id(), id);
    let volume = machine.open();
    assert_eq!([0, 1].map(|tile| tile_version(&volume, tile, 9)), [1, 2]);
}

#[test]
fn a_reader_follows_its_volume_and_never_one_that_took_its_name() {
    let mut machine = Machine::new();
    machine.rig.options.checkpoint_bytes = 1 << 20;
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    stored(&volume);
    let mut options = machine.options.clone();
    options.read_only = true;
    let reader = Volume::open(machine.store.clone(), "disk", options).unwrap();
    rename(&machine, "disk", "other").unwrap();
    sawmill_volume::create(&*machine.store, "disk", &CreateOptions::new(1 << 20)).unwrap();
    for version in 2..9 {
        (0..8).for_each(|tile| write_tile(&volume, tile, version));
        stored(&volume);
    }
    volume.close().unwrap();
    assert_eq!(tile_version(&reader, 0, 9), 8, "the segment it knew is gone: it has moved on");
    assert_eq!(reader.read_at(63 << 20, 4096).unwrap(), vec![0; 4096]);
}

#[test]
fn a_rename_that_dies_at_any_call_loses_nothing_and_is_finished_by_another() {
    for fault in [Fault::Fail(StoreErrorKind::Unavailable), Fault::LoseAnswer] {
        for dies_at in 0..20 {
            let machine = Machine::new();
            let id = machine.volume_id();
            let what = format!("{fault:?} from call {dies_at} on");
            let mut seen = 0;
            machine.fault(fault.clone(), move |_| {
                seen += 1;
                seen > dies_at
            });
            let outcome = rename(&machine, "disk", "other");
            machine.heal();
            let left = names(&machine);
            assert!(left == ["disk"] || left == ["other"], "{what}: {left:?}");
            for name in &left {
                assert_eq!(
                    sawmill_volume::find(&*machine.plain, name).unwrap().volume_id,
                    id,
                    "{what}"
                );
            }
            if outcome.is_ok() {
                assert_eq!(left, ["other"], "{what}");
                break;
            }
            if left != ["other"] {
                rename(&machine, "disk", "other").unwrap();
            }
            assert_eq!(names(&machine), ["other"], "{what}");
        }
    }
}

#[test]
fn a_name_that_is_taken_or_none_is_refused_and_nothing_changes() {
    let machine = Machine::new();
    sawmill_volume::create(&*machine.plain, "other", &CreateOptions::new(1 << 20)).unwrap();
    for (old, new, kind) in [
        ("disk", "other", ErrorKind::Exists),
        ("disk", "disk", ErrorKind::Invalid),
        ("disk", "a/b", ErrorKind::Invalid),
        ("none", "new", ErrorKind::NotFound),
    ] {
        assert_eq!(rename(&machine, old, new).unwrap_err().kind(), kind, "{old} to {new}");
    }
    assert_eq!(names(&machine), ["disk", "other"]);
    assert_eq!(machine.count(|call| matches!(call.kind, CallKind::Delete)), 0);
}
