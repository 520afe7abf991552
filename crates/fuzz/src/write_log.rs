//! A write log of another program: passes any bytes to the reader, and what it read to cuts, plans
//! and the writer.
//!
//! Invariants: an accepted log has no more entries than its file has sectors. Each entry is the
//! only encoding of what the file has, and all lie on a disk of a valid size. A cut holds what a
//! plain model of a disk holds; a torn one holds, sector by sector, what some write left. A log
//! that is written again is read as the same log.
//!
//! Not here: logs of our own recorder (`crates/verify`).

use std::path::{Path, PathBuf};

use sawmill_format::write_log::{Entry, Flags, SECTOR_BYTES_RANGE, Superblock};
use sawmill_format::write_log::{entry_at, superblock_at};
use sawmill_verify::image::Image;
use sawmill_verify::plan::{Budget, plan};
use sawmill_verify::power_cut::{EntrySelection, PowerCut, Replay, flushed_before};
use sawmill_verify::recorded_run;
use sawmill_verify::recording::{
    DISK_BYTES_MAX, LogWriter, RecordedEntry, Recording, SECTOR_BYTES,
};
use sawmill_verify::stamp::CutTime;

use crate::mend::{put, u64_at};

/// Bytes at the beginning of a disk that are compared.
const MODEL_BYTES: usize = 16 << 10;
const PAGE_BYTES: usize = 4096;
const IMAGES_MAX: usize = 12;
const KNOWN_FLAGS: u64 = (1 << 5) - 1;

struct Places {
    foreign: PathBuf,
    ours: PathBuf,
    _folder: tempfile::TempDir,
}

thread_local! {
    static PLACES: Places = {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let ours = folder.path().join("ours");
        std::fs::create_dir(&ours).expect("a folder");
        let foreign = folder.path().join("log");
        Places { foreign, ours: ours.join("log"), _folder: folder }
    };
}

/// A log as it is, and with its superblock and entries corrected.
pub(crate) fn run(bytes: &[u8]) {
    check_log(bytes);
    let mended = mended(bytes);
    if mended != bytes {
        check_log(&mended);
    }
}

/// A valid superblock, and entries near the beginning of the disk whose data the file has.
fn mended(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().max(2 * SECTOR_BYTES as usize), 0);
    let sector_bytes = Superblock::decode(&bytes).map_or(512, |found| found.sector_bytes);
    let unit = sector_bytes as usize;
    let (mut at, mut entry_count) = (unit, 0);
    while at + SECTOR_BYTES as usize <= bytes.len() {
        let room = ((bytes.len() - at) / unit).saturating_sub(1) as u64;
        let head = &mut bytes[at..];
        let field = |field| u64_at(head, field).unwrap_or(0);
        let (sector, count) = (field(entry_at::SECTOR), field(entry_at::SECTOR_COUNT));
        let flags = Flags(field(entry_at::FLAGS) & KNOWN_FLAGS);
        // So near that no sum overflows. Places at the edge come from inputs as they are.
        let sector = sector % (1 << 50);
        let mut entry = Entry { sector, sector_count: count, flags, data_bytes: 0 };
        entry.sector_count %= if entry.data_sectors() > 0 { room + 1 } else { 1 << 20 };
        put(head, entry_at::SECTOR, &entry.sector.to_le_bytes());
        put(head, entry_at::SECTOR_COUNT, &entry.sector_count.to_le_bytes());
        put(head, entry_at::FLAGS, &entry.flags.0.to_le_bytes());
        at += unit * (1 + entry.data_sectors() as usize);
        entry_count += 1;
    }
    let entry_count = entry_count.min(u64_at(&bytes, superblock_at::ENTRY_COUNT).unwrap_or(0));
    let superblock = Superblock { entry_count, sector_bytes }.encode();
    bytes[..superblock.len()].copy_from_slice(&superblock);
    bytes
}

fn check_log(bytes: &[u8]) {
    if let Ok(superblock) = Superblock::decode(bytes) {
        assert_eq!(superblock.encode(), bytes[..superblock_at::SIZE], "it has one encoding");
        assert!(SECTOR_BYTES_RANGE.contains(&superblock.sector_bytes));
    }
    PLACES.with(|places| {
        fresh(&places.foreign);
        std::fs::write(&places.foreign, bytes).expect("a temporary file");
        let Ok(opened) = recorded_run::RecordedRun::foreign(&places.foreign, MODEL_BYTES as u64)
        else {
            return;
        };
        let log = Log { bytes, recording: &opened.recording };
        log.check_entries();
        assert!(opened.before.size_bytes() >= opened.recording.end_bytes());
        assert!(opened.before.size_bytes() <= DISK_BYTES_MAX);
        log.check_cuts(&opened.before);
        log.check_plan(&opened.before);
        log.check_written_again(&places.ours, &opened.before);
    });
}

/// Removes a file, so that it is created anew: a file system may write a file to disk immediately
/// if it is truncated and rewritten.
fn fresh(path: &Path) {
    // The first time, no file exists.
    let _ = std::fs::remove_file(path);
}

/// A log that was read, and the bytes that it was read from.
struct Log<'a> {
    bytes: &'a [u8],
    recording: &'a Recording,
}

impl<'a> Log<'a> {
    fn entries(&self) -> &'a [RecordedEntry] {
        &self.recording.entries
    }

    fn check_entries(&self) {
        let superblock = Superblock::decode(self.bytes).expect("the log was read");
        let unit = self.recording.sector_bytes();
        assert_eq!(unit, u64::from(superblock.sector_bytes));
        assert_eq!(self.entries().len() as u64, superblock.entry_count);
        let mut at = unit;
        for recorded in self.entries() {
            assert_eq!(recorded.data_at, at + unit, "each comes after the one before");
            let sector = &self.bytes[at as usize..][..SECTOR_BYTES as usize];
            assert_eq!(recorded.entry.encode(), sector[..entry_at::SIZE], "it has one encoding");
            assert!(recorded.entry.flags.0 <= KNOWN_FLAGS);
            let end = u128::from(recorded.entry.sector) + u128::from(recorded.entry.sector_count);
            assert!(end * u128::from(unit) <= u128::from(DISK_BYTES_MAX), "no disk is larger");
            at += unit * (1 + recorded.entry.data_sectors());
        }
    }

    /// The data of an entry, if the file has all of it; none for an entry without data.
    fn data(&self, recorded: &RecordedEntry) -> Option<&'a [u8]> {
        let length = recorded.entry.data_sectors() * self.recording.sector_bytes();
        if length == 0 {
            return Some(&[]);
        }
        let rest = self.bytes.get(usize::try_from(recorded.data_at).ok()?..)?;
        rest.get(..usize::try_from(length).ok()?)
    }

    fn changes(recorded: &RecordedEntry) -> bool {
        recorded.entry.sector_count > 0 && !recorded.entry.flags.has(Flags::MARK)
    }

    /// Carries out an entry on the beginning of a disk; none when its data are missing.
    fn carry_out(&self, recorded: &RecordedEntry, disk: &mut [u8]) -> Option<()> {
        let entry = recorded.entry;
        let data = self.data(recorded)?;
        if Self::changes(recorded) {
            let unit = self.recording.sector_bytes();
            let place = |sector: u64| ((sector * unit).min(disk.len() as u64)) as usize;
            let (from, end) = (place(entry.sector), place(entry.sector + entry.sector_count));
            match entry.flags.has(Flags::DISCARD) {
                true => disk[from..end].fill(0),
                false => disk[from..end].copy_from_slice(&data[..end - from]),
            }
        }
        Some(())
    }

    /// The beginning of the disk after those of the first `entries` for which `is_there` is true.
    fn model(&self, entries: usize, is_there: impl Fn(usize) -> bool) -> Option<Vec<u8>> {
        let mut disk = vec![0; MODEL_BYTES];
        for (number, recorded) in self.entries()[..entries].iter().enumerate() {
            if is_there(number) {
                self.carry_out(recorded, &mut disk)?;
            }
        }
        Some(disk)
    }

    /// No image keeps more than the data of the log plus two pages for the ends of each write.
    fn check_size(&self, image: &Image) {
        let pages = image.pages().count();
        assert!(pages <= self.bytes.len() / PAGE_BYTES + 2 * self.entries().len(), "{pages} pages");
    }

    /// Whole cuts and bare ones, there and back.
    fn check_cuts(&self, before: &Image) {
        let mut replay = Replay::new(self.recording, before.clone());
        let last = self.entries().len();
        // Back as well: a replay that has gone on must begin again for an earlier cut.
        for entry in (0..=last).chain([last / 2, 0]) {
            let flushed = flushed_before(self.entries(), entry);
            let firm = |n: usize| n < flushed || self.entries()[n].entry.flags.has(Flags::FUA);
            for (kept, disk) in [
                (EntrySelection::All, self.model(entry, |_| true)),
                (EntrySelection::None, self.model(entry, firm)),
            ] {
                let image = replay.image(&PowerCut { entry, selection: kept });
                let (Ok(image), Some(disk)) = (&image, &disk) else {
                    assert!(image.is_err() && disk.is_none(), "an image without its data");
                    continue;
                };
                assert!(image.read(0, MODEL_BYTES) == *disk, "cut {entry} holds something else");
                self.check_size(image);
            }
        }
    }

    /// The cuts of a plan: few, in order, each with a name by which it can be checked again.
    fn check_plan(&self, before: &Image) {
        let budget = Budget { images_max: IMAGES_MAX, tear_bytes: Some(SECTOR_BYTES), seed: 7 };
        let plan = plan(self.recording, 0, &budget);
        assert!(plan.cuts.len() <= IMAGES_MAX && plan.cuts.len() <= plan.legal);
        assert!(plan.cuts.is_sorted_by_key(|cut| cut.entry));
        let mut replay = Replay::new(self.recording, before.clone());
        for cut in &plan.cuts {
            assert_eq!(cut.to_string().parse().as_ref(), Ok(cut), "its name is its own");
            if let Ok(image) = replay.image(cut) {
                self.check_size(&image);
                self.check_sectors(cut.entry, &image);
            }
        }
    }

    /// Each sector is zeroes, or what an entry up to `entry`, which may be in flight, left there.
    fn check_sectors(&self, entry: usize, image: &Image) {
        let entries = &self.entries()[..(entry + 1).min(self.entries().len())];
        let disk = image.read(0, MODEL_BYTES);
        for (sector, bytes) in disk.chunks(SECTOR_BYTES as usize).enumerate() {
            let address = sector as u64 * SECTOR_BYTES;
            let left_by = |recorded: &RecordedEntry| {
                let from = recorded.entry.sector * self.recording.sector_bytes();
                let inside = usize::try_from(address.checked_sub(from)?).ok()?;
                let rest = self.bytes.get(usize::try_from(recorded.data_at).ok()? + inside..)?;
                let data_bytes = recorded.entry.data_sectors() * self.recording.sector_bytes();
                (inside as u64 + SECTOR_BYTES <= data_bytes && rest.starts_with(bytes))
                    .then_some(())
            };
            let is_blank = bytes.iter().all(|byte| *byte == 0);
            let is_known = is_blank || entries.iter().any(|recorded| left_by(recorded).is_some());
            assert!(is_known, "sector {sector} holds what was never written");
        }
    }

    /// Our own writer has sectors of 512 bytes.
    fn check_written_again(&self, path: &Path, before: &Image) {
        let data: Option<Vec<&[u8]>> = self.entries().iter().map(|r| self.data(r)).collect();
        let Some(data) = data.filter(|_| self.recording.sector_bytes() == SECTOR_BYTES) else {
            return;
        };
        fresh(path);
        fresh(&path.with_file_name("moments"));
        let mut writer = LogWriter::create(path).expect("a temporary file");
        for (recorded, data) in self.entries().iter().zip(data) {
            writer.add(recorded.entry, data, CutTime::default()).expect("a temporary file");
        }
        let again = writer.finish().expect("what was written is read");
        let places = |recording: &Recording| -> Vec<(Entry, u64)> {
            recording.entries.iter().map(|recorded| (recorded.entry, recorded.data_at)).collect()
        };
        assert_eq!(places(&again), places(self.recording), "it is read as the same");
        let last = PowerCut::whole(again.entries.len());
        let image = |recording| {
            let image = Replay::new(recording, before.clone()).image(&last);
            image.expect("its data are there").read(0, MODEL_BYTES)
        };
        assert!(image(&again) == image(self.recording), "it leaves the same");
    }
}
