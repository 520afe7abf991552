//! Device nodes through the kernel's ublk driver, one for each volume.
//!
//! Invariant: if a dead server left a device of the volume, whose users wait, that device is taken
//! over and no new one is made. Not here: the protocol, and the devices of other volumes (`sawmill
//! device`).

use std::fmt;
use std::sync::Arc;

use clap::{ArgMatches, Args, FromArgMatches};
use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind};
use sawmill_frontend::DoorPiece;
use sawmill_frontend::ublk::{self, DeviceState, UblkDoor, UblkOptions, UblkWorkers};

use super::kind::{
    DoorInstance, DoorKind, PlanResult, RequestedDoor, Trial, hold_memory, open_file,
};
use super::{DoorContext, DoorVolume};
use crate::config::UBLK_FOLDER;
use sawmill_console::exit::{Failure, Result};

pub(super) const KIND: DoorKind = DoorKind {
    keywords: &["ublk", UNPRIVILEGED],
    forms: &["ublk", "ublk=ID"],
    examples: &["ublk", "ublk=3"],
    parse,
    add_options: Options::augment_args,
    requested,
    trials: &[Trial {
        name: "ublk",
        help: "A ublk device (needs privileges and the kernel module ublk_drv)",
        line: |_| "ublk".to_owned(),
        connect: open_file,
        kernel_checks: true,
    }],
};

const UNPRIVILEGED: &str = "ublk-unprivileged";

#[derive(Args)]
#[group(skip)]
struct Options {
    /// A device node /dev/ublkbID (Linux 6.5 and later, module ublk_drv); --ublk=ID selects the
    /// number.
    #[arg(
        long, value_name = "ID", num_args = 0..=1, require_equals = true,
        default_missing_value = "any",
        value_parser = parse_id
    )]
    ublk: Option<DeviceId>,

    /// With --ublk: a device that an unprivileged user may serve. It ends with its server, and its
    /// users then get errors: no restart, no hand-off.
    #[arg(long, requires = "ublk")]
    ublk_unprivileged: bool,
}

/// The number in `--ublk`.
#[derive(Clone, Copy, Debug)]
struct DeviceId(Option<u32>);

fn parse_id(text: &str) -> Result<DeviceId, String> {
    match text {
        "any" => Ok(DeviceId(None)),
        number => match number.parse() {
            Ok(id) => Ok(DeviceId(Some(id))),
            Err(_) => {
                Err(format!("'{text}' is not a ublk device number; write --ublk or --ublk=3"))
            }
        },
    }
}

fn requested(matches: &ArgMatches) -> PlanResult {
    let Options { ublk, ublk_unprivileged: unprivileged } = Options::from_arg_matches(matches)?;
    Ok(ublk.map(|DeviceId(id)| Box::new(UblkPlan { id, unprivileged }) as Box<dyn RequestedDoor>))
}

fn parse(keyword: &str, value: &str) -> Result<Box<dyn RequestedDoor>> {
    let number = |_| Failure::usage(format!("'{value}' is not a ublk device number"));
    let id = if value.is_empty() { None } else { Some(value.parse().map_err(number)?) };
    Ok(Box::new(UblkPlan { id, unprivileged: keyword == UNPRIVILEGED }))
}

/// `ublk`, `ublk=3`: a device node, with any number or this one.
#[derive(Clone)]
struct UblkPlan {
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
            return Err(Failure::usage(format!(
                "--ublk=ID names one device, but there are {volumes} volumes; write --ublk"
            )));
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

    fn take_over(
        &self,
        pieces: Vec<DoorPiece>,
        context: &DoorContext<'_>,
    ) -> sawmill_device::Result<DoorInstance> {
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
        let door = UblkDoor::recover(piece.parsed("id")?, options, Arc::clone(&volume.device))?;
        Ok(DoorInstance::new(door))
    }
}

impl UblkPlan {
    fn options(&self, volume: &DoorVolume, workers: Option<UblkWorkers>) -> UblkOptions {
        let options = UblkOptions {
            id: self.id,
            symlink: Some(volume.file_name()),
            workers,
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
            run_folder: volume.folder.with_file_name(UBLK_FOLDER),
            ..options
        }
    }
}

/// Opens a device for a volume: the one that a dead server left, whose users wait, or a new one.
/// Removes the remains of devices that are unusable.
fn open(
    options: UblkOptions,
    volume: &DoorVolume,
    orphans: &Orphans,
) -> sawmill_device::Result<UblkDoor> {
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
            return UblkDoor::recover(found.id, options, Arc::clone(&volume.device));
        }
    }
    UblkDoor::start(options, Arc::clone(&volume.device))
}

impl DoorContext<'_> {
    /// The threads that all devices share, if this process has many.
    fn workers(&self) -> sawmill_device::Result<Option<UblkWorkers>> {
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
    fn for_volumes(&self, volumes: usize) -> sawmill_device::Result<Option<UblkWorkers>> {
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

    fn listed(&self, options: &UblkOptions) -> sawmill_device::Result<Arc<[ublk::DeviceInfo]>> {
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
