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

/// The variable with the doors of a driver that names none itself.
pub const DOORS_VARIABLE: &str = "SAWMILL_DOORS";

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

/// The doors of a new device: those that the driver names, otherwise those in the environment.
pub(super) fn doors(doors: &[&str]) -> Result<Vec<String>> {
    let variable = std::env::var(DOORS_VARIABLE).unwrap_or_default();
    let named = doors.iter().copied();
    // What the driver names in its code wins over the environment.
    let doors: Vec<String> = if doors.is_empty() {
        variable.split_whitespace().map(str::to_owned).collect()
    } else {
        named.map(str::to_owned).collect()
    };
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

fn name(options: &Options) -> String {
    options.name.clone().unwrap_or_else(|| {
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
