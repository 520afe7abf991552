//! A reader beside a writer: it sees a cut, writes nothing, disturbs nobody, and moves on to a
//! newer cut when the one it has is taken away.

use crate::faulty::{
    Machine, SEGMENT, holds, segment_get, stored, tile_bytes, tile_version, write_tile,
};
use crate::rig::MIB;
use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind};
use sawmill_store::{CallKind, Fault, StoreErrorKind};
use sawmill_volume::{Safety, open_cache};

fn reader(writer: &Machine) -> Machine {
    let mut reader = Machine::over(writer.plain.clone());
    reader.options.read_only = true;
    reader
}

#[test]
fn a_reader_sees_the_stored_cut_and_changes_nothing() {
    let writer = Machine::new();
    let volume = writer.open();
    write_tile(&volume, 0, 1);
    write_tile(&volume, 1, 1);
    stored(&volume);
    volume.write_at(0, &[9; 100]).unwrap();
    volume.flush().unwrap();
    let machine = reader(&writer);
    let read = machine.open();
    assert_eq!([0, 1, 2].map(|tile| tile_version(&read, tile, 9)), [1, 1, 0]);
    let status = read.status();
    assert!(status.read_only && read.geometry().read_only);
    assert_eq!(status.positions.stored, volume.status().positions.stored);
    for outcome in [read.write_at(0, &[1]), read.discard(0, 4096), read.write_zeroes(0, 4096)] {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::ReadOnly);
    }
    read.flush().unwrap();
    assert!(read.wait(Safety::Stored, None).unwrap());
    read.close().unwrap();
    assert_eq!(read.read_at(0, 1).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(machine.count(|call| matches!(call.kind, CallKind::Put | CallKind::Delete)), 0);
    assert!(!machine.journal().exists());
    write_tile(&volume, 2, 1);
    volume.close().unwrap();
    writer.assert_sound("beside a reader");
}

#[test]
fn a_reader_keeps_its_cut_while_the_writer_goes_on() {
    let writer = Machine::new();
    let volume = writer.open();
    for tile in 0..4 {
        write_tile(&volume, tile, 1);
    }
    stored(&volume);
    let machine = reader(&writer);
    let read = machine.open();
    writer.fault(Fault::Delay, |call| call.kind == CallKind::Delete);
    for tile in 0..4 {
        write_tile(&volume, tile, 2);
    }
    stored(&volume);
    assert!(
        (0..4).all(|tile| tile_version(&read, tile, 9) == 1),
        "nothing is deleted: the same cut"
    );
    let again = reader(&writer);
    assert!((0..4).all(|tile| tile_version(&again.open(), tile, 9) == 2));
}

#[test]
fn a_reader_moves_on_when_its_segments_were_deleted() {
    for cached in [false, true] {
        let mut writer = Machine::new();
        writer.options.checkpoint_bytes = MIB;
        let volume = writer.open();
        for tile in 0..4 {
            write_tile(&volume, tile, 1);
        }
        stored(&volume);
        let mut machine = reader(&writer);
        if cached {
            machine.options.cache =
                Some(open_cache(&machine.folder.path().join("cache"), 4 * MIB).unwrap());
        }
        let read = machine.open();
        let before = read.status().positions.stored;
        for version in 2..12 {
            for tile in 0..4 {
                write_tile(&volume, tile, version);
            }
            stored(&volume);
        }
        volume.close().unwrap();
        assert!(
            !writer.keys("/seg/").contains(&writer.segment_key(65)),
            "what the reader's map names is gone"
        );
        // A single read never mixes cuts within a segment's worth; the whole volume is of the new
        // cut afterwards.
        for _ in 0..2 {
            assert!((0..4).all(|tile| tile_version(&read, tile, 12) == 11));
        }
        assert!(read.status().positions.stored > before);
    }
}

#[test]
fn many_readers_open_and_read_while_a_writer_deletes_under_them() {
    let mut writer = Machine::new();
    writer.options.checkpoint_bytes = MIB;
    let volume = writer.open();
    for tile in 0..4 {
        write_tile(&volume, tile, 1);
    }
    stored(&volume);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers = [0, 1].map(|_| {
            scope.spawn(|| {
                let mut opened = 0;
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let read = reader(&writer).open();
                    let versions = [0, 1, 2, 3, 0].map(|tile| tile_version(&read, tile, 200));
                    assert!(versions.iter().all(|version| *version >= 1));
                    assert!(versions[4] >= versions[0], "a reader never goes back");
                    opened += 1;
                }
                opened
            })
        });
        for version in 2..150 {
            write_tile(&volume, version % 4, version);
            if version % 4 == 0 {
                stored(&volume);
            }
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
    });
    volume.close().unwrap();
}

#[test]
fn a_reader_whose_segment_is_truly_lost_says_corrupt() {
    let writer = Machine::new();
    let volume = writer.open();
    write_tile(&volume, 0, 1);
    write_tile(&volume, 1, 1);
    volume.close().unwrap();
    let machine = reader(&writer);
    let read = machine.open();
    let key = writer.segment_key(65);
    writer.remove(&key);
    let error = read.read_at(0, 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains(&key), "{error}");
    assert_eq!(tile_version(&read, 1, 9), 1);
}

#[test]
fn a_reader_waits_for_a_store_that_is_away_while_it_moves_on() {
    let mut writer = Machine::new();
    writer.options.checkpoint_bytes = MIB;
    let volume = writer.open();
    write_tile(&volume, 0, 1);
    stored(&volume);
    let machine = reader(&writer);
    let read = machine.open();
    for version in 2..20 {
        write_tile(&volume, 0, version);
        stored(&volume);
    }
    volume.close().unwrap();
    let mut failures = 0;
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), move |call| {
        failures += 1;
        segment_get(call).is_none() && failures < 6
    });
    holds(&read, SEGMENT as u64 - 4096, &tile_bytes(0, 19)[SEGMENT - 4096..]);
}
