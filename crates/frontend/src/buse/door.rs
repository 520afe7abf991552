//! A BUSE device as a door: the interface that all doors have.
//!
//! Invariant: a device is handed over only while it is quiet. Not here: making and removing a
//! device (`server`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{Error, ErrorKind, Result};

use super::DOOR;
use super::server::{BuseDoor, BuseState};
use crate::{Door, DoorCounts, DoorPiece, ExportStatus, QuietDoor, Stop};

impl Door for BuseDoor {
    fn kind(&self) -> &'static str {
        DOOR
    }

    fn address(&self) -> String {
        self.node().display().to_string()
    }

    fn export(&self, _name: &str) -> ExportStatus {
        ExportStatus { address: self.address(), peers: Vec::new() }
    }

    fn counts(&self) -> DoorCounts {
        self.shared.counts()
    }

    fn quiesce(&self, patience: Duration) -> Result<Box<dyn QuietDoor>> {
        self.shared.quiesce(patience)?;
        Ok(Box::new(QuietBuseDoor(Arc::clone(&self.shared))))
    }

    fn resized(&self) -> Result<()> {
        self.shared.resized()
    }

    /// [`Stop::Drained`] writes what the kernel has cached of the node, and returns when all chunks
    /// are done. A file system that is still mounted on it fails from now on. With [`Stop::Now`]
    /// the same happens on another thread.
    fn stop(&self, how: Stop) {
        match how {
            Stop::Drained => self.shared.stop(),
            Stop::Now => self.stop_now(),
        }
    }
}

/// A device whose threads rest.
struct QuietBuseDoor(Arc<BuseState>);

impl QuietDoor for QuietBuseDoor {
    /// One piece, `device`, with the facts `id` and `volume`: for [`BuseDoor::recover`]. No
    /// descriptors, because the kernel keeps the device, and its ports have one user at a time.
    fn hand_over(&self) -> Result<Vec<DoorPiece>> {
        let id = self.0.config.id;
        if !self.0.is_quiet() {
            let text = format!("{DOOR}: device {id} is not quiet");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if !self.0.options.recoverable {
            let text = format!("{DOOR}: device {id} ends with its server");
            return Err(Error::new(ErrorKind::Refused, text));
        }
        let facts = BTreeMap::from([
            ("id".to_owned(), id.to_string()),
            ("volume".to_owned(), self.0.options.volume.clone()),
        ]);
        Ok(vec![DoorPiece { what: "device".to_owned(), facts, ..DoorPiece::default() }])
    }

    fn release(self: Box<Self>) {
        if !self.0.is_quiet() {
            let id = self.0.config.id;
            tracing::warn!(id, "buse: releasing a device that is not quiet; waiting for it");
            let _ = self.0.quiesce(Duration::MAX);
        }
        self.0.leave();
    }

    fn resume(self: Box<Self>) {
        self.0.resume();
    }
}
