//! `sawmill bench replay`: replays a block trace on a served disk and verifies every read.
//!
//! The trace is read twice: once to find how large a disk it needs, once to replay it. A trace does
//! not contain the written data, so the replay makes up bytes that identify the write they belong
//! to.
//!
//! Invariant: `content` is asked and changed between `wait_for` and `send` of a request, when
//! nothing that conflicts with the request is in flight. Only then is its answer what a read must
//! find.
//!
//! Not here: what is in flight (`flight`), the bytes (`content`), the formats of traces (`trace`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use sawmill_nbd_client::{Client, Style, flag};
use serde::Serialize;

use super::content::Content;
use super::flight::{CompletionCounts, Flight, Flights, OPERATIONS};
use crate::trace::{Operation, ReadOptions, Request, Trace};
use sawmill_console::Console;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output::{self, Bar};
use sawmill_console::units::{human_count, human_duration, human_size};

/// The longest request sent; longer requests of a trace are sent in pieces.
const PIECE_BYTES_MAX: u64 = 1 << 20;
/// Requests in flight, unless the user chooses: enough to keep a disk and the way to it busy.
const DEPTH_DEFAULT: u32 = 32;
/// Each disk of a trace starts at a multiple of this.
const DEVICE_BYTES: u64 = 1 << 20;

/// Replay a block trace on a served disk, and verify every read.
///
/// All data on the disk is lost. The disks or files of the trace are placed one after the other. A
/// request that overlaps one in flight waits for it, so that the right result of each read is
/// known. At the end, everything written is read back. Exit code 9: a byte is wrong; the error
/// names its address.
#[derive(Args)]
pub(super) struct Arguments {
    /// A block trace, compressed or not. Its format is detected by content.
    #[arg(value_name = "TRACE")]
    trace: PathBuf,

    /// The disk: an NBD export, as `serve` prints it.
    #[arg(long, value_name = "URI")]
    nbd: String,

    /// Replay speed: 1 as recorded, 10 ten times as fast, 0 as fast as possible.
    #[arg(long, value_name = "FACTOR", value_parser = parse_speed, default_value = "0")]
    speed: f64,

    /// Requests in flight, at most.
    #[arg(long, value_name = "N", default_value_t = DEPTH_DEFAULT,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    depth: u32,

    /// Stop after this many requests of the trace.
    #[arg(long, value_name = "N")]
    requests: Option<u64>,

    #[command(flatten)]
    read: ReadOptions,
}

fn parse_speed(text: &str) -> Result<f64, String> {
    let speed = text.parse().ok().filter(|speed: &f64| speed.is_finite() && *speed >= 0.0);
    speed.ok_or_else(|| {
        format!("'{text}' is not a speed; write 1 (as recorded), 10, 0.5, or 0 (no waiting)")
    })
}

/// Times of one kind of request.
#[derive(Serialize)]
struct Kind {
    /// In small letters, as the trace formats have it.
    operation: String,
    requests: u64,
    bytes: u64,
    /// Half of the requests were answered within this time.
    p50_us: u64,
    p99_us: u64,
    p999_us: u64,
    #[serde(rename = "max_us")]
    us_max: u64,
}

/// What `--json` prints; its names are an interface, so they stay.
#[derive(Serialize)]
struct Document {
    trace: String,
    /// Detected by content, so that a wrong guess can be seen.
    format: String,
    /// The trace has calls on files, above a page cache.
    of_files: bool,
    bad_lines: u64,
    /// The size that the trace needs; the disk may be larger.
    disk_bytes: u64,
    /// From the first request to the last answer, without the reading back.
    seconds: f64,
    requests: u64,
    requests_per_second: f64,
    kinds: Vec<Kind>,
    /// Bytes read that were what this replay had written.
    verified_bytes: u64,
    /// Bytes read that this replay had not written.
    unknown_bytes: u64,
    /// Bytes read back at the end, all of them verified.
    read_back_bytes: u64,
    /// Requests that waited for a request that they overlap.
    waited_for_overlaps: u64,
    /// Requests that the disk does not support; they were left out.
    left_out: u64,
    /// How far the replay fell behind the trace's times at worst; null at full speed.
    behind_ms_max: Option<u64>,
}

/// The size of the disk that a trace needs, and the start of each of its disks.
struct Layout {
    /// By the trace's number of a disk, where it starts on the disk served.
    bases: BTreeMap<u64, u64>,
    size_bytes: u64,
    /// Bytes of all requests, by which progress is shown.
    bytes: u64,
}

struct Replay<'a> {
    arguments: &'a Arguments,
    client: &'a Client,
    flights: Flights<'a>,
    content: Content,
    left_out: u64,
    behind: Duration,
}

pub(super) fn run(console: &Console, arguments: &Arguments) -> Result<Exit> {
    let client = connect(&arguments.nbd)?;
    let layout = Layout::of(arguments)?;
    let size_bytes = client.export().size_bytes;
    if layout.size_bytes > size_bytes {
        let text = format!(
            "the trace needs a disk of {} bytes, and {} has {size_bytes}: make a larger one \
             (`sawmill create --size {0}`; an empty disk takes no space)",
            layout.size_bytes, arguments.nbd
        );
        return Err(Failure::new(Exit::Refused, text));
    }
    let seed =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos()
            as u64;
    let flights = Flights::new(&client, arguments.depth as usize, seed);
    let content = Content::new(seed);
    let mut replay = Replay {
        arguments,
        client: &client,
        flights,
        content,
        left_out: 0,
        behind: Duration::ZERO,
    };
    let mut bar = Bar::new(format!("replaying {}", arguments.trace.display()));
    let mut trace = open(arguments)?;
    let began = Instant::now();
    replay.carry_out(&mut trace, &layout, &mut bar)?;
    let done = replay.flights.land()?;
    // Before the reading back, which is not part of the trace.
    let took = began.elapsed();
    let read_back_bytes = replay.read_back()?;
    bar.end()?;
    let document = replay.document(&trace, &layout, &done, took, read_back_bytes);
    if console.json {
        output::json(&document)?
    } else {
        print(&document)?
    }
    Ok(Exit::Ok)
}

fn connect(uri: &str) -> Result<Client> {
    let client = Client::connect(uri, Style::Structured);
    let client = client.map_err(|error| {
        Failure::new(Exit::Unavailable, format!("cannot use {uri}: {error}")).caused_by(error)
    })?;
    if client.export().flags & flag::READ_ONLY != 0 {
        return Err(Failure::new(
            Exit::Refused,
            format!("{uri} is read-only, and a replay writes"),
        ));
    }
    Ok(client)
}

fn open(arguments: &Arguments) -> Result<Trace> {
    Trace::open(&arguments.trace, arguments.read)
}

/// Calls `action` for the requests of a trace, as many as the user wants.
fn for_each_request(
    trace: &mut Trace,
    arguments: &Arguments,
    mut action: impl FnMut(&mut Trace, Request) -> Result<()>,
) -> Result<()> {
    let mut requests_left = arguments.requests.unwrap_or(u64::MAX);
    while requests_left > 0
        && let Some(request) = trace.next()?
    {
        requests_left -= 1;
        action(trace, request)?;
    }
    Ok(())
}

impl Layout {
    fn of(arguments: &Arguments) -> Result<Layout> {
        let mut ends: BTreeMap<u64, u64> = BTreeMap::new();
        let mut bytes = 0;
        let mut bar = Bar::new(format!("reading {}", arguments.trace.display()));
        for_each_request(&mut open(arguments)?, arguments, |trace, request| {
            let (read, whole) = trace.progress();
            bar.show(read, whole);
            let end = ends.entry(request.device).or_default();
            *end = (*end).max(request.address + request.length);
            bytes += request.length;
            Ok(())
        })?;
        bar.end()?;
        let mut bases = BTreeMap::new();
        let mut size_bytes = 0_u64;
        for (device, end) in ends {
            bases.insert(device, size_bytes);
            let rounded = end.checked_next_multiple_of(DEVICE_BYTES);
            size_bytes = rounded.and_then(|end| size_bytes.checked_add(end)).ok_or_else(|| {
                Failure::usage(format!("{} reaches beyond all disks", arguments.trace.display()))
            })?;
        }
        Ok(Layout { bases, size_bytes, bytes })
    }
}

impl Replay<'_> {
    fn carry_out(&mut self, trace: &mut Trace, layout: &Layout, bar: &mut Bar) -> Result<()> {
        let (arguments, began) = (self.arguments, Instant::now());
        let mut done_bytes = 0;
        for_each_request(trace, arguments, |_, request| {
            self.wait_until_due(began, request.at_ns);
            let base = layout.bases.get(&request.device).copied().unwrap_or_default();
            let request = Request { address: base + request.address, ..request };
            let mut done = 0;
            loop {
                let length = PIECE_BYTES_MAX.min(request.length - done);
                // At least one round, because a flush has no bytes.
                self.send(request.operation, request.address + done, length)?;
                done += length;
                if done == request.length {
                    break;
                }
            }
            done_bytes += request.length;
            bar.show(done_bytes, layout.bytes);
            Ok(())
        })
    }

    fn wait_until_due(&mut self, began: Instant, at_ns: u64) {
        if self.arguments.speed > 0.0 {
            let due = Duration::from_nanos((at_ns as f64 / self.arguments.speed) as u64);
            let now = began.elapsed();
            std::thread::sleep(due.saturating_sub(now));
            self.behind = self.behind.max(now.saturating_sub(due));
        }
    }

    fn send(&mut self, operation: Operation, address: u64, length: u64) -> Result<()> {
        let needed = match operation {
            Operation::Flush => flag::SEND_FLUSH,
            Operation::Discard => flag::SEND_TRIM,
            Operation::Zero => flag::SEND_WRITE_ZEROES,
            Operation::Read | Operation::Write => 0,
        };
        // Left out and counted: a server that did not offer the command would close the connection
        // or answer with an error, and neither says anything about its data.
        if self.client.export().flags & needed != needed {
            self.left_out += 1;
            return Ok(());
        }
        self.flights.wait_for(operation, address, length)?;
        let mut flight =
            Flight { operation, address, length, bytes: Vec::new(), writes: Vec::new() };
        match operation {
            Operation::Read => flight.writes = self.content.known_writes(address, length),
            Operation::Write => flight.bytes = self.content.write(address, length),
            Operation::Zero => self.content.zero(address, length),
            Operation::Discard => self.content.discard(address, length),
            Operation::Flush => {}
        }
        self.flights.send(flight);
        Ok(())
    }

    /// Reads everything that was written. Returns the number of bytes.
    fn read_back(&mut self) -> Result<u64> {
        for stretch in self.content.all() {
            let mut done = 0;
            while done < stretch.length {
                let length = PIECE_BYTES_MAX.min(stretch.length - done);
                self.send(Operation::Read, stretch.address + done, length)?;
                done += length;
            }
        }
        self.flights.land().map(|done| done.verified_bytes)
    }

    fn document(
        &self,
        trace: &Trace,
        layout: &Layout,
        done: &CompletionCounts,
        took: Duration,
        read_back_bytes: u64,
    ) -> Document {
        let requests: u64 = done.times_ns.iter().map(|times| times.len() as u64).sum();
        let seconds = took.as_secs_f64();
        let kinds = OPERATIONS.iter().zip(&done.times_ns).zip(done.bytes);
        Document {
            trace: text_of(&self.arguments.trace),
            format: trace.format().name(),
            of_files: trace.format().is_of_files(),
            bad_lines: trace.bad_lines(),
            disk_bytes: layout.size_bytes,
            seconds,
            requests,
            requests_per_second: requests as f64 / seconds.max(1e-9),
            kinds: kinds
                .filter_map(|((operation, times), bytes)| kind(*operation, times, bytes))
                .collect(),
            verified_bytes: done.verified_bytes,
            unknown_bytes: done.unknown_bytes,
            read_back_bytes,
            waited_for_overlaps: done.overlaps,
            left_out: self.left_out,
            behind_ms_max: (self.arguments.speed > 0.0).then_some(self.behind.as_millis() as u64),
        }
    }
}

fn text_of(path: &Path) -> String {
    path.display().to_string()
}

fn kind(operation: Operation, times_ns: &[u64], bytes: u64) -> Option<Kind> {
    let mut sorted = times_ns.to_vec();
    sorted.sort_unstable();
    let us_max = sorted.last()? / 1000;
    let at = |share: f64| sorted[((sorted.len() - 1) as f64 * share) as usize] / 1000;
    let requests = sorted.len() as u64;
    let operation = format!("{operation:?}").to_lowercase();
    Some(Kind {
        operation,
        requests,
        bytes,
        p50_us: at(0.5),
        p99_us: at(0.99),
        p999_us: at(0.999),
        us_max,
    })
}

fn print(document: &Document) -> Result<()> {
    let time = |us: u64| human_duration(Duration::from_micros(us));
    let row = |kind: &Kind| {
        let times = [kind.p50_us, kind.p99_us, kind.p999_us, kind.us_max].map(time);
        let counts = [kind.operation.clone(), human_count(kind.requests), human_size(kind.bytes)];
        counts.into_iter().chain(times).collect()
    };
    let header = ["", "requests", "bytes", "median", "99 %", "99.9 %", "longest"];
    output::table(&header, document.kinds.iter().map(row).collect())?;
    let behind = document.behind_ms_max.map(|ms| {
        let worst = human_duration(Duration::from_millis(ms));
        format!("; at worst {worst} behind the trace")
    });
    output::line(&format!(
        "{} requests in {}, {:.0} a second{}",
        human_count(document.requests),
        human_duration(Duration::from_secs_f64(document.seconds)),
        document.requests_per_second,
        behind.unwrap_or_default(),
    ))?;
    output::line(&format!(
        "verified: {} read during the replay and {} read back at the end; {} read had never been \
         written here",
        human_size(document.verified_bytes),
        human_size(document.read_back_bytes),
        human_size(document.unknown_bytes),
    ))
}
