//! Requests to a target other than reads and writes: opening an export, listing all exports.
//!
//! Invariant: an answer fits a place and contains its own length, whatever lies behind it in a
//! buffer; a list that does not fit is cut, and says so.
//!
//! Not here: the right to open an export (`crates/link/src/target`).

use super::{check_length, check_reserved, text};
use crate::Result;
use crate::error::check_field;
use crate::layout::layout;

layout! {
    /// The answer to an open.
    opened_at, "Opened", 48;
    SIZE_BYTES: 0, 8, "size_bytes";
    BLOCK_BYTES: 8, 4, "block_bytes";
    PREFERRED_BYTES: 12, 4, "preferred_bytes";
    REQUEST_BYTES_MAX: 16, 4, "request_bytes_max";
    EXPORT: 20, 1, "export";
    ABILITIES: 21, 1, "abilities";
    RESERVED: 22, 2, "reserved";
    RESERVATION: 24, 8, "reservation";
    CACHE_IDENTITY: 32, 16, "cache_identity";
}

layout! {
    /// The head of a list; its entries follow.
    list_at, "List", 8;
    BYTES: 0, 4, "bytes";
    LEFT_OUT: 4, 4, "left_out";
}

layout! {
    /// One export of a list; its name follows.
    export_at, "Export", 16;
    SIZE_BYTES: 0, 8, "size_bytes";
    NAME_BYTES: 8, 2, "name_bytes";
    RESERVED: 10, 6, "reserved";
}

/// The longest name of an export.
pub const EXPORT_BYTES_MAX: usize = 1024;

/// Flag of an open: the initiator will not write.
pub const OPEN_READ_ONLY: u8 = 1;
/// Flag of an open: cut off the initiator that has it open.
pub const OPEN_TAKE_OVER: u8 = 2;
/// Flag of an open: other initiators may have it open too.
pub const OPEN_SHARED: u8 = 4;

const READ_ONLY: u8 = 1;
const SHARED_CACHE: u8 = 2;
const DISCARD: u8 = 4;
const WRITE_ZEROES: u8 = 8;
const ALLOCATION: u8 = 16;
const ALL: u8 = 31;

/// An opened export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenAnswer {
    /// Its number in commands of this connection.
    pub export: u8,
    /// The size of the device, in bytes.
    pub size_bytes: u64,
    /// Its logical block.
    pub block_bytes: u32,
    /// The request size that the target prefers.
    pub preferred_bytes: u32,
    /// The longest read or write that the target takes; places may be smaller.
    pub request_bytes_max: u32,
    /// The export cannot be written.
    pub read_only: bool,
    /// A flush covers what others wrote.
    pub shared_cache: bool,
    /// Discard works.
    pub discard: bool,
    /// Write-zeroes works.
    pub write_zeroes: bool,
    /// Allocation queries work.
    pub allocation: bool,
    /// The reservation whose writes the export accepts; not zero. An initiator that opens the
    /// export again sends it, and is refused if the export has another by then.
    pub reservation: u64,
    /// Identifies what holds the answered writes that are not flushed. If it differs at the next
    /// connection, those writes may be lost.
    pub cache_identity: [u8; 16],
}

impl OpenAnswer {
    const WHAT: &'static str = "link opened";

    /// The payload's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; opened_at::SIZE] {
        let mut bytes = [0; opened_at::SIZE];
        opened_at::SIZE_BYTES.put(&mut bytes, self.size_bytes.to_le_bytes());
        opened_at::BLOCK_BYTES.put(&mut bytes, self.block_bytes.to_le_bytes());
        opened_at::PREFERRED_BYTES.put(&mut bytes, self.preferred_bytes.to_le_bytes());
        opened_at::REQUEST_BYTES_MAX.put(&mut bytes, self.request_bytes_max.to_le_bytes());
        opened_at::EXPORT.put(&mut bytes, [self.export]);
        let flags = [
            (self.read_only, READ_ONLY),
            (self.shared_cache, SHARED_CACHE),
            (self.discard, DISCARD),
            (self.write_zeroes, WRITE_ZEROES),
            (self.allocation, ALLOCATION),
        ];
        let abilities = flags.iter().filter(|(set, _)| *set).map(|(_, bit)| bit).sum();
        opened_at::ABILITIES.put(&mut bytes, [abilities]);
        opened_at::RESERVATION.put(&mut bytes, self.reservation.to_le_bytes());
        opened_at::CACHE_IDENTITY.put(&mut bytes, self.cache_identity);
        bytes
    }

    /// Reads the whole payload.
    pub fn decode(bytes: &[u8]) -> Result<OpenAnswer> {
        check_length(Self::WHAT, bytes, opened_at::SIZE)?;
        check_field(Self::WHAT, "length", "too long", bytes.len() == opened_at::SIZE)?;
        check_reserved(Self::WHAT, opened_at::RESERVED, bytes)?;
        let abilities = opened_at::ABILITIES.u8(bytes);
        check_field(Self::WHAT, "abilities", "unknown ones", abilities & !ALL == 0)?;
        let block_bytes = opened_at::BLOCK_BYTES.u32(bytes);
        let is_known = block_bytes == 512 || block_bytes == 4096;
        check_field(Self::WHAT, "block_bytes", "neither 512 nor 4096", is_known)?;
        let request_bytes_max = opened_at::REQUEST_BYTES_MAX.u32(bytes);
        check_field(
            Self::WHAT,
            "request_bytes_max",
            "below a block",
            request_bytes_max >= block_bytes,
        )?;
        let reservation = opened_at::RESERVATION.u64(bytes);
        check_field(Self::WHAT, "reservation", "zero", reservation != 0)?;
        Ok(OpenAnswer {
            export: opened_at::EXPORT.u8(bytes),
            size_bytes: opened_at::SIZE_BYTES.u64(bytes),
            block_bytes,
            preferred_bytes: opened_at::PREFERRED_BYTES.u32(bytes),
            request_bytes_max,
            read_only: abilities & READ_ONLY != 0,
            shared_cache: abilities & SHARED_CACHE != 0,
            discard: abilities & DISCARD != 0,
            write_zeroes: abilities & WRITE_ZEROES != 0,
            allocation: abilities & ALLOCATION != 0,
            reservation,
            cache_identity: opened_at::CACHE_IDENTITY.array(bytes),
        })
    }
}

/// The exports of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exports {
    /// Name and size in bytes of each.
    pub named: Vec<(String, u64)>,
    /// Exports that did not fit.
    pub left_out: u32,
}

/// Encodes a list of exports (name, bytes of the device) in at most `bytes_max` bytes, of which a
/// list needs 8.
#[must_use]
pub fn list_exports<'a>(
    bytes_max: usize,
    exports: impl Iterator<Item = (&'a str, u64)>,
) -> Vec<u8> {
    let mut list = vec![0; list_at::SIZE];
    let mut left_out = 0u32;
    for (name, size_bytes) in exports {
        let is_valid = (1..=EXPORT_BYTES_MAX).contains(&name.len());
        if !is_valid || list.len() + export_at::SIZE + name.len() > bytes_max {
            left_out += 1;
            continue;
        }
        let mut entry = [0; export_at::SIZE];
        export_at::SIZE_BYTES.put(&mut entry, size_bytes.to_le_bytes());
        export_at::NAME_BYTES.put(&mut entry, (name.len() as u16).to_le_bytes());
        list.extend_from_slice(&entry);
        list.extend_from_slice(name.as_bytes());
    }
    let bytes = list.len() - list_at::SIZE;
    put_list_head(&mut list, bytes, left_out);
    list
}

fn put_list_head(list: &mut [u8], bytes: usize, left_out: u32) {
    list_at::BYTES.put(list, (bytes as u32).to_le_bytes());
    list_at::LEFT_OUT.put(list, left_out.to_le_bytes());
}

/// The entries of the list at the front of `bytes`, and how many were left out of it; the bytes
/// behind it are an older answer.
fn entries<'a>(what: &'static str, bytes: &'a [u8]) -> Result<(&'a [u8], u32)> {
    check_length(what, bytes, list_at::SIZE)?;
    let (head, rest) = bytes.split_at(list_at::SIZE);
    let entries_bytes = list_at::BYTES.u32(head) as usize;
    check_length(what, rest, entries_bytes)?;
    Ok((&rest[..entries_bytes], list_at::LEFT_OUT.u32(head)))
}

/// Reads the list of exports at the front of `bytes`.
pub fn exports(bytes: &[u8]) -> Result<Exports> {
    const WHAT: &str = "link exports";
    let (mut list, left_out) = entries(WHAT, bytes)?;
    let mut named = Vec::new();
    while !list.is_empty() {
        check_length(WHAT, list, export_at::SIZE)?;
        check_reserved(WHAT, export_at::RESERVED, list)?;
        let (at, rest) = list.split_at(export_at::SIZE);
        let name_bytes = usize::from(export_at::NAME_BYTES.u16(at));
        let fits = (1..=EXPORT_BYTES_MAX).contains(&name_bytes);
        check_field(WHAT, "name_bytes", "none or more than 1024", fits)?;
        named.push((text(WHAT, rest, name_bytes)?.to_owned(), export_at::SIZE_BYTES.u64(at)));
        list = &rest[name_bytes..];
    }
    Ok(Exports { named, left_out })
}

const DATA: u64 = 1 << 63;
const RUN_BYTES: usize = 8;

/// Writes an allocation (runs of bytes, and whether they hold data) as a list, without empty runs.
/// If not all runs fit, the last one covers the rest, as data. Returns the bytes used: none if
/// there is no room for a run.
pub fn put_runs(into: &mut [u8], runs: impl Iterator<Item = (u64, bool)>) -> usize {
    if into.len() < list_at::SIZE + RUN_BYTES {
        return 0;
    }
    let (mut used, mut last) = (list_at::SIZE, 0u64);
    for (length, data) in runs.filter(|(length, _)| *length > 0) {
        if let Some(room) = into.get_mut(used..used + RUN_BYTES) {
            last = length.min(!DATA) | if data { DATA } else { 0 };
            room.copy_from_slice(&last.to_le_bytes());
            used += RUN_BYTES;
        } else {
            last = (last & !DATA).saturating_add(length).min(!DATA) | DATA;
            into[used - RUN_BYTES..used].copy_from_slice(&last.to_le_bytes());
        }
    }
    put_list_head(into, used - list_at::SIZE, 0);
    used
}

/// The runs of the allocation at the front of `bytes`: lengths in bytes, and whether they hold
/// data.
pub fn runs(bytes: &[u8]) -> Result<impl Iterator<Item = (u64, bool)>> {
    const WHAT: &str = "link allocation";
    let (list, left_out) = entries(WHAT, bytes)?;
    check_field(WHAT, "left_out", "an allocation leaves nothing out", left_out == 0)?;
    let whole = list.len().is_multiple_of(RUN_BYTES);
    check_field(WHAT, "bytes", "not whole runs", whole)?;
    let runs = list.chunks_exact(RUN_BYTES).map(|run| {
        let mut bytes = [0; RUN_BYTES];
        bytes.copy_from_slice(run);
        let run = u64::from_le_bytes(bytes);
        (run & !DATA, run & DATA != 0)
    });
    check_field(WHAT, "run", "an empty one", runs.clone().all(|(length, _)| length > 0))?;
    Ok(runs)
}
