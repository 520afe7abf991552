//! One device: made, taken over, removed.
//!
//! Invariants: the facts of a device are written before it has power, so the next server knows it.
//! A device that is not ours, or that a living server has, is never touched. Not here: requests
//! (`service`), the interface of every door (`door`).

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sawmill_device::{BlockDevice, Error, ErrorKind, Geometry, Result};
use sawmill_sys::BusePort;

use super::config::{DeviceConfig, failed, numbers};
use super::gate::Quiet;
use super::options::BuseOptions;
use super::protocol::ChunkLayout;
use super::service::Service;
use super::{CHECK_EVERY, DOOR};
use crate::DoorCounts;
use crate::device_facts::{
    DeviceFacts, DeviceLock, facts_path, is_locked, make_symlink, remove_symlink,
};

/// A write that crosses the border of a collision area is two records; sequence numbers are not
/// used here.
const COLLISION_AREA_BYTES: u64 = 1 << 30;
/// The most requests that the kernel has in flight.
const QUEUE_DEPTH: u32 = 256;
/// Time for the nodes of a device to appear.
const NODE_TIME_MAX: Duration = Duration::from_secs(10);
/// Interval of checks whether a sync has ended.
const SYNC_CHECK_EVERY: Duration = Duration::from_millis(5);
/// Devices that are tried for a free number.
const NUMBERS_MAX: u32 = 1 << 16;

/// A device and the threads that serve it. Dropping it is [`Stop::Now`](crate::Stop::Now).
pub struct BuseDoor {
    pub(super) shared: Arc<BuseState>,
}

pub(super) struct BuseState {
    pub(super) options: BuseOptions,
    pub(super) config: DeviceConfig,
    /// Of the device that this server made or took over: another may have its number later.
    instance: Option<u64>,
    running: Mutex<Option<Running>>,
    /// The counters from before the device was left.
    past: Mutex<DoorCounts>,
}

/// The state while the device is served.
struct Running {
    service: Arc<Service>,
    threads: Vec<JoinHandle<()>>,
    device_lock: DeviceLock,
}

impl BuseDoor {
    /// Serves a device for this volume: the one that a dead server left, whose users wait, or a new
    /// one. Returns when users can open [`BuseDoor::node`].
    ///
    /// Errors: `Invalid` for a device that cannot be shown; `Exists` if the number is taken;
    /// `Unavailable` without the module; `Denied` without the right to it.
    pub fn open(options: BuseOptions, device: Arc<dyn BlockDevice>) -> Result<Self> {
        check(&options, &device.geometry())?;
        for id in numbers(&options.config_folder)? {
            let config = DeviceConfig::of(&options.config_folder, id);
            if !is_left(&options, &config) {
                continue;
            }
            let is_wanted = options.id.is_none_or(|wanted| wanted == id);
            match config.waits(options.recovery_time_max)? {
                true if options.recoverable && is_wanted => {
                    return BuseDoor::recover(id, options, device);
                }
                // Its writes are older than what this server would take: they must come first.
                true if options.recoverable => return Err(waits_elsewhere(&config)),
                _ if is_wanted => remove_remains(&options, &config)?,
                _ => (),
            }
        }
        BuseDoor::make(options, device)
    }

    fn make(options: BuseOptions, device: Arc<dyn BlockDevice>) -> Result<Self> {
        let (config, device_lock) = make_config(&options)?;
        let attributes = [
            ("size", size_bytes(&device.geometry())),
            ("blocksize", u64::from(device.geometry().block_bytes)),
            ("collision_area_size", COLLISION_AREA_BYTES),
            ("queue_depth", u64::from(QUEUE_DEPTH)),
            ("can_discard", u64::from(device.geometry().operations.discard)),
            ("can_write_zeroes", u64::from(device.geometry().operations.write_zeroes)),
            ("chunk_age_ms", options.chunk_age.as_millis() as u64),
        ];
        let started = attributes
            .iter()
            .try_for_each(|(name, value)| config.set(name, value))
            .and_then(|()| config.set("on_death", on_death(&options)))
            .and_then(|()| config.set("power", 1))
            .and_then(|()| start(&options, &config, device));
        match started {
            Ok((service, threads)) => {
                let id = config.id;
                tracing::info!(id, volume = options.volume, "buse: serving a device");
                Ok(BuseDoor::of(options, config, Running { service, threads, device_lock }))
            }
            Err(error) => {
                config.remove();
                device_lock.remove();
                Err(error)
            }
        }
    }

    /// Takes over a device whose server is gone, after a crash or
    /// [`QuietDoor::release`](crate::QuietDoor::release). Its users wait until then, and what the
    /// old server had not acknowledged is served again.
    ///
    /// Errors: `Refused` for a device of another program or volume, or one that is larger than the
    /// volume; `InUse` if its server still runs.
    pub fn recover(id: u32, options: BuseOptions, device: Arc<dyn BlockDevice>) -> Result<Self> {
        check(&options, &device.geometry())?;
        let config = DeviceConfig::of(&options.config_folder, id);
        let device_lock = DeviceLock::wait(DOOR, &options.run_folder, id)?;
        let refuse = |text: String| Err(Error::new(ErrorKind::Refused, text));
        if !is_ours(&options, &config) {
            let text = "was not made for this volume, and was not changed";
            return refuse(format!("{DOOR}: device {id} {text}"));
        }
        let (old, new) = (config.number("size")?, size_bytes(&device.geometry()));
        // The kernel keeps the size it knows, and requests beyond the end of a smaller volume would
        // fail under a file system.
        if old > new {
            return refuse(format!(
                "{DOOR}: device {id} has {old} bytes, more than the volume's {new}"
            ));
        }
        let geometry = device.geometry();
        let has_zeroes =
            config.number("can_write_zeroes")? == 0 || geometry.operations.write_zeroes;
        if config.number("blocksize")? != u64::from(geometry.block_bytes) || !has_zeroes {
            return refuse(format!("{DOOR}: device {id} was made for a device of another kind"));
        }
        if old < new {
            config.set("size", new)?;
        }
        let (service, threads) = start(&options, &config, device)?;
        // Not before: what waits would fail at once if this server fails to come.
        if let Err(error) = config.set("on_death", on_death(&options)) {
            tracing::warn!(%error, id, "buse: requests do as before when this server dies");
        }
        tracing::info!(id, volume = options.volume, "buse: took over a device");
        Ok(BuseDoor::of(options, config, Running { service, threads, device_lock }))
    }

    fn of(options: BuseOptions, config: DeviceConfig, running: Running) -> Self {
        make_symlink(&options.symlink_folder, options.symlink.as_deref(), &node(config.id));
        let (running, past) = (Mutex::new(Some(running)), Mutex::default());
        let instance = config.instance();
        BuseDoor { shared: Arc::new(BuseState { options, config, instance, running, past }) }
    }

    /// The number in `/dev/buseN`.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.shared.config.id
    }

    /// The block device.
    #[must_use]
    pub fn node(&self) -> PathBuf {
        node(self.id())
    }

    pub(super) fn stop_now(&self) {
        if self.shared.running.lock().is_none() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        // On a thread of its own: the stop writes the kernel's cache and waits for requests in
        // flight, and this promises not to wait.
        let stop = move || shared.stop();
        if let Err(error) = std::thread::Builder::new().name("buse-stop".into()).spawn(stop) {
            tracing::warn!(%error, id = self.id(), "buse: cannot start a thread to stop a device");
            // It waits for the next server.
            self.shared.leave();
        }
    }
}

impl Drop for BuseDoor {
    fn drop(&mut self) {
        self.stop_now();
    }
}

/// Whether a device of this volume waits for its next server.
///
/// Errors: it is unknown then, which is no sign that there is none.
pub fn waits(options: &BuseOptions) -> Result<bool> {
    if !options.config_folder.exists() {
        return Ok(false);
    }
    for id in numbers(&options.config_folder)? {
        let config = DeviceConfig::of(&options.config_folder, id);
        if is_left(options, &config) && config.waits(Duration::ZERO)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn node(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/{DOOR}{id}"))
}

/// Whole blocks only.
fn size_bytes(geometry: &Geometry) -> u64 {
    geometry.size_bytes - geometry.size_bytes % u64::from(geometry.block_bytes)
}

/// Refuses what the module cannot show.
fn check(options: &BuseOptions, geometry: &Geometry) -> Result<()> {
    let refuse = |text: &str| Err(Error::new(ErrorKind::Invalid, format!("{DOOR}: {text}")));
    if options.volume.is_empty() {
        return refuse("the volume has no identity; another's device could be taken over");
    }
    if geometry.read_only {
        return refuse("the kernel module makes no read-only disks; use another door");
    }
    if size_bytes(geometry) == 0 || geometry.request_bytes_max < geometry.block_bytes {
        return refuse("the device, or the longest request that it takes, is smaller than a block");
    }
    Ok(())
}

/// Makes a device with the requested number or a free one, with its facts, and without power.
fn make_config(options: &BuseOptions) -> Result<(DeviceConfig, DeviceLock)> {
    let numbers = match options.id {
        Some(id) => id..id.saturating_add(1),
        None => 0..NUMBERS_MAX,
    };
    let mut last = Error::new(ErrorKind::Full, format!("{DOOR}: no number is free"));
    for id in numbers {
        match claim(options, id) {
            // Or the server of an older device with this number has not noticed its end.
            Err(error) if matches!(error.kind(), ErrorKind::Exists | ErrorKind::InUse) => {
                last = error;
            }
            outcome => return outcome,
        }
    }
    Err(last)
}

/// Makes a device with this number and its facts.
fn claim(options: &BuseOptions, id: u32) -> Result<(DeviceConfig, DeviceLock)> {
    let config = DeviceConfig::make(&options.config_folder, id)?;
    let facts = DeviceFacts {
        volume: options.volume.clone(),
        symlink: options.symlink.clone(),
        is_recovering: false,
        instance: config.instance(),
    };
    let lock = DeviceLock::wait(DOOR, &options.run_folder, id);
    match lock.and_then(|lock| lock.write(&facts).map(|()| lock)) {
        Ok(lock) => Ok((config, lock)),
        Err(error) => {
            config.remove();
            Err(error)
        }
    }
}

/// What requests do while the device has no server.
fn on_death(options: &BuseOptions) -> &'static str {
    if options.recoverable { "wait" } else { "fail" }
}

fn waits_elsewhere(config: &DeviceConfig) -> Error {
    let id = config.id;
    let text = format!(
        "{DOOR}: device {id} of this volume has writes that no server has taken: serve the volume \
         with --buse={id} first"
    );
    Error::new(ErrorKind::Refused, text)
}

/// Removes what a server left that died while it made or stopped its device, or whose answered
/// writes are gone.
fn remove_remains(options: &BuseOptions, config: &DeviceConfig) -> Result<()> {
    let device_lock = DeviceLock::wait(DOOR, &options.run_folder, config.id)?;
    if is_ours(options, config) {
        config.remove();
        device_lock.remove();
    }
    Ok(())
}

/// Whether the device was made for this volume, by a server of ours.
fn is_ours(options: &BuseOptions, config: &DeviceConfig) -> bool {
    DeviceFacts::read(&options.run_folder, config.id).is_some_and(|facts| {
        facts.volume == options.volume
            && facts.instance.is_some()
            && facts.instance == config.instance()
    })
}

/// Whether it is ours, and no living server has it.
fn is_left(options: &BuseOptions, config: &DeviceConfig) -> bool {
    is_ours(options, config)
        && is_locked(&facts_path(&options.run_folder, config.id)) == Some(false)
}

/// Opens the ports, which the kernel may not have closed yet, and starts the threads. Returns when
/// the disk is there.
fn start(
    options: &BuseOptions,
    config: &DeviceConfig,
    device: Arc<dyn BlockDevice>,
) -> Result<(Arc<Service>, Vec<JoinHandle<()>>)> {
    let id = config.id;
    let layout = ChunkLayout {
        chunk_bytes: config.number("write_chunk_size")?,
        block_bytes: config.number("blocksize")?,
    };
    let open = |kind: &str| {
        let memory_bytes = config.number(&format!("{kind}_shm_size"))? as usize;
        let path = PathBuf::from(format!("/dev/{DOOR}{id}-{}0", &kind[..1]));
        open_port(&path, memory_bytes, options.recovery_time_max)
    };
    let ports = [open("write")?, open("read")?];
    let cannot = |error| failed(&format!("cannot serve device {id}"), error);
    let service = Arc::new(Service::new(options, id, device, ports, layout).map_err(cannot)?);
    let threads = service.start().map_err(cannot)?;
    let began = Instant::now();
    while !node(id).exists() {
        if began.elapsed() > NODE_TIME_MAX {
            service.leave();
            threads.into_iter().for_each(|thread| drop(thread.join()));
            let text = format!("{DOOR}: {} does not appear", node(id).display());
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        std::thread::sleep(CHECK_EVERY);
    }
    Ok((service, threads))
}

/// Opens a port as soon as it is there, and the old server has closed it.
fn open_port(path: &Path, memory_bytes: usize, recovery_time_max: Duration) -> Result<BusePort> {
    let began = Instant::now();
    loop {
        let error = match BusePort::open(path, memory_bytes) {
            Ok(port) => return Ok(port),
            Err(error) => error,
        };
        let time_max = match error.kind() {
            std::io::ErrorKind::ResourceBusy => recovery_time_max,
            std::io::ErrorKind::NotFound => NODE_TIME_MAX,
            _ => Duration::ZERO,
        };
        if began.elapsed() >= time_max {
            return Err(failed(&format!("cannot open {}", path.display()), error));
        }
        std::thread::sleep(CHECK_EVERY);
    }
}

impl BuseState {
    fn service(&self) -> Result<Arc<Service>> {
        let running = self.running.lock();
        let closed = || {
            let text = format!("{DOOR}: device {} is not served", self.config.id);
            Error::new(ErrorKind::Closed, text)
        };
        running.as_ref().map(|running| Arc::clone(&running.service)).ok_or_else(closed)
    }

    pub(super) fn counts(&self) -> DoorCounts {
        self.service().map_or_else(|_| *self.past.lock(), |service| service.gate.counts())
    }

    pub(super) fn quiesce(&self, patience: Duration) -> Result<()> {
        let (service, id) = (self.service()?, self.config.id);
        service.rest();
        match service.gate.wait_quiet(patience) {
            Quiet::Yes => Ok(()),
            Quiet::Ended => {
                let text = format!("{DOOR}: device {id} is gone");
                Err(Error::new(ErrorKind::Closed, text))
            }
            Quiet::TooLate => {
                service.gate.serve();
                let text =
                    format!("{DOOR}: requests of device {id} were not answered in {patience:?}");
                Err(Error::new(ErrorKind::Unavailable, text))
            }
        }
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.service().is_ok_and(|service| service.gate.is_quiet())
    }

    pub(super) fn resume(&self) {
        if let Ok(service) = self.service() {
            service.gate.serve();
        }
    }

    pub(super) fn resized(&self) -> Result<()> {
        let service = self.service()?;
        if !self.is_there() {
            let text = format!("{DOOR}: device {} is gone", self.config.id);
            return Err(Error::new(ErrorKind::Closed, text));
        }
        self.config.set("size", size_bytes(&service.device.geometry()))
    }

    /// Whether the number still is that of our device.
    fn is_there(&self) -> bool {
        self.instance.is_some() && self.config.instance() == self.instance
    }

    /// Takes the state while serving, once. From then on nothing lets the device rest.
    fn end(&self) -> Option<Running> {
        let mut running = self.running.lock();
        let ended = running.take()?;
        *self.past.lock() =
            DoorCounts { connections: 0, in_flight: 0, ..ended.service.gate.counts() };
        Some(ended)
    }

    /// Leaves the device to the next server.
    pub(super) fn leave(&self) {
        if let Some(running) = self.end() {
            drop(running.end());
        }
    }

    /// Ends the device. What the kernel has of it is written first, while a server that comes after
    /// the death of this one would still get it: once the power goes off, none would.
    pub(super) fn stop(&self) {
        let Some(running) = self.end() else { return };
        running.service.gate.finish();
        let id = self.config.id;
        let is_there = self.is_there();
        let service = &running.service;
        if is_there && node(id).exists() {
            sync(&node(id), service);
        }
        let is_closed = self.options.recoverable && service.is_device_closed();
        if is_closed && service.gate.abandon() || !service.gate.power_off() {
            tracing::warn!(id, "buse: completed writes wait in the kernel for the next server");
            return drop(running.end());
        }
        let (folder, symlink) = (&self.options.symlink_folder, self.options.symlink.as_deref());
        if is_there {
            remove_symlink(folder, symlink, &node(id));
        }
        // The kernel would wait for a port without a thread; it does not for one that is closed.
        if !service.gate.has_failed() {
            self.switch_off();
        }
        self.remove(running.end());
    }

    /// Returns when the last chunk is acknowledged.
    fn switch_off(&self) {
        if self.is_there()
            && let Err(error) = self.config.set("power", 0)
            && self.config.text("state").is_ok_and(|state| state != "off")
        {
            tracing::warn!(%error, id = self.config.id, "buse: cannot switch the power off");
        }
    }

    fn remove(&self, device_lock: DeviceLock) {
        if self.is_there() {
            self.config.remove();
        }
        // Last: who gets the lock finds the number free.
        device_lock.remove();
    }
}

impl Running {
    /// Ends the threads and closes the ports.
    fn end(self) -> DeviceLock {
        self.service.leave();
        self.threads.into_iter().for_each(|thread| drop(thread.join()));
        // The ports first: whoever gets the lock finds them closed.
        drop(self.service);
        self.device_lock
    }
}

/// Writes what the kernel caches of a disk, and flushes the disk. In a process of its own: a thread
/// that waits for its own process's answers could not die, and its ports would stay open.
fn sync(node: &Path, service: &Service) {
    let outcome = std::process::Command::new("sync").arg(node).stdin(Stdio::null()).spawn();
    let ended = outcome.and_then(|mut child| {
        loop {
            match child.try_wait()? {
                Some(status) => return Ok(status.success()),
                // It waits for the next server, too.
                None if service.gate.is_abandoned() => return Ok(true),
                None => std::thread::sleep(SYNC_CHECK_EVERY),
            }
        }
    });
    if !ended.as_ref().is_ok_and(|is_done| *is_done) {
        tracing::warn!(?ended, node = %node.display(), "buse: cannot write what is cached");
    }
}
