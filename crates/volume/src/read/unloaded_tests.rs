//! Reads whose map is not loaded yet.

use std::sync::Arc;
use std::sync::mpsc::channel;

use sawmill_device::{Flags, Operation, Request};
use sawmill_store::{ObjectStore, StoreOptions};

use super::submit;
use crate::contexts::Contexts;
use crate::map::MapExtent;
use crate::map::held::HeldGroup;
use crate::recovery::Reporter;
use crate::world::RealWorld;
use crate::{CreateOptions, OpenOptions, names};

const DISK_BYTES: u64 = 64 << 20;

/// A volume without loops, with a held group of which only the second page is mapped.
fn contexts_with_a_held_group() -> Contexts {
    let store: Arc<dyn ObjectStore> =
        sawmill_store::open("memory:", StoreOptions::default()).unwrap();
    crate::create(&*store, "disk", &CreateOptions::new(DISK_BYTES)).unwrap();
    let world = Arc::new(RealWorld::default());
    let stored = names::stored(&*store, "disk", &mut Reporter::new(&*world)).unwrap();
    let extent = MapExtent { address: 4096, length: 4096, sequence: 70, data_offset: 0 };
    let content = HeldGroup { part: None, deltas: vec![(1, vec![extent])] };
    assert!(stored.view.map.hold(0, content));
    Contexts::new(store, &OpenOptions::new("/no/journal"), world, stored, None, 1)
}

#[test]
fn a_read_that_waits_for_its_map_is_answered_when_the_volume_closes() {
    let contexts = contexts_with_a_held_group();
    let (view, pool) = (contexts.read.stored.view(), contexts.read.pool.clone());
    let delay = view.map.delay_load(0);
    let (answers, answer) = channel();
    let tell = move |outcome: sawmill_device::Outcome, bytes| {
        drop(answers.send((outcome.map(drop).map_err(|error| error.to_string()), bytes)));
    };
    let bytes = vec![7; 4096];
    let request = Request::with_bytes(Operation::Read, 0, Flags::default(), bytes, tell);
    submit(&contexts.read, request);
    std::thread::scope(|threads| {
        threads.spawn(|| pool.close());
        while !pool.is_closed() {
            std::thread::yield_now();
        }
        drop(delay);
    });
    let (outcome, bytes) = answer.recv().unwrap();
    assert_eq!(outcome, Ok(()));
    assert!(bytes.iter().all(|byte| *byte == 0));
}
