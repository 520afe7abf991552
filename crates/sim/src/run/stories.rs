//! Bugs of the engine that seeds have found, each told as a story of its own: a seed's meaning changes with
//! the world, a story's does not.

use std::sync::Arc;

use sawmill_device::{ErrorKind, Operation};
use sawmill_volume::limits::{SEGMENT_BYTES_MIN, journal_bytes_min};

use super::Run;
use crate::dice::Dice;
use crate::disk::{DiskFaults, Fate};
use crate::settings::Settings;
use crate::store::CallFate;
use crate::trace::Trace;

/// A world without trouble, where nobody has attached yet.
fn calm(place: &tempfile::TempDir, change: impl FnOnce(&mut Settings)) -> Run {
    calm_by(1, place, change)
}

/// The same by other dice.
fn calm_by(dice: u64, place: &tempfile::TempDir, change: impl FnOnce(&mut Settings)) -> Run {
    let mut settings =
        Settings { journal_bytes: 4 * journal_bytes_min(SEGMENT_BYTES_MIN), ..Settings::calm() };
    change(&mut settings);
    Run::new(settings, Dice::new(dice), place.path(), Arc::new(Trace::default())).unwrap()
}

/// The client writes, and the loops of the process run; no call of the store happens.
fn write(run: &mut Run, address: u64, length: u64) {
    let mut process = run.process.take().unwrap();
    run.ask_for(&mut process, Operation::Write, (address, length), false);
    (0..3).for_each(|_| run.round(&mut process, false));
    run.hear(&mut process).unwrap();
    run.process = Some(process);
}

/// Seed 3910, when reads of the journal began to fail: the batch was dropped, nothing seemed pending, and the
/// close put a checkpoint that said "clean"; the next attach passed over the journal.
#[test]
fn a_batch_that_cannot_be_read_back_is_not_passed_over_by_a_close() {
    let place = tempfile::tempdir().unwrap();
    let mut run = calm(&place, |settings| settings.disk.read_odds = 1);
    run.attach(0).unwrap();
    for number in 0..4 {
        write(&mut run, number * 40_000, 40_000);
    }
    let written = run.oracle.bound(crate::oracle::Loss::Process);
    assert!(!run.close_in_peace().unwrap(), "the batches lie on the disk alone, which cannot be read");
    run.settings.disk = DiskFaults::default();
    run.attach(0).unwrap();
    assert_eq!(run.oracle.len(), written, "nothing accepted is gone");
}

/// Seed 2104, when failed syncs began to take back what they should have saved: an attach found the intent of
/// one that had died before its sync, put that one's fence, and lost power: then the fence was a stranger's,
/// and the volume was refused although nothing was lost.
#[test]
fn two_deaths_in_attaches_and_a_power_cut_leave_a_volume_that_opens() {
    for first in 1.. {
        let mut first_died = false;
        for second in 1.. {
            let place = tempfile::tempdir().unwrap();
            let mut run = calm(&place, |_| ());
            first_died = run.attach_dying(first).unwrap();
            if !first_died {
                break;
            }
            let second_died = run.attach_dying(second).unwrap();
            run.cut_power_with(|_| Fate::Lost);
            run.end_process(|_| CallFate::Never);
            run.attach(0).unwrap_or_else(|text| panic!("deaths at I/O {first} and {second}: {text}"));
            if !second_died {
                break;
            }
        }
        if !first_died {
            assert!(first > 5, "an attach has more I/Os than that");
            break;
        }
    }
}

/// Seed 19218: what one machine had flushed and not stored was overtaken, without a word, by another whose
/// old journal had been closed cleanly.
#[test]
fn an_old_clean_journal_is_no_leave_to_overtake_a_newer_one() {
    let place = tempfile::tempdir().unwrap();
    let mut run = calm(&place, |_| ());
    run.attach(0).unwrap();
    write(&mut run, 0, 5000);
    assert!(run.close_in_peace().unwrap());
    run.attach(1).unwrap();
    write(&mut run, 100, 5000);
    run.end_process(|_| CallFate::Never);
    match run.try_attach(0, false, false) {
        Some(Err((ErrorKind::Refused, text))) => assert!(text.contains("--accept-journal-loss"), "{text}"),
        _ => panic!("nobody accepted a loss"),
    }
    run.attach(1).unwrap();
    assert_eq!(run.oracle.len(), 2, "the machine that has the journal goes on");
}

/// Seed 42573: an attach whose sync failed took what the dead process had written, and nobody had synced, for
/// synced the next time: after a power cut it was gone, although it had been found and gone on from.
#[test]
fn a_sync_that_fails_in_an_attach_is_remembered_by_the_next() {
    // Either kind of failed sync, by the dice.
    for dice in 1..=8 {
        let place = tempfile::tempdir().unwrap();
        let mut run = calm_by(dice, &place, |_| ());
        run.attach(0).unwrap();
        write(&mut run, 0, 9000);
        run.end_process(|_| CallFate::Never);
        run.settings.disk.sync_odds = 1;
        assert!(matches!(run.try_attach(0, false, true), Some(Err(_))), "its first sync fails");
        run.settings.disk = DiskFaults::default();
        run.attach(0).unwrap();
        let found = run.oracle.len();
        run.end_process(|_| CallFate::Never);
        run.cut_power_with(|_| Fate::Lost);
        run.attach(0).unwrap_or_else(|text| panic!("dice {dice}: {text}"));
        assert_eq!(run.oracle.len(), found, "what an attach found is durable");
    }
}
