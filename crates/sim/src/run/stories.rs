//! Bugs of the engine that seeds have found, each told as a story of its own: a seed's meaning changes with the
//! world, a story's does not.

use std::sync::Arc;

use sawmill_device::Operation;
use sawmill_volume::FlushMode;
use sawmill_volume::limits::{SEGMENT_BYTES_MIN, STAGING_BYTES_MIN, journal_bytes_min};

use super::Run;
use crate::dice::Dice;
use crate::disk::DiskFaults;
use crate::settings::Settings;
use crate::trace::Trace;

/// A world without trouble, and one machine that has attached.
fn calm(place: &tempfile::TempDir, change: impl FnOnce(&mut Settings)) -> Run {
    let mut settings = Settings {
        store: Default::default(),
        disk: DiskFaults::default(),
        die_at_io_odds: 0,
        takeover_odds: 0,
        journal_loss_odds: 0,
        power_cut_odds: 0,
        close_odds: 0,
        lives: 1,
        steps: 0,
        size_bytes: 200 << 10,
        mode: FlushMode::Logged,
        write_bytes_max: 40_000,
        checkpoint_bytes: 256 << 10,
        uploads_max: 1,
        segment_age_ms: 5,
        segment_bytes: SEGMENT_BYTES_MIN,
        journal_bytes: 4 * journal_bytes_min(SEGMENT_BYTES_MIN),
        staging_bytes: STAGING_BYTES_MIN,
        cache_bytes: 0,
        rot_odds: 0,
        look_odds: 0,
    };
    change(&mut settings);
    let mut run = Run::new(settings, Dice::new(1), place.path(), Arc::new(Trace::default())).unwrap();
    run.attach(0).unwrap();
    run
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
    for number in 0..4 {
        write(&mut run, number * 40_000, 40_000);
    }
    let written = run.oracle.bound(crate::oracle::Loss::Process);
    run.close_in_peace().unwrap();
    assert!(run.story.closes == 0, "the batches lie on the disk alone, which cannot be read");
    run.settings.disk = DiskFaults::default();
    run.attach(0).unwrap();
    assert_eq!(run.oracle.len(), written, "nothing accepted is gone");
}
