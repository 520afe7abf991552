//! The descriptor to the kernel, shared by all threads of a door: what is in flight, and whether
//! more may be taken.
//!
//! Invariants: no worker reads while the channel is quiet. A request is in flight from before the
//! device gets it until its answer was written. There is one descriptor, which is never cloned by
//! ioctl: requests taken through a clone fail when the clone is closed, but requests taken through
//! this one wait for its next holder. Not here: requests and answers.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::epoll;
use rustix::io::Errno;
use sawmill_sys::Waker;

use super::answer::head;
use super::limits::{IN_FLIGHT_BYTES_MAX, REQUEST_BYTES_MAX, SPARE_BUFFERS_MAX};
use super::metrics::Counters;
use super::protocol::WRITE_HEAD_BYTES;

/// The size of a receive buffer: the kernel demands room for the longest write and its head.
const BUFFER_BYTES: usize = REQUEST_BYTES_MAX as usize + 4096;
const _: () = assert!(WRITE_HEAD_BYTES <= 4096);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Taking,
    Quiet,
    Ended,
}

struct State {
    mode: Mode,
    workers: usize,
    /// Workers that wait for permission to read.
    parked: usize,
    in_flight: u64,
    in_flight_bytes: u64,
}

/// The result of reading the descriptor.
pub(super) enum ReadOutcome {
    /// This many bytes of one request.
    Request(usize),
    /// Nothing yet.
    Nothing,
    /// The mount is gone.
    Gone,
}

/// The descriptor of one mount, and what its workers, the device's threads and the door share.
pub(super) struct KernelChannel {
    pub(super) kernel: OwnedFd,
    pub(super) counters: Counters,
    state: Mutex<State>,
    changed: Condvar,
    /// Readable while workers must not wait for requests.
    waker: Waker,
    spares: Mutex<Vec<Vec<u8>>>,
}

impl KernelChannel {
    pub(super) fn new(kernel: OwnedFd, workers: usize) -> std::io::Result<Self> {
        let waker = Waker::new()?;
        let state =
            State { mode: Mode::Taking, workers, parked: 0, in_flight: 0, in_flight_bytes: 0 };
        Ok(KernelChannel {
            kernel,
            counters: Counters::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            waker,
            spares: Mutex::default(),
        })
    }

    /// Waits until a worker may read. Returns `false` when there will be nothing to read any more.
    pub(super) fn may_take(&self) -> bool {
        let mut state = self.state.lock();
        if state.mode == Mode::Taking && state.in_flight_bytes < IN_FLIGHT_BYTES_MAX {
            return true;
        }
        state.parked += 1;
        self.changed.notify_all();
        while state.mode == Mode::Quiet
            || (state.mode == Mode::Taking && state.in_flight_bytes >= IN_FLIGHT_BYTES_MAX)
        {
            self.changed.wait(&mut state);
        }
        state.parked -= 1;
        state.mode == Mode::Taking
    }

    /// The epoll instance for a worker: a request wakes one of them, `waker` wakes all.
    pub(super) fn epoll(&self) -> rustix::io::Result<OwnedFd> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        // Exclusive, because all workers read one descriptor: otherwise each request would wake all
        // of them, and all but one in vain.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::EXCLUSIVE;
        epoll::add(&epoll, &self.kernel, epoll::EventData::new_u64(0), flags)?;
        epoll::add(&epoll, &self.waker, epoll::EventData::new_u64(1), epoll::EventFlags::IN)?;
        Ok(epoll)
    }

    /// Takes a request if there is one. Never blocks.
    pub(super) fn take(&self, into: &mut [u8]) -> ReadOutcome {
        match rustix::io::read(&self.kernel, into) {
            Ok(length) => ReadOutcome::Request(length),
            // The requester disappeared during the copy: there may be another request.
            Err(Errno::NOENT | Errno::INTR) => ReadOutcome::Request(0),
            Err(Errno::AGAIN) => ReadOutcome::Nothing,
            Err(Errno::NODEV | Errno::CONNABORTED) => ReadOutcome::Gone,
            Err(error) => {
                tracing::error!(%error, "fuse: cannot receive requests any more; closing the door");
                ReadOutcome::Gone
            }
        }
    }

    /// A request of this many bytes goes to the device.
    pub(super) fn begin(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.in_flight += 1;
        state.in_flight_bytes += bytes;
    }

    /// The request is answered.
    pub(super) fn end(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.in_flight -= 1;
        state.in_flight_bytes -= bytes;
        if state.parked > 0 || state.mode != Mode::Taking {
            self.changed.notify_all();
        }
    }

    /// Sends one answer or notification. Never blocks: the kernel accepts an answer as a whole.
    pub(super) fn send(&self, parts: &[&[u8]]) {
        let mut slices = [IoSlice::new(&[]); 2];
        for (slice, part) in slices.iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        loop {
            match rustix::io::writev(&self.kernel, &slices[..parts.len().min(2)]) {
                Err(Errno::INTR) => (),
                // The requester or the mount is gone: nothing is left to notify.
                Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED | Errno::PERM) => {
                    return;
                }
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

    /// Answers with an errno, or zero, and no body.
    pub(super) fn send_status(&self, unique: u64, errno: i32) {
        self.send(&[&head(unique, errno, 0)]);
    }

    /// A buffer for one request, with all of its memory resident: the kernel can fill it even while
    /// this process is being killed, when it would otherwise fail the request.
    pub(super) fn buffer(&self) -> Vec<u8> {
        self.spares.lock().pop().unwrap_or_else(|| vec![0xFF; BUFFER_BYTES])
    }

    /// Takes a buffer back.
    pub(super) fn keep(&self, buffer: Vec<u8>) {
        let mut spares = self.spares.lock();
        // Copies of short payloads come back here, too, and are no receive buffers.
        if buffer.len() == BUFFER_BYTES && spares.len() < SPARE_BUFFERS_MAX {
            spares.push(buffer);
        }
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.state.lock().in_flight
    }

    /// Waits until no worker reads and everything taken is answered. Returns `false` if that takes
    /// too long.
    pub(super) fn quiesce(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut state = self.state.lock();
        if state.mode == Mode::Taking {
            state.mode = Mode::Quiet;
            self.waker.wake();
        }
        // It stays readable until `resume`: a worker that is busy now finds it when it waits next.
        while state.parked < state.workers || state.in_flight > 0 {
            if self.changed.wait_until(&mut state, until).timed_out() {
                // The last answer may have come between the timeout and the lock.
                return state.parked == state.workers && state.in_flight == 0;
            }
        }
        true
    }

    pub(super) fn is_quiet(&self) -> bool {
        let state = self.state.lock();
        state.mode == Mode::Quiet && state.parked == state.workers && state.in_flight == 0
    }

    /// Workers resume reading.
    pub(super) fn resume(&self) {
        let mut state = self.state.lock();
        if state.mode == Mode::Quiet {
            self.waker.clear();
            state.mode = Mode::Taking;
            self.changed.notify_all();
        }
    }

    /// Ends reading for good.
    pub(super) fn finish(&self) {
        self.state.lock().mode = Mode::Ended;
        self.waker.wake();
        self.changed.notify_all();
    }

    pub(super) fn is_finished(&self) -> bool {
        self.state.lock().mode == Mode::Ended
    }

    /// A worker has ended.
    pub(super) fn worker_left(&self) {
        // A door that becomes quiet must not wait for a thread that has ended.
        self.state.lock().workers -= 1;
        self.changed.notify_all();
    }

    /// Waits until everything taken is answered.
    pub(super) fn drain(&self) {
        let mut state = self.state.lock();
        while state.in_flight > 0 {
            self.changed.wait(&mut state);
        }
    }
}
