//! Another process opens the volume read-only and reads it some time later: the content is a prefix
//! with everything that was stored at the open. Also the check of everything that is kept.
//!
//! Not here: reads of a replica (`copies`), at snapshots and moments (`past`).

use std::sync::Arc;

use sawmill_volume::check::check;
use sawmill_volume::{OpenOptions, SteppedVolume, find};

use super::{NAME, ROUNDS_MAX, SeedRun, Verdict, journal_path};
use crate::client::Client;
use crate::death::Life;
use crate::disk::DiskFaults;
use crate::oracle::Loss;
use crate::store::{SimStore, StoreFaults};
use crate::world::{MachineMedia, SimWorld};

/// An open reader of the store.
pub(super) struct Reader {
    stepped: SteppedVolume,
    store: Arc<SimStore>,
    /// Operations that were stored when it was opened.
    least: usize,
}

impl SeedRun {
    /// Checks the volume and its clones, of which nothing was damaged in the store.
    pub(super) fn check_all(&mut self) -> Verdict {
        let (_, store) = self.faultless_process();
        let clones = self.past.clones.iter().map(|kept| kept.name.as_str());
        for name in std::iter::once(NAME).chain(clones) {
            let record =
                find(&*store, name).map_err(|error| format!("{name} is not found: {error}"))?;
            let report = check(&*store, &record, &mut |_, _| ())
                .map_err(|error| format!("{name} cannot be checked: {error}"))?;
            if let Some(damage) = report.damage.first() {
                return Err(format!("a check of {name} finds damage: {damage}"));
            }
        }
        Ok(())
    }

    /// Opens a reader, or reads with the open one and closes it.
    pub(super) fn use_reader(&mut self) -> Verdict {
        match self.reader.take() {
            Some(reader) => self.close_reader(reader),
            None => self.open_reader(),
        }
    }

    fn open_reader(&mut self) -> Verdict {
        let life = Arc::new(Life::default());
        let world = SimWorld::new(
            self.clock.clone(),
            MachineMedia::default(),
            life.clone(),
            self.trace.clone(),
            DiskFaults::default(),
            self.dice.split(8),
        );
        // A list that hides every checkpoint would be a reason to fail.
        let faults = StoreFaults::default();
        let store = SimStore::new(
            self.bucket.clone(),
            life,
            self.trace.clone(),
            faults,
            self.dice.split(9),
        );
        let store = Arc::new(store);
        let mut options = OpenOptions::new(journal_path());
        options.read_only = true;
        self.log("look", || "somebody opens the volume to read".into());
        let stepped = SteppedVolume::open(Arc::new(world), store.clone(), NAME, &options)
            .map_err(|error| format!("opening to read was refused: {error}"))?;
        self.reader = Some(Reader { stepped, store, least: self.oracle.bound(Loss::Journal) });
        Ok(())
    }

    fn close_reader(&mut self, mut reader: Reader) -> Verdict {
        self.story.read_only_opens += 1;
        let mut client = Client::default();
        client.read_whole(reader.stepped.volume());
        for _ in 0..ROUNDS_MAX {
            if let Some(found) = client.whole_answer() {
                // The volume may have grown since; the reader does not see the new part.
                let count = self.oracle.check_view(reader.least, &found?)?;
                self.log("seen", || format!("who reads sees {count} operations"));
                return Ok(());
            }
            reader.stepped.step_engine(self.clock.now());
            for _ in 0..reader.store.waiting() {
                reader.store.happen(0);
            }
        }
        Err("who only reads gets no answer".into())
    }
}
