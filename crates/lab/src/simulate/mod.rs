//! `sawmill simulate`: predicts what a volume would do under recorded requests, without any data.
//!
//! Modules: `survey` (a first pass over a trace), `play` (the trace through the engine's forecast),
//! `prices` (what it would cost), `document` (what is printed), `chart` (the course over time, as a
//! picture).
//!
//! Invariants: prices and the collection policy are checked before a trace is read. Chart, tables
//! and JSON show the same results.
//!
//! Not here: what a volume does with the requests (`sawmill_volume::forecast`), the formats of
//! traces (`crate::trace`), a trace on a disk that exists (`crate::bench`).

mod chart;
mod document;
mod play;
mod prices;
mod survey;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use sawmill_volume::forecast::ForecastOptions;
use sawmill_volume::gc::policy::{Choice, GcPolicy};

use crate::trace::ReadOptions;
use sawmill_console::Console;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::{
    exact_duration, exact_size, parse_duration, parse_size, parse_size_u32,
};

/// How often a trace is played, unless the user chooses.
const REPEATS_DEFAULT: u32 = 1;

/// Predict what recorded requests would do on a volume: amplification, map, store requests, dollars
/// per month.
///
/// Runs the requests of each TRACE through the engine's own segments, coalescing, map and garbage
/// collection, without data or a store. A trace may be compressed with gzip, zstd, xz or bzip2. The
/// formats, and what the figures include and omit: docs/guide/simulate.md.
#[derive(Args)]
pub struct Arguments {
    /// Files of recorded requests. Each is simulated by itself.
    #[arg(value_name = "TRACE", required = true, num_args = 1..)]
    traces: Vec<PathBuf>,

    #[command(flatten)]
    read: ReadOptions,

    /// Size of the disk. Default: as far as the trace reaches, in whole GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,

    /// Widen requests to multiples of this size, as a page cache does. Default: 4K for calls on
    /// files (mobigen); block traces stay as they are.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    widen: Option<u64>,

    /// Play each trace this many times in a row, to come closer to its steady state.
    #[arg(
        long, value_name = "N", default_value_t = REPEATS_DEFAULT,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    repeat: u32,

    /// Size at which a segment is sealed.
    #[arg(long, value_name = "SIZE", value_parser = parse_size_u32,
          default_value = exact_size(engine().segment_bytes.into()))]
    segment_bytes: u32,

    /// Seal a segment at this age, even if it is small; 0: never by age.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration,
          default_value = exact_duration(engine().segment_age_max))]
    segment_age: Duration,

    /// Collect garbage when less than this share of the stored data is live.
    #[arg(
        long, value_name = "RATIO", default_value_t = GcPolicy::default().start,
        value_parser = parse_ratio,
    )]
    gc_start: f64,

    /// Stop collecting when at least this share is live.
    #[arg(
        long, value_name = "RATIO", default_value_t = GcPolicy::default().stop,
        value_parser = parse_ratio,
    )]
    gc_stop: f64,

    /// What to collect first: greedy (the emptiest) or cost-benefit (also by age).
    #[arg(long, value_name = "CHOICE", default_value = "greedy")]
    gc_choice: ChoiceName,

    /// Leave holes between copied pieces. Otherwise, holes of up to 8 KiB are filled with other
    /// segments' data.
    #[arg(long)]
    no_gc_plugs: bool,

    /// Do not collect garbage: a segment is deleted only when all of its data is dead.
    #[arg(long, conflicts_with_all = ["gc_start", "gc_stop", "gc_choice", "no_gc_plugs"])]
    no_gc: bool,

    /// Use the prices in this file. The built-in file has list prices and their date.
    #[arg(long, value_name = "FILE")]
    prices: Option<PathBuf>,

    /// Draw the course over time into this SVG file.
    #[arg(long, value_name = "FILE")]
    chart: Option<PathBuf>,
}

/// The values of --gc-choice.
#[derive(Clone, Copy, ValueEnum)]
enum ChoiceName {
    /// The segments with the smallest share of live data.
    Greedy,
    /// The segments that free most per byte copied, older ones first.
    CostBenefit,
}

/// What a volume does if its user chooses nothing. The size of the disk plays no part in that.
fn engine() -> ForecastOptions {
    ForecastOptions::new(0)
}

fn parse_ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse::<f64>().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
    ratio.ok_or_else(|| format!("'{text}' is not a ratio; write a number from 0 to 1, as in 0.7"))
}

impl Arguments {
    fn policy(&self) -> Result<Option<GcPolicy>> {
        if self.no_gc {
            return Ok(None);
        }
        let choice = match self.gc_choice {
            ChoiceName::Greedy => Choice::Greedy,
            ChoiceName::CostBenefit => Choice::CostBenefit,
        };
        let mut policy = GcPolicy::default();
        (policy.start, policy.stop, policy.choice) = (self.gc_start, self.gc_stop, choice);
        // The values are right one by one; this checks them together.
        policy.fault().map_or(Ok(Some(policy)), |fault| Err(Failure::usage(fault)))
    }
}

/// Runs the command.
pub fn run(console: &Console, arguments: &Arguments) -> Result<Exit> {
    // Before the traces, which may take minutes: a mistake in the price file is reported at once.
    let prices = prices::Prices::load(arguments.prices.as_deref())?;
    let play = play::PlayOptions {
        read: arguments.read,
        size_bytes: arguments.size,
        widen_bytes: arguments.widen,
        repeat: arguments.repeat,
        segment_bytes: arguments.segment_bytes,
        segment_age_max: arguments.segment_age,
        gc: arguments.policy()?,
        plugs: !arguments.no_gc_plugs,
    };
    let mut played = Vec::new();
    for path in &arguments.traces {
        played.push(play::play(path, &play)?);
    }
    if let Some(path) = &arguments.chart {
        let written = std::fs::write(path, chart::draw(&played));
        written.map_err(|error| {
            Failure::io(format!("cannot write chart {}", path.display()), &error)
        })?;
    }
    let document = document::Document::new(&play, &prices, &played);
    if console.json {
        output::json(&document)?;
    } else {
        document.print()?;
    }
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use sawmill_volume::limits::GC_HOLE_BYTES_MAX;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn the_help_and_the_defaults_are_those_of_the_engine() {
        let arguments = Program::parse_from(["simulate", "trace"]).arguments;
        assert_eq!(arguments.segment_bytes, engine().segment_bytes);
        assert_eq!(arguments.segment_age, engine().segment_age_max);
        // The text of an option cannot be made of a constant.
        assert_eq!(GC_HOLE_BYTES_MAX, 8 << 10, "--no-gc-plugs says 8 KiB");
    }
}
