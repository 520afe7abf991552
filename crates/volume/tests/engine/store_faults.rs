//! A store that is slow, away, lying by omission or plainly wrong: nothing is lost, nothing wrong
//! is ever read, and what could not be asked is never taken for an answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::faulty::{
    Machine, SEGMENT, WAIT_TIME_MAX, holds, is_engine, root_put, segment_get, segment_put, stored,
    tile_bytes, tile_version, until, write_tile,
};
use crate::rig::{MIB, Model};
use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_store::{
    Blocking, Call, CallKind, Class, Completion, Fault, Get, List, ObjectInfo, ObjectStore, Put,
    PutOutcome, StoreError, StoreErrorKind,
};
use sawmill_volume::{FlushMode, Health, Safety, open_cache};

fn unavailable() -> Fault {
    Fault::Fail(StoreErrorKind::Unavailable)
}

/// A volume with `tiles` tiles of version 1 in the store, closed cleanly.
fn filled(tiles: u64) -> Machine {
    let machine = Machine::new();
    let volume = machine.open();
    for tile in 0..tiles {
        write_tile(&volume, tile, 1);
    }
    volume.close().unwrap();
    machine
}

#[test]
fn puts_that_time_out_happen_late_or_twice_change_nothing() {
    for fault in [Fault::LoseAnswer, Fault::Late, unavailable()] {
        let mut machine = Machine::new();
        machine.options.checkpoint_bytes = 2 * MIB;
        let volume = machine.open();
        let mut model = Model::new(8 * MIB, 3);
        let mut seen = std::collections::HashSet::new();
        // The first put of each object meets the fault; a late one lands after the second.
        machine.fault(fault.clone(), move |call| {
            call.kind == CallKind::Put && is_engine(call) && seen.insert(call.key().to_owned())
        });
        for _ in 0..200 {
            model.act(&volume);
        }
        stored(&volume);
        machine.faults.release_all();
        model.compare_all(&volume);
        volume.close().unwrap();
        machine.faults.release_all();
        machine.heal();
        model.compare_all(&machine.open());
        machine.assert_sound(&format!("{fault:?}"));
    }
}

#[test]
fn a_get_that_fails_for_a_while_delays_the_reader_and_no_more() {
    for kind in [StoreErrorKind::Unavailable, StoreErrorKind::Denied, StoreErrorKind::Broken] {
        let machine = filled(1);
        let volume = machine.open();
        let mut failures = 0;
        machine.fault(Fault::Fail(kind), move |call| {
            failures += 1;
            segment_get(call).is_some() && failures <= 2
        });
        assert_eq!(tile_version(&volume, 0, 9), 1);
        assert_eq!(volume.status().health, Health::Serving);
    }
}

#[test]
fn a_get_cut_short_once_is_asked_again() {
    let machine = filled(1);
    let volume = machine.open();
    let mut first = true;
    machine.fault(Fault::Truncate, move |call| {
        segment_get(call).is_some() && std::mem::take(&mut first)
    });
    assert_eq!(tile_version(&volume, 0, 9), 1);
}

#[test]
fn a_get_always_cut_short_is_corrupt_and_never_wrong_bytes() {
    let machine = filled(1);
    let volume = machine.open();
    machine.fault(Fault::Truncate, |call| segment_get(call).is_some());
    assert_eq!(volume.read_at(SEGMENT as u64 / 2, 4096).unwrap_err().kind(), ErrorKind::Corrupt);
    machine.heal();
    assert_eq!(tile_version(&volume, 0, 9), 1, "the next read asks again");
}

#[test]
fn another_objects_bytes_are_fetched_again_once_and_then_refused() {
    for cached in [false, true] {
        let mut machine = filled(2);
        if cached {
            machine.options.cache =
                Some(open_cache(&machine.folder.path().join("cache"), 4 * MIB).unwrap());
        }
        let volume = machine.open();
        // Segments 65 and 66 have the same shape: any frame of one fits in place of the other's.
        let other = machine.segment_key(66);
        let swapped = Arc::new(AtomicU64::new(0));
        let count = swapped.clone();
        let mut once = true;
        machine.fault(Fault::Swap(other.clone()), move |call| {
            segment_get(call) == Some(65) && std::mem::take(&mut once)
        });
        holds(&volume, 0, &tile_bytes(0, 1)[..4096]);
        machine.fault(Fault::Swap(other), move |call| {
            let hit = segment_get(call) == Some(65);
            count.fetch_add(u64::from(hit), Ordering::Relaxed);
            hit
        });
        // A frame that nobody has fetched yet.
        let address = SEGMENT as u64 - 4096;
        let error = volume.read_at(address, 4096).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("/seg/"), "{error}");
        assert_eq!(swapped.load(Ordering::Relaxed), 2, "asked once more, not more often");
        machine.heal();
        holds(&volume, address, &tile_bytes(0, 1)[SEGMENT - 4096..]);
        assert_eq!(tile_version(&volume, 1, 9), 1);
    }
}

#[test]
fn a_missing_segment_is_corrupt_for_the_writer_and_the_rest_stays_readable() {
    let machine = filled(2);
    let volume = machine.open();
    machine.fault(Fault::Fail(StoreErrorKind::NotFound), |call| segment_get(call) == Some(65));
    assert_eq!(volume.read_at(0, 4096).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(tile_version(&volume, 1, 9), 1);
}

/// What is garbled on the way once is not damage of the store: each answer of an open in turn.
#[test]
fn an_answer_cut_short_once_does_not_stop_an_open() {
    for number in 0_u64.. {
        let machine = filled(2);
        let gets = Arc::new(AtomicU64::new(0));
        let count = gets.clone();
        machine.fault(Fault::Truncate, move |call| {
            call.kind == CallKind::Get
                && is_engine(call)
                && count.fetch_add(1, Ordering::Relaxed) == number
        });
        let volume = machine.open();
        if gets.load(Ordering::Relaxed) <= number {
            assert!(number > 2, "an open asks for record, checkpoint and map at the least");
            return;
        }
        machine.heal();
        assert_eq!(
            (tile_version(&volume, 0, 9), tile_version(&volume, 1, 9)),
            (1, 1),
            "get {number}"
        );
    }
}

/// Opens while calls that `chosen` picks cannot be asked: the open must fail so, change nothing,
/// and succeed later.
fn open_cannot_ask(template: &Machine, chosen: impl Fn(&Call) -> bool + Send + 'static) {
    let machine = template.twin();
    let (objects, journal) = (machine.keys(""), std::fs::read(machine.journal()).ok());
    let met = Arc::new(AtomicU64::new(0));
    let count = met.clone();
    machine.fault(unavailable(), move |call| {
        let hit = chosen(call);
        count.fetch_add(u64::from(hit), Ordering::Relaxed);
        hit
    });
    assert_eq!(machine.refused().0, ErrorKind::Unavailable);
    assert!(met.load(Ordering::Relaxed) > 0, "the fault was never met");
    assert_eq!(machine.keys(""), objects);
    assert_eq!(std::fs::read(machine.journal()).ok(), journal);
    machine.heal();
    let volume = machine.open();
    assert!((0..5).all(|tile| tile_version(&volume, tile, 9) == 1));
}

#[test]
fn what_cannot_be_asked_fails_the_open_and_changes_nothing() {
    let template = Machine::new();
    let volume = template.open();
    for tile in 0..5 {
        write_tile(&volume, tile, 1);
    }
    stored(&volume);
    volume.close_now();
    // The log of the store: fence 1, segments 65 to 69, the first free name, and what may lie
    // beyond it.
    for sequence in [1, 65, 67, 69, 70, 75, 134] {
        open_cannot_ask(&template, move |call| segment_get(call) == Some(sequence));
    }
    let is = |part: &'static str, kind| {
        move |call: &Call| call.kind == kind && call.key().contains(part)
    };
    open_cannot_ask(&template, is("/checkpoint", CallKind::List));
    open_cannot_ask(&template, is("/checkpoint/", CallKind::Get));
    open_cannot_ask(&template, is("names/", CallKind::Get));
    template.open().close().unwrap();
    open_cannot_ask(&template, is("/map/", CallKind::Get));
}

#[test]
fn every_single_call_of_an_open_may_fail() {
    let template = Machine::new();
    let volume = template.open();
    for tile in 0..3 {
        write_tile(&volume, tile, 1);
    }
    stored(&volume);
    volume.write_at(0, &tile_bytes(0, 2)).unwrap();
    volume.flush().unwrap();
    volume.close_now();
    let calls = {
        let twin = template.twin();
        twin.open().close_now();
        twin.faults.calls()
    };
    let mut failed = 0;
    for call in calls {
        // Names far beyond the log are asked for side by side: one in sixteen stands for all.
        if segment_get(&call).is_some_and(|sequence| sequence > 70 && sequence % 16 != 0) {
            continue;
        }
        let lost = (call.kind == CallKind::Put).then_some(Fault::LoseAnswer);
        for fault in lost.into_iter().chain([unavailable()]) {
            let twin = template.twin();
            let at = call.number;
            twin.fault(fault, move |call| call.number == at);
            match twin.try_open() {
                // A call whose failure hurts nobody.
                Ok(volume) => volume.close_now(),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unavailable, "{call:?}: {error}");
                    failed += 1;
                }
            }
            twin.heal();
            let volume = twin.open();
            assert_eq!([0, 1, 2].map(|tile| tile_version(&volume, tile, 9)), [2, 1, 1], "{call:?}");
            volume.close().unwrap();
            twin.assert_sound("after an open that failed");
        }
    }
    assert!(failed > 10, "{failed} opens failed");
}

#[test]
fn a_segment_that_appears_while_the_log_is_read_is_no_damage() {
    let machine = filled(0);
    let volume = machine.open();
    for tile in 0..4 {
        write_tile(&volume, tile, 1);
        stored(&volume);
    }
    let first = volume.status().stored_sequence - 3;
    let mut reader = Machine::over(machine.plain.clone());
    reader.options.read_only = true;
    // The reader asks for each of them too early, once, and then sees a later one that knows of it.
    let mut early = std::collections::HashSet::new();
    reader.fault(Fault::Fail(StoreErrorKind::NotFound), move |call| {
        segment_get(call).is_some_and(|sequence| {
            sequence >= first && sequence < first + 3 && early.insert(sequence)
        })
    });
    let read = reader.open();
    assert_eq!([0, 1, 2, 3].map(|tile| tile_version(&read, tile, 9)), [1; 4]);
}

#[test]
fn a_list_that_hides_the_newest_checkpoints_is_seen_through() {
    let machine = Machine::new();
    for version in 1..=5 {
        let volume = machine.open();
        write_tile(&volume, 0, version);
        volume.close().unwrap();
        // The list is of a time before the newest root.
        let newest = machine.keys("/checkpoint/").pop().unwrap();
        let root = machine.object(&newest);
        machine.remove(&newest);
        let past = lagging(&machine);
        Blocking(&*machine.plain).put(&newest, root, Class::Upload).unwrap();
        let mut reader = Machine::over(past);
        reader.options.read_only = true;
        let read = reader.open();
        assert_eq!(tile_version(&read, 0, 9), version);
        assert!(newest.ends_with(&format!("/{:020}", read.status().checkpoint_number)));
    }
}

/// A store that answers gets from the present and lists from the past.
struct LaggingStore {
    present: Arc<dyn ObjectStore>,
    past: Arc<dyn ObjectStore>,
}

impl ObjectStore for LaggingStore {
    fn get(&self, get: Get, done: Completion<bytes::Bytes>) {
        self.present.get(get, done);
    }
    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        self.present.put(put, done);
    }
    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        self.past.list(list, done);
    }
    fn delete(&self, keys: Vec<String>, class: Class, done: Completion<()>) {
        self.present.delete(keys, class, done);
    }
}

/// The store of `machine` from now on, with the lists of now.
fn lagging(machine: &Machine) -> Arc<dyn ObjectStore> {
    Arc::new(LaggingStore {
        present: machine.plain.clone(),
        past: crate::faulty::copy_store(&*machine.plain),
    })
}

/// A store that deletes all but one of the objects that it should, and then says that it failed.
struct UndeletingStore {
    inner: Arc<dyn ObjectStore>,
    kept: String,
}

impl ObjectStore for UndeletingStore {
    fn get(&self, get: Get, done: Completion<bytes::Bytes>) {
        self.inner.get(get, done);
    }
    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        self.inner.put(put, done);
    }
    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        self.inner.list(list, done);
    }
    fn delete(&self, mut keys: Vec<String>, class: Class, done: Completion<()>) {
        let before = keys.len();
        keys.retain(|key| *key != self.kept);
        let failed = keys.len() < before;
        let callback = move |outcome: sawmill_store::Result<()>| {
            let error =
                || StoreError::new(StoreErrorKind::Unavailable, "one object was not deleted");
            done(if failed { Err(error()) } else { outcome });
        };
        self.inner.delete(keys, class, Box::new(callback));
    }
}

#[test]
fn a_list_from_long_ago_is_refused_and_never_taken_for_the_truth() {
    let mut machine = Machine::new();
    machine.options.checkpoint_bytes = MIB;
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    volume.close().unwrap();
    let past = lagging(&machine);
    let volume = machine.open();
    for version in 2..120 {
        write_tile(&volume, 0, version);
        stored(&volume);
    }
    volume.close().unwrap();
    let mut lagging = Machine::over(past);
    lagging.options.accept_journal_loss = true;
    let objects = machine.keys("");
    let (kind, text) = lagging.refused();
    assert_eq!(kind, ErrorKind::Corrupt);
    assert!(text.contains("listing"), "{text}");
    assert_eq!(machine.keys(""), objects);
}

#[test]
fn a_root_that_could_not_be_deleted_keeps_the_segments_it_names() {
    let mut machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    volume.close().unwrap();
    let past = lagging(&machine);
    // Root 2 stays forever, as after a crash between deletes; everything else is deleted as usual.
    let kept = machine.keys("/checkpoint/").pop().unwrap();
    machine.rig.store = Arc::new(UndeletingStore { inner: machine.plain.clone(), kept });
    machine.options.checkpoint_bytes = MIB;
    let volume = machine.open();
    for version in 2..120 {
        write_tile(&volume, 0, version);
        stored(&volume);
    }
    volume.close().unwrap();
    // A list from long ago leads to a root of long ago. It must not be taken for the newest with a
    // short log.
    let mut reader = Machine::over(past);
    reader.options.read_only = true;
    match reader.try_open() {
        Ok(read) => assert_eq!(tile_version(&read, 0, 200), 119),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}"),
    }
}

#[test]
fn while_the_store_is_gone_writes_go_on_then_wait_and_every_write_is_answered() {
    let mut machine = filled(8);
    machine.options.cache =
        Some(open_cache(&machine.folder.path().join("cache"), 8 * MIB).unwrap());
    let volume = machine.open();
    until("tile 0 is cached", || {
        let before = volume.status().counters.reads_store;
        tile_version(&volume, 0, 9) == 1 && volume.status().counters.reads_store == before
    });
    machine.fault(unavailable(), |_| true);
    // From two writers, each with more than the journal holds: neither can end before it is full.
    let tiles = 128;
    std::thread::scope(|scope| {
        let healing = machine.healing();
        for writer in 0..2 {
            let volume = &volume;
            scope.spawn(move || {
                for tile in 0..tiles / 2 {
                    write_tile(volume, 8 + writer * tiles / 2 + tile, 2);
                }
            });
        }
        until("the journal is full", || {
            let status = volume.status();
            status.stalled_requests == 2
                && status.journal_unstored_bytes > status.journal_bytes * 3 / 4
        });
        until("the store is known to be away", || {
            matches!(volume.status().health, Health::StoreUnavailable { .. })
        });
        let status = volume.status();
        assert!(status.counters.writes > 40, "the journal took {} writes", status.counters.writes);
        assert!(status.counters.writes_stalled >= 2);
        assert_eq!(tile_version(&volume, 0, 9), 1, "cached data is read");
        volume.flush().unwrap();
        assert!(!volume.wait(Safety::Stored, Some(std::time::Duration::ZERO)).unwrap());
        assert!(volume.wait(Safety::Logged, Some(WAIT_TIME_MAX)).unwrap());
        assert_eq!(tile_version(&volume, 8, 9), 2, "what is in the journal is read");
        drop(healing);
    });
    stored(&volume);
    let status = volume.status();
    assert_eq!((status.health, status.stalled_requests), (Health::Serving, 0));
    for tile in 0..8 + tiles {
        assert_eq!(tile_version(&volume, tile, 9), if tile < 8 { 1 } else { 2 });
    }
    volume.close().unwrap();
    let volume = machine.open();
    for tile in 0..8 + tiles {
        assert_eq!(tile_version(&volume, tile, 9), if tile < 8 { 1 } else { 2 });
    }
    machine.assert_sound("after the store came back");
}

#[test]
fn a_stored_flush_waits_for_the_store_and_a_logged_one_does_not() {
    for flush in [FlushMode::Logged, FlushMode::Stored] {
        let machine = Machine::with(8 * MIB, flush);
        let volume = machine.open();
        volume.write_at(0, &[1; 5000]).unwrap();
        machine.fault(unavailable(), |call| segment_put(call).is_some());
        if flush == FlushMode::Logged {
            volume.flush().unwrap();
            continue;
        }
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let healing = machine.healing();
            scope.spawn(|| {
                volume.flush().unwrap();
                done.store(true, Ordering::SeqCst);
            });
            until("the put was tried twice", || {
                machine.count(|call| segment_put(call) == Some(65)) >= 2
            });
            assert!(!done.load(Ordering::SeqCst));
            drop(healing);
        });
        assert_eq!(volume.status().positions.stored, volume.status().positions.accepted);
    }
}

#[test]
fn a_read_that_waits_for_the_store_is_answered_when_the_volume_is_stopped() {
    for graceful in [false, true] {
        let machine = filled(2);
        let volume = machine.open();
        machine.fault(unavailable(), |call| segment_get(call).is_some());
        std::thread::scope(|scope| {
            let _healing = machine.healing();
            let reads = [0, 1].map(|tile| {
                let volume = &volume;
                scope.spawn(move || volume.read_at(tile * SEGMENT as u64, 4096))
            });
            until("both reads have asked twice", || {
                [65, 66]
                    .iter()
                    .all(|wanted| machine.count(|call| segment_get(call) == Some(*wanted)) >= 2)
            });
            if graceful {
                volume.close().unwrap();
            } else {
                volume.close_now();
            }
            for read in reads {
                let kind = read.join().unwrap().unwrap_err().kind();
                assert!(matches!(kind, ErrorKind::Unavailable | ErrorKind::Closed), "{kind:?}");
            }
        });
    }
}

#[test]
fn a_write_that_waits_for_room_is_answered_when_the_volume_is_closed() {
    for graceful in [false, true] {
        let machine = Machine::new();
        let volume = machine.open();
        machine.fault(unavailable(), |call| segment_put(call).is_some());
        let outcomes = std::thread::scope(|scope| {
            let _healing = machine.healing();
            let writers = [0, 1, 2].map(|writer| {
                let volume = &volume;
                scope.spawn(move || {
                    // More than the journal holds: none can end before it is full.
                    let mut tiles = (0..160).map(|tile| writer * 40 + tile % 40);
                    tiles.try_for_each(|tile| {
                        volume.write_at(tile * SEGMENT as u64, &tile_bytes(tile, 1))
                    })
                })
            });
            until("all wait for room", || {
                let status = volume.status();
                status.stalled_requests == 3
                    && status.journal_unstored_bytes > status.journal_bytes * 3 / 4
            });
            if graceful {
                let closing = scope.spawn(|| volume.close());
                machine.heal();
                closing.join().unwrap().unwrap();
            } else {
                volume.close_now();
            }
            writers.map(|writer| writer.join().unwrap())
        });
        for outcome in outcomes {
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Closed);
        }
        machine.heal();
        let volume = machine.open();
        assert!((0..120).all(|tile| tile_version(&volume, tile, 1) <= 1));
        volume.close().unwrap();
        machine.assert_sound("after a close with writers waiting");
    }
}

#[test]
fn a_close_that_waits_for_the_store_can_be_cut_short_without_loss() {
    let machine = Machine::new();
    let volume = machine.open();
    machine.fault(unavailable(), |call| segment_put(call).is_some() || root_put(call).is_some());
    for tile in 0..6 {
        write_tile(&volume, tile, 1);
    }
    std::thread::scope(|scope| {
        let _healing = machine.healing();
        let closing = scope.spawn(|| volume.close());
        until("the close waits", || machine.count(|call| segment_put(call) == Some(65)) >= 2);
        volume.close_now();
        assert_eq!(closing.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    });
    machine.heal();
    let volume = machine.open();
    assert!((0..6).all(|tile| tile_version(&volume, tile, 9) == 1));
}
