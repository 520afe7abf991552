//! Round trips of an open: how many answers of the store an attach waits for, one after the other.
//!
//! The store keeps all calls until the opening thread sleeps, and then answers them together: each
//! such time is one round trip, however long a real one takes. The probe of conditional create runs
//! beside the recovery and is not counted.
//!
//! Not here: what is asked, and in which order (`fencing`, `store_faults`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_device::BlockDeviceExt;
use sawmill_store::{
    Class, Completion, Get, List, ObjectInfo, ObjectStore, Put, PutOutcome, StoreOptions,
};
use sawmill_volume::{CreateOptions, Volume};

use crate::faulty::until;
use crate::rig::{MIB, Rig, pattern};

type HeldCall = Box<dyn FnOnce(&dyn ObjectStore) + Send>;

/// A store that answers when it is told to.
struct SlowStore {
    inner: Arc<dyn ObjectStore>,
    held: Mutex<Vec<HeldCall>>,
}

impl SlowStore {
    fn hold(&self, call: HeldCall) {
        self.held.lock().push(call);
    }

    fn answer(&self) {
        let held = std::mem::take(&mut *self.held.lock());
        held.into_iter().for_each(|call| call(&*self.inner));
    }
}

impl ObjectStore for SlowStore {
    fn get(&self, get: Get, done: Completion<Bytes>) {
        self.hold(Box::new(|inner| inner.get(get, done)));
    }
    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        self.hold(Box::new(|inner| inner.put(put, done)));
    }
    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        self.hold(Box::new(|inner| inner.list(list, done)));
    }
    fn delete(&self, keys: Vec<String>, class: Class, done: Completion<()>) {
        self.hold(Box::new(move |inner| inner.delete(keys, class, done)));
    }
}

fn waits(thread: &Path) -> bool {
    let stat = std::fs::read_to_string(thread.join("stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('S'))
}

/// Opens the volume, and counts the round trips.
fn opened(rig: &Rig, store: &SlowStore) -> (Arc<Volume>, usize) {
    std::thread::scope(|threads| {
        let (sender, receiver) = channel();
        let opening = threads.spawn(move || {
            let thread = std::fs::read_link("/proc/thread-self").unwrap();
            sender.send(PathBuf::from("/proc").join(thread)).unwrap();
            rig.open()
        });
        let thread = receiver.recv().unwrap();
        let mut trips = 0;
        loop {
            // Several looks, because it may wait for a lock while it makes its calls.
            let (mut looks, mut calls) = (0, 0);
            until("it waits for the store, or has ended", || {
                let held = store.held.lock().len();
                let is_same = held > 0 && held == calls && waits(&thread);
                (looks, calls) = (if is_same { looks + 1 } else { 0 }, held);
                looks == 5 || opening.is_finished()
            });
            if opening.is_finished() {
                return (opening.join().unwrap(), trips);
            }
            trips += 1;
            store.answer();
        }
    })
}

/// A volume with a map, a checkpoint and a log behind it.
fn used() -> Arc<dyn ObjectStore> {
    let inner: Arc<dyn ObjectStore> =
        sawmill_store::open("memory:", StoreOptions::default()).unwrap();
    let options = CreateOptions { segment_bytes: 256 << 10, ..CreateOptions::new(64 * MIB) };
    sawmill_volume::create(&*inner, "disk", &options).unwrap();
    for life in 0..3 {
        let mut rig = Rig::over(inner.clone());
        rig.options.accept_journal_loss = true;
        let volume = rig.open();
        for at in 0..8 {
            volume.write_at(at * MIB, &pattern(at * MIB, life, 300_000)).unwrap();
        }
        assert!(volume.wait(sawmill_volume::Safety::Stored, None).unwrap());
        match life {
            0 => volume.close().unwrap(),
            // It dies behind its checkpoint.
            _ => volume.close_now(),
        }
    }
    inner
}

#[test]
fn an_open_waits_for_eleven_answers_of_the_store() {
    let inner = used();
    let store = Arc::new(SlowStore { inner, held: Mutex::default() });
    for is_clean in [false, true] {
        let mut rig = Rig::over(store.clone());
        rig.options.store_is_probed = true;
        rig.options.accept_journal_loss = true;
        let (volume, trips) = opened(&rig, &store);
        assert!(trips <= 11, "{trips} round trips, clean: {is_clean}");
        std::thread::scope(|threads| {
            let closing = threads.spawn(|| volume.close());
            until("it has closed", || {
                store.answer();
                closing.is_finished()
            });
            closing.join().unwrap().unwrap();
        });
    }
}
