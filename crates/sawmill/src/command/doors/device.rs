//! `sawmill device`: the ublk devices of this machine, including those whose server is gone.
//!
//! Invariant: only a device of Sawmill that waits for a server is recovered, and the process that
//! serves its volume takes it over, never this one.
//!
//! Not here: making a device and taking it over (`sawmill_doors`), which devices may be deleted
//! (`sawmill_frontend::ublk`).

use std::path::Path;

use clap::{Args, Subcommand};
use sawmill_doors::DoorPlan;
use sawmill_frontend::ublk::{self, DeviceInfo, UblkOptions};
use serde::Serialize;

use crate::command::Context;
use crate::control;
use crate::control::protocol::{AddDoorReply, ControlRequest};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::human_size;

/// List, delete and recover ublk devices.
///
/// When the server of a device dies, the users of the device wait. `sawmill serve VOL --ublk` takes
/// over the device of its volume automatically; these commands are for all other cases.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// List all ublk devices of this machine.
    List,
    /// Remove a device that no process serves. Its users get errors from then on.
    Delete(Device),
    /// Make the process that serves the device's volume take over the device.
    Recover(Device),
}

#[derive(Args)]
struct Device {
    /// Number of the device: 3 for /dev/ublkb3.
    #[arg(value_name = "ID")]
    id: u32,
}

/// One device of the list.
#[derive(Serialize)]
struct Row {
    id: u32,
    node: String,
    /// `live`, `waiting` (for a server), `stopped` or `foreign` (of another program).
    state: &'static str,
    size_bytes: u64,
    server_pid: Option<u32>,
    /// The link to it below /dev/sawmill.
    name: Option<String>,
    volume: Option<String>,
}

impl Row {
    fn new(device: &DeviceInfo) -> Self {
        let state = match device.state {
            _ if !device.is_ours => "foreign",
            _ if device.is_alive => "live",
            ublk::DeviceState::Dead => "stopped",
            _ => "waiting",
        };
        Row {
            id: device.id,
            node: device.node().display().to_string(),
            state,
            size_bytes: device.size_bytes,
            server_pid: device.server_pid.filter(|_| device.is_alive),
            name: device.symlink.clone(),
            volume: device.volume.clone(),
        }
    }
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let UblkOptions { mut run_folder, symlink_folder, .. } = UblkOptions::new("any");
    // Devices without privileges have their facts in the folder of their user.
    if !rustix::process::geteuid().is_root() {
        run_folder = context.paths.ublk_folder()?;
    }
    match &arguments.action {
        Action::List => list(context, &run_folder),
        Action::Delete(device) => {
            ublk::delete(&run_folder, &symlink_folder, device.id)?;
            match context.json {
                true => output::json(&serde_json::json!({ "deleted": device.id }))?,
                false => output::line(&format!("deleted ublk device {}", device.id))?,
            }
            Ok(Exit::Ok)
        }
        Action::Recover(device) => recover(context, &run_folder, device.id),
    }
}

fn list(context: &Context, run_folder: &Path) -> Result<Exit> {
    let devices = ublk::devices(run_folder)?;
    let rows: Vec<Row> = devices.iter().map(Row::new).collect();
    if context.json {
        output::json(&rows)?;
    } else if rows.is_empty() {
        output::line("no ublk devices")?;
    } else {
        let cells = rows.iter().map(|row| {
            let server = row.server_pid.map_or_else(|| "-".into(), |pid| pid.to_string());
            let name = row.name.clone().unwrap_or_else(|| "-".into());
            vec![row.node.clone(), row.state.into(), human_size(row.size_bytes), server, name]
        });
        output::table(&["device", "state", "size", "server", "volume"], cells.collect())?;
    }
    Ok(Exit::Ok)
}

fn recover(context: &Context, run_folder: &Path, id: u32) -> Result<Exit> {
    let devices = ublk::devices(run_folder)?;
    let found = devices.iter().find(|device| device.id == id);
    let found = found.ok_or_else(|| {
        Failure::new(
            Exit::NotFound,
            format!("there is no ublk device {id}; see: sawmill device list"),
        )
    })?;
    if !found.is_orphan() {
        let text = format!(
            "ublk device {id} is not waiting for a sawmill server; see: sawmill device list"
        );
        return Err(Failure::new(Exit::Refused, text));
    }
    let name = found.symlink.clone().unwrap_or_else(|| "VOL".into());
    // A device of a past state has its cut behind the volume; both have one state folder.
    let folder = found.volume.as_ref().and_then(|identity| identity.split('@').next());
    let folder = folder
        .map(|folder| context.paths.state_folder().map(|state| state.join(folder)))
        .transpose()?;
    let request = ControlRequest::AddDoor(DoorPlan::parse(&format!("ublk={id}"))?);
    let served = match folder {
        Some(folder) => control::attached(&folder)?.map(|_| folder),
        None => None,
    };
    match served {
        Some(folder) => {
            let AddDoorReply { address, .. } = control::query_any(&folder, &name, &request)?;
            match context.json {
                true => output::json(&serde_json::json!({ "recovered": id, "address": address }))?,
                false => output::line(&format!("{address} has resumed"))?,
            }
            Ok(Exit::Ok)
        }
        None => {
            let text = format!(
                "no process of this user serves the volume of ublk device {id}; start one: sawmill \
                 serve {name} --ublk"
            );
            Err(Failure::new(Exit::NotFound, text))
        }
    }
}
