//! Volumes that older versions have left are opened as they are: `vectors/volumes`, one archive for
//! each set of format versions since 2026-11-23, made by [`make_the_archive_of_this_version`] (the
//! two oldest by the same steps on the code of their days: volume records by themselves, checkpoint
//! 1 to 3). The test needs `tar`, and 64 MiB of memory for each archive.
//!
//! In each archive: a store in a folder, and the journal of a server that died with a power cut.
//! The disk has a snapshot, overwritten and discarded blocks, a checkpoint, segments after it, and
//! writes that were flushed to the journal and are not stored.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use sawmill_device::BlockDeviceExt;
use sawmill_format::journal::SUPERBLOCK_BYTES;
use sawmill_format::preamble::{Kind, Preamble};
use sawmill_store::{ObjectStore, StoreOptions};
use sawmill_volume::{CreateOptions, Cut, OpenOptions, RealWorld, Safety, Volume, check};

use crate::rig::MIB;

const BLOCK_DISTANCE: u64 = 64 * 1024;
const BLOCK: usize = 4096;
const SIZE: u64 = 64 * MIB;
/// The archive that this version makes: of the day on which a format last changed.
const NEWEST: &str = "2026-11-29";
/// Kinds whose newest version the newest archive does not have, and why.
const NOT_ARCHIVED: [(Kind, &str); 10] = [
    (Kind::VolumeRecord, "since names have records of their own, it is a part of those"),
    (Kind::JournalSuperblock, "version 3 exists only while a part of the ring is rewritten"),
    (Kind::Staging, "memory does not survive its machine"),
    (Kind::CacheIndex, "a cache is no part of a volume"),
    (Kind::Pin, "the archive has no clone and no deleted volume"),
    (Kind::Role, "the archive has no replica"),
    (Kind::BootSet, "a hint, which no volume needs"),
    (Kind::TransferProgress, "an import or export is no part of a volume"),
    (Kind::ExportState, "the state of a link is no part of a volume"),
    (Kind::NewestState, "what a machine has seen is no part of a volume"),
];

fn archives() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("vectors/volumes")
}

/// What block `number` holds in version `version`: text, so that archives are small.
fn block(number: u64, version: u64) -> Vec<u8> {
    format!("version {version} of block {number}\n")
        .into_bytes()
        .into_iter()
        .cycle()
        .take(BLOCK)
        .collect()
}

fn write(volume: &Volume, numbers: std::ops::Range<u64>, version: u64) {
    for number in numbers {
        volume.write_at(number * BLOCK_DISTANCE, &block(number, version)).unwrap();
    }
}

/// The version of each block, 0 for zeroes.
fn versions(volume: &Volume, numbers: std::ops::Range<u64>) -> Vec<u64> {
    let block = |number: u64| volume.read_at(number * BLOCK_DISTANCE, BLOCK).unwrap();
    numbers.map(|number| version_of(number, &block(number))).collect()
}

fn version_of(number: u64, bytes: &[u8]) -> u64 {
    if bytes.iter().all(|byte| *byte == 0) {
        return 0;
    }
    (1..10).find(|version| bytes == block(number, *version)).expect("a version of this block")
}

/// The same of what is stored, by a reader in another language that follows the pages alone.
fn versions_by_the_pages(folder: &Path, store: &dyn ObjectStore) -> Vec<u64> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/format/read_volume.py");
    let record = sawmill_volume::find(store, "disk").unwrap();
    let image = folder.join("image");
    let mut reader = Command::new("python3");
    reader.arg("-B").arg(script).arg(folder.join("store"));
    let output = reader.arg(record.volume_id.to_string()).arg(&image).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let bytes = fs::read(image).unwrap();
    let block = |number: u64| &bytes[(number * BLOCK_DISTANCE) as usize..][..BLOCK];
    (0..8).map(|number| version_of(number, block(number))).collect()
}

fn store_in(folder: &Path) -> Arc<dyn ObjectStore> {
    let url = format!("file://{}", folder.join("store").display());
    sawmill_store::open(&url, StoreOptions::default()).unwrap()
}

fn options_in(folder: &Path) -> OpenOptions {
    let mut options = OpenOptions::new(folder.join("journal"));
    options.staging_folder = folder.to_owned();
    options.journal_bytes = 16 * MIB;
    options.staging_bytes = 4 * MIB;
    options.segment_age_max = Duration::ZERO;
    // The machine that made it has lost its power since.
    options.accept_memory_loss = true;
    options
}

fn tar(arguments: &[&str]) {
    let output = Command::new("tar").args(arguments).output().unwrap();
    assert!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_volume_of_every_format_version_opens_as_it_was_left() {
    let archives: Vec<_> =
        fs::read_dir(archives()).unwrap().flatten().map(|entry| entry.path()).collect();
    let archives: Vec<_> =
        archives.iter().filter(|path| path.extension().is_some_and(|e| e == "gz")).collect();
    let has_newest = archives.iter().any(|path| path.display().to_string().contains(NEWEST));
    assert!(has_newest, "no archive of {NEWEST}: see `make_the_archive_of_this_version`");
    for archive in archives {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        tar(&["xzf", archive.to_str().unwrap(), "-C", folder.path().to_str().unwrap()]);
        let store = store_in(folder.path());
        assert_eq!(
            versions_by_the_pages(folder.path(), &*store),
            [2, 2, 3, 3, 1, 0, 0, 0],
            "{archive:?}: what is stored"
        );
        let cut = Cut::Snapshot("one".into());
        let read_only =
            OpenOptions { read_only: true, cut: Some(cut), ..options_in(folder.path()) };
        let one = Volume::open(store.clone(), "disk", read_only).unwrap();
        assert_eq!(versions(&one, 0..8), [1, 1, 1, 1, 1, 1, 0, 0], "{archive:?}: the snapshot");
        one.close().unwrap();
        let volume = Volume::open(store.clone(), "disk", options_in(folder.path())).unwrap();
        assert_eq!(versions(&volume, 0..8), [2, 2, 3, 3, 1, 0, 4, 4], "{archive:?}: the present");
        write(&volume, 0..8, 5);
        volume.close().unwrap();
        let volume = Volume::open(store.clone(), "disk", options_in(folder.path())).unwrap();
        assert_eq!(versions(&volume, 0..8), [5; 8], "{archive:?}: what is written now");
        volume.close().unwrap();
        let record = sawmill_volume::find(&*store, "disk").unwrap();
        let checked = check::check(&*store, &record, &mut |_, _| ()).unwrap();
        assert!(checked.damage.is_empty(), "{archive:?}: {:?}", checked.damage);
    }
}

/// Notes the version of the structure at the start of `bytes`, if there is one.
fn note_version(newest: &mut BTreeMap<u16, u16>, bytes: &[u8]) {
    if let Ok(Preamble { kind, version, .. }) = Preamble::decode(bytes) {
        let known = newest.entry(kind).or_default();
        *known = version.max(*known);
    }
}

fn note_versions_below(newest: &mut BTreeMap<u16, u16>, folder: &Path) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            note_versions_below(newest, &entry.path());
        } else {
            note_version(newest, &fs::read(entry.path()).unwrap());
        }
    }
}

#[test]
fn the_newest_archive_has_the_newest_version_of_each_kind_but_those_named() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let archive = archives().join(format!("{NEWEST}.tar.gz"));
    tar(&["xzf", archive.to_str().unwrap(), "-C", folder.path().to_str().unwrap()]);
    let mut newest = BTreeMap::new();
    note_versions_below(&mut newest, &folder.path().join("store"));
    let journal = fs::read(folder.path().join("journal")).unwrap();
    for copy in journal.chunks(SUPERBLOCK_BYTES).take(2) {
        note_version(&mut newest, copy);
    }
    let is_archived = |kind: Kind| newest.get(&(kind as u16)) == Some(&kind.version_max());
    let not_archived: Vec<Kind> =
        Kind::ALL.into_iter().filter(|kind| !is_archived(*kind)).collect();
    let named: Vec<Kind> = NOT_ARCHIVED.into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(not_archived, named, "a format has changed: see `make_the_archive_of_this_version`");
}

/// `cargo test -p sawmill-volume --test engine make_the_archive -- --ignored`, after a format has
/// changed and [`NEWEST`] with it.
#[test]
#[ignore = "makes a file of the repository"]
fn make_the_archive_of_this_version() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let store = store_in(folder.path());
    let created = CreateOptions { segment_bytes: 256 << 10, ..CreateOptions::new(SIZE) };
    sawmill_volume::create_in(&RealWorld::default(), &*store, "disk", &created).unwrap();
    let mut options = options_in(folder.path());
    // A delta is for a part with many extents.
    options.bounds.map_delta_from_bytes = 0;
    let volume = Volume::open(store, "disk", options).unwrap();
    write(&volume, 0..6, 1);
    write(&volume, 8..60, 1);
    volume.wait(Safety::Stored, None).unwrap();
    assert!(volume.checkpoint(Duration::from_secs(60)));
    volume.create_snapshot("one").unwrap();
    write(&volume, 0..4, 2);
    volume.discard(5 * 64 * 1024, 64 * 1024).unwrap();
    volume.wait(Safety::Stored, None).unwrap();
    assert!(volume.checkpoint(Duration::from_secs(60)));
    write(&volume, 2..4, 3);
    volume.create_snapshot("two").unwrap();
    write(&volume, 6..8, 4);
    volume.flush().unwrap();
    assert_eq!(versions(&volume, 0..8), [2, 2, 3, 3, 1, 0, 4, 4]);
    fs::create_dir_all(archives()).unwrap();
    let archive = archives().join(format!("{NEWEST}.tar.gz"));
    // While it runs: what is on its disks now is what a power cut would leave.
    let left = folder.path().join("left");
    fs::create_dir(&left).unwrap();
    fs::copy(folder.path().join("journal"), left.join("journal")).unwrap();
    fs::rename(folder.path().join("store"), left.join("store")).unwrap();
    let from = left.to_str().unwrap();
    tar(&["czSf", archive.to_str().unwrap(), "-C", from, "store", "journal"]);
    fs::rename(left.join("store"), folder.path().join("store")).unwrap();
    volume.close().unwrap();
}
