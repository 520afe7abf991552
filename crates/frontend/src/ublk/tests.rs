//! The tables of the protocol, descriptors that no kernel should send, and threads that wait for
//! each other.

use std::time::Duration;

use proptest::prelude::*;
use sawmill_device::{
    BlockDevice, ErrorKind, Flags, Geometry, MemoryDevice, Operation, Operations,
};
use sawmill_sys::ublk::{
    DeviceState, IoDescriptor, attribute, node_path, operation, operation_flag,
};

use super::DOOR;
use super::channel::{Body, Completion, Inbox, Message};
use super::progress::Progress;
use super::protocol::{self, BlockRequest};
use crate::device_facts::{
    DeviceFacts, DeviceLock, facts_path, is_locked, make_symlink, remove_symlink,
};

const BYTES_MAX: u32 = 1 << 20;
const DEVICE_BYTES: u64 = 1 << 30;

fn geometry() -> Geometry {
    MemoryDevice::new(DEVICE_BYTES).geometry()
}

fn descriptor(op_flags: u32, start_sector: u64, sectors: u32) -> IoDescriptor {
    IoDescriptor { op_flags, sectors, start_sector, addr: 0 }
}

fn understood(op_flags: u32, start_sector: u64, sectors: u32) -> Result<BlockRequest, i32> {
    let descriptor = descriptor(op_flags, start_sector, sectors);
    BlockRequest::from_descriptor(&descriptor, &geometry(), BYTES_MAX)
        .map_err(|refusal| refusal.errno)
}

#[test]
fn every_ublk_operation_becomes_one_device_request() {
    let block_request = |operation, address, length, fua, no_unmap| {
        Ok(BlockRequest { operation, address, length, flags: Flags { fua, no_unmap } })
    };
    let (fua, keep) = (operation_flag::FUA, operation_flag::NO_UNMAP);
    let table = [
        (operation::READ.into(), block_request(Operation::Read, 4096, 1024, false, false)),
        (operation::WRITE.into(), block_request(Operation::Write, 4096, 1024, false, false)),
        (
            u32::from(operation::WRITE) | fua,
            block_request(Operation::Write, 4096, 1024, true, false),
        ),
        (operation::FLUSH.into(), block_request(Operation::Flush, 0, 0, false, false)),
        (operation::DISCARD.into(), block_request(Operation::Discard, 4096, 1024, false, false)),
        (
            operation::WRITE_ZEROES.into(),
            block_request(Operation::WriteZeroes, 4096, 1024, false, false),
        ),
        (
            u32::from(operation::WRITE_ZEROES) | keep,
            block_request(Operation::WriteZeroes, 4096, 1024, false, true),
        ),
        // Hints of the block layer change nothing: fail-fast, metadata, swap.
        (
            u32::from(operation::READ) | 0b111 << 8 | 1 << 11 | 1 << 16,
            block_request(Operation::Read, 4096, 1024, false, false),
        ),
    ];
    for (op_flags, expected) in table {
        assert_eq!(understood(op_flags, 8, 2), expected, "{op_flags:#x}");
    }
}

#[test]
fn a_descriptor_beyond_the_limits_is_refused_with_an_errno() {
    let (read, write, discard) =
        (operation::READ.into(), operation::WRITE.into(), operation::DISCARD.into());
    let device_sectors = DEVICE_BYTES / 512;
    let table = [
        ("an operation of zoned devices", 15, 0, 8, 95),
        ("write-same", 4, 0, 8, 95),
        ("a read of nothing", read, 0, 0, 22),
        ("a read that is too long", read, 0, BYTES_MAX / 512 + 1, 22),
        ("a write that is too long", write, 0, u32::MAX, 22),
        ("a write past the end", write, device_sectors - 1, 2, 22),
        ("a read behind the end", read, device_sectors, 1, 22),
        ("a discard past the end", discard, 1, u32::MAX, 22),
        ("an address that overflows", write, u64::MAX / 512 + 1, 1, 22),
        ("a range that overflows", write, u64::MAX / 512, 1, 22),
        ("the last address there is", discard, u64::MAX, u32::MAX, 22),
    ];
    for (what, op_flags, start_sector, sectors, errno) in table {
        assert_eq!(understood(op_flags, start_sector, sectors), Err(errno), "{what}");
    }
    assert!(understood(read, device_sectors - 1, 1).is_ok(), "the last sector");
    assert!(understood(discard, 0, device_sectors as u32).is_ok(), "a discard of the whole device");
}

proptest! {
    #[test]
    fn whatever_a_descriptor_says_nothing_beyond_the_device_is_asked_for(
        op_flags: u32, small in 0u32..8, start_sector: u64, near in 0..2 * DEVICE_BYTES / 512,
        sectors: u32,
        length in 0..4096u32, wild: bool,
    ) {
        let descriptor = match wild {
            true => descriptor(op_flags, start_sector, sectors),
            false => descriptor(op_flags & !0xFF | small, near, length),
        };
        if let Ok(block_request) =
            BlockRequest::from_descriptor(&descriptor, &geometry(), BYTES_MAX)
        {
            prop_assert!(
                block_request
                    .address
                    .checked_add(block_request.length)
                    .is_some_and(|end| end <= DEVICE_BYTES)
            );
            prop_assert_eq!(block_request.length == 0, block_request.operation == Operation::Flush);
            if matches!(block_request.operation, Operation::Read | Operation::Write) {
                prop_assert!(block_request.length <= BYTES_MAX.into());
            }
        }
    }

    #[test]
    fn facts_come_back_as_they_were_written(
        volume in "\\PC*|[\\x00-\\x7f]*", symlink in proptest::option::of("[a-z]+"),
        is_recovering: bool, instance: Option<u64>,
    ) {
        let facts = DeviceFacts { volume, symlink, is_recovering, instance };
        let folder = tempfile::tempdir().unwrap();
        DeviceLock::take(DOOR, folder.path(), 7).unwrap().write(&facts).unwrap();
        let text = std::fs::read_to_string(folder.path().join("7")).unwrap();
        prop_assert!(text.is_ascii() && text.lines().count() <= 4, "{}", text);
        prop_assert_eq!(DeviceFacts::read(folder.path(), 7), Some(facts));
    }
}

#[test]
fn no_error_asks_the_kernel_to_try_again() {
    for kind in ErrorKind::ALL {
        // EAGAIN, EBUSY, ENOMEM; and 0 would be success, ENODEV the end of the device.
        assert!(![0, 11, 12, 16, 19].contains(&protocol::errno(kind)), "{kind:?}");
    }
    assert_eq!(protocol::errno(ErrorKind::Full), 28);
}

#[test]
fn parameters_say_what_the_device_can() {
    let parameters = protocol::parameters(&geometry(), BYTES_MAX);
    assert_eq!(parameters.attributes, attribute::VOLATILE_CACHE | attribute::FUA);
    assert_eq!((parameters.logical_block_shift, parameters.physical_block_shift), (9, 12));
    assert_eq!((parameters.io_min_shift, parameters.io_opt_shift), (12, 16));
    assert_eq!(parameters.request_sectors_max, 2048);
    assert_eq!(parameters.device_sectors, DEVICE_BYTES / 512);
    // The kernel counts a discard's bytes in 32 bits.
    assert!(u64::from(parameters.discard_sectors_max) * 512 <= u64::from(u32::MAX));
    assert_eq!((parameters.discard_segments_max, parameters.discard_granularity), (1, 4096));
    assert_eq!(parameters.write_zeroes_sectors_max, parameters.discard_sectors_max);

    let operations = Operations { discard: false, write_zeroes: false, allocation: false };
    let plain = Geometry { operations, block_bytes: 4096, read_only: true, ..geometry() };
    let parameters = protocol::parameters(&Geometry { size_bytes: 10_000, ..plain }, BYTES_MAX);
    assert_eq!(parameters.attributes & attribute::READ_ONLY, attribute::READ_ONLY);
    assert_eq!(
        (parameters.logical_block_shift, parameters.device_sectors),
        (12, 16),
        "a rest of a block is not shown"
    );
    assert_eq!((parameters.discard_sectors_max, parameters.discard_segments_max), (0, 0));
    assert_eq!(parameters.write_zeroes_sectors_max, 0);
    assert!(parameters.discard_granularity > 0, "the kernel insists");
}

#[test]
fn the_limit_on_requests_is_whole_blocks_and_never_more_than_asked_for() {
    let with = |request_bytes_max| Geometry { request_bytes_max, ..geometry() };
    assert_eq!(protocol::request_bytes_max(&with(32 << 20), 1 << 20), 1 << 20);
    assert_eq!(protocol::request_bytes_max(&with(100_000), 1 << 20), 98_304);
    assert_eq!(protocol::request_bytes_max(&with(1 << 20), 5000), 4096);
}

#[test]
fn a_device_is_known_for_its_volume_by_its_signature_alone() {
    let signature = protocol::signature("volume 1");
    assert_eq!(
        signature, 0x534D_B97E_FE44_4B2C,
        "the signature outlives a program: it must not change"
    );
    assert!(protocol::is_ours(signature) && !protocol::is_ours(0) && !protocol::is_ours(u64::MAX));
    assert_ne!(signature, protocol::signature("volume 2"));
}

#[test]
fn one_server_at_a_time_has_the_claim_to_a_device() {
    let folder = tempfile::tempdir().unwrap();
    let run_folder = folder.path().join("deep/er");
    let device_lock = DeviceLock::take(DOOR, &run_folder, 3).expect("it is free");
    let second = DeviceLock::take(DOOR, &run_folder, 3).map(drop).expect_err("it is taken");
    assert_eq!(second.kind(), ErrorKind::InUse);
    DeviceLock::take(DOOR, &run_folder, 4).expect("another device");
    drop(device_lock);
    DeviceLock::take(DOOR, &run_folder, 3).expect("it is free again").remove();
    assert!(!run_folder.join("3").exists());
}

#[test]
fn two_that_only_look_do_not_take_each_other_for_a_server() {
    use rustix::fs::{FlockOperation, flock};
    let folder = tempfile::tempdir().expect("a folder");
    let path = facts_path(folder.path(), 3);
    assert_eq!(is_locked(&path), None, "there is no file");
    drop(DeviceLock::take(DOOR, folder.path(), 3).expect("it is free"));
    // Somebody else looks, and is not done yet.
    let looking = std::fs::File::open(&path).expect("the file is there");
    flock(&looking, FlockOperation::NonBlockingLockShared).expect("it is free");
    assert_eq!(is_locked(&path), Some(false));
    assert_eq!(
        DeviceLock::take(DOOR, folder.path(), 3).err().map(|error| error.kind()),
        Some(ErrorKind::InUse)
    );
    // A process that wants to serve waits until the inspection is over.
    let wanting = std::thread::spawn({
        let run_folder = folder.path().to_owned();
        move || DeviceLock::wait(DOOR, &run_folder, 3)
    });
    drop(looking);
    let device_lock = wanting.join().expect("no panic").expect("the look is over");
    assert_eq!(is_locked(&path), Some(true));
    drop(device_lock);
    assert_eq!(is_locked(&path), Some(false));
}

#[test]
fn a_device_between_its_birth_and_its_claim_is_no_orphan() {
    use super::registry::is_alive;
    let (locked, stale, none) = (Some(true), Some(false), None);
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    let (living, gone, unnamed) = (Some(std::process::id()), Some(child.id()), None);
    // A server has the lock for as long as it serves, whatever the driver knows.
    for state in [DeviceState::Dead, DeviceState::Live, DeviceState::Quiesced] {
        assert!(is_alive(state, living, locked) && is_alive(state, gone, locked));
    }
    // A device just added, with the file of an older device of that number, or with no file.
    assert!(
        is_alive(DeviceState::Dead, living, stale) && is_alive(DeviceState::Dead, living, none)
    );
    assert!(!is_alive(DeviceState::Live, unnamed, none));
    // The remains of a device whose server died before it began to serve.
    assert!(!is_alive(DeviceState::Dead, gone, stale) && !is_alive(DeviceState::Dead, gone, none));
    // A server that died; another process may have its process id by now.
    for server_pid in [living, gone] {
        assert!(
            !is_alive(DeviceState::Live, server_pid, stale)
                && !is_alive(DeviceState::Quiesced, server_pid, stale)
        );
        assert!(!is_alive(DeviceState::Quiesced, server_pid, none));
    }
    assert!(is_alive(DeviceState::Live, living, none), "its file was removed");
}

#[test]
fn a_symbolic_link_is_made_and_removed_and_a_foreign_file_there_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let symlinks = folder.path().join("links");
    let symlink = symlinks.join("disk1");
    make_symlink(&symlinks, Some("disk1"), &node_path(5));
    assert_eq!(std::fs::read_link(&symlink).unwrap().to_str(), Some("/dev/ublkb5"));
    remove_symlink(&symlinks, Some("disk1"), &node_path(6));
    assert!(symlink.is_symlink(), "it leads to another device");
    make_symlink(&symlinks, Some("disk1"), &node_path(6));
    assert_eq!(std::fs::read_link(&symlink).unwrap().to_str(), Some("/dev/ublkb6"));
    remove_symlink(&symlinks, Some("disk1"), &node_path(6));
    assert!(!symlink.is_symlink());
    std::fs::write(&symlink, "a file of another program").unwrap();
    make_symlink(&symlinks, Some("disk1"), &node_path(6));
    remove_symlink(&symlinks, Some("disk1"), &node_path(6));
    assert_eq!(std::fs::read_to_string(&symlink).unwrap(), "a file of another program");
}

#[test]
fn many_entries_cost_a_sleeping_thread_one_wake_up() {
    let inbox = Inbox::new().unwrap();
    let wakes = || {
        let mut count = [0; 8];
        match rustix::io::read(inbox.descriptor(), &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    };
    let done = |tag| Completion { slot: 0, tag, result: 0, body: Body::Empty, buffer: Vec::new() };
    inbox.done(done(1));
    assert_eq!(wakes(), 0, "the thread is awake");
    assert!(!inbox.nothing_waits(), "something waits");
    let (mut dones, mut messages) = (Vec::new(), Vec::new());
    inbox.take(&mut dones, &mut messages);
    assert!(inbox.nothing_waits());
    (2..50).for_each(|tag| inbox.done(done(tag)));
    assert!(inbox.send(Message::Stop));
    assert_eq!(wakes(), 1);
    inbox.take(&mut dones, &mut messages);
    assert_eq!((dones.len(), messages.len()), (49, 1));
    inbox.close();
    assert!(
        inbox.is_closed() && !inbox.send(Message::Stop),
        "no thread follows a message any more"
    );
}

#[test]
fn a_door_waits_until_all_its_queues_are_quiet_for_this_request() {
    let progress = Progress::default();
    let first = progress.begin_round();
    progress.quiet(first);
    assert!(!progress.wait_quiet(2, Duration::ZERO));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| progress.wait_quiet(2, Duration::MAX));
        progress.quiet(first);
        assert!(waiter.join().unwrap());
    });
    let second = progress.begin_round();
    progress.quiet(first);
    progress.quiet(second);
    assert!(!progress.wait_quiet(2, Duration::ZERO), "one of the two spoke of the first wish");
    progress.gone();
    assert!(progress.wait_quiet(2, Duration::ZERO), "a queue that is gone is quiet");
    progress.gone();
    progress.wait_gone(2);
}
