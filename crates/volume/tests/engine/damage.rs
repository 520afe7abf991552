//! Bit rot, lost and swapped objects: a check lists them, an open or a read that needs them says so
//! and names them, and nothing ever returns wrong bytes.

use crate::faulty::{
    Machine, SEGMENT, is_engine, segment_put, stored, tile_bytes, tile_version, until, write_tile,
};
use crate::rig::MIB;
use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_format::name_record::name_key;
use sawmill_format::segment::{FRAME_HEAD_BYTES, header_bytes_of};
use sawmill_store::{Blocking, CallKind, Class, Fault, PutOutcome, StoreErrorKind};
use sawmill_volume::{Volume, check, open_cache};

/// Slots of a volume whose first eight are in the checkpoint and whose last two were stored after
/// it.
const CHECKPOINTED: u64 = 8;
const SLOTS: u64 = 10;
/// The sequence of tile 0, behind the first fence.
const FIRST: u64 = 65;
/// And of tile 8, behind the second.
const LATER: u64 = 137;

fn volume_with_two_checkpoints() -> Machine {
    let machine = Machine::new();
    let volume = machine.open();
    for tile in 0..CHECKPOINTED {
        write_tile(&volume, tile, 1);
    }
    volume.close().unwrap();
    let volume = machine.open();
    for tile in CHECKPOINTED..SLOTS {
        write_tile(&volume, tile, 1);
    }
    stored(&volume);
    volume.close_now();
    assert!(machine.keys("").contains(&machine.segment_key(FIRST)));
    assert!(machine.keys("").contains(&machine.segment_key(LATER)));
    machine
}

fn assert_sound(volume: &Volume) {
    assert!((0..SLOTS).all(|tile| tile_version(volume, tile, 1) == 1));
}

fn damage_of(machine: &Machine) -> Vec<check::Damage> {
    let record = sawmill_volume::find(&*machine.plain, "disk").unwrap();
    check::check(&*machine.plain, &record, &mut |_, _| ()).unwrap().damage
}

/// What can happen to an object. Each leaves something of that name, or nothing.
const HARMS: [&str; 5] = ["first bit", "a bit", "truncated", "emptied", "another's"];

fn harm(machine: &Machine, key: &str, other: &str, how: &str, at: usize) {
    let replacement = machine.object(other);
    machine.tamper(key, |bytes| match how {
        "first bit" => bytes[0] ^= 1,
        "a bit" => bytes[at] ^= 1,
        "truncated" => bytes.truncate(bytes.len() - 1),
        "emptied" => bytes.clear(),
        _ => *bytes = replacement.to_vec(),
    });
}

#[test]
fn a_damaged_header_above_the_checkpoint_stops_the_open_and_changes_nothing() {
    for how in HARMS {
        let machine = volume_with_two_checkpoints();
        if how == "truncated" {
            // Its header is whole.
            continue;
        }
        let key = machine.segment_key(LATER);
        harm(&machine, &key, &machine.segment_key(LATER + 1), how, 130);
        let objects = machine.keys("");
        let (kind, text) = machine.refused();
        assert_eq!(kind, ErrorKind::Corrupt, "{how}: {text}");
        assert!(text.contains(&key), "{how}: {text}");
        assert_eq!(machine.keys(""), objects);
        let damage = damage_of(&machine);
        assert!(damage.len() == 1 && damage[0].what.contains(&key), "{how}: {damage:?}");
    }
}

#[test]
fn a_damaged_frame_is_never_read_and_the_rest_is() {
    for cached in [false, true] {
        for sequence in [FIRST, LATER] {
            for how in ["a bit", "truncated", "another's"] {
                let mut machine = volume_with_two_checkpoints();
                if cached {
                    let path = machine.folder.path().join("cache");
                    machine.options.cache = Some(open_cache(&path, 4 * MIB).unwrap());
                }
                let key = machine.segment_key(sequence);
                let header = header_bytes_of(&machine.object(&key)[..16]).unwrap() as usize;
                let frame = (64 << 10) + FRAME_HEAD_BYTES;
                // The last frame of the segment; of another segment only the body, so that the open
                // takes it.
                let other = machine.object(&machine.segment_key(sequence + 1));
                machine.tamper(&key, |bytes| match how {
                    "a bit" => bytes[header + 3 * frame + 1000] ^= 16,
                    "truncated" => bytes.truncate(header + 3 * frame + 1000),
                    _ => bytes[header + 3 * frame..].copy_from_slice(&other[header + 3 * frame..]),
                });
                let tile = if sequence == FIRST { 0 } else { CHECKPOINTED };
                let volume = machine.open();
                let start = tile * SEGMENT as u64;
                for _ in 0..2 {
                    let error = volume.read_at(start + (192 << 10), 4096).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{how}");
                    assert!(error.to_string().contains(&key), "{how}: {error}");
                    assert_eq!(
                        volume.read_at(start, SEGMENT).unwrap_err().kind(),
                        ErrorKind::Corrupt
                    );
                    crate::faulty::holds(&volume, start, &tile_bytes(tile, 1)[..192 << 10]);
                }
                assert!(
                    (0..SLOTS)
                        .filter(|other| *other != tile)
                        .all(|tile| tile_version(&volume, tile, 1) == 1)
                );
                volume.close_now();
                let damage = damage_of(&machine);
                assert!(damage.len() == 1 && damage[0].object == key, "{how}: {damage:?}");
            }
        }
    }
}

#[test]
fn a_damaged_segment_can_be_overwritten() {
    let machine = volume_with_two_checkpoints();
    machine.tamper(&machine.segment_key(FIRST), |bytes| bytes.truncate(1000));
    let volume = machine.open();
    assert_eq!(volume.read_at(0, 4096).unwrap_err().kind(), ErrorKind::Corrupt);
    write_tile(&volume, 0, 2);
    volume.close().unwrap();
    let volume = machine.open();
    assert_eq!(tile_version(&volume, 0, 2), 2);
}

#[test]
fn a_checkpointed_segment_that_is_gone_is_corrupt_where_it_is_needed() {
    let machine = volume_with_two_checkpoints();
    let key = machine.segment_key(FIRST);
    machine.remove(&key);
    let damage = damage_of(&machine);
    assert!(
        damage.len() == 1 && damage[0].object == key && damage[0].what.contains("gone"),
        "{damage:?}"
    );
    let volume = machine.open();
    let error = volume.read_at(0, 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains(&key));
    assert!((1..SLOTS).all(|tile| tile_version(&volume, tile, 1) == 1));
}

#[test]
fn a_segment_that_is_gone_below_a_mark_stops_the_open() {
    // A segment with others behind it, the last before a fence, and a fence.
    for sequence in [LATER, LATER + 1, LATER - 64] {
        let mut machine = volume_with_two_checkpoints();
        machine.open().close_now();
        machine.remove(&machine.segment_key(sequence));
        let objects = machine.keys("");
        for accept in [false, true] {
            machine.options.accept_journal_loss = accept;
            let (kind, text) = machine.refused();
            assert_eq!(kind, ErrorKind::Corrupt, "segment {sequence}: {text}");
            assert!(text.contains("restore"), "{text}");
        }
        assert_eq!(machine.keys(""), objects);
        assert!(!damage_of(&machine).is_empty());
    }
}

#[test]
fn the_last_segment_that_is_gone_before_anybody_marked_it_is_replayed_from_the_journal() {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    stored(&volume);
    volume.close_now();
    machine.remove(&machine.segment_key(FIRST));
    // Whether the journal's superblock had heard of it is a matter of timing: then it is damage.
    match machine.try_open() {
        Ok(volume) => assert_eq!(tile_version(&volume, 0, 1), 1),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt),
    }
}

#[test]
fn a_damaged_checkpoint_falls_back_to_the_one_before() {
    for how in HARMS {
        let machine = volume_with_two_checkpoints();
        let roots = machine.keys("/checkpoint/");
        let [.., before, newest] = &roots[..] else { panic!("{roots:?}") };
        harm(&machine, newest, before, how, 100);
        let record = sawmill_volume::find(&*machine.plain, "disk").unwrap();
        let report = check::check(&*machine.plain, &record, &mut |_, _| ()).unwrap();
        let [damage] = &report.damage[..] else { panic!("{how}: {:?}", report.damage) };
        assert!(
            damage.object == *newest && damage.costs.is_empty(),
            "{how}: the volume is whole: {damage}"
        );
        assert!(report.notes.iter().any(|note| note.contains(newest)), "{how}: {:?}", report.notes);
        let volume = machine.open();
        assert_sound(&volume);
        write_tile(&volume, 0, 1);
        volume.close().unwrap();
        let number = volume.status().checkpoint_number;
        assert!(
            machine.keys("/checkpoint/").iter().any(|key| key.ends_with(&format!("{number:020}")))
        );
        assert!(number > 4, "{how}: the number of the damaged one is not used again");
        assert_sound(&machine.open());
    }
}

#[test]
fn a_checkpoint_that_is_gone_falls_back_to_the_one_before() {
    let machine = volume_with_two_checkpoints();
    machine.remove(machine.keys("/checkpoint/").last().unwrap());
    assert_sound(&machine.open());
}

#[test]
fn without_any_readable_checkpoint_the_open_is_refused_and_changes_nothing() {
    let machine = volume_with_two_checkpoints();
    for key in machine.keys("/checkpoint/") {
        machine.tamper(&key, |bytes| bytes[60] ^= 1);
    }
    let objects = machine.keys("");
    let (kind, text) = machine.refused();
    assert_eq!(kind, ErrorKind::Corrupt);
    assert!(text.contains("no checkpoint that can be read"), "{text}");
    assert_eq!(machine.keys(""), objects);
}

/// From how many bytes on a map is loaded only when it is needed: never, and always.
const HELD_FROM_BYTES: [u64; 2] = [u64::MAX, 0];

/// A volume of two groups of addresses, with a part of the map for each.
fn volume_with_two_groups() -> Machine {
    volume_held_from(u64::MAX)
}

fn volume_held_from(held_from_bytes: u64) -> Machine {
    let mut machine = Machine::with(40 << 30, sawmill_volume::FlushMode::Logged);
    machine.options.bounds.map_held_from_bytes = held_from_bytes;
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    volume.write_at(30 << 30, &[3; 5000]).unwrap();
    volume.close().unwrap();
    machine
}

#[test]
fn a_damaged_map_part_of_the_newest_checkpoint_falls_back_to_the_one_before() {
    for (how, held) in HARMS.into_iter().flat_map(|how| HELD_FROM_BYTES.map(|held| (how, held))) {
        let machine = volume_held_from(held);
        let parts = machine.keys("/map/");
        harm(&machine, &parts[0], &parts[1], how, 90);
        let volume = machine.open();
        assert_eq!(tile_version(&volume, 0, 1), 1);
        crate::faulty::holds(&volume, 30 << 30, &[3; 5000]);
        volume.close().unwrap();
        // The log went on from the one before the damaged one, which is a way back once more.
        machine.assert_sound(how);
        machine.remove(machine.keys("/checkpoint/").last().unwrap());
        let volume = machine.open();
        assert_eq!(tile_version(&volume, 0, 1), 1);
        crate::faulty::holds(&volume, 30 << 30, &[3; 5000]);
        write_tile(&volume, 0, 1);
        volume.close().unwrap();
        machine.assert_sound(how);
    }
}

#[test]
fn an_older_checkpoint_is_not_used_where_the_log_lacks_what_the_damaged_one_had() {
    for how in HARMS {
        let mut machine = volume_with_two_groups();
        let parts = machine.keys("/map/");
        harm(&machine, &parts[0], &parts[1], how, 90);
        // The store lost the log too, and this machine never saw the volume.
        machine.keys("/seg/").iter().for_each(|key| machine.remove(key));
        std::fs::remove_file(machine.journal()).unwrap();
        let objects = machine.keys("");
        for accept in [false, true] {
            machine.options.accept_journal_loss = accept;
            let (kind, text) = machine.refused();
            assert_eq!(kind, ErrorKind::Corrupt, "{how}: {text}");
            assert!(text.contains(&parts[0]) && text.contains("/checkpoint/"), "{how}: {text}");
        }
        assert_eq!(machine.keys(""), objects, "nothing was changed");
    }
}

#[test]
fn an_outage_while_the_older_checkpoint_is_read_is_not_called_damage() {
    for kind in [StoreErrorKind::Unavailable, StoreErrorKind::Denied] {
        let machine = volume_with_two_groups();
        let (parts, roots) = (machine.keys("/map/"), machine.keys("/checkpoint/"));
        let [.., older, _] = &roots[..] else { panic!("{roots:?}") };
        harm(&machine, &parts[0], &parts[1], "a bit", 90);
        let older = older.clone();
        machine.fault(Fault::Fail(kind), move |call| {
            call.kind == CallKind::Get && call.key() == older
        });
        let expected = match kind {
            StoreErrorKind::Denied => ErrorKind::Denied,
            _ => ErrorKind::Unavailable,
        };
        let (refused, text) = machine.refused();
        assert_eq!(refused, expected, "{text}");
        machine.heal();
        assert_eq!(tile_version(&machine.open(), 0, 1), 1);
    }
}

#[test]
fn a_damaged_map_part_that_every_checkpoint_needs_stops_the_open() {
    for (how, held) in HARMS.into_iter().flat_map(|how| HELD_FROM_BYTES.map(|held| (how, held))) {
        let machine = volume_held_from(held);
        let parts = machine.keys("/map/");
        assert_eq!(parts.len(), 2);
        // The second group changes, so the part of the first is shared by both checkpoints.
        let volume = machine.open();
        volume.write_at(30 << 30, &[4; 5000]).unwrap();
        volume.close().unwrap();
        assert_eq!(machine.keys("/checkpoint/").len(), 2);
        harm(&machine, &parts[0], &parts[1], how, 90);
        let objects = machine.keys("");
        let (kind, text) = machine.refused();
        assert_eq!(kind, ErrorKind::Corrupt, "{how}: {text}");
        assert!(text.contains(&parts[0]), "{how}: {text}");
        assert_eq!(machine.keys(""), objects);
        assert_eq!(damage_of(&machine).len(), 1);
        machine.remove(&parts[0]);
        assert_eq!(machine.refused().0, ErrorKind::Corrupt, "and when it is gone");
    }
}

#[test]
fn a_damaged_volume_record_is_refused_by_name() {
    for how in HARMS {
        let machine = volume_with_two_checkpoints();
        let options = sawmill_volume::CreateOptions::new(MIB);
        sawmill_volume::create(&*machine.plain, "other", &options).unwrap();
        harm(&machine, &name_key("disk", 1), &name_key("other", 1), how, 50);
        let (kind, text) = machine.refused();
        assert_eq!(kind, ErrorKind::Corrupt, "{how}");
        assert!(text.contains("names/disk"), "{how}: {text}");
    }
}

#[test]
fn swapped_segments_of_two_volumes_are_detected() {
    let machine = volume_with_two_checkpoints();
    let other = volume_with_two_checkpoints();
    for sequence in [FIRST, LATER] {
        let theirs = other.object(&other.segment_key(sequence));
        machine.tamper(&machine.segment_key(sequence), |bytes| *bytes = theirs.to_vec());
    }
    assert_eq!(machine.refused().0, ErrorKind::Corrupt);
    // Give back the one that the open needs; the other is met by the read.
    let machine = volume_with_two_checkpoints();
    let theirs = other.object(&other.segment_key(FIRST));
    machine.tamper(&machine.segment_key(FIRST), |bytes| *bytes = theirs.to_vec());
    let volume = machine.open();
    assert_eq!(volume.read_at(0, 4096).unwrap_err().kind(), ErrorKind::Corrupt);
    volume.close_now();
    assert_eq!(damage_of(&machine).len(), 1);
}

#[test]
fn a_put_that_stored_half_an_object_is_found() {
    let machine = Machine::new();
    let volume = machine.open();
    machine.fault(Fault::Truncate, |call| segment_put(call) == Some(FIRST));
    write_tile(&volume, 0, 1);
    stored(&volume);
    machine.heal();
    write_tile(&volume, 1, 1);
    volume.close().unwrap();
    let volume = machine.open();
    assert_eq!(volume.read_at(SEGMENT as u64 - 4096, 4096).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(tile_version(&volume, 1, 1), 1);
    volume.close_now();
    assert_eq!(damage_of(&machine).len(), 1);
}

#[test]
fn a_stranger_at_the_key_of_the_next_segment_fences_or_stops_but_is_never_read() {
    let machine = Machine::new();
    let volume = machine.open();
    let key = machine.segment_key(FIRST);
    let body = bytes::Bytes::from_static(b"not a segment");
    let put = Blocking(&*machine.plain).put(&key, body, Class::Upload).unwrap();
    assert_eq!(put, PutOutcome::Created);
    write_tile(&volume, 0, 1);
    until("the writer meets it", || volume.status().health != sawmill_volume::Health::Serving);
    assert_eq!(volume.read_at(0, 1).unwrap_err().kind(), ErrorKind::Fenced);
    drop(volume);
    let (kind, text) = machine.refused();
    assert_eq!(kind, ErrorKind::Corrupt);
    assert!(text.contains(&key), "{text}");
    machine.remove(&key);
    assert_eq!(tile_version(&machine.open(), 0, 1), 1, "nothing accepted was lost");
}

#[test]
fn a_check_asks_only() {
    let machine = volume_with_two_checkpoints();
    let record = sawmill_volume::find(&*machine.plain, "disk").unwrap();
    let before = machine.faults.calls().len();
    let report = check::check(&*machine.faults, &record, &mut |_, _| ()).unwrap();
    assert_eq!((report.segments, report.damage.len()), (SLOTS, 0));
    let calls = machine.faults.calls();
    assert!(calls[before..].iter().all(|call| matches!(call.kind, CallKind::Get | CallKind::List)));
    assert!(calls[before..].iter().any(is_engine));
}
