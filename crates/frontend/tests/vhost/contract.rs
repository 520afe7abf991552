//! The vhost-user door under the contract of every door.

use std::sync::Arc;

use sawmill_device::BlockDevice;
use sawmill_frontend::vhost::VhostDoor;
use sawmill_frontend::{Door, DoorPiece, QuietDoor};
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{Frontend, VhostUserFrontend};

use crate::TestFolder;
use crate::conformance::{BLOCK_BYTES, DoorSubject, DoorUser, OpenDoor, keep_every_clause};
use crate::guest::{Guest, READ, STORE};

/// A guest with one queue, whose connection ends with it.
struct GuestUser {
    guest: Guest,
    _front: Frontend,
}

impl DoorSubject for TestFolder {
    fn open(&self, device: Arc<dyn BlockDevice>) -> OpenDoor {
        let door = Arc::new(self.serve(device));
        let mut guest = Guest::new(1);
        let front = guest.connect(&self.path());
        OpenDoor { door, user: Box::new(GuestUser { guest, _front: front }) }
    }

    fn take_over(&self, old: Box<dyn QuietDoor>, device: Arc<dyn BlockDevice>) -> Arc<dyn Door> {
        let pieces = old.hand_over().expect("it is quiet");
        let (next, quiet_door) =
            VhostDoor::take_over(self.options(), device, pieces).expect("it is whole");
        old.release();
        quiet_door.resume();
        Arc::new(next)
    }

    fn fail_to_take_over(&self, pieces: Vec<DoorPiece>, device: Arc<dyn BlockDevice>) {
        drop(VhostDoor::take_over(self.options(), device, pieces).expect("it is whole"));
    }

    fn reopened_size(&self, _door: Arc<dyn Door>, _device: Arc<dyn BlockDevice>) -> u64 {
        let mut front = Guest::new(1).connect(&self.path());
        let (_, capacity) =
            front.get_config(0, 8, VhostUserConfigFlags::empty(), &[0; 8]).expect("an answer");
        512 * u64::from_le_bytes(capacity.try_into().expect("eight bytes"))
    }
}

/// The sector of a block.
fn sector(block: u64) -> u64 {
    block * BLOCK_BYTES as u64 / 512
}

impl DoorUser for GuestUser {
    fn begin_write(&mut self, block: u64, byte: u8) {
        let head = self.guest.prepare(0, STORE, sector(block), &[byte; BLOCK_BYTES], 0);
        self.guest.offer(0, head);
        self.guest.kick(0);
    }

    fn is_answered(&self) -> bool {
        self.guest.used(0) != self.guest.drivers[0].seen
    }

    fn finish_write(&mut self) {
        let head = self.guest.wait(0);
        assert_eq!(self.guest.status(head), 0);
    }

    fn read(&mut self, block: u64) -> Vec<u8> {
        let (status, data) = self.guest.execute(0, READ, sector(block), &[], BLOCK_BYTES as u32);
        assert_eq!(status, 0);
        data
    }
}

#[test]
fn a_vhost_user_door_keeps_every_clause_of_a_door() {
    keep_every_clause(TestFolder::new);
}
