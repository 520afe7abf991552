//! One connection at the target: hands its commands to the devices that it has open.
//!
//! Invariants: a command is for an export that this connection opened and has not lost to fencing;
//! it opened only what its key may open, with the access of its key. A connection that has ended
//! hands nothing more to a device, and is finished only when the devices have answered all of its
//! requests.
//!
//! Not here: the state of a place (`places`), admission (`exports`).

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::RwLock;
use sawmill_device::{Error, ErrorKind, Flags, Operation as Asks, Outcome, Reply, Request, Result};
use sawmill_format::link::statement::{self, Body, Command, Operation, Statement};

use super::exports::{Effects, Export, Exports, OpenRequest};
use super::keys::Holder;
use super::places::{PlaceExchange, PlaceOwner, TargetPlaces, WholeCommand};
use crate::clock::Clock;
use crate::connection::{Connection, ConnectionEnd, PacketFill};
use crate::halves::{SentPiece, SentPieces};
use crate::source::PacketSource;
use crate::violation::Violation;

/// Makes ids.
pub(super) type IdSource = parking_lot::Mutex<Box<dyn FnMut() -> u64 + Send>>;

/// The most open exports of one connection.
const OPEN_EXPORTS_MAX: usize = 200;

/// The target's end of a connection.
pub(super) struct TargetEnd {
    places: TargetPlaces,
    connection: OnceLock<Weak<TargetConnection>>,
}

/// A connection at the target.
pub(super) struct TargetConnection {
    pub(super) connection: Connection<TargetEnd>,
    pub(super) local: u64,
    /// The holder of the key that made it.
    pub(super) holder: Arc<Holder>,
    pub(super) instance: [u8; 16],
    pub(super) name: String,
    /// The source and time of its first packet.
    pub(super) source: PacketSource,
    pub(super) since_ns: u64,
    /// Whether it has ever opened an export.
    has_opened: AtomicBool,
    exports: Arc<Exports>,
    random: Arc<IdSource>,
    open_exports: RwLock<Vec<Option<Arc<Export>>>>,
    clock: Arc<dyn Clock>,
    /// Requests at devices.
    working: AtomicUsize,
    has_ended: AtomicBool,
    /// Threads that are taking packets: see [`TargetConnection::begin_burst`].
    burst_threads: AtomicU64,
}

/// The identity of a new connection.
pub(super) struct ConnectionIdentity {
    pub(super) local: u64,
    pub(super) holder: Arc<Holder>,
    pub(super) remote: u64,
    pub(super) instance: [u8; 16],
    pub(super) name: String,
    pub(super) links: usize,
    pub(super) places: u16,
    pub(super) place_bytes: u32,
    pub(super) source: PacketSource,
}

impl PlaceOwner for TargetConnection {
    /// A device answered. A connection that has ended sends no answer: unanswered requests are
    /// repeated on another connection, and must not fail because a device was closed.
    fn answered(&self, mut exchange: Box<PlaceExchange>, outcome: Outcome) {
        let place = exchange.place;
        if let Some(work) = exchange.work.take() {
            work.ended(&outcome);
        }
        // The place keeps the exchange, which must not keep its own connection alive.
        exchange.served = None;
        self.connection.end.places.answered(exchange, outcome);
        self.working.fetch_sub(1, Ordering::SeqCst);
        if self.has_ended.load(Ordering::SeqCst) {
            return;
        }
        self.connection.ready.push(place);
        if self.burst_threads.load(Ordering::SeqCst) == 0 {
            self.connection.pump(self.clock.now_ns());
        }
    }
}

impl TargetConnection {
    pub(super) fn new(
        identity: ConnectionIdentity,
        seals: crate::session::Seals,
        exports: Arc<Exports>,
        random: Arc<IdSource>,
        clock: Arc<dyn Clock>,
    ) -> Arc<Self> {
        let serving = TargetEnd {
            places: TargetPlaces::new(identity.places, identity.place_bytes),
            connection: OnceLock::new(),
        };
        let now = clock.now_ns();
        let connection = Connection::new(
            identity.remote,
            seals,
            identity.links,
            usize::from(identity.places),
            serving,
            now,
        );
        let served = Arc::new(TargetConnection {
            connection,
            local: identity.local,
            holder: identity.holder,
            instance: identity.instance,
            name: identity.name,
            source: identity.source,
            since_ns: now,
            has_opened: AtomicBool::new(false),
            exports,
            random,
            open_exports: RwLock::default(),
            clock,
            working: AtomicUsize::new(0),
            has_ended: AtomicBool::new(false),
            burst_threads: AtomicU64::new(0),
        });
        // Set only here, and once.
        let _ = served.connection.end.connection.set(Arc::downgrade(&served));
        served
    }

    /// Hands nothing more to any device. Devices still answer the requests that they have; see
    /// [`TargetConnection::is_busy`]. Releases the carriers immediately, so that the next listener
    /// on the same addresses does not wait for a device. If its initiator is expected back, its
    /// exports are kept until `back_until_ns`.
    pub(super) fn end(&self, back_until_ns: Option<u64>) {
        self.has_ended.store(true, Ordering::SeqCst);
        self.connection.close_links();
        self.exports.forget(self.local, back_until_ns);
    }

    /// A thread has handled a packet. If the connection ended meanwhile, ends it again, because the
    /// packet may have opened a link.
    pub(super) fn end_again_if_ended(&self) {
        if self.has_ended.load(Ordering::SeqCst) {
            self.connection.close_links();
        }
    }

    /// The status. A place is in use while a command arrives or is at a device; nothing waits for
    /// one here.
    pub(super) fn status(&self, now: u64) -> crate::ConnectionStatus {
        let (places, busy) = self.connection.end.places.counts();
        crate::ConnectionStatus {
            connected: true,
            instance: self.instance,
            peer: self.name.clone(),
            heard_ms: now.saturating_sub(self.connection.last_received_at_ns()) / crate::clock::MS,
            places,
            places_free: places - busy,
            pending: busy,
            waiting: 0,
            links: crate::links_of(&self.connection, now),
        }
    }

    /// Whether it was ever admitted to an export.
    pub(super) fn has_opened(&self) -> bool {
        self.has_opened.load(Ordering::SeqCst)
    }

    /// Whether a device still has requests of it.
    pub(super) fn is_busy(&self) -> bool {
        self.working.load(Ordering::SeqCst) > 0
    }

    /// A thread starts to take packets: answers are sent when its burst is complete, in full
    /// packets.
    pub(super) fn begin_burst(&self) {
        self.burst_threads.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn end_burst(&self, now: u64) {
        self.burst_threads.fetch_sub(1, Ordering::SeqCst);
        self.connection.tick(now);
    }

    fn carry_out(self: &Arc<Self>, whole: WholeCommand) {
        let WholeCommand { command, mut exchange } = whole;
        // Counted before the end flag is checked: a thread that sets the flag and then sees no
        // request at work is right.
        self.working.fetch_add(1, Ordering::SeqCst);
        exchange.served = Some(self.clone());
        if self.has_ended.load(Ordering::SeqCst) {
            // No answer: the initiator repeats the request on another connection.
            exchange.served = None;
            self.working.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        match command.operation {
            Operation::Open => {
                let outcome = self.open(&command, &mut exchange);
                self.answered(exchange, outcome);
            }
            Operation::List => {
                let list = self.exports.list(exchange.buffer.len(), &self.holder.rights);
                exchange.buffer[..list.len()].copy_from_slice(&list);
                exchange.length = list.len();
                self.answered(exchange, Ok(Reply::Done));
            }
            Operation::Close => {
                let outcome = self.close(usize::from(command.export));
                self.answered(exchange, outcome);
            }
            _ => self.submit(&command, exchange),
        }
    }

    fn submit(self: &Arc<Self>, command: &Command, mut exchange: Box<PlaceExchange>) {
        let export = self.open_exports.read().get(usize::from(command.export)).cloned().flatten();
        let Some(export) = export else {
            let text = format!("export {} is not open on this connection", command.export);
            return self.answered(exchange, Err(Error::new(ErrorKind::Invalid, text)));
        };
        use Operation::{Discard, Write, WritePacked, WriteZeroes};
        let changes = matches!(command.operation, Write | WritePacked | Discard | WriteZeroes);
        let syncs = command.operation == Operation::Flush || command.flags & statement::FUA != 0;
        match export.begin(self.local, Effects { changes, syncs }) {
            Ok(work) => exchange.work = Some(work),
            Err(error) => return self.answered(exchange, Err(error)),
        }
        let asks = match command.operation {
            Operation::Read => Asks::Read,
            Operation::Write | Operation::WritePacked => Asks::Write,
            Operation::Flush => Asks::Flush,
            Operation::Discard => Asks::Discard,
            Operation::WriteZeroes => Asks::WriteZeroes,
            Operation::Prefetch => Asks::Prefetch,
            Operation::Allocation => Asks::Allocation,
            Operation::Open | Operation::Close | Operation::List => return,
        };
        let flags = Flags {
            fua: command.flags & statement::FUA != 0,
            no_unmap: command.flags & statement::NO_UNMAP != 0,
        };
        let request = Request::new(asks, command.address, command.length, flags, exchange);
        match command.operation {
            Operation::WritePacked => export.device.submit_packed(request),
            _ => export.device.submit(request),
        }
    }

    /// Opens the export in the payload; the answer is in the buffer.
    fn open(&self, command: &Command, exchange: &mut PlaceExchange) -> Result<Reply> {
        let name = str::from_utf8(&exchange.buffer[..exchange.length]);
        let name =
            name.map_err(|_| Error::new(ErrorKind::Invalid, "an export's name must be UTF-8"))?;
        self.holder.rights.allow(name, command.flags)?;
        let export = self.exports.find(name, &self.holder.rights)?;
        let mut open_exports = self.open_exports.write();
        if open_exports.len() >= OPEN_EXPORTS_MAX {
            let text = format!("a connection has at most {OPEN_EXPORTS_MAX} open exports");
            return Err(Error::new(ErrorKind::Full, text));
        }
        let request = OpenRequest {
            instance: self.instance,
            flags: command.flags,
            reservation: command.address,
            reads_only: self.holder.rights.only_reads(name),
            now_ns: self.clock.now_ns(),
        };
        export.admit(self.local, request, || (self.random.lock())())?;
        if self.has_ended.load(Ordering::SeqCst) {
            // The connection ended during this, perhaps before there was a user to forget.
            self.exports.forget(self.local, None);
        }
        self.has_opened.store(true, Ordering::SeqCst);
        let answer = export.opened(open_exports.len() as u8).encode();
        open_exports.push(Some(export));
        exchange.buffer[..answer.len()].copy_from_slice(&answer);
        exchange.length = answer.len();
        Ok(Reply::Done)
    }

    /// Closes an export, unless this connection has its export open under another number too.
    fn close(&self, number: usize) -> Result<Reply> {
        let mut open_exports = self.open_exports.write();
        let Some(export) = open_exports.get(number).cloned().flatten() else {
            return Ok(Reply::Done);
        };
        let same =
            open_exports.iter().flatten().filter(|other| Arc::ptr_eq(other, &export)).count();
        if same == 1 {
            export.leave(self.local)?;
        }
        open_exports[number] = None;
        Ok(Reply::Done)
    }
}

impl ConnectionEnd for TargetEnd {
    fn take(&self, statement: &Statement<'_>) -> Result<(), Violation> {
        if let Some(whole) = self.places.take(statement)?
            && let Some(served) = self.connection.get().and_then(Weak::upgrade)
        {
            served.carry_out(whole);
        }
        Ok(())
    }

    fn put(&self, place: u16, body: &mut Body<'_>, pieces: &mut SentPieces) -> PacketFill {
        self.places.put(place, body, pieces)
    }

    fn lost(&self, piece: &SentPiece) -> bool {
        self.places.lost(piece)
    }
}
