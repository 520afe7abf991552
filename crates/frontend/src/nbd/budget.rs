//! Memory of all NBD connections of a process: a guaranteed part for each, and a pool for the rest.
//!
//! Half of a budget is reserved for connections, [`SURE_BYTES`] for each: no other connection can
//! take that, and when all of it is assigned, new connections are refused. The other half is the
//! pool. A connection takes from the pool what exceeds its own part; if the pool is short, it
//! waits. The connection that holds least of the pool comes first, among equals in order of
//! arrival. A request that is too long for what is left is never overtaken, so it gets its turn.
//!
//! Invariants: memory is counted by [`BudgetBuffer`], from before it is allocated until it is
//! freed, wherever it is. A connection that waits holds nothing that others need to free theirs.
//! Not here: when a connection asks, and which connection is closed because it keeps what others
//! wait for (`connection`).

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::Pages;

use super::limits::PAYLOAD_BYTES_MAX;

/// The guaranteed memory of each connection: a receive buffer and requests of usual size.
pub(super) const SURE_BYTES: u64 = 1 << 20;
/// The granularity of requests to the pool, so that not every request goes there.
const PIECE_BYTES: u64 = 1 << 20;
/// The share of the pool that one connection can get at least: a payload of the greatest length in
/// flight, and one that another process received.
const CONNECTION_BYTES_MIN: u64 = 2 * PAYLOAD_BYTES_MAX as u64 + (8 << 20);

/// A limit on the memory for requests and replies of all NBD servers with this budget. Clones share
/// it.
#[derive(Clone)]
pub struct Budget(Arc<SharedBudget>);

/// The usage of a [`Budget`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetUse {
    /// The most bytes that all connections may hold together (`--nbd-memory-max`).
    pub bytes_max: u64,
    /// Reserved for connections, and taken from the pool.
    pub bytes: u64,
    /// Connections that wait for memory.
    pub waiting: u64,
}

struct SharedBudget {
    bytes_max: u64,
    state: Mutex<State>,
    /// Connections that wait, for cheap checks.
    waiting: AtomicU64,
}

#[derive(Default)]
struct State {
    connections: u64,
    pool_bytes: u64,
    /// Bounded by the connections: each waits once.
    waiters: Vec<BudgetWaiter>,
    next: u64,
}

struct BudgetWaiter {
    order: u64,
    wants: u64,
    /// Bytes that it has from the pool.
    holds: u64,
    wake: Wake,
    is_granted: bool,
}

/// Makes a connection check again.
pub(super) type Wake = Arc<dyn Fn() + Send + Sync>;

impl Budget {
    /// The smallest limit: two payloads of the greatest length, and 80 connections.
    pub const BYTES_MIN: u64 = 160 << 20;
    /// The default limit.
    pub const BYTES_DEFAULT: u64 = 1 << 30;

    /// A budget of this size. Errors: `Invalid` below [`Budget::BYTES_MIN`].
    pub fn new(bytes_max: u64) -> Result<Self> {
        if bytes_max < Self::BYTES_MIN {
            let text = format!(
                "nbd: a memory limit of {bytes_max} bytes is too small for the longest requests; \
                 it must be at least {} MiB",
                Self::BYTES_MIN >> 20
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(Self::of(bytes_max))
    }

    fn of(bytes_max: u64) -> Self {
        Budget(Arc::new(SharedBudget {
            bytes_max,
            state: Mutex::default(),
            waiting: AtomicU64::new(0),
        }))
    }

    /// The current usage.
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

    /// The part of one more connection; `None` if all parts are assigned.
    pub(super) fn admit(&self) -> Option<Arc<ConnectionBudget>> {
        let mut state = self.0.state.lock();
        let room = self.0.bytes_max - self.pool_bytes_max();
        ((state.connections + 1) * SURE_BYTES <= room).then(|| self.part(&mut state))
    }

    /// The part of a connection from another process: it was admitted there, and gets its part in
    /// any case.
    pub(super) fn adopt(&self) -> Arc<ConnectionBudget> {
        self.part(&mut self.0.state.lock())
    }

    fn part(&self, state: &mut State) -> Arc<ConnectionBudget> {
        state.connections += 1;
        Arc::new(ConnectionBudget {
            budget: self.clone(),
            bytes: AtomicU64::new(0),
            granted: AtomicU64::new(0),
        })
    }

    /// Grants memory of the pool to waiting connections, as far as it goes.
    fn serve(&self, state: &mut State) {
        loop {
            let waiters = state.waiters.iter_mut().filter(|waiter| !waiter.is_granted);
            let Some(first) = waiters.min_by_key(|waiter| (waiter.holds, waiter.order)) else {
                break;
            };
            // The first is never overtaken by one that wants less: under a stream of short
            // requests, one of 32 MiB would otherwise wait forever (decision 0035).
            if state.pool_bytes + first.wants > self.pool_bytes_max() {
                break;
            }
            state.pool_bytes += first.wants;
            first.is_granted = true;
            (first.wake)();
        }
        let waiter_count = state.waiters.iter().filter(|waiter| !waiter.is_granted).count();
        self.0.waiting.store(waiter_count as u64, Relaxed);
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

/// The memory of one connection. It is returned with the last of its buffers.
pub(super) struct ConnectionBudget {
    budget: Budget,
    /// Bytes allocated now.
    bytes: AtomicU64,
    /// Bytes taken from the pool; changed only by the connection's own thread.
    granted: AtomicU64,
}

impl ConnectionBudget {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

impl Drop for ConnectionBudget {
    fn drop(&mut self) {
        // The last buffer may be dropped by a thread of the device, long after the connection has
        // ended; until then its memory is in use and must not be granted to others.
        let mut state = self.budget.0.state.lock();
        state.connections -= 1;
        state.pool_bytes -= self.granted.load(Relaxed);
        self.budget.serve(&mut state);
    }
}

/// Longer buffers come straight from the kernel and return to it immediately: what a heap keeps of
/// freed buffers would not be counted.
const PAGES_BYTES_MIN: usize = 64 << 10;
const PAGE_BYTES: usize = 4096;

enum Bytes {
    Heap(Box<[u8]>),
    /// From this byte on.
    Pages(Pages, usize),
}

impl Bytes {
    fn zeroed(length: usize, head_bytes: usize) -> Self {
        if length < PAGES_BYTES_MIN {
            return Bytes::Heap(vec![0; length].into());
        }
        let start = (head_bytes + PAGE_BYTES / 2).next_multiple_of(PAGE_BYTES)
            - PAGE_BYTES / 2
            - head_bytes;
        let pages = Pages::zeroed(start + length);
        pages.map_or_else(
            |_| Bytes::Heap(vec![0; length].into()),
            |pages| Bytes::Pages(pages, start),
        )
    }
}

/// A buffer that is counted from its creation until it is dropped.
pub(super) struct BudgetBuffer {
    bytes: Bytes,
    counted: u64,
    connection_budget: Arc<ConnectionBudget>,
}

impl BudgetBuffer {
    /// A buffer of zeroes.
    pub(super) fn zeroed(connection_budget: &Arc<ConnectionBudget>, length: usize) -> Self {
        Self::headed(connection_budget, 0, length)
    }

    /// A buffer of zeroes, with `head_bytes` before the data. A long one has its data in the middle
    /// of a page: files and sockets have theirs at the start of one, and a copy between places with
    /// slightly different offsets in their pages takes three times as long (a load waits for a
    /// store with the same lowest twelve address bits).
    pub(super) fn headed(
        connection_budget: &Arc<ConnectionBudget>,
        head_bytes: usize,
        length: usize,
    ) -> Self {
        Self::of(connection_budget, length as u64, || Bytes::zeroed(length, head_bytes))
    }

    /// A buffer with these bytes.
    pub(super) fn from(connection_budget: &Arc<ConnectionBudget>, bytes: Vec<u8>) -> Self {
        Self::of(connection_budget, bytes.len() as u64, || Bytes::Heap(bytes.into()))
    }

    /// Room that the device will allocate.
    pub(super) fn room(connection_budget: &Arc<ConnectionBudget>, length: u64) -> Self {
        Self::of(connection_budget, length, || Bytes::Heap(Box::default()))
    }

    fn of(
        connection_budget: &Arc<ConnectionBudget>,
        counted: u64,
        bytes: impl FnOnce() -> Bytes,
    ) -> Self {
        connection_budget.bytes.fetch_add(counted, Relaxed);
        BudgetBuffer { bytes: bytes(), counted, connection_budget: connection_budget.clone() }
    }
}

impl Drop for BudgetBuffer {
    fn drop(&mut self) {
        // The buffer must be free when others are granted its memory.
        self.bytes = Bytes::Heap(Box::default());
        self.connection_budget.bytes.fetch_sub(self.counted, Relaxed);
    }
}

impl Deref for BudgetBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Heap(bytes) => bytes,
            Bytes::Pages(pages, start) => &pages[*start..],
        }
    }
}

impl DerefMut for BudgetBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.bytes {
            Bytes::Heap(bytes) => bytes,
            Bytes::Pages(pages, start) => &mut pages[*start..],
        }
    }
}

/// The right of one connection to memory, used by its thread.
pub(super) struct Account {
    connection_budget: Arc<ConnectionBudget>,
    wake: Wake,
    /// The number under which it waits for the pool.
    pending_order: Option<u64>,
    /// Small replies that wait to be sent; they are not [`BudgetBuffer`] individually.
    small_bytes: u64,
}

impl Account {
    pub(super) fn new(connection_budget: Arc<ConnectionBudget>, wake: Wake) -> Self {
        Account { connection_budget, wake, pending_order: None, small_bytes: 0 }
    }

    pub(super) fn connection_budget(&self) -> &Arc<ConnectionBudget> {
        &self.connection_budget
    }

    fn granted(&self) -> u64 {
        self.connection_budget.granted.load(Relaxed)
    }

    fn memory_bytes(&self) -> u64 {
        self.connection_budget.bytes() + self.small_bytes
    }

    /// Whether it holds memory of the pool.
    pub(super) fn holds_pool(&self) -> bool {
        self.granted() > 0
    }

    /// Whether others wait for the pool.
    pub(super) fn is_wanted(&self) -> bool {
        self.connection_budget.budget.0.waiting.load(Relaxed)
            > u64::from(self.pending_order.is_some())
    }

    /// A small reply is about to be queued.
    pub(super) fn expect_small(&mut self, bytes: u64) {
        self.small_bytes += bytes;
    }

    /// Updates the account, with this many bytes of small replies. Memory that is not needed any
    /// more returns to the pool; if others wait, all of it does.
    pub(super) fn settle(&mut self, small_bytes: u64) {
        self.small_bytes = small_bytes;
        self.give_back(if self.is_wanted() { 0 } else { 2 * PIECE_BYTES });
    }

    /// Returns all memory to the pool that is not in use: the thread is about to wait for an idle
    /// client, which has no small replies.
    pub(super) fn rest(&mut self) {
        self.small_bytes = 0;
        self.give_back(0);
    }

    /// Returns memory that is not in use, unless it is at most `kept_bytes`.
    fn give_back(&mut self, kept_bytes: u64) {
        let excess_bytes = self.memory_bytes().saturating_sub(SURE_BYTES);
        let granted = self.granted();
        if excess_bytes <= granted && granted - excess_bytes <= kept_bytes {
            return;
        }
        // If more is in use than was granted, that counts too, and others have to wait for it:
        // replies were longer than expected, or the connection brought much from another process.
        let budget = &self.connection_budget.budget;
        let mut state = budget.0.state.lock();
        state.pool_bytes = state.pool_bytes - granted + excess_bytes;
        self.connection_budget.granted.store(excess_bytes, Relaxed);
        if let Some(order) = self.pending_order
            && let Some(waiter) = state.waiters.iter_mut().find(|waiter| waiter.order == order)
        {
            waiter.holds = excess_bytes;
        }
        budget.serve(&mut state);
    }

    /// Whether this many more bytes may be allocated. If not, this connection waits and is woken
    /// when others have freed enough; or it is at its limit, and must send its own replies first.
    pub(super) fn ensure(&mut self, bytes: u64) -> bool {
        let needed = self.memory_bytes() + bytes;
        // A connection that waits already goes the long way: `request` also takes its place among
        // the waiting away, which would otherwise be granted memory that nobody wants.
        if self.pending_order.is_none() && needed <= SURE_BYTES + self.granted() {
            return true;
        }
        self.request(needed)
    }

    fn request(&mut self, needed: u64) -> bool {
        let budget = self.connection_budget.budget.clone();
        let mut state = budget.0.state.lock();
        self.collect(&mut state);
        let granted = self.granted();
        let missing = needed.saturating_sub(SURE_BYTES + granted);
        let cap = budget.connection_bytes_max();
        // At its cap a connection does not wait: no memory that others free can help it, only its
        // own replies going out.
        if missing == 0 || granted + missing > cap {
            budget.serve(&mut state);
            return missing == 0;
        }
        let wants = missing.next_multiple_of(PIECE_BYTES).min(cap - granted);
        let order = state.next;
        state.next += 1;
        state.waiters.push(BudgetWaiter {
            order,
            wants,
            holds: granted,
            wake: self.wake.clone(),
            is_granted: false,
        });
        self.pending_order = Some(order);
        budget.serve(&mut state);
        if state.waiters.iter().any(|waiter| waiter.order == order && waiter.is_granted) {
            self.collect(&mut state);
            return true;
        }
        false
    }

    /// Stops waiting: nothing is missing any more.
    pub(super) fn withdraw(&mut self) {
        if self.pending_order.is_some() {
            let budget = self.connection_budget.budget.clone();
            let mut state = budget.0.state.lock();
            self.collect(&mut state);
            budget.serve(&mut state);
        }
    }

    /// Stops waiting, and accepts what was granted in the meantime.
    fn collect(&mut self, state: &mut State) {
        let Some(order) = self.pending_order.take() else { return };
        let Some(at) = state.waiters.iter().position(|waiter| waiter.order == order) else {
            return;
        };
        let waiter = state.waiters.swap_remove(at);
        if waiter.is_granted {
            self.connection_budget.granted.fetch_add(waiter.wants, Relaxed);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.withdraw();
    }
}
