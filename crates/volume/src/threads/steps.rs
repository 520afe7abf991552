//! An open volume without threads: a simulation steps its loops, gives it the time and decides the
//! order of events. The engine is the same; only its caller differs.
//!
//! Invariant: it starts no thread. Jobs of readers and of the collector run on the caller's thread.
//!
//! Not here: the simulated time, disks and store (`crates/sim`).

use std::sync::Arc;
use std::time::Duration;

use sawmill_store::ObjectStore;

use crate::Result;
use crate::options::OpenOptions;
use crate::threads::{Loops, Pause};
use crate::volume::Volume;
use crate::world::World;

/// An open volume whose loops the caller steps.
pub struct SteppedVolume {
    volume: Arc<Volume>,
    loops: Loops,
}

impl SteppedVolume {
    /// Opens volume `name` as [`Volume::open`] does. The store must answer the calls of this
    /// function before they return, or from another thread.
    pub fn open(
        world: Arc<dyn World>,
        store: Arc<dyn ObjectStore>,
        name: &str,
        options: &OpenOptions,
    ) -> Result<Self> {
        let (volume, loops) = Volume::open_stepped(store, name, options, world)?;
        Ok(SteppedVolume { volume, loops })
    }

    /// The volume.
    #[must_use]
    pub fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    /// One step of the journal's loop. Returns whether it did something.
    pub fn step_journal(&mut self) -> bool {
        self.loops.as_mut().is_some_and(|(journal, _)| journal.step() == Pause::No)
    }

    /// One step of the journal's loop, as if time had passed and nothing had arrived: it does its
    /// postponed work.
    pub fn step_journal_quietly(&mut self) -> bool {
        if let Some((journal, _)) = &mut self.loops {
            journal.nothing_came();
        }
        self.step_journal()
    }

    /// One step of the engine's loop, and the jobs that are due. Returns how long it has nothing to
    /// do unless an event comes; `None`: forever.
    pub fn step_engine(&mut self, now: Duration) -> Option<Duration> {
        let stepped = self.loops.as_mut().and_then(|(_, engine)| engine.step(now));
        stepped.into_iter().chain(self.volume.run_later(now)).min()
    }

    /// Takes no more requests and begins to store everything; steps do the rest.
    pub fn begin_close(&self) {
        self.volume.begin_close();
    }

    /// Whether everything is stored, or will never be.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.volume.is_settled()
    }

    /// Ends as [`Volume::close`] does, once [`is_settled`](Self::is_settled).
    pub fn finish_close(mut self) -> Result<()> {
        self.volume.allow_clean();
        while self.step_journal() {}
        if let Some((journal, _)) = &mut self.loops {
            journal.close();
        }
        self.volume.finish_close(true)
    }
}
