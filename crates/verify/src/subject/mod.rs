//! Devices under test: each is started on a recording disk, and again on the disk that a crash
//! left.
//!
//! Modules: `in_process` (our own devices, served from this process), `command_line` (any server,
//! by its command line), `sawmill` (this product's own binary, with a store beside its disk).
//!
//! Invariant: a device ends at the latest when its [`RunningDevice`] is dropped, before the disk
//! that it uses.
//!
//! Not here: the points at which power fails (`plan`, `power_cut`), the judging of a device that
//! came back (`cut_check`).

mod command_line;
mod in_process;
mod sawmill;

use std::path::Path;
use std::sync::Arc;

use sawmill_device::MemoryDevice;

use crate::Result;
use crate::image::Image;
use crate::nbd::Client;
use crate::power_cut::PowerCut;
use crate::recorder::Recorder;

pub use command_line::CommandLine;
pub use in_process::{DeviceFactory, InProcess};
pub use sawmill::Sawmill;

/// The disk that a device under test works on while it is recorded.
pub type RecordedDisk = Arc<Recorder<MemoryDevice>>;

/// A way in which a device can come back after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecoveryMode {
    /// With its disk as the cut left it.
    DiskKept,
    /// Without its disk, as after the loss of the machine.
    DiskLost,
    /// With its disk as it was at an earlier cut.
    DiskStale,
    /// On another machine, for reading only.
    Elsewhere,
}

impl RecoveryMode {
    /// Its name on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            RecoveryMode::DiskKept => "kept",
            RecoveryMode::DiskLost => "lost",
            RecoveryMode::DiskStale => "stale",
            RecoveryMode::Elsewhere => "elsewhere",
        }
    }
}

impl std::str::FromStr for RecoveryMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let modes = [
            RecoveryMode::DiskKept,
            RecoveryMode::DiskLost,
            RecoveryMode::DiskStale,
            RecoveryMode::Elsewhere,
        ];
        let mode = modes.into_iter().find(|mode| mode.name() == text);
        mode.ok_or_else(|| format!("unknown way '{text}': use kept, lost, stale or elsewhere"))
    }
}

/// The remains of a crash.
#[derive(Clone, Copy, Debug)]
pub struct Remains<'a> {
    /// Where power failed.
    pub cut: &'a PowerCut,
    /// The disk; for [`RecoveryMode::DiskStale`] the older one.
    pub disk: &'a Image,
    /// How the device comes back.
    pub mode: RecoveryMode,
}

/// A device that runs. It ends when dropped.
pub trait RunningDevice {
    /// The NBD URI at which it serves.
    fn uri(&self) -> &str;
    /// A connection to it; the first one may be the connection that was made at its start.
    fn client(&mut self) -> Result<Client>;
    /// Stops it cleanly; what it has not stored by then is its own affair.
    fn stop(self: Box<Self>) -> Result<()>;
    /// Waits until everything that it has accepted survives the loss of its disk. Returns false if
    /// it makes no such promise.
    fn settle(&mut self) -> Result<bool>;
}

/// The result of starting a device after a crash.
pub enum RestartResult {
    /// It serves, and can be read.
    Serving(Box<dyn RunningDevice>),
    /// It refused to serve, with the reason.
    Refused(String),
}

/// A device under test.
pub trait Subject {
    /// Its description, for reports and for the command that repeats a finding.
    fn describe(&self) -> String;
    /// The content of its disk before the recording.
    fn prepare(&self, disk_bytes: u64, folder: &Path) -> Result<Image>;
    /// Starts it on a recording disk.
    fn start(&self, disk: RecordedDisk, folder: &Path) -> Result<Box<dyn RunningDevice>>;
    /// Starts it on the remains of a crash.
    fn revive(&self, remains: &Remains<'_>, folder: &Path) -> Result<RestartResult>;
    /// The ways in which it can come back.
    fn modes(&self) -> &[RecoveryMode];
    /// Whether flushed data survives the loss of its disk too.
    fn flushes_survive_its_disk(&self) -> bool;
}
