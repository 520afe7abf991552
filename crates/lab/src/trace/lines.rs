//! Formats of one line per request. A line is a request, known to be something else (a header,
//! another kind of event), or invalid.
//!
//! Invariant: blkparse shows several events for each request, and only one kind of event counts, so
//! no request counts twice.
//!
//! Not here: `csv` and `mobigen`, which have lines too; whether a time or an address is plausible
//! (`super`).

use super::number::{nanoseconds, sectors, whole};
use super::source::TraceSource;
use super::{Format, Operation, Request, Requests, TraceError};
use sawmill_console::exit::Result;

/// The content of a line; the error only means that it is invalid.
pub(super) type LineContent = Result<Option<Request>, ()>;

/// The events of a blkparse text that count: each request occurs several times.
const ACTIONS: [&str; 3] = ["D", "Q", "C"];

/// The requests of a text in one format, a line each.
pub(super) struct Lines {
    reader: LineReader,
    line: Vec<u8>,
}

impl Lines {
    /// `sample` as in [`LineReader::new`].
    pub(super) fn new(format: Format, sample: &[u8]) -> Self {
        let text = String::from_utf8_lossy(sample);
        Lines { reader: LineReader::new(format, &text), line: Vec::new() }
    }
}

impl Requests for Lines {
    fn next(&mut self, source: &mut TraceSource) -> Result<Option<Request>, TraceError> {
        while source.line(&mut self.line)? {
            let text = String::from_utf8_lossy(&self.line);
            match self.reader.read(&text) {
                Ok(Some(request)) => return Ok(Some(request)),
                Ok(None) => {}
                Err(()) => {
                    let expected = self.reader.expected().to_owned();
                    return Err(TraceError::Line {
                        place: source.place(),
                        expected,
                        found: text.into_owned(),
                    });
                }
            }
        }
        Ok(None)
    }

    fn place(&self, source: &TraceSource) -> String {
        source.place()
    }
}

/// The first kind of action in [`ACTIONS`] that occurs.
fn action_in(sample: &str) -> &'static str {
    let occurs = |action: &&&str| {
        sample.lines().any(|line| line.split_whitespace().nth(5) == Some(**action))
    };
    // One kind alone: a request is queued, dispatched and completed, and would count three times.
    ACTIONS.iter().find(occurs).copied().unwrap_or(ACTIONS[0])
}

/// Reads the lines of one format.
pub(super) struct LineReader {
    format: Format,
    action: &'static str,
    requests: u64,
    lines: u64,
    in_summary: bool,
}

impl LineReader {
    /// `sample`, the first lines, determines which of blkparse's events are used.
    pub(super) fn new(format: Format, sample: &str) -> Self {
        let action = if format == Format::Blkparse { action_in(sample) } else { ACTIONS[0] };
        LineReader { format, action, requests: 0, lines: 0, in_summary: false }
    }

    /// The form of a line.
    pub(super) fn expected(&self) -> &'static str {
        match self.format {
            Format::Blkparse => {
                "'MAJOR,MINOR CPU SEQUENCE SECONDS PID ACTION RWBS SECTOR + SECTORS [PROCESS]'"
            }
            Format::Blkreplay => "'SECONDS ; SECTOR ; SECTORS ; RWBS'",
            Format::Msr => "'FILETIME,HOST,DISK,Read|Write,OFFSET,BYTES,RESPONSE'",
            Format::Systor => "'TIMESTAMP,RESPONSE,R|W,LUN,OFFSET,BYTES'",
            Format::Tencent => "'SECONDS,SECTOR,SECTORS,0|1,VOLUME'",
            Format::Fiu => "'NANOSECONDS PID PROCESS SECTOR SECTORS W|R MAJOR MINOR MD5'",
            Format::AsciiNs => "'NANOSECONDS DEVICE SECTOR SECTORS 0|1'",
            Format::AsciiMs => "'MILLISECONDS DEVICE SECTOR SECTORS 0|1'",
            Format::AsciiMsBytes => "'MILLISECONDS DEVICE OFFSET BYTES 0|1'",
            Format::Wiscsee => "'PID D|C read|write|discard OFFSET BYTES SECONDS DURATION SYNC'",
            Format::Csv | Format::Vscsi | Format::Srt | Format::Octf | Format::Mobigen => {
                "another format"
            }
        }
    }

    pub(super) fn read(&mut self, text: &str) -> LineContent {
        self.lines += 1;
        if text.trim().is_empty() || text.starts_with('#') {
            return Ok(None);
        }
        let line = match self.format {
            Format::Blkparse => self.blkparse(text),
            Format::Blkreplay => self.blkreplay(text),
            Format::Msr => msr(text).map(Some).ok_or(()),
            Format::Systor => self.systor(text),
            Format::Tencent => tencent(text).map(Some).ok_or(()),
            Format::Fiu => fiu(text).map(Some).ok_or(()),
            Format::AsciiNs => ascii(text, 0, sectors).map(Some).ok_or(()),
            Format::AsciiMs => ascii(text, 6, sectors).map(Some).ok_or(()),
            Format::AsciiMsBytes => ascii(text, 6, whole).map(Some).ok_or(()),
            Format::Wiscsee => wiscsee(text).ok_or(()),
            Format::Csv | Format::Vscsi | Format::Srt | Format::Octf | Format::Mobigen => Err(()),
        };
        self.requests += u64::from(matches!(line, Ok(Some(_))));
        line
    }

    fn blkparse(&mut self, text: &str) -> LineContent {
        // The text ends with sums per CPU and in total.
        self.in_summary |= text.starts_with("CPU") || text.starts_with("Total (");
        if self.in_summary {
            return Ok(None);
        }
        let words: Vec<&str> = text.split_whitespace().collect();
        let [device, _, _, time, _, action, ..] = words[..] else { return Err(()) };
        let device = device_number(device.split_once(',')).ok_or(())?;
        let at_ns = nanoseconds(time, 9).ok_or(())?;
        // After the fields before it: a line that is damaged there is reported, whatever its
        // action.
        if action != self.action {
            return Ok(None);
        }
        let Some(flags) = words.get(6).copied().filter(|flags| are_flags(flags)) else {
            return Err(());
        };
        let [address, plus, length] = *words.get(7..10).unwrap_or_default() else {
            // A flush alone has no sectors.
            let flush =
                Request { at_ns, operation: Operation::Flush, device, address: 0, length: 0 };
            return if flags.starts_with('F') { Ok(Some(flush)) } else { Ok(None) };
        };
        if plus != "+" {
            return Ok(None);
        }
        let (Some(address), Some(length)) = (sectors(address), sectors(length)) else {
            return Err(());
        };
        let operation = operation_of(flags, length);
        let (address, length) =
            if operation == Operation::Flush { (0, 0) } else { (address, length) };
        Ok(Some(Request { at_ns, operation, device, address, length }))
    }

    fn blkreplay(&self, text: &str) -> LineContent {
        let mut fields = text.split(';').map(str::trim);
        let mut request = || {
            let at_ns = nanoseconds(fields.next()?, 9)?;
            let (address, length) = (fields.next()?, fields.next()?);
            let flags =
                fields.next().map(str::to_ascii_uppercase).filter(|flags| are_flags(flags))?;
            let flush =
                Request { at_ns, operation: Operation::Flush, device: 0, address: 0, length: 0 };
            // A flush alone has no address, whatever the text says.
            if !flags.contains(['R', 'W', 'D']) {
                return Some(flush);
            }
            let (address, length) = (sectors(address)?, sectors(length)?);
            match operation_of(&flags, length) {
                Operation::Flush => Some(flush),
                operation => Some(Request { operation, address, length, ..flush }),
            }
        };
        match request() {
            Some(request) => Ok(Some(request)),
            // A license and column names, in free text.
            None if self.requests == 0 => Ok(None),
            None => Err(()),
        }
    }

    fn systor(&self, text: &str) -> LineContent {
        let fields: Vec<&str> = text.split(',').collect();
        let [time, _, operation, device, address, length] = fields[..] else { return Err(()) };
        // The header; according to the format's page, an empty type is invalid data.
        if self.lines == 1 && time == "Timestamp" || operation.is_empty() {
            return Ok(None);
        }
        let request = || {
            let operation = letter(operation)?;
            let (device, address, length) = (whole(device)?, whole(address)?, whole(length)?);
            Some(Request { at_ns: nanoseconds(time, 9)?, operation, device, address, length })
        };
        request().map(Some).ok_or(())
    }
}

/// Whether this is the kernel's notation for operations (RWBS).
fn are_flags(flags: &str) -> bool {
    !flags.is_empty() && flags.bytes().all(|flag| b"RWDFNSAMBV".contains(&flag))
}

/// The operation of such flags. `F` before the operation asks for a flush first, `F` after it for
/// durability of the write itself (FUA). A write without data is only such a flush.
fn operation_of(flags: &str, length: u64) -> Operation {
    match flags {
        _ if flags.contains('D') => Operation::Discard,
        _ if flags.contains('W') && length == 0 => Operation::Flush,
        _ if flags.contains('W') => Operation::Write,
        _ if flags.contains('R') => Operation::Read,
        _ => Operation::Flush,
    }
}

fn letter(text: &str) -> Option<Operation> {
    match text.trim() {
        "R" | "r" => Some(Operation::Read),
        "W" | "w" => Some(Operation::Write),
        _ => None,
    }
}

fn device_number(pair: Option<(&str, &str)>) -> Option<u64> {
    let (major, minor) = pair?;
    let (major, minor) = (whole(major)?, whole(minor)?);
    (major < 1 << 32 && minor < 1 << 32).then_some(major << 32 | minor)
}

fn msr(text: &str) -> Option<Request> {
    let fields: Vec<&str> = text.trim().split(',').collect();
    let [time, _, device, operation, address, length, ..] = fields[..] else { return None };
    let operation = match operation.to_ascii_lowercase().as_str() {
        "read" => Operation::Read,
        "write" => Operation::Write,
        _ => return None,
    };
    // Windows counts in 100 ns.
    let at_ns = whole(time)?.checked_mul(100)?;
    let (device, address, length) = (whole(device)?, whole(address)?, whole(length)?);
    Some(Request { at_ns, operation, device, address, length })
}

fn tencent(text: &str) -> Option<Request> {
    let fields: Vec<&str> = text.split(',').collect();
    let [time, address, length, operation, device] = fields[..] else { return None };
    let operation = match operation {
        "0" => Operation::Read,
        "1" => Operation::Write,
        _ => return None,
    };
    let (address, length, device) = (sectors(address)?, sectors(length)?, whole(device)?);
    Some(Request { at_ns: nanoseconds(time, 9)?, operation, device, address, length })
}

fn fiu(text: &str) -> Option<Request> {
    let words: Vec<&str> = text.split_whitespace().collect();
    // The process name may contain spaces, so the fields after it are counted from the end.
    let [time, pid, _, .., _, _, _, _, _, _] = words[..] else { return None };
    let [address, length, operation, major, minor, digest] = *words.last_chunk()?;
    let (at_ns, _) = (whole(time)?, whole(pid)?);
    let digest_ok = digest.len() == 32 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
    let device = device_number(Some((major, minor)))?;
    let (address, length) = (sectors(address)?, sectors(length)?);
    digest_ok.then_some(Request { at_ns, operation: letter(operation)?, device, address, length })
}

/// `digits`: times are in units of `10^digits` ns. `bytes`: parses an address or a length.
fn ascii(text: &str, digits: u32, bytes: fn(&str) -> Option<u64>) -> Option<Request> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [time, device, address, length, flags] = words[..] else { return None };
    let operation = if whole(flags)? & 1 == 1 { Operation::Read } else { Operation::Write };
    let (device, address, length) = (whole(device)?, bytes(address)?, bytes(length)?);
    Some(Request { at_ns: nanoseconds(time, digits)?, operation, device, address, length })
}

/// None: invalid; `Some(None)`: a completion.
fn wiscsee(text: &str) -> Option<Option<Request>> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [_, action, operation, address, length, time, _, _] = words[..] else { return None };
    let operation = match operation {
        "read" => Operation::Read,
        "write" => Operation::Write,
        "discard" => Operation::Discard,
        _ => return None,
    };
    let (address, length, at_ns) = (whole(address)?, whole(length)?, nanoseconds(time, 9)?);
    match action {
        "D" => Some(Some(Request { at_ns, operation, device: 0, address, length })),
        "C" => Some(None),
        _ => None,
    }
}
