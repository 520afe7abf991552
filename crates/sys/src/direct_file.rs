//! A file or block device, accessed without the page cache where the file system and the request
//! allow it.
//!
//! Invariants: the writer of a file holds its [`FileLock`]. A transfer goes through the direct
//! descriptor only if offset, length and memory are aligned to [`BLOCK_BYTES`]; others go through
//! the buffered descriptor. The kernel keeps both views of the file coherent: a direct write drops
//! the cached pages that it covers.
//!
//! Not here: discards and zeroing (`discard`), aligned memory (`aligned`), loop devices
//! (`loop_device`).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, RenameFlags, renameat_with};
use rustix::io::{Errno, ReadWriteFlags};

use crate::{AlignedBytes, BLOCK_BYTES};

/// How a [`DirectFile`] is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// For reading only; no lock.
    ReadOnly,
    /// For reading and writing; writes bypass the page cache.
    Direct,
    /// For reading and writing; writes stay in the page cache (for data that will be read again
    /// soon).
    Cached,
}

/// The exclusive right to write a file or block device, until dropped.
pub struct FileLock {
    file: File,
}

impl FileLock {
    /// Takes the lock. `WouldBlock` means that another holder has it; for a block device also that
    /// the device is mounted.
    pub fn take(path: &Path) -> io::Result<Self> {
        let kind = FileType::from_raw_mode(rustix::fs::stat(path)?.st_mode);
        let exclusive = if kind == FileType::BlockDevice { OFlags::EXCL } else { OFlags::empty() };
        let outcome =
            rustix::fs::open(path, OFlags::RDWR | exclusive | OFlags::CLOEXEC, Mode::empty());
        let file = match outcome {
            Ok(file) => File::from(file),
            Err(Errno::BUSY) => return Err(io::Error::from(io::ErrorKind::WouldBlock)),
            Err(error) => return Err(error.into()),
        };
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(FileLock { file })
    }

    /// Whether `path` names the locked file, and no other or none.
    #[must_use]
    pub fn has_name(&self, path: &Path) -> bool {
        let identity = |about: rustix::fs::Stat| (about.st_dev, about.st_ino);
        let locked = rustix::fs::fstat(&self.file).map(identity);
        locked.is_ok() && locked == rustix::fs::stat(path).map(identity)
    }

    /// Gives the lock up, also if a child of this process has the file open, as one does between
    /// its fork and its program. Dropped, it would stay taken until that child closes it.
    pub fn give_up(self) {
        // It fails for no file that was locked.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }

    /// Takes the lock of the name `path`, whatever file has that name now or later: files can be
    /// made and renamed under this lock. It is the lock of the file `path` with `.lock` added,
    /// which is made if absent; for a block device it is the device's own lock.
    pub fn of_name(path: &Path) -> io::Result<Self> {
        match rustix::fs::stat(path) {
            Ok(meta) if FileType::from_raw_mode(meta.st_mode) == FileType::BlockDevice => {
                Self::take(path)
            }
            _ => {
                let mut beside = path.as_os_str().to_owned();
                beside.push(".lock");
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
                drop(rustix::fs::open(Path::new(&beside), flags, Mode::RUSR | Mode::WUSR)?);
                Self::take(Path::new(&beside))
            }
        }
    }
}

/// An open file or block device of fixed size.
pub struct DirectFile {
    buffered: File,
    direct: Option<File>,
    size_bytes: u64,
    path: PathBuf,
}

impl DirectFile {
    /// Opens an existing file or block device.
    pub fn open(path: &Path, mode: OpenMode) -> io::Result<Self> {
        let access = if mode == OpenMode::ReadOnly { OFlags::RDONLY } else { OFlags::RDWR };
        let buffered = File::from(rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())?);
        let direct = if mode == OpenMode::Direct {
            // A file system without direct I/O (tmpfs of older kernels) returns EINVAL; writes are
            // then buffered.
            let flags = access | OFlags::DIRECT | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty()).ok().map(File::from)
        } else {
            None
        };
        let size_bytes = length_of(&buffered)?;
        // An absolute path names the same file after a change of the working directory.
        let path = std::path::absolute(path)?;
        Ok(DirectFile { buffered, direct, size_bytes, path })
    }

    /// Makes a new file of `size_bytes` zeroes, durably. Its space is allocated; most file systems
    /// do not write it. The first write of a block then costs the next sync a commit of the file
    /// system's journal. Fails when the file exists or space is lacking.
    pub fn create(path: &Path, size_bytes: u64, mode: OpenMode) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
        let allocated = allocate(&file, path, size_bytes);
        if let Err(error) = allocated {
            // Remove the incomplete file; the first error is the one to report.
            let _ = std::fs::remove_file(path);
            return Err(error);
        }
        drop(file);
        Self::open(path, mode)
    }

    /// Opens or makes a file of `size_bytes` whose blocks are allocated only when written (for
    /// caches), with its lock, which is taken before anything about the file is changed.
    pub fn create_sparse(
        path: &Path,
        size_bytes: u64,
        mode: OpenMode,
    ) -> io::Result<(FileLock, Self)> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
        let lock = FileLock::take(path)?;
        if length_of(&file)? != size_bytes {
            file.set_len(size_bytes)?;
        }
        Ok((lock, Self::open(path, mode)?))
    }

    /// Whether the path by which it was opened still leads to this file. Always true for a device.
    #[must_use]
    pub fn has_name(&self) -> bool {
        let Ok(own) = rustix::fs::fstat(&self.buffered) else { return false };
        FileType::from_raw_mode(own.st_mode) != FileType::RegularFile
            || rustix::fs::stat(&self.path)
                .is_ok_and(|status| (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino))
    }

    /// Size in bytes when opened.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether aligned writes bypass the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Reads exactly `into.len()` bytes at `offset`; may wait for the device.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file_for(offset, into).read_exact_at(into, offset)
    }

    /// As [`read_at`](Self::read_at), but fails with `WouldBlock` where it would have to wait for
    /// the device.
    pub fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let length = into.len();
        let mut parts = [io::IoSliceMut::new(into)];
        match rustix::io::preadv2(&self.buffered, &mut parts, offset, ReadWriteFlags::NOWAIT) {
            Ok(read) if read == length => Ok(()),
            Ok(_) | Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INTR) => {
                Err(io::Error::from(io::ErrorKind::WouldBlock))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Writes all of `bytes` at `offset`.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file_for(offset, bytes).write_all_at(bytes, offset)
    }

    /// The descriptor that a transfer of `bytes` can go through.
    fn file_for(&self, offset: u64, bytes: &[u8]) -> &File {
        let block = BLOCK_BYTES as usize;
        let aligned = offset.is_multiple_of(BLOCK_BYTES)
            && bytes.len().is_multiple_of(block)
            && (bytes.as_ptr() as usize).is_multiple_of(block);
        self.direct.as_ref().filter(|_| aligned).unwrap_or(&self.buffered)
    }

    /// Makes every completed write durable.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.buffered)?)
    }
}

/// The size of a file or block device.
fn length_of(file: &File) -> io::Result<u64> {
    let meta = rustix::fs::fstat(file)?;
    match FileType::from_raw_mode(meta.st_mode) {
        FileType::BlockDevice => Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?),
        _ => Ok(u64::try_from(meta.st_size).unwrap_or(0)),
    }
}

/// Allocates `size_bytes` of a new file, and makes file and name durable.
fn allocate(file: &File, path: &Path, size_bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, size_bytes) {
        Ok(()) => {}
        // This file system allocates what is written.
        Err(Errno::OPNOTSUPP) => write_zeroes(file, path, size_bytes)?,
        Err(error) => return Err(error.into()),
    }
    rustix::fs::fsync(file)?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(rustix::fs::fsync(File::open(folder)?.as_fd())?)
}

fn write_zeroes(file: &File, path: &Path, size_bytes: u64) -> io::Result<()> {
    const CHUNK_BYTES: usize = 4 << 20;
    let direct =
        rustix::fs::open(path, OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty());
    let direct = direct.ok().map(File::from);
    let zeroes = AlignedBytes::zeroed(CHUNK_BYTES);
    let mut offset = 0;
    while offset < size_bytes {
        let chunk = &zeroes[..(size_bytes - offset).min(CHUNK_BYTES as u64) as usize];
        let target = match &direct {
            Some(direct) if chunk.len().is_multiple_of(BLOCK_BYTES as usize) => direct,
            _ => file,
        };
        target.write_all_at(chunk, offset)?;
        offset += chunk.len() as u64;
    }
    Ok(())
}

/// Renames a file to an unused name. `AlreadyExists` means that the name is taken, even if since a
/// moment ago.
pub fn rename_exclusive(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system does not support this flag: a hard link fails in the same way if the name
        // is taken.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            std::fs::hard_link(from, to)?;
            std::fs::remove_file(from)
        }
        renamed => renamed.map_err(io::Error::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_directly_are_read_back_through_the_page_cache() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = DirectFile::create(&path, 1 << 20, OpenMode::Direct).unwrap();
        let mut page = AlignedBytes::zeroed(8192);
        let mut back = vec![1u8; 8192];
        file.read_at(4096, &mut back).unwrap();
        assert!(back.iter().all(|b| *b == 0));
        page.fill(7);
        file.write_at(4096, &page).unwrap();
        file.sync().unwrap();
        file.read_at(4096, &mut back).unwrap();
        assert_eq!(&back[..], &page[..]);
        file.write_at(4099, b"odd").unwrap();
        file.read_at(4096, &mut back[..8]).unwrap();
        assert_eq!(&back[..8], b"\x07\x07\x07odd\x07\x07");
    }

    #[test]
    fn a_new_file_has_all_of_its_space_and_only_zeroes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = DirectFile::create(&path, 1 << 20, OpenMode::Direct).unwrap();
        assert!(rustix::fs::stat(&path).unwrap().st_blocks * 512 >= 1 << 20);
        let mut content = vec![1; 1 << 20];
        file.read_at(0, &mut content).unwrap();
        assert!(content.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_second_writer_is_refused_while_the_first_lives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"").unwrap();
        let first = FileLock::take(&path).unwrap();
        let second = FileLock::take(&path).map(drop).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::WouldBlock);
        drop(first);
        FileLock::take(&path).unwrap();
    }

    #[test]
    fn a_file_that_is_locked_keeps_its_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cache");
        let _held = DirectFile::create_sparse(&path, 8192, OpenMode::Cached).unwrap();
        assert!(DirectFile::create_sparse(&path, 4096, OpenMode::Cached).is_err());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192);
    }

    #[test]
    fn a_full_file_system_leaves_no_half_made_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert!(DirectFile::create(&path, 1 << 60, OpenMode::Direct).is_err());
        assert!(!path.exists());
    }
}
