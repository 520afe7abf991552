//! `sawmill log`: the past states of a volume that are available.
//!
//! Invariant: table and JSON come from one document, the oldest state first; what is pinned for
//! clones is left out.
//!
//! Not here: which states are kept, and for how long (`sawmill_volume::past`), snapshots alone
//! (`snapshot`).

use std::time::Duration;

use clap::Args;
use sawmill_volume::{CutInfo, CutKind, rfc3339};
use serde::Serialize;

use crate::command::Context;
use crate::wiring;
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;
use sawmill_console::units::{human_duration, human_size};

/// List the past states of a volume that you can serve, clone or roll back to.
///
/// Inside the retention window you can use every stored moment, not only the listed ones: VOL@TIME
/// is the newest state at or before that time.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,
}

/// One state of the list.
#[derive(Serialize)]
struct Row {
    kind: &'static str,
    name: String,
    time: String,
    unix_ms: u64,
    position: u64,
    checkpoint: u64,
    unique_bytes: u64,
    shared_bytes: u64,
}

#[derive(Serialize)]
struct Document {
    volume: String,
    retention_s: u64,
    /// The oldest moment from which every state is available; null: none.
    from: Option<String>,
    through: String,
    position: u64,
    cuts: Vec<Row>,
}

fn row(cut: &CutInfo) -> Row {
    let kind = match cut.kind {
        CutKind::Retained => "checkpoint",
        // A rollback keeps the state it replaces under such a name.
        CutKind::Snapshot if cut.name.starts_with("before-rollback-") => "rollback",
        CutKind::Snapshot => "snapshot",
        CutKind::Pin => "clone",
    };
    Row {
        kind,
        name: cut.name.clone(),
        time: rfc3339(cut.wall_unix_ms),
        unix_ms: cut.wall_unix_ms,
        position: cut.position,
        checkpoint: cut.number,
        unique_bytes: cut.unique_bytes,
        shared_bytes: cut.shared_bytes,
    }
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let store = wiring::open_store(&address.store_url)?;
    let report = sawmill_volume::past(&*store, &address.name)?;
    // A pin has no name that users can give: it belongs to a clone.
    let mut cuts: Vec<_> =
        report.cuts.iter().filter(|cut| cut.kind != CutKind::Pin).map(row).collect();
    cuts.sort_by_key(|row| (row.unix_ms, row.checkpoint));
    let retained = report.cuts.iter().filter(|cut| cut.kind == CutKind::Retained);
    let document = Document {
        volume: address.name,
        retention_s: report.retention_s,
        from: retained.map(|cut| cut.wall_unix_ms).min().map(rfc3339),
        through: rfc3339(report.wall_unix_ms),
        position: report.position,
        cuts,
    };
    if context.json {
        output::json(&document)?;
        return Ok(Exit::Ok);
    }
    if !document.cuts.is_empty() {
        let cells = document.cuts.iter().map(|row| {
            let size = human_size(row.unique_bytes);
            let name = if row.name.is_empty() { "-".to_owned() } else { row.name.clone() };
            vec![row.time.clone(), row.kind.into(), name, row.position.to_string(), size]
        });
        output::table(&["time", "kind", "name", "position", "unique"], cells.collect())?;
    }
    let window = human_duration(Duration::from_secs(document.retention_s));
    output::line(&match &document.from {
        Some(from) => format!(
            "every stored moment from {from} to {} (kept for \
            {window})",
            document.through
        ),
        None => "no retention: only snapshots are kept; `sawmill set --retention 24h` keeps every \
            moment"
            .into(),
    })?;
    Ok(Exit::Ok)
}
