//! The memory that outlives a process (the staging file): where it is, whether it exists, and whose
//! it is.
//!
//! Invariants: while accepted writes of an attachment may be only in memory, the journal's
//! superblock records that, with the boot and the folder. In that boot the memory must be found, or
//! the attach is refused: accepted writes are never dropped silently. Another boot means that the
//! power was lost, and with it what was not logged.
//!
//! Not here: what is in it (`journal::scan`), and making the next one (`attach`).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use sawmill_format::ids::VolumeId;
use sawmill_format::journal::{MEMORY_FOLDER_BYTES_MAX, Memory, Superblock};
use sawmill_format::staging::{NUMBERS_OFFSET_BYTES, StagingHeader, StagingIdentity, numbers_at};
use sawmill_sys::StagingFile;

use super::loss;
use crate::options::OpenOptions;
use crate::recovery::stored::StoredVolume;
use crate::world::World;
use crate::{Error, ErrorKind, Result};

// Checks that the numbers lie where their page has them: `sawmill-sys` knows no formats.
const _: () = {
    let first = NUMBERS_OFFSET_BYTES;
    let (written, failed) = (numbers_at::WRITTEN.offset, numbers_at::SYNC_FAILED.offset);
    assert!(StagingFile::WRITTEN_OFFSET_BYTES == first + written as u64);
    assert!(StagingFile::SYNC_FAILED_OFFSET_BYTES == first + failed as u64);
    assert!(StagingFile::SYNCED_OFFSET_BYTES == first + numbers_at::SYNCED.offset as u64);
};

/// The staging file of a journal. Each journal has one of its own, so that the journal's lock
/// covers it too.
pub(crate) fn staging_path(folder: &Path, volume_id: VolumeId, journal_tag: u64) -> PathBuf {
    folder.join(format!("sawmill-{volume_id}-{journal_tag:016x}.staging"))
}

/// Memory preallocated for the next staging file of a volume. It is empty and unused, so the
/// process that makes the staging file may take it.
pub(crate) fn spare_path(volume_id: VolumeId, options: &OpenOptions) -> PathBuf {
    options.staging_folder.join(format!("sawmill-{volume_id}.spare"))
}

/// The superblock's entry for memory in the folder of `options`, in this boot.
pub(crate) fn in_use(options: &OpenOptions, world: &dyn World) -> Result<Memory> {
    let folder = &options.staging_folder;
    let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
    let folder = absolute.as_os_str().as_bytes().to_vec();
    if !(1..=MEMORY_FOLDER_BYTES_MAX).contains(&folder.len()) {
        let text = format!(
            "the path of the staging folder has {} bytes, and at most {MEMORY_FOLDER_BYTES_MAX} \
             fit into the journal: give another with --staging",
            folder.len()
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(Memory { boot_id: world.boot_id()?, folder })
}

/// The folder with the memory in use, according to a superblock.
fn folder_of(memory: &Memory) -> &Path {
    Path::new(OsStr::from_bytes(&memory.folder))
}

/// Why a staging file is not the memory in question.
enum Mismatch {
    Absent(PathBuf),
    /// A running process has it open.
    InUse(PathBuf),
    Foreign(String),
}

/// The memory that was found for a journal.
pub(super) enum MemoryLookup {
    Memory(StagingFile),
    /// No accepted write is only in memory, or the power was lost.
    NoneNeeded,
    /// It is missing in the boot in which it was written, and the user accepts the loss.
    Lost,
}

/// Finds the memory of this journal.
///
/// Errors: `Refused` if there must be memory and it is not found; `Unavailable` if the check itself
/// fails.
pub(super) fn find(
    stored: &StoredVolume,
    options: &OpenOptions,
    block: &Superblock,
    world: &dyn World,
) -> Result<MemoryLookup> {
    let boot_id = world.boot_id()?;
    let recorded = block.memory.as_ref();
    if recorded.is_some_and(|memory| memory.boot_id != boot_id) {
        return Ok(MemoryLookup::NoneNeeded);
    }
    let look_in = |folder: &Path| {
        check_staging_file(
            &staging_path(folder, stored.record.volume_id, block.journal_tag),
            stored,
            block,
            boot_id,
        )
    };
    // In the current folder, which may be another mount of the one where it was left; otherwise in
    // the recorded folder. The journal may be a copy; then the recorded folder is that of its
    // original. If the original is still running, the file in the current folder is a copy too, and
    // older than what the original acknowledges.
    let left_in = recorded.map(folder_of).filter(|folder| *folder != options.staging_folder);
    let is_copy =
        left_in.is_some_and(|folder| matches!(look_in(folder), Ok(Err(Mismatch::InUse(_)))));
    let used_now = (!is_copy).then_some(&*options.staging_folder);
    let mut reasons = Vec::new();
    for folder in used_now.into_iter().chain(left_in) {
        match look_in(folder)? {
            Ok(staging) => return Ok(MemoryLookup::Memory(staging)),
            Err(Mismatch::Absent(path)) => {
                reasons.push(format!("{} does not exist", path.display()))
            }
            Err(Mismatch::InUse(path)) => {
                reasons.push(format!("{} is in use by another process", path.display()));
            }
            Err(Mismatch::Foreign(why)) => reasons.push(why),
        }
    }
    if recorded.is_none() {
        return Ok(MemoryLookup::NoneNeeded);
    }
    let lost = reasons.join("; ");
    if options.accept_memory_loss {
        tracing::warn!(
            "the memory of volume {} is lost; loss accepted: {lost}",
            stored.record.name
        );
        return Ok(MemoryLookup::Lost);
    }
    let text = format!(
        "the memory with the newest accepted writes of volume {} is lost: the machine has not \
         rebooted since, and {lost}. Nothing was changed. Give its folder with --staging; or, if \
         it is lost forever (as with a container's /dev/shm), pass --accept-memory-loss to \
         continue with the flushed writes and all that is stored (last {}). How much only memory \
         had is not known: at most its size, {} with the present --staging-bytes",
        stored.record.name,
        loss::last_stored(stored, world),
        loss::size(options.staging_bytes)
    );
    Err(Error::new(ErrorKind::Refused, text))
}

/// Checks the staging file of one folder.
fn check_staging_file(
    path: &Path,
    stored: &StoredVolume,
    block: &Superblock,
    boot_id: [u8; 16],
) -> Result<std::result::Result<StagingFile, Mismatch>> {
    let mut staging = match StagingFile::open(path) {
        Ok(Some(staging)) => staging,
        Ok(None) => return Ok(Err(Mismatch::Absent(path.to_owned()))),
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            return Ok(Err(Mismatch::Foreign(format!(
                "{} cannot be trusted: {error}",
                path.display()
            ))));
        }
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            return Ok(Err(Mismatch::InUse(path.to_owned())));
        }
        Err(error) => {
            let what = format!("the staging file {} cannot be used", path.display());
            return Err(Error::caused(ErrorKind::Unavailable, what, error));
        }
    };
    let identity =
        StagingIdentity { volume_id: stored.record.volume_id, journal_tag: block.journal_tag };
    let why = match StagingHeader::decode(&staging.header(), &identity) {
        Err(error) => error.to_string(),
        Ok(header) if header.boot_id != boot_id => "it is of another boot".to_owned(),
        Ok(header) if header.epoch != block.bound_epoch => {
            format!("it is of epoch {}, and the journal of {}", header.epoch, block.bound_epoch)
        }
        Ok(header) if header.capacity_bytes != staging.capacity_bytes() => {
            format!("it has {} bytes of {}", staging.capacity_bytes(), header.capacity_bytes)
        }
        Ok(_) => return Ok(Ok(staging)),
    };
    Ok(Err(Mismatch::Foreign(format!("{} does not match the journal: {why}", path.display()))))
}
