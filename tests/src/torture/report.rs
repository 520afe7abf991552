//! The results of a run, and their text.
//!
//! Not here: what counts as a broken promise (the modules that check).

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::commits::LoadCounts;
use crate::proxy::Counts;
use crate::stamp::Verdict;

/// The results so far.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Volumes begun.
    pub volumes: u64,
    /// Servers that got ready.
    pub lives: u64,
    /// `kill -9`s, also of servers that were still starting.
    pub kills: u64,
    /// Other actions to the volumes and around them, by name.
    pub actions: BTreeMap<&'static str, u64>,
    /// Starts that gave up during faults, by exit code; each was tried again without.
    pub refused_starts: BTreeMap<i32, u64>,
    /// The output of starts that were refused, not only failed: a user would ask why.
    pub refusals: Vec<String>,
    /// The load.
    pub counts: LoadCounts,
    /// Over all judgments: writes that had to survive, that did, and that were lost legally.
    pub verdict: Verdict,
    /// The longest life: a stall of the machine, or of the server under test.
    pub slowest_life: Duration,
    /// The faults of the store.
    pub faults: Counts,
    /// Broken promises.
    pub violations: Vec<String>,
}

impl Report {
    /// Counts an action.
    pub(super) fn did(&mut self, name: &'static str) {
        *self.actions.entry(name).or_default() += 1;
    }

    /// The number of times an action was done.
    #[must_use]
    pub fn times(&self, name: &str) -> u64 {
        self.actions.get(name).copied().unwrap_or(0)
    }

    /// The number of actions whose name begins with `begin`.
    #[must_use]
    pub fn times_of_all(&self, begin: &str) -> u64 {
        self.actions
            .iter()
            .filter(|(name, _)| name.starts_with(begin))
            .map(|(_, times)| times)
            .sum()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { volumes, lives, kills, refused_starts, counts, verdict, .. } = self;
        writeln!(
            f,
            "{volumes} volumes, {lives} lives (the longest {} s), {kills} kills, refused starts by \
             exit code {refused_starts:?}",
            self.slowest_life.as_secs()
        )?;
        let actions: Vec<String> =
            self.actions.iter().map(|(name, times)| format!("{name} {times}")).collect();
        writeln!(f, "{}", actions.join(", "))?;
        writeln!(
            f,
            "{} writes, {} flushes and FUA, {} reads, {} read errors, {} refused to who was \
             fenced; judged: {} writes demanded, {} kept, {} lost rightly",
            counts.writes,
            counts.commits,
            counts.reads,
            counts.read_errors,
            counts.refused,
            verdict.demanded,
            verdict.kept,
            verdict.lost
        )?;
        writeln!(f, "{}", self.faults)?;
        for refusal in &self.refusals {
            writeln!(f, "refused during faults: {refusal}")?;
        }
        write!(f, "{} violations", self.violations.len())?;
        for violation in &self.violations {
            write!(f, "\n  {violation}")?;
        }
        Ok(())
    }
}
