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
pub(crate) mod roll_forward;
pub(crate) mod stored;

/// One step of recovery, as it happened.
#[derive(Clone, Debug)]
pub struct RecoveryStep {
    /// Which step.
    pub name: &'static str,
    /// What was found, with counts.
    pub detail: String,
    /// How long it took.
    pub took: Duration,
}

/// The steps of recovery, in order.
#[derive(Clone, Debug, Default)]
pub struct RecoveryReport {
    /// See [`RecoveryStep`].
    pub steps: Vec<RecoveryStep>,
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
    pub(crate) fn step(&mut self, name: &'static str, detail: String) {
        let now = self.world.now();
        let took = now.saturating_sub(self.since);
        tracing::debug!("recovery: {name}: {detail} ({took:?})");
        self.report.steps.push(RecoveryStep { name, detail, took });
        self.since = now;
    }
}
