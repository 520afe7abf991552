//! What one clause runs on: a host, a driver process, and a device behind a door.
//!
//! Invariant: whatever happens, [`Scene`] leaves no process, mount or device behind when it is
//! dropped.
//!
//! Not here: the clauses (`sawmill_device::conformance`), requests in flight while a driver dies
//! (`life`).

use std::ffi::OsString;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use sawmill_device::{BlockDevice, BlockDeviceExt, Error, ErrorKind};
use sawmill_doors::{DoorPlan, DoorVolume, Doors};
use sawmill_driver::DeviceOptions;
use sawmill_driver::host::{Event, Host};
use sawmill_driver::protocol::ControlFacts;

use super::{DeviceKind, TestDoor};
use crate::driving::child::Drivers;
use sawmill_console::exit::{Exit, Failure, Result};

/// Time for a driver to answer a command, unless the user sets another limit.
const ANSWER_TIME_S_MAX: u32 = 20;
/// Bytes that are zeroed at the start and at the end of the device: where the clauses look.
const ZEROED_BYTES: (u64, u64) = (17 << 20, 1 << 20);

/// What is judged and through which door: the same for all clauses of a command.
pub(super) struct TestPlan {
    pub(super) through: TestDoor,
    pub(super) kind: DeviceKind,
    overrides: ControlFacts,
    command: Vec<OsString>,
    /// Time for a driver to connect and to disconnect. Its process must exit within a third of this
    /// after the last request.
    within: Duration,
    /// Set when the command must end.
    pub(super) interrupted: Arc<AtomicBool>,
}

enum StageEvent {
    Host(Event),
    Ended(u32, ExitStatus),
}

/// A host, a driver and an open door, for one clause.
pub(super) struct Scene {
    pub(super) kind: DeviceKind,
    pub(super) within: Duration,
    interrupted: Arc<AtomicBool>,
    host: Arc<Host>,
    drivers: Drivers,
    doors: Arc<Doors>,
    /// The device as the users of the door see it.
    device: Option<Arc<dyn BlockDevice>>,
    sender: SyncSender<StageEvent>,
    receiver: Receiver<StageEvent>,
    /// The process of the current driver.
    pid: u32,
    /// Drivers that ended, until something asks for their exit status.
    ended: Vec<(u32, ExitStatus)>,
    // The last field: the folder is removed after everything in it is closed.
    folder: tempfile::TempDir,
}

impl TestPlan {
    pub(super) fn new(
        through: TestDoor,
        kind: DeviceKind,
        options: &[(String, String)],
        command: &[OsString],
        within: Duration,
    ) -> Self {
        let mut overrides = options
            .iter()
            .fold(ControlFacts::default(), |facts, (name, value)| facts.with(name, value));
        if overrides.get("request_timeout_s").is_none() {
            overrides.add("request_timeout_s", ANSWER_TIME_S_MAX);
        }
        TestPlan {
            through,
            kind,
            overrides,
            command: command.to_vec(),
            within,
            interrupted: Arc::default(),
        }
    }
}

/// The driver does not do what a driver must.
pub(super) fn wrong(text: impl Into<String>) -> Failure {
    Failure::new(Exit::Unavailable, text)
}

impl Scene {
    /// Starts a driver and opens the door.
    pub(super) fn open(plan: &TestPlan) -> Result<Scene> {
        let folder = tempfile::Builder::new()
            .prefix("sawmill-conform-")
            .tempdir()
            .map_err(|error| Failure::io("cannot make a folder for the sockets", &error))?;
        let (sender, receiver) = sync_channel(crate::daemon::EVENTS_MAX);
        let to_stage = sender.clone();
        let listener = Box::new(move |event| drop(to_stage.send(StageEvent::Host(event))));
        // The process id is part of the name: several of these commands may run at the same time.
        let name = format!("conform-{}", std::process::id());
        let host = Host::start(
            &name,
            &folder.path().join("driver.sock"),
            plan.overrides.clone(),
            listener,
        )?;
        let mut scene = Scene {
            kind: plan.kind,
            within: plan.within,
            interrupted: Arc::clone(&plan.interrupted),
            host,
            drivers: Drivers::new(plan.command.clone(), Vec::new()),
            doors: Arc::default(),
            device: None,
            sender,
            receiver,
            pid: 0,
            ended: Vec::new(),
            folder,
        };
        scene.start_driver()?;
        scene.attached()?;
        scene.device = Some(scene.open_door(plan.through)?);
        Ok(scene)
    }

    /// The device, through its door.
    pub(super) fn device(&self) -> Arc<dyn BlockDevice> {
        match &self.device {
            Some(device) => Arc::clone(device),
            // Only while the scene is built or closed; a device of no bytes refuses everything.
            None => Arc::new(sawmill_device::NullDevice::new(0)),
        }
    }

    pub(super) fn options(&self) -> DeviceOptions {
        self.host.options().cloned().unwrap_or_default()
    }

    fn start_driver(&self) -> Result<u32> {
        let sender = self.sender.clone();
        self.drivers.start(self.host.path(), move |pid, status| {
            drop(sender.send(StageEvent::Ended(pid, status)))
        })
    }

    /// The next event, if it happens before `deadline`.
    fn next(&mut self, deadline: Instant) -> Option<Event> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.receiver.recv_timeout(left) {
                Ok(StageEvent::Host(event)) => return Some(event),
                Ok(StageEvent::Ended(pid, status)) => self.ended.push((pid, status)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Waits until a driver has connected.
    fn attached(&mut self) -> Result<()> {
        let deadline = Instant::now() + self.within;
        loop {
            // Short waits, so that the end of the process is noticed too.
            match self.next((Instant::now() + super::LOOK_EVERY).min(deadline)) {
                Some(Event::Attached { pid, generation }) => {
                    self.pid = pid;
                    if generation > 1 {
                        return Ok(());
                    }
                }
                Some(Event::Declared) => return Ok(()),
                Some(_) => {}
                None => {}
            }
            if let Some((_, status)) = self.ended.pop() {
                return Err(wrong(format!("the driver ended before it connected ({status})")));
            }
            if Instant::now() > deadline {
                let within = self.within.as_secs();
                return Err(wrong(format!("no driver connected within {within} s")));
            }
        }
    }

    fn open_door(&self, through: TestDoor) -> Result<Arc<dyn BlockDevice>> {
        let Some(device) = self.host.device() else {
            return Err(Failure::new(Exit::Internal, "a driver connected, but there is no device"));
        };
        let Some(trial) = through.0 else { return Ok(device) };
        let plan = DoorPlan::parse(&(trial.line)(self.folder.path()))?;
        let name = self.host.name().to_owned();
        let volume = DoorVolume {
            name: name.clone(),
            description: "a driver under test".into(),
            device: Arc::clone(&device),
            folder: self.folder.path().to_path_buf(),
            identity: format!("drivers/{name}"),
            outlives_server: false,
            queues: None,
        };
        let open = self.doors.open(plan, &[volume])?;
        let (_, address) = open.address_of(&name);
        (trial.connect)(&address, &device.geometry())
    }

    /// Zeroes the device where the clauses look.
    pub(super) fn zero(&self) -> sawmill_device::Result<()> {
        let device = self.device();
        let geometry = device.geometry();
        let (first, last) = ZEROED_BYTES;
        let ranges = [
            (0, first.min(geometry.size_bytes)),
            (geometry.size_bytes.saturating_sub(last), geometry.size_bytes),
        ];
        let step = u64::from(geometry.request_bytes_max.min(1 << 20));
        for (start, end) in ranges {
            let mut address = start;
            while address < end {
                let length = step.min(end - address);
                device.write_at(address, &vec![0; length as usize])?;
                address += length;
            }
        }
        device.flush()
    }

    /// How the current driver ended, or why it must end.
    pub(super) fn driver_died(&mut self) -> Option<String> {
        if self.interrupted.load(Ordering::SeqCst) {
            return Some("interrupted".to_owned());
        }
        while let Ok(event) = self.receiver.try_recv() {
            match event {
                StageEvent::Ended(pid, status) => self.ended.push((pid, status)),
                StageEvent::Host(Event::Gone { in_order: false, why, .. }) => return Some(why),
                StageEvent::Host(Event::Hung { .. }) => {
                    return Some("it did not answer a command within request_timeout_s".to_owned());
                }
                StageEvent::Host(Event::EndAsked(why)) => {
                    return Some(why.unwrap_or_else(|| "it asked to end the device".to_owned()));
                }
                StageEvent::Host(_) => {}
            }
        }
        self.ended.iter().find(|(pid, _)| *pid == self.pid).map(|(_, status)| status.to_string())
    }

    /// Fails all waiting requests.
    pub(super) fn fail(&self, why: &str) {
        self.host.fail(&Error::new(ErrorKind::Closed, why.to_owned()));
    }

    /// Kills the driver and starts another.
    pub(super) fn kill_and_start(&mut self) -> Result<()> {
        let old = self.pid;
        self.drivers.kill(old);
        self.wait_for_exit(old)?;
        self.start_driver()?;
        self.attached()
    }

    /// Starts a driver that replaces the current one, which must then exit by itself.
    pub(super) fn replace(&mut self) -> Result<()> {
        let old = self.pid;
        self.host.expect_replacement();
        self.start_driver()?;
        self.replaced(old)
    }

    fn replaced(&mut self, old: u32) -> Result<()> {
        let deadline = Instant::now() + self.within;
        while self.pid == old {
            match self.next((Instant::now() + super::LOOK_EVERY).min(deadline)) {
                Some(Event::Attached { pid, .. }) => self.pid = pid,
                Some(Event::Gone { in_order: false, pid, why, .. }) if pid == old => {
                    return Err(wrong(format!(
                        "the driver that was replaced did not disconnect cleanly: {why}"
                    )));
                }
                _ if Instant::now() > deadline => {
                    let within = self.within.as_secs();
                    return Err(wrong(format!(
                        "the driver that was replaced was still connected after {within} s"
                    )));
                }
                _ => {}
            }
        }
        let status = self.wait_for_exit(old)?;
        match status.success() {
            true => Ok(()),
            false => Err(wrong(format!("the driver that was replaced ended with {status}"))),
        }
    }

    /// Waits for the end of a process.
    fn wait_for_exit(&mut self, pid: u32) -> Result<ExitStatus> {
        let within = self.within / 3;
        let deadline = Instant::now() + within;
        loop {
            if let Some(at) = self.ended.iter().position(|(ended, _)| *ended == pid) {
                return Ok(self.ended.swap_remove(at).1);
            }
            if Instant::now() > deadline {
                return Err(wrong(format!(
                    "the driver's process was still running after {} s",
                    within.as_secs()
                )));
            }
            self.next((Instant::now() + super::LOOK_EVERY).min(deadline));
        }
    }

    /// Ends the device cleanly: the door closes, the driver gets END, and its process exits with 0.
    pub(super) fn end(&mut self) -> Result<()> {
        self.device = None;
        self.doors.stop();
        let (host, (sender, receiver)) = (Arc::clone(&self.host), sync_channel(1));
        // On a thread: a driver that never answers its last flush breaks the clause and hangs
        // nothing.
        let finish = move || drop(sender.send(host.finish()));
        std::thread::Builder::new()
            .name("driver-end".into())
            .spawn(finish)
            .map_err(|error| Failure::io("cannot start a thread for the end", &error))?;
        match receiver.recv_timeout(self.within) {
            Ok(flushed) => flushed.map_err(|error| {
                Failure::caused(Exit::Unavailable, "the flush at the end failed", error)
            })?,
            Err(_) => {
                self.fail("the end took too long");
                return Err(wrong(format!(
                    "not all requests were answered {} s after the end was requested",
                    self.within.as_secs()
                )));
            }
        }
        let status = self.wait_for_exit(self.pid)?;
        match status.success() {
            true => Ok(()),
            false => Err(wrong(format!("the driver ended with {status} after END"))),
        }
    }

    /// Ends what is left, cleanly if possible. Returns an error if it was not.
    pub(super) fn close(mut self) -> Result<()> {
        if self.host.has_ended() {
            return Ok(());
        }
        self.end()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // Before the doors stop, which wait for requests that nobody may answer any more.
        self.fail("the test is over");
        self.device = None;
        self.doors.stop();
        self.host.close();
        self.drivers.kill_all();
        while !self.drivers.are_gone() {
            // Killed processes end; wait until the threads that watch them notice.
            let _ = self.receiver.recv_timeout(super::LOOK_EVERY);
        }
    }
}
