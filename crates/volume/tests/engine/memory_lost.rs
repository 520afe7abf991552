//! Memory that outlives the process, and does not: gone with a container, in another folder, damaged, of
//! others. What was accepted is never dropped without a word.

use std::path::PathBuf;

use crate::rig::Rig;
use sawmill_device::{BlockDeviceExt, ErrorKind};

const SECRET: &[u8] = b"accepted, and nowhere but in memory";

/// A server dies with an accepted write that only memory has.
fn killed() -> (Rig, PathBuf) {
    let rig = Rig::new();
    let volume = rig.open();
    volume.write_at(0, &[1; 4096]).unwrap();
    volume.flush().unwrap();
    volume.write_at(8192, SECRET).unwrap();
    volume.close_now();
    drop(volume);
    let memory = std::fs::read_dir(rig.folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let mut memory = memory.filter(|path| path.extension().is_some_and(|extension| extension == "staging"));
    let path = memory.next().expect("its memory");
    (rig, path)
}

fn has_all(rig: &Rig) {
    let volume = rig.open();
    assert_eq!(volume.read_at(8192, SECRET.len()).unwrap(), SECRET);
    volume.close().unwrap();
}

fn refused_until_accepted(mut rig: Rig, says: &str) {
    let journal = std::fs::read(rig.journal()).unwrap();
    let (kind, text) = rig.refused();
    assert_eq!(kind, ErrorKind::Refused, "{text}");
    assert!(text.contains(says) && text.contains("--accept-memory-loss"), "{says}: {text}");
    assert_eq!(std::fs::read(rig.journal()).unwrap(), journal, "who is refused changes nothing");
    rig.options.accept_journal_loss = true;
    assert_eq!(rig.refused().0, ErrorKind::Refused, "another loss is another flag");
    rig.options.accept_journal_loss = false;
    rig.options.accept_memory_loss = true;
    let volume = rig.open();
    assert_eq!(volume.read_at(0, 4096).unwrap(), [1; 4096], "what was flushed is there");
    volume.close().unwrap();
}

#[test]
fn memory_that_is_there_is_used() {
    has_all(&killed().0);
}

#[test]
fn memory_that_is_gone_in_the_same_boot_is_missed() {
    let (rig, memory) = killed();
    std::fs::remove_file(memory).unwrap();
    refused_until_accepted(rig, "does not exist");
}

#[test]
fn memory_that_is_damaged_is_missed() {
    let (rig, memory) = killed();
    let mut bytes = std::fs::read(&memory).unwrap();
    bytes[66] ^= 1;
    std::fs::write(memory, bytes).unwrap();
    refused_until_accepted(rig, "does not match");
}

#[test]
fn memory_that_is_cut_short_is_missed() {
    let (rig, memory) = killed();
    std::fs::File::options().write(true).open(memory).unwrap().set_len(100).unwrap();
    refused_until_accepted(rig, "cut short");
}

#[test]
fn memory_that_others_may_write_is_missed() {
    use std::os::unix::fs::PermissionsExt;
    let (rig, memory) = killed();
    std::fs::set_permissions(memory, std::fs::Permissions::from_mode(0o666)).unwrap();
    refused_until_accepted(rig, "others may read or write it");
}

#[test]
fn memory_is_found_where_it_was_left() {
    let (mut rig, memory) = killed();
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    rig.options.staging_folder = elsewhere.path().to_owned();
    has_all(&rig);
    assert!(!memory.exists(), "nobody needs it any more");
}

#[test]
fn memory_is_found_where_its_folder_is_mounted_now() {
    let (mut rig, memory) = killed();
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::rename(&memory, elsewhere.path().join(memory.file_name().unwrap())).unwrap();
    rig.options.staging_folder = elsewhere.path().to_owned();
    has_all(&rig);
}

#[test]
fn after_a_clean_end_no_memory_is_missed() {
    let rig = Rig::new();
    let volume = rig.open();
    volume.write_at(0, SECRET).unwrap();
    volume.close().unwrap();
    rig.open().close().unwrap();
}
