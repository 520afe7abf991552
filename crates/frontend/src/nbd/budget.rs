//! Memory of all NBD connections of a process: a part that each is sure of, and a pool for the rest.
//!
//! Half of a budget is set aside for connections, [`SURE_BYTES`] for each: nobody can take that from
//! another, and whoever comes when it is all given out is refused. The other half is the pool. What does
//! not fit into its own part a connection takes from there, and where the pool is short it waits: who has
//! least of it comes first, and who came first among equals. Nobody overtakes a request that is too long
//! for what is left, so it has its turn.
//!
//! Invariants: what is counted is memory that is allocated, by [`Counted`], from before it is allocated
//! until it is freed, whoever holds it; a connection that waits holds nothing that others need in order to
//! free theirs. Not here: when a connection asks, and who is cut off because he keeps what others wait for
//! (`connection`).

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::Pages;

use super::limits::PAYLOAD_BYTES_MAX;

/// What each connection has for itself, whatever others do: a receive buffer and requests of usual size.
pub(super) const SURE_BYTES: u64 = 1 << 20;
/// The pool is asked for pieces of this size, so that it is not asked for every request.
const PIECE_BYTES: u64 = 1 << 20;
/// What one connection may have of the pool at least: a payload of the greatest length on its way, and one
/// that came to another process.
const CONNECTION_BYTES_MIN: u64 = 2 * PAYLOAD_BYTES_MAX as u64 + (8 << 20);

/// How much memory all NBD servers with this budget take for requests and replies. Clones share it.
#[derive(Clone)]
pub struct Budget(Arc<Inner>);

/// How much of a [`Budget`] is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetUse {
    /// The most it may be.
    pub bytes_max: u64,
    /// Set aside for connections, and taken from the pool.
    pub bytes: u64,
    /// Connections that wait for memory.
    pub waiting: u64,
}

struct Inner {
    bytes_max: u64,
    state: Mutex<State>,
    /// Connections that wait, for those who look often.
    waiting: AtomicU64,
}

#[derive(Default)]
struct State {
    connections: u64,
    pool_bytes: u64,
    waiting: Vec<Waiting>,
    next: u64,
}

struct Waiting {
    order: u64,
    wants: u64,
    /// What it has of the pool.
    holds: u64,
    wake: Wake,
    granted: bool,
}

/// Makes a connection look again.
pub(super) type Wake = Arc<dyn Fn() + Send + Sync>;

impl Budget {
    /// The least it can be: two payloads of the greatest length, and 80 connections.
    pub const BYTES_MIN: u64 = 160 << 20;
    /// What it is when nothing is said.
    pub const BYTES_DEFAULT: u64 = 1 << 30;

    /// A budget of this size. Errors: `Invalid` below [`Budget::BYTES_MIN`].
    pub fn new(bytes_max: u64) -> Result<Self> {
        if bytes_max < Self::BYTES_MIN {
            let text = format!(
                "nbd: a memory limit of {bytes_max} bytes is too small for the longest requests; it must be \
                 at least {} MiB",
                Self::BYTES_MIN >> 20
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(Self::of(bytes_max))
    }

    fn of(bytes_max: u64) -> Self {
        Budget(Arc::new(Inner { bytes_max, state: Mutex::default(), waiting: AtomicU64::new(0) }))
    }

    /// What is in use now.
    #[must_use]
    pub fn in_use(&self) -> BudgetUse {
        let state = self.0.state.lock();
        BudgetUse {
            bytes_max: self.0.bytes_max,
            bytes: state.connections * SURE_BYTES + state.pool_bytes,
            waiting: self.0.waiting.load(Relaxed),
        }
    }

    fn pool_bytes_max(&self) -> u64 {
        self.0.bytes_max / 2
    }

    fn connection_bytes_max(&self) -> u64 {
        (self.pool_bytes_max() / 4).max(CONNECTION_BYTES_MIN).min(self.pool_bytes_max())
    }

    /// A part for one more connection; `None` when all are given out. One that comes from another process has
    /// been let in there and gets its part in any case.
    pub(super) fn enter(&self, in_any_case: bool) -> Option<Arc<Tally>> {
        let mut state = self.0.state.lock();
        let room = self.0.bytes_max - self.pool_bytes_max();
        if !in_any_case && (state.connections + 1) * SURE_BYTES > room {
            return None;
        }
        state.connections += 1;
        Some(Arc::new(Tally { budget: self.clone(), bytes: AtomicU64::new(0), granted: AtomicU64::new(0) }))
    }

    /// Gives the pool to those who wait, as far as it goes.
    fn serve(&self, state: &mut State) {
        loop {
            let waiting = state.waiting.iter_mut().filter(|waiting| !waiting.granted);
            let Some(first) = waiting.min_by_key(|waiting| (waiting.holds, waiting.order)) else { break };
            if state.pool_bytes + first.wants > self.pool_bytes_max() {
                break;
            }
            state.pool_bytes += first.wants;
            first.granted = true;
            (first.wake)();
        }
        let waiting = state.waiting.iter().filter(|waiting| !waiting.granted).count();
        self.0.waiting.store(waiting as u64, Relaxed);
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::of(Self::BYTES_DEFAULT)
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.in_use())
    }
}

/// What one connection has. It goes back with the last of its buffers.
pub(super) struct Tally {
    budget: Budget,
    /// Allocated now.
    bytes: AtomicU64,
    /// Taken from the pool; changed by the connection's own thread.
    granted: AtomicU64,
}

impl Tally {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        let mut state = self.budget.0.state.lock();
        state.connections -= 1;
        state.pool_bytes -= self.granted.load(Relaxed);
        self.budget.serve(&mut state);
    }
}

/// Buffers from here on come straight from the kernel and go back to it at once: what a heap keeps of buffers
/// that were freed would be memory that nobody counts.
const PAGES_FROM: usize = 64 << 10;
const PAGE_BYTES: usize = 4096;

enum Bytes {
    Heap(Box<[u8]>),
    /// From this byte on.
    Pages(Pages, usize),
}

impl Bytes {
    fn zeroed(length: usize, head_bytes: usize) -> Self {
        if length < PAGES_FROM {
            return Bytes::Heap(vec![0; length].into());
        }
        let start = (head_bytes + PAGE_BYTES / 2).next_multiple_of(PAGE_BYTES) - PAGE_BYTES / 2 - head_bytes;
        let pages = Pages::zeroed(start + length);
        pages.map_or_else(|_| Bytes::Heap(vec![0; length].into()), |pages| Bytes::Pages(pages, start))
    }
}

/// A buffer that counts, from when it is made until it is dropped.
pub(super) struct Counted {
    bytes: Bytes,
    counted: u64,
    tally: Arc<Tally>,
}

impl Counted {
    /// So many zeroes.
    pub(super) fn zeroed(tally: &Arc<Tally>, length: usize) -> Self {
        Self::headed(tally, 0, length)
    }

    /// The same, where `head_bytes` are in front of data. A long one has its data in the middle of a page:
    /// files and sockets have theirs at the start of one, and a copy between places that lie a little apart
    /// within their pages takes three times as long (a load waits for a store whose address has the same
    /// lowest twelve bits).
    pub(super) fn headed(tally: &Arc<Tally>, head_bytes: usize, length: usize) -> Self {
        Self::of(tally, length as u64, || Bytes::zeroed(length, head_bytes))
    }

    /// These bytes.
    pub(super) fn from(tally: &Arc<Tally>, bytes: Vec<u8>) -> Self {
        Self::of(tally, bytes.len() as u64, || Bytes::Heap(bytes.into()))
    }

    /// Room for what the device will allocate.
    pub(super) fn room(tally: &Arc<Tally>, length: u64) -> Self {
        Self::of(tally, length, || Bytes::Heap(Box::default()))
    }

    fn of(tally: &Arc<Tally>, counted: u64, bytes: impl FnOnce() -> Bytes) -> Self {
        tally.bytes.fetch_add(counted, Relaxed);
        Counted { bytes: bytes(), counted, tally: tally.clone() }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // What is given to others is free by then.
        self.bytes = Bytes::Heap(Box::default());
        self.tally.bytes.fetch_sub(self.counted, Relaxed);
    }
}

impl Deref for Counted {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Heap(bytes) => bytes,
            Bytes::Pages(pages, start) => &pages[*start..],
        }
    }
}

impl DerefMut for Counted {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.bytes {
            Bytes::Heap(bytes) => bytes,
            Bytes::Pages(pages, start) => &mut pages[*start..],
        }
    }
}

/// The right of one connection to memory, in the hands of its thread.
pub(super) struct Account {
    tally: Arc<Tally>,
    wake: Wake,
    /// It waits for the pool, as this one.
    asked: Option<u64>,
    /// Small replies that wait to be sent; they are not [`Counted`] one by one.
    small_bytes: u64,
}

impl Account {
    pub(super) fn new(tally: Arc<Tally>, wake: Wake) -> Self {
        Account { tally, wake, asked: None, small_bytes: 0 }
    }

    pub(super) fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    fn granted(&self) -> u64 {
        self.tally.granted.load(Relaxed)
    }

    fn memory_bytes(&self) -> u64 {
        self.tally.bytes() + self.small_bytes
    }

    /// Whether it has something of the pool.
    pub(super) fn holds_pool(&self) -> bool {
        self.granted() > 0
    }

    /// Whether others wait for the pool.
    pub(super) fn is_wanted(&self) -> bool {
        self.tally.budget.0.waiting.load(Relaxed) > u64::from(self.asked.is_some())
    }

    /// A small reply is about to be queued.
    pub(super) fn expect_small(&mut self, bytes: u64) {
        self.small_bytes += bytes;
    }

    /// Takes stock, with so many bytes of small replies: what is not needed any more goes back to the pool,
    /// all of it where others wait or the thread is about to.
    pub(super) fn settle(&mut self, small_bytes: u64, about_to_wait: bool) {
        self.small_bytes = small_bytes;
        let over = self.memory_bytes().saturating_sub(SURE_BYTES);
        let granted = self.granted();
        let kept = if about_to_wait || self.is_wanted() { 0 } else { 2 * PIECE_BYTES };
        if over <= granted && granted - over <= kept {
            return;
        }
        // More than was granted is the truth too, and others have to wait for it: replies are longer than
        // was thought, or much came with the connection from another process.
        let budget = &self.tally.budget;
        let mut state = budget.0.state.lock();
        state.pool_bytes = state.pool_bytes - granted + over;
        self.tally.granted.store(over, Relaxed);
        if let Some(order) = self.asked
            && let Some(waiting) = state.waiting.iter_mut().find(|waiting| waiting.order == order)
        {
            waiting.holds = over;
        }
        budget.serve(&mut state);
    }

    /// Whether so many bytes more may be allocated. If not, this connection waits, and is woken when others
    /// have freed enough; or it has as much as one may have, and its own replies have to go first.
    pub(super) fn ensure(&mut self, bytes: u64) -> bool {
        let needed = self.memory_bytes() + bytes;
        if self.asked.is_none() && needed <= SURE_BYTES + self.granted() {
            return true;
        }
        self.ask(needed)
    }

    fn ask(&mut self, needed: u64) -> bool {
        let budget = self.tally.budget.clone();
        let mut state = budget.0.state.lock();
        self.collect(&mut state);
        let granted = self.granted();
        let missing = needed.saturating_sub(SURE_BYTES + granted);
        let cap = budget.connection_bytes_max();
        if missing == 0 || granted + missing > cap {
            budget.serve(&mut state);
            return missing == 0;
        }
        let wants = missing.next_multiple_of(PIECE_BYTES).min(cap - granted);
        let order = state.next;
        state.next += 1;
        state.waiting.push(Waiting { order, wants, holds: granted, wake: self.wake.clone(), granted: false });
        self.asked = Some(order);
        budget.serve(&mut state);
        if state.waiting.iter().any(|waiting| waiting.order == order && waiting.granted) {
            self.collect(&mut state);
            return true;
        }
        false
    }

    /// Waits no longer: nothing is missing any more.
    pub(super) fn withdraw(&mut self) {
        if self.asked.is_some() {
            let budget = self.tally.budget.clone();
            let mut state = budget.0.state.lock();
            self.collect(&mut state);
            budget.serve(&mut state);
        }
    }

    /// Ends waiting, with what was granted meanwhile.
    fn collect(&mut self, state: &mut State) {
        let Some(order) = self.asked.take() else { return };
        let Some(at) = state.waiting.iter().position(|waiting| waiting.order == order) else { return };
        let waiting = state.waiting.swap_remove(at);
        if waiting.granted {
            self.tally.granted.fetch_add(waiting.wants, Relaxed);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.withdraw();
    }
}
