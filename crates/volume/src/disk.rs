//! What the journal and the read cache need of a local disk ([`Disk`]), and how the journal's is
//! found and made ([`Disks`]). No default methods, so that test doubles can replace them.
//!
//! Invariants: the clauses K1 to K9, which the disks of this machine and those of the simulator are
//! tested for (`crates/sim/tests/disk_contract.rs`).
//!
//! Not here: direct I/O and the alignment that it wants (`sawmill_sys`), and the ring and the slots
//! on a disk (`journal`, `cache`).

use std::any::Any;
use std::io;
use std::path::Path;
use std::sync::Arc;

use sawmill_sys::{DirectFile, FileLock, OpenMode};

use crate::ErrorKind;

/// A local disk or file, addressed in bytes, shared by threads.
///
/// # The contract
///
/// - **K1** A read returns of each byte the newest write that had completed. Bytes of a new file
///   are zero.
/// - **K2** A read that reaches past the end fails. The size never changes.
/// - **K3** `read_now` returns what `read_at` would, or fails with `WouldBlock`.
/// - **K4** A completed write survives its process. It survives a power cut only after a `sync`
///   that began when the write had completed.
/// - **K5** A failed `sync` is final: what it covered may be lost, whatever a later one answers.
/// - **K6** `has_name` is false once the path leads to nothing or to another file.
pub trait Disk: Send + Sync {
    /// Size in bytes.
    fn size_bytes(&self) -> u64;
    /// Reads exactly `into.len()` bytes at `offset`; may wait for the device.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// As `read_at`, but answers `WouldBlock` instead of waiting for the device.
    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes every completed write durable.
    fn sync(&self) -> io::Result<()>;
    /// Whether the path that this disk was opened by still leads to it. If not, a restart cannot
    /// find what is written here.
    fn has_name(&self) -> bool;
}

impl Disk for DirectFile {
    fn size_bytes(&self) -> u64 {
        DirectFile::size_bytes(self)
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        DirectFile::read_at(self, offset, into)
    }

    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        DirectFile::read_now(self, offset, into)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        DirectFile::write_at(self, offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        DirectFile::sync(self)
    }

    fn has_name(&self) -> bool {
        DirectFile::has_name(self)
    }
}

/// The exclusive lock of a name, held until dropped.
pub type Lock = Box<dyn Any + Send + Sync>;

/// What exists under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// Nothing.
    Absent,
    /// A file of this many bytes.
    File {
        /// Its size.
        size_bytes: u64,
    },
    /// A block device, which can be neither made nor renamed.
    Device,
}

/// The local disks of a machine, by path.
///
/// # The contract
///
/// - **K7** `make` and `rename` of a file to a taken name fail with `AlreadyExists` and change
///   nothing.
/// - **K8** `open`, `rename` and `remove` of an absent name fail with `NotFound`. A renamed file
///   has its new name alone.
/// - **K9** A name, and a file under any of its names, has one holder at a time: others get
///   `WouldBlock` until the lock is dropped or its process has died.
pub trait Disks: Send + Sync {
    /// Locks this name, for whatever has it now or later.
    fn lock(&self, path: &Path) -> io::Result<Lock>;
    /// Locks the file that has this name now, and so under all of its other names. Locks nothing if
    /// there is no file, or if it is a device, which is locked by name alone.
    fn lock_file(&self, path: &Path) -> io::Result<Lock>;
    /// Returns what exists under this name.
    fn entry_kind(&self, path: &Path) -> EntryKind;
    /// Opens what has this name.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn Disk>>;
    /// Makes a file of zeroes, durably. Fails when space is short.
    fn make(&self, path: &Path, size_bytes: u64) -> io::Result<Arc<dyn Disk>>;
    /// Renames a file.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// The disks of this machine.
pub struct RealDisks;

impl Disks for RealDisks {
    fn lock(&self, path: &Path) -> io::Result<Lock> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        Ok(Box::new(FileLock::of_name(path)?))
    }

    fn lock_file(&self, path: &Path) -> io::Result<Lock> {
        match self.entry_kind(path) {
            EntryKind::File { .. } => Ok(Box::new(FileLock::take(path)?)),
            EntryKind::Absent | EntryKind::Device => Ok(Box::new(())),
        }
    }

    fn entry_kind(&self, path: &Path) -> EntryKind {
        match std::fs::metadata(path) {
            Ok(meta) if meta.is_file() => EntryKind::File { size_bytes: meta.len() },
            Ok(_) => EntryKind::Device,
            Err(_) => EntryKind::Absent,
        }
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn Disk>> {
        Ok(Arc::new(DirectFile::open(path, OpenMode::Direct)?))
    }

    fn make(&self, path: &Path, size_bytes: u64) -> io::Result<Arc<dyn Disk>> {
        Ok(Arc::new(DirectFile::create(path, size_bytes, OpenMode::Direct)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        sawmill_sys::rename_exclusive(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }
}

/// A disk and the lock of its writer.
pub(crate) struct LockedDisk {
    pub(crate) _lock: FileLock,
    pub(crate) disk: DirectFile,
}

impl Disk for LockedDisk {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.disk.read_at(offset, into)
    }

    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.disk.read_now(offset, into)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.disk.write_at(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.sync()
    }

    fn has_name(&self) -> bool {
        self.disk.has_name()
    }
}

/// Why a local file of a volume cannot be made or opened. What a person must mend has a kind. Any
/// other failure may pass, such as a folder that a restart of the machine removed: a server that
/// took its volumes back after a failed hand-off tries again.
pub(crate) fn local_file_kind(error: &io::Error) -> ErrorKind {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Full,
        io::ErrorKind::PermissionDenied => ErrorKind::Denied,
        io::ErrorKind::WouldBlock => ErrorKind::InUse,
        _ => ErrorKind::Unavailable,
    }
}
