//! The journal's superblock: the journal's volume and positions, in two copies written in turn.
//!
//! Invariants: the older copy is overwritten, after a sync. A copy that failed to sync gives way to
//! the one that it replaced: reads may return it although the disk has dropped it, and whoever took
//! it for the newest would overwrite the other, which may be the only durable one.
//!
//! Not here: its bytes and the choice between the copies (`sawmill_format::journal`), and when one
//! is written (`writer`, `open::bind`).

use std::sync::Arc;

use sawmill_format::ids::VolumeId;
use sawmill_format::journal::{SUPERBLOCK_BYTES, Superblock, choose_superblock};
use sawmill_sys::AlignedBytes;

use super::disk_failed;
use crate::disk::Disk;
use crate::store_calls::cannot_encode;
use crate::{Error, ErrorKind, Result};

/// The superblock of an open journal.
pub(crate) struct SuperblockFile {
    disk: Arc<dyn Disk>,
    current: Superblock,
    /// Both copies, as they were read or as a sync has made them durable.
    copies: [AlignedBytes; 2],
    /// Whether the copy that is `current` was synced by this process.
    is_synced: bool,
}

impl SuperblockFile {
    /// Reads the newest valid copy; `None` when both are blank (a journal that was never used).
    pub(crate) fn read(disk: Arc<dyn Disk>, volume_id: VolumeId) -> Result<Option<Self>> {
        let mut found = AlignedBytes::zeroed(2 * SUPERBLOCK_BYTES);
        disk.read_at(0, &mut found).map_err(|error| disk_failed("read its superblock", error))?;
        if found.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let (first, second) = found.split_at(SUPERBLOCK_BYTES);
        let current = choose_superblock(first, second, volume_id).map_err(|error| {
            Error::caused(ErrorKind::Corrupt, "the journal has no valid superblock", error)
        })?;
        let mut copies = blank_copies();
        copies[0].copy_from_slice(first);
        copies[1].copy_from_slice(second);
        Ok(Some(SuperblockFile { disk, current, copies, is_synced: false }))
    }

    /// Starts the first superblock of a journal; `write` makes it durable.
    pub(crate) fn first(disk: Arc<dyn Disk>, current: Superblock) -> Self {
        SuperblockFile { disk, current, copies: blank_copies(), is_synced: true }
    }

    pub(crate) fn current(&self) -> &Superblock {
        &self.current
    }

    /// Writes the next copy with `change` applied, and makes it durable together with all earlier
    /// writes.
    pub(crate) fn write(&mut self, change: impl FnOnce(&mut Superblock)) -> Result<()> {
        let cannot_sync = |error| disk_failed("sync its superblock", error);
        if !self.is_synced {
            // The writer of the current copy may have died before its sync: a power cut could tear
            // both copies.
            self.disk.sync().map_err(cannot_sync)?;
        }
        let mut next = self.current.clone();
        change(&mut next);
        next.revision += 1;
        let mut block = AlignedBytes::zeroed(SUPERBLOCK_BYTES);
        block.copy_from_slice(&next.encode().map_err(cannot_encode)?);
        let written = self.disk.write_at(next.offset_bytes(), &block);
        let written = written.map_err(|error| disk_failed("write its superblock", error));
        let copy = &mut self.copies[next.copy()];
        if let Err(error) = written.and_then(|()| self.disk.sync().map_err(cannot_sync)) {
            // Nothing depends on the new copy yet. What was there before stays of use if the disk
            // has dropped the current copy, which this process may not have synced.
            if let Err(error) = self.disk.write_at(next.offset_bytes(), copy) {
                tracing::warn!("cannot take back the superblock that was not synced: {error}");
            }
            return Err(error);
        }
        *copy = block;
        (self.current, self.is_synced) = (next, true);
        if !self.disk.has_name() {
            let text = "the journal was removed, renamed or replaced while it was in use: a \
                        restart would not find what is written to it, so the volume stops. If the \
                        file still exists under another name, move it back; otherwise restart with \
                        --accept-journal-loss";
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        Ok(())
    }
}

fn blank_copies() -> [AlignedBytes; 2] {
    std::array::from_fn(|_| AlignedBytes::zeroed(SUPERBLOCK_BYTES))
}

/// The journal of tests.
#[cfg(all(test, not(feature = "shuttle")))]
pub(crate) mod test_journal {
    use sawmill_format::ids::{PutId, VolumeId};
    use sawmill_format::journal::Superblock;

    pub(crate) const CAPACITY_BYTES: u64 = 96 << 10;
    pub(crate) const VOLUME: VolumeId = VolumeId([3; 16]);
    pub(crate) const TAG: u64 = 11;

    /// The first superblock of a journal, nothing in it.
    pub(crate) fn first_superblock() -> Superblock {
        Superblock {
            volume_id: VOLUME,
            journal_tag: TAG,
            revision: 0,
            epoch: 1,
            intent_epoch: 0,
            intent_put_id: PutId([0; 16]),
            capacity_bytes: CAPACITY_BYTES,
            trim: 0,
            logged: 0,
            stored_sequence: 0,
            stored_position: 0,
            clean: false,
            bound_epoch: 1,
            bound_position: 0,
            memory: None,
            ring_copy: None,
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::io;

    use parking_lot::Mutex;

    use super::test_journal::{VOLUME, first_superblock};
    use super::*;

    /// Two superblocks. A failed sync drops what was written, but reads return it until a power
    /// cut, also if later syncs succeed.
    #[derive(Default)]
    struct Blocks {
        now: Vec<u8>,
        durable: Vec<u8>,
        unsynced: Vec<u64>,
        /// So many syncs succeed before the others fail.
        good_syncs: Option<u32>,
        /// The next write fails, and a part of it reaches the medium. Those after it fail too.
        tears_a_write: bool,
        fails_writes: bool,
    }

    struct FailingDisk(Mutex<Blocks>);

    impl FailingDisk {
        fn new() -> Arc<Self> {
            let blank = vec![0; 2 * SUPERBLOCK_BYTES];
            let blocks = Blocks { now: blank.clone(), durable: blank, ..Blocks::default() };
            Arc::new(FailingDisk(Mutex::new(blocks)))
        }

        fn fail_syncs_after(&self, good_syncs: u32) {
            self.0.lock().good_syncs = Some(good_syncs);
        }

        fn mend(&self) {
            self.0.lock().good_syncs = None;
        }

        fn epoch(self: &Arc<Self>) -> u64 {
            read(self).current().epoch
        }

        fn cut_power(&self) {
            let mut blocks = self.0.lock();
            blocks.now = blocks.durable.clone();
        }
    }

    impl Disk for FailingDisk {
        fn size_bytes(&self) -> u64 {
            2 * SUPERBLOCK_BYTES as u64
        }
        fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            into.copy_from_slice(&self.0.lock().now[offset as usize..][..into.len()]);
            Ok(())
        }
        fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            self.read_at(offset, into)
        }
        fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            let blocks = &mut *self.0.lock();
            let offset = offset as usize;
            if blocks.fails_writes {
                return Err(io::Error::from_raw_os_error(5));
            }
            if std::mem::take(&mut blocks.tears_a_write) {
                blocks.fails_writes = true;
                blocks.now[offset..][..512].copy_from_slice(&bytes[..512]);
                blocks.durable[offset..][..512].copy_from_slice(&bytes[..512]);
                return Err(io::Error::from_raw_os_error(5));
            }
            blocks.now[offset..][..bytes.len()].copy_from_slice(bytes);
            blocks.unsynced.push(offset as u64);
            Ok(())
        }
        fn sync(&self) -> io::Result<()> {
            let blocks = &mut *self.0.lock();
            let unsynced = std::mem::take(&mut blocks.unsynced);
            match &mut blocks.good_syncs {
                Some(0) => return Err(io::Error::from_raw_os_error(5)),
                Some(left) => *left -= 1,
                None => {}
            }
            for offset in unsynced {
                let range = offset as usize..offset as usize + SUPERBLOCK_BYTES;
                blocks.durable[range.clone()].copy_from_slice(&blocks.now[range]);
            }
            Ok(())
        }
        fn has_name(&self) -> bool {
            true
        }
    }

    fn read(disk: &Arc<FailingDisk>) -> SuperblockFile {
        SuperblockFile::read(disk.clone(), VOLUME).unwrap().unwrap()
    }

    /// A journal with two synced copies, of epochs 1 and 2, and who wrote them.
    fn two_copies() -> (Arc<FailingDisk>, SuperblockFile) {
        let disk = FailingDisk::new();
        let mut file = SuperblockFile::first(disk.clone(), first_superblock());
        file.write(|_| ()).unwrap();
        file.write(|block| block.epoch = 2).unwrap();
        (disk, file)
    }

    /// The next attach on a disk that syncs again, but tears what it writes; then a power cut.
    fn tear_a_write_and_cut_power(disk: &Arc<FailingDisk>) {
        disk.mend();
        assert_eq!(disk.epoch(), 2, "nothing was done by what was not synced");
        disk.0.lock().tears_a_write = true;
        read(disk).write(|block| block.epoch = 4).unwrap_err();
        disk.cut_power();
    }

    #[test]
    fn a_failed_sync_then_a_torn_write_then_a_power_cut_leave_a_superblock() {
        let (disk, mut file) = two_copies();
        disk.fail_syncs_after(0);
        file.write(|block| block.epoch = 3).unwrap_err();
        tear_a_write_and_cut_power(&disk);
        assert_eq!(disk.epoch(), 2);
    }

    #[test]
    fn a_failed_first_sync_of_a_process_and_a_torn_write_leave_a_superblock() {
        let (disk, _) = two_copies();
        disk.fail_syncs_after(1);
        read(&disk).write(|block| block.epoch = 3).unwrap_err();
        tear_a_write_and_cut_power(&disk);
        assert_eq!(disk.epoch(), 2);
    }

    #[test]
    fn what_a_copy_replaced_is_back_when_the_disk_has_dropped_both() {
        let (disk, file) = two_copies();
        // A process dies between a sync that failed and taking its copy back.
        let unsynced = Superblock { epoch: 3, revision: 3, ..file.current().clone() };
        disk.write_at(unsynced.offset_bytes(), &unsynced.encode().unwrap()).unwrap();
        disk.fail_syncs_after(0);
        disk.sync().unwrap_err();
        // The next one takes it for the newest, and a sync of its own fails.
        disk.fail_syncs_after(1);
        let mut file = read(&disk);
        assert_eq!(file.current().epoch, 3);
        file.write(|block| block.epoch = 4).unwrap_err();
        disk.mend();
        disk.sync().unwrap();
        disk.cut_power();
        assert_eq!(disk.epoch(), 2, "the newest copy that the disk has kept");
    }
}
