//! Reading a record's payload: from the staging ring while it is there, else from the journal disk;
//! verified.
//!
//! A segment whose writers were faster than the store is no longer in memory when it is built. Then
//! its whole stretch of the journal is read back at once ([`ReadBack`]) instead of record by
//! record.
//!
//! Invariant: nothing is returned that fails its checksum, or whose record was trimmed before the
//! copy was complete.
//!
//! Not here: which record holds an address (`map::journal`), and reading a journal after a crash
//! (`scan`).

use sawmill_format::journal::RECORD_HEADER_BYTES;
use sawmill_sys::BLOCK_BYTES;

use super::{Journal, disk_failed};
use crate::record::Record;
use crate::segment::buffers::{Buffer, Buffers};
use crate::{Error, ErrorKind, Result};

/// Where a read may get bytes that are not in memory.
#[derive(Clone, Copy)]
pub(crate) enum Reach<'a> {
    /// Not from the device.
    PageCache,
    /// From the device, if needed.
    Device,
    /// From what was read back, and the rest from the device.
    ReadBack(&'a ReadBack),
}

/// A stretch of the journal, read back from the disk.
pub(crate) struct ReadBack {
    position: u64,
    bytes: Buffer,
}

impl ReadBack {
    fn get(&self, position: u64, length: usize) -> Option<&[u8]> {
        let start = usize::try_from(position.checked_sub(self.position)?).ok()?;
        self.bytes.as_ref().get(start..start + length)
    }
}

/// How a read of a record ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JournalRead {
    /// The bytes are there and verified.
    Done,
    /// They would have to come from the device: ask again on a thread that may wait.
    Slow,
    /// The record was stored and its space used again: look the address up once more.
    Gone,
}

impl Journal {
    /// Copies payload bytes `[offset, offset + into.len())` of `record`.
    pub(crate) fn read(
        &self,
        record: &Record,
        offset: u64,
        into: &mut [u8],
        reach: Reach,
    ) -> Result<JournalRead> {
        let length = into.len() as u64;
        let (first, last) = record.pieces(offset, length);
        let (start, end) = (record.piece_range(first).0, record.piece_range(last).1);
        if start == offset && end == offset + length {
            return self.read_pieces(record, first, start, into, reach);
        }
        // The range cuts pieces, and only whole pieces can be verified.
        let mut whole = vec![0; (end - start) as usize];
        let outcome = self.read_pieces(record, first, start, &mut whole, reach)?;
        if outcome == JournalRead::Done {
            let skip = (offset - start) as usize;
            into.copy_from_slice(&whole[skip..skip + into.len()]);
        }
        Ok(outcome)
    }

    fn read_pieces(
        &self,
        record: &Record,
        first: usize,
        start: u64,
        into: &mut [u8],
        reach: Reach,
    ) -> Result<JournalRead> {
        let on_disk = match record.filled().and_then(|filled| filled.slot) {
            Some(slot) => self.ring.read(&slot, RECORD_HEADER_BYTES as u64 + start, into),
            None => into.len(),
        };
        if on_disk > 0 {
            match self.read_disk(record.payload_position() + start, &mut into[..on_disk], reach) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return Ok(JournalRead::Slow);
                }
                Err(error) => return Err(disk_failed("read", error)),
            }
        }
        let verified = record.verify(first, into);
        // Checked after the copy: if the record was still kept then, the bytes are its own.
        if self.trim() > record.position {
            return Ok(JournalRead::Gone);
        }
        if !verified {
            let text = format!(
                "journal record at position {}: its payload fails its checksum; nothing was \
                 returned; run `sawmill inspect journal`",
                record.position
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        Ok(JournalRead::Done)
    }

    fn read_disk(&self, position: u64, into: &mut [u8], reach: Reach) -> std::io::Result<()> {
        if let Reach::ReadBack(back) = reach
            && let Some(bytes) = back.get(position, into.len())
        {
            into.copy_from_slice(bytes);
            return Ok(());
        }
        let mut done = 0;
        for (offset, length) in self.parts(position, into.len() as u64) {
            let part = &mut into[done..done + length as usize];
            if part.is_empty() {
                continue;
            }
            match reach {
                Reach::PageCache => self.disk.read_now(offset, part)?,
                Reach::Device | Reach::ReadBack(_) => self.disk.read_at(offset, part)?,
            }
            done += length as usize;
        }
        Ok(())
    }

    /// Reads back the part of `[start, end)` that is no longer in memory; `None` when all of it
    /// still is.
    pub(crate) fn read_back(
        &self,
        start: u64,
        end: u64,
        buffers: &Buffers,
    ) -> Result<Option<ReadBack>> {
        let end = end.min(self.ring.low());
        if start >= end {
            return Ok(None);
        }
        // Whole blocks, into aligned memory: so the read can bypass the page cache.
        let start = start / BLOCK_BYTES * BLOCK_BYTES;
        let end = end.next_multiple_of(BLOCK_BYTES).min(self.ring.written());
        let mut bytes = buffers.take((end - start) as usize);
        let mut done = 0;
        for (offset, length) in self.parts(start, end - start) {
            let part = &mut bytes.bytes_mut()[done..done + length as usize];
            if !part.is_empty() {
                self.disk.read_at(offset, part).map_err(|error| disk_failed("read", error))?;
            }
            done += length as usize;
        }
        Ok(Some(ReadBack { position: start, bytes }))
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use parking_lot::Mutex;
    use sawmill_format::journal::RecordOperation;
    use sawmill_sys::{Span, StagingFile};

    use super::*;
    use crate::disk::Disk;
    use crate::journal::Start;

    /// Counts its reads.
    struct CountingDisk {
        bytes: Mutex<Vec<u8>>,
        reads: AtomicUsize,
    }

    impl Disk for CountingDisk {
        fn size_bytes(&self) -> u64 {
            self.bytes.lock().len() as u64
        }
        fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            let start = offset as usize;
            into.copy_from_slice(&self.bytes.lock()[start..start + into.len()]);
            Ok(())
        }
        fn read_now(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            Err(io::ErrorKind::WouldBlock.into())
        }
        fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            self.bytes.lock()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }
        fn sync(&self) -> io::Result<()> {
            Ok(())
        }

        fn has_name(&self) -> bool {
            true
        }
    }

    #[test]
    fn records_that_left_memory_are_read_back_in_one_piece_over_the_seam() {
        const CAPACITY: u64 = 256 << 10;
        const RECORDS: u64 = 60;
        let folder = tempfile::tempdir().unwrap();
        let file = StagingFile::create(&folder.path().join("staging"), 64 << 10).unwrap();
        // The disk's seam comes after the first 20 records or so.
        let position = CAPACITY - (64 << 10);
        let (ring, mut consumer) = file.into_ring(position, &[]);
        let bytes = Mutex::new(vec![0; CAPACITY as usize + 8192]);
        let disk = Arc::new(CountingDisk { bytes, reads: AtomicUsize::new(0) });
        let start = Start {
            tag: 1,
            epoch: 1,
            capacity_bytes: CAPACITY,
            first_lap_end: CAPACITY,
            position,
            trim: position,
            segments_end: position,
            stored_sequence: 0,
            unstored_records: 0,
            unstored_records_max: usize::MAX,
        };
        let journal = Journal::new(ring, disk.clone(), &start);
        let mut records = Vec::new();
        let mut span: Option<Span> = None;
        for number in 0..RECORDS {
            let fill = |into: &mut [u8]| into.fill(number as u8);
            let record = journal
                .append(RecordOperation::Write, number * 4096, 3000, fill, |_| ())
                .ok()
                .unwrap();
            let slot = record.filled().unwrap().slot.unwrap();
            let span = span.get_or_insert_with(|| Span::of(&slot));
            if span.end() < slot.end() {
                span.extend(&slot);
            }
            let (from, to) = (span.start(), span.end() / BLOCK_BYTES * BLOCK_BYTES);
            if to > from {
                let part = span.split_to(to);
                let mut bytes = consumer.bytes(&part);
                for (offset, length) in journal.parts(from, to - from) {
                    let (now, rest) = bytes.split_at(length as usize);
                    disk.write_at(offset, now).unwrap();
                    bytes = rest;
                }
                consumer.declare_written(part);
            }
            records.push(record);
        }
        let end = records.last().unwrap().end();
        let buffers = Buffers::default();
        let back =
            journal.read_back(position, end, &buffers).unwrap().expect("most of it left memory");
        assert_eq!(disk.reads.load(Ordering::Relaxed), 2, "one read on either side of the seam");
        for (number, record) in records.iter().enumerate() {
            let mut payload = [255; 3000];
            let outcome = journal.read(record, 0, &mut payload, Reach::ReadBack(&back)).unwrap();
            assert_eq!((outcome, payload), (JournalRead::Done, [number as u8; 3000]));
        }
        assert_eq!(disk.reads.load(Ordering::Relaxed), 2, "and nothing more for any record");
        let newest = journal.read_back(journal.ring.low(), end, &buffers).unwrap();
        assert!(newest.is_none(), "what is in memory is not read back");
    }
}
