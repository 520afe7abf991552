//! Attaches a volume for writing: finds the end of its log, judges the journal, fences other
//! writers, and binds the journal to the new epoch.
//!
//! What does not depend on each other is asked of the store at once: users wait for each answer.
//!
//! What the store and the journal hold is judged before anything of the volume is changed:
//! checkpoint, roll forward, journal and scan only read. Then: intent (in the journal) -> fence (in
//! the store) -> the checkpoint repeated under the next number (`repeat`) -> journal bound to the
//! new epoch. The next attach handles a crash between any two of these: the intent tells it that
//! the fence was ours.
//!
//! Not here: opening for reading, the replay into the maps and the start of the loops
//! (`crate::volume`).

use sawmill_store::ObjectStore;

use crate::Result;
use crate::names;
use crate::options::OpenOptions;
use crate::recovery::{RecoveryReport, RecoveryStep, Reporter};
use crate::world::World;

mod attach;
mod bind;
pub(crate) mod journal;
mod loss;
mod make;
mod memory;
mod newest_seen;
mod repeat;
mod settle;
mod undisturbed;

pub(crate) use attach::{AttachState, attach};
pub(crate) use memory::spare_path;
pub use newest_seen::{Age, age_of};

/// What attaching would find, without changing anything.
pub(crate) fn dry_run(
    store: &dyn ObjectStore,
    name: &str,
    journal: Option<&OpenOptions>,
    world: &dyn World,
) -> Result<RecoveryReport> {
    let mut reporter = Reporter::new(world);
    let stored = names::stored(store, name, &mut reporter)?;
    if let Some(options) = journal {
        match journal::judge(&stored, options, world) {
            Ok(judged) => reporter.step(RecoveryStep::Journal, judged.describe()),
            Err(error) => reporter.step(RecoveryStep::Journal, format!("would stop: {error}")),
        }
    }
    Ok(reporter.report)
}
