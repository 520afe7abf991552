//! The ublk door under the contract of every door: makes devices in memory, and fails if one breaks
//! a clause. It needs Linux 6.5 with `ublk_drv`, and root.

#[path = "../tests/door/conformance.rs"]
mod conformance;
#[path = "../tests/door/file_user.rs"]
mod file_user;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use conformance::{DoorSubject, OpenDoor, keep_every_clause};
use file_user::FileUser;
use parking_lot::Mutex;
use sawmill_device::{BlockDevice, ErrorKind};
use sawmill_frontend::ublk::{UblkDoor, UblkOptions};
use sawmill_frontend::{Door, DoorPiece, QuietDoor, Stop};
use sawmill_testkit::wait_until;

/// The nodes made so far. A stop that does not wait removes a device a moment later.
#[derive(Default)]
struct UblkSubject(Mutex<Vec<PathBuf>>);

fn options() -> UblkOptions {
    UblkOptions { queues: Some(1), ..UblkOptions::new("clauses") }
}

/// The number of the device that was handed over.
fn number(pieces: &[DoorPiece]) -> u32 {
    pieces[0].parsed("id").expect("a number")
}

impl DoorSubject for UblkSubject {
    fn open(&self, device: Arc<dyn BlockDevice>) -> OpenDoor {
        let door = UblkDoor::start(options(), device).expect("a device is made");
        self.0.lock().push(door.node());
        let user = Box::new(FileUser::new(door.node()));
        OpenDoor { door: Arc::new(door), user }
    }

    fn take_over(&self, old: Box<dyn QuietDoor>, device: Arc<dyn BlockDevice>) -> Arc<dyn Door> {
        let id = number(&old.hand_over().expect("it is quiet"));
        // The kernel gives a device to one server at a time.
        old.release();
        Arc::new(UblkDoor::recover(id, options(), device).expect("it is taken over"))
    }

    fn fail_to_take_over(&self, pieces: Vec<DoorPiece>, device: Arc<dyn BlockDevice>) {
        let refused = UblkDoor::recover(number(&pieces), options(), device).err();
        assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::InUse));
    }

    fn reopened_size(&self, door: Arc<dyn Door>, device: Arc<dyn BlockDevice>) -> u64 {
        if door.resized().is_ok() {
            return size_bytes(Path::new(&door.address()));
        }
        // Before Linux 6.16 the device is stopped and started again.
        door.stop(Stop::Drained);
        size_bytes(Path::new(&self.open(device).door.address()))
    }
}

/// The size of a block device, as the kernel shows it.
fn size_bytes(node: &Path) -> u64 {
    let name = node.file_name().expect("a node").display();
    let sectors = std::fs::read_to_string(format!("/sys/block/{name}/size"));
    512 * sectors.expect("it is there").trim().parse::<u64>().expect("a number")
}

impl Drop for UblkSubject {
    fn drop(&mut self) {
        for node in &*self.0.lock() {
            wait_until("the end of the device", || !node.exists());
        }
    }
}

fn main() {
    keep_every_clause(UblkSubject::default);
}
