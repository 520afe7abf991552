//! Makes a journal, and handles an existing file with its name.
//!
//! Invariant: a file that holds, or may hold, writes that exist nowhere else is kept under a name
//! of its own, which was free.
//!
//! Not here: whether the existing file may be lost (`journal`), the superblock of the new one
//! (`bind`), and the memory (`memory`).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_format::journal::RING_START_BYTES;
use sawmill_sys::{AlignedBytes, BLOCK_BYTES};

use super::journal::OldFile;
use crate::disk::{Disk, Disks, EntryKind, local_file_kind};
use crate::options::OpenOptions;
use crate::world::World;
use crate::{Error, ErrorKind, Result};

/// Makes the journal file; on a block device only the superblock is rewritten.
pub(super) fn make_journal(
    path: &Path,
    old: OldFile,
    options: &OpenOptions,
    world: &dyn World,
) -> Result<Arc<dyn Disk>> {
    let failed = |what: &str, error: io::Error| {
        let text = format!(
            "the journal {} of {} bytes cannot be {what}: {error}; free some space, or give \
             another place with --journal or another size with --journal-bytes",
            path.display(),
            options.journal_bytes
        );
        Error::new(local_file_kind(&error), text).with_source(error)
    };
    let disks = world.disks();
    match disks.entry_kind(path) {
        EntryKind::Absent => {}
        EntryKind::Device => return take_device(path, old, disks),
        EntryKind::File { size_bytes } if old == OldFile::Remove || size_bytes == 0 => {
            disks.remove(path).map_err(|error| failed("replaced", error))?;
        }
        EntryKind::File { .. } => {
            let aside = set_aside(path, disks, world.unix_ms())
                .map_err(|error| failed("set aside", error))?;
            tracing::warn!("the old journal was set aside as {}", aside.display());
        }
    }
    let bytes = options.journal_bytes / BLOCK_BYTES * BLOCK_BYTES;
    disks.make(path, bytes).map_err(|error| failed("made", error))
}

/// Renames it to a free name: clocks may be set back, and files set aside earlier stay.
fn set_aside(path: &Path, disks: &dyn Disks, unix_ms: u64) -> io::Result<PathBuf> {
    for at in unix_ms..u64::MAX {
        let mut aside = path.to_owned();
        aside.as_mut_os_string().push(format!(".aside-{at}"));
        if disks.entry_kind(&aside) == EntryKind::Absent {
            match disks.rename(path, &aside) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                renamed => return renamed.map(|()| aside),
            }
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// A block device cannot be renamed. If its content must be kept, it is refused; otherwise it
/// starts with blank superblocks, so that no older copy can win.
fn take_device(path: &Path, old: OldFile, disks: &dyn Disks) -> Result<Arc<dyn Disk>> {
    let mut start = AlignedBytes::zeroed(RING_START_BYTES as usize);
    let read = disks.open(path).and_then(|disk| disk.read_at(0, &mut start));
    let blank = read.is_ok() && start.iter().all(|byte| *byte == 0);
    if old == OldFile::Keep && !blank {
        let text = format!(
            "the journal {} is a device and cannot be set aside: copy it elsewhere if what it \
             holds matters, clear its first 8192 bytes, and try again",
            path.display()
        );
        return Err(Error::new(ErrorKind::Refused, text));
    }
    start.fill(0);
    let opened = disks.open(path).and_then(|disk| {
        disk.write_at(0, &start)?;
        disk.sync()?;
        Ok(disk)
    });
    opened.map_err(|error| {
        let kind = local_file_kind(&error);
        Error::caused(kind, format!("the journal {} cannot be used", path.display()), error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RealDisks;

    /// Disks on which another process makes a file between the check of its name and the rename to
    /// it.
    struct RacingDisks(PathBuf);

    impl Disks for RacingDisks {
        fn lock(&self, path: &Path) -> io::Result<crate::disk::Lock> {
            RealDisks.lock(path)
        }
        fn lock_file(&self, path: &Path) -> io::Result<crate::disk::Lock> {
            RealDisks.lock_file(path)
        }
        fn entry_kind(&self, path: &Path) -> EntryKind {
            let kind = RealDisks.entry_kind(path);
            if path == self.0 && kind == EntryKind::Absent {
                std::fs::write(path, b"older").unwrap();
            }
            kind
        }
        fn open(&self, path: &Path) -> io::Result<Arc<dyn Disk>> {
            RealDisks.open(path)
        }
        fn make(&self, path: &Path, size_bytes: u64) -> io::Result<Arc<dyn Disk>> {
            RealDisks.make(path, size_bytes)
        }
        fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
            RealDisks.rename(from, to)
        }
        fn remove(&self, path: &Path) -> io::Result<()> {
            RealDisks.remove(path)
        }
    }

    #[test]
    fn a_journal_that_is_set_aside_replaces_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (journal, aside_path) =
            (folder.path().join("journal"), folder.path().join("journal.aside-7"));
        std::fs::write(&journal, b"newer").unwrap();
        std::fs::write(folder.path().join("journal.aside-8"), b"oldest").unwrap();
        let aside = set_aside(&journal, &RacingDisks(aside_path.clone()), 7).unwrap();
        assert_eq!(aside, folder.path().join("journal.aside-9"));
        assert_eq!(std::fs::read(&aside_path).unwrap(), b"older");
        assert_eq!(std::fs::read(&aside).unwrap(), b"newer");
        assert!(!journal.exists());
    }
}
