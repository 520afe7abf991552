//! Quiet doors, and doors that another process has taken over.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use sawmill_device::{BlockDevice, ErrorKind};
use sawmill_frontend::fuse::{FuseDoor, FuseOptions, MountHolderOptions};
use sawmill_frontend::{Door, DoorPiece, Stop};

use crate::devices::{HoldDevice, ThreadDevice};
use crate::process::SOCKET;
use crate::setting::{SIZE, memory, needs_mounts, pattern, show, show_with, wait_until};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_door_that_cannot_be_quiet_in_time_resumes() {
    needs_mounts!();
    let device = Arc::new(HoldDevice::new(SIZE));
    let scene = show(device.clone());
    let stale = scene.door.quiesce(PATIENCE).expect("nothing is in flight");
    scene.door.quiesce(PATIENCE).expect("it stays quiet").resume();
    std::thread::scope(|scope| {
        let file = scene.open();
        let writing = scope.spawn(move || file.write_all_at(b"slow", 0));
        wait_until("the write at the device", || device.count() == 1);
        let late = scene.door.quiesce(Duration::from_millis(1));
        let error = late.err().expect("the write is in flight");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("1 requests"), "{error}");
        assert_eq!(stale.hand_over().expect_err("not quiet").kind(), ErrorKind::Invalid);
        // Others are served again.
        assert_eq!(std::fs::metadata(scene.path()).expect("answered").len(), SIZE);
        device.stop_holding();
        writing.join().expect("no panic").expect("answered");
    });
}

/// Takes a door over in this process, as another process would.
fn take_over(old: &FuseDoor, options: FuseOptions, device: Arc<dyn BlockDevice>) -> FuseDoor {
    let quiet_door = old.quiesce(PATIENCE).expect("it becomes quiet");
    let handed = quiet_door.hand_over().expect("it is quiet");
    let new = FuseDoor::take_over(options, device, handed).expect("all is there");
    quiet_door.release();
    new
}

#[test]
fn a_door_changes_hands_twenty_times_under_load_and_no_write_is_lost() {
    needs_mounts!();
    let device = Arc::new(ThreadDevice::new(SIZE));
    let scene = show_with(device.clone(), |options| options.attach_loop = true);
    let number = scene.door.loop_device().expect("attached");
    let options =
        FuseOptions { attach_loop: true, ..FuseOptions::new(scene.folder.path(), "disk") };
    let (done, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut doors = Vec::new();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (file, done, written) = (scene.open(), &done, &written);
            scope.spawn(move || {
                let mut round = 0;
                while !done.load(Relaxed) {
                    round += 1;
                    let (offset, bytes) = (thread << 20, pattern(round, 9000));
                    file.write_all_at(&bytes, offset).expect("no error for users");
                    let mut back = vec![0; bytes.len()];
                    file.read_exact_at(&mut back, offset).expect("no error for users");
                    assert!(back == bytes, "a write was lost");
                    written.fetch_add(1, Relaxed);
                }
            });
        }
        for _ in 0..20 {
            let before = written.load(Relaxed);
            wait_until("some load", || written.load(Relaxed) > before + 20);
            let old = doors.last().unwrap_or(&scene.door);
            let new = take_over(old, options.clone(), device.clone());
            assert_eq!(new.loop_device(), Some(number), "the same loop device");
            doors.push(new);
        }
        done.store(true, Relaxed);
    });
    let last = doors.pop().expect("twenty");
    drop(doors);
    last.stop(Stop::Drained);
    assert!(!number.is_of(&last.file()));
}

#[test]
fn what_is_not_this_mount_is_not_taken_over() {
    needs_mounts!();
    let scene = show(memory());
    let quiet_door = scene.door.quiesce(PATIENCE).expect("nothing is in flight");
    let elsewhere = tempfile::tempdir().expect("a temporary folder");
    let refused = |options: FuseOptions, handed: Vec<DoorPiece>| {
        let error = FuseDoor::take_over(options, memory(), handed).err().expect("it must not");
        (error.kind(), error.to_string())
    };
    let options = FuseOptions::new(scene.folder.path(), "disk");
    let (kind, text) =
        refused(FuseOptions::new(elsewhere.path(), "disk"), quiet_door.hand_over().expect("quiet"));
    assert!(kind == ErrorKind::Refused && text.contains("users of"), "{text}");
    let other = FuseOptions { file_name: "other".into(), ..options.clone() };
    assert_eq!(refused(other, quiet_door.hand_over().expect("quiet")).0, ErrorKind::Refused);
    assert_eq!(refused(options.clone(), Vec::new()).0, ErrorKind::Invalid);
    let mut handed = quiet_door.hand_over().expect("quiet");
    handed[0].facts.remove("flags");
    let (kind, text) = refused(options.clone(), handed);
    assert!(kind == ErrorKind::Invalid && text.contains("lacks flags"), "{text}");
    let mut handed = quiet_door.hand_over().expect("quiet");
    handed[0].descriptors.clear();
    assert!(refused(options, handed).1.contains("lacks the descriptor"));
    quiet_door.resume();
    scene.open().write_all_at(b"unharmed", 0).expect("served");
}

#[test]
fn a_mount_of_a_kernel_that_cannot_resend_gets_no_mount_holder_from_the_next_server() {
    const RESEND: u64 = 1 << 39;
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let scene = show(memory());
    let quiet_door = scene.door.quiesce(PATIENCE).expect("nothing is in flight");
    let mut handed = quiet_door.hand_over().expect("quiet");
    let flags: u64 = handed[0].parsed("flags").expect("a number");
    handed[0].facts.insert("flags".into(), (flags & !RESEND).to_string());
    // Every start, even a failed one, leaves this socket behind.
    let socket = place.path().join(SOCKET);
    let mount_holder =
        Some(MountHolderOptions { socket: socket.clone(), command: vec!["false".into()] });
    let options = FuseOptions { mount_holder, ..FuseOptions::new(scene.folder.path(), "disk") };
    let new = FuseDoor::take_over(options, memory(), handed).expect("all is there");
    quiet_door.release();
    assert!(!socket.exists(), "users would wait forever for what a dead server had taken");
    scene.open().write_all_at(b"served", 0).expect("by the next");
    new.stop(Stop::Drained);
}
