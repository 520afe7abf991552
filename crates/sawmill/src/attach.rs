//! Opens a volume for the time of one command: for writing, with the journal that `serve` would
//! use, or for reading, as a cut.
//!
//! Invariants: before a command reports success, everything it wrote is in the store. A volume that
//! this machine serves is never attached a second time.
//!
//! Not here: attaching volumes to serve them (`wiring`), finding the process that serves one
//! (`control`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{ObjectStore, StoreOptions};
use sawmill_volume::{OpenOptions, Volume, inspect, limits};

use crate::config::{Paths, VolumeAddress};
use crate::fencing::FencingOption;
use crate::folders::make_volume_folder;
use crate::memory::StagingOption;
use crate::sizes::JournalSize;
use crate::{control, memory, seen, wiring};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::units::parse_size;

/// The options of a command that attaches a volume itself.
#[derive(Args, Default)]
pub(crate) struct Attach {
    /// The journal of the volume, if no process serves it and the journal is not in its usual
    /// place.
    #[arg(long, value_name = "PATH")]
    journal: Option<PathBuf>,

    #[command(flatten)]
    fencing: FencingOption,
}

/// The same for commands that write much. The journal is where `serve` expects it, so that the next
/// server finds what a crash leaves.
#[derive(Args)]
#[command(next_help_heading = "Attaching")]
pub(crate) struct AttachToWrite {
    /// The journal: a file (created if absent) or a block device.
    #[arg(long, value_name = "PATH")]
    journal: Option<PathBuf>,

    /// Size of a new journal. A journal that is created for this command only is removed after it.
    /// Default: 1G, or a quarter of what is free on the disk if that is less.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    journal_bytes: Option<u64>,

    #[command(flatten)]
    staging: StagingOption,

    #[command(flatten)]
    pub(crate) fencing: FencingOption,
}

/// Whether a command may read a cut that lacks the newest accepted writes.
#[derive(Args, Clone, Copy)]
pub(crate) struct CutOption {
    /// Take what is stored, even if a journal elsewhere may hold newer writes.
    #[arg(long)]
    cut: bool,
}

/// A volume attached for writing.
pub(crate) struct AttachedVolume {
    pub(crate) volume: Arc<Volume>,
    name: String,
    folder: PathBuf,
    /// The journal, if this command created it.
    created_journal: Option<PathBuf>,
}

impl Attach {
    /// Attaches a volume that is not served, does `work` that writes little, and closes the volume
    /// with everything stored.
    pub(crate) fn at_rest<T>(
        &self,
        paths: &Paths,
        address: &VolumeAddress,
        act: impl FnOnce(&Arc<Volume>) -> Result<T>,
    ) -> Result<T> {
        let (_, record) = wiring::find(address)?;
        let options = OpenOptions {
            // The work writes little, so the smallest journal that works is enough.
            journal_bytes: limits::journal_bytes_min(record.segment_bytes),
            staging_bytes: limits::STAGING_BYTES_MIN,
            no_fencing: self.fencing.no_fencing,
            staging_folder: PathBuf::new(),
            ..OpenOptions::new(self.journal.clone().unwrap_or_default())
        };
        let attached = AttachedVolume::open(paths, address, &record, options)?;
        let done = act(&attached.volume);
        // After a failure too: what the volume has accepted must be stored.
        let closed = attached.close();
        let done = done.map_err(|failure| failure.of_volume(&address.name))?;
        closed.map(|()| done)
    }
}

impl AttachToWrite {
    /// Attaches for writing.
    pub(crate) fn open(
        &self,
        paths: &Paths,
        address: &VolumeAddress,
        record: &VolumeRecord,
    ) -> Result<AttachedVolume> {
        let path = match &self.journal {
            Some(path) => path.clone(),
            None => {
                let id = record.volume_id.to_string();
                paths.volume_folder(&id, &address.store_url)?.join("journal")
            }
        };
        let size = JournalSize::new(self.journal_bytes, &path, 1);
        let options = OpenOptions {
            journal_bytes: size.of(&path, limits::journal_bytes_min(record.segment_bytes)),
            staging_folder: self.staging.folder(),
            no_fencing: self.fencing.no_fencing,
            segment_age_max: Duration::from_secs(1),
            ..OpenOptions::new(self.journal.clone().unwrap_or_default())
        };
        AttachedVolume::open(paths, address, record, options)
    }
}

impl AttachedVolume {
    /// Attaches with `options`; without a journal path in them, with the volume's usual journal.
    fn open(
        paths: &Paths,
        address: &VolumeAddress,
        record: &VolumeRecord,
        mut options: OpenOptions,
    ) -> Result<AttachedVolume> {
        // Only the owner may read a journal.
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        let folder = paths.volume_folder(&record.volume_id.to_string(), &address.store_url)?;
        // Before the attach, which would fence that server and fail its users.
        refuse_served(&folder, &address.name)?;
        make_volume_folder(&folder, &address.store_url)?;
        if options.journal_path.as_os_str().is_empty() {
            options.journal_path = folder.join("journal");
        }
        if options.staging_folder.as_os_str().is_empty() {
            options.staging_folder = memory::folder(&options.journal_path);
        }
        // Only servers collect garbage on their own.
        options.gc.start = 0.0;
        // Looked up before the open, which creates the journal.
        let created_journal =
            (!options.journal_path.exists()).then(|| options.journal_path.clone());
        options.seen = seen::of(&folder, record.volume_id);
        let store = sawmill_store::open(&address.store_url, StoreOptions::default())?;
        let volume = Volume::open(store, &address.name, options).map_err(|error| {
            let failure = Failure::from(error);
            if failure.exit() == Exit::Refused {
                let text = format!(
                    "{failure}; if another machine serves {} now, run the command there",
                    address.name
                );
                return Failure::new(Exit::Refused, text).caused_by(failure);
            }
            failure.of_volume(&address.name)
        })?;
        // At once: if this process dies, the next attach still recognizes an older store (P210).
        seen::remember(&folder, &volume);
        Ok(AttachedVolume { volume, name: address.name.clone(), folder, created_journal })
    }

    /// Stores everything and closes the volume.
    pub(crate) fn close(self) -> Result<()> {
        let closed = self.volume.close().map_err(Failure::from);
        closed.map_err(|failure| failure.of_volume(&self.name))?;
        seen::remember(&self.folder, &self.volume);
        // Only after a clean close: until then the journal may have the only copy of a write.
        if let Some(path) = &self.created_journal
            && let Err(error) = std::fs::remove_file(path)
        {
            // Everything is in the store, so the journal is useless.
            tracing::warn!("cannot remove the journal {}: {error}", path.display());
        }
        Ok(())
    }
}

/// The folder and the process of a volume that this machine serves for writing.
pub(crate) fn served(paths: &Paths, address: &VolumeAddress) -> Result<Option<(PathBuf, u32)>> {
    let served = control::served(&paths.state_folder()?, address)?;
    let writes = served.filter(|(folder, _)| folder.join(control::WRITER_SOCKET).exists());
    Ok(writes.map(|(folder, process)| (folder, process.pid)))
}

/// Refuses a volume that a process of this machine serves for writing.
pub(crate) fn refuse_served(folder: &Path, name: &str) -> Result<()> {
    match control::attached(folder)? {
        Some(served) if served.volumes.iter().any(|volume| !volume.read_only) => {
            let text =
                format!("volume {name} is served by process {}; stop that first", served.pid);
            Err(Failure::new(Exit::InUse, text))
        }
        _ => Ok(()),
    }
}

/// Opens the newest cut of a volume for reading: everything its server has accepted, if it runs on
/// this machine, or everything that is stored. `allowed` may allow a cut that lacks the newest
/// accepted writes.
pub(crate) fn open_cut(
    paths: &Paths,
    address: &VolumeAddress,
    allowed: CutOption,
) -> Result<(Arc<Volume>, VolumeRecord)> {
    let store = sawmill_store::open(&address.store_url, StoreOptions::default())?;
    let record = sawmill_volume::find(&*store, &address.name)?;
    let folder = paths.volume_folder(&record.volume_id.to_string(), &address.store_url)?;
    match control::attached(&folder)?.and_then(|process| process.volumes.into_iter().next()) {
        Some(volume) if !volume.read_only => {
            // The cut comes from the store, which may lack what the server has accepted.
            control::wait(&folder, &address.name, "stored", None)?;
        }
        _ if allowed.cut => {}
        _ => require_clean(&*store, address, &record)?,
    }
    let options = OpenOptions { read_only: true, ..OpenOptions::new(PathBuf::new()) };
    let volume = Volume::open(store, &address.name, options).map_err(Failure::from);
    Ok((volume.map_err(|failure| failure.of_volume(&address.name))?, record))
}

fn require_clean(
    store: &dyn ObjectStore,
    address: &VolumeAddress,
    record: &VolumeRecord,
) -> Result<()> {
    if inspect::at_rest(store, record)?.clean {
        return Ok(());
    }
    let text = format!(
        "volume {} was not closed cleanly, or another machine serves it: the newest writes may be \
         in a journal and not in the store; serve and stop it on the machine with its journal, or \
         pass --cut to take what is stored",
        address.name
    );
    Err(Failure::new(Exit::Refused, text))
}
