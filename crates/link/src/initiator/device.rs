//! The device at the initiator's end, and how it is opened.
//!
//! Invariants: a volume has the same number on every connection of an initiator, whatever number
//! the target gives it there. A target that reports another geometry is refused. A dropped device
//! is closed at the target when all of its requests are answered.
//!
//! Not here: how requests are executed (`pending`, `slots`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use sawmill_device::{
    Allocation, BlockDevice, Error, ErrorKind, Exchange, Flags, Geometry, Operation as Asks,
    Operations, Outcome, Reply, Request, Result,
};
use sawmill_format::link::control::{self, Opened};
use sawmill_format::link::part::{Command, Operation};

use super::pending::{Control, Terms, operation_of, template};
use super::{Initiator, Reopening, Volume};
use crate::PackedDevice;

/// How an export is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenMode {
    /// The initiator will not write.
    pub read_only: bool,
    /// Fence the current initiators.
    pub take_over: bool,
    /// Other initiators may have the export too, and know of each other.
    pub shared: bool,
}

impl OpenMode {
    fn flags(self) -> u8 {
        let bits = [
            (self.read_only, control::OPEN_READ_ONLY),
            (self.take_over, control::OPEN_TAKE_OVER),
            (self.shared, control::OPEN_SHARED),
        ];
        bits.iter().filter(|(set, _)| *set).map(|(_, bit)| bit).sum()
    }
}

/// The answer to a control command, once it arrives.
pub struct Answer(Receiver<(Outcome, Vec<u8>)>);

impl Answer {
    /// Waits for the answer.
    pub fn wait(&self, most: Duration) -> Result<Vec<u8>> {
        match self.0.recv_timeout(most) {
            Ok((outcome, bytes)) => outcome.map(|_| bytes),
            Err(_) => {
                let text = format!("the target did not answer in {} s", most.as_secs());
                Err(Error::new(ErrorKind::TimedOut, text))
            }
        }
    }

    /// The answer, if it has arrived.
    pub fn poll(&self) -> Option<Result<Vec<u8>>> {
        self.0.try_recv().ok().map(|(outcome, bytes)| outcome.map(|_| bytes))
    }
}

impl Initiator {
    /// Queues a control command; it is sent with the next packets.
    fn queue(&self, command: Command, payload: Vec<u8>) -> Answer {
        let (told, hear) = sync_channel(1);
        let length = payload.len() as u64;
        let answer = vec![0; self.options.slot_bytes as usize];
        let exchange = Box::new(Control { payload, answer, told });
        let request = Request::new(Asks::Read, 0, length, Flags::default(), exchange);
        let terms = Terms { submitted_ns: self.clock.now_ns(), mark: 0, bytes_max: u64::MAX };
        self.pendings.add(Command { length, ..command }, terms, request);
        Answer(hear)
    }

    fn queue_open(&self, export: &str, mode: OpenMode, reservation: u64) -> Answer {
        let command =
            Command { flags: mode.flags(), address: reservation, ..control(Operation::Open) };
        self.queue(command, export.as_bytes().to_vec())
    }

    /// Requests an export. The answer is for [`Initiator::opened`].
    pub fn ask_open(&self, export: &str, mode: OpenMode) -> Answer {
        let answer = self.queue_open(export, mode, 0);
        self.go_on(self.clock.now_ns());
        answer
    }

    /// Requests the list of exports; [`sawmill_format::link::control::exports`] parses the answer.
    pub fn ask_list(&self) -> Answer {
        let answer = self.queue(control(Operation::List), Vec::new());
        self.go_on(self.clock.now_ns());
        answer
    }

    /// Closes a volume when all of its requests are answered.
    fn close_volume(&self, volume: &Volume) {
        if volume.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let answer =
            self.queue(Command { volume: volume.number, ..control(Operation::Close) }, Vec::new());
        let mut closing = self.closing.lock();
        closing.retain(|earlier| earlier.poll().is_none());
        closing.push(answer);
    }

    /// Closes all volumes. Returns their answers, and those of devices that were dropped before.
    pub(crate) fn close_volumes(&self) -> Vec<Answer> {
        let volumes = self.volumes.read().clone();
        volumes.iter().for_each(|volume| self.close_volume(volume));
        self.go_on(self.clock.now_ns());
        std::mem::take(&mut *self.closing.lock())
    }

    /// Makes a device from the answer to an open.
    pub fn opened(
        self: &Arc<Self>,
        export: &str,
        mode: OpenMode,
        answer: &[u8],
    ) -> Result<RemoteDevice> {
        let opened = read_opened(answer)?;
        // Both locks are held, so that no connection is made that does not know this volume.
        let mut connection = self.connection.write();
        let mut volumes = self.volumes.write();
        let number = u8::try_from(volumes.len()).ok().filter(|number| *number < u8::MAX);
        let number = number.ok_or_else(|| {
            Error::new(ErrorKind::Full, "this initiator has too many volumes open")
        })?;
        let volume = Arc::new(Volume {
            export: export.to_owned(),
            mode,
            opened,
            keeper: opened.keeper.into(),
            number,
            flushed: 0.into(),
            closed: false.into(),
            loss: Default::default(),
        });
        volumes.push(Arc::clone(&volume));
        self.pendings.set_number(number, opened.volume);
        drop(volumes);
        // It was opened on an earlier connection, so it is not open on this one.
        let stale = connection.as_mut().filter(|live| live.local != answered_by(answer));
        let again = stale.map(|live| live.opened = false).is_some();
        drop(connection);
        if again {
            self.open_again();
            self.go_on(self.clock.now_ns());
        }
        let geometry = Geometry {
            size_bytes: opened.size_bytes,
            block_bytes: opened.block_bytes,
            preferred_bytes: opened.preferred_bytes,
            // Longer requests use several slots.
            request_bytes_max: REQUEST_BYTES_MAX,
            read_only: opened.read_only || mode.read_only,
            shared_cache: opened.shared_cache,
            operations: Operations {
                discard: opened.discard,
                write_zeroes: opened.write_zeroes,
                allocation: opened.allocation,
            },
        };
        Ok(RemoteDevice { initiator: Arc::clone(self), number, geometry })
    }

    /// Requests all volumes again on a new connection; requests resume when all are open. Nothing
    /// is sent here, because the caller holds locks, and sending may have to report losses.
    pub(super) fn open_again(&self) {
        let mut reopening = self.reopening.lock();
        let Some(local) = self.live().map(|live| live.local) else { return };
        let volumes: Vec<Arc<Volume>> = self.volumes.read().clone();
        let (closed, open): (Vec<_>, Vec<_>) =
            volumes.into_iter().partition(|volume| volume.closed.load(Ordering::SeqCst));
        // Otherwise a close would hit the volumes that have their numbers on the new connection.
        closed.iter().for_each(|volume| self.pendings.set_number(volume.number, NOT_OPEN));
        let asked: Vec<_> =
            open.into_iter().map(|volume| (self.ask_again(&volume), volume)).collect();
        let none = asked.is_empty();
        *reopening = Reopening { local, asked };
        drop(reopening);
        if none {
            self.all_open(local);
        }
    }

    /// All volumes are open on connection `local`.
    fn all_open(&self, local: u64) {
        if let Some(live) = self.connection.write().as_mut().filter(|live| live.local == local) {
            live.opened = true;
        }
    }

    /// Uses the volume's reservation: if another initiator has had the export since, the
    /// reservation is over. Never takes over: an initiator that has the export now took it over, or
    /// was admitted after we were given up.
    fn ask_again(&self, volume: &Volume) -> Answer {
        let mode = OpenMode { take_over: false, ..volume.mode };
        self.queue_open(&volume.export, mode, volume.opened.reservation)
    }

    /// Checks whether the volumes that were requested again are open. What must be requested once
    /// more is sent with the tick.
    pub(super) fn look_at_reopened(&self) {
        let mut reopening = self.reopening.lock();
        if reopening.asked.is_empty() {
            return;
        }
        while let Some((answer, volume)) = reopening.asked.first() {
            let Some(outcome) = answer.poll() else { return };
            let volume = Arc::clone(volume);
            match outcome.and_then(|bytes| read_opened(&bytes)) {
                Ok(opened) if opened.size_bytes < volume.opened.size_bytes => {
                    let text = format!("{}: the export is smaller than before", volume.export);
                    drop(reopening);
                    return self.fail(Error::new(ErrorKind::Refused, text));
                }
                Ok(opened) => {
                    self.pendings.set_number(volume.number, opened.volume);
                    let mut keeper = volume.keeper.lock();
                    if std::mem::replace(&mut *keeper, opened.keeper) != opened.keeper {
                        volume.keeper_gone(self.pendings.changes(volume.number));
                    }
                    drop(keeper);
                    reopening.asked.remove(0);
                }
                // The target is stopping, or the former user's requests are not done: ask again.
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    reopening.asked[0].0 = self.ask_again(&volume);
                    return;
                }
                Err(error) => {
                    drop(reopening);
                    return self.fail(error);
                }
            }
        }
        let local = reopening.local;
        drop(reopening);
        self.all_open(local);
    }
}

/// A number that no target assigns to a volume.
const NOT_OPEN: u8 = u8::MAX;

/// The common fields of all control commands.
fn control(operation: Operation) -> Command {
    Command { operation, slot: 0, flags: 0, volume: NOT_OPEN, sequence: 0, address: 0, length: 0 }
}

/// The place in an open's answer that names the connection it arrived on: see
/// [`Initiator::opened`].
pub(super) const ANSWERED_BY: std::ops::Range<usize> =
    control::opened_at::SIZE..control::opened_at::SIZE + 8;

fn answered_by(answer: &[u8]) -> u64 {
    let local = answer.get(ANSWERED_BY).and_then(|bytes| bytes.try_into().ok());
    local.map_or(0, u64::from_le_bytes)
}

fn read_opened(answer: &[u8]) -> Result<Opened> {
    let bytes = answer.get(..control::opened_at::SIZE).unwrap_or_default();
    Opened::decode(bytes).map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))
}

/// The longest read or write of a remote device.
const REQUEST_BYTES_MAX: u32 = 32 << 20;

/// A device with its bytes at the target.
pub struct RemoteDevice {
    initiator: Arc<Initiator>,
    number: u8,
    geometry: Geometry,
}

impl RemoteDevice {
    fn send(&self, operation: Operation, request: Request) {
        if let Some(error) = self.initiator.failure() {
            return request.fail(error);
        }
        let now = self.initiator.clock.now_ns();
        let command = template(&request, operation, self.number);
        let volume = self.initiator.volumes.read().get(usize::from(self.number)).cloned();
        let bytes_max = volume.map_or(u64::MAX, |volume| volume.opened.request_bytes_max.into());
        let mark = self.initiator.pendings.changes(self.number);
        self.initiator.pendings.add(command, Terms { submitted_ns: now, mark, bytes_max }, request);
        self.initiator.go_on(now);
    }
}

impl BlockDevice for RemoteDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        if let Err(error) = request.check(&self.geometry) {
            return request.fail(error);
        }
        let operation = operation_of(request.operation);
        match request.operation {
            Asks::Allocation => {
                self.send(operation, runs_of(request, self.initiator.options.slot_bytes))
            }
            _ => self.send(operation, request),
        }
    }
}

impl PackedDevice for RemoteDevice {
    fn packed_bytes_max(&self) -> u32 {
        self.initiator.slot_bytes()
    }

    fn packed_span_bytes_max(&self) -> u32 {
        crate::UNPACK_SPAN_BYTES_MAX
    }

    fn submit_packed(&self, request: Request) {
        if self.geometry.read_only {
            let text = "packed write refused: the device is read-only";
            return request.fail(Error::new(ErrorKind::ReadOnly, text));
        }
        if request.length > u64::from(self.packed_bytes_max()) {
            let text = format!("a packed write of {} bytes is longer than a slot", request.length);
            return request.fail(Error::new(ErrorKind::Invalid, text));
        }
        self.send(Operation::WritePacked, request);
    }
}

/// The exchange of an allocation query: its answer arrives as bytes, and is delivered as runs.
struct Runs {
    inner: Box<dyn Exchange>,
    bytes: Vec<u8>,
    length: u64,
}

fn runs_of(request: Request, slot_bytes: u32) -> Request {
    let length = request.length;
    request.wrap(|inner| Box::new(Runs { inner, bytes: vec![0; slot_bytes as usize], length }))
}

impl Exchange for Runs {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        self.inner.fill(offset, into);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let outcome = outcome.and_then(|_| {
            let mut left = self.length;
            let mut runs = Vec::new();
            let told = control::runs(&self.bytes);
            for (length, data) in
                told.map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))?
            {
                let length = length.min(left);
                left -= length;
                if length > 0 {
                    runs.push(Allocation { length, data });
                }
            }
            if left > 0 {
                let text = "the target's allocation does not cover the requested range";
                return Err(Error::new(ErrorKind::Internal, text));
            }
            Ok(Reply::Allocation(runs))
        });
        self.inner.complete(outcome);
    }
}

impl Drop for RemoteDevice {
    fn drop(&mut self) {
        // The number is not reused: late requests have it.
        let volume = self.initiator.volumes.read().get(usize::from(self.number)).cloned();
        let Some(volume) = volume else { return };
        volume.flushed.store(self.initiator.pendings.changes(self.number), Ordering::SeqCst);
        self.initiator.close_volume(&volume);
        self.initiator.go_on(self.initiator.clock.now_ns());
    }
}
