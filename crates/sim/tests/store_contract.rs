//! The simulator's store keeps every clause of the contract while nothing fails, so the engine is
//! tested against a valid store.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use bytes::Bytes;
use sawmill_sim::store::{SimStore, StoreFaults};
use sawmill_store::{
    Class, Completion, Get, List, ObjectInfo, ObjectStore, Put, PutOutcome, conformance,
};
use sawmill_testkit::Dice;

fn store() -> Arc<SimStore> {
    let dice = Dice::new(1);
    let faults = StoreFaults::default();
    Arc::new(SimStore::new(Arc::default(), Arc::default(), Arc::default(), faults, dice))
}

/// A store whose calls wait for a scheduler, which is notified of each.
struct SchedulerStore {
    store: Arc<SimStore>,
    sender: Sender<()>,
}

impl SchedulerStore {
    fn notify(&self) {
        self.sender.send(()).expect("the scheduler goes after the last call");
    }
}

impl ObjectStore for SchedulerStore {
    fn get(&self, get: Get, done: Completion<Bytes>) {
        self.store.get(get, done);
        self.notify();
    }

    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        self.store.put(put, done);
        self.notify();
    }

    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        self.store.list(list, done);
        self.notify();
    }

    fn delete(&self, keys: Vec<String>, class: Class, done: Completion<()>) {
        self.store.delete(keys, class, done);
        self.notify();
    }
}

/// Lets one waiting call happen for each notification, in any order.
fn schedule(store: &SimStore, receiver: &Receiver<()>) {
    let mut dice = Dice::seeded("the scheduler");
    for () in receiver {
        // None if the call was refused immediately.
        let waiting = store.waiting().max(1) as u64;
        store.happen(dice.below(waiting) as usize);
    }
}

#[test]
fn calls_that_happen_at_once_keep_the_contract() {
    assert_eq!(conformance::run(&*store()), Vec::<String>::new());
}

#[test]
fn calls_that_wait_for_a_scheduler_keep_the_contract() {
    let store = store();
    store.set_at_once(false);
    let (sender, receiver) = channel();
    let waiting = Arc::clone(&store);
    let scheduler = std::thread::spawn(move || schedule(&waiting, &receiver));
    let scheduled = SchedulerStore { store, sender };
    assert_eq!(conformance::run(&scheduled), Vec::<String>::new());
    drop(scheduled);
    scheduler.join().unwrap();
}
