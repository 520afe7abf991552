//! Attaching: again and again, while others have the export or flood the target, and across
//! restarts of the target.
//!
//! Not here: the same by seed, in a simulated network (`tests/simulation`).

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind, MemoryDevice};
use sawmill_format::link::greeting::Hello;
use sawmill_format::link::{HEADER_BYTES, Packet, PacketKind};
use sawmill_link::carrier::{Burst, LinkAddress, Peer, Sender};
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode};
use sawmill_link::session::{Greeting, PreSharedKey, Security, unguessable};
use sawmill_link::target::{Arrival, Target, TargetOptions};

use crate::ending::Cable;
use crate::pair::{ANSWER_TIME_MAX, attach, free_addresses, key, listen, open};

#[test]
fn a_target_is_attached_again_and_again() {
    let addresses = free_addresses(&["udp", "udp", "tcp"]);
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    let listener = listen(memory, &addresses, key());
    for round in 0..100u8 {
        let attached = attach(&addresses, key(), InitiatorOptions::default());
        let answer = attached.initiator().request_open("disk", OpenMode::default());
        let answer = answer.wait(ANSWER_TIME_MAX / 10);
        let ends = (attached.initiator().status(), listener.target().status().len());
        assert!(answer.is_ok(), "round {round}: {answer:?} {ends:#?}");
        let device =
            attached.initiator().opened("disk", OpenMode::default(), &answer.expect("an answer"));
        let device = device.expect("a device");
        device.write_at(u64::from(round), &[round]).expect("written");
        assert_eq!(device.read_at(u64::from(round), 1).expect("read"), [round]);
    }
}

#[test]
fn another_initiators_export_is_refused_shared_by_agreement_or_taken_over_for_good() {
    let addresses = free_addresses(&["udp"]);
    let _listener = listen(Arc::new(MemoryDevice::new(1 << 20)), &addresses, key());
    let (first, second) = (
        attach(&addresses, key(), InitiatorOptions::default()),
        attach(&addresses, key(), InitiatorOptions::default()),
    );
    let ask = |attached: &sawmill_link::threads::InitiatorThreads, mode: OpenMode| {
        let answer = attached.initiator().request_open("disk", mode).wait(ANSWER_TIME_MAX)?;
        attached.initiator().opened("disk", mode, &answer)
    };
    let alone = OpenMode::default();
    let device = ask(&first, alone).expect("it is free");
    device.write_at(0, b"first").expect("written");
    let error = ask(&second, alone).err().expect("the first one has it");
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let new_device = ask(&second, OpenMode { take_over: true, ..alone }).expect("taken over");
    assert_eq!(new_device.read_at(0, 5).expect("read"), b"first");
    new_device.write_at(0, b"other").expect("written");
    let error = device.write_at(0, b"first").expect_err("it was taken over");
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    assert_eq!(new_device.read_at(0, 5).expect("read"), b"other");
    let readers = OpenMode { read_only: true, shared: true, take_over: false };
    assert!(ask(&first, readers).is_err(), "a writer that is alone shares with no reader");
}

#[test]
fn a_missing_export_and_another_key_are_reported() {
    let addresses = free_addresses(&["udp"]);
    let _listener = listen(Arc::new(MemoryDevice::new(1 << 20)), &addresses, key());
    let attached = attach(&addresses, key(), InitiatorOptions::default());
    let answer =
        attached.initiator().request_open("disc", OpenMode::default()).wait(ANSWER_TIME_MAX);
    let error = answer.expect_err("no such export");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("the target has: disk"), "{error}");
    let other = Security::Key(PreSharedKey::from_bytes([1; 32]));
    let options = InitiatorOptions { timeout_s: 1, ..InitiatorOptions::default() };
    let stranger = attach(&addresses, other, options);
    let error =
        stranger.initiator().request_open("disk", OpenMode::default()).wait(ANSWER_TIME_MAX);
    let error = error.expect_err("another key");
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(error.to_string().contains("compare the key files"), "{error}");
}

/// Accepts packets and loses them.
struct NullSender;

impl Sender for NullSender {
    fn packet_bytes_max(&self, _: &Peer) -> usize {
        1472
    }

    fn send(&self, _: &Peer, burst: &Burst, from: usize) -> std::io::Result<usize> {
        Ok(burst.len() - from)
    }
}

#[test]
fn a_flood_of_hellos_takes_a_few_entries_and_no_connection() {
    let options = TargetOptions::default();
    let target = Target::new(options, Security::Insecure, Arc::new(SteadyClock), unguessable());
    let sender: Arc<dyn Sender> = Arc::new(NullSender);
    for number in 1..5000u64 {
        let hello = Hello {
            versions: (1, 1),
            places: 256,
            place_bytes: 256 << 10,
            connection: number,
            instance: [3; 16],
            links: 1,
            name: "flood".into(),
        };
        let payload = hello.encode().expect("a hello");
        let mut packet = vec![0; 1472];
        let room = &mut packet[HEADER_BYTES..];
        let (_, bytes) =
            Greeting::new(&Security::Insecure, b"sawmill link 1", &payload, room).expect("made");
        packet.truncate(HEADER_BYTES + bytes);
        let length = packet.len() as u32;
        let header = Packet { kind: PacketKind::Hello, length, connection: 0, link: 0, number: 0 };
        header.encode(&mut packet);
        let peer = Peer::Ethernet([2, 0, 0, 0, 0, 9]);
        target.receive(Arrival { sender: &sender, waker: None, peer: &peer }, &mut packet);
    }
    assert_eq!(target.unfinished(), 8);
    assert!(target.status().is_empty());
}

#[test]
fn forged_and_repeated_packets_are_not_taken_and_those_of_a_connection_are() {
    let (forward, backward) = (Arc::<Cable>::default(), Arc::<Cable>::default());
    let clock = Arc::new(SteadyClock);
    let target = Target::new(TargetOptions::default(), key(), clock.clone(), unguessable());
    let initiator = Initiator::new(InitiatorOptions::default(), key(), 1, clock, unguessable());
    let answers: Arc<dyn Sender> = backward.clone();
    let receive = |mut packet: Vec<u8>| {
        let peer = &Peer::Stream;
        target.receive(Arrival { sender: &answers, waker: None, peer }, &mut packet)
    };
    initiator.add_route(0, forward.clone(), Peer::Stream, None);
    let answer = initiator.request_open("disk", OpenMode::default());
    let mut taken_count = 0;
    while answer.poll().is_none() {
        initiator.tick();
        while let Some(packet) = forward.next() {
            let mut forged = packet.clone();
            *forged.last_mut().expect("it has bytes") ^= 1;
            assert!(!receive(forged), "it is not the initiator's");
            taken_count += u32::from(receive(packet.clone()));
            assert!(!receive(packet), "it is a repetition");
        }
        target.tick();
        while let Some(mut packet) = backward.next() {
            initiator.receive(&Peer::Stream, &mut packet);
        }
    }
    assert!(taken_count > 0);
}

#[test]
fn threads_write_and_read_while_the_target_restarts_again_and_again() {
    let addresses = free_addresses(&["udp", "tcp", "udp"]);
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    let mut listener = Some(listen(Arc::clone(&memory) as Arc<dyn BlockDevice>, &addresses, key()));
    let attached = attach(&addresses, key(), InitiatorOptions::default());
    let device = open(&attached);
    let is_stopped = AtomicBool::new(false);
    let write = |thread: u64| {
        let mut round = 0u64;
        let mut length = 1;
        while !is_stopped.load(Ordering::SeqCst) || round < 10 {
            round += 1;
            length = (length * 7 + 13) % 60_000 + 1;
            let bytes = vec![(round % 251) as u8; length];
            device.write_at(thread << 17, &bytes).expect("written");
            let read = device.read_at(thread << 17, length).expect("read");
            assert!(read == bytes, "thread {thread}, round {round}: it reads something else");
        }
        round
    };
    let write = &write;
    let rounds = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(move || write(thread))).collect();
        for _ in 0..12 {
            let written = memory.read_at(0, 1).expect("memory reads")[0];
            let began = std::time::Instant::now();
            // Waits for some progress before the next end.
            while memory.read_at(0, 1).expect("memory reads")[0] == written
                && began.elapsed() < ANSWER_TIME_MAX
            {
                std::thread::yield_now();
            }
            drop(listener.take());
            listener = Some(listen(Arc::clone(&memory) as Arc<dyn BlockDevice>, &addresses, key()));
        }
        is_stopped.store(true, Ordering::SeqCst);
        threads.into_iter().map(|thread| thread.join().expect("no thread fails")).sum::<u64>()
    });
    let status = attached.initiator().status();
    assert!(rounds >= 40);
    assert_eq!((status.pending, status.places_free), (0, status.places), "places leaked");
}

#[test]
fn silent_streams_shut_no_client_out() {
    let addresses = free_addresses(&["tcp"]);
    let _listener = listen(Arc::new(MemoryDevice::new(1 << 20)), &addresses, key());
    let LinkAddress::Tcp(host_port) = &addresses[0] else { panic!("it was asked for TCP") };
    let to = host_port.resolve().expect("an address");
    let silent: Vec<_> = (0..300).map(|_| TcpStream::connect(to).expect("it listens")).collect();
    // All are accepted, or queued before us.
    let attached = attach(&addresses, key(), InitiatorOptions::default());
    let answer =
        attached.initiator().request_open("disk", OpenMode::default()).wait(ANSWER_TIME_MAX / 12);
    assert!(answer.is_ok(), "{} silent streams are in the way: {answer:?}", silent.len());
}
