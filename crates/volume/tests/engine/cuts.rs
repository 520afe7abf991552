//! Snapshots, the retention window, rollback: a cut is exactly what the volume was, for as long as
//! it is kept, and nothing else is kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::faulty::{
    Machine, SEGMENT, keys, root_put, segment_put, stored, tile_bytes, tile_version, until,
    write_tile,
};
use crate::rig::{MIB, Model};
use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_format::checkpoint::{Checkpoint, CheckpointIdentity, parse_checkpoint_key};
use sawmill_format::segment::{SegmentHeader, SegmentIdentity, segment_key};
use sawmill_store::{Call, CallKind, Fault};
use sawmill_volume::{
    Cut, CutKind, OpenOptions, RealWorld, SteppedVolume, Volume, World, limits, past,
};

/// Opens the state at a cut to read, or says why not.
fn open_cut(machine: &Machine, cut: Cut) -> sawmill_volume::Result<Arc<Volume>> {
    let options = OpenOptions { read_only: true, cut: Some(cut), ..machine.options.clone() };
    Volume::open(machine.plain.clone(), &machine.name, options)
}

fn snapshot(name: &str) -> Cut {
    Cut::Snapshot(name.into())
}

/// Overwrites tiles until so many more checkpoints are durable.
fn checkpoints(volume: &Volume, tiles: std::ops::Range<u64>, version: u64, count: u64) {
    let target_count = volume.status().counters.checkpoints + count;
    until("checkpoints", || {
        for tile in tiles.clone() {
            write_tile(volume, tile, version);
        }
        stored(volume);
        volume.status().counters.checkpoints >= target_count
    });
}

/// A machine with small checkpoints.
fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.options.checkpoint_bytes = MIB;
    machine
}

#[test]
fn a_snapshot_stays_what_it_was_while_the_volume_goes_on() {
    let machine = machine();
    let volume = machine.open();
    for tile in 0..6 {
        write_tile(&volume, tile, 1);
    }
    volume.create_snapshot("one").unwrap();
    checkpoints(&volume, 0..6, 2, 6);
    until("what no cut needs goes", || volume.status().counters.segments_deleted > 0);
    let one = open_cut(&machine, snapshot("one")).unwrap();
    assert!((0..6).all(|tile| tile_version(&one, tile, 9) == 1));
    volume.close().unwrap();
    let volume = machine.open();
    checkpoints(&volume, 0..6, 3, 4);
    let again = open_cut(&machine, snapshot("one")).unwrap();
    assert!((0..6).all(|tile| tile_version(&again, tile, 9) == 1), "also after a restart");
    assert!((0..6).all(|tile| tile_version(&volume, tile, 9) == 3));
    machine.assert_sound("a snapshot and a volume");
}

#[test]
fn a_deleted_snapshot_gives_back_what_it_alone_needed() {
    let machine = machine();
    let volume = machine.open();
    for tile in 0..6 {
        write_tile(&volume, tile, 1);
    }
    volume.create_snapshot("one").unwrap();
    checkpoints(&volume, 0..6, 2, 4);
    let report = past(&*machine.plain, "disk").unwrap();
    assert_eq!(report.cuts.len(), 1);
    assert!(report.cuts[0].unique_bytes >= 6 * SEGMENT as u64, "{report:?}");
    volume.delete_snapshot("one").unwrap();
    let gone = open_cut(&machine, snapshot("one")).err().unwrap();
    assert_eq!(gone.kind(), ErrorKind::NotFound, "{gone}");
    checkpoints(&volume, 0..6, 3, 5);
    // What is live, what two checkpoints keep, and orders: far less than what the snapshot held
    // besides.
    until("the copies of checkpoints go", || keys(&*machine.plain, "/kept/").is_empty());
    let left = machine.keys("/seg/").len();
    volume.close().unwrap();
    assert!(left < 40, "{left} segments are left");
    machine.assert_sound("after the snapshot");
}

#[test]
fn names_of_snapshots_are_unique_and_checked() {
    let machine = machine();
    let volume = machine.open();
    volume.create_snapshot("one").unwrap();
    assert_eq!(volume.create_snapshot("one").unwrap_err().kind(), ErrorKind::Exists);
    assert_eq!(volume.create_snapshot("a/b").unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(volume.create_snapshot("").unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(volume.create_snapshot(&"x".repeat(129)).unwrap_err().kind(), ErrorKind::Invalid);
    volume.create_snapshot(&"x".repeat(128)).unwrap();
    assert_eq!(volume.delete_snapshot("two").unwrap_err().kind(), ErrorKind::NotFound);
    volume.delete_snapshot("one").unwrap();
    volume.create_snapshot("one").unwrap();
}

#[test]
fn the_very_first_state_can_be_kept() {
    let machine = machine();
    let volume = machine.open();
    volume.create_snapshot("empty").unwrap();
    checkpoints(&volume, 0..4, 1, 4);
    let empty = open_cut(&machine, snapshot("empty")).unwrap();
    assert!((0..4).all(|tile| tile_version(&empty, tile, 9) == 0));
    volume.roll_back(&snapshot("empty")).unwrap();
    assert!((0..4).all(|tile| tile_version(&volume, tile, 9) == 0));
}

#[test]
fn a_name_survives_one_damaged_checkpoint() {
    for wait in [false, true] {
        let machine = machine();
        let volume = machine.open();
        for tile in 0..4 {
            write_tile(&volume, tile, 1);
        }
        volume.create_snapshot("one").unwrap();
        if wait {
            checkpoints(&volume, 0..4, 2, 3);
        } else {
            write_tile(&volume, 0, 2);
        }
        volume.close().unwrap();
        let newest = machine.keys("/checkpoint/").pop().unwrap();
        assert!(parse_checkpoint_key(&newest).is_some());
        machine.tamper(&newest, |bytes| bytes[70] ^= 1);
        let one = open_cut(&machine, snapshot("one")).unwrap();
        assert!((0..4).all(|tile| tile_version(&one, tile, 9) == 1), "wait {wait}");
        let mut machine = machine;
        machine.options.accept_journal_loss = true;
        let volume = machine.open();
        assert_eq!(volume.create_snapshot("one").unwrap_err().kind(), ErrorKind::Exists);
        checkpoints(&volume, 0..4, 3, 4);
        let one = open_cut(&machine, snapshot("one")).unwrap();
        assert!((0..4).all(|tile| tile_version(&one, tile, 9) == 1), "wait {wait}");
    }
}

#[test]
fn a_fenced_writers_snapshot_is_not_reported_done() {
    let machine = machine();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    stored(&volume);
    let successor = machine.successor();
    let other = successor.open();
    let error = volume.create_snapshot("late").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    other.create_snapshot("late").unwrap();
    write_tile(&other, 0, 2);
    stored(&other);
    let late = open_cut(&successor, snapshot("late")).unwrap();
    assert_eq!(tile_version(&late, 0, 9), 1);
}

#[test]
fn a_rollback_is_exact_and_can_be_undone() {
    let machine = machine();
    let volume = machine.open();
    let mut model = Model::new(8 * MIB, 5);
    for _ in 0..60 {
        model.act(&volume);
    }
    volume.create_snapshot("then").unwrap();
    let then = model.bytes.clone();
    for _ in 0..200 {
        model.act(&volume);
    }
    let now = model.bytes.clone();
    let undo = volume.roll_back(&snapshot("then")).unwrap();
    model.bytes = then.clone();
    model.compare_all(&volume);
    for _ in 0..60 {
        model.act(&volume);
    }
    let after = model.bytes.clone();
    // Killed and recovered, over the rollback or from behind it.
    volume.close_now();
    let volume = machine.open();
    model.compare_all(&volume);
    volume.roll_back(&Cut::Snapshot(undo.snapshot.clone())).unwrap();
    model.bytes = now;
    model.compare_all(&volume);
    volume.close().unwrap();
    machine.assert_sound("after rollbacks");
    let volume = machine.open();
    model.compare_all(&volume);
    for (cut, bytes) in [("then", then), (undo.snapshot.as_str(), model.bytes.clone())] {
        model.bytes = bytes;
        model.compare_all(&open_cut(&machine, snapshot(cut)).unwrap());
    }
    let second = past(&*machine.plain, "disk").unwrap();
    let second = second.cuts.iter().rfind(|cut| cut.name.starts_with("before-rollback")).unwrap();
    model.bytes = after;
    model.compare_all(&open_cut(&machine, snapshot(&second.name)).unwrap());
}

#[test]
fn a_rollback_is_recovered_from_either_checkpoint() {
    let machine = machine();
    let volume = machine.open();
    for tile in 0..4 {
        write_tile(&volume, tile, 1);
    }
    volume.create_snapshot("one").unwrap();
    checkpoints(&volume, 0..4, 2, 2);
    volume.roll_back(&snapshot("one")).unwrap();
    write_tile(&volume, 3, 7);
    volume.close().unwrap();
    let newest = machine.keys("/checkpoint/").pop().unwrap();
    machine.tamper(&newest, |bytes| bytes[70] ^= 1);
    let mut machine = machine;
    machine.options.accept_journal_loss = true;
    let volume = machine.open();
    assert_eq!([0, 1, 2, 3].map(|tile| tile_version(&volume, tile, 9)), [1, 1, 1, 7]);
    checkpoints(&volume, 0..1, 8, 3);
    assert_eq!([0, 1, 2, 3].map(|tile| tile_version(&volume, tile, 9)), [8, 1, 1, 7]);
}

#[test]
fn every_stored_moment_inside_the_retention_window_can_be_had() {
    let machine = machine();
    let volume = machine.open();
    volume.set_retention(3600).unwrap();
    let mut moments = Vec::new();
    for version in 1..=9 {
        for tile in 0..6 {
            write_tile(&volume, tile, version);
        }
        stored(&volume);
        moments.push((volume.status().positions.stored, version));
    }
    until("several checkpoints", || volume.status().counters.checkpoints >= 5);
    let undo = volume.roll_back(&Cut::Position(moments[3].0)).unwrap();
    assert!((0..6).all(|tile| tile_version(&volume, tile, 9) == 4));
    checkpoints(&volume, 0..6, 5, 3);
    // The last of them is where the rollback stands, and so names the state after it.
    for (position, version) in &moments[..8] {
        let then = open_cut(&machine, Cut::Position(*position)).unwrap();
        assert!((0..6).all(|tile| tile_version(&then, tile, 9) == *version), "position {position}");
    }
    let before = open_cut(&machine, Cut::Snapshot(undo.snapshot)).unwrap();
    assert_eq!(tile_version(&before, 0, 9), 9);
    let error = open_cut(&machine, Cut::Time(1)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.to_string().contains("sawmill log"), "{error}");
    volume.set_retention(0).unwrap();
    checkpoints(&volume, 0..6, 6, 4);
    assert!(open_cut(&machine, Cut::Position(moments[2].0)).is_err());
    let report = past(&*machine.plain, "disk").unwrap();
    assert!(report.cuts.iter().all(|cut| cut.kind == CutKind::Snapshot), "{report:?}");
    volume.close().unwrap();
    machine.assert_sound("after the window");
}

#[test]
fn a_moment_right_after_a_rollback_outlives_the_cut_rolled_back_to() {
    let machine = machine();
    let volume = machine.open();
    volume.set_retention(1 << 20).unwrap();
    write_tile(&volume, 0, 1);
    write_tile(&volume, 1, 1);
    volume.create_snapshot("one").unwrap();
    checkpoints(&volume, 0..2, 2, 2);
    let undo = volume.roll_back(&snapshot("one")).unwrap();
    write_tile(&volume, 0, 3);
    stored(&volume);
    let then = volume.status().positions.stored;
    checkpoints(&volume, 0..2, 4, 3);
    for name in ["one", &undo.snapshot] {
        volume.delete_snapshot(name).unwrap();
    }
    // The window holds what came after; what was before the rollback is kept for it alone.
    checkpoints(&volume, 0..2, 5, 4);
    let then = open_cut(&machine, Cut::Position(then)).unwrap();
    assert_eq!((tile_version(&then, 0, 9), tile_version(&then, 1, 9)), (3, 1));
    volume.close().unwrap();
    machine.assert_sound("after the cut was given up");
}

#[test]
fn a_check_of_a_disk_never_written_needs_no_cut_that_was_given_up() {
    // Seed 120655652: every place of the log is position 0, also those behind the rollback.
    let machine = machine();
    let volume = machine.open();
    let checkpoint = || assert!(volume.checkpoint(Duration::from_secs(20)));
    volume.create_snapshot("one").unwrap();
    checkpoint();
    let number = past(&*machine.plain, "disk").unwrap().cuts[0].number;
    volume.set_retention(1 << 20).unwrap();
    checkpoint();
    let undo = volume.roll_back(&snapshot("one")).unwrap();
    for name in ["one", &undo.snapshot] {
        volume.delete_snapshot(name).unwrap();
    }
    until("the copy of its checkpoint goes", || {
        checkpoint();
        machine.keys(&format!("kept/{number:020}")).is_empty()
    });
    volume.close().unwrap();
    machine.assert_sound("after the cut was given up");
}

#[test]
fn a_rollback_to_what_its_writer_has_not_heard_of_waits_for_it() {
    let machine = machine();
    let volume = machine.open();
    let _heals = machine.healing();
    volume.set_retention(1 << 20).unwrap();
    write_tile(&volume, 0, 1);
    stored(&volume);
    let next = volume.status().stored_sequence + 1;
    let puts = move |call: &Call| segment_put(call) == Some(next);
    machine.fault(Fault::LoseAnswer, puts);
    write_tile(&volume, 0, 2);
    // A put that has begun is counted already.
    until("it is in the store", || machine.keys("").contains(&machine.segment_key(next)));
    let then = Cut::Position(volume.status().positions.accepted);
    let answer = volume.begin_roll_back(&then).unwrap();
    let puts_before = machine.count(puts);
    until("the writer has asked again, and again", || machine.count(puts) > puts_before + 1);
    machine.heal();
    answer.recv().unwrap().unwrap();
    assert_eq!(tile_version(&volume, 0, 2), 2);
}

#[test]
fn a_cut_given_up_under_its_reader_is_an_error_and_never_other_bytes() {
    let machine = machine();
    let volume = machine.open();
    for tile in 0..6 {
        write_tile(&volume, tile, 1);
    }
    volume.create_snapshot("one").unwrap();
    let reader = open_cut(&machine, snapshot("one")).unwrap();
    volume.delete_snapshot("one").unwrap();
    checkpoints(&volume, 0..6, 2, 6);
    let is_cut = |bytes: Vec<u8>| bytes == tile_bytes(0, 1);
    until("its objects are deleted, and its bytes until then", || {
        !reader.read_at(0, SEGMENT).is_ok_and(is_cut)
    });
    let error = reader.read_at(0, SEGMENT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.to_string().contains("no longer kept"), "{error}");
}

#[test]
fn a_death_between_any_two_puts_of_an_order_leaves_it_done_or_undone() {
    for fault in [Fault::Late, Fault::LoseAnswer, Fault::Delay] {
        for held in ["order", "root", "kept"] {
            let machine = machine();
            let volume = machine.open();
            for tile in 0..4 {
                write_tile(&volume, tile, 1);
            }
            volume.create_snapshot("first").unwrap();
            checkpoints(&volume, 0..4, 2, 2);
            machine.fault(fault.clone(), move |call| match held {
                "order" => segment_put(call).is_some() && call.size_bytes < 1000,
                "root" => root_put(call).is_some(),
                _ => call.kind == CallKind::Put && call.key().contains("/kept/"),
            });
            let requester = volume.clone();
            let order_thread = std::thread::spawn(move || {
                let done = requester.create_snapshot("second").is_ok();
                done && requester.roll_back(&Cut::Snapshot("first".into())).is_ok()
            });
            let before = machine.faults.calls().len();
            until("calls", || machine.faults.calls().len() > before || order_thread.is_finished());
            if held != "order" {
                until("the orders", || order_thread.is_finished());
            }
            volume.close_now();
            let rolled_back = order_thread.join().unwrap();
            drop(volume);
            machine.heal();
            machine.faults.release_all();
            let volume = machine.open();
            let version = tile_version(&volume, 0, 9);
            let what = format!("{fault:?} {held}");
            assert!(version == 1 || !rolled_back && version == 2, "{what}: {version}");
            checkpoints(&volume, 1..4, 3, 4);
            assert_eq!(tile_version(&volume, 0, 9), version, "{what}");
            let first = open_cut(&machine, snapshot("first")).unwrap();
            assert!((0..4).all(|tile| tile_version(&first, tile, 9) == 1), "{what}");
            volume.close().unwrap();
            machine.assert_sound(&what);
        }
    }
}

#[test]
fn a_quiet_volume_gives_back_what_a_deleted_snapshot_kept() {
    let machine = Machine::new();
    let volume = machine.open();
    (0..6).for_each(|tile| write_tile(&volume, tile, 1));
    volume.create_snapshot("one").unwrap();
    (0..6).for_each(|tile| write_tile(&volume, tile, 2));
    stored(&volume);
    until("what is dead is known to be", || volume.status().counters.checkpoints >= 2);
    assert!(volume.status().dead_object_bytes >= 6 * SEGMENT as u64, "the snapshot needs it");
    volume.delete_snapshot("one").unwrap();
    // Nobody writes any more.
    until("what it alone needed is gone", || volume.status().dead_object_bytes == 0);
    assert!((0..6).all(|tile| tile_version(&volume, tile, 2) == 2));
}

/// A world where time passes on request, and whose wall clock can be wrong besides.
pub(crate) struct Forward(pub RealWorld, pub AtomicU64, pub i64);

impl World for Forward {
    fn now(&self) -> Duration {
        self.0.now() + Duration::from_millis(self.1.load(Ordering::SeqCst))
    }
    fn unix_ms(&self) -> u64 {
        let right = self.0.unix_ms() + self.1.load(Ordering::SeqCst);
        right.checked_add_signed(self.2).unwrap()
    }
    fn random(&self) -> sawmill_volume::Result<[u8; 16]> {
        self.0.random()
    }
    fn boot_id(&self) -> sawmill_volume::Result<[u8; 16]> {
        self.0.boot_id()
    }
    fn disks(&self) -> &dyn sawmill_volume::Disks {
        self.0.disks()
    }
}

/// An attachment on a machine whose wall clock is wrong by so much: `seconds` pass, nobody does
/// anything, and it ends.
fn attach_by_a_wrong_clock(machine: &Machine, wrong_ms: i64, seconds: u64) {
    let world = Arc::new(Forward(RealWorld::default(), AtomicU64::new(0), wrong_ms));
    let dynamic: Arc<dyn World> = world.clone();
    let mut stepped =
        SteppedVolume::open(dynamic, machine.rig.store.clone(), "disk", &machine.options).unwrap();
    for _ in 0..seconds {
        world.1.fetch_add(1000, Ordering::SeqCst);
        while stepped.step_journal_quietly() {}
        let _ = stepped.step_engine(world.now());
    }
    stepped.begin_close();
    until("everything is stored", || {
        world.1.fetch_add(100, Ordering::SeqCst);
        while stepped.step_journal_quietly() {}
        let _ = stepped.step_engine(world.now());
        stepped.is_settled()
    });
    stepped.finish_close().unwrap();
}

#[test]
fn no_wall_clock_makes_a_moment_old() {
    const DAY_MS: i64 = 24 * 3600 * 1000;
    for wrong_ms in [40 * DAY_MS, -40 * DAY_MS] {
        let machine = machine();
        let volume = machine.open();
        volume.set_retention(DAY_MS as u64 / 1000).unwrap();
        let mut moments = Vec::new();
        for version in 1..=3 {
            (0..4).for_each(|tile| write_tile(&volume, tile, version));
            stored(&volume);
            moments.push(volume.status().positions.stored);
            checkpoints(&volume, 4..8, version, 2);
        }
        volume.close().unwrap();
        let segments = machine.keys("/seg/");
        attach_by_a_wrong_clock(&machine, wrong_ms, 6);
        let volume = machine.open();
        checkpoints(&volume, 4..8, 9, 4);
        volume.close().unwrap();
        for (version, position) in (1..=3).zip(moments) {
            let then = open_cut(&machine, Cut::Position(position)).unwrap();
            assert!(
                (0..4).all(|tile| tile_version(&then, tile, 9) == version),
                "{wrong_ms}: {version}"
            );
        }
        let left = machine.keys("/seg/");
        assert!(
            segments.iter().all(|key| left.contains(key)),
            "{wrong_ms}: a segment of the window went"
        );
        machine.assert_sound("after a wrong clock");
    }
}

#[test]
fn a_moment_ages_by_the_time_that_the_volume_was_attached() {
    let machine = machine();
    let volume = machine.open();
    volume.set_retention(600).unwrap();
    (0..4).for_each(|tile| write_tile(&volume, tile, 1));
    stored(&volume);
    let moment = Cut::Position(volume.status().positions.stored);
    checkpoints(&volume, 0..4, 2, 3);
    volume.close().unwrap();
    // Three attachments, each of a part of the window.
    for _ in 0..3 {
        open_cut(&machine, moment.clone()).unwrap();
        attach_by_a_wrong_clock(&machine, 0, 250);
    }
    let gone = open_cut(&machine, moment).err().unwrap();
    assert_eq!(gone.kind(), ErrorKind::NotFound, "{gone}");
}

#[test]
fn a_quiet_volume_gives_back_what_left_the_retention_window() {
    let machine = Machine::new();
    let world = Arc::new(Forward(RealWorld::default(), AtomicU64::new(0), 0));
    let dynamic: Arc<dyn World> = world.clone();
    let mut stepped =
        SteppedVolume::open(dynamic, machine.rig.store.clone(), "disk", &machine.options).unwrap();
    let step = |stepped: &mut SteppedVolume| {
        while stepped.step_journal_quietly() {}
        stepped.step_engine(world.now())
    };
    let retained = stepped.volume().begin_set_retention(60).unwrap();
    until("the retention is stored", || {
        step(&mut stepped);
        retained.try_recv().is_ok()
    });
    for version in 1..=3 {
        (0..4).for_each(|tile| write_tile(stepped.volume(), tile, version));
        until("stored", || {
            step(&mut stepped);
            let positions = stepped.volume().status().positions;
            positions.stored == positions.accepted
        });
    }
    until("a checkpoint knows what is dead", || {
        step(&mut stepped);
        stepped.volume().status().counters.checkpoints >= 3
    });
    assert!(stepped.volume().status().dead_object_bytes > 0, "the window needs it");
    // Nobody writes any more, and time goes by.
    until("the window has moved on", || {
        world.1.fetch_add(1000, Ordering::SeqCst);
        let sleeps = step(&mut stepped);
        sleeps.is_none() && stepped.volume().status().dead_object_bytes == 0
    });
}

#[test]
fn no_segment_is_older_than_a_checkpoint_that_has_it_not() {
    let machine = machine();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    stored(&volume);
    machine.fault(Fault::Delay, |call| segment_put(call).is_some());
    write_tile(&volume, 1, 1);
    until("a segment is on its way", || !machine.faults.held().is_empty());
    let sent = Instant::now();
    until("it is some time on its way", || sent.elapsed() > Duration::from_millis(5));
    volume.resize(65 * MIB).unwrap();
    let key = machine.keys("/checkpoint/").pop().unwrap();
    let (volume_id, number) = parse_checkpoint_key(&key).unwrap();
    let root = Checkpoint::decode(&machine.object(&key), &CheckpointIdentity { volume_id, number })
        .unwrap();
    machine.heal();
    machine.faults.release_all();
    stored(&volume);
    let sequence = root.next_sequence;
    let object = machine.object(&segment_key(volume_id, sequence));
    let late = SegmentHeader::decode(&object, &SegmentIdentity { volume_id, sequence }).unwrap();
    let (root_ms, late_ms) = (root.wall_unix_ms, late.wall_unix_ms);
    assert!(root_ms <= late_ms, "{root_ms} > {late_ms}");
    volume.close().unwrap();
}

/// Nothing steps the engine, so nothing is answered.
#[test]
fn an_order_too_many_is_refused_and_those_that_wait_are_not() {
    let machine = machine();
    let world: Arc<dyn World> = Arc::new(RealWorld::default());
    let stepped =
        SteppedVolume::open(world, machine.rig.store.clone(), "disk", &machine.options).unwrap();
    let ordered: Vec<_> = (0..limits::ORDERS_WAITING_MAX)
        .map(|number| stepped.volume().begin_snapshot(&format!("s{number}")).unwrap())
        .collect();
    let refused = stepped.volume().begin_grow(stepped.volume().status().size_bytes * 2).unwrap();
    let error = refused.recv().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert!(ordered.iter().all(|answer| answer.try_recv().is_err()), "the others wait");
    drop(stepped);
}
