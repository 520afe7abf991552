//! `sawmill check`: reads and verifies everything that a volume keeps, including its past.
//!
//! Invariant: the exit code depends on damage alone, never on notes.
//!
//! Not here: what is read and what counts as damage (`sawmill_volume::check`), the journal
//! (`inspect journal`).

use clap::Args;
use sawmill_volume::check;
use serde::Serialize;

use crate::command::Context;
use crate::{seen, wiring};
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;
use sawmill_console::units::{human_count, human_size};

/// Read everything a volume has in its store and verify it.
///
/// Changes nothing. Exit code 0: all is well; 1: damage was found and is listed.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,
}

#[derive(Serialize)]
struct Damage {
    object: String,
    what: String,
    costs: Vec<String>,
}

#[derive(Serialize)]
struct Document {
    name: String,
    ok: bool,
    segments: u64,
    frames: u64,
    bytes: u64,
    extents: u64,
    parts: u64,
    kept: u64,
    unneeded: u64,
    stranded: u64,
    damage: Vec<Damage>,
    notes: Vec<String>,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let (store, record) = wiring::find(&address)?;
    let mut progress = output::Progress::new("checking segment");
    let mut report = check::check(&*store, &record, &mut |done, total| progress.show(done, total))?;
    // Removes its line from the terminal before results are printed there.
    drop(progress);
    let remarks = seen::remarks(&context.paths, record.volume_id, &address.store_url, report.end);
    report.notes.extend(remarks);
    // Formatted here, because the next line moves out of the report.
    let found = report.damage.iter().map(ToString::to_string).collect::<Vec<_>>();
    let row = |one: check::Damage| Damage { object: one.object, what: one.what, costs: one.costs };
    let damage: Vec<Damage> = report.damage.into_iter().map(row).collect();
    let document = Document {
        name: address.name,
        ok: damage.is_empty(),
        segments: report.segments,
        frames: report.frames,
        bytes: report.bytes,
        extents: report.extents,
        parts: report.parts,
        kept: report.kept,
        unneeded: report.unneeded,
        stranded: report.stranded,
        damage,
        notes: report.notes,
    };
    if context.json {
        output::json(&document)?;
    } else {
        print(&document, &found)?;
    }
    Ok(if document.ok { Exit::Ok } else { Exit::Negative })
}

fn print(document: &Document, found: &[String]) -> Result<()> {
    for note in &document.notes {
        output::line(&format!("note: {note}"))?;
    }
    for damage in found {
        output::line(&format!("damaged: {damage}"))?;
    }
    output::line(&format!(
        "{}: {}; {} segments, {} frames, {} read, {} extents",
        document.name,
        if document.ok {
            "all is well".to_owned()
        } else {
            format!("{} damaged", document.damage.len())
        },
        human_count(document.segments),
        human_count(document.frames),
        human_size(document.bytes),
        human_count(document.extents),
    ))
}
