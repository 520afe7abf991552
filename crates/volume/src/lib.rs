//! The log-structured virtual disk: a write costs a local append, the store holds immutable
//! segments.
//!
//! Make a volume in a store with [`create`], and open it as a block device with [`Volume::open`]:
//!
//! ```no_run
//! use sawmill_device::BlockDeviceExt;
//! use sawmill_store::StoreOptions;
//! use sawmill_volume::{CreateOptions, OpenOptions, Volume, create};
//!
//! let store = sawmill_store::open("file:///srv/disks", StoreOptions::default())?;
//! create(&*store, "disk1", &CreateOptions::new(10 << 30))?;
//! let volume = Volume::open(store, "disk1", OpenOptions::new("/var/lib/disk1/journal"))?;
//! volume.write_at(0, b"hello")?;
//! volume.flush()?;
//! volume.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The paths, one module each: `write` (a write or a flush to its answer), `read` (a read),
//! `engine` (records to segments, checkpoints, deletes), `open` and `recovery` (an attach, after
//! any kind of crash), `cuts` (snapshots, the past, clones), [`replicate`] (a second store). The
//! places: `journal` (the log on the local disk), `segment` (records as objects), [`map`] (address
//! to location), [`cache`] (frames on the local disk). What you can look at: [`status`],
//! [`inspect`], [`check`], and beforehand [`forecast`]. What you can choose: [`options`], within
//! [`limits`].
//!
//! Invariants: positions decide which of two writes is newer; an object is never overwritten;
//! accepted ≥ logged, and stored is a prefix.
//!
//! *Accepted* survives the death of the process, *logged* survives power loss, *stored* survives
//! the loss of the machine. Not here: doors, async code, the environment, printing.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod attachment;
pub mod boot_set;
pub mod cache;
pub mod check;
mod contexts;
mod counters;
mod cuts;
mod disk;
mod engine;
mod fencing;
mod flatten;
pub mod forecast;
pub mod gc;
mod geometry;
pub mod inspect;
mod journal;
pub mod limits;
pub mod map;
mod names;
mod open;
pub mod options;
mod past;
mod read;
mod readers;
mod record;
mod recovery;
pub mod replicate;
mod segment;
mod state;
pub mod status;
mod store_calls;
mod stored_data;
mod threads;
mod unstored;
mod view;
mod volume;
mod watch;
mod world;
mod write;

pub use cache::{ReadCache, open_cache};
pub use cuts::{
    Cut, CutInfo, DeleteReport, PastReport, clone, clone_each, clone_in, past, rfc3339,
};
pub use disk::{Disk, Disks, EntryKind, Lock, RealDisks};
pub use fencing::Fencing;
pub use flatten::{release_ancestors, release_ancestors_in};
pub use gc::{Choice as GcChoice, GcPolicy};
pub use names::{
    DeleteRemains, UnnamedVolume, VolumeEntry, create, create_in, delete, delete_in, find,
    finish_delete, list, name_unnamed, rename, rename_in, unnamed,
};
pub use open::{Age, age_of};
pub use options::{CreateOptions, FlushMode, NewestState, OpenOptions};
pub use past::Undo;
pub use read::ahead_memory::AheadMemory;
pub use read::reads_seen::SeenReads;
pub use read::warm::WarmStep;
pub use recovery::{RecoveryReport, RecoveryStep, RecoveryStepReport};
pub use sawmill_device::{Error, ErrorKind};
pub use sawmill_format::kept_block::CutKind;
pub use segment::entries::SharedLists;
pub use status::{Counters, GcReport, Health, Positions, Safety, Stall, Status};
pub use threads::loops::{LoopThreadCounts, LoopThreads};
pub use threads::steps::SteppedVolume;
pub use volume::Volume;
pub use world::{RealWorld, World};

impl From<map::MapExtent> for sawmill_format::map_part::MapExtent {
    fn from(extent: map::MapExtent) -> Self {
        let map::MapExtent { address, length, sequence, data_offset } = extent;
        Self { address, length, sequence: u64::from(sequence), data_offset }
    }
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
