//! What a journal holds: its records from a position on, read from the staging memory that outlived
//! a process, if there is any, else from the disk, and judged one by one.
//!
//! Invariants: from the position that memory holds on, bytes come from memory, never from the disk.
//! Before a log that no attach has judged ends on the disk, the scan looks for a later record whose
//! mark shows that the position was flushed. No scan passes one ring's capacity.
//!
//! Not here: what is done about the verdict (`open`), or with the records (`recovery`).

use std::sync::Arc;

use sawmill_format::journal::{
    RECORD_HEADER_BYTES, RecordHeader, RecordOperation, RingCopy, Superblock,
};
use sawmill_sys::{BLOCK_BYTES, StagingFile};

use super::{disk_failed, disk_parts};
use crate::disk::Disk;
use crate::limits;
use crate::record::{Record, checks_of};
use crate::recovery::cases::{RecordFacts, Verdict, judge};
use crate::{Error, ErrorKind, Result};

/// The log as one stream of bytes: the disk's ring, overlaid by what staging memory still holds.
pub(crate) struct LogImage {
    disk: Arc<dyn Disk>,
    capacity_bytes: u64,
    /// The memory, and the position from which it counts instead of the disk.
    staging: Option<(StagingFile, u64)>,
    /// A part of the ring whose valid copy is elsewhere in it.
    ring_copy: Option<RingCopy>,
    /// See [`LogImage::is_doubtful`].
    is_doubtful: bool,
    /// See [`LogImage::synced`].
    synced: u64,
    /// Read-ahead of the disk: position and bytes.
    window: (u64, Vec<u8>),
    /// Bytes of the next read-ahead.
    reach_bytes: u64,
}

impl LogImage {
    pub(crate) fn new(
        disk: Arc<dyn Disk>,
        capacity_bytes: u64,
        mut staging: Option<StagingFile>,
    ) -> Self {
        let is_doubtful = staging.as_mut().is_some_and(StagingFile::sync_failed);
        let synced = staging.as_mut().map_or(0, StagingFile::synced);
        let staging = staging.map(|mut file| {
            let from = file.written();
            (file, from)
        });
        let reach_bytes = limits::SCAN_FIRST_BYTES;
        let (window, ring_copy) = ((0, Vec::new()), None);
        LogImage {
            disk,
            capacity_bytes,
            staging,
            ring_copy,
            is_doubtful,
            synced,
            window,
            reach_bytes,
        }
    }

    /// The position from which the bytes come from memory.
    pub(crate) fn staged_from(&self) -> Option<u64> {
        self.staging.as_ref().map(|(_, from)| *from)
    }

    fn is_staged(&self, position: u64) -> bool {
        self.staged_from().is_some_and(|from| position >= from)
    }

    /// Copies `[position, position + into.len())`.
    pub(crate) fn read(&mut self, position: u64, into: &mut [u8]) -> Result<()> {
        let split = match self.staged_from() {
            Some(from) => from.saturating_sub(position).min(into.len() as u64) as usize,
            None => into.len(),
        };
        let (on_disk, in_memory) = into.split_at_mut(split);
        if !on_disk.is_empty() {
            self.read_disk(position, on_disk)?;
        }
        if let Some((staging, from)) = &mut self.staging
            && !in_memory.is_empty()
        {
            let at = position + split as u64;
            // Beyond the ring's reach nothing was ever staged.
            let reach = (*from + staging.capacity_bytes()).saturating_sub(at);
            let (staged, beyond) =
                in_memory.split_at_mut(reach.min(in_memory.len() as u64) as usize);
            staging.copy_out(at, staged);
            beyond.fill(0);
        }
        Ok(())
    }

    fn read_disk(&mut self, position: u64, into: &mut [u8]) -> Result<()> {
        let length = into.len() as u64;
        let (start, bytes) = &self.window;
        let covered = position >= *start && position + length <= *start + bytes.len() as u64;
        if !covered {
            let reach = self.reach_bytes.max(length).min(self.capacity_bytes);
            self.reach_bytes = (2 * self.reach_bytes).min(limits::SCAN_BYTES);
            let mut window = vec![0; reach as usize];
            self.read_ring(position, &mut window)?;
            if let Some(RingCopy { from, at, bytes }) = self.ring_copy {
                let (start, end) = (from.max(position), (from + bytes).min(position + reach));
                if start < end {
                    let part = &mut window[(start - position) as usize..(end - position) as usize];
                    self.read_ring(at + (start - from), part)?;
                }
            }
            self.window = (position, window);
        }
        let (start, bytes) = &self.window;
        let from = (position - start) as usize;
        into.copy_from_slice(&bytes[from..from + into.len()]);
        Ok(())
    }

    /// The bytes on the disk, even where a copy counts instead of them.
    fn read_ring(&self, position: u64, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        for (offset, length) in disk_parts(self.capacity_bytes, position, into.len() as u64) {
            let part = &mut into[done..done + length as usize];
            if !part.is_empty() {
                self.disk.read_at(offset, part).map_err(|e| disk_failed("read", e))?;
            }
            done += length as usize;
        }
        Ok(())
    }

    /// Adds a copy of a part of the ring, which counts instead of that part.
    pub(crate) fn with_copy(self, ring_copy: Option<RingCopy>) -> Self {
        LogImage { ring_copy, ..self }
    }

    /// The ring is whole in its place again.
    pub(crate) fn forget_copy(&mut self) {
        (self.ring_copy, self.window) = (None, (0, Vec::new()));
    }

    /// There was memory in this boot, but it is lost, and with it any record of a failed sync.
    pub(crate) fn with_memory_lost(self) -> Self {
        LogImage { is_doubtful: true, ..self }
    }

    /// Whether what can be read may still not be durable.
    pub(crate) fn is_doubtful(&self) -> bool {
        self.is_doubtful
    }

    /// The position through which the process that left the memory had recorded a sync of the disk.
    pub(crate) fn synced(&self) -> u64 {
        self.synced
    }

    /// From here on this process syncs the disk, and may die while it does. The next process must
    /// then rewrite what it reads from the disk. This attach continues as it is.
    pub(crate) fn doubt_syncs(&mut self) {
        if let Some((staging, _)) = &mut self.staging {
            staging.doubt_syncs();
        }
    }

    /// Gives the staging memory back.
    pub(crate) fn into_staging(self) -> Option<StagingFile> {
        self.staging.map(|(file, _)| file)
    }
}

/// A record found, complete and verified.
pub(crate) struct ScannedRecord {
    pub(crate) header: RecordHeader,
    /// None for padding and voids.
    pub(crate) record: Option<Arc<Record>>,
}

/// What a scan found.
pub(crate) struct Scan {
    pub(crate) records: Vec<ScannedRecord>,
    /// Where the log ends.
    pub(crate) end: u64,
    /// Slots that were reserved and never filled: position and length.
    pub(crate) voids: Vec<(u64, u64)>,
    /// Why the scan ended there.
    pub(crate) why: &'static str,
    /// Everything before here was flushed.
    pub(crate) mark: u64,
}

/// Which log is scanned.
#[derive(Clone, Copy)]
pub(crate) struct ScanOptions {
    pub(crate) tag: u64,
    pub(crate) from: u64,
    /// The epoch bound last. Records before `bound_position` may have older epochs; from there on,
    /// only records of this epoch count, because intact records of an older epoch that an earlier
    /// recovery gave up may still lie there.
    pub(crate) epoch: u64,
    /// See `epoch`.
    pub(crate) bound_position: u64,
    /// The superblock's mark.
    pub(crate) mark: u64,
    /// An earlier attach judged this log, wrote its mark into the superblock, and may then have
    /// overwritten what lies past the log's end: marks in records do not count any more.
    pub(crate) judged: bool,
    /// Treat damage as the end (the user accepts the loss).
    pub(crate) accept_loss: bool,
}

impl ScanOptions {
    /// Options for the log whose superblock is `block`, from position `from` on. Damage is refused.
    pub(crate) fn of(block: &Superblock, from: u64) -> Self {
        ScanOptions {
            tag: block.journal_tag,
            from,
            epoch: block.bound_epoch,
            bound_position: block.bound_position,
            mark: block.logged,
            judged: block.intent_epoch != 0,
            accept_loss: false,
        }
    }

    /// Raises the mark to what the process that left the memory had synced. If an earlier attach
    /// judged this log, its own mark includes that already, and it may since have written a pad in
    /// place of a record that spanned that position.
    pub(crate) fn synced_through(self, synced: u64) -> Self {
        let synced = if self.judged { 0 } else { synced };
        ScanOptions { mark: self.mark.max(synced), ..self }
    }

    fn allows(&self, position: u64, epoch: u64) -> bool {
        if position >= self.bound_position { epoch == self.epoch } else { epoch <= self.epoch }
    }
}

/// Describes the loss of a log from `position` on, if it was flushed through `mark`.
fn lost_behind(position: u64, mark: u64) -> String {
    match mark.checked_sub(position) {
        None | Some(0) => "how much was accepted from there on is not known".to_owned(),
        Some(bytes) => format!("that loses at least {bytes} bytes of the flushed log"),
    }
}

/// Scans a log from `options.from` to its end.
pub(crate) fn scan(log: &mut LogImage, options: &ScanOptions) -> Result<Scan> {
    if options.from > limits::POSITION_MAX {
        let text = format!(
            "the log claims to continue at position {}, beyond every valid one",
            options.from
        );
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    let mut mark = options.mark;
    let mut scan =
        Scan { records: Vec::new(), end: options.from, voids: Vec::new(), why: "", mark };
    let mut has_looked_ahead = false;
    let end_max = options.from + log.capacity_bytes;
    loop {
        let position = scan.end;
        if position + RECORD_HEADER_BYTES as u64 > end_max {
            scan.why = "the whole ring";
            break;
        }
        let (facts, found, slot_bytes) = examine(log, options, position, mark)?;
        let (label, verdict) = judge(facts);
        match verdict {
            Verdict::Keep => {
                let Some(found) = found else { break };
                if !options.judged {
                    mark = mark.max(found.header.logged);
                }
                scan.end += slot_bytes;
                scan.records.push(found);
            }
            Verdict::Skip => {
                scan.voids.push((position, slot_bytes));
                scan.end += slot_bytes;
            }
            // In memory, slots are contiguous: after a position without one, there are no more.
            Verdict::Stop if !has_looked_ahead && !options.judged && !log.is_staged(position) => {
                // A later record may show that this position was flushed: then it is not the tail.
                has_looked_ahead = true;
                mark = mark.max(mark_ahead(log, options, position)?);
                continue;
            }
            Verdict::Refuse if !options.accept_loss => {
                let text = format!(
                    "the journal is damaged at position {position} ({label}), and it was flushed \
                     through {mark}: {}; nothing was changed; restore the journal disk (`sawmill \
                     inspect journal` shows it), or pass --accept-journal-loss to continue with \
                     what is before the damage",
                    lost_behind(position, mark)
                );
                return Err(Error::new(ErrorKind::Corrupt, text));
            }
            Verdict::Stop | Verdict::Refuse => {
                scan.why = label;
                break;
            }
        }
        has_looked_ahead = false;
    }
    scan.mark = mark;
    Ok(scan)
}

/// Looks at one position: the facts, the record if it is whole, and the slot's length if its head
/// is valid.
fn examine(
    log: &mut LogImage,
    options: &ScanOptions,
    position: u64,
    mark: u64,
) -> Result<(RecordFacts, Option<ScannedRecord>, u64)> {
    let tag = options.tag;
    let mut head = [0u8; RECORD_HEADER_BYTES];
    log.read(position, &mut head)?;
    let largest = limits::RECORD_PAYLOAD_BYTES_MAX + RECORD_HEADER_BYTES as u64;
    let slot = RecordHeader::decode_slot(&head, tag, position).ok().map(u64::from);
    // A slot that ends more than a ring's capacity past `from` would overwrite the start of the
    // log.
    let reach_max =
        (options.from + log.capacity_bytes - position).min(largest.max(2 * BLOCK_BYTES));
    let slot = slot.filter(|bytes| *bytes <= reach_max);
    let header = RecordHeader::decode(&head, tag, position).ok();
    let header = header.filter(|header| slot.is_some() && options.allows(position, header.epoch));
    let mut facts = RecordFacts {
        has_slot: slot.is_some(),
        has_header: header.is_some(),
        has_payload: false,
        // A mark is block-aligned, often inside a record: only a record that ends before it was
        // flushed.
        is_below_mark: position + slot.unwrap_or(RECORD_HEADER_BYTES as u64) <= mark,
        is_staged: log.is_staged(position),
    };
    let Some(header) = header else { return Ok((facts, None, slot.unwrap_or(0))) };
    let mut record = None;
    match header.operation {
        RecordOperation::Write => {
            let mut payload = vec![0; header.length as usize];
            log.read(position + RECORD_HEADER_BYTES as u64, &mut payload)?;
            let (checks, whole) = checks_of(header.address, &payload);
            facts.has_payload = whole == header.payload_crc;
            let found = Record::new(
                position,
                header.operation,
                header.address,
                header.length,
                header.slot_bytes,
            );
            found.fill(None, checks);
            record = Some(Arc::new(found));
        }
        RecordOperation::Discard | RecordOperation::Zero => {
            facts.has_payload = true;
            let found = Record::new(
                position,
                header.operation,
                header.address,
                header.length,
                header.slot_bytes,
            );
            found.fill(None, crate::record::Checks::None);
            record = Some(Arc::new(found));
        }
        RecordOperation::Pad | RecordOperation::Void => facts.has_payload = true,
    }
    Ok((facts, Some(ScannedRecord { header, record }), u64::from(header.slot_bytes)))
}

/// The highest mark in records beyond `position`. Flushes end in whole blocks, so records begin at
/// block boundaries often enough; and a mark reaches the superblock every [`limits::MARK_BYTES`].
fn mark_ahead(log: &mut LogImage, options: &ScanOptions, position: u64) -> Result<u64> {
    let mut mark = 0;
    let mut at = (position + 1).next_multiple_of(BLOCK_BYTES);
    let end =
        (position + 2 * limits::MARK_BYTES).min(options.from + log.capacity_bytes - BLOCK_BYTES);
    let mut head = [0u8; RECORD_HEADER_BYTES];
    while at < end {
        log.read(at, &mut head)?;
        if let Ok(header) = RecordHeader::decode(&head, options.tag, at)
            && options.allows(at, header.epoch)
        {
            mark = mark.max(header.logged);
        }
        at += BLOCK_BYTES;
    }
    Ok(mark)
}

#[cfg(test)]
mod tests {
    use sawmill_sys::StagingFile;

    use super::*;

    #[test]
    fn a_loss_above_every_mark_is_not_said_to_be_nothing() {
        assert_eq!(lost_behind(100, 300), "that loses at least 200 bytes of the flushed log");
        for mark in [0, 100] {
            assert!(lost_behind(100, mark).contains("is not known"), "{mark}");
        }
    }

    struct NoDisk;

    impl Disk for NoDisk {
        fn size_bytes(&self) -> u64 {
            0
        }

        fn read_at(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
            Err(std::io::ErrorKind::Unsupported.into())
        }

        fn read_now(&self, offset: u64, into: &mut [u8]) -> std::io::Result<()> {
            self.read_at(offset, into)
        }

        fn write_at(&self, _: u64, _: &[u8]) -> std::io::Result<()> {
            Err(std::io::ErrorKind::Unsupported.into())
        }

        fn sync(&self) -> std::io::Result<()> {
            Ok(())
        }

        fn has_name(&self) -> bool {
            true
        }
    }

    /// Seed 110168374: the pad of an attach that died was mistaken for a flushed record that is
    /// damaged.
    #[test]
    fn what_memory_says_was_synced_counts_until_an_attach_has_judged_the_log() {
        let options = ScanOptions {
            tag: 1,
            from: 0,
            epoch: 1,
            bound_position: 0,
            mark: 4096,
            judged: false,
            accept_loss: false,
        };
        assert_eq!(options.synced_through(8192).mark, 8192);
        assert_eq!(options.synced_through(0).mark, 4096);
        assert_eq!(ScanOptions { judged: true, ..options }.synced_through(8192).mark, 4096);
    }

    /// A chunk in whole blocks may reach past what a full ring held; what it did hold must not
    /// become zeroes.
    #[test]
    fn memory_is_read_to_its_last_byte_and_is_zero_beyond() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("staging");
        let (ring, _consumer) =
            StagingFile::create(&path, 8192).unwrap().into_ring(4096, b"header");
        let (slot, ()) = ring.reserve(8192, |_, bytes| bytes.fill(7)).unwrap();
        let _ = slot.publish();
        ring.unlock();
        drop(ring);
        let staging = StagingFile::open(&path).unwrap();
        let mut log = LogImage::new(Arc::new(NoDisk), 1 << 20, staging);
        let mut bytes = vec![1; 12288];
        log.read(4096, &mut bytes[..8192]).unwrap();
        assert!(bytes[..8192].iter().all(|byte| *byte == 7), "all of the ring");
        log.read(8192, &mut bytes[..8192]).unwrap();
        assert!(
            bytes[..4096].iter().all(|byte| *byte == 7)
                && bytes[4096..8192].iter().all(|byte| *byte == 0)
        );
    }
}
