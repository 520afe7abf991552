//! A thread that serves queues over one ring: of one device, or of many.
//!
//! Invariants: the kernel binds a queue to the thread that fetched first, so a queue stays on its
//! thread for life. A thread that was told to release a queue ends, because the kernel considers a
//! device abandoned only when the threads that served it are gone. Not here: the meaning of a
//! request.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CpuSet, gettid, sched_setaffinity};
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::ublk::{QueueRing, RingEvent};

use super::channel::{Completion, Inbox, Message, NewQueue, QueueChannel};
use super::limits::{CHECK_EVERY, COMMANDS_PER_CALL_MAX, IDLE_TIME_MAX, SHARED_SLOTS_MAX};
use super::queue::{Queue, Spares};

/// A device may call functions of a program on such a thread, which count on what a main thread
/// has. Memory that they do not use costs nothing.
const STACK_BYTES: usize = 8 << 20;

fn system(what: &str, error: std::io::Error) -> Error {
    Error::caused(ErrorKind::Unavailable, format!("ublk: {what}"), error)
}

/// A running thread.
pub(super) struct Worker {
    pub(super) inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a thread with room for this many queues, on these cores (all, if empty).
    pub(super) fn start(name: String, slots: u32, cores: Vec<usize>) -> Result<Self> {
        let inbox = Arc::new(
            Inbox::new()
                .map_err(|error| system("cannot create an event to wake a thread", error))?,
        );
        let (ready_sender, ready_receiver) = sync_channel(1);
        let worker_inbox = inbox.clone();
        let run = move || {
            tie_to(&cores);
            // Without the privilege, there is no device whose memory could wait for itself: see the
            // guide.
            if let Err(error) = sawmill_sys::reclaim::set_io_flusher() {
                tracing::debug!(%error, "ublk: cannot make a thread an I/O flusher");
            }
            // On the thread itself: the driver accepts the commands of a queue from one thread
            // only, and remembers it as its server.
            match Loop::new(worker_inbox.clone(), slots) {
                Ok(serving) => {
                    let _ = ready_sender.send(Ok(()));
                    close_after_end(serving.run());
                }
                Err(error) => {
                    worker_inbox.close();
                    let _ = ready_sender.send(Err(system("cannot set up io_uring", error)));
                }
            }
        };
        let thread = std::thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(run);
        let thread = thread.map_err(|error| system("cannot start a thread for a queue", error))?;
        let worker = Worker { inbox, thread: Some(thread) };
        match ready_receiver.recv() {
            Ok(Ok(())) => Ok(worker),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                Err(Error::new(ErrorKind::Internal, "ublk: a thread ended before it was ready"))
            }
        }
    }

    /// Waits for the end of a thread that was told to end.
    pub(super) fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Closes the ring of the calling thread after the thread has ended. The kernel cleans up a ring on
/// a thread of its own; Linux 6.12 miscounts references to the ring's thread if that one ends
/// during this.
fn close_after_end(ring: QueueRing) {
    let thread = PathBuf::from(format!("/proc/self/task/{}", gettid().as_raw_nonzero()));
    let close = move || {
        while thread.exists() {
            std::thread::sleep(CHECK_EVERY);
        }
        drop(ring);
    };
    if let Err(error) = std::thread::Builder::new().name("ublk-close".into()).spawn(close) {
        tracing::warn!(%error, "ublk: cannot start a thread to close a ring");
    }
}

fn tie_to(cores: &[usize]) {
    let mut set = CpuSet::new();
    cores.iter().filter(|core| **core < CpuSet::MAX_CPU).for_each(|core| set.set(*core));
    if set.count() > 0
        && let Err(error) = sched_setaffinity(None, &set)
    {
        tracing::debug!(%error, ?cores, "ublk: cannot pin a thread to its cores");
    }
}

/// A few threads that serve the queues of many devices. After this is dropped, they end when their
/// devices are gone.
#[derive(Clone)]
pub struct UblkWorkers {
    pool: Arc<Pool>,
}

struct Pool {
    workers: Mutex<Vec<Worker>>,
    next: AtomicUsize,
}

impl UblkWorkers {
    /// Starts this many threads. Returns `Invalid` for zero; `Unavailable` if the system refuses.
    pub fn start(threads: usize) -> Result<Self> {
        if threads == 0 {
            return Err(Error::new(ErrorKind::Invalid, "ublk: 0 threads cannot serve a device"));
        }
        let workers = (0..threads).map(Self::worker).collect::<Result<_>>()?;
        Ok(UblkWorkers {
            pool: Arc::new(Pool { workers: Mutex::new(workers), next: AtomicUsize::new(0) }),
        })
    }

    fn worker(number: usize) -> Result<Worker> {
        // The kernel counts the places for files on a ring against the limit on open files.
        let files_max = getrlimit(Resource::Nofile).current.unwrap_or(SHARED_SLOTS_MAX);
        Worker::start(
            format!("ublk-shared-{number}"),
            files_max.min(SHARED_SLOTS_MAX) as u32,
            Vec::new(),
        )
    }

    /// The thread for one more queue: each in turn.
    pub(super) fn choose(&self) -> Result<Arc<Inbox>> {
        let mut workers = self.pool.workers.lock();
        let number = self.pool.next.fetch_add(1, Relaxed) % workers.len();
        // A thread ends when it fails, or when all its devices are let go. Later devices need
        // another.
        if workers[number].inbox.is_closed() {
            workers[number] = Self::worker(number)?;
        }
        Ok(workers[number].inbox.clone())
    }
}

impl std::fmt::Debug for UblkWorkers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UblkWorkers({})", self.pool.workers.lock().len())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for worker in self.workers.get_mut() {
            worker.inbox.send(Message::Stop);
        }
    }
}

/// The queues of a thread, by slot of its ring, and its inbox.
struct WorkerQueues {
    inbox: Arc<Inbox>,
    queues: Vec<Option<Queue>>,
}

impl WorkerQueues {
    /// The queue of a channel, unless it is gone: another queue may have its slot by now.
    fn queue_of(&mut self, channel: &Arc<QueueChannel>) -> Option<&mut Queue> {
        let queue = self.queues.get_mut(channel.slot() as usize)?.as_mut()?;
        Arc::ptr_eq(&queue.channel, channel).then_some(queue)
    }
}

/// The state of a thread's loop.
struct Loop {
    ring: QueueRing,
    queues: WorkerQueues,
    spares: Spares,
    /// A queue was told to be quiet, and its door may not have been notified yet.
    is_quieting: bool,
    is_stopping: bool,
}

impl Loop {
    fn new(inbox: Arc<Inbox>, slots: u32) -> std::io::Result<Self> {
        let mut ring = QueueRing::new(COMMANDS_PER_CALL_MAX, slots)?;
        ring.watch(inbox.descriptor())?;
        let queues = WorkerQueues { inbox, queues: Vec::new() };
        Ok(Loop { ring, queues, spares: Spares::default(), is_quieting: false, is_stopping: false })
    }

    /// Serves to the end. Returns the ring.
    fn run(mut self) -> QueueRing {
        if let Err(error) = self.serve() {
            tracing::error!(%error, "ublk: a thread failed; its devices wait for another server");
        }
        self.ring
    }

    fn serve(&mut self) -> std::io::Result<()> {
        let (mut events, mut done, mut messages) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            self.ring.events(&mut events)?;
            let is_idle = events.is_empty();
            for event in events.drain(..) {
                self.handle_event(event);
            }
            self.queues.inbox.take(&mut done, &mut messages);
            let is_idle = is_idle && done.is_empty() && messages.is_empty();
            for done in done.drain(..) {
                self.answer(done)?;
            }
            for message in messages.drain(..) {
                self.follow(message)?;
            }
            if is_idle {
                self.spares.give_back();
            }
            if self.is_over() {
                // What was answered goes to the kernel before the end.
                return self.ring.submit();
            }
            let may_sleep = self.queues.inbox.nothing_waits();
            let time_max = (!self.spares.is_empty()).then_some(IDLE_TIME_MAX);
            // Without sleeping, there is more to answer first: one call takes it all.
            if may_sleep {
                if self.is_quieting {
                    self.notify_progress()?;
                }
                self.ring.submit_and_wait(time_max)?;
            } else {
                self.ring.submit()?;
            }
        }
    }

    fn handle_event(&mut self, event: RingEvent) {
        match event {
            RingEvent::Woken => (),
            RingEvent::Request { slot, tag } => {
                let buffer = self.ring.take_buffer(slot, tag).unwrap_or_default();
                if let Some(Some(queue)) = self.queues.queues.get_mut(slot as usize) {
                    queue.take(tag, buffer, &mut self.spares);
                }
            }
            RingEvent::Gone { slot, tag, errno } => {
                drop(self.ring.take_buffer(slot, tag));
                if let Some(Some(queue)) = self.queues.queues.get_mut(slot as usize) {
                    queue.lose(tag, errno);
                }
                self.release_if_gone(slot);
            }
        }
    }

    fn answer(&mut self, done: Completion) -> std::io::Result<()> {
        let slot = done.slot;
        if let Some(Some(queue)) = self.queues.queues.get_mut(slot as usize) {
            queue.answer(done, &mut self.ring, &mut self.spares)?;
        }
        self.release_if_gone(slot);
        Ok(())
    }

    fn follow(&mut self, message: Message) -> std::io::Result<()> {
        match message {
            Message::Attach(queue, answer) => self.attach(queue, &answer)?,
            Message::Quiesce(channel, round) => {
                if let Some(queue) = self.queues.queue_of(&channel) {
                    queue.quiesce(round);
                    self.is_quieting = true;
                }
            }
            Message::Resume(channel) => {
                if let Some(queue) = self.queues.queue_of(&channel) {
                    queue.resume(&mut self.spares);
                }
            }
            Message::LetGo(channel) => {
                if let Some(queue) = self.queues.queue_of(&channel) {
                    queue.state.is_released = true;
                }
            }
            Message::Stop => self.is_stopping = true,
        }
        Ok(())
    }

    /// Accepts a queue, and answers once the kernel has all its commands.
    fn attach(&mut self, queue: NewQueue, answer: &SyncSender<Result<()>>) -> std::io::Result<()> {
        let slot = match self.ring.attach(&queue.channel.char_device) {
            Ok(slot) => slot,
            Err(error) => {
                let _ = answer.send(Err(system("a thread cannot serve another queue", error)));
                queue.channel.progress.gone();
                return Ok(());
            }
        };
        // Before the first fetch, because answers find the queue by it.
        queue.channel.set_slot(slot);
        let place = slot as usize;
        if self.queues.queues.len() <= place {
            self.queues.queues.resize_with(place + 1, || None);
        }
        let queue = self.queues.queues[place].insert(Queue::new(queue));
        queue.fetch_all(&mut self.ring)?;
        self.ring.submit()?;
        // A command that the kernel refuses comes back at once.
        let mut events = Vec::new();
        self.ring.events(&mut events)?;
        let refusal = events.iter().find_map(|event| match event {
            RingEvent::Gone { slot: of, errno, .. } if *of == slot => Some(*errno),
            _ => None,
        });
        for event in events {
            self.handle_event(event);
        }
        let _ = answer.send(match refusal {
            None => Ok(()),
            Some(errno) => {
                Err(system("the kernel refused a queue", std::io::Error::from_raw_os_error(errno)))
            }
        });
        Ok(())
    }

    fn release_if_gone(&mut self, slot: u32) {
        let Some(place) = self.queues.queues.get_mut(slot as usize) else { return };
        if place.as_ref().is_some_and(Queue::is_gone)
            && let Some(queue) = place.take()
        {
            if let Err(error) = self.ring.detach(slot) {
                tracing::warn!(%error, slot, "ublk: cannot release the file of a queue");
            }
            let progress = queue.channel.progress.clone();
            drop(queue);
            progress.gone();
        }
    }

    /// Notifies the doors which queues are quiet, once the kernel has their answers.
    fn notify_progress(&mut self) -> std::io::Result<()> {
        self.ring.submit()?;
        // The door may exit as soon as it is told. An answer that is still in the ring would then
        // be lost, and its request done again.
        self.queues.queues.iter_mut().flatten().for_each(Queue::notify_progress);
        self.is_quieting = self.queues.queues.iter().flatten().any(Queue::is_quieting);
        Ok(())
    }

    fn is_over(&self) -> bool {
        let mut queues = self.queues.queues.iter().flatten().peekable();
        // A thread without queues waits for the next device unless it is told to stop.
        let is_released = queues.peek().is_some() && queues.all(|queue| queue.state.is_released);
        is_released || (self.is_stopping && self.queues.queues.iter().all(Option::is_none))
    }
}

/// However the thread ends, even by a panic of a device, no other thread waits for it forever.
impl Drop for WorkerQueues {
    fn drop(&mut self) {
        for message in self.inbox.close() {
            if let Message::Attach(queue, answer) = message {
                let text = "ublk: the thread of a queue has ended";
                let _ = answer.send(Err(Error::new(ErrorKind::Unavailable, text)));
                queue.channel.progress.gone();
            }
        }
        for queue in self.queues.drain(..).flatten() {
            let progress = queue.channel.progress.clone();
            drop(queue);
            progress.gone();
        }
    }
}
