//! vhost-user-blk sockets for virtual machines, one for each volume.
//!
//! Invariant: the path of a plan is absolute, because another process may open the door.
//!
//! Not here: the protocol (`sawmill_frontend::vhost`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_frontend::DoorPiece;
use sawmill_frontend::vhost::{VhostDoor, VhostOptions};

use super::kind::{DoorInstance, DoorKind, RequestedDoor, absolute, make_parent};
use super::{DoorContext, DoorVolume};

pub(super) const KIND: DoorKind = DoorKind {
    keywords: &["vhost-user"],
    forms: &["vhost-user=PATH"],
    examples: &["vhost-user=/path"],
    parse,
};

fn parse(keyword: &str, value: &str) -> Result<Box<dyn RequestedDoor>> {
    match value {
        "" => Err(Error::new(ErrorKind::Invalid, format!("the door '{keyword}' needs a path"))),
        path => Ok(Box::new(VhostPlan::new(Path::new(path)))),
    }
}

/// `vhost-user=/path`: a socket.
pub(super) struct VhostPlan {
    path: PathBuf,
}

impl VhostPlan {
    pub(super) fn new(path: &Path) -> Self {
        VhostPlan { path: absolute(path) }
    }

    fn options(&self, volume: &DoorVolume) -> VhostOptions {
        VhostOptions { serial: volume.name.clone(), ..VhostOptions::new(self.path.clone()) }
    }
}

impl fmt::Display for VhostPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vhost-user={}", self.path.display())
    }
}

impl RequestedDoor for VhostPlan {
    fn check(&self, _volumes: usize) -> Result<()> {
        Ok(())
    }

    fn check_free(&self) -> Result<()> {
        // A connection to find out would wait in the backlog behind the frontend: `open` finds it.
        Ok(())
    }

    fn of_volume(&self, name: &str) -> Option<Box<dyn RequestedDoor>> {
        Some(Box::new(VhostPlan { path: self.path.join(format!("{name}.sock")) }))
    }

    fn reopened_at(&self, _address: &str) -> Option<Box<dyn RequestedDoor>> {
        None
    }

    fn open(&self, context: &DoorContext<'_>) -> Result<DoorInstance> {
        make_parent(&self.path)?;
        let volume = context.only()?;
        let door = VhostDoor::start(self.options(volume), Arc::clone(&volume.device))?;
        Ok(DoorInstance::new(door))
    }

    fn take_over(&self, pieces: Vec<DoorPiece>, context: &DoorContext<'_>) -> Result<DoorInstance> {
        let volume = context.only()?;
        let device = Arc::clone(&volume.device);
        // It arrives quiet: its rings must not be read before the whole process resumes its doors.
        let (door, quiet) = VhostDoor::take_over(self.options(volume), device, pieces)?;
        Ok(DoorInstance { quiet: Some(quiet), ..DoorInstance::new(door) })
    }
}
