//! The target: exports devices to initiators, over any links that lead to it.
//!
//! Modules: `handshakes` (hellos, and the connections that they lead to), `half_open` (unfinished
//! handshakes), `keys` (their holders), `machines` (the rights of machines), `exports` (the
//! exports, and who has them open), `standing` (what persists of that), `served` (a connection),
//! `places` (a command from its first statement to the receipt of its answer).
//!
//! Invariants: until its first sealed packet opens, a hello costs only an entry of a bounded table.
//! A new connection of an initiator replaces its old one, and starts only when no device has a
//! request of the old one. A peer's violation ends its connection and no other.
//!
//! Not here: sockets and threads (`crate::threads`).

mod exports;
mod half_open;
mod handshakes;
mod keys;
pub(crate) mod machines;
mod places;
mod served;
mod standing;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use sawmill_device::Result;
use sawmill_format::link::greeting::Seek;
use sawmill_format::link::statement::{Note, NoteKind};
use sawmill_format::link::{HEADER_BYTES, Packet, PacketKind, SEALED_BYTES_MIN};

use crate::PackedDevice;
use crate::carrier::{Burst, Peer, Sender, Waker};
use crate::clock::{Clock, SECOND};
use crate::connection::{Connection, ControlStatement, PacketOutcome, Route};
use crate::session::{Security, instance};
use exports::Exports;
use handshakes::Handshakes;
use keys::{Holder, Ring};
pub use machines::{Machine, Rights, read_machines};
use served::{IdSource, TargetConnection};
pub use standing::{Standing, StandingStore};

/// The limits and the identity of a target.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// A name for people, at most 64 bytes.
    pub name: String,
    /// The most places of a connection, and the most bytes of a place: together, the most memory of
    /// a connection.
    pub places_max: u16,
    /// Bytes of a place.
    pub place_bytes_max: u32,
    /// The most connections at a time, with those that have ended while a device has requests of
    /// them.
    pub connections_max: usize,
    /// A connection without a packet for this long is given up.
    pub silence_max_s: u16,
    /// How long receivers look for packets before they sleep, if packets come at short intervals
    /// and no other thread wants the core; zero: never.
    pub spin_time_max: Duration,
}

impl Default for TargetOptions {
    fn default() -> Self {
        TargetOptions {
            name: String::new(),
            places_max: 256,
            place_bytes_max: 256 << 10,
            connections_max: 64,
            silence_max_s: 120,
            spin_time_max: Duration::ZERO,
        }
    }
}

/// The shortest time that a connection without an open export is kept when there are too many.
const UNOPENED_NS_MIN: u64 = SECOND;

/// The header of a packet outside of connections.
const NOTHING: Packet =
    Packet { kind: PacketKind::Found, length: 0, connection: 0, link: 0, number: 0 };

/// The result of looking up a sealed packet's connection.
enum ConnectionLookup {
    /// It exists.
    Served(Arc<TargetConnection>),
    /// It cannot exist yet: the sender will repeat the packet.
    Later,
    /// It does not exist, and will not.
    Nobody,
}

/// Where a packet came from, and the way for an answer.
#[derive(Clone, Copy)]
pub struct Arrival<'a> {
    /// The sender of the carrier that received it.
    pub sender: &'a Arc<dyn Sender>,
    /// The waker of that carrier's thread, if it has one.
    pub waker: Option<&'a Arc<Waker>>,
    /// The peer that sent it.
    pub peer: &'a Peer,
}

/// A target.
pub struct Target {
    options: TargetOptions,
    keys: RwLock<Arc<Ring>>,
    instance: [u8; 16],
    clock: Arc<dyn Clock>,
    random: Arc<IdSource>,
    exports: Arc<Exports>,
    handshakes: Mutex<Handshakes>,
    /// The target is stopping: it admits no initiator any more.
    closed: AtomicBool,
    /// In a deterministic order, so that a simulation repeats exactly.
    connections: RwLock<BTreeMap<u64, Arc<TargetConnection>>>,
    /// Connections that ended while devices have requests of them. Bounded by `connections_max`,
    /// together with `connections`.
    leaving: Mutex<Vec<Arc<TargetConnection>>>,
}

impl Target {
    /// A target without exports, for every machine that has the key. `random` makes ids.
    #[must_use]
    pub fn new(
        options: TargetOptions,
        security: Security,
        clock: Arc<dyn Clock>,
        random: Box<dyn FnMut() -> u64 + Send>,
    ) -> Arc<Self> {
        Self::with_keys(options, Ring::one(security), clock, random)
    }

    /// The same with a key and rights for each machine. Returns `None` without a machine.
    #[must_use]
    pub fn for_machines(
        options: TargetOptions,
        machines: Vec<Machine>,
        clock: Arc<dyn Clock>,
        random: Box<dyn FnMut() -> u64 + Send>,
    ) -> Option<Arc<Self>> {
        Some(Self::with_keys(options, Ring::of_machines(machines)?, clock, random))
    }

    fn with_keys(
        options: TargetOptions,
        keys: Ring,
        clock: Arc<dyn Clock>,
        mut random: Box<dyn FnMut() -> u64 + Send>,
    ) -> Arc<Self> {
        let instance = instance(&mut *random);
        Arc::new(Target {
            options,
            keys: RwLock::new(Arc::new(keys)),
            instance,
            clock,
            random: Arc::new(Mutex::new(random)),
            exports: Arc::default(),
            handshakes: Mutex::default(),
            closed: AtomicBool::new(false),
            connections: RwLock::default(),
            leaving: Mutex::default(),
        })
    }

    /// These machines may attach from now on. Ends the connections of machines with another key,
    /// other rights or no entry any more, and no others. Returns the number of ended connections.
    /// Without a machine, nothing changes.
    pub fn set_machines(&self, machines: Vec<Machine>) -> Option<usize> {
        let keys = {
            // An initiator that is being admitted is checked with the old keys before this, or with
            // the new ones after it.
            let mut greeted = self.handshakes.lock();
            let mut keys = self.keys.write();
            *keys = Arc::new(keys.renewed(machines)?);
            greeted.half_open.clear();
            Arc::clone(&keys)
        };
        let stale_connections: Vec<Arc<TargetConnection>> = {
            let connections = self.connections.read();
            connections.values().filter(|served| !keys.has(&served.holder)).cloned().collect()
        };
        for served in &stale_connections {
            // As if the target had been restarted: initiators that are still allowed connect again.
            served.connection.send_close(12, "the keys of this machine have changed");
            self.drop_awaited(served);
        }
        Some(stale_connections.len())
    }

    /// Exports `device` as `name`. `cache_identity` identifies what holds written and unflushed
    /// data: if it differs between two runs, such writes may be lost. `None`: this process holds
    /// them. Only this process knows which initiators were fenced.
    pub fn add(
        &self,
        name: &str,
        device: Arc<dyn PackedDevice>,
        cache_identity: Option<[u8; 16]>,
    ) -> Result<()> {
        self.exports.add(name, device, cache_identity.unwrap_or(self.instance), None)
    }

    /// Exports `device`, which outlives this process, as `name`. `standing` is what `keep` last
    /// stored; without a reservation, all initiators that had the export before are fenced.
    pub fn add_lasting(
        &self,
        name: &str,
        device: Arc<dyn PackedDevice>,
        cache_identity: [u8; 16],
        standing: Standing,
        keep: Box<dyn StandingStore>,
    ) -> Result<()> {
        self.exports.add(name, device, cache_identity, Some((standing, keep)))
    }

    pub(crate) fn spin_time_max(&self) -> Duration {
        self.options.spin_time_max
    }

    /// The number of handshakes that wait for their first sealed packet.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.handshakes.lock().half_open.len()
    }

    fn find_connection(&self, connection: u64) -> Option<Arc<TargetConnection>> {
        self.connections.read().get(&connection).cloned()
    }

    /// Handles a packet. Returns whether it is a connection's, and no repetition.
    pub fn receive(&self, from: Arrival<'_>, packet: &mut [u8]) -> bool {
        let now = self.clock.now_ns();
        let Ok(header) = Packet::decode(packet) else { return false };
        let packet = &mut packet[..header.length as usize];
        match header.kind {
            PacketKind::Sealed => return self.sealed(from, &header, packet, now),
            PacketKind::Hello => self.greeted(from, &header, &packet[HEADER_BYTES..], None, now),
            PacketKind::Retry => {
                if let Some((cookie, message)) = packet[HEADER_BYTES..].split_first_chunk() {
                    self.greeted(from, &header, message, Some(cookie), now);
                }
            }
            PacketKind::Seek => self.sought(from.sender, from.peer, &packet[HEADER_BYTES..]),
            PacketKind::Welcome
            | PacketKind::Refused
            | PacketKind::Unknown
            | PacketKind::Found
            | PacketKind::Cookie => {}
        }
        false
    }

    /// The connection that a packet claims, if it exists, so that its threads can collect what they
    /// have to send.
    #[must_use]
    pub fn connection_of(packet: &[u8]) -> Option<u64> {
        let header = Packet::decode(packet).ok()?;
        (header.kind == PacketKind::Sealed).then_some(header.connection)
    }

    /// A thread starts to take packets of a connection. Returns false if the connection does not
    /// exist.
    #[must_use]
    pub fn begin_burst(&self, connection: u64) -> bool {
        self.find_connection(connection).inspect(|served| served.begin_burst()).is_some()
    }

    /// Whether a link of some connection waits for room in the carrier of `sender`.
    #[must_use]
    pub fn is_blocked(&self, sender: &Arc<dyn Sender>) -> bool {
        self.connections.read().values().any(|served| served.connection.is_blocked_at(sender))
    }

    /// The burst is complete: sends what its packets led to.
    pub fn end_burst(&self, connection: u64) {
        if let Some(served) = self.find_connection(connection) {
            served.end_burst(self.clock.now_ns());
        }
    }

    /// Returns whether the packet was taken.
    fn sealed(&self, from: Arrival<'_>, header: &Packet, packet: &mut [u8], now: u64) -> bool {
        let Arrival { sender, waker, peer } = from;
        let served = match self.look_up(from, header, packet) {
            ConnectionLookup::Served(served) => served,
            ConnectionLookup::Later => return false,
            ConnectionLookup::Nobody => {
                self.send_unknown(sender, peer, header);
                return false;
            }
        };
        let (mut notes, mut is_closed) = ([None; 4], false);
        let outcome =
            served.connection.receive(header, packet, now, &mut |statement| match statement {
                ControlStatement::Note(note) => {
                    if let Some(entry) = notes.iter_mut().find(|entry| entry.is_none()) {
                        *entry = Some(note);
                    }
                }
                ControlStatement::Close(..) => is_closed = true,
            });
        match outcome {
            Err(violation) => {
                tracing::warn!("link: disconnecting {}: {violation}", served.name);
                served.connection.send_close(1, &violation.to_string());
                self.drop_connection(&served);
                return false;
            }
            Ok(PacketOutcome::Dropped) => return false,
            Ok(PacketOutcome::Taken) => {}
        }
        for note in notes.iter().flatten() {
            let own =
                usize::from(note.link) < served.connection.links.len() && note.link == header.link;
            if note.kind == NoteKind::Join
                && !(own && served.connection.is_newest_join(note.link.into(), header.number))
            {
                continue;
            }
            let route = Route::new(Arc::clone(sender), *peer, waker.cloned());
            self.note(&served.connection, note, route);
        }
        served.end_again_if_ended();
        if is_closed {
            self.drop_connection(&served);
        }
        true
    }

    fn note<E: crate::connection::ConnectionEnd>(
        &self,
        connection: &Connection<E>,
        note: &Note,
        route: Route,
    ) {
        let index = usize::from(note.link);
        if index >= connection.links.len() {
            return;
        }
        match note.kind {
            NoteKind::Join => {
                let packet_bytes = (note.packet_bytes as usize)
                    .clamp(sawmill_format::link::PACKET_BYTES_MIN, route.packet_bytes_max);
                connection.open_link(index, route.clone(), packet_bytes);
                let reply =
                    Note { kind: NoteKind::Joined, packet_bytes: packet_bytes as u32, ..*note };
                // As long as the join, because the way back must support that length too.
                let padded = match route.peer {
                    Peer::Stream => sawmill_format::link::PACKET_BYTES_MIN,
                    _ => packet_bytes,
                };
                connection.send_note(index, &route, &reply, padded);
            }
            NoteKind::Leave => connection.close_link(index),
            NoteKind::Joined | NoteKind::Ping => {}
        }
    }

    fn drop_connection(&self, connection: &Arc<TargetConnection>) {
        connection.end(None);
        self.let_leave(connection);
    }

    /// As `drop_connection`, for an initiator that comes back: its exports are kept as long as for
    /// a silent connection.
    fn drop_awaited(&self, connection: &Arc<TargetConnection>) {
        let silence_ns = u64::from(self.options.silence_max_s) * SECOND;
        connection.end(Some(self.clock.now_ns() + silence_ns));
        self.let_leave(connection);
    }

    /// The connection has ended; it stays known until devices have answered its requests.
    fn let_leave(&self, connection: &Arc<TargetConnection>) {
        // Locked before the connection leaves the other table, so that no thread misses it in both.
        let mut leaving = self.leaving.lock();
        if self.connections.write().remove(&connection.local).is_some() && connection.is_busy() {
            leaving.push(Arc::clone(connection));
        }
    }

    /// Ends the earlier connections of an initiator. Returns whether no device has requests of
    /// them.
    fn supersede(&self, instance: [u8; 16], holder: &Holder) -> bool {
        // A peer that uses the id of another machine's initiator must not end its connections.
        let is_own = |connection: &Arc<TargetConnection>| {
            connection.instance == instance && connection.holder.is_same_machine(holder)
        };
        let old: Vec<Arc<TargetConnection>> = {
            let connections = self.connections.read();
            connections.values().filter(|served| is_own(served)).cloned().collect()
        };
        old.iter().for_each(|served| self.drop_awaited(served));
        let mut leaving = self.leaving.lock();
        leaving.retain(|served| served.is_busy());
        !leaving.iter().any(is_own)
    }

    fn sought(&self, sender: &Arc<dyn Sender>, peer: &Peer, body: &[u8]) {
        let Ok(seek) = Seek::decode(body) else { return };
        if !seek.name.is_empty() && seek.name != self.options.name {
            return;
        }
        let reply = Seek {
            token: seek.token,
            instance: self.instance,
            sealed: self.keys.read().is_sealed(),
            name: self.options.name.clone(),
        };
        if let Ok(reply) = reply.encode() {
            self.send_packet(sender, peer, &Packet { kind: PacketKind::Found, ..NOTHING }, &reply);
        }
    }

    /// A packet belongs to an unknown connection. The answer is no longer than the packet.
    fn send_unknown(&self, sender: &Arc<dyn Sender>, peer: &Peer, of: &Packet) {
        if (of.length as usize) < SEALED_BYTES_MIN {
            return;
        }
        let keys = Arc::clone(&self.keys.read());
        let holder = keys.of_connection(of.connection);
        let proof =
            holder.map(|holder| holder.proofs.of_unknown(of.connection, of.link, of.number));
        let header = Packet { kind: PacketKind::Unknown, ..*of };
        self.send_packet(sender, peer, &header, proof.as_ref().map_or(&[], |proof| &proof[..]));
    }

    /// Sends a packet outside of connections. If it is lost, the peer asks again.
    fn send_packet(&self, sender: &Arc<dyn Sender>, peer: &Peer, header: &Packet, body: &[u8]) {
        let length = HEADER_BYTES + body.len();
        let mut burst = Burst::new(1, length);
        let packet = &mut burst.space()[..length];
        packet[HEADER_BYTES..].copy_from_slice(body);
        Packet { length: length as u32, ..*header }.encode(packet);
        burst.commit(length);
        let _ = sender.send(peer, &burst, 0);
    }

    /// Handles the timers: sends overdue packets again, and gives up connections that are silent
    /// for too long.
    pub fn tick(&self) {
        let now = self.clock.now_ns();
        let silence_ns = u64::from(self.options.silence_max_s) * SECOND;
        // Threads run this all the time, so only a silent connection may cost an allocation.
        let mut silent = Vec::new();
        for served in self.connections.read().values() {
            served.connection.tick(now);
            if now.saturating_sub(served.connection.last_received_at_ns()) > silence_ns {
                silent.push(Arc::clone(served));
            }
        }
        for served in silent {
            tracing::warn!("link: {} was silent for {} s", served.name, self.options.silence_max_s);
            self.drop_connection(&served);
        }
        self.leaving.lock().retain(|served| served.is_busy());
    }

    /// The latest time for the next [`Target::tick`].
    #[must_use]
    pub fn deadline_ns(&self) -> u64 {
        let latest = self.clock.now_ns() + SECOND;
        let connections = self.connections.read();
        let earliest =
            connections.values().filter_map(|served| served.connection.deadline_ns()).min();
        earliest.unwrap_or(latest).min(latest)
    }

    /// Ends all connections cleanly, and admits no initiator any more.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        // An initiator that is being admitted is in one of the two tables after this.
        self.handshakes.lock().half_open.clear();
        let all: Vec<Arc<TargetConnection>> = self.connections.read().values().cloned().collect();
        for served in all {
            served.connection.send_close(12, "the target is stopping");
            self.drop_connection(&served);
        }
    }

    /// The status of each connection.
    #[must_use]
    pub fn status(&self) -> Vec<crate::ConnectionStatus> {
        let (connections, now) = (self.connections.read(), self.clock.now_ns());
        connections.values().map(|served| served.status(now)).collect()
    }
}
