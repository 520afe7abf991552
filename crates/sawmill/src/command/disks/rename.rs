//! `sawmill rename`: gives a volume another name.
//!
//! Invariant: a text that names a volume is never taken for an id. Not here: how a name moves in
//! one step (`sawmill_volume::rename`).

use clap::Args;
use sawmill_volume::ErrorKind;
use serde::Serialize;

use crate::command::Context;
use crate::wiring;
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;

/// Rename a volume within its store.
///
/// The volume keeps its id, data and journals. You can rename it while it is served: its doors keep
/// the old name until it is served again. An interrupted rename leaves the old name or the new one.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name. For a volume that has lost its name:
    /// its id, as `sawmill list --all` shows it.
    #[arg(value_name = "VOL")]
    volume: String,

    /// Logical block size of a volume that you give by its id, if the store no longer records it.
    #[arg(long, value_name = "BYTES", value_parser = ["512", "4096"])]
    block_size: Option<String>,

    /// The new name only: a volume stays in its store. (`sawmill copy` copies it to another one.)
    #[arg(value_name = "NEW")]
    new: String,
}

#[derive(Serialize)]
struct Document<'a> {
    renamed: &'a str,
    to: &'a str,
    store: &'a str,
    id: String,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let store = wiring::open_store(&address.store_url)?;
    let record = match (
        sawmill_volume::rename(&*store, &address.name, &arguments.new),
        address.name.parse(),
    ) {
        // Only where no volume has this name: a name may look like an id.
        (Err(error), Ok(volume_id)) if error.kind() == ErrorKind::NotFound => {
            let block_bytes = arguments.block_size.as_ref().and_then(|bytes| bytes.parse().ok());
            sawmill_volume::name_unnamed(&*store, volume_id, &arguments.new, block_bytes)?
        }
        (record, _) => record?,
    };
    let (renamed, to) = (address.name.as_str(), record.name.as_str());
    if context.json {
        let id = record.volume_id.to_string();
        output::json(&Document { renamed, to, store: &address.store_url, id })?;
    } else {
        output::line(&format!("renamed {renamed} to {to}"))?;
    }
    Ok(Exit::Ok)
}
