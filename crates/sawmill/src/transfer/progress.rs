//! How far a transfer got, kept in the volume's state folder beside its journal, and which transfer
//! may resume there.
//!
//! Invariants: the file is replaced as a whole and synced, so a crash leaves the old one or the new
//! one. An unreadable file counts as none. Not here: its bytes (`sawmill_format::transfer`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sawmill_format::crc::crc32c;
use sawmill_format::transfer::TransferProgress;

use crate::durable;
use sawmill_console::exit::{Failure, Result};

/// The progress file of one transfer.
pub(crate) struct ProgressFile {
    path: PathBuf,
    pub(crate) known: TransferProgress,
}

impl ProgressFile {
    /// The file of an import into a volume; there is one at a time.
    pub(crate) fn of_import(folder: &Path, known: TransferProgress) -> Self {
        ProgressFile { path: folder.join("import.progress"), known }
    }

    /// The file of an export to `known.far_name`.
    pub(crate) fn of_export(folder: &Path, known: TransferProgress) -> Self {
        let number = crc32c(known.far_name.as_bytes());
        ProgressFile { path: folder.join(format!("export-{number:08x}.progress")), known }
    }

    /// What an earlier transfer with the same other end left, if there was one.
    pub(crate) fn earlier(&self) -> Option<TransferProgress> {
        let bytes = fs::read(&self.path).ok()?;
        match TransferProgress::decode(&bytes, self.known.volume_id) {
            // The file's name has a checksum only, which two destinations may share.
            Ok(earlier) => (earlier.far_name == self.known.far_name).then_some(earlier),
            Err(error) => {
                tracing::warn!("{}: {error}; ignoring it", self.path.display());
                None
            }
        }
    }

    /// Notes that everything before `done_bytes` is in place and durable.
    pub(crate) fn keep(&mut self, done_bytes: u64) -> Result<()> {
        self.known.done_bytes = done_bytes;
        let bytes = self.known.encode().map_err(io::Error::other);
        bytes
            .and_then(|bytes| durable::replace(&self.path, &bytes))
            .map_err(|error| Failure::io(format!("cannot write {}", self.path.display()), &error))
    }

    /// Call this when the transfer is complete, or starts over.
    pub(crate) fn forget(&self) -> Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Failure::io(format!("cannot remove {}", self.path.display()), &error))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use sawmill_format::ids::VolumeId;

    use super::*;

    fn progress(far_name: &str) -> TransferProgress {
        TransferProgress {
            volume_id: VolumeId([7; 16]),
            size_bytes: 100,
            done_bytes: 0,
            epoch: 1,
            position: 0,
            far_name: far_name.into(),
            far_state: String::new(),
        }
    }

    #[test]
    fn what_was_kept_is_found_again_by_the_same_other_end_alone() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = ProgressFile::of_import(folder.path(), progress("/a"));
        assert_eq!(file.earlier(), None);
        file.keep(42).unwrap();
        assert_eq!(file.earlier().unwrap().done_bytes, 42);
        assert_eq!(ProgressFile::of_import(folder.path(), progress("/b")).earlier(), None);
        file.forget().unwrap();
        assert_eq!(file.earlier(), None);
        file.forget().unwrap();
    }

    #[test]
    fn progress_that_is_damaged_counts_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = ProgressFile::of_import(folder.path(), progress("/a"));
        file.keep(42).unwrap();
        let path = folder.path().join("import.progress");
        let mut bytes = fs::read(&path).unwrap();
        bytes[45] ^= 1;
        fs::write(&path, bytes).unwrap();
        assert_eq!(file.earlier(), None);
    }
}
