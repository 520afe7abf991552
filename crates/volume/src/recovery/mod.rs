//! Finds the stored part of a volume: newest checkpoint, its map, roll forward over the log after
//! it. Recovery reads; it deletes nothing. The journal's part is in `open`.
//!
//! Invariants: "not found" and "could not ask" are never confused; a missing segment ends the log
//! only above every mark; damage stops everything and names the object.

use std::time::Duration;

use crate::world::World;

pub(crate) mod apply;
pub(crate) mod cases;
pub(crate) mod checkpoint;
pub(crate) mod end;
#[cfg(test)]
mod equivalence_tests;
pub(crate) mod map_hold;
#[cfg(test)]
mod map_hold_tests;
pub(crate) mod map_load;
pub(crate) mod roll_forward;
pub(crate) mod stored;

/// The steps of recovery that are reported. Each is taken once, in this order, unless the writer is
/// still active: then the attach starts over. A state of the past ends with [`RecoveryStep::Cut`],
/// and a volume that is opened for reading with [`RecoveryStep::RollForward`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryStep {
    /// The volume's record is read.
    VolumeRecord,
    /// The newest checkpoint that can be read is found.
    NewestCheckpoint,
    /// Its map is loaded.
    Map,
    /// The log after it is entered into the map.
    RollForward,
    /// The state of the past is reached.
    Cut,
    /// The journal and the staging memory are compared with the log.
    Journal,
    /// The writer advanced while the fence was put: the attach starts over.
    Again,
    /// The fence is put, and the checkpoint repeated.
    Fence,
    /// The journal is bound to the new epoch, and its records wait to be stored.
    Replay,
}

impl RecoveryStep {
    #[cfg(test)]
    const ALL: [RecoveryStep; 9] = [
        RecoveryStep::VolumeRecord,
        RecoveryStep::NewestCheckpoint,
        RecoveryStep::Map,
        RecoveryStep::RollForward,
        RecoveryStep::Cut,
        RecoveryStep::Journal,
        RecoveryStep::Again,
        RecoveryStep::Fence,
        RecoveryStep::Replay,
    ];

    /// Its name in reports and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            RecoveryStep::VolumeRecord => "volume record",
            RecoveryStep::NewestCheckpoint => "newest checkpoint",
            RecoveryStep::Map => "map",
            RecoveryStep::RollForward => "roll forward",
            RecoveryStep::Cut => "cut",
            RecoveryStep::Journal => "journal",
            RecoveryStep::Again => "again",
            RecoveryStep::Fence => "fence",
            RecoveryStep::Replay => "replay",
        }
    }
}

/// One step of recovery, as it happened.
#[derive(Clone, Debug)]
pub struct RecoveryStepReport {
    /// Which step.
    pub step: RecoveryStep,
    /// What was found, with counts.
    pub detail: String,
    /// How long it took.
    pub took: Duration,
}

/// The steps of recovery, in order.
#[derive(Clone, Debug, Default)]
pub struct RecoveryReport {
    /// Each step that was taken.
    pub steps: Vec<RecoveryStepReport>,
}

/// Writes the report while recovery goes on.
pub(crate) struct Reporter<'a> {
    world: &'a dyn World,
    since: Duration,
    pub(crate) report: RecoveryReport,
}

impl<'a> Reporter<'a> {
    pub(crate) fn new(world: &'a dyn World) -> Self {
        Reporter { world, since: world.now(), report: RecoveryReport::default() }
    }

    /// A step has ended.
    pub(crate) fn step(&mut self, step: RecoveryStep, detail: String) {
        let now = self.world.now();
        let took = now.saturating_sub(self.since);
        tracing::debug!("recovery: {}: {detail} ({took:?})", step.name());
        self.report.steps.push(RecoveryStepReport { step, detail, took });
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_architecture_lists_the_steps_of_recovery_in_order() {
        let page = include_str!("../../../../ARCHITECTURE.md");
        let section = page.split("\n## Recovery\n").nth(1).expect("the page has the section");
        let section = section.split("\n## ").next().unwrap_or_default();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| "));
        let listed: Vec<&str> = rows.filter_map(|row| row.split(" |").next()).skip(1).collect();
        // What happens only now and then is in the text below the table.
        let (aside, usual): (Vec<RecoveryStep>, Vec<RecoveryStep>) = RecoveryStep::ALL
            .into_iter()
            .partition(|step| matches!(step, RecoveryStep::Cut | RecoveryStep::Again));
        assert_eq!(listed, usual.into_iter().map(RecoveryStep::name).collect::<Vec<_>>());
        assert!(aside.iter().all(|step| section.contains(&format!("`{}`", step.name()))));
    }
}
