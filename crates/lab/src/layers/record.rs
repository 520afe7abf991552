//! Records every request of a device, as the CSV trace that `bench replay` and `simulate` read.
//!
//! One line per request, in the order of submission: time, operation, address, length, flags,
//! duration and result. Operations that traces lack (prefetch, allocation) are on lines that begin
//! with `#`.
//!
//! Invariants: a caller copies some bytes into memory under a short lock, and a thread writes them.
//! Nothing is lost silently: when the thread is far behind, or the disk is full, requests are
//! counted instead; the end of the file, the log, or both say how many are missing. Lines wait for
//! the answers of their requests, at most [`REQUESTS_OPEN_MAX`] of them: then the oldest is written
//! as `unanswered`, and a line `# answered` follows later. Not here: payloads.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sawmill_device::{BlockDevice, Flags, Geometry, Operation, Request};

use sawmill_console::exit::{Failure, Result};

const HEADER: &str = "time_ns,operation,address_bytes,length_bytes,flags,latency_ns,outcome";
/// Events that the thread has not taken yet: about 50 MiB.
const EVENTS_BEHIND_MAX: usize = 1 << 20;
/// Requests whose lines wait for their answers.
const REQUESTS_OPEN_MAX: usize = 1 << 16;
/// The thread looks this often, or when [`EVENTS_AT_ONCE_MAX`] events wait: a trace that somebody
/// follows is a tenth of a second old, and an idle device costs ten looks a second.
const WRITE_EVERY: Duration = Duration::from_millis(100);
const EVENTS_AT_ONCE_MAX: usize = 4096;

/// A device whose requests are recorded.
pub(super) struct RecordedDevice {
    inner: Arc<dyn BlockDevice>,
    recording: Arc<EventLog>,
    writer: Option<JoinHandle<()>>,
}

/// The recorded parts of a request.
#[derive(Clone, Copy)]
struct RequestFacts {
    at_ns: u64,
    operation: Operation,
    address: u64,
    length: u64,
    flags: Flags,
}

#[derive(Clone, Copy)]
enum Event {
    Request(RequestFacts),
    /// The number of the request, the time, and the result.
    Answer(u64, u64, &'static str),
}

#[derive(Default)]
struct EventBuffer {
    /// Bounded by [`EVENTS_BEHIND_MAX`] and the requests in flight.
    events: Vec<Event>,
    /// Requests recorded so far; also the number of the next one.
    request_count: u64,
    /// Requests for which there was no room.
    missing: u64,
    is_closed: bool,
}

struct EventLog {
    pending: Mutex<EventBuffer>,
    changed: Condvar,
    start: Instant,
}

impl RecordedDevice {
    /// Records what passes to `inner` from now on. Creates or truncates the file.
    pub(super) fn start(inner: Arc<dyn BlockDevice>, path: &Path) -> Result<Self> {
        let cannot = |error: &io::Error| {
            Failure::io(format!("cannot record requests in {}", path.display()), error)
        };
        let mut file = File::create(path).map_err(|error| cannot(&error))?;
        writeln!(file, "{HEADER}").map_err(|error| cannot(&error))?;
        let recording = Arc::new(EventLog {
            pending: Mutex::default(),
            changed: Condvar::new(),
            start: Instant::now(),
        });
        let mine = Arc::clone(&recording);
        let lines = Lines::new(BufWriter::with_capacity(1 << 20, file), path.to_owned());
        let writer = std::thread::Builder::new()
            .name("record".into())
            .spawn(move || mine.write(lines))
            .map_err(|error| Failure::io("cannot start the thread that records", &error))?;
        Ok(RecordedDevice { inner, recording, writer: Some(writer) })
    }
}

impl BlockDevice for RecordedDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: Request) {
        // What finds no room is carried out all the same: a recording must not slow its device.
        let Some(number) = self.recording.note_request(&request) else {
            return self.inner.submit(request);
        };
        let recording = Arc::clone(&self.recording);
        self.inner.submit(request.then(move |outcome, asker| {
            recording.note_answer(
                number,
                outcome.as_ref().map_or_else(|error| name(error.kind()), |_| "done"),
            );
            asker.complete(outcome);
        }));
    }
}

impl Drop for RecordedDevice {
    fn drop(&mut self) {
        self.recording.pending.lock().is_closed = true;
        self.recording.changed.notify_one();
        if let Some(writer) = self.writer.take() {
            // It only writes. If it died, the file has less than it could, and nothing else is
            // lost.
            let _ = writer.join();
        }
    }
}

/// The result as traces have it. Without a wildcard, so that a new kind gets a name here.
fn name(kind: sawmill_device::ErrorKind) -> &'static str {
    use sawmill_device::ErrorKind as Kind;
    match kind {
        Kind::Invalid => "invalid",
        Kind::ReadOnly => "read-only",
        Kind::NotFound => "not-found",
        Kind::Exists => "exists",
        Kind::Refused => "refused",
        Kind::Fenced => "fenced",
        Kind::Unavailable => "unavailable",
        Kind::Denied => "denied",
        Kind::InUse => "in-use",
        Kind::Full => "full",
        Kind::Corrupt => "corrupt",
        Kind::Closed => "closed",
        Kind::TimedOut => "timed-out",
        Kind::Unreachable => "unreachable",
        Kind::Internal => "internal",
    }
}

impl EventLog {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The number of the request; none if it is only counted as missing.
    fn note_request(&self, request: &Request) -> Option<u64> {
        let mut pending = self.pending.lock();
        // Reserves room for the answers of all recorded requests too.
        if pending.events.len() >= EVENTS_BEHIND_MAX {
            pending.missing += 1;
            return None;
        }
        // Under the lock, so that the times are in the order of the requests.
        let at_ns = self.now_ns();
        let Request { operation, address, length, flags, .. } = *request;
        pending.events.push(Event::Request(RequestFacts {
            at_ns,
            operation,
            address,
            length,
            flags,
        }));
        self.notify_if_half_full(&pending);
        pending.request_count += 1;
        Some(pending.request_count - 1)
    }

    fn note_answer(&self, number: u64, outcome: &'static str) {
        let at_ns = self.now_ns();
        let mut pending = self.pending.lock();
        pending.events.push(Event::Answer(number, at_ns, outcome));
        self.notify_if_half_full(&pending);
    }

    fn notify_if_half_full(&self, pending: &EventBuffer) {
        // Exactly at the limit, so that many events cost one system call.
        if pending.events.len() == EVENTS_AT_ONCE_MAX {
            self.changed.notify_one();
        }
    }

    fn write(&self, mut lines: Lines<impl Write>) {
        let mut events = Vec::new();
        loop {
            let mut pending = self.pending.lock();
            if pending.events.len() < EVENTS_AT_ONCE_MAX && !pending.is_closed {
                self.changed.wait_for(&mut pending, WRITE_EVERY);
            }
            // The two lists change places, so that neither is allocated anew.
            std::mem::swap(&mut events, &mut pending.events);
            let (missing, is_closed) = (pending.missing, pending.is_closed);
            drop(pending);
            events.drain(..).for_each(|event| lines.take(event));
            if is_closed {
                return lines.end(missing);
            }
            lines.flush();
        }
    }
}

/// The file, and the lines that wait for answers.
struct Lines<W: Write> {
    out: W,
    path: PathBuf,
    /// The error is logged once; later ones are only counted.
    failed: bool,
    unwritten: u64,
    /// The number of the first line that waits.
    first: u64,
    /// Bounded by [`REQUESTS_OPEN_MAX`].
    open: VecDeque<(RequestFacts, Option<(u64, &'static str)>)>,
}

impl<W: Write> Lines<W> {
    fn new(out: W, path: PathBuf) -> Self {
        Lines { out, path, failed: false, unwritten: 0, first: 0, open: VecDeque::new() }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Request(facts) => self.open.push_back((facts, None)),
            Event::Answer(number, at_ns, outcome) => match number.checked_sub(self.first) {
                Some(place) => {
                    if let Some(line) = self.open.get_mut(place as usize) {
                        line.1 = Some((at_ns, outcome));
                    }
                }
                None => {
                    self.put(&format!("# answered: request {number} at {at_ns} ns, {outcome}\n"))
                }
            },
        }
        while self
            .open
            .front()
            // In the order of submission, as traces are read. One request without an answer must
            // not hold the others back forever.
            .is_some_and(|(_, answer)| answer.is_some() || self.open.len() > REQUESTS_OPEN_MAX)
        {
            self.put_first();
        }
    }

    fn put_first(&mut self) {
        let Some((facts, answer)) = self.open.pop_front() else { return };
        let number = self.first;
        self.first += 1;
        let RequestFacts { at_ns, operation, address, length, flags } = facts;
        let (mark, operation) = match operation {
            Operation::Read => ("", "read"),
            Operation::Write => ("", "write"),
            Operation::Flush => ("", "flush"),
            Operation::Discard => ("", "discard"),
            Operation::WriteZeroes => ("", "zero"),
            // Comments, because no reader of traces knows these operations.
            Operation::Prefetch => ("# ", "prefetch"),
            Operation::Allocation => ("# ", "allocation"),
        };
        let flags = match (flags.fua, flags.no_unmap) {
            (false, false) => "",
            (true, false) => "fua",
            (false, true) => "no_unmap",
            (true, true) => "fua+no_unmap",
        };
        let line = format!("{mark}{at_ns},{operation},{address},{length},{flags}");
        match answer {
            Some((done_ns, outcome)) => {
                self.put(&format!("{line},{},{outcome}\n", done_ns.saturating_sub(at_ns)));
            }
            None => {
                self.put(&format!("{line},,unanswered\n"));
                self.put(&format!("# the line above is request {number}\n"));
            }
        }
    }

    fn put(&mut self, line: &str) {
        if self.failed {
            self.unwritten += 1;
        } else if let Err(error) = self.out.write_all(line.as_bytes()) {
            self.fail(&error);
        }
    }

    fn flush(&mut self) {
        if !self.failed
            && let Err(error) = self.out.flush()
        {
            self.fail(&error);
        }
    }

    fn fail(&mut self, error: &io::Error) {
        self.failed = true;
        self.unwritten += 1;
        tracing::error!("cannot record requests in {} any more: {error}", self.path.display());
    }

    fn end(mut self, missing: u64) {
        while !self.open.is_empty() {
            self.put_first();
        }
        if missing > 0 {
            self.put(&format!(
                "# {missing} requests are missing: the disk was too slow for them\n"
            ));
            tracing::warn!(
                "{missing} requests are missing in {}: its disk is too slow",
                self.path.display()
            );
        }
        self.flush();
        if self.failed {
            let (lines, path) = (self.unwritten, self.path.display());
            tracing::error!("at least {lines} lines are missing at the end of {path}");
        }
    }
}

#[cfg(test)]
mod tests {
    use sawmill_device::layer::{Decision, Fault};
    use sawmill_device::{BlockDeviceExt, MemoryDevice, conformance};

    use super::*;
    use crate::trace::{self, ReadOptions, Trace};

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder")
    }

    #[test]
    fn what_was_recorded_is_read_again_as_a_trace() {
        let folder = folder();
        let path = folder.path().join("requests.csv");
        let device =
            RecordedDevice::start(Arc::new(MemoryDevice::new(1 << 20)), &path).expect("a file");
        let fua = Flags { fua: true, ..Flags::default() };
        device.call(Operation::Write, 5, 3, fua, b"abc".to_vec()).expect("in range");
        device.allocation(0, 4096).expect("in range");
        device.read_at(4096, 512).expect("in range");
        device.flush().expect("always");
        device.discard(0, 4096).expect("in range");
        device.write_zeroes(1, 2).expect("in range");
        device.read_at(1 << 20, 1).expect_err("past the end");
        drop(device);
        let mut trace = Trace::open(&path, ReadOptions::default()).expect("a trace");
        let mut requests = Vec::new();
        while let Some(request) = trace.next().expect("no bad line") {
            requests.push((request.operation, request.address, request.length));
        }
        use trace::Operation as TraceOperation;
        let expected = [
            (TraceOperation::Write, 5, 3),
            (TraceOperation::Read, 4096, 512),
            (TraceOperation::Flush, 0, 0),
            (TraceOperation::Discard, 0, 4096),
            (TraceOperation::Zero, 1, 2),
            (TraceOperation::Read, 1 << 20, 1),
        ];
        assert_eq!(requests, expected);
        let text = std::fs::read_to_string(&path).expect("a file");
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains(",write,5,3,fua,") && lines[1].ends_with(",done"), "{text}");
        assert!(lines[2].starts_with("# ") && lines[2].contains(",allocation,0,4096,"), "{text}");
        assert!(lines[7].ends_with(",invalid"), "{text}");
    }

    #[test]
    fn lines_keep_the_order_of_submission_and_mark_unanswered_requests() {
        let folder = folder();
        let path = folder.path().join("requests.csv");
        let hold_first = |request: &Request| match request.address {
            0 => Decision::Hold,
            _ => Decision::Pass,
        };
        let inner = Arc::new(Fault::new(MemoryDevice::new(1 << 20), hold_first));
        let device = RecordedDevice::start(Arc::clone(&inner) as _, &path).expect("a file");
        std::thread::scope(|scope| {
            scope.spawn(|| device.read_at(0, 1));
            while inner.held() == 0 {
                std::thread::yield_now();
            }
            device.read_at(1, 1).expect("passes");
            inner.release();
        });
        device.submit(Request::with_bytes(
            Operation::Write,
            0,
            Flags::default(),
            vec![0; 9],
            |_, _| (),
        ));
        drop(device);
        let text = std::fs::read_to_string(&path).expect("a file");
        let ends: Vec<_> =
            text.lines().map(|line| line.rsplit(',').next().unwrap_or_default()).collect();
        assert_eq!(ends[1..4], ["done", "done", "unanswered"], "{text}");
        let addresses: Vec<_> =
            text.lines().skip(1).take(3).map(|line| line.split(',').nth(2)).collect();
        assert_eq!(addresses, [Some("0"), Some("1"), Some("0")], "{text}");
    }

    #[test]
    fn a_full_disk_is_counted_and_the_rest_goes_on() {
        struct LimitedWriter(usize);
        impl Write for LimitedWriter {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                if self.0 == 0 {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                self.0 -= 1;
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut lines = Lines::new(LimitedWriter(2), PathBuf::from("requests.csv"));
        for number in 0..5 {
            let (operation, flags) = (Operation::Read, Flags::default());
            lines.take(Event::Request(RequestFacts {
                at_ns: 0,
                operation,
                address: number,
                length: 1,
                flags,
            }));
            lines.take(Event::Answer(number, 1, "done"));
        }
        assert!(lines.failed);
        assert_eq!(lines.unwritten, 3);
    }

    #[test]
    fn a_recorded_device_keeps_the_contract() {
        let folder = folder();
        let path = folder.path().join("requests.csv");
        conformance::all(&|| {
            Arc::new(
                RecordedDevice::start(Arc::new(MemoryDevice::new(16 << 20)), &path)
                    .expect("a file"),
            )
        });
    }
}
