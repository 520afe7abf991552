//! What `serve` must do: which volumes, with which journals and cache, behind which doors.
//!
//! Not here: making a plan from options (`command`), and carrying it out (`wiring`).

use std::path::PathBuf;

use sawmill_frontend::nbd::Budget;
use sawmill_volume::OpenOptions;

use crate::config::{Places, VolumeAddress};
use crate::doors::plan::DoorPlan;
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
pub(crate) struct Plan {
    pub(crate) volumes: Vec<VolumeAddress>,
    /// The place of the journals.
    pub(crate) journal: JournalPlan,
    /// All other options of opening a volume; the journal path is added for each volume.
    pub(crate) options: OpenOptions,
    pub(crate) cache: CachePlan,
    pub(crate) cache_bytes: u64,
    pub(crate) doors: Vec<DoorPlan>,
    pub(crate) nbd_budget: Budget,
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
    /// The journal of one volume.
    pub(crate) fn path(
        &self,
        places: &Places,
        volume_id: &str,
        store_url: &str,
    ) -> Result<PathBuf> {
        match self {
            JournalPlan::State => Ok(places.volume_folder(volume_id, store_url)?.join("journal")),
            JournalPlan::At(path) => Ok(path.clone()),
            JournalPlan::Folder(folder) => Ok(folder.join(format!("{volume_id}.journal"))),
        }
    }
}
