//! Edges of the world: rare events whose mishandling loses data for good.
//!
//! Invariant: seeds below [`EDGES_FROM`] meet no edge and keep their meaning. From there on, one
//! seed in four meets each edge. An edge has its own dice, so that it does not change seeds that do
//! not meet it.
//!
//! Not here: what happens at an edge (`run/locks`, `run/histories`, `run/foreign`, `run/handoff`,
//! `run/commands`, `names`; faults of disks and stores: `disk`, `store`).

use crate::settings::{Edges, Settings};
use sawmill_testkit::Dice;

/// The first seed that may meet an edge.
pub const EDGES_FROM: u64 = 10_000_000;
/// The first seed whose journals may be synced without a flush.
pub const LOG_AGES_FROM: u64 = 160_000_000;
/// One seed in so many meets an edge.
const EDGE_ODDS: u64 = 4;
const PURPOSE: u64 = 0xed9e_5000_0000_0001;
const LOG_AGE_PURPOSE: u64 = 0xed9e_5000_0000_0002;

impl Settings {
    /// The settings of a seed's world, and the dice that play it.
    #[must_use]
    pub fn of_seed(seed: u64) -> (Settings, Dice) {
        let mut dice = Dice::new(seed);
        let mut settings = Settings::of(&mut dice);
        if seed >= EDGES_FROM {
            settings.add_edges(&mut Dice::new(seed ^ PURPOSE));
        }
        if seed >= LOG_AGES_FROM {
            settings.log_age_ms = *Dice::new(seed ^ LOG_AGE_PURPOSE).pick(&[0, 1, 20]);
        }
        (settings, dice)
    }

    fn add_edges(&mut self, dice: &mut Dice) {
        let mut is_met = || dice.one_in(EDGE_ODDS);
        let (locks, histories, warm_cache) = (is_met(), is_met(), is_met());
        let (foreign_memory, hand_offs, commands) = (is_met(), is_met(), is_met());
        let (names, deletes_half, short_writes, lies) = (is_met(), is_met(), is_met(), is_met());
        let warm_cache = warm_cache || histories;
        self.edges =
            Edges { locks, histories, warm_cache, foreign_memory, hand_offs, commands, names };
        if warm_cache && self.cache_bytes == 0 {
            self.cache_bytes = *dice.pick(&[32 << 10, 256 << 10]);
        }
        if histories {
            // Snapshots and clones are checked against a single history.
            (self.past_odds, self.copy_odds, self.reader_odds, self.jump_odds) = (0, 0, 0, 0);
            self.first_bytes = self.size_bytes;
        }
        if deletes_half {
            self.store.half_odds = *dice.pick(&[2, 8]);
            self.store.ghost_odds = *dice.pick(&[0, 2, 4]);
        }
        if short_writes {
            self.disk.write_odds = *dice.pick(&[40, 120]);
            self.disk.short_odds = *dice.pick(&[1, 2]);
            self.disk.full_odds = *dice.pick(&[0, 2]);
        }
        if lies && !short_writes {
            self.disk.lie_odds = *dice.pick(&[4, 20]);
            // A failed sync would immediately drop data for which a lying sync reported success.
            self.disk.sync_odds = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_of_before_meets_no_edge_and_one_in_four_of_the_others_meets_each() {
        for seed in (1..2000).chain(EDGES_FROM - 2000..EDGES_FROM) {
            assert_eq!(Settings::of_seed(seed).0.edges, Edges::default());
        }
        let edge_sets: Vec<Edges> =
            (EDGES_FROM..EDGES_FROM + 2000).map(|seed| Settings::of_seed(seed).0.edges).collect();
        let count =
            |is_met: fn(&Edges) -> bool| edge_sets.iter().filter(|edges| is_met(edges)).count();
        for count in [
            count(|edges| edges.locks),
            count(|edges| edges.histories),
            count(|edges| edges.foreign_memory),
            count(|edges| edges.hand_offs),
            count(|edges| edges.commands),
            count(|edges| edges.names),
        ] {
            assert!((400..600).contains(&count), "{count} of 2000");
        }
    }
}
