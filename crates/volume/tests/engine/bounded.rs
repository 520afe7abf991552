//! What the engine asks of the store and of its journal is bounded: holes cost nothing, an idle
//! volume is silent, a cold read is one ranged get, a full journal waits and goes on, and no object
//! is put that readers refuse.

use crate::faulty::{
    Machine, SEGMENT, is_engine, is_fence_check, segment_get, segment_put, stored, tile_bytes,
    tile_version, until, write_tile,
};
use crate::rig::{MIB, Model};
use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_store::{Call, CallKind, Fault, StoreErrorKind};
use sawmill_volume::{FlushMode, Stall, open_cache};

const FRAME: u64 = 64 << 10;

fn filled(tiles: u64, cached: bool) -> Machine {
    let mut machine = Machine::new();
    let volume = machine.open();
    for tile in 0..tiles {
        write_tile(&volume, tile, 1);
    }
    volume.close().unwrap();
    if cached {
        machine.options.cache =
            Some(open_cache(&machine.folder.path().join("cache"), 32 * MIB).unwrap());
    }
    machine
}

fn gets_since(machine: &Machine, before: usize) -> Vec<Call> {
    let mut calls = machine.faults.calls().split_off(before);
    calls.retain(|call| !is_fence_check(call));
    calls
}

#[test]
fn holes_read_as_zeroes_and_cost_no_request() {
    let machine = Machine::with(1 << 40, FlushMode::Logged);
    let volume = machine.open();
    volume.write_at(5 << 30, &[1; 4096]).unwrap();
    volume.write_at(7 << 30, &[1; 4096]).unwrap();
    volume.close().unwrap();
    let volume = machine.open();
    volume.discard(7 << 30, 4096).unwrap();
    let before = machine.faults.calls().len();
    for address in
        [0, 1, 4096, (5 << 30) - 4096, (5 << 30) + 4096, 6 << 30, 7 << 30, (1 << 40) - 4096]
    {
        assert_eq!(volume.read_at(address, 4096).unwrap(), vec![0; 4096]);
    }
    assert_eq!(volume.read_at(1 << 30, 32 << 20).unwrap(), vec![0; 32 << 20]);
    let runs = volume.allocation(0, 1 << 40).unwrap();
    assert_eq!(runs.iter().filter(|run| run.data).map(|run| run.length).sum::<u64>(), 4096);
    assert_eq!(gets_since(&machine, before), []);
}

#[test]
fn what_the_journal_holds_is_read_without_a_request() {
    let machine = Machine::new();
    let volume = machine.open();
    for tile in 0..4 {
        write_tile(&volume, tile, 1);
    }
    stored(&volume);
    let before = machine.faults.calls().len();
    assert!((0..4).all(|tile| tile_version(&volume, tile, 1) == 1));
    assert_eq!(gets_since(&machine, before), []);
}

#[test]
fn an_idle_volume_makes_no_request() {
    let mut machine = Machine::new();
    machine.options.segment_age_max = std::time::Duration::from_millis(1);
    let volume = machine.open();
    volume.write_at(0, &[1; 5000]).unwrap();
    volume.flush().unwrap();
    stored(&volume);
    let before = machine.faults.calls().len();
    for _ in 0..10_000 {
        let status = volume.status();
        assert_eq!(status.positions.stored, status.positions.accepted);
        volume.read_at(1 << 20, 4096).unwrap();
        volume.flush().unwrap();
    }
    assert_eq!(gets_since(&machine, before), []);
}

#[test]
fn a_cold_read_of_a_block_is_one_ranged_get() {
    for cached in [false, true] {
        let machine = filled(16, cached);
        let volume = machine.open();
        // Far apart, so that no read is in a row with another.
        for tile in [3, 11, 0, 7, 14, 5, 9] {
            let before = machine.faults.calls().len();
            let address = tile * SEGMENT as u64 + 2 * FRAME + 8192;
            crate::faulty::holds(
                &volume,
                address,
                &tile_bytes(tile, 1)[2 * FRAME as usize + 8192..][..4096],
            );
            let calls = gets_since(&machine, before);
            assert_eq!(calls.len(), 1, "tile {tile}: {calls:?}");
            let range = calls[0].range.clone().unwrap();
            assert_eq!(segment_get(&calls[0]), Some(65 + tile));
            assert_eq!(range.end - range.start, FRAME + 16, "one frame and its head");
        }
    }
}

#[test]
fn a_read_of_a_whole_segment_is_one_get() {
    let machine = filled(4, false);
    let volume = machine.open();
    let before = machine.faults.calls().len();
    assert_eq!(tile_version(&volume, 2, 1), 1);
    assert_eq!(gets_since(&machine, before).len(), 1);
}

#[test]
fn readers_of_one_frame_share_one_get() {
    let mut machine = filled(1, false);
    // Their reads follow each other.
    machine.options.prefetch_bytes = 0;
    let volume = machine.open();
    machine.fault(Fault::Delay, |call| segment_get(call).is_some());
    let before = machine.faults.calls().len();
    std::thread::scope(|scope| {
        let healing = machine.healing();
        for index in 0..8u64 {
            let volume = &volume;
            let at = (index * 4096) as usize;
            scope.spawn(move || {
                crate::faulty::holds(volume, at as u64, &tile_bytes(0, 1)[at..at + 4096])
            });
        }
        until("all read", || volume.status().counters.reads_store == 8);
        drop(healing);
    });
    assert_eq!(gets_since(&machine, before).len(), 1);
}

#[test]
fn a_cold_sequential_read_is_a_few_large_gets() {
    let machine = filled(32, true);
    let volume = machine.open();
    let before = machine.faults.calls().len();
    for at in (0..32 * SEGMENT as u64).step_by(16 << 10) {
        let tile = at / SEGMENT as u64;
        let inside = (at % SEGMENT as u64) as usize;
        crate::faulty::holds(&volume, at, &tile_bytes(tile, 1)[inside..inside + (16 << 10)]);
    }
    let calls = gets_since(&machine, before);
    assert!(calls.iter().all(|call| call.kind == CallKind::Get));
    // 512 reads of 128 frames in 32 segments.
    assert!(calls.len() <= 64, "{} gets", calls.len());
    let bytes: u64 = calls
        .iter()
        .map(|call| call.range.clone().map_or(0, |range| range.end - range.start))
        .sum();
    assert!(
        bytes <= 32 * (SEGMENT as u64 + 4 * 16) * 5 / 4,
        "{bytes} bytes: frames are fetched once"
    );
}

#[test]
fn warm_reads_cost_no_request() {
    let machine = filled(8, true);
    let volume = machine.open();
    let warm = |volume: &sawmill_volume::Volume| {
        let before = machine.faults.calls().len();
        assert!((0..8).all(|tile| tile_version(volume, tile, 1) == 1));
        gets_since(&machine, before).is_empty()
    };
    until("the cache has it all", || warm(&volume));
    volume.close().unwrap();
    let volume = machine.open();
    assert!(warm(&volume), "and still has it in the next life");
}

#[test]
fn a_full_journal_waits_and_goes_on_when_the_store_takes_more() {
    let machine = Machine::new();
    let volume = machine.open();
    machine.fault(Fault::Delay, |call| segment_put(call).is_some());
    std::thread::scope(|scope| {
        let healing = machine.healing();
        for writer in 0..2 {
            let volume = &volume;
            // Twice, so that neither can end, however unfair the machine, before the journal is
            // full again.
            let tiles = (0..64).chain(0..64);
            scope.spawn(move || tiles.for_each(|tile| write_tile(volume, writer * 64 + tile, 1)));
        }
        let full = || {
            let status = volume.status();
            let why = status.stall == Some(Stall::JournalBytes);
            why && status.stalled_requests == 2
                && status.journal_unstored_bytes > status.journal_bytes * 3 / 4
        };
        until("the journal is full", full);
        let held = machine.faults.held().len();
        assert!(held <= 6, "{held} uploads at once");
        let writes = volume.status().counters.writes;
        // One upload done makes room for some writes, and no more.
        let oldest = machine.faults.held().iter().filter_map(segment_put).min().unwrap();
        machine.faults.release(|call| segment_put(call) == Some(oldest));
        until("some writes went on", || volume.status().counters.writes > writes);
        until("the journal is full again", full);
        drop(healing);
    });
    stored(&volume);
    assert!((0..128).all(|tile| tile_version(&volume, tile, 1) == 1));
    assert_eq!((volume.status().stalled_requests, volume.status().stall), (0, None));
}

#[test]
fn writes_wait_at_the_limit_of_records_and_go_on_when_the_store_takes_more() {
    const RECORDS_MAX: u64 = 40;
    let mut machine = Machine::new();
    machine.options.bounds.records_unstored_max = RECORDS_MAX as usize;
    let volume = machine.open();
    machine.fault(Fault::Delay, |call| segment_put(call).is_some());
    std::thread::scope(|scope| {
        let healing = machine.healing();
        let volume = &volume;
        let writer = scope.spawn(move || {
            for block in 0..4 * RECORDS_MAX {
                volume.write_at(block * 4096, &[block as u8 + 1; 4096]).unwrap();
            }
        });
        until("a write waits for fewer records", || {
            let status = volume.status();
            status.stall == Some(Stall::JournalRecords) && status.stalled_requests == 1
        });
        let status = volume.status();
        assert_eq!(status.journal_unstored_records, RECORDS_MAX);
        assert_eq!(status.counters.writes, RECORDS_MAX);
        assert!(status.journal_unstored_bytes < status.journal_bytes / 8, "it has room");
        let first = volume.read_at(0, 4096).unwrap();
        assert_eq!(first, vec![1; 4096], "local data is read meanwhile");
        drop(healing);
        writer.join().unwrap();
    });
    stored(&volume);
    for block in 0..4 * RECORDS_MAX {
        crate::faulty::holds(&volume, block * 4096, &[block as u8 + 1; 4096]);
    }
    assert_eq!((volume.status().stalled_requests, volume.status().stall), (0, None));
}

/// A volume with many extents of one byte, and a map part that may be much shorter than they need.
fn machine_of_single_bytes() -> (Machine, std::sync::Arc<sawmill_volume::Volume>) {
    let mut machine = Machine::new();
    machine.options.bounds.map_part_bytes_max = 300;
    let volume = machine.open();
    for number in 0..SINGLE_BYTES {
        volume.write_at(number * 4096 + number, &[number as u8 + 1]).unwrap();
    }
    stored(&volume);
    (machine, volume)
}

const SINGLE_BYTES: u64 = 100;

fn assert_single_bytes(volume: &sawmill_volume::Volume) {
    for number in 0..SINGLE_BYTES {
        let at = (number * 4096 + number).saturating_sub(1);
        let bytes = volume.read_at(at, 3).unwrap();
        let written = &bytes[usize::from(number > 0)..][..1];
        assert_eq!(written, [number as u8 + 1]);
        assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 1, "{bytes:?}");
    }
}

#[test]
fn a_map_that_no_reader_would_accept_is_never_put_and_the_log_has_it_all() {
    let (mut machine, volume) = machine_of_single_bytes();
    let objects = |part| machine.keys(part);
    let before = (objects("/map/"), objects("/checkpoint/"));
    assert!(!volume.checkpoint(crate::faulty::WAIT_TIME_MAX), "it does not fit");
    assert_eq!((objects("/map/"), objects("/checkpoint/")), before);
    let error = volume.write_at(0, &[1]).unwrap_err();
    assert!(error.to_string().contains("map group 0"), "{error}");
    drop(volume);
    // The log has it all: whoever attaches now finds it, and no change is missing from the
    // checkpoint where it fits.
    machine.options.bounds.map_part_bytes_max = 1 << 20;
    let volume = machine.open();
    assert_single_bytes(&volume);
    volume.close().unwrap();
    assert_single_bytes(&machine.open());
    machine.assert_sound("after the map fits again");
}

#[test]
fn a_close_whose_map_fits_no_checkpoint_says_so_and_the_next_open_has_all() {
    let (machine, volume) = machine_of_single_bytes();
    let error = volume.close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    assert!(error.to_string().contains("map group 0"), "{error}");
    assert_single_bytes(&machine.open());
    machine.assert_sound("after a close without a checkpoint");
}

#[test]
fn small_writes_share_puts() {
    let machine = Machine::new();
    let volume = machine.open();
    let before = machine.count(|call| segment_put(call).is_some());
    for block in 0..1024u64 {
        volume.write_at(block * 16384, &[block as u8; 4096]).unwrap();
    }
    stored(&volume);
    let puts = machine.count(|call| segment_put(call).is_some()) - before;
    // Sealing what is there, while more of it is on its way, may leave a few small ones at the end.
    assert!(puts <= 20, "{puts} puts for 16 segments' worth");
    let status = volume.status();
    assert!(status.counters.segment_bytes_stored * 100 <= status.counters.written_bytes * 105);
}

#[test]
fn garbage_does_not_grow_with_the_number_of_lives() {
    let machine = Machine::new();
    for version in 1..=30 {
        let volume = machine.open();
        for tile in 0..3 {
            write_tile(&volume, tile, version);
        }
        volume.close().unwrap();
    }
    let fences = 30;
    assert!(machine.keys("/seg/").len() <= fences + 3 * 3, "{:?}", machine.keys("/seg/"));
    assert!(machine.keys("/checkpoint/").len() <= 3, "{:?}", machine.keys("/checkpoint/"));
    assert!(machine.keys("/map/").len() <= 3, "{:?}", machine.keys("/map/"));
}

#[test]
fn a_store_that_takes_no_deletes_costs_space_and_nothing_else() {
    let mut machine = Machine::with(8 * MIB, FlushMode::Logged);
    machine.options.checkpoint_bytes = MIB;
    machine.fault(Fault::Fail(StoreErrorKind::Denied), |call| {
        call.kind == CallKind::Delete && is_engine(call)
    });
    let volume = machine.open();
    let mut model = Model::new(8 * MIB, 5);
    for _ in 0..300 {
        model.act(&volume);
    }
    volume.close().unwrap();
    assert_eq!(volume.status().counters.segments_deleted, 0);
    model.compare_all(&machine.open());
    machine.assert_sound("without deletes");
}
