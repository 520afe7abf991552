//! A peer of the link that sends anything, valid packets and invalid ones, to a real target and a
//! real initiator without a key.
//!
//! Invariants: a sender's bytes can end only its own connection: afterwards another initiator opens
//! the export, writes and reads. Each request of an initiator is answered once.
//!
//! Not here: the decoders alone (`link`); honest peers over a network that loses and reorders
//! (`crates/link/tests/simulation`).

use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use sawmill_device::{BlockDevice, Flags, MemoryDevice, Operation as Asks, Request};
use sawmill_format::crc::crc32c;
use sawmill_format::link::control::{OPEN_TAKE_OVER, OpenAnswer};
use sawmill_format::link::greeting::{Cookie, GREETING_BYTES_MAX, Hello, Welcome};
use sawmill_format::link::statement::{
    Body, Command, Note, NoteKind, Operation, Reply, Statement, Statements,
};
use sawmill_format::link::{HEADER_BYTES, Packet, PacketKind, TAIL_BYTES};
use sawmill_link::Unpacker;
use sawmill_link::carrier::{Burst, Peer, Sender};
use sawmill_link::clock::Clock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{Greeting, HANDSHAKE_BYTES, Security, answer};
use sawmill_link::target::{Arrival, Target, TargetOptions};

const PROLOGUE: &[u8] = b"sawmill link 1";
const PACKET_BYTES: usize = 1400;
const PLACES: u16 = 4;
const PLACE_BYTES: u32 = 4096;
/// Small, so that many of them cost little.
const DEVICE_BYTES: u64 = 64 << 10;

/// The packets that were sent, for the checks.
#[derive(Default)]
struct Wire(Mutex<Vec<Vec<u8>>>);

impl Sender for Wire {
    fn packet_bytes_max(&self, _: &Peer) -> usize {
        PACKET_BYTES
    }

    fn send(&self, _: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
        let mut packets = self.0.lock().expect("no thread panics with it");
        // Any network drops a flood of answers.
        let room = 256usize.saturating_sub(packets.len());
        packets.extend((from..burst.len()).take(room).map(|index| burst.packet(index).to_vec()));
        Ok(burst.len() - from)
    }
}

impl Wire {
    /// Takes out what was sent. All of them must be valid packets.
    fn take(&self) -> Vec<(Packet, Vec<u8>)> {
        let packets = std::mem::take(&mut *self.0.lock().expect("no thread panics with it"));
        let checked = packets.into_iter().map(|bytes| {
            let packet = Packet::decode(&bytes).expect("our own packets can be read");
            assert_eq!(packet.length as usize, bytes.len());
            if packet.kind == PacketKind::Sealed {
                let (covered, tail) = bytes.split_at(bytes.len() - TAIL_BYTES);
                assert_eq!(tail[..4], crc32c(covered).to_le_bytes());
                assert!(
                    Statements::new(&covered[HEADER_BYTES..]).all(|statement| statement.is_ok()),
                    "so can their statements"
                );
            }
            (packet, bytes)
        });
        checked.collect()
    }
}

/// The statements of a packet that an end sent.
fn statements(packet: &(Packet, Vec<u8>)) -> Vec<Statement<'_>> {
    let body = &packet.1[HEADER_BYTES..packet.1.len() - TAIL_BYTES];
    if packet.0.kind == PacketKind::Sealed {
        Statements::new(body).flatten().collect()
    } else {
        Vec::new()
    }
}

#[derive(Default)]
struct HandClock(AtomicU64);

impl Clock for HandClock {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Numbers that need not be unguessable here.
fn counter(from: u64) -> Box<dyn FnMut() -> u64 + Send> {
    let mut next = from;
    Box::new(move || {
        next += 1;
        next
    })
}

/// One end of a connection, driven by hand: it seals packets for the other end.
struct RawEnd {
    connection: u64,
    number: u64,
}

impl RawEnd {
    fn packet(&mut self, kind: PacketKind, link: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let tail_bytes = if kind == PacketKind::Sealed { TAIL_BYTES } else { 0 };
        let length = (HEADER_BYTES + body.len() + tail_bytes) as u32;
        Packet { kind, length, connection: self.connection, link, number: self.number }
            .encode(&mut bytes);
        self.number += 1;
        bytes.extend_from_slice(body);
        if kind == PacketKind::Sealed {
            let crc = crc32c(&bytes).to_le_bytes();
            bytes.extend([&crc[..], &[0; 12]].concat());
        }
        bytes
    }

    fn packet_of(&mut self, write: impl FnOnce(&mut Body<'_>)) -> Vec<u8> {
        let mut room = vec![0; PACKET_BYTES - HEADER_BYTES - TAIL_BYTES];
        let mut body = Body::new(&mut room);
        write(&mut body);
        let used = body.used();
        self.packet(PacketKind::Sealed, 0, &room[..used])
    }

    /// The pieces of an input: two bytes of length, one byte of choices, then the bytes. Choices:
    /// bits 0 to 2 the link, 3 to 5 the kind of piece, 6 and 7 how much time passes.
    fn pieces(&mut self, input: &[u8]) -> Vec<(Vec<u8>, u64)> {
        let mut pieces = Vec::new();
        let mut rest = input;
        while let Some((head, behind)) = rest.split_first_chunk::<3>() {
            let length = usize::from(u16::from_le_bytes([head[0], head[1]])).min(behind.len());
            let (body, behind) = behind.split_at(length);
            rest = behind;
            let how = head[2];
            let packet = match how >> 3 & 7 {
                0..=4 => self.packet(PacketKind::Sealed, how & 7, body),
                5 => {
                    let kinds = [PacketKind::Hello, PacketKind::Retry];
                    self.packet(kinds[usize::from(how >> 1 & 1)], how & 1, body)
                }
                6 => {
                    let kinds = [PacketKind::Welcome, PacketKind::Unknown, PacketKind::Cookie];
                    self.packet(kinds[usize::from(how & 7).min(2)], how & 1, body)
                }
                _ => body.to_vec(),
            };
            pieces.push((packet, [0, 2_000_000, 60_000_000, 2_000_000_000][usize::from(how >> 6)]));
        }
        pieces
    }
}

/// A target with one export, and what its packets go to.
struct TestTarget {
    target: Arc<Target>,
    wire: Arc<Wire>,
    sender: Arc<dyn Sender>,
    clock: Arc<HandClock>,
}

const STRANGER: Peer = Peer::Ethernet([2, 0, 0, 0, 0, 1]);

impl TestTarget {
    fn new() -> Self {
        let clock = Arc::new(HandClock::default());
        let options = TargetOptions {
            places_max: PLACES,
            place_bytes_max: PLACE_BYTES,
            ..TargetOptions::default()
        };
        let target = Target::new(options, Security::Insecure, clock.clone(), counter(1 << 32));
        let device = Arc::new(Unpacker::new(MemoryDevice::new(DEVICE_BYTES)));
        target.add("disk", device, None).expect("a name that is free");
        let wire = Arc::new(Wire::default());
        TestTarget { target, sender: wire.clone(), wire, clock }
    }

    fn receive(&self, mut packet: Vec<u8>) {
        self.target
            .receive(Arrival { sender: &self.sender, waker: None, peer: &STRANGER }, &mut packet);
        self.target.tick();
    }

    /// Connects as the initiator `instance`, joins link 0 and opens the export.
    fn connect(&self, instance: u8) -> RawEnd {
        self.wire.take();
        let hello = Hello {
            versions: (1, 1),
            places: PLACES,
            place_bytes: PLACE_BYTES,
            connection: 1 << 40 | u64::from(instance),
            instance: [instance; 16],
            links: 2,
            name: String::new(),
        };
        let payload = hello.encode().expect("a hello");
        let mut message = vec![0; GREETING_BYTES_MAX + HANDSHAKE_BYTES];
        let (mut greeting, bytes) =
            Greeting::new(&Security::Insecure, PROLOGUE, &payload, &mut message)
                .expect("a message");
        let mut mouth = RawEnd { connection: 0, number: 0 };
        self.receive(mouth.packet(PacketKind::Hello, 0, &message[..bytes]));
        let mut answers = self.wire.take();
        // After many hellos, the target demands proof that a sender receives at its address.
        if let Some((_, challenge)) =
            answers.iter().find(|(packet, _)| packet.kind == PacketKind::Cookie)
        {
            let cookie =
                Cookie::decode(&challenge[HEADER_BYTES..]).expect("our own can be read").cookie;
            // The target accepts few from one source in a period.
            self.clock.0.fetch_add(1_000_000_000, Ordering::Relaxed);
            self.receive(mouth.packet(
                PacketKind::Retry,
                0,
                &[&cookie[..], &message[..bytes]].concat(),
            ));
            answers = self.wire.take();
        }
        let welcome = answers.iter().filter(|(packet, _)| packet.kind == PacketKind::Welcome);
        let welcome =
            welcome.filter_map(|(_, bytes)| greeting.finish(&bytes[HEADER_BYTES..]).ok()).next();
        let (_, payload) = welcome.expect("a hello is answered");
        mouth.connection = Welcome::decode(&payload).expect("a welcome").connection;
        let join = Note { kind: NoteKind::Join, link: 0, packet_bytes: 1200, token: 9 };
        self.receive(mouth.packet_of(|body| assert!(body.note(&join))));
        let flags = OPEN_TAKE_OVER;
        let open = Command { address: 0, ..command(Operation::Open, 1, flags, 4) };
        self.receive(mouth.packet_of(|body| {
            assert!(body.command(&open, 4, |into| into.copy_from_slice(b"disk")))
        }));
        mouth
    }

    /// The bytes of the reply to place 0, use `use_number`.
    fn reply(&self, use_number: u64) -> Option<(u8, Vec<u8>)> {
        let packets = self.wire.take();
        let mut replies =
            packets.iter().flat_map(statements).filter_map(|statement| match statement {
                Statement::Reply(reply, inline)
                    if reply.place == 0 && reply.use_number == use_number =>
                {
                    Some((reply.status, inline.to_vec()))
                }
                _ => None,
            });
        replies.next_back()
    }
}

fn command(operation: Operation, use_number: u64, flags: u8, length: u64) -> Command {
    Command { operation, place: 0, flags, export: 0, use_number, address: 1000, length }
}

/// Any bytes to a target, as its peer's.
pub(crate) fn target(input: &[u8]) {
    let test_target = TestTarget::new();
    let mut mouth = test_target.connect(1);
    let (status, opened) = test_target.reply(1).expect("an open is answered");
    assert_eq!(
        (status, OpenAnswer::decode(&opened).map(|opened| opened.size_bytes)),
        (0, Ok(DEVICE_BYTES))
    );
    for (packet, later_ns) in mouth.pieces(input) {
        test_target.clock.0.fetch_add(later_ns, Ordering::Relaxed);
        test_target.receive(packet);
        test_target.wire.take();
    }
    // Another initiator takes the export over: a peer's bytes may end its own connection only
    // (P81).
    let mut other = test_target.connect(2);
    let (status, opened) = test_target.reply(1).expect("another is served all the same");
    assert_eq!((status, OpenAnswer::decode(&opened).map(|opened| opened.export)), (0, Ok(0)));
    let write = command(Operation::Write, 2, 0, 130);
    test_target.receive(
        other.packet_of(|body| assert!(body.command(&write, 130, |into| into.fill(0x5a)))),
    );
    assert_eq!(test_target.reply(2), Some((0, Vec::new())));
    let read = command(Operation::Read, 3, 0, 130);
    test_target.receive(other.packet_of(|body| assert!(body.command(&read, 0, |_| ()))));
    assert_eq!(test_target.reply(3), Some((0, vec![0x5a; 130])));
    // A connection keeps itself alive until it is closed.
    test_target.target.close();
    assert!(test_target.target.status().is_empty());
}

/// An initiator, and what its packets go to.
struct Asker {
    initiator: Arc<Initiator>,
    wire: Arc<Wire>,
    clock: Arc<HandClock>,
}

impl Asker {
    /// An initiator that is connected to a target made of `mouth`, with link 0 joined.
    fn connected() -> (Self, RawEnd) {
        let clock = Arc::new(HandClock::default());
        let options = InitiatorOptions {
            places: PLACES,
            place_bytes: PLACE_BYTES,
            ..InitiatorOptions::default()
        };
        let initiator = Initiator::new(options, Security::Insecure, 2, clock.clone(), counter(1));
        let wire = Arc::new(Wire::default());
        initiator.add_route(0, wire.clone(), STRANGER, None);
        let asker = Asker { initiator, wire, clock };
        let mut mouth = RawEnd { connection: 0, number: 0 };
        let packets = asker.wire.take();
        let hello =
            packets.iter().find(|(packet, _)| packet.kind == PacketKind::Hello).expect("it greets");
        let mut message = vec![0; GREETING_BYTES_MAX + HANDSHAKE_BYTES];
        let greet = |payload: &[u8]| {
            let hello = Hello::decode(payload).expect("its hello can be read");
            mouth.connection = hello.connection;
            let welcome = Welcome {
                version: 1,
                links: 2,
                places: PLACES,
                place_bytes: PLACE_BYTES,
                connection: 77,
                instance: [7; 16],
                silence_max_s: 120,
                name: String::new(),
            };
            welcome.encode().expect("a welcome")
        };
        let security = Security::Insecure;
        let (_, bytes) = answer(&security, PROLOGUE, &hello.1[HEADER_BYTES..], greet, &mut message)
            .expect("its hello is good");
        asker.receive(mouth.packet(PacketKind::Welcome, 0, &message[..bytes]));
        asker.clock.0.fetch_add(1_000_000, Ordering::Relaxed);
        asker.initiator.tick();
        let packets = asker.wire.take();
        let join = packets.iter().flat_map(statements).find_map(|statement| match statement {
            Statement::Note(note) if note.kind == NoteKind::Join => Some(note),
            _ => None,
        });
        let joined_note = Note { kind: NoteKind::Joined, ..join.expect("it joins") };
        asker.receive(mouth.packet_of(|body| assert!(body.note(&joined_note))));
        (asker, mouth)
    }

    fn receive(&self, mut packet: Vec<u8>) {
        self.initiator.receive(&STRANGER, &mut packet);
        self.initiator.tick();
    }

    fn open(&self, end: &mut RawEnd) -> RemoteDevice {
        let pending = self.initiator.request_open("disk", OpenMode::default());
        let packets = self.wire.take();
        let open = packets.iter().flat_map(statements).find_map(|statement| match statement {
            Statement::Command(command, _) if command.operation == Operation::Open => Some(command),
            _ => None,
        });
        let open = open.expect("it asks");
        let opened = OpenAnswer {
            export: 0,
            size_bytes: DEVICE_BYTES,
            block_bytes: 512,
            preferred_bytes: 4096,
            request_bytes_max: 1 << 20,
            read_only: false,
            shared_cache: true,
            discard: true,
            write_zeroes: true,
            allocation: true,
            reservation: 1,
            cache_identity: [1; 16],
        };
        let bytes = opened.encode();
        let length = bytes.len() as u32;
        let reply = Reply { place: open.place, use_number: open.use_number, status: 0, length };
        self.receive(end.packet_of(|body| {
            assert!(body.reply(&reply, bytes.len(), |into| into.copy_from_slice(&bytes)));
        }));
        let bytes = pending.poll().expect("the answer is there").expect("it is a good one");
        self.initiator.opened("disk", OpenMode::default(), &bytes).expect("a device")
    }
}

/// Any bytes to an initiator, as its target's.
pub(crate) fn initiator(input: &[u8]) {
    let (asker, mut mouth) = Asker::connected();
    let device = asker.open(&mut mouth);
    let answers = Arc::new(AtomicUsize::new(0));
    // The first requests have places and are in flight; the last ones wait.
    let requests: [(Asks, u64); 7] = [
        (Asks::Read, 300),
        (Asks::Write, 300),
        (Asks::Allocation, 8192),
        (Asks::Flush, 0),
        (Asks::Read, 9000),
        (Asks::Discard, 512),
        (Asks::Write, 1),
    ];
    for (asks, length) in requests {
        let bytes = vec![0xc3; length as usize];
        let answers = answers.clone();
        let on_outcome = move |_, _| {
            answers.fetch_add(1, Ordering::Relaxed);
        };
        device.submit(Request::with_bytes(asks, 4096, Flags::default(), bytes, on_outcome));
    }
    asker.wire.take();
    for (packet, later_ns) in mouth.pieces(input) {
        asker.clock.0.fetch_add(later_ns, Ordering::Relaxed);
        asker.receive(packet);
        asker.wire.take();
        assert!(answers.load(Ordering::Relaxed) <= requests.len(), "no request is answered twice");
    }
    drop(device);
    // Requests without an answer fail here. None may be forgotten.
    asker.initiator.close();
    assert_eq!(answers.load(Ordering::Relaxed), requests.len(), "each request is answered once");
}
