//! The initiator: a block device with its bytes at a target, over any of several links.
//!
//! A connection lives as long as both processes: whatever happens to its links, requests wait and
//! then resume. When the target reports that it does not know the connection (it was restarted),
//! the initiator makes a new one, opens the exports again, and repeats unanswered requests. The old
//! process is gone, so nothing of the old connection can arrive later.
//!
//! The path of requests: `device`, `pending` (requests), `places` (what is in flight), the
//! connection. The owner of the connection: `control`. The two meet in `ConnectionView`, which the
//! control writes and requests read.
//!
//! Invariants: a request is answered once. A flush does not succeed if a target that kept unflushed
//! writes is gone (the volatile cache identity changed).
//!
//! Not here: sockets and threads (`crate::threads`), the cache (`crate::cache`).

mod control;
mod device;
mod pending;
mod places;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use sawmill_device::{Error, ErrorKind};
use sawmill_format::link::statement::Operation;
use sawmill_format::link::{HEADER_BYTES, LINKS_MAX, Packet, PacketKind};

pub use device::{Answer, OpenMode, RemoteDevice};

use crate::carrier::{Peer, Sender, Waker};
use crate::clock::{Clock, SECOND};
use crate::connection::{Connection, ControlStatement, PacketOutcome, Route};
use crate::session::proof::Proofs;
use crate::session::{Security, instance};
pub(crate) use control::PROLOGUE;
use control::{Control, ControlAction, Event};
use pending::{CompletedRequest, PendingRequests};
use places::InitiatorPlaces;

/// The limits and the identity of an initiator.
#[derive(Clone, Debug)]
pub struct InitiatorOptions {
    /// A name for people, at most 64 bytes.
    pub name: String,
    /// The number of places: the most commands in flight.
    pub places: u16,
    /// Bytes of a place; longer requests use several.
    pub place_bytes: u32,
    /// After this long without a packet from the target, everything fails with `Unreachable`; 0:
    /// never.
    pub timeout_s: u32,
    /// After a sealed connection has carried this many bytes in both directions, or is a day old,
    /// another one with new keys follows; see `crate::session::seal` for the reason.
    pub rekey_bytes: u64,
    /// How long receivers look for packets before they sleep, if packets come at short intervals
    /// and no other thread wants the core; zero: never.
    pub spin_time_max: Duration,
}

impl Default for InitiatorOptions {
    fn default() -> Self {
        InitiatorOptions {
            name: String::new(),
            places: 256,
            place_bytes: 256 << 10,
            timeout_s: 0,
            rekey_bytes: 1 << 40,
            spin_time_max: Duration::ZERO,
        }
    }
}

/// After the last request, timers are checked often for this long.
const LIVELY_NS: u64 = SECOND;

/// An opened export. It exists as long as the initiator.
struct OpenExport {
    export: String,
    mode: OpenMode,
    answer: sawmill_format::link::control::OpenAnswer,
    /// Its number here; on a connection it has the number that the target assigned.
    number: u8,
    /// How many of the answered chunks of changes (`pending`) a flush has covered.
    flushed: AtomicU64,
    /// Set when its device was dropped, so that it is not opened again.
    is_closed: AtomicBool,
    /// Changes that may be lost, and which flushes must report that.
    loss: Mutex<Loss>,
}

#[derive(Default)]
struct Loss {
    has_happened: bool,
    /// When a flush first reported it; a flush that was submitted later need not.
    reported_at_ns: Option<u64>,
}

/// The initiator of a connection.
pub struct Initiator {
    options: InitiatorOptions,
    security: Security,
    proofs: Proofs,
    instance: [u8; 16],
    clock: Arc<dyn Clock>,
    myself: Weak<Initiator>,
    pendings: Arc<PendingRequests>,
    /// What requests see of the connection. Only the control writes it.
    view: RwLock<ConnectionView>,
    control: Mutex<Control>,
    /// Until then, the receiving threads must not wait long.
    lively_until_ns: AtomicU64,
    /// Threads that are taking packets: at the end of their burst they send what others made ready.
    burst_threads: AtomicU64,
}

/// What requests see of the connection.
#[derive(Default)]
struct ConnectionView {
    live: Option<LiveConnection>,
    open_exports: Vec<Arc<OpenExport>>,
    /// Why every request fails now.
    failure: Option<Error>,
    /// The wakers of the receiving threads.
    wakers: [Option<Arc<Waker>>; LINKS_MAX],
}

/// A connection that was made.
#[derive(Clone)]
struct LiveConnection {
    connection: Arc<Connection<InitiatorPlaces>>,
    local: u64,
    remote: u64,
    since_ns: u64,
    /// Whether all exports are open on it, so that requests may be sent.
    is_open: bool,
}

impl Initiator {
    pub(crate) fn spin_time_max(&self) -> Duration {
        self.options.spin_time_max
    }

    /// An initiator over `links` links, which have no carriers yet. `random` makes ids.
    #[must_use]
    pub fn new(
        options: InitiatorOptions,
        security: Security,
        links: usize,
        clock: Arc<dyn Clock>,
        mut random: Box<dyn FnMut() -> u64 + Send>,
    ) -> Arc<Self> {
        let instance = instance(&mut *random);
        let began_at_ns = clock.now_ns();
        Arc::new_cyclic(|myself| Initiator {
            options,
            proofs: Proofs::new(&security),
            security,
            instance,
            clock,
            myself: Weak::clone(myself),
            pendings: Arc::new(PendingRequests::new()),
            view: RwLock::default(),
            control: Mutex::new(Control::new(links.clamp(1, LINKS_MAX), random, began_at_ns)),
            lively_until_ns: AtomicU64::new(0),
            burst_threads: AtomicU64::new(0),
        })
    }

    fn live(&self) -> Option<LiveConnection> {
        self.view.read().live.clone()
    }

    /// The reason why every request fails, if the initiator has failed.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.view.read().failure.clone()
    }

    /// The last message of a target that refused to connect: perhaps the reason. It is
    /// unauthenticated.
    #[must_use]
    pub fn hint(&self) -> Option<Error> {
        self.control.lock().hint()
    }

    /// Lets the control handle an event, and does what it decided.
    fn step(&self, event: Event<'_>, now: u64) {
        self.change(|control| control.step(self, event, now));
    }

    /// Changes the control, and does what it decided once its lock is released: see `control`.
    fn change<T>(&self, change: impl FnOnce(&mut Control) -> T) -> T {
        let (result, acts) = {
            let mut control = self.control.lock();
            let result = change(&mut control);
            (result, std::mem::take(&mut control.acts))
        };
        acts.into_iter().for_each(|act| self.act(act));
        result
    }

    fn act(&self, act: ControlAction) {
        match act {
            ControlAction::SayHello { route, link, message, cookie } => {
                self.send_hello(&route, link, &message, cookie);
            }
            ControlAction::SayNote { connection, index, route, note, packet_bytes } => {
                connection.send_note(index, &route, &note, packet_bytes);
            }
            ControlAction::SayClose(connection, kind) => {
                let status = crate::status::status_of(kind);
                connection.send_close(status, "the initiator has failed");
            }
            ControlAction::FailAll(requests, error) => {
                requests.into_iter().for_each(|request| request.fail(error.clone()));
            }
            ControlAction::GoOn => self.progress(self.clock.now_ns()),
        }
    }

    /// Gives link `index` a carrier, new or again.
    pub fn add_route(
        &self,
        index: usize,
        sender: Arc<dyn Sender>,
        peer: Peer,
        waker: Option<Arc<Waker>>,
    ) {
        let route = Route::new(sender, peer, waker);
        self.step(Event::CarrierOpened(index, route), self.clock.now_ns());
        self.tick();
    }

    /// Link `index` has lost its carrier: what was in flight there uses other links.
    pub fn lose_route(&self, index: usize) {
        self.step(Event::CarrierLost(index), self.clock.now_ns());
        self.tick();
    }

    /// A packet arrived from `peer`, on the carrier of a link.
    pub fn receive(&self, peer: &Peer, packet: &mut [u8]) {
        let now = self.clock.now_ns();
        let Ok(header) = Packet::decode(packet) else { return };
        let packet = &mut packet[..header.length as usize];
        if header.kind == PacketKind::Sealed {
            return self.sealed(peer, &header, packet, now);
        }
        let body = &packet[HEADER_BYTES..];
        match header.kind {
            PacketKind::Welcome => self.step(Event::Welcome(body), now),
            PacketKind::Refused => self.step(Event::Refused(body), now),
            PacketKind::Unknown => self.step(Event::Unknown(&header, body), now),
            PacketKind::Cookie => self.step(Event::Cookie(&header, body), now),
            PacketKind::Sealed
            | PacketKind::Hello
            | PacketKind::Retry
            | PacketKind::Seek
            | PacketKind::Found => {}
        }
    }

    fn sealed(&self, peer: &Peer, header: &Packet, packet: &mut [u8], now: u64) {
        let Some(live) = self.live().filter(|live| live.local == header.connection) else { return };
        let local = live.local;
        let (mut notes, mut close) = ([None; 4], None);
        let outcome =
            live.connection.receive(header, packet, now, &mut |statement| match statement {
                ControlStatement::Note(note) => {
                    if let Some(entry) = notes.iter_mut().find(|entry| entry.is_none()) {
                        *entry = Some(note);
                    }
                }
                ControlStatement::Close(status, text) => close = Some((status, text.to_owned())),
            });
        match outcome {
            Err(violation) => {
                self.step(Event::Drop { local, why: &violation.to_string() }, now);
            }
            Ok(PacketOutcome::Dropped) => {}
            Ok(PacketOutcome::Taken) => {
                for note in notes.into_iter().flatten() {
                    self.step(Event::Note { local, peer: *peer, note }, now);
                }
                if let Some((status, text)) = close {
                    self.step(Event::Closed { local, status, text }, now);
                }
            }
        }
    }

    /// Something is in flight: the receiving threads must check the time often for a while.
    fn poll_often(&self, now: u64) {
        let until = self.lively_until_ns.load(Ordering::Relaxed);
        if now + LIVELY_NS / 2 < until {
            return;
        }
        self.lively_until_ns.store(now + LIVELY_NS, Ordering::Relaxed);
        if now >= until {
            self.view.read().wakers.iter().flatten().for_each(|waker| waker.wake());
        }
    }

    /// Whether something was in flight lately.
    pub(crate) fn is_lively(&self) -> bool {
        self.clock.now_ns() < self.lively_until_ns.load(Ordering::Relaxed)
    }

    pub(crate) fn add_waker(&self, index: usize, waker: Arc<Waker>) {
        if let Some(entry) = self.view.write().wakers.get_mut(index) {
            *entry = Some(waker);
        }
    }

    /// Gives places to waiting requests, and sends what is ready.
    fn progress(&self, now: u64) {
        self.poll_often(now);
        let view = self.view.read();
        let Some(live) = view.live.as_ref() else { return };
        let is_open = live.is_open;
        let admit = |operation| is_open || matches!(operation, Operation::Open | Operation::List);
        let failed_requests =
            live.connection.end.dispatch(admit, |place| live.connection.ready.push(place));
        if self.burst_threads.load(Ordering::SeqCst) == 0 {
            live.connection.pump(now);
        }
        drop(view);
        failed_requests.into_iter().for_each(CompletedRequest::complete);
    }

    /// A thread starts to take packets: what they make ready is sent at the end of its burst, in
    /// full packets.
    pub fn begin_burst(&self) {
        self.burst_threads.fetch_add(1, Ordering::SeqCst);
    }

    /// The burst is complete; [`Initiator::tick`] follows.
    pub fn end_burst(&self) {
        self.burst_threads.fetch_sub(1, Ordering::SeqCst);
        self.tick();
    }

    /// A request on connection `local` has completed. Corrects a flush that must not report
    /// success, and adds the connection to the answer of an open.
    fn ended(&self, local: u64, mut request: CompletedRequest) {
        if request.operation == Operation::Open
            && let Some(field) = request.request.buffer().get_mut(device::ANSWERED_BY)
        {
            field.copy_from_slice(&local.to_le_bytes());
        }
        if request.operation == Operation::Flush && request.failure.is_none() {
            let open_export =
                self.view.read().open_exports.get(usize::from(request.export)).cloned();
            request.failure = open_export.and_then(|open_export| {
                open_export.flushed_well(request.terms, self.clock.now_ns())
            });
        }
        request.complete();
    }

    /// Drops the connection and makes another one; unanswered requests are repeated there.
    pub fn reconnect(&self) {
        if let Some(live) = self.live() {
            let why = "a reconnect was requested";
            self.step(Event::Drop { local: live.local, why }, self.clock.now_ns());
        }
        self.tick();
    }

    /// Handles the timers: sends hellos, joins and pings that are due, checks links, and resumes
    /// requests.
    pub fn tick(&self) {
        let now = self.clock.now_ns();
        self.step(Event::Tick, now);
        if let Some(live) = self.live() {
            if self.pendings.count() > 0 {
                self.progress(now);
            }
            live.connection.tick(now);
        }
    }

    /// The latest time for the next [`Initiator::tick`]. Never, once everything has failed: nothing
    /// is due any more.
    #[must_use]
    pub fn deadline_ns(&self) -> u64 {
        if self.failure().is_some() {
            return u64::MAX;
        }
        let next = self.control.lock().deadline_ns(self.clock.now_ns());
        let connection = self.live().and_then(|live| live.connection.deadline_ns());
        next.min(connection.unwrap_or(u64::MAX))
    }

    /// Whether link `index` waits for its carrier to have room.
    #[must_use]
    pub fn is_blocked(&self, index: usize) -> bool {
        self.live().is_some_and(|live| {
            index < live.connection.links.len() && live.connection.is_blocked(index)
        })
    }

    /// Bytes of a place as granted; before that, as requested.
    fn place_bytes(&self) -> u32 {
        let view = self.view.read();
        view.live
            .as_ref()
            .map_or(self.options.place_bytes, |live| live.connection.end.place_bytes())
    }

    /// Fails everything, now and in the future.
    pub fn fail(&self, error: Error) {
        self.step(Event::Fail(error), self.clock.now_ns());
    }

    /// Ends the connection cleanly: unanswered requests fail as closed.
    pub fn close(&self) {
        self.fail(Error::new(ErrorKind::Closed, "the link was closed"));
    }

    /// The status of each link, and the places.
    #[must_use]
    pub fn status(&self) -> crate::ConnectionStatus {
        let now = self.clock.now_ns();
        let live = self.live();
        let (peer, last_received_at_ns) = {
            let control = self.control.lock();
            (control.target_name.clone(), control.last_received_at_ns(live.as_ref()))
        };
        let mut status = crate::ConnectionStatus {
            instance: self.instance,
            peer,
            heard_ms: now.saturating_sub(last_received_at_ns) / crate::clock::MS,
            pending: self.pendings.count(),
            waiting: self.pendings.waiting(),
            ..Default::default()
        };
        if let Some(live) = live {
            status.connected = true;
            (status.places, status.places_free) =
                (live.connection.end.count(), live.connection.end.free());
            status.links = crate::links_of(&live.connection, now);
        }
        status
    }
}

impl OpenExport {
    /// Checks a flush that succeeded at the target: returns an error if changes before it may be
    /// lost.
    fn flushed_well(&self, terms: pending::Terms, now: u64) -> Option<Error> {
        self.flushed.fetch_max(terms.changes_before, Ordering::SeqCst);
        let mut loss = self.loss.lock();
        if !loss.has_happened || loss.reported_at_ns.is_some_and(|ns| terms.submitted_at_ns > ns) {
            return None;
        }
        loss.reported_at_ns.get_or_insert(now);
        Some(Error::new(
            ErrorKind::Unavailable,
            format!(
                "{}: the target lost its volatile write cache; writes before this flush may be \
                lost",
                self.export
            ),
        ))
    }

    /// What held unflushed changes at the target is gone.
    fn volatile_writes_lost(&self, changes: u64) {
        if changes > self.flushed.load(Ordering::SeqCst) {
            *self.loss.lock() = Loss { has_happened: true, reported_at_ns: None };
        }
    }
}
