//! `sawmill gc`: collects garbage on request, in the process that serves the volume or by attaching
//! it.
//!
//! Invariants: a volume that this machine serves is collected by its server and never attached
//! here. A dry run only reads the store.
//!
//! Not here: which segments are emptied, how their data moves, and when a volume collects by itself
//! (`sawmill_volume::gc`).

use std::time::Duration;

use clap::Args;
use sawmill_volume::GcPolicy;
use sawmill_volume::gc::Garbage;

use crate::admin::status::VolumeStatus;
use crate::attach::AttachToWrite;
use crate::command::Context;
use crate::config::VolumeAddress;
use crate::control::protocol::{CollectReply, ControlRequest};
use crate::{control, wiring};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::{human_count, human_size};

/// Interval of progress reports from the serving process.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Collect garbage now: rewrite the live data of sparse segments and delete what is dead.
///
/// A served volume collects automatically (serve --gc-start); this command goes further. If this
/// machine serves the volume, its server does the work while it serves clients. Otherwise the
/// command attaches the volume until it is done. SIGUSR1 makes a server collect with its own
/// --gc-start as the threshold.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// Empty segments with a smaller share of live data than this: 0 to 1. With 1, all data is
    /// rewritten, so that the whole volume lies in address order.
    #[arg(long, value_name = "SHARE", default_value_t = GcPolicy::default().start,
          value_parser = parse_threshold)]
    threshold: f64,

    /// Print what would be moved and freed; change nothing.
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    attach: AttachToWrite,
}

/// What `--json` prints.
#[derive(serde::Serialize)]
struct Document<'a> {
    volume: &'a str,
    threshold: f64,
    dry_run: bool,
    /// Live bytes that were moved, or would be.
    moved_bytes: u64,
    /// Segments they were written to; null in a dry run.
    moved_segments: Option<u64>,
    /// Segments that would be emptied; null unless a dry run.
    victims: Option<u64>,
    /// Garbage in those; null unless a dry run.
    garbage_bytes: Option<u64>,
}

fn parse_threshold(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| format!("'{text}' is not a share; write a number from 0 to 1, as in 0.3"))
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    if arguments.dry_run {
        let store = wiring::open_store(&address.store_url)?;
        // Read from the store alone: a dry run must not fence, and works beside any server.
        let garbage = sawmill_volume::gc::garbage(&*store, &address.name, arguments.threshold)?;
        return report_garbage(context, arguments, &address, garbage);
    }
    let served = control::served(&context.paths.state_folder()?, &address)?;
    let answer = match served {
        Some((_, process)) if process.volumes.iter().any(|volume| volume.read_only) => {
            let text = format!(
                "volume {} is served read-only by process {}; run the command where the volume is \
                 served for writing",
                address.name, process.pid
            );
            return Err(Failure::new(Exit::InUse, text));
        }
        Some((folder, _)) => {
            let request = ControlRequest::CollectGarbage { threshold: arguments.threshold };
            let look = || {
                // Only for the progress: the answer to the request tells failures.
                control::volume_status(&folder)
                    .ok()
                    .flatten()
                    .map_or((0, 0), |status| left(&status))
            };
            watch(look, || {
                control::query_writer(&folder, &request)?.ok_or_else(|| {
                    let name = &address.name;
                    let text =
                        format!("volume {name} is no longer served for writing here; try again");
                    Failure::new(Exit::NotFound, text)
                })
            })?
        }
        None => at_rest(context, arguments, &address)?,
    };
    report_moved(context, arguments, &address, answer)
}

fn left(status: &VolumeStatus) -> (u64, u64) {
    (status.counters.moved_bytes, status.gc_left_bytes)
}

fn at_rest(
    context: &Context,
    arguments: &Arguments,
    address: &VolumeAddress,
) -> Result<CollectReply> {
    let (_, record) = wiring::find(address)?;
    let attached = arguments.attach.open(&context.paths, address, &record)?;
    let volume = attached.volume.clone();
    let look = || {
        let status = volume.status();
        (status.counters.moved_bytes, status.gc_left_bytes)
    };
    let collected = watch(look, || {
        let report = volume.collect_garbage(arguments.threshold).map_err(Failure::from)?;
        Ok(CollectReply { moved_bytes: report.moved_bytes, moved_segments: report.moved_segments })
    });
    let collected = collected.map_err(|failure| failure.of_volume(&address.name))?;
    attached.close()?;
    Ok(collected)
}

/// Runs `work` and shows its progress: bytes moved, and bytes left to move.
fn watch(
    look: impl Fn() -> (u64, u64),
    work: impl FnOnce() -> Result<CollectReply> + Send,
) -> Result<CollectReply> {
    let mut progress = output::Progress::new("moved bytes");
    std::thread::scope(|scope| {
        let working = scope.spawn(work);
        // The counter of a server runs since its start.
        let before = look().0;
        while !working.is_finished() {
            let (moved, left) = look();
            let moved = moved.saturating_sub(before);
            progress.show(moved, moved + left);
            std::thread::sleep(LOOK_EVERY);
        }
        let died = || Failure::new(Exit::Internal, "the thread that collects died");
        working.join().map_err(|_| died())?
    })
}

fn report_garbage(
    context: &Context,
    arguments: &Arguments,
    address: &VolumeAddress,
    garbage: Garbage,
) -> Result<Exit> {
    let freed = garbage.data_bytes - garbage.live_bytes;
    if context.json {
        output::json(&Document {
            volume: &address.name,
            threshold: arguments.threshold,
            dry_run: true,
            moved_bytes: garbage.live_bytes,
            moved_segments: None,
            victims: Some(garbage.segments),
            garbage_bytes: Some(freed),
        })?;
    } else {
        output::line(&format!(
            "{}: would empty {} segments: move {} of live data, free {}",
            address.name,
            human_count(garbage.segments),
            human_size(garbage.live_bytes),
            human_size(freed)
        ))?;
    }
    Ok(Exit::Ok)
}

fn report_moved(
    context: &Context,
    arguments: &Arguments,
    address: &VolumeAddress,
    answer: CollectReply,
) -> Result<Exit> {
    if context.json {
        output::json(&Document {
            volume: &address.name,
            threshold: arguments.threshold,
            dry_run: false,
            moved_bytes: answer.moved_bytes,
            moved_segments: Some(answer.moved_segments),
            victims: None,
            garbage_bytes: None,
        })?;
    } else {
        output::line(&format!(
            "{}: moved {} of live data into {} segments and deleted what is dead",
            address.name,
            human_size(answer.moved_bytes),
            human_count(answer.moved_segments)
        ))?;
    }
    Ok(Exit::Ok)
}
