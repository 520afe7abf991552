//! Stores that are copied or put back from a backup, and what outlives a process beside them: each
//! history shows its own bytes, and nothing of another one's. And one journal has one writer, by
//! whatever name.

use std::path::Path;
use std::sync::Arc;

use crate::faulty::{Machine, copy_store, stored, until, write_tile};
use crate::rig::{MIB, Rig, pattern};
use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_store::ObjectStore;
use sawmill_volume::{FlushMode, NewestState, inspect, open_cache};

const BLOCK: usize = 4096;

/// A machine on `store` with the journal of `rig`'s folder that is called `name`, and the cache of
/// all.
fn beside(rig: &Rig, store: &Arc<dyn ObjectStore>, name: &str) -> Rig {
    let mut other = Rig::over(store.clone());
    other.options.journal_path = rig.folder.path().join(name);
    other.options.staging_folder = rig.folder.path().to_owned();
    other.options.cache.clone_from(&rig.options.cache);
    other
}

fn read(rig: &Rig) -> Vec<u8> {
    let volume = rig.open();
    let bytes = volume.read_at(0, BLOCK).unwrap();
    volume.close().unwrap();
    bytes
}

fn write_and_close(rig: &Rig, byte: u8) {
    let volume = rig.open();
    volume.write_at(0, &[byte; BLOCK]).unwrap();
    volume.close().unwrap();
}

#[test]
fn a_copy_of_a_store_never_shows_what_the_cache_has_of_the_other() {
    let mut one = Rig::new();
    one.options.cache = Some(open_cache(&one.folder.path().join("cache"), 16 * MIB).unwrap());
    one.open().close().unwrap();
    let copy = copy_store(&*one.store);
    let other = beside(&one, &copy, "other");
    write_and_close(&one, b'a');
    assert_eq!(read(&one), [b'a'; BLOCK], "and it is in the cache now");
    write_and_close(&other, b'b');
    assert_eq!(read(&other), [b'b'; BLOCK], "the copy goes on alone");
    assert_eq!(read(&one), [b'a'; BLOCK]);
}

#[test]
fn a_store_put_back_from_a_backup_does_not_get_the_frames_of_what_was_lost() {
    let mut before = Rig::new();
    before.options.cache = Some(open_cache(&before.folder.path().join("cache"), 16 * MIB).unwrap());
    before.open().close().unwrap();
    let backup = copy_store(&*before.store);
    write_and_close(&before, b'a');
    assert_eq!(read(&before), [b'a'; BLOCK]);
    let mut after = beside(&before, &backup, "journal");
    let (kind, text) = after.refused();
    assert_eq!(kind, ErrorKind::Refused, "{text}");
    after.options.accept_journal_loss = true;
    assert_eq!(read(&after), [0; BLOCK]);
    write_and_close(&after, b'b');
    assert_eq!(read(&after), [b'b'; BLOCK]);
}

#[test]
fn a_journal_of_another_history_is_not_replayed() {
    let a = Machine::with(64 * MIB, FlushMode::Logged);
    a.open().close().unwrap();
    let backup = copy_store(&*a.plain);
    // It flushes and dies; the store is put back; another machine flushes the same place and dies.
    let volume = a.open();
    volume.write_at(0, &[b'a'; BLOCK]).unwrap();
    volume.flush().unwrap();
    volume.close_now();
    drop(volume);
    let b = Machine::over(backup.clone());
    let volume = b.open();
    volume.write_at(0, &[b'b'; BLOCK]).unwrap();
    volume.flush().unwrap();
    volume.close_now();
    drop(volume);
    let mut a_again = Rig::over(backup);
    a_again.options.clone_from(&a.options);
    let (kind, text) = a_again.refused();
    assert_eq!(kind, ErrorKind::Refused, "{text}");
    assert!(text.contains("--accept-journal-loss"), "{text}");
    assert_eq!(read(&b), [b'b'; BLOCK], "the newest writer's flush is there");
}

#[test]
fn a_journal_by_another_name_has_the_same_one_writer() {
    let machine = Machine::new();
    let volume = machine.open();
    let in_use = |path: &Path, what: &str| {
        let mut second = machine.successor();
        second.rig.options.journal_path = path.to_owned();
        second.rig.options.staging_folder.clone_from(&machine.options.staging_folder);
        let (kind, text) = second.refused();
        assert_eq!(kind, ErrorKind::InUse, "{what}: {text}");
    };
    let folder = machine.folder.path();
    let link = folder.join("link");
    std::os::unix::fs::symlink(machine.journal(), &link).unwrap();
    in_use(&link, "a symbolic link");
    let hard = folder.join("hard");
    std::fs::hard_link(machine.journal(), &hard).unwrap();
    in_use(&hard, "a second name");
    let mut lock = machine.journal().into_os_string();
    lock.push(".lock");
    std::fs::remove_file(lock).unwrap();
    in_use(&machine.journal(), "the lock file was removed");
    write_tile(&volume, 0, 1);
    volume.flush().unwrap();
}

#[test]
fn a_journal_that_was_removed_under_its_server_is_noticed() {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    stored(&volume);
    std::fs::rename(machine.journal(), machine.folder.path().join("moved")).unwrap();
    // The superblock says now and then how far it was logged and stored.
    let mut tile = 0;
    until("the volume stops", || {
        tile += 1;
        volume.write_at(tile % 16 * MIB, &[1; 1 << 20]).and_then(|()| volume.flush()).is_err()
    });
    let error = volume.flush().unwrap_err();
    assert!(error.to_string().contains("removed, renamed or replaced"), "{error}");
}

#[test]
fn a_copied_state_folder_leaves_the_memory_of_the_living_alone() {
    let machine = Machine::new();
    let volume = machine.open();
    volume.write_at(0, &[7; 5000]).unwrap();
    let mut copy = Rig::over(machine.plain.clone());
    std::fs::copy(machine.journal(), copy.journal()).unwrap();
    let (kind, text) = copy.refused();
    assert_eq!(kind, ErrorKind::Refused, "{text}");
    assert!(text.contains("in use by another process"), "{text}");
    // Even who accepts all loss takes nothing from it: it hears that it was fenced, as ever.
    copy.options.accept_memory_loss = true;
    copy.options.accept_journal_loss = true;
    copy.open().close().unwrap();
    let memory = std::fs::read_dir(machine.folder.path()).unwrap();
    let names: Vec<_> = memory.map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().any(|name| name.to_string_lossy().ends_with(".staging")), "{names:?}");
    volume.close_now();
}

/// What a machine has seen of a volume outlives its journal.
#[test]
fn a_store_that_became_older_is_refused_also_without_its_journal() {
    let mut machine = Rig::new();
    machine.open().close().unwrap();
    let backup = copy_store(&*machine.store);
    let volume = machine.open();
    volume.write_at(0, &[b'a'; BLOCK]).unwrap();
    volume.close().unwrap();
    let status = volume.status();
    drop(volume);
    let (epoch, stored_sequence) = (status.epoch, status.stored_sequence);
    let seen = NewestState { volume_id: status.volume_id, epoch, stored_sequence, wall_unix_ms: 0 };
    machine.options.seen = Some(seen);
    std::fs::remove_file(machine.journal()).unwrap();
    assert_eq!(read(&machine), [b'a'; BLOCK], "the store it was");
    let mut before = Rig::over(backup);
    before.options.seen = Some(seen);
    let (kind, text) = before.refused();
    assert_eq!(kind, ErrorKind::Refused, "{text}");
    assert!(text.contains("--accept-older-store"), "{text}");
    before.options.accept_older_store = true;
    assert_eq!(read(&before), [0; BLOCK]);
}

#[test]
fn a_store_that_lost_its_last_segments_is_refused_in_the_same_epoch_too() {
    let mut machine = Machine::new();
    let volume = machine.open();
    let start = copy_store(&*machine.plain);
    volume.write_at(0, &[b'a'; BLOCK]).unwrap();
    volume.wait(sawmill_volume::Safety::Stored, None).unwrap();
    let status = volume.status();
    volume.close_now();
    drop(volume);
    machine.rig = Rig::over(start);
    machine.options.accept_journal_loss = true;
    let (epoch, stored_sequence) = (status.epoch, status.stored_sequence);
    let seen = NewestState { volume_id: status.volume_id, epoch, stored_sequence, wall_unix_ms: 0 };
    machine.options.seen = Some(seen);
    let (kind, text) = machine.refused();
    assert_eq!(kind, ErrorKind::Refused, "{text}");
}

#[test]
fn the_refusal_of_a_store_that_lost_segments_says_how_much_at_least() {
    let machine = Machine::new();
    let volume = machine.open();
    let start = copy_store(&*machine.plain);
    for tile in 0..8 {
        volume.write_at(tile * MIB, &pattern(3, tile, 1 << 20)).unwrap();
    }
    stored(&volume);
    until("the journal's superblock says that most of it is stored", || {
        let report = inspect::journal(&machine.journal());
        report.is_ok_and(|report| report.superblock.stored_position > 7 * MIB)
    });
    volume.close_now();
    drop(volume);
    let back = Machine::over(start);
    std::fs::copy(machine.journal(), back.journal()).unwrap();
    let (kind, text) = back.refused();
    assert_eq!(kind, ErrorKind::Corrupt, "{text}");
    let at_least = ["7 MiB", "8 MiB"].map(|size| format!("At least about {size} accepted after"));
    assert!(at_least.iter().any(|says| text.contains(says)), "{text}");
}

#[test]
fn a_state_folder_copied_with_its_memory_is_refused_while_the_original_lives() {
    let machine = Machine::new();
    let volume = machine.open();
    volume.write_at(0, &[7; 5000]).unwrap();
    let copy = Rig::over(machine.plain.clone());
    std::fs::copy(machine.journal(), copy.journal()).unwrap();
    for entry in std::fs::read_dir(machine.folder.path()).unwrap().map(Result::unwrap) {
        if entry.path().extension().is_some_and(|extension| extension == "staging") {
            std::fs::copy(entry.path(), copy.folder.path().join(entry.file_name())).unwrap();
        }
    }
    // What the original flushes from here on is not in the copy.
    volume.write_at(8192, &[8; 5000]).unwrap();
    volume.flush().unwrap();
    let (kind, text) = copy.refused();
    assert_eq!(kind, ErrorKind::Refused, "{text}");
    assert!(text.contains("in use by another process"), "{text}");
    volume.write_at(0, &[9; 5000]).unwrap();
    volume.flush().unwrap();
    volume.close_now();
    drop(volume);
    // Nobody uses the original any more: its own memory is looked for where it was left.
    let original = machine.open();
    assert_eq!(original.read_at(8192, 5000).unwrap(), [8; 5000]);
    original.close().unwrap();
}
