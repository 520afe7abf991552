//! The threads around the loops: one for the journal, one for the keeper. A simulation steps the loops
//! itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::journal::Journal;
use crate::journal::writer::{JournalWriter, Step};
use crate::keeper::Keeper;
use crate::shared::Shared;
use crate::write;
use crate::{Error, ErrorKind, Result};

/// How long the journal's thread waits for more before it settles its marks.
const SETTLE_AFTER: Duration = Duration::from_millis(50);

/// What the threads are told.
#[derive(Default)]
struct Orders {
    /// End now, whatever is left to do.
    abandon: AtomicBool,
    /// Everything is stored: the journal may say so and end.
    clean: AtomicBool,
    end: AtomicBool,
}

/// See the head of this file.
pub(crate) struct Driver {
    shared: Arc<Shared>,
    orders: Arc<Orders>,
    journal: Mutex<Option<JoinHandle<()>>>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl Driver {
    /// Starts the threads; without loops (read-only) only the one that runs jobs for later.
    pub(crate) fn start(shared: &Arc<Shared>, loops: Option<(JournalWriter, Keeper)>) -> Result<Self> {
        let orders = Arc::new(Orders::default());
        let (writer, keeper) = loops.unzip();
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(work).map_err(|error| {
                Error::new(ErrorKind::Unavailable, format!("the {name} thread cannot be started: {error}"))
            })
        };
        let journal = match (writer, shared.journal.clone()) {
            (Some(writer), Some(journal)) => {
                let (shared, orders) = (shared.clone(), orders.clone());
                Some(spawn(
                    "journal",
                    Box::new(move || {
                        guard(&shared, "journal", || run_journal(&shared, &journal, writer, &orders));
                    }),
                )?)
            }
            _ => None,
        };
        let keeper = {
            let (shared, orders) = (shared.clone(), orders.clone());
            spawn(
                "keeper",
                Box::new(move || guard(&shared, "keeper", || run_keeper(&shared, keeper, &orders))),
            )?
        };
        Ok(Driver {
            shared: shared.clone(),
            orders,
            journal: Mutex::new(journal),
            keeper: Mutex::new(Some(keeper)),
        })
    }

    /// Stores everything and ends the threads; false when it was abandoned meanwhile.
    pub(crate) fn close(&self) -> bool {
        if let Some(journal) = &self.shared.journal {
            self.shared.inbox.seal_through(journal.ring.next());
            journal.wake.ring();
            self.shared.inbox.close();
            self.shared.inbox.wait_closed();
            let dead = self.shared.state.is_dead() || journal.failure().is_some();
            let abandoned = self.orders.abandon.load(Ordering::Acquire);
            self.orders.clean.store(!dead && !abandoned, Ordering::Release);
        }
        self.end();
        !self.orders.abandon.load(Ordering::Acquire)
    }

    /// Ends the threads now.
    pub(crate) fn abandon(&self) {
        self.orders.abandon.store(true, Ordering::Release);
        self.shared.inbox.set_closed();
        self.end();
    }

    fn end(&self) {
        self.orders.end.store(true, Ordering::Release);
        for thread in [&self.journal, &self.keeper] {
            // Held until the thread has ended: whoever closes beside us must wait for that too.
            let mut held = thread.lock();
            let Some(thread) = held.take() else { continue };
            if let Some(journal) = &self.shared.journal {
                journal.wake.ring();
            }
            self.shared.inbox.wake.ring();
            if thread.join().is_err() {
                tracing::error!("a thread of volume {} panicked", self.shared.name);
            }
        }
    }
}

/// A loop that panics ends the volume with a reason, instead of leaving everybody waiting for it.
fn guard(shared: &Arc<Shared>, name: &str, work: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
        let text = format!("a bug: the {name} thread panicked; what was accepted is in the journal");
        shared.fail(Error::new(ErrorKind::Internal, text));
        shared.inbox.set_closed();
    }
}

fn run_journal(shared: &Arc<Shared>, journal: &Arc<Journal>, mut writer: JournalWriter, orders: &Orders) {
    let segment_bytes = u64::from(shared.record.segment_bytes);
    let mut rested = false;
    loop {
        let mut take = |records| shared.inbox.push_records(records, segment_bytes);
        let mut give_up = |wanted| shared.residents.give_up(wanted, journal.segments_end());
        let step = writer.step(&mut take, &mut give_up);
        if matches!(step, Ok(Step::Busy)) {
            // Room may have been made.
            write::resume(shared);
        }
        match step {
            Ok(Step::Busy) => rested = false,
            Ok(Step::Waiting) => {
                journal.wake.sleep(Some(SETTLE_AFTER));
            }
            Ok(Step::Idle | Step::Unsettled) if orders.end.load(Ordering::Acquire) => break,
            Ok(_) if !rested => rested = !journal.wake.sleep(Some(SETTLE_AFTER)),
            Ok(step) => {
                rested = false;
                if step == Step::Unsettled
                    && let Err(error) = writer.settle()
                {
                    journal.fail(error);
                }
                journal.rest();
            }
            Err(error) => {
                tracing::error!("{error}");
                journal.fail(error);
            }
        }
        if let Some(error) = journal.failure() {
            shared.stalled.fail(error);
            shared.inbox.wake.ring();
            break;
        }
    }
    while journal.failure().is_some() && !orders.end.load(Ordering::Acquire) {
        writer.rescue(&mut |records| shared.inbox.push_records(records, segment_bytes));
        if let Some(error) = journal.failure().filter(|_| shared.stalled.count() > 0) {
            shared.stalled.fail(error);
            shared.inbox.wake.ring();
        }
        journal.wake.sleep(Some(SETTLE_AFTER));
    }
    let clean = orders.clean.load(Ordering::Acquire);
    if journal.failure().is_none()
        && !orders.abandon.load(Ordering::Acquire)
        && let Err(error) = writer.close(clean)
    {
        tracing::error!("{error}");
    }
}

fn run_keeper(shared: &Arc<Shared>, mut keeper: Option<Keeper>, orders: &Orders) {
    loop {
        let now = shared.world.now();
        let stepped = keeper.as_mut().and_then(|keeper| keeper.step(now));
        let later = shared.later.run_due(now);
        if orders.end.load(Ordering::Acquire) {
            // Nobody waits longer than the volume lives.
            return shared.later.close();
        }
        shared.inbox.wake.sleep(stepped.into_iter().chain(later).min());
    }
}
