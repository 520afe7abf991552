//! The bytes of a write chunk: records, then their data in the same order (BUSE thesis, tables 4.2,
//! 4.3). Little endian; sectors have 512 bytes whatever the block size.
//! `docs/format/write_chunk.md`.
//!
//! Not here: when a chunk is full, the owner of its memory.

/// A record on the wire.
pub const RECORD_BYTES: usize = 32;
/// The unit of addresses and lengths on the wire.
pub const SECTOR_BYTES: u64 = 512;
/// `flag` of a record with data. (Numbers are those of the kernel's requests, as in BUSE.)
pub const FLAG_WRITE: u64 = 1;

/// One write of a chunk, or the part of it that lies in one collision area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// First byte on the disk.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// Its number among all writes of its collision area, starting with 1. Of two writes that
    /// overlap, the higher number is newer.
    pub sequence: u64,
}

impl Record {
    /// Encodes the record.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let words =
            [self.address / SECTOR_BYTES, self.length / SECTOR_BYTES, self.sequence, FLAG_WRITE];
        let mut bytes = [0; RECORD_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes a record; `None` if the bytes are not a record of a write.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut words = [0; 4];
        for (word, bytes) in words.iter_mut().zip(bytes.get(..RECORD_BYTES)?.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        let [sector, sectors, sequence, flag] = words;
        let address = sector.checked_mul(SECTOR_BYTES)?;
        let length = sectors.checked_mul(SECTOR_BYTES)?;
        (flag == FLAG_WRITE).then_some(Record { address, length, sequence })
    }
}

/// The records of a chunk with their data. An invalid record gives `None` and ends the iteration.
pub fn records(
    chunk: &[u8],
    metadata_bytes: usize,
    count: usize,
) -> impl Iterator<Item = Option<(Record, &[u8])>> {
    let mut data_at = metadata_bytes;
    let mut record_at = move |number: usize| {
        let at = number.checked_mul(RECORD_BYTES)?;
        // From here on the chunk holds data, which a user may have made to look like a record.
        if at.checked_add(RECORD_BYTES)? > metadata_bytes {
            return None;
        }
        let record = Record::decode(chunk.get(at..)?)?;
        let end = data_at.checked_add(usize::try_from(record.length).ok()?)?;
        let data = chunk.get(data_at..end)?;
        data_at = end;
        Some((record, data))
    };
    let mut has_ended = false;
    // Without its length, it is unknown where the data of the next record lie.
    (0..count).map_while(move |number| {
        if has_ended {
            return None;
        }
        let found = record_at(number);
        has_ended = found.is_none();
        Some(found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_record_is_the_last_of_its_chunk() {
        let record = |sequence| Record { address: 0, length: SECTOR_BYTES, sequence }.encode();
        let mut invalid = record(2);
        invalid[24] = 0;
        let chunk =
            [&record(1)[..], &invalid, &record(3), &[7; 3 * SECTOR_BYTES as usize]].concat();
        let found: Vec<_> = records(&chunk, 3 * RECORD_BYTES, usize::MAX).take(9).collect();
        let first = Record { address: 0, length: SECTOR_BYTES, sequence: 1 };
        assert_eq!(found, [Some((first, &[7; SECTOR_BYTES as usize][..])), None]);
    }
}
