//! What other threads tell the thread of a queue: requests that are done, and orders of the door.
//!
//! Invariant: nothing is put in without the thread looking at it soon: it is awake, or it is woken. Several
//! entries cost one wake-up. Not here: what the thread does with them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use sawmill_device::Result;

use super::link::Link;
use super::queue::Queue;
use super::ticket::Body;

/// A request that is done.
pub(super) struct Done {
    /// The queue, as the ring of the thread names it.
    pub(super) slot: u32,
    pub(super) tag: u16,
    /// What the kernel is told: bytes, 0, or a negative errno.
    pub(super) result: i32,
    pub(super) body: Body,
    /// The buffer of the request, for the next one; empty where it had none.
    pub(super) buffer: Vec<u8>,
}

/// What the door wants of a queue, or of the thread.
pub(super) enum Order {
    /// Serve this queue; the answer comes when its requests can.
    Attach(Box<Queue>, SyncSender<Result<()>>),
    /// Take no more requests, in this round.
    Quiesce(Arc<Link>, u64),
    /// Take requests again.
    Resume(Arc<Link>),
    /// End as soon as every queue of the thread was let go or is gone.
    LetGo(Arc<Link>),
    /// End as soon as there is no queue any more.
    Stop,
}

#[derive(Default)]
struct Waiting {
    done: Vec<Done>,
    orders: Vec<Order>,
    asleep: bool,
    closed: bool,
}

pub(super) struct Inbox {
    waiting: Mutex<Waiting>,
    wake: Arc<OwnedFd>,
}

impl Inbox {
    pub(super) fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Inbox { waiting: Mutex::default(), wake: Arc::new(wake) })
    }

    /// Becomes readable when the thread should look.
    pub(super) fn descriptor(&self) -> Arc<OwnedFd> {
        self.wake.clone()
    }

    pub(super) fn done(&self, done: Done) {
        self.put(|waiting| waiting.done.push(done));
    }

    /// Returns whether there is still a thread to follow the order.
    pub(super) fn order(&self, order: Order) -> bool {
        self.put(|waiting| {
            if !waiting.closed {
                waiting.orders.push(order)
            }
        })
    }

    fn put(&self, put: impl FnOnce(&mut Waiting)) -> bool {
        let (wake, open) = {
            let mut waiting = self.waiting.lock();
            put(&mut waiting);
            (std::mem::take(&mut waiting.asleep), !waiting.closed)
        };
        if wake {
            // A full counter is a wake-up already on its way.
            let _ = rustix::io::write(self.wake.as_fd(), &1u64.to_ne_bytes());
        }
        open
    }

    /// Moves everything that waits into these lists.
    pub(super) fn take(&self, done: &mut Vec<Done>, orders: &mut Vec<Order>) {
        let mut waiting = self.waiting.lock();
        waiting.asleep = false;
        done.append(&mut waiting.done);
        orders.append(&mut waiting.orders);
    }

    /// Whether nothing waits. If so, the next entry wakes the thread.
    pub(super) fn nothing_waits(&self) -> bool {
        let mut waiting = self.waiting.lock();
        waiting.asleep = waiting.done.is_empty() && waiting.orders.is_empty();
        waiting.asleep
    }

    pub(super) fn is_closed(&self) -> bool {
        self.waiting.lock().closed
    }

    /// The thread ends: no order is taken any more. Returns those that nobody followed.
    pub(super) fn close(&self) -> Vec<Order> {
        let mut waiting = self.waiting.lock();
        waiting.closed = true;
        std::mem::take(&mut waiting.orders)
    }
}
