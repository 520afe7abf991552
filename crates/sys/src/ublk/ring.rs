//! The io_uring over which the requests of queues come and their answers go.
//!
//! A command on a queue asks for the next request with this tag: at first alone, later together
//! with the answer to the last one. It completes when the request arrives. One ring serves any
//! number of queues of any number of devices, and watches one descriptor that wakes its thread.
//!
//! Without user copy the kernel copies payloads itself: each command then lends it a buffer.
//!
//! A ring of one queue registers its file, so that the queues of a device do not share one
//! reference count. A ring of many does not: before Linux 6.13, a registered file that is removed
//! stays open until every older command of the ring, of any queue, has completed, and the kernel
//! does not delete a device whose file is open.
//!
//! Invariants: the kernel knows no memory of ours except buffers that the ring owns until their
//! command completes, each as long as the longest request. The thread that made the ring is the
//! only one to use it: the driver ties a queue to the thread that fetched first. Not here: what a
//! request asks for.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;

use super::abi::{self, IoCommand};
use super::char_device::CharDevice;

/// An event of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingEvent {
    /// The descriptor given to [`QueueRing::watch`] became readable.
    Woken,
    /// A request came on a queue.
    Request {
        /// The queue, as [`QueueRing::attach`] named it.
        slot: u32,
        /// The request's tag.
        tag: u16,
    },
    /// The driver takes no more commands with this tag; it has none now.
    Gone {
        /// The queue, as [`QueueRing::attach`] named it.
        slot: u32,
        /// The command's tag.
        tag: u16,
        /// Why: `ENODEV` when the device was stopped, others for a command that was wrong.
        errno: i32,
    },
}

const WOKEN: u64 = u64::MAX;

/// An io_uring for the queues that one thread serves.
pub struct QueueRing {
    ring: IoUring,
    /// The files of queues are registered, each at the place of its slot.
    registered: bool,
    slots: Vec<Option<Arc<CharDevice>>>,
    watched: Option<Arc<dyn AsFd + Send + Sync>>,
    /// Buffers by the name of their command.
    lent: HashMap<u64, Vec<u8>>,
    /// Buffers whose command has completed.
    returned: HashMap<u64, Vec<u8>>,
}

/// The name of a command: queue and tag.
fn buffer_key(slot: u32, tag: u16) -> u64 {
    u64::from(slot) << 16 | u64::from(tag)
}

impl QueueRing {
    /// A ring for up to `slots` queues; `entries` commands go to the kernel in one system call at
    /// most. To be called on the thread that uses it.
    pub fn new(entries: u32, slots: u32) -> io::Result<Self> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(entries * 2).setup_clamp().dontfork();
        builder.setup_single_issuer().setup_defer_taskrun();
        let ring: IoUring = builder.build(entries)?;
        let registered = slots == 1;
        if registered {
            ring.submitter().register_files_sparse(slots)?;
        }
        let slots = (0..slots).map(|_| None).collect();
        let (lent, returned) = (HashMap::new(), HashMap::new());
        Ok(QueueRing { ring, registered, slots, watched: None, lent, returned })
    }

    /// Adds a queue of this device; returns its slot on this ring. `OutOfMemory` if all slots are
    /// taken.
    pub fn attach(&mut self, device: &Arc<CharDevice>) -> io::Result<u32> {
        let free = self.slots.iter().position(Option::is_none);
        let slot = free.ok_or(io::ErrorKind::OutOfMemory)? as u32;
        if self.registered {
            self.ring.submitter().register_files_update(slot, &[device.as_fd().as_raw_fd()])?;
        }
        self.slots[slot as usize] = Some(device.clone());
        Ok(slot)
    }

    /// Removes a queue whose commands are all gone.
    pub fn detach(&mut self, slot: u32) -> io::Result<()> {
        if let Some(entry) = self.slots.get_mut(slot as usize)
            && entry.take().is_some()
            && self.registered
        {
            self.ring.submitter().register_files_update(slot, &[-1])?;
        }
        Ok(())
    }

    /// From now on the ring reports when this descriptor becomes readable.
    pub fn watch(&mut self, descriptor: Arc<dyn AsFd + Send + Sync>) -> io::Result<()> {
        self.watched = Some(descriptor);
        self.watch_again()
    }

    fn watch_again(&mut self) -> io::Result<()> {
        let Some(watched) = self.watched.clone() else { return Ok(()) };
        let fd = types::Fd(watched.as_fd().as_raw_fd());
        let entry =
            opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build().user_data(WOKEN);
        self.push(&entry)
    }

    /// Asks for the first request with this tag. It goes to the kernel with the next
    /// [`QueueRing::submit`]. A device without user copy wants a buffer, as long as its longest
    /// request.
    pub fn fetch(
        &mut self,
        slot: u32,
        queue: u16,
        tag: u16,
        buffer: Option<Vec<u8>>,
    ) -> io::Result<()> {
        self.command(abi::FETCH_REQ, slot, IoCommand { queue, tag, result: -1, addr: 0 }, buffer)
    }

    /// Answers the request with this tag and asks for the next: `result` is the bytes that were
    /// read or written, 0 for other operations, or a negative errno. The data of a read lies in the
    /// buffer, where there is one.
    pub fn commit_and_fetch(
        &mut self,
        slot: u32,
        queue: u16,
        tag: u16,
        result: i32,
        buffer: Option<Vec<u8>>,
    ) -> io::Result<()> {
        self.command(
            abi::COMMIT_AND_FETCH_REQ,
            slot,
            IoCommand { queue, tag, result, addr: 0 },
            buffer,
        )
    }

    /// The buffer that was lent with this tag, after its request arrived or its command is gone; it
    /// holds the payload of a write.
    pub fn take_buffer(&mut self, slot: u32, tag: u16) -> Option<Vec<u8>> {
        self.returned.remove(&buffer_key(slot, tag))
    }

    fn command(
        &mut self,
        number: u32,
        slot: u32,
        mut command: IoCommand,
        buffer: Option<Vec<u8>>,
    ) -> io::Result<()> {
        let key = buffer_key(slot, command.tag);
        let device = self.slots.get(slot as usize).and_then(Option::as_ref);
        let device = device.ok_or(io::ErrorKind::NotFound)?;
        if let Some(mut buffer) = buffer {
            let least = device.request_bytes_max()?;
            if self.lent.contains_key(&key) || buffer.len() < least as usize {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            command.addr = buffer.as_mut_ptr() as u64;
            self.lent.insert(key, buffer);
        }
        let entry = if self.registered {
            opcode::UringCmd16::new(types::Fixed(slot), number)
        } else {
            opcode::UringCmd16::new(types::Fd(device.as_fd().as_raw_fd()), number)
        };
        self.push(&entry.cmd(command.bytes()).build().user_data(key))
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: a poll names no memory, and a command only a buffer in `lent`, which stays
            // there until the command has completed. The descriptors they name are kept open by
            // `slots`, until every command of the slot is gone, and by `watched`.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.submit()?;
        }
    }

    /// Passes queued commands to the kernel, without sleeping.
    pub fn submit(&mut self) -> io::Result<()> {
        self.again_if_interrupted(Self::submit_and_look)
    }

    /// Passes queued commands to the kernel, and sleeps until there is an event, or `time_max` is
    /// over.
    pub fn submit_and_wait(&mut self, time_max: Option<Duration>) -> io::Result<()> {
        self.again_if_interrupted(|ring| match time_max {
            None => ring.ring.submit_and_wait(1),
            Some(time_max) => {
                let timespec = types::Timespec::from(time_max);
                let args = types::SubmitArgs::new().timespec(&timespec);
                ring.ring.submitter().submit_with_args(1, &args)
            }
        })
    }

    fn again_if_interrupted(
        &mut self,
        mut submit: impl FnMut(&mut Self) -> io::Result<usize>,
    ) -> io::Result<()> {
        loop {
            let submitted = submit(self);
            match submitted
                .map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))
            {
                Ok(_) | Err(Errno::TIME | Errno::BUSY | Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => (),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// One call that does not sleep, but lets the kernel deliver requests that have come: a busy
    /// thread would otherwise see none until it is idle.
    fn submit_and_look(&mut self) -> io::Result<usize> {
        const GET_EVENTS: u32 = 1;
        let waiting = self.ring.submission().len() as u32;
        // SAFETY: no argument is passed, and what the entries name is as `push` says.
        unsafe { self.ring.submitter().enter::<()>(waiting, 0, GET_EVENTS, None) }
    }

    /// Appends the pending events.
    pub fn events(&mut self, into: &mut Vec<RingEvent>) -> io::Result<()> {
        let mut watch_ended = false;
        for entry in self.ring.completion() {
            if entry.user_data() == WOKEN {
                watch_ended |= !io_uring::cqueue::more(entry.flags());
                into.push(RingEvent::Woken);
                continue;
            }
            if let Some(buffer) = self.lent.remove(&entry.user_data()) {
                self.returned.insert(entry.user_data(), buffer);
            }
            let (slot, tag) = ((entry.user_data() >> 16) as u32, entry.user_data() as u16);
            into.push(match entry.result() {
                0 => RingEvent::Request { slot, tag },
                error => RingEvent::Gone { slot, tag, errno: error.wrapping_neg() },
            });
        }
        if watch_ended { self.watch_again() } else { Ok(()) }
    }
}

impl Drop for QueueRing {
    fn drop(&mut self) {
        // The kernel ends a ring some time after this, and may write to a buffer until then.
        self.lent.drain().for_each(|(_, buffer)| std::mem::forget(buffer));
    }
}
