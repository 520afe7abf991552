//! The device at the initiator's end, and how it is opened.
//!
//! Invariants: an export has the same number on every connection of an initiator, whatever number
//! the target gives it there. A target that reports another geometry is refused. A dropped device
//! is closed at the target when all of its requests are answered.
//!
//! Not here: how requests are executed (`pending`, `places`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use sawmill_device::{
    Allocation, BlockDevice, Error, ErrorKind, Exchange, Flags, Geometry, Operation as Asks,
    Operations, Outcome, Reply, Request, Result,
};
use sawmill_format::FormatError;
use sawmill_format::link::control::{self, OpenAnswer};
use sawmill_format::link::statement::{Command, Operation};

use super::pending::{ControlExchange, Terms, operation_of, template};
use super::{Initiator, OpenExport};
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
        let (sender, receiver) = sync_channel(1);
        let length = payload.len() as u64;
        let answer = vec![0; self.options.place_bytes as usize];
        let exchange = Box::new(ControlExchange { payload, answer, sender });
        let request = Request::new(Asks::Read, 0, length, Flags::default(), exchange);
        let terms =
            Terms { submitted_at_ns: self.clock.now_ns(), changes_before: 0, bytes_max: u64::MAX };
        self.pendings.add(Command { length, ..command }, terms, request);
        Answer(receiver)
    }

    pub(super) fn queue_open(&self, export: &str, mode: OpenMode, reservation: u64) -> Answer {
        let command =
            Command { flags: mode.flags(), address: reservation, ..control(Operation::Open) };
        self.queue(command, export.as_bytes().to_vec())
    }

    /// Requests an export. The answer is for [`Initiator::opened`].
    pub fn request_open(&self, export: &str, mode: OpenMode) -> Answer {
        let answer = self.queue_open(export, mode, 0);
        self.progress(self.clock.now_ns());
        answer
    }

    /// Requests the list of exports; [`sawmill_format::link::control::exports`] parses the answer.
    pub fn request_list(&self) -> Answer {
        let answer = self.queue(control(Operation::List), Vec::new());
        self.progress(self.clock.now_ns());
        answer
    }

    pub(super) fn queue_close(&self, export: u8) -> Answer {
        self.queue(Command { export, ..control(Operation::Close) }, Vec::new())
    }

    /// Closes all exports. Returns their answers, and those of devices that were dropped before.
    pub(crate) fn close_exports(&self) -> Vec<Answer> {
        let open_exports = self.view.read().open_exports.clone();
        let closing = self.change(|control| {
            open_exports.iter().for_each(|open_export| control.close_export(self, open_export));
            std::mem::take(&mut control.closing)
        });
        self.progress(self.clock.now_ns());
        closing
    }

    /// Makes a device from the answer to an open.
    pub fn opened(
        self: &Arc<Self>,
        export: &str,
        mode: OpenMode,
        answer: &[u8],
    ) -> Result<RemoteDevice> {
        let opened = read_opened(answer)?;
        let open_export =
            self.change(|control| control.add_export(self, export, mode, opened, answer))?;
        self.progress(self.clock.now_ns());
        let geometry = Geometry {
            size_bytes: opened.size_bytes,
            block_bytes: opened.block_bytes,
            preferred_bytes: opened.preferred_bytes,
            // Longer requests use several places.
            request_bytes_max: REQUEST_BYTES_MAX,
            read_only: opened.read_only || mode.read_only,
            shared_cache: opened.shared_cache,
            operations: Operations {
                discard: opened.discard,
                write_zeroes: opened.write_zeroes,
                allocation: opened.allocation,
            },
        };
        Ok(RemoteDevice { initiator: Arc::clone(self), open_export, geometry })
    }
}

/// A number that no target assigns to an open export.
pub(super) const NOT_OPEN: u8 = u8::MAX;

/// The common fields of all control commands.
fn control(operation: Operation) -> Command {
    Command {
        operation,
        place: 0,
        flags: 0,
        export: NOT_OPEN,
        use_number: 0,
        address: 0,
        length: 0,
    }
}

/// The field of an open's answer that names the connection it arrived on: see
/// [`Initiator::opened`].
pub(super) const ANSWERED_BY: std::ops::Range<usize> =
    control::opened_at::SIZE..control::opened_at::SIZE + 8;

/// The connection that an open was answered on.
pub(super) fn answered_by(answer: &[u8]) -> u64 {
    let local = answer.get(ANSWERED_BY).and_then(|bytes| bytes.try_into().ok());
    local.map_or(0, u64::from_le_bytes)
}

pub(super) fn read_opened(answer: &[u8]) -> Result<OpenAnswer> {
    let bytes = answer.get(..control::opened_at::SIZE).unwrap_or_default();
    OpenAnswer::decode(bytes).map_err(unreadable)
}

/// The target's answer is not what an answer is.
fn unreadable(error: FormatError) -> Error {
    Error::new(ErrorKind::Internal, error.to_string()).with_source(error)
}

/// The longest read or write of a remote device.
const REQUEST_BYTES_MAX: u32 = 32 << 20;

/// A device with its bytes at the target.
pub struct RemoteDevice {
    initiator: Arc<Initiator>,
    open_export: Arc<OpenExport>,
    geometry: Geometry,
}

impl RemoteDevice {
    fn send(&self, operation: Operation, request: Request) {
        if let Some(error) = self.initiator.failure() {
            return request.fail(error);
        }
        let (now, number) = (self.initiator.clock.now_ns(), self.open_export.number);
        let command = template(&request, operation, number);
        let terms = Terms {
            submitted_at_ns: now,
            changes_before: self.initiator.pendings.changes(number),
            bytes_max: self.open_export.answer.request_bytes_max.into(),
        };
        self.initiator.pendings.add(command, terms, request);
        self.initiator.progress(now);
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
                self.send(operation, runs_of(request, self.initiator.options.place_bytes))
            }
            _ => self.send(operation, request),
        }
    }
}

impl PackedDevice for RemoteDevice {
    fn packed_bytes_max(&self) -> u32 {
        self.initiator.place_bytes()
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
            let text = format!(
                "a packed write of {} bytes is longer than the target accepts",
                request.length
            );
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

fn runs_of(request: Request, place_bytes: u32) -> Request {
    let length = request.length;
    request.wrap(|inner| Box::new(Runs { inner, bytes: vec![0; place_bytes as usize], length }))
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
            let mut remaining_bytes = self.length;
            let mut runs = Vec::new();
            let reported_runs = control::runs(&self.bytes);
            for (length, data) in reported_runs.map_err(unreadable)? {
                let length = length.min(remaining_bytes);
                remaining_bytes -= length;
                if length > 0 {
                    runs.push(Allocation { length, data });
                }
            }
            if remaining_bytes > 0 {
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
        // The number is not reused, because late requests may carry it.
        let (initiator, open_export) = (&self.initiator, &self.open_export);
        open_export.flushed.store(initiator.pendings.changes(open_export.number), Ordering::SeqCst);
        initiator.change(|control| control.close_export(initiator, open_export));
        self.initiator.progress(self.initiator.clock.now_ns());
    }
}
