//! `sawmill driver`: the devices of this user that have drivers, while their hosts run.
//!
//! Invariants: only the host changes a device; these commands ask it. A host that cannot be asked
//! counts as gone and is not listed.
//!
//! Not here: starting a host and its doors (`run`), what a host answers (`sawmill_driver::host`),
//! judging a driver (`conform`).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use sawmill_device::ErrorKind;
use sawmill_driver::protocol::{
    Control, ControlFacts, ControlKind, PACKET_BYTES_MAX, PacketSocket,
};
use serde::Serialize;

use crate::command::Context;
use crate::config::DRIVERS_FOLDER;
use crate::driving::SOCKET;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::human_size;

/// Time for a host to answer what it knows.
const STATUS_TIME_MAX: Duration = Duration::from_secs(5);
/// Time for a host to end its device at once: it waits for no driver, but closes doors.
const END_NOW_TIME_MAX: Duration = Duration::from_secs(30);

/// Show, flush, end and replace devices with drivers (see `sawmill run`).
#[derive(Args)]
pub(in crate::command) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// List the devices that have a running host.
    List,
    /// Print the path of a device's driver socket.
    Socket(Device),
    /// Make the driver flush: everything it has answered becomes durable.
    Flush(Device),
    /// End a device: its doors close; then the driver answers and flushes everything and exits.
    End(End),
    /// Replace the running driver: start the driver's command again.
    Replace(Device),
}

#[derive(Args)]
struct Device {
    /// The device's name.
    #[arg(value_name = "NAME")]
    name: String,
}

#[derive(Args)]
struct End {
    #[command(flatten)]
    device: Device,

    /// Immediately: waiting requests fail, and unflushed writes may be lost.
    #[arg(long)]
    now: bool,
}

/// One device of the list.
#[derive(Serialize)]
struct Row {
    name: String,
    /// `declared`, `waiting`, `running`, `ending` or `ended`.
    state: String,
    size_bytes: Option<u64>,
    driver_pid: Option<u32>,
    host_pid: Option<u32>,
    generation: Option<u64>,
    socket: String,
    doors: Vec<String>,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    match &arguments.action {
        Action::List => return list(context),
        Action::Socket(device) => {
            let socket = socket_of(context, &device.name)?;
            query_host(&socket, &device.name, "status")?;
            let socket = socket.display().to_string();
            match context.json {
                true => output::json(&serde_json::json!({ "socket": socket }))?,
                false => output::line(&socket)?,
            }
        }
        Action::Flush(device) => {
            drop(query_host(&socket_of(context, &device.name)?, &device.name, "flush")?)
        }
        Action::End(end) => {
            let what = if end.now { "fail" } else { "end" };
            drop(query_host(&socket_of(context, &end.device.name)?, &end.device.name, what)?);
        }
        Action::Replace(device) => {
            drop(query_host(&socket_of(context, &device.name)?, &device.name, "replace")?)
        }
    }
    Ok(Exit::Ok)
}

fn socket_of(context: &Context, name: &str) -> Result<PathBuf> {
    Ok(context.paths.driver_folder(name)?.join(SOCKET))
}

/// Sends a question to a host and returns the answer.
fn query_host(socket: &Path, name: &str, what: &str) -> Result<ControlFacts> {
    let patience = match what {
        "status" => Some(STATUS_TIME_MAX),
        "fail" => Some(END_NOW_TIME_MAX),
        // The others wait for work of the driver, which takes as long as it takes.
        _ => None,
    };
    query_within(socket, name, what, patience)
}

/// The same, for so long if there is a limit.
fn query_within(
    socket: &Path,
    name: &str,
    what: &str,
    patience: Option<Duration>,
) -> Result<ControlFacts> {
    let host =
        PacketSocket::connect_within(socket, patience).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                let text =
                    format!("device '{name}' has no running host here; see: sawmill driver list");
                Failure::new(Exit::NotFound, text).caused_by(error)
            }
            _ => error.into(),
        })?;
    host.send(
        &Control::new(ControlKind::Ask, ControlFacts::default().with("ask", what)).encode(),
        &[],
    )?;
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    let unanswered = |error: sawmill_device::Error| {
        Failure::caused(
            Exit::Unavailable,
            format!(
                "the host of '{name}' does not answer; it may wait for users of the device; if it \
                 hangs, end its process"
            ),
            error,
        )
    };
    let Some(packet) = host.receive(&mut buffer).map_err(unanswered)? else {
        return Err(Failure::new(
            Exit::Unavailable,
            format!("the host of '{name}' exited without an answer"),
        ));
    };
    let facts = Control::decode(packet.bytes)?.facts;
    match facts.parsed("errno")? {
        0 => Ok(facts),
        _ => {
            let message = facts.get("message").unwrap_or("the host gave no reason");
            Err(Failure::new(Exit::Unavailable, format!("{name}: {message}")))
        }
    }
}

fn list(context: &Context) -> Result<Exit> {
    let folder = context.paths.state_folder()?.join(DRIVERS_FOLDER);
    let mut rows = Vec::new();
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let socket = entry.path().join(SOCKET);
        // A host that does not answer has exited.
        if let Ok(facts) = query_host(&socket, &name, "status") {
            rows.push(row(name, socket.display().to_string(), &facts));
        }
    }
    rows.sort_by(|one, other| one.name.cmp(&other.name));
    if context.json {
        output::json(&rows)?;
        return Ok(Exit::Ok);
    }
    if rows.is_empty() {
        output::line("no devices with drivers")?;
        return Ok(Exit::Ok);
    }
    let cells = rows.into_iter().map(|row| {
        let number =
            |number: Option<u32>| number.map_or_else(|| "-".into(), |number| number.to_string());
        let size = row.size_bytes.map_or_else(|| "-".into(), human_size);
        vec![row.name, row.state, size, number(row.driver_pid), row.doors.join(", ")]
    });
    output::table(&["device", "state", "size", "driver", "doors"], cells.collect())?;
    Ok(Exit::Ok)
}

fn row(name: String, socket: String, facts: &ControlFacts) -> Row {
    let doors = facts
        .iter()
        .filter(|(name, _)| *name == "door")
        .filter_map(|(_, door)| door.split_once(' '));
    Row {
        state: facts.get("state").unwrap_or("unknown").to_owned(),
        // A device has these facts only after its driver has declared it.
        size_bytes: facts.parsed("size").ok(),
        driver_pid: facts.parsed("driver_pid").ok(),
        host_pid: facts.parsed("host_pid").ok(),
        generation: facts.parsed("generation").ok(),
        doors: doors.map(|(_, address)| address.to_owned()).collect(),
        name,
        socket,
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
    };

    use super::*;

    #[test]
    fn a_host_that_hangs_counts_as_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SOCKET);
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let hung = socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        bind(&hung, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&hung, 0).unwrap();
        // The first waits for an answer; the second cannot even connect, as the queue is full.
        for _ in 0..2 {
            let patience = Some(Duration::from_millis(50));
            let failure = query_within(&path, "disk", "status", patience).unwrap_err();
            assert_eq!(failure.exit(), Exit::Unavailable, "{failure}");
        }
    }
}
