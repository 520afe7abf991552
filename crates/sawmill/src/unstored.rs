//! Extracts what a journal holds and its store lacked into a file, for people who must recover by
//! hand what a takeover left behind.
//!
//! Invariants: both files are new; the journal is read and never changed. Every write that was not
//! stored is extracted, and perhaps some that were, because the journal learns of stores later.
//! Nothing here decides which writes count: the extracted ones are older than what the volume's
//! next owner wrote at the same addresses.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};
use sawmill_volume::inspect::{JournalReport, UnstoredWrite, unstored_of_journal};
use sawmill_volume::{Error, ErrorKind};

use sawmill_console::exit::{Failure, Result};

/// Writes each write to its address in the new file `to`, and its range to `to` with `.ranges`
/// appended.
pub(crate) fn write(journal: &Path, to: &Path) -> Result<JournalReport> {
    let mut beside = to.to_owned();
    beside.as_mut_os_string().push(".ranges");
    let (image, mut ranges) = (make(to)?, BufWriter::new(make(&beside)?));
    let failed = |path: &PathBuf, error: std::io::Error| {
        Error::caused(ErrorKind::Unavailable, format!("cannot write {}", path.display()), error)
    };
    let (to, mut end) = (to.to_owned(), 0);
    let report = unstored_of_journal(journal, &mut |write| {
        put(&image, write, &mut end).map_err(|error| failed(&to, error))?;
        let UnstoredWrite { position, address, length, payload } = write;
        let kind = if payload.is_some() { "write" } else { "zeroes" };
        writeln!(ranges, "{address} {length} {kind} {position}")
            .map_err(|error| failed(&beside, error))
    })?;
    // A buffer that is only dropped would hide a failed write.
    let flushed = ranges.flush().and_then(|()| image.sync_all());
    flushed.map_err(|error| Failure::io(format!("cannot write {}", to.display()), &error))?;
    Ok(report)
}

fn make(path: &Path) -> Result<File> {
    let outcome = OpenOptions::new().write(true).create_new(true).open(path);
    outcome
        .map_err(|error| Failure::io(format!("cannot create the file {}", path.display()), &error))
}

/// A hole reads as zeroes; past the end of the file there is nothing to clear.
fn put(image: &File, write: &UnstoredWrite<'_>, end: &mut u64) -> std::io::Result<()> {
    match write.payload {
        Some(bytes) => {
            *end = (*end).max(write.address + write.length);
            image.write_all_at(bytes, write.address)
        }
        None if write.address < *end => {
            let length = write.length.min(*end - write.address);
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            Ok(fallocate(image, hole, write.address, length)?)
        }
        None => Ok(()),
    }
}
