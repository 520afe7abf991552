//! `sawmill door`: changes the doors of a volume while it is served.
//!
//! Invariants: only the serving process opens and closes doors; this asks it. Doors are added one
//! by one: those before a failed one stay.
//!
//! Not here: opening and closing a door (`sawmill_doors`), how an added door returns after a crash
//! (`serving::added_doors`), the doors that a server opens at its start (`serve`).

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::command::Context;
use crate::command::door_options::DoorOptions;
use crate::control;
use crate::control::protocol::{AddDoorReply, ControlRequest, RemoveDoorReply};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;

/// List, add and remove the doors of a volume that this machine serves.
///
/// A volume can have any set of doors at the same time; all show the same bytes. Coordinating the
/// users of different doors is your task, as with one disk on two cables.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// List the doors of a volume.
    List(Volume),
    /// Open more doors on a volume.
    ///
    /// They move with a hand-off, and return when the server restarts after a crash. A server that
    /// is stopped cleanly forgets them: give permanent doors as options of `serve`.
    Add(AddArguments),
    /// Close a door. Requests in flight finish; then its users see the device disappear.
    Remove(RemoveArguments),
}

#[derive(Args)]
struct Volume {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,
}

#[derive(Args)]
struct AddArguments {
    #[command(flatten)]
    volume: Volume,

    #[command(flatten)]
    doors: DoorOptions,
}

#[derive(Args)]
struct RemoveArguments {
    #[command(flatten)]
    volume: Volume,

    /// The door to close, as `door list` shows it: /dev/ublkb0, a socket, an NBD URI, a file, a
    /// loop device.
    #[arg(value_name = "ADDRESS")]
    address: String,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    match &arguments.action {
        Action::List(volume) => list(context, volume),
        Action::Add(add_what) => add(context, add_what),
        Action::Remove(what) => {
            let (folder, name) = folder_of(context, &what.volume)?;
            let request = ControlRequest::RemoveDoor { address: what.address.clone() };
            let RemoveDoorReply { removed } = control::query_any(&folder, &name, &request)?;
            match context.json {
                true => output::json(&serde_json::json!({ "volume": name, "removed": removed }))?,
                false => output::line(&format!("{name}: removed {removed}"))?,
            }
            Ok(Exit::Ok)
        }
    }
}

/// The folder of the process that serves the volume, and the volume's name.
fn folder_of(context: &Context, volume: &Volume) -> Result<(PathBuf, String)> {
    let address = context.paths.resolve(&volume.volume)?;
    let served = control::served(&context.paths.state_folder()?, &address)?;
    let Some((folder, _)) = served else { return Err(control::not_served(&address.name)) };
    Ok((folder, address.name))
}

fn add(context: &Context, arguments: &AddArguments) -> Result<Exit> {
    let plans = arguments.doors.plans();
    if plans.is_empty() {
        return Err(Failure::usage(format!("name a door: {}", sawmill_doors::options())));
    }
    let (folder, name) = folder_of(context, &arguments.volume)?;
    for plan in plans {
        // Printed one by one: the doors before one that fails stay open.
        let added: AddDoorReply =
            control::query_any(&folder, &name, &ControlRequest::AddDoor(plan))?;
        match context.json {
            true => output::json_event(&added)?,
            false => output::line(&added.address)?,
        }
    }
    Ok(Exit::Ok)
}

fn list(context: &Context, volume: &Volume) -> Result<Exit> {
    let address = context.paths.resolve(&volume.volume)?;
    let served = control::served(&context.paths.state_folder()?, &address)?;
    let Some((_, process)) = served else { return Err(control::not_served(&address.name)) };
    let doors: Vec<_> = process.volumes.into_iter().flat_map(|volume| volume.doors).collect();
    match context.json {
        true => output::json(&doors)?,
        false => {
            let rows = doors.into_iter().map(|door| vec![door.kind, door.address]).collect();
            output::table(&["door", "address"], rows)?;
        }
    }
    Ok(Exit::Ok)
}
