//! The ends of a transfer: a file or block device, an NBD export, a volume.
//!
//! Invariant: the safe point of a file or an export is durable when `safe_point` returns, because
//! that flushes. The safe point of a volume is a position: durable when all before it is stored.
//!
//! Not here: what is copied, compared or skipped (`super`); images, which QEMU serves as an NBD
//! export (`image`).

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom as Seeking};
use sawmill_device::{Allocation, BlockDevice, BlockDeviceExt};
use sawmill_nbd_client::{Client, Command, Style, flag};
use sawmill_volume::{Health, Volume};

use super::{Destination, Source};
use sawmill_console::exit::{Exit, Failure, Result};

/// The longest read or write of a file.
const FILE_REQUEST_BYTES_MAX: u64 = 1 << 20;

/// A file or block device, byte by byte.
pub(crate) struct FileEnd {
    file: File,
    path: PathBuf,
    size_bytes: u64,
    state: String,
    /// Hole punching does not work here, so zeroes are written.
    cannot_punch_holes: AtomicBool,
}

impl FileEnd {
    /// Opens a source. Refuses what is neither a file nor a block device.
    pub(crate) fn source(path: &Path) -> Result<Self> {
        Self::new(super::image_file::open(path)?, path)
    }

    /// Takes an open file.
    pub(crate) fn new(mut file: File, path: &Path) -> Result<Self> {
        let failed =
            |error: io::Error| Failure::io(format!("cannot use {}", path.display()), &error);
        let found = file.metadata().map_err(failed)?;
        if !found.is_file() && !found.file_type().is_block_device() {
            let text = format!("{} is neither a file nor a block device", path.display());
            return Err(Failure::usage(text));
        }
        let size_bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let state = state_of(&file, size_bytes).map_err(failed)?;
        Ok(FileEnd {
            file,
            path: path.to_owned(),
            size_bytes,
            state,
            cannot_punch_holes: AtomicBool::new(false),
        })
    }

    /// Identifies the state of the file, to detect changes; empty if nothing does.
    pub(crate) fn state(&self) -> &str {
        &self.state
    }

    fn failed(&self, what: &str, error: &io::Error) -> Failure {
        Failure::io(format!("cannot {what} {}", self.path.display()), error)
    }
}

/// A block device's change time does not show when its content changed.
fn state_of(file: &File, size_bytes: u64) -> io::Result<String> {
    let found = file.metadata()?;
    if !found.is_file() {
        return Ok(String::new());
    }
    let (device, inode) = (found.dev(), found.ino());
    let (seconds, nanoseconds) = (found.mtime(), found.mtime_nsec());
    Ok(format!("{size_bytes} bytes, changed {seconds}.{nanoseconds:09}, file {device}:{inode}"))
}

impl Source for FileEnd {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn request_bytes_max(&self) -> u64 {
        FILE_REQUEST_BYTES_MAX
    }

    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.file
            .read_exact_at(&mut bytes, address)
            .map_err(|error| self.failed("read", &error))?;
        Ok(bytes)
    }

    fn allocation(&self, address: u64, length: u64) -> Result<Vec<Allocation>> {
        // Where holes are not reported, everything is data.
        let whole = vec![Allocation { length, data: true }];
        let seek = |to: Seeking| rustix::fs::seek(&self.file, to);
        let data = match seek(Seeking::Data(address)) {
            Ok(data) => data.min(address + length),
            // No data from here to the end.
            Err(rustix::io::Errno::NXIO) => address + length,
            Err(_) => return Ok(whole),
        };
        if data > address {
            return Ok(vec![Allocation { length: data - address, data: false }]);
        }
        let Ok(hole) = seek(Seeking::Hole(address)) else { return Ok(whole) };
        Ok(vec![Allocation {
            // At least one byte: a run of nothing would never let the caller advance.
            length: hole.clamp(address + 1, address + length) - address,
            data: true,
        }])
    }

    fn check_unchanged(&self) -> Result<()> {
        let failed = |error: io::Error| self.failed("look at", &error);
        let size_bytes = self.file.metadata().map(|found| found.len()).map_err(failed)?;
        if self.state.is_empty() || state_of(&self.file, size_bytes).map_err(failed)? == self.state
        {
            return Ok(());
        }
        let text = format!(
            "{} changed while it was read, so the copy is inconsistent; stop its writer, then \
             start over with --restart",
            self.path.display()
        );
        Err(Failure::new(Exit::Refused, text))
    }
}

impl Destination for FileEnd {
    fn request_bytes_max(&self) -> u64 {
        FILE_REQUEST_BYTES_MAX
    }

    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        Source::read(self, address, length)
    }

    fn write(&self, address: u64, bytes: Vec<u8>) -> Result<()> {
        self.file.write_all_at(&bytes, address).map_err(|error| self.failed("write", &error))
    }

    fn zero(&self, address: u64, length: u64) -> Result<()> {
        if !self.cannot_punch_holes.load(Ordering::Relaxed) {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if rustix::fs::fallocate(&self.file, hole, address, length).is_ok() {
                return Ok(());
            }
            // Remembered, because each further attempt would cost a call and fail as well.
            self.cannot_punch_holes.store(true, Ordering::Relaxed);
        }
        in_pieces(address, length, FILE_REQUEST_BYTES_MAX, |at, bytes| self.write(at, bytes))
    }

    fn safe_point(&self) -> Result<u64> {
        self.file.sync_data().map(|()| 0).map_err(|error| self.failed("sync", &error))
    }

    fn is_durable(&self, _safe_point: u64) -> Result<bool> {
        Ok(true)
    }
}

/// Writes zeroes as data.
fn in_pieces(
    address: u64,
    length: u64,
    piece_bytes: u64,
    mut write: impl FnMut(u64, Vec<u8>) -> Result<()>,
) -> Result<()> {
    let mut done = 0;
    while done < length {
        let piece = piece_bytes.min(length - done);
        write(address + done, vec![0; piece as usize])?;
        done += piece;
    }
    Ok(())
}

/// An export of an NBD server.
pub(crate) struct NbdEnd {
    client: Client,
    what: String,
}

impl NbdEnd {
    /// Connects. The failure of a wrong URI says how to write one.
    pub(crate) fn connect(uri: &str) -> Result<Self> {
        Self::try_connect(uri).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => Failure::usage(format!(
                "{error}; write nbd://host:port/export or nbd+unix:///export?socket=/path"
            ))
            .caused_by(error),
            _ => Failure::caused(Exit::Unavailable, format!("cannot use {uri}"), error),
        })
    }

    /// Connects; the error is that of the system or the protocol.
    pub(crate) fn try_connect(uri: &str) -> io::Result<Self> {
        let client = match Client::connect(uri, Style::Structured) {
            // A server without structured replies refuses them.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Client::connect(uri, Style::Simple).map_err(|_| error)
            }
            other => other,
        };
        Ok(NbdEnd { client: client?, what: uri.to_owned() })
    }

    /// The same with another name in errors.
    pub(crate) fn named(self, what: impl Into<String>) -> Self {
        NbdEnd { what: what.into(), ..self }
    }

    /// Bytes of the export.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.client.export().size_bytes
    }

    /// Refuses an export that cannot be written and flushed.
    pub(crate) fn require_writable(&self) -> Result<()> {
        let flags = self.client.export().flags;
        if flags & flag::READ_ONLY == 0 && flags & flag::SEND_FLUSH != 0 {
            return Ok(());
        }
        let text = format!("{} is read-only, or cannot be flushed", self.what);
        Err(Failure::new(Exit::Refused, text))
    }

    fn call(&self, what: &str, command: &Command) -> Result<sawmill_nbd_client::Reply> {
        use sawmill_nbd_client::Failure as Unanswered;
        self.client.call(command).map_err(|failure| {
            let why = match failure {
                Unanswered::Errno(number) => {
                    io::Error::from_raw_os_error(i32::try_from(number).unwrap_or(5))
                }
                Unanswered::Gone => match self.client.why_gone() {
                    Some(why) => io::Error::new(why.kind(), why),
                    None => io::Error::other("the connection ended"),
                },
            };
            let exit =
                if failure == Unanswered::Errno(28) { Exit::Full } else { Exit::Unavailable };
            Failure::caused(exit, format!("cannot {what} {}", self.what), why)
        })
    }
}

impl Source for NbdEnd {
    fn size_bytes(&self) -> u64 {
        self.client.export().size_bytes
    }

    fn request_bytes_max(&self) -> u64 {
        match self.client.export().block_bytes_max {
            0 => 1 << 20,
            most => u64::from(most),
        }
    }

    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        self.call("read", &Command::Read { offset: address, length }).map(|reply| reply.bytes)
    }

    fn allocation(&self, address: u64, length: u64) -> Result<Vec<Allocation>> {
        // Not the flag for holes (1): the protocol lets a hole read as anything.
        const READS_AS_ZEROES: u64 = 2;
        let whole = vec![Allocation { length, data: true }];
        if self.client.export().allocation_context.is_none() {
            return Ok(whole);
        }
        // Structured requests have 32 bits for a length.
        let length = length.min(1 << 30);
        let reply =
            self.call("ask for holes of", &Command::BlockStatus { offset: address, length })?;
        let mut runs: Vec<Allocation> = Vec::new();
        let mut left = length;
        for extent in reply.extents {
            let length = extent.length.min(left);
            if length == 0 {
                break;
            }
            left -= length;
            runs.push(Allocation { length, data: extent.flags & READS_AS_ZEROES == 0 });
        }
        Ok(if runs.is_empty() { whole } else { runs })
    }

    // NBD tells nothing of changes, so callers compare instead of resuming.
    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

impl Destination for NbdEnd {
    fn request_bytes_max(&self) -> u64 {
        Source::request_bytes_max(self)
    }

    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        Source::read(self, address, length)
    }

    fn write(&self, address: u64, bytes: Vec<u8>) -> Result<()> {
        self.call("write", &Command::Write { offset: address, bytes, fua: false }).map(drop)
    }

    fn zero(&self, address: u64, length: u64) -> Result<()> {
        if self.client.export().flags & flag::SEND_WRITE_ZEROES != 0 {
            let (fua, no_hole) = (false, false);
            let command = Command::WriteZeroes { offset: address, length, fua, no_hole };
            return self.call("zero", &command).map(drop);
        }
        let piece_bytes = Source::request_bytes_max(self).min(1 << 20);
        in_pieces(address, length, piece_bytes, |at, bytes| self.write(at, bytes))
    }

    fn safe_point(&self) -> Result<u64> {
        self.call("flush", &Command::Flush).map(|_| 0)
    }

    fn is_durable(&self, _safe_point: u64) -> Result<bool> {
        Ok(true)
    }
}

/// A volume that this process has open.
pub(crate) struct VolumeEnd {
    volume: Arc<Volume>,
    name: String,
    /// The position of the cut that is read.
    position: u64,
}

impl VolumeEnd {
    pub(crate) fn new(volume: Arc<Volume>, name: &str) -> Self {
        let position = volume.status().positions.stored;
        VolumeEnd { volume, name: name.to_owned(), position }
    }

    /// The cut that is read.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    fn failed(&self, error: sawmill_volume::Error) -> Failure {
        Failure::from(error).of_volume(&self.name)
    }
}

impl Source for VolumeEnd {
    fn size_bytes(&self) -> u64 {
        self.volume.geometry().size_bytes
    }

    fn request_bytes_max(&self) -> u64 {
        u64::from(self.volume.geometry().request_bytes_max)
    }

    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        self.volume.read_at(address, length).map_err(|error| self.failed(error))
    }

    fn allocation(&self, address: u64, length: u64) -> Result<Vec<Allocation>> {
        BlockDeviceExt::allocation(&*self.volume, address, length)
            .map_err(|error| self.failed(error))
    }

    fn check_unchanged(&self) -> Result<()> {
        // A reader goes on to a newer cut when its own is gone from the store (decision 0009).
        if self.volume.status().positions.stored == self.position {
            return Ok(());
        }
        let text = format!(
            "volume {} is being written, and its store no longer has the state that was read; \
             export it through its door (import takes the same URI), or while it has no writer",
            self.name
        );
        Err(Failure::new(Exit::Unavailable, text))
    }
}

impl Destination for VolumeEnd {
    fn request_bytes_max(&self) -> u64 {
        u64::from(self.volume.geometry().request_bytes_max)
    }

    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        Source::read(self, address, length)
    }

    fn write(&self, address: u64, bytes: Vec<u8>) -> Result<()> {
        self.volume.write_at(address, &bytes).map_err(|error| self.failed(error))
    }

    fn zero(&self, address: u64, length: u64) -> Result<()> {
        self.volume.write_zeroes(address, length).map_err(|error| self.failed(error))
    }

    fn safe_point(&self) -> Result<u64> {
        Ok(self.volume.status().positions.accepted)
    }

    fn is_durable(&self, safe_point: u64) -> Result<bool> {
        let status = self.volume.status();
        let (exit, reason) = match status.health {
            // Such a volume stores nothing more: without this the caller would wait forever.
            Health::Fenced { reason } => (Exit::Fenced, reason),
            Health::Failed { reason } => (Exit::Unavailable, reason),
            _ => return Ok(status.positions.stored >= safe_point),
        };
        Err(Failure::new(exit, reason).of_volume(&self.name))
    }
}
