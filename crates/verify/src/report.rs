//! What a check found: figures, and each finding with what is needed to reproduce it. Not here: how
//! it is printed (`crates/lab/src/verify_crash`), what a crashed server did wrong (`crash`).

use std::collections::BTreeMap;

use sawmill_format::write_log::Flags;

use crate::plan::CutPlan;
use crate::power_cut::PowerCut;
use crate::recording::Recording;
use crate::subject::RecoveryMode;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Where power failed, and what was left of the disk.
    pub cut: PowerCut,
    /// How the device came back.
    pub mode: RecoveryMode,
    /// Of a stale disk: the entry before which it was kept, whole.
    pub stale_of: Option<usize>,
    /// What is wrong then.
    pub what: String,
}

/// The outcome of a check.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Entries of the recording.
    pub entries: usize,
    /// Entries that are writes with data.
    pub writes: usize,
    /// Entries that flush, alone or with data.
    pub flushes: usize,
    /// Writes with FUA among them.
    pub fua: usize,
    /// Entries that are discards.
    pub discards: usize,
    /// Different points between two entries at which power failed.
    pub points: usize,
    /// Legal cuts of the kinds that are tried, except random subsets.
    pub legal: usize,
    /// Images made and checked.
    pub images: usize,
    /// How often the device came back in each way.
    pub mode_counts: BTreeMap<&'static str, usize>,
    /// What is wrong; empty when all is well.
    pub findings: Vec<Finding>,
}

impl Report {
    /// A report about a recording of which nothing is checked yet.
    #[must_use]
    pub fn new(recording: &Recording, plan: &CutPlan) -> Self {
        let count = |flag: Flags| {
            recording.entries.iter().filter(|recorded| recorded.entry.flags.has(flag)).count()
        };
        let is_quiet = |flags: Flags| flags.has(Flags::MARK) || flags.has(Flags::DISCARD);
        let is_write = |recorded: &&crate::recording::RecordedEntry| {
            recorded.entry.sector_count > 0 && !is_quiet(recorded.entry.flags)
        };
        Report {
            entries: recording.entries.len(),
            writes: recording.entries.iter().filter(is_write).count(),
            flushes: count(Flags::FLUSH),
            fua: count(Flags::FUA),
            discards: count(Flags::DISCARD),
            points: plan.points,
            legal: plan.legal,
            ..Report::default()
        }
    }

    /// Counts one image that was checked.
    pub fn count(&mut self, mode: RecoveryMode) {
        *self.mode_counts.entry(mode.name()).or_default() += 1;
    }
}
