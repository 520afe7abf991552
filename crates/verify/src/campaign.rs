//! One campaign: turns one cut after another into an image, inspects it, and records the result.
//!
//! Not here: how a device or a file system is inspected, which the caller provides.

use crate::Result;
use crate::image::Image;
use crate::plan::{Budget, plan};
use crate::power_cut::{PowerCut, Replay};
use crate::recording::Recording;
use crate::report::{Finding, Report};
use crate::subject::{RecoveryMode, Remains};
use sawmill_testkit::Dice;

/// What is cut, and how.
pub struct Campaign<'a> {
    /// The recording in which power fails.
    pub recording: &'a Recording,
    /// What the device held before it.
    pub before: Image,
    /// The first entry before which power may fail.
    pub first: usize,
    /// The ways in which the device comes back, in turn.
    pub modes: &'a [RecoveryMode],
    /// How much to inspect.
    pub budget: Budget,
}

impl Campaign<'_> {
    /// Calls `check` with what is left after each cut of the plan; its inner `Err` is a finding.
    pub fn run(
        self,
        mut progress: impl FnMut(usize, usize),
        mut check: impl FnMut(&Remains<'_>) -> Result<Result<(), String>>,
    ) -> Result<Report> {
        let plan = plan(self.recording, self.first, &self.budget);
        let mut report = Report::new(self.recording, &plan);
        let before = self.before;
        let mut replay = Replay::new(self.recording, before.clone());
        let mut older: Option<(usize, Image)> = None;
        // Other dice than those of the plan, so that the choice of stale disks does not follow the
        // choice of cuts.
        let mut dice = Dice::new(self.budget.seed ^ 0x57a1e);
        for (number, cut) in plan.cuts.iter().enumerate() {
            progress(number, plan.cuts.len());
            let disk = replay.image(cut)?;
            let mode = self.modes[number % self.modes.len()];
            let (of, stale) = older.get_or_insert_with(|| (0, before.clone()));
            let stale_of = (mode == RecoveryMode::DiskStale).then_some(*of);
            let remaining_disk = if stale_of.is_some() { &*stale } else { &disk };
            report.images += 1;
            report.count(mode);
            if let Err(what) = check(&Remains { cut, disk: remaining_disk, mode })? {
                report.findings.push(Finding { cut: cut.clone(), mode, stale_of, what });
            }
            // A stale disk comes from a cut some way back.
            if dice.one_in(8) {
                older = Some((cut.entry, replay.image(&PowerCut::whole(cut.entry))?));
            }
        }
        Ok(report)
    }
}
