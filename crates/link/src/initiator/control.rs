//! The owner of an initiator's connection: how it is made, kept, and replaced.
//!
//! Everything that changes the connection is an [`Event`]; [`Control::step`] handles one at a time.
//! Whichever thread has an event takes the control's lock and runs the step, so that there is no
//! thread to wake. A step never sends and never answers a request: what it decides is a list of
//! [`ControlAction`]s, done by the same thread after the lock is released, because sending may
//! block and an answer runs its user's code.
//!
//! Invariants: only a step changes what requests see of the connection ([`ConnectionView`]). After
//! a failure there is no connection, and no step makes one.
//!
//! Lock order: the control, then `ConnectionView`, then what the connection locks. Not here: the
//! steps of a handshake (`connect`), of a link (`join`) and of reopened exports (`reopen`).

mod connect;
mod join;
mod reopen;

use std::sync::Arc;

use sawmill_device::{Error, ErrorKind, Request};
use sawmill_format::link::Packet;
use sawmill_format::link::statement::Note;

use super::device::Answer;
use super::pending::Chunk;
use super::places::InitiatorPlaces;
use super::{ConnectionView, Initiator, LiveConnection};
use crate::carrier::Peer;
use crate::clock::SECOND;
use crate::connection::{Connection, Route};
use crate::session::proof::Proof;
use connect::Attempt;
pub(crate) use connect::PROLOGUE;
use join::LinkJoin;
use reopen::Reopening;

/// What can happen to a connection, apart from its requests.
pub(super) enum Event<'a> {
    /// Time has passed, or packets were taken.
    Tick,
    /// A link has a carrier, new or again.
    CarrierOpened(usize, Route),
    /// A link has lost its carrier.
    CarrierLost(usize),
    /// An unsealed answer to a hello, or a claim about the connection: its header and its body.
    Welcome(&'a [u8]),
    /// See `Welcome`.
    Refused(&'a [u8]),
    /// See `Welcome`.
    Unknown(&'a Packet, &'a [u8]),
    /// See `Welcome`.
    Cookie(&'a Packet, &'a [u8]),
    /// A note about a link, from this peer, on connection `local`.
    Note { local: u64, peer: Peer, note: Note },
    /// The target ended connection `local`.
    Closed { local: u64, status: u8, text: String },
    /// Connection `local` must not be used any more.
    Drop { local: u64, why: &'a str },
    /// Nothing can work any more.
    Fail(Error),
}

/// What a step decided.
pub(super) enum ControlAction {
    /// Sends a hello on a link, perhaps with the cookie that the target wants.
    SayHello { route: Route, link: u8, message: Arc<[u8]>, cookie: Option<Proof> },
    /// Sends a note about a link, padded to `packet_bytes`.
    SayNote {
        connection: Arc<Connection<InitiatorPlaces>>,
        index: usize,
        route: Route,
        note: Note,
        packet_bytes: usize,
    },
    /// Tells the target that the connection ends.
    SayClose(Arc<Connection<InitiatorPlaces>>, ErrorKind),
    /// Fails requests.
    FailAll(Vec<Request>, Error),
    /// Gives places to waiting requests, and sends what is ready.
    GoOn,
}

/// A source of ids and tokens.
struct TokenSource(Box<dyn FnMut() -> u64 + Send>);

impl TokenSource {
    /// The next one, never 0.
    fn id(&mut self) -> u64 {
        (self.0)().max(1)
    }
}

/// The state of the connection that requests never read.
pub(super) struct Control {
    attempt: Attempt,
    joins: Box<[LinkJoin]>,
    reopening: Reopening,
    /// The volatile cache identity of each export, as the newest connection reports it.
    cache_identities: Vec<[u8; 16]>,
    /// Exports that are being closed.
    pub(super) closing: Vec<Answer>,
    /// The last name of the target.
    pub(super) target_name: String,
    /// When to check next whether the connection needs new keys.
    rekey_check_at_ns: u64,
    /// Until then, an unauthenticated *unknown* is ignored.
    unknown_next_at_ns: u64,
    random: TokenSource,
    /// The start of the timeout: when a connection with all exports open was last heard, or when
    /// the first connection was made that did not get that far.
    timeout_start_at_ns: u64,
    /// Set if no connection got that far since.
    is_unserved: bool,
    pub(super) acts: Vec<ControlAction>,
}

impl Control {
    pub(super) fn new(links: usize, random: Box<dyn FnMut() -> u64 + Send>, now: u64) -> Self {
        Control {
            attempt: Attempt::default(),
            joins: (0..links).map(|_| LinkJoin::default()).collect(),
            reopening: Reopening::default(),
            cache_identities: Vec::new(),
            closing: Vec::new(),
            target_name: String::new(),
            rekey_check_at_ns: 0,
            unknown_next_at_ns: 0,
            random: TokenSource(random),
            timeout_start_at_ns: now,
            is_unserved: false,
            acts: Vec::new(),
        }
    }

    /// Handles one event.
    pub(super) fn step(&mut self, of: &Initiator, event: Event<'_>, now: u64) {
        match event {
            Event::Fail(error) => self.fail(of, error),
            _ if of.failure().is_some() => {}
            Event::Tick => self.tick(of, now),
            Event::CarrierOpened(index, route) => self.carrier_opened(of, index, route),
            Event::CarrierLost(index) => self.carrier_lost(of, index),
            Event::Welcome(message) => self.welcomed(of, message, now),
            Event::Refused(message) => self.attempt.refused(message),
            Event::Unknown(header, proof) => self.unknown(of, header, proof, now),
            Event::Cookie(header, body) => self.cookied(of, header, body, now),
            Event::Note { local, peer, note } => {
                if let Some(live) = of.live().filter(|live| live.local == local) {
                    self.note(&live, peer, &note, now);
                }
            }
            Event::Closed { local, status, text } => self.closed(of, local, status, &text),
            Event::Drop { local, why } => self.drop_connection(of, local, why),
        }
    }

    /// See [`Initiator::hint`].
    pub(super) fn hint(&self) -> Option<Error> {
        self.attempt.hint.clone()
    }

    fn tick(&mut self, of: &Initiator, now: u64) {
        self.greet(of, now);
        self.check_reopened(of);
        if let Some(live) = of.live() {
            self.rekey(of, &live, now);
            (0..live.connection.links.len())
                .for_each(|index| self.maintain_link(&live, index, now));
        }
        self.give_up(of, now);
    }

    /// The latest time for the next tick, as far as the control is concerned.
    pub(super) fn deadline_ns(&self, now: u64) -> u64 {
        let greet = if self.attempt.is_wanted { self.attempt.next_at_ns } else { u64::MAX };
        let next_join_at_ns = self.joins.iter().filter_map(LinkJoin::deadline_ns).min();
        greet.min(now + SECOND).min(next_join_at_ns.unwrap_or(u64::MAX))
    }

    fn closed(&mut self, of: &Initiator, local: u64, status: u8, text: &str) {
        let error = crate::status::error_of(status, text);
        match error.kind() {
            // The target is stopping, or has lost this connection: another may come.
            ErrorKind::Closed | ErrorKind::Unavailable => self.drop_connection(of, local, text),
            _ => self.fail(of, error),
        }
    }

    /// The peer broke the protocol, or ended the connection: drops it, and starts another one.
    fn drop_connection(&mut self, of: &Initiator, local: u64, why: &str) {
        let chunks = {
            let mut view = of.view.write();
            let Some(live) = view.live.take_if(|live| live.local == local) else { return };
            self.note_served(&live);
            // Before another thread can find that there is no connection: see `fail`.
            live.connection.end.abandon()
        };
        tracing::warn!("link: dropping the connection: {}", crate::legible(why));
        put_back(of, chunks);
        self.attempt.begin();
    }

    /// Requests see this connection from now on. Their chunks in flight go back first, because no
    /// chunk may use the old connection once one can use the new one.
    fn show(of: &Initiator, new: LiveConnection) {
        let chunks = {
            let mut view = of.view.write();
            let old = view.live.replace(new);
            old.map(|old| old.connection.end.abandon()).unwrap_or_default()
        };
        put_back(of, chunks);
    }

    /// A connection is gone or was checked: what it received counts if all exports were open.
    fn note_served(&mut self, live: &LiveConnection) {
        let last_received_at_ns = live.connection.last_received_at_ns();
        if live.is_open && last_received_at_ns > self.timeout_start_at_ns {
            (self.timeout_start_at_ns, self.is_unserved) = (last_received_at_ns, false);
        }
    }

    /// A target answered a hello. The first answer since a target last served allows the full time
    /// to serve; later ones do not extend it.
    fn note_greeting(&mut self, now: u64) -> u64 {
        if !std::mem::replace(&mut self.is_unserved, true) {
            self.timeout_start_at_ns = self.timeout_start_at_ns.max(now);
        }
        self.timeout_start_at_ns
    }

    /// When the target was last heard.
    pub(super) fn last_received_at_ns(&self, live: Option<&LiveConnection>) -> u64 {
        live.map_or(self.timeout_start_at_ns, |live| live.connection.last_received_at_ns())
    }

    /// Fails everything if no target has served within the timeout. A target that answers hellos
    /// but opens nothing does not serve.
    fn give_up(&mut self, of: &Initiator, now: u64) {
        let most_ns = u64::from(of.options.timeout_s) * SECOND;
        if most_ns == 0 {
            return;
        }
        of.live().iter().for_each(|live| self.note_served(live));
        if now.saturating_sub(self.timeout_start_at_ns) >= most_ns && of.pendings.count() > 0 {
            let text = format!("no answer from the target for {} s", of.options.timeout_s);
            let error = match self.attempt.hint.clone() {
                None => Error::new(ErrorKind::Unreachable, text),
                Some(hint) => {
                    let text = format!("{text} (last reply, unauthenticated: {hint})");
                    Error::new(ErrorKind::Unreachable, text).with_source(hint)
                }
            };
            self.fail(of, error);
        }
    }

    /// Fails everything, now and in the future; the first reason stays.
    fn fail(&mut self, of: &Initiator, error: Error) {
        let (live, first) = {
            let mut view = of.view.write();
            let ConnectionView { live, failure, .. } = &mut *view;
            let first = failure.is_none();
            failure.get_or_insert_with(|| error.clone());
            // No place may be live when its request is dropped: it would send bytes of a request
            // that no longer exists.
            (live.take().inspect(|live| drop(live.connection.end.abandon())), first)
        };
        if let Some(live) = live.filter(|_| first) {
            self.acts.push(ControlAction::SayClose(live.connection, error.kind()));
        }
        self.acts.push(ControlAction::FailAll(of.pendings.take_all(&error), error));
    }
}

/// Requests of a connection that is gone wait for the next one.
fn put_back(of: &Initiator, chunks: Vec<Chunk>) {
    chunks.into_iter().for_each(|chunk| of.pendings.put_back(chunk));
}
