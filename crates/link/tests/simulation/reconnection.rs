//! Connections that end and are made again: exports that are opened again, targets that return as
//! new processes, packets from long ago, devices that keep requests.
//!
//! Invariant: one thread and one clock. Not here: who may have an export (`reservations`), faults
//! by the hundred (`story`).

use std::sync::{Arc, Mutex};

use sawmill_device::{BlockDevice, ErrorKind, Geometry, MemoryDevice, Operation, Request};
use sawmill_link::PackedDevice;
use sawmill_link::carrier::Peer;
use sawmill_link::clock::Clock;
use sawmill_link::initiator::{InitiatorOptions, OpenMode};
use sawmill_link::target::TargetOptions;

use crate::rig::{
    MS, SECOND, StuckDevice, TARGET, WireSender, World, ask, content, request, small_places,
};

#[test]
fn exports_keep_their_devices_in_whatever_order_they_are_opened_again() {
    for seed in 1..40 {
        let mut world = World::new(seed);
        let memories: Vec<_> = (0..6).map(|_| Arc::new(MemoryDevice::new(1 << 20))).collect();
        let show = |world: &World| {
            for (index, memory) in memories.iter().enumerate() {
                world.show(&format!("disk{index}-{}", "x".repeat(900)), Arc::clone(memory), 1);
            }
        };
        show(&world);
        let initiator = world.initiator(1, small_places());
        let names: Vec<_> =
            (0..6).map(|index| format!("disk{index}-{}", "x".repeat(900))).collect();
        let devices: Vec<_> = names
            .iter()
            .map(|name| world.open(&initiator, name, OpenMode::default()).expect("opened"))
            .collect();
        for round in 1..4u8 {
            world.lose_permille = 300;
            world.restart(TargetOptions::default());
            show(&world);
            for (index, device) in devices.iter().enumerate() {
                world.write(device, 0, vec![round * 16 + index as u8; 5000]).expect("written");
            }
            world.lose_permille = 0;
            for (index, memory) in memories.iter().enumerate() {
                assert_eq!(
                    content(memory, 4999, 2),
                    [round * 16 + index as u8, 0],
                    "seed {seed}, disk {index}"
                );
            }
        }
    }
}

#[test]
fn an_export_opened_on_an_earlier_connection_is_opened_again() {
    let mut world = World::new(3);
    let memories = [(); 2].map(|()| Arc::new(MemoryDevice::new(1 << 20)));
    let show = |world: &World| {
        world.show("a", Arc::clone(&memories[0]), 1);
        world.show("b", Arc::clone(&memories[1]), 1);
    };
    show(&world);
    let initiator = world.initiator(1, small_places());
    let a = world.open(&initiator, "a", OpenMode::default()).expect("opened");
    let answer = initiator.request_open("b", OpenMode::default());
    let bytes = loop {
        match answer.poll() {
            Some(bytes) => break bytes.expect("opened"),
            None => world.step(),
        }
    };
    world.restart(TargetOptions::default());
    show(&world);
    world.write(&a, 0, vec![1; 10]).expect("written on another connection");
    let b = initiator.opened("b", OpenMode::default(), &bytes).expect("a device");
    world.write(&b, 0, vec![2; 10]).expect("written");
    assert_eq!((content(&memories[0], 0, 1), content(&memories[1], 0, 1)), (vec![1], vec![2]));
}

#[test]
fn a_write_that_a_lost_target_had_a_part_of_fails_the_next_flush() {
    let mut world = World::new(1);
    world.show("disk", StuckDevice(MemoryDevice::new(1 << 20), 4096, Mutex::default()), 1);
    let initiator = world.initiator(1, small_places());
    let device = world.open(&initiator, "disk", OpenMode::default()).expect("opened");
    let outcome_cell = ask(&device, Operation::Write, 0, vec![9; 8192]);
    world.run(SECOND);
    assert!(outcome_cell.lock().expect("one thread").is_none(), "its second half is at the device");
    world.restart(TargetOptions::default());
    let after = Arc::new(MemoryDevice::new(1 << 20));
    world.show("disk", Arc::clone(&after), 2);
    world.answer(&outcome_cell).expect("written in the end");
    assert_eq!(content(&after, 0, 1), [0], "its first half is gone");
    let flushes = [(); 2].map(|()| ask(&device, Operation::Flush, 0, Vec::new()));
    for flush in &flushes {
        let error = world.answer(flush).expect_err("asked before the loss was known");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }
    world.run(MS);
    let flush = ask(&device, Operation::Flush, 0, Vec::new());
    world.answer(&flush).expect("it has been reported");
}

#[test]
fn a_fenced_initiator_does_not_take_the_export_back_by_a_new_connection() {
    for silent_s in [1, 300] {
        let mut world = World::new(2);
        let memory = Arc::new(MemoryDevice::new(1 << 20));
        world.show("disk", Arc::clone(&memory), 1);
        let (first, second) =
            (world.initiator(1, small_places()), world.initiator(2, small_places()));
        let old = world.open(&first, "disk", OpenMode::default()).expect("free");
        assert!(world.open(&second, "disk", OpenMode::default()).is_err(), "it is in use");
        world.cut.push(1);
        let late = ask(&old, Operation::Write, 0, vec![1; 5000]);
        world.run(silent_s * SECOND);
        let mode = OpenMode { take_over: true, ..OpenMode::default() };
        let new = world.open(&second, "disk", mode).expect("taken over");
        world.write(&new, 0, vec![2; 5000]).expect("written");
        world.cut.clear();
        let error = world.answer(&late).expect_err("the second one has it");
        assert!(matches!(error.kind(), ErrorKind::Fenced | ErrorKind::InUse), "{error}");
        assert_eq!(content(&memory, 0, 5000), vec![2; 5000]);
        world.write(&new, 0, vec![3; 5000]).expect("it is still the second one's");
    }
}

#[test]
fn a_new_connection_waits_until_the_device_is_done_with_the_old_ones_requests() {
    let mut world = World::new(3);
    let stuck = Arc::new(StuckDevice(MemoryDevice::new(1 << 20), 4096, Mutex::default()));
    world.show("disk", Arc::clone(&stuck), 1);
    let initiator = world.initiator(1, small_places());
    let device = world.open(&initiator, "disk", OpenMode::default()).expect("free");
    let outcome_cell = ask(&device, Operation::Write, 4096, vec![1; 10]);
    world.run(5 * SECOND);
    let at_device = || stuck.2.lock().expect("one thread").pop();
    let old = at_device().expect("the target passed it on");
    world.cut.push(1);
    world.run(300 * SECOND);
    world.cut.clear();
    world.run(60 * SECOND);
    assert!(world.target.status().is_empty(), "the device holds a place of the old one");
    old.done();
    world.run(5 * SECOND);
    assert_eq!(world.target.status().len(), 1, "the old request is done");
    at_device().expect("it was sent again, because no answer came").done();
    world.answer(&outcome_cell).expect("written");
}

#[test]
fn an_export_that_came_back_smaller_ends_the_attachment_and_says_both_sizes() {
    let mut world = World::new(15);
    world.show("disk", MemoryDevice::new(1 << 20), 1);
    let initiator = world.initiator(1, small_places());
    let device = world.open(&initiator, "disk", OpenMode::default()).expect("opened");
    world.restart(TargetOptions::default());
    world.show("disk", MemoryDevice::new(1 << 19), 1);
    let error = world.write(&device, 0, vec![1; 10]).expect_err("half of it is gone");
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    let text = error.to_string();
    assert!(text.contains("has 524288 bytes and had 1048576"), "{text}");
}

#[test]
fn a_packed_write_longer_than_the_places_granted_fails_and_the_link_goes_on() {
    let mut world = World::new(4);
    world.restart(TargetOptions { place_bytes_max: 4096, ..TargetOptions::default() });
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    world.show("disk", Arc::clone(&memory), 1);
    let initiator = world.initiator(1, InitiatorOptions::default());
    let device = world.open(&initiator, "disk", OpenMode::default()).expect("opened");
    let (packed, outcome_cell) = request(Operation::Write, 0, vec![0; 8192]);
    device.submit_packed(packed);
    assert_eq!(world.answer(&outcome_cell).expect_err("too long").kind(), ErrorKind::Invalid);
    world.write(&device, 0, vec![7; 10_000]).expect("cut into pieces");
    assert_eq!(content(&memory, 9999, 2), [7, 0]);
    let status = initiator.status();
    assert_eq!((status.pending, status.places_free), (0, status.places));
}

/// Memory that takes short requests only.
struct ShortDevice(MemoryDevice, Geometry);

impl BlockDevice for ShortDevice {
    fn geometry(&self) -> Geometry {
        self.1
    }

    fn submit(&self, request: Request) {
        match request.check(&self.1) {
            Ok(()) => self.0.submit(request),
            Err(error) => request.fail(error),
        }
    }
}

#[test]
fn a_device_that_takes_short_requests_gets_short_requests() {
    let mut world = World::new(5);
    let memory = MemoryDevice::new(1 << 20);
    let geometry = Geometry { request_bytes_max: 1536, ..memory.geometry() };
    world.show("disk", ShortDevice(memory, geometry), 1);
    let initiator = world.initiator(1, InitiatorOptions::default());
    let device = world.open(&initiator, "disk", OpenMode::default()).expect("opened");
    world.write(&device, 77, vec![7; 100_000]).expect("written");
    let read = ask(&device, Operation::Read, 77, vec![0; 100_000]);
    world.answer(&read).expect("read");
}

#[test]
fn the_timeout_counts_from_the_last_packet_of_the_target() {
    let mut world = World::new(6);
    world.show("disk", MemoryDevice::new(1 << 20), 1);
    let initiator = world.initiator(1, InitiatorOptions { timeout_s: 30, ..small_places() });
    let device = world.open(&initiator, "disk", OpenMode::default()).expect("opened");
    world.run(1000 * SECOND);
    world.target.close();
    world.step();
    assert!(!initiator.status().connected, "the target ended in order");
    world.cut.push(1);
    let outcome_cell = ask(&device, Operation::Write, 0, vec![1; 10]);
    world.run(10 * SECOND);
    assert!(outcome_cell.lock().expect("one thread").is_none(), "30 s are not over");
    world.run(30 * SECOND);
    assert_eq!(
        world.answer(&outcome_cell).expect_err("30 s are over").kind(),
        ErrorKind::Unreachable
    );
    let outcome_cell = ask(&device, Operation::Write, 0, vec![1; 10]);
    assert!(world.answer(&outcome_cell).is_err(), "and so does everything later");
}

#[test]
fn an_initiator_that_gave_up_waits_for_nothing() {
    let mut world = World::new(9);
    world.show("disk", MemoryDevice::new(1 << 20), 1);
    let initiator = world.initiator(1, InitiatorOptions { timeout_s: 30, ..small_places() });
    let device = world.open(&initiator, "disk", OpenMode::default()).expect("opened");
    world.target.close();
    world.step();
    world.cut.push(1);
    let outcome_cell = ask(&device, Operation::Write, 0, vec![1; 10]);
    world.run(40 * SECOND);
    assert_eq!(world.answer(&outcome_cell).expect_err("given up").kind(), ErrorKind::Unreachable);
    // A thread does not wait for a time in the past.
    assert!(
        initiator.deadline_ns() > world.clock.now_ns() + SECOND,
        "it was asking when it gave up"
    );
    initiator.lose_route(0);
    let sender = Arc::new(WireSender(Arc::clone(&world.wire), 1));
    initiator.add_route(0, sender, Peer::Ethernet([TARGET; 6]), None);
    assert!(initiator.deadline_ns() > world.clock.now_ns() + SECOND, "a link came back");
}

#[test]
fn packets_from_long_ago_change_nothing_and_cost_a_bounded_memory() {
    let mut world = World::new(7);
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    world.show("disk", Arc::clone(&memory), 1);
    let initiator = world.initiator(1, small_places());
    let device = world.open(&initiator, "disk", OpenMode::default()).expect("opened");
    for round in 1..6u8 {
        world.write(&device, 0, vec![round; 20_000]).expect("written");
        let old = std::mem::take(&mut world.sent_packets);
        for (from, bytes) in old.iter().chain(old.iter().rev()) {
            world.to_target(*from, &mut bytes.clone());
        }
        world.run(SECOND);
        if round % 2 == 0 {
            world.restart(TargetOptions::default());
            world.show("disk", Arc::clone(&memory), 1);
        }
        world.sent_packets.extend(old);
        assert_eq!(content(&memory, 0, 20_000), vec![round; 20_000]);
        assert!(world.target.status().len() <= 1, "one connection, whatever is sent again");
    }
}

#[test]
fn connections_that_ended_count_while_a_device_has_their_requests() {
    let mut world = World::new(10);
    world.restart(TargetOptions { connections_max: 2, ..TargetOptions::default() });
    let stuck =
        [(); 2].map(|()| Arc::new(StuckDevice(MemoryDevice::new(1 << 20), 4096, Mutex::default())));
    for (index, device) in stuck.iter().enumerate() {
        world.show(&format!("disk{index}"), Arc::clone(device), 1);
        let initiator = world.initiator(1 + index as u8, small_places());
        let remote = world.open(&initiator, &format!("disk{index}"), OpenMode::default());
        let _unanswered = ask(&remote.expect("opened"), Operation::Write, 4096, vec![1; 512]);
        world.run(SECOND);
        world.cut.push(1 + index as u8);
    }
    world.run(200 * SECOND);
    assert!(world.target.status().is_empty(), "both were silent for too long");
    world.initiator(3, small_places());
    world.run(SECOND);
    assert!(world.target.status().is_empty(), "the devices hold the places of two connections");
    let requests = std::mem::take(&mut *stuck[0].2.lock().expect("one thread"));
    requests.into_iter().for_each(Request::done);
    world.run(SECOND);
    assert_eq!(world.target.status().len(), 1, "one of them has let go");
}

#[test]
fn a_target_that_ends_admits_no_initiator() {
    let mut world = World::new(8);
    world.show("disk", MemoryDevice::new(1 << 20), 1);
    let initiator = world.initiator(1, small_places());
    let device = world.open(&initiator, "disk", OpenMode::default()).expect("opened");
    world.write(&device, 0, vec![1; 10]).expect("written");
    world.target.close();
    world.run(5 * SECOND);
    assert!(world.target.status().is_empty() && !initiator.status().connected);
}
