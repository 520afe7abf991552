//! Files that belong to this user alone: newly made, or checked before a byte of them is trusted.
//!
//! Not here: what is in a staging file.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::PREFIX_BYTES;
use crate::BLOCK_BYTES;

/// Whether a file belongs to nothing else: another user may have made it in a world-writable
/// folder, to read it later, and a second name may be that of a file in use.
pub(super) fn is_fresh(file: &File, length: u64) -> io::Result<bool> {
    let about = rustix::fs::fstat(file)?;
    Ok(fault_of(&about).is_none() && about.st_size as u64 == length)
}

/// Why a file is not this user's alone.
pub(super) fn fault_of(about: &rustix::fs::Stat) -> Option<&'static str> {
    if FileType::from_raw_mode(about.st_mode) != FileType::RegularFile {
        return Some("it is no regular file");
    }
    if about.st_uid != rustix::process::geteuid().as_raw() {
        return Some("it belongs to another user");
    }
    if Mode::from_raw_mode(about.st_mode) != Mode::RUSR | Mode::WUSR {
        return Some("others may read or write it");
    }
    (about.st_nlink != 1).then_some("it has a second name")
}

pub(super) fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// A new file of zeroes for a ring of `capacity_bytes`, replacing one of that name.
pub(super) fn allocate(path: &Path, capacity_bytes: u64) -> io::Result<File> {
    assert!(
        capacity_bytes > 0 && capacity_bytes.is_multiple_of(BLOCK_BYTES),
        "capacity is in whole blocks"
    );
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
    // Allocate all of it now: if the tmpfs filled up later, a write would kill the process.
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, PREFIX_BYTES + capacity_bytes) {
        Err(Errno::OPNOTSUPP) => file.set_len(PREFIX_BYTES + capacity_bytes)?,
        other => other?,
    }
    Ok(file)
}
