//! The file: the device receives exactly what programs do to the file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, OFlags, XattrFlags};
use rustix::io::Errno;
use sawmill_device::{
    BlockDevice, BlockDeviceExt, ErrorKind, Flags, Geometry, MemoryDevice, Operation,
};
use sawmill_sys::AlignedBytes;

use crate::devices::{ErrorDevice, HoldDevice, ThreadDevice};
use crate::setting::{
    RecordingDevice, SIZE, allocate, data_from, errno, hole_from, memory, needs_mounts, pattern,
    show, wait_until,
};

#[test]
fn bytes_written_anywhere_are_seen_at_once_by_every_opener() {
    needs_mounts!();
    for device in [memory() as Arc<dyn BlockDevice>, Arc::new(ThreadDevice::new(SIZE))] {
        let scene = show(device.clone());
        let (one, other) = (scene.open(), scene.open());
        for (seed, offset, length) in
            [(1, 0, 1), (2, 511, 1026), (3, 4095, 3 << 20), (4, SIZE - 7, 7)]
        {
            let bytes = pattern(seed, length);
            one.write_all_at(&bytes, offset).expect("room");
            let mut back = vec![0; length];
            other.read_exact_at(&mut back, offset).expect("in range");
            assert!(back == bytes, "{length} bytes at {offset}");
            assert!(device.read_at(offset, length).expect("in range") == bytes);
        }
        let mut buffer = [0; 10];
        assert_eq!(other.read_at(&mut buffer, SIZE - 4).expect("a short read"), 4);
        assert_eq!(other.read_at(&mut buffer, SIZE).expect("the end"), 0);
    }
}

#[test]
fn a_file_opened_with_o_direct_reads_what_was_written() {
    needs_mounts!();
    let scene = show(memory());
    let file = scene.open_with(OFlags::DIRECT);
    let mut bytes = AlignedBytes::zeroed(1 << 20);
    bytes.copy_from_slice(&pattern(7, 1 << 20));
    file.write_all_at(&bytes, 1 << 20).expect("room");
    let mut back = AlignedBytes::zeroed(1 << 20);
    file.read_exact_at(&mut back, 1 << 20).expect("in range");
    assert!(*back == *bytes);
}

#[test]
fn many_writes_are_at_the_device_at_once_and_no_worker_waits() {
    needs_mounts!();
    let device = Arc::new(HoldDevice::new(SIZE));
    let scene = show(device.clone());
    let writers: u64 = 16;
    std::thread::scope(|scope| {
        for n in 0..writers {
            let file = scene.open();
            scope.spawn(move || file.write_all_at(&pattern(n, 5000), n * 5000).expect("room"));
        }
        // More than there are workers, to one file.
        wait_until("all writes at the device", || device.count() == writers as usize);
        assert_eq!(scene.door.metrics().counts.in_flight, writers);
        assert_eq!(std::fs::metadata(scene.path()).expect("answered meanwhile").len(), SIZE);
        device.release();
    });
    for n in 0..writers {
        assert!(device.inner().read_at(n * 5000, 5000).expect("in range") == pattern(n, 5000));
    }
}

#[test]
fn long_payloads_outlive_the_buffer_that_they_came_in() {
    needs_mounts!();
    let device = Arc::new(HoldDevice::new(SIZE));
    let scene = show(device.clone());
    std::thread::scope(|scope| {
        for n in 0..6 {
            let file = scene.open();
            scope.spawn(move || file.write_all_at(&pattern(n, 1 << 20), n << 20).expect("room"));
        }
        wait_until("all writes at the device", || device.count() == 6);
        device.stop_holding();
    });
    for n in 0..6 {
        assert!(device.inner().read_at(n << 20, 1 << 20).expect("in range") == pattern(n, 1 << 20));
    }
}

#[test]
fn a_write_that_reaches_past_the_end_is_short_and_one_behind_it_has_no_room() {
    needs_mounts!();
    let scene = show(memory());
    let file = scene.open();
    assert_eq!(file.write_at(&[1; 100], SIZE - 30).expect("a short write"), 30);
    assert_eq!(errno(file.write_at(&[1; 100], SIZE)), Errno::NOSPC);
    assert_eq!(std::fs::metadata(scene.path()).expect("it is there").len(), SIZE);
    let appending = OpenOptions::new().append(true).open(scene.path()).expect("it opens");
    assert_eq!(errno(std::io::Write::write(&mut &appending, b"more")), Errno::NOSPC);
}

#[test]
fn holes_and_zeroed_ranges_read_as_zeroes() {
    needs_mounts!();
    let device = memory();
    let scene = show(device.clone());
    let file = scene.open();
    let keep = FallocateFlags::KEEP_SIZE;
    device.write_at(0, &[7; 1 << 20]).expect("in range");
    allocate(&file, FallocateFlags::PUNCH_HOLE | keep, 1000, 100_000).expect("a hole");
    allocate(&file, FallocateFlags::ZERO_RANGE, 200_001, 3).expect("a few zeroes");
    allocate(&file, FallocateFlags::ZERO_RANGE | keep, 300_000, u64::from(u32::MAX))
        .expect("up to the end");
    allocate(&file, FallocateFlags::empty(), 0, SIZE).expect("all is allocated already");
    allocate(&file, keep, 0, 2 * SIZE).expect("and the size stays");
    let bytes = device.read_at(0, 1 << 20).expect("in range");
    for (range, value) in [
        (0..1000, 7),
        (1000..101_000, 0),
        (101_000..200_001, 7),
        (200_001..200_004, 0),
        (200_004..300_000, 7),
        (300_000..1 << 20, 0),
    ] {
        assert!(bytes[range.clone()].iter().all(|byte| *byte == value), "{range:?} is not {value}");
    }
    assert_eq!(errno(allocate(&file, FallocateFlags::empty(), SIZE - 1, 2)), Errno::NOSPC);
    assert_eq!(errno(allocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096)), Errno::OPNOTSUPP);
    let metrics = scene.door.metrics().counts;
    assert_eq!((metrics.discards, metrics.write_zeroes), (1, 2));
}

#[test]
fn seeks_find_data_and_holes_however_far() {
    needs_mounts!();
    let size = 40 << 30;
    let data_start = (37 << 30) + (5 << 20);
    let device = Arc::new(MemoryDevice::new(size));
    device.write_at(data_start, &[1; 16 << 10]).expect("in range");
    let scene = show(device);
    let file = scene.open();
    assert_eq!(data_from(&file, 0).expect("there is data"), data_start);
    assert_eq!(data_from(&file, data_start + 5).expect("there is data"), data_start + 5);
    assert_eq!(hole_from(&file, 0).expect("there is a hole"), 0);
    assert_eq!(hole_from(&file, data_start).expect("there is a hole"), data_start + (16 << 10));
    assert_eq!(errno(data_from(&file, data_start + (16 << 10))), Errno::NXIO);
    assert_eq!(errno(data_from(&file, size)), Errno::NXIO);
    assert_eq!(errno(hole_from(&file, size)), Errno::NXIO);
}

#[test]
fn a_seek_goes_on_whether_answers_come_at_once_or_late() {
    needs_mounts!();
    let size = 5 << 30;
    let device = Arc::new(ThreadDevice::new(size));
    device.write_at(4 << 30, &[1]).expect("in range");
    let scene = show(device);
    assert_eq!(data_from(scene.open(), 3).expect("there is data"), 4 << 30);
    let full = show(Arc::new(MemoryDevice::with_geometry(Geometry {
        operations: sawmill_device::Operations {
            allocation: false,
            discard: false,
            write_zeroes: false,
        },
        ..memory().geometry()
    })));
    let file = full.open();
    assert_eq!(data_from(&file, 77).expect("all may be data"), 77);
    assert_eq!(hole_from(&file, 77).expect("the end is a hole"), SIZE);
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(errno(allocate(&file, hole, 0, 4096)), Errno::OPNOTSUPP);
}

#[test]
fn a_sync_is_a_flush_and_a_synchronous_write_has_fua() {
    needs_mounts!();
    let device = Arc::new(RecordingDevice::new(memory().geometry()));
    let scene = show(device.clone());
    let plain = scene.open();
    plain.write_all_at(b"plain", 0).expect("room");
    plain.sync_all().expect("flushed");
    plain.sync_data().expect("flushed");
    let flush = (Operation::Flush, Flags::default());
    assert_eq!(device.requests(), [(Operation::Write, Flags::default()), flush, flush]);
    for flags in [OFlags::SYNC, OFlags::DSYNC] {
        scene.open_with(flags).write_all_at(b"durable", 0).expect("room");
        let mut writes =
            device.requests().into_iter().filter(|(operation, _)| *operation == Operation::Write);
        let (_, last) = writes.next_back().expect("a write");
        assert!(last.fua, "{flags:?}");
    }
}

#[test]
fn the_size_is_the_volumes_and_so_are_mode_and_owner() {
    needs_mounts!();
    let scene = show(memory());
    let file = scene.open();
    file.set_len(SIZE).expect("the size it has");
    for other in [0, SIZE - 1, SIZE + 1] {
        assert_eq!(errno(file.set_len(other)), Errno::PERM);
    }
    assert_eq!(errno(File::create(scene.path())), Errno::PERM);
    let open_to_all = std::fs::Permissions::from_mode(0o666);
    assert_eq!(errno(std::fs::set_permissions(scene.path(), open_to_all)), Errno::PERM);
    assert_eq!(errno(std::os::unix::fs::chown(scene.path(), Some(1), None)), Errno::PERM);
    file.set_modified(std::time::UNIX_EPOCH).expect("times are not kept, and no error");
    let facts = std::fs::metadata(scene.path()).expect("it is there");
    assert_eq!((facts.len(), facts.mode() & 0o7777, facts.uid()), (SIZE, 0o600, 0));
}

#[test]
fn the_folder_has_one_file_and_room_for_no_other() {
    needs_mounts!();
    let scene = show(memory());
    let folder = scene.folder.path();
    let names: Vec<_> = std::fs::read_dir(folder)
        .expect("readable")
        .map(|e| e.expect("sound").file_name())
        .collect();
    assert_eq!(names, ["disk"]);
    assert!(std::fs::metadata(folder).expect("it is there").is_dir());
    assert_eq!(errno(std::fs::metadata(folder.join("other"))), Errno::NOENT);
    for outcome in [
        std::fs::write(folder.join("other"), b"x"),
        std::fs::create_dir(folder.join("deeper")),
        std::fs::remove_file(scene.path()),
        std::fs::rename(scene.path(), folder.join("other")),
        std::fs::hard_link(scene.path(), folder.join("other")),
    ] {
        assert!(outcome.is_err());
    }
    let facts = rustix::fs::statvfs(folder).expect("it says how large it is");
    assert_eq!((facts.f_blocks * facts.f_frsize, facts.f_bavail), (SIZE, 0));
    let attribute = rustix::fs::setxattr(scene.path(), "user.note", b"x", XattrFlags::empty());
    assert_eq!(attribute.expect_err("there is no room for attributes"), Errno::OPNOTSUPP);
    assert_eq!(scene.door.metrics().counts.protocol_violations, 0);
}

#[test]
fn errors_of_the_device_reach_the_user_of_the_file() {
    needs_mounts!();
    for (kind, expected) in [
        (ErrorKind::Unavailable, Errno::IO),
        (ErrorKind::Full, Errno::NOSPC),
        (ErrorKind::Fenced, Errno::SHUTDOWN),
        (ErrorKind::ReadOnly, Errno::ROFS),
    ] {
        let scene = show(Arc::new(ErrorDevice::new(kind)));
        let file = scene.open();
        assert_eq!(errno(file.write_at(b"x", 0)), expected);
        assert_eq!(errno(file.read_at(&mut [0; 4], 0)), expected);
        assert_eq!(errno(file.sync_all()), expected);
        assert_eq!(errno(data_from(&file, 0)), expected);
        assert_eq!(scene.door.metrics().counts.errors, 4);
    }
}

#[test]
fn a_read_only_device_is_a_read_only_mount() {
    needs_mounts!();
    let geometry = Geometry { read_only: true, ..memory().geometry() };
    let scene = show(Arc::new(MemoryDevice::with_geometry(geometry)));
    assert_eq!(errno(OpenOptions::new().write(true).open(scene.path())), Errno::ROFS);
    let mut bytes = [1; 100];
    File::open(scene.path()).expect("it opens").read_exact_at(&mut bytes, 5).expect("in range");
    assert_eq!(bytes, [0; 100]);
}

#[test]
fn a_device_with_short_requests_gets_no_longer_ones() {
    needs_mounts!();
    let geometry = Geometry { request_bytes_max: 9000, ..memory().geometry() };
    let device = Arc::new(MemoryDevice::with_geometry(geometry));
    let scene = show(device.clone());
    let bytes = pattern(3, 1 << 20);
    let file = scene.open();
    file.write_all_at(&bytes, 100).expect("room");
    let mut back = vec![0; bytes.len()];
    file.read_exact_at(&mut back, 100).expect("in range");
    assert!(back == bytes);
    assert!(scene.door.metrics().counts.writes >= 128);
}
