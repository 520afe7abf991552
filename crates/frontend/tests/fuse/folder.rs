//! The folder: where a door may be opened, and what is left when it closes.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::io::Errno;
use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind, Geometry, MemoryDevice, Request};
use sawmill_frontend::fuse::{FuseDoor, FuseOptions};
use sawmill_frontend::{Door, Stop};

use crate::devices::HoldDevice;
use crate::process::Server;
use crate::setting::{SIZE, errno, memory, needs_mounts, run, show, show_with, wait_until};

fn refused(folder: &Path) -> (ErrorKind, String) {
    refused_options(FuseOptions::new(folder, "disk"))
}

fn refused_options(options: FuseOptions) -> (ErrorKind, String) {
    let error = FuseDoor::mount(options, memory()).err().expect("it must not mount");
    (error.kind(), error.to_string())
}

fn is_mounted(folder: &Path) -> bool {
    let list = std::fs::read_to_string("/proc/self/mountinfo").expect("a list of mounts");
    list.contains(&format!(" {} ", folder.display()))
}

#[test]
fn folders_that_will_not_do_are_refused_by_name() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let (file, full) = (place.path().join("file"), place.path().join("full"));
    std::fs::write(&file, "precious").expect("a file");
    std::fs::create_dir(&full).expect("a folder");
    std::fs::write(full.join("x"), "hidden by a mount").expect("a file");
    let (kind, text) = refused(&place.path().join("none"));
    assert!(
        kind == ErrorKind::NotFound && text.contains("none: no such folder: create it"),
        "{text}"
    );
    let (kind, text) = refused(&file);
    assert!(kind == ErrorKind::Invalid && text.contains("file: is not a folder"), "{text}");
    let (kind, text) = refused(&full);
    assert!(kind == ErrorKind::Invalid && text.contains("full: is not empty"), "{text}");
}

#[test]
fn a_folder_in_use_is_refused_and_its_users_are_left_alone() {
    needs_mounts!();
    let device = memory();
    let scene = show(device.clone());
    let (kind, text) = refused(scene.folder.path());
    assert!(
        kind == ErrorKind::InUse && text.contains("another server has its volume there"),
        "{text}"
    );
    scene.open().write_all_at(b"alive", 0).expect("the first lives on");
    let other = tempfile::tempdir().expect("a temporary folder");
    let path = other.path().to_str().expect("UTF-8");
    run("mount", &["-t", "tmpfs", "tmpfs", path]);
    let (kind, text) = refused(other.path());
    run("umount", &[path]);
    assert!(kind == ErrorKind::InUse && text.contains("type tmpfs is mounted there"), "{text}");
}

#[test]
fn options_that_will_not_do_are_refused() {
    let place = tempfile::tempdir().expect("a temporary folder");
    for name in ["", ".", "..", "a/b", "nul\0", &"x".repeat(256)] {
        let (kind, text) = refused_options(FuseOptions::new(place.path(), name));
        assert!(kind == ErrorKind::Invalid && text.contains("is not a valid file name"), "{text}");
    }
    for workers in [0, 65] {
        let options = FuseOptions { workers, ..FuseOptions::new(place.path(), "disk") };
        assert_eq!(refused_options(options).0, ErrorKind::Invalid);
    }
}

#[test]
fn a_stop_unmounts_and_a_second_one_does_nothing() {
    needs_mounts!();
    let scene = show(memory());
    assert!(is_mounted(scene.folder.path()));
    assert_eq!(scene.door.counts().connections, 1);
    scene.door.stop(Stop::Drained);
    assert!(!is_mounted(scene.folder.path()));
    assert_eq!(scene.door.counts().connections, 0);
    scene.door.stop(Stop::Drained);
    scene.door.stop(Stop::Now);
    drop(
        FuseDoor::mount(FuseOptions::new(scene.folder.path(), "disk"), memory())
            .expect("the folder is free"),
    );
}

#[test]
fn a_stop_answers_what_is_in_flight() {
    needs_mounts!();
    let device = Arc::new(HoldDevice::new(SIZE));
    let scene = show(device.clone());
    std::thread::scope(|scope| {
        let file = scene.open();
        let writing = scope.spawn(move || file.write_all_at(b"the last write", 7));
        wait_until("the write at the device", || device.count() == 1);
        let stopping = scope.spawn(|| scene.door.stop(Stop::Drained));
        wait_until("the mount to go out of sight", || {
            !is_mounted(scene.folder.path()) || device.count() == 1
        });
        assert!(!stopping.is_finished(), "a request is in flight");
        device.stop_holding();
        writing.join().expect("no panic").expect("it was answered");
    });
    assert_eq!(device.inner().read_at(7, 14).expect("in range"), b"the last write");
}

#[test]
fn a_file_still_open_at_a_stop_gets_errors_and_the_folder_is_free() {
    needs_mounts!();
    let scene = show(memory());
    let file = scene.open();
    file.write_all_at(b"before", 0).expect("room");
    scene.door.stop(Stop::Drained);
    assert!(!is_mounted(scene.folder.path()));
    assert_eq!(errno(file.write_at(b"after", 0)), Errno::NOTCONN);
}

#[test]
fn stop_now_does_not_wait_for_the_device() {
    needs_mounts!();
    let device = Arc::new(HoldDevice::new(SIZE));
    let scene = show(device.clone());
    std::thread::scope(|scope| {
        let file = scene.open();
        let writing = scope.spawn(move || file.write_all_at(b"lost", 0));
        wait_until("the write at the device", || device.count() == 1);
        scene.door.stop(Stop::Now);
        writing.join().expect("no panic").expect_err("no answer comes");
    });
    assert!(!is_mounted(scene.folder.path()));
    device.stop_holding();
}

#[test]
fn an_unmount_by_another_process_ends_the_door() {
    needs_mounts!();
    let scene = show(memory());
    run("umount", &[scene.folder.path().to_str().expect("UTF-8")]);
    wait_until("the door sees it", || scene.door.counts().connections == 0);
    // Another door in the same place is not ours to close.
    let other =
        FuseDoor::mount(FuseOptions::new(scene.folder.path(), "disk"), memory()).expect("free");
    scene.door.stop(Stop::Drained);
    scene.door.stop(Stop::Now);
    assert_eq!(std::fs::metadata(other.file()).expect("it lives").len(), SIZE);
}

#[test]
fn what_a_dead_server_left_is_removed_its_loop_device_too() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut dead = Server::start(place.path(), &["--loop"]);
    let device = dead.loop_device();
    dead.kill();
    let mountpoint = place.path().join("mount");
    assert_eq!(errno(std::fs::read_dir(&mountpoint)), Errno::NOTCONN);
    let door =
        FuseDoor::mount(FuseOptions::new(&mountpoint, "disk"), memory()).expect("cleaned up");
    assert_eq!(std::fs::metadata(door.file()).expect("it lives").len(), SIZE);
    wait_until("the loop device is free", || device.backing_file().expect("asked").is_none());
}

#[test]
fn a_user_without_rights_mounts_through_fusermount() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_as_nobody(place.path());
    assert!(is_mounted(&server.mountpoint()));
    let list = std::fs::read_to_string("/proc/self/mountinfo").expect("a list of mounts");
    assert!(list.contains("fuse.sawmill") && list.contains("user_id=65534"), "{list}");
    server.stop();
    assert!(!is_mounted(&server.mountpoint()));
}

/// A device that grows when `grown` is set.
struct ResizableDevice {
    inner: MemoryDevice,
    before: Geometry,
    grown: AtomicBool,
}

impl BlockDevice for ResizableDevice {
    fn geometry(&self) -> Geometry {
        if self.grown.load(Relaxed) { self.inner.geometry() } else { self.before }
    }

    fn submit(&self, request: Request) {
        self.inner.submit(request);
    }
}

#[test]
fn a_new_size_is_seen_by_openers_and_by_the_loop_device() {
    needs_mounts!();
    let inner = MemoryDevice::new(2 * SIZE);
    let before = Geometry { size_bytes: SIZE, ..inner.geometry() };
    let device = Arc::new(ResizableDevice { inner, before, grown: AtomicBool::new(false) });
    let scene = show_with(device.clone(), |options| options.attach_loop = true);
    let file = scene.open();
    let node = scene.door.address();
    assert_eq!(run("blockdev", &["--getsize64", &node]).trim(), SIZE.to_string());
    device.grown.store(true, Relaxed);
    scene.door.resized().expect("resized");
    assert_eq!(file.metadata().expect("it is there").len(), 2 * SIZE);
    assert_eq!(run("blockdev", &["--getsize64", &node]).trim(), (2 * SIZE).to_string());
    file.write_all_at(b"in the new part", 2 * SIZE - 15).expect("room");
}

#[test]
fn a_mountpoint_may_be_a_link() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    std::fs::create_dir(place.path().join("real")).expect("a folder");
    let link = place.path().join("link");
    std::os::unix::fs::symlink("real", &link).expect("a link");
    let door = FuseDoor::mount(FuseOptions::new(&link, "disk"), memory()).expect("it mounts");
    assert_eq!(door.file(), place.path().canonicalize().expect("there").join("real/disk"));
    let quiet_door =
        door.quiesce(std::time::Duration::from_secs(30)).expect("nothing is in flight");
    let handed = quiet_door.hand_over().expect("quiet");
    let next =
        FuseDoor::take_over(FuseOptions::new(&link, "disk"), memory(), handed).expect("the same");
    quiet_door.release();
    assert_eq!(std::fs::metadata(next.file()).expect("served").len(), SIZE);
}
