//! `sawmill flatten`: gives a clone data of its own, so that it no longer needs its ancestors.
//!
//! Not here: copying, and when ancestors may go (`sawmill_volume`: `Volume::flatten`,
//! `release_ancestors`).

use clap::Args;

use crate::attach::{Attach, served};
use crate::command::Context;
use crate::wiring;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output::{self, Progress};
use sawmill_console::units::human_size;

/// Checkpoints until no segment of an ancestor is listed any more: one finds the segment dead, one
/// allows its removal, and two no longer list it.
const ROUNDS_MAX: u32 = 5;

/// Copy the data that a clone shares with its ancestors into segments of its own, so that it no
/// longer needs them.
///
/// The volume must not be served. Snapshots of the clone that hold shared data keep the ancestors:
/// delete them first, then rerun the command.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "CLONE")]
    volume: String,

    #[command(flatten)]
    attach: Attach,
}

#[derive(serde::Serialize)]
struct Document<'a> {
    volume: &'a str,
    copied_bytes: u64,
    released: bool,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    if let Some((_, pid)) = served(&context.paths, &address)? {
        let text = format!("volume {} is served by process {pid}; stop that first", address.name);
        return Err(Failure::new(Exit::InUse, text));
    }
    let store = wiring::open_store(&address.store_url)?;
    // First without attaching: an earlier run may have left only this to do.
    let mut released = sawmill_volume::release_ancestors(&*store, &address.name)?;
    let mut copied_bytes = 0;
    for round in 0..ROUNDS_MAX {
        if released {
            break;
        }
        // Rounds after the first copy nothing. They are for the checkpoints, one at each close.
        let mut progress = Progress::new("flattening");
        arguments.attach.at_rest(&context.paths, &address, |volume| {
            if round == 0 {
                copied_bytes = volume.flatten(&mut |done, total| progress.show(done, total))?;
            }
            Ok(())
        })?;
        released = sawmill_volume::release_ancestors(&*store, &address.name)?;
    }
    let size = human_size(copied_bytes);
    if context.json {
        output::json(&Document { volume: &address.name, copied_bytes, released })?;
    } else if released {
        output::line(&format!("{} no longer needs its ancestors ({size} copied)", address.name))?;
    } else {
        let text = format!(
            "{}: {size} copied; it still needs its ancestors: a snapshot, its older checkpoint or \
             the end of its log uses them",
            address.name
        );
        output::line(&text)?;
    }
    Ok(if released { Exit::Ok } else { Exit::Negative })
}
