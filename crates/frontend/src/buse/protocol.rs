//! The bytes that a BUSE device and its server exchange: packets, the records of a chunk,
//! acknowledgements (`docs/format/buse_device.md`).
//!
//! Invariant: whatever the bytes, every change that is returned lies inside the chunk, and its
//! range does not overflow. Not here: files and memory.

use sawmill_device::Operation;

pub(super) const WRITE_PACKET_BYTES: usize = 16;
pub(super) const READ_PACKET_BYTES: usize = 24;
const RECORD_BYTES: usize = 32;
const SECTOR_BYTES: u64 = 512;

/// A `shm_offset` above this is a token of a flush.
const FLUSH_ABOVE: u64 = 1 << 32;
const END: u64 = u64::MAX;

/// What a write port hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WritePacket {
    /// The chunk at this place of the memory, with so many records.
    Chunk {
        offset: u64,
        records: u64,
    },
    /// A flush, with its token.
    Flush(u64),
    End,
}

/// What a read port hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadPacket {
    /// A read of a range in bytes, to this place of the memory.
    Read {
        address: u64,
        length: u64,
        offset: u64,
    },
    End,
}

/// The sizes of a chunk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkLayout {
    pub(super) chunk_bytes: u64,
    pub(super) block_bytes: u64,
}

/// A change that a chunk has. A write's bytes lie at `data_at` in the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) operation: Operation,
    pub(super) address: u64,
    pub(super) length: u64,
    pub(super) data_at: usize,
}

/// The number at a place; the caller has checked the length.
fn number(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// A range of sectors in bytes.
fn range(sector: u64, sectors: u64) -> Option<(u64, u64)> {
    let (address, length) = (sector.checked_mul(SECTOR_BYTES)?, sectors.checked_mul(SECTOR_BYTES)?);
    address.checked_add(length).map(|_| (address, length))
}

impl WritePacket {
    pub(super) fn parse(packet: &[u8; WRITE_PACKET_BYTES]) -> Self {
        match number(packet, 0) {
            END => WritePacket::End,
            token if token > FLUSH_ABOVE => WritePacket::Flush(token),
            offset => WritePacket::Chunk { offset, records: number(packet, 8) },
        }
    }
}

impl ReadPacket {
    /// A range that overflows is as long as nothing is.
    pub(super) fn parse(packet: &[u8; READ_PACKET_BYTES]) -> Self {
        let offset = number(packet, 16);
        if offset == END {
            return ReadPacket::End;
        }
        let found = range(number(packet, 0), number(packet, 8));
        let (address, length) = found.unwrap_or((u64::MAX, u64::MAX));
        ReadPacket::Read { address, length, offset }
    }
}

/// The acknowledgement of a packet, with a positive error number, or 0.
pub(super) fn acknowledgement(token: u64, errno: i32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&token.to_le_bytes());
    bytes[8..12].copy_from_slice(&errno.to_le_bytes());
    bytes
}

impl ChunkLayout {
    /// The changes of a chunk, in their order. Writes that follow each other on the disk are one,
    /// up to `write_bytes_max`, and longer ones are several. `None` if they do not fit in the
    /// chunk.
    pub(super) fn changes(
        &self,
        chunk: &[u8],
        records: u64,
        write_bytes_max: u64,
    ) -> Option<Vec<Change>> {
        let places = self.chunk_bytes / self.block_bytes;
        if records > places || (chunk.len() as u64) < self.chunk_bytes {
            return None;
        }
        let mut data_at = usize::try_from(places).ok()? * RECORD_BYTES;
        let mut changes: Vec<Change> = Vec::with_capacity(records as usize);
        for record in chunk.chunks_exact(RECORD_BYTES).take(records as usize) {
            let (address, length) = range(number(record, 0), number(record, 8))?;
            let operation = match number(record, 24) {
                1 => Operation::Write,
                3 => Operation::Discard,
                5 | 9 => Operation::WriteZeroes,
                _ => return None,
            };
            if length == 0 {
                return None;
            }
            if operation != Operation::Write {
                changes.push(Change { operation, address, length, data_at });
                continue;
            }
            let end = usize::try_from(length).ok()?.checked_add(data_at)?;
            if end as u64 > self.chunk_bytes {
                return None;
            }
            push_write(&mut changes, address, data_at..end, write_bytes_max);
            data_at = end;
        }
        Some(changes)
    }
}

/// Adds a write: to the one before it, as far as it continues that one.
fn push_write(
    changes: &mut Vec<Change>,
    mut address: u64,
    mut data: std::ops::Range<usize>,
    write_bytes_max: u64,
) {
    if let Some(last) = changes.last_mut()
        && last.operation == Operation::Write
        && last.address + last.length == address
        && last.data_at + last.length as usize == data.start
    {
        let added = (data.len() as u64).min(write_bytes_max.saturating_sub(last.length));
        last.length += added;
        address += added;
        data.start += added as usize;
    }
    while !data.is_empty() {
        let length = (data.len() as u64).min(write_bytes_max);
        let operation = Operation::Write;
        changes.push(Change { operation, address, length, data_at: data.start });
        address += length;
        data.start += length as usize;
    }
}
