//! What `simulate` prints: JSON for programs, tables for people.
//!
//! Invariants: the tables are made from the JSON document, so they show nothing that it lacks.
//! Requests are counted over all rounds of `--repeat`, as the forecast counts what they cause.
//!
//! Not here: how the figures come about (`sawmill_volume::forecast`), what they cost (`prices`),
//! the samples as a picture (`chart`).

use serde::Serialize;

use sawmill_volume::forecast::Sample;
use sawmill_volume::gc::policy::Choice;

use super::play::{PlayOptions, TraceResult};
use super::prices::{Costs, Prices};
use sawmill_console::exit::Result;
use sawmill_console::output;
use sawmill_console::units::{human_count, human_duration, human_size};

/// A shorter trace is not representative of a month.
const SHORT_S: f64 = 1800.0;

/// What the forecast assumed: without it, two documents cannot be compared.
#[derive(Serialize)]
struct Parameters {
    /// The size at which writes become a segment.
    segment_bytes: u32,
    /// The age at which it becomes one even if it is small.
    segment_age_ms: u64,
    /// How often the trace was played, one round after the other.
    repeat: u32,
    /// `null` if the forecast collects no garbage.
    gc: Option<GcParameters>,
}

#[derive(Serialize)]
struct GcParameters {
    start: f64,
    stop: f64,
    choice: &'static str,
    plugs: bool,
}

/// Requests to the store over all rounds, by what a store bills.
#[derive(Serialize)]
struct RequestCounts {
    put: u64,
    put_segments: u64,
    put_checkpoints: u64,
    /// An upper bound, as if nothing were cached: how much a cache saves depends on its size.
    get_max: u64,
    get_moves_max: u64,
    get_reads_max: u64,
    list: u64,
    delete: u64,
}

/// The state of the volume at one point of the trace; the chart draws these.
#[derive(Serialize)]
struct SampleDocument {
    /// On the clock of the trace, from the first request on.
    at_s: f64,
    written_bytes: u64,
    write_amplification: f64,
    live_bytes: u64,
    store_bytes: u64,
    extents: u64,
    puts: u64,
}

impl From<&Sample> for SampleDocument {
    fn from(sample: &Sample) -> Self {
        let Sample {
            written_bytes,
            write_amplification,
            live_bytes,
            store_bytes,
            extents,
            puts,
            ..
        } = *sample;
        let at_s = sample.at.as_secs_f64();
        SampleDocument {
            at_s,
            written_bytes,
            write_amplification,
            live_bytes,
            store_bytes,
            extents,
            puts,
        }
    }
}

/// What one trace came to, all rounds together.
#[derive(Serialize)]
struct TraceDocument {
    /// The path as the user gave it.
    trace: String,
    format: String,
    requests: u64,
    /// Lines that were left out, with `--skip-bad-lines`.
    bad_lines: u64,
    disks: usize,
    size_bytes: u64,
    /// The time from the first request of a round to the last.
    span_s: f64,
    /// Of the busiest minute: what the disk must bear, where a mean hides it.
    busiest_requests_per_s: f64,
    busiest_bytes_per_s: f64,
    writes: u64,
    written_bytes: u64,
    /// Reads change nothing in the store, but decide what is fetched.
    reads: u64,
    read_bytes: u64,
    discards: u64,
    /// Data put, by the user and by garbage collection, to bytes written: below 1 where much is
    /// coalesced.
    write_amplification: f64,
    /// As LSVD counts it: 1, and what was copied for each byte written.
    gc_amplification: f64,
    /// What garbage collection adds to each byte of the segments that hold new writes.
    batch_amplification: f64,
    /// The part of what was written that coalescing kept from the store.
    merge_ratio: f64,
    batch_bytes: u64,
    batch_segments: u64,
    moved_bytes: u64,
    moved_segments: u64,
    /// Bytes of holes that moved segments filled, so that the map has fewer extents.
    plugged_bytes: u64,
    collections: u64,
    checkpoints: u64,
    put_bytes: u64,
    extents: u64,
    /// How scattered the disk is: the shorter, the larger is its map.
    extent_bytes_mean: u64,
    map_bytes: u64,
    segments: u64,
    live_bytes: u64,
    data_bytes: u64,
    store_bytes: u64,
    /// The most that the store held at any time, which a quota must allow.
    store_bytes_max: u64,
    store_requests: RequestCounts,
    /// The trace repeated for a month, in dollars.
    month: Costs,
    samples: Vec<SampleDocument>,
}

impl TraceDocument {
    fn new(prices: &Prices, result: &TraceResult) -> Self {
        let (report, survey) = (&result.report, &result.survey);
        let requests = &report.requests;
        let (span_s, rounds) = (result.span.as_secs_f64(), u64::from(result.rounds));
        TraceDocument {
            trace: result.path.display().to_string(),
            format: result.format.name(),
            // The survey has read the trace once; the report covers all rounds.
            requests: survey.requests * rounds,
            bad_lines: result.bad_lines,
            disks: survey.disks(),
            size_bytes: result.size_bytes,
            span_s,
            busiest_requests_per_s: survey.busiest.requests_per_s,
            busiest_bytes_per_s: survey.busiest.bytes_per_s,
            writes: survey.writes * rounds,
            written_bytes: report.written_bytes,
            reads: survey.reads * rounds,
            read_bytes: report.read_bytes,
            discards: report.discards,
            write_amplification: report.write_amplification(),
            gc_amplification: report.gc_amplification(),
            batch_amplification: report.data_amplification(),
            merge_ratio: report.merge_ratio(),
            batch_bytes: report.data_segment_bytes,
            batch_segments: report.data_segments,
            moved_bytes: report.moved_bytes,
            moved_segments: report.moved_segments,
            plugged_bytes: report.plugged_bytes,
            collections: report.collections,
            checkpoints: report.checkpoints,
            put_bytes: report.put_bytes,
            extents: report.extents,
            // A disk whose data was all discarded has no extents.
            extent_bytes_mean: report.live_bytes.checked_div(report.extents).unwrap_or(0),
            map_bytes: report.map_bytes,
            segments: report.segments,
            live_bytes: report.live_bytes,
            data_bytes: report.data_bytes,
            store_bytes: report.store_bytes,
            store_bytes_max: report.store_bytes_max,
            store_requests: RequestCounts {
                put: requests.put(),
                put_segments: requests.put_segments,
                put_checkpoints: requests.put_checkpoints,
                get_max: requests.get_max(),
                get_moves_max: requests.get_moves_max,
                get_reads_max: requests.get_reads_max,
                list: requests.list,
                delete: requests.delete,
            },
            month: Costs::of(prices, report, survey.busiest, result.size_bytes, span_s),
            samples: report.samples.iter().map(SampleDocument::from).collect(),
        }
    }
}

/// What `--json` prints; its names are an interface, so they stay.
#[derive(Serialize)]
pub(super) struct Document {
    parameters: Parameters,
    prices: Prices,
    traces: Vec<TraceDocument>,
}

impl Document {
    pub(super) fn new(options: &PlayOptions, prices: &Prices, results: &[TraceResult]) -> Self {
        let gc = options.gc.map(|policy| GcParameters {
            start: policy.start,
            stop: policy.stop,
            choice: match policy.choice {
                Choice::Greedy => "greedy",
                Choice::CostBenefit => "cost-benefit",
            },
            plugs: options.plugs,
        });
        Document {
            parameters: Parameters {
                segment_bytes: options.segment_bytes,
                segment_age_ms: u64::try_from(options.segment_age_max.as_millis())
                    .unwrap_or(u64::MAX),
                repeat: options.repeat,
                gc,
            },
            prices: prices.clone(),
            traces: results.iter().map(|played| TraceDocument::new(prices, played)).collect(),
        }
    }

    /// Prints one trace in full, or one row for each of several.
    pub(super) fn print(&self) -> Result<()> {
        match &self.traces[..] {
            [trace] => print_one(trace)?,
            traces => print_rows(traces)?,
        }
        let Prices { name, date, .. } = &self.prices;
        output::line(&format!("\nPrices: {name}, of {date}; GETs as if nothing were cached."))?;
        // The monthly figures multiply the trace. Of a short one they multiply the chance of a
        // minute, too.
        for trace in self.traces.iter().filter(|trace| trace.span_s < SHORT_S) {
            let span = human_duration(std::time::Duration::from_secs_f64(trace.span_s));
            let name = &trace.trace;
            output::line(&format!("{name} lasts {span}: too short to say much about a month."))?;
        }
        Ok(())
    }
}

fn dollars(amount: f64) -> String {
    format!("${amount:.2}")
}

fn print_one(trace: &TraceDocument) -> Result<()> {
    let span = human_duration(std::time::Duration::from_secs_f64(trace.span_s));
    let mut rows = vec![
        ("trace", trace.trace.clone()),
        ("format", format!("{}, {} requests in {span}", trace.format, human_count(trace.requests))),
    ];
    if trace.bad_lines > 0 {
        rows.push(("bad lines", format!("{} skipped", human_count(trace.bad_lines))));
    }
    let copied = format!("{} copied by garbage collection", human_size(trace.moved_bytes));
    let requests = &trace.store_requests;
    rows.extend([
        ("disk", human_size(trace.size_bytes)),
        (
            "written",
            format!("{} in {} writes", human_size(trace.written_bytes), human_count(trace.writes)),
        ),
        ("read", format!("{} in {} reads", human_size(trace.read_bytes), human_count(trace.reads))),
        ("merge ratio", format!("{:.3}", trace.merge_ratio)),
        ("write amplification", format!("{:.3}, {copied}", trace.write_amplification)),
        (
            "extents",
            format!(
                "{}, {} each; {} of memory",
                human_count(trace.extents),
                human_size(trace.extent_bytes_mean),
                human_size(trace.map_bytes)
            ),
        ),
        (
            "segments",
            format!(
                "{}; {} in the store, {} live",
                human_count(trace.segments),
                human_size(trace.store_bytes),
                human_size(trace.live_bytes)
            ),
        ),
        (
            "store requests",
            format!(
                "{} PUT, {} GET at most, {} LIST, {} DELETE",
                human_count(requests.put),
                human_count(requests.get_max),
                human_count(requests.list),
                human_count(requests.delete)
            ),
        ),
    ]);
    rows.extend(prices(trace));
    output::facts(&rows)
}

/// What the trace costs, compared with block storage.
fn prices(trace: &TraceDocument) -> [(&'static str, String); 3] {
    let month = &trace.month;
    [
        (
            "a month",
            format!(
                "{} at most: {} storage, {} PUT, {} GET, {} LIST and DELETE",
                dollars(month.total_max_usd),
                dollars(month.storage_usd),
                dollars(month.puts_usd),
                dollars(month.gets_max_usd),
                dollars(month.lists_usd + month.deletes_usd)
            ),
        ),
        ("with a full disk", format!("{} at most", dollars(month.full_total_max_usd))),
        (
            "block storage",
            format!(
                "{} for {}, {:.0} requests/s and {}/s",
                dollars(month.block_total_usd),
                human_size(trace.size_bytes),
                trace.busiest_requests_per_s,
                human_size(trace.busiest_bytes_per_s as u64)
            ),
        ),
    ]
}

fn print_rows(traces: &[TraceDocument]) -> Result<()> {
    let header = [
        "TRACE",
        "WRITTEN",
        "MERGED",
        "AMPLIFICATION",
        "EXTENTS",
        "MAP",
        "SEGMENTS",
        "LIVE",
        "PUTS",
        "$/MONTH",
        "BLOCK $/MONTH",
    ];
    let row = |trace: &TraceDocument| {
        let name = std::path::Path::new(&trace.trace).file_name();
        vec![
            name.map_or_else(|| trace.trace.clone(), |name| name.to_string_lossy().into_owned()),
            human_size(trace.written_bytes),
            format!("{:.3}", trace.merge_ratio),
            format!("{:.3}", trace.write_amplification),
            human_count(trace.extents),
            human_size(trace.map_bytes),
            human_count(trace.segments),
            human_size(trace.live_bytes),
            human_count(trace.store_requests.put),
            format!("{:.2}", trace.month.total_max_usd),
            format!("{:.2}", trace.month.block_total_usd),
        ]
    };
    output::table(&header, traces.iter().map(row).collect())
}
