//! Judges the local journal against the end of the log in the store: whether it belongs to this
//! volume, whether it holds anything, and whether it may be used. Reads only; `attach` acts on the
//! verdict.
//!
//! Invariant: unless the user accepts the loss, a new journal is made only if the store shows that
//! the volume was closed cleanly.
//!
//! Not here: which records count (`journal::scan`, `recovery::cases`), and which journal the memory
//! belongs to (`memory`).

use std::path::Path;
use std::sync::Arc;

use sawmill_format::journal::{RING_START_BYTES, SUPERBLOCK_BYTES, Superblock};

use super::loss;
use super::memory::{self, MemoryLookup};
use super::newest_seen;
use crate::disk::{Disk, Disks, Lock, local_file_kind};
use crate::journal::scan::{LogImage, Scan, ScanOptions, scan};
use crate::journal::superblock::SuperblockFile;
use crate::options::OpenOptions;
use crate::recovery::stored::StoredVolume;
use crate::world::World;
use crate::{Error, ErrorKind, Result};

/// What the journal is, and what it holds.
pub(crate) enum JournalVerdict {
    /// There is no journal, or it holds nothing relevant: make one.
    Make { old: OldFile, why: String },
    /// It is this volume's newest journal: use it.
    Use(Box<UsableJournal>),
}

/// What happens to the file with the journal's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OldFile {
    /// It holds nothing and may be replaced.
    Remove,
    /// It holds, or may hold, writes that exist nowhere else: it is renamed and kept.
    Keep,
}

/// A journal that matches the end of the log.
pub(crate) struct UsableJournal {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) superblock: SuperblockFile,
    pub(crate) log: Option<LogImage>,
    pub(crate) scan: Option<Scan>,
}

impl JournalVerdict {
    /// One line for the report.
    pub(crate) fn describe(&self) -> String {
        match self {
            JournalVerdict::Make { why, .. } => why.clone(),
            JournalVerdict::Use(usable) => match &usable.scan {
                None => "closed cleanly, nothing to replay".into(),
                Some(scan) => format!(
                    "{} records to position {} (flushed through {}), {} slots never filled; ended \
                    by {}",
                    scan.records.len(),
                    scan.end,
                    scan.mark,
                    scan.voids.len(),
                    scan.why
                ),
            },
        }
    }
}

/// Locks the journal in the options, as long as the lock lives.
pub(crate) fn lock(options: &OpenOptions, disks: &dyn Disks) -> Result<Lock> {
    let path = &options.journal_path;
    let locks = disks.lock(path).and_then(|name| Ok((name, disks.lock_file(path)?)));
    match locks {
        Ok(both) => Ok(Box::new(both)),
        Err(error) => Err(cannot_lock(path, error)),
    }
}

/// Locks a journal that was made under the lock, in the same way.
pub(super) fn lock_file(options: &OpenOptions, disks: &dyn Disks) -> Result<Lock> {
    let path = &options.journal_path;
    disks.lock_file(path).map_err(|error| cannot_lock(path, error))
}

/// Judges the journal in the options.
pub(crate) fn judge(
    stored: &StoredVolume,
    options: &OpenOptions,
    world: &dyn World,
) -> Result<JournalVerdict> {
    let path = &options.journal_path;
    let disk = match world.disks().open(path) {
        Ok(disk) => disk,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let verdict = absent(stored, options, world)?;
            return newest_seen::require_not_older(stored, options).map(|()| verdict);
        }
        Err(error) => return Err(cannot_lock(path, error)),
    };
    let superblock = read_superblock(&disk, path, stored, world);
    // A journal of a later epoch shows that the store is older.
    let is_later = |superblock: &SuperblockFile| superblock.current().epoch > stored.end.epoch;
    let is_store_older =
        superblock.as_ref().is_ok_and(|superblock| superblock.as_ref().is_some_and(is_later));
    let verdict = judge_superblock(stored, options, world, disk, superblock)?;
    if !is_store_older {
        newest_seen::require_not_older(stored, options)?;
    }
    Ok(verdict)
}

/// Judges a journal by the readable part of its superblock.
fn judge_superblock(
    stored: &StoredVolume,
    options: &OpenOptions,
    world: &dyn World,
    disk: Arc<dyn Disk>,
    superblock: Result<Option<SuperblockFile>>,
) -> Result<JournalVerdict> {
    match superblock {
        Ok(None) => absent(stored, options, world),
        Ok(Some(superblock)) => judge_against_store(stored, options, world, disk, superblock),
        Err(error) if error.kind() == ErrorKind::Invalid => Err(error),
        // An unreadable superblock may be intact, and hold the intent of a fence that is still in
        // flight.
        Err(error) if error.kind() == ErrorKind::Unavailable && !options.accept_journal_loss => {
            Err(error)
        }
        Err(error) => unusable(stored, options, world, &error.to_string())
            .map_err(|refused| refused.with_source(error)),
    }
}

/// Why a journal could not be locked.
fn cannot_lock(path: &Path, error: std::io::Error) -> Error {
    let (kind, what) = match error.kind() {
        std::io::ErrorKind::WouldBlock => {
            (ErrorKind::InUse, "is in use by another process".to_owned())
        }
        _ => (local_file_kind(&error), format!("cannot be opened: {error}")),
    };
    Error::new(kind, format!("the journal {} {what}", path.display())).with_source(error)
}

/// No journal (or a file that is not ours, which is kept): that is safe only if the last attachment
/// left no records in one.
fn absent(
    stored: &StoredVolume,
    options: &OpenOptions,
    world: &dyn World,
) -> Result<JournalVerdict> {
    let path = options.journal_path.display();
    if stored.end.clean {
        let why = "none needed: the volume was closed cleanly".into();
        return Ok(JournalVerdict::Make { old: OldFile::Keep, why });
    }
    if options.accept_journal_loss {
        let why = "lost; loss accepted: the volume is a cut at the end of the stored log".into();
        return Ok(JournalVerdict::Make { old: OldFile::Keep, why });
    }
    let text = format!(
        "there is no journal at {path}, and volume {} was not closed cleanly: its newest writes \
         may be in a journal elsewhere. Give it with --journal, or pass --accept-journal-loss to \
         {}",
        stored.record.name,
        loss::rollback(stored, None, world)
    );
    Err(Error::new(ErrorKind::Refused, text))
}

/// A journal that was closed cleanly and holds nothing. But other attachments have followed, and
/// their journals may hold writes.
fn overtaken(
    stored: &StoredVolume,
    options: &OpenOptions,
    world: &dyn World,
    epoch: u64,
) -> Result<JournalVerdict> {
    if stored.end.clean || options.accept_journal_loss {
        let why = format!("of epoch {epoch}, closed cleanly; others have attached since");
        return Ok(JournalVerdict::Make { old: OldFile::Remove, why });
    }
    let text = format!(
        "the journal {} was closed cleanly in epoch {epoch}, but volume {} has been attached \
         elsewhere since and was not closed cleanly there: its newest writes may be in that \
         journal. Give it with --journal, or pass --accept-journal-loss to {}",
        options.journal_path.display(),
        stored.record.name,
        loss::rollback(stored, None, world)
    );
    Err(Error::new(ErrorKind::Refused, text))
}

/// An unusable journal: kept, never overwritten.
fn unusable(
    stored: &StoredVolume,
    options: &OpenOptions,
    world: &dyn World,
    why: &str,
) -> Result<JournalVerdict> {
    let path = &options.journal_path;
    if stored.end.clean || options.accept_journal_loss {
        let why = format!("set aside: {why}");
        return Ok(JournalVerdict::Make { old: OldFile::Keep, why });
    }
    let text = format!(
        "the journal {} cannot be used: {why}. It was not changed; see `sawmill inspect journal`, \
         give another one with --journal, or pass --accept-journal-loss to set it aside and {}",
        path.display(),
        loss::rollback(stored, None, world)
    );
    Err(Error::new(ErrorKind::Refused, text))
}

/// The superblock of this volume's journal; `None` for a blank file; `Invalid` for another
/// volume's.
fn read_superblock(
    disk: &Arc<dyn Disk>,
    path: &Path,
    stored: &StoredVolume,
    world: &dyn World,
) -> Result<Option<SuperblockFile>> {
    if disk.size_bytes() < RING_START_BYTES {
        if disk.size_bytes() == 0 {
            return Ok(None);
        }
        let text = format!("it has only {} bytes", disk.size_bytes());
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    let mut copies = vec![0; 2 * SUPERBLOCK_BYTES];
    disk.read_at(0, &mut copies).map_err(|error| {
        let text = format!(
            "the journal {} cannot be read: {error}; nothing was changed. Try again; if the disk \
             is lost, pass --accept-journal-loss to set the journal aside and {}",
            path.display(),
            loss::rollback(stored, None, world)
        );
        Error::new(ErrorKind::Unavailable, text).with_source(error)
    })?;
    let mut owners =
        copies.chunks(SUPERBLOCK_BYTES).filter_map(|copy| Superblock::owner(copy).ok());
    if let Some(owner) = owners.next_back()
        && owner != stored.record.volume_id
    {
        let text = format!(
            "the journal {} belongs to volume {owner}, not to {} ({}): give this volume a journal \
             of its own with --journal",
            path.display(),
            stored.record.name,
            stored.record.volume_id
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let Some(superblock) = SuperblockFile::read(disk.clone(), stored.record.volume_id)? else {
        return Ok(None);
    };
    let needed = RING_START_BYTES + superblock.current().capacity_bytes;
    if disk.size_bytes() < needed {
        let text = format!("it is truncated: {} bytes of {needed}", disk.size_bytes());
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    Ok(Some(superblock))
}

/// The rules of `docs/crash-consistency.md`: a journal belongs to one epoch, and the store never
/// falls behind it.
fn judge_against_store(
    stored: &StoredVolume,
    options: &OpenOptions,
    world: &dyn World,
    disk: Arc<dyn Disk>,
    superblock: SuperblockFile,
) -> Result<JournalVerdict> {
    let block = superblock.current();
    let end = &stored.end;
    let ours = (block.epoch == end.epoch && block.epoch > 0)
        || (block.intent_epoch == end.epoch && end.fence_put_id == Some(block.intent_put_id));
    if !ours {
        return judge_other_epoch(stored, options, world, disk, superblock);
    }
    if block.stored_sequence > end.stored_sequence || block.stored_position > end.position {
        let text = format!(
            "segments up to {} were stored (position {}), but the store only has them up to {} \
             (position {}): the store has lost objects, or was restored to an older state",
            block.stored_sequence, block.stored_position, end.stored_sequence, end.position
        );
        if options.accept_journal_loss {
            return stale(stored, options, world, &text);
        }
        let text = format!(
            "{text}; nothing was changed; restore it from a newer copy, or pass \
             --accept-journal-loss to set the journal aside and {}",
            loss::rollback(stored, Some(block.stored_position.max(block.logged)), world)
        );
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    if end.clean {
        return Ok(JournalVerdict::Use(Box::new(UsableJournal {
            disk,
            superblock,
            log: None,
            scan: None,
        })));
    }
    let image = |staging| {
        LogImage::new(disk.clone(), block.capacity_bytes, staging).with_copy(block.ring_copy)
    };
    let mut log = match memory::find(stored, options, block, world)? {
        MemoryLookup::Memory(staging) => image(Some(staging)),
        MemoryLookup::NoneNeeded => image(None),
        MemoryLookup::Lost => image(None).with_memory_lost(),
    };
    // The attachment may have started its records later: the log before is of earlier ones.
    let from = end.position.max(block.trim);
    let scan_options = ScanOptions {
        accept_loss: options.accept_journal_loss,
        ..ScanOptions::of(block, from).synced_through(log.synced())
    };
    let scan = scan(&mut log, &scan_options)?;
    Ok(JournalVerdict::Use(Box::new(UsableJournal {
        disk,
        superblock,
        log: Some(log),
        scan: Some(scan),
    })))
}

/// A journal of another epoch than the store's newest.
fn judge_other_epoch(
    stored: &StoredVolume,
    options: &OpenOptions,
    world: &dyn World,
    disk: Arc<dyn Disk>,
    superblock: SuperblockFile,
) -> Result<JournalVerdict> {
    let (block, end) = (superblock.current(), &stored.end);
    if block.epoch == 0 {
        // The process died while it made the journal, before it had the volume. The journal holds
        // nothing, but its fence may still land, so it is kept as long as that is possible.
        let pending = block.intent_epoch > end.epoch;
        if pending && (end.clean || options.accept_journal_loss) {
            return Ok(JournalVerdict::Use(Box::new(UsableJournal {
                disk,
                superblock,
                log: None,
                scan: None,
            })));
        }
        return absent(stored, options, world);
    }
    if block.epoch > end.epoch {
        let text = format!(
            "it is of epoch {}, but the store knows only {}: the store has lost objects or is an \
            old copy",
            block.epoch, end.epoch
        );
        // Even if that old copy records a clean close.
        return stale(stored, options, world, &text);
    }
    if block.clean {
        return overtaken(stored, options, world, block.epoch);
    }
    let text = format!(
        "it is of epoch {}, but the volume has been attached elsewhere since (epoch {}); what \
         it holds was never stored and must not be replayed over newer writes",
        block.epoch, end.epoch
    );
    stale(stored, options, world, &text)
}

/// A journal of another epoch than the store's newest holds writes that are not in the store: only
/// the user may set it aside.
fn stale(
    stored: &StoredVolume,
    options: &OpenOptions,
    world: &dyn World,
    why: &str,
) -> Result<JournalVerdict> {
    if options.accept_journal_loss {
        let why = format!("set aside: {why}");
        return Ok(JournalVerdict::Make { old: OldFile::Keep, why });
    }
    let text = format!(
        "the journal {} cannot be used: {why}. It was not changed; see `sawmill inspect journal`; \
         pass --accept-journal-loss to set it aside (it is renamed, not deleted) and attach volume \
         {} as it is in the store (last stored {})",
        options.journal_path.display(),
        stored.record.name,
        loss::last_stored(stored, world)
    );
    Err(Error::new(ErrorKind::Refused, text))
}
