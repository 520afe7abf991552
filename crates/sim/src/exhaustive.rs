//! All small worlds: for each short script, death at every I/O, and for each death every subset of
//! the unsynced writes that a power cut may keep, loss of the journal, and death again at every I/O
//! of the recovery. Also every order in which four segments in flight may become stored.
//!
//! Invariant: nothing here is random; a state is omitted only because of a limit
//! ([`SUBSET_WRITES_MAX`]).

use std::path::Path;
use std::sync::Arc;

use sawmill_device::{Flags, Operation};
use sawmill_volume::FlushMode;

use crate::death::live;
use crate::disk::Fate;
use crate::oracle::Loss;
use crate::run::SeedRun;
use crate::settings::Settings;
use crate::store::CallFate;
use crate::trace::Trace;
use sawmill_testkit::Dice;

/// All subsets of up to this many unsynced writes are tried; of more writes, each alone is lost and
/// kept.
const SUBSET_WRITES_MAX: usize = 8;
/// Segments in flight at the same time, in every order.
const UNDER_WAY: usize = 4;

/// One act of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// The client writes `.1` bytes at `.0`.
    Write(u64, u64),
    /// The same with FUA.
    Fua(u64, u64),
    /// The client discards a range.
    Discard(u64, u64),
    /// The client flushes.
    Flush,
    /// The loops run until they have nothing to do; no store call happens.
    Loops,
    /// Every waiting store call happens, and everything that follows from it.
    Store,
    /// One waiting store call happens.
    Happens(usize),
}

use Act::{Discard, Flush, Fua, Happens, Loops, Store, Write};

/// A script by name.
pub type Script = (&'static str, FlushMode, &'static [Act]);

/// The scripts, each for one aspect.
pub const SCRIPTS: &[Script] = &[
    ("one write", FlushMode::Logged, &[Write(100, 700), Loops]),
    ("two writes of one place", FlushMode::Logged, &[Write(0, 600), Write(300, 600), Flush, Loops]),
    (
        "a flush between",
        FlushMode::Logged,
        &[Write(0, 4096), Flush, Loops, Write(0, 4096), Write(4096, 512), Loops],
    ),
    (
        "flushes that follow each other",
        FlushMode::Logged,
        &[Write(0, 80), Flush, Loops, Write(40, 80), Flush, Loops, Write(80, 80), Flush, Loops],
    ),
    (
        "a write through",
        FlushMode::Logged,
        &[Write(0, 512), Fua(512, 512), Loops, Write(0, 1024), Loops],
    ),
    (
        "a discard over a write",
        FlushMode::Logged,
        &[Write(0, 3000), Discard(1000, 1000), Flush, Loops, Write(1500, 10), Loops],
    ),
    (
        "stored before it is flushed",
        FlushMode::Logged,
        &[Write(0, 3000), Loops, Store, Write(10, 20), Loops, Store, Flush, Loops],
    ),
    (
        "stored in parts",
        FlushMode::Logged,
        &[Write(0, 3000), Loops, Write(8192, 100), Loops, Store, Write(0, 1), Loops],
    ),
    (
        "flush means stored",
        FlushMode::Stored,
        &[Write(0, 3000), Flush, Loops, Store, Write(10, 20), Flush, Loops, Store],
    ),
    (
        "flush means nothing",
        FlushMode::Weak,
        &[Write(0, 3000), Flush, Loops, Store, Write(10, 20), Loops],
    ),
    (
        "checkpoints and what they supersede",
        FlushMode::Stored,
        &[
            Write(0, 4096),
            Flush,
            Loops,
            Store,
            Write(0, 4096),
            Flush,
            Loops,
            Store,
            Write(0, 4096),
            Flush,
            Loops,
            Store,
            Write(0, 9),
            Loops,
        ],
    ),
    (
        "a discard of everything",
        FlushMode::Stored,
        &[
            Write(5, 4096),
            Flush,
            Loops,
            Store,
            Discard(0, 16384),
            Flush,
            Loops,
            Store,
            Write(0, 9),
            Loops,
        ],
    ),
];

/// The counts of an exploration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExplorationCounts {
    /// I/Os at which a process died.
    pub deaths: u64,
    /// States from which a volume was recovered.
    pub states: u64,
}

/// How a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LifeEnd {
    Death,
    /// The power is cut; bit `n` is set if unsynced write `n` is kept.
    PowerCut(u64),
    /// The same, but each write is torn in the middle.
    Torn,
    JournalLost,
}

/// Explores one script.
pub fn explore(script: &Script, place: &Path) -> Result<ExplorationCounts, String> {
    let mut tried = ExplorationCounts::default();
    let total = {
        let mut stage = Stage::new(script.1, place)?;
        stage.play(script.2, None)?;
        stage.ios()
    };
    for death in 1..=total + 1 {
        tried.deaths += 1;
        let unsynced = {
            let mut stage = Stage::new(script.1, place)?;
            stage.play(script.2, Some(death))?;
            stage.unsynced()
        };
        for ending in endings(unsynced) {
            for fate in [CallFate::Never, CallFate::Happened, CallFate::Late] {
                let what = || {
                    format!(
                        "{}: death at I/O {death} of {total}, {ending:?}, calls {fate:?}",
                        script.0
                    )
                };
                tried.states += one(script, place, death, ending, fate, None)
                    .map_err(|e| format!("{}: {e}", what()))?
                    .1;
            }
        }
        for ending in [LifeEnd::Death, LifeEnd::PowerCut(0), LifeEnd::Torn] {
            tried.states += explore_attach(script, place, death, ending)?;
        }
    }
    Ok(tried)
}

/// Tries one ending of a life, then death at every I/O of the following attach, then a power cut.
fn explore_attach(script: &Script, place: &Path, death: u64, end: LifeEnd) -> Result<u64, String> {
    let mut tried = 0;
    for again in 1.. {
        for fate in [Fate::Lost, Fate::Torn(2)] {
            let second = Some((again, fate));
            let what =
                format!("death at I/O {death}, {end:?}, again at {again} of the attach, {fate:?}");
            let (died, states) = one(script, place, death, end, CallFate::Late, second)
                .map_err(|error| format!("{}: {what}: {error}", script.0))?;
            tried += states;
            if !died {
                return Ok(tried);
            }
        }
    }
    Ok(tried)
}

fn endings(unsynced: usize) -> Vec<LifeEnd> {
    let mut endings = vec![LifeEnd::Death, LifeEnd::JournalLost];
    if unsynced <= SUBSET_WRITES_MAX {
        endings.extend((0..1 << unsynced).map(LifeEnd::PowerCut));
    } else {
        let all = u64::MAX >> (64 - unsynced.min(63));
        endings.extend([LifeEnd::PowerCut(0), LifeEnd::PowerCut(all)]);
        for write in 0..unsynced.min(63) {
            endings.extend([LifeEnd::PowerCut(1 << write), LifeEnd::PowerCut(all & !(1 << write))]);
        }
    }
    if unsynced > 0 {
        endings.push(LifeEnd::Torn);
    }
    endings
}

/// Tries one state; returns whether the second death came, and the number of states recovered from.
fn one(
    script: &Script,
    place: &Path,
    death: u64,
    end: LifeEnd,
    fate: CallFate,
    again: Option<(u64, Fate)>,
) -> Result<(bool, u64), String> {
    let mut stage = Stage::new(script.1, place)?;
    stage.play(script.2, Some(death))?;
    stage.end(end, fate);
    let mut died = false;
    if let Some((again, fate)) = again {
        died = stage.run.attach_dying(again)?;
        if died {
            stage.run.cut_power_with(|_| fate);
        }
    }
    stage.run.finish()?;
    Ok((died, 1))
}

/// Tries every order of [`UNDER_WAY`] stored segments, death after each, and each fate of the rest.
pub fn explore_orders(place: &Path) -> Result<ExplorationCounts, String> {
    let mut tried = ExplorationCounts::default();
    let mut orders = Vec::new();
    permutations(&mut (0..UNDER_WAY).collect(), 0, &mut orders);
    for order in &orders {
        for done in 0..=UNDER_WAY {
            for fates in 0..1u64 << (UNDER_WAY - done) {
                tried.deaths += 1;
                tried.states += 1;
                let mut acts = Vec::new();
                for number in 0..UNDER_WAY as u64 {
                    acts.extend([Write(number * 1000, 1500), Flush, Loops]);
                }
                let mut waiting: Vec<usize> = (0..UNDER_WAY).collect();
                for wanted in &order[..done] {
                    let index = waiting.iter().position(|number| number == wanted).unwrap_or(0);
                    waiting.remove(index);
                    acts.extend([Happens(index), Loops]);
                }
                let mut stage = Stage::new(FlushMode::Stored, place)?;
                stage.play(&acts, None)?;
                let fate = |number: usize| {
                    if fates >> number & 1 == 1 { CallFate::Happened } else { CallFate::Never }
                };
                stage.run.end_process(fate);
                stage.run.lose_everything_local();
                let what =
                    |error| format!("order {order:?}, {done} stored, rest {fates:#b}: {error}");
                stage.run.finish().map_err(what)?;
            }
        }
    }
    Ok(tried)
}

fn permutations(items: &mut Vec<usize>, from: usize, found: &mut Vec<Vec<usize>>) {
    if from == items.len() {
        return found.push(items.clone());
    }
    for other in from..items.len() {
        items.swap(from, other);
        permutations(items, from + 1, found);
        items.swap(from, other);
    }
}

/// A world for one script.
struct Stage {
    run: SeedRun,
}

impl Stage {
    fn new(mode: FlushMode, place: &Path) -> Result<Self, String> {
        let settings = Settings {
            size_bytes: 16 << 10,
            mode,
            write_bytes_max: 4096,
            checkpoint_bytes: 8 << 10,
            uploads_max: 8,
            segment_age_ms: 1,
            ..Settings::calm()
        };
        let mut run = SeedRun::new(settings, Dice::new(1), place, Arc::new(Trace::default()))?;
        run.attach(0)?;
        Ok(Stage { run })
    }

    /// Plays the acts, up to the I/O at which the process dies.
    fn play(&mut self, acts: &[Act], death: Option<u64>) -> Result<(), String> {
        let Some(mut process) = self.run.process.take() else { return Ok(()) };
        if let Some(death) = death {
            process.life.dies_after(death);
        }
        for act in acts {
            let lived = live(|| match *act {
                Write(address, length) => self.run.submit_request(
                    &mut process,
                    Operation::Write,
                    (address, length),
                    Flags::default(),
                ),
                Fua(address, length) => self.run.submit_request(
                    &mut process,
                    Operation::Write,
                    (address, length),
                    Flags { fua: true, ..Flags::default() },
                ),
                Discard(address, length) => self.run.submit_request(
                    &mut process,
                    Operation::Discard,
                    (address, length),
                    Flags::default(),
                ),
                Flush => self.run.submit_request(
                    &mut process,
                    Operation::Flush,
                    (0, 0),
                    Flags::default(),
                ),
                Loops => (0..3).for_each(|_| self.run.round_of_loops(&mut process)),
                Store => (0..6).for_each(|_| self.run.round(&mut process)),
                Happens(index) => process.store.happen(index),
            });
            if lived.is_none() {
                break;
            }
            self.run.receive_answers(&mut process)?;
        }
        self.run.process = Some(process);
        Ok(())
    }

    fn ios(&self) -> u64 {
        self.run.process.as_ref().map_or(0, |process| process.life.ios_after_attach())
    }

    fn unsynced(&self) -> usize {
        self.run.machines[0].media.all().iter().map(|medium| medium.unsynced()).sum()
    }

    fn end(&mut self, end: LifeEnd, fate: CallFate) {
        self.run.end_process(|_| fate);
        match end {
            LifeEnd::Death => {}
            LifeEnd::PowerCut(kept) => {
                self.run.cut_power_with(|write| {
                    if kept >> write.min(63) & 1 == 1 { Fate::Kept } else { Fate::Lost }
                });
            }
            LifeEnd::Torn => self.run.cut_power_with(|_| Fate::Torn(2)),
            LifeEnd::JournalLost => self.run.lose_everything_local(),
        }
        if fate == CallFate::Late && self.run.loss == Loss::Process {
            self.run.land_all();
        }
    }
}
