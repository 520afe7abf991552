//! The plan of a `serve`: which volumes, with which journals and cache, behind which doors.
//!
//! Not here: making a plan from options (`command`), and carrying it out (`wiring`).

use std::path::PathBuf;

use sawmill_doors::{DoorPlan, NbdShare};
use sawmill_volume::OpenOptions;

use crate::config::{Paths, VolumeAddress};
use crate::sizes::JournalSize;
use sawmill_console::exit::Result;

/// The read cache to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CachePlan {
    /// No cache.
    None,
    /// This file or device only.
    At(PathBuf),
    /// The user's cache, or the next one that no other process holds.
    Default(PathBuf),
}

/// What to serve and how.
#[derive(Clone)]
pub(crate) struct ServePlan {
    pub(crate) volumes: Vec<VolumeAddress>,
    /// The place of the journals.
    pub(crate) journal: JournalPlan,
    pub(crate) journal_size: JournalSize,
    /// All other options of opening a volume; each volume's journal and its size are added.
    pub(crate) options: OpenOptions,
    pub(crate) cache: CachePlan,
    /// As the user requested; `None`: determined by the disk.
    pub(crate) cache_bytes: Option<u64>,
    /// How much of its boot set a volume fetches when it is open; 0: nothing.
    pub(crate) boot_set_bytes: u64,
    pub(crate) doors: Vec<DoorPlan>,
    pub(crate) nbd: NbdShare,
    pub(crate) admin: Option<std::net::SocketAddr>,
}

/// The place of the journals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum JournalPlan {
    /// In each volume's state folder.
    State,
    /// This file or device, for a single volume.
    At(PathBuf),
    /// In this folder, named by the volumes' ids.
    Folder(PathBuf),
}

impl JournalPlan {
    /// A path on the disk that the journals are on.
    pub(crate) fn place(&self, paths: &Paths) -> Result<PathBuf> {
        match self {
            JournalPlan::State => paths.state_folder(),
            JournalPlan::At(path) | JournalPlan::Folder(path) => Ok(path.clone()),
        }
    }

    /// The journal of one volume.
    pub(crate) fn path(&self, paths: &Paths, volume_id: &str, store_url: &str) -> Result<PathBuf> {
        match self {
            JournalPlan::State => Ok(paths.volume_folder(volume_id, store_url)?.join("journal")),
            JournalPlan::At(path) => Ok(path.clone()),
            JournalPlan::Folder(folder) => Ok(folder.join(format!("{volume_id}.journal"))),
        }
    }
}
