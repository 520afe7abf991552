//! The engine keeps its promises in thousands of simulated worlds, and in all small ones.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use sawmill_sim::edges::{EDGES_FROM, LOG_AGES_FROM};
use sawmill_sim::exhaustive::{SCRIPTS, explore, explore_orders};
use sawmill_sim::run::run;
use sawmill_sim::story::Story;
use sawmill_sim::trace::Trace;

/// Seeds of worlds without edges. Those with edges contain all that these do.
const SEEDS: u64 = 5_000;
/// Seeds that meet edges, from here on.
const EDGE_SEEDS_FROM: u64 = 3 * EDGES_FROM;
/// docs/crash-consistency.md describes what each showed. Worlds change, so most have a test of
/// their own.
const BROKEN_ONCE: [u64; 11] = [
    6_066_635,
    6_285_258,
    6_317_270,
    6_772_301,
    6_873_676,
    7_163_045,
    7_465_330,
    9_213_382,
    150_014_269,
    229_268_907,
    229_281_218,
];
const EDGE_SEEDS: u64 = 18_000;
const LOG_AGE_SEEDS: u64 = 2_000;

/// Runs `work` for every number below `count`, on all processors, each with a folder in memory of
/// its own.
fn for_all(count: u64, work: impl Fn(u64, &Path) -> Result<(), String> + Sync) {
    let next = AtomicU64::new(0);
    let failures = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let place =
                    tempfile::Builder::new().prefix("sawmill-sim-").tempdir_in("/dev/shm").unwrap();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count || failures.lock().unwrap().len() >= 3 {
                        return;
                    }
                    if let Err(text) = work(number, place.path()) {
                        failures.lock().unwrap().push(format!("{number}: {text}"));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "broken promises:\n{}", failures.join("\n"));
}

/// Plays `seeds` seeds from `first` on.
fn play(first: u64, seeds: u64) -> Story {
    let totals = Mutex::new(Story::default());
    for_all(seeds, |number, place| {
        let seed = first + number;
        let story = run(seed, place, Trace::default()).map_err(|text| {
            format!(
                "seed {seed}: {text}; again: cargo run --release -p sawmill-sim -- --shrink {seed}"
            )
        })?;
        totals.lock().unwrap().add(&story);
        Ok(())
    });
    let totals = totals.into_inner().unwrap();
    println!("{seeds} seeds: {totals}");
    totals
}

#[test]
fn every_promise_is_kept_in_thousands_of_worlds() {
    let totals = play(1, SEEDS);
    for (what, count) in totals.counts() {
        assert!(count > SEEDS / 50, "{what} is met often: {totals}");
    }
}

#[test]
fn every_promise_is_kept_at_the_edges_of_the_world() {
    let totals = play(EDGE_SEEDS_FROM, EDGE_SEEDS);
    for (what, count) in totals.edge_counts() {
        assert!(count > EDGE_SEEDS / 50, "{what} is met often: {totals}");
    }
}

#[test]
fn every_promise_is_kept_where_journals_are_synced_without_a_flush() {
    let totals = play(LOG_AGES_FROM, LOG_AGE_SEEDS);
    assert!(totals.lives > LOG_AGE_SEEDS, "{totals}");
}

#[test]
fn every_seed_that_once_broke_a_promise_keeps_it_now() {
    for_all(BROKEN_ONCE.len() as u64, |number, place| {
        let seed = BROKEN_ONCE[number as usize];
        run(seed, place, Trace::default()).map(drop).map_err(|text| format!("seed {seed}: {text}"))
    });
}

#[test]
fn a_seed_is_the_same_run_every_time() {
    for_all(128, |number, place| {
        let seed = if number < 64 { number + 1000 } else { EDGE_SEEDS_FROM + number };
        let mut stories = (0..2).map(|_| run(seed, place, Trace::default()));
        let (first, second) = (stories.next().unwrap()?, stories.next().unwrap()?);
        assert!(first.events > 0);
        if first == second { Ok(()) } else { Err(format!("{first:?} is not {second:?}")) }
    });
}

#[test]
fn every_promise_is_kept_in_all_small_worlds() {
    let states = AtomicU64::new(0);
    for_all(SCRIPTS.len() as u64 + 1, |number, place| {
        let tried = match SCRIPTS.get(number as usize) {
            Some(script) => explore(script, place)?,
            None => explore_orders(place)?,
        };
        assert!(tried.deaths > 0 && tried.states > 0);
        states.fetch_add(tried.states, Ordering::Relaxed);
        Ok(())
    });
    println!("{} states recovered from", states.into_inner());
}
