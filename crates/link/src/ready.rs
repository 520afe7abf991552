//! The slots that have something to send, in the order in which they became ready, each once.
//!
//! Invariant: no allocation after `new`: a slot is in the queue at most once.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

/// The queue. Its length is kept beside it, so that a thread that looks whether there is anything
/// to send does not wait for the lock of one that adds.
pub(crate) struct ReadyQueue {
    /// Bounded by the number of slots.
    queue: Mutex<VecDeque<u16>>,
    queued: Box<[AtomicBool]>,
    length: AtomicUsize,
}

impl ReadyQueue {
    pub(crate) fn new(slots: usize) -> Self {
        ReadyQueue {
            queue: Mutex::new(VecDeque::with_capacity(slots)),
            queued: (0..slots).map(|_| AtomicBool::new(false)).collect(),
            length: AtomicUsize::new(0),
        }
    }

    /// Whether no slot is ready. The answer may be outdated when it is used.
    pub(crate) fn is_empty(&self) -> bool {
        self.length.load(Ordering::SeqCst) == 0
    }

    /// Adds a slot, unless it is in the queue.
    pub(crate) fn push(&self, slot: u16) {
        self.add(slot, |queue| queue.push_back(slot));
    }

    /// Puts a slot with more to send back at the front.
    pub(crate) fn push_front(&self, slot: u16) {
        self.add(slot, |queue| queue.push_front(slot));
    }

    fn add(&self, slot: u16, add: impl FnOnce(&mut VecDeque<u16>)) {
        let Some(queued) = self.queued.get(usize::from(slot)) else { return };
        if !queued.swap(true, Ordering::SeqCst) {
            let mut queue = self.queue.lock();
            add(&mut queue);
            self.length.store(queue.len(), Ordering::SeqCst);
        }
    }

    /// Removes the next slot. Look at what it has to send only afterwards: a caller that adds
    /// something in between queues it again.
    pub(crate) fn pop(&self) -> Option<u16> {
        let mut queue = self.queue.lock();
        let slot = queue.pop_front()?;
        self.length.store(queue.len(), Ordering::SeqCst);
        self.queued[usize::from(slot)].store(false, Ordering::SeqCst);
        Some(slot)
    }
}
