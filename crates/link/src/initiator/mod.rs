//! The initiator: a block device with its bytes at a target, over any of several links.
//!
//! Modules: `connect` (hand-shake, joins, a target that returns as another process), `pending`
//! (requests),
//! `slots` (what is in flight), `device` (the device, and opening it).
//!
//! A connection lives as long as both processes: whatever happens to its links, requests wait and
//! then resume. When the target reports that it does not know the connection (it was restarted),
//! the initiator makes a new one, opens the volumes again, and repeats unanswered requests. The old
//! process is gone, so nothing of the old connection can arrive later.
//!
//! Invariants: a request is answered once. A flush does not succeed if a target that kept unflushed
//! writes is gone (the `keeper` of the volume changed).
//!
//! Not here: sockets and threads (`crate::threads`), the cache (`crate::cache`).

mod connect;
mod device;
mod pending;
mod slots;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use sawmill_device::{Error, ErrorKind};
use sawmill_format::link::LINKS_MAX;
use sawmill_format::link::part::Operation;

pub use device::{Answer, OpenMode, RemoteDevice};

use crate::breach::Breach;
use crate::carrier::Waker;
use crate::clock::{Clock, SECOND};
use crate::connection::Connection;
use crate::session::Security;
use crate::session::proof::Proofs;
pub(crate) use connect::PROLOGUE;
use connect::{Attempt, Way};
use pending::{Ended, Pendings};
use slots::Slots;

/// The limits and the identity of an initiator.
#[derive(Clone, Debug)]
pub struct InitiatorOptions {
    /// A name for people, at most 64 bytes.
    pub name: String,
    /// The number of slots: the most commands in flight.
    pub slots: u16,
    /// Bytes of a slot; longer requests use several.
    pub slot_bytes: u32,
    /// After this long without a packet from the target, everything fails with `Unreachable`; 0:
    /// never.
    pub timeout_s: u32,
    /// After a sealed connection has carried this many bytes in both directions, or is a day old,
    /// another one with new keys follows; see `crate::session::seal` for the reason.
    pub rekey_bytes: u64,
}

impl Default for InitiatorOptions {
    fn default() -> Self {
        InitiatorOptions {
            name: String::new(),
            slots: 256,
            slot_bytes: 256 << 10,
            timeout_s: 0,
            rekey_bytes: 1 << 40,
        }
    }
}

/// After the last request, timers are checked often for this long.
const LIVELY_NS: u64 = SECOND;

/// An opened volume. It exists as long as the initiator.
struct Volume {
    export: String,
    mode: OpenMode,
    opened: sawmill_format::link::control::Opened,
    /// The keeper of unflushed writes, as the newest connection reports it.
    keeper: Mutex<[u8; 16]>,
    /// Its number here; on a connection it has the number that the target assigned.
    number: u8,
    /// How many of the answered chunks of changes (`pending`) a flush has covered.
    flushed: AtomicU64,
    /// Set when its device was dropped, so that it is not opened again.
    closed: AtomicBool,
    /// Changes that may be lost, and which flushes must report that.
    loss: Mutex<Loss>,
}

#[derive(Default)]
struct Loss {
    happened: bool,
    /// When a flush first reported it; a flush that was submitted later need not.
    told_ns: Option<u64>,
}

/// The volumes that were requested again on connection `local`, in order, starting with the first
/// that is not open.
#[derive(Default)]
struct Reopening {
    local: u64,
    asked: Vec<(Answer, Arc<Volume>)>,
}

/// The initiator of a connection.
pub struct Initiator {
    options: InitiatorOptions,
    security: Security,
    proofs: Proofs,
    instance: [u8; 16],
    clock: Arc<dyn Clock>,
    random: Mutex<Box<dyn FnMut() -> u64 + Send>>,
    /// The start of the time-out: when a connection with all volumes open was last heard, or when
    /// the first connection was made that did not get that far.
    patience_ns: AtomicU64,
    /// Set if no connection got that far since.
    unserved: AtomicBool,
    myself: Weak<Initiator>,
    pendings: Arc<Pendings>,
    ways: Box<[Mutex<Way>]>,
    connection: RwLock<Option<Live>>,
    /// The last name of the target.
    target_name: Mutex<String>,
    attempt: Mutex<Attempt>,
    /// When to check next whether the connection needs new keys.
    rekey_look_ns: AtomicU64,
    /// Until then, an unauthenticated *unknown* is ignored.
    unknown_next_ns: AtomicU64,
    volumes: RwLock<Vec<Arc<Volume>>>,
    reopening: Mutex<Reopening>,
    /// Volumes that are being closed.
    closing: Mutex<Vec<Answer>>,
    /// Why nothing works any more.
    failed: Mutex<Option<Error>>,
    /// The wakers of the receiving threads, and until when they must not wait long.
    wakers: Mutex<[Option<Arc<Waker>>; LINKS_MAX]>,
    lively_until_ns: AtomicU64,
    /// Threads that are taking packets: at the end of their batch they send what others made ready.
    batches: AtomicU64,
}

/// A connection that was made.
#[derive(Clone)]
struct Live {
    connection: Arc<Connection<Slots>>,
    local: u64,
    remote: u64,
    since_ns: u64,
    /// Whether all volumes are open on it, so that requests may be sent.
    opened: bool,
}

impl Initiator {
    /// An initiator over `links` links, which have no carriers yet. `random` makes ids.
    #[must_use]
    pub fn new(
        options: InitiatorOptions,
        security: Security,
        links: usize,
        clock: Arc<dyn Clock>,
        mut random: Box<dyn FnMut() -> u64 + Send>,
    ) -> Arc<Self> {
        let mut instance = [0; 16];
        instance[..8].copy_from_slice(&random().to_le_bytes());
        instance[8..].copy_from_slice(&random().to_le_bytes());
        let began_ns = clock.now_ns();
        Arc::new_cyclic(|myself| Initiator {
            options,
            proofs: Proofs::new(&security),
            security,
            instance,
            clock,
            random: Mutex::new(random),
            patience_ns: began_ns.into(),
            unserved: false.into(),
            myself: Weak::clone(myself),
            pendings: Arc::new(Pendings::new()),
            ways: (0..links.clamp(1, LINKS_MAX)).map(|_| Mutex::default()).collect(),
            connection: RwLock::new(None),
            target_name: Mutex::default(),
            attempt: Mutex::default(),
            rekey_look_ns: AtomicU64::new(0),
            unknown_next_ns: AtomicU64::new(0),
            volumes: RwLock::default(),
            reopening: Mutex::default(),
            closing: Mutex::default(),
            failed: Mutex::new(None),
            wakers: Mutex::default(),
            lively_until_ns: AtomicU64::new(0),
            batches: AtomicU64::new(0),
        })
    }

    fn random(&self) -> u64 {
        (self.random.lock())().max(1)
    }

    fn live(&self) -> Option<Live> {
        self.connection.read().clone()
    }

    /// Why nothing works any more, if that is so.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.failed.lock().clone()
    }

    /// The last message of a target that refused to connect: perhaps the reason. It is
    /// unauthenticated.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        self.attempt.lock().hint.clone()
    }

    /// Something is in flight: the receiving threads must check the time often for a while.
    fn be_lively(&self, now: u64) {
        let until = self.lively_until_ns.load(Ordering::Relaxed);
        if now + LIVELY_NS / 2 < until {
            return;
        }
        self.lively_until_ns.store(now + LIVELY_NS, Ordering::Relaxed);
        if now >= until {
            self.wakers.lock().iter().flatten().for_each(|waker| waker.wake());
        }
    }

    /// Whether something was in flight lately.
    pub(crate) fn is_lively(&self) -> bool {
        self.clock.now_ns() < self.lively_until_ns.load(Ordering::Relaxed)
    }

    pub(crate) fn add_waker(&self, index: usize, waker: Arc<Waker>) {
        if let Some(place) = self.wakers.lock().get_mut(index) {
            *place = Some(waker);
        }
    }

    /// Gives slots to waiting requests, and sends what is ready.
    fn go_on(&self, now: u64) {
        self.be_lively(now);
        let connection = self.connection.read();
        let Some(live) = connection.as_ref() else { return };
        let opened = live.opened;
        let admit = |operation| opened || matches!(operation, Operation::Open | Operation::List);
        let failed = live.connection.role.dispatch(admit, |slot| live.connection.ready.push(slot));
        if self.batches.load(Ordering::SeqCst) == 0 {
            live.connection.pump(now);
        }
        drop(connection);
        failed.into_iter().for_each(Ended::tell);
    }

    /// A thread starts to take packets: what they make ready is sent at the end of its batch, in
    /// full packets.
    pub fn begin_batch(&self) {
        self.batches.fetch_add(1, Ordering::SeqCst);
    }

    /// The batch is complete; [`Initiator::tick`] follows.
    pub fn end_batch(&self) {
        self.batches.fetch_sub(1, Ordering::SeqCst);
        self.tick();
    }

    /// A request on connection `local` has completed. Corrects a flush that must not report
    /// success, and adds the connection to the answer of an open.
    fn ended(&self, local: u64, mut ended: Ended) {
        if ended.operation == Operation::Open
            && let Some(place) = ended.request.buffer().get_mut(device::ANSWERED_BY)
        {
            place.copy_from_slice(&local.to_le_bytes());
        }
        if ended.operation == Operation::Flush && ended.failure.is_none() {
            let volume = self.volumes.read().get(usize::from(ended.volume)).cloned();
            ended.failure =
                volume.and_then(|volume| volume.flushed_well(ended.terms, self.clock.now_ns()));
        }
        ended.tell();
    }

    /// The peer broke the protocol, or ended the connection: drops it, and starts another one.
    fn drop_connection(&self, local: u64, why: &str) {
        let chunks = {
            let mut connection = self.connection.write();
            let Some(live) = connection.take_if(|live| live.local == local) else { return };
            self.was_served(&live);
            // Before another thread can find that there is no connection: see `fail`.
            live.connection.role.abandon()
        };
        tracing::warn!("link: dropping the connection: {}", crate::legible(why));
        chunks.into_iter().for_each(|chunk| self.pendings.put_back(chunk));
        self.attempt.lock().begin();
    }

    /// A connection is gone or was checked: what was heard counts if it had all volumes open.
    fn was_served(&self, live: &Live) {
        let heard_ns = live.connection.heard_ns();
        if live.opened && heard_ns > self.patience_ns.fetch_max(heard_ns, Ordering::SeqCst) {
            self.unserved.store(false, Ordering::SeqCst);
        }
    }

    /// A target answered a hello. The first one since a target served gets the full time to serve;
    /// later ones do not extend it.
    fn was_greeted(&self, now: u64) -> u64 {
        if !self.unserved.swap(true, Ordering::SeqCst) {
            self.patience_ns.fetch_max(now, Ordering::SeqCst);
        }
        self.patience_ns.load(Ordering::SeqCst)
    }

    /// Drops the connection and makes another one; unanswered requests are repeated there.
    pub fn reconnect(&self) {
        if let Some(live) = self.live() {
            self.drop_connection(live.local, "a reconnect was requested");
        }
        self.tick();
    }

    /// When the target was last heard.
    fn last_heard_ns(&self) -> u64 {
        let served_ns = self.patience_ns.load(Ordering::SeqCst);
        self.live().map_or(served_ns, |live| live.connection.heard_ns())
    }

    /// Bytes of a slot as granted; before that, as requested.
    fn slot_bytes(&self) -> u32 {
        let connection = self.connection.read();
        connection
            .as_ref()
            .map_or(self.options.slot_bytes, |live| live.connection.role.slot_bytes())
    }

    fn breach(&self, local: u64, breach: Breach) {
        self.drop_connection(local, breach.0);
    }

    /// Fails everything, now and in the future.
    pub fn fail(&self, error: Error) {
        let first = {
            let mut failed = self.failed.lock();
            let first = failed.is_none();
            failed.get_or_insert_with(|| error.clone());
            first
        };
        // No slot may be live when its request is dropped: it would send bytes of a request that
        // does not exist.
        let live =
            self.connection.write().take().inspect(|live| drop(live.connection.role.abandon()));
        if let Some(live) = live.filter(|_| first) {
            live.connection
                .send_close(crate::status::status_of(error.kind()), "the initiator has failed");
        }
        for request in self.pendings.take_all(&error) {
            request.fail(error.clone());
        }
    }

    /// Ends the connection cleanly: unanswered requests fail as closed.
    pub fn close(&self) {
        self.fail(Error::new(ErrorKind::Closed, "the link was closed"));
    }

    /// The status of each link, and the credits.
    #[must_use]
    pub fn status(&self) -> crate::LinkStatus {
        let now = self.clock.now_ns();
        let mut status = crate::LinkStatus {
            instance: self.instance,
            peer: self.target_name.lock().clone(),
            heard_ms: now.saturating_sub(self.last_heard_ns()) / crate::clock::MS,
            pending: self.pendings.count(),
            waiting: self.pendings.waiting(),
            ..Default::default()
        };
        if let Some(live) = self.live() {
            status.connected = true;
            (status.slots, status.slots_free) =
                (live.connection.role.count(), live.connection.role.free());
            status.links = crate::links_of(&live.connection, now);
        }
        status
    }
}

impl Volume {
    /// Checks a flush that succeeded at the target: returns an error if changes before it may be
    /// lost.
    fn flushed_well(&self, terms: pending::Terms, now: u64) -> Option<Error> {
        self.flushed.fetch_max(terms.mark, Ordering::SeqCst);
        let mut loss = self.loss.lock();
        if !loss.happened || loss.told_ns.is_some_and(|told_ns| terms.submitted_ns > told_ns) {
            return None;
        }
        loss.told_ns.get_or_insert(now);
        Some(Error::new(
            ErrorKind::Unavailable,
            format!(
                "{}: the target lost its volatile write cache; writes before this flush may be \
                lost",
                self.export
            ),
        ))
    }

    /// The target that kept unflushed changes is gone.
    fn keeper_gone(&self, changes: u64) {
        if changes > self.flushed.load(Ordering::SeqCst) {
            *self.loss.lock() = Loss { happened: true, told_ns: None };
        }
    }
}
