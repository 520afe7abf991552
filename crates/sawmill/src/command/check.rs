//! `sawmill check`: reads every segment and verifies every checksum and the map.

use clap::Args;
use serde::Serialize;

use super::Context;
use crate::exit::{Exit, Result};
use crate::units::{human_count, human_size};
use crate::{output, wiring};

/// Read everything a volume has in its store and verify it.
///
/// Changes nothing. Exit code 0: all is well; 1: damage was found and is listed.
#[derive(Args)]
pub(super) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,
}

#[derive(Serialize)]
struct Damage {
    object: String,
    what: String,
}

#[derive(Serialize)]
struct Document {
    name: String,
    ok: bool,
    segments: u64,
    frames: u64,
    bytes: u64,
    extents: u64,
    damage: Vec<Damage>,
    notes: Vec<String>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.places.resolve(&arguments.volume)?;
    let (store, record) = wiring::find(&address)?;
    let mut progress = output::Progress::new("checking segment");
    let report =
        sawmill_volume::check::check(&*store, &record, &mut |done, total| progress.show(done, total))?;
    drop(progress);
    let damage: Vec<Damage> =
        report.damage.into_iter().map(|d| Damage { object: d.object, what: d.what }).collect();
    let document = Document {
        name: address.name,
        ok: damage.is_empty(),
        segments: report.segments,
        frames: report.frames,
        bytes: report.bytes,
        extents: report.extents,
        damage,
        notes: report.notes,
    };
    if context.json {
        output::json(&document)?;
    } else {
        print(&document)?;
    }
    Ok(if document.ok { Exit::Ok } else { Exit::Negative })
}

fn print(document: &Document) -> Result<()> {
    for note in &document.notes {
        output::line(&format!("note: {note}"))?;
    }
    for damage in &document.damage {
        output::line(&format!("damaged: {}: {}", damage.object, damage.what))?;
    }
    output::line(&format!(
        "{}: {}; {} segments, {} frames, {} read, {} extents",
        document.name,
        if document.ok { "all is well".to_owned() } else { format!("{} damaged", document.damage.len()) },
        human_count(document.segments),
        human_count(document.frames),
        human_size(document.bytes),
        human_count(document.extents),
    ))
}
