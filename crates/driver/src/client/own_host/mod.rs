//! A driver that is its own host: this process has the device, opens its doors and answers
//! questions about it (`sawmill driver`).
//!
//! Invariants: no thread is started before the call, and the driver is not called any more when it
//! returns. The doors open after the device has its name, which no other process can have
//! meanwhile. Files: `device` (what doors see), `record` (who takes a device over), `hand_over` (a
//! driver takes the place of one that serves).
//!
//! Not here: what only a host can give, because it outlives the driver (the table in
//! `docs/guide/driver-tools.md`): requests that wait for the next driver at doors other than ublk,
//! time limits for commands, batch mode. Signals are the program's own: it calls [`Device::end`].

mod device;
mod hand_over;
mod record;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use sawmill_device::{BlockDevice, Error, ErrorKind, Flags, Operation, Request, Result};
use sawmill_doors::{DoorPlan, DoorQueues, DoorVolume, Doors, NbdShare};
use sawmill_frontend::DoorPiece;

use self::device::OwnDevice;
use self::hand_over::{NextDriver, Offer, ServingDriver};
use self::record::{Earlier, Record};
use super::Outcome;
use super::caller::Caller;
use super::driver::{Abilities, Device, DeviceLink, Door, Driver};
use super::end_request::{EndRequest, Ending};
use super::host::{self, HOST_VARIABLE, NAME_VARIABLE, device_folder};
use super::options::Options;
use crate::host::{Event, Host, Listener};
use crate::options::{DeviceOptions, Mode};
use crate::protocol::ControlFacts;
use crate::request_holder::RequestHolder;

/// The driver socket in a device's folder.
const SOCKET: &str = "driver.sock";

/// Time for doors to become quiet that the next driver gets, and for each flush before that.
const QUIET_TIME_MAX: Duration = Duration::from_secs(5);

/// Time for the name of a driver that was replaced to become free: it may have died on the way.
const NAME_TIME_MAX: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Serves a device with this driver until it ends or another driver does.
pub(super) fn serve(
    driver: impl Driver + 'static,
    doors: &[String],
    options: &Options,
) -> Result<Outcome> {
    let (served, origin) = ServedDevice::start(driver, doors, options)?;
    let outcome = served.run(origin);
    if served.is_in_child() {
        // A child has none of our threads, and what it would end is its parent's.
        std::mem::forget(served);
        let text = "the driver has forked in attached() or ready(): a driver that is its own host \
                    must become a daemon before it serves";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    outcome
}

/// Where the doors of a device come from.
enum DoorOrigin {
    /// They are opened.
    Plans(Vec<DoorPlan>),
    /// The driver before has left them.
    Pieces(Vec<DoorPiece>),
}

/// What there was of the device before this driver.
struct Past {
    earlier: Option<Earlier>,
    serving: Option<ServingDriver>,
}

impl Past {
    fn of(name: &str, folder: &Path, options: &Options) -> Result<Self> {
        let serving = match (host::replaces(options)?, host::given_name(options)) {
            (false, _) => None,
            (true, Some(_)) => ServingDriver::at(&folder.join(SOCKET))?,
            (true, None) => {
                let text = format!(
                    "which device? A driver that is to take the place of another needs the name of \
                     its device, for example in {NAME_VARIABLE}"
                );
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        };
        // Only a ublk device outlives its driver, unless that waits for the next one.
        let earlier = match Record::earlier(folder)? {
            Some(earlier) if serving.is_some() => Some(earlier),
            Some(earlier) if sawmill_doors::waits(&earlier.identity(folder, name))? => {
                Some(earlier)
            }
            _ => None,
        };
        if serving.is_some() && earlier.is_none() {
            let text = format!(
                "the device {name} has a host in another process: start this driver without \
                 host=none, with replace=1. (If not, the file {} was removed: end the device, and \
                 start it again.)",
                folder.join(record::FILE).display()
            );
            return Err(Error::new(ErrorKind::Refused, text));
        }
        Ok(Past { earlier, serving })
    }
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
    fn start(
        driver: impl Driver + 'static,
        doors: &[String],
        options: &Options,
    ) -> Result<(Self, DoorOrigin)> {
        let name = host::name(options);
        let folder = device_folder(&name)?;
        let Past { earlier, serving } = Past::of(&name, &folder, options)?;
        let device_options = device_options(driver.abilities(), options, earlier.as_ref())?;
        sawmill_sys::make_folder(&folder).map_err(|error| {
            let what = format!("cannot make the folder {}", folder.display());
            Error::caused(ErrorKind::of_io(&error), what, error)
        })?;
        // What is wrong with this driver was found before users wait.
        let offer = serving.map(ServingDriver::ask).transpose()?;
        let plans = match &offer {
            Some(offer) => served_doors(offer)?,
            None => new_doors(doors)?,
        };
        let Parts { caller, holder, queues } = parts(driver, &device_options, options, &plans)?;
        let end = Arc::new(EndRequest::default());
        // A program that starts again finds a device of its own name, and the default one has the
        // number of the process in it.
        let outlives_driver = device_options.recoverable && host::given_name(options).is_some();
        let options_facts = device_options.facts();
        let socket = folder.join(SOCKET);
        let (origin, name_time_max) = match offer.map(Offer::take).transpose()? {
            Some(pieces) => (DoorOrigin::Pieces(pieces), NAME_TIME_MAX),
            None => (DoorOrigin::Plans(plans), Duration::ZERO),
        };
        let host = named(name_time_max, || {
            let (options, holder) = (device_options.clone(), Arc::clone(&holder));
            Host::own(&name, &socket, options, holder, listener(&end))
        })?;
        // After the name is ours.
        let record = match (Record::next(&folder, &options_facts, earlier.as_ref()), &origin) {
            // Users wait, and the file of the driver before serves as well.
            (Err(error), DoorOrigin::Pieces(_)) => {
                tracing::warn!("the number of this driver is not remembered: {error}");
                earlier.map(|earlier| earlier.unwritten_next(&folder)).ok_or(error)?
            }
            (record, _) => record?,
        };
        host.count_from(record.generation);
        let facts = options_facts.with("name", &name).with("generation", record.generation);
        let device =
            Device { link: DeviceLink::Own(Arc::clone(&end)), welcome: facts.into(), socket };
        let (doors, process) = (Doors::new(NbdShare::default(), None), std::process::id());
        let served = ServedDevice {
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
        };
        Ok((served, origin))
    }

    /// From the driver's first call to the end of the device, or to its next driver; returns early
    /// in a child.
    fn run(&self, origin: DoorOrigin) -> Result<Outcome> {
        self.caller.call(|driver| driver.attached(&self.device));
        if self.is_in_child() {
            return Ok(Outcome::Ended);
        }
        // A driver that has failed so early must get no request of those who wait.
        if let Some(why) = self.end.why() {
            let _ = self.fail(&why);
        }
        // After the driver knows its device: questions may flush it.
        self.host.run()?;
        let addresses = self.open(origin)?;
        self.caller.call(|driver| driver.ready(&addresses));
        if self.is_in_child() {
            return Ok(Outcome::Ended);
        }
        self.wait()
    }

    fn is_in_child(&self) -> bool {
        std::process::id() != self.process
    }

    /// Opens the doors, and tells who asks where they are.
    fn open(&self, origin: DoorOrigin) -> Result<Vec<Door>> {
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
        match origin {
            DoorOrigin::Pieces(pieces) => self.take_over(pieces, volume)?,
            DoorOrigin::Plans(plans) => {
                let opened = sawmill_doors::require_older_writes_first(&plans, &volume)
                    .and_then(|()| self.doors.open_all(&plans, &[volume]));
                if let Err(error) = opened {
                    self.close_opened();
                    return Err(error);
                }
            }
        }
        let addresses = self.doors.addresses(&self.name);
        let add_door = |facts: ControlFacts, (kind, address): &(&str, String)| {
            facts.with("door", format!("{kind} {address}"))
        };
        self.host.show_doors(addresses.iter().fold(ControlFacts::default(), add_door));
        let door = |(kind, address): (&str, String)| Door { kind: kind.to_owned(), address };
        Ok(addresses.into_iter().map(door).collect())
    }

    /// Opens the doors that the driver before has left. One that cannot be opened holds up no
    /// other.
    fn take_over(&self, pieces: Vec<DoorPiece>, volume: DoorVolume) -> Result<()> {
        let lost = self.doors.take_over(pieces, &[volume]);
        for error in &lost {
            tracing::error!("a door was lost when this driver took the place of another: {error}");
        }
        match lost.into_iter().next() {
            // A ublk device among them waits for the next start.
            Some(error) if self.doors.all().is_empty() => Err(error),
            _ => Ok(()),
        }
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

    /// Waits until the device must end, and ends it, or has another driver.
    fn wait(&self) -> Result<Outcome> {
        loop {
            match self.end.wait() {
                Ending::HandOver(stream) => {
                    if self.hand_over(&NextDriver::new(stream)) {
                        return Ok(Outcome::Replaced);
                    }
                }
                Ending::AtOnce(why) => {
                    let error = self.fail(&why);
                    // Everything is refused. A ublk device must be gone before this process is: its
                    // users would wait for another.
                    self.doors.stop();
                    self.forget();
                    return Err(error);
                }
                Ending::InOrder | Ending::Over => return self.finish().map(|()| Outcome::Ended),
            }
        }
    }

    /// Gives the device to its next driver; returns whether that has it now.
    fn hand_over(&self, next: &NextDriver) -> bool {
        if next.is_gone() {
            return false;
        }
        let offered = self.become_quiet().and_then(|doors| {
            // Requests of those who left may still be under way, and questions. Whatever hangs
            // must do so before the next driver has the word.
            let held = self.caller.hold(QUIET_TIME_MAX)?;
            if self.end.is_asked() {
                return Err(Error::new(ErrorKind::Closed, "the device is about to end"));
            }
            next.offer(&doors).map(|()| held)
        });
        let held = match offered {
            Ok(held) => held,
            Err(error) => {
                self.doors.resume_but(&[]);
                tracing::warn!("this driver goes on, as the next one did not take over: {error}");
                next.refuse(&error);
                return false;
            }
        };
        // The next driver has the word: nothing of the device is touched any more.
        held.close();
        self.doors.release();
        let text = "another driver has taken the place of this one; ask again";
        self.host.fail(&Error::new(ErrorKind::Unavailable, text));
        self.host.close();
        self.host.wait_for_askers();
        self.caller.close();
        self.host.release_name();
        next.leave();
        true
    }

    /// Makes all doors quiet, and durable what they have answered.
    fn become_quiet(&self) -> Result<Vec<DoorPiece>> {
        if !self.outlives_driver {
            let text = "the device has no name of its own, or recoverable=0: it ends with its \
                        driver";
            return Err(Error::new(ErrorKind::Refused, text));
        }
        // Most of it while users work. A driver may have answered what only its memory has.
        self.flush_in_time()?;
        self.doors.quiesce(QUIET_TIME_MAX)?;
        self.flush_in_time()?;
        self.doors.hand_over()
    }

    /// A flush that hangs must not keep this thread, which ends the device.
    fn flush_in_time(&self) -> Result<()> {
        let Some(device) = self.host.device() else { return Ok(()) };
        let (sender, outcome) = sync_channel(1);
        // Whoever waits for it may have given up.
        let answer = move |outcome| drop(sender.try_send(outcome));
        device.submit(Request::bare(Operation::Flush, 0, 0, Flags::default(), answer));
        match outcome.recv_timeout(QUIET_TIME_MAX) {
            Ok(outcome) => outcome.map(drop),
            Err(_) => {
                let text = format!(
                    "a flush takes longer than {QUIET_TIME_MAX:?}; flush the device first \
                     (sawmill driver flush)"
                );
                Err(Error::new(ErrorKind::TimedOut, text))
            }
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
                Ending::Over | Ending::InOrder | Ending::HandOver(_) => Ok(()),
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
        if let Some(next) = self.end.close() {
            let text = "it has ended, or another driver has taken its place";
            NextDriver::new(next).refuse(&Error::new(ErrorKind::Closed, text));
        }
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

/// A device around a driver, as its host and its doors use it.
struct Parts {
    caller: Arc<Caller>,
    holder: Arc<dyn RequestHolder>,
    queues: Option<DoorQueues>,
}

fn parts(
    driver: impl Driver + 'static,
    device_options: &DeviceOptions,
    options: &Options,
    plans: &[DoorPlan],
) -> Result<Parts> {
    let queues = device_options.batch.hw_queues as usize;
    let calls_max = queues.saturating_mul(options.threads.max(1));
    let caller = Arc::new(Caller::of_device(driver, device_options, calls_max));
    let own = OwnDevice::start(&caller, device_options.geometry(), calls_max)?;
    // Functions that may wait for each other get threads of their own at every door. And only one
    // side of the device may change blocks in part.
    let is_one_side = device_options.byte_granular || plans.iter().all(DoorPlan::has_queues);
    let queues = (options.threads <= 1 && is_one_side).then(|| DoorQueues {
        count: u16::try_from(queues).unwrap_or(u16::MAX),
        device: Arc::new(own.of_queues()) as Arc<dyn BlockDevice>,
    });
    Ok(Parts { caller, holder: Arc::new(own), queues })
}

/// Passes on what a host is asked for.
fn listener(end: &Arc<EndRequest>) -> Listener {
    let end = Arc::clone(end);
    Box::new(move |event| match event {
        Event::EndAsked(why) => end.ask(why),
        Event::HandOverAsked(stream) => end.ask_hand_over(stream),
        _ => {}
    })
}

/// Fails unless a driver serves the device of this name.
pub(super) fn require_served(name: &str) -> Result<()> {
    match ServingDriver::at(&device_folder(name)?.join(SOCKET))? {
        Some(_) => Ok(()),
        None => Err(Error::new(ErrorKind::NotFound, format!("no driver serves a device {name}"))),
    }
}

/// Claims a name, which may become free within this time.
fn named<T>(time_max: Duration, claim: impl Fn() -> Result<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        match claim() {
            Err(error) if error.kind() == ErrorKind::InUse && began.elapsed() < time_max => {
                std::thread::sleep(LOOK_EVERY);
            }
            outcome => return outcome,
        }
    }
}

/// The doors that another driver offers, if this process can serve them.
fn served_doors(offer: &Offer) -> Result<Vec<DoorPlan>> {
    let plans = offer.plans()?;
    // Known while the other goes on: this is what a program most likely has no right to.
    if plans.iter().any(DoorPlan::has_queues) {
        sawmill_doors::require_driver()?;
    }
    Ok(plans)
}

/// The doors that are to be opened. What another process has is found before anything is made.
fn new_doors(doors: &[String]) -> Result<Vec<DoorPlan>> {
    // One that was to take the place of another may have named none.
    if doors.is_empty() {
        let text = "no driver serves a device of this name here, whose doors this one could take";
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    let plans = doors.iter().map(|line| DoorPlan::parse(line)).collect::<Result<Vec<_>>>()?;
    plans.iter().try_for_each(|plan| plan.check(1).and_then(|()| plan.check_free()))?;
    Ok(plans)
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
    let has_can_flush = |facts: &ControlFacts| facts.get("can_flush").is_some();
    if abilities.flush && !device_options.can_flush && !has_can_flush(&options.facts) {
        let text = "the device has can_flush=0, since its first driver needed no flush, and this \
                    driver would get none: say can_flush=0, or end the device and start it again";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    // Options may ask for more than the driver has declared.
    abilities.suffice(&device_options.facts())?;
    Ok(device_options)
}
