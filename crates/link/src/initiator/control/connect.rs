//! How a connection is made: hellos until a welcome, and another connection when its keys are old
//! or the target does not know it.
//!
//! Invariants: hellos are sent on every link with a carrier, with growing pauses, until one is
//! answered. Unsealed input ends nothing: it may start an attempt, which succeeds only with a
//! holder of the key.
//!
//! Not here: the messages of a session (`crate::session`), joins (`join`).

use std::sync::Arc;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_format::link::greeting::{Cookie, GREETING_BYTES_MAX, Hello, Welcome};
use sawmill_format::link::{HEADER_BYTES, Packet, PacketKind, VERSION};

use super::join::{KEEP_ALIVE_EVERY_NS, LinkJoin};
use super::{Control, ControlAction};
use crate::carrier::Burst;
use crate::clock::{MS, SECOND};
use crate::connection::{Connection, Route};
use crate::initiator::places::InitiatorPlaces;
use crate::initiator::{Initiator, LiveConnection};
use crate::session::handshake::{TOKEN_BYTES, token_of};
use crate::session::proof::Proof;
use crate::session::{Greeting, HANDSHAKE_BYTES, Seals, Security};

/// Both ends prove this text, so both speak the same protocol.
pub(crate) const PROLOGUE: &[u8] = b"sawmill link 1";

const HELLO_NS_FIRST: u64 = 50 * MS;
const HELLO_NS_MAX: u64 = 500 * MS;
/// The interval in which further cookies of a link are ignored.
const COOKIE_EVERY_NS: u64 = 50 * MS;
/// An unauthenticated *unknown* is believed after the connection was silent for this long. With a
/// key, only targets of an older version need this wait. After one attempt it is ignored for as
/// long again.
const UNPROVED_SILENCE_NS: u64 = 3 * KEEP_ALIVE_EVERY_NS;
const CLEAR_SILENCE_NS: u64 = 200 * MS;
const UNPROVED_EVERY_NS: u64 = SECOND;
/// The longest use of a connection's keys, and the interval of checks whether new keys are due.
const REKEY_NS: u64 = 24 * 3600 * SECOND;
const REKEY_CHECK_EVERY_NS: u64 = SECOND;
const OVERDUE_FACTOR: u64 = 16;

/// An attempt to connect.
#[derive(Default)]
pub(super) struct Attempt {
    pub(super) is_wanted: bool,
    hello: Option<SentHello>,
    pub(super) next_at_ns: u64,
    pause_ns: u64,
    /// An unauthenticated message of a target, for the error that the user sees.
    pub(super) hint: Option<Error>,
}

/// A hello that was sent.
struct SentHello {
    greeting: Greeting,
    /// Its packet, with room for the header.
    message: Arc<[u8]>,
    /// Our number of the connection that it asks for.
    local: u64,
}

impl Attempt {
    pub(super) fn begin(&mut self) {
        *self = Attempt { is_wanted: true, hint: self.hint.take(), ..Attempt::default() };
    }

    /// A target refused; its message may give the reason.
    pub(super) fn refused(&mut self, message: &[u8]) {
        if let Some(hello) = &mut self.hello
            && let Err(refusal) = hello.greeting.finish(message)
        {
            self.hint = Some(connect_error(refusal));
        }
    }
}

impl Control {
    /// Sends a hello on each link, if one is due.
    pub(super) fn greet(&mut self, of: &Initiator, now: u64) {
        if !self.attempt.is_wanted || now < self.attempt.next_at_ns {
            return;
        }
        if self.attempt.hello.is_none() {
            match new_hello(of, self.random.id(), self.joins.len()) {
                Ok(hello) => self.attempt.hello = Some(hello),
                Err(error) => {
                    self.attempt.hint = Some(error);
                    return;
                }
            }
        }
        self.attempt.pause_ns = (self.attempt.pause_ns * 2).clamp(HELLO_NS_FIRST, HELLO_NS_MAX);
        self.attempt.next_at_ns = now + self.attempt.pause_ns;
        let Some(SentHello { message, .. }) = &self.attempt.hello else { return };
        let token = token_of(&message[HEADER_BYTES..]);
        for (link, join) in self.joins.iter().enumerate() {
            let Some(route) = join.route.clone() else { continue };
            let own = join.cookie.filter(|(of, _)| of == token);
            let (cookie, message) = (own.map(|(_, cookie)| cookie), Arc::clone(message));
            self.acts.push(ControlAction::SayHello { route, link: link as u8, message, cookie });
        }
    }

    /// The target, or an impostor, does not know the connection. An unauthenticated claim counts
    /// only if nothing contradicts it: nothing was received on the connection lately.
    pub(super) fn unknown(&mut self, of: &Initiator, header: &Packet, proof: &[u8], now: u64) {
        let Some(live) = of.live().filter(|live| live.remote == header.connection) else {
            return;
        };
        let proved = of.proofs.is_of_unknown(header.connection, header.link, header.number, proof);
        let sealed = matches!(of.security, Security::Key(_));
        if !(proved && sealed) {
            let last_received_at_ns = live.connection.last_received_at_ns().max(live.since_ns);
            let silence_ns = if sealed { UNPROVED_SILENCE_NS } else { CLEAR_SILENCE_NS };
            if now.saturating_sub(last_received_at_ns) < silence_ns || now < self.unknown_next_at_ns
            {
                return;
            }
            self.unknown_next_at_ns = now + UNPROVED_EVERY_NS;
        }
        self.attempt.is_wanted = true;
    }

    /// Repeats the hello with the cookie of a target under load, which proves that we receive at
    /// our address.
    pub(super) fn cookied(&mut self, of: &Initiator, header: &Packet, body: &[u8], now: u64) {
        let (Ok(Cookie { cookie, proof }), Some(join)) =
            (Cookie::decode(body), self.joins.get_mut(usize::from(header.link)))
        else {
            return;
        };
        let Some(SentHello { message, .. }) = &self.attempt.hello else { return };
        let hello = &message[HEADER_BYTES..];
        let Ok(token): Result<[u8; TOKEN_BYTES], _> = token_of(hello).try_into() else { return };
        if !of.proofs.is_of_cookie(hello, header.link, &cookie, &proof)
            || join.cookie == Some((token, cookie))
            || now < join.next_cookie_at_ns
        {
            return;
        }
        (join.cookie, join.next_cookie_at_ns) = (Some((token, cookie)), now + COOKIE_EVERY_NS);
        if let Some(route) = join.route.clone() {
            let (link, message) = (header.link, Arc::clone(message));
            self.acts.push(ControlAction::SayHello { route, link, message, cookie: Some(cookie) });
        }
    }

    /// Makes a new connection long before the keys of this one have sealed too much. It waits until
    /// nothing is in flight, so that no request waits for requests of the old connection at a
    /// device. After [`OVERDUE_FACTOR`] times as long without an idle moment it does not wait:
    /// unanswered requests are sent again.
    pub(super) fn rekey(&mut self, of: &Initiator, live: &LiveConnection, now: u64) {
        if now < self.rekey_check_at_ns {
            return;
        }
        let (carried_bytes, age) =
            (live.connection.carried_bytes(), now.saturating_sub(live.since_ns));
        let bytes_max = of.options.rekey_bytes;
        let is_due = |times: u64| {
            carried_bytes >= bytes_max.saturating_mul(times) || age >= REKEY_NS * times
        };
        if !is_due(1) || !matches!(of.security, Security::Key(_)) {
            self.rekey_check_at_ns = now + REKEY_CHECK_EVERY_NS;
            return;
        }
        self.attempt.is_wanted |= of.pendings.count() == 0 || is_due(OVERDUE_FACTOR);
    }

    pub(super) fn welcomed(&mut self, of: &Initiator, message: &[u8], now: u64) {
        let Some(hello) = &mut self.attempt.hello else { return };
        let local = hello.local;
        let (seals, payload) = match hello.greeting.finish(message) {
            Ok(result) => result,
            Err(refusal) => {
                self.attempt.hint = Some(connect_error(refusal));
                return;
            }
        };
        let welcome = match read_welcome(of, &payload) {
            Ok(welcome) => welcome,
            Err(error) => {
                self.attempt.hint = Some(error);
                return self.attempt.begin();
            }
        };
        self.attempt = Attempt::default();
        self.connected(of, local, seals, &welcome, now);
        self.acts.push(ControlAction::GoOn);
    }

    fn connected(&mut self, of: &Initiator, local: u64, seals: Seals, welcome: &Welcome, now: u64) {
        let places = of.places(local, welcome);
        let links = self.joins.len().min(welcome.links.into());
        let (count, remote) = (usize::from(welcome.places), welcome.connection);
        self.target_name = crate::legible(&welcome.name).into_owned();
        of.live().iter().for_each(|old| self.note_served(old));
        let last_received_at_ns = self.note_greeting(now);
        let connection =
            Arc::new(Connection::new(remote, seals, links, count, places, last_received_at_ns));
        for join in &mut self.joins {
            *join = LinkJoin::over(join.route.take());
        }
        let is_open = of.view.read().open_exports.is_empty();
        Control::show(of, LiveConnection { connection, local, remote, since_ns: now, is_open });
        if !is_open {
            self.open_again(of);
        }
    }
}

/// Why no connection was made: `cause`, as it says itself.
fn connect_error(cause: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Unreachable, cause.to_string()).with_source(cause)
}

/// A new hello for connection `local` over this many links.
fn new_hello(of: &Initiator, local: u64, links: usize) -> Result<SentHello> {
    let hello = Hello {
        versions: (VERSION, VERSION),
        places: of.options.places,
        place_bytes: of.options.place_bytes,
        connection: local,
        instance: of.instance,
        links: links as u8,
        name: of.options.name.clone(),
    };
    let mut message = vec![0; HEADER_BYTES + GREETING_BYTES_MAX + HANDSHAKE_BYTES];
    let payload = hello.encode().map_err(connect_error)?;
    let (greeting, bytes) =
        Greeting::new(&of.security, PROLOGUE, &payload, &mut message[HEADER_BYTES..])
            .map_err(connect_error)?;
    message.truncate(HEADER_BYTES + bytes);
    Ok(SentHello { greeting, message: message.into(), local })
}

/// Parses what a target grants. It must not exceed what was requested.
fn read_welcome(of: &Initiator, payload: &[u8]) -> Result<Welcome> {
    let welcome = Welcome::decode(payload).map_err(connect_error)?;
    let is_within_request =
        welcome.places <= of.options.places && welcome.place_bytes <= of.options.place_bytes;
    match is_within_request && welcome.version == VERSION {
        true => Ok(welcome),
        false => {
            let text = "the target grants more than the initiator requested";
            Err(Error::new(ErrorKind::Unreachable, text))
        }
    }
}

impl Initiator {
    /// The places of connection `local`, whose completed requests come back here.
    fn places(&self, local: u64, welcome: &Welcome) -> InitiatorPlaces {
        let me = self.myself.clone();
        let on_completed = Box::new(move |request| {
            if let Some(me) = me.upgrade() {
                me.ended(local, request);
            }
        });
        InitiatorPlaces::new(
            welcome.places,
            welcome.place_bytes,
            Arc::clone(&self.pendings),
            on_completed,
        )
    }

    pub(in crate::initiator) fn send_hello(
        &self,
        route: &Route,
        link: u8,
        message: &[u8],
        cookie: Option<Proof>,
    ) {
        let hello = &message[HEADER_BYTES..];
        let before = cookie.as_ref().map_or(&[][..], |cookie| &cookie[..]);
        let length = HEADER_BYTES + before.len() + hello.len();
        let mut burst = Burst::new(1, length);
        let packet = &mut burst.space()[..length];
        let (cookie_bytes, hello_bytes) = packet[HEADER_BYTES..].split_at_mut(before.len());
        cookie_bytes.copy_from_slice(before);
        hello_bytes.copy_from_slice(hello);
        let kind = if cookie.is_some() { PacketKind::Retry } else { PacketKind::Hello };
        let number = u64::from(self.proofs.hint(hello));
        Packet { kind, length: length as u32, connection: 0, link, number }.encode(packet);
        burst.commit(length);
        // A lost hello is repeated.
        let _ = route.sender.send(&route.peer, &burst, 0);
    }
}
