//! Files through FUSE, one mount for each volume, and loop devices on them.
//!
//! Invariant: one process at a time serves the mount of a volume, because its mount holder serves
//! one: the holder of the door's claim. Not here: the protocol, and the mount holder.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_format::crc::crc32c;
use sawmill_frontend::DoorPiece;
use sawmill_frontend::fuse::{FuseDoor, FuseOptions, MountHolderOptions};
use sawmill_sys::FileLock;

use super::kind::{
    DoorInstance, DoorKind, RequestedDoor, absolute, cannot_make, hold_memory, make_parent,
};
use super::{DoorContext, DoorVolume};

pub(super) const KIND: DoorKind = DoorKind {
    keywords: &["fuse", "loop"],
    forms: &["fuse=FOLDER", "loop=FOLDER"],
    examples: &["fuse=/folder", "loop=/folder"],
    parse,
};

fn parse(keyword: &str, value: &str) -> Result<Box<dyn RequestedDoor>> {
    match value {
        "" => Err(Error::new(ErrorKind::Invalid, format!("the door '{keyword}' needs a path"))),
        path => {
            let plan = FusePlan::new(Path::new(path));
            Ok(Box::new(if keyword == "loop" { plan.and_loop() } else { plan }))
        }
    }
}

/// `fuse=/mountpoint`: a file; `loop=/mountpoint`: a file and a loop device on it.
pub(super) struct FusePlan {
    mountpoint: PathBuf,
    with_loop: bool,
}

impl fmt::Display for FusePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keyword = if self.with_loop { "loop" } else { "fuse" };
        write!(f, "{keyword}={}", self.mountpoint.display())
    }
}

impl RequestedDoor for FusePlan {
    fn check(&self, _volumes: usize) -> Result<()> {
        Ok(())
    }

    fn check_free(&self) -> Result<()> {
        // Only a mount finds out: `open`.
        Ok(())
    }

    fn of_volume(&self, name: &str) -> Option<Box<dyn RequestedDoor>> {
        let mountpoint = self.mountpoint.join(name);
        Some(Box::new(FusePlan { mountpoint, with_loop: self.with_loop }))
    }

    fn reopened_at(&self, _address: &str) -> Option<Box<dyn RequestedDoor>> {
        None
    }

    fn open(&self, context: &DoorContext<'_>) -> Result<DoorInstance> {
        make_mountpoint(&self.mountpoint)?;
        if self.with_loop {
            hold_memory();
        }
        let volume = context.only()?;
        // Before the mount: the holder of a mount serves one process only.
        let claim = self.claim(volume)?;
        let options = self.options(volume, context)?;
        let door = FuseDoor::mount(options, Arc::clone(&volume.device))?;
        Ok(DoorInstance { claim: Some(claim), ..DoorInstance::new(door) })
    }

    fn take_over(&self, pieces: Vec<DoorPiece>, context: &DoorContext<'_>) -> Result<DoorInstance> {
        if self.with_loop {
            hold_memory();
        }
        let volume = context.only()?;
        let claim = self.claim(volume)?;
        let device = Arc::clone(&volume.device);
        let door = FuseDoor::take_over(self.options(volume, context)?, device, pieces)?;
        Ok(DoorInstance { claim: Some(claim), ..DoorInstance::new(door) })
    }
}

impl FusePlan {
    pub(super) fn new(mountpoint: &Path) -> Self {
        FusePlan { mountpoint: absolute(mountpoint), with_loop: false }
    }

    pub(super) fn and_loop(self) -> Self {
        FusePlan { with_loop: true, ..self }
    }

    fn options(&self, volume: &DoorVolume, context: &DoorContext<'_>) -> Result<FuseOptions> {
        // Users may wait for the next server only if it can have everything that was answered.
        let command = context.shared.mount_holder.filter(|_| volume.outlives_server);
        let mount_holder = match command {
            Some(command) => {
                let socket = self.holder_socket(volume);
                Some(MountHolderOptions { socket, command: command()? })
            }
            None => None,
        };
        let options = FuseOptions::new(&self.mountpoint, volume.file_name());
        Ok(FuseOptions { attach_loop: self.with_loop, mount_holder, ..options })
    }

    /// The socket of the mount holder: one for each mount of the volume.
    fn holder_socket(&self, volume: &DoorVolume) -> PathBuf {
        // The name differs from those of control sockets. It keeps an older word for a holder: a
        // holder outlives its server, and the next one, of any version, must find its socket and
        // its lock.
        let name = format!("keeper-{:08x}", crc32c(self.mountpoint.as_os_str().as_bytes()));
        volume.folder.join(name)
    }

    /// Locks this mount of the volume.
    fn claim(&self, volume: &DoorVolume) -> Result<FileLock> {
        FileLock::of_name(&self.holder_socket(volume)).map_err(|error| {
            let (kind, what) = match error.kind() {
                std::io::ErrorKind::WouldBlock => (ErrorKind::InUse, "is served already".into()),
                _ => (ErrorKind::of_io(&error), format!("cannot be locked: {error}")),
            };
            let mountpoint = self.mountpoint.display();
            Error::new(kind, format!("fuse: {mountpoint} of volume {} {what}", volume.name))
                .with_source(error)
        })
    }
}

/// Creates the folder of a mount if it does not exist. An existing folder is not touched: it may be
/// a mount that waits for this process.
fn make_mountpoint(path: &Path) -> Result<()> {
    make_parent(path)?;
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(cannot_make(path, error))
        }
        _ => Ok(()),
    }
}
