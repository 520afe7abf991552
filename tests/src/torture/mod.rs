//! The long torture: a database-like load on the real server, on a real S3 server behind the fault
//! proxy or in a folder; `kill -9` at random moments; and faults around it: journals and memory
//! lost, stores copied and restored, clocks that jump, containers, rivals, commands between lives.
//! After each life every byte is judged.
//!
//! What must hold are the promises after each action (`volume`), and every refusal has its exit
//! code. Chance is seeded; real time and threads are not, so a seed gives a run like the one
//! before, not the same. The first two volumes meet every kind of action in a fixed order; after
//! them chance chooses. Modules: `volume` (what is known of a volume, and the demands), `life`
//! (start, load, look, death), `commits` (the load), `copies`, `clocks`, `memory`, `containers`,
//! `rivals`, `commands` (the kinds of actions), `report`.
//!
//! Not here: the command line (`bin/torture`), faults of the store (`proxy`).

mod clocks;
mod commands;
mod commits;
mod containers;
mod copies;
mod life;
mod memory;
mod report;
mod rivals;
mod volume;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::proxy::Proxy;
use crate::stamp::{Verdict, Violation};
use crate::store::{self, shared_minio};
use sawmill_testkit::Dice;

pub use report::Report;

use volume::{AttachOptions, Loss, Volume};

/// Lives of one volume, before a new one begins.
const LIVES_MAX: u64 = 16;

/// An action: something done to a volume besides load, kills and faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Nothing,
    JournalLost,
    MemoryLost,
    Contained,
    AtRest,
    HandOff,
    Rival,
    OneJournal,
    StateCopied,
    WrongClock,
    StoreCopied,
    StorePutBack,
}

/// The actions for a volume in a bucket, in the order of the first volume.
const IN_A_BUCKET: [Action; 10] = [
    Action::HandOff,
    Action::MemoryLost,
    Action::Contained,
    Action::Contained,
    Action::AtRest,
    Action::OneJournal,
    Action::StateCopied,
    Action::Rival,
    Action::MemoryLost,
    Action::JournalLost,
];
/// The same for a volume in a folder; only the second `StorePutBack` has a backup to restore.
const IN_A_FOLDER: [Action; 6] = [
    Action::WrongClock,
    Action::StorePutBack,
    Action::Contained,
    Action::StorePutBack,
    Action::StoreCopied,
    Action::WrongClock,
];

/// One run.
pub struct Torture {
    seed: u64,
    dice: Dice,
    proxy: Arc<Proxy>,
    /// The events so far.
    pub report: Report,
}

impl Torture {
    /// A run with this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let proxy = Proxy::before(shared_minio());
        Torture { seed, dice: Dice::new(seed), proxy, report: Report::default() }
    }

    /// Runs for this long, and until each kind of action occurred; calls `callback` after each
    /// life.
    /// Ends early if a promise is broken.
    pub fn run(&mut self, time: Duration, mut callback: impl FnMut(&Report)) {
        let deadline = Instant::now() + time;
        for is_folder in [false, true] {
            let ordered: &[Action] = if is_folder { &IN_A_FOLDER } else { &IN_A_BUCKET };
            let mut ordered = ordered.iter();
            self.lives(is_folder, &mut callback, |_| ordered.next().copied());
        }
        while Instant::now() < deadline && self.report.violations.is_empty() {
            let is_folder = self.dice.one_in(3);
            let mut left = LIVES_MAX;
            self.lives(is_folder, &mut callback, |dice| {
                left = left.checked_sub(1)?;
                (Instant::now() < deadline).then(|| choose(dice, is_folder))
            });
        }
    }

    /// A volume, with a life for each action that `next` gives.
    fn lives(
        &mut self,
        is_folder: bool,
        callback: &mut impl FnMut(&Report),
        mut next: impl FnMut(&mut Dice) -> Option<Action>,
    ) {
        if !self.report.violations.is_empty() {
            return;
        }
        let flush = if self.dice.one_in(2) { "logged" } else { "stored" };
        let mut volume = self.begin(is_folder, flush);
        while let Some(action) = next(&mut self.dice) {
            let began = Instant::now();
            self.life(&mut volume, action);
            self.report.slowest_life = self.report.slowest_life.max(began.elapsed());
            self.report.faults = self.proxy.counts();
            callback(&self.report);
            if !self.report.violations.is_empty() {
                return;
            }
        }
        self.end(&mut volume);
    }

    fn begin(&mut self, is_folder: bool, flush: &'static str) -> Volume {
        self.proxy.stop_faults();
        self.report.volumes += 1;
        let dice = Dice::new(self.dice.word());
        match is_folder {
            true => Volume::create(&store::folder(), flush, dice),
            false => {
                let is_named = self.report.volumes == 1 || self.dice.one_in(2);
                let volume = Volume::create(&self.proxy.store(), flush, dice);
                if is_named { volume.named() } else { volume }
            }
        }
    }

    /// The control: loses a journal without the judge's knowledge while nothing is stored. Returns
    /// the judge's result, which must be a violation.
    ///
    /// # Panics
    /// When the volume is not even a cut.
    pub fn plant_a_loss(&mut self) -> Result<Verdict, Violation> {
        let mut volume = self.begin(false, "logged");
        let server = volume.serve(&AttachOptions::default()).start();
        self.proxy.shut();
        volume.commits.drive(&[server.connect()], 20, || server.kill());
        self.proxy.open();
        volume.lose_state();
        volume.loss = Loss::Journal;
        let server = volume.serve_as_it_is(&AttachOptions::default()).start();
        let image = server.connect().read_all().expect("readable");
        volume.judge(&image).expect("a cut, when the loss is known");
        volume.loss = Loss::Nothing;
        volume.judge(&image)
    }

    fn violation(&mut self, volume: &Volume, what: &str) {
        let Report { volumes, lives, .. } = self.report;
        let store = if volume.is_folder() { "in a folder" } else { "in a bucket" };
        self.report.violations.push(format!(
            "seed {}, volume {volumes} {store}, life {lives}, flush = {}, lost: {:?}: {what}",
            self.seed, volume.flush, volume.loss
        ));
    }
}

/// Chooses an action for such a volume.
fn choose(dice: &mut Dice, is_folder: bool) -> Action {
    if dice.one_in(4) {
        return if dice.one_in(2) { Action::Nothing } else { Action::JournalLost };
    }
    let extra_deeds: &[Action] = if is_folder { &IN_A_FOLDER } else { &[] };
    let chosen = dice.below((IN_A_BUCKET.len() + extra_deeds.len()) as u64) as usize;
    *IN_A_BUCKET.iter().chain(extra_deeds).nth(chosen).unwrap_or(&Action::Nothing)
}
