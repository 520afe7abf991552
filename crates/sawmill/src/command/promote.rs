//! `sawmill promote`: a replica becomes a volume of its own; or the drill for that.

use std::time::Duration;

use clap::Args;
use sawmill_volume::replicate::{self, Promotion};
use sawmill_volume::{RealWorld, World};
use serde::Serialize;

use super::Context;
use crate::exit::{Exit, Result};
use crate::units::{human_count, human_duration, human_size};
use crate::{output, wiring};

/// Make a replica a volume of its own, that can be served for writing.
///
/// What had not been copied by then is not in it. The source is not asked and not stopped: if it is still
/// served, see that nobody writes there any more. Once promoted, a replica stays so; to make the old primary
/// a replica of it, `sawmill replicate --fail-back`.
#[derive(Args)]
pub(super) struct Arguments {
    /// The replica: a name in the default store, or a URL ending in the name.
    #[arg(value_name = "DEST")]
    replica: String,

    /// A drill: read and verify everything in the replica, and say what would be lost. Changes nothing. Exit
    /// code 0: all is well; 1: damage was found and is listed.
    #[arg(long)]
    dry_run: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    volume: &'a str,
    source: &'a str,
    dry_run: bool,
    epoch: u64,
    position: u64,
    /// When the newest of it was written.
    newest_unix_ms: u64,
    /// How far that is behind what the source has stored now; null when it was not or could not be asked.
    lost_bytes: Option<u64>,
    lost_ms: Option<u64>,
    /// What the drill verified; null without --dry-run.
    segments: Option<u64>,
    damage: Option<Vec<String>>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.places.resolve(&arguments.replica)?;
    let store = wiring::open_store(&address.store_url)?;
    let world = RealWorld::default();
    if arguments.dry_run {
        let mut progress = output::Progress::new("verifying segment");
        let drill =
            replicate::drill(&world, &*store, &address.name, &mut |done, total| progress.show(done, total))?;
        drop(progress);
        let lost = lost(context, &drill.would);
        let damage = drill.check.damage.iter().map(|one| format!("{}: {}", one.object, one.what));
        return tell(
            context,
            &Document {
                lost_bytes: lost.map(|(bytes, _)| bytes),
                lost_ms: lost.map(|(_, ms)| ms),
                segments: Some(drill.check.segments),
                damage: Some(damage.collect()),
                ..document(&address.name, &drill.would, true)
            },
        );
    }
    let promotion = replicate::promote(&world, &*store, &address.name)?;
    tell(context, &document(&address.name, &promotion, false))
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
        segments: None,
        damage: None,
    }
}

/// Bytes and milliseconds that the source is ahead, when it can be asked.
fn lost(context: &Context, would: &Promotion) -> Option<(u64, u64)> {
    let address = context.places.resolve(&would.source).ok()?;
    let store = wiring::open_store(&address.store_url).ok()?;
    let asked = replicate::stored_end(&RealWorld::default(), &*store, &address.name);
    let (position, wall_unix_ms) =
        asked.map_err(|error| tracing::warn!("the source cannot be asked: {error}")).ok()?;
    let bytes = position.saturating_sub(would.position);
    // The same end was written at the same moment.
    let ms = if bytes == 0 { 0 } else { wall_unix_ms.saturating_sub(would.wall_unix_ms) };
    Some((bytes, ms))
}

fn tell(context: &Context, document: &Document<'_>) -> Result<Exit> {
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
            "promoted {volume}, a replica of {}: its newest write was stored {age} ago; serve it: sawmill \
             serve {volume}",
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
        (Some(0), _) => "nothing that the source has stored would be lost".to_owned(),
        (Some(bytes), Some(ms)) => format!(
            "{} and {} of what the source has stored would be lost",
            human_size(bytes),
            human_duration(Duration::from_millis(ms))
        ),
        _ => format!("the source ({}) cannot be asked: what would be lost is not known", document.source),
    })?;
    Ok(exit)
}
