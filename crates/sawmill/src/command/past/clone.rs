//! `sawmill clone`: a new volume that starts as a copy of another one, present or past.
//!
//! Not here: how base and clone keep what they share (`sawmill_volume::clone`), a copy with data of
//! its own (`copy`).

use clap::Args;

use crate::attach::served;
use crate::command::Context;
use crate::fencing::FencingOption;
use crate::{control, wiring};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;

/// Make a volume from the present state of another one, or from a cut of it. No data is copied.
///
/// VOL@CUT is a snapshot, a time or a position: disk1@before, disk1@2026-11-21T10:00:00Z,
/// disk1@position:N. You can delete either volume first: the data that the other one needs stays.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// The volume to clone, with or without @CUT.
    #[arg(value_name = "VOL[@CUT]")]
    base: String,

    /// Name of the new volume, in the same store.
    #[arg(value_name = "NEW")]
    name: String,

    #[command(flatten)]
    fencing: FencingOption,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let base = context.paths.resolve_cut(&arguments.base)?;
    let new = if arguments.name.contains('/') {
        let new = context.paths.resolve(&arguments.name)?;
        if new.store_url != base.store_url {
            return Err(Failure::usage(format!(
                "{} and {} are in different stores; a clone shares its base's data and must be in \
                 the same store",
                base.name, new.name
            )));
        }
        new.name
    } else {
        arguments.name.clone()
    };
    // A state of the past is in the store already.
    if base.cut.is_none()
        && let Some((folder, _)) = served(&context.paths, &base)?
    {
        // The clone must have everything that has been accepted so far.
        control::wait(&folder, &base.name, "stored", None)?;
    }
    let store = wiring::open_store(&base.store_url)?;
    let cut = base.cut.as_ref().map(|(_, cut)| cut);
    let fencing = arguments.fencing.fencing();
    let record = sawmill_volume::clone(&*store, &base.name, cut, &new, fencing)?;
    let document = crate::command::disks::info::RecordDocument::new(&base.store_url, &record);
    if context.json {
        output::json(&document)?;
    } else {
        output::line(&format!("cloned {} to {}", base.display_name(), document.name))?;
    }
    Ok(Exit::Ok)
}
