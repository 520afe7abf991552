//! A device whose driver is another process, with its doors: the work of `sawmill run`.
//!
//! Invariants: doors open when the first driver has declared the device, and close before the
//! driver learns that no more requests will come. A driver that this process started and that died
//! is restarted, with growing waits, as long as the device exists. Not here: the protocol of hosts
//! and drivers (`sawmill-driver`).

pub(crate) mod child;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use sawmill_device::{BlockDevice, Error, ErrorKind};
use sawmill_doors::{DoorPlan, DoorVolume, Doors, NbdShare};
use sawmill_driver::Mode;
use sawmill_driver::host::{Event, Host};
use sawmill_driver::protocol::ControlFacts;
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use self::child::{BACK_OFF_MIN, Drivers};
use crate::daemon::{self, DoorDocument};
use crate::folders::make_folder;
use crate::program::mount_holder;
use sawmill_console::exit::{Exit, Failure, Result};

/// The driver socket in a device's folder.
pub(crate) const SOCKET: &str = "driver.sock";

/// Time for a driver to exit after it left the device uncleanly.
const LEAVE_TIME_MAX: Duration = Duration::from_secs(5);

/// A device to run: its options, its doors, and how its drivers start.
pub(crate) struct RunPlan {
    /// The device's name.
    pub(crate) name: String,
    /// Its state folder, which has the driver socket and the default door.
    pub(crate) folder: PathBuf,
    /// Options that override what drivers declare.
    pub(crate) overrides: ControlFacts,
    pub(crate) doors: Vec<DoorPlan>,
    pub(crate) nbd: NbdShare,
    /// The command that starts a driver; empty: drivers start on their own.
    pub(crate) command: Vec<OsString>,
    /// Secret variables of the environment that the driver gets anyway.
    pub(crate) passed: Vec<OsString>,
    /// Restart the driver when it dies.
    pub(crate) restarts: bool,
    /// Puts layers around the device before doors use it.
    pub(crate) wrapper: DeviceWrapper,
}

/// See [`RunPlan::wrapper`].
pub(crate) type DeviceWrapper =
    Box<dyn FnOnce(Arc<dyn BlockDevice>) -> Result<Arc<dyn BlockDevice>>>;

/// Events of a device, one object per line with `--json`.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum DeviceEvent<'a> {
    Listening {
        name: &'a str,
        socket: String,
    },
    Ready {
        name: &'a str,
        size_bytes: u64,
        doors: Vec<DoorDocument>,
    },
    Driver {
        state: &'static str,
        generation: u64,
        pid: u32,
        #[serde(skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    Ended {
        outcome: &'static str,
        message: String,
    },
}

/// What the main thread receives.
enum MainEvent {
    Host(Event),
    Signal(i32),
    /// A driver that this process started has ended.
    Child(u32, ExitStatus, Duration),
    /// A driver died, and the device needs one.
    StartAgain,
    /// A driver that was replaced has ended: its successor may have died before.
    StartIfAlone,
    /// A driver left some time ago.
    Lingers(u32),
    Ended(sawmill_device::Result<()>),
}

/// A device from its first driver to its end.
struct Driving<'a> {
    plan: RunPlan,
    host: Arc<Host>,
    drivers: Arc<Drivers>,
    doors: Arc<Doors>,
    sender: SyncSender<MainEvent>,
    on_event: &'a mut dyn FnMut(&DeviceEvent<'_>) -> Result<()>,
    /// Processes that served.
    attached: BTreeSet<u32>,
    /// Those of them that are still attached according to the host.
    serving: BTreeSet<u32>,
    /// Those that left uncleanly and may still run.
    lingering: BTreeSet<u32>,
    /// Those that ended before the host noticed. Bounded by the drivers that this process started.
    ended: BTreeMap<u32, (ExitStatus, Duration)>,
    /// Those that finished all their work: their exit is not a failure.
    seen_off: BTreeSet<u32>,
    is_ending: bool,
    /// A [`MainEvent::StartAgain`] is on its way.
    is_start_due: bool,
    /// The result to report instead of the host's.
    failure: Option<Failure>,
}

/// Runs a device until its end.
pub(crate) fn drive(
    plan: RunPlan,
    on_event: &mut dyn FnMut(&DeviceEvent<'_>) -> Result<()>,
) -> Result<Exit> {
    make_folder(&plan.folder)?;
    let (sender, receiver) = sync_channel(crate::daemon::EVENTS_MAX);
    let to_main = sender.clone();
    // After the end there is no listener any more.
    let listener = Box::new(move |event| drop(to_main.send(MainEvent::Host(event))));
    // A user who sees the socket must be able to request a clean end.
    let to_main_loop = sender.clone();
    daemon::on_signals(&[SIGTERM, SIGINT, SIGHUP], move |signal| {
        to_main_loop.send(MainEvent::Signal(signal)).is_ok()
    })?;
    let host =
        Host::start(&plan.name, &plan.folder.join(SOCKET), plan.overrides.clone(), listener)?;
    let drivers = Arc::new(Drivers::new(plan.command.clone(), plan.passed.clone()));
    let mut driving = Driving {
        doors: Arc::new(Doors::new(plan.nbd.clone(), Some(mount_holder))),
        plan,
        host,
        drivers,
        sender,
        on_event,
        attached: BTreeSet::new(),
        serving: BTreeSet::new(),
        lingering: BTreeSet::new(),
        ended: BTreeMap::new(),
        seen_off: BTreeSet::new(),
        is_ending: false,
        is_start_due: false,
        failure: None,
    };
    let ended = driving.start().and_then(|()| driving.handle_events(&receiver));
    driving.host.close();
    let is_well = ended.is_ok();
    if !is_well {
        // Before the doors stop: they wait for requests that no driver may ever answer.
        driving.host.fail(&Error::new(ErrorKind::Closed, "the host is ending"));
        driving.doors.stop();
        driving.drivers.kill_all();
    }
    // The driver exits by itself when its connection ends; no process is left behind.
    driving.wait_for_children();
    driving.host.wait_for_askers();
    ended
}

impl Driving<'_> {
    fn start(&mut self) -> Result<()> {
        let socket = self.host.path().display().to_string();
        (self.on_event)(&DeviceEvent::Listening { name: &self.plan.name, socket })?;
        if self.plan.command.is_empty() {
            return Ok(());
        }
        self.start_driver()
    }

    fn start_driver(&self) -> Result<()> {
        let (sender, drivers) = (self.sender.clone(), Arc::clone(&self.drivers));
        let since = std::time::Instant::now();
        drivers
            .start(self.host.path(), move |pid, status| {
                let _ = sender.send(MainEvent::Child(pid, status, since.elapsed()));
            })
            .map(drop)
    }

    fn handle_events(&mut self, receiver: &Receiver<MainEvent>) -> Result<Exit> {
        for main_event in receiver {
            match main_event {
                MainEvent::Host(event) => self.handle_host_event(event)?,
                MainEvent::Signal(SIGHUP) => self.replace(),
                MainEvent::Signal(_) if self.is_ending => {
                    self.host.fail(&Error::new(
                        ErrorKind::Closed,
                        "stopped immediately by a second signal",
                    ));
                }
                MainEvent::Signal(_) => self.end(None),
                MainEvent::Child(pid, status, lived) => self.child_ended(pid, status, lived)?,
                MainEvent::StartAgain => self.start_again()?,
                MainEvent::StartIfAlone => self.start_if_alone()?,
                MainEvent::Lingers(pid) => self.kill_lingering(pid),
                MainEvent::Ended(outcome) => return self.over(outcome),
            }
        }
        Ok(Exit::Ok)
    }

    fn handle_host_event(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Declared => return self.open_doors(),
            Event::Attached { generation, pid } => {
                self.attached.insert(pid);
                self.serving.insert(pid);
                (self.on_event)(&DeviceEvent::Driver {
                    state: "attached",
                    generation,
                    pid,
                    why: None,
                })?;
            }
            Event::Gone { generation, pid, in_order, why } => {
                let why = (!in_order).then_some(why);
                if let Some(why) = &why {
                    tracing::warn!(pid, "the driver is gone: {why}");
                }
                (self.on_event)(&DeviceEvent::Driver { state: "gone", generation, pid, why })?;
                if in_order {
                    self.attached.remove(&pid);
                    self.seen_off.insert(pid);
                }
                self.serving.remove(&pid);
                // The process ended before the host noticed, and its end waits for this event.
                if let Some((status, lived)) = self.ended.remove(&pid) {
                    return self.child_ended(pid, status, lived);
                }
                if !in_order && self.drivers.has(pid) {
                    self.lingering.insert(pid);
                    return self.send_after(
                        "driver-linger",
                        LEAVE_TIME_MAX,
                        MainEvent::Lingers(pid),
                    );
                }
            }
            Event::Hung { pid } => self.drivers.kill(pid),
            Event::EndAsked(why) => self.end(why),
            Event::ReplaceAsked => self.replace(),
            // Only where the driver is this process.
            Event::HandOverAsked(_) => {}
        }
        Ok(())
    }

    fn open_doors(&mut self) -> Result<()> {
        let Some(device) = self.host.device() else { return Ok(()) };
        let around = std::mem::replace(&mut self.plan.wrapper, Box::new(Ok));
        let device = around(device)?;
        let size_bytes = device.geometry().size_bytes;
        let volume = DoorVolume {
            name: self.plan.name.clone(),
            description: "a device with a driver".into(),
            device,
            folder: self.plan.folder.clone(),
            identity: format!("drivers/{}", self.plan.name),
            // Chunks are in the memory of this process.
            outlives_server: self.host.options().is_some_and(|options| options.mode == Mode::Plain),
            queues: None,
        };
        sawmill_doors::require_older_writes_first(&self.plan.doors, &volume)?;
        self.doors.open_all(&self.plan.doors, &[volume])?;
        let addresses = self.doors.addresses(&self.plan.name);
        let add_door = |facts: ControlFacts, (kind, address): &(&str, String)| {
            facts.with("door", format!("{kind} {address}"))
        };
        self.host.show_doors(addresses.iter().fold(ControlFacts::default(), add_door));
        let doors =
            addresses.into_iter().map(|(kind, address)| DoorDocument { kind, address }).collect();
        (self.on_event)(&DeviceEvent::Ready { name: &self.plan.name, size_bytes, doors })
    }

    /// Starts the end: a clean one, or an immediate one with a reason.
    fn end(&mut self, why: Option<String>) {
        if let Some(why) = &why {
            self.host.fail(&Error::new(ErrorKind::Unavailable, why.clone()));
        }
        if std::mem::replace(&mut self.is_ending, true) {
            return;
        }
        let (host, doors, sender) =
            (Arc::clone(&self.host), Arc::clone(&self.doors), self.sender.clone());
        // On a thread of its own: the main thread must get a second signal while requests finish.
        let finish = move || {
            // Requests in flight are answered: by the driver, or with an error when it is gone.
            doors.stop();
            if why.is_none() {
                // The result includes the outcome of the last flush.
                let _ = host.finish();
            }
            let _ = sender.send(MainEvent::Ended(host.wait_for_end()));
        };
        if std::thread::Builder::new().name("driver-end".into()).spawn(finish).is_err() {
            self.host.fail(&Error::new(
                ErrorKind::Unavailable,
                "cannot start a thread for a clean shutdown",
            ));
            let _ = self.sender.send(MainEvent::Ended(self.host.wait_for_end()));
        }
    }

    fn replace(&mut self) {
        if self.plan.command.is_empty() {
            tracing::warn!(
                "this command started no driver: start a new driver with replace=1 yourself"
            );
            return;
        }
        // First, because the new driver may connect before its start returns.
        self.host.expect_replacement();
        if let Err(failure) = self.start_driver() {
            self.host.cancel_replacement();
            tracing::warn!("cannot start a new driver, so the old one stays: {failure}");
        }
    }

    fn child_ended(&mut self, pid: u32, status: ExitStatus, lived: Duration) -> Result<()> {
        self.lingering.remove(&pid);
        if self.serving.contains(&pid) || self.host.driver() == Some(pid) {
            // A `Gone` event from the host follows and shows whether this was clean.
            self.ended.insert(pid, (status, lived));
            return Ok(());
        }
        let has_served = self.attached.remove(&pid);
        if self.seen_off.remove(&pid) {
            // Its successor may have died while this one finished: its end was no reason then to
            // start another. Or one from elsewhere is coming: nothing is said before it is known.
            let is_needed = self.plan.restarts && !self.is_ending && self.is_alone();
            return match is_needed {
                true => self.send_after("driver-restart", BACK_OFF_MIN, MainEvent::StartIfAlone),
                false => Ok(()),
            };
        }
        // A driver that served and left before the work was done is needed again, whatever its exit
        // status is.
        if self.host.has_ended() || (self.is_ending && status.success() && !has_served) {
            return Ok(());
        }
        if self.host.driver().is_some() {
            // If there are two drivers, the one that serves is still there.
            if !has_served {
                self.host.cancel_replacement();
                tracing::warn!(
                    pid,
                    "the new driver exited before it connected ({status}); the old one stays"
                );
            }
            return Ok(());
        }
        if self.host.device().is_none() {
            let text = format!("the driver exited ({status}) before it declared the device");
            let failure = Failure::new(Exit::Unavailable, text.clone());
            self.failure = Some(failure);
            self.end(Some(text));
            return Ok(());
        }
        if !self.plan.restarts {
            self.end(Some(format!("the driver exited ({status}) and is not restarted")));
            return Ok(());
        }
        let wait = self.drivers.next_wait(lived);
        tracing::info!(
            pid,
            "the driver exited ({status}); restarting it in {} ms",
            wait.as_millis()
        );
        self.is_start_due = true;
        self.send_after("driver-restart", wait, MainEvent::StartAgain)
    }

    /// A driver that died is replaced, unless another has come during the wait, or none is needed.
    fn start_again(&mut self) -> Result<()> {
        self.is_start_due = false;
        // The end of one that lingers starts the next: until then it may still write.
        let is_late = self.host.has_ended() || self.host.driver().is_some();
        if is_late || !self.lingering.is_empty() { Ok(()) } else { self.start_driver() }
    }

    /// The successor of a driver that was replaced may have died before it.
    fn start_if_alone(&mut self) -> Result<()> {
        if self.is_start_due || !self.is_alone() {
            return Ok(());
        }
        tracing::info!("the device has no driver: starting one");
        self.start_driver()
    }

    /// Whether the device exists, has no driver, and none that this process started may come: one
    /// that was replaced does not, even if it goes on without the device.
    fn is_alone(&self) -> bool {
        let has_driver = self.host.driver().is_some();
        !self.host.has_ended() && !has_driver && self.drivers.are_all_among(&self.seen_off)
    }

    /// Sends `event` after `wait`, from a thread of its own.
    fn send_after(&self, thread: &str, wait: Duration, event: MainEvent) -> Result<()> {
        let sender = self.sender.clone();
        let later = move || {
            std::thread::sleep(wait);
            let _ = sender.send(event);
        };
        std::thread::Builder::new()
            .name(thread.into())
            .spawn(later)
            .map(drop)
            .map_err(|error| Failure::io("cannot start a thread to watch the driver", &error))
    }

    /// While the old driver runs, no other is started, because it may still write.
    fn kill_lingering(&mut self, pid: u32) {
        if self.lingering.remove(&pid) {
            tracing::warn!(pid, "the driver left the device but did not exit: killing it");
            self.drivers.kill(pid);
        }
    }

    fn over(&mut self, outcome: sawmill_device::Result<()>) -> Result<Exit> {
        let (outcome, message) = match outcome {
            Ok(()) => ("ended", String::new()),
            Err(why) => ("failed", why.to_string()),
        };
        (self.on_event)(&DeviceEvent::Ended { outcome, message: message.clone() })?;
        match self.failure.take() {
            Some(failure) => Err(failure),
            None if outcome == "ended" => Ok(Exit::Ok),
            None => {
                Err(Failure::new(Exit::Unavailable, format!("the device has failed: {message}")))
            }
        }
    }

    /// Waits for drivers that this process started; kills those that do not exit.
    fn wait_for_children(&self) {
        let patience = std::time::Instant::now() + Duration::from_secs(5);
        while !self.drivers.are_gone() {
            if std::time::Instant::now() > patience {
                self.drivers.kill_all();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
