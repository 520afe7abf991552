//! Plays a trace through the engine's forecast. The file is read twice: first to see how far its
//! disks reach.
//!
//! Invariant: both passes read and widen requests in the same way, so that the layout from the
//! first has a place for each request of the second.
//!
//! Not here: what a request causes (`sawmill_volume::forecast`), the layout of the disks
//! (`survey`), reading a trace (`crate::trace`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use sawmill_volume::forecast::{Forecast, ForecastOptions, Report};
use sawmill_volume::gc::policy::GcPolicy;

use super::survey::{Layout, Survey};
use crate::trace::{Format, Operation, ReadOptions, Request, Trace};
use sawmill_console::exit::{Failure, Result};
use sawmill_console::output::Progress;

/// The smallest unit that a page cache writes.
const PAGE_BYTES: u64 = 4096;

/// How to read and play traces.
pub(super) struct PlayOptions {
    pub(super) read: ReadOptions,
    pub(super) size_bytes: Option<u64>,
    /// None: as the format requires.
    pub(super) widen_bytes: Option<u64>,
    pub(super) repeat: u32,
    pub(super) segment_bytes: u32,
    pub(super) segment_age_max: Duration,
    pub(super) gc: Option<GcPolicy>,
    pub(super) plugs: bool,
}

/// The result of one trace.
pub(super) struct TraceResult {
    pub(super) path: PathBuf,
    pub(super) format: Format,
    pub(super) bad_lines: u64,
    pub(super) survey: Survey,
    pub(super) size_bytes: u64,
    pub(super) rounds: u32,
    /// The sum of all rounds.
    pub(super) span: Duration,
    pub(super) report: Report,
}

pub(super) fn play(path: &Path, options: &PlayOptions) -> Result<TraceResult> {
    let widen_bytes = |format: Format| {
        options.widen_bytes.unwrap_or(if format.is_of_files() { PAGE_BYTES } else { 1 }).max(1)
    };
    let mut trace = Trace::open(path, options.read)?;
    let (format, widen) = (trace.format(), widen_bytes(trace.format()));
    // A first reading for the size of the disk and the place of each device, which the forecast
    // needs before its first request.
    let mut survey = Survey::default();
    let mut progress = Progress::new("reading byte");
    while let Some(request) = trace.next()? {
        survey.observe(&widened(&request, widen).ok_or_else(|| too_far(path))?);
        if survey.requests.is_multiple_of(4096) {
            let (done, total) = trace.progress();
            progress.show(done, total);
        }
    }
    drop(progress);
    survey.close_minute();
    let bad_lines = trace.bad_lines();
    if survey.requests == 0 {
        let name = format.name();
        return Err(Failure::usage(format!("{} has no requests (format {name})", path.display())));
    }
    let layout = survey.lay_out(options.size_bytes).map_err(|failure| failure.of_file(path))?;
    let size_bytes = layout.size_bytes;
    let mut forecast = Forecast::new(ForecastOptions {
        segment_bytes: options.segment_bytes,
        segment_age_max: options.segment_age_max,
        gc: options.gc,
        plugs: options.plugs,
        ..ForecastOptions::new(size_bytes)
    })?;
    let mut progress = Progress::new("simulating request");
    let (mut done, total) = (0, survey.requests * u64::from(options.repeat));
    let mut start = Duration::ZERO;
    for _ in 0..options.repeat {
        let mut trace = Trace::open(path, ReadOptions { format: Some(format), ..options.read })?;
        while let Some(request) = trace.next()? {
            let request = widened(&request, widen).ok_or_else(|| too_far(path))?;
            play_one(&mut forecast, &layout, &request, start)?;
            done += 1;
            progress.show(done, total);
        }
        // The next round begins where this one ends, so that ages and rates stay those of the
        // trace.
        start += Duration::from_nanos(survey.span_ns);
    }
    let report = forecast.finish()?;
    Ok(TraceResult {
        path: path.to_owned(),
        format,
        bad_lines,
        survey,
        size_bytes,
        rounds: options.repeat,
        span: start,
        report,
    })
}

fn too_far(path: &Path) -> Failure {
    Failure::usage(format!("{}: a request reaches past the last address", path.display()))
}

/// The request, widened to whole multiples of `unit` bytes.
fn widened(request: &Request, unit: u64) -> Option<Request> {
    let end = request.address.checked_add(request.length)?.checked_next_multiple_of(unit)?;
    let address = request.address - request.address % unit;
    // Widening would turn a flush into a request with bytes.
    Some(if request.length == 0 {
        *request
    } else {
        Request { address, length: end - address, ..*request }
    })
}

fn play_one(
    forecast: &mut Forecast,
    layout: &Layout,
    request: &Request,
    start: Duration,
) -> Result<()> {
    let at = start + Duration::from_nanos(request.at_ns);
    layout.each(request, |address, length| {
        match request.operation {
            Operation::Read => forecast.read(address, length, at),
            Operation::Write => forecast.write(address, length, at),
            Operation::Discard => forecast.discard(address, length, at),
            Operation::Zero => forecast.zero(address, length, at),
            // A flush costs nothing in the store: it concerns the local journal.
            Operation::Flush => Ok(()),
        }
        .map_err(Failure::from)
    })
}
