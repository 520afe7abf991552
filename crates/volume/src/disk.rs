//! What the journal and the read cache need of a local disk. No default methods, so that a false disk can
//! stand in its place.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_sys::{DirectFile, FileLock, OpenMode};

use crate::cache::{CacheOptions, ReadCache};
use crate::{Error, ErrorKind, Result, limits};

/// A local disk or file, addressed in bytes, shared by threads.
pub trait Disk: Send + Sync {
    /// Size in bytes.
    fn len_bytes(&self) -> u64;
    /// Reads exactly `into.len()` bytes at `offset`; may wait for the device.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// As `read_at`, but answers `WouldBlock` instead of waiting for the device.
    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`. Not durable before `sync`.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes every completed write durable. A failure is final: what was unsynced may be lost.
    fn sync(&self) -> io::Result<()>;
}

impl Disk for DirectFile {
    fn len_bytes(&self) -> u64 {
        DirectFile::len_bytes(self)
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
}

/// A disk and the right to write it.
struct LockedDisk {
    #[expect(dead_code, reason = "held for as long as the disk is used")]
    lock: FileLock,
    disk: DirectFile,
}

impl Disk for LockedDisk {
    fn len_bytes(&self) -> u64 {
        self.disk.len_bytes()
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
}

/// Opens (or makes) the read cache at `path`, a sparse file of `cache_bytes`; its index lies beside it.
pub fn open_cache(path: &Path, cache_bytes: u64) -> Result<Arc<ReadCache>> {
    let failed = |error: io::Error| {
        let kind = match error.kind() {
            io::ErrorKind::WouldBlock => ErrorKind::InUse,
            io::ErrorKind::PermissionDenied => ErrorKind::Denied,
            _ => ErrorKind::Unavailable,
        };
        let text = format!(
            "the read cache {} cannot be opened: {error}; give another with --cache, or --cache-bytes 0",
            path.display()
        );
        Error::new(kind, text)
    };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    let (lock, disk) = DirectFile::create_sparse(path, cache_bytes, OpenMode::Cached).map_err(failed)?;
    let disk = LockedDisk { lock, disk };
    let mut index: PathBuf = path.to_owned();
    index.as_mut_os_string().push(".index");
    let options = CacheOptions { cache_bytes, frame_bytes: limits::FRAME_BYTES };
    Ok(Arc::new(ReadCache::open(Arc::new(disk), Some(index), options)))
}
