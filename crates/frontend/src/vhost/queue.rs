//! One running queue: a thread that takes requests and submits them to the device, and the answers,
//! which come on any thread.
//!
//! Invariants: a head is in flight at most once. The in-flight region never lags behind what the
//! guest can see. A detached queue does not touch the guest's memory any more. The thread takes
//! nothing while an earlier queue, of a connection that is gone, still has requests in the device
//! (an old write must not land after a newer one). A guest that breaks the protocol breaks this
//! queue, with a logged reason. Not here: the frontend's messages.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use rustix::event::{PollFd, PollFlags, poll};
use sawmill_device::{BlockDevice, Operation, Request};
use sawmill_sys::Waker;

use self::ticket::Ticket;
use super::Violation;
use super::inflight::InflightQueue;
use super::limits::{BURST_REQUESTS_MAX, IN_FLIGHT_BYTES_MAX, SPARE_BYTES_MAX};
use super::metrics::Counters;
use super::protocol::{
    CacheMode, Command, HEADER_BYTES, ID_BYTES, Parts, Refusal, Status, understand,
};
use super::ring::{Chain, Ring, total};

mod ticket;

/// What a queue needs to start.
pub(super) struct QueueSetup {
    pub(super) index: u16,
    pub(super) ring: Ring,
    pub(super) inflight: Option<InflightQueue>,
    /// The first request to take, unless an in-flight region knows better.
    pub(super) base: u16,
    pub(super) kick: Arc<OwnedFd>,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) error: Option<Arc<OwnedFd>>,
    /// The negotiated virtio features.
    pub(super) negotiated: u64,
    pub(super) cache_mode: CacheMode,
    pub(super) id: [u8; ID_BYTES],
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) counters: Arc<Counters>,
    /// Queues of connections that are gone, with requests in the device.
    pub(super) before: Vec<Arc<Queue>>,
}

/// The thread's place in the available ring. The thread holds this while it runs.
struct Cursor {
    next: u16,
    counter: u64,
    /// Requests that an earlier process took and did not answer, the oldest last.
    again: Vec<u16>,
}

/// The state of the answering side.
struct Answers {
    next_used: u16,
    /// The used index at the last decision whether to call.
    called_used: u16,
    taken: Vec<bool>,
    in_flight: u32,
    in_flight_bytes: u64,
    /// The thread is between two checks: it will call, if necessary.
    is_in_burst: bool,
    is_detached: bool,
    call: Option<Arc<OwnedFd>>,
    spare: Vec<Vec<u8>>,
}

/// A queue.
pub(super) struct Queue {
    setup: QueueSetup,
    waker: Waker,
    is_stopping: AtomicBool,
    /// Whether the guest's memory may still be written.
    is_attached: RwLock<bool>,
    cursor: Mutex<Cursor>,
    answers: Mutex<Answers>,
    /// Signals that a request was answered, or that the thread must check `is_stopping`.
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The requests in flight were not all answered in time.
pub(super) struct BusyError;

impl Queue {
    /// Starts to serve. Fails if the ring lies outside the guest's memory, or the system has no
    /// room.
    pub(super) fn start(setup: QueueSetup) -> Result<Arc<Self>, Violation> {
        // Once, so that the threads that answer find every part of the ring in memory.
        setup.ring.check()?;
        let used = setup.ring.used_index()?;
        let (mut again, counter) = match &setup.inflight {
            Some(inflight) => inflight.recover(used),
            None => (Vec::new(), 0),
        };
        // The base that the frontend knows is from before the death. What was taken since is in the
        // ring and in the region.
        let next = match &setup.inflight {
            Some(_) => used.wrapping_add(again.len() as u16),
            None => setup.base,
        };
        if !again.is_empty() {
            let (queue, requests) = (setup.index, again.len());
            tracing::info!(queue, requests, "vhost-user: executing requests in flight again");
        }
        // They are taken from the end, and the oldest must go first.
        again.reverse();
        let waker = Waker::new()
            .map_err(|error| Violation::caused("cannot create an event for a queue", error))?;
        let answers = Answers {
            next_used: used,
            called_used: used,
            taken: vec![false; setup.ring.size.into()],
            in_flight: 0,
            in_flight_bytes: 0,
            is_in_burst: false,
            is_detached: false,
            call: setup.call.clone(),
            spare: Vec::new(),
        };
        let queue = Arc::new(Queue {
            waker,
            is_stopping: AtomicBool::new(false),
            is_attached: RwLock::new(true),
            cursor: Mutex::new(Cursor { next, counter, again }),
            answers: Mutex::new(answers),
            changed: Condvar::new(),
            thread: Mutex::new(None),
            setup,
        });
        // The call for an answer of an earlier process may be lost, so call once.
        queue.call();
        queue.run()?;
        Ok(queue)
    }

    pub(super) fn ring(&self) -> &Ring {
        &self.setup.ring
    }

    /// Takes requests, at first or again after [`Queue::pause`]. No effect on a queue that is
    /// running.
    pub(super) fn run(self: &Arc<Self>) -> Result<(), Violation> {
        let mut running = self.thread.lock();
        if running.is_some() {
            return Ok(());
        }
        self.is_stopping.store(false, Ordering::SeqCst);
        let queue = self.clone();
        let thread = std::thread::Builder::new().name(format!("vhost-q{}", self.setup.index));
        let thread = thread.spawn(move || queue.work());
        *running = Some(thread.map_err(|error| Violation::caused("cannot start a thread", error))?);
        Ok(())
    }

    /// Takes no more requests, and waits until those it took are answered, or until `deadline`.
    pub(super) fn pause(&self, deadline: Option<Instant>) -> Result<(), BusyError> {
        self.end_thread();
        let mut answers = self.answers.lock();
        while answers.in_flight > 0 && !answers.is_detached {
            match deadline {
                None => self.changed.wait(&mut answers),
                Some(deadline) if Instant::now() >= deadline => return Err(BusyError),
                Some(deadline) => {
                    self.changed.wait_until(&mut answers, deadline);
                }
            }
        }
        Ok(())
    }

    /// The first request that was not taken; only for a paused queue.
    pub(super) fn base(&self) -> u16 {
        self.cursor.lock().next
    }

    /// Does not touch the guest's memory from now on. Requests in flight continue in the device,
    /// and stay in the in-flight region.
    pub(super) fn detach(&self) {
        // Waits for answers that are being copied. Afterward, the frontend may unmap or reuse the
        // memory.
        *self.is_attached.write() = false;
        self.answers.lock().is_detached = true;
        self.end_thread();
        self.changed.notify_all();
    }

    /// Whether it was detached and has requests in the device.
    pub(super) fn lingers(&self) -> bool {
        let answers = self.answers.lock();
        answers.is_detached && answers.in_flight > 0
    }

    /// Whether it still lingers at `deadline`.
    pub(super) fn lingers_until(&self, deadline: Instant) -> bool {
        let mut answers = self.answers.lock();
        while answers.is_detached && answers.in_flight > 0 {
            if self.changed.wait_until(&mut answers, deadline).timed_out() {
                break;
            }
        }
        answers.is_detached && answers.in_flight > 0
    }

    /// Whether it can be forgotten.
    pub(super) fn is_over(&self) -> bool {
        let is_idle = self.answers.lock().in_flight == 0;
        is_idle && self.thread.lock().is_none()
    }

    /// Sets another event for notifying the guest of answers. It is called once, because a call may
    /// have been lost.
    pub(super) fn set_call(&self, call: Option<Arc<OwnedFd>>) {
        self.answers.lock().call = call;
        self.call();
    }

    fn end_thread(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        self.waker.wake();
        for queue in self.setup.before.iter().map(Arc::as_ref).chain([self]) {
            // Under the lock, so that it does not fall between a thread's check and its sleep.
            drop(queue.answers.lock());
            queue.changed.notify_all();
        }
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn call(&self) {
        let call = self.answers.lock().call.clone();
        signal(call.as_deref());
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::SeqCst)
    }

    /// The body of the thread `vhost-qN`: serves the ring until the door stops, or the guest breaks
    /// a rule of it.
    fn work(self: &Arc<Self>) {
        // What an earlier connection left in the device is finished first: an old write must not
        // land after a newer one (P53).
        for queue in &self.setup.before {
            let mut answers = queue.answers.lock();
            while answers.in_flight > 0 && !self.is_stopping() {
                queue.changed.wait(&mut answers);
            }
        }
        let mut cursor = self.cursor.lock();
        while !self.is_stopping() {
            match self.serve(&mut cursor) {
                Ok(()) => (),
                Err(violation) => return self.break_down(&violation),
            }
        }
    }

    /// Takes what is there, or sleeps until something is.
    fn serve(self: &Arc<Self>, cursor: &mut Cursor) -> Result<(), Violation> {
        self.setup.ring.suppress_kicks()?;
        self.answers.lock().is_in_burst = true;
        let taken_count = self.take_burst(cursor);
        self.settle();
        // After a full burst, more is probably there: look before asking for a kick.
        if taken_count? == BURST_REQUESTS_MAX {
            return Ok(());
        }
        let mut answers = self.answers.lock();
        if answers.in_flight_bytes >= IN_FLIGHT_BYTES_MAX {
            // Answers wake this thread. A kick would not help: the queue takes nothing until there
            // is room.
            while answers.in_flight_bytes >= IN_FLIGHT_BYTES_MAX && !self.is_stopping() {
                self.changed.wait(&mut answers);
            }
            return Ok(());
        }
        drop(answers);
        if !self.setup.ring.request_kick(cursor.next)? {
            self.sleep()?;
        }
        Ok(())
    }

    fn sleep(&self) -> Result<(), Violation> {
        let mut fds = [
            PollFd::new(&self.waker, PollFlags::IN),
            PollFd::new(&*self.setup.kick, PollFlags::IN),
        ];
        if poll(&mut fds, None).is_err() {
            return Ok(());
        }
        let (is_woken, is_kicked) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if is_woken {
            self.waker.clear();
        }
        if is_kicked {
            let what = "the kick event is not an eventfd: reading it failed with";
            match rustix::io::read(&*self.setup.kick, &mut [0; 8]) {
                Ok(8) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => (),
                Ok(length) => return Err(Violation::new(format!("{what} {length} bytes"))),
                Err(error) => return Err(Violation::caused(what, error)),
            }
        }
        Ok(())
    }

    /// Takes up to [`BURST_REQUESTS_MAX`] requests. Returns their number.
    fn take_burst(self: &Arc<Self>, cursor: &mut Cursor) -> Result<u32, Violation> {
        let mut taken_count = 0;
        while taken_count < BURST_REQUESTS_MAX && !self.is_stopping() {
            if self.answers.lock().in_flight_bytes >= IN_FLIGHT_BYTES_MAX {
                break;
            }
            if let Some(head) = cursor.again.pop() {
                self.take(head, cursor)?;
                taken_count += 1;
                continue;
            }
            let waiting_count = self.setup.ring.available_index()?.wrapping_sub(cursor.next);
            if waiting_count == 0 {
                break;
            }
            // A guest cannot have more entries than the queue. The index is wrong, and following it
            // would execute old entries again.
            if waiting_count > self.setup.ring.size {
                let size = self.setup.ring.size;
                return Err(Violation::new(format!(
                    "{waiting_count} requests in a queue of {size} entries"
                )));
            }
            self.take(self.setup.ring.head(cursor.next)?, cursor)?;
            cursor.next = cursor.next.wrapping_add(1);
            taken_count += 1;
        }
        Ok(taken_count)
    }

    /// Takes one request: it is answered, or the device has it.
    fn take(self: &Arc<Self>, head: u16, cursor: &mut Cursor) -> Result<(), Violation> {
        let chain = self.setup.ring.chain(head)?;
        if total(&chain.writable) == 0 {
            return Err(Violation::new(format!("request {head} has no room for its status")));
        }
        let command = self.read_command(&chain);
        let moved_bytes = match &command {
            Ok(Command::Device {
                operation: Operation::Read | Operation::Write, length, ..
            }) => *length,
            _ => 0,
        };
        {
            let mut answers = self.answers.lock();
            // A head that is given twice would have two answers, and both would write to the same
            // place in the in-flight region (P54).
            let Some(is_taken) =
                answers.taken.get_mut(usize::from(head)).filter(|is_taken| !**is_taken)
            else {
                return Err(Violation::new(format!(
                    "request {head} was made available while it is in flight"
                )));
            };
            *is_taken = true;
            answers.in_flight += 1;
            answers.in_flight_bytes += moved_bytes;
        }
        self.setup.counters.in_flight.fetch_add(1, Ordering::Relaxed);
        if let Some(inflight) = &self.setup.inflight {
            // Before the device has it: from then on a death may leave it done and unanswered.
            inflight.take(head, cursor.counter);
            cursor.counter += 1;
        }
        self.carry_out(head, chain, command, moved_bytes);
        Ok(())
    }

    fn read_command(&self, chain: &Chain) -> Result<Command, Refusal> {
        let failed = |violation: Violation| Refusal(Status::Failed, violation.text);
        let memory = &self.setup.ring.memory;
        let payload_bytes = total(&chain.readable).checked_sub(HEADER_BYTES);
        let Some(payload_bytes) = payload_bytes else {
            return Err(Refusal(Status::Failed, "its header is truncated".into()));
        };
        let mut header = [0; HEADER_BYTES as usize];
        memory.gather(&chain.readable, 0, &mut header).map_err(failed)?;
        let mut range = [0; 16];
        let has_range = payload_bytes == range.len() as u64;
        if has_range {
            memory.gather(&chain.readable, HEADER_BYTES, &mut range).map_err(failed)?;
        }
        // `take` has checked that there is room for the status byte.
        let data_bytes = total(&chain.writable) - 1;
        let parts = Parts { payload_bytes, range: has_range.then_some(range), data_bytes };
        let command = understand(&header, &parts, self.setup.negotiated, self.setup.cache_mode)?;
        let geometry = self.setup.device.geometry();
        match command {
            Command::Device { operation: Operation::Read | Operation::Write, length, .. }
                if length > u64::from(geometry.request_bytes_max) =>
            {
                Err(Refusal(
                    Status::Failed,
                    format!("{length} bytes exceed the limit of one request"),
                ))
            }
            command => Ok(command),
        }
    }

    fn carry_out(
        self: &Arc<Self>,
        head: u16,
        chain: Chain,
        command: Result<Command, Refusal>,
        moved_bytes: u64,
    ) {
        let counters = &self.setup.counters;
        let mut ticket = Ticket {
            queue: self.clone(),
            head,
            chain,
            read_bytes: 0,
            charged_bytes: moved_bytes,
            buffer: Vec::new(),
            is_damaged: false,
        };
        match command {
            Ok(Command::Device { operation, address, length, flags }) => {
                counters.request(Some(operation));
                if operation == Operation::Read {
                    counters.bytes_out.fetch_add(length, Ordering::Relaxed);
                    ticket.read_bytes = length as usize;
                } else if operation == Operation::Write {
                    counters.bytes_in.fetch_add(length, Ordering::Relaxed);
                }
                let request = Request::new(operation, address, length, flags, Box::new(ticket));
                self.setup.device.submit(request);
            }
            Ok(Command::Id) => {
                counters.request(None);
                ticket.answer(Status::Ok, &self.setup.id);
            }
            Err(Refusal(status, reason)) => {
                counters.request(None);
                tracing::debug!(
                    queue = self.setup.index,
                    head,
                    reason,
                    "vhost-user: refused a request"
                );
                ticket.answer(status, &[]);
            }
        }
    }

    /// Answers a request, on any thread.
    fn answer(&self, ticket: &Ticket, status: Status, data: &[u8]) {
        let writable = &ticket.chain.writable;
        // The whole part that the guest lets us write, as if it were written: its last byte is.
        let written_bytes = u32::try_from(total(writable)).unwrap_or(u32::MAX);
        let counters = &self.setup.counters;
        counters.in_flight.fetch_sub(1, Ordering::Relaxed);
        if status != Status::Ok {
            counters.errors.fetch_add(1, Ordering::Relaxed);
        }
        let ring = &self.setup.ring;
        // Held while the guest's memory is written: `detach` returns only afterward.
        let is_attached = self.is_attached.read();
        let mut outcome = Ok(());
        if *is_attached {
            let status_at = total(writable).saturating_sub(1);
            outcome = ring.scatter(writable, 0, data);
            outcome = outcome.and_then(|()| ring.scatter(writable, status_at, &[status.byte()]));
        }
        let mut answers = self.answers.lock();
        if *is_attached && !answers.is_detached {
            outcome = outcome.and_then(|()| self.use_up(&mut answers, ticket.head, written_bytes));
        }
        drop(is_attached);
        answers.in_flight -= 1;
        answers.in_flight_bytes -= ticket.charged_bytes;
        if answers.is_in_burst {
            drop(answers);
        } else {
            self.settle_locked(answers);
        }
        self.changed.notify_all();
        if let Err(violation) = outcome {
            // Ranges were checked before, and a mapping does not shrink.
            tracing::error!(queue = self.setup.index, %violation, "vhost-user: lost an answer");
        }
    }

    fn use_up(
        &self,
        answers: &mut Answers,
        head: u16,
        written_bytes: u32,
    ) -> Result<(), Violation> {
        let ring = &self.setup.ring;
        if let Some(inflight) = &self.setup.inflight {
            inflight.begin_answer(head);
        }
        ring.put_used(answers.next_used, head, written_bytes)?;
        answers.next_used = answers.next_used.wrapping_add(1);
        // From the next line on, the guest may make the head available again.
        if let Some(is_taken) = answers.taken.get_mut(usize::from(head)) {
            *is_taken = false;
        }
        ring.publish(answers.next_used)?;
        if let Some(inflight) = &self.setup.inflight {
            inflight.end_answer(head, answers.next_used);
        }
        Ok(())
    }

    /// The end of a burst: calls the guest if it wants to know of the answers.
    fn settle(&self) {
        let mut answers = self.answers.lock();
        answers.is_in_burst = false;
        self.settle_locked(answers);
    }

    fn settle_locked(&self, mut answers: MutexGuard<'_, Answers>) {
        let (from, to) = (answers.called_used, answers.next_used);
        if from == to || answers.is_detached {
            return;
        }
        answers.called_used = to;
        // If the guest's setting is unreadable, one call too many does no harm.
        let is_wanted = self.setup.ring.wants_call(from, to).unwrap_or(true);
        let call = answers.call.clone().filter(|_| is_wanted);
        drop(answers);
        signal(call.as_deref());
    }

    /// The guest broke the protocol: nothing more is taken from this queue until it is set up
    /// again.
    fn break_down(&self, violation: &Violation) {
        let queue = self.setup.index;
        let reason = violation;
        tracing::warn!(queue, %reason, "vhost-user: stopped a queue: the guest broke the protocol");
        self.setup.counters.violations.fetch_add(1, Ordering::Relaxed);
        signal(self.setup.error.as_deref());
    }

    /// A buffer of this length; its content must be overwritten.
    pub(super) fn spare_buffer(&self, length: usize) -> Vec<u8> {
        let mut buffer = self.answers.lock().spare.pop().unwrap_or_default();
        buffer.resize(length, 0);
        buffer
    }

    pub(super) fn keep_buffer(&self, buffer: Vec<u8>) {
        if buffer.capacity() == 0 {
            return;
        }
        let mut answers = self.answers.lock();
        let spare_bytes: usize = answers.spare.iter().map(Vec::capacity).sum();
        if spare_bytes + buffer.capacity() <= SPARE_BYTES_MAX {
            answers.spare.push(buffer);
        }
    }
}

/// Increments an event; an event that is full already signals.
fn signal(event: Option<&OwnedFd>) {
    if let Some(event) = event {
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }
}
