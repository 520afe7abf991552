//! The file workload: files whose content can be recomputed, and the check of which must exist
//! after a crash.
//!
//! Invariants: a file gets its name by a rename after its content is synced, and the folder is
//! synced after that. So a file with that name is always whole, and from the time `durable` on,
//! which is taken after the folder's sync, it must exist. The time `removed` is taken before the
//! removal or the replacement begins; from then on the file may be missing.
//!
//! Not here: making, mounting and checking the file system (`file_system`).

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use crate::file_system::FileSystem;
use crate::stamp::{Clock, CutTime};
use crate::{Error, Result};
use sawmill_testkit::Dice;

const FILE_BYTES_MAX: u64 = 48 << 10;

/// One file, or one content of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRecord {
    /// Its name in the root folder.
    pub name: String,
    /// The seed from which its content is computed.
    pub seed: u64,
    /// Its length in bytes.
    pub length: u64,
    /// A time after its name was synced.
    pub durable: u64,
    /// A time before its removal or its replacement began.
    pub removed: Option<u64>,
}

/// The history of the files of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The kind of file system.
    pub kind: FileSystem,
    /// The files, in order.
    pub records: Vec<FileRecord>,
}

impl Files {
    /// The history of an empty file system.
    #[must_use]
    pub fn new(kind: FileSystem) -> Self {
        Files { kind, records: Vec::new() }
    }

    /// Makes, replaces and removes files below `root`, in `count` steps.
    pub fn fill(&mut self, root: &Path, count: u64, dice: &mut Dice, clock: &Clock) -> Result<()> {
        for number in 0..count {
            let alive = |record: &&mut FileRecord| record.removed.is_none();
            let mut old: Vec<&mut FileRecord> = self.records.iter_mut().filter(alive).collect();
            let chosen = old.len().checked_sub(1).map(|last| dice.below(last as u64 + 1) as usize);
            let mut name = format!("file-{number}");
            match chosen.map(|chosen| &mut *old[chosen]) {
                Some(record) if number % 4 == 3 => {
                    record.removed = Some(clock.tick());
                    let path = root.join(&record.name);
                    fs::remove_file(&path)
                        .map_err(|error| Error::io("cannot remove", &path, error))?;
                }
                Some(record) if number % 5 == 4 => {
                    record.removed = Some(clock.tick());
                    name.clone_from(&record.name);
                }
                _ => {}
            }
            let (seed, length) = (dice.word(), 1 + dice.below(FILE_BYTES_MAX));
            let path = root.join(&name);
            make(root, &path, &Dice::new(seed).bytes(length as usize))
                .map_err(|error| Error::io("cannot make", &path, error))?;
            let durable = clock.tick();
            self.records.push(FileRecord { name, seed, length, durable, removed: None });
            if number % 3 == 0 {
                // A file that is never synced: it may be missing, or have any content.
                let path = root.join(format!("loose-{number}"));
                let bytes = dice.bytes(FILE_BYTES_MAX as usize);
                fs::write(&path, bytes).map_err(|error| Error::io("cannot write", &path, error))?;
            }
        }
        Ok(())
    }

    /// Checks that a crash at `cut_time` may leave the files below `root` as they are. The error is
    /// the text of a finding.
    pub fn verify(&self, root: &Path, cut_time: CutTime) -> Result<(), String> {
        for record in &self.records {
            let going = record.removed.is_some_and(|removed| removed < cut_time.visible);
            // The strict bounds of both times: a file whose removal may have begun by then may be
            // there or not.
            let wanted = record.durable < cut_time.promised && !going;
            if wanted && read(root, &record.name)? != Some(content(record)) {
                let synced =
                    "was synced before the power failure, but is missing or has other content";
                return Err(format!("{} ({} bytes) {synced}", record.name, record.length));
            }
        }
        let mut names: Vec<&String> = self.records.iter().map(|record| &record.name).collect();
        names.sort_unstable();
        names.dedup();
        for name in names {
            // Whether it may be missing was judged above. What is there must be whole in any case.
            let Some(found) = read(root, name)? else { continue };
            let mut contents = self.records.iter().filter(|record| record.name == *name);
            if !contents.any(|record| content(record) == found) {
                return Err(format!(
                    "{name} ({} bytes) has a content it never had under that name",
                    found.len()
                ));
            }
        }
        Ok(())
    }

    /// The records as lines of text.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!("files {}\n", self.kind.name());
        for FileRecord { name, seed, length, durable, removed } in &self.records {
            let removed = removed.map_or("-".to_owned(), |time| time.to_string());
            text.push_str(&format!("{name} {seed} {length} {durable} {removed}\n"));
        }
        text
    }

    /// Parses the output of [`Files::to_text`]; `None` for any other text.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let kind: FileSystem = lines.next()?.strip_prefix("files ")?.parse().ok()?;
        let record = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let &[name, seed, length, durable, removed] = words.as_slice() else { return None };
            Some(FileRecord {
                name: name.to_owned(),
                seed: seed.parse().ok()?,
                length: length.parse().ok()?,
                durable: durable.parse().ok()?,
                removed: if removed == "-" { None } else { Some(removed.parse().ok()?) },
            })
        };
        Some(Files { kind, records: lines.map(record).collect::<Option<_>>()? })
    }
}

fn content(record: &FileRecord) -> Vec<u8> {
    Dice::new(record.seed).bytes(record.length as usize)
}

fn make(root: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let nameless = root.join("coming");
    let mut file = File::create(&nameless)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&nameless, path)?;
    File::open(root)?.sync_all()
}

fn read(root: &Path, name: &str) -> Result<Option<Vec<u8>>, String> {
    match fs::read(root.join(name)) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{name} cannot be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> (tempfile::TempDir, Files, CutTime) {
        let folder = tempfile::tempdir().unwrap();
        let (mut files, clock) = (Files::new(FileSystem::Ext4), Clock::default());
        files.fill(folder.path(), 20, &mut Dice::new(3), &clock).unwrap();
        (folder, files, CutTime::END)
    }

    #[test]
    fn the_files_of_a_run_without_a_crash_are_all_right_and_their_text_reads_back() {
        let (folder, files, end) = filled();
        files.verify(folder.path(), end).unwrap();
        assert_eq!(Files::from_text(&files.to_text()), Some(files));
    }

    #[test]
    fn a_synced_file_that_is_gone_changed_or_back_to_an_older_content_is_seen() {
        let (folder, files, end) = filled();
        let alive = files.records.iter().find(|record| record.removed.is_none()).unwrap();
        let path = folder.path().join(&alive.name);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, [&bytes[1..], b"x"].concat()).unwrap();
        assert!(files.verify(folder.path(), end).is_err());
        fs::remove_file(&path).unwrap();
        assert!(files.verify(folder.path(), end).is_err());
        assert!(
            files.verify(folder.path(), CutTime::default()).is_ok(),
            "before anything was synced nothing was promised"
        );
    }
}
