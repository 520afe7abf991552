//! A check looks at everything that is kept: whatever of it is damaged or gone is found, and what
//! cannot be served because of it is named.

use crate::faulty::{Machine, copy_store, keys, root_put, stored, tile_version, until, write_tile};
use crate::rig::MIB;
use sawmill_format::checkpoint::{checkpoint_key, parse_checkpoint_key};
use sawmill_store::{Blocking, Call, CallKind, Class, Fault, FaultStore, ObjectStore};
use sawmill_volume::check::{CheckReport, Damage, check};
use sawmill_volume::{Cut, Fencing, OpenOptions, Volume, clone, find};

fn report(store: &dyn ObjectStore, name: &str) -> CheckReport {
    check(store, &find(store, name).unwrap(), &mut |_, _| ()).unwrap()
}

fn costs(damage: &[Damage], cost: &str) -> bool {
    damage.iter().any(|one| one.costs.iter().any(|known| known.contains(cost)))
}

/// Overwrites tiles until so many more checkpoints are durable.
fn checkpoints(volume: &Volume, version: u64, count: u64) {
    let target_count = volume.status().counters.checkpoints + count;
    until("checkpoints", || {
        for tile in 0..4 {
            write_tile(volume, tile, version);
        }
        stored(volume);
        volume.status().counters.checkpoints >= target_count
    });
}

fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.options.checkpoint_bytes = MIB;
    machine
}

/// A volume that went on after its snapshot "one", so that only the snapshot needs what is from
/// then.
fn with_a_snapshot() -> Machine {
    let machine = machine();
    let volume = machine.open();
    for tile in 0..4 {
        write_tile(&volume, tile, 1);
    }
    volume.create_snapshot("one").unwrap();
    checkpoints(&volume, 2, 5);
    volume.close().unwrap();
    machine.assert_sound("a volume and a snapshot");
    machine
}

/// Snapshots, a retention window, a clone and two checkpoints.
fn with_everything() -> Machine {
    let machine = with_a_snapshot();
    clone(&*machine.plain, "disk", Some(&Cut::Snapshot("one".into())), "copy", Fencing::Demanded)
        .unwrap();
    let volume = machine.open();
    volume.set_retention(1 << 20).unwrap();
    checkpoints(&volume, 3, 2);
    volume.create_snapshot("two").unwrap();
    checkpoints(&volume, 4, 2);
    volume.close().unwrap();
    machine.assert_sound("a volume with everything");
    machine
}

/// Whether all that is kept can be had: both snapshots, the present, the clone.
fn is_all_served(machine: &Machine, store: &std::sync::Arc<dyn ObjectStore>) -> bool {
    let read = |name: &str, cut: Option<&str>, version: u64| {
        let cut = cut.map(|name| Cut::Snapshot(name.into()));
        let options = OpenOptions { read_only: true, cut, ..machine.options.clone() };
        Volume::open(store.clone(), name, options).is_ok_and(|volume| {
            let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                (0..4).all(|tile| tile_version(&volume, tile, 9) == version)
            }));
            served.unwrap_or(false)
        })
    };
    read("disk", Some("one"), 1)
        && read("disk", Some("two"), 3)
        && read("disk", None, 4)
        && read("copy", None, 1)
}

#[test]
fn a_check_finds_that_the_checkpoint_of_a_snapshot_is_gone() {
    let machine = with_a_snapshot();
    let kept = machine.keys("/kept/");
    assert_eq!(kept.len(), 1, "{kept:?}");
    machine.remove(&kept[0]);
    let damage = report(&*machine.plain, "disk").damage;
    assert!(damage.len() == 1 && damage[0].object == kept[0], "{damage:?}");
    assert!(costs(&damage, "snapshot \"one\"") && !costs(&damage, "the volume"), "{damage:?}");
}

#[test]
fn a_check_finds_that_a_segment_of_a_snapshot_is_gone() {
    let machine = with_a_snapshot();
    let key = machine.segment_key(65);
    machine.remove(&key);
    let damage = report(&*machine.plain, "disk").damage;
    assert!(damage.len() == 1 && damage[0].object == key, "{damage:?}");
    assert!(costs(&damage, "snapshot \"one\"") && !costs(&damage, "the volume"), "{damage:?}");
}

#[test]
fn a_check_finds_damage_in_what_only_the_table_of_a_snapshots_checkpoint_names() {
    let machine = machine();
    let volume = machine.open();
    write_tile(&volume, 5, 1);
    checkpoints(&volume, 1, 3);
    volume.create_snapshot("one").unwrap();
    write_tile(&volume, 5, 2);
    checkpoints(&volume, 2, 5);
    volume.close().unwrap();
    machine.assert_sound("a volume and a snapshot");
    let key = machine.segment_key(65);
    machine.tamper(&key, |bytes| bytes[40_000] ^= 1);
    let damage = report(&*machine.plain, "disk").damage;
    assert!(damage.len() == 1 && damage[0].object == key, "{damage:?}");
    assert_eq!(damage[0].costs, ["snapshot \"one\""]);
}

#[test]
fn a_check_finds_that_one_of_two_checkpoints_is_gone() {
    for which in [0, 1] {
        let machine = with_a_snapshot();
        let roots = machine.keys("/checkpoint/");
        assert_eq!(roots.len(), 2, "{roots:?}");
        machine.tamper(&roots[which], |bytes| bytes[70] ^= 1);
        let damage = report(&*machine.plain, "disk").damage;
        assert!(damage.len() == 1 && damage[0].object == roots[which], "{which}: {damage:?}");
    }
    let machine = with_a_snapshot();
    let roots = machine.keys("/checkpoint/");
    machine.remove(&roots[0]);
    let damage = report(&*machine.plain, "disk").damage;
    assert!(damage.len() == 1 && damage[0].object == roots[0], "{damage:?}");
}

#[test]
fn what_was_overwritten_since_the_only_checkpoint_left_is_no_damage() {
    let machine = with_a_snapshot();
    let volume = machine.open();
    checkpoints(&volume, 3, 1);
    // No further checkpoint comes.
    let _healing = machine.healing();
    machine.fault(Fault::Delay, |call| root_put(call).is_some());
    for tile in 0..4 {
        write_tile(&volume, tile, 4);
    }
    stored(&volume);
    let mut roots = machine.keys("/checkpoint/");
    roots.pop();
    roots.iter().for_each(|root| machine.remove(root));
    let damage = report(&*machine.plain, "disk").damage;
    assert!(damage.len() == 1 && Some(&damage[0].object) == roots.last(), "{damage:?}");
}

#[test]
fn a_check_finds_each_object_with_a_wrong_bit_that_anything_kept_needs() {
    let machine = with_everything();
    let (mut needed, mut unneeded) = (0, Vec::new());
    for key in machine.keys("/").iter().filter(|key| !key.starts_with("names/")) {
        let store = copy_store(&*machine.plain);
        let mut bytes = machine.object(key).to_vec();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        Blocking(&*store).delete(vec![key.clone()], Class::Upload).unwrap();
        Blocking(&*store).put(key, bytes.into(), Class::Upload).unwrap();
        let damage: Vec<Damage> =
            ["disk", "copy"].iter().flat_map(|name| report(&*store, name).damage).collect();
        if damage.is_empty() {
            unneeded.push(key.clone());
            assert!(
                is_all_served(&machine, &store),
                "{key} is needed, and a check does not find it"
            );
        } else {
            assert!(damage.iter().all(|one| one.object == *key), "{key}: {damage:?}");
            needed += 1;
        }
    }
    // What nobody reads any more: fences of before, and what waits to be deleted.
    assert!(
        unneeded.iter().all(|key| key.contains("/seg/") || key.contains("/map/")),
        "{unneeded:?}"
    );
    assert!(
        needed > 20 && unneeded.len() <= 8,
        "{needed} of {} needed; {unneeded:?}",
        needed + unneeded.len()
    );
}

#[test]
fn a_check_of_the_base_finds_what_only_its_clone_needs() {
    let machine = with_a_snapshot();
    clone(&*machine.plain, "disk", Some(&Cut::Snapshot("one".into())), "copy", Fencing::Demanded)
        .unwrap();
    let volume = machine.open();
    volume.delete_snapshot("one").unwrap();
    checkpoints(&volume, 3, 4);
    volume.close().unwrap();
    machine.assert_sound("a base without its snapshot");
    let key = machine.segment_key(65);
    machine.tamper(&key, |bytes| bytes[40_000] ^= 1);
    for name in ["disk", "copy"] {
        let damage = report(&*machine.plain, name).damage;
        assert!(damage.len() == 1 && damage[0].object == key, "{name}: {damage:?}");
    }
    assert!(costs(&report(&*machine.plain, "disk").damage, "clone \"copy\""));
}

#[test]
fn a_check_of_a_clone_finds_that_its_hold_on_the_base_is_gone() {
    let machine = with_a_snapshot();
    clone(&*machine.plain, "disk", Some(&Cut::Snapshot("one".into())), "copy", Fencing::Demanded)
        .unwrap();
    assert!(report(&*machine.plain, "copy").damage.is_empty());
    let pins: Vec<_> = keys(&*machine.plain, "/pin");
    assert_eq!(pins.len(), 1, "{pins:?}");
    machine.remove(&pins[0]);
    let damage = report(&*machine.plain, "copy").damage;
    assert!(damage.len() == 1 && damage[0].object == pins[0], "{damage:?}");
}

#[test]
fn a_check_notes_segments_stranded_in_the_window_of_a_fence_and_reports_no_damage() {
    let machine = with_a_snapshot();
    let stranded = machine.segment_key(3);
    // Sequence 1 is the first fence; what a writer before it left is of another's making.
    let left = machine.object(&machine.keys("/seg/").pop().unwrap());
    Blocking(&*machine.plain).put(&stranded, left, Class::Upload).unwrap();
    let report = report(&*machine.plain, "disk");
    assert_eq!((report.damage, report.stranded), (vec![], 1));
    assert!(report.notes.iter().any(|note| note.contains(&stranded)), "{:?}", report.notes);
}

#[test]
fn a_check_of_a_volume_that_goes_on_finds_no_damage() {
    let machine = machine();
    let volume = machine.open();
    volume.create_snapshot("one").unwrap();
    let ends = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(std::sync::atomic::Ordering::Acquire) {
                checkpoints(&volume, 1, 1);
            }
        });
        let found: Vec<_> = (0..6).flat_map(|_| report(&*machine.plain, "disk").damage).collect();
        ends.store(true, std::sync::atomic::Ordering::Release);
        assert_eq!(found, vec![]);
    });
}

#[test]
fn a_check_overtaken_by_many_checkpoints_at_once_finds_no_damage() {
    let machine = machine();
    let volume = machine.open();
    checkpoints(&volume, 1, 4);
    // While the check looks for the checkpoint before the newest, the writer leaves these two and
    // the next behind.
    std::thread::scope(|scope| {
        let (request_sender, request_receiver) = std::sync::mpsc::channel::<u64>();
        let (done, wait) = std::sync::mpsc::channel();
        let (machine, volume) = (&machine, &volume);
        scope.spawn(move || {
            for number in request_receiver {
                let next = checkpoint_key(machine.volume_id(), number + 1);
                until("the next one to be gone", || {
                    checkpoints(volume, number, 1);
                    keys(&*machine.plain, "/checkpoint/").iter().all(|key| *key > next)
                });
                done.send(()).unwrap();
            }
        });
        // One beyond the newest is asked for as well.
        let (mut beyond, mut overtaken) = (0, 0);
        let script = move |call: &Call| {
            let Some((_, number)) = parse_checkpoint_key(call.key()) else { return Fault::None };
            if call.kind == CallKind::Get && number + 2 == beyond && overtaken < 3 {
                overtaken += 1;
                request_sender.send(number + 1).unwrap();
                wait.recv().unwrap();
            }
            beyond = beyond.max(number);
            Fault::None
        };
        let seen = FaultStore::new(machine.plain.clone(), Box::new(script));
        assert_eq!(report(&*seen, "disk").damage, vec![]);
    });
}

#[test]
fn an_old_checkpoint_is_not_deleted_by_each_cleanup_again() {
    let machine = machine();
    let volume = machine.open();
    checkpoints(&volume, 1, 12);
    until("the last cleanup", || keys(&*machine.plain, "/checkpoint/").len() <= 2);
    let newest = keys(&*machine.plain, "/checkpoint/");
    let key = |number| checkpoint_key(machine.volume_id(), number);
    for key in (1..).map(key).take_while(|key| !newest.contains(key)) {
        let deletes =
            machine.count(|call| call.kind == CallKind::Delete && call.keys.contains(&key));
        // Twice where one cleanup begins before the one before it has ended.
        assert!((1..=2).contains(&deletes), "{key}: {deletes}");
    }
}
