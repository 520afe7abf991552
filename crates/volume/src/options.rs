//! The properties that a volume is created with ([`CreateOptions`]) and the options of one
//! attachment ([`OpenOptions`]).
//!
//! Invariant: the defaults accept no loss, no older store and no store without fencing: each needs
//! an option of its own.
//!
//! Not here: checks of the values (`names`, `open`), default paths, human-readable units and
//! environment variables (the binary handles them).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use sawmill_format::newest_state::NewestState;
pub use sawmill_format::volume_record::FlushMode;

use crate::cache::ReadCache;
use crate::cuts::Cut;
use crate::gc::policy::GcPolicy;
use crate::limits::{self, AttachmentBounds};
use crate::read::ahead_memory::AheadMemory;
use crate::segment::entries::SharedLists;
use crate::threads::loops::LoopThreads;

/// The properties that a volume is created with; kept in its record in the store.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Size of the disk. At least one block, a multiple of `block_bytes`, at most
    /// [`limits::SIZE_BYTES_MAX`].
    pub size_bytes: u64,
    /// Logical block shown by doors with sectors: 512 or 4096.
    pub block_bytes: u32,
    /// A segment is sealed at this many bytes of data. A power of two within
    /// [`limits::SEGMENT_BYTES_MIN`]..=[`limits::SEGMENT_BYTES_MAX`].
    pub segment_bytes: u32,
    /// What a completed flush means.
    pub flush: FlushMode,
    /// How far back every moment is kept, in seconds; 0: not at all.
    pub retention_s: u64,
    /// Proceed although the store does not enforce conditional create.
    pub no_fencing: bool,
}

impl CreateOptions {
    /// The defaults for a disk of `size_bytes`: 4096-byte blocks, 8 MiB segments, flush = logged.
    #[must_use]
    pub fn new(size_bytes: u64) -> Self {
        CreateOptions {
            size_bytes,
            block_bytes: 4096,
            segment_bytes: limits::SEGMENT_BYTES_DEFAULT,
            flush: FlushMode::Logged,
            retention_s: 0,
            no_fencing: false,
        }
    }
}

/// The options of one attachment of a volume.
#[derive(Clone)]
pub struct OpenOptions {
    /// The journal: a file (made when absent) or a block device. Not used when `read_only`.
    pub journal_path: PathBuf,
    /// Size of the journal when it is made. At least [`limits::journal_bytes_min`].
    pub journal_bytes: u64,
    /// Folder for the staging file: memory that outlives the process. In a tmpfs or any other file
    /// system: the file is mapped, and survives while the kernel runs.
    pub staging_folder: PathBuf,
    /// Capacity of the staging ring.
    pub staging_bytes: u64,
    /// The read cache, shared by all volumes of the process.
    pub cache: Option<Arc<ReadCache>>,
    /// Tables of segments, shared by the volumes that are opened with clones of these options.
    pub segment_lists: Arc<SharedLists>,
    /// The threads that run the loops of the volumes that are opened with clones of these options.
    pub loop_threads: Arc<LoopThreads>,
    /// Memory for what was fetched ahead of readers, shared by the same volumes.
    pub ahead_memory: Arc<AheadMemory>,
    /// Open for reading only: no journal, no fence, nothing written.
    pub read_only: bool,
    /// Show this state of the past and no other; for reading only.
    pub cut: Option<Cut>,
    /// Proceed although the journal with the newest writes is lost; the volume continues from an
    /// older cut.
    pub accept_journal_loss: bool,
    /// Proceed although the memory with the newest accepted writes is lost.
    pub accept_memory_loss: bool,
    /// The newest state of the volume seen in this store before: a state that ends earlier is
    /// refused.
    pub seen: Option<NewestState>,
    /// Proceed although the store holds an older state than was seen there before.
    pub accept_older_store: bool,
    /// Proceed although the store does not enforce conditional create.
    pub no_fencing: bool,
    /// The store has just passed the probe of conditional create ([`replicate::require_fencing`]):
    /// it is not repeated.
    ///
    /// [`replicate::require_fencing`]: crate::replicate::require_fencing
    pub store_is_probed: bool,
    /// Seal a segment that is this old, even if small. Zero: never by age.
    pub segment_age_max: Duration,
    /// Sync the journal when an accepted write is this old and not logged, even without a flush.
    /// Zero: never.
    pub log_age_max: Duration,
    /// While the oldest accepted write that is not stored is this old, writes and flushes wait.
    /// None: never.
    pub unstored_age_max: Option<Duration>,
    /// Bytes of log after which a checkpoint is written.
    pub checkpoint_bytes: u64,
    /// Segments in flight to the store at once, at most [`limits::UPLOADS_MAX`].
    pub uploads_max: u32,
    /// The most bytes in flight ahead of readers whose reads follow each other, and the most that
    /// arrived and wait for them in memory. Zero: nothing is read ahead.
    pub prefetch_bytes: u64,
    /// When garbage is collected, and what.
    pub gc: GcPolicy,
    /// Bounds that only tests lower.
    pub bounds: AttachmentBounds,
}

impl OpenOptions {
    /// The defaults with the journal at `journal_path`.
    pub fn new(journal_path: impl Into<PathBuf>) -> Self {
        let journal_path = journal_path.into();
        OpenOptions {
            staging_folder: journal_path.parent().unwrap_or(Path::new("")).to_owned(),
            journal_path,
            journal_bytes: limits::JOURNAL_BYTES_DEFAULT,
            staging_bytes: limits::STAGING_BYTES_DEFAULT,
            cache: None,
            segment_lists: Arc::default(),
            loop_threads: Arc::default(),
            ahead_memory: Arc::default(),
            read_only: false,
            cut: None,
            accept_journal_loss: false,
            accept_memory_loss: false,
            seen: None,
            accept_older_store: false,
            no_fencing: false,
            store_is_probed: false,
            segment_age_max: Duration::from_secs(5),
            log_age_max: Duration::from_secs(5),
            unstored_age_max: None,
            checkpoint_bytes: limits::CHECKPOINT_BYTES_DEFAULT,
            uploads_max: limits::UPLOADS_DEFAULT,
            prefetch_bytes: limits::PREFETCH_BYTES_DEFAULT,
            gc: GcPolicy::default(),
            bounds: AttachmentBounds::default(),
        }
    }
}
