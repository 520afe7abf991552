//! A story: a load on a link in a faulty world, from a seed, then peace, and a final check.
//!
//! Invariants: a request waits for a bounded time of the world, not counting when nothing got
//! through any of its links; a user that was cut off is served no more; at rest all places are
//! back. Not here: the judge (`oracle`), the network, the disk, the faults (`faults`).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use sawmill_device::ErrorKind;
use sawmill_link::Unpacker;
use sawmill_link::clock::Clock;
use sawmill_link::initiator::{Answer, OpenMode};
use sawmill_link::target::{Arrival, Standing, StandingStore, Target, TargetOptions};

use crate::disk::Disk;
use crate::load::{Completion, Kind, LoadRequest, RandomRequest, SIZE_BYTES, draw, submit};
use crate::network::{Dice, Network, Side, WorldClock};
use crate::oracle::{Oracle, TILE};
use crate::users::{Setting, USERS_MAX, User, UserMix, peer};

pub(crate) const MS: u64 = 1_000_000;
pub(crate) const OPERATIONS: u64 = 400;
/// The most requests in flight before some must be answered.
const IN_FLIGHT_MAX: usize = 40;
/// After this time, nothing is in flight any more.
const DRAIN_NS_MAX: u64 = 20_000 * MS;
/// After this time, the target knows which users are gone, even if their close was lost.
const LEFT_NS_MAX: u64 = 150_000 * MS;
/// Everything must be answered within this time after the last fault.
const SETTLE_NS_MAX: u64 = 60_000 * MS;
/// And always within this time after its submission, not counting when all of its user's links were
/// cut. With one place of 4 KiB, slow links and a slow disk, forty requests take a third of it.
const WAIT_NS_MAX: u64 = 60_000 * MS;

/// What happened in stories.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) operations: u64,
    pub(crate) packed: u64,
    pub(crate) discards: u64,
    pub(crate) packets: u64,
    pub(crate) lost: u64,
    pub(crate) doubled: u64,
    pub(crate) damaged: u64,
    pub(crate) restarts: u64,
    pub(crate) power_cuts: u64,
    pub(crate) reported_losses: u64,
    pub(crate) link_deaths: u64,
    pub(crate) partitions: u64,
    pub(crate) reconnections: u64,
    pub(crate) timeouts: u64,
    pub(crate) replayed: u64,
    pub(crate) taken_over: u64,
    pub(crate) refused: u64,
    pub(crate) longest_wait_ms: u64,
    pub(crate) world_s: u64,
}

impl Outcome {
    pub(crate) fn add(&mut self, other: &Outcome) {
        self.operations += other.operations;
        self.packed += other.packed;
        self.discards += other.discards;
        self.packets += other.packets;
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.damaged += other.damaged;
        self.restarts += other.restarts;
        self.power_cuts += other.power_cuts;
        self.reported_losses += other.reported_losses;
        self.link_deaths += other.link_deaths;
        self.partitions += other.partitions;
        self.reconnections += other.reconnections;
        self.timeouts += other.timeouts;
        self.replayed += other.replayed;
        self.taken_over += other.taken_over;
        self.refused += other.refused;
        self.longest_wait_ms = self.longest_wait_ms.max(other.longest_wait_ms);
        self.world_s += other.world_s;
    }
}

/// A story.
pub(crate) struct Story {
    seed: u64,
    pub(crate) dice: Dice,
    pub(crate) setting: Setting,
    pub(crate) user_mix: UserMix,
    pub(crate) disks: Vec<Arc<Disk>>,
    pub(crate) target: Arc<Target>,
    pub(crate) users: Vec<User>,
    pub(crate) oracles: Vec<Oracle>,
    sender: Sender<Completion>,
    receiver: Receiver<Completion>,
    /// The requests in flight, by number.
    under_way: BTreeMap<u64, LoadRequest>,
    next_id: u64,
    next_user: u64,
    pub(crate) outcome: Outcome,
    /// Incremented when the power fails, because the disks lose their memory.
    pub(crate) boot: u8,
    /// Restarted targets may grant less than the first one.
    pub(crate) grants_vary: bool,
}

impl Story {
    pub(crate) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let clock = Arc::new(WorldClock::default());
        let links = 1 + dice.below(4) as usize;
        let setting = Setting {
            network: Arc::new(Mutex::new(Network::new(seed, links * USERS_MAX))),
            clock: Arc::clone(&clock),
            links,
            packet_bytes: [1200, 1472, 8972, 60_000][dice.below(4) as usize],
            secure: dice.permille(300),
            places: [1, 4, 64][dice.below(3) as usize],
            place_bytes: [4096, 16384][dice.below(2) as usize],
            rekey_bytes: [1 << 18, u64::MAX][dice.below(2) as usize],
        };
        let disk_ns = [0, MS / 2, 20 * MS][dice.below(3) as usize];
        let devices = 1 + dice.below(2);
        let disk = |device| {
            Arc::new(Disk::new(seed ^ (device << 32), SIZE_BYTES, disk_ns, Arc::clone(&clock)))
        };
        let disks: Vec<_> = (0..devices).map(disk).collect();
        let mixes = [UserMix::Alone, UserMix::Reader, UserMix::Writers, UserMix::Heirs];
        let user_mix = mixes[dice.below(4) as usize];
        let boot = 1;
        let target = target_of(&setting, &disks, boot, 256 << 10, dice.next());
        let (sender, receiver) = channel();
        Story {
            seed,
            dice,
            setting,
            user_mix,
            disks,
            target,
            users: Vec::new(),
            oracles: (0..devices).map(|device| Oracle::new(device * SIZE_BYTES)).collect(),
            sender,
            receiver,
            under_way: BTreeMap::new(),
            next_id: 1,
            next_user: 1,
            outcome: Outcome::default(),
            boot,
            grants_vary: true,
        }
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.setting.clock.now_ns()
    }

    pub(crate) fn log(&self, text: &str) {
        if std::env::var_os("SAWMILL_SEED").is_some() {
            println!("{:>9} us: {text}", self.now_ns() / 1000);
        }
    }

    pub(crate) fn fail(&self, why: &str) -> ! {
        let users: Vec<_> =
            self.users.iter().map(|user| (user.number, user.initiator.status())).collect();
        let (now, target) = (self.now_ns() / 1000, self.target.status());
        panic!("seed {}: at {now} us: {why}\n{users:#?}\n{target:#?}", self.seed);
    }

    /// Runs the whole story.
    pub(crate) fn run(mut self) -> Outcome {
        self.begin();
        self.run_load(OPERATIONS);
        self.peace();
        self.check_content();
        self.outcome()
    }

    /// The users that are there from the start open the devices.
    pub(crate) fn begin(&mut self) {
        let shared = matches!(self.user_mix, UserMix::Reader | UserMix::Writers);
        let first = OpenMode { shared, ..OpenMode::default() };
        self.enter(0, first);
        if shared {
            self.enter(1, OpenMode { read_only: self.user_mix == UserMix::Reader, ..first });
        }
    }

    /// Runs the load, with faults.
    pub(crate) fn run_load(&mut self, operations: u64) {
        self.choose_faults();
        for operation in 0..operations {
            if operation % 40 == 39 {
                self.cause_fault();
            }
            self.submit_next();
            for _ in 0..self.dice.below(6) {
                self.step();
            }
            while self.under_way.len() > IN_FLIGHT_MAX {
                self.step();
            }
        }
    }

    /// The outcome, counted up to here.
    pub(crate) fn outcome(mut self) -> Outcome {
        let network = self.setting.network.lock().expect("one thread");
        let counts = &network.counts;
        self.outcome.packets = counts.sent;
        (self.outcome.lost, self.outcome.doubled) = (counts.lost, counts.doubled);
        (self.outcome.damaged, self.outcome.replayed) = (counts.damaged, counts.replayed);
        drop(network);
        let links = self.users.iter().flat_map(|user| user.initiator.status().links);
        self.outcome.timeouts = links.map(|link| link.sent.timeouts).sum();
        self.outcome.world_s = self.now_ns() / (1000 * MS);
        self.outcome
    }

    /// A user takes a seat and opens all devices; with *take over*, their former users are cut off.
    pub(crate) fn enter(&mut self, seat: usize, mode: OpenMode) {
        let user = User::new(&self.setting, self.next_user, seat, mode, &mut self.dice);
        let initiator = Arc::clone(&user.initiator);
        self.next_user += 1;
        self.users.iter_mut().for_each(|other| other.leaves |= mode.take_over);
        self.users.push(user);
        for device in 0..self.disks.len() {
            let name = format!("disk{device}");
            let bytes = loop {
                let answer = initiator.request_open(&name, mode);
                match self.answer(&answer) {
                    Ok(bytes) => break bytes,
                    // Requests of its former user are at the disk.
                    Err(error) if error.kind() == ErrorKind::Unavailable => self.step(),
                    Err(error) => self.fail(&format!("{name} cannot be opened: {error}")),
                }
            };
            let remote = initiator.opened(&name, mode, &bytes).expect("a geometry");
            // The story must know of earlier answers first.
            self.listen();
            let (new, others) = self.users.split_last_mut().expect("just pushed");
            new.devices.push(remote);
            new.barred.push(false);
            for other in others.iter_mut().filter(|_| mode.take_over) {
                other.barred[device] = true;
                self.oracles[device].cut_off(other.number);
            }
        }
    }

    fn answer(&mut self, answer: &Answer) -> sawmill_device::Result<Vec<u8>> {
        let since = self.now_ns();
        loop {
            if let Some(answer) = answer.poll() {
                return answer;
            }
            if self.now_ns() > since + WAIT_NS_MAX {
                self.fail("it is not opened");
            }
            self.step();
        }
    }

    /// Runs the next event of the world.
    pub(crate) fn step(&mut self) {
        let now = self.now_ns();
        let flying = {
            let network = self.setting.network.lock().expect("one thread");
            network.flying.peek().map_or(u64::MAX, |Reverse(flying)| flying.at_ns)
        };
        let disk = self.disks.iter().filter_map(|disk| disk.next_ns()).min().unwrap_or(u64::MAX);
        let timers = self.users.iter().map(|user| user.initiator.deadline_ns());
        let timers = timers.min().unwrap_or(u64::MAX).min(self.target.deadline_ns());
        let next = flying.min(disk).min(timers).max(now + 1_000);
        for user in &mut self.users {
            let network = self.setting.network.lock().expect("one thread");
            if network.is_cut(now, user.links(&self.setting)) {
                user.cut_ns += next - now;
            }
        }
        self.setting.clock.set(next);
        if flying <= next {
            self.deliver();
        }
        if disk <= next {
            self.disks.iter().for_each(|disk| disk.run(next));
        }
        self.users.iter().for_each(|user| user.initiator.tick());
        self.target.tick();
        self.listen();
        if let Some((id, request)) =
            self.under_way.first_key_value().map(|(id, request)| (*id, *request))
        {
            self.judge_wait(id, &request);
        }
    }

    /// Delivers a few packets that have arrived, as one burst.
    fn deliver(&mut self) {
        let now = self.now_ns();
        self.users.iter().for_each(|user| user.initiator.begin_burst());
        let mut touched = Vec::new();
        loop {
            let mut network = self.setting.network.lock().expect("one thread");
            match network.flying.peek() {
                Some(Reverse(flying)) if flying.at_ns <= now => {}
                _ => break,
            }
            let Some(Reverse(mut flying)) = network.flying.pop() else { break };
            let run = network.target_run;
            drop(network);
            match flying.to {
                Side::Initiator => {
                    let seat = flying.link / self.setting.links;
                    for user in self.users.iter().filter(|user| user.seat == seat) {
                        user.initiator.receive(&peer(), &mut flying.bytes);
                    }
                }
                Side::Target => {
                    if let Some(connection) = Target::connection_of(&flying.bytes)
                        && self.target.begin_burst(connection)
                    {
                        touched.push(connection);
                    }
                    let sender = self.setting.sender(flying.link, Side::Initiator, Some(run));
                    let from = Arrival { sender: &sender, waker: None, peer: &peer() };
                    self.target.receive(from, &mut flying.bytes);
                }
            }
        }
        for connection in touched {
            self.target.end_burst(connection);
        }
        self.users.iter().for_each(|user| user.initiator.end_burst());
    }

    pub(crate) fn listen(&mut self) {
        while let Ok(completion) = self.receiver.try_recv() {
            self.under_way.remove(&completion.id);
            let result = completion
                .error
                .as_ref()
                .map_or("done".to_owned(), |error| format!("failed: {error}"));
            self.log(&format!("{} of {}: {result}", completion.id, completion.request.user));
            self.judge_wait(completion.id, &completion.request);
            if let Err(why) = self.judge(completion) {
                self.fail(&why);
            }
        }
    }

    /// Checks how long a request waited, whether it was answered or not.
    fn judge_wait(&mut self, id: u64, request: &LoadRequest) {
        let Some(user) = self.users.iter().find(|user| user.number == request.user) else { return };
        let waited = self.now_ns() - request.since_ns;
        let waited = waited - (user.cut_ns - request.cut_ns).min(waited);
        self.outcome.longest_wait_ms = self.outcome.longest_wait_ms.max(waited / MS);
        if waited > WAIT_NS_MAX {
            self.fail(&format!("request {id} waited for {} ms", waited / MS));
        }
    }

    fn judge(&mut self, completion: Completion) -> Result<(), String> {
        let Completion { id, request, error, bytes } = completion;
        let oracle = &mut self.oracles[request.device];
        let user = self.users.iter().find(|user| user.number == request.user);
        // Users that were cut off or are gone.
        let may_fail = user.is_none_or(|user| user.leaves);
        match (request.kind, error) {
            (_, None) if request.barred => Err(format!("request {id}: a fenced user was served")),
            (Kind::Read, None) => oracle.read_answered(id, &bytes),
            (Kind::Flush, None) => oracle.flush_answered(id, true),
            (_, None) => {
                oracle.write_answered(id, request.fua);
                Ok(())
            }
            (_, Some(_)) if may_fail => {
                self.outcome.refused += 1;
                oracle.failed(id);
                Ok(())
            }
            (Kind::Flush, Some(_)) => {
                self.outcome.reported_losses += 1;
                oracle.flush_answered(id, false)
            }
            (_, Some(error)) => Err(format!("request {id} failed: {error}")),
        }
    }

    fn submit_next(&mut self) {
        // The story must know of answers that precede the submission of a flush.
        self.listen();
        let who = self.dice.below(self.users.len() as u64) as usize;
        let drawn = draw(&mut self.dice, self.disks.len(), self.users[who].is_reader());
        self.submit(who, &drawn);
    }

    pub(crate) fn submit(&mut self, who: usize, drawn: &RandomRequest) {
        let (id, now) = (self.next_id, self.now_ns());
        self.next_id += 1;
        let user = &self.users[who];
        let oracle = &mut self.oracles[drawn.device];
        let barred = user.barred[drawn.device];
        match drawn.kind {
            Kind::Flush => oracle.flush_submitted(id, user.number),
            Kind::Read => oracle.read_submitted(id, drawn.ranges[0].0, drawn.ranges[0].1),
            // It must have no effect.
            _ if barred => {}
            kind => {
                let zeroes = matches!(kind, Kind::Zeroes | Kind::Discard);
                oracle.write_submitted(id, user.number, zeroes, &drawn.ranges);
            }
        }
        self.outcome.operations += 1;
        self.outcome.packed += u64::from(drawn.kind == Kind::Packed);
        self.outcome.discards += u64::from(drawn.kind == Kind::Discard);
        let request = LoadRequest {
            kind: drawn.kind,
            device: drawn.device,
            fua: drawn.fua,
            user: user.number,
            barred,
            since_ns: now,
            cut_ns: user.cut_ns,
        };
        self.under_way.insert(id, request);
        self.log(&format!("{id} of {}: {drawn:?}", request.user));
        submit(&self.users[who].devices[drawn.device], id, drawn, request, self.sender.clone());
        self.listen();
    }

    /// Ends all faults, and waits until everything is answered.
    pub(crate) fn peace(&mut self) {
        self.log("peace");
        self.setting.network.lock().expect("one thread").calm();
        let until = self.now_ns() + SETTLE_NS_MAX;
        while !self.under_way.is_empty() {
            self.step();
            if self.now_ns() > until {
                self.fail(&format!("{} requests hang", self.under_way.len()));
            }
        }
    }

    /// Every user reads everything: what each sees is legal, and all places are back then.
    pub(crate) fn check_content(&mut self) {
        for who in 0..self.users.len() {
            for device in 0..self.disks.len() {
                if self.users[who].leaves {
                    continue;
                }
                let length = 4096;
                for address in (0..SIZE_BYTES).step_by(length as usize) {
                    let ranges = vec![(address, length)];
                    self.submit(
                        who,
                        &RandomRequest { kind: Kind::Read, device, ranges, fua: false },
                    );
                }
                self.peace();
            }
        }
        if !self.disks.iter().all(|disk| disk.is_idle()) {
            self.fail("a disk still has requests, and no user waits for them");
        }
        for user in &self.users {
            let status = user.initiator.status();
            if status.places_free != status.places || status.pending != 0 || status.waiting != 0 {
                self.fail("places leaked");
            }
        }
    }

    /// A rest: everything that was written is checked; then everything is zero and durable, nothing
    /// is in flight, and the judges and the network forget everything.
    pub(crate) fn rest(&mut self) {
        self.end_leavers();
        self.peace();
        self.check_content();
        let who = self.users.iter().position(|user| !user.is_reader()).expect("a user writes");
        for device in 0..self.disks.len() {
            // The first reports what was lost, if anything was.
            for _ in 0..2 {
                self.submit(
                    who,
                    &RandomRequest { kind: Kind::Flush, device, ranges: Vec::new(), fua: false },
                );
                self.peace();
            }
            let ranges = vec![(0, SIZE_BYTES)];
            self.submit(who, &RandomRequest { kind: Kind::Zeroes, device, ranges, fua: true });
            self.peace();
        }
        let (until, most) = (self.now_ns() + DRAIN_NS_MAX, self.now_ns() + LEFT_NS_MAX);
        while self.now_ns() < until || self.target.status().len() != self.users.len() {
            self.step();
            if self.now_ns() > most {
                self.fail("the target keeps a connection of a user that is gone");
            }
        }
        for (device, oracle) in self.oracles.iter_mut().enumerate() {
            *oracle = Oracle::new(device as u64 * SIZE_BYTES);
        }
        self.setting.network.lock().expect("one thread").forget();
        (self.sender, self.receiver) = channel();
    }

    pub(crate) fn new_target(&mut self) {
        let grants = if self.grants_vary { [4096, 8192, 256 << 10] } else { [256 << 10; 3] };
        let place_bytes_max = grants[self.dice.below(3) as usize];
        self.target =
            target_of(&self.setting, &self.disks, self.boot, place_bytes_max, self.dice.next());
    }

    /// The power fails for disks and judges.
    pub(crate) fn power_cut(&mut self) {
        self.disks.iter().for_each(|disk| disk.power_cut(TILE as usize));
        self.oracles.iter_mut().for_each(Oracle::power_cut);
        self.boot = self.boot.wrapping_add(1);
    }
}

/// The standing of an export, as the target's process last stored it.
struct StoredStanding {
    standing: Arc<Mutex<Standing>>,
    network: Arc<Mutex<Network>>,
    /// The run of the process: a dead one stores nothing.
    run: u64,
}

impl StandingStore for StoredStanding {
    fn keep(&self, standing: &Standing) -> sawmill_device::Result<()> {
        if self.network.lock().expect("one thread").target_run == self.run {
            *self.standing.lock().expect("one thread") = *standing;
        }
        Ok(())
    }
}

fn target_of(
    setting: &Setting,
    disks: &[Arc<Disk>],
    boot: u8,
    place_bytes_max: u32,
    seed: u64,
) -> Arc<Target> {
    let mut dice = Dice::new(seed);
    let clock: Arc<dyn Clock> = Arc::<WorldClock>::clone(&setting.clock);
    let random = Box::new(move || dice.next());
    let options = TargetOptions { place_bytes_max, ..TargetOptions::default() };
    let target = Target::new(options, setting.security(), clock, random);
    let run = setting.network.lock().expect("one thread").target_run;
    for (device, disk) in disks.iter().enumerate() {
        let (standing, network) = (Arc::clone(&disk.standing), Arc::clone(&setting.network));
        let stored_standing = *standing.lock().expect("one thread");
        let keep = Box::new(StoredStanding { standing, network, run });
        let unpacker = Arc::new(Unpacker::new(Arc::clone(disk)));
        let name = format!("disk{device}");
        target.add_lasting(&name, unpacker, [boot; 16], stored_standing, keep).expect("shown once");
    }
    target
}
