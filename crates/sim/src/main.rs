//! Plays seeds: one and its story, a range of them, or as many as fit into some minutes.
//!
//! Invariant: a panic is a broken promise like any other; the exit code is 0 only if no promise was
//! broken. Not here: playing a seed (`sawmill_sim::run`), deliberate bugs (`bin/mutants`).
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use parking_lot::Mutex;
use sawmill_sim::exhaustive::{self, SCRIPTS};
use sawmill_sim::run::stories::STORIES;
use sawmill_sim::run::{run, run_with};
use sawmill_sim::settings::Settings;
use sawmill_sim::shrink::{World, shrink};
use sawmill_sim::story::Story;
use sawmill_sim::trace::Trace;

/// Runs the whole engine in a false world, by seed.
#[derive(Parser)]
struct Options {
    /// Play this seed and print its story.
    #[arg(long)]
    seed: Option<u64>,
    /// Shrink the run of this seed, which breaks, to a short story.
    #[arg(long)]
    shrink: Option<u64>,
    /// Play this many seeds.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Play for this many minutes instead.
    #[arg(long)]
    minutes: Option<f64>,
    /// Explore the small worlds instead of playing seeds.
    #[arg(long)]
    small_worlds: bool,
    /// Play the stories of bugs once found instead.
    #[arg(long)]
    stories: bool,
    /// End after this many seeds that broke a promise.
    #[arg(long, default_value_t = 5)]
    stop_at: u64,
    /// Threads; as many as there are processors unless given.
    #[arg(long)]
    threads: Option<usize>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match (options.seed, options.shrink) {
        (Some(seed), _) => print_story(seed),
        (_, Some(seed)) => shorten(seed),
        _ if options.small_worlds => explore(&options),
        _ if options.stories => retell(),
        _ => play(&options),
    }
}

/// A folder in memory for the staging files.
fn place() -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("sawmill-sim-").tempdir_in("/dev/shm");
    folder
        .or_else(|_| tempfile::tempdir())
        .unwrap_or_else(|error| panic!("no temporary folder: {error}"))
}

fn print_story(seed: u64) -> ExitCode {
    let place = place();
    let trace = Arc::new(Trace::telling());
    let (settings, dice) = Settings::of_seed(seed);
    println!("seed {seed}: {settings:?}");
    let outcome = run_with(settings, dice, place.path(), trace.clone());
    for line in trace.story() {
        println!("{line}");
    }
    match outcome {
        Ok(story) => {
            println!("all promises kept: {story}");
            ExitCode::SUCCESS
        }
        Err(text) => {
            println!("BROKEN: {text}");
            ExitCode::FAILURE
        }
    }
}

/// Turns a panic of the engine into a broken promise.
fn safely<T>(part: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(part)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    })
}

fn threads(options: &Options) -> usize {
    options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn retell() -> ExitCode {
    let place = place();
    let mut broken_count = 0;
    for (name, story) in STORIES {
        if let Err(text) = safely(|| story(place.path())) {
            broken_count += 1;
            println!("BROKEN, story {name}: {text}");
        }
    }
    println!("{} stories, {broken_count} broken", STORIES.len());
    if broken_count == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn explore(options: &Options) -> ExitCode {
    let start = Instant::now();
    let next = AtomicU64::new(0);
    let (deaths, states, broken_count) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads(options) {
            scope.spawn(|| {
                let place = place();
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed) as usize;
                    let explored = match SCRIPTS.get(index) {
                        Some(script) => safely(|| exhaustive::explore(script, place.path())),
                        None if index == SCRIPTS.len() => {
                            safely(|| exhaustive::explore_orders(place.path()))
                        }
                        None => return,
                    };
                    match explored {
                        Ok(counts) => {
                            deaths.fetch_add(counts.deaths, Ordering::Relaxed);
                            states.fetch_add(counts.states, Ordering::Relaxed);
                        }
                        Err(text) => {
                            broken_count.fetch_add(1, Ordering::Relaxed);
                            println!("BROKEN, small world: {text}");
                        }
                    }
                }
            });
        }
    });
    println!(
        "small worlds: {} deaths, {} states recovered from, {} broken; {:.1} s",
        deaths.into_inner(),
        states.into_inner(),
        broken_count.load(Ordering::Relaxed),
        start.elapsed().as_secs_f64()
    );
    if broken_count.into_inner() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn play(options: &Options) -> ExitCode {
    let start = Instant::now();
    let until = options.minutes.map(|minutes| start + Duration::from_secs_f64(minutes * 60.0));
    let next = AtomicU64::new(options.from);
    let totals = Mutex::new((0u64, 0u64, Story::default()));
    std::thread::scope(|scope| {
        for _ in 0..threads(options) {
            scope.spawn(|| {
                let place = place();
                loop {
                    let over = match until {
                        Some(until) => Instant::now() >= until,
                        None => next.load(Ordering::Relaxed) >= options.from + options.seeds,
                    };
                    if over || totals.lock().1 >= options.stop_at {
                        return;
                    }
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let played = safely(|| run(seed, place.path(), Trace::default()));
                    let mut totals = totals.lock();
                    match played {
                        Ok(story) => {
                            totals.0 += 1;
                            totals.2.add(&story);
                        }
                        Err(text) => {
                            totals.1 += 1;
                            println!("BROKEN, seed {seed}: {text}");
                            println!("  again, and as a short story: sawmill-sim --shrink {seed}");
                        }
                    }
                }
            });
        }
    });
    let (kept, broken_count, story) = totals.into_inner();
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    println!("{story}");
    let (from, pace) = (options.from, kept as f64 / minutes);
    println!("{pace:.0} seeds a minute, {minutes:.1} minutes");
    // Last: a night records this line.
    println!("{kept} seeds from {from} on kept every promise, {broken_count} did not");
    if broken_count == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Finds the shortest run that breaks in the same way, and prints it.
fn shorten(seed: u64) -> ExitCode {
    let place = place();
    let play = |world: &World, trace: Arc<Trace>| {
        safely(|| run_with(world.settings.clone(), world.dice.clone(), place.path(), trace))
    };
    let Some(found) = shrink(World::of(seed), play) else {
        println!("seed {seed} keeps every promise");
        return ExitCode::SUCCESS;
    };
    println!(
        "seed {seed}, shrunk from {} to {} events by {} runs",
        found.events_before, found.events, found.runs
    );
    println!("{:?}", found.world.settings);
    let trace = Arc::new(Trace::telling());
    let outcome = play(&found.world, trace.clone());
    for line in trace.story() {
        println!("{line}");
    }
    println!("BROKEN: {}", outcome.err().unwrap_or_default());
    ExitCode::FAILURE
}
