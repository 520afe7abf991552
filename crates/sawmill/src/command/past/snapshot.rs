//! `sawmill snapshot`: names for states of a volume.
//!
//! Invariant: a new snapshot gets only a name that `VOL@NAME` reads as a name, never as a time or a
//! position. Not here: carrying an order out (`crate::past`), other past states (`log`).

use clap::{Args, Subcommand};
use sawmill_format::kept_block::NAME_BYTES_MAX;
use sawmill_volume::{CutInfo, CutKind, rfc3339};
use serde::Serialize;

use crate::attach::Attach;
use crate::command::Context;
use crate::control::protocol::PastChange;
use crate::moment::parse_cut;
use crate::past::order;
use crate::wiring;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::human_size;

/// Create, list and delete snapshots: named states of a volume that are kept.
///
/// A snapshot copies no data, and writes continue while it is made. It is in the store when the
/// command returns.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Give the present state a name.
    Create(SnapshotArguments),
    /// List the snapshots of a volume, and the space that each takes.
    List(Volume),
    /// Delete a snapshot. The data that only it needs is deleted later.
    Delete(SnapshotArguments),
}

#[derive(Args)]
struct SnapshotArguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// Name of the snapshot: 1 to 128 letters, digits, '.', '_', '-', not first a '.'.
    #[arg(value_name = "NAME")]
    name: String,

    #[command(flatten)]
    attach: Attach,
}

#[derive(Args)]
struct Volume {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,
}

/// One snapshot of the list.
#[derive(Serialize)]
struct Row {
    name: String,
    time: String,
    unix_ms: u64,
    position: u64,
    unique_bytes: u64,
    shared_bytes: u64,
}

impl Row {
    fn new(cut: &CutInfo) -> Self {
        Row {
            name: cut.name.clone(),
            time: rfc3339(cut.wall_unix_ms),
            unix_ms: cut.wall_unix_ms,
            position: cut.position,
            unique_bytes: cut.unique_bytes,
            shared_bytes: cut.shared_bytes,
        }
    }
}

#[derive(Serialize)]
struct Document<'a> {
    volume: &'a str,
    snapshot: &'a str,
    done: bool,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    match &arguments.action {
        Action::Create(named) => {
            change(context, named, PastChange::CreateSnapshot(named.name.clone()), "created")
        }
        Action::Delete(named) => {
            change(context, named, PastChange::DeleteSnapshot(named.name.clone()), "deleted")
        }
        Action::List(volume) => list(context, volume),
    }
}

fn change(
    context: &Context,
    arguments: &SnapshotArguments,
    past: PastChange,
    done: &str,
) -> Result<Exit> {
    // A name that reads as a time or a position would never be meant by VOL@NAME.
    if !matches!(parse_cut(&arguments.name), Ok(sawmill_volume::Cut::Snapshot(_))) {
        return Err(Failure::usage(format!(
            "'{}' cannot name a snapshot; use 1 to {NAME_BYTES_MAX} letters, digits, '.', '_', \
             '-', not first a '.'",
            arguments.name
        )));
    }
    let address = context.paths.resolve(&arguments.volume)?;
    order(&context.paths, &address, &arguments.attach, &past)?;
    if context.json {
        output::json(&Document { volume: &address.name, snapshot: &arguments.name, done: true })?;
    } else {
        output::line(&format!("{done} snapshot {} of {}", arguments.name, address.name))?;
    }
    Ok(Exit::Ok)
}

fn list(context: &Context, arguments: &Volume) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let store = wiring::open_store(&address.store_url)?;
    let report = sawmill_volume::past(&*store, &address.name)?;
    let snapshots = report.cuts.iter().filter(|cut| cut.kind == CutKind::Snapshot);
    let mut rows: Vec<_> = snapshots.map(Row::new).collect();
    rows.sort_by(|one, other| (one.unix_ms, &one.name).cmp(&(other.unix_ms, &other.name)));
    if context.json {
        output::json(&rows)?;
    } else if rows.is_empty() {
        output::line(&format!("no snapshots of {}", address.name))?;
    } else {
        let cells = rows.iter().map(|row| {
            let (unique, shared) = (human_size(row.unique_bytes), human_size(row.shared_bytes));
            vec![row.name.clone(), row.time.clone(), unique, shared]
        });
        output::table(&["name", "time", "unique", "shared"], cells.collect())?;
    }
    Ok(Exit::Ok)
}
