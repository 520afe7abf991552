//! The BUSE door under the contract of every door: makes devices in memory, and fails if one breaks
//! a clause. It needs the module (`kernel/buse`), and root. The kernel answers a write itself; it
//! counts as answered here when its chunk is applied.

#[path = "../tests/door/conformance.rs"]
mod conformance;
#[path = "../tests/door/file_user.rs"]
mod file_user;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use conformance::{BLOCK_BYTES, DoorSubject, DoorUser, OpenDoor, keep_every_clause};
use file_user::FileUser;
use parking_lot::Mutex;
use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind};
use sawmill_frontend::buse::{BuseDoor, BuseOptions};
use sawmill_frontend::{Door, DoorPiece, QuietDoor};
use sawmill_testkit::wait_until;

/// The nodes made so far. A stop that does not wait removes a device a moment later.
#[derive(Default)]
struct BuseSubject(Mutex<Vec<PathBuf>>);

fn options() -> BuseOptions {
    BuseOptions { recovery_time_max: Duration::ZERO, ..BuseOptions::new("clauses") }
}

/// The number of the device that was handed over.
fn number(pieces: &[DoorPiece]) -> u32 {
    pieces[0].parsed("id").expect("a number")
}

impl DoorSubject for BuseSubject {
    fn open(&self, device: Arc<dyn BlockDevice>) -> OpenDoor {
        let door = BuseDoor::open(options(), device.clone()).expect("a device is made");
        self.0.lock().push(door.node());
        let user = BuseUser { file: FileUser::new(door.node()), device, awaited: None };
        OpenDoor { door: Arc::new(door), user: Box::new(user) }
    }

    fn take_over(&self, old: Box<dyn QuietDoor>, device: Arc<dyn BlockDevice>) -> Arc<dyn Door> {
        let id = number(&old.hand_over().expect("it is quiet"));
        // The kernel gives a port to one server at a time.
        old.release();
        Arc::new(BuseDoor::recover(id, options(), device).expect("it is taken over"))
    }

    fn fail_to_take_over(&self, pieces: Vec<DoorPiece>, device: Arc<dyn BlockDevice>) {
        let refused = BuseDoor::recover(number(&pieces), options(), device).err();
        assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::InUse));
    }

    fn reopened_size(&self, door: Arc<dyn Door>, device: Arc<dyn BlockDevice>) -> u64 {
        door.resized().expect("a device grows");
        drop(device);
        size_bytes(Path::new(&door.address()))
    }
}

/// A user of the disk, who also sees the device behind it.
struct BuseUser {
    file: FileUser,
    device: Arc<dyn BlockDevice>,
    /// The block and the byte of the write in flight.
    awaited: Option<(u64, u8)>,
}

impl DoorUser for BuseUser {
    fn begin_write(&mut self, block: u64, byte: u8) {
        self.file.begin_write(block, byte);
        self.awaited = Some((block, byte));
    }

    fn is_answered(&self) -> bool {
        self.awaited.is_none_or(|(block, byte)| {
            let read = self.device.read_at(block * BLOCK_BYTES as u64, BLOCK_BYTES);
            read.expect("it can be read").iter().all(|found| *found == byte)
        })
    }

    fn finish_write(&mut self) {
        self.file.finish_write();
        wait_until("the device has the write", || self.is_answered());
        self.awaited = None;
    }

    fn read(&mut self, block: u64) -> Vec<u8> {
        self.file.read(block)
    }
}

/// The size of a block device, as the kernel shows it.
fn size_bytes(node: &Path) -> u64 {
    let name = node.file_name().expect("a node").display();
    let sectors = std::fs::read_to_string(format!("/sys/block/{name}/size"));
    512 * sectors.expect("it is there").trim().parse::<u64>().expect("a number")
}

impl Drop for BuseSubject {
    fn drop(&mut self) {
        for node in &*self.0.lock() {
            wait_until("the end of the device", || !node.exists());
        }
    }
}

fn main() {
    keep_every_clause(BuseSubject::default);
}
