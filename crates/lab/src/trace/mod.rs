//! Block traces: recorded requests of disks, read from files of other tools.
//!
//! [`Trace::open`] detects how the file is compressed and which [`Format`] it has, and then returns
//! one [`Request`] at a time, in the order of the file. Modules: `source` (the file, decompressed),
//! `detect` (the format), `lines` (formats of one line per request), `csv` (our own, documented in
//! `docs/guide/simulate.md`), `records` (binary formats), `octf` and `mobigen` (formats that must
//! be sorted first, and so are read into memory), `number` (number formats).
//!
//! Invariants: times start at zero and never go back (traces of several queues are slightly out of
//! order). Addresses and lengths are in bytes, and their sum fits 63 bits. Only a flush has no
//! length. A line that is not a request is an error that names the line, or is counted if the
//! caller requests that.
//!
//! Not here: what is done with the requests.

mod csv;
mod detect;
mod lines;
mod mobigen;
mod number;
mod octf;
mod records;
mod source;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use sawmill_console::exit::{Failure, Result};
use source::TraceSource;

/// The longest read or write of a disk. A longer one is damage, and would take memory for each of
/// its parts.
const REQUEST_BYTES_MAX: u64 = 1 << 30;
/// A longer pause between two requests is an invalid time: it would turn a trace of minutes into
/// one of years.
const PAUSE_NS_MAX: u64 = 90 * 24 * 3600 * 1_000_000_000;
/// Larger addresses and lengths exist on no disk.
const END_BYTES_MAX: u64 = i64::MAX as u64;
/// How much of a bad line an error shows.
const SHOWN_CHARS_MAX: usize = 60;

/// An operation of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    /// Zeroes without a payload: write-zeroes.
    Zero,
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Since the first request of the trace.
    pub(crate) at_ns: u64,
    pub(crate) operation: Operation,
    /// The disk or file of the trace. Numbers only distinguish them.
    pub(crate) device: u64,
    /// The first byte, counted from the start of the device.
    pub(crate) address: u64,
    /// Bytes; zero for a flush alone.
    pub(crate) length: u64,
}

/// The format of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Sawmill's own: a header line names the columns; see docs/guide/simulate.md
    Csv,
    /// Text of blkparse; dispatched requests (D), else queued (Q), else completed (C) ones
    Blkparse,
    /// blkreplay: SECONDS ; SECTOR ; SECTORS ; operation as in blkparse (R, WS, RAM, FF) ; ...
    Blkreplay,
    /// MSR Cambridge: FILETIME,HOST,DISK,Read or Write,OFFSET,BYTES,RESPONSE
    Msr,
    /// SYSTOR '17: TIMESTAMP,RESPONSE,R or W,LUN,OFFSET,BYTES
    Systor,
    /// Tencent CBS: SECONDS,SECTOR,SECTORS,0 (read) or 1 (write),VOLUME
    Tencent,
    /// FIU: NANOSECONDS PID PROCESS SECTOR SECTORS W or R MAJOR MINOR MD5
    Fiu,
    /// DiskSim ASCII: NANOSECONDS DEVICE SECTOR SECTORS 1 (read) or 0 (write)
    AsciiNs,
    /// DiskSim ASCII: MILLISECONDS DEVICE SECTOR SECTORS 1 (read) or 0 (write)
    AsciiMs,
    /// DiskSim ASCII: MILLISECONDS DEVICE OFFSET BYTES 1 (read) or 0 (write)
    AsciiMsBytes,
    /// wiscsee: PID D or C read, write or discard OFFSET BYTES SECONDS ...; D is used
    Wiscsee,
    /// VMware vscsi traces, 32-byte records, as from CloudPhysics
    Vscsi,
    /// HP Labs SRT 1.3, binary
    Srt,
    /// Open CAS telemetry: a tar of octf.trace.N
    Octf,
    /// MobiGen: THREAD MICROSECONDS CALL ARGUMENTS, the file accesses of a program
    Mobigen,
}

impl Format {
    /// Its name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Whether requests are calls on files, above any page cache.
    pub(crate) fn is_of_files(self) -> bool {
        self == Format::Mobigen
    }
}

/// How to read a trace, as options of a command.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct ReadOptions {
    /// Format of the trace. Default: detected by content.
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<Format>,

    /// Count lines that are not requests instead of stopping at the first.
    #[arg(long)]
    pub(crate) skip_bad_lines: bool,
}

/// A source of requests with times as in the file.
trait Requests {
    /// The next request. An error is about one line or record; the next call continues after it.
    fn next(&mut self, source: &mut TraceSource) -> Result<Option<Request>, TraceError>;

    /// Where the last request stands in the file. A reader that sorts knows it better than the
    /// source, which it has read to the end.
    fn place(&self, source: &TraceSource) -> String;
}

/// Why there is no request.
enum TraceError {
    /// One line or record is wrong: where, what was expected, what was found.
    Line { place: String, expected: String, found: String },
    /// Nothing more can be read.
    File(Failure),
}

impl From<Failure> for TraceError {
    fn from(failure: Failure) -> Self {
        TraceError::File(failure)
    }
}

/// An open trace: its format is known, its requests come one by one.
pub(crate) struct Trace {
    path: PathBuf,
    source: TraceSource,
    requests: Box<dyn Requests>,
    format: Format,
    skip_bad_lines: bool,
    bad_lines: u64,
    /// The time of the first request, and of the last one, as the file has it.
    first_ns: Option<u64>,
    last_ns: u64,
}

impl Trace {
    /// Opens a file and detects its format.
    pub(crate) fn open(path: &Path, options: ReadOptions) -> Result<Trace> {
        let mut source = TraceSource::open(path)?;
        let format = match options.format {
            Some(format) => format,
            None => detect::format_of(path, source.sample()?)?,
        };
        let requests: Box<dyn Requests> = match format {
            Format::Vscsi => Box::new(records::Vscsi),
            Format::Srt => Box::new(records::Srt::default()),
            Format::Octf => Box::new(octf::Octf::default()),
            Format::Mobigen => Box::new(mobigen::Mobigen::new(options.skip_bad_lines)),
            Format::Csv => Box::new(csv::Csv::default()),
            _ => Box::new(lines::Lines::new(format, source.sample()?)),
        };
        Ok(Trace {
            path: path.to_owned(),
            source,
            requests,
            format,
            skip_bad_lines: options.skip_bad_lines,
            bad_lines: 0,
            first_ns: None,
            last_ns: 0,
        })
    }

    /// The format of the file.
    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// The number of skipped lines or records that are not requests.
    pub(crate) fn bad_lines(&self) -> u64 {
        self.bad_lines
    }

    /// How far the file was read, and its length, both as stored on the disk.
    pub(crate) fn progress(&mut self) -> (u64, u64) {
        self.source.progress()
    }

    /// The next request; none at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Request>> {
        loop {
            let request = match self.requests.next(&mut self.source) {
                Ok(Some(request)) => request,
                Ok(None) => return Ok(None),
                Err(TraceError::File(failure)) => return Err(failure),
                Err(TraceError::Line { place, expected, found }) => {
                    self.bad_line(&place, &expected, &found)?;
                    continue;
                }
            };
            // It moves nothing, and a disk would refuse it.
            if request.length == 0 && request.operation != Operation::Flush {
                continue;
            }
            // Before the time is noted: a damaged one must not move all that follow.
            if let Some(wrong) = self.what_is_wrong(&request) {
                let place = self.requests.place(&self.source);
                self.bad_line(&place, wrong, &format!("{request:?}"))?;
                continue;
            }
            let first = *self.first_ns.get_or_insert(request.at_ns);
            // Events of different CPUs may be slightly out of order in the file. The time of a
            // replay must not go back.
            self.last_ns = self.last_ns.max(request.at_ns);
            return Ok(Some(Request { at_ns: self.last_ns - first, ..request }));
        }
    }

    fn what_is_wrong(&self, request: &Request) -> Option<&'static str> {
        let end = request.address.checked_add(request.length);
        if end.is_none_or(|end| end > END_BYTES_MAX) {
            return Some("an address and a length within 8 EiB");
        }
        let moves_data = matches!(request.operation, Operation::Read | Operation::Write);
        if moves_data && request.length > REQUEST_BYTES_MAX {
            return Some("a read or write of at most 1 GiB");
        }
        let paused =
            self.first_ns.is_some() && request.at_ns > self.last_ns.saturating_add(PAUSE_NS_MAX);
        paused.then_some("a time within 90 days of the request before")
    }

    fn bad_line(&mut self, place: &str, expected: &str, found: &str) -> Result<()> {
        self.bad_lines += 1;
        if self.skip_bad_lines {
            return Ok(());
        }
        // A foreign file must not write control characters to a terminal.
        let printable =
            found.chars().map(|character| if character.is_control() { '?' } else { character });
        let mut excerpt: String = printable.take(SHOWN_CHARS_MAX).collect();
        if found.chars().count() > SHOWN_CHARS_MAX {
            excerpt.push_str("...");
        }
        Err(Failure::usage(format!(
            "{}: {place}: expected {expected} (format {}), found '{excerpt}'; fix it, name another \
             --format, or count such lines with --skip-bad-lines",
            self.path.display(),
            self.format.name(),
        )))
    }
}
