//! Binds a journal to the attachment that has fenced the others: what only memory holds is written
//! to the disk, the superblock gets the new owner, and new memory replaces the old.
//!
//! Invariant: old memory is removed only when the disk has all of it. Not here: whether the journal
//! may be used (`journal`), and the fence (`attach`).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_format::ids::PutId;
use sawmill_format::journal::{Memory, RECORD_HEADER_BYTES, RecordHeader, RecordOperation};
use sawmill_format::staging::StagingHeader;
use sawmill_sys::{BLOCK_BYTES, Consumer, Ring, StagingFile};

use super::memory::{spare_path, staging_path};
use super::settle::{settle, write_ring};
use crate::disk::{Disk, local_file_kind};
use crate::journal::scan::{LogImage, Scan};
use crate::journal::superblock::SuperblockFile;
use crate::journal::{Start, disk_failed, encode_header};
use crate::options::OpenOptions;
use crate::record::Record;
use crate::recovery::stored::StoredVolume;
use crate::recovery::{RecoveryStep, Reporter};
use crate::store_calls::cannot_encode;
use crate::{Error, Result};

/// A journal with a durable intent to fence.
pub(super) struct FenceIntent {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) superblock: SuperblockFile,
    pub(super) log: Option<LogImage>,
    pub(super) scan: Option<Scan>,
    /// Where the first lap of the ring began, or less where an earlier open made the journal.
    pub(super) first_position: u64,
}

/// A journal of the new attachment, and the state that its loops start from.
pub(crate) struct BoundJournal {
    pub(crate) start: Start,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) staging_path: PathBuf,
    pub(crate) superblock: SuperblockFile,
    pub(crate) ring: Arc<Ring>,
    pub(crate) consumer: Consumer,
    /// Records to replay, in order.
    pub(crate) records: Vec<Arc<Record>>,
}

/// Binds an opened journal to this attachment, and gives it new memory.
pub(super) fn bind(
    intent: FenceIntent,
    stored: &StoredVolume,
    options: &OpenOptions,
    memory: Memory,
    reporter: &mut Reporter<'_>,
) -> Result<BoundJournal> {
    let FenceIntent { disk, mut superblock, log, scan, first_position } = intent;
    let epoch = stored.end.epoch;
    let (capacity_bytes, tag) =
        (superblock.current().capacity_bytes, superblock.current().journal_tag);
    let trim = stored.end.position;
    // Positions of a journal are never reused.
    let end = scan.as_ref().map_or(superblock.current().logged, |scan| scan.end).max(trim);
    let staging = match (log, &scan) {
        (Some(log), Some(scan)) => settle(log, scan, &*disk, &mut superblock, trim)?,
        _ => None,
    };
    let position = write_pad(&*disk, capacity_bytes, tag, epoch, end)?;
    if scan.is_some() || position > end {
        disk.sync().map_err(|error| disk_failed("sync", error))?;
    }
    let records = replayable(scan, trim);
    superblock.write(|block| {
        block.epoch = epoch;
        block.intent_epoch = 0;
        block.intent_put_id = PutId([0; 16]);
        // Data before the first record is irrelevant, and may be damaged.
        block.trim = if records.is_empty() { position } else { trim.max(block.trim) };
        block.logged = position;
        block.stored_sequence = stored.end.stored_sequence;
        block.stored_position = trim;
        block.clean = false;
        block.bound_epoch = epoch;
        block.bound_position = position;
        block.memory = None;
        block.ring_copy = None;
    })?;
    // Only now, when the disk has all of it, may the old memory be removed. Where it is in another
    // folder, no later attach would find it there: so at once, before anything that takes long.
    let volume_id = stored.record.volume_id;
    let staging_path = staging_path(&options.staging_folder, volume_id, tag);
    remove_old_memory(staging.as_ref().map(StagingFile::path), &staging_path);
    let (capacity, boot_id) = (options.staging_bytes, memory.boot_id);
    let header =
        StagingHeader { volume_id, journal_tag: tag, capacity_bytes: capacity, boot_id, epoch };
    let (ring, consumer) = new_ring(&staging_path, options, &header, position, staging)?;
    // The other copy too: if one is lost later, the other must still know whose records count. It
    // locates the memory before anything is accepted.
    superblock.write(|block| block.memory = Some(memory))?;
    let bytes: u64 = records.iter().map(|record| record.payload_bytes()).sum();
    reporter.step(
        RecoveryStep::Replay,
        format!("{} records, {bytes} bytes; the journal continues at {position}", records.len()),
    );
    let start = Start {
        tag,
        epoch,
        capacity_bytes,
        first_lap_end: first_position.min(position) + capacity_bytes,
        position,
        trim,
        segments_end: trim,
        stored_sequence: stored.end.stored_sequence,
        unstored_records: records.len(),
        unstored_records_max: options.bounds.records_unstored_max,
    };
    Ok(BoundJournal { start, disk, staging_path, superblock, ring, consumer, records })
}

/// Pads the end of the log to a whole block in the new epoch, to be synced. Returns where the log
/// continues.
fn write_pad(disk: &dyn Disk, capacity_bytes: u64, tag: u64, epoch: u64, end: u64) -> Result<u64> {
    if end.is_multiple_of(BLOCK_BYTES) {
        return Ok(end);
    }
    let position = (end + RECORD_HEADER_BYTES as u64).next_multiple_of(BLOCK_BYTES);
    let header = RecordHeader {
        slot_bytes: (position - end) as u32,
        position: end,
        tag,
        operation: RecordOperation::Pad,
        epoch,
        logged: 0,
        address: 0,
        length: 0,
        payload_crc: 0,
    };
    let mut pad = vec![0; (position - end) as usize];
    encode_header(&header, &mut pad);
    write_ring(disk, capacity_bytes, end, &pad)?;
    Ok(position)
}

/// The memory of the new attachment, in place of the `old` one.
fn new_ring(
    path: &Path,
    options: &OpenOptions,
    header: &StagingHeader,
    position: u64,
    old: Option<StagingFile>,
) -> Result<(Arc<Ring>, Consumer)> {
    let failed = |error: io::Error| {
        let text = format!(
            "cannot create the staging file {} of {} bytes: {error}; give another folder with \
            --staging",
            path.display(),
            options.staging_bytes
        );
        Error::new(local_file_kind(&error), text).with_source(error)
    };
    let spare = spare_path(header.volume_id, options);
    let staging = match StagingFile::take_spare(&spare, path, options.staging_bytes) {
        Ok(Some(staging)) => {
            // Users wait for this attach, and need not wait until all the pages are freed.
            let _ =
                std::thread::Builder::new().name("staging-free".into()).spawn(move || drop(old));
            staging
        }
        // There may be no room for both old and new memory.
        _ => {
            drop(old);
            StagingFile::create(path, options.staging_bytes).map_err(failed)?
        }
    };
    Ok(staging.into_ring(position, &header.encode().map_err(cannot_encode)?))
}

/// Removes old memory that lies in another place than the new.
fn remove_old_memory(old: Option<&Path>, new: &Path) {
    if let Some(path) = old.filter(|path| *path != new)
        && let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("cannot remove {}, which is no longer needed: {error}", path.display());
    }
}

/// The records that are not in a segment yet.
fn replayable(scan: Option<Scan>, trim: u64) -> Vec<Arc<Record>> {
    let found = scan.map(|scan| scan.records).unwrap_or_default();
    found
        .into_iter()
        .filter_map(|found| found.record)
        .filter(|record| record.position >= trim)
        .collect()
}
