//! One seed: machines, processes, clients and trouble, step by step, under the eyes of the oracle.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{ErrorKind, Operation};
use sawmill_store::ObjectStore;
use sawmill_volume::{CreateOptions, FlushMode, OpenOptions, Stepped, World, create_in};

use crate::client::{Client, Excuses};
use crate::death::{Life, live};
use crate::dice::Dice;
use crate::disk::{DiskFaults, Medium};
use crate::oracle::{Loss, Oracle};
use crate::settings::Settings;
use crate::store::{CallFate, SimBucket, SimStore, StoreFaults};
use crate::trace::Trace;
use crate::world::{Clock, Shelf, SimWorld};

mod ends;

/// The volume's name in every world.
const NAME: &str = "disk";
const MACHINES: usize = 2;
/// Rounds of all loops after which whatever was asked must have been answered, once nothing fails any more.
const ROUNDS_MAX: u32 = 3000;

/// What a run was like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Story {
    /// Digest of every event.
    pub digest: u64,
    /// Events.
    pub events: u64,
    /// Operations of clients.
    pub operations: u64,
    /// Lives begun.
    pub lives: u64,
    /// Deaths of processes, between steps or at an I/O.
    pub deaths: u64,
    /// Power cuts.
    pub power_cuts: u64,
    /// Journals lost or put back old.
    pub journals_lost: u64,
    /// Attachments by another machine while the first still ran.
    pub takeovers: u64,
    /// Clean closes.
    pub closes: u64,
}

/// A machine: what outlives its processes.
pub(crate) struct Machine {
    pub(crate) shelf: Shelf,
    staging: PathBuf,
    /// Its journal is not the newest, or not there.
    outdated: bool,
    /// An older image of its journal's disk.
    old_image: Option<Arc<Medium>>,
}

/// A process that has the volume attached.
pub(crate) struct Process {
    machine: usize,
    stepped: Stepped,
    pub(crate) store: Arc<SimStore>,
    pub(crate) life: Arc<Life>,
    client: Client,
    /// What its successor found, once there is one.
    replaced_at: Option<usize>,
    closing: bool,
    /// It found no journal: all it has is from the store.
    from_store: bool,
}

/// See the head of this file.
pub struct Run {
    pub(crate) settings: Settings,
    pub(crate) dice: Dice,
    pub(crate) clock: Arc<Clock>,
    pub(crate) trace: Arc<Trace>,
    pub(crate) bucket: Arc<SimBucket>,
    pub(crate) machines: Vec<Machine>,
    pub(crate) oracle: Oracle,
    pub(crate) process: Option<Process>,
    /// A process that was replaced and does not know yet.
    zombie: Option<Process>,
    /// What was lost since the last open that succeeded.
    pub(crate) loss: Loss,
    stamp: u64,
    story: Story,
    /// The next attach dies at this I/O; 0: chance decides.
    dies_next: u64,
}

type Verdict = Result<(), String>;

/// Runs a seed in `place`, a folder in a memory file system that is emptied first.
pub fn run(seed: u64, place: &Path, trace: Trace) -> Result<Story, String> {
    let mut dice = Dice::new(seed);
    let settings = Settings::of(&mut dice);
    run_with(settings, dice, place, Arc::new(trace))
}

/// Runs given settings.
pub fn run_with(settings: Settings, dice: Dice, place: &Path, trace: Arc<Trace>) -> Result<Story, String> {
    let mut run = Run::new(settings, dice, place, trace)?;
    run.go()?;
    run.story.digest = run.trace.digest();
    run.story.events = run.trace.events();
    Ok(run.story)
}

impl Run {
    pub(crate) fn new(
        settings: Settings,
        mut dice: Dice,
        place: &Path,
        trace: Arc<Trace>,
    ) -> Result<Self, String> {
        let machines = (0..MACHINES).map(|number| Machine::new(place, number)).collect::<Result<_, _>>()?;
        let clock = Arc::new(Clock::default());
        let bucket = Arc::new(SimBucket::default());
        let oracle = Oracle::new(settings.size_bytes, settings.mode);
        let life = Arc::new(Life::default());
        let world = SimWorld::new(
            clock.clone(),
            Shelf::default(),
            life.clone(),
            trace.clone(),
            DiskFaults::default(),
            dice.split(2),
        );
        let store = SimStore::new(bucket.clone(), life, trace.clone(), StoreFaults::default(), dice.split(3));
        let options = CreateOptions {
            block_bytes: 512,
            segment_bytes: settings.segment_bytes,
            flush: settings.mode,
            ..CreateOptions::new(settings.size_bytes)
        };
        create_in(&world, &store, NAME, &options).map_err(|error| format!("create: {error}"))?;
        Ok(Run {
            settings,
            dice,
            clock,
            trace,
            bucket,
            machines,
            oracle,
            process: None,
            zombie: None,
            loss: Loss::Process,
            stamp: 0,
            story: Story::default(),
            dies_next: 0,
        })
    }

    fn say(&self, kind: &str, tell: impl FnOnce() -> String) {
        self.trace.note(kind, [0, 0], tell);
    }

    fn go(&mut self) -> Verdict {
        let mut machine = 0;
        for _ in 0..self.settings.lives {
            self.attach(machine)?;
            self.live_on()?;
            machine = self.end(machine)?;
        }
        // The last word: all trouble is over, and everything promised is there.
        self.bury_zombie();
        self.attach(machine)?;
        self.close_in_peace()
    }

    /// Attaches on `machine`, however often it takes.
    pub(crate) fn attach(&mut self, machine: usize) -> Verdict {
        let mut accept_loss = self.loss == Loss::Journal && self.dice.one_in(2);
        for attempt in 0.. {
            let troubled = attempt < 4;
            self.say("attach", || {
                format!("machine {machine} attaches{}", if accept_loss { ", loss accepted" } else { "" })
            });
            match self.try_attach(machine, accept_loss, troubled) {
                None => self.story.deaths += 1,
                Some(Ok(process)) => return self.attached(process),
                Some(Err((kind, text))) => {
                    self.say("refused", || format!("  refused: {text}"));
                    match kind {
                        ErrorKind::Refused | ErrorKind::Corrupt if self.machines[machine].outdated => {
                            accept_loss = true;
                            self.loss = Loss::Journal;
                        }
                        ErrorKind::Unavailable if troubled => {}
                        // A list that hides every checkpoint, again and again, or garbage instead of one.
                        ErrorKind::Corrupt | ErrorKind::Invalid if troubled && self.store_misleads() => {}
                        // A disk that fails while it is made or written.
                        _ if troubled && self.has_disk_faults() => {}
                        _ => return Err(format!("the attach was refused: {text}")),
                    }
                }
            }
            if attempt > 20 {
                return Err("attaching does not succeed".into());
            }
            self.between_lives();
        }
        Ok(())
    }

    fn store_misleads(&self) -> bool {
        self.settings.store.garble_odds + self.settings.store.lag_odds > 0
    }

    fn has_disk_faults(&self) -> bool {
        self.settings.disk != DiskFaults::default()
    }

    /// One attempt; `None` when the process died in it.
    fn try_attach(
        &mut self,
        machine: usize,
        accept_loss: bool,
        troubled: bool,
    ) -> Option<Result<Process, (ErrorKind, String)>> {
        let life = Arc::new(Life::default());
        let (store_faults, disk_faults) =
            if troubled { (self.settings.store, self.settings.disk) } else { Default::default() };
        let place = &self.machines[machine];
        let world: Arc<dyn World> = Arc::new(SimWorld::new(
            self.clock.clone(),
            place.shelf.clone(),
            life.clone(),
            self.trace.clone(),
            disk_faults,
            self.dice.split(4),
        ));
        let store = Arc::new(SimStore::new(
            self.bucket.clone(),
            life.clone(),
            self.trace.clone(),
            store_faults,
            self.dice.split(5),
        ));
        let options = self.options(machine, accept_loss);
        let from_store = place.shelf.get(&journal_path()).is_none();
        let dies_next = std::mem::take(&mut self.dies_next);
        if dies_next > 0 {
            life.dies_after(dies_next);
        } else if troubled && self.dice.one_in(self.settings.die_at_io_odds * 2) {
            life.dies_after(1 + self.dice.below(60));
        }
        let shared: Arc<dyn ObjectStore> = store.clone();
        let opened = live(|| Stepped::open(world, shared, NAME, &options));
        life.lives_on();
        let Some(opened) = opened else {
            self.say("died", || "  the process dies while it attaches".into());
            life.die();
            store.bury(|_| CallFate::roll(&mut self.dice));
            return None;
        };
        // Another machine's journal may be outdated by what this attempt has done, and by what of it lands
        // later.
        for (number, other) in self.machines.iter_mut().enumerate() {
            other.outdated |= number != machine;
        }
        Some(match opened {
            Ok(stepped) => {
                store.set_at_once(false);
                life.begin_count();
                let client = Client::default();
                Ok(Process {
                    machine,
                    stepped,
                    store,
                    life,
                    client,
                    replaced_at: None,
                    closing: false,
                    from_store,
                })
            }
            Err(error) => {
                life.die();
                Err((error.kind(), error.to_string()))
            }
        })
    }

    fn options(&self, machine: usize, accept_loss: bool) -> OpenOptions {
        let place = &self.machines[machine];
        let mut options = OpenOptions::new(journal_path());
        options.journal_bytes = self.settings.journal_bytes;
        options.staging_bytes = self.settings.staging_bytes;
        options.staging_folder.clone_from(&place.staging);
        options.accept_journal_loss = accept_loss;
        options.no_fencing = true;
        options.segment_age_max = Duration::from_millis(self.settings.segment_age_ms);
        options.checkpoint_bytes = self.settings.checkpoint_bytes;
        options.uploads_max = self.settings.uploads_max;
        options
    }

    /// An attach succeeded: what it found must be legal.
    fn attached(&mut self, mut process: Process) -> Verdict {
        self.story.lives += 1;
        let machine = process.machine;
        for (number, place) in self.machines.iter_mut().enumerate() {
            place.outdated = number != machine;
            if number == machine && self.dice.one_in(4) {
                place.old_image = place.shelf.get(&journal_path()).map(|medium| medium.copy());
            }
        }
        let found = self.read_all(&mut process)?;
        let count = self.oracle.opened(self.loss, process.from_store, &found)?;
        self.say("found", || format!("  attached: {count} operations are there"));
        self.loss = Loss::Process;
        if let Some(mut old) = self.process.take() {
            old.replaced_at = Some(count);
            self.bury_zombie();
            self.zombie = Some(old);
        }
        self.process = Some(process);
        Ok(())
    }

    /// Reads the whole volume through the device, as any client would.
    fn read_all(&mut self, process: &mut Process) -> Result<Vec<u8>, String> {
        let mut found = vec![0; self.settings.size_bytes as usize];
        let range = (0, self.settings.size_bytes);
        let mut client = Client::default();
        process.store.spare(true);
        client.read_blindly(process.stepped.volume(), range);
        for _ in 0..ROUNDS_MAX {
            if let Some(outcome) = client.blind_answer() {
                found.copy_from_slice(&outcome?);
                process.store.spare(false);
                return Ok(found);
            }
            self.round(process, true);
        }
        Err("reading the whole volume does not end".into())
    }

    /// One round of everything for a process: loops, every waiting call, some time.
    pub(crate) fn round(&mut self, process: &mut Process, whole: bool) {
        while process.stepped.step_journal() {}
        process.stepped.step_journal_quietly();
        process.stepped.step_keeper(self.clock.now());
        if whole {
            for _ in 0..process.store.waiting() {
                process.store.happen(0);
            }
        }
        self.clock.pass(20_000);
    }

    /// The life of the attached process, and of a zombie beside it.
    fn live_on(&mut self) -> Verdict {
        let dies_at_io = self.dice.one_in(self.settings.die_at_io_odds);
        let die_at = self.dice.below(self.settings.steps);
        for step in 0..self.settings.steps {
            if dies_at_io
                && step == die_at
                && let Some(process) = &self.process
            {
                process.life.dies_after(1 + self.dice.below(12));
            }
            let beside = self.zombie.is_some() && self.dice.one_in(3);
            let Some(mut process) = (if beside { self.zombie.take() } else { self.process.take() }) else {
                break;
            };
            let lived = live(|| self.step(&mut process));
            if lived.is_none() {
                process.life.die();
            }
            let dead = process.life.is_dead();
            let heard =
                if dead { Ok(()) } else { lived.unwrap_or(Ok(())).and_then(|()| self.hear(&mut process)) };
            *(if beside { &mut self.zombie } else { &mut self.process }) = Some(process);
            heard?;
            if dead && beside {
                self.bury_zombie();
            } else if dead {
                return Ok(());
            }
        }
        Ok(())
    }

    pub(crate) fn hear(&mut self, process: &mut Process) -> Verdict {
        let excuses = Excuses {
            any: self.has_disk_faults() || process.closing,
            corrupt: self.settings.store.garble_odds > 0,
        };
        let stored = self.settings.mode == FlushMode::Stored;
        process.client.hear(&mut self.oracle, excuses, process.replaced_at, stored, &self.trace)
    }

    /// One step of one process's world.
    fn step(&mut self, process: &mut Process) -> Verdict {
        match self.dice.below(100) {
            0..30 => self.ask(process),
            30..50 => {
                let quiet = self.dice.one_in(4);
                self.say("journal", || "  journal".into());
                if quiet {
                    process.stepped.step_journal_quietly()
                } else {
                    process.stepped.step_journal()
                };
            }
            50..68 => {
                self.say("keeper", || "  keeper".into());
                process.stepped.step_keeper(self.clock.now());
            }
            68..90 => {
                let waiting = process.store.waiting() as u64;
                if waiting > 0 {
                    let index = self.dice.below(waiting) as usize;
                    self.say("happen", || format!("  call {index} of {waiting} happens"));
                    process.store.happen(index);
                }
            }
            90..97 => {
                let us = *self.dice.pick(&[100, 5_000, 5_000, 60_000, 600_000, 7_000_000]);
                self.clock.pass(us);
            }
            _ => self.land_late(),
        }
        Ok(())
    }

    fn land_late(&mut self) {
        let late = self.bucket.late() as u64;
        if late > 0 {
            let index = self.dice.below(late) as usize;
            self.bucket.land(index, &self.trace);
        }
    }

    /// The client asks for something.
    fn ask(&mut self, process: &mut Process) {
        if process.client.waiting() >= 16 {
            return;
        }
        let operation = *self.dice.pick(&[
            Operation::Write,
            Operation::Write,
            Operation::Write,
            Operation::Write,
            Operation::Read,
            Operation::Read,
            Operation::Flush,
            Operation::Discard,
            Operation::WriteZeroes,
        ]);
        let range = self.range(operation);
        let fua = self.dice.one_in(10);
        self.ask_for(process, operation, range, fua);
    }

    /// The client asks for this.
    pub(crate) fn ask_for(
        &mut self,
        process: &mut Process,
        operation: Operation,
        range: (u64, u64),
        fua: bool,
    ) {
        self.stamp += 1;
        self.story.operations += 1;
        let stamp = self.stamp;
        self.trace.note("ask", [range.0, range.1], || {
            let fua = if fua && operation == Operation::Write { ", FUA" } else { "" };
            format!("  asks: {operation:?} {} bytes at {}{fua}", range.1, range.0)
        });
        let volume = process.stepped.volume().clone();
        match operation {
            Operation::Write | Operation::Flush if process.replaced_at.is_some() => {
                process.client.stray(
                    &volume,
                    operation,
                    if operation == Operation::Flush { (0, 0) } else { range },
                    stamp,
                );
            }
            _ if process.replaced_at.is_some() => {}
            Operation::Flush => process.client.flush(&volume, &self.oracle),
            Operation::Read => process.client.read(&volume, &self.oracle, range),
            _ => process.client.change(&volume, &mut self.oracle, operation, range, stamp, fua),
        }
    }

    fn range(&mut self, operation: Operation) -> (u64, u64) {
        let size = self.settings.size_bytes;
        let longest = match operation {
            Operation::Write => self.settings.write_bytes_max.min(size),
            _ => size,
        };
        let length = match self.dice.below(4) {
            0 => 1 + self.dice.below(64),
            1 => 512 * (1 + self.dice.below(8)),
            _ => 1 + self.dice.below(longest),
        }
        .min(longest);
        // Few places, so that they are written again and again.
        let address = match self.dice.below(3) {
            0 => self.dice.below(size),
            1 => self.dice.below(size) / 4096 * 4096,
            _ => self.dice.below(8192),
        };
        (address.min(size - length), length)
    }
}

impl Machine {
    fn new(place: &Path, number: usize) -> Result<Self, String> {
        let staging = place.join(format!("machine-{number}"));
        let _ = std::fs::remove_dir_all(&staging);
        std::fs::create_dir_all(&staging).map_err(|error| format!("{}: {error}", staging.display()))?;
        Ok(Machine { shelf: Shelf::default(), staging, outdated: false, old_image: None })
    }

    /// The power went: memory is gone.
    fn lose_memory(&self) {
        let Ok(entries) = std::fs::read_dir(&self.staging) else { return };
        for entry in entries.flatten() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn journal_path() -> PathBuf {
    PathBuf::from("/journal")
}
