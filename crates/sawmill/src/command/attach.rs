//! A volume opened for the time of one command: for writing, with the journal that `serve` would use, or for
//! reading, as a cut.
//!
//! Invariant: what a command accepted is in the store before it says that it is done.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{ObjectStore, StoreOptions};
use sawmill_volume::{OpenOptions, Volume, inspect};

use super::Context;
use crate::config::VolumeAddress;
use crate::exit::{Exit, Failure, Result};
use crate::units::parse_size;
use crate::{control, wiring};

/// How the volume is attached. The same as for `serve`, so that what a crash leaves is found again.
#[derive(Args)]
#[command(next_help_heading = "Attaching")]
pub(super) struct Attach {
    /// The journal: a file (made when absent) or a block device.
    #[arg(long, value_name = "PATH")]
    journal: Option<PathBuf>,

    /// Size of the journal when it is made. A journal made for this command alone is removed after it.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1G")]
    journal_bytes: u64,

    /// Folder in memory that outlives the process: holds accepted writes on their way to the journal.
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    staging: PathBuf,
}

/// A volume attached for writing.
pub(super) struct Attached {
    pub(super) volume: Arc<Volume>,
    name: String,
    /// The journal, if it was made for this.
    made: Option<PathBuf>,
}

impl Attach {
    /// Attaches for writing.
    pub(super) fn open(
        &self,
        context: &Context,
        address: &VolumeAddress,
        record: &VolumeRecord,
        no_fencing: bool,
    ) -> Result<Attached> {
        // Journals are their owner's alone.
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        let folder = context.places.volume_folder(&record.volume_id.to_string(), &address.store_url)?;
        refuse_served(&folder, &address.name)?;
        wiring::make_volume_folder(&folder, &address.store_url)?;
        let journal_path = self.journal.clone().unwrap_or_else(|| folder.join("journal"));
        let made = (!journal_path.exists()).then(|| journal_path.clone());
        let store = sawmill_store::open(&address.store_url, StoreOptions::default())?;
        let options = OpenOptions {
            journal_bytes: self.journal_bytes,
            staging_folder: self.staging.clone(),
            no_fencing,
            segment_age_max: Duration::from_secs(1),
            ..OpenOptions::new(journal_path)
        };
        let opened = Volume::open(store, &address.name, options).map_err(Failure::from);
        let volume = opened.map_err(|failure| failure.of_volume(&address.name))?;
        Ok(Attached { volume, name: address.name.clone(), made })
    }
}

impl Attached {
    /// Stores everything and lets the volume go.
    pub(super) fn close(self) -> Result<()> {
        let closed = self.volume.close().map_err(Failure::from);
        closed.map_err(|failure| failure.of_volume(&self.name))?;
        if let Some(path) = &self.made
            && let Err(error) = std::fs::remove_file(path)
        {
            // Everything is in the store: it is only in the way.
            tracing::warn!("the journal {} could not be removed: {error}", path.display());
        }
        Ok(())
    }
}

/// Refuses a volume that a process of this machine serves.
pub(super) fn refuse_served(folder: &std::path::Path, name: &str) -> Result<()> {
    match control::attached(folder)? {
        None => Ok(()),
        Some(served) => {
            let text = format!("volume {name} is served by process {}; stop that first", served.pid);
            Err(Failure::new(Exit::InUse, text))
        }
    }
}

/// Opens the newest cut of a volume for reading: all that its server, if it is on this machine, has accepted
/// by now, or all that is stored. `cut`: also when what is stored may lack what was accepted last.
pub(super) fn open_cut(
    context: &Context,
    address: &VolumeAddress,
    cut: bool,
) -> Result<(Arc<Volume>, VolumeRecord)> {
    let store = sawmill_store::open(&address.store_url, StoreOptions::default())?;
    let record = sawmill_volume::find(&*store, &address.name)?;
    let folder = context.places.volume_folder(&record.volume_id.to_string(), &address.store_url)?;
    match control::attached(&folder)?.and_then(|process| process.volumes.into_iter().next()) {
        Some(volume) if !volume.read_only => {
            control::wait(&folder, &address.name, "stored", None)?;
        }
        _ if cut => {}
        _ => demand_clean(&*store, address, &record)?,
    }
    let options = OpenOptions { read_only: true, ..OpenOptions::new(PathBuf::new()) };
    let volume = Volume::open(store, &address.name, options).map_err(Failure::from);
    Ok((volume.map_err(|failure| failure.of_volume(&address.name))?, record))
}

fn demand_clean(store: &dyn ObjectStore, address: &VolumeAddress, record: &VolumeRecord) -> Result<()> {
    if inspect::at_rest(store, record)?.clean {
        return Ok(());
    }
    let text = format!(
        "volume {} was not closed in order, or another machine serves it: the newest writes may be in a \
         journal and not in its store; serve it and stop it where its journal is, or pass --cut to take \
         what is stored",
        address.name
    );
    Err(Failure::new(Exit::Refused, text))
}
