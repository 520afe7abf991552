//! `sawmill run`: serves a device whose driver is any program, in any language.
//!
//! Invariant: an event that cannot be printed ends the command only while drivers do not know where
//! to connect.
//!
//! Not here: restarting drivers, and the order of doors and driver (`driving`); requests without a
//! driver (`sawmill_driver::host`).

use std::ffi::OsString;
use std::path::Path;

use clap::Args;
use sawmill_doors::DoorPlan;
use sawmill_driver::protocol::ControlFacts;
use sawmill_frontend::nbd::Listen;

use crate::command::Context;
use crate::command::door_options::{DoorOptions, NbdShareOptions};
use crate::daemon;
use crate::driving::{self, DeviceEvent, RunPlan};
use sawmill_console::Console;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_lab::layers::LayerOptions;

/// Serve a device whose driver is another program, and start that program.
///
/// The device and its doors stay when the driver dies: the driver is restarted and gets its
/// unanswered requests again. SIGHUP replaces the running driver: the command starts again. Without
/// a command, drivers start on their own and connect to the printed socket. SIGTERM or SIGINT
/// closes the doors, lets the driver answer and flush everything, and exits with 0; a second signal
/// exits immediately.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// The device's name. Default: the name of the command.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    #[arg(long = "door", value_name = "DOOR", value_parser = parse_door, help = door_help())]
    doors: Vec<DoorPlan>,

    #[command(flatten)]
    more_doors: DoorOptions,

    #[command(flatten)]
    nbd: NbdShareOptions,

    #[command(flatten)]
    device: DeviceOptions,

    /// Fail the device when the driver that this command started dies.
    #[arg(long)]
    no_restart: bool,

    /// An environment variable to pass to the driver although it may be a secret: AWS_*, AZURE_*,
    /// GOOGLE_* and Sawmill's own keys are withheld otherwise. May be repeated.
    #[arg(long, value_name = "NAME")]
    driver_env: Vec<OsString>,

    #[command(flatten)]
    layers: LayerOptions,

    /// The driver, with its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// What the user says about a device in place of its driver.
#[derive(Args)]
pub(super) struct DeviceOptions {
    /// An option of the device; it overrides the driver's own value: size=1073741824, mode=batch,
    /// on_death=fail and others. May be repeated. docs/format/driver.md lists them all.
    #[arg(long = "option", value_name = "NAME=VALUE", value_parser = parse_option)]
    pub(super) options: Vec<(String, String)>,
}

fn door_help() -> String {
    let examples = sawmill_doors::examples();
    format!("A door as one word: {examples}. May be repeated. Default: an NBD Unix socket")
}

fn parse_door(text: &str) -> Result<DoorPlan, String> {
    DoorPlan::parse(text).map_err(|error| Failure::from(error).to_string())
}

fn parse_option(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("'{text}' is not an option; write NAME=VALUE")),
    }
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    daemon::start();
    let name = name_of(arguments)?;
    let folder = context.paths.driver_folder(&name)?;
    let mut doors = arguments.doors.clone();
    doors.extend(arguments.more_doors.plans());
    if doors.is_empty() {
        doors.push(DoorPlan::nbd(Listen::Unix(folder.join("nbd.sock"))));
    }
    let options = arguments.device.options.iter();
    let layers = arguments.layers.clone();
    let plan = RunPlan {
        name,
        folder,
        overrides: options
            .fold(ControlFacts::default(), |facts, (name, value)| facts.with(name, value)),
        doors,
        nbd: arguments.nbd.share(),
        command: arguments.command.clone(),
        passed: arguments.driver_env.clone(),
        restarts: !arguments.no_restart,
        wrapper: Box::new(move |device| layers.around(device)),
    };
    // The reader of the events may be gone, for example a driver that started this host and died.
    // The device stays.
    let on_event = |event: &DeviceEvent<'_>| {
        report_event(context.console(), event).or_else(|failure| unheard(event, failure))
    };
    driving::drive(plan, &mut |event| on_event(event))
}

/// A lost event matters only if drivers do not know yet where to connect.
fn unheard(device_event: &DeviceEvent<'_>, failure: Failure) -> Result<()> {
    match device_event {
        DeviceEvent::Listening { .. } => Err(failure),
        _ => {
            tracing::debug!("cannot print an event: {failure}");
            Ok(())
        }
    }
}

fn name_of(arguments: &Arguments) -> Result<String> {
    if let Some(name) = &arguments.name {
        return Ok(name.clone());
    }
    let program = arguments.command.first().and_then(|program| Path::new(program).file_stem());
    program.and_then(|name| name.to_str()).map(str::to_owned).ok_or_else(|| {
        Failure::usage("the device needs a name: give --name NAME, or a command after --")
    })
}

fn report_event(console: Console, event: &DeviceEvent<'_>) -> Result<()> {
    if console.json {
        return output::json_event(event);
    }
    match event {
        DeviceEvent::Listening { name, socket } => {
            tracing::info!("{name}: drivers connect to {socket}")
        }
        DeviceEvent::Ready { doors, .. } => {
            for door in doors {
                output::line(&door.address)?;
            }
        }
        DeviceEvent::Driver { state, pid, .. } => tracing::info!(pid, "driver {state}"),
        // A failure is reported as an error.
        DeviceEvent::Ended { .. } => {}
    }
    Ok(())
}
