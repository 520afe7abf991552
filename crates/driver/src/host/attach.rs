//! A driver connects, serves, and leaves.
//!
//! Invariants: requests of a driver that is gone are recovered (`recover`) before another one gets
//! anything. A refused driver changes nothing. Not here: the traffic on its sockets
//! (`attached_driver`).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use sawmill_device::{Error, ErrorKind, Result};

use super::attached_driver::{self, AttachedDriver, Threads};
use super::{DeclaredDevice, Event, Host, LOOK_EVERY, refuse};
use crate::batch::Batch;
use crate::options::{DeathPolicy, DeviceOptions, Mode};
use crate::plain::Plain;
use crate::protocol::{
    Control, ControlFacts, ControlKind, PACKET_BYTES_MAX, PROTOCOL, PacketSocket,
};
use crate::request_holder::{CommandLanes, RequestHolder, State};

/// The first packet of a connection, with its open files; `None` if it ends without one.
pub(super) fn first_packet(control: &PacketSocket) -> Result<Option<(Control, Vec<OwnedFd>)>> {
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    match control.receive(&mut buffer)? {
        Some(packet) => Ok(Some((Control::decode(packet.bytes)?, packet.descriptors))),
        None => Ok(None),
    }
}

impl Host {
    /// A driver has sent HELLO: serves until it is gone.
    pub(super) fn attach(self: &Arc<Self>, control: PacketSocket, hello: &ControlFacts, pid: u32) {
        if self.is_own() {
            let text = format!(
                "the driver of this device is its own host, process {}: no other can connect; one \
                 with host=none and replace=1 takes its place",
                std::process::id()
            );
            return refuse(&control, refused_errno(ErrorKind::InUse), &text);
        }
        // Held until the driver has its commands: of two that connect at once, the second waits and
        // is judged by what the first has changed.
        let attaching = self.attaching.lock();
        // It may have waited here for long. One that is gone must not displace a driver that
        // serves, declare the device, or use up the replacement that is expected.
        if control.has_hung_up() {
            tracing::debug!(pid, "a driver went before its turn");
            return;
        }
        let (driver, threads) = match self.welcome(&control, hello, pid) {
            Ok(theirs) => match self.serve(control, theirs, pid) {
                Ok(started) => started,
                // The device has ended, or no threads are available: it was refused, and the next
                // one finds what there is.
                Err(error) => {
                    self.stay_alone(&error);
                    return self.report_gone(0, pid, false, error.to_string());
                }
            },
            Err(error) => {
                self.stay_alone(&error);
                return refuse(&control, refused_errno(error.kind()), &error.to_string());
            }
        };
        (self.on_event)(Event::Attached { generation: driver.generation, pid });
        if driver.generation == 1 {
            (self.on_event)(Event::Declared);
        }
        drop(attaching);
        self.listen_to(&driver);
        self.wait_until_left(&driver, threads);
    }

    /// Checks whether the driver may connect, lets the current one finish, and sends the new one
    /// all it needs.
    fn welcome(
        &self,
        control: &PacketSocket,
        hello: &ControlFacts,
        pid: u32,
    ) -> Result<Vec<PacketSocket>> {
        let protocol: u32 = hello.parsed("protocol")?;
        if protocol != PROTOCOL {
            let text = format!("protocol={protocol}: this host speaks {PROTOCOL}");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let declared_device = self.declare(hello)?;
        let Some(command_lanes) = &declared_device.lanes else {
            return Err(Error::new(ErrorKind::Internal, "no lanes"));
        };
        self.finish_predecessor(declared_device, hello)?;
        if declared_device.holder.status().state == State::Ended {
            return Err(Error::new(ErrorKind::Closed, "the device has ended"));
        }
        // Before the driver gets the memory: a former driver may still write to the old one, so
        // there may be new memory now.
        declared_device.holder.recover()?;
        let generation = self.generation.load(Ordering::SeqCst) + 1;
        let mut facts = ControlFacts::default()
            .with("protocol", PROTOCOL)
            .with("name", &self.name)
            .with("generation", generation)
            .with("again", u8::from(!declared_device.holder.status().is_drained));
        for (name, value) in declared_device.options.facts().iter() {
            facts.add(name, value);
        }
        control.send(&Control::new(ControlKind::Welcome, facts).encode(), &[])?;
        let lanes =
            declared_device.options.batch.hw_queues as usize * command_lanes.lanes_per_queue();
        let (ours, theirs) = attached_driver::lanes(lanes)?;
        attached_driver::hand_queues(control, &theirs, &**command_lanes)?;
        tracing::debug!(pid, generation, "a driver is welcome");
        Ok(ours)
    }

    /// Returns the device as it exists, or as this first driver declares it.
    fn declare(&self, hello: &ControlFacts) -> Result<&DeclaredDevice> {
        if let Some(declared_device) = self.device.get() {
            declared_device.options.agrees(hello, &self.host_facts)?;
            return Ok(declared_device);
        }
        let options = DeviceOptions::declared(hello, &self.host_facts)?;
        let (holder, lanes): (Arc<dyn RequestHolder>, Arc<dyn CommandLanes>) = match options.mode {
            Mode::Plain => {
                let plain = Plain::new(options.clone())?;
                (Arc::clone(&plain) as _, plain)
            }
            Mode::Batch => {
                let batch = Batch::new(options.batch.clone())?;
                (Arc::clone(&batch) as _, batch)
            }
        };
        let declared_device = DeclaredDevice::new(options, holder, Some(lanes))?;
        Ok(self.device.get_or_init(|| declared_device))
    }

    fn finish_predecessor(
        &self,
        declared_device: &DeclaredDevice,
        hello: &ControlFacts,
    ) -> Result<()> {
        let Some(last) = self.state.lock().driver.clone() else { return Ok(()) };
        let is_expected = self.replacement_expected.swap(false, Ordering::SeqCst);
        // A driver that died a moment ago does not count: its requests are being recovered.
        if !last.has_hung_up() {
            if !hello.is_true("replace") && !is_expected {
                let text = format!(
                    "the device has a driver already, process {}; to replace it, set replace=1",
                    last.pid
                );
                return Err(Error::new(ErrorKind::InUse, text));
            }
            last.is_finishing.store(true, Ordering::SeqCst);
            last.send(ControlKind::Finish, ControlFacts::default().with("reason", "replaced"));
            declared_device.holder.pause();
        }
        let mut done_since = None;
        let mut state = self.state.lock();
        while state.driver.as_ref().is_some_and(|driver| Arc::ptr_eq(driver, &last)) {
            if declared_device.holder.status().oldest_fetched_at.is_none() {
                last.expect_disconnect(&mut done_since);
            } else {
                done_since = None;
            }
            self.changed.wait_for(&mut state, LOOK_EVERY);
        }
        Ok(())
    }

    /// The driver gets commands from here on, or REFUSED. ATTACHED is sent when nothing can fail
    /// any more.
    fn serve(
        &self,
        control: PacketSocket,
        lanes: Vec<PacketSocket>,
        pid: u32,
    ) -> Result<(Arc<AttachedDriver>, Threads)> {
        let declared_device = self.device.get();
        let Some((declared_device, command_lanes)) =
            declared_device.and_then(|device| Some((device, device.lanes.as_ref()?)))
        else {
            return Err(Error::new(ErrorKind::Internal, "no device"));
        };
        // A driver that is refused is not counted, because the first one declares the device.
        let generation = self.generation.load(Ordering::SeqCst) + 1;
        let driver = AttachedDriver::new(generation, pid, control, lanes);
        let refuse = |error: &Error| driver.refuse(refused_errno(error.kind()), &error.to_string());
        let threads = driver.start(command_lanes).inspect_err(refuse)?;
        {
            let mut state = self.state.lock();
            state.driver = Some(Arc::clone(&driver));
            state.since = None;
        }
        declared_device.policy.accept();
        // The device accepts requests before the driver is notified, and commands follow that.
        if let Err(error) = declared_device.holder.start() {
            driver.begin(false);
            threads.join();
            refuse(&error);
            self.forget(&driver);
            return Err(error);
        }
        self.generation.store(generation, Ordering::SeqCst);
        driver.send(ControlKind::Attached, ControlFacts::default());
        if let Some(doors) = self.doors.get() {
            driver.send_doors(doors);
        }
        driver.begin(true);
        Ok((driver, threads))
    }

    /// Handles the driver's messages until it is gone.
    fn listen_to(&self, driver: &AttachedDriver) {
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        loop {
            match driver.receive_message(&mut buffer) {
                Ok(Some(packet)) if packet.kind == ControlKind::Leave => {
                    let failed = packet.facts.get("outcome") == Some("failed");
                    let why = packet.facts.get("message");
                    let why = why.unwrap_or("its driver reported a failure").to_owned();
                    (self.on_event)(Event::EndAsked(failed.then_some(why)));
                }
                Ok(Some(packet)) => {
                    return driver
                        .cut(&format!("it broke the protocol: {:?} from a driver", packet.kind));
                }
                Ok(None) => return,
                Err(error) => return driver.cut(&error.to_string()),
            }
        }
    }

    /// The driver is gone: its requests wait for the next one, or fail.
    fn wait_until_left(&self, driver: &Arc<AttachedDriver>, threads: Threads) {
        let Some(declared_device) = self.device.get() else { return };
        declared_device.holder.pause();
        driver.close();
        // In this order: no more commands go out, then the sockets end the threads' waits. After
        // the join, no answer of this driver can arrive beside those of the next.
        threads.join();
        let status = declared_device.holder.status();
        let has_all = match driver.is_finishing.load(Ordering::SeqCst) {
            true => status.oldest_fetched_at.is_none(),
            // The driver of a device that ends has been sent END; one that left earlier has not.
            false => status.state != State::Waiting && status.is_drained,
        };
        let in_order = has_all && !driver.is_cut();
        if let Err(error) = declared_device.holder.recover() {
            // Without new memory the next driver cannot connect: it retries.
            tracing::warn!("cannot recover the requests of a driver that is gone: {error}");
        }
        let why = driver.why().unwrap_or_else(|| "it closed its connection".to_owned());
        if !in_order && declared_device.holder.status().state != State::Ended {
            self.driver_died(declared_device, &why);
        }
        // Last: the next driver may start as soon as the place is free.
        self.forget(driver);
        self.report_gone(driver.generation, driver.pid, in_order, why);
    }

    /// The new driver failed to connect.
    fn stay_alone(&self, error: &Error) {
        let is_alone = self.state.lock().driver.is_none();
        if let Some(declared_device) = self.device.get().filter(|_| is_alone) {
            self.driver_died(declared_device, &format!("the next driver did not connect: {error}"));
        }
    }

    /// Requests fail or wait for the next driver, depending on the options.
    fn driver_died(&self, declared_device: &DeclaredDevice, why: &str) {
        let died = |what: &str| {
            Error::new(ErrorKind::Unavailable, format!("{what}: its driver died: {why}"))
        };
        if !declared_device.options.recoverable {
            let error = died("the device has failed");
            (self.on_event)(Event::EndAsked(Some(error.to_string())));
            declared_device.policy.refuse(error);
        } else if declared_device.options.on_death == DeathPolicy::Fail {
            declared_device.policy.refuse(died("the device has no driver now"));
        }
    }

    fn forget(&self, driver: &Arc<AttachedDriver>) {
        let mut state = self.state.lock();
        if state.driver.as_ref().is_some_and(|current| Arc::ptr_eq(current, driver)) {
            state.driver = None;
            state.since = Some(Instant::now());
        }
        drop(state);
        self.changed.notify_all();
    }

    fn report_gone(&self, generation: u64, pid: u32, in_order: bool, why: String) {
        (self.on_event)(Event::Gone { generation, pid, in_order, why });
    }
}

/// The errno in the REFUSED that a driver gets which fails to attach in this way, as a positive
/// number.
#[must_use]
pub fn refused_errno(kind: ErrorKind) -> i32 {
    match kind {
        // There is no such device any more.
        ErrorKind::Closed => 19,
        // An option that does not exist is a mistake in the driver. ENOENT would look as if there
        // were no such device.
        ErrorKind::NotFound => 22,
        kind => kind.errno(),
    }
}
