//! A device whose driver is another process. Drivers connect, leave, die and are replaced; the
//! device stays.
//!
//! | state | event | then |
//! |---|---|---|
//! | declared: no driver has described the device | the first driver sends HELLO | running |
//! | running | its driver died, or was replaced | waiting |
//! | waiting | a driver connects | running |
//! | waiting | requests waited for `death_timeout_s` | waiting, and requests fail |
//! | running, waiting | the driver leaves, or [`Host::finish`] | ending, then ended |
//! | any | [`Host::fail`]; a driver that was not recoverable died | ended |
//!
//! Invariants: the device has at most one driver. A driver keeps the device until all of its
//! threads here have ended, and then the next one gets what it did not answer, so every request is
//! answered once and by one of them.
//!
//! Files: `greeting` (silent connections), `attach` (a driver connects), `attached_driver` (its
//! sockets), `policy` (no driver is there), `question` (questions of commands). Not here: doors,
//! child processes (the program); the bytes (`protocol`).

mod attach;
mod attached_driver;
mod greeting;
mod policy;
mod question;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use sawmill_device::layer::Align;
use sawmill_device::{BlockDevice, BlockDeviceExt, Error, ErrorKind, Result};
use sawmill_sys::FileLock;

pub use self::attach::refused_errno;
use self::attached_driver::AttachedDriver;
use self::greeting::{Greeting, SilentConnection};
use self::policy::Policy;
use crate::options::DeviceOptions;
use crate::protocol::{Control, ControlFacts, ControlKind, PacketSocket};
use crate::request_holder::{CommandLanes, RequestHolder};

/// What happens to a device and its drivers, reported to the creator of the host.
#[derive(Clone, Debug)]
pub enum Event {
    /// The first driver is connected: [`Host::device`] exists, and doors can be opened.
    Declared,
    /// A driver serves.
    Attached {
        /// The number of drivers so far, including this one.
        generation: u64,
        /// The driver's process, for messages.
        pid: u32,
    },
    /// A driver no longer serves.
    Gone {
        /// The number of the driver.
        generation: u64,
        /// The process, which may still run.
        pid: u32,
        /// Whether it answered everything and left.
        in_order: bool,
        /// What was wrong, if it was not in order.
        why: String,
    },
    /// A driver takes too long for a command and counts as gone: the listener should end the
    /// process.
    Hung {
        /// The driver's process, for the listener to end.
        pid: u32,
    },
    /// The device must end: see [`Host::finish`]; with a reason, immediately: see [`Host::fail`].
    EndAsked(Option<String>),
    /// A new driver was requested in place of this one.
    ReplaceAsked,
    /// Only for a driver that is its own host: another one is to serve the device, and talks about
    /// that on this socket.
    HandOverAsked(Arc<UnixStream>),
}

/// Time for a driver that has answered everything to disconnect.
const LEAVE_TIME_MAX: Duration = Duration::from_secs(5);
/// Interval of checks for the end of a device.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Receives events, on any thread; it must not wait for the host.
pub type Listener = Box<dyn Fn(Event) + Send + Sync>;

/// A device, the socket to which its drivers connect, and the driver that it has at present.
pub struct Host {
    name: String,
    path: PathBuf,
    /// Options that override what a driver says.
    host_facts: ControlFacts,
    on_event: Listener,
    socket: OwnedFd,
    claim: Mutex<Option<FileLock>>,
    accepting: Mutex<Option<std::thread::JoinHandle<()>>>,
    device: OnceLock<DeclaredDevice>,
    /// Only one driver connects at a time.
    attaching: Mutex<()>,
    /// The current driver, and how the device ended.
    state: Mutex<DriverState>,
    changed: Condvar,
    generation: AtomicU64,
    doors: OnceLock<ControlFacts>,
    /// Whether the next driver replaces the current one, even if it does not request that.
    replacement_expected: AtomicBool,
    is_closed: AtomicBool,
    greeting: Arc<Greeting>,
}

#[derive(Default)]
struct DriverState {
    driver: Option<Arc<AttachedDriver>>,
    since: Option<Instant>,
    outcome: Option<Result<()>>,
    /// The number of questions being answered.
    open_questions: usize,
}

/// A declared device.
struct DeclaredDevice {
    options: DeviceOptions,
    holder: Arc<dyn RequestHolder>,
    /// The lanes of `holder`; `None` if its driver is this process, which needs none.
    lanes: Option<Arc<dyn CommandLanes>>,
    policy: Arc<Policy>,
    device: Arc<dyn BlockDevice>,
}

impl DeclaredDevice {
    fn new(
        options: DeviceOptions,
        holder: Arc<dyn RequestHolder>,
        lanes: Option<Arc<dyn CommandLanes>>,
    ) -> Result<Self> {
        let policy = Policy::new(Arc::clone(&holder));
        let device: Arc<dyn BlockDevice> = match options.byte_granular {
            true => Arc::clone(&policy) as Arc<dyn BlockDevice>,
            false => Arc::new(Align::new(Arc::clone(&policy), options.batch.blocksize)?),
        };
        Ok(DeclaredDevice { options, holder, lanes, policy, device })
    }
}

impl Host {
    /// Listens for drivers at `path`, for a device with this name. `host_facts` are options that a
    /// driver cannot change.
    ///
    /// # Errors
    /// `InUse` if another host has this path, `Invalid` for invalid options, `Unavailable`.
    pub fn start(
        name: &str,
        path: &Path,
        host_facts: ControlFacts,
        on_event: Listener,
    ) -> Result<Arc<Self>> {
        // Tried now: a wrong option of the host would otherwise be blamed on the first driver that
        // connects.
        let mut trial = DeviceOptions::default();
        for (option, value) in host_facts.iter() {
            trial.set(option, value)?;
        }
        let host = Host::listening(name, path, host_facts, on_event)?;
        host.run()?;
        Ok(host)
    }

    /// A host of a device whose driver is this process: no other connects. It has its name, and
    /// answers nobody before [`run`](Self::run).
    pub(crate) fn own(
        name: &str,
        path: &Path,
        options: DeviceOptions,
        holder: Arc<dyn RequestHolder>,
        on_event: Listener,
    ) -> Result<Arc<Self>> {
        let host = Host::listening(name, path, ControlFacts::default(), on_event)?;
        holder.start()?;
        let declared_device = DeclaredDevice::new(options, holder, None)?;
        host.device.get_or_init(|| declared_device);
        Ok(host)
    }

    /// The device has had so many drivers.
    pub(crate) fn count_from(&self, generation: u64) {
        self.generation.store(generation, Ordering::SeqCst);
    }

    /// Whether the driver is this process.
    fn is_own(&self) -> bool {
        self.device.get().is_some_and(|device| device.lanes.is_none())
    }

    /// After [`close`](Self::close): from now on another host may have the name.
    pub(crate) fn release_name(&self) {
        if let Some(accepting) = self.accepting.lock().take() {
            // It ends when the socket is shut down, and handles nothing itself.
            let _ = accepting.join();
        }
        if let Some(claim) = self.claim.lock().take() {
            claim.give_up();
        }
    }

    /// A host that nobody is connected to yet.
    fn listening(
        name: &str,
        path: &Path,
        host_facts: ControlFacts,
        on_event: Listener,
    ) -> Result<Arc<Self>> {
        let claim = FileLock::of_name(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => {
                let text = format!("a device '{name}' already exists: {}", path.display());
                Error::new(ErrorKind::InUse, text).with_source(error)
            }
            _ => unavailable(path, error),
        })?;
        // After the claim: it removes what lies at the path, which is nobody's now.
        let socket = listening(path)?;
        Ok(Arc::new(Host {
            name: name.to_owned(),
            path: path.to_path_buf(),
            host_facts,
            on_event,
            socket,
            claim: Mutex::new(Some(claim)),
            accepting: Mutex::default(),
            device: OnceLock::new(),
            attaching: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            generation: AtomicU64::new(0),
            doors: OnceLock::new(),
            replacement_expected: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            greeting: Arc::default(),
        }))
    }

    /// Answers questions and drivers from now on.
    pub(crate) fn run(self: &Arc<Self>) -> Result<()> {
        let host = Arc::clone(self);
        let accepting = thread("driver-accept", move || host.accept())?;
        *self.accepting.lock() = Some(accepting);
        let watching = Arc::downgrade(self);
        thread("driver-watch", move || policy::watch(&watching)).map(drop)
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The socket for drivers.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The device, once a driver has declared it.
    #[must_use]
    pub fn device(&self) -> Option<Arc<dyn BlockDevice>> {
        self.device.get().map(|declared_device| Arc::clone(&declared_device.device))
    }

    /// The options in effect, once a driver has declared the device.
    #[must_use]
    pub fn options(&self) -> Option<&DeviceOptions> {
        self.device.get().map(|declared_device| &declared_device.options)
    }

    /// Tells drivers where the device is available: `door=KIND ADDRESS`.
    pub fn show_doors(&self, doors: ControlFacts) {
        let doors = self.doors.get_or_init(|| doors);
        let driver = self.state.lock().driver.clone();
        if let Some(driver) = driver {
            driver.send_doors(doors);
        }
    }

    /// From now on, the next driver replaces the current one.
    pub fn expect_replacement(&self) {
        self.replacement_expected.store(true, Ordering::SeqCst);
    }

    /// No driver will come that was expected to replace the current one.
    pub fn cancel_replacement(&self) {
        self.replacement_expected.store(false, Ordering::SeqCst);
    }

    /// Whether the device has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state.lock().outcome.is_some()
    }

    /// The process of the current driver.
    #[must_use]
    pub fn driver(&self) -> Option<u32> {
        self.state.lock().driver.as_ref().map(|driver| driver.pid)
    }

    /// Ends the device cleanly: everything accepted goes to the driver, is flushed and answered.
    /// Close the doors first. Waits for a driver if there is none; [`fail`](Self::fail) stops that.
    ///
    /// # Errors
    /// The error of the final flush; the device has ended anyway.
    pub fn finish(&self) -> Result<()> {
        let Some(declared_device) = self.device.get() else {
            self.ended(Ok(()));
            return Ok(());
        };
        // Before the end, because an ending device accepts no flush.
        let flushed = declared_device.device.flush();
        declared_device.holder.begin_end();
        self.wait_until_gone(declared_device);
        // After the driver: what came in behind the end must be answered, too (P77).
        declared_device.holder.end_now(&Error::new(ErrorKind::Closed, "the device has ended"));
        self.ended(flushed.clone());
        flushed
    }

    /// Waits until the driver has answered everything and disconnected.
    fn wait_until_gone(&self, device: &DeclaredDevice) {
        let mut done_since = None;
        let mut state = self.state.lock();
        while state.outcome.is_none() {
            let is_drained = device.holder.status().is_drained;
            match state.driver.clone() {
                None if is_drained => return,
                Some(driver) if is_drained => driver.expect_disconnect(&mut done_since),
                _ => done_since = None,
            }
            self.changed.wait_for(&mut state, LOOK_EVERY);
        }
    }

    /// Ends the device now: everything that waits fails.
    pub fn fail(&self, error: &Error) {
        if let Some(declared_device) = self.device.get() {
            declared_device.holder.end_now(error);
        }
        self.ended(Err(error.clone()));
        let driver = self.state.lock().driver.clone();
        if let Some(driver) = driver {
            driver.cut("the device has failed");
        }
    }

    /// Waits until the device has ended.
    ///
    /// # Errors
    /// The reason, if the end was not clean.
    pub fn wait_for_end(&self) -> Result<()> {
        let mut state = self.state.lock();
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            self.changed.wait(&mut state);
        }
    }

    /// After the end of the device, waits a short time until open questions have their answers.
    pub fn wait_for_askers(&self) {
        let until = Instant::now() + LEAVE_TIME_MAX;
        let mut state = self.state.lock();
        while state.open_questions > 0 && !self.changed.wait_until(&mut state, until).timed_out() {}
    }

    /// Accepts no more connections and removes the socket.
    pub fn close(&self) {
        if !self.is_closed.swap(true, Ordering::SeqCst) {
            // No other process can have this path: we hold the claim.
            let _ = std::fs::remove_file(&self.path);
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }

    fn ended(&self, outcome: Result<()>) {
        self.state.lock().outcome.get_or_insert(outcome);
        self.changed.notify_all();
    }

    fn accept(self: &Arc<Self>) {
        while !self.is_closed.load(Ordering::SeqCst) {
            let accepted = accept_with(&self.socket, SocketFlags::CLOEXEC);
            if self.is_closed.load(Ordering::SeqCst) {
                return;
            }
            let Ok(socket) = accepted else {
                // Most likely out of descriptors: others will release some.
                std::thread::sleep(Duration::from_millis(20));
                continue;
            };
            // Here and not on its thread, so that they are in the order of arrival.
            let Ok(silent) = self.greeting.wait_for(&socket) else { continue };
            let host = Arc::clone(self);
            // Without a thread there is no answer, and the peer sees the connection end.
            let _ = thread("driver", move || host.meet(socket, silent));
        }
    }

    /// Handles a connection: a driver, or a question.
    fn meet(self: &Arc<Self>, socket: OwnedFd, silent_connection: SilentConnection) {
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
        // For the first packet only: an attached driver may be silent for as long as there is
        // nothing to do (P193).
        let bounded = wait_at_most(Some(greeting::FIRST_PACKET_TIME_MAX));
        let first = attach::first_packet(&control);
        if !silent_connection.has_spoken() || bounded.is_err() || wait_at_most(None).is_err() {
            return;
        }
        match first {
            Ok(Some((packet, _))) if packet.kind == ControlKind::Hello => {
                self.attach(control, &packet.facts, pid)
            }
            Ok(Some((packet, files))) if packet.kind == ControlKind::Ask => {
                self.answer(&control, &packet.facts, files)
            }
            Ok(Some((packet, _))) => refuse(
                &control,
                71,
                &format!("a connection must start with HELLO, not {:?}", packet.kind),
            ),
            Ok(None) => {}
            Err(error) => refuse(&control, 71, &error.to_string()),
        }
    }
}

fn refuse(control: &PacketSocket, errno: i32, message: &str) {
    let facts = ControlFacts::default().with("errno", errno).with("message", message);
    // If the other side does not listen, it needs no answer.
    let _ = control.send(&Control::new(ControlKind::Refused, facts).encode(), &[]);
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(|error| {
        Error::caused(ErrorKind::Unavailable, "cannot start a thread for a driver", error)
    })
}

fn unavailable(path: &Path, error: impl Into<std::io::Error>) -> Error {
    let what = format!("cannot listen for drivers at {}", path.display());
    Error::caused(ErrorKind::Unavailable, what, error.into())
}

/// A socket for this user only; the caller has the claim to its path.
fn listening(path: &Path) -> Result<OwnedFd> {
    let address = SocketAddrUnix::new(path).map_err(|error| {
        let what = format!("the path {} is too long for a socket", path.display());
        Error::caused(ErrorKind::Invalid, what, error)
    })?;
    let _ = std::fs::remove_file(path);
    let failed = |error: rustix::io::Errno| unavailable(path, error);
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
    bind(&socket, &address).map_err(failed)?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(path, mode).map_err(|error| unavailable(path, error))?;
    // Until this call, no process could connect, whatever the mode was.
    listen(&socket, 128).map_err(failed)?;
    Ok(socket)
}
