//! The places that have something to send, in the order in which they became ready, each once.
//!
//! Invariant: no allocation after `new`: a place is in the queue at most once.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

/// The queue. Its length is kept beside it, so that a thread that checks whether there is anything
/// to send does not wait for the lock of one that adds.
pub(crate) struct ReadyQueue {
    /// Bounded by the number of places.
    queue: Mutex<VecDeque<u16>>,
    queued: Box<[AtomicBool]>,
    length: AtomicUsize,
}

impl ReadyQueue {
    pub(crate) fn new(places: usize) -> Self {
        ReadyQueue {
            queue: Mutex::new(VecDeque::with_capacity(places)),
            queued: (0..places).map(|_| AtomicBool::new(false)).collect(),
            length: AtomicUsize::new(0),
        }
    }

    /// Whether no place is ready. The answer may be outdated when it is used.
    pub(crate) fn is_empty(&self) -> bool {
        self.length.load(Ordering::SeqCst) == 0
    }

    /// Adds a place, unless it is in the queue.
    pub(crate) fn push(&self, place: u16) {
        self.add(place, |queue| queue.push_back(place));
    }

    /// Puts a place with more to send back at the front.
    pub(crate) fn push_front(&self, place: u16) {
        self.add(place, |queue| queue.push_front(place));
    }

    fn add(&self, place: u16, add: impl FnOnce(&mut VecDeque<u16>)) {
        let Some(queued) = self.queued.get(usize::from(place)) else { return };
        if !queued.swap(true, Ordering::SeqCst) {
            let mut queue = self.queue.lock();
            add(&mut queue);
            self.length.store(queue.len(), Ordering::SeqCst);
        }
    }

    /// Removes the next place. Read what it has to send only afterwards: a caller that adds
    /// something in between queues it again.
    pub(crate) fn pop(&self) -> Option<u16> {
        let mut queue = self.queue.lock();
        let place = queue.pop_front()?;
        self.length.store(queue.len(), Ordering::SeqCst);
        self.queued[usize::from(place)].store(false, Ordering::SeqCst);
        Some(place)
    }
}
