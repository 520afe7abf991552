//! A name means what was last said of it, whatever comes late, dies half way or races; and nobody's
//! data is removed that a name still leads to.

use std::sync::Arc;

use crate::faulty::{Machine, SEGMENT, segment_get, stored, tile_version, until, write_tile};
use bytes::Bytes;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{Pin, PinnedStatus, status_pin_key, tombstone_key};
use sawmill_format::name_record::NAME_PREFIX;
use sawmill_format::volume_record::{VolumeRecord, volume_key};
use sawmill_store::{
    Blocking, Call, CallKind, Class, Completion, Fault, Get, List, ObjectInfo, ObjectStore, Put,
    PutOutcome, StoreErrorKind,
};
use sawmill_volume::{
    CreateOptions, ErrorKind, Fencing, RealWorld, Result, clone, clone_in, create, create_in,
    delete, find, list, name_unnamed, rename, unnamed,
};

const SMALL: u64 = 1 << 20;

fn small() -> CreateOptions {
    CreateOptions { segment_bytes: SEGMENT as u32, ..CreateOptions::new(SMALL) }
}

/// A volume with a version of its own in tile 0.
fn machine_with(version: u64) -> Machine {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, version);
    stored(&volume);
    volume.close().unwrap();
    machine
}

fn machine_for(machine: &Machine, name: &str) -> Machine {
    let mut machine = Machine::over(machine.plain.clone());
    machine.rig.name = name.into();
    // A delete that came to nothing may have fenced it, and all was stored.
    machine.rig.options.accept_journal_loss = true;
    machine
}

fn names(store: &dyn ObjectStore) -> Vec<String> {
    list(store).unwrap().into_iter().map(|listed| listed.name).collect()
}

/// Opens and closes the volume of a name, and demands what it holds.
fn holds(machine: &Machine, name: &str, version: u64, what: &str) {
    let machine = machine_for(machine, name);
    let volume = machine.try_open().unwrap_or_else(|error| panic!("{what}: {name}: {error}"));
    assert_eq!(tile_version(&volume, 0, 9), version, "{what}: {name}");
    volume.close().unwrap();
    machine.assert_sound(what);
}

/// Calls at which a step may die or wait: all but the many questions for segments.
fn is_met(call: &Call) -> bool {
    segment_get(call).is_none()
}

/// Every name of `id`, each looked up by itself.
fn names_of(store: &dyn ObjectStore, id: VolumeId, candidates: &[&str]) -> Vec<String> {
    let is_it = |name: &&&str| find(store, name).is_ok_and(|record| record.volume_id == id);
    candidates.iter().filter(is_it).map(|name| (*name).to_owned()).collect()
}

#[test]
fn a_delete_that_comes_late_takes_no_name_that_was_given_again() {
    let machine = machine_with(1);
    machine.fault(Fault::Late, |call| {
        call.kind == CallKind::Delete && !call.key().starts_with("probe/")
    });
    // Whatever these hear, somebody tries until it is so.
    let _ = rename(&*machine.faults, "disk", "other");
    let _ = rename(&*machine.faults, "other", "disk");
    create(&*machine.faults, "second", &small()).unwrap();
    let _ = delete(&*machine.faults, "second");
    if find(&*machine.faults, "second").is_err() {
        create(&*machine.faults, "second", &small()).unwrap();
    }
    let second = find(&*machine.plain, "second").unwrap().volume_id;
    machine.heal();
    machine.faults.release_all();
    assert_eq!(names(&*machine.plain), ["disk", "second"]);
    assert_eq!(find(&*machine.plain, "second").unwrap().volume_id, second);
    holds(&machine, "disk", 1, "after the late delete");
    holds(&machine, "second", 0, "after the late delete");
}

type Step = fn(&dyn ObjectStore) -> Result<()>;

const STEPS: [(&str, Step); 5] = [
    ("create", |store| create_in(&RealWorld::default(), store, "new", &small()).map(drop)),
    ("rename", |store| rename(store, "disk", "new").map(drop)),
    ("rename back", |store| {
        rename(store, "disk", "other")?;
        rename(store, "other", "disk").map(drop)
    }),
    ("delete", |store| delete(store, "disk").map(drop)),
    ("clone", |store| clone_in(&RealWorld::default(), store, "disk", None, "new").map(drop)),
];

/// Every case on a thread of its own: they mostly wait.
fn for_each<T: Sync>(cases: &[T], case: impl Fn(&T) + Sync) {
    std::thread::scope(|scope| {
        for one in cases {
            scope.spawn(|| case(one));
        }
    });
}

#[test]
fn a_step_that_dies_at_any_call_leaves_each_volume_one_name_that_nothing_late_takes() {
    let faults = [Fault::Fail(StoreErrorKind::Unavailable), Fault::LoseAnswer, Fault::Late];
    let cases: Vec<_> =
        STEPS.iter().flat_map(|step| faults.iter().map(move |fault| (step, fault))).collect();
    for_each(&cases, |((step_name, step), fault)| {
        for dies_at in 0.. {
            let machine = machine_with(1);
            let id = machine.volume_id();
            let what = format!("{step_name}: {fault:?} from call {dies_at} on");
            let mut call_count = 0;
            machine.fault((*fault).clone(), move |call| {
                call_count += u32::from(is_met(call));
                call_count > dies_at
            });
            let outcome = step(&*machine.faults);
            machine.heal();
            check_one_name(&machine, id, step_name, outcome.is_ok(), &what);
            if outcome.is_ok() {
                assert!(dies_at > 2, "{what}");
                break;
            }
        }
    });
}

/// Whoever attaches the volume makes its name firm: what was still on its way changes nothing any
/// more.
fn check_one_name(machine: &Machine, id: VolumeId, step: &str, is_done: bool, what: &str) {
    let candidates = ["disk", "new", "other"];
    let before = names_of(&*machine.plain, id, &candidates);
    assert_eq!(names_of(&*machine.plain, id, &candidates), before);
    let listed = names(&*machine.plain);
    assert!(before.iter().all(|name| listed.contains(name)), "{what}: {listed:?}");
    match step {
        "delete" => {
            assert!(before == ["disk"] && !is_done || before.is_empty(), "{what}: {before:?}");
            if before.is_empty() && !is_done {
                // The same again removes what is left, or finds nothing left.
                let again = delete(&*machine.plain, "disk").map(drop);
                assert!(
                    again.is_ok() || again.unwrap_err().kind() == ErrorKind::NotFound,
                    "{what}"
                );
            }
        }
        _ => assert_eq!(before.len(), 1, "{what}: {before:?}"),
    }
    for name in &listed {
        let version = if step == "create" && name == "new" { 0 } else { 1 };
        holds(machine, name, version, what);
    }
    machine.faults.release_all();
    for name in &listed {
        let version = if step == "create" && name == "new" { 0 } else { 1 };
        holds(machine, name, version, &format!("{what}, after what came late"));
    }
    assert_eq!(names_of(&*machine.plain, id, &candidates), before, "{what}");
}

#[test]
fn of_two_that_race_each_volume_keeps_one_name_or_is_gone_whole() {
    let rivals: [(&str, Step); 5] = [
        ("rename to new", |store| rename(store, "disk", "new").map(drop)),
        ("rename to other", |store| rename(store, "disk", "other").map(drop)),
        ("delete", |store| delete(store, "disk").map(drop)),
        ("create", |store| create_in(&RealWorld::default(), store, "new", &small()).map(drop)),
        ("clone", |store| clone_in(&RealWorld::default(), store, "disk", None, "new").map(drop)),
    ];
    let pairs: Vec<_> =
        rivals.iter().flat_map(|one| rivals.iter().map(move |other| (one, other))).collect();
    for_each(&pairs, |((first_name, first), (second_name, second))| {
        for waits_at in 0.. {
            let machine = machine_with(1);
            let id = machine.volume_id();
            let what = format!("{second_name} while {first_name} waits at call {waits_at}");
            let mut call_count = 0;
            machine.fault(Fault::Delay, move |call| {
                call_count += u32::from(is_met(call));
                call_count == waits_at + 1 && is_met(call)
            });
            let (store, first) = (machine.faults.clone(), *first);
            let asks = std::thread::spawn(move || first(&*store));
            until("it waits", || asks.is_finished() || !machine.faults.held().is_empty());
            let was_held = !machine.faults.held().is_empty();
            let rival = second(&*machine.plain);
            machine.faults.release_all();
            machine.heal();
            let outcome = asks.join().unwrap();
            assert!(outcome.is_ok() || rival.is_ok(), "{what}: {outcome:?}, {rival:?}");
            let left = names_of(&*machine.plain, id, &["disk", "new", "other"]);
            let deletes = *first_name == "delete" && outcome.is_ok();
            let deletes = deletes || *second_name == "delete" && rival.is_ok();
            assert_eq!(left.len(), usize::from(!deletes), "{what}: {left:?}");
            for name in names(&*machine.plain) {
                let is_new = find(&*machine.plain, &name).unwrap().size_bytes == SMALL;
                holds(&machine, &name, u64::from(!is_new), &what);
            }
            if !was_held {
                break;
            }
        }
    });
}

#[test]
fn a_writer_that_attaches_while_a_delete_waits_keeps_its_volume_or_fails() {
    for waits_at in 0.. {
        let machine = machine_with(1);
        let what = format!("a delete that waits at call {waits_at}");
        let mut call_count = 0;
        machine.fault(Fault::Delay, move |call| {
            call_count += u32::from(is_met(call));
            call_count == waits_at + 1 && is_met(call)
        });
        let store = machine.faults.clone();
        let asks = std::thread::spawn(move || delete(&*store, "disk"));
        until("it waits", || asks.is_finished() || !machine.faults.held().is_empty());
        let was_held = !machine.faults.held().is_empty();
        let writer = machine.successor();
        let volume = writer.try_open();
        machine.faults.release_all();
        machine.heal();
        let deleted = asks.join().unwrap();
        let is_there = find(&*machine.plain, "disk").is_ok();
        assert_eq!(is_there, deleted.is_err(), "{what}");
        match volume {
            Ok(volume) if is_there => {
                write_tile(&volume, 0, 2);
                // The delete may have put its fence before it heard that the volume is in use.
                match volume.close() {
                    Ok(()) => holds(&machine, "disk", 2, &what),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Fenced, "{what}: {error}");
                        holds(&machine, "disk", 1, &what);
                    }
                }
            }
            Ok(volume) => {
                write_tile(&volume, 0, 2);
                let error = volume.close().expect_err("it is deleted");
                assert_eq!(error.kind(), ErrorKind::Fenced, "{what}: {error}");
            }
            // Told so, or shut out while it attached.
            Err(error) => {
                let expected = [ErrorKind::NotFound, ErrorKind::Fenced, ErrorKind::Unavailable];
                assert!(expected.contains(&error.kind()), "{what}: {error}");
            }
        }
        if !was_held {
            break;
        }
    }
}

/// A list that shows nothing put since it was made.
struct StaleListStore {
    inner: Arc<dyn ObjectStore>,
    visible_keys: Vec<String>,
}

impl ObjectStore for StaleListStore {
    fn get(&self, get: Get, done: Completion<Bytes>) {
        self.inner.get(get, done);
    }

    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        self.inner.put(put, done);
    }

    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        let mut listed = Blocking(&*self.inner).list(&list.prefix, Class::Read).unwrap();
        if list.prefix.starts_with(NAME_PREFIX) {
            listed.retain(|object| self.visible_keys.contains(&object.key));
        }
        done(Ok(listed));
    }

    fn delete(&self, keys: Vec<String>, class: Class, done: Completion<()>) {
        self.inner.delete(keys, class, done);
    }
}

#[test]
fn what_a_list_hides_is_found_by_name_and_taken_by_no_command() {
    let machine = machine_with(1);
    let id = machine.volume_id();
    for visible_keys in [Vec::new(), machine.keys(NAME_PREFIX)] {
        let store = StaleListStore { inner: machine.plain.clone(), visible_keys };
        for _ in 0..3 {
            rename(&store, "disk", "other").unwrap();
            assert_eq!(
                names(&store).iter().find(|name| *name == "disk"),
                None,
                "the list shows an old record"
            );
            let error = create(&store, "other", &small()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Exists);
            assert_eq!(find(&store, "disk").unwrap_err().kind(), ErrorKind::NotFound);
            create(&store, "disk", &small()).unwrap();
            assert_eq!(rename(&store, "other", "disk").unwrap_err().kind(), ErrorKind::Exists);
            delete(&store, "disk").unwrap();
            rename(&store, "other", "disk").unwrap();
            assert_eq!(find(&store, "disk").unwrap().volume_id, id);
        }
    }
    holds(&machine, "disk", 1, "in the end");
    assert_eq!(names(&*machine.plain), ["disk"]);
}

/// Leaves a volume as a version of before would have.
fn as_before(store: &dyn ObjectStore, name: &str) -> VolumeRecord {
    let record =
        VolumeRecord { name: name.into(), put_id: PutId([7; 16]), ..find(store, name).unwrap() };
    let ask = Blocking(store);
    let named = ask.list(NAME_PREFIX, Class::Read).unwrap();
    let keys = named.into_iter().map(|object| object.key).collect();
    ask.delete(keys, Class::Upload).unwrap();
    ask.put(&volume_key(name), record.encode().unwrap().into(), Class::Upload).unwrap();
    record
}

#[test]
fn volumes_of_an_older_version_are_found_renamed_deleted_and_their_names_used_again() {
    let machine = machine_with(1);
    let id = machine.volume_id();
    as_before(&*machine.plain, "disk");
    assert_eq!(machine.volume_id(), id);
    assert_eq!(names(&*machine.plain), ["disk"]);
    holds(&machine, "disk", 1, "as it was");
    let error = create(&*machine.plain, "disk", &small()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists);
    rename(&*machine.plain, "disk", "other").unwrap();
    assert_eq!(names(&*machine.plain), ["other"]);
    rename(&*machine.plain, "other", "disk").unwrap();
    as_before(&*machine.plain, "disk");
    delete(&*machine.plain, "disk").unwrap();
    assert_eq!(names(&*machine.plain), Vec::<String>::new());
    assert_eq!(delete(&*machine.plain, "disk").unwrap_err().kind(), ErrorKind::NotFound);
    create(&*machine.plain, "disk", &small()).unwrap();
    assert_ne!(machine.volume_id(), id);
}

/// What somebody else says of a volume, in its status pin of that number.
fn status_pin(volume_id: VolumeId, pin_number: u64, number: u64) -> Pin {
    let put_id = PutId([9; 16]);
    Pin {
        volume_id,
        put_id,
        pin_number,
        clone_id: volume_id,
        number,
        through_sequence: 0,
        name: "disk".into(),
    }
}

#[test]
fn a_base_whose_delete_died_outlives_its_clones_under_any_name() {
    // As a version of before left it: the pin that it is deleted, without a number, and then a new
    // name.
    let machine = machine_with(1);
    let record = as_before(&*machine.plain, "disk");
    let id = record.volume_id;
    clone(&*machine.plain, "disk", None, "copy", Fencing::Demanded).unwrap();
    let tombstone = status_pin(id, 0, 0);
    Blocking(&*machine.plain)
        .put(&tombstone_key(id), tombstone.encode().unwrap().into(), Class::Upload)
        .unwrap();
    rename(&*machine.plain, "disk", "base").unwrap();
    // Whatever the list shows: here, no name at all.
    let store = StaleListStore { inner: machine.plain.clone(), visible_keys: Vec::new() };
    delete(&store, "copy").unwrap();
    holds(&machine, "base", 1, "after its clone is gone");
}

#[test]
fn what_a_deleted_base_holds_goes_with_its_last_clone_after_any_death() {
    for dies_at in 0.. {
        let machine = machine_with(1);
        let id = machine.volume_id();
        clone(&*machine.plain, "disk", None, "copy", Fencing::Demanded).unwrap();
        delete(&*machine.plain, "disk").unwrap();
        holds(&machine, "copy", 1, "its base is deleted");
        let mut call_count = 0;
        machine.fault(Fault::Fail(StoreErrorKind::Unavailable), move |_| {
            call_count += 1;
            call_count > dies_at
        });
        let outcome = delete(&*machine.faults, "copy");
        machine.heal();
        if outcome.is_err() {
            let again = delete(&*machine.plain, "copy").map(drop);
            assert!(again.is_ok() || again.unwrap_err().kind() == ErrorKind::NotFound);
        }
        let remaining_keys = machine.keys(&format!("{id}/"));
        let is_small = |key: &String| key.contains("/word/") || key.contains("/seg/");
        assert!(remaining_keys.iter().all(is_small), "death at call {dies_at}: {remaining_keys:?}");
        assert!(
            remaining_keys.iter().filter(|key| key.contains("/seg/")).count() <= 1,
            "{remaining_keys:?}"
        );
        if outcome.is_ok() {
            break;
        }
    }
}

#[test]
fn a_deleted_base_that_is_called_back_while_its_last_clone_goes_keeps_its_data() {
    let machine = machine_with(1);
    let id = machine.volume_id();
    clone(&*machine.plain, "disk", None, "copy", Fencing::Demanded).unwrap();
    delete(&*machine.plain, "disk").unwrap();
    let previous_keys = machine.keys(&format!("{id}/"));
    // The deletion has read that the volume is deleted, and is about to say that it removes the
    // objects.
    let removed_key = status_pin_key(id, 2);
    machine
        .fault(Fault::Delay, move |call| call.kind == CallKind::Put && call.keys[0] == removed_key);
    let store = machine.faults.clone();
    let delete_thread = std::thread::spawn(move || delete(&*store, "copy"));
    until("it waits", || delete_thread.is_finished() || !machine.faults.held().is_empty());
    let lives = status_pin(id, 2, PinnedStatus::Lives as u64);
    Blocking(&*machine.plain)
        .put(&status_pin_key(id, 2), lives.encode().unwrap().into(), Class::Upload)
        .unwrap();
    machine.faults.release_all();
    machine.heal();
    delete_thread.join().unwrap().unwrap();
    let remaining_keys = machine.keys(&format!("{id}/"));
    assert!(
        previous_keys.iter().all(|key| remaining_keys.contains(key)),
        "{remaining_keys:?} of {previous_keys:?}"
    );
}

#[test]
fn a_volume_that_lost_its_name_is_found_by_its_id_and_named_again() {
    let machine = machine_with(7);
    let store = &*machine.plain;
    let id = machine.volume_id();
    assert_eq!(unnamed(store).unwrap().len(), 0);
    let named = name_unnamed(store, id, "other", None).unwrap_err();
    assert!(
        named.kind() == ErrorKind::Refused && named.to_string().contains("rename disk other"),
        "{named}"
    );
    for key in machine.keys("names/") {
        machine.remove(&key);
    }
    let lost = unnamed(store).unwrap();
    assert_eq!((lost.len(), lost[0].volume_id, lost[0].is_deleted), (1, id, false));
    assert!(lost[0].size_bytes.as_ref().is_ok_and(|bytes| *bytes > 0));
    let blocks = name_unnamed(store, id, "again", None).unwrap_err();
    assert!(blocks.to_string().contains("--block-size"), "{blocks}");
    name_unnamed(store, id, "again", Some(4096)).unwrap();
    let mut reader = machine_for(&machine, "again");
    reader.rig.options.read_only = true;
    assert_eq!(tile_version(&reader.open(), 0, 9), 7);
    assert_eq!(unnamed(store).unwrap().len(), 0);
}

#[test]
fn what_a_name_once_said_of_a_lost_volume_is_used() {
    let machine = machine_with(7);
    let record = rename(&*machine.plain, "disk", "other").unwrap();
    create(&*machine.plain, "disk", &small()).unwrap();
    for key in machine.keys("names/other/") {
        machine.remove(&key);
    }
    let lost = unnamed(&*machine.plain).unwrap();
    assert_eq!(lost.iter().map(|lost| lost.volume_id).collect::<Vec<_>>(), [record.volume_id]);
    let again = name_unnamed(&*machine.plain, record.volume_id, "third", None).unwrap();
    let shape =
        |record: &VolumeRecord| (record.block_bytes, record.segment_bytes, record.flush_mode);
    assert_eq!(shape(&again), shape(&record));
    holds(&machine, "third", 7, "named by what was said before");
}

#[test]
fn what_was_deleted_is_shown_by_its_id_and_not_named_again() {
    let machine = machine_with(1);
    let base = machine.volume_id();
    clone(&*machine.plain, "disk", None, "copy", Fencing::Demanded).unwrap();
    delete(&*machine.plain, "disk").unwrap();
    let left = unnamed(&*machine.plain).unwrap();
    assert_eq!(
        left.iter().map(|left| (left.volume_id, left.is_deleted)).collect::<Vec<_>>(),
        [(base, true)]
    );
    let refused = name_unnamed(&*machine.plain, base, "again", None).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
    delete(&*machine.plain, "copy").unwrap();
    assert_eq!(unnamed(&*machine.plain).unwrap().len(), 0);
}
