//! The two loops of a volume, that of the journal and that of the engine, and how they end. A
//! simulation steps the loops itself ([`steps`]).
//!
//! Modules: [`loops`] (the threads that run the loops of all volumes), [`pool`] (readers and
//! collectors), [`later`] (jobs that are due later), [`wake`] (how a loop rests and is woken).
//!
//! Invariant: the threads decide only when a loop steps and how long it rests. All else is in the
//! step, so that a simulation runs the same code.
//!
//! Not here: what the loops do (`journal::writer`, `engine`).

pub(crate) mod later;
pub(crate) mod loops;
pub(crate) mod pool;
pub(crate) mod steps;
pub(crate) mod wake;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::Result;
use crate::contexts::Contexts;
use crate::disk::Lock;
use crate::engine::Engine;
use crate::journal::Journal;
use crate::journal::writer::{JournalWriter, Step};
use crate::stored_data::StoredData;
use crate::threads::later::DeferredJobs;
use crate::threads::loops::{LoopGroup, LoopKind, LoopThreads, Rest, SteppedLoop, VolumeLoop};
use crate::threads::wake::Wake;
use crate::write::{self, WriteContext};

/// How long the journal's loop waits for more before it settles its marks.
const SETTLE_AFTER: Duration = Duration::from_millis(50);

/// How long to watch for an expected flush: about as long as waking a sleeping thread takes.
const EXPECTED_TIME_MAX: Duration = Duration::from_micros(60);

/// How often a loop whose journal has failed looks for records without being told of them.
const RESCUE_EVERY: Duration = Duration::from_secs(1);

/// How the loops are to end.
#[derive(Default)]
pub(crate) struct LoopEnd {
    /// End now, whatever is left to do.
    abandon: AtomicBool,
    /// Everything is stored: the superblock may record that, and the journal end.
    clean: AtomicBool,
    /// The superblock records that durably.
    is_clean_recorded: AtomicBool,
    end: AtomicBool,
}

/// The running loops of an open volume, and the means to end them.
pub(crate) struct Threads {
    write: Arc<WriteContext>,
    jobs: Arc<DeferredJobs>,
    loop_end: Arc<LoopEnd>,
    /// The journal's loop, if there is one, then the engine's.
    loops: Vec<Arc<VolumeLoop>>,
}

/// The threads for the loops of a volume.
pub(crate) struct LoopPlace {
    pub(crate) threads: Arc<LoopThreads>,
    /// The number of the journal's disk. Two logical volumes on one disk have two numbers.
    pub(crate) disk: u64,
}

impl LoopPlace {
    /// For a volume whose journal is at this path.
    pub(crate) fn of(threads: Arc<LoopThreads>, journal: &Path) -> Self {
        // Read-only volumes have no journal; they wait for no disk either.
        let found = std::fs::metadata(journal);
        let disk = found.map_or(0, |about| match about.rdev() {
            0 => about.dev(),
            device => device,
        });
        LoopPlace { threads, disk }
    }

    fn run(
        &self,
        kind: LoopKind,
        wake: Arc<Wake>,
        stepped: impl SteppedLoop + 'static,
    ) -> Result<Arc<VolumeLoop>> {
        self.threads.run(LoopGroup { disk: self.disk, kind }, wake, Box::new(stepped))
    }
}

impl Threads {
    /// Starts nothing: the caller steps the loops, which heed [`loop_end`](Self::loop_end).
    pub(crate) fn idle(contexts: &Contexts) -> Self {
        let (write, jobs) = (contexts.write.clone(), contexts.read.jobs.clone());
        Threads { write, jobs, loop_end: Arc::default(), loops: Vec::new() }
    }

    /// Starts the loops; a read-only volume only has one that runs delayed jobs. They hold the lock
    /// of the journal until they have ended.
    pub(crate) fn start(
        contexts: &Contexts,
        loops: Option<(JournalWriter, Engine)>,
        lock: Option<&Arc<Lock>>,
        place: &LoopPlace,
    ) -> Result<Self> {
        let mut threads = Self::idle(contexts);
        let (writer, engine) = loops.unzip();
        let loop_end = || threads.loop_end.clone();
        let mut running = Vec::new();
        if let (Some(writer), Some(journal)) = (writer, contexts.write.journal.clone()) {
            let (wake, held) = (journal.wake.clone(), lock.cloned());
            let journal = JournalLoop::new(contexts, journal, writer, loop_end());
            let stepped = SteppedJournal { journal, _held: held };
            running.push(place.run(LoopKind::Journal, wake, stepped)?);
        }
        let stepped = SteppedEngine {
            contexts: contexts.clone(),
            engine,
            loop_end: loop_end(),
            _held: lock.cloned(),
        };
        let wake = contexts.write.mailbox.wake.clone();
        let engine = place.run(LoopKind::Engine, wake, stepped);
        threads.loops = running;
        match engine {
            Ok(engine) => threads.loops.push(engine),
            Err(error) => {
                threads.abandon();
                return Err(error);
            }
        }
        Ok(threads)
    }

    /// Stores everything and ends the loops; false when it was abandoned meanwhile.
    pub(crate) fn close(&self) -> bool {
        self.begin_close();
        if self.write.journal.is_some() {
            self.write.mailbox.wait_closed();
        }
        self.allow_clean();
        self.end();
        !self.loop_end.abandon.load(Ordering::Acquire)
    }

    /// Asks the loops to store everything.
    pub(crate) fn begin_close(&self) {
        if let Some(journal) = &self.write.journal {
            self.write.mailbox.intake.seal_through(journal.ring.next());
            journal.wake.notify();
            self.write.mailbox.close();
        }
    }

    /// The engine has closed: unless something went wrong, everything is stored and the superblock
    /// may record that.
    pub(crate) fn allow_clean(&self) {
        let Some(journal) = &self.write.journal else { return };
        let dead = self.write.attachment.state.is_dead() || journal.failure().is_some();
        let abandoned = self.loop_end.abandon.load(Ordering::Acquire);
        self.loop_end.clean.store(!dead && !abandoned, Ordering::Release);
    }

    /// Whether the superblock records that everything is stored: then no attach needs the memory.
    pub(crate) fn is_memory_done(&self) -> bool {
        self.loop_end.is_clean_recorded.load(Ordering::Acquire)
    }

    pub(crate) fn loop_end(&self) -> Arc<LoopEnd> {
        self.loop_end.clone()
    }

    /// Ends the loops now.
    pub(crate) fn abandon(&self) {
        self.loop_end.abandon.store(true, Ordering::Release);
        self.write.mailbox.set_closed();
        self.end();
    }

    fn end(&self) {
        self.loop_end.end.store(true, Ordering::Release);
        self.loops.iter().for_each(|running| running.wait_ended());
        // No waiter may outlive the volume.
        self.jobs.close();
    }
}

/// How long the journal's loop may rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Step again at once.
    No,
    /// A writer is still filling a slot that a flush waits for.
    Short,
    /// For a moment; if nothing comes meanwhile, call [`JournalLoop::nothing_came`].
    Settle,
    /// Until the next append or notification.
    Long,
    /// The journal has failed: as long as nothing is appended.
    Rescue,
    /// It has ended.
    End,
}

/// The journal's loop: its steps, and the handling of their results.
pub(crate) struct JournalLoop {
    write: Arc<WriteContext>,
    stored: Arc<StoredData>,
    journal: Arc<Journal>,
    writer: JournalWriter,
    loop_end: Arc<LoopEnd>,
    /// Nothing came for a while.
    is_quiet: bool,
}

impl JournalLoop {
    pub(crate) fn new(
        contexts: &Contexts,
        journal: Arc<Journal>,
        writer: JournalWriter,
        loop_end: Arc<LoopEnd>,
    ) -> Self {
        let (write, stored) = (contexts.write.clone(), contexts.read.stored.clone());
        JournalLoop { write, stored, journal, writer, loop_end, is_quiet: false }
    }

    pub(crate) fn nothing_came(&mut self) {
        self.is_quiet = true;
    }

    pub(crate) fn step(&mut self) -> Pause {
        if self.journal.failure().is_some() {
            return self.rescue();
        }
        let (write, stored, journal) = (&self.write, &self.stored, &self.journal);
        let segment_bytes = u64::from(write.attachment.record.segment_bytes);
        let mut take = |records| write.mailbox.intake.push_records(records, segment_bytes);
        let mut give_up = |wanted| stored.residents.give_up(wanted, journal.segments_end());
        match self.writer.step(&mut take, &mut give_up) {
            Ok(Step::Busy) => {
                // Room may have been made.
                write::resume_soon(write);
                self.is_quiet = false;
                Pause::No
            }
            Ok(Step::Waiting) => Pause::Short,
            Ok(Step::Idle | Step::Unsettled) if self.loop_end.end.load(Ordering::Acquire) => {
                Pause::End
            }
            Ok(_) if !self.is_quiet => Pause::Settle,
            Ok(step) => {
                self.is_quiet = false;
                if step == Step::Unsettled
                    && let Err(error) = self.writer.settle()
                {
                    journal.fail(error);
                    return Pause::No;
                }
                Pause::Long
            }
            Err(error) => {
                tracing::error!("{error}");
                journal.fail(error);
                Pause::No
            }
        }
    }

    /// The journal has failed, or the volume is fenced: hands accepted records over from memory,
    /// and fails the writes that wait for room.
    fn rescue(&mut self) -> Pause {
        let write = &self.write;
        if self.loop_end.end.load(Ordering::Acquire) {
            return Pause::End;
        }
        let segment_bytes = u64::from(write.attachment.record.segment_bytes);
        self.writer
            .rescue(&mut |records| write.mailbox.intake.push_records(records, segment_bytes));
        if let Some(error) = self.journal.failure().filter(|_| write.stalled.count() > 0) {
            write.stalled.fail(error);
        }
        write.mailbox.wake.notify();
        Pause::Rescue
    }

    /// Writes the journal's final superblock.
    pub(crate) fn close(&mut self) {
        let clean = self.loop_end.clean.load(Ordering::Acquire);
        if self.journal.failure().is_some() {
            return;
        }
        let ended = match self.loop_end.abandon.load(Ordering::Acquire) {
            true => self.writer.leave(),
            false => self.writer.close(clean),
        };
        match ended {
            Ok(()) => self.loop_end.is_clean_recorded.store(clean, Ordering::Release),
            Err(error) => tracing::error!("{error}"),
        }
    }
}

/// The two loops of an attachment; `None` when a volume was opened to read.
pub(crate) type Loops = Option<(JournalLoop, Engine)>;

/// The journal's loop and the lock of its journal.
struct SteppedJournal {
    journal: JournalLoop,
    _held: Option<Arc<Lock>>,
}

impl SteppedLoop for SteppedJournal {
    fn step(&mut self, was_quiet: bool) -> Rest {
        let run = &mut self.journal;
        run.journal.end_rest();
        if was_quiet {
            run.nothing_came();
        }
        match run.step() {
            Pause::No => Rest::No,
            Pause::Short => Rest::Short { watch: Duration::ZERO, sleep: SETTLE_AFTER },
            Pause::Settle => {
                let expected =
                    if run.journal.expects_flush() { EXPECTED_TIME_MAX } else { Duration::ZERO };
                Rest::Short { watch: expected, sleep: SETTLE_AFTER }
            }
            Pause::Long if run.journal.begin_rest() => Rest::Long(None),
            Pause::Long => Rest::No,
            // Failed volumes may be many and stay for long: they keep no thread in their rests, and
            // those whose engine has ended as well have nothing to look for.
            Pause::Rescue if !run.journal.begin_rest() => Rest::Long(Some(SETTLE_AFTER)),
            Pause::Rescue if run.write.attachment.state.is_dead() => Rest::Long(None),
            Pause::Rescue => Rest::Long(Some(RESCUE_EVERY)),
            Pause::End => {
                run.close();
                Rest::End
            }
        }
    }

    fn fail(&mut self) {
        self.journal.write.fail_by_panic("journal");
    }
}

/// The engine's loop; without an engine (read-only), it runs the jobs that are due.
struct SteppedEngine {
    contexts: Contexts,
    engine: Option<Engine>,
    loop_end: Arc<LoopEnd>,
    _held: Option<Arc<Lock>>,
}

impl SteppedLoop for SteppedEngine {
    fn step(&mut self, _: bool) -> Rest {
        let now = self.contexts.attachment.world.now();
        let stepped = self.engine.as_mut().and_then(|engine| engine.step(now));
        let due_in = self.contexts.read.jobs.run_due(now);
        if self.loop_end.end.load(Ordering::Acquire) {
            // No waiter may outlive the volume.
            self.contexts.read.jobs.close();
            return Rest::End;
        }
        Rest::Long(stepped.into_iter().chain(due_in).min())
    }

    fn fail(&mut self) {
        self.contexts.write.fail_by_panic("engine");
    }
}
