//! The network: links between two ends, each with its own delay and its own faults.
//!
//! Invariant: what is delivered was sent, or is a damaged copy of it. Not here: when time passes
//! (`story`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use sawmill_link::carrier::{Burst, Peer, Sender};
use sawmill_link::clock::Clock;

/// Random numbers from a seed. Not `sawmill_testkit::Dice`: old seeds must replay the same runs.
pub(crate) struct Dice(pub u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 11) % bound.max(1)
    }

    /// Returns true with this probability, in thousandths.
    pub(crate) fn permille(&mut self, chance: u64) -> bool {
        self.below(1000) < chance
    }
}

/// The world's clock.
#[derive(Default)]
pub(crate) struct WorldClock(std::sync::atomic::AtomicU64);

impl WorldClock {
    pub(crate) fn set(&self, now: u64) {
        self.0.fetch_max(now, std::sync::atomic::Ordering::SeqCst);
    }
}

impl Clock for WorldClock {
    fn now_ns(&self) -> u64 {
        self.0.load(std::sync::atomic::Ordering::SeqCst)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Side {
    Initiator,
    Target,
}

/// What a link does to packets.
#[derive(Clone, Copy, Default)]
pub(crate) struct Faults {
    pub(crate) lose_permille: u64,
    pub(crate) double_permille: u64,
    pub(crate) damage_permille: u64,
    pub(crate) full_permille: u64,
    pub(crate) delay_ns_max: u64,
}

/// A packet on its way.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PacketInFlight {
    pub(crate) at_ns: u64,
    order: u64,
    pub(crate) to: Side,
    pub(crate) link: usize,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) sent: u64,
    pub(crate) lost: u64,
    pub(crate) doubled: u64,
    pub(crate) damaged: u64,
    pub(crate) replayed: u64,
}

/// All links of all initiators.
pub(crate) struct Network {
    pub(crate) dice: Dice,
    pub(crate) flying: BinaryHeap<Reverse<PacketInFlight>>,
    pub(crate) faults: Vec<Faults>,
    /// Cut until then: what is sent is lost.
    pub(crate) cut_until_ns: Vec<u64>,
    /// Without a carrier at the initiator's end.
    pub(crate) dead: Vec<bool>,
    /// The run of the target's process that sends: packets of earlier runs are dropped.
    pub(crate) target_run: u64,
    order: u64,
    /// Packets of any time, to be replayed.
    past: Vec<(Side, usize, Vec<u8>)>,
    pub(crate) counts: Counts,
}

impl Network {
    pub(crate) fn new(seed: u64, links: usize) -> Self {
        Network {
            dice: Dice::new(seed ^ 0x77),
            flying: BinaryHeap::new(),
            faults: vec![Faults::default(); links],
            cut_until_ns: vec![0; links],
            dead: vec![false; links],
            target_run: 0,
            order: 0,
            past: Vec::new(),
            counts: Counts::default(),
        }
    }

    fn fly(&mut self, now: u64, to: Side, link: usize, bytes: Vec<u8>) {
        let delay = 20_000 + self.dice.below(self.faults[link].delay_ns_max + 1);
        self.order += 1;
        self.flying.push(Reverse(PacketInFlight {
            at_ns: now + delay,
            order: self.order,
            to,
            link,
            bytes,
        }));
    }

    /// Whether nothing gets through any of these links.
    pub(crate) fn is_cut(&self, now: u64, links: Range<usize>) -> bool {
        links.into_iter().all(|link| self.dead[link] || now < self.cut_until_ns[link])
    }

    /// Ends all faults.
    pub(crate) fn calm(&mut self) {
        self.faults.fill(Faults::default());
        self.cut_until_ns.fill(0);
    }

    /// Forgets what could be replayed, and frees its memory.
    pub(crate) fn forget(&mut self) {
        self.past = Vec::new();
        self.flying.shrink_to_fit();
    }

    /// Replays packets, perhaps from long ago.
    pub(crate) fn replay(&mut self, now: u64, packets: u64) {
        for _ in 0..packets.min(self.past.len() as u64) {
            let which = self.dice.below(self.past.len() as u64) as usize;
            let (to, link, bytes) = self.past[which].clone();
            self.counts.replayed += 1;
            self.fly(now, to, link, bytes);
        }
    }

    fn send(&mut self, now: u64, to: Side, link: usize, packet: &[u8]) {
        let faults = self.faults[link];
        self.counts.sent += 1;
        if now < self.cut_until_ns[link] || self.dice.permille(faults.lose_permille) {
            self.counts.lost += 1;
            return;
        }
        let mut bytes = packet.to_vec();
        // The first packets are handshakes; of the others, some are kept.
        if self.past.len() < 64 {
            self.past.push((to, link, bytes.clone()));
        } else if self.dice.permille(100) {
            let which = 16 + self.dice.below(48) as usize;
            self.past[which] = (to, link, bytes.clone());
        }
        if self.dice.permille(faults.double_permille) {
            self.counts.doubled += 1;
            self.fly(now, to, link, bytes.clone());
        }
        if self.dice.permille(faults.damage_permille) {
            self.counts.damaged += 1;
            let bit = self.dice.below(bytes.len() as u64 * 8);
            bytes[bit as usize / 8] ^= 1 << (bit % 8);
        }
        self.fly(now, to, link, bytes);
    }
}

/// One end of one link.
pub(crate) struct FalseSender {
    pub(crate) network: Arc<Mutex<Network>>,
    pub(crate) clock: Arc<WorldClock>,
    pub(crate) to: Side,
    pub(crate) link: usize,
    pub(crate) packet_bytes_max: usize,
    /// For a target: the run that this sender belongs to.
    pub(crate) run: Option<u64>,
}

impl Sender for FalseSender {
    fn packet_bytes_max(&self, _: &Peer) -> usize {
        self.packet_bytes_max
    }

    fn send(&self, _: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
        let now = self.clock.now_ns();
        let mut network = self.network.lock().expect("one thread");
        if self.run.is_some_and(|run| run != network.target_run) {
            return Ok(burst.len() - from);
        }
        let full = network.faults[self.link].full_permille;
        for index in 0..burst.len() - from {
            if network.dice.permille(full) {
                return Ok(index);
            }
            network.send(now, self.to, self.link, burst.packet(from + index));
        }
        Ok(burst.len() - from)
    }
}
