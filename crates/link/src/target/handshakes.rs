//! Hellos, and the connections that they lead to.
//!
//! Invariants: while a target is under load, the answer to a hello without proof is never longer
//! than the hello. A connection starts with a packet that opened, after all devices have answered
//! the requests of the previous connection.
//!
//! Not here: their table (`half_open`), the keys (`keys`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sawmill_format::link::greeting::{Cookie, GREETING_BYTES_MAX, Hello, Welcome};
use sawmill_format::link::{LINKS_MAX, PROOF_BYTES, Packet, PacketKind, VERSION};

use super::half_open::{HalfOpen, HalfOpenTable};
use super::keys::Holder;
use super::served::{ConnectionIdentity, TargetConnection};
use super::{Arrival, ConnectionLookup, NOTHING, Target};
use crate::carrier::{Peer, Sender};
use crate::initiator::PROLOGUE;
use crate::session::handshake::{may_be_greeting, refusal};
use crate::session::proof::CookieSecrets;
use crate::session::{HANDSHAKE_BYTES, PacketRefusal, Seals, answer};
use crate::source::PacketSource;

/// The state of handshakes.
#[derive(Default)]
pub(super) struct Handshakes {
    pub(super) half_open: HalfOpenTable,
    cookies: CookieSecrets,
}

/// A hello that was answered.
struct AnsweredHello {
    local: u64,
    holder: Arc<Holder>,
    hello: Hello,
    welcome: Welcome,
    message: Vec<u8>,
    seals: Seals,
}

impl AnsweredHello {
    /// The connection that its first sealed packet makes.
    fn half_open(self, message: &[u8], source: Option<PacketSource>, now: u64) -> HalfOpen {
        HalfOpen {
            local: self.local,
            holder: self.holder,
            message: message.to_vec(),
            welcome: self.message,
            seals: self.seals,
            since_ns: now,
            links: self.welcome.links.into(),
            places: self.welcome.places,
            place_bytes: self.welcome.place_bytes,
            hello: self.hello,
            source,
        }
    }
}

impl Target {
    pub(super) fn greeted(
        &self,
        from: Arrival<'_>,
        header: &Packet,
        message: &[u8],
        cookie: Option<&[u8; PROOF_BYTES]>,
        now: u64,
    ) {
        let Arrival { sender, peer, .. } = from;
        let mut greeted = self.handshakes.lock();
        let keys = Arc::clone(&self.keys.read());
        let Handshakes { half_open: waiting, cookies } = &mut *greeted;
        if self.closed.load(Ordering::SeqCst) {
            return;
        }
        waiting.expire(now);
        // The same hello on another link, or repeated: the same answer.
        if let Some(half) = waiting.find(message) {
            return self.send_to(
                sender,
                peer,
                PacketKind::Welcome,
                half.hello.connection,
                &half.welcome,
            );
        }
        if waiting.is_spent(message) {
            return;
        }
        let holders = keys.of_greeting(header.number, message);
        let has_proven_address = *peer == Peer::Stream
            || cookie.is_some_and(|it| cookies.is_ours(it, peer, message, now));
        let source = has_proven_address.then(|| PacketSource::of_peer(peer, sender));
        let may_be = may_be_greeting(keys.any(), message);
        if may_be && !holders.is_empty() && !waiting.admits(source, now) {
            // A sender that is really there repeats it, even after it has proved its address.
            if let ([holder], None) = (holders, source)
                && let Some(cookie) = cookies.cookie(peer, message, now)
            {
                let proof = holder.proofs.of_cookie(message, header.link, &cookie);
                let header = Packet { kind: PacketKind::Cookie, link: header.link, ..NOTHING };
                self.send_packet(sender, peer, &header, &Cookie { cookie, proof }.encode());
            }
            return;
        }
        let answer = match self.answer(holders, message, keys.any()) {
            Ok(Some(answer)) => answer,
            Ok(None) => return,
            Err(refusal) => {
                tracing::debug!("link: refused a hello: {refusal}");
                return self.refuse(sender, peer, header.connection, &keys, refusal);
            }
        };
        let connection = answer.hello.connection;
        if answer.hello.versions.0 > VERSION || answer.hello.versions.1 < VERSION {
            return self.refuse(sender, peer, connection, &keys, PacketRefusal::Unknown);
        }
        self.send_to(sender, peer, PacketKind::Welcome, connection, &answer.message);
        waiting.push(answer.half_open(message, source, now));
    }

    fn refuse(
        &self,
        sender: &Arc<dyn Sender>,
        peer: &Peer,
        connection: u64,
        keys: &super::keys::Ring,
        reason: PacketRefusal,
    ) {
        if let Some(text) = refusal(keys.any(), reason) {
            self.send_to(sender, peer, PacketKind::Refused, connection, &text);
        }
    }

    fn send_to(
        &self,
        sender: &Arc<dyn Sender>,
        peer: &Peer,
        kind: PacketKind,
        connection: u64,
        body: &[u8],
    ) {
        self.send_packet(sender, peer, &Packet { kind, connection, ..NOTHING }, body);
    }

    /// Answers a greeting with the first key that it proves; none if its payload is invalid.
    fn answer(
        &self,
        holders: &[Arc<Holder>],
        message: &[u8],
        any: &crate::session::Security,
    ) -> Result<Option<AnsweredHello>, PacketRefusal> {
        // The refusal for a message of this shape if no key fits.
        let mut refusal = match may_be_greeting(any, message) {
            true => PacketRefusal::Unproven,
            false => answer(any, PROLOGUE, message, |_| Vec::new(), &mut [])
                .err()
                .unwrap_or(PacketRefusal::Unproven),
        };
        for holder in holders {
            let mut out = vec![0; GREETING_BYTES_MAX + HANDSHAKE_BYTES];
            let local = holder.number((self.random.lock())());
            let mut hello_and_welcome = None;
            let respond = |payload: &[u8]| {
                let Ok(hello) = Hello::decode(payload) else { return Vec::new() };
                let welcome = self.welcome(&hello, local);
                let payload = welcome.encode().unwrap_or_default();
                hello_and_welcome = Some((hello, welcome));
                payload
            };
            match answer(&holder.security, PROLOGUE, message, respond, &mut out) {
                Ok((seals, bytes)) => {
                    out.truncate(bytes);
                    let holder = Arc::clone(holder);
                    let answered_hello = |(hello, welcome)| AnsweredHello {
                        local,
                        holder,
                        hello,
                        welcome,
                        message: out,
                        seals,
                    };
                    return Ok(hello_and_welcome.map(answered_hello));
                }
                Err(PacketRefusal::Unproven) => {}
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    fn welcome(&self, hello: &Hello, local: u64) -> Welcome {
        Welcome {
            version: VERSION,
            links: hello.links.clamp(1, LINKS_MAX as u8),
            places: hello.places.min(self.options.places_max),
            place_bytes: hello.place_bytes.min(self.options.place_bytes_max),
            connection: local,
            instance: self.instance,
            silence_max_s: self.options.silence_max_s,
            name: self.options.name.clone(),
        }
    }

    /// Finds the connection of a sealed packet. The first packet after a handshake makes the
    /// connection: it shows that its sender has the key now, and that the hello was no replay.
    pub(super) fn look_up(
        &self,
        from: Arrival<'_>,
        header: &Packet,
        packet: &mut [u8],
    ) -> ConnectionLookup {
        if let Some(served) = self.find_connection(header.connection) {
            return ConnectionLookup::Served(served);
        }
        let mut greeted = self.handshakes.lock();
        // Its first packets arrive on several links at the same time: one thread makes the
        // connection, others find it.
        if let Some(served) = self.find_connection(header.connection) {
            return ConnectionLookup::Served(served);
        }
        let Some(index) = greeted.half_open.position(header.connection) else {
            return ConnectionLookup::Nobody;
        };
        let half = greeted.half_open.at(index);
        // A copy is opened here; the connection opens the packet itself again.
        if half.seals.open(&mut packet.to_vec()).is_err() {
            return ConnectionLookup::Later;
        }
        let (instance, source) =
            (half.hello.instance, PacketSource::of_peer(from.peer, from.sender));
        if !self.supersede(instance, &half.holder) || !self.has_room(source) {
            // The sender repeats it; by then the device may be done, or there may be room.
            return ConnectionLookup::Later;
        }
        // The table stays locked until the connection is known, so that no packet is answered with
        // *unknown*.
        let half = greeted.half_open.take(index);
        let who = ConnectionIdentity {
            local: half.local,
            remote: half.hello.connection,
            instance,
            name: half.holder.display_name(&half.hello.name),
            holder: half.holder,
            links: half.links,
            places: half.places,
            place_bytes: half.place_bytes,
            source,
        };
        let (exports, random) = (Arc::clone(&self.exports), Arc::clone(&self.random));
        let served =
            TargetConnection::new(who, half.seals, exports, random, Arc::clone(&self.clock));
        self.connections.write().insert(served.local, Arc::clone(&served));
        ConnectionLookup::Served(served)
    }

    /// Whether there is room for one more connection from `source`. Connections that have ended
    /// count for as long as a device has requests of them, because these hold their places.
    /// Connections that have never opened anything are evicted: the oldest of the source that has
    /// most of them. A new connection has a while to open something, unless its source has others.
    fn has_room(&self, source: PacketSource) -> bool {
        let goes = {
            // Held until the other table is counted, so that no connection is missed in both.
            let mut leaving = self.leaving.lock();
            leaving.retain(|served| served.is_busy());
            let connections = self.connections.read();
            if connections.len() + leaving.len() < self.options.connections_max {
                return true;
            }
            let now = self.clock.now_ns();
            let idle: Vec<&Arc<TargetConnection>> =
                connections.values().filter(|served| !served.has_opened()).collect();
            let of = |source| idle.iter().filter(|served| served.source == source).count();
            let own = of(source);
            let may_go = |target_connection: &&&Arc<TargetConnection>| {
                let idle_count = of(target_connection.source);
                idle_count > own.max(1)
                    || now.saturating_sub(target_connection.since_ns) >= super::UNOPENED_NS_MIN
            };
            let oldest_first = |target_connection: &&&Arc<TargetConnection>| {
                (of(target_connection.source), u64::MAX - target_connection.since_ns)
            };
            idle.iter().filter(may_go).max_by_key(oldest_first).map(|served| Arc::clone(served))
        };
        let Some(goes) = goes else {
            let (open, ended) = (self.connections.read().len(), self.leaving.lock().len());
            tracing::debug!("link: no room: {open} connections, {ended} ended ones at devices");
            return false;
        };
        tracing::debug!(
            "link: dropping {}, which has no open export, to make room for another connection",
            goes.name
        );
        goes.connection
            .send_close(7, "the target is out of connections, and this one has no open export");
        self.drop_connection(&goes);
        // It may have been opening something; then the sender asks again.
        !goes.is_busy()
    }
}
