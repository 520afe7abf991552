//! Settles a journal's log: what only memory holds, and what the disk may not have kept, is written
//! to the disk before the memory is removed and the new attachment starts.
//!
//! Invariant: data that may have been flushed is in two places while it is rewritten. A power cut
//! may leave a sector of a write in flight with neither its old nor its new bytes.
//!
//! Not here: what the log holds (`journal::scan`), and whether its memory is the right one
//! (`memory`).

use sawmill_format::journal::{
    RECORD_HEADER_BYTES, RecordHeader, RecordOperation, RingCopy, Superblock,
};
use sawmill_sys::{AlignedBytes, BLOCK_BYTES, StagingFile};

use crate::disk::Disk;
use crate::journal::scan::{LogImage, Scan};
use crate::journal::superblock::SuperblockFile;
use crate::journal::{disk_failed, disk_parts, encode_header};
use crate::{Result, limits};

/// Moves what only memory holds to the disk, turns slots that were never filled into voids, and
/// rewrites what the disk may not have kept; the caller syncs. Everything before `stored` is in the
/// store. Returns the memory, which is valid until the superblock records that it is not needed.
pub(super) fn settle(
    mut log: LogImage,
    scan: &Scan,
    disk: &dyn Disk,
    superblock: &mut SuperblockFile,
    stored: u64,
) -> Result<Option<StagingFile>> {
    let capacity_bytes = superblock.current().capacity_bytes;
    finish_copy(&mut log, disk, superblock)?;
    let from = stored.max(superblock.current().trim);
    if log.is_doubtful() {
        // What is readable may not be durable. Everything before the mark is durable, so it is not
        // rewritten.
        let end = log.staged_from().unwrap_or(scan.end).min(scan.end);
        rewrite(&mut log, scan.mark.max(from)..end, scan.end, disk, superblock, from)?;
    }
    let Some(staged_from) = log.staged_from() else { return Ok(None) };
    let end = scan.end.next_multiple_of(BLOCK_BYTES);
    write_in_place(&mut log, staged_from / BLOCK_BYTES * BLOCK_BYTES, end, disk, capacity_bytes)?;
    for (position, slot_bytes) in &scan.voids {
        let head = void(superblock.current(), *position, *slot_bytes);
        write_ring(disk, capacity_bytes, *position, &head)?;
    }
    Ok(log.into_staging())
}

/// An earlier attach died while it rewrote a part: the copy of that part counts.
fn finish_copy(log: &mut LogImage, disk: &dyn Disk, superblock: &mut SuperblockFile) -> Result<()> {
    let Some(RingCopy { from, bytes, .. }) = superblock.current().ring_copy else { return Ok(()) };
    write_in_place(log, from, from + bytes, disk, superblock.current().capacity_bytes)?;
    disk.sync().map_err(|error| disk_failed("sync", error))?;
    superblock.write(|block| block.ring_copy = None)?;
    log.forget_copy();
    Ok(())
}

/// Rewrites the bytes of `part` on the disk, each piece first to free space of the ring after
/// `end`. Everything before `from` is free.
fn rewrite(
    log: &mut LogImage,
    part: std::ops::Range<u64>,
    end: u64,
    disk: &dyn Disk,
    superblock: &mut SuperblockFile,
    from: u64,
) -> Result<()> {
    let capacity_bytes = superblock.current().capacity_bytes;
    let copy_at = (end + RECORD_HEADER_BYTES as u64).next_multiple_of(BLOCK_BYTES);
    let free = (from / BLOCK_BYTES * BLOCK_BYTES + capacity_bytes).saturating_sub(copy_at);
    let mut at = part.start;
    if at < part.end && free < limits::SPAN_BYTES {
        // Each piece costs four syncs: with small pieces, a full journal would take hours.
        tracing::warn!(
            "the journal is full: its newest records are rewritten without a second copy"
        );
        return write_in_place(log, at, part.end, disk, capacity_bytes);
    }
    while at < part.end {
        // Up to a block boundary: a block is the smallest unit of the disk's writes.
        let piece_end = at / BLOCK_BYTES * BLOCK_BYTES + limits::SPAN_BYTES;
        let to = piece_end.min(part.end.next_multiple_of(BLOCK_BYTES));
        let mut bytes = AlignedBytes::zeroed((to - at) as usize);
        log.read(at, &mut bytes)?;
        write_ring(disk, capacity_bytes, copy_at, &bytes)?;
        // Before the superblock that names it, because a power cut may keep only the superblock.
        disk.sync().map_err(|error| disk_failed("sync", error))?;
        superblock.write(|block| {
            block.ring_copy = Some(RingCopy { from: at, at: copy_at, bytes: to - at })
        })?;
        write_ring(disk, capacity_bytes, at, &bytes)?;
        disk.sync().map_err(|error| disk_failed("sync", error))?;
        // The next copy replaces it.
        superblock.write(|block| block.ring_copy = None)?;
        at = to;
    }
    Ok(())
}

fn write_in_place(
    log: &mut LogImage,
    mut at: u64,
    end: u64,
    disk: &dyn Disk,
    capacity_bytes: u64,
) -> Result<()> {
    while at < end {
        let length = limits::SPAN_BYTES.min(end - at);
        let mut chunk = AlignedBytes::zeroed(length as usize);
        log.read(at, &mut chunk)?;
        write_ring(disk, capacity_bytes, at, &chunk)?;
        at += length;
    }
    Ok(())
}

/// The header of a slot that was given up.
fn void(block: &Superblock, position: u64, slot_bytes: u64) -> [u8; RECORD_HEADER_BYTES] {
    let header = RecordHeader {
        slot_bytes: slot_bytes as u32,
        position,
        tag: block.journal_tag,
        operation: RecordOperation::Void,
        epoch: block.bound_epoch,
        logged: 0,
        address: 0,
        length: 0,
        payload_crc: 0,
    };
    let mut head = [0; RECORD_HEADER_BYTES];
    encode_header(&header, &mut head);
    head
}

/// Writes bytes of the log to their place in the ring.
pub(super) fn write_ring(
    disk: &dyn Disk,
    capacity_bytes: u64,
    position: u64,
    bytes: &[u8],
) -> Result<()> {
    let mut done = 0;
    for (offset, length) in disk_parts(capacity_bytes, position, bytes.len() as u64) {
        if length > 0 {
            let part = &bytes[done..done + length as usize];
            disk.write_at(offset, part).map_err(|error| disk_failed("write", error))?;
            done += length as usize;
        }
    }
    Ok(())
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::io;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use sawmill_format::journal::RING_START_BYTES;

    use super::*;
    use crate::journal::superblock::test_journal::{VOLUME, first_superblock};

    const CAPACITY_BYTES: u64 = 4 * limits::SPAN_BYTES;

    /// A disk whose power is cut in the middle of a write. Every sector of that write is garbage;
    /// writes that were not synced are as they were before.
    struct CutInside {
        now: Vec<u8>,
        durable: Vec<u8>,
        writes_left: usize,
    }

    impl Disk for Mutex<CutInside> {
        fn size_bytes(&self) -> u64 {
            RING_START_BYTES + CAPACITY_BYTES
        }
        fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            into.copy_from_slice(&self.lock().now[offset as usize..][..into.len()]);
            Ok(())
        }
        fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            self.read_at(offset, into)
        }
        fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            let disk = &mut *self.lock();
            if disk.writes_left == 0 {
                disk.durable[offset as usize..][..bytes.len()].fill(0xee);
                return Err(io::ErrorKind::Other.into());
            }
            disk.writes_left -= 1;
            disk.now[offset as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }
        fn sync(&self) -> io::Result<()> {
            let disk = &mut *self.lock();
            disk.durable.clone_from(&disk.now);
            Ok(())
        }
        fn has_name(&self) -> bool {
            true
        }
    }

    fn read(
        disk: &Arc<Mutex<CutInside>>,
        copy: Option<RingCopy>,
        part: std::ops::Range<u64>,
    ) -> Vec<u8> {
        let mut log = LogImage::new(disk.clone(), CAPACITY_BYTES, None).with_copy(copy);
        let mut bytes = vec![0; (part.end - part.start) as usize];
        log.read(part.start, &mut bytes).unwrap();
        bytes
    }

    /// Rewrites a part of the log on a disk that is cut inside the write after `writes`. Returns
    /// whether the cut happened.
    fn cut_after(writes: usize) -> bool {
        let part = 1000..2 * limits::SPAN_BYTES - 500;
        let mut bytes: Vec<u8> =
            (0..RING_START_BYTES + CAPACITY_BYTES).map(|at| (at % 251) as u8).collect();
        bytes[..RING_START_BYTES as usize].fill(0);
        let disk = CutInside { now: bytes.clone(), durable: bytes, writes_left: usize::MAX };
        let disk = Arc::new(Mutex::new(disk));
        let block = Superblock { capacity_bytes: CAPACITY_BYTES, ..first_superblock() };
        let mut superblock = SuperblockFile::first(disk.clone(), block);
        superblock.write(|_| ()).unwrap();
        superblock.write(|_| ()).unwrap();
        let expected = read(&disk, None, part.clone());
        let mut log = LogImage::new(disk.clone(), CAPACITY_BYTES, None);
        disk.lock().writes_left = writes;
        let outcome = rewrite(&mut log, part.clone(), part.end, &*disk, &mut superblock, 0);
        let left = disk.lock().durable.clone();
        let disk =
            Arc::new(Mutex::new(CutInside { now: left.clone(), durable: left, writes_left: 0 }));
        let superblock = SuperblockFile::read(disk.clone(), VOLUME).unwrap().unwrap();
        let copy = superblock.current().ring_copy;
        assert!(read(&disk, copy, part) == expected, "lost by a cut inside write {writes}");
        outcome.is_err()
    }

    #[test]
    fn no_power_cut_inside_a_write_loses_what_is_rewritten() {
        let cuts = (0..).take_while(|writes| cut_after(*writes)).count();
        assert_eq!(
            cuts,
            2 * 4,
            "two pieces: the copy, what names it, the piece, and the copy forgotten"
        );
    }
}
