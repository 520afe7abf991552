//! Collection waits for writers whose segments are cut without a pause, unless garbage presses or
//! somebody asked for it. Not here: writers that wait for collection (`garbage_bound`).

use std::ops::Range;

use sawmill_device::BlockDeviceExt;
use sawmill_volume::Volume;

use super::SteppedScene;
use crate::faulty::{Machine, SEGMENT, tile_bytes};

const TILES: u64 = 32;

/// A volume whose writers have cut many segments, and no time has passed. Each tile was written
/// whole, then from each of `starts` on. The share of its data that must be live is given as well.
fn busy(starts: &[usize], live: Range<f64>) -> (Machine, SteppedScene) {
    let machine = Machine::new();
    let mut scene = SteppedScene::new(&machine);
    for from in [&[0], starts].concat() {
        for tile in 1..=TILES {
            let address = tile * SEGMENT as u64 + from as u64;
            scene.volume().write_at(address, &tile_bytes(tile, 1)[from..]).unwrap();
            let _ = scene.step();
        }
    }
    scene.until("all full segments are stored", |volume| {
        let positions = volume.status().positions;
        positions.accepted - positions.stored < SEGMENT as u64
    });
    let status = scene.volume().status();
    let share = status.live_bytes as f64 / status.segment_data_bytes as f64;
    assert!(live.contains(&share), "{share} is live");
    (machine, scene)
}

/// Enough steps for a collection to begin, if it may.
fn steps(scene: &mut SteppedScene) {
    for _ in 0..50 {
        let _ = scene.step();
    }
}

fn has_moved(volume: &Volume) -> bool {
    volume.status().counters.segments_moved > 0
}

#[test]
fn collection_waits_for_writers_that_fill_segments_until_they_pause() {
    let (machine, mut scene) = busy(&[SEGMENT / 2], 0.57..0.69);
    steps(&mut scene);
    assert_eq!(scene.volume().status().counters.collections, 0, "nothing is planned");
    let wakes_in = scene.step();
    assert!(wakes_in.is_some_and(|wait| wait.as_millis() <= 500), "{wakes_in:?}");
    scene.pass(1000);
    scene.until("they paused", has_moved);
    machine.assert_sound("after the pause");
}

#[test]
fn collection_waits_for_no_busy_writer_when_garbage_presses() {
    let (machine, mut scene) = busy(&[SEGMENT / 4, SEGMENT / 2], 0.40..0.70);
    scene.until("no time has passed", has_moved);
    machine.assert_sound("while they are busy");
}

#[test]
fn a_collection_somebody_asked_for_waits_for_no_busy_writer() {
    let (machine, mut scene) = busy(&[SEGMENT / 2], 0.57..0.69);
    steps(&mut scene);
    assert_eq!(scene.volume().status().counters.collections, 0, "nobody asked");
    scene.volume().request_collection(0.7, Box::new(drop)).unwrap();
    scene.until("no time has passed", has_moved);
    machine.assert_sound("after it was asked for");
}
