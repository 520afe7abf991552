//! A packed write: many ranges of bytes near one address as the payload of one write request (BASS
//! §3.1).
//!
//! Invariants: entries are in order, not empty, and do not touch each other (what touches is one
//! entry), so a set of ranges has exactly one encoding; offsets count from the address of the
//! request. Neither encoder nor decoder allocates, and neither reads a byte of the data.
//!
//! Not here: a checksum (the link seals what it carries), and which ranges are packed (the link's
//! cache).

use crate::error::check_field;
use crate::layout::layout;
use crate::{FormatError, Result};

layout! {
    /// Bytes of the header; the entries follow.
    at, "Packed write", 16;
    MAGIC: 0, 4, "magic";
    VERSION: 4, 2, "version";
    RESERVED: 6, 2, "reserved";
    ENTRY_COUNT: 8, 4, "entry_count";
    DATA_BYTES: 12, 4, "data_bytes";
}

layout! {
    /// Bytes of one entry; the data of all of them follow the last.
    entry_at, "Packed write entry", 8;
    OFFSET: 0, 4, "offset";
    LENGTH: 4, 4, "length";
}

/// The first bytes of every packed write: not text, and an unlikely value for a counter or a
/// pointer.
pub const MAGIC: u32 = 0xd5b1_57ac;
/// The version this build writes and reads.
pub const VERSION: u16 = 1;
/// The most entries of one packed write.
pub const ENTRY_COUNT_MAX: u32 = 1 << 16;
/// The longest distance from the request's address to the end of its last entry, in bytes.
pub const SPAN_BYTES_MAX: u32 = 1 << 30;

const WHAT: &str = "packed write";

/// A checked packed write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedWrite<'a> {
    table: &'a [u8],
    data: &'a [u8],
}

impl<'a> PackedWrite<'a> {
    /// Reads a whole payload: nothing may follow it.
    pub fn decode(bytes: &'a [u8]) -> Result<PackedWrite<'a>> {
        let (header, rest) = split(bytes, at::SIZE as u64)?;
        if at::MAGIC.u32(header) != MAGIC {
            return Err(FormatError::Magic { what: WHAT });
        }
        let found = at::VERSION.u16(header);
        if found != VERSION {
            return Err(FormatError::Version { what: WHAT, found, supported: VERSION });
        }
        if !at::RESERVED.is_zero(header) {
            return Err(FormatError::Reserved { what: WHAT });
        }
        let count = at::ENTRY_COUNT.u32(header);
        let counted = (1..=ENTRY_COUNT_MAX).contains(&count);
        check_field(WHAT, "entry_count", "it is zero or above the limit", counted)?;
        let (table, data) = split(rest, u64::from(count) * entry_at::SIZE as u64)?;
        let agrees = u64::from(at::DATA_BYTES.u32(header)) == data.len() as u64;
        check_field(WHAT, "data_bytes", "it does not agree with the length", agrees)?;
        check_table(table, data.len() as u64)?;
        Ok(PackedWrite { table, data })
    }

    /// Every range in order: its offset from the request's address, and its bytes.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (u32, &'a [u8])> + Clone + use<'a> {
        let mut data = self.data;
        self.table.chunks_exact(entry_at::SIZE).map(move |entry| {
            let (bytes, rest) = data.split_at(entry_at::LENGTH.u32(entry) as usize);
            data = rest;
            (entry_at::OFFSET.u32(entry), bytes)
        })
    }

    /// From the request's address to the end of the last range, in bytes: more than zero.
    #[must_use]
    pub fn span_bytes(&self) -> u32 {
        let last = self.table.len() - entry_at::SIZE;
        let entry = &self.table[last..];
        entry_at::OFFSET.u32(entry) + entry_at::LENGTH.u32(entry)
    }
}

/// Checks that each entry is not empty and lies behind the one before with a gap, and that all of
/// them together are as long as the data.
fn check_table(table: &[u8], data_bytes: u64) -> Result<()> {
    let (mut end, mut total) = (None, 0_u64);
    for entry in table.chunks_exact(entry_at::SIZE) {
        let (offset, length) = (entry_at::OFFSET.u32(entry), entry_at::LENGTH.u32(entry));
        check_field(WHAT, "length", "an entry is empty", length > 0)?;
        let behind = end.is_none_or(|end| u64::from(offset) > end);
        check_field(WHAT, "offset", "entries overlap, touch or are out of order", behind)?;
        let stop = u64::from(offset) + u64::from(length);
        check_field(WHAT, "length", "the span is too long", stop <= u64::from(SPAN_BYTES_MAX))?;
        end = Some(stop);
        total += u64::from(length);
    }
    check_field(WHAT, "length", "the entries are not as long as the data", total == data_bytes)
}

fn split(bytes: &[u8], need: u64) -> Result<(&[u8], &[u8])> {
    let have = bytes.len() as u64;
    let halves = usize::try_from(need).ok().and_then(|need| bytes.split_at_checked(need));
    halves.ok_or(FormatError::Truncated { what: WHAT, need, have })
}

/// Bytes of `ranges` as a packed write, in which ranges that touch are one entry.
pub fn encoded_bytes<'a>(ranges: impl IntoIterator<Item = (u32, &'a [u8])>) -> u64 {
    let (mut end, mut bytes) = (None, at::SIZE as u64);
    for (offset, data) in ranges {
        if end != Some(u64::from(offset)) {
            bytes += entry_at::SIZE as u64;
        }
        end = Some(u64::from(offset) + data.len() as u64);
        bytes += data.len() as u64;
    }
    bytes
}

/// Writes `ranges` (offset from the request's address, bytes; in order) as a packed write to the
/// first bytes of `into`, and returns how many. Ranges that touch become one entry.
///
/// Errors: `Truncated` when `into` is too short, `Field` when the ranges break a rule of the
/// structure; the content of `into` is then undefined.
pub fn encode<'a, R>(ranges: R, into: &mut [u8]) -> Result<usize>
where
    R: IntoIterator<Item = (u32, &'a [u8])> + Clone,
{
    let need = encoded_bytes(ranges.clone());
    let data_bytes: u64 = ranges.clone().into_iter().map(|(_, data)| data.len() as u64).sum();
    let count = (need - data_bytes - at::SIZE as u64) / entry_at::SIZE as u64;
    let counted = (1..=u64::from(ENTRY_COUNT_MAX)).contains(&count);
    check_field(WHAT, "entry_count", "it is zero or above the limit", counted)?;
    let fits = data_bytes <= u64::from(SPAN_BYTES_MAX);
    check_field(WHAT, "length", "the span is too long", fits)?;
    let have = into.len() as u64;
    let bytes = usize::try_from(need).ok().and_then(|need| into.get_mut(..need));
    let bytes = bytes.ok_or(FormatError::Truncated { what: WHAT, need, have })?;
    let (header, rest) = bytes.split_at_mut(at::SIZE);
    at::MAGIC.put(header, MAGIC.to_le_bytes());
    at::VERSION.put(header, VERSION.to_le_bytes());
    at::RESERVED.put(header, [0; 2]);
    at::ENTRY_COUNT.put(header, (count as u32).to_le_bytes());
    at::DATA_BYTES.put(header, (data_bytes as u32).to_le_bytes());
    let (table, data) = rest.split_at_mut(count as usize * entry_at::SIZE);
    put_ranges(ranges, table, data);
    check_table(table, data_bytes)?;
    Ok(need as usize)
}

fn put_ranges<'a>(
    ranges: impl IntoIterator<Item = (u32, &'a [u8])>,
    table: &mut [u8],
    data: &mut [u8],
) {
    let (mut entries, mut place) = (table.chunks_exact_mut(entry_at::SIZE), 0);
    let mut open: Option<(u32, u32)> = None;
    let mut close = |(offset, length): (u32, u32)| {
        if let Some(entry) = entries.next() {
            entry_at::OFFSET.put(entry, offset.to_le_bytes());
            entry_at::LENGTH.put(entry, length.to_le_bytes());
        }
    };
    for (offset, bytes) in ranges {
        data[place..place + bytes.len()].copy_from_slice(bytes);
        place += bytes.len();
        // All data together fit 32 bits; an offset near the end of them is refused with the table.
        let length = bytes.len() as u32;
        open = match open {
            Some((start, so_far)) if u64::from(start) + u64::from(so_far) == u64::from(offset) => {
                Some((start, so_far + length))
            }
            before => {
                before.into_iter().for_each(&mut close);
                Some((offset, length))
            }
        };
    }
    open.into_iter().for_each(close);
}
