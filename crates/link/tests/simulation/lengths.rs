//! The packets of a link are as long as its path carries, also when that changes.
//!
//! Invariant: one thread and one clock. Not here: loss by chance (`story`).

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};

use sawmill_device::{BlockDevice, Flags, MemoryDevice, Operation, Outcome, Request};
use sawmill_link::Unpacker;
use sawmill_link::carrier::{Burst, Peer, Sender};
use sawmill_link::clock::Clock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode};
use sawmill_link::session::{PreSharedKey, Security};
use sawmill_link::target::{Arrival, Target, TargetOptions};

use crate::network::{Dice, Side, WorldClock};

const SECOND: u64 = 1_000_000_000;
const CARRIER_BYTES: usize = 8972;
const ANSWER_NS_MAX: u64 = 600 * SECOND;

type Wire = Arc<Mutex<VecDeque<(Side, Vec<u8>)>>>;

struct End(Wire, Side);

impl Sender for End {
    fn packet_bytes_max(&self, _: &Peer) -> usize {
        CARRIER_BYTES
    }

    fn send(&self, _: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
        let packets = (from..burst.len()).map(|index| (self.1, burst.packet(index).to_vec()));
        self.0.lock().expect("one thread").extend(packets);
        Ok(burst.len() - from)
    }
}

/// Both ends, and a path that loses longer packets than it carries.
struct World {
    clock: Arc<WorldClock>,
    wire: Wire,
    /// The longest packets that the path carries, to the target and back.
    packet_bytes_max: [usize; 2],
    target: Arc<Target>,
    initiator: Arc<Initiator>,
}

fn ids(seed: u64) -> Box<dyn FnMut() -> u64 + Send> {
    let mut dice = Dice::new(seed);
    Box::new(move || dice.next())
}

impl World {
    fn new(packet_bytes_max: [usize; 2]) -> Self {
        let (clock, wire) = (Arc::new(WorldClock::default()), Wire::default());
        clock.set(SECOND);
        let world: Arc<dyn Clock> = Arc::<WorldClock>::clone(&clock);
        let key = || Security::Key(PreSharedKey::from_bytes([5; 32]));
        let target = Target::new(TargetOptions::default(), key(), Arc::clone(&world), ids(1));
        target
            .add("disk", Arc::new(Unpacker::new(MemoryDevice::new(1 << 20))), None)
            .expect("shown once");
        let initiator = Initiator::new(InitiatorOptions::default(), key(), 1, world, ids(2));
        let sender = Arc::new(End(Arc::clone(&wire), Side::Target));
        initiator.add_route(0, sender, Peer::Ethernet([1; 6]), None);
        World { clock, wire, packet_bytes_max, target, initiator }
    }

    fn packet_bytes(&self) -> usize {
        self.initiator.status().links.first().map_or(0, |link| link.packet_bytes)
    }

    fn until(&mut self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let end_ns = self.clock.now_ns() + ANSWER_NS_MAX;
        let back: Arc<dyn Sender> = Arc::new(End(Arc::clone(&self.wire), Side::Initiator));
        while !condition(self) {
            let now = self.clock.now_ns();
            assert!(now < end_ns, "timed out: {what}");
            let arrived_packets: Vec<_> = self.wire.lock().expect("one thread").drain(..).collect();
            let due = self.initiator.deadline_ns().min(self.target.deadline_ns());
            self.clock.set(if arrived_packets.is_empty() {
                due.max(now + 10_000)
            } else {
                now + 10_000
            });
            for (to, mut bytes) in arrived_packets {
                match to {
                    Side::Target if bytes.len() <= self.packet_bytes_max[0] => {
                        let from =
                            Arrival { sender: &back, waker: None, peer: &Peer::Ethernet([2; 6]) };
                        self.target.receive(from, &mut bytes);
                    }
                    Side::Initiator if bytes.len() <= self.packet_bytes_max[1] => {
                        self.initiator.receive(&Peer::Ethernet([1; 6]), &mut bytes);
                    }
                    _ => {}
                }
            }
            self.initiator.tick();
            self.target.tick();
        }
    }

    /// Moves 64 KiB in each direction.
    fn moves_bytes(&mut self) {
        let request = self.initiator.request_open("disk", OpenMode::default());
        let mut outcome = None;
        self.until("the disk opens", |_| {
            outcome = outcome.take().or_else(|| request.poll());
            outcome.is_some()
        });
        let answer = outcome.expect("just seen").expect("it opens");
        let disk = self.initiator.opened("disk", OpenMode::default(), &answer).expect("it opens");
        for operation in [Operation::Write, Operation::Read] {
            let done = Arc::new(Mutex::new(None));
            let outcome_cell = Arc::clone(&done);
            let on_outcome = move |outcome: Outcome, _| {
                *outcome_cell.lock().expect("one thread") = Some(outcome.is_ok())
            };
            disk.submit(Request::with_bytes(
                operation,
                0,
                Flags::default(),
                vec![7; 64 << 10],
                on_outcome,
            ));
            self.until("64 KiB move", |_| done.lock().expect("one thread").is_some());
            assert_eq!(done.lock().expect("one thread").take(), Some(true));
        }
    }
}

#[test]
fn a_path_that_carries_short_packets_only_is_used_with_these() {
    let mut world = World::new([1500, 1500]);
    world.until("the link is joined", |world| world.packet_bytes() == 1420);
    world.moves_bytes();
}

#[test]
fn a_path_that_carries_less_back_than_there_is_used_and_stays_in_use() {
    let mut world = World::new([9000, 1500]);
    world.until("the link is joined", |world| world.packet_bytes() == 1420);
    let later_ns = world.clock.now_ns() + 120 * SECOND;
    while world.clock.now_ns() < later_ns {
        world.moves_bytes();
        let next_ns = world.clock.now_ns() + SECOND;
        world.until("a while", |world| world.clock.now_ns() >= next_ns);
    }
    assert_eq!(world.packet_bytes(), 1420);
}

#[test]
fn a_link_that_was_joined_with_short_packets_uses_long_ones_once_its_path_carries_them() {
    let mut world = World::new([1500, 1500]);
    world.until("the link is joined", |world| world.packet_bytes() == 1420);
    world.packet_bytes_max = [9000, 9000];
    world.until("its packets use the carrier's full length", |world| {
        world.packet_bytes() == CARRIER_BYTES
    });
    world.moves_bytes();
}
