//! The state under the cache's one lock: pages, their order, waiting requests, and the work to do
//! without the lock.
//!
//! Invariants: nothing here calls the device below or answers a request; both become [`Work`].
//! [`Dirty::order`] has a page exactly if some of its bytes are not below, under the number of the
//! oldest such write. There is a module for each operation on the state: `read`, `write`,
//! `write_back`, `push` (requests that wait until bytes are below), `change` (requests that go
//! straight below).
//!
//! Not here: the lock, and the thread that does the work (`super`).

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Instant;

use sawmill_device::{Error, Operation, Outcome, Reply, Request};

use self::change::PageLock;
use self::push::Push;
use self::read::PageRead;
use self::write_back::PackedPages;
use super::OutcomeListener;
use super::buffers::PageBytes;
use super::counters::CacheCounters;
use super::options::{CacheSetup, Policy};
use super::table::PageTable;
use super::task::Task;

mod change;
mod push;
mod read;
mod write;
mod write_back;

/// Work to do without the lock.
pub(super) enum Work {
    /// Submit to the device below.
    Below(Request),
    /// Encode, and submit as a packed write.
    Packed(PackedPages),
    Answer(Task, Outcome),
    /// Buffers that nobody needs.
    GiveBack(Vec<PageBytes>),
}

/// Bytes that are not below yet.
#[derive(Default)]
pub(super) struct Dirty {
    /// Dirty pages, oldest first: the number of the oldest write that the target lacks, the page.
    pub(super) order: BTreeSet<(u64, u64)>,
    /// Pages to write back as soon as possible; none of them is in flight.
    pub(super) wanted: BTreeSet<u64>,
    /// The start of the next write-back's search.
    pub(super) cursor: u64,
    pub(super) bytes: u64,
    /// Bytes saved so far, compared with writing whole pages.
    pub(super) saved_bytes: i64,
}

/// Unanswered requests, by what they wait for.
#[derive(Default)]
struct WaitLists {
    /// Writes that wait for room, in order.
    /// Bounded by the requests that the doors admit.
    held_requests: VecDeque<Task>,
    /// Pages that are being changed below directly. They do not overlap.
    /// Bounded by the requests that the doors admit.
    page_locks: Vec<PageLock>,
    /// Requests that wait for a lock, or for an earlier request in this list, in order.
    /// Bounded by the requests that the doors admit.
    blocked: VecDeque<Task>,
    /// Flushes that wait for all writes up to a number, in order.
    /// Bounded by the requests that the doors admit.
    flushes: VecDeque<(u64, Task)>,
    /// Bounded by the pages of the table.
    pushes: HashMap<u64, Push>,
    /// Bounded by the requests that the doors admit.
    reads: HashMap<u64, PageRead>,
}

pub(super) struct CacheState {
    pub(super) setup: CacheSetup,
    counters: Arc<CacheCounters>,
    me: Weak<dyn OutcomeListener>,
    table: PageTable,
    pub(super) dirty: Dirty,
    wait_lists: WaitLists,
    write_backs: usize,
    /// The number of the newest write.
    pub(super) clock: u64,
    last_id: u64,
    pub(super) last_push: Option<Instant>,
    pub(super) work: Vec<Work>,
    /// A thread is doing the work.
    pub(super) acting: bool,
    /// A reusable buffer for lists.
    holes: Vec<Range<u64>>,
}

impl CacheState {
    pub(super) fn new(
        setup: CacheSetup,
        counters: Arc<CacheCounters>,
        me: Weak<dyn OutcomeListener>,
    ) -> Self {
        let table = PageTable::new(&setup, counters.clone());
        CacheState {
            setup,
            counters,
            me,
            table,
            dirty: Dirty::default(),
            wait_lists: WaitLists::default(),
            write_backs: 0,
            clock: 0,
            last_id: 0,
            last_push: None,
            work: Vec::new(),
            acting: false,
            holes: Vec::new(),
        }
    }

    /// Starts a checked request, or queues it. Returns it if it has already succeeded.
    pub(super) fn start(&mut self, task: Task) -> Option<Task> {
        if self.must_wait(&task.request) {
            self.wait_lists.blocked.push_back(task);
            return None;
        }
        match task.request.operation {
            Operation::Read => return self.read(task),
            Operation::Write if self.setup.policy != Policy::WriteAround => {
                return self.write(task);
            }
            Operation::Write | Operation::Discard | Operation::WriteZeroes => self.change(task),
            Operation::Flush => self.flush(task),
            Operation::Allocation => self.start_query(task),
            Operation::Prefetch => self.work.push(Work::Below(task.request)),
        }
        None
    }

    /// As [`CacheState::start`], for a request that has waited: its answer is work too.
    pub(super) fn resume(&mut self, task: Task) {
        if let Some(task) = self.start(task) {
            self.answer(task, Ok(Reply::Done));
        }
    }

    pub(super) fn answer(&mut self, task: Task, outcome: Outcome) {
        self.work.push(Work::Answer(task, outcome));
    }

    pub(super) fn fail(&mut self, task: Task, error: &Error) {
        self.answer(task, Err(error.clone()));
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// A page has become quiet: it may be evicted (see `PageTable::trim`), and a claim that
    /// waited for it may continue.
    pub(super) fn quieted(&mut self, number: u64) {
        self.table.quieted(number);
        self.page_quieted(number);
    }

    pub(super) fn note_unsaved(&self) {
        self.counters.dirty_bytes.store(self.dirty.bytes, Relaxed);
    }
}
