//! Devices under test: what is started on a recording disk, and again on what a crash left of it.
//!
//! Modules: `in_process` (our own devices, served from here), `command_line` (anybody's server, by
//! its command line), `sawmill` (this product's own binary, with a store beside its disk).
//!
//! Not here: where power fails (`plan`, `cut`), who judges what came back (`look`).

mod command_line;
mod in_process;
mod sawmill;

use std::path::Path;
use std::sync::Arc;

use sawmill_device::MemoryDevice;

use crate::Result;
use crate::cut::Cut;
use crate::image::Image;
use crate::nbd::Client;
use crate::recorder::Recorder;

pub use command_line::CommandLine;
pub use in_process::{InProcess, Make};
pub use sawmill::Sawmill;

/// The disk that a device under test works on while it is recorded.
pub type RecordedDisk = Arc<Recorder<MemoryDevice>>;

/// A way in which a device can come back after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// Its disk as the cut left it.
    DiskKept,
    /// Without its disk.
    DiskLost,
    /// With its disk as it was at an earlier cut.
    DiskStale,
    /// On another machine, for reading only.
    Elsewhere,
}

impl Way {
    /// Its name on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Way::DiskKept => "kept",
            Way::DiskLost => "lost",
            Way::DiskStale => "stale",
            Way::Elsewhere => "elsewhere",
        }
    }
}

impl std::str::FromStr for Way {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ways = [Way::DiskKept, Way::DiskLost, Way::DiskStale, Way::Elsewhere];
        let found = ways.into_iter().find(|way| way.name() == text);
        found.ok_or_else(|| format!("unknown way '{text}': use kept, lost, stale or elsewhere"))
    }
}

/// What a crash left.
#[derive(Clone, Copy, Debug)]
pub struct Remains<'a> {
    /// Where it struck.
    pub cut: &'a Cut,
    /// The disk; of [`Way::DiskStale`] the older one.
    pub disk: &'a Image,
    /// How the device comes back.
    pub way: Way,
}

/// A device that runs. Dropped, it is killed.
pub trait Running {
    /// Where it serves.
    fn uri(&self) -> &str;
    /// The first connection to it; made when it was started.
    fn client(&mut self) -> Result<Client>;
    /// Ends it in order.
    fn stop(self: Box<Self>) -> Result<()>;
    /// Waits until what it has accepted survives the loss of its disk; false: it has no such
    /// promise.
    fn settle(&mut self) -> Result<bool> {
        Ok(false)
    }
}

/// How a device came back.
pub enum Revived {
    /// It serves.
    Serving(Box<dyn Running>),
    /// It refused to serve, and said why.
    Refused(String),
}

/// A device under test.
pub trait Subject {
    /// What it is, for reports and for the command that repeats a finding.
    fn describe(&self) -> String;
    /// What its disk holds before it is recorded: zeroes, where it does not care.
    fn prepare(&self, disk_bytes: u64, _folder: &Path) -> Result<Image> {
        Ok(Image::new(disk_bytes))
    }
    /// Starts it on a recording disk.
    fn start(&self, disk: RecordedDisk, folder: &Path) -> Result<Box<dyn Running>>;
    /// Starts it on what a crash left.
    fn revive(&self, remains: &Remains<'_>, folder: &Path) -> Result<Revived>;
    /// The ways in which it can come back.
    fn ways(&self) -> &[Way] {
        &[Way::DiskKept]
    }

    /// Whether what is flushed survives the loss of its disk too.
    fn flushes_survive_its_disk(&self) -> bool {
        false
    }
}
