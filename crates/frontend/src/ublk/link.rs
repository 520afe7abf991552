//! One queue as other threads see it, and how far the queues of one device are.
//!
//! Invariant: while a link lives, its character device is open, so no other server can have the device.
//! Not here: the queue's own thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sawmill_sys::ublk::CharDevice;

use super::inbox::{Done, Inbox};
use super::metrics::Counters;
use super::ticket::Body;

/// One queue, for those who complete its requests and for the door.
pub(super) struct Link {
    pub(super) char_device: Arc<CharDevice>,
    pub(super) queue: u16,
    /// We move the bytes of requests; else the kernel copies them from and to a buffer per tag.
    pub(super) user_copy: bool,
    pub(super) inbox: Arc<Inbox>,
    pub(super) counters: Counters,
    pub(super) progress: Arc<Progress>,
    slot: AtomicU32,
}

impl Link {
    pub(super) fn new(
        char_device: Arc<CharDevice>,
        queue: u16,
        user_copy: bool,
        inbox: Arc<Inbox>,
        progress: Arc<Progress>,
    ) -> Self {
        let (counters, slot) = (Counters::default(), AtomicU32::new(u32::MAX));
        Link { char_device, queue, user_copy, inbox, counters, progress, slot }
    }

    /// The queue's name on the ring of its thread.
    pub(super) fn slot(&self) -> u32 {
        self.slot.load(Relaxed)
    }

    pub(super) fn set_slot(&self, slot: u32) {
        self.slot.store(slot, Relaxed);
    }

    /// The request with this tag is done.
    pub(super) fn answer(&self, tag: u16, result: i32, body: Body, buffer: Vec<u8>) {
        self.inbox.done(Done { slot: self.slot(), tag, result, body, buffer });
    }
}

#[derive(Clone, Copy, Default)]
struct Counted {
    /// Which wish to be quiet this is.
    round: u64,
    /// Queues that are quiet by that wish.
    quiet: usize,
    gone: usize,
}

/// How many queues of a device are quiet, and how many are gone.
#[derive(Default)]
pub(super) struct Progress {
    counted: Mutex<Counted>,
    changed: Condvar,
}

impl Progress {
    /// Begins a round of waiting for quiet: its number. What queues tell of earlier rounds counts no more.
    pub(super) fn begin_round(&self) -> u64 {
        let mut counted = self.counted.lock();
        counted.round += 1;
        counted.quiet = 0;
        counted.round
    }

    /// A queue became quiet, as it was told in this round.
    pub(super) fn quiet(&self, round: u64) {
        let mut counted = self.counted.lock();
        if counted.round == round {
            counted.quiet += 1;
            self.changed.notify_all();
        }
    }

    /// A queue is gone: its thread has let it go.
    pub(super) fn gone(&self) {
        self.counted.lock().gone += 1;
        self.changed.notify_all();
    }

    /// Waits until this many queues are quiet, or gone; returns whether they are.
    pub(super) fn wait_quiet(&self, queues: usize, patience: Duration) -> bool {
        let began = Instant::now();
        let mut counted = self.counted.lock();
        while counted.quiet + counted.gone < queues {
            let left = patience.saturating_sub(began.elapsed());
            if self.changed.wait_for(&mut counted, left).timed_out() {
                break;
            }
        }
        counted.quiet + counted.gone >= queues
    }

    /// Waits until this many queues are gone.
    pub(super) fn wait_gone(&self, queues: usize) {
        let mut counted = self.counted.lock();
        while counted.gone < queues {
            self.changed.wait(&mut counted);
        }
    }
}
