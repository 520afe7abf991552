//! The journal's superblock: whose it is and how far it got, in two copies written in turn.

use std::sync::Arc;

use sawmill_format::ids::VolumeId;
use sawmill_format::journal::{SUPERBLOCK_BYTES, Superblock, choose_superblock};
use sawmill_sys::AlignedBytes;

use super::disk_failed;
use crate::disk::Disk;
use crate::{Error, ErrorKind, Result};

/// The superblock of an open journal.
pub(crate) struct SuperblockFile {
    disk: Arc<dyn Disk>,
    current: Superblock,
    /// Whether the copy that is `current` was synced by this process.
    is_synced: bool,
}

impl SuperblockFile {
    /// Reads the newest valid copy; `None` when both are blank (a journal that was never used).
    pub(crate) fn read(disk: Arc<dyn Disk>, volume_id: VolumeId) -> Result<Option<Self>> {
        let mut copies = vec![0u8; 2 * SUPERBLOCK_BYTES];
        disk.read_at(0, &mut copies).map_err(|error| disk_failed("read its superblock", &error))?;
        if copies.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let (first, second) = copies.split_at(SUPERBLOCK_BYTES);
        let current = choose_superblock(first, second, volume_id).map_err(|error| {
            Error::new(ErrorKind::Corrupt, format!("the journal has no valid superblock: {error}"))
        })?;
        Ok(Some(SuperblockFile { disk, current, is_synced: false }))
    }

    /// Starts the first superblock of a journal; `write` makes it durable.
    pub(crate) fn first(disk: Arc<dyn Disk>, current: Superblock) -> Self {
        SuperblockFile { disk, current, is_synced: true }
    }

    pub(crate) fn current(&self) -> &Superblock {
        &self.current
    }

    /// Writes the next copy with `change` applied, and makes it durable together with all written before.
    pub(crate) fn write(&mut self, change: impl FnOnce(&mut Superblock)) -> Result<()> {
        let cannot_sync = |error| disk_failed("sync its superblock", &error);
        if !self.is_synced {
            // Who wrote it may have died before its sync: a power cut could tear both copies.
            self.disk.sync().map_err(cannot_sync)?;
        }
        let mut next = self.current.clone();
        change(&mut next);
        next.generation += 1;
        let mut block = AlignedBytes::zeroed(SUPERBLOCK_BYTES);
        block.copy_from_slice(&next.encode());
        self.disk
            .write_at(next.offset_bytes(), &block)
            .map_err(|error| disk_failed("write its superblock", &error))?;
        self.disk.sync().map_err(cannot_sync)?;
        (self.current, self.is_synced) = (next, true);
        if !self.disk.has_name() {
            let text = "the journal was removed, renamed or replaced while it was in use: a restart would \
                        not find what is written to it, so the volume stops. If the file still exists under \
                        another name, move it back; otherwise restart with --accept-journal-loss";
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        Ok(())
    }
}
