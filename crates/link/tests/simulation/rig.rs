//! A world of a target and several initiators on one wire, for tests that name each event.
//!
//! Invariant: one thread and one clock. Not here: the tests (`reconnection`, `reservations`,
//! `keys`), faults by the hundred (`story`).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex};

use sawmill_device::{
    BlockDevice, BlockDeviceExt, Flags, Geometry, MemoryDevice, Operation, Outcome, Request, Result,
};
use sawmill_link::Unpacker;
use sawmill_link::carrier::{Burst, Peer, Sender};
use sawmill_link::clock::Clock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{PreSharedKey, Security};
use sawmill_link::target::{Arrival, Target, TargetOptions};

use crate::network::{Dice, WorldClock};

pub(crate) const MS: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1000 * MS;
pub(crate) const TARGET: u8 = 0;

pub(crate) type Wire = Arc<Mutex<VecDeque<(u8, u8, Vec<u8>)>>>;

/// Puts packets on the wire, with their sender.
pub(crate) struct WireSender(pub(crate) Wire, pub(crate) u8);

impl Sender for WireSender {
    fn packet_bytes_max(&self, _: &Peer) -> usize {
        1472
    }

    fn send(&self, to: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
        let Peer::Ethernet([to, ..]) = to else { return Err(io::ErrorKind::InvalidInput.into()) };
        let mut wire = self.0.lock().expect("one thread");
        wire.extend((from..burst.len()).map(|packet| (self.1, *to, burst.packet(packet).to_vec())));
        Ok(burst.len() - from)
    }
}

pub(crate) struct World {
    pub(crate) clock: Arc<WorldClock>,
    pub(crate) wire: Wire,
    pub(crate) dice: Dice,
    pub(crate) lose_permille: u64,
    /// The machines that are cut off.
    pub(crate) cut: Vec<u8>,
    /// All packets that arrived at the target.
    pub(crate) sent_packets: Vec<(u8, Vec<u8>)>,
    pub(crate) target: Arc<Target>,
    initiators: BTreeMap<u8, Arc<Initiator>>,
}

fn key() -> Security {
    Security::Key(PreSharedKey::from_bytes([5; 32]))
}

pub(crate) fn ids(dice: &mut Dice) -> Box<dyn FnMut() -> u64 + Send> {
    let mut dice = Dice::new(dice.next());
    Box::new(move || dice.next())
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let (clock, mut dice) = (Arc::new(WorldClock::default()), Dice::new(seed));
        clock.set(SECOND);
        let world: Arc<dyn Clock> = Arc::<WorldClock>::clone(&clock);
        let target = Target::new(TargetOptions::default(), key(), world, ids(&mut dice));
        World {
            clock,
            wire: Arc::default(),
            dice,
            lose_permille: 0,
            cut: Vec::new(),
            sent_packets: Vec::new(),
            target,
            initiators: BTreeMap::new(),
        }
    }

    /// Replaces the target's process.
    pub(crate) fn restart(&mut self, options: TargetOptions) {
        let clock: Arc<dyn Clock> = Arc::<WorldClock>::clone(&self.clock);
        self.target = Target::new(options, key(), clock, ids(&mut self.dice));
        self.wire.lock().expect("one thread").retain(|(from, ..)| *from != TARGET);
    }

    pub(crate) fn show(&self, name: &str, device: impl BlockDevice + 'static, cache_identity: u8) {
        self.target
            .add(name, Arc::new(Unpacker::new(device)), Some([cache_identity; 16]))
            .expect("shown once");
    }

    pub(crate) fn initiator(&mut self, me: u8, options: InitiatorOptions) -> Arc<Initiator> {
        let random = ids(&mut self.dice);
        self.initiator_with(me, options, key(), random)
    }

    pub(crate) fn initiator_with(
        &mut self,
        me: u8,
        options: InitiatorOptions,
        security: Security,
        random: Box<dyn FnMut() -> u64 + Send>,
    ) -> Arc<Initiator> {
        let clock: Arc<dyn Clock> = Arc::<WorldClock>::clone(&self.clock);
        let initiator = Initiator::new(options, security, 1, clock, random);
        let sender = Arc::new(WireSender(Arc::clone(&self.wire), me));
        initiator.add_route(0, sender, Peer::Ethernet([TARGET; 6]), None);
        self.initiators.insert(me, Arc::clone(&initiator));
        initiator
    }

    pub(crate) fn step(&mut self) {
        let now = self.clock.now_ns();
        let due = self
            .initiators
            .values()
            .map(|each| each.deadline_ns())
            .chain([self.target.deadline_ns()])
            .min();
        let waits = self.wire.lock().expect("one thread").is_empty();
        self.clock.set(if waits { due.unwrap_or(now).max(now + 10_000) } else { now + 10_000 });
        let arrived_packets: Vec<_> = self.wire.lock().expect("one thread").drain(..).collect();
        let mut arrived_packets: Vec<_> =
            arrived_packets.into_iter().map(|packet| (self.dice.next(), packet)).collect();
        if self.lose_permille > 0 {
            arrived_packets.sort();
        }
        for (_, (from, to, mut bytes)) in arrived_packets {
            if self.cut.contains(&from)
                || self.cut.contains(&to)
                || self.dice.permille(self.lose_permille)
            {
                continue;
            }
            if to == TARGET {
                self.sent_packets.push((from, bytes.clone()));
                self.to_target(from, &mut bytes);
            } else if let Some(initiator) = self.initiators.get(&to) {
                initiator.receive(&Peer::Ethernet([from; 6]), &mut bytes);
            }
        }
        self.initiators.values().for_each(|each| each.tick());
        self.target.tick();
    }

    pub(crate) fn to_target(&self, from: u8, bytes: &mut [u8]) {
        let sender: Arc<dyn Sender> = Arc::new(WireSender(Arc::clone(&self.wire), TARGET));
        let peer = &Peer::Ethernet([from; 6]);
        self.target.receive(Arrival { sender: &sender, waker: None, peer }, bytes);
    }

    pub(crate) fn run(&mut self, most_ns: u64) {
        let until = self.clock.now_ns() + most_ns;
        while self.clock.now_ns() < until {
            self.step();
        }
    }

    pub(crate) fn open(
        &mut self,
        initiator: &Arc<Initiator>,
        name: &str,
        mode: OpenMode,
    ) -> Result<RemoteDevice> {
        let answer = initiator.request_open(name, mode);
        for _ in 0..100_000 {
            if let Some(answer) = answer.poll() {
                return initiator.opened(name, mode, &answer?);
            }
            self.step();
        }
        panic!("{name} is not opened");
    }

    /// Waits for an answer.
    pub(crate) fn answer(&mut self, outcome_cell: &OutcomeCell) -> Outcome {
        for _ in 0..100_000 {
            if let Some(outcome) = outcome_cell.lock().expect("one thread").take() {
                return outcome;
            }
            self.step();
        }
        panic!("no answer");
    }

    pub(crate) fn write(&mut self, device: &RemoteDevice, address: u64, bytes: Vec<u8>) -> Outcome {
        let outcome_cell = ask(device, Operation::Write, address, bytes);
        self.answer(&outcome_cell)
    }
}

pub(crate) type OutcomeCell = Arc<Mutex<Option<Outcome>>>;

pub(crate) fn request(
    operation: Operation,
    address: u64,
    bytes: Vec<u8>,
) -> (Request, OutcomeCell) {
    let outcome_cell = OutcomeCell::default();
    let cell = Arc::clone(&outcome_cell);
    let on_outcome = move |outcome, _| {
        let before = cell.lock().expect("one thread").replace(outcome);
        assert!(before.is_none(), "it was answered twice");
    };
    (Request::with_bytes(operation, address, Flags::default(), bytes, on_outcome), outcome_cell)
}

pub(crate) fn ask(
    device: &RemoteDevice,
    operation: Operation,
    address: u64,
    bytes: Vec<u8>,
) -> OutcomeCell {
    let (request, outcome_cell) = request(operation, address, bytes);
    device.submit(request);
    outcome_cell
}

pub(crate) fn content(memory: &MemoryDevice, address: u64, length: usize) -> Vec<u8> {
    memory.read_at(address, length).expect("memory reads")
}

/// Memory that keeps writes from an address on without answering them.
pub(crate) struct StuckDevice(
    pub(crate) MemoryDevice,
    pub(crate) u64,
    pub(crate) Mutex<Vec<Request>>,
);

impl BlockDevice for StuckDevice {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn submit(&self, request: Request) {
        if request.operation == Operation::Write && request.address >= self.1 {
            return self.2.lock().expect("one thread").push(request);
        }
        self.0.submit(request);
    }
}

pub(crate) fn small_places() -> InitiatorOptions {
    InitiatorOptions { place_bytes: 4096, places: 8, ..InitiatorOptions::default() }
}
