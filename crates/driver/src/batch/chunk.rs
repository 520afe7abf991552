//! The bytes of a write chunk: entries, then their data in the same order (BUSE thesis, tables 4.2,
//! 4.3). Little endian; sectors have 512 bytes whatever the block size.
//! `docs/format/write_chunk.md`.
//!
//! Not here: when a chunk is full, the owner of its memory.

/// An entry on the wire.
pub const ENTRY_BYTES: usize = 32;
/// The unit of addresses and lengths on the wire.
pub const SECTOR_BYTES: u64 = 512;
/// `flag` of an entry with data. (Numbers are those of the kernel's requests, as in BUSE.)
pub const FLAG_WRITE: u64 = 1;

/// One write of a chunk, or the part of it that lies in one collision area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkEntry {
    /// First byte on the disk.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// Its number among all writes of its collision area, starting with 1. Of two writes that
    /// overlap, the higher number is newer.
    pub write_number: u64,
}

impl ChunkEntry {
    /// Encodes the entry.
    #[must_use]
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let fields = [
            self.address / SECTOR_BYTES,
            self.length / SECTOR_BYTES,
            self.write_number,
            FLAG_WRITE,
        ];
        let mut bytes = [0; ENTRY_BYTES];
        for (place, field) in bytes.chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// Decodes an entry; `None` if the bytes are not an entry of a write.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = [0; 4];
        for (field, bytes) in fields.iter_mut().zip(bytes.get(..ENTRY_BYTES)?.chunks_exact(8)) {
            *field = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        let [sector, sectors, write_number, flag] = fields;
        let address = sector.checked_mul(SECTOR_BYTES)?;
        let length = sectors.checked_mul(SECTOR_BYTES)?;
        (flag == FLAG_WRITE).then_some(ChunkEntry { address, length, write_number })
    }
}

/// The entries of a chunk with their data. An invalid entry gives `None` and ends the iteration.
pub fn entries(
    chunk: &[u8],
    metadata_bytes: usize,
    count: usize,
) -> impl Iterator<Item = Option<(ChunkEntry, &[u8])>> {
    let mut data_at = metadata_bytes;
    let mut entry_at = move |number: usize| {
        let at = number.checked_mul(ENTRY_BYTES)?;
        // From here on the chunk holds data, which a user may have made to look like an entry.
        if at.checked_add(ENTRY_BYTES)? > metadata_bytes {
            return None;
        }
        let entry = ChunkEntry::decode(chunk.get(at..)?)?;
        let end = data_at.checked_add(usize::try_from(entry.length).ok()?)?;
        let data = chunk.get(data_at..end)?;
        data_at = end;
        Some((entry, data))
    };
    let mut has_ended = false;
    // Without its length, it is unknown where the data of the next entry lie.
    (0..count).map_while(move |number| {
        if has_ended {
            return None;
        }
        let found = entry_at(number);
        has_ended = found.is_none();
        Some(found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_entry_is_the_last_of_its_chunk() {
        let entry =
            |write_number| ChunkEntry { address: 0, length: SECTOR_BYTES, write_number }.encode();
        let mut invalid = entry(2);
        invalid[24] = 0;
        let chunk = [&entry(1)[..], &invalid, &entry(3), &[7; 3 * SECTOR_BYTES as usize]].concat();
        let found: Vec<_> = entries(&chunk, 3 * ENTRY_BYTES, usize::MAX).take(9).collect();
        let first = ChunkEntry { address: 0, length: SECTOR_BYTES, write_number: 1 };
        assert_eq!(found, [Some((first, &[7; SECTOR_BYTES as usize][..])), None]);
    }
}
