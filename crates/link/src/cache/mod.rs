//! The initiator's byte-granular cache of the link (BASS, SoCC 2016): a partial write needs no read
//! below, and only dirty bytes travel.
//!
//! Modules: `buffers` (the bytes of pages), `task` (copies without the lock), `byte_set` (some
//! bytes of a page), `page`, `table` (the existing pages), `state` (everything under the lock, with
//! a module for each operation on it), `options`, `counters`.
//!
//! Invariants:
//!
//! - One lock; under it, nothing is submitted below and no request is answered (outcomes may arrive
//!   inside `submit`). Both become work, which one thread at a time does in order: an answer from
//!   below that makes new work does not deepen the stack.
//! - Payload is copied without the lock: from a request before it takes effect, to a request after
//!   what it reads was fixed. Under the lock, only short requests are copied, up to a page at
//!   each end of a longer write or where others share the page, and what was known of a page whose
//!   rest arrives.
//! - A flush succeeds only when all bytes that it covers are below and the device has flushed. A
//!   failed write-back fails the flushes, FUA and write-through writes that wait for its bytes, and
//!   the writes that wait for room. The bytes stay dirty, reads see them, and the next flush, tick
//!   or writer without room retries. An error of a write-back that nothing waited for is counted
//!   and logged, but not kept for later: the next flush retries the write-back.
//! - A write that failed (write-through, FUA) may still take effect later, as D8 allows; all
//!   readers agree.
//! - Nothing else writes the device below.
//!
//! Not here: threads (time comes through [`Cache::tick`], called by the owner of the cache),
//! resizes, and a last flush: a dropped cache forgets what was not flushed, and answers waiting
//! requests with `Internal`. The device may then be dropped by an answer from below; if that
//! matters, pass an `Arc` and keep another.

mod buffers;
mod byte_set;
mod counters;
mod options;
mod page;
mod state;
mod table;
mod task;

use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use sawmill_device::{BlockDevice, Geometry, Reply, Request, Result};

pub use self::counters::CacheCounters;
pub use self::options::{Options, Policy};

use self::options::CacheSetup;
use self::state::{CacheState, Work};
use self::task::Task;
use crate::packed_device::PackedDevice;

/// The unit of caching.
const PAGE_BYTES: usize = 4096;
/// The unit of fetching.
const SUB_BLOCK_BYTES: usize = 512;

/// A byte-granular cache in front of the device `D`.
pub struct Cache<D>(Arc<Core<D>>);

struct Core<D> {
    device: D,
    geometry: Geometry,
    counters: Arc<CacheCounters>,
    policy: Policy,
    state: Mutex<CacheState>,
}

/// Receives the outcomes of exchanges below.
trait OutcomeListener: Send + Sync {
    /// Changes the state under the lock, and does the work that follows.
    fn notify(&self, change: &mut dyn FnMut(&mut CacheState));
}

impl<D: PackedDevice + 'static> Cache<D> {
    /// An empty cache in front of `device`, which nothing else writes.
    ///
    /// `Invalid`: an option is out of range, or the device's limit for packed writes is too small.
    /// The longest request of the cache may be shorter than the device's: a quarter of its memory.
    pub fn new(device: D, options: &Options) -> Result<Self> {
        let (packed, span) = (device.packed_bytes_max(), device.packed_span_bytes_max());
        let setup = CacheSetup::new(options, &device.geometry(), packed, span)?;
        let (geometry, counters) = (setup.geometry, Arc::<CacheCounters>::default());
        let policy = setup.policy;
        let core = Arc::new_cyclic(|me: &Weak<Core<D>>| {
            let state = CacheState::new(setup, counters.clone(), me.clone());
            Core { device, geometry, counters, policy, state: Mutex::new(state) }
        });
        Ok(Cache(core))
    }

    /// Tells the cache the time, about once a second: every `flush_interval_s`, it writes back all
    /// dirty bytes.
    pub fn tick(&self, now: Instant) {
        let mut state = self.0.state.lock();
        let interval = state.setup.flush_interval;
        let last = *state.last_push.get_or_insert(now);
        if now.saturating_duration_since(last) >= interval {
            state.last_push = Some(now);
            let through = state.clock;
            state.want_all(through);
        }
        self.0.act(state);
    }

    /// The counters so far.
    pub fn counters(&self) -> &CacheCounters {
        &self.0.counters
    }

    /// The device below.
    pub fn inner(&self) -> &D {
        &self.0.device
    }
}

impl<D: PackedDevice + 'static> BlockDevice for Cache<D> {
    fn geometry(&self) -> Geometry {
        self.0.geometry
    }

    fn submit(&self, request: Request) {
        if let Err(error) = request.check(&self.0.geometry) {
            return request.fail(error);
        }
        let task = Task::new(request, self.0.policy);
        let mut state = self.0.state.lock();
        let completed_task = state.start(task);
        self.0.act(state);
        if let Some(task) = completed_task {
            task.complete(Ok(Reply::Done));
        }
    }
}

impl<D> Drop for Cache<D> {
    fn drop(&mut self) {
        let unsaved_bytes = self.0.state.lock().dirty.bytes;
        if unsaved_bytes > 0 {
            tracing::warn!(unsaved_bytes, "cache: dropped with unflushed bytes; they are lost");
        }
    }
}

impl<D: PackedDevice> Core<D> {
    /// Does the pending work, unless another thread is doing that: it will find new work too.
    fn act<'a>(&'a self, mut state: MutexGuard<'a, CacheState>) {
        if state.acting {
            return;
        }
        state.acting = true;
        let mut work = Vec::new();
        loop {
            state.pump();
            std::mem::swap(&mut work, &mut state.work);
            if work.is_empty() {
                state.acting = false;
                return;
            }
            drop(state);
            for work in work.drain(..) {
                match work {
                    Work::Below(request) => self.device.submit(request),
                    Work::Packed(packed) => self.device.submit_packed(packed.encode()),
                    Work::Answer(task, outcome) => task.complete(outcome),
                    Work::GiveBack(buffers) => buffers::give_back(buffers),
                }
            }
            state = self.state.lock();
        }
    }
}

impl<D: PackedDevice> OutcomeListener for Core<D> {
    fn notify(&self, change: &mut dyn FnMut(&mut CacheState)) {
        let mut state = self.state.lock();
        change(&mut state);
        self.act(state);
    }
}
