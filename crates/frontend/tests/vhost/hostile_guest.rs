//! The harm that no guest and no frontend can do, whatever they write.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use sawmill_frontend::vhost::VhostDoor;
use sawmill_frontend::{Door, Stop};
use vhost::VhostBackend;

use crate::TestFolder;
use crate::devices::PausableDevice;
use crate::guest::*;
use crate::restart::PATIENCE;

/// After trouble of one guest, the door serves the next.
fn serves_another(folder: &TestFolder) {
    let mut guest = Guest::new(1);
    let _front = guest.connect(&folder.path());
    assert_eq!(guest.execute(0, STORE, 0, &[1; 512], 0).0, 0);
}

#[test]
fn a_malformed_chain_stops_its_queue_and_nothing_else() {
    let (header, status, outside) = (header_at(0), status_at(0), MEMORY_BYTES);
    let good = (header, 16, NEXT, 1);
    let cases: Vec<(&str, Vec<Entry>)> = vec![
        ("a loop of one", vec![(header, 16, NEXT, 0)]),
        ("a loop of two", vec![good, (header, 16, NEXT, 0)]),
        ("a next that is no entry", vec![(header, 16, NEXT, QUEUE_SIZE)]),
        ("a status outside memory", vec![good, (outside, 1, WRITE, 0)]),
        (
            "data that reaches outside",
            vec![good, (outside - 512, 513, WRITE | NEXT, 2), (status, 1, WRITE, 0)],
        ),
        ("an address that overflows", vec![good, (u64::MAX, 2, WRITE, 0)]),
        ("the longest length", vec![good, (header, u32::MAX, WRITE, 0)]),
        ("an empty part", vec![good, (status, 0, WRITE, 0)]),
        ("no status", vec![(header, 16, 0, 0)]),
        ("read-only after write-only", vec![(status, 1, WRITE | NEXT, 1), (header, 16, 0, 0)]),
        ("an indirect table of half an entry", vec![(header, 24, INDIRECT, 0)]),
        ("an empty indirect table", vec![(header, 0, INDIRECT, 0)]),
        ("a huge indirect table", vec![(0, 16 * 1025, INDIRECT, 0)]),
        ("an indirect table outside memory", vec![(outside, 16, INDIRECT, 0)]),
        ("an indirect table at the end of addresses", vec![(u64::MAX - 15, 32, INDIRECT, 0)]),
        (
            "an indirect table with a next",
            vec![(header, 16, INDIRECT | NEXT, 1), (status, 1, WRITE, 0)],
        ),
        // The table's second entry is itself such a table.
        (
            "a table in a table",
            vec![(ring(0, 16), 16, INDIRECT, 0), (ring(0, 32), 16, INDIRECT, 0)],
        ),
    ];
    for (what, entries) in cases {
        let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
        let door = folder.serve(pausable.clone());
        let mut guest = Guest::new(2);
        let front = guest.connect(&folder.path());
        guest.offer_raw(&entries);
        wait_for(&guest.drivers[0].error, what);
        assert_eq!(guest.used(0), 0, "{what} is not answered");
        assert_eq!(pausable.count(), 0, "{what} does not reach the device");
        assert_eq!(door.counts().protocol_violations, 1, "{what}");
        assert_eq!(
            guest.execute(1, STORE, 0, &[1; 512], 0).0,
            0,
            "{what}: the other queue goes on"
        );
        drop(front);
        serves_another(&folder);
    }
}

#[test]
fn an_impossible_available_ring_stops_its_queue() {
    let break_ring = |what: &str, with: &dyn Fn(&mut Guest)| {
        let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
        let _door = folder.serve(pausable.clone());
        let mut guest = Guest::new(1);
        let front = guest.connect(&folder.path());
        pausable.close();
        with(&mut guest);
        guest.kick(0);
        wait_for(&guest.drivers[0].error, what);
        pausable.release_all();
        drop(front);
        serves_another(&folder);
    };
    break_ring("an index that jumps", &|guest| guest.set_available(0, QUEUE_SIZE + 1));
    break_ring("a head that is no entry", &|guest| {
        guest.put(available_at(0) + 4, &QUEUE_SIZE.to_le_bytes());
        guest.set_available(0, 1);
    });
    break_ring("a head that is in flight", &|guest| {
        let head = guest.prepare(0, STORE, 0, &[1; 512], 0);
        guest.offer(0, head);
        guest.offer(0, head);
    });
}

#[test]
fn a_guest_cannot_have_more_in_flight_than_the_limit() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let _door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    guest.indirect = true;
    let _front = guest.connect(&folder.path());
    pausable.close();
    // Each reads 4 MiB, into the same memory: 16 of them are the 64 MiB that may be in flight.
    let mut heads = Vec::new();
    for _ in 0..20 {
        guest.put(header_at(0), &header(READ, 0));
        let parts =
            [(header_at(0), 16, false), (MEMORY_BYTES / 2, 4 << 20, true), (status_at(0), 1, true)];
        let head = guest.lay_out(0, &parts);
        guest.offer(0, head);
        heads.push(head);
    }
    guest.kick(0);
    assert_eq!(pausable.requests(16).len(), 16);
    pausable.release_all();
    for _ in 0..20 {
        guest.wait(0);
    }
    assert_eq!(pausable.count(), 20);
}

#[test]
fn a_frontend_that_breaks_the_protocol_loses_its_connection() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let message = |request: u32, flags: u32, payload: &[u8]| {
        let head = [request, flags, payload.len() as u32];
        [head.iter().flat_map(|field| field.to_ne_bytes()).collect(), payload.to_vec()].concat()
    };
    let huge = [&1u32.to_ne_bytes()[..], &1u32.to_ne_bytes(), &u32::MAX.to_ne_bytes()].concat();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("an unknown message", message(77, 1, &[])),
        ("another version", message(1, 2, &[])),
        ("a reply", message(1, 5, &[])),
        ("a payload beyond every limit", huge),
        ("features that were not offered", message(2, 1, &[0xff; 8])),
        ("a number cut short", message(2, 1, &[0; 7])),
        ("a number too long", message(2, 1, &[0; 9])),
        ("a queue that is none", message(8, 1, &[4, 0, 0, 0, 64, 0, 0, 0])),
        ("a queue size that is no power of two", message(8, 1, &[0, 0, 0, 0, 63, 0, 0, 0])),
        ("a kick without a descriptor", message(12, 1, &[0; 8])),
        ("a kick by polling", message(12, 1, &[0, 1, 0, 0, 0, 0, 0, 0])),
        (
            "memory without descriptors",
            message(5, 1, &[&[1, 0, 0, 0, 0, 0, 0, 0][..], &[1; 32]].concat()),
        ),
        ("a region that overflows", message(37, 1, &[0xff; 40])),
        ("a region that was never added", message(38, 1, &[1; 40])),
        ("configuration out of bounds", message(24, 1, &[0xff; 12])),
        ("an in-flight region for too many", message(31, 1, &[0xff; 20])),
    ];
    for (n, (what, bytes)) in cases.into_iter().enumerate() {
        let mut stream = UnixStream::connect(folder.path()).expect("the door listens");
        stream.write_all(&bytes).expect("it is taken");
        assert_eq!(stream.read(&mut [0; 64]).unwrap_or(0), 0, "{what} is not answered");
        assert_eq!(door.counts().protocol_violations, n as u64 + 1, "{what}");
    }
    serves_another(&folder);
}

#[test]
fn a_frontend_in_the_middle_of_a_word_does_not_hold_up_the_end() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let mut stream = UnixStream::connect(folder.path()).expect("the door listens");
    stream.write_all(&[1, 0, 0, 0, 1]).expect("it is taken");
    while door.counts().connections == 0 {
        std::thread::yield_now();
    }
    door.stop(Stop::Now);
    assert_eq!(stream.read(&mut [0; 64]).unwrap_or(0), 0);
}

#[test]
fn rings_outside_the_guests_memory_are_refused() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let _door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let front = guest.connect(&folder.path());
    let good = guest.rings(0);
    for shift in [MEMORY_BYTES - 0x10000, MEMORY_BYTES, u64::MAX / 2] {
        let mut rings = good;
        rings.used_ring_addr = (good.desc_table_addr + shift) & !0xf;
        assert!(front.set_vring_addr(0, &rings).is_err(), "a used ring {shift:#x} further on");
    }
    front.set_vring_addr(0, &good).expect("these are in memory");
    assert_eq!(guest.execute(0, STORE, 0, &[1; 512], 0).0, 0, "and served again");
}

#[test]
fn a_queue_that_cannot_run_takes_no_other_with_it() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let mut guest = Guest::new(3);
    let front = guest.connect(&folder.path());
    let mut outside = guest.rings(0);
    outside.used_ring_addr += MEMORY_BYTES;
    assert!(front.set_vring_addr(0, &outside).is_err(), "the first queue lies outside memory");
    assert_eq!(door.counts().protocol_violations, 1);
    // A change of what all queues share rebuilds the other two, and so does a takeover.
    let features = front.get_features().expect("an answer") & guest.wants;
    assert!(front.set_features(features).is_err(), "the first queue is no better than before");
    for queue in [1, 2] {
        assert_eq!(guest.execute(queue, STORE, 0, &[1; 512], 0).0, 0, "queue {queue} goes on");
    }
    let quiet_door = door.quiesce(PATIENCE).expect("nothing is slow");
    let pieces = quiet_door.hand_over().expect("it is quiet");
    quiet_door.release();
    let (next, quiet_door) =
        VhostDoor::take_over(folder.options(), pausable.clone(), pieces).expect("it is whole");
    quiet_door.resume();
    assert_eq!(next.counts().protocol_violations, 1, "the status shows that a queue stands still");
    for queue in [1, 2] {
        assert_eq!(
            guest.execute(queue, STORE, 0, &[2; 512], 0).0,
            0,
            "queue {queue} goes on in the next one"
        );
    }
    front.set_vring_addr(0, &guest.rings(0)).expect("these are in memory");
    assert_eq!(
        guest.execute(0, STORE, 0, &[3; 512], 0).0,
        0,
        "and the first one, once it is where it must be"
    );
}

/// An entry of a descriptor table, more or less sensible.
fn entry() -> impl Strategy<Value = Entry> {
    let addresses = prop_oneof![
        Just(header_at(0)),
        Just(status_at(0)),
        Just(ring(0, 0)),
        Just(ring(0, 16)),
        Just(data_at(0)),
        Just(MEMORY_BYTES / 2 - 512),
        Just(u64::MAX - 15),
        any::<u64>().prop_map(|address| address % (MEMORY_BYTES / 2)),
        any::<u64>().prop_map(|address| address | MEMORY_BYTES),
    ];
    let lengths = prop_oneof![
        Just(1u32),
        Just(16),
        Just(32),
        Just(64),
        Just(512),
        Just(4096),
        0u32..100_000,
        any::<u32>()
    ];
    let flags = prop_oneof![
        Just(0u16),
        Just(NEXT),
        Just(WRITE),
        Just(NEXT | WRITE),
        Just(INDIRECT),
        0u16..16
    ];
    (addresses, lengths, flags, 0u16..20)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Nothing is written outside the ranges that the guest has named, nothing hangs, nothing
    /// crashes.
    #[test]
    fn random_rings_do_no_harm(
        entries in prop::collection::vec(entry(), 16),
        heads in prop::collection::vec(0u16..18, 1..8),
        kind in prop_oneof![Just(READ), Just(STORE), Just(DISCARD), 0u32..20],
    ) {
        let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
        let door = folder.serve(pausable.clone());
        let mut guest = Guest::new(1);
        let front = guest.connect(&folder.path());
        // Every valid descriptor that covers a part of the upper half reaches into it from below.
        let lower = MEMORY_BYTES / 2;
        let reaches = |(address, length, ..): &Entry| {
            address.checked_add((*length).into()).is_some_and(|end| end > lower)
        };
        let touched = entries.iter().any(|entry| entry.0 < MEMORY_BYTES && reaches(entry));
        guest.put(lower, &vec![0x5a; lower as usize]);
        guest.put(header_at(0), &header(kind, 1));
        for (n, (address, length, flags, next)) in entries.iter().enumerate() {
            guest.put_descriptor(ring(0, 0), n as u16, (*address, *length), *flags, *next);
        }
        for (n, head) in heads.iter().enumerate() {
            guest.put(available_at(0) + 4 + 2 * n as u64, &head.to_le_bytes());
        }
        guest.set_available(0, heads.len() as u16);
        guest.kick(0);
        // The answer comes when all accepted requests are done.
        let base = front.get_vring_base(0).expect("the queue stops");
        prop_assert!(base <= heads.len() as u32);
        prop_assert_eq!(door.counts().in_flight, 0);
        if !touched {
            prop_assert!(guest.get(lower, lower as usize).iter().all(|byte| *byte == 0x5a));
        }
        drop(front);
        serves_another(&folder);
    }
}
