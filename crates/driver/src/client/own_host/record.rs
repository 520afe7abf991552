//! What tells a program that starts again from one that only has the same name: a file in the
//! device's folder with a random number, a count of its drivers, and the options of the device.
//!
//! Invariants: the file exists while the device does, also if its driver dies. A copy of the folder
//! is another device. Whoever writes it has the device's name.
//!
//! Not here: the name and its lock (`host`).

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use sawmill_device::{Error, ErrorKind, Result};

use crate::protocol::ControlFacts;

pub(super) const FILE: &str = "device";
/// Its last line: a file without it was cut.
const END: &str = "end\n";

/// A device that had a driver, which has not ended it. Where its doors ended with that driver, it
/// is gone all the same.
#[derive(Debug)]
pub(super) struct Earlier {
    number: u64,
    generation: u64,
    pub(super) options: ControlFacts,
}

impl Earlier {
    /// See [`Record::identity`].
    pub(super) fn identity(&self, folder: &Path, name: &str) -> String {
        identity(folder, self.number, name)
    }

    /// Its next driver, where the file of this one stays.
    pub(super) fn unwritten_next(self, folder: &Path) -> Record {
        let generation = self.generation.saturating_add(1);
        Record { folder: folder.to_owned(), number: self.number, generation }
    }
}

/// One driver of a device.
#[derive(Debug)]
pub(super) struct Record {
    folder: PathBuf,
    number: u64,
    /// Of how many drivers it is the last.
    pub(super) generation: u64,
}

impl Record {
    /// The device that the folder remembers.
    pub(super) fn earlier(folder: &Path) -> Result<Option<Earlier>> {
        let path = folder.join(FILE);
        match std::fs::read_to_string(&path) {
            // A file without sense was cut by a crash of the machine, which has ended all devices.
            Ok(text) => Ok(parse(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(&path, error)),
        }
    }

    /// The next driver of this device, or the first of a new one.
    pub(super) fn next(
        folder: &Path,
        options: &ControlFacts,
        earlier: Option<&Earlier>,
    ) -> Result<Self> {
        let path = folder.join(FILE);
        let number = earlier.map_or_else(random, |earlier| Ok(earlier.number))?;
        let generation = earlier.map_or(0, |earlier| earlier.generation).saturating_add(1);
        let mut text = format!("{number:016x} {generation}\n");
        options.iter().for_each(|(name, value)| text += &format!("{name}={value}\n"));
        let temporary = path.with_extension("new");
        let written = std::fs::write(&temporary, text + END);
        let written = written.and_then(|()| std::fs::rename(&temporary, &path));
        written.map_err(|error| failed(&path, error))?;
        Ok(Record { folder: folder.to_owned(), number, generation })
    }

    /// What the device is called among all of this machine.
    pub(super) fn identity(&self, name: &str) -> String {
        identity(&self.folder, self.number, name)
    }

    /// The device has ended: the next one is another.
    pub(super) fn forget(&self) {
        // If it stays, the next device of this name counts on and finds nothing to take over.
        let _ = std::fs::remove_file(self.folder.join(FILE));
    }
}

fn identity(folder: &Path, number: u64, name: &str) -> String {
    // With the place: a copied folder has the number, too.
    let place = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    // FNV-1a: short, and equal in every version of this library.
    let hash = place.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("drivers/{name}/{number:016x}-{hash:016x}")
}

fn failed(path: &Path, error: io::Error) -> Error {
    Error::caused(ErrorKind::of_io(&error), path.display().to_string(), error)
}

fn parse(text: &str) -> Option<Earlier> {
    let mut lines = text.strip_suffix(END)?.lines();
    let (number, generation) = lines.next()?.split_once(' ')?;
    let number = u64::from_str_radix(number, 16).ok()?;
    let add = |facts: ControlFacts, line: &str| {
        let (name, value) = line.split_once('=')?;
        Some(facts.with(name, value))
    };
    let options = lines.try_fold(ControlFacts::default(), add)?;
    Some(Earlier { number, generation: generation.parse().ok()?, options })
}

fn random() -> Result<u64> {
    getrandom::u64().map_err(|error| {
        Error::caused(ErrorKind::Unavailable, "the kernel returned no random bytes", error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(folder: &Path, earlier: Option<&Earlier>) -> Record {
        Record::next(folder, &ControlFacts::default().with("size", 4096), earlier).unwrap()
    }

    fn earlier(folder: &Path) -> Option<Earlier> {
        Record::earlier(folder).unwrap()
    }

    #[test]
    fn a_device_is_known_again_until_it_ends_and_its_copy_is_another() {
        let folder = tempfile::tempdir().unwrap();
        assert!(earlier(folder.path()).is_none());
        let first = next(folder.path(), None);
        let waiting = earlier(folder.path()).unwrap();
        assert_eq!(waiting.options.get("size"), Some("4096"));
        let second = next(folder.path(), Some(&waiting));
        assert_eq!((first.generation, second.generation), (1, 2));
        assert_eq!(first.identity("disk"), second.identity("disk"));
        assert_eq!(waiting.identity(folder.path(), "disk"), first.identity("disk"));
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(folder.path().join(FILE), copy.path().join(FILE)).unwrap();
        let copied = next(copy.path(), earlier(copy.path()).as_ref());
        assert_ne!(copied.identity("disk"), second.identity("disk"));
        second.forget();
        assert!(earlier(folder.path()).is_none());
        assert_ne!(next(folder.path(), None).identity("disk"), first.identity("disk"));
    }

    #[test]
    fn a_file_that_a_crash_of_the_machine_has_cut_is_that_of_no_device() {
        let folder = tempfile::tempdir().unwrap();
        for text in
            ["", "0123", "x y\nend\n", "12 -1\nend\n", "12 1\nsize=4096\n", "12 1\nsize\nend\n"]
        {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            assert!(Record::earlier(folder.path()).unwrap().is_none(), "{text:?}");
        }
    }
}
