//! `sawmill handoff`: replaces a server by a new process, without disconnecting its users.
//!
//! Not here: starting the new process and moving volumes and doors, which the serving process does
//! (`crate::handoff`).

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::command::Context;
use crate::control;
use crate::control::protocol::{ControlRequest, HandOff};
use crate::handoff::HandOffResult;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::{exact_duration, parse_duration};

/// The time to get ready, unless the user sets one. The old process serves meanwhile.
const READY_TIME_DEFAULT: Duration = Duration::from_secs(30);
/// The longest interruption, unless the user sets one: short, because requests wait that long.
const STALL_TIME_DEFAULT: Duration = Duration::from_secs(5);

/// Replace the process that serves a volume with a new one, of the same or a newer version, without
/// disconnecting clients.
///
/// The new process gets ready while the old one still serves. Then it takes over all volumes and
/// doors of the old process: connections and devices stay, and requests wait a moment. If the new
/// process is not ready in time, fails or dies, the old one resumes. `systemctl reload` does the
/// same.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// A volume that the process serves: a name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// The program that takes over. Default: the file that the old process was started from.
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,

    /// Time for the new process to get ready.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration,
          default_value = exact_duration(READY_TIME_DEFAULT))]
    timeout: Duration,

    /// Longest interruption of service; after it, the old process resumes.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration,
          default_value = exact_duration(STALL_TIME_DEFAULT))]
    stall_max: Duration,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve_cut(&arguments.volume)?;
    let served = control::served(&context.paths.state_folder()?, &address)?;
    let Some((folder, process)) = served else { return Err(control::not_served(&address.name)) };
    // Absolute, because the serving process may run in another folder.
    let binary = arguments.binary.as_ref();
    let binary =
        binary.map(|binary| std::path::absolute(binary).unwrap_or_else(|_| binary.clone()));
    let request = ControlRequest::HandOff(HandOff {
        binary,
        timeout: arguments.timeout,
        stall_max: arguments.stall_max,
    });
    let done: HandOffResult = control::query_any(&folder, &address.name, &request)?;
    if done.unheard {
        let text = format!(
            "process {} took over and then did not report: check that it serves, or start a \
             server; accepted writes are in the journals: {}",
            done.pid,
            done.lost_doors.join("; ")
        );
        return Err(Failure::new(Exit::Unavailable, text));
    }
    if context.json {
        output::json(&done)?;
    } else {
        output::line(&format!(
            "process {} replaced process {}, sawmill {}; requests waited {} ms",
            done.pid, process.pid, done.version, done.stall_ms
        ))?;
        done.lost_doors
            .iter()
            .try_for_each(|door| output::line(&format!("a door was lost: {door}")))?;
    }
    // The volumes are served, but users of a door were lost: a script must notice that.
    Ok(if done.lost_doors.is_empty() { Exit::Ok } else { Exit::Negative })
}
