//! Volumes whose map is loaded after they opened, group by group.

use std::sync::Arc;

use sawmill_device::BlockDeviceExt;
use sawmill_volume::{FlushMode, RealWorld, RecoveryStep, SteppedVolume, Volume, World};

use crate::faulty::{Machine, holds, root_put, stored};

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
    // No loop has made a step yet.
    holds(&volume, PLACES[2], &[1; 4096]);
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
    assert_all(&volume, 1);
}

#[test]
fn no_checkpoint_begins_before_all_of_the_map_is_loaded() {
    let machine = volume_of_five_groups(1);
    let mut stepped = open_stepped(&machine);
    let roots = || machine.count(|call| root_put(call).is_some());
    let before = roots();
    stepped.begin_close();
    for _ in 0..4 {
        // One of five groups each time.
        step(&mut stepped);
        assert_eq!(roots(), before);
    }
    while !stepped.is_settled() {
        step(&mut stepped);
    }
    stepped.finish_close().unwrap();
    assert!(roots() > before);
    machine.assert_sound("closed when all was loaded");
    assert_all(&machine.open(), 1);
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
