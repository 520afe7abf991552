//! One socket, with one frontend at a time. One thread listens and handles the frontend's messages;
//! each running queue has a thread of its own.
//!
//! Invariants: there is one frontend at a time; a second one waits in the socket's backlog. While
//! the door is held (quiet), no message is received and no queue runs. A door that was taken over
//! and has not resumed ends nothing of the process that handed it over. Not here: the effect of
//! messages, and how requests are served.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use sawmill_device::{BlockDevice, Error, ErrorKind, Result};
use sawmill_sys::Waker;

use super::frontend_state::{DoorState, FrontendState};
use super::hand_over;
use super::limits::{QUEUE_SIZE_MAX, QUEUES_MAX};
use super::options::VhostOptions;
use super::protocol::ID_BYTES;
use super::wire::{self, End};
use crate::door::{Door, DoorCounts, DoorPiece, ExportStatus, QuietDoor, Stop};
use crate::unix_socket::UnixSocket;

/// The pause after a failure to accept a connection.
const ACCEPT_RETRY_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The state shared by the thread and the owner of the door.
struct SharedState {
    frontend: Option<FrontendState>,
    /// The door is quiet.
    is_held: bool,
}

struct VhostState {
    door_state: Arc<DoorState>,
    listener: UnixSocket,
    state: Mutex<SharedState>,
    /// The connection, so that it can be closed while a message is being received.
    socket: Mutex<Option<Arc<OwnedFd>>>,
    is_stopping: AtomicBool,
    /// Wakes the thread.
    waker: Waker,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Set when the socket belongs to another process.
    is_handed_over: AtomicBool,
    /// Taken over from another process, which may still roll that back.
    is_on_trial: AtomicBool,
}

/// A running vhost-user-blk door. Dropping it is [`Stop::Now`].
pub struct VhostDoor {
    shared: Arc<VhostState>,
}

impl VhostDoor {
    /// Listens and serves `device` to one frontend at a time.
    ///
    /// Errors: `Invalid` for numbers out of range or a path that is not valid for a socket;
    /// `Unavailable` if the path is taken or the system refuses.
    pub fn start(options: VhostOptions, device: Arc<dyn BlockDevice>) -> Result<Self> {
        let door_state = door_state(&options, device)?;
        let listener = UnixSocket::listen("vhost-user", &options.socket)?;
        Self::run(door_state, listener, SharedState { frontend: None, is_held: false })
    }

    /// Takes over the door of another process. The door is quiet: it serves once it is resumed,
    /// which must come only after the other process has released it.
    ///
    /// Errors: as [`VhostDoor::start`]; `Invalid` if the pieces are incomplete.
    pub fn take_over(
        options: VhostOptions,
        device: Arc<dyn BlockDevice>,
        pieces: Vec<DoorPiece>,
    ) -> Result<(Self, Box<dyn QuietDoor>)> {
        let door_state = door_state(&options, device)?;
        let taken_over = hand_over::unpack(&door_state, pieces)?;
        let listener = UnixSocket::adopt("vhost-user", &options.socket, taken_over.listener);
        let door = Self::run(
            door_state,
            listener,
            SharedState { frontend: taken_over.frontend, is_held: true },
        )?;
        let quiet_door = Box::new(QuietVhostDoor(Arc::clone(&door.shared)));
        Ok((door, quiet_door))
    }

    fn run(
        door_state: Arc<DoorState>,
        listener: UnixSocket,
        shared_state: SharedState,
    ) -> Result<Self> {
        let system = |error: std::io::Error| {
            Error::caused(ErrorKind::Unavailable, "vhost-user: cannot start the door", error)
        };
        // A door that is taken over is held. Until it resumes, the other process still listens.
        let is_on_trial = shared_state.is_held;
        let failed = |listener: &UnixSocket, error| {
            if !is_on_trial {
                listener.remove();
            }
            system(error)
        };
        let waker = Waker::new().map_err(|error| failed(&listener, error))?;
        let socket = shared_state.frontend.as_ref().map(|frontend| frontend.socket.clone());
        let shared = Arc::new(VhostState {
            door_state,
            listener,
            state: Mutex::new(shared_state),
            socket: Mutex::new(socket),
            is_stopping: AtomicBool::new(false),
            waker,
            thread: Mutex::default(),
            is_handed_over: AtomicBool::new(false),
            is_on_trial: AtomicBool::new(is_on_trial),
        });
        let serving = shared.clone();
        let thread =
            std::thread::Builder::new().name("vhost-serve".into()).spawn(move || serving.serve());
        match thread {
            Ok(thread) => {
                *shared.thread.lock() = Some(thread);
                Ok(VhostDoor { shared })
            }
            Err(error) => Err(failed(&shared.listener, error)),
        }
    }

    /// Notifies the frontend that the device has another size.
    pub fn resized(&self) {
        if let Some(frontend) = &self.shared.state.lock().frontend {
            frontend.announce_config();
        }
    }
}

fn door_state(options: &VhostOptions, device: Arc<dyn BlockDevice>) -> Result<Arc<DoorState>> {
    let (queues_max, queue_size_max) = (options.queues_max, options.queue_size_max);
    let has_valid_size = queue_size_max.is_power_of_two() && queue_size_max <= QUEUE_SIZE_MAX;
    if !(1..=QUEUES_MAX).contains(&queues_max) || !has_valid_size {
        let text = format!(
            "vhost-user: {queues_max} queues of {queue_size_max} entries are not supported; use 1 \
             to {QUEUES_MAX} queues of a power of two up to {QUEUE_SIZE_MAX}"
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let mut id = [0; ID_BYTES];
    id.iter_mut().zip(options.serial.bytes()).for_each(|(place, byte)| *place = byte);
    let (counters, roster) = (Arc::default(), Mutex::default());
    Ok(Arc::new(DoorState { device, queues_max, queue_size_max, id, counters, roster }))
}

impl VhostState {
    /// The body of the thread `vhost-serve`: one poll for the listener, the frontend and the waker,
    /// so that a stop never waits for a silent frontend.
    fn serve(&self) {
        let mut has_logged_second = false;
        let mut pause = None;
        while !self.is_stopping.load(Ordering::SeqCst) {
            let (socket, is_held) = {
                let state = self.state.lock();
                (state.frontend.as_ref().map(|frontend| frontend.socket.clone()), state.is_held)
            };
            let mut fds = vec![PollFd::new(&self.waker, PollFlags::IN)];
            let (mut frontend, mut newcomer) = (usize::MAX, usize::MAX);
            if let (Some(socket), false) = (&socket, is_held) {
                frontend = fds.len();
                fds.push(PollFd::new(&**socket, PollFlags::IN));
            }
            // A second frontend stays in the queue of the listener. Once it was logged, polling for
            // it would only spin.
            if !is_held && pause.is_none() && (socket.is_none() || !has_logged_second) {
                newcomer = fds.len();
                fds.push(PollFd::new(&self.listener.socket, PollFlags::IN));
            }
            let _ = poll(&mut fds, pause.as_ref());
            pause = None;
            let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
            if is_ready(0) {
                self.waker.clear();
                continue;
            }
            if is_ready(frontend) {
                self.handle_message();
            } else if is_ready(newcomer) && socket.is_none() {
                has_logged_second = false;
                pause = self.accept();
            } else if is_ready(newcomer) {
                tracing::warn!(
                    "vhost-user: another frontend waits until the connected one disconnects"
                );
                has_logged_second = true;
            }
        }
    }

    /// Handles one message.
    fn handle_message(&self) {
        let mut state = self.state.lock();
        if state.is_held {
            return;
        }
        let Some(frontend) = &mut state.frontend else { return };
        let Err(end) = frontend.serve_one() else { return };
        *self.socket.lock() = None;
        state.frontend = None;
        match end {
            End::Closed => tracing::info!("vhost-user: the frontend closed the connection"),
            End::Broken(error) => tracing::warn!(%error, "vhost-user: the connection broke"),
            End::Violation(reason) => {
                self.door_state.counters.violations.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%reason, "vhost-user: connection closed: the frontend broke the \
                    protocol");
            }
        }
    }

    /// Accepts a frontend. Returns how long to wait before retrying.
    fn accept(&self) -> Option<Timespec> {
        let accepted = accept_with(&self.listener.socket, SocketFlags::CLOEXEC);
        let socket = match accepted.and_then(|socket| wire::set_times(&socket).map(|()| socket)) {
            Ok(socket) => Arc::new(socket),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return None,
            Err(error) => {
                tracing::warn!(%error, "vhost-user: cannot accept a connection");
                return Some(ACCEPT_RETRY_PAUSE);
            }
        };
        self.door_state.counters.connections_total.fetch_add(1, Ordering::Relaxed);
        tracing::info!("vhost-user: a frontend connected");
        let mut state = self.state.lock();
        *self.socket.lock() = Some(socket.clone());
        state.frontend = Some(FrontendState::new(self.door_state.clone(), socket));
        None
    }

    fn quiesce(&self, patience: Duration) -> Result<()> {
        let busy = || {
            let open_count = self.door_state.counters.snapshot().in_flight;
            let text =
                format!("vhost-user: {open_count} requests were not answered within {patience:?}");
            Error::new(ErrorKind::Unavailable, text)
        };
        let deadline = Instant::now() + patience;
        // The thread may hold the lock for long, in a message that waits for the requests of a
        // queue.
        let mut state = self.state.try_lock_until(deadline).ok_or_else(busy)?;
        if state.is_held {
            return Ok(());
        }
        if let Some(frontend) = &mut state.frontend {
            frontend.pause(Some(deadline)).map_err(|_| busy())?;
        }
        // Includes what an earlier frontend left in the device.
        let lingering: Vec<_> = self.door_state.roster.lock().clone();
        if lingering.iter().any(|queue| queue.lingers_until(deadline)) {
            if let Some(frontend) = &mut state.frontend {
                frontend.start();
            }
            return Err(busy());
        }
        state.is_held = true;
        drop(state);
        self.waker.wake();
        Ok(())
    }

    fn resume(&self) {
        // First: otherwise a door that resumes would be released as if it were still on trial.
        self.is_on_trial.store(false, Ordering::SeqCst);
        let mut state = self.state.lock();
        if !std::mem::take(&mut state.is_held) {
            return;
        }
        if let Some(frontend) = &mut state.frontend {
            frontend.start();
            // After a takeover, none is running yet.
            if let Err(violation) = frontend.run_what_can_run() {
                self.door_state.counters.violations.fetch_add(1, Ordering::Relaxed);
                tracing::error!(%violation, "vhost-user: cannot resume a queue; the others resume");
            }
        }
        drop(state);
        self.waker.wake();
    }

    fn hand_over(&self) -> Result<Vec<DoorPiece>> {
        let state = self.state.lock();
        if !state.is_held {
            let text = "vhost-user: only a quiet door can be handed over";
            return Err(Error::new(ErrorKind::Internal, text));
        }
        hand_over::pack(&self.listener, state.frontend.as_ref())
    }

    fn release(&self) {
        // First: `end_thread` removes the socket's file unless it belongs to another process.
        self.is_handed_over.store(true, Ordering::SeqCst);
        self.end_thread();
        *self.socket.lock() = None;
        // Nothing is in flight, and closing our descriptors ends nothing, because others have
        // duplicates.
        self.state.lock().frontend = None;
    }

    fn stop(&self) {
        // The queues of a door on trial belong to another process, as `stop_now` knows.
        if !self.is_on_trial.load(Ordering::SeqCst) {
            let mut state = self.state.lock();
            if let Some(frontend) = &mut state.frontend {
                let _ = frontend.pause(None);
            }
            state.is_held = true;
        }
        self.stop_now();
    }

    fn stop_now(&self) {
        // On trial, everything belongs to another process and must not be ended.
        if self.is_on_trial.load(Ordering::SeqCst) {
            return self.release();
        }
        for queue in self.door_state.roster.lock().clone() {
            // The frontend does not wait for its answers any more.
            queue.detach();
        }
        if let Some(socket) = &*self.socket.lock()
            && !self.is_handed_over.load(Ordering::SeqCst)
        {
            let _ = shutdown(socket, Shutdown::Both);
        }
        self.end_thread();
        self.state.lock().frontend = None;
    }

    fn end_thread(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        self.waker.wake();
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
        if !self.is_handed_over.load(Ordering::SeqCst) {
            self.listener.remove();
        }
    }
}

impl Door for VhostDoor {
    fn kind(&self) -> &'static str {
        "vhost-user"
    }

    fn address(&self) -> String {
        self.shared.listener.path.display().to_string()
    }

    fn export(&self, _name: &str) -> ExportStatus {
        ExportStatus { address: self.address(), peers: Vec::new() }
    }

    fn counts(&self) -> DoorCounts {
        self.shared.door_state.counters.snapshot()
    }

    fn quiesce(&self, patience: Duration) -> Result<Box<dyn QuietDoor>> {
        self.shared.quiesce(patience)?;
        Ok(Box::new(QuietVhostDoor(Arc::clone(&self.shared))))
    }

    fn resized(&self) -> Result<()> {
        VhostDoor::resized(self);
        Ok(())
    }

    fn stop(&self, how: Stop) {
        match how {
            Stop::Drained => self.shared.stop(),
            Stop::Now => self.shared.stop_now(),
        }
    }
}

struct QuietVhostDoor(Arc<VhostState>);

impl QuietDoor for QuietVhostDoor {
    fn hand_over(&self) -> Result<Vec<DoorPiece>> {
        self.0.hand_over()
    }

    fn release(self: Box<Self>) {
        self.0.release();
    }

    fn resume(self: Box<Self>) {
        self.0.resume();
    }
}

impl Drop for VhostDoor {
    fn drop(&mut self) {
        self.shared.stop_now();
    }
}
