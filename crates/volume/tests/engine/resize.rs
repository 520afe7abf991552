//! A disk gets another size, while it is used and across deaths at any call to its store: the old
//! size or the new one, and every byte below both.

use std::sync::Arc;

use crate::faulty::{
    Machine, SEGMENT, copy_store, holds, is_engine, root_put, segment_put, stored, tile_version,
    until, write_tile,
};
use crate::rig::{MIB, pattern};
use sawmill_device::{BlockDevice, BlockDeviceExt};
use sawmill_store::{Blocking, Call, CallKind, Class, Fault, StoreErrorKind};
use sawmill_volume::{ErrorKind, FlushMode, Volume, inspect};

const GIB: u64 = 1 << 30;

fn size(volume: &Volume) -> u64 {
    assert_eq!(volume.status().size_bytes, volume.geometry().size_bytes);
    volume.geometry().size_bytes
}

fn stored_size(machine: &Machine) -> u64 {
    let record = sawmill_volume::find(&*machine.plain, &machine.name).unwrap();
    inspect::at_rest(&*machine.plain, &record).unwrap().size_bytes
}

#[test]
fn a_disk_grows_while_it_is_used_and_keeps_its_size() {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    let before = volume.geometry();
    // Past a group of the map, and then within one.
    for (grown, at) in [(40 * GIB, 39 * GIB + 5), (41 * GIB, 40 * GIB + 7)] {
        assert_eq!(volume.write_at(at, &[1]).unwrap_err().kind(), ErrorKind::Invalid);
        volume.resize(grown).unwrap();
        assert_eq!(size(&volume), grown);
        holds(&volume, at, &[0; 100]);
        volume.write_at(at, &pattern(at, 3, 10_000)).unwrap();
    }
    assert_eq!(before.size_bytes, 64 * MIB, "a held geometry does not change");
    volume.close_now();
    drop(volume);
    let volume = machine.open();
    assert_eq!(size(&volume), 41 * GIB);
    holds(&volume, 39 * GIB + 5, &pattern(39 * GIB + 5, 3, 10_000));
    holds(&volume, 40 * GIB + 7, &pattern(40 * GIB + 7, 3, 10_000));
    assert_eq!(tile_version(&volume, 0, 1), 1);
    volume.close().unwrap();
    assert_eq!(stored_size(&machine), 41 * GIB);
    machine.assert_sound("after growing");
}

fn nothing_from_10_mib_on(volume: &Volume) {
    for start in [10, 28, 46] {
        holds(volume, start * MIB, &vec![0; 18 * MIB as usize]);
    }
}

#[test]
fn what_was_cut_off_reads_as_zeroes_when_the_disk_grows_again() {
    let machine = Machine::new();
    let volume = machine.open();
    let bytes = pattern(0, 1, 2 * MIB as usize);
    volume.write_at(9 * MIB, &bytes).unwrap();
    stored(&volume);
    volume.write_at(30 * MIB, &bytes).unwrap();
    volume.resize(10 * MIB).unwrap();
    assert_eq!(volume.read_at(10 * MIB, 1).unwrap_err().kind(), ErrorKind::Invalid);
    holds(&volume, 9 * MIB, &bytes[..MIB as usize]);
    volume.close().unwrap();
    machine.assert_sound("after shrinking");
    let volume = machine.open();
    assert_eq!(size(&volume), 10 * MIB);
    volume.resize(64 * MIB).unwrap();
    holds(&volume, 9 * MIB, &bytes[..MIB as usize]);
    nothing_from_10_mib_on(&volume);
    assert!(volume.status().live_bytes <= MIB, "what was cut off is dead");
    volume.close().unwrap();
    let volume = machine.open();
    nothing_from_10_mib_on(&volume);
    machine.assert_sound("after growing again");
}

#[test]
fn sizes_that_no_disk_can_have_and_readers_are_refused() {
    let mut machine = Machine::new();
    let volume = machine.open();
    for size_bytes in [0, 4095, 64 * MIB + 512, 65 << 40, u64::MAX] {
        assert_eq!(
            volume.resize(size_bytes).unwrap_err().kind(),
            ErrorKind::Invalid,
            "{size_bytes}"
        );
    }
    volume.resize(64 * MIB).unwrap();
    volume.close().unwrap();
    assert_eq!(volume.resize(65 * MIB).unwrap_err().kind(), ErrorKind::Closed);
    machine.rig.options.read_only = true;
    let reader = machine.open();
    assert_eq!(reader.resize(65 * MIB).unwrap_err().kind(), ErrorKind::ReadOnly);
}

/// Resizes, and dies with the engine's call number `nth` since then under way. Says whether there
/// was one.
fn dies_in_resize(
    machine: &Machine,
    volume: &Arc<Volume>,
    size_bytes: u64,
    nth: usize,
    late: bool,
) -> bool {
    let mut seen = 0;
    let fault = if late { Fault::Late } else { Fault::Delay };
    machine.fault(fault, move |call: &Call| {
        seen += usize::from(is_engine(call));
        is_engine(call) && seen > nth
    });
    std::thread::scope(|scope| {
        let resizing = scope.spawn(|| volume.resize(size_bytes));
        until("a held call, or the end", || {
            !machine.faults.held().is_empty() || resizing.is_finished()
        });
        volume.close_now();
        resizing.join().unwrap().is_err()
    })
}

/// Every way to die in a resize from 64 MiB, then what came before is there, at one of the two
/// sizes.
fn at_every_call(new_size: u64) {
    for landing in ["before", "during", "never"] {
        for late in [false, true] {
            for nth in 0..20 {
                let what = format!("call {nth}, late {late}, lands {landing}");
                let machine = Machine::new();
                let volume = machine.open();
                write_tile(&volume, 0, 1);
                stored(&volume);
                write_tile(&volume, 1, 2);
                write_tile(&volume, 200, 3);
                let died = dies_in_resize(&machine, &volume, new_size, nth, late);
                drop(volume);
                machine.heal();
                if landing == "before" {
                    machine.faults.release_all();
                }
                let volume = machine.open();
                assert!([64 * MIB, new_size].contains(&size(&volume)), "{what}");
                assert!(died || size(&volume) == new_size, "{what}: it was said to be done");
                if landing == "during" {
                    machine.faults.release_all();
                }
                assert_eq!([0, 1].map(|tile| tile_version(&volume, tile, 9)), [1, 2], "{what}");
                if size(&volume) >= 64 * MIB {
                    let old = tile_version(&volume, 200, 9);
                    assert!(old == 3 || new_size < 64 * MIB, "{what}");
                    // The very end of the disk, as its user sees it, dies unstored and is there
                    // again.
                    let end = size(&volume) - SEGMENT as u64;
                    volume.write_at(end, &pattern(5, 5, SEGMENT)).unwrap();
                    stored(&volume);
                    volume.write_at(end + 1000, &pattern(6, 6, 1000)).unwrap();
                    let seen = size(&volume);
                    volume.close_now();
                    drop(volume);
                    let volume = machine.open();
                    assert!(size(&volume) >= seen, "{what}: a disk shrank under its user");
                    holds(&volume, end, &pattern(5, 5, 1000));
                    holds(&volume, end + 1000, &pattern(6, 6, 1000));
                    volume.close().unwrap();
                } else {
                    volume.close().unwrap();
                }
                machine.assert_sound(&what);
                let volume = machine.open();
                volume.resize(new_size).unwrap();
                volume.close().unwrap();
                assert_eq!(stored_size(&machine), new_size, "{what}");
                machine.assert_sound(&what);
                if !died {
                    break;
                }
            }
        }
    }
}

#[test]
fn a_death_at_any_call_of_growing_leaves_either_size_and_all_data() {
    at_every_call(40 * GIB);
}

#[test]
fn a_death_at_any_call_of_shrinking_leaves_either_size_and_all_data_below_both() {
    at_every_call(8 * MIB);
}

/// The root of a resize that died arrives under the next attachment, which only reads and collects
/// garbage.
fn comes_late(new_size: u64) {
    let mut machine = Machine::new();
    let volume = machine.open();
    for tile in [0, 200] {
        write_tile(&volume, tile, 3);
    }
    stored(&volume);
    machine.fault(Fault::Late, |call| root_put(call).is_some());
    std::thread::scope(|scope| {
        let resizing = scope.spawn(|| volume.resize(new_size));
        until("the root is on its way", || {
            machine.faults.held().iter().any(|call| root_put(call).is_some())
        });
        volume.close_now();
        assert!(resizing.join().unwrap().is_err());
    });
    drop(volume);
    machine.heal();
    let volume = machine.open();
    assert_eq!(size(&volume), 64 * MIB);
    assert!(machine.faults.release(|call| root_put(call).is_some()) > 0);
    assert_eq!([0, 200].map(|tile| tile_version(&volume, tile, 9)), [3, 3]);
    volume.close_now();
    drop(volume);
    for _ in 0..2 {
        let volume = machine.open();
        assert_eq!(size(&volume), 64 * MIB, "what its user saw is what it is");
        assert_eq!([0, 200].map(|tile| tile_version(&volume, tile, 9)), [3, 3]);
        volume.close_now();
    }
    let mut reader = machine.options.clone();
    reader.read_only = true;
    let volume = Volume::open(machine.store.clone(), "disk", reader).unwrap();
    assert_eq!(size(&volume), 64 * MIB);
    machine.rig.options.segment_age_max = std::time::Duration::from_millis(1);
    let volume = machine.open();
    volume.close().unwrap();
    assert_eq!(stored_size(&machine), 64 * MIB);
    machine.assert_sound("after the next checkpoint");
}

#[test]
fn a_resize_that_comes_late_changes_nothing_under_later_attachments() {
    comes_late(8 * MIB);
    comes_late(128 * MIB);
}

/// A replica may have a checkpoint that came late, an old one of before, and nothing in between.
#[test]
fn a_resize_that_comes_late_leads_no_replica_back_to_an_old_checkpoint() {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    volume.close().unwrap();
    let old = copy_store(&*machine.plain);
    for version in 2..=3 {
        let volume = machine.open();
        write_tile(&volume, 0, version);
        volume.close().unwrap();
    }
    let superseded = machine.keys("/seg/");
    let volume = machine.open();
    write_tile(&volume, 0, 4);
    stored(&volume);
    machine.fault(Fault::Late, |call| root_put(call).is_some());
    std::thread::scope(|scope| {
        let resizing = scope.spawn(|| volume.resize(128 * MIB));
        until("the root is on its way", || {
            machine.faults.held().iter().any(|call| root_put(call).is_some())
        });
        volume.close_now();
        assert!(resizing.join().unwrap().is_err());
    });
    drop(volume);
    machine.heal();
    let volume = machine.open();
    write_tile(&volume, 1, 5);
    stored(&volume);
    volume.close_now();
    drop(volume);
    assert!(machine.faults.release(|call| root_put(call).is_some()) > 0);
    // What a copier leaves: the newest checkpoint and what it needs, and one of long before.
    let checkpoints = machine.keys("/checkpoint/");
    checkpoints[..checkpoints.len() - 1].iter().for_each(|key| machine.remove(key));
    superseded.iter().for_each(|key| machine.remove(key));
    for key in
        ["/checkpoint/", "/map/", "/seg/"].iter().flat_map(|part| crate::faulty::keys(&*old, part))
    {
        let body = Blocking(&*old).get(&key, None, Class::Read).unwrap();
        machine.remove(&key);
        Blocking(&*machine.plain).put(&key, body, Class::Upload).unwrap();
    }
    let mut reader = machine.options.clone();
    reader.read_only = true;
    let volume = Volume::open(machine.store.clone(), "disk", reader).unwrap();
    assert_eq!([0, 1].map(|tile| tile_version(&volume, tile, 9)), [4, 5]);
}

#[test]
fn one_lost_checkpoint_does_not_undo_a_resize() {
    for new_size in [128 * MIB, 8 * MIB] {
        let machine = Machine::new();
        let volume = machine.open();
        write_tile(&volume, 0, 1);
        volume.resize(new_size).unwrap();
        until("a second checkpoint says so", || volume.status().counters.checkpoints >= 2);
        write_tile(&volume, 1, 2);
        stored(&volume);
        volume.close_now();
        drop(volume);
        machine.tamper(&machine.keys("/checkpoint/").pop().unwrap(), |bytes| bytes[100] ^= 1);
        let volume = machine.open();
        assert_eq!(size(&volume), new_size);
        assert_eq!([0, 1].map(|tile| tile_version(&volume, tile, 9)), [1, 2]);
    }
}

#[test]
fn a_size_is_reported_when_two_checkpoints_hold_it() {
    let machine = Machine::new();
    let volume = machine.open();
    let _heals = machine.healing();
    write_tile(&volume, 0, 1);
    stored(&volume);
    let before = volume.geometry().size_bytes;
    let first = volume.status().checkpoint_number + 1;
    machine.fault(Fault::Delay, move |call| root_put(call).is_some_and(|number| number > first));
    let resizing = std::thread::spawn({
        let volume = volume.clone();
        move || volume.resize(128 * MIB)
    });
    until("the second of them", || !machine.faults.held().is_empty());
    assert_eq!(volume.geometry().size_bytes, before, "one damaged object would take it back");
    machine.heal();
    machine.faults.release_all();
    resizing.join().unwrap().unwrap();
    write_tile(&volume, 300, 2);
    stored(&volume);
    volume.close_now();
    drop(volume);
    let mut keys = machine.keys("/checkpoint/");
    machine.tamper(&keys.pop().unwrap(), |bytes| bytes[100] ^= 1);
    let volume = machine.open();
    assert_eq!(volume.geometry().size_bytes, 128 * MIB);
    assert_eq!(tile_version(&volume, 300, 2), 2);
}

#[test]
fn lost_checkpoints_of_a_grown_disk_are_damage_and_no_smaller_disk() {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    stored(&volume);
    // What is superseded is still there.
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), |call| call.kind == CallKind::Delete);
    volume.resize(128 * MIB).unwrap();
    write_tile(&volume, 300, 2);
    stored(&volume);
    volume.close_now();
    drop(volume);
    machine.heal();
    for key in machine.keys("/checkpoint/").iter().rev().take(2) {
        machine.tamper(key, |bytes| bytes[100] ^= 1);
    }
    let (kind, text) = machine.refused();
    assert_eq!(kind, ErrorKind::Corrupt);
    assert!(text.contains("the disk had grown"), "{text}");
}

/// A growth dies with one checkpoint that says it; the next attachment shows that size, and the
/// checkpoint is lost: what users saw is in the log.
#[test]
fn a_size_that_was_shown_outlives_the_only_checkpoint_that_said_it() {
    for writes_there in [false, true] {
        let machine = Machine::new();
        let volume = machine.open();
        write_tile(&volume, 0, 1);
        stored(&volume);
        let first = volume.status().checkpoint_number + 1;
        machine.fault(Fault::Late, move |call| root_put(call).is_some_and(|number| number > first));
        std::thread::scope(|scope| {
            let resizing = scope.spawn(|| volume.resize(128 * MIB));
            until("the second root is on its way", || !machine.faults.held().is_empty());
            volume.close_now();
            assert!(resizing.join().unwrap().is_err());
        });
        drop(volume);
        machine.heal();
        let volume = machine.open();
        assert_eq!(size(&volume), 128 * MIB);
        if writes_there {
            write_tile(&volume, 300, 2);
            stored(&volume);
        }
        volume.close_now();
        drop(volume);
        machine.tamper(&machine.keys("/checkpoint/").pop().unwrap(), |bytes| bytes[100] ^= 1);
        let volume = machine.open();
        assert_eq!(size(&volume), 128 * MIB, "a disk shrank under its user");
        assert_eq!(tile_version(&volume, 0, 9), 1);
        assert_eq!(tile_version(&volume, 300, 9), if writes_there { 2 } else { 0 });
    }
}

/// Two roots came late, of two who died: the size is the one that the last of those who went on
/// had.
#[test]
fn of_two_resizes_that_come_late_neither_leads_back_to_the_other() {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 3);
    stored(&volume);
    dies_with_a_root_under_way(&machine, &volume, |volume| volume.resize(128 * MIB).is_err());
    drop(volume);
    let volume = machine.open();
    assert_eq!(size(&volume), 64 * MIB);
    assert!(machine.faults.release(|call| root_put(call).is_some()) > 0);
    dies_with_a_root_under_way(&machine, &volume, |volume| volume.close().is_err());
    drop(volume);
    let volume = machine.open();
    assert_eq!(size(&volume), 64 * MIB);
    assert!(machine.faults.release(|call| root_put(call).is_some()) > 0);
    volume.close_now();
    drop(volume);
    let volume = machine.open();
    assert_eq!(size(&volume), 64 * MIB, "what its user saw is what it is");
    assert_eq!(tile_version(&volume, 0, 9), 3);
    volume.close().unwrap();
    machine.assert_sound("after both");
}

/// It knew the size of the checkpoint that it had read, and its user never heard of an attachment.
#[test]
fn a_fence_that_comes_late_undoes_no_reported_size() {
    for reported_bytes in [32 * MIB, 128 * MIB] {
        let machine = Machine::new();
        let volume = machine.open();
        write_tile(&volume, 0, 3);
        stored(&volume);
        let other = machine.successor();
        other.fault(Fault::Late, |call| segment_put(call).is_some());
        assert_eq!(other.try_open().map(drop).unwrap_err().kind(), ErrorKind::Unavailable);
        volume.resize(reported_bytes).unwrap();
        assert_eq!(other.faults.release_all(), 1);
        volume.close_now();
        drop(volume);
        assert_eq!(stored_size(&machine), reported_bytes);
        let third = machine.successor();
        let volume = third.open();
        assert_eq!(size(&volume), reported_bytes);
        assert_eq!(tile_version(&volume, 0, 9), 3);
        volume.close().unwrap();
        third.assert_sound("after the late fence");
    }
}

/// Dies in `act`, with a root on its way that comes late.
fn dies_with_a_root_under_way(
    machine: &Machine,
    volume: &Arc<Volume>,
    act: impl Fn(&Volume) -> bool + Send + Sync,
) {
    machine.fault(Fault::Late, |call| root_put(call).is_some());
    std::thread::scope(|scope| {
        let acting = scope.spawn(|| act(volume));
        until("the root is on its way", || {
            machine.faults.held().iter().any(|call| root_put(call).is_some())
        });
        volume.close_now();
        assert!(acting.join().unwrap());
    });
    machine.heal();
}

#[test]
fn a_resize_during_a_close_fails_no_flush_that_waits_for_the_store() {
    let machine = Machine::with(64 * MIB, FlushMode::Stored);
    let volume = machine.open();
    machine.fault(Fault::Delay, |call| segment_put(call).is_some());
    write_tile(&volume, 0, 1);
    std::thread::scope(|scope| {
        let healing = machine.healing();
        let flushing = scope.spawn(|| volume.flush());
        until("the segment waits", || !machine.faults.held().is_empty());
        let closing = scope.spawn(|| volume.close());
        until("the close has begun", || volume.write_at(0, &[1; 4096]).is_err());
        let resized = volume.begin_grow(128 * MIB).expect("it is asked");
        let refused = resized.recv().expect("it is answered").expect_err("a close has begun");
        assert_eq!(refused.kind(), ErrorKind::Closed);
        drop(healing);
        flushing.join().unwrap().expect("the close stores what the flush waits for");
        closing.join().unwrap().expect("everything is stored");
    });
}
