//! A driver that is its own host: this process has the device, opens its doors and answers
//! questions about it (`sawmill driver`).
//!
//! Invariants: no thread is started before the call, and the driver is not called any more when it
//! returns. The doors open after the device has its name, which no other process can have
//! meanwhile. Files: `device` (what doors see), `record` (who takes a device over).
//!
//! Not here: what only a host can give, because it outlives the driver (the table in
//! `docs/guide/driver-tools.md`): requests that wait for the next driver at doors other than ublk,
//! time limits for commands, batch mode. Signals are the program's own: it calls [`Device::end`].

mod device;
mod record;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{BlockDevice, Error, ErrorKind, Result};
use sawmill_doors::{DoorPlan, DoorQueues, DoorVolume, Doors, NbdShare};

use self::device::OwnDevice;
use self::record::{Earlier, Record};
use super::Outcome;
use super::caller::Caller;
use super::driver::{Abilities, Device, DeviceLink, Door, Driver};
use super::end_request::{EndRequest, Ending};
use super::host::{self, HOST_VARIABLE, device_folder};
use super::options::Options;
use crate::host::{Event, Host};
use crate::options::{DeviceOptions, Mode};
use crate::protocol::ControlFacts;
use crate::request_holder::RequestHolder;

/// The driver socket in a device's folder.
const SOCKET: &str = "driver.sock";

/// Time for doors to become quiet that are left to the next driver.
const QUIET_TIME_MAX: Duration = Duration::from_secs(5);

/// Serves a device with this driver until it ends.
pub(super) fn serve(
    driver: impl Driver + 'static,
    doors: &[String],
    options: &Options,
) -> Result<Outcome> {
    let plans = doors.iter().map(|line| DoorPlan::parse(line)).collect::<Result<Vec<_>>>()?;
    // Before anything is made: what another process has is found now.
    plans.iter().try_for_each(|plan| plan.check(1).and_then(|()| plan.check_free()))?;
    let served = ServedDevice::start(driver, &plans, options)?;
    let outcome = served.run(&plans);
    if served.is_in_child() {
        // A child has none of our threads, and what it would end is its parent's.
        std::mem::forget(served);
        let text = "the driver has forked in attached() or ready(): a driver that is its own host \
                    must become a daemon before it serves";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    outcome.map(|()| Outcome::Ended)
}

/// A device in this process. Ended when dropped.
struct ServedDevice {
    name: String,
    folder: PathBuf,
    caller: Arc<Caller>,
    host: Arc<Host>,
    doors: Doors,
    device: Device,
    queues: Option<DoorQueues>,
    record: Record,
    end: Arc<EndRequest>,
    /// Whether a program that starts again may take over its doors.
    outlives_driver: bool,
    /// The process that has all this, and not a child of it.
    process: u32,
}

impl ServedDevice {
    fn start(driver: impl Driver + 'static, plans: &[DoorPlan], options: &Options) -> Result<Self> {
        let name = host::name(options);
        let folder = device_folder(&name)?;
        // Only a ublk device outlives its driver.
        let earlier = match Record::earlier(&folder)? {
            Some(earlier) if sawmill_doors::waits(&earlier.identity(&folder, &name))? => {
                Some(earlier)
            }
            _ => None,
        };
        let device_options = device_options(driver.abilities(), options, earlier.as_ref())?;
        sawmill_sys::make_folder(&folder).map_err(|error| {
            let what = format!("cannot make the folder {}", folder.display());
            Error::caused(ErrorKind::of_io(&error), what, error)
        })?;
        let queues = device_options.batch.hw_queues as usize;
        let calls_max = queues.saturating_mul(options.threads.max(1));
        let caller = Arc::new(Caller::of_device(driver, &device_options, calls_max));
        let own = OwnDevice::start(&caller, device_options.geometry(), calls_max)?;
        // Functions that may wait for each other get threads of their own at every door. And only
        // one side of the device may change blocks in part.
        let is_one_side = device_options.byte_granular || plans.iter().all(DoorPlan::has_queues);
        let queues = (options.threads <= 1 && is_one_side).then(|| DoorQueues {
            count: u16::try_from(queues).unwrap_or(u16::MAX),
            device: Arc::new(own.of_queues()) as Arc<dyn BlockDevice>,
        });
        let end = Arc::new(EndRequest::default());
        let to_end = Arc::clone(&end);
        let on_event = Box::new(move |event: Event| {
            if let Event::EndAsked(why) = event {
                to_end.ask(why);
            }
        });
        // A program that starts again finds a device of its own name, and the default one has the
        // number of the process in it.
        let outlives_driver = device_options.recoverable && host::given_name(options).is_some();
        let options_facts = device_options.facts();
        let facts = options_facts.clone().with("name", &name);
        let socket = folder.join(SOCKET);
        let holder = Arc::new(own) as Arc<dyn RequestHolder>;
        let host = Host::own(&name, &socket, device_options, holder, on_event)?;
        // After the name is ours.
        let record = Record::next(&folder, &options_facts, earlier.as_ref())?;
        host.count_from(record.generation);
        let welcome = facts.with("generation", record.generation).into();
        let device = Device { link: DeviceLink::Own(Arc::clone(&end)), welcome, socket };
        let (doors, process) = (Doors::new(NbdShare::default(), None), std::process::id());
        Ok(ServedDevice {
            name,
            folder,
            caller,
            host,
            doors,
            device,
            queues,
            record,
            end,
            outlives_driver,
            process,
        })
    }

    /// From the driver's first call to the end of the device; returns early in a child.
    fn run(&self, plans: &[DoorPlan]) -> Result<()> {
        self.caller.call(|driver| driver.attached(&self.device));
        if self.is_in_child() {
            return Ok(());
        }
        // After the driver knows its device: questions may flush it.
        self.host.run()?;
        let addresses = self.open(plans)?;
        self.caller.call(|driver| driver.ready(&addresses));
        if self.is_in_child() {
            return Ok(());
        }
        self.wait()
    }

    fn is_in_child(&self) -> bool {
        std::process::id() != self.process
    }

    /// Opens the doors, and tells who asks where they are.
    fn open(&self, plans: &[DoorPlan]) -> Result<Vec<Door>> {
        let Some(device) = self.host.device() else {
            return Err(Error::new(ErrorKind::Internal, "no device"));
        };
        let volume = DoorVolume {
            name: self.name.clone(),
            description: "a device with a driver".to_owned(),
            device,
            folder: self.folder.clone(),
            identity: self.record.identity(&self.name),
            outlives_server: self.outlives_driver,
            queues: self.queues.clone(),
        };
        if let Err(error) = self.doors.open_all(plans, &[volume]) {
            self.close_opened();
            return Err(error);
        }
        let addresses = self.doors.addresses(&self.name);
        let add_door = |facts: ControlFacts, (kind, address): &(&str, String)| {
            facts.with("door", format!("{kind} {address}"))
        };
        self.host.show_doors(addresses.iter().fold(ControlFacts::default(), add_door));
        let door = |(kind, address): (&str, String)| Door { kind: kind.to_owned(), address };
        Ok(addresses.into_iter().map(door).collect())
    }

    /// One door could not be opened. Users of another that was taken over wait for the next try.
    fn close_opened(&self) {
        let is_taken_over = self.outlives_driver && self.record.generation > 1;
        if is_taken_over && self.doors.quiesce(QUIET_TIME_MAX).is_ok() {
            self.doors.leave(&[&self.name]);
        } else {
            self.doors.stop();
            self.forget();
        }
    }

    /// The device has ended, unless a ublk device of it, for which this driver opened no door,
    /// still waits.
    fn forget(&self) {
        if let Ok(false) = sawmill_doors::waits(&self.record.identity(&self.name)) {
            self.record.forget();
        }
    }

    /// Waits until the device must end, and ends it.
    fn wait(&self) -> Result<()> {
        match self.end.wait() {
            Ending::AtOnce(why) => {
                let error = self.fail(&why);
                // Everything is refused. A ublk device must be gone before this process is: its
                // users would wait for another.
                self.doors.stop();
                self.forget();
                Err(error)
            }
            Ending::InOrder | Ending::Over => self.finish(),
        }
    }

    /// Ends the device in order, unless that must not take so long any more.
    fn finish(&self) -> Result<()> {
        std::thread::scope(|scope| {
            let finish = move || {
                let _finished = Finished(&self.end);
                // Requests in flight are answered.
                self.doors.stop();
                self.host.finish()
            };
            let builder = std::thread::Builder::new().name("driver-end".to_owned());
            let finishing = builder.spawn_scoped(scope, finish).map_err(|error| {
                Error::caused(ErrorKind::Full, "cannot start a thread for the end", error)
            })?;
            let failed = match self.end.wait_until_over() {
                Ending::AtOnce(why) => {
                    let error = self.fail(&why);
                    self.doors.stop_now();
                    Err(error)
                }
                Ending::Over | Ending::InOrder => Ok(()),
            };
            let finished = finishing.join().unwrap_or_else(|panic| {
                std::panic::resume_unwind(panic);
            });
            self.forget();
            failed.and(finished)
        })
    }

    fn fail(&self, why: &str) -> Error {
        let error = Error::new(ErrorKind::Unavailable, format!("the device has failed: {why}"));
        // Requests that wait for their turn, or still come, are refused.
        self.host.fail(&error);
        error
    }
}

impl Drop for ServedDevice {
    fn drop(&mut self) {
        // Nothing of this has an effect on what has ended already.
        self.host.fail(&Error::new(ErrorKind::Closed, "the device has ended"));
        self.doors.stop();
        self.host.close();
        self.host.wait_for_askers();
        // A question that takes longer may be with the driver, which the program may free now.
        self.caller.close();
        self.host.release_name();
    }
}

/// Says that an end in order is done, also if it panics.
struct Finished<'a>(&'a EndRequest);

impl Drop for Finished<'_> {
    fn drop(&mut self) {
        self.0.finished();
    }
}

/// The error of a driver of chunks without a host.
pub(super) fn needs_host() -> Error {
    let text = format!(
        "mode=batch needs a host in another process, which keeps chunks when a driver dies: omit \
         host=none, and {HOST_VARIABLE}"
    );
    Error::new(ErrorKind::Invalid, text)
}

/// The options of the device: those of the one that waits for its next driver, if any.
fn device_options(
    abilities: Abilities,
    options: &Options,
    earlier: Option<&Earlier>,
) -> Result<DeviceOptions> {
    if options.mode() == Mode::Batch {
        return Err(needs_host());
    }
    let limits = ["request_timeout_s", "death_timeout_s", "on_death"];
    if let Some(name) = limits.into_iter().find(|name| options.facts.get(name).is_some()) {
        let text = format!(
            "{name} needs a host in another process, which is there when the driver is not: omit \
             it, or host=none and {HOST_VARIABLE}"
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let mut facts = ControlFacts::default();
    abilities.declare(&mut facts, Mode::Plain);
    for (name, value) in options.facts.iter() {
        facts.add(name, value);
    }
    let none = ControlFacts::default();
    let device_options = match earlier {
        None => DeviceOptions::declared(&facts, &none)?,
        // Its users have seen them, and the kernel keeps some.
        Some(Earlier { options, .. }) => {
            let device_options = DeviceOptions::declared(options, &none)?;
            device_options.agrees(&facts, &none)?;
            device_options
        }
    };
    // Options may ask for more than the driver has declared.
    abilities.suffice(&device_options.facts())?;
    Ok(device_options)
}
