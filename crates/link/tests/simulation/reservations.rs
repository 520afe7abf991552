//! The right to write across restarts of targets: reservations, exports that are closed, targets
//! that answer and never serve.
//!
//! Not here: a target's own table of users (`target::exports`), faults by the hundred (`story`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sawmill_device::{
    BlockDevice, Error, ErrorKind, Exchange, Flags, Geometry, MemoryDevice, Operation, Outcome,
    Request, Result,
};
use sawmill_link::clock::Clock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode};
use sawmill_link::target::{Standing, StandingStore, TargetOptions};
use sawmill_link::{PackedDevice, Unpacker};

use crate::rig::{MS, SECOND, StuckDevice, World, ask, content, request, small_places};

const ALONE: OpenMode = OpenMode { read_only: false, take_over: false, shared: false };
const TAKE_OVER: OpenMode = OpenMode { take_over: true, ..ALONE };

/// The persistent state of an export.
#[derive(Clone, Default)]
struct MemoryStanding(Arc<Mutex<Standing>>);

impl StandingStore for MemoryStanding {
    fn keep(&self, standing: &Standing) -> Result<()> {
        *self.0.lock().expect("one thread") = *standing;
        Ok(())
    }
}

impl World {
    fn show_lasting(&self, name: &str, device: impl BlockDevice + 'static, store: &MemoryStanding) {
        let (standing, keep) = (*store.0.lock().expect("one thread"), Box::new(store.clone()));
        let device = Arc::new(Unpacker::new(device));
        self.target.add_lasting(name, device, [1; 16], standing, keep).expect("shown once");
    }

    fn restart_lasting(&mut self, device: impl BlockDevice + 'static, store: &MemoryStanding) {
        self.restart(TargetOptions::default());
        self.show_lasting("disk", device, store);
    }
}

#[test]
fn old_writes_do_not_land_over_newer_ones_whichever_of_the_two_comes_to_the_next_target_first() {
    for (old_comes_first, new_left) in [(true, false), (false, false), (true, true)] {
        let (mut world, store) = (World::new(11), MemoryStanding::default());
        let memory = Arc::new(MemoryDevice::new(1 << 20));
        world.show_lasting("disk", Arc::clone(&memory), &store);
        let (first, second) =
            (world.initiator(1, small_places()), world.initiator(2, small_places()));
        let old = world.open(&first, "disk", ALONE).expect("free");
        world.cut.push(1);
        let late = ask(&old, Operation::Write, 0, vec![1; 5000]);
        world.run(SECOND);
        let new = world.open(&second, "disk", TAKE_OVER).expect("taken over");
        world.write(&new, 0, vec![2; 5000]).expect("written");
        let mut new = Some(new);
        if new_left {
            new = None;
            world.run(SECOND);
        }
        world.restart_lasting(Arc::clone(&memory), &store);
        world.cut = if old_comes_first { vec![2] } else { vec![1] };
        world.run(10 * SECOND);
        world.cut.clear();
        let error = world.answer(&late).expect_err("another initiator had it since");
        assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
        assert_eq!(
            content(&memory, 0, 5000),
            vec![2; 5000],
            "the old write is in place of the newer one"
        );
        if let Some(new) = new {
            world.write(&new, 0, vec![3; 5000]).expect("it is still the second one's");
        }
    }
}

#[test]
fn an_initiator_given_up_is_fenced_after_another_had_the_export_and_left() {
    let (mut world, store) = (World::new(12), MemoryStanding::default());
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    world.show_lasting("disk", Arc::clone(&memory), &store);
    let (first, second) = (world.initiator(1, small_places()), world.initiator(2, small_places()));
    let old = world.open(&first, "disk", ALONE).expect("free");
    world.cut.push(1);
    let late = ask(&old, Operation::Write, 0, vec![1; 5000]);
    world.run(300 * SECOND);
    let new = world.open(&second, "disk", ALONE).expect("the first one was given up");
    world.write(&new, 0, vec![2; 5000]).expect("written");
    drop(new);
    world.run(SECOND);
    world.cut.clear();
    assert_eq!(world.answer(&late).expect_err("the second one had it").kind(), ErrorKind::Fenced);
    assert_eq!(content(&memory, 0, 5000), vec![2; 5000]);
}

#[test]
fn an_initiator_not_taken_over_goes_on_with_every_target_and_with_none_that_cannot_know() {
    let (mut world, store) = (World::new(13), MemoryStanding::default());
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    world.show_lasting("disk", Arc::clone(&memory), &store);
    let initiator = world.initiator(1, small_places());
    let device = world.open(&initiator, "disk", ALONE).expect("free");
    for round in 1..4 {
        world.restart_lasting(Arc::clone(&memory), &store);
        world.write(&device, 0, vec![round; 5000]).expect("no other initiator had it");
    }
    world.restart_lasting(Arc::clone(&memory), &MemoryStanding::default());
    let error =
        world.write(&device, 0, vec![9; 5000]).expect_err("another initiator may have had it");
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    assert_eq!(content(&memory, 0, 5000), vec![3; 5000]);
    let again = world.initiator(2, small_places());
    world.open(&again, "disk", ALONE).expect("it is attached again");
}

#[test]
fn a_device_that_is_dropped_is_free_when_its_requests_are_done() {
    for lose_permille in [0, 300] {
        let mut world = World::new(14);
        let stuck = Arc::new(StuckDevice(MemoryDevice::new(1 << 20), 4096, Mutex::default()));
        world.show("disk", Arc::clone(&stuck), 1);
        let (first, second) =
            (world.initiator(1, small_places()), world.initiator(2, small_places()));
        let device = world.open(&first, "disk", ALONE).expect("free");
        world.lose_permille = lose_permille;
        let outcome_cell = ask(&device, Operation::Write, 4096, vec![1; 10]);
        world.run(5 * SECOND);
        drop(device);
        world.run(5 * SECOND);
        let busy = world
            .open(&second, "disk", ALONE)
            .err()
            .expect("a request of the first one is under way");
        assert_eq!(busy.kind(), ErrorKind::InUse, "{busy}");
        let request = stuck.2.lock().expect("one thread").pop().expect("it is at the device");
        request.done();
        world.answer(&outcome_cell).expect("written");
        world.run(5 * SECOND);
        drop(world.open(&second, "disk", ALONE).expect("it was given back"));
        world.run(5 * SECOND);
        drop(world.open(&first, "disk", ALONE).expect("and again"));
        world.run(5 * SECOND);
        let status = first.status();
        assert_eq!((status.pending, status.places_free), (0, status.places));
    }
}

#[test]
fn an_export_that_was_closed_on_a_lost_connection_takes_no_other_with_it() {
    let mut world = World::new(15);
    let memories = [(); 3].map(|()| Arc::new(MemoryDevice::new(1 << 20)));
    let show = |world: &World| {
        let exports = ["a", "b", "c"].into_iter().zip(&memories);
        exports.for_each(|(name, memory)| world.show(name, Arc::clone(memory), 1));
    };
    show(&world);
    let (first, second) = (world.initiator(1, small_places()), world.initiator(2, small_places()));
    let [a, b, c] = ["a", "b", "c"].map(|name| world.open(&first, name, ALONE).expect("free"));
    world.cut.push(1);
    drop(a);
    world.restart(TargetOptions::default());
    show(&world);
    world.cut.clear();
    for (device, memory) in [(&b, &memories[1]), (&c, &memories[2])] {
        world
            .write(device, 0, vec![7; 10])
            .expect("open on the new connection, under another number");
        assert_eq!(content(memory, 0, 10), vec![7; 10]);
    }
    world.open(&second, "a", ALONE).expect("it is free");
    drop((b, c));
    world.run(SECOND);
    world.restart(TargetOptions::default());
    show(&world);
    world.run(10 * SECOND);
    let d = world.open(&first, "b", ALONE).expect("an initiator without exports connects, too");
    world.write(&d, 0, vec![8; 10]).expect("written");
}

#[test]
fn a_target_that_answers_and_never_serves_is_not_waited_for_forever() {
    let mut world = World::new(16);
    world.show("disk", StuckDevice(MemoryDevice::new(1 << 20), 4096, Mutex::default()), 1);
    let initiator = world.initiator(1, InitiatorOptions { timeout_s: 60, ..small_places() });
    let device = world.open(&initiator, "disk", ALONE).expect("free");
    let stuck = ask(&device, Operation::Write, 4096, vec![1; 10]);
    world.run(1000 * SECOND);
    assert!(stuck.lock().expect("one thread").is_none(), "a target that answers is waited for");
    // Its hellos are answered; it is not admitted while its old connection has a request at the
    // device.
    initiator.reconnect();
    world.run(50 * SECOND);
    assert!(stuck.lock().expect("one thread").is_none(), "60 s are not over");
    for other in 2..12 {
        // Other hellos evict its unfinished handshake, so it sends a hello again.
        world.initiator(other, small_places()).request_list();
        world.run(11 * SECOND);
    }
    assert!(initiator.failure().is_some(), "it waits on");
    let error = world.answer(&stuck).expect_err("60 s are over");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(
        initiator.deadline_ns() >= world.clock.now_ns() + SECOND,
        "its threads would never rest"
    );
}

#[test]
fn a_target_that_was_away_for_long_is_given_time_to_serve() {
    let mut world = World::new(17);
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    world.show("disk", Arc::clone(&memory), 1);
    let initiator = world.initiator(1, InitiatorOptions { timeout_s: 60, ..small_places() });
    let device = world.open(&initiator, "disk", ALONE).expect("free");
    world.cut.push(1);
    world.run(1000 * SECOND);
    world.restart(TargetOptions::default());
    world.show("disk", Arc::clone(&memory), 1);
    world.cut.clear();
    world.run(10 * SECOND);
    world.write(&device, 0, vec![1; 10]).expect("no other initiator had it meanwhile");
}

/// A disk whose flushes fail on command; later flushes do not report that.
struct Forgetful(Arc<MemoryDevice>, Arc<AtomicBool>);

impl BlockDevice for Forgetful {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn submit(&self, request: Request) {
        if request.operation == Operation::Flush && self.1.load(Ordering::SeqCst) {
            return request.fail(Error::new(ErrorKind::Unavailable, "the disk could not write"));
        }
        self.0.submit(request);
    }
}

#[test]
fn a_flush_whose_failure_was_lost_does_not_succeed_at_the_next_target() {
    let (mut world, store) = (World::new(18), MemoryStanding::default());
    let (memory, fails) = (Arc::new(MemoryDevice::new(1 << 20)), Arc::new(AtomicBool::new(true)));
    world.show_lasting("disk", Forgetful(Arc::clone(&memory), Arc::clone(&fails)), &store);
    let initiator = world.initiator(1, small_places());
    let device = world.open(&initiator, "disk", ALONE).expect("free");
    world.write(&device, 0, vec![1; 10]).expect("written");
    let flush = ask(&device, Operation::Flush, 0, Vec::new());
    let failed_syncs = |store: &MemoryStanding| store.0.lock().expect("one thread").failed_syncs;
    while failed_syncs(&store) == 0 {
        // The target receives everything, but what it sends is lost.
        world.step();
        world.wire.lock().expect("one thread").retain(|(from, ..)| *from != 0);
    }
    assert!(flush.lock().expect("one thread").is_none(), "its failure was lost on the way");
    fails.store(false, Ordering::SeqCst);
    world.restart_lasting(Forgetful(memory, fails), &store);
    let error = world.answer(&flush).expect_err("the write may be lost");
    assert!(error.to_string().contains("may be lost"), "{error}");
    world.run(MS);
    let flush = ask(&device, Operation::Flush, 0, Vec::new());
    world.answer(&flush).expect("it has been said");
}

/// While it completes, does from another thread everything that a user may do.
struct ReentrantExchange(Arc<Initiator>, Arc<Mutex<Option<(Outcome, bool)>>>);

impl Exchange for ReentrantExchange {
    fn fill(&mut self, _: u64, into: &mut [u8]) {
        into.fill(1);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut []
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let (sender, receiver) = channel();
        let initiator = Arc::clone(&self.0);
        std::thread::spawn(move || {
            let _ = (
                initiator.status(),
                initiator.hint(),
                initiator.failure(),
                initiator.request_list(),
            );
            initiator.tick();
            // The receiver is gone if it waited too long.
            let _ = sender.send(());
        });
        let free = receiver.recv_timeout(Duration::from_secs(20)).is_ok();
        *self.1.lock().expect("one thread") = Some((outcome, free));
    }
}

#[test]
fn no_request_completes_under_a_lock() {
    let mut world = World::new(19);
    let places = |place_bytes_max| TargetOptions { place_bytes_max, ..TargetOptions::default() };
    world.show("disk", MemoryDevice::new(1 << 20), 1);
    let initiator = world.initiator(1, InitiatorOptions::default());
    let device = world.open(&initiator, "disk", ALONE).expect("free");
    let curious = |operation, length| {
        let outcome_cell = Arc::new(Mutex::new(None));
        let exchange =
            Box::new(ReentrantExchange(Arc::clone(&initiator), Arc::clone(&outcome_cell)));
        (Request::new(operation, 0, length, Flags::default(), exchange), outcome_cell)
    };
    world.cut.push(1);
    // Longer than the places of the next target, so that it fails there without being sent.
    let (packed, packed_outcome) = curious(Operation::Write, 8192);
    device.submit_packed(packed);
    let (write, write_outcome) = curious(Operation::Write, 10_000);
    device.submit(write);
    world.restart(places(4096));
    world.show("disk", MemoryDevice::new(1 << 20), 1);
    world.cut.clear();
    world.run(10 * SECOND);
    let (late, late_outcome) = curious(Operation::Write, 10);
    world.cut.push(1);
    device.submit(late);
    initiator.fail(Error::new(ErrorKind::Closed, "it was asked for"));
    for (outcome_cell, is_ok) in
        [(packed_outcome, false), (write_outcome, true), (late_outcome, false)]
    {
        let (outcome, is_unlocked) =
            outcome_cell.lock().expect("one thread").take().expect("it was told");
        assert_eq!(outcome.is_ok(), is_ok, "{outcome:?}");
        assert!(is_unlocked, "a lock was held");
    }
    let (after, outcome_cell) = request(Operation::Write, 0, vec![0; 10]);
    device.submit(after);
    assert!(world.answer(&outcome_cell).is_err(), "it is over");
}
