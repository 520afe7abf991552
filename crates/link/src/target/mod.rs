//! The target: shows devices to initiators, over any links that lead to it.
//!
//! Rooms: `exports` (what is shown, and to whom), `standing` (what lasts of that), `served` (a connection),
//! `slots` (a command from its first part to its receipt).
//!
//! Invariants: until its first sealed packet opens, a hello costs an entry of a bounded table and nothing
//! more; a new connection of an initiator takes the place of its old one, and begins only when no device has
//! a request of the old one; what a peer does wrong ends its connection and no other.
//!
//! Not here: sockets and threads (`crate::threads`).

mod exports;
mod served;
mod slots;
mod standing;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use sawmill_device::Result;
use sawmill_format::link::greeting::{GREETING_BYTES_MAX, Hello, Seek, Welcome};
use sawmill_format::link::part::{Word, WordKind};
use sawmill_format::link::{HEADER_BYTES, LINKS_MAX, Packet, PacketKind, VERSION};

use crate::PackedDevice;
use crate::carrier::{Batch, Peer, Sender, Waker};
use crate::clock::{Clock, SECOND};
use crate::connection::{Came, Connection, Path, Said};
use crate::initiator::PROLOGUE;
use crate::session::handshake::refusal;
use crate::session::{HANDSHAKE_BYTES, Refused, Seals, Security, answer};
use exports::Exports;
use served::{Random, Served, Who};
pub use standing::{KeepStanding, Standing};

/// What a target grants, and who it is.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// A name for people, at most 64 bytes.
    pub name: String,
    /// The most slots of a connection, and the most bytes of a slot: together the memory that one may take.
    pub slots_max: u16,
    /// Bytes of a slot.
    pub slot_bytes_max: u32,
    /// Connections at a time.
    pub connections_max: usize,
    /// A connection that was not heard of for so long is given up.
    pub silence_max_s: u16,
}

impl Default for TargetOptions {
    fn default() -> Self {
        TargetOptions {
            name: String::new(),
            slots_max: 256,
            slot_bytes_max: 256 << 10,
            connections_max: 64,
            silence_max_s: 120,
        }
    }
}

/// Hand-shakes that wait for their first sealed packet, at most, and for how long.
const HALF_OPEN_MAX: usize = 16;
const HALF_OPEN_NS: u64 = 10 * SECOND;

/// A hand-shake that was answered.
struct HalfOpen {
    local: u64,
    hello: Hello,
    message: Vec<u8>,
    welcome: Vec<u8>,
    seals: Seals,
    since_ns: u64,
    links: usize,
    slots: u16,
    slot_bytes: u32,
}

/// What is known of a sealed packet's connection.
enum Known {
    /// It is there.
    Served(Arc<Served>),
    /// It cannot be yet: its sender will say so again.
    Later,
    /// There is none, and will not be.
    Nobody,
}

/// A target.
pub struct Target {
    options: TargetOptions,
    security: Security,
    instance: [u8; 16],
    clock: Arc<dyn Clock>,
    random: Arc<Random>,
    exports: Arc<Exports>,
    half_open: Mutex<Vec<HalfOpen>>,
    /// It ends: nobody is let in any more.
    closed: AtomicBool,
    /// In an order that does not depend on chance: a simulation is the same twice.
    connections: RwLock<BTreeMap<u64, Arc<Served>>>,
    /// Ended, with requests at a device.
    leaving: Mutex<Vec<Arc<Served>>>,
}

impl Target {
    /// A target that shows nothing yet. `random` makes ids.
    #[must_use]
    pub fn new(
        options: TargetOptions,
        security: Security,
        clock: Arc<dyn Clock>,
        mut random: Box<dyn FnMut() -> u64 + Send>,
    ) -> Arc<Self> {
        let mut instance = [0; 16];
        instance[..8].copy_from_slice(&random().to_le_bytes());
        instance[8..].copy_from_slice(&random().to_le_bytes());
        Arc::new(Target {
            options,
            security,
            instance,
            clock,
            random: Arc::new(Mutex::new(random)),
            exports: Arc::default(),
            half_open: Mutex::default(),
            closed: AtomicBool::new(false),
            connections: RwLock::default(),
            leaving: Mutex::default(),
        })
    }

    /// Shows `device` as `name`. `keeper` names who keeps what is written and not flushed: when it changes
    /// between two runs, such writes may be lost. None: this very process keeps them. Who was cut off is
    /// known to this process alone.
    pub fn add(&self, name: &str, device: Arc<dyn PackedDevice>, keeper: Option<[u8; 16]>) -> Result<()> {
        self.exports.add(name, device, keeper.unwrap_or(self.instance), None)
    }

    /// Shows `device`, which outlives this process, as `name`. `standing` is what `keep` was last told;
    /// without a tenure everybody is cut off who had it before.
    pub fn add_lasting(
        &self,
        name: &str,
        device: Arc<dyn PackedDevice>,
        keeper: [u8; 16],
        standing: Standing,
        keep: Box<dyn KeepStanding>,
    ) -> Result<()> {
        self.exports.add(name, device, keeper, Some((standing, keep)))
    }

    /// Hand-shakes that wait for their first sealed packet.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.half_open.lock().len()
    }

    fn served(&self, connection: u64) -> Option<Arc<Served>> {
        self.connections.read().get(&connection).cloned()
    }

    /// A packet came from `peer`, by the carrier of `sender`.
    pub fn receive(
        &self,
        (sender, waker): (&Arc<dyn Sender>, Option<&Arc<Waker>>),
        peer: &Peer,
        packet: &mut [u8],
    ) {
        let now = self.clock.now_ns();
        let Ok(header) = Packet::decode(packet) else { return };
        let packet = &mut packet[..header.length as usize];
        match header.kind {
            PacketKind::Sealed => self.sealed((sender, waker), peer, &header, packet, now),
            PacketKind::Hello => self.greeted(sender, peer, &header, &packet[HEADER_BYTES..], now),
            PacketKind::Seek => self.sought(sender, peer, &packet[HEADER_BYTES..]),
            PacketKind::Welcome | PacketKind::Refused | PacketKind::Unknown | PacketKind::Found => {}
        }
    }

    /// The connection that a packet claims to be of, if it is there: its threads collect what they have to
    /// send.
    #[must_use]
    pub fn connection_of(packet: &[u8]) -> Option<u64> {
        let header = Packet::decode(packet).ok()?;
        (header.kind == PacketKind::Sealed).then_some(header.connection)
    }

    /// A thread begins to take packets of a connection. False: there is none of that name.
    #[must_use]
    pub fn begin_batch(&self, connection: u64) -> bool {
        self.served(connection).inspect(|served| served.begin_batch()).is_some()
    }

    /// Whether a link of some connection waits for room in the carrier of `sender`.
    #[must_use]
    pub fn is_blocked(&self, sender: &Arc<dyn Sender>) -> bool {
        self.connections.read().values().any(|served| served.connection.is_blocked_at(sender))
    }

    /// It is through: what the packets led to goes.
    pub fn end_batch(&self, connection: u64) {
        if let Some(served) = self.served(connection) {
            served.end_batch(self.clock.now_ns());
        }
    }

    fn sealed(
        &self,
        (sender, waker): (&Arc<dyn Sender>, Option<&Arc<Waker>>),
        peer: &Peer,
        header: &Packet,
        packet: &mut [u8],
        now: u64,
    ) {
        let served = match self.known(header, packet) {
            Known::Served(served) => served,
            Known::Later => return,
            Known::Nobody => {
                return self.say(sender, peer, PacketKind::Unknown, header.connection, &[]);
            }
        };
        let (mut words, mut closed) = ([None; 4], false);
        let came = served.connection.receive(header, packet, now, &mut |said| match said {
            Said::Word(word) => {
                if let Some(place) = words.iter_mut().find(|place| place.is_none()) {
                    *place = Some(word);
                }
            }
            Said::Close(..) => closed = true,
        });
        match came {
            Err(breach) => {
                tracing::warn!("link: {} is cut off: {}", served.name, breach.0);
                served.connection.send_close(1, breach.0);
                self.drop_connection(&served);
            }
            Ok(Came::Dropped) => {}
            Ok(Came::Taken) => {
                for word in words.iter().flatten() {
                    let own =
                        usize::from(word.link) < served.connection.links.len() && word.link == header.link;
                    if word.kind == WordKind::Join
                        && !(own && served.connection.is_newest_join(word.link.into(), header.number))
                    {
                        continue;
                    }
                    self.word(&served.connection, word, Path::new(Arc::clone(sender), *peer, waker.cloned()));
                }
                served.end_again_if_ended();
                if closed {
                    self.drop_connection(&served);
                }
            }
        }
    }

    fn word<R: crate::connection::Role>(&self, connection: &Connection<R>, word: &Word, path: Path) {
        let index = usize::from(word.link);
        if index >= connection.links.len() {
            return;
        }
        match word.kind {
            WordKind::Join => {
                let packet_bytes = (word.packet_bytes as usize)
                    .clamp(sawmill_format::link::PACKET_BYTES_MIN, path.packet_bytes_max);
                connection.open_link(index, path.clone(), packet_bytes);
                let joined = Word { kind: WordKind::Joined, packet_bytes: packet_bytes as u32, ..*word };
                // As long as the join: the way back must carry it too.
                let padded = match path.peer {
                    Peer::Stream => sawmill_format::link::PACKET_BYTES_MIN,
                    _ => packet_bytes,
                };
                connection.send_word(index, &path, &joined, padded);
            }
            WordKind::Leave => connection.close_link(index),
            WordKind::Joined | WordKind::Ping => {}
        }
    }

    fn drop_connection(&self, served: &Arc<Served>) {
        served.end();
        // Locked before it leaves the one table, so that nobody finds it in neither.
        let mut leaving = self.leaving.lock();
        if self.connections.write().remove(&served.local).is_some() && served.is_busy() {
            leaving.push(Arc::clone(served));
        }
    }

    /// Ends the connections that an initiator had before. True: no device has requests of them.
    fn supersede(&self, instance: [u8; 16]) -> bool {
        let old: Vec<Arc<Served>> = {
            let connections = self.connections.read();
            connections.values().filter(|served| served.instance == instance).cloned().collect()
        };
        old.iter().for_each(|served| self.drop_connection(served));
        let mut leaving = self.leaving.lock();
        leaving.retain(|served| served.is_busy());
        !leaving.iter().any(|served| served.instance == instance)
    }

    fn greeted(&self, sender: &Arc<dyn Sender>, peer: &Peer, header: &Packet, message: &[u8], now: u64) {
        let mut half_open = self.half_open.lock();
        if self.closed.load(Ordering::SeqCst) {
            return;
        }
        half_open.retain(|half| now.saturating_sub(half.since_ns) < HALF_OPEN_NS);
        // The same hello by another link, or once more: the same answer.
        if let Some(half) = half_open.iter().find(|half| half.message == message) {
            let connection = half.hello.connection;
            return self.say(sender, peer, PacketKind::Welcome, connection, &half.welcome);
        }
        let mut out = vec![0; GREETING_BYTES_MAX + HANDSHAKE_BYTES];
        let (local, mut heard) = ((self.random.lock())().max(1), None);
        let answered = answer(
            &self.security,
            PROLOGUE,
            message,
            |payload| {
                let Ok(hello) = Hello::decode(payload) else { return Vec::new() };
                let welcome = self.welcome(&hello, local);
                let payload = welcome.encode().unwrap_or_default();
                heard = Some((hello, welcome));
                payload
            },
            &mut out,
        );
        match answered {
            Ok((seals, bytes)) => {
                let Some((hello, welcome)) = heard else { return };
                if hello.versions.0 > VERSION || hello.versions.1 < VERSION {
                    if let Some(text) = refusal(&self.security, Refused::Unknown) {
                        self.say(sender, peer, PacketKind::Refused, hello.connection, &text);
                    }
                    return;
                }
                out.truncate(bytes);
                if half_open.len() == HALF_OPEN_MAX {
                    half_open.remove(0);
                }
                self.say(sender, peer, PacketKind::Welcome, hello.connection, &out);
                half_open.push(HalfOpen {
                    local,
                    message: message.to_vec(),
                    welcome: out,
                    seals,
                    since_ns: now,
                    links: welcome.links.into(),
                    slots: welcome.slots,
                    slot_bytes: welcome.slot_bytes,
                    hello,
                });
            }
            Err(refused) => {
                tracing::debug!("link: a hello was refused: {refused}");
                if let Some(text) = refusal(&self.security, refused) {
                    self.say(sender, peer, PacketKind::Refused, header.connection, &text);
                }
            }
        }
    }

    fn welcome(&self, hello: &Hello, local: u64) -> Welcome {
        Welcome {
            version: VERSION,
            links: hello.links.clamp(1, LINKS_MAX as u8),
            slots: hello.slots.min(self.options.slots_max),
            slot_bytes: hello.slot_bytes.min(self.options.slot_bytes_max),
            connection: local,
            instance: self.instance,
            silence_max_s: self.options.silence_max_s,
            name: self.options.name.clone(),
        }
    }

    /// Whose a sealed packet is. The first one of a hand-shake makes the connection: whoever sent it has the
    /// key now, and not only once had it.
    fn known(&self, header: &Packet, packet: &mut [u8]) -> Known {
        if let Some(served) = self.served(header.connection) {
            return Known::Served(served);
        }
        let mut half_open = self.half_open.lock();
        // Its first packets come by several links at once: one thread makes the connection, others find it.
        if let Some(served) = self.served(header.connection) {
            return Known::Served(served);
        }
        let Some(index) = half_open.iter().position(|half| half.local == header.connection) else {
            return Known::Nobody;
        };
        // Opened on a copy: it is opened once more by the connection that it makes.
        if half_open[index].seals.open(&mut packet.to_vec()).is_err() {
            return Known::Later;
        }
        let instance = half_open[index].hello.instance;
        let room = self.connections.read().len() < self.options.connections_max;
        if !self.supersede(instance) || !room {
            // Its sender says it again; by then the device may be through, or somebody has gone.
            return Known::Later;
        }
        // The table stays locked until the connection is known: nobody is told that it is not.
        let half = half_open.remove(index);
        let who = Who {
            local: half.local,
            remote: half.hello.connection,
            instance,
            name: half.hello.name,
            links: half.links,
            slots: half.slots,
            slot_bytes: half.slot_bytes,
        };
        let (exports, random) = (Arc::clone(&self.exports), Arc::clone(&self.random));
        let served = Served::new(who, half.seals, exports, random, Arc::clone(&self.clock));
        self.connections.write().insert(served.local, Arc::clone(&served));
        Known::Served(served)
    }

    fn sought(&self, sender: &Arc<dyn Sender>, peer: &Peer, body: &[u8]) {
        let Ok(seek) = Seek::decode(body) else { return };
        if !seek.name.is_empty() && seek.name != self.options.name {
            return;
        }
        let found = Seek {
            token: seek.token,
            instance: self.instance,
            sealed: matches!(self.security, Security::Key(_)),
            name: self.options.name.clone(),
        };
        if let Ok(found) = found.encode() {
            self.say(sender, peer, PacketKind::Found, 0, &found);
        }
    }

    /// A packet outside of any connection. What gets lost is asked for again.
    fn say(&self, sender: &Arc<dyn Sender>, peer: &Peer, kind: PacketKind, connection: u64, body: &[u8]) {
        let length = HEADER_BYTES + body.len();
        let mut batch = Batch::new(1, length);
        let packet = &mut batch.space()[..length];
        packet[HEADER_BYTES..].copy_from_slice(body);
        Packet { kind, length: length as u32, connection, link: 0, number: 0 }.encode(packet);
        batch.commit(length);
        let _ = sender.send(peer, &batch, 0);
    }

    /// Time has passed: what is overdue goes again, who is silent for too long is given up.
    pub fn tick(&self) {
        let now = self.clock.now_ns();
        let silence_ns = u64::from(self.options.silence_max_s) * SECOND;
        // Threads come here all the time, so only somebody silent costs an allocation.
        let mut silent = Vec::new();
        for served in self.connections.read().values() {
            served.connection.tick(now);
            if now.saturating_sub(served.connection.heard_ns()) > silence_ns {
                silent.push(Arc::clone(served));
            }
        }
        for served in silent {
            tracing::warn!("link: {} was silent for {} s", served.name, self.options.silence_max_s);
            self.drop_connection(&served);
        }
        self.leaving.lock().retain(|served| served.is_busy());
    }

    /// When [`Target::tick`] must come next, at the latest.
    #[must_use]
    pub fn deadline_ns(&self) -> u64 {
        let latest = self.clock.now_ns() + SECOND;
        let connections = self.connections.read();
        let due = connections.values().filter_map(|served| served.connection.deadline_ns()).min();
        due.unwrap_or(latest).min(latest)
    }

    /// Ends all connections in order, and lets nobody in any more.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        // Who is being let in is in the one table or in the other after this.
        self.half_open.lock().clear();
        let all: Vec<Arc<Served>> = self.connections.read().values().cloned().collect();
        for served in all {
            served.connection.send_close(12, "the target ends");
            self.drop_connection(&served);
        }
    }

    /// How each connection does.
    #[must_use]
    pub fn status(&self) -> Vec<crate::LinkStatus> {
        let (connections, now) = (self.connections.read(), self.clock.now_ns());
        connections.values().map(|served| served.status(now)).collect()
    }
}
