//! The in-flight region: the requests that were accepted and not answered, in memory that the
//! frontend keeps while this process dies and another one replaces it. Source: vhost-user,
//! "Inflight I/O tracking", split rings.
//!
//! Each queue has a head of 16 bytes (features, version, entries, `last_batch_head`, `used_idx`),
//! then 16 bytes per entry (`inflight`, `next`, `counter`).
//!
//! Invariants: an entry is in flight from before its request is executed until after the guest can
//! see that it was used. A process that dies between any two steps leaves a region from which
//! [`InflightQueue::recover`] finds exactly the requests that the guest still waits for. Each batch
//! of the protocol has one request. Not here: rings.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64};

use sawmill_sys::SharedMemory;

use super::Violation;
use super::message::{Area, InflightShape};

const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// Each queue starts at a cache line of its own.
const ALIGNMENT: usize = 64;
const VERSION: u16 = 1;
// Offsets in the head of a queue.
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_AT: usize = 14;
// Offsets in an entry.
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;

fn queue_bytes(queue_size: u16) -> usize {
    (HEAD_BYTES + ENTRY_BYTES * usize::from(queue_size)).next_multiple_of(ALIGNMENT)
}

/// The region of all queues of one frontend.
pub(super) struct Inflight {
    shared: SharedMemory,
    shape: InflightShape,
}

impl Inflight {
    /// A new region, with nothing in flight.
    pub(super) fn create(queues: u16, queue_size: u16) -> Result<Self, Violation> {
        let length = queue_bytes(queue_size) * usize::from(queues);
        let shared = SharedMemory::create("vhost-inflight", length)
            .map_err(|error| Violation::caused("cannot allocate an in-flight region", error))?;
        let area = Area { size_bytes: length as u64, offset: 0 };
        let region = Inflight { shared, shape: InflightShape { area, queues, queue_size } };
        for queue in 0..queues {
            let start = queue_bytes(queue_size) * usize::from(queue);
            region.half(start + VERSION_AT).store(VERSION, Relaxed);
            region.half(start + ENTRIES_AT).store(queue_size, Relaxed);
        }
        Ok(region)
    }

    /// The region of an earlier process, perhaps with requests in flight.
    pub(super) fn open(file: OwnedFd, shape: InflightShape) -> Result<Self, Violation> {
        let needed = queue_bytes(shape.queue_size) * usize::from(shape.queues);
        let Area { size_bytes, offset } = shape.area;
        if shape.queues == 0 || !shape.queue_size.is_power_of_two() || size_bytes < needed as u64 {
            return Err(Violation::new(format!("{shape:?} is not a valid in-flight region")));
        }
        let shared = SharedMemory::open(file, offset, needed)
            .map_err(|error| Violation::caused("cannot map the in-flight region", error))?;
        let region = Inflight { shared, shape };
        for queue in 0..shape.queues {
            let start = queue_bytes(shape.queue_size) * usize::from(queue);
            // The region may come from another implementation, before or after this one in the life
            // of the guest.
            let version = region.half(start + VERSION_AT).load(Relaxed);
            let entries = region.half(start + ENTRIES_AT).load(Relaxed);
            if (version, entries) != (VERSION, shape.queue_size) {
                let text =
                    format!("the in-flight region has version {version} and {entries} entries");
                return Err(Violation::new(text));
            }
        }
        Ok(region)
    }

    pub(super) fn shape(&self) -> InflightShape {
        self.shape
    }

    /// Another descriptor of the file behind it.
    pub(super) fn file(&self) -> std::io::Result<OwnedFd> {
        self.shared.file().as_fd().try_clone_to_owned()
    }

    /// The part of one queue. `None` if the region has none with that number or size.
    pub(super) fn queue(self: &Arc<Self>, index: u16, size: u16) -> Option<InflightQueue> {
        let fits = index < self.shape.queues && size <= self.shape.queue_size;
        let start = queue_bytes(self.shape.queue_size) * usize::from(index);
        fits.then(|| InflightQueue { region: self.clone(), start })
    }

    fn half(&self, offset: usize) -> &AtomicU16 {
        static OUTSIDE: AtomicU16 = AtomicU16::new(0);
        // Offsets come from the shape, for which the region is large enough.
        self.shared.half(offset).unwrap_or(&OUTSIDE)
    }
}

/// The in-flight region of one queue.
pub(super) struct InflightQueue {
    region: Arc<Inflight>,
    start: usize,
}

impl InflightQueue {
    fn entry(&self, head: u16) -> usize {
        self.start + HEAD_BYTES + ENTRY_BYTES * usize::from(head % self.region.shape.queue_size)
    }

    fn flag(&self, head: u16) -> &AtomicU8 {
        static OUTSIDE: AtomicU8 = AtomicU8::new(0);
        self.region.shared.byte(self.entry(head)).unwrap_or(&OUTSIDE)
    }

    fn counter(&self, head: u16) -> &AtomicU64 {
        static OUTSIDE: AtomicU64 = AtomicU64::new(0);
        self.region.shared.word(self.entry(head) + COUNTER_AT).unwrap_or(&OUTSIDE)
    }

    fn next(&self, head: u16) -> &AtomicU16 {
        self.region.half(self.entry(head) + NEXT_AT)
    }

    /// Call this before a request is executed. `counter` grows from one to the next.
    pub(super) fn take(&self, head: u16, counter: u64) {
        // The flag comes last: whoever finds it set also finds the counter by which requests are
        // ordered.
        self.counter(head).store(counter, Relaxed);
        self.flag(head).store(1, Release);
    }

    /// Call this before the guest can see that a request was used.
    pub(super) fn begin_answer(&self, head: u16) {
        let last = self.region.half(self.start + LAST_BATCH_HEAD_AT);
        self.next(head).store(last.load(Relaxed), Relaxed);
        last.store(head, Release);
    }

    /// Call this after the guest can see it: the index of the used ring is `used` now.
    pub(super) fn end_answer(&self, head: u16, used: u16) {
        self.flag(head).store(0, Release);
        self.region.half(self.start + USED_AT).store(used, Release);
    }

    /// At the start: the requests that were accepted and not answered, in the order of acceptance,
    /// and the counter for the next one. `used` is the index of the used ring as the guest sees it.
    pub(super) fn recover(&self, used: u16) -> (Vec<u16>, u64) {
        let size = self.region.shape.queue_size;
        let recorded_used = self.region.half(self.start + USED_AT);
        // Answers that the guest can see but that are still recorded as in flight.
        let behind = used.wrapping_sub(recorded_used.load(Acquire)).min(size);
        let mut head = self.region.half(self.start + LAST_BATCH_HEAD_AT).load(Acquire) % size;
        for _ in 0..behind {
            self.flag(head).store(0, Release);
            // Within the ring whatever it says: the frontend can write to this memory.
            head = self.next(head).load(Relaxed) % size;
        }
        recorded_used.store(used, Release);
        let mut waiting: Vec<(u64, u16)> = (0..size)
            .filter(|head| self.flag(*head).load(Acquire) != 0)
            .map(|head| (self.counter(head).load(Relaxed), head))
            .collect();
        // By counter, because the region has them by head, and P53 promises the oldest first.
        waiting.sort_unstable();
        let next = waiting.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        (waiting.into_iter().map(|(_, head)| head).collect(), next)
    }
}
