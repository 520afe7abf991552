//! What the door serves to a guest that keeps the rules.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sawmill_device::{BlockDeviceExt, Geometry, MemoryDevice, Operation};
use sawmill_frontend::{Door, Stop};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo};

use crate::TestFolder;
use crate::devices::{PausableDevice, SIZE_BYTES};
use crate::guest::*;

#[test]
fn what_is_written_is_read_back_directly_and_by_indirect_tables() {
    for indirect in [false, true] {
        let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
        let _door = folder.serve(pausable.clone());
        let mut guest = Guest::new(2);
        guest.indirect = indirect;
        let _front = guest.connect(&folder.path());
        for queue in 0..2 {
            // More than the queue has entries, so that every index wraps.
            for n in 0..200u64 {
                let bytes: Vec<u8> = (0..4096).map(|at| (n + at) as u8).collect();
                assert_eq!(guest.execute(queue, STORE, 8 * n, &bytes, 0).0, 0);
                assert_eq!(guest.execute(queue, READ, 8 * n, &[], 4096), (0, bytes));
            }
        }
    }
}

#[test]
fn a_request_may_be_cut_into_pieces_anywhere() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let _door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let _front = guest.connect(&folder.path());
    let (at, data) = (header_at(0), data_at(0));
    let bytes: Vec<u8> = (0..1024u32).map(|n| (n * 7) as u8).collect();
    guest.put(at, &header(STORE, 3));
    guest.put(data, &bytes);
    let write = [
        (at, 5, false),
        (at + 5, 11, false),
        (data, 1, false),
        (data + 1, 1023, false),
        (at + 32, 1, true),
    ];
    let head = guest.lay_out(0, &write);
    guest.offer(0, head);
    guest.kick(0);
    guest.wait(0);
    assert_eq!(pausable.memory.read_at(3 * 512, 1024).expect("in range"), bytes);
    // Header and first data in one piece, and the status at the end of the last data.
    guest.put(at, &header(READ, 3));
    guest.put(data, &[0; 1025]);
    let head = guest.lay_out(0, &[(at, 16, false), (data, 1000, true), (data + 1000, 25, true)]);
    guest.put(data + 1024, &[0xff]);
    guest.offer(0, head);
    guest.kick(0);
    guest.wait(0);
    assert_eq!(guest.get(data, 1025), [bytes, vec![0]].concat());
}

#[test]
fn flush_discard_and_write_zeroes_reach_the_device() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let _front = guest.connect(&folder.path());
    assert_eq!(guest.execute(0, STORE, 0, &[7; 8192], 0).0, 0);
    assert_eq!(guest.execute(0, FLUSH, 0, &[], 0).0, 0);
    assert_eq!(guest.execute(0, WRITE_ZEROES, 0, &range(1, 3, 1), 0).0, 0);
    assert_eq!(guest.execute(0, WRITE_ZEROES, 0, &range(5, 1, 0), 0).0, 0);
    assert_eq!(guest.execute(0, DISCARD, 0, &range(8, 8, 0), 0).0, 0);
    let requests = pausable.requests(5);
    let operations: Vec<Operation> = requests.iter().map(|(operation, ..)| *operation).collect();
    use Operation::{Discard, Flush, Write, WriteZeroes};
    assert_eq!(operations, [Write, Flush, WriteZeroes, WriteZeroes, Discard]);
    assert_eq!(
        requests.iter().map(|(.., flags)| flags.no_unmap).collect::<Vec<_>>(),
        [false, false, false, true, false]
    );
    assert_eq!(requests[4].1, 8 * 512);
    let expected = [[7; 512].as_slice(), &[0; 1536], &[7; 512], &[0; 512]].concat();
    assert_eq!(pausable.memory.read_at(0, 3072).expect("in range"), expected);
    let counts = door.counts();
    let kinds = (counts.writes, counts.flushes, counts.discards, counts.write_zeroes);
    assert_eq!((kinds, counts.bytes_in, counts.errors), ((1, 1, 1, 2), 8192, 0));
}

#[test]
fn what_cannot_be_done_fails_alone() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let _front = guest.connect(&folder.path());
    let sectors = SIZE_BYTES / 512;
    let (failed, unsupported) = (1, 2);
    for (kind, sector, data, read, status) in [
        (99, 0, vec![], 512, unsupported),
        (STORE, sectors, vec![1; 512], 0, failed),
        (READ, u64::MAX, vec![], 512, failed),
        (READ, u64::MAX / 512, vec![], 512, failed),
        (READ, 0, vec![], 511, failed),
        (STORE, 0, vec![1; 100], 0, failed),
        (STORE, 0, vec![], 0, failed),
        (DISCARD, 0, range(sectors, 1, 0), 0, failed),
        (DISCARD, 0, range(u64::MAX, 1, 0), 0, failed),
        (DISCARD, 0, range(0, 8, 1), 0, unsupported),
        (DISCARD, 0, [range(0, 8, 0), range(8, 8, 0)].concat(), 0, failed),
        (WRITE_ZEROES, 0, range(0, 8, 2), 0, unsupported),
        (WRITE_ZEROES, 0, vec![1; 15], 0, failed),
        (GET_ID, 0, vec![], 19, failed),
    ] {
        assert_eq!(
            guest.execute(0, kind, sector, &data, read).0,
            status,
            "kind {kind} at {sector}"
        );
    }
    assert_eq!(
        guest.execute(0, GET_ID, 0, &[], 20),
        (0, b"serial 1\0\0\0\0\0\0\0\0\0\0\0\0".to_vec())
    );
    assert_eq!(guest.execute(0, STORE, 0, &[1; 512], 0).0, 0, "the queue goes on");
    assert_eq!((door.counts().errors, door.counts().protocol_violations), (14, 0));
}

#[test]
fn the_configuration_shows_the_device() {
    let folder = TestFolder::new();
    let geometry = Geometry {
        block_bytes: 4096,
        read_only: true,
        ..MemoryDevice::new(SIZE_BYTES).geometry_now()
    };
    let _door = folder.serve(Arc::new(MemoryDevice::with_geometry(geometry)));
    let mut guest = Guest::new(1);
    let mut front = guest.connect(&folder.path());
    let (_, config) =
        front.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).expect("an answer");
    let number = |at: usize, bytes: usize| {
        config[at..at + bytes]
            .iter()
            .rev()
            .fold(0u64, |number, byte| number << 8 | u64::from(*byte))
    };
    assert_eq!(number(0, 8), SIZE_BYTES / 512);
    assert!(number(8, 4) * number(12, 4) <= u64::from(geometry.request_bytes_max));
    assert_eq!((number(20, 4), number(28, 4), number(34, 2)), (4096, 16, 4));
    let read_only = front.get_features().expect("an answer") & 1 << 5;
    assert_ne!(read_only, 0);
    assert_eq!(guest.execute(0, STORE, 0, &[1; 4096], 0).0, 1);
}

#[test]
fn a_guest_without_a_cache_has_every_change_made_durable() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let _door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    guest.wants &= !F_FLUSH;
    let front = guest.connect(&folder.path());
    guest.execute(0, STORE, 0, &[1; 512], 0);
    guest.execute(0, WRITE_ZEROES, 0, &range(0, 1, 1), 0);
    assert!(pausable.requests(2).iter().all(|(.., flags)| flags.fua));
    drop(front);
    // And one that turns its cache off, and on.
    let mut guest = Guest::new(1);
    let mut front = guest.connect(&folder.path());
    for (cache, durable) in [(0, true), (1, false)] {
        front.set_config(32, VhostUserConfigFlags::WRITABLE, &[cache]).expect("it can be written");
        guest.execute(0, STORE, 0, &[1; 512], 0);
        assert_eq!(pausable.requests(pausable.count()).last().expect("a write").2.fua, durable);
    }
}

#[test]
fn a_guest_is_notified_only_when_it_asks_for_it() {
    for event_idx in [true, false] {
        let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
        let _door = folder.serve(pausable.clone());
        let mut guest = Guest::new(1);
        if !event_idx {
            guest.wants &= !F_EVENT_IDX;
        }
        let _front = guest.connect(&folder.path());
        // Starting a queue signals a call, because an earlier one may have been lost.
        let _ = guest.drivers[0].call.read();
        if event_idx {
            guest.want_call_after(0, 9);
        } else {
            guest.put(available_at(0), &1u16.to_le_bytes());
        }
        for n in 0..9 {
            let head = guest.prepare(0, STORE, n, &[1; 512], 0);
            guest.offer(0, head);
            guest.kick(0);
            while guest.reap(0).is_none() {
                std::thread::yield_now();
            }
        }
        assert!(guest.drivers[0].call.read().is_err(), "the guest asked for no call");
        if event_idx {
            let head = guest.prepare(0, STORE, 0, &[1; 512], 0);
            guest.offer(0, head);
            guest.kick(0);
            wait_for(&guest.drivers[0].call, "the tenth answer's call");
        }
    }
}

#[test]
fn a_new_size_is_announced_and_so_is_any_size_to_a_frontend_that_comes_back() {
    let folder = TestFolder::new();
    let door = folder.serve(PausableDevice::open());
    let mut guest = Guest::new(1);
    let mut front = guest.connect(&folder.path());
    let (mut ours, theirs) = UnixStream::pair().expect("two sockets");
    let mut on_outcome = || {
        let mut message = [0; 12];
        ours.read_exact(&mut message).expect("a message");
        // The number of the message, version 1, no payload.
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    };
    front.set_backend_request_fd(&theirs).expect("the door takes it");
    // The frontend may have been disconnected while the device grew, and would not ask by itself.
    on_outcome();
    door.resized();
    on_outcome();
}

#[test]
fn writes_to_memory_are_logged_while_the_guest_migrates() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let _door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    guest.wants |= F_LOG_ALL;
    let front = guest.connect(&folder.path());
    let log_bytes = MEMORY_BYTES / 4096 / 8;
    let log = memfd_create("log", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&log, log_bytes).expect("memory");
    let region = VhostUserDirtyLogRegion {
        mmap_size: log_bytes,
        mmap_offset: 0,
        mmap_handle: log.as_raw_fd(),
    };
    front.set_log_base(0, Some(region)).expect("the door takes it");
    let mut bits = vec![0; log_bytes as usize];
    let mut dirty = || {
        rustix::io::pread(&log, &mut bits, 0).expect("memory");
        let is_set = |page: &u64| bits[(page / 8) as usize] & 1 << (page % 8) != 0;
        (0..MEMORY_BYTES / 4096).filter(is_set).collect::<Vec<u64>>()
    };
    assert_eq!(guest.execute(0, READ, 0, &[], 8192).0, 0);
    let dirty = dirty();
    for written in [data_at(0), data_at(0) + 4096, status_at(0), ring(0, 0x2000)] {
        assert!(dirty.contains(&(written / 4096)), "the page of {written:#x} is not in {dirty:?}");
    }
    assert!(!dirty.contains(&(data_at(0) / 4096 + 2)), "what was not written is not logged");
}

#[test]
fn regions_of_memory_come_and_go_under_a_running_queue() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let _door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let mut front = guest.connect(&folder.path());
    // The same bytes once more, far above.
    let above = 1u64 << 40;
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: above,
        memory_size: MEMORY_BYTES,
        userspace_addr: above,
        mmap_offset: 0,
        mmap_handle: guest.file.as_raw_fd(),
    };
    front.add_mem_region(&region).expect("there is room");
    assert!(front.add_mem_region(&region).is_err(), "it is there already");
    let mut write_from_above = || {
        guest.put(header_at(0), &header(STORE, 1));
        guest.put(DATA_AT, &[0x33; 512]);
        let parts =
            [(header_at(0), 16, false), (above + DATA_AT, 512, false), (status_at(0), 1, true)];
        let head = guest.lay_out(0, &parts);
        guest.offer(0, head);
        guest.kick(0);
    };
    write_from_above();
    pausable.requests(1);
    front.remove_mem_region(&region).expect("it was there");
    assert_eq!(pausable.memory.read_at(512, 512).expect("in range"), [0x33; 512]);
    write_from_above();
    wait_for(&guest.drivers[0].error, "an address that is no memory any more");
    assert_eq!(pausable.count(), 1);
}

#[test]
fn the_socket_is_for_its_owner_and_gone_in_the_end() {
    let folder = TestFolder::new();
    let door = folder.serve(PausableDevice::open());
    let mode = std::fs::metadata(folder.path()).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!((door.kind(), door.address()), ("vhost-user", folder.path().display().to_string()));
    door.stop(Stop::Drained);
    assert!(!folder.path().exists());
}

/// The geometry of a device about to be replaced.
trait CurrentGeometry {
    fn geometry_now(&self) -> Geometry;
}

impl CurrentGeometry for MemoryDevice {
    fn geometry_now(&self) -> Geometry {
        sawmill_device::BlockDevice::geometry(self)
    }
}
