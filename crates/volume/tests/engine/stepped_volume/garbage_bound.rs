//! Writers that have outrun collection get one segment for each that it moves, while it can work.

use sawmill_store::{Call, Class, Fault, StoreErrorKind};
use sawmill_volume::{GcPolicy, Volume};

use super::SteppedScene;
use crate::faulty::{Machine, SEGMENT, segment_get, segment_put, stored, tile_bytes, write_tile};
use sawmill_device::BlockDeviceExt;

const TILES: u64 = 16;
/// A tile is written again from each of these parts on, so each old segment keeps one part.
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
            let from = part as usize * SEGMENT / PARTS as usize;
            let address = tile * SEGMENT as u64 + from as u64;
            volume.write_at(address, &tile_bytes(tile, part)[from..]).unwrap();
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

fn is_gathering(call: &Call) -> bool {
    segment_get(call).is_some() && call.class == Class::Background
}

fn is_all_stored(volume: &Volume) -> bool {
    let positions = volume.status().positions;
    positions.stored == positions.accepted
}

#[test]
fn past_the_bound_of_garbage_a_segment_is_cut_for_each_that_was_moved() {
    let machine = machine_with_garbage();
    machine.fault(Fault::Delay, is_gathering);
    let mut scene = SteppedScene::new(&machine);
    for tile in 20..24 {
        write_tile(scene.volume(), tile, 1);
    }
    scene.until("slowed", |volume| volume.status().slowed_for_garbage);
    let puts = || machine.count(|call| segment_put(call).is_some());
    let first = puts();
    for expected in [first, first + 1] {
        scene.pass(1999);
        let rest = (0..50).map(|_| scene.step()).last().flatten();
        assert_eq!(puts(), expected, "a segment waits for collection");
        assert!(rest.is_some_and(|rest| rest.as_millis() == 1), "{rest:?}");
        scene.pass(1);
        scene.until("one more", |_| puts() == expected + 1);
    }
    machine.heal();
    machine.faults.release_all();
    scene.until("all is stored", is_all_stored);
    scene.until("garbage is below its bound", |volume| !volume.status().slowed_for_garbage);
    let status = scene.volume().status();
    assert!(status.counters.segments_moved > 0, "{status:?}");
    machine.assert_sound("after the bound");
}

#[test]
fn no_writer_waits_for_collection_of_a_store_that_cannot_be_read() {
    let machine = machine_with_garbage();
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), is_gathering);
    let mut scene = SteppedScene::new(&machine);
    for tile in 20..30 {
        write_tile(scene.volume(), tile, 1);
    }
    scene.until("all is stored, and no time has passed", is_all_stored);
    machine.heal();
}

#[test]
fn a_volume_past_the_bound_of_garbage_closes_without_a_wait() {
    let machine = machine_with_garbage();
    machine.fault(Fault::Delay, is_gathering);
    let mut scene = SteppedScene::new(&machine);
    for tile in 20..30 {
        write_tile(scene.volume(), tile, 1);
    }
    scene.until("slowed", |volume| volume.status().slowed_for_garbage);
    assert!(!is_all_stored(scene.volume()));
    let volume = scene.volume().clone();
    let closing = std::thread::spawn(move || volume.close());
    scene.until("all is stored, and no time has passed", is_all_stored);
    machine.heal();
    machine.faults.release_all();
    scene.until("it is closed", |_| closing.is_finished());
    closing.join().unwrap().unwrap();
    machine.assert_sound("after the close");
}
