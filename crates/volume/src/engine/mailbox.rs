//! How others reach the engine, and what they can read of it: its events, its marks and its
//! waiters.
//!
//! Everything in it is bounded: orders and resizes by [`limits::ORDERS_WAITING_MAX`], events by the
//! engine's calls in flight, each of which sends one, and waiters for stored data by the requests
//! that the doors admit.
//!
//! Invariants: an order, a resize or a wait is queued before the volume's state is checked, so one
//! that comes after a fence or a failure is answered too. `stored` never goes back;
//! `stored_sequence` is set before it.
//!
//! Not here: the records of the journal ([`super::intake`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;

use sawmill_sys::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex};

use super::intake::RecordIntake;
use super::messages::{Event, GcRequest, OrderRequest, Resize, ResultCallback};
use crate::attachment::Attachment;
use crate::journal::Journal;
use crate::status::GcReport;
use crate::threads::wake::Wake;
use crate::{Error, ErrorKind, Result, limits};

struct StoredWaiter {
    through: u64,
    callback: Box<dyn FnOnce(Result<()>) + Send>,
}

/// A list that the engine checks for new items at each step without a lock.
///
/// Invariant: what was pushed is taken by a take that begins after the push.
struct FlaggedList<T> {
    list: Mutex<Vec<T>>,
    is_filled: AtomicBool,
}

impl<T> FlaggedList<T> {
    fn push(&self, item: T) {
        self.list.lock().push(item);
        // After the push: a take lowers the flag before it looks, and may have just looked.
        self.is_filled.store(true, Ordering::SeqCst);
    }

    fn take(&self) -> Vec<T> {
        if !self.is_filled.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut *self.list.lock())
    }
}

impl<T> Default for FlaggedList<T> {
    fn default() -> Self {
        FlaggedList { list: Mutex::new(Vec::new()), is_filled: AtomicBool::new(false) }
    }
}

/// The queues, marks and waiters through which other threads reach the engine.
pub(crate) struct Mailbox {
    attachment: Arc<Attachment>,
    journal: Option<Arc<Journal>>,
    /// Bounded by the calls in flight to the store.
    events: Mutex<Vec<Event>>,
    /// Bounded by `limits::ORDERS_WAITING_MAX`, with `resizes`.
    orders: FlaggedList<OrderRequest>,
    /// Orders and resizes without an answer.
    orders_open: Arc<AtomicUsize>,
    stored: AtomicU64,
    stored_sequence: AtomicU64,
    checkpoint_number: AtomicU64,
    uploads: AtomicU64,
    /// Bounded by the flushes that the doors admit, and the commands that wait.
    waiters: Mutex<Vec<StoredWaiter>>,
    /// The waiters for a checkpoint that has not started.
    /// Bounded by the threads that wait for one: a caller of `Volume::checkpoint` each.
    checkpoint_requests: Mutex<Vec<SyncSender<()>>>,
    gc_request: Mutex<Option<GcRequest>>,
    gc_requested: AtomicBool,
    gc_left: AtomicU64,
    slowed_for_garbage: AtomicBool,
    /// Bounded by `limits::ORDERS_WAITING_MAX`, with `orders`.
    resizes: Mutex<VecDeque<Resize>>,
    closing: AtomicBool,
    closed: Mutex<bool>,
    closed_condvar: Condvar,
    pub(crate) intake: RecordIntake,
    pub(crate) wake: Arc<Wake>,
}

impl Mailbox {
    /// The mailbox of an attachment; without a journal if it is read-only.
    pub(crate) fn new(attachment: Arc<Attachment>, journal: Option<Arc<Journal>>) -> Self {
        let wake = Arc::new(Wake::default());
        Mailbox {
            attachment,
            journal,
            events: Default::default(),
            orders: Default::default(),
            orders_open: Default::default(),
            stored: Default::default(),
            stored_sequence: Default::default(),
            checkpoint_number: Default::default(),
            uploads: Default::default(),
            waiters: Default::default(),
            checkpoint_requests: Default::default(),
            gc_request: Default::default(),
            gc_requested: Default::default(),
            gc_left: Default::default(),
            slowed_for_garbage: Default::default(),
            resizes: Default::default(),
            closing: Default::default(),
            closed: Default::default(),
            closed_condvar: Default::default(),
            intake: RecordIntake::new(wake.clone()),
            wake,
        }
    }

    pub(crate) fn push_event(&self, event: Event) {
        self.events.lock().push(event);
        self.wake.notify();
    }

    pub(crate) fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut *self.events.lock())
    }

    /// Counts an order until it is answered; refuses it if there are too many.
    fn admit(&self, callback: ResultCallback) -> Option<ResultCallback> {
        let open = self.orders_open.clone();
        if open.fetch_add(1, Ordering::AcqRel) >= limits::ORDERS_WAITING_MAX {
            open.fetch_sub(1, Ordering::AcqRel);
            let text = format!(
                "{} snapshots, rollbacks and resizes wait already: try again when some have ended",
                limits::ORDERS_WAITING_MAX
            );
            callback(Err(Error::new(ErrorKind::InUse, text)));
            return None;
        }
        Some(Box::new(move |outcome| {
            open.fetch_sub(1, Ordering::AcqRel);
            callback(outcome);
        }))
    }

    /// Accepts an order; if it is too late, the requester gets an error.
    pub(crate) fn push_order(&self, mut request: OrderRequest) {
        let Some(callback) = self.admit(request.callback) else { return };
        request.callback = callback;
        let position = request.position;
        self.orders.push(request);
        self.intake.seal_through(position);
        if let Some(journal) = &self.journal {
            journal.wake.notify();
        }
        self.wake.notify();
        self.fail_if_ended();
    }

    pub(crate) fn take_orders(&self) -> Vec<OrderRequest> {
        self.orders.take()
    }

    /// Calls `callback` once everything before `through` is in the store.
    pub(crate) fn when_stored(&self, through: u64, callback: Box<dyn FnOnce(Result<()>) + Send>) {
        if through <= self.stored() {
            return callback(Ok(()));
        }
        self.waiters.lock().push(StoredWaiter { through, callback });
        self.intake.seal_through(through);
        if let Some(journal) = &self.journal {
            journal.wake.notify();
        }
        self.wake.notify();
        self.fail_if_ended();
    }

    pub(crate) fn stored(&self) -> u64 {
        self.stored.load(Ordering::Acquire)
    }

    pub(crate) fn stored_sequence(&self) -> u64 {
        self.stored_sequence.load(Ordering::Acquire)
    }

    pub(crate) fn checkpoint_number(&self) -> u64 {
        self.checkpoint_number.load(Ordering::Acquire)
    }

    pub(crate) fn set_checkpoint_number(&self, number: u64) {
        self.checkpoint_number.store(number, Ordering::Release);
    }

    pub(crate) fn set_stored(&self, position: u64, sequence: u64, checkpoint_number: u64) {
        self.stored_sequence.store(sequence, Ordering::Release);
        self.set_checkpoint_number(checkpoint_number);
        self.advance_stored(position);
    }

    /// A segment that ends at `position` has entered the map.
    pub(crate) fn advance_stored_segment(&self, position: u64, sequence: u64) {
        self.stored_sequence.store(sequence, Ordering::Release);
        self.advance_stored(position);
    }

    pub(crate) fn advance_stored(&self, position: u64) {
        self.stored.fetch_max(position, Ordering::AcqRel);
    }

    pub(crate) fn uploads(&self) -> u64 {
        self.uploads.load(Ordering::Relaxed)
    }

    pub(crate) fn set_uploads(&self, count: usize) {
        self.uploads.store(count as u64, Ordering::Relaxed);
    }

    /// Requests a checkpoint; `sender` is notified when it is durable, and dropped if it never will
    /// be.
    pub(crate) fn request_checkpoint(&self, sender: SyncSender<()>) {
        self.checkpoint_requests.lock().push(sender);
        self.wake.notify();
    }

    pub(crate) fn take_checkpoint_requests(&self) -> Vec<SyncSender<()>> {
        std::mem::take(&mut *self.checkpoint_requests.lock())
    }

    /// Requests a collection; one at a time.
    pub(crate) fn request_gc(&self, request: GcRequest) {
        if self.gc_requested.swap(true, Ordering::AcqRel) {
            let text = "a manual garbage collection is already running: wait for it to end";
            return (request.callback)(Err(Error::new(crate::ErrorKind::InUse, text)));
        }
        *self.gc_request.lock() = Some(request);
        self.wake.notify();
    }

    pub(crate) fn take_gc_request(&self) -> Option<GcRequest> {
        self.gc_request.lock().take()
    }

    /// A collection has ended: the next one may start.
    pub(crate) fn end_gc_request(&self, request: GcRequest, outcome: Result<GcReport>) {
        self.gc_requested.store(false, Ordering::Release);
        (request.callback)(outcome);
    }

    /// Live bytes that collection has yet to move.
    pub(crate) fn gc_left(&self) -> u64 {
        self.gc_left.load(Ordering::Relaxed)
    }

    pub(crate) fn set_gc_left(&self, bytes: u64) {
        self.gc_left.store(bytes, Ordering::Relaxed);
    }

    /// Whether writers wait for collection, because garbage is past its bound.
    pub(crate) fn is_slowed_for_garbage(&self) -> bool {
        self.slowed_for_garbage.load(Ordering::Relaxed)
    }

    pub(crate) fn set_slowed_for_garbage(&self, is_slowed: bool) {
        self.slowed_for_garbage.store(is_slowed, Ordering::Relaxed);
    }

    /// Answers the waiters whose end is stored.
    pub(crate) fn notify_stored(&self) {
        let stored = self.stored();
        let reached: Vec<_> = {
            let mut waiters = self.waiters.lock();
            if waiters.is_empty() {
                return;
            }
            let (reached, waiting) = waiters.drain(..).partition(|waiter| waiter.through <= stored);
            *waiters = waiting;
            reached
        };
        for waiter in reached {
            (waiter.callback)(Ok(()));
        }
    }

    pub(crate) fn fail_waiters(&self, error: &Error) {
        drop(self.take_checkpoint_requests());
        if let Some(request) = self.take_gc_request() {
            self.end_gc_request(request, Err(error.clone()));
        }
        // An order that was accepted ends with the engine.
        self.gc_requested.store(false, Ordering::Release);
        for order in self.take_orders() {
            (order.callback)(Err(error.clone()));
        }
        let waiters = std::mem::take(&mut *self.waiters.lock());
        for waiter in waiters {
            (waiter.callback)(Err(error.clone()));
        }
        let resizes = std::mem::take(&mut *self.resizes.lock());
        for resize in resizes {
            (resize.callback)(Err(error.clone()));
        }
    }

    /// Requests another size of the disk.
    pub(crate) fn resize(&self, mut resize: Resize) {
        // A close begins no resize, and ends none of the other requests that it still serves.
        if let Some(error) = self.attachment.state.refusal() {
            return (resize.callback)(Err(error));
        }
        let Some(callback) = self.admit(resize.callback) else { return };
        resize.callback = callback;
        self.resizes.lock().push_back(resize);
        self.wake.notify();
        self.fail_if_ended();
    }

    /// Answers what was queued behind the engine's end. While a close still stores, the engine
    /// answers.
    pub(crate) fn fail_if_ended(&self) {
        if (self.attachment.state.is_dead() || self.is_closed())
            && let Some(error) = self.attachment.state.refusal()
        {
            // What became stored before the end is stored.
            self.notify_stored();
            self.fail_waiters(&error);
        }
    }

    pub(crate) fn next_resize(&self) -> Option<u64> {
        self.resizes.lock().front().map(|resize| resize.size_bytes)
    }

    pub(crate) fn take_resize(&self) -> Option<Resize> {
        self.resizes.lock().pop_front()
    }

    /// Requests the engine to store everything, write a last checkpoint and end.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.wake.notify();
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub(crate) fn set_closed(&self) {
        *self.closed.lock() = true;
        self.closed_condvar.notify_all();
    }

    /// Whether the engine has ended.
    pub(crate) fn is_closed(&self) -> bool {
        *self.closed.lock()
    }

    /// Waits until the engine has ended.
    pub(crate) fn wait_closed(&self) {
        let mut closed = self.closed.lock();
        while !*closed {
            self.closed_condvar.wait(&mut closed);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_pushed_beside_a_take_is_left_behind() {
        const COUNT: usize = 300_000;
        let flagged = FlaggedList::default();
        let taken_count = std::thread::scope(|scope| {
            let pushing = scope.spawn(|| {
                for number in 0..COUNT {
                    flagged.push(number);
                    // Nothing else is pushed until this one was taken, so that nothing hides a
                    // loss.
                    let began = std::time::Instant::now();
                    while !flagged.list.lock().is_empty() {
                        assert!(began.elapsed().as_secs() < 20, "{number} was left behind");
                        std::hint::spin_loop();
                    }
                }
            });
            let mut taken_count = 0;
            while !pushing.is_finished() {
                taken_count += flagged.take().len();
            }
            taken_count + flagged.take().len()
        });
        assert_eq!(taken_count, COUNT);
    }
}
