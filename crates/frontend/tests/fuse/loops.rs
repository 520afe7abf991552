//! Loop devices on the file, and file systems on these.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::io::Errno;
use sawmill_device::{BlockDevice, BlockDeviceExt, Geometry, MemoryDevice};
use sawmill_frontend::{Door, Stop};

use crate::devices::ThreadDevice;
use crate::setting::{
    FuseScene, SIZE, errno, memory, needs_mounts, pattern, run, show_with, wait_until,
};

const DISK: u64 = 512 << 20;

fn attach(device: Arc<dyn BlockDevice>) -> (FuseScene, String) {
    let scene = show_with(device, |options| options.attach_loop = true);
    let path = scene.door.loop_device().expect("attached").path();
    let path = path.to_str().expect("UTF-8").to_owned();
    assert_eq!(scene.door.address(), path);
    (scene, path)
}

/// Makes a file system, fills it, looks at it again after an unmount, and has it checked.
fn lives_on(make: &[&str], check: &[&str]) {
    let (scene, device) = attach(Arc::new(ThreadDevice::new(DISK)));
    run(make[0], &[&make[1..], &[&device]].concat());
    let place = tempfile::tempdir().expect("a temporary folder");
    let path = place.path().to_str().expect("UTF-8");
    for round in 0..2 {
        run("mount", &[&device, path]);
        for n in 0..20 {
            let (file, bytes) =
                (place.path().join(n.to_string()), pattern(n, 1_000_000 + n as usize));
            if round == 0 {
                std::fs::write(&file, &bytes).expect("room");
            } else {
                assert!(std::fs::read(&file).expect("there") == bytes);
                std::fs::remove_file(&file).expect("there");
            }
        }
        run("fstrim", &[path]);
        run("umount", &[path]);
    }
    run(check[0], &[&check[1..], &[&device]].concat());
    let metrics = scene.door.metrics().counts;
    assert!(metrics.flushes > 0 && metrics.discards > 0 && metrics.errors == 0, "{metrics:?}");
    scene.door.stop(Stop::Drained);
}

#[test]
fn ext4_lives_on_the_loop_device() {
    needs_mounts!();
    lives_on(&["mkfs.ext4", "-q"], &["e2fsck", "-f", "-n"]);
}

#[test]
fn xfs_lives_on_the_loop_device() {
    needs_mounts!();
    lives_on(&["mkfs.xfs", "-q"], &["xfs_repair", "-n"]);
}

#[test]
fn btrfs_lives_on_the_loop_device() {
    needs_mounts!();
    lives_on(&["mkfs.btrfs", "-q"], &["btrfs", "check", "--readonly"]);
}

#[test]
fn the_loop_device_is_direct_and_has_the_volumes_blocks_and_rights() {
    needs_mounts!();
    let geometry = Geometry { block_bytes: 4096, ..memory().geometry() };
    let (scene, path) = attach(Arc::new(MemoryDevice::with_geometry(geometry)));
    let device = scene.door.loop_device().expect("attached");
    assert!(device.is_direct().expect("asked"));
    assert_eq!(device.backing_file().expect("asked"), Some(scene.path()));
    assert_eq!(run("blockdev", &["--getss", &path]).trim(), "4096");
    assert_eq!(run("blockdev", &["--getsize64", &path]).trim(), SIZE.to_string());
    assert_eq!(run("blockdev", &["--getro", &path]).trim(), "0");
    let (_scene, path) = attach(Arc::new(MemoryDevice::with_geometry(Geometry {
        read_only: true,
        ..memory().geometry()
    })));
    assert_eq!(run("blockdev", &["--getro", &path]).trim(), "1");
}

#[test]
fn a_discard_on_the_loop_device_gives_space_back() {
    needs_mounts!();
    let device = memory();
    device.write_at(0, &pattern(1, SIZE as usize)).expect("in range");
    let (scene, path) = attach(device.clone());
    run("blkdiscard", &["--offset", "1048576", "--length", "8388608", &path]);
    assert_eq!(device.resident_bytes(), SIZE - (8 << 20));
    run("blkdiscard", &["--zeroout", &path]);
    assert_eq!(device.read_at(0, SIZE as usize).expect("in range"), vec![0; SIZE as usize]);
    scene.door.stop(Stop::Drained);
}

#[test]
fn a_stop_detaches_the_loop_device() {
    needs_mounts!();
    let (scene, _) = attach(memory());
    let device = scene.door.loop_device().expect("attached");
    scene.door.stop(Stop::Drained);
    assert!(!device.is_of(&scene.path()));
    assert_eq!(scene.door.loop_device(), None);
}

#[test]
fn a_loop_device_in_use_at_a_stop_goes_when_it_is_closed() {
    needs_mounts!();
    let (scene, path) = attach(memory());
    let device = scene.door.loop_device().expect("attached");
    let user = std::fs::OpenOptions::new().read(true).write(true).open(&path).expect("it opens");
    scene.door.stop(Stop::Drained);
    assert_eq!(errno(user.write_at(&[1; 4096], 0).and_then(|_| user.sync_all())), Errno::IO);
    drop(user);
    wait_until("it is detached", || device.backing_file().expect("asked").is_none());
}
