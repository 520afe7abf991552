//! Copied and restored stores. Either the store is copied, with or without the machine's journal
//! and state folder, and the copy is attached on the same machine with the same read cache; or the
//! store is restored from a backup, while journal, state folder and cache are newer.
//!
//! Invariants checked: original and copy each show their own history. A restored store is attached
//! without the user's consent only if nothing is lost. If the user accepts the loss, the volume
//! holds what the backup held, or that plus what the journal still holds after it. No other lost
//! data comes back. Not here: snapshots and clones of such worlds (there are none).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use sawmill_device::{BlockDevice, ErrorKind, Operation};
use sawmill_store::ObjectStore;
use sawmill_volume::{FlushMode, OpenOptions, SteppedVolume, World};

use super::{AttachFaults, JournalLoss, NAME, ROUNDS_MAX, SeedRun, Verdict, journal_path};
use crate::client::{Change, Client, Excuses};
use crate::death::{Life, live};
use crate::disk::DiskFaults;
use crate::oracle::{Loss, Oracle};
use crate::store::{CallFate, SimBucket, SimStore, StoreFaults};
use crate::world::SimWorld;

/// An earlier state of the store.
struct Backup {
    objects: BTreeMap<String, Bytes>,
    oracle: Oracle,
}

/// A copy of the store with a history of its own.
struct Copy {
    bucket: Arc<SimBucket>,
    machine: usize,
    /// Its content, from its first attachment on.
    oracle: Option<Oracle>,
    /// The operations that the original's oracle demands of the first attachment.
    least: usize,
    /// It has a journal, so no loss is accepted.
    has_journal: bool,
    loss: Loss,
    /// Boots of the machine when it was last attached.
    boots: u64,
}

/// A backup of the store, and the folders that a copied store is attached with.
pub(super) struct Histories {
    /// The memory folder of the copy's processes.
    pub(super) folder: PathBuf,
    backup: Option<Backup>,
    copy: Option<Copy>,
}

/// A process that has the copy attached.
struct CopyProcess {
    stepped: SteppedVolume,
    store: Arc<SimStore>,
    life: Arc<Life>,
    cache: Option<Arc<sawmill_volume::ReadCache>>,
}

fn copied_journal_path() -> PathBuf {
    PathBuf::from("/journal-of-copy")
}

impl Histories {
    pub(super) fn new(place: &Path) -> Result<Self, String> {
        let folder = place.join("copy");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Histories { folder, backup: None, copy: None })
    }
}

impl SeedRun {
    /// Backs up the store while it is written.
    pub(super) fn back_up(&mut self) {
        if self.edges.histories.backup.is_none() {
            self.log("backup", || "  somebody backs the store up".into());
            let backup = Backup { objects: self.bucket.objects(), oracle: self.oracle.clone() };
            self.edges.histories.backup = Some(backup);
        }
    }

    /// Whether this machine has the newest journal and all of its memory.
    fn is_whole(&self, machine: usize) -> bool {
        let place = &self.machines[machine];
        !place.outdated && !place.has_lost_memory && self.loss != Loss::Journal
    }

    /// Restores the store from the backup; everything else stays as it was left.
    pub(super) fn restore(&mut self, machine: usize) -> Verdict {
        self.note_what_was_dropped(machine);
        // Flushed data was in the store alone, or the disk lied about it, so the journal cannot
        // detect its loss.
        let knows_less = self.loss == Loss::Power && self.settings.mode != FlushMode::Logged;
        if !self.is_whole(machine) || knows_less || self.settings.disk.lie_odds > 0 {
            return Ok(());
        }
        let Some(backup) = self.edges.histories.backup.take() else { return Ok(()) };
        self.free_lock(machine)?;
        self.end_zombie();
        let is_behind = self.bucket.objects() != backup.objects;
        self.story.restores += 1;
        self.log("restore", || "the store is put back".into());
        self.bucket.put_back(backup.objects);
        match self.try_attach(machine, JournalLoss::Refused, AttachFaults::None) {
            // The journal has everything that the store lacks.
            Some(Ok(process)) => {
                self.attached(process).map_err(|text| format!("a store put back: {text}"))?;
                self.oracle.note_restored(backup.oracle.bound(Loss::Journal));
                self.die();
                Ok(())
            }
            Some(Err((ErrorKind::Refused | ErrorKind::Corrupt, text))) if is_behind => {
                self.log("refused", || format!("  refused: {text}"));
                self.accept_the_backup(machine, backup.oracle)
            }
            Some(Err((_, text))) => {
                Err(format!("a store that was put back is not attached: {text}"))
            }
            None => Ok(()),
        }
    }

    fn accept_the_backup(&mut self, machine: usize, oracle: Oracle) -> Verdict {
        // A close with everything stored removed the memory, which a failed disk may not record.
        self.machines[machine].accepts_memory_loss = true;
        match self.try_attach(machine, JournalLoss::Accepted, AttachFaults::None) {
            Some(Ok(mut process)) => {
                // If only the memory was missing, the journal may still continue from the backup.
                let (least, found) = (oracle.bound(Loss::Journal), self.read_all(&mut process)?);
                match oracle.check_view(least, &found) {
                    Ok(_) => self.oracle = oracle,
                    Err(_) => self.oracle.note_restored(least),
                }
                self.loss = Loss::Journal;
                self.attached(process)
                    .map_err(|text| format!("a store put back, loss accepted: {text}"))?;
                self.die();
                Ok(())
            }
            Some(Err((_, text))) => {
                Err(format!("a loss is accepted, and the attach refused: {text}"))
            }
            None => Ok(()),
        }
    }

    /// Between two lives of the original, attaches the copy, which is made first.
    pub(super) fn live_in_a_copy(&mut self, machine: usize) -> Verdict {
        if self.edges.histories.copy.is_none() {
            let copy = self.make_copy(machine);
            self.edges.histories.copy = Some(copy);
        }
        // Most bytes of a history are read from the store only in the life after the one that wrote
        // them.
        for _ in 0..1 + self.edges.dice.below(2) {
            self.live_on_in_a_copy(false)?;
        }
        Ok(())
    }

    /// One more life of the copy, with a clean close if requested.
    pub(super) fn live_on_in_a_copy(&mut self, is_closed: bool) -> Verdict {
        let Some(mut copy) = self.edges.histories.copy.take() else { return Ok(()) };
        let lived =
            self.live_once(&mut copy, is_closed).map_err(|text| format!("the copy: {text}"));
        self.edges.histories.copy = Some(copy);
        lived
    }

    /// The store is copied now, without a journal.
    pub(super) fn copy_the_store_alone(&mut self) {
        let (bucket, least) = (Arc::new(self.bucket.copy(false)), self.oracle.bound(Loss::Journal));
        let (oracle, has_journal, loss, boots) = (None, false, Loss::Process, 0);
        let copy = Copy { bucket, machine: 0, oracle, least, has_journal, loss, boots };
        self.edges.histories.copy = Some(copy);
    }

    /// The copy's last life, with a clean close.
    pub(super) fn end_copy(&mut self) -> Verdict {
        self.live_on_in_a_copy(true)
    }

    fn make_copy(&mut self, machine: usize) -> Copy {
        self.story.store_copies += 1;
        let (with_late, with_journal, with_memory) =
            (self.edges.dice.one_in(2), self.edges.dice.one_in(2), self.edges.dice.one_in(2));
        let with_journal = with_journal && self.is_whole(machine) && !self.has_disk_faults();
        self.log("copy the store", || {
            format!("the store is copied; calls under way: {with_late}, journal: {with_journal}")
        });
        let bucket = Arc::new(self.bucket.copy(with_late));
        let place = &mut self.machines[machine];
        let (mut least, mut has_journal) = (self.oracle.bound(Loss::Journal), false);
        if with_journal && let Some(journal) = place.media.get(&journal_path()) {
            place.media.set(&copied_journal_path(), Some(journal.copy()));
            (least, has_journal) = (self.oracle.bound(self.loss), true);
            let memory = std::fs::read_dir(&place.staging).into_iter().flatten().flatten();
            for file in memory.filter(|_| with_memory) {
                let copied = self.edges.histories.folder.join(file.file_name());
                let _ = std::fs::copy(file.path(), copied);
            }
            // Otherwise the copy takes the original's memory, a loss that the original accepts.
            place.has_lost_memory |= !with_memory;
        }
        let boots = place.media.boots();
        Copy { bucket, machine, oracle: None, least, has_journal, loss: Loss::Process, boots }
    }

    /// One attachment of the copy: its content is checked, it is written and read, and it dies or
    /// is closed.
    fn live_once(&mut self, copy: &mut Copy, is_last: bool) -> Verdict {
        self.story.lives_of_copies += 1;
        for _ in 0..self.edges.dice.below(3) {
            if copy.bucket.late() > 0 {
                copy.bucket.land(0, &self.trace);
            }
        }
        let media = &self.machines[copy.machine].media;
        if media.boots() != copy.boots && copy.loss == Loss::Process {
            copy.loss = Loss::Power;
        }
        copy.boots = media.boots();
        let mut attached = self.attach_copy(copy)?;
        let found = self.read_copy(&mut attached)?;
        let mut oracle = match copy.oracle.take() {
            Some(mut oracle) => {
                oracle.opened(copy.loss, &found)?;
                oracle
            }
            None => {
                self.oracle.check_view(copy.least, &found)?;
                Oracle::of(found, self.settings.mode)
            }
        };
        self.log("copy found", || format!("  the copy is attached: {} operations", oracle.len()));
        (copy.loss, copy.has_journal) = (Loss::Process, true);
        let lived = self.work_in_copy(attached, &mut oracle, is_last);
        copy.oracle = Some(oracle);
        lived
    }

    fn attach_copy(&mut self, copy: &Copy) -> Result<CopyProcess, String> {
        let mut refused = String::new();
        for journal_loss in [JournalLoss::Refused, JournalLoss::Accepted] {
            let life = Arc::new(Life::default());
            let media = self.machines[copy.machine].media.clone();
            let (clock, trace) = (self.clock.clone(), self.trace.clone());
            let dice = &mut self.edges.dice;
            let world = SimWorld::new(
                clock,
                media,
                life.clone(),
                trace,
                DiskFaults::default(),
                dice.split(5),
            );
            let faults = StoreFaults::default();
            let store = SimStore::new(
                copy.bucket.clone(),
                life.clone(),
                self.trace.clone(),
                faults,
                dice.split(6),
            );
            let (world, store): (Arc<dyn World>, _) = (Arc::new(world), Arc::new(store));
            let cache = self.cache(copy.machine, &*world);
            let options = OpenOptions {
                journal_path: copied_journal_path(),
                staging_folder: self.edges.histories.folder.clone(),
                accept_memory_loss: false,
                cache: cache.clone(),
                ..self.options(copy.machine, journal_loss)
            };
            let shared: Arc<dyn ObjectStore> = store.clone();
            match SteppedVolume::open(world, shared, NAME, &options) {
                Ok(stepped) => {
                    store.set_at_once(false);
                    return Ok(CopyProcess { stepped, store, life, cache });
                }
                // Only at first.
                Err(error) if !copy.has_journal && error.kind() == ErrorKind::Refused => {
                    life.die();
                    refused = error.to_string();
                }
                Err(error) => return Err(format!("the attach was refused: {error}")),
            }
        }
        Err(format!("the attach was refused: {refused}"))
    }

    fn step_copy(&mut self, process: &mut CopyProcess) {
        while process.stepped.step_journal() {}
        process.stepped.step_journal_quietly();
        process.stepped.step_engine(self.clock.now());
        for _ in 0..process.store.waiting() {
            process.store.happen(0);
        }
        self.clock.pass(20_000);
    }

    fn read_copy(&mut self, process: &mut CopyProcess) -> Result<Vec<u8>, String> {
        let mut client = Client::default();
        client.read_whole(process.stepped.volume());
        for _ in 0..ROUNDS_MAX {
            if let Some(found) = client.padded_answer(self.settings.size_bytes) {
                return found;
            }
            self.step_copy(process);
        }
        Err("reading it does not end".into())
    }

    fn work_in_copy(
        &mut self,
        mut process: CopyProcess,
        oracle: &mut Oracle,
        is_last: bool,
    ) -> Verdict {
        let mut client = Client::default();
        let size_bytes = process.stepped.volume().geometry().size_bytes;
        if !is_last && self.edges.dice.one_in(2) {
            process.life.dies_after(1 + self.edges.dice.below(60));
        }
        for _ in 0..4 + self.edges.dice.below(24) {
            let longest = self.settings.write_bytes_max.min(size_bytes);
            let length = 1 + self.edges.dice.below(longest);
            let address = self.edges.dice.below(size_bytes - length + 1);
            self.stamp += 1;
            let (stamp, choice) = (self.stamp, self.edges.dice.below(8));
            let volume = process.stepped.volume().clone();
            let lived = live(|| {
                match choice {
                    0 => client.flush(&volume, oracle),
                    1..3 => client.read(&volume, oracle, (address, length)),
                    kind => {
                        let operation =
                            if kind == 3 { Operation::Discard } else { Operation::Write };
                        let change =
                            Change { operation, range: (address, length), stamp, fua: false };
                        client.change(&volume, oracle, change);
                    }
                }
                self.step_copy(&mut process);
            });
            if let Some(cache) = process.cache.as_ref().filter(|_| choice == 7) {
                // As a server does now and then.
                let _ = cache.save_index();
            }
            if lived.is_none() || process.life.is_dead() {
                return self.kill_copy(&process);
            }
            client.receive_answers(
                oracle,
                Excuses::default(),
                None,
                self.settings.mode,
                &self.trace,
            )?;
        }
        if !is_last && self.edges.dice.one_in(3) {
            return self.kill_copy(&process);
        }
        self.close_copy(process, client, oracle)
    }

    fn kill_copy(&mut self, process: &CopyProcess) -> Verdict {
        process.life.die();
        let dice = &mut self.edges.dice;
        process.store.end_calls(|_| CallFate::roll(dice));
        Ok(())
    }

    fn close_copy(
        &mut self,
        mut process: CopyProcess,
        mut client: Client,
        oracle: &mut Oracle,
    ) -> Verdict {
        process.life.lives_on();
        process.stepped.begin_close();
        for _ in 0..ROUNDS_MAX {
            if process.stepped.is_settled() {
                break;
            }
            self.step_copy(&mut process);
        }
        let excuses = Excuses { any: true, corrupt: false };
        client.receive_answers(oracle, excuses, None, self.settings.mode, &self.trace)?;
        if let Some(cache) = &process.cache {
            let _ = cache.save_index();
        }
        let CopyProcess { stepped, store, life, .. } = process;
        stepped.finish_close().map_err(|error| format!("the close failed: {error}"))?;
        let count = oracle.flush_covers();
        oracle.note_stored(count);
        life.die();
        let dice = &mut self.edges.dice;
        store.end_calls(|_| CallFate::roll(dice));
        Ok(())
    }
}
