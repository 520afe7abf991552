//! Devices that execute many byte ranges as one request, and an adapter that makes any device one
//! of them.
//!
//! Invariants: a packed write that breaks a rule is `Invalid` and changes nothing. A valid one is
//! answered once, when all of its ranges are done, with the first error if there was one. Not here:
//! the bytes of a packed write (`sawmill_format::packed_write`), and which ranges are packed
//! together (`cache`).

use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_device::{
    BlockDevice, Error, ErrorKind, Exchange, Flags, Geometry, Operation, Outcome, Reply, Request,
    Result,
};
use sawmill_format::packed_write::PackedWrite;

/// A device that executes many byte ranges as one request (BASS §3.1).
pub trait PackedDevice: BlockDevice {
    /// The longest payload of one packed write, in bytes.
    fn packed_bytes_max(&self) -> u32;

    /// The longest distance from a packed write's address to the end of its last range, in bytes.
    fn packed_span_bytes_max(&self) -> u32;

    /// Executes a packed write: a `Write` whose payload (`request.length` bytes) is a packed write
    /// relative to `request.address`. It is answered like a write. Its ranges may be written in any
    /// order.
    fn submit_packed(&self, request: Request);
}

impl<D: PackedDevice + ?Sized> PackedDevice for Arc<D> {
    fn packed_bytes_max(&self) -> u32 {
        (**self).packed_bytes_max()
    }

    fn packed_span_bytes_max(&self) -> u32 {
        (**self).packed_span_bytes_max()
    }

    fn submit_packed(&self, request: Request) {
        (**self).submit_packed(request);
    }
}

/// The longest payload that [`Unpacker`] accepts, in bytes.
pub const UNPACK_BYTES_MAX: u32 = 1 << 20;
/// The longest span that [`Unpacker`] accepts, in bytes.
pub const UNPACK_SPAN_BYTES_MAX: u32 = 64 << 20;

/// The device `D` with packed writes: each range becomes a write of its own, and all are submitted
/// together.
pub struct Unpacker<D> {
    inner: D,
}

impl<D: BlockDevice> Unpacker<D> {
    /// Adds packed writes to `inner`.
    #[must_use]
    pub fn new(inner: D) -> Self {
        Unpacker { inner }
    }

    /// The device inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Takes the payload out of a request, and lists the writes in it: address, and offset in the
    /// payload.
    fn unpack(&self, request: &mut Request) -> Result<(Vec<u8>, Vec<PackedRange>)> {
        let invalid =
            |text: String| Error::new(ErrorKind::Invalid, format!("packed write: {text}"));
        let geometry = self.inner.geometry();
        if request.operation != Operation::Write {
            return Err(invalid(format!("{:?} has no packed form", request.operation)));
        }
        if geometry.read_only {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                "packed write refused: the device is read-only",
            ));
        }
        if request.length > u64::from(UNPACK_BYTES_MAX) {
            return Err(invalid(format!("{} bytes are above {UNPACK_BYTES_MAX}", request.length)));
        }
        let mut payload = vec![0; request.length as usize];
        request.fill(0, &mut payload);
        let packed = PackedWrite::decode(&payload)
            .map_err(|error| invalid(error.to_string()).with_source(error))?;
        let span = u64::from(packed.span_bytes());
        let inside =
            request.address.checked_add(span).is_some_and(|end| end <= geometry.size_bytes);
        if !inside || span > u64::from(UNPACK_SPAN_BYTES_MAX) {
            let address = request.address;
            return Err(invalid(format!(
                "a span of {span} bytes at {address} is too long or past the end"
            )));
        }
        let longest = geometry.request_bytes_max as usize;
        let mut ranges = Vec::with_capacity(packed.entries().len());
        let mut payload_offset =
            payload.len() - packed.entries().map(|(_, bytes)| bytes.len()).sum::<usize>();
        for (offset, bytes) in packed.entries() {
            let address = request.address + u64::from(offset);
            for start in (0..bytes.len()).step_by(longest) {
                let length = longest.min(bytes.len() - start);
                ranges.push(PackedRange {
                    address: address + start as u64,
                    payload_offset: payload_offset + start,
                    length,
                });
            }
            payload_offset += bytes.len();
        }
        Ok((payload, ranges))
    }
}

/// One write of a packed write: a range, or as much of it as the device takes at once.
struct PackedRange {
    address: u64,
    /// Where its bytes begin in the payload.
    payload_offset: usize,
    length: usize,
}

impl<D: BlockDevice> BlockDevice for Unpacker<D> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: Request) {
        self.inner.submit(request);
    }
}

impl<D: BlockDevice> PackedDevice for Unpacker<D> {
    fn packed_bytes_max(&self) -> u32 {
        UNPACK_BYTES_MAX
    }

    fn packed_span_bytes_max(&self) -> u32 {
        UNPACK_SPAN_BYTES_MAX
    }

    fn submit_packed(&self, mut request: Request) {
        let (payload, ranges) = match self.unpack(&mut request) {
            Ok(unpacked) => unpacked,
            Err(error) => return request.fail(error),
        };
        let flags = Flags { fua: request.flags.fua, ..Flags::default() };
        let progress = UnpackProgress { ranges: ranges.len(), error: None, request: Some(request) };
        let whole = Arc::new(PackedRequest { payload, progress: Mutex::new(progress) });
        for PackedRange { address, payload_offset, length } in ranges {
            let exchange = Box::new(RangeExchange { whole: whole.clone(), payload_offset });
            self.inner.submit(Request::new(
                Operation::Write,
                address,
                length as u64,
                flags,
                exchange,
            ));
        }
    }
}

/// A packed write in flight.
struct PackedRequest {
    payload: Vec<u8>,
    progress: Mutex<UnpackProgress>,
}

struct UnpackProgress {
    ranges: usize,
    error: Option<Error>,
    request: Option<Request>,
}

/// The exchange of one of its writes.
struct RangeExchange {
    whole: Arc<PackedRequest>,
    payload_offset: usize,
}

impl Exchange for RangeExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = self.payload_offset + offset as usize;
        into.copy_from_slice(&self.whole.payload[start..start + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut []
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let completion = {
            let mut progress = self.whole.progress.lock();
            if let Err(error) = outcome {
                progress.error.get_or_insert(error);
            }
            progress.ranges -= 1;
            if progress.ranges > 0 {
                return;
            }
            progress.request.take().map(|request| (request, progress.error.take()))
        };
        if let Some((request, error)) = completion {
            request.complete(error.map_or(Ok(Reply::Done), Err));
        }
    }
}
