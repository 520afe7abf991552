//! Finds a short run that breaks the same promise as a given one: disables faults class by class,
//! reduces sizes and lengths, and keeps a world that still breaks with fewer events.
//!
//! Invariant: the returned world was run and did break. Not here: why it breaks.

use std::sync::Arc;

use crate::disk::DiskFaults;
use crate::settings::Edges;
use crate::settings::Settings;
use crate::store::StoreFaults;
use crate::story::Story;
use crate::trace::Trace;
use sawmill_testkit::Dice;

/// Other dice tried for each smaller world.
const DICE_TRIED: u64 = 40;

/// Everything that determines a run.
#[derive(Clone)]
pub struct World {
    /// Its settings.
    pub settings: Settings,
    /// Its dice.
    pub dice: Dice,
}

impl World {
    /// The world of a seed.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        let (settings, dice) = Settings::of_seed(seed);
        World { settings, dice }
    }
}

/// The result of shrinking.
pub struct ShrinkResult {
    /// The smallest world that breaks.
    pub world: World,
    /// Events of its run.
    pub events: u64,
    /// Events of the run it was made from.
    pub events_before: u64,
    /// Runs it took.
    pub runs: u64,
}

/// Shrinks `world`; `None` when it does not break.
pub fn shrink(
    world: World,
    play: impl Fn(&World, Arc<Trace>) -> Result<Story, String>,
) -> Option<ShrinkResult> {
    let breaks = |world: &World| {
        let trace = Arc::new(Trace::default());
        play(world, trace.clone()).is_err().then(|| trace.events())
    };
    let events = breaks(&world)?;
    let mut best = ShrinkResult { world, events, events_before: events, runs: 1 };
    loop {
        let before = best.events;
        for change in CHANGES {
            for number in 0..=DICE_TRIED {
                let mut smaller = best.world.clone();
                change(&mut smaller.settings);
                if number > 0 {
                    smaller.dice = smaller.dice.split(number);
                }
                best.runs += 1;
                if let Some(events) = breaks(&smaller).filter(|events| *events < best.events) {
                    best.world = smaller;
                    best.events = events;
                    break;
                }
            }
        }
        if best.events == before {
            return Some(best);
        }
    }
}

type Change = fn(&mut Settings);

const CHANGES: &[Change] = &[
    |settings| settings.lives = (settings.lives / 2).max(1),
    |settings| settings.lives = (settings.lives - 1).max(1),
    |settings| settings.steps = (settings.steps / 2).max(4),
    |settings| settings.steps = (settings.steps * 3 / 4).max(4),
    |settings| settings.store = StoreFaults::default(),
    |settings| settings.edges = Edges::default(),
    |settings| settings.edges.names = false,
    |settings| settings.edges.commands = false,
    |settings| settings.edges.hand_offs = false,
    |settings| settings.edges.foreign_memory = false,
    |settings| settings.edges.histories = false,
    |settings| settings.edges.locks = false,
    |settings| settings.edges.warm_cache = false,
    |settings| settings.store.garble_odds = 0,
    |settings| settings.store.lag_odds = 0,
    |settings| settings.store.late_odds = 0,
    |settings| settings.store.unheard_odds = 0,
    |settings| settings.store.fail_odds = 0,
    |settings| settings.disk = DiskFaults::default(),
    |settings| settings.disk.lie_odds = 0,
    |settings| settings.rot_odds = 0,
    |settings| settings.reader_odds = 0,
    |settings| settings.copy_odds = 0,
    |settings| settings.die_at_io_odds = 0,
    |settings| settings.takeover_odds = 0,
    |settings| settings.journal_loss_odds = 0,
    |settings| settings.power_cut_odds = 0,
    |settings| settings.memory_loss_odds = 0,
    |settings| settings.close_odds = 0,
    |settings| settings.cache_bytes = 0,
    |settings| settings.write_bytes_max = 700,
    |settings| settings.size_bytes = 16 << 10,
    |settings| settings.uploads_max = 1,
    |settings| settings.checkpoint_bytes = 256 << 10,
    // The same world with other dice.
    |_| {},
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_failure_does_not_need_is_taken_away() {
        let big = (1..).map(World::of).find(|world| {
            let settings = &world.settings;
            settings.power_cut_odds > 0 && settings.lives > 3 && settings.store.late_odds > 0
        });
        // A run breaks if power can fail; each step and each life is an event.
        let play = |world: &World, trace: Arc<Trace>| {
            for _ in 0..world.settings.lives * world.settings.steps {
                trace.note("step", [0, 0], String::new);
            }
            if world.settings.power_cut_odds > 0 {
                Err("broken".into())
            } else {
                Ok(Story::default())
            }
        };
        let found = shrink(big.unwrap(), play).unwrap();
        assert_eq!((found.world.settings.lives, found.world.settings.steps), (1, 4));
        assert!(found.world.settings.power_cut_odds > 0, "that is what breaks it");
        assert!(found.events == 4 && found.events_before > found.events);
    }

    #[test]
    fn a_run_that_keeps_every_promise_is_not_shrunk() {
        assert!(shrink(World::of(1), |_, _| Ok(Story::default())).is_none());
    }
}
