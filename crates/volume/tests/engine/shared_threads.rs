//! Volumes that share the threads of their loops, as those of one process do: what happens to one
//! costs no other.
//!
//! Not here: disks that hang, because a real one cannot (`threads::loops::tests`).

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind, Flags, Operation, Request};
use sawmill_store::Fault;
use sawmill_volume::{FlushMode, Health, LoopThreads};

use crate::faulty::{
    Machine, WAIT_TIME_MAX, segment_put, stored, tile_bytes, tile_version, until, write_tile,
};
use crate::rig::MIB;

/// Machines whose volumes share threads.
fn machines(count: usize) -> (Vec<Machine>, Arc<LoopThreads>) {
    let threads = Arc::<LoopThreads>::default();
    let machines = (0..count).map(|_| {
        let mut machine = Machine::new();
        machine.rig.options.loop_threads = threads.clone();
        machine
    });
    (machines.collect(), threads)
}

#[test]
fn a_store_that_hangs_under_one_volume_stops_no_other() {
    let (mut others, _) = machines(41);
    let hung = others.remove(0);
    let volume = hung.open();
    let opened: Vec<_> = others.iter().map(|other| other.open()).collect();
    hung.fault(Fault::Delay, |_| true);
    (0..4).for_each(|tile| write_tile(&volume, tile, 1));
    until("its puts hang", || !hung.faults.held().is_empty());
    for other in &opened {
        write_tile(other, 0, 1);
        stored(other);
        assert_eq!(tile_version(other, 0, 9), 1);
    }
    volume.flush().unwrap();
    hung.faults.release_all();
    hung.heal();
    stored(&volume);
    assert_eq!([0, 1, 2, 3].map(|tile| tile_version(&volume, tile, 9)), [1; 4]);
}

#[test]
fn fenced_volumes_keep_no_thread() {
    let (first, threads) = machines(8);
    let fenced: Vec<_> = first.iter().map(|machine| machine.open()).collect();
    fenced.iter().for_each(|volume| write_tile(volume, 0, 1));
    let second: Vec<_> = first.iter().map(|machine| machine.successor()).collect();
    let owners: Vec<_> = second.iter().map(|machine| machine.open()).collect();
    for volume in &fenced {
        // It may have asked the store since, and know.
        drop(volume.write_at(0, &tile_bytes(0, 2)));
        until("it is fenced", || matches!(volume.status().health, Health::Fenced { .. }));
    }
    owners.into_iter().for_each(|owner| owner.close().unwrap());
    // One waits for work.
    until("the threads end", || threads.counts().threads <= 1);
}

#[test]
fn a_close_ends_even_if_the_answers_to_a_panic_panic() {
    let (mut machines, threads) = machines(2);
    let mut machine = Machine::with(64 * MIB, FlushMode::Stored);
    machine.rig.options.loop_threads = threads;
    let (volume, other) = (machine.open(), machines.remove(0).open());
    machine.fault(Fault::Delay, |call| segment_put(call).is_some());
    let flush = |tile| {
        write_tile(&volume, tile, 1);
        let failing = |_| panic!("the user's code fails");
        volume.submit(Request::bare(Operation::Flush, 0, 0, Flags::default(), failing));
        until("its segment is on its way", || machine.faults.held().len() as u64 > tile);
    };
    // The first flush is answered by the engine, which fails by that; then the second one is.
    (0..2).for_each(flush);
    let first = machine.faults.held().iter().filter_map(segment_put).min();
    machine.faults.release(|call| segment_put(call) == first);
    until("the volume fails", || matches!(volume.status().health, Health::Failed { .. }));
    let (closed, is_closed) = sync_channel(1);
    std::thread::spawn(move || closed.send(volume.close()));
    let outcome = is_closed.recv_timeout(WAIT_TIME_MAX).expect("the close ends");
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Internal);
    machine.faults.release_all();
    write_tile(&other, 0, 1);
    stored(&other);
    other.close().unwrap();
}
