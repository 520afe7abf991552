//! Bugs that were found, and events that seeds meet too seldom, each as a script of its own: a
//! seed's meaning changes with the world, a story's does not.
//!
//! Invariant: each story fails on an engine with the bug; for most, a deliberate bug of `make
//! mutants` shows that. Not here: chance. Where dice decide in a story, a loop tries all of them.

use std::path::Path;
use std::sync::Arc;

use sawmill_device::{ErrorKind, Flags, Operation};
use sawmill_volume::limits::{SEGMENT_BYTES_MIN, journal_bytes_min};
use sawmill_volume::{GcPolicy, Health};

use super::{AttachFaults, JournalLoss, SeedRun, Verdict, journal_path};
use crate::disk::{DiskFaults, Fate};
use crate::oracle::Loss;
use crate::settings::Settings;
use crate::store::{CallFate, StoreFaults};
use crate::trace::Trace;
use sawmill_testkit::Dice;

/// Bytes of a record before its payload.
const RECORD_HEADER_BYTES: u64 = 80;

/// Runs a story in `place`, a folder in a memory file system.
pub type Story = fn(place: &Path) -> Verdict;

macro_rules! stories {
    ($($name:ident),+ $(,)?) => {
        /// All stories, by name.
        pub const STORIES: &[(&str, Story)] = &[$((stringify!($name), $name)),+];

        #[cfg(test)]
        mod tests {
            $(#[test]
            fn $name() {
                let place = tempfile::tempdir().unwrap();
                super::$name(place.path()).unwrap();
            })+
        }
    };
}

stories!(
    records_that_cannot_be_read_back_are_not_passed_over_by_a_close,
    two_deaths_in_attaches_and_a_power_cut_leave_a_volume_that_opens,
    an_old_clean_journal_is_no_leave_to_overtake_a_newer_one,
    a_sync_that_fails_in_an_attach_is_remembered_by_the_next,
    what_was_flushed_is_not_rewritten_by_dying_attaches,
    a_failed_sync_is_doubted_when_memory_is_lost,
    what_a_dying_attach_wrote_over_a_torn_record_is_no_damage,
    a_full_staging_ring_is_read_to_its_last_byte,
    what_a_disk_drops_after_a_failed_sync_is_still_in_memory,
    a_checkpoint_that_rots_is_passed_over_for_the_one_before,
    a_journal_that_cannot_be_read_now_is_not_set_aside,
    a_root_in_the_way_is_looked_at_again_when_it_makes_no_sense,
    a_store_put_back_under_one_attachment_is_attached_with_the_loss_accepted,
    a_store_and_its_copy_share_a_read_cache_and_no_frame_of_it,
    what_was_written_is_read_without_the_store,
    what_is_loaded_late_of_a_map_never_covers_what_is_newer,
);

/// A world without faults, where no process has attached yet.
fn calm(place: &Path, change: impl FnOnce(&mut Settings)) -> Result<SeedRun, String> {
    calm_by(1, place, change)
}

/// The same with other dice.
fn calm_by(dice: u64, place: &Path, change: impl FnOnce(&mut Settings)) -> Result<SeedRun, String> {
    let mut settings =
        Settings { journal_bytes: 4 * journal_bytes_min(SEGMENT_BYTES_MIN), ..Settings::calm() };
    change(&mut settings);
    SeedRun::new(settings, Dice::new(dice), place, Arc::new(Trace::default()))
}

/// The client writes, and the loops of the process run; no call of the store happens.
fn write(run: &mut SeedRun, address: u64, length: u64) -> Verdict {
    let mut process = run.process.take().ok_or("nobody has attached")?;
    run.submit_request(&mut process, Operation::Write, (address, length), Flags::default());
    (0..3).for_each(|_| run.round_of_loops(&mut process));
    run.receive_answers(&mut process)?;
    run.process = Some(process);
    Ok(())
}

fn require(holds: bool, what: &str) -> Verdict {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

/// Seed 3910, when reads of the journal could first fail: the segment was dropped, nothing seemed
/// pending, and the close put a checkpoint marked as clean; the next attach skipped the journal.
fn records_that_cannot_be_read_back_are_not_passed_over_by_a_close(place: &Path) -> Verdict {
    let mut run = calm(place, |settings| settings.disk.read_odds = 1)?;
    run.attach(0)?;
    for number in 0..4 {
        write(&mut run, number * 40_000, 40_000)?;
    }
    require(
        !run.close_in_peace()?,
        "the close succeeds, and the records lie on a disk that cannot be read",
    )?;
    // Some waited for memory, and were accepted during the close.
    let written = run.oracle.bound(Loss::Process);
    run.settings.disk = DiskFaults::default();
    run.attach(0)?;
    require(run.oracle.len() == written, "something accepted is gone")
}

/// Seed 2104, when failed syncs could first drop the data that they covered: an attach found the
/// intent of one that had died before its sync, put that one's fence, and lost power. Then the
/// fence looked foreign, and the volume was refused although nothing was lost.
fn two_deaths_in_attaches_and_a_power_cut_leave_a_volume_that_opens(place: &Path) -> Verdict {
    for first in 1.. {
        let mut first_died = false;
        for second in 1.. {
            let mut run = calm(place, |_| ())?;
            first_died = run.attach_dying(first)?;
            if !first_died {
                break;
            }
            let second_died = run.attach_dying(second)?;
            run.cut_power_with(|_| Fate::Lost);
            run.end_process(|_| CallFate::Never);
            run.attach(0).map_err(|text| format!("deaths at I/O {first} and {second}: {text}"))?;
            if !second_died {
                break;
            }
        }
        if !first_died {
            return require(first > 5, "an attach has fewer I/Os than one can believe");
        }
    }
    Ok(())
}

/// Seed 19218: one machine's flushed but unstored writes were silently overtaken by another machine
/// whose old journal had been closed cleanly.
fn an_old_clean_journal_is_no_leave_to_overtake_a_newer_one(place: &Path) -> Verdict {
    let mut run = calm(place, |_| ())?;
    run.attach(0)?;
    write(&mut run, 0, 5000)?;
    require(run.close_in_peace()?, "the close fails in a calm world")?;
    run.attach(1)?;
    write(&mut run, 100, 5000)?;
    run.end_process(|_| CallFate::Never);
    match run.try_attach(0, JournalLoss::Refused, AttachFaults::None) {
        Some(Err((ErrorKind::Refused, text))) => {
            require(text.contains("--accept-journal-loss"), &text)?
        }
        _ => return Err("the old journal's machine is let in, and nobody accepted a loss".into()),
    }
    run.attach(1)?;
    require(run.oracle.len() == 2, "the machine that has the journal does not go on")
}

/// Seed 42573: after an attach whose sync failed, the next attach took the dead process's unsynced
/// writes for synced. A power cut lost them, although an attach had found them and continued from
/// them.
fn a_sync_that_fails_in_an_attach_is_remembered_by_the_next(place: &Path) -> Verdict {
    // The dice choose the kind of failed sync.
    for dice in 1..=8 {
        let mut run = calm_by(dice, place, |_| ())?;
        run.attach(0)?;
        write(&mut run, 0, 9000)?;
        run.end_process(|_| CallFate::Never);
        run.settings.disk.sync_odds = 1;
        require(
            matches!(run.try_attach(0, JournalLoss::Refused, AttachFaults::Usual), Some(Err(_))),
            "an attach succeeds without a sync",
        )?;
        run.settings.disk = DiskFaults::default();
        run.attach(0)?;
        let found = run.oracle.len();
        run.end_process(|_| CallFate::Never);
        run.cut_power_with(|_| Fate::Lost);
        run.attach(0).map_err(|text| format!("dice {dice}: {text}"))?;
        require(run.oracle.len() == found, "what an attach found is not durable")?;
    }
    Ok(())
}

/// Seed 6439468: an attach died and left open what it had synced. The next one rewrote everything
/// from the superblock's mark on, over records that had been reported as flushed. The power was cut
/// during that write.
fn what_was_flushed_is_not_rewritten_by_dying_attaches(place: &Path) -> Verdict {
    for first in 1.. {
        let mut first_died = false;
        for second in 1.. {
            let mut run = calm_by(100 * first + second, place, |_| ())?;
            run.attach(0)?;
            for number in 0..4 {
                write(&mut run, number * 9000, 9000)?;
            }
            let mut process = run.process.take().ok_or("nobody has attached")?;
            run.submit_request(&mut process, Operation::Flush, (0, 0), Flags::default());
            for _ in 0..16 {
                process.stepped.step_journal();
            }
            run.receive_answers(&mut process)?;
            run.process = Some(process);
            require(run.oracle.bound(Loss::Power) == 4, "the flush is not answered")?;
            run.end_process(|_| CallFate::Never);
            first_died = run.attach_dying(first)?;
            if !first_died {
                break;
            }
            let second_died = run.attach_dying(second)?;
            run.end_process(|_| CallFate::Never);
            run.cut_power_with(|_| Fate::Torn(2));
            let deaths = format!("deaths at I/O {first} and {second}");
            run.attach(0).map_err(|text| format!("{deaths}: {text}"))?;
            require(run.oracle.len() == 4, &format!("{deaths}: something flushed is gone"))?;
            if !second_died {
                break;
            }
        }
        if !first_died {
            return require(first > 5, "an attach has fewer I/Os than one can believe");
        }
    }
    Ok(())
}

/// Seeds 6319735 and 7001695: memory alone was lost, and with it the note that a sync had failed.
/// Data that could still be read counted as flushed, and the next power cut lost it.
fn a_failed_sync_is_doubted_when_memory_is_lost(place: &Path) -> Verdict {
    let mut kept = 0;
    for dice in 1..=16 {
        let mut run = calm_by(dice, place, |_| ())?;
        run.attach(0)?;
        // The disk fails only after the attach, during which it had no faults.
        run.end_process(|_| CallFate::Never);
        run.settings.disk.sync_odds = 4;
        let Some(Ok(mut process)) = run.try_attach(0, JournalLoss::Refused, AttachFaults::Usual)
        else {
            continue;
        };
        for number in 0..4 {
            run.submit_request(
                &mut process,
                Operation::Write,
                (number * 9000, 9000),
                Flags::default(),
            );
            run.submit_request(&mut process, Operation::Flush, (0, 0), Flags::default());
            while process.stepped.step_journal() {}
        }
        run.process = Some(process);
        run.end_process(|_| CallFate::Never);
        run.settings.disk = DiskFaults::default();
        run.lose_memory_alone(0);
        run.attach(0).map_err(|text| format!("dice {dice}: {text}"))?;
        let found = run.oracle.len();
        kept += found;
        run.end_process(|_| CallFate::Never);
        run.cut_power_with(|_| Fate::Lost);
        run.attach(0).map_err(|text| format!("dice {dice}, after the power cut: {text}"))?;
        require(
            run.oracle.len() == found,
            &format!("dice {dice}: what an attach found is not durable"),
        )?;
    }
    require(kept > 5, "hardly anything outlived the memory")
}

/// Seeds 1868, 18031 and 19337. A sync left its mark in the middle of a record, and a power cut
/// tore that record. The next attach continued before it and wrote a pad; the next power cut tore
/// the pad. The attach after that found the old mark in the following record, and took the torn pad
/// for damage below the mark.
fn what_a_dying_attach_wrote_over_a_torn_record_is_no_damage(place: &Path) -> Verdict {
    for dice in 1..=16 {
        for dies_at in 1.. {
            let mut run = calm_by(dice, place, |_| ())?;
            run.attach(0)?;
            let mut process = run.process.take().ok_or("nobody has attached")?;
            // Requests behind a flush are written and synced with it, up to one write of 16384
            // bytes. The mark is there, in a record whose header, at 2498, straddles two sectors.
            for (operation, range) in [
                (Operation::Write, (0, 100)),
                (Operation::Flush, (0, 0)),
                (Operation::Write, (100, 2238)),
                (Operation::Write, (4096, 14_906)),
            ] {
                run.submit_request(&mut process, operation, range, Flags::default());
            }
            while process.stepped.step_journal() {}
            // The next record contains the mark.
            run.submit_request(&mut process, Operation::Write, (40_000, 9000), Flags::default());
            while process.stepped.step_journal() {}
            run.receive_answers(&mut process)?;
            run.process = Some(process);
            run.end_process(|_| CallFate::Never);
            run.cut_power_with(|_| Fate::Torn(2));
            let died = run.attach_dying(dies_at)?;
            run.end_process(|_| CallFate::Never);
            run.cut_power_with(|_| Fate::Torn(2));
            run.attach(0).map_err(|text| format!("dice {dice}, death at I/O {dies_at}: {text}"))?;
            if !died {
                break;
            }
        }
    }
    Ok(())
}

/// Seed 17343: the last chunk of a completely full staging ring was read as zeroes, so accepted
/// writes came back as damage.
fn a_full_staging_ring_is_read_to_its_last_byte(place: &Path) -> Verdict {
    let mut run = calm(place, |_| ())?;
    run.attach(0)?;
    let mut process = run.process.take().ok_or("nobody has attached")?;
    // Records until there is no room, at unaligned places; nothing goes to the disk.
    let (staging_bytes, slot_bytes) = (run.settings.staging_bytes, 5000);
    for start in (0..staging_bytes).step_by(slot_bytes as usize) {
        let slot_bytes = slot_bytes.min(staging_bytes - start);
        run.submit_request(
            &mut process,
            Operation::Write,
            (start, slot_bytes - RECORD_HEADER_BYTES),
            Flags::default(),
        );
    }
    run.receive_answers(&mut process)?;
    run.process = Some(process);
    let accepted = run.oracle.bound(Loss::Process);
    require(
        accepted == staging_bytes.div_ceil(slot_bytes) as usize,
        "not all of it fits the ring",
    )?;
    run.end_process(|_| CallFate::Never);
    run.attach(0)
}

/// The failing disk of the black-box tests: it dropped its cache after a failed sync, and memory
/// had released accepted writes once they were written.
fn what_a_disk_drops_after_a_failed_sync_is_still_in_memory(place: &Path) -> Verdict {
    let mut failed = 0;
    for dice in 1..=64 {
        let mut run = calm_by(dice, place, |settings| settings.disk.sync_odds = 4)?;
        run.attach(0)?;
        let mut process = run.process.take().ok_or("nobody has attached")?;
        for number in 0..4 {
            run.submit_request(
                &mut process,
                Operation::Write,
                (number * 9000, 9000),
                Flags::default(),
            );
            run.submit_request(&mut process, Operation::Flush, (0, 0), Flags::default());
            for _ in 0..8 {
                process.stepped.step_journal();
            }
        }
        run.receive_answers(&mut process)?;
        failed +=
            u32::from(matches!(process.stepped.volume().status().health, Health::Failed { .. }));
        run.process = Some(process);
        let accepted = run.oracle.bound(Loss::Process);
        run.end_process(|_| CallFate::Never);
        run.settings.disk = DiskFaults::default();
        run.attach(0).map_err(|text| format!("dice {dice}: {text}"))?;
        require(run.oracle.len() == accepted, &format!("dice {dice}: something accepted is gone"))?;
    }
    require(failed > 5, "hardly a sync failed")
}

/// About deletes (decision 0006): segments that only the newest checkpoint found dead are still
/// needed by the one before it, from which the volume rolls forward.
fn a_checkpoint_that_rots_is_passed_over_for_the_one_before(place: &Path) -> Verdict {
    for writes in 20..32 {
        let mut run = calm(place, |settings| settings.checkpoint_bytes = 40 << 10)?;
        run.attach(0)?;
        for _ in 0..writes {
            write(&mut run, 0, 12_000)?;
            let mut process = run.process.take().ok_or("nobody has attached")?;
            (0..4).for_each(|_| run.round(&mut process));
            run.process = Some(process);
        }
        run.end_process(|_| CallFate::Never);
        require(run.bucket.rot_last("/checkpoint/"), "there is no checkpoint")?;
        run.attach(0).map_err(|text| format!("after {writes} writes: {text}"))?;
        require(run.oracle.len() == writes, "something accepted is gone")?;
    }
    Ok(())
}

/// Seed 1131571: a journal whose superblock could not be read was set aside, because the volume was
/// clean. But the fence of the attach that had died on it was still in flight, and when it took
/// effect no journal knew it.
fn a_journal_that_cannot_be_read_now_is_not_set_aside(place: &Path) -> Verdict {
    let mut unread = 0;
    for dies_at in 1.. {
        let mut run = calm(place, |_| ())?;
        if !run.attach_dying(dies_at)? {
            return require(unread > 3, "an attach that dies leaves no journal");
        }
        if run.machines[0].media.get(&journal_path()).is_some() {
            unread += 1;
            run.settings.disk.read_odds = 1;
            let refused = matches!(
                run.try_attach(0, JournalLoss::Refused, AttachFaults::Usual),
                Some(Err(_))
            );
            require(
                refused,
                &format!("death at I/O {dies_at}: a journal that cannot be read is set aside"),
            )?;
            run.settings.disk = DiskFaults::default();
        }
        run.land_all();
        run.attach(0).map_err(|text| format!("death at I/O {dies_at}: {text}"))?;
    }
    Ok(())
}

/// Seed 220687: the root of a dead process took effect late and blocked its successor's; the read
/// of that root was garbled, and the volume failed.
fn a_root_in_the_way_is_looked_at_again_when_it_makes_no_sense(place: &Path) -> Verdict {
    for dice in 1..=12 {
        for calls in 1..=14 {
            let mut run = calm_by(dice, place, |settings| settings.checkpoint_bytes = 4 << 10)?;
            run.attach(0)?;
            write(&mut run, 0, 12_000)?;
            let mut process = run.process.take().ok_or("nobody has attached")?;
            for _ in 0..calls {
                run.round_of_loops(&mut process);
                if process.store.waiting() > 0 {
                    process.store.happen(0);
                }
            }
            // Its next calls are in flight when it dies.
            run.round_of_loops(&mut process);
            run.process = Some(process);
            run.end_process(|_| CallFate::Late);
            run.attach(0)?;
            run.land_all();
            let garbled = StoreFaults { garble_odds: 2, ..StoreFaults::default() };
            run.process.as_ref().ok_or("nobody has attached")?.store.set_faults(garbled);
            for _ in 0..3 {
                write(&mut run, 0, 12_000)?;
                let mut process = run.process.take().ok_or("nobody has attached")?;
                (0..20).for_each(|_| run.round(&mut process));
                run.receive_answers(&mut process)?;
                let health = process.stepped.volume().status().health;
                run.process = Some(process);
                require(
                    health == Health::Serving,
                    &format!("dice {dice}, {calls} calls: {health:?}"),
                )?;
            }
        }
    }
    Ok(())
}

/// Seed 30000085: the store was restored to a state of the same attachment; the journal had marked
/// more as stored, and every attach failed, even with the loss accepted.
fn a_store_put_back_under_one_attachment_is_attached_with_the_loss_accepted(
    place: &Path,
) -> Verdict {
    let mut run = calm(place, |_| ())?;
    run.attach(0)?;
    for number in 0..30 {
        if number == 10 {
            run.back_up();
        }
        write(&mut run, number % 4 * 40_000, 40_000)?;
        let mut process = run.process.take().ok_or("nobody has attached")?;
        (0..4).for_each(|_| run.round(&mut process));
        run.receive_answers(&mut process)?;
        run.process = Some(process);
    }
    let before = run.oracle.len();
    run.end_process(|_| CallFate::Never);
    run.restore(0)?;
    require(run.story.restores == 1 && run.oracle.len() < before, "the store was not put back")
}

/// The review's first finding: a store was copied, and both were served with one read cache. Each
/// wrote the same sequence number in the same epoch, and read the other's frames.
fn a_store_and_its_copy_share_a_read_cache_and_no_frame_of_it(place: &Path) -> Verdict {
    for dice in 1..=8 {
        let mut run = calm_by(dice, place, |settings| {
            settings.cache_bytes = 1 << 20;
            settings.edges.warm_cache = true;
        })?;
        run.attach(0)?;
        write(&mut run, 0, 40_000)?;
        run.close_in_peace()?;
        run.copy_the_store_alone();
        for _ in 0..4 {
            // One life writes, the next one reads what it wrote from the store.
            for _ in 0..2 {
                run.attach(0).map_err(|text| format!("dice {dice}: {text}"))?;
                write(&mut run, 0, 12_000)?;
                run.save_index();
                run.close_in_peace()?;
            }
            for _ in 0..2 {
                run.live_on_in_a_copy(true).map_err(|text| format!("dice {dice}: {text}"))?;
            }
        }
    }
    Ok(())
}

/// The journal is smaller than the disk and the cache is larger: what was written is read without
/// the store, in the same life and in the next.
fn what_was_written_is_read_without_the_store(place: &Path) -> Verdict {
    let mut run = calm(place, |settings| {
        settings.journal_bytes = journal_bytes_min(SEGMENT_BYTES_MIN);
        settings.cache_bytes = 1 << 20;
        settings.edges.warm_cache = true;
        // Several segments at once: some wait for their turn.
        settings.uploads_max = 8;
    })?;
    run.attach(0)?;
    for number in 0..10 {
        // With gaps: a stream would pass by the cache.
        for gap in 0..10 {
            write(&mut run, number * 20_000 + gap * 2_000, 1_000)?;
        }
        let mut process = run.process.take().ok_or("the process is gone")?;
        (0..8).for_each(|_| run.round(&mut process));
        run.process = Some(process);
    }
    let mut process = run.process.take().ok_or("the process is gone")?;
    run.read_all(&mut process)?;
    require(reads_store(&process) == 0, "something had to come from the store")?;
    let cache = process.cache.clone().ok_or("there is no cache")?;
    run.process = Some(process);
    run.close_in_peace()?;
    cache.save_index().map_err(|error| error.to_string())?;
    run.attach(0)?;
    let process = run.process.as_ref().ok_or("the process is gone")?;
    require(reads_store(process) == 0, "after a restart something had to come from the store")
}

fn reads_store(process: &super::Process) -> u64 {
    process.stepped.volume().status().counters.reads_store
}

/// A map of several groups is loaded while the volume is used. Lives end before all of it is there,
/// some of them cleanly, with a log behind the checkpoint and changes that wait for their groups.
fn what_is_loaded_late_of_a_map_never_covers_what_is_newer(place: &Path) -> Verdict {
    for dice in 1..=30 {
        let tell = |text: String| format!("dice {dice}: {text}");
        let mut run = calm_by(dice, place, |settings| {
            settings.size_bytes = 4 << 20;
            settings.first_bytes = settings.size_bytes;
            settings.checkpoint_bytes = 64 << 10;
            settings.uploads_max = 3;
            settings.write_bytes_max = 9000;
            settings.journal_bytes *= 4;
            settings.staging_bytes *= 16;
            settings.gc = GcPolicy { start: 0.7, ..GcPolicy::default() };
        })?;
        run.attach(0)?;
        run.machines[0].old_image = None;
        for number in 0..40 {
            let address = run.dice.below(4 << 8) << 12;
            write(&mut run, address, 4096).map_err(tell)?;
            if number % 2 == 0 {
                let mut process = run.process.take().ok_or("nobody has attached")?;
                (0..3).for_each(|_| run.round(&mut process));
                run.process = Some(process);
            }
        }
        for _ in 0..3 {
            if run.dice.one_in(3) {
                require(run.close_in_peace().map_err(tell)?, "an early close fails")?;
                (run.loss, run.machines[0].outdated) = (Loss::Process, false);
            }
            run.end_process(|_| CallFate::Never);
            // Nobody reads the whole: that would load the map at once.
            let attached = run.try_attach(0, JournalLoss::Refused, AttachFaults::None);
            let Some(Ok(mut process)) = attached else {
                return Err(tell("the attach is refused".into()));
            };
            for _ in 0..run.dice.below(4) * run.dice.below(28) {
                run.step(&mut process).map_err(tell)?;
                run.receive_answers(&mut process).map_err(tell)?;
            }
            // The next life's changes follow all of this one's.
            while process.client.has_unanswered_changes() {
                run.round(&mut process);
                run.receive_answers(&mut process).map_err(tell)?;
            }
            run.process = Some(process);
        }
        run.end_process(|_| CallFate::Never);
        if dice % 2 == 0 {
            run.cut_power_with(|_| Fate::Lost);
        }
        run.attach(0).map_err(tell)?;
        require(run.close_in_peace()?, "the close fails in a calm world")?;
        run.check_all().map_err(tell)?;
    }
    Ok(())
}
