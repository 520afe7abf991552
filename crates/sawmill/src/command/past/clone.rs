//! `sawmill clone`: a new volume that starts as a copy of another one, present or past.
//!
//! Not here: how base and clone keep what they share (`sawmill_volume::clone`), a copy with data of
//! its own (`copy`).

use clap::Args;

use crate::attach::served;
use crate::command::Context;
use crate::command::disks::info::RecordDocument;
use crate::config::VolumeAddress;
use crate::fencing::FencingOption;
use crate::{control, wiring};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_format::volume_record::VolumeRecord;

/// Make volumes from the present state of another one, or from a cut of it. No data is copied.
///
/// VOL@CUT is a snapshot, a time or a position: disk1@before, disk1@2026-11-21T10:00:00Z,
/// disk1@position:N. You can delete either volume first: the data that the other one needs stays.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// The volume to clone, with or without @CUT.
    #[arg(value_name = "VOL[@CUT]")]
    base: String,

    /// Names of the new volumes, in the same store. Many at once take less time than one by one.
    #[arg(value_name = "NEW", required = true)]
    names: Vec<String>,

    #[command(flatten)]
    fencing: FencingOption,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let base = context.paths.resolve_cut(&arguments.base)?;
    let names = arguments.names.iter().map(|text| new_name(context, &base, text));
    let names = names.collect::<Result<Vec<_>>>()?;
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
    let mut printed = Ok(());
    let mut print = |record: VolumeRecord| {
        let document = RecordDocument::new(&base.store_url, &record);
        let outcome = match (context.json, names.len()) {
            (true, 1) => output::json(&document),
            (true, _) => output::json_event(&document),
            (false, _) => {
                output::line(&format!("cloned {} to {}", base.display_name(), document.name))
            }
        };
        if printed.is_ok() {
            printed = outcome;
        }
    };
    sawmill_volume::clone_each(&*store, &base.name, cut, &names, fencing, &mut print)?;
    printed.map(|()| Exit::Ok)
}

/// The name of a new volume, which may be written as a URL of the base's store.
fn new_name(context: &Context, base: &VolumeAddress, text: &str) -> Result<String> {
    if !text.contains('/') {
        return Ok(text.to_owned());
    }
    let new = context.paths.resolve(text)?;
    if new.store_url == base.store_url {
        return Ok(new.name);
    }
    Err(Failure::usage(format!(
        "{} and {} are in different stores; a clone shares its base's data and must be in the same \
         store",
        base.name, new.name
    )))
}
