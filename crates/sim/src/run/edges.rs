//! When edges occur: beside a living process, and between two lives.
//!
//! Not here: which edges a seed has ([`crate::edges`]), and what they do (their own files beside
//! this one).

use std::path::{Path, PathBuf};

use super::{SeedRun, Verdict, foreign, histories};
use crate::names;
use sawmill_testkit::Dice;

/// One step in so many meets an edge.
const STEP_ODDS: u64 = 40;
const PURPOSE: u64 = 0xed9e_5000_0000_0002;

/// The state of a run's edges.
pub(super) struct EdgeState {
    pub(super) dice: Dice,
    pub(super) place: PathBuf,
    pub(super) histories: histories::Histories,
    pub(super) memory: Option<foreign::Image>,
}

impl EdgeState {
    /// With dice that depend on the run's dice and do not change them.
    pub(super) fn new(dice: &Dice, place: &Path) -> Result<Self, String> {
        Ok(EdgeState {
            dice: dice.clone().split(PURPOSE),
            place: place.to_owned(),
            histories: histories::Histories::new(place)?,
            memory: None,
        })
    }
}

impl SeedRun {
    fn meets_one_in(&mut self, odds: u64) -> bool {
        self.edges.dice.one_in(odds)
    }

    /// Meets edges beside the attached process.
    pub(super) fn meet_edges(&mut self) -> Verdict {
        let edges = self.settings.edges;
        if edges.locks && self.meets_one_in(STEP_ODDS) {
            self.attach_beside()?;
        }
        if edges.foreign_memory && self.meets_one_in(STEP_ODDS) {
            self.keep_memory();
        }
        if edges.histories && self.meets_one_in(STEP_ODDS) {
            self.back_up();
        }
        if edges.warm_cache && self.meets_one_in(STEP_ODDS / 4) {
            self.save_index();
        }
        if edges.hand_offs && self.meets_one_in(STEP_ODDS) {
            self.hand_off()?;
        }
        Ok(())
    }

    /// Meets edges between lives: only a process that will be replaced may be attached.
    pub(super) fn meet_edges_between(&mut self, machine: usize) -> Verdict {
        let edges = self.settings.edges;
        if self.process.is_some() {
            return Ok(());
        }
        if edges.histories && self.meets_one_in(4) {
            // It may have been closed cleanly.
            self.back_up();
        }
        if edges.foreign_memory && self.meets_one_in(2) {
            self.exchange_memory(machine)?;
        }
        if edges.commands && self.meets_one_in(2) {
            self.command_at_rest(machine)?;
        }
        if edges.histories && self.meets_one_in(2) {
            self.live_in_a_copy(machine)?;
        }
        if edges.histories && self.meets_one_in(4) {
            self.restore(machine)?;
        }
        Ok(())
    }

    /// The final checks of the edges.
    pub(super) fn end_edges(&mut self) -> Verdict {
        if self.settings.edges.histories {
            self.end_copy()?;
        }
        if self.settings.edges.names {
            self.story.name_acts += names::play(&mut self.edges.dice, &self.clock, &self.trace)?;
        }
        Ok(())
    }

    /// The index of the read cache is saved, as a server does now and then.
    pub(super) fn save_index(&mut self) {
        if let Some(cache) = self.process.as_ref().and_then(|process| process.cache.as_ref()) {
            let _ = cache.save_index();
        }
    }
}
