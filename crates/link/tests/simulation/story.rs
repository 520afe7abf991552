//! A story: a load on a link in a bad world, by seed, then peace, and a last look at everything.
//!
//! Invariant: after the faults end, everything is answered within a bound of the world's time. Not here: the
//! judge (`oracle`), the network, the disk.

use std::cmp::Reverse;
use std::sync::mpsc::{Receiver, Sender as Tell, channel};
use std::sync::{Arc, Mutex};

use sawmill_device::{BlockDevice, Exchange, Flags, Operation, Outcome as Told, Request};
use sawmill_link::Unpack;
use sawmill_link::carrier::{Peer, Sender};
use sawmill_link::clock::Clock;
use sawmill_link::initiator::{Answer, Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{PreSharedKey, Security};
use sawmill_link::target::{Target, TargetOptions};

use crate::disk::Disk;
use crate::network::{Dice, FalseSender, Faults, Network, Side, WorldClock};
use crate::oracle::{CELL, Oracle, pattern};

const MS: u64 = 1_000_000;
const SIZE_BYTES: u64 = 256 << 10;
const OPERATIONS: u64 = 400;
/// Everything must be answered so long after the last fault.
const PEACE_NS: u64 = 60_000 * MS;

/// What happened in stories.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) operations: u64,
    pub(crate) packets: u64,
    pub(crate) lost: u64,
    pub(crate) doubled: u64,
    pub(crate) damaged: u64,
    pub(crate) restarts: u64,
    pub(crate) power_cuts: u64,
    pub(crate) losses_told: u64,
    pub(crate) link_deaths: u64,
    pub(crate) partitions: u64,
    pub(crate) reconnections: u64,
    pub(crate) time_outs: u64,
    pub(crate) replayed: u64,
}

impl Outcome {
    pub(crate) fn add(&mut self, other: &Outcome) {
        self.operations += other.operations;
        self.packets += other.packets;
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.damaged += other.damaged;
        self.restarts += other.restarts;
        self.power_cuts += other.power_cuts;
        self.losses_told += other.losses_told;
        self.link_deaths += other.link_deaths;
        self.partitions += other.partitions;
        self.reconnections += other.reconnections;
        self.time_outs += other.time_outs;
        self.replayed += other.replayed;
    }
}

enum Ended {
    Read(u64, Vec<u8>, bool),
    Write(u64, bool, bool),
    Flush(u64, bool),
}

struct Asked {
    id: u64,
    operation: Operation,
    address: u64,
    buffer: Vec<u8>,
    fua: bool,
    tell: Tell<Ended>,
}

impl Exchange for Asked {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        pattern(self.id, self.address, into, offset);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    fn complete(self: Box<Self>, told: Told) {
        let well = told.is_ok();
        let ended = match self.operation {
            Operation::Read => Ended::Read(self.id, self.buffer, well),
            Operation::Flush => Ended::Flush(self.id, well),
            _ => Ended::Write(self.id, self.fua, well),
        };
        self.tell.send(ended).expect("the story listens");
    }
}

/// A story.
pub(crate) struct Story {
    seed: u64,
    dice: Dice,
    clock: Arc<WorldClock>,
    network: Arc<Mutex<Network>>,
    links: usize,
    packet_bytes: usize,
    disk: Arc<Disk>,
    target: Arc<Target>,
    initiator: Arc<Initiator>,
    device: Option<RemoteDevice>,
    oracle: Oracle,
    tell: Tell<Ended>,
    hear: Receiver<Ended>,
    under_way: u64,
    next_id: u64,
    outcome: Outcome,
    secure: bool,
    /// Bumped when the power fails: the disk's memory is another one.
    boot: u8,
}

fn security(secure: bool) -> Security {
    if secure { Security::Key(PreSharedKey::from_bytes([7; 32])) } else { Security::Insecure }
}

fn target_of(
    seed: u64,
    slot_bytes_max: u32,
    secure: bool,
    clock: &Arc<WorldClock>,
    disk: &Arc<Disk>,
    boot: u8,
) -> Arc<Target> {
    let mut dice = Dice::new(seed);
    let clock: Arc<dyn Clock> = Arc::<WorldClock>::clone(clock);
    let random = Box::new(move || dice.next());
    let options = TargetOptions { slot_bytes_max, ..TargetOptions::default() };
    let target = Target::new(options, security(secure), clock, random);
    let device = Arc::new(Unpack::new(Arc::clone(disk)));
    target.add("disk", device, Some([boot; 16])).expect("the first export");
    target
}

impl Story {
    pub(crate) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let clock = Arc::new(WorldClock::default());
        let links = 1 + dice.below(4) as usize;
        let packet_bytes = [1200, 1472, 8972, 60_000][dice.below(4) as usize];
        let network = Arc::new(Mutex::new(Network::new(seed, links)));
        let disk_ns = [0, MS / 2, 20 * MS][dice.below(3) as usize];
        let disk = Arc::new(Disk::new(seed, SIZE_BYTES, disk_ns, Arc::clone(&clock)));
        let secure = dice.permille(300);
        let boot = 1;
        let target = target_of(dice.next(), 256 << 10, secure, &clock, &disk, boot);
        let mut ids = Dice::new(dice.next());
        let options = InitiatorOptions {
            name: "story".into(),
            slots: [1, 4, 64][dice.below(3) as usize],
            slot_bytes: [4096, 16384][dice.below(2) as usize],
            timeout_s: 0,
        };
        let world: Arc<dyn Clock> = Arc::<WorldClock>::clone(&clock);
        let initiator = Initiator::new(options, security(secure), links, world, Box::new(move || ids.next()));
        let (tell, hear) = channel();
        Story {
            seed,
            dice,
            clock,
            network,
            links,
            packet_bytes,
            disk,
            target,
            initiator,
            device: None,
            oracle: Oracle::default(),
            tell,
            hear,
            under_way: 0,
            next_id: 1,
            outcome: Outcome::default(),
            secure,
            boot,
        }
    }

    fn sender(&self, link: usize, to: Side, run: Option<u64>) -> Arc<dyn Sender> {
        Arc::new(FalseSender {
            network: Arc::clone(&self.network),
            clock: Arc::clone(&self.clock),
            to,
            link,
            packet_bytes_max: self.packet_bytes,
            run,
        })
    }

    fn say(&self, text: &str) {
        if std::env::var_os("SAWMILL_SEED").is_some() {
            println!("{:>9} us: {text}", self.clock.now_ns() / 1000);
        }
    }

    fn fail(&self, why: &str) -> ! {
        let (now, ends) = (self.clock.now_ns() / 1000, (self.initiator.status(), self.target.status()));
        panic!("seed {}: at {now} us: {why}\n{ends:#?}", self.seed);
    }

    /// The whole of it.
    pub(crate) fn tell(mut self) -> Outcome {
        for link in 0..self.links {
            self.initiator.add_way(link, self.sender(link, Side::Target, None), peer(), None);
        }
        self.open();
        self.choose_faults();
        for operation in 0..OPERATIONS {
            if operation % 40 == 39 {
                self.mischief();
            }
            self.ask();
            for _ in 0..self.dice.below(6) {
                self.step();
            }
            while self.under_way > 40 {
                self.step();
            }
        }
        self.peace();
        self.finish();
        let network = self.network.lock().expect("one thread");
        let counts = &network.counts;
        self.outcome.packets = counts.sent;
        (self.outcome.lost, self.outcome.doubled) = (counts.lost, counts.doubled);
        (self.outcome.damaged, self.outcome.replayed) = (counts.damaged, counts.replayed);
        let links = self.initiator.status().links;
        self.outcome.time_outs = links.iter().map(|link| link.sent.time_outs).sum();
        drop(network);
        self.outcome
    }

    fn open(&mut self) {
        let mode = OpenMode::default();
        let answer: Answer = self.initiator.ask_open("disk", mode);
        let bytes = loop {
            match answer.poll() {
                Some(Ok(bytes)) => break bytes,
                Some(Err(error)) => self.fail(&format!("it cannot be opened: {error}")),
                None => self.step(),
            }
            if self.clock.now_ns() > PEACE_NS {
                self.fail("it is not opened");
            }
        };
        self.device = Some(self.initiator.opened("disk", mode, &bytes).expect("a geometry"));
    }

    fn choose_faults(&mut self) {
        for link in 0..self.links {
            let faults = Faults {
                lose_permille: [0, 5, 100][self.dice.below(3) as usize],
                double_permille: [0, 20, 200][self.dice.below(3) as usize],
                damage_permille: [0, 5, 50][self.dice.below(3) as usize],
                full_permille: [0, 20, 300][self.dice.below(3) as usize],
                delay_ns_max: [0, MS / 10, 30 * MS][self.dice.below(3) as usize],
            };
            self.network.lock().expect("one thread").faults[link] = faults;
        }
    }

    /// The next thing that happens in the world.
    fn step(&mut self) {
        let now = self.clock.now_ns();
        let flying = {
            let network = self.network.lock().expect("one thread");
            network.flying.peek().map_or(u64::MAX, |Reverse(flying)| flying.at_ns)
        };
        let disk = self.disk.next_ns().unwrap_or(u64::MAX);
        let timers = self.initiator.deadline_ns().min(self.target.deadline_ns());
        let next = flying.min(disk).min(timers).max(now + 1_000);
        self.clock.set(next);
        if flying <= next {
            self.deliver();
        }
        if disk <= next {
            self.disk.run(next);
        }
        self.initiator.tick();
        self.target.tick();
        self.listen();
    }

    /// A few packets that have come, as one batch.
    fn deliver(&mut self) {
        let now = self.clock.now_ns();
        self.initiator.begin_batch();
        let mut touched = Vec::new();
        loop {
            let mut network = self.network.lock().expect("one thread");
            match network.flying.peek() {
                Some(Reverse(flying)) if flying.at_ns <= now => {}
                _ => break,
            }
            let Some(Reverse(mut flying)) = network.flying.pop() else { break };
            let run = network.target_run;
            drop(network);
            match flying.to {
                Side::Initiator => self.initiator.receive(&peer(), &mut flying.bytes),
                Side::Target => {
                    if let Some(connection) = Target::connection_of(&flying.bytes)
                        && self.target.begin_batch(connection)
                    {
                        touched.push(connection);
                    }
                    let sender = self.sender(flying.link, Side::Initiator, Some(run));
                    self.target.receive((&sender, None), &peer(), &mut flying.bytes);
                }
            }
        }
        for connection in touched {
            self.target.end_batch(connection);
        }
        self.initiator.end_batch();
    }

    fn listen(&mut self) {
        while let Ok(ended) = self.hear.try_recv() {
            self.under_way -= 1;
            let (Ended::Read(id, _, well) | Ended::Write(id, _, well) | Ended::Flush(id, well)) = &ended;
            self.say(&format!("{id}: {}", if *well { "done" } else { "failed" }));
            let judged = match ended {
                Ended::Read(id, bytes, true) => self.oracle.read_answered(id, &bytes),
                Ended::Write(id, fua, true) => {
                    self.oracle.write_answered(id, fua);
                    Ok(())
                }
                Ended::Flush(id, well) => {
                    self.outcome.losses_told += u64::from(!well);
                    self.oracle.flush_answered(id, well)
                }
                Ended::Read(id, _, false) | Ended::Write(id, _, false) => Err(format!("request {id} failed")),
            };
            if let Err(why) = judged {
                self.fail(&why);
            }
        }
    }

    fn ask(&mut self) {
        // What was answered before a flush is asked for must be known to be so.
        self.listen();
        let (id, kind) = (self.next_id, self.dice.below(100));
        self.next_id += 1;
        let hot = if self.dice.permille(700) { 8 << 10 } else { SIZE_BYTES };
        let most = [CELL, 512, 5000, 40_000][self.dice.below(4) as usize] / CELL;
        let length = ((1 + self.dice.below(most)) * CELL).min(hot);
        let address = self.dice.below((hot - length) / CELL + 1) * CELL;
        let flags = Flags { fua: kind < 8, no_unmap: false };
        let (operation, address, length) = match kind {
            0..45 => (Operation::Write, address, length),
            45..90 => (Operation::Read, address, length),
            _ => (Operation::Flush, 0, 0),
        };
        match operation {
            Operation::Write => self.oracle.write_submitted(id, address, length),
            Operation::Read => self.oracle.read_submitted(id, address, length),
            _ => self.oracle.flush_submitted(id),
        }
        self.say(&format!("{id}: {operation:?} {address}+{length}"));
        let buffer = if operation == Operation::Read { vec![0; length as usize] } else { Vec::new() };
        let asked = Asked { id, operation, address, buffer, fua: flags.fua, tell: self.tell.clone() };
        self.under_way += 1;
        self.outcome.operations += 1;
        let request = Request::new(operation, address, length, flags, Box::new(asked));
        self.device.as_ref().expect("opened").submit(request);
        self.listen();
    }

    fn mischief(&mut self) {
        let link = self.dice.below(self.links as u64) as usize;
        match self.dice.below(13) {
            0..3 => {
                self.outcome.partitions += 1;
                let long = self.dice.below(3000 * MS);
                self.say(&format!("link {link} is cut for {} ms", long / MS));
                let until = self.clock.now_ns() + long;
                self.network.lock().expect("one thread").cut_until_ns[link] = until;
            }
            3..5 => {
                self.outcome.link_deaths += 1;
                self.say(&format!("link {link} dies"));
                self.initiator.lose_way(link);
                for _ in 0..self.dice.below(50) {
                    self.step();
                }
                self.say(&format!("link {link} comes back"));
                self.initiator.add_way(link, self.sender(link, Side::Target, None), peer(), None);
            }
            5..7 => self.choose_faults(),
            7..9 => self.restart(false),
            9 => {
                self.outcome.reconnections += 1;
                self.say("the initiator connects anew");
                self.initiator.reconnect();
            }
            10 => {
                self.outcome.partitions += 1;
                self.say("nobody hears anybody for longer than a target waits");
                let until = self.clock.now_ns() + 130_000 * MS;
                self.network.lock().expect("one thread").cut_until_ns.fill(until);
                while self.clock.now_ns() < until {
                    self.step();
                }
            }
            11 => {
                self.say("somebody says again what he heard");
                let now = self.clock.now_ns();
                let packets = self.dice.below(60);
                self.network.lock().expect("one thread").replay(now, packets);
            }
            _ => self.restart(true),
        }
    }

    /// The target's process dies and is started anew; or its machine, with what it had in memory.
    fn restart(&mut self, power_cut: bool) {
        self.say(if power_cut { "the power fails" } else { "the target is killed" });
        self.network.lock().expect("one thread").target_run += 1;
        self.disk.forsaken();
        self.listen();
        self.outcome.restarts += 1;
        if power_cut {
            self.outcome.power_cuts += 1;
            self.disk.power_cut(CELL as usize);
            self.oracle.power_cut();
            self.boot += 1;
        }
        let slot_bytes_max = [4096, 8192, 256 << 10][self.dice.below(3) as usize];
        self.target =
            target_of(self.dice.next(), slot_bytes_max, self.secure, &self.clock, &self.disk, self.boot);
    }

    fn peace(&mut self) {
        self.say("peace");
        {
            let mut network = self.network.lock().expect("one thread");
            for link in 0..self.links {
                network.faults[link] = Faults::default();
                network.cut_until_ns[link] = 0;
            }
        }
        let until = self.clock.now_ns() + PEACE_NS;
        while self.under_way > 0 {
            self.step();
            if self.clock.now_ns() > until {
                self.fail(&format!("{} requests hang", self.under_way));
            }
        }
    }

    /// Reads everything, twice: the two agree.
    fn finish(&mut self) {
        for _ in 0..2 {
            let length = 4096;
            for address in (0..SIZE_BYTES).step_by(length as usize) {
                let id = self.next_id;
                self.next_id += 1;
                self.oracle.read_submitted(id, address, length);
                let asked = Asked {
                    id,
                    operation: Operation::Read,
                    address,
                    buffer: vec![0; length as usize],
                    fua: false,
                    tell: self.tell.clone(),
                };
                self.under_way += 1;
                let flags = Flags::default();
                let request = Request::new(Operation::Read, address, length, flags, Box::new(asked));
                self.device.as_ref().expect("opened").submit(request);
            }
            self.peace();
        }
        if !self.disk.is_idle() {
            self.fail("the disk still has requests, and nobody waits for them");
        }
        let status = self.initiator.status();
        if status.slots_free != status.slots || status.pending != 0 {
            self.fail("credits leaked");
        }
    }
}

fn peer() -> Peer {
    Peer::Ethernet([0; 6])
}
