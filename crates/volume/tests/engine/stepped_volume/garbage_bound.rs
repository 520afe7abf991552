//! Writers that have outrun collection wait for it once garbage is past its bound, but only while
//! it can work, and never those who asked for their segment.

use sawmill_device::{BlockDevice, BlockDeviceExt, Flags, Operation, Request};
use sawmill_store::{Call, Class, Fault, StoreErrorKind};
use sawmill_volume::{GcPolicy, Stall, Volume};

use super::SteppedScene;
use crate::faulty::{Machine, SEGMENT, segment_get, segment_put, stored, tile_bytes};

const TILES: u64 = 32;
/// A tile is written again from each of these parts on: each old segment keeps one part.
const PARTS: u64 = 8;

/// A machine whose volume is closed, with less than a fourth of its data live.
fn machine_with_garbage() -> Machine {
    let mut machine = Machine::new();
    let gc = std::mem::replace(
        &mut machine.options.gc,
        GcPolicy { start: 0.0, stop: 0.0, ..GcPolicy::default() },
    );
    let volume = machine.open();
    for part in 0..PARTS {
        for tile in 0..TILES {
            write_from_part(&volume, tile, part);
        }
        stored(&volume);
    }
    let status = volume.status();
    assert!(status.live_bytes * 4 < status.segment_data_bytes, "{status:?}");
    volume.close().unwrap();
    drop(volume);
    machine.options.gc = gc;
    machine
}

fn write_from_part(volume: &Volume, tile: u64, part: u64) {
    let from = part as usize * SEGMENT / PARTS as usize;
    let address = tile * SEGMENT as u64 + from as u64;
    volume.write_at(address, &tile_bytes(tile, part)[from..]).unwrap();
}

fn is_gathering(call: &Call) -> bool {
    segment_get(call).is_some() && call.class == Class::Background
}

fn is_all_stored(volume: &Volume) -> bool {
    let positions = volume.status().positions;
    positions.stored == positions.accepted
}

/// What is left is less than a segment, and waits for more.
fn is_stored_but_for_the_rest(volume: &Volume) -> bool {
    let positions = volume.status().positions;
    positions.accepted - positions.stored < SEGMENT as u64
}

/// Writes until writers wait for a collection whose gets do not end.
fn slowed(machine: &Machine) -> SteppedScene {
    machine.fault(Fault::Delay, is_gathering);
    let mut scene = SteppedScene::new(machine);
    write_again(&mut scene, 40);
    scene.until("slowed", |volume| volume.status().slowed_for_garbage);
    assert!(!is_stored_but_for_the_rest(scene.volume()));
    scene
}

/// Makes garbage of tiles that were empty, as fast as it is stored until segments wait for
/// collection. What waits fits the memory: no write here waits itself.
fn write_again(scene: &mut SteppedScene, first_tile: u64) {
    for part in 0..PARTS {
        for tile in first_tile..first_tile + 4 {
            write_from_part(scene.volume(), tile, part);
            scene.until("it is stored or waits for collection", |volume| {
                is_stored_but_for_the_rest(volume) || volume.status().slowed_for_garbage
            });
        }
    }
}

#[test]
fn past_the_bound_writers_wait_for_collection_for_two_seconds_at_most() {
    let machine = machine_with_garbage();
    let mut scene = slowed(&machine);
    let puts = || machine.count(|call| segment_put(call).is_some());
    let cut = puts();
    scene.pass(1999);
    let rest = (0..50).map(|_| scene.step()).last().flatten();
    assert_eq!(puts(), cut, "segments wait");
    assert!(rest.is_some_and(|rest| rest.as_millis() == 1), "{rest:?}");
    scene.pass(1);
    scene.until("all is stored", is_stored_but_for_the_rest);
    assert!(!scene.volume().status().slowed_for_garbage);
    let rest = (0..50).map(|_| scene.step()).last().flatten();
    assert!(rest.is_none_or(|rest| rest.as_millis() > 1), "it rests: {rest:?}");
    // Nothing was moved: nothing waits again.
    write_again(&mut scene, 60);
    scene.until("all is stored again, and no time has passed", is_stored_but_for_the_rest);
    machine.heal();
    machine.faults.release_all();
}

#[test]
fn writers_go_on_when_collection_has_moved_what_they_waited_for() {
    let machine = machine_with_garbage();
    let mut scene = slowed(&machine);
    machine.heal();
    machine.faults.release_all();
    scene.until("all is stored, and no time has passed", is_stored_but_for_the_rest);
    let status = scene.volume().status();
    assert!(status.counters.segments_moved > 0, "{status:?}");
    scene.until("nobody is slowed", |volume| !volume.status().slowed_for_garbage);
    machine.assert_sound("after the bound");
}

#[test]
fn a_snapshot_past_the_bound_does_not_wait_for_collection() {
    let machine = machine_with_garbage();
    let mut scene = slowed(&machine);
    let volume = scene.volume().clone();
    let snapshot = std::thread::spawn(move || volume.create_snapshot("now"));
    scene.until("it is there, and no time has passed", |_| snapshot.is_finished());
    snapshot.join().unwrap().unwrap();
    assert!(is_all_stored(scene.volume()));
    machine.heal();
    machine.faults.release_all();
}

#[test]
fn a_flush_past_the_bound_does_not_wait_for_collection_though_the_memory_is_full() {
    let machine = machine_with_garbage();
    let mut scene = slowed(&machine);
    // Records without a payload fill it to the last bytes: not even padding has room.
    for number in 0..100_000 {
        let (address, flags) = (number % 16_000 * 4096, Flags::default());
        scene.volume().submit(Request::bare(Operation::Discard, address, 4096, flags, |_| ()));
    }
    scene.until("the memory is full", |volume| volume.status().stall == Some(Stall::Staging));
    assert_eq!(scene.flush(0), Ok(()), "and no time has passed");
    assert!(scene.volume().status().slowed_for_garbage);
    machine.heal();
    machine.faults.release_all();
    scene.until("nobody waits", |volume| volume.status().stall.is_none());
}

#[test]
fn no_writer_waits_for_collection_of_a_store_that_cannot_be_read() {
    let machine = machine_with_garbage();
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), is_gathering);
    let mut scene = SteppedScene::new(&machine);
    write_again(&mut scene, 40);
    scene.until("all is stored, and no time has passed", is_stored_but_for_the_rest);
    machine.heal();
}

#[test]
fn a_volume_past_the_bound_of_garbage_closes_without_a_wait() {
    let machine = machine_with_garbage();
    let mut scene = slowed(&machine);
    let volume = scene.volume().clone();
    let closing = std::thread::spawn(move || volume.close());
    scene.until("all is stored, and no time has passed", is_all_stored);
    machine.heal();
    machine.faults.release_all();
    scene.until("it is closed", |_| closing.is_finished());
    closing.join().unwrap().unwrap();
    machine.assert_sound("after the close");
}
