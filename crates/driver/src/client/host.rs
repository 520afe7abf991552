//! The host of a driver: the one that started it, one that is found by name, or one that is started
//! here.
//!
//! Invariant: a host that was started here outlives this process. Not here: what a host is
//! (`crate::host`).

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use sawmill_device::{Error, ErrorKind, Result};

use super::options::Options;
use crate::protocol::SOCKET_VARIABLE;

/// The variable with the host program; the default is `sawmill` on the PATH.
pub const PROGRAM_VARIABLE: &str = "SAWMILL";

/// The variable that says `none` if a driver that no host started is to be its own host.
pub const HOST_VARIABLE: &str = "SAWMILL_HOST";

/// The variable with the name of the device of a driver that gives it none.
pub const NAME_VARIABLE: &str = "SAWMILL_NAME";

/// The variable that says `1` if a driver that is its own host is to take the place of the one that
/// serves the device.
pub const REPLACE_VARIABLE: &str = "SAWMILL_REPLACE";

/// The variable with the doors of a driver that names none itself.
pub const DOORS_VARIABLE: &str = "SAWMILL_DOORS";

/// The longest name of a device.
const NAME_BYTES_MAX: usize = 128;

/// A host that was started here.
pub(super) struct Host {
    pub(super) socket: PathBuf,
    child: Child,
    events: BufReader<ChildStdout>,
}

/// The socket of the host that started this process, or of the host that the options name.
pub(super) fn socket_path(options: &Options) -> Option<PathBuf> {
    let variable = || std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty());
    options.socket.clone().or_else(|| variable().map(PathBuf::from))
}

/// Whether this driver is to be its own host, unless one has started it.
pub(super) fn is_own(options: &Options) -> Result<bool> {
    let variable = std::env::var_os(HOST_VARIABLE).unwrap_or_default();
    match (options.is_own_host, variable.to_str()) {
        (Some(is_own), _) => Ok(is_own),
        (None, Some("")) => Ok(false),
        (None, Some("none")) => Ok(true),
        (None, _) => {
            let variable = variable.display();
            let text = format!("{HOST_VARIABLE}={variable}: write none, or leave it out");
            Err(Error::new(ErrorKind::Invalid, text))
        }
    }
}

/// Whether this driver, its own host, is to take the place of the one that serves the device.
pub(super) fn replaces(options: &Options) -> Result<bool> {
    let variable = std::env::var_os(REPLACE_VARIABLE).unwrap_or_default();
    match variable.to_str() {
        Some("" | "0") => Ok(options.replaces),
        Some("1") => Ok(true),
        _ => {
            let text =
                format!("{REPLACE_VARIABLE}={}: write 1, or leave it out", variable.display());
            Err(Error::new(ErrorKind::Invalid, text))
        }
    }
}

/// The doors of a new device: those that the driver names, otherwise those in the environment.
pub(super) fn doors(doors: &[&str]) -> Result<Vec<String>> {
    let doors = named_doors(doors);
    if doors.is_empty() {
        let text = format!(
            "no host started this driver, and it names no door; name one in {DOORS_VARIABLE}"
        );
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("{text}, for example nbd=unix:/path or ublk"),
        ));
    }
    Ok(doors)
}

/// The doors that the driver names, otherwise those in the environment: maybe none.
pub(super) fn named_doors(doors: &[&str]) -> Vec<String> {
    // What the driver names in its code wins over the environment.
    if doors.is_empty() {
        let variable = std::env::var(DOORS_VARIABLE).unwrap_or_default();
        return variable.split_whitespace().map(str::to_owned).collect();
    }
    doors.iter().copied().map(str::to_owned).collect()
}

/// The driver socket of the running device with this name.
///
/// # Errors
/// `NotFound` if no device has this name.
pub fn find(name: &str) -> Result<PathBuf> {
    let output =
        Command::new(program()).args(["driver", "socket", name]).stdin(Stdio::null()).output();
    let output = output.map_err(no_program)?;
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.success() && !path.is_empty() {
        return Ok(path.into());
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::new(
        ErrorKind::NotFound,
        format!("cannot find a device {name} with a driver: {message}"),
    ))
}

impl Host {
    /// Starts a host with these doors.
    ///
    /// # Errors
    /// `NotFound` if the program is missing; the error of the host.
    pub(super) fn start(doors: &[String], options: &Options) -> Result<Self> {
        let mut command = Command::new(program());
        command.args(["run", "--json", "--name"]).arg(name(options));
        for door in doors {
            command.arg("--door").arg(door);
        }
        for (name, value) in options.facts.iter() {
            command.arg("--option").arg(format!("{name}={value}"));
        }
        command.env_remove(SOCKET_VARIABLE).stdin(Stdio::null()).stdout(Stdio::piped());
        if options.is_quiet {
            command.stderr(Stdio::null());
        }
        // The device must not end with the terminal or the process group of its driver.
        let mut child = sawmill_sys::detach(&mut command).spawn().map_err(no_program)?;
        let out = child.stdout.take();
        let out =
            out.ok_or_else(|| Error::new(ErrorKind::Internal, "the host has no standard output"))?;
        let mut host = Host { socket: PathBuf::new(), child, events: BufReader::new(out) };
        while let Some(event) = host.next_event() {
            match text(&event, "event") {
                "listening" => {
                    host.socket = PathBuf::from(text(&event, "socket"));
                    return Ok(host);
                }
                "ended" => return Err(host.failed(text(&event, "message"))),
                _ => {}
            }
        }
        Err(host.failed("no reason was given; see its log"))
    }

    fn next_event(&mut self) -> Option<serde_json::Value> {
        let mut line = String::new();
        self.events.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
        serde_json::from_str(&line).ok()
    }

    /// Waits until the host has ended, and returns the reason.
    pub(super) fn why(mut self, error: Error) -> Error {
        while let Some(event) = self.next_event() {
            if text(&event, "event") == "ended" && text(&event, "outcome") == "failed" {
                return self.failed(text(&event, "message"));
            }
        }
        error
    }

    fn failed(&mut self, message: &str) -> Error {
        // It has ended, or is about to; the message has the reason.
        let _ = self.child.wait();
        Error::new(ErrorKind::Refused, format!("the host ended: {message}"))
    }
}

fn text<'a>(event: &'a serde_json::Value, name: &str) -> &'a str {
    event.get(name).and_then(serde_json::Value::as_str).unwrap_or_default()
}

/// The folder of a device with this name, where `sawmill driver` looks for it.
pub(super) fn device_folder(name: &str) -> Result<PathBuf> {
    let bad = |text: String| Err(Error::new(ErrorKind::Invalid, text));
    // The name becomes a folder and must not lead elsewhere; commands accept no other.
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let is_well_formed = !name.starts_with('.') && name.chars().all(allowed);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !is_well_formed {
        return bad(format!(
            "'{name}' is not a valid name; use 1 to {NAME_BYTES_MAX} letters, digits, '_', '-' and \
             '.', not starting with '.'"
        ));
    }
    let absolute = |variable: &str| {
        std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
    };
    let state_home = absolute("XDG_STATE_HOME");
    let state_home = state_home.or_else(|| absolute("HOME").map(|home| home.join(".local/state")));
    match state_home {
        Some(folder) => Ok(folder.join("sawmill/drivers").join(name)),
        None => {
            bad("neither HOME nor XDG_STATE_HOME is set; set one to an absolute path".to_owned())
        }
    }
}

/// The name that the options give the device, or the environment.
pub(super) fn given_name(options: &Options) -> Option<String> {
    let variable = || std::env::var(NAME_VARIABLE).ok().filter(|name| !name.is_empty());
    options.name.clone().or_else(variable)
}

/// The name of the device: the one that was given, or this program's name and process.
pub(super) fn name(options: &Options) -> String {
    given_name(options).unwrap_or_else(|| {
        let program = std::env::args_os().next().unwrap_or_default();
        let stem = Path::new(&program).file_stem().map(|stem| stem.to_string_lossy().into_owned());
        format!("{}-{}", stem.unwrap_or_else(|| "driver".to_owned()), std::process::id())
    })
}

fn program() -> std::ffi::OsString {
    std::env::var_os(PROGRAM_VARIABLE).unwrap_or_else(|| "sawmill".into())
}

fn no_program(error: std::io::Error) -> Error {
    let program = program();
    let text = format!(
        "cannot start the host {}: {error}; install sawmill, or name it in {PROGRAM_VARIABLE}",
        program.to_string_lossy()
    );
    Error::new(ErrorKind::NotFound, text).with_source(error)
}
