//! Volumes of more than one group of the map: a checkpoint writes the groups that changed, and
//! names the old parts of the others. Not here: damage of a part (`damage`).

use crate::faulty::{Machine, holds};
use sawmill_device::BlockDeviceExt;
use sawmill_volume::{Cut, FlushMode};

/// In the second group.
const FAR: u64 = 30 << 30;

#[test]
fn a_group_that_was_empty_before_a_rollback_is_in_the_checkpoint_after_it() {
    let machine = Machine::with(40 << 30, FlushMode::Logged);
    let volume = machine.open();
    volume.write_at(0, &[1; 4096]).unwrap();
    volume.write_at(FAR, &[2; 5000]).unwrap();
    volume.close().unwrap();
    // The checkpoint that the snapshot begins from has a part for the group.
    let volume = machine.open();
    volume.create_snapshot("then").unwrap();
    volume.discard(FAR, 1 << 20).unwrap();
    volume.close().unwrap();
    // Opened again, the map has no such group.
    let volume = machine.open();
    holds(&volume, FAR, &[0; 5000]);
    volume.roll_back(&Cut::Snapshot("then".into())).unwrap();
    holds(&volume, FAR, &[2; 5000]);
    volume.close().unwrap();
    let volume = machine.open();
    holds(&volume, FAR, &[2; 5000]);
    holds(&volume, 0, &[1; 4096]);
    volume.close().unwrap();
    machine.assert_sound("rolled back");
}
