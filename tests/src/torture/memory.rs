//! Memory that outlives the process, and its faults in the same boot: lost, damaged, truncated, of
//! another attachment, accessible to other users, or only moved.
//!
//! What must hold: an attach without it is refused until its loss is accepted, and then has
//! everything flushed and everything that an earlier attach found; moved memory is found.
//!
//! Not here: memory that is lost with a container (`containers`), or before a hand-off
//! (`commands`).

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crc_fast::CrcAlgorithm::Crc32Iscsi;

use super::Torture;
use super::volume::{AttachOptions, Loss, NextAttach, Volume};

/// The place of a staging file's epoch in its header, and of the header's checksum.
const EPOCH_AT: usize = 64;
const CRC_AT: usize = 4092;

impl Torture {
    pub(super) fn lose_memory(&mut self, volume: &mut Volume) {
        let memories = volume.memories();
        if memories.is_empty() {
            return self.violation(volume, "a server was killed, and there is no memory of it");
        }
        let kind = self.dice.below(6);
        let name = match kind {
            0 => "memory gone",
            1 => "memory damaged",
            2 => "memory cut short",
            3 => "memory of another attachment",
            4 => "memory open to others",
            _ => "memory moved",
        };
        self.report.did(name);
        if kind == 5 {
            return self.move_memory(volume);
        }
        for memory in memories {
            match kind {
                0 => fs::remove_file(&memory).expect("a file of ours"),
                1 => change(&memory, |header| header[EPOCH_AT + 2] ^= 1),
                2 => {
                    let file = File::options().write(true).open(&memory).expect("a file of ours");
                    file.set_len(self.dice.below(8192)).expect("it can be cut");
                }
                3 => change(&memory, |header| {
                    header[EPOCH_AT] ^= 1;
                    let crc = crc_fast::checksum(Crc32Iscsi, &header[..CRC_AT]) as u32;
                    header[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
                }),
                _ => fs::set_permissions(&memory, Permissions::from_mode(0o666))
                    .expect("a file of ours"),
            }
        }
        volume.note_lost(Loss::Memory, NextAttach::MustRefuse);
    }

    /// Its folder is mounted elsewhere: nothing is lost.
    fn move_memory(&mut self, volume: &mut Volume) {
        let elsewhere = volume.bed.path("moved");
        fs::create_dir_all(&elsewhere).expect("room for a folder");
        for memory in volume.memories() {
            let name = memory.file_name().expect("a file has a name");
            // From one file system to another.
            fs::copy(&memory, elsewhere.join(name)).expect("room for it");
            fs::remove_file(&memory).expect("a file of ours");
        }
        let options =
            AttachOptions { staging: Some(volume.text("moved")), ..AttachOptions::default() };
        self.proxy.stop_faults();
        let Some(server) = self.start(volume, &options) else { return };
        self.check_content(volume, &server.connect());
        server.kill();
    }
}

/// Changes the first page of a file.
fn change(path: &Path, act: impl FnOnce(&mut [u8])) {
    let mut bytes = fs::read(path).expect("a file of ours");
    act(&mut bytes[..CRC_AT + 4]);
    fs::write(path, bytes).expect("a file of ours");
}
