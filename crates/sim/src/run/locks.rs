//! Two processes on one machine: the second one is refused, by any path, and changes nothing; when
//! the first has died, the machine is free.
//!
//! Not here: the locks themselves (`crate::locks`); a writer that is taken over from another
//! machine (`ends`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_device::ErrorKind;
use sawmill_volume::{OpenOptions, SteppedVolume};

use super::{JournalLoss, NAME, SeedRun, Verdict, journal_path};
use crate::death::Life;
use crate::disk::DiskFaults;
use crate::store::{SimStore, StoreFaults};
use crate::world::SimWorld;

impl SeedRun {
    /// A replaced process that still lives holds the lock of its machine: stops it before another
    /// one starts there.
    pub(super) fn free_lock(&mut self, machine: usize) -> Verdict {
        let is_there =
            |zombie: &super::Process| zombie.machine == machine && !zombie.life.is_dead();
        if self.settings.edges.locks && self.zombie.as_ref().is_some_and(is_there) {
            self.require_in_use(machine, &journal_path())?;
            self.end_zombie();
        }
        Ok(())
    }

    /// Starts a second process on the machine of the first.
    pub(super) fn attach_beside(&mut self) -> Verdict {
        let Some(process) = &self.process else { return Ok(()) };
        if process.life.is_dead() || process.replaced_at.is_some() {
            return Ok(());
        }
        let machine = process.machine;
        if self.edges.dice.one_in(2) {
            return self.require_in_use(machine, &journal_path());
        }
        // A link: another path to the same medium.
        let link = PathBuf::from("/link");
        let media = self.machines[machine].media.clone();
        media.set(&link, media.get(&journal_path()));
        let refused = self.require_in_use(machine, &link);
        media.set(&link, None);
        refused
    }

    fn require_in_use(&mut self, machine: usize, path: &Path) -> Verdict {
        self.log("attach beside", || {
            format!("  somebody attaches beside, with {}", path.display())
        });
        let life = Arc::new(Life::default());
        let dice = &mut self.edges.dice;
        let world = SimWorld::new(
            self.clock.clone(),
            self.machines[machine].media.clone(),
            life.clone(),
            self.trace.clone(),
            DiskFaults::default(),
            dice.split(1),
        );
        let (faults, bucket) = (StoreFaults::default(), self.bucket.clone());
        let store = SimStore::new(bucket, life.clone(), self.trace.clone(), faults, dice.split(2));
        let journal_loss = JournalLoss::accepted_if(dice.one_in(2));
        let options =
            OpenOptions { journal_path: path.to_owned(), ..self.options(machine, journal_loss) };
        let opened = SteppedVolume::open(Arc::new(world), Arc::new(store), NAME, &options);
        life.die();
        match opened {
            Err(error) if error.kind() == ErrorKind::InUse => {
                self.story.refused_beside += 1;
                Ok(())
            }
            Err(error) => Err(format!("who attaches beside a process that lives hears: {error}")),
            Ok(_) => Err("two processes on one machine have one journal".into()),
        }
    }
}
