//! Device nodes through the kernel's ublk driver, one for each volume.
//!
//! Invariant: if a dead server left a device of the volume, whose users wait, that device is taken
//! over and no new one is made. Not here: the protocol, and the devices of other volumes (`sawmill
//! device`).

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_frontend::DoorPiece;
use sawmill_frontend::ublk::{self, DeviceState, UblkDoor, UblkOptions, UblkWorkers};

use super::kind::{DoorInstance, DoorKind, RequestedDoor, hold_memory};
use super::{DoorContext, DoorVolume};

/// What the kernel's driver shows while it is loaded.
const CONTROL: &str = "/dev/ublk-control";

/// The folder in a user's state folder with the facts of ublk devices that are served without
/// privileges.
pub const UNPRIVILEGED_FOLDER: &str = "ublk";

pub(super) const KIND: DoorKind = DoorKind {
    keywords: &["ublk", UNPRIVILEGED],
    forms: &["ublk", "ublk=ID"],
    examples: &["ublk", "ublk=3"],
    parse,
};

const UNPRIVILEGED: &str = "ublk-unprivileged";

fn parse(keyword: &str, value: &str) -> Result<Box<dyn RequestedDoor>> {
    let number =
        |_| Error::new(ErrorKind::Invalid, format!("'{value}' is not a ublk device number"));
    let id = if value.is_empty() { None } else { Some(value.parse().map_err(number)?) };
    let plan = UblkPlan::new(id);
    Ok(Box::new(if keyword == UNPRIVILEGED { plan.unprivileged() } else { plan }))
}

/// `ublk`, `ublk=3`: a device node, with any number or this one.
#[derive(Clone)]
pub(super) struct UblkPlan {
    id: Option<u32>,
    /// `ublk-unprivileged...`: one that ends with its server.
    unprivileged: bool,
}

impl fmt::Display for UblkPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.unprivileged { UNPRIVILEGED } else { "ublk" })?;
        self.id.map_or(Ok(()), |id| write!(f, "={id}"))
    }
}

impl RequestedDoor for UblkPlan {
    fn check(&self, volumes: usize) -> Result<()> {
        if volumes > 1 && self.id.is_some() {
            let text = format!(
                "--ublk=ID names one device, but there are {volumes} volumes; write --ublk"
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(())
    }

    fn check_free(&self) -> Result<()> {
        // The kernel tells `open` that a number is in use.
        Ok(())
    }

    fn of_volume(&self, _name: &str) -> Option<Box<dyn RequestedDoor>> {
        Some(Box::new(self.clone()))
    }

    /// A device with any number keeps the one that its users know.
    fn reopened_at(&self, address: &str) -> Option<Box<dyn RequestedDoor>> {
        let id = address.strip_prefix("/dev/ublkb").and_then(|number| number.parse().ok());
        // After a crash the users of the device wait for this number and no other.
        let id = self.id.or(id);
        Some(Box::new(UblkPlan { id, unprivileged: self.unprivileged }))
    }

    fn open(&self, context: &DoorContext<'_>) -> Result<DoorInstance> {
        hold_memory();
        let volume = context.only()?;
        let options = self.options(volume, context.workers()?);
        Ok(DoorInstance::new(open(options, volume, &context.shared.ublk_orphans)?))
    }

    fn take_over(&self, pieces: Vec<DoorPiece>, context: &DoorContext<'_>) -> Result<DoorInstance> {
        hold_memory();
        let volume = context.only()?;
        let piece = pieces
            .first()
            .ok_or_else(|| Error::new(ErrorKind::Invalid, "hand-off: a ublk device has no id"))?;
        let workers = context.workers().unwrap_or_else(|error| {
            // The users of the device wait: threads of its own serve them equally well.
            tracing::warn!("ublk: devices do not share threads: {error}");
            None
        });
        let options = self.options(volume, workers);
        let door = UblkDoor::recover(piece.parsed("id")?, options, volume.queue_device())?;
        Ok(DoorInstance::new(door))
    }
}

impl UblkPlan {
    pub(super) fn new(id: Option<u32>) -> Self {
        UblkPlan { id, unprivileged: false }
    }

    pub(super) fn unprivileged(self) -> Self {
        UblkPlan { unprivileged: true, ..self }
    }

    fn options(&self, volume: &DoorVolume, workers: Option<UblkWorkers>) -> UblkOptions {
        let options = UblkOptions {
            id: self.id,
            symlink: Some(volume.file_name()),
            workers,
            queues: volume.queues.as_ref().map(|queues| queues.count),
            recoverable: volume.outlives_server,
            ..UblkOptions::new(&volume.identity)
        };
        if !self.unprivileged {
            return options;
        }
        UblkOptions {
            unprivileged: true,
            // Only root can make symbolic links in /dev.
            symlink: None,
            // Each request that may be in flight has a buffer.
            queue_depth: 32,
            request_bytes_max: 256 << 10,
            run_folder: volume.folder.with_file_name(UNPRIVILEGED_FOLDER),
            ..options
        }
    }
}

/// Fails if this process cannot serve ublk devices: no driver in the kernel, or no right to it.
pub fn require_driver() -> Result<()> {
    ublk::devices(&UblkOptions::new("any").run_folder).map(drop)
}

/// Whether a device of this identity ([`DoorVolume::identity`]) waits for its next server.
///
/// # Errors
/// It is unknown then: this is no sign that there is none.
pub(super) fn waits(identity: &str) -> Result<bool> {
    let options = UblkOptions::new(identity);
    let devices = match ublk::devices(&options.run_folder) {
        Ok(devices) => devices,
        // Who may not ask can neither have made one that waits nor serve it.
        Err(error) if error.kind() == ErrorKind::Denied => return Ok(false),
        Err(_) if !Path::new(CONTROL).exists() => return Ok(false),
        Err(error) => return Err(error),
    };
    Ok(devices.iter().any(|device| {
        device.is_orphan() && device.state != DeviceState::Dead && device.is_for(&options.volume)
    }))
}

/// Opens a device for a volume: the one that a dead server left, whose users wait, or a new one.
/// Removes the remains of devices that are unusable.
fn open(options: UblkOptions, volume: &DoorVolume, orphans: &Orphans) -> Result<UblkDoor> {
    for found in &*orphans.listed(&options)? {
        if found.state == DeviceState::Dead {
            tracing::info!(id = found.id, "ublk: removing the remains of a dead device");
            // Another server may have removed it first.
            let _ = ublk::delete(&options.run_folder, &options.symlink_folder, found.id);
        } else if !options.unprivileged
            && options.recoverable
            && found.is_for(&options.volume)
            && options.id.is_none_or(|id| id == found.id)
        {
            return UblkDoor::recover(found.id, options, volume.queue_device());
        }
    }
    UblkDoor::start(options, volume.queue_device())
}

impl DoorContext<'_> {
    /// The threads that all devices share, if this process has many.
    fn workers(&self) -> Result<Option<UblkWorkers>> {
        self.shared.ublk_workers.for_volumes(self.volumes_in_process)
    }
}

/// Threads that serve the queues of many devices. A few devices have threads of their own.
#[derive(Default)]
pub(super) struct Workers(Mutex<Option<UblkWorkers>>);

impl Workers {
    /// From this number of volumes on, the devices of a process share threads.
    const VOLUMES_MIN: usize = 9;
    /// More threads than this do not help.
    const THREADS_MAX: usize = 32;

    /// The threads, which start if a process serves this many volumes.
    fn for_volumes(&self, volumes: usize) -> Result<Option<UblkWorkers>> {
        // Held through the start: doors are taken over in parallel and must share one set.
        let mut workers = self.0.lock();
        if workers.is_none() && volumes >= Self::VOLUMES_MIN {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            *workers = Some(UblkWorkers::start(cores.min(Self::THREADS_MAX))?);
        }
        Ok(workers.clone())
    }
}

/// Devices without a server, looked up once for all volumes of a command, which may be hundreds.
#[derive(Default)]
pub(super) struct Orphans(Mutex<Option<Arc<[ublk::DeviceInfo]>>>);

impl Orphans {
    /// The next command looks again.
    pub(super) fn forget(&self) {
        *self.0.lock() = None;
    }

    fn listed(&self, options: &UblkOptions) -> Result<Arc<[ublk::DeviceInfo]>> {
        let mut list = self.0.lock();
        // Listing asks the kernel about every device, so the volumes of one command share the list.
        if let Some(list) = &*list {
            return Ok(Arc::clone(list));
        }
        let all = ublk::devices(&options.run_folder)?;
        let orphans = all.into_iter().filter(ublk::DeviceInfo::is_orphan).collect();
        Ok(Arc::clone(list.insert(orphans)))
    }
}
