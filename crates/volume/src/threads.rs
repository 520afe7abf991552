//! The threads around the loops: one for the journal, one for the engine. A simulation steps the
//! loops itself ([`steps`]).
//!
//! Modules: [`pool`] (readers and collectors), [`later`] (jobs that are due later), [`wake`] (how a
//! thread sleeps and is woken).
//!
//! Invariant: the threads decide only when a loop steps and how long it sleeps. All else is in the
//! step, so that a simulation runs the same code.
//!
//! Not here: what the loops do (`journal::writer`, `engine`).

pub(crate) mod later;
pub(crate) mod pool;
pub(crate) mod steps;
pub(crate) mod wake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::contexts::Contexts;
use crate::disk::Lock;
use crate::engine::Engine;
use crate::journal::Journal;
use crate::journal::writer::{JournalWriter, Step};
use crate::stored_data::StoredData;
use crate::threads::later::DeferredJobs;
use crate::write::{self, WriteContext};
use crate::{Error, ErrorKind, Result};

/// How long the journal's thread waits for more before it settles its marks.
const SETTLE_AFTER: Duration = Duration::from_millis(50);

/// How long to watch for an expected flush: about as long as waking a sleeping thread takes.
const EXPECTED_TIME_MAX: Duration = Duration::from_micros(60);

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

/// The threads of an open volume, and the means to end them.
pub(crate) struct Threads {
    write: Arc<WriteContext>,
    jobs: Arc<DeferredJobs>,
    loop_end: Arc<LoopEnd>,
    journal: Mutex<Option<JoinHandle<()>>>,
    engine: Mutex<Option<JoinHandle<()>>>,
}

impl Threads {
    /// Starts no thread: the caller steps the loops, which heed [`loop_end`](Self::loop_end).
    pub(crate) fn idle(contexts: &Contexts) -> Self {
        let (journal, engine) = (Mutex::default(), Mutex::default());
        let (write, jobs) = (contexts.write.clone(), contexts.read.jobs.clone());
        Threads { write, jobs, loop_end: Arc::default(), journal, engine }
    }

    /// Starts the threads; without loops (read-only), only the one that runs delayed jobs.
    /// They hold the lock of the journal until they have ended.
    pub(crate) fn start(
        contexts: &Contexts,
        loops: Option<(JournalWriter, Engine)>,
        lock: Option<&Arc<Lock>>,
    ) -> Result<Self> {
        let loop_end = Arc::new(LoopEnd::default());
        let (writer, engine) = loops.unzip();
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(work).map_err(|error| {
                Error::caused(
                    ErrorKind::Unavailable,
                    format!("the {name} thread cannot be started"),
                    error,
                )
            })
        };
        let journal = match (writer, contexts.write.journal.clone()) {
            (Some(writer), Some(journal)) => {
                let (contexts, loop_end, lock) =
                    (contexts.clone(), loop_end.clone(), lock.cloned());
                let run = move || {
                    let _held = lock;
                    let run = JournalLoop::new(&contexts, journal, writer, loop_end);
                    guard(&contexts.write, "journal", || run_journal(run));
                };
                Some(spawn("journal", Box::new(run))?)
            }
            _ => None,
        };
        let engine = {
            let (contexts, loop_end, lock) = (contexts.clone(), loop_end.clone(), lock.cloned());
            let run = move || {
                let _held = lock;
                guard(&contexts.write, "engine", || run_engine(&contexts, engine, &loop_end));
            };
            spawn("engine", Box::new(run))?
        };
        Ok(Threads {
            write: contexts.write.clone(),
            jobs: contexts.read.jobs.clone(),
            loop_end,
            journal: Mutex::new(journal),
            engine: Mutex::new(Some(engine)),
        })
    }

    /// Stores everything and ends the threads; false when it was abandoned meanwhile.
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

    /// Ends the threads now.
    pub(crate) fn abandon(&self) {
        self.loop_end.abandon.store(true, Ordering::Release);
        self.write.mailbox.set_closed();
        self.end();
    }

    fn end(&self) {
        self.loop_end.end.store(true, Ordering::Release);
        for thread in [&self.journal, &self.engine] {
            // Held until the thread has ended: a concurrent close must wait for that too.
            let mut held = thread.lock();
            let Some(thread) = held.take() else { continue };
            if let Some(journal) = &self.write.journal {
                journal.wake.notify();
            }
            self.write.mailbox.wake.notify();
            if sawmill_sys::join_unless_own(thread).is_err() {
                tracing::error!("a thread of volume {} panicked", self.write.attachment.name);
            }
        }
        // No waiter may outlive the volume.
        self.jobs.close();
    }
}

/// Runs a loop. If it panics, the volume fails.
fn guard(write: &WriteContext, name: &str, work: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
        write.fail_by_panic(name);
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
        Pause::Short
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

fn run_journal(mut run: JournalLoop) {
    let journal = run.journal.clone();
    loop {
        match run.step() {
            Pause::No => {}
            Pause::Short => {
                journal.wake.sleep(Some(SETTLE_AFTER));
            }
            Pause::Settle => {
                if journal.expects_flush() {
                    journal.wake.watch(EXPECTED_TIME_MAX);
                }
                if !journal.wake.sleep(Some(SETTLE_AFTER)) {
                    run.nothing_came();
                }
            }
            Pause::Long => journal.rest(),
            Pause::End => return run.close(),
        }
    }
}

fn run_engine(contexts: &Contexts, mut engine: Option<Engine>, loop_end: &LoopEnd) {
    loop {
        let now = contexts.attachment.world.now();
        let stepped = engine.as_mut().and_then(|engine| engine.step(now));
        let due_in = contexts.read.jobs.run_due(now);
        if loop_end.end.load(Ordering::Acquire) {
            // No waiter may outlive the volume.
            return contexts.read.jobs.close();
        }
        contexts.write.mailbox.wake.sleep(stepped.into_iter().chain(due_in).min());
    }
}
