//! Device nodes through our own kernel module BUSE, one for each volume.
//!
//! Invariant: if a dead server left a device of the volume, whose users wait, that device is taken
//! over and no new one is made. Not here: the protocol, the module.

use std::fmt;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_frontend::DoorPiece;
use sawmill_frontend::buse::{self, BuseDoor, BuseOptions};

use super::kind::{DoorInstance, DoorKind, RequestedDoor, hold_memory};
use super::{DoorContext, DoorVolume};

pub(super) const KIND: DoorKind =
    DoorKind { keywords: &["buse"], forms: &["buse", "buse=ID"], examples: &["buse"], parse };

fn parse(_keyword: &str, value: &str) -> Result<Box<dyn RequestedDoor>> {
    let number =
        |_| Error::new(ErrorKind::Invalid, format!("'{value}' is not a BUSE device number"));
    let id = if value.is_empty() { None } else { Some(value.parse().map_err(number)?) };
    Ok(Box::new(BusePlan { id }))
}

/// `buse`, `buse=3`: a device node, with any number or this one.
#[derive(Clone)]
pub(super) struct BusePlan {
    id: Option<u32>,
}

impl fmt::Display for BusePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("buse")?;
        self.id.map_or(Ok(()), |id| write!(f, "={id}"))
    }
}

impl RequestedDoor for BusePlan {
    fn check(&self, volumes: usize) -> Result<()> {
        if volumes > 1 && self.id.is_some() {
            let text = format!(
                "--buse=ID names one device, but there are {volumes} volumes; write --buse"
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
        let id = address.strip_prefix("/dev/buse").and_then(|number| number.parse().ok());
        Some(Box::new(BusePlan { id: self.id.or(id) }))
    }

    fn open(&self, context: &DoorContext<'_>) -> Result<DoorInstance> {
        hold_memory();
        let volume = context.only()?;
        Ok(DoorInstance::new(BuseDoor::open(self.options(volume), volume.device.clone())?))
    }

    fn take_over(&self, pieces: Vec<DoorPiece>, context: &DoorContext<'_>) -> Result<DoorInstance> {
        hold_memory();
        let volume = context.only()?;
        let piece = pieces
            .first()
            .ok_or_else(|| Error::new(ErrorKind::Invalid, "hand-off: a BUSE device has no id"))?;
        let options = self.options(volume);
        let door = BuseDoor::recover(piece.parsed("id")?, options, volume.device.clone())?;
        Ok(DoorInstance::new(door))
    }
}

/// Whether a device of this identity ([`DoorVolume::identity`]) waits for its next server.
pub(super) fn waits(identity: &str) -> Result<bool> {
    match buse::waits(&BuseOptions::new(identity)) {
        // Who may not ask can neither have made one that waits nor serve it.
        Err(error) if error.kind() == ErrorKind::Denied => Ok(false),
        outcome => outcome,
    }
}

impl BusePlan {
    pub(super) fn new(id: Option<u32>) -> Self {
        BusePlan { id }
    }

    fn options(&self, volume: &DoorVolume) -> BuseOptions {
        BuseOptions {
            id: self.id,
            symlink: Some(volume.file_name()),
            recoverable: volume.outlives_server,
            ..BuseOptions::new(&volume.identity)
        }
    }
}
