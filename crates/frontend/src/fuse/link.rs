//! The descriptor to the kernel, as all threads of a door share it: what is in flight, who may take more.
//!
//! Invariants: while the link is quiet no worker reads; a request is in flight from before the device gets
//! it until its answer has gone. The descriptor is one and is never cloned by ioctl: what was taken through
//! a clone fails when that is closed, but what was taken through this one waits for whoever holds it next.
//! Not here: what is asked and answered.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::epoll;
use rustix::io::Errno;
use sawmill_sys::Waker;

use super::answer::head;
use super::metrics::Counters;
use super::options::{IN_FLIGHT_BYTES_MAX, REQUEST_BYTES_MAX, SPARE_BUFFERS_MAX};
use super::protocol::WRITE_HEAD_BYTES;

/// What one receive buffer holds: the kernel asks for room for the longest write and its head.
const BUFFER_BYTES: usize = REQUEST_BYTES_MAX as usize + 4096;
const _: () = assert!(WRITE_HEAD_BYTES <= 4096);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Taking,
    Quiet,
    Ended,
}

struct Gate {
    mode: Mode,
    workers: usize,
    /// Workers that wait for leave to read.
    parked: usize,
    in_flight: u64,
    in_flight_bytes: u64,
}

/// What a read of the descriptor brought.
pub(super) enum Taken {
    /// So many bytes of one request.
    Request(usize),
    /// Nothing yet.
    Nothing,
    /// The mount is gone.
    Gone,
}

/// See the head of this file.
pub(super) struct Link {
    pub(super) kernel: OwnedFd,
    pub(super) counters: Counters,
    gate: Mutex<Gate>,
    changed: Condvar,
    /// Readable while workers shall not wait for requests.
    waker: Waker,
    spares: Mutex<Vec<Vec<u8>>>,
}

impl Link {
    pub(super) fn new(kernel: OwnedFd, workers: usize) -> std::io::Result<Self> {
        let waker = Waker::new()?;
        let gate = Gate { mode: Mode::Taking, workers, parked: 0, in_flight: 0, in_flight_bytes: 0 };
        Ok(Link {
            kernel,
            counters: Counters::default(),
            gate: Mutex::new(gate),
            changed: Condvar::new(),
            waker,
            spares: Mutex::default(),
        })
    }

    /// Waits until a worker may read; `false` when there will be nothing to read any more.
    pub(super) fn may_take(&self) -> bool {
        let mut gate = self.gate.lock();
        if gate.mode == Mode::Taking && gate.in_flight_bytes < IN_FLIGHT_BYTES_MAX {
            return true;
        }
        gate.parked += 1;
        self.changed.notify_all();
        while gate.mode == Mode::Quiet
            || (gate.mode == Mode::Taking && gate.in_flight_bytes >= IN_FLIGHT_BYTES_MAX)
        {
            self.changed.wait(&mut gate);
        }
        gate.parked -= 1;
        gate.mode == Mode::Taking
    }

    /// What a worker waits with for requests: it alone is woken by one, all are by `waker`.
    pub(super) fn epoll(&self) -> rustix::io::Result<OwnedFd> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::EXCLUSIVE;
        epoll::add(&epoll, &self.kernel, epoll::EventData::new_u64(0), flags)?;
        epoll::add(&epoll, &self.waker, epoll::EventData::new_u64(1), epoll::EventFlags::IN)?;
        Ok(epoll)
    }

    /// Takes a request if there is one. Never waits.
    pub(super) fn take(&self, into: &mut [u8]) -> Taken {
        match rustix::io::read(&self.kernel, into) {
            Ok(length) => Taken::Request(length),
            // The requester has gone between being first and being copied: there may be another.
            Err(Errno::NOENT | Errno::INTR) => Taken::Request(0),
            Err(Errno::AGAIN) => Taken::Nothing,
            Err(Errno::NODEV | Errno::CONNABORTED) => Taken::Gone,
            Err(error) => {
                tracing::error!(%error, "fuse: cannot receive requests any more; closing the door");
                Taken::Gone
            }
        }
    }

    /// A request of so many bytes goes to the device.
    pub(super) fn begin(&self, bytes: u64) {
        let mut gate = self.gate.lock();
        gate.in_flight += 1;
        gate.in_flight_bytes += bytes;
    }

    /// It is answered.
    pub(super) fn end(&self, bytes: u64) {
        let mut gate = self.gate.lock();
        gate.in_flight -= 1;
        gate.in_flight_bytes -= bytes;
        if gate.parked > 0 || gate.mode != Mode::Taking {
            self.changed.notify_all();
        }
    }

    /// Sends one answer or message. Never waits: the kernel takes an answer whole.
    pub(super) fn send(&self, parts: &[&[u8]]) {
        let mut slices = [IoSlice::new(&[]); 2];
        for (slice, part) in slices.iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        loop {
            match rustix::io::writev(&self.kernel, &slices[..parts.len().min(2)]) {
                Err(Errno::INTR) => (),
                // Whoever asked is gone, or the mount is: nobody is left to be told.
                Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED | Errno::PERM) => return,
                Err(error) => {
                    tracing::error!(
                        %error,
                        "fuse: cannot write a reply to the kernel; the requester may hang"
                    );
                    return;
                }
            }
        }
    }

    /// Answers with an errno, or zero, and nothing else.
    pub(super) fn send_status(&self, unique: u64, errno: i32) {
        self.send(&[&head(unique, errno, 0)]);
    }

    /// A buffer for one request, all of its memory resident: the kernel then fills it even while this process
    /// is being killed, where it would otherwise fail the request.
    pub(super) fn buffer(&self) -> Vec<u8> {
        self.spares.lock().pop().unwrap_or_else(|| vec![0xFF; BUFFER_BYTES])
    }

    /// Takes a buffer back.
    pub(super) fn keep(&self, buffer: Vec<u8>) {
        let mut spares = self.spares.lock();
        if buffer.len() == BUFFER_BYTES && spares.len() < SPARE_BUFFERS_MAX {
            spares.push(buffer);
        }
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.gate.lock().in_flight
    }

    /// No worker reads any more, and everything taken is answered; `false` when that is not so in time.
    pub(super) fn quiesce(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut gate = self.gate.lock();
        if gate.mode == Mode::Taking {
            gate.mode = Mode::Quiet;
            self.waker.wake();
        }
        while gate.parked < gate.workers || gate.in_flight > 0 {
            if self.changed.wait_until(&mut gate, until).timed_out() {
                return gate.parked == gate.workers && gate.in_flight == 0;
            }
        }
        true
    }

    pub(super) fn is_quiet(&self) -> bool {
        let gate = self.gate.lock();
        gate.mode == Mode::Quiet && gate.parked == gate.workers && gate.in_flight == 0
    }

    /// Workers read again.
    pub(super) fn resume(&self) {
        let mut gate = self.gate.lock();
        if gate.mode == Mode::Quiet {
            self.waker.clear();
            gate.mode = Mode::Taking;
            self.changed.notify_all();
        }
    }

    /// Nothing is read any more, for ever.
    pub(super) fn finish(&self) {
        self.gate.lock().mode = Mode::Ended;
        self.waker.wake();
        self.changed.notify_all();
    }

    pub(super) fn is_finished(&self) -> bool {
        self.gate.lock().mode == Mode::Ended
    }

    /// A worker has ended.
    pub(super) fn worker_left(&self) {
        self.gate.lock().workers -= 1;
        self.changed.notify_all();
    }

    /// Waits until everything taken is answered.
    pub(super) fn drain(&self) {
        let mut gate = self.gate.lock();
        while gate.in_flight > 0 {
            self.changed.wait(&mut gate);
        }
    }
}
