//! A writer that was taken over learns of it although it only reads and flushes; and no flush is
//! answered on an old confirmation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::SteppedScene;
use crate::faulty::{
    Machine, SEGMENT, is_fence_check, segment_put, tile_bytes, tile_version, write_tile,
};
use crate::rig::MIB;
use bytes::Bytes;
use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind, Flags, Operation, Request};
use sawmill_store::{Blocking, Class, Fault, StoreErrorKind};
use sawmill_volume::{Health, Stall, Volume};

#[test]
fn a_writer_that_only_reads_is_fenced_by_a_take_over() {
    let first = Machine::new();
    let mut a = SteppedScene::new(&first);
    let b = first.successor().open();
    assert_eq!(tile_version(a.volume(), 0, 9), 1, "it cannot know yet");
    a.until_with("a read is refused", 100, |volume| {
        volume.read_at(0, 512).is_err_and(|error| error.kind() == ErrorKind::Fenced)
    });
    assert!(matches!(a.volume().status().health, Health::Fenced { .. }));
    assert_eq!(a.flush(0), Err(ErrorKind::Fenced));
    b.close().unwrap();
}

#[test]
fn no_flush_is_answered_on_old_news() {
    let first = Machine::new();
    let mut a = SteppedScene::new(&first);
    a.pass(60_000);
    let _ = a.step();
    let b = first.successor().open();
    let checks = first.count(is_fence_check);
    // The first thing it hears for a minute.
    assert_eq!(a.flush(50), Err(ErrorKind::Fenced));
    assert!(first.count(is_fence_check) > checks);
    b.close().unwrap();
}

#[test]
fn an_unused_volume_makes_no_requests() {
    let machine = Machine::new();
    let mut a = SteppedScene::new(&machine);
    a.pass(11_000);
    let _ = a.step();
    let calls = machine.count(|_| true);
    for _ in 0..100 {
        a.pass(1000);
        let _ = a.step();
    }
    assert_eq!(machine.count(|_| true), calls);
}

/// What leaves its retention window is given back with a bounded number of requests, and then it
/// rests too.
#[test]
fn an_unused_volume_gives_back_its_garbage_and_rests() {
    let mut machine = Machine::new();
    machine.options.checkpoint_bytes = MIB;
    let mut a = SteppedScene::new(&machine);
    let set = a.volume().begin_set_retention(60).unwrap();
    a.until("the window is set", |_| set.try_recv().is_ok());
    for version in 2..60 {
        (0..4).for_each(|tile| write_tile(a.volume(), tile, version));
        a.until_with("it is stored", 10, |volume| {
            let positions = volume.status().positions;
            positions.stored == positions.accepted
        });
    }
    let (used, had) = (machine.count(|_| true), a.volume().status());
    assert!(had.dead_object_bytes > 20 * MIB, "there is garbage: {had:?}");
    a.until_with("what left the window is gone", 1000, |volume| {
        volume.status().dead_object_bytes == 0
    });
    for _ in 0..100 {
        a.pass(1000);
        let _ = a.step();
        thread::yield_now();
    }
    let rests = machine.count(|_| true);
    println!("{} segments were given back with {} calls", had.segments, rests - used);
    assert!(((rests - used) as u64) < 2 * had.segments, "{} calls", rests - used);
    for _ in 0..10_000 {
        a.pass(1000);
        let _ = a.step();
    }
    assert_eq!(machine.count(|_| true), rests);
    assert_eq!(tile_version(a.volume(), 3, 99), 59);
}

#[test]
fn a_store_that_cannot_be_asked_keeps_no_flush_waiting_for_long() {
    let machine = Machine::new();
    let mut a = SteppedScene::new(&machine);
    let _heals = machine.healing();
    machine.fault(Fault::Delay, is_fence_check);
    a.pass(60_000);
    assert_eq!(a.flush(50), Ok(()), "it has waited as long as it may");
    assert!(matches!(a.volume().status().health, Health::StoreUnavailable { .. }));
    assert_eq!(a.flush(0), Ok(()), "no other has to wait for the same answer");
    machine.heal();
    machine.faults.release_all();
    a.until_with("it is well again", 100, |volume| {
        volume.write_at(MIB, &[7]).unwrap();
        volume.status().health == Health::Serving
    });
    assert_eq!(a.flush(0), Ok(()));
}

#[test]
fn a_writer_that_cannot_store_stops_acknowledging_at_the_set_age() {
    let mut machine = Machine::new();
    machine.options.unstored_age_max = Some(Duration::from_secs(10));
    let mut a = SteppedScene::new(&machine);
    let _heals = machine.healing();
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), |call| segment_put(call).is_some());
    a.pass(60_000);
    write_tile(a.volume(), 1, 1);
    a.pass(9_000);
    let _ = a.step();
    assert_eq!((a.volume().status().stall, a.flush(0)), (None, Ok(())));
    a.pass(1_001);
    let (writer, flusher) = (a.volume().clone(), a.volume().clone());
    let written = thread::spawn(move || write_tile(&writer, 2, 1));
    a.until("the write waits", |volume| volume.status().stall == Some(Stall::UnstoredAge));
    let flushed = thread::spawn(move || flusher.flush());
    for _ in 0..50 {
        a.pass(1000);
        let _ = a.step();
    }
    assert!(!written.is_finished() && !flushed.is_finished(), "nothing is acknowledged");
    machine.heal();
    a.until_with("both are answered", 100, |_| written.is_finished() && flushed.is_finished());
    written.join().unwrap();
    flushed.join().unwrap().unwrap();
}

#[test]
fn one_stale_answer_fences_no_writer() {
    let machine = Machine::new();
    let mut a = SteppedScene::new(&machine);
    let sequence = a.volume().status().stored_sequence;
    let (own, next) = (machine.segment_key(sequence), machine.segment_key(sequence + 1));
    let body: Bytes = machine.object(&own);
    Blocking(&*machine.plain).put(&next, body, Class::Upload).unwrap();
    let checks = machine.count(is_fence_check);
    let read = |volume: &Volume| volume.read_at(0, 512).map(drop).unwrap();
    a.until_with("it was looked at", 100, |volume| {
        read(volume);
        machine.count(is_fence_check) > checks
    });
    machine.remove(&next);
    for _ in 0..100 {
        a.pass(200);
        let _ = a.step();
        read(a.volume());
    }
    assert_eq!(a.flush(0), Ok(()));
    assert_eq!(a.volume().status().health, Health::Serving);
}

#[test]
fn a_stalled_write_is_not_acknowledged_once_unstored_writes_are_too_old() {
    let mut machine = Machine::new();
    machine.options.unstored_age_max = Some(Duration::from_secs(10));
    let mut a = SteppedScene::new(&machine);
    machine.fault(Fault::Delay, |call| segment_put(call).is_some());
    let (answered, is_stepping) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    // More than the staging memory: the last ones wait.
    for tile in 0..32 {
        let (answered, is_stepping, world) =
            (answered.clone(), is_stepping.clone(), a.world.clone());
        let on_outcome = move |outcome: sawmill_device::Outcome, _| {
            answered.fetch_add(u64::from(outcome.is_ok()), Ordering::SeqCst);
            if is_stepping.load(Ordering::SeqCst) {
                world.1.fetch_add(11_000, Ordering::SeqCst);
            }
        };
        let (address, bytes) = (tile * SEGMENT as u64, tile_bytes(tile, 1));
        let (write, flags) = (Operation::Write, Flags::default());
        a.volume().submit(Request::with_bytes(write, address, flags, bytes, on_outcome));
    }
    let before = answered.load(Ordering::SeqCst);
    assert!(before < 31, "{before} were answered at once");
    is_stepping.store(true, Ordering::SeqCst);
    (0..5).for_each(|_| {
        let _ = a.step();
    });
    assert_eq!(answered.load(Ordering::SeqCst), before + 1, "the time was up after the first");
    is_stepping.store(false, Ordering::SeqCst);
    machine.heal();
    machine.faults.release_all();
    a.until("the rest is accepted", |_| answered.load(Ordering::SeqCst) == 32);
}
