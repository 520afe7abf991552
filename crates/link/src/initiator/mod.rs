//! The initiator: a block device whose bytes are at a target, over any of several links.
//!
//! Modules: `connect` (hand-shake, links that join, a target that comes back as another), `pending`
//! (requests), `slots` (what is under way), `device` (the device, and opening it).
//!
//! A connection lives as long as both processes: whatever happens to its links, requests wait and go on. When
//! the target says that it does not know the connection (it was started anew), a new one is made, volumes are
//! opened again, and what was not answered is asked again: the old process is gone, so nothing of the old
//! connection can come after.
//!
//! Invariants: a request is answered once; a flush does not succeed when a target that kept unflushed
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

/// What an initiator asks for, and who it is.
#[derive(Clone, Debug)]
pub struct InitiatorOptions {
    /// A name for people, at most 64 bytes.
    pub name: String,
    /// Slots: commands that may be under way.
    pub slots: u16,
    /// Bytes of a slot: longer requests go in several.
    pub slot_bytes: u32,
    /// With nothing heard for so long, everything fails with `Unreachable`; 0: wait for ever.
    pub timeout_s: u32,
    /// A sealed connection that carried so many bytes, both ways together, is followed by another with new
    /// keys; see `crate::session::seal` for what this keeps small. One that is a day old, too.
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

/// After the last request, timers are looked at often for so long.
const LIVELY_NS: u64 = SECOND;

/// An opened volume, as long as the initiator lives.
struct Volume {
    export: String,
    mode: OpenMode,
    opened: sawmill_format::link::control::Opened,
    /// Who keeps what was not flushed, as the newest connection says.
    keeper: Mutex<[u8; 16]>,
    /// Its number here; on a connection it has the one that the target gave it.
    number: u8,
    /// How many of the chunks of changes that were answered (`pending`) a flush has covered.
    flushed: AtomicU64,
    /// Its device was dropped: it is not opened again.
    closed: AtomicBool,
    /// Changes that may be lost, and until when a flush was asked that must say so.
    loss: Mutex<Loss>,
}

#[derive(Default)]
struct Loss {
    happened: bool,
    /// When a flush first said so: one that was asked later need not.
    told_ns: Option<u64>,
}

/// Volumes that were asked for again on connection `local`, in order, from the first that is not open.
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
    /// From when it counts how long nobody serves: when a connection with all volumes open was last heard,
    /// or when the first one came that did not get so far.
    patience_ns: AtomicU64,
    /// No connection got so far since.
    unserved: AtomicBool,
    myself: Weak<Initiator>,
    pendings: Arc<Pendings>,
    ways: Box<[Mutex<Way>]>,
    connection: RwLock<Option<Live>>,
    /// What the target called itself last.
    target_name: Mutex<String>,
    attempt: Mutex<Attempt>,
    /// When to look whether the connection wants new keys.
    rekey_look_ns: AtomicU64,
    /// Until then no *unknown* is believed that may be anybody's.
    unknown_next_ns: AtomicU64,
    volumes: RwLock<Vec<Arc<Volume>>>,
    reopening: Mutex<Reopening>,
    /// Volumes that are being given back.
    closing: Mutex<Vec<Answer>>,
    /// Why nothing goes any more.
    failed: Mutex<Option<Error>>,
    /// What ends the waits of the threads that receive, and until when they must not wait long.
    wakers: Mutex<[Option<Arc<Waker>>; LINKS_MAX]>,
    lively_until_ns: AtomicU64,
    /// Threads that take packets: they send at the end of their batch what others made ready meanwhile.
    batches: AtomicU64,
}

/// A connection that was made.
#[derive(Clone)]
struct Live {
    connection: Arc<Connection<Slots>>,
    local: u64,
    remote: u64,
    since_ns: u64,
    /// All volumes are open on it: requests may go.
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

    /// Why nothing goes any more, if so.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.failed.lock().clone()
    }

    /// The last thing heard of a target that would not connect: why, perhaps. Nothing proves it.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        self.attempt.lock().hint.clone()
    }

    /// Something is under way: whoever receives must look at the time often for a while.
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

    /// Whether something was under way of late.
    pub(crate) fn is_lively(&self) -> bool {
        self.clock.now_ns() < self.lively_until_ns.load(Ordering::Relaxed)
    }

    pub(crate) fn add_waker(&self, index: usize, waker: Arc<Waker>) {
        if let Some(place) = self.wakers.lock().get_mut(index) {
            *place = Some(waker);
        }
    }

    /// What waits gets slots, and what is ready goes.
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

    /// A thread begins to take packets: what they make ready goes when it is through, in full packets.
    pub fn begin_batch(&self) {
        self.batches.fetch_add(1, Ordering::SeqCst);
    }

    /// It is through: [`Initiator::tick`] follows.
    pub fn end_batch(&self) {
        self.batches.fetch_sub(1, Ordering::SeqCst);
        self.tick();
    }

    /// A request is through, on connection `local`: a flush that must not be told as done is mended, an open
    /// says on which connection.
    fn ended(&self, local: u64, mut ended: Ended) {
        if ended.operation == Operation::Open
            && let Some(place) = ended.request.buffer().get_mut(device::ANSWERED_BY)
        {
            place.copy_from_slice(&local.to_le_bytes());
        }
        if ended.operation == Operation::Flush && ended.failure.is_none() {
            let volume = self.volumes.read().get(usize::from(ended.volume)).cloned();
            ended.failure = volume.and_then(|volume| volume.flushed_well(ended.terms, self.clock.now_ns()));
        }
        ended.tell();
    }

    /// The peer broke the protocol, or ended the connection: it is dropped, and another one is made.
    fn drop_connection(&self, local: u64, why: &str) {
        let chunks = {
            let mut connection = self.connection.write();
            let Some(live) = connection.take_if(|live| live.local == local) else { return };
            self.was_served(&live);
            // Before anybody finds that there is no connection: see `fail`.
            live.connection.role.abandon()
        };
        tracing::warn!("link: dropping the connection: {}", crate::legible(why));
        chunks.into_iter().for_each(|chunk| self.pendings.put_back(chunk));
        self.attempt.lock().begin();
    }

    /// A connection is gone, or looked at: what was heard counts if it had all volumes open.
    fn was_served(&self, live: &Live) {
        let heard_ns = live.connection.heard_ns();
        if live.opened && heard_ns > self.patience_ns.fetch_max(heard_ns, Ordering::SeqCst) {
            self.unserved.store(false, Ordering::SeqCst);
        }
    }

    /// A target answered a hello. The first one since somebody served has its time to do so, others have no
    /// more of it.
    fn was_greeted(&self, now: u64) -> u64 {
        if !self.unserved.swap(true, Ordering::SeqCst) {
            self.patience_ns.fetch_max(now, Ordering::SeqCst);
        }
        self.patience_ns.load(Ordering::SeqCst)
    }

    /// Drops the connection and makes another one: what is not answered is asked again there.
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

    /// Bytes of a slot, as granted; before that, as wished.
    fn slot_bytes(&self) -> u32 {
        let connection = self.connection.read();
        connection.as_ref().map_or(self.options.slot_bytes, |live| live.connection.role.slot_bytes())
    }

    fn breach(&self, local: u64, breach: Breach) {
        self.drop_connection(local, breach.0);
    }

    /// Everything fails, now and later.
    pub fn fail(&self, error: Error) {
        let first = {
            let mut failed = self.failed.lock();
            let first = failed.is_none();
            failed.get_or_insert_with(|| error.clone());
            first
        };
        // No slot is live when its request goes: else the bytes of a request that is not there would be sent.
        let live = self.connection.write().take().inspect(|live| drop(live.connection.role.abandon()));
        if let Some(live) = live.filter(|_| first) {
            live.connection.send_close(crate::status::status_of(error.kind()), "the initiator has failed");
        }
        for request in self.pendings.take_all(&error) {
            request.fail(error.clone());
        }
    }

    /// Ends the connection in order: what is not answered fails as closed.
    pub fn close(&self) {
        self.fail(Error::new(ErrorKind::Closed, "the link was closed"));
    }

    /// How each link does, and the credits.
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
            (status.slots, status.slots_free) = (live.connection.role.count(), live.connection.role.free());
            status.links = crate::links_of(&live.connection, now);
        }
        status
    }
}

impl Volume {
    /// What a flush that succeeded at the target comes to: an error when changes before it may be lost.
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
                "{}: the target lost its volatile write cache; writes before this flush may be lost",
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
