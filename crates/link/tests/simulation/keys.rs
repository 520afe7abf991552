//! A key for each machine, and new keys for a connection: what each may open, what ends when keys
//! change, and that nothing is lost by it.
//!
//! Not here: the file of machines (`sawmill_link::target::machines`), attacks without a key
//! (`hostile`).

use std::sync::{Arc, Mutex};

use sawmill_device::{ErrorKind, MemoryDevice, Operation, Request};
use sawmill_format::link::control::exports;
use sawmill_format::link::{Packet, PacketKind};
use sawmill_link::clock::Clock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode};
use sawmill_link::session::{PreSharedKey, Security};
use sawmill_link::target::{Machine, Rights, Target, TargetOptions};

use crate::network::{Dice, WorldClock};
use crate::rig::{MS, SECOND, StuckDevice, World, ask, content, ids, small_places};

const WRITER: OpenMode = OpenMode { read_only: false, shared: true, take_over: false };
const ALONE: OpenMode = OpenMode { read_only: false, shared: false, take_over: false };
const READER: OpenMode = OpenMode { read_only: true, shared: true, take_over: false };

fn secret(byte: u8) -> PreSharedKey {
    PreSharedKey::from_bytes([byte; 32])
}

fn machines(lines: &[(&str, u8, &str)]) -> Vec<Machine> {
    let machine = |&(name, byte, exports): &(&str, u8, &str)| Machine {
        name: name.to_owned(),
        key: secret(byte),
        rights: Rights::parse(exports).expect("exports"),
    };
    lines.iter().map(machine).collect()
}

const DB1: (&str, u8, &str) = ("db1", 1, "disk1,logs:ro");
const BACKUP: (&str, u8, &str) = ("backup", 2, "*:ro");

/// A target of the exports disk1, disk2 and logs for these machines.
fn world(lines: &[(&str, u8, &str)]) -> (World, Arc<MemoryDevice>) {
    let mut world = World::new(7);
    show_to(&mut world, lines);
    let disk1 = Arc::new(MemoryDevice::new(1 << 20));
    world.show("disk1", Arc::clone(&disk1), 1);
    world.show("disk2", MemoryDevice::new(1 << 20), 1);
    world.show("logs", MemoryDevice::new(1 << 20), 1);
    (world, disk1)
}

fn show_to(world: &mut World, lines: &[(&str, u8, &str)]) {
    let clock: Arc<dyn Clock> = Arc::<WorldClock>::clone(&world.clock);
    let random = ids(&mut world.dice);
    let target = Target::for_machines(TargetOptions::default(), machines(lines), clock, random);
    world.target = target.expect("there are machines");
}

fn initiator(world: &mut World, me: u8) -> Arc<Initiator> {
    let random = ids(&mut world.dice);
    world.initiator_with(me, small_places(), Security::Key(secret(me)), random)
}

/// The number of different hellos from this machine.
fn hellos(world: &World, from: u8) -> usize {
    let is_hello =
        |bytes: &[u8]| Packet::decode(bytes).is_ok_and(|packet| packet.kind == PacketKind::Hello);
    let hellos = world.sent_packets.iter().filter(|(by, bytes)| *by == from && is_hello(bytes));
    hellos.map(|(_, bytes)| bytes).collect::<std::collections::HashSet<_>>().len()
}

#[test]
fn each_machine_opens_what_its_key_may_and_is_shown_no_more() {
    let (mut world, disk1) = world(&[DB1, BACKUP]);
    let (db1, backup) = (initiator(&mut world, 1), initiator(&mut world, 2));
    let device = world.open(&db1, "disk1", WRITER).expect("it may write it");
    world.write(&device, 0, vec![1; 5000]).expect("written");
    for (export, mode) in [("logs", WRITER), ("disk2", READER), ("no such export", READER)] {
        let error = world.open(&db1, export, mode).err().expect("it may not");
        assert_eq!(error.kind(), ErrorKind::Denied, "{export}: {error}");
    }
    let logs = world.open(&db1, "logs", READER).expect("it may read it");
    assert_eq!(
        world.write(&logs, 0, vec![1; 512]).expect_err("read-only").kind(),
        ErrorKind::ReadOnly
    );
    let takes_over = OpenMode { take_over: true, ..READER };
    for mode in [WRITER, takes_over] {
        let error = world.open(&backup, "disk1", mode).err().expect("it only reads");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    }
    world.open(&backup, "disk1", READER).expect("it may read everything");
    world.write(&device, 0, vec![2; 5000]).expect("no initiator took it over");
    assert_eq!(content(&disk1, 0, 5000), vec![2; 5000]);
    let error = world.open(&backup, "no such export", READER).err().expect("there is none");
    assert!(error.kind() == ErrorKind::NotFound && error.to_string().contains("disk2"), "{error}");
    for (initiator, visible_names) in
        [(&db1, vec!["disk1", "logs"]), (&backup, vec!["disk1", "disk2", "logs"])]
    {
        let answer = initiator.request_list();
        let bytes = loop {
            world.step();
            if let Some(outcome) = answer.poll() {
                break outcome.expect("a list");
            }
        };
        let names = exports(&bytes).expect("whole");
        let names: Vec<_> = names.named.iter().map(|(name, _)| &name[..]).collect();
        assert_eq!(names, visible_names);
    }
}

#[test]
fn a_key_that_is_taken_back_ends_its_machine_and_no_other_until_it_is_given_again() {
    let (mut world, disk1) = world(&[DB1, BACKUP]);
    let (db1, backup) = (initiator(&mut world, 1), initiator(&mut world, 2));
    let device = world.open(&db1, "disk1", WRITER).expect("it may write it");
    world.open(&backup, "disk2", READER).expect("it may read it");
    assert_eq!(world.target.set_machines(machines(&[DB1, BACKUP])), Some(0), "nothing has changed");
    world.write(&device, 0, vec![1; 5000]).expect("written");
    assert_eq!((hellos(&world, 1), hellos(&world, 2)), (1, 1));

    assert_eq!(world.target.set_machines(machines(&[BACKUP])), Some(1));
    let late = ask(&device, Operation::Write, 0, vec![2; 5000]);
    world.run(30 * SECOND);
    assert!(late.lock().expect("one thread").is_none(), "it waits");
    assert_eq!(content(&disk1, 0, 5000), vec![1; 5000]);
    assert_eq!(hellos(&world, 2), 1, "the other one has its connection still");

    assert_eq!(world.target.set_machines(Vec::new()), None, "no machines are not fewer machines");
    assert_eq!(world.target.set_machines(machines(&[DB1, BACKUP])), Some(0));
    world.answer(&late).expect("it went on");
    assert_eq!(content(&disk1, 0, 5000), vec![2; 5000]);
}

#[test]
fn a_machine_that_loses_the_right_to_an_export_is_denied() {
    let (mut world, disk1) = world(&[DB1, BACKUP]);
    let db1 = initiator(&mut world, 1);
    let device = world.open(&db1, "disk1", WRITER).expect("it may write it");
    world.write(&device, 0, vec![1; 5000]).expect("written");
    assert_eq!(world.target.set_machines(machines(&[("db1", 1, "logs"), BACKUP])), Some(1));
    let error = world.write(&device, 0, vec![2; 5000]).expect_err("it may not any more");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert_eq!(content(&disk1, 0, 5000), vec![1; 5000]);
}

#[test]
fn a_target_without_a_machines_key_is_no_target_to_that_machine() {
    // An attacker has the key of db1, and answers in the target's place.
    let (mut world, _) = world(&[DB1]);
    let options = InitiatorOptions { timeout_s: 20, ..small_places() };
    let random = ids(&mut world.dice);
    let backup = world.initiator_with(2, options, Security::Key(secret(2)), random);
    let error = world.open(&backup, "disk1", READER).err().expect("not the target it knows");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("compare the key files"), "{error}");
}

#[test]
fn a_machine_that_uses_the_id_of_another_ends_no_connection_of_it() {
    let (mut world, disk1) = world(&[DB1, ("thief", 2, "logs")]);
    let same = || {
        let mut dice = Dice::new(99);
        Box::new(move || dice.next())
    };
    let db1 = world.initiator_with(1, small_places(), Security::Key(secret(1)), same());
    let device = world.open(&db1, "disk1", WRITER).expect("it may write it");
    let thief = world.initiator_with(2, small_places(), Security::Key(secret(2)), same());
    world.open(&thief, "logs", WRITER).expect("its own");
    world.write(&device, 0, vec![1; 5000]).expect("written");
    assert_eq!(content(&disk1, 0, 5000), vec![1; 5000]);
    assert_eq!(hellos(&world, 1), 1, "its connection was not ended");
}

#[test]
fn a_connection_that_has_carried_its_bytes_gets_new_keys_and_loses_nothing() {
    let (mut world, disk1) = world(&[DB1]);
    let options = InitiatorOptions { rekey_bytes: 64 << 10, ..small_places() };
    let random = ids(&mut world.dice);
    let db1 = world.initiator_with(1, options, Security::Key(secret(1)), random);
    let device = world.open(&db1, "disk1", WRITER).expect("it may write it");
    for round in 0..20u8 {
        let all: Vec<_> = (0..16)
            .map(|page| ask(&device, Operation::Write, page * 4096, vec![round + page as u8; 4096]))
            .collect();
        // A check whether new keys are due falls into this time.
        world.run(SECOND / 2);
        all.iter().for_each(|outcome_cell| drop(world.answer(outcome_cell).expect("written")));
        for page in 0..16 {
            assert_eq!(content(&disk1, page * 4096, 4096), vec![round + page as u8; 4096]);
        }
    }
    assert!(hellos(&world, 1) >= 5, "{} connections", hellos(&world, 1));
    assert_eq!(world.target.status().len(), 1, "the old ones are gone");
}

#[test]
fn a_connection_that_is_never_idle_gets_new_keys_after_sixteen_times_its_bytes() {
    const REKEY_BYTES: u64 = 64 << 10;
    const STUCK: u64 = 512 << 10;
    assert_eq!(InitiatorOptions::default().rekey_bytes, 1 << 40, "the default is 1 TiB");
    let mut world = World::new(7);
    show_to(&mut world, &[DB1]);
    let disk1 = Arc::new(StuckDevice(MemoryDevice::new(1 << 20), STUCK, Mutex::default()));
    world.show("disk1", Arc::clone(&disk1), 1);
    let options = InitiatorOptions { rekey_bytes: REKEY_BYTES, ..small_places() };
    let random = ids(&mut world.dice);
    let db1 = world.initiator_with(1, options, Security::Key(secret(1)), random);
    let device = world.open(&db1, "disk1", WRITER).expect("it may write it");
    let mut writes = vec![ask(&device, Operation::Write, STUCK, vec![9; 4096])];
    for page in 0..8 * REKEY_BYTES / 4096 {
        world.write(&device, page * 4096 % STUCK, vec![1; 4096]).expect("written");
    }
    // A check whether new keys are due falls into this time.
    world.run(2 * SECOND);
    assert_eq!(hellos(&world, 1), 1, "it waits for an idle moment");
    for page in 0..8 * REKEY_BYTES / 4096 {
        writes.push(ask(&device, Operation::Write, page * 4096 % STUCK, vec![2; 4096]));
        world.run(10 * MS);
    }
    world.run(2 * SECOND);
    assert!(hellos(&world, 1) > 1, "it waits no longer");
    // The new connection sends the write again: an answer to the old one does not count.
    for _ in 0..500 {
        let requests = std::mem::take(&mut *disk1.2.lock().expect("one thread"));
        requests.into_iter().for_each(Request::done);
        world.run(10 * MS);
    }
    writes.iter().for_each(|outcome_cell| drop(world.answer(outcome_cell).expect("written")));
    assert_eq!(content(&disk1.0, 0, STUCK as usize), vec![2; STUCK as usize]);
    assert_eq!(world.target.status().len(), 1, "the old connection is gone");
}

/// At every step, the reader asks for the export that a writer has exclusively.
fn no_reader_gets_between(world: &mut World, backup: &Arc<Initiator>, long_ns: u64) {
    let mut answer = backup.request_open("disk1", READER);
    let until = world.clock.now_ns() + long_ns;
    while world.clock.now_ns() < until {
        world.step();
        if let Some(outcome) = answer.poll() {
            let Err(error) = outcome else { panic!("the reader got between") };
            assert!(matches!(error.kind(), ErrorKind::InUse | ErrorKind::Unavailable), "{error}");
            answer = backup.request_open("disk1", READER);
        }
    }
}

#[test]
fn an_initiator_that_has_an_export_alone_keeps_it_while_its_keys_change() {
    let (mut world, disk1) = world(&[DB1, BACKUP]);
    let options = InitiatorOptions { rekey_bytes: 64 << 10, ..small_places() };
    let random = ids(&mut world.dice);
    let db1 = world.initiator_with(1, options, Security::Key(secret(1)), random);
    let device = world.open(&db1, "disk1", ALONE).expect("free");
    let backup = initiator(&mut world, 2);
    for round in 0..3u8 {
        for page in 0..16 {
            world.write(&device, page * 4096, vec![round; 4096]).expect("it is its own");
        }
        no_reader_gets_between(&mut world, &backup, 1100 * MS);
    }
    assert!(hellos(&world, 1) >= 3, "{} connections", hellos(&world, 1));

    let exports = ["disk1,logs", "disk1,logs:ro"];
    for round in 0..6usize {
        let machines = machines(&[("db1", 1, exports[round % 2]), BACKUP]);
        assert_eq!(world.target.set_machines(machines), Some(1));
        no_reader_gets_between(&mut world, &backup, 20 * MS);
        world.write(&device, 0, vec![round as u8; 5000]).expect("it may still");
    }
    assert_eq!(content(&disk1, 0, 5000), vec![5; 5000]);
}

#[test]
fn a_connection_of_a_day_gets_new_keys_also_when_nothing_is_asked() {
    let (mut world, _) = world(&[DB1]);
    let db1 = initiator(&mut world, 1);
    let device = world.open(&db1, "disk1", WRITER).expect("it may write it");
    world.run(24 * 3600 * SECOND - 60 * SECOND);
    assert_eq!(hellos(&world, 1), 1);
    world.run(120 * SECOND);
    assert_eq!(hellos(&world, 1), 2);
    world.write(&device, 0, vec![1; 5000]).expect("written");
}
