//! `sawmill wait`: returns when everything accepted so far is as safe as requested.
//! Not here: waiting itself, which the serving process does (`admin`, `Volume::wait`).

use std::time::Duration;

use clap::Args;

use crate::command::Context;
use crate::{control, wiring};
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;
use sawmill_console::units::{human_duration, parse_duration};

/// Wait until everything accepted so far is on the local disk or in the store.
///
/// Exit code 0: it is; 1: the timeout expired first.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name. It must be served on this machine.
    #[arg(value_name = "VOL")]
    volume: String,

    /// Wait for the store: survives the loss of the machine.
    #[arg(long, required_unless_present = "logged", conflicts_with = "logged")]
    stored: bool,

    /// Wait for the local disk: survives power loss.
    #[arg(long)]
    logged: bool,

    /// Give up after this long: 500ms, 30s, 5m. Default: never.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    timeout: Option<Duration>,
}

#[derive(serde::Serialize)]
struct Document<'a> {
    volume: &'a str,
    safety: &'a str,
    reached: bool,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let folder = match control::served(&context.paths.state_folder()?, &address)? {
        Some((folder, _)) => folder,
        None => {
            let (_, record) = wiring::find(&address)?;
            context.paths.volume_folder(&record.volume_id.to_string(), &address.store_url)?
        }
    };
    let safety = if arguments.stored { "stored" } else { "logged" };
    let reached = control::wait(&folder, &address.name, safety, arguments.timeout)?;
    if context.json {
        output::json(&Document { volume: &address.name, safety, reached })?;
    } else if !reached {
        let waited = arguments.timeout.map(human_duration).unwrap_or_default();
        output::line(&format!("{}: not everything is {safety} after {waited}", address.name))?;
    }
    Ok(if reached { Exit::Ok } else { Exit::Negative })
}
