//! Strangers on a path of 50 ms: thousands of replayed hellos, forged UNKNOWNs, many addresses.
//!
//! Invariant: one thread and one clock; random numbers come from a seed. Not here: real floods
//! (`bench/hostile_link.py`).

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use sawmill_device::MemoryDevice;
use sawmill_format::link::{HEADER_BYTES, Packet, PacketKind};
use sawmill_link::Unpacker;
use sawmill_link::carrier::{Burst, Peer, Sender};
use sawmill_link::clock::Clock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode};
use sawmill_link::session::{PreSharedKey, Security};
use sawmill_link::target::{Arrival, Target, TargetOptions};

use crate::network::{Dice, WorldClock};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
/// In one direction.
const DELAY_NS: u64 = 25 * MS;
const TARGET: u8 = 0;
const USER: u8 = 1;
/// A sender that receives nothing, and one that receives at any number of addresses.
const SPOOFED: u8 = 100;
const THIEF: u8 = 101;
const OPEN_NS_MAX: u64 = 10 * SECOND;

/// (to, from, by), in the order of their times.
type PacketTimeline = Arc<Mutex<BTreeMap<(u64, u64), (Peer, Peer, Vec<u8>)>>>;

fn address(who: u8, which: u8) -> Peer {
    Peer::Ethernet([who, 0, 0, 0, 0, which])
}

fn who(peer: &Peer) -> u8 {
    match peer {
        Peer::Ethernet([who, ..]) => *who,
        Peer::Udp(_) => THIEF,
        Peer::Stream => panic!("no peer has streams here"),
    }
}

/// Packets arrive after a delay.
struct DelayedCarrier {
    flying: PacketTimeline,
    clock: Arc<WorldClock>,
    from: Peer,
}

impl DelayedCarrier {
    fn send(&self, to: Peer, bytes: &[u8]) {
        let mut flying = self.flying.lock().expect("one thread");
        let order = flying.last_key_value().map_or(0, |((_, order), _)| *order) + 1;
        flying.insert((self.clock.now_ns() + DELAY_NS, order), (to, self.from, bytes.to_vec()));
    }
}

impl Sender for DelayedCarrier {
    fn packet_bytes_max(&self, _: &Peer) -> usize {
        1472
    }

    fn send(&self, to: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
        (from..burst.len()).for_each(|index| DelayedCarrier::send(self, *to, burst.packet(index)));
        Ok(burst.len() - from)
    }
}

struct Scene {
    clock: Arc<WorldClock>,
    flying: PacketTimeline,
    dice: Dice,
    target: Arc<Target>,
    user: Arc<Initiator>,
    /// What strangers received, with the address where they received it.
    stranger_packets: Vec<(Peer, Vec<u8>)>,
    /// The user's packets that arrived at the target.
    user_packets: Vec<Vec<u8>>,
}

impl Scene {
    fn new(seed: u64, security: &dyn Fn() -> Security) -> Self {
        let clock = Arc::new(WorldClock::default());
        // The clock does not start at zero.
        clock.set(1000 * SECOND);
        let flying = PacketTimeline::default();
        let mut dice = Dice::new(seed);
        let target = target_of(&clock, security(), dice.next());
        let user = initiator_of(&clock, security(), dice.next());
        Scene {
            clock,
            flying,
            dice,
            target,
            user,
            stranger_packets: Vec::new(),
            user_packets: Vec::new(),
        }
    }

    fn carrier(&self, from: Peer) -> DelayedCarrier {
        DelayedCarrier { flying: Arc::clone(&self.flying), clock: Arc::clone(&self.clock), from }
    }

    fn begin(&self) {
        self.user.add_route(0, Arc::new(self.carrier(address(USER, 0))), address(TARGET, 0), None);
    }

    /// Lets a millisecond pass, and delivers what arrives in it.
    fn pass(&mut self) {
        self.clock.set(self.clock.now_ns() + MS);
        let now = self.clock.now_ns();
        loop {
            let first = {
                let mut flying = self.flying.lock().expect("one thread");
                match flying.first_key_value() {
                    Some(((at, _), _)) if *at <= now => flying.pop_first().expect("there is one").1,
                    _ => break,
                }
            };
            let (to, from, mut bytes) = first;
            match who(&to) {
                TARGET => {
                    if who(&from) == USER {
                        self.user_packets.push(bytes.clone());
                    }
                    let sender: Arc<dyn Sender> = Arc::new(self.carrier(to));
                    self.target
                        .receive(Arrival { sender: &sender, waker: None, peer: &from }, &mut bytes);
                }
                USER => self.user.receive(&from, &mut bytes),
                _ => self.stranger_packets.push((to, bytes)),
            }
        }
        self.target.tick();
        self.user.tick();
    }

    /// The user's packets of these kinds.
    fn user_packets_of(&self, is: impl Fn(PacketKind) -> bool) -> Vec<Vec<u8>> {
        self.user_packets.iter().filter(|bytes| kind_of(bytes).is_some_and(&is)).cloned().collect()
    }

    /// Old hellos of other initiators: this target never answered these handshakes.
    fn old_hellos(&mut self, count: usize, security: &dyn Fn() -> Security) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        for _ in 0..count {
            let flying = PacketTimeline::default();
            let other = initiator_of(&self.clock, security(), self.dice.next());
            let carrier = DelayedCarrier {
                flying: Arc::clone(&flying),
                clock: Arc::clone(&self.clock),
                from: address(USER, 7),
            };
            other.add_route(0, Arc::new(carrier), address(TARGET, 0), None);
            let hello = flying.lock().expect("one thread").pop_first().expect("it greets").1.2;
            all.push(hello);
            other.close();
        }
        all
    }

    /// The user opens the export, with `each` before each millisecond. Returns the time it took.
    fn open(&mut self, most_ns: u64, mut each: impl FnMut(&mut Self)) -> Option<u64> {
        let began = self.clock.now_ns();
        let request = self.user.request_open("disk", OpenMode::default());
        while self.clock.now_ns() < began + most_ns {
            each(self);
            self.pass();
            if let Some(answer) = request.poll() {
                answer.expect("it is opened");
                return Some(self.clock.now_ns() - began);
            }
        }
        None
    }
}

fn target_of(clock: &Arc<WorldClock>, security: Security, seed: u64) -> Arc<Target> {
    let clock: Arc<dyn Clock> = Arc::<WorldClock>::clone(clock);
    let mut ids = Dice::new(seed);
    let target =
        Target::new(TargetOptions::default(), security, clock, Box::new(move || ids.next()));
    target
        .add("disk", Arc::new(Unpacker::new(MemoryDevice::new(1 << 20))), None)
        .expect("the first");
    target
}

fn initiator_of(clock: &Arc<WorldClock>, security: Security, seed: u64) -> Arc<Initiator> {
    let clock: Arc<dyn Clock> = Arc::<WorldClock>::clone(clock);
    let mut ids = Dice::new(seed);
    let options = InitiatorOptions { name: "user".into(), ..InitiatorOptions::default() };
    Initiator::new(options, security, 1, clock, Box::new(move || ids.next()))
}

fn key() -> Security {
    Security::Key(PreSharedKey::from_bytes([5; 32]))
}

fn kind_of(packet: &[u8]) -> Option<PacketKind> {
    Packet::decode(packet).ok().map(|header| header.kind)
}

type Trust<'a> = &'a dyn Fn() -> Security;

/// Runs `callback` with a key and without, with a few seeds each.
fn scenes(mut callback: impl FnMut(&mut Scene, Trust<'_>, &str)) {
    let clear = || Security::Insecure;
    for seed in 1..4 {
        for (trust, name) in [(&key as Trust<'_>, "with a key"), (&clear, "without a key")] {
            callback(&mut Scene::new(seed, trust), trust, &format!("seed {seed} {name}"));
        }
    }
}

#[test]
fn three_thousand_recorded_hellos_a_second_at_50_ms_keep_no_user_out_for_two_seconds() {
    scenes(|scene, trust, scene_name| {
        // So many that hardly one of them still waits for its connection when it is repeated.
        let hellos = scene.old_hellos(2000, trust);
        let mut count = 0usize;
        let mut flood = |scene: &mut Scene| {
            for _ in 0..3 {
                count += 1;
                let to = scene.carrier(address(SPOOFED, (count % 200) as u8));
                DelayedCarrier::send(&to, address(TARGET, 0), &hellos[count % hellos.len()]);
            }
        };
        // The flood has gone on for a while, and has the strangers' entries for the next 600 ms.
        for _ in 0..1400 {
            flood(scene);
            scene.pass();
        }
        scene.begin();
        let took = scene.open(10 * SECOND, flood);
        assert!(took.is_some_and(|took| took < 2 * SECOND), "{scene_name}: {took:?} ns");
        assert!(scene.target.unfinished() <= 9, "{scene_name}: the flood grew");
        let shortest = hellos.iter().map(Vec::len).min().expect("there are some");
        let longest = |kind| {
            let of_kind =
                scene.stranger_packets.iter().filter(|(_, bytes)| kind_of(bytes) == Some(kind));
            of_kind.map(|(_, bytes)| bytes.len()).max()
        };
        assert!(
            longest(PacketKind::Cookie).is_some_and(|most| most < shortest),
            "{scene_name}: it amplifies"
        );
    });
}

#[test]
fn a_thief_of_hellos_that_answers_cookies_at_its_own_address_keeps_no_user_out() {
    scenes(|scene, trust, scene_name| {
        let hellos = scene.old_hellos(40, trust);
        let (mut count, mut cookies) = (0usize, BTreeMap::new());
        let mut flood = |scene: &mut Scene| {
            // A port for each hello shows the thief which hello a cookie is for.
            for (to, bytes) in scene.stranger_packets.drain(..) {
                if let (Peer::Udp(to), Some(PacketKind::Cookie)) = (to, kind_of(&bytes)) {
                    cookies.insert(to.port(), bytes[HEADER_BYTES..][..16].to_vec());
                }
            }
            for _ in 0..3 {
                count += 1;
                let port = (count % hellos.len()) as u16;
                let hello = &hellos[usize::from(port)];
                let packet =
                    cookies.get(&port).map_or(hello.clone(), |cookie| retry(hello, cookie));
                let from = Peer::Udp(([10, 0, 0, THIEF], port).into());
                DelayedCarrier::send(&scene.carrier(from), address(TARGET, 0), &packet);
            }
        };
        for _ in 0..300 {
            flood(scene);
            scene.pass();
        }
        scene.begin();
        let took = scene.open(10 * SECOND, flood);
        assert!(took.is_some_and(|took| took < 2 * SECOND), "{scene_name}: {took:?} ns");
        assert!(!cookies.is_empty(), "{scene_name}: the thief was asked for none");
    });
}

/// A hello with a cookie before it.
fn retry(hello: &[u8], cookie: &[u8]) -> Vec<u8> {
    let header = Packet::decode(hello).expect("a hello");
    let mut packet = [&hello[..HEADER_BYTES], cookie, &hello[HEADER_BYTES..]].concat();
    let length = packet.len() as u32;
    Packet { kind: PacketKind::Retry, length, ..header }.encode(&mut packet);
    packet
}

#[test]
fn a_hello_that_led_to_a_connection_is_not_answered_again() {
    scenes(|scene, _, scene_name| {
        scene.begin();
        scene.open(OPEN_NS_MAX, |_| ()).expect("nothing is in the way");
        let hello =
            scene.user_packets_of(|kind| kind == PacketKind::Hello).pop().expect("it greeted");
        scene.stranger_packets.clear();
        DelayedCarrier::send(&scene.carrier(address(SPOOFED, 1)), address(TARGET, 0), &hello);
        (0..200).for_each(|_| scene.pass());
        assert_eq!(
            (scene.stranger_packets.len(), scene.target.unfinished()),
            (0, 0),
            "{scene_name}"
        );
    });
}

/// An UNKNOWN for the connection of a sealed packet, as any stranger can make it.
fn forged(sealed: &[u8], proof: &[u8]) -> Vec<u8> {
    let header = Packet::decode(sealed).expect("a packet");
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend_from_slice(proof);
    Packet { kind: PacketKind::Unknown, length: packet.len() as u32, ..header }.encode(&mut packet);
    packet
}

#[test]
fn forged_unknowns_at_any_rate_make_no_user_reconnect() {
    scenes(|scene, _, scene_name| {
        scene.begin();
        scene.open(OPEN_NS_MAX, |_| ()).expect("nothing is in the way");
        let hello_count = scene.user_packets_of(|kind| kind == PacketKind::Hello).len();
        let (mut sent_count, mut answer_count) = (0, 0);
        for round in 0..2000 {
            // One for each packet that the user sends, and some more, with and without a proof.
            let sealed_packets = scene.user_packets_of(|kind| kind == PacketKind::Sealed);
            for packet in &sealed_packets[sent_count..] {
                for proof in [&[][..], &[0; 16], &packet[HEADER_BYTES..][..16]] {
                    let carrier = scene.carrier(address(TARGET, 0));
                    DelayedCarrier::send(&carrier, address(USER, 0), &forged(packet, proof));
                }
            }
            sent_count = sealed_packets.len();
            if round % 100 == 0 {
                let request = scene.user.request_list();
                for _ in 0..80 {
                    scene.pass();
                    answer_count += usize::from(request.poll().is_some());
                }
            }
            scene.pass();
        }
        assert!(answer_count >= 20, "{scene_name}: {answer_count} lists of 20");
        assert_eq!(
            scene.user_packets_of(|kind| kind == PacketKind::Hello).len(),
            hello_count,
            "{scene_name}: it greeted again"
        );
    });
}

#[test]
fn a_restarted_target_is_believed_that_it_knows_no_connection() {
    scenes(|scene, trust, scene_name| {
        scene.begin();
        scene.open(OPEN_NS_MAX, |_| ()).expect("nothing is in the way");
        let seed = scene.dice.next();
        scene.target = target_of(&scene.clock, trust(), seed);
        let took = scene.open(OPEN_NS_MAX, |_| ()).expect("it is opened again");
        assert!(took < SECOND, "{scene_name}: {took} ns");
    });
}

#[test]
fn strangers_that_open_nothing_fill_no_target() {
    scenes(|scene, trust, scene_name| {
        let all = TargetOptions::default().connections_max;
        for stranger in 0..all {
            // Half of them from one address, the others from one each.
            let which = if stranger % 2 == 0 { 0 } else { stranger as u8 };
            let seed = scene.dice.next();
            let other = initiator_of(&scene.clock, trust(), seed);
            let from = address(THIEF, which);
            other.add_route(0, Arc::new(scene.carrier(from)), address(TARGET, 0), None);
            for _ in 0..200 {
                scene.pass();
                for (to, mut bytes) in std::mem::take(&mut scene.stranger_packets) {
                    if to == from {
                        other.receive(&address(TARGET, 0), &mut bytes);
                    }
                }
                other.tick();
            }
        }
        assert_eq!(scene.target.status().len(), all, "{scene_name}: the target is full");
        scene.begin();
        let took = scene.open(10 * SECOND, |_| ()).expect("it is let in");
        assert!(took < 2 * SECOND, "{scene_name}: {took} ns");
        assert_eq!(scene.target.status().len(), all, "{scene_name}");
    });
}
