//! How lives end: by a clean close, a death, a power cut, the loss of a journal, or a takeover.
//!
//! Invariant: until an attach succeeds, `loss` only grows (process, power, journal): it is the loss
//! that this attach may show. Not here: hand-offs (`handoff`), a restored store (`histories`),
//! foreign memory (`foreign`).

use sawmill_volume::Health;

use super::{
    AttachFaults, JournalLoss, MACHINES, Process, ROUNDS_MAX, SeedRun, Verdict, cache_path,
    journal_path,
};
use crate::disk::Fate;
use crate::oracle::Loss;
use crate::store::CallFate;

impl SeedRun {
    /// A life ends; returns where the next one begins.
    pub(super) fn end(&mut self, machine: usize) -> Result<usize, String> {
        let died = self.process.as_ref().is_none_or(|process| process.life.is_dead());
        if !died && self.dice.one_in(self.settings.close_odds) {
            let closed = self.close_in_peace()?;
            // Without a clean close, the newest writes are in this machine's journal.
            return Ok(if closed { self.dice.below(MACHINES as u64) as usize } else { machine });
        }
        if !died && self.dice.one_in(self.settings.takeover_odds) {
            // The old process continues, and learns of the takeover when it meets the fence.
            self.story.takeovers += 1;
            self.loss = Loss::Journal;
            self.log("takeover", || "another machine takes over".into());
            return Ok((machine + 1) % MACHINES);
        }
        self.die();
        if self.dice.one_in(self.settings.power_cut_odds) {
            self.cut_power(machine);
        } else if self.dice.one_in(self.settings.memory_loss_odds) {
            self.lose_memory_alone(machine);
        }
        if self.dice.one_in(self.settings.journal_loss_odds) {
            self.lose_journal(machine);
        }
        self.between_lives();
        Ok(machine)
    }

    /// Between two lives, time passes and late calls land.
    pub(super) fn between_lives(&mut self) {
        for _ in 0..self.dice.below(4) {
            self.land_late();
        }
        if self.dice.one_in(4) {
            self.bucket.forget_late();
        }
        self.clock.pass(1_000_000);
    }

    pub(super) fn die(&mut self) {
        let Some(process) = self.process.take() else { return };
        self.log("dies", || "the process dies".into());
        self.story.deaths += 1;
        self.kill_process(process);
    }

    pub(super) fn end_zombie(&mut self) {
        if let Some(zombie) = self.zombie.take() {
            self.log("zombie dies", || "the replaced process dies".into());
            self.kill_process(zombie);
        }
    }

    pub(super) fn kill_process(&mut self, process: Process) {
        self.story.add_counters(&process.stepped.volume().status().counters);
        process.life.die();
        process.store.end_calls(|_| CallFate::roll(&mut self.dice));
    }

    pub(super) fn cut_power(&mut self, machine: usize) {
        self.story.power_cuts += 1;
        self.log("power cut", || format!("machine {machine} loses power"));
        let place = &self.machines[machine];
        let has_lied = place.media.get(&journal_path()).is_some_and(|medium| medium.has_lied());
        let manner = self.dice.below(4);
        for medium in place.media.all() {
            let mut dice = self.dice.split(6);
            let mut fates = self.dice.split(7);
            medium.cut_power(&mut dice, |_| match manner {
                0 => Fate::Lost,
                1 => Fate::Kept,
                2 if fates.one_in(2) => Fate::Kept,
                2 => Fate::Lost,
                _ => *fates.pick(&[Fate::Kept, Fate::Lost, Fate::Torn(2), Fate::Torn(10)]),
            });
        }
        self.machines[machine].lose_power();
        if self.loss == Loss::Process {
            self.loss = Loss::Power;
        }
        if has_lied {
            // Flushed data of the journal may be lost: whether detected or not, no more is
            // promised.
            self.machines[machine].outdated = true;
            self.loss = Loss::Journal;
        }
    }

    /// Memory is lost or damaged, and the machine keeps running: an attach must be refused unless
    /// it accepts that.
    pub(super) fn lose_memory_alone(&mut self, machine: usize) {
        let manner = self.dice.below(3);
        self.trace.note("memory lost", [manner, 0], || {
            format!("machine {machine} loses its memory alone")
        });
        let place = &mut self.machines[machine];
        place.has_lost_memory = true;
        match manner {
            0 => place.lose_memory(),
            manner => place.damage_memory(manner == 1),
        }
    }

    /// A byte or sector of a local disk of the attached machine changes by itself. This may lose
    /// what only the journal held, as its loss would, but never stored data, and it must never show
    /// wrong bytes.
    pub(super) fn rot(&mut self) {
        let Some(process) = &self.process else { return };
        let machine = &mut self.machines[process.machine];
        let path = if self.dice.one_in(3) { cache_path() } else { journal_path() };
        let Some(medium) = machine.media.get(&path) else { return };
        let Some(at) = medium.rot(&mut self.dice) else { return };
        self.story.rots += 1;
        if path == journal_path() {
            machine.outdated = true;
            self.loss = Loss::Journal;
        }
        self.log("rots", || format!("{} rots at {at}", path.display()));
    }

    pub(super) fn lose_journal(&mut self, machine: usize) {
        self.story.journals_lost += 1;
        let place = &mut self.machines[machine];
        let image = if self.dice.one_in(2) { place.old_image.take() } else { None };
        self.trace.note("journal lost", [image.is_some().into(), 0], || {
            if image.is_some() {
                "the journal is replaced by an old image".into()
            } else {
                "the journal is lost".into()
            }
        });
        place.media.set(&journal_path(), image);
        place.outdated = true;
        place.lose_power();
        self.loss = Loss::Journal;
    }

    /// Attaches on the first machine and dies at I/O `again`; returns false if it did not get that
    /// far.
    pub(crate) fn attach_dying(&mut self, again: u64) -> Result<bool, String> {
        self.dies_next = again;
        let journal_loss = JournalLoss::accepted_if(self.loss == Loss::Journal);
        match self.try_attach(0, journal_loss, AttachFaults::None) {
            None => Ok(true),
            Some(Ok(process)) => self.attached(process).map(|()| false),
            Some(Err((_, text))) => Err(format!("the attach was refused: {text}")),
        }
    }

    /// The attached process dies; `fate` decides about its calls to the store.
    pub(crate) fn end_process(&mut self, fate: impl FnMut(usize) -> CallFate) {
        if let Some(process) = self.process.take() {
            process.life.die();
            process.store.end_calls(fate);
        }
    }

    /// The first machine loses power.
    pub(crate) fn cut_power_with(&mut self, fate: impl Fn(usize) -> Fate) {
        for medium in self.machines[0].media.all() {
            medium.cut_power(&mut self.dice, &fate);
        }
        self.machines[0].lose_power();
        if self.loss == Loss::Process {
            self.loss = Loss::Power;
        }
    }

    /// The first machine loses its journal and its memory.
    pub(crate) fn lose_everything_local(&mut self) {
        self.machines[0].media.set(&journal_path(), None);
        self.machines[0].outdated = true;
        self.machines[0].lose_power();
        self.loss = Loss::Journal;
    }

    /// All late calls take effect.
    pub(crate) fn land_all(&mut self) {
        while self.bucket.late() > 0 {
            self.bucket.land(0, &self.trace);
        }
    }

    /// Attaches if no process has, closes, and attaches once more; everything must be legal.
    pub(crate) fn finish(&mut self) -> Verdict {
        if self.process.is_none() {
            self.attach(0)?;
        }
        self.close_in_peace()?;
        self.attach(0)?;
        self.close_in_peace().map(drop)
    }

    /// Faults end, everything is stored, the volume is closed; returns false if its disks prevent
    /// that.
    pub(super) fn close_in_peace(&mut self) -> Result<bool, String> {
        let Some(mut process) = self.process.take() else { return Ok(true) };
        self.log("close", || "the volume is closed".into());
        process.store.heal();
        process.life.lives_on();
        process.stepped.begin_close();
        process.closing = true;
        for _ in 0..ROUNDS_MAX {
            if process.stepped.is_settled() {
                break;
            }
            self.round(&mut process);
        }
        self.round(&mut process);
        self.receive_answers(&mut process)?;
        let volume = process.stepped.volume().clone();
        if !process.stepped.is_settled() {
            return Err(format!("closing does not end: {:?}", volume.status()));
        }
        let status = volume.status();
        self.story.add_counters(&status.counters);
        let health = status.health;
        let Process { stepped, store, life, client, machine, .. } = process;
        let closed = stepped.finish_close();
        if closed.is_ok() && client.waiting() > 0 {
            // The close answered every request that waited for room or for the store.
            self.log("unanswered", || {
                format!("  {} requests were answered by the close", client.waiting())
            });
        }
        life.die();
        store.end_calls(|_| CallFate::roll(&mut self.dice));
        match closed {
            Ok(()) => {
                self.story.closes += 1;
                let count = self.oracle.flush_covers();
                self.oracle.note_stored(count);
                if self.dice.one_in(4) {
                    self.lose_journal(machine);
                }
                Ok(true)
            }
            Err(_) if self.has_disk_faults() && matches!(health, Health::Failed { .. }) => {
                Ok(false)
            }
            Err(error) => Err(format!("the close failed: {error}")),
        }
    }
}
