//! Collection waits for writers that fill segments without a pause, unless garbage presses or
//! somebody asked for it. Not here: writers that wait for collection (`garbage_bound`).

use sawmill_device::BlockDeviceExt;
use sawmill_volume::{GcPolicy, Volume};

use super::SteppedScene;
use crate::faulty::{Machine, SEGMENT, segment_put, stored, tile_bytes, write_tile};

const TILES: u64 = 32;

/// A volume whose writers have just filled a segment, and the share of it that is live. Each tile
/// was written whole, then from each of `starts` on.
fn busy(starts: &[usize]) -> (Machine, SteppedScene, f64) {
    let mut machine = Machine::new();
    let off = GcPolicy { start: 0.0, stop: 0.0, ..GcPolicy::default() };
    let gc = std::mem::replace(&mut machine.options.gc, off);
    let volume = machine.open();
    (0..TILES).for_each(|tile| write_tile(&volume, tile, 0));
    for from in starts {
        for tile in 0..TILES {
            let address = tile * SEGMENT as u64 + *from as u64;
            volume.write_at(address, &tile_bytes(tile, 1)[*from..]).unwrap();
        }
    }
    stored(&volume);
    volume.close().unwrap();
    drop(volume);
    machine.options.gc = gc;
    let scene = SteppedScene::new(&machine);
    let status = scene.volume().status();
    let live = status.live_bytes as f64 / status.segment_data_bytes as f64;
    (machine, scene, live)
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
    let (machine, mut scene, live) = busy(&[SEGMENT / 2]);
    assert!((0.57..0.69).contains(&live), "{live}");
    for tile in 40..44 {
        let puts = machine.count(|call| segment_put(call).is_some());
        write_tile(scene.volume(), tile, 1);
        scene.until("it is put", |_| machine.count(|call| segment_put(call).is_some()) > puts);
        steps(&mut scene);
        assert_eq!(scene.volume().status().counters.collections, 0, "nothing is planned");
        scene.pass(1);
    }
    let wakes_in = scene.step();
    assert!(wakes_in.is_some_and(|wait| wait.as_millis() <= 500), "{wakes_in:?}");
    scene.pass(500);
    scene.until("they paused", has_moved);
    machine.assert_sound("after the pause");
}

#[test]
fn collection_waits_for_no_busy_writer_when_garbage_presses() {
    let (machine, mut scene, live) = busy(&[SEGMENT / 4, SEGMENT / 2]);
    assert!((0.43..0.55).contains(&live), "{live}");
    scene.until("no time has passed", has_moved);
    machine.assert_sound("while they are busy");
}

#[test]
fn a_collection_somebody_asked_for_waits_for_no_busy_writer() {
    let (machine, mut scene, _) = busy(&[SEGMENT / 2]);
    steps(&mut scene);
    assert_eq!(scene.volume().status().counters.collections, 0, "nobody asked");
    scene.volume().request_collection(0.7, Box::new(drop)).unwrap();
    scene.until("no time has passed", has_moved);
    machine.assert_sound("after it was asked for");
}
