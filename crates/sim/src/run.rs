//! One seed: machines, processes, clients and faults, step by step, checked by the oracle.
//!
//! Invariant: every choice here is a roll of the run's dice, in one order: an additional roll for
//! all seeds turns each of them into another run. Not here: what an attach finds (`attach`), how
//! lives end (`ends`), when edges occur (`edges`), the promises (`oracle`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use sawmill_device::{Flags, Operation};
use sawmill_volume::{CreateOptions, ReadCache, SteppedVolume, create_in};

use crate::client::{Change, Client, Excuses};
use crate::death::{Life, live};
use crate::disk::{DiskFaults, Medium};
use crate::oracle::{Loss, Oracle};
use crate::settings::Edges;
use crate::settings::Settings;
use crate::store::{CallFate, SimBucket, SimStore, StoreFaults};
use crate::story::Story;
use crate::trace::Trace;
use crate::world::{Clock, MachineMedia, SimWorld};
use sawmill_testkit::Dice;

mod attach;
mod clones;
mod commands;
mod copies;
mod edges;
mod ends;
mod foreign;
mod handoff;
mod histories;
mod locks;
mod past;
mod reader;
pub mod stories;

/// The volume's name in every world.
const NAME: &str = "disk";
const MACHINES: usize = 2;
/// Rounds of all loops within which every request must be answered, once nothing fails any more.
const ROUNDS_MAX: u32 = 3000;

/// A machine: the state that outlives its processes.
pub(crate) struct Machine {
    pub(crate) media: MachineMedia,
    staging: PathBuf,
    /// Its journal is not the newest, or is missing.
    outdated: bool,
    /// How far its wall clock is ahead, in milliseconds.
    ahead_ms: Arc<AtomicU64>,
    /// Its memory is lost without a reboot: accepted writes may be lost with it.
    has_lost_memory: bool,
    /// Its owner knows and accepts that.
    accepts_memory_loss: bool,
    /// An older image of its journal's disk.
    old_image: Option<Arc<Medium>>,
    /// The path of its read cache's index.
    index_path: PathBuf,
}

/// A process that has the volume attached.
pub(crate) struct Process {
    machine: usize,
    stepped: SteppedVolume,
    pub(crate) store: Arc<SimStore>,
    pub(crate) life: Arc<Life>,
    client: Client,
    /// The operations that its successor found, once there is one.
    replaced_at: Option<usize>,
    closing: bool,
    /// It found no journal: everything it has is from the store.
    from_store: bool,
    /// The order about the past that is not answered yet.
    order: Option<past::PendingOrder>,
    cache: Option<Arc<ReadCache>>,
}

/// Whether an attach gives a journal up that is not the newest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum JournalLoss {
    Refused,
    Accepted,
}

impl JournalLoss {
    fn accepted_if(accepts: bool) -> Self {
        if accepts { JournalLoss::Accepted } else { JournalLoss::Refused }
    }
}

/// Whether disks and the store fail during an attach as they do otherwise.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttachFaults {
    None,
    Usual,
}

/// The world of one seed: its settings, dice, clock, machines and oracle.
pub struct SeedRun {
    pub(crate) settings: Settings,
    pub(crate) dice: Dice,
    pub(crate) clock: Arc<Clock>,
    pub(crate) trace: Arc<Trace>,
    pub(crate) bucket: Arc<SimBucket>,
    /// The store to which a copier copies.
    second: Arc<SimBucket>,
    /// Operations that the last reader found in it.
    copied: usize,
    /// The last content of the promoted volume there.
    promoted: Option<Vec<u8>>,
    pub(crate) machines: Vec<Machine>,
    pub(crate) oracle: Oracle,
    pub(crate) process: Option<Process>,
    /// A process that was replaced and has not noticed yet.
    zombie: Option<Process>,
    /// The loss since the last successful open.
    pub(crate) loss: Loss,
    stamp: u64,
    /// The size that the volume last reported, and the largest size ever requested.
    size_bytes: u64,
    requested_bytes: u64,
    story: Story,
    /// The next attach dies at this I/O; 0: chance decides.
    dies_next: u64,
    /// A reader that has the volume open.
    reader: Option<reader::Reader>,
    /// Cuts and clones, and the content of each.
    past: past::Past,
    /// The state of the edges, and their dice.
    edges: edges::EdgeState,
}

type Verdict = Result<(), String>;

/// Runs a seed in `place`, a folder in a memory file system that is emptied first.
pub fn run(seed: u64, place: &Path, trace: Trace) -> Result<Story, String> {
    let (settings, dice) = Settings::of_seed(seed);
    run_with(settings, dice, place, Arc::new(trace))
}

/// Runs given settings.
pub fn run_with(
    settings: Settings,
    dice: Dice,
    place: &Path,
    trace: Arc<Trace>,
) -> Result<Story, String> {
    let mut run = SeedRun::new(settings, dice, place, trace)?;
    run.run_all()?;
    run.story.digest = run.trace.digest();
    run.story.events = run.trace.events();
    Ok(std::mem::take(&mut run.story))
}

impl Drop for SeedRun {
    fn drop(&mut self) {
        // A process that still lives must not die during its end.
        for process in [self.process.take(), self.zombie.take()].into_iter().flatten() {
            process.life.die();
            // A waiting call keeps its process alive.
            process.store.end_calls(|_| CallFate::Never);
        }
    }
}

impl SeedRun {
    pub(crate) fn new(
        settings: Settings,
        mut dice: Dice,
        place: &Path,
        trace: Arc<Trace>,
    ) -> Result<Self, String> {
        // `shrink` may have made the disk smaller.
        let first_bytes = settings.first_bytes.min(settings.size_bytes);
        let edges = edges::EdgeState::new(&dice, place)?;
        let make_machine = |number| Machine::new(place, number, settings.edges.locks);
        let machines = (0..MACHINES).map(make_machine).collect::<Result<_, _>>()?;
        let clock = Arc::new(Clock::default());
        let bucket = Arc::new(SimBucket::default());
        let oracle = Oracle::new(settings.size_bytes, settings.mode);
        let life = Arc::new(Life::default());
        let world = SimWorld::new(
            clock.clone(),
            MachineMedia::default(),
            life.clone(),
            trace.clone(),
            DiskFaults::default(),
            dice.split(2),
        );
        let store = SimStore::new(
            bucket.clone(),
            life,
            trace.clone(),
            StoreFaults::default(),
            dice.split(3),
        );
        let options = CreateOptions {
            block_bytes: 512,
            segment_bytes: settings.segment_bytes,
            flush: settings.mode,
            ..CreateOptions::new(first_bytes)
        };
        create_in(&world, &store, NAME, &options).map_err(|error| format!("create: {error}"))?;
        Ok(SeedRun {
            size_bytes: first_bytes,
            requested_bytes: first_bytes,
            settings,
            dice,
            clock,
            trace,
            bucket,
            second: Arc::default(),
            copied: 0,
            promoted: None,
            machines,
            oracle,
            process: None,
            zombie: None,
            loss: Loss::Process,
            stamp: 0,
            story: Story::default(),
            dies_next: 0,
            reader: None,
            past: past::Past::default(),
            edges,
        })
    }

    fn log(&self, kind: &str, text: impl FnOnce() -> String) {
        self.trace.note(kind, [0, 0], text);
    }

    fn run_all(&mut self) -> Verdict {
        let (mut machine, mut is_attached) = (0, false);
        for _ in 0..self.settings.lives {
            if !is_attached {
                self.attach(machine)?;
            }
            self.live_on()?;
            machine = self.end(machine)?;
            self.meet_edges_between(machine)?;
            is_attached = self.process.is_none()
                && self.dice.one_in(self.settings.elsewhere_odds)
                && self.try_elsewhere(&mut machine)?;
        }
        // At the end all faults are over, and everything promised must be there.
        self.end_zombie();
        if !is_attached {
            self.attach(machine)?;
        }
        if self.settings.copy_odds > 0 {
            self.promote_second()?;
        }
        self.close_in_peace()?;
        self.check_all()?;
        self.judge_the_past()?;
        self.fail_back()?;
        self.end_edges()
    }

    /// One round of everything for a process: its loops, every waiting call, and some time.
    pub(crate) fn round(&mut self, process: &mut Process) {
        self.step_loops(process);
        for _ in 0..process.store.waiting() {
            process.store.happen(0);
        }
        self.clock.pass(20_000);
    }

    /// The same, but no waiting call happens.
    pub(crate) fn round_of_loops(&mut self, process: &mut Process) {
        self.step_loops(process);
        self.clock.pass(20_000);
    }

    fn step_loops(&self, process: &mut Process) {
        while process.stepped.step_journal() {}
        process.stepped.step_journal_quietly();
        process.stepped.step_engine(self.clock.now());
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
            if self.settings.edges != Edges::default() {
                self.meet_edges()?;
            }
            if self.dice.one_in(self.settings.reader_odds) {
                self.use_reader()?;
            }
            if self.dice.one_in(self.settings.rot_odds) {
                self.rot();
            }
            if self.dice.one_in(self.settings.copy_odds) {
                self.copy()?;
            }
            if self.dice.one_in(self.settings.jump_odds) {
                self.jump();
            }
            if self.dice.one_in(self.settings.gc_request_odds) {
                self.request_collection();
            }
            let beside = self.zombie.is_some() && self.dice.one_in(3);
            let Some(mut process) = (if beside { self.zombie.take() } else { self.process.take() })
            else {
                break;
            };
            let outcome = live(|| self.step(&mut process));
            if outcome.is_none() {
                process.life.die();
            }
            let dead = process.life.is_dead();
            let verdict = if dead {
                Ok(())
            } else {
                outcome.unwrap_or(Ok(())).and_then(|()| self.receive_answers(&mut process))
            };
            *(if beside { &mut self.zombie } else { &mut self.process }) = Some(process);
            verdict?;
            self.receive_order_answers(beside)?;
            if dead && beside {
                self.end_zombie();
            } else if dead {
                return Ok(());
            }
        }
        Ok(())
    }

    pub(crate) fn receive_answers(&mut self, process: &mut Process) -> Verdict {
        let excuses = Excuses {
            any: self.has_disk_faults() || process.closing,
            corrupt: self.settings.store.garble_odds > 0,
        };
        process.client.receive_answers(
            &mut self.oracle,
            excuses,
            process.replaced_at,
            self.settings.mode,
            &self.trace,
        )
    }

    /// One step of a process's world.
    fn step(&mut self, process: &mut Process) -> Verdict {
        if self.dice.one_in(self.settings.past_odds) {
            return self.act_on_the_past(process);
        }
        match self.dice.below(100) {
            0..30 => self.submit_random(process),
            30..50 => {
                let is_quiet = self.dice.one_in(4);
                self.log("journal", || "  journal".into());
                if is_quiet {
                    process.stepped.step_journal_quietly()
                } else {
                    process.stepped.step_journal()
                };
            }
            50..68 => {
                self.log("engine", || "  engine".into());
                process.stepped.step_engine(self.clock.now());
            }
            68..90 => {
                let waiting = process.store.waiting() as u64;
                if waiting > 0 {
                    let index = self.dice.below(waiting) as usize;
                    self.log("happen", || format!("  call {index} of {waiting} happens"));
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

    /// Requests garbage collection, and does not wait for it.
    fn request_collection(&mut self) {
        let threshold = *self.dice.pick(&[0.5, 0.9, 1.0]);
        let Some(process) = &self.process else { return };
        self.log("gc", || format!("  garbage is collected by hand, threshold {threshold}"));
        // A closing or fenced volume refuses this, which changes nothing.
        let _ = process.stepped.volume().request_collection(threshold, Box::new(|_| ()));
    }

    fn land_late(&mut self) {
        let late = self.bucket.late() as u64;
        if late > 0 {
            let index = self.dice.below(late) as usize;
            self.bucket.land(index, &self.trace);
        }
    }

    /// The client submits a random request.
    fn submit_random(&mut self, process: &mut Process) {
        if process.client.waiting() >= 16
            || process.order.as_ref().is_some_and(past::PendingOrder::is_rollback)
        {
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
        let flags = Flags { fua: self.dice.one_in(10), ..Flags::default() };
        self.submit_request(process, operation, range, flags);
    }

    /// The client submits this request.
    pub(crate) fn submit_request(
        &mut self,
        process: &mut Process,
        operation: Operation,
        range: (u64, u64),
        flags: Flags,
    ) {
        self.stamp += 1;
        self.story.operations += 1;
        let stamp = self.stamp;
        self.trace.note("ask", [range.0, range.1], || {
            let fua = if flags.fua && operation == Operation::Write { ", FUA" } else { "" };
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
            _ => {
                let change = Change { operation, range, stamp, fua: flags.fua };
                process.client.change(&volume, &mut self.oracle, change);
            }
        }
    }

    fn range(&mut self, operation: Operation) -> (u64, u64) {
        let size = self.size_bytes;
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
        // Few places, so that they are rewritten often.
        let address = match self.dice.below(3) {
            0 => self.dice.below(size),
            1 => self.dice.below(size) / 4096 * 4096,
            _ => self.dice.below(8192),
        };
        (address.min(size - length), length)
    }
}

impl Machine {
    fn new(place: &Path, number: usize, locks: bool) -> Result<Self, String> {
        let staging = place.join(format!("machine-{number}"));
        std::fs::create_dir_all(&staging)
            .map_err(|error| format!("{}: {error}", staging.display()))?;
        let machine = Machine {
            media: if locks {
                MachineMedia::default().with_locks()
            } else {
                MachineMedia::default()
            },
            staging,
            outdated: false,
            ahead_ms: Arc::default(),
            has_lost_memory: false,
            accepts_memory_loss: false,
            old_image: None,
            index_path: place.join(format!("machine-{number}.index")),
        };
        let _ = std::fs::remove_file(&machine.index_path);
        machine.lose_memory();
        Ok(machine)
    }

    /// The power was cut: memory is lost.
    fn lose_power(&mut self) {
        self.media.boot();
        (self.has_lost_memory, self.accepts_memory_loss) = (false, false);
        self.lose_memory();
    }

    /// Memory is lost, as with a container; the machine and its disks keep running.
    fn lose_memory(&self) {
        self.for_memory(|path| std::fs::remove_file(path));
    }

    /// Truncates memory or changes its first page. The result is a new file, so that the mapping of
    /// a process that was replaced but still lives stays intact.
    fn damage_memory(&self, cut: bool) {
        self.for_memory(|path| {
            let mut bytes = std::fs::read(path)?;
            if cut {
                bytes.truncate(bytes.len() / 2);
            } else if let Some(byte) = bytes.get_mut(66) {
                *byte ^= 1;
            }
            let mode = std::fs::metadata(path)?.permissions();
            std::fs::remove_file(path)?;
            std::fs::write(path, bytes)?;
            std::fs::set_permissions(path, mode)
        });
    }

    fn for_memory(&self, act: impl Fn(&Path) -> std::io::Result<()>) {
        let Ok(entries) = std::fs::read_dir(&self.staging) else { return };
        for entry in entries.flatten() {
            let _ = act(&entry.path());
        }
    }
}

fn journal_path() -> PathBuf {
    PathBuf::from("/journal")
}

fn cache_path() -> PathBuf {
    PathBuf::from("/cache")
}
