//! Passes a journal's bytes, from the superblock on, to the scan that recovery and `sawmill inspect
//! journal` share.
//!
//! Input: a byte of choices (see `MEND`), a byte of ring blocks, the first 160 bytes of either
//! superblock copy, and the ring's bytes from its first on; missing bytes are zero.
//!
//! Invariants: the same bytes give the same result twice; what is found is no more than the ring
//! holds, and the log is flushed through the superblock's mark at least.
//!
//! Not here: memory that outlives the process, which recovery reads beside the journal; superblocks
//! and records one by one (`objects`).

use std::io;
use std::sync::Arc;

use sawmill_format::crc::payload_check;
use sawmill_format::journal::{
    RECORD_HEADER_BYTES, RING_START_BYTES, SUPERBLOCK_BYTES, record_at, superblock_at,
};
use sawmill_format::preamble::Kind;
use sawmill_volume::Disk;
use sawmill_volume::inspect;

use crate::mend::{put, seal, u32_at, u64_at};
use crate::objects::mend_record;

/// Correct the checksums of records.
const MEND: u8 = 1;
/// Correct the records' position, tag and epoch for their place.
const BIND: u8 = 2;
/// Leave the superblocks' capacity as the input has it.
const RAW_CAPACITY: u8 = 4;
/// Truncate the image by a block.
const SHORT: u8 = 8;

const HEAD_BYTES: usize = 160;
const BLOCKS_MAX: usize = 16;
const BLOCK: usize = 4096;

struct Image(Vec<u8>);

impl Disk for Image {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let range = self.0.get(start..).and_then(|rest| rest.get(..into.len()));
        into.copy_from_slice(range.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, into)
    }
    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        unreachable!("a scan writes nothing")
    }
    fn sync(&self) -> io::Result<()> {
        unreachable!("a scan syncs nothing")
    }

    fn has_name(&self) -> bool {
        true
    }
}

/// Scans the journal that the input describes twice, and compares what is found.
pub(crate) fn run(bytes: &[u8]) {
    let Some(image) = image(bytes) else { return };
    let length = image.len() as u64;
    let disk = Arc::new(Image(image));
    let look = || inspect::journal_on(disk.clone(), "of the fuzzer");
    let (once, again) = (look(), look());
    let Ok(report) = once else {
        assert!(again.is_err(), "the same bytes are refused twice");
        return;
    };
    assert_eq!(
        format!("{report:?}"),
        format!("{:?}", again.expect("the same bytes are read twice"))
    );
    let capacity = report.superblock.capacity_bytes;
    assert!(RING_START_BYTES + capacity <= length);
    let scanned = report.end.checked_sub(report.from).expect("the log ends after it begins");
    assert!(scanned <= capacity, "no more is found than the ring can hold");
    let records = report.writes + report.discards + report.padding;
    assert!(records * RECORD_HEADER_BYTES as u64 + report.write_bytes <= scanned);
    assert!(report.flushed_through >= report.superblock.logged);
    assert_eq!(report.epochs.is_some(), records > 0);
}

fn image(bytes: &[u8]) -> Option<Vec<u8>> {
    let (&choices, rest) = bytes.split_first()?;
    let (&blocks, rest) = rest.split_first()?;
    let ring_bytes = (1 + usize::from(blocks) % BLOCKS_MAX) * BLOCK;
    let (heads, ring) = rest.split_at(rest.len().min(2 * HEAD_BYTES));
    let mut image = vec![0; RING_START_BYTES as usize + ring_bytes];
    for (copy, head) in heads.chunks(HEAD_BYTES).enumerate() {
        let block = &mut image[copy * SUPERBLOCK_BYTES..][..SUPERBLOCK_BYTES];
        block[..head.len()].copy_from_slice(head);
        block[superblock_at::BOUND_POSITION.offset + 8..].fill(0);
        // With the capacity of the input, almost every image would be refused before its ring is
        // read.
        if choices & RAW_CAPACITY == 0 {
            put(block, superblock_at::CAPACITY_BYTES, &(ring_bytes as u64).to_le_bytes());
        }
        seal(block, Kind::JournalSuperblock);
    }
    let (superblocks, to) = image.split_at_mut(RING_START_BYTES as usize);
    let ring = &ring[..ring.len().min(ring_bytes)];
    to[..ring.len()].copy_from_slice(ring);
    if choices & (MEND | BIND) != 0 {
        mend_ring(choices, &superblocks[..SUPERBLOCK_BYTES], to);
    }
    if choices & SHORT != 0 {
        image.truncate(image.len() - BLOCK);
    }
    Some(image)
}

/// Walks the records as a scan would, and corrects each.
fn mend_ring(choices: u8, superblock: &[u8], ring: &mut [u8]) {
    let field = |field| u64_at(superblock, field).unwrap_or(0);
    let (tag, trim) = (field(superblock_at::JOURNAL_TAG), field(superblock_at::TRIM));
    let epoch = field(superblock_at::BOUND_EPOCH);
    let seam = (trim % ring.len() as u64) as usize;
    // Records continue over the end of the ring. Rotated, they lie in one piece.
    ring.rotate_left(seam);
    let mut at = 0;
    while let Some(slot) = ring.get_mut(at..).filter(|slot| slot.len() >= RECORD_HEADER_BYTES) {
        if slot[..4] != *b"SWJR" {
            break;
        }
        let slot_bytes = u32_at(slot, record_at::SLOT_BYTES).unwrap_or(0) as usize;
        let bytes = slot_bytes.clamp(RECORD_HEADER_BYTES, slot.len());
        let slot = &mut slot[..bytes];
        if choices & BIND != 0 {
            put(slot, record_at::SLOT_BYTES, &(bytes as u32).to_le_bytes());
            put(slot, record_at::POSITION, &trim.wrapping_add(at as u64).to_le_bytes());
            put(slot, record_at::TAG, &tag.to_le_bytes());
            put(slot, record_at::EPOCH, &epoch.to_le_bytes());
            if slot[record_at::OPERATION.offset] == 1 {
                let length = (bytes - RECORD_HEADER_BYTES) as u64;
                put(slot, record_at::LENGTH, &length.to_le_bytes());
            }
        }
        if slot[record_at::OPERATION.offset] == 1 {
            let check = payload_check(&slot[RECORD_HEADER_BYTES..]);
            put(slot, record_at::PAYLOAD_CRC, &check.to_le_bytes());
        }
        mend_record(slot);
        at += bytes;
    }
    ring.rotate_right(seam);
}
