//! Reads journals and volumes without changing them: for operators who examine a volume, broken or
//! not.
//!
//! Invariants: no object and no byte of a journal is changed. A damaged log is reported up to the
//! damage ([`JournalReport::ended_by`]), not refused.
//!
//! Not here: verifying what a volume keeps (`check`), an open volume (`status`), and printing (the
//! binary).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_format::checkpoint::Checkpoint;
use sawmill_format::ids::VolumeId;
use sawmill_format::journal::{RING_START_BYTES, RecordOperation, SUPERBLOCK_BYTES, Superblock};
use sawmill_format::segment::{SegmentHeader, segment_key};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::ObjectStore;
use sawmill_sys::{DirectFile, OpenMode};

use crate::disk::Disk;
use crate::journal::scan::{LogImage, ScanOptions, ScannedRecord, scan};
use crate::open;
use crate::options::OpenOptions;
use crate::recovery::roll_forward::headers;
use crate::recovery::stored;
use crate::recovery::{RecoveryReport, Reporter, checkpoint as checkpoints};
use crate::world::RealWorld;
use crate::{Error, ErrorKind, Result};

/// What a journal holds.
#[derive(Clone, Debug)]
pub struct JournalReport {
    /// The volume that it belongs to.
    pub volume_id: VolumeId,
    /// The newest superblock.
    pub superblock: Superblock,
    /// Where the scan began: the trim.
    pub from: u64,
    /// Where the log on the disk ends.
    pub end: u64,
    /// Everything before here was flushed.
    pub flushed_through: u64,
    /// Why the log ends there.
    pub ended_by: String,
    /// Writes and their payload bytes.
    pub writes: u64,
    /// See `writes`.
    pub write_bytes: u64,
    /// Discards and write-zeroes.
    pub discards: u64,
    /// Padding and voids.
    pub padding: u64,
    /// Epochs of the records, first and last.
    pub epochs: Option<(u64, u64)>,
}

/// A write in a journal that its store did not have.
#[derive(Clone, Copy, Debug)]
pub struct UnstoredWrite<'a> {
    /// Where in the log.
    pub position: u64,
    /// Where on the disk.
    pub address: u64,
    /// How many bytes.
    pub length: u64,
    /// The bytes; none for zeroes and discards, which read as zeroes.
    pub payload: Option<&'a [u8]>,
}

/// A volume's state in the store, for a volume that is not served here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredState {
    /// Size of the disk.
    pub size_bytes: u64,
    /// The newest epoch.
    pub epoch: u64,
    /// All writes before this position are in the store.
    pub position: u64,
    /// The last attachment ended with everything stored.
    pub clean: bool,
    /// Bytes of the address space that hold data.
    pub live_bytes: u64,
    /// Data bytes in segments, live or not.
    pub data_bytes: u64,
    /// Bytes of segment objects.
    pub object_bytes: u64,
    /// Segments.
    pub segments: u64,
    /// Extents of the map.
    pub extents: u64,
    /// Newest checkpoint.
    pub checkpoint_number: u64,
    /// Last segment.
    pub stored_sequence: u64,
}

/// The header of one segment.
pub fn segment(
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    sequence: u64,
) -> Result<SegmentHeader> {
    let header = headers(store, record.volume_id, &[sequence]).pop().unwrap_or(Ok(None))?;
    header.ok_or_else(|| {
        let text = format!("there is no segment {}", segment_key(record.volume_id, sequence));
        Error::new(ErrorKind::NotFound, text)
    })
}

/// A checkpoint, by number or the newest.
pub fn checkpoint(
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    number: Option<u64>,
) -> Result<Checkpoint> {
    checkpoints::read(store, record.volume_id, number)
}

/// The journal at `path`, as it is on the disk. (Records that only memory holds after a crash are
/// not read.)
pub fn journal(path: &Path) -> Result<JournalReport> {
    journal_on(open_journal(path)?, &path.display().to_string())
}

/// The journal on `disk`; errors call it `name`.
pub fn journal_on(disk: Arc<dyn Disk>, name: &str) -> Result<JournalReport> {
    read_journal(disk, name).map(|(report, ..)| report)
}

/// Passes to `each`, in order, the writes of a journal that the store did not have according to the
/// journal's superblock. Some may have been stored since. For a journal that is refused because
/// others have attached the volume.
pub fn unstored_of_journal(
    path: &Path,
    each: &mut dyn FnMut(&UnstoredWrite<'_>) -> Result<()>,
) -> Result<JournalReport> {
    let name = path.display().to_string();
    let (report, found, mut log) = read_journal(open_journal(path)?, &name)?;
    let stored = report.superblock.stored_position;
    for record in found.iter().filter_map(|found| found.record.as_ref()) {
        if record.position < stored {
            continue;
        }
        let (position, address, length) = (record.position, record.address, record.length);
        let mut bytes = Vec::new();
        if record.operation == RecordOperation::Write {
            bytes.resize(record.payload_bytes() as usize, 0);
            log.read(record.payload_position(), &mut bytes)?;
        }
        let payload = (record.operation == RecordOperation::Write).then_some(bytes.as_slice());
        each(&UnstoredWrite { position, address, length, payload })?;
    }
    Ok(report)
}

fn open_journal(path: &Path) -> Result<Arc<dyn Disk>> {
    let unreadable = |error: std::io::Error| {
        let kind = ErrorKind::of_io(&error);
        Error::caused(kind, format!("the journal {} cannot be read", path.display()), error)
    };
    Ok(Arc::new(DirectFile::open(path, OpenMode::ReadOnly).map_err(unreadable)?))
}

fn read_journal(
    disk: Arc<dyn Disk>,
    name: &str,
) -> Result<(JournalReport, Vec<ScannedRecord>, LogImage)> {
    let corrupt =
        |what: String| Error::new(ErrorKind::Corrupt, format!("the journal {name}: {what}"));
    if disk.size_bytes() < RING_START_BYTES {
        return Err(corrupt(format!("only {} bytes long: not a journal", disk.size_bytes())));
    }
    let mut copies = vec![0; 2 * SUPERBLOCK_BYTES];
    disk.read_at(0, &mut copies).map_err(|error| {
        Error::caused(ErrorKind::Unavailable, format!("the journal {name} cannot be read"), error)
    })?;
    let mut owners =
        copies.chunks(SUPERBLOCK_BYTES).filter_map(|copy| Superblock::owner(copy).ok());
    let volume_id =
        owners.next_back().ok_or_else(|| corrupt("it has no valid superblock".into()))?;
    let (first, second) = copies.split_at(SUPERBLOCK_BYTES);
    let superblock = sawmill_format::journal::choose_superblock(first, second, volume_id)
        .map_err(|error| corrupt(error.to_string()).with_source(error))?;
    if disk.size_bytes() < RING_START_BYTES + superblock.capacity_bytes {
        return Err(corrupt("it is truncated".into()));
    }
    let mut log =
        LogImage::new(disk, superblock.capacity_bytes, None).with_copy(superblock.ring_copy);
    let options =
        ScanOptions { accept_loss: true, ..ScanOptions::of(&superblock, superblock.trim) };
    let found = scan(&mut log, &options)?;
    let count = |operations: &[RecordOperation]| {
        found.records.iter().filter(|record| operations.contains(&record.header.operation)).count()
            as u64
    };
    let damaged = found.end < found.mark;
    let epoch = |record: Option<&ScannedRecord>| record.map(|record| record.header.epoch);
    let report = JournalReport {
        volume_id,
        from: superblock.trim,
        end: found.end,
        flushed_through: found.mark,
        ended_by: if damaged { format!("damage: {}", found.why) } else { found.why.to_owned() },
        writes: count(&[RecordOperation::Write]),
        write_bytes: found
            .records
            .iter()
            .filter_map(|f| f.record.as_ref())
            .map(|r| r.payload_bytes())
            .sum(),
        discards: count(&[RecordOperation::Discard, RecordOperation::Zero]),
        padding: count(&[RecordOperation::Pad, RecordOperation::Void]),
        epochs: epoch(found.records.first()).zip(epoch(found.records.last())),
        superblock,
    };
    Ok((report, found.records, log))
}

/// What attaching would find and do, step by step; with `journal_path`, the journal is judged too.
pub fn recovery(
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    journal_path: Option<&Path>,
) -> Result<RecoveryReport> {
    let options = journal_path.map(|path| OpenOptions::new(PathBuf::from(path)));
    open::dry_run(store, &record.name, options.as_ref(), &RealWorld::default())
}

/// A volume as the store has it.
pub fn at_rest(store: &dyn ObjectStore, record: &VolumeRecord) -> Result<StoredState> {
    let world = RealWorld::default();
    let stored = stored::stored_of(store, record.clone(), &mut Reporter::new(&world))?;
    let totals = stored.view.segments.totals();
    Ok(StoredState {
        size_bytes: stored.record.size_bytes,
        epoch: stored.end.epoch,
        position: stored.end.position,
        clean: stored.end.clean,
        live_bytes: stored.view.map.mapped_bytes(),
        data_bytes: totals.data_bytes,
        object_bytes: totals.object_bytes,
        segments: totals.segments,
        extents: stored.view.map.extents(),
        checkpoint_number: stored.newest.number_max,
        stored_sequence: stored.end.stored_sequence,
    })
}
