//! What tells a program that starts again from one that only has the same name: a file in the
//! device's folder with a random number and a count of its drivers.
//!
//! Invariants: the file exists while the device does, also if its driver dies. A copy of the folder
//! is another device. Whoever reads or writes it has the device's name.
//!
//! Not here: the name and its lock (`host`).

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use sawmill_device::{Error, ErrorKind, Result};

const FILE: &str = "device";

/// One driver of a device.
#[derive(Debug)]
pub(super) struct Record {
    path: PathBuf,
    number: u64,
    /// Of how many drivers it is the last.
    pub(super) generation: u64,
}

impl Record {
    /// The next driver of the device that the folder remembers, or the first of a new one.
    pub(super) fn next(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let failed = |error: io::Error| {
            Error::caused(ErrorKind::of_io(&error), path.display().to_string(), error)
        };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        // A file without sense was cut by a crash of the machine, which has ended all devices.
        let earlier = text.as_deref().and_then(parse);
        let (number, generation) = match earlier {
            Some((number, generation)) => (number, generation.saturating_add(1)),
            None => (random()?, 1),
        };
        let temporary = path.with_extension("new");
        let written = std::fs::write(&temporary, format!("{number:016x} {generation}\n"));
        written.and_then(|()| std::fs::rename(&temporary, &path)).map_err(failed)?;
        Ok(Record { path, number, generation })
    }

    /// What the device is called among all of this machine.
    pub(super) fn identity(&self, name: &str) -> String {
        // With the place: a copied folder has the number, too.
        let folder = self.path.parent().unwrap_or(&self.path);
        let place = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        // FNV-1a: short, and equal in every version of this library.
        let hash = place.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        format!("drivers/{name}/{:016x}-{hash:016x}", self.number)
    }

    /// The device has ended: the next one is another.
    pub(super) fn forget(&self) {
        // If it stays, the next device of this name counts on and finds nothing to take over.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn parse(text: &str) -> Option<(u64, u64)> {
    let (number, generation) = text.trim().split_once(' ')?;
    Some((u64::from_str_radix(number, 16).ok()?, generation.parse().ok()?))
}

fn random() -> Result<u64> {
    getrandom::u64().map_err(|error| {
        Error::caused(ErrorKind::Unavailable, "the kernel returned no random bytes", error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_again_until_it_ends_and_its_copy_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let first = Record::next(folder.path()).unwrap();
        let second = Record::next(folder.path()).unwrap();
        assert_eq!((first.generation, second.generation), (1, 2));
        assert_eq!(first.identity("disk"), second.identity("disk"));
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(folder.path().join(FILE), copy.path().join(FILE)).unwrap();
        let copied = Record::next(copy.path()).unwrap();
        assert_ne!(copied.identity("disk"), second.identity("disk"));
        second.forget();
        let other = Record::next(folder.path()).unwrap();
        assert_eq!(other.generation, 1);
        assert_ne!(other.identity("disk"), first.identity("disk"));
    }

    #[test]
    fn a_file_that_a_crash_of_the_machine_has_cut_is_that_of_no_device() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "0123", "x y", "12 -1\n"] {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            assert_eq!(Record::next(folder.path()).unwrap().generation, 1, "{text:?}");
        }
    }
}
