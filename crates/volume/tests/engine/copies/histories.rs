//! More than one history: what is there under a name is the right thing, or is found out; nothing
//! of one history is taken for another's.

use std::sync::Arc;

use sawmill_device::ErrorKind;
use sawmill_store::{
    Blocking, CallKind, Class, Completion, Fault, Get, List, ObjectInfo, ObjectStore, Put,
    PutOutcome, StoreErrorKind,
};
use sawmill_volume::RealWorld;
use sawmill_volume::replicate::{
    self, Copier, CopyOptions, ReplicaLag, VolumeAt, behind, drill, promote, promote_as_it_is,
};

use super::world::{Pair, copy, copy_with, damage, machine_at, open_to_read, options, watching};
use crate::faulty::{copy_store, keys, memory, stored, tile_version, until, write_tile};

fn promoted(store: &Arc<dyn ObjectStore>) -> sawmill_volume::Result<u64> {
    promote(&RealWorld::default(), &**store, "disk").map(|promotion| promotion.position)
}

fn back() -> CopyOptions {
    CopyOptions { fail_back: true, ..options() }
}

/// Attaches at another store, writes one version to all tiles, and closes.
fn write_there(store: &Arc<dyn ObjectStore>, version: u64) {
    let volume = machine_at(store).open();
    for tile in 0..4 {
        write_tile(&volume, tile, version);
    }
    stored(&volume);
    volume.close().unwrap();
}

fn version_in(store: &Arc<dyn ObjectStore>) -> u64 {
    tile_version(&open_to_read(store.clone()).unwrap(), 0, 255)
}

fn remove(store: &Arc<dyn ObjectStore>, keys: Vec<String>) {
    Blocking(&**store).delete(keys, Class::Upload).unwrap();
}

/// A pair whose second store was promoted and has gone on; the first had written on for a while.
fn parted() -> Pair {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 9);
    pair.copy().unwrap();
    pair.write(&volume, 3);
    volume.close().unwrap();
    promoted(&pair.second).unwrap();
    write_there(&pair.second, 200);
    pair
}

#[test]
fn a_deleted_fail_back_leaves_nothing_in_the_way_of_another() {
    let pair = parted();
    let (old, new) = (pair.primary.plain.clone(), pair.second.clone());
    copy_with(&*new, &*old, &back(), &mut |_| ()).unwrap();
    sawmill_volume::delete(&*old, "disk").unwrap();
    write_there(&new, 210);
    copy(&*new, &*old).unwrap();
    assert_eq!(version_in(&old), 210);
    promoted(&old).unwrap();
    write_there(&old, 220);
    assert_eq!(version_in(&old), 220);
}

#[test]
fn a_deleted_fail_back_still_fences_the_former_writer() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 9);
    pair.copy().unwrap();
    promoted(&pair.second).unwrap();
    let (old, new) = (pair.primary.plain.clone(), pair.second.clone());
    copy_with(&*new, &*old, &back(), &mut |_| ()).unwrap();
    sawmill_volume::delete(&*old, "disk").unwrap();
    write_tile(&volume, 1, 99);
    assert!(volume.wait(sawmill_volume::Safety::Stored, None).is_err(), "its writer wakes up");
}

#[test]
fn an_unfinished_promotion_can_be_deleted_and_copied_again() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 9);
    pair.copy().unwrap();
    let faulty = watching(&pair.second);
    faulty.script(Box::new(|call| {
        match call.kind == CallKind::Put && call.key().contains("/checkpoint/") {
            true => Fault::Fail(StoreErrorKind::Unavailable),
            false => Fault::None,
        }
    }));
    let store: Arc<dyn ObjectStore> = faulty;
    promoted(&store).unwrap_err();
    sawmill_volume::delete(&*pair.second, "disk").unwrap();
    pair.write(&volume, 3);
    pair.copy().unwrap();
    assert_eq!(pair.cut_in(&pair.second), 12);
    volume.close().unwrap();
}

#[test]
fn a_source_that_went_another_way_is_not_mixed_with_its_replica() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 3);
    volume.close().unwrap();
    // A backup of the store; then both go on, with the same names.
    let backup = copy_store(&*pair.primary.plain);
    let volume = pair.primary.open();
    pair.write(&volume, 1);
    pair.copy().unwrap();
    // First behind the checkpoint that both have, then with one of its own.
    let rig = machine_at(&backup);
    let other = rig.open();
    write_tile(&other, 0, 230);
    stored(&other);
    let error = copy(&*backup, &*pair.second).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Corrupt && error.to_string().contains("other bytes"),
        "{error}"
    );
    other.close().unwrap();
    volume.close().unwrap();
    pair.copy().unwrap();
    let before = keys(&*pair.second, "");
    let error = copy(&*backup, &*pair.second).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Corrupt && error.to_string().contains("other bytes"),
        "{error}"
    );
    assert_eq!(keys(&*pair.second, ""), before);
    assert_eq!(pair.cut_in(&pair.second), 4);
}

#[test]
fn a_copier_of_another_history_ends_the_one_before() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 9);
    pair.copy().unwrap();
    let (third, world) = (memory(), RealWorld::default());
    let named = |text: &str| CopyOptions { source_text: text.into(), ..options() };
    let (source, second) = (pair.primary.plain.clone(), pair.second.clone());
    let one = named("one");
    let mut first = Copier::begin(
        &world,
        VolumeAt::new(&*source, "disk"),
        VolumeAt::new(&*third, "disk"),
        &one,
    )
    .unwrap();
    first.round(&mut |_| ()).unwrap();
    promoted(&second).unwrap();
    write_there(&second, 200);
    let two = named("two");
    let mut other = Copier::begin(
        &world,
        VolumeAt::new(&*second, "disk"),
        VolumeAt::new(&*third, "disk"),
        &two,
    )
    .unwrap();
    // The old primary lives, and its copier too: it ends before the other has put anything.
    pair.write(&volume, 12);
    assert_eq!(first.round(&mut |_| ()).unwrap_err().kind(), ErrorKind::Fenced);
    other.round(&mut |_| ()).unwrap();
    assert_eq!(version_in(&third), 200);
    let record = sawmill_volume::find(&*third, "disk").unwrap();
    assert_eq!(
        sawmill_volume::check::check(&*third, &record, &mut |_, _| ()).unwrap().damage,
        vec![]
    );
    volume.close().unwrap();
}

#[test]
fn what_the_old_primary_deletes_before_the_last_look_is_put_back() {
    let pair = parted();
    let (old, new) = (pair.primary.plain.clone(), pair.second.clone());
    let shared: Vec<String> =
        keys(&*old, "/seg/").into_iter().filter(|key| keys(&*new, "/seg/").contains(key)).collect();
    assert!(!shared.is_empty());
    let mut late = Some(shared);
    copy_with(&*new, &*old, &back(), &mut |_| remove(&old, late.take().unwrap_or_default()))
        .unwrap();
    promoted(&old).unwrap();
    assert_eq!(version_in(&old), 200);
    let record = sawmill_volume::find(&*old, "disk").unwrap();
    assert_eq!(
        sawmill_volume::check::check(&*old, &record, &mut |_, _| ()).unwrap().damage,
        vec![]
    );
}

#[test]
fn a_replica_that_lacks_something_is_promoted_only_as_it_is() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 5);
    volume.close().unwrap();
    pair.copy().unwrap();
    let first_live = keys(&*pair.second, "/seg/").into_iter().nth(2).unwrap();
    remove(&pair.second, vec![first_live.clone()]);
    let error = promoted(&pair.second).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Corrupt && error.to_string().contains(&first_live),
        "{error}"
    );
    // Whoever copies puts it back.
    pair.copy().unwrap();
    promoted(&pair.second).unwrap();
}

#[test]
fn a_fail_back_half_way_is_not_promoted() {
    let pair = parted();
    let (old, new) = (pair.primary.plain.clone(), pair.second.clone());
    let faulty = watching(&old);
    faulty.script(Box::new(|call| {
        match call.kind == CallKind::Put && call.key().contains("/checkpoint/") {
            true => Fault::Fail(StoreErrorKind::Unavailable),
            false => Fault::None,
        }
    }));
    copy_with(&*new, &*faulty, &back(), &mut |_| ()).unwrap_err();
    let error = promoted(&old).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Refused && error.to_string().contains("--fail-back"),
        "{error}"
    );
    let error = drill(&RealWorld::default(), &*old, "disk", &mut |_, _| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    copy_with(&*new, &*old, &back(), &mut |_| ()).unwrap();
    promoted(&old).unwrap();
    assert_eq!(version_in(&old), 200);
}

#[test]
fn a_drill_knows_what_would_be_lost() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 5);
    pair.copy().unwrap();
    let world = RealWorld::default();
    let lost = |source: &Arc<dyn ObjectStore>| {
        let found = drill(&world, &*pair.second, "disk", &mut |_, _| ()).unwrap();
        behind(&world, &**source, "disk", &found).unwrap()
    };
    let source = pair.primary.plain.clone();
    assert_eq!(lost(&source), ReplicaLag::Nothing);
    volume.create_snapshot("five").unwrap();
    assert_eq!(lost(&source), ReplicaLag::By { bytes: 0, ms: 0 });
    pair.copy().unwrap();
    assert_eq!(lost(&source), ReplicaLag::Nothing);
    write_tile(&volume, 0, 9);
    stored(&volume);
    assert!(matches!(lost(&source), ReplicaLag::By { bytes, .. } if bytes > 0));
    // Another volume has its name and address now.
    let other = memory();
    sawmill_volume::create(&*other, "disk", &sawmill_volume::CreateOptions::new(64 << 20)).unwrap();
    assert_eq!(lost(&other), ReplicaLag::Elsewhere);
    // Or the same one goes on with another history.
    let third = memory();
    copy(&*source, &*third).unwrap();
    promoted(&third).unwrap();
    assert_eq!(lost(&third), ReplicaLag::Elsewhere);
    volume.close().unwrap();
}

/// Whether a drill finds damage, or that nothing can be read at all.
fn is_damage_found(store: &Arc<dyn ObjectStore>) -> bool {
    match drill(&RealWorld::default(), &**store, "disk", &mut |_, _| ()) {
        Ok(found) => !found.check.damage.is_empty(),
        Err(error) => error.kind() == ErrorKind::Corrupt,
    }
}

#[test]
fn a_damaged_replica_is_no_older_one() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    // A part that the newest checkpoint names, and the one before does not, is gone.
    let mut own = None;
    until("a checkpoint with a part of its own", || {
        pair.write(&volume, 6);
        pair.copy().unwrap();
        let record = sawmill_volume::find(&*pair.second, "disk").unwrap();
        let newest =
            sawmill_volume::inspect::checkpoint(&*pair.second, &record, None).unwrap().number;
        let mut parts = keys(&*pair.second, "/map/").into_iter();
        own = parts.find(|key| newest > 2 && key.contains(&format!("/{newest:020}-")));
        own.is_some()
    });
    let parts = copy_store(&*pair.second);
    remove(&parts, own.into_iter().collect());
    assert_eq!(open_to_read(parts.clone()).err().unwrap().kind(), ErrorKind::Corrupt);
    assert_eq!(promoted(&parts).unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(is_damage_found(&parts));
    copy(&*pair.primary.plain, &*parts).unwrap();
    assert_eq!(pair.cut_in(&parts), pair.writes.len(), "a copier puts it back");
    volume.close().unwrap();
    pair.copy().unwrap();
    let world = RealWorld::default();
    // The newest checkpoint itself rots.
    let newest = keys(&*pair.second, "/checkpoint/").pop().unwrap();
    damage(&pair.second, &newest);
    assert!(is_damage_found(&pair.second));
    let error = promoted(&pair.second).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Corrupt && error.to_string().contains("--as-it-is"),
        "{error}"
    );
    promote_as_it_is(&world, &*pair.second, "disk").unwrap();
    pair.cut_in(&pair.second);
}

#[test]
fn two_that_finish_one_promotion_make_one_history() {
    let mut pair = Pair::new();
    let volume = pair.primary.open();
    pair.write(&volume, 5);
    volume.close().unwrap();
    pair.copy().unwrap();
    // The other has put the first of the two checkpoints, and dies.
    let (slow, other) = (watching(&pair.second), watching(&pair.second));
    let mut roots = 0;
    other.script(Box::new(move |call| {
        roots += u64::from(call.kind == CallKind::Put && call.key().contains("/checkpoint/"));
        if roots > 1 { Fault::Fail(StoreErrorKind::Unavailable) } else { Fault::None }
    }));
    let other: Arc<dyn ObjectStore> = other;
    let mut is_first = true;
    slow.script(Box::new(move |call| {
        if is_first && call.kind == CallKind::Put && call.key().contains("/checkpoint/") {
            is_first = false;
            promoted(&other).unwrap_err();
        }
        Fault::None
    }));
    let slow: Arc<dyn ObjectStore> = slow;
    promoted(&slow).unwrap();
    let record = sawmill_volume::find(&*pair.second, "disk").unwrap();
    let newest = sawmill_volume::inspect::checkpoint(&*pair.second, &record, None).unwrap();
    let before =
        sawmill_volume::inspect::checkpoint(&*pair.second, &record, Some(newest.number - 1))
            .unwrap();
    assert_eq!((before.put_id, before.parts), (newest.put_id, newest.parts));
    assert_eq!(pair.cut_in(&pair.second), 5);
}

/// A store that knows no conditions: a put replaces what is there.
struct OverwriteStore(Arc<dyn ObjectStore>);

impl ObjectStore for OverwriteStore {
    fn get(&self, get: Get, done: Completion<bytes::Bytes>) {
        self.0.get(get, done);
    }

    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        remove(&self.0, vec![put.key.clone()]);
        self.0.put(put, done);
    }

    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        self.0.list(list, done);
    }

    fn delete(&self, keys: Vec<String>, class: Class, done: Completion<()>) {
        self.0.delete(keys, class, done);
    }
}

#[test]
fn a_store_where_two_promotions_would_win_is_refused() {
    let error = replicate::require_fencing(&OverwriteStore(memory())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    replicate::require_fencing(&*memory()).unwrap();
}
