//! Writers wait for a segment that is about to be built from memory, if the store keeps up, and not
//! for long.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sawmill_device::{BlockDevice, Flags, Operation, Request};
use sawmill_store::Fault;
use sawmill_volume::Stall;

use super::SteppedScene;
use crate::faulty::{Machine, SEGMENT, segment_put, tile_bytes, write_tile};

/// Beyond what the staging memory holds beside all uploads: 4 MiB and six segments.
const TILES: u64 = 32;

/// Submits [`TILES`] writes of a segment each; returns the number of those answered.
fn write_tiles(scene: &SteppedScene) -> Arc<AtomicU64> {
    let answered = Arc::new(AtomicU64::new(0));
    for tile in 0..TILES {
        let answered = answered.clone();
        let on_outcome = move |outcome: Result<_, _>, _| {
            outcome.expect("nothing refuses a write");
            answered.fetch_add(1, Ordering::SeqCst);
        };
        let (address, bytes) = (tile * SEGMENT as u64, tile_bytes(tile, 1));
        scene.volume().submit(Request::with_bytes(
            Operation::Write,
            address,
            Flags::default(),
            bytes,
            on_outcome,
        ));
    }
    answered
}

#[test]
fn writers_wait_for_the_segments_of_a_store_that_keeps_up_and_not_for_long() {
    let machine = Machine::new();
    let mut scene = SteppedScene::new(&machine);
    // The last put took no time. From now on none ends.
    machine.fault(Fault::Delay, |call| segment_put(call).is_some());
    let answered = write_tiles(&scene);
    let rest = (0..20).map(|_| scene.step()).last().flatten();
    assert!(rest.is_some_and(|rest| rest <= Duration::from_millis(100)), "{rest:?}");
    assert_eq!(scene.volume().status().stall, Some(Stall::Staging));
    let waiting = answered.load(Ordering::SeqCst);
    assert!((16..TILES).contains(&waiting), "all but the last need no memory of unsealed data");
    scene.pass(99);
    (0..20).for_each(|_| {
        let _ = scene.step();
    });
    assert_eq!(answered.load(Ordering::SeqCst), waiting, "the time is not up");
    scene.pass(2);
    scene.until("the journal takes the rest", |_| answered.load(Ordering::SeqCst) == TILES);
    assert_eq!(scene.volume().status().stall, None);
    machine.heal();
    machine.faults.release_all();
    scene.until("all is stored", |volume| {
        let positions = volume.status().positions;
        positions.stored == positions.accepted
    });
    machine.assert_sound("after the wait");
}

#[test]
fn no_writer_waits_for_the_segments_of_a_slow_store() {
    let machine = Machine::new();
    let mut scene = SteppedScene::new(&machine);
    machine.fault(Fault::Delay, |call| segment_put(call).is_some());
    write_tile(scene.volume(), 0, 2);
    (0..20).for_each(|_| {
        let _ = scene.step();
    });
    scene.pass(101);
    machine.faults.release_all();
    scene.until("a slow put", |volume| {
        let positions = volume.status().positions;
        positions.stored == positions.accepted
    });
    let answered = write_tiles(&scene);
    scene.until("the journal takes all", |_| answered.load(Ordering::SeqCst) == TILES);
    assert_eq!(scene.volume().status().stall, None);
    machine.heal();
    machine.faults.release_all();
}

#[test]
fn records_without_a_payload_that_fill_the_memory_are_sealed_without_a_wait() {
    // Each takes a block of the memory, and all of them together are far from a segment.
    const DISCARDS: u64 = 3000;
    let machine = Machine::new();
    let mut scene = SteppedScene::new(&machine);
    let answered = Arc::new(AtomicU64::new(0));
    for number in 0..DISCARDS {
        let answered = answered.clone();
        let on_outcome = move |outcome: Result<_, _>| {
            outcome.expect("nothing refuses a discard");
            answered.fetch_add(1, Ordering::SeqCst);
        };
        let (address, flags) = (number * 4096, Flags::default());
        let discard = Request::bare(Operation::Discard, address, 4096, flags, on_outcome);
        scene.volume().submit(discard);
        scene.volume().submit(Request::bare(Operation::Flush, 0, 0, flags, |_| ()));
        let _ = scene.step();
    }
    scene.until("all are answered", |_| answered.load(Ordering::SeqCst) == DISCARDS);
}
