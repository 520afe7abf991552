//! Attaching, with as many attempts as it takes: some are refused or killed; the result of a
//! successful one is checked.
//!
//! Invariant checked: from the fifth attempt on nothing fails, and the only reason to refuse is an
//! outdated journal or lost memory. Not here: readers (`reader`), attaching a copy of the store
//! (`histories`) or beside a living process (`locks`).

use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{BlockDevice, ErrorKind};
use sawmill_store::ObjectStore;
use sawmill_volume::cache::CacheOptions;
use sawmill_volume::limits::FRAME_BYTES;
use sawmill_volume::{OpenOptions, ReadCache, SteppedVolume, World};

use super::{
    AttachFaults, JournalLoss, MACHINES, NAME, Process, ROUNDS_MAX, SeedRun, Verdict, cache_path,
    journal_path,
};
use crate::client::Client;
use crate::death::{Life, live};
use crate::disk::{DiskFaults, Medium};
use crate::oracle::Loss;
use crate::store::{CallFate, SimStore};
use crate::world::SimWorld;

impl SeedRun {
    /// Attaches on `machine`, with as many attempts as it takes.
    pub(crate) fn attach(&mut self, machine: usize) -> Verdict {
        self.free_lock(machine)?;
        let accepts_loss = self.loss == Loss::Journal && self.dice.one_in(2);
        let mut journal_loss = JournalLoss::accepted_if(accepts_loss);
        for attempt in 0.. {
            let faults = if attempt < 4 { AttachFaults::Usual } else { AttachFaults::None };
            self.log("attach", || {
                format!(
                    "machine {machine} attaches{}",
                    if journal_loss == JournalLoss::Accepted { ", loss accepted" } else { "" }
                )
            });
            match self.try_attach(machine, journal_loss, faults) {
                None => self.story.deaths += 1,
                Some(Ok(process)) => return self.attached(process),
                Some(Err((kind, text))) => {
                    self.log("refused", || format!("  refused: {text}"));
                    let place = &mut self.machines[machine];
                    match kind {
                        ErrorKind::Refused
                            if place.has_lost_memory && text.contains("--accept-memory-loss") =>
                        {
                            place.accepts_memory_loss = true;
                            if self.loss == Loss::Process {
                                self.loss = Loss::Power;
                            }
                        }
                        ErrorKind::Refused | ErrorKind::Corrupt if place.outdated => {
                            journal_loss = JournalLoss::Accepted;
                            self.loss = Loss::Journal;
                        }
                        ErrorKind::Unavailable if faults == AttachFaults::Usual => {}
                        // A list that hides every checkpoint, again and again, or garbage instead
                        // of one.
                        ErrorKind::Corrupt | ErrorKind::Invalid
                            if faults == AttachFaults::Usual && self.store_misleads() => {}
                        // A disk that fails while it is created or written.
                        _ if faults == AttachFaults::Usual && self.has_disk_faults() => {}
                        _ => return Err(format!("the attach was refused: {text}")),
                    }
                }
            }
            if attempt > 8 && journal_loss == JournalLoss::Accepted {
                // The owner's last resort: attach without that journal.
                self.lose_journal(machine);
            }
            if attempt > 20 {
                return Err("attaching does not succeed".into());
            }
            if self.dice.one_in(self.settings.power_cut_odds) {
                self.cut_power(machine);
            }
            self.between_lives();
        }
        Ok(())
    }

    /// Attaches on a machine other than the last one and accepts no loss: the attach is refused, or
    /// nothing is lost. Returns whether the volume is there now.
    pub(super) fn try_elsewhere(&mut self, machine: &mut usize) -> Result<bool, String> {
        let elsewhere = (*machine + 1) % MACHINES;
        self.free_lock(elsewhere)?;
        self.log("elsewhere", || format!("machine {elsewhere} attaches, and accepts no loss"));
        let outdated: Vec<_> = self.machines.iter().map(|place| place.outdated).collect();
        match self.try_attach(elsewhere, JournalLoss::Refused, AttachFaults::None) {
            Some(Ok(process)) => {
                *machine = elsewhere;
                self.attached(process).map(|()| true)
            }
            Some(Err((kind, text))) => {
                self.log("refused", || format!("  refused: {text}"));
                let is_reason = matches!(kind, ErrorKind::Refused | ErrorKind::Corrupt);
                if !(is_reason && outdated[elsewhere]) {
                    return Err(format!("the attach elsewhere was refused: {text}"));
                }
                if kind == ErrorKind::Refused {
                    // A refused attach has changed nothing.
                    for (place, outdated) in self.machines.iter_mut().zip(outdated) {
                        place.outdated = outdated;
                    }
                }
                Ok(false)
            }
            None => Ok(false),
        }
    }

    fn store_misleads(&self) -> bool {
        self.settings.store.garble_odds + self.settings.store.lag_odds > 0
    }

    pub(super) fn has_disk_faults(&self) -> bool {
        self.settings.disk != DiskFaults::default() || self.settings.rot_odds > 0
    }

    /// One attempt; `None` when the process died in it.
    pub(super) fn try_attach(
        &mut self,
        machine: usize,
        journal_loss: JournalLoss,
        faults: AttachFaults,
    ) -> Option<Result<Process, (ErrorKind, String)>> {
        let life = Arc::new(Life::default());
        let (world, store) = self.world_and_store(machine, &life, faults);
        let mut options = self.options(machine, journal_loss);
        options.cache = self.cache(machine, &*world);
        let cache = options.cache.clone();
        let from_store = self.machines[machine].media.get(&journal_path()).is_none();
        let dies_next = std::mem::take(&mut self.dies_next);
        if dies_next > 0 {
            life.dies_after(dies_next);
        } else if faults == AttachFaults::Usual
            && self.dice.one_in(self.settings.die_at_io_odds * 2)
        {
            life.dies_after(1 + self.dice.below(60));
        }
        let shared: Arc<dyn ObjectStore> = store.clone();
        let opened = live(|| SteppedVolume::open(world, shared, NAME, &options));
        life.lives_on();
        let Some(opened) = opened else {
            self.log("died", || "  the process dies while it attaches".into());
            life.die();
            store.end_calls(|_| CallFate::roll(&mut self.dice));
            return None;
        };
        // This attempt's calls, including those that take effect later, may outdate another
        // machine's journal.
        for (number, other) in self.machines.iter_mut().enumerate() {
            other.outdated |= number != machine;
        }
        Some(match opened {
            Ok(stepped) => {
                store.set_at_once(false);
                life.begin_count();
                let client = Client::default();
                Ok(Process {
                    machine,
                    stepped,
                    store,
                    life,
                    client,
                    replaced_at: None,
                    closing: false,
                    from_store,
                    order: None,
                    cache,
                })
            }
            Err(error) => {
                life.die();
                Err((error.kind(), error.to_string()))
            }
        })
    }

    /// The machine and the store as one of the machine's processes sees them.
    fn world_and_store(
        &mut self,
        machine: usize,
        life: &Arc<Life>,
        faults: AttachFaults,
    ) -> (Arc<dyn World>, Arc<SimStore>) {
        let (store_faults, disk_faults) = match faults {
            AttachFaults::Usual => (self.settings.store, self.settings.disk),
            AttachFaults::None => Default::default(),
        };
        let place = &self.machines[machine];
        let world = SimWorld::new(
            self.clock.clone(),
            place.media.clone(),
            life.clone(),
            self.trace.clone(),
            disk_faults,
            self.dice.split(4),
        );
        let world: Arc<dyn World> = Arc::new(world.with_wall_clock(place.ahead_ms.clone()));
        let store = Arc::new(SimStore::new(
            self.bucket.clone(),
            life.clone(),
            self.trace.clone(),
            store_faults,
            self.dice.split(5),
        ));
        (world, store)
    }

    /// A read cache on a disk with arbitrary content.
    pub(super) fn cache(&self, machine: usize, world: &dyn World) -> Option<Arc<ReadCache>> {
        let cache_bytes = self.settings.cache_bytes;
        if cache_bytes == 0 {
            return None;
        }
        let media = &self.machines[machine].media;
        if media.get(&cache_path()).is_none() {
            media.set(&cache_path(), Some(Medium::blank(cache_bytes)));
        }
        let disk = world.disks().open(&cache_path()).ok()?;
        let options = CacheOptions { cache_bytes, frame_bytes: FRAME_BYTES };
        let index =
            self.settings.edges.warm_cache.then(|| self.machines[machine].index_path.clone());
        Some(Arc::new(ReadCache::open(disk, index, options)))
    }

    pub(super) fn options(&self, machine: usize, journal_loss: JournalLoss) -> OpenOptions {
        let place = &self.machines[machine];
        let mut options = OpenOptions::new(journal_path());
        options.journal_bytes = self.settings.journal_bytes;
        options.staging_bytes = self.settings.staging_bytes;
        options.staging_folder.clone_from(&place.staging);
        options.accept_journal_loss = journal_loss == JournalLoss::Accepted;
        options.accept_memory_loss = place.accepts_memory_loss;
        options.no_fencing = true;
        options.segment_age_max = Duration::from_millis(self.settings.segment_age_ms);
        options.log_age_max = Duration::from_millis(self.settings.log_age_ms);
        options.checkpoint_bytes = self.settings.checkpoint_bytes;
        options.uploads_max = self.settings.uploads_max;
        options.gc = self.settings.gc;
        options
    }

    /// An attach succeeded: checks that the content it found is legal.
    pub(super) fn attached(&mut self, mut process: Process) -> Verdict {
        self.story.lives += 1;
        let machine = process.machine;
        for (number, place) in self.machines.iter_mut().enumerate() {
            place.outdated = number != machine;
            if number == machine {
                (place.has_lost_memory, place.accepts_memory_loss) = (false, false);
            }
            if number == machine && self.dice.one_in(4) {
                place.old_image = place.media.get(&journal_path()).map(|medium| medium.copy());
            }
        }
        self.note_what_was_dropped(machine);
        self.check_size(&process)?;
        let found = self.read_all(&mut process)?;
        let count = match process.from_store {
            true => self.oracle.opened_from_store(self.loss, &found)?,
            false => self.oracle.opened(self.loss, &found)?,
        };
        self.log("found", || format!("  attached: {count} operations are there"));
        self.copied = self.copied.min(count);
        self.past.cut_to(count);
        self.loss = Loss::Process;
        if let Some(mut old) = self.process.take() {
            old.replaced_at = Some(count);
            self.end_zombie();
            self.zombie = Some(old);
        }
        self.process = Some(process);
        Ok(())
    }

    /// A disk that drops data which reads had returned loses what memory no longer holds, as a
    /// power cut does.
    pub(super) fn note_what_was_dropped(&mut self, machine: usize) {
        let medium = self.machines[machine].media.get(&journal_path());
        if medium.is_some_and(|medium| medium.has_dropped()) && self.loss == Loss::Process {
            self.loss = Loss::Power;
        }
    }

    /// Checks that the size is between the one last reported and the largest one requested.
    fn check_size(&mut self, process: &Process) -> Verdict {
        let disk_bytes = process.stepped.volume().geometry().size_bytes;
        if disk_bytes < self.size_bytes || disk_bytes > self.requested_bytes {
            let (reported_bytes, requested_bytes) = (self.size_bytes, self.requested_bytes);
            return Err(format!(
                "the disk has {disk_bytes} bytes; {reported_bytes} were reported, and \
                 {requested_bytes} asked for"
            ));
        }
        self.size_bytes = disk_bytes;
        Ok(())
    }

    /// Reads the whole volume through the device, as any client would.
    pub(super) fn read_all(&mut self, process: &mut Process) -> Result<Vec<u8>, String> {
        let mut client = Client::default();
        process.life.spare(true);
        client.read_whole(process.stepped.volume());
        for _ in 0..ROUNDS_MAX {
            if let Some(outcome) = client.padded_answer(self.settings.size_bytes) {
                process.life.spare(false);
                return outcome;
            }
            self.round(process);
        }
        Err("reading the whole volume does not end".into())
    }
}
