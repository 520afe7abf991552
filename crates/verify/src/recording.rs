//! A recording: the entries of a write log in order, and where their data lie.
//!
//! Invariants: entries are only added; a write log on disk is valid after [`LogWriter::finish`],
//! and up to its `entry_count` before. Data of zeroes are a hole in the log's file. The content of
//! a foreign log is bounded by its length: it has at most as many entries as sectors. No entry
//! reaches past [`DISK_BYTES_MAX`].
//!
//! Not here: who records (`recorder`), what may be cut (`power_cut`), the bytes of the format
//! (`crates/format`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sawmill_format::FormatError;
use sawmill_format::write_log::{Entry, Flags, SECTOR_BYTES_RANGE, Superblock};

use crate::image::Image;
use crate::stamp::CutTime;
use crate::{Error, Result};

/// Entries of one log, at most: so that an invalid log cannot fill the memory.
const ENTRIES_MAX: u64 = 1 << 24;

/// The largest disk: no file, and no block device, is larger.
pub const DISK_BYTES_MAX: u64 = i64::MAX as u64;

/// The sector of the logs we write.
pub const SECTOR_BYTES: u64 = 512;

/// One entry and the place of its data in the log's file.
#[derive(Clone, Copy, Debug)]
pub struct RecordedEntry {
    /// The entry in the log.
    pub entry: Entry,
    /// Where its data begin in the file.
    pub data_at: u64,
    /// When it was recorded; zeroes if it was not recorded.
    pub cut_time: CutTime,
}

/// A write log to read.
#[derive(Debug)]
pub struct Recording {
    file: File,
    path: PathBuf,
    sector_bytes: u64,
    /// Its entries, in the order in which the device got them.
    pub entries: Vec<RecordedEntry>,
}

impl Recording {
    /// Opens a log, with the times in `moments` beside it where they are.
    pub fn open(path: &Path) -> Result<Self> {
        let file =
            File::open(path).map_err(|error| Error::io("cannot open the log", path, error))?;
        let unreadable = |error: io::Error| Error::io("cannot read the log", path, error);
        let wrong = |source| match source {
            // Another file was meant: nothing is damaged.
            FormatError::Magic { .. } => {
                Error::Usage(format!("{}: this is no write log (wrong magic)", path.display()))
            }
            source => Error::Format { what: path.display().to_string(), source },
        };
        let mut sector = vec![0; *SECTOR_BYTES_RANGE.start() as usize];
        file.read_exact_at(&mut sector, 0).map_err(unreadable)?;
        let superblock = Superblock::decode(&sector).map_err(wrong)?;
        if superblock.entry_count > ENTRIES_MAX {
            let text =
                format!("{}: {} entries are too many", path.display(), superblock.entry_count);
            return Err(Error::Log(text));
        }
        let sector_bytes = u64::from(superblock.sector_bytes);
        let times = read_times(path);
        let mut entries = Vec::new();
        let mut at = sector_bytes;
        for number in 0..superblock.entry_count {
            file.read_exact_at(&mut sector, at).map_err(unreadable)?;
            let entry = Entry::decode(&sector).map_err(wrong)?;
            let end = (entry.sector + entry.sector_count).checked_mul(sector_bytes);
            // Here once, so that no sum of an address and a length overflows later (P138).
            if end.is_none_or(|end| end > DISK_BYTES_MAX) {
                let text = format!("{}: entry {number} is beyond any disk", path.display());
                return Err(Error::Log(text));
            }
            let cut_time = times.get(number as usize).copied().unwrap_or_default();
            entries.push(RecordedEntry { entry, data_at: at + sector_bytes, cut_time });
            let sectors = entry.data_sectors().checked_add(1);
            let next =
                sectors.and_then(|sectors| sectors.checked_mul(sector_bytes)?.checked_add(at));
            at = next.ok_or_else(|| {
                Error::Log(format!("{}: entry {number} overflows", path.display()))
            })?;
        }
        Ok(Recording { file, path: path.to_owned(), sector_bytes, entries })
    }

    /// The path of the log.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The unit of the log.
    #[must_use]
    pub fn sector_bytes(&self) -> u64 {
        self.sector_bytes
    }

    /// The end of the last write: the least size of the device.
    #[must_use]
    pub fn end_bytes(&self) -> u64 {
        let ends = self.entries.iter().map(|recorded| recorded.entry);
        let ends = ends.filter(|entry| entry.data_sectors() > 0);
        ends.map(|entry| (entry.sector + entry.sector_count) * self.sector_bytes).max().unwrap_or(0)
    }

    /// Carries out entry `number` on an image, or only its first `bytes_max` bytes.
    pub fn apply(&self, number: usize, bytes_max: u64, image: &mut Image) -> Result<()> {
        const STEP_BYTES: u64 = 1 << 20;
        let recorded = &self.entries[number];
        let entry = recorded.entry;
        let address = entry.sector * self.sector_bytes;
        let length = (entry.sector_count * self.sector_bytes).min(bytes_max);
        // A mark changes nothing, whatever else it claims to be.
        if entry.flags.has(Flags::MARK) {
            return Ok(());
        }
        if entry.flags.has(Flags::DISCARD) {
            image.zero(address, length);
            return Ok(());
        }
        let mut done = 0;
        while done < length {
            let mut bytes = vec![0; (length - done).min(STEP_BYTES) as usize];
            self.file
                .read_exact_at(&mut bytes, recorded.data_at + done)
                .map_err(|error| Error::io("cannot read the log", &self.path, error))?;
            image.write(address + done, &bytes);
            done += bytes.len() as u64;
        }
        Ok(())
    }
}

/// The times of a log's entries, if they were recorded.
fn read_times(log: &Path) -> Vec<CutTime> {
    let text = std::fs::read_to_string(log.with_file_name("moments")).unwrap_or_default();
    let cut_time = |line: &str| {
        let (promised, visible) = line.split_once(' ')?;
        Some(CutTime { promised: promised.parse().ok()?, visible: visible.parse().ok()? })
    };
    text.lines().map_while(cut_time).collect()
}

/// A write log that is being written.
#[derive(Debug)]
pub struct LogWriter {
    file: File,
    path: PathBuf,
    end: u64,
    times: Vec<CutTime>,
}

impl LogWriter {
    /// Makes a log at `path`, in place of what is there.
    pub fn create(path: &Path) -> Result<Self> {
        let outcome = File::options().read(true).write(true).create(true).truncate(true).open(path);
        let file = outcome.map_err(|error| Error::io("cannot make the log", path, error))?;
        let mut writer =
            LogWriter { file, path: path.to_owned(), end: SECTOR_BYTES, times: Vec::new() };
        writer.write_superblock().map_err(|error| writer.failed(error))?;
        writer.file.set_len(SECTOR_BYTES).map_err(|error| writer.failed(error))?;
        Ok(writer)
    }

    /// How many entries it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.times.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    /// Adds an entry. `data` is as long as the entry says, or empty where they are zeroes.
    pub fn add(&mut self, entry: Entry, data: &[u8], cut_time: CutTime) -> Result<()> {
        debug_assert!(data.is_empty() || data.len() as u64 == entry.sector_count * SECTOR_BYTES);
        let end = self.end + SECTOR_BYTES * (1 + entry.data_sectors());
        let blank = data.iter().all(|&byte| byte == 0);
        let written = self.file.write_all_at(&entry.encode(), self.end).and_then(|()| {
            // Zeroes stay a hole, so that a log of write-zeroes of a whole disk takes no space.
            if !blank {
                self.file.write_all_at(data, self.end + SECTOR_BYTES)?;
            }
            self.file.set_len(end)
        });
        written.map_err(|error| self.failed(error))?;
        self.end = end;
        self.times.push(cut_time);
        Ok(())
    }

    /// Completes the log and opens it for reading.
    pub fn finish(&mut self) -> Result<Recording> {
        self.write_superblock().map_err(|error| self.failed(error))?;
        let line = |cut_time: &CutTime| format!("{} {}\n", cut_time.promised, cut_time.visible);
        let times: String = self.times.iter().map(line).collect();
        // In a file of their own, because the log's format is that of other programs and has no
        // place for them.
        std::fs::write(self.path.with_file_name("moments"), times)
            .map_err(|error| self.failed(error))?;
        Recording::open(&self.path)
    }

    fn write_superblock(&mut self) -> io::Result<()> {
        let entry_count = self.times.len() as u64;
        let superblock = Superblock { entry_count, sector_bytes: SECTOR_BYTES as u32 };
        self.file.write_all_at(&superblock.encode(), 0)
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::io("cannot write the log", &self.path, error)
    }
}
