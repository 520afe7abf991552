//! The state of an export that a target keeps for the next target: a file in the state folder.
//!
//! Invariants: a file that is unreadable, belongs to another device, or belongs to a volume that
//! another process has attached since, counts as one without reservations: returning initiators are
//! fenced, and none of their writes is executed. Not here: its bytes
//! (`sawmill_format::export_state`), what a reservation is (`sawmill_link::target`).

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use sawmill_device::{Error, ErrorKind};
use sawmill_format::crc::crc32c;
use sawmill_format::export_state::ExportState;
use sawmill_link::target::{Standing, StandingStore};

use crate::durable;
use sawmill_console::exit::{Failure, Result};

/// The state file of one export.
pub(crate) struct StateFile {
    path: PathBuf,
    identity: String,
    /// For a volume: the attachment of this target. Otherwise 0.
    epoch: u64,
    /// For a volume: the attachment before this one. Otherwise 0.
    epoch_before: u64,
}

impl StateFile {
    /// The file of a volume with the state folder `folder`.
    pub(crate) fn of_volume(
        folder: &Path,
        volume_id: String,
        epoch: u64,
        epoch_before: u64,
    ) -> Self {
        StateFile { path: folder.join("export.state"), identity: volume_id, epoch, epoch_before }
    }

    /// The file of a file or a disk; `folder` has all of them.
    pub(crate) fn of_device(folder: &Path, device: &Path) -> Result<Self> {
        let identity = identity(Path::new("/sys/dev/block"), device)
            .map_err(|error| Failure::io(format!("cannot open {}", device.display()), &error))?;
        let path = folder.join(format!("{:08x}.state", crc32c(identity.as_bytes())));
        Ok(StateFile { path, identity, epoch: 0, epoch_before: 0 })
    }

    /// Returns what the last target left; from now on it belongs to this one.
    pub(crate) fn take_up(&self) -> Result<Standing> {
        let standing = self.earlier().unwrap_or_default();
        // At once, under the epoch of this target: if another process attaches the volume later,
        // the next target sees a gap and fences everybody.
        self.keep(&standing)?;
        Ok(standing)
    }

    fn earlier(&self) -> Option<Standing> {
        let bytes = match fs::read(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            read => read.map_err(|error| error.to_string()),
        };
        // The file's name has a checksum only, which two devices may share.
        let state = bytes.and_then(|bytes| {
            ExportState::decode(&bytes, &self.identity).map_err(|error| error.to_string())
        });
        let state = state.inspect_err(|error| {
            let path = self.path.display();
            tracing::warn!("{path}: {error}; ignoring it, so all attached initiators are fenced");
        });
        let state = state.ok()?;
        let ExportState { reservation, shared, failed_syncs, epoch, .. } = state;
        if self.epoch > 0 && epoch != self.epoch_before {
            tracing::info!(
                "{}: another process has used it since; all attached initiators are fenced",
                self.identity
            );
            // Failed syncs stay: whoever flushed before must still learn of the loss (P87).
            return Some(Standing { failed_syncs, ..Standing::default() });
        }
        Some(Standing { reservation, shared, failed_syncs })
    }
}

impl StandingStore for StateFile {
    fn keep(&self, standing: &Standing) -> sawmill_device::Result<()> {
        let state = ExportState {
            reservation: standing.reservation,
            failed_syncs: standing.failed_syncs,
            epoch: self.epoch,
            shared: standing.shared,
            identity: self.identity.clone(),
        };
        let what = || format!("the target cannot write {}", self.path.display());
        let bytes =
            state.encode().map_err(|error| Error::caused(ErrorKind::Internal, what(), error))?;
        durable::replace(&self.path, &bytes)
            .map_err(|error| Error::caused(ErrorKind::Unavailable, what(), error))
    }
}

/// Identifies a file or a disk for as long as it exists. A disk may get another name at boot.
fn identity(disks: &Path, device: &Path) -> io::Result<String> {
    let path = fs::canonicalize(device)?;
    let metadata = fs::metadata(&path)?;
    let number = metadata.rdev();
    let own = metadata.file_type().is_block_device().then(|| {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        disk_identity(&disks.join(format!("{major}:{minor}")))
    });
    Ok(own.flatten().unwrap_or_else(|| path.to_string_lossy().into_owned()))
}

/// The identity of a disk in the kernel's folder for it, if there is any.
fn disk_identity(folder: &Path) -> Option<String> {
    let read = |folder: &Path, name: &str| {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let (whole, part) = match read(folder, "partition") {
        Some(number) => (folder.join(".."), format!(" partition {number}")),
        None => (folder.to_owned(), String::new()),
    };
    let names = ["wwid", "device/wwid", "dm/uuid", "serial", "device/serial", "loop/backing_file"];
    names.iter().find_map(|name| Some(format!("{name} {}{part}", read(&whole, name)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANDING: Standing = Standing { reservation: 7, shared: true, failed_syncs: 2 };

    #[test]
    fn what_was_kept_is_found_again_for_the_same_file_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        for path in [&one, &other] {
            fs::write(path, "x").unwrap();
        }
        std::os::unix::fs::symlink(&one, folder.path().join("link")).unwrap();
        let of = |path: &Path| StateFile::of_device(folder.path(), path).unwrap();
        assert_eq!(of(&one).take_up().unwrap(), Standing::default());
        of(&one).keep(&STANDING).unwrap();
        assert_eq!(of(&folder.path().join("link")).take_up().unwrap(), STANDING);
        assert_eq!(of(&other).take_up().unwrap(), Standing::default());
        let same_number = StateFile { path: of(&one).path, ..of(&other) };
        assert_eq!(same_number.take_up().unwrap(), Standing::default());
        assert_eq!(
            of(&one).take_up().unwrap(),
            Standing::default(),
            "whoever was attached is cut off"
        );
    }

    #[test]
    fn a_volume_that_something_else_had_attached_knows_no_reservation() {
        let folder = tempfile::tempdir().unwrap();
        let of = |epoch, before| StateFile::of_volume(folder.path(), "5a01".into(), epoch, before);
        of(30, 0).keep(&STANDING).unwrap();
        assert_eq!(of(41, 30).take_up().unwrap(), STANDING, "the next attachment");
        assert_eq!(of(59, 41).take_up().unwrap(), STANDING, "and the next");
        let cut = Standing { failed_syncs: 2, ..Standing::default() };
        assert_eq!(of(77, 60).take_up().unwrap(), cut, "60 was another's");
        assert_eq!(of(80, 77).take_up().unwrap(), cut, "it stays so");
    }

    #[test]
    fn a_damaged_file_knows_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = StateFile::of_volume(folder.path(), "5a01".into(), 3, 1);
        file.keep(&STANDING).unwrap();
        let mut bytes = fs::read(&file.path).unwrap();
        bytes[17] ^= 1;
        fs::write(&file.path, bytes).unwrap();
        assert_eq!(
            StateFile { epoch: 4, epoch_before: 3, ..file }.take_up().unwrap(),
            Standing::default()
        );
    }

    #[test]
    fn a_disk_is_known_by_what_it_says_of_itself_and_a_partition_by_its_disk() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        fs::create_dir_all(disk.join("device")).unwrap();
        fs::create_dir_all(disk.join("part")).unwrap();
        assert_eq!(disk_identity(&disk), None);
        fs::write(disk.join("serial"), "\n").unwrap();
        fs::write(disk.join("device/serial"), " S123 \n").unwrap();
        assert_eq!(disk_identity(&disk).unwrap(), "device/serial S123");
        fs::write(disk.join("part/partition"), "2\n").unwrap();
        assert_eq!(disk_identity(&disk.join("part")).unwrap(), "device/serial S123 partition 2");
        fs::write(disk.join("wwid"), "eui.1").unwrap();
        assert_eq!(disk_identity(&disk).unwrap(), "wwid eui.1");
    }
}
