//! `sawmill boot-set`: records what a start of a volume reads, for every clone of its base.
//!
//! Not here: noting reads and keeping the set (`sawmill_volume::boot_set`), fetching it at the
//! start of a server (`serving::warming`) and by hand (`warm`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use sawmill_volume::boot_set::BootSetHolders;
use sawmill_volume::rfc3339;
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::command::Context;
use crate::control::protocol::{BegunReply, ControlRequest, RecordingReply};
use crate::{control, wiring};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::{exact_duration, human_count, human_size, parse_duration};

/// How long a start is recorded.
const RECORDING_DEFAULT: Duration = Duration::from_secs(60);
/// How much longer the server goes on if nobody ends a recording.
const RECORDING_SLACK: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Record what a start reads, so that clones have it in their cache before they read it.
///
/// A boot set lists which parts of the disk the start of a machine or a database reads, and in
/// which order. It is kept with the base of a clone, or with the volume itself if it is not a
/// clone. `sawmill serve` fetches it into the read cache when it has opened a volume with that base
/// (as much as --boot-set-bytes says); `sawmill warm --boot-set` fetches it at any time.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Record what is read from now on; then start what is to be recorded. Replaces the boot set
    /// that there was. Ctrl-C ends the recording early, and keeps it.
    Record(RecordArguments),
    /// Show the boot set that a volume fetches.
    Show(VolumeArgument),
    /// Delete the boot set that a volume fetches, for all clones that share it.
    Delete(VolumeArgument),
}

#[derive(Args)]
struct RecordArguments {
    /// Name in the default store, or a URL ending in the name. It must be served for writing on
    /// this machine.
    #[arg(value_name = "VOL")]
    volume: String,

    /// How long to record.
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration,
          default_value = exact_duration(RECORDING_DEFAULT))]
    time: Duration,
}

#[derive(Args)]
struct VolumeArgument {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,
}

#[derive(Serialize)]
struct RecordedDocument<'a> {
    volume: &'a str,
    #[serde(flatten)]
    recorded: RecordingReply,
}

#[derive(Serialize)]
struct SetDocument<'a> {
    volume: &'a str,
    kept_with: String,
    recorded_unix_ms: u64,
    bytes: u64,
    /// Offset and length of each.
    ranges: &'a [(u64, u64)],
}

#[derive(Serialize)]
struct DeletedDocument<'a> {
    volume: &'a str,
    deleted: usize,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    match &arguments.action {
        Action::Record(record_arguments) => record(context, record_arguments),
        Action::Show(volume) => show(context, volume),
        Action::Delete(volume) => delete(context, volume),
    }
}

/// The failure of a volume without a boot set.
pub(super) fn none(name: &str) -> Failure {
    let text = format!(
        "volume {name} has no boot set; record one while it starts: sawmill boot-set record {name}"
    );
    Failure::new(Exit::NotFound, text)
}

fn record(context: &Context, arguments: &RecordArguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let Some((folder, _)) = control::served(&context.paths.state_folder()?, &address)? else {
        wiring::find(&address)?;
        return Err(control::not_served(&address.name));
    };
    let is_over = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, Arc::clone(&is_over))
            .map_err(|error| Failure::io("cannot listen to signals", &error))?;
    }
    let time_max = arguments.time.saturating_add(RECORDING_SLACK);
    let begin = ControlRequest::BeginRecording { time_max };
    let begun: BegunReply = control::query_any(&folder, &address.name, &begin)
        .map_err(|failure| failure.of_volume(&address.name))?;
    // Tells whoever started this command that the server has begun.
    tracing::info!("recording what is read of {}; Ctrl-C ends it", address.name);
    let began = Instant::now();
    while began.elapsed() < arguments.time && !is_over.load(Ordering::Acquire) {
        std::thread::sleep(LOOK_EVERY.min(arguments.time));
    }
    let end = ControlRequest::EndRecording { recording: begun.recording };
    let recorded: RecordingReply = control::query_any(&folder, &address.name, &end)
        .map_err(|failure| failure.of_volume(&address.name))?;
    if recorded.kept_with.is_none() {
        let text = format!(
            "nothing was read from the store or cache of {} during the recording, or its server \
             was replaced: there is no new boot set; start what is to be recorded while this \
             command runs",
            address.name
        );
        return Err(Failure::new(Exit::Negative, text));
    }
    if context.json {
        output::json(&RecordedDocument { volume: &address.name, recorded })?;
    } else {
        let cut = if recorded.is_cut { "; more was read than a boot set can hold" } else { "" };
        output::line(&format!(
            "{}: recorded {} in {} ranges{cut}",
            address.name,
            human_size(recorded.bytes),
            human_count(recorded.ranges)
        ))?;
    }
    Ok(Exit::Ok)
}

fn show(context: &Context, arguments: &VolumeArgument) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let (store, record) = wiring::find(&address)?;
    let holders = BootSetHolders::of(&*store, &record)?;
    let set = holders.find(&*store)?.ok_or_else(|| none(&address.name))?;
    if context.json {
        output::json(&SetDocument {
            volume: &address.name,
            kept_with: set.volume_id.to_string(),
            recorded_unix_ms: set.wall_unix_ms,
            bytes: set.bytes(),
            ranges: &set.ranges,
        })?;
    } else {
        output::line(&format!(
            "{}: {} in {} ranges, recorded {}, kept with volume {}",
            address.name,
            human_size(set.bytes()),
            human_count(set.ranges.len() as u64),
            rfc3339(set.wall_unix_ms),
            set.volume_id
        ))?;
    }
    Ok(Exit::Ok)
}

fn delete(context: &Context, arguments: &VolumeArgument) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let (store, record) = wiring::find(&address)?;
    let deleted = BootSetHolders::of(&*store, &record)?.delete(&*store)?;
    if deleted == 0 {
        return Err(none(&address.name));
    }
    if context.json {
        output::json(&DeletedDocument { volume: &address.name, deleted })?;
    } else {
        output::line(&format!("deleted the boot set of {}", address.name))?;
    }
    Ok(Exit::Ok)
}
