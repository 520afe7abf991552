//! Boot sets: recorded for all clones of a base, found by each, and ignored where they are wrong.
//!
//! Not here: the bytes of a set (`sawmill_format::boot_set`), fetching it (`reading::warming`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_format::boot_set::{BYTES_MAX, BootSet, boot_set_key, boot_set_prefix};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_store::{Blocking, Class};
use sawmill_volume::boot_set::{BootSetHolders, bounded};
use sawmill_volume::{
    Fencing, RealWorld, SteppedVolume, Volume, World, check, clone, delete, find, limits,
};

use crate::faulty::{Machine, SEGMENT, keys, stored, write_tile};
use crate::rig::MIB;

const MINUTE: Duration = Duration::from_secs(60);

/// A base with data, closed, and a clone of it that is open.
fn base_and_clone() -> (Machine, Machine, Arc<Volume>) {
    let base = Machine::new();
    let volume = base.open();
    (0..4).for_each(|tile| write_tile(&volume, tile, 1));
    stored(&volume);
    volume.close().unwrap();
    let machine = cloned(&base, "clone1");
    let volume = machine.open();
    (base, machine, volume)
}

fn cloned(base: &Machine, name: &str) -> Machine {
    clone(&*base.plain, "disk", None, name, Fencing::Demanded).unwrap();
    let mut machine = Machine::over(base.plain.clone());
    machine.rig.name = name.into();
    machine
}

fn id_of(machine: &Machine, name: &str) -> VolumeId {
    find(&*machine.plain, name).unwrap().volume_id
}

/// Records a read of the second tile, then of the first.
fn record(volume: &Volume) -> sawmill_volume::Result<BootSet> {
    let recording = volume.begin_recording(MINUTE)?;
    volume.read_at(SEGMENT as u64, 8192).unwrap();
    volume.read_at(0, 4096).unwrap();
    Ok(volume.end_recording(recording)?.expect("something was read").0)
}

fn found(machine: &Machine, name: &str) -> Option<BootSet> {
    let store = &*machine.plain;
    BootSetHolders::of(store, &find(store, name).unwrap()).unwrap().find(store).unwrap()
}

fn put(machine: &Machine, key: &str, body: Vec<u8>) {
    Blocking(&*machine.plain).put(key, Bytes::from(body), Class::Upload).unwrap();
}

fn sets_of(machine: &Machine, volume_id: VolumeId) -> Vec<String> {
    keys(&*machine.plain, &boot_set_prefix(volume_id))
}

#[test]
fn what_is_read_before_its_map_is_loaded_is_in_the_set() {
    let (base, machine, volume) = base_and_clone();
    volume.close().unwrap();
    let mut options = machine.rig.options.clone();
    options.bounds.map_held_from_bytes = 0;
    let world: Arc<dyn World> = Arc::new(RealWorld::default());
    let stepped = SteppedVolume::open(world, base.plain.clone(), "clone1", &options).unwrap();
    // No loop has made a step yet, so nothing of the map is loaded.
    assert_eq!(record(stepped.volume()).unwrap().ranges, [(SEGMENT as u64, 8192), (0, 4096)]);
}

#[test]
fn a_set_recorded_on_a_clone_is_that_of_every_clone_of_its_base() {
    let (base, _machine, volume) = base_and_clone();
    let set = record(&volume).unwrap();
    assert_eq!(set.volume_id, id_of(&base, "disk"), "it is kept with the base");
    assert_eq!(set.ranges, [(SEGMENT as u64, 8192), (0, 4096)]);
    let second = cloned(&base, "clone2");
    assert_eq!(found(&base, "clone2").as_ref(), Some(&set));
    let second = second.open();
    assert_eq!(second.boot_set_holders().find(&*base.plain).unwrap(), Some(set.clone()));
    // The next recording replaces it.
    let next = record(&second).unwrap();
    assert_eq!(next.number, set.number + 1);
    assert_eq!(found(&base, "clone1"), Some(next.clone()));
    assert_eq!(sets_of(&base, set.volume_id), [boot_set_key(set.volume_id, next.number)]);
}

#[test]
fn a_volume_that_is_no_clone_has_its_own_set() {
    let base = Machine::new();
    let volume = base.open();
    write_tile(&volume, 0, 1);
    write_tile(&volume, 1, 1);
    stored(&volume);
    volume.close().unwrap();
    std::fs::remove_file(base.journal()).unwrap();
    let set = record(&base.open()).unwrap();
    assert_eq!(set.volume_id, id_of(&base, "disk"));
    assert_eq!(found(&base, "disk"), Some(set));
}

#[test]
fn nothing_read_or_nobody_recording_is_no_set() {
    let (base, _machine, volume) = base_and_clone();
    assert_eq!(volume.end_recording(1).unwrap(), None);
    let recording = volume.begin_recording(MINUTE).unwrap();
    volume.read_at(32 * MIB, 4096).unwrap();
    assert_eq!(volume.end_recording(recording).unwrap(), None, "a hole is not read from anywhere");
    assert_eq!(found(&base, "clone1"), None);
}

#[test]
fn what_the_journal_still_has_of_stored_data_is_in_the_set() {
    let base = Machine::new();
    let volume = base.open();
    (0..2).for_each(|tile| write_tile(&volume, tile, 1));
    stored(&volume);
    assert_eq!(record(&volume).unwrap().ranges, [(SEGMENT as u64, 8192), (0, 4096)]);
    assert_eq!(volume.status().counters.reads_store, 0, "the journal had it");
}

#[test]
fn one_recording_at_a_time_and_only_who_began_it_ends_it() {
    let (base, _machine, volume) = base_and_clone();
    let first = volume.begin_recording(MINUTE).unwrap();
    volume.read_at(0, 4096).unwrap();
    let error = volume.begin_recording(MINUTE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert_eq!(volume.end_recording(first ^ 1).unwrap(), None);
    assert_eq!(found(&base, "clone1"), None);
    let (set, _) = volume.end_recording(first).unwrap().expect("it went on");
    assert_eq!(set.ranges, [(0, 4096)]);
    assert!(record(&volume).is_ok(), "and then the next one may");
}

#[test]
fn a_number_that_no_writer_reaches_keeps_nobody_from_recording() {
    let (base, _machine, volume) = base_and_clone();
    let set = record(&volume).unwrap();
    put(&base, &boot_set_key(set.volume_id, u64::MAX - 1), vec![0; 100]);
    assert_eq!(record(&volume).unwrap().number, set.number + 1);
}

#[test]
fn a_damaged_foreign_or_overlong_set_is_passed_over() {
    let (base, _machine, volume) = base_and_clone();
    let set = record(&volume).unwrap();
    let id = set.volume_id;
    let mut flipped = set.encode().unwrap();
    flipped[70] ^= 1;
    put(&base, &boot_set_key(id, 7), flipped);
    put(&base, &boot_set_key(id, 8), vec![0; BYTES_MAX + 1]);
    assert_eq!(found(&base, "clone1"), Some(set.clone()), "the newest that can be read counts");
    let foreign = BootSet { volume_id: VolumeId([9; 16]), put_id: PutId([1; 16]), ..set.clone() };
    put(&base, &boot_set_key(id, 9), foreign.encode().unwrap());
    // It reads three and no more.
    assert_eq!(found(&base, "clone1"), None);
    let next = record(&volume).unwrap();
    assert_eq!((next.number, found(&base, "clone1")), (10, Some(next)));
}

#[test]
fn a_check_a_collection_and_a_delete_know_a_set() {
    let (base, _machine, volume) = base_and_clone();
    let id = record(&volume).unwrap().volume_id;
    volume.collect_garbage(1.0).unwrap();
    volume.close().unwrap();
    for name in ["disk", "clone1"] {
        let record = find(&*base.plain, name).unwrap();
        let report = check::check(&*base.plain, &record, &mut |_, _| ()).unwrap();
        assert_eq!((report.damage, report.notes), (vec![], vec![]), "{name}");
    }
    // The base lives on in its clone, and so does its set.
    assert_eq!(delete(&*base.plain, "disk").unwrap().pinned_by, ["clone1"]);
    assert_eq!(sets_of(&base, id).len(), 1);
    assert!(found(&base, "clone1").is_some());
    delete(&*base.plain, "clone1").unwrap();
    assert!(sets_of(&base, id).is_empty(), "it goes with the data of its volume");
}

#[test]
fn a_set_that_comes_after_the_delete_of_its_volume_does_not_stay() {
    let (base, _machine, volume) = base_and_clone();
    let id = id_of(&base, "disk");
    let recording = volume.begin_recording(MINUTE).unwrap();
    volume.read_at(0, 4096).unwrap();
    // The clone is deleted under its server, which does not know it yet.
    delete(&*base.plain, "disk").unwrap();
    delete(&*base.plain, "clone1").unwrap();
    let error = volume.end_recording(recording).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Fenced), "{error}");
    assert!(sets_of(&base, id).is_empty());
}

#[test]
fn a_fenced_server_and_a_reader_record_nothing() {
    let (base, machine, volume) = base_and_clone();
    let recording = volume.begin_recording(MINUTE).unwrap();
    volume.read_at(0, 4096).unwrap();
    let mut next = Machine::over(base.plain.clone());
    next.rig.name = "clone1".into();
    next.rig.options.accept_journal_loss = true;
    let other = next.open();
    write_tile(&volume, 9, 1);
    crate::faulty::until("it learns of the fence", || {
        volume.wait(sawmill_volume::Safety::Stored, None).is_err()
    });
    assert_eq!(volume.end_recording(recording).unwrap_err().kind(), ErrorKind::Fenced);
    assert_eq!(volume.begin_recording(MINUTE).unwrap_err().kind(), ErrorKind::Fenced);
    other.close().unwrap();
    drop(machine);
    let mut reader = Machine::over(base.plain.clone());
    reader.rig.name = "clone1".into();
    reader.rig.options.read_only = true;
    assert_eq!(reader.open().begin_recording(MINUTE).unwrap_err().kind(), ErrorKind::Refused);
    assert_eq!(found(&base, "clone1"), None);
}

#[test]
fn what_a_server_fetches_by_itself_is_bounded_whatever_a_set_says() {
    let set = BootSet {
        volume_id: VolumeId([1; 16]),
        put_id: PutId([1; 16]),
        number: 1,
        wall_unix_ms: 0,
        ranges: vec![(0, 4096), (1 << 40, u64::MAX >> 1), (8192, 4096)],
    };
    assert_eq!(bounded(&set, 8192), [(0, 4096), (1 << 40, 4096)]);
    let ranges = bounded(&set, u64::MAX);
    assert_eq!(ranges.iter().map(|range| range.1).sum::<u64>(), limits::BOOT_SET_BYTES_MAX);
    assert_eq!(ranges.len(), 2);
}
