//! The FUSE door under the contract of every door.

use std::sync::Arc;

use sawmill_device::{BlockDevice, ErrorKind};
use sawmill_frontend::fuse::{FuseDoor, FuseOptions};
use sawmill_frontend::{Door, DoorPiece, QuietDoor};

use crate::conformance::{DoorSubject, OpenDoor, keep_every_clause};
use crate::file_user::FileUser;
use crate::setting::needs_mounts;

/// A folder for the mount.
struct FuseSubject(tempfile::TempDir);

impl FuseSubject {
    fn options(&self) -> FuseOptions {
        FuseOptions::new(self.0.path(), "disk")
    }
}

impl DoorSubject for FuseSubject {
    fn open(&self, device: Arc<dyn BlockDevice>) -> OpenDoor {
        let door = FuseDoor::mount(self.options(), device).expect("it mounts");
        let user = Box::new(FileUser::new(door.file()));
        OpenDoor { door: Arc::new(door), user }
    }

    fn take_over(&self, old: Box<dyn QuietDoor>, device: Arc<dyn BlockDevice>) -> Arc<dyn Door> {
        let pieces = old.hand_over().expect("it is quiet");
        let next = FuseDoor::take_over(self.options(), device, pieces).expect("all is there");
        old.release();
        Arc::new(next)
    }

    fn fail_to_take_over(&self, pieces: Vec<DoorPiece>, device: Arc<dyn BlockDevice>) {
        // A process that has the mount serves it, so only one that does not get it fails.
        let options = FuseOptions { file_name: "other".into(), ..self.options() };
        let refused = FuseDoor::take_over(options, device, pieces).err();
        assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::Refused));
    }

    fn reopened_size(&self, door: Arc<dyn Door>, _device: Arc<dyn BlockDevice>) -> u64 {
        std::fs::metadata(door.address()).expect("it is there").len()
    }
}

#[test]
fn a_mount_keeps_every_clause_of_a_door() {
    needs_mounts!();
    keep_every_clause(|| FuseSubject(tempfile::tempdir().expect("a temporary folder")));
}
