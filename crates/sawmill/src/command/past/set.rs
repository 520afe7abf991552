//! `sawmill set`: changes the settings of a volume that can change after its creation.
//!
//! Not here: settings that only a new volume gets (`create`), carrying the order out
//! (`crate::past`).

use std::time::Duration;

use clap::Args;

use crate::attach::Attach;
use crate::command::Context;
use crate::control::protocol::PastChange;
use crate::past::order;
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;
use sawmill_console::units::{human_duration, parse_whole_seconds};

/// Change a setting of a volume.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// Keep every stored moment for this long: 24h, 90m; 0: none.
    #[arg(long, value_name = "DURATION", value_parser = parse_whole_seconds)]
    retention: Duration,

    #[command(flatten)]
    attach: Attach,
}

#[derive(serde::Serialize)]
struct Document<'a> {
    volume: &'a str,
    retention_s: u64,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let retention_s = arguments.retention.as_secs();
    order(&context.paths, &address, &arguments.attach, &PastChange::SetRetention(retention_s))?;
    if context.json {
        output::json(&Document { volume: &address.name, retention_s })?;
    } else if retention_s == 0 {
        output::line(&format!("{}: no past states are kept, except snapshots", address.name))?;
    } else {
        let duration = human_duration(Duration::from_secs(retention_s));
        output::line(&format!("{}: every stored moment is kept for {duration}", address.name))?;
    }
    Ok(Exit::Ok)
}
