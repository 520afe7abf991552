//! Garbage collection: what it frees, what it must never do, and how it behaves when things fail.

use std::sync::Arc;

use crate::faulty::{
    Machine, SEGMENT, holds, segment_get, segment_put, stored, tile_bytes, tile_version, until,
    write_tile,
};
use crate::rig::{MIB, Model, Rig};
use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind};
use sawmill_store::{CallKind, Fault, StoreErrorKind};
use sawmill_volume::{
    FlushMode, GcPolicy, GcReport, RealWorld, SteppedVolume, Volume, World, check, gc, open_cache,
};

const NEVER: GcPolicy = GcPolicy {
    start: 0.0,
    stop: 0.0,
    choice: sawmill_volume::GcChoice::Greedy,
    bytes_per_second_max: 0,
};
/// Half a segment.
const HALF: usize = SEGMENT / 2;

/// Fills `tiles` whole segments, then overwrites every second half: each segment is half garbage.
fn halve(volume: &Volume, tiles: u64) {
    for tile in 0..tiles {
        write_tile(volume, tile, 1);
    }
    stored(volume);
    for tile in 0..tiles {
        volume.write_at(tile * SEGMENT as u64, &tile_bytes(tile, 2)[..HALF]).unwrap();
    }
    stored(volume);
}

fn assert_halved(volume: &Volume, tiles: u64) {
    for tile in 0..tiles {
        holds(volume, tile * SEGMENT as u64, &tile_bytes(tile, 2)[..HALF]);
        holds(volume, tile * SEGMENT as u64 + HALF as u64, &tile_bytes(tile, 1)[HALF..]);
    }
}

/// Moves everything, beside what the test does.
fn collect_all(volume: &Arc<Volume>) -> std::thread::JoinHandle<sawmill_volume::Result<GcReport>> {
    let volume = volume.clone();
    std::thread::spawn(move || volume.collect_garbage(1.0))
}

/// Live data, and everything in the store, settle as the thresholds promise.
fn settles(volume: &Volume) {
    until("the store holds no more than live/0.70 + 5 %", || {
        let status = volume.status();
        status.segment_object_bytes as f64 <= status.live_bytes as f64 / 0.70 * 1.05
    });
}

#[test]
fn a_volume_overwritten_at_random_takes_no_more_than_it_may() {
    let mut rig = Rig::with(16 * MIB, FlushMode::Logged);
    rig.options.cache = Some(open_cache(&rig.folder.path().join("cache"), 8 * MIB).unwrap());
    let volume = rig.open();
    let mut model = Model::new(16 * MIB, 3);
    for round in 0..6u64 {
        for _ in 0..4096 {
            let address = model.dice.below(4096) * 4096;
            let bytes = crate::rig::pattern(address, round, 4096);
            volume.write_at(address, &bytes).unwrap();
            model.bytes[address as usize..][..4096].copy_from_slice(&bytes);
        }
    }
    stored(&volume);
    settles(&volume);
    let counters = || volume.status().counters;
    until("moved and deleted", || counters().segments_moved > 0 && counters().segments_deleted > 0);
    model.compare_all(&volume);
    volume.close().unwrap();
    let volume = rig.open();
    model.compare_all(&volume);
    volume.close().unwrap();
    let record = sawmill_volume::find(&*rig.store, "disk").unwrap();
    let report = check::check(&*rig.store, &record, &mut |_, _| ()).unwrap();
    assert_eq!(report.damage, vec![]);
}

#[test]
fn collecting_all_by_hand_puts_the_volume_in_address_order() {
    let mut rig = Rig::with(16 * MIB, FlushMode::Logged);
    rig.options.gc = NEVER;
    let volume = rig.open();
    let mut model = Model::new(16 * MIB, 5);
    for _ in 0..2000 {
        let address = model.dice.below(512) * 4096;
        let bytes = crate::rig::pattern(address, model.dice.below(99), 4096);
        volume.write_at(address, &bytes).unwrap();
        model.bytes[address as usize..][..4096].copy_from_slice(&bytes);
    }
    stored(&volume);
    let before = volume.status();
    assert_eq!(volume.garbage(1.0).live_bytes, before.live_bytes);
    let report = volume.collect_garbage(1.0).unwrap();
    let after = volume.status();
    assert_eq!(report.moved_bytes, before.live_bytes);
    assert_eq!(after.live_bytes, before.live_bytes);
    assert_eq!(after.segment_data_bytes, after.live_bytes, "nothing but live data is left");
    assert!(
        after.extents < before.extents / 4,
        "{} extents, before {}",
        after.extents,
        before.extents
    );
    model.compare_all(&volume);
    // All is full now: a threshold below 1 finds nothing to do.
    assert_eq!(volume.collect_garbage(0.9).unwrap().moved_bytes, 0);
}

#[test]
fn a_threshold_takes_only_what_is_emptier() {
    let mut machine = Machine::new();
    machine.rig.options.gc = NEVER;
    let volume = machine.open();
    halve(&volume, 4);
    write_tile(&volume, 9, 1);
    stored(&volume);
    assert_eq!(volume.garbage(0.4).segments, 0);
    assert_eq!(volume.collect_garbage(0.4).unwrap().moved_bytes, 0);
    assert_eq!(
        (volume.garbage(0.6).segments, volume.garbage(0.6).live_bytes),
        (4, 4 * HALF as u64)
    );
    assert_eq!(gc::garbage(&*machine.plain, "disk", 0.6).unwrap(), volume.garbage(0.6));
    assert_eq!(volume.collect_garbage(0.6).unwrap().moved_bytes, 4 * HALF as u64);
    assert_eq!(volume.garbage(0.99).segments, 0);
    assert_halved(&volume, 4);
    drop(volume);
    machine.assert_sound("after collection by hand");
}

#[test]
fn a_moved_block_never_hides_a_write_that_came_meanwhile() {
    let mut machine = Machine::new();
    machine.rig.options.gc = NEVER;
    let volume = machine.open();
    let _heals = machine.healing();
    halve(&volume, 2);
    let first = volume.status().stored_sequence + 1;
    machine.fault(Fault::Delay, move |call| segment_put(call) == Some(first));
    let collecting = collect_all(&volume);
    until("the moved segment is on its way", || machine.faults.held().len() == 1);
    // Written after the data was gathered, stored in a segment behind the moved one.
    write_tile(&volume, 0, 3);
    machine.heal();
    machine.faults.release_all();
    collecting.join().unwrap().unwrap();
    stored(&volume);
    assert_eq!(tile_version(&volume, 0, 3), 3);
    drop(volume);
    // The same by what the store alone says.
    let other = machine.successor().open();
    assert_eq!(tile_version(&other, 0, 3), 3);
    holds(&other, SEGMENT as u64, &tile_bytes(1, 2)[..HALF]);
}

#[test]
fn what_is_overwritten_only_in_the_journal_is_moved_as_well() {
    let mut machine = Machine::new();
    machine.rig.options.gc = NEVER;
    let volume = machine.open();
    let _heals = machine.healing();
    halve(&volume, 1);
    // Accepted, and not in the store: it kills nothing there.
    volume.write_at(HALF as u64, &[7; 4096]).unwrap();
    volume.collect_garbage(1.0).unwrap();
    // The journal is lost: the cut without that write is whole.
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), |call| call.kind == CallKind::Put);
    volume.close_now();
    drop(volume);
    let other = machine.successor().open();
    assert_halved(&other, 1);
}

#[test]
fn cached_data_stays_cached_when_it_moves() {
    let mut machine = Machine::new();
    machine.rig.options.gc = NEVER;
    machine.rig.options.cache =
        Some(open_cache(&machine.folder.path().join("cache"), 16 * MIB).unwrap());
    let volume = machine.open();
    let _heals = machine.healing();
    halve(&volume, 8);
    volume.collect_garbage(1.0).unwrap();
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), |_| true);
    assert_halved(&volume, 8);
}

#[test]
fn data_cached_while_it_moved_stays_cached() {
    let mut machine = Machine::new();
    machine.rig.options.gc = NEVER;
    let volume = machine.open();
    halve(&volume, 8);
    volume.close().unwrap();
    let cache = open_cache(&machine.folder.path().join("cache"), 16 * MIB).unwrap();
    machine.rig.options.cache = Some(cache.clone());
    let volume = machine.open();
    let _heals = machine.healing();
    let first = volume.status().stored_sequence + 1;
    machine.fault(Fault::Delay, move |call| {
        segment_put(call).is_some_and(|sequence| sequence >= first)
    });
    let collecting = collect_all(&volume);
    until("a moved segment is on its way", || !machine.faults.held().is_empty());
    assert_eq!(cache.stats().inserted, 0, "nothing was cached when it was gathered");
    assert_halved(&volume, 8);
    until("all is in the cache", || cache.stats().bytes >= 8 * SEGMENT as u64);
    machine.heal();
    machine.faults.release_all();
    collecting.join().unwrap().unwrap();
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), |_| true);
    assert_halved(&volume, 8);
}

#[test]
fn a_segment_that_cannot_be_read_is_left_alone_and_the_volume_goes_on() {
    let mut machine = Machine::new();
    machine.rig.options.gc = NEVER;
    let volume = machine.open();
    halve(&volume, 3);
    volume.close().unwrap();
    let data: Vec<String> = machine.keys("/seg/");
    let victim = data.iter().find(|key| machine.object(key).len() > SEGMENT).unwrap().clone();
    machine.tamper(&victim, |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle..].fill(0x55);
    });
    let volume = machine.open();
    let report = volume.collect_garbage(1.0).unwrap();
    assert!(report.moved_bytes < volume.status().live_bytes, "not all of it could be moved");
    write_tile(&volume, 9, 1);
    stored(&volume);
    assert_eq!(tile_version(&volume, 9, 1), 1);
    assert_eq!(volume.status().health, sawmill_volume::Health::Serving);
    assert!(machine.keys("/seg/").contains(&victim), "what holds live data is never deleted");
}

#[test]
fn a_store_that_is_away_delays_collection_and_nothing_else() {
    let mut machine = Machine::new();
    machine.rig.options.gc = NEVER;
    let volume = machine.open();
    halve(&volume, 3);
    volume.close().unwrap();
    let volume = machine.open();
    let _heals = machine.healing();
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), |call| segment_get(call).is_some());
    let gets_before = machine.count(|call| segment_get(call).is_some());
    let collecting = collect_all(&volume);
    until("collection was refused twice", || {
        machine.count(|call| segment_get(call).is_some()) > gets_before + 2
    });
    write_tile(&volume, 9, 1);
    stored(&volume);
    machine.heal();
    assert_eq!(
        collecting.join().unwrap().unwrap().moved_bytes,
        volume.status().live_bytes - SEGMENT as u64
    );
    assert_halved(&volume, 3);
}

#[test]
fn a_delete_that_fails_is_tried_again_when_nothing_else_happens() {
    let mut machine = Machine::new();
    machine.rig.options.gc = NEVER;
    let volume = machine.open();
    let _heals = machine.healing();
    halve(&volume, 3);
    let (sender, failed) = std::sync::mpsc::channel();
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), move |call| {
        let is_first = call.kind == CallKind::Delete && call.key().contains("/seg/");
        if is_first { sender.send(()).is_ok() } else { false }
    });
    let collecting = collect_all(&volume);
    failed.recv().unwrap();
    drop(failed);
    collecting.join().unwrap().unwrap();
    until("the dead segments are gone", || volume.status().dead_object_bytes == 0);
    assert_halved(&volume, 3);
}

#[test]
fn collection_by_hand_is_refused_with_a_reason() {
    let mut machine = Machine::new();
    machine.rig.options.gc = NEVER;
    let volume = machine.open();
    let _heals = machine.healing();
    let kind = |outcome: sawmill_volume::Result<GcReport>| outcome.unwrap_err().kind();
    assert_eq!(kind(volume.collect_garbage(1.5)), ErrorKind::Invalid);
    halve(&volume, 2);
    let first = volume.status().stored_sequence + 1;
    machine.fault(Fault::Delay, move |call| segment_put(call) == Some(first));
    let collecting = collect_all(&volume);
    until("one collection is under way", || machine.faults.held().len() == 1);
    assert_eq!(kind(volume.collect_garbage(1.0)), ErrorKind::InUse);
    // A volume that is stopped tells who waits.
    volume.close_now();
    assert_eq!(kind(collecting.join().unwrap()), ErrorKind::Closed);
    assert_eq!(kind(volume.collect_garbage(1.0)), ErrorKind::Closed);
    let mut options = machine.options.clone();
    options.read_only = true;
    let reader = Volume::open(machine.plain.clone(), "disk", options.clone()).unwrap();
    assert_eq!(kind(reader.collect_garbage(1.0)), ErrorKind::Refused);
    assert!(reader.geometry().read_only);
    options.read_only = false;
    options.gc = GcPolicy { start: 0.9, stop: 0.5, ..GcPolicy::default() };
    let refused = Volume::open(machine.plain.clone(), "disk", options).map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("0.9"), "{refused}");
}

#[test]
fn a_quiet_volume_lets_go_what_is_dead_and_then_has_nothing_left_to_wait_for() {
    let machine = Machine::new();
    let world: Arc<dyn World> = Arc::new(RealWorld::default());
    let mut stepped =
        SteppedVolume::open(world.clone(), machine.rig.store.clone(), "disk", &machine.options)
            .unwrap();
    for version in 1..=3 {
        for tile in 0..4 {
            write_tile(stepped.volume(), tile, version);
        }
    }
    // `None`: the engine sleeps until somebody rings; an idle volume asks the store for nothing.
    until("the engine has nothing left to do", || {
        while stepped.step_journal_quietly() {}
        let rests = stepped.step_engine(world.now()).is_none();
        let status = stepped.volume().status();
        let is_stored = status.positions.stored == status.positions.accepted;
        rests && is_stored && status.dead_object_bytes == 0 && status.counters.segments_deleted > 0
    });
}
