//! Volumes whose checkpoints put only what changed.

use sawmill_device::BlockDeviceExt;
use sawmill_volume::{Volume, check};

use crate::faulty::{Machine, WAIT_TIME_MAX, holds, stored};

const BLOCKS: u64 = 60;
/// Far enough apart to be extents of their own.
const STEP_BYTES: u64 = 16 << 10;

fn write(volume: &Volume, block: u64, version: u8) {
    volume.write_at(block * STEP_BYTES, &[version; 4096]).unwrap();
}

fn checkpoint(volume: &Volume) {
    stored(volume);
    assert!(volume.checkpoint(WAIT_TIME_MAX));
}

/// Many extents, then a checkpoint with a delta: three blocks are newer, one is a hole.
fn volume_with_a_delta(held_from_bytes: u64) -> Machine {
    let mut machine = Machine::new();
    machine.options.bounds.map_delta_from_bytes = 0;
    machine.options.bounds.map_held_from_bytes = held_from_bytes;
    let volume = machine.open();
    (0..BLOCKS).for_each(|block| write(&volume, block, 1));
    checkpoint(&volume);
    assert_eq!(deltas(&machine), [] as [String; 0]);
    (0..3).for_each(|block| write(&volume, block * 7, 2));
    volume.discard(30 * STEP_BYTES, 4096).unwrap();
    checkpoint(&volume);
    assert_eq!(deltas(&machine).len(), 1);
    // No other checkpoint names it.
    volume.close_now();
    machine
}

/// The number that a delta has for a group is beyond all groups.
fn deltas(machine: &Machine) -> Vec<String> {
    let mut keys = machine.keys("/map/");
    keys.retain(|key| key.rsplit_once('/').unwrap().1.starts_with("80000000"));
    keys
}

fn assert_newest(volume: &Volume) {
    for block in 0..BLOCKS {
        let version = match block {
            0 | 7 | 14 => 2,
            30 => 0,
            _ => 1,
        };
        holds(volume, block * STEP_BYTES, &[version; 4096]);
    }
}

#[test]
fn a_volume_whose_checkpoints_have_deltas_opens_with_every_byte() {
    for held_from_bytes in [u64::MAX, 0] {
        let machine = volume_with_a_delta(held_from_bytes);
        machine.assert_sound("ended with a delta");
        let volume = machine.open();
        assert_newest(&volume);
        // More and more of them, until they are taken back into whole groups.
        for round in 0..40 {
            write(&volume, 40 + round % 7, 3);
            checkpoint(&volume);
        }
        assert!(deltas(&machine).len() < 20, "{:?}", deltas(&machine));
        (0..7).for_each(|block| write(&volume, 40 + block, 1));
        volume.close().unwrap();
        machine.assert_sound("after many checkpoints");
        assert_newest(&machine.open());
    }
}

#[test]
fn a_damaged_delta_of_the_newest_checkpoint_falls_back_to_the_one_before() {
    let ways = ["a bit", "gone", "another's"];
    for (how, held) in ways.into_iter().flat_map(|how| [(how, u64::MAX), (how, 0)]) {
        let machine = volume_with_a_delta(held);
        let key = &deltas(&machine)[0];
        let whole = machine.object(&machine.keys("/map/")[0]);
        match how {
            "a bit" => machine.tamper(key, |bytes| bytes[90] ^= 1),
            "gone" => machine.remove(key),
            _ => machine.tamper(key, |bytes| *bytes = whole.to_vec()),
        }
        let record = sawmill_volume::find(&*machine.plain, "disk").unwrap();
        let report = check::check(&*machine.plain, &record, &mut |_, _| ()).unwrap();
        assert!(report.damage.iter().any(|damage| damage.object == *key), "{how}: {report:?}");
        let volume = machine.open();
        assert_newest(&volume);
        volume.close().unwrap();
        machine.assert_sound(how);
    }
}
