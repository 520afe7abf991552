//! How a connection is made: hellos until a welcome, a join for each link, volumes opened again.
//!
//! Invariants: hellos are sent on every link with a carrier, with growing pauses, until one is
//! answered. A link carries requests only after its join was answered, in packets as long as the
//! join. Unsealed input ends nothing: it may start an attempt, which succeeds only with a holder of
//! the key.
//!
//! Not here: the messages of a session (`crate::session`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sawmill_device::{Error, ErrorKind};
use sawmill_format::link::greeting::{Cookie, GREETING_BYTES_MAX, Hello, Welcome};
use sawmill_format::link::part::{Word, WordKind};
use sawmill_format::link::{HEADER_BYTES, PACKET_BYTES_MIN, Packet, PacketKind, VERSION};

use super::slots::Slots;
use super::{Initiator, Live};
use crate::carrier::{BROADCAST, Batch, Peer, Waker};
use crate::clock::{MS, SECOND};
use crate::connection::{Came, Connection, Path, Said};
use crate::session::handshake::{TOKEN_BYTES, token_of};
use crate::session::proof::Proof;
use crate::session::{Greeting, HANDSHAKE_BYTES, Security};

/// Both ends prove this text, so that they mean the same protocol.
pub(crate) const PROLOGUE: &[u8] = b"sawmill link 1";

const HELLO_NS_FIRST: u64 = 50 * MS;
const HELLO_NS_MAX: u64 = 500 * MS;
const JOIN_NS_FIRST: u64 = 20 * MS;
const JOIN_NS_MAX: u64 = 250 * MS;
/// The interval in which further cookies of a link are ignored.
const COOKIE_EVERY_NS: u64 = 50 * MS;
/// An unauthenticated *unknown* is believed after the connection was silent for this long. With a
/// key, only targets of an older version need this wait. After one attempt it is ignored for as
/// long again.
const UNPROVED_SILENCE_NS: u64 = 3 * KEEP_ALIVE_NS;
const CLEAR_SILENCE_NS: u64 = 200 * MS;
const UNPROVED_EVERY_NS: u64 = SECOND;
/// Joins of one length without an answer before a shorter one is tried.
const JOINS_OF_A_LENGTH: u32 = 3;
/// Interval of probes on an idle link, so that the target keeps us, and a dead link is known before
/// it is used.
const KEEP_ALIVE_NS: u64 = 5 * SECOND;
/// The most pings between attempts to join a link with longer packets: about five minutes.
const LONGER_PINGS_MAX: u32 = 64;
/// The longest use of a connection's keys, and the interval of checks whether new keys are due.
const REKEY_NS: u64 = 24 * 3600 * SECOND;
const REKEY_LOOK_NS: u64 = SECOND;
const OVERDUE: u64 = 16;

/// The carrier of a link, and the state of its join.
#[derive(Default)]
pub(super) struct Way {
    pub(super) path: Option<Path>,
    join: Option<Join>,
    joined: bool,
    next_ping_ns: u64,
    /// The cookie that a target under load wants with the hello of this token, and when the hello
    /// may be sent again.
    cookie: Option<([u8; TOKEN_BYTES], Proof)>,
    next_cookie_ns: u64,
    /// The longest packets of the link as it was joined, which may be shorter than its carrier
    /// allows.
    packet_bytes: usize,
    /// Pings until longer packets are tried, and the number last time.
    longer_in: u32,
    longer_after: u32,
}

/// An attempt to join. For a link that is joined and in use, it tries longer packets.
struct Join {
    token: u64,
    packet_bytes: usize,
    said: u32,
    next_ns: u64,
    /// The packet length that the link keeps unless the first word is answered.
    kept_bytes: Option<usize>,
}

impl Way {
    /// A link that was joined while its path was down may have ended with any length, so longer
    /// packets are tried now and then, ever less often.
    fn try_longer(&mut self, now: u64, token: impl FnOnce() -> u64) {
        let Some(path) = self.path.as_ref().filter(|path| path.peer != Peer::Stream) else {
            return;
        };
        if self.join.is_some() || self.packet_bytes >= path.packet_bytes_max {
            return;
        }
        self.longer_in = self.longer_in.saturating_sub(1);
        if self.longer_in == 0 {
            self.longer_after = (self.longer_after * 2).min(LONGER_PINGS_MAX);
            self.longer_in = self.longer_after;
            let (packet_bytes, kept_bytes) = (path.packet_bytes_max, Some(self.packet_bytes));
            self.join =
                Some(Join { token: token(), packet_bytes, said: 0, next_ns: now, kept_bytes });
        }
    }
}

/// An attempt to connect.
#[derive(Default)]
pub(super) struct Attempt {
    wanted: bool,
    greeting: Option<(Greeting, Vec<u8>, u64)>,
    next_ns: u64,
    pause_ns: u64,
    /// An unauthenticated message of a target, for the error that the user sees.
    pub(super) hint: Option<String>,
}

impl Attempt {
    pub(super) fn begin(&mut self) {
        *self = Attempt { wanted: true, hint: self.hint.take(), ..Attempt::default() };
    }
}

impl Initiator {
    /// Gives link `index` a carrier, new or again.
    pub fn add_way(
        &self,
        index: usize,
        sender: Arc<dyn crate::carrier::Sender>,
        peer: Peer,
        waker: Option<Arc<Waker>>,
    ) {
        let Some(way) = self.ways.get(index) else { return };
        *way.lock() = Way { path: Some(Path::new(sender, peer, waker)), ..Way::default() };
        {
            let mut attempt = self.attempt.lock();
            attempt.wanted |= self.live().is_none();
        }
        self.tick();
    }

    /// Link `index` has lost its carrier: what was in flight there uses other links.
    pub fn lose_way(&self, index: usize) {
        let Some(way) = self.ways.get(index) else { return };
        *way.lock() = Way::default();
        if let Some(live) = self.live() {
            live.connection.close_link(index);
        }
        self.tick();
    }

    /// A packet arrived from `peer`, on the carrier of a link.
    pub fn receive(&self, peer: &Peer, packet: &mut [u8]) {
        let now = self.clock.now_ns();
        let Ok(header) = Packet::decode(packet) else { return };
        let packet = &mut packet[..header.length as usize];
        match header.kind {
            PacketKind::Sealed => self.sealed(peer, &header, packet, now),
            PacketKind::Welcome => self.welcomed(&packet[HEADER_BYTES..], now),
            PacketKind::Refused => {
                let mut attempt = self.attempt.lock();
                if let Some((greeting, ..)) = &mut attempt.greeting
                    && let Err(refused) = greeting.finish(&packet[HEADER_BYTES..])
                {
                    attempt.hint = Some(refused.to_string());
                }
            }
            PacketKind::Unknown => self.unknown(&header, &packet[HEADER_BYTES..], now),
            PacketKind::Cookie => self.cookied(&header, &packet[HEADER_BYTES..], now),
            PacketKind::Hello | PacketKind::Retry | PacketKind::Seek | PacketKind::Found => {}
        }
    }

    /// The target, or an impostor, does not know the connection. An unauthenticated claim counts
    /// only if nothing contradicts it: nothing was received on the connection lately.
    fn unknown(&self, header: &Packet, proof: &[u8], now: u64) {
        let Some(live) = self.live().filter(|live| live.remote == header.connection) else {
            return;
        };
        let proved =
            self.proofs.is_of_unknown(header.connection, header.link, header.number, proof);
        let sealed = matches!(self.security, Security::Key(_));
        if !(proved && sealed) {
            let heard_ns = live.connection.heard_ns().max(live.since_ns);
            let silence_ns = if sealed { UNPROVED_SILENCE_NS } else { CLEAR_SILENCE_NS };
            if now.saturating_sub(heard_ns) < silence_ns
                || now < self.unknown_next_ns.load(Ordering::Relaxed)
            {
                return;
            }
            self.unknown_next_ns.store(now + UNPROVED_EVERY_NS, Ordering::Relaxed);
        }
        self.attempt.lock().wanted = true;
    }

    /// A target under load checks whether we receive at our address: repeats the hello with its
    /// cookie.
    fn cookied(&self, header: &Packet, body: &[u8], now: u64) {
        let (Ok(Cookie { cookie, proof }), Some(way)) =
            (Cookie::decode(body), self.ways.get(usize::from(header.link)))
        else {
            return;
        };
        let attempt = self.attempt.lock();
        let Some((_, message, _)) = &attempt.greeting else { return };
        let hello = &message[HEADER_BYTES..];
        let Ok(token) = token_of(hello).try_into() else { return };
        if !self.proofs.is_of_cookie(hello, header.link, &cookie, &proof) {
            return;
        }
        let message = message.clone();
        drop(attempt);
        let path = {
            let mut way = way.lock();
            if way.cookie == Some((token, cookie)) || now < way.next_cookie_ns {
                return;
            }
            (way.cookie, way.next_cookie_ns) = (Some((token, cookie)), now + COOKIE_EVERY_NS);
            way.path.clone()
        };
        if let Some(path) = path {
            self.say_hello(&path, header.link, &message, Some(cookie));
        }
    }

    /// Makes a new connection in good time, long before the keys of this one have sealed too much.
    /// It waits until nothing is in flight, so that no request waits for what a device still has of
    /// the old connection. After [`OVERDUE`] times as long without an idle moment it does not wait:
    /// unanswered requests are sent again.
    fn rekey(&self, live: &Live, now: u64) {
        if now < self.rekey_look_ns.load(Ordering::Relaxed) {
            return;
        }
        let (used, age) = (live.connection.carried_bytes(), now.saturating_sub(live.since_ns));
        let bytes_max = self.options.rekey_bytes;
        let is_due =
            |times: u64| used >= bytes_max.saturating_mul(times) || age >= REKEY_NS * times;
        if !is_due(1) || !matches!(self.security, Security::Key(_)) {
            return self.rekey_look_ns.store(now + REKEY_LOOK_NS, Ordering::Relaxed);
        }
        if self.pendings.count() == 0 || is_due(OVERDUE) {
            let mut attempt = self.attempt.lock();
            // Another one may have been made since.
            attempt.wanted |= self.live().is_some_and(|newest| newest.local == live.local);
        }
    }

    fn sealed(&self, peer: &Peer, header: &Packet, packet: &mut [u8], now: u64) {
        let Some(live) = self.live().filter(|live| live.local == header.connection) else { return };
        let (mut words, mut closed) = ([None; 4], None);
        let came = live.connection.receive(header, packet, now, &mut |said| match said {
            Said::Word(word) => {
                if let Some(place) = words.iter_mut().find(|place| place.is_none()) {
                    *place = Some(word);
                }
            }
            Said::Close(status, text) => closed = Some((status, text.to_owned())),
        });
        match came {
            Err(breach) => self.breach(live.local, breach),
            Ok(Came::Dropped) => {}
            Ok(Came::Taken) => {
                words.iter().flatten().for_each(|word| self.word(&live, peer, word, now));
                if let Some((status, text)) = closed {
                    self.closed(live.local, status, &text);
                }
            }
        }
    }

    fn closed(&self, local: u64, status: u8, text: &str) {
        let error = crate::status::error_of(status, text);
        match error.kind() {
            // The target is stopping, or has lost this connection: another may come.
            ErrorKind::Closed | ErrorKind::Unavailable => self.drop_connection(local, text),
            _ => self.fail(error),
        }
    }

    fn word(&self, live: &Live, peer: &Peer, word: &Word, now: u64) {
        let index = usize::from(word.link);
        let Some(way) = self.ways.get(index) else { return };
        let mut way = way.lock();
        match word.kind {
            WordKind::Joined => {
                let Some(join) = way.join.take_if(|join| join.token == word.token) else { return };
                let packet_bytes =
                    join.packet_bytes.min(word.packet_bytes as usize).max(PACKET_BYTES_MIN);
                if !way.joined {
                    (way.longer_in, way.longer_after) = (1, 1);
                }
                (way.joined, way.packet_bytes) = (true, packet_bytes);
                way.next_ping_ns = now + KEEP_ALIVE_NS;
                if let Some(mut path) = way.path.clone() {
                    if path.peer == BROADCAST {
                        // The broadcast reached all; this one has the key.
                        path.peer = *peer;
                    }
                    drop(way);
                    live.connection.open_link(index, path, packet_bytes);
                }
            }
            WordKind::Leave => {
                way.joined = false;
                way.join = None;
                drop(way);
                live.connection.close_link(index);
            }
            WordKind::Join | WordKind::Ping => {}
        }
    }

    fn welcomed(&self, message: &[u8], now: u64) {
        let mut attempt = self.attempt.lock();
        let Some((greeting, _, local)) = &mut attempt.greeting else { return };
        let local = *local;
        let (seals, payload) = match greeting.finish(message) {
            Ok(made) => made,
            Err(refused) => {
                attempt.hint = Some(refused.to_string());
                return;
            }
        };
        let welcome =
            Welcome::decode(&payload).map_err(|error| error.to_string()).and_then(|welcome| {
                let granted = welcome.slots <= self.options.slots
                    && welcome.slot_bytes <= self.options.slot_bytes;
                match granted && welcome.version == VERSION {
                    true => Ok(welcome),
                    false => Err("the target grants more than the initiator requested".to_owned()),
                }
            });
        let welcome = match welcome {
            Ok(welcome) => welcome,
            Err(text) => {
                attempt.hint = Some(text);
                return attempt.begin();
            }
        };
        *attempt = Attempt::default();
        // The attempt stays locked until there is a connection, so that no other attempt starts.
        self.connected(local, seals, &welcome, now);
        drop(attempt);
        self.go_on(now);
    }

    fn connected(&self, local: u64, seals: crate::session::Seals, welcome: &Welcome, now: u64) {
        let me = self.myself.clone();
        let ended = Box::new(move |ended| {
            if let Some(me) = me.upgrade() {
                me.ended(local, ended);
            }
        });
        let slots =
            Slots::new(welcome.slots, welcome.slot_bytes, Arc::clone(&self.pendings), ended);
        let links = self.ways.len().min(welcome.links.into());
        let (count, remote) = (usize::from(welcome.slots), welcome.connection);
        *self.target_name.lock() = crate::legible(&welcome.name).into_owned();
        self.live().inspect(|live| self.was_served(live));
        let heard_ns = self.was_greeted(now);
        let connection = Arc::new(Connection::new(remote, seals, links, count, slots, heard_ns));
        for way in &self.ways {
            let mut way = way.lock();
            *way = Way { path: way.path.take(), ..Way::default() };
        }
        let (opened, chunks) = {
            let mut current = self.connection.write();
            if self.failed.lock().is_some() {
                return;
            }
            let opened = self.volumes.read().is_empty();
            let old = current.replace(Live { connection, local, remote, since_ns: now, opened });
            // No chunk may use the old connection once one can use the new one.
            (opened, old.map(|old| old.connection.role.abandon()).unwrap_or_default())
        };
        chunks.into_iter().for_each(|chunk| self.pendings.put_back(chunk));
        if !opened {
            self.open_again();
        }
    }

    /// Handles the timers: sends hellos, joins and pings that are due, checks links, and resumes
    /// requests.
    pub fn tick(&self) {
        let now = self.clock.now_ns();
        if self.failed.lock().is_some() {
            return;
        }
        self.greet(now);
        self.look_at_reopened();
        if let Some(live) = self.live() {
            self.rekey(&live, now);
            for index in 0..live.connection.links.len() {
                self.look_after(&live, index, now);
            }
            if self.pendings.count() > 0 {
                self.go_on(now);
            }
            live.connection.tick(now);
        }
        self.give_up(now);
    }

    /// Fails everything if no target has served within the time-out. A target that answers hellos
    /// but opens nothing does not serve.
    fn give_up(&self, now: u64) {
        let most_ns = u64::from(self.options.timeout_s) * SECOND;
        if most_ns == 0 {
            return;
        }
        self.live().inspect(|live| self.was_served(live));
        let since_ns = self.patience_ns.load(Ordering::SeqCst);
        if now.saturating_sub(since_ns) >= most_ns && self.pendings.count() > 0 {
            let hint = self.attempt.lock().hint.clone();
            let hint = hint
                .map_or(String::new(), |hint| format!(" (last reply, unauthenticated: {hint})"));
            let text = format!("no answer from the target for {} s{hint}", self.options.timeout_s);
            self.fail(Error::new(ErrorKind::Unreachable, text));
        }
    }

    fn greet(&self, now: u64) {
        let mut attempt = self.attempt.lock();
        if !attempt.wanted || now < attempt.next_ns {
            return;
        }
        if attempt.greeting.is_none() {
            let local = self.random();
            let hello = Hello {
                versions: (VERSION, VERSION),
                slots: self.options.slots,
                slot_bytes: self.options.slot_bytes,
                connection: local,
                instance: self.instance,
                links: self.ways.len() as u8,
                name: self.options.name.clone(),
            };
            let mut message = vec![0; HEADER_BYTES + GREETING_BYTES_MAX + HANDSHAKE_BYTES];
            let made = hello.encode().map_err(|error| error.to_string()).and_then(|payload| {
                Greeting::new(&self.security, PROLOGUE, &payload, &mut message[HEADER_BYTES..])
                    .map_err(|refused| refused.to_string())
            });
            match made {
                Ok((greeting, bytes)) => {
                    message.truncate(HEADER_BYTES + bytes);
                    attempt.greeting = Some((greeting, message, local));
                }
                Err(text) => {
                    attempt.hint = Some(text);
                    return;
                }
            }
        }
        attempt.pause_ns = (attempt.pause_ns * 2).clamp(HELLO_NS_FIRST, HELLO_NS_MAX);
        attempt.next_ns = now + attempt.pause_ns;
        let message =
            attempt.greeting.as_ref().map(|(_, message, _)| message.clone()).unwrap_or_default();
        drop(attempt);
        for (link, way) in self.ways.iter().enumerate() {
            let (path, cookie) = {
                let way = way.lock();
                (way.path.clone(), way.cookie)
            };
            let Some(path) = path else { continue };
            let own = |(token, _): &([u8; TOKEN_BYTES], Proof)| {
                token == token_of(&message[HEADER_BYTES..])
            };
            let cookie = cookie.filter(own).map(|(_, cookie)| cookie);
            self.say_hello(&path, link as u8, &message, cookie);
        }
    }

    fn say_hello(&self, path: &Path, link: u8, message: &[u8], cookie: Option<Proof>) {
        let hello = &message[HEADER_BYTES..];
        let before = cookie.as_ref().map_or(&[][..], |cookie| &cookie[..]);
        let length = HEADER_BYTES + before.len() + hello.len();
        let mut batch = Batch::new(1, length);
        let packet = &mut batch.space()[..length];
        let (said_before, said) = packet[HEADER_BYTES..].split_at_mut(before.len());
        said_before.copy_from_slice(before);
        said.copy_from_slice(hello);
        let kind = if cookie.is_some() { PacketKind::Retry } else { PacketKind::Hello };
        let number = u64::from(self.proofs.hint(hello));
        Packet { kind, length: length as u32, connection: 0, link, number }.encode(packet);
        batch.commit(length);
        // A lost hello is repeated.
        let _ = path.sender.send(&path.peer, &batch, 0);
    }

    /// Joins link `index`, and probes it if it is silent or idle.
    fn look_after(&self, live: &Live, index: usize, now: u64) {
        let mut way = self.ways[index].lock();
        let Some(path) = way.path.clone() else { return };
        if way.joined {
            if now >= way.next_ping_ns {
                way.next_ping_ns = now + KEEP_ALIVE_NS;
                live.connection.ping(index);
                way.try_longer(now, || self.random());
            }
        } else if way.join.is_none() {
            let (token, packet_bytes) = (self.random(), path.packet_bytes_max);
            way.join = Some(Join { token, packet_bytes, said: 0, next_ns: now, kept_bytes: None });
        }
        let Some(join) = way.join.as_mut().filter(|join| now >= join.next_ns) else { return };
        if join.said > 0 && path.peer != Peer::Stream {
            join.packet_bytes = match join.kept_bytes {
                Some(kept_bytes) => kept_bytes,
                None if join.said % JOINS_OF_A_LENGTH == 0 => {
                    shorter(join.packet_bytes, path.packet_bytes_max)
                }
                None => join.packet_bytes,
            };
        }
        join.said += 1;
        join.next_ns = now + (JOIN_NS_FIRST << join.said.min(6)).min(JOIN_NS_MAX);
        let word = Word {
            kind: WordKind::Join,
            link: index as u8,
            packet_bytes: join.packet_bytes as u32,
            token: join.token,
        };
        let padded = if path.peer == Peer::Stream { PACKET_BYTES_MIN } else { join.packet_bytes };
        drop(way);
        live.connection.send_word(index, &path, &word, padded);
    }

    /// The latest time for the next [`Initiator::tick`]. Never, once everything has failed: nothing
    /// is due any more.
    #[must_use]
    pub fn deadline_ns(&self) -> u64 {
        if self.failed.lock().is_some() {
            return u64::MAX;
        }
        let now = self.clock.now_ns();
        if self.failed.lock().is_some() {
            // Nothing is due any more, whatever was.
            return now + SECOND;
        }
        let attempt = self.attempt.lock();
        let greet = if attempt.wanted { attempt.next_ns } else { u64::MAX };
        drop(attempt);
        let mut next = greet.min(now + SECOND);
        for way in &self.ways {
            let way = way.lock();
            if way.path.is_some() {
                let join = way.join.as_ref().map_or(u64::MAX, |join| join.next_ns);
                let ping = if way.joined { way.next_ping_ns } else { u64::MAX };
                next = next.min(join).min(ping);
            }
        }
        if let Some(live) = self.live() {
            next = next.min(live.connection.deadline_ns().unwrap_or(u64::MAX));
        }
        next
    }

    /// Whether link `index` waits for its carrier to have room.
    #[must_use]
    pub fn is_blocked(&self, index: usize) -> bool {
        self.live().is_some_and(|live| {
            index < live.connection.links.len() && live.connection.is_blocked(index)
        })
    }
}

/// The next length to try on a path: the usual lengths of Ethernet, then from the start again.
fn shorter(packet_bytes: usize, most: usize) -> usize {
    const USUAL: [usize; 4] = [8900, 4000, 1420, PACKET_BYTES_MIN];
    USUAL.into_iter().find(|usual| *usual < packet_bytes).unwrap_or(most)
}
