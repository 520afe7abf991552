//! Volumes whose map is loaded after they opened, group by group.

use std::sync::Arc;

use sawmill_device::{BlockDevice, BlockDeviceExt};
use sawmill_store::{Call, CallKind};
use sawmill_volume::{FlushMode, RealWorld, RecoveryStep, SteppedVolume, Volume, World};

use crate::faulty::{
    Machine, WAIT_TIME_MAX, holds, is_engine, root_put, segment_put, stored, until,
};

const GIB: u64 = 1 << 30;
/// One place in each of five groups, and one across a border.
const PLACES: [u64; 6] = [0, 20 * GIB, 32 * GIB - 2048, 50 * GIB, 70 * GIB, 79 * GIB];

/// A volume of which each place has this version, in a map of five groups.
fn volume_of_five_groups(version: u8) -> Machine {
    let mut machine = Machine::with(80 * GIB, FlushMode::Logged);
    machine.options.bounds.map_held_from_bytes = 0;
    let volume = machine.open();
    write_all(&volume, version);
    volume.close().unwrap();
    assert_eq!(machine.keys("/map/").len(), 5);
    machine
}

fn write_all(volume: &Volume, version: u8) {
    PLACES.iter().for_each(|place| volume.write_at(*place, &[version; 4096]).unwrap());
}

fn assert_all(volume: &Volume, version: u8) {
    PLACES.iter().for_each(|place| holds(volume, *place, &[version; 4096]));
}

fn open_stepped(machine: &Machine) -> SteppedVolume {
    let world: Arc<dyn World> = Arc::new(RealWorld::default());
    SteppedVolume::open(world, machine.rig.store.clone(), "disk", &machine.options).unwrap()
}

/// One step of each loop.
fn step(stepped: &mut SteppedVolume) {
    while stepped.step_journal_quietly() {}
    stepped.step_engine(RealWorld::default().now());
}

#[test]
fn a_volume_serves_before_its_map_is_loaded() {
    let machine = volume_of_five_groups(1);
    let mut stepped = open_stepped(&machine);
    let volume = stepped.volume().clone();
    let steps = &volume.recovery().steps;
    let map = steps.iter().find(|one| one.step == RecoveryStep::Map).unwrap();
    assert!(map.detail.contains("loaded when needed"), "{}", map.detail);
    assert_eq!(volume.status().extents, 6 + 1, "one extent across a border is two");
    assert_eq!(volume.status().map_groups_unloaded, 5);
    // No loop has made a step yet.
    holds(&volume, PLACES[2], &[1; 4096]);
    assert_eq!(volume.status().map_groups_unloaded, 3, "both sides of the border");
    volume.write_at(PLACES[3], &[2; 4096]).unwrap();
    holds(&volume, PLACES[3], &[2; 4096]);
    let unwritten = volume.allocation(PLACES[4] + GIB, 4096).unwrap();
    assert!(unwritten.iter().all(|run| run.data), "what is not loaded counts as data");
    volume.write_at(PLACES[3], &[1; 4096]).unwrap();
    for _ in 0..6 {
        step(&mut stepped);
    }
    let unwritten = volume.allocation(PLACES[4] + GIB, 4096).unwrap();
    assert!(unwritten.iter().all(|run| !run.data), "all is loaded now");
    assert_eq!(volume.status().map_groups_unloaded, 0);
    assert_all(&volume, 1);
}

#[test]
fn no_checkpoint_begins_before_all_of_the_map_is_loaded() {
    let machine = volume_of_five_groups(1);
    let mut stepped = open_stepped(&machine);
    let roots = || machine.count(|call| root_put(call).is_some());
    let before = roots();
    let grown = stepped.volume().begin_grow(96 * GIB).unwrap();
    for _ in 0..4 {
        // One of five groups each time.
        step(&mut stepped);
        assert_eq!(roots(), before);
    }
    until("it grows", || {
        step(&mut stepped);
        grown.try_recv().is_ok_and(|outcome| outcome.is_ok())
    });
    assert!(roots() > before);
    close(stepped);
    machine.assert_sound("grown when all was loaded");
    assert_all(&machine.open(), 1);
}

/// Opens and closes. Returns in which step of the close its checkpoint began.
fn steps_of_a_close(machine: &Machine) -> usize {
    let mut stepped = open_stepped(machine);
    let is_of_checkpoint =
        |call: &Call| call.kind == CallKind::Put && is_engine(call) && segment_put(call).is_none();
    let puts = || machine.count(is_of_checkpoint);
    let before = puts();
    stepped.begin_close();
    let mut steps = 0;
    while puts() == before {
        step(&mut stepped);
        steps += 1;
    }
    close(stepped);
    steps
}

fn close(mut stepped: SteppedVolume) {
    stepped.begin_close();
    until("all is stored", || {
        step(&mut stepped);
        stepped.is_settled()
    });
    stepped.finish_close().unwrap();
}

#[test]
fn a_close_loads_nothing_of_a_map_that_did_not_change() {
    let machine = volume_of_five_groups(1);
    // Each loads one of five groups, where it loads any.
    assert_eq!(steps_of_a_close(&machine), 1);
    machine.assert_sound("closed before its map was loaded");
    // Without the journal, as after any clean close.
    std::fs::remove_file(machine.journal()).unwrap();
    assert_eq!(steps_of_a_close(&machine), 1);
    machine.assert_sound("and once more");
    assert_all(&machine.open(), 1);
}

#[test]
fn a_close_deletes_what_a_deleted_snapshot_alone_named() {
    let machine = volume_of_five_groups(1);
    let volume = machine.open();
    volume.create_snapshot("old").unwrap();
    write_all(&volume, 2);
    volume.close().unwrap();
    let segments = || machine.keys("/seg/").len();
    let before = segments();
    let mut stepped = open_stepped(&machine);
    let deleted = stepped.volume().begin_delete_snapshot("old").unwrap();
    // Before its map is loaded, which takes five steps.
    stepped.begin_close();
    step(&mut stepped);
    close(stepped);
    deleted.try_recv().unwrap().unwrap();
    assert!(segments() < before, "{} of {before} segments are left", segments());
    machine.assert_sound("closed when a snapshot was deleted");
    assert_all(&machine.open(), 2);
}

#[test]
fn a_close_waits_for_the_growth_that_came_before_it() {
    let machine = volume_of_five_groups(1);
    let stepped = open_stepped(&machine);
    let grown = stepped.volume().begin_grow(96 * GIB).unwrap();
    close(stepped);
    grown.try_recv().unwrap().unwrap();
    let volume = machine.open();
    assert_eq!(volume.geometry().size_bytes, 96 * GIB);
    assert_all(&volume, 1);
}

#[test]
fn a_close_loads_and_counts_what_changed_of_a_map() {
    let machine = volume_of_five_groups(1);
    let volume = machine.open();
    for place in [PLACES[1], PLACES[5]] {
        volume.write_at(place, &[2; 4096]).unwrap();
    }
    stored(&volume);
    volume.close_now();
    // Two groups have changes, which the open found in the log.
    assert_eq!(steps_of_a_close(&machine), 3);
    machine.assert_sound("closed when what changed was loaded");
    let volume = machine.open();
    for (index, place) in PLACES.iter().enumerate() {
        let version = if [1, 5].contains(&index) { 2 } else { 1 };
        holds(&volume, *place, &[version; 4096]);
    }
}

#[test]
fn a_close_keeps_the_deltas_of_groups_that_it_does_not_load() {
    let mut machine = volume_of_five_groups(1);
    machine.options.bounds.map_delta_from_bytes = 0;
    let volume = machine.open();
    let write = |block: u64, version: u8| {
        volume.write_at(PLACES[1] + block * 16384, &[version; 4096]).unwrap();
    };
    // So many that the delta is small beside them, and stays.
    (0..400).for_each(|block| write(block, 1));
    stored(&volume);
    assert!(volume.checkpoint(WAIT_TIME_MAX));
    (0..3).for_each(|block| write(block * 7, 2));
    stored(&volume);
    assert!(volume.checkpoint(WAIT_TIME_MAX));
    let deltas = || {
        let is_delta = |key: &&String| key.contains("/80000000");
        machine.keys("/map/").iter().filter(is_delta).count()
    };
    assert_eq!(deltas(), 1);
    volume.close_now();
    // A delta that the last two checkpoints do not name is deleted.
    for version in 2..5 {
        let volume = machine.open();
        volume.write_at(PLACES[0], &[version; 4096]).unwrap();
        stored(&volume);
        volume.close_now();
        assert_eq!(steps_of_a_close(&machine), 2);
        machine.assert_sound("closed with a delta");
    }
    assert_eq!(deltas(), 1);
    let volume = machine.open();
    for block in 0..400 {
        let version = if [0, 7, 14].contains(&block) { 2 } else { 1 };
        holds(&volume, PLACES[1] + block * 16384, &[version; 4096]);
    }
}

#[test]
fn what_the_log_has_behind_the_checkpoint_counts_over_what_is_loaded_later() {
    let machine = volume_of_five_groups(1);
    for version in 2..5 {
        let volume = machine.open();
        write_all(&volume, version);
        volume.discard(PLACES[1], 512).unwrap();
        volume.write_at(PLACES[1], &[version; 512]).unwrap();
        stored(&volume);
        volume.close_now();
    }
    let volume = machine.open();
    assert_all(&volume, 4);
    volume.close().unwrap();
    machine.assert_sound("after a log over a held map");
    assert_all(&machine.open(), 4);
}

#[test]
fn a_volume_that_shrinks_and_rolls_forward_keeps_what_is_below_its_end() {
    let machine = volume_of_five_groups(1);
    let volume = machine.open();
    volume.resize(60 * GIB).unwrap();
    volume.close().unwrap();
    let volume = machine.open();
    PLACES[..4].iter().for_each(|place| holds(&volume, *place, &[1; 4096]));
    volume.resize(80 * GIB).unwrap();
    volume.close_now();
    let volume = machine.open();
    holds(&volume, PLACES[4], &[0; 4096]);
    volume.close().unwrap();
    machine.assert_sound("shrunk and grown");
}
