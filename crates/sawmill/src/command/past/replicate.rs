//! `sawmill replicate`: keeps a replica of a volume in a second store.
//!
//! You can kill the process at any moment: what it has copied is a cut, and the same command
//! resumes there.
//!
//! Invariants: a destination in the volume's own store is refused before anything is copied. With
//! `--follow`, only an error that may pass is retried. A reader of the metrics file never sees half
//! of it.
//!
//! Not here: what a round copies and deletes, and in which order (`sawmill_volume::replicate`).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use sawmill_volume::replicate::{self, Copier, CopyOptions, Round, VolumeAt};
use sawmill_volume::{ErrorKind, RealWorld, World};
use serde::Serialize;

use crate::admin::status::milliseconds;
use crate::command::Context;
use crate::config::VolumeAddress;
use crate::{seen, wiring};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::{
    exact_duration, human_count, human_duration, human_size, parse_duration, parse_size,
};

/// A replica is about as far behind as this and the age at which a segment is stored.
const EVERY_DEFAULT: Duration = Duration::from_secs(2);

/// Copy a volume to a second store as a replica, and keep it up to date.
///
/// A replica is the same volume in another store. You can read it at any time (serve --read-only),
/// and it has the state of some moment; `sawmill promote` makes it a volume of its own. Only stored
/// data is copied, so the source can be served anywhere at the same time. You may kill the command
/// at any time: rerun it to continue.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// The replica: a URL ending in its name, s3://bucket/prefix/disk1, in a store other than the
    /// volume's.
    #[arg(value_name = "DEST")]
    destination: String,

    /// Keep running: copy what is new, until the process is stopped.
    #[arg(long)]
    follow: bool,

    /// With --follow: how long to wait when there is nothing new.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration,
          default_value = exact_duration(EVERY_DEFAULT))]
    every: Duration,

    /// Bytes to copy per second at most; 0: no limit.
    #[arg(long, value_name = "RATE", default_value = "0", value_parser = parse_size)]
    bandwidth: u64,

    /// A file to rewrite after each round, with lag and counts as Prometheus text for a node
    /// exporter.
    #[arg(long, value_name = "FILE")]
    metrics_file: Option<PathBuf>,

    /// The destination was the primary (or was promoted) before: make it a replica. Only
    /// differences are copied; writes that exist only at the destination are lost.
    #[arg(long)]
    fail_back: bool,
}

/// What `--json` prints after each round: one line each with --follow.
#[derive(Serialize)]
struct Document<'a> {
    event: &'static str,
    volume: &'a str,
    destination: &'a str,
    objects: u64,
    bytes: u64,
    deleted: u64,
    /// All writes before this position are in the replica.
    position: u64,
    /// How far the replica was behind when the round began, measured against what the source had
    /// stored.
    behind_bytes: u64,
    behind_ms: u64,
    took_ms: u64,
}

/// The figures in the metrics file.
#[derive(Default)]
struct ReplicaMetrics {
    last: Round,
    objects: u64,
    bytes: u64,
    rounds: u64,
    failed_rounds: u64,
    done_unix_ms: u64,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let from = context.paths.resolve(&arguments.volume)?;
    let to = context.paths.resolve(&arguments.destination)?;
    if from.store_url == to.store_url {
        return Err(Failure::usage(format!(
            "{} is the store of {} itself: a replica needs another one, or use `sawmill clone` or \
             `sawmill copy`",
            to.store_url, from.name
        )));
    }
    let (source, destination) =
        (wiring::open_store(&from.store_url)?, wiring::open_store(&to.store_url)?);
    let world = RealWorld::default();
    // Now, and not when the primary is lost: a replica in such a store could not be promoted.
    replicate::require_fencing(&*destination)?;
    let options =
        CopyOptions { source_text: display_address(&from), fail_back: arguments.fail_back };
    let replica = VolumeAt::new(&*destination, &to.name);
    let mut copier = Copier::begin(&world, VolumeAt::new(&*source, &from.name), replica, &options)?;
    if arguments.fail_back {
        // The destination gets the source's history: what was noted of its own is obsolete.
        let volume_id = sawmill_volume::find(&*source, &from.name)?.volume_id.to_string();
        seen::forget(&context.paths.volume_folder(&volume_id, &to.store_url)?)?;
    }
    let mut bucket = Bucket::new(arguments.bandwidth);
    let mut totals = ReplicaMetrics::default();
    loop {
        let began = Instant::now();
        let outcome = copier.round(&mut |bytes| bucket.take(bytes));
        let is_new = totals.add(&outcome, &world);
        if let Some(path) = &arguments.metrics_file {
            match write_metrics(path, &totals.text(&from, &to)) {
                // A full disk here is no reason to stop copying; the age of the file shows the
                // problem.
                Err(failure) if arguments.follow => tracing::warn!("{failure}"),
                written => written?,
            }
        }
        match outcome {
            Ok(round) if is_new || !arguments.follow => {
                let report =
                    RoundReport { from: &from, to: &to, round: &round, took: began.elapsed() };
                report.print(context, arguments.follow)?;
            }
            Ok(_) => {}
            Err(error) if arguments.follow && is_transient(error.kind()) => {
                tracing::warn!("{error}; trying again");
            }
            Err(error) => return Err(Failure::from(error).of_volume(&from.name)),
        }
        if !arguments.follow {
            return Ok(Exit::Ok);
        }
        if !is_new {
            // A period of zero must not become a loop that asks the store without a pause.
            std::thread::sleep(arguments.every.max(Duration::from_millis(10)));
        }
    }
}

/// The address in the form that a user types.
fn display_address(address: &VolumeAddress) -> String {
    format!("{}/{}", address.store_url.trim_end_matches('/'), address.name)
}

/// Whether the error may go away by itself.
fn is_transient(kind: ErrorKind) -> bool {
    // `Denied` too: a copier runs for long, and credentials may be renewed meanwhile.
    matches!(kind, ErrorKind::Unavailable | ErrorKind::Denied)
}

/// A round that is over.
struct RoundReport<'a> {
    from: &'a VolumeAddress,
    to: &'a VolumeAddress,
    round: &'a Round,
    took: Duration,
}

impl RoundReport<'_> {
    /// One of many documents when the copier `follow`s its source, else the only one.
    fn print(&self, context: &Context, follow: bool) -> Result<()> {
        let RoundReport { from, to, round, took } = *self;
        let destination = display_address(to);
        if context.json {
            let document = Document {
                event: "round",
                volume: &from.name,
                destination: &destination,
                objects: round.objects,
                bytes: round.bytes,
                deleted: round.deleted,
                position: round.position,
                behind_bytes: round.behind_bytes,
                behind_ms: round.behind_ms,
                took_ms: milliseconds(took),
            };
            return if follow { output::json_event(&document) } else { output::json(&document) };
        }
        output::line(&format!(
            "{} to {destination}: {} objects, {}; it was {} and {} behind",
            from.name,
            human_count(round.objects),
            human_size(round.bytes),
            human_size(round.behind_bytes),
            human_duration(Duration::from_millis(round.behind_ms))
        ))
    }
}

impl ReplicaMetrics {
    /// Counts a round. Returns whether it copied anything.
    fn add(&mut self, outcome: &sawmill_volume::Result<Round>, world: &dyn World) -> bool {
        self.rounds += 1;
        let Ok(round) = outcome else {
            self.failed_rounds += 1;
            return false;
        };
        self.last = *round;
        self.objects += round.objects;
        self.bytes += round.bytes;
        self.done_unix_ms = world.unix_ms();
        round.objects > 0
    }

    fn text(&self, from: &VolumeAddress, to: &VolumeAddress) -> String {
        let label = format!(
            "{{volume={:?},destination={:?}}}",
            from.name,
            format!("{}/{}", to.store_url.trim_end_matches('/'), to.name)
        );
        METRICS
            .iter()
            .map(|Metric { name, kind, help, value }| {
                let (name, value) = (format!("{METRICS_PREFIX}{name}"), value(self));
                format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{label} {value}\n")
            })
            .collect()
    }
}

/// One row of the file, and of the page.
struct Metric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&ReplicaMetrics) -> f64,
}

const METRICS_PREFIX: &str = "sawmill_replica_";

/// `docs/guide/replicate.md` lists exactly these; a test compares.
const METRICS: [Metric; 8] = [
    Metric {
        name: "behind_seconds",
        kind: "gauge",
        help: "Age difference between the newest source segment and the newest replica segment, \
               at the start of the last successful round",
        value: |totals| seconds(totals.last.behind_ms),
    },
    Metric {
        name: "behind_bytes",
        kind: "gauge",
        help: "Bytes of log that the replica lacked at the start of the last successful round",
        value: |totals| totals.last.behind_bytes as f64,
    },
    Metric {
        name: "position_bytes",
        kind: "gauge",
        help: "All writes below this position of the log are in the replica",
        value: |totals| totals.last.position as f64,
    },
    Metric {
        name: "last_round_timestamp_seconds",
        kind: "gauge",
        help: "When the last good round ended, 0 for none yet: alert on its age",
        value: |totals| seconds(totals.done_unix_ms),
    },
    Metric {
        name: "copied_bytes_total",
        kind: "counter",
        help: "Bytes of objects that this process has copied",
        value: |totals| totals.bytes as f64,
    },
    Metric {
        name: "copied_objects_total",
        kind: "counter",
        help: "Objects that this process has copied",
        value: |totals| totals.objects as f64,
    },
    Metric {
        name: "rounds_total",
        kind: "counter",
        help: "Rounds, good or failed",
        value: |totals| totals.rounds as f64,
    },
    Metric {
        name: "rounds_failed_total",
        kind: "counter",
        help: "Rounds that failed; with --follow, an unreachable store is retried",
        value: |totals| totals.failed_rounds as f64,
    },
];

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

/// Writes the file as a whole or not at all: a reader never sees half of it.
fn write_metrics(path: &Path, text: &str) -> Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, path));
    written.map_err(|error| Failure::io(format!("cannot write {}", path.display()), &error))
}

/// A token bucket of one second's worth. A larger request is granted in advance and waited
/// for afterwards.
struct Bucket {
    bytes_per_second: u64,
    left: f64,
    filled: Instant,
}

impl Bucket {
    fn new(bytes_per_second: u64) -> Self {
        Bucket { bytes_per_second, left: bytes_per_second as f64, filled: Instant::now() }
    }

    /// Waits until `bytes` may be sent.
    fn take(&mut self, bytes: u64) {
        let wait = self.wait(bytes, Instant::now());
        if wait > Duration::ZERO {
            std::thread::sleep(wait);
        }
    }

    /// How long to wait at `now` before the next `bytes`.
    fn wait(&mut self, bytes: u64, now: Instant) -> Duration {
        if self.bytes_per_second == 0 {
            return Duration::ZERO;
        }
        let rate = self.bytes_per_second as f64;
        let grown = self.left + now.saturating_duration_since(self.filled).as_secs_f64() * rate;
        let debt = grown.min(rate).min(0.0);
        self.left = grown.min(rate) - bytes as f64;
        self.filled = now;
        Duration::from_secs_f64(-debt / rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bucket_lets_through_no_more_than_its_rate() {
        let mut bucket = Bucket::new(1000);
        let start = Instant::now();
        let mut now = start;
        for _ in 0..20 {
            now += bucket.wait(500, now);
        }
        let took = (now - start).as_secs_f64();
        // Ten thousand bytes: a second's worth was available, and the last ones come in advance.
        assert!((8.4..=9.1).contains(&took), "{took}");
        assert_eq!(Bucket::new(0).wait(u64::MAX, now), Duration::ZERO);
    }

    #[test]
    fn the_metrics_name_volume_and_destination() {
        let address =
            |url: &str| VolumeAddress { store_url: url.into(), name: "disk".into(), cut: None };
        let mut totals = ReplicaMetrics::default();
        let round = Round { objects: 2, bytes: 10, behind_ms: 1500, ..Round::default() };
        assert!(totals.add(&Ok(round), &RealWorld::default()));
        let text = totals.text(&address("file:///a"), &address("file:///b"));
        let line =
            "sawmill_replica_behind_seconds{volume=\"disk\",destination=\"file:///b/disk\"} 1.5\n";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn the_guide_lists_exactly_the_metrics_of_a_replica() {
        let row = |metric: &Metric| {
            format!("| `{METRICS_PREFIX}{}` | {} | {} |\n", metric.name, metric.kind, metric.help)
        };
        let rows: String = METRICS.iter().map(row).collect();
        let table = format!("| metric | type | meaning |\n|---|---|---|\n{rows}");
        crate::guide::compare("replicate.md", &table);
    }
}
