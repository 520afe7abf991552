//! A device whose driver is another process: it comes, goes, dies, is replaced; the device stays.
//!
//! | state | what happens | then |
//! |---|---|---|
//! | declared: nobody has said what the device is | the first driver says HELLO | running |
//! | running | its driver died, or was replaced | waiting |
//! | waiting | a driver comes | running |
//! | waiting | requests waited for `death_timeout_s` | waiting, and requests fail |
//! | running, waiting | the driver leaves, or [`Host::finish`] | ending: everything is answered, then ended |
//! | any | [`Host::fail`]; a driver that was not recoverable died | ended |
//!
//! Invariants: at most one driver is with the device; a driver is with it until all of its threads here have
//! ended, and what it did not answer is handed to the next one, so every request is answered once and by one
//! of them.
//!
//! Files: `greeting` (who has not spoken yet), `attach` (a driver comes), `session` (its sockets), `policy`
//! (nobody is there), `ask` (what commands want to know). Not here: doors, child processes (the program);
//! what is sent (`protocol`).

mod ask;
mod attach;
mod greeting;
mod policy;
mod session;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use sawmill_device::{BlockDevice, BlockDeviceExt, Error, ErrorKind, Result};
use sawmill_sys::FileLock;

use self::greeting::{Greeting, Silent};
use self::policy::Policy;
use self::session::Session;
use crate::backend::Backend;
use crate::options::DeviceOptions;
use crate::protocol::{Control, ControlKind, Facts, PacketSocket};

/// What becomes of a device and its drivers, told to who made the host.
#[derive(Clone, Debug)]
pub enum Event {
    /// The first driver is there: [`Host::device`] is, and doors can be opened.
    Declared,
    /// A driver serves.
    Attached {
        /// How many there were, with it.
        generation: u64,
        /// The process.
        pid: u32,
    },
    /// A driver does not serve any more.
    Gone {
        /// Which.
        generation: u64,
        /// The process, which may still be there.
        pid: u32,
        /// It answered everything and went.
        in_order: bool,
        /// What was wrong, else.
        why: String,
    },
    /// A driver takes too long for an order and counts as gone: somebody should end the process.
    Hung {
        /// The process.
        pid: u32,
    },
    /// The device shall end: see [`Host::finish`]; with a reason, at once: see [`Host::fail`].
    EndAsked(Option<String>),
    /// Somebody wants a new driver in the place of this one.
    ReplaceAsked,
}

/// How long a driver that has answered everything may take to go.
const GOES_WITHIN: Duration = Duration::from_secs(5);
/// How often the end of a device looks whether it is there.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Who hears of events, on any thread; it must not wait for the host.
pub type Listener = Box<dyn Fn(Event) + Send + Sync>;

/// See the head of this file.
pub struct Host {
    name: String,
    path: PathBuf,
    /// Options that come before what a driver says.
    given: Facts,
    tell: Listener,
    socket: OwnedFd,
    _claim: FileLock,
    served: OnceLock<Served>,
    /// One driver comes at a time.
    attaching: Mutex<()>,
    /// The driver that is there, and how the device ended.
    now: Mutex<Now>,
    changed: Condvar,
    generation: AtomicU64,
    doors: OnceLock<Facts>,
    /// The next driver comes after the one that is there, whether it says so or not.
    replacement_expected: AtomicBool,
    is_closed: AtomicBool,
    greeting: Arc<Greeting>,
}

#[derive(Default)]
struct Now {
    session: Option<Arc<Session>>,
    since: Option<Instant>,
    outcome: Option<std::result::Result<(), String>>,
    /// Questions that are being answered.
    asked: usize,
}

/// A device that was declared.
struct Served {
    options: DeviceOptions,
    backend: Arc<dyn Backend>,
    policy: Arc<Policy>,
    device: Arc<dyn BlockDevice>,
}

impl Host {
    /// Listens for drivers at `path`, for a device of this name. `given` are options that a driver cannot
    /// change.
    ///
    /// # Errors
    /// `InUse` when another host has this path, `Invalid` for options that are none, `Unavailable`.
    pub fn start(name: &str, path: &Path, given: Facts, tell: Listener) -> Result<Arc<Self>> {
        let mut trial = DeviceOptions::default();
        for (option, value) in given.iter() {
            trial.set(option, value)?;
        }
        let claim = FileLock::of_name(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => {
                Error::new(ErrorKind::InUse, format!("a device '{name}' already exists: {}", path.display()))
            }
            _ => unavailable(path, &error),
        })?;
        let socket = listening(path)?;
        let host = Arc::new(Host {
            name: name.to_owned(),
            path: path.to_path_buf(),
            given,
            tell,
            socket,
            _claim: claim,
            served: OnceLock::new(),
            attaching: Mutex::default(),
            now: Mutex::default(),
            changed: Condvar::new(),
            generation: AtomicU64::new(0),
            doors: OnceLock::new(),
            replacement_expected: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            greeting: Arc::default(),
        });
        let accepting = Arc::clone(&host);
        thread("driver-accept", move || accepting.accept())?;
        let watching = Arc::downgrade(&host);
        thread("driver-watch", move || policy::watch(&watching))?;
        Ok(host)
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where drivers connect.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The device, once a driver has said what it is.
    #[must_use]
    pub fn device(&self) -> Option<Arc<dyn BlockDevice>> {
        self.served.get().map(|served| Arc::clone(&served.device))
    }

    /// The options in effect, once a driver has said what the device is.
    #[must_use]
    pub fn options(&self) -> Option<&DeviceOptions> {
        self.served.get().map(|served| &served.options)
    }

    /// Tells drivers where the device can be used: `door=KIND ADDRESS`.
    pub fn show_doors(&self, doors: Facts) {
        let doors = self.doors.get_or_init(|| doors);
        let session = self.now.lock().session.clone();
        if let Some(session) = session {
            session.tell_doors(doors);
        }
    }

    /// The next driver takes the place of the one that is there, or not.
    pub fn expect_replacement(&self, is_expected: bool) {
        self.replacement_expected.store(is_expected, Ordering::SeqCst);
    }

    /// Whether the device has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.now.lock().outcome.is_some()
    }

    /// The process that is the driver now.
    #[must_use]
    pub fn driver(&self) -> Option<u32> {
        self.now.lock().session.as_ref().map(|session| session.pid)
    }

    /// Ends the device in good order: everything accepted goes to the driver, is flushed and answered. Doors
    /// are closed by then. Waits for a driver if there is none: [`fail`](Self::fail) cuts that short.
    ///
    /// # Errors
    /// What the flush at the end said; the device has ended all the same.
    pub fn finish(&self) -> Result<()> {
        let Some(served) = self.served.get() else {
            self.ended(Ok(()));
            return Ok(());
        };
        let flushed = served.device.flush();
        served.backend.end();
        self.see_off(served);
        served.backend.fail(&Error::new(ErrorKind::Closed, "the device has ended"));
        self.ended(flushed.as_ref().map_err(ToString::to_string).copied());
        flushed
    }

    /// Waits until the driver has answered everything and gone.
    fn see_off(&self, served: &Served) {
        let mut done_since = None;
        let mut now = self.now.lock();
        while now.outcome.is_none() {
            let is_drained = served.backend.is_drained();
            match now.session.clone() {
                None if is_drained => return,
                Some(session) => session.see_that_it_goes(is_drained, &mut done_since),
                None => done_since = None,
            }
            self.changed.wait_for(&mut now, LOOK_EVERY);
        }
    }

    /// Ends the device now: everything that waits fails.
    pub fn fail(&self, error: &Error) {
        if let Some(served) = self.served.get() {
            served.backend.fail(error);
        }
        self.ended(Err(error.to_string()));
        let session = self.now.lock().session.clone();
        if let Some(session) = session {
            session.cut("the device has failed");
        }
    }

    /// Waits until the device has ended; how it did.
    ///
    /// # Errors
    /// The reason, when not all was well.
    pub fn wait_for_end(&self) -> std::result::Result<(), String> {
        let mut now = self.now.lock();
        loop {
            if let Some(outcome) = &now.outcome {
                return outcome.clone();
            }
            self.changed.wait(&mut now);
        }
    }

    /// Waits until those who asked something have their answers, once the device has ended; not for long.
    pub fn see_askers_off(&self) {
        let until = Instant::now() + GOES_WITHIN;
        let mut now = self.now.lock();
        while now.asked > 0 && !self.changed.wait_until(&mut now, until).timed_out() {}
    }

    /// Takes no more connections and forgets the socket.
    pub fn close(&self) {
        if !self.is_closed.swap(true, Ordering::SeqCst) {
            // Nobody else can have this path: the claim is ours.
            let _ = std::fs::remove_file(&self.path);
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }

    fn ended(&self, outcome: std::result::Result<(), String>) {
        self.now.lock().outcome.get_or_insert(outcome);
        self.changed.notify_all();
    }

    fn accept(self: &Arc<Self>) {
        while !self.is_closed.load(Ordering::SeqCst) {
            let accepted = accept_with(&self.socket, SocketFlags::CLOEXEC);
            if self.is_closed.load(Ordering::SeqCst) {
                return;
            }
            let Ok(socket) = accepted else {
                // Out of descriptors, most likely: others give some back.
                std::thread::sleep(Duration::from_millis(20));
                continue;
            };
            // Here and not on its thread: in the order they came.
            let Ok(silent) = self.greeting.wait_for(&socket) else { continue };
            let host = Arc::clone(self);
            // Without a thread nobody answers, and the peer sees the connection end.
            let _ = thread("driver", move || host.meet(socket, silent));
        }
    }

    /// Somebody has connected: a driver, or a question.
    fn meet(self: &Arc<Self>, socket: OwnedFd, silent: Silent) {
        let Ok(peer) = socket_peercred(&socket) else { return };
        let Some(_place) = self.greeting.enter() else {
            tracing::debug!("closed a driver's connection: too many are open");
            return;
        };
        let control = PacketSocket::from(socket);
        let own = rustix::process::geteuid();
        if peer.uid != own && !peer.uid.is_root() {
            let text = format!("this host serves only user {} and root", own.as_raw());
            return refuse(&control, 13, &text);
        }
        let pid = peer.pid.as_raw_nonzero().get().cast_unsigned();
        let wait_at_most = |time| set_socket_timeout(&control, Timeout::Recv, time);
        let bounded = wait_at_most(Some(greeting::WITHIN));
        let first = attach::first_packet(&control);
        if !silent.spoke() || bounded.is_err() || wait_at_most(None).is_err() {
            return;
        }
        match first {
            Ok(Some(packet)) if packet.kind == ControlKind::Hello => self.attach(control, &packet.facts, pid),
            Ok(Some(packet)) if packet.kind == ControlKind::Ask => self.answer(&control, &packet.facts),
            Ok(Some(packet)) => {
                refuse(&control, 71, &format!("a connection must start with HELLO, not {:?}", packet.kind))
            }
            Ok(None) => {}
            Err(error) => refuse(&control, 71, &error.to_string()),
        }
    }
}

fn refuse(control: &PacketSocket, errno: i32, message: &str) {
    let facts = Facts::default().with("errno", errno).with("message", message);
    // Who does not listen needs no answer.
    let _ = control.send(&Control::new(ControlKind::Refused, facts).encode(), &[]);
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(|error| Error::caused(ErrorKind::Unavailable, "cannot start a thread for a driver", error))
}

fn unavailable(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::Unavailable, format!("cannot listen for drivers at {}: {error}", path.display()))
}

/// A socket for this user alone; the caller has the claim to its path.
fn listening(path: &Path) -> Result<OwnedFd> {
    let address = SocketAddrUnix::new(path).map_err(|error| {
        let text = format!("the path {} is too long for a socket: {error}", path.display());
        Error::new(ErrorKind::Invalid, text)
    })?;
    let _ = std::fs::remove_file(path);
    let failed = |error: rustix::io::Errno| unavailable(path, &error);
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(failed)?;
    bind(&socket, &address).map_err(failed)?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(path, mode).map_err(|error| unavailable(path, &error))?;
    // Until now nobody could connect, whatever the mode was.
    listen(&socket, 128).map_err(failed)?;
    Ok(socket)
}
