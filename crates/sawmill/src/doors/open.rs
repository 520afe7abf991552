//! Opens each kind of door, new or from what another process handed over. This is the only place
//! that knows all kinds.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind};
use sawmill_format::crc::crc32c;
use sawmill_frontend::fuse::{FuseDoor, FuseOptions, MountHolderOptions};
use sawmill_frontend::nbd::{Budget, Export, Listen, NbdOptions, NbdServer};
use sawmill_frontend::ublk::{self, DeviceState, UblkDoor, UblkOptions, UblkWorkers};
use sawmill_frontend::vhost::{VhostDoor, VhostOptions};
use sawmill_frontend::{Door, Handed};
use sawmill_sys::FileLock;

use super::plan::DoorPlan;
use super::{OpenDoor, Shown};
use crate::config::UBLK_FOLDER;
use crate::folders::make_folder;
use sawmill_console::exit::{Failure, Result};

/// What the doors of one process share.
pub(super) struct Shared<'a> {
    pub(super) workers: &'a Workers,
    pub(super) nbd_budget: &'a Budget,
}

/// Opens a new door.
pub(super) fn open(
    plan: DoorPlan,
    volumes: &[Shown],
    shared: &Shared<'_>,
    orphans: &Orphans,
) -> Result<OpenDoor> {
    match &plan {
        DoorPlan::Nbd { listen, insecure } => {
            let nbd = open_nbd(nbd_options(listen, *insecure, shared), volumes)?;
            Ok(OpenDoor::new(plan, volumes, Arc::new(nbd)))
        }
        DoorPlan::Fuse { mountpoint, with_loop } => {
            make_mountpoint(mountpoint)?;
            if *with_loop {
                hold_memory();
            }
            let volume = only(volumes)?;
            let (options, claim) = fuse_options(mountpoint, *with_loop, volume)?;
            let door = FuseDoor::mount(options, Arc::clone(&volume.device))?;
            Ok(OpenDoor::new(plan, volumes, Arc::new(door)).with(claim))
        }
        DoorPlan::Ublk { id, unprivileged } => {
            let options = ublk_options(*id, *unprivileged, only(volumes)?, shared.workers);
            let door = open_ublk(options, only(volumes)?, orphans)?;
            Ok(OpenDoor::new(plan, volumes, Arc::new(door)))
        }
        DoorPlan::VhostUser { path } => {
            make_parent(path)?;
            let volume = only(volumes)?;
            let door = VhostDoor::start(vhost_options(path, volume), Arc::clone(&volume.device))?;
            Ok(OpenDoor::new(plan, volumes, Arc::new(door)))
        }
    }
}

/// Resumes a door of another process.
pub(super) fn take_over(
    plan: DoorPlan,
    volumes: &[Shown],
    pieces: Vec<Handed>,
    shared: &Shared<'_>,
) -> sawmill_device::Result<OpenDoor> {
    match &plan {
        DoorPlan::Nbd { listen, insecure } => {
            let options = nbd_options(listen, *insecure, shared);
            let exports = volumes.iter().map(export).collect();
            let nbd = NbdServer::take_over_quiet(options, exports, pieces)?;
            Ok(OpenDoor::new(plan, volumes, Arc::new(nbd)))
        }
        DoorPlan::Fuse { mountpoint, with_loop } => {
            let volume = only(volumes)?;
            let (options, claim) = fuse_options(mountpoint, *with_loop, volume)?;
            let door = FuseDoor::take_over(options, Arc::clone(&volume.device), pieces)?;
            Ok(OpenDoor::new(plan, volumes, Arc::new(door)).with(claim))
        }
        DoorPlan::Ublk { id, unprivileged } => {
            let volume = only(volumes)?;
            let piece = pieces.first().ok_or_else(|| {
                Error::new(ErrorKind::Invalid, "hand-off: a ublk device has no id")
            })?;
            let options = ublk_options(*id, *unprivileged, volume, shared.workers);
            let door = UblkDoor::recover(piece.parsed("id")?, options, Arc::clone(&volume.device))?;
            Ok(OpenDoor::new(plan, volumes, Arc::new(door)))
        }
        DoorPlan::VhostUser { path } => {
            let volume = only(volumes)?;
            let options = vhost_options(path, volume);
            let door = VhostDoor::take_over(options, Arc::clone(&volume.device), pieces)?;
            Ok(OpenDoor::new(plan, volumes, Arc::new(door)))
        }
    }
}

impl OpenDoor {
    fn new(plan: DoorPlan, volumes: &[Shown], door: Arc<dyn Door>) -> Self {
        let shows = volumes.iter().map(|volume| volume.name.clone()).collect();
        OpenDoor { plan, shows, door, claim: Mutex::default() }
    }

    fn with(self, claim: FileLock) -> Self {
        OpenDoor { claim: Mutex::new(Some(claim)), ..self }
    }
}

/// The volume of a door that serves exactly one.
fn only(volumes: &[Shown]) -> sawmill_device::Result<&Shown> {
    volumes.first().ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "this process does not serve the volume of this door")
    })
}

/// Threads that serve the queues of many ublk devices. A few devices have threads of their own.
#[derive(Default)]
pub(super) struct Workers(OnceLock<UblkWorkers>);

impl Workers {
    /// From this number of volumes on, the devices of a process share threads.
    const VOLUMES_MIN: usize = 9;
    /// More threads than this do not help.
    const THREADS_MAX: usize = 32;

    /// Starts the threads if a process serves this many volumes.
    pub(super) fn share_from(&self, volumes: usize) -> sawmill_device::Result<()> {
        if volumes < Self::VOLUMES_MIN || self.0.get().is_some() {
            return Ok(());
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // If another thread was first, its workers are as good.
        let _ = self.0.set(UblkWorkers::start(cores.min(Self::THREADS_MAX))?);
        Ok(())
    }
}

/// ublk devices without a server at the first request, looked up once for all volumes of a command,
/// which may be hundreds.
#[derive(Default)]
pub(super) struct Orphans(OnceLock<Vec<ublk::DeviceInfo>>);

impl Orphans {
    fn listed(&self, options: &UblkOptions) -> sawmill_device::Result<&[ublk::DeviceInfo]> {
        if self.0.get().is_none() {
            let all = ublk::devices(&options.run_folder)?;
            // If another thread was first, its list is as good.
            let _ = self.0.set(all.into_iter().filter(ublk::DeviceInfo::is_orphan).collect());
        }
        Ok(self.0.get().map_or(&[], Vec::as_slice))
    }
}

fn ublk_options(
    id: Option<u32>,
    unprivileged: bool,
    volume: &Shown,
    workers: &Workers,
) -> UblkOptions {
    let options = UblkOptions {
        id,
        link: Some(file_name(&volume.name)),
        workers: workers.0.get().cloned(),
        recoverable: volume.outlives_server,
        ..UblkOptions::new(&volume.identity)
    };
    if !unprivileged {
        return options;
    }
    UblkOptions {
        unprivileged,
        // Only root can make links in /dev.
        link: None,
        // Each request that may be in flight has a buffer.
        queue_depth: 32,
        request_bytes_max: 256 << 10,
        run_folder: volume.folder.with_file_name(UBLK_FOLDER),
        ..options
    }
}

/// Opens a device for a volume: the one that a dead server of it left, whose users wait, or a new
/// one. Removes the remains of devices that are unusable.
fn open_ublk(
    options: UblkOptions,
    volume: &Shown,
    orphans: &Orphans,
) -> sawmill_device::Result<UblkDoor> {
    hold_memory();
    for found in orphans.listed(&options)? {
        if found.state == DeviceState::Dead {
            tracing::info!(id = found.id, "ublk: removing the remains of a dead device");
            // Another server may have removed it first.
            let _ = ublk::delete(&options.run_folder, &options.link_folder, found.id);
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

/// A kernel that writes memory to a device of ours must not wait until our own memory is read back
/// in.
fn hold_memory() {
    if let Err(error) = sawmill_sys::reclaim::lock_memory() {
        tracing::warn!(
            "cannot lock memory, so the kernel may swap this process out to a disk that it serves: \
            {error}"
        );
    }
}

fn vhost_options(path: &Path, volume: &Shown) -> VhostOptions {
    VhostOptions { serial: volume.name.clone(), ..VhostOptions::new(path.to_path_buf()) }
}

/// Creates the folder of a mount if it does not exist. An existing folder is not touched: it may be
/// a mount that waits for this very process.
fn make_mountpoint(path: &Path) -> Result<()> {
    make_parent(path)?;
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(Failure::io(format!("cannot create the folder {}", path.display()), &error))
        }
        _ => Ok(()),
    }
}

/// Creates the folder of a socket.
fn make_parent(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.map_or(Ok(()), make_folder)
}

/// Also locks this mount of the volume: its mount holder serves one server at a time.
fn fuse_options(
    mountpoint: &Path,
    attach_loop: bool,
    volume: &Shown,
) -> sawmill_device::Result<(FuseOptions, FileLock)> {
    let own = crate::program::own().map_err(|error| {
        Error::caused(ErrorKind::Unavailable, "fuse: cannot find the sawmill program", error)
    })?;
    // The name differs from those of control sockets. There is one for each mount of the volume.
    let name = format!("keeper-{:08x}", crc32c(mountpoint.as_os_str().as_bytes()));
    let socket = volume.folder.join(name);
    let claim = FileLock::of_name(&socket).map_err(|error| {
        let (kind, what) = match error.kind() {
            std::io::ErrorKind::WouldBlock => (ErrorKind::InUse, "is served already".to_owned()),
            _ => (ErrorKind::Unavailable, format!("cannot be locked: {error}")),
        };
        Error::new(kind, format!("fuse: {} of volume {} {what}", mountpoint.display(), volume.name))
    })?;
    let mount_holder =
        MountHolderOptions { socket, command: vec![own.into(), crate::command::KEEP.into()] };
    let options = FuseOptions::new(mountpoint, file_name(&volume.name));
    let mount_holder = volume.outlives_server.then_some(mount_holder);
    Ok((FuseOptions { attach_loop, mount_holder, ..options }, claim))
}

/// A volume's name as a file name: names of past states have a colon, which some programs reject.
fn file_name(name: &str) -> String {
    name.replace(':', "-")
}

fn nbd_options(listen: &Listen, insecure_listen: bool, shared: &Shared<'_>) -> NbdOptions {
    NbdOptions {
        insecure_listen,
        budget: shared.nbd_budget.clone(),
        ..NbdOptions::new(listen.clone())
    }
}

fn export(volume: &Shown) -> Export {
    let Shown { name, description, device, .. } = volume.clone();
    Export { name, description, device }
}

fn open_nbd(options: NbdOptions, volumes: &[Shown]) -> Result<NbdServer> {
    if let Listen::Unix(path) = &options.listen {
        make_parent(path)?;
    }
    let nbd = NbdServer::start(options)?;
    for volume in volumes {
        nbd.add_export(export(volume))?;
    }
    Ok(nbd)
}
