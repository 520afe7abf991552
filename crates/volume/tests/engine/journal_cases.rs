//! What opening does with every kind of journal: what it needs is used, what it cannot use is
//! refused and kept, and a crash at any step of an attach is met by the next one, without flags and
//! without loss.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::faulty::{Machine, holds, stored, tile_version, until, write_tile};
use crate::rig::{MIB, pattern};
use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_format::journal::{
    RECORD_HEADER_BYTES, RING_START_BYTES, SUPERBLOCK_BYTES, Superblock,
};
use sawmill_store::{Fault, StoreErrorKind};
use sawmill_volume::{CreateOptions, RealWorld, Volume, World, inspect};

/// A volume with tile 0 stored and tile 1 only in the journal, flushed, its process dead.
fn left_dirty() -> Machine {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    stored(&volume);
    volume.write_at(MIB, &pattern(MIB, 7, 9000)).unwrap();
    volume.flush().unwrap();
    volume.close_now();
    machine
}

/// A volume that was closed cleanly.
fn left_clean() -> Machine {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    volume.close().unwrap();
    machine
}

/// Whether the write that was only in the journal is there.
fn has_newest(volume: &Volume) -> bool {
    let bytes = volume.read_at(MIB, 9000).unwrap();
    let newest = bytes == pattern(MIB, 7, 9000);
    assert!(newest || bytes.iter().all(|byte| *byte == 0), "neither the write nor nothing");
    newest
}

fn flip(path: &Path, offset: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    byte[0] ^= 4;
    file.write_all_at(&byte, offset).unwrap();
}

fn set_aside(machine: &Machine) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(machine.folder.path()).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.to_string_lossy().contains(".aside-")).collect()
}

/// The journal cannot be used: refused and untouched without the flag; set aside, and the stored
/// cut, with it.
fn refused_until_the_loss_is_accepted(mut machine: Machine, says: &str) {
    let path = machine.journal();
    let before = std::fs::read(&path).ok();
    let objects = machine.keys("");
    for _ in 0..2 {
        let (kind, text) = machine.refused();
        assert_eq!(kind, ErrorKind::Refused, "{text}");
        assert!(text.contains(says) && text.contains("--accept-journal-loss"), "{text}");
        assert_eq!(std::fs::read(&path).ok(), before, "a refused journal is left as it is");
        assert_eq!(machine.keys(""), objects, "a refused open changes nothing in the store");
    }
    machine.options.accept_journal_loss = true;
    let volume = machine.open();
    assert_eq!(tile_version(&volume, 0, 9), 1);
    assert!(!has_newest(&volume), "the volume is the stored cut");
    let kept: Vec<_> =
        set_aside(&machine).iter().map(|path| std::fs::read(path).unwrap()).collect();
    let worth_keeping = before.filter(|bytes| !bytes.is_empty());
    assert_eq!(
        kept,
        worth_keeping.into_iter().collect::<Vec<_>>(),
        "what was set aside is still there"
    );
    volume.write_at(MIB, &pattern(MIB, 7, 9000)).unwrap();
    volume.close_now();
    machine.options.accept_journal_loss = false;
    assert!(has_newest(&machine.open()), "the new journal is used");
}

#[test]
fn a_missing_journal_is_refused() {
    let machine = left_dirty();
    std::fs::remove_file(machine.journal()).unwrap();
    refused_until_the_loss_is_accepted(machine, "there is no journal");
}

/// The time that the refusal names, in ms since 1970.
pub(crate) fn time_of_the_stored_state(text: &str, before: &str) -> i64 {
    let (_, rest) = text.split_once(before).unwrap_or_else(|| panic!("no time: {text}"));
    let (time, age) = rest.split_once(", ").expect("an age");
    assert!(age.split_once(" ago").is_some_and(|(age, _)| age.ends_with('s')), "{text}");
    chrono::DateTime::parse_from_rfc3339(time).expect(text).timestamp_millis()
}

#[test]
fn the_refusal_of_a_missing_journal_says_when_the_last_state_was_stored() {
    let world = RealWorld::default();
    // The refusal names whole seconds.
    let from = world.unix_ms() / 1000 * 1000;
    let machine = left_dirty();
    let to = world.unix_ms();
    std::fs::remove_file(machine.journal()).unwrap();
    let (_, text) = machine.refused();
    let at = time_of_the_stored_state(&text, "the last state that reached the store (");
    assert!((from..=to).contains(&at.cast_unsigned()), "{from} <= {at} <= {to}: {text}");
    assert!(text.contains("; position "), "{text}");
}

#[test]
fn the_refusal_of_a_missing_journal_says_that_the_amount_is_not_known() {
    let machine = left_dirty();
    std::fs::remove_file(machine.journal()).unwrap();
    let (_, text) = machine.refused();
    assert!(text.ends_with("How much was accepted after it is not known"), "{text}");
}

#[test]
fn an_empty_journal_file_is_refused() {
    let machine = left_dirty();
    std::fs::write(machine.journal(), b"").unwrap();
    refused_until_the_loss_is_accepted(machine, "there is no journal");
}

#[test]
fn a_blank_journal_is_refused() {
    let machine = left_dirty();
    std::fs::write(machine.journal(), vec![0; 16 << 20]).unwrap();
    refused_until_the_loss_is_accepted(machine, "there is no journal");
}

#[test]
fn a_truncated_journal_is_refused() {
    for bytes in [100, RING_START_BYTES + 4096, (16 << 20) - 4096] {
        let machine = left_dirty();
        let file = std::fs::OpenOptions::new().write(true).open(machine.journal()).unwrap();
        file.set_len(bytes).unwrap();
        refused_until_the_loss_is_accepted(machine, "bytes");
    }
}

#[test]
fn garbage_in_place_of_a_journal_is_refused() {
    let machine = left_dirty();
    std::fs::write(machine.journal(), pattern(3, 5, 16 << 20)).unwrap();
    refused_until_the_loss_is_accepted(machine, "no valid superblock");
}

#[test]
fn a_journal_with_both_superblocks_torn_is_refused() {
    let machine = left_dirty();
    flip(&machine.journal(), 100);
    flip(&machine.journal(), 100 + SUPERBLOCK_BYTES as u64);
    refused_until_the_loss_is_accepted(machine, "no valid superblock");
}

#[test]
fn what_rots_before_the_first_record_of_an_attachment_is_no_damage() {
    let machine = Machine::new();
    let volume = machine.open();
    volume.write_at(9 * MIB, &pattern(9 * MIB, 1, 1000)).unwrap();
    stored(&volume);
    volume.close_now();
    let (volume, journal) = (machine.open(), machine.journal());
    volume.write_at(MIB, &pattern(MIB, 7, 9000)).unwrap();
    volume.flush().unwrap();
    volume.close_now();
    machine.lose_memory();
    // The attach filled the last block of the one before with a pad; its own records begin behind
    // that.
    let written = std::fs::read(&journal).unwrap();
    let superblock = Superblock::decode(&written[..SUPERBLOCK_BYTES], machine.volume_id()).unwrap();
    let Superblock { stored_position, trim, .. } = superblock;
    assert!(stored_position < trim, "{stored_position} {trim}");
    flip(&journal, RING_START_BYTES + stored_position + 8);
    let volume = machine.open();
    assert!(has_newest(&volume));
    holds(&volume, 9 * MIB, &pattern(9 * MIB, 1, 1000));
}

#[test]
fn a_clean_volume_needs_no_journal_and_sets_a_useless_one_aside() {
    let useless: [fn(&Path); 4] = [
        |path| std::fs::remove_file(path).unwrap(),
        |path| std::fs::write(path, b"").unwrap(),
        |path| std::fs::write(path, vec![7; 20_000]).unwrap(),
        |path| std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(9000).unwrap(),
    ];
    for (case, spoil) in useless.into_iter().enumerate() {
        let machine = left_clean();
        spoil(&machine.journal());
        let volume = machine.open();
        assert_eq!(tile_version(&volume, 0, 9), 1, "case {case}");
        assert_eq!(set_aside(&machine).len(), usize::from(case >= 2), "case {case}");
    }
}

#[test]
fn a_journal_of_another_volume_is_refused_whatever_the_flags() {
    let mut machine = left_clean();
    let other = left_dirty();
    std::fs::copy(other.journal(), machine.journal()).unwrap();
    let before = std::fs::read(machine.journal()).unwrap();
    for accept in [false, true] {
        machine.options.accept_journal_loss = accept;
        let (kind, text) = machine.refused();
        assert_eq!(kind, ErrorKind::Invalid);
        assert!(text.contains("belongs to volume") && text.contains("--journal"), "{text}");
    }
    assert_eq!(std::fs::read(machine.journal()).unwrap(), before);
    std::fs::copy(machine.journal(), other.journal()).unwrap();
    assert!(has_newest(&other.open()), "and its owner can still use it");
}

#[test]
fn a_journal_of_an_older_epoch_is_never_replayed() {
    let machine = left_dirty();
    let elsewhere = machine.successor();
    let volume = elsewhere.open();
    assert!(!has_newest(&volume));
    volume.close().unwrap();
    refused_until_the_loss_is_accepted(machine, "attached elsewhere");
}

#[test]
fn a_journal_that_was_closed_cleanly_before_others_attached_makes_way() {
    let machine = left_clean();
    let elsewhere = machine.successor();
    let volume = elsewhere.open();
    write_tile(&volume, 1, 2);
    volume.close().unwrap();
    let volume = machine.open();
    assert_eq!([0, 1].map(|tile| tile_version(&volume, tile, 9)), [1, 2]);
    assert!(set_aside(&machine).is_empty(), "it held nothing, so nothing is kept of it");
}

#[test]
fn a_journal_is_refused_when_the_store_is_an_old_copy() {
    let machine = left_clean();
    let old = crate::faulty::copy_store(&*machine.plain);
    let volume = machine.open();
    write_tile(&volume, 1, 2);
    stored(&volume);
    volume.close_now();
    let mut back = Machine::over(old);
    std::fs::copy(machine.journal(), back.journal()).unwrap();
    let (kind, text) = back.refused();
    assert_eq!(kind, ErrorKind::Refused);
    assert!(text.contains("the store has lost objects or is an old copy"), "{text}");
    back.options.accept_journal_loss = true;
    assert_eq!([0, 1].map(|tile| tile_version(&back.open(), tile, 9)), [1, 0]);
}

#[test]
fn one_torn_superblock_is_survived() {
    for copy in 0..2 {
        let machine = left_dirty();
        flip(&machine.journal(), 200 + copy * SUPERBLOCK_BYTES as u64);
        machine.lose_memory();
        assert!(has_newest(&machine.open()), "copy {copy}");
    }
}

/// Where in the journal file the payload of a write lies.
fn place_of(machine: &Machine, payload: &[u8]) -> u64 {
    let file = std::fs::read(machine.journal()).unwrap();
    let head = &payload[..64];
    let at = file.windows(head.len()).position(|window| window == head);
    at.expect("the payload is in the journal file") as u64
}

/// A volume whose journal holds a write below the mark that says what was flushed, and one above
/// it; memory lost.
fn marked() -> (Machine, u64, u64) {
    let machine = Machine::new();
    let volume = machine.open();
    volume.write_at(0, &pattern(1, 1, 9000)).unwrap();
    volume.write_at(2 * MIB, &pattern(1, 2, 9000)).unwrap();
    // A third write before the flush: what follows is not synced because a flush is expected.
    volume.write_at(10 * MIB, &pattern(1, 5, 9000)).unwrap();
    volume.flush().unwrap();
    let logged = volume.status().positions.logged;
    until("the mark is on the disk", || {
        inspect::journal(&machine.journal()).is_ok_and(|report| report.flushed_through >= logged)
    });
    // More than a span, so that it reaches the disk without a flush; and only the disk.
    machine.fault(unavailable(), |call| crate::faulty::segment_put(call).is_some());
    volume.write_at(4 * MIB, &pattern(1, 3, 900_000)).unwrap();
    volume.write_at(6 * MIB, &pattern(1, 4, 900_000)).unwrap();
    until("the tail is on the disk", || {
        inspect::journal(&machine.journal()).is_ok_and(|report| report.end > logged + 900_000)
    });
    volume.close_now();
    machine.heal();
    machine.lose_memory();
    let below = place_of(&machine, &pattern(1, 1, 9000));
    let above = place_of(&machine, &pattern(1, 3, 900_000));
    (machine, below, above)
}

#[test]
fn a_flipped_bit_below_the_flush_mark_is_refused_as_damage() {
    // In the payload, and in the record's header.
    for offset in [5000, -(RECORD_HEADER_BYTES as i64) + 50, -(RECORD_HEADER_BYTES as i64) + 2] {
        let (mut machine, below, _) = marked();
        flip(&machine.journal(), below.checked_add_signed(offset).unwrap());
        let before = std::fs::read(machine.journal()).unwrap();
        let (kind, text) = machine.refused();
        assert_eq!(kind, ErrorKind::Corrupt);
        assert!(text.contains("damaged at position"), "{text}");
        let number = |before: &str| -> u64 {
            let rest = text.split(before).nth(1).expect(before);
            rest.split(|one: char| !one.is_ascii_digit()).next().unwrap().parse().expect(before)
        };
        let lost = number("it was flushed through ") - number("damaged at position ");
        assert_eq!(number("loses at least "), lost, "{text}");
        assert!(lost >= 9000, "{text}");
        assert_eq!(std::fs::read(machine.journal()).unwrap(), before);
        machine.options.accept_journal_loss = true;
        let volume = machine.open();
        holds(&volume, 0, &vec![0; 9000]);
        holds(&volume, 2 * MIB, &vec![0; 9000]);
    }
}

#[test]
fn a_flipped_bit_above_the_flush_mark_drops_the_tail() {
    for offset in [300_000, -(RECORD_HEADER_BYTES as i64) + 50, -(RECORD_HEADER_BYTES as i64) + 2] {
        let (machine, _, above) = marked();
        flip(&machine.journal(), above.checked_add_signed(offset).unwrap());
        let volume = machine.open();
        holds(&volume, 0, &pattern(1, 1, 9000));
        holds(&volume, 2 * MIB, &pattern(1, 2, 9000));
        holds(&volume, 4 * MIB, &vec![0; 900_000]);
        holds(&volume, 6 * MIB, &vec![0; 900_000]);
    }
}

#[test]
fn a_torn_last_record_is_dropped_and_what_follows_a_restart_is_kept() {
    let (machine, _, above) = marked();
    let file = std::fs::OpenOptions::new().write(true).open(machine.journal()).unwrap();
    file.write_all_at(&vec![0; 200_000], above + 100_000).unwrap();
    for version in 10..14 {
        let volume = machine.open();
        holds(&volume, 2 * MIB, &pattern(1, 2, 9000));
        if version > 10 {
            holds(&volume, 8 * MIB, &pattern(2, version - 1, 900_000));
        }
        assert_eq!(
            volume.read_at(6 * MIB, 900_000).unwrap(),
            vec![0; 900_000],
            "the dropped tail stays away"
        );
        // As long as the dropped record, so that an old record follows where the new one ends.
        volume.write_at(8 * MIB, &pattern(2, version, 900_000)).unwrap();
        volume.flush().unwrap();
        volume.close_now();
        machine.lose_memory();
    }
}

#[test]
fn a_journal_too_small_for_the_segments_is_refused_before_anything_is_done() {
    let mut machine = Machine::new();
    let options = CreateOptions { segment_bytes: 8 << 20, ..CreateOptions::new(64 * MIB) };
    sawmill_volume::create(&*machine.plain, "large", &options).unwrap();
    machine.rig.name = "large".into();
    let objects = machine.keys("");
    let (kind, text) = machine.refused();
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(text.contains("too small") && text.contains("--journal-bytes"), "{text}");
    assert!(!machine.journal().exists());
    assert_eq!(machine.keys(""), objects);
    machine.options.journal_bytes = 32 * MIB;
    machine.open().close().unwrap();
}

#[test]
fn a_journal_in_use_is_refused_and_its_user_is_not_fenced() {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    let (kind, text) = machine.refused();
    assert_eq!(kind, ErrorKind::InUse);
    assert!(text.contains("in use"), "{text}");
    write_tile(&volume, 1, 2);
    stored(&volume);
    volume.close().unwrap();
}

#[test]
fn a_journal_that_cannot_be_made_is_reported_and_fences_no_writer() {
    let mut machine = Machine::new();
    machine.options.journal_bytes = 1 << 60;
    let objects = machine.keys("");
    let (_, text) = machine.refused();
    assert!(text.contains("cannot be made") && text.contains("--journal-bytes"), "{text}");
    assert!(!machine.journal().exists());
    assert_eq!(machine.keys(""), objects);
}

/// Opens while the put of the fence meets `fault`, which must fail the open.
fn fail_at_fence(machine: &Machine, fault: Fault) {
    machine.fault(fault, |call| crate::faulty::segment_put(call).is_some());
    let (kind, text) = machine.refused();
    assert_eq!(kind, ErrorKind::Unavailable, "{text}");
    machine.heal();
}

fn unavailable() -> Fault {
    Fault::Fail(StoreErrorKind::Unavailable)
}

#[test]
fn a_crash_around_the_fence_loses_nothing_and_needs_no_flag() {
    // The fence never got there; it did and nobody heard; it gets there after the next attach has
    // begun.
    let steps: [fn() -> Fault; 3] = [unavailable, || Fault::LoseAnswer, || Fault::Late];
    for first in steps {
        for second in steps {
            for third in steps {
                let machine = left_dirty();
                let what = [first(), second(), third()];
                for fault in what.clone() {
                    fail_at_fence(&machine, fault);
                }
                machine.faults.release_all();
                let volume = machine.open();
                assert!(has_newest(&volume), "{what:?}");
                assert_eq!(tile_version(&volume, 0, 9), 1, "{what:?}");
                volume.close_now();
                assert!(has_newest(&machine.open()), "{what:?}");
            }
        }
    }
}

#[test]
fn a_fence_of_a_failed_attach_may_land_at_any_time_of_the_next() {
    for clean in [false, true] {
        let machine = if clean { left_clean() } else { left_dirty() };
        if clean {
            std::fs::remove_file(machine.journal()).unwrap();
        }
        fail_at_fence(&machine, Fault::Late);
        // The late fence lands just before the put of the next attach goes through.
        machine.fault(Fault::Delay, |call| crate::faulty::segment_put(call).is_some());
        let volume = std::thread::scope(|scope| {
            let open = scope.spawn(|| machine.try_open());
            let held = |count: usize| machine.faults.held().len() == count;
            until("the second fence is on its way", || held(2) || open.is_finished());
            machine.heal();
            let mut first = true;
            machine.faults.release(|_| std::mem::take(&mut first));
            // The first fence took 1, its epoch began at 65, and one segment was written.
            until("the late fence is there", || {
                machine.keys("/seg/").contains(&machine.segment_key(66))
            });
            machine.faults.release_all();
            open.join().unwrap()
        });
        let volume: Arc<Volume> = volume.unwrap_or_else(|_| machine.open());
        assert_eq!(tile_version(&volume, 0, 9), 1);
        assert_eq!(has_newest(&volume), !clean);
        volume.close().unwrap();
        machine.assert_sound("after a late fence");
    }
}

#[test]
fn failed_attaches_of_a_new_volume_leave_one_journal() {
    let machine = Machine::new();
    for _ in 0..3 {
        fail_at_fence(&machine, unavailable());
    }
    machine.open().close().unwrap();
    assert_eq!(set_aside(&machine), Vec::<PathBuf>::new());
}

#[test]
fn a_failed_attach_does_not_help_a_journal_that_was_overtaken() {
    let machine = left_dirty();
    fail_at_fence(&machine, unavailable());
    let elsewhere = machine.successor().open();
    elsewhere.close().unwrap();
    refused_until_the_loss_is_accepted(machine, "attached elsewhere");
}
