//! A ublk device as a door: the interface that all doors have.
//!
//! Invariant: a device is handed over only while it is quiet. Not here: making and removing a
//! device (`server`), what its successor gets (`hand_over`).

use std::sync::Arc;
use std::time::Duration;

use sawmill_device::Result;

use super::hand_over;
use super::server::{UblkDoor, UblkState};
use crate::{Door, DoorCounts, DoorPiece, ExportStatus, QuietDoor, Stop};

impl Door for UblkDoor {
    fn kind(&self) -> &'static str {
        "ublk"
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
        Ok(Box::new(QuietUblkDoor(Arc::clone(&self.shared))))
    }

    fn resized(&self) -> Result<()> {
        self.resize()
    }

    /// [`Stop::Drained`] writes what the kernel has cached of the node. A file system that is still
    /// mounted on it fails from now on. With [`Stop::Now`] the device vanishes when its requests in
    /// flight are answered; this does not wait for that.
    fn stop(&self, how: Stop) {
        match how {
            Stop::Drained => self.shared.stop(),
            Stop::Now => self.stop_now(),
        }
    }
}

/// A device whose queues rest.
struct QuietUblkDoor(Arc<UblkState>);

impl QuietDoor for QuietUblkDoor {
    /// One piece, `device`, with the facts `id` and `volume`: for [`UblkDoor::recover`]. No
    /// descriptors, because the kernel keeps the device.
    fn hand_over(&self) -> Result<Vec<DoorPiece>> {
        hand_over::pieces(&self.0)
    }

    /// With shared threads, the kernel notices this when all devices of a thread were released, or
    /// this process has exited.
    fn release(self: Box<Self>) {
        let id = self.0.id;
        if !*self.0.is_quiet.lock() {
            tracing::warn!(id, "ublk: releasing a device that is not quiet; waiting for it");
            let _ = self.0.quiesce(Duration::MAX);
        }
        if let Some(serving) = self.0.end() {
            serving.leave();
        }
    }

    fn resume(self: Box<Self>) {
        self.0.resume();
    }
}
