//! One queue as other threads see it, and their messages to the thread that serves it: completed
//! requests, and messages of the door.
//!
//! Invariants: while a channel lives, its character device is open, so no other server can have the
//! device. After something is put into an inbox, its thread looks at it soon: it is awake, or it is
//! woken, once for several entries. Not here: how the thread handles them ([`super::worker`]).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::SyncSender;

use parking_lot::Mutex;
use sawmill_device::{BlockDevice, Result};
use sawmill_sys::Waker;
use sawmill_sys::ublk::{CharDevice, Descriptors};

use super::metrics::Counters;
use super::progress::Progress;

/// One queue, for the threads that complete its requests and for the door.
pub(super) struct QueueChannel {
    pub(super) char_device: Arc<CharDevice>,
    pub(super) queue: u16,
    pub(super) copy_mode: CopyMode,
    pub(super) inbox: Arc<Inbox>,
    pub(super) counters: Counters,
    pub(super) progress: Arc<Progress>,
    slot: AtomicU32,
}

impl QueueChannel {
    pub(super) fn new(
        char_device: Arc<CharDevice>,
        queue: u16,
        copy_mode: CopyMode,
        inbox: Arc<Inbox>,
        progress: Arc<Progress>,
    ) -> Self {
        let (counters, slot) = (Counters::default(), AtomicU32::new(u32::MAX));
        QueueChannel { char_device, queue, copy_mode, inbox, counters, progress, slot }
    }

    /// The number of the queue on the ring of its thread.
    pub(super) fn slot(&self) -> u32 {
        self.slot.load(Relaxed)
    }

    pub(super) fn set_slot(&self, slot: u32) {
        self.slot.store(slot, Relaxed);
    }

    /// The request with this tag has completed.
    pub(super) fn answer(&self, tag: u16, result: i32, body: Body, buffer: Vec<u8>) {
        self.inbox.done(Completion { slot: self.slot(), tag, result, body, buffer });
    }
}

/// Who moves the bytes of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyMode {
    /// The kernel copies them from and to a buffer per tag.
    Kernel,
    /// We do, when the device asks for them.
    User,
}

/// The data of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// Nothing.
    Empty,
    /// A payload of this many bytes, which stays in the kernel until the device asks for it.
    Write(u32),
    /// Data of this many bytes, at the start of the buffer.
    Read(u32),
}

/// A queue for a thread to serve.
pub(super) struct NewQueue {
    pub(super) channel: Arc<QueueChannel>,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) descriptors: Descriptors,
    /// The tags that the kernel uses on this queue.
    pub(super) tags: u16,
    /// The longest read or write.
    pub(super) bytes_max: u32,
}

/// A completed request.
pub(super) struct Completion {
    /// The number of the queue on the ring of the thread.
    pub(super) slot: u32,
    pub(super) tag: u16,
    /// The result for the kernel: bytes, 0, or a negative errno.
    pub(super) result: i32,
    pub(super) body: Body,
    /// The buffer of the request, for the next one; empty if it had none.
    pub(super) buffer: Vec<u8>,
}

/// A message of the door for a queue, or for the thread.
pub(super) enum Message {
    /// Serve this queue; the answer is sent when its requests can arrive.
    Attach(NewQueue, SyncSender<Result<()>>),
    /// Accept no more requests, in this round.
    Quiesce(Arc<QueueChannel>, u64),
    /// Accept requests again.
    Resume(Arc<QueueChannel>),
    /// End as soon as every queue of the thread was released or is gone.
    LetGo(Arc<QueueChannel>),
    /// End as soon as there is no queue any more.
    Stop,
}

#[derive(Default)]
struct InboxState {
    done: Vec<Completion>,
    messages: Vec<Message>,
    is_asleep: bool,
    is_closed: bool,
}

pub(super) struct Inbox {
    queue: Mutex<InboxState>,
    waker: Waker,
}

impl Inbox {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Inbox { queue: Mutex::default(), waker: Waker::new()? })
    }

    /// Becomes readable when the thread should check.
    pub(super) fn descriptor(&self) -> Arc<OwnedFd> {
        self.waker.descriptor()
    }

    pub(super) fn done(&self, done: Completion) {
        self.put(|state| state.done.push(done));
    }

    /// Returns whether there still is a thread to execute the message.
    pub(super) fn send(&self, message: Message) -> bool {
        self.put(|state| {
            // An attach would never be answered by a thread that has ended, and its caller waits
            // for the answer.
            if !state.is_closed {
                state.messages.push(message)
            }
        })
    }

    fn put(&self, change: impl FnOnce(&mut InboxState)) -> bool {
        let (wake, open) = {
            let mut state = self.queue.lock();
            change(&mut state);
            // Only the first entry for a sleeping thread makes a system call. The thread takes all
            // entries when it wakes.
            (std::mem::take(&mut state.is_asleep), !state.is_closed)
        };
        if wake {
            self.waker.wake();
        }
        open
    }

    /// Moves everything that waits into these lists.
    pub(super) fn take(&self, done: &mut Vec<Completion>, messages: &mut Vec<Message>) {
        let mut state = self.queue.lock();
        state.is_asleep = false;
        done.append(&mut state.done);
        messages.append(&mut state.messages);
    }

    /// Whether nothing waits. If so, the next entry wakes the thread.
    pub(super) fn nothing_waits(&self) -> bool {
        let mut state = self.queue.lock();
        // Under the lock with the check: an entry that comes in between would not wake the thread.
        state.is_asleep = state.done.is_empty() && state.messages.is_empty();
        state.is_asleep
    }

    pub(super) fn is_closed(&self) -> bool {
        self.queue.lock().is_closed
    }

    /// The thread is ending: no message is accepted any more. Returns the messages that were not
    /// executed.
    pub(super) fn close(&self) -> Vec<Message> {
        let mut state = self.queue.lock();
        state.is_closed = true;
        std::mem::take(&mut state.messages)
    }
}
