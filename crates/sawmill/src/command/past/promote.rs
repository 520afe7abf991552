//! `sawmill promote`: makes a replica a volume of its own, or rehearses that (a drill).
//!
//! Invariant: a promotion never contacts the source; only a drill reads it. Not here: what a
//! promotion writes, and why no fence is needed (`sawmill_volume::replicate`).

use std::time::Duration;

use clap::Args;
use sawmill_volume::replicate::{self, Drill, Promotion, ReplicaLag};
use sawmill_volume::{RealWorld, World};
use serde::Serialize;

use crate::command::Context;
use crate::{seen, wiring};
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;
use sawmill_console::units::{human_count, human_duration, human_size};

/// Promote a replica: make it a volume of its own that you can serve for writing.
///
/// The promoted volume lacks writes that were not copied in time. The command neither contacts nor
/// stops the source: if the source is still served, make sure that nothing writes to it. A
/// promotion cannot be undone; to make the old primary a replica, use `sawmill replicate
/// --fail-back`.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// The replica: a name in the default store, or a URL ending in the name.
    #[arg(value_name = "DEST")]
    replica: String,

    /// A drill: read and verify everything in the replica, and print what would be lost. Changes
    /// nothing. Exit code 0: no damage; 1: damage was found and is listed.
    #[arg(long)]
    dry_run: bool,

    /// Promote even if the newest checkpoint here cannot be read (the volume is then older), or if
    /// an object that it needs is missing. Only for a lost source: otherwise replicate again.
    #[arg(long, conflicts_with = "dry_run")]
    as_it_is: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    volume: &'a str,
    source: &'a str,
    dry_run: bool,
    epoch: u64,
    position: u64,
    /// When the newest write of the replica was stored.
    newest_unix_ms: u64,
    /// How far the replica is behind what the source has stored now; null if the source was not or
    /// could not be asked.
    lost_bytes: Option<u64>,
    lost_ms: Option<u64>,
    /// Whether the replica has everything that the source has stored: the same history, end, size
    /// and snapshots. Null if the source could not be asked.
    is_complete: Option<bool>,
    /// What the drill verified; null without --dry-run.
    segments: Option<u64>,
    damage: Option<Vec<String>>,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.replica)?;
    let store = wiring::open_store(&address.store_url)?;
    let world = RealWorld::default();
    if arguments.dry_run {
        let mut progress = output::Progress::new("verifying segment");
        let drill = replicate::drill(&world, &*store, &address.name, &mut |done, total| {
            progress.show(done, total)
        })?;
        // Removes its line from the terminal before results are printed there.
        drop(progress);
        let behind = behind(context, &drill);
        let loss = match behind {
            Some(ReplicaLag::Nothing) => Some((0, 0)),
            Some(ReplicaLag::By { bytes, ms }) => Some((bytes, ms)),
            Some(ReplicaLag::Elsewhere) | None => None,
        };
        let damage = drill.check.damage.iter().map(ToString::to_string);
        return report(
            context,
            &Document {
                lost_bytes: loss.map(|(bytes, _)| bytes),
                lost_ms: loss.map(|(_, ms)| ms),
                is_complete: behind.map(|behind| behind == ReplicaLag::Nothing),
                segments: Some(drill.check.segments),
                damage: Some(damage.collect()),
                ..document(&address.name, &drill.promotion, true)
            },
        );
    }
    // Of two promotions one wins only where the store creates conditionally (P49).
    replicate::require_fencing(&*store)?;
    let promotion = match arguments.as_it_is {
        false => replicate::promote(&world, &*store, &address.name)?,
        true => replicate::promote_as_it_is(&world, &*store, &address.name)?,
    };
    // Its history is new: what this machine remembers does not apply to it.
    let volume_id = promotion.record.volume_id.to_string();
    seen::forget(&context.paths.volume_folder(&volume_id, &address.store_url)?)?;
    report(context, &document(&address.name, &promotion, false))
}

fn document<'a>(volume: &'a str, promotion: &'a Promotion, dry_run: bool) -> Document<'a> {
    Document {
        volume,
        source: &promotion.source,
        dry_run,
        epoch: promotion.epoch,
        position: promotion.position,
        newest_unix_ms: promotion.wall_unix_ms,
        lost_bytes: None,
        lost_ms: None,
        is_complete: None,
        segments: None,
        damage: None,
    }
}

/// How far the source is ahead, if it can be asked.
fn behind(context: &Context, drill: &Drill) -> Option<ReplicaLag> {
    let address = context.paths.resolve(&drill.promotion.source).ok()?;
    let store = wiring::open_store(&address.store_url).ok()?;
    // A source that cannot be read makes the loss unknown, and leaves the drill's findings valid.
    let lag = replicate::behind(&RealWorld::default(), &*store, &address.name, drill);
    lag.map_err(|error| tracing::warn!("cannot read the source: {error}")).ok()
}

fn report(context: &Context, document: &Document<'_>) -> Result<Exit> {
    let is_well = document.damage.as_ref().is_none_or(Vec::is_empty);
    let exit = if is_well { Exit::Ok } else { Exit::Negative };
    if context.json {
        output::json(document)?;
        return Ok(exit);
    }
    for damage in document.damage.iter().flatten() {
        output::line(&format!("damaged: {damage}"))?;
    }
    let age = RealWorld::default().unix_ms().saturating_sub(document.newest_unix_ms);
    let age = human_duration(Duration::from_millis(age));
    let volume = document.volume;
    if !document.dry_run {
        output::line(&format!(
            "promoted {volume}, a replica of {}: its newest write was stored {age} ago; serve it: \
             sawmill serve {volume}",
            document.source
        ))?;
        return Ok(exit);
    }
    let verdict = if is_well { "all is well" } else { "damaged" };
    let segments = human_count(document.segments.unwrap_or_default());
    output::line(&format!(
        "{volume}: {verdict}; {segments} segments verified; newest write stored {age} ago"
    ))?;
    output::line(&match (document.lost_bytes, document.lost_ms) {
        (Some(0), _) if document.is_complete == Some(true) => {
            "nothing that the source has stored would be lost".to_owned()
        }
        (Some(0), _) => {
            "no write that the source has stored would be lost, only a snapshot, a resize or a \
            setting"
                .to_owned()
        }
        (None, _) if document.is_complete == Some(false) => format!(
            "{} is now another volume, or has another history than this replica: the loss is \
            unknown",
            document.source
        ),
        (Some(bytes), Some(ms)) => format!(
            "{} and {} of what the source has stored would be lost",
            human_size(bytes),
            human_duration(Duration::from_millis(ms))
        ),
        _ => format!("cannot read the source ({}): the loss is unknown", document.source),
    })?;
    Ok(exit)
}
